/*
 * The part of NCCL's network plugin interface that the examples use, versions 8 to 12.
 *
 * Written for this repository from the published interface: the names, the order and the types are NCCL's, because they are the
 * interface; nothing is copied from its headers. A plugin exports a data symbol ncclNetPlugin_v<N> that holds one ncclNet_v<N>_t.
 *
 *   table   loaded by
 *   v8      NCCL 2.20 - 2.23, RCCL 2.21
 *   v9      NCCL 2.24 - 2.25
 *   v10     NCCL 2.26 - 2.27
 *   v11     NCCL 2.28 - 2.29
 *   v12     NCCL 2.30 and later
 */
#ifndef C_EXAMPLES_NCCL_NET_H
#define C_EXAMPLES_NCCL_NET_H

#include <stddef.h>
#include <stdint.h>

#define NCCL_NET_HANDLE_MAXSIZE 128
#define NCCL_NET_MAX_REQUESTS 32

enum { NCCL_PTR_HOST = 1, NCCL_PTR_CUDA = 2, NCCL_PTR_DMABUF = 4 };

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
} ncclResult_t;

typedef enum {
    NCCL_LOG_NONE = 0,
    NCCL_LOG_VERSION = 1,
    NCCL_LOG_WARN = 2,
    NCCL_LOG_INFO = 3,
    NCCL_LOG_ABORT = 4,
    NCCL_LOG_TRACE = 5
} ncclDebugLogLevel;

typedef void (*ncclDebugLogger_t)(ncclDebugLogLevel level, unsigned long flags, const char *file, int line, const char *format, ...);
typedef ncclResult_t (*ncclProfilerCallback_t)(void **event, int type, void *parent, int64_t plugin, void *data);

/* A device whose data path runs on the GPU. Nobody here has one; the pointer to it stays NULL. */
typedef struct ncclNetDeviceHandle ncclNetDeviceHandle_t;

typedef struct { int trafficClass; } ncclNetCommConfig_t;

typedef struct {
    int32_t maxConcurrentPeers, minConcurrentPeers, maxFlowsPerPeer, minFlowsPerPeer;
} ncclNetCommAttr_t;

typedef struct {
    ncclNetCommAttr_t sendCommAttr, recvCommAttr;
    uint32_t op, algo, proto;
} ncclNetAttr_t;

typedef struct { int ndevs; int devs[4]; } ncclNetVDeviceProps_v9_t;
typedef struct { int ndevs; int devs[8]; } ncclNetVDeviceProps_v12_t;

/* ---- properties of a device ---- */

typedef struct {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int regIsGlobal;
    int speed; /* Mbit/s */
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    int netDeviceType;
    int netDeviceVersion;
} ncclNetProperties_v8_t;

typedef struct {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int regIsGlobal;
    int forceFlush;
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    int netDeviceType;
    int netDeviceVersion;
    ncclNetVDeviceProps_v9_t vProps;
    size_t maxP2pBytes;
    size_t maxCollBytes;
} ncclNetProperties_v9_t; /* and v10 */

typedef struct {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int regIsGlobal;
    int forceFlush;
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    int netDeviceType;
    int netDeviceVersion;
    ncclNetVDeviceProps_v9_t vProps;
    size_t maxP2pBytes;
    size_t maxCollBytes;
    int maxMultiRequestSize;
} ncclNetProperties_v11_t;

typedef struct {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int regIsGlobal;
    int forceFlush;
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    int netDeviceType;
    int netDeviceVersion;
    ncclNetVDeviceProps_v12_t vProps;
    size_t maxP2pBytes;
    size_t maxCollBytes;
    int maxMultiRequestSize;
    int16_t railId;
    int16_t planeId;
} ncclNetProperties_v12_t;

/* ---- the tables ---- */

typedef struct {
    const char *name;
    ncclResult_t (*init)(ncclDebugLogger_t logger);
    ncclResult_t (*devices)(int *count);
    ncclResult_t (*getProperties)(int dev, ncclNetProperties_v8_t *properties);
    ncclResult_t (*listen)(int dev, void *handle, void **listenComm);
    ncclResult_t (*connect)(int dev, void *handle, void **sendComm, ncclNetDeviceHandle_t **onDevice);
    ncclResult_t (*accept)(void *listenComm, void **recvComm, ncclNetDeviceHandle_t **onDevice);
    ncclResult_t (*regMr)(void *comm, void *data, size_t size, int type, void **mhandle);
    ncclResult_t (*regMrDmaBuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **mhandle);
    ncclResult_t (*deregMr)(void *comm, void *mhandle);
    ncclResult_t (*isend)(void *sendComm, void *data, int size, int tag, void *mhandle, void **request);
    ncclResult_t (*irecv)(void *recvComm, int n, void **data, int *sizes, int *tags, void **mhandles, void **request);
    ncclResult_t (*iflush)(void *recvComm, int n, void **data, int *sizes, void **mhandles, void **request);
    ncclResult_t (*test)(void *request, int *done, int *sizes);
    ncclResult_t (*closeSend)(void *sendComm);
    ncclResult_t (*closeRecv)(void *recvComm);
    ncclResult_t (*closeListen)(void *listenComm);
    ncclResult_t (*getDeviceMr)(void *comm, void *mhandle, void **onDevice);
    ncclResult_t (*irecvConsumed)(void *recvComm, int n, void *request);
} ncclNet_v8_t;

typedef struct { /* sizes of isend and irecv are size_t; makeVDevice */
    const char *name;
    ncclResult_t (*init)(ncclDebugLogger_t logger);
    ncclResult_t (*devices)(int *count);
    ncclResult_t (*getProperties)(int dev, ncclNetProperties_v9_t *properties);
    ncclResult_t (*listen)(int dev, void *handle, void **listenComm);
    ncclResult_t (*connect)(int dev, void *handle, void **sendComm, ncclNetDeviceHandle_t **onDevice);
    ncclResult_t (*accept)(void *listenComm, void **recvComm, ncclNetDeviceHandle_t **onDevice);
    ncclResult_t (*regMr)(void *comm, void *data, size_t size, int type, void **mhandle);
    ncclResult_t (*regMrDmaBuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **mhandle);
    ncclResult_t (*deregMr)(void *comm, void *mhandle);
    ncclResult_t (*isend)(void *sendComm, void *data, size_t size, int tag, void *mhandle, void **request);
    ncclResult_t (*irecv)(void *recvComm, int n, void **data, size_t *sizes, int *tags, void **mhandles, void **request);
    ncclResult_t (*iflush)(void *recvComm, int n, void **data, int *sizes, void **mhandles, void **request);
    ncclResult_t (*test)(void *request, int *done, int *sizes);
    ncclResult_t (*closeSend)(void *sendComm);
    ncclResult_t (*closeRecv)(void *recvComm);
    ncclResult_t (*closeListen)(void *listenComm);
    ncclResult_t (*getDeviceMr)(void *comm, void *mhandle, void **onDevice);
    ncclResult_t (*irecvConsumed)(void *recvComm, int n, void *request);
    ncclResult_t (*makeVDevice)(int *dev, ncclNetVDeviceProps_v9_t *properties);
} ncclNet_v9_t;

typedef struct { /* a profiler callback in init, a configuration in connect, profiler handles in isend and irecv */
    const char *name;
    ncclResult_t (*init)(ncclDebugLogger_t logger, ncclProfilerCallback_t profiler);
    ncclResult_t (*devices)(int *count);
    ncclResult_t (*getProperties)(int dev, ncclNetProperties_v9_t *properties);
    ncclResult_t (*listen)(int dev, void *handle, void **listenComm);
    ncclResult_t (*connect)(int dev, ncclNetCommConfig_t *config, void *handle, void **sendComm, ncclNetDeviceHandle_t **onDevice);
    ncclResult_t (*accept)(void *listenComm, void **recvComm, ncclNetDeviceHandle_t **onDevice);
    ncclResult_t (*regMr)(void *comm, void *data, size_t size, int type, void **mhandle);
    ncclResult_t (*regMrDmaBuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **mhandle);
    ncclResult_t (*deregMr)(void *comm, void *mhandle);
    ncclResult_t (*isend)(void *sendComm, void *data, size_t size, int tag, void *mhandle, void *profiler, void **request);
    ncclResult_t (*irecv)(void *recvComm, int n, void **data, size_t *sizes, int *tags, void **mhandles, void **profilers, void **request);
    ncclResult_t (*iflush)(void *recvComm, int n, void **data, int *sizes, void **mhandles, void **request);
    ncclResult_t (*test)(void *request, int *done, int *sizes);
    ncclResult_t (*closeSend)(void *sendComm);
    ncclResult_t (*closeRecv)(void *recvComm);
    ncclResult_t (*closeListen)(void *listenComm);
    ncclResult_t (*getDeviceMr)(void *comm, void *mhandle, void **onDevice);
    ncclResult_t (*irecvConsumed)(void *recvComm, int n, void *request);
    ncclResult_t (*makeVDevice)(int *dev, ncclNetVDeviceProps_v9_t *properties);
} ncclNet_v10_t;

typedef struct { /* a context per communicator, from init to finalize; setNetAttr */
    const char *name;
    ncclResult_t (*init)(void **context, uint64_t communicator, ncclNetCommConfig_t *config, ncclDebugLogger_t logger,
                         ncclProfilerCallback_t profiler);
    ncclResult_t (*devices)(int *count);
    ncclResult_t (*getProperties)(int dev, ncclNetProperties_v11_t *properties);
    ncclResult_t (*listen)(void *context, int dev, void *handle, void **listenComm);
    ncclResult_t (*connect)(void *context, int dev, void *handle, void **sendComm, ncclNetDeviceHandle_t **onDevice);
    ncclResult_t (*accept)(void *listenComm, void **recvComm, ncclNetDeviceHandle_t **onDevice);
    ncclResult_t (*regMr)(void *comm, void *data, size_t size, int type, void **mhandle);
    ncclResult_t (*regMrDmaBuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **mhandle);
    ncclResult_t (*deregMr)(void *comm, void *mhandle);
    ncclResult_t (*isend)(void *sendComm, void *data, size_t size, int tag, void *mhandle, void *profiler, void **request);
    ncclResult_t (*irecv)(void *recvComm, int n, void **data, size_t *sizes, int *tags, void **mhandles, void **profilers, void **request);
    ncclResult_t (*iflush)(void *recvComm, int n, void **data, int *sizes, void **mhandles, void **request);
    ncclResult_t (*test)(void *request, int *done, int *sizes);
    ncclResult_t (*closeSend)(void *sendComm);
    ncclResult_t (*closeRecv)(void *recvComm);
    ncclResult_t (*closeListen)(void *listenComm);
    ncclResult_t (*getDeviceMr)(void *comm, void *mhandle, void **onDevice);
    ncclResult_t (*irecvConsumed)(void *recvComm, int n, void *request);
    ncclResult_t (*makeVDevice)(int *dev, ncclNetVDeviceProps_v9_t *properties);
    ncclResult_t (*finalize)(void *context);
    ncclResult_t (*setNetAttr)(void *context, ncclNetAttr_t *attributes);
} ncclNet_v11_t;

typedef struct { /* the functions of v11 with the properties of v12 */
    const char *name;
    ncclResult_t (*init)(void **context, uint64_t communicator, ncclNetCommConfig_t *config, ncclDebugLogger_t logger,
                         ncclProfilerCallback_t profiler);
    ncclResult_t (*devices)(int *count);
    ncclResult_t (*getProperties)(int dev, ncclNetProperties_v12_t *properties);
    ncclResult_t (*listen)(void *context, int dev, void *handle, void **listenComm);
    ncclResult_t (*connect)(void *context, int dev, void *handle, void **sendComm, ncclNetDeviceHandle_t **onDevice);
    ncclResult_t (*accept)(void *listenComm, void **recvComm, ncclNetDeviceHandle_t **onDevice);
    ncclResult_t (*regMr)(void *comm, void *data, size_t size, int type, void **mhandle);
    ncclResult_t (*regMrDmaBuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **mhandle);
    ncclResult_t (*deregMr)(void *comm, void *mhandle);
    ncclResult_t (*isend)(void *sendComm, void *data, size_t size, int tag, void *mhandle, void *profiler, void **request);
    ncclResult_t (*irecv)(void *recvComm, int n, void **data, size_t *sizes, int *tags, void **mhandles, void **profilers, void **request);
    ncclResult_t (*iflush)(void *recvComm, int n, void **data, int *sizes, void **mhandles, void **request);
    ncclResult_t (*test)(void *request, int *done, int *sizes);
    ncclResult_t (*closeSend)(void *sendComm);
    ncclResult_t (*closeRecv)(void *recvComm);
    ncclResult_t (*closeListen)(void *listenComm);
    ncclResult_t (*getDeviceMr)(void *comm, void *mhandle, void **onDevice);
    ncclResult_t (*irecvConsumed)(void *recvComm, int n, void *request);
    ncclResult_t (*makeVDevice)(int *dev, ncclNetVDeviceProps_v12_t *properties);
    ncclResult_t (*finalize)(void *context);
    ncclResult_t (*setNetAttr)(void *context, ncclNetAttr_t *attributes);
} ncclNet_v12_t;

#endif
