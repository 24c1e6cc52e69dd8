#include "gpt/launch.h"

#include <charconv>
#include <cstdlib>

#ifdef GPT_MPI
#include <mpi.h>
const bool has_mpi = true;
#else
const bool has_mpi = false;
#endif

#include "gpt/base/error.h"

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::optional<long> environment_number(const char* name, long least, long most) {
  const std::string text = environment(name);
  long number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (text.empty()) return {};
  if (error != std::errc() || *end != 0 || number < least || number > most)
    fail(name, ": ", excerpt(text), " is no number from ", least, " to ", most, ": check how the job was started");
  return number;
}

namespace {

constexpr long most_ranks = 100'000;

// The rank and size in a launcher's variables; none if neither is set.
std::optional<Launch> find_rank(const std::string& how, const char* rank_name, const char* size_name) {
  const auto rank = environment_number(rank_name, 0, most_ranks - 1);
  const auto size = environment_number(size_name, 1, most_ranks);
  if (!rank && !size) return {};
  if (!rank) fail(size_name, " is set and ", rank_name, " is not: set both, as ", how, " does");
  if (!size) fail(rank_name, " is set and ", size_name, " is not: set both, as ", how, " does");
  if (*rank >= *size)
    fail(rank_name, " ", *rank, " with ", size_name, " ", *size, ": ranks count from 0, so the last is ", *size - 1);
  return Launch{int(*rank), int(*size), how, false};
}

}  // namespace

Launch find_launch() {
  const bool in_slurm_step = !environment("SLURM_STEP_NUM_TASKS").empty();
  auto mpirun = find_rank("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  if (!mpirun && !in_slurm_step) mpirun = find_rank("mpirun", "PMI_RANK", "PMI_SIZE");
  const auto torchrun = find_rank("torchrun", "RANK", "WORLD_SIZE");
  if (torchrun) environment_number("LOCAL_RANK", 0, torchrun->size - 1);  // only checked; it may be missing
  if (mpirun && torchrun && (mpirun->rank != torchrun->rank || mpirun->size != torchrun->size))
    fail("RANK ", torchrun->rank, " of WORLD_SIZE ", torchrun->size, ", but mpirun says rank ", mpirun->rank, " of ",
         mpirun->size, ": unset RANK and WORLD_SIZE, or start without mpirun");
  const bool from_srun = in_slurm_step && !mpirun && !torchrun;
  const auto srun = from_srun ? find_rank("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS") : std::nullopt;

  Launch launch = mpirun ? *mpirun : torchrun ? *torchrun : srun.value_or(Launch());
  if (launch.size == 1) return {};
  launch.over_mpi = mpirun || (srun && has_mpi && !environment("PMIX_RANK").empty());
  if (launch.over_mpi && !has_mpi)
    fail("mpirun started rank ", launch.rank, " of ", launch.size, ", and this program was built without MPI: install "
         "Open MPI (libopenmpi-dev) and build it again, or start it by srun or torchrun");
  return launch;
}

void start_mpi([[maybe_unused]] const Launch& launch, [[maybe_unused]] bool from_all_threads) {
#ifdef GPT_MPI
  const int wanted = from_all_threads ? MPI_THREAD_MULTIPLE : MPI_THREAD_SERIALIZED;
  int level = 0, rank = 0, size = 0;
  MPI_Init_thread(nullptr, nullptr, wanted, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (rank != launch.rank || size != launch.size)
    fail(launch.how, " started rank ", launch.rank, " of ", launch.size, ", and MPI says rank ", rank, " of ", size,
         ": start it with the mpirun of the MPI that it was built with");
  if (level < wanted) fail("this MPI cannot be used from several threads: use one that can");
#endif
}

void end_mpi() {
#ifdef GPT_MPI
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized && !finalized) MPI_Finalize();
#endif
}
