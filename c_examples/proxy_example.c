#define _POSIX_C_SOURCE 200809L
#include "proxy_example.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

void give_up(const char *what, const char *message)
{
    fprintf(stderr, "%s: %s\n", what, message);
    exit(1);
}

void must(const char *what, railhead_status_t status)
{
    if (status != RAILHEAD_OK)
        give_up(what, railhead_status_string(status));
}

double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

void wait_a_bit(const char *what, double since)
{
    if (seconds() - since > PATIENCE)
        give_up(what, "waited too long");
    sched_yield();
}

void put_bytes(int fd, const void *data, size_t bytes)
{
    const char *from = data;
    while (bytes > 0) {
        ssize_t n = write(fd, from, bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            give_up("write", strerror(errno));
        from += n;
        bytes -= (size_t)n;
    }
}

void take_bytes(int fd, void *data, size_t bytes)
{
    char *to = data;
    while (bytes > 0) {
        ssize_t n = read(fd, to, bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            give_up("read", n == 0 ? "the other process is gone" : strerror(errno));
        to += n;
        bytes -= (size_t)n;
    }
}

int end_of(const char *name, pid_t child)
{
    int status;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            give_up("waitpid", strerror(errno));
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return 0;
    if (WIFSIGNALED(status))
        fprintf(stderr, "%s: killed by signal %d\n", name, WTERMSIG(status));
    else
        fprintf(stderr, "%s: exit status %d\n", name, WEXITSTATUS(status));
    return 1;
}

unsigned char byte_of(uint64_t stream, uint64_t n, size_t at)
{
    return (unsigned char)(stream * 131 + n * 31 + at * 7 + at / 251);
}

void fill(unsigned char *to, uint64_t stream, uint64_t n, size_t bytes)
{
    for (size_t at = 0; at < bytes; at++)
        to[at] = byte_of(stream, n, at);
}

void check(const unsigned char *from, uint64_t stream, uint64_t n, size_t bytes)
{
    for (size_t at = 0; at < bytes; at++)
        if (from[at] != byte_of(stream, n, at)) {
            fprintf(stderr, "stream %llu, message %llu, byte %zu of %zu is %02x, not %02x\n", (unsigned long long)stream,
                    (unsigned long long)n, at, bytes, from[at], byte_of(stream, n, at));
            exit(1);
        }
}

railhead_connector_t *connect_through(railhead_proxy_t *proxy, int fd, const railhead_connector_config_t *config)
{
    uint64_t handle[16];
    double since = seconds();
    railhead_connector_t *connector;
    railhead_status_t status;
    take_bytes(fd, handle, sizeof handle);
    while ((status = railhead_proxy_connect(proxy, 0, handle, config, &connector)) == RAILHEAD_IN_PROGRESS)
        wait_a_bit("railhead_proxy_connect", since);
    must("railhead_proxy_connect", status);
    return connector;
}

railhead_connector_t *accept_through(railhead_proxy_t *proxy, int fd, const railhead_connector_config_t *config)
{
    uint64_t handle[16];
    double since = seconds();
    railhead_listener_t *listener;
    railhead_connector_t *connector;
    railhead_status_t status;
    must("railhead_proxy_listen", railhead_proxy_listen(proxy, 0, handle, &listener));
    put_bytes(fd, handle, sizeof handle);
    while ((status = railhead_listener_accept(listener, config, &connector)) == RAILHEAD_IN_PROGRESS)
        wait_a_bit("railhead_listener_accept", since);
    must("railhead_listener_accept", status);
    must("railhead_listener_close", railhead_listener_close(listener));
    return connector;
}

void append_steps(railhead_connector_t *connector, uint64_t steps)
{
    railhead_operation_t operation;
    memset(&operation, 0, sizeof operation);
    operation.size = sizeof operation;
    operation.steps = steps;
    operation.protocol = RAILHEAD_RING_SIMPLE;
    must("railhead_connector_append", railhead_connector_append(connector, &operation, NULL));
}

/* The ring of a connector, as this process sees it. */
static railhead_ring ring_of(railhead_connector_t *connector)
{
    railhead_ring_place_t place;
    railhead_ring ring;
    must("railhead_connector_ring", railhead_connector_ring(connector, &place));
    if (railhead_ring_open(&ring, place.control, place.mapped_bytes) != 0)
        give_up("railhead_ring_open", "this is no ring");
    return ring;
}

railhead_ring_producer producer_of(railhead_connector_t *connector)
{
    railhead_ring ring = ring_of(connector);
    railhead_ring_producer producer;
    if (railhead_ring_producer_init(&producer, &ring, RAILHEAD_RING_SIMPLE) != 0)
        give_up("railhead_ring_producer_init", "the ring has no SIMPLE slots");
    return producer;
}

railhead_ring_consumer consumer_of(railhead_connector_t *connector)
{
    railhead_ring ring = ring_of(connector);
    railhead_ring_consumer consumer;
    if (railhead_ring_consumer_init(&consumer, &ring, RAILHEAD_RING_SIMPLE) != 0)
        give_up("railhead_ring_consumer_init", "the ring has no SIMPLE slots");
    return consumer;
}

unsigned char *next_free(railhead_ring_producer *producer)
{
    double since = seconds();
    void *slot;
    int got;
    while ((got = railhead_ring_reserve(producer, 1, &slot)) == RAILHEAD_RING_AGAIN)
        wait_a_bit("railhead_ring_reserve", since);
    if (got != RAILHEAD_RING_READY)
        give_up("railhead_ring_reserve", "the ring is invalid");
    return slot;
}

unsigned char *next_filled(railhead_ring_consumer *consumer, size_t *bytes)
{
    double since = seconds();
    void *slot;
    int got;
    while ((got = railhead_ring_peek(consumer, 1, &slot, bytes)) == RAILHEAD_RING_AGAIN)
        wait_a_bit("railhead_ring_peek", since);
    if (got != RAILHEAD_RING_READY)
        give_up("railhead_ring_peek", "the ring is invalid");
    return slot;
}
