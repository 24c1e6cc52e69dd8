// Checkpoint folders: gpt/checkpoint.h and gpt/model_config.h.
#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/resource.h>
#include <sys/socket.h>

#include <nlohmann/json.hpp>

#include "runtime/checkpoints/checkpoint_writer.h"
#include "runtime/checkpoints/manifest.h"
#include "runtime/checkpoints/run_folder.h"
#include "runtime/checkpoints/shared_checkpoint.h"
#include "runtime/control/control.h"
#include "test/fake_parameters.h"
#include "test/ranks.h"
#include "test/save_checkpoint.h"

using Values = std::map<std::pair<char, std::string>, std::vector<float>>;

const ModelShape shape = {1, 2, 4, 10, 3};

// A value for every element of every tensor, all different.
float value_of(const std::string& tensor, char kind, size_t i) {
  return float(std::hash<std::string>()(tensor) % 1000) + float(kind) * 1000 + float(i);
}

std::vector<float> values_of(const std::string& tensor, size_t count, char kind) {
  std::vector<float> values(count);
  for (size_t i = 0; i < values.size(); ++i) values[i] = value_of(tensor, kind, i);
  return values;
}

void copy_out(const CheckpointBlock& block, State state, float* to) {
  for (size_t i = 0; i < block.count; ++i) to[i] = value_of(block.tensor->name, char(state), block.first + i);
}

FakeParameters parameters(shape, copy_out);
Ranks alone;
const std::vector<TensorDescriptor>& tensors = parameters.list.tensors();

// The tensors as files name them without a prefix.
std::vector<NamedShape> named_shapes() {
  std::vector<NamedShape> all;
  for (const TensorDescriptor& tensor : tensors) all.push_back({tensor.name, tensor.shape});
  return all;
}

CheckpointContent content(const std::string& trainer, FakeParameters& source = parameters) {
  return {source, source.whole_tensors(), trainer};
}

void load_moments(const std::filesystem::path& folder, Parameters& to, size_t most) { load_optimizer(folder, to, {}, most); }

// What arrives when weights or moments are loaded.
template <class Load>
Values loaded(const std::filesystem::path& folder, Load load, FakeParameters&& to = FakeParameters(shape)) {
  Values values;
  to.in = [&](const CheckpointBlock& block, State state, const std::vector<float>& from) {
    values[{char(state), block.tensor->name}] = from;
  };
  load(folder, to, most_at_once);
  return values;
}

void check_values(const Values& values, const std::string& kinds) {
  CHECK(values.size() == tensors.size() * kinds.size());
  for (char kind : kinds)
    for (const TensorDescriptor& tensor : tensors)
      CHECK(values.at({kind, tensor.name}) == values_of(tensor.name, tensor.count(), kind));
}

void save(const std::filesystem::path& out, size_t step) {
  save_checkpoint(out, step, content(R"({"seed": 7})"));
}

std::string load_error(const std::filesystem::path& folder) {
  return error_of([&] { loaded(folder, load_weights); });
}

// A folder as somebody else may have written it.
void put_model(const std::filesystem::path& folder, const std::vector<NamedShape>& stored,
               const std::string& file = "model.safetensors", const std::string& scale_of = "") {
  std::filesystem::create_directories(folder);
  put(folder / "config.json", config_of(shape).dump());
  SafetensorsWriter writer(folder / file, stored, {});
  for (const NamedShape& tensor : stored) {
    std::string name = tensor.name.substr(tensor.name.starts_with("transformer.") ? 12 : 0);
    if (name == "lm_head.weight" && scale_of.empty()) name = "wte.weight";
    const std::vector<float> values = values_of(name, element_count(tensor.shape), 'w');
    writer.write(tensor.name, 0, values.size(), values.data());
  }
  writer.close();
}

TEST_CASE("what is saved is loaded") {
  TemporaryFolder folder;
  save(folder / "run", 100);
  std::filesystem::path saved = folder / "run" / "step_00000100";
  CHECK(load_shape(saved) == shape);
  check_values(loaded(saved, load_weights), "w");
  check_values(loaded(saved, load_moments), "mv");
  CHECK(load_trainer(saved) == nlohmann::json{{"seed", 7}, {"step", 100}});
  CHECK(!std::filesystem::exists(folder / "run" / "step_00000100.partial"));
}

TEST_CASE("files are as transformers expects them") {
  TemporaryFolder folder;
  save(folder.path(), 3);
  SafetensorsFile model(folder / "step_00000003/model.safetensors");
  SafetensorsFile optimizer(folder / "step_00000003/optimizer.safetensors");
  CHECK(model.metadata().at("format") == "pt");
  CHECK(model.tensors().size() == 16);
  CHECK(model.find("transformer.h.0.attn.c_attn.weight")->shape == std::vector<size_t>{4, 12});
  CHECK(optimizer.tensors().size() == 32);
  CHECK(optimizer.find("m.transformer.wte.weight"));
  CHECK(optimizer.find("v.transformer.ln_f.bias"));
  auto config = nlohmann::json::parse(content_of(folder / "step_00000003/config.json"));
  CHECK(config["architectures"] == nlohmann::json{"GPT2LMHeadModel"});
  CHECK(config["model_type"] == "gpt2");
  CHECK(config["n_positions"] == 3);
  CHECK(config["vocab_size"] == 10);
  CHECK(config["eos_token_id"].is_null());
  CHECK(config_of({12, 12, 768, 50257, 1024})["eos_token_id"] == 50256);
}

TEST_CASE("a checkpoint appears only when complete, and what a failure or a crash leaves is removed") {
  TemporaryFolder folder;
  save(folder.path(), 1);
  FakeParameters interrupted(shape, [](const CheckpointBlock&, State state, float*) {
    if (state == State::second_moment) throw std::runtime_error("interrupted");
  });
  auto save_interrupted = [&] { save_checkpoint(folder.path(), 2, content("{}", interrupted)); };
  CHECK(error_of(save_interrupted) == "interrupted");
  CHECK(!std::filesystem::exists(folder / "step_00000002.partial"));
  put(folder / "step_00000002.partial" / "trainer.json", R"({"step": 2})");  // as a killed program leaves it
  CHECK(list_checkpoints(folder.path()).size() == 1);
  CHECK(newest_checkpoint(folder.path())->step == 1);
  save(folder.path(), 3);
  CHECK(!std::filesystem::exists(folder / "step_00000002.partial"));
  CHECK(newest_checkpoint(folder.path())->step == 3);
}

TEST_CASE("a checkpoint that no memory was left for does not keep the next one from being written") {
  TemporaryFolder folder;
  int calls = 0;
  CheckpointWriter writer(folder.path(), size_t(5'000'000'000), {alone}, [&](size_t floats) {
    if (calls++ == 0) throw std::runtime_error("no memory");
    return allocate_zeros(floats);
  });
  CHECK(writer.begin(1, content("{}")) == "no memory");
  CHECK(writer.begin(2, content("{}")) == "");
  CHECK(writer.complete() == "");
  CHECK(list_checkpoints(folder.path()).size() == 1);
  CHECK(newest_checkpoint(folder.path())->step == 2);
}

TEST_CASE("a checkpoint that there is no room for a snapshot of is written all the same, and is the same") {
  TemporaryFolder folder;
  save(folder / "snapshot", 1);
  const RankGroup in_parts = {.ranks = alone, .chunk_bytes = 40};  // ten floats
  CheckpointWriter writer(folder / "parts", size_t(5'000'000'000), in_parts, [](size_t) { return nullptr; });
  writer.reserve(parameters.whole_tensors());
  CHECK(writer.snapshot_bytes() == 0);
  std::filesystem::create_directory(folder / "parts");
  CHECK(contains(writer.find_slow_ranks().at(0), "no room for a snapshot"));
  CHECK(writer.begin(1, content(R"({"seed": 7})")) == "");
  CHECK(writer.complete() == "");
  const std::filesystem::path parts = folder / "parts/step_00000001", snapshot = folder / "snapshot/step_00000001";
  CHECK(damage_of(parts) == "");
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "trainer.json"})
    CHECK(content_of(parts / file) == content_of(snapshot / file));
}

TEST_CASE("hosts with disks of their own: rank 0's folder gets all, the other ranks a copy while they load") {
  TemporaryFolder folder;
  save(folder / "shared", 1);
  for (const char* disk : {"disk0/run", "disk1"}) std::filesystem::create_directories(folder / disk);
  const auto require = [](bool right, const char* what) { if (!right) throw std::runtime_error(what); };
  const int port = Listener(0).port();
  Processes ranks(3, [&](int rank) {
    std::filesystem::current_path(folder / (rank == 0 ? "disk0" : "disk1"));
    Peers peers = rank == 0 ? wait_for_ranks(Listener(port), 3, "secret", 15)
                            : join({{"127.0.0.1"}, port, "secret"}, rank, 3, 15);
    const auto control = std::make_unique<Control>(rank, std::move(peers));
    const RankGroup group = {.ranks = *control, .chunk_bytes = 40};
    CheckpointWriter writer("run", size_t(5'000'000'000), group);
    CheckpointContent mine = content(R"({"seed": 7})");
    for (CheckpointBlock& block : mine.blocks) {  // uneven parts: nothing, a third, the rest
      const size_t third = block.count / 3;
      block.first = rank == 2 ? third : 0;
      block.count = rank == 0 ? 0 : rank == 1 ? third : block.count - third;
    }
    writer.reserve(mine.blocks);
    require(contains(writer.find_slow_ranks().at(0), "ranks 1, 2 ("), "who is blind");
    require(writer.begin(1, mine) == "" && writer.complete() == "", "saving");
    CheckpointCopies copies(group, "run");
    const std::filesystem::path readable = copies.folder_of("run/step_00000001");
    require(copies.folder_of("run/step_00000001") == readable, "one copy");
    require((readable == "run/step_00000001") == (rank == 0), "who needs a copy");
    require(damage_of(readable) == "" && !newest_checkpoint("run") == (rank > 0), "a copy that is taken for none");
    copies.release();
    control->finish();
  });
  const std::vector<Outcome> outcomes = ranks.wait();
  INFO(describe(outcomes));
  for (const Outcome& outcome : outcomes) CHECK(outcome.code == 0);
  const std::filesystem::path saved = folder / "disk0/run/step_00000001";
  CHECK(damage_of(saved) == "");
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "trainer.json"})
    CHECK(content_of(saved / file) == content_of(folder / "shared/step_00000001" / file));
  CHECK(std::filesystem::is_empty(folder / "disk1/run"));
}

// Four ranks in pairs. Each pair gathers 24 elements of c_attn.weight, in two rounds. The ranks' other blocks are as
// different as they can be.
std::vector<CheckpointBlock> gathered_blocks(int rank) {
  const std::string gathered = "h.0.attn.c_attn.weight";
  const size_t of_pair = size_t(rank / 2) * 24, mine = size_t(rank % 2) * 6;
  std::vector<CheckpointBlock> blocks;
  if (rank == 0) blocks = {parameters.block("wte.weight", 0, 25)};
  if (rank == 1) blocks = {parameters.block("wte.weight", 25, 15)};
  if (rank == 2) blocks = {parameters.block("wpe.weight", 0, 12)};
  blocks.push_back(parameters.block(gathered, of_pair + mine, 6, true));
  if (rank == 3)
    for (const CheckpointBlock& block : parameters.whole_tensors())
      if (block.tensor->unit > 0 && block.tensor->name != gathered) blocks.push_back(block);
  blocks.push_back(parameters.block(gathered, of_pair + 12 + mine, 6, true));
  return blocks;
}

// Tells the other rank of the pair which block this rank copies, and waits until it tells the same.
void meet_in_pair(int socket, const CheckpointBlock& block, State state) {
  const std::string mine = char(state) + std::to_string(block.first / 12);
  char theirs[16] = "";
  if (send(socket, mine.data(), mine.size(), MSG_NOSIGNAL) < 0 || recv(socket, theirs, sizeof theirs - 1, 0) <= 0)
    throw std::runtime_error("the other rank has gone");
  if (mine != theirs) throw std::runtime_error("gathers " + mine + " with " + theirs);
}

// Saves step 1 on four ranks, some of which have no room for a snapshot, don't see rank 0's disk, or can't write. Returns
// how the ranks ended.
std::vector<Outcome> save_in_pairs(const TemporaryFolder& folder, const std::string& roomless, const std::string& blind,
                                    const std::string& full, const std::string& problem = "") {
  for (const char* disk : {"disk0/run", "disk1"}) std::filesystem::create_directories(folder / disk);
  const int port = Listener(0).port();
  int sockets[2][2];  // by pair, by rank in it
  for (int* ends : sockets) REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
  const auto has = [](const std::string& some, int rank) { return some.find(char('0' + rank)) != some.npos; };
  Processes ranks(4, [&](int rank) {
    for (int other = 0; other < 4; ++other)
      if (other != rank) close(sockets[other / 2][other % 2]);
    std::filesystem::current_path(folder / (has(blind, rank) ? "disk1" : "disk0"));
    Peers peers = rank == 0 ? wait_for_ranks(Listener(port), 4, "secret", 15)
                            : join({{"127.0.0.1"}, port, "secret"}, rank, 4, 15);
    const auto control = std::make_unique<Control>(rank, std::move(peers));
    const RankGroup group = {*control, 2, 40};
    std::signal(SIGXFSZ, SIG_IGN);
    rlimit limit;
    getrlimit(RLIMIT_FSIZE, &limit);
    FakeParameters source(shape, [&](const CheckpointBlock& block, State state, float* to) {
      const rlimit small = {1, limit.rlim_max};
      if (has(full, rank)) setrlimit(RLIMIT_FSIZE, &small);
      if (block.gathered) meet_in_pair(sockets[rank / 2][rank % 2], block, state);
      copy_out(block, state, to);
    });
    const CheckpointContent mine = {source, gathered_blocks(rank), R"({"seed": 7})"};
    CheckpointWriter writer("run", size_t(5'000'000'000), group, [&](size_t floats) {
      return has(roomless, rank) ? nullptr : allocate_zeros(floats);
    });
    writer.reserve(mine.blocks);
    writer.find_slow_ranks();
    std::string failed = writer.begin(1, mine);
    setrlimit(RLIMIT_FSIZE, &limit);
    if (failed.empty()) failed = writer.complete();
    if (problem.empty() ? !failed.empty() : !contains(failed, problem)) throw std::runtime_error("saving: " + failed);
    control->finish();
  });
  for (int* ends : sockets)
    for (int end = 0; end < 2; ++end) close(ends[end]);
  return ranks.wait();
}

TEST_CASE("ranks that gather blocks save them, whichever of them is slow") {
  TemporaryFolder reference;
  save(reference / "run", 1);
  for (const auto& [roomless, blind] : std::vector<std::pair<std::string, std::string>>{
           {"", ""}, {"1", ""}, {"2", "3"}, {"3", "1"}, {"0", "23"}, {"", "13"}}) {
    CAPTURE(roomless);
    CAPTURE(blind);
    TemporaryFolder folder;
    const std::vector<Outcome> outcomes = save_in_pairs(folder, roomless, blind, "");
    INFO(describe(outcomes));
    for (const Outcome& outcome : outcomes) CHECK(outcome.code == 0);
    const std::filesystem::path saved = folder / "disk0/run/step_00000001";
    CHECK(damage_of(saved) == "");
    for (const char* file : {"model.safetensors", "optimizer.safetensors", "trainer.json"})
      CHECK(content_of(saved / file) == content_of(reference / "run/step_00000001" / file));
  }
}

TEST_CASE("ranks that gather blocks: one that can't write goes on copying, and all ranks say why nothing was saved") {
  for (const auto& [blind, full] : std::vector<std::pair<std::string, std::string>>{{"", "1"}, {"", "2"}, {"1", "0"}}) {
    CAPTURE(blind);
    CAPTURE(full);
    TemporaryFolder folder;
    const std::vector<Outcome> outcomes = save_in_pairs(folder, "0123", blind, full, ".safetensors: ");
    INFO(describe(outcomes));
    for (const Outcome& outcome : outcomes) CHECK(outcome.code == 0);
    CHECK(list_checkpoints(folder / "disk0/run").empty());
    CHECK(std::filesystem::is_empty(folder / "disk0/run"));
  }
}

TEST_CASE("a checkpoint is finished alone when all parts are there; when the other ranks are gone nobody waits for theirs") {
  TemporaryFolder folder;
  struct TwoRanks : Ranks {
    TwoRanks() { hosts_.resize(2); }
    std::vector<std::string> all_gather(const std::string& mine, double, Place) override { return {mine, mine}; }
  } two;
  CheckpointWriter writer(folder.path(), size_t(5'000'000'000), {two});
  const auto seconds_of_end = [&](bool all_are_there) {
    const auto begin = std::chrono::steady_clock::now();
    CHECK(writer.finish_alone(0.6, [&] { return all_are_there; }));
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  REQUIRE(writer.begin(1, content("{}")) == "");
  CHECK(seconds_of_end(true) > 0.5);
  CHECK(seconds_of_end(false) < 0.3);
  CHECK(list_checkpoints(folder.path()).empty());
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    put(entry.path() / "manifest_00001_of_00002.json", Manifest{1, 1, 2, {}}.text());
  CHECK(seconds_of_end(false) < 0.3);
  CHECK(newest_checkpoint(folder.path())->step == 1);
}

TEST_CASE("saving a step again replaces it; a full disk leaves the old one") {
  TemporaryFolder folder;
  save(folder.path(), 5);
  save_checkpoint(folder.path(), 5, content(R"({"seed": 8})"));
  CHECK(load_trainer(folder / "step_00000005")["seed"] == 8);
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 1);
  const std::string error = error_of([&] {
    const FullDisk full(512);
    save(folder.path(), 5);
  });
  CHECK(is_line_with(error, "step_00000005.", ".partial/model.safetensors", "cannot reserve"));
  CHECK(load_trainer(folder / "step_00000005")["seed"] == 8);
}

TEST_CASE("listing takes complete checkpoints in order and nothing else") {
  TemporaryFolder folder;
  CHECK(list_checkpoints(folder / "none").empty());
  CHECK(!newest_checkpoint(folder / "none"));
  for (const char* name :
       {"step_00000020", "step_123456789", "step_00000003", "step_00000004.partial", "step_7", "s",
        "step_0000001x", "stop_00000009", "step_00000002.removed.partial"}) {
    std::filesystem::create_directory(folder / name);
  }
  put(folder / "step_00000008", "a file");
  std::vector<size_t> steps;
  for (const Checkpoint& checkpoint : list_checkpoints(folder.path())) steps.push_back(checkpoint.step);
  CHECK(steps == std::vector<size_t>{3, 20, 123456789});
  CHECK(checkpoint_name(20) == "step_00000020");
  CHECK(checkpoint_name(123456789) == "step_123456789");
}

TEST_CASE("pruning keeps the newest and the milestones") {
  auto kept = [](size_t keep, size_t keep_every, const std::vector<size_t>& spared = {}) {
    TemporaryFolder folder;
    for (size_t step : {10, 20, 30, 40, 50}) {
      std::filesystem::create_directory(folder / checkpoint_name(step));
    }
    prune_checkpoints(folder.path(), keep, keep_every, spared);
    std::vector<size_t> steps;
    for (const Checkpoint& checkpoint : list_checkpoints(folder.path())) steps.push_back(checkpoint.step);
    size_t entries = size_t(std::distance(std::filesystem::directory_iterator(folder.path()), {}));
    CHECK(entries == steps.size());
    return steps;
  };
  CHECK(kept(3, 0) == std::vector<size_t>{30, 40, 50});
  CHECK(kept(1, 20) == std::vector<size_t>{20, 40, 50});
  CHECK(kept(1, 0, {0, 10, 30}) == std::vector<size_t>{10, 30, 50});
  CHECK(kept(9, 0).size() == 5);
  CHECK(kept(0, 0).size() == 5);
}

TEST_CASE("weights from other programs: no prefix, masks, tied head, several files") {
  TemporaryFolder folder;
  std::vector<NamedShape> stored = named_shapes();
  stored.push_back({"h.0.attn.bias", {1, 1, 3, 3}});
  stored.push_back({"h.0.attn.masked_bias", {}});
  stored.push_back({"lm_head.weight", {10, 4}});
  put_model(folder / "plain", stored);
  check_values(loaded(folder / "plain", load_weights), "w");
  stored.erase(stored.begin());  // wte: save_model of safetensors keeps one of two names of a tensor, the first by alphabet
  put_model(folder / "head", stored);
  check_values(loaded(folder / "head", load_weights), "w");

  std::vector<NamedShape> second = named_shapes();
  for (NamedShape& tensor : second) tensor.name = "transformer." + tensor.name;
  const std::vector<NamedShape> first(second.begin(), second.begin() + 2);
  second.erase(second.begin(), second.begin() + 2);
  put_model(folder / "sharded", first, "model-1.safetensors");
  put_model(folder / "sharded", second, "model-2.safetensors");
  put(folder / "sharded" / "model.safetensors.index.json",
      R"({"weight_map": {"transformer.wte.weight": "model-1.safetensors", "transformer.wpe.weight":
      "model-1.safetensors", "transformer.ln_f.bias": "model-2.safetensors"}})");
  check_values(loaded(folder / "sharded", load_weights), "w");
}

TEST_CASE("weights in half precision") {
  TemporaryFolder folder;
  const ModelShape one = {0, 1, 1, 1, 1};  // four tensors of one element: wte, wpe, and two of ln_f
  put(folder / "config.json", R"({"model_type": "gpt2", "n_head": 1})");
  std::string header = R"({"wte.weight":{"dtype":"BF16","shape":[1,1],"data_offsets":[0,2]},)"
                       R"("wpe.weight":{"dtype":"F16","shape":[1,1],"data_offsets":[2,4]},)"
                       R"("ln_f.weight":{"dtype":"F16","shape":[1],"data_offsets":[4,6]},)"
                       R"("ln_f.bias":{"dtype":"BF16","shape":[1],"data_offsets":[6,8]}})";
  uint64_t length = header.size();
  std::string file(reinterpret_cast<const char*>(&length), sizeof length);
  const std::string values("\x20\x40\x00\x41\x80\xc0\x80\x3f", 8);
  put(folder / "model.safetensors", file + header + values);
  Values weights = loaded(folder.path(), load_weights, FakeParameters(one));
  CHECK(weights[{'w', "wte.weight"}] == std::vector<float>{2.5f});
  CHECK(weights[{'w', "wpe.weight"}] == std::vector<float>{2.5f});
  CHECK(weights[{'w', "ln_f.weight"}] == std::vector<float>{-2.25f});
  CHECK(weights[{'w', "ln_f.bias"}] == std::vector<float>{1});

  // A head in 32 bits, of which wte is what 8 bits of it leave, or is not.
  header.back() = ',';
  header += R"("lm_head.weight":{"dtype":"F32","shape":[1,1],"data_offsets":[8,12]}})";
  length = header.size();
  const auto error_with_head = [&](float head) {
    put(folder / "model.safetensors", std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + values +
                                          std::string(reinterpret_cast<const char*>(&head), sizeof head));
    return error_of([&] { loaded(folder.path(), load_weights, FakeParameters(one)); });
  };
  CHECK(error_with_head(2.507f) == "");
  CHECK(contains(error_with_head(2.53f), "lm_head.weight differs"));
}

TEST_CASE("what does not fit is refused by name") {
  TemporaryFolder folder;
  auto without = [](size_t i) {
    std::vector<NamedShape> rest = named_shapes();
    rest.erase(rest.begin() + std::ptrdiff_t(i));
    return rest;
  };
  put_model(folder / "missing", without(1));
  CHECK(is_line_with(load_error(folder / "missing"), "missing", "wpe.weight", "(3, 4)", "check config.json"));
  std::vector<NamedShape> stored = named_shapes();
  stored[2].shape = {12, 4};
  put_model(folder / "misshapen", stored);
  CHECK(is_line_with(load_error(folder / "misshapen"), "h.0.attn.c_attn.weight", "(12, 4)", "(4, 12)", "check config.json"));
  stored[2].shape = std::vector<size_t>(1000, 1);
  put_model(folder / "many axes", stored);
  CHECK(is_line_with(load_error(folder / "many axes"), "h.0.attn.c_attn.weight", "1, 1 ...), the model needs (4, 12)"));
  stored = named_shapes();
  stored.push_back({"h.1.ln_1.bias", {4}});
  put_model(folder / "unknown", stored);
  CHECK(is_line_with(load_error(folder / "unknown"), "'h.1.ln_1.bias'", "not of this model"));
  stored = named_shapes();
  stored.push_back({"transformer.wte.weight", {10, 4}});
  put_model(folder / "twice", stored);
  CHECK(is_line_with(load_error(folder / "twice"), "'wte.weight'", "twice: remove one"));
  stored = named_shapes();
  stored.push_back({"lm_head.weight", {10, 4}});
  put_model(folder / "untied", stored, "model.safetensors", "other head");
  CHECK(is_line_with(load_error(folder / "untied"), "lm_head.weight differs", "give such weights"));
  put_model(folder / "heads", named_shapes());
  put(folder / "heads" / "config.json", config_of({1, 4, 4, 10, 3}).dump());
  CHECK(is_line_with(load_error(folder / "heads"), "4 heads", "model 2"));
}

TEST_CASE("folders without readable weights") {
  TemporaryFolder folder;
  put(folder / "config.json", config_of(shape).dump());
  CHECK(is_line_with(load_error(folder.path()), "no model.safetensors"));
  put(folder / "pytorch_model.bin", "pickle");
  CHECK(is_line_with(load_error(folder.path()), "pytorch_model.bin", "save_pretrained"));
  std::filesystem::path index = folder / "model.safetensors.index.json";
  put(index, "{}");
  CHECK(is_line_with(load_error(folder.path()), "no weight_map: get it again"));
  for (const char* name : {"\"../x.safetensors\"", "\"/x\"", "7", "\"\"", "\"two\\nlines\"", "\"\\u0000\""}) {
    put(index, std::string("{\"weight_map\": {\"wte.weight\": ") + name + "}}");
    CHECK(is_line_with(load_error(folder.path()), "'wte.weight'", "not a file of this folder"));
  }
  put(index, R"({"weight_map": {"wte.weight": ")" + std::string(1000, 'n') + "\"}}");
  CHECK(is_line_with(load_error(folder.path()), "'wte.weight'", "nnn...'", "not a file of this folder"));
  put(index, R"({"weight_map": {"wte.weight": "gone.safetensors"}})");
  CHECK(is_line_with(load_error(folder.path()), "gone.safetensors", "No such file"));
  CHECK(is_line_with(load_error(folder / "none"), "none", "holds no config.json"));
}

TEST_CASE("optimizer and trainer state that does not fit is refused") {
  TemporaryFolder folder;
  save(folder.path(), 1);
  std::filesystem::path saved = folder / "step_00000001";
  auto error = [&](const ModelShape& wanted) {
    return error_of([&] { loaded(saved, load_moments, FakeParameters(wanted)); });
  };
  CHECK(is_line_with(error({1, 2, 4, 11, 3}), "wte.weight", "(10, 4)", "(11, 4)"));
  CHECK(is_line_with(error({2, 2, 4, 10, 3}), "m.transformer.h.1.attn.c_attn.weight", "missing"));
  CHECK(is_line_with(error({0, 2, 4, 10, 3}), "tensor 'm.h.0.attn.c_attn.bias' is not of this model: start from its weights"));
  auto trainer_error = [&] { return error_of([&] { load_trainer(saved); }); };
  put(saved / "trainer.json", "{\"step\": -1}");
  CHECK(is_line_with(trainer_error(), "trainer.json: \"step\" is '-1', not a whole number, 0 or more: resume from another"));
  put(saved / "trainer.json", "{\"step\": ");
  CHECK(is_line_with(trainer_error(), "trainer.json", "not valid JSON"));
  put(saved / "trainer.json", "[1]");
  CHECK(is_line_with(trainer_error(), "trainer.json", "not a JSON object"));
  put(saved / "trainer.json", std::string(1000000, '['));
  CHECK(is_line_with(trainer_error(), "trainer.json", "32 deep"));
  // Brackets in text are none.
  put(saved / "trainer.json", R"({"[\\\"[": ")" + std::string(100, '{') + R"(", "step": 3})");
  CHECK(load_trainer(saved)["step"] == 3);
  std::string many = "{\"step\": 1";
  for (int i = 0; i < 100'000; ++i) many += ", \"" + std::to_string(i) + "\": {}";
  put(saved / "trainer.json", many + "}");
  const auto start = std::chrono::steady_clock::now();
  CHECK(load_trainer(saved).size() == 100'001);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));  // quadratic time would be a minute
}

TEST_CASE("config.json: defaults of transformers, and what this trainer cannot represent") {
  TemporaryFolder folder;
  auto read = [&](const std::string& text) {
    put(folder / "config.json", text);
    return load_shape(folder.path());
  };
  auto refusal = [&](const std::string& change) {
    return error_of([&] { read(R"({"model_type": "gpt2", )" + change + "}"); });
  };
  CHECK(read(R"({"model_type": "gpt2"})") == ModelShape{12, 12, 768, 50257, 1024});
  CHECK(read(R"({"model_type": "gpt2", "n_layer": 48, "n_head": 25, "n_embd": 1600, "n_inner": 6400,
      "resid_pdrop": 0.1})") == ModelShape{48, 25, 1600, 50257, 1024});
  CHECK(is_line_with(error_of([&] { read("{}"); }), "model_type is 'null'", "\"gpt2\""));
  CHECK(is_line_with(error_of([&] { read(R"({"model_type": "llama"})"); }), "model_type", "llama", "give such weights"));
  CHECK(is_line_with(refusal(R"("activation_function": "relu")"), "activation_function is 'relu', this", "only \"gelu_new\""));
  for (const char* same : {"gelu_pytorch_tanh", "gelu_fast", "gelu_python_tanh"})
    CHECK(refusal("\"activation_function\": \"" + std::string(same) + '"') == "");
  CHECK(is_line_with(refusal(R"("layer_norm_epsilon": 1e-6)"), "layer_norm_epsilon", "1e-06", "1e-05"));
  CHECK(is_line_with(refusal(R"("n_inner": 3073)"), "n_inner", "3073", "3072"));
  CHECK(is_line_with(refusal(R"("scale_attn_weights": false)"), "scale_attn_weights"));
  CHECK(is_line_with(refusal(R"("scale_attn_by_inverse_layer_idx": true)"), "inverse_layer_idx is 'true'"));
  CHECK(is_line_with(refusal(R"("add_cross_attention": true)"), "add_cross_attention"));
  CHECK(is_line_with(refusal(R"("tie_word_embeddings": false)"), "tie_word_embeddings"));
  for (const char* size : {"0", "-3", "1.5", "\"12\"", "null", "99999999999", "[]"}) {
    CHECK(is_line_with(refusal("\"n_layer\": " + std::string(size)), "\"n_layer\" is", "not a whole number from 1 to "));
  }
}

TEST_CASE("no flipped byte and no cut goes unnoticed") {
  TemporaryFolder folder;
  save(folder.path(), 1);
  const std::filesystem::path saved = folder / "step_00000001";
  CHECK(damage_of(saved) == "");
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(saved)) files.push_back(entry.path());
  CHECK(files.size() == 5);  // model, config, optimizer, trainer, manifest
  std::mt19937 random(1);
  int undetected = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::filesystem::path& file = files[random() % files.size()];
    const std::string good = content_of(file);
    std::string bad = good;
    const size_t at = random() % good.size();
    switch (random() % 4) {
      case 0: bad.resize(at); break;
      case 1: bad += char(random()); break;
      default: bad[at] = char(bad[at] ^ (1 << random() % 8));
    }
    put(file, bad);
    undetected += damage_of(saved).empty();
    put(file, good);
  }
  CHECK(undetected == 0);
  for (const std::filesystem::path& file : files) {
    const std::string good = content_of(file);
    std::filesystem::remove(file);
    CHECK(damage_of(saved) != "");
    put(file, good);
  }
  CHECK(damage_of(saved) == "");
  CHECK(contains(damage_of(folder / "nothing"), "nothing"));
  put(folder / "bare" / "trainer.json", "{}");
  CHECK(contains(damage_of(folder / "bare"), "has no manifest"));
  for (int rank : {0, 1}) {
    const Manifest one = {1, rank, 2, {}};
    put(folder / std::to_string(rank) / one.name(), one.text());
    CHECK(contains(damage_of(folder / std::to_string(rank)), "what rank " + std::to_string(1 - rank) + " of 2 wrote is missing"));
  }
  CHECK(is_line_with(error_of([&] { check_coverage(folder.path(), {{1, 0, 2, {}}, {3, 1, 2, {}}}); }),
                     "manifest_00001_of_00002.json is of step 3, manifest_00000_of_00002.json of step 1"));
  CHECK(is_line_with(error_of([&] { check_coverage(folder.path(), {{1, 0, 2, {}}, {1, 1, 3, {}}}); }),
                     "manifest_00001_of_00003.json is of 3 ranks, and 2 manifests are there"));
  const auto covered = [&](size_t second) {
    return error_of([&] { check_coverage(folder.path(), {{1, 0, 1, {{"file", 0, 100, ""}, {"file", second, 100, ""}}}}); });
  };
  CHECK(is_line_with(covered(0), "file: bytes 0 to 100 were written twice"));
  CHECK(is_line_with(covered(60), "file: bytes 60 to 100 were written twice"));
  CHECK(is_line_with(covered(140), "file: bytes 100 to 140 were not written by any rank"));
}

TEST_CASE("values that are not finite are refused, by file, tensor and element") {
  for (float bad : {NAN, INFINITY, -INFINITY})
    for (State broken : {State::weight, State::first_moment, State::second_moment}) {
      TemporaryFolder folder;
      FakeParameters source(shape, [&](const CheckpointBlock& block, State state, float* to) {
        copy_out(block, state, to);
        if (state == broken && block.tensor->name == "wpe.weight") to[7] = bad;
      });
      save_checkpoint(folder.path(), 1, content("{}", source));
      auto error_in = [&](size_t first, size_t count) {
        FakeParameters part(shape);
        part.kept = {part.slice("wpe.weight", first, count)};
        const auto load = broken == State::weight ? load_weights : load_moments;
        return error_of([&] { loaded(folder / "step_00000001", load, std::move(part)); });
      };
      CHECK(is_line_with(error_in(5, 4), broken == State::weight ? "model.safetensors" : "optimizer.safetensors",
                         "element 7 of tensor", "transformer.wpe.weight", std::isnan(bad) ? "nan" : "inf"));
      CHECK(error_in(0, 7) == "");
    }
}

TEST_CASE("a tokenizer goes with the weights, whatever its files are called") {
  TemporaryFolder folder;
  CheckpointContent with_tokenizer = content("{}");
  with_tokenizer.tokenizer_folder = folder / "from";
  const char* const names[] = {"vocab.json", "merges.txt", "encoder.json", "vocab.bpe", "tokenizer.json", "tokenizer_config.json",
                               "special_tokens_map.json", "added_tokens.json", "generation_config.json", "chat_template.jinja"};
  for (const char* name : names) put(folder / "from" / name, name);
  save_checkpoint(folder.path(), 1, with_tokenizer);
  for (const char* name : names) CHECK(content_of(folder / "step_00000001" / name) == name);
  CHECK(damage_of(folder / "step_00000001") == "");
}

TEST_CASE("what config.json says beside the shape stays, from --init to each checkpoint") {
  TemporaryFolder folder;
  CheckpointContent with_config = content("{}");
  with_config.tokenizer_folder = folder / "from";
  put(folder / "from/config.json", R"({"eos_token_id": [2, 3], "pad_token_id": 5, "bos_token_id": 1, "attn_pdrop": 0.1, "n_layer": 99,
                                       "dtype": "bfloat16", "torch_dtype": "bfloat16", "task_specific_params": {"x": 1}})");
  save_checkpoint(folder.path(), 1, with_config);
  with_config.tokenizer_folder = folder / "step_00000001";
  save_checkpoint(folder.path(), 2, with_config);
  for (const char* name : {"step_00000001", "step_00000002"}) {
    CAPTURE(name);
    const auto config = nlohmann::json::parse(content_of(folder / name / "config.json"));
    CHECK(config["eos_token_id"] == nlohmann::json{2, 3});
    CHECK(config["pad_token_id"] == 5);
    CHECK(config["bos_token_id"] == 1);
    CHECK(config["attn_pdrop"] == 0.1);
    CHECK(config["resid_pdrop"] == 0);
    CHECK(config["task_specific_params"]["x"] == 1);
    CHECK(config["n_layer"] == shape.layers);
    CHECK(config["torch_dtype"] == "float32");
    CHECK(!config.contains("dtype"));
    CHECK(load_shape(folder / name) == shape);
  }
}

TEST_CASE("a tokenizer that can't be read is a problem of the checkpoint, not the end of the run") {
  TemporaryFolder folder;
  CheckpointContent with_tokenizer = content("{}");
  with_tokenizer.tokenizer_folder = folder / "loop";
  std::filesystem::create_symlink("loop", folder / "loop");
  CheckpointWriter writer(folder.path(), size_t(5'000'000'000), {alone});
  std::string problem;
  CHECK(error_of([&] { problem = writer.begin(1, with_tokenizer); }) == "");
  CHECK(contains(problem, "config.json"));
  CHECK(writer.begin(2, content("{}")) == "");
  CHECK(writer.complete() == "");
  CHECK(newest_checkpoint(folder.path())->step == 2);
}

TEST_CASE("large models are split into files, and loaded again") {
  TemporaryFolder folder;
  save_checkpoint(folder.path(), 1, content("{}"), 200);
  const std::filesystem::path saved = folder / "step_00000001";
  CHECK(std::filesystem::exists(saved / "model.safetensors.index.json"));
  CHECK(std::filesystem::exists(saved / "optimizer.safetensors.index.json"));
  CHECK(find_tensor_files(saved, "model").size() > 1);
  CHECK(damage_of(saved) == "");
  check_values(loaded(saved, load_weights), "w");
  check_values(loaded(saved, load_moments), "mv");
}
