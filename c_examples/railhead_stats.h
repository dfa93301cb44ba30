/* Reads the caller's own Railhead stats page, if the loaded plugin keeps one: by which path did bytes leave and arrive? */
#ifndef C_EXAMPLES_RAILHEAD_STATS_H
#define C_EXAMPLES_RAILHEAD_STATS_H

#include <stddef.h>
#include <stdint.h>

enum { RAILHEAD_PATHS = 6 };

struct railhead_traffic {
    uint64_t sent[RAILHEAD_PATHS], received[RAILHEAD_PATHS]; /* bytes, by path */
};

/* Sums over all rails of the comms that are open. Returns 0, or -1 if there is no page of a known version. */
int railhead_traffic(struct railhead_traffic *traffic);

/* Writes "cross-memory 123 bytes, inline 4 bytes" for what is not 0. */
void railhead_describe(const uint64_t *bytes, char *text, size_t text_size);

#endif
