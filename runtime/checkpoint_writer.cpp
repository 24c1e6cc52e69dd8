#include "runtime/checkpoint_writer.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <system_error>
#include <utility>

#include <sys/resource.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/manifest.h"

namespace {

constexpr std::pair<char, const char*> kinds[] = {
    {'w', "transformer."}, {'m', "m.transformer."}, {'v', "v.transformer."}};

// Tensors of several kinds, in order, in files of at most `shard_bytes` (or one tensor).
std::vector<FilePlan> plan_files(const std::string& stem, const std::vector<NamedShape>& tensors, size_t shard_bytes) {
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
std::string index_of(const std::vector<FilePlan>& files) {
  nlohmann::ordered_json map;
  size_t bytes = 0;
  for (const FilePlan& file : files)
    for (const NamedShape& tensor : file.tensors) {
      map[tensor.name] = file.name;
      bytes += element_count(tensor.shape) * sizeof(float);
    }
  return nlohmann::ordered_json{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}.dump(2) + "\n";
}

// Why the work cannot be done; empty: it is done.
template <class Work>
std::string attempt(Work work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

}  // namespace

CheckpointWriter::CheckpointWriter(std::filesystem::path out, size_t shard_bytes, WritingRanks ranks,
                                   Allocate allocate)
    : out_(std::move(out)), shard_bytes_(shard_bytes), ranks_(std::move(ranks)), allocate_(std::move(allocate)) {}

CheckpointWriter::~CheckpointWriter() {
  if (thread_.joinable()) thread_.join();
  finish_pruning();
}

void CheckpointWriter::reserve(const std::vector<CheckpointSlice>& slices) {
  size_t floats = 0;
  for (const CheckpointSlice& slice : slices) floats += std::size(kinds) * (slice.count + File::block / sizeof(float));
  if (floats <= snapshot_floats_) return;
  snapshot_ = allocate_(floats);  // may fail, and succeed at the next checkpoint
  snapshot_floats_ = floats;
}

void CheckpointWriter::prune(size_t keep, size_t keep_every) {
  if (!creates_) return;
  finish_pruning();
  pruning_ = std::thread([this, keep, keep_every] {
    const std::string problem = attempt([&] { prune_checkpoints(out_, keep, keep_every); });
    if (!problem.empty()) print_error("an old checkpoint could not be removed, training goes on: " + one_line(problem));
  });
}

std::string CheckpointWriter::begin(size_t step, const CheckpointContent& content) {
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

std::string CheckpointWriter::complete() {
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

void CheckpointWriter::finish_pruning() {
  if (pruning_.joinable()) pruning_.join();
}

// The first rank's problem, on all ranks.
std::string CheckpointWriter::agree(const std::string& problem) {
  for (const std::string& text : ranks_.all_gather(problem))
    if (!text.empty()) return text;
  return "";
}

std::string CheckpointWriter::discard(const std::string& problem) {
  writers_.clear();
  std::error_code ignored;
  if (creates_) std::filesystem::remove_all(partial_, ignored);  // a full disk needs the room
  ranks_.all_gather("");
  return problem;
}

void CheckpointWriter::plan(const CheckpointContent& content) {
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
  nlohmann::json trainer = nlohmann::json::parse(content.trainer);
  trainer["step"] = step_;
  texts_["trainer.json"] = trainer.dump(2) + "\n";
  texts_["config.json"] = config_of(content.shape).dump(2) + "\n";
  for (const char* name : {"vocab.json", "merges.txt", "encoder.json", "vocab.bpe", "tokenizer.json"})
    if (!content.tokenizer_folder.empty() && std::filesystem::exists(content.tokenizer_folder / name))
      texts_[name] = read_file(content.tokenizer_folder / name);
}

std::unique_ptr<SafetensorsWriter> CheckpointWriter::open(size_t file, bool create) const {
  const std::map<std::string, std::string> metadata = {{"format", "pt"}};  // transformers wants one
  return std::make_unique<SafetensorsWriter>(partial_ / files_[file].name, files_[file].tensors, metadata, create);
}

// The folder and its tensor files, with all the room they need.
void CheckpointWriter::create() {
  std::filesystem::create_directories(out_);
  remove_partial_checkpoints(out_);
  std::filesystem::create_directory(partial_);
  for (size_t file = 0; file < files_.size(); ++file) open(file, true)->close();
}

// A piece lies in memory as it does in the file, seen from the start of a block: File::write_past_cache.
void CheckpointWriter::take_snapshot(const CheckpointContent& content) {
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
void CheckpointWriter::write() {
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

void save_checkpoint(const std::filesystem::path& out, size_t step, const CheckpointContent& content,
                     size_t shard_bytes) {
  CheckpointWriter writer(out, shard_bytes, {});
  std::string problem = writer.begin(step, content);
  if (problem.empty()) problem = writer.complete();
  if (!problem.empty()) fail(problem);
}
