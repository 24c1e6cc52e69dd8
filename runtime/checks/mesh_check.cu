#include "runtime/checks/mesh_check.cuh"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "gpt/base/text.h"
#include "gpt/end_job.cuh"
#include "gpt/rehearsal.cuh"
#include "gpt/setup.cuh"

namespace {

// A number that a step has computed, or the elements of a tensor that a rank keeps.
struct Figure {
  enum Kind { loss, norm, gradient, weights } kind;
  std::string name;
  std::vector<float> values;
  Part part = {};    // of the whole tensor
  size_t first = 0;  // number of the first value in this part
};
using Figures = std::vector<Figure>;

// The same job with fewer layers and micro-batches: each chunk of the pipeline has one layer, and a step more
// micro-batches than there are chunks.
Options smaller(Options o) {
  const int chunks = o.mesh.pp * o.pp_chunks, multiple = o.pp_schedule == "interleaved" ? o.mesh.pp : 1;
  o.shape.layers = std::min(o.shape.layers, std::max(chunks, 2));
  if (o.measures_shares) o.shares.assign(size_t(o.mesh.dp), 1), o.shares[0] = 2;  // few, and not the same
  if (o.shares.empty()) o.global_batch = o.micro_batch * o.mesh.dp * round_up(std::min(o.micro_batches(), chunks + 1), multiple);
  else o.global_batch = o.micro_batch * int(o.all_shares());
  o.fp8_keep = std::min(o.fp8_keep, (o.shape.layers - 1) / 2);
  o.schedule.lr = std::min(o.schedule.lr, 3e-4);
  o.loss_scale = std::min(o.loss_scale, 1024.0), o.loss_scale_window = 0;
  o.random_biases = true;
  o.moments = "fp32";  // a moment rounded the other way differs by more than the bound for another order of sums
  o.compress = o.compress_weights = "none", o.compress_where = "all";  // for the same reason
  return o;
}

// The same steps on one rank. Recomputation saves memory, and changes no number.
Options alone(Options o, const std::string& dtype) {
  o.mesh = {}, o.pp_schedule = "1f1b", o.cp_method = "ring", o.pp_chunks = o.tp_pieces = 1, o.sms = {}, o.shares = {};
  o.zero = 0, o.reduce_dtype = "fp32", o.recompute = "block", o.offload = "none";
  if (dtype != o.dtype) o.dtype = dtype, o.attention = "auto", o.stochastic_rounding = o.fp8 = false;
  return o;
}

// Takes heads away until each rank's device has room for one rank's model in fp32 twice: in 16 bits the masters take an
// eighth more, and on the CPU device figures lie in the same memory. Collective.
void fit_heads(Options& o, const Job& job) {
  const int size = o.shape.head_size(), of_fp8 = o.fp8 ? 16 / std::gcd(size, 16) : 1;  // a rank's channels are 16, or 32, ...
  const int multiple = o.mesh.tp * std::lcm(of_fp8, o.cp_method == "ulysses" ? o.mesh.cp : 1);
  size_t free_bytes = 0, total_bytes = 0;
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  Mesh imagined(MeshShape(), 0);
  const auto needed = [&] { return build_model(alone(o, "fp32"), imagined, nullptr, true, 0)->memory().total(); };
  const auto set_heads = [&](int heads) { o.shape.heads = heads, o.shape.channels = heads * size; };
  while (o.shape.heads > multiple && 2 * needed() + memory_reserve() > free_bytes)
    set_heads(std::max(o.shape.heads / 2 / multiple, 1) * multiple);
  for (const std::string& heads : job.ranks.all_gather(std::to_string(o.shape.heads)))
    set_heads(std::min(o.shape.heads, std::stoi(heads)));
}

// Trains three steps on a mesh: the job's, or one rank. Returns their figures in the order of computation; backward
// begins with the last tensor.
Figures train(const Job& job, const Options& o, Mesh& mesh, const Datasets& data) {
  Job part = {o, job.ranks, mesh, job.stream, job.device, job.hooks, job.interruption};
  const std::unique_ptr<Model> model = build_model(o, mesh, job.stream, true, 0);
  double waited = 0;  // not used
  Batches batches(part, *model, data, waited);
  model->trained_store().initialize();
  if (&mesh == &job.mesh) rehearse(part, *model, batches.buffers(), [] {});
  const std::vector<TensorDescriptor>& tensors = model->tensors().tensors();
  Figures figures;
  const auto add_tensors = [&](Figure::Kind kind, State state, const char* name, float scale) {
    for (size_t i = tensors.size(); i-- > 0;) {
      Figure& figure = figures.emplace_back(Figure{kind, name + tensors[i].name, {}, tensors[i].part});
      for (const Slice& slice : model->trained_store().kept_slices()) {  // one of each tensor, at most
        if (slice.tensor != &tensors[i]) continue;
        figure.first = slice.first;
        figure.values.resize(slice.count);
        model->trained_store().copy_out(slice, state, figure.values.data());
        model->trained_store().wait_for_copies();
        for (float& value : figure.values) value /= scale;
      }
    }
  };
  for (size_t step = 0; step < 3; ++step) {
    const std::string name = " of step " + std::to_string(step + 1);
    model->begin_sums();
    run_step(*model, part.actions(), batches.of_step({step}), adamw_at(o, o.schedule.lr), float(o.grad_clip));
    figures.push_back({Figure::loss, "the loss" + name, {model->loss()}});
    // The update has added up the gradients over all ranks. It clips them only as it reads them.
    model->trained_store().settle_waiting();
    if (step == 0) add_tensors(Figure::gradient, State::gradient, "step 1's gradient of ", loss_scale_of(o).value);
    // With --delay the first step has applied nothing, so that there is no norm; and after the last one gradients wait.
    if (step > 0 || !o.delay) figures.push_back({Figure::norm, "the gradients' norm" + name, {model->gradient_summary().norm}});
  }
  if (o.delay) model->begin_sums(), model->update(adamw_at(o, o.schedule.lr), float(o.grad_clip));
  add_tensors(Figure::weights, State::weight, "step 3's ", 1);
  return figures;
}

// The L2 norm of the difference between a figure and the same part of `one`, whole. Among weights the biases of keys do
// not count.
double distance(const Figure& figure, const std::vector<float>& one) {
  const bool has_keys = figure.kind == Figure::weights && figure.name.ends_with("attn.c_attn.bias");
  double squares = 0;
  for (size_t i = 0; i < figure.values.size(); ++i) {
    const size_t place = figure.part.in_whole(figure.first + i);
    const double difference = double(figure.values[i]) - one[place];
    if (!has_keys || place * 3 / one.size() != 1) squares += difference * difference;
  }
  return std::sqrt(squares);
}

// Compares this rank's part of the mesh's figures with one rank's in fp32. own: one rank's figures in the mesh's
// storage type. Returns the number of the first figure that differs, and a description; none: "~".
std::string first_difference(const Figures& mesh, const Figures& fp32, const Figures& own, const Options& o) {
  const double terms = std::max({4.0 * o.shape.channels, double(o.shape.vocabulary), o.tokens()});
  const double products = 3 * 2.4e-8 * std::sqrt(terms * (24 * o.shape.layers + 4));
  const double sent = o.reduce_dtype == "bf16" ? 2 * 0.0017 * std::sqrt(o.mesh.dp * o.mesh.cp) : 0;
  const double of_loss = o.dtype == "fp32" ? 1e-5 : o.dtype == "bf16" ? 0x1p-10 : 0x1p-13;
  double squares = 0, own_squares = 0;  // sums of squares: of all gradients, and of their difference
  for (size_t i = 0; i < mesh.size(); ++i) {
    const std::vector<float>& one = fp32[i].values;
    const double norm = std::sqrt(std::inner_product(one.begin(), one.end(), one.begin(), 0.0));
    const double between = distance(own[i], one), difference = distance(mesh[i], one) / norm;
    if (mesh[i].kind == Figure::gradient) squares += norm * norm, own_squares += between * between;
    const double of_gradients = std::max(products, 2 * std::sqrt(own_squares / squares) + sent);
    const double open_signs = std::sqrt(0.8 * of_gradients * double(one.size())) + 2;
    const double of_norm = o.dtype == "fp32" ? 1e-5 : of_gradients;
    const double least[] = {of_loss, of_norm, products, 6 * o.schedule.lr * open_signs / norm};
    const double bound = std::max(2 * between / norm + sent, least[mesh[i].kind]);
    if (!(difference <= bound))
      return formatted("%6zu%s differs from one rank's by %.2g of it, and rounding explains %.2g", i,
                       mesh[i].name.c_str(), difference, bound);
  }
  return "~";
}

}  // namespace

void check_mesh(Job& job, const Datasets& data) {
  const Unobserved unobserved;
  const Options& given = job.options;
  if (!model_makers().contains("fp32"))
    usage_error("--check-mesh compares with fp32, which this build leaves out: make DTYPES='fp32 ", given.dtype,
                "' builds both");
  Options o = smaller(given);
  fit_heads(o, job);
  std::printf("check     3 steps on %d ranks and on one: %d of %d layers, %d of %d heads, %d %s %d micro-batches\n",
              job.ranks.size(), o.shape.layers, given.shape.layers, o.shape.heads, given.shape.heads,
              o.micro_batches(), o.micro_batches() > given.micro_batches() ? "in the place of" : "of", given.micro_batches());
  const std::string first = end_job_on_error(job.ranks, [&] {
    Mesh one;
    const Figures mesh = train(job, o, job.mesh, data), fp32 = train(job, alone(o, "fp32"), one, data);
    const Figures own = o.dtype == "fp32" ? fp32 : train(job, alone(o, o.dtype), one, data);
    return std::ranges::min(job.ranks.all_gather(first_difference(mesh, fp32, own, o)));
  });
  if (first != "~")
    fail("--check-mesh: ", first.substr(6), ": --trace-tensors on both, and dev/compare.py, find the operation");
  std::printf("check     the same: %zu tensors of 3 steps\n", TensorList(o.shape).tensors().size());
}
