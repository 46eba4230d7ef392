/* A disk that is full, broken or slow, for the files under one folder. LD_PRELOAD puts it between a program (delta-rs
 * and pyarrow in it) and its C library.
 *
 * DISK_FOLDER  the files that it is about
 * DISK_FAULT   full: after DISK_BYTES no write finds space (ENOSPC)
 *              broken: the writes after DISK_BYTES fail with EIO, DISK_TIMES of them; then the disk works again
 *              slow: every write takes DISK_MS
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long written, failed;

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

static int is_ours(int fd) {
    char link[64], path[4096];
    const char *folder = getenv("DISK_FOLDER");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = folder ? readlink(link, path, sizeof path - 1) : -1;
    if (length < 0) return 0;
    path[length] = 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

/* 0, or what errno is to be. */
static int fault(int fd, size_t count) {
    const char *kind = getenv("DISK_FAULT");
    if (!kind || !is_ours(fd)) return 0;
    if (!strcmp(kind, "slow")) {
        usleep((useconds_t)(1000 * number("DISK_MS", 20)));
        return 0;
    }
    if (atomic_fetch_add(&written, (long)count) + (long)count <= number("DISK_BYTES", 0)) return 0;
    if (!strcmp(kind, "full")) return ENOSPC;
    return atomic_fetch_add(&failed, 1) < number("DISK_TIMES", 1) ? EIO : 0;
}

#define THE_REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *from, size_t count) {
    int problem = fault(fd, count);
    if (problem) return errno = problem, -1;
    return THE_REAL(write)(fd, from, count);
}

ssize_t pwrite64(int fd, const void *from, size_t count, off64_t at) {
    int problem = fault(fd, count);
    if (problem) return errno = problem, -1;
    return THE_REAL(pwrite64)(fd, from, count, at);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    size_t bytes = 0;
    for (int i = 0; i < count; i++) bytes += parts[i].iov_len;
    int problem = fault(fd, bytes);
    if (problem) return errno = problem, -1;
    return THE_REAL(writev)(fd, parts, count);
}
