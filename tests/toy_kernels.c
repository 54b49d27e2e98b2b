/* toy_kernels.c: hand-written kernels of the toy model (toy_model.py), for tests of the runtime and the link.
 *
 * They follow the kernel ABI in full: phases and waves, scratch, local memory, ranges of items. Each is written once
 * over `tokens` and instantiated for constants and for the run-time dimension.
 */
#include <stdint.h>
#include <string.h>

enum { VOCABULARY = 19, HIDDEN = 20, EXPERTS = 6, TOP_K = 2 };

static float value(const void *tensor, int64_t at) { /* weights may lie at any address */
    float out;
    memcpy(&out, (const char *)tensor + 4 * at, 4);
    return out;
}

static float dot(const float *x, const void *w, int64_t row) {
    float sum = 0.0f;
    for (int64_t k = 0; k < HIDDEN; k++) sum += x[k] * value(w, row * HIDDEN + k);
    return sum;
}

#define ARGS void *const *bufs, const int64_t *dims, void *scratch, void *local, int64_t lo, int64_t hi
#define UNUSED (void)bufs, (void)dims, (void)scratch, (void)local

/* embedding: ids i64 [T], table [V, H] -> x [T, H]; one item a token */
#define EMBEDDING(S, TOKENS)                                                                          \
    void S##__p0(ARGS) {                                                                              \
        UNUSED;                                                                                       \
        for (int64_t t = lo; t < hi; t++)                                                             \
            for (int64_t h = 0; h < HIDDEN; h++)                                                      \
                ((float *)bufs[2])[t * HIDDEN + h] = value(bufs[1], ((int64_t *)bufs[0])[t] * HIDDEN + h); \
    }                                                                                                 \
    void S##__plan(const int64_t *dims, int64_t *items, int64_t *bytes) {                             \
        (void)dims;                                                                                   \
        items[0] = TOKENS;                                                                            \
        bytes[0] = bytes[1] = 0;                                                                      \
    }
EMBEDDING(toy_embedding_range, dims[0])
EMBEDDING(toy_embedding_1, 1)

/* attention: x [T, H], bias [C, H], state [C, H] -> y [T, H] = x + bias[P + t] + mean of state rows 0 .. P + t.
 * Dims are tokens, past. Wave 0 inserts rows and squares x into scratch, wave 1 reads both; y adds 0 * square. */
void toy_attention__p0(ARGS) {
    UNUSED;
    for (int64_t t = lo; t < hi; t++)
        memcpy((float *)bufs[2] + (dims[1] + t) * HIDDEN, (float *)bufs[0] + t * HIDDEN, 4 * HIDDEN);
}
void toy_attention__p1(ARGS) {
    UNUSED;
    for (int64_t i = lo; i < hi; i++) ((float *)scratch)[i] = ((float *)bufs[0])[i] * ((float *)bufs[0])[i];
}
void toy_attention__p2(ARGS) {
    UNUSED;
    float *sum = local;
    for (int64_t i = lo; i < hi; i++) {
        int64_t t = i / HIDDEN, h = i % HIDDEN, rows = dims[1] + t + 1;
        sum[0] = 0.0f;
        for (int64_t r = 0; r < rows; r++) sum[0] += ((float *)bufs[2])[r * HIDDEN + h];
        ((float *)bufs[3])[i] =
            ((float *)bufs[0])[i] + value(bufs[1], (rows - 1) * HIDDEN + h) + sum[0] / (float)rows + 0.0f * ((float *)scratch)[i];
    }
}
void toy_attention__plan(const int64_t *dims, int64_t *items, int64_t *bytes) {
    items[0] = dims[0];
    items[1] = items[2] = dims[0] * HIDDEN;
    bytes[0] = dims[0] * HIDDEN * 4;
    bytes[1] = 4;
}

/* gating: x [T, H], w [E, H] -> weights [T, E], mask i32 [T, E]: the TOP_K largest scores, ties to the lower id */
void toy_gating__p0(ARGS) {
    UNUSED;
    for (int64_t i = lo; i < hi; i++)
        ((float *)bufs[2])[i] = dot((float *)bufs[0] + i / EXPERTS * HIDDEN, bufs[1], i % EXPERTS);
}
void toy_gating__p1(ARGS) {
    UNUSED;
    for (int64_t i = lo; i < hi; i++) {
        const float *s = (float *)bufs[2] + i / EXPERTS * EXPERTS;
        int64_t e = i % EXPERTS, rank = 0;
        for (int64_t j = 0; j < EXPERTS; j++) rank += s[j] > s[e] || (s[j] == s[e] && j < e);
        ((int32_t *)bufs[3])[i] = rank < TOP_K;
    }
}
void toy_gating__plan(const int64_t *dims, int64_t *items, int64_t *bytes) {
    items[0] = items[1] = dims[0] * EXPERTS;
    bytes[0] = bytes[1] = 0;
}

/* expert: x [T, H], w [H, H] -> y [T, H]; scratch holds 2 * x */
#define EXPERT(S, TOKENS)                                                                      \
    void S##__p0(ARGS) {                                                                       \
        UNUSED;                                                                                \
        for (int64_t i = lo; i < hi; i++) ((float *)scratch)[i] = 2.0f * ((float *)bufs[0])[i]; \
    }                                                                                          \
    void S##__p1(ARGS) {                                                                       \
        UNUSED;                                                                                \
        for (int64_t i = lo; i < hi; i++)                                                      \
            ((float *)bufs[2])[i] = dot((float *)scratch + i / HIDDEN * HIDDEN, bufs[1], i % HIDDEN); \
    }                                                                                          \
    void S##__plan(const int64_t *dims, int64_t *items, int64_t *bytes) {                      \
        (void)dims;                                                                            \
        items[0] = items[1] = (TOKENS) * HIDDEN;                                               \
        bytes[0] = (TOKENS) * HIDDEN * 4;                                                      \
        bytes[1] = 0;                                                                          \
    }
EXPERT(toy_expert_range, dims[0])
EXPERT(toy_expert_4, 4)
EXPERT(toy_expert_1, 1)

/* combine: residual [T, H], slots [T, K, H], slot_weights [T, K] -> y [T, H] */
void toy_combine__p0(ARGS) {
    UNUSED;
    for (int64_t i = lo; i < hi; i++) {
        int64_t t = i / HIDDEN;
        float sum = ((float *)bufs[0])[i];
        for (int64_t j = 0; j < TOP_K; j++)
            sum += ((float *)bufs[2])[t * TOP_K + j] * ((float *)bufs[1])[(t * TOP_K + j) * HIDDEN + i % HIDDEN];
        ((float *)bufs[3])[i] = sum;
    }
}
void toy_combine__plan(const int64_t *dims, int64_t *items, int64_t *bytes) {
    items[0] = dims[0] * HIDDEN;
    bytes[0] = bytes[1] = 0;
}

/* head: x [T, H], table [V, H] -> logits [T, V] */
#define HEAD(S, TOKENS)                                                                             \
    void S##__p0(ARGS) {                                                                            \
        UNUSED;                                                                                     \
        for (int64_t i = lo; i < hi; i++)                                                           \
            ((float *)bufs[2])[i] = dot((float *)bufs[0] + i / VOCABULARY * HIDDEN, bufs[1], i % VOCABULARY); \
    }                                                                                               \
    void S##__plan(const int64_t *dims, int64_t *items, int64_t *bytes) {                           \
        (void)dims;                                                                                 \
        items[0] = (TOKENS) * VOCABULARY;                                                           \
        bytes[0] = bytes[1] = 0;                                                                    \
    }
HEAD(toy_head_range, dims[0])
HEAD(toy_head_3, 3)
