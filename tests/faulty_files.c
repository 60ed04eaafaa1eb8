/* Makes the files below some directories, and the wall clock, misbehave: LD_PRELOAD for tests.
 *
 * FAULTY_FILES=/a:/b   the directories
 * FAULTY_CONTROL=FILE  `name value ...`, read at each call, so that a test can change it any time:
 *   delay_ms N   each operation on a name takes this long, as on a busy network file system
 *   estale P     each operation on a name fails with ESTALE with this probability
 *   late_ms N    files that another process made less than N ms ago are not seen yet
 *   readonly 1   every change fails with EROFS
 *   full 1       every write fails with ENOSPC
 *   clock N      the wall clock is N seconds off
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define MAX_OWN 4096
#define MAX_FD 65536

static struct { double delay_ms, estale, late_ms, readonly, full, clock; } now_set;
static unsigned char ours[MAX_FD];          /* descriptors of files below the directories */
static unsigned long own[MAX_OWN];          /* hashes of the names that this process made */
static unsigned long num_own;
static __thread unsigned seed;

static void read_control(void) {
    const char *path = getenv("FAULTY_CONTROL");
    char text[512], name[32];
    double value;
    int used, saved = errno;
    memset(&now_set, 0, sizeof now_set);
    long fd = path ? syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) { errno = saved; return; }
    long size = syscall(SYS_read, fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    text[size > 0 ? size : 0] = 0;
    for (char *at = text; sscanf(at, "%31s %lf%n", name, &value, &used) == 2; at += used) {
        if (!strcmp(name, "delay_ms")) now_set.delay_ms = value;
        else if (!strcmp(name, "estale")) now_set.estale = value;
        else if (!strcmp(name, "late_ms")) now_set.late_ms = value;
        else if (!strcmp(name, "readonly")) now_set.readonly = value;
        else if (!strcmp(name, "full")) now_set.full = value;
        else if (!strcmp(name, "clock")) now_set.clock = value;
    }
    errno = saved;
}

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
    snprintf(buffer, 4096, "%s/%s", base, path);
    return buffer;
}

static int is_below(const char *path) {
    const char *all = getenv("FAULTY_FILES");
    while (all && *all) {
        size_t size = strcspn(all, ":");
        if (size && !strncmp(path, all, size) && (path[size] == '/' || !path[size])) return 1;
        all += size + (all[size] == ':');
    }
    return 0;
}

static unsigned long hash(const char *text) {
    unsigned long value = 5381;
    while (*text) value = value * 33 + (unsigned char)*text++;
    return value;
}

static void made(const char *path) { own[num_own++ % MAX_OWN] = hash(path); }

static int is_own(const char *path) {
    unsigned long value = hash(path);
    for (unsigned long n = 0; n < num_own && n < MAX_OWN; n++) if (own[n] == value) return 1;
    return 0;
}

static void wait_ms(double milliseconds) {
    struct timespec left = {(time_t)(milliseconds / 1e3),
                            (long)((milliseconds - 1e3 * (long)(milliseconds / 1e3)) * 1e6)};
    syscall(SYS_nanosleep, &left, NULL);
}

/* Return an error number for an operation on a name, 0 for none. */
static int faulty(int dir, const char *path, int changes) {
    char buffer[4096];
    const char *full = absolute(dir, path, buffer);
    if (!is_below(full)) return 0;
    read_control();
    if (now_set.delay_ms > 0) wait_ms(now_set.delay_ms);
    if (!seed) seed = (unsigned)syscall(SYS_gettid) * 2654435761u + (unsigned)clock();
    if (now_set.estale > 0 && rand_r(&seed) < now_set.estale * RAND_MAX) return ESTALE;
    if (changes && now_set.readonly > 0) return EROFS;
    if (!changes && now_set.late_ms > 0 && !is_own(full)) {
        struct stat status;
        struct timespec now;
        if (!syscall(SYS_newfstatat, AT_FDCWD, full, &status, 0) && S_ISREG(status.st_mode)) {
            syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
            double age = (now.tv_sec - status.st_ctim.tv_sec) * 1e3
                       + (now.tv_nsec - status.st_ctim.tv_nsec) / 1e6;
            if (age < now_set.late_ms) return ENOENT;
        }
    }
    return 0;
}

#define FAIL_IF(dir, path, changes, result) do { \
    int number = faulty(dir, path, changes); \
    if (number) { errno = number; return result; } \
} while (0)

static int note(int fd, int dir, const char *path, int flags) {
    char buffer[4096];
    const char *full = absolute(dir, path, buffer);
    if (fd >= 0 && fd < MAX_FD) ours[fd] = is_below(full);
    if (fd >= 0 && (flags & O_CREAT) && is_below(full)) made(full);
    return fd;
}

#define CHANGES(flags) (((flags) & O_ACCMODE) != O_RDONLY || ((flags) & O_CREAT))
#define MODE va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more)

int open(const char *path, int flags, ...) {
    MODE; FAIL_IF(AT_FDCWD, path, CHANGES(flags), -1);
    return note(REAL(open)(path, flags, mode), AT_FDCWD, path, flags);
}
int open64(const char *path, int flags, ...) {
    MODE; FAIL_IF(AT_FDCWD, path, CHANGES(flags), -1);
    return note(REAL(open64)(path, flags, mode), AT_FDCWD, path, flags);
}
int openat(int dir, const char *path, int flags, ...) {
    MODE; FAIL_IF(dir, path, CHANGES(flags), -1);
    return note(REAL(openat)(dir, path, flags, mode), dir, path, flags);
}
int openat64(int dir, const char *path, int flags, ...) {
    MODE; FAIL_IF(dir, path, CHANGES(flags), -1);
    return note(REAL(openat64)(dir, path, flags, mode), dir, path, flags);
}
FILE *fopen64(const char *path, const char *mode) {
    FAIL_IF(AT_FDCWD, path, mode[0] != 'r', NULL);
    FILE *file = REAL(fopen64)(path, mode);
    if (file) note(fileno(file), AT_FDCWD, path, mode[0] != 'r' ? O_CREAT : 0);
    return file;
}
FILE *fopen(const char *path, const char *mode) {
    FAIL_IF(AT_FDCWD, path, mode[0] != 'r', NULL);
    FILE *file = REAL(fopen)(path, mode);
    if (file) note(fileno(file), AT_FDCWD, path, mode[0] != 'r' ? O_CREAT : 0);
    return file;
}
int close(int fd) {
    if (fd >= 0 && fd < MAX_FD) ours[fd] = 0;
    return REAL(close)(fd);
}

#define ONE(name, changes) \
    FAIL_IF(AT_FDCWD, path, changes, -1)
int stat(const char *path, struct stat *to) { ONE(stat, 0); return REAL(stat)(path, to); }
int stat64(const char *path, struct stat64 *to) { ONE(stat64, 0); return REAL(stat64)(path, to); }
int lstat(const char *path, struct stat *to) { ONE(lstat, 0); return REAL(lstat)(path, to); }
int lstat64(const char *path, struct stat64 *to) { ONE(lstat64, 0); return REAL(lstat64)(path, to); }
int fstatat(int dir, const char *path, struct stat *to, int flags) {
    FAIL_IF(dir, path, 0, -1); return REAL(fstatat)(dir, path, to, flags);
}
int fstatat64(int dir, const char *path, struct stat64 *to, int flags) {
    FAIL_IF(dir, path, 0, -1); return REAL(fstatat64)(dir, path, to, flags);
}
int access(const char *path, int mode) { ONE(access, 0); return REAL(access)(path, mode); }
DIR *opendir(const char *path) {
    FAIL_IF(AT_FDCWD, path, 0, NULL); return REAL(opendir)(path);
}
int unlink(const char *path) { ONE(unlink, 1); return REAL(unlink)(path); }
int unlinkat(int dir, const char *path, int flags) {
    FAIL_IF(dir, path, 1, -1); return REAL(unlinkat)(dir, path, flags);
}
int rmdir(const char *path) { ONE(rmdir, 1); return REAL(rmdir)(path); }
int mkdir(const char *path, mode_t mode) { ONE(mkdir, 1); return REAL(mkdir)(path, mode); }
int truncate64(const char *path, off64_t size) { ONE(truncate64, 1); return REAL(truncate64)(path, size); }
int utimensat(int dir, const char *path, const struct timespec times[2], int flags) {
    FAIL_IF(dir, path, 1, -1); return REAL(utimensat)(dir, path, times, flags);
}
int link(const char *from, const char *path) { ONE(link, 1); return REAL(link)(from, path); }
int rename(const char *from, const char *path) {
    char buffer[4096];
    ONE(rename, 1);
    int result = REAL(rename)(from, path);
    if (!result) made(absolute(AT_FDCWD, path, buffer));
    return result;
}

static int cannot_write(int fd) {
    if (fd < 0 || fd >= MAX_FD || !ours[fd]) return 0;
    read_control();
    if (now_set.delay_ms > 0) wait_ms(now_set.delay_ms);
    if (now_set.readonly > 0) return EROFS;
    return now_set.full > 0 ? ENOSPC : 0;
}
#define WRITE(result) do { \
    int number = cannot_write(fd); if (number) { errno = number; return result; } } while (0)
ssize_t write(int fd, const void *data, size_t size) { WRITE(-1); return REAL(write)(fd, data, size); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    WRITE(-1); return REAL(pwrite64)(fd, data, size, at);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    WRITE(-1); return REAL(writev)(fd, parts, count);
}
int ftruncate64(int fd, off64_t size) { WRITE(-1); return REAL(ftruncate64)(fd, size); }
int fsync(int fd) { WRITE(-1); return REAL(fsync)(fd); }

int clock_gettime(clockid_t which, struct timespec *to) {
    int result = (int)syscall(SYS_clock_gettime, which, to);
    if (!result && which == CLOCK_REALTIME && getenv("FAULTY_CONTROL")) {
        read_control();
        to->tv_sec += (time_t)now_set.clock;
    }
    return result;
}
int gettimeofday(struct timeval *to, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    to->tv_sec = now.tv_sec;
    to->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
