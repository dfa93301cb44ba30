/* railhead_ring.h alone, in C11 and in C++17: nothing is included before it, nothing is linked. Both sides of a ring against each other, near
 * the limits of the counters, and a ring that lies. Run by tests/library/artifact.rs; exits 0 if all holds. */
#include "../../include/railhead_ring.h"

#include <stdio.h>
#include <string.h>

RAILHEAD_RING_ALIGN static unsigned char memory[4096 + 3 * 8192];

#define CHECK(condition)                                                  \
    do {                                                                  \
        if (!(condition)) {                                               \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            return 1;                                                     \
        }                                                                 \
    } while (0)

/* What the library writes when it makes a ring. */
static void make(uint64_t start)
{
    railhead_ring_control *control = (railhead_ring_control *)(void *)memory;
    int i;
    memset(memory, 0, sizeof memory);
    control->magic = RAILHEAD_RING_MAGIC;
    control->version = RAILHEAD_RING_VERSION;
    control->steps = RAILHEAD_RING_STEPS;
    control->data_offset = 4096;
    control->data_bytes = 3 * 8192;
    for (i = 0; i < RAILHEAD_RING_PROTOCOLS; i++) {
        control->areas[i].offset = (uint64_t)i * 8192;
        control->areas[i].step_bytes = 1024;
    }
    control->head = control->tail = start;
    for (i = 0; i < RAILHEAD_RING_STEPS; i++)
        control->sizes_fifo[i] = RAILHEAD_RING_EMPTY;
}

static void fill(unsigned char *to, size_t bytes, uint64_t step)
{
    size_t i;
    for (i = 0; i < bytes; i++)
        to[i] = (unsigned char)(step * 31 + i * 7);
}

/* Steps through the ring, `depth` of them in flight. */
static int stream(int protocol, uint64_t start, int depth)
{
    railhead_ring ring;
    railhead_ring_producer producer;
    railhead_ring_consumer consumer;
    unsigned char in[1024], out[1024];
    int step;
    make(start);
    CHECK(railhead_ring_open(&ring, memory, sizeof memory) == 0);
    CHECK(railhead_ring_producer_init(&producer, &ring, protocol) == 0 && producer.step == start);
    CHECK(railhead_ring_consumer_init(&consumer, &ring, protocol) == 0 && consumer.step == start);
    for (step = 0; step < 40 + depth; step++) {
        void *slot;
        size_t bytes;
        if (step < 40) {
            size_t want = (size_t)step * 11;
            fill(in, want, producer.step);
            CHECK(railhead_ring_reserve(&producer, 1, &slot) == RAILHEAD_RING_READY);
            if (protocol == RAILHEAD_RING_SIMPLE) {
                memcpy(slot, in, want);
                CHECK(railhead_ring_post(&producer, 1, want) == 0);
            } else if (protocol == RAILHEAD_RING_LL) {
                CHECK(railhead_ring_post_ll(&producer, in, want) == 0);
            } else {
                CHECK(railhead_ring_post_ll128(&producer, in, want) == 0);
            }
        }
        if (step >= depth) {
            size_t want = (size_t)(step - depth) * 11, wire;
            fill(in, want, consumer.step);
            memset(out, 0, sizeof out);
            CHECK(railhead_ring_peek(&consumer, 1, &slot, &bytes) == RAILHEAD_RING_READY);
            if (protocol == RAILHEAD_RING_SIMPLE) {
                CHECK(bytes == want);
                memcpy(out, slot, want);
            } else if (protocol == RAILHEAD_RING_LL) {
                wire = (consumer.step & RAILHEAD_RING_LL_CLEAN) == RAILHEAD_RING_LL_CLEAN ? 1024 : RAILHEAD_RING_LL_LINES(want);
                CHECK(bytes == wire && railhead_ring_read_ll(slot, consumer.step, out, want) == 0);
                CHECK(want == 0 || railhead_ring_read_ll(slot, consumer.step + 8, out, want) == RAILHEAD_RING_BROKEN);
            } else {
                CHECK(bytes == RAILHEAD_RING_LL128_LINES(want) && railhead_ring_read_ll128(slot, consumer.step, out, want) == 0);
                CHECK(want == 0 || railhead_ring_read_ll128(slot, consumer.step + 8, out, want) == RAILHEAD_RING_BROKEN);
            }
            CHECK(memcmp(in, out, want) == 0);
            railhead_ring_release(&consumer, 1);
        }
    }
    CHECK(producer.step == start + 40 && consumer.step == start + 40);
    return 0;
}

static int full_and_empty(uint64_t start)
{
    railhead_ring ring;
    railhead_ring_producer producer;
    railhead_ring_consumer consumer;
    void *slot;
    size_t bytes;
    int i;
    make(start);
    CHECK(railhead_ring_open(&ring, memory, sizeof memory) == 0);
    CHECK(railhead_ring_producer_init(&producer, &ring, RAILHEAD_RING_SIMPLE) == 0);
    CHECK(railhead_ring_consumer_init(&consumer, &ring, RAILHEAD_RING_SIMPLE) == 0);
    CHECK(railhead_ring_peek(&consumer, 1, &slot, &bytes) == RAILHEAD_RING_AGAIN);
    for (i = 0; i < RAILHEAD_RING_STEPS; i++) {
        CHECK(railhead_ring_reserve(&producer, 1, &slot) == RAILHEAD_RING_READY);
        CHECK(railhead_ring_post(&producer, 1, 1025) == RAILHEAD_RING_BROKEN && railhead_ring_post(&producer, 1, 0) == 0);
    }
    CHECK(railhead_ring_reserve(&producer, 1, &slot) == RAILHEAD_RING_AGAIN);
    CHECK(railhead_ring_peek(&consumer, 1, &slot, &bytes) == RAILHEAD_RING_READY && bytes == 0);
    railhead_ring_release(&consumer, 1);
    CHECK(railhead_ring_reserve(&producer, 1, &slot) == RAILHEAD_RING_READY);
    return 0;
}

/* From step 1, an operation with 8 steps a chunk starts at step 8: the consumer gives back what is skipped. */
static int chunks(void)
{
    railhead_ring ring;
    railhead_ring_producer producer;
    railhead_ring_consumer consumer;
    void *slot;
    size_t bytes;
    make(1);
    CHECK(railhead_ring_open(&ring, memory, sizeof memory) == 0);
    CHECK(railhead_ring_producer_init(&producer, &ring, RAILHEAD_RING_SIMPLE) == 0);
    CHECK(railhead_ring_consumer_init(&consumer, &ring, RAILHEAD_RING_SIMPLE) == 0);
    CHECK(railhead_ring_reserve(&producer, 2, &slot) == RAILHEAD_RING_BROKEN);
    CHECK(railhead_ring_producer_start(&producer, 3) == RAILHEAD_RING_BROKEN && railhead_ring_producer_start(&producer, 8) == 0);
    CHECK(railhead_ring_reserve(&producer, 8, &slot) == RAILHEAD_RING_AGAIN);
    CHECK(railhead_ring_consumer_start(&consumer, 8) == 0);
    CHECK(railhead_ring_peek(&consumer, 8, &slot, &bytes) == RAILHEAD_RING_AGAIN);
    CHECK(railhead_ring_reserve(&producer, 8, &slot) == RAILHEAD_RING_READY && railhead_ring_post(&producer, 8, 8192) == 0);
    CHECK(railhead_ring_peek(&consumer, 8, &slot, &bytes) == RAILHEAD_RING_READY && bytes == 8192);
    railhead_ring_release(&consumer, 8);
    CHECK(consumer.step == 16 && producer.step == 16);
    return 0;
}

static int lies(void)
{
    railhead_ring_control *control = (railhead_ring_control *)(void *)memory;
    railhead_ring ring;
    railhead_ring_producer producer;
    railhead_ring_consumer consumer;
    void *slot;
    size_t bytes;
    make(100);
    CHECK(railhead_ring_open(&ring, memory, sizeof memory) == 0);
    CHECK(railhead_ring_producer_init(&producer, &ring, 3) == RAILHEAD_RING_BROKEN);
    CHECK(railhead_ring_producer_init(&producer, &ring, RAILHEAD_RING_SIMPLE) == 0);
    CHECK(railhead_ring_consumer_init(&consumer, &ring, RAILHEAD_RING_SIMPLE) == 0);
    control->tail = 109;
    CHECK(railhead_ring_peek(&consumer, 1, &slot, &bytes) == RAILHEAD_RING_BROKEN);
    control->tail = 84;
    CHECK(railhead_ring_peek(&consumer, 1, &slot, &bytes) == RAILHEAD_RING_BROKEN);
    control->tail = 101;
    control->sizes_fifo[100 % 8] = 1025;
    CHECK(railhead_ring_peek(&consumer, 1, &slot, &bytes) == RAILHEAD_RING_BROKEN);
    control->sizes_fifo[100 % 8] = -2;
    CHECK(railhead_ring_peek(&consumer, 1, &slot, &bytes) == RAILHEAD_RING_BROKEN);
    control->sizes_fifo[100 % 8] = 1024;
    CHECK(railhead_ring_peek(&consumer, 1, &slot, &bytes) == RAILHEAD_RING_READY && bytes == 1024);
    control->head = 200;
    producer.head = 84;
    CHECK(railhead_ring_reserve(&producer, 1, &slot) == RAILHEAD_RING_BROKEN);

    make(0);
    CHECK(railhead_ring_open(&ring, memory, 4096 + 3 * 8192 - 1) == RAILHEAD_RING_BROKEN);
    CHECK(railhead_ring_open(&ring, NULL, sizeof memory) == RAILHEAD_RING_BROKEN);
    CHECK(railhead_ring_open(&ring, memory, 100) == RAILHEAD_RING_BROKEN);
    control->areas[1].step_bytes = UINT64_MAX / 2;
    CHECK(railhead_ring_open(&ring, memory, sizeof memory) == RAILHEAD_RING_BROKEN);
    make(0);
    control->data_offset = UINT64_MAX - 127;
    CHECK(railhead_ring_open(&ring, memory, sizeof memory) == RAILHEAD_RING_BROKEN);
    make(0);
    control->data_offset = 0;
    CHECK(railhead_ring_open(&ring, memory, sizeof memory) == RAILHEAD_RING_BROKEN);
    CHECK(railhead_ring_join(&ring, memory, memory + 4096, 3 * 8192) == 0 && ring.data == memory + 4096);
    CHECK(railhead_ring_join(&ring, memory, memory + 4096, 3 * 8192 - 1) == RAILHEAD_RING_BROKEN);
    CHECK(railhead_ring_join(&ring, memory, memory + 4100, 3 * 8192) == RAILHEAD_RING_BROKEN);
    make(0);
    control->version = 2;
    CHECK(railhead_ring_open(&ring, memory, sizeof memory) == RAILHEAD_RING_BROKEN);
    return 0;
}

int main(void)
{
    static const uint64_t starts[] = {0, 5, UINT64_C(0x7ffffff5), UINT64_C(0xfffffff5), UINT64_MAX - 5};
    size_t i;
    int protocol;
    for (i = 0; i < sizeof starts / sizeof starts[0]; i++) {
        for (protocol = 0; protocol < RAILHEAD_RING_PROTOCOLS; protocol++)
            if (stream(protocol, starts[i], 0) || stream(protocol, starts[i], 3) || stream(protocol, starts[i], 7))
                return 1;
        if (full_and_empty(starts[i]))
            return 1;
    }
    if (chunks() || lies())
        return 1;
    puts("the ring holds");
    return 0;
}
