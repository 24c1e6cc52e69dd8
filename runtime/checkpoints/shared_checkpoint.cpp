#include "runtime/checkpoints/shared_checkpoint.h"

#include <algorithm>
#include <cstdio>
#include <ranges>
#include <set>
#include <sstream>
#include <vector>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/files.h"
#include "gpt/base/text.h"
#include "runtime/checkpoints/manifest.h"

namespace {

// A checksum of a checkpoint's manifests; empty: there is no checkpoint. Two checkpoints with the same manifests have
// the same bytes, unless they are damaged.
std::string fingerprint(const std::filesystem::path& folder) {
  std::string all;
  attempt([&] { for (const auto& file : manifest_files(folder)) all += read_file(file); });
  return all.empty() ? "" : xxh3(all);
}

// Fails if another host has a newer checkpoint than rank 0: the run would go back, or start again, and nobody would
// notice. steps: the newest step that each rank sees; empty: none.
void refuse_newer_elsewhere(const StartOptions& start, const std::filesystem::path& from, const std::vector<std::string>& steps,
                            const RankGroup& ranks) {
  for (size_t rank = 1; rank < steps.size(); ++rank) {
    if (steps[rank].empty() || (!steps[0].empty() && std::stoull(steps[rank]) <= std::stoull(steps[0]))) continue;
    const std::string& there = ranks.host(int(rank));
    fail(start.option, ": ", from, " holds step ", steps[rank], " on ", there, " (rank ", rank, ") and ",
         steps[0].empty() ? "no checkpoint" : "step " + steps[0], " on ", ranks.host(0), " (rank 0), whose folder counts: ",
         "start with ", there, " as the first host, or copy the checkpoint to ", ranks.host(0), ", or remove it");
  }
}

// Collective: returns rank 0's list on all ranks. A NUL follows each step and path, because a path may hold any other
// byte.
std::vector<Checkpoint> share(const std::vector<Checkpoint>& mine, const RankGroup& ranks) {
  std::string list;
  for (const Checkpoint& checkpoint : mine) list += std::to_string(checkpoint.step) + '\0' + checkpoint.folder.string() + '\0';
  std::istringstream all(ranks.all_gather(list)[0]);
  std::vector<Checkpoint> shared;
  for (std::string step, folder; std::getline(all, step, '\0') && std::getline(all, folder, '\0');)
    shared.push_back({std::stoull(step), folder});
  return shared;
}

using FileSize = std::pair<std::string, size_t>;  // name, bytes

// Collective: each rank does one step of the copy. If it fails on one rank, it fails on all, with the same reason.
template <class Work>
void copy_together(const RankGroup& ranks, Work work) {
  const std::string problem = attempt_together(ranks, work);
  if (!problem.empty()) fail("a copy of the checkpoint for a host that does not see it: ", problem, ": put --out where all hosts see it");
}

// Collective: returns the files of rank 0's checkpoint on all ranks: its manifests, and the files that they list.
std::vector<FileSize> share_files(const std::filesystem::path& folder, const RankGroup& ranks) {
  std::vector<FileSize> files;
  copy_together(ranks, [&] {
    if (!ranks.is_first()) return;
    std::set<std::string> names;
    for (const Manifest& manifest : read_manifests(folder)) {
      names.insert(manifest.name());
      for (const Extent& extent : manifest.extents) names.insert(extent.file);
    }
    for (const std::string& name : names) files.emplace_back(name, File(folder / name, O_RDONLY).size());
  });
  return nlohmann::json::parse(ranks.all_gather(nlohmann::json(files).dump())[0]);
}

// Collective: copies rank 0's file `from` to `to` on the ranks where `writes` is true.
void send_file(const std::filesystem::path& from, const std::filesystem::path& to, size_t bytes, bool writes,
               const RankGroup& ranks) {
  std::optional<File> file;
  std::string problem = attempt([&] {
    if (ranks.is_first()) file.emplace(from, O_RDONLY);
    else if (writes) file.emplace(to, O_WRONLY | O_CREAT | O_TRUNC);
  });
  for (size_t offset = 0; offset < bytes; offset += ranks.chunk_bytes) {
    std::string chunk(ranks.is_first() ? std::min(bytes - offset, ranks.chunk_bytes) : 0, 0);
    if (ranks.is_first() && problem.empty()) problem = attempt([&] { file->read(offset, chunk.data(), chunk.size()); });
    chunk = ranks.all_gather(chunk)[0];
    if (writes && problem.empty()) problem = attempt([&] { file->write(offset, chunk.data(), chunk.size()); });
  }
  copy_together(ranks, [&] { if (!problem.empty()) fail(problem); });
}

}  // namespace

std::optional<Checkpoint> choose_shared_checkpoint(const std::filesystem::path& out, const StartOptions& start,
                                                   const RankGroup& ranks) {
  const std::filesystem::path from = start.resume_from.empty() ? out : start.resume_from;
  std::optional<Checkpoint> seen;
  if (start.resume) attempt([&] { seen = find_checkpoint(from); });  // rank 0 reports errors, below
  refuse_newer_elsewhere(start, from, ranks.all_gather(seen ? std::to_string(seen->step) : ""), ranks);
  std::optional<Checkpoint> found;
  if (ranks.is_first() || !start.resume) found = choose_checkpoint(out, start);
  const std::vector<Checkpoint> candidates = share(found ? with_earlier(*found) : std::vector<Checkpoint>(), ranks);
  if (candidates.empty()) return {};
  for (const Checkpoint& candidate : candidates | std::views::reverse) {  // the newest that is not damaged
    const std::string problem = damage_anywhere(candidate.folder, ranks);
    if (problem.empty()) return candidate;
    if (candidate.folder == start.resume_from) fail(start.option, " ", problem, ": name another checkpoint");
    std::fprintf(start.notes, "skipping checkpoint %s: %s\n", one_line(candidate.folder.native()).c_str(),
                 one_line(problem).c_str());
  }
  fail(start.option, ": no checkpoint in ", candidates.back().folder.parent_path(), " is whole: take weights from ",
       "elsewhere with --init, or train afresh with --overwrite");
}

std::string damage_anywhere(const std::filesystem::path& folder, const RankGroup& ranks) {
  const std::vector<std::string> prints = ranks.all_gather(fingerprint(folder));
  const auto mine = prints.begin() + ranks.rank();
  if (*mine != prints[0]) return first_problem(ranks, "");
  return first_problem(ranks, damage_of(folder, size_t(std::count(prints.begin(), mine, prints[0])),
                                        size_t(std::count(prints.begin(), prints.end(), prints[0]))));
}

std::filesystem::path CheckpointCopies::folder_of(const std::filesystem::path& folder) {
  if (folder == original_) return readable_;
  const std::vector<std::string> prints = ranks_.all_gather(fingerprint(folder));
  const auto blind = [&](const std::string& print) { return print != prints[0]; };
  original_ = readable_ = folder;
  copied_ = std::any_of(prints.begin(), prints.end(), blind);
  if (!copied_) return readable_;
  const bool needs_copy = blind(prints[size_t(ranks_.rank())]);
  copy_together(ranks_, [&] { if (needs_copy) std::filesystem::create_directories(place_); });
  const int writer = whose_folder(ranks_, place_, needs_copy);
  writes_ = needs_copy && writer == ranks_.rank();
  if (needs_copy) readable_ = place_ / ("step_copy_for_rank_" + std::to_string(writer) + ".partial");
  copy_together(ranks_, [&] {
    if (!writes_) return;
    std::filesystem::remove_all(readable_);  // a crash may have left one
    std::filesystem::create_directory(readable_);
  });
  for (const auto& [name, bytes] : share_files(folder, ranks_))
    send_file(folder / name, readable_ / name, bytes, writes_, ranks_);
  const std::string damage = writes_ ? damage_of(readable_) : "";
  copy_together(ranks_, [&] { if (!damage.empty()) fail(damage); });
  return readable_;
}

void CheckpointCopies::release() {
  if (copied_) ranks_.all_gather("");  // wait until all ranks have read
  if (writes_) std::filesystem::remove_all(readable_);
  original_.clear();
  copied_ = writes_ = false;
}
