/*
 * Two processes exchange verified data through any NCCL network plugin, loaded and driven as NCCL does it. For each size: both directions at
 * once, where each byte is checked; then half a round trip; then one way with several messages outstanding. It knows nothing of the plugin but
 * its table. `railhead perf` measures better, `railhead check` checks more.
 *
 * main forks the ranks, which exchange listen handles through a socket pair. A rank is one thread; any failure is printed with the function,
 * the result and the rank, and ends the program with a non-zero status.
 */
#define _GNU_SOURCE
#include "net_plugin.h"
#include "railhead_stats.h"

#include <getopt.h>
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    SLOTS = 8, /* messages outstanding each way */
    TAG = 7,
    GUARD = 64,        /* bytes before and after each message that nobody may change */
    SLACK = 16,        /* every second receive is this much longer than its message */
    VOLUME = 64 << 20, /* bytes per pass at most, unless that is less than two rounds of the slots */
};

struct options {
    const char *plugin;
    uint64_t abi, max, iters, timeout;
};

struct rank {
    int id, peer; /* peer: socket to the other rank */
    struct net net;
    void *listen_comm, *send_comm, *recv_comm, *send_mr, *recv_mr;
    unsigned char *send, *recv; /* SLOTS messages each */
    size_t stride; /* from message to message */
    uint64_t messages, bytes; /* received and verified */
};

/* _exit: a plugin in an unknown state gets no chance to hang in its exit handlers. */
#define die(rank, ...) \
    ((void)fprintf(stderr, "plugin_pingpong: rank %d: ", (rank)->id), (void)fprintf(stderr, __VA_ARGS__), (void)fputc('\n', stderr), _exit(EXIT_FAILURE))

static void check(const struct rank *rank, const char *function, ncclResult_t result)
{
    if (result != ncclSuccess)
        die(rank, "%s returned %s (%d)", function, net_result_name(result), (int)result);
}

/* Both ranks call it. Small enough for the socket's buffer, so both may write first. */
static void exchange(const struct rank *rank, const void *mine, void *theirs, size_t length)
{
    if (send(rank->peer, mine, length, MSG_NOSIGNAL) != (ssize_t)length || recv(rank->peer, theirs, length, MSG_WAITALL) != (ssize_t)length)
        die(rank, "the other rank is gone");
}

static double now_us(void)
{
    struct timespec time;
    return clock_gettime(CLOCK_MONOTONIC, &time) == 0 ? (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3 : 0;
}

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* By its sender, size and number, so one that comes late, twice or elsewhere is wrong. */
static uint64_t seed(int sender, size_t size, uint64_t number)
{
    return mix(mix((uint64_t)sender + 1) ^ size) ^ mix(number);
}

/* `flip` 0xff: each byte differs from what is to arrive. */
static void fill(unsigned char *data, size_t size, uint64_t seed, unsigned char flip)
{
    uint64_t word = 0;
    memset(data - GUARD, 0x5a, GUARD);
    memset(data + size, 0x5a, GUARD);
    for (size_t at = 0; at < size; at++) {
        word = at % 8 == 0 ? mix(seed + at) : word >> 8;
        data[at] = (unsigned char)word ^ flip;
    }
}

static void verify(const struct rank *rank, const unsigned char *data, size_t size, uint64_t seed, const char *what)
{
    uint64_t word = 0;
    for (size_t i = 0; i < GUARD; i++)
        if (data[size + i] != 0x5a || data[(ptrdiff_t)i - GUARD] != 0x5a)
            die(rank, "GUARD OVERWRITTEN: beside the buffer of a %s message of %zu bytes", what, size);
    for (size_t at = 0; at < size; at++) {
        word = at % 8 == 0 ? mix(seed + at) : word >> 8;
        if (data[at] != (unsigned char)word)
            die(rank, "DATA MISMATCH: %s message of %zu bytes: byte %zu is 0x%02x, expected 0x%02x", what, size, at, data[at], (unsigned char)word);
    }
}

struct flow { /* messages one way */
    uint64_t count, posted, done;
    void *requests[SLOTS];
};

/* Posts at most one message and tests the oldest. True if anything happened. */
static bool step(struct rank *rank, struct flow *flow, bool sends, size_t size, bool verified)
{
    uint64_t before = flow->posted + flow->done, next = flow->posted % SLOTS, oldest = flow->done % SLOTS;
    int sender = sends ? rank->id : 1 - rank->id;
    unsigned char *base = (sends ? rank->send : rank->recv) + GUARD;
    if (flow->posted < flow->count && flow->posted - flow->done < SLOTS) {
        unsigned char *data = base + next * rank->stride;
        void *request = NULL;
        if (verified)
            fill(data, size, seed(sender, size, flow->posted), sends ? 0 : 0xff);
        if (sends)
            check(rank, "isend", net_isend(&rank->net, rank->send_comm, data, size, TAG, rank->send_mr, &request));
        else
            check(rank, "irecv", net_irecv(&rank->net, rank->recv_comm, data, size + flow->posted % 2 * SLACK, TAG, rank->recv_mr, &request));
        flow->requests[next] = request;
        flow->posted += request != NULL; /* NULL: later */
    }
    if (flow->done < flow->posted) {
        int done = 0, reported = -1;
        check(rank, sends ? "test of a send" : "test of a receive", rank->net.test(flow->requests[oldest], &done, &reported));
        if (done && (reported < 0 || (size_t)reported != size))
            die(rank, "WRONG SIZE: test reported %d, expected %zu", reported, size);
        if (done && verified)
            verify(rank, base + oldest * rank->stride, size, seed(sender, size, flow->done), sends ? "sent" : "received");
        rank->messages += done && verified && !sends;
        rank->bytes += done && verified && !sends ? size : 0;
        flow->done += done != 0;
    }
    return flow->posted + flow->done != before;
}

/* So many messages each way, at once: plugins may move a request's bytes only while it is tested. */
static void run(struct rank *rank, uint64_t sends, uint64_t receives, size_t size, bool verified)
{
    struct flow out = {.count = sends}, in = {.count = receives};
    for (unsigned idle = 0; out.done < sends || in.done < receives; idle++) {
        if (step(rank, &in, false, size, verified) | step(rank, &out, true, size, verified))
            idle = 0;
        else if (idle > 100)
            (void)sched_yield();
    }
}

static void run_size(struct rank *rank, size_t size, uint64_t iters)
{
    uint64_t limit = size == 0 ? UINT64_MAX : VOLUME / size;
    uint64_t count = limit < 2 * SLOTS ? 2 * SLOTS : limit < 10 * iters ? limit : 10 * iters;
    uint64_t trips = limit < iters ? limit + 1 : iters, checked = count < 64 ? count : 64;
    run(rank, checked, checked, size, true);
    double start = now_us();
    for (uint64_t i = 0; i < trips; i++) {
        run(rank, rank->id == 0, 1, size, false); /* rank 0 has its receive posted before the answer can come */
        run(rank, rank->id == 1, 0, size, false);
    }
    double half_trip = (now_us() - start) / (double)trips / 2;
    start = now_us();
    run(rank, rank->id == 0 ? count : 0, rank->id == 0 ? 0 : count, size, false);
    run(rank, rank->id == 1, rank->id == 0, 0, false); /* rank 1 has everything */
    if (rank->id == 0)
        printf(" %10zu %9" PRIu64 " %11.2f %11.4f\n", size, checked, half_trip, (double)size * (double)count / (now_us() - start) / 1e3);
}

static void set_up(struct rank *rank, const struct options *options)
{
    char why[512];
    unsigned char mine[NCCL_NET_HANDLE_MAXSIZE] = {0}, theirs[NCCL_NET_HANDLE_MAXSIZE];
    struct net_device device;
    int devices = 0;
    if (net_open(&rank->net, options->plugin, (int)options->abi, why, sizeof why) != 0)
        die(rank, "dlopen: %s", why);
    check(rank, "init", net_init(&rank->net));
    check(rank, "devices", rank->net.devices(&devices));
    if (devices <= 0)
        die(rank, "devices: the plugin has none");
    check(rank, "getProperties", net_device(&rank->net, 0, &device));
    check(rank, "listen", net_listen(&rank->net, 0, mine, &rank->listen_comm));
    exchange(rank, mine, theirs, sizeof mine);
    while (rank->send_comm == NULL || rank->recv_comm == NULL) {
        if (rank->send_comm == NULL)
            check(rank, "connect", net_connect(&rank->net, 0, theirs, &rank->send_comm));
        if (rank->recv_comm == NULL)
            check(rank, "accept", net_accept(&rank->net, rank->listen_comm, &rank->recv_comm));
        (void)sched_yield();
    }
    check(rank, "closeListen", rank->net.closeListen(rank->listen_comm));
    rank->stride = (options->max + 2 * GUARD + 4095) / 4096 * 4096;
    rank->send = aligned_alloc(4096, SLOTS * rank->stride);
    rank->recv = aligned_alloc(4096, SLOTS * rank->stride);
    if (rank->send == NULL || rank->recv == NULL)
        die(rank, "no memory for twice %zu bytes", SLOTS * rank->stride);
    check(rank, "regMr", rank->net.regMr(rank->send_comm, rank->send, SLOTS * rank->stride, NCCL_PTR_HOST, &rank->send_mr));
    check(rank, "regMr", rank->net.regMr(rank->recv_comm, rank->recv, SLOTS * rank->stride, NCCL_PTR_HOST, &rank->recv_mr));
    if (rank->id == 0)
        printf("# plugin %s, ncclNetPlugin_v%d, device 0: %s (%s), %d Mbit/s\n#%10s %9s %11s %11s\n#%10s %9s %11s %11s\n", rank->net.name,
               rank->net.abi, device.name, device.pci_path != NULL ? device.pci_path : "no PCI path", device.speed_mbps,
               "bytes", "verified", "half trip", "one way", "", "each way", "us", "GB/s");
}

static void finish(struct rank *rank)
{
    uint64_t mine[2] = {rank->messages, rank->bytes}, theirs[2];
    exchange(rank, mine, theirs, sizeof mine); /* and so nobody closes while the other still moves data */
    if (rank->id == 0)
        printf("# %" PRIu64 " messages and %" PRIu64 " bytes verified, no byte wrong\n", mine[0] + theirs[0], mine[1] + theirs[1]);
    railhead_print_paths(rank->id);
    check(rank, "deregMr", rank->net.deregMr(rank->send_comm, rank->send_mr));
    check(rank, "deregMr", rank->net.deregMr(rank->recv_comm, rank->recv_mr));
    check(rank, "closeSend", rank->net.closeSend(rank->send_comm));
    check(rank, "closeRecv", rank->net.closeRecv(rank->recv_comm));
    check(rank, "finalize", net_finalize(&rank->net));
    if (net_close(&rank->net) != 0)
        die(rank, "dlclose failed");
    free(rank->send);
    free(rank->recv);
}

static _Noreturn void run_rank(const struct options *options, int id, const int *sockets)
{
    static const size_t SIZES[] = {0, 1, 8, 64, 1 << 10, 4 << 10, 8 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20};
    struct rank rank = {.id = id, .peer = sockets[id]};
    (void)close(sockets[1 - id]);
    (void)alarm((unsigned)options->timeout);
    set_up(&rank, options);
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES && SIZES[i] < options->max; i++)
        run_size(&rank, SIZES[i], options->iters);
    run_size(&rank, options->max, options->iters);
    finish(&rank);
    exit(EXIT_SUCCESS);
}

static uint64_t number(const char *name, const char *text, uint64_t low, uint64_t high)
{
    char *end = NULL;
    uint64_t value = strtoull(text, &end, 10);
    unsigned shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    if (*text >= '0' && *text <= '9' && end[shift != 0] == '\0' && value <= high >> shift && value << shift >= low)
        return value << shift;
    (void)fprintf(stderr, "plugin_pingpong: --%s %s: expected a number from %" PRIu64 " to %" PRIu64 "\n", name, text, low, high);
    exit(2);
}

static struct options parse_options(int argc, char **argv)
{
    static const struct option LONG[] = {{"plugin", 1, NULL, 'p'}, {"abi", 1, NULL, 'a'}, {"max", 1, NULL, 'm'},
                                         {"iters", 1, NULL, 'i'}, {"timeout", 1, NULL, 't'}, {NULL, 0, NULL, 0}};
    struct options options = {.plugin = "librailhead.so", .max = 16u << 20, .iters = 1000, .timeout = 120};
    int option = 0;
    while (option != '?' && (option = getopt_long(argc, argv, "", LONG, NULL)) != -1) {
        switch (option) {
        case 'p': options.plugin = optarg; break;
        case 'a': options.abi = number("abi", optarg, NET_ABI_OLDEST, NET_ABI_NEWEST); break;
        case 'm': options.max = number("max", optarg, 0, 1u << 30); break;
        case 'i': options.iters = number("iters", optarg, 1, 100000000); break;
        case 't': options.timeout = number("timeout", optarg, 1, 86400); break;
        }
    }
    if (option != '?' && optind == argc)
        return options;
    (void)fprintf(stderr, "Usage: plugin_pingpong [--plugin FILE|NAME] [--abi 8..12] [--max BYTES] [--iters N] [--timeout SECONDS]\n");
    exit(2);
}

int main(int argc, char **argv)
{
    struct options options = parse_options(argc, argv);
    int sockets[2], failed = 0, status = 0;
    pid_t ranks[2] = {0}, ended;
    (void)setvbuf(stdout, NULL, _IOLBF, 0);
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0)
        return perror("plugin_pingpong: socketpair"), EXIT_FAILURE;
    for (int id = 0; id < 2; id++) /* where one cannot be had, the other finds itself alone */
        if ((ranks[id] = fork()) == 0)
            run_rank(&options, id, sockets);
    (void)close(sockets[0]);
    (void)close(sockets[1]);
    while ((ended = wait(&status)) > 0) {
        int id = ended == ranks[1];
        ranks[id] = 0;
        if (WIFSIGNALED(status) && !(failed && WTERMSIG(status) == SIGKILL)) /* the other one is killed below */
            (void)fprintf(stderr, "plugin_pingpong: rank %d: killed by signal %d\n", id, WTERMSIG(status));
        if (status != 0 && ranks[1 - id] > 0)
            (void)kill(ranks[1 - id], SIGKILL);
        failed |= status != 0;
    }
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
