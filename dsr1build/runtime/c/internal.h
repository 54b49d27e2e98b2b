/* internal.h: what the files of the runtime share. Every name here stays inside the shared object. */
#ifndef DSR1_INTERNAL_H
#define DSR1_INTERNAL_H

#include "dsr1.h"
#include "program.h"

#include <stdbool.h>

/* A message is kept in a fixed array so that reporting an error never needs memory. */
typedef struct {
    char text[DSR1_MESSAGE_BYTES];
} message;

/* Write the message and return `code`, for `return fail(...)`. */
__attribute__((format(printf, 3, 4))) int fail(message *to, int code, const char *format, ...);

static inline int64_t align_up(int64_t bytes) { return (bytes + DSR1_ALIGNMENT - 1) / DSR1_ALIGNMENT * DSR1_ALIGNMENT; }

/* pool.c: threads that share out the items of a list of jobs. */
typedef struct {
    dsr1_phase phase;
    void *const *buffers;
    const int64_t *dims;
    void *scratch;
    int64_t items;
    int64_t first; /* set by pool_run: items of the jobs before this one */
} job;

typedef struct pool pool;

/* `threads` >= 1 counts the caller, which works too. Each thread gets `local_bytes` of its own, 64-byte aligned. */
int pool_open(pool **out, int threads, int64_t local_bytes, message *error);
/* Run all items of all jobs and return when the last one is done. One caller at a time. */
void pool_run(pool *p, job *jobs, int64_t count);
void pool_close(pool *p);

/* weights.c: the files behind the weights. */
typedef struct {
    void *address;
    int64_t bytes;
} mapping;

typedef struct {
    mapping *files;
    int32_t file_count;
    int64_t context;
} weights;

/* Read <directory>/weights.bind, check it against the program, map its files and store the address of each weight. */
int weights_open(weights *w, const char *directory, void **addresses, message *error);
void weights_close(weights *w);
/* Zeroed, page-aligned memory that takes no real memory before it is written. */
int map_memory(mapping *m, int64_t bytes, const char *what, message *error);
void unmap(mapping *m);

/* execute.c: kernels and steps. */
typedef struct {
    const dsr1_variant *variant;
    void *buffers[DSR1_MAX_ARGUMENTS];
    int64_t dims[DSR1_DIM_COUNT];
    int64_t items[DSR1_MAX_PHASES];
    int64_t bytes[2]; /* scratch, local */
    void *scratch;
} kernel_call;

/* Which rows of logits a run has to compute. */
typedef enum { LOGITS_NONE, LOGITS_LAST, LOGITS_ALL } logits_rows;

struct dsr1_session {
    message error;
    weights weights;
    mapping states, arena, scratch;
    void **addresses; /* of every tensor, by number */
    pool *pool;
    kernel_call *calls; /* of one list: one for a kernel step, many for a dispatch */
    job *jobs;
    int32_t *expert_first; /* of the list below, for each expert and one more */
    int32_t *chosen_slots; /* token * top_k + j, grouped by expert */
    int32_t *call_experts; /* the expert of each call of a list */
    float *logits;         /* of the last token */
    int64_t position, context;
    int threads;
    bool has_logits;
};

/* The tightest variant of `kernel` that holds for `tokens` rows; NULL when there is none. */
const dsr1_variant *choose_variant(const dsr1_kernel *kernel, int64_t tokens);
/* The rows that a variant computes when it is given `tokens` rows. */
int64_t variant_rows(const dsr1_variant *variant, int64_t tokens);
/* Set the call's dims from the run-time dimensions and ask the variant for its items and bytes. */
void plan_call(kernel_call *call, const dsr1_variant *variant, const int64_t run_dims[DSR1_DIM_COUNT]);
/* Wave 0 of all calls side by side, then wave 1, and so on. */
void run_calls(dsr1_session *s, int32_t count);
/* Run the steps of a mode for tokens that lie in its buffer of ids, behind `past` tokens. */
int run_mode(dsr1_session *s, int mode, int64_t tokens, int64_t past, logits_rows rows);
/* The largest scratch and local sizes of any step; a session never needs more. */
void largest_sizes(int64_t context, int64_t *scratch, int64_t *local);

/* experts.c: sparse dispatch. */
int run_dispatch(dsr1_session *s, const char *name, const dsr1_dispatch *d, const int64_t run_dims[DSR1_DIM_COUNT]);
/* Scratch for a dispatch over `rows` tokens, and the largest local size of its kernels. */
void dispatch_sizes(const dsr1_dispatch *d, int64_t rows, int64_t context, int64_t *scratch, int64_t *local);
/* The most experts that one dispatch over `rows` tokens can run. */
int64_t dispatch_calls(const dsr1_dispatch *d, int64_t rows);

#endif
