/* Sees every file operation of a process below one folder: counts it, records it, kills the process
 * before it, or lets it fail. Loaded with LD_PRELOAD, so that Python, C++ and Rust go through it.
 *
 * One lock is held over an operation and its record: the log has the order in which things happened.
 * What goes round libc is not seen; the caller compares a full replay with the real folder.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SPACE = 1, SYNC = 2, NAMES = 4 }; /* what an operation can fail for */

static char root[PATH_MAX];
static size_t root_length;
static int armed, log_to = -1, fail_kinds, fail_with, fail_once;
static long count, kill_at = -1, fail_at = -1, failed;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

struct header {
  uint32_t op, path, other;
  uint64_t offset, data;
};

#define REAL(type, name, ...)                    \
  static type (*real)(__VA_ARGS__);              \
  if (!real) real = dlsym(RTLD_NEXT, name)

static ssize_t put(const void *from, size_t n) {
  REAL(ssize_t, "write", int, const void *, size_t);
  const char *at = from;
  while (n > 0) {
    ssize_t done = real(log_to, at, n);
    if (done <= 0) abort(); /* a record with a hole would prove nothing */
    at += done;
    n -= done;
  }
  return 0;
}

static void record(char op, const char *path, const char *other, uint64_t offset, const void *data,
                   uint64_t size) {
  if (log_to < 0) return;
  int saved = errno;
  struct header h = {op, strlen(path), other ? strlen(other) : 0, offset, size};
  put(&h, sizeof h);
  put(path, h.path);
  if (other) put(other, h.other);
  if (size) put(data, size);
  errno = saved;
}

static int below(const char *path) {
  return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* The absolute path of a name, as it is now. */
static int place(int folder, const char *name, char *path) {
  if (name[0] == '/') {
    snprintf(path, PATH_MAX, "%s", name);
  } else {
    char start[PATH_MAX];
    if (folder == AT_FDCWD) {
      if (!getcwd(start, sizeof start)) return 0;
    } else {
      char link[64];
      snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
      ssize_t n = readlink(link, start, sizeof start - 1);
      if (n < 0) return 0;
      start[n] = 0;
    }
    snprintf(path, PATH_MAX, "%.2000s/%.2000s", start, name);
  }
  size_t n = strlen(path);
  while (n > 1 && path[n - 1] == '/') path[--n] = 0;
  return below(path);
}

static int opened(int fd, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, PATH_MAX - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return below(path);
}

/* Says which file it is, whatever its name: some renames go round libc. */
static uint64_t identity(int fd) {
  struct stat s;
  return fstat(fd, &s) || !S_ISREG(s.st_mode) ? 0 : s.st_ino;
}

/* One more operation; non-zero when it is to fail. */
static int reached(int kinds) {
  count++;
  if (count == kill_at) kill(getpid(), SIGKILL);
  if (fail_at >= 0 && count >= fail_at && (kinds & fail_kinds) && !(fail_once && failed)) {
    failed++;
    errno = fail_with;
    return 1;
  }
  return 0;
}

static int watching(void) { return __atomic_load_n(&armed, __ATOMIC_RELAXED); }

#define DONE                        \
  do {                              \
    int saved = errno;              \
    pthread_mutex_unlock(&lock);    \
    errno = saved;                  \
    return result;                  \
  } while (0)

void trace_arm(const char *folder, int log, long kill_before, long fail_from, int kinds, int with,
               int once) {
  pthread_mutex_lock(&lock);
  snprintf(root, sizeof root, "%s", folder);
  root_length = strlen(root);
  log_to = log;
  kill_at = kill_before;
  fail_at = fail_from;
  fail_kinds = kinds;
  fail_with = with;
  fail_once = once;
  count = failed = 0;
  armed = 1;
  pthread_mutex_unlock(&lock);
}

long trace_disarm(void) {
  armed = 0;
  return count;
}

long trace_failed(void) { return failed; }

void trace_note(const char *text) {
  pthread_mutex_lock(&lock);
  record('n', text, NULL, 0, NULL, 0);
  pthread_mutex_unlock(&lock);
}

/* ---- opening ---------------------------------------------------------------------------------- */

static int open_any(int folder, const char *name, int flags, mode_t mode) {
  REAL(int, "openat", int, const char *, int, ...);
  char path[PATH_MAX];
  int changes = flags & (O_CREAT | O_TRUNC);
  if (!watching() || !changes || !place(folder, name, path)) return real(folder, name, flags, mode);
  pthread_mutex_lock(&lock);
  struct stat before;
  int there = !stat(path, &before);
  int result = -1;
  if (reached(there ? 0 : SPACE | NAMES)) {
  } else {
    result = real(folder, name, flags, mode);
    if (result >= 0 && !there) record('c', path, NULL, identity(result), NULL, 0);
    if (result >= 0 && there && (flags & O_TRUNC)) record('t', path, NULL, 0, NULL, 0);
  }
  DONE;
}

#define MODE                             \
  mode_t mode = 0;                       \
  if (flags & (O_CREAT | O_TMPFILE)) {   \
    va_list list;                        \
    va_start(list, flags);               \
    mode = va_arg(list, int);            \
    va_end(list);                        \
  }

int open(const char *n, int flags, ...) { MODE return open_any(AT_FDCWD, n, flags, mode); }
int open64(const char *n, int flags, ...) { MODE return open_any(AT_FDCWD, n, flags, mode); }
int openat(int d, const char *n, int flags, ...) { MODE return open_any(d, n, flags, mode); }
int openat64(int d, const char *n, int flags, ...) { MODE return open_any(d, n, flags, mode); }
int creat(const char *n, mode_t m) {
  return open_any(AT_FDCWD, n, O_CREAT | O_WRONLY | O_TRUNC, m);
}
int creat64(const char *n, mode_t m) { return creat(n, m); }

/* ---- content ---------------------------------------------------------------------------------- */

static off_t standing(int fd) {
  struct stat s;
  if ((fcntl(fd, F_GETFL) & O_APPEND) && !fstat(fd, &s)) return s.st_size;
  return lseek(fd, 0, SEEK_CUR);
}

/* A disk that fills up takes a part first. */
static size_t fitting(size_t n) {
  return fail_at >= 0 && count + 1 == fail_at && (fail_kinds & SPACE) && !fail_once && n > 1 ? n / 2
                                                                                             : n;
}

ssize_t write(int fd, const void *data, size_t n) {
  REAL(ssize_t, "write", int, const void *, size_t);
  char path[PATH_MAX];
  if (!watching() || fd == log_to || !opened(fd, path)) return real(fd, data, n);
  pthread_mutex_lock(&lock);
  off_t at = standing(fd);
  n = fitting(n);
  ssize_t result = reached(SPACE) ? -1 : real(fd, data, n);
  if (result > 0) record('w', path, NULL, at, data, result);
  DONE;
}

static ssize_t pwrite_any(int fd, const void *data, size_t n, off_t at) {
  REAL(ssize_t, "pwrite64", int, const void *, size_t, off_t);
  char path[PATH_MAX];
  if (!watching() || !opened(fd, path)) return real(fd, data, n, at);
  pthread_mutex_lock(&lock);
  n = fitting(n);
  ssize_t result = reached(SPACE) ? -1 : real(fd, data, n, at);
  if (result > 0) record('w', path, NULL, at, data, result);
  DONE;
}
ssize_t pwrite(int fd, const void *d, size_t n, off_t at) { return pwrite_any(fd, d, n, at); }
ssize_t pwrite64(int fd, const void *d, size_t n, off_t at) { return pwrite_any(fd, d, n, at); }

ssize_t writev(int fd, const struct iovec *parts, int n) {
  REAL(ssize_t, "writev", int, const struct iovec *, int);
  char path[PATH_MAX];
  if (!watching() || !opened(fd, path)) return real(fd, parts, n);
  pthread_mutex_lock(&lock);
  off_t at = standing(fd);
  ssize_t result = reached(SPACE) ? -1 : real(fd, parts, n), left = result;
  for (int i = 0; i < n && left > 0; i++) {
    size_t piece = parts[i].iov_len < (size_t)left ? parts[i].iov_len : (size_t)left;
    record('w', path, NULL, at, parts[i].iov_base, piece);
    at += piece;
    left -= piece;
  }
  DONE;
}

/* Records what the file now holds there: the bytes came from elsewhere. */
static void reread(int fd, const char *path, off_t at, size_t n) {
  char *copy = malloc(n ? n : 1);
  size_t done = 0;
  while (done < n) {
    ssize_t got = pread(fd, copy + done, n - done, at + done);
    if (got <= 0) abort();
    done += got;
  }
  record('w', path, NULL, at, copy, n);
  free(copy);
}

ssize_t copy_file_range(int from, off_t *off_from, int to, off_t *off_to, size_t n, unsigned flags) {
  REAL(ssize_t, "copy_file_range", int, off_t *, int, off_t *, size_t, unsigned);
  char path[PATH_MAX], name[64];
  if (!watching() || !opened(to, path)) return real(from, off_from, to, off_to, n, flags);
  pthread_mutex_lock(&lock);
  off_t at = off_to ? *off_to : standing(to);
  n = fitting(n);
  ssize_t result = reached(SPACE) ? -1 : real(from, off_from, to, off_to, n, flags);
  if (result > 0 && log_to >= 0) {
    snprintf(name, sizeof name, "/proc/self/fd/%d", to); /* `to` may be write-only */
    int again = open(name, O_RDONLY);
    reread(again, path, at, result);
    close(again);
  }
  DONE;
}

ssize_t sendfile(int to, int from, off_t *offset, size_t n) {
  REAL(ssize_t, "sendfile", int, int, off_t *, size_t);
  char path[PATH_MAX], name[64];
  if (!watching() || !opened(to, path)) return real(to, from, offset, n);
  pthread_mutex_lock(&lock);
  off_t at = standing(to);
  ssize_t result = reached(SPACE) ? -1 : real(to, from, offset, n);
  if (result > 0 && log_to >= 0) {
    snprintf(name, sizeof name, "/proc/self/fd/%d", to);
    int again = open(name, O_RDONLY);
    reread(again, path, at, result);
    close(again);
  }
  DONE;
}
ssize_t sendfile64(int to, int from, off_t *offset, size_t n) {
  return sendfile(to, from, offset, n);
}

static int resize(int fd, off_t size, int grow_only) {
  REAL(int, "ftruncate64", int, off_t);
  char path[PATH_MAX];
  if (!watching() || !opened(fd, path)) return real(fd, size);
  pthread_mutex_lock(&lock);
  struct stat s;
  fstat(fd, &s);
  int result = reached(size > s.st_size ? SPACE : 0) ? -1 : 0;
  if (!result && !(grow_only && size <= s.st_size)) {
    result = real(fd, size);
    if (!result) record('t', path, NULL, size, NULL, 0);
  }
  DONE;
}
int ftruncate(int fd, off_t size) { return resize(fd, size, 0); }
int ftruncate64(int fd, off_t size) { return resize(fd, size, 0); }

/* Reserving space is growing here: the caller wants the size, and the error when it is not there. */
static int reserve(int fd, off_t at, off_t n, int *failure) {
  *failure = 0;
  if (resize(fd, at + n, 1)) *failure = errno;
  return *failure;
}
int posix_fallocate(int fd, off_t at, off_t n) {
  REAL(int, "posix_fallocate", int, off_t, off_t);
  char path[PATH_MAX];
  int failure;
  if (!watching() || !opened(fd, path)) return real(fd, at, n);
  return reserve(fd, at, n, &failure);
}
int posix_fallocate64(int fd, off_t at, off_t n) { return posix_fallocate(fd, at, n); }
int fallocate(int fd, int mode, off_t at, off_t n) {
  REAL(int, "fallocate", int, int, off_t, off_t);
  char path[PATH_MAX];
  int failure;
  if (!watching() || mode || !opened(fd, path)) return real(fd, mode, at, n);
  return reserve(fd, at, n, &failure) ? (errno = failure, -1) : 0;
}
int fallocate64(int fd, int mode, off_t at, off_t n) { return fallocate(fd, mode, at, n); }

/* Bytes stored through a shared mapping are taken from the file when the mapping ends. */
static struct {
  void *at;
  size_t size;
  int fd;
} maps[64];

static void *map_any(void *at, size_t n, int prot, int flags, int fd, off_t from) {
  REAL(void *, "mmap64", void *, size_t, int, int, int, off_t);
  void *result = real(at, n, prot, flags, fd, from);
  char path[PATH_MAX];
  if (!watching() || fd < 0 || result == MAP_FAILED || !(flags & MAP_SHARED) ||
      !(prot & PROT_WRITE) || !opened(fd, path))
    return result;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 64; i++)
    if (!maps[i].at) {
      char name[64];
      snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
      maps[i].fd = open(name, O_RDONLY | O_CLOEXEC);
      maps[i].at = result;
      maps[i].size = n;
      break;
    }
  pthread_mutex_unlock(&lock);
  return result;
}
void *mmap(void *a, size_t n, int p, int f, int fd, off_t o) { return map_any(a, n, p, f, fd, o); }
void *mmap64(void *a, size_t n, int p, int f, int fd, off_t o) {
  return map_any(a, n, p, f, fd, o);
}

int munmap(void *at, size_t n) {
  REAL(int, "munmap", void *, size_t);
  if (watching()) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 64; i++)
      if (maps[i].at == at) {
        char path[PATH_MAX];
        struct stat s;
        reached(0);
        if (opened(maps[i].fd, path) && !fstat(maps[i].fd, &s) && s.st_size)
          reread(maps[i].fd, path, 0, s.st_size);
        close(maps[i].fd);
        maps[i].at = NULL;
      }
    pthread_mutex_unlock(&lock);
  }
  return real(at, n);
}

/* ---- durability ------------------------------------------------------------------------------- */

static int sync_any(int fd, int (*plain_sync)(int)) {
  char path[PATH_MAX];
  if (!watching() || !opened(fd, path)) return plain_sync(fd);
  pthread_mutex_lock(&lock);
  int result = reached(SYNC) ? -1 : plain_sync(fd);
  if (!result) record('f', path, NULL, identity(fd), NULL, 0);
  DONE;
}
int fsync(int fd) {
  REAL(int, "fsync", int);
  return sync_any(fd, real);
}
int fdatasync(int fd) {
  REAL(int, "fdatasync", int);
  return sync_any(fd, real);
}

/* ---- names ------------------------------------------------------------------------------------ */

int renameat(int d1, const char *n1, int d2, const char *n2) {
  REAL(int, "renameat", int, const char *, int, const char *);
  char from[PATH_MAX], to[PATH_MAX];
  if (!watching() || !(place(d1, n1, from) | place(d2, n2, to))) return real(d1, n1, d2, n2);
  pthread_mutex_lock(&lock);
  int result = reached(NAMES) ? -1 : real(d1, n1, d2, n2);
  if (!result) record('r', from, to, 0, NULL, 0);
  DONE;
}
int rename(const char *n1, const char *n2) { return renameat(AT_FDCWD, n1, AT_FDCWD, n2); }
int renameat2(int d1, const char *n1, int d2, const char *n2, unsigned flags) {
  REAL(int, "renameat2", int, const char *, int, const char *, unsigned);
  if (!watching() || (flags & RENAME_EXCHANGE)) return real(d1, n1, d2, n2, flags);
  char to[PATH_MAX];
  struct stat s;
  if ((flags & RENAME_NOREPLACE) && place(d2, n2, to) && !lstat(to, &s)) {
    errno = EEXIST;
    return -1;
  }
  return renameat(d1, n1, d2, n2);
}

int unlinkat(int d, const char *n, int flags) {
  REAL(int, "unlinkat", int, const char *, int);
  char path[PATH_MAX];
  if (!watching() || !place(d, n, path)) return real(d, n, flags);
  pthread_mutex_lock(&lock);
  int result = reached(NAMES) ? -1 : real(d, n, flags);
  if (!result) record(flags & AT_REMOVEDIR ? 'd' : 'u', path, NULL, 0, NULL, 0);
  DONE;
}
int unlink(const char *n) { return unlinkat(AT_FDCWD, n, 0); }
int rmdir(const char *n) { return unlinkat(AT_FDCWD, n, AT_REMOVEDIR); }
int remove(const char *n) {
  struct stat s;
  return unlinkat(AT_FDCWD, n, !lstat(n, &s) && S_ISDIR(s.st_mode) ? AT_REMOVEDIR : 0);
}

int mkdirat(int d, const char *n, mode_t mode) {
  REAL(int, "mkdirat", int, const char *, mode_t);
  char path[PATH_MAX];
  if (!watching() || !place(d, n, path)) return real(d, n, mode);
  pthread_mutex_lock(&lock);
  int result = reached(SPACE | NAMES) ? -1 : real(d, n, mode);
  if (!result) record('m', path, NULL, 0, NULL, 0);
  DONE;
}
int mkdir(const char *n, mode_t mode) { return mkdirat(AT_FDCWD, n, mode); }

/* Some libraries call the kernel through this one. */
long syscall(long number, ...) {
  REAL(long, "syscall", long, ...);
  long a[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
  va_end(list);
  if (watching()) switch (number) {
      case SYS_openat:
        return open_any(a[0], (const char *)a[1], a[2], a[3]);
      case SYS_renameat2:
        return renameat2(a[0], (const char *)a[1], a[2], (const char *)a[3], a[4]);
      case SYS_unlinkat:
        return unlinkat(a[0], (const char *)a[1], a[2]);
      case SYS_mkdirat:
        return mkdirat(a[0], (const char *)a[1], a[2]);
      case SYS_write:
        return write(a[0], (const void *)a[1], a[2]);
      case SYS_ftruncate:
        return resize(a[0], a[1], 0);
      case SYS_fsync:
        return fsync(a[0]);
      case SYS_copy_file_range:
        return copy_file_range(a[0], (off_t *)a[1], a[2], (off_t *)a[3], a[4], a[5]);
    }
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
