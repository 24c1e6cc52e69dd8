// Writes checkpoints while training goes on. The loop stands still only for the snapshot, a copy of this rank's slices
// to the host's memory; a thread writes them in place into files that all ranks share, and flushes them to the disk.
// When every rank is done, the folder gets its name.
//
// Files (names with numbers if they are split at `shard_bytes`, then with the usual index):
//   model.safetensors, config.json            weights as Hugging Face's GPT2LMHeadModel.from_pretrained loads them
//   optimizer.safetensors                     AdamW's moments, "m.NAME" and "v.NAME"
//   trainer.json, and the tokenizer's files   what else a resumed run needs
//   manifest_*                                what every rank wrote, with checksums (runtime/manifest.h)
//
// A folder on a disk that only one host sees is made by the first rank there that does not see rank 0's.
#pragma once

#include <atomic>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "runtime/checkpoint.h"

// The ranks that write a checkpoint together.
struct WritingRanks {
  int rank = 0, size = 1;
  // Everybody's text, by rank; returns when all ranks have called it.
  std::function<std::vector<std::string>(const std::string&)> all_gather = [](const std::string& mine) {
    return std::vector<std::string>{mine};
  };
};

// One safetensors file of a checkpoint.
struct FilePlan {
  std::string name;
  std::vector<NamedShape> tensors;
};

// Memory for a snapshot, of so many floats.
using Allocate = std::function<std::shared_ptr<float[]>(size_t)>;

class CheckpointWriter {
 public:
  CheckpointWriter(std::filesystem::path out, size_t shard_bytes, WritingRanks ranks,
                   Allocate allocate = [](size_t floats) { return std::make_shared<float[]>(floats); });
  ~CheckpointWriter();

  bool under_way() const { return thread_.joinable(); }
  size_t step() const { return step_; }     // of the last one begun
  bool is_written() const { return written_; }  // this rank's part, or it has failed

  // Room for the snapshots of these slices, so that not even the first has to wait for memory.
  void reserve(const std::vector<CheckpointSlice>& slices);

  // Removes older checkpoints, meanwhile: gigabytes take their time.
  void prune(size_t keep, size_t keep_every);

  // Collective. Returns when the snapshot is taken; none may be under way. Why it can't be written: the text; then
  // nothing is left of it.
  std::string begin(size_t step, const CheckpointContent& content);

  // Collective. Waits for the thread. Why it could not be written: the text.
  std::string complete();

 private:
  struct Piece {
    size_t file, offset, count;  // number in files_; byte in the file; floats
    float* values;               // in the snapshot
  };

  void finish_pruning();
  std::string agree(const std::string& problem);
  std::string discard(const std::string& problem);
  void plan(const CheckpointContent& content);
  std::unique_ptr<SafetensorsWriter> open(size_t file, bool create) const;
  void create();
  void take_snapshot(const CheckpointContent& content);
  void write();

  std::filesystem::path out_;
  size_t shard_bytes_;
  WritingRanks ranks_;

  size_t step_ = 0;
  std::filesystem::path partial_, complete_;
  bool creates_ = false;                      // the folder; then also completes or removes it
  bool shared_ = true;                        // all ranks see it
  std::vector<FilePlan> files_;
  std::map<std::string, std::string> texts_;  // small files
  std::vector<std::unique_ptr<SafetensorsWriter>> writers_;  // by file
  std::vector<Piece> pieces_;
  Allocate allocate_;
  std::shared_ptr<float[]> snapshot_;
  size_t snapshot_floats_ = 0;
  std::atomic<bool> written_ = false;
  std::string problem_;
  std::thread thread_, pruning_;
};

// Writes a checkpoint and waits for it. Fails with the reason.
void save_checkpoint(const std::filesystem::path& out, size_t step, const CheckpointContent& content,
                     size_t shard_bytes = size_t(5'000'000'000));
