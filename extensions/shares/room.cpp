#include "gpt/room.h"

#include <algorithm>
#include <iterator>

#include "gpt/option_rules.h"
#include "gpt/option_values.h"

namespace {

struct ShareList {
  std::string text;  // auto, or numbers with commas
};

void add_share_options(CLI::App& app, Options& o) {
  add(app, "--shares", o.of<ShareList>().text, [](const std::string& list) { return list == "auto" ? "" : list_of(in_range(1, 1000))(list); },
      "of a step's micro-batches, one for each data-parallel rank: 3,3,2 where the third is slower; auto: by their speed "
      "(default: all the same)")->type_name("INT,...")->default_str("");
}

void refuse_share_options(const Refusals& refuse, const Options& o) {
  refuse(o.generate, {"--shares"}, "beside --generate: shares are of training; leave one of them out");
}

void complete_share_options(const Refusals&, Options& o) {
  const std::string& list = o.of<ShareList>().text;
  o.measures_shares = list == "auto";
  if (!list.empty() && !o.measures_shares)
    std::ranges::transform(words_of(list), std::back_inserter(o.shares), [](const std::string& word) { return std::stoi(word); });
}

}  // namespace

extern const Room shares_room;
const Room shares_room = {.name = "shares", .add_options = add_share_options, .refuse_together = refuse_share_options, .complete = complete_share_options};
