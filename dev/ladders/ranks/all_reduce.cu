// The ladder of all-reduce: N ranks hold S bytes of numbers each, and all end with their sums.
//
//   mpirun -np 4 build/cpu/ladder_all_reduce --bytes 1MB
//
// Each rung is made of NCCL's sends and receives and of a few kernels (wire.cuh). The messages of a rank within one
// group of calls are a step. In the α-β-γ model (Thakur, Rabenseifner, Gropp, 2005) a step takes α seconds before the
// first byte arrives, each byte that passes a link takes β, and each byte that is added takes γ. Links work in both
// directions at once, and all ranks' links at the same time. Two things are added here. The launch of a kernel takes λ:
// half of the steps bring numbers that are then added, so there are half as many adds as steps. And α is larger for
// long messages, because the ranks agree before such a message is sent.
//
// The times that the ranks wait for (log: of base 2; P: the largest power of two that is not above N):
//
//                      steps              through a link            added              most sent by a rank
//   server             2                  2(N−1)·S                  (N−1)·S            (N−1)·S
//   tree               2⌈log N⌉           2⌈log N⌉·S                ⌈log N⌉·S          ⌈log N⌉·S
//   ring               2(N−1)             2(N−1)/N·S                (N−1)/N·S          2(N−1)/N·S
//   halving_doubling   2 log P [+ 2]      2(P−1)/P·S [+ 2S]         (P−1)/P·S [+ S]    2(P−1)/P·S [+ S]     [N > P]
//   direct             2                  2(N−1)/N·S                (N−1)/N·S          2(N−1)/N·S
//
// server: the link of rank 0 takes in N−1 times S, rank 0 adds it, and the link sends N−1 times S out again. tree: on
// each of ⌈log N⌉ levels S is sent up, and later down. ring: in N−1 steps each rank sends a piece of S/N and adds the
// piece that it gets; N−1 more steps pass the sums on. halving_doubling: S/2 + S/4 + ... + S/P = (P−1)/P·S, and the
// same on the way back; ranks beyond P bring their numbers first and get the sums last. direct: as in a ring, but all
// pieces at once. No algorithm sends less than 2(N−1)/N·S per rank (Patarasuk and Yuan, 2009), or takes fewer than ⌈log
// N⌉ steps if a rank talks to one other rank at a time. The 2 steps of direct consist of N−1 messages each; with many
// ranks a network does not send these in the time of one.
//
// In GB/s, S/t is the algorithm's bandwidth. Bus bandwidth is 2(N−1)/N·S/t, as in nccl-tests: the rate at which each
// link would work if it carried no more bytes than necessary. So it can be compared with 1/β, whatever N is.
//
// Each sum is finished by one rank and then only copied, so all ranks end with the same bits, whatever the order of
// additions.
//
// With 8 bits per number (wire.cuh), β counts 260 bytes for 256 numbers. To pack the numbers costs π per byte of S, and
// to unpack the sums υ. There is a pack before each add, another one before finished sums are sent, and an unpack at
// the end; each takes a λ. Finished sums are sent as packed by the rank that finished them, so all ranks unpack the
// same. The price is precision: packing a sum of m inputs x rounds it by m·max|x|/254 at most. The numbers of inputs
// that are packed on a number's way, added up, are:
//
//   server, direct   N−1 alone, and the sum of N          2N − 1
//   ring             1 + 2 + ... + N                      N(N+1)/2
//   tree, halving    N at most on each level, and at last N(⌈log N⌉ + 1)
#include "dev/ladders/ranks/harness.cuh"

namespace {

using ladder::Algorithm;
using ladder::AllReduce;
using ladder::Cost;
using ladder::Range;
using ladder::World;

// ⌈log N⌉
double levels(int ranks) { return std::ceil(std::log2(ranks)); }

// ---- server, direct: every piece has an owner; all ranks send it theirs, and it sends the sum to all

template <class Wire>
void through_owners(Wire& wire, World& world, int owners) {
  const int n = world.size(), rank = world.rank();
  const auto piece = [&](int of) { return of < owners ? wire.whole().part(of, owners) : Range{0, 0}; };
  const Range own = piece(rank);
  wire.pack(wire.whole());
  world.step([&] {
    for (int distance = 1; distance < n; ++distance) {
      const int to = (rank + distance) % n, from = (rank + n - distance) % n;
      world.send(wire.packed(piece(to)), wire.bytes(piece(to)), to);
      world.receive(wire.arrived(own, distance - 1), wire.bytes(own), from);
    }
  });
  wire.add(own, n - 1);
  wire.pack(own);
  world.step([&] {
    for (int distance = 1; distance < n; ++distance) {
      const int to = (rank + distance) % n, from = (rank + n - distance) % n;
      world.send(wire.packed(own), wire.bytes(own), to);
      world.receive(wire.packed(piece(from)), wire.bytes(piece(from)), from);
    }
  });
  wire.unpack(wire.whole());
}

template <class Wire>
void server(Wire& wire, World& world) { through_owners(wire, world, 1); }

Cost server_cost(int n) {
  const double others = n - 1;
  return {.steps = n > 1 ? 2.0 : 0, .moved = 2 * others, .added = others, .packed = 2, .sent = others,
          .terms = 2.0 * n - 1};
}

template <class Wire>
void direct(Wire& wire, World& world) { through_owners(wire, world, world.size()); }

Cost direct_cost(int n) {
  const double others = double(n - 1) / n;
  return {.steps = n > 1 ? 2.0 : 0, .moved = 2 * others, .added = others, .packed = 1 + 1.0 / n, .sent = 2 * others,
          .terms = 2.0 * n - 1};
}

// ---- tree: half of the ranks that are left send their sums to the other half, until one rank has all

template <class Wire>
void tree(Wire& wire, World& world) {
  const int n = world.size(), rank = world.rank();
  const Range all = wire.whole();
  for (int distance = 1; distance < n; distance *= 2) {
    if (rank % (2 * distance) == distance) {
      wire.pack(all);
      world.step([&] { world.send(wire.packed(all), wire.bytes(all), rank - distance); });
    } else if (rank % (2 * distance) == 0 && rank + distance < n) {
      world.step([&] { world.receive(wire.arrived(all), wire.bytes(all), rank + distance); });
      wire.add(all);
    }
  }
  if (rank == 0) wire.pack(all);
  for (int distance = int(std::bit_ceil(unsigned(n))) / 2; distance > 0; distance /= 2) {
    if (rank % (2 * distance) == distance)
      world.step([&] { world.receive(wire.packed(all), wire.bytes(all), rank - distance); });
    else if (rank % (2 * distance) == 0 && rank + distance < n)
      world.step([&] { world.send(wire.packed(all), wire.bytes(all), rank + distance); });
  }
  wire.unpack(all);
}

Cost tree_cost(int n) {
  const double l = levels(n);
  return {.steps = 2 * l, .moved = 2 * l, .added = l, .packed = l + 1, .sent = l, .terms = n * (l + 1)};
}

// ---- ring: sums of pieces are passed from neighbour to neighbour; each rank adds its numbers, until they are complete

template <class Wire>
void ring(Wire& wire, World& world) {
  const int n = world.size(), rank = world.rank(), right = (rank + 1) % n, left = (rank + n - 1) % n;
  const auto piece = [&](int number) { return wire.whole().part((number + 2 * n) % n, n); };
  for (int step = 0; step < n - 1; ++step) {
    const Range out = piece(rank - step), in = piece(rank - step - 1);
    wire.pack(out);
    world.step([&] {
      world.send(wire.packed(out), wire.bytes(out), right);
      world.receive(wire.arrived(in), wire.bytes(in), left);
    });
    wire.add(in);
  }
  wire.pack(piece(rank + 1));  // its sum is complete on this rank
  for (int step = 0; step < n - 1; ++step) {
    const Range out = piece(rank - step + 1), in = piece(rank - step);
    world.step([&] {
      world.send(wire.packed(out), wire.bytes(out), right);
      world.receive(wire.packed(in), wire.bytes(in), left);
    });
  }
  wire.unpack(wire.whole());
}

Cost ring_cost(int n) {
  const double others = double(n - 1) / n;
  return {.steps = 2.0 * (n - 1), .moved = 2 * others, .added = others, .packed = 1, .sent = 2 * others,
          .terms = n * (n + 1) / 2.0};
}

// ---- recursive halving and doubling: pairs of ranks divide their numbers; nearest neighbours begin, with the most
// numbers

template <class Wire>
void halve_and_double(Wire& wire, World& world, int ranks) {
  const int rank = world.rank();
  std::vector<Range> kept = {wire.whole()};
  const auto half = [&](int distance, bool mine) {  // of the range that this rank and its partner share
    const bool upper = bool(rank & distance) == mine;
    return kept.back().part(upper, 2);
  };
  for (int distance = 1; distance < ranks; distance *= 2) {
    const Range out = half(distance, false), in = half(distance, true);
    wire.pack(out);
    world.step([&] {
      world.send(wire.packed(out), wire.bytes(out), rank ^ distance);
      world.receive(wire.arrived(in), wire.bytes(in), rank ^ distance);
    });
    wire.add(in);
    kept.push_back(in);
  }
  wire.pack(kept.back());
  for (int distance = ranks / 2; distance > 0; distance /= 2) {
    const Range out = kept.back();
    kept.pop_back();
    const Range in = half(distance, false);
    world.step([&] {
      world.send(wire.packed(out), wire.bytes(out), rank ^ distance);
      world.receive(wire.packed(in), wire.bytes(in), rank ^ distance);
    });
  }
}

// Ranks beyond the power of two have a partner that works for them.
template <class Wire>
void halving_doubling(Wire& wire, World& world) {
  const int n = world.size(), rank = world.rank(), ranks = int(std::bit_floor(unsigned(n)));
  const Range all = wire.whole();
  if (rank >= ranks) {
    wire.pack(all);
    world.step([&] { world.send(wire.packed(all), wire.bytes(all), rank - ranks); });
    world.step([&] { world.receive(wire.packed(all), wire.bytes(all), rank - ranks); });
  } else {
    const bool speaks_for_another = rank + ranks < n;
    if (speaks_for_another) {
      world.step([&] { world.receive(wire.arrived(all), wire.bytes(all), rank + ranks); });
      wire.add(all);
    }
    halve_and_double(wire, world, ranks);
    if (speaks_for_another) world.step([&] { world.send(wire.packed(all), wire.bytes(all), rank + ranks); });
  }
  wire.unpack(all);
}

Cost halving_doubling_cost(int n) {
  const double p = std::bit_floor(unsigned(n)), others = (p - 1) / p, folded = n > p ? 1 : 0;
  return {.steps = 2 * std::log2(p) + 2 * folded, .moved = 2 * others + 2 * folded, .added = others + folded,
          .packed = 1 + folded, .sent = 2 * others + folded, .terms = n * (levels(n) + 1)};
}

// ---- the library

template <class T>
void nccl(AllReduce<T>& o) {
  NCCL_CHECK(ncclAllReduce(o.data, o.data, o.count, nccl_type<T>, ncclSum, o.world.comm(), o.world.stream()));
}

struct AllReduceLadder {
  template <class T>
  static std::vector<Algorithm<T>> rungs() {
    using O = AllReduce<T>;
    return {
        {"server", "rank 0 adds up all: its link carries everything",
         [](O& o) { server(o.plain, o.world); }, server_cost},
        {"tree", "log N levels: no link carries more than one rank's numbers at a time",
         [](O& o) { tree(o.plain, o.world); }, tree_cost},
        {"ring", "a piece at a time to the neighbour: all links work all the time, for 2(N−1) steps",
         [](O& o) { ring(o.plain, o.world); }, ring_cost},
        {"halving_doubling", "half of it, a quarter, ...: as few bytes as the ring in 2 log N steps",
         [](O& o) { halving_doubling(o.plain, o.world); }, halving_doubling_cost},
        {"direct", "each piece straight to the rank that adds it up: as few bytes in 2 steps, of N−1 messages",
         [](O& o) { direct(o.plain, o.world); }, direct_cost},
        {"server_8bit", "one byte per number", [](O& o) { server(o.eight_bits, o.world); }, server_cost, true},
        {"tree_8bit", "rounds sums on each level", [](O& o) { tree(o.eight_bits, o.world); }, tree_cost, true},
        {"ring_8bit", "rounds sums that grow, N times", [](O& o) { ring(o.eight_bits, o.world); }, ring_cost, true},
        {"halving_doubling_8bit", "rounds sums on each level", [](O& o) { halving_doubling(o.eight_bits, o.world); },
         halving_doubling_cost, true},
        {"direct_8bit", "rounds each rank's numbers once, and their sum once: the least error",
         [](O& o) { direct(o.eight_bits, o.world); }, direct_cost, true},
        {"nccl", "ncclAllReduce, the algorithm is the library's choice", nccl<T>, nullptr},
    };
  }
};

}  // namespace

int main(int count, char** arguments) { return ladder::run_ranks<AllReduceLadder>(count, arguments); }
