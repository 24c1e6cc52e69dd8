// The present load of a host and of a GPU, as the objects of monitor.jsonl (runtime/monitor/monitor.h).
#pragma once

#include <array>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

// Rates per second of numbers that only grow, such as bytes sent since a machine was started. now: in seconds
class Rates {
 public:
  // The rate since the last call with this name. None in the first call, and if the counter began anew.
  std::optional<double> of(const std::string& name, double count, double now);

  // Adds an object with the rates of two counters, if they are known.
  void add(nlohmann::ordered_json& to, const char* key, std::array<const char*, 2> names, std::array<double, 2> counts, double now);

 private:
  std::map<std::string, std::pair<double, double>> last_;  // by name: the count, and when it was read
};

// From Linux's /proc (man 5 proc). root: the folder that holds proc and sys
nlohmann::ordered_json host_load(Rates& rates, double now, const std::filesystem::path& root = "/");

// Readings of one GPU by NVML, the library of NVIDIA's driver behind nvidia-smi. It is loaded at run time, if it is
// there; GPT_NVML names another file, such as the library that tests play with. It stays loaded until the process ends.
class Nvml {
 public:
  // pci_bus_id: as CUDA gives it. (NVML numbers all cards, whatever CUDA_VISIBLE_DEVICES says.)
  explicit Nvml(const std::string& pci_bus_id);

  // A number that the card, its driver or a container does not give is left out. null: the card has been lost
  nlohmann::ordered_json look(double now);

  const std::string& problem() const { return problem_; }  // why nothing is known; empty: something is

 private:
  template <class... Arguments>
  bool ask(const char* function, Arguments... arguments);

  void *library_ = nullptr, *device_ = nullptr;
  bool is_lost_ = false;
  std::string problem_;
  Rates rates_;
};
