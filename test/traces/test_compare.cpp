// dev/compare.py on small logs of the format that runtime/traces/tensor_log.cuh describes. Left out where there is no Python.
#include <doctest/doctest.h>

#include <cstdio>
#include <functional>
#include <vector>

#include <sys/wait.h>

#include <nlohmann/json.hpp>

#include "test/temporary_folder.h"

namespace {

using Json = nlohmann::ordered_json;
using Parts = std::vector<std::string>;

const bool python_found = std::system("python3 --version > /dev/null 2>&1") == 0;

struct Mesh {
  int ranks = 1, data_parallel = 1, micro_batch = 4, tensor_parallel = 1, pieces = 1, zero = 0, pipeline = 1, chunks = 1;
  int context_parallel = 1;
  std::string context_method = "ring";
};

Json header(const Mesh& mesh, int rank) {
  return {{"rank", rank}, {"ranks", mesh.ranks}, {"data_parallel", mesh.data_parallel},
          {"tensor_parallel", mesh.tensor_parallel}, {"pieces", mesh.pieces}, {"context_parallel", mesh.context_parallel},
          {"context_method", mesh.context_method}, {"pipeline", mesh.pipeline}, {"chunks", mesh.chunks}, {"zero", mesh.zero},
          {"micro_batch", mesh.micro_batch}};
}

// What a tensor-parallel rank has of an output: all of it; a part, in pieces; or a term of a sum, in pieces too.
enum class Kind { whole, part, term };

// May change a line, whose rank is given, before it is written.
using Change = std::function<void(Json& line, int rank)>;

// The number of an output as a run computes it: by where it is, and for sums by what the rank has added up.
Json output(const Json& step, const Json& micro_batch, const Json& layer, const char* op, double value,
            bool accumulated = false, int count = 100) {
  char checksum[17];
  std::snprintf(checksum, sizeof checksum, "%016llx", static_cast<unsigned long long>(value * 1000));
  return {{"step", step}, {"micro_batch", micro_batch}, {"layer", layer}, {"op", op}, {"output", 0},
          {"piece", nullptr}, {"accumulated", accumulated}, {"partial", false}, {"count", count}, {"dtype", "fp32"},
          {"sum", value}, {"absmax", value / 10}, {"checksum", checksum}};
}

// The lines of one rank of a mesh for an output. Part i of n adds i to a sum of 1 + 2 + ... + n, and the last part has
// the largest element. Terms have other values than parts.
std::vector<Json> lines_of_rank(const Json& line, Kind kind, const Mesh& mesh, int rank) {
  if (mesh.tensor_parallel == 1 || kind == Kind::whole) return {line};
  std::vector<Json> lines;
  const int parts = mesh.tensor_parallel * mesh.pieces;
  for (int piece = 0; piece < mesh.pieces; ++piece) {
    const int i = rank % mesh.tensor_parallel * mesh.pieces + piece + 1;
    Json part = line;
    part["piece"] = piece;
    part["partial"] = kind == Kind::term;
    part["count"] = line["count"].get<int>() / (kind == Kind::term ? mesh.pieces : parts);
    part["sum"] = line["sum"].get<double>() * i / (parts * (parts + 1) / 2);
    part["absmax"] = line["absmax"].get<double>() * i / parts;
    part["checksum"] = line["checksum"].get<std::string>().substr(1) + std::to_string(i);
    lines.push_back(part);
  }
  return lines;
}

// Two steps of four micro-batches through two layers and an optimizer. Each of two stages has one of the layers. The other
// ranks, ranks/data_parallel/tensor_parallel/pipeline, hold the same.
void write_run(const std::string& file, const Mesh& mesh, const Change& change = [](Json&, int) {}) {
  for (int rank = 0; rank < mesh.ranks; ++rank) {
    std::string text = header(mesh, rank).dump() + "\n";
    const int stage = rank / (mesh.ranks / mesh.pipeline);
    const auto write = [&](const Json& whole, Kind kind = Kind::whole) {
      for (Json& line : lines_of_rank(whole, kind, mesh, rank)) {
        change(line, rank);
        text += line.dump() + "\n";
      }
    };
    write(output(nullptr, nullptr, nullptr, "fill", 1));
    for (int step = 1; step <= 2; ++step) {
      const int first = rank / mesh.tensor_parallel % mesh.data_parallel;
      double sum = 0;
      for (int micro_batch = first; micro_batch < 4; micro_batch += mesh.data_parallel) {
        for (int layer = 0; layer < 2; ++layer) {
          if (mesh.pipeline > 1 && layer != stage) continue;
          write(output(step, micro_batch, layer, "matmul", 100 * step + 10 * micro_batch + layer), Kind::part);
          write(output(step, micro_batch, layer, "matmul", 200 * step + 10 * micro_batch + layer), Kind::term);
        }
        if (stage == 0) write(output(step, micro_batch, 0, "gradient", sum += micro_batch + 1, micro_batch != first));
      }
      write(output(step, nullptr, nullptr, "adamw", 1000 * step));
      write(output(step, nullptr, nullptr, "adamw", 2000 * step, false, 50));
    }
    put(rank ? file + ".rank" + std::to_string(rank) : file, text);
  }
}

// Runs `compare.py arguments` in the folder.
void check(const TemporaryFolder& folder, const std::string& arguments, int code, const Parts& parts) {
  const std::string script = std::filesystem::absolute("dev/compare.py");
  const std::string command = "python3 '" + script + "' " + arguments + " > .out 2>&1";
  const int status = std::system(("cd '" + folder.path().string() + "' && " + command).c_str());
  const std::string text = content_of(folder / ".out");
  CAPTURE(arguments);
  CAPTURE(text);
  CHECK(WEXITSTATUS(status) == code);
  for (const std::string& part : parts) CHECK_MESSAGE(contains(text, part), part);
  CHECK(contains(text, "error: ") == (code == 2));
  CHECK(!contains(text, "Traceback"));
}

Change spoil(int step, int micro_batch, int layer, double factor) {
  return [=](Json& line, int) {
    if (line["step"] != step || line["micro_batch"] != micro_batch || line["layer"] != layer) return;
    for (const char* key : {"sum", "absmax"}) line[key] = line[key].get<double>() * factor;
    line["checksum"] = "ffffffffffffffff";
  };
}

}  // namespace

TEST_CASE("runs of one mesh" * doctest::skip(!python_found)) {
  TemporaryFolder folder;
  const std::string path = folder.path().string() + "/";
  write_run(path + "good", {});
  write_run(path + "same", {});
  write_run(path + "bad", {}, spoil(2, 1, 1, 1.001));
  write_run(path + "short", {}, [](Json& line, int) {
    if (line["step"] == 2) line["op"] = "other";
  });
  check(folder, "good same", 0, {"are the same: 45 outputs agree."});
  check(folder, "good bad", 1,
        {"They first differ at step 2, micro-batch 1, layer 1: matmul, output 0 (100 fp32)",
         "A, rank 0:  sum 211, absolute maximum 21.1, checksum 0000000000033838",
         "B, rank 0:  sum 211.211, absolute maximum 21.1211, checksum ffffffffffffffff",
         "step 2, micro-batch 1, layer 0: matmul, call 2 of it, output 0 (100 fp32): agrees",
         "30 outputs agree up to there; from there on 2 differ, 13 agree."});
  check(folder, "good bad --rtol 0.01", 0, {"45 outputs agree within 0.01"});
  check(folder, "good bad --rtol 0.0001", 1, {"They first differ at step 2, micro-batch 1, layer 1"});
  check(folder, "good short", 0, {"23 outputs agree", "22 in A alone, 22 in B alone"});
}

TEST_CASE("the first difference of several ranks is the earliest one, not the first rank's" *
          doctest::skip(!python_found)) {
  TemporaryFolder folder;
  const std::string path = folder.path().string() + "/";
  const Mesh mesh{.ranks = 2, .data_parallel = 2};
  write_run(path + "good/run", mesh);
  write_run(path + "bad/run", mesh, [](Json& line, int rank) {
    spoil(2, 0, 0, 2)(line, rank);
    spoil(1, 3, 1, 2)(line, rank);
  });
  check(folder, "good bad", 1,
        {"step 1, micro-batch 3, layer 1", "A, rank 1:", "B, rank 1:", "Before it on rank 1 of A:",
         "  step 1, micro-batch 1, layer 0: gradient, output 0 (100 fp32): agrees\n  step 1, micro-batch 3, layer 0"});
  check(folder, "good/run bad/run", 1, {"step 1, micro-batch 3, layer 1", "A, rank 1:", "B, rank 1:"});
}

TEST_CASE("runs of two meshes" * doctest::skip(!python_found)) {
  TemporaryFolder folder;
  const std::string path = folder.path().string() + "/";
  write_run(path + "one", {});
  write_run(path + "two", {.ranks = 2, .data_parallel = 2});
  write_run(path + "pair", {.ranks = 2, .data_parallel = 1});
  write_run(path + "replicas", {.ranks = 4, .data_parallel = 2}, [](Json& line, int rank) {
    if (rank >= 2) spoil(1, 3, 0, 2)(line, rank);  // not looked at: ranks 0 and 1 have all there is
  });
  write_run(path + "bad", {.ranks = 2, .data_parallel = 2}, spoil(1, 3, 0, 2));
  write_run(path + "smaller", {.ranks = 1, .data_parallel = 1, .micro_batch = 2}, spoil(1, 3, 0, 2));
  write_run(path + "shards", {.ranks = 2, .data_parallel = 2}, [](Json& line, int) {
    if (line["op"] != "adamw") return;
    line["count"] = 50;  // by accident the second call's in the other run, which writes something else
    line["checksum"] = "ffffffffffffffff";
  });
  write_run(path + "alone", {}, [](Json& line, int) {  // as if ZeRO 2 had handed on the gradients
    if (line["accumulated"] == true) line["checksum"] = "ffffffffffffffff";
    line["accumulated"] = false;
  });
  // Six of the eight gradients are sums of different micro-batches; the first two on rank 0 are not.
  const std::string sums = " sums over other micro-batches.";
  check(folder, "one two", 0, {"39 outputs agree", "Not compared: 6" + sums});
  check(folder, "two one", 0, {"39 outputs agree", "Not compared: 6" + sums});
  check(folder, "one pair", 0, {"45 outputs agree"});
  check(folder, "one alone", 0, {"39 outputs agree", "Not compared: 6" + sums});
  check(folder, "pair two", 0, {"39 outputs agree", "Not compared: 6" + sums});
  check(folder, "two replicas", 0, {"45 outputs agree"});
  check(folder, "one bad", 1, {"step 1, micro-batch 3, layer 0: matmul", "A, rank 0:", "B, rank 1:"});
  check(folder, "one shards", 0, {"35 outputs agree", "4 of other sizes"});
  check(folder, "one smaller", 0, {"5 outputs agree", "40 of other samples"});
}

TEST_CASE("tensor-parallel ranks have parts of an output, terms of it, or all of it" * doctest::skip(!python_found)) {
  TemporaryFolder folder;
  const std::string path = folder.path().string() + "/";
  const Mesh two = {.ranks = 2, .tensor_parallel = 2, .pieces = 2};
  const auto spoil_on = [](int rank, const char* op, int micro_batch, bool partial) {
    return [=](Json& line, int of) {
      if (of == rank && line["op"] == op && line["partial"] == partial) spoil(2, micro_batch, 0, 1.1)(line, of);
    };
  };
  write_run(path + "one", {});
  write_run(path + "two", two);
  write_run(path + "again", two);
  write_run(path + "pieces", {.ranks = 2, .tensor_parallel = 2, .pieces = 1});
  write_run(path + "four", {.ranks = 8, .data_parallel = 2, .tensor_parallel = 4, .pieces = 5});
  write_run(path + "part", two, spoil_on(1, "matmul", 3, false));
  write_run(path + "whole", two, spoil_on(1, "gradient", 3, false));
  write_run(path + "term", two, spoil_on(1, "matmul", 3, true));
  const auto as_logits = [](Json& line) {
    if (line["op"] != "gradient") return false;
    line["op"] = "matmul_forward";
    line["layer"] = nullptr;
    line["accumulated"] = false;
    return true;
  };
  write_run(path + "all words", {}, [&](Json& line, int) { as_logits(line); });
  write_run(path + "own words", two, [&](Json& line, int) {  // each rank has 50, and zeros beside them
    if (!as_logits(line)) return;
    line["sum"] = line["sum"].get<double>() / 2;
    line["count"] = 64;
  });
  write_run(path + "other", {.ranks = 2, .tensor_parallel = 2, .pieces = 2, .zero = 1}, [](Json& line, int) {
    if (line["op"] == "adamw") line["op"] = "all_gather", line["checksum"] = "ffffffffffffffff";
  });
  write_run(path + "collective", two, [](Json& line, int) {
    if (line["op"] == "adamw") line["op"] = "all_gather";
  });
  const std::string refusal = "checksums of parts have nothing in common, give --rtol", terms = "16 terms of sums over ranks";
  check(folder, "one two", 2, {refusal});
  check(folder, "pieces two", 2, {refusal});
  check(folder, "one two --rtol 1e-6", 0,
        {"B: two: ranks 2, tensor-parallel 2 in 2 pieces, data-parallel 1,", "29 outputs agree within 1e-06", terms});
  check(folder, "two one --rtol 1e-6", 0, {"29 outputs agree", terms});
  check(folder, "pieces two --rtol 1e-6", 0, {"29 outputs agree", terms});
  check(folder, "one four --rtol 1e-6", 0, {"23 outputs agree", terms, "6 sums over other micro-batches"});
  check(folder, "four two --rtol 1e-6", 0, {"23 outputs agree", terms});
  check(folder, "two again", 0, {"90 outputs agree"});
  check(folder, "two term", 1,
        {"They first differ at step 2, micro-batch 3, layer 0: matmul, call 2 of it", "A, rank 1:", "B, rank 1:"});
  check(folder, "one part --rtol 1e-6", 1,
        {"They first differ at step 2, micro-batch 3, layer 0: matmul, output 0 (100 fp32)", "A, rank 0:  sum 230,",
         "B, ranks 0 to 1:  sum 246.1,", "Before it on rank 0 of A:"});
  check(folder, "one whole --rtol 1e-6", 1,
        {"They first differ at step 2, micro-batch 3, layer 0: gradient", "A, rank 0:", "B, rank 1:"});
  check(folder, "one term --rtol 1e-6", 0, {"29 outputs agree"});
  check(folder, "'all words' 'own words' --rtol 1e-6", 0, {"29 outputs agree"});
  check(folder, "collective other", 0, {"82 outputs agree", "8 that depend on the mesh"});
}

TEST_CASE("runs with another --cp or --cp-method are refused" * doctest::skip(!python_found)) {
  TemporaryFolder folder;
  const std::string path = folder / "";
  write_run(path + "one", {});
  write_run(path + "two", {.ranks = 2, .context_parallel = 2});
  check(folder, "one two --rtol 1e-6", 2, {"split samples differently, --cp 1 (ring) and 2 (ring)", "give runs of the same --cp"});
  check(folder, "two two", 0, {"A: two: ranks 2, context-parallel 2, data-parallel 1,", "90 outputs agree"});
  const auto write_ulysses = [&](const char* name, int tensor_parallel, double factor) {  // times which attention is
    write_run(path + name,
              {.ranks = 2 * tensor_parallel, .tensor_parallel = tensor_parallel, .context_parallel = 2,
               .context_method = "ulysses"},
              [&](Json& line, int) {
                if (line["op"] != "gradient") return;
                line["op"] = "attention_forward";
                line["sum"] = line["sum"].get<double>() * factor;
              });
  };
  write_ulysses("ulysses", 1, 1);
  write_ulysses("wrong", 1, 2);
  write_ulysses("split", 2, 2);
  check(folder, "two ulysses", 2, {"--cp 2 (ring) and 2 (ulysses)", "--cp-method"});
  check(folder, "ulysses split --rtol 1e-6", 0, {"8 of other heads"});
  const auto write_codes = [&](const char* name, int tensor_parallel, double factor) {
    write_run(path + name, {.ranks = tensor_parallel, .tensor_parallel = tensor_parallel}, [&](Json& line, int) {
      if (line["op"] == "gradient") line["op"] = "cast_fp8", line["dtype"] = "e4m3", line["sum"] = line["sum"].get<double>() * factor;
    });
  };
  write_codes("codes", 1, 1);
  write_codes("codes of parts", 2, 2);
  write_codes("wrong codes", 1, 2);
  check(folder, "codes 'codes of parts' --rtol 1e-6", 0, {"of other scales"});
  // Which maxima have a launch of their own depends on the mesh.
  for (int stages : {1, 2})
    write_run(path + "maxima" + std::to_string(stages), {.ranks = stages, .pipeline = stages}, [&](Json& line, int) {
      if (line["op"] == "gradient") line["op"] = "fp8_maximum", line["sum"] = line["sum"].get<double>() * stages;
    });
  check(folder, "maxima1 maxima2 --rtol 1e-6", 0, {"that depend on the mesh"});
  check(folder, "codes 'wrong codes' --rtol 1e-6", 1, {"layer 0: cast_fp8"});
  check(folder, "ulysses wrong --rtol 1e-6", 1, {"They first differ at step 1, micro-batch 0, layer 0: attention_forward"});
}

TEST_CASE("stages of a pipeline have layers of their own" * doctest::skip(!python_found)) {
  TemporaryFolder folder;
  const std::string path = folder.path().string() + "/";
  const Mesh stages = {.ranks = 2, .pipeline = 2};
  const auto tied = [](Json& line, const char* checksum) {  // its sums differ, but that over the first micro-batch alone doesn't
    if (line["op"] != "gradient") return;
    line["op"] = "matmul_weight_gradient";
    line["layer"] = nullptr;
    if (line["accumulated"] == true) line["checksum"] = checksum;
  };
  const auto received = [](Json& line, const char* checksum) {
    if (line["op"] == "gradient") line["op"] = "receive", line["checksum"] = checksum;
  };
  write_run(path + "one", {});
  write_run(path + "stages", stages);
  write_run(path + "chunks", {.ranks = 2, .pipeline = 2, .chunks = 2});
  write_run(path + "four", {.ranks = 4, .data_parallel = 2, .pipeline = 2});
  write_run(path + "eight", {.ranks = 8, .data_parallel = 2, .tensor_parallel = 2, .pieces = 2, .pipeline = 2});
  write_run(path + "tied one", {}, [&](Json& line, int) { tied(line, "1111111111111111"); });
  write_run(path + "tied", stages, [&](Json& line, int) { tied(line, "2222222222222222"); });
  write_run(path + "received", stages, [&](Json& line, int) { received(line, "1111111111111111"); });
  write_run(path + "posted early", stages, [&](Json& line, int) { received(line, "2222222222222222"); });
  const auto bad = [](Json& line, int rank) {  // the first mistake of stage 0, and what follows from it on stage 1
    spoil(1, 1, 0, 2)(line, rank);
    spoil(1, 1, 1, 2)(line, rank);
  };
  write_run(path + "bad", stages, bad);
  write_run(path + "one wpe", stages, [](Json& line, int rank) {  // of the embedding the last stage updates wte alone
    if (line["op"] != "adamw") return;
    if (rank == 1 && line["count"] == 100) line["checksum"] = "1111111111111111", line["sum"] = 0;
    if (rank == 0 && line["count"] == 50) line["op"] = "another";  // the final norm is not its own
  });
  check(folder, "one stages", 0, {"B: stages: ranks 2, pipeline 2, data-parallel 1,", "45 outputs agree"});
  check(folder, "stages one", 0, {"45 outputs agree"});
  check(folder, "one 'one wpe'", 0, {"45 outputs agree"});
  check(folder, "stages chunks", 0, {"pipeline 2 of 2 chunks,", "45 outputs agree"});
  check(folder, "one four", 0, {"39 outputs agree", "6 sums over other micro-batches"});
  check(folder, "one eight --rtol 1e-6", 0, {"23 outputs agree", "16 terms of sums over ranks", "6 sums over other micro-batches"});
  check(folder, "'tied one' tied", 0, {"39 outputs agree", "6 sums of the tied embedding"});
  check(folder, "tied 'tied one'", 0, {"39 outputs agree", "6 sums of the tied embedding"});
  check(folder, "received 'posted early'", 0, {"42 outputs agree", "8 from other stages"});
  for (const char* names : {"one bad", "bad one", "bad stages"})
    check(folder, names, 1, {"They first differ at step 1, micro-batch 1, layer 0: matmul, output 0"});

  // On the first layer of a chunk layernorm writes no sum, which has been sent. The second call's sum is still the second.
  const auto call = [](double value, bool with_sum) {
    Json result = output(1, 0, 1, "layernorm", value), sum = output(1, 0, 1, "layernorm", value + 1);
    sum["output"] = 1;
    return result.dump() + "\n" + (with_sum ? sum.dump() + "\n" : "");
  };
  put(path + "sums", header({}, 0).dump() + "\n" + call(5, true) + call(7, true));
  put(path + "sent", header(stages, 0).dump() + "\n");
  put(path + "sent.rank1", header(stages, 1).dump() + "\n" + call(5, false) + call(7, true));
  check(folder, "sums sent", 0, {"3 outputs agree", "1 in A alone"});
}

TEST_CASE("tolerances" * doctest::skip(!python_found)) {
  TemporaryFolder folder;
  const std::string path = folder.path().string() + "/";
  const auto with = [&](const std::string& file, double sum, Json largest, const char* dtype = "fp32") {
    write_run(path + file, {}, [=](Json& line, int) {
      line["sum"] = sum;
      line["absmax"] = largest;
      line["dtype"] = dtype;
    });
  };
  with("a", 1e-6, 1.0);  // sums of 100 elements near 1 that cancel
  with("cancels", -1e-6, 1.0);
  with("sum", 1e-1, 1.0);
  with("largest", 1e-6, 1.01);
  with("infinite", 1e-6, nullptr);
  with("bf16", 1e-6, 1.0, "bf16");
  check(folder, "a cancels --rtol 1e-3", 0, {"the same"});
  check(folder, "a sum --rtol 1e-3", 1, {"They first differ at before the first step: fill"});
  check(folder, "a largest --rtol 1e-3", 1, {"It is the first of rank 0"});
  check(folder, "a infinite --rtol 1e-3", 1, {"absolute maximum not finite"});
  check(folder, "infinite infinite --rtol 1e-3", 0, {"the same"});
  check(folder, "a bf16", 2, {"bf16", "--rtol"});
  check(folder, "a bf16 --rtol 1e-3", 0, {"the same"});
}

TEST_CASE("a library may compute two operations at once" * doctest::skip(!python_found)) {
  TemporaryFolder folder;
  struct Output {
    const char* op;
    int number;
    double value;
  };
  const auto write = [&](const std::string& name, const std::vector<Output>& outputs) {
    std::string text = header({}, 0).dump() + "\n";
    for (const auto& [op, number, value] : outputs) {
      Json line = output(1, 0, 0, op, value);
      line["output"] = number;
      text += line.dump() + "\n";
    }
    put(folder / name, text);
  };
  // All of one size, as if channels did not differ: what is compared follows from operations and calls alone.
  write("separate", {{"matmul_forward", 0, 1}, {"matmul_forward", 0, 2}, {"gelu_forward", 0, 3}, {"matmul_forward", 0, 4},
                     {"matmul_weight_gradient", 0, 5}, {"column_sum", 0, 6}, {"matmul_input_gradient", 0, 7},
                     {"gelu_backward", 0, 8}, {"matmul_weight_gradient", 0, 9}, {"column_sum", 0, 10},
                     {"matmul_input_gradient", 0, 11}});
  const auto fused = [&](const std::string& name, double wrong) {
    write(name, {{"matmul_forward", 0, 1}, {"matmul_gelu_forward", 0, 3}, {"matmul_gelu_forward", 1, 2 * wrong},
                 {"matmul_forward", 0, 4}, {"matmul_bias_gradient", 0, 5}, {"matmul_bias_gradient", 1, 6},
                 {"matmul_gelu_gradient", 0, 8}, {"matmul_weight_gradient", 0, 9}, {"column_sum", 0, 10},
                 {"matmul_input_gradient", 0, 11}});
  };
  fused("fused", 1);
  fused("bad", 1.1);
  check(folder, "separate fused --rtol 1e-3", 0, {"10 outputs agree", "Not compared: 1 in A alone."});
  check(folder, "fused separate --rtol 1e-3", 0, {"10 outputs agree", "Not compared: 1 in B alone."});
  check(folder, "separate bad --rtol 1e-3", 1, {"They first differ at step 1, micro-batch 0, layer 0: matmul_forward, call 2"});
}

TEST_CASE("what can't be compared" * doctest::skip(!python_found)) {
  TemporaryFolder folder;
  const std::string path = folder.path().string() + "/";
  write_run(path + "run", {});
  write_run(path + "two", {.ranks = 2, .data_parallel = 2});
  write_run(path + "renamed", {}, [](Json& line, int) { line["op"] = "other"; });
  std::filesystem::create_directory(path + "nothing");
  std::filesystem::copy(path + "two", path + "half");
  put(path + "empty", "");
  put(path + "text", "hello\n");
  put(path + "array", content_of(path + "run") + "[1]\n");
  put(path + "key", content_of(path + "run") + "{\"step\":1}\n");
  put(path + "cut", content_of(path + "run") + "{\"step\":1");
  check(folder, "run missing", 2, {"missing", "No such file"});
  check(folder, "run nothing", 2, {"nothing", "empty folder"});
  check(folder, "run empty", 2, {"empty:", "empty"});
  check(folder, "run text", 2, {"text:1", "'hello'"});
  check(folder, "run array", 2, {"array:47", "'[1]'"});
  check(folder, "run key", 2, {"key:47"});
  check(folder, "run half", 2, {"half", "rank 0", "2 ranks"});
  check(folder, "run renamed", 2, {"same place"});
  check(folder, "run run --rtol 7", 2, {"--rtol 7"});
  check(folder, "run cut", 0, {"cut: line 47 is unfinished", "45 outputs agree"});
}
