// The bytes of a candidate's largest rank, for a search that asks for 100,000 of them. They come from the layout of models that
// are built on an imagined mesh, as in a plan (memory.cuh), but one such model serves many candidates:
//
//   what is kept of parameters    depends on the stage's layers and on ZeRO, and not on batches: built once for each
//   all else                      depends on batches and recomputation, and not on ZeRO. With l layers in a chunk and s slots it
//                                 takes a + b·l + c·s + d·l·s bytes, as arrays of layers and slots follow each other and each
//                                 has room of its own: four small models give a, b, c and d
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "planner/memory.cuh"

class CandidateMemory {
 public:
  CandidateMemory(const Options& o, const ModelShape& shape, bool is_here) : options_(o), shape_(shape), is_here_(is_here) {}

  size_t operator()(const PlannedStep& s) {
    size_t most = 0;
    const std::vector<StageLayers>& stages = layers_of(s.mesh.pp, s.pp_chunks);
    for (int stage = 0; stage < s.mesh.pp; ++stage) {
      const StageLayers& own = stages[size_t(stage)];
      const bool is_middle = stage > 1 && stage + 1 < s.mesh.pp;
      if (is_middle && own == stages[size_t(stage - 1)]) continue;  // as many layers as the stage before, and no more slots
      most = std::max(most, kept(s, stage) + all_else(s, stage, own.of_largest_chunk, slots(s, stage)));
    }
    return most;
  }

 private:
  struct StageLayers {
    int all = 0, of_largest_chunk = 0;
    bool operator==(const StageLayers&) const = default;
  };
  struct Growth {
    int first;  // the layers of the smallest model
    size_t smallest, by_layer, by_slot, by_both;
  };
  template <size_t N, class Value>
  using Cache = std::map<std::array<int, N>, Value>;

  const std::vector<StageLayers>& layers_of(int stages, int chunks) {
    const auto [found, is_new] = layers_.try_emplace({stages, chunks});
    if (!is_new) return found->second;
    found->second.resize(size_t(stages));
    const std::vector<Layers> dealt = deal_layers(shape_, stages, chunks);
    for (size_t i = 0; i < dealt.size(); ++i) {
      StageLayers& own = found->second[i % size_t(stages)];
      own.all += dealt[i].count, own.of_largest_chunk = std::max(own.of_largest_chunk, dealt[i].count);
    }
    return found->second;
  }

  // The slots of a stage. Those of gpipe grow with the micro-batches, those of the others no longer after a few of them.
  int slots(const PlannedStep& s, int stage) {
    if (s.mesh.pp == 1) return 1;
    if (s.pp_schedule == "gpipe") return s.micro_batches();
    const int micro_batches = std::min(s.micro_batches(), 4 * s.mesh.pp);
    const auto [found, is_new] = slots_.try_emplace({s.pp_schedule[0], s.mesh.pp, stage, s.pp_chunks, micro_batches});
    if (is_new) found->second = slots_of(make_schedule(s.pp_schedule, {s.mesh.pp, stage, s.pp_chunks}, micro_batches));
    return found->second;
  }

  size_t kept(const PlannedStep& s, int stage) {
    const int cache_ranks = options_.sample_every ? s.mesh.cp : 1;  // a text's keys are shared out over them
    const auto [found, is_new] = kept_.try_emplace(
        {s.mesh.tp, s.mesh.pp, s.pp_chunks, s.zero, s.mesh.dp * s.mesh.cp, stage, cache_ranks, s.cp_method[0]});
    if (is_new) {
      PlannedStep one = s;
      one.global_batch = s.micro_batch * s.mesh.dp * s.mesh.pp, one.recompute = "block";  // as few slots as may be
      found->second = bytes(one, shape_, stage, true);
    }
    return found->second;
  }

  size_t all_else(const PlannedStep& s, int stage, int layers, int slots) {
    const int place = s.mesh.pp == 1 ? 0 : stage == 0 ? 1 : stage + 1 < s.mesh.pp ? 2 : 3;
    const auto [found, is_new] = all_else_.try_emplace({s.mesh.tp, s.mesh.cp, s.micro_batch, s.recompute[0], s.cp_method[0],
                                                        s.pp_schedule == "zb", place});
    Growth& growth = found->second;
    if (is_new) growth = growth_of(s, place);
    const size_t l = size_t(layers - growth.first), more = size_t(slots - 1);
    return growth.smallest + l * growth.by_layer + more * (growth.by_slot + l * growth.by_both);
  }

  // Of a pipeline with three stages, unless there is none; with one layer in each, and with more in this one.
  Growth growth_of(const PlannedStep& s, int place) const {
    const int stages = place == 0 ? 1 : 3, stage = place == 0 ? 0 : place - 1;
    const auto layers_in = [&](const ModelShape& model) { return deal_layers(model, stages)[size_t(stage)].count; };
    ModelShape small = shape_;
    small.layers = stages;
    ModelShape large = small;
    while (layers_in(large) == 1) ++large.layers;
    const size_t further = size_t(layers_in(large) - 1);
    PlannedStep one = s;
    one.mesh = {s.mesh.tp, s.mesh.cp, 1, stages}, one.zero = 0, one.pp_chunks = 1, one.global_batch = s.micro_batch;
    if (s.pp_schedule != "zb") one.pp_schedule = "gpipe";
    PlannedStep two = one;
    two.global_batch *= 2;  // and two slots
    if (stages == 1) two = one;
    const size_t base = bytes(one, small, stage, false), slot = bytes(two, small, stage, false) - base;
    const size_t layer = (bytes(one, large, stage, false) - base) / further;
    const size_t both = ((bytes(two, large, stage, false) - base - slot) / further) - layer;
    return {1, base, layer, slot, both};
  }

  // Of the stage's first rank: what it keeps of parameters, or all else.
  size_t bytes(const PlannedStep& s, const ModelShape& shape, int stage, bool of_parameters) const {
    Options o = options_with(options_, s);
    Mesh mesh(s.mesh, stage * s.mesh.ranks() / s.mesh.pp);
    std::optional<LibraryWorkspaces> elsewhere;
    if (!is_here_) elsewhere = workspaces_elsewhere(o, shape);
    const std::unique_ptr<Model> model = build_model_to_train(o, shape, mesh, nullptr, elsewhere);
    std::vector<MemoryCategory> categories = model->memory().categories();
    categories.push_back({"batches", bytes_of_batches(*model)});
    size_t sum = 0;
    for (const auto& [name, bytes] : categories) {
      const bool is_kept = name == "weights" || name == "gradients" || name == "optimizer" || name == "unit buffers" ||
                           name == "checkpoint buffer" || name == "kv cache";
      if (is_kept == of_parameters) sum += bytes;
    }
    return sum;
  }

  const Options options_;
  const ModelShape shape_;
  const bool is_here_;
  Cache<2, std::vector<StageLayers>> layers_;
  Cache<5, int> slots_;
  Cache<8, size_t> kept_;
  Cache<7, Growth> all_else_;
};
