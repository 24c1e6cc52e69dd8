// What a host does, from Linux's /proc (man 5 proc): processors, memory, swap, network and disks. A number that this
// system does not tell is left out.
#pragma once

#include <filesystem>
#include <initializer_list>
#include <string>

#include <nlohmann/json.hpp>

#include "runtime/reports/rates.h"

class HostLoad {
 public:
  // root: the folder that holds proc and sys
  explicit HostLoad(std::string host, std::filesystem::path root = "/") : host_(std::move(host)), root_(std::move(root)) {}

  // An object of "hosts" in monitor.jsonl (runtime/reports/monitor.h). Rates are those since the last call; now: seconds
  nlohmann::ordered_json look(double now);

 private:
  void add_cpu(nlohmann::ordered_json& load, double now);
  void add_memory(nlohmann::ordered_json& load, double now);
  void add_network(nlohmann::ordered_json& load, double now);
  void add_disks(nlohmann::ordered_json& load, double now);

  std::string host_;
  std::filesystem::path root_;
  Rates rates_;
};
