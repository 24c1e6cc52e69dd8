// Training steps that others have published, and what planner/forecast.h says of them. test/test_planner.cpp holds the two
// to each other, dev/forecasts.cpp prints them.
#pragma once

#include <string>
#include <vector>

#include "planner/forecast.h"

// FLOPs of a step as Megatron-LM counts them: 2104.04473 with what is recomputed, later tables without
inline double megatron_flops(const PlannedStep& step) {
  const double T = step.seq_len, L = step.shape.layers, C = step.shape.channels, V = step.shape.vocabulary;
  const double passes = step.recompute == "block" ? 4 : 3;
  return step.global_batch * T * (passes * L * (24 * C * C + 4 * C * T) + 6 * C * V);
}

struct PublishedRun {
  std::string name, cluster;  // a file in data/clusters
  PlannedStep step;
  double rate;         // published: TFLOP/s of a GPU as 2104.04473 counts them; or thousand tokens/s of a GPU
  bool counts_tokens;  // which of the two
  double most;         // |forecast / published - 1| that the test allows; 0: not held to it

  double forecast_rate() const {
    const Forecast f = forecast(step, load_cluster("data/clusters/" + cluster + ".json"));
    const double devices = step.mesh.ranks();
    if (counts_tokens) return f.tokens_per_s / devices / 1e3;
    return megatron_flops(step) / f.seconds / devices / 1e12;
  }
  double error() const { return forecast_rate() / rate - 1; }
};

// Megatron-LM on A100-80, V 51,200, T 2048, fp16, all activations recomputed. chunks: of layers that a stage has
inline PublishedRun megatron(const char* name, int heads, int channels, int layers, int tp, int pp, int gpus, int batch,
                             int micro_batch, int chunks, double rate, double most) {
  PlannedStep step;
  step.shape = {layers, heads, channels, 51200, 2048};
  step.mesh = {tp, 1, gpus / (tp * pp), pp};
  step.seq_len = 2048, step.micro_batch = micro_batch, step.global_batch = batch;
  step.dtype = "fp16", step.reduce_dtype = "bf16", step.recompute = "block";
  step.pp_schedule = chunks > 1 ? "interleaved" : "1f1b", step.pp_chunks = chunks;
  return {name, "selene-2021", step, rate, false, most};
}

// The same a year later, which took so many seconds a step; recompute: block, or attention with rows split over tp
inline PublishedRun megatron_2022(double seconds, const char* recompute, PublishedRun run) {
  run.cluster = "selene-2022", run.step.recompute = recompute;
  run.rate = megatron_flops(run.step) / seconds / run.step.mesh.ranks() / 1e12;
  return run;
}
inline PublishedRun zero3(PublishedRun run) {
  run.step.zero = 3;
  return run;
}

// Megatron-Core r0.8 on H100, V 131,072, T 4096, bf16, FlashAttention, all communication overlapped, nothing recomputed
inline PublishedRun megatron_core(const char* name, int heads, int channels, int layers, int tp, int pp, int dp, int batch,
                                  double rate, double most) {
  PlannedStep step;
  step.shape = {layers, heads, channels, 131072, 4096};
  step.mesh = {tp, 1, dp, pp};
  step.seq_len = 4096, step.micro_batch = pp > 1 ? 1 : batch / dp, step.global_batch = batch;
  step.zero = 1;
  if (pp > 1) step.pp_schedule = "interleaved", step.pp_chunks = layers / pp;
  return {name, "768x8xh100", step, rate, false, most};
}

// GPT-2's shapes on H100, bf16, T 1024
inline PublishedRun on_h100(const char* name, int layers, int heads, int channels, int gpus, int micro_batch, int batch,
                            double rate) {
  PlannedStep step;
  step.shape = {layers, heads, channels, 50257, 1024};
  step.mesh.dp = gpus;
  step.seq_len = 1024, step.micro_batch = micro_batch, step.global_batch = batch;
  step.zero = gpus > 1;
  return {name, "8xh100", step, rate, true, 0.2};
}

// MPT's shapes on A100-80, V 50,368, sharded by FSDP, gradients in bf16, attention by Triton's FlashAttention
inline PublishedRun mpt(const char* name, int layers, int heads, int channels, int seq_len, int gpus, int micro_batch, int batch,
                        bool recomputed, double rate, double most = 0.12) {
  PlannedStep step;
  step.shape = {layers, heads, channels, 50368, seq_len};
  step.mesh.dp = gpus;
  step.seq_len = seq_len, step.micro_batch = micro_batch, step.global_batch = batch;
  step.zero = 3, step.reduce_dtype = "bf16", step.recompute = recomputed ? "block" : "none";
  return {name, "16x8xa100-80", step, rate, true, most};
}

inline const std::vector<PublishedRun>& published_runs() {
  static const std::vector<PublishedRun> runs = {
      // arXiv:2104.04473, table 1; micro-batches and chunks from Megatron-LM's examples/sc21/run_table_1.sh. The first
      // row is the one that products' share of the peak was chosen by.
      megatron("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137, 0.01),
      megatron("3.6B", 32, 3072, 30, 2, 1, 64, 512, 16, 1, 138, 0.12),
      megatron("7.5B", 32, 4096, 36, 4, 1, 128, 512, 16, 1, 142, 0.12),
      megatron("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135, 0.12),
      megatron("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138, 0.12),
      megatron("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140, 0.12),
      megatron("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148, 0.12),
      megatron("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155, 0.12),
      megatron("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163, 0.12),
      megatron("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163, 0.12),
      // The same paper's table 2: the same batch on more and more GPUs, not interleaved
      megatron("174.6B, 384 GPUs", 96, 12288, 96, 8, 12, 384, 1536, 1, 1, 153, 0.12),
      megatron("174.6B, 768 GPUs", 96, 12288, 96, 8, 12, 768, 1536, 1, 1, 149, 0.12),
      megatron("174.6B, 1536 GPUs", 96, 12288, 96, 8, 12, 1536, 1536, 1, 1, 141, 0.12),
      megatron("529.6B, 560 GPUs", 128, 20480, 105, 8, 35, 560, 2240, 1, 1, 171, 0.12),
      megatron("529.6B, 1120 GPUs", 128, 20480, 105, 8, 35, 1120, 2240, 1, 1, 167, 0.12),
      megatron("529.6B, 2240 GPUs", 128, 20480, 105, 8, 35, 2240, 2240, 1, 1, 159, 0.12),
      // and with DeepSpeed's ZeRO 3 of that time
      zero3(megatron("174.6B, ZeRO 3, 384 GPUs", 96, 12288, 96, 1, 1, 384, 1536, 4, 1, 144, 0)),
      zero3(megatron("174.6B, ZeRO 3, 768 GPUs", 96, 12288, 96, 1, 1, 768, 1536, 2, 1, 88, 0)),
      zero3(megatron("174.6B, ZeRO 3, 1536 GPUs", 96, 12288, 96, 1, 1, 1536, 1536, 1, 1, 44, 0)),
      // arXiv:2201.11990, section 2.4
      megatron("MT-NLG 530B, 280 hosts", 128, 20480, 105, 8, 35, 2240, 1920, 1, 1, 126, 0),
      megatron("MT-NLG 530B, 350 hosts", 128, 20480, 105, 8, 35, 2800, 1920, 1, 1, 121, 0),
      megatron("MT-NLG 530B, 420 hosts", 128, 20480, 105, 8, 35, 3360, 1920, 1, 1, 113, 0),
      // arXiv:2205.05198, table 5: before, and with what the paper is about; 2,240 GPUs by its MFU, 42.1 and 54.2 % of 312
      megatron_2022(1.42, "block", megatron("22B, recomputed", 64, 6144, 48, 8, 1, 8, 4, 4, 1, 0, 0.12)),
      megatron_2022(18.13, "block", megatron("175B, recomputed", 96, 12288, 96, 8, 8, 64, 64, 1, 3, 0, 0.12)),
      megatron_2022(49.05, "block", megatron("530B, recomputed", 128, 20480, 105, 8, 35, 280, 280, 1, 3, 0, 0.12)),
      megatron_2022(50.4, "block", megatron("530B, recomputed, dp 8", 128, 20480, 105, 8, 35, 2240, 2240, 1, 3, 0, 0.12)),
      megatron_2022(94.42, "block", megatron("1T, recomputed", 160, 25600, 128, 8, 64, 512, 512, 1, 1, 0, 0.12)),
      megatron_2022(1.10, "attention", megatron("22B", 64, 6144, 48, 8, 1, 8, 4, 4, 1, 0, 0.12)),
      megatron_2022(13.75, "attention", megatron("175B", 96, 12288, 96, 8, 8, 64, 64, 1, 3, 0, 0.12)),
      megatron_2022(37.83, "attention", megatron("530B", 128, 20480, 105, 8, 35, 280, 280, 1, 3, 0, 0.12)),
      megatron_2022(39.1, "attention", megatron("530B, dp 8", 128, 20480, 105, 8, 35, 2240, 2240, 1, 3, 0, 0.12)),
      megatron_2022(71.49, "attention", megatron("1T", 160, 25600, 128, 8, 64, 512, 512, 1, 1, 0, 0.12)),
      // Megatron-LM's README since 2024. Micro-batches and chunks are not known: without stages all of a rank's batch at
      // once, with stages one sequence, and a layer a chunk. 23 and 7 layers a stage leave only that, or none.
      megatron_core("H100 1.7B", 16, 2048, 24, 1, 1, 48, 192, 408.8, 0),
      megatron_core("H100 7.1B", 32, 4096, 30, 2, 1, 48, 192, 465.9, 0),
      megatron_core("H100 16B", 48, 6144, 32, 4, 1, 48, 192, 489.1, 0),
      megatron_core("H100 32B", 56, 7168, 48, 8, 1, 48, 192, 459.6, 0.12),
      megatron_core("H100 70B", 64, 8192, 84, 8, 2, 48, 384, 419.7, 0.12),
      megatron_core("H100 119B", 80, 10240, 92, 8, 4, 48, 768, 420.5, 0.12),
      megatron_core("H100 177B", 96, 12288, 96, 8, 6, 48, 1152, 432.8, 0.12),
      megatron_core("H100 314B", 128, 16384, 96, 8, 8, 48, 1536, 474.4, 0.12),
      megatron_core("H100 462B", 144, 18432, 112, 8, 16, 48, 3072, 459.9, 0.12),
      // and MFU of the same 1,152 sequences on 96 to 4,608 of them
      megatron_core("H100 177B, 96 GPUs", 96, 12288, 96, 8, 6, 2, 1152, 0.47 * 989, 0),
      megatron_core("H100 177B, 4608 GPUs", 96, 12288, 96, 8, 6, 96, 1152, 0.42 * 989, 0.12),
      // published by the authors of llm.c and LLMQ; the batches of LLMQ are not known to us
      on_h100("llm.c 124M", 12, 12, 768, 8, 64, 512, 468),
      on_h100("llm.c 350M", 24, 16, 1024, 8, 64, 512, 188),
      on_h100("llm.c 1.5B", 48, 25, 1600, 8, 16, 1024, 46.8),
      on_h100("LLMQ 1.5B", 48, 25, 1600, 1, 16, 512, 59),
      on_h100("LLMQ 7B", 32, 32, 4096, 1, 16, 512, 14),
      // MosaicML's llm-foundry, scripts/train/benchmarking/README.md
      mpt("MPT 125M, T 2048", 12, 12, 768, 2048, 8, 32, 512, false, 141.737, 0),
      mpt("MPT 350M, T 2048", 24, 16, 1024, 2048, 8, 32, 512, false, 58.782),
      mpt("MPT 1B, T 2048", 24, 16, 2048, 2048, 8, 14, 448, false, 20.513),
      mpt("MPT 1B, T 8192", 24, 16, 2048, 8192, 8, 3, 96, false, 13.814),
      mpt("MPT 3B, T 4096", 32, 20, 2560, 4096, 8, 5, 240, false, 9.457),
      mpt("MPT 7B, T 2048", 32, 32, 4096, 2048, 8, 6, 96, false, 4.641),
      mpt("MPT 7B, T 4096, recomputed", 32, 32, 4096, 4096, 8, 16, 256, true, 3.684),
      mpt("MPT 13B, T 2048", 40, 40, 5120, 2048, 8, 2, 48, false, 2.262),
      mpt("MPT 30B, T 2048, recomputed", 48, 56, 7168, 2048, 8, 3, 504, true, 0.916),
      mpt("MPT 70B, T 2048, recomputed", 80, 64, 8192, 2048, 64, 8, 2048, true, 0.410),
      mpt("MPT 70B, T 2048, recomputed", 80, 64, 8192, 2048, 32, 2, 1024, true, 0.373)};
  return runs;
}
