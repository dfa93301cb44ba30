/*
 * N processes find each other through a store and send verified messages round a ring, through a network plugin.
 *
 *   torchrun --nproc-per-node 4 --no-python rendezvous_ping
 *   mpirun -n 4 -x MASTER_ADDR=localhost -x MASTER_PORT=29500 rendezvous_ping
 *   for r in 0 1 2 3; do RANK=$r WORLD_SIZE=4 MASTER_ADDR=localhost MASTER_PORT=29500 rendezvous_ping & done
 *
 *   --url URL       tcp://, env:// (the default) or file://
 *   --plugin FILE   any NCCL network plugin; librailhead.so if it is not given
 *   --rounds N      messages to the right, each passed on round the whole ring (default 100)
 *
 * Each rank listens, publishes its listen handle in the store as handle/RANK, connects to its right neighbour and accepts its left one. A message
 * starts at rank 0, and every rank adds its mark before it passes it on; rank 0 knows what must come back.
 */
#define _GNU_SOURCE
#include "../include/railhead.h"
#include "net_plugin.h"

#include <getopt.h>
#include <inttypes.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TIMEOUT_S = 120, MESSAGE = 4096, TAG = 7, HANDLE = NCCL_NET_HANDLE_MAXSIZE };

struct ring {
    struct net net;
    railhead_store_t *store;
    int64_t rank, ranks;
    void *listen, *send, *recv;
    unsigned char out[MESSAGE], in[MESSAGE];
    void *out_mr, *in_mr;
    struct timespec deadline;
};

/* ---- failing ---- */

_Noreturn static void die(const struct ring *ring, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void die(const struct ring *ring, const char *format, ...)
{
    va_list arguments;
    (void)fprintf(stderr, "rendezvous_ping: rank %" PRId64 ": ", ring->rank);
    va_start(arguments, format);
    (void)vfprintf(stderr, format, arguments);
    va_end(arguments);
    (void)fputc('\n', stderr);
    exit(EXIT_FAILURE);
}

static void store_check(const struct ring *ring, const char *what, railhead_status_t status)
{
    if (status != RAILHEAD_OK)
        die(ring, "%s: %s (%d)", what, railhead_last_error(), (int)status);
}

static void net_check(const struct ring *ring, const char *what, ncclResult_t result)
{
    if (result != ncclSuccess)
        die(ring, "%s returned %s (%d)", what, net_result_name(result), (int)result);
}

/* After a poll that found nothing. */
static void pause_or_die(const struct ring *ring, const char *what)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    if (now.tv_sec > ring->deadline.tv_sec)
        die(ring, "timed out after %d s, waiting for %s", TIMEOUT_S, what);
    (void)sched_yield();
}

/* ---- meeting ---- */

static void publish(const struct ring *ring, const unsigned char *handle)
{
    char key[40];
    (void)snprintf(key, sizeof key, "handle/%" PRId64, ring->rank);
    store_check(ring, "set", railhead_store_set(ring->store, key, handle, HANDLE));
}

static void look_up(const struct ring *ring, int64_t rank, unsigned char *handle)
{
    char key[40];
    void *value;
    size_t size;
    (void)snprintf(key, sizeof key, "handle/%" PRId64, rank);
    store_check(ring, key, railhead_store_get(ring->store, key, TIMEOUT_S * 1000, &value, &size));
    if (size != HANDLE)
        die(ring, "%s has %zu bytes, expected %d", key, size, HANDLE);
    memcpy(handle, value, HANDLE);
    railhead_store_free(value);
}

static void meet(struct ring *ring)
{
    unsigned char own[HANDLE] = {0}, right[HANDLE];
    net_check(ring, "listen", net_listen(&ring->net, 0, own, &ring->listen));
    publish(ring, own);
    look_up(ring, (ring->rank + 1) % ring->ranks, right);
    /* Either may need the other side's next step, so both are tried in turn. */
    while (ring->send == NULL || ring->recv == NULL) {
        if (ring->send == NULL)
            net_check(ring, "connect", net_connect(&ring->net, 0, right, &ring->send));
        if (ring->recv == NULL)
            net_check(ring, "accept", net_accept(&ring->net, ring->listen, &ring->recv));
        if (ring->send == NULL || ring->recv == NULL)
            pause_or_die(ring, "the neighbours");
    }
    net_check(ring, "closeListen", ring->net.closeListen(ring->listen));
    net_check(ring, "regMr", ring->net.regMr(ring->send, ring->out, MESSAGE, NCCL_PTR_HOST, &ring->out_mr));
    net_check(ring, "regMr", ring->net.regMr(ring->recv, ring->in, MESSAGE, NCCL_PTR_HOST, &ring->in_mr));
}

/* ---- pinging ---- */

static void complete(const struct ring *ring, void *request, int *size, const char *what)
{
    int done = 0;
    for (;;) {
        net_check(ring, "test", ring->net.test(request, &done, size));
        if (done)
            return;
        pause_or_die(ring, what);
    }
}

static void send_right(struct ring *ring)
{
    void *request = NULL;
    for (;;) {
        net_check(ring, "isend", net_isend(&ring->net, ring->send, ring->out, MESSAGE, TAG, ring->out_mr, &request));
        if (request != NULL)
            break;
        pause_or_die(ring, "the right neighbour's receive");
    }
    complete(ring, request, NULL, "a send");
}

static void *post_receive(struct ring *ring)
{
    void *request = NULL;
    for (;;) {
        net_check(ring, "irecv", net_irecv(&ring->net, ring->recv, ring->in, MESSAGE, TAG, ring->in_mr, &request));
        if (request != NULL)
            return request;
        pause_or_die(ring, "room for a receive");
    }
}

static unsigned char mark(int64_t rank, unsigned round, size_t at)
{
    return (unsigned char)((uint64_t)rank * 31 + round * 7 + at);
}

/* What a message holds after ranks 0 to `last` have marked it. */
static unsigned char marked(int64_t last, unsigned round, size_t at)
{
    unsigned char sum = 0;
    for (int64_t rank = 0; rank <= last; rank++)
        sum = (unsigned char)(sum + mark(rank, round, at));
    return sum;
}

static void verify(const struct ring *ring, int64_t last, unsigned round)
{
    for (size_t i = 0; i < MESSAGE; i++)
        if (ring->in[i] != marked(last, round, i))
            die(ring, "DATA MISMATCH in round %u at byte %zu", round, i);
}

static void ping(struct ring *ring, unsigned rounds)
{
    for (unsigned round = 0; round < rounds; round++) {
        int size = 0;
        void *request = post_receive(ring);
        if (ring->rank == 0) {
            for (size_t i = 0; i < MESSAGE; i++)
                ring->out[i] = mark(0, round, i);
            send_right(ring);
        }
        complete(ring, request, &size, "the left neighbour's message");
        if (size != MESSAGE)
            die(ring, "a message of %d bytes, expected %d", size, MESSAGE);
        if (ring->rank == 0) {
            verify(ring, ring->ranks - 1, round);
        } else {
            verify(ring, ring->rank - 1, round);
            for (size_t i = 0; i < MESSAGE; i++)
                ring->out[i] = (unsigned char)(ring->in[i] + mark(ring->rank, round, i));
            send_right(ring);
        }
    }
}

/* ---- beginning and end ---- */

static void part(struct ring *ring)
{
    /* Nobody closes before all have received everything, and rank 0's store, which may be the server, outlives the others' last call. */
    store_check(ring, "barrier", railhead_store_barrier(ring->store, "done", ring->ranks, TIMEOUT_S * 1000));
    net_check(ring, "deregMr", ring->net.deregMr(ring->send, ring->out_mr));
    net_check(ring, "deregMr", ring->net.deregMr(ring->recv, ring->in_mr));
    net_check(ring, "closeSend", ring->net.closeSend(ring->send));
    net_check(ring, "closeRecv", ring->net.closeRecv(ring->recv));
    net_check(ring, "finalize", net_finalize(&ring->net));
    int64_t gone;
    store_check(ring, "add", railhead_store_add(ring->store, "gone", 1, &gone));
    if (gone == ring->ranks)
        store_check(ring, "set", railhead_store_set(ring->store, "all gone", "", 0));
    if (ring->rank == 0) {
        const char *key = "all gone";
        store_check(ring, "wait", railhead_store_wait(ring->store, &key, 1, TIMEOUT_S * 1000));
    }
    store_check(ring, "close", railhead_store_close(ring->store));
}

static unsigned number(const char *name, const char *text)
{
    char *end;
    unsigned long value = strtoul(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != '\0' || value == 0 || value > 1000000) {
        (void)fprintf(stderr, "rendezvous_ping: %s %s: expected a number from 1 to 1000000\n", name, text);
        exit(2);
    }
    return (unsigned)value;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"url", required_argument, NULL, 'u'}, {"plugin", required_argument, NULL, 'p'}, {"rounds", required_argument, NULL, 'r'}, {0}};
    static struct ring ring;
    const char *url = NULL, *plugin = "librailhead.so";
    unsigned rounds = 100;
    char why[512];
    int option;
    ring.rank = -1;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 'u': url = optarg; break;
        case 'p': plugin = optarg; break;
        case 'r': rounds = number("--rounds", optarg); break;
        default: return 2;
        }
    }
    (void)clock_gettime(CLOCK_MONOTONIC, &ring.deadline);
    ring.deadline.tv_sec += TIMEOUT_S;

    store_check(&ring, "rendezvous", railhead_rendezvous(url, -1, -1, TIMEOUT_S * 1000, &ring.store, &ring.rank, &ring.ranks));
    if (net_open(&ring.net, plugin, 0, why, sizeof why) != 0)
        die(&ring, "%s", why);
    net_check(&ring, "init", net_init(&ring.net));
    meet(&ring);
    ping(&ring, rounds);
    part(&ring);
    printf("rank %" PRId64 " of %" PRId64 ": %u messages went round through %s\n", ring.rank, ring.ranks, rounds, ring.net.name);
    return net_close(&ring.net) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
