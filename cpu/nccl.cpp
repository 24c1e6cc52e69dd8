// NCCL's calls over MPI's sends and receives.
//
// A collective is a coroutine: it starts transfers, gives control back while they are under way, and goes on when its
// stream is polled and MPI says that they are complete. A rank sends what the bandwidth-optimal algorithms send:
// (N−1)/N of the buffer for reduce_scatter and for all_gather, twice that for all_reduce, directly to the rank that needs it.
#include "cpu/nccl.h"

#include <omp.h>

#include <algorithm>
#include <coroutine>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/cuda_bf16.h"
#include "cpu/cuda_fp16.h"
#include "cpu/device.h"
#include "cpu/workers.h"

#ifdef GPT_MPI
#include <mpi.h>
#else  // a build without MPI has one rank, which sends nothing
using MPI_Comm = int;
using MPI_Request = int;
#endif

struct ncclComm {
  MPI_Comm mpi;
  int rank, size;
  int issued = 0;  // collectives so far
};

namespace {

// What travels to one rank at a time while a sum is formed: small enough to stay in the cache until it is added.
constexpr size_t chunk_bytes = 1 << 20;

size_t bytes_sent = 0;
std::string last_error;

ncclResult_t refuse(ncclResult_t result, std::string reason) {
  last_error = std::move(reason);
  return result;
}

// ---- transfers

class Transfers {
 public:
  // Tags keep collectives apart that are under way at the same time. What two ranks send each other is matched in order.
  static Transfers of_collective(ncclComm* comm) { return {comm, comm->issued++ % pair_tag}; }
  static Transfers of_pair(ncclComm* comm) { return {comm, pair_tag}; }
  ncclComm* comm() const { return comm_; }

  void send(const void* from, size_t bytes, int peer) {
    bytes_sent += bytes;
    each_part(bytes, [&](size_t first, int part) { start_send(static_cast<const char*>(from) + first, part, peer); });
  }

  void receive(void* to, size_t bytes, int peer) {
    each_part(bytes, [&](size_t first, int part) { start_receive(static_cast<char*>(to) + first, part, peer); });
  }

#ifdef GPT_MPI
  bool complete() {
    if (requests_.empty()) return true;
    int done = 1;
    MPI_Testall(int(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE);
    if (done) requests_.clear();
    return done;
  }

 private:
  void start_send(const char* from, int bytes, int peer) {
    MPI_Isend(from, bytes, MPI_BYTE, peer, tag_, comm_->mpi, &requests_.emplace_back());
  }
  void start_receive(char* to, int bytes, int peer) {
    MPI_Irecv(to, bytes, MPI_BYTE, peer, tag_, comm_->mpi, &requests_.emplace_back());
  }
#else
  bool complete() { return true; }

 private:
  void start_send(const char*, int, int) {}
  void start_receive(char*, int, int) {}
#endif

  static constexpr int pair_tag = 0x7fff;  // the largest tag that every MPI has

  Transfers(ncclComm* comm, int tag) : comm_(comm), tag_(tag) {}

  template <class Start>
  void each_part(size_t bytes, Start start) {  // MPI counts bytes as int
    constexpr size_t most = size_t(1) << 30;
    for (size_t first = 0; first < bytes; first += most) start(first, int(std::min(most, bytes - first)));
  }

  ncclComm* comm_;
  int tag_;
  std::vector<MPI_Request> requests_;
};

// A collective under way. `co_await transfers` inside it: not before they are complete.
class Collective {
 public:
  struct promise_type {
    Transfers* awaited = nullptr;
    Collective get_return_object() { return Collective(std::coroutine_handle<promise_type>::from_promise(*this)); }
    std::suspend_always initial_suspend() { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { std::terminate(); }
    std::suspend_always await_transform(Transfers& transfers) { return awaited = &transfers, std::suspend_always(); }
  };

  explicit Collective(std::coroutine_handle<promise_type> handle)
      : handle_(handle.address(), [](void* address) { std::coroutine_handle<>::from_address(address).destroy(); }) {}

  // True when it is finished.
  bool poll() {
    auto handle = std::coroutine_handle<promise_type>::from_address(handle_.get());
    while (!handle.done()) {
      if (handle.promise().awaited && !handle.promise().awaited->complete()) return false;
      handle.resume();
    }
    return true;
  }

 private:
  std::shared_ptr<void> handle_;  // shared: std::function wants copies
};

// ---- element types and sums

size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 4;
  }
}

template <class Sum>
void combine(Sum& sum, Sum x, ncclRedOp_t operation) {
  switch (operation) {
    case ncclProd: sum *= x; break;
    case ncclMax: sum = std::max(sum, x); break;
    case ncclMin: sum = std::min(sum, x); break;
    default: sum += x;
  }
}

// out = sources[0] ∘ sources[1] ∘ ..., in this order, in type Sum. `out` may be one of the sources.
template <class T, class Sum>
void reduce(void* out, const std::vector<const char*>& sources, size_t count, ncclRedOp_t operation) {
  constexpr size_t block = 1024;
  cpu::parallel_for((count + block - 1) / block, 16, [&](size_t number) {
    const size_t first = number * block, n = std::min(block, count - first);
    Sum sums[block];
    for (size_t s = 0; s < sources.size(); ++s) {
      const T* x = reinterpret_cast<const T*>(sources[s]) + first;
      if (s == 0) for (size_t i = 0; i < n; ++i) sums[i] = Sum(x[i]);
      else if (operation == ncclSum || operation == ncclAvg) for (size_t i = 0; i < n; ++i) sums[i] += Sum(x[i]);
      else for (size_t i = 0; i < n; ++i) combine(sums[i], Sum(x[i]), operation);
    }
    if (operation == ncclAvg) for (size_t i = 0; i < n; ++i) sums[i] = sums[i] / Sum(sources.size());
    for (size_t i = 0; i < n; ++i) static_cast<T*>(out)[first + i] = T(sums[i]);
  });
}

void reduce(void* out, const std::vector<const char*>& sources, size_t count, ncclDataType_t type,
            ncclRedOp_t operation) {
  switch (type) {
    case ncclInt8: return reduce<int8_t, int>(out, sources, count, operation);
    case ncclUint8: return reduce<uint8_t, int>(out, sources, count, operation);
    case ncclInt32: return reduce<int, int>(out, sources, count, operation);
    case ncclUint32: return reduce<unsigned, unsigned>(out, sources, count, operation);
    case ncclInt64: return reduce<int64_t, int64_t>(out, sources, count, operation);
    case ncclUint64: return reduce<uint64_t, uint64_t>(out, sources, count, operation);
    case ncclFloat16: return reduce<__half, float>(out, sources, count, operation);
    case ncclBfloat16: return reduce<__nv_bfloat16, float>(out, sources, count, operation);
    case ncclFloat32: return reduce<float, float>(out, sources, count, operation);
    case ncclFloat64: return reduce<double, double>(out, sources, count, operation);
  }
}

// ---- the collectives

struct Data {
  const char* send;
  char* receive;
  size_t count;  // elements a rank
  ncclDataType_t type;
  ncclRedOp_t operation = ncclSum;
};

// Elements of piece r when `count` elements are cut into pieces of `length`.
size_t piece_count(size_t count, size_t length, int r) {
  return std::min(length, count - std::min(count, r * length));
}

// send: `total` elements in pieces of d.count, one a rank; d.receive becomes the reduction of all ranks' piece `rank`.
Collective reduce_pieces(Transfers transfers, Data d, size_t total) {
  const auto [mpi, rank, size, issued] = *transfers.comm();
  const size_t width = bytes_of(d.type), chunk = chunk_bytes / width, mine = piece_count(total, d.count, rank);
  std::vector<char> arrived(size_t(size) * std::min(chunk, d.count) * width);
  for (size_t first = 0; first < d.count; first += chunk) {
    auto elements = [&](size_t piece) { return std::min(chunk, piece - std::min(piece, first)); };
    const size_t n = elements(mine);
    std::vector<const char*> sources(size);
    for (int step = 0; step < size; ++step) {
      const int peer = (rank + step) % size;
      const char* from = d.send + (peer * d.count + first) * width;
      sources[peer] = peer == rank ? from : &arrived[peer * n * width];
      if (peer == rank) continue;
      transfers.receive(&arrived[peer * n * width], n * width, peer);
      transfers.send(from, elements(piece_count(total, d.count, peer)) * width, peer);
    }
    co_await transfers;
    if (n) reduce(d.receive + first * width, sources, n, d.type, d.operation);
  }
}

// receive: `total` elements in pieces of d.count; piece r comes from rank r, whose d.send it is.
Collective gather_pieces(Transfers transfers, Data d, size_t total) {
  const auto [mpi, rank, size, issued] = *transfers.comm();
  const size_t width = bytes_of(d.type);
  char* own = d.receive + rank * d.count * width;
  if (own != d.send) std::memcpy(own, d.send, piece_count(total, d.count, rank) * width);
  for (int step = 1; step < size; ++step) {
    const int to = (rank + step) % size, from = (rank + size - step) % size;
    transfers.receive(d.receive + from * d.count * width, piece_count(total, d.count, from) * width, from);
    transfers.send(d.send, piece_count(total, d.count, rank) * width, to);
  }
  co_await transfers;
}

Collective broadcast(Transfers transfers, Data d, int root) {
  const auto [mpi, rank, size, issued] = *transfers.comm();
  const size_t bytes = d.count * bytes_of(d.type);
  if (rank != root) transfers.receive(d.receive, bytes, root);
  for (int peer = 0; rank == root && peer < size; ++peer)
    if (peer != rank) transfers.send(d.send, bytes, peer);
  if (rank == root && d.receive != d.send) std::memcpy(d.receive, d.send, bytes);
  co_await transfers;
}

Collective send_or_receive(Transfers transfers, Data d, int peer) {
  const size_t bytes = d.count * bytes_of(d.type);
  if (d.send) transfers.send(d.send, bytes, peer);
  else transfers.receive(d.receive, bytes, peer);
  co_await transfers;
}

// ---- issuing

// One after another.
std::function<bool()> in_turn(std::vector<Collective> parts) {
  return [parts, next = size_t(0)]() mutable {
    while (next < parts.size() && parts[next].poll()) ++next;
    return next == parts.size();
  };
}

struct Group {
  int depth = 0;
  std::map<cudaStream_t, std::vector<std::function<bool()>>> issued;
} group;

ncclResult_t issue(cudaStream_t stream, std::vector<Collective> parts) {
  if (group.depth) group.issued[stream].push_back(in_turn(std::move(parts)));
  else cpu::enqueue(stream, in_turn(std::move(parts)));
  return ncclSuccess;
}

Data data(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t operation = ncclSum) {
  return {static_cast<const char*>(send), static_cast<char*>(receive), count, type, operation};
}

}  // namespace

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t comm, cudaStream_t stream) {
  const size_t piece = (count + comm->size - 1) / comm->size, width = bytes_of(type);
  char* own = static_cast<char*>(receive) + std::min(count, comm->rank * piece) * width;
  Collective sum = reduce_pieces(Transfers::of_collective(comm), data(send, own, piece, type, operation), count);
  return issue(stream, {sum, gather_pieces(Transfers::of_collective(comm), data(own, receive, piece, type), count)});
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t receive_count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return issue(stream, {reduce_pieces(Transfers::of_collective(comm), data(send, receive, receive_count, type, operation),
                                      receive_count * comm->size)});
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t send_count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return issue(stream, {gather_pieces(Transfers::of_collective(comm), data(send, receive, send_count, type), send_count * comm->size)});
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return issue(stream, {broadcast(Transfers::of_collective(comm), data(send, receive, count, type), root)});
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return issue(stream, {send_or_receive(Transfers::of_pair(comm), data(send, nullptr, count, type), peer)});
}

ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return issue(stream, {send_or_receive(Transfers::of_pair(comm), data(nullptr, receive, count, type), peer)});
}

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}

// What a group issued to a stream is one operation, whose parts go on side by side.
ncclResult_t ncclGroupEnd() {
  if (group.depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group.depth) return ncclSuccess;
  for (auto& [stream, polls] : std::exchange(group.issued, {}))
    cpu::enqueue(stream, [polls = polls]() mutable {
      std::erase_if(polls, [](auto& poll) { return poll(); });
      return polls.empty();
    });
  return ncclSuccess;
}

// ---- communicators

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};  // MPI knows its ranks without
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int* count) { return *count = comm->size, ncclSuccess; }

ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : result == ncclInvalidUsage ? "invalid usage" : "invalid argument";
}

const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

size_t cpu::nccl_bytes_sent() { return bytes_sent; }

#ifdef GPT_MPI

// The ranks of a host share its memory, and its cores: each has as many workers as are its part of them, unless
// OMP_NUM_THREADS says otherwise.
static void share_host() {
  MPI_Comm host;
  int ranks = 1;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  MPI_Comm_size(host, &ranks);
  MPI_Comm_free(&host);
  cpu::share_memory(size_t(ranks));
  if (!std::getenv("OMP_NUM_THREADS")) omp_set_num_threads(std::max(1, omp_get_max_threads() / ranks));
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId, int rank) {
  int initialized = 0, world = 1;
  MPI_Initialized(&initialized);
  if (initialized) MPI_Comm_size(MPI_COMM_WORLD, &world);
  if (ranks != world)
    return refuse(ncclInvalidUsage, "the CPU device's collectives travel over MPI: start the ranks with mpirun, or with "
                                    "srun --mpi=pmix (torchrun's variables start GPU ranks)");
  *comm = new ncclComm{MPI_COMM_NULL, rank, ranks};
  if (!initialized) return ncclSuccess;
  MPI_Comm_dup(MPI_COMM_WORLD, &(*comm)->mpi);
  share_host();
  return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part, ncclConfig_t*) {
  *part = nullptr;
  MPI_Comm mpi = MPI_COMM_NULL;
  if (comm->mpi != MPI_COMM_NULL)
    MPI_Comm_split(comm->mpi, color == NCCL_SPLIT_NOCOLOR ? MPI_UNDEFINED : color, key, &mpi);
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  *part = new ncclComm{mpi, 0, 1};
  if (mpi == MPI_COMM_NULL) return ncclSuccess;
  MPI_Comm_rank(mpi, &(*part)->rank);
  MPI_Comm_size(mpi, &(*part)->size);
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm->mpi != MPI_COMM_NULL) MPI_Comm_free(&comm->mpi);
  delete comm;
  return ncclSuccess;
}

#else

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId, int rank) {
  if (ranks > 1)
    return refuse(ncclInvalidUsage, "this build has no MPI, over which the CPU device's collectives travel: install "
                                    "libopenmpi-dev and openmpi-bin, then make clean and make");
  *comm = new ncclComm{0, rank, ranks};
  return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t, int color, int, ncclComm_t* part, ncclConfig_t*) {
  *part = color == NCCL_SPLIT_NOCOLOR ? nullptr : new ncclComm{0, 0, 1};
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}

#endif
