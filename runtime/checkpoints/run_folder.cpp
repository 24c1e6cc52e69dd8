#include "runtime/checkpoints/run_folder.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <system_error>
#include <thread>
#include <vector>

#include <sys/file.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/options.h"

namespace {

std::filesystem::path best_path(const std::filesystem::path& out) { return out / "best"; }

// Creates the folder if it does not exist, and checks that it can be written to: now, not after hours of training.
// was_there: the folder existed before this program; if it did not, a refused start removes it again.
void make_writable(const std::filesystem::path& out, bool was_there) {
  std::error_code error;
  std::filesystem::create_directories(out, error);
  if (error) fail("--out ", out, ": cannot create the folder: ", error.message(), ": choose another --out");
  if (!std::filesystem::is_directory(out)) fail("--out ", out, ": is no folder: choose another --out");
  std::filesystem::path probe = out / ".write_probe";
  const std::string problem = attempt([&] { write_file(probe, std::string(4096, ' ')); });
  std::filesystem::remove(probe, error);
  if (problem.empty() && error) fail("--out ", probe, ": cannot be removed: ", error.message(), ": choose another --out");
  if (problem.empty()) return;
  if (!was_there) rmdir(out.c_str());
  fail("--out ", problem, ": free space, or choose another --out");
}

void remove_run(const std::filesystem::path& out) {
  for (const Checkpoint& checkpoint : list_checkpoints(out)) remove_checkpoint(checkpoint.folder);
  for (const auto& path : {metrics_path(out), monitor_path(out), plan_path(out)}) std::filesystem::remove(path);
  if (std::filesystem::is_symlink(best_path(out))) std::filesystem::remove(best_path(out));
}

// Renames checkpoints of later steps when a run goes back to `step`. Otherwise new checkpoints would be pruned before
// these, which have higher steps, and --resume would choose these.
void set_aside_later(const std::filesystem::path& out, size_t step) {
  for (const Checkpoint& checkpoint : list_checkpoints(out)) {
    if (checkpoint.step <= step) continue;
    if (checkpoint.step == linked_best(out)) std::filesystem::remove(best_path(out));
    std::filesystem::path aside = checkpoint.folder.string() + ".abandoned";
    std::filesystem::remove_all(aside);
    std::filesystem::rename(checkpoint.folder, aside);
  }
}

bool lies_in(const std::filesystem::path& folder, const std::filesystem::path& out) {
  return std::filesystem::weakly_canonical(folder / "..") == std::filesystem::weakly_canonical(out);
}

// Is `path` the folder or inside it? Links and .. are resolved.
bool is_or_lies_in(const std::filesystem::path& path, const std::filesystem::path& folder) {
  const std::filesystem::path within = std::filesystem::weakly_canonical(path), whole = std::filesystem::weakly_canonical(folder);
  return std::mismatch(whole.begin(), whole.end(), within.begin(), within.end()).first == whole.end();
}

}  // namespace

std::vector<Checkpoint> list_checkpoints(const std::filesystem::path& out) {
  std::vector<Checkpoint> checkpoints;
  std::error_code not_there;
  for (const auto& entry : std::filesystem::directory_iterator(out, not_there)) {
    std::string name = entry.path().filename();
    bool digits_only = name.find_first_not_of("0123456789", 5) == std::string::npos;
    if (!name.starts_with("step_") || !digits_only || name.size() < 13 || name.size() > 23) continue;
    if (entry.is_directory()) checkpoints.push_back({std::stoull(name.substr(5)), entry.path()});
  }
  std::sort(checkpoints.begin(), checkpoints.end(), [](auto& a, auto& b) { return a.step < b.step; });
  return checkpoints;
}

std::optional<Checkpoint> newest_checkpoint(const std::filesystem::path& out) {
  const std::vector<Checkpoint> checkpoints = list_checkpoints(out);
  return checkpoints.empty() ? std::nullopt : std::optional(checkpoints.back());
}

void remove_partial_checkpoints(const std::filesystem::path& out) {
  std::vector<std::filesystem::path> leftovers;
  for (const auto& entry : std::filesystem::directory_iterator(out)) {
    std::string name = entry.path().filename();
    if (name.starts_with("step_") && name.ends_with(".partial")) leftovers.push_back(entry.path());
  }
  for (const auto& leftover : leftovers) std::filesystem::remove_all(leftover);
}

void remove_checkpoint(const std::filesystem::path& folder) {
  std::filesystem::path doomed = folder.string() + ".removed.partial";
  std::filesystem::rename(folder, doomed);
  std::filesystem::remove_all(doomed);
}

void prune_checkpoints(const std::filesystem::path& out, size_t keep, size_t keep_every, const std::vector<size_t>& spared) {
  std::vector<Checkpoint> checkpoints = list_checkpoints(out);
  for (size_t i = 0; keep > 0 && i + keep < checkpoints.size(); ++i) {
    bool milestone = keep_every > 0 && checkpoints[i].step % keep_every == 0;
    if (!milestone && std::ranges::count(spared, checkpoints[i].step) == 0) remove_checkpoint(checkpoints[i].folder);
  }
}

RunFolderLock::RunFolderLock(const std::filesystem::path& out, double patience_s)
    : out_(out), created_(!std::filesystem::exists(out)) {
  double waited = 0;
  do {  // repeated if the run that held the lock before has removed the folder
    make_writable(out, !created_);
    folder_.emplace(out, O_RDONLY | O_DIRECTORY);
    for (; flock(folder_->descriptor(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK; waited += 0.1) {
      if (waited == 0) std::printf("waiting for the run that still writes to %s\n", out.c_str()), std::fflush(stdout);
      if (waited >= patience_s)
        usage_error("--out ", out, ": another run writes to it: let it end, or choose another --out");
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  } while (!folder_->is_at(out));
}

RunFolderLock::~RunFolderLock() {
  if (created_ && folder_->is_at(out_)) rmdir(out_.c_str());
}

std::filesystem::path metrics_path(const std::filesystem::path& out) { return out / "metrics.jsonl"; }

std::filesystem::path monitor_path(const std::filesystem::path& out) { return out / "monitor.jsonl"; }

std::filesystem::path plan_path(const std::filesystem::path& out) { return out / "plan.json"; }

size_t linked_best(const std::filesystem::path& out) {
  std::error_code no_link;
  const std::string target = std::filesystem::read_symlink(best_path(out), no_link);
  return target.starts_with("step_") && std::filesystem::exists(best_path(out), no_link) ? std::strtoull(target.c_str() + 5, nullptr, 10) : 0;
}

void link_best(const std::filesystem::path& out, size_t step) {
  const std::filesystem::path best = best_path(out), link = out / "step_best.partial";  // removed like other leftovers
  if (std::filesystem::exists(best) && !std::filesystem::is_symlink(best)) fail(best, ": is no link: move it away");
  std::filesystem::remove(link);
  std::filesystem::create_directory_symlink(checkpoint_name(step), link);
  std::filesystem::rename(link, best);
  sync_folder(out);
}

bool holds_run(const std::filesystem::path& out) {
  return std::filesystem::exists(metrics_path(out)) || newest_checkpoint(out);
}

std::optional<Checkpoint> find_checkpoint(const std::filesystem::path& folder) {
  if (!std::filesystem::exists(folder / "trainer.json")) return newest_checkpoint(folder);
  return Checkpoint{load_trainer(folder)["step"], folder};
}

bool continues(const std::filesystem::path& out, const StartOptions& start,
               const std::optional<Checkpoint>& checkpoint) {
  return start.resume && (start.resume_from.empty() || lies_in(checkpoint->folder, out));
}

std::optional<Checkpoint> choose_checkpoint(const std::filesystem::path& out, const StartOptions& start) {
  const std::filesystem::path& from = start.resume_from;
  std::optional<Checkpoint> checkpoint;
  if (start.resume) checkpoint = find_checkpoint(from.empty() ? out : from);
  if (!from.empty() && !checkpoint)
    fail(start.option, " ", from, ": holds no checkpoint: give a run's folder or one of its step_ folders, or --init");
  if (out.empty()) return checkpoint;
  const bool goes_on = continues(out, start, checkpoint);
  if (goes_on && start.overwrite)
    fail("--resume continues the run in ", out, ", --overwrite deletes it: give one of them");
  if (start.overwrite && !start.init.empty())
    for (const Checkpoint& doomed : list_checkpoints(out))
      if (is_or_lies_in(start.init, doomed.folder))
        fail("--init ", start.init, ": --overwrite would delete it, as a checkpoint of --out ", out,
             ": choose another --out, or move it away first");
  if (!goes_on && !start.overwrite && holds_run(out))
    usage_error("--out ", out,
                ": holds a run: continue it with --resume, replace it with --overwrite, or choose another --out");
  return checkpoint;
}

std::vector<Checkpoint> with_earlier(const Checkpoint& found) {
  std::vector<Checkpoint> all = list_checkpoints(found.folder.parent_path());
  std::erase_if(all, [&](const Checkpoint& checkpoint) { return checkpoint.step >= found.step; });
  all.push_back(found);
  return all;
}

void claim_run_folder(const std::filesystem::path& out, const StartOptions& start, const std::optional<Checkpoint>& checkpoint) {
  if (start.overwrite) remove_run(out);
  if (checkpoint && continues(out, start, checkpoint)) set_aside_later(out, checkpoint->step);
}
