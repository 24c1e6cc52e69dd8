#include "runtime/training/rank_check.cuh"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cast.cuh"
#include "kernels/linear.cuh"
#include "kernels/random.cuh"

namespace {

struct RankSpeed {
  double product, copy, link;  // FLOP/s, bytes/s, bytes/s
};

template <class Float>
class RankCheck {
 public:
  RankCheck(Control& control, Communicator& communicator, cudaStream_t stream)
      : control_(control), communicator_(communicator), stream_(stream) {
    CUDA_CHECK(cudaMalloc(&memory_, 2 * bytes));
  }
  ~RankCheck() {
    use_gemm_workspace(nullptr);
    cudaFree(memory_);
  }
  RankCheck(const RankCheck&) = delete;
  RankCheck& operator=(const RankCheck&) = delete;

  void run() {
    RankSpeed mine;
    Float* data = reinterpret_cast<Float*>(memory_);
    const int n = 2048;
    mine.link = control_.size() > 1 ? time_links() : 0;  // first: NCCL connects neighbours here, best before any kernel
    fill(data, reinterpret_cast<float*>(memory_ + bytes));
    use_gemm_workspace(memory_ + bytes);  // the model's is not there yet
    mine.product = 2.0 * n * n * n / best_seconds(stream_, [&] {
      linear_forward<Float>(data, data + n * n, data + 2 * n * n, nullptr, n, n, n, stream_);
    });
    mine.copy = 2.0 * bytes / best_seconds(stream_, [&] {
      CUDA_CHECK(cudaMemcpyAsync(memory_, memory_ + bytes, bytes, cudaMemcpyDeviceToDevice, stream_));
    });
    std::string text(sizeof mine, 0);
    std::memcpy(text.data(), &mine, sizeof mine);
    report(control_.all_gather(text));
  }

 private:
  static constexpr size_t bytes = 64 << 20, link_bytes = 16 << 20;

  // Random numbers: with zeros a processor draws so little power that it would not show its limits.
  void fill(Float* data, float* wide) {
    const size_t count = bytes / sizeof(float);
    fill_normal(wide, 0, count, 1, 1.0f, stream_);
    if constexpr (std::is_same_v<Float, float>)
      CUDA_CHECK(cudaMemcpyAsync(data, wide, bytes, cudaMemcpyDeviceToDevice, stream_));
    else cast(data, wide, count, stream_);
  }

  double time_links() {
    const int rank = control_.rank(), size = control_.size();
    double seconds = INFINITY;
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    for (int first = 0; first < size; ++first) {
      const int second = (first + 1) % size, peer = rank == first ? second : first;
      if (rank == first || rank == second) {
        const double time = best_seconds(communicator_.stream(), [&] {
          communicator_.send_receive(memory_, peer, memory_ + bytes, peer, link_bytes);
        });
        if (rank == first) seconds = time;
      }
      control_.barrier();
    }
    return link_bytes / seconds;
  }

  void report(const std::vector<std::string>& all) const {
    std::vector<RankSpeed> speeds(all.size());
    for (size_t rank = 0; rank < all.size(); ++rank) std::memcpy(&speeds[rank], all[rank].data(), sizeof(RankSpeed));
    std::printf("%-32s %14s %14s %20s\n", "rank", "TFLOP/s", "copy GB/s", "link to next GB/s");
    for (size_t rank = 0; rank < all.size(); ++rank) {
      const std::string name = std::to_string(rank) + " (" + control_.host(int(rank)) + ")";
      std::printf("%-32s %14.2f %14.1f ", name.c_str(), speeds[rank].product / 1e12, speeds[rank].copy / 1e9);
      if (all.size() > 1) std::printf("%20.2f%s\n", speeds[rank].link / 1e9, remarks(speeds, rank).c_str());
      else std::printf("%20s\n", "none");
    }
    std::fflush(stdout);
  }

  // Names what is slow on this rank: less than 0.8 of the median of all ranks.
  static std::string remarks(const std::vector<RankSpeed>& speeds, size_t rank) {
    std::string text;
    const std::pair<const char*, double RankSpeed::*> kinds[] = {
        {"arithmetic", &RankSpeed::product}, {"memory", &RankSpeed::copy}, {"link", &RankSpeed::link}};
    for (const auto& [name, kind] : kinds) {
      std::vector<double> values;
      for (const RankSpeed& speed : speeds) values.push_back(speed.*kind);
      std::nth_element(values.begin(), values.begin() + long(values.size() / 2), values.end());
      const double ratio = speeds[rank].*kind / values[values.size() / 2];
      if (ratio < 0.8) text += std::string("   slow ") + name;
    }
    return text;
  }

  Control& control_;
  Communicator& communicator_;
  cudaStream_t stream_;
  char* memory_ = nullptr;
};

}  // namespace

void check_ranks(const std::string& dtype, Control& control, Communicator& communicator, cudaStream_t stream) {
  if (dtype == "fp32") RankCheck<float>(control, communicator, stream).run();
  if (dtype == "bf16") RankCheck<__nv_bfloat16>(control, communicator, stream).run();
  if (dtype == "fp16") RankCheck<__half>(control, communicator, stream).run();
}
