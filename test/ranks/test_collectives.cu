// NCCL's collectives (on the CPU device: cpu/nccl.cpp), in the style of nccl-tests: inputs are small integers crafted
// so that every sum is exact in every type, so nothing is tolerated.
#include <set>

#include "test/ranks/ranks.cuh"

namespace {

int rank() { return ranks().mesh.data().rank(); }
int size() { return ranks().mesh.data().size(); }

ncclComm_t comm() {
  static ncclComm_t instance = [] {
    ncclUniqueId id{};
    if (rank() == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    const std::string bytes = ranks().control->all_gather(std::string(id.internal, sizeof id.internal))[0];
    std::memcpy(id.internal, bytes.data(), sizeof id.internal);
    ncclComm_t comm;
    NCCL_CHECK(ncclCommInitRank(&comm, size(), id, rank()));
    return comm;
  }();
  return instance;
}

// What rank `from` brings: 0 to 30, so that the sum of 8 ranks is exact even in bf16.
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

// Around packs, pieces and chunks: nothing, fewer elements than ranks, one more or less, more than a chunk.
std::vector<size_t> counts() {
  const size_t n = size_t(size());
  return {0, 1, n - 1, n, n + 1, 17, 1023, 4096, (size_t(1) << 20) + 5};
}

#define ELEMENT_TYPES float, double, __nv_bfloat16, __half, int, uint64_t, uint8_t

}  // namespace

TEST_CASE_TEMPLATE("all_reduce", T, ELEMENT_TYPES) {
  for (size_t count : counts())
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
  for (size_t count : counts()) {
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
  for (size_t count : counts()) {
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
  for (size_t count : counts())
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
  if (n == 1) return;
  for (size_t count : counts()) {
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
  if (size() == 1) return;
  std::set<std::string> seen;
  for (const FlightRecorder::Entry& entry : ranks().recorder.entries())
    if (entry.sequence <= 5) seen.insert(entry.name);
  CHECK(seen == std::set<std::string>{"ncclCommInitRank", "all_reduce", "reduce_scatter", "all_gather", "broadcast"});
  CHECK(std::getenv("NCCL_NVLS_ENABLE"));
  int priority, least, greatest;
  CUDA_CHECK(cudaStreamGetPriority(ranks().mesh.data().stream(), &priority));
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CHECK(priority == greatest);
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
  CHECK(traffic.bytes_sent["all_reduce"] == doctest::Approx(2 * (n - 1) / n * bytes));
  CHECK(traffic.bytes_sent["reduce_scatter"] == doctest::Approx((n - 1) * bytes));
  CHECK(traffic.bytes_sent["all_gather"] == doctest::Approx((n - 1) * bytes));
  CHECK((size() == 1 || traffic.milliseconds > 0));
}
