// Learning rate, terminal, metrics, bill, timeline files, rules for --out and --resume, guard, error lines: headers of runtime/.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "cpu/host_cpus.h"
#include "cpu/host_memory.h"
#include "gpt/base/error.h"
#include "gpt/base/json_fields.h"
#include "gpt/base/process.h"
#include "gpt/schedule.h"
#include "runtime/checkpoints/run_folder.h"
#include "runtime/checkpoints/trainer_record.h"
#include "runtime/guard/guard.h"
#include "runtime/reports/hardware.h"
#include "runtime/reports/bill.h"
#include "runtime/reports/console.h"
#include "runtime/reports/metrics.h"
#include "runtime/traces/trace_file.h"
#include "test/bounds.h"
#include "test/temporary_folder.h"

TEST_CASE("the processors that control groups leave: the least quota of a group and those around it, rounded up") {
  TemporaryFolder root;
  CHECK(group_cpus(root.path()) == INT_MAX);
  const std::filesystem::path top = root / "sys/fs/cgroup";
  put(root / "proc/self/cgroup", "0::/job_7/step_0\n");
  put(top / "job_7/step_0/cpu.max", "max 100000\n");
  CHECK(group_cpus(root.path()) == INT_MAX);
  put(top / "job_7/cpu.max", "250000 100000\n");
  CHECK(group_cpus(root.path()) == 3);
  put(top / "cpu.max", "5000 100000\n");
  CHECK(group_cpus(root.path()) == 1);
  put(root / "proc/self/cgroup", "9:cpu,cpuacct:/docker\n0::/\n");
  std::filesystem::remove(top / "cpu.max");
  put(top / "cpu/cpu.cfs_quota_us", "-1\n");
  put(top / "cpu/cpu.cfs_period_us", "100000\n");
  put(top / "cpu/docker/cpu.cfs_quota_us", "400000\n");
  CHECK(group_cpus(root.path()) == INT_MAX);  // no period can be read
  put(top / "cpu/docker/cpu.cfs_period_us", "100000\n");
  CHECK(group_cpus(root.path()) == 4);
}

// ---- learning rate ----------------------------------------------------------------------------------------

TEST_CASE("cosine with warmup") {
  LearningRateSchedule schedule = {.kind = "cosine", .lr = 1.0, .min_lr = 0.1, .steps = 12, .warmup = 4};
  validate(schedule);
  CHECK(learning_rate(schedule, 0) == about(0.25));
  CHECK(learning_rate(schedule, 3) == about(1.0));
  CHECK(learning_rate(schedule, 4) == about(1.0));
  CHECK(learning_rate(schedule, 6) == about(0.1 + 0.9 * (1 + std::sqrt(0.5)) / 2));
  CHECK(learning_rate(schedule, 8) == about(0.55));
  CHECK(learning_rate(schedule, 12) == about(0.1));
  CHECK(learning_rate(schedule, 1000) == about(0.1));
  schedule.warmup = 0;
  CHECK(learning_rate(schedule, 0) == 1.0);
  schedule.warmup = schedule.steps;
  CHECK(learning_rate(schedule, 11) == 1.0);
}

TEST_CASE("constant and wsd") {
  LearningRateSchedule schedule = {.kind = "constant", .lr = 0.5, .min_lr = 0, .steps = 20, .warmup = 2};
  CHECK(learning_rate(schedule, 0) == 0.25);
  CHECK(learning_rate(schedule, 19) == 0.5);
  schedule.kind = "wsd";
  CHECK(learning_rate(schedule, 19) == 0.5);
  schedule.cooldown = 4;
  validate(schedule);
  CHECK(learning_rate(schedule, 1) == 0.5);
  CHECK(learning_rate(schedule, 16) == 0.5);
  CHECK(learning_rate(schedule, 17) == about(0.25));
  CHECK(learning_rate(schedule, 19) == about(0.5 * (1 - std::sqrt(0.75))));
  CHECK(learning_rate(schedule, 20) == 0);
  CHECK(learning_rate(schedule, 25) == 0);
}

TEST_CASE("steps that fit in a time") {
  CHECK(steps_within(100, 2, 0, 0) == 50);
  CHECK(steps_within(100, 2, 10, 0) == 45);   // a validation after the last step
  CHECK(steps_within(110, 2, 10, 20) == 40);  // and one every 20
  CHECK(steps_within(1, 2, 10, 20) == 1);
}

TEST_CASE("contradictory schedules are refused") {
  auto refusal = [](const LearningRateSchedule& schedule) { return error_of([&] { validate(schedule); }); };
  const double nan = std::nan("");
  CHECK(is_line_with(refusal({.kind = "linear", .steps = 5}), "'linear'", "cosine"));
  CHECK(is_line_with(refusal({.lr = -1, .steps = 5}), "--lr -1"));
  CHECK(is_line_with(refusal({.lr = nan, .steps = 5}), "--lr nan"));
  CHECK(is_line_with(refusal({.lr = 1, .min_lr = 2, .steps = 5}), "--min-lr 2", "--lr 1"));
  CHECK(is_line_with(refusal({.lr = 1, .min_lr = nan, .steps = 5}), "--min-lr nan"));
  CHECK(is_line_with(refusal({.steps = 5, .warmup = 6}), "--warmup 6", "--steps 5"));
  CHECK(is_line_with(refusal({.steps = 5, .cooldown = 1}), "--cooldown 1", "wsd", "cosine"));
  CHECK(is_line_with(refusal({.kind = "wsd", .steps = 5}), "--schedule wsd", "--cooldown N"));
  CHECK(is_line_with(refusal({.kind = "wsd", .steps = 5, .cooldown = 1}), "--schedule wsd", "from 2 on"));
  CHECK(is_line_with(refusal({.kind = "wsd", .min_lr = 1e-5, .steps = 5, .cooldown = 2}), "--min-lr 1e-05", "cosine", "wsd"));
  CHECK(is_line_with(refusal({.kind = "wsd", .steps = 5, .warmup = 3, .cooldown = 3}), "--cooldown 3"));
  CHECK(refusal({.kind = "wsd", .steps = 6, .warmup = 3, .cooldown = 3}) == "");
}

// ---- the terminal -----------------------------------------------------------------------------------------

namespace {

Sparkline sparkline_of(const std::vector<double>& values) {
  Sparkline line;
  for (const double value : values) line.add(value);
  return line;
}

// Letters, not bytes, of UTF-8.
size_t letters(const std::string& text) {
  return size_t(std::ranges::count_if(text, [](char c) { return (c & 0xc0) != 0x80; }));
}

}  // namespace

TEST_CASE("a sparkline shows the whole run, from its first value to its last, in a fixed width") {
  CHECK(sparkline_of({}).text(8, true).empty());
  CHECK(sparkline_of({1, 2, 3, 4, 5, 6, 7, 8}).text(8, true) == "▁▂▃▄▅▆▇█");
  CHECK(sparkline_of({8, 7, 6, 5, 4, 3, 2, 1}).text(8, false) == "#*+=-:._");
  CHECK(sparkline_of({5, 5, 5}).text(6, true) == "▁▁▁▁▁▁");
  CHECK(sparkline_of({2, 1}).text(4, true) == "██▁▁");
  CHECK(sparkline_of({3, std::nan(""), 2, INFINITY, 1}).text(3, false) == "#-_");
  std::vector<double> values;  // of a long run: what is kept of it stays small, and no part is lost
  for (int i = 0; i < 100'000; ++i) values.push_back(i < 25'000 ? 4 : i < 50'000 ? 3 : i < 75'000 ? 2 : 1);
  CHECK(sparkline_of(values).text(8, false) == "##++::__");
}

TEST_CASE("the progress bar fits into any terminal") {
  const Sparkline losses = sparkline_of({4, 3, 2, 1});
  CHECK(progress_text(1, 4, 61, losses, 50, false) == "[###............] 1/4, 1m01s left ####++++::::___");
  CHECK(contains(progress_text(1, 4, 61, losses, 80, true), "█"));
  CHECK(progress_text(0, 0, 0, {}, 80, true).starts_with("[###"));
  for (size_t columns = 0; columns < 200; ++columns) {
    CAPTURE(columns);
    CHECK(letters(progress_text(999'999'999, 1'000'000'000, 1e6, losses, columns, true)) < std::max<size_t>(columns, 1));
    CHECK(letters(progress_text(3, 9, 5, losses, columns, true)) < std::max<size_t>(columns, 1));
  }
}

TEST_CASE("fp32 on a device whose bf16 is faster: one line with the factor") {
  CHECK(dtype_hint("NVIDIA H200", "fp32") ==
        "hint      products of bf16 have 14.8 times the peak of fp32 on this device: try --dtype bf16");
  CHECK(contains(dtype_hint("NVIDIA GeForce RTX 4090", "fp32"), " 2 times "));
  for (const char* dtype : {"bf16", "fp16"}) CHECK(dtype_hint("NVIDIA H200", dtype).empty());
  for (const char* unknown : {"AMD EPYC", "Tesla V100", "NVIDIA GeForce RTX 4090 Laptop GPU", ""}) CHECK(dtype_hint(unknown, "fp32").empty());
}

TEST_CASE("numbers with commas, durations") {
  CHECK(with_commas(0) == "0");
  CHECK(with_commas(999.4) == "999");
  CHECK(with_commas(1000) == "1,000");
  CHECK(with_commas(-123) == "-123");
  CHECK(with_commas(-1234567) == "-1,234,567");
  CHECK(with_commas(-NAN) == "-nan");
  CHECK(duration(61.4) == "1m01s");
  CHECK(duration(3600 * 25 + 61) == "25h01m");
}

TEST_CASE("a command line for a shell, without some options and their values") {
  const auto rest = [](const std::vector<std::string>& words) { return command_without({"--steps", "--resume", "--overwrite"}, words); };
  CHECK(rest({"./train_gpt", "--train", "a/[!s]*", "it's", "--steps", "9", "--overwrite", "--lr=2e-3"}) ==
        "./train_gpt --train 'a/[!s]*' 'it'\\''s' --lr=2e-3");
  CHECK(rest({"a b/gpt", "--resume", "--steps=2", "--out", "", "--resume", "old"}) == "'a b/gpt' --out ''");
  CHECK(rest({"gpt", "--prompt=--steps", "--prompt", "-1\n"}) == "gpt --prompt=--steps --prompt '-1\n'");
}

// ---- metrics ----------------------------------------------------------------------------------------------

TEST_CASE("a line: order of keys, 9 digits, null for what is not finite, replacements for what is no UTF-8") {
  using namespace std::string_literals;
  const double infinity = std::numeric_limits<double>::infinity();
  CHECK(metrics_line({{"step", 1}, {"loss", 2.123456789012}, {"lr", 3e-4}}) ==
        "{\"step\": 1, \"loss\": 2.12345679, \"lr\": 0.0003}\n");
  CHECK(metrics_line({{"b", std::nan("")}, {"a", -infinity}}) == "{\"b\": null, \"a\": null}\n");
  CHECK(metrics_line({{"tokens", size_t(1) << 60}, {"x", 1e20}, {"y", 5.0}, {"name", "a\n\"b"}}) ==
        "{\"tokens\": 1152921504606846976, \"x\": 1e+20, \"y\": 5, \"name\": \"a\\n\\\"b\"}\n");
  CHECK(metrics_line({{"sample", "a\xff\0b"s}}) == "{\"sample\": \"a\xef\xbf\xbd\\u0000b\"}\n");
  float loss = 0.1234567f;
  CHECK(nlohmann::json::parse(metrics_line({{"loss", loss}}))["loss"].get<float>() == loss);
}

TEST_CASE("a fresh log is empty, a resumed one keeps the lines up to the checkpoint") {
  TemporaryFolder folder;
  std::filesystem::path path = folder / "metrics.jsonl";
  {
    MetricsLog log(path, 0);
    for (int step : {1, 2, 3}) log.append({{"step", step}, {"loss", 1.5}});
    log.append({{"step", 3}, {"val_loss", 2.5}});
    log.append({{"step", 4}, {"loss", 1.5}});
  }
  const std::string all = content_of(path);
  auto resumed = [&](const std::string& content, size_t step) {
    put(path, content);
    MetricsLog(path, step).append({{"step", 9}});
    return content_of(path);
  };
  const std::string nine = "{\"step\": 9}\n", until_3 = all.substr(0, all.rfind("{\"step\": 4"));
  CHECK(contains(until_3, "val_loss"));
  CHECK(resumed(all, 3) == until_3 + nine);
  CHECK(resumed(all, 100) == all + nine);
  CHECK(resumed(all, 0) == nine);
  CHECK(resumed("", 5) == nine);
  CHECK(resumed(all + "{\"step\": 5, \"lo", 100) == all + nine);
  CHECK(resumed(all + "{\"step\": 5}", 100) == all + nine);  // whole by chance, but for its end
  CHECK(resumed(all + std::string(100, '\0'), 100) == all + nine);
  CHECK(resumed(all + "{}\n", 100) == all + nine);
  put(path, all);
  MetricsLog(path, 0).append({{"step", 9}});
  CHECK(content_of(path) == nine);
}

TEST_CASE("lines that the disk does not take wait in memory") {
  TemporaryFolder folder;
  const std::filesystem::path path = folder / "run" / "metrics.jsonl";
  MetricsLog log(path, 0);
  const auto with_full_disk = [](const std::function<void()>& work) {
    const FullDisk full(30);
    return error_of(work);
  };
  const std::string one = "{\"step\": 1, \"loss\": 1.5}\n", two = "{\"step\": 2}\n", three = "{\"step\": 3}\n";
  log.append({{"step", 1}, {"loss", 1.5}});
  CHECK(with_full_disk([&] { log.append({{"step", 2}}), log.append({{"step", 3}}); }) == "");
  CHECK(content_of(path) == one);
  CHECK(is_line_with(with_full_disk([&] { log.finish(); }), "metrics.jsonl: cannot write: ", "its last 2 lines are lost", "free space; --resume from an earlier step_ folder"));
  log.go_back(2);
  CHECK(error_of([&] { log.finish(); }) == "");
  CHECK(content_of(path) == one + two);
  log.append({{"step", 3}});
  CHECK(content_of(path) == one + two + three);
}

TEST_CASE("a log that was deleted, moved or edited goes on where it should be") {
  TemporaryFolder folder;
  const std::filesystem::path path = folder / "run" / "metrics.jsonl";
  MetricsLog log(path, 0);
  log.append({{"step", 1}});
  std::filesystem::rename(folder / "run", folder / "moved");
  log.append({{"step", 2}});
  CHECK(content_of(path) == "{\"step\": 1}\n{\"step\": 2}\n");
  CHECK(content_of(folder / "moved" / "metrics.jsonl") == "{\"step\": 1}\n");
  std::filesystem::remove_all(folder / "run");
  log.append({{"step", 3}});
  CHECK(content_of(path) == "{\"step\": 1}\n{\"step\": 2}\n{\"step\": 3}\n");
  put(folder / "edited", "{\"step\": 2}\n");  // as editors save: a new file in the place of the old
  std::filesystem::rename(folder / "edited", path);
  log.append({{"step", 4}});
  CHECK(content_of(path) == "{\"step\": 2}\n{\"step\": 4}\n");
}

TEST_CASE("a log that can't be made anew keeps its lines until it can, and a deleted one goes back like any other") {
  TemporaryFolder folder;
  const std::filesystem::path run = folder / "run", path = run / "metrics.jsonl";
  const std::string one = "{\"step\": 1}\n", two = "{\"step\": 2}\n", three = "{\"step\": 3}\n", four = "{\"step\": 4}\n";
  const auto with_folder_in_the_way = [](const std::filesystem::path& place, const std::function<void()>& work) {
    std::filesystem::create_directories(place);
    work();
    std::filesystem::remove_all(place);
  };
  MetricsLog log(path, 0);
  log.append({{"step", 1}});
  std::filesystem::rename(path, run / "moved");
  with_folder_in_the_way(path, [&] { log.append({{"step", 2}}); });
  std::filesystem::rename(run / "moved", path);
  log.append({{"step", 3}});
  CHECK(content_of(path) == one + two + three);
  std::filesystem::remove(path);
  with_folder_in_the_way(path, [&] { log.append({{"step", 4}}); });
  log.go_back(2);
  log.append({{"step", 4}});
  CHECK(content_of(path) == one + two + four);
}

// ---- the bill ---------------------------------------------------------------------------------------------

namespace {

// The bill in the next line of metrics, for a run that goes on from this line.
nlohmann::json bill_after(const std::string& line, double price, int devices) {
  TemporaryFolder folder;
  put(folder / "metrics.jsonl", line + "\n");
  Bill bill(price, devices);
  bill.restore(folder / "metrics.jsonl", 9);
  nlohmann::ordered_json fields;
  bill.add_to(fields);
  return fields;
}

}  // namespace

TEST_CASE("what was paid stays paid, on other devices and at another price") {
  const std::string paid = R"({"step": 9, "hours": 10, "device_hours": 80, "cost": 160})";
  nlohmann::json fields = bill_after(paid, 5, 2);
  CHECK(fields["hours"] == about(10, 1e-3));
  CHECK(fields["device_hours"] == about(80, 1e-3));
  CHECK(fields["cost"] == about(160, 1e-3));
  CHECK(!fields.contains("unpriced_device_hours"));

  fields = bill_after(paid, 0, 2);  // --price was left out
  CHECK(fields["cost"] == about(160, 1e-3));
  CHECK(fields["unpriced_device_hours"].get<double>() > 0);
  CHECK(fields["unpriced_device_hours"].get<double>() < 0.01);
  CHECK(bill_after(fields.dump(), 5, 2)["unpriced_device_hours"] == fields["unpriced_device_hours"]);

  fields = bill_after(R"({"step": 9, "hours": 10, "device_hours": 80})", 5, 2);  // or comes late
  CHECK(fields["cost"].get<double>() < 0.01);
  CHECK(fields["unpriced_device_hours"] == about(80, 1e-3));

  // Older metrics: devices as many as now.
  fields = bill_after(R"({"step": 9, "hours": 10, "cost": 160})", 5, 2);
  CHECK(fields["device_hours"] == about(20, 1e-3));
  CHECK(fields["cost"] == about(160, 1e-3));
  CHECK(!fields.contains("unpriced_device_hours"));
  CHECK(bill_after(R"({"step": 9, "hours": 10})", 5, 2)["unpriced_device_hours"] == about(20, 1e-3));
  CHECK(!bill_after(R"({"step": 9, "hours": 10})", 0, 2).contains("cost"));
}

TEST_CASE("what is undone is lost: by a rollback, or by a restart") {
  TemporaryFolder folder;
  const std::filesystem::path path = folder / "metrics.jsonl";
  std::string lines;
  for (int step = 1; step <= 4; ++step)
    lines += R"({"hours": 1, "step_ms": 1000, "step": )" + std::to_string(step) + "}\n";
  put(path, lines);
  Bill bill(1, 1);
  bill.add_rollback(path, 1, 0.5);
  CHECK(bill.lost.rollbacks == about(3.5));
  CHECK(bill.lost.restarts == 0);
  nlohmann::ordered_json line = {{"step", 1}};
  bill.add_to(line);
  put(path, lines + line.dump() + "\n");
  Bill resumed(1, 1);
  resumed.restore(path, 3);
  CHECK(resumed.lost.rollbacks == about(3.5));
  CHECK(resumed.lost.restarts == about(1));
}

TEST_CASE("the parts of a step add up to it, and none is negative") {
  StepTime like;
  like.compute = 6, like.exposed = {{"data", 1}, {"tp", 2}}, like.bubble = 1;
  StepTime time = divided(12, 2, like);
  CHECK(time.data == 2);
  CHECK(time.compute == about(6));
  CHECK(time.exposed["tp"] == about(2));
  CHECK(time.bubble == about(1));
  CHECK(time.sum() == about(12));
  time = divided(7, 2, like);  // half of what it took there, besides the wait for data
  CHECK(time.exposed["data"] == about(0.5));
  CHECK(time.sum() == about(7));
  time = divided(3, 5, like);  // the host's clock says more than the device's
  CHECK(time.data == 3);
  CHECK(time.sum() == about(3));
  CHECK(divided(3, 0, {}).compute == 3);
  StepTime waits;
  waits.exposed["data"] = 5;  // more than the step took
  time = divided(4, 1, waits);
  CHECK(time.exposed["data"] == about(3));
  CHECK(time.compute == 0);
}

TEST_CASE("goodput: the steps that count, of all starts") {
  TemporaryFolder folder;
  const std::filesystem::path path = folder / "metrics.jsonl";
  const std::string old = R"({"step": 1, "hours": 0.001, "step_ms": 1000})" "\n";  // of an older version
  const std::string new_lines = R"({"step": 2, "hours": 0.002, "step_ms": 1000, "time_ms": {"compute": 400, "exposed": {"tp": 300}, "bubble": 200, "data": 100}, "lost_s": {"setup": 2.5, "samples": 0.5}})" "\n"
                                R"({"step": 3, "hours": 0.003, "step_ms": 1000, "time_ms": {"compute": 1000, "exposed": {}, "bubble": 0, "data": 0}, "lost_s": {"setup": 2.5, "samples": 0.5}})" "\n";
  put(path, old + new_lines);
  Bill bill(0, 1);
  bill.restore(path, 2);
  CHECK(bill.steps.compute == about(1.4));
  CHECK(bill.steps.exposed["tp"] == about(0.3));
  CHECK(bill.steps.bubble == about(0.2));
  CHECK(bill.steps.data == about(0.1));
  CHECK(bill.lost.restarts == about(1));
  CHECK(bill.lost.setup == about(2.5));
  CHECK(bill.lost.samples == about(0.5));
  bill.steps.compute += 3;
  nlohmann::ordered_json line;
  bill.add_to(line);
  CHECK(line["goodput"] == about(5 / (3600 * line["hours"].get<double>())));
  bill.add_rollback(path, 1, 0.5);
  CHECK(bill.steps.sum() == about(1));
  CHECK(bill.lost.rollbacks == about(2.5));
  // A step whose update was left out is lost already, also if it is undone, or trained again.
  const auto with_left_out = [&](size_t kept) {
    put(path, old + R"({"step": 2, "hours": 0.002, "step_ms": 1000, "left_out": true, "lost_s": {"left_out": 1}})" "\n");
    Bill resumed(0, 1);
    resumed.restore(path, kept);
    return resumed;
  };
  for (const size_t kept : {1u, 2u}) {
    CHECK(with_left_out(kept).steps.sum() == about(1));
    CHECK(with_left_out(kept).lost.left_out == about(1));
    CHECK(with_left_out(kept).lost.restarts == 0);
  }
  for (const char* damaged : {R"("time_ms": 1)", R"("time_ms": {"exposed": 1, "bubble": []})", R"("time_ms": {"exposed": {"tp": "x"}})"}) {
    put(path, R"({"step": 1, "hours": 1, "step_ms": 1000, )" + std::string(damaged) + "}\n");
    Bill resumed(0, 1);
    resumed.restore(path, 1);
    CHECK(resumed.steps.compute == about(1));
  }
}

TEST_CASE("the bill's clock starts when it is told to, and set-up ends with the first step") {
  Bill bill(0, 1, Clock::now() - std::chrono::seconds(36));
  bill.end_setup();
  CHECK(bill.lost.setup == about(36, 0.1));
  nlohmann::ordered_json line;
  bill.add_to(line);
  CHECK(line["hours"] == about(0.01, 0.1));
  CHECK(process_start < std::chrono::steady_clock::now());
}

// ---- the files of --trace -----------------------------------------------------------------------------------

namespace {

std::string event(int number) { return "{\"number\":" + std::to_string(number) + "}"; }

std::vector<int> numbers_in(const std::filesystem::path& trace) {
  std::vector<int> numbers;
  const nlohmann::json file = nlohmann::json::parse(content_of(trace));
  for (const auto& event : file["traceEvents"]) numbers.push_back(event["number"]);
  return numbers;
}

}  // namespace

TEST_CASE("a timeline's file is whole after every step") {
  TemporaryFolder folder;
  put(folder / "trace", "an old one");
  TraceFile file(folder / "trace", 0);
  CHECK(numbers_in(folder / "trace").empty());
  file.append("");
  file.append(event(1) + ",\n" + event(2));
  CHECK(numbers_in(folder / "trace") == std::vector<int>{1, 2});
  file.append(event(3));
  CHECK(numbers_in(folder / "trace") == std::vector<int>{1, 2, 3});
  for (const char* path : {"/nowhere/trace", "/dev/full", "/"})
    CHECK(is_line_with(error_of([&] { TraceFile(path, 0); }), std::string("--trace ") + path + ": cannot", "check the folder"));
}

TEST_CASE("rank 0 moves into one file what it sees of the other ranks' timelines") {
  TemporaryFolder folder;
  const std::filesystem::path path = folder / "trace";
  put(folder / "trace.rank3", "of an earlier run");
  TraceFile::remove_parts(path, 4);
  CHECK(!std::filesystem::exists(folder / "trace.rank3"));  // rank 3 is on another host
  TraceFile first(path, 0), second(path, 1), third(path, 2);
  std::vector<int> expected = {0, 1};
  std::string events = event(1);
  for (int i = 2; i < 100000; expected.push_back(i++)) events += ",\n" + event(i);  // more than is copied at a time
  first.append(event(0));
  second.append(events);
  first.merge({first.summary(), second.summary(), third.summary(), "22 elsewhere"});
  CHECK(numbers_in(path) == expected);
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 1);

  TraceFile again(path, 1);  // grew after its rank told its size, or is another host's
  const std::string summary = again.summary();
  again.append(event(7));
  first.merge({first.summary(), summary});
  CHECK(numbers_in(path) == expected);
  CHECK(numbers_in(folder / "trace.rank1") == std::vector<int>{7});
}

TEST_CASE("a disk that is full ends the timeline, which stays whole, and not the run") {
  TemporaryFolder folder;
  const std::filesystem::path path = folder / "trace";
  TraceFile file(path, 0), other(path, 1);
  file.append(event(1));
  other.append(event(2));
  std::string much = event(3);
  for (int i = 4; i < 10; ++i) much += ",\n" + event(i);
  {
    const FullDisk full(60);
    file.append(much);
    file.append(event(10));  // would fit, but has a gap before it
  }
  CHECK(numbers_in(path) == std::vector<int>{1});
  file.merge({file.summary(), other.summary()});
  CHECK(numbers_in(folder / "trace.rank1") == std::vector<int>{2});
}

// ---- files ------------------------------------------------------------------------------------------------

TEST_CASE("writing past the page cache writes the same, whatever the alignment") {
  std::string source(8 * File::block, ' ');
  for (size_t i = 0; i < source.size(); ++i) source[i] = char('a' + (i * i + i / 26) % 26);
  const size_t to_block = (File::block - reinterpret_cast<uintptr_t>(source.data()) % File::block) % File::block;
  for (std::filesystem::path parent : {std::filesystem::temp_directory_path(), std::filesystem::path("/dev/shm")}) {
    if (!std::filesystem::exists(parent)) continue;
    const std::filesystem::path path = parent / ("gpt_past_cache_" + std::to_string(getpid()));
    for (size_t offset : {size_t(0), size_t(1), File::block - 1, File::block, 2 * File::block + 100})
      for (size_t bytes : {size_t(0), size_t(1), File::block - 1, File::block, 3 * File::block, 4 * File::block + 7})
        for (size_t memory : {to_block, to_block + 1, to_block + offset % File::block}) {
          CAPTURE(path);
          CAPTURE(offset);
          CAPTURE(bytes);
          CAPTURE(memory - to_block);
          std::string expected(7 * File::block, '.');
          write_file(path, expected);
          File file(path, O_WRONLY);
          file.write_past_cache(offset, source.data() + memory, bytes);
          file.sync_and_close();
          expected.replace(offset, bytes, source.substr(memory, bytes));
          CHECK(content_of(path) == expected);
        }
    std::filesystem::remove(path);
  }
}

// ---- --out and --resume -----------------------------------------------------------------------------------

void put_checkpoint(const std::filesystem::path& out, size_t step) {
  put(out / checkpoint_name(step) / "trainer.json", "{\"step\": " + std::to_string(step) + "}");
}

std::optional<Checkpoint> prepare_run_folder(const std::filesystem::path& out, const StartOptions& start) {
  const RunFolderLock lock(out);
  std::optional<Checkpoint> checkpoint = choose_checkpoint(out, start);
  claim_run_folder(out, start, checkpoint);
  return checkpoint;
}

std::string start_error(const std::filesystem::path& out, const StartOptions& start) {
  return error_of([&] { prepare_run_folder(out, start); });
}

TEST_CASE("a fresh run: new folders, folders with other things, folders with a run") {
  TemporaryFolder folder;
  CHECK(!prepare_run_folder(folder / "a/b/c", {}));
  put(folder / "other" / "notes.txt", "mine");
  CHECK(!prepare_run_folder(folder / "other", {}));
  put(folder / "other" / "metrics.jsonl", "");
  CHECK(is_line_with(start_error(folder / "other", {}), "holds a run", "--resume", "--overwrite"));
  put_checkpoint(folder / "run", 5);
  CHECK(is_line_with(start_error(folder / "run", {}), "holds a run"));
  CHECK(std::filesystem::exists(folder / "run" / "step_00000005"));
}

TEST_CASE("--overwrite removes the run and nothing else") {
  TemporaryFolder folder;
  put_checkpoint(folder / "run", 5);
  put(folder / "run" / "metrics.jsonl", "{}");
  put(folder / "run" / "plan.json", "{}");
  put(folder / "run" / "monitor.jsonl", "{}");
  put(folder / "run" / "notes.txt", "mine");
  CHECK(!prepare_run_folder(folder / "run", {.overwrite = true}));
  CHECK(!holds_run(folder / "run"));
  CHECK(content_of(folder / "run" / "notes.txt") == "mine");
  CHECK(std::distance(std::filesystem::directory_iterator(folder / "run"), {}) == 1);
}

TEST_CASE("--resume continues in --out, or from another folder") {
  TemporaryFolder folder;
  std::filesystem::path run = folder / "run", other = folder / "other";
  CHECK(!prepare_run_folder(run, {.resume = true}));  // nothing there: afresh
  put(run / "metrics.jsonl", "{}");                   // a run that never came to a checkpoint
  CHECK(!prepare_run_folder(run, {.resume = true}));
  put_checkpoint(run, 5);
  put_checkpoint(run, 10);
  CHECK(prepare_run_folder(run, {.resume = true})->step == 10);
  CHECK(prepare_run_folder(other, {.resume = true, .resume_from = run})->step == 10);
  CHECK(prepare_run_folder(other, {.resume = true, .resume_from = run / "step_00000005"})->step == 5);
  CHECK(is_line_with(start_error(run, {.resume = true, .resume_from = other}), "holds no checkpoint"));
  CHECK(is_line_with(start_error(run, {.overwrite = true, .resume = true}), "give one of them"));
  put_checkpoint(other, 1);
  CHECK(is_line_with(start_error(other, {.resume = true, .resume_from = run}), "holds a run"));
  CHECK(prepare_run_folder(other, {.overwrite = true, .resume = true, .resume_from = run})->step == 10);
  CHECK(!holds_run(other));
  CHECK(prepare_run_folder(run, {.resume = true})->step == 10);
}

TEST_CASE("--overwrite does not delete the weights that the run starts from") {
  TemporaryFolder folder;
  const std::filesystem::path run = folder / "run", other = folder / "other/step_00000005";
  put_checkpoint(run, 5);
  put_checkpoint(folder / "other", 5);
  std::filesystem::create_directory_symlink(run / "step_00000005", folder / "link");
  for (std::string name : {"run/step_00000005", "run/step_00000005/", "other/../run/step_00000005", "link", "link/."}) {
    CAPTURE(name);
    const std::string error = start_error(run, {.overwrite = true, .init = folder / name});
    CHECK(is_line_with(error, "--init", name, "--overwrite would delete it", "another --out"));
    CHECK(holds_run(run));
  }
  for (const std::filesystem::path& init : {other, run / "weights", run}) {
    put_checkpoint(run, 5);
    CHECK(start_error(run, {.overwrite = true, .init = init}) == "");
    CHECK(!holds_run(run));
  }
}

TEST_CASE("a run is resumed with its options and its data") {
  Options options;
  const nlohmann::json stored = arithmetic(options, {5000, "00ff"});
  auto refusal = [&](const nlohmann::json& before, const DataIdentity& train) {
    return error_of([&] { check_same_arithmetic(before, arithmetic(options, train), "run/step_00000004"); });
  };
  CHECK(refusal(stored, {5000, "00ff"}) == "");
  CHECK(is_line_with(refusal(stored, {5000, "00fe"}), "--train", "other data", "00fe", "00ff", "--init run/step_00000004"));
  CHECK(is_line_with(refusal(stored, {5001, "00ff"}), "--train", "train_tokens is 5001 and was 5000", "--init run/step_00000004"));
  nlohmann::json old = stored;
  old.erase("train_tokens_checksum");
  CHECK(refusal(old, {5000, "00fe"}) == "");
  CHECK(is_line_with(refusal(old, {5001, "00fe"}), "train_tokens"));
  old = stored;
  old.erase("fp8");  // of an earlier version
  CHECK(refusal(old, {5000, "00ff"}) == "");
  options.fp8 = true;
  CHECK(is_line_with(refusal(old, {5000, "00ff"}), "fp8 is \"e5m2, keep 1\" and was not recorded"));
  CHECK(is_line_with(refusal(stored, {5000, "00ff"}), "fp8 is \"e5m2, keep 1\" and was \"off\""));
  options = {};
  old = stored;
  old["sparsity"] = "off";  // of a room that this build lacks
  CHECK(refusal(old, {5000, "00ff"}) == "");
  old["sparsity"] = 0.5;
  CHECK(is_line_with(refusal(old, {5000, "00ff"}), "sparsity was 0.5 in run/step_00000004", "no room that knows"));
  options.global_batch = 8;
  CHECK(is_line_with(refusal(stored, {5000, "00ff"}), "global_batch is 8 and was 0", "give --global-batch 0"));
  options = {};
  options.beta2 = 0.9;
  CHECK(is_line_with(refusal(stored, {5000, "00ff"}), "beta2 is 0.9 and was 0.95", "may change", "--steps", "--micro-batch"));
}

TEST_CASE("the best validation: strictly below all before it, and a number") {
  BestValidation best;
  const auto is = [&](double loss, size_t step, size_t since) { return best.loss == loss && best.step == step && best.since == since; };
  best.add(NAN, 5);
  best.add(-INFINITY, 10);
  CHECK(is(INFINITY, 0, 2));
  best.add(INFINITY, 12);
  CHECK(is(INFINITY, 0, 3));
  best.add(3, 15);
  CHECK(is(3, 15, 0));
  best.add(3, 20);
  best.add(NAN, 25);
  CHECK(is(3, 15, 2));
  best.add(2.9, 30);
  CHECK(is(2.9, 30, 0));
}

TEST_CASE("trainer.json that says what cannot be is refused") {
  TemporaryFolder folder;
  Options options;
  options.global_batch = 4;
  RunData data = {{5000, "a"}, {{"val_loss", "300 tokens, checksum b, 10 batches"}}};
  const BestValidation best = {0.1 + 0.2, 6, 2};
  const nlohmann::json whole = [&] {
    nlohmann::json trainer = nlohmann::json::parse(trainer_text({40, 100, {}, {}, best}, Guard(options.of<GuardOptions>()), options, data));
    trainer["step"] = 9;  // and 4 samples left out
    return trainer;
  }();
  const auto load = [&](const char* key, const nlohmann::json& value) {
    nlohmann::json trainer = whole;
    trainer[key] = value;
    put(folder / "trainer.json", trainer.dump());
    Guard guard(options.of<GuardOptions>());
    return load_trainer_record(folder.path(), 9, {}, guard, options, data);
  };
  const auto same = [](const BestValidation& a, const BestValidation& b) { return a.loss == b.loss && a.step == b.step && a.since == b.since; };
  CHECK(load("samples", 36).samples == 36);
  CHECK(same(load("samples", 36).best, best));
  CHECK(same(load("best", {{"val_loss", nullptr}, {"step", 0}, {"since", 2}}).best, {INFINITY, 0, 2}));
  CHECK(same(load("best", {{"val_loss", nullptr}, {"step", 3}, {"since", 1}}).best, {}));  // it was −inf, which is no best
  // What was measured on other data, or on nobody knows what, is forgotten.
  for (const char* other : {R"({"val_loss": "300 tokens, checksum b, 1 batches"})", R"({"val_loss": 1})", "{}"})
    CHECK(same(load("val_data", nlohmann::json::parse(other)).best, {}));
  data.val = {};
  CHECK(same(load("samples", 36).best, {}));
  data.val = {{"val_loss", "300 tokens, checksum b, 10 batches"}};
  for (const char* samples : {"35", "-1", "36.5", "1e300", "null", "\"36\"", "[]"})
    CHECK(is_line_with(error_of([&] { load("samples", nlohmann::json::parse(samples)); }), "\"samples\" is", "not a whole number, 36 or more: resume from another"));
  CHECK(is_line_with(error_of([&] { load("step", 10); }), "holds step 10", "name"));  // a folder that was renamed
  for (const char* scale : {"null", "1", "[]", R"({"value": -1})", R"({"good_steps": "x"})"})
    CHECK(is_line_with(error_of([&] { load("loss_scale", nlohmann::json::parse(scale)); }), (folder / "trainer.json").string(),
                       "\"loss_scale", "not a", "resume from another"));
  for (const char* best : {"null", "{}", R"({"step": 3, "since": -1})", R"({"step": 3, "since": 1, "val_loss": "1"})"})
    CHECK(is_line_with(error_of([&] { load("best", nlohmann::json::parse(best)); }), (folder / "trainer.json").string(), "\"best",
                       "resume from another"));
  // AdamW's count of updates is the number of steps less those that were left out: it cannot be negative.
  const auto with_left_out = [&](size_t count) {
    nlohmann::json guard = whole["guard"];
    guard["left_out"] = count;
    return guard;
  };
  CHECK(error_of([&] { load("guard", with_left_out(9)); }) == "");
  CHECK(is_line_with(error_of([&] { load("guard", with_left_out(10)); }), "\"guard.left_out\" is '10', not a whole number, 0 to 9: resume"));
  for (const char* guard : {"null", R"({"losses": 1})"})
    CHECK(is_line_with(error_of([&] { load("guard", nlohmann::json::parse(guard)); }), (folder / "trainer.json").string(), "\"guard", "not a",
                       "resume from another"));
}

TEST_CASE("an error is one line of valid UTF-8, whatever it quotes") {
  CHECK(one_line("a\xff\nb\x7f") == "a??b?");
  CHECK(one_line("\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80") == "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
  CHECK(one_line("\xc3") == "?");                          // cut short
  CHECK(one_line("\xe2\x82 \x80") == "?? ?");
  CHECK(one_line("\xc0\xaf \xe0\x80\xaf") == "?? ???");  // longer than need be
  CHECK(one_line("\xed\xa0\x80") == "???");                // a surrogate
  CHECK(one_line("\xf4\x90\x80\x80") == "????");          // beyond Unicode
  CHECK(one_line("\xc2\x9b") == "??");                     // the control character that terminals take for ESC [
  CHECK(excerpt(std::string("\0\xe9", 2)) == "'\?\?'");
}

TEST_CASE("going back to an earlier checkpoint of --out sets the later ones aside") {
  TemporaryFolder folder;
  for (int round = 0; round < 2; ++round) {
    for (size_t step : {5, 10, 15}) put_checkpoint(folder.path(), step);
    StartOptions start = {.resume = true, .resume_from = folder / "step_00000010/"};
    CHECK(prepare_run_folder(folder.path(), start)->step == 10);
    CHECK(list_checkpoints(folder.path()).size() == 2);
    CHECK(newest_checkpoint(folder.path())->step == 10);
    CHECK(std::filesystem::exists(folder / "step_00000015.abandoned"));
  }
}

TEST_CASE("one run at a time writes to a folder") {
  TemporaryFolder folder;
  std::optional<RunFolderLock> first(folder.path());
  CHECK(is_line_with(error_of([&] { RunFolderLock(folder.path(), 0.2); }), "another run writes to it", "another --out"));
  std::thread ending([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    first.reset();
  });
  RunFolderLock second(folder.path());  // waits for that
  CHECK(!first);
  ending.join();
}

TEST_CASE("a lock makes the folder, and removes it if nothing has come into it") {
  TemporaryFolder folder;
  const std::filesystem::path out = folder / "a/b/c";
  {
    const RunFolderLock lock(out);
    CHECK(std::filesystem::is_empty(out));
  }
  CHECK(!std::filesystem::exists(out));
  std::optional<RunFolderLock> first(out);
  std::thread ending([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    first.reset();
  });
  {
    const RunFolderLock second(out);  // waits, and then has a folder, though not the one that it waited for
    ending.join();
    CHECK(std::filesystem::is_empty(out));
    put(out / "notes.txt", "mine");
  }
  CHECK(std::filesystem::exists(out / "notes.txt"));
}

TEST_CASE("--out that cannot be written to is refused before anything happens") {
  TemporaryFolder folder;
  put(folder / "file", "mine");
  CHECK(is_line_with(start_error(folder / "file", {}), "file", "choose another --out"));
  CHECK(is_line_with(start_error(folder / "file" / "below", {}), "below", "choose another --out"));
  put_checkpoint(folder / "run", 5);
  std::string of_run, of_new;
  {
    const FullDisk full(100);
    of_run = start_error(folder / "run", {.overwrite = true}), of_new = start_error(folder / "new", {});
  }
  for (const std::string& error : {of_run, of_new}) CHECK(is_line_with(error, "--out", "File too large", "free space"));
  CHECK(!std::filesystem::exists(folder / "new"));
  CHECK(holds_run(folder / "run"));
  CHECK(std::distance(std::filesystem::directory_iterator(folder / "run"), {}) == 1);
}

// ---- memory of the host -----------------------------------------------------------------------------------

TEST_CASE("the least of what is free, what each control group leaves, and this process's limits") {
  TemporaryFolder root;
  put(root / "proc/meminfo", "MemTotal:  9000000 kB\nMemAvailable:  8000000 kB\nBuffers:  5 kB\n");
  CHECK(host_memory_left(root.path()) == 8000000ul * 1024);
  // Version 2: a group, its parents, and the top, which a container may see as its own.
  const std::filesystem::path top = root / "sys/fs/cgroup";
  put(root / "proc/self/cgroup", "0::/job_7/step_0\n");
  put(top / "job_7/step_0/memory.max", "max\n");
  put(top / "job_7/step_0/memory.current", "600\n");
  CHECK(host_memory_left(root.path()) == 8000000ul * 1024);
  put(top / "job_7/memory.max", "5000\n");
  put(top / "job_7/memory.current", "3000\n");
  CHECK(host_memory_left(root.path()) == 2000);
  put(top / "job_7/memory.stat", "anon 2000\nfile 1000\ninactive_file 400\n");
  CHECK(host_memory_left(root.path()) == 2400);
  put(top / "memory.max", "1000\n");
  CHECK(host_memory_left(root.path()) == 1000);
  put(top / "memory.current", "1001\n");
  CHECK(host_memory_left(root.path()) == 0);
  // Version 1; the other controllers' groups say nothing, nor does a group that cannot be seen.
  put(root / "proc/self/cgroup", "9:cpu,cpuacct:/\n8:hugetlb,memory:/docker/a/b\n0::/\n");
  std::filesystem::remove(top / "memory.max");
  put(top / "memory/docker/memory.limit_in_bytes", "7000\n");
  put(top / "memory/docker/memory.usage_in_bytes", "4000\n");
  put(top / "memory/memory.limit_in_bytes", "9223372036854771712\n");
  CHECK(host_memory_left(root.path()) == 3000);
  put(top / "memory/docker/memory.stat", "total_inactive_file 5\n");
  CHECK(host_memory_left(root.path()) == 3005);

  CHECK(process_memory_left(root.path()) == SIZE_MAX);
  put(root / "proc/self/status", "Name:  x\nVmSize:  300 kB\nVmData:  200 kB\n");
  for (const auto& [resource, left] : {std::pair(RLIMIT_AS, 700ul), {RLIMIT_DATA, 800ul}}) {
    rlimit before;
    getrlimit(resource, &before);
    const rlimit small = {size_t(1) << 50, before.rlim_max};
    setrlimit(resource, &small);
    CHECK(process_memory_left(root.path()) == (size_t(1) << 50) - (1000 - left) * 1024);
    setrlimit(resource, &before);
  }
}

TEST_CASE("the guard knows spikes when its window is full, and counts") {
  const auto judge = [](Guard& guard, double loss, double norm, bool applied) {
    const StepLimits limits = guard.limits(true);
    const Guard::Judgement judgement = guard.judge(loss, norm, applied, limits);
    CHECK(guard.limits(false).loss == limits.loss);  // the last step does not count yet
    return judgement;
  };
  const auto fill = [&](Guard& guard) {
    for (int i = 0; i < 4; ++i) CHECK(judge(guard, 2 + i % 2, 1, true).reason == "");  // mean 2.5, deviation 0.5
  };
  for (std::string kind : {"log", "skip", "rollback"}) {
    CAPTURE(kind);
    Guard guard({kind, 3, 4, 3, 2});
    CHECK(judge(guard, 99, 1, true).reason == "");
    fill(guard);
    CHECK(guard.limits(true).loss == 4);
    CHECK(guard.enforced({4, 5}).loss == (kind == "log" ? StepLimits{}.loss : 4));
    CHECK(judge(guard, 4, 1, true).reason == "");
    Guard fresh({kind, 3, 4, 3, 2});
    fill(fresh);
    const bool applied = kind == "log";
    const Guard::Judgement spike = judge(fresh, 4.01, 1, applied);
    CHECK(contains(spike.reason, "loss 4.01 is a spike: above 4"));
    using enum Guard::Response;
    CHECK(spike.action == (kind == "log" ? none : kind == "skip" ? left_out : roll_back));
    CHECK(contains(judge(fresh, 2, 1.1, applied).reason, "gradient norm 1.1 is a spike: above 1"));
    if (!applied) CHECK(fresh.limits(true).norm == guard.limits(true).norm);  // what was left out is not remembered
    else CHECK(fresh.limits(true).norm > guard.limits(true).norm);
    CHECK(fresh.left_out() == (applied ? 0 : 2));

    Guard resumed({kind, 3, 4, 3, 2});
    const nlohmann::json written = nlohmann::json::parse(fresh.state().dump());
    resumed.restore(JsonFields("", written, ""), 2);
    CHECK(resumed.state() == fresh.state());
    for (bool one : {false, true}) CHECK(resumed.limits(one).loss == fresh.limits(one).loss);
    fresh.count_rollback();
    const nlohmann::json state = resumed.state();
    fresh.restore(JsonFields("", state, ""), 2);
    CHECK(fresh.rollbacks() == 1);
    fresh.count_rollback();
    CHECK(is_line_with(error_of([&] { fresh.count_rollback(); }), "after 2 rollbacks", "--max-rollbacks"));
  }
  // The data changes for good.
  const auto spikes_at_new_level = [&](const std::string& kind) {
    Guard guard({kind, 6, 128, 100, 3});
    size_t spikes = 0;
    for (int i = 0; i < 128; ++i) judge(guard, 2 + 0.01 * (i % 7), 1, true);
    for (int i = 0; i < 581; ++i) {
      if (i % 50 == 0) judge(guard, NAN, NAN, false);  // never enters the window
      const double loss = 5 + 0.01 * (i % 7);
      spikes += !judge(guard, loss, 1, kind == "log" || loss <= guard.limits(true).loss).reason.empty();
    }
    return spikes;
  };
  CHECK(spikes_at_new_level("log") == 4);
  CHECK(is_line_with(error_of([&] { spikes_at_new_level("skip"); }), "is a spike", "the 99 steps before"));

  Guard guard({"log", 3, 4, 3, 2});
  CHECK(judge(guard, NAN, 1, false).action == Guard::Response::left_out);
  CHECK(judge(guard, 1, INFINITY, false).action == Guard::Response::left_out);
  CHECK(judge(guard, 1, 1, true).reason == "");
  judge(guard, NAN, 1, false), judge(guard, NAN, 1, false);
  CHECK(is_line_with(error_of([&] { judge(guard, NAN, 1, false); }), "not finite", "the 2 steps before"));
}

// ---- the process ------------------------------------------------------------------------------------------

TEST_CASE("the process may open as many files and sockets as the system allows") {
  const pid_t child = fork();
  if (child == 0) {
    rlimit usual{}, now{};
    getrlimit(RLIMIT_NOFILE, &usual);
    usual.rlim_cur = 32;
    setrlimit(RLIMIT_NOFILE, &usual);
    prepare_process();
    getrlimit(RLIMIT_NOFILE, &now);
    bool can_open = true;
    for (rlim_t i = 0; i < std::min<rlim_t>(usual.rlim_max, 200) - 64; ++i) can_open &= open("/dev/null", O_RDONLY) >= 0;
    _exit(now.rlim_cur == usual.rlim_max && now.rlim_max == usual.rlim_max && can_open ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WEXITSTATUS(status) == 0);
}
