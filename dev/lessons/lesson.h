// Shared by the lessons: MPI, the text, the options.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include <CLI/CLI.hpp>
#include <mpi.h>

#include "dev/lessons/small_model.h"

namespace lesson {

// From construction to destruction processes can talk to each other.
struct World {
  int rank = 0, size = 1;

  World() {
    MPI_Init(nullptr, nullptr);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
  }
  ~World() { MPI_Finalize(); }
};

struct Options {
  std::string text = {};
  int steps = 0, batch = 16, report_every = 0;
  float lr = 0.2f;
};

inline void add_options(CLI::App& app, Options& options) {
  app.add_option("text", options.text, "a file to learn from")->required()->check(CLI::ExistingFile);
  app.add_option("--steps", options.steps, "updates of the weights")->check(CLI::Range(1, 10'000'000))->capture_default_str();
  app.add_option("--batch", options.batch, "places of the text for each gradient")->check(CLI::Range(1, 10'000))->capture_default_str();
  app.add_option("--lr", options.lr, "learning rate")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--report-every", options.report_every, "a line each so many updates (default: ten lines)")->check(CLI::Range(1, 10'000'000));
}

// Reads the command line. Returns an exit code, or −1 to go on. All ranks see the same, and rank 0 prints the mistake.
inline int parse(CLI::App& app, Options& options, int argc, char** argv, const World& world, int least_ranks) {
  const auto refuse = [&](const std::string& problem) {
    if (world.rank == 0) std::fprintf(stderr, "%s: %s\n", app.get_name().c_str(), problem.c_str());
    return 2;
  };
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    if (world.rank == 0) std::printf("%s", app.help().c_str());
    return 0;
  } catch (const CLI::ParseError& error) {
    return refuse(error.what());
  }
  if (world.size < least_ranks) return refuse("needs at least " + std::to_string(least_ranks) + " ranks: mpirun -np 4 " + argv[0] + " ...");
  if (options.report_every == 0) options.report_every = std::max(1, options.steps / 10);
  return -1;
}

// The bytes of the file. Ends the process if there are too few.
inline std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (text.size() > 1000) return text;
  std::fprintf(stderr, "%s: %zu bytes are too few to learn from: give a text of 1,000 or more\n", path.c_str(), text.size());
  std::exit(1);
}

// The loss on the same 2,000 places each time.
inline float measured_loss(const SmallModel& model, const SmallModel::Array& weights) {
  std::mt19937 places(1);
  return model.loss(weights, 2000, places);
}

}  // namespace lesson
