// The harness of the kernel ladders: it checks every rung of an operation against float64, then measures it. On a GPU
// it measures time, and compares it with the peak rates of this card. On the CPU device it counts, exactly and with
// the same result on every machine: how many bytes threads move, in how many 32-byte sectors, with which bank
// conflicts, and how often they wait for each other.
//
// A ladder is a file with one class template over the element type, the *operation*, and one function per rung:
//
//   template <class T>
//   struct Gelu {
//     static constexpr const char* name = "gelu";
//     static std::vector<Shape> checked_shapes();        small ones, odd ones too
//     static Shape counted_shape(), timed_shape();       the CPU device counts one; a GPU times the other
//     static std::vector<Rung<Gelu>> rungs();            from the obvious one to the best
//
//     explicit Gelu(const Shape& shape);                 makes inputs, always the same for a shape, and outputs. Throws
//                                                        std::invalid_argument if there is no such shape
//     void reset();                                      poisons outputs, restores what rungs change in place
//     std::vector<Output> outputs() const;               the results, and the expected ones from float64 on the host
//     double elements() const;                           counts are divided by this number
//     double bytes() const, flops() const;               the least that must be moved; the arithmetic
//   };
//   int main(int count, char** arguments) { return ladder::run<Gelu>(count, arguments); }
//
// A new rung needs one function, `void launch(Gelu<T>&, cudaStream_t)`, and one line in rungs().
#pragma once

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "dev/ladders/cpu/access_counts.h"
#include "dev/ladders/counts.h"
#include "dev/ladders/measure.cuh"
#include "dev/ladders/options.h"
#include "dev/ladders/table.h"
#include "dev/ladders/verdict.h"
#include "gpt/base/error.h"
#include "test/bounds.h"
#include "test/buffer.cuh"

namespace ladder {

// One version of an operation.
template <class Operation>
struct Rung {
  const char* name;  // its kind, in two or three words
  const char* idea;  // its change, in a line
  void (*launch)(Operation&, cudaStream_t);
  bool (*suits)(const Operation&) = nullptr;  // null: it runs on every device, for every shape
  bool is_library = false;                    // the others are compared with it
};

// One result of an operation. It is right if |actual − expected| <= tolerance·(|expected| + floor) everywhere.
struct Output {
  const char* name;
  std::vector<double> actual, expected;
  double floor, tolerance;
};

template <class Operation>
bool suits(const Rung<Operation>& rung, const Operation& operation) {
  return !rung.suits || rung.suits(operation);
}

// The rungs that were asked for and that can run here; prints which of the others can't.
template <class Operation>
std::vector<Rung<Operation>> choose_rungs(const Options& options, const char* dtype, const Shape& shape,
                                          const Operation& operation) {
  std::vector<Rung<Operation>> chosen;
  std::string left_out;
  for (const Rung<Operation>& rung : Operation::rungs()) {
    if (!options.wants(rung.name)) continue;
    if (suits(rung, operation)) chosen.push_back(rung);
    else left_out += (left_out.empty() ? "" : ", ") + std::string(rung.name);
  }
  const std::string why = left_out + ": not in " + dtype + " at " + shape.text() + " on this device";
  if (chosen.empty()) throw std::invalid_argument(why);
  if (!left_out.empty()) std::printf("\nleft out: %s\n", why.c_str());
  return chosen;
}

// Waits for the launch. If the device refused it, the error names the rung.
template <class Operation>
void launch(const Rung<Operation>& rung, Operation& operation, cudaStream_t stream) {
  try {
    rung.launch(operation, stream);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaStreamSynchronize(stream));
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(rung.name) + ": " + error.what());
  }
}

// ---- is it right?

// One line that describes the mistake; empty: there is none.
template <class Operation>
std::string mistake(const Rung<Operation>& rung, Operation& operation, cudaStream_t stream) {
  operation.reset();
  launch(rung, operation, stream);
  for (const Output& output : operation.outputs()) {
    const double error = worst_error(output.actual, output.expected, output.floor);
    if (share_of_bound(output.name, error, output.tolerance) > 1)
      return std::string(output.name) + " is off by " + digits(error, 2) + ", allowed " + digits(output.tolerance, 2);
  }
  return "";
}

template <class Operation>
void check(const Options& options, const char* dtype, Verdict& verdict, cudaStream_t stream) {
  for (const Shape& shape : options.shapes_or(Operation::checked_shapes())) {
    Operation operation(shape);
    if (!options.shape.empty()) std::printf("checked in %s at %s\n", dtype, shape.text().c_str());
    for (const Rung<Operation>& rung : Operation::rungs()) {
      if (!options.wants(rung.name) || !suits(rung, operation)) continue;
      const std::string wrong = mistake(rung, operation, stream);
      verdict.add(wrong.empty());
      if (!wrong.empty())
        std::printf("WRONG: %s, %s, %s, %s: %s\n", Operation::name, rung.name, dtype, shape.text().c_str(),
                    wrong.c_str());
    }
  }
}

// ---- what does it cost?

// Prints a table of the CPU device's counts, at the first of the shapes asked for.
template <class Operation>
Table count(const Options& options, const char* dtype, cudaStream_t stream) {
  const Shape shape = options.shape_or(Operation::counted_shape());
  Operation operation(shape);
  Table table(count_columns());
  for (const Rung<Operation>& rung : choose_rungs(options, dtype, shape, operation)) {
    operation.reset();
    cpu::start_counting();
    launch(rung, operation, stream);
    table.add(count_row(rung.name, rung.idea, cpu::stop_counting(), operation.elements(), operation.bytes()));
    if (options.lines) print_lines(rung.name, cpu::counts_by_line());
  }
  std::printf("\n%s, %s, %s: %.4g elements, at least %s bytes each\n\n", Operation::name, dtype,
              shape.text().c_str(), operation.elements(),
              digits(operation.bytes() / operation.elements(), 3).c_str());
  return table;
}

// The same on a GPU: a table of times.
template <class Operation, class T>
Table time(const Options& options, const char* dtype, cudaStream_t stream) {
  const Shape shape = options.shape_or(Operation::timed_shape());
  SetsOfOperands<Operation> sets(shape);
  const Work work = work_at_best<T>(sets.one().bytes(), sets.one().flops(), stream);
  std::vector<std::pair<Rung<Operation>, Times>> timed;
  double library = 0;
  for (const Rung<Operation>& rung : choose_rungs(options, dtype, shape, sets.one())) {
    launch(rung, sets.one(), stream);
    timed.emplace_back(rung, measure(rung.launch, sets, stream));
    if (rung.is_library) library = timed.back().second.median;
  }
  std::printf("\n%s, %s, %s: %.4g MB, %.4g GFLOP, at best %.4g µs; %zu sets of operands%s\n\n", Operation::name, dtype,
              shape.text().c_str(), work.bytes / 1e6, work.flops / 1e9, work.best_seconds * 1e6, sets.count(),
              sets.exceed_caches() ? "" : ", which the L2 cache may hold in part");
  Table table(time_columns());
  for (const auto& [rung, times] : timed)
    table.add(time_row(rung.name, rung.idea, times, timed.front().second.median, library, work));
  return table;
}

// ---- the program

template <class Operation>
void launch_once(const Options& options, cudaStream_t stream) {
  const Shape shape = options.shape_or(Operation::counted_shape());
  Operation operation(shape);
  for (const Rung<Operation>& rung : choose_rungs(options, options.dtype.c_str(), shape, operation)) {
    operation.reset();
    launch(rung, operation, stream);
  }
}

template <class Operation, class T>
void measure(const Options& options, cudaStream_t stream) {
  const char* dtype = options.dtype.c_str();
  const Table table = is_gpu ? time<Operation, T>(options, dtype, stream) : count<Operation>(options, dtype, stream);
  table.print();
  if (!options.csv.empty()) table.write_csv(options.csv);
  const Shape shape = options.shape_or(is_gpu ? Operation::timed_shape() : Operation::counted_shape());
  draw(table, concat(Operation::name, ", ", dtype, ", ", shape.text()),
       is_gpu ? device_name() : "counted on the CPU device: the same on every machine", options.plot);
}

// Executes the command line, in the given dtype; returns the exit code.
template <template <class> class Operation, class T>
int climb(const Options& options, cudaStream_t stream) {
  if (options.once) return launch_once<Operation<T>>(options, stream), 0;
  Verdict verdict;
  check<Operation<float>>(options, "fp32", verdict, stream);
  check<Operation<__nv_bfloat16>>(options, "bf16", verdict, stream);
  verdict.print();
  if (verdict.failed) return 1;
  if (!options.check_only && (is_gpu || cpu::counts_accesses)) measure<Operation<T>, T>(options, stream);
  return 0;
}

template <template <class> class Operation>
int run(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  Options options;
  std::vector<std::string> names;
  for (const auto& rung : Operation<float>::rungs()) names.push_back(rung.name);
  const Shape usual = Operation<float>::counted_shape();
  if (const int code = options.parse(Operation<float>::name, names, usual, count, arguments); code != Options::go_on)
    return code;
  try {
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const int code = options.dtype == "fp32" ? climb<Operation, float>(options, stream)
                                             : climb<Operation, __nv_bfloat16>(options, stream);
    CUDA_CHECK(cudaStreamDestroy(stream));
    return code;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ladder %s: %s\n", Operation<float>::name, error.what());
    return dynamic_cast<const std::invalid_argument*>(&error) ? 2 : 1;  // 2: no such rung or shape
  }
}

}  // namespace ladder
