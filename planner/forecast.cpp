#include "planner/forecast.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>

#include "parallel/pipeline.h"

namespace {

double bytes_of(const std::string& dtype) { return dtype == "fp32" ? 4 : 2; }
int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// ---- communication

// The ring of a group: N ranks, each of which sends to the next one.
struct Ring {
  double ranks = 1, bandwidth = 0, latency = 0;  // bytes/s of a rank, seconds to the next one

  // all_gather or reduce_scatter of so many bytes in all
  double gather(double bytes) const { return ranks == 1 ? 0 : (ranks - 1) * (latency + bytes / ranks / bandwidth); }
  // to the next rank
  double send(double bytes) const { return ranks == 1 ? 0 : latency + bytes / bandwidth; }
};

// The ring of `size` ranks, of which each stands `stride` after the one before, among `all` ranks in a row. Inside a host each
// device has its own link. Between hosts all groups that cross share the host's links: a ring goes through each host once,
// and enters and leaves it by the links of its members there.
Ring ring_of(const Cluster& c, int stride, int size, int all) {
  if (size == 1) return {};
  const int host = c.ranks_per_host();
  if (all <= host && (c.hosts == 1 || host % all == 0)) return {double(size), c.inside.bandwidth * c.link_share / c.ranks_per_device, c.inside.latency};
  const int members = std::clamp(host / stride, 1, size), rings = host / members;
  double bandwidth = c.between.bandwidth / rings;
  if (members > 1) bandwidth = std::min(bandwidth, c.inside.bandwidth / c.ranks_per_device);
  const double hosts = double(size) / members;
  const double latency = (c.between.latency * hosts + c.inside.latency * (size - hosts)) / size;
  return {double(size), bandwidth * c.link_share, latency};
}

Ring ring_of(const Cluster& c, int stride, int size) { return ring_of(c, stride, size, stride * size); }

// ---- what a pass computes

// The kinds before tp_total add up to the step. tp_total and cp_total are communication with what hides of it; weights is that
// part of the products which zb delays, the gradients of weights.
enum Kind { products, attention, memory, launches, tp_exposed, cp_exposed, tp_total, cp_total, weights, kinds };

struct Cost {
  std::array<double, kinds> of = {};  // seconds

  double& operator[](Kind kind) { return of[kind]; }
  double operator[](Kind kind) const { return of[kind]; }
  double seconds() const { return std::accumulate(of.begin(), of.begin() + tp_total, 0.0); }
};
Cost sum(Cost a, const Cost& b, double times = 1) {
  for (size_t kind = 0; kind < kinds; ++kind) a.of[kind] += times * b.of[kind];
  return a;
}
Cost operator+(const Cost& a, const Cost& b) { return sum(a, b); }
Cost operator*(const Cost& cost, double times) { return sum({}, cost, times); }
Cost& operator+=(Cost& a, const Cost& b) { return a = a + b; }

// The kernels of a rank, in the order of gpt.cuh; FLOPs and bytes as dev/roofline.py has them.
class Kernels {
 public:
  Kernels(const PlannedStep& step, const Cluster& cluster) : step_(step), cluster_(cluster) {}

  Cost forward() const { return activations() + product_and_rows(R_, C_, 4 * c_); }
  Cost backward() const {
    const Cost gelu_backward = elements(4 * R_ * c_, 20, 3);
    return recomputed() + gelu_backward + half_backward(4 * c_, {}, 4 * c_) + half_backward(3 * c_, attention_backward(), c_);
  }

  Cost embedding_forward() const { return elements(R_ * C_, 1, 3) + sent(rows_); }
  Cost embedding_backward() const { return kernel(2 * R_ * C_, 2 * R_ * C_ * (w_ + 4)) + sent(rows_); }

  // Final norm, logits, loss and their gradients; the forward of it is done at the start of backward.
  Cost head() const {
    Cost cost = layernorm_forward() + sent(whole_rows_ ? 0 : rows_) + product(R_, Vs_, C_) + elements(R_ * Vs_, 6, 2, R_ * loss_row_);
    if (N_ > 1) cost += elements(R_ * Vs_, 2, 1) + sent(tp_.gather(12 * R_ * N_));
    return cost + weight_product(Vs_, C_, false) + product(R_, C_, Vs_) + sent(rows_) + layernorm_backward();
  }

  // Norm and AdamW of so many elements; each unit has launches of its own.
  Cost update(double count, double units) const {
    Cost cost = kernel(2 * count, 4 * count) + kernel(15 * count, (w_ == 4 ? 28 : 30) * count);
    cost[launches] = 2 * units * device_.launch;
    return cost;
  }

 private:
  Cost timed(Kind kind, double seconds) const {
    Cost cost;
    cost[kind] = seconds;
    cost[launches] = device_.launch;
    return cost;
  }
  Cost kernel(double flops, double bytes) const { return timed(memory, std::max(flops / elements_, bytes / bandwidth_)); }
  // `passes`: how often each of these elements is read or written; `sums`: seconds that sums over rows take besides
  Cost elements(double count, double flops, double passes, double sums = 0) const {
    Cost cost = kernel(flops * count, passes * count * w_);
    cost[memory] += sums * sharing_;
    return cost;
  }
  // D (m,n) = A (m,k) · B (k,n). A and B are read while others of their elements are multiplied; D is written (`out` bytes an
  // element) when that is done.
  Cost product(double m, double n, double k, double out) const {
    return timed(products, std::max(2 * m * n * k / product_, (m + n) * k * w_ / bandwidth_) + m * n * out / bandwidth_);
  }
  Cost product(double m, double n, double k) const { return product(m, n, k, w_); }
  // The gradients of a weight (inputs, outputs), which are added to those of the micro-batches before; and of its bias.
  Cost weight_product(double inputs, double outputs, bool has_bias = true) const {
    const Cost weight = product(inputs, outputs, R_, (past_ ? w_ : 4) * (step_.micro_batches() > 1 ? 2 : 1));
    return has_bias ? weight + elements(R_ * outputs, 1, 1) : weight;
  }

  // What tensor parallelism sends while something else is computed.
  Cost sent(double seconds, double meanwhile = 0) const {
    Cost cost;
    cost[tp_total] = seconds;
    cost[tp_exposed] = device_.overlaps ? std::max(0.0, seconds - meanwhile) : seconds;
    return cost;
  }
  // A product whose rows are gathered before it, or whose sums are scattered after it, in pieces: one travels while another is
  // multiplied. `meanwhile` is computed while the last sums travel.
  Cost product_and_rows(double m, double n, double k, double meanwhile = 0) const {
    Cost cost = product(m, n, k);
    if (N_ == 1) return cost;
    const double alone = rows_ / pieces_ + (pieces_ - 1) * std::max(0.0, rows_ - cost[products]) / pieces_;
    cost[launches] *= pieces_;
    return cost + sent(rows_, rows_ - alone + meanwhile);
  }

  Cost gelu_forward() const { return elements(4 * R_ * c_, 10, 2); }
  // In the past bias, dropout and the sum had a kernel of their own.
  Cost layernorm_forward() const { return elements(r_ * C_, 8, past_ ? 6 : 4, r_ * device_.norm_row); }
  Cost layernorm_backward() const { return elements(r_ * C_, 20, past_ ? 6 : 4, r_ * device_.norm_row); }

  // A block's forward without its last product, which recomputation leaves out.
  Cost activations() const {
    return layernorm_forward() * 2 + product_and_rows(R_, 3 * c_, C_) + attention_forward() +
           product_and_rows(R_, C_, c_) + product_and_rows(R_, 4 * c_, C_) + gelu_forward();
  }
  Cost recomputed() const {
    if (step_.recompute == "block") return past_ ? forward() : activations();
    if (step_.recompute == "gelu") return gelu_forward();
    return step_.recompute == "attention" ? attention_forward() : Cost();
  }
  // The backward of half a block: LayerNorm, a product with `wide` columns, `between`, a product of `inner` columns.
  Cost half_backward(double wide, const Cost& between, double inner) const {
    const Cost first = weight_product(C_, wide), last = weight_product(inner, C_);
    const double regathered = step_.recompute == "block" || whole_rows_ ? 0 : rows_;  // what LayerNorm wrote
    const double meanwhile = waits_ ? 0 : first.seconds();
    Cost cost = last + between + sent(regathered, last.seconds() + between.seconds());
    cost += product_and_rows(R_, C_, wide, meanwhile) + first + layernorm_backward();
    // Where each rank has whole rows, the last product gathers none, and the first one's sums are twice as many.
    if (!whole_rows_) cost += product_and_rows(R_, inner, C_);
    else cost += product(R_, inner, C_) + sent(rows_, std::max(0.0, meanwhile - rows_));
    cost[weights] = first[products] + last[products];
    return cost;
  }

  Cost attention_forward() const { return past_ ? scores(4, 6) : fused_attention(2, device_.attention_forward, 4, w_); }
  Cost attention_backward() const { return past_ ? scores(8, 10) : fused_attention(7, device_.attention_backward, 8, w_ + 4); }
  // Whole products of queries and keys, whose (B,NH,T,T) scores are written and read so many times, and the mask of their
  // dropout, a byte each, once.
  Cost scores(double flops, double passes) const {
    const double bytes = R_ * T_ * step_.shape.heads / N_ * (passes * w_ + 1);
    return timed(attention, flops * R_ * T_ * c_ / product_ + bytes / bandwidth_);
  }
  // Reads and writes so many tensors (R,c). Context parallelism: keys and values travel behind the attention to the last ones,
  // `bytes` an element, and the last gradients come home behind nothing. In Ulysses four tensors travel before and after.
  Cost fused_attention(double flops, double share, double tensors, double bytes) const {
    Cost cost = timed(attention, std::max(flops * R_ * (T_ + device_.attention_block) * c_ / (peak_ * share), tensors * R_ * c_ * w_ / bandwidth_));
    if (cp_.ranks == 1) return cost;
    const bool ulysses = step_.cp_method == "ulysses";
    const double hops = cp_.ranks - 1, hop = cp_.send(2 * R_ * c_ * bytes), home = bytes > w_ ? cp_.send(2 * R_ * c_ * 4) : 0;
    cost[cp_total] = cost[cp_exposed] = ulysses ? cp_.gather(4 * R_ * c_ * w_) : hops * hop;
    if (ulysses) return cost;
    const double waits = hops * std::max(0.0, hop - cost[attention] / cp_.ranks) + home;
    if (device_.overlaps) cost[cp_exposed] = std::min(cost[cp_total], waits);
    cost[launches] *= cp_.ranks;
    return cost;
  }

  const PlannedStep& step_;
  const Cluster& cluster_;
  const Device& device_ = cluster_.device;
  // What published runs did otherwise (Software)
  bool past_ = cluster_.software != Software::gpt_cu, waits_ = cluster_.software == Software::megatron_2021;
  bool whole_rows_ = waits_ || (past_ && step_.recompute == "block");
  double sharing_ = cluster_.ranks_per_device;
  double peak_ = device_.peak(step_.dtype == "fp32") / sharing_, product_ = peak_ * device_.product_share;
  double elements_ = device_.fp32 * device_.elements / sharing_;
  double bandwidth_ = device_.bandwidth * device_.bandwidth_share / sharing_;
  double w_ = bytes_of(step_.dtype), N_ = step_.mesh.tp, C_ = step_.shape.channels, c_ = C_ / N_, T_ = step_.seq_len;
  double R_ = double(step_.micro_batch) * T_ / step_.mesh.cp, r_ = whole_rows_ ? R_ : R_ / N_;
  double Vs_ = round_up((step_.shape.vocabulary + step_.mesh.tp - 1) / step_.mesh.tp, 128);
  double loss_row_ = device_.loss_row * std::clamp(Vs_ * w_ / 2048, 1.0, 8.0);
  double pieces_ = past_ ? 1 : step_.tp_pieces;
  Ring tp_ = ring_of(cluster_, 1, step_.mesh.tp), cp_ = ring_of(cluster_, step_.mesh.tp, step_.mesh.cp);
  double rows_ = tp_.gather(R_ * C_ * w_);  // seconds to gather or scatter (R,C)
};

// ---- stages

struct Passes {
  Cost forward, backward;
  StageTimes times() const { return {forward.seconds(), backward.seconds(), backward[weights]}; }
};

// What each stage computes for a micro-batch. The first one has the embedding, the last one the head. All others are alike but
// for their layers.
std::vector<Passes> passes_of(const Kernels& kernels, const std::vector<int>& layers) {
  const Passes block = {kernels.forward(), kernels.backward()};
  std::vector<Passes> stages;
  for (int count : layers) stages.push_back({block.forward * count, block.backward * count});
  stages.front().forward += kernels.embedding_forward();
  stages.front().backward += kernels.embedding_backward();
  stages.back().backward += kernels.head();
  return stages;
}

// ---- what is not of one stage alone

bool overlaps(const Cluster& cluster) { return cluster.device.overlaps && cluster.software == Software::gpt_cu; }

// The parameters of a rank of the first stage, which ends last: behind it nothing hides.
struct Parameters {
  double embedding, block, blocks;
  double all() const { return embedding + block * blocks; }
};
Parameters parameters_of(const PlannedStep& step, int layers) {
  const double C = step.shape.channels, tp = step.mesh.tp;
  return {double(round_up(step.shape.vocabulary, 128)) * C / tp + double(step.shape.positions) * C,
          12 * C * C / tp + (7 / tp + 6) * C, double(layers)};
}

// What a step of a rank gathers and reduces for ZeRO. first: what a micro-batch of the first stage computes
Forecast::Communication zero_communication(const PlannedStep& step, const Ring& ring, const Parameters& p,
                                           const StageTimes& first) {
  const double g = step.reduce_dtype == "fp32" ? 4 : bytes_of(step.dtype);
  const auto reduce = [&](double elements) { return ring.gather(g * elements) * (step.zero == 0 ? 2 : 1); };
  const auto gather = [&](double elements) { return step.zero == 0 ? 0 : ring.gather(bytes_of(step.dtype) * elements); };
  const double reduced = p.blocks * reduce(p.block), gathered = p.blocks * gather(p.block);
  const double again = step.zero == 3 ? gathered * std::max(0.0, 1 - 2 / p.blocks) : 0;  // two stay in the ring's slots
  const double times = step.zero < 2 ? 1 : step.micro_batches();
  Forecast::Communication c;
  c.total = times * reduced + reduce(p.embedding) + gathered + gather(p.embedding) + (2 * times - 1) * again;
  // For the last reductions no backward is left, and for the first gather no update.
  c.exposed = std::max(reduce(p.block), reduced + again - first.backward) + reduce(p.embedding);
  c.exposed += std::max(gather(p.block), gathered - first.forward);
  c.exposed += (times - 1) * (std::max(0.0, again - first.forward) + std::max(0.0, reduced + again - first.backward));
  return c;
}

// What stages wait for: rows of a micro-batch from their neighbours, and, after the last action, `wte` bytes of gradients,
// which both ends have.
void add_pipeline(Forecast& f, const PlannedStep& step, const Cluster& cluster, const std::vector<StageTimes>& stages,
                  double wte) {
  const MeshShape& mesh = step.mesh;
  if (mesh.pp == 1) return;
  const int A = step.micro_batches(), stage_ranks = mesh.ranks() / mesh.pp;
  const double rows = double(step.micro_batch) * step.seq_len / mesh.cp * step.shape.channels / mesh.tp * bytes_of(step.dtype);
  const double message = ring_of(cluster, stage_ranks, mesh.pp).send(rows), messages = 2.0 * A * step.pp_chunks * message;
  const double ends = 2 * ring_of(cluster, mesh.ranks() - stage_ranks, 2, mesh.ranks()).gather(wte);
  const auto seconds = [&](double sent) { return pipeline_seconds(step.pp_schedule, stages, step.pp_chunks, A, sent); };
  f.pp = {messages + ends, seconds(message) - seconds(0) + (overlaps(cluster) ? 0 : messages) + ends};
  f.bubble = seconds(0) - A * std::ranges::max(stages, {}, &StageTimes::sum).sum() + f.pp.exposed;
}

using Share = std::pair<const char*, double>;
std::array<Share, 6> shares_of(const Forecast& f) {
  const double communication = f.tp.exposed + f.cp.exposed + f.dp.exposed + f.pp.exposed;
  return {{{"products", f.products}, {"attention", f.attention}, {"memory", f.memory + f.update}, {"communication", communication},
           {"bubble", f.bubble - f.pp.exposed}, {"launches", f.launches}}};
}

// The step, when all parts of it are known, and what follows.
void add_rates(Forecast& f, const PlannedStep& step, const Cluster& cluster) {
  for (const auto& [_, seconds] : shares_of(f)) f.seconds += seconds;
  f.limit = std::ranges::max(shares_of(f), {}, &Share::second).first;
  const ModelShape& s = step.shape;
  const double L = s.layers, C = s.channels, tokens = double(step.global_batch) * step.seq_len;
  const double parameters = (s.vocabulary + s.positions) * C + L * (12 * C * C + 13 * C) + 2 * C;
  f.tokens_per_s = tokens / f.seconds;
  f.model_flops = tokens * (6 * parameters + 6 * L * C * step.seq_len);
  const double devices = double(step.mesh.ranks()) / cluster.ranks_per_device, peak = cluster.device.peak(step.dtype == "fp32");
  if (peak > 0) f.mfu = f.model_flops / f.seconds / (devices * peak);
}

}  // namespace

double pipeline_seconds(const std::string& schedule, const std::vector<StageTimes>& stages, int chunks, int micro_batches,
                        double message) {
  const double A = micro_batches, p = double(stages.size());
  const auto most = [&](auto part) { return std::invoke(part, std::ranges::max(stages, {}, part)); };
  const double slowest = most(&StageTimes::sum), forward = most(&StageTimes::forward), backward = most(&StageTimes::backward);
  double all = 0, weight = 0;
  for (const StageTimes& s : stages) all += s.sum(), weight += s.weight;
  const double messages = 2 * (p - 1) * message;
  if (p == 1) return A * slowest;
  if (schedule == "gpipe") return all + (A - 1) * (forward + backward) + messages;
  // What fills and drains is a chunk of each other stage. Later messages hide behind the other chunks.
  if (schedule == "interleaved") return A * slowest + (all - slowest) / chunks + messages * (chunks + 1) / 2;
  // A backward of stage 0 waits until its forward has passed all stages and come back; p are on their way at a time. zb's
  // weights do not delay it, and fill what is idle at the end.
  const double way = all - (schedule == "zb" ? weight : 0) + messages;
  if (schedule == "1f1b") return way + (A - 1) * std::max(slowest, way / p);
  const double fills = std::min({forward, backward - weight / p, weight / p}) * (std::min(A, p) - 1);
  return way * (p - 1) / p + A * std::max(slowest, way / p) - fills;
}

std::string Forecast::explanation() const {
  std::string text = std::string("most of the step is spent on ") + limit + ":";
  for (const auto& [name, time] : shares_of(*this))
    text += (text.ends_with(':') ? " " : ", ") + std::string(name) + ' ' + std::to_string(std::lround(100 * time / seconds)) + " %";
  return text;
}

Forecast forecast(const PlannedStep& step, const Cluster& cluster) {
  const ModelShape& s = step.shape;
  const MeshShape& mesh = step.mesh;
  const Kernels kernels(step, cluster);
  const std::vector<int> layers = deal(s.layers, mesh.pp, step.pp_chunks, s.vocabulary / (12.0 * s.channels));
  const std::vector<Passes> stages = passes_of(kernels, layers);
  std::vector<StageTimes> times;
  for (const Passes& stage : stages) times.push_back(stage.times());
  const Passes& own = stages[size_t(std::ranges::max_element(times, {}, &StageTimes::sum) - times.begin())];
  const Cost cost = (own.forward + own.backward) * step.micro_batches();
  Forecast f;
  f.products = cost[products], f.attention = cost[attention], f.memory = cost[memory], f.launches = cost[launches];
  f.tp = {cost[tp_total], cost[tp_exposed]}, f.cp = {cost[cp_total], cost[cp_exposed]};

  const Parameters first = parameters_of(step, layers[0]);
  const Ring data = ring_of(cluster, mesh.tp, mesh.cp * mesh.dp);
  const double pieces = step.zero == 0 ? 1 : data.ranks;
  f.dp = zero_communication(step, data, first, times[0]);
  if (!overlaps(cluster)) f.dp.exposed = f.dp.total;
  add_pipeline(f, step, cluster, times, 4 * first.embedding / pieces);
  const Cost update = kernels.update(first.all() / pieces, first.blocks + 2);
  f.update = update[memory], f.launches += update[launches];
  add_rates(f, step, cluster);
  return f;
}
