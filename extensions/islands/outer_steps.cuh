// The time of outer steps (extensions/islands/islands.cuh): after the update of each H-th step (--local-steps), and of the last one.
// With --outer-delay N an outer step ends N steps after it has begun:
//
//   step   H: begins  H+1 ...  H+N: ends   ...   2H: begins ...
//
// but at once where all islands must have the same weights: before the host reads them, and at the end.
#pragma once

#include "gpt/model.cuh"

class OuterSteps {
 public:
  OuterSteps(const OuterOptions& options, Model& model) : options_(options), model_(model) {}

  // To be called after each update, unless outer steps are off. step: number of updates, this one included; is_due: does an
  // outer step follow? at_once: must it end before anything else?
  void after_update(size_t step, bool is_due, bool at_once) {
    if (is_due || step % size_t(options_.local_steps) == size_t(options_.delay)) finish();
    if (!is_due) return;
    // These sums go first, because the host reads them when the step has ended.
    model_.step_sums().add_up_over_islands(&model_.trained_store().summary()->norm);
    is_under_way_ = options_.delay > 0 && !at_once;
    if (is_under_way_) model_.trained_store().start_outer_step();
    else model_.trained_store().outer_step(false);
  }

  // Ends the outer step that is under way, if there is one.
  void finish() {
    if (is_under_way_) model_.trained_store().outer_step(true);
    is_under_way_ = false;
  }

 private:
  OuterOptions options_;
  Model& model_;
  bool is_under_way_ = false;
};
