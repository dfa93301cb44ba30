#include "mesh_example.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { TIMEOUT_MS = 60000 };

int64_t rank, ranks;

static railhead_store_t *store, *keys;

void die(const char *format, ...)
{
    va_list arguments;
    (void)fprintf(stderr, "rank %" PRId64 ": ", rank);
    va_start(arguments, format);
    (void)vfprintf(stderr, format, arguments);
    va_end(arguments);
    (void)fputc('\n', stderr);
    exit(EXIT_FAILURE);
}

void check(const char *what, railhead_status_t status)
{
    if (status != RAILHEAD_OK)
        die("%s: %s (%d)", what, railhead_last_error(), (int)status);
}

double seconds(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

size_t number(const char *option, const char *text)
{
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != '\0' || value == 0 || value > (1ull << 30))
        die("--%s %s: expected a number from 1 to %llu", option, text, 1ull << 30);
    return (size_t)value;
}

railhead_mesh_t *meet(const char *url, const char *device)
{
    /* The others are found through a store; a prefix keeps the mesh's keys apart from everybody else's. */
    check("rendezvous", railhead_rendezvous(url, -1, -1, TIMEOUT_MS, &store, &rank, &ranks));
    check("prefix", railhead_store_prefix("mesh_example", store, &keys));
    railhead_mesh_t *mesh;
    railhead_mesh_config_t config = {.size = sizeof config, .rank = rank, .ranks = ranks, .timeout_ms = TIMEOUT_MS};
    check("create", railhead_mesh_create(&config, device, &mesh));
    check("connect", railhead_mesh_connect(mesh, keys));
    return mesh;
}

void leave(railhead_mesh_t *mesh)
{
    /* Nobody leaves while others may still need the store. */
    check("barrier", railhead_barrier(mesh, NULL));
    check("close", railhead_mesh_close(mesh));
    check("close", railhead_store_close(keys));
    check("close", railhead_store_close(store));
}
