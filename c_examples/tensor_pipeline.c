/*
 * A producer and two consumers exchange named tensors over shared memory, TCP or RDMA, step by step: in each step the producer has a tensor for
 * either consumer, which checks it and sends a sum back. The last step is aborted by the producer, which the consumers are told.
 *
 *   for r in 0 1 2; do RANK=$r WORLD_SIZE=3 MASTER_ADDR=localhost MASTER_PORT=29500 tensor_pipeline & done
 *
 *   --url URL        tcp://, env:// (the default) or file://
 *   --device NAME    a device of `railhead info`; the first one if it is not given
 *   --bytes N        of the first step's tensors; those of each later step have as many more (default 100000)
 *   --steps N        before the one that is aborted (default 3)
 *   --direct         straight from the producer's memory into the consumers'
 */
#include "tensor_example.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORKERS = 3 };

const char *const workers[] = {"/job:producer/task:0", "/job:consumer/task:0", "/job:consumer/task:1"};

static unsigned char byte_of(uint64_t step, int64_t consumer, size_t i)
{
    return (unsigned char)(i * 7 + step * 31 + (size_t)consumer);
}

static void *allocate(size_t bytes)
{
    void *memory = calloc(1, bytes);
    if (memory == NULL)
        die("no memory for %zu bytes", bytes);
    return memory;
}

static void produce(railhead_tensor_rendezvous_t *rendezvous, uint64_t step, size_t bytes)
{
    char key[KEY];
    uint64_t sums[WORKERS] = {0};
    for (int64_t consumer = 1; consumer < WORKERS; consumer++) {
        unsigned char *data = allocate(bytes);
        for (size_t i = 0; i < bytes; i++)
            sums[consumer] += data[i] = byte_of(step, consumer, i);
        railhead_tensor_t tensor = {.size = sizeof tensor, .dtype = 4, .rank = 1, .dims = {(int64_t)bytes}, .data = data, .bytes = bytes};
        /* It is not copied: the memory is the library's until it is released, which is done by run, here and below. */
        tensor.release = free;
        tensor.user = data;
        check("send", railhead_tensor_send(rendezvous, key_of(key, 0, consumer, "input"), &tensor));
    }
    for (int64_t consumer = 1; consumer < WORKERS; consumer++) {
        railhead_tensor_t sum;
        check("recv", railhead_tensor_recv(rendezvous, key_of(key, consumer, 0, "sum"), TIMEOUT_MS, &sum));
        if (sum.bytes != sizeof sums[0] || memcmp(sum.data, &sums[consumer], sizeof sums[0]) != 0)
            die("the sum of consumer %" PRId64 " is wrong in step %" PRIu64, consumer, step);
        check("free", railhead_tensor_free(&sum));
    }
}

/* What a consumer's callback finds. */
struct input {
    railhead_tensor_rendezvous_t *rendezvous;
    uint64_t step;
    size_t bytes;
    int called;
    railhead_status_t status;
};

static void on_input(void *user, railhead_status_t status, const char *why, const railhead_tensor_t *tensor)
{
    struct input *input = user;
    input->called++;
    input->status = status;
    if (status != RAILHEAD_OK) {
        if (strstr(why, "not today") == NULL)
            die("step %" PRIu64 ": %s (%d)", input->step, why, (int)status);
        return;
    }
    const unsigned char *data = tensor->data;
    uint64_t sum = 0;
    if (tensor->bytes != input->bytes || tensor->dims[0] != (int64_t)input->bytes)
        die("%zu bytes in step %" PRIu64 "; expected %zu", tensor->bytes, input->step, input->bytes);
    for (size_t i = 0; i < tensor->bytes; i++) {
        if (data[i] != byte_of(input->step, rank, i))
            die("byte %zu of step %" PRIu64 " is wrong", i, input->step);
        sum += data[i];
    }
    /* A callback may call the library. */
    char key[KEY];
    railhead_tensor_t answer = {.size = sizeof answer, .rank = 0, .data = &sum, .bytes = sizeof sum};
    check("send", railhead_tensor_send(input->rendezvous, key_of(key, rank, 0, "sum"), &answer));
}

/* Whether the step was aborted. */
static int consume(railhead_tensor_manager_t *manager, railhead_tensor_rendezvous_t *rendezvous, uint64_t step, size_t bytes)
{
    char key[KEY];
    struct input input = {.rendezvous = rendezvous, .step = step, .bytes = bytes};
    void *own = NULL;
    (void)key_of(key, 0, rank, "input");
    /* One has the library give memory, the other has its own. */
    if (rank == 1)
        check("recv_async", railhead_tensor_recv_async(rendezvous, key, on_input, &input));
    else
        check("recv_into_async", railhead_tensor_recv_into_async(rendezvous, key, own = allocate(bytes), bytes, on_input, &input));
    size_t ran;
    check("run", railhead_tensor_manager_run(manager, TIMEOUT_MS, &ran));
    if (ran != 1 || input.called != 1)
        die("%zu callbacks have run in step %" PRIu64, ran, step);
    free(own);
    return input.status != RAILHEAD_OK;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"url", required_argument, NULL, 'u'},   {"device", required_argument, NULL, 'd'},
                                            {"bytes", required_argument, NULL, 'b'}, {"steps", required_argument, NULL, 's'},
                                            {"direct", no_argument, NULL, 'D'},      {NULL, 0, NULL, 0}};
    const char *url = NULL, *device = NULL;
    size_t bytes = 100000;
    uint64_t steps = 3, mode = RAILHEAD_TENSOR_BUFFERED;
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (option) {
        case 'u': url = optarg; break;
        case 'd': device = optarg; break;
        case 'b': bytes = (size_t)number("bytes", optarg); break;
        case 's': steps = number("steps", optarg); break;
        case 'D': mode = RAILHEAD_TENSOR_DIRECT; break;
        default: return EXIT_FAILURE;
        }
    }
    railhead_tensor_manager_t *manager = meet(url, device, mode, WORKERS);
    for (uint64_t step = 1; step <= steps + 1; step++) {
        size_t now = bytes * (size_t)step;
        railhead_tensor_rendezvous_t *rendezvous;
        check("step", railhead_tensor_step(manager, step, &rendezvous));
        check("initialize", railhead_tensor_initialize(rendezvous));
        if (rank == 0 && step <= steps)
            produce(rendezvous, step, now);
        else if (rank == 0)
            check("abort", railhead_tensor_abort(rendezvous, RAILHEAD_USAGE, "not today"));
        else if (consume(manager, rendezvous, step, now) != (step > steps))
            die("step %" PRIu64 " of %" PRIu64 " has ended otherwise", step, steps);
        check("release", railhead_tensor_release(rendezvous));
        /* A step is cleaned up once nobody asks for anything of it: the producer has all sums of its own, a consumer knows that of the one before.
         * The aborted one stays. */
        if (step <= steps)
            check("cleanup", railhead_tensor_cleanup(manager, rank == 0 ? step : step - 1));
        if (rank == 0)
            check("run", railhead_tensor_manager_run(manager, 0, NULL));
    }
    leave(manager);
    if (rank == 0)
        printf("%" PRIu64 " steps, no byte wrong, and one that was aborted\n", steps);
    return EXIT_SUCCESS;
}
