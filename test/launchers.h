// The variables that launchers set, and a process that has these alone.
#pragma once

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "test/ranks.h"

using Variables = std::vector<std::pair<std::string, std::string>>;

inline void set_environment(const Variables& variables) {
  clearenv();
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
}

inline Variables operator+(Variables a, const Variables& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

inline const Variables mpirun = {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"PMIX_RANK", "1"}};
inline const Variables torchrun = {
    {"RANK", "1"}, {"LOCAL_RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "n1"}, {"MASTER_PORT", "29500"}};
inline const Variables batch = {{"SLURM_JOB_ID", "1234"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}};
inline const Variables srun = {{"SLURM_JOB_ID", "1234"},      {"SLURM_STEP_ID", "2"},
                        {"SLURM_NTASKS", "4"},         {"SLURM_PROCID", "3"},
                        {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_STEP_NODELIST", "gpu[07-09,12]"}};
inline const Variables agent_listens = {{"TORCHELASTIC_USE_AGENT_STORE", "True"}};

// What a process with these variables alone prints, or its error.
template <class Text>
std::string printed_with(const Variables& variables, Text text) {
  Processes process(1, [&](int) {
    set_environment(variables);
    std::printf("%s", std::string(text()).c_str());
    std::fflush(stdout);
  });
  return process.wait()[0].printed;
}

// Such a process ends with one line, which has all these parts.
template <class Text, class... Parts>
void check_refused(const Variables& variables, Text text, const Parts&... parts) {
  const std::string error = printed_with(variables, text);
  INFO(error);
  CHECK(error.starts_with("train_gpt: "));
  CHECK(lines(error) == 1);
  for (const std::string& part : {std::string(parts)...}) CHECK_MESSAGE(contains(error, part), part);
}
