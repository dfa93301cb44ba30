/* Four ranks, each a process, exchange data all to all as with ncclSend and ncclRecv between ncclGroupStart and ncclGroupEnd: a call only notes what
 * is to be moved; the group's end appends an operation per call and starts the proxy; the rank's own threads of data are the rings. As NCCL does,
 * rank r sends to r + delta and receives from r - delta in the delta-th of n turns. Every byte is checked.
 *
 *   proxy_sendrecv [ROUNDS [BYTES]]      ROUNDS exchanges of up to BYTES bytes per pair; 10 and 1000000 unless told otherwise
 */
#define _POSIX_C_SOURCE 200809L
#include "proxy_example.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define RANKS 4
#define SLOT (128 * 1024)

/* One direction between this rank and another. */
struct way {
    railhead_connector_t *connector;
    railhead_ring_producer producer;
    railhead_ring_consumer consumer;
    /* What the present group moves: */
    unsigned char *data;
    size_t bytes, done;
    int busy;
};

struct rank {
    railhead_proxy_t *proxy;
    struct way send[RANKS], recv[RANKS];
};

static void post(struct way *way, void *data, size_t bytes)
{
    way->data = data;
    way->bytes = bytes;
    way->done = 0;
    way->busy = 1;
    /* Nothing is a step too: the peer waits for it. */
    append_steps(way->connector, bytes == 0 ? 1 : (bytes + SLOT - 1) / SLOT);
}

static void group_start(struct rank *rank)
{
    must("railhead_proxy_group_start", railhead_proxy_group_start(rank->proxy));
}

static void send_to(struct rank *rank, int peer, void *data, size_t bytes)
{
    post(&rank->send[peer], data, bytes);
}

static void recv_from(struct rank *rank, int peer, void *data, size_t bytes)
{
    post(&rank->recv[peer], data, bytes);
}

/* Moves what it can between the caller's buffers and the rings; whether anything is left. */
static int copy_some(struct rank *rank, double since)
{
    int left = 0;
    for (int peer = 0; peer < RANKS; peer++) {
        struct way *out = &rank->send[peer], *in = &rank->recv[peer];
        void *slot;
        size_t bytes;
        if (out->busy && railhead_ring_reserve(&out->producer, 1, &slot) == RAILHEAD_RING_READY) {
            bytes = out->bytes - out->done < SLOT ? out->bytes - out->done : SLOT;
            if (bytes > 0)
                memcpy(slot, out->data + out->done, bytes);
            if (railhead_ring_post(&out->producer, 1, bytes) != 0)
                give_up("railhead_ring_post", "the step does not fit");
            out->done += bytes;
            out->busy = out->done < out->bytes;
        }
        if (in->busy && railhead_ring_peek(&in->consumer, 1, &slot, &bytes) == RAILHEAD_RING_READY) {
            if (bytes > in->bytes - in->done)
                give_up("recv", "the peer sent more than was asked for");
            if (bytes > 0)
                memcpy(in->data + in->done, slot, bytes);
            railhead_ring_release(&in->consumer, 1);
            in->done += bytes;
            in->busy = in->done < in->bytes;
        }
        left |= out->busy | in->busy;
    }
    if (left)
        wait_a_bit("the group", since);
    return left;
}

static void group_end(struct rank *rank)
{
    double since = seconds();
    must("railhead_proxy_group_end", railhead_proxy_group_end(rank->proxy));
    must("railhead_proxy_start", railhead_proxy_start(rank->proxy));
    while (copy_some(rank, since)) {
        char message[512];
        railhead_status_t status = railhead_proxy_error(rank->proxy, message, sizeof message);
        if (status != RAILHEAD_OK)
            give_up(message, railhead_status_string(status));
    }
}

static size_t bytes_between(int from, int to, uint64_t round, size_t most)
{
    return round % 3 == 0 && from < to ? 0 : (size_t)((round * 7919 + (uint64_t)from * 131 + (uint64_t)to * 17) * 4099 % (most + 1));
}

static int run(int me, int fds[RANKS], uint64_t rounds, size_t most)
{
    struct rank rank;
    railhead_connector_config_t config;
    unsigned char *out[RANKS], *in[RANKS];
    uint64_t total = 0;
    memset(&rank, 0, sizeof rank);
    memset(&config, 0, sizeof config);
    config.size = sizeof config;
    config.simple_bytes = 8 * SLOT;
    must("railhead_proxy_create", railhead_proxy_create(NULL, NULL, &rank.proxy));
    /* Pairs in an order that all ranks agree on, so that nobody waits for one who waits. */
    for (int from = 0; from < RANKS; from++)
        for (int to = 0; to < RANKS; to++) {
            if (from == me && to != me) {
                rank.send[to].connector = connect_through(rank.proxy, fds[to], &config);
                rank.send[to].producer = producer_of(rank.send[to].connector);
            } else if (to == me && from != me) {
                rank.recv[from].connector = accept_through(rank.proxy, fds[from], &config);
                rank.recv[from].consumer = consumer_of(rank.recv[from].connector);
            }
        }
    for (int peer = 0; peer < RANKS; peer++)
        if ((out[peer] = malloc(most + 1)) == NULL || (in[peer] = malloc(most + 1)) == NULL)
            give_up("malloc", "no memory");
    for (uint64_t round = 0; round < rounds; round++) {
        group_start(&rank);
        for (int delta = 1; delta < RANKS; delta++) {
            int to = (me + delta) % RANKS, from = (RANKS + me - delta) % RANKS;
            size_t bytes = bytes_between(me, to, round, most);
            fill(out[to], (uint64_t)(me * RANKS + to), round, bytes);
            send_to(&rank, to, out[to], bytes);
            recv_from(&rank, from, in[from], bytes_between(from, me, round, most));
        }
        group_end(&rank);
        for (int from = 0; from < RANKS; from++)
            if (from != me) {
                check(in[from], (uint64_t)(from * RANKS + me), round, bytes_between(from, me, round, most));
                total += bytes_between(from, me, round, most);
            }
    }
    must("railhead_proxy_stop", railhead_proxy_stop(rank.proxy));
    must("railhead_proxy_destroy", railhead_proxy_destroy(rank.proxy));
    for (int peer = 0; peer < RANKS; peer++) {
        free(out[peer]);
        free(in[peer]);
    }
    printf("rank %d: %llu bytes received, verified, no byte wrong\n", me, (unsigned long long)total);
    return 0;
}

int main(int argc, char **argv)
{
    int fds[RANKS][RANKS], bad = 0;
    pid_t children[RANKS];
    uint64_t rounds = argc > 1 ? strtoull(argv[1], NULL, 10) : 10;
    size_t most = argc > 2 ? strtoull(argv[2], NULL, 10) : 1000000;
    if (argc > 3 || rounds < 1 || most < 1 || most > 1u << 30)
        give_up("usage", "proxy_sendrecv [ROUNDS [BYTES]], BYTES from 1 to 1073741824");
    memset(fds, -1, sizeof fds);
    for (int a = 0; a < RANKS; a++)
        for (int b = a + 1; b < RANKS; b++) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
                give_up("socketpair", "no descriptors");
            fds[a][b] = pair[0];
            fds[b][a] = pair[1];
        }
    for (int rank = 0; rank < RANKS; rank++) {
        children[rank] = fork();
        if (children[rank] < 0)
            give_up("fork", "no process");
        if (children[rank] == 0) {
            /* Only this rank's own ends: then the end of a rank is seen by the others. */
            for (int other = 0; other < RANKS; other++)
                for (int peer = 0; peer < RANKS; peer++)
                    if (other != rank && fds[other][peer] >= 0)
                        close(fds[other][peer]);
            return run(rank, fds[rank], rounds, most);
        }
    }
    for (int rank = 0; rank < RANKS; rank++) {
        char name[16];
        snprintf(name, sizeof name, "rank %d", rank);
        bad |= end_of(name, children[rank]);
    }
    return bad;
}
