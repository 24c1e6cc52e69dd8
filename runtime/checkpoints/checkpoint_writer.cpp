#include "runtime/checkpoints/checkpoint_writer.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <set>
#include <system_error>
#include <utility>

#include <sys/resource.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "gpt/base/clock.h"
#include "gpt/base/error.h"
#include "gpt/base/files.h"
#include "gpt/base/text.h"
#include "runtime/checkpoints/errors.h"
#include "runtime/checkpoints/run_folder.h"

namespace {

// Distributes the tensors, in order, over files of at most `shard_bytes` bytes. A larger tensor gets a file of its own.
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
    const std::string number = files.size() > 1 ? formatted("-%05zu-of-%05zu", i + 1, files.size()) : "";
    files[i].name = stem + number + ".safetensors";
  }
  return files;
}

// The index that says which file holds which tensor, as Hugging Face's libraries write it.
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

}  // namespace

CheckpointWriter::CheckpointWriter(std::filesystem::path out, size_t shard_bytes, RankGroup ranks, Allocate allocate)
    : out_(std::move(out)), shard_bytes_(shard_bytes), ranks_(std::move(ranks)), allocate_(std::move(allocate)) {}

size_t CheckpointWriter::snapshot_floats(const std::vector<CheckpointBlock>& blocks, const SavedStates& states) {
  size_t floats = 0;
  for (const CheckpointBlock& block : blocks) floats += states.of(block).size() * (block.count + File::block / sizeof(float));
  return floats;
}

void CheckpointWriter::reserve(const std::vector<CheckpointBlock>& blocks, const SavedStates& states) {
  const size_t floats = snapshot_floats(blocks, states);
  if (floats <= snapshot_floats_) return;
  snapshot_ = allocate_(floats);
  snapshot_floats_ = floats;
  if (!snapshot_) reserve_chunk_memory();
}

void CheckpointWriter::reserve_chunk_memory() {
  snapshot_.reset();
  chunk_memory_.resize(ranks_.chunk_bytes / sizeof(float));
}

std::vector<std::string> CheckpointWriter::find_slow_ranks() {
  const int seen = ranks_.size() == 1 ? 0 : whose_folder(ranks_, out_, ranks_.is_first());
  const std::vector<std::string> all = ranks_.all_gather(seen != 0 ? "blind" : snapshot_ ? "" : "no room");
  std::vector<int> unseeing, roomless;
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    if (all[size_t(rank)] == "blind") unseeing.push_back(rank);
    if (all[size_t(rank)] == "no room") roomless.push_back(rank);
  }
  // With the other ranks of their tensor-parallel groups, which can't gather while these still wait to send.
  blind_.clear();
  for (int rank = 0; rank < ranks_.size(); ++rank)
    if (std::ranges::any_of(unseeing, [&](int other) { return other / ranks_.tp == rank / ranks_.tp; }))
      blind_.push_back(rank);
  if (is_blind(ranks_.rank())) reserve_chunk_memory();
  std::vector<std::string> reasons;
  if (!unseeing.empty())
    reasons.push_back(out_.string() + " on the host of rank 0 (" + ranks_.host(0) + ") is not seen by " +
                      hosts_of(unseeing) + ": what has to be saved travels there, and training waits; " +
                      "a file system that the hosts share avoids that");
  if (!roomless.empty())
    reasons.push_back("no room for a snapshot in the host's memory of " + hosts_of(roomless) +
                      ": training waits while a checkpoint is written");
  return reasons;
}

// "ranks 1-3 (node7, node8)"
std::string CheckpointWriter::hosts_of(const std::vector<int>& some) const {
  std::set<std::string> hosts;
  for (int rank : some) hosts.insert(ranks_.host(rank));
  return rank_list(some) + " (" + joined(hosts) + ")";
}

void CheckpointWriter::prune(size_t keep, size_t keep_every, const std::vector<size_t>& spared) {
  if (!ranks_.is_first()) return;
  pruning_ = {};  // waits for the one before
  pruning_ = std::jthread([=, this] {
    const std::string problem = attempt([&] { prune_checkpoints(out_, keep, keep_every, spared); });
    if (!problem.empty()) print_error("an old checkpoint could not be removed, training goes on: " + one_line(problem) + ": remove it yourself");
  });
}

std::string CheckpointWriter::begin(size_t step, const CheckpointContent& content) {
  pruning_ = {};  // waits for it
  step_ = step;
  complete_ = out_ / checkpoint_name(step);
  partial_ = ranks_.all_gather(complete_.string() + "." + std::to_string(getpid()) + ".partial")[0];
  std::string problem = attempt_together(ranks_, [&] {
    plan(content);
    if (ranks_.is_first()) create();
  });
  if (problem.empty())
    problem = attempt_together(ranks_, [&] {
      if (has_files()) open_files();
      if (!is_blind(ranks_.rank())) reserve(content.blocks, content.states);
    });
  if (problem.empty())
    problem = attempt_together(ranks_, [&] {
      if (is_blind(ranks_.rank())) return;
      if (snapshot_) take_snapshot(content);
      else write_in_chunks(content);
    });
  if (problem.empty() && !blind_.empty()) problem = send_in_chunks(content);
  if (!problem.empty()) return discard(problem);
  written_ = false;
  thread_ = std::jthread([this] {
    setpriority(PRIO_PROCESS, id_t(gettid()), 19);  // lowers only this thread's priority, so that training comes first
    problem_ = attempt([this] { if (has_files()) write(); });
    written_ = true;
  });
  begun_ = true;
  return "";
}

std::string CheckpointWriter::complete() {
  thread_.join();
  writers_.clear();
  if (std::string problem = first_problem(ranks_, problem_); !problem.empty()) return discard(problem);
  std::string problem = attempt_together(ranks_, [this] { if (ranks_.is_first()) give_name(); });
  begun_ = false;
  return problem.empty() ? "" : discard(problem);
}

bool CheckpointWriter::finish_alone(double patience_s, const std::function<bool()>& all_are_there) {
  if (!begun_) return false;
  const double end = steady_seconds() + patience_s;
  const auto wait = [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
  while (!written_ && steady_seconds() < end) wait();
  if (!written_ || !problem_.empty()) return false;
  for (bool hopes = ranks_.is_first(); hopes; wait()) {  // give_name() fails while another rank still writes its part
    hopes = all_are_there() && steady_seconds() < end;
    if (attempt([this] { give_name(); }).empty()) break;
  }
  return true;
}

// On rank 0, when all ranks have written their parts: checks the manifests and renames the folder.
void CheckpointWriter::give_name() {
  const std::lock_guard lock(naming_);
  if (!begun_) return;
  check_coverage(partial_, read_manifests(partial_));
  // If a run resumes from an earlier step and saves this step again, the new checkpoint replaces the old one.
  const std::filesystem::path replaced = complete_.string() + ".replaced.partial";
  if (std::filesystem::exists(complete_)) std::filesystem::rename(complete_, replaced);
  std::filesystem::rename(partial_, complete_);
  begun_ = false;
  sync_folder(out_);
  std::filesystem::remove_all(replaced);
}

std::string CheckpointWriter::discard(const std::string& problem) {
  begun_ = false;
  writers_.clear();
  std::error_code ignored;
  if (ranks_.is_first()) std::filesystem::remove_all(partial_, ignored);  // the disk may be full
  ranks_.all_gather("");
  return problem;
}

void CheckpointWriter::plan(const CheckpointContent& content) {
  const TensorList& list = content.parameters.shards().list();
  files_.clear();
  texts_.clear();
  const auto add = [&](const std::string& stem, const std::vector<NamedShape>& tensors) {
    const std::vector<FilePlan> files = plan_files(stem, tensors, shard_bytes_);
    if (files.size() > 1) texts_[stem + ".safetensors.index.json"] = index_of(files);
    files_.insert(files_.end(), files.begin(), files.end());
  };
  const auto named = [&](const std::vector<State>& states, int island = 0) {
    std::vector<NamedShape> tensors;
    for (State state : states)
      for (const TensorDescriptor& tensor : list.tensors())
        tensors.push_back({file_prefix(state, list, CheckpointBlock::none, island) + tensor.name, tensor.shape});
    return tensors;
  };
  add(file_stem(list), named({State::weight}));
  for (int island = 0; island < content.states.islands; ++island)
    add(optimizer_stem(island), named(content.states.of_optimizer(), island));
  if (content.states.has_outer) add("outer", named({State::outer_momentum}));
  std::vector<NamedShape> errors;
  for (const TensorDescriptor& tensor : list.tensors())
    for (int copy = 0; content.parameters.has_errors() && copy < copies_of(tensor, content.parameters.shards()).all; ++copy)
      errors.push_back({file_prefix(State::error, list, copy) + tensor.name, tensor.shape});
  for (const TensorDescriptor& factor : content.parameters.factors())
    for (int copy = 0; copy < copies_of_factor(factor, list).all; ++copy)
      errors.push_back({file_prefix(State::factor, list, copy) + factor.name, factor.shape});
  if (!errors.empty()) add("errors", errors);
  file_of_.clear();
  for (size_t file = 0; file < files_.size(); ++file)
    for (const NamedShape& tensor : files_[file].tensors) file_of_[tensor.name] = file;
  nlohmann::json trainer = nlohmann::json::parse(content.trainer);
  trainer["step"] = step_;
  texts_["trainer.json"] = trainer.dump(2) + "\n";
  texts_.insert(content.texts.begin(), content.texts.end());
  if (!list.is_adapters()) texts_["config.json"] = config_of(list.shape(), content.tokenizer_folder).dump(2) + "\n";
  for (const char* name : tokenizer_files)
    if (!content.tokenizer_folder.empty() && std::filesystem::exists(content.tokenizer_folder / name))
      texts_[name] = read_file(content.tokenizer_folder / name);
}

std::unique_ptr<SafetensorsWriter> CheckpointWriter::open(size_t file, bool create) const {
  const std::map<std::string, std::string> metadata = {{"format", "pt"}};  // transformers requires it
  return std::make_unique<SafetensorsWriter>(partial_ / files_[file].name, files_[file].tensors, metadata, create);
}

// Creates the folder and its tensor files at their full size.
void CheckpointWriter::create() {
  std::filesystem::create_directories(out_);
  remove_partial_checkpoints(out_);
  std::filesystem::create_directory(partial_);
  for (size_t file = 0; file < files_.size(); ++file) open(file, true)->close();
}

void CheckpointWriter::open_files() {
  writers_.clear();
  for (size_t file = 0; file < files_.size(); ++file) writers_.push_back(open(file, false));
  manifests_.clear();
  ranges_.clear();
  for (int rank = 0; rank < ranks_.size(); ++rank)
    if (rank == ranks_.rank() || (ranks_.is_first() && is_blind(rank)))
      manifests_[rank] = {step_, rank, ranks_.size(), {}};
}

// ---- blocks from the device to the files

std::vector<CheckpointWriter::BlockChunk> CheckpointWriter::chunks_of(const CheckpointContent& content, size_t most_floats) {
  const TensorList& list = content.parameters.shards().list();
  std::vector<BlockChunk> chunks;
  std::vector<State> states = content.states.own();
  states.insert(states.end(), {State::error, State::factor});
  for (State state : states)
    for (const CheckpointBlock& block : content.blocks)
      for (size_t done = 0; std::ranges::count(content.states.of(block), state) > 0 && done < block.count; done += most_floats)
        chunks.push_back({state, file_prefix(state, list, block.copy, content.states.island) + block.tensor->name,
                         {block.tensor, block.first + done, std::min(most_floats, block.count - done), block.gathered}});
  // Gathered blocks come first. So the i-th of them belongs to the same round on each tensor-parallel rank, also where
  // one rank has a snapshot and another writes chunk by chunk. (A gathered block fits into a chunk, so it is never
  // cut.)
  std::stable_partition(chunks.begin(), chunks.end(), [](const BlockChunk& chunk) { return chunk.block.gathered; });
  return chunks;
}

CheckpointWriter::FileRange CheckpointWriter::range_of(const std::string& tensor, size_t first, size_t count,
                                                   const float* values) const {
  const size_t file = file_of_.at(tensor);
  return {file, writers_[file]->offset(tensor, first, count), count, values};
}

// Writes a range of rank `rank` to its file, and adds it to that rank's manifest.
void CheckpointWriter::put(int rank, const FileRange& range) {
  writers_[range.file]->write_at(range.offset, range.count, range.values);
  const auto* bytes = reinterpret_cast<const char*>(range.values);
  manifests_.at(rank).add(files_[range.file].name, range.offset, {bytes, range.count * sizeof(float)});
}

// Copies this rank's blocks to the snapshot. A range's address in memory and its offset in the file have the same
// remainder modulo a block, as File::write_past_cache needs.
void CheckpointWriter::take_snapshot(const CheckpointContent& content) {
  float* free = snapshot_.get();
  for (const auto& [state, name, block] : chunks_of(content, SIZE_MAX)) {
    FileRange range = range_of(name, block.first, block.count, nullptr);
    free += (range.offset - reinterpret_cast<uintptr_t>(free)) % File::block / sizeof(float);
    range.values = free;
    ranges_.push_back(range);
    content.parameters.copy_out(block, state, free);
    free += block.count;
  }
  content.parameters.wait_for_copies();
}

// Copies and writes this rank's blocks chunk by chunk, if there is no memory for a snapshot.
void CheckpointWriter::write_in_chunks(const CheckpointContent& content) {
  std::string problem;
  for (const BlockChunk& chunk : chunks_of(content, chunk_memory_.size())) {
    copy_chunk(content, chunk);  // after a problem, too: other ranks may wait for this copy
    if (!problem.empty()) continue;
    problem = attempt([&] {
      put(ranks_.rank(), range_of(chunk.name, chunk.block.first, chunk.block.count, chunk_memory_.data()));
    });
  }
  if (!problem.empty()) fail(problem);
}

void CheckpointWriter::copy_chunk(const CheckpointContent& content, const BlockChunk& chunk) {
  content.parameters.copy_out(chunk.block, chunk.state, chunk_memory_.data());
  content.parameters.wait_for_copies();
}

// Collective: ranks that don't see rank 0's folder send their blocks to rank 0, one chunk per rank and round. A chunk
// is sent as one line "TENSOR FIRST", followed by the floats.
std::string CheckpointWriter::send_in_chunks(const CheckpointContent& content) {
  std::vector<BlockChunk> chunks;
  if (is_blind(ranks_.rank())) chunks = chunks_of(content, chunk_memory_.size());
  size_t rounds = 0;
  for (const std::string& number : ranks_.all_gather(std::to_string(chunks.size())))
    rounds = std::max(rounds, size_t(std::stoull(number)));
  std::string problem;
  for (size_t i = 0; i < rounds; ++i) {
    std::string mine;
    if (i < chunks.size()) {
      const std::string failed = attempt([&] {
        copy_chunk(content, chunks[i]);
        mine = chunks[i].name + " " + std::to_string(chunks[i].block.first) + "\n";
        mine.append(reinterpret_cast<const char*>(chunk_memory_.data()), chunks[i].block.count * sizeof(float));
      });
      if (problem.empty()) problem = failed;
    }
    const std::vector<std::string> all = ranks_.gather(mine);
    if (ranks_.is_first() && problem.empty())
      problem = attempt([&] { for (int rank : blind_) receive(rank, all[size_t(rank)]); });
  }
  return first_problem(ranks_, problem);
}

void CheckpointWriter::receive(int rank, const std::string& chunk) {
  if (chunk.empty()) return;
  const size_t line = chunk.find('\n'), space = chunk.find(' ');
  std::vector<float> values((chunk.size() - line - 1) / sizeof(float));
  std::memcpy(values.data(), chunk.data() + line + 1, values.size() * sizeof(float));
  put(rank, range_of(chunk.substr(0, space), std::stoull(chunk.substr(space + 1, line)), values.size(), values.data()));
}

// Runs on the thread: writes the ranges of the snapshot, the small files (rank 0), and the manifests.
void CheckpointWriter::write() {
  for (const FileRange& range : ranges_) put(ranks_.rank(), range);
  if (ranks_.is_first())
    for (size_t file = 0; file < files_.size(); ++file) manifests_[0].add(files_[file].name, 0, writers_[file]->header());
  for (const auto& writer : writers_) writer->close();
  if (ranks_.is_first())
    for (const auto& [name, text] : texts_) {
      write_file(partial_ / name, text);
      manifests_[0].add(name, 0, text);
    }
  for (const auto& [rank, manifest] : manifests_) write_file(partial_ / manifest.name(), manifest.text());
  sync_folder(partial_);
}
