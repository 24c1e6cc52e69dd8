// The control plane of a job: every rank holds a TCP connection to rank 0 as long as the job runs, and a thread on each
// rank serves it. It carries what ranks must tell each other (all_gather, barrier), and sees to it that a job with a
// dead, stopped, failed or hanging rank ends on all ranks within 30 seconds, with one line that names the rank.
//
// Each rank sends a heartbeat once a second, its flight record in brief: JSON [seconds waiting, place, history]. Rank 0
// collects what goes wrong: a connection that closes, silence, an error that a rank reports, a collective that takes
// too long. It waits a moment for what others have to say, decides, prints the line, and sends its verdict, the exit
// code, to all, who end quietly. If rank 0 itself is gone, each rank says so for itself. All end by _exit: destructors
// and MPI would wait for ranks that are no more.
//
// When ranks meet (all_gather, gather, barrier, finish), each says where in the source it does. Ranks that meet in
// different places have parted ways, by an error of the program: the job ends, and the line names the places.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <map>
#include <optional>
#include <source_location>
#include <string>
#include <thread>
#include <vector>

#include "processes/rendezvous.h"

class Control {
 public:
  // One rank alone: no socket, no thread, nothing that can go wrong.
  Control() : peers_(1) { peers_[0] = this_process(); }
  // Rank 0 of `size`: returns when all have come.
  Control(Listener listener, int size, const std::string& token, double timeout_s);
  // Another rank.
  Control(const Endpoint& rank_0, int rank, int size, double timeout_s);
  // Without finish() the others take this rank for dead.
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  int rank() const { return rank_; }
  int size() const { return int(peers_.size()); }
  const std::string& host(int rank) const { return peers_.at(size_t(rank)).host; }
  long pid(int rank) const { return peers_.at(size_t(rank)).pid; }

  using Place = std::source_location;

  // Everybody's `mine`, by rank. Called by all ranks in the same order and at the same place of the source, in one
  // thread each; so are gather, barrier and finish.
  // patience: how many times the collective time-out the others may take
  std::vector<std::string> all_gather(const std::string& mine, double patience = 1, Place place = Place::current());
  // The same for rank 0; the others get empty texts.
  std::vector<std::string> gather(const std::string& mine, double patience = 1, Place place = Place::current());
  void barrier(double patience = 1, Place place = Place::current());

  // From now on a collective in `recorder` (which lives as long as this) that is not left after `collective_timeout_s`
  // (0: it may take any time) ends the job, as does a rank that is silent for `silence_s`.
  void watch(FlightRecorder& recorder, double silence_s, double collective_timeout_s);

  // What each rank does before an error that one of them has reported ends the job, in the control thread: true if this
  // rank has to wait until rank 0 has done its part, too. Nothing is done where a rank died, is silent or hangs.
  // all_are_there: false when another rank has gone meanwhile (seen from the others, rank 0).
  using LastWork = std::function<bool(const std::function<bool()>& all_are_there)>;
  void before_end(LastWork work);

  // This rank's own error ends the job. What several ranks report in the same words is said once.
  [[noreturn]] void fail(const std::string& message, int exit_code = 1);

  // The good end, when all ranks have come to it: from then on they may go as they like.
  void finish(Place place = Place::current());

 private:
  // In order of precedence: what comes first here is likely the cause of what follows.
  enum class Fault { died, reported, parted, silent, hung };

  struct Failure {
    Fault fault;
    int rank;
    std::string message;  // after the rank's name
    int exit_code = 1;
  };

  // What a rank brings to a meeting.
  struct Contribution {
    std::string place, bytes;
  };

  Control(int rank, Peers peers);
  void stop_thread();

  // ---- from the program's threads to the control thread and back

  void submit(Frame frame);
  std::vector<std::string> meet(const char* name, const Place& place, FrameType type, const std::string& mine,
                                double patience = 1);

  // ---- the control thread

  double period() const { return std::min(1.0, silence_s_ / 5); }  // of heartbeats, seconds

  void serve();
  void forgive(double now, double seconds);
  void take_outbox();
  void handle(int from, Frame frame);
  void collect(int from, Frame frame);
  void deliver(const std::string& sizes_and_bytes);
  void beat(double now);

  // ---- what ends the job

  void judge(double now);
  bool is_hung(int rank) const;
  void lose(const Failure& failure);
  void add_failure(const Failure& failure, double patience_s);
  [[noreturn]] void end_job();
  bool do_last_work();
  bool all_are_there();
  using RanksAt = std::map<std::string, std::vector<int>>;  // by place
  std::string list_groups(const RanksAt& ranks_at) const;
  std::string where_ranks_meet() const;
  std::string where_ranks_are() const;
  void heed_sigterm(double now);

  int rank_ = 0;
  Peers peers_;

  // Of the control thread. By rank, on rank 0: contributions to the meeting under way, last heartbeats, who failed
  std::vector<std::optional<Contribution>> contributions_;
  size_t meetings_ = 0;  // that have taken place, on rank 0
  std::vector<FlightBrief> heartbeats_;
  std::vector<bool> failed_;
  std::vector<Failure> failures_;
  double decide_at_ = 0, sigterm_deadline_ = 0;

  std::atomic<bool> stopping_ = false, leaving_ = false, finished_ = false;
  std::atomic<double> silence_s_ = 15, collective_timeout_s_ = 0;
  std::atomic<FlightRecorder*> recorder_ = nullptr;

  std::mutex mutex_;  // of the next three
  std::condition_variable gathered_changed_;
  std::vector<Frame> outbox_;
  std::vector<std::string> gathered_;  // empty: not yet

  std::mutex last_work_mutex_;
  LastWork last_work_;
  std::atomic<bool> ending_ = false;

  Descriptor wake_;
  std::thread thread_;
};
