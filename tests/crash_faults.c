/* Preloaded into a process under test: the Nth call that changes the file system fails with a
 * chosen error, or the process dies there by SIGKILL, before or after the call.
 * arm(n, error): error > 0 fails call n with it (and all later ones), 0 kills before call n,
 * -1 kills after it. Only calls on paths or descriptors below the prefix given to watch() count. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static char prefix[PATH_MAX];
static long armed, seen;
static int failure;

void watch(const char *path) { snprintf(prefix, sizeof prefix, "%s", path); }
void arm(long n, int error) { armed = n; failure = error; __atomic_store_n(&seen, 0, __ATOMIC_SEQ_CST); }
long calls(void) { return __atomic_load_n(&seen, __ATOMIC_SEQ_CST); }

static int below(const char *path) { return prefix[0] && path && !strncmp(path, prefix, strlen(prefix)); }

static int below_descriptor(int fd) {
    char link[64], path[PATH_MAX];
    int kept = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    errno = kept;
    if (n < 0) return 0;
    path[n] = 0;
    return below(path);
}

/* 0: go on; 1: go on, then die; -1: fail now. */
static int hit(void) {
    long now = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
    if (!armed || now < armed) return 0;
    if (failure > 0) { errno = failure; return -1; }
    if (failure == 0) kill(getpid(), SIGKILL);
    return now == armed;
}

#define REAL(name) static typeof(name) *real; if (!real) real = (typeof(real))dlsym(RTLD_NEXT, #name)
#define GUARD(is_ours, call) do { int h = (is_ours) ? hit() : 0; if (h < 0) return -1; \
    typeof(call) r = (call); if (h > 0) kill(getpid(), SIGKILL); return r; } while (0)

ssize_t write(int fd, const void *b, size_t n) { REAL(write); GUARD(below_descriptor(fd), real(fd, b, n)); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) { REAL(pwrite64); GUARD(below_descriptor(fd), real(fd, b, n, o)); }
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) { REAL(pwrite); GUARD(below_descriptor(fd), real(fd, b, n, o)); }
int ftruncate64(int fd, off64_t n) { REAL(ftruncate64); GUARD(below_descriptor(fd), real(fd, n)); }
int ftruncate(int fd, off_t n) { REAL(ftruncate); GUARD(below_descriptor(fd), real(fd, n)); }
int fsync(int fd) { REAL(fsync); GUARD(below_descriptor(fd), real(fd)); }
int rename(const char *a, const char *b) { REAL(rename); GUARD(below(b), real(a, b)); }
int symlink(const char *t, const char *l) { REAL(symlink); GUARD(below(l), real(t, l)); }
int mkdir(const char *p, mode_t m) { REAL(mkdir); GUARD(below(p), real(p, m)); }
int unlink(const char *p) { REAL(unlink); GUARD(failure <= 0 && below(p), real(p)); }
int rmdir(const char *p) { REAL(rmdir); GUARD(failure <= 0 && below(p), real(p)); }
int unlinkat(int d, const char *p, int f) { REAL(unlinkat); GUARD(failure <= 0 && (below(p) || below_descriptor(d)), real(d, p, f)); }

int open64(const char *p, int flags, ...) {
    mode_t mode = 0;
    if (flags & O_CREAT) { va_list a; va_start(a, flags); mode = va_arg(a, mode_t); va_end(a); }
    REAL(open64);
    GUARD((flags & O_CREAT) && below(p), real(p, flags, mode));
}
int open(const char *p, int flags, ...) {
    mode_t mode = 0;
    if (flags & O_CREAT) { va_list a; va_start(a, flags); mode = va_arg(a, mode_t); va_end(a); }
    REAL(open);
    GUARD((flags & O_CREAT) && below(p), real(p, flags, mode));
}
