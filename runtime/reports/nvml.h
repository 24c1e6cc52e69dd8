// What NVML, the library of NVIDIA's driver behind nvidia-smi, says of one GPU. It is loaded at run time, if it is there;
// GPT_NVML names another file, such as the library that tests play with. A number that the card, its driver or a
// container does not give is left out.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "runtime/reports/rates.h"

class Nvml {
 public:
  // Is there anything to ask? The CPU device has no PCI bus, and asks only a library that GPT_NVML names.
  static bool is_wanted(const std::string& pci_bus_id);

  // pci_bus_id: as CUDA gives it. (NVML numbers all cards, whatever CUDA_VISIBLE_DEVICES says.)
  explicit Nvml(const std::string& pci_bus_id);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  // The object "gpu" of monitor.jsonl (runtime/reports/monitor.h); null: the card has been lost. now: seconds
  nlohmann::ordered_json look(double now);

  const std::string& problem() const { return problem_; }  // why nothing is known; empty: something is

 private:
  template <class Function, class... Arguments>
  bool ask(const Function& function, Arguments... arguments);
  void add_traffic(nlohmann::ordered_json& gpu, double now);

  void* library_ = nullptr;
  struct nvmlDevice_st* device_ = nullptr;
  bool is_lost_ = false;
  std::string problem_;
  Rates rates_;
};
