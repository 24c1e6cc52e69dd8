// The messages between a pipeline stage and its neighbours: activations (r,C), the residual stream that enters or
// leaves a chunk of layers, and gradients (r,C) with respect to it, the other way.
//
//                activations →                     activations →
//   stage r−1  ───────────────▶  stage r  ───────────────▶  stage r+1
//              ◀───────────────            ◀───────────────
//                ← gradients                       ← gradients
//
// These are the four lanes of a stage, each on a stream of its own (mesh.cuh). A message moves when both sides are
// there. With one stream for both directions, two neighbours could each wait in a send to the other. With four streams
// no schedule of pipeline.h stops (dev/pipeline_simulator.h).
//
// A receive is posted together with the action before its own, if its message cannot depend on that action
// (with_messages, pipeline.h). send() returns at once, and the next send in the same direction waits until the buffer
// is free. So a direction has two buffers for received messages and one for the sent one. Received data is not copied:
// this class and the model exchange buffers.
// Its events are tested by test_meshes.
#pragma once

#include <cstdint>

#include "extensions/pipeline/pipeline.h"
#include "gpt/layer_context.cuh"
#include "gpt/links.cuh"

template <class Float>
class StageLinks final : public Links<Float> {
 public:
  StageLinks(Mesh& mesh, const LayerContext<Float>& context)
      : activations_(mesh.from_previous(), mesh.to_next()), gradients_(mesh.from_next(), mesh.to_previous()), on_(context) {}

  // For the largest messages.
  void lay_out(Arena& arena) {
    for (Direction* direction : {&activations_, &gradients_}) {
      for (Float*& buffer : direction->received) buffer = on_.take_rows(arena);
      direction->sent = on_.take_rows(arena);
    }
  }

  void post(const Action& action) override {  // receives_to_post, pipeline.h
    const bool own_is_posted = action.receives != Message::none && direction(action.receives).posted > 0;
    for (Message message : receives_to_post(action, own_is_posted))
      if (message != Message::none) post(direction(message));
  }

  Float*& received(Message message) override {
    Direction& d = direction(message);
    const int oldest = (d.next + 2 - d.posted--) % 2;
    d.from.wait(on_.stream, d.arrivals[oldest]);
    return d.received[oldest];
  }

  Float*& to_send(Message message) override {
    Direction& d = direction(message);
    d.to.wait(on_.stream, d.last_sent);
    return d.sent;
  }

  void send(Message message) override {
    Direction& d = direction(message);
    d.to.after(on_.stream);
    d.to.send(static_cast<const Float*>(d.sent), on_.elements());
    d.last_sent = d.to.last();
  }

 private:
  struct Direction {
    Direction(Lane& from, Lane& to) : from(from), to(to) {}
    Lane &from, &to;
    Float* received[2] = {};
    Float* sent = nullptr;
    uint64_t arrivals[2] = {}, last_sent = 0;  // numbers of these calls in their lanes
    int next = 0, posted = 0;  // where the next message goes; how many are on their way here
  };

  Direction& direction(Message message) { return message == Message::activation ? activations_ : gradients_; }

  void post(Direction& d) {
    d.from.after(on_.stream);
    d.from.receive(d.received[d.next], on_.elements());
    d.arrivals[d.next] = d.from.last();
    d.next ^= 1;
    ++d.posted;
  }

  Direction activations_, gradients_;
  const LayerContext<Float>& on_;
};
