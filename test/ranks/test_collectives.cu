// NCCL's collectives (on the CPU device: cpu/nccl.cpp), in the style of nccl-tests: inputs are small integers crafted
// so that every sum is exact in every type, so nothing is tolerated. One test rounds. With GPT_CPU_NCCL=ring,
// the tests whose names begin with "strict" say what the CPU device is strict about.
#include <csignal>
#include <deque>
#include <set>

#include "gpt/base/text.h"
#include "gpt/rehearsal.cuh"
#include "kernels/cast.cuh"
#include "runtime/cache/product_file.h"
#include "runtime/checks/rank_check.cuh"
#include "test/ranks/ranks.cuh"
#include "test/ranks/recorded_calls.cuh"
#include "test/temporary_folder.h"

namespace {

int rank() { return ranks().mesh.data().rank(); }
int size() { return ranks().mesh.data().size(); }

ncclComm_t comm() {
  static ncclComm_t instance = [] {
    ncclUniqueId id{};
    if (rank() == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    const std::string bytes = ranks().all.all_gather(std::string(id.internal, sizeof id.internal))[0];
    std::memcpy(id.internal, bytes.data(), sizeof id.internal);
    ncclComm_t comm;
    NCCL_CHECK(ncclCommInitRank(&comm, size(), id, rank()));
    return comm;
  }();
  return instance;
}

// The elements that rank `from` brings: 0 to 30, so that the sum of 8 ranks is exact even in bf16.
int input(int from, size_t i) { return int((i * 7 + size_t(from) * 13) % 31); }

template <class T>
T as(int value) {
  if constexpr (std::is_integral_v<T> || std::is_same_v<T, double>) return T(value);
  else return from_float<T>(float(value));
}

template <class T>
std::vector<T> values(size_t count, const std::function<int(size_t)>& value) {
  std::vector<T> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = as<T>(value(i));
  return all;
}

int reduced(ncclRedOp_t operation, size_t i) {
  int result = input(0, i);
  for (int r = 1; r < size(); ++r) {
    const int x = input(r, i);
    result = operation == ncclMax ? std::max(result, x) : operation == ncclMin ? std::min(result, x) : result + x;
  }
  return result;
}

template <class T>
bool same(const Buffer<T>& actual, const std::vector<T>& wanted) {
  const std::vector<T> values = actual.get();
  return values.size() == wanted.size() && std::memcmp(values.data(), wanted.data(), values.size() * sizeof(T)) == 0;
}

// Counts of elements around packs, pieces and chunks: none, fewer than ranks, one more or less, and `largest`.
std::vector<size_t> counts(size_t largest) {
  const size_t n = size_t(size());
  return {0, 1, n - 1, n, n + 1, 17, 1023, 4096, largest};
}

// More than cpu/nccl.cpp sends at once: a chunk is 1 MiB from each rank. Where all ranks' elements are cut into a piece
// for each rank, there are so many that eight ranks' pieces of doubles are longer than a chunk.
template <class T>
constexpr size_t over_a_chunk = (size_t(1) << 20) / sizeof(T) + 5;
constexpr size_t pieces_over_a_chunk = (size_t(1) << 20) + 5;

#define ELEMENT_TYPES float, double, __nv_bfloat16, __half, int, uint64_t, uint8_t

}  // namespace

TEST_CASE_TEMPLATE("all_reduce", T, ELEMENT_TYPES) {
  for (size_t count : counts(pieces_over_a_chunk))
    for (ncclRedOp_t operation : {ncclSum, ncclMax, ncclMin}) {
      if (operation != ncclSum && count > 4096) continue;
      CAPTURE(count);
      Buffer<T> send(values<T>(count, [](size_t i) { return input(rank(), i); })), receive(count);
      const auto wanted = values<T>(count, [&](size_t i) { return reduced(operation, i); });
      NCCL_CHECK(ncclAllReduce(send, receive, count, nccl_type<T>, operation, comm(), test_stream()));
      CHECK(same(receive, wanted));
      NCCL_CHECK(ncclAllReduce(send, send, count, nccl_type<T>, operation, comm(), test_stream()));
      CHECK(same(send, wanted));
    }
}

TEST_CASE_TEMPLATE("all_reduce to the average", T, float, __nv_bfloat16, int) {
  const int n = size();
  Buffer<T> data(values<T>(100, [&](size_t i) { return n * int(i % 5) + (rank() == 0 ? n : 0); }));
  NCCL_CHECK(ncclAllReduce(data, data, 100, nccl_type<T>, ncclAvg, comm(), test_stream()));
  CHECK(same(data, values<T>(100, [&](size_t i) { return n * int(i % 5) + 1; })));
}

TEST_CASE_TEMPLATE("reduce_scatter", T, ELEMENT_TYPES) {
  for (size_t count : counts(over_a_chunk<T>)) {
    CAPTURE(count);
    const size_t begin = size_t(rank()) * count;
    Buffer<T> send(values<T>(count * size_t(size()), [](size_t i) { return input(rank(), i); })), receive(count);
    const auto wanted = values<T>(count, [&](size_t i) { return reduced(ncclSum, begin + i); });
    NCCL_CHECK(ncclReduceScatter(send, receive, count, nccl_type<T>, ncclSum, comm(), test_stream()));
    CHECK(same(receive, wanted));
    NCCL_CHECK(ncclReduceScatter(send, send + begin, count, nccl_type<T>, ncclSum, comm(), test_stream()));
    const std::vector<T> all = send.get();
    CHECK(std::memcmp(all.data() + begin, wanted.data(), count * sizeof(T)) == 0);
  }
}

TEST_CASE_TEMPLATE("all_gather", T, ELEMENT_TYPES) {
  for (size_t count : counts(over_a_chunk<T>)) {
    CAPTURE(count);
    const size_t all = count * size_t(size()), begin = size_t(rank()) * count;
    const auto mine = values<T>(count, [](size_t i) { return input(rank(), i); });
    const auto wanted = values<T>(all, [&](size_t i) { return input(int(i / count), i % count); });
    Buffer<T> send(mine), receive(all), in_place(all);
    NCCL_CHECK(ncclAllGather(send, receive, count, nccl_type<T>, comm(), test_stream()));
    CHECK(same(receive, wanted));
    CUDA_CHECK(cudaMemcpy(in_place + begin, mine.data(), count * sizeof(T), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaStreamSynchronize(nullptr));
    NCCL_CHECK(ncclAllGather(in_place + begin, in_place, count, nccl_type<T>, comm(), test_stream()));
    CHECK(same(in_place, wanted));
  }
}

TEST_CASE("broadcast, from every rank") {
  for (size_t count : counts(over_a_chunk<float>))
    for (int root = 0; root < size(); ++root) {
      Buffer<float> send(values<float>(count, [](size_t i) { return input(rank(), i); })), receive(count);
      const auto wanted = values<float>(count, [&](size_t i) { return input(root, i); });
      NCCL_CHECK(ncclBroadcast(send, receive, count, ncclFloat, root, comm(), test_stream()));
      CHECK(same(receive, wanted));
      NCCL_CHECK(ncclBroadcast(send, send, count, ncclFloat, root, comm(), test_stream()));
      CHECK(same(send, wanted));
    }
}

TEST_CASE("send and receive: a ring, and all to all") {
  const int n = size(), next = (rank() + 1) % n, previous = (rank() + n - 1) % n;
  for (size_t count : counts(over_a_chunk<float>)) {
    CAPTURE(count);
    Buffer<float> send(values<float>(count, [](size_t i) { return input(rank(), i); })), receive(count);
    NCCL_CHECK(ncclGroupStart());
    NCCL_CHECK(ncclSend(send, count, ncclFloat, next, comm(), test_stream()));
    NCCL_CHECK(ncclRecv(receive, count, ncclFloat, previous, comm(), test_stream()));
    NCCL_CHECK(ncclGroupEnd());
    CHECK(same(receive, values<float>(count, [&](size_t i) { return input(previous, i); })));
  }
  const size_t count = 1001;
  Buffer<float> send(values<float>(count, [](size_t i) { return input(rank(), i); })), receive(count * size_t(n));
  NCCL_CHECK(ncclGroupStart());
  for (int peer = 0; peer < n; ++peer) {
    if (peer == rank()) continue;
    NCCL_CHECK(ncclRecv(receive + peer * count, count, ncclFloat, peer, comm(), test_stream()));
    NCCL_CHECK(ncclSend(send, count, ncclFloat, peer, comm(), test_stream()));
  }
  NCCL_CHECK(ncclGroupEnd());
  const std::vector<float> all = receive.get();
  for (int peer = 0; peer < n; ++peer)
    if (peer != rank()) CHECK(all[peer * count + 1000] == float(input(peer, 1000)));
}

TEST_CASE_TEMPLATE("all_to_all: each rank's message, and no byte more", T, float, __nv_bfloat16) {
  Communicator& group = ranks().mesh.data();
  const int n = size();
  // Element i of the message from one rank to another.
  const auto element = [&](int from, int to, size_t i) { return input(from * n + to, i); };
  for (size_t count : {size_t(1), size_t(17), size_t(4099)}) {
    CAPTURE(count);
    const auto messages = [&](auto value) {  // value(peer, i)
      return values<T>(size_t(n) * count, [&](size_t i) { return value(int(i / count), i % count); });
    };
    Buffer<T> receive(size_t(n) * count), send(messages([&](int peer, size_t i) { return element(rank(), peer, i); }));
    const int number = ranks().mesh.begin_traffic();
    group.after(test_stream());
    group.all_to_all(receive.data(), send.data(), count);
    group.wait_for_all(test_stream());
    CHECK(same(receive, messages([&](int peer, size_t i) { return element(peer, rank(), i); })));
    Traffic traffic = ranks().mesh.take_traffic(number)["data"];
    CHECK(traffic.bytes_sent["all_to_all"] == about((n - 1) * count * sizeof(T)));
  }
}

// NCCL adds in rings, or trees: in any order, and each of the k = N − 1 additions rounds the sum so far. So a sum is
// off by k·u/(1 − k·u) of the sum of the magnitudes at most (Higham 2002, section 4.2).
TEST_CASE_TEMPLATE("any sums: N − 1 roundings, and the same bits on all ranks, in every call", T, float, __nv_bfloat16,
                   __half) {
  const size_t piece = 5003, count = piece * size_t(size());
  const double roundings = std::max(size() - 1, 1) * rounding<T>, bound = roundings / (1 - roundings);
  std::vector<double> sums(count), magnitudes(count);
  for (int from = 0; from < size(); ++from) {
    const std::vector<double> values = as_double(random_values<T>(count, 1, 0, unsigned(from)));
    for (size_t i = 0; i < count; ++i) sums[i] += values[i], magnitudes[i] += std::abs(values[i]);
  }
  const Buffer<T> send(random_values<T>(count, 1, 0, unsigned(rank()))), reduced(count), again(count), scattered(piece);
  const auto check = [&](const char* name, const std::vector<double>& actual, size_t first) {
    double worst = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      const double share = std::abs(actual[i] - sums[first + i]) / (bound * magnitudes[first + i]);
      if (!(share <= worst)) worst = std::isnan(share) ? INFINITY : share;
    }
    CHECK_WITHIN(name, worst, 1);
  };
  NCCL_CHECK(ncclAllReduce(send, reduced, count, nccl_type<T>, ncclSum, comm(), test_stream()));
  NCCL_CHECK(ncclAllReduce(send, again, count, nccl_type<T>, ncclSum, comm(), test_stream()));
  NCCL_CHECK(ncclReduceScatter(send, scattered, piece, nccl_type<T>, ncclSum, comm(), test_stream()));
  check("all_reduce", reduced.numbers(), 0);
  check("reduce_scatter", scattered.numbers(), size_t(rank()) * piece);
  CHECK(same_bits(again.get(), reduced.get()));
  const std::vector<T> mine = reduced.get();
  const std::string bits(reinterpret_cast<const char*>(mine.data()), count * sizeof(T));
  for (const std::string& other : ranks().all.all_gather(xxh3(bits))) CHECK(other == xxh3(bits));
}

TEST_CASE("a group of collectives") {
  Buffer<float> sum(std::vector<float>{1}), largest(std::vector<float>{float(rank())});
  NCCL_CHECK(ncclGroupStart());
  NCCL_CHECK(ncclAllReduce(sum, sum, 1, ncclFloat, ncclSum, comm(), test_stream()));
  NCCL_CHECK(ncclAllReduce(largest, largest, 1, ncclFloat, ncclMax, comm(), test_stream()));
  NCCL_CHECK(ncclGroupEnd());
  CHECK(sum.get()[0] == float(size()));
  CHECK(largest.get()[0] == float(size() - 1));
}

TEST_CASE("a split communicator: even and odd ranks, in falling order") {
  ncclComm_t part;
  NCCL_CHECK(ncclCommSplit(comm(), rank() % 2, -rank(), &part, nullptr));
  int members, place;
  NCCL_CHECK(ncclCommCount(part, &members));
  NCCL_CHECK(ncclCommUserRank(part, &place));
  CHECK(members == (size() + 1 - rank() % 2) / 2);
  CHECK(place == members - 1 - rank() / 2);
  Buffer<int> sum(std::vector<int>{rank()});
  NCCL_CHECK(ncclAllReduce(sum, sum, 1, ncclInt32, ncclSum, part, test_stream()));
  int wanted = 0;
  for (int r = rank() % 2; r < size(); r += 2) wanted += r;
  CHECK(sum.get()[0] == wanted);
  NCCL_CHECK(ncclCommDestroy(part));
  NCCL_CHECK(ncclCommSplit(comm(), rank() ? 0 : NCCL_SPLIT_NOCOLOR, 0, &part, nullptr));
  CHECK((part == nullptr) == (rank() == 0));
  if (part) NCCL_CHECK(ncclCommDestroy(part));
}

TEST_CASE("collectives keep their place in a stream, and streams wait for events alone") {
  cudaStream_t other;
  CUDA_CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  const size_t count = 5000;
  Buffer<float> data(count), copy(count);  // NaN until the streams have done their work
  Event filled, reduced;
  for (int round = 0; round < 5; ++round) {
    CUDA_CHECK(cudaMemsetAsync(data, 0, count * sizeof(float), test_stream()));
    filled.record(test_stream());
    CUDA_CHECK(cudaStreamWaitEvent(other, filled));
    NCCL_CHECK(ncclAllReduce(data, data, count, ncclFloat, ncclSum, comm(), other));
    CUDA_CHECK(cudaMemcpyAsync(copy, data, count * sizeof(float), cudaMemcpyDeviceToDevice, other));
    reduced.record(other);
    CUDA_CHECK(cudaStreamWaitEvent(test_stream(), reduced));
  }
  CHECK(same(copy, std::vector<float>(count, 0.0f)));
  CUDA_CHECK(cudaStreamDestroy(other));
}

TEST_CASE("a mesh has NCCL take its memory, keeps it from summing in the switch, and lets its work go first") {
  std::set<std::string> seen;
  int calls = 0;  // of devices, not of hosts
  for (const FlightRecorder::Entry& entry : recorded_calls())
    if (!std::string(entry.name).starts_with("host ") && ++calls <= 5) seen.insert(entry.name);
  CHECK(seen == std::set<std::string>{"ncclCommInitRank", "all_reduce", "reduce_scatter", "all_gather", "broadcast"});
  CHECK(std::getenv("NCCL_NVLS_ENABLE"));
  CHECK(std::getenv("NCCL_RUNTIME_CONNECT"));
  int priority, least, greatest;
  CUDA_CHECK(cudaStreamGetPriority(ranks().mesh.data().stream(), &priority));
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CHECK(priority == greatest);
}

TEST_CASE("a slow network between hosts is refused with its name; inside a host it may be slow") {
  CHECK(network_problem({2e9, 60e9, 2e9, 60e9}, {"a", "a", "b", "b"}, "IB").empty());
  CHECK(network_problem({300e9, 6e9, 300e9, 5e9}, {"a", "a", "b", "b"}, "IB").empty());
  CHECK(network_problem({300e9, 1.25e9, 300e9, 1e9}, {"a", "a", "b", "b"}, "Socket").starts_with(
      "rank 1 (host a) sends 1.2 GB/s to rank 2 (host b), and training over hosts needs 5: NCCL uses the network Socket;"));
  CHECK(network_problem({1e9, 1e9}, {"a", "b"}, "").find("a network that NCCL_DEBUG=INFO names") != std::string::npos);
}

TEST_CASE("a temporary group of all ranks works, and leaves its groups as they were") {
  std::unique_ptr<Communicator> all = ranks().mesh.temporary_world();
  CHECK(all->size() == size());
  Buffer<float> data(std::vector<float>(1, 1.0f));
  all->after(test_stream());
  all->all_reduce(data.data(), 1);
  all->wait_for_all(test_stream());
  CHECK(data.get() == std::vector<float>{float(size())});
  all.reset();  // nobody looks at it any more
  for (const FlightRecorder::Entry& entry : recorded_calls())
    if (entry.group == std::string("temporary")) CHECK(entry.left);
}

TEST_CASE("ranks that split a sequence connect with the next one for a ring, and with all others for Ulysses") {
  for (bool all_to_all : {false, true}) {
    const uint64_t before = recorded_calls().back().sequence;
    const Mesh mesh(ranks().all, {.cp = size()}, ranks().mesh.device(), {all_to_all});
    std::set<std::string> tried;
    for (const FlightRecorder::Entry& entry : recorded_calls())
      if (entry.sequence > before && entry.group == std::string("cp")) tried.insert(entry.name);
    CHECK(tried.contains("send_receive"));
    CHECK(tried.contains("all_to_all") == all_to_all);
  }
}

TEST_CASE("the first rank of each stage times algorithms, then all ranks know all choices; the next start takes rank 0's file") {
  GemmChoices& choices = gemm_choices();
  for (int stages : {1, 2, 3, 4, 8}) {
    if (size() % stages) continue;
    Mesh mesh(ranks().mesh, {.dp = size() / stages, .pp = stages});
    const int first = mesh.place().pp * (size() / stages);
    const TemporaryFolder folder;  // each rank has its own
    const std::string other = rank() > 0 ? "of another host" : "";
    if (rank() > 0) ProductFile(folder / "products").keep({{" a product of all stages", other}, {" a product of stage " + std::to_string(mesh.place().pp), other}});
    for (int start = 1; start <= 2; ++start) {
      const auto asked = [&](const std::string& name) { return choices.choose(name, [&] { return std::to_string(rank() + 100 * start); }); };
      choices = {};
      const std::string said = choose_algorithms(ranks().all, mesh, ProductFile(folder / "products"), [&] {
        const std::string of_stage = asked("a product of stage " + std::to_string(mesh.place().pp));
        CHECK(of_stage == (rank() == first ? std::to_string(rank() + 100) : ""));
        asked("a product of all stages");
      });
      CHECK(said.empty() == (rank() > 0 || start == 2));
      for (int stage = 0; stage < stages; ++stage)
        CHECK(asked("a product of stage " + std::to_string(stage)) == std::to_string(stage * (size() / stages) + 100));
      CHECK(asked("a product of all stages") == "100");
      CHECK(asked("a product that was not rehearsed") == "");
    }
    CHECK(choices_in(content_of(folder / "products")).size() == (rank() == 0 ? size_t(stages) + 1 : 2));
  }
  choices = {};
}

TEST_CASE("the communicator counts what is sent") {
  Communicator& dp = ranks().mesh.data();
  const double n = size();
  const size_t count = 840;  // 1 to 8 ranks divide it
  Buffer<float> data(count * size_t(size()));
  const int number = ranks().mesh.begin_traffic();
  dp.all_reduce(data.data(), count);
  dp.reduce_scatter(data.data(), data.data(), count);
  dp.all_gather(data.data(), data.data(), count);
  dp.wait_for_all(test_stream());
  CUDA_CHECK(cudaDeviceSynchronize());
  Traffic traffic = ranks().mesh.take_traffic(number)["data"];
  const double bytes = count * sizeof(float);
  CHECK(traffic.bytes_sent["all_reduce"] == about(2 * (n - 1) / n * bytes));
  CHECK(traffic.bytes_sent["reduce_scatter"] == about((n - 1) * bytes));
  CHECK(traffic.bytes_sent["all_gather"] == about((n - 1) * bytes));
  CHECK((size() == 1 || traffic.milliseconds > 0));
}

// On the first rank a collective lasts as long as the others are late, and a stream waits for all of it, in the next count.
TEST_CASE("a collective counts where it is waited for, and no wait is longer than what it waits for") {
  Communicator& dp = ranks().mesh.data();
  if (size() == 1) return;
  Buffer<float> data(1024);
  for (bool timed : {true, false}) {  // the count that issues it
    CUDA_CHECK(cudaDeviceSynchronize());
    ranks().all.barrier();
    const int first = ranks().mesh.begin_traffic(timed);
    if (rank()) usleep(200000);
    dp.all_reduce(data.data(), 1024);
    const int second = ranks().mesh.begin_traffic();
    dp.wait_for_all(test_stream());
    CUDA_CHECK(cudaStreamSynchronize(test_stream()));
    const Traffic issued = ranks().mesh.take_traffic(first)["data"], awaited = ranks().mesh.take_traffic(second)["data"];
    CHECK(issued.bytes_sent.at("all_reduce") > 0);
    if (rank() == 0) CHECK(issued.milliseconds == 0);
    if (rank() == 0) CHECK(awaited.exposed_milliseconds > 100);
    CHECK(awaited.exposed_milliseconds <= awaited.milliseconds);
  }
}

// On every rank but the first one it is issued late.
TEST_CASE("a collective that is not timed leaves the flight recorder when it has finished") {
  Communicator& dp = ranks().mesh.data();
  Ranks& all = ranks().all;
  const auto last = [&] {  // of this group: others have meetings of the host
    FlightRecorder::Entry found;
    for (const FlightRecorder::Entry& entry : recorded_calls())
      if (entry.group == std::string(dp.group())) found = entry;
    return found;
  };
  Buffer<float> data(1024);
  const int number = ranks().mesh.begin_traffic(false);
  if (rank() == 0) dp.all_reduce(data.data(), 1024);
  usleep(300000);
  if (rank() == 0) CHECK(last().name == std::string("all_reduce"));
  if (rank() == 0) CHECK(!last().left);
  all.barrier();
  if (rank()) dp.all_reduce(data.data(), 1024);
  dp.wait(test_stream(), dp.last());
  CUDA_CHECK(cudaStreamSynchronize(test_stream()));
  for (int i = 0; i < 1000 && !last().left; ++i) usleep(10000);  // the mesh's own thread looks
  CHECK(last().left);
  Traffic traffic = ranks().mesh.take_traffic(number)["data"];
  CHECK(!traffic.is_timed);
  CHECK(traffic.milliseconds == 0);
  CHECK(traffic.exposed_milliseconds == 0);
  CHECK(traffic.bytes_sent["all_reduce"] > 0);
}

namespace {

struct NamedLane {
  std::string name;
  Lane* lane;
  bool sends;
  int neighbour;  // the stage at the other end
};

std::vector<NamedLane> lanes_of(Mesh& mesh) {
  const int stages = mesh.shape().pp, next = (mesh.place().pp + 1) % stages, previous = (mesh.place().pp + stages - 1) % stages;
  return {{"activations", &mesh.from_previous(), false, previous}, {"activations", &mesh.to_next(), true, next},
          {"gradients", &mesh.from_next(), false, next}, {"gradients", &mesh.to_previous(), true, previous}};
}

// What stage `from` sends as message number `message`: no two messages of any lanes are alike.
std::vector<float> message(const NamedLane& lane, int from, int place, int message, size_t count) {
  const float first = float(((from * 8 + place) * 8 + message) * 2 + (lane.name == "gradients"));
  return values<float>(count, [&](size_t i) { return int(first) + 1024 * int(i % 1000); });
}

}  // namespace

TEST_CASE("lanes carry what was sent, from the last stage to the first too, in order") {
  for (int stages : {1, 2, 3, 4, 8}) {
    if (size() % stages) continue;
    CAPTURE(stages);
    Mesh mesh(ranks().mesh, {.tp = size() / stages, .pp = stages});
    const int messages = 3;
    for (size_t count : {size_t(1), size_t(17), over_a_chunk<float>}) {
      CAPTURE(count);
      const int number = mesh.begin_traffic();
      std::deque<Buffer<float>> buffers;  // all of them first: an allocation may wait until the device is idle
      for (int i = 0; i < messages; ++i)
        for (const NamedLane& one : lanes_of(mesh)) {
          if (one.sends) buffers.emplace_back(message(one, mesh.place().pp, mesh.place().tp, i, count));
          else buffers.emplace_back(count);
        }
      for (size_t i = 0; i < buffers.size(); ++i) {
        const NamedLane one = lanes_of(mesh)[i % 4];
        one.lane->after(test_stream());
        if (one.sends) one.lane->send(buffers[i].data(), count);
        else one.lane->receive(buffers[i].data(), count);
      }
      for (const NamedLane& one : lanes_of(mesh)) one.lane->wait_for_all(test_stream());
      CUDA_CHECK(cudaStreamSynchronize(test_stream()));
      std::map<std::string, Traffic> traffic = mesh.take_traffic(number);
      CHECK(traffic.contains("from_previous") == (stages > 1));
      if (stages == 1) continue;  // nobody to send to: the calls did nothing
      for (size_t i = 0; i < buffers.size(); ++i) {
        const NamedLane one = lanes_of(mesh)[i % 4];
        if (!one.sends) CHECK(same(buffers[i], message(one, one.neighbour, mesh.place().tp, int(i / 4), count)));
      }
      for (const NamedLane& one : lanes_of(mesh)) {
        Traffic& own = traffic[one.lane->group()];
        CHECK(own.bytes_sent["send"] == (one.sends ? double(messages * count * sizeof(float)) : 0));
        CHECK(own.bytes_sent["receive"] == 0);
      }
    }
  }
}

TEST_CASE("what a pipeline has: stages, their ranks, ends, and lanes on streams of their own") {
  CHECK(ranks().mesh.ends().size() == 1);
  CHECK(ranks().mesh.to_next().size() == 1);
  for (int stages : {2, 3, 4, 8}) {
    if (size() % stages) continue;
    CAPTURE(stages);
    const int share = size() / stages;
    Mesh mesh(ranks().mesh, {.tp = share % 2 ? 1 : share / 2, .dp = share % 2 ? share : 2, .pp = stages});
    const auto& [tp, cp, dp, pp, islands] = mesh.place();
    std::vector<int> mine;
    for (int i = 0; i < share; ++i) mine.push_back(pp * share + i);
    const auto sum_of_ranks = [&](Communicator& group) {
      Buffer<float> sum(std::vector<float>{float(rank())});
      group.all_reduce(sum.data(), 1);
      group.wait_for_all(test_stream());
      return sum.get()[0];
    };
    const bool is_end = pp == 0 || pp == stages - 1;
    const int in_stage = rank() % share, both_ends = 2 * in_stage + (stages - 1) * share;
    CHECK(sum_of_ranks(mesh.ends()) == float(is_end ? both_ends : rank()));
    int sharing_data = 0, sharing_layers = 0;
    for (int r : mine) {
      if (r % mesh.shape().tp == tp) sharing_data += r;
      if (r % share / mesh.shape().tp == dp) sharing_layers += r;
    }
    CHECK(sum_of_ranks(mesh.data()) == float(sharing_data));
    CHECK(sum_of_ranks(mesh.tp()) == float(sharing_layers));
    std::set<cudaStream_t> streams = {mesh.world().stream()};
    for (const NamedLane& one : lanes_of(mesh)) {
      int priority, least, greatest;
      CUDA_CHECK(cudaStreamGetPriority(one.lane->stream(), &priority));
      CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
      CHECK(priority == greatest);
      CHECK(streams.insert(one.lane->stream()).second);
    }
  }
}

// The next two end the job, so test/test_mesh.cpp starts each by itself.
namespace {

// Rank 1 of a pipeline leaves after three rounds of messages. The others wait for it.
template <class Leave>
void leave_a_pipeline(Leave leave) {
  Mesh mesh(ranks().mesh, {.pp = size()});
  ranks().all.watch(5, 1);
  Buffer<float> data(1024);
  for (int round = 0;; ++round) {
    if (round == 3 && rank() == 1) leave();
    for (const NamedLane& one : lanes_of(mesh)) {
      if (one.sends) one.lane->send(data.data(), 1024);
      else one.lane->receive(data.data(), 1024);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
  }
}

}  // namespace

TEST_CASE("a rank of a pipeline dies" * doctest::skip()) {
  leave_a_pipeline([] { raise(SIGKILL); });
}

TEST_CASE("a rank of a pipeline hangs" * doctest::skip()) {
  leave_a_pipeline([] { pause(); });
}

#if !defined(__CUDACC__)

namespace {

// The CPU device is as strict as NCCL (cpu/nccl.h).
bool is_strict() {
  const char* mode = std::getenv("GPT_CPU_NCCL");
  return mode && std::string(mode) == "ring";
}

// Element i as a ring sums it that begins at rank `first`.
template <class T>
T ring_sum(const std::vector<std::vector<T>>& values, size_t first, size_t i) {
  T sum = values[first % values.size()][i];
  for (size_t hop = 1; hop < values.size(); ++hop)
    sum = from_float<T>(to_float(sum) + to_float(values[(first + hop) % values.size()][i]));
  return sum;
}

}  // namespace

// Blocks of 1,024 elements take turns. In reduce_scatter the blocks of a piece begin after the rank that gets it.
TEST_CASE_TEMPLATE("strict: sums equal a ring's, bit for bit", T, float, __nv_bfloat16, __half) {
  if (!is_strict()) return skip("needs GPT_CPU_NCCL=ring");
  const size_t piece = over_a_chunk<T>, count = piece * size_t(size());
  std::vector<std::vector<T>> all;
  for (int from = 0; from < size(); ++from) all.push_back(random_values<T>(count, 1, 0, unsigned(from)));
  const Buffer<T> send(all[size_t(rank())]), reduced(count), scattered(piece);
  NCCL_CHECK(ncclAllReduce(send, reduced, count, nccl_type<T>, ncclSum, comm(), test_stream()));
  NCCL_CHECK(ncclReduceScatter(send, scattered, piece, nccl_type<T>, ncclSum, comm(), test_stream()));
  std::vector<T> wanted(count), of_piece(piece);
  for (size_t i = 0; i < count; ++i) wanted[i] = ring_sum(all, 1 + i % piece / 1024, i);
  for (size_t i = 0, begin = size_t(rank()) * piece; i < piece; ++i)
    of_piece[i] = ring_sum(all, size_t(rank()) + 1 + i / 1024, begin + i);
  CHECK(same(reduced, wanted));
  CHECK(same(scattered, of_piece));
}

TEST_CASE("events of finished collectives are used again") {
  Communicator& dp = ranks().mesh.data();
  Buffer<float> data(1);
  ranks().mesh.begin_traffic(false);
  const cpu::Counts before = cpu::counts;
  for (int i = 0; i < 4000; ++i) {
    dp.all_reduce(data.data(), 1);
    if (i % 64 == 63) CUDA_CHECK(cudaDeviceSynchronize());
  }
  const cpu::Counts calls = cpu::counts - before;
  CHECK(calls.events <= 400);   // 256 that nobody has asked for, and 64 under way, twice at most
  CHECK(calls.queries <= 400);  // some ten for each 256
  CHECK(calls.records == 4000);
}

TEST_CASE("strict: a first send blocks the host until it is received, and is refused after a kernel") {
  if (!is_strict()) return skip("needs GPT_CPU_NCCL=ring");
  ncclComm_t part;
  NCCL_CHECK(ncclCommSplit(comm(), 0, rank(), &part, nullptr));
  Buffer<float> data(64);
  Ranks& all = ranks().all;
  const auto send = [&](int from, int to) {
    const bool sends = rank() == from;
    if (sends) return ncclSend(data, 1, ncclFloat, to, part, test_stream());
    return rank() == to ? ncclRecv(data, 1, ncclFloat, from, part, test_stream()) : ncclSuccess;
  };
  double seconds[6];
  for (double& of_call : seconds) {
    all.barrier();
    if (rank() == 1) usleep(500000);
    const double start = steady_seconds();
    NCCL_CHECK(send(0, 1));
    of_call = steady_seconds() - start;
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  if (rank() == 0) CHECK(seconds[0] > 0.2);
  if (rank() == 0) CHECK(*std::min_element(seconds + 1, seconds + 6) < 0.2);  // others may have the core
  const Buffer<__nv_bfloat16> narrow(64);
  cast(narrow.data(), data.data(), 64, test_stream());
  NCCL_CHECK(send(0, 1));
  const bool is_first = rank() <= 1;
  CHECK((send(1, 0) == ncclSuccess) == !is_first);
  if (is_first) CHECK(contains(ncclGetLastError(part), ", of 4 bytes, is the first of its kind and size on its comm"));
  CUDA_CHECK(cudaDeviceSynchronize());
  NCCL_CHECK(ncclAllReduce(data, data, 1, ncclFloat, ncclSum, part, test_stream()));  // the mesh has seen to these
  CUDA_CHECK(cudaDeviceSynchronize());
  NCCL_CHECK(ncclCommDestroy(part));
}

TEST_CASE("strict: no split while the communicator is busy; all ranks end it together") {
  if (!is_strict()) return skip("needs GPT_CPU_NCCL=ring");
  Buffer<float> data(std::vector<float>{1});
  Ranks& all = ranks().all;
  ncclComm_t part = nullptr;
  const auto sum = [&] { NCCL_CHECK(ncclAllReduce(data, data, 1, ncclFloat, ncclSum, comm(), test_stream())); };
  CUDA_CHECK(cudaDeviceSynchronize());
  if (rank() == 0) sum();
  if (rank() == 0) CHECK(ncclCommSplit(comm(), 0, 0, &part, nullptr) == ncclInvalidUsage);
  all.barrier();
  if (rank()) sum();
  CUDA_CHECK(cudaDeviceSynchronize());
  NCCL_CHECK(ncclCommSplit(comm(), 0, rank(), &part, nullptr));
  all.barrier();
  if (rank() == 1) usleep(500000);
  const double start = steady_seconds();
  NCCL_CHECK(ncclCommDestroy(part));
  if (rank() == 0) CHECK(steady_seconds() - start > 0.2);
}

// NCCL may keep what is small in buffers of its own.
TEST_CASE("a send lasts until the other rank receives, however small it is") {
  Mesh mesh(ranks().mesh, {.pp = size()});
  Buffer<float> data(std::vector<float>{float(rank())}), received(1);
  mesh.to_next().after(test_stream());
  mesh.to_next().send(data.data(), 1);
  for (int i = 0; i < 20; ++i) {
    CHECK(!is_ready(mesh.to_next().stream()));
    usleep(1000);
  }
  ranks().all.barrier();
  mesh.from_previous().receive(received.data(), 1);
  mesh.from_previous().wait_for_all(test_stream());
  CHECK(received.get()[0] == float((rank() + size() - 1) % size()));
  CUDA_CHECK(cudaStreamSynchronize(mesh.to_next().stream()));
}
#endif

TEST_CASE("what a rank passes on arrives while it waits in a meeting, to which others come later") {
  const int share = size() / 2;
  if (size() % 2) return skip("needs two stages");
  Mesh mesh(ranks().mesh, {.tp = share, .pp = 2});
  Buffer<float> data(std::vector<float>{float(rank())});
  if (rank() == 0) {
    mesh.from_previous().receive(data.data(), 1);
    mesh.from_previous().wait_for_all(test_stream());
    mesh.to_next().after(test_stream());
    mesh.to_next().send(data.data(), 1);
  }
  if (rank() == share) {
    usleep(100000);
    mesh.to_next().after(test_stream());
    mesh.to_next().send(data.data(), 1);
    CUDA_CHECK(cudaStreamSynchronize(mesh.to_next().stream()));
    CUDA_CHECK(cudaMemset(data.data(), 0, sizeof(float)));
    mesh.from_previous().after(nullptr);
    mesh.from_previous().receive(data.data(), 1);
    CUDA_CHECK(cudaStreamSynchronize(mesh.from_previous().stream()));
    CHECK(data.get()[0] == float(share));
  }
  ranks().all.barrier();
}
