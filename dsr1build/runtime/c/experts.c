/* experts.c: run only the experts that the router chose.
 *
 * The tokens of each expert are gathered, the kernels of all chosen experts go through the pool as one list, and the
 * rows are scattered to slots[token][j], where j counts a token's experts by rising id. So the order in which the combine
 * kernel adds them up depends on the ids alone, and a list that is cut in two for want of scratch gives the same bits.
 */
#include "internal.h"

#include <string.h>

/* A single row is read and written in place if the slot that it goes to is aligned like any activation. Otherwise the
 * rows are copied; this is what one such copy takes. */
static int64_t copy_bytes(const dsr1_dispatch *d, int64_t tokens, int64_t rows) {
    int64_t row = d->hidden * (int64_t)sizeof(float);
    return tokens == 1 && rows == 1 && row % DSR1_ALIGNMENT == 0 ? 0 : align_up(rows * row);
}

/* The scratch that an expert with `rows` tokens of `tokens` takes: its input, its output and the kernel's own. */
static int64_t expert_bytes(const dsr1_kernel *kernel, const dsr1_dispatch *d, int64_t tokens, int64_t rows, int64_t context,
                            int64_t *local) {
    int64_t run_dims[DSR1_DIM_COUNT] = {rows, context - 1, context};
    const dsr1_variant *variant = choose_variant(kernel, rows);
    if (!variant) return 0;
    kernel_call call;
    plan_call(&call, variant, run_dims);
    if (call.bytes[1] > *local) *local = call.bytes[1];
    return 2 * copy_bytes(d, tokens, variant_rows(variant, rows)) + align_up(call.bytes[0]);
}

int64_t dispatch_calls(const dsr1_dispatch *d, int64_t rows) {
    int64_t chosen = rows * d->top_k;
    return chosen < d->expert_count ? chosen : d->expert_count;
}

void dispatch_sizes(const dsr1_dispatch *d, int64_t rows, int64_t context, int64_t *scratch, int64_t *local) {
    *scratch = *local = 0;
    int64_t calls = dispatch_calls(d, rows);
    for (int32_t e = 0; e < d->expert_count; e++) {
        /* Neighbouring experts have the same kernel in all but strange models: look at each kernel once. */
        if (e && d->experts[e].kernel == d->experts[e - 1].kernel) continue;
        const dsr1_kernel *kernel = &dsr1_the_program.kernels[d->experts[e].kernel];
        /* Any one expert must fit, whatever its rows; beyond that there is room for evenly loaded experts in one list. */
        for (int64_t n = 1; n <= rows; n++) {
            int64_t bytes = expert_bytes(kernel, d, rows, n, context, local);
            if (bytes > *scratch) *scratch = bytes;
        }
        int64_t even = calls * expert_bytes(kernel, d, rows, (rows * d->top_k + calls - 1) / calls, context, local);
        if (even > *scratch) *scratch = even;
    }
}

/* Sort the tokens by expert: expert e has the slots chosen_slots[expert_first[e] .. expert_first[e + 1]). */
static int group_tokens(dsr1_session *s, const char *name, const dsr1_dispatch *d, int64_t tokens) {
    const int32_t *mask = s->addresses[d->mask];
    const float *weights = s->addresses[d->weights];
    float *slot_weights = s->addresses[d->slot_weights];
    int32_t *first = s->expert_first;
    memset(first, 0, sizeof *first * (size_t)(d->expert_count + 1));
    for (int64_t t = 0; t < tokens; t++) {
        int32_t chosen = 0;
        for (int32_t e = 0; e < d->expert_count; e++) {
            int64_t at = t * d->expert_count + e;
            if (!mask[at]) continue;
            if (weights[at] != weights[at])
                return fail(&s->error, DSR1_ERROR_ROUTER, "%s: the router gives expert %d a weight that is not a number (row %lld)",
                            name, e, (long long)t);
            if (chosen < d->top_k) slot_weights[t * d->top_k + chosen] = weights[at];
            chosen++;
            first[e + 1]++;
        }
        if (chosen != d->top_k)
            return fail(&s->error, DSR1_ERROR_ROUTER,
                        "%s: the router chose %d experts instead of %d (row %lld); its scores are not all numbers", name, chosen,
                        d->top_k, (long long)t);
    }
    for (int32_t e = 0; e < d->expert_count; e++) first[e + 1] += first[e];
    for (int64_t t = 0; t < tokens; t++)
        for (int32_t e = 0, j = 0; e < d->expert_count; e++)
            if (mask[t * d->expert_count + e]) s->chosen_slots[first[e]++] = (int32_t)(t * d->top_k + j++);
    /* The fill moved each start to the next one's place. */
    memmove(first + 1, first, sizeof *first * (size_t)d->expert_count);
    first[0] = 0;
    return DSR1_OK;
}

/* Run the list and copy each expert's rows, unless they are in place, to their slots. */
static void run_and_scatter(dsr1_session *s, const dsr1_dispatch *d, int32_t count, int64_t tokens) {
    size_t row = (size_t)d->hidden * sizeof(float);
    char *slots = s->addresses[d->slots];
    run_calls(s, count);
    for (int32_t i = 0; i < count; i++) {
        const kernel_call *call = &s->calls[i];
        int32_t e = s->call_experts[i];
        int64_t rows = s->expert_first[e + 1] - s->expert_first[e];
        const int32_t *to = &s->chosen_slots[s->expert_first[e]];
        if (!copy_bytes(d, tokens, variant_rows(call->variant, rows))) continue;
        const dsr1_kernel *kernel = &dsr1_the_program.kernels[d->experts[e].kernel];
        const char *output = call->buffers[kernel->argument_count - 1];
        for (int64_t r = 0; r < rows; r++) memcpy(slots + (size_t)to[r] * row, output + (size_t)r * row, row);
    }
}

int run_dispatch(dsr1_session *s, const char *name, const dsr1_dispatch *d, const int64_t run_dims[DSR1_DIM_COUNT]) {
    int64_t tokens = run_dims[DSR1_DIM_TOKENS];
    size_t row = (size_t)d->hidden * sizeof(float);
    char *x = s->addresses[d->input];
    char *at = s->scratch.address, *limit = at + s->scratch.bytes;
    int code = group_tokens(s, name, d, tokens);
    if (code) return code;
    int32_t count = 0;
    for (int32_t e = 0; e < d->expert_count; e++) {
        int64_t rows = s->expert_first[e + 1] - s->expert_first[e];
        if (!rows) continue;
        const int32_t *from = &s->chosen_slots[s->expert_first[e]];
        const dsr1_kernel *kernel = &dsr1_the_program.kernels[d->experts[e].kernel];
        const dsr1_variant *variant = choose_variant(kernel, rows);
        if (!variant)
            return fail(&s->error, DSR1_ERROR_BUNDLE, "%s: no variant of the experts' kernel for %lld tokens", name, (long long)rows);
        int64_t computed = variant_rows(variant, rows);
        int64_t dims[DSR1_DIM_COUNT] = {rows, run_dims[DSR1_DIM_PAST], run_dims[DSR1_DIM_CONTEXT]};
        kernel_call *call = &s->calls[count];
        plan_call(call, variant, dims);
        int64_t copy = copy_bytes(d, tokens, computed), bytes = 2 * copy + align_up(call->bytes[0]);
        if (count && bytes > limit - at) {
            run_and_scatter(s, d, count, tokens);
            s->calls[0] = *call;
            call = &s->calls[count = 0];
            at = s->scratch.address;
        }
        char *input = copy ? at : x;
        char *output = copy ? at + copy : (char *)s->addresses[d->slots] + (size_t)from[0] * row;
        call->scratch = at + 2 * copy;
        at += bytes;
        if (copy) {
            for (int64_t r = 0; r < rows; r++) memcpy(input + (size_t)r * row, x + (size_t)(from[r] / d->top_k) * row, row);
            memset(input + (size_t)rows * row, 0, (size_t)(computed - rows) * row);
        }
        const int32_t *weights = &dsr1_the_program.arguments[d->experts[e].first_weight];
        int32_t last = kernel->argument_count - 1;
        call->buffers[0] = input;
        for (int32_t w = 1; w < last; w++) call->buffers[w] = s->addresses[weights[w - 1]];
        call->buffers[last] = output;
        s->call_experts[count++] = e;
    }
    run_and_scatter(s, d, count, tokens);
    return DSR1_OK;
}
