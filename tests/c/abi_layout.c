/* Prints "TYPE BYTES" and "TYPE.MEMBER OFFSET" for NCCL's structures; tests/library/layout.rs compares with what Rust lays out. Given the path
 * of a library, loads that as NCCL does and looks at the tables themselves through these structures: name, set and empty members. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "nccl_net.h"

#define SIZE(t) printf(#t " %zu\n", sizeof(struct t))
#define AT(t, m) printf(#t "." #m " %zu\n", offsetof(struct t, m))

static void print_layouts(void) {
    SIZE(device_handle);
    AT(device_handle, netDeviceType); AT(device_handle, netDeviceVersion); AT(device_handle, handle); AT(device_handle, size);
    AT(device_handle, needsProxyProgress);
    SIZE(comm_config);
    AT(comm_config, trafficClass);
    SIZE(comm_attr);
    AT(comm_attr, maxConcurrentPeers); AT(comm_attr, minConcurrentPeers); AT(comm_attr, maxFlowsPerPeer); AT(comm_attr, minFlowsPerPeer);
    SIZE(net_attr);
    AT(net_attr, sendCommAttr); AT(net_attr, recvCommAttr); AT(net_attr, op); AT(net_attr, algo); AT(net_attr, proto);
    SIZE(vdevice4);
    AT(vdevice4, ndevs); AT(vdevice4, devs);
    SIZE(vdevice8);
    AT(vdevice8, ndevs); AT(vdevice8, devs);
    SIZE(props_v4);
    AT(props_v4, name); AT(props_v4, pciPath); AT(props_v4, guid); AT(props_v4, ptrSupport); AT(props_v4, speed); AT(props_v4, port);
    AT(props_v4, maxComms);
    SIZE(props_v5);
    AT(props_v5, name); AT(props_v5, pciPath); AT(props_v5, guid); AT(props_v5, ptrSupport); AT(props_v5, speed); AT(props_v5, port);
    AT(props_v5, latency); AT(props_v5, maxComms); AT(props_v5, maxRecvs);
    SIZE(props_v6);
    AT(props_v6, name); AT(props_v6, pciPath); AT(props_v6, guid); AT(props_v6, ptrSupport); AT(props_v6, speed); AT(props_v6, port);
    AT(props_v6, latency); AT(props_v6, maxComms); AT(props_v6, maxRecvs);
    SIZE(props_v7);
    AT(props_v7, name); AT(props_v7, pciPath); AT(props_v7, guid); AT(props_v7, ptrSupport); AT(props_v7, speed); AT(props_v7, port);
    AT(props_v7, latency); AT(props_v7, maxComms); AT(props_v7, maxRecvs); AT(props_v7, netDeviceType); AT(props_v7, netDeviceVersion);
    SIZE(props_v8);
    AT(props_v8, name); AT(props_v8, pciPath); AT(props_v8, guid); AT(props_v8, ptrSupport); AT(props_v8, regIsGlobal);
    AT(props_v8, speed); AT(props_v8, port); AT(props_v8, latency); AT(props_v8, maxComms); AT(props_v8, maxRecvs);
    AT(props_v8, netDeviceType); AT(props_v8, netDeviceVersion);
    SIZE(props_v9);
    AT(props_v9, name); AT(props_v9, pciPath); AT(props_v9, guid); AT(props_v9, ptrSupport); AT(props_v9, regIsGlobal);
    AT(props_v9, forceFlush); AT(props_v9, speed); AT(props_v9, port); AT(props_v9, latency); AT(props_v9, maxComms);
    AT(props_v9, maxRecvs); AT(props_v9, netDeviceType); AT(props_v9, netDeviceVersion); AT(props_v9, vProps); AT(props_v9, maxP2pBytes);
    AT(props_v9, maxCollBytes);
    SIZE(props_v10);
    AT(props_v10, name); AT(props_v10, pciPath); AT(props_v10, guid); AT(props_v10, ptrSupport); AT(props_v10, regIsGlobal);
    AT(props_v10, forceFlush); AT(props_v10, speed); AT(props_v10, port); AT(props_v10, latency); AT(props_v10, maxComms);
    AT(props_v10, maxRecvs); AT(props_v10, netDeviceType); AT(props_v10, netDeviceVersion); AT(props_v10, vProps);
    AT(props_v10, maxP2pBytes); AT(props_v10, maxCollBytes);
    SIZE(props_v11);
    AT(props_v11, name); AT(props_v11, pciPath); AT(props_v11, guid); AT(props_v11, ptrSupport); AT(props_v11, regIsGlobal);
    AT(props_v11, forceFlush); AT(props_v11, speed); AT(props_v11, port); AT(props_v11, latency); AT(props_v11, maxComms);
    AT(props_v11, maxRecvs); AT(props_v11, netDeviceType); AT(props_v11, netDeviceVersion); AT(props_v11, vProps);
    AT(props_v11, maxP2pBytes); AT(props_v11, maxCollBytes); AT(props_v11, maxMultiRequestSize);
    SIZE(props_v12);
    AT(props_v12, name); AT(props_v12, pciPath); AT(props_v12, guid); AT(props_v12, ptrSupport); AT(props_v12, regIsGlobal);
    AT(props_v12, forceFlush); AT(props_v12, speed); AT(props_v12, port); AT(props_v12, latency); AT(props_v12, maxComms);
    AT(props_v12, maxRecvs); AT(props_v12, netDeviceType); AT(props_v12, netDeviceVersion); AT(props_v12, vProps);
    AT(props_v12, maxP2pBytes); AT(props_v12, maxCollBytes); AT(props_v12, maxMultiRequestSize); AT(props_v12, railId);
    AT(props_v12, planeId);
    SIZE(net_v4);
    AT(net_v4, name); AT(net_v4, init); AT(net_v4, devices); AT(net_v4, getProperties); AT(net_v4, listen); AT(net_v4, connect);
    AT(net_v4, accept); AT(net_v4, regMr); AT(net_v4, deregMr); AT(net_v4, isend); AT(net_v4, irecv); AT(net_v4, iflush);
    AT(net_v4, test); AT(net_v4, closeSend); AT(net_v4, closeRecv); AT(net_v4, closeListen);
    SIZE(net_v5);
    AT(net_v5, name); AT(net_v5, init); AT(net_v5, devices); AT(net_v5, getProperties); AT(net_v5, listen); AT(net_v5, connect);
    AT(net_v5, accept); AT(net_v5, regMr); AT(net_v5, deregMr); AT(net_v5, isend); AT(net_v5, irecv); AT(net_v5, iflush);
    AT(net_v5, test); AT(net_v5, closeSend); AT(net_v5, closeRecv); AT(net_v5, closeListen);
    SIZE(net_v6);
    AT(net_v6, name); AT(net_v6, init); AT(net_v6, devices); AT(net_v6, getProperties); AT(net_v6, listen); AT(net_v6, connect);
    AT(net_v6, accept); AT(net_v6, regMr); AT(net_v6, regMrDmaBuf); AT(net_v6, deregMr); AT(net_v6, isend); AT(net_v6, irecv);
    AT(net_v6, iflush); AT(net_v6, test); AT(net_v6, closeSend); AT(net_v6, closeRecv); AT(net_v6, closeListen);
    SIZE(net_v7);
    AT(net_v7, name); AT(net_v7, init); AT(net_v7, devices); AT(net_v7, getProperties); AT(net_v7, listen); AT(net_v7, connect);
    AT(net_v7, accept); AT(net_v7, regMr); AT(net_v7, regMrDmaBuf); AT(net_v7, deregMr); AT(net_v7, isend); AT(net_v7, irecv);
    AT(net_v7, iflush); AT(net_v7, test); AT(net_v7, closeSend); AT(net_v7, closeRecv); AT(net_v7, closeListen); AT(net_v7, getDeviceMr);
    AT(net_v7, irecvConsumed);
    SIZE(net_v8);
    AT(net_v8, name); AT(net_v8, init); AT(net_v8, devices); AT(net_v8, getProperties); AT(net_v8, listen); AT(net_v8, connect);
    AT(net_v8, accept); AT(net_v8, regMr); AT(net_v8, regMrDmaBuf); AT(net_v8, deregMr); AT(net_v8, isend); AT(net_v8, irecv);
    AT(net_v8, iflush); AT(net_v8, test); AT(net_v8, closeSend); AT(net_v8, closeRecv); AT(net_v8, closeListen); AT(net_v8, getDeviceMr);
    AT(net_v8, irecvConsumed);
    SIZE(net_v9);
    AT(net_v9, name); AT(net_v9, init); AT(net_v9, devices); AT(net_v9, getProperties); AT(net_v9, listen); AT(net_v9, connect);
    AT(net_v9, accept); AT(net_v9, regMr); AT(net_v9, regMrDmaBuf); AT(net_v9, deregMr); AT(net_v9, isend); AT(net_v9, irecv);
    AT(net_v9, iflush); AT(net_v9, test); AT(net_v9, closeSend); AT(net_v9, closeRecv); AT(net_v9, closeListen); AT(net_v9, getDeviceMr);
    AT(net_v9, irecvConsumed); AT(net_v9, makeVDevice);
    SIZE(net_v10);
    AT(net_v10, name); AT(net_v10, init); AT(net_v10, devices); AT(net_v10, getProperties); AT(net_v10, listen); AT(net_v10, connect);
    AT(net_v10, accept); AT(net_v10, regMr); AT(net_v10, regMrDmaBuf); AT(net_v10, deregMr); AT(net_v10, isend); AT(net_v10, irecv);
    AT(net_v10, iflush); AT(net_v10, test); AT(net_v10, closeSend); AT(net_v10, closeRecv); AT(net_v10, closeListen);
    AT(net_v10, getDeviceMr); AT(net_v10, irecvConsumed); AT(net_v10, makeVDevice);
    SIZE(net_v11);
    AT(net_v11, name); AT(net_v11, init); AT(net_v11, devices); AT(net_v11, getProperties); AT(net_v11, listen); AT(net_v11, connect);
    AT(net_v11, accept); AT(net_v11, regMr); AT(net_v11, regMrDmaBuf); AT(net_v11, deregMr); AT(net_v11, isend); AT(net_v11, irecv);
    AT(net_v11, iflush); AT(net_v11, test); AT(net_v11, closeSend); AT(net_v11, closeRecv); AT(net_v11, closeListen);
    AT(net_v11, getDeviceMr); AT(net_v11, irecvConsumed); AT(net_v11, makeVDevice); AT(net_v11, finalize); AT(net_v11, setNetAttr);
    SIZE(net_v12);
    AT(net_v12, name); AT(net_v12, init); AT(net_v12, devices); AT(net_v12, getProperties); AT(net_v12, listen); AT(net_v12, connect);
    AT(net_v12, accept); AT(net_v12, regMr); AT(net_v12, regMrDmaBuf); AT(net_v12, deregMr); AT(net_v12, isend); AT(net_v12, irecv);
    AT(net_v12, iflush); AT(net_v12, test); AT(net_v12, closeSend); AT(net_v12, closeRecv); AT(net_v12, closeListen);
    AT(net_v12, getDeviceMr); AT(net_v12, irecvConsumed); AT(net_v12, makeVDevice); AT(net_v12, finalize); AT(net_v12, setNetAttr);
}

/* The members of a table that may be NULL, and in Railhead are: neither DMA-BUF memory nor data handled by a device. */
static int may_be_empty(size_t member, size_t device_mr, size_t consumed) {
    return member == device_mr || member == consumed;
}

static int check_table(void *library, int version, size_t size, size_t device_mr, size_t consumed) {
    char symbol[32];
    snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", version);
    const char *table = dlsym(library, symbol);
    if (table == NULL) {
        fprintf(stderr, "%s: %s\n", symbol, dlerror());
        return 1;
    }
    int failures = 0;
    const char *name;
    memcpy(&name, table, sizeof name);
    if (name == NULL || strcmp(name, "Railhead") != 0) {
        fprintf(stderr, "%s: name is %s\n", symbol, name == NULL ? "NULL" : name);
        failures++;
    }
    for (size_t member = sizeof(void *); member < size; member += sizeof(void *)) {
        void *function;
        memcpy(&function, table + member, sizeof function);
        if ((function == NULL) != may_be_empty(member, device_mr, consumed)) {
            fprintf(stderr, "%s: member at %zu is %s\n", symbol, member, function == NULL ? "NULL" : "set");
            failures++;
        }
    }
    return failures;
}

#define NONE ((size_t)-1)
#define CHECK(v, device_mr, consumed) check_table(library, v, sizeof(struct net_v##v), device_mr, consumed)
#define CHECK_FULL(v) CHECK(v, offsetof(struct net_v##v, getDeviceMr), offsetof(struct net_v##v, irecvConsumed))

int main(int argc, char **argv) {
    if (argc != 2) {
        print_layouts();
        return 0;
    }
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    int failures = CHECK(4, NONE, NONE) + CHECK(5, NONE, NONE) + CHECK(6, NONE, NONE);
    failures += CHECK_FULL(7) + CHECK_FULL(8) + CHECK_FULL(9) + CHECK_FULL(10) + CHECK_FULL(11) + CHECK_FULL(12);
    return failures != 0;
}
