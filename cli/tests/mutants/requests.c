/* The mutant's isend, irecv, iflush and test. */
#include "mutant.h"

int recvs_outstanding;

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

result m_isend(void *c, void *data, size_t size, int tag, void *mr, void *phandle, void **out) {
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

result m_irecv(void *c, int n, void **data, const size_t *sizes, const int *tags, void **handles, void **phandles, void **out) {
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

result m_iflush(void *c, int n, void **data, int *sizes, void **handles, void **out) {
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

result m_test(void *asked, int *done, int *sizes) {
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
