/* Preloaded before the C library: opening files whose path contains FAULT_PATH fails with the error number FAULT_ERRNO, for
 * the first FAULT_COUNT times; with FAULT_FLOCK set, every lock is granted and means nothing. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

static int seen;

static int fails(const char *path) {
  const char *part = getenv("FAULT_PATH"), *count = getenv("FAULT_COUNT"), *number = getenv("FAULT_ERRNO");
  if (!part || !count || !number || !strstr(path, part) || seen >= atoi(count)) return 0;
  seen++;
  errno = atoi(number);
  return 1;
}

#define OPEN(name)                                                       \
  int name(const char *path, int flags, ...) {                           \
    va_list rest;                                                        \
    va_start(rest, flags);                                               \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                                        \
    if (fails(path)) return -1;                                          \
    int (*next)(const char *, int, mode_t) = dlsym(RTLD_NEXT, #name);    \
    return next(path, flags, mode);                                      \
  }

OPEN(open)
OPEN(open64)

int flock(int descriptor, int operation) {
  if (getenv("FAULT_FLOCK")) return 0;
  int (*next)(int, int) = dlsym(RTLD_NEXT, "flock");
  return next(descriptor, operation);
}
