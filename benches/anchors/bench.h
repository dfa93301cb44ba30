/* What the programs beside Railhead in `make bench-mesh` (benches/mesh.py) have in common: what they are asked for, and how they measure
 * it, by the rules of `railhead mesh bench`. Each row is done once and verified, then done so often to warm up, then as often as fits the
 * time, which rank 0 decides from how long the warm-up took. Rank 0 prints a line of JSON. For C and C++; one thread. */
#ifndef RAILHEAD_BENCHES_BENCH_H
#define RAILHEAD_BENCHES_BENCH_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct job {
    int barrier;       /* or else an allreduce: the sum, in place */
    size_t elements;   /* floats of each rank */
    unsigned warmup;   /* times */
    double seconds;    /* to measure for */
    int rank, ranks;
    float *data;
};

/* How a library does it. Errors end the process. */
struct way {
    void (*run)(void *self);
    void (*agree)(void *self, uint64_t *number); /* becomes rank 0's on all ranks */
    void (*meet)(void *self);                    /* returns once all ranks have called it */
    void *self;
};

static inline void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static inline double clock_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Small numbers, whose sums are exact. */
static inline float element(int rank, size_t i) {
    return (float)((i + 5 * (size_t)rank) % 32);
}

/* From the arguments WHAT ELEMENTS WARMUP SECONDS; the rank is the caller's to tell. */
static inline struct job job_from(char **argv, int rank, int ranks) {
    struct job job;
    job.barrier = strcmp(argv[1], "barrier") == 0;
    job.elements = strtoull(argv[2], NULL, 10);
    job.warmup = (unsigned)strtoul(argv[3], NULL, 10);
    job.seconds = strtod(argv[4], NULL);
    job.rank = rank;
    job.ranks = ranks;
    job.data = (float *)malloc((job.elements + 1) * sizeof(float));
    if (!job.data || !job.warmup || (!job.barrier && (strcmp(argv[1], "allreduce") != 0 || !job.elements)))
        fail("expected allreduce or barrier, elements, times to warm up, and seconds");
    for (size_t i = 0; i < job.elements; i++)
        job.data[i] = element(rank, i);
    return job;
}

static inline int compare_samples(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline void measure(const struct job *job, const struct way *way) {
    way->meet(way->self);
    way->run(way->self);
    for (size_t i = 0; !job->barrier && i < job->elements; i++) {
        float sum = 0;
        for (int rank = 0; rank < job->ranks; rank++)
            sum += element(rank, i);
        if (job->data[i] != sum)
            fail("the sum is wrong");
    }
    double start = clock_seconds();
    for (unsigned i = 0; i < job->warmup; i++)
        way->run(way->self);
    double fits = job->seconds * job->warmup / (clock_seconds() - start);
    uint64_t times = fits < 1 ? 1 : fits > 1e6 ? 1000000 : (uint64_t)fits;
    way->agree(way->self, &times);
    double *samples = (double *)malloc(times * sizeof(double));
    if (!samples)
        fail("no memory");
    way->meet(way->self);
    for (uint64_t i = 0; i < times; i++) {
        double before = clock_seconds();
        way->run(way->self);
        samples[i] = clock_seconds() - before;
    }
    double mean = 0;
    for (uint64_t i = 0; i < times; i++)
        mean += samples[i] / (double)times;
    qsort(samples, times, sizeof(double), compare_samples);
    if (job->rank == 0)
        printf("{\"times\": %llu, \"p50_us\": %.4f, \"mean_us\": %.4f}\n", (unsigned long long)times, samples[(times - 1) / 2] * 1e6, mean * 1e6);
    fflush(stdout);
    free(samples);
}

#endif
