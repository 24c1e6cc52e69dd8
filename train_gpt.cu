// train_gpt: the recipe. Trainer (gpt/trainer.cuh) has the parts of a run, gpt/processes_of_job.cuh starts and ends
// processes. `train_gpt --help` lists the options, README.md shows runs.
#include "gpt/processes_of_job.cuh"
#include "gpt/trainer.cuh"

namespace {

// Trains, and returns the exit code.
int train(Job& job) {
  Trainer t(job);  // data, model, state and checkpoints
  if (t.is_finished()) {
    std::printf("finished: %s\n", how_finished(t.state).c_str());
    return 0;
  }
  t.begin();
  end_job_on_error(job.ranks, [&] {
    while (!t.done()) {
      if (!t.step()) continue;  // it went back to a checkpoint
      if (t.validates()) t.validate();
      if (t.saves()) t.save();
      t.end_step();
    }
  }, [&] { t.log_started_steps(); });
  return t.finish();
}

}  // namespace

int main(int argc, char** argv) { return run_program(argc, argv, train); }
