// What a run should be: how many tokens, how large a batch, how often to save. runtime/planner/rules.md has the
// formulas.
#pragma once

#include <string>

// Tokens that suit a number of parameters: 20 for each (Chinchilla, arXiv:2203.15556).
double suitable_tokens(double parameters);

// The loss that these parameters and tokens lead to, nats a token, on that paper's data and vocabulary (its equation
// (10)).
double expected_loss(double parameters, double tokens);

// The critical batch size (arXiv:1812.06162) at this loss, tokens: a larger batch saves few steps. As arXiv:2001.08361
// measured it.
double critical_batch(double loss);

// How often to save, and what is lost all the same.
struct Saving {
  double interval = 0;  // seconds from a checkpoint to the next one
  double lost = 0;      // share of all time: saving, restarts, and steps trained again; 1: the run never ends
};
// seconds: that training waits for a checkpoint; mean: until an interruption (Young 1974, Daly 2006); run: the whole of
// training
Saving saving_for(double seconds, double mean, double run);

// Advice for a step of `samples` samples, if the learning rate was found with `before`; it is never followed silently.
// Two lines. loss: at the end
std::string batch_hint(double samples, double before, double seq_len, double loss, double learning_rate);
