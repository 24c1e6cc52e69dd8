// What devices and hosts do (monitor.jsonl): /proc, an NVML that is played, what stands out, the file, and what it costs.
#include "runtime/monitor/monitor.h"

#include <cstdlib>
#include <ctime>

#include <fcntl.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "test/bounds.h"
#include "test/build_folder.h"
#include "test/temporary_folder.h"

using Json = nlohmann::ordered_json;

namespace {

// NVML is the played one while this lives, and answers so.
struct PlayedNvml {
  explicit PlayedNvml(const std::string& answers, const std::string& name = "fake_nvml.so") {
    setenv("GPT_NVML", built(name).c_str(), 1);
    setenv("FAKE_NVML", answers.c_str(), 1);
  }
  ~PlayedNvml() { unsetenv("GPT_NVML"), unsetenv("FAKE_NVML"); }
};

Json look_once(const std::string& answers, const std::string& name = "fake_nvml.so") {
  const PlayedNvml played(answers, name);
  return Nvml("0000:3b:00.0").look(1);
}

// A look at ranks of one host, to be changed.
Json look_at(int ranks, double time = 0) {
  Json look = {{"time", time}, {"step", 1}, {"hosts", {{{"host", "node1"}}}}, {"ranks", Json::array()}};
  for (int rank = 0; rank < ranks; ++rank) look["ranks"].push_back({{"rank", rank}, {"host", "node1"}, {"step_ms", 100}, {"work_ms", 90}});
  return look;
}

using Texts = std::vector<std::string>;

// What is printed on stderr meanwhile.
template <class Work>
std::string printed_in(const std::filesystem::path& path, Work work) {
  const int before = dup(STDERR_FILENO), file = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
  dup2(file, STDERR_FILENO);
  work();
  dup2(before, STDERR_FILENO);
  close(before), close(file);
  return content_of(path);
}

}  // namespace

TEST_CASE("rates: of two looks; a counter that begins anew has none") {
  Rates rates;
  CHECK(!rates.of("a", 100, 1));
  CHECK(!rates.of("b", 5, 1));
  CHECK(rates.of("a", 160, 4) == 20);
  CHECK(rates.of("b", 5, 2) == 0);
  CHECK(!rates.of("a", 10, 5));
  CHECK(rates.of("a", 12, 6) == 2);
  CHECK(!rates.of("a", 13, 6));
}

TEST_CASE("a host's load, from /proc: shares and rates of two looks, whole disks, no loopback") {
  TemporaryFolder root;
  int looks = 0;
  const auto fill = [&](const std::string& cpu, const std::string& swapped, const std::string& net, const std::string& disk) {
    const std::string lo = std::to_string(1000 * ++looks);  // grows, but is not counted
    put(root / "proc/stat", "cpu  " + cpu + "\ncpu0 9 9 9 9 9 9 9 9 9 9\nintr 12345\n");
    put(root / "proc/meminfo", "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable: 300 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\nHugePages: 0\n");
    put(root / "proc/vmstat", "nr_free_pages 7\n" + swapped + "\npgfault 9\n");
    put(root / "proc/net/dev", "Inter-|   Receive | Transmit\n face |bytes packets|bytes packets\n    lo: " + lo + " 1 1 1 1 1 1 1 " + lo + " 1 1 1 1 1 1 1\n" + net);
    put(root / "proc/diskstats", "   8 1 sda1 1 1 " + lo + " 1 1 1 " + lo + " 1 0 0 0\n   7 0 loop0 1 1 " + lo + " 1 1 1 " + lo + " 1 0 0 0\n" + disk);
  };
  std::filesystem::create_directories(root / "sys/block/sda/device");
  std::filesystem::create_directories(root / "sys/block/nvme0n1/device");
  std::filesystem::create_directories(root / "sys/block/loop0");
  fill("100 0 100 700 100 0 0 0 50 0", "pswpin 10\npswpout 20", "  eth0:1000 1 1 1 1 1 1 1 5000 1 1 1 1 1 1 1\n",
       "   8 0 sda 1 1 100 1 1 1 1000 1 0 0 0 7 7 7 7\n 259 0 nvme0n1 1 1 0 1 1 1 0 1 0 0 0\n");
  Rates rates;
  CHECK(host_load(rates, 10, root.path()) == Json{{"memory_bytes", 700 * 1024}, {"memory_total_bytes", 1000 * 1024}, {"swap_bytes", 30 * 1024}});
  fill("160 10 105 710 115 2 3 0 80 0", "pswpin 13\npswpout 24",
       "  eth0: 3000 1 1 1 1 1 1 1 6000 1 1 1 1 1 1 1\n  eth1: 500 1 1 1 1 1 1 1 0 1 1 1 1 1 1 1\n",
       "   8 0 sda 1 1 140 1 1 1 1010 1 0 0 0 7 7 7 7\n 259 0 nvme0n1 1 1 10 1 1 1 20 1 0 0 0\n");
  const Json second = host_load(rates, 15, root.path());
  CHECK(second["cpu"] == about(80. / 105));  // 60 + 10 + 5 + 2 + 3 ticks busy, 25 idle or waiting for disks
  CHECK(second["swap_bytes_per_s"] == 7 * double(sysconf(_SC_PAGESIZE)) / 5);
  CHECK(second["network_bytes_per_s"] == Json{{"in", 500.}, {"out", 200.}});
  CHECK(second["disk_bytes_per_s"] == Json{{"read", 50 * 512 / 5.}, {"write", 30 * 512 / 5.}});
}

TEST_CASE("a host that tells nothing, or nonsense") {
  TemporaryFolder root;
  Rates rates;
  for (double now : {1., 2.}) CHECK(!host_load(rates, now, root.path()).contains("cpu"));
  for (const char* file : {"proc/stat", "proc/meminfo", "proc/vmstat", "proc/net/dev", "proc/diskstats"}) put(root / file, "x: y z\n\n: 1");
  for (double now : {3., 4.}) {
    const Json look = host_load(rates, now, root.path());
    CHECK(!look.contains("cpu"));
    CHECK(!look.contains("memory_bytes"));
    CHECK(!look.contains("swap_bytes_per_s"));
  }
}

TEST_CASE("NVML: every number, with its unit") {
  const PlayedNvml played("reasons=111");
  Nvml nvml("0000:3b:00.0");
  CHECK(nvml.problem() == "");
  const Json wanted = {{"utilisation", 0.97}, {"memory_bytes", 60ull << 30}, {"memory_total_bytes", 80ull << 30}, {"power_w", 1e-3 * 654321},
                 {"power_limit_w", 700.}, {"temperature_c", 61.}, {"slowdown_c", 90.}, {"sm_mhz", 1755.}, {"memory_mhz", 2619.},
                 {"throttled", {"power", "thermal", "hardware_slowdown"}}, {"pcie_bytes_per_s", {{"in", 2e6}, {"out", 1e6}}},
                 {"ecc_corrected", 12}, {"ecc_uncorrected", 0}};
  CHECK(nvml.look(10).dump() == wanted.dump());
  CHECK(nvml.look(12)["nvlink_bytes_per_s"] == Json{{"in", 524288.}, {"out", 1048576.}});
}

TEST_CASE("NVML: what is not supported, or missing, or fails, leaves its key out") {
  const Json all = look_once("");
  CHECK(all["throttled"] == Json{"power"});
  const std::vector<Texts> keys = {{"utilisation"}, {"memory_bytes", "memory_total_bytes"}, {"power_w"}, {"power_limit_w"},
                                   {"temperature_c"}, {"slowdown_c"}, {"sm_mhz", "memory_mhz"}, {"throttled"},
                                   {"pcie_bytes_per_s"}, {}, {"ecc_corrected", "ecc_uncorrected"}};
  for (size_t i = 0; i < keys.size(); ++i) {
    Json wanted = all;
    for (const std::string& key : keys[i]) wanted.erase(key);
    CHECK(look_once("unsupported=" + std::to_string(i + 1)) == wanted);
  }
  CHECK(look_once("error=999") == Json::object());
  CHECK(look_once("reasons=1")["throttled"] == Json::array());  // an idle GPU
  for (const char* reason : {"reasons=32", "reasons=64"}) CHECK(look_once(reason)["throttled"] == Json{"thermal"});
  CHECK(look_once("reasons=128")["throttled"] == Json{"power_brake"});
  CHECK(look_once("", "fake_nvml_old.so") == Json{{"utilisation", 0.97}});
}

TEST_CASE("NVML: a card that vanishes is null, and is asked no more") {
  const PlayedNvml played("lost_after=20 print=1");
  TemporaryFolder folder;
  const std::string printed = printed_in(folder / "printed", [] {
    Nvml nvml("0000:3b:00.0");
    CHECK(nvml.look(1).is_object());  // 14 questions
    CHECK(nvml.look(2).is_null());
    CHECK(nvml.look(3).is_null());
  });
  CHECK(printed.ends_with("\nquestion 21\n"));
}

TEST_CASE("NVML: a library that is not there, or does not start, is a problem with a reason") {
  {
    const PlayedNvml played("init=9");
    Nvml nvml("0000:3b:00.0");
    CHECK(is_line_with(nvml.problem(), "no readings of the GPU: ", "fake_nvml.so answers with error 9"));
    CHECK(nvml.look(1) == Json::object());
  }
  {
    const PlayedNvml played("", "no_such.so");
    Nvml nvml("0000:3b:00.0");
    CHECK(is_line_with(nvml.problem(), "no readings of the GPU: ", "no_such.so"));
    CHECK(nvml.look(1) == Json::object());
  }
}

TEST_CASE("what stands out: a slow rank, against the median of its stage, after three looks, once") {
  Outliers outliers(4);
  Json look = look_at(8);
  for (int rank = 4; rank < 8; ++rank) look["ranks"][rank]["work_ms"] = 300;  // the stage with the head
  look["ranks"][2]["work_ms"] = 120;
  CHECK(outliers.find(look, look["time"]).empty());
  CHECK(outliers.find(look, look["time"]).empty());
  CHECK(outliers.find(look, look["time"]) == Texts{"rank 2 (node1): slow: its own work takes 120.0 ms a step, 1.33 times the median of 90.0 ms: the "
                                     "others wait for it"});
  CHECK(outliers.find(look, look["time"]).empty());
  Outliers others(2);
  Json two = look_at(2);
  size_t named = 0;
  for (const auto& [work, so_far] : {std::pair(120., 0), {120., 0}, {100., 0}, {120., 0}, {120., 0}, {120., 1}}) {
    two["ranks"][1]["work_ms"] = work;  // of two ranks the faster one counts; 1.11 times is not slow
    named += others.find(two, two["time"]).size();
    CHECK(named == size_t(so_far));
    Json untimed = look_at(2);
    for (Json& rank : untimed["ranks"]) rank.erase("work_ms");
    CHECK(others.find(untimed, untimed["time"]).empty());  // neither adds to the row nor ends it
  }
}

TEST_CASE("what stands out: GPUs that are hot, throttled or lost, several ranks in one line, once") {
  Outliers outliers(4);
  Json look = look_at(4);
  for (Json& rank : look["ranks"]) rank["gpu"] = {{"utilisation", 0.9}, {"temperature_c", 84.}, {"slowdown_c", 90.}, {"throttled", {"power"}}};
  CHECK(outliers.find(look, look["time"]).empty());
  look["ranks"][3]["gpu"]["temperature_c"] = 85;
  CHECK(outliers.find(look, look["time"]) == Texts{"rank 3 (node1): GPU at 85 °C, slows down at 90"});
  for (int rank : {0, 1}) look["ranks"][rank]["gpu"]["throttled"] = {"power", "thermal", "hardware_slowdown"};
  CHECK(outliers.find(look, look["time"]) == Texts{"ranks 0, 1: GPU at 84 °C, clocks lowered by thermal, hardware_slowdown"});
  look["ranks"][2]["gpu"] = nullptr;
  const Texts lost = outliers.find(look, look["time"]);
  REQUIRE(lost.size() == 1);
  CHECK(is_line_with(lost[0], "rank 2 (node1): NVML has lost the GPU: ", "Xid"));
  CHECK(outliers.find(look, look["time"]).empty());
  Json dumb = look_at(1);
  dumb["ranks"][0]["gpu"] = {{"throttled", {"power_brake"}}};
  dumb["ranks"][0]["problem"] = "no readings";
  CHECK(Outliers(1).find(dumb, dumb["time"]) == Texts{"rank 0 (node1): GPU: clocks lowered by power_brake", "rank 0 (node1): no readings"});
}

TEST_CASE("what stands out: a host that swaps in two looks") {
  Outliers outliers(1);
  Json look = look_at(1);
  for (const auto& [rate, named] : {std::pair(2e6, 0), {1e5, 0}, {2e6, 0}, {3e6, 1}, {1e5, 0}, {2e6, 0}, {3e6, 0}}) {
    look["hosts"][0]["swap_bytes_per_s"] = rate;
    const Texts found = outliers.find(look, look["time"]);
    CHECK(found.size() == size_t(named));
    if (named) CHECK(is_line_with(found[0], "host node1: swaps 3.0 MB/s"));
  }
  Outliers of_both(1);
  look["hosts"].push_back(look["hosts"][0]), look["hosts"][1]["host"] = "node2";
  of_both.find(look, look["time"]);
  const Texts both = of_both.find(look, look["time"]);
  REQUIRE(both.size() == 1);
  CHECK(is_line_with(both[0], "hosts node1, node2: swaps 3.0 MB/s"));
}

TEST_CASE("what stands out: a device that is idle for a minute, and what it waits for") {
  Outliers outliers(4);
  for (double time : {0., 10., 20., 30., 40., 50., 60., 70., 80.}) {
    CAPTURE(time);
    Json look = look_at(4, time);
    look["ranks"][0]["gpu"] = {{"utilisation", time < 15 ? 0.5 : 0.}};  // busy until 10
    look["ranks"][0]["waits_for"] = "in data #5 all_reduce of 64 bytes";
    look["ranks"][1].erase("step_ms"), look["ranks"][1]["cpu"] = 0.1;   // a CPU device that only polls, from the start
    look["ranks"][2].erase("step_ms"), look["ranks"][2]["cpu"] = 0.9;   // one whose step is long
    look["ranks"][3]["cpu"] = 0.1;                                      // one that ends steps, on a busy machine
    const Texts found = outliers.find(look, look["time"]);
    if (time == 60) CHECK(found == Texts{"rank 1 (node1): device idle for 60 s: in no collective: does it wait for a disk?"});
    else if (time == 70) CHECK(found == Texts{"rank 0 (node1): device idle for 60 s: in data #5 all_reduce of 64 bytes"});
    else CHECK(found.empty());
  }
}

TEST_CASE("the monitor: a line after the first step and one at the end, a resumed one goes on, and 6 digits") {
  TemporaryFolder folder;
  const std::filesystem::path path = folder / "run/monitor.jsonl";
  Control control;
  const auto run = [&](double every_s, int steps) {
    Monitor monitor(control, {.every_s = every_s, .path = path});
    for (int step = 1; step <= steps; ++step) monitor.add_step(size_t(step), 1. / 3, step % 2 ? std::optional(1. / 4) : std::nullopt);
    monitor.finish();
  };
  run(1000, 0);
  run(1e-10, 0);
  run(0, 3);
  CHECK(!std::filesystem::exists(path));  // a run that fails before its first step leaves nothing behind
  run(1000, 3);
  const std::vector<Json> lines = json_lines<Json>(path);
  REQUIRE(lines.size() == 2);
  CHECK(lines[1]["step"] == 3);
  CHECK(lines[1]["time"] > 1.7e9);
  CHECK(lines[0]["ranks"][0]["step_ms"] == 333.333);
  CHECK(lines[0]["ranks"][0]["work_ms"] == 83.3333);
  CHECK(lines[0]["hosts"][0]["memory_bytes"].is_number_integer());
  CHECK(!lines[0]["ranks"][0].contains("gpu"));
  const std::string before = content_of(path);
  put(path, before + "{\"time\": 5, \"ste");  // a crash
  run(1000, 1);
  CHECK(content_of(path).starts_with(before + "{\"time\":1"));
  CHECK(json_lines<Json>(path).size() == 4);
  {  // an error ends it, without a last look
    Monitor monitor(control, {.every_s = 1000, .path = path});
    monitor.add_step(1, 0.1, 0);
    usleep(100'000);
  }
  CHECK(json_lines<Json>(path).size() <= 5);
}

TEST_CASE("the monitor looks every S seconds, names what stands out on the terminal and in the file, without a file too") {
  TemporaryFolder folder;
  const PlayedNvml played("lost_after=30");
  const std::filesystem::path path = folder / "monitor.jsonl";
  for (const bool writes : {true, false}) {
    const std::string printed = printed_in(folder / "printed", [&] {
      Control control;
      Monitor monitor(control, {.every_s = 0.02, .path = writes ? path : std::filesystem::path()});
      monitor.add_step(1, 0.1, 0);
      usleep(300'000);
      monitor.finish();
    });
    CHECK(is_line_with(printed.substr(0, printed.size() - 1), "train_gpt: rank 0 (", "): NVML has lost the GPU"));
  }
  const std::vector<Json> lines = json_lines<Json>(path);
  CHECK(lines.size() >= 4);
  CHECK(lines[0]["ranks"][0]["gpu"]["power_w"] == 654.321);
  CHECK(lines.back()["ranks"][0]["gpu"].is_null());
  CHECK(std::ranges::count_if(lines, [](const Json& line) { return line.contains("warning"); }) == 1);
}

TEST_CASE("a disk that is full: lines wait, the monitor goes on") {
  TemporaryFolder folder;
  const std::string printed = printed_in(folder / "printed", [&] {
    Control control;
    Monitor monitor(control, {.every_s = 0.02, .path = folder / "monitor.jsonl"});
    {
      const FullDisk full(240);  // what is printed fits
      monitor.add_step(1, 0.1, 0);
      usleep(100'000);
    }
    monitor.finish();
  });
  CHECK(contains(printed, "lines wait in memory, training goes on"));
  CHECK(contains(printed, "can be written again, no line is lost"));
  CHECK(json_lines<Json>(folder / "monitor.jsonl").size() >= 3);
}

// 0.5 % of a core are 50 ms in 10 s. NVML's own time is not in it.
TEST_CASE("a look of eight ranks costs less than 0.5 % of a core at the default interval") {
  const auto cpu_seconds = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
  };
  const PlayedNvml played("");
  Nvml nvml("0000:3b:00.0");
  Rates rates;
  Outliers outliers(8);
  FlightRecorder recorder;
  for (int i = 0; i < 5000; ++i) recorder.leave(recorder.enter("all_reduce", 64, 1, "data"));
  const int looks = 50;
  const double start = cpu_seconds();
  for (int i = 0; i < looks; ++i) {
    Json look = look_at(8, i);
    look["hosts"][0].update(Json::parse(host_load(rates, i).dump()));
    for (Json& rank : look["ranks"]) rank["gpu"] = Json::parse(nvml.look(i).dump());
    CHECK(brief(recorder.entries(), steady_seconds()).waiting == 0);
    outliers.find(look, look["time"]);
  }
  const double cost = (cpu_seconds() - start) / looks;
  MESSAGE("a look takes " << 1e3 * cost << " ms of processor time");
  CHECK(cost < 0.005 * MonitorOptions().every_s);
}
