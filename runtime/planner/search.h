// The search for a mesh: every way to train on a number of ranks is timed (runtime/planner/forecast.h), and those that
// do not fit are left out. meshes.md explains why it is fast.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "runtime/planner/plan.h"

struct Candidate {
  StepOptions step;
  PlannedTime time;
  size_t bytes = 0;  // memory of its largest rank
  Cluster cluster = {};  // the part of it that is rented
  std::string command = {};

  double seconds() const { return time.forecast.seconds; }        // of a step
  double device_hours() const { return time.device_hours(1e9); }  // for a billion tokens
};

// Functions for the bytes of a candidate's largest rank: the exact number, and a lower bound, which is computed at
// once.
struct CandidateBytes {
  std::function<size_t(const StepOptions&)> exactly, at_least;
};

struct SearchResult {
  std::vector<Candidate> fastest, cheapest;  // the best first
  size_t candidates = 0, too_large = 0;      // too_large: of these, as far as the search had to know
  Candidate smallest = {};  // the smallest one that is too large, without its time
};

// Calls visit for each way to train on `ranks` ranks: mesh, schedule, chunks, ZeRO, micro-batch, recomputation. Model,
// samples and storage types are as in `base`.
void for_each_candidate(const StepOptions& base, int ranks, const std::function<void(const StepOptions&)>& visit);

// Values of --offload that are tried with each of them, where the host's memory is known.
constexpr const char* ways_to_offload[] = {"optimizer", "optimizer,activations", "gradients,optimizer",
                                           "gradients,optimizer,activations"};

// Some devices of a cluster.
struct Rented {
  Cluster cluster;
  int ranks;
};

// The parts of a cluster that may be rented: some of the devices of one host, or some hosts, by their divisors. The
// whole is last.
std::vector<Rented> parts_of(const Cluster& cluster);

// Adds the candidates of these devices to the result, of which each list keeps `most`. room: bytes that a rank may use.
void search(SearchResult& result, StepOptions base, const Rented& rented, const PlannedRun& run, size_t room,
            const CandidateBytes& bytes, size_t most = 10);

// The options of a candidate, as on the command line.
std::string options_text(const StepOptions& step);

// A table of candidates, with titles. first: the number of its first row
std::string table_of(const std::vector<Candidate>& candidates, size_t first = 1);

// The reason why no candidate fits.
std::string nothing_fits_text(const SearchResult& result, const PlannedDevice& device);

// The candidates as JSON: a list of objects, each with cluster, ranks, command, memory (bytes of its largest rank), the
// keys of plan.h from step_ms on, and device_hours_per_billion_tokens.
nlohmann::ordered_json objects_of(const std::vector<Candidate>& candidates);

// The whole result, an object: candidates, too_large, seconds that the search took, fastest and cheapest; if nothing
// fits, problem.
std::string text_of(const SearchResult& result, double seconds, const PlannedDevice& device);
