/* A producer that is no more than this: it maps a ring, fills slots and posts them. It includes railhead_ring.h and links nothing of Railhead.
 * Started by proxy_shared:
 *
 *   proxy_producer PATH BYTES STEPS    the ring's file, the bytes of its mapping, how many steps to produce
 */
#define _POSIX_C_SOURCE 200809L
#include "../include/railhead_ring.h"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
    railhead_ring ring;
    railhead_ring_producer producer;
    size_t bytes;
    uint64_t steps, n;
    void *mapping;
    int fd;
    if (argc != 4)
        return fprintf(stderr, "usage: proxy_producer PATH BYTES STEPS\n"), 2;
    bytes = strtoull(argv[2], NULL, 10);
    steps = strtoull(argv[3], NULL, 10);
    fd = open(argv[1], O_RDWR | O_CLOEXEC);
    mapping = fd < 0 ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED)
        return perror(argv[1]), 1;
    close(fd);
    if (railhead_ring_open(&ring, mapping, bytes) != 0 || railhead_ring_producer_init(&producer, &ring, RAILHEAD_RING_SIMPLE) != 0)
        return fprintf(stderr, "%s is no ring with SIMPLE slots\n", argv[1]), 1;
    for (n = 0; n < steps; n++) {
        size_t size = (size_t)(n * 7919 % (producer.step_bytes + 1)), at;
        double since = seconds();
        unsigned char *slot;
        void *free_slot;
        int got;
        while ((got = railhead_ring_reserve(&producer, 1, &free_slot)) == RAILHEAD_RING_AGAIN) {
            if (seconds() - since > 120)
                return fprintf(stderr, "proxy_producer: waited too long for room\n"), 1;
            sched_yield();
        }
        if (got != RAILHEAD_RING_READY)
            return fprintf(stderr, "proxy_producer: the ring is invalid\n"), 1;
        slot = free_slot;
        /* byte_of(1, n, at) of proxy_example.c, which is not linked either. */
        for (at = 0; at < size; at++)
            slot[at] = (unsigned char)(131 + n * 31 + at * 7 + at / 251);
        if (railhead_ring_post(&producer, 1, size) != 0)
            return fprintf(stderr, "proxy_producer: the step does not fit\n"), 1;
    }
    return 0;
}
