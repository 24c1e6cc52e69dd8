// --lora-rank: the line that says how much is trained.
#pragma once

#include "extensions/lora/lora.h"
#include "gpt/training_run.cuh"

class LoraHook : public StepHook {
 public:
  using StepHook::StepHook;

  std::string description() override {
    return concat("adapters  ", text_of(run_.o.lora), ": ", with_commas(double(run_.model->trained_tensors().parameters())),
                  " parameters, and nothing else is trained\n");
  }
};

inline std::unique_ptr<StepHook> lora_hook(TrainingRun& run) { return run.o.lora.is_on() ? std::make_unique<LoraHook>(run) : nullptr; }
