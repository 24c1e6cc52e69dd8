// The meaning of several options together: the shape of the model, and whether ranks can split it and its batches.
#include "gpt/options.h"

#include <algorithm>
#include <climits>
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

// The options for a model's extents.
constexpr std::pair<const char*, int ModelShape::*> extents[] = {
    {"--layers", &ModelShape::layers}, {"--heads", &ModelShape::heads}, {"--channels", &ModelShape::channels},
    {"--vocab", &ModelShape::vocabulary}, {"--positions", &ModelShape::positions}};

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

// The problem with the samples of a step, of which all ranks have the same number; empty: there is none.
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

// The first problem that a room of this build finds.
std::string problem_of_a_room(std::string (*Room::*finds)(const StepOptions&), const StepOptions& o) {
  for (const Room* room : rooms())
    if (const std::string problem = room->*finds ? (room->*finds)(o) : ""; !problem.empty()) return problem;
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
  shape.vocabulary = data_vocabulary;
  for (const auto& [flag, extent] : extents)
    if (o.wanted.*extent) shape.*extent = o.wanted.*extent;
  if (o.seq_len == 0) o.seq_len = shape.positions ? shape.positions : 256;
  if (shape.positions == 0) shape.positions = o.seq_len;
  return shape;
}

void check_loaded_shape(const Options& o, const ModelShape& loaded, const std::string& folder) {
  for (const auto& [flag, extent] : extents)
    if (const int wanted = o.wanted.*extent, found = loaded.*extent; wanted && wanted != found)
      usage_error(flag, " ", wanted, ": the weights in ", folder, " have ", found, "; leave out ", flag);
  if (!o.model_given) return;
  const ModelShape named = named_shape(o.model);
  auto differs = [&](int ModelShape::*extent) { return !(o.wanted.*extent) && named.*extent != loaded.*extent; };
  if (differs(&ModelShape::layers) || differs(&ModelShape::heads) || differs(&ModelShape::channels))
    usage_error("--model ", o.model, ": the weights in ", folder, " have ", loaded.layers, " layers, ", loaded.heads,
                " heads, ", loaded.channels, " channels; leave out --model");
}

std::vector<int> divisors(int number, int most) {
  std::set<int> all;
  for (int d = 1; int64_t(d) * d <= number; ++d)
    if (number % d == 0) all.insert({d, number / d});
  return {all.begin(), all.upper_bound(most)};
}

std::string divisors_text(int number, int least) {
  std::vector<int> all = divisors(number, number);
  std::erase_if(all, [&](int d) { return d < least; });
  std::string text = joined(all, [](int d) { return std::to_string(d); });
  if (const size_t last = text.rfind(", "); last != text.npos) text.replace(last, 2, " or ");
  return text;
}

std::string cure_of_seq_len(const StepOptions& o, const std::string& flag, int divisor) {
  return concat(o.seq_len < divisor ? ": lower " + flag + ", or choose" : ": choose", " --seq-len ", std::max(o.seq_len / divisor, 1) * divisor);
}

Deal StepOptions::deal() const {
  const int all = global_batch / micro_batch;
  if (shares.empty()) return Deal(std::vector(size_t(mesh.batches()), all / mesh.batches()));
  std::vector<int> counts = shares;
  for (int& count : counts) count *= all / int(all_shares());
  return Deal(counts);
}

std::string batch_problem(const StepOptions& o) {
  if (const std::string problem = o.shares.empty() ? samples_problem(o) : ""; !problem.empty()) return problem;
  return problem_of_a_room(&Room::batch_problem, o);
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
  if (const int64_t most = o.generate ? INT_MAX - (1 << 20) : most_rows; o.rows() > most)  // rounded up, they are ints, too
    return concat(o.generate ? "--samples " : "--micro-batch ", o.micro_batch, " of --seq-len ", o.seq_len, " is ",
                  o.rows(), " tokens at a time, more than ", most, ": lower one of them");
  return problem_of_a_room(&Room::shape_problem, o);
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
  for (const Room* room : rooms())
    if (room->refuse_on_ranks) room->refuse_on_ranks(o);
  const int64_t at_once = o.shares.empty() ? ranks * o.mesh.pp * o.mesh.islands : o.all_shares();
  if (o.global_batch == 0) o.samples_alone = o.micro_batch, o.global_batch = int(std::min<int64_t>(o.micro_batch * at_once, INT_MAX));
  if (o.measures_shares) o.shares = fair_counts(std::vector(size_t(ranks), 1.0), o.global_batch / o.micro_batch);  // until they are measured
  refuse(batch_problem(o));
  LearningRateSchedule schedule = o.schedule;
  if (o.resume && !o.steps_given) schedule.steps = Options::most_steps;  // it is the run's
  refuse(attempt([&] { validate(schedule); }));
  if (o.train.empty() && !o.generate && !o.plan) usage_error("--train is missing: name text files or .bin token shards");
  if (o.out.empty() && (o.checkpoint_every || (o.resume && o.resume_from.empty())))
    usage_error("--out '' writes nothing: name a folder for checkpoints");
}
