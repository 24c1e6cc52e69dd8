// `--calibrate`, as the program does it. It begins a file for --cluster with the peak rates of ranks and links, before
// the steps of a short run, and completes it with the speed of the kernels in these steps.
#pragma once

#include <iterator>
#include <sstream>

#include <nlohmann/json.hpp>

#include "runtime/checks/rank_check.cuh"
#include "runtime/planner/program.cuh"

// The link to rank `to`, while all ranks send, and this one receives from rank `from`. sharers: the number of ranks
// that share the link.
inline nlohmann::json measured_link(Communicator& all, int to, int from, int sharers) {
  constexpr size_t most = size_t(32) << 20;
  char* memory = nullptr;
  CUDA_CHECK(cudaMalloc(&memory, 2 * most));
  const auto seconds = [&](size_t bytes) {
    return best_seconds(all.stream(), [&] { all.send_receive(memory, to, memory + most, from, bytes); });
  };
  const double latency = seconds(1), rate = most / std::max(seconds(most) - latency, 1e-9);
  CUDA_CHECK(cudaFree(memory));
  return {{"kind", "measured"}, {"gb_per_s", sharers * rate / 1e9}, {"latency_us", std::max(1e6 * latency, 1e-3)}};
}

// Measures the ranks and their links. A device whose data sheet is known keeps its rates. Fails if the file is there
// already or, before minutes are lost, if it can't be written. Collective.
inline nlohmann::ordered_json begun_calibration(const Job& job) {
  const Options& o = job.options;
  const int ranks = job.ranks.size(), rank = job.ranks.rank();
  const std::string trial = o.of<PlanOptions>().calibrate + ".partial";
  for (const std::string& path : {o.of<PlanOptions>().calibrate, trial})
    if (rank == 0 && std::filesystem::exists(path) && !o.overwrite)
      usage_error("--calibrate ", excerpt(path), " is there already: choose another name, or add --overwrite");
  if (rank == 0) write_file(trial, ""), std::filesystem::remove(trial);

  const int here = job.ranks.neighbours();
  const int first = rank - rank % here;
  const int sharers = is_cpu_device ? here : 1;  // of a device
  const auto speed = [&](const char* dtype) { return check_ranks(job, dtype, false); };
  const RankSpeed fp32 = speed("fp32"), bf16 = speed(o.dtype == "fp16" ? "fp16" : "bf16");
  size_t free_bytes = 0, bytes = 0;
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &bytes));
  const double tera = 1e12 / sharers;
  const DeviceSheet measured = {"", bf16.product / tera, fp32.product / tera, fp32.copy / tera,
                                double(bytes) / (1 << 30), is_cpu_device ? Generation::cpu : Generation::ampere};
  const DeviceSheet* known = find_device(job.device);
  const DeviceSheet& sheet = known ? *known : measured;
  nlohmann::ordered_json file = {
      {"name", job.device + ", calibrated"},
      {"device", {{"name", job.device}, {"generation", generations[int(sheet.generation)]}, {"bf16_tflops", sheet.bf16},
                  {"fp32_tflops", sheet.fp32}, {"memory_tb_per_s", sheet.bandwidth}, {"memory_gib", measured.memory},
                  {"processors", sharers * device_attribute(cudaDevAttrMultiProcessorCount)},
                  {"measured", {{"products", 1.0}, {"attention", 1.0}, {"memory", 1.0}}}}},
      {"devices_per_host", is_cpu_device ? 1 : here}, {"hosts", ranks / here}};
  const std::unique_ptr<Communicator> all = job.mesh.temporary_world();
  const auto link = [&](int to, int from, int ranks_of_link) { return measured_link(*all, to, from, ranks_of_link); };
  if (here > 1) file["links"]["inside"] = link(first + (rank + 1) % here, first + (rank + here - 1) % here, sharers);
  if (ranks > here) file["links"]["between"] = link((rank + here) % ranks, (rank + ranks - here) % ranks, here);
  return file;
}

// Finds the speed of kernels with which a forecast equals the measurement, prints the forecast's error before and after
// that, and writes the file atomically. known: the forecast by earlier knowledge of this device; none: there was none.
// Collective.
inline void complete_calibration(const Job& job, nlohmann::ordered_json& file, const MeasuredStep& step,
                                 const std::optional<Forecast>& known) {
  const Options& o = job.options;
  const auto [products, attention, memory] = kind_seconds(step.kernels);
  KindSeconds sums = {};  // of all ranks
  for (const std::string& text : job.ranks.gather(formatted("%.9g %.9g %.9g", products, attention, memory))) {
    std::istringstream numbers(text);
    for (double& sum : sums) sum += *std::istream_iterator<double>(numbers);
  }
  if (!job.is_first()) return;
  if (step.seconds == 0) fail("--calibrate: the first steps took two minutes: give fewer --layers");
  const auto cluster = [&] { return with_devices(read_cluster(o.of<PlanOptions>().calibrate, file), job.ranks.size()); };
  const Forecast before = known ? *known : forecast(o, cluster());
  StepOptions whole = o;  // all stages of a pipeline together
  whole.mesh.pp = whole.pp_chunks = 1;
  for (int round = 0; round < 8; ++round) {  // one is not enough: products wait for memory, too
    const KindSeconds expected = kind_seconds(forecast(whole, cluster()));
    for (size_t kind = 0; kind < sums.size(); ++kind) {
      auto& speed = file["device"]["measured"][kind_names[kind]];
      speed = speed.get<double>() * expected[kind] * whole.mesh.ranks() / sums[kind];
    }
  }
  file["source"] = formatted("--calibrate: %d layers of %d channels, %d samples of %d tokens at a time, %s",
                             o.shape.layers, o.shape.channels, o.micro_batch, o.seq_len, o.dtype.c_str());
  replace_file(std::filesystem::absolute(o.of<PlanOptions>().calibrate), file.dump(1) + '\n');
  print_line("before    " + comparison_text(before, step));
  print_line("after     " + comparison_text(forecast(o, cluster()), step));
  print_line("written   " + o.of<PlanOptions>().calibrate + ": --plan --cluster takes it");
}
