// Chooses the fastest algorithm of a matrix product, and the faster of two ways to compute the same.
//
// The same job gives the same bits only if all ranks make the same choices, at each start. So choices are made before
// the first step, in the rehearsal (gpt/rehearsal.cuh): the first rank of each pipeline stage chooses for the products
// of its stage, then every rank is told all choices. A checkpoint's choices come first, then those of an earlier start;
// only the other products are timed. Nothing is timed afterwards: a product without a choice takes the library's
// recommendation. A rank whose card can't run the chosen algorithm takes the next best by itself.
#pragma once

#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/device/common.cuh"
#include "kernels/device/event.cuh"
#include "kernels/device/multiprocessors.h"

// Names and choices from text, a line for each of the two; where texts differ, the first one holds.
inline std::map<std::string, std::string> choices_of(const std::vector<std::string>& texts) {
  std::map<std::string, std::string> choices;
  for (const std::string& text : texts) {
    std::istringstream lines(text);
    for (std::string name, choice; std::getline(lines, name) && std::getline(lines, choice);) choices.try_emplace(name, choice);
  }
  return choices;
}
inline std::string lines_of(const std::map<std::string, std::string>& choices) {
  std::ostringstream lines;
  for (const auto& [name, choice] : choices) lines << name << '\n' << choice << '\n';
  return lines.str();
}

struct GemmChoices {
  std::string library = "";  // gemm_library(), rank 0's from the rehearsal on: names begin with it
  std::map<std::string, std::string> known = {};
  std::map<std::string, std::string> earlier = {};  // choices of earlier starts, for the rank that times
  bool times = false;        // does this rank make the missing choices, from an earlier start or by time?
  bool takes_first = false;  // it never chooses by time, but takes the library's recommendation
  int lessons = 0;           // number of calls of learn(): results of choices before the last call are stale

  // The name contains the margin of SMs: the fastest algorithm on all SMs may not be the fastest on fewer.
  std::string full_name(const std::string& name) const {
    const std::string margin = SmMargin::current() > 0 ? ", margin " + std::to_string(SmMargin::current()) : "";
    return library + margin + ' ' + name;
  }

  // Returns the choice for `name`. If there is none, this rank makes one if it times, by choose() if no earlier start
  // has made it; else returns "".
  template <class Choose>
  std::string choose(const std::string& name, Choose choose) {
    const std::string full = full_name(name);
    if (const auto found = known.find(full); found != known.end()) return found->second;
    if (!times) return "";
    const auto found = earlier.find(full);
    return known[full] = found != earlier.end() ? found->second : takes_first ? "first" : choose();
  }

  // From now on exactly the choices of these texts are known.
  void learn(const std::vector<std::string>& texts) {
    known = choices_of(texts);
    ++lessons;
  }
};
inline GemmChoices& gemm_choices() {
  static GemmChoices instance;
  return instance;
}

// Is fused() faster than separate()? Both compute the same, and where they are timed it must be possible to call them
// again and again. fused() returns false, and does nothing, if it can't do the work. `name` stands for this choice.
template <class Fused, class Separate>
bool fusing_is_faster(const std::string& name, Fused fused, Separate separate, cudaStream_t stream) {
  return gemm_choices().choose(name, [&] {
    const Unobserved unobserved;
    if (!fused()) return "separate";
    separate();  // both have chosen their algorithms now
    const std::vector<double> seconds = best_seconds_of_each(stream, 2, [&](size_t way) {
      if (way == 0) fused();
      else separate();
    });
    return seconds[0] < seconds[1] ? "fused" : "separate";
  }) == "fused";
}
