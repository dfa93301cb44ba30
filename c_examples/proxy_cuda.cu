/* A CUDA kernel as the producer and another as the consumer: neither can call a network, so both use rings in pinned memory, and a proxy moves the steps
 * between them. Every byte is checked on the GPU. Built where nvcc is found, and only then; needs a GPU to run (else it says SKIP).
 *
 *   proxy_cuda [STEPS]      1000 unless told otherwise
 */
#include "../include/railhead.h"
#include "../include/railhead_ring.h"

#include <cuda_runtime.h>
#include <sched.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

static const size_t SLOT = 512 * 1024;
static const int THREADS = 256;

static void must(const char *what, railhead_status_t status)
{
    if (status != RAILHEAD_OK) {
        fprintf(stderr, "%s: %s\n", what, railhead_status_string(status));
        exit(1);
    }
}

static void must(const char *what, cudaError_t status)
{
    if (status != cudaSuccess) {
        fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
        exit(1);
    }
}

static double seconds()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void wait_a_bit(const char *what, double since)
{
    if (seconds() - since > 120) {
        fprintf(stderr, "%s: waited too long\n", what);
        exit(1);
    }
    sched_yield();
}

static __host__ __device__ size_t bytes_of(uint64_t step)
{
    return step % 8 == 0 ? 0 : (size_t)(step * 7919 % (SLOT + 1));
}

static __device__ unsigned char byte_of(uint64_t step, size_t at)
{
    return (unsigned char)(step * 31 + at * 7 + at / 251);
}

/* `given_up` is the host's: a kernel cannot be killed without the whole context. */
__global__ void produce(railhead_ring_producer producer, uint64_t steps, const volatile int *given_up, int *broken)
{
    __shared__ void *slot;
    __shared__ int got;
    for (uint64_t n = 0; n < steps; n++) {
        if (threadIdx.x == 0)
            while ((got = railhead_ring_reserve(&producer, 1, &slot)) == RAILHEAD_RING_AGAIN && !*given_up) {}
        __syncthreads();
        if (got != RAILHEAD_RING_READY) {
            *broken = 1;
            return;
        }
        for (size_t at = threadIdx.x; at < bytes_of(n); at += blockDim.x)
            ((unsigned char *)slot)[at] = byte_of(n, at);
        /* All threads' bytes before the one thread's store of tail. */
        __threadfence_system();
        __syncthreads();
        if (threadIdx.x == 0 && railhead_ring_post(&producer, 1, bytes_of(n)) != 0)
            *broken = 1;
    }
}

__global__ void consume(railhead_ring_consumer consumer, uint64_t steps, const volatile int *given_up, int *broken, unsigned long long *wrong)
{
    __shared__ void *slot;
    __shared__ size_t bytes;
    __shared__ int got;
    for (uint64_t n = 0; n < steps; n++) {
        if (threadIdx.x == 0) {
            while ((got = railhead_ring_peek(&consumer, 1, &slot, &bytes)) == RAILHEAD_RING_AGAIN && !*given_up) {}
            /* What thread 0 has seen, all threads of the block see after the barrier. */
            __threadfence_system();
        }
        __syncthreads();
        if (got != RAILHEAD_RING_READY || bytes != bytes_of(n)) {
            *broken = 1;
            return;
        }
        for (size_t at = threadIdx.x; at < bytes; at += blockDim.x)
            if (((const volatile unsigned char *)slot)[at] != byte_of(n, at))
                atomicAdd(wrong, 1ull);
        __syncthreads();
        if (threadIdx.x == 0)
            railhead_ring_release(&consumer, 1);
    }
}

/* A ring in pinned memory that the GPU has mapped. */
struct pinned {
    unsigned char *host, *device;

    pinned() : host(nullptr), device(nullptr)
    {
        void *memory, *mapped;
        must("cudaHostAlloc", cudaHostAlloc(&memory, 4096 + 8 * SLOT, cudaHostAllocMapped));
        must("cudaHostGetDevicePointer", cudaHostGetDevicePointer(&mapped, memory, 0));
        memset(memory, 0, 4096 + 8 * SLOT);
        host = (unsigned char *)memory;
        device = (unsigned char *)mapped;
    }

    railhead_connector_config_t config() const
    {
        railhead_connector_config_t config;
        memset(&config, 0, sizeof config);
        config.size = sizeof config;
        config.home = RAILHEAD_RING_SUPPLIED;
        config.simple_bytes = 8 * SLOT;
        config.control = host;
        config.data = host + 4096;
        return config;
    }

    /* The ring at the GPU's addresses. */
    railhead_ring ring() const
    {
        railhead_ring ring;
        if (railhead_ring_join(&ring, host, host + 4096, 8 * SLOT) != 0) {
            fprintf(stderr, "railhead_ring_join: this is no ring\n");
            exit(1);
        }
        return ring;
    }
};

int main(int argc, char **argv)
{
    uint64_t steps = argc > 1 ? strtoull(argv[1], nullptr, 10) : 1000;
    int gpus = 0;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
        puts("SKIP: no GPU");
        return 0;
    }
    pinned out, in;
    railhead_connector_config_t out_config = out.config(), in_config = in.config();
    railhead_proxy_t *proxy;
    railhead_listener_t *listener;
    railhead_connector_t *send = nullptr, *recv = nullptr;
    uint64_t handle[16];
    must("railhead_proxy_create", railhead_proxy_create(nullptr, nullptr, &proxy));
    must("railhead_proxy_listen", railhead_proxy_listen(proxy, 0, handle, &listener));
    double since = seconds();
    while (send == nullptr || recv == nullptr) {
        railhead_status_t status = RAILHEAD_OK;
        if (send == nullptr && (status = railhead_proxy_connect(proxy, 0, handle, &out_config, &send)) != RAILHEAD_IN_PROGRESS)
            must("railhead_proxy_connect", status);
        if (recv == nullptr && (status = railhead_listener_accept(listener, &in_config, &recv)) != RAILHEAD_IN_PROGRESS)
            must("railhead_listener_accept", status);
        wait_a_bit("connecting", since);
    }
    must("railhead_listener_close", railhead_listener_close(listener));

    railhead_operation_t operation;
    memset(&operation, 0, sizeof operation);
    operation.size = sizeof operation;
    operation.steps = steps;
    operation.protocol = RAILHEAD_RING_SIMPLE;
    must("railhead_connector_append", railhead_connector_append(send, &operation, nullptr));
    must("railhead_connector_append", railhead_connector_append(recv, &operation, nullptr));
    must("railhead_proxy_start", railhead_proxy_start(proxy));

    railhead_ring out_ring = out.ring(), in_ring = in.ring();
    railhead_ring_producer producer;
    railhead_ring_consumer consumer;
    if (railhead_ring_producer_init(&producer, &out_ring, RAILHEAD_RING_SIMPLE) != 0 ||
        railhead_ring_consumer_init(&consumer, &in_ring, RAILHEAD_RING_SIMPLE) != 0) {
        fprintf(stderr, "the rings have no SIMPLE slots\n");
        return 1;
    }
    /* The sides were made at the host's addresses; the GPU has its own. */
    producer.control = (railhead_ring_control *)out.device;
    producer.slots = out.device + (producer.slots - out.host);
    consumer.control = (railhead_ring_control *)in.device;
    consumer.slots = in.device + (consumer.slots - in.host);

    int *flags, *flags_device;
    unsigned long long *wrong, *wrong_device;
    must("cudaHostAlloc", cudaHostAlloc((void **)&flags, 3 * sizeof *flags, cudaHostAllocMapped));
    must("cudaHostAlloc", cudaHostAlloc((void **)&wrong, sizeof *wrong, cudaHostAllocMapped));
    must("cudaHostGetDevicePointer", cudaHostGetDevicePointer((void **)&flags_device, flags, 0));
    must("cudaHostGetDevicePointer", cudaHostGetDevicePointer((void **)&wrong_device, wrong, 0));
    memset(flags, 0, 3 * sizeof *flags);
    *wrong = 0;
    /* Both kernels are loaded before either runs: a lazy load waits for the GPU to be idle, which it is not while one kernel waits for the other
     * (CUDA C++ Programming Guide, "Lazy Loading", "Concurrent Execution"). */
    cudaFuncAttributes attributes;
    must("produce", cudaFuncGetAttributes(&attributes, produce));
    must("consume", cudaFuncGetAttributes(&attributes, consume));
    cudaStream_t streams[2];
    for (cudaStream_t &stream : streams)
        must("cudaStreamCreateWithFlags", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    double start = seconds();
    produce<<<1, THREADS, 0, streams[0]>>>(producer, steps, flags_device, flags_device + 1);
    must("produce", cudaGetLastError());
    consume<<<1, THREADS, 0, streams[1]>>>(consumer, steps, flags_device, flags_device + 2, wrong_device);
    must("consume", cudaGetLastError());
    for (cudaStream_t stream : streams) {
        cudaError_t status;
        while ((status = cudaStreamQuery(stream)) == cudaErrorNotReady) {
            char message[512];
            if (railhead_proxy_error(proxy, message, sizeof message) != RAILHEAD_OK || seconds() - start > 120) {
                /* The kernels see it and end; what they were at is then known to be broken. */
                *(volatile int *)flags = 1;
            }
            sched_yield();
        }
        must("the kernel", status);
    }
    double took = seconds() - start;
    if (flags[1] != 0 || flags[2] != 0 || *wrong != 0) {
        fprintf(stderr, "producer %s, consumer %s, %llu bytes wrong\n", flags[1] ? "broken" : "whole", flags[2] ? "broken" : "whole", *wrong);
        return 1;
    }
    uint64_t total = 0;
    for (uint64_t n = 0; n < steps; n++)
        total += bytes_of(n);
    must("railhead_proxy_stop", railhead_proxy_stop(proxy));
    must("railhead_proxy_destroy", railhead_proxy_destroy(proxy));
    printf("%llu steps, %llu bytes from one kernel to another in %.3f s, verified, no byte wrong\n", (unsigned long long)steps,
           (unsigned long long)total, took);
    cudaFreeHost(out.host);
    cudaFreeHost(in.host);
    cudaFreeHost(flags);
    cudaFreeHost(wrong);
    return 0;
}
