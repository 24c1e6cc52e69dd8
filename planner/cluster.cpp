#include "planner/cluster.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "processes/error.h"
#include "runtime/files.h"

namespace {

constexpr double tera = 1e12, giga = 1e9, gib = 1024.0 * 1024 * 1024, micro = 1e-6;

// What no data sheet says of a GPU. planner/forecast.md has the sources.
//   products    the one number that is calibrated: so that the first row of 2104.04473's table is met
//   bandwidth   a copy's 4.3 of an H200's 4.8 TB/s (dev/roofline.md)
//   attention   of the products' peak: dev/roofline.py's 291 and 363 TFLOP/s of an H100's 989
//   launch      from kernel to kernel in a recorded graph or a full stream
//   links       NCCL's ring inside a host of A100: 240 of 300 GB/s
constexpr double gpu_products = 0.69, gpu_bandwidth = 4.3 / 4.8, gpu_attention_forward = 291.0 / 989,
                 gpu_attention_backward = 363.0 / 989, gpu_launch = 2e-6, gpu_links = 0.8;

// From NVIDIA's data sheets: dense TFLOP/s in fp32 and bf16, TB/s, and the GiB that the driver reports.
struct Sheet {
  const char* name;
  double fp32, bf16, bandwidth, memory;
};
constexpr Sheet sheets[] = {
    {"B200", 80, 2250, 8.0, 178.3},    {"H200", 67, 989, 4.8, 139.8},   {"H100", 67, 989, 3.35, 79.1},
    {"H100 PCIe", 51, 756, 2.0, 79.1}, {"A100-80", 19.5, 312, 2.039, 79.1}, {"A100-40", 19.5, 312, 1.555, 39.4},
    {"L40S", 91.6, 362, 0.864, 44.4},  {"RTX 4090", 82.6, 165.2, 1.008, 23.5}, {"L4", 30.3, 121, 0.3, 22.0}};

Device gpu(const std::string& name, double fp32, double bf16, double bandwidth, double memory) {
  Device d = {name, fp32 * tera, bf16 * tera, bandwidth * tera, memory * gib};
  d.product_share = gpu_products;
  d.bandwidth_share = gpu_bandwidth;
  d.attention_forward = gpu_attention_forward;
  d.attention_backward = gpu_attention_backward;
  d.launch = gpu_launch;
  return d;
}

// One object of the file, key by key. A key that nobody has asked for in the end is a mistake.
class Reader {
 public:
  Reader(const std::filesystem::path& path, const nlohmann::json& object, const std::string& prefix = "")
      : path_(path), object_(object), prefix_(prefix) {}

  bool has(const std::string& key) {
    asked_.insert(key);
    return object_.contains(key);
  }
  const nlohmann::json& value(const std::string& key) {
    if (!has(key)) fail(path_, ": \"", prefix_, key, "\" is missing", cure);
    return object_[key];
  }
  double rate(const std::string& key) {
    const nlohmann::json& found = value(key);
    if (!found.is_number() || !(found > 0 && found < 1e9)) refuse(key, "a number above 0");
    return found.get<double>();
  }
  int count(const std::string& key) {
    const nlohmann::json& found = value(key);
    if (!found.is_number_integer() || found < 1 || found > 1'000'000) refuse(key, "a whole number from 1 to 1000000");
    return found.get<int>();
  }
  std::string text(const std::string& key) {
    if (!value(key).is_string()) refuse(key, "a text");
    return object_[key].get<std::string>();
  }
  Reader object(const std::string& key) {
    if (!value(key).is_object()) refuse(key, "an object");
    return {path_, object_[key], prefix_ + key + '.'};
  }
  [[noreturn]] void refuse(const std::string& key, const std::string& wanted) {
    fail(path_, ": \"", prefix_, key, "\" is ", excerpt(value(key).dump()), ", not ", wanted, cure);
  }
  void end() const {
    for (const auto& [key, _] : object_.items())
      if (!asked_.contains(key)) fail(path_, ": there is no key ", excerpt(prefix_ + key), cure);
  }

 private:
  static constexpr const char* cure = ": see planner/forecast.md, and data/clusters for examples";
  const std::filesystem::path& path_;
  const nlohmann::json& object_;
  std::string prefix_;
  std::set<std::string> asked_;
};

const Sheet* find_sheet(const std::string& name) {
  const auto found = std::ranges::find(sheets, name, &Sheet::name);
  return found == std::end(sheets) ? nullptr : found;
}

std::string known_devices() {
  std::string names;
  for (const Sheet& sheet : sheets) names += (names.empty() ? "" : ", ") + std::string(sheet.name);
  return names;
}

Device read_device(Reader& file) {
  if (file.value("device").is_string()) {
    if (!find_sheet(file.text("device"))) file.refuse("device", "one of " + known_devices() + ", or an object with its rates");
    return device_named(file.text("device"));
  }
  Reader device = file.object("device");
  Device d = gpu(device.text("name"), device.rate("fp32_tflops"), device.rate("bf16_tflops"), device.rate("memory_tb_per_s"),
                 device.rate("memory_gib"));
  if (device.has("product_share")) d.product_share = std::min(1.0, device.rate("product_share"));
  device.end();
  return d;
}

Link read_link(Reader link) {
  const Link read = {link.text("kind"), link.rate("gb_per_s") * giga, link.rate("latency_us") * micro};
  link.end();
  return read;
}

// Where data/clusters is: in the folder where the program was started, or beside it, or above the build folder.
std::vector<std::filesystem::path> example_folders() {
  const std::filesystem::path examples = "data/clusters", program = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  return {examples, program / examples, program / "../.." / examples};
}

// Does the name that a driver reports have each word of the table's? "NVIDIA A100-SXM4-80GB": A100-80.
bool is_called(std::string reported, std::string name) {
  std::ranges::replace(reported, '-', ' ');
  std::ranges::replace(name, '-', ' ');
  std::istringstream words(name);
  for (std::string word; words >> word;)
    if ((' ' + reported + ' ').find(' ' + word + ' ') == std::string::npos && (reported + ' ').find(' ' + word + "GB ") == std::string::npos)
      return false;
  return true;
}

}  // namespace

Cluster load_cluster(const std::filesystem::path& path) {
  const nlohmann::json object = read_json_object(path);
  Reader file(path, object);
  Cluster c;
  c.name = file.text("name");
  c.device = read_device(file);
  c.devices_per_host = file.count("devices_per_host");
  c.hosts = file.count("hosts");
  c.link_share = gpu_links;
  if (c.devices() > 1 || file.has("links")) {
    Reader links = file.object("links");
    if (c.devices_per_host > 1 || links.has("inside")) c.inside = read_link(links.object("inside"));
    if (c.hosts > 1 || links.has("between")) c.between = read_link(links.object("between"));
    links.end();
  }
  if (file.has("price_per_device_hour")) c.price = file.rate("price_per_device_hour");
  if (file.has("spot_price_per_device_hour")) c.spot_price = file.rate("spot_price_per_device_hour");
  if (file.has("date")) c.date = file.text("date");
  if (file.has("source")) c.source = file.text("source");
  const std::string software = file.has("software") ? file.text("software") : "gpt.cu";
  if (software == "megatron-2021") c.software = Software::megatron_2021;
  else if (software != "gpt.cu") file.refuse("software", "gpt.cu or megatron-2021");
  file.end();
  return c;
}

Cluster find_cluster(const std::string& name) {
  if (std::filesystem::is_regular_file(name)) return load_cluster(name);
  for (const auto& folder : example_folders())
    if (const auto path = folder / (name + ".json"); std::filesystem::is_regular_file(path)) return load_cluster(path);
  fail("--cluster ", excerpt(name), ": no such file, and none in data/clusters: see planner/forecast.md");
}

std::optional<Cluster> cluster_of_device(const std::string& reported, int devices) {
  std::optional<Cluster> smallest;
  for (const auto& folder : example_folders()) {
    if (!std::filesystem::is_directory(folder)) continue;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      const Cluster c = load_cluster(entry.path());
      const bool is_ours = c.software == Software::gpt_cu && is_called(reported, c.device.name) && c.devices() >= devices;
      if (is_ours && (!smallest || c.devices() < smallest->devices())) smallest = c;
    }
    if (smallest) return smallest;
  }
  return smallest;
}

Device device_named(const std::string& name) {
  const Sheet* s = find_sheet(name);
  if (!s) fail("there is no device ", excerpt(name), ": there are ", known_devices());
  return gpu(name, s->fp32, s->bf16, s->bandwidth, s->memory);
}

Device device_of(const Ceilings& ceilings) {
  Device d = {"measured", ceilings.product, ceilings.product, ceilings.update, 0};
  d.attention_forward = ceilings.attention_forward / ceilings.product;
  d.attention_backward = ceilings.attention_backward / ceilings.product;
  d.attention_block = 64;
  d.elements = ceilings.gelu / ceilings.product;
  d.launch = ceilings.launch;
  d.norm_row = ceilings.norm_row, d.loss_row = ceilings.loss_row;
  d.overlaps = !ceilings.integrated;
  return d;
}

Cluster cluster_of(const Ceilings& ceilings, int ranks) {
  Cluster c;
  if (ceilings.integrated) {
    c.ranks_per_device = ranks;
    c.inside = {"memory", ceilings.copy / 4, 1e-4};  // two copies; a rank that waits sleeps for so long (cpu/cuda_runtime.cpp)
  } else if (ranks > 1) {
    const auto known = cluster_of_device(ceilings.device, ranks);
    if (!known) fail("what connects ", ranks, " devices ", excerpt(ceilings.device), " is not known: give a --cluster instead of --ceilings");
    c = *known;
    c.price = c.spot_price = 0;
  }
  c.name = "this machine";
  c.device = device_of(ceilings);
  return c;
}
