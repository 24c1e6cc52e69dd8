#include "runtime/planner/rules.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "parallel/processes/text.h"
#include "runtime/reports/console.h"

double suitable_tokens(double parameters) { return 20 * parameters; }

double expected_loss(double parameters, double tokens) {
  return 1.69 + 406.4 / std::pow(parameters, 0.34) + 410.7 / std::pow(tokens, 0.28);
}

double critical_batch(double loss) { return 2e8 / std::pow(loss, 1 / 0.21); }

Saving saving_for(double seconds, double mean, double run) {
  constexpr double restart = 300;  // a new host, the program's start, the checkpoint's way back: assumed
  const double x = seconds / (2 * mean);
  const double best = x < 1 ? std::sqrt(2 * seconds * mean) * (1 + std::sqrt(x) / 3 + x / 9) - seconds : mean;
  const double interval = std::min(best, run);
  const double trained = interval / (mean * std::exp(restart / mean) * std::expm1((interval + seconds) / mean));
  return {interval, trained > 0.01 ? 1 - trained : 1};
}

std::string batch_hint(double samples, double before, double seq_len, double loss, double learning_rate) {
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
