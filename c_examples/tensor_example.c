#include "tensor_example.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

int64_t rank;

static int64_t ranks;
static railhead_store_t *store, *keys;

void die(const char *format, ...)
{
    va_list arguments;
    (void)fprintf(stderr, "worker %" PRId64 ": ", rank);
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

size_t number(const char *option, const char *text)
{
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != '\0' || value == 0 || value > (1ull << 28))
        die("--%s %s: expected a number from 1 to %llu", option, text, 1ull << 28);
    return (size_t)value;
}

const char *key_of(char *key, int64_t from, int64_t to, const char *edge)
{
    char source[80], destination[80];
    size_t len = KEY;
    (void)snprintf(source, sizeof source, "%s/device:CPU:0", workers[from]);
    (void)snprintf(destination, sizeof destination, "%s/device:CPU:0", workers[to]);
    check("key_create", railhead_tensor_key_create(source, 1, destination, edge, 0, 0, key, &len));
    return key;
}

railhead_tensor_manager_t *meet(const char *url, const char *device, uint64_t mode, int64_t count)
{
    check("rendezvous", railhead_rendezvous(url, -1, -1, TIMEOUT_MS, &store, &rank, &ranks));
    if (ranks != count)
        die("there are %" PRId64 " workers; expected %" PRId64, ranks, count);
    check("prefix", railhead_store_prefix("tensor_example", store, &keys));
    railhead_tensor_manager_t *manager;
    railhead_tensor_config_t config = {.size = sizeof config, .worker = workers[rank], .workers = workers, .count = (size_t)count};
    config.timeout_ms = TIMEOUT_MS;
    config.mode = mode;
    check("create", railhead_tensor_manager_create(&config, device, &manager));
    check("connect", railhead_tensor_manager_connect(manager, keys));
    return manager;
}

void leave(railhead_tensor_manager_t *manager)
{
    /* Nobody goes while others may still ask. */
    check("barrier", railhead_store_barrier(keys, "end", ranks, TIMEOUT_MS));
    check("close", railhead_tensor_manager_close(manager));
    check("barrier", railhead_store_barrier(keys, "closed", ranks, TIMEOUT_MS));
    check("close", railhead_store_close(keys));
    check("close", railhead_store_close(store));
}
