#include "runtime/hooks/hooks.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gpt/base/clock.h"
#include "gpt/base/error.h"
#include "gpt/base/text.h"
#include "gpt/interruption.h"
#include "gpt/options.h"
#include "runtime/checkpoints/run_folder.h"

namespace {

constexpr double stop_when_every = 5, stop_when_limit = 60, longest_delay = 300;  // seconds

// A command under way.
class Command {
 public:
  explicit Command(const std::string& command) {
    int output[2];
    if (pipe2(output, O_CLOEXEC | O_NONBLOCK) != 0) return;
    pid_ = fork();
    if (pid_ == 0) {
      setpgid(0, 0);
      sigset_t none;
      sigemptyset(&none);
      sigprocmask(SIG_SETMASK, &none, nullptr);
      for (int signal : {SIGPIPE, SIGXFSZ, SIGTERM, SIGINT, SIGHUP, SIGUSR1}) std::signal(signal, SIG_DFL);
      fcntl(output[1], F_SETFL, 0);  // commands expect that writing waits
      dup2(output[1], STDOUT_FILENO);
      dup2(output[1], STDERR_FILENO);
      execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      _exit(127);
    }
    setpgid(pid_, pid_);
    close(output[1]);
    output_ = output[0];
  }
  ~Command() {
    if (output_ >= 0) close(output_);
  }
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  double seconds() const { return steady_seconds() - begin_; }

  // The exit code, 128 + N after signal N; none while it runs. 126: it could not be started. Keeps the last line that
  // it has written.
  std::optional<int> exit_code() {
    int status = 0;
    const pid_t ended = pid_ < 0 ? -1 : waitpid(pid_, &status, WNOHANG);
    read_output();
    if (ended == 0) return {};
    if (ended < 0) return 126;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  std::string how_it_ended(int exit_code) const {
    return formatted("ended with exit code %d", exit_code) + (line_.empty() ? "" : " (" + excerpt(line_) + ")");
  }

  // Ends its process group, which has 2 s to end by itself. A process that waits for a disk that is gone may stay even
  // after SIGKILL, and is left alone then.
  void kill_group() {
    if (pid_ < 0) return;
    for (int signal : {SIGTERM, SIGKILL}) {
      kill(-pid_, signal);
      for (int tenths = 0; tenths < 20 && kill(-pid_, 0) == 0; ++tenths) {
        waitpid(pid_, nullptr, WNOHANG);
        usleep(100'000);
      }
    }
  }

 private:
  void read_output() {
    char buffer[4096];
    ssize_t size;
    for (int most = 256; most > 0 && (size = read(output_, buffer, sizeof buffer)) > 0; --most)
      for (const char c : std::string_view(buffer, size_t(size))) {
        if (std::exchange(ends_line_, c == '\n' || c == '\r') && !ends_line_) line_.clear();
        if (!ends_line_ && line_.size() < 200) line_ += c;
      }
  }

  pid_t pid_ = -1;
  int output_ = -1;
  double begin_ = steady_seconds();
  std::string line_;
  bool ends_line_ = false;
};

class Helper {
 public:
  Helper(const HookOptions& options, HookState& state) : options_(options), state_(state) {}

  // Runs commands until rank 0 ends, and then the last ones.
  void run(int rank_0) {
    for (pollfd pipe = {rank_0, POLLIN, 0}; poll(&pipe, 1, 100) == 0;) {
      if (!state_.has_begun) continue;
      upload();
      ask();
    }
    if (question_) question_->kill_group();
    if (state_.has_begun) finish();
  }

 private:
  // The step of the checkpoint to upload next; 0: none. The best one comes before the newest, which uploads may never
  // reach while they are slower than checkpoints; after a failure it is the other's turn.
  size_t next() const {
    size_t order[] = {state_.best, state_.newest};
    if (failed_ == order[0]) std::swap(order[0], order[1]);
    for (const size_t step : order)
      if (!uploaded_.contains(step)) return step;
    return 0;
  }
  bool is_uploaded() const { return options_.after_checkpoint.empty() || next() == 0; }

  std::string folder_of(size_t step) const { return step ? concat(state_.out, '/', checkpoint_name(step)) : ""; }

  // step: the step of the checkpoint that the command gets
  void begin(std::optional<Command>& hook, const std::string& command, size_t step) const {
    setenv("GPT_OUT", state_.out, 1);
    setenv("GPT_STEP", std::to_string(step).c_str(), 1);
    setenv("GPT_CHECKPOINT", folder_of(step).c_str(), 1);
    hook.emplace(command);
  }

  // Looks after the upload under way, or begins the next one.
  void upload() {
    if (upload_) {
      const std::optional<int> code = upload_->exit_code();
      if (!code) return;
      failed_ = code == 0 ? 0 : state_.uploading.load();
      if (code == 0) uploaded_.insert(state_.uploading), delay_ = 1;
      else note_failure("--after-checkpoint", upload_->how_it_ended(*code),
                        failed_ == next() ? "it is tried again" : "another checkpoint is next");
      if (code != 0) next_try_ = steady_seconds() + std::exchange(delay_, std::min(2 * delay_, longest_delay));
      upload_.reset();
    }
    if (is_uploaded()) state_.uploading = 0;
    else if (steady_seconds() >= next_try_) begin_upload();
  }

  // Sets `uploading` first, and then checks that this checkpoint is still the next: otherwise rank 0 may have decided to
  // remove it before it could see that.
  void begin_upload() {
    do state_.uploading = next();
    while (state_.uploading != next());
    begin(upload_, options_.after_checkpoint, state_.uploading);
  }

  void ask() {
    if (options_.stop_when.empty() || !state_.trains || state_.asks_to_stop) return;
    if (!question_ && steady_seconds() < next_question_) return;
    if (!question_) begin(question_, options_.stop_when, state_.newest);
    const std::optional<int> code = question_->exit_code();
    if (!code && question_->seconds() < stop_when_limit) return;
    if (!code) {
      question_->kill_group();
      note_failure("--stop-when", "takes more than 60 s, and was ended", "training goes on");
    } else if (code == 126 || code == 127) {
      note_failure("--stop-when", question_->how_it_ended(*code), "that is no reason to stop: training goes on");
    }
    if (code == 0) state_.asks_to_stop = true;
    question_.reset();
    next_question_ = steady_seconds() + stop_when_every;
  }

  // The last upload, then --on-end.
  void finish() {
    const std::string reason = state_.reason.load();
    if (another_run_goes_on(reason)) return;
    // After an error rank 0 may have completed a checkpoint, and a run that was resumed may owe an upload.
    attempt([&] {
      if (const std::optional<Checkpoint> newest = newest_checkpoint(state_.out)) state_.newest = newest->step;
      if (const size_t best = linked_best(state_.out)) state_.best = best;
    });
    const double limit = options_.limit(reason), begin = steady_seconds();
    if (upload_ && state_.uploading != state_.newest && state_.uploading != state_.best) {  // the time is for these two
      upload_->kill_group();
      upload_.reset();
    }
    failed_ = state_.best, delay_ = 1, next_try_ = 0;  // the newest is the first now: without it steps would be lost
    for (; !is_uploaded() && steady_seconds() - begin < limit; usleep(50'000)) upload();
    if (!is_uploaded()) {
      if (upload_) upload_->kill_group();
      note_failure("--after-checkpoint", formatted("has not succeeded for step %zu within %.0f s (--hook-timeout)",
                   next(), limit), "upload " + folder_of(next()) + " yourself");
    }
    if (!options_.on_end.empty() && !another_run_goes_on(reason)) call_on_end(reason, limit);
  }

  // If the same folder is trained on already, --on-end would stop that run's machine. Otherwise the folder is locked until
  // this process ends, unless rank 0 still has it after an error.
  bool another_run_goes_on(const std::string& reason) {
    if (folder_ < 0) folder_ = open(state_.out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder_ < 0 || flock(folder_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return false;
    if (reason == "error" && state_.has_folder && getppid() == rank_0_) return false;
    print_error(concat("hooks: another run writes to ", state_.out, " already: those of the one before are not called"));
    return true;
  }

  void call_on_end(const std::string& reason, double limit) {
    const bool was_stopped = reason == "error" && state_.exit_code == interrupted_exit_code;  // before its first step
    setenv("GPT_REASON", was_stopped ? "stopped" : reason.c_str(), 1);
    setenv("GPT_EXIT_CODE", std::to_string(state_.exit_code).c_str(), 1);
    setenv("GPT_UPLOADED", state_.newest > 0 && next() == 0 ? "1" : "0", 1);
    std::optional<Command> last;
    begin(last, options_.on_end, state_.newest);
    std::optional<int> code;
    while (!(code = last->exit_code()) && last->seconds() < limit) usleep(50'000);
    if (!code) last->kill_group();
    const std::string too_long = formatted("takes more than %.0f s (--hook-timeout), and was ended", limit);
    if (code != 0) note_failure("--on-end", code ? last->how_it_ended(*code) : too_long, "see what it left");
  }

  // Prints the failure the first time that it has this consequence.
  void note_failure(const char* hook, const std::string& what, const std::string& consequence) {
    ++state_.failures;
    if (named_.insert(hook + consequence).second) print_error(concat(hook, ' ', what, ": ", consequence));
  }

  const HookOptions& options_;
  HookState& state_;
  const pid_t rank_0_ = getppid();
  int folder_ = -1;      // the run's, while this process has its lock or tries to
  std::set<size_t> uploaded_ = {0};  // steps of checkpoints for which --after-checkpoint has succeeded; 0: there is none
  size_t failed_ = 0;                // step of the upload that failed last, if none has succeeded since
  double delay_ = 1, next_try_ = 0, next_question_ = 0;
  std::optional<Command> upload_, question_;  // under way
  std::set<std::string> named_;
};

// The main function of the helper process. rank_0: a pipe that is closed when rank 0 ends.
[[noreturn]] void run_helper(const HookOptions& options, HookState& state, int rank_0) {
  setsid();  // a launcher that ends the process group of rank 0 does not end this one
  // Readers of rank 0's stdout need not wait for hooks, and a launcher might wait until all copies of other files are
  // closed.
  dup2(open("/dev/null", O_RDWR), STDIN_FILENO);
  dup2(STDIN_FILENO, STDOUT_FILENO);
  dup2(rank_0, STDERR_FILENO + 1);
  close_range(STDERR_FILENO + 2, ~0u, 0);
  fcntl(STDERR_FILENO + 1, F_SETFD, FD_CLOEXEC);
  cpu_set_t all_cores;  // rank 0 may be bound to one, which it needs
  std::memset(&all_cores, 0xff, sizeof all_cores);
  sched_setaffinity(0, sizeof all_cores, &all_cores);
  std::signal(SIGCHLD, SIG_DFL);
  for (int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1}) std::signal(signal, SIG_IGN);
  // The exception's text may hold a command.
  if (!attempt([&] { Helper(options, state).run(STDERR_FILENO + 1); }).empty())
    print_error("hooks: their process failed, and none is called any more");
  _exit(0);
}

}  // namespace

void Hooks::fork_helper() {
  void* page = mmap(nullptr, sizeof(HookState), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  int ends[2];
  if (page == MAP_FAILED || pipe2(ends, O_CLOEXEC) != 0) fail("hooks: no memory for them: raise ulimit -v or -n");
  state_ = new (page) HookState;
  const pid_t helper = fork();
  if (helper < 0) fail("hooks: no process can be started for them: raise ulimit -u");
  if (helper == 0) {
    close(ends[1]);
    run_helper(options_, *state_, ends[0]);
  }
  helper_ = helper;
  close(ends[0]);
  pipe_ = ends[1];
}

void Hooks::start(int argc, char** argv) {
  fork_helper();
  attempt([&] {  // mistakes in the options are named later
    if (std::any_of(argv, argv + argc, asks_for_help)) return;  // which is printed once, by the rank
    const std::optional<Options> options = parse_options(argc, argv);
    if (options->plan) return;
    std::snprintf(state_->out, sizeof state_->out, "%s", std::filesystem::absolute(options->out).c_str());
    state_->has_begun = true;
  });
}

size_t Hooks::checkpoint(size_t step, size_t best) {
  if (!state_) return 0;
  state_->best = best, state_->newest = step;
  return state_->uploading;
}

size_t Hooks::failures() {
  if (!is_ending_ && helper_ > 0 && helper_has_ended()) {
    ++state_->failures;
    print_error("hooks: their process has ended, training goes on without them");
  }
  return state_ ? state_->failures.load() : 0;
}

void Hooks::end(const char* reason, int exit_code) {
  std::call_once(ended_, [&] {
    is_ending_ = true;
    for (int signal : {SIGTERM, SIGHUP, SIGUSR1}) std::signal(signal, SIG_IGN);
    if (helper_ == 0) return;
    if (reason == std::string("stopped")) reason = stop_reason;
    state_->reason = reason;
    state_->exit_code = exit_code;
    if (exit_code == 2) state_->has_begun = false;
    close(pipe_);
    const double last = steady_seconds() + longest_wait(reason);
    while (!helper_has_ended() && steady_seconds() < last) usleep(20'000);
    if (helper_ > 0) print_error("hooks: their process does not end, and is left alone");
    else if (helper_status_ != 0) print_error("hooks: their process was killed: see whether --on-end has run");
  });
}

bool Hooks::helper_has_ended() {
  if (waitpid(helper_, &helper_status_, WNOHANG) == 0) return false;
  helper_ = 0;
  return true;
}
