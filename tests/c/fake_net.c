/*
 * A small NCCL network plugin over unix sockets that can be told to be wrong: the proof that plugin_pingpong notices.
 *
 * Built by tests/library/examples.rs with -DFAKE_ABI=8 .. 12: exports that table and no other. Never a part of the library.
 *
 *   FAKE_FAULT   what to do wrong, on the receiving side unless said otherwise, to messages that are not empty:
 *                flip     change one bit of the last byte of a message
 *                skip     report a message as received without writing it
 *                repeat   send the previous message's bytes again (sending side)
 *                overrun  write one byte past the end of a message
 *                underrun write one byte before the start of a message
 *                scribble change a byte of the caller's buffer (sending side)
 *                short    report one byte less than arrived
 *                stall    never complete (sending side)
 *                error    test returns ncclRemoteError
 *                die      raise SIGKILL
 *                hang     a call that does not return
 *                nodev    devices gives 0
 *                noinit   init returns ncclSystemError
 *   FAKE_AFTER   the first message, counted per comm from 0, to do it to (default 5)
 *   FAKE_TURNS   a file to which each send appends a letter: FAKE_TURN, which the build chooses (default '?')
 *   FAKE_RECEIVES  a file to which each receive appends a line: its bytes, and how many are posted with it that have got nothing
 *
 * It keeps a record, too, for tests that load it themselves: see fake_reset and the functions behind it.
 */
#define _GNU_SOURCE
#include "../../c_examples/nccl_net.h" /* tests/c has a header of that name, of its own */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { QUEUE = 64, REFUSALS = 2 };

struct comm;

struct request {
    struct comm *comm;
    unsigned char *data;
    size_t capacity; /* of the buffer, or size of the message */
    uint64_t size;   /* header: size of the message */
    size_t moved;    /* of header and message together */
    uint64_t number;
    int done;
};

struct comm {
    int fd;
    int sends;
    unsigned refused; /* isend and irecv give NULL now and then, as they may */
    uint64_t posted, completed;
    unsigned char *previous; /* the message before: for "repeat" */
    struct request requests[QUEUE];
};

/* ---- the record: what was called how often, which call is to fail, and what is open ---- */

enum function {
    INIT, LISTEN, CONNECT, ACCEPT, REG_MR, DEREG_MR, ISEND, IRECV, IFLUSH, TEST, CLOSE_SEND, CLOSE_RECV, CLOSE_LISTEN, FINALIZE, FUNCTIONS
};

static const char *const function_names[FUNCTIONS] = {"init",  "listen", "connect", "accept",    "regMr",     "deregMr",     "isend",
                                                      "irecv", "iflush", "test",    "closeSend", "closeRecv", "closeListen", "finalize"};

enum kind { CONTEXT, LISTENER, SENDER, RECEIVER, REGISTRATION, KINDS, OPEN = 256 };

static atomic_long calls[FUNCTIONS];
static atomic_long failing[FUNCTIONS]; /* number of the call that fails, from 1; 0 for none */
static atomic_long misuses;            /* of something that is not open, or of the wrong kind */
static atomic_flag open_lock = ATOMIC_FLAG_INIT;
static struct {
    const void *what, *of; /* NULL: a free place */
    enum kind kind;
} open_things[OPEN];

/* Whether this call, which is counted, is to fail. */
static int fails(enum function function)
{
    return atomic_fetch_add(&calls[function], 1) + 1 == atomic_load(&failing[function]);
}

static int find(const void *what, const void *of, enum kind kind)
{
    for (int i = 0; i < OPEN; i++)
        if (open_things[i].what == what && (what == NULL || (open_things[i].of == of && open_things[i].kind == kind)))
            return i;
    return -1;
}

static void set(int place, const void *what, const void *of, enum kind kind)
{
    if (place < 0) {
        atomic_fetch_add(&misuses, 1);
        return;
    }
    open_things[place].what = what;
    open_things[place].of = of;
    open_things[place].kind = kind;
}

static void lock_open(void)
{
    while (atomic_flag_test_and_set(&open_lock))
        ;
}

static void opened(const void *what, const void *of, enum kind kind)
{
    lock_open();
    set(find(NULL, NULL, kind), what, of, kind);
    atomic_flag_clear(&open_lock);
}

/* Whether it is closed now: it was open, and nothing that needs it still is. */
static int closed(const void *what, const void *of, enum kind kind)
{
    lock_open();
    int place = find(what, of, kind), needed = 0;
    for (int i = 0; i < OPEN; i++)
        needed |= kind != REGISTRATION && open_things[i].what != NULL && open_things[i].of == what;
    set(needed ? -1 : place, NULL, NULL, kind);
    atomic_flag_clear(&open_lock);
    return place >= 0 && !needed;
}

static int is_open(const void *what, enum kind kind)
{
    lock_open();
    int place = find(what, NULL, kind);
    atomic_flag_clear(&open_lock);
    if (place < 0)
        atomic_fetch_add(&misuses, 1);
    return place >= 0;
}

static int function_of(const char *name)
{
    for (int i = 0; i < FUNCTIONS; i++)
        if (strcmp(function_names[i], name) == 0)
            return i;
    abort();
}

/* Counts calls from here on; none fails. */
void fake_reset(void);
void fake_reset(void)
{
    for (int i = 0; i < FUNCTIONS; i++) {
        atomic_store(&calls[i], 0);
        atomic_store(&failing[i], 0);
    }
    atomic_store(&misuses, 0);
}

/* The function's call of this number, from 1, returns ncclRemoteError. What it was to close is closed all the same. */
void fake_fail(const char *function, long call);
void fake_fail(const char *function, long call) { atomic_store(&failing[function_of(function)], call); }

long fake_calls(const char *function);
long fake_calls(const char *function) { return atomic_load(&calls[function_of(function)]); }

/* Contexts, listeners, senders, receivers and registrations that are open; and misuses. */
void fake_holds(long holds[KINDS + 1]);
void fake_holds(long holds[KINDS + 1])
{
    memset(holds, 0, sizeof holds[0] * KINDS);
    lock_open();
    for (int i = 0; i < OPEN; i++)
        if (open_things[i].what != NULL)
            holds[open_things[i].kind]++;
    atomic_flag_clear(&open_lock);
    holds[KINDS] = atomic_load(&misuses);
}

static int fault_is(const char *name)
{
    const char *fault = getenv("FAKE_FAULT");
    return fault != NULL && strcmp(fault, name) == 0;
}

static int faulty(const struct request *request, const char *name)
{
    const char *after = getenv("FAKE_AFTER");
    return fault_is(name) && request->size != 0 && request->number >= (after != NULL ? strtoull(after, NULL, 10) : 5);
}

/* ---- life cycle ---- */

static ncclResult_t start(ncclDebugLogger_t logger)
{
    if (fails(INIT))
        return ncclRemoteError;
    if (logger != NULL)
        logger(NCCL_LOG_INFO, 1, __FILE__, __LINE__, "%s", "fake plugin: 100% unsafe");
    return fault_is("noinit") ? ncclSystemError : ncclSuccess;
}

static ncclResult_t fake_devices(int *count)
{
    *count = fault_is("nodev") ? 0 : 1;
    return ncclSuccess;
}

static ncclResult_t start_listening(int dev, void *handle, void **listen_comm)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t length = sizeof(sa_family_t); /* the kernel chooses an abstract name */
    if (fails(LISTEN))
        return ncclRemoteError;
    int *fd = malloc(sizeof *fd);
    if (dev != 0 || fd == NULL)
        return ncclInternalError;
    *fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (*fd < 0 || bind(*fd, (struct sockaddr *)&address, length) != 0 || listen(*fd, 8) != 0)
        return ncclSystemError;
    length = sizeof address;
    if (getsockname(*fd, (struct sockaddr *)&address, &length) != 0 || length > NCCL_NET_HANDLE_MAXSIZE - sizeof length)
        return ncclSystemError;
    memcpy(handle, &length, sizeof length);
    memcpy((char *)handle + sizeof length, &address, length);
    *listen_comm = fd;
    opened(fd, NULL, LISTENER);
    return ncclSuccess;
}

static struct comm *new_comm(int fd, int sends)
{
    struct comm *comm = calloc(1, sizeof *comm);
    if (comm == NULL)
        abort();
    comm->fd = fd;
    comm->sends = sends;
    opened(comm, NULL, sends ? SENDER : RECEIVER);
    return comm;
}

static ncclResult_t start_connecting(int dev, const void *handle, void **send_comm)
{
    if (fails(CONNECT))
        return ncclRemoteError;
    struct sockaddr_un address;
    socklen_t length;
    memcpy(&length, handle, sizeof length);
    if (dev != 0 || length > sizeof address)
        return ncclInternalError;
    memcpy(&address, (const char *)handle + sizeof length, length);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return ncclSystemError;
    if (connect(fd, (struct sockaddr *)&address, length) == 0) {
        *send_comm = new_comm(fd, 1);
        return ncclSuccess;
    }
    int again = errno == EAGAIN;
    close(fd);
    *send_comm = NULL;
    return again ? ncclSuccess : ncclRemoteError;
}

static ncclResult_t fake_accept(void *listen_comm, void **recv_comm, ncclNetDeviceHandle_t **on_device)
{
    (void)on_device;
    if (fails(ACCEPT) || !is_open(listen_comm, LISTENER))
        return ncclRemoteError;
    int fd = accept4(*(int *)listen_comm, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    *recv_comm = fd >= 0 ? new_comm(fd, 0) : NULL;
    return fd >= 0 || errno == EAGAIN ? ncclSuccess : ncclSystemError;
}

static ncclResult_t fake_reg_mr(void *comm, void *data, size_t size, int type, void **mhandle)
{
    (void)size;
    if (fails(REG_MR))
        return ncclRemoteError;
    *mhandle = data;
    if (comm == NULL || type != NCCL_PTR_HOST)
        return ncclInternalError;
    opened(data, comm, REGISTRATION);
    return ncclSuccess;
}

static ncclResult_t fake_dereg_mr(void *comm, void *mhandle)
{
    if (!closed(mhandle, comm, REGISTRATION))
        return ncclInternalError;
    return fails(DEREG_MR) ? ncclRemoteError : ncclSuccess;
}

static ncclResult_t close_comm(void *comm, enum kind kind, enum function function)
{
    struct comm *closing = comm;
    if (!closed(comm, NULL, kind))
        return ncclInternalError;
    close(closing->fd);
    free(closing->previous);
    free(closing);
    return fails(function) ? ncclRemoteError : ncclSuccess;
}

static ncclResult_t fake_close_send(void *comm) { return close_comm(comm, SENDER, CLOSE_SEND); }

static ncclResult_t fake_close_recv(void *comm) { return close_comm(comm, RECEIVER, CLOSE_RECV); }

static ncclResult_t fake_close_listen(void *listen_comm)
{
    if (!closed(listen_comm, NULL, LISTENER))
        return ncclInternalError;
    close(*(int *)listen_comm);
    free(listen_comm);
    return fails(CLOSE_LISTEN) ? ncclRemoteError : ncclSuccess;
}

/* ---- moving bytes: each message is its size, 8 bytes, and itself ---- */

/* Moves what the socket takes. 1: all of it is moved. 0: would block. -1: broken. */
static int move(struct request *request, void *part, size_t part_start, size_t part_length)
{
    struct comm *comm = request->comm;
    while (request->moved < part_start + part_length) {
        char *at = (char *)part + (request->moved - part_start);
        size_t length = part_start + part_length - request->moved;
        ssize_t moved = comm->sends ? send(comm->fd, at, length, MSG_NOSIGNAL) : recv(comm->fd, at, length, 0);
        if (moved < 0 && errno == EAGAIN)
            return 0;
        if (moved <= 0)
            return -1;
        request->moved += (size_t)moved;
    }
    return 1;
}

static void damage_received(struct request *request)
{
    if (faulty(request, "flip"))
        request->data[request->size - 1] ^= 0x10;
    if (faulty(request, "overrun"))
        request->data[request->size] ^= 1;
    if (faulty(request, "underrun"))
        request->data[-1] ^= 1;
    if (faulty(request, "die"))
        (void)raise(SIGKILL);
    while (faulty(request, "hang"))
        (void)pause();
}

static unsigned char *bytes_to_move(struct request *request)
{
    struct comm *comm = request->comm;
    if (faulty(request, "repeat") && comm->previous != NULL)
        return comm->previous;
    if (faulty(request, "skip") && !comm->sends) {
        free(comm->previous);
        comm->previous = malloc(request->size);
        return comm->previous != NULL ? comm->previous : request->data;
    }
    return request->data;
}

static void keep(struct request *request)
{
    struct comm *comm = request->comm;
    if (!comm->sends || !fault_is("repeat") || request->size == 0)
        return;
    unsigned char *copy = malloc(request->size);
    if (copy == NULL)
        abort();
    memcpy(copy, request->data, request->size);
    free(comm->previous);
    comm->previous = copy;
}

static int advance(struct request *request)
{
    int state = move(request, &request->size, 0, sizeof request->size);
    if (state <= 0)
        return state;
    if (request->size > request->capacity || (request->comm->sends && faulty(request, "stall")))
        return request->size > request->capacity ? -1 : 0;
    state = move(request, bytes_to_move(request), sizeof request->size, request->size);
    if (state <= 0)
        return state;
    if (request->comm->sends && faulty(request, "scribble"))
        request->data[0] ^= 1;
    if (!request->comm->sends)
        damage_received(request);
    keep(request);
    request->done = 1;
    request->comm->completed++;
    return 1;
}

#ifndef FAKE_TURN
#define FAKE_TURN '?'
#endif

/* Appends to the file that a variable names, if it does. */
static void note(const char *variable, int *fd, const char *text, size_t length)
{
    const char *path = getenv(variable);
    if (path == NULL)
        return;
    if (*fd < 0)
        *fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (write(*fd, text, length) != (ssize_t)length)
        abort();
}

static void take_turn(void)
{
    static int fd = -1;
    const char letter = FAKE_TURN;
    note("FAKE_TURNS", &fd, &letter, 1);
}

static void note_receive(const struct comm *comm, size_t size)
{
    static int fd = -1;
    char line[64];
    int length = snprintf(line, sizeof line, "%zu %llu\n", size, (unsigned long long)(comm->posted - comm->completed));
    note("FAKE_RECEIVES", &fd, line, (size_t)length);
}

static ncclResult_t post(struct comm *comm, enum kind kind, void *data, size_t size, void **given)
{
    if (fails(kind == SENDER ? ISEND : IRECV) || !is_open(comm, kind))
        return ncclRemoteError;
    *given = NULL;
    if (comm->posted - comm->completed == QUEUE || ++comm->refused % (REFUSALS + 1) != 0)
        return ncclSuccess;
    struct request *request = &comm->requests[comm->posted % QUEUE];
    memset(request, 0, sizeof *request);
    request->comm = comm;
    request->data = data;
    request->capacity = size;
    request->size = comm->sends ? size : 0;
    request->number = comm->posted++;
    if (comm->sends)
        take_turn();
    else
        note_receive(comm, size);
    *given = request;
    return ncclSuccess;
}

static ncclResult_t fake_test(void *given, int *done, int *sizes)
{
    struct request *request = given;
    struct comm *comm = request->comm;
    if (fails(TEST) || !is_open(comm, comm->sends ? SENDER : RECEIVER))
        return ncclRemoteError;
    while (comm->completed < comm->posted) {
        int state = advance(&comm->requests[comm->completed % QUEUE]);
        if (state < 0)
            return ncclRemoteError;
        if (state == 0)
            break;
    }
    *done = request->done;
    if (!request->done)
        return ncclSuccess;
    if (!comm->sends && faulty(request, "error"))
        return ncclRemoteError;
    *sizes = (int)request->size - (!comm->sends && faulty(request, "short"));
    return ncclSuccess;
}

static ncclResult_t fake_iflush(void *recv_comm, int n, void **data, int *sizes, void **mhandles, void **request)
{
    (void)n, (void)data, (void)sizes, (void)mhandles;
    if (fails(IFLUSH) || !is_open(recv_comm, RECEIVER))
        return ncclRemoteError;
    *request = NULL;
    return ncclSuccess;
}

/* ---- the table of version FAKE_ABI ---- */

#define JOIN(a, b, c) a##b##c
#define NAME(prefix, version, suffix) JOIN(prefix, version, suffix)

#if FAKE_ABI == 10
typedef ncclNetProperties_v9_t fake_properties;
#else
typedef NAME(ncclNetProperties_v, FAKE_ABI, _t) fake_properties;
#endif

static ncclResult_t fake_properties_of(int dev, fake_properties *properties)
{
    static char name[] = "fake0";
    memset(properties, 0, sizeof *properties);
    properties->name = name;
    properties->ptrSupport = NCCL_PTR_HOST;
    properties->speed = 1000 * FAKE_ABI; /* so that a test can tell that this field was read at its place */
    properties->maxComms = 64;
    properties->maxRecvs = 1;
#if FAKE_ABI >= 9
    properties->vProps.ndevs = 1;
#endif
    return dev == 0 ? ncclSuccess : ncclInternalError;
}

#if FAKE_ABI <= 9
static ncclResult_t fake_init(ncclDebugLogger_t logger) { return start(logger); }
#elif FAKE_ABI == 10
static ncclResult_t fake_init(ncclDebugLogger_t logger, ncclProfilerCallback_t profiler)
{
    (void)profiler;
    return start(logger);
}
#else
static int the_context;

static ncclResult_t fake_init(void **context, uint64_t communicator, ncclNetCommConfig_t *config, ncclDebugLogger_t logger,
                              ncclProfilerCallback_t profiler)
{
    (void)communicator, (void)profiler;
    *context = &the_context;
    ncclResult_t result = config->trafficClass == -1 ? start(logger) : ncclInternalError;
    if (result == ncclSuccess)
        opened(&the_context, NULL, CONTEXT);
    return result;
}

static ncclResult_t fake_finalize(void *context)
{
    if (!closed(context, NULL, CONTEXT))
        return ncclInternalError;
    return fails(FINALIZE) ? ncclRemoteError : ncclSuccess;
}
#endif

#if FAKE_ABI <= 10
static ncclResult_t fake_listen(int dev, void *handle, void **listen_comm) { return start_listening(dev, handle, listen_comm); }
#else
static ncclResult_t fake_listen(void *context, int dev, void *handle, void **listen_comm)
{
    return context == &the_context ? start_listening(dev, handle, listen_comm) : ncclInternalError;
}
#endif

#if FAKE_ABI <= 9
static ncclResult_t fake_connect(int dev, void *handle, void **send_comm, ncclNetDeviceHandle_t **on_device)
{
    (void)on_device;
    return start_connecting(dev, handle, send_comm);
}
#elif FAKE_ABI == 10
static ncclResult_t fake_connect(int dev, ncclNetCommConfig_t *config, void *handle, void **send_comm, ncclNetDeviceHandle_t **on_device)
{
    (void)on_device;
    return config->trafficClass == -1 ? start_connecting(dev, handle, send_comm) : ncclInternalError;
}
#else
static ncclResult_t fake_connect(void *context, int dev, void *handle, void **send_comm, ncclNetDeviceHandle_t **on_device)
{
    (void)on_device;
    return context == &the_context ? start_connecting(dev, handle, send_comm) : ncclInternalError;
}
#endif

#if FAKE_ABI == 8
typedef int fake_size;
#else
typedef size_t fake_size;
#endif

#if FAKE_ABI <= 9
static ncclResult_t fake_isend(void *send_comm, void *data, fake_size size, int tag, void *mhandle, void **request)
{
    (void)tag, (void)mhandle;
    return post(send_comm, SENDER, data, (size_t)size, request);
}

static ncclResult_t fake_irecv(void *recv_comm, int n, void **data, fake_size *sizes, int *tags, void **mhandles, void **request)
{
    (void)tags, (void)mhandles;
    return n == 1 ? post(recv_comm, RECEIVER, data[0], (size_t)sizes[0], request) : ncclInternalError;
}
#else
static ncclResult_t fake_isend(void *send_comm, void *data, fake_size size, int tag, void *mhandle, void *profiler, void **request)
{
    (void)tag, (void)mhandle;
    return profiler == NULL ? post(send_comm, SENDER, data, size, request) : ncclInternalError;
}

static ncclResult_t fake_irecv(void *recv_comm, int n, void **data, fake_size *sizes, int *tags, void **mhandles, void **profilers,
                               void **request)
{
    (void)tags, (void)mhandles, (void)profilers;
    return n == 1 ? post(recv_comm, RECEIVER, data[0], sizes[0], request) : ncclInternalError;
}
#endif

const NAME(ncclNet_v, FAKE_ABI, _t) NAME(ncclNetPlugin_v, FAKE_ABI, ) = {
    .name = "Fake",
    .init = fake_init,
    .devices = fake_devices,
    .getProperties = fake_properties_of,
    .listen = fake_listen,
    .connect = fake_connect,
    .accept = fake_accept,
    .regMr = fake_reg_mr,
    .deregMr = fake_dereg_mr,
    .isend = fake_isend,
    .irecv = fake_irecv,
    .iflush = fake_iflush,
    .test = fake_test,
    .closeSend = fake_close_send,
    .closeRecv = fake_close_recv,
    .closeListen = fake_close_listen,
#if FAKE_ABI >= 11
    .finalize = fake_finalize,
#endif
};
