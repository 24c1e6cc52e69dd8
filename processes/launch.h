// Which rank is this process, of how many, and where do they meet? Only the launcher's environment variables say so:
//
//   mpirun    OMPI_COMM_WORLD_{RANK,SIZE}, or PMI_{RANK,SIZE} outside Slurm. Rank 0's endpoint travels over MPI. Its port
//             is MASTER_PORT (a firewall may let only some through), else any that is free.
//   torchrun  RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Torchrun's agent may itself listen on MASTER_PORT
//             (TORCHELASTIC_USE_AGENT_STORE=True): the next port is used then.
//   srun      SLURM_PROCID, SLURM_STEP_NUM_TASKS. With PMIX_RANK (--mpi=pmix) over MPI if the program was built with
//             it, else at the first host of SLURM_STEP_NODELIST and port 20000 + (31 SLURM_JOB_ID + SLURM_STEP_ID) mod
//             10000, or at MASTER_ADDR and MASTER_PORT. SLURM_NTASKS is no sign: processes of a batch script have it.
//
// The first that applies counts: torchrun is started by srun, one a node, and mpirun's daemons are too. None: one rank.
//
// Ranks show a token to rank 0. Over MPI it is random. Else it is GPT_JOB_TOKEN, which keeps out whoever does not know
// it, though not those who read the network: it travels in the clear. Without GPT_JOB_TOKEN it is what the processes of
// the job have in common, which keeps out port scanners and mixed-up jobs, but nobody who means harm.
#pragma once

#include <memory>
#include <string>

#include "processes/control.h"

struct Launch {
  int rank = 0, size = 1;
  std::string how = "alone";  // or "mpirun", "srun", "torchrun"
  bool over_mpi = false;
  Endpoint rank_0;  // unless over MPI
};

extern const bool has_mpi;  // was the program built with it?

// An empty variable counts as none.
std::string environment(const char* name);

// "n[01-04,7],m1" begins with n01.
std::string first_host(const std::string& list);

Launch find_launch();

// Returns when all ranks have come.
std::unique_ptr<Control> start_control(const Launch& launch);

// At a good end, before Control::finish(), when nothing uses MPI any more.
void end_mpi();
