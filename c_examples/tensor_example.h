/* What the examples of tensors share: workers that meet by a URL, keys, options, and failures. */
#ifndef TENSOR_EXAMPLE_H
#define TENSOR_EXAMPLE_H

#include "../include/railhead.h"

#include <inttypes.h>
#include <stddef.h>

/* TIMEOUT_MS: for everything that waits. KEY: the bytes of a key, with the 0. */
enum { TIMEOUT_MS = 60000, KEY = 513 };

/* The program's workers by their names; and which one this process is, once they have met. */
extern const char *const workers[];
extern int64_t rank;

/* Prints what went wrong, with the rank, and exits. */
_Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Dies unless a call succeeded. */
void check(const char *what, railhead_status_t status);

/* The value of an option: 1 to 2^28. */
size_t number(const char *option, const char *text);

/* The key of what one worker has for another, in KEY bytes, which it returns. */
const char *key_of(char *key, int64_t from, int64_t to, const char *edge);

/* Meets the others, so many workers in all, at the URL (NULL: env://), connects to them on the device (NULL: the first) in this mode, and leaves when all have come
 * to an end. */
railhead_tensor_manager_t *meet(const char *url, const char *device, uint64_t mode, int64_t count);
void leave(railhead_tensor_manager_t *manager);

#endif
