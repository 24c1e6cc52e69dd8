// Which algorithm a matrix product takes, and which of two ways to do a piece of work: chosen by timing.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>

// Choices by the name of the product, made when it is first asked for. The same job gives the same bits only if all
// ranks choose alike, and a resumed run as the one before: so choices are kept in checkpoints.
struct GemmChoices {
  using Choose = std::function<std::string()>;
  std::map<std::string, std::string> known;
  std::function<std::string(const Choose&)> agree;  // with the other ranks, if there are any
  bool by_timing = true;                            // false: for shapes that hardly come again

  // What is known of `name`; if nothing is, what choose() finds, or `untimed`.
  std::string choose(const std::string& name, const std::string& untimed, const Choose& choose) {
    const auto found = known.find(name);
    if (found != known.end()) return found->second;
    if (!by_timing) return untimed;
    return known[name] = agree ? agree(choose) : choose();
  }
};
inline GemmChoices& gemm_choices() {
  static GemmChoices instance;
  return instance;
}

// While it lives, nothing is timed.
class Untimed {
 public:
  Untimed() : before_(std::exchange(gemm_choices().by_timing, false)) {}
  ~Untimed() { gemm_choices().by_timing = before_; }
  Untimed(const Untimed&) = delete;
  Untimed& operator=(const Untimed&) = delete;

 private:
  bool before_;
};
