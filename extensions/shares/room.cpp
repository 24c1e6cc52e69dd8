#include <algorithm>
#include <iterator>

#include "gpt/room_options.h"

namespace {

struct ShareList {
  std::string text;  // auto, or numbers with commas
};

std::string shares_problem(const StepOptions& o) {
  if (o.shares.empty()) return "";
  if (o.mesh.pp > 1) return "--shares with --pp: a pipeline's ranks wait for each other in each micro-batch; leave one of them out";
  if (o.lora.is_on() && o.zero >= 2) return "--shares with --lora-rank and --zero 2 or 3 is not there yet: choose --zero 0 or 1";
  if (o.measures_shares && (o.global_batch % o.micro_batch != 0 || o.global_batch / o.micro_batch < o.mesh.dp))
    return concat("--shares auto: --global-batch ", o.global_batch, " must be a multiple of --micro-batch ", o.micro_batch, ", and have one for each of ",
                  o.mesh.dp, " data-parallel ranks");
  if (int(o.shares.size()) != o.mesh.dp)
    return concat("--shares has ", o.shares.size(), " numbers, and there are ", o.mesh.dp, " data-parallel ranks: give one for each");
  const int64_t at_once = o.all_shares() * o.micro_batch;
  if (at_once > most_samples)
    return concat("--shares: ", at_once, " samples at least, with --micro-batch ", o.micro_batch, ", are more than ", most_samples, ": lower them");
  if (o.global_batch % at_once != 0)
    return concat("--global-batch ", o.global_batch, " is no multiple of ", at_once, ", --micro-batch ", o.micro_batch,
                  " times the sum of --shares: choose ", (o.global_batch / at_once + 1) * at_once, ", or other shares");
  return "";
}

}  // namespace

Room shares_room = {
    .name = "shares",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--shares", o.of<ShareList>().text, [](const std::string& list) { return list == "auto" ? "" : list_of(in_range(1, 1000))(list); },
          "micro-batches per step of each data-parallel rank: 3,3,2 where the third is slower; auto: by their speed "
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
    .batch_problem = shares_problem,
};
