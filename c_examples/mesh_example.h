/* What the examples of meshes share: ranks that meet by a URL, options, and failures. */
#ifndef MESH_EXAMPLE_H
#define MESH_EXAMPLE_H

#include "../include/railhead.h"

#include <inttypes.h>
#include <stddef.h>

/* This process and how many there are, once they have met. */
extern int64_t rank, ranks;

/* Prints what went wrong, with the rank, and exits. */
_Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Dies unless a call succeeded. */
void check(const char *what, railhead_status_t status);

/* By the monotonic clock. */
double seconds(void);

/* The value of an option: 1 to 2^30. */
size_t number(const char *option, const char *text);

/* Meets the others at the URL (NULL: env://), connects to all of them on the device (NULL: the first), and leaves when all have come to an end. */
railhead_mesh_t *meet(const char *url, const char *device);
void leave(railhead_mesh_t *mesh);

#endif
