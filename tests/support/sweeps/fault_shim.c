/* A library preloaded before libc. It counts the calls that touch files below a folder, and injects
 * a fault at the k-th call.
 *
 * Python and SQLite reach files only through libc, so the library sees all of their calls. Modes:
 *   1  The process gets SIGKILL before the call.
 *   2  Half of a write is done, then the process gets SIGKILL.
 *   3  The call fails with an errno.
 *   4  This call and every later call that needs room on the disk fail with an errno.
 *   5  Power loss: every write that was not followed by an fsync of its file, and every name that
 *      was not followed by an fsync of its folder, is undone. Then the process gets SIGKILL.
 *   6  Power loss as in 5, but only a random part of the writes and the last few names are undone.
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
/* Kinds of changes: one that a sync has made durable, written data, a new file, and a name that was
 * moved, removed, or made for a folder. */
enum { DURABLE, DATA, CREATED, MOVED, REMOVED, MADE };

/* A change that a power loss may undo. */
struct change {
    int kind, fd;
    ino_t file;
    off_t at, size;                             /* for DATA: position, and the file's size before */
    size_t num_old;
    char *old;
    char path[512], from[512], kept[544];       /* kept: link to the file that was at `path` */
    struct change *before;
};

static char root[512];
static long calls_left;
static int mode, failure, hit, num_kept;
static struct change *last;

/* Inject a fault at the k-th call below `folder` from now on: a mode of the list above, and the errno
 * of modes 3 and 4. */
void fault_arm(const char *folder, long k, int fault_mode, int error) {
    strncpy(root, folder, sizeof root - 1);
    calls_left = k, mode = fault_mode, failure = error, hit = 0, last = NULL;
    srand((unsigned)k);
}

/* Return whether the fault has struck. */
int fault_hit(void) { return hit; }

/* The function of libc that a function of this library replaces. */
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int is_below_root(const char *path) {
    size_t length = strlen(root);
    return length && path && strncmp(path, root, length) == 0 && (path[length] == '/' || !path[length]);
}

static int find_path(int fd, char *path, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, size - 1);
    if (length >= 0) path[length] = 0;
    return length >= 0;
}

static int is_fd_below_root(int fd) {
    char path[4096];
    return root[0] && find_path(fd, path, sizeof path) && is_below_root(path);
}

static struct change *add_change(int kind, const char *path) {
    struct change *c = calloc(1, sizeof *c);
    c->kind = kind, c->before = last, last = c;
    if (path) strncpy(c->path, path, sizeof c->path - 1);
    return c;
}

/* Keep the bytes [at, at + n) of a file before they change. */
static void note_data(int fd, off_t at, size_t n) {
    struct stat s;
    char link[64];
    if (mode < POWER || fstat(fd, &s) || !S_ISREG(s.st_mode)) return;
    struct change *c = add_change(DATA, NULL);
    c->fd = dup(fd), c->file = s.st_ino, c->at = at, c->size = s.st_size;
    c->num_old = at >= s.st_size ? 0 : n < (size_t)(s.st_size - at) ? n : (size_t)(s.st_size - at);
    c->old = malloc(c->num_old + 1);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int reader = REAL(open)(link, O_RDONLY);
    if (pread(reader, c->old, c->num_old, at) != (ssize_t)c->num_old) abort();
    close(reader);
}

/* Keep a link to the file of a name before the name is replaced or removed. */
static struct change *note_name(int kind, const char *path, const char *from) {
    if (mode < POWER) return NULL;
    struct change *c = add_change(kind, path);
    if (from) strncpy(c->from, from, sizeof c->from - 1);
    snprintf(c->kept, sizeof c->kept, "%s-kept-%d", root, num_kept++);
    /* A folder cannot be linked: it is moved to `kept` when it is undone. */
    if (kind == MADE) return c;
    if (kind == CREATED || link(path, c->kept)) c->kept[0] = 0;
    return c;
}

/* Mark changes as durable after a sync of a file (its data) or of a folder (the names in it). */
static void note_sync(int fd) {
    struct stat s;
    char path[4096];
    if (!last || fstat(fd, &s) || !find_path(fd, path, sizeof path)) return;
    for (struct change *c = last; c; c = c->before) {
        if (c->kind == DATA && c->file == s.st_ino) c->kind = DURABLE, close(c->fd);
        char *name = strrchr(c->path, '/');
        if (c->kind > DATA && S_ISDIR(s.st_mode) && name && (size_t)(name - c->path) == strlen(path)
            && strncmp(c->path, path, strlen(path)) == 0) c->kind = DURABLE;
    }
}

/* Undo one change. */
static void undo_change(struct change *c) {
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

/* Undo the changes that are not durable, the latest first: all of them, or a random part (mode 6). */
static void lose_power(void) {
    int num_names = 0;
    for (struct change *c = last; c; c = c->before) num_names += c->kind > DATA;
    /* Names are lost in order, data in any order. */
    int lost_names = mode == POWER ? num_names : rand() % (num_names + 1);
    for (struct change *c = last; c; c = c->before) {
        if (c->kind == DATA && (mode == POWER || rand() & 1)) undo_change(c);
        if (c->kind > DATA && lost_names-- > 0) undo_change(c);
    }
}

/* Return 0 if the call is to be made, 1 if it is to fail, and 2 if half of it is to be made before
 * the process is killed. May kill the process instead of returning. */
static int inject_fault(int is_watched, int needs_room) {
    if (!is_watched || !mode) return 0;
    calls_left--;
    if (calls_left > 0 || (calls_left < 0 && !(mode == FULL && needs_room))) return 0;
    hit = 1;
    if (mode >= POWER) lose_power();
    if (mode == KILL || mode >= POWER) raise(SIGKILL);
    if (mode == TORN) return 2;
    errno = failure;
    return 1;
}

/* Define a function that writes `n` bytes. AT is the position of the bytes, ARGS are the arguments of
 * the real function, and HALF those of half a write. */
#define WRITER(name, AT, PARAMS, ARGS, HALF)                                    \
    ssize_t name PARAMS {                                                       \
        int is_watched = is_fd_below_root(fd);                                  \
        int action = inject_fault(is_watched, 1);                               \
        if (action == 2) { (void)!REAL(name) HALF; raise(SIGKILL); }            \
        if (is_watched && !action) note_data(fd, AT, n);                        \
        return action ? -1 : REAL(name) ARGS;                                   \
    }
WRITER(write, lseek(fd, 0, SEEK_CUR), (int fd, const void *data, size_t n), (fd, data, n), (fd, data, n / 2))
WRITER(pwrite, at, (int fd, const void *data, size_t n, off_t at), (fd, data, n, at), (fd, data, n / 2, at))
WRITER(pwrite64, at, (int fd, const void *data, size_t n, off64_t at), (fd, data, n, at), (fd, data, n / 2, at))

/* Define another function. WATCHED says whether its file is below the folder, ROOM whether it needs
 * room on the disk. BEFORE and AFTER note the change around the real call. */
#define CALL(name, WATCHED, ROOM, BEFORE, AFTER, PARAMS, ARGS)                  \
    int name PARAMS {                                                           \
        int is_watched = WATCHED, action = inject_fault(is_watched, ROOM);      \
        if (action == 2) raise(SIGKILL);                                        \
        if (action) return -1;                                                  \
        if (is_watched) { BEFORE; }                                             \
        int done = REAL(name) ARGS;                                             \
        if (done >= 0) { AFTER; }                                               \
        return done;                                                            \
    }
CALL(fsync, is_fd_below_root(fd), 1, , note_sync(fd), (int fd), (fd))
CALL(fdatasync, is_fd_below_root(fd), 1, , note_sync(fd), (int fd), (fd))
CALL(ftruncate, is_fd_below_root(fd), 0, note_data(fd, size, SIZE_MAX), , (int fd, off_t size), (fd, size))
CALL(ftruncate64, is_fd_below_root(fd), 0, note_data(fd, size, SIZE_MAX), , (int fd, off64_t size), (fd, size))
CALL(rename, is_below_root(to), 1, note_name(MOVED, to, from), , (const char *from, const char *to), (from, to))
CALL(unlink, is_below_root(path), 0, note_name(REMOVED, path, NULL), , (const char *path), (path))
CALL(mkdir, is_below_root(path), 1, , if (is_watched) note_name(MADE, path, NULL),
     (const char *path, mode_t bits), (path, bits))

/* Define a function that opens a file. A file that exists and is truncated loses its bytes. */
#define OPENER(name, PARAMS, ARGS)                                              \
    int name PARAMS {                                                           \
        va_list more;                                                           \
        va_start(more, flags);                                                  \
        mode_t bits = flags & O_CREAT ? va_arg(more, mode_t) : 0;               \
        va_end(more);                                                           \
        int is_watched = is_below_root(path);                                   \
        int action = inject_fault(is_watched, flags & O_CREAT);                 \
        if (action == 2) raise(SIGKILL);                                        \
        if (action) return -1;                                                  \
        int is_new = is_watched && flags & O_CREAT && access(path, F_OK);       \
        if (is_watched && !is_new && flags & O_TRUNC) {                         \
            int old = REAL(open)(path, O_RDWR);                                 \
            note_data(old, 0, SIZE_MAX);                                        \
            close(old);                                                         \
        }                                                                       \
        int fd_new = REAL(name) ARGS;                                           \
        if (is_new && fd_new >= 0) note_name(CREATED, path, NULL);              \
        return fd_new;                                                          \
    }
OPENER(open, (const char *path, int flags, ...), (path, flags, bits))
OPENER(open64, (const char *path, int flags, ...), (path, flags, bits))
OPENER(openat, (int at, const char *path, int flags, ...), (at, path, flags, bits))
OPENER(openat64, (int at, const char *path, int flags, ...), (at, path, flags, bits))
