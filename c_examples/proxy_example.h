/* What the proxy examples share: giving up with a message, bounded waiting, talking to a forked process, data that can be checked. */
#ifndef PROXY_EXAMPLE_H
#define PROXY_EXAMPLE_H

#include "../include/railhead.h"
#include "../include/railhead_ring.h"

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Longest that anything may take, in seconds. */
#define PATIENCE 120

/* Prints "what: message" and ends the process with status 1. */
void give_up(const char *what, const char *message) __attribute__((noreturn));

/* Gives up unless the call succeeded. */
void must(const char *what, railhead_status_t status);

/* Monotonic time in seconds. */
double seconds(void);

/* For loops that wait: lets others run, and gives up once PATIENCE has passed since `since`. */
void wait_a_bit(const char *what, double since);

/* Writes or reads `bytes` bytes, or gives up. */
void put_bytes(int fd, const void *data, size_t bytes);
void take_bytes(int fd, void *data, size_t bytes);

/* Waits for a child; 0 if it ended well. */
int end_of(const char *name, pid_t child);

/* Byte `at` of message `n` of a stream. */
unsigned char byte_of(uint64_t stream, uint64_t n, size_t at);
void fill(unsigned char *to, uint64_t stream, uint64_t n, size_t bytes);
/* Gives up if one byte is wrong. */
void check(const unsigned char *from, uint64_t stream, uint64_t n, size_t bytes);

/* Connects to a peer whose handle comes through `fd`, and makes the connector that sends to it. */
railhead_connector_t *connect_through(railhead_proxy_t *proxy, int fd, const railhead_connector_config_t *config);

/* Listens, sends the handle through `fd`, and makes the connector that receives from whoever connects. */
railhead_connector_t *accept_through(railhead_proxy_t *proxy, int fd, const railhead_connector_config_t *config);

/* Appends `steps` SIMPLE steps to a connector. */
void append_steps(railhead_connector_t *connector, uint64_t steps);

/* The producer and the consumer of a connector's ring in this process. */
railhead_ring_producer producer_of(railhead_connector_t *connector);
railhead_ring_consumer consumer_of(railhead_connector_t *connector);

/* The next slot of a producer or consumer, once there is one. */
unsigned char *next_free(railhead_ring_producer *producer);
unsigned char *next_filled(railhead_ring_consumer *consumer, size_t *bytes);

#endif
