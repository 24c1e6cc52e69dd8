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

Ranks::Ranks(const Launch& launch) {
  hosts_ = {host_name()};
  if (launch.size == 1) return;
  if (!launch.over_mpi)
    ::fail(launch.how, " started ", launch.size, " ranks, which find each other over MPI in a build without the room control: start "
           "them by mpirun");
  start_mpi(launch, true);
  rank_ = launch.rank, hosts_.resize(size_t(launch.size));
  hosts_ = Ranks::all_gather(host_name());
}

#ifdef GPT_MPI
std::vector<std::string> Ranks::all_gather(const std::string& mine, double, Place) {
  if (size() == 1) return {mine};
  MPI_Request request;
  const auto wait = [&] {
    int done = 0;
    while (MPI_Test(&request, &done, MPI_STATUS_IGNORE), !done) meanwhile_(), std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  const int longest = INT_MAX / size(), bytes = int(std::min(mine.size(), size_t(longest) + 1));  // MPI counts as int
  std::vector<int> sizes(hosts_.size()), begins(hosts_.size());
  MPI_Iallgather(&bytes, 1, MPI_INT, sizes.data(), 1, MPI_INT, MPI_COMM_WORLD, &request);
  wait();
  if (std::ranges::max(sizes) > longest) throw std::length_error(concat("all_gather of more than ", longest, " bytes a rank: use a collective"));
  std::exclusive_scan(sizes.begin(), sizes.end(), begins.begin(), 0);
  std::string all(size_t(begins.back() + sizes.back()), 0);
  MPI_Iallgatherv(mine.data(), bytes, MPI_CHAR, all.data(), sizes.data(), begins.data(), MPI_CHAR, MPI_COMM_WORLD, &request);
  wait();
  std::vector<std::string> texts;
  for (size_t rank = 0; rank < sizes.size(); ++rank) texts.push_back(all.substr(size_t(begins[rank]), size_t(sizes[rank])));
  return texts;
}
#else
std::vector<std::string> Ranks::all_gather(const std::string& mine, double, Place) { return {mine}; }
#endif

std::vector<std::string> Ranks::gather(const std::string& mine, double leeway, Place place) {
  std::vector<std::string> texts = all_gather(mine, leeway, place);
  if (rank() > 0) texts.assign(texts.size(), "");
  return texts;
}

[[noreturn]] void Ranks::fail(const std::string& message, int exit_code) {
  std::fflush(stdout);
  const std::string name = size() == 1 ? "" : concat("rank ", rank(), " (host ", host(rank()), "): ");
  if (!message.empty()) print_error(one_line(name + message));
  if (size() == 1 && last_work_) last_work_([] { return true; });
  if (at_exit_) at_exit_(exit_code);
#ifdef GPT_MPI
  if (size() > 1) MPI_Abort(MPI_COMM_WORLD, exit_code);
#endif
  _exit(exit_code);
}

std::unique_ptr<Ranks> connect_ranks(const Launch& launch) {
  for (const Room* room : rooms())
    if (room->connect) return room->connect(launch);
  return std::make_unique<Ranks>(launch);
}
