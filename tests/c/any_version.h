/* The functions of the tables as one set, for programs that run the same calls through every version: `use_version` picks the table,
 * the rest passes its arguments on. What a version has not (tags, contexts, several buffers) is left out; pointers go through unchanged,
 * so NULL and misaligned ones arrive as they are. */
#ifndef RAILHEAD_TESTS_ANY_VERSION_H
#define RAILHEAD_TESTS_ANY_VERSION_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_net.h"

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_USAGE = 5, REMOTE_ERROR = 6, MAX_RECVS = 8 };
#define MAX_MESSAGE (1ll << 30)

static int version;
static struct net_v4 *net4;
static struct net_v5 *net5;
static struct net_v6 *net6;
static struct net_v7 *net7;
static struct net_v8 *net8;
static struct net_v9 *net9;
static struct net_v10 *net10;
static struct net_v11 *net11;
static struct net_v12 *net12;
/* Of the last any_init, from version 11. */
static void *context;

static void load(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    net4 = dlsym(library, "ncclNetPlugin_v4");
    net5 = dlsym(library, "ncclNetPlugin_v5");
    net6 = dlsym(library, "ncclNetPlugin_v6");
    net7 = dlsym(library, "ncclNetPlugin_v7");
    net8 = dlsym(library, "ncclNetPlugin_v8");
    net9 = dlsym(library, "ncclNetPlugin_v9");
    net10 = dlsym(library, "ncclNetPlugin_v10");
    net11 = dlsym(library, "ncclNetPlugin_v11");
    net12 = dlsym(library, "ncclNetPlugin_v12");
    if (!net4 || !net5 || !net6 || !net7 || !net8 || !net9 || !net10 || !net11 || !net12) {
        fprintf(stderr, "a table is missing\n");
        exit(1);
    }
}

/* One function of the chosen table, where all versions take the same arguments; and with contexts from version 11. */
#define IN(v, ...) case v: return net##v->__VA_ARGS__
#define EVERY(...) \
    switch (version) { \
        IN(4, __VA_ARGS__); IN(5, __VA_ARGS__); IN(6, __VA_ARGS__); IN(7, __VA_ARGS__); IN(8, __VA_ARGS__); \
        IN(9, __VA_ARGS__); IN(10, __VA_ARGS__); IN(11, __VA_ARGS__); IN(12, __VA_ARGS__); \
    } \
    abort()

static inline result any_init(logger log) {
    struct comm_config config = {-1};
    switch (version) {
        IN(4, init(log)); IN(5, init(log)); IN(6, init(log)); IN(7, init(log)); IN(8, init(log)); IN(9, init(log));
        IN(10, init(log, NULL));
        IN(11, init(&context, 1, &config, log, NULL)); IN(12, init(&context, 1, &config, log, NULL));
    }
    abort();
}
/* Ends what any_init began, as far as the version can. */
static inline result any_finalize(void) {
    switch (version) { IN(11, finalize(context)); IN(12, finalize(context)); }
    return SUCCESS;
}
static inline result any_devices(int *n) { EVERY(devices(n)); }
/* `props` is of the version's own type. */
static inline result any_properties(int dev, void *props) { EVERY(getProperties(dev, props)); }
static inline result any_listen(int dev, void *handle, void **comm) {
    switch (version) {
        IN(4, listen(dev, handle, comm)); IN(5, listen(dev, handle, comm)); IN(6, listen(dev, handle, comm)); IN(7, listen(dev, handle, comm));
        IN(8, listen(dev, handle, comm)); IN(9, listen(dev, handle, comm)); IN(10, listen(dev, handle, comm));
        IN(11, listen(context, dev, handle, comm)); IN(12, listen(context, dev, handle, comm));
    }
    abort();
}
static inline result any_connect(int dev, void *handle, void **comm) {
    struct comm_config config = {-1};
    struct device_handle *device = NULL;
    switch (version) {
        IN(4, connect(dev, handle, comm)); IN(5, connect(dev, handle, comm)); IN(6, connect(dev, handle, comm));
        IN(7, connect(dev, handle, comm, &device)); IN(8, connect(dev, handle, comm, &device)); IN(9, connect(dev, handle, comm, &device));
        IN(10, connect(dev, &config, handle, comm, &device));
        IN(11, connect(context, dev, handle, comm, &device)); IN(12, connect(context, dev, handle, comm, &device));
    }
    abort();
}
static inline result any_accept(void *listen, void **comm) {
    struct device_handle *device = NULL;
    switch (version) {
        IN(4, accept(listen, comm)); IN(5, accept(listen, comm)); IN(6, accept(listen, comm));
        IN(7, accept(listen, comm, &device)); IN(8, accept(listen, comm, &device)); IN(9, accept(listen, comm, &device));
        IN(10, accept(listen, comm, &device)); IN(11, accept(listen, comm, &device)); IN(12, accept(listen, comm, &device));
    }
    abort();
}
static inline result any_reg(void *comm, void *data, long long size, int type, void **mr) { EVERY(regMr(comm, data, size, type, mr)); }
/* Version 6 and later. */
static inline result any_reg_dma_buf(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **mr) {
    switch (version) {
        IN(6, regMrDmaBuf(comm, data, size, type, offset, fd, mr)); IN(7, regMrDmaBuf(comm, data, size, type, offset, fd, mr));
        IN(8, regMrDmaBuf(comm, data, size, type, offset, fd, mr)); IN(9, regMrDmaBuf(comm, data, size, type, offset, fd, mr));
        IN(10, regMrDmaBuf(comm, data, size, type, offset, fd, mr)); IN(11, regMrDmaBuf(comm, data, size, type, offset, fd, mr));
        IN(12, regMrDmaBuf(comm, data, size, type, offset, fd, mr));
    }
    abort();
}
static inline result any_dereg(void *comm, void *mr) { EVERY(deregMr(comm, mr)); }
static inline result any_isend(void *comm, void *data, long long size, int tag, void *mr, void **request) {
    switch (version) {
        IN(4, isend(comm, data, size, mr, request));
        IN(5, isend(comm, data, size, tag, mr, request)); IN(6, isend(comm, data, size, tag, mr, request));
        IN(7, isend(comm, data, size, tag, mr, request)); IN(8, isend(comm, data, size, tag, mr, request));
        IN(9, isend(comm, data, size, tag, mr, request));
        IN(10, isend(comm, data, size, tag, mr, NULL, request)); IN(11, isend(comm, data, size, tag, mr, NULL, request));
        IN(12, isend(comm, data, size, tag, mr, NULL, request));
    }
    abort();
}
/* `sizes` is of long long; versions up to 8 get ints. Version 4 takes the first buffer alone. */
static inline result any_irecv(void *comm, int n, void **data, long long *sizes, int *tags, void **mrs, void **request) {
    int ints[MAX_RECVS + 1] = {0}, *narrow = sizes ? ints : NULL;
    size_t longs[MAX_RECVS + 1] = {0}, *wide = sizes ? longs : NULL;
    for (int i = 0; sizes != NULL && i < n && i <= MAX_RECVS; i++) {
        ints[i] = (int)sizes[i];
        longs[i] = (size_t)sizes[i];
    }
    switch (version) {
        IN(4, irecv(comm, data ? data[0] : NULL, ints[0], mrs ? mrs[0] : NULL, request));
        IN(5, irecv(comm, n, data, narrow, tags, mrs, request)); IN(6, irecv(comm, n, data, narrow, tags, mrs, request));
        IN(7, irecv(comm, n, data, narrow, tags, mrs, request)); IN(8, irecv(comm, n, data, narrow, tags, mrs, request));
        IN(9, irecv(comm, n, data, wide, tags, mrs, request));
        IN(10, irecv(comm, n, data, wide, tags, mrs, NULL, request)); IN(11, irecv(comm, n, data, wide, tags, mrs, NULL, request));
        IN(12, irecv(comm, n, data, wide, tags, mrs, NULL, request));
    }
    abort();
}
static inline result any_iflush(void *comm, int n, void **data, int *sizes, void **mrs, void **request) {
    switch (version) {
        IN(4, iflush(comm, data ? data[0] : NULL, sizes ? sizes[0] : 0, mrs ? mrs[0] : NULL, request));
        IN(5, iflush(comm, n, data, sizes, mrs, request)); IN(6, iflush(comm, n, data, sizes, mrs, request));
        IN(7, iflush(comm, n, data, sizes, mrs, request)); IN(8, iflush(comm, n, data, sizes, mrs, request));
        IN(9, iflush(comm, n, data, sizes, mrs, request)); IN(10, iflush(comm, n, data, sizes, mrs, request));
        IN(11, iflush(comm, n, data, sizes, mrs, request)); IN(12, iflush(comm, n, data, sizes, mrs, request));
    }
    abort();
}
static inline result any_test(void *request, int *done, int *sizes) { EVERY(test(request, done, sizes)); }
static inline result any_close_send(void *comm) { EVERY(closeSend(comm)); }
static inline result any_close_recv(void *comm) { EVERY(closeRecv(comm)); }
static inline result any_close_listen(void *comm) { EVERY(closeListen(comm)); }

#endif
