/* generate.c: greedy generation from a bundle of dsr1build, without Python.
 *
 *     B=$PWD/dist/r1-mini/x86-64-v3
 *     cc -O2 -I "$B/include" examples/c/generate.c \
 *         -L "$B" -l:"$(cd "$B" && echo model-*.so)" -Wl,-rpath,"$B" -lpthread -o generate
 *     ./generate "$B" 16 1 2 3          # 16 new tokens after the tokens 1 2 3
 */
#include "dsr1.h"

#include <stdio.h>
#include <stdlib.h>

/* The most likely token; ties go to the lowest id. */
static int32_t most_likely(const float *logits, int64_t vocabulary) {
    int32_t best = 0;
    for (int32_t id = 1; id < vocabulary; id++)
        if (logits[id] > logits[best]) best = id;
    return best;
}

static int failed(dsr1_session *session) {
    fprintf(stderr, "error: %s\n", dsr1_error(session));
    dsr1_close(session);
    return 1;
}

int main(int count, char **words) {
    if (count < 4) {
        fprintf(stderr, "usage: %s BUNDLE MAX_NEW ID [ID ...]\n", words[0]);
        return 2;
    }
    char message[DSR1_MESSAGE_BYTES];
    dsr1_session *session;
    if (dsr1_open(words[1], 0, &session, message, sizeof message)) {
        fprintf(stderr, "error: %s\n", message);
        return 1;
    }
    int prompt = count - 3;
    int32_t *ids = malloc(sizeof *ids * (size_t)prompt);
    if (!ids) {
        dsr1_close(session);
        return 1;
    }
    for (int i = 0; i < prompt; i++) ids[i] = (int32_t)strtol(words[i + 3], NULL, 10);
    int code = dsr1_prefill(session, ids, prompt, NULL);
    free(ids);
    if (code) return failed(session);
    long left = strtol(words[2], NULL, 10);
    while (left-- > 0) {
        int32_t id = most_likely(dsr1_logits(session), dsr1_vocabulary(session));
        printf("%d\n", id);
        if (left > 0 && dsr1_decode(session, id)) return failed(session);
    }
    dsr1_close(session);
    return 0;
}
