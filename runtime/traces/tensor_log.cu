#include "runtime/traces/tensor_log.cuh"

#include <array>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/text.h"
#include "runtime/checks/kernels/statistics.cuh"

namespace {

using Json = nlohmann::ordered_json;  // writes numbers that are not finite as null
constexpr size_t most_streams = 8;  // the model's stream, and the streams of collectives and lanes (gpt/mesh.cuh)

// 8192 lines are enough for a micro-step of 150 layers. When they are full, the log waits for the device. In a pipeline
// it must not, before the step is complete: a receive that was posted ahead may wait for a stage that waits for this
// one.
constexpr size_t most_lines = 8192, most_lines_of_pipeline = 1 << 20;

Json known(int value) { return value < 0 ? Json() : Json(value); }

}  // namespace

TensorLog::TensorLog(const std::string& file, int rank, const StepOptions& o)
    : path_(rank ? file + ".rank" + std::to_string(rank) : file), file_(path_, std::ios::binary),
      is_pipeline_(o.mesh.pp > 1), most_lines_(is_pipeline_ ? most_lines_of_pipeline : most_lines) {
  const auto& [tp, cp, dp, pp, islands] = o.mesh;
  file_ << Json{{"rank", rank}, {"ranks", o.mesh.ranks()}, {"data_parallel", dp}, {"tensor_parallel", tp},
                {"pieces", tp > 1 ? o.tp_pieces : 1}, {"context_parallel", cp}, {"context_method", o.cp_method},
                {"pipeline", pp}, {"chunks", o.pp_chunks}, {"zero", o.zero}, {"micro_batch", o.micro_batch}} << '\n';
  flush();
  // Allocates all memory now: a later allocation may wait for the device, too.
  CUDA_CHECK(cudaMalloc(&results_, (most_lines_ + most_streams * most_sum_blocks) * sizeof(TensorStatistics)));
  Profiler::instance().listener = [this](const char* operation, int number, const WrittenTensor& tensor,
                                         cudaStream_t stream) { add(operation, number, tensor, stream); };
}

TensorLog::~TensorLog() {
  Profiler::instance().listener = nullptr;
  cudaFree(results_);
}

void TensorLog::flush() {
  std::vector<TensorStatistics> results(lines_.size());
  CUDA_CHECK(cudaDeviceSynchronize());
  if (!results.empty())
    CUDA_CHECK(cudaMemcpy(results.data(), results_, results.size() * sizeof(results[0]), cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < lines_.size(); ++i) {
    const auto& [context, operation, number, tensor] = lines_[i];
    file_ << Json{{"step", known(context.step)}, {"micro_batch", known(context.micro_batch)},
                  {"layer", known(context.layer)}, {"piece", known(context.piece)}, {"op", operation},
                  {"output", number}, {"accumulated", tensor.accumulated}, {"partial", context.partial},
                  {"count", tensor.count},
                  {"dtype", std::array{"fp32", "bf16", "fp16", "e4m3", "e5m2"}[tensor.values.index()]},
                  {"sum", results[i].sum}, {"absmax", results[i].absolute_maximum},
                  {"checksum", hexadecimal(results[i].checksum)}} << '\n';
  }
  lines_.clear();
  if (!file_.flush()) fail("--trace-tensors ", path_, ": cannot write it: check the folder and its space");
}

void TensorLog::add(const char* operation, int number, const WrittenTensor& tensor, cudaStream_t stream) {
  if (tensor.count == 0) return;  // a rank that sends writes nothing
  if (lines_.size() == most_lines_ && is_pipeline_)
    fail("--trace-tensors: one step of this pipeline writes more than ", most_lines_, " tensors: lower --global-batch");
  if (lines_.size() == most_lines_) flush();
  TensorStatistics* result = results_ + lines_.size();
  std::visit([&](auto* values) { tensor_statistics(result, values, tensor.count, workspace(stream), stream); },
             tensor.values);
  lines_.push_back({Profiler::instance().context, operation, number, tensor});
}

TensorStatistics* TensorLog::workspace(cudaStream_t stream) {
  const size_t number = streams_.try_emplace(stream, streams_.size()).first->second;
  if (number == most_streams) throw std::logic_error("a tensor log of more streams than it has workspaces");
  return results_ + most_lines_ + number * most_sum_blocks;
}
