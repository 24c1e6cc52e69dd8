// Command lines that are refused: checks that need only the words and the options. complete_options.cpp has those
// that need the number of ranks, the model and the data.
#pragma once

#include <CLI/CLI.hpp>

#include "gpt/options.h"

// Refuses an empty value of these options, which is most likely a shell variable that is not set, and for the same
// reason another option in the place of a value (`--out $OUT --shuffle`). CLI11 reads `--resume ''` like --resume, and
// takes the next word as the value of `--init=`.
void refuse_missing_values(const CLI::App& app, int argc, char** argv);

// Refuses options that were given.
class Refusals {
 public:
  explicit Refusals(const CLI::App& app) : app_(app) {}
  // If `wrong`, the first of these that was given ends the program, with its value, unless it may be a secret, and `why`.
  void operator()(bool wrong, std::initializer_list<const char*> flags, const std::string& why) const;
  bool given(const char* flag) const { return app_.count(flag) > 0; }

 private:
  const CLI::App& app_;
};

// Refuses options that say nothing without another one, or beside it. All have been parsed.
void refuse_together(const CLI::App& app, const Options& options);
