/*
 * Two processes exchange verified data through any NCCL network plugin, loaded and driven as NCCL does it.
 *
 * For each size: a verified pass (both directions at once; each byte of each message is checked), then latency (half a round trip)
 * and bandwidth (one way, several messages outstanding). Knows nothing about the plugin but its table: it is not linked with it.
 *
 * main forks rank 0 and rank 1, which exchange their listen handles through a socket pair, then watches them. A rank is one thread;
 * any failure is printed with the function, the result and the rank, and ends the program with a non-zero status.
 */
#define _GNU_SOURCE
#include "net_plugin.h"
#include "railhead_stats.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    RANKS = 2,
    TAG = 7,
    GUARD = 64,           /* bytes before and after each buffer that nobody may change */
    SLACK = 16,           /* every second verified receive is this much longer than the message */
    MAX_OUTSTANDING = 32, /* NCCL's own limit per comm */
    POLLS_BEFORE_YIELD = 100,
};

static const uint64_t VOLUME = 256u << 20;        /* bytes per timed pass and size: fewer iterations for large messages */
static const uint64_t VERIFIED_VOLUME = 64u << 20; /* the same for the verified pass */
static const unsigned char SEND_GUARD = 0x5a;
static const unsigned char RECV_GUARD = 0xa5;

struct options {
    const char *plugin;
    int abi;
    int dev;
    size_t min, max;
    unsigned iters;
    unsigned outstanding;
    unsigned timeout_s;
    bool verbose;
};

/* Message slots, a guard around each, registered as one region. */
struct area {
    unsigned char *base;
    size_t length, stride;
    void *mhandle;
};

struct rank {
    const struct options *options;
    int id;
    int peer; /* socket to the other rank */
    uint64_t deadline_ns;
    struct net net;
    void *listen_comm, *send_comm, *recv_comm;
    struct area send, recv;
    unsigned slots;
    uint64_t messages, bytes; /* verified by this rank */
};

/* ---- failing, logging, time ---- */

_Noreturn static void die(const struct rank *rank, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* _exit: a plugin in an unknown state gets no chance to hang in its exit handlers. */
static void die(const struct rank *rank, const char *format, ...)
{
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    (void)fflush(stdout);
    (void)fprintf(stderr, "plugin_pingpong: rank %d: %s\n", rank->id, message);
    _exit(EXIT_FAILURE);
}

static void check(const struct rank *rank, const char *function, ncclResult_t result)
{
    if (result != ncclSuccess)
        die(rank, "%s returned %s (%d)", function, net_result_name(result), (int)result);
}

static void print_log(ncclDebugLogLevel level, const char *format, va_list arguments)
{
    char message[1024];
    (void)vsnprintf(message, sizeof message, format, arguments);
    (void)fprintf(stderr, "[%d] %s %s\n", (int)getpid(), level == NCCL_LOG_WARN ? "WARN" : "INFO", message);
}

static void log_warnings(ncclDebugLogLevel level, unsigned long flags, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
static void log_everything(ncclDebugLogLevel level, unsigned long flags, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

static void log_warnings(ncclDebugLogLevel level, unsigned long flags, const char *file, int line, const char *format, ...)
{
    (void)flags, (void)file, (void)line;
    if (level != NCCL_LOG_WARN)
        return;
    va_list arguments;
    va_start(arguments, format);
    print_log(level, format, arguments);
    va_end(arguments);
}

static void log_everything(ncclDebugLogLevel level, unsigned long flags, const char *file, int line, const char *format, ...)
{
    (void)flags, (void)file, (void)line;
    if (level == NCCL_LOG_TRACE)
        return;
    va_list arguments;
    va_start(arguments, format);
    print_log(level, format, arguments);
    va_end(arguments);
}

static uint64_t now_ns(void)
{
    struct timespec time;
    if (clock_gettime(CLOCK_MONOTONIC, &time) != 0)
        abort(); /* cannot happen on Linux */
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* After a poll that found nothing. Spins, then lets others run; ends the rank at its deadline. */
static void idle(const struct rank *rank, unsigned *polls, const char *waiting_for)
{
    if (++*polls < POLLS_BEFORE_YIELD)
        return;
    if (*polls % 32 == 0)
        (void)sched_yield();
    if (*polls % 256 == 0 && now_ns() > rank->deadline_ns)
        die(rank, "timed out after %u s, waiting for: %s", rank->options->timeout_s, waiting_for);
}

/* ---- the other rank ---- */

static void transfer(const struct rank *rank, bool out, void *data, size_t length)
{
    unsigned char *bytes = data;
    while (length > 0) {
        ssize_t moved = out ? send(rank->peer, bytes, length, MSG_NOSIGNAL) : recv(rank->peer, bytes, length, 0);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0)
            die(rank, "%s the other rank: %s", out ? "send to" : "recv from", strerror(errno));
        if (moved == 0)
            die(rank, "the other rank is gone");
        bytes += moved;
        length -= (size_t)moved;
    }
}

/* Small messages only: both ranks write first. */
static void exchange(const struct rank *rank, const void *mine, void *theirs, size_t length)
{
    unsigned char copy[NCCL_NET_HANDLE_MAXSIZE];
    if (length > sizeof copy)
        die(rank, "exchange of %zu bytes", length);
    memcpy(copy, mine, length);
    transfer(rank, true, copy, length);
    transfer(rank, false, theirs, length);
}

static void barrier(const struct rank *rank)
{
    unsigned char mine = 1, theirs = 0;
    exchange(rank, &mine, &theirs, sizeof mine);
}

/* ---- patterns ---- */

static uint64_t mix(uint64_t x)
{
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* The pattern of a message depends on who sends it, its size and its number, so one that comes late, twice or elsewhere is wrong. */
static uint64_t message_seed(int sender, size_t size, uint64_t sequence)
{
    return mix(mix(mix((uint64_t)sender + 1) ^ size) ^ sequence);
}

static uint64_t pattern_word(uint64_t seed, size_t offset)
{
    return mix(seed + (offset / 8 + 1) * 0x9e3779b97f4a7c15u);
}

/* `flip` all ones writes the complement: each byte then differs from what is to arrive. */
static void fill_pattern(unsigned char *data, size_t size, uint64_t seed, uint64_t flip)
{
    for (size_t offset = 0; offset < size; offset += 8) {
        uint64_t word = pattern_word(seed, offset) ^ flip;
        memcpy(data + offset, &word, size - offset < 8 ? size - offset : 8);
    }
}

static void check_pattern(const struct rank *rank, const unsigned char *data, size_t size, uint64_t seed, const char *what)
{
    for (size_t offset = 0; offset < size; offset += 8) {
        size_t length = size - offset < 8 ? size - offset : 8;
        uint64_t word = pattern_word(seed, offset);
        if (memcmp(data + offset, &word, length) == 0)
            continue;
        const unsigned char *expected = (const unsigned char *)&word;
        size_t wrong = 0;
        while (data[offset + wrong] == expected[wrong])
            wrong++;
        die(rank, "DATA MISMATCH: %s of %zu bytes: byte %zu is 0x%02x, expected 0x%02x", what, size, offset + wrong,
            data[offset + wrong], expected[wrong]);
    }
}

static void check_guard(const struct rank *rank, const unsigned char *bytes, unsigned char value, size_t size, const char *where)
{
    for (size_t i = 0; i < GUARD; i++)
        if (bytes[i] != value)
            die(rank, "GUARD OVERWRITTEN: message of %zu bytes: byte %zu %s the buffer is 0x%02x, expected 0x%02x", size, i, where,
                bytes[i], value);
}

/* ---- buffers ---- */

static unsigned char *slot(const struct area *area, uint64_t index)
{
    return area->base + index * area->stride + GUARD;
}

static void allocate(const struct rank *rank, struct area *area)
{
    const size_t page = 4096;
    area->stride = (rank->options->max + 2 * GUARD + page - 1) / page * page;
    area->length = area->stride * rank->slots;
    area->base = aligned_alloc(page, area->length);
    if (area->base == NULL)
        die(rank, "no memory for %zu bytes", area->length);
}

static void prepare_send(const struct rank *rank, uint64_t index, size_t size, uint64_t sequence)
{
    unsigned char *data = slot(&rank->send, index);
    memset(data - GUARD, SEND_GUARD, GUARD);
    memset(data + size, SEND_GUARD, GUARD);
    fill_pattern(data, size, message_seed(rank->id, size, sequence), 0);
}

static void prepare_recv(const struct rank *rank, uint64_t index, size_t size, uint64_t sequence)
{
    unsigned char *data = slot(&rank->recv, index);
    memset(data - GUARD, RECV_GUARD, GUARD);
    memset(data + size, RECV_GUARD, GUARD);
    fill_pattern(data, size, message_seed(1 - rank->id, size, sequence), UINT64_MAX);
}

/* Sending must not change what is sent. */
static void check_sent(const struct rank *rank, uint64_t index, size_t size, uint64_t sequence)
{
    const unsigned char *data = slot(&rank->send, index);
    check_guard(rank, data - GUARD, SEND_GUARD, size, "before");
    check_guard(rank, data + size, SEND_GUARD, size, "after");
    check_pattern(rank, data, size, message_seed(rank->id, size, sequence), "sent message");
}

static void check_received(struct rank *rank, uint64_t index, size_t size, uint64_t sequence)
{
    const unsigned char *data = slot(&rank->recv, index);
    check_guard(rank, data - GUARD, RECV_GUARD, size, "before");
    check_guard(rank, data + size, RECV_GUARD, size, "after");
    check_pattern(rank, data, size, message_seed(1 - rank->id, size, sequence), "received message");
    rank->messages++;
    rank->bytes += size;
}

/* ---- the plugin's calls, each polled until it yields ---- */

static void *try_isend(const struct rank *rank, uint64_t index, size_t size)
{
    void *request = NULL;
    check(rank, "isend", net_isend(&rank->net, rank->send_comm, slot(&rank->send, index), size, TAG, rank->send.mhandle, &request));
    return request;
}

static void *try_irecv(const struct rank *rank, uint64_t index, size_t capacity)
{
    void *request = NULL;
    check(rank, "irecv", net_irecv(&rank->net, rank->recv_comm, slot(&rank->recv, index), capacity, TAG, rank->recv.mhandle, &request));
    return request;
}

static bool try_test(const struct rank *rank, const char *kind, void *request, size_t size)
{
    int done = 0, reported = -1;
    check(rank, kind, rank->net.test(request, &done, &reported));
    if (done && (reported < 0 || (size_t)reported != size))
        die(rank, "%s: WRONG SIZE: reported %d, expected %zu", kind, reported, size);
    return done != 0;
}

static void *isend(const struct rank *rank, uint64_t index, size_t size)
{
    unsigned polls = 0;
    void *request;
    while ((request = try_isend(rank, index, size)) == NULL)
        idle(rank, &polls, "isend to give a request");
    return request;
}

static void *irecv(const struct rank *rank, uint64_t index, size_t size)
{
    unsigned polls = 0;
    void *request;
    while ((request = try_irecv(rank, index, size)) == NULL)
        idle(rank, &polls, "irecv to give a request");
    return request;
}

/* Polls both, as many plugins move a request's bytes only while it is tested. Either may be NULL. */
static void finish(const struct rank *rank, void *sent, void *received, size_t size)
{
    unsigned polls = 0;
    while (sent != NULL || received != NULL) {
        if (received != NULL && try_test(rank, "test of a receive", received, size))
            received = NULL;
        if (sent != NULL && try_test(rank, "test of a send", sent, size))
            sent = NULL;
        if (sent != NULL || received != NULL)
            idle(rank, &polls, received != NULL ? "a receive to complete" : "a send to complete");
    }
}

/* ---- flows: many messages one way, several outstanding ---- */

struct flow {
    size_t size;
    uint64_t count, prepared, posted, done;
    bool verify;
    void *requests[MAX_OUTSTANDING];
};

/* Posts and completes at most one message. True if anything happened. */
static bool advance_send(const struct rank *rank, struct flow *flow)
{
    bool progress = false;
    if (flow->posted < flow->count && flow->posted - flow->done < rank->options->outstanding) {
        uint64_t index = flow->posted % rank->slots;
        if (flow->verify && flow->prepared == flow->posted)
            prepare_send(rank, index, flow->size, flow->prepared++);
        void *request = try_isend(rank, index, flow->size);
        if (request != NULL) {
            flow->requests[index] = request;
            flow->posted++;
            progress = true;
        }
    }
    uint64_t index = flow->done % rank->slots;
    if (flow->done < flow->posted && try_test(rank, "test of a send", flow->requests[index], flow->size)) {
        if (flow->verify)
            check_sent(rank, index, flow->size, flow->done);
        flow->done++;
        progress = true;
    }
    return progress;
}

static bool advance_recv(struct rank *rank, struct flow *flow)
{
    bool progress = false;
    if (flow->posted < flow->count && flow->posted - flow->done < rank->options->outstanding) {
        uint64_t index = flow->posted % rank->slots;
        if (flow->verify && flow->prepared == flow->posted)
            prepare_recv(rank, index, flow->size, flow->prepared++);
        size_t slack = flow->verify && flow->posted % 2 == 1 ? SLACK : 0;
        void *request = try_irecv(rank, index, flow->size + slack);
        if (request != NULL) {
            flow->requests[index] = request;
            flow->posted++;
            progress = true;
        }
    }
    uint64_t index = flow->done % rank->slots;
    if (flow->done < flow->posted && try_test(rank, "test of a receive", flow->requests[index], flow->size)) {
        if (flow->verify)
            check_received(rank, index, flow->size, flow->done);
        flow->done++;
        progress = true;
    }
    return progress;
}

static void run_flows(struct rank *rank, struct flow *send, struct flow *recv)
{
    unsigned polls = 0;
    while ((send != NULL && send->done < send->count) || (recv != NULL && recv->done < recv->count)) {
        bool progress = false;
        if (send != NULL)
            progress |= advance_send(rank, send);
        if (recv != NULL)
            progress |= advance_recv(rank, recv);
        if (progress)
            polls = 0;
        else
            idle(rank, &polls, send == NULL ? "a receive to complete" : recv == NULL ? "a send to complete" : "a request to complete");
    }
}

/* ---- the three passes ---- */

struct measurement {
    uint64_t verified;
    uint64_t round_trips;
    double median_us, p99_us;
    double gbytes_per_s[RANKS]; /* by sender */
};

static uint64_t limited(uint64_t wanted, uint64_t volume, size_t size, uint64_t at_least)
{
    uint64_t fitting = size == 0 ? wanted : volume / size;
    uint64_t count = fitting < wanted ? fitting : wanted;
    return count < at_least ? at_least : count;
}

static uint64_t verify_pass(struct rank *rank, size_t size)
{
    uint64_t count = limited(8 * (uint64_t)rank->slots, VERIFIED_VOLUME, size, rank->slots);
    struct flow send = {.size = size, .count = count, .verify = true};
    struct flow recv = {.size = size, .count = count, .verify = true};
    run_flows(rank, &send, &recv);
    return count;
}

/* The timed passes send the same slots over and over, and check at their end what lies in the slots. */
static const uint64_t TIMED_SEQUENCE = UINT64_C(1) << 32;

static void prepare_slots(const struct rank *rank, size_t size)
{
    for (unsigned i = 0; i < rank->slots; i++) {
        prepare_send(rank, i, size, TIMED_SEQUENCE + i);
        prepare_recv(rank, i, size, TIMED_SEQUENCE + i);
    }
    barrier(rank);
}

static void check_slots(struct rank *rank, size_t size, uint64_t received)
{
    for (uint64_t i = 0; i < rank->slots && i < received; i++)
        check_received(rank, i, size, TIMED_SEQUENCE + i);
}

static int compare_times(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

/* Rank 0 starts; the next receive is always posted before it is needed. `times` gets one sample per round trip on rank 0. */
static void round_trips(const struct rank *rank, size_t size, uint64_t count, uint64_t *times)
{
    void *receive = irecv(rank, 0, size);
    barrier(rank);
    uint64_t start = now_ns();
    for (uint64_t i = 0; i < count; i++) {
        if (rank->id == 1)
            finish(rank, NULL, receive, size);
        void *sent = isend(rank, i % rank->slots, size);
        void *next = i + 1 < count ? irecv(rank, (i + 1) % rank->slots, size) : NULL;
        finish(rank, sent, rank->id == 0 ? receive : NULL, size);
        receive = next;
        uint64_t end = now_ns();
        times[i] = end - start;
        start = end;
    }
}

static void latency_pass(struct rank *rank, size_t size, struct measurement *measurement)
{
    uint64_t count = limited(rank->options->iters, VOLUME, size, 1);
    uint64_t *times = calloc(count, sizeof *times);
    if (times == NULL)
        die(rank, "no memory for %" PRIu64 " samples", count);
    prepare_slots(rank, size);
    round_trips(rank, size, (count + 9) / 10, times); /* warm-up */
    round_trips(rank, size, count, times);
    check_slots(rank, size, count);
    qsort(times, count, sizeof *times, compare_times);
    measurement->round_trips = count;
    measurement->median_us = (double)times[count / 2] / 2e3;
    measurement->p99_us = (double)times[(count * 99 + 99) / 100 - 1] / 2e3;
    free(times);
}

/* The clock runs until the receiver, which has everything, has answered with one empty message. */
static double bandwidth_pass(struct rank *rank, int sender, size_t size)
{
    uint64_t count = limited(10 * (uint64_t)rank->options->iters, VOLUME, size, 2 * (uint64_t)rank->options->outstanding);
    struct flow data = {.size = size, .count = count};
    struct flow answer = {.size = 0, .count = 1};
    prepare_slots(rank, size);
    uint64_t start = now_ns();
    if (rank->id == sender) {
        run_flows(rank, &data, NULL);
        run_flows(rank, NULL, &answer);
    } else {
        run_flows(rank, NULL, &data);
        run_flows(rank, &answer, NULL);
        check_slots(rank, size, count);
    }
    return (double)size * (double)count / (double)(now_ns() - start);
}

static struct measurement measure(struct rank *rank, size_t size)
{
    struct measurement measurement = {.verified = verify_pass(rank, size)};
    latency_pass(rank, size, &measurement);
    for (int sender = 0; sender < RANKS; sender++) {
        double mine = bandwidth_pass(rank, sender, size), theirs = 0;
        exchange(rank, &mine, &theirs, sizeof mine);
        measurement.gbytes_per_s[sender] = rank->id == sender ? mine : theirs;
    }
    return measurement;
}

/* ---- the table ---- */

static void print_head(const struct rank *rank, const struct net_device *device)
{
    printf("# plugin %s, ncclNetPlugin_v%d, device %d: %s (%s), %d Mbit/s\n", rank->net.name, rank->net.abi, rank->options->dev,
           device->name, device->pci_path != NULL ? device->pci_path : "no PCI path", device->speed_mbps);
    printf("# verified: messages of which each byte was checked, each way; latency: half a round trip; bandwidth: %u outstanding\n",
           rank->options->outstanding);
    printf("#%10s %9s %9s %11s %11s %11s %11s\n", "bytes", "verified", "round", "median", "p99", "0 -> 1", "1 -> 0");
    printf("#%10s %9s %9s %11s %11s %11s %11s\n", "", "messages", "trips", "us", "us", "GB/s", "GB/s");
}

static void print_row(size_t size, const struct measurement *m)
{
    printf(" %10zu %9" PRIu64 " %9" PRIu64 " %11.2f %11.2f", size, m->verified, m->round_trips, m->median_us, m->p99_us);
    if (size == 0)
        printf(" %11s %11s\n", "-", "-");
    else
        printf(" %11.4f %11.4f\n", m->gbytes_per_s[0], m->gbytes_per_s[1]);
}

/* 0 1 8 64 ... within --min and --max; --max itself if it is none of these. Returns how many. */
static size_t list_sizes(const struct options *options, size_t *sizes, size_t capacity)
{
    static const size_t USUAL[] = {0, 1, 8, 64, 1 << 10, 4 << 10, 8 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20};
    size_t count = 0;
    for (size_t i = 0; i < sizeof USUAL / sizeof *USUAL && count + 1 < capacity; i++)
        if (USUAL[i] >= options->min && USUAL[i] <= options->max)
            sizes[count++] = USUAL[i];
    if (count == 0 || sizes[count - 1] != options->max)
        sizes[count++] = options->max;
    return count;
}

/* ---- one rank ---- */

static struct net_device pick_device(struct rank *rank)
{
    int devices = 0;
    struct net_device device;
    check(rank, "devices", rank->net.devices(&devices));
    if (devices <= 0)
        die(rank, "devices: the plugin has none");
    if (rank->options->dev >= devices)
        die(rank, "--dev %d: the plugin has devices 0 to %d", rank->options->dev, devices - 1);
    check(rank, "getProperties", net_device(&rank->net, rank->options->dev, &device));
    if ((device.pointers & NCCL_PTR_HOST) == 0)
        die(rank, "device %s does not take host memory", device.name);
    return device;
}

static void connect_both_ways(struct rank *rank)
{
    unsigned char mine[NCCL_NET_HANDLE_MAXSIZE] = {0}, theirs[NCCL_NET_HANDLE_MAXSIZE];
    check(rank, "listen", net_listen(&rank->net, rank->options->dev, mine, &rank->listen_comm));
    exchange(rank, mine, theirs, sizeof mine);
    unsigned polls = 0;
    while (rank->send_comm == NULL || rank->recv_comm == NULL) {
        if (rank->send_comm == NULL)
            check(rank, "connect", net_connect(&rank->net, rank->options->dev, theirs, &rank->send_comm));
        if (rank->recv_comm == NULL)
            check(rank, "accept", net_accept(&rank->net, rank->listen_comm, &rank->recv_comm));
        idle(rank, &polls, rank->send_comm == NULL ? "connect to give a comm" : "accept to give a comm");
    }
    check(rank, "closeListen", rank->net.closeListen(rank->listen_comm));
}

static void make_buffers(struct rank *rank)
{
    allocate(rank, &rank->send);
    allocate(rank, &rank->recv);
    check(rank, "regMr", rank->net.regMr(rank->send_comm, rank->send.base, rank->send.length, NCCL_PTR_HOST, &rank->send.mhandle));
    check(rank, "regMr", rank->net.regMr(rank->recv_comm, rank->recv.base, rank->recv.length, NCCL_PTR_HOST, &rank->recv.mhandle));
}

static void run_sizes(struct rank *rank)
{
    size_t sizes[16];
    size_t count = list_sizes(rank->options, sizes, sizeof sizes / sizeof *sizes);
    for (size_t i = 0; i < count; i++) {
        struct measurement measurement = measure(rank, sizes[i]);
        if (rank->id == 0)
            print_row(sizes[i], &measurement);
    }
}

static void close_all(struct rank *rank)
{
    check(rank, "deregMr", rank->net.deregMr(rank->send_comm, rank->send.mhandle));
    check(rank, "deregMr", rank->net.deregMr(rank->recv_comm, rank->recv.mhandle));
    check(rank, "closeSend", rank->net.closeSend(rank->send_comm));
    check(rank, "closeRecv", rank->net.closeRecv(rank->recv_comm));
    check(rank, "finalize", net_finalize(&rank->net));
    if (net_close(&rank->net) != 0)
        die(rank, "dlclose failed");
    free(rank->send.base);
    free(rank->recv.base);
}

/* Which path the bytes took, if the plugin keeps Railhead's stats page. Before the comms, and their counters, are closed. */
static void print_paths(const struct rank *rank)
{
    struct railhead_traffic traffic;
    char sent[256], received[256];
    if (railhead_traffic(&traffic) != 0)
        return;
    railhead_describe(traffic.sent, sent, sizeof sent);
    railhead_describe(traffic.received, received, sizeof received);
    printf("# rank %d: bytes sent: %s; received: %s\n", rank->id, sent, received);
}

static void print_tail(const struct rank *rank)
{
    uint64_t mine[2] = {rank->messages, rank->bytes}, theirs[2];
    exchange(rank, mine, theirs, sizeof mine);
    if (rank->id == 0)
        printf("# %" PRIu64 " messages and %" PRIu64 " bytes verified, no byte wrong\n", mine[0] + theirs[0], mine[1] + theirs[1]);
    for (int turn = 0; turn < RANKS; turn++) {
        if (turn == rank->id)
            print_paths(rank);
        if (fflush(stdout) != 0)
            die(rank, "cannot write to stdout: %s", strerror(errno));
        barrier(rank);
    }
}

static int run_rank(const struct options *options, int id, int peer)
{
    struct rank rank = {.options = options, .id = id, .peer = peer};
    rank.deadline_ns = now_ns() + (uint64_t)options->timeout_s * 1000000000u;
    rank.slots = options->outstanding > 2 ? options->outstanding : 2;
    char why[512];
    if (net_open(&rank.net, options->plugin, options->abi, why, sizeof why) != 0)
        die(&rank, "dlopen: %s", why);
    check(&rank, "init", net_init(&rank.net, options->verbose ? log_everything : log_warnings));
    struct net_device device = pick_device(&rank);
    connect_both_ways(&rank);
    make_buffers(&rank);
    if (id == 0)
        print_head(&rank, &device);
    run_sizes(&rank);
    print_tail(&rank);
    close_all(&rank);
    return EXIT_SUCCESS;
}

/* ---- the parent ---- */

static void on_alarm(int signal_number)
{
    (void)signal_number; /* it only interrupts waitpid */
}

static void report_end(int id, int status)
{
    if (WIFSIGNALED(status))
        (void)fprintf(stderr, "plugin_pingpong: rank %d: killed by signal %d (%s)\n", id, WTERMSIG(status), strsignal(WTERMSIG(status)));
    else if (WEXITSTATUS(status) != EXIT_SUCCESS)
        (void)fprintf(stderr, "plugin_pingpong: rank %d: exit status %d\n", id, WEXITSTATUS(status));
}

/* Reaps both ranks. As soon as one has failed, or at the alarm, kills what is left. */
static int supervise(const pid_t *ranks)
{
    bool alive[RANKS] = {true, true};
    int exit_status = EXIT_SUCCESS;
    while (alive[0] || alive[1]) {
        int status = 0;
        pid_t pid = waitpid(-1, &status, 0);
        if (pid < 0 && errno == EINTR)
            (void)fprintf(stderr, "plugin_pingpong: timed out\n");
        else if (pid < 0)
            return EXIT_FAILURE;
        int id = pid == ranks[1];
        if (pid > 0 && alive[id]) {
            alive[id] = false;
            if (exit_status == EXIT_SUCCESS)
                report_end(id, status);
        }
        if (pid < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != EXIT_SUCCESS) {
            exit_status = EXIT_FAILURE;
            for (int other = 0; other < RANKS; other++)
                if (alive[other])
                    (void)kill(ranks[other], SIGKILL);
        }
    }
    return exit_status;
}

static void usage(FILE *out)
{
    (void)fprintf(out,
                  "Usage: plugin_pingpong [OPTION]...\n"
                  "Two processes exchange verified data through an NCCL network plugin; prints latency and bandwidth.\n\n"
                  "  --plugin FILE      path, soname, or NAME of libnccl-net-NAME.so (default: librailhead.so)\n"
                  "  --abi N            use ncclNetPlugin_vN only, N from 8 to 12 (default: the newest there is)\n"
                  "  --dev N            device (default: 0)\n"
                  "  --min BYTES        smallest size; K, M and G are powers of 1024 (default: 0)\n"
                  "  --max BYTES        largest size, at most 1G (default: 16M)\n"
                  "  --iters N          round trips per size, and a tenth of the one-way messages; fewer for large\n"
                  "                     sizes: at most 256 MiB per pass (default: 1000)\n"
                  "  --outstanding N    messages in flight in the verified and one-way passes, 1 to 32 (default: 8)\n"
                  "  --timeout SECONDS  give up after this long (default: 120)\n"
                  "  --verbose          print what the plugin logs; without it, only its warnings\n"
                  "  --help\n\n"
                  "Exit status: 0 if every byte was right, 1 if anything failed, 2 for a wrong option.\n");
}

/* A number with an optional K, M or G. */
static bool parse_number(const char *text, uint64_t low, uint64_t high, uint64_t *number)
{
    if (*text < '0' || *text > '9')
        return false;
    char *end = NULL;
    errno = 0;
    uint64_t value = strtoull(text, &end, 10);
    unsigned shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    if (errno != 0 || value > UINT64_MAX >> shift || end[shift != 0] != '\0')
        return false;
    *number = value << shift;
    return *number >= low && *number <= high;
}

static void take_option(struct options *options, int option, const char *name, const char *text)
{
    static const struct { int option; uint64_t low, high; } RANGES[] = {
        {'a', NET_ABI_OLDEST, NET_ABI_NEWEST}, {'d', 0, 1023}, {'m', 0, 1u << 30}, {'M', 0, 1u << 30},
        {'i', 1, 100000000}, {'o', 1, MAX_OUTSTANDING}, {'t', 1, 86400},
    };
    uint64_t number = 0;
    for (size_t i = 0; i < sizeof RANGES / sizeof *RANGES; i++) {
        if (RANGES[i].option != option || parse_number(text, RANGES[i].low, RANGES[i].high, &number))
            continue;
        (void)fprintf(stderr, "plugin_pingpong: --%s %s: expected a number from %" PRIu64 " to %" PRIu64 "\n", name, text, RANGES[i].low,
                      RANGES[i].high);
        exit(2);
    }
    switch (option) {
    case 'p': options->plugin = text; break;
    case 'v': options->verbose = true; break;
    case 'a': options->abi = (int)number; break;
    case 'd': options->dev = (int)number; break;
    case 'm': options->min = number; break;
    case 'M': options->max = number; break;
    case 'i': options->iters = (unsigned)number; break;
    case 'o': options->outstanding = (unsigned)number; break;
    case 't': options->timeout_s = (unsigned)number; break;
    case 'h': usage(stdout); exit(EXIT_SUCCESS);
    default: usage(stderr); exit(2);
    }
}

static struct options parse_options(int argc, char **argv)
{
    static const struct option LONG[] = {
        {"plugin", required_argument, NULL, 'p'}, {"abi", required_argument, NULL, 'a'}, {"dev", required_argument, NULL, 'd'},
        {"min", required_argument, NULL, 'm'}, {"max", required_argument, NULL, 'M'}, {"iters", required_argument, NULL, 'i'},
        {"outstanding", required_argument, NULL, 'o'}, {"timeout", required_argument, NULL, 't'}, {"verbose", no_argument, NULL, 'v'},
        {"help", no_argument, NULL, 'h'}, {NULL, 0, NULL, 0},
    };
    struct options options = {.plugin = "librailhead.so", .max = 16u << 20, .iters = 1000, .outstanding = 8, .timeout_s = 120};
    int option, index = 0;
    while ((option = getopt_long(argc, argv, "", LONG, &index)) != -1)
        take_option(&options, option, option == '?' ? "" : LONG[index].name, optarg);
    if (optind < argc || options.min > options.max) {
        (void)fprintf(stderr, "plugin_pingpong: %s\n", optind < argc ? "unexpected argument" : "--min is larger than --max");
        exit(2);
    }
    return options;
}

static _Noreturn void become_rank(const struct options *options, int id, const int *sockets)
{
    (void)close(sockets[1 - id]);
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0)
        perror("plugin_pingpong: prctl");
    (void)alarm(options->timeout_s + 5); /* for a call of the plugin that does not return */
    exit(run_rank(options, id, sockets[id]));
}

int main(int argc, char **argv)
{
    struct options options = parse_options(argc, argv);
    int sockets[RANKS];
    pid_t ranks[RANKS];
    if (setvbuf(stdout, NULL, _IOLBF, 0) != 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
        perror("plugin_pingpong: socketpair");
        return EXIT_FAILURE;
    }
    for (int id = 0; id < RANKS; id++) {
        ranks[id] = fork();
        if (ranks[id] == 0)
            become_rank(&options, id, sockets);
        if (ranks[id] < 0) {
            perror("plugin_pingpong: fork");
            return EXIT_FAILURE; /* a rank that was started sees its socket close */
        }
    }
    (void)close(sockets[0]);
    (void)close(sockets[1]);
    struct sigaction action = {.sa_handler = on_alarm};
    if (sigaction(SIGALRM, &action, NULL) != 0) {
        perror("plugin_pingpong: sigaction");
        return EXIT_FAILURE;
    }
    (void)alarm(options.timeout_s + 10);
    return supervise(ranks);
}
