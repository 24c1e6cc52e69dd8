#include "runtime/planner/forecast.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <span>
#include <utility>

#include "extensions/compression/low_rank.h"
#include "extensions/pipeline/pipeline.h"
#include "gpt/base/text.h"
#include "gpt/room.h"
#include "gpt/tensors.h"
#include "runtime/planner/kernels.h"

namespace {

// ---- stages

struct Passes {
  Cost forward, backward;
  StageTimes times() const { return {forward.seconds(), backward.seconds(), backward[weights]}; }
};

// The blocks of a stage that multiply in eight bits. Chunks of a stage count as neighbours.
int fp8_blocks(const StepOptions& step, int first, int count) {
  const int end = std::min(first + count, step.shape.layers - step.fp8_keep);
  return step.fp8 ? std::max(end - std::max(first, step.fp8_keep), 0) : 0;
}

// The passes of each stage on a micro-batch. The first one has the embedding, the last one the head. All others are
// alike, except for the number of their layers.
std::vector<Passes> passes_of(const StepOptions& step, const Kernels& kernels, const Kernels& inner,
                              const std::vector<int>& layers) {
  const Passes block = {kernels.forward(), kernels.backward()}, fp8_block = {inner.forward(), inner.backward()};
  std::vector<Passes> stages;
  int first = 0;
  for (int count : layers) {
    const int fp8 = fp8_blocks(step, first, count), others = count - fp8;
    stages.push_back({block.forward * others + fp8_block.forward * fp8, block.backward * others + fp8_block.backward * fp8});
    first += count;
  }
  stages.front().forward += kernels.embedding_forward();
  if (!step.lora.is_on()) stages.front().backward += kernels.embedding_backward();
  stages.back().backward += kernels.head();
  return stages;
}

// ---- costs that span several stages

// The parameters of a rank of the first stage, which ends last: nothing after it can hide communication.
struct ParameterCounts {
  double wte, embedding, block, blocks;
  double gathered;  // parameters of a block that ZeRO gathers
  double gathered_bytes;  // bytes of each of these, averaged over all blocks
  double all() const { return embedding + block * blocks; }
};
ParameterCounts parameters_of(const StepOptions& step, int layers, const Kernels& inner) {
  const double C = step.shape.channels, tp = step.mesh.tp;
  const double wte = double(round_up(step.shape.vocabulary, 128)) * C / tp;
  const double block = 12 * C * C / tp + (7 / tp + 6) * C, adapters = step.lora.rank * (4 + 12 / tp) * C;
  const double w = bytes_of(step.dtype), codes = double(fp8_blocks(step, 0, layers)) / layers;
  if (step.lora.is_on()) return {0, 0, adapters, double(layers), adapters + (step.zero == 3 ? block : 0), w};
  return {wte, wte + double(step.shape.positions) * C, block, double(layers), block, w + codes * (inner.gathered_bytes() - w)};
}

// The rings of data parallelism. Where only messages between hosts are compressed, there are two rings, and a rank sends
// only its part of the host's data between hosts.
struct DataRings {
  Ring all, inside, between;
  DataRings(const StepOptions& step, const Cluster& cluster) {
    const int tp = step.mesh.tp, N = step.mesh.cp * step.mesh.dp;
    StepOptions there = step;
    there.ranks_per_host = cluster.ranks_per_host();
    const int neighbours = there.ranks_inside();
    all = ring_of(cluster, tp, N), inside = ring_of(cluster, tp, neighbours);
    between = ring_of(cluster, tp * neighbours, N / neighbours);
  }
  // Seconds to gather `plain` bytes inside hosts, and `sent` bytes between hosts.
  double gather(double plain, double sent) const { return inside.gather(plain) + between.gather(sent / inside.ranks); }
};

// Bytes of a value that is sent as a code, with its share of a scale (extensions/compression/kernels/quantize.cuh).
double code_bytes(int bits) { return bits / 8.0 + 2.0 / 256; }

// A unit's gradients as low-rank factors: how many numbers the first and the second sum add
// (extensions/compression/low_rank.cuh).
using FactorCounts = std::pair<double, double>;
FactorCounts factors_of(const StepOptions& step, int unit) {
  ModelShape shape = step.shape;
  shape.layers = 1;
  const TensorList base(shape, step.mesh.tp);
  TensorList list = base;
  for (const Room* room : rooms())
    if (room->trained_tensors && !room->trained_tensors(step).empty()) list = TensorList(base, room->trained_tensors(step));
  FactorCounts counts;
  for (const TensorDescriptor& tensor : list.tensors()) {
    if (tensor.unit != unit) continue;
    const LowRankShape factors = low_rank_shape(tensor, list, step.low_rank());
    counts.first += double(factors.rank ? factors.p() : tensor.local), counts.second += double(factors.q());
  }
  return counts;
}

// Gathers and reductions of ZeRO in a step of one rank. first: the times of a micro-batch on the first stage
Forecast::Communication zero_communication(const StepOptions& step, const DataRings& rings, const ParameterCounts& p,
                                           const StageTimes& first, const Kernels& kernels) {
  const int bits = step.compressed_bits();
  const double g = bits ? code_bytes(bits) : bytes_of(step.reduce_dtype), w = bytes_of(step.dtype);
  const FactorCounts of_embedding = step.low_rank() ? factors_of(step, 0) : FactorCounts(), of_block = step.low_rank() ? factors_of(step, 1) : of_embedding;
  const auto reduce = [&](double elements) {
    const auto& [first, second] = elements == p.block ? of_block : of_embedding;
    if (step.low_rank()) return 2 * (rings.all.gather(4 * first) + rings.all.gather(4 * second)) + kernels.low_rank(elements).seconds();
    const double times = step.zero == 0 ? 2 : 1;
    if (!bits || rings.between.ranks == 1) return rings.all.gather((bits ? 4 : g) * elements) * times;
    return rings.gather(4 * elements, g * elements) * times + kernels.compression(elements / rings.inside.ranks).seconds();
  };
  const bool is_cast = step.compress_weights != "none";
  const auto gather = [&](double elements, double bytes) {
    if (step.zero == 0) return 0.0;
    if (!is_cast || rings.between.ranks == 1) return rings.all.gather(bytes * elements);
    return rings.gather(bytes * elements, code_bytes(8) * elements) + kernels.decoding(elements / rings.inside.ranks).seconds();
  };
  const double gathered_block = gather(p.gathered, p.gathered_bytes), gathered_embedding = gather(p.embedding, w);
  const double reduced = p.blocks * reduce(p.block), gathered = p.blocks * gathered_block;
  const double again = step.zero == 3 ? gathered * std::max(0.0, 1 - 2 / p.blocks) : 0;  // two stay in the ring's slots
  const double times = step.zero < 2 ? 1 : step.micro_batches();
  Forecast::Communication c;
  c.total = times * reduced + reduce(p.embedding) + gathered + gathered_embedding + (2 * times - 1) * again;
  // The last reductions have no backward to overlap with. The first gather is counted as exposed; gpt.cu's comes after
  // the update.
  c.exposed = std::max(reduce(p.block), reduced + again - first.backward) + reduce(p.embedding);
  c.exposed += std::max(gathered_block, gathered - first.forward);
  c.exposed += (times - 1) * (std::max(0.0, again - first.forward) + std::max(0.0, reduced + again - first.backward));
  // With --delay the reductions overlap a whole step, after its gathers.
  const double left = c.total - gathered_embedding - step.micro_batches() * first.sum();
  if (step.delay) c.exposed = std::max({0.0, gathered_block, gathered - first.forward, left});
  return c;
}

// Waits of stages: for rows of a micro-batch from their neighbours, and, after the last action, for `wte` bytes of
// gradients, which the first and the last stage have.
void add_pipeline(Forecast& f, const StepOptions& step, const Cluster& cluster, const std::vector<StageTimes>& stages,
                  double wte, bool overlaps) {
  const MeshShape& mesh = step.mesh;
  if (mesh.pp == 1) return;
  const int A = step.micro_batches(), ranks = mesh.of_an_island(), stage_ranks = ranks / mesh.pp;
  const double rows = double(step.micro_batch) * step.seq_len / mesh.cp;
  const double bytes = rows * step.shape.channels / mesh.tp * bytes_of(step.dtype);
  const double message = ring_of(cluster, stage_ranks, mesh.pp).send(bytes);
  const double messages = 2.0 * A * step.pp_chunks * message;
  const double ends = 2 * ring_of(cluster, ranks - stage_ranks, 2, ranks).gather(wte);
  const auto seconds = [&](double sent) { return pipeline_seconds(step.pp_schedule, stages, step.pp_chunks, A, sent); };
  const double exposed_ends = overlaps && step.delay ? 0 : ends;  // a step later they have all the time
  f.pp = {messages + ends, seconds(message) - seconds(0) + (overlaps ? 0 : messages) + exposed_ends};
  f.bubble = seconds(0) - A * std::ranges::max(stages, {}, &StageTimes::sum).sum() + f.pp.exposed;
}

// Communication of the outer step after each H steps: each island sends and gathers its weights, or their changes as codes;
// with ZeRO 0 each rank averages one piece, and the ranks of an island gather the pieces. Messages between islands overlap the
// next --outer-delay steps. piece: this rank's elements; seconds: of a step without this
Forecast::Communication outer_steps(const StepOptions& step, const Cluster& cluster, const Ring& data, double piece, double seconds) {
  if (!step.outer.is_on()) return {};
  const Ring islands = ring_of(cluster, step.mesh.of_an_island(), step.mesh.islands);
  const double bytes = step.outer.bits() ? code_bytes(step.outer.bits()) : 4;
  const double between = 2 * islands.gather(bytes * piece), inside = step.zero == 0 ? data.gather(4 * piece * data.ranks) : 0;
  const double hidden = cluster.device.overlaps ? std::min(between, step.outer.delay * seconds) : 0;
  return {(between + inside) / step.outer.local_steps, (between + inside - hidden) / step.outer.local_steps};
}

// Copies to the host's memory and back, both ways at the same time (extensions/offload/offloaded_optimizer.cuh,
// offloaded_gradients.cuh, offloaded_inputs.cuh). elements: the parameters that a rank keeps; update: the seconds of its kernels; passes: the times
// of a micro-batch
Forecast::Communication offload_traffic(const StepOptions& step, const Cluster& cluster, const ParameterCounts& p,
                                        double elements, double update, const StageTimes& passes) {
  const double host = cluster.device.host / cluster.ranks_per_device;
  Forecast::Communication c;
  if (step.offloads("optimizer")) {
    const double one_way = elements * optimizer_bytes(step) / host, window = one_way * p.block / p.all();
    c.total += 2 * one_way;  // two windows come, and two leave, behind passes
    c.exposed += std::max(0.0, one_way - 2 * window - update);
  }
  if (step.offloads("gradients")) {  // there in each micro-batch, back in the next, and for the norm and the update
    const double one_way = 4 * elements / host, A = step.micro_batches();
    c.total += (2 * A + 1) * one_way;
    c.exposed += 2 * one_way + A * std::max(0.0, one_way - passes.backward);
  }
  if (step.offloads("activations")) {
    const double rows = double(step.micro_batch) * step.seq_len / step.mesh.cp / step.mesh.tp, A = step.micro_batches();
    const double one_way = p.blocks * rows * step.shape.channels * bytes_of(step.dtype) / host;
    c.total += 2 * A * one_way;
    c.exposed += A * (std::max(0.0, one_way - passes.forward) + std::max(0.0, one_way - passes.backward));
  }
  if (!cluster.device.overlaps) c.exposed = c.total;
  return c;
}

// Casts of a matrix's weights to eight bits: once a step, and with ZeRO 3 in each pass. Where codes are gathered, a
// rank casts its piece of `pieces`, and forward needs the matrix transposed.
Cost weight_casts(const StepOptions& step, const Kernels& inner, double matrix, double pieces) {
  const double passes = step.zero == 3 ? 2 * step.micro_batches() : 1, forwards = step.recompute == "block" ? passes : passes / 2;
  if (inner.gathered_bytes() > 1) return (inner.maximum(matrix) + inner.cast(matrix, 2)) * passes;
  return inner.maximum(matrix / pieces) + inner.cast(matrix / pieces, 1) * passes + inner.transposed(matrix) * forwards;
}

using Share = std::pair<const char*, double>;
std::array<Share, 7> shares_of(const Forecast& f) {
  const double communication = f.tp.exposed + f.cp.exposed + f.dp.exposed + f.pp.exposed + f.islands.exposed;
  return {{{"products", f.products}, {"attention", f.attention}, {"memory", f.memory + f.update},
           {"communication", communication}, {"bubble", f.bubble - f.pp.exposed}, {"launches", f.launches}, {"offload", f.offload.exposed}}};
}

double sum_of_shares(const Forecast& f) {
  double sum = 0;
  for (const auto& [_, seconds] : shares_of(f)) sum += seconds;
  return sum;
}

// The seconds of a step, from its parts, and the rates that follow from them.
void add_rates(Forecast& f, const StepOptions& step, const Cluster& cluster) {
  f.seconds = sum_of_shares(f);
  f.limit = std::ranges::max(shares_of(f), {}, &Share::second).first;
  const ModelShape& s = step.shape;
  const double L = s.layers, C = s.channels, tokens = step.tokens();
  const double parameters = (s.vocabulary + s.positions) * C + L * (12 * C * C + 13 * C) + 2 * C;
  f.tokens_per_s = tokens / f.seconds;
  const double adapters = 16 * C * L * step.lora.rank;
  f.model_flops = tokens * (step.lora.is_on() ? flops_per_token(s, adapters, parameters, step.seq_len)
                                              : flops_per_token(s, parameters, 0, step.seq_len));
  const double devices = double(step.mesh.ranks()) / cluster.ranks_per_device;
  const double peak = step.dtype == "fp32" ? cluster.device.sheet_fp32 : cluster.device.sheet_bf16;
  if (peak > 0) f.mfu = f.model_flops / f.seconds / (devices * peak);
}

}  // namespace

void adapt(StepOptions& step, const Cluster& cluster) {
  step.ranks_per_host = cluster.ranks_per_host();
  const bool has_kernels = cluster.device.is_hopper && step.dtype != "fp32" && step.shape.head_size() % 8 == 0;
  if (step.attention == "auto" && has_kernels) step.attention = "hopper";
}

double optimizer_bytes(const StepOptions& step) {
  const bool is_exact = step.dtype == "fp32" ? step.compress_weights == "none" || step.zero == 3 : step.stochastic_rounding;  // without masters
  return (step.moments == "bf16" ? 4 : 8) + (is_exact ? 0 : 4);
}

double pipeline_seconds(const std::string& schedule, const std::vector<StageTimes>& stages, int chunks,
                        int micro_batches, double message) {
  const double A = micro_batches, p = double(stages.size());
  const auto most = [&](auto part) { return std::invoke(part, std::ranges::max(stages, {}, part)); };
  const double slowest = most(&StageTimes::sum);
  const double forward = most(&StageTimes::forward), backward = most(&StageTimes::backward);
  double all = 0, weight = 0;
  for (const StageTimes& s : stages) all += s.sum(), weight += s.weight;
  const double messages = 2 * (p - 1) * message;
  if (p == 1) return A * slowest;
  if (schedule == "gpipe") return all + (A - 1) * (forward + backward) + messages;
  // The pipeline fills and drains with one chunk of each other stage. Later messages hide behind the other chunks.
  if (schedule == "interleaved") return A * slowest + (all - slowest) / chunks + messages * (chunks + 1) / 2;
  // A backward of stage 0 waits until its forward has passed all stages and come back; p are on their way at a time.
  // zb's weight gradients do not delay it, and fill the idle time at the end.
  const double way = all - (schedule == "zb" ? weight : 0) + messages;
  if (schedule == "1f1b") return way + (A - 1) * std::max(slowest, way / p);
  const double fills = std::min({forward, backward - weight / p, weight / p}) * (std::min(A, p) - 1);
  return way * (p - 1) / p + A * std::max(slowest, way / p) - fills;
}

std::string Forecast::explanation() const {
  const auto text = [&](const Share& s) { return concat(s.first, ' ', std::lround(100 * s.second / seconds), " %"); };
  const auto all = shares_of(*this);
  return concat("most of the step is spent on ", limit, ": ", joined(std::span(all).first(all.size() - (offload.total == 0)), text));
}

Forecast forecast(const StepOptions& step, const Cluster& c) {
  StepOptions wide = step;
  wide.fp8 = false;
  return forecast(step, c, Kernels(wide, c), Kernels(step, c));
}

Forecast forecast(const StepOptions& step, const Cluster& cluster, const Kernels& kernels, const Kernels& inner) {
  const ModelShape& s = step.shape;
  const MeshShape& mesh = step.mesh;
  const std::vector<int> layers = deal(s.layers, mesh.pp, step.pp_chunks, s.vocabulary / (12.0 * s.channels));
  const std::vector<Passes> stages = passes_of(step, kernels, inner, layers);
  std::vector<StageTimes> times;
  for (const Passes& stage : stages) times.push_back(stage.times());
  const Passes& own = stages[size_t(std::ranges::max_element(times, {}, &StageTimes::sum) - times.begin())];
  const Cost cost = (own.forward + own.backward) * step.micro_batches();
  Forecast f;
  f.products = cost[products], f.attention = cost[attention], f.memory = cost[memory], f.launches = cost[launches];
  f.tp = {cost[tp_total], cost[tp_exposed]}, f.cp = {cost[cp_total], cost[cp_exposed]};

  const ParameterCounts first = parameters_of(step, layers[0], inner);
  const DataRings data(step, cluster);
  const double pieces = step.zero == 0 ? 1 : data.all.ranks;
  f.dp = zero_communication(step, data, first, times[0], kernels);
  if (!kernels.overlaps()) f.dp.exposed = f.dp.total;
  add_pipeline(f, step, cluster, times, 4 * std::min(first.wte, first.embedding / pieces), kernels.overlaps());
  Cost update = kernels.update(first.all() / pieces, first.blocks + 2);
  update += weight_casts(step, inner, first.block / 4, pieces) * (4 * fp8_blocks(step, 0, layers[0]));
  f.update = update[memory], f.launches += update[launches];
  f.offload = offload_traffic(step, cluster, first, first.all() / pieces, f.update, times[0]);
  f.islands = outer_steps(step, cluster, data.all, first.all() / data.all.ranks, sum_of_shares(f));
  add_rates(f, step, cluster);
  return f;
}
