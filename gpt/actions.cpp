#include "gpt/actions.h"

#include <algorithm>

#include "gpt/base/error.h"
#include "gpt/room.h"

namespace {

const Staging& staging() {
  for (const Room* room : rooms())
    if (room->staging) return *room->staging;
  fail("no room of this program deals layers out to several stages");
}

// F0 B0 F1 B1 ..., or F0 F1 ...
Actions one_at_a_time(int micro_batches, bool training) {
  Actions actions;
  for (int i = 0; i < micro_batches; ++i)
    for (Work work : {Work::forward, Work::backward})
      if (training || work == Work::forward) actions.push_back({work, i});
  for (size_t i = 0; i + 1 < actions.size(); ++i) actions[i].next_work = actions[i + 1].work, actions[i].next_chunk = 0;
  return actions;
}

}  // namespace

Actions actions_of_step(const std::string& schedule, const Stage& stage, int micro_batches) {
  return stage.has_all() ? one_at_a_time(micro_batches, true) : staging().step(schedule, stage, micro_batches);
}
Actions forwards(const Stage& stage, int micro_batches) {
  return stage.has_all() ? one_at_a_time(micro_batches, false) : staging().forwards(stage, micro_batches);
}
int slots_of(const Actions& actions) {
  return actions.empty() ? 0 : std::ranges::max(actions, {}, &Action::slot).slot + 1;
}
std::vector<Layers> layers_of(const ModelShape& shape, const Stage& stage) {
  return stage.has_all() ? std::vector<Layers>{{0, shape.layers}} : staging().layers(shape, stage);
}
