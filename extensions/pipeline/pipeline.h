// Pipeline schedules: the actions of a rank in a step, and their order (gpt/actions.h). The layers are cut into chunks, one after
// the other; each stage of the pipeline has one chunk or several. With p stages of v chunks, A micro-batches, F the time of a stage's
// forward, B of its backward, I of the half that computes gradients of inputs, and W of that for gradients of weights:
//
//   schedule                                  bubble                                    slots on stage r
//   gpipe        Huang et al., 1811.06965     (p-1)(F+B)                                A
//   1f1b         Narayanan et al., 1806.03377 (p-1)(F+B)                                min(A, p-r)
//   interleaved  Narayanan et al., 2104.04473 (p-1)(F+B)/v                              min(vA, 2(p-1-r) + (v-1)p + 1)
//   zb           ZB-H1, Qi et al., 2401.10241 (p-1)(F+I) - (min(A,p)-1)·min(F,I,W)      min(A, p)
//
// The bubble is the idle time of each stage: a step takes A(F+B) plus the bubble. With A >= p, and W no longer than F
// and I, the bubble of zb is (p-1)(F+I-W). dev/pipeline_simulator.h plays schedules; test/pipeline/test_pipeline.cpp compares
// them with this table.
//
// In every schedule the backwards of a chunk, or their halves, come in the order of micro-batches 0 ... A-1. Gradients
// are summed up in this order, so they have the same bits as on one rank.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gpt/actions.h"
#include "gpt/base/error.h"

// ---- the schedules: the order of actions

// Forward of all micro-batches, in groups of `stages` micro-batches: a group passes the first chunk, then the second,
// and so on; then comes the next group.
inline Actions forward_order(const Stage& stage, int micro_batches) {
  Actions actions;
  for (int begin = 0; begin < micro_batches; begin += stage.stages)
    for (int chunk = 0; chunk < stage.chunks; ++chunk)
      for (int i = begin; i < std::min(begin + stage.stages, micro_batches); ++i)
        actions.push_back({Work::forward, i, chunk});
  return actions;
}

struct Delayed {
  Work work;
  int delay;  // turns after the forward
};

// In turn t a stage does, in the order of `works`, the t-th forward of the order above, and each other work on the
// micro-batch whose forward was in turn t − delay, with the chunks in reverse order. Stage 1 of 4 with 4 micro-batches:
//
//   1f1b   F0 F1 F2 B0 F3 B1 B2 B3
//   zb     F0 F1 F2 I0 F3 I1 W0 I2 W1 I3 W2 W3
inline Actions in_turns(const Stage& stage, int micro_batches, const std::vector<Delayed>& works) {
  const Actions order = forward_order(stage, micro_batches);
  const int count = int(order.size()), longest = std::ranges::max(works, {}, &Delayed::delay).delay;
  Actions actions;
  for (int turn = 0; turn < count + longest; ++turn)
    for (const auto& [work, delay] : works) {
      if (turn < delay || turn >= delay + count) continue;
      const Action& next = order[size_t(turn - delay)];
      const int chunk = work == Work::forward ? next.chunk : stage.chunks - 1 - next.chunk;
      actions.push_back({work, next.micro_batch, chunk});
    }
  return actions;
}

// All forwards, then all backwards.
inline Actions gpipe(const Stage& stage, int micro_batches) {
  return in_turns(stage, micro_batches, {{Work::forward, 0}, {Work::backward, micro_batches}});
}

// A backward as soon as its gradient can be there. Until then micro-batch 0 passes the later stages, and this one
// computes one further forward for each later stage.
inline Actions one_forward_one_backward(const Stage& stage, int micro_batches) {
  const int later_stages = stage.stages - 1 - stage.number;
  return in_turns(stage, micro_batches, {{Work::forward, 0}, {Work::backward, later_stages}});
}

// 1f1b in smaller chunks: a stage waits less for its first input. The first backward waits until micro-batch 0 has
// passed all chunks and come back. Meanwhile a stage computes forwards without a break, as others wait for them.
inline Actions interleaved(const Stage& stage, int micro_batches) {
  const int later_stages = stage.stages - 1 - stage.number;
  return in_turns(stage, micro_batches,
                  {{Work::forward, 0}, {Work::backward, 2 * later_stages + (stage.chunks - 1) * stage.stages}});
}

// 1f1b in which no stage waits for another's weight gradients: they are computed later, and fill the idle time at the
// end.
inline Actions zero_bubble(const Stage& stage, int micro_batches) {
  const int later_stages = stage.stages - 1 - stage.number;
  return in_turns(stage, micro_batches,
                  {{Work::forward, 0}, {Work::input, later_stages}, {Work::weight, stage.stages - 1}});
}

inline const std::map<std::string, Actions (*)(const Stage&, int)> pipeline_schedules = {
    {"gpipe", gpipe}, {"1f1b", one_forward_one_backward}, {"interleaved", interleaved}, {"zb", zero_bubble}};

// ---- messages and slots, which follow from the order

// The neighbours' messages. The first chunk of the model has the tokens, the last one the loss: they need none.
//
// The receive of the next action is posted together with this action, so that its message travels while this one
// computes. But not if that message may depend on this action's own message: then the device would wait for a message
// that cannot come before this action has ended. Nothing is gained by posting it, and a kernel that waits until the
// device is idle, as the first launch of one that is loaded late does, would wait forever. There are two such cases.
// The next action has the same micro-batch. Or all forwards come first, and this is the last of them: the next stage
// may do them all before it sends the first gradient.
inline Actions with_messages(Actions actions, const Stage& stage) {
  const auto is_forward = [](const Action& a) { return a.work == Work::forward; };
  for (Action& a : actions) {
    const bool forward = is_forward(a), first = stage.is_first(a.chunk), last = stage.is_last(a.chunk);
    if (a.work == Work::weight) continue;
    if (!(forward ? first : last)) a.receives = forward ? Message::activation : Message::gradient;
    if (!(forward ? last : first)) a.sends = forward ? Message::activation : Message::gradient;
  }
  const bool all_forwards_first = std::ranges::is_partitioned(actions, is_forward);
  for (size_t i = 0; i + 1 < actions.size(); ++i) {
    Action &a = actions[i], &next = actions[i + 1];
    a.next_work = next.work, a.next_chunk = next.chunk;
    const bool is_last_forward = all_forwards_first && is_forward(a) && !is_forward(next);
    if (a.micro_batch != next.micro_batch && !is_last_forward) a.next_receives = next.receives;
  }
  return actions;
}

// The receives that are posted when an action is issued, before its work: the action's own receive, unless it was
// posted together with the previous action, and the receive of the next action. The program (stage_links.cuh) and the
// simulator (dev/pipeline_simulator.h) both ask here.
inline std::array<Message, 2> receives_to_post(const Action& action, bool own_is_posted) {
  return {own_is_posted ? Message::none : action.receives, action.next_receives};
}

// Forward takes the lowest free slot, which is free again after backward or weight.
inline Actions with_slots(Actions actions) {
  std::vector<bool> taken;
  std::map<std::pair<int, int>, int> slots;  // by micro-batch and chunk
  for (Action& a : actions) {
    int& slot = slots[{a.micro_batch, a.chunk}];
    if (a.work == Work::forward) slot = int(std::ranges::find(taken, false) - taken.begin());
    if (size_t(slot) == taken.size()) taken.push_back(false);
    taken[size_t(slot)] = a.work == Work::forward || a.work == Work::input;
    a.slot = slot;
  }
  return actions;
}

// ---- functions that the core calls (Staging)

// The actions of a step. With one stage that has all layers, any schedule is F0 B0 F1 B1 ...
inline Actions make_schedule(const std::string& kind, const Stage& stage, int micro_batches) {
  const auto schedule = pipeline_schedules.find(kind);
  if (schedule == pipeline_schedules.end()) fail("there is no pipeline schedule ", excerpt(kind));
  if (kind == "interleaved" && micro_batches % stage.stages != 0)
    fail("interleaved: ", micro_batches, " micro-batches are no multiple of ", stage.stages, " stages: choose a multiple");
  if (kind != "interleaved" && stage.chunks > 1) fail(kind, ": a stage has one chunk, not ", stage.chunks, ": choose interleaved, or one");
  if (stage.has_all()) return actions_of_step(kind, stage, micro_batches);
  return with_messages(with_slots(schedule->second(stage, micro_batches)), stage);
}

// The actions of validation.
inline Actions validation_schedule(const Stage& stage, int micro_batches) {
  return with_messages(forward_order(stage, micro_batches), stage);
}

// ---- which layers

// Deals layers out to parts, `least` or more to each, so that the slowest part is as fast as possible. The last part
// also does the head, which costs `head` layers. The other parts differ by at most one layer; earlier parts get fewer.
inline std::vector<int> deal(int layers, int parts, int least, double head) {
  const int others = parts - 1;
  int last = layers - others * least;
  const auto slowest = [&](int last) { return std::max(std::ceil(double(layers - last) / others), last + head); };
  for (int fewer = last - 1; others > 0 && fewer >= least; --fewer)
    if (slowest(fewer) < slowest(last)) last = fewer;
  std::vector<int> counts;
  for (int part = 0, rest = layers - last; part < others; rest -= counts[size_t(part++)])
    counts.push_back(rest / (others - part));
  counts.push_back(last);
  return counts;
}

// The layers of each chunk of the model, in its order. Layers are dealt out to the stages first, because the slowest
// stage sets the pace, then in each stage to its chunks; early stages get fewer, because they keep the most
// micro-batches. The head takes as long as V/(12C) layers.
inline std::vector<Layers> deal_layers(const ModelShape& shape, int stages, int chunks = 1) {
  if (stages * chunks > shape.layers)
    fail(shape.layers, " layers are too few for --pp ", stages, " with --pp-chunks ", chunks, ": lower one of them");
  const double head = shape.vocabulary / (12.0 * shape.channels);
  const std::vector<int> of_stages = deal(shape.layers, stages, chunks, head);
  std::vector<std::vector<int>> of_chunks;  // by stage
  for (int stage = 0; stage < stages; ++stage)
    of_chunks.push_back(deal(of_stages[size_t(stage)], chunks, 1, stage + 1 == stages ? head : 0));
  std::vector<Layers> dealt;
  for (int chunk = 0, first = 0; chunk < chunks; ++chunk)
    for (int stage = 0; stage < stages; ++stage) {
      const int count = of_chunks[size_t(stage)][size_t(chunk)];
      dealt.push_back({first, count});
      first += count;
    }
  return dealt;
}

// The layers of a stage's chunks.
inline std::vector<Layers> layers_of_stage(const ModelShape& shape, const Stage& stage) {
  const std::vector<Layers> all = deal_layers(shape, stage.stages, stage.chunks);
  std::vector<Layers> own;
  for (int chunk = 0; chunk < stage.chunks; ++chunk) own.push_back(all[size_t(stage.in_model(chunk))]);
  return own;
}
