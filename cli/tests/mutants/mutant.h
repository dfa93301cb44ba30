/*
 * A net plugin with one defect: it forwards all calls to the plugin in MUTANT_OF, and does wrong what MUTANT names (tests/commands/check.rs has the
 * list; "none": nothing). Exports versions 4, 8 and 12. Compiled and loaded by tests/commands/check.rs alone.
 *
 * init.c: init, devices, properties; connections.c: listen to close, and memory; requests.c: isend to test; tables.c: what is exported.
 */
#ifndef RAILHEAD_MUTANT_H
#define RAILHEAD_MUTANT_H

#include "../../../tests/c/nccl_net.h"

#include <pthread.h>
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

/* Of the process: one version is in use. */
extern int version;
extern struct net_v4 *net4;
extern struct net_v8 *net8;
extern struct net_v12 *net12;
extern int finalized;
extern volatile int registering;
extern int recvs_outstanding;
/* The comms that "crosstalk" and "stall_others" are about. */
extern struct comm *first_send, *stalled;

/* A function of the real plugin whose arguments are the same in all versions. */
#define REAL(...) (version == 4 ? net4->__VA_ARGS__ : version == 8 ? net8->__VA_ARGS__ : net12->__VA_ARGS__)

/* Whether this is the defect. */
static inline int is(const char *name) {
    const char *mutant = getenv("MUTANT");
    return mutant != NULL && strcmp(mutant, name) == 0;
}

static inline void hang(void) {
    for (;;)
        pause();
}

static inline void *new(size_t size) {
    void *memory = calloc(1, size);
    if (memory == NULL)
        abort();
    return memory;
}

void load(int wanted);
result m_init(void **ctx, uint64_t id, struct comm_config *config, logger log, profiler profile);
result m_finalize(void *ctx);
/* An error after finalize, if that is the defect. */
result m_finished(void);
result m_attributes(void *ctx, struct net_attr *attributes);
result m_devices(int *n);
result m_properties4(int dev, struct props_v4 *props);
result m_properties8(int dev, struct props_v8 *props);
result m_properties12(int dev, struct props_v12 *props);

result m_listen(void *ctx, int dev, void *handle, void **comm);
result m_connect(void *ctx, int dev, void *handle, void **comm, struct device_handle **device);
result m_accept(void *listen_comm, void **comm, struct device_handle **device);
result m_close_listen(void *listen_comm);
result m_close(void *comm);
result m_reg(void *comm, void *data, size_t size, int type, void **handle);
result m_dereg(void *comm, void *handle);

result m_isend(void *comm, void *data, size_t size, int tag, void *memory, void *phandle, void **request);
result m_irecv(void *comm, int n, void **data, const size_t *sizes, const int *tags, void **memories, void **phandles, void **request);
result m_iflush(void *comm, int n, void **data, int *sizes, void **memories, void **request);
result m_test(void *request, int *done, int *sizes);

#endif
