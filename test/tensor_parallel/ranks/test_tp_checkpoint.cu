// Checkpoints on meshes with tensor parallelism: after one update any of them writes the files that one rank writes, byte
// for byte, and reads back, bit for bit, what it kept. The parameter store alone, without a model.
// For remove_events.sh: 4 ranks
#include "gpt/zero.cuh"
#include "runtime/checkpoints/checkpoint_writer.h"
#include "test/ranks/ranks.cuh"
#include "test/save_checkpoint.h"
#include "test/temporary_folder.h"

namespace {

// Six heads of 17 channels: each of three ranks has 34 channels, no multiple of 4; the third has only padding of the
// vocabulary.
constexpr ModelShape shape = {2, 6, 102, 211, 7};

// A parameter store with what it needs.
template <class T>
struct Store {
  TensorList list;
  DeviceMemory memory;
  PinnedMemory host_memory;
  ParameterStore<T> store;
  Store(Mesh& mesh, const StoreOptions& options)
      : list(shape, mesh.tp().size(), mesh.tp().rank()), store(list, options, memory, host_memory, mesh, test_stream()) {
    memory.allocate();
    host_memory.allocate(mesh.room_on_host());
    store.clear();
  }
};

std::vector<State> saved_states() {
  std::vector<State> states(std::begin(optimizer_states), std::end(optimizer_states));
  states.push_back(State::weight);
  return states;
}

// Initial weights, and moments: no two of them are the same.
template <class T>
void fill(Store<T>& s) {
  s.store.initialize();
  float value = 1;
  for (const TensorDescriptor& tensor : s.list.tensors())
    for (State state : optimizer_states) {
      std::vector<float> values(tensor.count());
      for (float& v : values) v = value++;
      s.store.copy_in(CheckpointBlock{&tensor, 0, tensor.count()}, state, values);
    }
  CHECK(value < 0x1p24f);  // up to here floats are exact
}

// Applies gradients of zero, which change moments and weights all the same. Does not wait for the device.
template <class T>
void update(Store<T>& s) {
  static const Buffer<float> sums(std::vector<float>(sizeof(StepSums) / sizeof(float)));
  s.store.update({0.01f, 0.9f, 0.95f, 1e-8f, 0.1f}, 1, reinterpret_cast<StepSums*>(sums.data()), {});
}

template <class T>
CheckpointContent content(Store<T>& s, size_t most) {
  return {s.store, written_blocks(s.store.shards(), most), "{}"};
}

// What this rank keeps, and the weights that the model computes with.
template <class T>
std::vector<float> state_of(Store<T>& s) {
  std::vector<float> all;
  for (const Slice& slice : s.store.kept_slices())
    for (State state : saved_states()) {
      std::vector<float> values(slice.count);
      s.store.copy_out(slice, state, values.data());
      CUDA_CHECK(cudaStreamSynchronize(test_stream()));
      all.insert(all.end(), values.begin(), values.end());
    }
  for (int unit = 0; unit < s.store.shards().units(); ++unit) {
    std::vector<T> weights(s.list.units()[size_t(unit)].count);
    const T* unit_weights = s.store.acquire(unit);
    copy_and_wait(weights.data(), unit_weights, weights.size(), cudaMemcpyDeviceToHost, test_stream());
    for (T weight : weights) all.push_back(to_float(weight));
  }
  return all;
}

// A folder that all ranks use.
std::filesystem::path shared_folder() {
  static TemporaryFolder mine;
  return ranks().all.all_gather(mine.path())[0];
}

const char* const files[] = {"model.safetensors", "optimizer.safetensors"};

// Saves what one rank has, compares with it what each mesh saves, and loads it on each.
template <class T>
void check_meshes(StoreOptions options, const std::vector<int>& stages, bool offloads = false) {
  const std::filesystem::path folder = shared_folder();
  const std::filesystem::path one = folder / "one/step_00000001", many = folder / "many/step_00000001";
  Mesh alone;
  Store<T> whole(alone, options);
  fill(whole);
  update(whole);
  if (ranks().all.rank() == 0) save_checkpoint(folder / "one", 1, content(whole, SIZE_MAX));
  ranks().all.all_gather("");
  for (int tp : {2, 3}) {
    if (ranks().all.size() % tp != 0) continue;
    Mesh mesh(ranks().mesh, {.tp = tp, .dp = ranks().all.size() / tp});
    const RankGroup group = {ranks().all, tp, 1000 * sizeof(float)};  // rounds of a few stripes
    for (int stage : stages) {
      CAPTURE(tp);
      CAPTURE(stage);
      options.zero = stage, options.offload.optimizer = offloads;
      Store<T> s(mesh, options);
      fill(s);
      update(s);
      // Rank 1 has no room for a snapshot.
      CheckpointWriter writer(folder / "many", size_t(5'000'000'000), group, [](size_t floats) {
        return ranks().all.rank() == 1 ? nullptr : allocate_zeros(floats);
      });
      CHECK(writer.begin(1, content(s, group.chunk_bytes / sizeof(float))) == "");
      CHECK(writer.complete() == "");
      if (ranks().all.rank() == 0)
        for (const char* file : files) CHECK((content_of(one / file) == content_of(many / file)));
      Store<T> loaded(mesh, options);
      const size_t most = stage % 2 == 0 ? 1000 : most_at_once;
      load_weights(one, loaded.store, most);
      load_optimizer(one, loaded.store, {}, most);
      CHECK((state_of(loaded) == state_of(s)));
    }
  }
  ranks().all.all_gather("");
}

}  // namespace

TEST_CASE("meshes write what one rank writes, and read what they kept: fp32") {
  check_meshes<float>({}, {0, 1, 2, 3});
}

TEST_CASE("meshes write what one rank writes, and read what they kept: state in the host's memory, moments in bf16") {
  check_meshes<float>({}, {1}, true);
  check_meshes<__nv_bfloat16>({.narrow_moments = true}, {0, 3}, true);
  check_meshes<__nv_bfloat16>({.narrow_moments = true}, {1});
}

TEST_CASE("meshes write what one rank writes, and read what they kept: bf16 with masters") {
  check_meshes<__nv_bfloat16>({}, {0, 1, 2, 3});
}

TEST_CASE("meshes write what one rank writes, and read what they kept: bf16 without masters") {
  check_meshes<__nv_bfloat16>({.stochastic_rounding = true}, {0, 3});
}
