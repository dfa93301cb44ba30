/* What a core of this machine can do: how many bytes per second it copies from one array to another, and adds to the floats of another.
 * For the limit in `make bench-mesh` (benches/mesh.py).
 *
 * Usage: limit BYTES SECONDS: of each array, and to measure each of the two for. Prints a line of JSON, in GB/s: medians. */
#include "bench.h"

#ifdef __x86_64__
/* The widest vectors that the processor has. */
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

WIDEST static void add(float *restrict to, const float *restrict from, size_t elements) {
    for (size_t i = 0; i < elements; i++)
        to[i] += from[i];
}

static void copy(float *restrict to, const float *restrict from, size_t elements) {
    memcpy(to, from, elements * sizeof(float));
    /* Not to be left out, whoever looks at it. */
    __asm__ volatile("" : : "r"(to) : "memory");
}

static double gb_s(void (*work)(float *restrict, const float *restrict, size_t), float *to, const float *from, size_t elements, double seconds) {
    enum { MOST = 100000 };
    static double samples[MOST];
    size_t times = 0;
    work(to, from, elements);
    for (double end = clock_seconds() + seconds; times < MOST && (times < 3 || clock_seconds() < end); times++) {
        double before = clock_seconds();
        work(to, from, elements);
        samples[times] = clock_seconds() - before;
    }
    qsort(samples, times, sizeof(double), compare_samples);
    return (double)(elements * sizeof(float)) / samples[times / 2] / 1e9;
}

int main(int argc, char **argv) {
    size_t elements = argc == 3 ? strtoull(argv[1], NULL, 10) / sizeof(float) : 0;
    float *to = malloc(elements * sizeof(float)), *from = malloc(elements * sizeof(float));
    if (!elements || !to || !from)
        fail("usage: limit BYTES SECONDS");
    for (size_t i = 0; i < elements; i++)
        to[i] = from[i] = element(0, i);
    double seconds = strtod(argv[2], NULL);
    double memcpy_gb_s = gb_s(copy, to, from, elements, seconds), add_gb_s = gb_s(add, to, from, elements, seconds);
    printf("{\"memcpy\": %.3f, \"add\": %.3f}\n", memcpy_gb_s, add_gb_s);
    return 0;
}
