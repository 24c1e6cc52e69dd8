// What several options mean together: the shape of the model, and whether ranks can split it and its batches.
#include "gpt/options.h"

#include <algorithm>
#include <climits>
#include <limits>
#include <set>
#include <utility>

#include "gpt/base/error.h"
#include "gpt/base/text.h"

namespace {

// Layers, heads, channels and positions, from small to large.
const std::vector<std::pair<std::string, ModelShape>> named_shapes = {
    {"gpt2", {12, 12, 768, 0, 1024}}, {"gpt2-medium", {24, 16, 1024, 0, 1024}}, {"gpt2-large", {36, 20, 1280, 0, 1024}},
    {"gpt2-xl", {48, 25, 1600, 0, 1024}}, {"gpt3-125m", {12, 12, 768, 0, 2048}}, {"gpt3-350m", {24, 16, 1024, 0, 2048}},
    {"gpt3-760m", {24, 16, 1536, 0, 2048}}, {"gpt3-1.3b", {24, 16, 2048, 0, 2048}}, {"gpt3-2.7b", {32, 32, 2560, 0, 2048}},
    {"gpt3-6.7b", {32, 32, 4096, 0, 2048}}, {"gpt3-13b", {40, 40, 5120, 0, 2048}}, {"gpt3-175b", {96, 96, 12288, 0, 2048}}};

// positions is 0 if it is the sequence length.
ModelShape named_shape(const std::string& name) {
  for (const auto& [known, shape] : named_shapes)
    if (known == name) return shape;
  const bool numbered = name.size() >= 2 && name.size() <= 4 && name[0] == 'd' &&
                        name.find_first_not_of("0123456789", 1) == std::string::npos;
  const int depth = numbered ? std::stoi(name.substr(1)) : 0;
  if (depth == 0) usage_error("--model ", excerpt(name), " is unknown: give gpt2, gpt3-125m, ... (--help) or dN");
  return {depth, depth, 64 * depth, 0, 0};
}

// "1, 2, 3 or 6"; those from `least` on.
std::string divisors_text(int number, int least = 1) {
  std::vector<int> all = divisors(number, number);
  std::erase_if(all, [&](int d) { return d < least; });
  std::string text = joined(all, [](int d) { return std::to_string(d); });
  if (const size_t last = text.rfind(", "); last != text.npos) text.replace(last, 2, " or ");
  return text;
}

// Why the ranks that --tp, --cp and --pp ask for cannot split this model.
std::string mesh_problem(const StepOptions& o) {
  const auto& [tp, cp, dp, pp, islands] = o.mesh;
  const int layers = o.shape.layers, heads = o.shape.heads;
  if (layers < pp * o.pp_chunks)
    return concat("--pp ", pp, o.pp_chunks > 1 ? " with --pp-chunks " + std::to_string(o.pp_chunks) : "", " needs ",
                  pp * o.pp_chunks, " layers or more, and the model has ", layers, ": lower ",
                  o.pp_chunks > 1 ? "one of them" : "it");
  if (heads % tp != 0)
    return concat("--tp ", tp, " does not divide the model's ", heads, " heads: choose ", divisors_text(heads));
  const bool is_ring = o.cp_method == "ring";
  if (cp > 1 && !is_ring && heads / tp % cp != 0)
    return concat("--cp-method ulysses: --cp ", cp, " does not divide the ", heads / tp, " heads",
                  tp > 1 ? " of a --tp rank" : "", ": choose ",
                  heads > tp ? divisors_text(heads / tp, 2) + ", or " : "", "--cp-method ring");
  return "";
}

// Why they cannot split a micro-batch, or launches cannot hold it. Generated text needs no gradients, and kernels count
// as int.
std::string micro_batch_problem(const StepOptions& o) {
  const auto& [tp, cp, dp, pp, islands] = o.mesh;
  const int parts = cp == 1 ? 1 : o.cp_method == "ring" ? 2 * cp : cp;  // of a sample
  const auto seq_len_for = [&](const char* flag, int divisor) {
    return (o.seq_len < divisor ? std::string(": lower ") + flag + ", or choose --seq-len " : ": choose --seq-len ") +
           std::to_string(std::max(o.seq_len / divisor, 1) * divisor);
  };
  if (o.seq_len % parts != 0)
    return concat("--cp ", cp, " cuts samples into ", parts, " equal parts, and ", parts, " does not divide --seq-len ",
                  o.seq_len, seq_len_for("--cp", parts));
  const int64_t rows = int64_t(o.micro_batch) * (o.seq_len / cp);
  const int64_t most = o.generate ? std::numeric_limits<int>::max() : most_rows;
  if (!o.generate && rows % tp != 0)
    return concat("--tp ", tp, " does not divide the ", rows, " rows of a micro-batch, --micro-batch ", o.micro_batch,
                  " of --seq-len ", o.seq_len, cp > 1 ? " over --cp " + std::to_string(cp) : "",
                  seq_len_for("--tp", tp * parts));
  if (rows > most)
    return concat(o.generate ? "--samples " : "--micro-batch ", o.micro_batch, " of --seq-len ", o.seq_len, " is ",
                  rows, " tokens at a time, more than ", most, ": lower one of them");
  return "";
}

// Why the model's sizes do not suit products in eight bits, whose rows and columns lie on multiples of 16 bytes.
std::string fp8_problem(const StepOptions& o) {
  const int channels = o.shape.channels / o.mesh.tp;
  const int64_t rows = int64_t(o.micro_batch) * (o.seq_len / o.mesh.cp);
  if (2 * o.fp8_keep >= o.shape.layers)
    return concat("--fp8: --fp8-keep ", o.fp8_keep, " keeps all of the model's ", o.shape.layers,
                  " blocks in bf16: lower it, or leave --fp8 out");
  if (channels % 16 != 0)
    return concat("--fp8: ", channels, " channels", o.mesh.tp > 1 ? " of a --tp rank" : "", " are no multiple of 16: choose ",
                  "--channels ", (channels / 16 + 1) * 16 * o.mesh.tp, " of a fresh model, or leave --fp8 out");
  if (rows % 16 != 0)
    return concat("--fp8: the ", rows, " rows of a micro-batch, --micro-batch ", o.micro_batch, " of --seq-len ", o.seq_len,
                  o.mesh.cp > 1 ? " over --cp " + std::to_string(o.mesh.cp) : "", ", are no multiple of 16: choose another "
                  "--micro-batch or --seq-len");
  return "";
}

// What is wrong with --shares; empty: nothing.
std::string shares_problem(const StepOptions& o) {
  if (o.mesh.pp > 1) return "--shares with --pp: a pipeline's ranks wait for each other in each micro-batch; leave one of them out";
  if (o.lora.is_on() && o.zero >= 2) return "--shares with --lora-rank and --zero 2 or 3 is not there yet: choose --zero 0 or 1";
  if (o.measures_shares && (o.global_batch % o.micro_batch != 0 || o.global_batch / o.micro_batch < o.mesh.dp))
    return concat("--shares auto: --global-batch ", o.global_batch, " must be a multiple of --micro-batch ", o.micro_batch, ", and have one for each of ",
                  o.mesh.dp, " data-parallel ranks");
  if (int(o.shares.size()) != o.mesh.dp)
    return concat("--shares has ", o.shares.size(), " numbers, and there are ", o.mesh.dp, " data-parallel ranks: give one for each");
  const int64_t at_once = o.all_shares() * o.micro_batch;
  if (at_once > most_samples)
    return concat("--shares: ", at_once, " samples at least, with --micro-batch ", o.micro_batch, ", are more than ", most_samples, ": lower them");
  if (o.global_batch % at_once != 0)
    return concat("--global-batch ", o.global_batch, " is no multiple of ", at_once, ", --micro-batch ", o.micro_batch,
                  " times the sum of --shares: choose ", (o.global_batch / at_once + 1) * at_once, ", or other shares");
  return "";
}

// The same where all ranks have the same number of micro-batches.
std::string samples_problem(const StepOptions& o) {
  const auto& [tp, cp, dp, pp, islands] = o.mesh;
  const int64_t at_once = int64_t(o.micro_batch) * dp * islands, next = o.global_batch / at_once * at_once + at_once;
  if (at_once * pp > most_samples)
    return concat("--micro-batch ", o.micro_batch, " on ", dp * pp * islands, " ranks is more than ", most_samples,
                  " samples: lower it");
  if (o.global_batch % at_once != 0 && dp * islands == 1)
    return concat("--global-batch ", o.global_batch, " is no multiple of --micro-batch ", o.micro_batch, ": choose ",
                  next, ", or lower --micro-batch");
  if (o.global_batch % at_once != 0)
    return concat("--global-batch ", o.global_batch, " is no multiple of ", at_once, ", --micro-batch ", o.micro_batch,
                  " on ", dp, tp * cp * pp > 1 ? " data-parallel" : "", " ranks", islands > 1 ? concat(" of each of ", islands, " islands") : "",
                  ": choose ", next,
                  ", or another number of ranks");
  return "";
}

}  // namespace

std::vector<std::string> gpt3_models() {
  std::vector<std::string> names;
  for (const auto& [name, shape] : named_shapes)
    if (name.starts_with("gpt3-")) names.push_back(name);
  return names;
}

ModelShape shape_of(Options& o, int data_vocabulary) {
  ModelShape shape = named_shape(o.model);
  if (o.seq_len == 0) o.seq_len = o.positions ? o.positions : shape.positions ? shape.positions : 256;
  if (o.layers) shape.layers = o.layers;
  if (o.heads) shape.heads = o.heads;
  if (o.channels) shape.channels = o.channels;
  shape.vocabulary = o.vocabulary ? o.vocabulary : data_vocabulary;
  shape.positions = o.positions ? o.positions : shape.positions ? shape.positions : o.seq_len;
  return shape;
}

void check_loaded_shape(const Options& o, const ModelShape& loaded, const std::string& folder) {
  auto check = [&](const char* flag, int wanted, int found) {
    if (wanted && wanted != found)
      usage_error(flag, " ", wanted, ": the weights in ", folder, " have ", found, "; leave out ", flag);
  };
  check("--layers", o.layers, loaded.layers);
  check("--heads", o.heads, loaded.heads);
  check("--channels", o.channels, loaded.channels);
  check("--vocab", o.vocabulary, loaded.vocabulary);
  check("--positions", o.positions, loaded.positions);
  if (!o.model_given) return;
  const ModelShape named = named_shape(o.model);
  auto differs = [](int asked_for, int named, int found) { return !asked_for && named != found; };
  if (differs(o.layers, named.layers, loaded.layers) || differs(o.heads, named.heads, loaded.heads) ||
      differs(o.channels, named.channels, loaded.channels))
    usage_error("--model ", o.model, ": the weights in ", folder, " have ", loaded.layers, " layers, ", loaded.heads,
                " heads, ", loaded.channels, " channels; leave out --model");
}

std::vector<int> divisors(int number, int most) {
  std::set<int> all;
  for (int d = 1; int64_t(d) * d <= number; ++d)
    if (number % d == 0) all.insert({d, number / d});
  return {all.begin(), all.upper_bound(most)};
}

Deal StepOptions::deal() const {
  const int all = global_batch / micro_batch;
  if (shares.empty()) return Deal(std::vector(size_t(mesh.batches()), all / mesh.batches()));
  std::vector<int> counts = shares;
  for (int& count : counts) count *= all / int(all_shares());
  return Deal(counts);
}

std::string batch_problem(const StepOptions& o) {
  const int pp = o.mesh.pp, at_once = o.micro_batch * o.mesh.batches();
  if (const std::string problem = o.shares.empty() ? samples_problem(o) : shares_problem(o); !problem.empty()) return problem;
  if (o.pp_schedule == "interleaved" && o.micro_batches() % pp != 0 && !o.generate)
    return concat("--pp-schedule interleaved: --global-batch ", o.global_batch, " gives each rank ", o.micro_batches(),
                  " micro-batches, no multiple of --pp ", pp, ": choose --global-batch ",
                  (o.micro_batches() / pp + 1) * pp * at_once, ", or another schedule");
  if (o.pp_schedule == "zb" && o.zero >= 2)
    return concat("--pp-schedule zb with --zero ", o.zero, ": the gradients of a layer come at two times, and --zero 2 "
                  "and 3 send them away at one; choose --zero 0 or 1, or another schedule");
  if (o.delay && o.zero >= 2)
    return concat("--delay 1 with --zero ", o.zero, ": gradients are cut and sent in each micro-step, and can't wait for a "
                  "step; choose --zero 0 or 1, or leave --delay out");
  if (o.low_rank() && o.zero >= 2)
    return concat("--compress ", o.compress, " with --zero ", o.zero, ": factors tell all ranks the sums of a whole matrix, once a step; "
                  "choose --zero 0 or 1, or --compress int8");
  if (o.offloads("gradients") && (!o.offloads("optimizer") || (o.mesh.dp * o.mesh.cp > 1 && o.zero < 3)))
    return concat("--offload ", o.offload, " moves the pieces of gradients that --zero 3 keeps, in the same windows as masters "
                  "and moments: ", o.offloads("optimizer") ? "add --zero 3" : "add optimizer to the list");
  if (o.offloads("gradients") && (o.mesh.tp > 1 || pp > 1 || o.lora.is_on() || o.compresses_gradients()))
    return concat("--offload ", o.offload, " with --tp, --pp, --compress or --lora-rank: sums of gradients over these ranks, or "
                  "of codes, are made on the device, and those of adapters are few; leave gradients out of the list");
  if (o.offloads("activations") && o.recompute != "block")
    return concat("--offload ", o.offload, " moves the inputs of blocks, and --recompute ", o.recompute, " keeps other "
                  "activations on the device: add --recompute block");
  if (o.pp_schedule == "zb" && o.recompute != "none")
    return concat("--pp-schedule zb with --recompute ", o.recompute, ": the gradients of weights, which come last, "
                  "need all activations; leave --recompute out, or choose another schedule");
  return "";
}

std::string shape_problem(const StepOptions& o) {
  const ModelShape& s = o.shape;
  if (s.channels % s.heads != 0)
    return concat("--heads ", s.heads, " do not divide --channels ", s.channels, ": choose a divisor");
  if (s.head_size() < 16 || s.head_size() > 128)
    return concat("--channels ", s.channels, " over --heads ", s.heads, " gives head size ", s.head_size(),
                  ": choose heads of 16 to 128 channels");
  if (o.seq_len > s.positions)
    return concat("--seq-len ", o.seq_len, " is longer than the model's ", s.positions,
                  " positions: lower it, or raise --positions of a fresh model");
  const std::string mesh = mesh_problem(o);
  if (!mesh.empty()) return mesh;
  const std::string batch = micro_batch_problem(o);
  return batch.empty() && o.fp8 ? fp8_problem(o) : batch;
}

void complete_options(Options& o, int ranks) {
  std::string over;
  for (const auto& [flag, count] : {std::pair("--islands", o.mesh.islands), {"--tp", o.mesh.tp}, {"--cp", o.mesh.cp}, {"--pp", o.mesh.pp}}) {
    if (ranks % count != 0)
      usage_error(flag, " ", count, " does not divide the number of ranks", over, ", ", ranks, ": choose ",
                  divisors_text(ranks), ", or another number of ranks");
    ranks /= count;
    if (count > 1) over += (over.empty() ? " over " : " and ") + std::string(flag);
  }
  o.mesh.dp = ranks;
  o.sms.beside_islands = o.outer.delay > 0;
  for (const Room* room : rooms())
    if (room->refuse_on_ranks) room->refuse_on_ranks(o);
  const int64_t at_once = o.shares.empty() ? ranks * o.mesh.pp * o.mesh.islands : o.all_shares();
  if (o.global_batch == 0) o.samples_alone = o.micro_batch, o.global_batch = int(std::min<int64_t>(o.micro_batch * at_once, INT_MAX));
  if (o.measures_shares) o.shares = fair_counts(std::vector(size_t(ranks), 1.0), o.global_batch / o.micro_batch);  // until they are measured
  refuse(batch_problem(o));
  refuse(attempt([&] { validate(o.schedule); }));
  if (o.train.empty() && !o.generate && !o.plan) usage_error("--train is missing: name text files or .bin token shards");
  if (o.out.empty() && (o.checkpoint_every || (o.resume && o.resume_from.empty())))
    usage_error("--out '' writes nothing: name a folder for checkpoints");
}
