// Masters and moments in pinned memory of the host (--offload optimizer). The update takes them in *windows*, neighbouring elements
// of one unit, as many as this rank keeps of a block; a larger unit, the embedding, has several. While one window is updated, the
// next one comes and the one before goes back (offload.cuh). The first two come behind forward and backward, and the last two leave
// behind the next forward.
#pragma once

#include <array>
#include <vector>

#include "extensions/offload/offload.cuh"
#include "gpt/optimizer_state.cuh"

template <class Float>
class OffloadedOptimizer final : public OptimizerState<Float> {
 public:
  OffloadedOptimizer(const Shards& shards, const Kept& kept, bool has_masters, const StoreOptions& options)
      : OptimizerState<Float>(shards, kept, has_masters, options), windows_(kept.windows()) {
    on_device_.fill(std::vector<char*>(arrays_.size()));
  }

  void lay_out(Arena& arena) override {
    for (size_t i = 0; i < arrays_.size(); ++i)
      for (std::vector<char*>& window : on_device_) window[i] = arena.take<char>(arrays_[i].width * kept_.largest_window());
  }
  void add_to(PinnedMemory& host_memory) override {
    host_memory.add("optimizer", [this](Arena& arena) { OptimizerState<Float>::lay_out(arena); });
  }
  void clear(cudaStream_t) override {
    forget();
    for (const Array& array : arrays_) clear_on_host(array.values, array.width * kept_.total());
  }

  void update(int unit, const UnitUpdate<Float>& u, cudaStream_t stream) override {
    for (size_t i = 0; i < windows_.size(); ++i) {
      if (windows_[i].unit != unit || windows_[i].begin - u.first >= u.count) continue;  // less than 0 is much
      const size_t buffer = i % HostTraffic::buffers;
      bring_up_to(i);
      traffic_.wait_until_here(buffer, stream);
      this->update_window(windows_[i], u, on_device_[buffer], stream);
      traffic_.end_use(buffer, stream);
      traffic_.send_back(buffer, arrays_of(i));
      bring_up_to(i + HostTraffic::buffers);
      if (i + 1 == windows_.size()) brought_ = 0, bring_up_to(HostTraffic::buffers - 1);  // for the next update
    }
  }

  void settle() const override { traffic_.settle(); }
  // All is brought again.
  void forget() override {
    settle();
    brought_ = 0;
  }

 private:
  using typename OptimizerState<Float>::Array;
  using OptimizerState<Float>::arrays_;
  using OptimizerState<Float>::kept_;

  std::vector<OffloadedArray> arrays_of(size_t window) const {
    std::vector<OffloadedArray> arrays;
    for (size_t i = 0; i < arrays_.size(); ++i)
      arrays.push_back({on_device_[window % HostTraffic::buffers][i], arrays_[i].values + windows_[window].kept * arrays_[i].width,
                        windows_[window].count * arrays_[i].width});
    return arrays;
  }

  // Starts to bring windows up to number `last`, of those that are still to come.
  void bring_up_to(size_t last) {
    for (; brought_ <= last && brought_ < windows_.size(); ++brought_)
      traffic_.bring(brought_ % HostTraffic::buffers, arrays_of(brought_));
  }

  std::vector<Window> windows_;
  std::array<std::vector<char*>, HostTraffic::buffers> on_device_;  // a window of each array
  size_t brought_ = 0;  // windows for this update that are there, or on their way
  HostTraffic traffic_{"optimizer"};
};
