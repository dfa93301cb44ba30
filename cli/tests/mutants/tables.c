/* The tables that the mutant exports. */
#include "mutant.h"

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
    .closeSend = m_close, .closeRecv = m_close, .closeListen = m_close_listen, .finalize = m_finalize, .setNetAttr = m_attributes,
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
