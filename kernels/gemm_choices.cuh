// Chooses the fastest algorithm of a matrix product, and the faster of two ways to compute the same, by timing them at
// the first use.
//
// The same job gives the same bits only if all ranks make the same choices, and a resumed run the same as the run
// before. So one rank times, the others take its choice, and checkpoints keep all choices. The stages of a pipeline have
// different products, and come to them at different times. So each stage chooses for itself: what follows is about the
// ranks of one stage, and the first of them is its rank 0.
//
// A choice has a name. For a name that is not known yet the ranks call a collective (`agree`), which either all of them
// must enter, or none. This holds because
//   - names depend on the stage, on shapes and on rank 0's card and library, never on the card of another rank;
//   - all ranks ask for the same names in the same order, and known choices came from a collective or from a checkpoint
//     that all of them read;
//   - a rank whose card can't do what was chosen takes the next best by itself, without a collective (Untimed).
#pragma once

#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "kernels/device/common.cuh"
#include "kernels/device/event.cuh"

struct GemmChoices {
  using Choose = std::function<std::string()>;
  std::string library;  // rank 0's gemm_library(): names begin with it
  std::string stage;    // then comes this, "stage 1 of 4 "; empty: there is one stage
  std::map<std::string, std::string> known;
  std::function<std::string(const Choose&)> agree;  // collective: returns rank 0's choice; empty: there is one rank
  bool by_timing = true;                            // false: time nothing (Untimed)

  // Collective, before the first product. own: this rank's gemm_library().
  void use_library(const std::string& own) {
    library = agree ? agree([&] { return own; }) : own;
  }
  std::string full_name(const std::string& name) const { return library + ' ' + stage + name; }
  bool is_to_be_timed(const std::string& name) const { return by_timing && !known.contains(full_name(name)); }

  // Returns the known choice for `name`. If there is none, calls choose() on rank 0, or returns "" while by_timing is
  // false.
  std::string choose(const std::string& name, const Choose& choose) {
    if (is_to_be_timed(name)) return known[full_name(name)] = agree ? agree(choose) : choose();
    const auto found = known.find(full_name(name));
    return found == known.end() ? "" : found->second;
  }

  // Learns what the other stages have chosen, before rank 0 of the job saves it. Collective over all ranks.
  // all_gather(mine): returns the texts of all ranks.
  void share(const std::function<std::vector<std::string>(const std::string&)>& all_gather) {
    if (stage.empty()) return;
    std::ostringstream mine;
    for (const auto& [name, choice] : known) mine << name << '\n' << choice << '\n';
    for (const std::string& text : all_gather(mine.str())) {
      std::istringstream lines(text);
      for (std::string name, choice; std::getline(lines, name) && std::getline(lines, choice);) known.try_emplace(name, choice);
    }
  }
};
inline GemmChoices& gemm_choices() {
  static GemmChoices instance;
  return instance;
}

// From its construction to its destruction nothing is timed: for shapes that hardly come again, and for work that can't
// be done twice.
class Untimed {
 public:
  explicit Untimed(bool wanted = true)
      : before_(std::exchange(gemm_choices().by_timing, gemm_choices().by_timing && !wanted)) {}
  ~Untimed() { gemm_choices().by_timing = before_; }
  Untimed(const Untimed&) = delete;
  Untimed& operator=(const Untimed&) = delete;

 private:
  bool before_;
};

// Is fused() faster than separate()? Both compute the same, and are timed, so it must be possible to call them again
// and again. fused() returns false, and does nothing, if it can't do the work. `name` stands for this choice.
template <class Fused, class Separate>
bool fusing_is_faster(const std::string& name, Fused fused, Separate separate, cudaStream_t stream) {
  bool can_fuse = false;
  if (gemm_choices().is_to_be_timed(name)) {  // all ranks choose the algorithms of both before rank 0 times the two
    const Unobserved unobserved;
    can_fuse = fused();
    separate();
  }
  return gemm_choices().choose(name, [&] {
    const Unobserved unobserved;
    if (!can_fuse) return "separate";
    const std::vector<double> seconds = best_seconds_of_each(stream, 2, [&](size_t way) {
      if (way == 0) fused();
      else separate();
    });
    return seconds[0] < seconds[1] ? "fused" : "separate";
  }) == "fused";
}
