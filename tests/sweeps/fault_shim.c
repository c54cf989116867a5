/* Preloaded before libc: counts the calls that touch files below a folder, and does harm at the k-th.
 *
 * Python and SQLite reach files through libc alone, so both are under it. Modes:
 *   1 SIGKILL on entry                     3 the call fails with an errno
 *   2 half of a write, then SIGKILL        4 this and every later call that needs room fails with it
 *   5 power loss: what no fsync of the file (of the folder, for names) has made last is undone, then SIGKILL
 *   6 the same of a random part of the writes, and of the last few names
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { KILL = 1, TORN, FAILS, FULL, POWER, PART };
enum { LASTS, DATA, CREATED, MOVED, REMOVED, MADE };

struct change { /* that a power loss may undo */
    int kind, fd;
    ino_t file;
    off_t at, size;                             /* of DATA: where, and the file's size before */
    size_t num_old;
    char *old;
    char path[512], from[512], kept[544];       /* kept: what was at `path` before */
    struct change *before;
};

static char root[512];
static long left;
static int mode, failure, hit, num_kept;
static struct change *last;

void fault_arm(const char *folder, long k, int how, int error) {
    strncpy(root, folder, sizeof root - 1);
    left = k, mode = how, failure = error, hit = 0, last = NULL;
    srand((unsigned)k);
}
int fault_hit(void) { return hit; }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int below(const char *path) {
    size_t length = strlen(root);
    return length && path && strncmp(path, root, length) == 0 && (path[length] == '/' || !path[length]);
}

static int path_of(int fd, char *path, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, size - 1);
    if (length >= 0) path[length] = 0;
    return length >= 0;
}

static int below_fd(int fd) {
    char path[4096];
    return root[0] && path_of(fd, path, sizeof path) && below(path);
}

static struct change *noted(int kind, const char *path) {
    struct change *c = calloc(1, sizeof *c);
    c->kind = kind, c->before = last, last = c;
    if (path) strncpy(c->path, path, sizeof c->path - 1);
    return c;
}

/* Before a file changes in [at, at + n): keep what is there. */
static void note_data(int fd, off_t at, size_t n) {
    struct stat s;
    char link[64];
    if (mode < POWER || fstat(fd, &s) || !S_ISREG(s.st_mode)) return;
    struct change *c = noted(DATA, NULL);
    c->fd = dup(fd), c->file = s.st_ino, c->at = at, c->size = s.st_size;
    c->num_old = at >= s.st_size ? 0 : n < (size_t)(s.st_size - at) ? n : (size_t)(s.st_size - at);
    c->old = malloc(c->num_old + 1);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int reader = REAL(open)(link, O_RDONLY);
    if (pread(reader, c->old, c->num_old, at) != (ssize_t)c->num_old) abort();
    close(reader);
}

/* Before a name is replaced or removed: keep the file it stands for. */
static struct change *note_name(int kind, const char *path, const char *from) {
    if (mode < POWER) return NULL;
    struct change *c = noted(kind, path);
    if (from) strncpy(c->from, from, sizeof c->from - 1);
    snprintf(c->kept, sizeof c->kept, "%s-kept-%d", root, num_kept++);
    if (kind == MADE || kind == CREATED || link(path, c->kept)) {
        if (kind != MADE) c->kept[0] = 0;
    }
    return c;
}

/* After a sync: of a file, its data last; of a folder, the names in it. */
static void note_sync(int fd) {
    struct stat s;
    char path[4096];
    if (!last || fstat(fd, &s) || !path_of(fd, path, sizeof path)) return;
    for (struct change *c = last; c; c = c->before) {
        if (c->kind == DATA && c->file == s.st_ino) c->kind = LASTS, close(c->fd);
        char *name = strrchr(c->path, '/');
        if (c->kind > DATA && S_ISDIR(s.st_mode) && name && (size_t)(name - c->path) == strlen(path)
            && strncmp(c->path, path, strlen(path)) == 0) c->kind = LASTS;
    }
}

static void undo(struct change *c) {
    if (c->kind == DATA) {
        if (REAL(pwrite)(c->fd, c->old, c->num_old, c->at) < 0 || REAL(ftruncate)(c->fd, c->size)) abort();
    } else if (c->kind == CREATED) {
        REAL(unlink)(c->path);
    } else if (c->kind == MADE) {
        REAL(rename)(c->path, c->kept);
    } else {
        if (c->kind == MOVED) REAL(rename)(c->path, c->from);
        if (c->kept[0]) REAL(rename)(c->kept, c->path);
    }
}

static void lose_power(void) {
    int num_names = 0;
    for (struct change *c = last; c; c = c->before) num_names += c->kind > DATA;
    int lost_names = mode == POWER ? num_names : rand() % (num_names + 1); /* names go in order, data in any */
    for (struct change *c = last; c; c = c->before) {
        if (c->kind == DATA && (mode == POWER || rand() & 1)) undo(c);
        if (c->kind > DATA && lost_names-- > 0) undo(c);
    }
}

/* Whether this call is to fail (2: after half of it, and die); may not return. */
static int harm(int ours, int needs_room) {
    if (!ours || !mode) return 0;
    left--;
    if (left > 0 || (left < 0 && !(mode == FULL && needs_room))) return 0;
    hit = 1;
    if (mode >= POWER) lose_power();
    if (mode == KILL || mode >= POWER) raise(SIGKILL);
    if (mode == TORN) return 2;
    errno = failure;
    return 1;
}

#define WRITER(name, AT, PARAMS, ARGS, HALF)                            \
    ssize_t name PARAMS {                                               \
        int ours = below_fd(fd), what = harm(ours, 1);                  \
        if (what == 2) { (void)!REAL(name) HALF; raise(SIGKILL); }      \
        if (ours && !what) note_data(fd, AT, n);                        \
        return what ? -1 : REAL(name) ARGS;                             \
    }
WRITER(write, lseek(fd, 0, SEEK_CUR), (int fd, const void *data, size_t n), (fd, data, n), (fd, data, n / 2))
WRITER(pwrite, at, (int fd, const void *data, size_t n, off_t at), (fd, data, n, at), (fd, data, n / 2, at))
WRITER(pwrite64, at, (int fd, const void *data, size_t n, off64_t at), (fd, data, n, at), (fd, data, n / 2, at))

#define CALL(name, OURS, ROOM, BEFORE, AFTER, PARAMS, ARGS)             \
    int name PARAMS {                                                   \
        int ours = OURS, what = harm(ours, ROOM);                       \
        if (what == 2) raise(SIGKILL);                                  \
        if (what) return -1;                                            \
        if (ours) { BEFORE; }                                           \
        int done = REAL(name) ARGS;                                     \
        if (done >= 0) { AFTER; }                                       \
        return done;                                                    \
    }
CALL(fsync, below_fd(fd), 1, , note_sync(fd), (int fd), (fd))
CALL(fdatasync, below_fd(fd), 1, , note_sync(fd), (int fd), (fd))
CALL(ftruncate, below_fd(fd), 0, note_data(fd, size, SIZE_MAX), , (int fd, off_t size), (fd, size))
CALL(ftruncate64, below_fd(fd), 0, note_data(fd, size, SIZE_MAX), , (int fd, off64_t size), (fd, size))
CALL(rename, below(to), 1, note_name(MOVED, to, from), , (const char *from, const char *to), (from, to))
CALL(unlink, below(path), 0, note_name(REMOVED, path, NULL), , (const char *path), (path))
CALL(mkdir, below(path), 1, , if (ours) note_name(MADE, path, NULL), (const char *path, mode_t bits), (path, bits))

#define OPENER(name, PARAMS, ARGS)                                      \
    int name PARAMS {                                                   \
        va_list more;                                                   \
        va_start(more, flags);                                          \
        mode_t bits = flags & O_CREAT ? va_arg(more, mode_t) : 0;       \
        va_end(more);                                                   \
        int ours = below(path), what = harm(ours, flags & O_CREAT);     \
        if (what == 2) raise(SIGKILL);                                  \
        if (what) return -1;                                            \
        int is_new = ours && flags & O_CREAT && access(path, F_OK);     \
        if (ours && !is_new && flags & O_TRUNC) {                       \
            int old = REAL(open)(path, O_RDWR);                         \
            note_data(old, 0, SIZE_MAX);                                \
            close(old);                                                 \
        }                                                               \
        int fd_new = REAL(name) ARGS;                                   \
        if (is_new && fd_new >= 0) note_name(CREATED, path, NULL);      \
        return fd_new;                                                  \
    }
OPENER(open, (const char *path, int flags, ...), (path, flags, bits))
OPENER(open64, (const char *path, int flags, ...), (path, flags, bits))
OPENER(openat, (int at, const char *path, int flags, ...), (at, path, flags, bits))
OPENER(openat64, (int at, const char *path, int flags, ...), (at, path, flags, bits))
