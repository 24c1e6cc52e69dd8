// The search for a mesh: all that training can do with so many ranks is timed (planner/forecast.h), and what does not fit is
// left out. README.md says how it is fast.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "planner/plan.h"

struct Candidate {
  PlannedStep step;
  PlannedTime time;
  size_t bytes = 0;  // of its largest rank

  double device_hours() const { return time.dollars_per_billion_tokens(1); }  // for a billion tokens
};

struct SearchResult {
  std::vector<Candidate> fastest, cheapest;  // the best first
  size_t candidates = 0, too_large = 0;
  Candidate smallest = {};  // of those that are too large, without its time
};

// Would the program train so? As complete_options, check_mesh and check_micro_batch, without a reason.
bool can_train(const PlannedStep& step);

// Calls visit for each way to train on so many ranks: mesh, schedule, chunks, ZeRO, micro-batch, recomputation. Model, samples
// and storage types are those of `base`.
void for_each_candidate(const PlannedStep& base, int ranks, const std::function<void(const PlannedStep&)>& visit);

// Adds the candidates of so many ranks to the result, of which each list keeps `most`. room: bytes that a rank may use;
// bytes_of: those that the largest rank would.
void search(SearchResult& result, const PlannedStep& base, const Cluster& cluster, int ranks, size_t room,
            const std::function<size_t(const PlannedStep&)>& bytes_of, size_t most = 10);

// A row of a table, below table_title(): time, tokens/s, MFU, memory, device hours and dollars for a billion tokens.
std::string table_row(const Candidate& candidate);
std::string table_title();

// The options of a candidate, as on the command line.
std::string options_text(const PlannedStep& step);

// What is missing if no candidate fits into so many bytes.
std::string nothing_fits_text(const SearchResult& result, size_t room);

// One JSON object: candidates, too_large, seconds; fastest and cheapest, lists of objects. command: of a candidate.
std::string text_of(const SearchResult& result, double seconds, const std::function<std::string(const Candidate&)>& command);

// The parts of a cluster that may be rented: some of the devices of one host, or some hosts, by their divisors. The whole is last.
struct Rented {
  Cluster cluster;
  int ranks;
};
std::vector<Rented> parts_of(const Cluster& cluster);
