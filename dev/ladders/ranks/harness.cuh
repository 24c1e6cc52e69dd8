// The harness of the all-reduce ladder: every rank runs it, rank 0 reports.
//
// A rung is right if it passes these checks. Inputs are small integers, so every sum is known, and the only error
// allowed is the rounding to 8 bits. All ranks end with the same bits, and a second run gives them again. A NaN is
// never lost. The formula gives the bytes that are sent.
//
// Measurements (other programs on the machine can only make them slower):
//
//   µs, spread      the median of 21 rounds on the slowest rank, and the 10th to the 90th percentile
//   predicted µs    by the cost model, from latency and rates that are 10th percentiles
//   × predicted     the rung's 10th percentile, divided by that
//   sent            bytes, by the rank that sends most; by formula: if all pieces had one size
//   error %         the largest error, in % of the largest possible sum
#pragma once

#include <CLI/CLI.hpp>
#include <xxhash.h>

#include <bit>
#include <memory>
#include <set>
#include <sstream>

#include "dev/ladders/counts.h"
#include "dev/ladders/ranks/wire.cuh"
#include "dev/ladders/ranks/world.cuh"
#include "dev/ladders/verdict.h"
#include "gpt/base/error.h"
#include "gpt/launch.h"

namespace ladder {

// The costs of an algorithm, for N ranks that sum up S bytes each. All but `steps` are divided by S. All but `sent`
// count the ranks and links that the others wait for, one after another.
struct Cost {
  double steps;
  double moved, added, packed;  // through a link; by add; by pack
  double sent;                  // by the rank that sends most
  double terms;                 // inputs of all sums that pack rounds on a number's way: its error with 8 bits
};

// The operands of a rank: `count` numbers, which become the sums over all ranks.
template <class T>
class AllReduce {
 public:
  AllReduce(World& w, size_t numbers)
      : world(w), count(numbers), data(blocks() * block_elements), plain(data, count, room(), w.stream()),
        eight_bits(data, count, room(), w.stream()), initial_(values(w.rank())) {}

  void reset() {
    CUDA_CHECK(cudaMemcpyAsync(data, initial_, data.size() * sizeof(T), cudaMemcpyDeviceToDevice, world.stream()));
  }

  // The inputs of rank r are from −largest_input() to largest_input(): the sums of 256 ranks are exact, in bf16 too.
  int largest_input() const { return std::clamp(256 / world.size(), 1, 15); }
  int input(int r, size_t i) const {
    const int largest = largest_input();
    return int((i * 7 + size_t(r) * 13) % size_t(2 * largest + 1)) - largest;
  }
  double sum(size_t i) const {
    double total = 0;
    for (int r = 0; r < world.size(); ++r) total += input(r, i);
    return total;
  }

  World& world;
  const size_t count;
  Buffer<T> data;  // padded with zeros to whole blocks
  Plain<T> plain;
  EightBits<T> eight_bits;

 private:
  size_t blocks() const { return ceil_div(count, size_t(block_elements)); }
  // The number of blocks that arrive at the same time: on rank 0 all blocks of every other rank, when it is the server;
  // else a piece of each.
  size_t room() const {
    const size_t senders = world.rank() == 0 ? size_t(std::max(world.size() - 1, 1)) : 1;
    return senders * blocks() + size_t(world.size());
  }
  std::vector<T> values(int r) const {
    std::vector<T> all(data.size());
    for (size_t i = 0; i < count; ++i) all[i] = from_float<T>(float(input(r, i)));
    return all;
  }

  Buffer<T> initial_;
};

template <class T>
struct Algorithm {
  const char* name;
  const char* idea;
  void (*launch)(AllReduce<T>&);
  Cost (*cost)(int ranks);  // null: not known, the library chooses its algorithm
  bool eight_bits = false;

  double bytes_sent(const AllReduce<T>& o) const {  // for S bytes
    return double(eight_bits ? o.eight_bits.bytes(o.eight_bits.whole()) : o.plain.bytes(o.plain.whole()));
  }
};

struct CollectiveOptions : Options {
  std::vector<size_t> bytes = {1 << 10, 32 << 10, 1 << 20, is_gpu ? 64 << 20 : 8 << 20};
  bool share_gpu = false;

  // Returns go_on, or the exit code. Only rank 0 prints why.
  int parse(const std::vector<std::string>& names, int rank, int count, char** arguments) {
    CLI::App app("The ladder of all-reduce, for several ranks (mpirun -np N): checks each rung, then measures it.");
    app.add_option("--rung", rungs, "this rung alone (may be repeated)")->check(CLI::IsMember(names));
    app.add_option("--bytes", bytes, "what is measured: sizes of a rank's numbers, as 64KB or 1MB (may be repeated)")
        ->transform(CLI::AsSizeValue(false))
        ->check([](const std::string& size) { return std::stoull(size) < 4 ? "4 bytes at least: a number" : ""; });
    app.add_option("--dtype", dtype, "what is measured: bf16 or fp32 (both are checked)")
        ->check(CLI::IsMember({"fp32", "bf16"}));
    app.add_flag("--check", check_only, "check, and don't measure");
    app.add_flag("--share-gpu", share_gpu, "several ranks on a GPU (slow, for tests)");
    app.add_option("--csv", csv, "write the table to this file, too");
    app.add_option("--plot", plot, "draw the last size's table into this file, an SVG; default: beside this program");
    try {
      app.parse(count, arguments);
      return go_on;
    } catch (const CLI::ParseError& error) {
      std::ostringstream nowhere;
      return (rank == 0 ? app.exit(error) : app.exit(error, nowhere, nowhere)) == 0 ? 0 : 2;
    }
  }
};

// ---- is it right?

inline std::string integer(double value) { return std::to_string(std::llround(value)); }

// A checksum of the numbers that a run leaves on each rank.
template <class T>
std::vector<std::string> run(const Algorithm<T>& rung, AllReduce<T>& o) {
  o.reset();
  rung.launch(o);
  const std::vector<T> values = o.data.get();
  return o.world.all(std::to_string(XXH3_64bits(values.data(), o.count * sizeof(T))));
}

// Each packing rounds a sum of m inputs by m·largest_input/254 at most, and T rounds it before and after. Earlier
// roundings may have made it a little larger.
template <class T>
double allowed_error(const Algorithm<T>& rung, const AllReduce<T>& o) {
  if (!rung.eight_bits) return 0;
  const double once = 1.0 / 254 + 2 * rounding<T>;
  return rung.cost(o.world.size()).terms * o.largest_input() * once * std::pow(1 + once, o.world.size());
}

// The largest error of the numbers that a run leaves; infinite if one of them is NaN.
template <class T>
double error_of(const AllReduce<T>& o) {
  const std::vector<double> numbers = o.data.numbers();
  double worst = 0;
  for (size_t i = 0; i < o.count; ++i) {
    const double error = std::abs(numbers[i] - o.sum(i));
    if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
  }
  return worst;
}

// If the last rank has a NaN, all ranks must end with it.
template <class T>
bool loses_nan(const Algorithm<T>& rung, AllReduce<T>& o) {
  o.reset();
  if (o.world.rank() == o.world.size() - 1) CUDA_CHECK(cudaMemsetAsync(o.data, 0xff, sizeof(T), o.world.stream()));
  rung.launch(o);
  return o.world.largest(std::isnan(o.data.numbers()[0]) ? 0 : 1) > 0;
}

// The numbers of N−1 ranks must reach the sum, and the sum must reach N−1 ranks: together, the ranks send 2(N−1)·S with
// any algorithm. The rank that sends most sends cost.sent·S, if all pieces have one size.
template <class T>
std::string wrong_bytes(const Algorithm<T>& rung, const AllReduce<T>& o, size_t sent) {
  const int ranks = o.world.size();
  double total = 0, most = 0;
  for (const std::string& bytes : o.world.all(std::to_string(sent))) {
    total += std::stod(bytes);
    most = std::max(most, std::stod(bytes));
  }
  const double whole = rung.bytes_sent(o), share = rung.cost(ranks).sent;
  const bool even = o.count % (size_t(ranks) * std::bit_floor(unsigned(ranks)) * block_elements) == 0;
  if (total != 2 * (ranks - 1) * whole)
    return "the ranks sent " + integer(total) + " bytes, expected " + integer(2 * (ranks - 1) * whole);
  if (even && std::abs(most - share * whole) >= 0.5)
    return "a rank sent " + integer(most) + " bytes, expected " + integer(share * whole);
  return "";
}

// One line that describes a mistake on some rank; empty: there is none.
template <class T>
std::string mistake(const Algorithm<T>& rung, AllReduce<T>& o) {
  World& world = o.world;
  const size_t sent_before = world.sent();
  std::vector<std::string> bits = run(rung, o);
  const size_t sent = world.sent() - sent_before;
  const double error = world.largest(error_of(o)), allowed = allowed_error(rung, o);
  if (!(error <= allowed)) return "off by " + digits(error, 3) + ", allowed " + digits(allowed, 3);
  for (const std::string& again : run(rung, o)) bits.push_back(again);
  if (std::set(bits.begin(), bits.end()).size() > 1) return "ranks, or two runs, end with different bits";
  if (o.count > 0 && loses_nan(rung, o)) return "a rank's NaN is gone from the sum";
  return rung.cost ? wrong_bytes(rung, o, sent) : "";
}

// Numbers of elements to check: none, part of a block, a block more or less, pieces of one size, and pieces of many
// blocks.
inline std::vector<size_t> checked_counts(size_t ranks) {
  return {0, 1, 255, 257, 2 * ranks * std::bit_floor(ranks) * block_elements, large_shapes ? 100'003 : 2'003};
}

template <class T>
void check(const CollectiveOptions& options, const char* dtype, const std::vector<Algorithm<T>>& rungs, World& world,
           Verdict& verdict) {
  for (size_t count : checked_counts(size_t(world.size()))) {
    AllReduce<T> operation(world, count);
    for (const Algorithm<T>& rung : rungs) {
      if (!options.wants(rung.name)) continue;
      const std::string wrong = mistake(rung, operation);
      verdict.add(wrong.empty());
      if (!wrong.empty() && world.rank() == 0)
        std::printf("WRONG: %s, %s, %zu numbers: %s\n", rung.name, dtype, count, wrong.c_str());
    }
  }
}

// ---- what does it cost?

constexpr size_t rate_bytes = size_t(is_gpu ? 64 : 8) << 20;  // size of the message for measuring rates

// The ranks agree before they send a longer message: Open MPI's limit between processes of a host.
constexpr size_t short_message = 4096;

struct Link {
  double short_latency, long_latency, seconds_per_byte;  // α of either kind, β

  double latency(double step_bytes) const { return step_bytes < short_message ? short_latency : long_latency; }
};

// Every rank sends to its right neighbour and receives from its left one, as in a ring: all ranks measure at the same
// time.
inline Link measure_link(World& world) {
  const int n = world.size(), right = (world.rank() + 1) % n, left = (world.rank() + n - 1) % n;
  Buffer<char> from(rate_bytes), to(rate_bytes);
  const auto seconds = [&](size_t bytes) {
    const auto shift = [&] {
      world.step([&] {
        world.send(from, bytes, right);
        world.receive(to, bytes, left);
      });
    };
    return world.time([] {}, shift).low;
  };
  constexpr size_t long_message = 2 * short_message;
  const double short_latency = seconds(4), long_seconds = seconds(long_message);
  const double per_byte = (seconds(rate_bytes) - long_seconds) / double(rate_bytes - long_message);
  return {short_latency, std::max(long_seconds - long_message * per_byte, short_latency), per_byte};
}

struct Kernel {
  double launch, seconds_per_byte;  // λ; γ, π or υ: of the numbers' bytes
};

struct Kernels {
  Kernel add, pack, unpack;
};

// λ: the launch for one block of numbers, for which a single block of threads is enough.
template <class T, class Wire>
Kernels measure_kernels(AllReduce<T>& o, Wire& wire) {
  const auto measured = [&](auto kernel) {
    const auto seconds = [&](Range range) { return o.world.time([&] { o.reset(); }, [&] { kernel(range); }).low; };
    const double launch = seconds({0, 1});
    return Kernel{launch, (seconds(wire.whole()) - launch) / double(o.count * sizeof(T))};
  };
  const Kernel pack = measured([&](Range range) { wire.pack(range); });
  return {measured([&](Range range) { wire.add(range); }), pack, measured([&](Range range) { wire.unpack(range); })};
}

struct Model {
  Link link;
  Kernels plain, eight_bits;

  // The seconds that `cost` predicts for `bytes` of numbers, of which `on_wire` bytes are sent.
  double seconds(const Cost& cost, bool packed, double bytes, double on_wire) const {
    const auto& [add, pack, unpack] = packed ? eight_bits : plain;
    const double moved = cost.moved * on_wire, adds = cost.steps / 2;
    return cost.steps * link.latency(moved / cost.steps) + moved * link.seconds_per_byte +
           adds * add.launch + (adds + 1) * pack.launch + unpack.launch +
           (cost.added * add.seconds_per_byte + cost.packed * pack.seconds_per_byte + unpack.seconds_per_byte) * bytes;
  }
};

// "λ 2.50 µs, 1/π 0.310 GB/s"
inline std::string described(const Kernel& kernel, const char* rate) {
  return "λ " + digits(1e6 * kernel.launch, 3) + " µs, 1/" + rate + " " +
         ratio(1e-9, kernel.seconds_per_byte) + " GB/s";
}

template <class T>
Model measure_model(World& world) {
  AllReduce<T> operation(world, rate_bytes / sizeof(T));
  const Model model = {measure_link(world), measure_kernels(operation, operation.plain),
                       measure_kernels(operation, operation.eight_bits)};
  if (world.rank() == 0) {
    const auto& [add, pack, unpack] = model.eight_bits;
    std::printf("\n%d ranks\n", world.size());
    std::printf("link:           α %s µs a step (%s above %zu bytes), 1/β %s GB/s\n",
                digits(1e6 * model.link.short_latency, 3).c_str(), digits(1e6 * model.link.long_latency, 3).c_str(),
                short_message, ratio(1e-9, model.link.seconds_per_byte).c_str());
    std::printf("add:            %s\n", described(model.plain.add, "γ").c_str());
    std::printf("add of 8 bits:  %s\n", described(add, "γ").c_str());
    std::printf("pack:           %s\n", described(pack, "π").c_str());
    std::printf("unpack:         %s\n", described(unpack, "υ").c_str());
  }
  return model;
}

inline std::vector<std::string> collective_columns() {
  return {"rung",   "bytes", "µs", "spread", "GB/s", "bus GB/s", "predicted µs", "× predicted", "sent", "by formula",
          "error %", "idea"};
}

template <class T>
std::vector<std::string> collective_row(const Algorithm<T>& rung, AllReduce<T>& o, const Model& model) {
  World& world = o.world;
  const double n = world.size(), bytes = double(o.count * sizeof(T)), on_wire = rung.bytes_sent(o);
  const size_t sent_before = world.sent();
  run(rung, o);
  const double sent = world.largest(double(world.sent() - sent_before));
  const double error = world.largest(error_of(o)) / (n * o.largest_input());  // of the largest sum
  const Times times = world.time([&] { o.reset(); }, [&] { rung.launch(o); });
  const Cost cost = rung.cost ? rung.cost(world.size()) : Cost{};
  const double predicted = rung.cost ? model.seconds(cost, rung.eight_bits, bytes, on_wire) : 0;
  return {rung.name,
          integer(bytes),
          digits(times.median * 1e6, 4),
          digits(times.low * 1e6, 4) + "–" + digits(times.high * 1e6, 4),
          digits(bytes / times.median / 1e9, 3),
          digits(2 * (n - 1) / n * bytes / times.median / 1e9, 3),
          rung.cost ? digits(predicted * 1e6, 4) : "–",
          rung.cost ? ratio(times.low, predicted) : "–",
          rung.cost ? integer(sent) : "–",
          rung.cost ? integer(cost.sent * on_wire) : "–",
          error > 0 ? digits(100 * error, 2) : "0",
          rung.idea};
}

template <class T>
void measure(const CollectiveOptions& options, const std::vector<Algorithm<T>>& rungs, World& world) {
  const Model model = measure_model<T>(world);
  Table all(collective_columns());
  for (size_t bytes : options.bytes) {
    AllReduce<T> operation(world, bytes / sizeof(T));
    Table table(collective_columns());
    for (const Algorithm<T>& rung : rungs) {
      if (!options.wants(rung.name)) continue;
      const std::vector<std::string> row = collective_row(rung, operation, model);
      table.add(row);
      all.add(row);
    }
    if (world.rank() > 0) continue;
    const std::string title = concat("all_reduce, ", options.dtype, ", ", world.size(), " ranks, ", operation.count * sizeof(T),
                                     " bytes each");
    std::printf("\n%s\n\n", title.c_str());
    table.print();
    if (bytes == options.bytes.back()) draw(table, title, device_name(), options.plot);
  }
  if (world.rank() == 0 && !options.csv.empty()) all.write_csv(options.csv);
}

// ---- the program

// Ladder::rungs<T>() are the rungs.
template <class Ladder>
int climb(const CollectiveOptions& options, Ranks& ranks) {
  World world(ranks, options.share_gpu);
  Verdict verdict;
  check(options, "fp32", Ladder::template rungs<float>(), world, verdict);
  check(options, "bf16", Ladder::template rungs<__nv_bfloat16>(), world, verdict);
  if (world.rank() == 0) verdict.print();
  if (options.check_only || verdict.failed) return verdict.failed ? 1 : 0;
  if (world.size() == 1) std::printf("[ladder] start it with mpirun -np 4 ...: one rank has nothing to reduce\n");
  else if (options.dtype == "fp32") measure(options, Ladder::template rungs<float>(), world);
  else measure(options, Ladder::template rungs<__nv_bfloat16>(), world);
  return 0;
}

template <class Ladder>
int run_ranks(int count, char** arguments) {
  std::unique_ptr<Ranks> ranks;
  try {
    const Launch launch = find_launch();
    prepare_cuda(launch);
    std::vector<std::string> names;
    for (const auto& rung : Ladder::template rungs<float>()) names.push_back(rung.name);
    CollectiveOptions options;
    const int code = options.parse(names, launch.rank, count, arguments);
    if (code != Options::go_on) return code;
    ranks = connect_ranks(launch);
    ranks->watch(60, 120);
    const int result = climb<Ladder>(options, *ranks);
    end_mpi();
    ranks->finish();
    return result;
  } catch (const std::exception& error) {
    if (ranks) ranks->fail(error.what());
    std::fprintf(stderr, "ladder: %s\n", error.what());
    return 1;
  }
}

}  // namespace ladder
