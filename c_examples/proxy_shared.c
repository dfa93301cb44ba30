/* Three processes: a proxy that sends, a proxy that receives, and a producer that has neither the library nor a network. The producer (proxy_producer,
 * a program of its own beside this one) maps the sender's ring and fills it. Every byte is checked at the other end.
 *
 *   proxy_shared [STEPS [BYTES]]      STEPS steps of up to BYTES bytes each; 1000 and 65536 unless told otherwise
 */
#define _POSIX_C_SOURCE 200809L
#include "proxy_example.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static uint64_t steps = 1000;
static size_t most = 64 * 1024;

static railhead_connector_config_t config_of(uint32_t home)
{
    railhead_connector_config_t config;
    memset(&config, 0, sizeof config);
    config.size = sizeof config;
    config.home = home;
    config.simple_bytes = (most + 127) / 128 * 1024;
    return config;
}

/* Starts the producer on the ring of a connector. */
static pid_t start_producer(railhead_connector_t *connector, const char *self)
{
    railhead_ring_place_t place;
    char program[4096], bytes[32], count[32];
    const char *slash = strrchr(self, '/');
    pid_t child;
    must("railhead_connector_ring", railhead_connector_ring(connector, &place));
    snprintf(program, sizeof program, "%.*sproxy_producer", slash == NULL ? 0 : (int)(slash + 1 - self), self);
    snprintf(bytes, sizeof bytes, "%zu", place.mapped_bytes);
    snprintf(count, sizeof count, "%llu", (unsigned long long)steps);
    child = fork();
    if (child == 0) {
        execl(program, program, place.path, bytes, count, (char *)NULL);
        perror(program);
        _exit(1);
    }
    if (child < 0)
        give_up("fork", "no process");
    return child;
}

static int send_all(int fd, const char *self)
{
    railhead_proxy_t *proxy;
    railhead_connector_t *connector;
    railhead_connector_config_t config = config_of(RAILHEAD_RING_NAMED);
    pid_t producer;
    int bad;
    must("railhead_proxy_create", railhead_proxy_create(NULL, NULL, &proxy));
    connector = connect_through(proxy, fd, &config);
    append_steps(connector, steps);
    must("railhead_proxy_start", railhead_proxy_start(proxy));
    producer = start_producer(connector, self);
    bad = end_of("the producer", producer);
    if (bad)
        must("railhead_proxy_abort", railhead_proxy_abort(proxy));
    else
        must("railhead_proxy_stop", railhead_proxy_stop(proxy));
    must("railhead_connector_close", railhead_connector_close(connector));
    must("railhead_proxy_destroy", railhead_proxy_destroy(proxy));
    return bad;
}

static int receive_all(int fd)
{
    railhead_proxy_t *proxy;
    railhead_connector_t *connector;
    railhead_connector_config_t config = config_of(RAILHEAD_RING_PRIVATE);
    railhead_ring_consumer consumer;
    uint64_t total = 0;
    must("railhead_proxy_create", railhead_proxy_create(NULL, NULL, &proxy));
    connector = accept_through(proxy, fd, &config);
    append_steps(connector, steps);
    must("railhead_proxy_start", railhead_proxy_start(proxy));
    consumer = consumer_of(connector);
    for (uint64_t n = 0; n < steps; n++) {
        size_t bytes;
        const unsigned char *slot = next_filled(&consumer, &bytes);
        if (bytes != (size_t)(n * 7919 % (consumer.step_bytes + 1)))
            give_up("railhead_ring_peek", "a step of the wrong size");
        check(slot, 1, n, bytes);
        railhead_ring_release(&consumer, 1);
        total += bytes;
    }
    must("railhead_proxy_stop", railhead_proxy_stop(proxy));
    must("railhead_proxy_destroy", railhead_proxy_destroy(proxy));
    printf("%llu steps, %llu bytes from a process that only maps the ring, verified, no byte wrong\n", (unsigned long long)steps,
           (unsigned long long)total);
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
        give_up("usage", "proxy_shared [STEPS [BYTES]], BYTES from 1 to 134217728");
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0)
        give_up("socketpair", "no descriptors");
    child = fork();
    if (child < 0)
        give_up("fork", "no process");
    close(fds[child != 0]);
    if (child == 0)
        return receive_all(fds[1]);
    return send_all(fds[0], argv[0]) | end_of("the receiver", child);
}
