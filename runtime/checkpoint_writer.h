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
#include <exception>
#include <memory>
#include <thread>

#include <sys/resource.h>

#include "runtime/checkpoint.h"
#include "runtime/manifest.h"

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

// Tensors of several kinds, in order, in files of at most `shard_bytes` (or one tensor).
inline std::vector<FilePlan> plan_files(const std::string& stem, const std::vector<NamedShape>& tensors, size_t shard_bytes) {
  std::vector<FilePlan> files(1);
  size_t bytes = 0;
  for (const NamedShape& tensor : tensors) {
    const size_t more = element_count(tensor.shape) * sizeof(float);
    if (bytes > 0 && bytes + more > shard_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().tensors.push_back(tensor);
    bytes += more;
  }
  for (size_t i = 0; i < files.size(); ++i) {
    char number[32] = "";
    if (files.size() > 1) std::snprintf(number, sizeof number, "-%05zu-of-%05zu", i + 1, files.size());
    files[i].name = stem + number + ".safetensors";
  }
  return files;
}

// Which file a tensor is in, as Hugging Face's libraries write it.
inline std::string index_of(const std::vector<FilePlan>& files) {
  nlohmann::ordered_json map;
  size_t bytes = 0;
  for (const FilePlan& file : files)
    for (const NamedShape& tensor : file.tensors) {
      map[tensor.name] = file.name;
      bytes += element_count(tensor.shape) * sizeof(float);
    }
  return nlohmann::ordered_json{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}.dump(2) + "\n";
}

// Memory for a snapshot, of so many floats.
using Allocate = std::function<std::shared_ptr<float[]>(size_t)>;

class CheckpointWriter {
 public:
  CheckpointWriter(std::filesystem::path out, size_t shard_bytes, WritingRanks ranks,
                   Allocate allocate = [](size_t floats) { return std::make_shared<float[]>(floats); })
      : out_(std::move(out)), shard_bytes_(shard_bytes), ranks_(std::move(ranks)), allocate_(std::move(allocate)) {}
  ~CheckpointWriter() {
    if (thread_.joinable()) thread_.join();
    finish_pruning();
  }

  bool under_way() const { return thread_.joinable(); }
  size_t step() const { return step_; }     // of the last one begun
  bool is_written() const { return written_; }  // this rank's part, or it has failed

  // Room for the snapshots of these slices, so that not even the first has to wait for memory.
  void reserve(const std::vector<CheckpointSlice>& slices) {
    size_t floats = 0;
    for (const CheckpointSlice& slice : slices) floats += std::size(kinds) * (slice.count + File::block / sizeof(float));
    if (floats <= snapshot_floats_) return;
    snapshot_ = allocate_(floats);  // may fail, and succeed at the next checkpoint
    snapshot_floats_ = floats;
  }

  // Removes older checkpoints, meanwhile: gigabytes take their time.
  void prune(size_t keep, size_t keep_every) {
    if (!creates_) return;
    finish_pruning();
    pruning_ = std::thread([this, keep, keep_every] {
      const std::string problem = attempt([&] { prune_checkpoints(out_, keep, keep_every); });
      if (!problem.empty()) print_error("an old checkpoint could not be removed, training goes on: " + one_line(problem));
    });
  }

  // Collective. Returns when the snapshot is taken; none may be under way. Why it can't be written: the text; then
  // nothing is left of it.
  std::string begin(size_t step, const CheckpointContent& content) {
    finish_pruning();
    step_ = step;
    complete_ = out_ / checkpoint_name(step);
    plan(content);
    partial_ = ranks_.all_gather(complete_.string() + "." + std::to_string(getpid()) + ".partial")[0];
    creates_ = ranks_.rank == 0;
    std::string problem = agree(attempt([&] { if (creates_) create(); }));
    if (!problem.empty()) return discard(problem);
    const bool blind = !std::filesystem::exists(partial_);
    const std::vector<std::string> blind_hosts = ranks_.all_gather(blind ? host_name() : "");
    const auto first = std::find(blind_hosts.begin(), blind_hosts.end(), host_name());
    creates_ |= blind && first == blind_hosts.begin() + ranks_.rank;
    shared_ = std::all_of(blind_hosts.begin(), blind_hosts.end(), [](const std::string& host) { return host.empty(); });
    problem = agree(attempt([&] { if (creates_ && blind) create(); }));
    if (!problem.empty()) return discard(problem);
    problem = agree(attempt([&] { take_snapshot(content); }));
    if (!problem.empty()) return discard(problem);
    written_ = false;
    thread_ = std::thread([this] {
      setpriority(PRIO_PROCESS, id_t(gettid()), 19);  // of this thread alone: training goes first where cores are few
      problem_ = attempt([this] { write(); });
      written_ = true;
    });
    return "";
  }

  // Collective. Waits for the thread. Why it could not be written: the text.
  std::string complete() {
    thread_.join();
    writers_.clear();
    if (std::string problem = agree(problem_); !problem.empty()) return discard(problem);
    std::string problem = agree(attempt([this] {
      if (!creates_) return;
      if (shared_) check_coverage(partial_, read_manifests(partial_));
      // A second save of a step, after resuming from an earlier one, replaces the first.
      const std::filesystem::path replaced = complete_.string() + ".replaced.partial";
      if (std::filesystem::exists(complete_)) std::filesystem::rename(complete_, replaced);
      std::filesystem::rename(partial_, complete_);
      sync_folder(out_);
      std::filesystem::remove_all(replaced);
    }));
    return problem.empty() ? "" : discard(problem);
  }

 private:
  void finish_pruning() {
    if (pruning_.joinable()) pruning_.join();
  }

  static constexpr std::pair<char, const char*> kinds[] = {
      {'w', "transformer."}, {'m', "m.transformer."}, {'v', "v.transformer."}};

  struct Piece {
    size_t file, offset, count;  // number in files_; byte in the file; floats
    float* values;               // in the snapshot
  };

  template <class Work>
  static std::string attempt(Work work) {
    try {
      work();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }

  // The first rank's problem, on all ranks.
  std::string agree(const std::string& problem) {
    for (const std::string& text : ranks_.all_gather(problem))
      if (!text.empty()) return text;
    return "";
  }

  std::string discard(const std::string& problem) {
    writers_.clear();
    std::error_code ignored;
    if (creates_) std::filesystem::remove_all(partial_, ignored);  // a full disk needs the room
    ranks_.all_gather("");
    return problem;
  }

  static std::string host_name() {
    char name[256] = "";
    gethostname(name, sizeof name - 1);
    return name;
  }

  void plan(const CheckpointContent& content) {
    const auto with_prefix = [&](std::initializer_list<const char*> prefixes) {
      std::vector<NamedShape> tensors;
      for (const char* prefix : prefixes)
        for (const CheckpointTensor& tensor : content.tensors) tensors.push_back({prefix + tensor.name, tensor.shape});
      return tensors;
    };
    files_ = plan_files("model", with_prefix({"transformer."}), shard_bytes_);
    const std::vector<FilePlan> optimizer = plan_files("optimizer", with_prefix({"m.transformer.", "v.transformer."}), shard_bytes_);
    texts_.clear();
    if (files_.size() > 1) texts_["model.safetensors.index.json"] = index_of(files_);
    if (optimizer.size() > 1) texts_["optimizer.safetensors.index.json"] = index_of(optimizer);
    files_.insert(files_.end(), optimizer.begin(), optimizer.end());
    nlohmann::json trainer = content.trainer;
    trainer["step"] = step_;
    texts_["trainer.json"] = trainer.dump(2) + "\n";
    texts_["config.json"] = config_of(content.shape).dump(2) + "\n";
    for (const char* name : {"vocab.json", "merges.txt", "encoder.json", "vocab.bpe"})
      if (!content.tokenizer_folder.empty() && std::filesystem::exists(content.tokenizer_folder / name))
        texts_[name] = MappedFile(content.tokenizer_folder / name).text();
  }

  std::unique_ptr<SafetensorsWriter> open(size_t file, bool create) const {
    const std::map<std::string, std::string> metadata = {{"format", "pt"}};  // transformers wants one
    return std::make_unique<SafetensorsWriter>(partial_ / files_[file].name, files_[file].tensors, metadata, create);
  }

  // The folder and its tensor files, with all the room they need.
  void create() {
    std::filesystem::create_directories(out_);
    remove_partial_checkpoints(out_);
    std::filesystem::create_directory(partial_);
    for (size_t file = 0; file < files_.size(); ++file) open(file, true)->close();
  }

  // A piece lies in memory as it does in the file, seen from the start of a block: File::write_past_cache.
  void take_snapshot(const CheckpointContent& content) {
    std::map<std::string, size_t> file_of;
    writers_.clear();
    for (size_t file = 0; file < files_.size(); ++file) {
      writers_.push_back(open(file, false));
      for (const NamedShape& tensor : files_[file].tensors) file_of[tensor.name] = file;
    }
    pieces_.clear();
    reserve(content.slices);
    float* free = snapshot_.get();
    for (const auto& [kind, prefix] : kinds)
      for (const CheckpointSlice& slice : content.slices) {
        const std::string name = prefix + slice.tensor.name;
        const size_t file = file_of.at(name), offset = writers_[file]->offset(name, slice.first, slice.count);
        free += (offset - reinterpret_cast<uintptr_t>(free)) % File::block / sizeof(float);
        pieces_.push_back({file, offset, slice.count, free});
        content.copy_out(slice, kind, free);
        free += slice.count;
      }
    content.wait();
  }

  // On the thread.
  void write() {
    Manifest manifest = {step_, ranks_.rank, ranks_.size, {}};
    for (size_t file = 0; file < files_.size(); ++file)
      if (ranks_.rank == 0) manifest.add(files_[file].name, 0, writers_[file]->header());
    for (const Piece& piece : pieces_) {
      writers_[piece.file]->write_at(piece.offset, piece.count, piece.values);
      const auto* bytes = reinterpret_cast<const char*>(piece.values);
      manifest.add(files_[piece.file].name, piece.offset, {bytes, piece.count * sizeof(float)});
    }
    for (const auto& writer : writers_) writer->close();
    for (const auto& [name, text] : texts_) {
      if (creates_) write_file(partial_ / name, text);
      if (ranks_.rank == 0) manifest.add(name, 0, text);
    }
    write_file(partial_ / manifest.name(), manifest.text());
    sync_folder(partial_);
  }

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
inline void save_checkpoint(const std::filesystem::path& out, size_t step, const CheckpointContent& content,
                            size_t shard_bytes = size_t(5'000'000'000)) {
  CheckpointWriter writer(out, shard_bytes, {});
  std::string problem = writer.begin(step, content);
  if (problem.empty()) problem = writer.complete();
  if (!problem.empty()) fail(problem);
}
