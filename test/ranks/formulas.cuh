// Formulas for the bytes that a rank sends in a step, by group and collective, and for its memory, by category
// (gpt/README.md and the pages of the rooms).
#pragma once

#include "extensions/fp8/options.h"
#include "test/ranks/training.cuh"

using BytesSent = std::map<std::string, std::map<std::string, double>>;

// The bytes that data parallelism sends in a step. A float has `wide` bytes, and a T has `narrow`. Padding is included:
// it travels too. bits: of compressed gradients; 0: they are not; compress_weights: they have eight bits
template <class T>
BytesSent bytes_of_step(Mesh& mesh, const Shards& shards, int stage, int micro_steps, int bits = 0, bool compress_weights = false) {
  const int layers = shards.units() - 2, world = mesh.world().size();
  const double others = double(mesh.data().size() - 1), wide = sizeof(float), narrow = sizeof(T);
  const double A = micro_steps, block = double(shards.piece(1)), rest = double(shards.piece(0) + shards.piece(layers + 1));
  const double all = rest + layers * block;
  std::map<std::string, double> bytes;
  if (stage == 0) bytes["all_reduce"] = 2 * others * all * wide;
  if (stage == 1) bytes["reduce_scatter"] = others * all * wide;
  if (stage >= 2) bytes["reduce_scatter"] = others * (rest + A * layers * block) * wide;
  // A byte or half a byte for each, and two for each 256, up to a multiple of 16.
  const auto message = [&](int unit, int bits) {
    const double count = double(shards.piece(unit));
    return others * 16 * std::ceil((count * bits / 8 + 2 * std::ceil(count / 256)) / 16);
  };
  const auto messages = [&](int bits, double times) {  // blocks are sent that often
    return message(0, bits) + message(layers + 1, bits) + times * layers * message(1, bits);
  };
  if (bits > 0) bytes = {{"all_to_all", messages(bits, stage >= 2 ? A : 1)}};
  if (bits > 0 && stage == 0) bytes["all_gather"] = messages(bits, 1);
  if (stage == 1 || stage == 2) bytes["all_gather"] = compress_weights ? messages(8, 1) : others * all * narrow;
  // Forward and backward of each micro-step, but the two blocks that are still there when the direction turns.
  const double gathered = layers + (2 * A - 1) * std::max(layers - 2, 0);
  if (stage == 3) bytes["all_gather"] = compress_weights ? messages(8, gathered / layers) : others * (rest + gathered * block) * narrow;
  BytesSent by_group;
  if (others > 0) by_group["data"] = bytes;
  by_group["world"]["all_reduce"] = double(world - 1) / world * 2 * (sizeof(StepSums) + sizeof(double));
  return by_group;
}

// ---- layers

inline double rows_of(const ModelOptions& options, int cp) { return double(options.micro_batch) * options.shape.positions / cp; }
inline size_t round_to_tensor(const TensorList& list, size_t count) { return round_up(count, list.alignment()); }
inline int own_layers(const TensorList& list) {
  int layers = 0;
  for (const Layers& chunk : list.chunks()) layers += chunk.count;
  return layers;
}

// Bytes that the ranks that share layers send in a step of A micro-batches, by collective.
template <class T>
std::map<std::string, double> bytes_of_layers(const ModelOptions& options, const TensorList& list, const Shards& shards, int A,
                                              int cp = 1) {
  const int C = options.shape.channels, l = own_layers(list), tp = list.tp();
  const int embedding = list.is_first_stage(), head = list.is_last_stage();
  const double R = rows_of(options, cp), one = A * (tp - 1.0) / tp * R * C * sizeof(T);  // a gather, or a scatter, of all rows
  double summed = 0;  // elements of LayerNorms' gradients that this rank keeps
  for (int number = 0; number < shards.units(); ++number) {
    const Unit& unit = list.units()[size_t(number)];
    const size_t begin = options.store.zero ? shards.begin(number) : 0;
    const size_t end = options.store.zero ? begin + shards.piece(number) : unit.count;
    summed += std::max(0.0, double(std::min(end, unit.count)) - double(std::max(begin, unit.summed)));
  }
  if (options.store.zero == 0) CHECK(summed == double(size_t(4 * l + 2 * head) * round_to_tensor(list, size_t(C))));
  return {{"all_gather", one * ((options.splits_backward ? 8 : 6) * l + embedding + head) + 12 * A * R * (tp - 1) * head},
          {"reduce_scatter", one * ((options.recompute == Recompute::block ? 5 : 4) * l + embedding + head)},
          {"all_reduce", 2 * (tp - 1.0) / tp * sizeof(float) * summed}};
}

// Bytes that the ranks that share sequences send in a step of A micro-batches, by collective.
template <class T>
std::map<std::string, double> bytes_of_sequences(const ModelOptions& options, const TensorList& list, int A, int cp) {
  const double R = rows_of(options, cp), c = options.shape.channels / list.tp(), w = sizeof(T), layers = A * own_layers(list);
  const bool again = options.recompute == Recompute::block;
  if (method_of(options) == ContextMethod::ring) return {{"send_receive", layers * (cp - 1) * 2 * R * c * ((again ? 3 : 2) * w + 4)}};
  return {{"all_to_all", layers * (cp - 1) / cp * (again ? 12 : 8) * R * c * w}};
}

// Memory by category, without the gaps between arrays, each of which begins at a multiple of 256 bytes.
template <class T>
std::map<std::string, double> bytes_of_activations(const ModelOptions& options, const TensorList& list, int cp = 1) {
  const double C = options.shape.channels, N = list.tp(), R = rows_of(options, cp), r = R / N, w = sizeof(T);
  const double heads = options.shape.heads, Vs = list.vocabulary_rows();
  const double logit_rows = std::ceil(R / options.logit_chunks), slots = options.slots;
  const double layers = slots * std::ranges::max(list.chunks(), {}, &Layers::count).count;
  const double kept = 16 + (cp > 1 && method_of(options) == ContextMethod::ulysses);  // times C: tensors of a layer
  const double of_layers[] = {layers * r * (kept * C * w + 16 + 4 * heads),
                              layers * r * ((kept - 4) * C * w + 16 + 4 * heads) + r * 4 * C * w,
                              layers * r * C * w + r * ((kept - 1) * C * w + 16 + 4 * heads)};
  const double of_head = slots * r * (2 * C * w + 8) + logit_rows * (Vs * w + 4);
  std::map<std::string, double> bytes = {
      {"activations", of_layers[int(options.recompute)] + (list.is_last_stage() ? of_head : 0)}};
  if (N > 1) bytes["tensor parallel"] = 3 * R * C * w + C * w + N * 12 * logit_rows;
  const bool is_ring = method_of(options) == ContextMethod::ring;
  if (cp > 1) bytes["context parallel"] = R * C / N * (is_ring ? 4 * w + 40 : 6 * w) + (is_ring ? 4 * R * heads / N : 0);
  if (!list.is_first_stage() || !list.is_last_stage()) bytes["stage buffers"] = (options.splits_backward ? 8 : 6) * r * C * w;
  return bytes;
}

// ---- pipelines

// Is this unit gathered as codes, with ZeRO 3?
inline bool gathers_codes(const StoreOptions& store, const TensorList& list, int unit) {
  const auto& fp8 = store.rooms.of<Fp8Options>();
  return store.zero == 3 && list.is_block(unit) && list.has(unit) && !fp8.tiles && fp8.has(unit - 1, list.shape().layers);
}
// What all ranks get to know of such a unit once after an update: four scales, and its vectors.
template <class T>
double shared_with_codes(const TensorList& list, int unit) {
  const Unit& all = list.units()[size_t(unit)];
  return 4 * 16 + double(all.count - all.decayed) * sizeof(T);
}

// How many bytes of this rank's pieces ZeRO 3 gathers: the blocks take turns in two unit buffers, and each block is
// gathered while the block before it computes, the first block of an action too.
template <class T>
double gathered_in_pipeline(const StoreOptions& store, const Actions& actions, const TensorList& list, const Shards& shards) {
  const auto piece = [&](int unit) { return double(shards.piece(unit)) * (gathers_codes(store, list, unit) ? 1 : sizeof(T)); };
  std::vector<int> blocks;  // in the order in which they are computed
  for (const Action& action : actions) {
    const Layers& chunk = list.chunks()[size_t(action.chunk)];
    for (int i = 0; i < chunk.count; ++i)
      blocks.push_back(1 + chunk.first + (action.work == Work::forward ? i : chunk.count - 1 - i));
  }
  int computed = blocks[0], other = 0;  // the update has gathered the first one, and what is no block
  double bytes = piece(0) + piece(list.final_norm_unit()) + piece(computed);
  for (int block : blocks) {
    if (block != computed) bytes += block == other ? 0 : piece(block);
    if (block != computed) other = std::exchange(computed, block);
  }
  return bytes;
}

// Bytes that a step sends in all groups of a mesh.
template <class T>
BytesSent bytes_of_mesh(const ModelOptions& options, Mesh& mesh, const TensorList& list, const Shards& shards) {
  const Actions actions = schedule_of(options, mesh);
  const int stage = options.store.zero, A = micro_batches(options, mesh), world = mesh.world().size();
  const double others = mesh.data().size() - 1, wide = sizeof(float), narrow = sizeof(T);
  const double blocks = own_layers(list) * double(list.chunks().empty() ? 0 : shards.piece(list.chunks()[0].first + 1));
  const double rest = double(shards.piece(0) + shards.piece(list.final_norm_unit()));
  BytesSent bytes;
  if (stage == 0) bytes["data"]["all_reduce"] = 2 * others * (rest + blocks) * wide;
  if (stage == 1) bytes["data"]["reduce_scatter"] = others * (rest + blocks) * wide;
  if (stage >= 2) bytes["data"]["reduce_scatter"] = others * (rest + A * blocks) * wide;
  if (stage == 1 || stage == 2) bytes["data"]["all_gather"] = others * (rest + blocks) * narrow;
  if (stage == 3) bytes["data"]["all_gather"] = others * gathered_in_pipeline<T>(options.store, actions, list, shards);
  for (int unit = 1; unit < list.final_norm_unit(); ++unit)
    if (gathers_codes(options.store, list, unit)) bytes["data"]["all_reduce"] += 2 * others / (others + 1) * shared_with_codes<T>(list, unit);
  const int cp = mesh.shape().cp;
  if (list.tp() > 1) bytes["tp"] = bytes_of_layers<T>(options, list, shards, A, cp);
  if (cp > 1) bytes["cp"] = bytes_of_sequences<T>(options, list, A, cp);
  const double message = rows_of(options, cp) * options.shape.channels * narrow / list.tp();
  for (const Action& action : actions) {
    if (action.sends != Message::none) bytes[action.sends == Message::activation ? "to_next" : "to_previous"]["send"] += message;
  }
  const double of_wte = double(round_to_tensor(list, size_t(list.vocabulary_rows()) * size_t(options.shape.channels)));
  const double own_begin = stage ? double(shards.begin(0)) : 0, own_end = own_begin + double(stage ? shards.piece(0) : shards.whole(0));
  if (mesh.ends().size() > 1) bytes["ends"]["all_reduce"] = wide * std::max(0.0, std::min(own_end, of_wte) - own_begin);
  bytes["world"]["all_reduce"] = double(world - 1) / world * 2 * (sizeof(StepSums) + sizeof(double));
  return bytes;
}

// ---- beside what was measured

// The sum over all ranks, because few elements do not travel in equal parts.
inline double all_added(double mine) {
  double sum = 0;
  for (const std::string& text : ranks().all.all_gather(std::to_string(mine))) sum += std::stod(text);
  return sum;
}

// `wanted` must hold all bytes that were sent, unless they are 0.
inline void check_bytes(const Curve& curve, BytesSent wanted) {
  double counted = 0;
  for (const auto& [group, sent] : curve.bytes_sent)
    for (const auto& [name, bytes] : sent) {
      CAPTURE(group);
      CAPTURE(name);
      CHECK(bytes == about(wanted[group][name], 1e-12));
      wanted[group].erase(name);
      counted += bytes;
    }
  for (const auto& [group, rest] : wanted)
    for (const auto& [name, bytes] : rest) CHECK_MESSAGE(bytes == 0, group, " ", name);
  if (transport_bytes() > 0) CHECK(all_added(curve.really_sent) == about(all_added(counted), 1e-9));
}

inline void check_memory(const Curve& curve, const std::map<std::string, double>& wanted, int arrays) {
  for (const auto& [name, bytes] : wanted) {
    CAPTURE(name);
    const auto is_it = [&name = name](const auto& category) { return category.name == name; };
    const double actual = double(std::ranges::find_if(curve.memory, is_it)->bytes);
    CHECK(actual >= bytes);
    CHECK(actual <= bytes + 256 * (name == "context parallel" ? 7 : arrays));
  }
}

// Each of N ranks that share layers, or sequences, has an Nth of gpt2-medium's activations, and of its cache.
inline void check_share_of_activations(const MeshShape& shape) {
  constexpr ModelShape medium = {6, 16, 1024, 50257, 1024};  // a quarter of its 24 layers, which are all alike
  const auto bytes_on = [&](Mesh& mesh) {
    const ModelOptions options = {.shape = medium, .micro_batch = 1, .seq_len = medium.positions,
                                  .cached_positions = medium.positions, .samples = 1, .store = {.training = false}};
    const auto model = make_model("bf16", options, mesh, test_stream());
    std::map<std::string, double> bytes;
    for (const auto& category : model->memory().categories()) bytes[category.name] = double(category.bytes);
    return bytes;
  };
  const int n = shape.ranks();
  if (medium.heads % n > 0) return skip("the ranks do not divide its heads");
  Mesh alone;
  std::map<std::string, double> whole;
  if (ranks().all.rank() == 0) whole = bytes_on(alone);
  ranks().all.all_gather("");
  Mesh mesh(ranks().mesh, shape);
  std::map<std::string, double> part = bytes_on(mesh);
  for (const char* name : {"activations", "kv cache"})
    if (!whole.empty()) CHECK_WITHIN(name, part[name] * n / whole[name] - 1, 0.03);
}
