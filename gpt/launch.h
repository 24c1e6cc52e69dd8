// Which rank is this process, and of how many? The launcher's environment variables tell:
//
//   mpirun    OMPI_COMM_WORLD_{RANK,SIZE}, or PMI_{RANK,SIZE} outside Slurm.
//   torchrun  RANK, WORLD_SIZE.
//   srun      SLURM_PROCID, SLURM_STEP_NUM_TASKS. With PMIX_RANK (--mpi=pmix), ranks find each other over MPI if the program
//             was built with it. SLURM_NTASKS does not count, because processes of a batch script have it, too.
//
// The first launcher in this list whose variables are set counts, because srun may start torchrun on each node, and
// mpirun's daemons. Where both mpirun's and torchrun's are set, they must agree. If no variable is set, there is one rank.
#pragma once

#include <optional>
#include <string>

struct Launch {
  int rank = 0, size = 1;
  std::string how = "alone";  // or "mpirun", "srun", "torchrun"
  bool over_mpi = false;
};

extern const bool has_mpi;  // was the program built with MPI?

// The value of an environment variable; empty if it is not set.
std::string environment(const char* name);
// The same of a whole number; none if it is not set. Fails if it is no number from `least` to `most`.
std::optional<long> environment_number(const char* name, long least, long most);

Launch find_launch();

// Starts MPI, whose calls will come from one thread at a time, or from several at once.
void start_mpi(const Launch& launch, bool from_all_threads);
// Ends MPI. To be called at the end of a successful job, before Ranks::finish(), when nothing uses MPI any more.
void end_mpi();
