// Commands that a run calls (runtime/hooks/hooks.h); empty: none.
#pragma once

#include <string>
#include <string_view>

struct HookOptions {
  std::string after_checkpoint, stop_when, on_end;
  double timeout = 0;  // 0: by the reason

  bool are_given() const { return !(after_checkpoint + stop_when + on_end).empty(); }

  // Seconds at the end for the last upload, and the same for --on-end. reason: why the run ends
  double limit(std::string_view reason) const { return timeout > 0 ? timeout : reason == "done" ? 3600 : 90; }
};
