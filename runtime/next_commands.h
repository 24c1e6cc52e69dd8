// What to try after a run: commands for a shell in the folder where the run was started.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>

#include "runtime/console.h"
#include "runtime/options.h"

// The command line of this run, without what would start it anew, for a run that goes on to `steps` steps.
inline std::string longer_run(const std::vector<std::string>& words, size_t steps) {
  std::string text = quoted(words[0]);
  for (size_t i = 1; i < words.size(); ++i) {
    const std::string flag = words[i].substr(0, words[i].find('='));
    const bool has_value = flag == "--steps" || flag == "--train-minutes" || flag == "--resume";  // that of --resume may be missing
    if (!has_value && flag != "--overwrite") text += ' ' + quoted(words[i]);
    else if (has_value && flag == words[i] && i + 1 < words.size() && !words[i + 1].starts_with("--")) ++i;
  }
  return text + " --resume --steps " + std::to_string(steps);
}

// dev/plot.py in the folder where the program was started, or beside the program, or above the build folder. Empty: it is not there.
inline std::string plot_script() {
  const std::filesystem::path script = "dev/plot.py", program = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  for (const std::filesystem::path& path : {script, program / script, program / "../.." / script})
    if (std::filesystem::is_regular_file(path)) return path.lexically_normal();
  return "";
}

inline std::string next_commands(const Options& o, int ranks) {
  const std::string dtype = o.dtype == "fp32" ? "" : " --dtype " + o.dtype, out = quoted(o.out), script = plot_script();
  return "to sample " + quoted(o.words[0]) + " --generate --resume " + out + " --seq-len " + std::to_string(o.seq_len) + dtype +
         "\nto extend " + longer_run(o.words, std::min(2 * o.schedule.steps, Options::most_steps)) + (ranks > 1 ? "   (on every rank)" : "") +
         (script.empty() ? "" : "\nto plot   python3 " + quoted(script) + ' ' + out) + '\n';
}
