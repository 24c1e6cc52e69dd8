// What is seen of a run: table and timeline of the launchers, and the log of what they write.
#include <nlohmann/json.hpp>

#include "kernels/adamw.cuh"
#include "kernels/attention/attention.cuh"
#include "kernels/cross_entropy.cuh"
#include "kernels/embedding.cuh"
#include "kernels/gelu.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/linear.cuh"
#include "runtime/traces/tensor_log.cuh"
#include "runtime/traces/trace_file.h"
#include "test/kernel_test.cuh"
#include "test/temporary_folder.h"

namespace {

using Json = nlohmann::json;

struct Stream {
  Stream() { CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream); }
  operator cudaStream_t() const { return stream; }
  cudaStream_t stream;
};

// The profiler is one for the whole program: each test leaves it as it was.
struct Recording {
  Recording(bool table, bool timeline) {
    Profiler::instance().enabled = table;
    Profiler::instance().trace = timeline;
  }
  ~Recording() {
    Profiler& profiler = Profiler::instance();
    profiler.enabled = profiler.trace = false;
    profiler.context = {};
    profiler.collect();
    profiler.take_timeline();
  }
};

std::string take_trace() { return trace_events(Profiler::instance().take_timeline(), 0); }

Json parse_trace(const std::vector<std::string>& texts) {
  TemporaryFolder folder;
  TraceFile file(folder / "trace.json", 0);
  for (const std::string& text : texts) file.append(text);
  return Json::parse(content_of(folder / "trace.json"))["traceEvents"];
}

// The events that last some time: all of them, or all with this name.
std::vector<Json> ranges_of(const Json& events, const std::string& name = "") {
  std::vector<Json> found;
  for (const Json& event : events)
    if (event["ph"] == "X" && (name.empty() || event["name"] == name)) found.push_back(event);
  return found;
}

constexpr size_t elements = large_shapes ? 3 << 16 : 640;
constexpr size_t lines_kept = 8192;  // TensorLog's

// Launches a range of some length on test_stream(), in place.
void gelu(Buffer<float>& values) { gelu_forward<float>(values, values, int(values.size()), 1, test_stream()); }

}  // namespace

TEST_CASE("nothing is recorded unless it is wanted") {
  Recording off(false, false);
  Buffer<float> values(elements);
  gelu(values);
  CHECK(Profiler::instance().collect().empty());
  CHECK(!contains(take_trace(), "gelu_forward"));
}

TEST_CASE("table and timeline do not take from each other") {
  Recording both(true, true);
  Buffer<float> values(elements);
  gelu(values);
  Profiler::instance().enabled = false;
  gelu(values);
  const Json events = parse_trace({take_trace()});
  auto table = Profiler::instance().collect();
  CHECK(ranges_of(events, "gelu_forward").size() == 2);
  CHECK(table["gelu_forward"].calls == 1);
  CHECK(table["gelu_forward"].bytes == 8.0 * elements);
  CHECK(table["gelu_forward"].milliseconds > 0);
  CHECK(Profiler::instance().collect().empty());
  CHECK(take_trace().empty());
}

TEST_CASE("ranges give their events back as they end, not when the table is wanted") {
  Recording both(true, true);
  Buffer<float> values(elements);
  for (int i = 0; i < 5; ++i) {
    KernelRange outer("outer", test_stream(), {});
    gelu(values);
    CUDA_CHECK(cudaStreamSynchronize(test_stream()));
    gelu(values);  // the first has ended by now, but not the range around it
  }
  CHECK(Profiler::instance().unresolved() <= 3);
  CHECK(ranges_of(parse_trace({take_trace()})).size() == 15);
  CHECK(Profiler::instance().unresolved() == 0);
  auto table = Profiler::instance().collect();
  CHECK(table["outer"].calls == 5);
  CHECK(table["gelu_forward"].calls == 10);
}

TEST_CASE("the timeline has processes, threads, times and what is known of each range") {
  Recording timeline(false, true);
  Profiler& profiler = Profiler::instance();
  Stream compute, communication;
  profiler.name_stream(compute, "compute");
  profiler.name_stream(communication, "communication");
  Buffer<float> values(random_values<float>(elements)), out(elements);
  profiler.origin = wall_clock();
  profiler.context = {.step = 7, .micro_batch = 2, .work = "input", .chunk = 1};
  cudaEvent_t made;
  CUDA_CHECK(cudaEventCreate(&made));
  {
    TraceScope scope(5);
    gelu_forward<float>(out, values, elements / 64, 64, compute);
  }
  CUDA_CHECK(cudaEventRecord(made, compute));
  CUDA_CHECK(cudaStreamWaitEvent(communication, made));
  for (int i = 0; i < 2; ++i) {
    KernelRange range("all_reduce", communication, {4.0 * elements, 0});
    CUDA_CHECK(cudaMemcpyAsync(values, out, elements * sizeof(float), cudaMemcpyDeviceToDevice, communication));
  }
  const std::string text = take_trace();
  const double passed = double(wall_clock() - profiler.origin) / 1e3;
  CUDA_CHECK(cudaEventDestroy(made));
  const std::string silent, other = R"({"ph":"M","name":"process_name","pid":2})";  // texts of two more ranks
  const Json events = parse_trace({text, silent, other});

  const Json gelu = ranges_of(events, "gelu_forward").at(0);
  const std::vector<Json> reduced = ranges_of(events, "all_reduce");
  REQUIRE(reduced.size() == 2);
  CHECK(ranges_of(events).size() == 3);
  CHECK(gelu["pid"] == 0);
  CHECK(gelu["args"]["step"] == 7);
  CHECK(gelu["args"]["micro-batch"] == 2);
  CHECK(gelu["args"]["work"] == "input");
  CHECK(gelu["args"]["chunk"] == 1);
  CHECK(gelu["args"]["layer"] == 5);
  CHECK(gelu["args"]["bytes"] == 8 * elements);
  CHECK(std::abs(gelu["args"]["GFLOP"].get<double>() - 10e-9 * elements) < 1e-6 * 10e-9 * elements);
  const double microseconds = gelu["dur"].get<double>(), rate = 8e-3 * elements / microseconds;  // GB/s
  CHECK(std::abs(gelu["args"]["GB/s"].get<double>() - rate) < 1e-3 * rate);
  CHECK(!reduced[0]["args"].contains("layer"));
  CHECK(!reduced[0]["args"].contains("GFLOP"));
  CHECK(reduced[0]["tid"] != gelu["tid"]);
  std::map<int, std::string> threads;
  for (const Json& event : events)
    if (event["name"] == "thread_name") threads[event["tid"]] = event["args"]["name"];
  CHECK(threads[gelu["tid"]] == "compute");
  CHECK(threads[reduced[0]["tid"]] == "communication");

  // Ranges keep the order that the event and the stream ask for, and lie on the wall clock.
  double end = 0;
  for (const Json& event : {gelu, reduced[0], reduced[1]}) {
    CHECK(event["ts"].get<double>() >= end);
    CHECK(event["dur"].get<double>() > 0);
    end = event["ts"].get<double>() + event["dur"].get<double>();
  }
  CHECK(end <= passed);
  profiler.origin = 0;
}

TEST_CASE("parts of a timeline that were taken later go on where the earlier ones ended") {
  Recording timeline(false, true);
  Buffer<float> values(elements);
  std::vector<std::string> parts;
  for (int step = 0; step < 3; ++step) {
    gelu(values);
    parts.push_back(take_trace());
  }
  const std::vector<Json> ranges = ranges_of(parse_trace(parts));
  REQUIRE(ranges.size() == 3);
  for (int i = 1; i < 3; ++i)
    CHECK(ranges[i]["ts"].get<double>() > ranges[i - 1]["ts"].get<double>() + ranges[i - 1]["dur"].get<double>());
}

TEST_CASE("a log that can't be written") {
  CHECK(is_line_with(error_of([] { TensorLog log("/nowhere/log", 0, {}); }), "--trace-tensors /nowhere/log"));
  CHECK(Profiler::instance().listener == nullptr);
  CHECK(parse_trace({}).empty());
  CHECK(parse_trace({"", ""}).empty());
}

TEST_CASE("a log line says where, what and its statistics") {
  TemporaryFolder folder;
  Stream other;
  Buffer<float> floats(random_values<float>(1000));
  Buffer<__nv_bfloat16> inputs(random_values<__nv_bfloat16>(640)), outputs(640);
  {
    StepOptions o;
    o.mesh = {.tp = 2, .cp = 2, .dp = 5, .pp = 3}, o.micro_batch = 8, o.tp_pieces = 4, o.cp_method = "ulysses", o.pp_chunks = 2, o.zero = 1;
    TensorLog log(folder / "log", 3, o);
    gelu(floats);
    Profiler::instance().context = {.step = 2, .micro_batch = 5};
    {
      TraceScope scope(11);
      gelu_forward<__nv_bfloat16>(outputs, inputs, 10, 64, other);
    }
    {
      TraceScope scope(1, true);
      column_sum<__nv_bfloat16>(floats, outputs, 10, 64, true, floats + 64, other);
    }
    CHECK(Profiler::instance().context.piece == -1);
    log.flush();
    Profiler::instance().context = {};
    log.flush();
  }
  const auto lines = json_lines<Json>(folder / "log.rank3");
  REQUIRE(lines.size() == 4);
  CHECK(lines[0] == Json{{"rank", 3}, {"ranks", 60}, {"data_parallel", 5}, {"tensor_parallel", 2}, {"pieces", 4},
                         {"context_parallel", 2}, {"context_method", "ulysses"}, {"pipeline", 3}, {"chunks", 2}, {"zero", 1},
                         {"micro_batch", 8}});
  double sum = 0, largest = 0;
  for (double x : outputs.numbers()) {
    sum += x;
    largest = std::max(largest, std::abs(x));
  }
  CHECK(std::abs(lines[2]["sum"].get<double>() - sum) < 1e-12 * 640);
  CHECK(lines[2]["absmax"] == largest);
  auto without_statistics = [](Json line) {
    for (const char* key : {"sum", "absmax", "checksum"}) CHECK(line.erase(key) == 1);
    return line;
  };
  CHECK(without_statistics(lines[1]) == Json::parse(R"({"step":null,"micro_batch":null,"layer":null,"piece":null,
    "op":"gelu_forward","output":0,"accumulated":false,"partial":false,"count":1000,"dtype":"fp32"})"));
  CHECK(without_statistics(lines[2]) == Json::parse(R"({"step":2,"micro_batch":5,"layer":11,"piece":null,
    "op":"gelu_forward","output":0,"accumulated":false,"partial":false,"count":640,"dtype":"bf16"})"));
  CHECK(without_statistics(lines[3]) == Json::parse(R"({"step":2,"micro_batch":5,"layer":null,"piece":1,
    "op":"column_sum","output":0,"accumulated":true,"partial":true,"count":64,"dtype":"fp32"})"));
}

TEST_CASE("streams that run at the same time don't disturb each other's statistics") {
  TemporaryFolder folder;
  Stream streams[2];
  Buffer<float> ones(std::vector<float>(500, 1)), twos(std::vector<float>(500, 2));
  {
    TensorLog log(folder / "log", 0, {});
    for (int i = 0; i < 10; ++i) {
      KernelRange("one", streams[0], {}).writes(ones.data(), 500);
      KernelRange("two", streams[1], {}).writes(twos.data(), 500);
    }
    log.flush();
  }
  for (const Json& line : json_lines<Json>(folder / "log"))
    if (line.contains("op")) CHECK(line["sum"] == (line["op"] == "one" ? 500 : 1000));
}

TEST_CASE("a log may hold more lines than the device keeps, and values that are not finite" *
          doctest::skip(!large_shapes)) {
  TemporaryFolder folder;
  Buffer<float> values(1);  // NaN
  for (int pipeline : {1, 2}) {
    CAPTURE(pipeline);
    {
      StepOptions o;
      o.mesh.pp = pipeline;
      TensorLog log(folder / "log", 0, o);
      for (size_t i = 0; i < lines_kept + 5; ++i) KernelRange("nothing", test_stream(), {}).writes(values.data(), 1);
      // In a pipeline it doesn't wait for the device in the middle of a step: it might wait for ever.
      CHECK(json_lines<Json>(folder / "log").size() == (pipeline == 1 ? lines_kept + 1 : 1));
      log.flush();
    }
    const auto lines = json_lines<Json>(folder / "log");
    REQUIRE(lines.size() == lines_kept + 6);
    CHECK(lines.back()["sum"] == nullptr);
    CHECK(lines.back()["absmax"] == nullptr);
    CHECK(lines.back()["checksum"] == lines[1]["checksum"]);
  }
}

TEST_CASE("operations that fail to launch are not logged") {
  TemporaryFolder folder;
  Buffer<float> values(4);
  TensorLog log(folder / "log", 0, {});
  const std::string error = error_of([&] { gelu_forward<float>(values, values, 0, 64, test_stream()); });
  // No block is an "invalid configuration argument" here; an H200 with CUDA 13.0 names no configuration.
  CHECK(is_line_with(error, "gelu_forward: ", "invalid", "argument"));
  log.flush();
  const auto lines = json_lines<Json>(folder / "log");
  REQUIRE(lines.size() == 1);
  CHECK(lines[0]["pieces"] == 1);  // with one rank no row travels
}

// ---- what each launcher says that it writes

namespace {

// The lines of a log of `action`, as "operation output count accumulated".
template <class Action>
std::vector<std::string> outputs_of(Action action) {
  TemporaryFolder folder;
  TensorLog log(folder / "log", 0, {});
  action();
  log.flush();
  std::vector<std::string> outputs;
  const auto lines = json_lines<Json>(folder / "log");
  for (size_t i = 1; i < lines.size(); ++i) {
    const Json& line = lines[i];
    CHECK_MESSAGE(line["sum"].is_number(), line.dump());  // buffers start as NaN: all of it was written
    outputs.push_back(line["op"].get<std::string>() + " " + line["output"].dump() + " " + line["count"].dump() +
                      (line["accumulated"] ? " accumulated" : "") + " " + line["dtype"].get<std::string>());
  }
  return outputs;
}

// The log lines of an operation's outputs, from their counts.
std::vector<std::string> outputs(const std::string& operation, std::vector<std::string> counts) {
  for (size_t i = 0; i < counts.size(); ++i) counts[i] = operation + " " + std::to_string(i) + " " + counts[i];
  return counts;
}

}  // namespace

TEST_CASE_TEMPLATE("launchers log all they write, and no more", T, float, __nv_bfloat16, __half) {
  constexpr int B = 2, S = 5, NH = 3, HS = 16, C = NH * HS, R = B * S, V = 200, Vp = 256, P = 8;
  const std::string t = std::is_same_v<T, float> ? " fp32" : std::is_same_v<T, __half> ? " fp16" : " bf16";
  const cudaStream_t stream = test_stream();
  const auto some = [](size_t count) { return random_values<T>(count); };
  const auto floats = [](size_t count) { return random_values<float>(count, 1, 9); };  // positive

  Buffer<T> rows(some(R * C)), qkv(some(R * 3 * C)), weight(some(3 * C * C)), bias(some(3 * C)), wte(some(Vp * C));
  Buffer<int> tokens(std::vector<int>(R, 7)), order([] {
    std::vector<int> places(R);
    std::iota(places.begin(), places.end(), 0);
    return places;
  }());
  Buffer<float> workspace(100000), mean(R), rstd(R), lse(B * NH * S), row_dots(B * NH * S), losses(R), total(1);
  Buffer<T> out(R * C), sum(R * C), attention(R * C), dqkv(R * 3 * C), drows(some(R * C)), logits(R * Vp);
  Buffer<float> dweight(floats(3 * C * C)), dbias(floats(3 * C)), dwpe(floats(P * C)), dwte(floats(Vp * C));
  Buffer<float> first(floats(Vp * C)), second(floats(Vp * C)), factor(floats(1)), masters(floats(Vp * C));

  CHECK(outputs_of([&] { embedding_forward<T>(out, tokens, wte, wte, {0, V}, neighbours(S), 0, R, C, stream); }) ==
        outputs("embedding_forward", {"480" + t}));
  CHECK(outputs_of([&] {
          embedding_backward<T>(dwte, dwpe, tokens, order, rows, {0, V}, B, neighbours(S), P, C, true, workspace, stream);
        }) == outputs("embedding_backward", {"384 accumulated fp32"}));
  const auto layernorm = [&](const T* branch) {
    residual_layernorm_forward<T>(out, sum, mean, rstd, rows, branch, bias, bias, R, C, stream);
  };
  CHECK(outputs_of([&] { layernorm(nullptr); }) ==
        outputs("residual_layernorm_forward", {"480" + t, "10 fp32", "10 fp32"}));
  CHECK(outputs_of([&] { layernorm(rows); }) ==
        outputs("residual_layernorm_forward", {"480" + t, "10 fp32", "10 fp32", "480" + t}));
  CHECK(outputs_of([&] {
          layernorm_backward<T>(drows, dweight, dbias, rows, rows, bias, mean, rstd, R, C, true, workspace, stream);
        }) == outputs("layernorm_backward", {"480" + t, "48 accumulated fp32", "48 accumulated fp32"}));
  CHECK(outputs_of([&] { attention_forward<T>(attention, lse, qkv, B, S, NH, HS, stream); }) ==
        outputs("attention_forward", {"480" + t, "30 fp32"}));
  CHECK(outputs_of([&] {
          attention_backward<T>(dqkv, row_dots, rows, attention, qkv, lse, B, S, NH, HS, stream);
        }) == outputs("attention_backward", {"1440" + t}));
  CHECK(outputs_of([&] { linear_forward<T>(dqkv, rows, weight, bias, R, C, 3 * C, stream); }) ==
        outputs("matmul_forward", {"1440" + t}));
  CHECK(outputs_of([&] {
          linear_weight_gradient<T>(dweight, dbias, qkv, rows, R, C, 3 * C, true, workspace, stream);
        }) == std::vector<std::string>{"matmul_weight_gradient 0 6912 accumulated fp32",
                                       "column_sum 0 144 accumulated fp32"});
  CHECK(outputs_of([&] { linear_input_gradient<T>(drows, qkv, weight, R, C, 3 * C, stream); }) ==
        outputs("matmul_input_gradient", {"480" + t}));
  CHECK(outputs_of([&] { gelu_forward<T>(out, rows, R, C, stream); }) == outputs("gelu_forward", {"480" + t}));
  CHECK(outputs_of([&] { gelu_backward<T>(drows, rows, R, C, stream); }) == outputs("gelu_backward", {"480" + t}));
  CHECK(outputs_of([&] { head_forward<T>(logits, rows, wte, R, C, Vp, stream); }) ==
        outputs("matmul_forward", {"2560" + t}));
  const auto cross = [&](bool gradient) {
    return outputs_of([&] { cross_entropy<T>(logits, losses, total, tokens, R, V, Vp, 1, factor, gradient, stream); });
  };
  CHECK(cross(false) == outputs("cross_entropy", {"10 fp32"}));
  CHECK(cross(true) == outputs("cross_entropy", {"10 fp32", "2560" + t}));
  Buffer<AdamWState> state(std::vector<AdamWState>{{1, 10, 20}});
  auto updated = outputs("adamw", {"12288 fp32", "12288 fp32", "12288 fp32"});
  if (!std::is_same_v<T, float>) updated.push_back("adamw 3 12288" + t);
  T* const weights = std::is_same_v<T, float> ? reinterpret_cast<T*>(masters.data()) : wte.data();
  CHECK(outputs_of([&] {
          adamw<T>(weights, masters, first, second, dwte, factor, state, Vp * C, 0, {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f}, stream);
        }) == updated);
}
