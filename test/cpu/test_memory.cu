// Device memory by category, and pinned memory: what is refused, what takes its place, and what a kernel that runs past
// the end of an array meets.
#include <doctest/doctest.h>

#include "cpu/device.h"
#include "kernels/device/memory.cuh"
#include "test/temporary_folder.h"

namespace {

size_t free_memory() {
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return free;
}

struct TwoArrays {
  DeviceMemory memory;
  char* first = nullptr;
  float* second = nullptr;

  TwoArrays() {
    memory.add("arrays", [this](Arena& arena) {
      first = arena.take<char>(1000);
      second = arena.take<float>(100);
    });
    memory.allocate();
  }
};

}  // namespace

TEST_CASE("arrays of a category lie side by side, or each by itself") {
  unsetenv("GPT_SEPARATE_ARRAYS");
  CHECK(memory_reserve() == host_reserve);
  const TwoArrays together;
  CHECK(reinterpret_cast<char*>(together.second) - together.first == 1024);
  CHECK(cudaMemset(together.first, 0, 1001) == cudaSuccess);

  setenv("GPT_SEPARATE_ARRAYS", "1", 1);
  const TwoArrays separate;
  unsetenv("GPT_SEPARATE_ARRAYS");
  CHECK(separate.memory.total() == together.memory.total());
  CHECK(cudaMemset(separate.first, 0, 1000) == cudaSuccess);
  CHECK(cudaMemset(separate.first, 0, 1001) == cudaErrorInvalidValue);
  CHECK(cudaMemset(separate.second, 0, 400) == cudaSuccess);
  CHECK(cudaMemset(separate.second, 0, 401) == cudaErrorInvalidValue);
}

TEST_CASE("a category that takes more memory than was counted is an error, and writes to nobody else's") {
  size_t count = 1000;
  const auto lay_out = [&](Arena& arena) { arena.take<char>(count); };
  DeviceMemory memory;
  PinnedMemory offloaded;
  memory.add("weights", lay_out);
  offloaded.add("optimizer", lay_out);
  count = 2000;
  CHECK(error_of([&] { memory.allocate(0); }) == "memory of weights: 1.0 KiB were counted, 2.0 KiB taken");
  CHECK(error_of([&] { offloaded.allocate(size_t(1) << 30); }) == "memory of optimizer: 1.0 KiB were counted, 2.0 KiB taken");
}

TEST_CASE("what is kept in reserve counts as taken") {
  const size_t need = size_t(256) << 20, reserve = free_memory() - need / 8;  // other programs' memory changes
  DeviceMemory memory;
  memory.add("weights", [](Arena& arena) { arena.take<char>(need); });
  const std::string problem = error_of([&] { memory.allocate(reserve); });
  CAPTURE(problem);
  CHECK(is_line_with(problem, "not enough memory: 256.0 MiB needed (weights 256.0 MiB), ", " free, of which ",
                     bytes_text(reserve) + " are left to libraries", "--micro-batch"));
  memory.allocate(0);
}

TEST_CASE("memory of the host is pageable where no more can be pinned, if it may be; never what is offloaded") {
  const HostMemory pinned(1000, true);
  CHECK(pinned.is_pinned());
  PinnedMemory offloaded;
  offloaded.add("optimizer", [](Arena& arena) { arena.take<char>(1000); });
  cpu::share_memory(SIZE_MAX);  // a share of nothing
  CHECK(contains(error_of([&] { HostMemory refused(1000); }), "out of memory"));
  const HostMemory pageable(1000, true);
  CHECK(!pageable.is_pinned());
  CHECK(is_line_with(error_of([&] { offloaded.allocate(SIZE_MAX); }), "for --offload: ", "1.0 KiB needed (optimizer 1.0 KiB), ", "ulimit -l", "--zero"));
  CHECK(cudaGetLastError() == cudaSuccess);
  cpu::share_memory(1);
}

TEST_CASE("memory of the host is cleared by several threads: all of it, and nothing else") {
  const size_t bytes = (size_t(600) << 20) + 5;  // three threads
  const HostMemory memory(bytes + 1);
  char* const data = static_cast<char*>(memory.data());
  const auto is = [&](size_t first, size_t end, char value) { return std::all_of(data + first, data + end, [=](char c) { return c == value; }); };
  CHECK(is(0, bytes + 1, 0));
  std::memset(data, 1, bytes + 1);
  clear_on_host(data + 3, bytes - 3);
  CHECK(is(0, 3, 1));
  CHECK(is(3, bytes, 0));
  CHECK(is(bytes, bytes + 1, 1));
}

TEST_CASE("on a device in the host's memory, memory of the host and of the device add up; each counts before it is used") {
  const size_t large = size_t(256) << 20;
  size_t all = 0;
  void *device = nullptr, *other = nullptr;
  bool counts = false, adds_up = false;  // once in ten turns, as other programs' memory changes
  for (int turn = 0; turn < 10 && !(counts && adds_up); ++turn) {
    CUDA_CHECK(cudaFree(device));
    cpu::share_memory(1);  // of what is free now
    all = free_memory();
    CUDA_CHECK(cudaMalloc(&device, large));
    const HostMemory host(large);
    adds_up = adds_up || host_memory_room(1) == free_memory();
    counts = counts || free_memory() < all - large;
  }
  CHECK(counts);
  CHECK(adds_up);
  const HostMemory host(large);
  CHECK(cudaMalloc(&other, all) == cudaErrorMemoryAllocation);
  CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
  CHECK(!take_host_memory(1000, 1000));
  CHECK(take_host_memory(1000, size_t(1) << 30));
  CUDA_CHECK(cudaFree(device));
}
