#include <algorithm>
#include <iterator>

#include "gpt/room_options.h"

namespace {

struct ShareList {
  std::string text;  // auto, or numbers with commas
};

}  // namespace

Room shares_room = {
    .name = "shares",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--shares", o.of<ShareList>().text, [](const std::string& list) { return list == "auto" ? "" : list_of(in_range(1, 1000))(list); },
          "of a step's micro-batches, one for each data-parallel rank: 3,3,2 where the third is slower; auto: by their speed "
          "(default: all the same)")->type_name("INT,...")->default_str("");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(o.generate, {"--shares"}, "beside --generate: shares are of training; leave one of them out");
    },
    .complete = [](Options& o) {
      const std::string& list = o.of<ShareList>().text;
      o.measures_shares = list == "auto";
      if (!list.empty() && !o.measures_shares)
        std::ranges::transform(words_of(list), std::back_inserter(o.shares), [](const std::string& word) { return std::stoi(word); });
    },
};
