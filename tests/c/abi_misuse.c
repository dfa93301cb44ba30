/* Calls the plugin as no correct host would, and checks that every call is refused with a status, a word in the log and nothing else.
 *
 * abi_misuse LIBRARY VERSION CASE: loads the library as NCCL does and runs one of the cases listed at the end; exits with 0 if all is well. */
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "any_version.h"

static int failures;
/* Of the thread that looks: a word in the log is written by the thread that is refused. */
static _Thread_local char last_warning[1024];
static _Thread_local int warnings;
static char looked_for[64];
static int found;

#define GARBAGE ((void *)0x5a5a5a5a5a5a5a58)
#define ODD(type) ((type *)((char *)scratch + 1))

static void fail(int line, const char *what, result got, const char *want) {
    fprintf(stderr, "v%d line %d: %s returned %d, not %s (last warning: %s)\n", version, line, what, got, want, last_warning);
    failures++;
}

/* The call returns that status. */
#define EXPECT(status, call) \
    do { \
        result got_ = (call); \
        if (got_ != (status)) fail(__LINE__, #call, got_, #status); \
    } while (0)
/* The call is refused with that status, and the log says so. */
#define REFUSED(status, call) \
    do { \
        int before_ = warnings; \
        EXPECT(status, call); \
        if (warnings == before_) fail(__LINE__, #call, 0, "a warning"); \
    } while (0)
/* The call is refused, with whatever status. */
#define WRONG(call) \
    do { \
        result got_ = (call); \
        if (got_ == SUCCESS) fail(__LINE__, #call, got_, "an error"); \
    } while (0)
#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "v%d line %d: not %s (last warning: %s)\n", version, __LINE__, #condition, last_warning); \
            failures++; \
        } \
    } while (0)
/* What must work for the rest to make sense. */
#define NEED(call) \
    do { \
        result got_ = (call); \
        if (got_ != SUCCESS) { \
            fail(__LINE__, #call, got_, "0"); \
            exit(1); \
        } \
    } while (0)

static void log_line(int level, unsigned long flags, const char *file, int line, const char *fmt, ...) {
    (void)flags, (void)file, (void)line;
    CHECK(strcmp(fmt, "%s") == 0);
    va_list arguments;
    va_start(arguments, fmt);
    const char *message = va_arg(arguments, const char *);
    if (level == 2) {
        snprintf(last_warning, sizeof last_warning, "%s", message);
        warnings++;
    }
    if (looked_for[0] != 0 && strstr(message, looked_for) != NULL) found++;
    va_end(arguments);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static union {
    char bytes[4096];
    long long align;
} scratch_memory;
static char *const scratch = scratch_memory.bytes;

struct pair {
    void *listen, *send, *recv;
};

static struct pair connect_pair(void) {
    struct pair p = {0};
    char handle[128] = {0};
    NEED(any_listen(0, handle, &p.listen));
    for (double end = now() + 30; p.send == NULL || p.recv == NULL;) {
        if (p.send == NULL) NEED(any_connect(0, handle, &p.send));
        if (p.recv == NULL) NEED(any_accept(p.listen, &p.recv));
        if (now() > end) {
            fprintf(stderr, "v%d: no connection\n", version);
            exit(1);
        }
    }
    return p;
}

static void transfer(struct pair *p, unsigned char seed, int size);

/* A pair whose handshake is done: version 4 gives comms out before that. */
static struct pair settled_pair(void) {
    struct pair p = connect_pair();
    transfer(&p, 1, 1);
    return p;
}

static void close_pair(struct pair *p) {
    EXPECT(SUCCESS, any_close_send(p->send));
    EXPECT(SUCCESS, any_close_recv(p->recv));
    EXPECT(SUCCESS, any_close_listen(p->listen));
}

/* One message from one buffer to the other, byte by byte. */
static void transfer(struct pair *p, unsigned char seed, int size) {
    char *from = calloc(1, size), *to = calloc(1, size);
    void *send_mr, *recv_mr, *send = NULL, *recv = NULL, *data = to;
    long long sizes = size;
    int tag = 0, got = -1;
    for (int i = 0; i < size; i++) from[i] = (char)(seed + i * 7);
    NEED(any_reg(p->send, from, size, 1, &send_mr));
    NEED(any_reg(p->recv, to, size, 1, &recv_mr));
    /* One thread drives both ends, so neither may be waited for without the other getting its turns. */
    int sent = 0, received = 0, sent_size = -1;
    for (double end = now() + 30; !(sent && received) && now() < end;) {
        if (recv == NULL) NEED(any_irecv(p->recv, 1, &data, &sizes, &tag, &recv_mr, &recv));
        if (send == NULL) NEED(any_isend(p->send, from, size, 0, send_mr, &send));
        if (send != NULL && !sent) NEED(any_test(send, &sent, &sent_size));
        if (recv != NULL && !received) NEED(any_test(recv, &received, &got));
    }
    CHECK(sent && received && got == size && sent_size == size && memcmp(from, to, size) == 0);
    EXPECT(SUCCESS, any_dereg(p->send, send_mr));
    EXPECT(SUCCESS, any_dereg(p->recv, recv_mr));
    free(from);
    free(to);
}

static void before_init(void) {
    int n = -5;
    void *comm = GARBAGE;
    char handle[128];
    EXPECT(INTERNAL_ERROR, any_devices(&n));
    CHECK(n == -5);
    EXPECT(INTERNAL_ERROR, any_properties(0, scratch));
    context = GARBAGE;
    EXPECT(INTERNAL_ERROR, any_listen(0, handle, &comm));
    EXPECT(INTERNAL_ERROR, any_connect(0, handle, &comm));
    EXPECT(INTERNAL_ERROR, any_accept(GARBAGE, &comm));
    CHECK(comm == GARBAGE);
    EXPECT(INTERNAL_ERROR, any_reg(GARBAGE, scratch, 8, 1, &comm));
    EXPECT(INTERNAL_ERROR, any_test(GARBAGE, &n, NULL));
    EXPECT(INTERNAL_ERROR, any_close_send(GARBAGE));
    if (version >= 11) EXPECT(INTERNAL_ERROR, any_finalize());
}

static void arguments(void) {
    int n = -5;
    char handle[128] = {0};
    void *comm = GARBAGE, *mr;
    if (version == 11) {
        EXPECT(INTERNAL_ERROR, net11->init(NULL, 1, NULL, log_line, NULL));
        EXPECT(INTERNAL_ERROR, net11->init(ODD(void *), 1, NULL, log_line, NULL));
        EXPECT(INTERNAL_ERROR, net11->init(&comm, 1, ODD(struct comm_config), log_line, NULL));
        CHECK(comm == GARBAGE);
    }
    if (version == 12) {
        struct comm_config config = {256};
        EXPECT(INTERNAL_ERROR, net12->init(NULL, 1, NULL, log_line, NULL));
        EXPECT(INTERNAL_ERROR, net12->init(ODD(void *), 1, NULL, log_line, NULL));
        EXPECT(INVALID_USAGE, net12->init(&comm, 1, &config, log_line, NULL));
        CHECK(comm == GARBAGE);
        NEED(net12->init(&comm, 1, NULL, NULL, NULL));
        EXPECT(SUCCESS, net12->setNetAttr(comm, NULL));
        EXPECT(SUCCESS, net12->finalize(comm));
        EXPECT(INTERNAL_ERROR, net12->finalize(comm));
        comm = GARBAGE;
    }
    NEED(any_init(log_line));

    REFUSED(INTERNAL_ERROR, any_devices(NULL));
    REFUSED(INTERNAL_ERROR, any_devices(ODD(int)));
    NEED(any_devices(&n));
    CHECK(n > 0);
    REFUSED(INTERNAL_ERROR, any_properties(0, NULL));
    REFUSED(INTERNAL_ERROR, any_properties(0, ODD(void)));
    REFUSED(INTERNAL_ERROR, any_properties(-1, scratch));
    WRONG(any_properties(9999, scratch));

    REFUSED(INTERNAL_ERROR, any_listen(0, NULL, &comm));
    REFUSED(INTERNAL_ERROR, any_listen(0, handle, NULL));
    REFUSED(INTERNAL_ERROR, any_listen(0, handle, ODD(void *)));
    REFUSED(INTERNAL_ERROR, any_listen(-1, handle, &comm));
    WRONG(any_listen(9999, handle, &comm));
    REFUSED(INTERNAL_ERROR, any_connect(0, NULL, &comm));
    REFUSED(INTERNAL_ERROR, any_connect(0, handle, NULL));
    REFUSED(INTERNAL_ERROR, any_connect(0, handle, ODD(void *)));
    WRONG(any_connect(0, handle, &comm));
    memset(handle, 0xff, sizeof handle);
    WRONG(any_connect(0, handle, &comm));
    if (version == 10) {
        struct comm_config config = {-2};
        REFUSED(INTERNAL_ERROR, net10->connect(0, ODD(struct comm_config), handle, &comm, NULL));
        REFUSED(INVALID_USAGE, net10->connect(0, &config, handle, &comm, NULL));
    }
    REFUSED(INTERNAL_ERROR, any_accept(NULL, &comm));
    REFUSED(INTERNAL_ERROR, any_accept((void *)1, &comm));
    CHECK(comm == GARBAGE);

    struct pair p = connect_pair();
    REFUSED(INTERNAL_ERROR, any_accept(p.listen, NULL));
    REFUSED(INTERNAL_ERROR, any_connect(-1, handle, &comm));

    mr = GARBAGE;
    REFUSED(INTERNAL_ERROR, any_reg(NULL, scratch, 64, 1, &mr));
    REFUSED(INTERNAL_ERROR, any_reg(p.listen, scratch, 64, 1, &mr));
    REFUSED(INTERNAL_ERROR, any_reg(p.send, NULL, 64, 1, &mr));
    REFUSED(INTERNAL_ERROR, any_reg(p.send, scratch, 64, 1, NULL));
    REFUSED(INTERNAL_ERROR, any_reg(p.send, scratch, 64, 1, ODD(void *)));
    for (int type = -1; type < 9; type++) {
        if (type != 1) REFUSED(INVALID_USAGE, any_reg(p.send, scratch, 64, type, &mr));
    }
    CHECK(strstr(last_warning, "memory type 8") && strstr(last_warning, "accepted: 1"));
    WRONG(any_reg(p.send, scratch, 0, 1, &mr));
    if (version < 8) REFUSED(INVALID_USAGE, any_reg(p.send, scratch, -64, 1, &mr));
    if (version >= 8) WRONG(any_reg(p.send, scratch, -64, 1, &mr));
    if (version >= 6) {
        REFUSED(INTERNAL_ERROR, any_reg_dma_buf(NULL, scratch, 64, 2, 0, 0, &mr));
        REFUSED(INTERNAL_ERROR, any_reg_dma_buf(p.send, NULL, 64, 2, 0, 0, &mr));
        REFUSED(INTERNAL_ERROR, any_reg_dma_buf(p.send, scratch, 64, 2, 0, 0, NULL));
        for (int type = 0; type < 5; type++) REFUSED(INVALID_USAGE, any_reg_dma_buf(p.send, scratch, 64, type, 0, -1, &mr));
        REFUSED(INVALID_USAGE, any_reg_dma_buf(p.send, scratch, 64, 2, 0, -1, &mr));
        CHECK(strstr(last_warning, "takes no DMA-BUF (no NCCL_PTR_DMABUF)"));
    }
    CHECK(mr == GARBAGE);
    NEED(any_reg(p.send, scratch, 64, 1, &mr));
    WRONG(any_dereg(p.send, NULL));
    WRONG(any_dereg(p.send, (void *)1));
    WRONG(any_dereg(p.send, GARBAGE));
    WRONG(any_dereg(p.send, p.send));
    REFUSED(INTERNAL_ERROR, any_dereg(NULL, mr));
    EXPECT(SUCCESS, any_dereg(p.recv, mr));
    WRONG(any_dereg(p.recv, mr));

    if (version >= 9) {
        struct vdevice8 device = {0, {0}};
        int d = -5;
#define MAKE(d, p) \
    (version == 9    ? net9->makeVDevice(d, (struct vdevice4 *)(p)) \
     : version == 10 ? net10->makeVDevice(d, (struct vdevice4 *)(p)) \
     : version == 11 ? net11->makeVDevice(d, (struct vdevice4 *)(p)) \
                     : net12->makeVDevice(d, p))
        EXPECT(INTERNAL_ERROR, MAKE(NULL, &device));
        EXPECT(INTERNAL_ERROR, MAKE(ODD(int), &device));
        EXPECT(INTERNAL_ERROR, MAKE(&d, NULL));
        EXPECT(INTERNAL_ERROR, MAKE(&d, ODD(struct vdevice8)));
        EXPECT(INVALID_USAGE, MAKE(&d, &device));
        device.ndevs = -1;
        EXPECT(INVALID_USAGE, MAKE(&d, &device));
        device.ndevs = version == 12 ? 9 : 5;
        EXPECT(INVALID_USAGE, MAKE(&d, &device));
        device.ndevs = 2;
        device.devs[1] = 9999;
        WRONG(MAKE(&d, &device));
        device.devs[1] = -1;
        WRONG(MAKE(&d, &device));
        CHECK(d == -5);
    }
    if (version >= 11) {
        void *mine = context;
        void *wrong[] = {NULL, (void *)1, GARBAGE, p.send, scratch};
        for (int i = 0; i < 5; i++) {
            context = wrong[i];
            REFUSED(INTERNAL_ERROR, any_listen(0, handle, &comm));
            REFUSED(INTERNAL_ERROR, any_connect(0, handle, &comm));
            REFUSED(INTERNAL_ERROR, any_finalize());
            REFUSED(INTERNAL_ERROR, version == 11 ? net11->setNetAttr(context, NULL) : net12->setNetAttr(context, NULL));
        }
        context = mine;
    }
    transfer(&p, 1, 1000);
    close_pair(&p);
    EXPECT(SUCCESS, any_finalize());
}

/* Whatever *request held, it holds a request or NULL afterwards. */
#define WITH_REQUEST(check, call) \
    do { \
        void *filled_[] = {NULL, (void *)1, GARBAGE, scratch}; \
        for (int i_ = 0; i_ < 4; i_++) { \
            void *request = filled_[i_]; \
            check(call); \
            CHECK(request == NULL); \
        } \
    } while (0)
#define REFUSED_3(call) REFUSED(INTERNAL_ERROR, call)
#define REFUSED_5(call) REFUSED(INVALID_USAGE, call)
#define SUCCEEDS(call) EXPECT(SUCCESS, call)

static void requests(void) {
    NEED(any_init(log_line));
    struct pair p = settled_pair();
    static char from[4096], to[4096];
    void *send_mr, *recv_mr;
    NEED(any_reg(p.send, from, sizeof from, 1, &send_mr));
    NEED(any_reg(p.recv, to, sizeof to, 1, &recv_mr));

    void *no_comms[] = {NULL, (void *)1, GARBAGE, p.listen, p.recv, send_mr, scratch};
    for (int i = 0; i < 7; i++) WITH_REQUEST(REFUSED_3, any_isend(no_comms[i], from, 8, 0, send_mr, &request));
    REFUSED(INTERNAL_ERROR, any_isend(p.send, from, 8, 0, send_mr, NULL));
    REFUSED(INTERNAL_ERROR, any_isend(p.send, from, 8, 0, send_mr, ODD(void *)));
    WITH_REQUEST(REFUSED_3, any_isend(p.send, NULL, 8, 0, send_mr, &request));
    WITH_REQUEST(REFUSED_5, any_isend(p.send, from, MAX_MESSAGE + 1, 0, send_mr, &request));
    CHECK(strstr(last_warning, "1073741825") && strstr(last_warning, "0 to 1073741824"));
    WITH_REQUEST(REFUSED_5, any_isend(p.send, from, -1, 0, send_mr, &request));
    /* Nobody has posted a receive: NULL, to be tried again, or an error; a wrong registration may be noticed before or after. */
    WITH_REQUEST(SUCCEEDS, any_isend(p.send, from, 8, 0, send_mr, &request));

    void *data[MAX_RECVS + 1];
    void *mrs[MAX_RECVS + 1];
    long long sizes[MAX_RECVS + 1];
    int tags[MAX_RECVS + 1], flush_sizes[MAX_RECVS + 1];
    for (int i = 0; i <= MAX_RECVS; i++) {
        data[i] = to + i * 8;
        mrs[i] = recv_mr;
        sizes[i] = 8;
        tags[i] = 0;
        flush_sizes[i] = 8;
    }
    void *no_recvs[] = {NULL, (void *)1, GARBAGE, p.listen, p.send, recv_mr, scratch};
    for (int i = 0; i < 7; i++) {
        WITH_REQUEST(REFUSED_3, any_irecv(no_recvs[i], 1, data, sizes, tags, mrs, &request));
        WITH_REQUEST(REFUSED_3, any_iflush(no_recvs[i], 1, data, flush_sizes, mrs, &request));
    }
    REFUSED(INTERNAL_ERROR, any_irecv(p.recv, 1, data, sizes, tags, mrs, NULL));
    REFUSED(INTERNAL_ERROR, any_irecv(p.recv, 1, data, sizes, tags, mrs, ODD(void *)));
    REFUSED(INTERNAL_ERROR, any_iflush(p.recv, 1, data, flush_sizes, mrs, NULL));
    WITH_REQUEST(REFUSED_3, any_irecv(p.recv, 1, NULL, sizes, tags, mrs, &request));
    if (version > 4) {
        int counts[] = {0, -1, MAX_RECVS + 1, 1 << 30};
        for (int i = 0; i < 4; i++) {
            WITH_REQUEST(REFUSED_5, any_irecv(p.recv, counts[i], data, sizes, tags, mrs, &request));
            WITH_REQUEST(REFUSED_5, any_iflush(p.recv, counts[i], data, flush_sizes, mrs, &request));
        }
        CHECK(strstr(last_warning, "1073741824") && strstr(last_warning, "1 to 8"));
        WITH_REQUEST(REFUSED_3, any_irecv(p.recv, 1, ODD(void *), sizes, tags, mrs, &request));
        WITH_REQUEST(REFUSED_3, any_irecv(p.recv, 1, data, NULL, tags, mrs, &request));
        WITH_REQUEST(REFUSED_3, any_irecv(p.recv, 1, data, sizes, NULL, mrs, &request));
        WITH_REQUEST(REFUSED_3, any_irecv(p.recv, 1, data, sizes, ODD(int), mrs, &request));
        WITH_REQUEST(REFUSED_3, any_irecv(p.recv, 1, data, sizes, tags, NULL, &request));
        WITH_REQUEST(REFUSED_3, any_irecv(p.recv, 1, data, sizes, tags, ODD(void *), &request));
        WITH_REQUEST(REFUSED_3, any_iflush(p.recv, 1, NULL, flush_sizes, mrs, &request));
        WITH_REQUEST(REFUSED_3, any_iflush(p.recv, 1, data, NULL, mrs, &request));
        WITH_REQUEST(REFUSED_3, any_iflush(p.recv, 1, data, ODD(int), mrs, &request));
        WITH_REQUEST(REFUSED_3, any_iflush(p.recv, 1, data, flush_sizes, NULL, &request));
    }
    sizes[0] = MAX_MESSAGE + 1;
    WITH_REQUEST(REFUSED_5, any_irecv(p.recv, 1, data, sizes, tags, mrs, &request));
    sizes[0] = -1;
    WITH_REQUEST(REFUSED_5, any_irecv(p.recv, 1, data, sizes, tags, mrs, &request));
    flush_sizes[0] = -1;
    WITH_REQUEST(REFUSED_5, any_iflush(p.recv, 1, data, flush_sizes, mrs, &request));
    sizes[0] = flush_sizes[0] = 8;
    data[0] = NULL;
    WITH_REQUEST(REFUSED_3, any_irecv(p.recv, 1, data, sizes, tags, mrs, &request));
    data[0] = to;
    void *no_mrs[] = {NULL, (void *)1, GARBAGE, p.recv, scratch};
    for (int i = 0; i < 5; i++) {
        mrs[0] = no_mrs[i];
        WITH_REQUEST(WRONG, any_irecv(p.recv, 1, data, sizes, tags, mrs, &request));
    }
    mrs[0] = recv_mr;
    /* Outside of its registration. */
    data[0] = to + sizeof to - 4;
    WITH_REQUEST(WRONG, any_irecv(p.recv, 1, data, sizes, tags, mrs, &request));
    data[0] = to;
    /* Host memory needs no flush. */
    WITH_REQUEST(SUCCEEDS, any_iflush(p.recv, 1, data, flush_sizes, mrs, &request));

    int done = -5, got[MAX_RECVS] = {-5};
    void *no_requests[] = {NULL, (void *)1, GARBAGE, scratch, p.send, p.recv, p.listen, recv_mr};
    for (int i = 0; i < 8; i++) REFUSED(INTERNAL_ERROR, any_test(no_requests[i], &done, got));

    /* A posted request overwrites what was there, and is good for one completion. */
    void *filled[] = {NULL, (void *)1, GARBAGE, scratch};
    for (int i = 0; i < 4; i++) {
        void *recv = filled[i], *send = filled[i];
        memcpy(from, &i, sizeof i);
        NEED(any_irecv(p.recv, 1, data, sizes, tags, mrs, &recv));
        CHECK(recv != NULL && recv != filled[i]);
        for (double end = now() + 30; now() < end;) {
            send = filled[i];
            NEED(any_isend(p.send, from, 4, 0, send_mr, &send));
            CHECK(send == NULL || send != filled[i]);
            if (send != NULL) break;
            int none = 0;
            NEED(any_test(recv, &none, NULL));
            CHECK(none == 0);
        }
        REFUSED(INTERNAL_ERROR, any_test(recv, NULL, got));
        REFUSED(INTERNAL_ERROR, any_test(recv, ODD(int), got));
        REFUSED(INTERNAL_ERROR, any_test(recv, &done, ODD(int)));
        CHECK(done == -5 && got[0] == -5);
        int sent = 0, received = 0;
        for (double end = now() + 30; !(sent && received) && now() < end;) {
            if (!sent) NEED(any_test(send, &sent, NULL));
            if (!received) NEED(any_test(recv, &received, got));
        }
        CHECK(sent && received && got[0] == 4 && memcmp(to, &i, sizeof i) == 0);
        got[0] = -5;
        REFUSED(INTERNAL_ERROR, any_test(recv, &done, got));
        REFUSED(INTERNAL_ERROR, any_test(send, &done, got));
        CHECK(done == -5 && got[0] == -5);
    }
    /* With a receive posted, a wrong registration of the send is noticed. */
    void *recv = NULL;
    NEED(any_irecv(p.recv, 1, data, sizes, tags, mrs, &recv));
    for (int i = 0; i < 5; i++) {
        result refused = SUCCESS;
        for (double end = now() + 30; refused == SUCCESS && now() < end;) {
            void *request = (void *)1;
            refused = any_isend(p.send, from, 4, 0, no_mrs[i], &request);
            CHECK(request == NULL);
            NEED(any_test(recv, &done, NULL));
        }
        CHECK(refused != SUCCESS);
    }
    close_pair(&p);
    REFUSED(INTERNAL_ERROR, any_test(recv, &done, got));
    EXPECT(SUCCESS, any_finalize());
}

static void kinds(void) {
    NEED(any_init(log_line));
    struct pair p = settled_pair();
    void *comm = GARBAGE, *recv = NULL, *mr;
    void *wrong[] = {NULL, (void *)1, GARBAGE, scratch};
    static char to[64];
    void *data = to;
    long long size = sizeof to;
    int tag = 0, done;
    NEED(any_reg(p.recv, to, sizeof to, 1, &mr));
    for (double end = now() + 30; recv == NULL && now() < end;) NEED(any_irecv(p.recv, 1, &data, &size, &tag, &mr, &recv));
    for (int i = 0; i < 4; i++) {
        REFUSED(INTERNAL_ERROR, any_close_send(wrong[i]));
        REFUSED(INTERNAL_ERROR, any_close_recv(wrong[i]));
        REFUSED(INTERNAL_ERROR, any_close_listen(wrong[i]));
    }
    REFUSED(INTERNAL_ERROR, any_close_send(p.recv));
    CHECK(strstr(last_warning, "is a receive comm, not a send comm"));
    REFUSED(INTERNAL_ERROR, any_close_send(p.listen));
    REFUSED(INTERNAL_ERROR, any_close_recv(p.send));
    REFUSED(INTERNAL_ERROR, any_close_recv(recv));
    REFUSED(INTERNAL_ERROR, any_close_listen(p.recv));
    REFUSED(INTERNAL_ERROR, any_accept(p.send, &comm));
    if (context != NULL) REFUSED(INTERNAL_ERROR, any_close_send(context));
    close_pair(&p);
    struct pair old = p;
    /* Again, and once more with comms in the same places. */
    for (int round = 0; round < 2; round++) {
        REFUSED(INTERNAL_ERROR, any_close_send(old.send));
        REFUSED(INTERNAL_ERROR, any_close_recv(old.recv));
        REFUSED(INTERNAL_ERROR, any_close_listen(old.listen));
        REFUSED(INTERNAL_ERROR, any_accept(old.listen, &comm));
        REFUSED(INTERNAL_ERROR, any_reg(old.send, scratch, 64, 1, &comm));
        REFUSED(INTERNAL_ERROR, any_test(recv, &done, NULL));
        if (round == 0) p = connect_pair();
    }
    CHECK(comm == GARBAGE);
    transfer(&p, 3, 100000);
    close_pair(&p);
    EXPECT(SUCCESS, any_finalize());
}

/* Version 4's handle ends where the page ends. */
static void guard_page(void) {
    long page = sysconf(_SC_PAGESIZE);
    char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED && mprotect(pages + page, page, PROT_NONE) == 0);
    void *handle = pages + page - 64;
    struct pair p = {0};
    NEED(any_init(log_line));
    NEED(any_listen(0, handle, &p.listen));
    for (double end = now() + 30; (p.send == NULL || p.recv == NULL) && now() < end;) {
        if (p.send == NULL) NEED(any_connect(0, handle, &p.send));
        if (p.recv == NULL) NEED(any_accept(p.listen, &p.recv));
    }
    transfer(&p, 9, 4096);
    close_pair(&p);
    EXPECT(SUCCESS, any_finalize());
}

static int entries(const char *path) {
    int n = 0;
    DIR *directory = opendir(path);
    while (directory != NULL && readdir(directory) != NULL) n++;
    if (directory != NULL) closedir(directory);
    return n;
}

/* 100 times, each with its own setting, which the log names. */
static void cycles(void) {
    int fds = 0, tasks = 0;
    for (int i = 0; i <= 100; i++) {
        char value[16];
        snprintf(value, sizeof value, "%d", 70000 + 128 * i);
        setenv("RAILHEAD_SPLIT_MIN", value, 1);
        strcpy(looked_for, value);
        found = 0;
        NEED(any_init(log_line));
        CHECK(found > 0);
        /* A second one while something is open changes nothing. */
        if (i % 10 == 0) {
            struct pair p = connect_pair();
            void *first = context;
            setenv("RAILHEAD_SPLIT_MIN", "123456", 1);
            strcpy(looked_for, "123456");
            found = 0;
            NEED(any_init(log_line));
            CHECK(found == 0);
            EXPECT(SUCCESS, any_finalize());
            context = first;
            transfer(&p, i, 5000);
            close_pair(&p);
        }
        EXPECT(SUCCESS, any_finalize());
        if (version >= 11) {
            /* The logger is forgotten. */
            int before = warnings, n;
            EXPECT(INTERNAL_ERROR, any_devices(&n));
            CHECK(warnings == before);
        }
        if (i == 10) fds = entries("/proc/self/fd"), tasks = entries("/proc/self/task");
    }
    CHECK(entries("/proc/self/fd") == fds);
    CHECK(entries("/proc/self/task") == tasks);
}

/* The child's old comms are dead, its new ones live, and the parent does not notice. */
static void forked(void) {
    NEED(any_init(log_line));
    struct pair p = connect_pair();
    transfer(&p, 1, 300000);
    pid_t child = fork();
    if (child == 0) {
        int n;
        void *mr, *request = (void *)1, *old_context = context;
        REFUSED(INTERNAL_ERROR, any_devices(&n));
        CHECK(strstr(last_warning, "fork"));
        REFUSED(INTERNAL_ERROR, any_close_send(p.send));
        CHECK(strstr(last_warning, "fork"));
        NEED(any_init(log_line));
        REFUSED(INTERNAL_ERROR, any_reg(p.send, scratch, 64, 1, &mr));
        CHECK(strstr(last_warning, "before a fork"));
        REFUSED(INTERNAL_ERROR, any_isend(p.send, scratch, 8, 0, NULL, &request));
        CHECK(strstr(last_warning, "before a fork") && request == NULL);
        if (version >= 11) {
            void *mine = context;
            context = old_context;
            REFUSED(INTERNAL_ERROR, any_finalize());
            context = mine;
        }
        struct pair own = connect_pair();
        transfer(&own, 2, 300000);
        REFUSED(INTERNAL_ERROR, any_close_recv(p.recv));
        REFUSED(INTERNAL_ERROR, any_close_listen(p.listen));
        close_pair(&own);
        EXPECT(SUCCESS, any_finalize());
        _exit(failures != 0);
    }
    transfer(&p, 3, 300000);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    transfer(&p, 4, 300000);
    close_pair(&p);
    EXPECT(SUCCESS, any_finalize());
}

static volatile int stop;

static void *register_all_the_time(void *comm) {
    long turns = 0;
    static char memory[1 << 16];
    while (!stop || turns < 100) {
        void *mr;
        NEED(any_reg(comm, memory, sizeof memory, 1, &mr));
        NEED(any_dereg(comm, mr));
        turns++;
    }
    return (void *)turns;
}

/* Another thread registers memory on the comms that this one drives. */
static void registration(void) {
    NEED(any_init(log_line));
    struct pair p = connect_pair();
    pthread_t on_send, on_recv;
    CHECK(pthread_create(&on_send, NULL, register_all_the_time, p.send) == 0);
    CHECK(pthread_create(&on_recv, NULL, register_all_the_time, p.recv) == 0);
    for (int i = 0; i < 200; i++) transfer(&p, i, 100 * i + 1);
    stop = 1;
    pthread_join(on_send, NULL);
    pthread_join(on_recv, NULL);
    close_pair(&p);
    EXPECT(SUCCESS, any_finalize());
}

static void *accept_until_it_works(void *listen) {
    void *recv = NULL;
    /* Refused whenever the other thread is inside with the same comm, and then let in. */
    while (net4->accept(listen, &recv) != SUCCESS) sched_yield();
    return recv;
}

/* While a thread waits in version 4's accept, another one is turned away from the listen comm. */
static void two_threads(void) {
    NEED(any_init(log_line));
    struct pair p = {0};
    char handle[128];
    pthread_t waits;
    NEED(any_listen(0, handle, &p.listen));
    CHECK(pthread_create(&waits, NULL, accept_until_it_works, p.listen) == 0);
    void *none = NULL;
    result status = SUCCESS;
    for (double end = now() + 30; status == SUCCESS && now() < end;) status = net5->accept(p.listen, &none);
    CHECK(status == INTERNAL_ERROR && none == NULL && strstr(last_warning, "in use by another thread"));
    for (double end = now() + 30; p.send == NULL && now() < end;) NEED(any_connect(0, handle, &p.send));
    pthread_join(waits, &p.recv);
    transfer(&p, 1, 1000);
    close_pair(&p);
    EXPECT(SUCCESS, any_finalize());
}

/* What every version says of every device. */
static void properties(void) {
    NEED(any_init(log_line));
    int n = 0;
    NEED(any_devices(&n));
    const char *first_name = NULL;
    for (int dev = 0; dev < n; dev++) {
        NEED(any_properties(dev, scratch));
        struct props_v4 *p4 = (void *)scratch;
        struct props_v8 *p8 = (void *)scratch;
        struct props_v9 *p9 = (void *)scratch;
        struct props_v12 *p12 = (void *)scratch;
        const char *name = p4->name;
        CHECK(name != NULL && name[0] != 0 && p4->ptrSupport == 1);
        int speed = version <= 7 ? p4->speed : version == 8 ? p8->speed : p9->speed;
        CHECK(speed > 0);
        if (version >= 9) {
            CHECK(p9->regIsGlobal == 1 && p9->maxRecvs == 8 && p9->netDeviceType == 0 && p9->netDeviceVersion == 0);
            CHECK(p9->vProps.ndevs == 1 && p9->vProps.devs[0] == dev);
            size_t most = version == 12 ? p12->maxP2pBytes : p9->maxP2pBytes;
            CHECK(most == (size_t)MAX_MESSAGE);
        }
        if (version == 12) CHECK(p12->railId == -1 && p12->planeId == -1 && p12->maxMultiRequestSize == 1);
        NEED(any_properties(dev, scratch));
        CHECK(p4->name == name);
        if (dev == 0) first_name = name;
    }
    EXPECT(SUCCESS, any_finalize());
    CHECK(first_name != NULL && strlen(first_name) > 0);
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"before_init", before_init}, {"arguments", arguments}, {"requests", requests},         {"kinds", kinds},           {"guard_page", guard_page},
    {"cycles", cycles},           {"forked", forked},       {"registration", registration}, {"properties", properties},
    {"two_threads", two_threads},
};

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    load(argv[1]);
    version = atoi(argv[2]);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (strcmp(cases[i].name, argv[3]) != 0) continue;
        cases[i].run();
        return failures != 0;
    }
    fprintf(stderr, "no case %s\n", argv[3]);
    return 2;
}
