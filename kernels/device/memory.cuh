// Device memory, one allocation per category (weights, gradients, optimizer, ...), so that the printed sizes are the
// allocated ones.
//
// A function describes each category: it takes the category's arrays from an Arena, one after another. It runs twice:
// first on an empty arena, which only counts; then, when all categories are known to fit, on the allocated memory.
//
// A kernel that runs past the end of an array meets the next array of its category, and no tool reports it. With
// GPT_SEPARATE_ARRAYS=1 in the environment each array is an allocation of its own, and compute-sanitizer (on the CPU
// device AddressSanitizer) reports it.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include "cpu/host_memory.h"
#include "kernels/device/bytes.h"
#include "kernels/device/common.cuh"

class Arena {
 public:
  Arena() = default;  // only counts
  explicit Arena(char* base) : base_(base) {}
  // Each array is an allocation of its own, which the caller frees.
  explicit Arena(std::vector<void*>& allocations) : allocations_(&allocations) {}

  // `count` elements, starting on a multiple of 256 bytes; null while only counting.
  template <class T>
  T* take(size_t count) {
    void* array = base_ ? base_ + bytes_ : nullptr;
    if (allocations_) {
      CUDA_CHECK(cudaMalloc(&array, count * sizeof(T)));
      allocations_->push_back(array);
    }
    bytes_ += round_up(count * sizeof(T), size_t(256));
    return static_cast<T*>(array);
  }
  size_t bytes() const { return bytes_; }

 private:
  char* base_ = nullptr;
  std::vector<void*>* allocations_ = nullptr;
  size_t bytes_ = 0;
};

// Sets memory of the host to zero, by several threads: at its first use the operating system clears it, too, page by page.
inline void clear_on_host(void* data, size_t bytes) {
  const size_t parts = std::min<size_t>(8, 1 + bytes / (256 << 20));
  const auto clear = [=](size_t part) {
    const size_t begin = bytes * part / parts, end = bytes * (part + 1) / parts;
    std::memset(static_cast<char*>(data) + begin, 0, end - begin);
  };
  std::vector<std::jthread> others;
  try {
    while (others.size() + 1 < parts) others.emplace_back(clear, others.size() + 1);
  } catch (const std::system_error&) {  // there may be no more threads
    for (size_t part = others.size() + 1; part < parts; ++part) clear(part);
  }
  clear(0);
}

// Pinned memory of the host, which the device can copy to and from at full speed; all zeros. Several threads make its
// pages, large ones where the system has them, and then they are pinned: with cudaMallocHost, which makes one page after
// the other, 30 GB took 28 s beside an H200. If the system can't pin that much (containers have limits), the memory
// stays pageable, where that is allowed.
class HostMemory : NotCopied {
 public:
  explicit HostMemory(size_t bytes, bool may_be_pageable = false)
      : bytes_(std::max<size_t>(bytes, 1)),
        data_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (data_ == MAP_FAILED) throw std::bad_alloc();
    madvise(data_, bytes_, MADV_HUGEPAGE);
    madvise(data_, bytes_, MADV_DONTFORK);  // after a fork, the host might write to copies of pages that the device uses
    clear_on_host(data_, bytes_);
    const cudaError_t error = cudaHostRegister(data_, bytes_, cudaHostRegisterDefault);
    is_pinned_ = error == cudaSuccess;
    if (is_pinned_) return;
    cudaGetLastError();  // clears the error, which the next check would find
    if (may_be_pageable) return;
    munmap(data_, bytes_);
    check_cuda(error, "cudaHostRegister", __FILE__, __LINE__);
  }
  ~HostMemory() {
    if (is_pinned_) cudaHostUnregister(data_);
    munmap(data_, bytes_);
  }

  void* data() const { return data_; }
  bool is_pinned() const { return is_pinned_; }

 private:
  size_t bytes_;
  void* data_;
  bool is_pinned_;
};

// Bytes of host memory that this rank may still take, if `ranks` ranks share the host.
inline size_t host_memory_room(int ranks) {
  size_t free_bytes = 0, total_bytes = 0;
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  const bool is_device_memory = device_attribute(cudaDevAttrIntegrated);
  return is_device_memory ? free_bytes : std::min(host_memory_left() / size_t(ranks), process_memory_left());
}

// Bytes that must stay free of the device's memory, when the model has allocated its own, and of the host's. On a GPU: for
// modules that CUDA loads at their first kernel, local memory of kernels that spill registers, and NCCL's buffers; a
// process without offload took 0.8 GB of the host's memory beside an H200. The CPU device leaves room for stacks, batches,
// and memory that libraries allocate at their first call.
constexpr size_t gpu_reserve = size_t(1) << 30, host_reserve = size_t(64) << 20;
inline size_t memory_reserve() { return is_cpu_device ? host_reserve : gpu_reserve; }

// Allocates `bytes` of the host's memory if that leaves the reserve free; else returns null.
inline std::shared_ptr<HostMemory> take_host_memory(size_t bytes, size_t room) {
  if (bytes + memory_reserve() > room) return nullptr;
  try {
    return std::make_shared<HostMemory>(bytes, true);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// The categories of one kind of memory.
class CategorizedMemory : NotCopied {
 public:
  using Layout = std::function<void(Arena&)>;

  void add(std::string name, Layout layout) {
    Arena counting;
    layout(counting);
    categories_.push_back({std::move(name), counting.bytes()});
    layouts_.push_back(std::move(layout));
  }

  const std::vector<MemoryCategory>& categories() const { return categories_; }

  size_t total() const { return total_of(categories_); }

 protected:
  // Gives a category its memory: at most as many bytes as were counted.
  void lay_out(size_t number, Arena& arena) const {
    layouts_[number](arena);
    const auto& [name, counted] = categories_[number];
    if (arena.bytes() > counted)
      throw std::logic_error("memory of " + name + ": " + bytes_text(counted) + " were counted, " + bytes_text(arena.bytes()) + " taken");
  }

  std::vector<MemoryCategory> categories_;
  std::vector<Layout> layouts_;
};

class DeviceMemory : public CategorizedMemory {
 public:
  ~DeviceMemory() {
    for (void* allocation : allocations_) cudaFree(allocation);
  }

  // Allocates everything that was added, and leaves `reserve` bytes free. If that does not fit, it throws an error that
  // lists the bytes of each category.
  void allocate(size_t reserve = memory_reserve()) {
    size_t free_bytes = 0, total_bytes = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    if (total() + reserve > free_bytes) refuse(free_bytes, reserve);
    const char* separate = std::getenv("GPT_SEPARATE_ARRAYS");
    for (size_t i = 0; i < layouts_.size(); ++i) {
      Arena arena(allocations_);
      if (!separate || std::string(separate) != "1") {
        void* allocation = nullptr;
        if (cudaMalloc(&allocation, categories_[i].bytes) != cudaSuccess) refuse(free_bytes, reserve);
        allocations_.push_back(allocation);
        arena = Arena(static_cast<char*>(allocation));
      }
      lay_out(i, arena);
    }
  }

  const char* cure = "a smaller --micro-batch, --recompute block, or a smaller model";  // if it does not fit

 private:
  [[noreturn]] void refuse(size_t free_bytes, size_t reserve) const {
    std::string text = "not enough memory: " + bytes_text(total()) + " needed (" + text_of(categories_) + "), " + bytes_text(free_bytes) +
                       " free";
    if (reserve > 0) text += ", of which " + bytes_text(reserve) + " are left to libraries";
    throw std::runtime_error(text + ": try " + cure);
  }

  std::vector<void*> allocations_;
};

// Pinned memory of the host, for data that is copied to the device when it is used (--offload). It is never pageable.
class PinnedMemory : public CategorizedMemory {
 public:
  // Allocates everything that was added, or throws an error that names the needed and the available bytes. room: the
  // bytes that this rank may take (host_memory_room), of which the reserve stays free.
  void allocate(size_t room) {
    if (total() + memory_reserve() > room)
      refuse(bytes_text(room) + " free for this rank, of which " + bytes_text(memory_reserve()) + " stay free");
    for (size_t i = 0; i < layouts_.size(); ++i) {
      memory_.push_back(std::make_unique<HostMemory>(categories_[i].bytes, true));
      if (!memory_.back()->is_pinned()) refuse("and the system pins no more (ulimit -l, or a container's limit)");
      Arena arena(static_cast<char*>(memory_.back()->data()));
      lay_out(i, arena);
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& limit) const {
    throw std::runtime_error("not enough pinned memory of the host for --offload: " + bytes_text(total()) + " needed (" +
                             text_of(categories_) + "), " + limit + ": try more ranks with --zero, --moments bf16, or less --offload");
  }

  std::vector<std::unique_ptr<HostMemory>> memory_;
};
