// Implements NCCL's calls by MPI's sends and receives.
//
// A collective is a list of steps. A step may start transfers. The next step runs when the stream is polled and MPI
// says that these transfers are complete. A rank sends as many bytes as the bandwidth-optimal algorithms: (N−1)/N of
// the buffer for reduce_scatter and for all_gather, twice that for all_reduce, directly to the rank that needs them.
//
// GPT_CPU_NCCL=ring makes it as strict as NCCL is (the list is in cpu/nccl.h). GPT_CPU_NCCL_FAULT=split:N makes the
// N-th ncclCommSplit of rank 1 fail, so that a test sees how the other ranks end.
#include "cpu/nccl.h"

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/host_cpus.h"
#include "cpu/log.h"
#include "cpu/nccl_sums.h"
#include "cpu/switches.h"

#ifdef GPT_MPI
#include <mpi.h>
#endif

// Without MPI, and in a process that MPI has not started, there is one rank, which sends nothing.
struct ncclComm {
  int rank = 0, size = 1;
  unsigned issued = 0;  // number of collectives so far
  int in_flight = 0;  // operations that have been issued and have not finished
  int running = 0;    // operations of which the stream has come to the beginning, and not to the end
  int ctas = 0;       // CUDA blocks of an operation, at most: maxCTAs; 0: NCCL chooses
  // Data for the log: a name that is the same on all ranks, and numbers of splits and of calls (by kind and peer) so
  // far.
  std::string name = "world";
  int splits = 0;
  std::map<std::pair<std::string, int>, int> calls;
  size_t launches = cpu::counts.launches;           // of kernels, by this process, before the communicator was made
  std::set<std::pair<std::string, int>> connected;  // calls, and their size class or peer: see Connection
#ifdef GPT_MPI
  MPI_Comm mpi = MPI_COMM_NULL;
  ~ncclComm() {
    if (mpi != MPI_COMM_NULL) MPI_Comm_free(&mpi);
  }
#endif
};

namespace {

// Bytes per rank of the chunks in which sums are computed: small enough to stay in the cache until they are added.
constexpr size_t chunk_bytes = 1 << 20;

size_t bytes_sent = 0, sends = 0, operations = 0;
int ctas_running = 0;
int taken(int ctas) { return ctas > 0 ? ctas : 24; }  // as many as NCCL takes on an H100 where it chooses
std::string last_error;

ncclResult_t refuse(ncclResult_t result, std::string reason) {
  last_error = std::move(reason);
  return result;
}

// NCCL_RUNTIME_CONNECT: does a communicator connect at its first operation, or when it is made? Read once, as NCCL
// does.
bool connects_at_first() {
  static const char* const value = std::getenv("NCCL_RUNTIME_CONNECT");
  return !value || std::strcmp(value, "0") != 0;
}

// ---- transfers

class Transfers {
 public:
  // Collectives that are under way at the same time have different tags. MPI matches messages between two ranks in
  // order, so all steps of a collective can use one tag.
  static Transfers of_collective(ncclComm* comm) { return {comm, int(comm->issued++ % pair_tag)}; }
  // A send of NCCL may wait until the other rank receives. This one always does, because a program that relies on MPI's
  // buffers here might wait for ever there.
  static Transfers of_pair(ncclComm* comm) { return {comm, pair_tag}; }
  ncclComm* comm() const { return comm_; }

#ifdef GPT_MPI
  void send(const void* data, size_t bytes, int peer) {
    bytes_sent += bytes;
    const char* from = static_cast<const char*>(data);
    const auto start = tag_ == pair_tag ? MPI_Issend : MPI_Isend;
    for (size_t first = 0; first < bytes; first += part_bytes)
      start(from + first, part(bytes, first), MPI_BYTE, peer, tag_, comm_->mpi, &requests_.emplace_back());
  }

  void receive(void* data, size_t bytes, int peer) {
    char* to = static_cast<char*>(data);
    for (size_t first = 0; first < bytes; first += part_bytes)
      MPI_Irecv(to + first, part(bytes, first), MPI_BYTE, peer, tag_, comm_->mpi, &requests_.emplace_back());
  }

  // An empty message, which does not count. The sender waits for the receiver, too.
  void send_sign(int peer) { MPI_Issend(nullptr, 0, MPI_BYTE, peer, tag_, comm_->mpi, &requests_.emplace_back()); }
  void receive_sign(int peer) { MPI_Irecv(nullptr, 0, MPI_BYTE, peer, tag_, comm_->mpi, &requests_.emplace_back()); }

  bool complete() {
    if (requests_.empty()) return true;  // with one rank, MPI may not have been started
    int done = 1;
    MPI_Testall(int(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE);
    if (done) requests_.clear();
    return done;
  }

 private:
  // MPI counts bytes as int.
  static constexpr size_t part_bytes = size_t(1) << 30;
  static int part(size_t bytes, size_t first) { return int(std::min(part_bytes, bytes - first)); }

  std::vector<MPI_Request> requests_;
#else
  void send(const void*, size_t, int) {}
  void receive(void*, size_t, int) {}
  void send_sign(int) {}
  void receive_sign(int) {}
  bool complete() { return true; }

 private:
#endif
  static constexpr int pair_tag = 0x7fff;  // the largest tag that every MPI has

  Transfers(ncclComm* comm, int tag) : comm_(comm), tag_(tag) {}

  ncclComm* comm_;
  int tag_;
};

// A collective: its remaining steps, and the transfers under way.
class Collective {
 public:
  explicit Collective(Transfers transfers) : transfers_(std::move(transfers)) {}
  void add_step(std::function<void(Transfers&)> step) { steps_.push_back(std::move(step)); }

  void issue() { ++transfers_.comm()->in_flight; }
  // Runs all steps that can run now. Returns true if the collective has finished.
  bool poll() {
    ncclComm& comm = *transfers_.comm();
    if (!std::exchange(runs_, true) && comm.running++ == 0) ctas_running += taken(comm.ctas);
    while (transfers_.complete()) {
      if (next_ == steps_.size()) {
        if (--comm.running == 0) ctas_running -= taken(comm.ctas);
        return --comm.in_flight, true;
      }
      steps_[next_++](transfers_);
    }
    return false;
  }

 private:
  bool runs_ = false;
  Transfers transfers_;
  std::vector<std::function<void(Transfers&)>> steps_;
  size_t next_ = 0;
};

// ---- the collectives

using cpu::bytes_of, cpu::SumOrder, cpu::switches;

struct Data {
  const char* send;
  char* receive;
  size_t count;  // elements per rank
  ncclDataType_t type;
  ncclRedOp_t operation = ncclSum;
};

// The size of piece r if `count` elements are cut into pieces of `length` elements.
size_t piece_count(size_t count, size_t length, int r) {
  return std::min(length, count - std::min(count, r * length));
}

// send: `total` elements in pieces of d.count, one per rank. d.receive becomes the reduction of piece number `rank` of
// all ranks. first_rank: where a ring adds this piece's first block.
void reduce_pieces(Collective& collective, const ncclComm& comm, Data d, size_t total, int first_rank) {
  const int rank = comm.rank, size = comm.size;
  const size_t width = bytes_of(d.type), chunk = chunk_bytes / width;
  auto arrived = std::make_shared<std::vector<char>>();  // one chunk from each rank
  for (size_t first = 0; first < d.count; first += chunk) {
    auto elements = [=](int peer) {
      const size_t piece = piece_count(total, d.count, peer);
      return std::min(chunk, piece - std::min(piece, first));
    };
    const size_t n = elements(rank);
    collective.add_step([=](Transfers& transfers) {
      arrived->resize(size * n * width);
      for (int step = 1; step < size; ++step) {
        const int peer = (rank + step) % size;
        transfers.receive(arrived->data() + peer * n * width, n * width, peer);
        transfers.send(d.send + (peer * d.count + first) * width, elements(peer) * width, peer);
      }
    });
    collective.add_step([=](Transfers&) {
      std::vector<const char*> sources;
      for (int peer = 0; peer < size; ++peer) sources.push_back(arrived->data() + peer * n * width);
      sources[rank] = d.send + (rank * d.count + first) * width;
      const SumOrder order = {switches().sums_in_a_ring, size_t(first_rank) + first / cpu::sum_block};
      if (n) cpu::reduce(d.receive + first * width, sources, n, d.type, d.operation, order);
    });
  }
}

// receive: `total` elements in pieces of d.count; piece r is d.send of rank r.
void gather_pieces(Collective& collective, const ncclComm& comm, Data d, size_t total) {
  const int rank = comm.rank, size = comm.size;
  const size_t width = bytes_of(d.type);
  collective.add_step([=](Transfers& transfers) {
    auto bytes = [&](int peer) { return piece_count(total, d.count, peer) * width; };
    char* own = d.receive + rank * d.count * width;
    if (own != d.send) std::memcpy(own, d.send, bytes(rank));
    for (int step = 1; step < size; ++step) {
      const int to = (rank + step) % size, from = (rank + size - step) % size;
      transfers.receive(d.receive + from * d.count * width, bytes(from), from);
      transfers.send(d.send, bytes(rank), to);
    }
  });
}

// ---- connections that NCCL makes at the first use

// Blocks the host, but not the device: streams go on only while the host asks for one of them.
void wait_for(Transfers& transfers) {
  static cudaStream_t empty = nullptr;
  if (!empty) cudaStreamCreateWithFlags(&empty, cudaStreamNonBlocking);
  for (; !transfers.complete(); std::this_thread::sleep_for(std::chrono::microseconds(50))) cudaStreamQuery(empty);
}

// Is complete when all ranks of the communicator have called it.
Transfers meet_all(ncclComm* comm) {
  Transfers meeting = Transfers::of_collective(comm);
  for (int peer = 0; peer < comm->size; ++peer)
    if (peer != comm->rank) meeting.send_sign(peer), meeting.receive_sign(peer);
  return meeting;
}

// The connections that a call needs. For a collective NCCL chooses Ring, Tree or PAT by its size, and connects all
// ranks of each of them when it is chosen first (enqueue.cc of NCCL 2.30), unless NCCL_RUNTIME_CONNECT=0. A send or a
// receive needs one peer, which is connected at the first call in any case.
struct Connection {
  ncclComm* comm;
  const char* call;
  size_t bytes;
  int peer = -1;  // -1: a collective

  bool is_pair() const { return peer >= 0; }
  // The peer; or which algorithm may be chosen, from small messages to large ones.
  int kind() const { return is_pair() ? peer : bytes <= (64 << 10) ? 0 : bytes <= (16 << 20) ? 1 : 2; }
  bool is_needed() const { return comm->size > 1 && (is_pair() || connects_at_first()); }

  Transfers begin() const {
    if (!is_pair()) return meet_all(comm);
    Transfers meeting = Transfers::of_pair(comm);
    if (std::strcmp(call, "ncclSend") == 0) meeting.send_sign(peer);
    else meeting.receive_sign(peer);
    return meeting;
  }

  std::string what_is_wrong() const {
    const std::string number = std::to_string(is_pair() ? peer : comm->size);
    const std::string ranks = is_pair() ? " with rank " + number : " of " + number + " ranks";
    return "GPT_CPU_NCCL=ring: " + std::string(call) + ranks + ", of " + std::to_string(bytes) + " bytes, is the first "
           "of its kind and size on its communicator, and comes after a kernel: NCCL connects there, in the middle of a "
           "step. Try it out when the mesh is made" + (is_pair() ? "" : ", or set NCCL_RUNTIME_CONNECT=0");
  }
};

// A communicator may connect until the process launches its next kernel. Later a model has taken the memory that was
// left, and the host must not wait for other ranks, which may wait for its next calls.
ncclResult_t connect(const std::vector<Connection>& connections) {
  if (!switches().sums_in_a_ring) return ncclSuccess;
  std::vector<Transfers> meetings;
  for (const Connection& connection : connections) {
    ncclComm& comm = *connection.comm;
    const std::pair<std::string, int> kind = {connection.call, connection.kind()};
    if (!connection.is_needed() || comm.connected.contains(kind)) continue;
    if (cpu::counts.launches != comm.launches) return refuse(ncclInvalidUsage, connection.what_is_wrong());
    comm.connected.insert(kind);
    meetings.push_back(connection.begin());
  }
  for (Transfers& meeting : meetings) wait_for(meeting);
  return ncclSuccess;
}

// ---- issuing

struct Group {
  int depth = 0;
  std::map<cudaStream_t, std::vector<Collective>> issued;
  std::vector<Connection> connections;
  int number = 0;  // groups that have been opened
} group;

void log(cudaStream_t stream, const Connection& c) {
  const std::pair<std::string, int> kind = {c.is_pair() ? c.call : "", c.peer};
  cpu::log("nccl %d %s %s %d %d %d %zu %d %d %d", cpu::number_of(stream), c.call, c.comm->name.c_str(), c.comm->rank,
           c.comm->size, c.comm->ctas, c.bytes, c.comm->calls[kind]++, c.peer, group.depth ? group.number : 0);
}

// All calls of a group on the same stream become one operation, whose parts run at the same time.
ncclResult_t issue_group() {
  auto all_issued = std::exchange(group.issued, {});
  if (connect(std::exchange(group.connections, {})) != ncclSuccess) return ncclInvalidUsage;
  operations += all_issued.size();
  for (auto& [stream, issued] : all_issued) {
    for (Collective& collective : issued) collective.issue();
    cpu::enqueue(stream, [parts = std::move(issued)]() mutable {
      std::erase_if(parts, [](Collective& part) { return part.poll(); });
      return parts.empty();
    });
  }
  return ncclSuccess;
}

ncclResult_t issue(cudaStream_t stream, Collective collective, const Connection& connection) {
  log(stream, connection);
  group.issued[stream].push_back(std::move(collective));
  group.connections.push_back(connection);
  return group.depth ? ncclSuccess : issue_group();  // a call outside of groups is one of its own
}

Data data(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t operation = ncclSum) {
  return {static_cast<const char*>(send), static_cast<char*>(receive), count, type, operation};
}

}  // namespace

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t comm, cudaStream_t stream) {
  const size_t piece = (count + comm->size - 1) / comm->size;
  char* own = static_cast<char*>(receive) + std::min(count, comm->rank * piece) * bytes_of(type);
  Collective all_reduce(Transfers::of_collective(comm));
  reduce_pieces(all_reduce, *comm, data(send, own, piece, type, operation), count, 1);
  gather_pieces(all_reduce, *comm, data(own, receive, piece, type), count);
  return issue(stream, std::move(all_reduce), {comm, "ncclAllReduce", count * bytes_of(type)});
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t receive_count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  Collective reduce_scatter(Transfers::of_collective(comm));
  const Data d = data(send, receive, receive_count, type, operation);
  reduce_pieces(reduce_scatter, *comm, d, receive_count * comm->size, comm->rank + 1);
  const size_t bytes = receive_count * comm->size * bytes_of(type);
  return issue(stream, std::move(reduce_scatter), {comm, "ncclReduceScatter", bytes});
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t send_count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  Collective all_gather(Transfers::of_collective(comm));
  gather_pieces(all_gather, *comm, data(send, receive, send_count, type), send_count * comm->size);
  return issue(stream, std::move(all_gather), {comm, "ncclAllGather", send_count * comm->size * bytes_of(type)});
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  Collective broadcast(Transfers::of_collective(comm));
  broadcast.add_step([=, rank = comm->rank, size = comm->size, bytes = count * bytes_of(type)](Transfers& transfers) {
    if (rank != root) return transfers.receive(receive, bytes, root);
    for (int step = 1; step < size; ++step) transfers.send(send, bytes, (root + step) % size);
    if (receive != send) std::memcpy(receive, send, bytes);
  });
  return issue(stream, std::move(broadcast), {comm, "ncclBroadcast", count * bytes_of(type)});
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  ++sends;
  Collective sending(Transfers::of_pair(comm));
  sending.add_step([=](Transfers& transfers) { transfers.send(send, count * bytes_of(type), peer); });
  return issue(stream, std::move(sending), {comm, "ncclSend", count * bytes_of(type), peer});
}

ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  Collective receiving(Transfers::of_pair(comm));
  receiving.add_step([=](Transfers& transfers) { transfers.receive(receive, count * bytes_of(type), peer); });
  return issue(stream, std::move(receiving), {comm, "ncclRecv", count * bytes_of(type), peer});
}

ncclResult_t ncclGroupStart() {
  if (group.depth++ == 0) ++group.number;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group.depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  return --group.depth ? ncclSuccess : issue_group();
}

// ---- communicators

namespace {

#ifdef GPT_MPI
ncclComm* new_comm(MPI_Comm mpi) {
  auto* comm = new ncclComm;
  comm->mpi = mpi;
  MPI_Comm_rank(mpi, &comm->rank);
  MPI_Comm_size(mpi, &comm->size);
  return comm;
}

// Divides the host's memory and processors between its ranks. Those whose affinity masks overlap, as a launcher has set them, get an
// equal number of workers, unless OMP_NUM_THREADS says otherwise.
void share_host() {
  MPI_Comm host;
  int ranks = 1;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  MPI_Comm_size(host, &ranks);
  cpu_set_t own;
  CPU_ZERO(&own);
  if (sched_getaffinity(0, sizeof own, &own) != 0) CPU_SET(0, &own);  // on more than 1,024 processors all are taken to overlap
  std::vector<cpu_set_t> all(ranks);
  MPI_Allgather(&own, sizeof own, MPI_BYTE, all.data(), sizeof own, MPI_BYTE, host);
  MPI_Comm_free(&host);
  const auto overlaps = [&](const cpu_set_t& other) {
    cpu_set_t both;
    CPU_AND(&both, &own, &other);
    return CPU_COUNT(&both) > 0;
  };
  cpu::share_memory(size_t(ranks));
  if (std::getenv("OMP_NUM_THREADS")) return;
  const int of_mask = omp_get_max_threads() / int(std::ranges::count_if(all, overlaps));
  omp_set_num_threads(std::max(1, std::min(of_mask, group_cpus() / ranks)));
}

// All ranks that MPI has started.
ncclComm* new_world() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (!initialized) return new ncclComm;
  if (const char* log = std::getenv("NCCL_DEBUG_FILE")) std::ofstream(log) << "NCCL INFO Using network MPI\n";
  share_host();
  MPI_Comm mpi;
  MPI_Comm_dup(MPI_COMM_WORLD, &mpi);
  return new_comm(mpi);
}

ncclComm* new_part(const ncclComm& whole, int color, int key) {
  MPI_Comm mpi;
  MPI_Comm_split(whole.mpi, color == NCCL_SPLIT_NOCOLOR ? MPI_UNDEFINED : color, key, &mpi);
  return mpi == MPI_COMM_NULL ? nullptr : new_comm(mpi);
}
#else
ncclComm* new_world() { return new ncclComm; }
ncclComm* new_part(const ncclComm&, int, int) { return nullptr; }  // one rank can't be split
#endif

}  // namespace

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};  // MPI needs no id
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId, int, ncclConfig_t* config) {
  *comm = new_world();
  (*comm)->ctas = config->maxCTAs;
  if ((*comm)->size == ranks) return ncclSuccess;
  return refuse(ncclInvalidUsage, "the CPU device's collectives travel over MPI: start the ranks with mpirun, or with "
                                  "srun --mpi=pmix (torchrun's variables start GPU ranks)");
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  return ncclCommInitRankConfig(comm, ranks, id, rank, &config);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part, ncclConfig_t* config) {
  static int splits = 0;
  if (++splits == switches().failing_split && comm->rank == 1)
    return refuse(ncclSystemError, "split " + std::to_string(splits) + " fails, as GPT_CPU_NCCL_FAULT says");
  if (switches().sums_in_a_ring && comm->in_flight)
    return refuse(ncclInvalidUsage, "GPT_CPU_NCCL=ring: " + std::to_string(comm->in_flight) + " operations of the "
                                    "communicator are under way: wait for its streams before you split it");
  if (comm->size > 1) *part = new_part(*comm, color, key);
  else *part = color == NCCL_SPLIT_NOCOLOR ? nullptr : new ncclComm;
  ++comm->splits;
  if (!*part) return ncclSuccess;
  (*part)->name = comm->name + "." + std::to_string(comm->splits) + "/" + std::to_string(color);
  (*part)->ctas = config ? config->maxCTAs : comm->ctas;
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm && comm->size > 1 && switches().sums_in_a_ring) {  // NCCL may wait for the other ranks
    Transfers meeting = meet_all(comm);
    wait_for(meeting);
  }
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int* count) { return *count = comm->size, ncclSuccess; }

ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : result == ncclSystemError ? "unhandled system error" : "invalid usage";
}

const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

size_t cpu::nccl_bytes_sent() { return bytes_sent; }
int cpu::nccl_ctas() { return ctas_running; }
size_t cpu::nccl_sends() { return sends; }
size_t cpu::nccl_operations() { return operations; }
