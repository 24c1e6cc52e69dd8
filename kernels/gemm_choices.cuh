// Which algorithm a matrix product takes, and which of two ways to do the same: the fastest, found by timing when it is
// first asked for.
//
// The same job gives the same bits only if all ranks choose alike, and a resumed run like the one before. So rank 0
// times, the others take what it found, and checkpoints keep the choices. Ranks meet to agree on a name that is not
// known yet, and all of them must come to that meeting, or none. This is so because
//   - names depend on shapes and on rank 0's card and library, never on a rank's own;
//   - all ranks ask for the same names in the same order, and what is known came from an agreement or from a checkpoint
//     that all of them read;
//   - a rank whose card can't do what was chosen does the next best by itself, and asks nobody (Untimed).
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/device/common.cuh"
#include "kernels/device/event.cuh"

struct GemmChoices {
  using Choose = std::function<std::string()>;
  std::string library;  // rank 0's gemm_library(): names begin with it
  std::map<std::string, std::string> known;
  std::function<std::string(const Choose&)> agree;  // on what rank 0 chooses, if there are other ranks
  bool by_timing = true;

  // All ranks come here before their first product, each with its own gemm_library().
  void use_library(const std::string& own) {
    library = agree ? agree([&] { return own; }) : own;
  }
  std::string full_name(const std::string& name) const { return library + ' ' + name; }
  bool is_to_be_timed(const std::string& name) const { return by_timing && !known.contains(full_name(name)); }

  // What is known of `name`; if nothing is, what choose() finds, or nothing ("") while nothing is timed.
  std::string choose(const std::string& name, const Choose& choose) {
    if (is_to_be_timed(name)) return known[full_name(name)] = agree ? agree(choose) : choose();
    const auto found = known.find(full_name(name));
    return found == known.end() ? "" : found->second;
  }
};
inline GemmChoices& gemm_choices() {
  static GemmChoices instance;
  return instance;
}

// While it lives, nothing is timed: for shapes that hardly come again, and for work that can't be done twice.
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

// Whether to do `name` by fused() or by separate(), which do the same, and may be done again and again, as both are
// timed. fused() returns false, and does nothing, if it can't.
template <class Fused, class Separate>
bool fusing_is_faster(const std::string& name, Fused fused, Separate separate, cudaStream_t stream) {
  bool can_fuse = false;
  if (gemm_choices().is_to_be_timed(name)) {  // all ranks choose the algorithms of each before rank 0 times the two
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
