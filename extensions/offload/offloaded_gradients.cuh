// Gradients in the host's memory (--offload gradients): the sums of this rank's kept elements of each unit. They are
// brought to the device in windows of neighbouring elements of one unit, at most as many as this rank keeps of a block:
// when a micro-step adds to them, for their norm, and for the update, whose windows are the same (optimizer_state.cuh).
// The device has two, which take turns (offload.cuh).
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "extensions/offload/offload.cuh"
#include "kernels/cast.cuh"

class OffloadedGradients {
 public:
  // kept: the number of elements of each unit that this rank keeps; the first unit, the embedding, may be larger than a
  // block
  OffloadedGradients(const std::vector<size_t>& kept, bool is_on)
      : total_(std::accumulate(kept.begin(), kept.end(), size_t(0))),
        largest_(std::max(*std::max_element(kept.begin() + 1, kept.end()), size_t(1))), windows_(windows_of(kept, largest_)) {
    if (is_on) traffic_.emplace("gradients");
    for (int unit = 0; unit <= int(kept.size()); ++unit)
      first_.push_back(size_t(std::ranges::lower_bound(windows_, unit, {}, &Window::unit) - windows_.begin()));
  }

  bool is_on() const { return traffic_.has_value(); }

  void lay_out(Arena& arena) {
    for (float*& window : on_device_) window = arena.take<float>(largest_);
  }
  void add_to(PinnedMemory& host_memory) {
    if (is_on()) host_memory.add("gradients", [this](Arena& arena) { on_host_ = arena.take<float>(total_); });
  }

  // The sums of all kept elements, complete: waits until all copies have arrived there.
  float* on_host() const {
    if (is_on()) traffic_->settle();
    return on_host_;
  }
  void clear() {
    if (is_on()) clear_on_host(on_host(), total_ * sizeof(float));
  }

  // On `stream`, adds values to a unit's sums, or overwrites them. While a block is added to, the one before it is
  // brought.
  template <class E>
  void add(int unit, const E* values, bool add_to_earlier, cudaStream_t stream) {
    const auto add = [&](float* window, size_t begin, size_t count) {
      accumulate(window, values + begin, count, add_to_earlier, stream);
    };
    use(unit, add_to_earlier ? Use::add : Use::write, unit > 1 ? unit - 1 : none, stream, add);
  }
  // Calls work(values, begin, count) for each window of a unit. values: on the device, for work that is issued to
  // `stream` then; begin: its first element among the unit's kept ones. Meanwhile the next unit comes.
  template <class Work>
  void read(int unit, cudaStream_t stream, Work work) {
    use(unit, Use::read, unit + 2 < int(first_.size()) ? unit + 1 : none, stream, work);
  }
  // Calls work(unit, begin, count) for all windows.
  template <class Work>
  void for_windows(Work work) const {
    for (const Window& window : windows_) work(window.unit, window.begin, window.count);
  }

 private:
  static constexpr int none = -1;
  // How a window is used: it is computed anew, added to, or read.
  enum class Use { write, add, read };

  // next: the unit that is used next, whose first window comes meanwhile
  template <class Work>
  void use(int unit, Use how, int next, cudaStream_t stream, Work work) {
    const size_t end = first_[size_t(unit) + 1];
    for (size_t i = first_[size_t(unit)]; i < end; ++i) {
      const size_t buffer = buffer_of(i);
      const size_t after = i + 1 < end ? i + 1 : next == none ? windows_.size() : first_[size_t(next)];
      bring(i, how);
      if (after < windows_.size() && buffer_of(after) != buffer) bring(after, how);
      if (how == Use::write) traffic_->wait_until_free(buffer, stream);
      else traffic_->wait_until_here(buffer, stream);
      work(on_device_[buffer], windows_[i].begin, windows_[i].count);
      traffic_->end_use(buffer, stream);
      if (how != Use::read) traffic_->send_back(buffer, array_of(i));
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
    traffic_->bring(buffer_of(window), array_of(window));
  }

  size_t total_, largest_;        // elements of all that is kept, and of a window
  std::vector<Window> windows_;   // of all units, in order
  std::vector<size_t> first_;     // number of each unit's first window; behind the last, of all windows
  float *on_device_[HostTraffic::buffers] = {}, *on_host_ = nullptr;
  int holds_[HostTraffic::buffers] = {none, none};  // the window that has been brought and not used yet
  std::optional<HostTraffic> traffic_;
};
