/* execute.c: the steps of a mode, one after the other. */
#include "internal.h"

#include <string.h>

const dsr1_variant *choose_variant(const dsr1_kernel *kernel, int64_t tokens) {
    for (int32_t i = 0; i < kernel->variant_count; i++) {
        const dsr1_variant *v = &kernel->variants[i];
        if (v->guard == DSR1_GUARD_RANGE) return v;
        if (v->guard == DSR1_GUARD_EXACT ? tokens == v->tokens : tokens <= v->tokens) return v;
    }
    return NULL;
}

int64_t variant_rows(const dsr1_variant *variant, int64_t tokens) {
    return variant->guard == DSR1_GUARD_RANGE ? tokens : variant->tokens;
}

void plan_call(kernel_call *call, const dsr1_variant *variant, const int64_t run_dims[DSR1_DIM_COUNT]) {
    call->variant = variant;
    for (int i = 0; i < variant->dim_count; i++) call->dims[i] = run_dims[variant->dims[i]];
    variant->plan(call->dims, call->items, call->bytes);
}

void run_calls(dsr1_session *s, int32_t count) {
    int last_wave = 0;
    for (int wave = 0; wave <= last_wave; wave++) {
        int64_t jobs = 0;
        for (int32_t i = 0; i < count; i++) {
            kernel_call *call = &s->calls[i];
            for (int32_t p = 0; p < call->variant->phase_count; p++) {
                if (call->variant->waves[p] > last_wave) last_wave = call->variant->waves[p];
                if (call->variant->waves[p] != wave) continue;
                s->jobs[jobs++] = (job){call->variant->phases[p], call->buffers, call->dims, call->scratch, call->items[p], 0};
            }
        }
        pool_run(s->pool, s->jobs, jobs);
    }
}

/* The number of the first buffer of a mode. */
static int32_t first_buffer(int mode) {
    const dsr1_program *program = &dsr1_the_program;
    int32_t first = program->weight_count + program->state_count;
    return mode == DSR1_MODE_PREFILL ? first : first + program->modes[DSR1_MODE_PREFILL].buffer_count;
}

/* What one token takes in a tensor; 0 for weights, states and values that do not grow with the tokens. */
static int64_t row_bytes(const dsr1_mode *mode, int32_t first, int32_t tensor) {
    return tensor < first ? 0 : mode->buffers[tensor - first].row_bytes;
}

static int run_kernel(dsr1_session *s, int mode_number, const dsr1_step *step, const int64_t run_dims[DSR1_DIM_COUNT]) {
    const dsr1_program *program = &dsr1_the_program;
    const dsr1_mode *mode = &program->modes[mode_number];
    const dsr1_kernel *kernel = &program->kernels[step->kernel];
    const int32_t *arguments = &program->arguments[step->first_argument];
    int64_t tokens = run_dims[DSR1_DIM_TOKENS];
    const dsr1_variant *variant = choose_variant(kernel, tokens);
    if (!variant) return fail(&s->error, DSR1_ERROR_BUNDLE, "%s: no variant for %lld tokens", step->name, (long long)tokens);
    kernel_call *call = &s->calls[0];
    plan_call(call, variant, run_dims);
    call->scratch = s->scratch.address;
    for (int32_t i = 0; i < kernel->argument_count; i++) call->buffers[i] = s->addresses[arguments[i]];
    /* Rows behind the last token are read by a padded variant. The arena has room for them in every buffer. */
    int64_t padding = variant_rows(variant, tokens) - tokens;
    for (int32_t i = 0; padding && i < kernel->input_count; i++) {
        int64_t row = row_bytes(mode, first_buffer(mode_number), arguments[i]);
        memset((char *)call->buffers[i] + tokens * row, 0, (size_t)(padding * row));
    }
    run_calls(s, 1);
    return DSR1_OK;
}

/* Move the last token's row to the front of every input of the head, which then computes one row. */
static void keep_last_row(dsr1_session *s, int mode_number, const dsr1_step *head, int64_t tokens) {
    const dsr1_program *program = &dsr1_the_program;
    const dsr1_kernel *kernel = &program->kernels[head->kernel];
    const int32_t *arguments = &program->arguments[head->first_argument];
    for (int32_t i = 0; i < kernel->input_count; i++) {
        int64_t row = row_bytes(&program->modes[mode_number], first_buffer(mode_number), arguments[i]);
        char *at = s->addresses[arguments[i]];
        memmove(at, at + (tokens - 1) * row, (size_t)row);
    }
}

int run_mode(dsr1_session *s, int mode_number, int64_t tokens, int64_t past, logits_rows rows) {
    const dsr1_mode *mode = &dsr1_the_program.modes[mode_number];
    int64_t run_dims[DSR1_DIM_COUNT] = {tokens, past, s->context};
    int32_t head = mode->step_count - 1;
    for (int32_t i = 0; i < mode->step_count; i++) {
        const dsr1_step *step = &mode->steps[i];
        if (i == head && rows == LOGITS_NONE) break;
        if (i == head && rows == LOGITS_LAST && tokens > 1) {
            keep_last_row(s, mode_number, step, tokens);
            run_dims[DSR1_DIM_TOKENS] = 1;
        }
        int code = step->kernel < 0 ? run_dispatch(s, step->name, step->dispatch, run_dims)
                                    : run_kernel(s, mode_number, step, run_dims);
        if (code) return code;
    }
    return DSR1_OK;
}

void largest_sizes(int64_t context, int64_t *scratch, int64_t *local) {
    const dsr1_program *program = &dsr1_the_program;
    *scratch = *local = 0;
    for (int m = 0; m < DSR1_MODE_COUNT; m++) {
        const dsr1_mode *mode = &program->modes[m];
        int64_t tokens = m == DSR1_MODE_PREFILL ? program->chunk : 1;
        /* Sizes are monotone in the dims, so the largest value of each bounds every run. */
        int64_t run_dims[DSR1_DIM_COUNT] = {tokens, context - 1, context};
        for (int32_t i = 0; i < mode->step_count; i++) {
            const dsr1_step *step = &mode->steps[i];
            if (step->kernel < 0) {
                int64_t shared, own;
                dispatch_sizes(step->dispatch, tokens, context, &shared, &own);
                if (shared > *scratch) *scratch = shared;
                if (own > *local) *local = own;
                continue;
            }
            const dsr1_kernel *kernel = &program->kernels[step->kernel];
            for (int32_t v = 0; v < kernel->variant_count; v++) {
                kernel_call call;
                plan_call(&call, &kernel->variants[v], run_dims);
                if (call.bytes[0] > *scratch) *scratch = call.bytes[0];
                if (call.bytes[1] > *local) *local = call.bytes[1];
            }
        }
    }
}
