#include "gpt/option_list.h"

#include <charconv>
#include <system_error>
#include <type_traits>

#include "extensions/pipeline/pipeline.h"
#include "gpt/base/text.h"

namespace {

// Checks that the text is a number within the range. CLI11's own checks are not enough: it reads -1 as 2^64 - 1, an
// empty text as 0 and 010 as 8, and its ranges accept NaN.
template <class Number>
auto in_range(Number least, Number most) {
  return [least, most](const std::string& text) {
    Number number{};
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    const bool fits = error == std::errc() && stop == end && least <= number && number <= most;
    constexpr bool is_whole = std::is_integral_v<Number>;
    if (!fits) return concat(excerpt(text), " is no ", is_whole ? "whole " : "", "number from ", least, " to ", most);
    if (!is_whole || text.size() == 1 || text[0] != '0') return std::string();
    return concat(excerpt(text), " begins with 0, as octal numbers do: write ", number);
  };
}

// CLI11's IsMember, but for its error, "fp8 not in {...}": ours sound like this one. names: a list, or the keys of a
// map
template <class Names = std::vector<std::string>>
CLI::Validator one_of(const Names& names) {
  return CLI::Validator([list = CLI::IsMember(names)](const std::string& text) {
    return list(text).empty() ? "" : excerpt(text) + " is unknown: give one of " + list.get_description();
  }, CLI::IsMember(names).get_description());
}

const CLI::Validator compressed([](const std::string& text) {
  if (text.starts_with("powersgd:")) return in_range(1, most_low_rank)(text.substr(9));
  return text == "none" || code_bits(text) ? std::string() : excerpt(text) + " is unknown: give one of {none,int8,int4,powersgd:R}";
}, "{none,int8,int4,powersgd:R}");

// A list with commas of what --offload can move.
const CLI::Validator offloaded([](const std::string& text) {
  for (const std::string& word : words_of(text))
    if (word != "optimizer" && word != "activations" && word != "gradients" && text != "none")
      return excerpt(text) + " is unknown: give optimizer, activations, gradients, several with commas, or none";
  return std::string();
}, "LIST");

// A list with commas of words that each pass a check.
template <class Check>
auto list_of(const Check& check) {
  return [check](const std::string& list) {
    for (std::string& word : words_of(list))
      if (const std::string problem = check(word); !problem.empty()) return problem;
    return std::string();
  };
}

const auto count = in_range(size_t(0), Options::most_steps), positive = in_range(size_t(1), Options::most_steps);

// Adds an option whose value is checked as text.
template <class Value, class Check>
CLI::Option* add(CLI::App& app, const char* flag, Value& value, const Check& check, const char* help) {
  return app.add_option(flag, value, help)->check(check);
}

void add_data_and_model_options(CLI::App& app, Options& o) {
  app.option_defaults()->group("Data");
  const auto add_files = [&](const char* flag, std::vector<std::string>& files, const char* help) {
    app.add_option(flag, files, help)->type_name("FILES ...")->default_str("")->expected(1, 1 << 20)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  };
  add_files("--train", o.train, "files or quoted globs: .bin token shards, or text (bytes as tokens)");
  add_files("--val", o.val_words, "the same, for validation; NAME=FILES ... NAME=FILES ...: several sets (a file a=b: ./a=b)");
  app.add_flag("--shuffle", o.shuffle, "permute the samples of each epoch by --seed");
  app.add_option("--cache", o.cache, "folder on a local disk that keeps what was read, where the data are on slow storage")
      ->type_name("DIR");
  add(app, "--cache-size", o.cache_size, in_range(0.01, 1e6), "GB that it takes at most; a twentieth of the disk stays free");

  app.option_defaults()->group("Model");
  app.add_option("--model", o.model, "gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt3-125m, gpt3-350m, gpt3-760m, "
                 "gpt3-1.3b, gpt3-2.7b, gpt3-6.7b, gpt3-13b, gpt3-175b, or dN: N layers, 64·N channels");
  add(app, "--layers", o.layers, in_range(1, ModelShape::most_layers), "instead of the model's");
  add(app, "--heads", o.heads, in_range(1, ModelShape::most_channels),
      "instead of the model's; a head has 16 to 128 channels");
  add(app, "--channels", o.channels, in_range(1, ModelShape::most_channels), "instead of the model's");
  add(app, "--vocab", o.vocabulary, in_range(2, ModelShape::most_vocabulary),
      "vocabulary (default: 256 for text, 50257 for .bin)");
  add(app, "--positions", o.positions, in_range(1, ModelShape::most_positions),
      "longest sequence (default: 1024 for gpt2, 2048 for gpt3, else --seq-len)");
  app.add_option("--init", o.init, "start from the weights of a Hugging Face GPT-2 folder")->type_name("DIR");
  add(app, "--dtype", o.dtype, one_of({"fp32", "bf16", "fp16"}), "fp32, bf16 or fp16 (weights, activations; sums and "
      "optimizer state stay fp32); a plan for other devices is for bf16");
  app.add_flag("--stochastic-rounding", o.stochastic_rounding, "bf16 weights without fp32 master copies");
  add(app, "--moments", o.moments, one_of({"fp32", "bf16"}), "fp32 or bf16 (rounded stochastically): AdamW's moments");
  app.add_flag("--fp8", o.fp8, "with --dtype bf16: products of blocks in eight bits (e4m3), faster for wide blocks on "
               "cards from 8.9 on; --plan says whether it pays");
  add(app, "--fp8-gradients", o.fp8_gradients, one_of({"e5m2", "e4m3"}),
      "e5m2 (range) or e4m3 (precision): the eight bits of gradients");
  add(app, "--fp8-scale", o.fp8_scale, one_of({"tensor", "tiles"}),
      "tensor, or tiles: a scale for each 128 numbers (weights: 128 x 128), which one large number spoils less; on Hopper alone");
  add(app, "--fp8-keep", o.fp8_keep, in_range(0, ModelShape::most_layers / 2), "first and as many last blocks that stay in bf16");
  add(app, "--lora-rank", o.lora.rank, in_range(0, 4096),
      "train adapters of this rank (LoRA) beside the weights of --init, which stay as they are; 0: train all weights");
  add(app, "--lora-alpha", o.lora.alpha, in_range(1e-3, 1e6), "adapters count alpha / rank times (default: twice the rank)")
      ->default_str("");
  add(app, "--lora-targets", o.lora_targets, list_of(one_of({"qkv", "projection", "up", "down"})),
      "linear layers that have an adapter, with commas between them")->type_name("NAMES");
  add(app, "--logit-chunks", o.logit_chunks, in_range(0, 1 << 20),
      "parts in which the rows of logits are computed, to save memory; 0: parts of at most 16,384 rows");
  add(app, "--recompute", o.recompute, one_of({"none", "gelu", "block"}),
      "none, gelu or block: what backward computes again to save memory");
  add(app, "--offload", o.offload, offloaded, "what lives in the host's pinned memory, and comes to the device for its use: "
      "optimizer (masters, moments), activations (inputs of blocks, with --recompute block), gradients (with optimizer, and on "
      "several ranks --zero 3), several with commas, or none");
  add(app, "--attention", o.attention, one_of({"auto", "cudnn", "own", "hopper"}),
      "cudnn, own (our kernels), hopper (ours for H100 and H200), or auto: as the run began, else hopper there in 16 bits, else "
      "cudnn where it is compiled in and can");
}

void add_training_options(CLI::App& app, Options& o) {
  const auto rate = in_range(0., 1e3);
  const auto decay = in_range(0., 0.99999);
  LearningRateSchedule& s = o.schedule;
  app.option_defaults()->group("Batch");
  add(app, "--seq-len", o.seq_len, in_range(1, ModelShape::most_positions),
      "tokens a sample (default: 1024 for gpt2, 2048 for gpt3, else 256)");
  add(app, "--micro-batch", o.micro_batch, in_range(1, most_micro_batch), "samples at a time on each rank");
  add(app, "--global-batch", o.global_batch, in_range(1, most_samples),
      "samples a step on all ranks (default: a micro-batch for each group of --tp · --cp ranks)");

  app.option_defaults()->group("Optimizer");
  add(app, "--steps", s.steps, positive, "updates");
  add(app, "--train-minutes", o.train_minutes, in_range(0.001, 1e7),
      "instead of --steps: as many as fit, by a few that are measured first");
  add(app, "--lr", s.lr, rate, "learning rate");
  add(app, "--min-lr", s.min_lr, rate, "rate that cosine ends at");
  add(app, "--warmup", s.warmup, count, "steps of linear warm-up");
  app.add_option("--schedule", s.kind, "cosine, wsd or constant");
  add(app, "--cooldown", s.cooldown, count, "last steps of wsd, in which the rate falls; wsd needs it");
  add(app, "--weight-decay", o.weight_decay, rate, "of matrices and embeddings");
  add(app, "--beta1", o.beta1, decay, "AdamW's first decay rate");
  add(app, "--beta2", o.beta2, decay, "AdamW's second decay rate");
  add(app, "--eps", o.epsilon, in_range(1e-30, 1.), "AdamW's epsilon");
  add(app, "--grad-clip", o.grad_clip, in_range(0., 1e30), "largest gradient norm; 0: no clipping");
  add(app, "--loss-scale", o.loss_scale, in_range(1., double(1 << 24)),
      "fp16: what the loss is multiplied by at first; halved on overflow");
  add(app, "--loss-scale-window", o.loss_scale_window, in_range(0, 1'000'000'000),
      "fp16: steps without overflow that double it; 0: never, nor halved");
}

void add_run_options(CLI::App& app, Options& o) {
  app.option_defaults()->group("Run");
  app.add_option("--out", o.out, "folder for metrics and checkpoints; '' writes nothing")->type_name("DIR");
  app.add_option("--resume", o.resume_from, "continue from the newest checkpoint in --out, or from DIR")
      ->expected(0, 1)->type_name("[DIR]");
  app.add_flag("--overwrite", o.overwrite, "replace the run in --out");
  add(app, "--checkpoint-every", o.checkpoint_every, count, "steps between checkpoints; 0: only after the last");
  add(app, "--shard-size", o.shard_size, in_range(1e-6, 1e6), "GB of a checkpoint's file at most (or one tensor)");
  add(app, "--keep", o.keep, positive, "newest checkpoints kept");
  add(app, "--keep-every", o.keep_every, count, "and the checkpoints of every N-th step; 0: none");
  add(app, "--val-every", o.val_every, count, "steps between validations; 0: only after the last");
  add(app, "--val-batches", o.val_batches, positive, "global batches a validation, of each set");
  app.add_flag("--keep-best", o.keep_best, "save after each lowest val_loss so far; OUT/best links to that, --keep spares it");
  add(app, "--patience", o.patience, count, "validations in a row without a lower one that end the run; has --keep-best; 0: none");
  add(app, "--log-every", o.log_every, positive, "steps between lines on the terminal");
  add(app, "--monitor-every", o.monitor_every, in_range(0., 1e6),
      "seconds between looks at devices and hosts, for monitor.jsonl in --out, which name what stands out; 0: none");
  add(app, "--seed", o.seed, in_range(uint64_t(0), UINT64_MAX), "of weights, shuffling and sampling");
  app.add_flag("--profile", o.profile, "a table of time, bytes and FLOPs per kernel at the end");
  app.add_option("--products", o.products, "on GPUs: keeps the algorithms of products that were timed, so that the next "
                 "start times nothing and has the same bits; none: time nothing")->type_name("FILE");
  app.add_option("--ceilings", o.ceilings, "what dev/ceilings.cu measured on this device, for the table of --profile and "
                 "the time of --plan")->type_name("FILE");
  app.add_option("--trace", o.trace, "a timeline of kernels and collectives, for ui.perfetto.dev; grows step by step")
      ->type_name("FILE");
  app.add_option("--trace-tensors", o.trace_tensors, "sums and checksums of all that is written, for dev/compare.py")
      ->type_name("FILE");

  app.option_defaults()->group("Guards");
  GuardOptions& g = o.guard;
  add(app, "--on-spike", g.on_spike, one_of({"log", "skip", "rollback"}),
      "a loss or norm far above the last ones: log it and train on, skip the update, or roll back");
  add(app, "--spike-z", g.z, in_range(0.1, 1e6), "standard deviations above the mean that make a spike");
  add(app, "--spike-window", g.window, in_range(size_t(2), size_t(1) << 20),
      "steps trained on that mean and deviation are of");
  add(app, "--max-rollbacks", g.most_rollbacks, count, "after which another spike ends the run");
  add(app, "--max-skips", g.most_in_a_row, positive, "updates left out in a row that end the run");
  add(app, "--max-hours", o.max_hours, in_range(0., 1e6),
      "from its start, after which it ends the step, saves and ends with exit code 75; 0: no limit");
  add(app, "--price", o.price, in_range(0., 1e6), "of a rank's device for an hour, in any currency, for the bill");

  app.option_defaults()->group("Ranks");
  add(app, "--tp", o.mesh.tp, in_range(1, 1024),
      "ranks that split each layer between them; the others train on other samples");
  add(app, "--tp-pieces", o.tp_pieces, in_range(1, 64),
      "in which --tp sends rows: one travels while another is computed");
  add(app, "--cp", o.mesh.cp, in_range(1, 1024),
      "ranks that split each sample between them, so that none holds all its tokens");
  add(app, "--cp-method", o.cp_method, one_of({"ring", "ulysses"}),
      "ring: keys travel from rank to rank; ulysses: a rank has all tokens of some heads");
  add(app, "--pp", o.mesh.pp, in_range(1, ModelShape::most_layers),
      "pipeline stages, each of which has some of the layers, on ranks of its own");
  add(app, "--pp-schedule", o.pp_schedule, one_of(pipeline_schedules),
      "order of the stages' work: gpipe, 1f1b, interleaved or zb (zero bubble)");
  add(app, "--pp-chunks", o.pp_chunks, in_range(2, ModelShape::most_layers),
      "of layers, which each stage has in the interleaved schedule")->default_str("2");
  add(app, "--zero", o.zero, in_range(0, 3),
      "shared out over data-parallel ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too");
  add(app, "--shares", o.share_list, [](const std::string& list) { return list == "auto" ? "" : list_of(in_range(1, 1000))(list); },
      "of a step's micro-batches, one for each data-parallel rank: 3,3,2 where the third is slower; auto: by their speed "
      "(default: all the same)")->type_name("INT,...")->default_str("");
  add(app, "--delay", o.delay, in_range(0, 1), "steps after which gradients are applied; 1: a whole step hides their "
      "sums over ranks, and the curve is another one; takes a second array of gradients");
  add(app, "--islands", o.mesh.islands, in_range(1, 1024),
      "groups of ranks behind slow links, each of which makes --local-steps updates by itself (--tp, --cp and --pp are of one)");
  add(app, "--local-steps", o.outer.local_steps, in_range(1, 1'000'000),
      "updates after which the islands' weights are brought together, by an outer step")->default_str("");
  add(app, "--outer-lr", o.outer.lr, in_range(0.0, 10.0), "learning rate of outer steps; 1: the mean of the islands' weights, if there is no momentum");
  add(app, "--outer-momentum", o.outer.momentum, in_range(0.0, 0.999), "Nesterov's momentum of outer steps");
  add(app, "--outer-dtype", o.outer.dtype, one_of({"fp32", "int8", "int4"}),
      "in which islands send each other: weights in fp32, or changes as codes of 8 or 4 bits");
  add(app, "--outer-delay", o.outer.delay, in_range(0, 1'000'000), "updates that islands make while outer steps travel, less than "
      "--local-steps; none where the run validates, saves or samples, or ends");
  add(app, "--reduce-dtype", o.reduce_dtype, one_of({"fp32", "bf16"}),
      "in which gradients travel: fp32, or bf16 where --dtype is (up to some 32 ranks)");
  add(app, "--compress", o.compress, compressed,
      "gradients on their way to other ranks, for slow links: codes of 8 or 4 bits, or of each matrix factors of rank R, 1 to 64 "
      "(with --zero 0 and 1); what they leave out goes with the next ones");
  add(app, "--compress-weights", o.compress_weights, one_of({"none", "int8"}),
      "that --zero 1 to 3 gathers: in eight bits, beside exact ones that are updated");
  add(app, "--compress-where", o.compress_where, one_of({"all", "hosts"}),
      "hosts: only what goes from host to host is compressed, inside a host nothing");
  add(app, "--ctas", o.sms.ctas, in_range(-1, 64),
      "most CUDA blocks of a collective of tp, cp and data, each of which takes a multiprocessor; 0: as many as NCCL "
      "likes; -1: 16, 16 and 8");
  add(app, "--sm-margin", o.sms.margin, in_range(-1, 128),
      "multiprocessors, at most half, that kernels leave to collectives under way; -1: what the groups may take");
  app.add_flag("--share-gpu", o.share_gpu, "several ranks on a GPU (slow, for tests)");
  add(app, "--collective-timeout", o.collective_timeout, in_range(0., 1e6),
      "seconds after which a collective counts as hung; 0: never");
  add(app, "--check-sync", o.check_sync, count, "steps between comparisons of what all ranks must hold alike; 0: none");
  app.add_flag("--check-ranks", o.check_ranks, "time each rank's arithmetic, memory and links first; name slow ones, and "
               "refuse less than 5 GB/s between the GPUs of two hosts");
  app.add_flag("--check-mesh", o.check_mesh, "train three steps of a smaller job first, on this mesh and on one rank; "
               "refuse to train if they differ");

  app.option_defaults()->group("Plan");
  app.add_flag("--plan", o.plan, "print what training with these options would take, and stop; needs no --train");
  add(app, "--mesh", o.mesh_search, one_of({"auto"}), "auto: try all --tp, --cp, --pp, schedules, --zero, "
      "--micro-batch, --recompute; train with the fastest, or with --plan list ten");
  app.add_option("--cluster", o.cluster, "that --plan is for, or by which training's time is forecast: a file, or a name in "
                 "runtime/planner/clusters (default: this device); --plan takes two, with a comma: a mix of both")->type_name("FILE");
  app.add_option("--calibrate", o.calibrate, "measure this device, its links and steps of this model and data, write a file "
                 "for --cluster, and stop: two minutes")->type_name("FILE");
  add(app, "--ranks", o.ranks, in_range(1, 1 << 14),
      "that --plan is for (default: the cluster's devices, else those that were started)")->default_str("");
  app.add_flag("--json", o.json, "print the plan as one JSON object, every rank by itself");
  add(app, "--days", o.days, in_range(1e-3, 1e5),
      "with --plan: what can be trained in this number of days, and where it is cheapest")->default_str("");
  add(app, "--budget", o.budget, in_range(1e-3, 1e12), "with --plan: the same for this number of dollars")->default_str("");
  add(app, "--checkpoint-seconds", o.checkpoint_seconds, in_range(1e-6, 1e6),
      "that training waits for a checkpoint, as a run measured it (default: by its bytes)")->default_str("");

  add(app, "--recipe", o.recipe, one_of({"slurm", "kubernetes", "skypilot"}),
      "with --plan: write the file that starts the planned run (slurm, kubernetes or skypilot) to stdout, the plan to stderr");
  add(app, "--row", o.row, in_range(size_t(1), size_t(1000)), "of the plan's table, which --recipe starts");

  app.option_defaults()->group("Sampling");
  app.add_flag("--generate", o.generate, "write a sample from a checkpoint (--resume or --init) and stop");
  app.add_option("--merge", o.merge, "write a checkpoint's adapters and the model beside which they were trained as one "
                 "Hugging Face folder, and stop")->type_name("DIR");
  add(app, "--sample-every", o.sample_every, count, "steps between samples; 0: none");
  add(app, "--sample-seconds", o.sample_seconds, in_range(0., 1e7),
      "seconds between the end of a sample and the next; 0: none");
  add(app, "--sample-len", o.sample_len, count, "tokens a sample");
  app.add_option("--prompt", o.prompt, "text that a sample continues")->type_name("TEXT");
  add(app, "--temperature", o.temperature, in_range(0., 100.), "below 1 sharper, 0 always the likeliest token");
  add(app, "--samples", o.samples, in_range(1, most_micro_batch), "texts that --generate draws, all at the same time");
  app.add_flag("--no-cache", o.no_cache, "compute all tokens again for each new one: slow, to compare with");
  add(app, "--top-p", o.top_p, in_range(1e-6, 1.),
      "only the likeliest tokens that make this probability together; 1: all");
  add(app, "--top-k", o.top_k, in_range(0, ModelShape::most_vocabulary), "only the k likeliest tokens; 0: all");
}

}  // namespace

void add_hook_options(CLI::App& app, HookOptions& hooks) {
  app.option_defaults()->group("Hooks")->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--after-checkpoint", hooks.after_checkpoint, "command for each finished checkpoint, such as an "
                 "upload: it sees GPT_CHECKPOINT, GPT_STEP and GPT_OUT, and is tried until it succeeds")->type_name("CMD");
  app.add_option("--stop-when", hooks.stop_when, "command, asked every 5 s: when it succeeds, the run is saved and ends "
                 "with exit code 75")->type_name("CMD");
  app.add_option("--on-end", hooks.on_end, "command for the end, however it comes: it sees GPT_REASON (done, stopped, "
                 "time, error, killed), GPT_EXIT_CODE and GPT_UPLOADED, too")->type_name("CMD");
  add(app, "--hook-timeout", hooks.timeout, in_range(0., 1e6),
      "seconds that the end waits for the last upload, and for --on-end; 0: 3600 after a finished run, else 90");
}

void add_options(CLI::App& app, Options& o) {
  add_data_and_model_options(app, o);
  add_training_options(app, o);
  add_run_options(app, o);
  add_hook_options(app, o.hooks);
}
