// The tensors of a folder, in one safetensors file or several, and how blocks of them get into a rank's parameters.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpt/parameters.h"
#include "gpt/safetensors.h"

// Before the name of a state's tensor: "", "m.", of a copy "e0." (file_prefix() has them all).
std::string state_prefix(State state, int copy = CheckpointBlock::none, int island = 0);

// A tensor and the file that holds it.
struct StoredTensor {
  const SafetensorsFile* file;
  const TensorInfo* tensor;

  void check_shape(const TensorDescriptor& wanted) const;
  // The values of a block. Fails if one is not finite, unless it may be.
  std::vector<float> read(const CheckpointBlock& block, bool may_be_infinite = false) const;
};

// By names without "transformer.": "wte.weight", "m.wte.weight".
class TensorFiles {
 public:
  // cure: what to do about tensors that do not fit
  TensorFiles(const std::filesystem::path& folder, const std::vector<std::filesystem::path>& paths, const char* cure);

  // Some programs store the tied head as well, which is the same as wte, or in its place. A head that differs means
  // another model: that fails.
  void drop_tied_head();

  // Loads the elements of these states that this rank keeps. Before it reads the first block, it fails if a tensor is
  // missing, unknown or of another shape.
  void load(Parameters& parameters, const std::vector<State>& states, size_t most, int island = 0) const;

  bool empty() const { return stored_.empty(); }
  // Null: there is none. Whether it has the shape of `tensor` is not looked at.
  const StoredTensor* find(State state, int copy, const TensorDescriptor& tensor) const;
  [[noreturn]] void is_missing(const TensorDescriptor& tensor, const std::string& prefix) const;

 private:
  void add(const SafetensorsFile& file, const TensorInfo& tensor);

  std::filesystem::path folder_;
  const char* cure_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, StoredTensor> stored_;
};
