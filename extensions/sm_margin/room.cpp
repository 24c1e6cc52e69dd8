#include "gpt/room_options.h"

Room sm_margin_room = {
    .name = "sm_margin",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--ctas", o.sms.ctas, in_range(-1, 64),
          "most CUDA blocks of a collective of tp, cp and data, each of which takes a multiprocessor; 0: NCCL "
          "chooses; -1: 16, 16 and 8");
      add(app, "--sm-margin", o.sms.margin, in_range(-1, 128),
          "multiprocessors, at most half, that kernels leave to collectives under way; -1: the most that the groups may take");
    },
    .refuse_on_ranks = [](const Options& o) {
      if (o.mesh.ranks() == 1 && (o.sms.ctas >= 0 || o.sms.margin >= 0))
        usage_error(o.sms.ctas >= 0 ? "--ctas" : "--sm-margin", " is for collectives, and with one rank there are none: leave it out");
    },
};
