// `--trace-tensors FILE`: statistics of what every launcher wrote, for dev/compare.py.
//
// FILE (of rank r > 0: FILE.rank<r>) holds one JSON object a line. The first says which rank of which mesh wrote it:
//   {"rank":0,"ranks":2,"data_parallel":2,"micro_batch":4}
// and each other line is one output of one launcher, in the order of the calls:
//   {"step":1,"micro_batch":0,"layer":3,"op":"gelu_forward","output":0,"accumulated":false,"count":49152,
//    "dtype":"bf16","sum":-12.5,"absmax":3.0625,"checksum":"00e1c2d3a4b5f697"}
// step, micro_batch, layer: null where there is none; sum, absmax: null where not finite; statistics.cuh defines them.
#pragma once

#include <nlohmann/json.hpp>

#include "kernels/statistics.cuh"

struct TensorLogRank {
  int rank, ranks, data_parallel, micro_batch;  // micro_batch: samples
};

// Listens as long as it lives. What has not been flushed by then is lost.
class TensorLog {
 public:
  TensorLog(const std::string& file, const TensorLogRank& r)
      : path_(r.rank ? file + ".rank" + std::to_string(r.rank) : file), file_(path_, std::ios::binary) {
    file_ << Json{{"rank", r.rank}, {"ranks", r.ranks}, {"data_parallel", r.data_parallel},
                  {"micro_batch", r.micro_batch}} << '\n';
    flush();
    CUDA_CHECK(cudaMalloc(&results_, most_lines * sizeof(TensorStatistics)));
    Profiler::instance().listener = [this](const char* operation, int number, const WrittenTensor& tensor,
                                           cudaStream_t stream) { add(operation, number, tensor, stream); };
  }
  ~TensorLog() {
    Profiler::instance().listener = nullptr;
    for (const auto& [stream, workspace] : workspaces_) cudaFree(workspace);
    cudaFree(results_);
  }
  TensorLog(const TensorLog&) = delete;
  TensorLog& operator=(const TensorLog&) = delete;

  // Writes what has been kept. Waits for the device. To be called once a step.
  void flush() {
    std::vector<TensorStatistics> results(lines_.size());
    CUDA_CHECK(cudaDeviceSynchronize());
    if (!results.empty())
      CUDA_CHECK(cudaMemcpy(results.data(), results_, results.size() * sizeof(results[0]), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < lines_.size(); ++i) write(lines_[i], results[i]);
    lines_.clear();
    if (!file_.flush())
      throw std::runtime_error("--trace-tensors " + path_ + ": cannot write it: check the folder and its space");
  }

 private:
  using Json = nlohmann::ordered_json;        // writes what is not finite as null
  static constexpr size_t most_lines = 8192;  // a micro-step of 150 layers

  struct Line {
    TraceContext context;
    const char* operation;
    int number;
    WrittenTensor tensor;
  };

  void add(const char* operation, int number, const WrittenTensor& tensor, cudaStream_t stream) {
    if (lines_.size() == most_lines) flush();
    TensorStatistics* result = results_ + lines_.size();
    std::visit([&](auto* values) { tensor_statistics(result, values, tensor.count, workspace(stream), stream); },
               tensor.values);
    lines_.push_back({Profiler::instance().context, operation, number, tensor});
  }

  // Streams run at the same time: each has its own.
  TensorStatistics* workspace(cudaStream_t stream) {
    TensorStatistics*& found = workspaces_[stream];
    if (!found) CUDA_CHECK(cudaMalloc(&found, statistics_blocks * statistics_block * sizeof(TensorStatistics)));
    return found;
  }

  void write(const Line& line, const TensorStatistics& result) {
    char checksum[17];
    std::snprintf(checksum, sizeof checksum, "%016llx", static_cast<unsigned long long>(result.checksum));
    file_ << Json{{"step", known(line.context.step)}, {"micro_batch", known(line.context.micro_batch)},
                  {"layer", known(line.context.layer)}, {"op", line.operation}, {"output", line.number},
                  {"accumulated", line.tensor.accumulated}, {"count", line.tensor.count},
                  {"dtype", std::array{"fp32", "bf16", "fp16"}[line.tensor.values.index()]},
                  {"sum", result.sum}, {"absmax", result.absolute_maximum}, {"checksum", checksum}} << '\n';
  }

  static Json known(int value) { return value < 0 ? Json() : Json(value); }

  std::string path_;
  std::ofstream file_;
  TensorStatistics* results_ = nullptr;
  std::map<cudaStream_t, TensorStatistics*> workspaces_;
  std::vector<Line> lines_;  // line i has its statistics in results_[i]
};
