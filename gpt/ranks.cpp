#include "gpt/ranks.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <numeric>
#include <stdexcept>
#include <thread>

#include <unistd.h>
#ifdef GPT_MPI
#include <mpi.h>
#endif

#include "gpt/base/error.h"
#include "gpt/base/text.h"
#include "gpt/room.h"

PlainRanks::PlainRanks() { hosts_ = {host_name()}; }

PlainRanks::PlainRanks(const Launch& launch) {
  if (!launch.over_mpi) ::fail(launch.how, " started ", launch.size, " ranks, which find each other over MPI in a build without the room control: start them by mpirun");
  start_mpi(launch, true);
  rank_ = launch.rank, hosts_.resize(size_t(launch.size));
  hosts_ = PlainRanks::all_gather(host_name());
}

#ifdef GPT_MPI
std::vector<std::string> PlainRanks::all_gather(const std::string& mine, double, Place) {
  if (size() == 1) return {mine};
  MPI_Request request;
  const auto wait = [&] {
    for (int done = 0; MPI_Test(&request, &done, MPI_STATUS_IGNORE), !done; std::this_thread::sleep_for(std::chrono::milliseconds(1))) meanwhile_();
  };
  std::vector<int> sizes(hosts_.size()), begins(hosts_.size());
  const int bytes = int(std::min(mine.size(), size_t(INT_MAX) / hosts_.size() + 1));
  MPI_Iallgather(&bytes, 1, MPI_INT, sizes.data(), 1, MPI_INT, MPI_COMM_WORLD, &request), wait();
  std::exclusive_scan(sizes.begin(), sizes.end(), begins.begin(), 0);
  if (size_t(*std::ranges::max_element(sizes)) > INT_MAX / hosts_.size()) throw std::length_error("all_gather: a rank's text is too long");
  std::string all(size_t(begins.back() + sizes.back()), 0);
  MPI_Iallgatherv(mine.data(), bytes, MPI_CHAR, all.data(), sizes.data(), begins.data(), MPI_CHAR, MPI_COMM_WORLD, &request), wait();
  std::vector<std::string> texts;
  for (size_t rank = 0; rank < sizes.size(); ++rank) texts.push_back(all.substr(size_t(begins[rank]), size_t(sizes[rank])));
  return texts;
}
#else
std::vector<std::string> PlainRanks::all_gather(const std::string& mine, double, Place) { return {mine}; }
#endif

std::vector<std::string> PlainRanks::gather(const std::string& mine, double leeway, Place place) {
  std::vector<std::string> texts = all_gather(mine, leeway, place);
  if (rank() > 0) texts.assign(texts.size(), "");
  return texts;
}

[[noreturn]] void PlainRanks::fail(const std::string& message, int exit_code) {
  std::fflush(stdout);
  if (!message.empty()) print_error(one_line((size() == 1 ? "" : concat("rank ", rank(), " (host ", host(rank()), "): ")) + message));
  if (size() == 1 && last_work_) last_work_([] { return true; });
  if (at_exit_) at_exit_(exit_code);
  if (size() > 1) abort_mpi(exit_code);
  _exit(exit_code);
}

std::unique_ptr<Ranks> connect_ranks(const Launch& launch) {
  for (const Room* room : rooms())
    if (room->connect) return room->connect(launch);
  return launch.size == 1 ? std::make_unique<PlainRanks>() : std::make_unique<PlainRanks>(launch);
}
