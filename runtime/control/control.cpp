#include "runtime/control/control.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <ranges>
#include <stdexcept>
#include <utility>

#include <sys/eventfd.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/text.h"

namespace {

// A launcher that has lost one rank sends SIGTERM to the others, which would end before rank 0's verdict tells the
// reason. So the control thread waits a moment for the verdict before it lets the signal have its effect.
std::atomic<bool> sigterm_came = false;
struct sigaction sigterm_before = {};  // the action before this program's
void note_sigterm(int) { sigterm_came = true; }

std::string reason(int error) { return error ? std::string(" (") + std::strerror(error) + ")" : ""; }

std::string seconds(double number) { return concat(number, " s"); }

// Several texts as one: the size of each (uint64), then its bytes.
std::string as_one(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) {
    const uint64_t size = text.size();
    all.append(reinterpret_cast<const char*>(&size), sizeof size).append(text);
  }
  return all;
}

// The inverse of as_one().
std::vector<std::string> split(const std::string& all) {
  std::vector<std::string> texts;
  for (size_t at = 0; at < all.size(); at += texts.back().size()) {
    uint64_t size;
    std::memcpy(&size, all.data() + at, sizeof size);
    at += sizeof size;
    texts.push_back(all.substr(at, size));
  }
  return texts;
}

// The flight record in the text of a heartbeat.
FlightBrief brief_of(const std::string& text) {
  const nlohmann::json record = nlohmann::json::parse(text);
  return {record.at(0), record.at(1), record.at(2)};
}

}  // namespace

Control::Control(int rank, Peers peers)
    : peers_(std::move(peers)), contributions_(peers_.size()),
      heartbeats_(peers_.size(), {0, "not heard of yet", ""}), failed_(peers_.size()),
      notes_(peers_.size()), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  rank_ = rank, hosts_.clear();  // so far it was a job of one rank
  for (const Peer& peer : peers_) hosts_.push_back(peer.host);
  for (Connection* connection : open_connections(peers_)) connection->last_heard = steady_seconds();
  struct sigaction wanted = {};
  wanted.sa_handler = note_sigterm, wanted.sa_flags = SA_ONSTACK | SA_RESTART;  // the stack is that of gpt/interruption.h
  sigaction(SIGTERM, &wanted, &sigterm_before);
  thread_ = std::thread([this] { serve(); });
}

Control::~Control() {
  stopping_ = true;
  stop_thread();
}

std::vector<std::string> Control::all_gather(const std::string& mine, double patience, Place place) {
  return meet("host all_gather", place, FrameType::for_all, mine, patience);
}

std::vector<std::string> Control::gather(const std::string& mine, double patience, Place place) {
  return meet("host gather", place, FrameType::for_rank_0, mine, patience);
}

void Control::barrier(double patience, Place place) { meet("host barrier", place, FrameType::for_rank_0, "", patience); }

void Control::before_end(LastWork work) {
  const std::lock_guard lock(last_work_mutex_);
  last_work_ = std::move(work);
}

bool Control::do_last_work() {
  ending_ = true;
  const std::lock_guard lock(last_work_mutex_);
  return last_work_ && last_work_([this] { return all_are_there(); });
}

// Called in the control thread, which has nothing else to do any more.
bool Control::all_are_there() {
  exchange(open_connections(peers_), -1, 0);
  return std::ranges::all_of(peers_, [](const Peer& peer) { return !peer.connection || peer.connection->is_open(); });
}

void Control::at_exit(std::function<void(int)> work, double patience_s) {
  const std::lock_guard lock(last_work_mutex_);
  at_exit_ = std::move(work);
  at_exit_patience_s_ = patience_s;
}

void Control::do_work_at_exit(int exit_code) {
  const auto work = [this] { return std::lock_guard(last_work_mutex_), at_exit_; }();  // without the lock, as it takes long
  if (work) work(exit_code);
}

[[noreturn]] void Control::exit(int exit_code) {
  do_work_at_exit(exit_code);
  _exit(exit_code);
}

[[noreturn]] void Control::fail(const std::string& message, int exit_code) {
  std::fflush(stdout);
  if (thread_.joinable()) {
    submit({FrameType::report, std::to_string(exit_code) + " " + message});
    for (int tenths = 0; tenths < 20 || ending_; ++tenths)  // normally the verdict ends this process during the wait
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  if (!message.empty()) print_error(one_line(size() == 1 ? message : name_of(rank_) + ": " + message));
  if (size() == 1) do_last_work();
  exit(exit_code);
}

void Control::finish(Place place) {
  if (!thread_.joinable()) return;
  leaving_ = true;
  meet("finish", place, FrameType::for_rank_0, "");
  stop_thread();
}

void Control::stop_thread() {
  if (!thread_.joinable()) return;
  eventfd_write(wake_.get(), 1);
  thread_.join();
  sigaction(SIGTERM, &sigterm_before, nullptr);
}

// ---- from the program's threads to the control thread and back

void Control::submit(Frame frame) {
  {
    const std::lock_guard lock(mutex_);
    outbox_.push_back(std::move(frame));
  }
  eventfd_write(wake_.get(), 1);
}

// A contribution is sent as a line with the meeting's name and place, and the bytes.
std::vector<std::string> Control::meet(const char* name, const Place& place, FrameType type, const std::string& mine,
                                       double patience) {
  if (size() == 1) return {mine};
  if (mine.size() > longest_frame / size_t(size()) - 2 * sizeof(uint64_t))
    throw std::length_error("all_gather of " + std::to_string(mine.size()) + " bytes a rank: use a collective");
  const uint64_t sequence = recorder_.enter(name, 0, patience);
  const std::filesystem::path file = std::filesystem::path(place.file_name()).filename();
  submit({type, concat(name, " (", file, ":", place.line(), ")\n", mine)});
  std::unique_lock lock(mutex_);
  while (!gathered_changed_.wait_for(lock, std::chrono::milliseconds(1), [this] { return !gathered_.empty(); })) {
    lock.unlock();
    meanwhile_();
    lock.lock();
  }
  recorder_.leave(sequence);
  return std::exchange(gathered_, {});
}

void Control::send_note(const std::string& text) {
  if (size() == 1) keep_note(0, text);
  else submit({FrameType::note, text});
}

void Control::keep_note(int from, std::string text) {
  const std::lock_guard lock(mutex_);
  std::deque<std::string>& notes = notes_[size_t(from)];
  notes.push_back(std::move(text));
  if (notes.size() > 2) notes.pop_front();
  note_came_.notify_all();
}

std::vector<std::string> Control::take_notes(double seconds) {
  std::unique_lock lock(mutex_);
  const auto all_are_there = [&] { return std::ranges::none_of(notes_, &std::deque<std::string>::empty); };
  const bool complete = note_came_.wait_for(lock, std::chrono::duration<double>(seconds), all_are_there);
  std::vector<std::string> taken(notes_.size());
  for (size_t rank = 0; rank < taken.size(); ++rank)
    if (!notes_[rank].empty()) taken[rank] = std::move(notes_[rank].front()), notes_[rank].pop_front();
  if (!complete)  // meanwhile the others have sent more, which would be old next time
    for (std::deque<std::string>& notes : notes_) notes.clear();
  return taken;
}

// ---- the control thread

void Control::serve() try {
  double last = steady_seconds(), last_beat = 0;
  while (!stopping_ && !finished_) {
    exchange(open_connections(peers_), wake_.get(), 100);
    const double now = steady_seconds();
    if (now - last > 3 * period()) forgive(now, now - last);
    last = now;
    take_outbox();
    for (int rank = 0; rank < size(); ++rank)
      if (Connection* connection = peers_[size_t(rank)].connection.get())
        while (std::optional<Frame> frame = connection->next()) handle(rank, std::move(*frame));
    if (finished_) break;
    if (now - last_beat > period()) {
      beat();
      last_beat = now;
    }
    judge(now);
    heed_sigterm(now);
  }
  if (finished_ && rank_ == 0) linger(peers_, 2);
  peers_[0].connection.reset();
} catch (const std::exception& error) {
  print_error(one_line(name_of(rank_) + ": control thread: " + error.what()));
  exit(1);
}

// This process itself was stopped and continued, perhaps the whole job was. So silence of the others in that time does
// not count.
void Control::forgive(double now, double seconds) {
  for (Connection* connection : open_connections(peers_)) connection->last_heard = now;
  recorder_.forgive(seconds);
}

void Control::take_outbox() {
  uint64_t wakes;
  eventfd_read(wake_.get(), &wakes);
  std::vector<Frame> frames;
  {
    const std::lock_guard lock(mutex_);
    frames.swap(outbox_);
  }
  for (Frame& frame : frames) {
    if (rank_ == 0) handle(0, std::move(frame));
    else peers_[0].connection->send(frame.type, frame.payload);
  }
}

void Control::handle(int from, Frame frame) {
  switch (frame.type) {
    case FrameType::heartbeat: heartbeats_[size_t(from)] = brief_of(frame.payload); break;
    case FrameType::for_all:
    case FrameType::for_rank_0: collect(from, std::move(frame)); break;
    case FrameType::note: keep_note(from, std::move(frame.payload)); break;
    case FrameType::gathered: deliver(split(frame.payload)); break;
    case FrameType::report: {
      const std::string message = frame.payload.substr(frame.payload.find(' ') + 1);
      add_failure({Fault::reported, from, message, std::stoi(frame.payload)}, 0.3);
      break;
    }
    case FrameType::verdict: {
      ending_ = true;
      const bool reported = frame.payload.ends_with(" reported"), saves = reported && do_last_work();
      const int exit_code = std::stoi(frame.payload);
      do_work_at_exit(exit_code);
      linger(peers_, std::max(at_exit_patience_s_.load(), saves ? 300. : 0.));  // a launcher kills all ranks when the first ends
      _exit(exit_code);
    }
    default: throw std::runtime_error("a frame of type " + std::to_string(int(frame.type)) + " out of turn");
  }
}

// On rank 0: keeps a contribution to the meeting under way. When all ranks have sent theirs, from the same place, it
// sends them all texts.
void Control::collect(int from, Frame frame) {
  const size_t place_end = frame.payload.find('\n');
  const std::string place = frame.payload.substr(0, place_end);
  contributions_[size_t(from)] = {place, frame.payload.substr(place_end + 1)};
  // Two ranks that wait for each other in different meetings would wait for ever.
  if (std::ranges::any_of(contributions_, [&](const auto& other) { return other && other->place != place; }))
    return add_failure({Fault::parted, from, ""}, 0.3);
  if (!std::ranges::all_of(contributions_, [](const auto& other) { return other.has_value(); })) return;
  std::vector<std::string> texts;
  for (auto& one : contributions_) texts.push_back(std::move(std::exchange(one, {})->bytes));
  ++meetings_;
  const bool for_all = frame.type == FrameType::for_all;
  send_to_all(peers_, FrameType::gathered, as_one(for_all ? texts : std::vector<std::string>(texts.size())));
  deliver(std::move(texts));
}

void Control::deliver(std::vector<std::string> texts) {
  finished_ = leaving_.load();
  const std::lock_guard lock(mutex_);
  gathered_ = std::move(texts);
  gathered_changed_.notify_one();
}

void Control::beat() {
  const FlightBrief record = flight();
  heartbeats_[size_t(rank_)] = record;
  const nlohmann::json beat = {record.waiting, record.place, record.history};
  const Packet packet = pack(FrameType::heartbeat, beat.dump());
  for (Connection* connection : open_connections(peers_))
    if (!connection->has_unsent()) connection->send(packet);  // unsent bytes show that this rank is alive, too
}

// ---- reasons to end the job

void Control::judge(double now) {
  const double limit = rank_ == 0 && collective_timeout_s_ > 0 ? collective_timeout_s_.load() : INFINITY;
  const double patience_s = sigterm_came ? 3 * period() : silence_s_.load();  // the launcher may have noticed first
  for (int rank = 0; rank < size(); ++rank) {
    // The time is enough for every rank's next heartbeat, which says where the rank is.
    if (heartbeats_[size_t(rank)].waiting > limit) add_failure({Fault::hung, rank, ""}, 1.5 * period());
    const Connection* connection = peers_[size_t(rank)].connection.get();
    if (connection && !connection->is_open())
      lose({Fault::died, rank, " died" + reason(connection->error())});
    else if (connection && now - connection->last_heard > patience_s)
      lose({Fault::silent, rank, " has not answered for " + seconds(std::round(now - connection->last_heard)) +
                                     ": stopped, or its host or link is down"});
  }
  if (!failures_.empty() && (now > decide_at_ || failures_.size() == peers_.size())) end_job();
}

void Control::lose(const Failure& failure) {
  if (rank_ == 0) return add_failure(failure, 0.3);
  print_error(name_of(rank_) + ": " + name_of(failure.rank) + failure.message);
  _exit(1);
}

// Adds a failure, unless the rank has one already: only a rank's first failure counts.
void Control::add_failure(const Failure& failure, double patience_s) {
  if (failed_[size_t(failure.rank)]) return;
  failed_[size_t(failure.rank)] = true;
  const double then = steady_seconds() + patience_s;
  decide_at_ = failures_.empty() ? then : std::min(decide_at_, then);
  failures_.push_back(failure);
}

[[noreturn]] void Control::end_job() {
  ending_ = true;  // the program's own threads wait for the end of this one
  std::stable_sort(failures_.begin(), failures_.end(), [](auto& a, auto& b) {
    if (a.fault != b.fault) return a.fault < b.fault;
    return a.fault != Fault::reported && a.rank < b.rank;  // the first report counts; deaths are noticed in any order
  });
  const Failure& cause = failures_[0];
  std::vector<int> alike;
  for (const Failure& other : failures_) {
    const bool same_words = other.message == cause.message || cause.fault != Fault::reported;
    if (other.fault == cause.fault && same_words && other.rank != cause.rank) alike.push_back(other.rank);
  }
  std::sort(alike.begin(), alike.end());
  if (cause.fault == Fault::hung)
    print_error("a collective takes longer than " + seconds(collective_timeout_s_) + " (--collective-timeout): " +
                where_ranks_are());
  else if (cause.fault == Fault::parted)
    print_error("ranks meet in different places of the program (meeting " + std::to_string(meetings_ + 1) + "): " +
                where_ranks_meet() + ": see that all hosts have the same build and the same files");
  else if (cause.fault == Fault::reported)
    print_error(one_line((alike.empty() ? name_of(cause.rank) + ": " : "") + cause.message));
  else
    print_error(name_of(cause.rank) + cause.message + (alike.empty() ? "" : "; likewise " + rank_list(alike)) + who_waits());
  const bool reported = cause.fault == Fault::reported;
  send_to_all(peers_, FrameType::verdict, std::to_string(cause.exit_code) + (reported ? " reported" : ""));
  if (reported) do_last_work();
  linger(peers_, 1);
  exit(cause.exit_code);
}

// "rank 3 (stage 1, host node1, pid 1234)"
std::string Control::name_of(int rank) const {
  std::string name = who(peers_, rank);
  if (const int share = ranks_of_a_stage_) name.insert(name.find('(') + 1, "stage " + std::to_string(rank / share % stages_) + ", ");
  return name;
}

// As name_of() for one rank; else "ranks 2, 3 (stage 1)", or "ranks 0-3".
std::string Control::name_of(const std::vector<int>& ranks) const {
  if (ranks.size() == 1) return name_of(ranks[0]);
  const int share = ranks_of_a_stage_;
  const bool one_stage = share && ranks.front() / share == ranks.back() / share;
  return rank_list(ranks) + (one_stage ? " (stage " + std::to_string(ranks[0] / share % stages_) + ")" : "");
}

// Lists groups of ranks by place: first those that wait for nothing, as others may wait for them, then the smallest.
std::string Control::list_groups(const RanksAt& ranks_at) const {
  std::multimap<std::pair<bool, size_t>, std::string> in_order;
  for (const auto& [place, ranks] : ranks_at)
    in_order.insert({{place.starts_with("in "), ranks.size()}, name_of(ranks) + " " + place});
  return joined(std::views::values(in_order));
}

// "rank 1 in host barrier (gpt/trainer.cuh:58), ranks 0, 2 in host all_gather (mesh.cuh:67)": the ranks that have
// entered the meeting under way.
std::string Control::where_ranks_meet() const {
  RanksAt ranks_at;
  for (int rank = 0; rank < size(); ++rank)
    if (const auto& one = contributions_[size_t(rank)]) ranks_at["in " + one->place].push_back(rank);
  return list_groups(ranks_at);
}

// "rank 2 not yet in #119, ranks 0, 1, 3 in #119 all_gather of 4096 bytes", then one line per rank with its last
// collectives.
std::string Control::where_ranks_are() const {
  RanksAt ranks_at;
  std::string table;
  for (int rank = 0; rank < size(); ++rank) {
    ranks_at[heartbeats_[size_t(rank)].place].push_back(rank);
    table += "\n  " + name_of(rank) + ": " + heartbeats_[size_t(rank)].history;
  }
  return list_groups(ranks_at) + table;
}

// The waits of a pipeline's stages, which may wait for one another in many places: "; rank 0 (stage 0, ...) in
// from_next #5 receive of 4096 bytes", by the last heartbeats of ranks that have not failed.
std::string Control::who_waits() const {
  RanksAt waiting;
  for (int rank = 0; ranks_of_a_stage_ && rank < size(); ++rank)
    if (!failed_[size_t(rank)] && heartbeats_[size_t(rank)].waiting > 0) waiting[heartbeats_[size_t(rank)].place].push_back(rank);
  return waiting.empty() ? "" : "; " + list_groups(waiting);
}

void Control::heed_sigterm(double now) {
  constexpr double patience_s = 0.6;  // mpirun's SIGKILL may follow after 1 s
  if (!sigterm_came) return;
  if (sigterm_deadline_ == 0) sigterm_deadline_ = now + patience_s;
  if (now < sigterm_deadline_) return;
  sigterm_came = false;
  sigaction(SIGTERM, &sigterm_before, nullptr);
  std::raise(SIGTERM);
}
