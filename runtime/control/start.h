// Where does rank 0 listen? Under mpirun, and under srun with PMIx if the program was built with MPI, its endpoint is sent over
// MPI; its port is MASTER_PORT (a firewall may let only some through), else any port that is free. Otherwise variables tell:
//
//   torchrun  MASTER_ADDR, MASTER_PORT. Torchrun's agent may itself listen on MASTER_PORT
//             (TORCHELASTIC_USE_AGENT_STORE=True): the next port is used then.
//   srun      the first host of SLURM_STEP_NODELIST and port 20000 + (31 SLURM_JOB_ID + SLURM_STEP_ID) mod 10000, or
//             MASTER_ADDR and MASTER_PORT.
//
// Ranks send a token to rank 0. Over MPI it is random. Else it is GPT_JOB_TOKEN, which refuses anybody who does not
// know it; but it is sent unencrypted, so whoever can read the network knows it. Without GPT_JOB_TOKEN the token is
// made of values that all processes of the job have in common. That refuses port scanners and ranks of other jobs, but
// no attacker.
#pragma once

#include <memory>
#include <string>

#include "runtime/control/control.h"

// The first host of a Slurm node list: n01 of "n[01-04,7],m1".
std::string first_host(const std::string& list);

// The address at which rank 0 listens, in a job of several ranks without MPI.
Endpoint find_endpoint(const Launch& launch);

// Returns when all ranks have connected.
std::unique_ptr<Control> start_control(const Launch& launch);
