// Which rank is this process, of how many, and where does rank 0 listen? The launcher's environment variables tell:
//
//   mpirun    OMPI_COMM_WORLD_{RANK,SIZE}, or PMI_{RANK,SIZE} outside Slurm. Rank 0's endpoint is sent over MPI. Its
//             port is MASTER_PORT (a firewall may let only some through), else any port that is free.
//   torchrun  RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Torchrun's agent may itself listen on MASTER_PORT
//             (TORCHELASTIC_USE_AGENT_STORE=True): the next port is used then.
//   srun      SLURM_PROCID, SLURM_STEP_NUM_TASKS. With PMIX_RANK (--mpi=pmix), the endpoint is sent over MPI if the
//             program was built with it. Else it is the first host of SLURM_STEP_NODELIST and port 20000 + (31
//             SLURM_JOB_ID + SLURM_STEP_ID) mod 10000, or MASTER_ADDR and MASTER_PORT. SLURM_NTASKS does not count,
//             because processes of a batch script have it, too.
//
// The first launcher in this list whose variables are set counts, because srun may start torchrun on each node, and
// mpirun's daemons. If no variable is set, there is one rank.
//
// Ranks send a token to rank 0. Over MPI it is random. Else it is GPT_JOB_TOKEN, which refuses anybody who does not
// know it; but it is sent unencrypted, so whoever can read the network knows it. Without GPT_JOB_TOKEN the token is
// made of what the processes of the job have in common. That refuses port scanners and ranks of other jobs, but no
// attacker.
#pragma once

#include <memory>
#include <string>

#include "runtime/control/control.h"

struct Launch {
  int rank = 0, size = 1;
  std::string how = "alone";  // or "mpirun", "srun", "torchrun"
  bool over_mpi = false;
  Endpoint rank_0;  // not set if it is sent over MPI
};

extern const bool has_mpi;  // was the program built with MPI?

// The value of an environment variable; empty if it is not set.
std::string environment(const char* name);

// The first host of a Slurm node list: n01 of "n[01-04,7],m1".
std::string first_host(const std::string& list);

Launch find_launch();

// Returns when all ranks have connected.
std::unique_ptr<Control> start_control(const Launch& launch);

// Ends MPI. To be called at the end of a successful job, before Control::finish(), when nothing uses MPI any more.
void end_mpi();
