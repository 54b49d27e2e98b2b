/* weights.c: weights.bind, and the files that it names, mapped into memory.
 *
 * weights.bind is little-endian, every field at a multiple of its size. dsr1build/link/binding.py writes it:
 *
 *     header   char magic[8] = "DSR1BIND"
 *              u32 version = 1, u32 file_count, u32 tensor_count, u32 string_bytes
 *              i64 context
 *              u8 program[32]            digest of the program that it was made for
 *              u32 library, u32 zero     the shared object's file name
 *     files    file_count   x { u32 name, u32 zero, u64 bytes }
 *     tensors  tensor_count x { u32 name, u32 file, u32 dtype, u32 rank, u64 offset, u64 length, i64 shape[4] }
 *     strings  string_bytes bytes of NUL-terminated UTF-8; the last one is 0
 *
 * Names are offsets into the strings; file names are relative to the bundle directory. Tensors stand in the order of the
 * program's weights; `offset` is the first byte in the file, at any alignment; unused shape entries are 0.
 */
#define _GNU_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    char magic[8];
    uint32_t version, file_count, tensor_count, string_bytes;
    int64_t context;
    uint8_t program[32];
    uint32_t library, zero;
} bind_header;

typedef struct {
    uint32_t name, zero;
    uint64_t bytes;
} bind_file;

typedef struct {
    uint32_t name, file, dtype, rank;
    uint64_t offset, length;
    int64_t shape[DSR1_MAX_RANK];
} bind_tensor;

_Static_assert(sizeof(bind_header) == 72 && sizeof(bind_file) == 16 && sizeof(bind_tensor) == 64, "the format has no gaps");

int map_memory(mapping *m, int64_t bytes, const char *what, message *error) {
    m->bytes = bytes > 0 ? bytes : 1;
    m->address = mmap(NULL, (size_t)m->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m->address != MAP_FAILED) return DSR1_OK;
    m->address = NULL;
    return fail(error, DSR1_ERROR_SYSTEM, "cannot get %lld bytes for %s: %s", (long long)bytes, what, strerror(errno));
}

void unmap(mapping *m) {
    if (m->address) munmap(m->address, (size_t)m->bytes);
    m->address = NULL;
}

static int map_file(mapping *m, const char *directory, const char *name, message *error) {
    char path[PATH_MAX];
    int length = snprintf(path, sizeof path, "%s/%s", directory, name);
    if (length < 0 || length >= (int)sizeof path) return fail(error, DSR1_ERROR_BUNDLE, "%s: the path is too long", name);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return fail(error, DSR1_ERROR_BUNDLE, "cannot open %s: %s", path, strerror(errno));
    struct stat status;
    int code = DSR1_OK;
    if (fstat(file, &status)) {
        code = fail(error, DSR1_ERROR_BUNDLE, "cannot read %s: %s", path, strerror(errno));
    } else if (!S_ISREG(status.st_mode) || status.st_size == 0) {
        code = fail(error, DSR1_ERROR_BUNDLE, "%s is empty or not a file", path);
    } else {
        m->bytes = (int64_t)status.st_size;
        m->address = mmap(NULL, (size_t)m->bytes, PROT_READ, MAP_PRIVATE, file, 0);
        if (m->address == MAP_FAILED) {
            m->address = NULL;
            code = fail(error, DSR1_ERROR_SYSTEM, "cannot map %s: %s", path, strerror(errno));
        }
    }
    close(file);
    return code;
}

/* Check the header and that the tables and strings fill the file exactly. */
static int check_header(const mapping *m, const bind_header *h, message *error) {
    const dsr1_program *program = &dsr1_the_program;
    if (m->bytes < (int64_t)sizeof *h || memcmp(h->magic, "DSR1BIND", 8))
        return fail(error, DSR1_ERROR_BUNDLE, "weights.bind is not a binding file");
    if (h->version != 1) return fail(error, DSR1_ERROR_BUNDLE, "weights.bind has version %u, this runtime reads version 1", h->version);
    if (memcmp(h->program, program->digest, sizeof h->program))
        return fail(error, DSR1_ERROR_BUNDLE, "weights.bind belongs to another program than the shared object; build the bundle again");
    uint64_t bytes = sizeof *h + sizeof(bind_file) * (uint64_t)h->file_count + sizeof(bind_tensor) * (uint64_t)h->tensor_count +
                     h->string_bytes;
    const char *strings = (const char *)h + bytes - h->string_bytes;
    if (bytes != (uint64_t)m->bytes || h->string_bytes == 0 || strings[h->string_bytes - 1])
        return fail(error, DSR1_ERROR_BUNDLE, "weights.bind is damaged: %lld bytes instead of %llu", (long long)m->bytes,
                    (unsigned long long)bytes);
    if (h->tensor_count != (uint32_t)program->weight_count)
        return fail(error, DSR1_ERROR_BUNDLE, "weights.bind has %u tensors, the program has %d", h->tensor_count, program->weight_count);
    /* No model's context is longer, and sizes that grow with it must not overflow. */
    if (h->context < 1 || h->context > INT32_MAX)
        return fail(error, DSR1_ERROR_BUNDLE, "weights.bind has a context of %lld tokens", (long long)h->context);
    return DSR1_OK;
}

/* Check one tensor against the type that the kernels were compiled for. */
static int check_tensor(const bind_header *h, const bind_file *files, const bind_tensor *t, const char *name,
                        const dsr1_tensor_type *type, message *error) {
    bool fits = t->dtype == (uint32_t)type->dtype && t->rank == (uint32_t)type->rank && t->file < h->file_count;
    uint64_t length = (uint64_t)type->item_bytes;
    for (int32_t i = 0; i < type->rank; i++) {
        int64_t extent = type->shape[i] == DSR1_CONTEXT_EXTENT ? h->context : type->shape[i];
        fits = fits && t->shape[i] == extent;
        length *= (uint64_t)extent;
    }
    if (!fits || t->length != length)
        return fail(error, DSR1_ERROR_BUNDLE, "weights.bind: tensor %s has another type than the program takes", name);
    if (t->offset > files[t->file].bytes || t->length > files[t->file].bytes - t->offset)
        return fail(error, DSR1_ERROR_BUNDLE, "weights.bind: tensor %s lies outside its file", name);
    return DSR1_OK;
}

static int bind_all(weights *w, const char *directory, const bind_header *h, void **addresses, message *error) {
    const dsr1_program *program = &dsr1_the_program;
    const bind_file *files = (const bind_file *)(h + 1);
    const bind_tensor *tensors = (const bind_tensor *)(files + h->file_count);
    const char *strings = (const char *)(tensors + h->tensor_count);
    w->files = calloc(h->file_count ? h->file_count : 1, sizeof *w->files);
    if (!w->files) return fail(error, DSR1_ERROR_SYSTEM, "no memory for the list of files");
    w->context = h->context;
    for (uint32_t i = 0; i < h->file_count; i++) {
        if (files[i].name >= h->string_bytes) return fail(error, DSR1_ERROR_BUNDLE, "weights.bind: file %u has no name", i);
        const char *name = strings + files[i].name;
        int code = map_file(&w->files[i], directory, name, error);
        if (code) return code;
        w->file_count = (int32_t)i + 1;
        if ((uint64_t)w->files[i].bytes != files[i].bytes)
            return fail(error, DSR1_ERROR_BUNDLE, "%s has %lld bytes, the bundle was built with %llu; build the bundle again", name,
                        (long long)w->files[i].bytes, (unsigned long long)files[i].bytes);
    }
    for (uint32_t i = 0; i < h->tensor_count; i++) {
        if (tensors[i].name >= h->string_bytes) return fail(error, DSR1_ERROR_BUNDLE, "weights.bind: tensor %u has no name", i);
        const dsr1_tensor_type *type = &program->types[program->weight_types[i]];
        int code = check_tensor(h, files, &tensors[i], strings + tensors[i].name, type, error);
        if (code) return code;
        addresses[i] = (char *)w->files[tensors[i].file].address + tensors[i].offset;
    }
    return DSR1_OK;
}

int weights_open(weights *w, const char *directory, void **addresses, message *error) {
    mapping binding = {NULL, 0};
    int code = map_file(&binding, directory, "weights.bind", error);
    if (!code) code = check_header(&binding, binding.address, error);
    if (!code) code = bind_all(w, directory, binding.address, addresses, error);
    unmap(&binding);
    return code;
}

void weights_close(weights *w) {
    for (int32_t i = 0; i < w->file_count; i++) unmap(&w->files[i]);
    free(w->files);
    w->files = NULL;
    w->file_count = 0;
}
