/* session.c: the functions of dsr1.h. */
#define _GNU_SOURCE /* sched_getaffinity, CPU_COUNT */
#include "internal.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_THREADS = 1024 };

int fail(message *to, int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(to->text, sizeof to->text, format, arguments);
    va_end(arguments);
    return code;
}

/* Is `word` of `length` bytes one of the blank-separated words of `text`? */
static bool has_word(const char *text, const char *word, size_t length) {
    for (const char *at = text; (at = strstr(at, word)); at += length) {
        bool starts = at == text || at[-1] == ' ' || at[-1] == '\t';
        bool ends = at[length] == ' ' || at[length] == '\n' || at[length] == '\0';
        if (starts && ends) return true;
    }
    return false;
}

/* Compare the features that the kernels were compiled for with the first "flags" or "Features" line of /proc/cpuinfo.
 * The runtime itself is compiled for the plain architecture, so this check runs on any CPU. */
static int check_cpu(const char *required, message *error) {
    if (!*required) return DSR1_OK;
    FILE *file = fopen("/proc/cpuinfo", "re");
    if (!file) return fail(error, DSR1_ERROR_SYSTEM, "cannot read /proc/cpuinfo, so the CPU's features are not known");
    char line[16384];
    bool found = false;
    while (!found && fgets(line, sizeof line, file)) found = !strncmp(line, "flags", 5) || !strncmp(line, "Features", 8);
    fclose(file);
    const char *flags = found && strchr(line, ':') ? strchr(line, ':') + 1 : "";
    char missing[256] = "", word[64];
    while (*required) {
        size_t length = strcspn(required, " ");
        if (length && length < sizeof word) {
            memcpy(word, required, length);
            word[length] = '\0';
            size_t used = strlen(missing);
            if (!has_word(flags, word, length)) snprintf(missing + used, sizeof missing - used, "%s%s", used ? ", " : "", word);
        }
        required += length + (required[length] == ' ');
    }
    if (*missing) return fail(error, DSR1_ERROR_CPU, "this bundle needs CPU features that this machine does not have: %s", missing);
    return DSR1_OK;
}

static int64_t state_bytes(int32_t state, int64_t context) {
    const dsr1_tensor_type *type = &dsr1_the_program.types[dsr1_the_program.state_types[state]];
    int64_t bytes = type->item_bytes;
    for (int32_t i = 0; i < type->rank; i++) bytes *= type->shape[i] == DSR1_CONTEXT_EXTENT ? context : type->shape[i];
    return align_up(bytes);
}

/* Reserve states, arena and scratch, and note where each tensor lies. */
static int place_tensors(dsr1_session *s) {
    const dsr1_program *program = &dsr1_the_program;
    void **next = s->addresses + program->weight_count;
    int64_t bytes = 0, scratch, local;
    for (int32_t i = 0; i < program->state_count; i++) bytes += state_bytes(i, s->context);
    int code = map_memory(&s->states, bytes, "the KV cache", &s->error);
    if (!code) code = map_memory(&s->arena, program->arena_bytes, "the activations", &s->error);
    largest_sizes(s->context, &scratch, &local);
    if (!code) code = map_memory(&s->scratch, scratch, "the kernels' scratch memory", &s->error);
    if (code) return code;
    char *state = s->states.address;
    for (int32_t i = 0; i < program->state_count; i++) {
        *next++ = state;
        state += state_bytes(i, s->context);
    }
    for (int m = 0; m < DSR1_MODE_COUNT; m++)
        for (int32_t i = 0; i < program->modes[m].buffer_count; i++)
            *next++ = (char *)s->arena.address + program->modes[m].buffers[i].offset;
    return pool_open(&s->pool, s->threads, local, &s->error);
}

/* Reserve the lists that running needs, so that no run allocates. */
static int allocate_lists(dsr1_session *s) {
    const dsr1_program *program = &dsr1_the_program;
    int64_t calls = 1, experts = 0, slots = 0, phases = 1;
    for (int m = 0; m < DSR1_MODE_COUNT; m++) {
        for (int32_t i = 0; i < program->modes[m].step_count; i++) {
            const dsr1_dispatch *d = program->modes[m].steps[i].dispatch;
            int64_t rows = m == DSR1_MODE_PREFILL ? program->chunk : 1;
            if (!d) continue;
            if (dispatch_calls(d, rows) > calls) calls = dispatch_calls(d, rows);
            if (d->expert_count > experts) experts = d->expert_count;
            if (rows * d->top_k > slots) slots = rows * d->top_k;
        }
    }
    for (int32_t k = 0; k < program->kernel_count; k++)
        for (int32_t v = 0; v < program->kernels[k].variant_count; v++)
            if (program->kernels[k].variants[v].phase_count > phases) phases = program->kernels[k].variants[v].phase_count;
    s->calls = calloc((size_t)calls, sizeof *s->calls);
    s->call_experts = calloc((size_t)calls, sizeof *s->call_experts);
    s->jobs = calloc((size_t)(calls * phases), sizeof *s->jobs);
    s->expert_first = calloc((size_t)experts + 1, sizeof *s->expert_first);
    s->chosen_slots = calloc((size_t)slots + 1, sizeof *s->chosen_slots);
    s->logits = calloc((size_t)program->vocabulary, sizeof *s->logits);
    if (!s->calls || !s->call_experts || !s->jobs || !s->expert_first || !s->chosen_slots || !s->logits)
        return fail(&s->error, DSR1_ERROR_SYSTEM, "no memory for the session");
    return DSR1_OK;
}

static int open_session(dsr1_session *s, const char *directory, int threads) {
    const dsr1_program *program = &dsr1_the_program;
    if (program->abi != DSR1_ABI)
        return fail(&s->error, DSR1_ERROR_BUNDLE, "the program has ABI %u, the runtime has %d", program->abi, DSR1_ABI);
    if (threads < 0 || threads > MAX_THREADS)
        return fail(&s->error, DSR1_ERROR_ARGUMENT, "threads must be 0 (all CPUs) to %d, not %d", MAX_THREADS, threads);
    int code = check_cpu(program->features, &s->error);
    if (code) return code;
    s->threads = threads;
    if (!threads) {
        cpu_set_t allowed;
        /* The call fails on machines with more CPUs than the set holds. */
        long cpus = sched_getaffinity(0, sizeof allowed, &allowed) ? sysconf(_SC_NPROCESSORS_ONLN) : CPU_COUNT(&allowed);
        s->threads = cpus < 1 ? 1 : cpus > MAX_THREADS ? MAX_THREADS : (int)cpus;
    }
    int64_t tensors = program->weight_count + program->state_count;
    for (int m = 0; m < DSR1_MODE_COUNT; m++) tensors += program->modes[m].buffer_count;
    s->addresses = calloc((size_t)tensors, sizeof *s->addresses);
    if (!s->addresses) return fail(&s->error, DSR1_ERROR_SYSTEM, "no memory for the session");
    code = weights_open(&s->weights, directory, s->addresses, &s->error);
    if (code) return code;
    s->context = s->weights.context;
    code = allocate_lists(s);
    return code ? code : place_tensors(s);
}

int dsr1_open(const char *bundle_directory, int threads, dsr1_session **out, char *text, size_t text_bytes) {
    message error = {""};
    int code = DSR1_OK;
    dsr1_session *s = calloc(1, sizeof *s);
    if (out) *out = NULL;
    if (!bundle_directory || !out) code = fail(&error, DSR1_ERROR_ARGUMENT, "bundle_directory and out must not be null");
    else if (!s) code = fail(&error, DSR1_ERROR_SYSTEM, "no memory for the session");
    else if ((code = open_session(s, bundle_directory, threads))) error = s->error;
    if (text && text_bytes) snprintf(text, text_bytes, "%s", error.text);
    if (code) dsr1_close(s);
    else *out = s;
    return code;
}

void dsr1_close(dsr1_session *s) {
    if (!s) return;
    pool_close(s->pool);
    weights_close(&s->weights);
    unmap(&s->states);
    unmap(&s->arena);
    unmap(&s->scratch);
    free(s->addresses);
    free(s->calls);
    free(s->call_experts);
    free(s->jobs);
    free(s->expert_first);
    free(s->chosen_slots);
    free(s->logits);
    free(s);
}

static int check_tokens(dsr1_session *s, const int32_t *ids, int64_t count) {
    if (!ids || count < 1) return fail(&s->error, DSR1_ERROR_ARGUMENT, "there are no tokens to append");
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= dsr1_the_program.vocabulary)
            return fail(&s->error, DSR1_ERROR_TOKEN, "token %lld has the id %d, the vocabulary has the ids 0 to %lld", (long long)i, ids[i],
                        (long long)dsr1_the_program.vocabulary - 1);
    if (count > s->context - s->position)
        return fail(&s->error, DSR1_ERROR_CONTEXT, "%lld tokens at position %lld do not fit into the context of %lld tokens",
                    (long long)count, (long long)s->position, (long long)s->context);
    return DSR1_OK;
}

/* Append at most a chunk of tokens behind `past`; logits go to the mode's buffer. */
static int run_chunk(dsr1_session *s, int mode_number, const int32_t *ids, int64_t count, int64_t past, logits_rows rows) {
    const dsr1_mode *mode = &dsr1_the_program.modes[mode_number];
    int64_t *to = s->addresses[mode->ids];
    for (int64_t i = 0; i < count; i++) to[i] = ids[i];
    return run_mode(s, mode_number, count, past, rows);
}

static void keep_logits(dsr1_session *s, int mode_number, int64_t row, int64_t appended) {
    const float *logits = s->addresses[dsr1_the_program.modes[mode_number].logits];
    int64_t vocabulary = dsr1_the_program.vocabulary;
    memcpy(s->logits, logits + row * vocabulary, sizeof *logits * (size_t)vocabulary);
    s->has_logits = true;
    s->position += appended;
}

int dsr1_prefill(dsr1_session *s, const int32_t *ids, int64_t count, float *logits) {
    if (!s) return DSR1_ERROR_ARGUMENT;
    int code = check_tokens(s, ids, count);
    int64_t vocabulary = dsr1_the_program.vocabulary, chunk = dsr1_the_program.chunk, tokens = 0;
    for (int64_t done = 0; !code && done < count; done += tokens) {
        tokens = count - done < chunk ? count - done : chunk;
        logits_rows rows = logits ? LOGITS_ALL : done + tokens == count ? LOGITS_LAST : LOGITS_NONE;
        code = run_chunk(s, DSR1_MODE_PREFILL, ids + done, tokens, s->position + done, rows);
        if (!code && logits)
            memcpy(logits + done * vocabulary, s->addresses[dsr1_the_program.modes[DSR1_MODE_PREFILL].logits],
                   sizeof *logits * (size_t)(tokens * vocabulary));
    }
    if (!code) keep_logits(s, DSR1_MODE_PREFILL, logits ? tokens - 1 : 0, count);
    return code;
}

int dsr1_decode(dsr1_session *s, int32_t id) {
    if (!s) return DSR1_ERROR_ARGUMENT;
    int code = check_tokens(s, &id, 1);
    if (!code) code = run_chunk(s, DSR1_MODE_DECODE, &id, 1, s->position, LOGITS_ALL);
    if (!code) keep_logits(s, DSR1_MODE_DECODE, 0, 1);
    return code;
}

int dsr1_reset(dsr1_session *s) {
    if (!s) return DSR1_ERROR_ARGUMENT;
    s->position = 0;
    s->has_logits = false;
    return DSR1_OK;
}

const float *dsr1_logits(const dsr1_session *s) { return s && s->has_logits ? s->logits : NULL; }
int64_t dsr1_position(const dsr1_session *s) { return s ? s->position : 0; }
int64_t dsr1_context(const dsr1_session *s) { return s ? s->context : 0; }
int64_t dsr1_vocabulary(const dsr1_session *s) { return s ? dsr1_the_program.vocabulary : 0; }
int dsr1_threads(const dsr1_session *s) { return s ? s->threads : 0; }
const char *dsr1_error(const dsr1_session *s) { return s ? s->error.text : "there is no session"; }
