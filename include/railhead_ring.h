/*
 * The ring that a producer and a consumer share with Railhead's proxy: its layout, and both sides as inline functions. Written by hand; it
 * needs nothing else, neither the library nor another header of it. C11, C++17, and CUDA device code (sm_70 or later).
 *
 * A producer (a thread, a real-time task, a GPU kernel, another process) fills slots; the proxy sends them. The proxy receives into slots of
 * another ring; a consumer empties them. A side never waits and makes no system call:
 *
 *     railhead_ring_reserve(&producer, 1, &slot)          RAILHEAD_RING_READY: the slot is yours
 *     ... write up to producer.step_bytes bytes to slot ...
 *     railhead_ring_post(&producer, 1, bytes)             the proxy sends it
 *
 *     railhead_ring_peek(&consumer, 1, &slot, &bytes)     RAILHEAD_RING_READY: `bytes` bytes were received
 *     ... read them ...
 *     railhead_ring_release(&consumer, 1)                 the slot is free for the proxy
 *
 * One thread per side. Counters count steps from the ring's first on and wrap at 2^64; step s uses slot s % 8. `head` is what the consumer has
 * finished, `tail` what the producer has filled. A size of -1 means that a slot is empty; 0 is a size like any other.
 */
#ifndef RAILHEAD_RING_H
#define RAILHEAD_RING_H

#include <stddef.h>
#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "railhead_ring.h is for little-endian machines"
#endif

#ifdef __cplusplus
#define RAILHEAD_RING_ASSERT(condition, message) static_assert(condition, message)
#define RAILHEAD_RING_ALIGN alignas(128)
#else
#define RAILHEAD_RING_ASSERT(condition, message) _Static_assert(condition, message)
#define RAILHEAD_RING_ALIGN _Alignas(128)
#endif

#ifdef __CUDACC__
#define RAILHEAD_RING_FUNCTION static __host__ __device__ inline
#else
#define RAILHEAD_RING_FUNCTION static inline
#endif

/* Slots of a ring: NCCL_STEPS. */
#define RAILHEAD_RING_STEPS 8
/* The size of a step that has none yet. */
#define RAILHEAD_RING_EMPTY (-1)
/* First word of a ring, and version of this layout. */
#define RAILHEAD_RING_MAGIC UINT64_C(0x0000474e49524852)
#define RAILHEAD_RING_VERSION 1

/* How a producer marks a slot as filled; NCCL's numbers. LL: a flag in every 8-byte word. LL128: a flag in every 128-byte line, and
 * tail. SIMPLE: tail. */
#define RAILHEAD_RING_LL 0
#define RAILHEAD_RING_LL128 1
#define RAILHEAD_RING_SIMPLE 2
#define RAILHEAD_RING_PROTOCOLS 3

/* What the functions below return. */
#define RAILHEAD_RING_READY 1
#define RAILHEAD_RING_AGAIN 0
/* This is no ring, its counters or sizes are invalid, or the arguments of the call are. */
#define RAILHEAD_RING_BROKEN (-1)

/* ---- layout ---- */

/* The slots of one protocol. */
typedef struct railhead_ring_area {
    /* Bytes from the start of the data to slot 0. */
    uint64_t offset;
    /* Bytes of a slot; 0 if there are none. */
    uint64_t step_bytes;
} railhead_ring_area;

/* The control words. Each word that one side polls while the other writes has 128 bytes to itself. */
typedef struct railhead_ring_control {
    /* Written once, before others map it. */
    RAILHEAD_RING_ALIGN uint64_t magic;
    uint32_t version;
    uint32_t steps;
    /* Bytes from here to the data; 0 if it is elsewhere. */
    uint64_t data_offset;
    /* Bytes of all slots. */
    uint64_t data_bytes;
    railhead_ring_area areas[RAILHEAD_RING_PROTOCOLS];

    /* sendMem: the consumer's word. */
    RAILHEAD_RING_ALIGN uint64_t head;

    /* recvMem: the producer's words. The consumer empties the sizes. */
    RAILHEAD_RING_ALIGN uint64_t tail;
    RAILHEAD_RING_ALIGN int64_t sizes_fifo[RAILHEAD_RING_STEPS];
} railhead_ring_control;

RAILHEAD_RING_ASSERT(sizeof(railhead_ring_area) == 16, "layout");
RAILHEAD_RING_ASSERT(sizeof(railhead_ring_control) == 512, "layout");
RAILHEAD_RING_ASSERT(offsetof(railhead_ring_control, version) == 8, "layout");
RAILHEAD_RING_ASSERT(offsetof(railhead_ring_control, steps) == 12, "layout");
RAILHEAD_RING_ASSERT(offsetof(railhead_ring_control, data_offset) == 16, "layout");
RAILHEAD_RING_ASSERT(offsetof(railhead_ring_control, data_bytes) == 24, "layout");
RAILHEAD_RING_ASSERT(offsetof(railhead_ring_control, areas) == 32, "layout");
RAILHEAD_RING_ASSERT(offsetof(railhead_ring_control, head) == 128, "layout");
RAILHEAD_RING_ASSERT(offsetof(railhead_ring_control, tail) == 256, "layout");
RAILHEAD_RING_ASSERT(offsetof(railhead_ring_control, sizes_fifo) == 384, "layout");

/* Where a ring lies in this process. */
typedef struct railhead_ring {
    railhead_ring_control *control;
    /* Slots of all protocols. */
    unsigned char *data;
    railhead_ring_area areas[RAILHEAD_RING_PROTOCOLS];
} railhead_ring;

/* The side that fills slots. */
typedef struct railhead_ring_producer {
    railhead_ring_control *control;
    /* Slot 0. */
    unsigned char *slots;
    uint64_t step_bytes;
    /* The step that is filled next. */
    uint64_t step;
    /* The value of head when last read. */
    uint64_t head;
    int fresh;
} railhead_ring_producer;

/* The side that empties slots. */
typedef struct railhead_ring_consumer {
    railhead_ring_control *control;
    /* Slot 0. */
    unsigned char *slots;
    uint64_t step_bytes;
    /* The step that is emptied next. */
    uint64_t step;
    /* The value of tail when last read. */
    uint64_t tail;
    int fresh;
} railhead_ring_consumer;

/* ---- loads and stores that the other side may be waiting for ----
 *
 * On a GPU, at system scope: the other side is the CPU. */

/* Acquire: pairs with the other side's railhead_ring_store. What it stored before that is visible. */
RAILHEAD_RING_FUNCTION uint64_t railhead_ring_load(const uint64_t *word)
{
#ifdef __CUDA_ARCH__
    uint64_t value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
#else
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

/* Release: pairs with the other side's railhead_ring_load. Earlier loads and stores come before it. */
RAILHEAD_RING_FUNCTION void railhead_ring_store(uint64_t *word, uint64_t value)
{
#ifdef __CUDA_ARCH__
    asm volatile("st.release.sys.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
#else
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

/* Acquire, for a slot of sizes_fifo. */
RAILHEAD_RING_FUNCTION int64_t railhead_ring_load_size(const int64_t *word)
{
#ifdef __CUDA_ARCH__
    int64_t value;
    asm volatile("ld.acquire.sys.s64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
#else
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

/* Release, for a slot of sizes_fifo. */
RAILHEAD_RING_FUNCTION void railhead_ring_store_size(int64_t *word, int64_t value)
{
#ifdef __CUDA_ARCH__
    asm volatile("st.release.sys.s64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
#else
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

/* One word at once, in no order to any other. */
RAILHEAD_RING_FUNCTION uint64_t railhead_ring_load_word(const uint64_t *word)
{
#ifdef __CUDA_ARCH__
    uint64_t value;
    asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
#else
    return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

/* One word at once, in no order to any other. */
RAILHEAD_RING_FUNCTION void railhead_ring_store_word(uint64_t *word, uint64_t value)
{
#ifdef __CUDA_ARCH__
    asm volatile("st.relaxed.sys.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
#else
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
#endif
}

/* ---- where a ring is ---- */

/* Fills `ring` from the control words, if all slots lie within `bytes` bytes. */
RAILHEAD_RING_FUNCTION int railhead_ring_adopt(railhead_ring *ring, railhead_ring_control *control, unsigned char *data, size_t bytes)
{
    uint64_t length = control->data_bytes;
    int p;
    if (railhead_ring_load(&control->magic) != RAILHEAD_RING_MAGIC || control->version != RAILHEAD_RING_VERSION ||
        control->steps != RAILHEAD_RING_STEPS || length > bytes)
        return RAILHEAD_RING_BROKEN;
    for (p = 0; p < RAILHEAD_RING_PROTOCOLS; p++) {
        railhead_ring_area area = control->areas[p];
        if (area.offset > length || area.step_bytes > (length - area.offset) / RAILHEAD_RING_STEPS || area.offset % 128 != 0 ||
            area.step_bytes % 128 != 0)
            return RAILHEAD_RING_BROKEN;
        ring->areas[p] = area;
    }
    ring->control = control;
    ring->data = data;
    return 0;
}

/*
 * Opens the ring at the start of a mapping of `bytes` bytes, whose descriptor or path railhead_connector_ring returned. Its control words are
 * checked against `bytes`.
 *
 * Returns 0, or RAILHEAD_RING_BROKEN if it is no ring of this version. The mapping must stay as long as `ring` and its sides are used.
 */
RAILHEAD_RING_FUNCTION int railhead_ring_open(railhead_ring *ring, void *mapping, size_t bytes)
{
    railhead_ring_control *control = (railhead_ring_control *)mapping;
    uint64_t offset;
    if (mapping == NULL || (uintptr_t)mapping % 128 != 0 || bytes < sizeof *control)
        return RAILHEAD_RING_BROKEN;
    offset = control->data_offset;
    if (offset < sizeof *control || offset % 128 != 0 || offset > bytes)
        return RAILHEAD_RING_BROKEN;
    return railhead_ring_adopt(ring, control, (unsigned char *)mapping + offset, bytes - (size_t)offset);
}

/*
 * The same for a ring in supplied memory, whose slots, `data_bytes` bytes of them, are apart from the control words.
 */
RAILHEAD_RING_FUNCTION int railhead_ring_join(railhead_ring *ring, void *control_words, void *data, size_t data_bytes)
{
    railhead_ring_control *control = (railhead_ring_control *)control_words;
    if (control == NULL || (uintptr_t)control_words % 128 != 0 || data == NULL || (uintptr_t)data % 128 != 0)
        return RAILHEAD_RING_BROKEN;
    return railhead_ring_adopt(ring, control, (unsigned char *)data, data_bytes);
}

/*
 * The producer of a ring, for slots of `protocol`. It continues where the ring is, so it may replace one that died.
 * Returns 0, or RAILHEAD_RING_BROKEN if the ring has no such slots.
 */
RAILHEAD_RING_FUNCTION int railhead_ring_producer_init(railhead_ring_producer *producer, const railhead_ring *ring, int protocol)
{
    if (protocol < 0 || protocol >= RAILHEAD_RING_PROTOCOLS || ring->areas[protocol].step_bytes == 0)
        return RAILHEAD_RING_BROKEN;
    producer->control = ring->control;
    producer->slots = ring->data + ring->areas[protocol].offset;
    producer->step_bytes = ring->areas[protocol].step_bytes;
    producer->step = railhead_ring_load(&ring->control->tail);
    producer->head = railhead_ring_load(&ring->control->head);
    producer->fresh = 1;
    return 0;
}

/* The consumer of a ring; as railhead_ring_producer_init. */
RAILHEAD_RING_FUNCTION int railhead_ring_consumer_init(railhead_ring_consumer *consumer, const railhead_ring *ring, int protocol)
{
    if (protocol < 0 || protocol >= RAILHEAD_RING_PROTOCOLS || ring->areas[protocol].step_bytes == 0)
        return RAILHEAD_RING_BROKEN;
    consumer->control = ring->control;
    consumer->slots = ring->data + ring->areas[protocol].offset;
    consumer->step_bytes = ring->areas[protocol].step_bytes;
    consumer->step = railhead_ring_load(&ring->control->head);
    consumer->tail = railhead_ring_load(&ring->control->tail);
    consumer->fresh = 1;
    return 0;
}

/* ---- checks that the sides share ---- */

/* Whether the slots of `slice` steps from `step` on are contiguous: 1, 2, 4 or 8 of them, from a multiple on. */
RAILHEAD_RING_FUNCTION int railhead_ring_is_contiguous(uint64_t step, uint64_t slice)
{
    return slice >= 1 && slice <= RAILHEAD_RING_STEPS && (slice & (slice - 1)) == 0 && step % slice == 0;
}

/* The multiple of `chunk` (1, 2, 4 or 8) at or after `step`. */
RAILHEAD_RING_FUNCTION uint64_t railhead_ring_round_up(uint64_t step, uint64_t chunk)
{
    return (step + chunk - 1) & ~(chunk - 1);
}

/* ---- producer ---- */

/*
 * Goes to where an operation with `chunk` steps a chunk (1, 2, 4 or 8) starts. Operations of 1 step a chunk need no such call.
 * Returns 0, or RAILHEAD_RING_BROKEN for another number.
 */
RAILHEAD_RING_FUNCTION int railhead_ring_producer_start(railhead_ring_producer *producer, uint64_t chunk)
{
    if (!railhead_ring_is_contiguous(0, chunk))
        return RAILHEAD_RING_BROKEN;
    producer->step = railhead_ring_round_up(producer->step, chunk);
    producer->fresh = 1;
    return 0;
}

/*
 * Gets the slots of the next `slice` steps (1, 2, 4 or 8, as the operation has them), which are contiguous from `*slot` on.
 *
 * Returns RAILHEAD_RING_READY; RAILHEAD_RING_AGAIN while the ring is full; RAILHEAD_RING_BROKEN if its counters are invalid or the slots would not
 * be contiguous.
 */
RAILHEAD_RING_FUNCTION int railhead_ring_reserve(railhead_ring_producer *producer, uint64_t slice, void **slot)
{
    uint64_t used = producer->step - producer->head;
    if (!railhead_ring_is_contiguous(producer->step, slice))
        return RAILHEAD_RING_BROKEN;
    if (used > RAILHEAD_RING_STEPS - slice) {
        /* Pairs with the consumer's store of head: it has read those slots, and emptied their sizes. */
        producer->head = railhead_ring_load(&producer->control->head);
        used = producer->step - producer->head;
        if (used > RAILHEAD_RING_STEPS && !(producer->fresh && used < 2 * RAILHEAD_RING_STEPS))
            return RAILHEAD_RING_BROKEN;
        if (used > RAILHEAD_RING_STEPS - slice)
            return RAILHEAD_RING_AGAIN;
    }
    *slot = producer->slots + producer->step % RAILHEAD_RING_STEPS * producer->step_bytes;
    return RAILHEAD_RING_READY;
}

/*
 * Hands the next `slice` steps over, with `bytes` bytes in them: only after railhead_ring_reserve granted them.
 * Returns 0, or RAILHEAD_RING_BROKEN and does nothing if so much does not fit.
 */
RAILHEAD_RING_FUNCTION int railhead_ring_post(railhead_ring_producer *producer, uint64_t slice, size_t bytes)
{
    if (bytes > slice * producer->step_bytes)
        return RAILHEAD_RING_BROKEN;
    railhead_ring_store_size(&producer->control->sizes_fifo[producer->step % RAILHEAD_RING_STEPS], (int64_t)bytes);
    producer->step += slice;
    producer->fresh = 0;
    /* Pairs with the consumer's load of tail: data and size come first. */
    railhead_ring_store(&producer->control->tail, producer->step);
    return 0;
}

/* ---- consumer ---- */

/*
 * Goes to where an operation with `chunk` steps a chunk (1, 2, 4 or 8) starts, and frees the steps that it skips. As railhead_ring_producer_start.
 */
RAILHEAD_RING_FUNCTION int railhead_ring_consumer_start(railhead_ring_consumer *consumer, uint64_t chunk)
{
    uint64_t start;
    if (!railhead_ring_is_contiguous(0, chunk))
        return RAILHEAD_RING_BROKEN;
    start = railhead_ring_round_up(consumer->step, chunk);
    if (start != consumer->step) {
        consumer->step = start;
        railhead_ring_store(&consumer->control->head, start);
    }
    consumer->fresh = 1;
    return 0;
}

/*
 * Gets the next `slice` steps (1, 2, 4 or 8, as the operation has them): `*bytes` bytes from `*slot` on.
 *
 * Returns RAILHEAD_RING_READY; RAILHEAD_RING_AGAIN while there is nothing; RAILHEAD_RING_BROKEN as railhead_ring_reserve.
 */
RAILHEAD_RING_FUNCTION int railhead_ring_peek(railhead_ring_consumer *consumer, uint64_t slice, void **slot, size_t *bytes)
{
    uint64_t filled = consumer->tail - consumer->step;
    int64_t size;
    if (!railhead_ring_is_contiguous(consumer->step, slice))
        return RAILHEAD_RING_BROKEN;
    if (filled < slice || filled > RAILHEAD_RING_STEPS) {
        /* Pairs with the producer's store of tail: data and size are there. */
        consumer->tail = railhead_ring_load(&consumer->control->tail);
        filled = consumer->tail - consumer->step;
        if (filled > RAILHEAD_RING_STEPS)
            return consumer->fresh && consumer->step - consumer->tail < 2 * RAILHEAD_RING_STEPS ? RAILHEAD_RING_AGAIN : RAILHEAD_RING_BROKEN;
        if (filled < slice)
            return RAILHEAD_RING_AGAIN;
    }
    size = railhead_ring_load_size(&consumer->control->sizes_fifo[consumer->step % RAILHEAD_RING_STEPS]);
    if (size == RAILHEAD_RING_EMPTY)
        return RAILHEAD_RING_AGAIN;
    if (size < 0 || (uint64_t)size > slice * consumer->step_bytes)
        return RAILHEAD_RING_BROKEN;
    *bytes = (size_t)size;
    *slot = consumer->slots + consumer->step % RAILHEAD_RING_STEPS * consumer->step_bytes;
    return RAILHEAD_RING_READY;
}

/* Frees the next `slice` steps: only after railhead_ring_peek granted them. */
RAILHEAD_RING_FUNCTION void railhead_ring_release(railhead_ring_consumer *consumer, uint64_t slice)
{
    /* Before head: once that is stored, the producer may set the size. */
    railhead_ring_store_size(&consumer->control->sizes_fifo[consumer->step % RAILHEAD_RING_STEPS], RAILHEAD_RING_EMPTY);
    consumer->step += slice;
    consumer->fresh = 0;
    railhead_ring_store(&consumer->control->head, consumer->step);
}

/* ---- LL and LL128: flags in the data ----
 *
 * LL      16 bytes: data u32 | flag u32 | data u32 | flag u32     flag = low half of step + 1
 * LL128  128 bytes: data u64[15] | flag u64                       flag = step + 1
 *
 * The size of such a step is that of its lines. The flags count steps, so both ends of a connection must be at the same step. */

/* Bytes of the lines that hold `bytes` bytes of data. */
#define RAILHEAD_RING_LL_LINES(bytes) (((bytes) + 7) / 8 * 16)
#define RAILHEAD_RING_LL128_LINES(bytes) (((bytes) + 119) / 120 * 128)
/* Steps of the lap in which a slot's lines are all rewritten, because a flag of 2^32 steps ago equals the current one: NCCL_LL_CLEAN_MASK. */
#define RAILHEAD_RING_LL_CLEAN UINT64_C(0x7ffffff8)

/* A word of an LL line: the next 4 bytes of `from`, or fewer, and the flag. */
RAILHEAD_RING_FUNCTION uint64_t railhead_ring_ll_word(const unsigned char *from, size_t left, uint32_t flag)
{
    uint64_t word = (uint64_t)flag << 32;
    size_t i;
    for (i = 0; i < 4 && i < left; i++)
        word |= (uint64_t)from[i] << (8 * i);
    return word;
}

/*
 * Fills the next step of an LL producer with `bytes` bytes of `data` and hands it over: only after railhead_ring_reserve granted it.
 * Returns 0, or RAILHEAD_RING_BROKEN and does nothing if so much does not fit.
 */
RAILHEAD_RING_FUNCTION int railhead_ring_post_ll(railhead_ring_producer *producer, const void *data, size_t bytes)
{
    const unsigned char *from = (const unsigned char *)data;
    uint64_t *words = (uint64_t *)(void *)(producer->slots + producer->step % RAILHEAD_RING_STEPS * producer->step_bytes);
    uint32_t flag = (uint32_t)(producer->step + 1);
    size_t wire = RAILHEAD_RING_LL_LINES(bytes), i;
    if (bytes > producer->step_bytes / 2)
        return RAILHEAD_RING_BROKEN;
    if ((producer->step & RAILHEAD_RING_LL_CLEAN) == RAILHEAD_RING_LL_CLEAN)
        wire = (size_t)producer->step_bytes;
    for (i = 0; i < wire / 8; i++) {
        size_t at = i * 4 < bytes ? i * 4 : bytes;
        railhead_ring_store_word(&words[i], railhead_ring_ll_word(from + at, bytes - at, flag));
    }
    return railhead_ring_post(producer, 1, wire);
}

/*
 * Reads `bytes` bytes of data out of the LL lines at `slot`, of step `step`. Returns 0, or RAILHEAD_RING_BROKEN if a flag is not that step's.
 */
RAILHEAD_RING_FUNCTION int railhead_ring_read_ll(const void *slot, uint64_t step, void *data, size_t bytes)
{
    const uint64_t *words = (const uint64_t *)slot;
    unsigned char *to = (unsigned char *)data;
    size_t i, j;
    for (i = 0; i < (bytes + 3) / 4; i++) {
        uint64_t word = railhead_ring_load_word(&words[i]);
        if ((uint32_t)(word >> 32) != (uint32_t)(step + 1))
            return RAILHEAD_RING_BROKEN;
        for (j = 0; j < 4 && i * 4 + j < bytes; j++)
            to[i * 4 + j] = (unsigned char)(word >> (8 * j));
    }
    return 0;
}

/* As railhead_ring_post_ll, for an LL128 producer. */
RAILHEAD_RING_FUNCTION int railhead_ring_post_ll128(railhead_ring_producer *producer, const void *data, size_t bytes)
{
    const unsigned char *from = (const unsigned char *)data;
    unsigned char *slot = producer->slots + producer->step % RAILHEAD_RING_STEPS * producer->step_bytes;
    size_t line, lines = RAILHEAD_RING_LL128_LINES(bytes) / 128, i;
    if (bytes > producer->step_bytes / 128 * 120)
        return RAILHEAD_RING_BROKEN;
    for (line = 0; line < lines; line++) {
        size_t at = line * 120, count = bytes - at < 120 ? bytes - at : 120;
        for (i = 0; i < count; i++)
            slot[line * 128 + i] = from[at + i];
        /* Pairs with the proxy's load of the flag: the line's data comes first. */
        railhead_ring_store((uint64_t *)(void *)(slot + line * 128 + 120), producer->step + 1);
    }
    return railhead_ring_post(producer, 1, lines * 128);
}

/* As railhead_ring_read_ll, for LL128 lines. */
RAILHEAD_RING_FUNCTION int railhead_ring_read_ll128(const void *slot, uint64_t step, void *data, size_t bytes)
{
    const unsigned char *lines = (const unsigned char *)slot;
    unsigned char *to = (unsigned char *)data;
    size_t at, i;
    for (at = 0; at < bytes; at += 120, lines += 128) {
        if (railhead_ring_load((const uint64_t *)(const void *)(lines + 120)) != step + 1)
            return RAILHEAD_RING_BROKEN;
        for (i = 0; i < 120 && at + i < bytes; i++)
            to[at + i] = lines[i];
    }
    return 0;
}

#endif /* RAILHEAD_RING_H */
