// Preloaded into train_gpt: what happens to checkpoints on disks that fail. It counts the calls that write, reserve,
// flush or rename files whose path holds "step_". Call number FAIL_AT and the FAIL_COUNT - 1 calls after it fail with
// FAIL_ERRNO, and leave a file FAIL_MARK. Every flush takes SLOW_MS milliseconds longer.
//
// And what happens to data on storage that answers late: every read of a file whose path holds READ_OF takes READ_MS
// milliseconds longer, and adds a byte to the file READ_LOG.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int number_of(const char* name) { return getenv(name) ? atoi(getenv(name)) : 0; }

static int is_of(int descriptor, const char* part) {
  char link[64], path[4096] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  if (!part || readlink(link, path, sizeof path - 1) < 0) return 0;
  return strstr(path, part) != NULL;
}

static int of_checkpoint(int descriptor) { return is_of(descriptor, "step_"); }

// The errno of this call; 0: it goes through.
static int fault(int concerned) {
  static int calls = 0;
  if (!concerned) return 0;
  const int call = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST), first = number_of("FAIL_AT");
  if (first == 0 || call < first || call >= first + number_of("FAIL_COUNT")) return 0;
  close(open(getenv("FAIL_MARK"), O_WRONLY | O_CREAT, 0600));
  return number_of("FAIL_ERRNO");
}

ssize_t pwrite(int descriptor, const void* data, size_t bytes, off_t offset) {
  if ((errno = fault(of_checkpoint(descriptor)))) return -1;
  ssize_t (*real)(int, const void*, size_t, off_t) = dlsym(RTLD_NEXT, "pwrite");
  return real(descriptor, data, bytes, offset);
}

ssize_t pread(int descriptor, void* data, size_t bytes, off_t offset) {
  if (is_of(descriptor, getenv("READ_OF"))) {
    usleep(1000 * (useconds_t)number_of("READ_MS"));
    if (getenv("READ_LOG")) {
      const int log = open(getenv("READ_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0600);
      if (write(log, ".", 1) != 1) abort();
      close(log);
    }
  }
  ssize_t (*real)(int, void*, size_t, off_t) = dlsym(RTLD_NEXT, "pread");
  return real(descriptor, data, bytes, offset);
}

int fallocate(int descriptor, int mode, off_t offset, off_t bytes) {
  if ((errno = fault(of_checkpoint(descriptor)))) return -1;
  int (*real)(int, int, off_t, off_t) = dlsym(RTLD_NEXT, "fallocate");
  return real(descriptor, mode, offset, bytes);
}

int fsync(int descriptor) {
  if (of_checkpoint(descriptor)) usleep(1000 * (useconds_t)number_of("SLOW_MS"));
  if ((errno = fault(of_checkpoint(descriptor)))) return -1;
  int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
  return real(descriptor);
}

int rename(const char* from, const char* to) {
  const int may_fail = number_of("FAIL_ERRNO") != EINTR;  // no signal interrupts a rename
  if ((errno = fault(may_fail && strstr(from, "step_") != NULL))) return -1;
  int (*real)(const char*, const char*) = dlsym(RTLD_NEXT, "rename");
  return real(from, to);
}
