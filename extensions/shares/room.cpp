#include "gpt/room.h"

#include "gpt/option_rules.h"
#include "gpt/option_values.h"

namespace {

void add_share_options(CLI::App& app, Options& o) {
  add(app, "--shares", o.share_list, [](const std::string& list) { return list == "auto" ? "" : list_of(in_range(1, 1000))(list); },
      "of a step's micro-batches, one for each data-parallel rank: 3,3,2 where the third is slower; auto: by their speed "
      "(default: all the same)")->type_name("INT,...")->default_str("");
}

void refuse_share_options(const Refusals& refuse, const Options& o) {
  refuse(o.generate, {"--shares"}, "beside --generate: shares are of training; leave one of them out");
}

}  // namespace

extern const Room shares_room;
const Room shares_room = {"shares", add_share_options, refuse_share_options};
