/*
 * N processes find each other through a store, and exchange buffers and messages over shared memory, TCP or RDMA: each sends to the next one around a
 * ring, through a slot that the other has opened; then rank 0 asks for a word from whoever has one first, and answers.
 *
 *   torchrun --nproc-per-node 2 --no-python mesh_pair
 *   mpirun -n 2 -x MASTER_ADDR=localhost -x MASTER_PORT=29500 mesh_pair
 *   for r in 0 1; do RANK=$r WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 mesh_pair & done
 *
 *   --url URL        tcp://, env:// (the default) or file://
 *   --device NAME    a device of `railhead info`; the first one if it is not given
 *   --bytes N        of each message (default 65536)
 *   --messages N     how many each rank sends (default 1000); every byte is checked
 */
#include "mesh_example.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A message is on its way while the one before is looked at: two places, and two slots, by turns. Another slot tells that a place is free again. */
enum { PLACES = 2, FREED = PLACES, ASK = 100, ANSWER = 101 };

static unsigned char byte_of(int64_t of, size_t message)
{
    return (unsigned char)((size_t)of * 37 + message * 11 + 1);
}

static void around_a_ring(railhead_mesh_t *mesh, size_t bytes, size_t messages)
{
    int64_t next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
    unsigned char *out = calloc(PLACES, bytes), *in = calloc(PLACES, bytes), nothing = 0;
    if (out == NULL || in == NULL)
        die("no memory");
    railhead_buffer_t *sends[PLACES], *receives[PLACES], *frees, *freed;
    for (int i = 0; i < PLACES; i++) {
        check("send_to", railhead_buffer_send_to(mesh, next, (uint64_t)i, out + (size_t)i * bytes, bytes, &sends[i]));
        check("recv_from", railhead_buffer_recv_from(mesh, last, (uint64_t)i, in + (size_t)i * bytes, bytes, &receives[i]));
    }
    check("send_to", railhead_buffer_send_to(mesh, last, FREED, &nothing, 0, &frees));
    check("recv_from", railhead_buffer_recv_from(mesh, next, FREED, &nothing, 0, &freed));
    double start = seconds();
    for (size_t message = 0; message < messages + PLACES; message++) {
        int place = (int)(message % PLACES);
        if (message >= PLACES) {
            unsigned char *here = in + (size_t)place * bytes, expected = byte_of(last, message - PLACES);
            check("wait_recv", railhead_buffer_wait_recv(receives[place], -1));
            if (here[0] != expected || memcmp(here, here + 1, bytes - 1) != 0)
                die("message %zu of rank %" PRId64 " is wrong", message - PLACES, last);
            check("send", railhead_buffer_send(frees, 0, 0, 0));
            check("wait_send", railhead_buffer_wait_send(frees, -1));
            check("wait_send", railhead_buffer_wait_send(sends[place], -1));
            check("wait_recv", railhead_buffer_wait_recv(freed, -1));
        }
        if (message < messages) {
            memset(out + (size_t)place * bytes, byte_of(rank, message), bytes);
            check("send", railhead_buffer_send(sends[place], 0, RAILHEAD_REST, 0));
        }
    }
    double time = seconds() - start;
    if (rank == 0)
        printf("%zu messages of %zu bytes around %" PRId64 " ranks: %.1f us each, no byte wrong\n", messages, bytes, ranks,
               time / (double)messages * 1e6);
    for (int i = 0; i < PLACES; i++) {
        check("close", railhead_buffer_close(sends[i]));
        check("close", railhead_buffer_close(receives[i]));
    }
    check("close", railhead_buffer_close(frees));
    check("close", railhead_buffer_close(freed));
    free(out), free(in);
}

static void questions_and_answers(railhead_mesh_t *mesh)
{
    int64_t word = rank, others[ranks], zero = 0;
    railhead_unbound_t *buffer;
    check("create", railhead_unbound_create(mesh, &word, sizeof word, &buffer));
    for (int64_t i = 1; i < ranks; i++)
        others[i - 1] = i;
    for (int64_t i = 1; rank == 0 && i < ranks; i++) {
        int64_t who = -1;
        check("recv", railhead_unbound_recv(buffer, others, (size_t)ranks - 1, ASK, 0, RAILHEAD_REST));
        check("wait_recv", railhead_unbound_wait_recv(buffer, &who, -1));
        if (word != who)
            die("rank %" PRId64 " said that it is %" PRId64, who, word);
        word += 1000;
        check("send", railhead_unbound_send(buffer, who, ANSWER, 0, RAILHEAD_REST));
        check("wait_send", railhead_unbound_wait_send(buffer, NULL, -1));
    }
    if (rank != 0) {
        check("send", railhead_unbound_send(buffer, 0, ASK, 0, RAILHEAD_REST));
        check("wait_send", railhead_unbound_wait_send(buffer, NULL, -1));
        check("recv", railhead_unbound_recv(buffer, &zero, 1, ANSWER, 0, RAILHEAD_REST));
        check("wait_recv", railhead_unbound_wait_recv(buffer, NULL, -1));
        if (word != rank + 1000)
            die("rank 0 answered %" PRId64, word);
    } else {
        printf("rank 0 answered %" PRId64 " ranks\n", ranks - 1);
    }
    check("close", railhead_unbound_close(buffer));
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"url", required_argument, NULL, 'u'},
                                            {"device", required_argument, NULL, 'd'},
                                            {"bytes", required_argument, NULL, 'b'},
                                            {"messages", required_argument, NULL, 'm'},
                                            {NULL, 0, NULL, 0}};
    const char *url = NULL, *device = NULL;
    size_t bytes = 65536, messages = 1000;
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (option) {
        case 'u': url = optarg; break;
        case 'd': device = optarg; break;
        case 'b': bytes = number("bytes", optarg); break;
        case 'm': messages = number("messages", optarg); break;
        default: return EXIT_FAILURE;
        }
    }
    railhead_mesh_t *mesh = meet(url, device);
    if (ranks < 2)
        die("a pair takes at least 2 ranks");
    around_a_ring(mesh, bytes, messages);
    questions_and_answers(mesh);
    leave(mesh);
    return EXIT_SUCCESS;
}
