/*
 * N processes find each other through a store, and compute sums together over shared memory, TCP or RDMA.
 *
 *   torchrun --nproc-per-node 4 --no-python mesh_allreduce
 *   mpirun -n 4 -x MASTER_ADDR=localhost -x MASTER_PORT=29500 mesh_allreduce
 *   for r in 0 1 2 3; do RANK=$r WORLD_SIZE=4 MASTER_ADDR=localhost MASTER_PORT=29500 mesh_allreduce & done
 *
 *   --url URL        tcp://, env:// (the default) or file://
 *   --device NAME    a device of `railhead info`; the first one if it is not given
 *   --elements N     floats that each rank gives (default 1048576)
 *   --rounds N       how often (default 20); every element of every sum is checked
 *
 * Rank 0 prints the median time of a round and the bus bandwidth as nccl-tests defines it: 2 (n - 1) / n of the bytes, by the time.
 */
#include "../include/railhead.h"

#include <getopt.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TIMEOUT_MS = 60000 };

static int64_t rank, ranks;

_Noreturn static void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void die(const char *format, ...)
{
    va_list arguments;
    (void)fprintf(stderr, "mesh_allreduce: rank %" PRId64 ": ", rank);
    va_start(arguments, format);
    (void)vfprintf(stderr, format, arguments);
    va_end(arguments);
    (void)fputc('\n', stderr);
    exit(EXIT_FAILURE);
}

static void check(const char *what, railhead_status_t status)
{
    if (status != RAILHEAD_OK)
        die("%s: %s (%d)", what, railhead_last_error(), (int)status);
}

static double seconds(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Element i of a rank in a round: small numbers, whose sums are exact. */
static float element(int64_t of, size_t i, size_t round)
{
    return (float)((i + round + (size_t)of * 3) % 16);
}

static size_t number(const char *option, const char *text)
{
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != '\0' || value == 0 || value > (1ull << 30))
        die("--%s %s: expected a number from 1 to %llu", option, text, 1ull << 30);
    return (size_t)value;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"url", required_argument, NULL, 'u'},
                                            {"device", required_argument, NULL, 'd'},
                                            {"elements", required_argument, NULL, 'e'},
                                            {"rounds", required_argument, NULL, 'r'},
                                            {NULL, 0, NULL, 0}};
    const char *url = NULL, *device = NULL;
    size_t elements = 1 << 20, rounds = 20;
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (option) {
        case 'u': url = optarg; break;
        case 'd': device = optarg; break;
        case 'e': elements = number("elements", optarg); break;
        case 'r': rounds = number("rounds", optarg); break;
        default: return EXIT_FAILURE;
        }
    }

    /* The others are found through a store; a prefix keeps the mesh's keys apart from everybody else's. */
    railhead_store_t *store, *keys;
    check("rendezvous", railhead_rendezvous(url, -1, -1, TIMEOUT_MS, &store, &rank, &ranks));
    check("prefix", railhead_store_prefix("mesh_allreduce", store, &keys));
    railhead_mesh_t *mesh;
    railhead_mesh_config_t config = {.size = sizeof config, .rank = rank, .ranks = ranks, .timeout_ms = TIMEOUT_MS};
    check("create", railhead_mesh_create(&config, device, &mesh));
    check("connect", railhead_mesh_connect(mesh, keys));

    float *in = malloc(elements * sizeof *in), *out = malloc(elements * sizeof *out);
    double *times = malloc(rounds * sizeof *times);
    if (in == NULL || out == NULL || times == NULL)
        die("no memory");
    railhead_collective_t sum = {.size = sizeof sum, .dtype = RAILHEAD_F32, .op = RAILHEAD_SUM, .timeout_ms = -1};
    for (size_t round = 0; round < rounds; round++) {
        for (size_t i = 0; i < elements; i++)
            in[i] = element(rank, i, round);
        check("barrier", railhead_barrier(mesh, NULL));
        double start = seconds();
        check("allreduce", railhead_allreduce(mesh, &sum, in, out, elements));
        times[round] = seconds() - start;
        for (size_t i = 0; i < elements; i++) {
            float expected = 0;
            for (int64_t of = 0; of < ranks; of++)
                expected += element(of, i, round);
            if (out[i] != expected)
                die("round %zu, element %zu is %g; expected %g", round, i, (double)out[i], (double)expected);
        }
    }
    qsort(times, rounds, sizeof *times, ascending);
    if (rank == 0) {
        double bytes = (double)(elements * sizeof *in), time = times[rounds / 2];
        printf("%" PRId64 " ranks, %.0f bytes: %.1f us, %.2f GB/s, %zu rounds, no element wrong\n", ranks, bytes, time * 1e6,
               2 * (double)(ranks - 1) / (double)ranks * bytes / time / 1e9, rounds);
    }

    /* Nobody leaves while others may still need the store. */
    check("barrier", railhead_barrier(mesh, NULL));
    check("close", railhead_mesh_close(mesh));
    check("close", railhead_store_close(keys));
    check("close", railhead_store_close(store));
    free(in), free(out), free(times);
    return EXIT_SUCCESS;
}
