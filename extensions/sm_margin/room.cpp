#include "gpt/room.h"

#include "gpt/option_values.h"

namespace {

void add_sm_margin_options(CLI::App& app, Options& o) {
  add(app, "--ctas", o.sms.ctas, in_range(-1, 64),
      "most CUDA blocks of a collective of tp, cp and data, each of which takes a multiprocessor; 0: as many as NCCL "
      "likes; -1: 16, 16 and 8");
  add(app, "--sm-margin", o.sms.margin, in_range(-1, 128),
      "multiprocessors, at most half, that kernels leave to collectives under way; -1: what the groups may take");
}

}  // namespace

extern const Room sm_margin_room;
const Room sm_margin_room = {"sm_margin", add_sm_margin_options};
