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
#include "mesh_example.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

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

    railhead_mesh_t *mesh = meet(url, device);
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

    leave(mesh);
    free(in), free(out), free(times);
    return EXIT_SUCCESS;
}
