/* program.h: a compiled model as data.
 *
 * The link step writes one C file that defines `dsr1_the_program`; the runtime interprets it. Nothing in it depends on
 * where the weights lie or on the context length: those come from the bundle's weights.bind when a session is opened.
 *
 * Tensors are known by one number: weights first, then states, then the buffers of the prefill mode, then the buffers of
 * the decode mode.
 */
#ifndef DSR1_PROGRAM_H
#define DSR1_PROGRAM_H

#include <stdint.h>

#define DSR1_ABI 1

enum { DSR1_DIM_TOKENS, DSR1_DIM_PAST, DSR1_DIM_CONTEXT, DSR1_DIM_COUNT };
enum { DSR1_GUARD_EXACT, DSR1_GUARD_PADDED, DSR1_GUARD_RANGE };
enum { DSR1_MODE_PREFILL, DSR1_MODE_DECODE, DSR1_MODE_COUNT };
enum { DSR1_MAX_ARGUMENTS = 48, DSR1_MAX_PHASES = 64, DSR1_MAX_RANK = 4 };
enum { DSR1_ALIGNMENT = 64 };

/* A shape entry that is the context length. */
#define DSR1_CONTEXT_EXTENT (-1)

/* One phase of a kernel over its items [lo, hi): see "Kernel ABI" in docs/architecture.md. */
typedef void (*dsr1_phase)(void *const *buffers, const int64_t *dims, void *scratch, void *local, int64_t lo, int64_t hi);
/* items[phase] and bytes = {scratch, local}, monotone in the dims. */
typedef void (*dsr1_plan)(const int64_t *dims, int64_t *items, int64_t *bytes);

typedef struct {
    const dsr1_phase *phases;
    const int8_t *waves; /* of each phase; phases of equal wave may run side by side */
    dsr1_plan plan;
    int64_t tokens; /* what `guard` binds; 0 for a range */
    int32_t phase_count;
    int8_t guard;
    int8_t dim_count;
    int8_t dims[DSR1_DIM_COUNT]; /* which run-time dimensions the code takes, in order */
} dsr1_variant;

/* Variants are sorted from the tightest guard to the loosest. Inputs stand first among the arguments. */
typedef struct {
    const char *id;
    const dsr1_variant *variants;
    int32_t variant_count, argument_count, input_count;
} dsr1_kernel;

typedef struct {
    int32_t dtype; /* its number in weights.bind */
    int32_t item_bytes;
    int32_t rank;
    int64_t shape[DSR1_MAX_RANK];
} dsr1_tensor_type;

/* A value in the arena. `row_bytes` is what one token takes; 0 when the size does not depend on the tokens. */
typedef struct {
    int64_t offset, row_bytes;
} dsr1_buffer;

/* One routed expert: its kernel (input, weights, output) and where the numbers of its weights start in `arguments`. */
typedef struct {
    int32_t kernel, first_weight;
} dsr1_expert;

/* The routed experts of one layer. For each token, in order of expert id, the j-th expert with a non-zero mask writes
 * slots[token][j]; its routing weight goes to slot_weights[token][j]. */
typedef struct {
    int32_t input, weights, mask, slots, slot_weights; /* tensor numbers */
    int32_t expert_count, top_k;
    int64_t hidden;
    const dsr1_expert *experts;
} dsr1_dispatch;

/* A kernel call, or with kernel < 0 a dispatch of experts. */
typedef struct {
    const char *name; /* of the partition, for messages */
    int32_t kernel, first_argument;
    const dsr1_dispatch *dispatch;
} dsr1_step;

/* The last step is the head: it alone writes the logits, and it is row-independent. */
typedef struct {
    int64_t rows; /* tokens that the arena has room for, padding included */
    const dsr1_buffer *buffers;
    const dsr1_step *steps;
    int32_t buffer_count, step_count, ids, logits;
} dsr1_mode;

typedef struct {
    uint32_t abi;
    uint8_t digest[32];   /* names the program; weights.bind carries the same */
    const char *features; /* required CPU features as /proc/cpuinfo spells them, separated by blanks */
    int64_t chunk;        /* most tokens in one run of the prefill mode */
    int64_t vocabulary, arena_bytes;
    const dsr1_kernel *kernels;
    const dsr1_tensor_type *types;
    const int32_t *weight_types, *state_types; /* index into `types` for each weight and each state */
    const int32_t *arguments;                  /* tensor numbers of all steps and experts */
    int32_t kernel_count, weight_count, state_count;
    dsr1_mode modes[DSR1_MODE_COUNT];
} dsr1_program;

extern const dsr1_program dsr1_the_program;

#endif
