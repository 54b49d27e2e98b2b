/* dsr1.h: run a compiled language model from C.
 *
 * A bundle is a directory made by `dsr1build build`. Its shared object (model-<digest>.so) exports the functions below;
 * it needs libc and nothing else.
 *
 *     char message[DSR1_MESSAGE_BYTES];
 *     dsr1_session *session;
 *     if (dsr1_open("dist/r1-mini/x86-64-v3", 0, &session, message, sizeof message)) { puts(message); return 1; }
 *     dsr1_prefill(session, ids, count, NULL);
 *     const float *logits = dsr1_logits(session);         // of the last token
 *     ...
 *     dsr1_close(session);
 *
 * A session is one sequence with its own KV cache. It may be used by one thread at a time; different sessions are
 * independent. No function prints, exits or aborts. Equal calls give equal bits, whatever the number of threads.
 */
#ifndef DSR1_H
#define DSR1_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Enough for every message of dsr1_open. A longer message is cut, never overrun. */
#define DSR1_MESSAGE_BYTES 512

typedef struct dsr1_session dsr1_session;

/* What a function returns: 0 or one of these. dsr1_error() has the text. */
enum {
    DSR1_OK = 0,
    DSR1_ERROR_ARGUMENT = 1, /* a null pointer, no tokens, a number of threads that cannot be */
    DSR1_ERROR_TOKEN = 2,    /* a token id outside [0, vocabulary) */
    DSR1_ERROR_CONTEXT = 3,  /* the tokens do not fit behind the position */
    DSR1_ERROR_ROUTER = 4,   /* a router's scores are not numbers, so no experts can be chosen */
    DSR1_ERROR_BUNDLE = 5,   /* a file of the bundle is missing, damaged or of another build */
    DSR1_ERROR_CPU = 6,      /* this CPU lacks a feature that the code was compiled for */
    DSR1_ERROR_SYSTEM = 7    /* the operating system gave no memory, no thread or no file */
};

/* Open the bundle in `bundle_directory` and start `threads` threads, the caller's among them; 0 means one for each CPU
 * that this process may run on. On success *out is the session. On failure *out is NULL and `message`, which may be NULL
 * and has room for `message_size` bytes, says what is wrong. */
int dsr1_open(const char *bundle_directory, int threads, dsr1_session **out, char *message, size_t message_size);

/* Append `count` tokens at the position. `logits` is NULL or has room for count * vocabulary floats, one row for each
 * token; with NULL only the last token's row is computed, which is faster. After an error nothing was appended: the
 * position and dsr1_logits() are as before, and the session can be used on. */
int dsr1_prefill(dsr1_session *session, const int32_t *ids, int64_t count, float *logits);

/* Append one token. The same as a prefill of one token, up to rounding, by code that is made for this case. */
int dsr1_decode(dsr1_session *session, int32_t id);

/* The logits of the last token, `vocabulary` floats, valid until the next call on this session; NULL when no token was
 * appended since the session was opened or reset. */
const float *dsr1_logits(const dsr1_session *session);

/* Forget all tokens. */
int dsr1_reset(dsr1_session *session);

/* Stop the threads and free everything. NULL is allowed. */
void dsr1_close(dsr1_session *session);

int64_t dsr1_position(const dsr1_session *session);   /* tokens appended so far */
int64_t dsr1_context(const dsr1_session *session);    /* the largest position */
int64_t dsr1_vocabulary(const dsr1_session *session); /* the number of token ids */
int dsr1_threads(const dsr1_session *session);        /* threads in use, the caller's among them */

/* What went wrong in the last call on this session that failed; "" when none did. Valid until the next call. */
const char *dsr1_error(const dsr1_session *session);

#ifdef __cplusplus
}
#endif
#endif
