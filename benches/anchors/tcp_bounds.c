/* What TCP over loopback leaves of a bare socket's speed to who sends messages into receives that are posted ahead, as NCCL does: each message has
 * a header that says where it goes, and each receive a clear-to-send that goes the other way. No requests, no checks, no library: the least
 * that such a plugin does, beside the bare socket, in turn. For the rows of `make bench` over TCP: `make bench-bounds`.
 *
 * Usage: tcp_bounds [ROUNDS [SECONDS]]: how often each figure is measured, and for how long. Prints a table: medians (least..greatest), and the
 * ratio round by round. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"

enum {
    HEADER = 32,            /* as src/fabric/soft/tcp/codec.rs has it */
    CLEAR = HEADER + 64,    /* a clear-to-send is a slot of 64 bytes, with a header */
    AHEAD = 8,              /* receives posted */
    PING = 8,               /* bytes of a small message */
    SLOTS = 64,             /* that long messages are in, in turn */
    MOST_ROUNDS = 1000,
};

static char *memory; /* of a process: SLOTS slots of the longest message */
static const size_t LONGEST = 1 << 20;

/* One end of a connection. */
struct end {
    int fd;
    size_t clear;         /* bytes of clear-to-sends that have come */
    char scratch[65536];
};

static void send_all(int fd, struct iovec *parts, int count, int flags) {
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
    while (message.msg_iovlen) {
        ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL | flags);
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            fail("sendmsg");
        for (; message.msg_iovlen && n >= (ssize_t)message.msg_iov->iov_len; message.msg_iov++, message.msg_iovlen--)
            n -= (ssize_t)message.msg_iov->iov_len;
        if (message.msg_iovlen && n > 0) {
            message.msg_iov->iov_base = (char *)message.msg_iov->iov_base + n;
            message.msg_iov->iov_len -= (size_t)n;
        }
    }
}

static void send_bytes(int fd, char *from, size_t bytes, int flags) {
    struct iovec part = {from, bytes};
    send_all(fd, &part, 1, flags);
}

/* What is there, or 0; the process ends with the connection. */
static size_t receive_some(int fd, struct iovec *parts, int count, int flags) {
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
    ssize_t n = recvmsg(fd, &message, flags);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
        _exit(0);
    return n < 0 ? 0 : (size_t)n;
}

static void receive_all(int fd, char *to, size_t bytes, int flags) {
    while (bytes) {
        struct iovec part = {to, bytes};
        size_t n = receive_some(fd, &part, 1, flags);
        to += n;
        bytes -= n;
    }
}

/* Whole clear-to-sends that have come since. */
static size_t clear_to_sends(struct end *end) {
    struct iovec part = {end->scratch, sizeof end->scratch};
    end->clear += receive_some(end->fd, &part, 1, MSG_DONTWAIT);
    size_t whole = end->clear / CLEAR;
    end->clear %= CLEAR;
    return whole;
}

/* Two connected ends, whose congestion control does not pace loopback if that can be had. */
static void connect_pair(struct end ends[2]) {
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    if (setsockopt(listener, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5))
        setsockopt(listener, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
    ends[0].fd = socket(AF_INET, SOCK_STREAM, 0);
    if (setsockopt(ends[0].fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5))
        setsockopt(ends[0].fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
    if (bind(listener, (void *)&address, len) || listen(listener, 1) || getsockname(listener, (void *)&address, &len) ||
        connect(ends[0].fd, (void *)&address, len) || (ends[1].fd = accept(listener, NULL, NULL)) < 0)
        fail("no connection over loopback");
    close(listener);
    for (int i = 0; i < 2; i++) {
        setsockopt(ends[i].fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        ends[i].clear = 0;
    }
}

/* How something is done: by the process that is started, until its connection ends, and by this one, for so long; its figure. Each has an end
 * of two connections: a comm goes one way. */
struct pattern {
    void (*other)(struct end *in, struct end *out, size_t bytes);
    double (*own)(struct end *out, struct end *in, size_t bytes, double seconds);
};

static double time_pattern(const struct pattern *pattern, size_t bytes, double seconds) {
    static struct end one[2], two[2];
    connect_pair(one);
    connect_pair(two);
    pid_t child = fork();
    if (child < 0)
        fail("fork");
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(one[0].fd);
        close(two[0].fd);
        pattern->other(&one[1], &two[1], bytes);
        _exit(0);
    }
    close(one[1].fd);
    close(two[1].fd);
    double figure = pattern->own(&one[0], &two[0], bytes, seconds);
    close(one[0].fd);
    close(two[0].fd);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    return figure;
}

/* Half a round trip of a small message, us. */

static void bare_pong(struct end *in, struct end *out, size_t bytes) {
    (void)out;
    for (;;) {
        receive_all(in->fd, memory, bytes, MSG_DONTWAIT);
        send_bytes(in->fd, memory, bytes, MSG_DONTWAIT);
    }
}

static double bare_ping(struct end *out, struct end *in, size_t bytes, double seconds) {
    (void)in;
    double begin = clock_seconds(), now;
    long done = 0;
    do {
        send_bytes(out->fd, memory, bytes, MSG_DONTWAIT);
        receive_all(out->fd, memory, bytes, MSG_DONTWAIT);
        done++;
    } while ((now = clock_seconds()) < begin + seconds);
    return (now - begin) / (double)done / 2 * 1e6;
}

/* A message has come on `in`: every fourth time, four receives are posted again. */
static void took(struct end *in, long number) {
    if (number % 4 == 3)
        send_bytes(in->fd, memory, 4 * CLEAR, MSG_DONTWAIT);
}

/* The same of one that goes. */
static void wait_clear(struct end *out, size_t *clear) {
    while (!*clear)
        *clear += clear_to_sends(out);
    --*clear;
}

static void plugin_pong(struct end *in, struct end *out, size_t bytes) {
    size_t clear = AHEAD;
    for (long number = 0;; number++) {
        receive_all(in->fd, memory, HEADER + bytes, MSG_DONTWAIT);
        took(in, number);
        wait_clear(out, &clear);
        send_bytes(out->fd, memory, HEADER + bytes, MSG_DONTWAIT);
    }
}

static double plugin_ping(struct end *out, struct end *in, size_t bytes, double seconds) {
    double begin = clock_seconds(), now;
    size_t clear = AHEAD;
    long number = 0;
    do {
        wait_clear(out, &clear);
        send_bytes(out->fd, memory, HEADER + bytes, MSG_DONTWAIT);
        receive_all(in->fd, memory, HEADER + bytes, MSG_DONTWAIT);
        took(in, number++);
    } while ((now = clock_seconds()) < begin + seconds);
    return (now - begin) / (double)number / 2 * 1e6;
}

/* Throughput of long messages, GB/s. */

static char *slot(long number, size_t bytes) {
    return memory + (size_t)(number % SLOTS) * bytes;
}

static void bare_sink(struct end *in, struct end *out, size_t bytes) {
    (void)out;
    for (long number = 0;; number++)
        receive_all(in->fd, slot(number, bytes), bytes, 0);
}

static double bare_stream(struct end *out, struct end *in, size_t bytes, double seconds) {
    (void)in;
    double begin = clock_seconds(), now;
    long number = 0;
    do
        send_bytes(out->fd, slot(number++, bytes), bytes, 0);
    while ((now = clock_seconds()) < begin + seconds);
    return (double)number * (double)bytes / (now - begin) / 1e9;
}

static void plugin_sink(struct end *in, struct end *out, size_t bytes) {
    (void)out;
    static char header[HEADER];
    for (long number = 0;; number++) {
        for (size_t have = 0; have < HEADER + bytes;) {
            size_t of_header = have < HEADER ? HEADER - have : 0, of_bytes = have < HEADER ? 0 : have - HEADER;
            struct iovec parts[2] = {{header + HEADER - of_header, of_header}, {slot(number, bytes) + of_bytes, bytes - of_bytes}};
            have += receive_some(in->fd, parts, 2, MSG_DONTWAIT);
        }
        if (number % 2)
            send_bytes(in->fd, in->scratch, 2 * CLEAR, MSG_DONTWAIT);
    }
}

static double plugin_stream(struct end *out, struct end *in, size_t bytes, double seconds) {
    (void)in;
    static char header[HEADER];
    double begin = clock_seconds(), now;
    size_t clear = AHEAD;
    long number = 0;
    do {
        wait_clear(out, &clear);
        struct iovec parts[2] = {{header, HEADER}, {slot(number++, bytes), bytes}};
        send_all(out->fd, parts, 2, MSG_DONTWAIT);
    } while ((now = clock_seconds()) < begin + seconds);
    return (double)number * (double)bytes / (now - begin) / 1e9;
}

/* Small messages per second, in thousands. */

static void messages_sink(struct end *in, struct end *out, size_t bytes) {
    (void)out;
    for (size_t have = 0;;) {
        struct iovec part = {in->scratch, sizeof in->scratch};
        have += receive_some(in->fd, &part, 1, MSG_DONTWAIT);
        size_t whole = have / (HEADER + bytes);
        have %= HEADER + bytes;
        if (whole)
            send_bytes(in->fd, memory, whole * CLEAR, MSG_DONTWAIT);
    }
}

static void bare_messages_sink(struct end *in, struct end *out, size_t bytes) {
    (void)out, (void)bytes;
    for (;;) {
        struct iovec part = {in->scratch, sizeof in->scratch};
        receive_some(in->fd, &part, 1, MSG_DONTWAIT);
    }
}

static double bare_messages(struct end *out, struct end *in, size_t bytes, double seconds) {
    (void)in;
    double begin = clock_seconds(), now;
    long number = 0;
    do {
        send_bytes(out->fd, memory, bytes, MSG_DONTWAIT);
        number++;
    } while ((now = clock_seconds()) < begin + seconds);
    return (double)number / (now - begin) / 1e3;
}

static double messages(struct end *out, size_t bytes, double seconds, int at_once) {
    double begin = clock_seconds(), now;
    size_t clear = AHEAD;
    long number = 0;
    do {
        size_t batch = at_once ? clear + !clear : 1;
        for (size_t i = 0; i < batch; i++)
            wait_clear(out, &clear);
        send_bytes(out->fd, memory, batch * (HEADER + bytes), MSG_DONTWAIT);
        number += (long)batch;
    } while ((now = clock_seconds()) < begin + seconds);
    return (double)number / (now - begin) / 1e3;
}

static double plugin_messages(struct end *out, struct end *in, size_t bytes, double seconds) {
    (void)in;
    return messages(out, bytes, seconds, 0);
}

static double joined_messages(struct end *out, struct end *in, size_t bytes, double seconds) {
    (void)in;
    return messages(out, bytes, seconds, 1);
}

static const struct pattern BARE_PING = {bare_pong, bare_ping}, PLUGIN_PING = {plugin_pong, plugin_ping};
static const struct pattern BARE_STREAM = {bare_sink, bare_stream}, PLUGIN_STREAM = {plugin_sink, plugin_stream};
static const struct pattern BARE_MESSAGES = {bare_messages_sink, bare_messages}, PLUGIN_MESSAGES = {messages_sink, plugin_messages};
static const struct pattern JOINED_MESSAGES = {messages_sink, joined_messages};

static const struct row {
    const char *name, *unit;
    size_t bytes;
    const struct pattern *bare, *plugin;
} ROWS[] = {
    {"8 B half round trip, 8 ahead", "us", PING, &BARE_PING, &PLUGIN_PING},
    {"64 KiB x 8", "GB/s", 64 << 10, &BARE_STREAM, &PLUGIN_STREAM},
    {"1 MiB x 8", "GB/s", 1 << 20, &BARE_STREAM, &PLUGIN_STREAM},
    {"8 B x 8, a call each", "k/s", PING, &BARE_MESSAGES, &PLUGIN_MESSAGES},
    {"8 B x 8, all that may go in one call", "k/s", PING, &BARE_MESSAGES, &JOINED_MESSAGES},
};

static void spread(double *samples, int rounds) {
    qsort(samples, (size_t)rounds, sizeof(double), compare_samples);
    printf(" %.3g (%.3g..%.3g) |", samples[rounds / 2], samples[0], samples[rounds - 1]);
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 9;
    double seconds = argc > 2 ? strtod(argv[2], NULL) : 0.3;
    memory = malloc(SLOTS * LONGEST);
    if (!memory || rounds < 1 || rounds > MOST_ROUNDS || !(seconds > 0 && seconds <= 60))
        fail("usage: tcp_bounds [ROUNDS, 1 to 1000 [SECONDS, up to 60]]");
    memset(memory, 1, SLOTS * LONGEST);
    printf("| over TCP | | bare socket | headers and clear-to-sends | ratio |\n|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) {
        static double bare[MOST_ROUNDS], plugin[MOST_ROUNDS], ratio[MOST_ROUNDS];
        for (int round = 0; round < rounds; round++) {
            bare[round] = time_pattern(ROWS[i].bare, ROWS[i].bytes, seconds);
            plugin[round] = time_pattern(ROWS[i].plugin, ROWS[i].bytes, seconds);
            ratio[round] = plugin[round] / bare[round];
        }
        printf("| %s | %s |", ROWS[i].name, ROWS[i].unit);
        spread(bare, rounds);
        spread(plugin, rounds);
        spread(ratio, rounds);
        printf("\n");
        fflush(stdout);
    }
    return 0;
}
