/*
 * A net plugin with one defect: it forwards all calls to the plugin in MUTANT_OF, and does wrong what MUTANT names (tests/check.rs has the
 * list; "none": nothing). Exports versions 4, 8 and 12. Compiled and loaded by tests/check.rs alone.
 */
#include "../../../tests/c/nccl_net.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_USAGE = 5, REMOTE_ERROR = 6 };
enum { MAX_RECVS = 8, LATE = 256 };

struct listener {
    void *real;
    int open, served;
    char handle[128];
    struct listener *next;
};

struct memory {
    void *real, *data;
    size_t size;
    int dead;
    struct memory *next;
};

struct request {
    struct comm *comm;
    void *real;      /* NULL: there is none in the real plugin, or not yet */
    int held;        /* a send that was not posted yet */
    int fake;        /* done as far as the caller is concerned */
    int n;
    unsigned char *data[MAX_RECVS];
    size_t room[MAX_RECVS];
    size_t size;
    int tag;
    struct memory *memory;
    unsigned long number; /* counted per comm, from 0 */
};

struct comm {
    void *real;
    int sends;
    struct listener *listener;
    pthread_t owner;
    unsigned long posted, finished;
    int outstanding;
    int nulls;
    struct request *held;    /* a send that waits for its turn */
    void *late[LATE];        /* real requests that the caller believes done */
    int lates;
};

static int version;
static struct net_v4 *net4;
static struct net_v8 *net8;
static struct net_v12 *net12;

static struct listener *listeners;
static struct memory *memories;
static struct comm *first_send, *stalled;
static int recvs_outstanding, listens_closed, finalized;
static volatile int registering;

static int is(const char *name) {
    const char *mutant = getenv("MUTANT");
    return mutant != NULL && strcmp(mutant, name) == 0;
}

static void hang(void) {
    for (;;)
        pause();
}

static void *new(size_t size) {
    void *memory = calloc(1, size);
    if (memory == NULL)
        abort();
    return memory;
}

/* ---- the real plugin ---- */

static void load(int wanted) {
    const char *path = getenv("MUTANT_OF");
    void *library = path != NULL ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (library == NULL) {
        fprintf(stderr, "MUTANT_OF: %s\n", path != NULL ? dlerror() : "not set");
        exit(3);
    }
    version = wanted;
    net4 = dlsym(library, "ncclNetPlugin_v4");
    net8 = dlsym(library, "ncclNetPlugin_v8");
    net12 = dlsym(library, "ncclNetPlugin_v12");
}

#define REAL(...) (version == 4 ? net4->__VA_ARGS__ : version == 8 ? net8->__VA_ARGS__ : net12->__VA_ARGS__)

static result real_isend(struct comm *comm, void *data, size_t size, int tag, struct memory *memory, void *phandle, void **request) {
    void *mr = memory != NULL ? memory->real : NULL;
    if (is("crosstalk") && first_send != NULL)
        comm = first_send;
    switch (version) {
    case 4: return net4->isend(comm->real, data, (int)size, mr, request);
    case 8: return net8->isend(comm->real, data, (int)size, tag, mr, request);
    default: return net12->isend(comm->real, data, size, tag, mr, phandle, request);
    }
}

static result real_irecv(struct comm *comm, int n, void **data, const size_t *sizes, int *tags, void **mrs, void **phandles, void **request) {
    int ints[MAX_RECVS];
    size_t longs[MAX_RECVS];
    for (int i = 0; i < n; i++) {
        ints[i] = (int)sizes[i];
        longs[i] = sizes[i];
    }
    switch (version) {
    case 4: return net4->irecv(comm->real, data[0], ints[0], mrs[0], request);
    case 8: return net8->irecv(comm->real, n, data, ints, tags, mrs, request);
    default: return net12->irecv(comm->real, n, data, longs, tags, mrs, phandles, request);
    }
}

/* ---- init and devices ---- */

static result m_finished(void) { return finalized && is("finalize_all") ? INTERNAL_ERROR : SUCCESS; }

static result m_init(void **ctx, uint64_t id, struct comm_config *config, logger log, profiler profile) {
    if (is("init_fails")) {
        log(2, 0x10, __FILE__, __LINE__, "%s", "mutant: no init today");
        return SYSTEM_ERROR;
    }
    if (is("init_once") && finalized)
        return INTERNAL_ERROR;
    switch (version) {
    case 4: return net4->init(log);
    case 8: return net8->init(log);
    default: return net12->init(ctx, id, config, log, profile);
    }
}

static result m_finalize(void *ctx) {
    finalized = 1;
    if (is("finalize_hangs"))
        hang();
    return net12->finalize(ctx);
}

static result m_devices(int *n) {
    static int calls;
    result r = REAL(devices(n));
    if (is("no_device"))
        *n = 0;
    if (is("devices_vary"))
        *n += calls++ % 2;
    if (is("same_name"))
        *n += 1;
    return r;
}

/* A device that "same_name" adds is the one before it once more. */
static int real_device(int dev) { return is("same_name") && dev > 0 ? dev - 1 : dev; }

#define SPOIL(p) do { \
        static int asked; \
        if (is("no_name")) (p)->name = ""; \
        if (is("null_name")) (p)->name = NULL; \
        if (is("no_host")) (p)->ptrSupport = 2; \
        if (is("speed_0")) (p)->speed = 0; \
        if (is("speed_varies")) (p)->speed += asked++; \
        if (is("no_comms")) (p)->maxComms = 0; \
    } while (0)

static result m_properties4(int dev, struct props_v4 *props) {
    result r = net4->getProperties(real_device(dev), props);
    SPOIL(props);
    return r;
}
static result m_properties8(int dev, struct props_v8 *props) {
    result r = net8->getProperties(real_device(dev), props);
    SPOIL(props);
    if (is("no_recvs")) props->maxRecvs = 0;
    if (is("odd_device")) props->netDeviceType = 9;
    return r;
}
static result m_properties12(int dev, struct props_v12 *props) {
    result r = net12->getProperties(real_device(dev), props);
    SPOIL(props);
    if (is("no_recvs")) props->maxRecvs = 0;
    if (is("odd_device")) props->netDeviceType = 9;
    if (is("vprops_empty")) props->vProps.ndevs = 0;
    if (is("vprops_wild")) props->vProps.devs[0] = 1000;
    return r;
}

/* ---- connecting ---- */

static size_t handle_size(void) { return version == 4 ? 64 : 128; }

static struct comm *new_comm(void *real, int sends, struct listener *listener) {
    struct comm *comm = new(sizeof *comm);
    comm->real = real;
    comm->sends = sends;
    comm->listener = listener;
    comm->owner = pthread_self();
    if (sends && first_send == NULL)
        first_send = comm;
    return comm;
}

static result m_listen(void *ctx, int dev, void *handle, void **comm) {
    struct listener *listener = new(sizeof *listener);
    result r = m_finished();
    if (r == SUCCESS && is("listen_once") && listens_closed)
        r = SYSTEM_ERROR;
    if (r == SUCCESS) {
        switch (version) {
        case 4: r = net4->listen(dev, handle, &listener->real); break;
        case 8: r = net8->listen(dev, handle, &listener->real); break;
        default: r = net12->listen(ctx, dev, handle, &listener->real); break;
        }
    }
    if (r != SUCCESS)
        return r;
    memcpy(listener->handle, handle, handle_size());
    if (is("wide_handle"))
        memset((char *)handle + handle_size(), 0, 64);
    if (is("one_handle") && listeners != NULL)
        memcpy(handle, listeners->handle, handle_size());
    listener->open = 1;
    listener->next = listeners;
    listeners = listener;
    *comm = listener;
    return SUCCESS;
}

static result real_connect(void *ctx, int dev, struct comm_config *config, void *handle, void **comm, struct device_handle **device) {
    (void)config;
    switch (version) {
    case 4: return net4->connect(dev, handle, comm);
    case 8: return net8->connect(dev, handle, comm, device);
    default: return net12->connect(ctx, dev, handle, comm, device);
    }
}

static result m_connect(void *ctx, int dev, void *handle, void **out, struct device_handle **device) {
    static int calls;
    void *real = NULL;
    *out = NULL;
    result r = m_finished();
    if (r != SUCCESS)
        return r;
    if (is("connect_null") && calls++ == 0)
        return SUCCESS;
    if (is("connect_fails_first") && calls++ == 0)
        return REMOTE_ERROR;
    for (struct listener *l = listeners; l != NULL; l = l->next) {
        if (is("refuse_self") && l->open && memcmp(l->handle, handle, 8) == 0 && memcmp(l->handle, handle, handle_size()) == 0)
            return INVALID_USAGE;
        if (is("connect_after_accept") && l->open && !l->served) {
            if (version == 4)
                hang();
            return SUCCESS;
        }
    }
    do
        r = real_connect(ctx, dev, NULL, handle, &real, device);
    while (is("block_connect") && r == SUCCESS && real == NULL);
    if (is("device_handle") && device != NULL)
        *device = (void *)16;
    if (is("device_handle_needed") && version > 4)
        *device = NULL;
    if (r == SUCCESS && real != NULL)
        *out = new_comm(real, 1, NULL);
    return r;
}

static result m_accept(void *listen_comm, void **out, struct device_handle **device) {
    struct listener *listener = listen_comm;
    void *real = NULL;
    result r;
    *out = NULL;
    do {
        switch (version) {
        case 4: r = net4->accept(listener->real, &real); break;
        case 8: r = net8->accept(listener->real, &real, device); break;
        default: r = net12->accept(listener->real, &real, device); break;
        }
    } while (is("block_accept") && r == SUCCESS && real == NULL);
    if (is("accept_fails_first") && r == SUCCESS && real == NULL)
        return SYSTEM_ERROR;
    if (r == SUCCESS && real != NULL) {
        listener->served = 1;
        *out = new_comm(real, 0, listener);
    }
    return r;
}

static result m_close_listen(void *listen_comm) {
    struct listener *listener = listen_comm;
    if (is("close_listen_blocks") && !listener->served)
        hang();
    listener->open = 0;
    listens_closed++;
    return REAL(closeListen(listener->real));
}

static result m_close(void *closing) {
    struct comm *comm = closing;
    if (comm->outstanding > 0 && is("close_waits"))
        hang();
    if (is(comm->sends ? "close_send_blocks" : "close_recv_blocks"))
        hang();
    if (comm == first_send)
        first_send = NULL;
    if (comm == stalled)
        stalled = NULL;
    return comm->sends ? REAL(closeSend(comm->real)) : REAL(closeRecv(comm->real));
}

/* ---- memory ---- */

static result m_reg(void *c, void *data, size_t size, int type, void **out) {
    struct comm *comm = c;
    struct memory *memory = new(sizeof *memory);
    result r;
    if (is("register_once")) {
        for (struct memory *m = memories; m != NULL; m = m->next)
            if (!m->dead && m->data == data)
                return INVALID_USAGE;
    }
    if (is("reg_race")) {
        registering = 1;
        usleep(1000);
    }
    switch (version) {
    case 4: r = net4->regMr(comm->real, data, (int)size, type, &memory->real); break;
    case 8: r = net8->regMr(comm->real, data, size, type, &memory->real); break;
    default: r = net12->regMr(comm->real, data, size, type, &memory->real); break;
    }
    registering = 0;
    if (r != SUCCESS)
        return r;
    memory->data = data;
    memory->size = size;
    memory->next = memories;
    memories = memory;
    *out = memory;
    return SUCCESS;
}

static result m_dereg(void *c, void *handle) {
    struct comm *comm = c;
    struct memory *memory = handle;
    memory->dead = 1;
    for (struct memory *m = memories; is("dereg_all") && m != NULL; m = m->next)
        if (m->data == memory->data)
            m->dead = 1;
    return REAL(deregMr(comm->real, memory->real));
}

static int memory_refused(struct memory *memory, const void *data) {
    return memory != NULL && (memory->dead || (is("base_only") && data != memory->data));
}

/* ---- requests ---- */

static struct request *new_request(struct comm *comm, void *real) {
    struct request *request = new(sizeof *request);
    request->comm = comm;
    request->real = real;
    request->n = 1;
    request->number = comm->posted++;
    comm->outstanding++;
    recvs_outstanding += !comm->sends;
    return request;
}

/* Drives what the caller no longer asks for. */
static void drive(struct comm *comm) {
    for (int i = 0; i < comm->lates; i++) {
        int done = 0, sizes[MAX_RECVS];
        if (REAL(test(comm->late[i], &done, sizes)) != SUCCESS || done)
            comm->late[i--] = comm->late[--comm->lates];
    }
}

static void keep_late(struct comm *comm, void *real) {
    if (comm->lates == LATE)
        abort();
    comm->late[comm->lates++] = real;
}

static void post_held(struct comm *comm) {
    struct request *held = comm->held;
    void *real = NULL;
    if (held == NULL || real_isend(comm, held->data[0], held->size, held->tag, held->memory, NULL, &real) != SUCCESS || real == NULL)
        return;
    comm->held = NULL;
    held->held = 0;
    if (held->fake)
        keep_late(comm, real);
    else
        held->real = real;
}

static struct request *hold(struct comm *comm, void *data, size_t size, int tag, struct memory *memory) {
    struct request *request = new_request(comm, NULL);
    request->held = 1;
    request->data[0] = data;
    request->size = size;
    request->tag = tag;
    request->memory = memory;
    comm->held = request;
    return request;
}

/* A copy of a message that may be sent when the caller's buffer is no longer good. */
static struct memory *copy_of(struct comm *comm, const void *data, size_t size) {
    void *copy = aligned_alloc(4096, (size + 4096) & ~(size_t)4095), *memory = NULL;
    if (copy == NULL)
        abort();
    memcpy(copy, data, size);
    return m_reg(comm, copy, size, 1, &memory) == SUCCESS ? memory : NULL;
}

static result refused(void **out) {
    if (!is("request_unwritten"))
        *out = NULL;
    return SUCCESS;
}

static result m_isend(void *c, void *data, size_t size, int tag, void *mr, void *phandle, void **out) {
    struct comm *comm = c;
    struct memory *memory = mr;
    void *real = NULL;
    struct request *request;
    result r;
    if (is("late_push"))
        post_held(comm);
    drive(comm);
    if (memory_refused(memory, data) || (is("thread_bound") && !pthread_equal(comm->owner, pthread_self())) ||
        (is("reg_race") && registering) || m_finished() != SUCCESS) {
        *out = NULL;
        return INTERNAL_ERROR;
    }
    if (is("half_duplex") && recvs_outstanding > 0)
        return refused(out);
    if ((is("null_stays") && comm->nulls > 0) || comm->lates == LATE)
        return refused(out);
    if (is("zero_lost") && size == 0) {
        request = new_request(comm, NULL);
        request->fake = 1;
        *out = request;
        return SUCCESS;
    }
    if (is("drop") && comm->posted == 5) {
        request = new_request(comm, NULL);
        request->fake = 1;
        request->size = size;
        *out = request;
        return SUCCESS;
    }
    if (is("swap") && comm->posted == 2) {
        *out = hold(comm, data, size, tag, memory);
        return SUCCESS;
    }
    if (is("late_push") && comm->held == NULL && comm->posted > 0) {
        memory = copy_of(comm, data, size);
        request = hold(comm, memory->data, size, tag, memory);
        request->fake = 1;
        *out = request;
        return SUCCESS;
    }
    do
        r = real_isend(comm, data, size, tag, memory, phandle, &real);
    while (is("block_isend") && r == SUCCESS && real == NULL);
    if (r != SUCCESS && is("hides_errors"))
        return refused(out);
    if (r == SUCCESS && real == NULL && is("null_is_error")) {
        *out = NULL;
        return SYSTEM_ERROR;
    }
    if (r != SUCCESS || real == NULL) {
        comm->nulls++;
        return r == SUCCESS ? refused(out) : (*out = NULL, r);
    }
    if (is("null_posted") && comm->posted == 3 && comm->lates == 0 && comm->nulls >= 0) {
        comm->nulls = -1000000;
        keep_late(comm, real);
        return refused(out);
    }
    request = new_request(comm, real);
    request->data[0] = data;
    request->size = size;
    if (is("swap") && comm->held != NULL)
        post_held(comm);
    if (is("duplicate") && request->number == 5) {
        struct request *again = hold(comm, data, size, tag, copy_of(comm, data, size));
        again->data[0] = again->memory->data;
        again->fake = 1;
        comm->posted--;
    }
    *out = request;
    return SUCCESS;
}

static result m_irecv(void *c, int n, void **data, const size_t *sizes, const int *tags, void **handles, void **phandles, void **out) {
    struct comm *comm = c;
    void *mrs[MAX_RECVS], *real = *out;
    size_t room[MAX_RECVS];
    int own_tags[MAX_RECVS] = {0}, optional = *out == (void *)1;
    result r;
    drive(comm);
    if (is("phandles_read") && phandles == NULL)
        *(volatile int *)NULL = 1;
    if (is("recv_bound") && !pthread_equal(comm->owner, pthread_self()))
        return *out = NULL, INTERNAL_ERROR;
    if (is("few_requests") && comm->outstanding >= (version == 4 ? 4 : 16))
        return *out = NULL, SUCCESS;
    if (is("requests_error") && comm->outstanding >= (version == 4 ? 4 : 16))
        return *out = NULL, INTERNAL_ERROR;
    if (is("stall_others") && stalled != NULL && stalled != comm)
        return *out = NULL, SUCCESS;
    if (is("listen_kills") && comm->listener != NULL && !comm->listener->open)
        return *out = NULL, INTERNAL_ERROR;
    for (int i = 0; i < n; i++) {
        struct memory *memory = handles[i];
        if (memory_refused(memory, data[i]))
            return *out = NULL, INTERNAL_ERROR;
        mrs[i] = memory != NULL ? memory->real : NULL;
        room[i] = is("grow") ? sizes[i] * 2 : sizes[i];
        own_tags[i] = tags != NULL ? tags[i] : 0;
    }
    if (is("swap_tags") && n > 1) {
        int tag = own_tags[0];
        own_tags[0] = own_tags[1];
        own_tags[1] = tag;
    }
    r = real_irecv(comm, n, data, room, own_tags, mrs, phandles, &real);
    if (r != SUCCESS && is("hides_errors"))
        return *out = NULL, SUCCESS;
    if (r != SUCCESS || real == NULL)
        return *out = NULL, r;
    struct request *request = new_request(comm, real);
    request->n = n;
    for (int i = 0; i < n; i++) {
        request->data[i] = data[i];
        request->room[i] = sizes[i];
    }
    if (stalled == NULL)
        stalled = comm;
    if (is("optional_kept") && optional) {
        keep_late(comm, real);
        return SUCCESS;
    }
    *out = request;
    return SUCCESS;
}

static result m_iflush(void *c, int n, void **data, int *sizes, void **handles, void **out) {
    struct comm *comm = c;
    void *mrs[MAX_RECVS], *real = NULL;
    result r;
    for (int i = 0; i < n; i++)
        mrs[i] = ((struct memory *)handles[i])->real;
    if (is("flush_unwritten"))
        return SUCCESS;
    if (is("flush_hangs")) {
        struct request *request = new_request(comm, NULL);
        *out = request;
        return SUCCESS;
    }
    switch (version) {
    case 4: r = net4->iflush(comm->real, data[0], sizes[0], mrs[0], &real); break;
    case 8: r = net8->iflush(comm->real, n, data, sizes, mrs, &real); break;
    default: r = net12->iflush(comm->real, n, data, sizes, mrs, &real); break;
    }
    *out = real != NULL ? new_request(comm, real) : NULL;
    return r;
}

static result finish(struct request *request) {
    struct comm *comm = request->comm;
    comm->outstanding--;
    comm->finished++;
    recvs_outstanding -= !comm->sends;
    if (stalled == comm && comm->outstanding == 0)
        stalled = NULL;
    return SUCCESS;
}

static void damage(struct request *request, int *sizes) {
    struct comm *comm = request->comm;
    unsigned char *data = request->data[0];
    size_t size = (size_t)sizes[0];
    if (comm->sends) {
        if (is("send_size_lost"))
            sizes[0] = 0;
        if (is("scribble") && request->number == 3)
            data[0] ^= 1;
        return;
    }
    if (size > 0 && is("flip_byte") && request->number == 3)
        data[size / 2] ^= 0x10;
    if (size > 0 && is("flip_late") && request->number == 150)
        data[size - 1] ^= 0x10;
    if (size > 0 && is("flip_very_late") && request->number == 900)
        data[size - 1] ^= 0x10;
    if (size > 16u << 20 && is("flip_large"))
        data[16 << 20] ^= 0x10;
    if (is("overrun"))
        data[request->room[0]] ^= 1;
    if (is("underrun"))
        data[-1] ^= 1;
    if (is("size_lost"))
        sizes[0] = (int)request->room[0];
    if (is("swap_sizes") && request->n > 1) {
        int first = sizes[0];
        sizes[0] = sizes[1];
        sizes[1] = first;
    }
    if (is("zero_size") && sizes[0] == 0)
        sizes[0] = 1;
}

static result m_test(void *asked, int *done, int *sizes) {
    struct request *request = asked;
    struct comm *comm = request->comm;
    int own[MAX_RECVS] = {0};
    result r = SUCCESS;
    if (is("done_unwritten") && request->real != NULL) {
        int own_done = 0;
        r = REAL(test(request->real, &own_done, own));
        if (own_done)
            *done = 1;
        if (own_done && sizes != NULL)
            memcpy(sizes, own, sizeof(int) * (size_t)request->n);
        return r;
    }
    *done = 0;
    drive(comm);
    if (is("swap") || is("duplicate"))
        (void)(comm->posted > 3 ? post_held(comm) : (void)0);
    if (is("reg_race") && registering)
        return INTERNAL_ERROR;
    if (is("tests_in_order") && request->number != comm->finished)
        return INTERNAL_ERROR;
    if (is("sizes_needed"))
        sizes[0] = 0;
    if (request->fake) {
        if (sizes != NULL)
            sizes[0] = (int)request->size;
        *done = 1;
        return finish(request);
    }
    if (request->real == NULL)
        return SUCCESS;
    if (is(comm->sends ? "early_send" : "early_recv")) {
        keep_late(comm, request->real);
        if (sizes != NULL)
            sizes[0] = (int)(comm->sends ? request->size : request->room[0]);
        *done = 1;
        return finish(request);
    }
    do
        r = REAL(test(request->real, done, own));
    while (is("block_test") && r == SUCCESS && !*done);
    if (r != SUCCESS && is("hides_errors")) {
        *done = 0;
        return SUCCESS;
    }
    if (r != SUCCESS || !*done)
        return r;
    damage(request, own);
    if (sizes != NULL)
        memcpy(sizes, own, sizeof(int) * (size_t)request->n);
    if (sizes != NULL && is("all_sizes"))
        memset(sizes + request->n, 0x11, sizeof(int) * (size_t)(MAX_RECVS - request->n));
    return finish(request);
}

/* ---- version 4 ---- */

static result init_4(logger log) { return load(4), m_init(NULL, 0, NULL, log, NULL); }
static result listen_4(int dev, void *handle, void **comm) { return m_listen(NULL, dev, handle, comm); }
static result connect_4(int dev, void *handle, void **comm) { return m_connect(NULL, dev, handle, comm, NULL); }
static result accept_4(void *listen, void **comm) { return m_accept(listen, comm, NULL); }
static result reg_4(void *comm, void *data, int size, int type, void **mr) { return m_reg(comm, data, (size_t)size, type, mr); }
static result isend_4(void *comm, void *data, int size, void *mr, void **request) {
    return m_isend(comm, data, (size_t)size, 0, mr, NULL, request);
}
static result irecv_4(void *comm, void *data, int size, void *mr, void **request) {
    size_t room = (size_t)size;
    return m_irecv(comm, 1, &data, &room, NULL, &mr, NULL, request);
}
static result iflush_4(void *comm, void *data, int size, void *mr, void **request) {
    return m_iflush(comm, 1, &data, &size, &mr, request);
}

struct net_v4 ncclNetPlugin_v4 = {
    .name = "Mutant", .init = init_4, .devices = m_devices, .getProperties = m_properties4, .listen = listen_4, .connect = connect_4,
    .accept = accept_4, .regMr = reg_4, .deregMr = m_dereg, .isend = isend_4, .irecv = irecv_4, .iflush = iflush_4, .test = m_test,
    .closeSend = m_close, .closeRecv = m_close, .closeListen = m_close_listen,
};

/* ---- version 8 ---- */

static result init_8(logger log) { return load(8), m_init(NULL, 0, NULL, log, NULL); }
static result listen_8(int dev, void *handle, void **comm) { return m_listen(NULL, dev, handle, comm); }
static result connect_8(int dev, void *handle, void **comm, struct device_handle **device) {
    return m_connect(NULL, dev, handle, comm, device);
}
static result isend_8(void *comm, void *data, int size, int tag, void *mr, void **request) {
    return m_isend(comm, data, (size_t)size, tag, mr, NULL, request);
}
static result irecv_8(void *comm, int n, void **data, int *sizes, int *tags, void **mrs, void **request) {
    size_t room[MAX_RECVS];
    for (int i = 0; i < n; i++)
        room[i] = (size_t)sizes[i];
    return m_irecv(comm, n, data, room, tags, mrs, NULL, request);
}

struct net_v8 ncclNetPlugin_v8 = {
    .name = "Mutant", .init = init_8, .devices = m_devices, .getProperties = m_properties8, .listen = listen_8, .connect = connect_8,
    .accept = m_accept, .regMr = m_reg, .deregMr = m_dereg, .isend = isend_8, .irecv = irecv_8, .iflush = m_iflush, .test = m_test,
    .closeSend = m_close, .closeRecv = m_close, .closeListen = m_close_listen,
};

/* ---- version 12 ---- */

static result init_12(void **ctx, uint64_t id, struct comm_config *config, logger log, profiler profile) {
    return load(12), m_init(ctx, id, config, log, profile);
}
static result irecv_12(void *comm, int n, void **data, size_t *sizes, int *tags, void **mrs, void **phandles, void **request) {
    return m_irecv(comm, n, data, sizes, tags, mrs, phandles, request);
}

struct net_v12 ncclNetPlugin_v12 = {
    .name = "Mutant", .init = init_12, .devices = m_devices, .getProperties = m_properties12, .listen = m_listen, .connect = m_connect,
    .accept = m_accept, .regMr = m_reg, .deregMr = m_dereg, .isend = m_isend, .irecv = irecv_12, .iflush = m_iflush, .test = m_test,
    .closeSend = m_close, .closeRecv = m_close, .closeListen = m_close_listen, .finalize = m_finalize,
};

/* Defects of the tables themselves. */
__attribute__((constructor)) static void spoil_tables(void) {
    if (is("null_close_listen")) {
        ncclNetPlugin_v4.closeListen = NULL;
        ncclNetPlugin_v8.closeListen = NULL;
        ncclNetPlugin_v12.closeListen = NULL;
    }
    if (is("null_finalize"))
        ncclNetPlugin_v12.finalize = NULL;
    if (is("nameless")) {
        ncclNetPlugin_v4.name = "";
        ncclNetPlugin_v8.name = "";
        ncclNetPlugin_v12.name = NULL;
    }
}
