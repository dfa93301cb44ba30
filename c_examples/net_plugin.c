#define _GNU_SOURCE
#include "net_plugin.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- loading ---- */

static void *open_library(const char *plugin, char *why, size_t why_size)
{
    void *library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
    if (library != NULL)
        return library;
    (void)snprintf(why, why_size, "%s", dlerror());
    if (strchr(plugin, '/') != NULL)
        return NULL;
    char name[300];
    int length = snprintf(name, sizeof name, "libnccl-net-%s.so", plugin);
    if (length < 0 || (size_t)length >= sizeof name)
        return NULL;
    return dlopen(name, RTLD_NOW | RTLD_LOCAL);
}

static int find_table(struct net *net, int abi)
{
    char symbol[32];
    (void)snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", abi);
    net->table.any = dlsym(net->library, symbol);
    net->abi = abi;
    return net->table.any != NULL;
}

#define COPY_COMMON(net, source)                 \
    do {                                         \
        (net)->name = (source)->name;            \
        (net)->devices = (source)->devices;      \
        (net)->accept = (source)->accept;        \
        (net)->regMr = (source)->regMr;          \
        (net)->deregMr = (source)->deregMr;      \
        (net)->test = (source)->test;            \
        (net)->closeSend = (source)->closeSend;  \
        (net)->closeRecv = (source)->closeRecv;  \
        (net)->closeListen = (source)->closeListen; \
    } while (0)

static void copy_common(struct net *net)
{
    switch (net->abi) {
    case 8: COPY_COMMON(net, net->table.v8); break;
    case 9: COPY_COMMON(net, net->table.v9); break;
    case 10: COPY_COMMON(net, net->table.v10); break;
    case 11: COPY_COMMON(net, net->table.v11); break;
    default: COPY_COMMON(net, net->table.v12); break;
    }
}

int net_open(struct net *net, const char *plugin, int abi, char *why, size_t why_size)
{
    memset(net, 0, sizeof *net);
    net->library = open_library(plugin, why, why_size);
    if (net->library == NULL)
        return -1;
    int newest = abi != 0 ? abi : NET_ABI_NEWEST;
    int oldest = abi != 0 ? abi : NET_ABI_OLDEST;
    for (int version = newest; version >= oldest; version--) {
        if (find_table(net, version)) {
            copy_common(net);
            return 0;
        }
    }
    (void)snprintf(why, why_size, "%s exports no ncclNetPlugin_v<N> with N from %d to %d", plugin, oldest, newest);
    (void)dlclose(net->library);
    return -1;
}

int net_close(struct net *net)
{
    return dlclose(net->library) == 0 ? 0 : -1;
}

/* ---- the entries that differ ---- */

__attribute__((format(printf, 5, 6))) static void logger(ncclDebugLogLevel level, unsigned long flags, const char *file, int line, const char *format, ...)
{
    (void)flags, (void)file, (void)line;
    if (level != NCCL_LOG_WARN)
        return;
    char message[1024];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    (void)fprintf(stderr, "[%d] WARN %s\n", (int)getpid(), message);
}

ncclResult_t net_init(struct net *net)
{
    const uint64_t communicator = 1;
    ncclNetCommConfig_t config = {.trafficClass = -1};
    switch (net->abi) {
    case 8: return net->table.v8->init(logger);
    case 9: return net->table.v9->init(logger);
    case 10: return net->table.v10->init(logger, NULL);
    case 11: return net->table.v11->init(&net->context, communicator, &config, logger, NULL);
    default: return net->table.v12->init(&net->context, communicator, &config, logger, NULL);
    }
}

ncclResult_t net_finalize(struct net *net)
{
    switch (net->abi) {
    case 11: return net->table.v11->finalize(net->context);
    case 12: return net->table.v12->finalize(net->context);
    default: return ncclSuccess; /* older tables have no such entry */
    }
}

#define COPY_DEVICE(device, source)              \
    do {                                         \
        (device)->name = (source)->name;         \
        (device)->pci_path = (source)->pciPath;  \
        (device)->pointers = (source)->ptrSupport; \
        (device)->speed_mbps = (source)->speed;  \
        (device)->max_recvs = (source)->maxRecvs; \
    } while (0)

ncclResult_t net_device(const struct net *net, int dev, struct net_device *device)
{
    union {
        ncclNetProperties_v8_t v8;
        ncclNetProperties_v9_t v9;
        ncclNetProperties_v11_t v11;
        ncclNetProperties_v12_t v12;
    } properties;
    memset(&properties, 0, sizeof properties);
    ncclResult_t result;
    switch (net->abi) {
    case 8:
        result = net->table.v8->getProperties(dev, &properties.v8);
        COPY_DEVICE(device, &properties.v8);
        break;
    case 9:
        result = net->table.v9->getProperties(dev, &properties.v9);
        COPY_DEVICE(device, &properties.v9);
        break;
    case 10:
        result = net->table.v10->getProperties(dev, &properties.v9);
        COPY_DEVICE(device, &properties.v9);
        break;
    case 11:
        result = net->table.v11->getProperties(dev, &properties.v11);
        COPY_DEVICE(device, &properties.v11);
        break;
    default:
        result = net->table.v12->getProperties(dev, &properties.v12);
        COPY_DEVICE(device, &properties.v12);
        break;
    }
    return result;
}

ncclResult_t net_listen(const struct net *net, int dev, void *handle, void **listen_comm)
{
    switch (net->abi) {
    case 8: return net->table.v8->listen(dev, handle, listen_comm);
    case 9: return net->table.v9->listen(dev, handle, listen_comm);
    case 10: return net->table.v10->listen(dev, handle, listen_comm);
    case 11: return net->table.v11->listen(net->context, dev, handle, listen_comm);
    default: return net->table.v12->listen(net->context, dev, handle, listen_comm);
    }
}

ncclResult_t net_connect(const struct net *net, int dev, void *handle, void **send_comm)
{
    ncclNetDeviceHandle_t *on_device = NULL;
    ncclNetCommConfig_t config = {.trafficClass = -1};
    switch (net->abi) {
    case 8: return net->table.v8->connect(dev, handle, send_comm, &on_device);
    case 9: return net->table.v9->connect(dev, handle, send_comm, &on_device);
    case 10: return net->table.v10->connect(dev, &config, handle, send_comm, &on_device);
    case 11: return net->table.v11->connect(net->context, dev, handle, send_comm, &on_device);
    default: return net->table.v12->connect(net->context, dev, handle, send_comm, &on_device);
    }
}

ncclResult_t net_accept(const struct net *net, void *listen_comm, void **recv_comm)
{
    ncclNetDeviceHandle_t *on_device = NULL;
    return net->accept(listen_comm, recv_comm, &on_device);
}

ncclResult_t net_isend(const struct net *net, void *send_comm, void *data, size_t size, int tag, void *mhandle, void **request)
{
    switch (net->abi) {
    case 8:
        if (size > INT_MAX)
            return ncclInvalidArgument;
        return net->table.v8->isend(send_comm, data, (int)size, tag, mhandle, request);
    case 9: return net->table.v9->isend(send_comm, data, size, tag, mhandle, request);
    case 10: return net->table.v10->isend(send_comm, data, size, tag, mhandle, NULL, request);
    case 11: return net->table.v11->isend(send_comm, data, size, tag, mhandle, NULL, request);
    default: return net->table.v12->isend(send_comm, data, size, tag, mhandle, NULL, request);
    }
}

ncclResult_t net_irecv(const struct net *net, void *recv_comm, void *data, size_t size, int tag, void *mhandle, void **request)
{
    int size_v8 = (int)size;
    void *profiler = NULL;
    switch (net->abi) {
    case 8:
        if (size > INT_MAX)
            return ncclInvalidArgument;
        return net->table.v8->irecv(recv_comm, 1, &data, &size_v8, &tag, &mhandle, request);
    case 9: return net->table.v9->irecv(recv_comm, 1, &data, &size, &tag, &mhandle, request);
    case 10: return net->table.v10->irecv(recv_comm, 1, &data, &size, &tag, &mhandle, &profiler, request);
    case 11: return net->table.v11->irecv(recv_comm, 1, &data, &size, &tag, &mhandle, &profiler, request);
    default: return net->table.v12->irecv(recv_comm, 1, &data, &size, &tag, &mhandle, &profiler, request);
    }
}

const char *net_result_name(ncclResult_t result)
{
    switch (result) {
    case ncclSuccess: return "ncclSuccess";
    case ncclUnhandledCudaError: return "ncclUnhandledCudaError";
    case ncclSystemError: return "ncclSystemError";
    case ncclInternalError: return "ncclInternalError";
    case ncclInvalidArgument: return "ncclInvalidArgument";
    case ncclInvalidUsage: return "ncclInvalidUsage";
    case ncclRemoteError: return "ncclRemoteError";
    case ncclInProgress: return "ncclInProgress";
    }
    return "an unknown result";
}
