// A log of the host's calls to the device: GPT_CPU_LOG=FILE makes each process write FILE.RANK, a line for each call,
// in the order of the calls. dev/sm_player.py plays it on model GPUs. Numbers begin with 0, those of records with 1.
//
//   range NAME                              a launcher begins (NVTX); launchers may be inside of others
//   end                                     the innermost launcher ends
//   stream STREAM PRIORITY                  a stream is created; stream 0 is the null stream
//   kernel STREAM NAME BLOCKS
//   product STREAM M N K IN OUT             D (M,N) = A (M,K) · B (K,N); bytes of an element of A and B, and of D
//   copy STREAM BYTES, memset STREAM BYTES
//   record STREAM RECORD                    an event is recorded; each record has its own number
//   wait STREAM RECORD                      the stream waits for the event's latest record; 0: it has none
//   nccl STREAM CALL COMM RANK RANKS CTAS BYTES NUMBER PEER GROUP
//
// COMM names a communicator, and is the same text on all of its ranks. CTAS: its maxCTAs, 0 where NCCL chooses. BYTES: of the
// larger buffer of a collective. NUMBER: of this collective in its communicator, or of this send or receive with this
// peer, in both on each rank the same. PEER: -1 for collectives. Operations of a stream with the same GROUP are one; 0: none.
#pragma once

namespace cpu {
void log(const char* format, ...) __attribute__((format(printf, 1, 2)));  // adds a line, if there is a log
}
