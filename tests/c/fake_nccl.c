/*
 * What is inside NCCL's library, as far as `railhead perf --plugin nccl:FILE` looks at it: a table that only the symbol table shows, beside two
 * functions of the CUDA runtime without a driver. Built by cli/tests/commands/perf/builtin.rs; the plugin itself is fake_net.c's.
 */
#define FAKE_ABI 12
#define ncclNetPlugin_v12 exported
#include "fake_net.c"
#undef ncclNetPlugin_v12

#ifndef TABLE
#define TABLE ncclNetSocket
#endif

#define KEPT __attribute__((noipa))

KEPT int cudaGetDevice(int *device)
{
    *device = -1;
    return 35; /* cudaErrorInsufficientDriver */
}

KEPT int cudaSetDevice(int device)
{
    return device < 0 ? 101 : 35;
}

/* Its name is all that counts: the version is in it. */
KEPT void properties(void) __asm__("_Z26ncclNetSocketGetPropertiesiP23ncclNetProperties_v12_t");
void properties(void)
{
}

/* As NCCL's Socket: it does not connect where the runtime does not answer. */
static ncclResult_t connect_on_device(void *context, int dev, void *handle, void **send_comm, ncclNetDeviceHandle_t **on_device)
{
    int device;
    if (cudaGetDevice(&device) != 0 || device != 0 || cudaSetDevice(device) != 0)
        return ncclUnhandledCudaError;
    return fake_connect(context, dev, handle, send_comm, on_device);
}

ncclNet_v12_t TABLE;

__attribute__((constructor)) static void fill(void)
{
    TABLE = exported;
    TABLE.connect = connect_on_device;
}

__attribute__((visibility("default"))) ncclResult_t ncclGetVersion(int *version)
{
    *version = 23203;
    return ncclSuccess;
}
