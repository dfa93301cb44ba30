/*
 * A loaded NCCL network plugin, whichever version of the table it exports.
 *
 * Loads a plugin as NCCL does and hides the differences between the tables of versions 8 to 12. Every call returns what the
 * plugin returned. Not thread-safe: each thread that wants its own comms opens its own.
 */
#ifndef C_EXAMPLES_NET_PLUGIN_H
#define C_EXAMPLES_NET_PLUGIN_H

#include "nccl_net.h"

enum { NET_ABI_OLDEST = 8, NET_ABI_NEWEST = 12 };

struct net {
    int abi;
    void *library;
    void *context; /* v11 and later: what init returned */
    union {
        const void *any;
        const ncclNet_v8_t *v8;
        const ncclNet_v9_t *v9;
        const ncclNet_v10_t *v10;
        const ncclNet_v11_t *v11;
        const ncclNet_v12_t *v12;
    } table;

    /* The entries that are the same in every version. */
    const char *name;
    ncclResult_t (*devices)(int *count);
    ncclResult_t (*accept)(void *listenComm, void **recvComm, ncclNetDeviceHandle_t **onDevice);
    ncclResult_t (*regMr)(void *comm, void *data, size_t size, int type, void **mhandle);
    ncclResult_t (*deregMr)(void *comm, void *mhandle);
    ncclResult_t (*test)(void *request, int *done, int *sizes);
    ncclResult_t (*closeSend)(void *sendComm);
    ncclResult_t (*closeRecv)(void *recvComm);
    ncclResult_t (*closeListen)(void *listenComm);
};

struct net_device {
    const char *name;
    const char *pci_path; /* may be NULL */
    int pointers;         /* NCCL_PTR_* it can move */
    int speed_mbps;
    int max_recvs;
};

/*
 * Loads `plugin`: a path or a soname, and failing that libnccl-net-<plugin>.so. Takes the newest table it finds, or only version
 * `abi` unless that is 0. Returns 0, or -1 with the reason, in one line, in `why`.
 */
int net_open(struct net *net, const char *plugin, int abi, char *why, size_t why_size);

/* Unloads the library. Comms are closed and net_finalize called before. Returns 0, or -1 if dlclose failed. */
int net_close(struct net *net);

/* The plugin's warnings go to stderr. */
ncclResult_t net_init(struct net *net);
ncclResult_t net_finalize(struct net *net);
ncclResult_t net_device(const struct net *net, int dev, struct net_device *device);
ncclResult_t net_listen(const struct net *net, int dev, void *handle, void **listen_comm);
ncclResult_t net_connect(const struct net *net, int dev, void *handle, void **send_comm);
ncclResult_t net_accept(const struct net *net, void *listen_comm, void **recv_comm);
ncclResult_t net_isend(const struct net *net, void *send_comm, void *data, size_t size, int tag, void *mhandle, void **request);
ncclResult_t net_irecv(const struct net *net, void *recv_comm, void *data, size_t size, int tag, void *mhandle, void **request);

/* "ncclRemoteError" for 6, and so on. */
const char *net_result_name(ncclResult_t result);

#endif
