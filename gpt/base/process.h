// When the process started, and settings that the program makes before it does anything else.
#pragma once

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "gpt/base/clock.h"
#include "gpt/base/error.h"

// Before main() begins: the earliest time that the program can know of itself.
inline const Clock::time_point process_start = Clock::now();

// Ignores SIGPIPE: the run goes on if the terminal, or the program that reads its output, is gone. Ignores SIGXFSZ: if
// a file may not grow, write() returns an error, which names the file. Opens closed standard streams on /dev/null:
// otherwise a file that is opened later might get their number, and lines for the terminal would be written into it.
// Raises the number of files and sockets that may be open to the most that the system allows: NCCL opens some for each
// peer of each communicator, and the usual limit of 1,024 is soon reached.
inline void prepare_process() {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  int descriptor = open("/dev/null", O_RDWR);
  while (descriptor >= 0 && descriptor <= STDERR_FILENO) descriptor = open("/dev/null", O_RDWR);
  close(descriptor);
  rlimit open_files{};
  if (getrlimit(RLIMIT_NOFILE, &open_files) == 0) {
    open_files.rlim_cur = open_files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &open_files);
  }
}

// Fails if the result that this process printed could not be written. If the reader of stdout has gone, SIGPIPE ends the
// process, as it ends others. Not for training, which goes on without a terminal.
inline void require_printed() {
  errno = 0;
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return;
  if (errno == EPIPE) {
    std::signal(SIGPIPE, SIG_DFL);
    std::raise(SIGPIPE);
  }
  fail("standard output: cannot write: ", errno ? std::strerror(errno) : "an earlier write failed",
       ": free space, or print elsewhere");
}
