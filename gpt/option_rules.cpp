#include "gpt/option_rules.h"

#include "gpt/base/error.h"

void refuse_missing_values(const CLI::App& app, int argc, char** argv) {
  const auto needs_value = [&](const CLI::Option* option) { return option && option->get_items_expected_min() > 0; };
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.starts_with("--") && word.find('=') == word.size() - 1)
      usage_error(word, " is followed by no value: give one, or leave the option out");
    if (needs_value(app.get_option_no_throw(word)) && i + 1 < argc && app.get_option_no_throw(argv[i + 1]))
      usage_error(word, " is followed by no value, but by ", argv[i + 1], ": give one (", word, "=", argv[i + 1],
                  " if that is meant)");
    for (const char* option : {"--cache", "--init", "--resume", "--ceilings", "--cluster", "--calibrate", "--merge", "--products",
                               "--trace", "--trace-tensors", "--after-checkpoint", "--stop-when", "--on-end"})
      if (word == option && i + 1 < argc && !*argv[i + 1]) usage_error(word, " '' names nothing: leave the option out");
  }
}

void refuse_together(const CLI::App& app, const Options& o) {
  const auto refuse = [&](bool wrong, std::initializer_list<const char*> flags, const std::string& why) {
    for (const char* flag : flags)
      if (const CLI::Option* option = app.get_option(flag); wrong && option->count() > 0)
        usage_error(flag, option->get_items_expected_min() > 0 && option->get_group() != "Hooks" ? ' ' + option->results().back() : "", ' ', why);
  };
  refuse(o.dtype != "fp16", {"--loss-scale", "--loss-scale-window"}, "keeps small gradients of fp16: it needs --dtype fp16");
  refuse(o.dtype == "fp16" && o.delay > 0, {"--delay"}, "beside --dtype fp16, whose loss scale may change before gradients are "
         "applied: choose --dtype bf16, or leave --delay out");
  refuse(o.dtype != "bf16", {"--stochastic-rounding"}, "rounds bf16 weights: it needs --dtype bf16");
  refuse(o.dtype != "bf16" && o.reduce_dtype == "bf16", {"--reduce-dtype"}, "needs --dtype bf16");
  refuse(o.compresses_gradients() && o.reduce_dtype == "bf16", {"--compress"}, "beside --reduce-dtype bf16: both say how gradients travel; leave one of them out");
  refuse(!o.compresses(), {"--compress-where"}, "is for --compress or --compress-weights: add one of them, or leave it out");
  refuse(o.low_rank() > 0, {"--compress-where"}, "beside --compress " + o.compress + ": factors are added up over all data-parallel ranks; leave one of them out");
  const bool searches = !o.mesh_search.empty() || o.has_goal();
  if (o.compress_weights != "none") {
    refuse(o.zero == 0 && !searches, {"--compress-weights"}, "is for weights that ranks gather: add --zero 1, 2 or 3, or leave it out");
    refuse(o.stochastic_rounding, {"--compress-weights"}, "beside --stochastic-rounding: its weights have no masters; leave one of them out");
    refuse(o.offloads("optimizer"), {"--compress-weights"}, "beside --offload " + o.offload + ": it reads the masters, which are not on the device; leave one of them out");
    refuse(o.lora.is_on(), {"--compress-weights"}, "beside --lora-rank is not there yet: leave one of them out");
  }
  refuse(o.dtype != "bf16", {"--fp8"}, "multiplies what is kept in bf16: it needs --dtype bf16");
  refuse(o.generate, {"--fp8"}, "beside --generate: it is for training, and texts are drawn in --dtype; leave it out");
  refuse(o.generate, {"--moments", "--offload", "--delay", "--compress", "--compress-weights"}, "beside --generate: it is for training; leave it out");
  refuse(!o.fp8, {"--fp8-gradients", "--fp8-scale", "--fp8-keep"}, "is for --fp8: add that, or leave it out");
  refuse(!o.merge.empty(), {"--dtype", "--train"}, "beside --merge, which writes a model in fp32 and trains nothing: leave it out");
  refuse(!o.lora.is_on(), {"--lora-alpha", "--lora-targets"}, "is for --lora-rank: add that, or leave it out");
  refuse(o.lora.is_on(), {"--fp8", "--check-mesh", "--calibrate"}, "beside --lora-rank is not there yet: leave one of them out");
  refuse(o.cache.empty(), {"--cache-size"}, "is for --cache DIR: add that, or leave it out");
  refuse(o.val.empty() && o.val_every > 0, {"--val-every"}, "needs --val FILES");
  refuse(o.val.empty(), {"--keep-best"}, "needs --val FILES");
  refuse(o.patience > 0 && (o.val.empty() || !o.val_every), {"--patience"}, "needs --val FILES and --val-every N");
  refuse(!o.plan, {"--ranks", "--json", "--days", "--budget", "--checkpoint-seconds", "--recipe"},
         "is for --plan: add that, or leave it out");
  refuse(o.plan, {"--generate", "--resume"}, "beside --plan: a plan is for training from the start; leave one of them out");
  refuse(o.plan || o.generate, {"--check-mesh"}, "compares steps of training: leave it out");
  refuse(!o.calibrate.empty(), {"--plan", "--generate", "--resume", "--trace", "--trace-tensors", "--after-checkpoint",
                                "--stop-when", "--on-end"},
         "beside --calibrate, which measures a few steps from the start: leave one of them out");
  refuse(o.generate, {"--cluster"}, "beside --generate: a forecast is for training; leave one of them out");
  const std::string search = !o.mesh_search.empty() ? "--mesh auto" : o.days > 0 ? "--days" : "--budget";
  refuse(searches, {"--generate"}, "beside " + search + ": a mesh is chosen for training; leave one of them out");
  refuse(o.recipe.empty(), {"--row"}, "is the row that --recipe starts: add that, or leave it out");
  refuse(!searches, {"--row"}, "needs --mesh auto, --days or --budget: without them a plan has no table");
  refuse(searches, {"--tp", "--tp-pieces", "--cp", "--cp-method", "--pp", "--pp-schedule", "--pp-chunks", "--zero",
                    "--shares", "--islands", "--local-steps", "--micro-batch", "--recompute"}, "beside " + search + ": the search chooses that; leave one of them out");
  refuse(o.has_goal(), {"--mesh", "--ranks", "--ceilings", "--train-minutes"},
         "beside --days or --budget: a goal is planned for all ways to rent a cluster; leave one of them out");
  refuse(o.hooks.after_checkpoint.empty() && o.hooks.on_end.empty(), {"--hook-timeout"}, "needs --after-checkpoint or --on-end");
  refuse(o.out.empty(), {"--keep-best", "--after-checkpoint", "--stop-when", "--on-end"}, "needs a run folder, and --out '' names none");
  refuse(o.generate, {"--after-checkpoint", "--stop-when", "--on-end"}, "beside --generate: hooks are for training");
  refuse(!o.generate, {"--samples"}, "needs --generate: training writes one sample at a time");
  refuse(!o.generate && !o.samples_in_training(), {"--no-cache"},
         "needs --generate, --sample-every or --sample-seconds: nothing else has a cache");
  refuse(app.count("--steps"), {"--train-minutes"}, "beside --steps: both say how long to train; give one of them");
  refuse(o.mesh.tp == 1, {"--tp-pieces"}, "needs --tp: with one rank for a layer no row is sent");
  const bool is_outer = o.outer.is_on();
  refuse(!is_outer, {"--islands"}, "needs --local-steps: after how many updates the islands meet");
  refuse(!is_outer, {"--outer-lr", "--outer-momentum", "--outer-dtype", "--outer-delay"}, "is for --local-steps: add that, or leave it out");
  refuse(is_outer, {"--shares", "--calibrate", "--check-mesh", "--stochastic-rounding", "--delay", "--compress", "--compress-weights"}, "beside --local-steps is not there yet: leave one of them out");
  refuse(is_outer && o.outer.delay >= o.outer.local_steps, {"--outer-delay"},
         concat("beside --local-steps ", o.outer.local_steps, ": an outer step has to end before the next one begins; choose ", o.outer.local_steps - 1, " or less"));
  refuse(o.outer.delay > 0, {"--sample-seconds"}, "beside --outer-delay: outer steps wait for samples, and a clock would change what is learned; choose --sample-every");
  refuse(is_outer && o.dtype == "fp16", {"--dtype"}, "beside --local-steps is not there yet, as each island would have a loss scale of its own: choose bf16");
  refuse(is_outer && o.dtype != "fp32" && o.offloads("optimizer"), {"--offload"}, "beside --local-steps is not there yet, as masters would be in the host's memory: choose activations only");
  refuse(is_outer && o.guard.on_spike == "rollback", {"--on-spike"}, "beside --local-steps: a spike is one island's, and the others would lose good steps; choose skip");
  refuse(o.generate, {"--shares"}, "beside --generate: shares are of training; leave one of them out");
  refuse(o.mesh.cp == 1, {"--cp-method"}, "needs --cp: with one rank for a sample no token is elsewhere");
  refuse(o.mesh.pp == 1, {"--pp-schedule", "--pp-chunks"}, "needs --pp: with one stage there is no pipeline");
  refuse(o.pp_schedule != "interleaved", {"--pp-chunks"},
         "needs --pp-schedule interleaved: with " + o.pp_schedule + " a stage has one chunk");
}
