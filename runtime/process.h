// What the program asks of its own process before it does anything else.
#pragma once

#include <csignal>

#include <fcntl.h>
#include <unistd.h>

// A terminal, or whoever else reads what is printed, may go away: that is no reason to stop. A file that may not grow is
// an error of write(), which says what and where. And no file that is opened later gets the number of a standard stream
// that was closed, or lines for the terminal would end up in it.
inline void prepare_process() {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  int descriptor = open("/dev/null", O_RDWR);
  while (descriptor >= 0 && descriptor <= STDERR_FILENO) descriptor = open("/dev/null", O_RDWR);
  close(descriptor);
}
