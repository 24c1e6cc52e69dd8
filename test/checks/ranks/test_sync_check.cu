// --check-sync: ranks that drift apart are found in everything that several of them hold, and only then.
#include "test/ranks/training.cuh"

#include <set>

#include "extensions/fp8/options.h"
#include "gpt/base/text.h"
#include "runtime/checks/replicas.cuh"
#include "runtime/checks/sync_check.cuh"
#include "test/temporary_folder.h"

namespace {

constexpr ModelShape shape = {2, 4, 36, 500, 8};  // each of four ranks has words of the vocabulary

// The meshes of 2, 3, 4 and 8 ranks.
std::vector<MeshShape> mesh_shapes() {
  switch (ranks().all.size()) {
    case 2: return {{.tp = 2}, {.pp = 2}};
    case 4: return {{.tp = 2, .dp = 2}};
    case 8: return {{.tp = 2, .dp = 2, .pp = 2}};
    default: return {{.dp = ranks().all.size()}};
  }
}

// The model after some steps.
template <class T>
std::unique_ptr<Model> trained(Mesh& mesh, StoreOptions store, size_t steps, const ModelShape& of = shape) {
  std::unique_ptr<Model> model = model_of<T>(of, mesh, 2, store);
  for (size_t step = 0; step < steps; ++step) train_step(*model, mesh, step);
  return model;
}

// The message with which the check fails, the same on all ranks; empty: it doesn't fail.
std::string message_of_check(Model& model, const Mesh& mesh) {
  std::string message;
  try {
    check_sync(ranks().all, mesh, model.trained_store(), 3, test_stream());
  } catch (const std::exception& error) {
    message = error.what();
  }
  for (const std::string& of_rank : ranks().all.all_gather(message)) CHECK(of_rank == message);
  return message;
}

std::vector<Replica> replicas_of(Model& model, const Mesh& mesh) {
  std::vector<Replica> all;
  visit_replicas(model.trained_store(), mesh, [&](const Replica& replica) { all.push_back(replica); });
  CUDA_CHECK(cudaDeviceSynchronize());
  return all;
}

// How a tensor lies in the mesh.
struct Spread {
  bool is_split, is_piece, is_tied;
};
Spread spread_of(const TensorDescriptor& tensor, const MeshShape& shape, bool has_pieces) {
  return {tensor.split.axis >= 0 && shape.tp > 1, has_pieces && shape.dp > 1, tensor.name == "wte.weight"};
}

// The ranks that must hold the same values as `rank`. They have the same part, if the tensor is split, and the same
// piece, if there are pieces; and they are in the same stage, but for wte, which both end stages hold.
std::vector<int> holders(const Spread& spread, const MeshShape& shape, int rank) {
  std::vector<int> found;
  const MeshPlace mine = place_of(rank, shape);
  for (int other = 0; other < shape.ranks(); ++other) {
    const MeshPlace its = place_of(other, shape);
    if ((!spread.is_split || its.tp == mine.tp) && (!spread.is_piece || its.dp == mine.dp) &&
        (spread.is_tied || its.pp == mine.pp))
      found.push_back(other);
  }
  return found;
}

// Changes one bit of one value. Streams that do not wait for the null stream are idle before and after.
void spoil(const Replica& replica) {
  CUDA_CHECK(cudaDeviceSynchronize());
  char* last = static_cast<char*>(const_cast<void*>(replica.values)) + (replica.count - 1) * replica.bytes;
  char low;
  CUDA_CHECK(cudaMemcpy(&low, last, 1, cudaMemcpyDefault));
  low = char(low ^ 1);
  CUDA_CHECK(cudaMemcpy(last, &low, 1, cudaMemcpyDefault));
  CUDA_CHECK(cudaDeviceSynchronize());
}

// Lets the last rank that has some of it drift, and back.
void check_drift(Model& model, const Mesh& mesh, int stage, const Replica& replica) {
  const MeshShape& shape = mesh.shape();
  const std::string name = replica.tensor.name + " (" + replica.what;
  CAPTURE(name);
  const Spread spread = spread_of(replica.tensor, shape, stage >= (replica.what.starts_with("weights") ? 3 : 1));
  int culprit = 0;
  const std::vector<float> counts = all_values({float(replica.count)});
  for (int rank = 0; rank < shape.ranks(); ++rank)
    if (counts[size_t(rank)] > 0) culprit = rank;
  const bool mine = ranks().all.rank() == culprit;
  if (mine) spoil(replica);
  const std::string message = message_of_check(model, mesh);
  if (mine) spoil(replica);

  CAPTURE(message);
  const MeshPlace place = place_of(culprit, shape);
  const bool is_part = spread.is_split && spread.is_piece;
  const std::string part = is_part           ? ", part " + std::to_string(place.tp * shape.dp + place.dp)
                           : spread.is_split ? ", tp rank " + std::to_string(place.tp)
                           : spread.is_piece ? ", ZeRO piece " + std::to_string(place.dp)
                                             : "";
  CHECK(contains(message, "by step 3: " + name + part + ") on rank "));
  std::vector<int> others = holders(spread, shape, culprit);
  std::erase(others, culprit);
  const std::string host = " (" + ranks().all.host(culprit) + ")", suspect = "rank " + std::to_string(culprit) + host;
  if (others.size() > 1) CHECK(contains(message, ") on " + suspect + " differs from " + rank_list(others) + ": "));
  else CHECK(contains(message, ") on rank " + std::to_string(others.at(0)) + host + ", " + suspect + " differs from one"));
}

}  // namespace

TEST_CASE_TEMPLATE("one bit of one rank is found, by tensor and rank", T, float, __nv_bfloat16) {
  const std::set<std::string> tensors = {"wte.weight", "h.1.attn.c_attn.weight", "h.1.mlp.c_fc.bias",  // split
                                         "h.0.mlp.c_proj.bias", "h.1.ln_2.weight"};                     // whole, summed
  for (const MeshShape& mesh_shape : mesh_shapes())
    for (int stage : {0, 1, 3}) {
      CAPTURE(mesh_shape.pp);
      CAPTURE(stage);
      Mesh mesh(ranks().mesh, mesh_shape);
      const std::unique_ptr<Model> model = trained<T>(mesh, {.zero = stage}, 1);
      CHECK(message_of_check(*model, mesh) == "");
      std::set<std::string> visited;
      for (const Replica& replica : replicas_of(*model, mesh)) {
        visited.insert(replica.tensor.name + " " + replica.what);
        if (tensors.contains(replica.tensor.name)) check_drift(*model, mesh, stage, replica);
      }
      CHECK(message_of_check(*model, mesh) == "");
      // Is everything visited that several ranks have?
      for (const TensorDescriptor& tensor : model->tensors().tensors()) {
        const auto several = [&](bool has_pieces) {
          return holders(spread_of(tensor, mesh_shape, has_pieces), mesh_shape, 0).size() > 1;
        };
        CHECK(visited.contains(tensor.name + " weights") == several(stage == 3));
        CHECK(visited.contains(tensor.name + " masters") == (sizeof(T) == 2 && several(stage > 0)));
        CHECK(visited.contains(tensor.name + " optimizer state m") == several(stage > 0));
        CHECK(visited.contains(tensor.name + " optimizer state v") == several(stage > 0));
      }
    }
}

TEST_CASE("the codes of weights in eight bits are the same, too, where ranks have whole weights") {
  const ModelShape wide = {3, 4, 64, 500, 8};
  for (const MeshShape& mesh_shape : mesh_shapes())
    for (int stage : {0, 1, 3}) {
      CAPTURE(stage);
      Mesh mesh(ranks().mesh, mesh_shape);
      const auto model = trained<__nv_bfloat16>(mesh, {.zero = stage, .rooms = Fp8Options{.is_on = true}}, 2, wide);
      CHECK(message_of_check(*model, mesh) == "");
      size_t visited = 0;
      for (const Replica& replica : replicas_of(*model, mesh)) {
        if (replica.what != "weights in eight bits") continue;
        CHECK(replica.tensor.name.starts_with("h.1."));
        check_drift(*model, mesh, stage, replica);
        ++visited;
      }
      CHECK(visited == (stage == 3 ? 0 : 4));
    }
}

TEST_CASE("training lets no rank drift") {
  for (const MeshShape& mesh_shape : mesh_shapes())
    for (int stage : {0, 2, 3}) {
      CAPTURE(mesh_shape.pp);
      CAPTURE(stage);
      Mesh mesh(ranks().mesh, mesh_shape);
      CHECK(message_of_check(*trained<float>(mesh, {.zero = stage}, 3), mesh) == "");
      CHECK(message_of_check(*trained<__nv_bfloat16>(mesh, {.zero = stage, .stochastic_rounding = true}, 3), mesh) == "");
    }
}
