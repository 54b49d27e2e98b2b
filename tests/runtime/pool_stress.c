/* pool_stress.c: many short lists of uneven jobs over the pool, each item counted exactly once.
 * usage: pool_stress THREADS LISTS; prints "ok" or what went wrong. Built with -fsanitize=thread by test_pool.py. */
#define _GNU_SOURCE /* usleep */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { JOBS = 5, MOST = 97 };

const dsr1_program dsr1_the_program;

static void count_items(void *const *buffers, const int64_t *dims, void *scratch, void *local, int64_t lo, int64_t hi) {
    int32_t *counts = buffers[0];
    int64_t *own = local; /* a thread's own memory: written without synchronisation */
    (void)scratch;
    for (int64_t i = lo; i < hi; i++) {
        counts[i] += (int32_t)dims[0];
        *own += 1;
    }
}

int main(int count, char **words) {
    if (count != 3) return 2;
    int threads = atoi(words[1]), lists = atoi(words[2]);
    message error = {""};
    pool *p = NULL;
    if (pool_open(&p, threads, sizeof(int64_t), &error)) {
        printf("%s\n", error.text);
        return 1;
    }
    static int32_t counts[JOBS][MOST];
    uint32_t random = 1;
    for (int list = 1; list <= lists; list++) {
        job jobs[JOBS];
        void *buffers[JOBS][1];
        int64_t dims[1] = {list};
        int64_t items[JOBS];
        int used = 1 + list % JOBS;
        memset(counts, 0, sizeof counts);
        for (int j = 0; j < used; j++) {
            random = random * 1664525u + 1013904223u;
            items[j] = (random >> 16) % 3 ? (random >> 8) % MOST : 0;
            buffers[j][0] = counts[j];
            jobs[j] = (job){count_items, buffers[j], dims, NULL, items[j], 0};
        }
        pool_run(p, jobs, used);
        for (int j = 0; j < used; j++)
            for (int i = 0; i < MOST; i++)
                if (counts[j][i] != (i < items[j] ? list : 0)) {
                    printf("list %d, job %d, item %d: %d\n", list, j, i, counts[j][i]);
                    return 1;
                }
        /* Now and then long enough for the threads to fall asleep. */
        if (list % 997 == 0) usleep(2000);
    }
    pool_close(p);
    puts("ok");
    return 0;
}
