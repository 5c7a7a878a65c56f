/* A wall clock that is ahead by the seconds in the file CLOCK_FILE, for all processes that are started with LD_PRELOAD.
   Monotonic clocks and the length of waits stay the machine's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

#define REAL(name)                                                                                                       \
    static __typeof__(&name) real;                                                                                       \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* The newest version of a function that has an older one, of another condition's layout. */
static void *find(const char *name) {
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    return found ? found : dlsym(RTLD_NEXT, name);
}

static const volatile int64_t none, *ahead = &none;

__attribute__((constructor)) static void open_clock(void) {
    const char *path = getenv("CLOCK_FILE");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) ahead = found;
    close(file);
}

static int is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

/* Of a wait's end. A small one is of a condition with a monotonic clock. */
static struct timespec machines(const struct timespec *end) {
    struct timespec found = *end;
    if (found.tv_sec > 1000000000) found.tv_sec -= *ahead;
    return found;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int code = real(clock, now);
    if (code == 0 && is_wall(clock)) now->tv_sec += *ahead;
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    REAL(gettimeofday);
    int code = real(now, zone);
    if (code == 0) now->tv_sec += *ahead;
    return code;
}

time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds) *seconds = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *now, int base) { return clock_gettime(CLOCK_REALTIME, now) == 0 ? base : 0; }

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict end) {
    static __typeof__(&pthread_cond_timedwait) real;
    if (!real) real = (__typeof__(&pthread_cond_timedwait))find("pthread_cond_timedwait");
    struct timespec at = machines(end);
    return real(condition, mutex, &at);
}

int cnd_timedwait(cnd_t *restrict condition, mtx_t *restrict mutex, const struct timespec *restrict end) {
    REAL(cnd_timedwait);
    struct timespec at = machines(end);
    return real(condition, mutex, &at);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict end) {
    REAL(pthread_mutex_timedlock);
    struct timespec at = machines(end);
    return real(mutex, &at);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict end) {
    REAL(sem_timedwait);
    struct timespec at = machines(end);
    return real(semaphore, &at);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *length, struct timespec *left) {
    REAL(clock_nanosleep);
    if (!(flags & TIMER_ABSTIME) || !is_wall(clock)) return real(clock, flags, length, left);
    struct timespec at = machines(length);
    return real(clock, flags, &at, left);
}
