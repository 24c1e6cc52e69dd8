// Recommended sizes of a run: how many tokens, how large a batch, how often to save. runtime/planner/rules.md has the
// formulas.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "gpt/base/text.h"
#include "runtime/reports/console.h"

// Tokens that suit a number of parameters: 20 for each (Chinchilla, arXiv:2203.15556).
inline double suitable_tokens(double parameters) { return 20 * parameters; }

// The loss that these parameters and tokens lead to, nats a token, on that paper's data and vocabulary (its equation
// (10)).
inline double expected_loss(double parameters, double tokens) {
  return 1.69 + 406.4 / std::pow(parameters, 0.34) + 410.7 / std::pow(tokens, 0.28);
}

// The critical batch size (arXiv:1812.06162) at this loss, tokens: a larger batch saves few steps. The formula is
// arXiv:2001.08361's.
inline double critical_batch(double loss) { return 2e8 / std::pow(loss, 1 / 0.21); }

// How often to save, and the time that is lost nevertheless.
struct Saving {
  double interval = 0;  // seconds from a checkpoint to the next one
  double lost = 0;      // share of all time: saving, restarts, and steps trained again; 1: the run never ends
};
// seconds: wait for a checkpoint; mean: time until an interruption (Young 1974, Daly 2006); run: time of the whole
// training
inline Saving saving_for(double seconds, double mean, double run) {
  constexpr double restart = 300;  // a new host, the program's start, the checkpoint's way back: assumed
  const double x = seconds / (2 * mean);
  const double best = x < 1 ? std::sqrt(2 * seconds * mean) * (1 + std::sqrt(x) / 3 + x / 9) - seconds : mean;
  const double interval = std::min(best, run);
  const double trained = interval / (mean * std::exp(restart / mean) * std::expm1((interval + seconds) / mean));
  return {interval, trained > 0.01 ? 1 - trained : 1};
}

// Advice for a step of `samples` samples, if the learning rate was found with `before`; it is never followed silently.
// Two lines. loss: at the end
inline std::string batch_hint(double samples, double before, double seq_len, double loss, double learning_rate) {
  const double tokens = samples * seq_len, critical = critical_batch(loss), times = samples / before;
  const double unit = std::pow(10, std::floor(std::log10(critical)) - 1);  // two digits
  return formatted("hint      a step's %s tokens are %s the critical batch size, about %s tokens at a loss of %.2f "
                   "(arXiv:1812.06162, 2001.08361)\n"
                   "hint      if --lr %g is right for %g samples, %.3g is for these by the square-root rule "
                   "(Adam, arXiv:2205.10287), %.3g by the linear one (1706.02677); nothing was changed",
                   with_commas(tokens).c_str(), tokens > critical ? "above" : "below",
                   with_commas(std::round(critical / unit) * unit).c_str(), loss, learning_rate, before,
                   learning_rate * std::sqrt(times), learning_rate * times);
}
