// For tests of the whole program: a folder with data, in which train_gpt runs as people run it, from a shell.
//
// Commands are shell text. $GPT is the program (of the build folder $GPT_BUILD), $TINY the program with a
// model whose step takes milliseconds, $TEXT the same with data, $REFERENCE the folder test/reference.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "test/bounds.h"
#include "test/build_folder.h"
#include "test/temporary_folder.h"

using Json = nlohmann::json;

inline const bool mpirun_found = std::system("command -v mpirun >/dev/null") == 0;

// The beginning of a command that starts ranks; `options` of mpirun and the number of ranks follow. (AddressSanitizer looks for no
// leaks in them, as MPI leaks, and lets tests preload libraries.)
inline std::string mpirun(const std::string& options = "") {
  return "mpirun --oversubscribe --bind-to none -x ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0" + options + (geteuid() == 0 ? " --allow-run-as-root" : "") + " -np";
}

// What dev/ceilings prints, made up, for one storage type.
inline Json made_up_ceilings(const std::string& device) {
  Json made_up = {{"device", device}, {"copy_bytes_per_s", 1e10}, {"update_bytes_per_s", 2e10}, {"launch_s", 1e-6}};
  for (const char* rate : {"", "attention_forward_", "attention_backward_", "gelu_"})
    made_up[std::string(rate) + "flops_per_s"]["fp32"] = 1e11;
  for (const char* row : {"norm_row_s", "loss_row_s"}) made_up[row]["fp32"] = 1e-6;
  return made_up;
}
using Texts = std::vector<std::string>;

struct Result {
  int code;
  std::string out, error;
};

// Text that a model can learn something from; no two windows of it are the same.
inline std::string some_text(size_t bytes) {
  std::string text;
  for (size_t i = 0; text.size() < bytes; ++i) text += "line " + std::to_string(i * i) + ".\n";
  return text.substr(0, bytes);
}

// llm.c's format: 256 int32 (magic, version, count), then uint16 tokens.
inline std::string shard(const std::vector<uint16_t>& tokens, int32_t count, int32_t magic = 20240520) {
  int32_t header[256] = {magic, 1, count};
  return std::string(reinterpret_cast<const char*>(header), sizeof header) +
         std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(uint16_t));
}

// Seconds of a run, by its metrics: of the steps, of all that was lost besides, of the bill.
struct Accounted {
  double steps = 0, lost = 0, bill = 0;

  explicit Accounted(const std::vector<Json>& lines) {
    for (const Json& line : lines) {
      if (!line.contains("left_out")) steps += line.value("step_ms", 0.0) / 1e3;
      if (line.contains("step_ms")) check_parts(line);
    }
    const Json last = lines.empty() ? Json({{"hours", 0}, {"lost_s", {}}}) : lines.back();
    for (const auto& [what, seconds] : last["lost_s"].items())
      if (what != "data") lost += seconds.get<double>();  // waits for data are in the steps
    bill = 3600 * last["hours"].get<double>();
    CHECK(last["goodput"].get<double>() == about(steps / bill));
  }
  // The part of the bill that is neither.
  double missing() const { return (bill - steps - lost) / bill; }

 private:
  // Numbers in metrics have nine digits.
  static void check_parts(const Json& line) {
    const Json& parts = line["time_ms"];
    double sum = 0;
    for (const char* part : {"compute", "bubble", "data"}) sum += parts[part].get<double>();
    for (const auto& [group, waited] : parts["exposed"].items()) sum += waited.get<double>();
    CHECK(sum == about(line["step_ms"].get<double>(), 1e-8));
    for (const char* part : {"compute", "bubble", "data"}) CHECK(parts[part].get<double>() >= 0);
    for (const auto& [group, waited] : parts["exposed"].items()) CHECK(waited.get<double>() >= 0);
  }
};

// Calls `attempt`, which runs a job and returns the part of its bill that is not accounted for. That part is the host's own
// work between steps: 1 to 2 % in these small jobs, but a busy machine stretches it, and gets two more attempts. Evaluation
// and texts have to take more than `unaccounted` of the bill in one job (test_program), so that they are missed if nobody counts them.
constexpr double unaccounted = 0.05;
template <class Attempt>
void accounts_for_its_time(Attempt attempt) {
  double missing = attempt();
  for (int attempts = 1; attempts < 3 && std::abs(missing) >= unaccounted; ++attempts) missing = attempt();
  CHECK(std::abs(missing) < unaccounted);
}

// The seconds of the bill when it was printed, after the last line of metrics: the goodput on the terminal is the steps'
// share of it, to 0.05 %.
inline double bill_at_end(const std::string& out, double steps) {
  const size_t at = out.find("goodput ");
  REQUIRE_MESSAGE(at != out.npos, out);
  return steps / (std::stod(out.substr(at + 8)) / 100);
}

// Shell code: waits until the program that was started last has signal handlers, of which that of SIGUSR1 is the last
// but one.
inline const std::string until_it_heeds_signals =
    "while [ -d /proc/$! ] && [ $((0x0$(sed -n 's/^SigCgt:.//p' /proc/$!/status) & 0x200)) = 0 ]; do sleep 0.01; done; ";

// A folder with data, in which commands run.
class Workplace {
 public:
  Workplace() {
    const std::string program = built("train_gpt");
    REQUIRE_MESSAGE(std::filesystem::exists(program), program, " is missing: run make first");
    const std::string tiny = " --layers 1 --heads 1 --channels 16 --seq-len 16 --micro-batch 2 --steps 2";
    setenv("GPT", program.c_str(), 1);
    setenv("TINY", (program + tiny).c_str(), 1);
    setenv("TEXT", (program + tiny + " --train text").c_str(), 1);
    setenv("REFERENCE", std::filesystem::absolute("test/reference").c_str(), 1);
    setenv("OMP_WAIT_POLICY", "passive", 1);  // spinning threads would make a shared machine slow
    put(folder_ / "text", some_text(5000));
  }

  Result operator()(const std::string& command) const {
    put(folder_ / ".command", command);
    // ten minutes: what takes a second may take a minute on a machine that others use, too
    const std::string folder = folder_.path(), limited = "timeout -s KILL 600 sh .command >.stdout 2>.stderr";
    const int status = std::system(("cd '" + folder + "' && " + limited).c_str());
    return {WEXITSTATUS(status), content_of(folder_ / ".stdout"), content_of(folder_ / ".stderr")};
  }

  // The command must succeed, in silence on stderr.
  std::string output(const std::string& command) const {
    CAPTURE(command);
    const Result result = (*this)(command);
    CAPTURE(result.error);
    CHECK(result.code == 0);
    const bool has_speed = result.error.find(" tokens/s; ") != std::string::npos;  // --generate says how fast it was
    CHECK((has_speed || result.error == ""));
    return result.out;
  }

  // The command must fail with this code and one line that holds all the parts.
  void refuses(const std::string& command, int code, const Texts& parts) const {
    CAPTURE(command);
    const Result result = (*this)(command);
    CAPTURE(result.error);
    CHECK(result.code == code);
    CHECK(std::count(result.error.begin(), result.error.end(), '\n') == 1);
    CHECK(result.error.starts_with("train_gpt: "));
    for (const std::string& part : parts) CHECK_MESSAGE(contains(result.error, part), part);
  }

  std::filesystem::path operator/(const std::string& name) const { return folder_ / name; }
  bool exists(const std::string& name) const { return std::filesystem::exists(folder_ / name); }
  std::string content(const std::string& name) const { return content_of(folder_ / name); }

  // The lines of OUT/metrics.jsonl.
  std::vector<Json> all_metrics(const std::string& out) const {
    return json_lines<Json>(folder_ / out / "metrics.jsonl");
  }
  // The lines of steps, evaluations and rollbacks, without what depends on the clock.
  std::vector<Json> metrics(const std::string& out) const {
    std::vector<Json> lines = all_metrics(out);
    std::erase_if(lines, [](const Json& fields) { return fields.contains("sample") || fields.contains("incident"); });
    for (Json& fields : lines)
      for (const char* clock : {"step_ms", "time_ms", "tokens_per_s", "flops_per_s", "mfu", "hours", "goodput", "lost_s", "restarts",
                                "device_hours", "unpriced_device_hours", "cost"})
        fields.erase(clock);
    return lines;
  }
  bool same_metrics(const std::string& out, const std::string& other) const {
    return metrics(out) == metrics(other);
  }

 private:
  TemporaryFolder folder_;
};
