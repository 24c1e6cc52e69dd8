#include "runtime/planner/cluster.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "gpt/base/files.h"
#include "gpt/base/json_fields.h"
#include "gpt/base/text.h"
#include "runtime/reports/hardware.h"

namespace {

constexpr double tera = 1e12, giga = 1e9, gib = 1024.0 * 1024 * 1024, micro = 1e-6;

// Properties of GPUs that no data sheet gives. runtime/planner/forecast.md has the sources.
//   products    of the peak: Hopper's by Megatron-Core's runs, the others' by the first row of 2104.04473's table
//   bandwidth   assumed: nine tenths
//   fp32        attention's share of the peak without tensor cores: assumed
//   H200        products by gpt.cu's own steps, bandwidth of a copy (dev/results/2026-11-26-h200.md)
//   launch      from kernel to kernel in a recorded graph or a full stream: assumed
//   links       NCCL's ring inside a host of A100: 240 of 300 GB/s
//   host link   of PCIe's rate, both ways at the same time: assumed
constexpr double gpu_products = 0.69, hopper_products = 0.62, gpu_bandwidth = 0.9, gpu_fp32_attention = 0.3;
constexpr double h200_products = 0.76, h200_bandwidth = 4.196 / 4.8;
constexpr double gpu_launch = 2e-6, gpu_links = 0.8, gpu_host_link = 0.8;

// Margins of forecasts, from runs of dev/published that no number was fitted to (test/planner/test_planner.cpp compares),
// and from dev/results on the CPU device. Devices without a run get the wider of both.
constexpr Margin on_a100 = {-0.20, 0.30, "published runs on A100"}, on_h100 = {-0.20, 0.20, "published runs on H100"};
constexpr Margin elsewhere = {-0.20, 0.30, "published runs on A100 and H100"}, on_cpu = {-0.10, 0.30, "runs on the CPU device"};

Margin known_margin(const DeviceSheet& sheet) {
  if (sheet.generation == Generation::hopper) return on_h100;
  return std::string(sheet.name).starts_with("A100") || std::string(sheet.name) == "A800" ? on_a100 : elsewhere;
}

// Rates of the same kernels on a device with another peak, FLOP/s.
AttentionRates scaled(const AttentionRates& published, double peak, double published_peak) {
  return published * (tera * peak / published_peak);
}

Device gpu(const DeviceSheet& sheet) {
  const double fp8 = sheet.has_fp8() ? 2 : 0;
  Device d = {sheet.name, sheet.fp32 * tera, sheet.bf16 * tera, fp8, sheet.bandwidth * tera, sheet.memory * gib};
  d.sheet_fp32 = d.fp32, d.sheet_bf16 = d.bf16;
  d.product_share = gpu_products;
  d.bandwidth_share = gpu_bandwidth;
  d.attention_fp32 = AttentionRates::flat(gpu_fp32_attention * d.fp32, gpu_fp32_attention * d.fp32);
  d.own = d.hopper = d.library = scaled(flash_on_a100, sheet.bf16, 312);
  d.host = gpu_host_link * sheet.host * giga;
  d.launch = gpu_launch;
  d.margin = known_margin(sheet);
  d.is_hopper = d.fp8_tiles = sheet.generation == Generation::hopper;
  if (sheet.generation == Generation::ampere) return d;
  d.product_share = hopper_products;
  if (d.name == "H200") d.product_share = h200_products, d.bandwidth_share = h200_bandwidth;
  d.persistent_sms = sheet.generation == Generation::hopper ? 132 : 148;
  if (sheet.generation == Generation::hopper) {
    d.own = scaled(own_on_hopper, sheet.bf16, 989);
    d.hopper = scaled(hopper_on_hopper, sheet.bf16, 989);
    d.library = scaled(cudnn_on_hopper, sheet.bf16, 989);
  } else {
    d.own = d.hopper = own_on_hopper * tera;  // no faster than there
    d.library = scaled(cudnn_on_blackwell, sheet.bf16, 2500);
  }
  return d;
}

// A CPU, in the proportions of the one that dev/results/2026-11-24-calibrate.md names: the rates of all kernels are
// scaled by the rate of products. A copy, by which its bandwidth is known, is one thread's work, and slower than
// kernels.
Device cpu(const DeviceSheet& sheet, int processors) {
  const double product = sheet.fp32 * tera, times = product / 4.6e11;
  Device d = device_of({0, product, 1.4 * sheet.bandwidth * tera, 1e-7 / times, 7e10 * times, 1.5e11 * times, 6.6e10 * times,
                        8.5e-7 / times, 2.4e-6 / times, sheet.name, true, processors});
  d.name = sheet.name, d.bf16 = sheet.bf16 * tera, d.memory = sheet.memory * gib;
  d.host = d.bandwidth / 2;  // a copy reads and writes
  return d;
}

// A message is two copies; the latency is the time that a waiting rank sleeps before it looks again
// (cpu/cuda_runtime.cpp).
Link memory_link(double copy) { return {"memory", copy / 4, 1e-4}; }

constexpr const char* cure = ": see runtime/planner/clusters.md, and runtime/planner/clusters for examples";

Device read_device(JsonFields& file) {
  if (file.value("device").is_string()) {
    const DeviceSheet* sheet = find_device(file.text("device"));
    if (!sheet) file.refuse("device", "one of " + joined(device_sheets, &DeviceSheet::name) + ", or an object with its rates");
    return gpu(*sheet);
  }
  JsonFields device = file.object("device");
  const std::string name = device.text("name");
  DeviceSheet sheet = {name.c_str(), device.rate("bf16_tflops"), device.rate("fp32_tflops"),
                       device.rate("memory_tb_per_s"), device.rate("memory_gib")};
  if (device.has("generation")) {
    const auto* known = std::ranges::find(generations, device.text("generation"));
    if (known == std::end(generations)) device.refuse("generation", "one of " + joined(generations));
    sheet.generation = Generation(known - generations);
  }
  const int processors = device.has("processors") ? device.count("processors") : 0;
  Device d = sheet.generation == Generation::cpu ? cpu(sheet, processors) : gpu(sheet);
  if (device.has("measured")) {  // corrects the built-in numbers
    JsonFields measured = device.object("measured");
    const double memory = measured.rate("memory"), attention = measured.rate("attention");
    d.product_share *= measured.rate("products"), d.bandwidth_share *= memory, d.elements *= memory;
    d.norm_row /= memory, d.loss_row /= memory;
    for (AttentionRates* rates : {&d.own, &d.hopper, &d.library, &d.attention_fp32}) *rates = *rates * attention;
    measured.end();
  }
  if (device.has("host_gb_per_s")) d.host = gpu_host_link * device.rate("host_gb_per_s") * giga;
  if (device.has("product_share")) d.product_share = device.rate("product_share", 1);
  device.end();
  return d;
}

Link read_link(JsonFields link) {
  const Link read = {link.text("kind"), link.rate("gb_per_s") * giga, link.rate("latency_us") * micro};
  link.end();
  return read;
}

std::vector<std::filesystem::path> example_files() {
  std::vector<std::filesystem::path> files;
  std::error_code not_there;
  for (const auto& entry : std::filesystem::directory_iterator(planner_file("clusters"), not_there)) files.push_back(entry.path());
  std::ranges::sort(files);
  return files;
}

}  // namespace

std::filesystem::path planner_file(const std::string& name) {
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  for (const auto& folder : {std::filesystem::path("."), program, program / "../.."})
    if (const auto file = folder / "runtime/planner" / name; std::filesystem::exists(file)) return file;
  return {};
}

std::string Margin::text() const {
  return formatted("%s: %+.0f to %+.0f %%", runs, 100 * shorter, 100 * longer);
}

Cluster load_cluster(const std::filesystem::path& path) { return read_cluster(path, read_json_object(path)); }

Cluster read_cluster(const std::string& where, const nlohmann::json& object) {
  JsonFields file(where, object, cure);
  Cluster c;
  c.name = file.text("name");
  c.device = read_device(file);
  c.devices_per_host = file.count("devices_per_host");
  c.hosts = file.count("hosts");
  if (const int most = (1 << 14) / c.devices_per_host; c.hosts > most)
    file.refuse("hosts", "from 1 to " + std::to_string(most) + ", with 16384 devices at most");
  c.link_share = file.value("device").contains("measured") ? 1 : gpu_links;
  if (c.devices() > 1 || file.has("links")) {
    JsonFields links = file.object("links");
    if (c.devices_per_host > 1 || links.has("inside")) c.inside = read_link(links.object("inside"));
    if (c.hosts > 1 || links.has("between")) c.between = read_link(links.object("between"));
    links.end();
  } else if (c.is_shared()) {
    c.inside = memory_link(c.device.bandwidth);
  }
  for (const auto& [key, rate] : {std::pair("price_per_device_hour", &c.price), {"spot_price_per_device_hour", &c.spot_price},
                                  {"spot_hours_between_interruptions", &c.spot_hours}})
    if (file.has(key)) *rate = file.rate(key);
  if (file.has("host_memory_gib")) c.host_memory = file.rate("host_memory_gib") * gib;
  if (file.has("date")) c.date = file.text("date");
  if (file.has("source")) c.source = file.text("source");
  file.end();
  return c;
}

Cluster find_cluster(const std::string& name) {
  if (std::filesystem::is_regular_file(name)) return load_cluster(name);
  if (const auto path = planner_file("clusters/" + name + ".json"); !path.empty()) return load_cluster(path);
  const std::string known = joined(example_files(), [](const auto& path) { return path.stem().string(); });
  fail("--cluster ", excerpt(name), ": no such file, and none of runtime/planner/clusters: give a file's path",
       name.find(',') == name.npos ? "" : " (two clusters, A,B, are for --plan alone)",
       known.empty() ? "; runtime/planner/clusters is not here" : ", or one of: " + known);
}

std::vector<Cluster> example_clusters() {
  std::vector<Cluster> all;
  for (const auto& path : example_files()) all.push_back(load_cluster(path));
  std::ranges::sort(all, {}, [](const Cluster& c) { return std::pair(c.devices(), c.name); });
  return all;
}

Cluster with_devices(Cluster c, int ranks) {
  if (c.is_shared()) {
    c.ranks_per_device = (ranks - 1) / c.devices() + 1;
    return c;
  }
  if (ranks > c.devices())
    usage_error("--ranks ", ranks, ": the cluster ", c.name, " has ", c.devices(), " devices: give that many or fewer");
  const int here = std::min(c.devices_per_host, ranks);
  c.host_memory *= double(here) / std::exchange(c.devices_per_host, here);
  c.hosts = (ranks - 1) / here + 1;
  return c;
}

std::optional<Cluster> cluster_of_device(const std::string& reported, int devices) {
  const DeviceSheet* sheet = find_device(reported);
  for (Cluster& c : example_clusters())
    if (sheet && c.device.name == sheet->name && c.devices() >= devices) {
      c.price = c.spot_price = 0;
      return with_devices(c, devices);
    }
  return {};
}

Device device_of(const Ceilings& ceilings) {
  const DeviceSheet* const sheet = find_device(ceilings.device);  // the CPU device multiplies codes as bf16
  const double fp8 = ceilings.integrated ? 1 : sheet && sheet->has_fp8() ? 2 : 0;
  Device d = {"measured", ceilings.product, ceilings.product, fp8, ceilings.update, 0};
  d.is_hopper = sheet && sheet->generation == Generation::hopper;
  d.sheet_fp32 = peak_flops(ceilings.device, true), d.sheet_bf16 = peak_flops(ceilings.device, false);
  // Measured as seven products, since our kernels compute two of backward's twice
  const double backward = ceilings.attention_backward * 5 / 7;
  d.own = d.hopper = d.library = d.attention_fp32 = AttentionRates::flat(ceilings.attention_forward, backward);
  d.attention_block = 64;
  d.elements = ceilings.gelu / ceilings.product;
  d.host = ceilings.integrated ? ceilings.copy / 2 : gpu_host_link * (sheet ? sheet->host : DeviceSheet().host) * giga;
  d.launch = ceilings.launch;
  d.norm_row = ceilings.norm_row, d.loss_row = ceilings.loss_row;
  d.overlaps = !ceilings.integrated;
  if (ceilings.integrated) d.processors = ceilings.processors;
  d.margin = ceilings.integrated ? on_cpu : elsewhere;
  return d;
}

Cluster cluster_of(const Ceilings& ceilings, int ranks) {
  Cluster c;
  if (ceilings.integrated) {
    c.ranks_per_device = ranks;
    c.inside = memory_link(ceilings.copy);
  } else if (ranks > 1) {
    const auto known = cluster_of_device(ceilings.device, ranks);
    if (!known)
      fail("--ceilings: what connects ", ranks, " devices ", excerpt(ceilings.device), " is not known: ",
           "give a --cluster instead");
    c = *known;
  }
  c.name = "this machine";
  c.device = device_of(ceilings);
  return c;
}
