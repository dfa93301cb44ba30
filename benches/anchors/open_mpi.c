/* Open MPI's allreduce and barrier, for `make bench-mesh` (benches/mesh.py), which has mpirun start it with settings.
 *
 * Usage: open_mpi WHAT ELEMENTS WARMUP SECONDS (see bench.h). An error is MPI's to report: it ends all ranks. */
#include <mpi.h>

#include "bench.h"

static void allreduce(void *self) {
    const struct job *job = self;
    MPI_Allreduce(MPI_IN_PLACE, job->data, (int)job->elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void barrier(void *self) {
    (void)self;
    MPI_Barrier(MPI_COMM_WORLD);
}

static void agree(void *self, uint64_t *number) {
    (void)self;
    MPI_Bcast(number, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    if (argc != 5)
        fail("usage: open_mpi WHAT ELEMENTS WARMUP SECONDS");
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    struct job job = job_from(argv, rank, ranks);
    struct way way = {job.barrier ? barrier : allreduce, agree, barrier, &job};
    measure(&job, &way);
    MPI_Finalize();
    return 0;
}
