// Plays the schedules of all stages of a pipeline, as the program executes them: when each action begins and ends, how
// long the step takes, or why it never ends. test/pipeline/test_pipeline.cpp judges schedules by it, dev/schedule.py draws them.
//
// A stage computes its actions in order, one at a time. Messages travel in four lanes of a stage: activations from the
// previous and to the next one, gradients from the next and to the previous one.
//   - When an action is issued, receives are posted: its own, and mostly the next action's (receives_to_post in
//     pipeline.h, which the program asks too). They begin when all actions before it have ended.
//   - An action computes when the action before it has ended and its message is there. It may also have to wait until
//     the device is idle (as an allocation does, or a kernel that is loaded at its first launch): until all receives
//     that the stage has posted, and all its sends, are complete.
//   - It ends, and its own message can be sent, when it has computed and the send before in the same lane is complete:
//     there is one buffer to send from for each direction.
//   - Sends are synchronous, as NCCL's: a message travels when sender and receiver are there, and both wait until then.
//     Each lane keeps its order: the k-th send of one end meets the k-th receive of the other.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "extensions/pipeline/pipeline.h"

// Durations, in any unit.
struct ChunkCosts {
  double forward, input, weight;  // backward: input + weight

  double of(Work work) const {
    switch (work) {
      case Work::forward: return forward;
      case Work::backward: return input + weight;
      case Work::input: return input;
      default: return weight;
    }
  }
};
struct PipelineCosts {
  std::vector<ChunkCosts> chunks;  // of the model
  double message = 0;
};

// one: all messages of a stage wait in one queue, and receives are not posted ahead. It shows why there are four lanes.
enum class Lanes { four, one };

// Does action number `action` of this stage wait for the device before it computes? Empty: none does.
using WaitsForDevice = std::function<bool(int stage, size_t action)>;

struct PlayedStep {
  struct Span {
    double begin, end;  // of computing
  };
  std::vector<std::vector<Span>> spans;  // by stage and action
  std::vector<double> idle;              // by stage: how long it does not compute
  double end = 0;
  std::string problem;  // if it doesn't end: the reason
};

// "F3 of chunk 1"
inline std::string name_of(const Action& action, const Stage& stage) {
  return std::string(1, "FBIW"[size_t(action.work)]) + std::to_string(action.micro_batch) +
         (stage.chunks > 1 ? " of chunk " + std::to_string(action.chunk) : "");
}

// Describes a mistake in a stage's list of actions, whatever the other stages do; empty: there is none. Each work is
// done once for each micro-batch in each chunk, in a possible order; no slot has two of them at once; in each chunk
// backward, input and weight take the micro-batches in their order.
inline std::string mistake_in(const Actions& actions, const Stage& stage, int micro_batches) {
  std::map<std::pair<int, int>, const Action*> last;  // by micro-batch and chunk: the last work on it
  std::map<std::pair<Work, int>, int> next;           // by work and chunk: the next micro-batch
  std::map<int, const Action*> in_slot;
  int finished = 0;
  for (const Action& a : actions) {
    const std::string name = name_of(a, stage), slot = std::to_string(a.slot);
    if (std::min(a.micro_batch, a.chunk) < 0 || a.micro_batch >= micro_batches || a.chunk >= stage.chunks)
      return name + " does not exist";
    const Action*& before = last[{a.micro_batch, a.chunk}];
    if (a.work == Work::forward) {
      if (before) return name + " comes twice";
      if (in_slot[a.slot]) return name + " takes slot " + slot + ", which " + name_of(*in_slot[a.slot], stage) + " has";
      in_slot[a.slot] = before = &a;
      continue;
    }
    const Work needed = a.work == Work::weight ? Work::input : Work::forward;
    if (!before || before->work != needed) return name + " comes too early, or twice";
    if (a.slot != before->slot) return name + " looks in slot " + slot + ", not in its forward's slot";
    if (a.micro_batch != next[{a.work, a.chunk}]++) return name + " is out of order";
    before = &a;
    if (a.work == Work::input) continue;
    in_slot[a.slot] = nullptr;
    ++finished;
  }
  return finished < micro_batches * stage.chunks ? "something is left out" : "";
}

class PipelineSimulator {
 public:
  // lists: of each stage
  PipelineSimulator(const std::vector<Actions>& lists, int chunks, const PipelineCosts& costs, Lanes lanes,
                    const WaitsForDevice& waits)
      : costs_(costs), lanes_(lanes), waits_(waits) {
    for (const Actions& actions : lists) {
      const Stage stage = {int(lists.size()), int(stages_.size()), chunks};
      stages_.push_back({stage, actions, std::vector<size_t>(actions.size(), not_posted)});
      step_.spans.emplace_back();
    }
  }

  PlayedStep play() {
    for (bool progress = true; progress && step_.problem.empty();) {
      progress = false;
      for (StageState& s : stages_) {
        while (compute(s)) progress = true;
        while (deliver(s, Message::activation) || deliver(s, Message::gradient)) progress = true;
      }
    }
    if (step_.problem.empty()) step_.problem = what_waits();
    for (const auto& spans : step_.spans)
      for (const PlayedStep::Span& span : spans) step_.end = std::max(step_.end, span.end);
    for (const auto& spans : step_.spans) {
      step_.idle.push_back(step_.end);
      for (const PlayedStep::Span& span : spans) step_.idle.back() -= span.end - span.begin;
    }
    return step_;
  }

 private:
  // One end of a message.
  struct Transfer {
    bool sends;
    Message message;
    const Action* action;  // of this end
    int chunk;             // the receiver's, counted over the model
    double ready;          // when this end is there
    bool complete = false;
    double end = 0;
  };
  struct Queue {
    std::vector<Transfer> transfers;
    size_t complete = 0;  // how many of them are complete

    Transfer* first() { return complete < transfers.size() ? &transfers[complete] : nullptr; }
    double free() const { return complete > 0 ? transfers[complete - 1].end : 0; }
  };
  static constexpr size_t not_posted = size_t(-1);
  struct StageState {
    Stage stage;
    const Actions& actions;
    std::vector<size_t> receives;           // by action: where in its queue, or not_posted
    size_t next = 0, issued = 0;            // how many actions have ended, and how many have been issued
    double end = 0;                         // of the last action
    std::map<Message, size_t> posted = {};  // for how many actions the receives of this message have been posted
    std::map<Message, size_t> sent = {};    // where in its queue the last one is
    std::array<Queue, 4> queues = {};
  };

  Queue& queue(StageState& s, bool sends, Message message) {
    return s.queues[lanes_ == Lanes::one ? 0 : 2 * size_t(sends) + size_t(message == Message::gradient)];
  }
  StageState& receiver(const StageState& s, Message message) {
    const int stages = s.stage.stages, step = message == Message::activation ? 1 : stages - 1;
    return stages_[size_t((s.stage.number + step) % stages)];
  }

  // Posts the messages of the next action. One queue would stop sends if receives were posted ahead in it.
  void issue(StageState& s) {
    if (s.issued > s.next) return;
    const Action& a = s.actions[s.issued];
    const auto [own, ahead] = receives_to_post(a, s.receives[s.issued++] != not_posted);
    post(s, own);
    if (lanes_ == Lanes::four) post(s, ahead);
  }

  // Posts the next receive of this message, as a lane keeps its order.
  void post(StageState& s, Message message) {
    size_t& i = s.posted[message];
    while (i < s.actions.size() && s.actions[i].receives != message) ++i;
    if (message == Message::none || i == s.actions.size()) return;
    std::vector<Transfer>& transfers = queue(s, false, message).transfers;
    s.receives[i] = transfers.size();
    transfers.push_back({false, message, &s.actions[i], s.stage.in_model(s.actions[i].chunk), s.end});
    ++i;
  }

  // Computes the next action, if its message has arrived (and, where it needs that, the device is idle).
  bool compute(StageState& s) {
    if (s.next == s.actions.size()) return false;
    issue(s);
    const Action& a = s.actions[s.next];
    double begin = s.end;
    if (waits_for_device(s)) {
      if (std::ranges::any_of(s.queues, &Queue::first)) return false;
      for (const Queue& queue : s.queues) begin = std::max(begin, queue.free());
    }
    if (a.receives != Message::none) {
      const Transfer& message = queue(s, false, a.receives).transfers[s.receives[s.next]];
      if (!message.complete) return false;
      begin = std::max(begin, message.end);
    }
    const double computed = begin + costs_.chunks[size_t(s.stage.in_model(a.chunk))].of(a.work);
    double end = computed;
    if (a.sends != Message::none) {
      std::vector<Transfer>& transfers = queue(s, true, a.sends).transfers;
      if (const auto last = s.sent.find(a.sends); last != s.sent.end()) {
        if (!transfers[last->second].complete) return false;
        end = std::max(end, transfers[last->second].end);
      }
      s.sent[a.sends] = transfers.size();
      const int receiver = s.stage.in_model(a.chunk) + (a.sends == Message::activation ? 1 : -1);
      transfers.push_back({true, a.sends, &a, receiver, end});
    }
    step_.spans[size_t(s.stage.number)].push_back({begin, computed});
    s.end = end;
    ++s.next;
    return true;
  }

  bool waits_for_device(const StageState& s) const { return waits_ && waits_(s.stage.number, s.next); }

  // Delivers this stage's next message, if both ends are there.
  bool deliver(StageState& s, Message message) {
    StageState& other = receiver(s, message);
    Queue &from = queue(s, true, message), &to = queue(other, false, message);
    Transfer *send = from.first(), *receive = to.first();
    if (!send || !receive || !send->sends || receive->sends) return false;
    if (send->message != message || receive->message != message) return false;
    if (send->action->micro_batch != receive->action->micro_batch || send->chunk != receive->chunk) {
      step_.problem = "stage " + number(other) + " receives for " + name_of(*receive->action, other.stage) +
                      " what stage " + number(s) + " sends after " + name_of(*send->action, s.stage);
      return false;
    }
    const double end = std::max({send->ready, receive->ready, from.free(), to.free()}) + costs_.message;
    send->complete = receive->complete = true;
    send->end = receive->end = end;
    ++from.complete;
    ++to.complete;
    return true;
  }

  // After the last progress: who is not done, and waits for what?
  std::string what_waits() {
    std::string text;
    for (StageState& s : stages_) {
      const std::string stage = (text.empty() ? "stage " : "; stage ") + number(s);
      if (s.next < s.actions.size()) text += stage + " waits " + what_holds_up(s);
      else
        for (Message message : {Message::activation, Message::gradient})
          if (const Transfer* left = queue(s, true, message).first(); left && left->sends && left->message == message)
            text += stage + " sends after " + name_of(*left->action, s.stage) + " what nobody receives";
    }
    return text;
  }

  std::string what_holds_up(StageState& s) {
    const Action& a = s.actions[s.next];
    const std::string name = name_of(a, s.stage);
    if (waits_for_device(s)) return "for its device before " + name;
    if (a.receives == Message::none || queue(s, false, a.receives).transfers[s.receives[s.next]].complete)
      return "after " + name + ", until its last send is complete";
    const Transfer* first = queue(s, false, a.receives).first();
    return "to receive for " + name +
           (first->sends ? ", but first to send after " + name_of(*first->action, s.stage) : "");
  }

  static std::string number(const StageState& s) { return std::to_string(s.stage.number); }

  const PipelineCosts& costs_;
  Lanes lanes_;
  const WaitsForDevice& waits_;
  std::vector<StageState> stages_;
  PlayedStep step_;
};

// lists: of all stages; chunks: of each of them
inline PlayedStep play(const std::vector<Actions>& lists, int chunks, const PipelineCosts& costs,
                       Lanes lanes = Lanes::four, const WaitsForDevice& waits = {}) {
  return PipelineSimulator(lists, chunks, costs, lanes, waits).play();
}
