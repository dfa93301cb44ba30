/* NCCL's net plugin structures, versions 4 to 12, written down from NCCL's documentation and not from Railhead's source. */
#ifndef RAILHEAD_TESTS_NCCL_NET_H
#define RAILHEAD_TESTS_NCCL_NET_H

#include <stddef.h>
#include <stdint.h>

typedef int result;
typedef void (*logger)(int level, unsigned long flags, const char *file, int line, const char *fmt, ...);
typedef result (*profiler)(void **event, int type, void *parent, int64_t plugin, void *data);

struct device_handle { int netDeviceType; int netDeviceVersion; void *handle; size_t size; int needsProxyProgress;
};
struct comm_config { int trafficClass;
};
struct comm_attr { int32_t maxConcurrentPeers; int32_t minConcurrentPeers; int32_t maxFlowsPerPeer; int32_t minFlowsPerPeer;
};
struct net_attr { struct comm_attr sendCommAttr; struct comm_attr recvCommAttr; uint32_t op; uint32_t algo; uint32_t proto;
};
struct vdevice4 { int ndevs; int devs[4];
};
struct vdevice8 { int ndevs; int devs[8];
};

struct props_v4 {
    char *name; char *pciPath; uint64_t guid; int ptrSupport; int speed; int port; int maxComms;
};
struct props_v5 {
    char *name; char *pciPath; uint64_t guid; int ptrSupport; int speed; int port; float latency; int maxComms; int maxRecvs;
};
struct props_v6 {
    char *name; char *pciPath; uint64_t guid; int ptrSupport; int speed; int port; float latency; int maxComms; int maxRecvs;
};
struct props_v7 {
    char *name; char *pciPath; uint64_t guid; int ptrSupport; int speed; int port; float latency; int maxComms; int maxRecvs;
    int netDeviceType; int netDeviceVersion;
};
struct props_v8 {
    char *name; char *pciPath; uint64_t guid; int ptrSupport; int regIsGlobal; int speed; int port; float latency; int maxComms; int maxRecvs;
    int netDeviceType; int netDeviceVersion;
};
struct props_v9 {
    char *name; char *pciPath; uint64_t guid; int ptrSupport; int regIsGlobal; int forceFlush; int speed; int port; float latency;
    int maxComms; int maxRecvs; int netDeviceType; int netDeviceVersion; struct vdevice4 vProps; size_t maxP2pBytes; size_t maxCollBytes;
};
struct props_v10 {
    char *name; char *pciPath; uint64_t guid; int ptrSupport; int regIsGlobal; int forceFlush; int speed; int port; float latency;
    int maxComms; int maxRecvs; int netDeviceType; int netDeviceVersion; struct vdevice4 vProps; size_t maxP2pBytes; size_t maxCollBytes;
};
struct props_v11 {
    char *name; char *pciPath; uint64_t guid; int ptrSupport; int regIsGlobal; int forceFlush; int speed; int port; float latency;
    int maxComms; int maxRecvs; int netDeviceType; int netDeviceVersion; struct vdevice4 vProps; size_t maxP2pBytes; size_t maxCollBytes;
    int maxMultiRequestSize;
};
struct props_v12 {
    char *name; char *pciPath; uint64_t guid; int ptrSupport; int regIsGlobal; int forceFlush; int speed; int port; float latency;
    int maxComms; int maxRecvs; int netDeviceType; int netDeviceVersion; struct vdevice8 vProps; size_t maxP2pBytes; size_t maxCollBytes;
    int maxMultiRequestSize; int16_t railId; int16_t planeId;
};

struct net_v4 {
    const char *name;
    result (*init)(logger);
    result (*devices)(int *);
    result (*getProperties)(int, struct props_v4 *);
    result (*listen)(int, void *, void **);
    result (*connect)(int, void *, void **);
    result (*accept)(void *, void **);
    result (*regMr)(void *, void *, int, int, void **);
    result (*deregMr)(void *, void *);
    result (*isend)(void *, void *, int, void *, void **);
    result (*irecv)(void *, void *, int, void *, void **);
    result (*iflush)(void *, void *, int, void *, void **);
    result (*test)(void *, int *, int *);
    result (*closeSend)(void *);
    result (*closeRecv)(void *);
    result (*closeListen)(void *);
};
struct net_v5 {
    const char *name;
    result (*init)(logger);
    result (*devices)(int *);
    result (*getProperties)(int, struct props_v5 *);
    result (*listen)(int, void *, void **);
    result (*connect)(int, void *, void **);
    result (*accept)(void *, void **);
    result (*regMr)(void *, void *, int, int, void **);
    result (*deregMr)(void *, void *);
    result (*isend)(void *, void *, int, int, void *, void **);
    result (*irecv)(void *, int, void **, int *, int *, void **, void **);
    result (*iflush)(void *, int, void **, int *, void **, void **);
    result (*test)(void *, int *, int *);
    result (*closeSend)(void *);
    result (*closeRecv)(void *);
    result (*closeListen)(void *);
};
struct net_v6 {
    const char *name;
    result (*init)(logger);
    result (*devices)(int *);
    result (*getProperties)(int, struct props_v6 *);
    result (*listen)(int, void *, void **);
    result (*connect)(int, void *, void **);
    result (*accept)(void *, void **);
    result (*regMr)(void *, void *, int, int, void **);
    result (*regMrDmaBuf)(void *, void *, size_t, int, uint64_t, int, void **);
    result (*deregMr)(void *, void *);
    result (*isend)(void *, void *, int, int, void *, void **);
    result (*irecv)(void *, int, void **, int *, int *, void **, void **);
    result (*iflush)(void *, int, void **, int *, void **, void **);
    result (*test)(void *, int *, int *);
    result (*closeSend)(void *);
    result (*closeRecv)(void *);
    result (*closeListen)(void *);
};
struct net_v7 {
    const char *name;
    result (*init)(logger);
    result (*devices)(int *);
    result (*getProperties)(int, struct props_v7 *);
    result (*listen)(int, void *, void **);
    result (*connect)(int, void *, void **, struct device_handle **);
    result (*accept)(void *, void **, struct device_handle **);
    result (*regMr)(void *, void *, int, int, void **);
    result (*regMrDmaBuf)(void *, void *, size_t, int, uint64_t, int, void **);
    result (*deregMr)(void *, void *);
    result (*isend)(void *, void *, int, int, void *, void **);
    result (*irecv)(void *, int, void **, int *, int *, void **, void **);
    result (*iflush)(void *, int, void **, int *, void **, void **);
    result (*test)(void *, int *, int *);
    result (*closeSend)(void *);
    result (*closeRecv)(void *);
    result (*closeListen)(void *);
    result (*getDeviceMr)(void *, void *, void **);
    result (*irecvConsumed)(void *, int, void *);
};
struct net_v8 {
    const char *name;
    result (*init)(logger);
    result (*devices)(int *);
    result (*getProperties)(int, struct props_v8 *);
    result (*listen)(int, void *, void **);
    result (*connect)(int, void *, void **, struct device_handle **);
    result (*accept)(void *, void **, struct device_handle **);
    result (*regMr)(void *, void *, size_t, int, void **);
    result (*regMrDmaBuf)(void *, void *, size_t, int, uint64_t, int, void **);
    result (*deregMr)(void *, void *);
    result (*isend)(void *, void *, int, int, void *, void **);
    result (*irecv)(void *, int, void **, int *, int *, void **, void **);
    result (*iflush)(void *, int, void **, int *, void **, void **);
    result (*test)(void *, int *, int *);
    result (*closeSend)(void *);
    result (*closeRecv)(void *);
    result (*closeListen)(void *);
    result (*getDeviceMr)(void *, void *, void **);
    result (*irecvConsumed)(void *, int, void *);
};
struct net_v9 {
    const char *name;
    result (*init)(logger);
    result (*devices)(int *);
    result (*getProperties)(int, struct props_v9 *);
    result (*listen)(int, void *, void **);
    result (*connect)(int, void *, void **, struct device_handle **);
    result (*accept)(void *, void **, struct device_handle **);
    result (*regMr)(void *, void *, size_t, int, void **);
    result (*regMrDmaBuf)(void *, void *, size_t, int, uint64_t, int, void **);
    result (*deregMr)(void *, void *);
    result (*isend)(void *, void *, size_t, int, void *, void **);
    result (*irecv)(void *, int, void **, size_t *, int *, void **, void **);
    result (*iflush)(void *, int, void **, int *, void **, void **);
    result (*test)(void *, int *, int *);
    result (*closeSend)(void *);
    result (*closeRecv)(void *);
    result (*closeListen)(void *);
    result (*getDeviceMr)(void *, void *, void **);
    result (*irecvConsumed)(void *, int, void *);
    result (*makeVDevice)(int *, struct vdevice4 *);
};
struct net_v10 {
    const char *name;
    result (*init)(logger, profiler);
    result (*devices)(int *);
    result (*getProperties)(int, struct props_v10 *);
    result (*listen)(int, void *, void **);
    result (*connect)(int, struct comm_config *, void *, void **, struct device_handle **);
    result (*accept)(void *, void **, struct device_handle **);
    result (*regMr)(void *, void *, size_t, int, void **);
    result (*regMrDmaBuf)(void *, void *, size_t, int, uint64_t, int, void **);
    result (*deregMr)(void *, void *);
    result (*isend)(void *, void *, size_t, int, void *, void *, void **);
    result (*irecv)(void *, int, void **, size_t *, int *, void **, void **, void **);
    result (*iflush)(void *, int, void **, int *, void **, void **);
    result (*test)(void *, int *, int *);
    result (*closeSend)(void *);
    result (*closeRecv)(void *);
    result (*closeListen)(void *);
    result (*getDeviceMr)(void *, void *, void **);
    result (*irecvConsumed)(void *, int, void *);
    result (*makeVDevice)(int *, struct vdevice4 *);
};
struct net_v11 {
    const char *name;
    result (*init)(void **, uint64_t, struct comm_config *, logger, profiler);
    result (*devices)(int *);
    result (*getProperties)(int, struct props_v11 *);
    result (*listen)(void *, int, void *, void **);
    result (*connect)(void *, int, void *, void **, struct device_handle **);
    result (*accept)(void *, void **, struct device_handle **);
    result (*regMr)(void *, void *, size_t, int, void **);
    result (*regMrDmaBuf)(void *, void *, size_t, int, uint64_t, int, void **);
    result (*deregMr)(void *, void *);
    result (*isend)(void *, void *, size_t, int, void *, void *, void **);
    result (*irecv)(void *, int, void **, size_t *, int *, void **, void **, void **);
    result (*iflush)(void *, int, void **, int *, void **, void **);
    result (*test)(void *, int *, int *);
    result (*closeSend)(void *);
    result (*closeRecv)(void *);
    result (*closeListen)(void *);
    result (*getDeviceMr)(void *, void *, void **);
    result (*irecvConsumed)(void *, int, void *);
    result (*makeVDevice)(int *, struct vdevice4 *);
    result (*finalize)(void *);
    result (*setNetAttr)(void *, struct net_attr *);
};
struct net_v12 {
    const char *name;
    result (*init)(void **, uint64_t, struct comm_config *, logger, profiler);
    result (*devices)(int *);
    result (*getProperties)(int, struct props_v12 *);
    result (*listen)(void *, int, void *, void **);
    result (*connect)(void *, int, void *, void **, struct device_handle **);
    result (*accept)(void *, void **, struct device_handle **);
    result (*regMr)(void *, void *, size_t, int, void **);
    result (*regMrDmaBuf)(void *, void *, size_t, int, uint64_t, int, void **);
    result (*deregMr)(void *, void *);
    result (*isend)(void *, void *, size_t, int, void *, void *, void **);
    result (*irecv)(void *, int, void **, size_t *, int *, void **, void **, void **);
    result (*iflush)(void *, int, void **, int *, void **, void **);
    result (*test)(void *, int *, int *);
    result (*closeSend)(void *);
    result (*closeRecv)(void *);
    result (*closeListen)(void *);
    result (*getDeviceMr)(void *, void *, void **);
    result (*irecvConsumed)(void *, int, void *);
    result (*makeVDevice)(int *, struct vdevice8 *);
    result (*finalize)(void *);
    result (*setNetAttr)(void *, struct net_attr *);
};

#endif
