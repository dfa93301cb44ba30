/*
 * A parameter server and four workers that train together: in each step the server has the parameters for every worker, each of which computes
 * gradients of its own, and the server adds all of them to the parameters. Both sides know what has to come out, and verify every number.
 *
 *   for r in 0 1 2 3 4; do RANK=$r WORLD_SIZE=5 MASTER_ADDR=localhost MASTER_PORT=29500 tensor_params & done
 *
 *   --url URL        tcp://, env:// (the default) or file://
 *   --device NAME    a device of `railhead info`; the first one if it is not given
 *   --elements N     of the weights, 8 bytes each; the bias has a tenth of them, at least one (default 20000)
 *   --steps N        (default 4)
 */
#include "tensor_example.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

enum { WORKERS = 5, TENSORS = 2, INT64 = 9 /* as TensorFlow numbers it */ };

const char *const workers[] = {"/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1", "/job:worker/task:2", "/job:worker/task:3"};

static const char *const parameters[TENSORS] = {"weights", "bias"};
static const char *const gradients[TENSORS] = {"gradient of weights", "gradient of bias"};
static size_t elements[TENSORS];

static int64_t gradient_of(int64_t worker, int tensor, size_t i)
{
    return worker * (tensor + 1) + (int64_t)(i % 5);
}

/* What a parameter is after so many steps: it begins with its index. */
static int64_t expected(uint64_t steps, int tensor, size_t i)
{
    int64_t sum = 0;
    for (int64_t worker = 1; worker < WORKERS; worker++)
        sum += gradient_of(worker, tensor, i);
    return (int64_t)i + (int64_t)steps * sum;
}

/* What a callback finds: where it is, and memory for one tensor of each kind. */
struct job {
    railhead_tensor_rendezvous_t *rendezvous;
    uint64_t step;
    int called;
    int64_t *numbers[TENSORS];
};

static const int64_t *numbers_of(const railhead_tensor_t *tensor, int kind)
{
    if (tensor->dtype != INT64 || tensor->rank != 1 || tensor->dims[0] != (int64_t)elements[kind] || tensor->bytes != elements[kind] * sizeof(int64_t))
        die("%zu bytes of type %" PRIu32 "; expected %zu numbers", tensor->bytes, tensor->dtype, elements[kind]);
    return tensor->data;
}

static void send_to(struct job *job, int64_t to, const char *edge, int kind)
{
    char key[KEY];
    railhead_tensor_t tensor = {.size = sizeof tensor, .dtype = INT64, .rank = 1, .dims = {(int64_t)elements[kind]}};
    tensor.data = job->numbers[kind];
    tensor.bytes = elements[kind] * sizeof(int64_t);
    check("send", railhead_tensor_send(job->rendezvous, key_of(key, rank, to, edge), &tensor));
}

/* On a worker: the parameters are here. */
static void on_parameters(void *user, railhead_status_t status, const char *why, const railhead_tensor_t *tensors, size_t count)
{
    struct job *job = user;
    job->called++;
    if (status != RAILHEAD_OK || count != TENSORS)
        die("parameters of step %" PRIu64 ": %s (%d)", job->step, why, (int)status);
    for (int kind = 0; kind < TENSORS; kind++) {
        const int64_t *numbers = numbers_of(&tensors[kind], kind);
        for (size_t i = 0; i < elements[kind]; i++) {
            if (numbers[i] != expected(job->step, kind, i))
                die("%s %zu of step %" PRIu64 " is %" PRId64 "; expected %" PRId64, parameters[kind], i, job->step, numbers[i], expected(job->step, kind, i));
            job->numbers[kind][i] = gradient_of(rank, kind, i);
        }
        /* A callback may call the library. */
        send_to(job, 0, gradients[kind], kind);
    }
}

/* On the server: the gradients of all workers are here, in the order in which they were asked for. */
static void on_gradients(void *user, railhead_status_t status, const char *why, const railhead_tensor_t *tensors, size_t count)
{
    struct job *job = user;
    job->called++;
    if (status != RAILHEAD_OK || count != (WORKERS - 1) * TENSORS)
        die("gradients of step %" PRIu64 ": %s (%d)", job->step, why, (int)status);
    for (size_t which = 0; which < count; which++) {
        int kind = (int)(which % TENSORS);
        const int64_t *numbers = numbers_of(&tensors[which], kind);
        for (size_t i = 0; i < elements[kind]; i++)
            job->numbers[kind][i] += numbers[i];
    }
}

/* Receives all of these from those workers, with one callback, and runs it. */
static void receive(railhead_tensor_manager_t *manager, struct job *job, int64_t first, int64_t last, const char *const *edges,
                    railhead_tensor_all_callback_t callback)
{
    char text[(WORKERS - 1) * TENSORS][KEY];
    const char *keys[(WORKERS - 1) * TENSORS];
    size_t count = 0;
    for (int64_t from = first; from <= last; from++)
        for (int kind = 0; kind < TENSORS; kind++, count++)
            keys[count] = key_of(text[count], from, rank, edges[kind]);
    job->called = 0;
    check("recv_all_async", railhead_tensor_recv_all_async(job->rendezvous, keys, count, callback, job));
    size_t ran;
    check("run", railhead_tensor_manager_run(manager, TIMEOUT_MS, &ran));
    if (ran != 1 || job->called != 1)
        die("%zu callbacks have run in step %" PRIu64, ran, job->step);
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"url", required_argument, NULL, 'u'},      {"device", required_argument, NULL, 'd'},
                                            {"elements", required_argument, NULL, 'e'}, {"steps", required_argument, NULL, 's'},
                                            {"direct", no_argument, NULL, 'D'},         {NULL, 0, NULL, 0}};
    const char *url = NULL, *device = NULL;
    uint64_t mode = RAILHEAD_TENSOR_BUFFERED;
    size_t steps = 4;
    elements[0] = 20000;
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (option) {
        case 'u': url = optarg; break;
        case 'd': device = optarg; break;
        case 'e': elements[0] = number("elements", optarg); break;
        case 's': steps = number("steps", optarg); break;
        case 'D': mode = RAILHEAD_TENSOR_DIRECT; break;
        default: return EXIT_FAILURE;
        }
    }
    elements[1] = elements[0] < 10 ? 1 : elements[0] / 10;
    railhead_tensor_manager_t *manager = meet(url, device, mode, WORKERS);
    struct job job = {0};
    for (int kind = 0; kind < TENSORS; kind++) {
        job.numbers[kind] = malloc(elements[kind] * sizeof(int64_t));
        if (job.numbers[kind] == NULL)
            die("no memory for %zu numbers", elements[kind]);
        for (size_t i = 0; i < elements[kind]; i++)
            job.numbers[kind][i] = (int64_t)i;
    }
    for (job.step = 0; job.step < steps; job.step++) {
        check("step", railhead_tensor_step(manager, job.step, &job.rendezvous));
        check("initialize", railhead_tensor_initialize(job.rendezvous));
        if (rank == 0) {
            for (int64_t worker = 1; worker < WORKERS; worker++)
                for (int kind = 0; kind < TENSORS; kind++)
                    send_to(&job, worker, parameters[kind], kind);
            receive(manager, &job, 1, WORKERS - 1, gradients, on_gradients);
        } else {
            receive(manager, &job, 0, 0, parameters, on_parameters);
        }
        check("release", railhead_tensor_release(job.rendezvous));
        /* The server has all of its own; a worker's of the step before were received, or there would be no parameters. */
        if (rank == 0 || job.step > 0)
            check("cleanup", railhead_tensor_cleanup(manager, rank == 0 ? job.step : job.step - 1));
    }
    for (int kind = 0; kind < TENSORS; kind++) {
        for (size_t i = 0; rank == 0 && i < elements[kind]; i++)
            if (job.numbers[kind][i] != expected(steps, kind, i))
                die("%s %zu is %" PRId64 " in the end; expected %" PRId64, parameters[kind], i, job.numbers[kind][i], expected(steps, kind, i));
        free(job.numbers[kind]);
    }
    leave(manager);
    if (rank == 0)
        printf("%zu steps of %d workers, no parameter wrong\n", steps, WORKERS - 1);
    return EXIT_SUCCESS;
}
