// The control plane of a job: every rank has a TCP connection to rank 0 as long as the job runs, and a thread on each
// rank serves it. It carries the host's collectives (all_gather, gather, barrier), and it ends a job with a dead,
// stopped, failed or hanging rank on all ranks within 30 seconds, with one line that names the rank.
//
// Each rank sends a heartbeat once per second. It holds a summary of the rank's flight record: JSON [seconds waiting,
// place, history]. Rank 0 collects failures: a connection that closes, a rank that is silent, an error that a rank
// reports, a collective that takes too long. It waits a moment for failures of other ranks, decides which is the cause,
// prints one line, and sends its verdict, the exit code, to all ranks, which end without a message. If rank 0 itself is
// gone, each rank prints that. All ranks end by _exit, because destructors and MPI would wait for ranks that are gone.
//
// A *note* is a text that a rank's monitor sends to rank 0 (runtime/monitor/monitor.h), where it waits until somebody
// takes it. No rank waits for notes of another one.
//
// A *meeting* is a host collective (all_gather, gather, barrier, finish). Each rank says at which line of the source it
// enters the meeting. If ranks enter a meeting at different lines, the program has an error: the job ends, and the
// message names the lines.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gpt/ranks.h"
#include "runtime/control/rendezvous.h"

class Control : public Ranks {
 public:
  // A job of one rank, without sockets and threads.
  Control() : peers_(1), notes_(1) { peers_[0] = this_process(), hosts_ = {peers_[0].host}; }
  // A job of several ranks, which have connected (wait_for_ranks, join).
  Control(int rank, Peers peers);
  // If finish() was not called before, the other ranks report that this rank died.
  ~Control() override;
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  long pid(int rank) const { return peers_.at(size_t(rank)).pid; }

  std::vector<std::string> all_gather(const std::string& mine, double patience = 1, Place place = Place::current()) override;
  std::vector<std::string> gather(const std::string& mine, double patience = 1, Place place = Place::current()) override;
  void barrier(double patience = 1, Place place = Place::current()) override;

  // Sends a note to rank 0. Rank 0 keeps the last two of each rank.
  void send_note(const std::string& text);
  // On rank 0: takes the oldest note of each rank, by rank; empty: none has come, in `seconds` seconds either.
  std::vector<std::string> take_notes(double seconds);

  FlightRecorder& calls() override { return recorder_; }
  // The collective that this rank waits for, by its flight recorder.
  FlightBrief flight() const { return brief(recorder_.entries(), steady_seconds()); }

  void name_stages(int ranks_of_a_stage, int stages) override { ranks_of_a_stage_ = ranks_of_a_stage, stages_ = stages; }
  void watch(double silence_s, double collective_timeout_s) override {
    silence_s_ = silence_s, collective_timeout_s_ = collective_timeout_s;
  }
  void before_end(LastWork work) override;
  void at_exit(std::function<void(int exit_code)> work, double patience_s) override;
  [[noreturn]] void fail(const std::string& message, int exit_code = 1) override;
  void finish(Place place = Place::current()) override;

 private:
  // In order of precedence: a fault that is listed earlier is probably the cause of later ones.
  enum class Fault { died, reported, parted, silent, hung };

  struct Failure {
    Fault fault;
    int rank;
    std::string message;  // printed after the rank's name
    int exit_code = 1;
  };

  // The part of one rank in a meeting: the line where it enters, and its text.
  struct Contribution {
    std::string place, bytes;
  };

  void stop_thread();
  void do_work_at_exit(int exit_code);
  [[noreturn]] void exit(int exit_code);

  // ---- from the program's threads to the control thread and back

  void submit(Frame frame);
  std::vector<std::string> meet(const char* name, const Place& place, FrameType type, const std::string& mine,
                                double patience = 1);

  // ---- the control thread

  double period() const { return std::min(1.0, silence_s_ / 5); }  // time between heartbeats, in seconds

  void serve();
  void forgive(double now, double seconds);
  void take_outbox();
  void handle(int from, Frame frame);
  void collect(int from, Frame frame);
  void deliver(std::vector<std::string> texts);
  void keep_note(int from, std::string text);
  void beat();

  // ---- reasons to end the job

  void judge(double now);
  void lose(const Failure& failure);
  void add_failure(const Failure& failure, double patience_s);
  [[noreturn]] void end_job();
  bool do_last_work();
  bool all_are_there();
  using RanksAt = std::map<std::string, std::vector<int>>;  // by place
  std::string name_of(int rank) const;
  std::string name_of(const std::vector<int>& ranks) const;
  std::string list_groups(const RanksAt& ranks_at) const;
  std::string where_ranks_meet() const;
  std::string where_ranks_are() const;
  std::string who_waits() const;
  void heed_sigterm(double now);

  Peers peers_;
  FlightRecorder recorder_;

  // Used by the control thread only. The vectors are by rank, on rank 0: contributions to the meetings under way, last
  // heartbeats, and who has failed.
  std::vector<std::optional<Contribution>> contributions_;
  size_t meetings_ = 0;  // number of meetings so far, on rank 0
  std::vector<FlightBrief> heartbeats_;
  std::vector<bool> failed_;
  std::vector<Failure> failures_;
  double decide_at_ = 0, sigterm_deadline_ = 0;

  std::atomic<bool> stopping_ = false, leaving_ = false, finished_ = false;
  std::atomic<double> silence_s_ = 15, collective_timeout_s_ = 0;
  std::atomic<int> ranks_of_a_stage_ = 0, stages_ = 1;

  std::mutex mutex_;  // protects the next five
  std::condition_variable gathered_changed_;
  std::vector<Frame> outbox_;
  std::condition_variable note_came_;
  std::vector<std::deque<std::string>> notes_;  // by rank, on rank 0
  std::vector<std::string> gathered_;  // the result of the meeting under way; empty: not there yet

  std::mutex last_work_mutex_;
  LastWork last_work_;
  std::function<void(int)> at_exit_;
  std::atomic<double> at_exit_patience_s_ = 0;
  std::atomic<bool> ending_ = false;

  Descriptor wake_;
  std::thread thread_;
};
