// Device memory, one allocation per category (weights, gradients, optimizer, ...), so that what is printed is what was
// allocated.
//
// A category is described by a function that takes its arrays from an Arena, one after another. It runs twice: first
// on an empty arena, which only counts; then, when all categories are known to fit, on the allocated memory.
#pragma once

#include <functional>
#include <iomanip>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/common.cuh"

class Arena {
 public:
  explicit Arena(char* base = nullptr) : base_(base) {}

  // `count` elements, starting on a multiple of 256 bytes; null while only counting.
  template <class T>
  T* take(size_t count) {
    T* array = base_ ? reinterpret_cast<T*>(base_ + bytes_) : nullptr;
    bytes_ += round_up(count * sizeof(T), size_t(256));
    return array;
  }
  size_t bytes() const { return bytes_; }

 private:
  char* base_;
  size_t bytes_ = 0;
};

inline std::string gibibytes(size_t bytes) {
  std::ostringstream text;
  const bool small = bytes < (size_t(1) << 30);
  text << std::fixed << std::setprecision(small ? 1 : 2) << double(bytes) / double(size_t(1) << (small ? 20 : 30))
       << (small ? " MiB" : " GiB");
  return text.str();
}

// Pinned memory of the host, which the device copies to at full speed. All pages are there from the start.
class HostMemory {
 public:
  explicit HostMemory(size_t bytes) {
    CUDA_CHECK(cudaMallocHost(&data_, bytes));
    std::memset(data_, 0, bytes);
  }
  ~HostMemory() { cudaFreeHost(data_); }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

class DeviceMemory {
 public:
  using Layout = std::function<void(Arena&)>;
  struct Category {
    std::string name;
    size_t bytes;
  };

  DeviceMemory() = default;
  ~DeviceMemory() {
    for (void* allocation : allocations_) cudaFree(allocation);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void add(std::string name, Layout layout) {
    Arena counting;
    layout(counting);
    categories_.push_back({std::move(name), counting.bytes()});
    layouts_.push_back(std::move(layout));
  }

  // Allocates everything that was added, or throws with the need by category.
  void allocate() {
    size_t free_bytes = 0, total_bytes = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    if (total() > free_bytes) refuse(free_bytes);
    for (size_t i = 0; i < layouts_.size(); ++i) {
      void* allocation = nullptr;
      if (cudaMalloc(&allocation, categories_[i].bytes) != cudaSuccess) refuse(free_bytes);
      allocations_.push_back(allocation);
      Arena arena(static_cast<char*>(allocation));
      layouts_[i](arena);
    }
  }

  const std::vector<Category>& categories() const { return categories_; }

  size_t total() const {
    size_t sum = 0;
    for (const Category& category : categories_) sum += category.bytes;
    return sum;
  }

 private:
  [[noreturn]] void refuse(size_t free_bytes) const {
    std::string text = "not enough memory: " + gibibytes(total()) + " needed (";
    for (const Category& category : categories_)
      text += (&category == &categories_.front() ? "" : ", ") + category.name + " " + gibibytes(category.bytes);
    throw std::runtime_error(text + "), " + gibibytes(free_bytes) +
                             " free: try a smaller --micro-batch, --recompute block, or a smaller model");
  }

  std::vector<Category> categories_;
  std::vector<Layout> layouts_;
  std::vector<void*> allocations_;
};
