// The command line: every option with its default, in named groups, and the checks that need only the options.
// A wrong option throws UsageError, which ends the program with exit code 2. `--help all` lists all options, `--help` the core's,
// `--help ROOM` those of a room (gpt/room.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gpt/base/error.h"
#include "gpt/room.h"
#include "gpt/schedule.h"
#include "gpt/step_options.h"

struct Options : StepOptions, RoomOptions {
  static constexpr size_t most_steps = 1'000'000'000;

  std::vector<std::string> words;  // of the command line, the program's name first, without those of private rooms

  std::vector<std::string> train, val_words;
  std::vector<std::pair<std::string, std::vector<std::string>>> val;  // the key of each set's loss in metrics, and its files
  bool shuffle = false;

  std::string model = "d4";
  bool is_dtype_chosen = false;  // by a room, for devices elsewhere
  bool model_given = false;
  ModelShape wanted = {};  // 0: not given
  std::string init;
  bool attention_given = false;  // by a name other than auto
  bool resume = false;
  std::string resume_from;

  int samples_alone = 0;  // of a step of one rank, if the number of ranks determines global_batch; 0: --global-batch does
  LearningRateSchedule schedule;
  bool steps_given = false;
  double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, grad_clip = 1.0;

  int logit_chunks = 0;
  double loss_scale = 65536;
  int loss_scale_window = 2000;

  std::string out = "runs/gpt";
  bool overwrite = false;
  size_t checkpoint_every = 0, keep = 3, val_every = 0, val_batches = 10, log_every = 1;

  double train_minutes = 0;

  size_t sample_every = 0;
  double sample_seconds = 0;
  bool samples_in_training() const { return sample_every > 0 || sample_seconds > 0; }
  int samples = 1;
  bool no_cache = false;

  bool share_gpu = false;
  size_t check_sync = 0;
  bool random_biases = false;  // they begin with random numbers instead of 0, for --check-mesh

  bool plan = false;          // nothing is trained, and there may be no data
  bool chooses_mesh = false;  // a room chooses how ranks split the work

  uint64_t seed = 1337;
};

constexpr int most_samples = 1 << 24;  // per step
// The limits of a launch (kernels/README.md): samples at a time, and their rows.
constexpr int most_micro_batch = 65'535, most_rows = 64 * 65'535;

// Fails with this problem as the message, unless it is empty.
inline void refuse(const std::string& problem) {
  if (!problem.empty()) usage_error(problem);
}

// A command line's options of private rooms, and its other words. Says no mistake.
std::pair<RoomOptions, std::vector<std::string>> split_private(std::vector<std::string> words);

// Is it a word that asks for help?
inline bool asks_for_help(const std::string& word) { return word == "--help" || word == "-h"; }
// Returns none if --help was given; it has been printed then.
std::optional<Options> parse_options(int argc, char** argv);

// ---- the meaning of several options together

// The names of GPT-3's models (arXiv:2005.14165), from small to large.
std::vector<std::string> gpt3_models();

// The shape that the options give. data_vocabulary: the vocabulary if no option gives one. Fills in o.seq_len.
ModelShape shape_of(Options& o, int data_vocabulary);

// Fails if an option asks for another shape than the loaded one (--init, --resume). The default model is no such
// option.
void check_loaded_shape(const Options& o, const ModelShape& loaded, const std::string& folder);

// Checks the batch and the schedule for this number of ranks, and fills in defaults that follow from other options.
void complete_options(Options& o, int ranks);
