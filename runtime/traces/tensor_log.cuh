// `--trace-tensors FILE`: statistics of every tensor that a launcher wrote, for dev/compare.py.
//
// FILE (FILE.rank<r> for rank r > 0) holds one JSON object per line. The first says which rank of which mesh wrote it:
//   {"rank":0,"ranks":2,"data_parallel":2,"tensor_parallel":1,"pieces":1,"context_parallel":1,
//    "context_method":"ring","pipeline":1,"chunks":1,"zero":1,"micro_batch":4}
// Each other line is one output of one launcher, in the order of the calls:
//   {"step":1,"micro_batch":0,"layer":3,"piece":null,"op":"gelu_forward","output":0,"accumulated":false,"partial":false,
//    "count":49152,"dtype":"bf16","sum":-12.5,"absmax":3.0625,"checksum":"00e1c2d3a4b5f697"}
// step, micro_batch, layer, piece: null where there is none. sum, absmax: null where not finite
// (runtime/checks/kernels/statistics.cuh). A pipeline's layers are numbered through all stages; pipeline is the number of stages,
// chunks the number of a stage's chunks.
// piece, partial: as in kernels/device/timeline.h, for tensor parallelism.
#pragma once

#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "gpt/step_options.h"
#include "kernels/device/profile.cuh"

struct TensorStatistics;

// Listens to the profiler from construction to destruction. Statistics that have not been flushed by then are lost.
class TensorLog {
 public:
  TensorLog(const std::string& file, int rank, const StepOptions& o);
  ~TensorLog();
  TensorLog(const TensorLog&) = delete;
  TensorLog& operator=(const TensorLog&) = delete;

  // Writes the statistics kept so far to the file. Waits for the device. To be called once per step, after it.
  void flush();

 private:
  struct Line {
    TraceContext context;
    const char* operation;
    int number;
    WrittenTensor tensor;
  };

  void add(const char* operation, int number, const WrittenTensor& tensor, cudaStream_t stream);
  TensorStatistics* workspace(cudaStream_t stream);

  std::string path_;
  std::ofstream file_;
  bool is_pipeline_;
  size_t most_lines_;
  TensorStatistics* results_ = nullptr;      // (most_lines_), and the streams' workspaces
  std::map<cudaStream_t, size_t> streams_;   // the numbers of their workspaces; each has one, because they run at the same time
  std::vector<Line> lines_;                  // the statistics of line i are results_[i]
};
