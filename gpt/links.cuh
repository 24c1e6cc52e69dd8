// What enters and leaves a chunk of layers that is not the model's first or last: rows (r,C) of another stage, as messages.
// A stage that has all layers has no links (ModelParts::links); a room brings them.
#pragma once

#include "gpt/actions.h"

template <class Float>
struct Links {
  virtual ~Links() = default;
  // Posts the receives that go with an action. To be called for each action, before its work is issued.
  virtual void post(const Action& action) = 0;
  // The pointer to the buffer in which the stream will find the next received message. The caller may keep the buffer,
  // and store the address of another one of the same size in its place.
  virtual Float*& received(Message message) = 0;
  // The pointer to a buffer for the next message of this kind, which the stream writes, for send(). The caller may
  // exchange the buffer for another one.
  virtual Float*& to_send(Message message) = 0;
  virtual void send(Message message) = 0;
};
