// Chooses the fastest algorithm of a matrix product, and the faster of two ways to compute the same.
//
// The same job gives the same bits only if all ranks make the same choices, at each start. So choices are made before
// the first step, in the rehearsal (gpt/rehearsal.cuh): the first rank of each pipeline stage chooses for
// whatever its stage computes, then every rank is told all choices. What a checkpoint holds comes first, then what was
// timed in an earlier start, and only the rest is timed. Nothing is timed later: a product that has no choice takes
// what the library recommends. A rank whose card can't do what was chosen takes the next best by itself.
#pragma once

#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/device/common.cuh"
#include "kernels/device/event.cuh"
#include "kernels/device/multiprocessors.h"

struct GemmChoices {
  std::string library = "";  // gemm_library(), rank 0's from the rehearsal on: names begin with it
  std::map<std::string, std::string> known = {};
  std::map<std::string, std::string> earlier = {};  // those of earlier starts, for the rank that times
  bool times = false;        // does this rank choose what is not known: as an earlier start did, or by time?
  bool takes_first = false;  // it never chooses by time, but takes what the library recommends
  int lessons = 0;           // number of calls of learn(): what was made of choices before is out of date

  // With the margin of SMs: what is fastest on all of them may not be on fewer.
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

  // All choices as text: a line with the name and a line with the choice, for each.
  std::string text() const {
    std::ostringstream lines;
    for (const auto& [name, choice] : known) lines << name << '\n' << choice << '\n';
    return lines.str();
  }

  // From now on exactly the choices of these texts are known; where they differ, the first text holds.
  void learn(const std::vector<std::string>& texts) {
    known.clear();
    for (const std::string& text : texts) {
      std::istringstream lines(text);
      for (std::string name, choice; std::getline(lines, name) && std::getline(lines, choice);) known.try_emplace(name, choice);
    }
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
