// The commands of dev/cluster/hooks.md, taken from the page as they are, run against a stand-in for the providers'
// services (test/stand_in.py). curl finds it by settings of its own ($CURL_HOME). Command-line tools are made up: they
// note what they are called with.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <map>
#include <regex>
#include <sstream>
#include <thread>
#include <vector>

#include <sys/wait.h>

#include "test/skip.h"
#include "test/temporary_folder.h"

namespace {

using Lines = std::vector<std::string>;

const char* const needed = "needs python3, curl and openssl";
const bool can_play =
    std::system("{ python3 --version && curl --version && openssl version; } > /dev/null 2>&1") == 0;

// The commands that a section of the page has for an option, in order.
Lines commands_in(const std::string& section, const std::string& option) {
  const std::regex block("```sh\n" + option + " '([^']*)'\n```\n");
  Lines commands;
  for (std::sregex_iterator match(section.begin(), section.end(), block), end; match != end; ++match)
    commands.push_back((*match)[1]);
  return commands;
}
Lines commands_of(const std::string& provider, const std::string& option) {
  const std::string page = content_of("dev/cluster/hooks.md");
  const size_t begin = page.find("\n## " + provider + "\n");
  REQUIRE_MESSAGE(begin != std::string::npos, provider);
  const Lines commands = commands_in(page.substr(begin, page.find("\n## ", begin + 1) - begin), option);
  REQUIRE_MESSAGE(!commands.empty(), provider << " has no block of " << option);
  return commands;
}

// Sorted: hooks run at the same time.
std::string text_of(Lines lines) {
  std::sort(lines.begin(), lines.end());
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

struct Answer {
  int code;
  std::string out;
};

Answer shell(const std::string& command) {
  FILE* pipe = popen(("{ " + command + "\n} 2>&1").c_str(), "r");
  std::string out;
  for (int c; (c = fgetc(pipe)) != EOF;) out += char(c);
  return {WEXITSTATUS(pclose(pipe)), out};
}

// A rented machine, of all providers at once.
class Rented {
 public:
  Rented() {
    shell("cd '" + at() + "' && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
          "-keyout key -out certificate -subj /CN=stand-in -addext subjectAltName=DNS:compute.googleapis.com,"
          "DNS:management.azure.com,DNS:api.runpod.io,DNS:console.vast.ai,DNS:cloud.lambda.ai");
    services_are("calm");
    stand_in_ = popen(("exec python3 test/stand_in.py '" + at() + "' 2> '" + at() + "/errors'").c_str(), "w");
    while (!std::filesystem::exists(folder / "ports") && content_of(folder / "errors").empty())
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    REQUIRE(content_of(folder / "errors") == "");
    std::string http, https;
    std::istringstream(content_of(folder / "ports")) >> http >> https;
    lead_curl_to(http, https);

    // All users of a machine can read what curl is called with.
    set_program("curl", "echo \"$@\" >> '" + at() + "/arguments'\nexec $(PATH=${PATH#*:} command -v curl) \"$@\"");
    put(folder / "refused", "");
    for (const std::string tool : {"aws", "gcloud", "azcopy", "rclone", "rsync", "scontrol", "scancel"})
      set_program(tool, "echo " + tool + " \"$@\" >> '" + at() + "/calls'\n"
                        "! grep -qxF \"" + tool + " $1 $2\" '" + at() + "/refused'");
  }
  ~Rented() { pclose(stand_in_); }  // It ends when its input does.
  Rented(const Rented&) = delete;
  Rented& operator=(const Rented&) = delete;

  void services_are(const std::string& state) { put(folder / "state", state); }
  void lead_curl_to(const std::string& http, const std::string& https) {
    put(folder / ".curlrc", "connect-to = \":80:127.0.0.1:" + http + "\"\nconnect-to = \":443:127.0.0.1:" + https +
                                "\"\ncacert = \"" + at() + "/certificate\"\n");
  }

  // As train_gpt calls a hook, with these variables.
  Answer run(const std::string& hook, const std::string& variables = "", const std::string& path = "") const {
    const std::string file = at() + "/hook" + std::to_string(std::hash<std::string>()(hook));
    put(file, hook);
    return shell("env -u http_proxy -u https_proxy CURL_HOME='" + at() + "' PATH=" +
                 (path.empty() ? "'" + at() + "/bin':\"$PATH\"" : path) +
                 " RUNPOD_POD_ID=pod7 RUNPOD_API_KEY=secret-runpod CONTAINER_ID=77 CONTAINER_API_KEY=secret-vast "
                 "LAMBDA_INSTANCE_ID=l-9 LAMBDA_API_KEY=secret-lambda SLURM_JOB_ID=5 BACKUP=there GPT_STEP=100 "
                 "GPT_OUT='" + at() + "/run' GPT_CHECKPOINT='" + at() + "/run/step_00000100' " + variables +
                 " /bin/sh -c \"$(cat '" + file + "')\"");
  }
  // All at the same time. The answers have the order of the hooks.
  std::vector<Answer> run_all(const Lines& hooks, const std::string& variables, const std::string& path = "") const {
    std::vector<std::future<Answer>> running;
    for (const std::string& hook : hooks)
      running.push_back(std::async(std::launch::async, [&] { return run(hook, variables, path); }));
    std::vector<Answer> answers;
    for (auto& one : running) answers.push_back(one.get());
    return answers;
  }

  // The lines of `requests` (of those that change something) or `calls` (of tools) since the last time.
  std::string taken(const std::string& name) {
    std::istringstream all(content_of(folder / name));
    Lines lines;
    for (std::string line; std::getline(all, line);)
      if (!contains(line, " GET ") && !contains(line, "/latest/api/token")) lines.push_back(line);
    std::filesystem::remove(folder / name);
    return text_of(lines);
  }

  bool told_a_secret() const { return contains(content_of(folder / "arguments"), "secret"); }
  std::string at() const { return folder.path().string(); }

  TemporaryFolder folder;

 private:
  void set_program(const std::string& name, const std::string& text) {
    const auto program = put(folder / "bin" / name, "#!/bin/sh\n" + text + "\n");
    std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  }

  FILE* stand_in_;
};

const std::string stop_on_aws = "aws ec2 stop-instances --region eu-west-1 --instance-ids i-0123\n";
const std::string terminate_on_aws = "aws ec2 terminate-instances --region eu-west-1 --instance-ids i-0123\n";

}  // namespace

TEST_CASE("each block of the page is one option in quotes") {
  const std::string page = content_of("dev/cluster/hooks.md");
  const std::regex block("```sh\n--");
  size_t found = 0;
  for (const char* option : {"--stop-when", "--on-end", "--after-checkpoint"})
    found += commands_in(page, option).size();
  CHECK(std::distance(std::sregex_iterator(page.begin(), page.end(), block), std::sregex_iterator()) == long(found));
}

TEST_CASE("a notice stops the training, and nothing else does") {
  if (!can_play) return skip(needed);
  Rented rented;
  Lines hooks;
  for (const char* provider : {"AWS", "GCP", "Azure"})
    for (const std::string& hook : commands_of(provider, "--stop-when")) hooks.push_back(hook);
  const auto codes = [&](const std::string& state, const std::string& path = "") {
    rented.services_are(state);
    std::string all;
    for (const Answer& answer : rented.run_all(hooks, "", path)) all += " " + std::to_string(answer.code);
    return all;
  };
  // AWS, GCP's two, Azure. curl's codes: 7 refused, 22 an error of HTTP, 28 out of time
  CHECK(codes("notice") == " 0 0 0 0");
  CHECK(codes("calm") == " 22 1 1 1");
  CHECK(codes("absent") == " 22 22 22 22");
  CHECK(codes("garbage") == " 1 1 1 1");
  const auto begin = std::chrono::steady_clock::now();
  CHECK(codes("silent") == " 28 28 28 28");
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));
  CHECK(codes("notice", "/nowhere") == " 127 127 127 127");  // without curl, of which train_gpt tells
  rented.lead_curl_to("1", "1");
  CHECK(codes("notice") == " 7 7 7 7");
  CHECK(!rented.told_a_secret());
}

TEST_CASE("an end deletes the machine after a finished run that is uploaded, and else stops it") {
  if (!can_play) return skip(needed);
  Rented rented;
  const Lines providers = {"AWS", "GCP", "Azure", "RunPod", "Vast", "Lambda"};
  Lines hooks;
  for (const std::string& provider : providers) hooks.push_back(commands_of(provider, "--on-end")[0]);
  const auto requests = [&](const std::string& variables, int code_of_lambda) {
    const auto answers = rented.run_all(hooks, variables);
    for (size_t i = 0; i < providers.size(); ++i) {
      INFO(providers[i] << ", " << variables << ": " << answers[i].out);
      CHECK(answers[i].code == (providers[i] == "Lambda" ? code_of_lambda : 0));
    }
    return rented.taken("requests");
  };
  const std::string gcp = "https://compute.googleapis.com/compute/v1/projects/42/zones/europe-west4-a/instances/box";
  const std::string azure =
      "https://management.azure.com/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/box";
  const std::string runpod = "https://api.runpod.io/v2/pods/pod7";
  const std::string vast = "https://console.vast.ai/api/v0/instances/77/";
  const std::string lambda =
      "200 POST https://cloud.lambda.ai/api/v1/instance-operations/terminate {\"instance_ids\": [\"l-9\"]}";
  const Lines deleted = {"200 DELETE " + gcp, "202 DELETE " + azure + "?api-version=2024-07-01",
                         "204 DELETE " + runpod, "200 DELETE " + vast + " {}", lambda};
  Lines stopped = {"200 POST " + gcp + "/stop", "202 POST " + azure + "/deallocate?api-version=2024-07-01",
                   "200 POST " + runpod + "/action {\"action\": \"stop\"}",
                   "200 PUT " + vast + " {\"state\": \"stopped\"}"};
  CHECK(requests("GPT_REASON=done GPT_UPLOADED=1", 0) == text_of(deleted));
  CHECK(rented.taken("calls") == terminate_on_aws);

  for (const std::string reason : {"done", "stopped"}) {
    CHECK(requests("GPT_REASON=" + reason + " GPT_UPLOADED=0", 1) == text_of(stopped));
    CHECK(rented.taken("calls") == stop_on_aws);
  }
  stopped.push_back(lambda);  // whose machines cannot be stopped
  CHECK(requests("GPT_REASON=error GPT_UPLOADED=1", 0) == text_of(stopped));
  CHECK(rented.taken("calls") == stop_on_aws);

  rented.services_are("busy");
  Lines twice = deleted;
  for (const std::string& request : deleted) twice.push_back("503" + request.substr(3));
  CHECK(requests("GPT_REASON=done GPT_UPLOADED=1", 0) == text_of(twice));
  CHECK(!rented.told_a_secret());
}

TEST_CASE("an end that fails says so: the machine goes on") {
  if (!can_play) return skip(needed);
  Rented rented;
  for (const char* provider : {"RunPod", "Vast"}) {
    const Answer refused = rented.run(commands_of(provider, "--on-end")[0],
                                      "GPT_REASON=done GPT_UPLOADED=1 RUNPOD_API_KEY= CONTAINER_API_KEY=");
    CHECK(refused.code == 22);
    CHECK_MESSAGE(contains(refused.out, "401"), refused.out);
  }
  CHECK(rented.run(commands_of("Lambda", "--on-end")[0], "GPT_REASON=done GPT_UPLOADED=0").out ==
        "not uploaded: this machine goes on, and costs\n");

  // The machine of a one-time spot request cannot be stopped.
  put(rented.folder / "refused", "aws ec2 stop-instances\n");
  const std::string aws = commands_of("AWS", "--on-end")[0];
  CHECK(rented.run(aws, "GPT_REASON=stopped GPT_UPLOADED=0").code == 1);
  CHECK(rented.taken("calls") == stop_on_aws);
  CHECK(rented.run(aws, "GPT_REASON=stopped GPT_UPLOADED=1").code == 0);
  CHECK(rented.taken("calls") == stop_on_aws + terminate_on_aws);
}

TEST_CASE("an upload has the checkpoint and the metrics, and fails if one of them does") {
  if (!can_play) return skip(needed);
  Rented rented;
  const std::string from = rented.at() + "/run/step_00000100", to = "there/step_00000100";
  const std::string metrics = rented.at() + "/run/metrics.jsonl";
  const auto calls = [&](const std::string& hook) {
    CHECK(rented.run(hook).code == 0);
    const std::string all = rented.taken("calls");
    std::istringstream lines(all);
    for (std::string tool, verb, what, rest; lines >> tool >> verb >> what && std::getline(lines, rest);) {
      put(rented.folder / "refused", tool + " " + verb + " " + what + "\n");
      CHECK_MESSAGE(rented.run(hook).code == 1, tool << " " << verb << " is refused");
    }
    put(rented.folder / "refused", "");
    rented.taken("calls");
    return all;
  };
  CHECK(calls(commands_of("AWS", "--after-checkpoint")[0]) ==
        text_of({"aws s3 sync --only-show-errors " + from + " " + to,
                 "aws s3 cp --only-show-errors " + metrics + " there/metrics.jsonl"}));
  CHECK(calls(commands_of("GCP", "--after-checkpoint")[0]) ==
        text_of({"gcloud storage rsync --recursive " + from + " " + to,
                 "gcloud storage cp " + metrics + " there/metrics.jsonl"}));
  CHECK(calls(commands_of("Azure", "--after-checkpoint")[0]) ==
        text_of({"azcopy copy " + from + " there --recursive", "azcopy copy " + metrics + " there/metrics.jsonl"}));
  const Lines any = commands_of("Any machine", "--after-checkpoint");
  REQUIRE(any.size() == 2);
  CHECK(calls(any[0]) ==
        text_of({"rclone copy " + from + " " + to, "rclone copyto " + metrics + " there/metrics.jsonl"}));
  CHECK(calls(any[1]) == "rsync -a " + from + " " + metrics + " there/\n");
}

TEST_CASE("Slurm: five minutes before the job's end; queued again; an allocation that is given back") {
  if (!can_play) return skip(needed);
  Rented rented;
  const std::string stop = commands_of("Slurm", "--stop-when")[0];
  CHECK(rented.run(stop, "JOB_ENDS=$(($(date +%s) + 299))").code == 0);
  CHECK(rented.run(stop, "JOB_ENDS=$(($(date +%s) + 360))").code == 1);
  for (const char* unknown : {"JOB_ENDS=", ""}) CHECK(rented.run(stop, unknown).code == 2);  // squeue has not told

  const Lines ends = commands_of("Slurm", "--on-end");
  REQUIRE(ends.size() == 2);
  for (const std::string reason : {"done", "stopped", "time", "error", "killed"}) {
    CAPTURE(reason);
    CHECK(rented.run(ends[0], "GPT_REASON=" + reason).code == 0);
    CHECK(rented.taken("calls") == (reason == "stopped" || reason == "time" ? "scontrol requeue 5\n" : ""));
  }
  CHECK(rented.run(ends[1], "GPT_UPLOADED=0").code == 1);
  CHECK(rented.taken("calls") == "");
  CHECK(rented.run(ends[1], "GPT_UPLOADED=1").code == 0);
  CHECK(rented.taken("calls") == "scancel 5\n");
}

TEST_CASE("a budget") {
  if (!can_play) return skip(needed);
  Rented rented;
  const std::string hook = commands_of("Any machine", "--stop-when")[0];
  CHECK(rented.run(hook).code == 1);  // nothing has been written yet
  for (const auto& [cost, code] : std::map<std::string, int>{{"49.9999", 1}, {"50.0001", 0}, {"1234", 0}}) {
    put(rented.folder / "run/metrics.jsonl",
        "{\"step\": 1, \"cost\": 99}\n{\"step\": 2, \"cost\": " + cost + ", \"lost_s\": {\"data\": 77}}\n");
    CHECK_MESSAGE(rented.run(hook).code == code, cost);
  }
  put(rented.folder / "run/metrics.jsonl", "{\"step\": 2, \"val_loss\": 77}\n");
  CHECK(rented.run(hook).code == 1);
}
