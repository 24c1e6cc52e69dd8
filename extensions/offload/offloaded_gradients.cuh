// Gradients in the host's memory (--offload gradients): the sums of this rank's kept elements of each unit. They are
// brought to the device in windows of neighbouring elements of one unit, at most as many as this rank keeps of a block:
// when a micro-step adds to them, for their norm, and for the update, whose windows are the same (offloaded_optimizer.cuh).
// The device has two, which take turns (offload.cuh).
#pragma once

#include <algorithm>
#include <vector>

#include "extensions/offload/offload.cuh"
#include "gpt/gradient_home.cuh"
#include "kernels/cast.cuh"

class OffloadedGradients final : public GradientHome {
 public:
  OffloadedGradients(const Shards& shards, const Kept& kept, int zero) : GradientHome(shards, kept, zero), windows_(kept.windows()) {
    for (int unit = 0; unit <= shards.units(); ++unit)
      first_.push_back(size_t(std::ranges::lower_bound(windows_, unit, {}, &Window::unit) - windows_.begin()));
  }

  void lay_out(Arena& arena) override {
    for (float*& window : on_device_) window = arena.take<float>(kept_.largest_window());
  }
  void add_to(PinnedMemory& host_memory) override {
    host_memory.add("gradients", [this](Arena& arena) { on_host_ = arena.take<float>(count()); });
  }

  // Complete: waits until all copies have arrived there.
  float* applied() const override {
    traffic_.settle();
    return on_host_;
  }
  void clear(cudaStream_t) override { clear_on_host(applied(), count() * sizeof(float)); }

  // While a block is added to, the one before it is brought.
  bool has_add() const override { return true; }
  void add(int unit, const float* values, bool add_to_earlier, cudaStream_t stream) override {
    const auto add = [&](float* window, size_t begin, size_t count) {
      accumulate(window, values + begin, count, add_to_earlier, stream);
    };
    use(unit, add_to_earlier ? Use::add : Use::write, unit > 1 ? first_[size_t(unit) - 1] : windows_.size(), stream, add);
  }
  // Meanwhile the next unit comes.
  void read(int unit, cudaStream_t stream, const Work& work) override {
    use(unit, Use::read, first_[size_t(unit) + 1], stream, work);
  }

 private:
  static constexpr int none = -1;
  // How a window is used: it is computed anew, added to, or read.
  enum class Use { write, add, read };

  // next: the first window of the unit that is used next, which comes meanwhile
  template <class OnDevice>
  void use(int unit, Use how, size_t next, cudaStream_t stream, OnDevice work) {
    const size_t end = first_[size_t(unit) + 1];
    for (size_t i = first_[size_t(unit)]; i < end; ++i) {
      const size_t buffer = buffer_of(i);
      const size_t after = i + 1 < end ? i + 1 : next;
      bring(i, how);
      if (after < windows_.size() && buffer_of(after) != buffer) bring(after, how);
      if (how == Use::write) traffic_.wait_until_free(buffer, stream);
      else traffic_.wait_until_here(buffer, stream);
      work(on_device_[buffer], windows_[i].begin, windows_[i].count);
      traffic_.end_use(buffer, stream);
      if (how != Use::read) traffic_.send_back(buffer, array_of(i));
      holds_[buffer] = none;
    }
  }
  static size_t buffer_of(size_t window) { return window % HostTraffic::buffers; }
  std::vector<OffloadedArray> array_of(size_t window) const {
    const Window& w = windows_[window];
    return std::vector(1, OffloadedArray{on_device_[buffer_of(window)], on_host_ + w.kept, w.count * sizeof(float)});
  }
  // Starts to bring a window's values, unless they are there already or not needed.
  void bring(size_t window, Use how) {
    int& held = holds_[buffer_of(window)];
    if (how == Use::write || held == int(window)) return;
    held = int(window);
    traffic_.bring(buffer_of(window), array_of(window));
  }

  std::vector<Window> windows_;   // of all units, in order
  std::vector<size_t> first_;     // number of each unit's first window; behind the last, of all windows
  float *on_device_[HostTraffic::buffers] = {}, *on_host_ = nullptr;
  int holds_[HostTraffic::buffers] = {none, none};  // the window that has been brought and not used yet
  HostTraffic traffic_{"gradients"};
};
