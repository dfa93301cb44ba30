/* Two processes, a producer thread in one and a consumer thread in the other. Neither calls a network: they write and read a ring, and a proxy on
 * each side moves the steps. Every byte is checked.
 *
 *   proxy_stream [STEPS [BYTES]]      STEPS steps of up to BYTES bytes each; 1000 and 524288 unless told otherwise
 */
#define _POSIX_C_SOURCE 200809L
#include "proxy_example.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static uint64_t steps = 1000;
static size_t most = 512 * 1024;

/* Sizes of all kinds, nothing and a full slot among them. */
static size_t size_of_step(uint64_t n)
{
    return n % 8 == 0 ? 0 : n % 2 == 0 ? most : (size_t)(n * 7919) % (most + 1);
}

static void *produce(void *argument)
{
    railhead_ring_producer producer = producer_of(argument);
    for (uint64_t n = 0; n < steps; n++) {
        fill(next_free(&producer), 0, n, size_of_step(n));
        if (railhead_ring_post(&producer, 1, size_of_step(n)) != 0)
            give_up("railhead_ring_post", "the step does not fit");
    }
    return NULL;
}

static void *consume(void *argument)
{
    railhead_ring_consumer consumer = consumer_of(argument);
    uint64_t total = 0;
    double start = seconds();
    for (uint64_t n = 0; n < steps; n++) {
        size_t bytes;
        const unsigned char *slot = next_filled(&consumer, &bytes);
        if (bytes != size_of_step(n))
            give_up("railhead_ring_peek", "a step of the wrong size");
        check(slot, 0, n, bytes);
        railhead_ring_release(&consumer, 1);
        total += bytes;
    }
    printf("%llu steps, %llu bytes in %.3f s, verified, no byte wrong\n", (unsigned long long)steps, (unsigned long long)total,
           seconds() - start);
    return NULL;
}

static int run(int fd, int sends)
{
    railhead_proxy_t *proxy;
    railhead_connector_t *connector;
    railhead_connector_config_t config;
    pthread_t thread;
    memset(&config, 0, sizeof config);
    config.size = sizeof config;
    config.simple_bytes = (most + 127) / 128 * 1024;
    must("railhead_proxy_create", railhead_proxy_create(NULL, NULL, &proxy));
    connector = sends ? connect_through(proxy, fd, &config) : accept_through(proxy, fd, &config);
    append_steps(connector, steps);
    must("railhead_proxy_start", railhead_proxy_start(proxy));
    if (pthread_create(&thread, NULL, sends ? produce : consume, connector) != 0)
        give_up("pthread_create", "no thread");
    pthread_join(thread, NULL);
    /* Drains: every step is on its way or there. */
    must("railhead_proxy_stop", railhead_proxy_stop(proxy));
    must("railhead_connector_close", railhead_connector_close(connector));
    must("railhead_proxy_destroy", railhead_proxy_destroy(proxy));
    return 0;
}

int main(int argc, char **argv)
{
    int fds[2];
    pid_t child;
    if (argc > 1)
        steps = strtoull(argv[1], NULL, 10);
    if (argc > 2)
        most = strtoull(argv[2], NULL, 10);
    if (argc > 3 || steps < 1 || most < 1 || most > 128u << 20)
        give_up("usage", "proxy_stream [STEPS [BYTES]], BYTES from 1 to 134217728");
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds) != 0)
        give_up("socketpair", "no descriptors");
    /* Before the library is used: what it makes does not survive a fork. */
    child = fork();
    if (child < 0)
        give_up("fork", "no process");
    close(fds[child != 0]);
    if (child == 0)
        return run(fds[1], 0);
    return run(fds[0], 1) | end_of("the receiver", child);
}
