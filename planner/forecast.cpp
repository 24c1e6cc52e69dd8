#include "planner/forecast.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "parallel/pipeline.h"

namespace {

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
  if (all <= host) return {double(size), c.inside.bandwidth * c.link_share / c.ranks_per_device, c.inside.latency};
  const int members = std::clamp(host / stride, 1, size), rings = host / members;
  double bandwidth = c.between.bandwidth / rings;
  if (members > 1) bandwidth = std::min(bandwidth, c.inside.bandwidth / c.ranks_per_device);
  const double hosts = double(size) / members;
  const double latency = (c.between.latency * hosts + c.inside.latency * (size - hosts)) / size;
  return {double(size), bandwidth * c.link_share, latency};
}

Ring ring_of(const Cluster& c, int stride, int size) { return ring_of(c, stride, size, stride * size); }

// ---- what a pass computes

struct Cost {
  double products = 0, attention = 0, memory = 0, launches = 0, tp_exposed = 0, cp_exposed = 0, tp = 0, cp = 0;
  double weight = 0;  // of it: products for the gradients of weights, which zb delays

  double seconds() const { return products + attention + memory + launches + tp_exposed + cp_exposed; }
};
Cost sum(const Cost& a, const Cost& b, double times = 1) {
  return {a.products + times * b.products,     a.attention + times * b.attention,   a.memory + times * b.memory,
          a.launches + times * b.launches,     a.tp_exposed + times * b.tp_exposed, a.cp_exposed + times * b.cp_exposed,
          a.tp + times * b.tp,                 a.cp + times * b.cp,                 a.weight + times * b.weight};
}
Cost operator+(const Cost& a, const Cost& b) { return sum(a, b); }
Cost operator*(const Cost& c, double n) { return sum({}, c, n); }
Cost& operator+=(Cost& a, const Cost& b) { return a = a + b; }

// The kernels of a rank, in the order of gpt.cuh; FLOPs and bytes as dev/roofline.py has them.
class Kernels {
 public:
  Kernels(const PlannedStep& step, const Cluster& cluster)
      : step_(step), device_(cluster.device), past_(cluster.software == Software::megatron_2021),
        tp_(ring_of(cluster, 1, step.mesh.tp)), cp_(ring_of(cluster, step.mesh.tp, step.mesh.cp)) {
    const bool is_fp32 = step.dtype == "fp32";
    const double peak = device_.peak(is_fp32) / cluster.ranks_per_device;
    product_ = peak * device_.product_share;
    attention_forward_ = peak * device_.attention_forward;
    attention_backward_ = peak * device_.attention_backward;
    elements_ = device_.fp32 * device_.elements / cluster.ranks_per_device;
    bandwidth_ = device_.bandwidth * device_.bandwidth_share / cluster.ranks_per_device;
    norm_row_ = device_.norm_row * cluster.ranks_per_device, loss_row_ = device_.loss_row * cluster.ranks_per_device;
    keys_ = step.seq_len + device_.attention_block;
    w_ = is_fp32 ? 4 : 2;
    N_ = step.mesh.tp, C_ = step.shape.channels, c_ = C_ / N_, T_ = step.seq_len;
    R_ = double(step.micro_batch) * T_ / step.mesh.cp, r_ = past_ ? R_ : R_ / N_;
    Vs_ = round_up((step.shape.vocabulary + step.mesh.tp - 1) / step.mesh.tp, 128);
    accumulates_ = step.micro_batches() > 1;
    pieces_ = past_ ? 1 : step.tp_pieces;
    rows_ = tp_.gather(R_ * C_ * w_);
  }

  Cost forward() const { return activations() + product_and_rows(R_, C_, 4 * c_); }

  Cost backward() const {
    Cost cost;
    const bool block = step_.recompute == "block";
    if (block) cost += past_ ? forward() : activations();
    if (step_.recompute == "gelu") cost += gelu_forward();
    const double regathered = block || past_ ? 0 : rows_;  // norm1 and norm2 are gathered again
    const Cost down = weight_product(4 * c_, C_), up = weight_product(C_, 4 * c_);
    const Cost projection = weight_product(c_, C_), qkv = weight_product(C_, 3 * c_);
    const Cost attention = attention_backward();
    cost += product_and_rows(R_, 4 * c_, C_) + elements(4 * R_ * c_, 20, 3);  // gelu_backward
    cost += down + behind(regathered, down.seconds());
    cost += product_and_rows(R_, C_, 4 * c_, past_ ? 0 : up.seconds()) + up;
    cost += layernorm_backward();
    cost += product_and_rows(R_, c_, C_);
    cost += projection + attention + behind(regathered, projection.seconds() + attention.seconds());
    cost += product_and_rows(R_, C_, 3 * c_, past_ ? 0 : qkv.seconds()) + qkv;
    cost += layernorm_backward();
    cost.weight = down.products + up.products + projection.products + qkv.products;
    return cost;
  }

  Cost embedding_forward() const { return elements(R_ * C_, 1, 3) + exposed(rows_); }
  Cost embedding_backward() const { return kernel(2 * R_ * C_, 2 * R_ * C_ * (w_ + 4)) + exposed(rows_); }

  // Final norm, logits, loss and their gradients; the forward of it is done at the start of backward.
  Cost head() const {
    Cost cost = layernorm_forward() + exposed(past_ ? 0 : rows_);
    cost += product(R_, Vs_, C_) + rows(R_, Vs_, 6, 2, loss_row_ * std::clamp(Vs_ * w_ / 2048, 1.0, 8.0));
    if (N_ > 1) cost += elements(R_ * Vs_, 2, 1) + exposed(tp_.gather(12 * R_ * N_));
    cost += weight_product(Vs_, C_, false) + product(R_, C_, Vs_) + exposed(rows_) + layernorm_backward();
    return cost;
  }

  // Norm and AdamW of so many elements; each unit has launches of its own.
  Cost update(double count, int units) const {
    Cost cost = kernel(2 * count, 4 * count) + kernel(15 * count, (w_ == 4 ? 28 : 30) * count);
    cost.launches = 2 * units * device_.launch;
    return cost;
  }

 private:
  Cost timed(double Cost::*kind, double flops, double rate, double bytes) const {
    Cost cost;
    cost.*kind = std::max(flops / rate, bytes / bandwidth_);
    cost.launches = device_.launch;
    return cost;
  }
  Cost kernel(double flops, double bytes) const { return timed(&Cost::memory, flops, elements_, bytes); }
  // `passes`: how often each of these elements is read or written
  Cost elements(double count, double flops, double passes) const { return kernel(flops * count, passes * count * w_); }
  // The same where sums over the elements of a row are needed, which take so many seconds.
  Cost rows(double count, double columns, double flops, double passes, double row) const {
    Cost cost = elements(count * columns, flops, passes);
    cost.memory += count * row;
    return cost;
  }
  // D (m,n) = A (m,k) · B (k,n). A and B are read while others of their elements are multiplied; D is written (`out` bytes an
  // element) when that is done.
  Cost product(double m, double n, double k, double out) const {
    Cost cost;
    cost.products = std::max(2 * m * n * k / product_, (m + n) * k * w_ / bandwidth_) + m * n * out / bandwidth_;
    cost.launches = device_.launch;
    return cost;
  }
  Cost product(double m, double n, double k) const { return product(m, n, k, w_); }
  // The gradients of a weight (inputs, outputs), which are added to those of the micro-batches before; and of its bias.
  Cost weight_product(double inputs, double outputs, bool has_bias = true) const {
    const Cost weight = product(inputs, outputs, R_, (past_ ? w_ : 4) * (accumulates_ ? 2 : 1));
    return has_bias ? weight + elements(R_ * outputs, 1, 1) : weight;
  }

  Cost exposed(double seconds) const {
    Cost cost;
    cost.tp = cost.tp_exposed = seconds;
    return cost;
  }
  // Communication that goes on while something else is computed.
  Cost behind(double communication, double computed) const {
    Cost cost = exposed(communication);
    if (device_.overlaps) cost.tp_exposed = std::max(0.0, communication - computed);
    return cost;
  }
  // A product whose rows are gathered before it, or whose sums are scattered after it, in pieces: one travels while another is
  // multiplied. `meanwhile` is computed while the last sums travel.
  Cost product_and_rows(double m, double n, double k, double meanwhile = 0) const {
    Cost cost = product(m, n, k);
    if (N_ == 1) return cost;
    const double alone = rows_ / pieces_ + (pieces_ - 1) * std::max(0.0, rows_ - cost.products) / pieces_;
    cost.launches *= pieces_;
    return cost + behind(rows_, rows_ - alone + meanwhile);
  }

  Cost gelu_forward() const { return elements(4 * R_ * c_, 10, 2); }
  // In the past bias, dropout and the sum had a kernel of their own.
  Cost layernorm_forward() const { return rows(r_, C_, 8, past_ ? 6 : 4, norm_row_); }
  Cost layernorm_backward() const { return rows(r_, C_, 20, past_ ? 6 : 4, norm_row_); }

  // A block's forward without its last product, which recomputation leaves out.
  Cost activations() const {
    return layernorm_forward() * 2 + product_and_rows(R_, 3 * c_, C_) + attention_forward() +
           product_and_rows(R_, C_, c_) + product_and_rows(R_, 4 * c_, C_) + gelu_forward();
  }

  Cost attention_forward() const {
    return past_ ? scores(4, 6) : in_ring(timed(&Cost::attention, 2 * R_ * keys_ * c_, attention_forward_, 4 * R_ * c_ * w_), w_);
  }
  Cost attention_backward() const {
    return past_ ? scores(8, 10) : in_ring(timed(&Cost::attention, 7 * R_ * keys_ * c_, attention_backward_, 8 * R_ * c_ * w_), w_ + 4);
  }
  // Whole products of queries and keys, whose (B,NH,T,T) scores are written and read so many times, and the mask of their
  // dropout, a byte each, once.
  Cost scores(double products, double passes) const {
    Cost cost = timed(&Cost::attention, products * R_ * T_ * c_, product_, 0);
    cost.attention += R_ * T_ * step_.shape.heads / N_ * (passes * w_ + 1) / bandwidth_;
    return cost;
  }
  // Context parallelism: keys and values travel behind the attention to the last ones, with so many bytes an element, and the
  // last gradients come home behind nothing. In Ulysses four tensors travel before and after attention.
  Cost in_ring(Cost attention, double bytes) const {
    const double hops = cp_.ranks - 1, hop = cp_.send(2 * R_ * c_ * bytes);
    if (hops == 0) return attention;
    const bool ulysses = step_.cp_method == "ulysses";
    attention.cp = attention.cp_exposed = ulysses ? cp_.gather(4 * R_ * c_ * w_) : hops * hop;
    if (ulysses) return attention;
    const double home = bytes > w_ ? cp_.send(2 * R_ * c_ * 4) : 0;
    if (device_.overlaps)
      attention.cp_exposed = std::min(attention.cp, hops * std::max(0.0, hop - attention.attention / cp_.ranks) + home);
    attention.launches *= cp_.ranks;
    return attention;
  }

  const PlannedStep& step_;
  const Device& device_;
  bool past_, accumulates_;
  Ring tp_, cp_;
  double product_, attention_forward_, attention_backward_, elements_, bandwidth_, norm_row_, loss_row_, keys_;
  double w_, N_, C_, c_, T_, R_, r_, Vs_, pieces_;
  double rows_;  // to gather or scatter (R,C)
};

// ---- data parallelism

struct Parameters {
  double embedding, block, blocks;
  double all() const { return embedding + block * blocks; }
};

// What a step of a rank gathers and reduces for ZeRO. forward, backward: of one micro-batch
Forecast::Communication zero_communication(const PlannedStep& step, const Ring& ring, const Parameters& p, double forward,
                                           double backward, bool overlaps) {
  const double w = step.dtype == "fp32" ? 4 : 2, g = step.reduce_dtype == "fp32" ? 4 : w, A = step.micro_batches();
  if (ring.ranks == 1) return {};
  const double reduce_block = ring.gather(g * p.block) * (step.zero == 0 ? 2 : 1), gather_block = ring.gather(w * p.block);
  const double reduce_embedding = ring.gather(g * p.embedding) * (step.zero == 0 ? 2 : 1);
  const double gather_embedding = ring.gather(w * p.embedding);
  const double reduce = p.blocks * reduce_block, gather = p.blocks * gather_block;
  // For the last reductions no backward is left, and for the first gather no update.
  const double tail = reduce_block + reduce_embedding, first = step.zero == 0 ? 0 : gather_block;
  Forecast::Communication c;
  if (step.zero < 2) {
    c.total = reduce + reduce_embedding;
    c.exposed = std::max(tail, c.total - backward);
    if (step.zero == 1) c.total += gather + gather_embedding, c.exposed += std::max(first, gather - forward);
  } else {
    const bool gathers = step.zero == 3;
    const double later_gathers = gathers ? gather * std::max(0.0, 1 - 2 / p.blocks) : 0;  // two stay in the ring's slots
    c.total = A * reduce + reduce_embedding + gather + gather_embedding + (2 * A - 1) * later_gathers;
    c.exposed = std::max(tail, reduce + later_gathers + reduce_embedding - backward) + std::max(first, gather - forward);
    c.exposed += (A - 1) * (std::max(0.0, later_gathers - forward) + std::max(0.0, reduce + later_gathers - backward));
  }
  if (!overlaps) c.exposed = c.total;
  return c;
}

struct Share {
  const char* name;
  double seconds;
};
std::array<Share, 6> shares_of(const Forecast& f) {
  const double communication = f.tp.exposed + f.cp.exposed + f.dp.exposed + f.pp.exposed;
  return {{{"products", f.products}, {"attention", f.attention}, {"memory", f.memory + f.update}, {"communication", communication},
           {"bubble", f.bubble - f.pp.exposed}, {"launches", f.launches}}};
}

}  // namespace

double pipeline_seconds(const std::string& schedule, const std::vector<StageTimes>& stages, int chunks, int micro_batches,
                        double message) {
  const double A = micro_batches, p = double(stages.size()), v = chunks;
  double all = 0, weight = 0, slowest = 0, slowest_forward = 0, slowest_backward = 0;
  for (const StageTimes& s : stages) {
    all += s.sum(), weight += s.weight;
    slowest = std::max(slowest, s.sum());
    slowest_forward = std::max(slowest_forward, s.forward), slowest_backward = std::max(slowest_backward, s.backward);
  }
  const double messages = 2 * (p - 1) * message;
  if (p == 1) return A * slowest;
  if (schedule == "gpipe") return all + (A - 1) * (slowest_forward + slowest_backward) + messages;
  // What fills and drains is a chunk of each other stage. Later messages hide behind the other chunks.
  if (schedule == "interleaved") return A * slowest + (all - slowest) / v + messages * (v + 1) / 2;
  // A backward of stage 0 waits until its forward has passed all stages and come back; p are on their way at a time. zb's
  // weights do not delay it, and fill what is idle at the end.
  const double way = all - (schedule == "zb" ? weight : 0) + messages;
  if (schedule == "1f1b") return way + (A - 1) * std::max(slowest, way / p);
  const double fills = std::min({slowest_forward, slowest_backward - weight / p, weight / p}) * (std::min(A, p) - 1);
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
  const bool past = cluster.software == Software::megatron_2021, overlaps = cluster.device.overlaps && !past;
  const int p = mesh.pp, A = step.micro_batches();
  const double C = s.channels, tp = mesh.tp, w = step.dtype == "fp32" ? 4 : 2;

  // Stages: the first one has the embedding, the last one the head. All others are alike but for their layers.
  const Cost forward = kernels.forward(), backward = kernels.backward();
  const Cost embedding = kernels.embedding_forward(), embedding_backward = kernels.embedding_backward(), head = kernels.head();
  const std::vector<int> layers = deal(s.layers, p, step.pp_chunks, s.vocabulary / (12.0 * C));
  const double layer_f = forward.seconds(), layer_b = backward.seconds();
  std::vector<StageTimes> stages(size_t(p), StageTimes{});
  int slowest = 0;
  for (int i = 0; i < p; ++i) {
    StageTimes& stage = stages[size_t(i)];
    stage = {layers[size_t(i)] * layer_f, layers[size_t(i)] * layer_b, layers[size_t(i)] * backward.weight};
    if (i == 0) stage.forward += embedding.seconds(), stage.backward += embedding_backward.seconds();
    if (i == p - 1) stage.backward += head.seconds();
    if (stage.sum() > stages[size_t(slowest)].sum()) slowest = i;
  }
  const double own_layers = layers[size_t(slowest)];
  Cost own = (forward + backward) * own_layers;
  if (slowest == 0) own += embedding + embedding_backward;
  if (slowest == p - 1) own += head;
  own = own * A;

  Forecast f;
  f.products = own.products, f.attention = own.attention, f.memory = own.memory, f.launches = own.launches;
  f.tp = {own.tp, own.tp_exposed}, f.cp = {own.cp, own.cp_exposed};

  const int stage_ranks = mesh.tp * mesh.cp * mesh.dp;
  const Ring next = ring_of(cluster, stage_ranks, p), data = ring_of(cluster, mesh.tp, mesh.cp * mesh.dp);
  const double message = next.send(double(step.micro_batch) * step.seq_len / mesh.cp * C / tp * w);
  const double without = pipeline_seconds(step.pp_schedule, stages, step.pp_chunks, A, 0);
  const double pipeline = pipeline_seconds(step.pp_schedule, stages, step.pp_chunks, A, message);
  f.bubble = pipeline - A * stages[size_t(slowest)].sum();
  f.pp = {p > 1 ? 2.0 * A * step.pp_chunks * message : 0, pipeline - without};
  if (!overlaps) f.bubble += f.pp.total, f.pp.exposed += f.pp.total;

  // Stage 0 ends last: behind it nothing hides. Both ends have wte.
  const Parameters own_parameters = {double(round_up(s.vocabulary, 128)) * C / tp + double(s.positions) * C,
                                     12 * C * C / tp + (7 / tp + 6) * C, double(layers[0])};
  f.dp = zero_communication(step, data, own_parameters, stages[0].forward, stages[0].backward, overlaps);
  if (p > 1) {
    const double pieces = step.zero == 0 ? 1 : data.ranks;
    const double ends = 2 * ring_of(cluster, stage_ranks * (p - 1), 2, stage_ranks * p).gather(4 * own_parameters.embedding / pieces);
    f.pp.total += ends, f.pp.exposed += ends, f.bubble += ends;
  }
  const double updated = own_parameters.all() / (step.zero == 0 ? 1 : data.ranks);
  const Cost update = kernels.update(updated, int(own_parameters.blocks) + 2);
  f.update = update.memory, f.launches += update.launches;
  f.seconds = own.seconds() + f.bubble + f.dp.exposed + f.update + update.launches;

  const double tokens = double(step.global_batch) * step.seq_len;
  const double parameters = (s.vocabulary + s.positions) * C + s.layers * (12 * C * C + 13 * C) + 2 * C;
  f.tokens_per_s = tokens / f.seconds;
  f.model_flops = tokens * (6 * parameters + 6.0 * s.layers * C * step.seq_len);
  const double devices = double(mesh.ranks()) / cluster.ranks_per_device, peak = cluster.device.peak(step.dtype == "fp32");
  if (peak > 0) f.mfu = f.model_flops / f.seconds / (devices * peak);
  f.limit = std::ranges::max(shares_of(f), {}, &Share::seconds).name;
  return f;
}
