#include "gpt/option_list.h"

#include "gpt/room_options.h"

namespace {

void add_core_options(CLI::App& app, Options& o) {
  const auto group = [&](const char* name) { app.option_defaults()->group(name); };
  group("Data");
  const auto add_files = [&](const char* flag, std::vector<std::string>& files, const char* help) {
    app.add_option(flag, files, help)->type_name("FILES ...")->default_str("")->expected(1, 1 << 20)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  };
  add_files("--train", o.train, "files or quoted globs: .bin token shards, or text (bytes as tokens)");
  add_files("--val", o.val_words, "the same, for validation; NAME=FILES ... NAME=FILES ...: several sets (a file a=b: ./a=b)");
  app.add_flag("--shuffle", o.shuffle, "permute the samples of each epoch by --seed");

  group("Model");
  app.add_option("--model", o.model, "gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt3-125m, gpt3-350m, gpt3-760m, "
                 "gpt3-1.3b, gpt3-2.7b, gpt3-6.7b, gpt3-13b, gpt3-175b, or dN: N layers, 64·N channels");
  add(app, "--layers", o.wanted.layers, in_range(1, ModelShape::most_layers), "instead of the model's");
  add(app, "--heads", o.wanted.heads, in_range(1, ModelShape::most_channels),
      "instead of the model's; a head has 16 to 128 channels");
  add(app, "--channels", o.wanted.channels, in_range(1, ModelShape::most_channels), "instead of the model's");
  add(app, "--vocab", o.wanted.vocabulary, in_range(2, ModelShape::most_vocabulary),
      "vocabulary (default: 256 for text, 50257 for .bin)");
  add(app, "--positions", o.wanted.positions, in_range(1, ModelShape::most_positions),
      "longest sequence (default: 1024 for gpt2, 2048 for gpt3, else --seq-len)");
  app.add_option("--init", o.init, "start from the weights of a Hugging Face GPT-2 folder")->type_name("DIR");
  add(app, "--dtype", o.dtype, one_of({"fp32", "bf16", "fp16"}), "fp32, bf16 or fp16 (weights, activations; sums and "
      "optimizer state stay fp32); a plan for other devices is for bf16");
  add(app, "--recompute", o.recompute, one_of({"none", "gelu", "block"}),
      "none, gelu or block: what backward computes again to save memory");
  add(app, "--attention", o.attention, one_of({"auto", "cudnn", "own", "hopper"}),
      "cudnn, own (our kernels), hopper (ours for H100 and H200), or auto: as the run began, else hopper there in 16 bits, else "
      "cudnn where it is compiled in and can");
  add(app, "--logit-chunks", o.logit_chunks, in_range(0, 1 << 20),
      "parts in which the rows of logits are computed, to save memory; 0: parts of at most 16,384 rows");

  group("Batch");
  add(app, "--seq-len", o.seq_len, in_range(1, ModelShape::most_positions),
      "tokens a sample (default: the positions of the model, where something gives them, else 256)");
  add(app, "--micro-batch", o.micro_batch, in_range(1, most_micro_batch), "samples at a time on each rank");
  add(app, "--global-batch", o.global_batch, in_range(1, most_samples),
      "samples a step on all ranks (default: a micro-batch for each group of --tp · --cp ranks)");

  group("Optimizer");
  LearningRateSchedule& s = o.schedule;
  const auto rate = in_range(0., 1e3);
  const auto decay = in_range(0., 0.99999);
  add(app, "--steps", s.steps, positive_count, "updates; --resume goes on to the run's own number");
  add(app, "--lr", s.lr, rate, "learning rate");
  add(app, "--min-lr", s.min_lr, rate, "rate that cosine falls towards");
  add(app, "--warmup", s.warmup, any_count, "steps of linear warm-up");
  app.add_option("--schedule", s.kind, "cosine, wsd or constant");
  add(app, "--cooldown", s.cooldown, any_count, "last steps of wsd, in which the rate falls; wsd needs it");
  add(app, "--weight-decay", o.weight_decay, rate, "of matrices and embeddings");
  add(app, "--beta1", o.beta1, decay, "AdamW's first decay rate");
  add(app, "--beta2", o.beta2, decay, "AdamW's second decay rate");
  add(app, "--eps", o.epsilon, in_range(1e-30, 1.), "AdamW's epsilon");
  add(app, "--grad-clip", o.grad_clip, in_range(0., 1e30), "largest gradient norm; 0: no clipping");
  add(app, "--loss-scale", o.loss_scale, in_range(1., double(1 << 24)),
      "fp16: what the loss is multiplied by at first; halved on overflow");
  add(app, "--loss-scale-window", o.loss_scale_window, in_range(0, 1'000'000'000),
      "fp16: steps without overflow that double it; 0: never, nor halved");

  group("Run");
  app.add_option("--out", o.out, "folder for metrics and checkpoints; '' writes nothing")->type_name("DIR");
  app.add_option("--resume", o.resume_from, "continue from the newest checkpoint in --out, or from DIR")
      ->expected(0, 1)->type_name("[DIR]");
  app.add_flag("--overwrite", o.overwrite, "replace the run in --out");
  add(app, "--checkpoint-every", o.checkpoint_every, any_count, "steps between checkpoints; 0: only after the last");
  add(app, "--keep", o.keep, positive_count, "newest checkpoints kept");
  add(app, "--val-every", o.val_every, any_count, "steps between validations; 0: only after the last");
  add(app, "--val-batches", o.val_batches, positive_count, "global batches a validation, of each set");
  add(app, "--log-every", o.log_every, positive_count, "steps between lines on the terminal");
  add(app, "--seed", o.seed, in_range(uint64_t(0), UINT64_MAX), "of weights, shuffling and sampling");

  group("Ranks");
  add(app, "--zero", o.zero, in_range(0, 3),
      "shared out over data-parallel ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too");
  add(app, "--reduce-dtype", o.reduce_dtype, one_of({"fp32", "bf16"}),
      "in which gradients travel: fp32, or bf16 where --dtype is (up to some 32 ranks)");
  app.add_flag("--share-gpu", o.share_gpu, "several ranks on a GPU (slow, for tests)");
}

}  // namespace

void add_options(CLI::App& app, Options& o) {
  add_core_options(app, o);
  for (const Room* room : rooms()) {
    app.option_defaults()->group(room->name);
    room->add_options(app, o);
  }
}

const Room* room_of(const CLI::Option& option) {
  for (const Room* room : rooms())
    if (option.get_group() == room->name) return room;
  return nullptr;
}
