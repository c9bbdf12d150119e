/* A wall clock that is wrong by as many seconds as a file says, for the program that loads this with LD_PRELOAD.

   The file, named by the environment's OFFSET_FILE, holds one signed 64-bit integer in the machine's byte order, and is
   mapped: a change is seen at once. Only what tells the time of day is changed. Monotonic clocks, sleeps and timers are
   as they were, as on a machine whose time server is wrong. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset;
static int (*true_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    true_clock = dlsym(RTLD_NEXT, "clock_gettime");
    const char *name = getenv("OFFSET_FILE");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *seen = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (seen != MAP_FAILED) offset = seen;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    if (!true_clock) begin(); /* another library's constructor came first */
    int failed = true_clock(id, now);
    if (!failed && offset && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec precise;
    if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *stored) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now)) return (time_t)-1;
    if (stored) *stored = now.tv_sec;
    return now.tv_sec;
}
