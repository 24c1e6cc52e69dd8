// The mesh: this rank's place among all ranks, its device, and the groups that it communicates with.
//
// A pipeline has pp stages, each on ranks of its own. Activations go from a stage to the next, gradients back, and from
// the last stage on to the first, because a stage may have several parts of the model. A rank has four lanes: it
// receives from the previous stage and sends to the next, and the same for gradients, the other way. In one stream,
// ranks that send to each other would wait for each other for ever; each lane has its own.
//
//   previous stage                     this rank                       next stage
//      to_next     ─── activations ──► from_previous   to_next     ─── activations ──► from_previous
//      from_next   ◄──── gradients ─── to_previous     from_next   ◄──── gradients ─── to_previous
#pragma once

#include <array>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gpt/actions.h"
#include "gpt/collectives.cuh"
#include "gpt/device.cuh"
#include "gpt/ranks.h"
#include "gpt/shapes.h"
#include "gpt/sm_options.h"
#include "kernels/device/memory.cuh"

// The streams of collectives, and how they are ordered. NCCL promises no progress to communicators that work on one
// device at the same time (https://github.com/NVIDIA/nccl/issues/574). So one host thread issues all collectives, all
// ranks of a group issue theirs in the same order, and few groups have a stream of their own: `inner` is for the
// collectives that a layer waits for (tensor and context parallelism), `outer` for all others. GPT_ONE_STREAM=1 puts all
// groups on one stream, but for the lanes.
class CommunicationStreams {
 public:
  cudaStream_t inner, outer;

  CommunicationStreams() {
    inner = outer = create("communication");
    if (const char* one = std::getenv("GPT_ONE_STREAM"); one && *one == '1') return;
    inner = create("inner communication");
  }
  ~CommunicationStreams() {
    for (cudaStream_t stream : all_) cudaStreamDestroy(stream);
  }
  CommunicationStreams(const CommunicationStreams&) = delete;
  CommunicationStreams& operator=(const CommunicationStreams&) = delete;

  // The stream of a lane. All meshes of a process use the same, which are made for the first one that has lanes.
  cudaStream_t lane(const char* name) {
    cudaStream_t& stream = lanes_[name];
    return stream ? stream : stream = create(name);
  }

 private:
  cudaStream_t create(const char* name) {
    // Highest priority: otherwise NCCL's few blocks would wait until all blocks of a matrix product have started.
    int least = 0, greatest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaStream_t stream = nullptr;
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    Profiler::instance().name_stream(stream, name);
    return all_.emplace_back(stream);
  }

  std::vector<cudaStream_t> all_;
  std::map<std::string, cudaStream_t> lanes_;
};

struct MeshOptions {
  // Ranks that split a sequence will send to all others, as Ulysses does, and not only to the next one, as in a ring.
  bool all_to_all = true;
  SmOptions sms = {};
  bool compresses = false;  // gradients: data-parallel ranks will send to all others, of other hosts
  int ranks_inside = 1;     // neighbouring data-parallel ranks that send each other uncompressed arrays
};

class Mesh {
 public:
  // One rank, alone.
  Mesh() { stay_alone(); }

  // device: the one that take_device has chosen. `ranks` outlives the mesh. Collective.
  Mesh(Ranks& ranks, const MeshShape& shape, int device, const MeshOptions& options = {})
      : shape_(shape), options_(options), place_(place_of(ranks.rank(), shape)), device_(device), ranks_(&ranks) {
    make_groups();
  }

  // The same ranks in another shape, for tests. Collective.
  Mesh(const Mesh& other, const MeshShape& shape)
      : shape_(shape), options_(other.options_), place_(place_of(other.ranks_->rank(), shape)), device_(other.device_),
        ranks_(other.ranks_), comm_(other.comm_), streams_(other.streams_) {
    make_groups();
  }

  // A mesh that is only imagined, seen from one of its ranks: groups have their sizes and this rank's places in them,
  // and carry nothing. A model on it counts its memory and allocates none (runtime/planner/memory.cuh).
  Mesh(const MeshShape& shape, int rank, const SmOptions& sms = {}, int ranks_inside = 1)
      : shape_(shape), options_{.sms = sms, .ranks_inside = ranks_inside}, place_(place_of(rank, shape)), is_imagined_(true) {
    stay_alone();
    const auto imagine = [](auto& group, const char* name, int size, int place) {
      if (size > 1) group = std::make_unique<Communicator>(name, size, place);
    };
    imagine(world_, "world", shape.of_an_island(), rank % shape.of_an_island());
    imagine(islands_, "islands", shape.islands, place_.island);
    imagine(data_, "data", data_ranks(), data_rank());
    imagine(inside_, "inside", ranks_inside, data_rank() % ranks_inside);
    if (ranks_inside > 1) imagine(between_, "between", data_ranks() / ranks_inside, data_rank() / ranks_inside);
    imagine(tp_, "tp", shape.tp, place_.tp);
    imagine(cp_, "cp", shape.cp, place_.cp);
    if (is_end()) imagine(ends_, "ends", std::min(shape.pp, 2), place_.pp > 0);
  }

  const MeshShape& shape() const { return shape_; }
  const MeshPlace& place() const { return place_; }
  int device() const { return device_; }
  bool is_imagined() const { return is_imagined_; }
  // This rank's pipeline stage, if each stage has `chunks` chunks of layers.
  Stage stage(int chunks) const { return {shape_.pp, place_.pp, chunks}; }

  Communicator& world() { return *world_; }  // all ranks of this rank's island, which make a step together
  Communicator& islands() { return *islands_; }  // ranks with the same place in all islands
  Communicator& data() { return *data_; }    // ranks with the same part of the model: ZeRO shards over them
  // The data group in two: ranks inside a host, and ranks with the same place in their hosts. Without hosts that matter
  // (MeshOptions) a rank is alone inside, and the second group is the whole.
  Communicator& inside() { return *inside_; }
  Communicator& between() { return options_.ranks_inside > 1 ? *between_ : *data_; }
  Communicator& tp() { return *tp_; }        // ranks that split the layers of one data-parallel rank between them
  Communicator& cp() { return *cp_; }        // ranks that split the sequences of one data-parallel rank between them
  Communicator& ends() { return *ends_; }    // the first and the last stage: both have the tied wte; others are alone

  // Between stages. With one stage they carry nothing.
  Lane& from_previous() { return *lanes_[0]; }
  Lane& to_next() { return *lanes_[1]; }
  Lane& from_next() { return *lanes_[2]; }
  Lane& to_previous() { return *lanes_[3]; }

  // While a rehearsal lasts (gpt/rehearsal.cuh), lanes are silent, and the log of calls forgets.
  void rehearse(bool lasts) {
    for (auto& lane : lanes_) lane->silence(lasts);
    ranks_->calls().rehearse(lasts);
    is_rehearsing_ = lasts;
  }
  bool is_rehearsing() const { return is_rehearsing_; }

  // Do ranks send to each other in the middle of forward and backward, apart from parameters and their gradients?
  bool exchanges_in_passes() const { return shape_.tp * shape_.cp * shape_.pp > 1; }

  // The SMs that kernels leave free in a pass (gpt/sm_options.h).
  int sm_margin(bool sends_data) const { return options_.sms.margin_in_pass(shape_, sends_data); }

  // Bytes of the host's memory that this rank may take. Collective: no rank takes any before all have looked.
  size_t room_on_host() {
    const size_t room = host_memory_room(ranks_ ? ranks_->neighbours() : 1);
    if (ranks_) ranks_->all_gather("");
    return room;
  }

  bool is_first_of_stage() const { return place_.tp == 0 && place_.cp == 0 && place_.dp == 0 && place_.island == 0; }

  // A group of all ranks with connections of its own, which end with it. Collective.
  std::unique_ptr<Communicator> temporary_world() {
    if (shape_.ranks() == 1) return std::make_unique<Communicator>();
    return std::make_unique<Communicator>("temporary", new_split(comm_, 0, ranks_->rank(), 0), streams_->outer, ranks_->calls());
  }

  // Starts a new count of the bytes sent, in every group, and times the collectives if `timed`. Returns the count's number,
  // for take_traffic.
  int begin_traffic(bool timed = true) {
    int number = 0;
    for (Communicator* group : groups()) number = group->begin_traffic(timed);
    return number;
  }
  // The traffic under this number, by group. Groups of one rank are left out.
  std::map<std::string, Traffic> take_traffic(int number) {
    std::map<std::string, Traffic> traffic;
    for (Communicator* group : groups())
      if (group->size() > 1) traffic[group->group()] = group->take_traffic(number);
    return traffic;
  }

 private:
  std::array<Communicator*, 12> groups() const {
    return {world_.get(),    data_.get(),     inside_.get(),   between_.get(),  tp_.get(),       cp_.get(),       ends_.get(),
            lanes_[0].get(), lanes_[1].get(), lanes_[2].get(), lanes_[3].get(), islands_.get()};
  }

  NcclComm connect_all() {
    // Sums that NVSwitch makes (NVLS) are not the same bits in every call: https://github.com/NVIDIA/nccl/issues/1497
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    // NCCL can sum and gather in several ways (Ring, Tree, PAT). By default it connects the ranks for each of them
    // when a buffer's size asks for it first: in the middle of a step it would block the host until the whole group is
    // there, and take memory. With 0 it connects for all of them here. (Sends and receives connect at their first
    // call: try_out.)
    setenv("NCCL_RUNTIME_CONNECT", "0", 0);
    ncclUniqueId id{};
    if (ranks_->rank() == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    const std::string of_rank_0 = ranks_->all_gather(std::string(id.internal, sizeof id.internal))[0];
    std::memcpy(id.internal, of_rank_0.data(), sizeof id.internal);
    ncclConfig_t config = with_ctas(SmOptions::for_world);
    ncclComm_t comm = nullptr;
    const uint64_t sequence = ranks_->calls().enter("ncclCommInitRank", 0);
    NCCL_CHECK(ncclCommInitRankConfig(&comm, ranks_->size(), id, ranks_->rank(), &config));
    ranks_->calls().leave(sequence);
    return {comm, ncclCommDestroy};
  }

  // most: CUDA blocks of a collective; 0: as many as NCCL likes. By default NCCL launches them in clusters of four, which
  // need four free multiprocessors of one part of the GPU; a margin of single ones may have none.
  static ncclConfig_t with_ctas(int most) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (most > 0) config.maxCTAs = most, config.cgaClusterSize = 1;
    return config;
  }

  // Ranks of the same color form a group, in the order of their keys. Collective over the island's ranks: those that need
  // no group give NCCL_SPLIT_NOCOLOR.
  NcclComm split(int color, int key, int most_ctas) { return keep(new_split(island_, color, key, most_ctas)); }
  NcclComm keep(const NcclComm& part) { return parts_.emplace_back(part); }
  NcclComm new_split(const NcclComm& whole, int color, int key, int most_ctas) {
    ncclConfig_t config = with_ctas(most_ctas);
    ncclComm_t comm = nullptr;
    const uint64_t sequence = ranks_->calls().enter("ncclCommSplit", 0);
    NCCL_CHECK(ncclCommSplit(whole.get(), color, key, &comm, &config));
    ranks_->calls().leave(sequence);
    return {comm, ncclCommDestroy};
  }

  void make_group(std::unique_ptr<Communicator>& group, const char* name, const NcclComm& comm, cudaStream_t stream) {
    group = std::make_unique<Communicator>(name, comm, stream, ranks_->calls());
    connect(*group);
  }

  // The ranks with the same part of the model, and which of them this one is.
  int data_ranks() const { return shape_.cp * shape_.dp; }
  int data_rank() const { return place_.cp + shape_.cp * place_.dp; }
  // Has this rank's stage the tied wte?
  bool is_end() const { return place_.pp == 0 || place_.pp == shape_.pp - 1; }

  void stay_alone() {
    for (auto* group : {&world_, &data_, &inside_, &between_, &tp_, &cp_, &ends_, &islands_}) *group = std::make_unique<Communicator>();
    for (auto& lane : lanes_) lane = std::make_unique<Lane>();
  }

  // If this fails on one rank, the others wait for it in NCCL, so the job must end here. If the exception left the
  // constructor, destructors of members would wait for the other ranks first, and nobody would learn the reason.
  void make_groups() try {
    stay_alone();
    ranks_->name_stages(shape_.pp > 1 ? shape_.of_an_island() / shape_.pp : 0, shape_.pp);
    const int ranks = shape_.of_an_island(), rank = ranks_->rank() % ranks;
    if (ranks_->size() == 1) return;
    if (!comm_) comm_ = connect_all();
    if (!streams_) streams_ = std::make_shared<CommunicationStreams>();
    island_ = comm_;
    if (shape_.islands > 1) make_islands(rank);
    if (ranks > 1) make_group(world_, "world", island_, streams_->outer);
    const int for_data = options_.sms.of_data(), for_layers = options_.sms.of_layers();
    if (data_ranks() > 1) {
      const int model_part = place_.tp + shape_.tp * place_.pp, L = options_.ranks_inside, host = data_rank() / L, place = data_rank() % L;
      make_group(data_, "data", split(model_part, data_rank(), for_data), streams_->outer);
      if (L > 1) {
        make_group(inside_, "inside", split(model_part * (data_ranks() / L) + host, place, for_data), streams_->outer);
        make_group(between_, "between", split(model_part * L + place, host, for_data), streams_->outer);
      }
      const size_t count = size_t(between().size());
      if (options_.compresses) try_out(between(), 2 * count, [&](float* data) { between().all_to_all(data, data + count, 1); });
    }
    if (shape_.tp > 1) make_group(tp_, "tp", split(rank / shape_.tp, place_.tp, for_layers), streams_->inner);
    if (shape_.cp > 1) make_context_group();
    if (shape_.pp > 1) make_pipeline_groups();
    caretaker_ = std::jthread([this](std::stop_token stop) { look_after(*ranks_, stop); });
  } catch (const std::exception& error) {
    ranks_->fail(error.what());
  }

  // rank: of this one among its island's. Collectives between islands are slow, so they have a stream of their own.
  void make_islands(int rank) {
    island_ = keep(new_split(comm_, place_.island, rank, SmOptions::for_world));
    make_group(islands_, "islands", keep(new_split(comm_, rank, place_.island, options_.sms.of_data())), streams_->lane("islands"));
    try_out(*islands_, 2 * size_t(shape_.islands), [&](float* data) { islands_->all_to_all(data, data + shape_.islands, 1); });
  }

  // Keys go round in a ring, or heads to all. For each peer that it sends to, NCCL takes memory: some 150 MiB.
  void make_context_group() {
    const auto& [tp, cp, dp, pp, island] = place_;
    make_group(cp_, "cp", split(tp + shape_.tp * (dp + shape_.dp * pp), cp, options_.sms.of_layers()), streams_->inner);
    const size_t ranks = size_t(shape_.cp);
    try_out(*cp_, 2 * ranks, [&, rank = cp](float* data) {
      cp_->send_receive(data, (rank + 1) % int(ranks), data + 1, (rank + int(ranks) - 1) % int(ranks), 1);
      if (options_.all_to_all) cp_->all_to_all(data, data + ranks, 1);
    });
  }

  // An edge leads from a stage to the next, and has a communicator for each direction. One ncclCommSplit makes the
  // communicators of all edges that share no stage: first the even edges, then the odd ones, then, if the number of
  // stages is odd, the edge that closes the ring.
  void make_pipeline_groups() {
    const int stages = shape_.pp, stage = place_.pp, of_stage = shape_.of_an_island() / stages;
    const int place = ranks_->rank() % of_stage;
    const NcclComm ends = split(is_end() ? place : NCCL_SPLIT_NOCOLOR, stage, options_.sms.of_layers());
    if (is_end()) make_group(ends_, "ends", ends, streams_->outer);
    const int out = stage, in = (stage + stages - 1) % stages;  // this stage's two edges
    const auto turn_of = [&](int edge) { return stages % 2 && edge == stages - 1 ? 2 : edge % 2; };
    for (int turn = 0; turn < 2 + stages % 2; ++turn) {
      const bool begins = turn_of(out) == turn, takes_part = begins || turn_of(in) == turn;
      const int color = takes_part ? (begins ? out : in) * of_stage + place : NCCL_SPLIT_NOCOLOR;
      for (bool forward : {true, false}) {
        const NcclComm comm = split(color, begins ? 0 : 1, SmOptions::for_lane);
        if (!takes_part) continue;
        static constexpr const char* names[] = {"from_previous", "to_next", "from_next", "to_previous"};
        const int number = forward ? (begins ? 1 : 0) : (begins ? 2 : 3);
        lanes_[size_t(number)] = std::make_unique<Lane>(names[number], comm, streams_->lane(names[number]), ranks_->calls());
        Lane& lane = *lanes_[size_t(number)];
        // NCCL blocks the host until both ends are there.
        try_out(lane, 1, [&](float* data) { begins == forward ? lane.send(data, 1) : lane.receive(data, 1); });
      }
    }
  }

  // Issues a first call of each kind, on `count` numbers that nobody reads. At a first send or receive NCCL connects the
  // two ranks and takes memory, and the model must see how much is left after that (kernels/device/memory.cuh).
  template <class Issue>
  static void try_out(Communicator& group, size_t count, Issue issue) {
    float* data = nullptr;
    CUDA_CHECK(cudaMalloc(&data, count * sizeof(float)));
    issue(data);
    CUDA_CHECK(cudaStreamSynchronize(group.stream()));
    CUDA_CHECK(cudaFree(data));
  }

  static void connect(Communicator& group) {
    const size_t ranks = size_t(group.size());
    try_out(group, ranks, [&](float* data) {
      group.all_reduce(data, ranks);
      group.reduce_scatter(data + group.rank(), data, 1);
      group.all_gather(data, data + group.rank(), 1);
      group.broadcast(data, ranks, 0);
    });
  }

  // Asks the device again and again which collectives have finished. This has a thread of its own, because a driver
  // that is stuck may not answer, and heartbeats must go on even then.
  void look_after(Ranks& ranks, const std::stop_token& stop) {
    std::mutex mutex;
    std::condition_variable_any sleep;
    try {
      CUDA_CHECK(cudaSetDevice(device_));
      while (!stop.stop_requested()) {
        for (Communicator* group : groups()) group->refresh();
        std::unique_lock lock(mutex);
        sleep.wait_for(lock, stop, std::chrono::milliseconds(200), [] { return false; });
      }
    } catch (const std::exception& error) {
      ranks.fail(error.what());
    }
  }

  MeshShape shape_;
  MeshOptions options_;
  MeshPlace place_ = {};
  bool is_imagined_ = false, is_rehearsing_ = false;
  int device_ = 0;
  Ranks* ranks_ = nullptr;
  NcclComm comm_, island_;                         // of all ranks, and of the island's; null: one rank
  std::vector<NcclComm> parts_;                    // of some ranks; all ranks end theirs in the same order, as NCCL may wait
  std::shared_ptr<CommunicationStreams> streams_;  // declared before the groups, which end first
  std::unique_ptr<Communicator> world_, data_, inside_, between_, tp_, cp_, ends_, islands_;
  std::array<std::unique_ptr<Lane>, 4> lanes_;  // in the order of their names above
  std::jthread caretaker_;  // declared last, so that it ends before the other members are destroyed
};
