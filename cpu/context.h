// Switches stacks, which C++ itself cannot do. On x86-64 this takes twenty instructions of our own. They save only the
// registers that a called function must preserve, and end in a jump, because a `ret` on another stack than the one of
// the call is always mispredicted. A wait then takes a third of its time with Boost.Context, which other processors
// use.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <boost/context/detail/fcontext.hpp>
#endif

namespace cpu {

#if defined(__x86_64__)

// Saves the running context in *from and continues the context `to`. Returns when some context switches back.
extern "C" void cpu_switch_context(void** from, void* to);
inline void switch_context(void*& from, void* to) { cpu_switch_context(&from, to); }

// A context that starts in `entry`, which never returns, on the stack that ends at `top`.
inline void* make_context(char* top, size_t, void (*entry)()) {
  void** stack = reinterpret_cast<void**>(reinterpret_cast<size_t>(top) & ~size_t(15));
  *--stack = nullptr;  // a return address for debuggers: the stack ends here
  *--stack = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--stack = nullptr;  // rbp, rbx, r12 to r15
  return stack;
}

#else

namespace context = boost::context::detail;

inline void switch_context(void*& from, void* to) {
  context::transfer_t arrived = context::jump_fcontext(to, &from);
  *static_cast<void**>(arrived.data) = arrived.fctx;
}

inline void (*context_entry)();

inline void* make_context(char* top, size_t bytes, void (*entry)()) {
  context_entry = entry;
  return context::make_fcontext(top, bytes, [](context::transfer_t arrived) {
    *static_cast<void**>(arrived.data) = arrived.fctx;
    context_entry();
  });
}

#endif

}  // namespace cpu
