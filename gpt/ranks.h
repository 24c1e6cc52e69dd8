// The ranks of a job as their hosts know them: texts that they send each other without a device, and how a job ends on all of
// them: by MPI, or for one rank alone. A room may do more (Room::connect): name a rank that hangs, say, or connect ranks that no
// mpirun has started.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

#include "gpt/launch.h"

// Is told of the collectives that this rank issues on its device, and of their ends, by any thread. Whoever looks for the reason
// of a hang reads it.
class CallLog {
 public:
  virtual ~CallLog() = default;
  // name, group: string literals; an empty group is all ranks, without the device. bytes: like the name the same on all ranks.
  // leeway: the time that it may take, in units of the time-out. Returns the number of the call, for leave().
  virtual uint64_t enter(const char*, size_t /*bytes*/, double /*leeway*/ = 1, const char* /*group*/ = "") { return 0; }
  virtual void leave(uint64_t) {}
  // A call that is entered while a rehearsal lasts (gpt/rehearsal.cuh) is forgotten when it has left.
  virtual void rehearse(bool) {}
};

class Ranks {
 public:
  using Place = std::source_location;

  // One rank, or those that mpirun has started.
  explicit Ranks(const Launch& launch = {});
  virtual ~Ranks() = default;

  int rank() const { return rank_; }
  int size() const { return int(hosts_.size()); }
  const std::string& host(int rank) const { return hosts_.at(size_t(rank)); }
  int neighbours() const { return int(std::ranges::count(hosts_, host(rank_))); }  // ranks on this host, this one included

  static constexpr double for_slow_disks = 10;  // the leeway below, where ranks read or write files meanwhile

  // Returns the texts `mine` of all ranks, by rank. All ranks must call it in the same order and at the same line of
  // the source, each in one thread only; the same holds for gather, barrier and finish.
  // leeway: how long the other ranks may take, in units of the collective time-out.
  virtual std::vector<std::string> all_gather(const std::string& mine, double leeway = 1, Place place = Place::current());
  // Returns the texts on rank 0, and empty texts on the other ranks.
  virtual std::vector<std::string> gather(const std::string& mine, double leeway = 1, Place place = Place::current());
  virtual void barrier(double leeway = 1, Place place = Place::current()) { all_gather("", leeway, place); }

  // Sets the work that a rank does every millisecond while it waits for the others. The device may be a step ahead of the host,
  // and streams of the CPU device go on only while the host calls: so other ranks may wait for this one's device before
  // they call.
  void meanwhile(std::function<void()> work) { meanwhile_ = std::move(work); }

  // From now on the job ends if a collective takes longer than `collective_timeout_s` seconds (0: no limit), or if a rank
  // is silent for `silence_s` seconds, where somebody watches.
  virtual void watch(double /*silence_s*/, double /*collective_timeout_s*/) {}
  virtual CallLog& calls() { return calls_; }
  // From now on messages say which stage of a pipeline a rank belongs to: each `ranks_of_a_stage` ranks in a row are
  // one stage, and after `stages` of them comes the first stage of another pipeline. 0: there are no stages.
  virtual void name_stages(int /*ranks_of_a_stage*/, int /*stages*/) {}

  // Sets the work that every rank does before the job ends because one rank has reported an error. It may be done on another
  // thread, and may take long. It returns true if this rank has to wait until rank 0 has done its part, too. It is not done
  // if a rank is gone. all_are_there() returns false if another rank has gone meanwhile (ranks other than 0 see only rank 0).
  using LastWork = std::function<bool(const std::function<bool()>& all_are_there)>;
  virtual void before_end(LastWork work) { last_work_ = std::move(work); }
  // Sets the last work when a failed job ends this process, on any thread. Ranks that have such work end after rank 0,
  // if its work takes leeway_s seconds at most.
  virtual void at_exit(std::function<void(int exit_code)> work, double /*leeway_s*/) { at_exit_ = std::move(work); }

  // Reports an error of this rank, which ends the job. If several ranks have the same message, it is printed once. An
  // empty message: the process of a job of one rank ends without a line.
  [[noreturn]] virtual void fail(const std::string& message, int exit_code = 1);
  // The end of a successful job, after end_mpi(). When all ranks have called it, each may end at any time.
  virtual void finish(Place = Place::current()) {}

 protected:
  int rank_ = 0;
  std::vector<std::string> hosts_;  // by rank
  std::function<void()> meanwhile_ = [] {};

 private:
  CallLog calls_;
  LastWork last_work_;
  std::function<void(int)> at_exit_;
};

// Returns when all ranks have connected.
std::unique_ptr<Ranks> connect_ranks(const Launch& launch);
