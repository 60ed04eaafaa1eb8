/* Records the operations on files below a directory: LD_PRELOAD for the processes of a test.
 *
 * RECORDED_FILES=/a    the directory
 * RECORDED_LOG=FILE    a record for each operation that succeeded, in the order in which they did,
 *                      over all threads and processes: struct head, then path, other and data
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
struct head { uint8_t kind; uint64_t offset; uint32_t path, other; uint64_t data; }
    __attribute__((packed));

static const char *absolute(int dir, const char *path, char *buffer) {
    char link[64], base[4000];
    if (path == NULL) return "";
    if (path[0] == '/') return path;
    if (dir == AT_FDCWD) {
        if (syscall(SYS_getcwd, base, sizeof base) < 0) return path;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        long size = syscall(SYS_readlinkat, AT_FDCWD, link, base, sizeof base - 1);
        if (size < 0) return path;
        base[size] = 0;
    }
    snprintf(buffer, 8192, "%s/%s", base, path);
    return buffer;
}

static int is_below(const char *path) {
    const char *directory = getenv("RECORDED_FILES");
    size_t size = directory ? strlen(directory) : 0;
    return size && !strncmp(path, directory, size) && (path[size] == '/' || !path[size]);
}

static int path_of(int fd, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long size = syscall(SYS_readlinkat, AT_FDCWD, link, buffer, 8191);
    if (size <= 0) return 0;
    buffer[size] = 0;
    return is_below(buffer);
}

/* An operation and its record are one, for all threads and processes: a lock on the log, which each
 * operation opens for itself, so that threads exclude each other. */
static int begin(void) {
    int saved = errno;
    int log = (int)syscall(SYS_openat, AT_FDCWD, getenv("RECORDED_LOG"),
                           O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (log >= 0) syscall(SYS_flock, log, LOCK_EX);
    errno = saved;
    return log;
}
static void end(int log) {
    int saved = errno;
    if (log >= 0) { syscall(SYS_flock, log, LOCK_UN); syscall(SYS_close, log); }
    errno = saved;
}
static void put(int log, const void *data, size_t size) {
    for (const char *at = data; size;) {
        long written = syscall(SYS_write, log, at, size);
        if (written <= 0) abort();
        at += written; size -= (size_t)written;
    }
}
static void record(int log, char kind, const char *path, const char *other, uint64_t offset,
                   const void *data, size_t size) {
    int saved = errno;
    struct head head = {(uint8_t)kind, offset, (uint32_t)strlen(path), (uint32_t)strlen(other), size};
    put(log, &head, sizeof head);
    put(log, path, head.path);
    put(log, other, head.other);
    put(log, data, size);
    errno = saved;
}

#define MODE va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more)
static int opened(int dir, const char *path, int flags, mode_t mode) {
    char buffer[8192];
    const char *full = absolute(dir, path, buffer);
    int changes = (flags & (O_CREAT | O_TRUNC)) && is_below(full);
    if (!changes) return (int)syscall(SYS_openat, dir, path, flags, mode);
    int log = begin();
    int existed = !syscall(SYS_faccessat, AT_FDCWD, full, F_OK, 0);
    int fd = (int)syscall(SYS_openat, dir, path, flags, mode);
    if (fd >= 0 && !existed) record(log, 'c', full, "", 0, "", 0);
    else if (fd >= 0 && (flags & O_TRUNC)) record(log, 't', full, "", 0, "", 0);
    end(log);
    return fd;
}
int open(const char *path, int flags, ...) { MODE; return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE; return opened(AT_FDCWD, path, flags, mode); }
int openat(int dir, const char *path, int flags, ...) { MODE; return opened(dir, path, flags, mode); }
int openat64(int dir, const char *path, int flags, ...) { MODE; return opened(dir, path, flags, mode); }

/* What the C library buffers itself is not seen: such a file makes the recording invalid. */
static void buffered(const char *path, const char *mode) {
    char buffer[8192];
    const char *full = absolute(AT_FDCWD, path, buffer);
    if (mode[0] == 'r' && !strchr(mode, '+')) return;
    if (is_below(full)) { int log = begin(); record(log, 'x', full, "", 0, "", 0); end(log); }
}
FILE *fopen(const char *path, const char *mode) { buffered(path, mode); return REAL(fopen)(path, mode); }
FILE *fopen64(const char *path, const char *mode) { buffered(path, mode); return REAL(fopen64)(path, mode); }

#define OF_FILE(call, kind, at, data, size) \
    char path[8192]; \
    if (!path_of(fd, path)) return call; \
    int log = begin(); \
    __typeof__(call) result = call; \
    if (result >= 0) record(log, kind, path, "", at, data, size); \
    end(log); \
    return result;
#define BEFORE(count) ((uint64_t)(lseek64(fd, 0, SEEK_CUR) - (count)))
ssize_t write(int fd, const void *data, size_t size) {
    OF_FILE(REAL(write)(fd, data, size), 'w', BEFORE(result), data, (size_t)result)
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    OF_FILE(REAL(pwrite64)(fd, data, size, at), 'w', (uint64_t)at, data, (size_t)result)
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    OF_FILE(REAL(pwrite64)(fd, data, size, at), 'w', (uint64_t)at, data, (size_t)result)
}
int ftruncate64(int fd, off64_t size) { OF_FILE(REAL(ftruncate64)(fd, size), 't', (uint64_t)size, "", 0) }
int ftruncate(int fd, off_t size) { OF_FILE(REAL(ftruncate64)(fd, size), 't', (uint64_t)size, "", 0) }
int fsync(int fd) { OF_FILE(REAL(fsync)(fd), 's', 0, "", 0) }
int fdatasync(int fd) { OF_FILE(REAL(fdatasync)(fd), 's', 0, "", 0) }

/* Copies inside the kernel: the program gets an error that makes it read and write instead. */
#define REFUSE_COPY(fd, call) \
    char path[8192]; if (!path_of(fd, path)) return call; errno = EINVAL; return -1
ssize_t sendfile64(int fd, int in, off64_t *at, size_t size) { REFUSE_COPY(fd, REAL(sendfile64)(fd, in, at, size)); }
ssize_t sendfile(int fd, int in, off_t *at, size_t size) { REFUSE_COPY(fd, REAL(sendfile64)(fd, in, at, size)); }
ssize_t copy_file_range(int in, off64_t *from, int fd, off64_t *to, size_t size, unsigned flags) {
    REFUSE_COPY(fd, REAL(copy_file_range)(in, from, fd, to, size, flags));
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    char path[8192];
    if (!path_of(fd, path) || !count) return REAL(writev)(fd, parts, count);
    return write(fd, parts[0].iov_base, parts[0].iov_len); /* a partial write */
}

#define OF_NAME(call, kind, dir, path, other) \
    char buffer[8192]; \
    const char *full = absolute(dir, path, buffer); \
    if (!is_below(full)) return call; \
    int log = begin(); \
    int result = call; \
    if (!result) record(log, kind, full, other, 0, "", 0); \
    end(log); \
    return result;
int unlink(const char *path) { OF_NAME(REAL(unlink)(path), 'u', AT_FDCWD, path, "") }
int remove(const char *path) { OF_NAME(REAL(remove)(path), 'u', AT_FDCWD, path, "") }
int unlinkat(int dir, const char *path, int flags) { OF_NAME(REAL(unlinkat)(dir, path, flags), 'u', dir, path, "") }
int rmdir(const char *path) { OF_NAME(REAL(rmdir)(path), 'u', AT_FDCWD, path, "") }
int mkdir(const char *path, mode_t mode) { OF_NAME(REAL(mkdir)(path, mode), 'm', AT_FDCWD, path, "") }
int mkdirat(int dir, const char *path, mode_t mode) { OF_NAME(REAL(mkdirat)(dir, path, mode), 'm', dir, path, "") }
int symlink(const char *to, const char *path) { OF_NAME(REAL(symlink)(to, path), 'y', AT_FDCWD, path, to) }
int truncate64(const char *path, off64_t size) { OF_NAME(REAL(truncate64)(path, size), 'x', AT_FDCWD, path, "") }

static int renamed(char kind, int from_dir, const char *from, int dir, const char *path) {
    char buffer[8192], second[8192];
    const char *old = absolute(from_dir, from, buffer), *new = absolute(dir, path, second);
    int log = is_below(old) || is_below(new) ? begin() : -2;
    int result = (int)(kind == 'r' ? syscall(SYS_renameat2, from_dir, from, dir, path, 0)
                                   : syscall(SYS_linkat, from_dir, from, dir, path, 0));
    if (log != -2 && !result) record(log, kind, old, new, 0, "", 0);
    if (log != -2) end(log);
    return result;
}
int rename(const char *from, const char *to) { return renamed('r', AT_FDCWD, from, AT_FDCWD, to); }
int renameat(int dir, const char *from, int other, const char *to) { return renamed('r', dir, from, other, to); }
int link(const char *from, const char *to) { return renamed('l', AT_FDCWD, from, AT_FDCWD, to); }
int linkat(int dir, const char *from, int other, const char *to, int flags) { (void)flags; return renamed('l', dir, from, other, to); }
