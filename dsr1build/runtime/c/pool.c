/* pool.c: a pool of threads over the items of a list of jobs.
 *
 * A list is cut into chunks of equal length. Threads claim chunks by one compare-and-swap on a ticket that holds
 * (generation of the list, chunks left), so a thread that wakes late can only claim work of a list that is still alive.
 * The caller works too and waits for chunks, never for threads: a thread that the scheduler keeps away costs nothing
 * unless it holds a chunk. Waiting is a bounded spin, then a futex.
 */
#define _GNU_SOURCE /* syscall */
#include "internal.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    SPINS = 4000,         /* pauses before a thread sleeps: some tens of microseconds, longer than the gap between steps */
    CHUNKS_PER_THREAD = 8 /* so that a slow thread or an uneven item delays the end by an eighth of a share at most */
};

typedef struct {
    pool *pool;
    void *local;
    pthread_t thread;
} worker;

struct pool {
    /* Each counter that threads write has a cache line of its own. */
    _Alignas(64) _Atomic uint64_t ticket; /* generation << 32 | chunks not yet claimed */
    _Alignas(64) _Atomic uint32_t done;   /* chunks finished; a futex when the caller waits */
    _Alignas(64) _Atomic uint32_t bell;   /* a futex: rung for every list and at the end */
    _Alignas(64) _Atomic uint32_t sleepers;
    _Atomic uint32_t caller_waits, closing;
    /* The list. Stable while any chunk of it is claimed and not finished. */
    _Alignas(64) job *jobs;
    int64_t job_count, item_count, chunk_items, chunk_count;
    int threads;
    mapping locals;
    worker *workers;
};

static void futex_wait(_Atomic uint32_t *word, uint32_t expected) {
    syscall(SYS_futex, word, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, expected, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int64_t count) {
    syscall(SYS_futex, word, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, count < INT_MAX ? (int)count : INT_MAX, NULL, NULL, 0);
}

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void run_chunk(pool *p, int64_t chunk, void *local) {
    int64_t lo = chunk * p->chunk_items;
    int64_t end = lo + p->chunk_items < p->item_count ? lo + p->chunk_items : p->item_count;
    /* Find the last job whose first item is not after lo. */
    int64_t at = 0, above = p->job_count;
    while (above - at > 1) {
        int64_t middle = (at + above) / 2;
        if (p->jobs[middle].first <= lo) at = middle;
        else above = middle;
    }
    for (; lo < end; at++) {
        const job *j = &p->jobs[at];
        int64_t hi = j->first + j->items < end ? j->first + j->items : end;
        if (lo < hi) {
            j->phase(j->buffers, j->dims, j->scratch, local, lo - j->first, hi - j->first);
            lo = hi;
        }
    }
}

/* Claim and run chunks until none is left. */
static void work(pool *p, void *local) {
    uint64_t ticket = atomic_load_explicit(&p->ticket, memory_order_acquire);
    while ((uint32_t)ticket) {
        if (!atomic_compare_exchange_weak_explicit(&p->ticket, &ticket, ticket - 1, memory_order_acq_rel, memory_order_acquire))
            continue;
        int64_t count = p->chunk_count;
        run_chunk(p, count - (int64_t)(uint32_t)ticket, local);
        /* Sequentially consistent with the caller's store to caller_waits: one of the two sees the other. */
        if (atomic_fetch_add(&p->done, 1) + 1 == (uint32_t)count && atomic_load(&p->caller_waits)) futex_wake(&p->done, 1);
        ticket = atomic_load_explicit(&p->ticket, memory_order_acquire);
    }
}

static void *worker_main(void *argument) {
    worker *w = argument;
    pool *p = w->pool;
    uint32_t seen = 0;
    for (;;) {
        uint32_t bell;
        for (int spins = 0; (bell = atomic_load_explicit(&p->bell, memory_order_acquire)) == seen;) {
            if (++spins < SPINS) {
                relax();
                continue;
            }
            atomic_fetch_add(&p->sleepers, 1);
            futex_wait(&p->bell, seen);
            atomic_fetch_sub(&p->sleepers, 1);
        }
        seen = bell;
        if (atomic_load(&p->closing)) return NULL;
        work(p, w->local);
    }
}

void pool_run(pool *p, job *jobs, int64_t count) {
    int64_t items = 0;
    for (int64_t i = 0; i < count; i++) {
        jobs[i].first = items;
        items += jobs[i].items;
    }
    if (!items) return;
    p->jobs = jobs;
    p->job_count = count;
    p->item_count = items;
    if (p->threads == 1 || items == 1) {
        /* Nothing to share: no thread is woken. No chunk is claimable, so the list is the caller's alone. */
        p->chunk_items = items;
        run_chunk(p, 0, p->workers[0].local);
        return;
    }
    int64_t wanted = (int64_t)CHUNKS_PER_THREAD * p->threads;
    p->chunk_items = (items + wanted - 1) / wanted;
    p->chunk_count = (items + p->chunk_items - 1) / p->chunk_items;
    atomic_store(&p->done, 0);
    uint64_t generation = (atomic_load_explicit(&p->ticket, memory_order_relaxed) >> 32) + 1;
    atomic_store_explicit(&p->ticket, generation << 32 | (uint64_t)p->chunk_count, memory_order_release);
    atomic_fetch_add(&p->bell, 1);
    if (atomic_load(&p->sleepers)) futex_wake(&p->bell, p->chunk_count - 1);
    work(p, p->workers[0].local);
    uint32_t done;
    for (int spins = 0; (done = atomic_load_explicit(&p->done, memory_order_acquire)) < (uint32_t)p->chunk_count;) {
        if (++spins < SPINS) {
            relax();
            continue;
        }
        atomic_store(&p->caller_waits, 1);
        futex_wait(&p->done, done);
        atomic_store(&p->caller_waits, 0);
    }
}

int pool_open(pool **out, int threads, int64_t local_bytes, message *error) {
    size_t bytes = (size_t)align_up((int64_t)sizeof(pool));
    pool *p = aligned_alloc(DSR1_ALIGNMENT, bytes);
    if (!p) return fail(error, DSR1_ERROR_SYSTEM, "no memory for the thread pool");
    memset(p, 0, bytes);
    p->workers = calloc((size_t)threads, sizeof *p->workers);
    p->threads = p->workers ? 1 : 0;
    *out = p;
    if (!p->workers) return fail(error, DSR1_ERROR_SYSTEM, "no memory for the thread pool");
    int64_t share = align_up(local_bytes);
    int code = map_memory(&p->locals, share * threads, "the threads' local memory", error);
    if (code) return code;
    for (int i = 0; i < threads; i++) {
        p->workers[i].pool = p;
        p->workers[i].local = (char *)p->locals.address + i * share;
    }
    for (int i = 1; i < threads; i++) {
        int problem = pthread_create(&p->workers[i].thread, NULL, worker_main, &p->workers[i]);
        if (problem) return fail(error, DSR1_ERROR_SYSTEM, "cannot start thread %d of %d: %s", i + 1, threads, strerror(problem));
        p->threads = i + 1;
    }
    return DSR1_OK;
}

void pool_close(pool *p) {
    if (!p) return;
    atomic_store(&p->closing, 1);
    atomic_fetch_add(&p->bell, 1);
    futex_wake(&p->bell, INT_MAX);
    for (int i = 1; i < p->threads; i++) pthread_join(p->workers[i].thread, NULL);
    unmap(&p->locals);
    free(p->workers);
    free(p);
}
