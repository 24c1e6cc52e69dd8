// --plan --recipe: the files that start a planned run. Slurm itself takes one in test/cluster/recipe.sh, and the packages
// of Kubernetes and SkyPilot check theirs there.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include "test/skip.h"
#include "test/workplace.h"

namespace {

// The bash code in a recipe, with a program in the place of the launcher that prints each of its words in brackets.
std::string words_of(const Workplace& shell, const std::string& file) {
  shell.output("mkdir -p dev/cluster && printf 'printf \"[%%s]\\\\n\" \"$@\"\\n' > dev/cluster/launcher && chmod +x dev/cluster/launcher");
  return shell.output("sed -n 's/^ *exec \\(bash \\)\\{0,1\\}[^ ]* /exec bash dev\\/cluster\\/launcher /p' " + file + " | bash");
}

// Does it lack the ?conditions and @fields@ of templates?
bool is_filled(const std::string& text) {
  return !contains(text, "\n?") && !contains(text, "@c") && !contains(text, "s@\n") && !text.starts_with("?");
}

}  // namespace

TEST_CASE("--recipe: stdout has the file alone, stderr the plan, and the options reach train_gpt as they were given") {
  Workplace shell;
  const std::string odd = " --prompt $'it\\'s \"$HOME\" @nodes@\\n\\xc3\\xa4 `x` $$' --train 'a *.bin'";
  const std::string plan = "$GPT --plan --model gpt2 --cluster 16x8xh100 --ranks 16 --tp 2 --micro-batch 8 --steps 7 --overwrite" + odd;
  for (const char* name : {"slurm", "kubernetes", "skypilot"}) {
    CAPTURE(name);
    const Result result = shell("cat > command <<'END'\n" + plan + " --recipe " + name + "\nEND\nbash command > file");
    CHECK(result.code == 0);
    CHECK(result.out == "");
    CHECK(result.error.starts_with("data      are not here"));
    CHECK(contains(result.error, "\nfits      yes: "));
    CHECK(contains(result.error, "\ntime      "));
    const std::string file = shell.content("file");
    CHECK(!contains(file, "fits "));
    CHECK(is_filled(file));
    const std::string words = words_of(shell, "file");
    CHECK(contains(words, "[--prompt]\n[it's \"$HOME\" @nodes@\n\xc3\xa4 `x` $$]\n[--train]\n[a *.bin]\n"));
    CHECK(contains(words, "[--model]\n[gpt2]\n[--steps]\n[7]\n"));
    CHECK(contains(words, "[--micro-batch]\n[8]\n[--tp]\n[2]\n[--resume]\n[--checkpoint-every]\n"));
    CHECK(contains(words, "[--dtype]\n[bf16]\n"));
    for (const char* left_out : {"--plan", "--recipe", "--cluster", "--ranks", "--overwrite", "mpirun"})
      CHECK(!contains(words, "[" + std::string(left_out) + "]"));
    const std::string command = file.substr(file.find("exec "), file.find('\n', file.find("exec ")) - file.find("exec "));
    CHECK(std::all_of(command.begin(), command.end(), [](char c) { return c >= ' ' && c <= '~'; }));
  }
}

TEST_CASE("--recipe: hosts, devices, spot, image; hooks by their variables, without a secret") {
  Workplace shell;
  const auto recipe = [&](const std::string& options, const std::string& variables = "") {
    return shell.output(variables + " $GPT --plan --model gpt2 --steps 9 --recipe " + options + " 2>plan");
  };
  const std::string slurm = recipe("slurm --cluster 16x8xh100 --ranks 16");
  CHECK(slurm.starts_with("#!/usr/bin/env bash\n# Trains on 2 × 8 H100 (16x8xh100)"));
  for (const char* line : {"--nodes=2", "--ntasks-per-node=8", "--gres=gpu:8", "--requeue", "--signal=USR1@180"})
    CHECK(contains(slurm, "\n#SBATCH " + std::string(line) + "\n"));
  CHECK(contains(slurm, "\nexec bash dev/cluster/slurm.sbatch --model gpt2 --steps 9 "));
  CHECK(contains(recipe("slurm --cluster 8xh100", "GPT_IMAGE=gpt.sif"), " exec --nv gpt.sif train_gpt --model gpt2 "));

  const std::string kubernetes = recipe("kubernetes --cluster 8xh100", "GPT_IMAGE=registry/me/gpt.cu:1");
  for (const char* part : {"completions: 1\n", "nvidia.com/gpu: 8\n", "image: registry/me/gpt.cu:1\n", "[NVIDIA-H100-80GB-HBM3]", "[75]",
                           "gke-spot", "/opt/gpt.cu/dev/cluster/torchrun.sh 8 --model gpt2 "})
    CHECK_MESSAGE(contains(kubernetes, part), part);
  CHECK(!contains(recipe("kubernetes --cluster 16x8xh100"), "gke-spot"));  // no spot price is known
  CHECK(contains(recipe("skypilot --cluster 16x8xh100 --ranks 32"), "\n  accelerators: H100:8\n  image_id: docker:gpt.cu\n"));
  CHECK(contains(recipe("skypilot --cluster 8xh100"), "\n  accelerators: H100:8\n  use_spot: true\n"));
  CHECK(contains(recipe("skypilot --cluster 16x8xh100 --ranks 32"), "\nnum_nodes: 4\n"));

  shell.output("echo '{\"name\": \"mine\", \"device\": {\"name\": \"New GPU\", \"bf16_tflops\": 1, \"fp32_tflops\": 1, \"memory_tb_per_s\": 1, "
               "\"memory_gib\": 99}, \"devices_per_host\": 1, \"hosts\": 1}' > mine.json");
  CHECK(contains(recipe("skypilot --cluster mine.json"), "\n  accelerators: WRITE-ITS-NAME-INTO-runtime/planner/recipes/devices:1\n"));
  CHECK(contains(recipe("slurm --cluster mine.json"), "\n#SBATCH --gres=gpu:1\n"));

  for (const char* name : {"slurm", "kubernetes", "skypilot"}) {
    CAPTURE(name);
    const std::string hooks = " --after-checkpoint 'curl -H key=SECRET x' --stop-when=SECRET --hook-timeout 9";
    const std::string file = recipe(name + std::string(" --cluster 8xh100") + hooks);
    CHECK(!contains(file + shell.content("plan"), "SECRET"));
    CHECK(contains(file, " --after-checkpoint \"${GPT_AFTER_CHECKPOINT:?is not set: see the top of this file}\""));
    CHECK(contains(file, " --stop-when \"${GPT_STOP_WHEN:?"));
    CHECK(contains(file, " --hook-timeout 9"));
    CHECK(!contains(file, "GPT_ON_END"));
    const std::string without_hooks = recipe(name + std::string(" --cluster 8xh100"));
    for (const char* hook : {"GPT_AFTER_CHECKPOINT", "--hook-timeout"}) CHECK(!contains(without_hooks, hook));
  }
  shell.output("mkdir -p runtime/planner/recipes && echo env > runtime/planner/recipes/recipe.sh");
  const std::string told = recipe("slurm --cluster 8xh100 --after-checkpoint SECRET --stop-when SECRET --on-end SECRET");
  CHECK(contains(told, "\nafter_checkpoint=true\n"));
  CHECK(!contains(told, "SECRET"));
  shell.output("rm -r runtime");

  if (is_gpu_build()) return skip("the CPU device is not here");
  const std::string here = recipe("slurm --vocab 256 --ranks 2");
  CHECK(contains(here, "\n#SBATCH --ntasks-per-node=2\n"));
  CHECK(!contains(here, "--gres"));
  CHECK(!contains(here, "--checkpoint-every"));  // nothing is known of the time
  CHECK(contains(recipe("kubernetes --vocab 256 --ranks 2"), "/mpirun.sh 2 "));
}

TEST_CASE("--recipe --row: a row of the plan's table, which has its number") {
  Workplace shell;
  const std::string search = "$GPT --plan --model gpt2 --mesh auto --cluster 4x4090 --global-batch 64 ";
  const Json plan = Json::parse(shell.output(search + "--json"));
  for (const auto& [row, list, number] : {std::tuple(1, "fastest", 0), {3, "fastest", 2}, {12, "cheapest", 1}}) {
    CAPTURE(row);
    const std::string command = plan[list][size_t(number)]["command"];
    const std::string file = shell.output(search + "--recipe slurm --row " + std::to_string(row) + " 2>plan");
    CHECK(contains(file, "slurm.sbatch " + command.substr(command.find("--model")) + " --resume "));
    const std::string ranks = std::to_string(plan[list][size_t(number)]["ranks"].get<int>());
    CHECK(contains(file, "#SBATCH --gres=gpu:" + ranks + "\n"));
    CHECK(contains(shell.content("plan"), "\n" + std::string(row < 10 ? "            " : "           ") + std::to_string(row) + "   4x4090  "));
  }
  CHECK(contains(shell.output("$GPT --plan --days 9 --model gpt3-350m --recipe skypilot --row 2 2>plan"), "\nname: train-gpt\n"));

  shell.refuses("$GPT --recipe slurm", 2, {"--recipe slurm", "is for --plan"});
  shell.refuses("$GPT --plan --recipe pbs", 2, {"pbs", "slurm", "kubernetes", "skypilot"});
  shell.refuses("$GPT --plan --cluster 4x4090 --mesh auto --row 2", 2, {"--row 2", "--recipe"});
  shell.refuses("$GPT --plan --cluster 4x4090 --recipe slurm --row 2", 2, {"--row 2", "--mesh auto"});
  shell.refuses("$GPT --plan --cluster 4x4090 --recipe slurm --row 0", 2, {"--row", "0"});
  const auto last_line = [&](const std::string& command) {
    const Result result = shell(command + " | cat > out 2>&1; exit ${PIPESTATUS:-0}");
    CHECK(shell.content("out") == "");
    return result.error.substr(result.error.rfind('\n', result.error.size() - 2) + 1);
  };
  CHECK(contains(last_line(search + "--recipe slurm --row 21"), "train_gpt: --recipe: 20 rows of the plan fit: there is no row 21"));
  CHECK(contains(last_line("$GPT --plan --cluster 4x4090 --model gpt3-175b --recipe slurm"), "0 rows of the plan fit"));
  CHECK(contains(last_line("$GPT --plan --cluster 16x8xh100 --ranks 12 --recipe slurm"), "12 ranks do not fill hosts of 8: change --ranks"));
  CHECK(contains(last_line("$GPT --plan --cluster 8xa100-80 --model gpt3-13b --days 1 --recipe slurm"), "row 1 does not meet --days 1"));
  CHECK(shell("$GPT --plan --cluster 4x4090 --recipe slurm > /dev/full").code == 1);
}

TEST_CASE("the container: Apptainer's definition runs the commands of the Dockerfile's GPU image, from the same base") {
  std::ifstream dockerfile("dev/cluster/container/Dockerfile"), definition("dev/cluster/container/gpt.cu.def");
  const std::string def((std::istreambuf_iterator<char>(definition)), {});
  std::string version, stage;
  int commands = 0;
  for (std::string line; std::getline(dockerfile, line);) {
    if (line.starts_with("ARG CUDA=")) version = line.substr(9);
    if (line.starts_with("FROM ")) stage = line.substr(line.rfind(' ') + 1);
    if (!stage.starts_with("gpu")) continue;
    CAPTURE(line);
    if (line.starts_with("FROM ")) {
      std::string image = line.substr(5, line.find(" AS ") - 5);
      image.replace(image.find("${CUDA}"), 7, version);
      CHECK(contains(def, "\nFrom: " + image + "\nStage: " + stage + "\n"));
    }
    commands += line.starts_with("RUN ");
    CHECK((!line.starts_with("RUN ") || contains(def, "\n  " + line.substr(4) + "\n")));
    CHECK((!line.starts_with("ARG ") || contains(def, ' ' + line.substr(4))));
  }
  CHECK(commands == 5);
  // Apptainer copies one file or folder a line; what the program is made of is all of these.
  std::istringstream files(def.substr(def.find("%files\n") + 7, def.find("\n\n", def.find("%files\n")) - def.find("%files\n") - 7));
  std::set<std::string> copied;
  for (std::string line; std::getline(files, line);) {
    std::istringstream words(line);
    std::string from, to, more;
    words >> from >> to;
    CAPTURE(line);
    CHECK((std::filesystem::exists(from) && to == "/opt/gpt.cu/" + from && !(words >> more)));
    copied.insert(from);
  }
  CHECK(copied == std::set<std::string>{"Makefile", "train_gpt.cu", "cpu", "dev", "extensions", "gpt", "kernels", "runtime"});
}
