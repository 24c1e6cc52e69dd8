// The cluster that training is planned for: the device, devices per host, hosts, links, and the price.
//
// A cluster is a small JSON file (runtime/planner/clusters holds examples; runtime/planner/clusters.md explains each
// key):
//
//   {"name": "8xh100", "device": "H100", "devices_per_host": 8, "hosts": 1,
//    "links": {"inside": {"kind": "NVLink", "gb_per_s": 450, "latency_us": 3}},
//    "price_per_device_hour": 2.99, "spot_price_per_device_hour": 1.99, "date": "2026-11", "source": "where prices are
//    from"}
//
// `device` is a name in the table of runtime/reports/hardware.h, or an object with all rates. More than one host needs
// links.between, whose gb_per_s counts for a whole host. Prices may be left out. --calibrate writes such a file, too.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "runtime/planner/attention_rates.h"
#include "runtime/reports/ceilings.h"

// The interval around a forecast in which nine of ten known runs lay.
struct Margin {
  double shorter = 0, longer = 0;  // shares of the time: -0.1 and 0.3
  const char* runs = "";           // the source of these margins

  double least(double time) const { return (1 + shorter) * time; }
  double most(double time) const { return (1 + longer) * time; }
  std::string text() const;  // "published runs on H100: -10 to +30 %"
};

// FLOP/s, bytes/s, bytes and seconds. Rates are from the data sheet, unless they were measured (device_of).
struct Device {
  std::string name;
  double fp32 = 0, bf16 = 0;  // of matrix products, dense; fp16 as bf16, fp32 without TF32
  double fp8 = 0;             // of products in eight bits, times bf16's; 0: it has none
  double bandwidth = 0;       // of memory, bytes read and written
  double memory = 0;
  double sheet_fp32 = 0, sheet_bf16 = 0;  // peaks that MFU is a share of; 0: not known
  // The shares of these rates that kernels reach: products, copies; of fp32's, arithmetic on single elements.
  double product_share = 1, bandwidth_share = 1, elements = 1;
  // Attention by our own kernels, those for Hopper and a library, in 16 bits; and in fp32
  AttentionRates own = {}, hopper = {}, library = {}, attention_fp32 = {};
  double host = 0;       // to the host's memory and back, bytes/s in each direction, both at the same time
  double launch = 0;     // from the end of a kernel to the start of the next one
  double norm_row = 0, loss_row = 0;  // extra seconds of a row of LayerNorm, and of 2,048 bytes of a row of logits
  int attention_block = 0;  // queries that see the same keys: causal attention computes a block more of them than T
  int processors = 0;    // that compute whole tiles of a product; 0: products fill the device
  bool overlaps = true;  // communication goes on while kernels run
  bool is_hopper = false;  // a GPU of Hopper: --attention auto takes our kernels for it
  bool fp8_tiles = true;   // products in eight bits may have a scale for each tile
  int persistent_sms = 0;  // multiprocessors that a product or attention keeps until it ends; 0: its blocks are short
  Margin margin = {};

  double peak(bool is_fp32) const { return is_fp32 ? fp32 : bf16; }
  // kind: a value of --attention
  const AttentionRates& attention(const std::string& kind, bool is_fp32) const {
    return is_fp32 ? attention_fp32 : kind == "own" ? own : kind == "hopper" ? hopper : library;
  }
};

// A link between devices, with its rate in one direction.
struct Link {
  std::string kind;
  double bandwidth = 0, latency = 0;
};

struct Cluster {
  std::string name;
  Device device;
  int devices_per_host = 1, hosts = 1;
  int ranks_per_device = 1;  // they share its rates
  Link inside = {}, between = {};      // of a device to others of its host; of a host to others
  double link_share = 1;     // share of a link's rate that collectives reach
  double host_memory = 0;    // bytes of a host's memory that --offload may take; 0: not known
  double price = 0, spot_price = 0;  // of a device for an hour, dollars; 0: not known
  double hours = 6300, spot_hours = 10;  // until one host fails, or is taken back, on average (runtime/planner/rules.md)
  std::string date = {}, source = {};

  int devices() const { return devices_per_host * hosts; }
  bool is_shared() const { return !device.overlaps; }  // the ranks of a host share its one device, as CPUs are
  int ranks_per_host() const { return devices_per_host * ranks_per_device; }
};

// A file or folder of runtime/planner, where the program was started, beside it, or above the build folder; empty: it is not
// there.
std::filesystem::path planner_file(const std::string& name);

// Fails with one line if the object, or the file, is no cluster. where: the beginning of the line
Cluster read_cluster(const std::string& where, const nlohmann::json& object);
Cluster load_cluster(const std::filesystem::path& path);

// The cluster of --cluster: a file, or the name of one of runtime/planner/clusters, here or beside the program.
Cluster find_cluster(const std::string& name);

// The clusters of runtime/planner/clusters that gpt.cu could run on, the smallest first.
std::vector<Cluster> example_clusters();

// A part of the cluster with `ranks` ranks: hosts one after the other, or some devices of the first one, with their
// share of its memory.
Cluster with_devices(Cluster cluster, int ranks);

// So many devices of the first of these clusters whose GPUs report this name, such as "NVIDIA A100-SXM4-80GB", without
// a price; none: no cluster there has so many of this GPU.
std::optional<Cluster> cluster_of_device(const std::string& reported, int devices);

// A device whose rates dev/ceilings measured. Its memory is not measured and is 0.
Device device_of(const Ceilings& ceilings);

// This machine. Its ranks share an integrated device, as the CPU is; messages are copies in its memory. Else each has a
// device, with the links of runtime/planner/clusters; fails if none has such devices.
Cluster cluster_of(const Ceilings& ceilings, int ranks);
