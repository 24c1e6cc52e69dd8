// Writes checkpoints while training goes on. The loop waits for the step, for empty files of the right sizes, and for
// the snapshot, a copy of this rank's blocks in the host's memory; not for the writing, unless the checkpoint before is
// not done. A thread writes the snapshot in place into files that all ranks share, and flushes them to the disk. When
// every rank is done, the folder gets its final name.
//
// Two kinds of ranks make the loop wait longer, because their blocks go from the device to the file chunk by chunk, a
// chunk being some bytes: ranks that have no memory for a snapshot, and *blind* ranks, which don't see the folder on
// rank 0's disk and send the chunks to rank 0.
//
// Tensor-parallel ranks that gather blocks together (gpt/blocks.h) wait for one another while they copy these. So
// each copies them first, in the same order, and completes them even after an error of its disk. If one rank of such a
// group is blind, the whole group sends.
//
// gpt/checkpoint.h lists the files. Those split by --shard-size have numbers in their names, and an index beside them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gpt/checkpoint.h"
#include "runtime/checkpoints/manifest.h"
#include "runtime/checkpoints/rank_group.h"

// One safetensors file of a checkpoint.
struct FilePlan {
  std::string name;
  std::vector<NamedShape> tensors;
};

// Allocates memory for a snapshot of `floats` floats; returns null if there is too little.
using Allocate = std::function<std::shared_ptr<float[]>(size_t)>;
// (g++ 11 has no std::make_shared for arrays.)
inline std::shared_ptr<float[]> allocate_zeros(size_t floats) { return std::shared_ptr<float[]>(new float[floats]()); }

constexpr double snapshot_rate = 17.5e9;  // bytes/s, as measured on a CPU (dev/results/2026-11-21-faults.md)

// The content of a checkpoint.
struct CheckpointContent {
  Parameters& parameters;
  std::vector<CheckpointBlock> blocks;          // those that this rank writes; a gathered one fits into RankGroup::chunk_bytes
  std::string trainer;                          // all else that a resumed run needs: a JSON object
  std::map<std::string, std::string> texts = {};  // other files, by name
  std::filesystem::path tokenizer_folder = {};  // may hold the tokenizer and config.json of the weights, which are then saved, too
  SavedStates states = {};
};

class CheckpointWriter {
 public:
  CheckpointWriter(std::filesystem::path out, size_t shard_bytes, RankGroup ranks,
                   Allocate allocate = allocate_zeros);

  bool under_way() const { return thread_.joinable(); }
  size_t step() const { return step_; }         // step of the last checkpoint that was begun
  bool is_written() const { return written_; }  // has this rank written its part, or failed to?

  // The number of floats in a snapshot of these blocks.
  static size_t snapshot_floats(const std::vector<CheckpointBlock>& blocks, const SavedStates& states = {});

  // Allocates the memory for snapshots of these blocks, or for one chunk. Done early, because later there may be none.
  void reserve(const std::vector<CheckpointBlock>& blocks, const SavedStates& states = {});
  size_t snapshot_bytes() const { return snapshot_ ? snapshot_floats_ * sizeof(float) : 0; }

  // Collective; to be called when the run folder exists. Returns the ranks for which training will wait, with the
  // reasons, one line per reason.
  std::vector<std::string> find_slow_ranks();

  // Removes older checkpoints, but not those of the steps `spared`. On a thread, because removing gigabytes takes long.
  void prune(size_t keep, size_t keep_every, const std::vector<size_t>& spared);

  // Collective. Starts a checkpoint; none may be under way. Returns when the snapshot is taken. If the checkpoint can't
  // be written, it returns the reason, and removes the unfinished files.
  std::string begin(size_t step, const CheckpointContent& content);

  // Collective. Waits for the thread. Returns the reason if the checkpoint could not be written.
  std::string complete();

  // To be called at the end of a job, when one rank has reported an error and collectives are impossible. Waits until
  // this rank has written its part of the checkpoint under way; rank 0 waits for all parts, as long as all_are_there(),
  // and gives the checkpoint its name. May be called in any thread. Returns false if there is nothing that another rank
  // could wait for.
  bool finish_alone(double patience_s, const std::function<bool()>& all_are_there);

 private:
  // A block, or the elements of one that are written or sent at once.
  struct BlockChunk {
    State state;
    std::string name;  // the tensor's name in its file
    CheckpointBlock block;
  };
  // Neighbouring bytes of a file, and their values in memory.
  struct FileRange {
    size_t file, offset, count;  // the file's number in files_; offset in the file in bytes; number of floats
    const float* values;         // in the snapshot
  };

  bool is_blind(int rank) const { return std::find(blind_.begin(), blind_.end(), rank) != blind_.end(); }
  // Does this rank write to files: its own blocks, or (rank 0) those that blind ranks send?
  bool has_files() const { return ranks_.is_first() || !is_blind(ranks_.rank()); }
  std::string hosts_of(const std::vector<int>& some) const;
  void reserve_chunk_memory();
  std::string discard(const std::string& problem);
  void plan(const CheckpointContent& content);
  std::unique_ptr<SafetensorsWriter> open(size_t file, bool create) const;
  void create();
  void open_files();
  static std::vector<BlockChunk> chunks_of(const CheckpointContent& content, size_t most_floats);
  FileRange range_of(const std::string& tensor, size_t first, size_t count, const float* values) const;
  void put(int rank, const FileRange& range);
  void take_snapshot(const CheckpointContent& content);
  void write_in_chunks(const CheckpointContent& content);
  void copy_chunk(const CheckpointContent& content, const BlockChunk& chunk);
  std::string send_in_chunks(const CheckpointContent& content);
  void receive(int rank, const std::string& chunk);
  void write();
  void give_name();

  std::filesystem::path out_;
  size_t shard_bytes_;
  RankGroup ranks_;
  std::vector<int> blind_;  // the ranks that don't see rank 0's folder, and all other ranks of their tensor-parallel groups

  size_t step_ = 0;
  std::filesystem::path partial_, complete_;
  std::vector<FilePlan> files_;
  std::map<std::string, size_t> file_of_;     // the file's number in files_, by tensor name
  std::map<std::string, std::string> texts_;  // the content of small files, by name
  std::vector<std::unique_ptr<SafetensorsWriter>> writers_;  // by file
  std::map<int, Manifest> manifests_;         // the manifests that this rank writes, by rank
  std::vector<FileRange> ranges_;
  Allocate allocate_;
  std::shared_ptr<float[]> snapshot_;  // null: there is no room for one
  size_t snapshot_floats_ = 0;         // the size that a snapshot needs
  std::vector<float> chunk_memory_;    // for one chunk; used if there is no snapshot
  std::atomic<bool> begun_ = false;    // a checkpoint is under way
  std::atomic<bool> written_ = false;
  std::mutex naming_;
  std::string problem_;
  std::jthread thread_, pruning_;  // they end before the members above
};
