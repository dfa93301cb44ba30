/* The mutant's listen, connect, accept and close, and its registered memory. */
#include "mutant.h"

volatile int registering;
struct comm *first_send, *stalled;

static struct listener *listeners;
static struct memory *memories;
static int listens_closed;

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

result m_listen(void *ctx, int dev, void *handle, void **comm) {
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

result m_connect(void *ctx, int dev, void *handle, void **out, struct device_handle **device) {
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

result m_accept(void *listen_comm, void **out, struct device_handle **device) {
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

result m_close_listen(void *listen_comm) {
    struct listener *listener = listen_comm;
    if (is("close_listen_blocks") && !listener->served)
        hang();
    listener->open = 0;
    listens_closed++;
    return REAL(closeListen(listener->real));
}

result m_close(void *closing) {
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

result m_reg(void *c, void *data, size_t size, int type, void **out) {
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

result m_dereg(void *c, void *handle) {
    struct comm *comm = c;
    struct memory *memory = handle;
    memory->dead = 1;
    for (struct memory *m = memories; is("dereg_all") && m != NULL; m = m->next)
        if (m->data == memory->data)
            m->dead = 1;
    return REAL(deregMr(comm->real, memory->real));
}
