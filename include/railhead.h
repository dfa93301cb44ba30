/* Railhead's C interface. Generated from src/abi by `make header`; do not edit. */

#ifndef RAILHEAD_H
#define RAILHEAD_H

#include <stddef.h>
#include <stdint.h>

/* Version of this header; railhead_version() tells that of the loaded library. */
#define RAILHEAD_VERSION_MAJOR 0
#define RAILHEAD_VERSION_MINOR 1
#define RAILHEAD_VERSION_PATCH 0

/* As a number of bytes of a buffer: all there are from the offset on. */
#define RAILHEAD_REST SIZE_MAX

/* Bytes of the longest address of a rank's end of a pair. */
#define RAILHEAD_MESH_ADDRESS 16384

// How a call ended. Where ncclResult_t has a number for it, it is that number.
typedef enum {
    // It did what it was asked to do. Only now are outputs written.
    RAILHEAD_OK = 0,
    // The operating system or the NIC refused.
    RAILHEAD_SYSTEM = 2,
    // A bad call: NULL, or a handle that is closed or never was one; or a fault of the library.
    RAILHEAD_INTERNAL = 3,
    // An argument, a setting or the state of things that the caller can mend.
    RAILHEAD_USAGE = 5,
    // The peer or the server is gone, cannot be reached, refuses this client, or is none.
    RAILHEAD_NETWORK = 6,
    // Not yet: call again.
    RAILHEAD_IN_PROGRESS = 7,
    // What was waited for did not happen in time.
    RAILHEAD_TIMEOUT = 8,
    // There is nothing to pop.
    RAILHEAD_QUEUE_EMPTY = 9,
    // This kind of store has no such operation.
    RAILHEAD_UNSUPPORTED = 10,
    // The wait was aborted by another call; what was waited for is outstanding still.
    RAILHEAD_ABORTED = 11,
} railhead_status_t;

// What happened to a watched key.
typedef enum {
    // It has another value, or the same once more.
    RAILHEAD_UPDATED = 0,
    // It exists now: there is no old value.
    RAILHEAD_CREATED = 1,
    // It is gone: there is no new value.
    RAILHEAD_DELETED = 2,
    // The server is gone, or gave this watch up because its callback was too slow: neither value, and nothing after this.
    RAILHEAD_LOST = 3,
} railhead_change_t;

// The kind of memory of a ring.
typedef enum {
    // In this process's own memory.
    RAILHEAD_RING_PRIVATE = 0,
    // In a memfd that cannot be resized: another process maps the descriptor.
    RAILHEAD_RING_MEMFD = 1,
    // In a file under /dev/shm that this user alone may open: another process maps the path.
    RAILHEAD_RING_NAMED = 2,
    // In memory that the caller supplies, such as what a GPU has mapped.
    RAILHEAD_RING_SUPPLIED = 3,
} railhead_ring_home_t;

// Type of the elements of a collective.
typedef enum {
    // 8 bits, signed.
    RAILHEAD_I8 = 0,
    // 8 bits, unsigned.
    RAILHEAD_U8 = 1,
    // 32 bits, signed.
    RAILHEAD_I32 = 2,
    // 32 bits, unsigned.
    RAILHEAD_U32 = 3,
    // 64 bits, signed.
    RAILHEAD_I64 = 4,
    // 64 bits, unsigned.
    RAILHEAD_U64 = 5,
    // IEEE binary16.
    RAILHEAD_F16 = 6,
    // bfloat16.
    RAILHEAD_BF16 = 7,
    // IEEE binary32.
    RAILHEAD_F32 = 8,
    // IEEE binary64.
    RAILHEAD_F64 = 9,
} railhead_dtype_t;

// How elements are reduced. Integers wrap around; of a number and none, the result is none.
typedef enum {
    // Their sum.
    RAILHEAD_SUM = 0,
    // Their product.
    RAILHEAD_PRODUCT = 1,
    // The least.
    RAILHEAD_MIN = 2,
    // The greatest.
    RAILHEAD_MAX = 3,
    // What the caller's own function says.
    RAILHEAD_CUSTOM = 1000,
} railhead_op_t;

// How an allreduce is done.
typedef enum {
    // Whichever is faster for so many bytes.
    RAILHEAD_AUTO = 0,
    // Around a ring.
    RAILHEAD_RING = 1,
    // By recursive doubling.
    RAILHEAD_DOUBLING = 2,
    // By recursive halving and doubling; around a ring, if the number of ranks is no power of two, or for more than 1 GiB.
    RAILHEAD_HALVING = 3,
    // Straight between all ranks.
    RAILHEAD_DIRECT = 4,
} railhead_algorithm_t;

// How tensors go from worker to worker.
typedef enum {
    // Through a buffer of their name on either side: two copies.
    RAILHEAD_TENSOR_BUFFERED = 0,
    // Straight from the producer's memory into the consumer's, if that of the producer is registered, or comes with a `release`.
    RAILHEAD_TENSOR_DIRECT = 1,
} railhead_tensor_mode_t;

// One end of a slot between two ranks: an opaque handle, ended by railhead_buffer_close. Threads: any, several at a time.
typedef struct railhead_buffer_t railhead_buffer_t;

// One direction of a connection of a proxy: a comm and a ring. Not a pointer.
typedef struct railhead_connector_t railhead_connector_t;

// Ranks that share a name space of a store: an opaque handle, ended by railhead_rendezvous_leave. Threads: as for a railhead_store_t.
typedef struct railhead_group_t railhead_group_t;

// A listener of a proxy. Not a pointer.
typedef struct railhead_listener_t railhead_listener_t;

// One rank's end of a mesh: an opaque handle. Made by railhead_mesh_create, ended by railhead_mesh_close.
//
// Threads: any, several at a time. Collectives that run at once on a mesh need tags of their own, the same on all ranks. In a forked child the parent's
// handles are refused. A failure of any of its operations is that of the mesh: all others, and those that follow, fail with the first cause.
typedef struct railhead_mesh_t railhead_mesh_t;

// A proxy: a thread that sends and receives for programs that cannot call a network. Made by railhead_proxy_create; not a pointer.
typedef struct railhead_proxy_t railhead_proxy_t;

// A key-value store that ranks share: an opaque handle. Made by railhead_store_hash, _file, _prefix, _connect and _serve and by railhead_rendezvous,
// ended by railhead_store_close.
//
// Threads: any, several at a time, a handle may be closed while another thread uses it: that call goes on. Not from a signal handler. In a forked child
// the parent's handles are refused, and what they hold open is closed: no child keeps a connection or a port of its parent's. A blocked operation on a connection to a server keeps other operations on the same handle waiting, and on the name
// spaces and groups that were made of it: a thread that is to wait for long takes a handle of its own (railhead_store_clone).
//
// Time: no operation on a server returns later than 100 ms after its timeout, also if the server is stopped or does not answer, or another thread has the
// connection: then it is RAILHEAD_TIMEOUT. What is given no timeout has that of railhead_store_connect or of the rendezvous; 300 s on a store that
// railhead_store_serve made. Only the system's resolving of a name may take longer. If a server that timed out
// owes more than the end of a wait, the connection is ended: later calls on the handle are RAILHEAD_NETWORK; a clone of it is as good as new.
typedef struct railhead_store_t railhead_store_t;

// A worker's end of the channels to all others: an opaque handle. Made by railhead_tensor_manager_create, ended by railhead_tensor_manager_close.
//
// Threads: any, several at a time. In a forked child the parent's handles are refused.
typedef struct railhead_tensor_manager_t railhead_tensor_manager_t;

// Memory that is registered for tensors: an opaque handle. Made by railhead_tensor_register, ended by railhead_tensor_deregister. Threads: any.
typedef struct railhead_tensor_memory_t railhead_tensor_memory_t;

// What keeps the bytes of a tensor that was received: an opaque handle.
typedef struct railhead_tensor_owner_t railhead_tensor_owner_t;

// A step of a worker: an opaque handle. Made by railhead_tensor_step, ended by railhead_tensor_release. Threads: any, several at a time.
typedef struct railhead_tensor_rendezvous_t railhead_tensor_rendezvous_t;

// Memory for messages with tags: an opaque handle, ended by railhead_unbound_close. Threads: any, several at a time.
typedef struct railhead_unbound_t railhead_unbound_t;

// A watch on a key: an opaque handle, ended by railhead_store_unwatch.
typedef struct railhead_watch_t railhead_watch_t;

// A caller's own reduction: `count` elements at `into` become those of both. It must be associative and commutative, as ranks' elements
// are taken in any order, and must not throw; the elements at `from` are not
// changed. Called on the thread that waits for the collective. The two do not overlap, are aligned for any type, and are not the
// caller's memory.
typedef void (*railhead_reduce_callback_t)(void *user, void *into, const void *from, size_t count);

// What collectives take. All of it but `timeout_ms`, `custom` and `user` is the same on all ranks.
typedef struct {
    // sizeof(railhead_collective_t).
    size_t size;
    // Tells it from other collectives that run at once on the mesh.
    uint32_t tag;
    // A railhead_dtype_t.
    uint32_t dtype;
    // A railhead_op_t.
    uint32_t op;
    // A railhead_algorithm_t, for an allreduce.
    uint32_t algorithm;
    // The rank from which or to which all goes, where there is one.
    int64_t root;
    // How long it may take; 0 or less: what the mesh was given.
    int64_t timeout_ms;
    // For RAILHEAD_CUSTOM.
    railhead_reduce_callback_t custom;
    // Handed to `custom`.
    void *user;
} railhead_collective_t;

// Configuration of a connector. Set `size`, and everything else to zero or to what you want.
typedef struct {
    // sizeof(railhead_connector_config_t).
    size_t size;
    // A railhead_ring_home_t.
    uint32_t home;
    // What can access supplied data: NCCL_PTR_HOST (1, or 0) or NCCL_PTR_CUDA (2). Data received into the latter is flushed before it is published.
    uint32_t memory;
    // Bytes of the LL, LL128 and SIMPLE buffers, each 0 or a multiple of 1024 up to 1 GiB; a slot is an eighth. All zero: 4 MiB of SIMPLE.
    size_t ll_bytes;
    // See ll_bytes.
    size_t ll128_bytes;
    // See ll_bytes.
    size_t simple_bytes;
    // Supplied memory for the control words (railhead_ring_control, 512 bytes), aligned to 128, readable and writable by the CPU. It must stay until the
    // connector is closed.
    void *control;
    // Supplied memory for the slots, as many bytes as the buffers have together, LL first, then LL128, then SIMPLE; aligned to 128. It must stay until
    // the connector is closed.
    void *data;
    // The first step of the ring.
    uint64_t first_step;
    // Tag of all messages.
    int32_t tag;
    // 1: also flush data received into host memory.
    uint32_t flush;
} railhead_connector_config_t;

// Where a connector's ring is. For railhead_ring_open, in this process or in another one.
typedef struct {
    // The control words.
    void *control;
    // The slots of all protocols.
    void *data;
    // Bytes of the slots.
    size_t data_bytes;
    // Bytes from the control words to the end of the mapping: what railhead_ring_open takes. 0 for supplied memory, which railhead_ring_join takes.
    size_t mapped_bytes;
    // Descriptor of the mapping, which stays the connector's and which a forked child keeps; -1 if the ring is not shared.
    int fd;
    // Zero.
    uint32_t reserved;
    // Path of the mapping; empty if it has none.
    char path[64];
} railhead_ring_place_t;

// An operation. Set `size`.
typedef struct {
    // sizeof(railhead_operation_t).
    size_t size;
    // How many steps: a multiple of slice_steps.
    uint64_t steps;
    // Steps that make one message: 1, 2, 4 or 8. 0: 1.
    uint32_t slice_steps;
    // The operation starts at the next multiple of this: 1, 2, 4 or 8, at least slice_steps. 0: slice_steps.
    uint32_t chunk_steps;
    // How the producer marks a slot as filled: 0 LL, 1 LL128, 2 SIMPLE (RAILHEAD_RING_* of railhead_ring.h).
    uint32_t protocol;
    // Zero.
    uint32_t reserved;
} railhead_operation_t;

// What a connector has done. Counts wrap at 2^64.
typedef struct {
    // The step after those of its complete operations.
    uint64_t step;
    // Operations complete.
    uint64_t operations;
    // Messages complete.
    uint64_t messages;
    // Bytes posted to the network, or received from it.
    uint64_t bytes;
    // Calls of isend and irecv that the network did not accept yet.
    uint64_t retries;
    // Flushes posted.
    uint64_t flushes;
} railhead_connector_state_t;

// What railhead_mesh_create takes.
typedef struct {
    // sizeof(railhead_mesh_config_t).
    size_t size;
    // This process's rank, from 0.
    int64_t rank;
    // How many ranks there are, from 1.
    int64_t ranks;
    // What operations have that are given no time of their own; 0 or less: 30 s, as Gloo's.
    int64_t timeout_ms;
    // 0.
    uint64_t flags;
} railhead_mesh_config_t;

// NCCL's logger (ncclDebugLogger_t).
typedef void (*railhead_logger_t)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

// Configuration of a proxy. Set `size`, and everything else to zero or to what you want.
typedef struct {
    // sizeof(railhead_proxy_config_t).
    size_t size;
    // The context that the table's init returned, for listeners and connections made through the proxy. It must live until the proxy is destroyed. NULL:
    // the proxy calls init when it first needs a context, and finalize when it is destroyed.
    void *context;
    // The logger for that init. Railhead's own table does without; other plugins may not.
    railhead_logger_t logger;
    // Processors that the thread runs on, as in NCCL_PROXY_CPUSET: "0-3,8". NULL or empty: where the calling thread may.
    const char *cpus;
    // Operations that may be appended and not done. 0: 1048576.
    uint64_t max_operations;
    // Microseconds that the thread sleeps at a time while its operations have not moved for long. 0: it polls as long as there are operations, as
    // NCCL's does. Without operations it sleeps in any case.
    uint32_t idle_sleep_us;
    // Zero.
    uint32_t reserved;
} railhead_proxy_config_t;

// What a proxy is doing, and what it has done. Counts wrap at 2^64.
typedef struct {
    // 1 while the thread sleeps because there is nothing to do.
    uint32_t asleep;
    // 1 once it was stopped or aborted, or an operation failed: no operation runs any more.
    uint32_t ended;
    // 1 once an operation failed; railhead_proxy_error says which.
    uint32_t failed;
    // Zero.
    uint32_t reserved;
    // The opCount that the next operation will have.
    uint64_t next_op_count;
    // Operations complete.
    uint64_t done;
    // Steps that the thread made: in each it tried to advance one operation.
    uint64_t steps;
    // Laps: in each, one operation of every connector that has any is stepped.
    uint64_t laps;
    // Those in which nothing moved.
    uint64_t idle_laps;
    // Times that the thread yielded its processor.
    uint64_t yields;
    // Times that the thread slept.
    uint64_t sleeps;
} railhead_proxy_state_t;

// Carries out the rendezvous of a scheme of the program's own: writes a store's handle, which the library closes, the rank and the number of ranks, and
// returns 0. Anything else is an error. `url` ends with 0 and is the library's until the callback returns. Called on the thread that asked for the rendezvous; must not throw.
typedef int (*railhead_rendezvous_callback_t)(void *user,
                                              const char *url,
                                              int64_t timeout_ms,
                                              railhead_store_t **store,
                                              int64_t *rank,
                                              int64_t *world_size);

// Bytes, not necessarily text.
typedef struct {
    // Where; anything if the size is 0.
    const void *data;
    // How many.
    size_t size;
} railhead_bytes_t;

// What railhead_tensor_manager_create takes.
typedef struct {
    // sizeof(railhead_tensor_config_t).
    size_t size;
    // This worker's name: one of `workers`. In keys it is what stands before "/device:".
    const char *worker;
    // The names of all workers, in any order: 1 to 512 bytes each, without a semicolon, and without "/device:".
    const char *const *workers;
    // How many there are.
    size_t count;
    // What connecting may take; 0 or less: 30 s.
    int64_t timeout_ms;
    // 0: a tensor stays until its step is cleaned up, and may be received again, as TensorFlow has it; 1: it is received once.
    uint64_t flags;
    // A railhead_tensor_mode_t, the same on all workers.
    uint64_t mode;
} railhead_tensor_config_t;

// Called once, with what stands beside it, when the bytes of a tensor are not needed any more. On a thread that calls railhead_tensor_manager_run or
// _close; for a tensor that somebody still holds after that, railhead_tensor_free. May call any function of this header; must not throw.
typedef void (*railhead_tensor_release_t)(void *user);

// A tensor.
typedef struct {
    // sizeof(railhead_tensor_t).
    size_t size;
    // A number of the users' own, such as TensorFlow's DataType: it is carried, and means nothing here.
    uint32_t dtype;
    // How many dimensions there are: at most 16.
    uint32_t rank;
    // The dimensions: 0 or more. They are carried as well.
    int64_t dims[16];
    // The contents.
    const void *data;
    // Their bytes: of one that goes to another worker, at most 1 GiB - 768.
    size_t bytes;
    // Not 0: its producer has nothing to send, as of a branch that is not taken; there are no contents then, and no dimensions.
    int32_t is_dead;
    // Of one that was received, for railhead_tensor_free; NULL otherwise.
    railhead_tensor_owner_t *owner;
    // Of one that is sent: NULL, and `data` is copied; or `data` is the library's, and must not change, until this is called.
    railhead_tensor_release_t release;
    // What `release` is called with.
    void *user;
} railhead_tensor_t;

// Called once with a tensor that was received, or with the reason why it does not come: `status` is RAILHEAD_OK and `why` is "", or `tensor` is
// NULL. Both are the library's, until the callback returns. On a thread that calls railhead_tensor_manager_run or _close. May call any function of
// this header; must not throw.
typedef void (*railhead_tensor_callback_t)(void *user,
                                           railhead_status_t status,
                                           const char *why,
                                           const railhead_tensor_t *tensor);

// The same for several tensors, in the order of their keys; `tensors` is NULL and `count` is 0 if one does not come.
typedef void (*railhead_tensor_all_callback_t)(void *user,
                                               railhead_status_t status,
                                               const char *why,
                                               const railhead_tensor_t *tensors,
                                               size_t count);

// The parts of a key, all of which are inside of it.
typedef struct {
    // The producer's device.
    railhead_bytes_t src_device;
    // The consumer's.
    railhead_bytes_t dst_device;
    // Which of the tensors between them.
    railhead_bytes_t edge;
    // The incarnation of the producer's device.
    uint64_t src_incarnation;
    // Of a loop.
    uint64_t frame;
    // The time around it.
    int64_t iter;
} railhead_tensor_key_t;

// Called with each change of a watched key, in order, on a thread of the watch, which has all signals blocked. The values are the library's, until the
// callback returns. May call any function of this header; must not throw.
typedef void (*railhead_watch_callback_t)(void *user,
                                          railhead_change_t change,
                                          railhead_bytes_t old_value,
                                          railhead_bytes_t new_value);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Makes the sending end of a slot: `bytes` at `memory`, of which messages are sent into the buffer that `peer` has for this slot and this rank. Both ends may
// be made in any order.
//
// `slot`: any number; between two ranks, each way, one buffer at a time has it. The memory must stay until railhead_buffer_close.
//
// RAILHEAD_USAGE: a rank that is not another one, or a slot that another buffer of this rank sends to; RAILHEAD_NETWORK: the rank is lost.
railhead_status_t railhead_buffer_send_to(railhead_mesh_t *mesh,
                                          int64_t peer,
                                          uint64_t slot,
                                          const void *memory,
                                          size_t bytes,
                                          railhead_buffer_t **buffer);

// Makes the receiving end of a slot: `peer` may write to the memory from now until railhead_buffer_close.
//
// RAILHEAD_USAGE: a rank that is not another one, or a slot that another buffer of this rank receives into; RAILHEAD_NETWORK: the rank is lost.
railhead_status_t railhead_buffer_recv_from(railhead_mesh_t *mesh,
                                            int64_t peer,
                                            uint64_t slot,
                                            void *memory,
                                            size_t bytes,
                                            railhead_buffer_t **buffer);

// Sends `bytes` (or RAILHEAD_REST) at `offset` of the buffer to `remote_offset` of the peer's. Returns at once; the bytes must not change before
// railhead_buffer_wait_send has told of it. Messages of a slot come in the order in which they were sent.
//
// RAILHEAD_USAGE: bytes outside the buffer, or a buffer that receives. What does not fit into the peer's is said by the wait.
railhead_status_t railhead_buffer_send(railhead_buffer_t *buffer,
                                       size_t offset,
                                       size_t bytes,
                                       size_t remote_offset);

// Waits until one of the sends of this buffer is done, which no wait has told of yet.
//
// `timeout_ms`: 0 or less: what the mesh was given. RAILHEAD_TIMEOUT: nothing was done in time, and the mesh has failed; RAILHEAD_NETWORK: the rank is
// lost; RAILHEAD_USAGE: the message did not fit into the peer's buffer, or this one was closed meanwhile.
railhead_status_t railhead_buffer_wait_send(railhead_buffer_t *buffer,
                                            int64_t timeout_ms);

// Waits until a message is in the buffer which no wait has told of yet.
//
// `timeout_ms` and errors: as for railhead_buffer_wait_send.
railhead_status_t railhead_buffer_wait_recv(railhead_buffer_t *buffer, int64_t timeout_ms);

// Ends a buffer. What was asked for and has not begun is not sent any more; what is on its way is waited for. Afterwards nobody reads or writes the memory.
//
// RAILHEAD_TIMEOUT: the peer did not answer within the mesh's time, and the mesh has failed. The buffer is closed in any case.
railhead_status_t railhead_buffer_close(railhead_buffer_t *buffer);

// Makes a buffer of `bytes` at `memory`, which must stay until railhead_unbound_close.
//
// RAILHEAD_SYSTEM: memory that cannot be registered.
railhead_status_t railhead_unbound_create(railhead_mesh_t *mesh,
                                          void *memory,
                                          size_t bytes,
                                          railhead_unbound_t **buffer);

// Sends `bytes` (or RAILHEAD_REST) at `offset` to `rank`, which receives as many with this tag: between two ranks, the first sent with a tag is the first
// received with it. Any tag will do; collectives have others. Returns at once; the bytes must not change before railhead_unbound_wait_send has told
// of it.
//
// RAILHEAD_USAGE: bytes outside the buffer, or a rank that is not another one; RAILHEAD_NETWORK: it is lost.
railhead_status_t railhead_unbound_send(railhead_unbound_t *buffer,
                                        int64_t rank,
                                        uint64_t tag,
                                        size_t offset,
                                        size_t bytes);

// Receives a message of just `bytes` (or RAILHEAD_REST) with this tag to `offset`, from whichever of the `count` ranks at `ranks` has one first. Returns at
// once. Two receives whose bytes overlap must not be outstanding together.
//
// RAILHEAD_USAGE: bytes outside the buffer, no rank, or one that is not another one; RAILHEAD_NETWORK: all of them are lost.
railhead_status_t railhead_unbound_recv(railhead_unbound_t *buffer,
                                        const int64_t *ranks,
                                        size_t count,
                                        uint64_t tag,
                                        size_t offset,
                                        size_t bytes);

// Waits until one of the sends of this buffer is done, which no wait has told of yet. `rank` (may be NULL) becomes the one that it went to.
//
// `timeout_ms`: 0 or less: what the mesh was given. RAILHEAD_ABORTED: railhead_unbound_abort_send was called; RAILHEAD_TIMEOUT: nothing was done in time,
// and the mesh has failed; RAILHEAD_NETWORK: a rank that is waited for is lost; RAILHEAD_USAGE: a rank receives another number of bytes, or the buffer was
// closed meanwhile.
railhead_status_t railhead_unbound_wait_send(railhead_unbound_t *buffer,
                                             int64_t *rank,
                                             int64_t timeout_ms);

// Waits until one of the receives of this buffer is done, which no wait has told of yet. `rank` (may be NULL) becomes the one that sent.
//
// `timeout_ms` and errors: as for railhead_unbound_wait_send, and railhead_unbound_abort_recv.
railhead_status_t railhead_unbound_wait_recv(railhead_unbound_t *buffer,
                                             int64_t *rank,
                                             int64_t timeout_ms);

// Whether one of the sends of this buffer is done, which neither a wait nor this has told of yet: `done` becomes 1, and `rank` (may be NULL) the one that
// it went to; or else 0. Returns at once.
//
// Errors: as for railhead_unbound_wait_send, but for the time and an abort.
railhead_status_t railhead_unbound_test_send(railhead_unbound_t *buffer,
                                             int64_t *rank,
                                             int *done);

// Whether one of the receives of this buffer is done, which neither a wait nor this has told of yet: `done` becomes 1, and `rank` (may be NULL) the one
// that sent; or else 0. Returns at once.
//
// Errors: as for railhead_unbound_wait_recv, but for the time and an abort.
railhead_status_t railhead_unbound_test_recv(railhead_unbound_t *buffer,
                                             int64_t *rank,
                                             int *done);

// Ends one railhead_unbound_wait_send with RAILHEAD_ABORTED: the one that goes on, or else the next. What it waited for is outstanding still.
railhead_status_t railhead_unbound_abort_send(railhead_unbound_t *buffer);

// Ends one railhead_unbound_wait_recv with RAILHEAD_ABORTED: the one that goes on, or else the next. What it waited for is outstanding still.
railhead_status_t railhead_unbound_abort_recv(railhead_unbound_t *buffer);

// Ends a buffer. Sends and receives that nothing has come of are taken back; what is on its way is waited for. Afterwards nobody reads or writes the memory.
//
// RAILHEAD_TIMEOUT: a rank did not answer within the mesh's time, and the mesh has failed. The buffer is closed in any case.
railhead_status_t railhead_unbound_close(railhead_unbound_t *buffer);

// `count` elements at `out` become the reduction of those at `in` of all ranks, with the same bits on each. `in` and `out` may be the same; where they
// are not, `in` is not changed.
//
// Of this and all other collectives: every rank calls it, with the same counts and collective. The memory may be any of the process, and is the library's
// until the call returns. RAILHEAD_USAGE, before anything is sent: a number that is none of its kind, counts that do not fit together. After any other
// error the mesh has failed: RAILHEAD_NETWORK names the rank that is lost, RAILHEAD_TIMEOUT those that are waited for; RAILHEAD_USAGE: a rank gave another
// count.
railhead_status_t railhead_allreduce(railhead_mesh_t *mesh,
                                     const railhead_collective_t *collective,
                                     const void *in,
                                     void *out,
                                     size_t count);

// `count` elements at `out` of the root become the reduction of those at `in` of all ranks. `out` of the others may be NULL. `in` and `out` may be the same
// on the root.
railhead_status_t railhead_reduce(railhead_mesh_t *mesh,
                                  const railhead_collective_t *collective,
                                  const void *in,
                                  void *out,
                                  size_t count);

// `counts[rank]` elements at `out` of each rank become its part of the reduction of all ranks' `in`, where the parts lie one behind the other.
railhead_status_t railhead_reduce_scatter(railhead_mesh_t *mesh,
                                          const railhead_collective_t *collective,
                                          const void *in,
                                          void *out,
                                          const size_t *counts);

// `count` elements at `memory` become those of the root.
railhead_status_t railhead_broadcast(railhead_mesh_t *mesh,
                                     const railhead_collective_t *collective,
                                     void *memory,
                                     size_t count);

// `out` becomes the `counts[rank]` elements at `in` of each rank, one behind the other. This rank's may lie in their place in `out` already.
railhead_status_t railhead_allgather(railhead_mesh_t *mesh,
                                     const railhead_collective_t *collective,
                                     const void *in,
                                     void *out,
                                     const size_t *counts);

// The elements at `in` are parts for each rank, one behind the other, of `send_counts[rank]` elements; `out` becomes the parts that each rank has for this
// one, of `recv_counts[rank]`. The two do not overlap.
railhead_status_t railhead_alltoall(railhead_mesh_t *mesh,
                                    const railhead_collective_t *collective,
                                    const void *in,
                                    void *out,
                                    const size_t *send_counts,
                                    const size_t *recv_counts);

// `out` of the root becomes the `counts[rank]` elements at `in` of each rank, one behind the other. `out` of the others may be NULL.
railhead_status_t railhead_gather(railhead_mesh_t *mesh,
                                  const railhead_collective_t *collective,
                                  const void *in,
                                  void *out,
                                  const size_t *counts);

// `counts[rank]` elements at `out` of each rank become its part of the root's `in`, where the parts lie one behind the other. `in` of the others may be
// NULL.
railhead_status_t railhead_scatter(railhead_mesh_t *mesh,
                                   const railhead_collective_t *collective,
                                   const void *in,
                                   void *out,
                                   const size_t *counts);

// Returns once all ranks have called it. `collective` may be NULL; its element type and reduction are not looked at.
//
// Errors: as railhead_allreduce.
railhead_status_t railhead_barrier(railhead_mesh_t *mesh, const railhead_collective_t *collective);

// Opens a listener on device `dev` of the proxy's table, and makes the handle by which a peer connects to it.
//
// * `listen_handle` - out, 128 bytes (NCCL_NET_HANDLE_MAXSIZE), to be given to the peer.
// * `listener` - out; closed with railhead_listener_close.
//
// Errors: the table's.
//
// # Safety
// `listen_handle` must be NULL or writable for 128 bytes, `listener` NULL or writable.
railhead_status_t railhead_proxy_listen(railhead_proxy_t *proxy,
                                        int dev,
                                        void *listen_handle,
                                        railhead_listener_t **listener);

// Accepts a peer, and makes the connector that receives from it.
//
// * `config` - in, may be NULL for all defaults.
// * `connector` - out; closed with railhead_connector_close.
//
// Returns RAILHEAD_IN_PROGRESS while there is no peer: call again.
//
// Errors: the table's; RAILHEAD_USAGE for an invalid configuration.
//
// # Safety
// `config` must be NULL or readable for its size; what it supplies must stay until the connector is closed; `connector` must be NULL or writable.
railhead_status_t railhead_listener_accept(railhead_listener_t *listener,
                                           const railhead_connector_config_t *config,
                                           railhead_connector_t **connector);

// Closes a listener and ends its handle. Accepted connectors stay.
//
// Errors: the table's; it is closed all the same.
railhead_status_t railhead_listener_close(railhead_listener_t *listener);

// Connects to a peer's listener through device `dev` of the proxy's table, and makes the connector that sends to it.
//
// * `listen_handle` - in and out, 128 bytes: the peer's, and between calls the progress of the connection, so pass the same memory each time.
// * `config` - in, may be NULL for all defaults.
// * `connector` - out; closed with railhead_connector_close.
//
// Returns RAILHEAD_IN_PROGRESS while that is under way: call again.
//
// Errors: as railhead_listener_accept.
//
// # Safety
// `listen_handle` must be NULL or readable and writable for 128 bytes; the rest as for railhead_listener_accept.
railhead_status_t railhead_proxy_connect(railhead_proxy_t *proxy,
                                         int dev,
                                         void *listen_handle,
                                         const railhead_connector_config_t *config,
                                         railhead_connector_t **connector);

// Makes a connector that sends over an open send comm of the proxy's table. The caller closes the comm, after the connector; until then only the
// proxy may use it.
//
// * `config` - in, may be NULL for all defaults.
// * `connector` - out; closed with railhead_connector_close.
//
// Errors: as railhead_listener_accept.
//
// # Safety
// `comm` must be an open send comm of the table; the rest as for railhead_listener_accept.
railhead_status_t railhead_proxy_send_over(railhead_proxy_t *proxy,
                                           void *comm,
                                           const railhead_connector_config_t *config,
                                           railhead_connector_t **connector);

// Makes a connector that receives over an open receive comm of the proxy's table. As railhead_proxy_send_over.
//
// # Safety
// `comm` must be an open receive comm of the table; the rest as for railhead_listener_accept.
railhead_status_t railhead_proxy_recv_over(railhead_proxy_t *proxy,
                                           void *comm,
                                           const railhead_connector_config_t *config,
                                           railhead_connector_t **connector);

// Closes a connector and ends its handle; its ring's memory, unless the caller supplied it, is freed.
//
// Errors: RAILHEAD_USAGE if it has operations that are not done, and the proxy has not ended: it stays open. The table's: it is closed all the same.
//
// # Safety
// No thread of this process may use the ring any more. Another process keeps its own mapping of it.
railhead_status_t railhead_connector_close(railhead_connector_t *connector);

// Tells where the connector's ring is.
//
// * `place` - out.
//
// # Safety
// `place` must be NULL or writable.
railhead_status_t railhead_connector_ring(railhead_connector_t *connector, railhead_ring_place_t *place);

// Appends an operation to those of the connector, which are done one after the other. It runs once railhead_proxy_start is called.
//
// * `operation` - in.
// * `op_count` - out: one more than that of the proxy's operation before it. May be NULL.
//
// Errors: RAILHEAD_USAGE for invalid steps, for a protocol for which the ring has no slots, for too many operations, for a proxy that was stopped; the
// error of the operation that failed, if one did.
//
// # Safety
// `operation` must be NULL or readable for its size, `op_count` NULL or writable.
railhead_status_t railhead_connector_append(railhead_connector_t *connector,
                                            const railhead_operation_t *operation,
                                            uint64_t *op_count);

// Tells what the connector has done.
//
// * `state` - out.
//
// # Safety
// `state` must be NULL or writable.
railhead_status_t railhead_connector_state(railhead_connector_t *connector, railhead_connector_state_t *state);

// Allocates `size` bytes, zeroed and page-aligned, for use as buffers of this plugin.
//
// Ordinary memory to the program; but once registered with regMr, a receiver on the same host maps it and copies straight out of
// it, without a system call per message. Not inherited by fork. The caller frees it with railhead_free, after deregMr.
//
// Returns NULL if `size` is 0 or memory or descriptors have run out; the log says which.
//
// Threads: any, at any time.
void *railhead_alloc(size_t size);

// Frees what railhead_alloc returned. NULL is fine. Anything else that it did not return, or that was freed already, is left alone and
// logged.
//
// A peer that has mapped it keeps it, and its pages, until their comm is closed: nothing tells it earlier, and it could be copying. A comm maps
// 64 of them at most, and copies out of others as out of ordinary memory. So this is for buffers that stay, not for each message.
//
// Threads: any, at any time.
void railhead_free(void *memory);

// Makes one rank's end of a mesh, not connected yet.
//
// `device`: the name of the device that it is on, or several with `+` between them, as `railhead info` lists them; NULL or "" for the first. Which
// devices there are is said by the same variables as for the plugin (docs/env.md).
//
// RAILHEAD_USAGE: a rank that is not below `ranks`, a device that there is not, a size or flags of another version.
railhead_status_t railhead_mesh_create(const railhead_mesh_config_t *config,
                                       const char *device,
                                       railhead_mesh_t **mesh);

// Connects to all other ranks, each of which calls it, through a store whose keys nobody else uses (railhead_store_prefix makes one of any). After an
// error all ranks may try again, with another prefix.
//
// RAILHEAD_TIMEOUT: a rank did not come in time; RAILHEAD_USAGE: it is connected already, the prefix was used before, or ranks are on different
// fabrics; RAILHEAD_NETWORK: the store or a rank is lost, or of another release.
railhead_status_t railhead_mesh_connect(railhead_mesh_t *mesh,
                                        railhead_store_t *store);

// Makes another mesh of the same ranks on the same device, connected, without a store: what is done on it has nothing to do with `mesh`. Every rank calls
// it, one thread at a time.
//
// RAILHEAD_USAGE: another thread of this rank does so, or 1024 collectives run, before anything is done; RAILHEAD_TIMEOUT, RAILHEAD_NETWORK: a rank did
// not come, or is lost; RAILHEAD_SYSTEM: no memory or descriptor left. After any other error than the first `mesh` has failed, too.
railhead_status_t railhead_mesh_fork(railhead_mesh_t *mesh,
                                     railhead_mesh_t **forked);

// Writes the address of this rank's end towards `peer`, for ranks that tell each other by means of their own: each hands its peer's to
// railhead_mesh_connect_pair. `*len`: the bytes at `address`; becomes those that the address has, at most RAILHEAD_MESH_ADDRESS. Whoever can read it can
// connect in the peer's place.
//
// RAILHEAD_USAGE: a rank that is not another one, or is connected; too few bytes, and `*len` is what it takes then.
railhead_status_t railhead_mesh_address(railhead_mesh_t *mesh,
                                        int64_t peer,
                                        uint8_t *address,
                                        size_t *len);

// Connects this rank to `peer`, whose address towards this rank is given. It does not wait for the peer to do the same; both must have done so before either
// sends or receives. From the first one on, a thread of the mesh sees to what comes while nobody waits.
//
// RAILHEAD_USAGE: a rank that is not another one, is connected, or was not given an address by railhead_mesh_address; RAILHEAD_NETWORK: an address that is
// none, or of another release.
railhead_status_t railhead_mesh_connect_pair(railhead_mesh_t *mesh,
                                             int64_t peer,
                                             const uint8_t *address,
                                             size_t len);

// Whether threads that wait for something on this mesh poll without end (`busy` not 0) instead of sleeping once nothing comes: less delay, at the cost of a
// core. May be called at any time.
railhead_status_t railhead_mesh_set_sync(railhead_mesh_t *mesh,
                                         int32_t busy);

// Ends a handle, and the connections to the other ranks: what other threads still do with it fails with RAILHEAD_USAGE. A rank that waits for this one gets
// RAILHEAD_NETWORK. Its buffers are closed by their own functions, before or after.
railhead_status_t railhead_mesh_close(railhead_mesh_t *mesh);

// Makes a proxy over the table `net`, an ncclNet_v12_t; NULL is Railhead's own. Its thread sleeps until something is started.
//
// * `config` - in, may be NULL for all defaults.
// * `proxy` - out; the caller destroys it with railhead_proxy_destroy.
//
// The table and its code must stay until then. The environment is read as by an init, for RAILHEAD_DUMP_SIGNAL.
//
// Errors: RAILHEAD_USAGE for a table that lacks a function, an invalid `size` or list of processors; RAILHEAD_SYSTEM if the system gives
// no thread.
//
// # Safety
// `net` must be NULL or such a table, and `config->context` NULL or a live context of it.
railhead_status_t railhead_proxy_create(const void *net,
                                        const railhead_proxy_config_t *config,
                                        railhead_proxy_t **proxy);

// Starts the operations that were appended, unless to a group that is still open, and wakes the thread.
//
// Errors: that of the operation that failed, if one did; RAILHEAD_USAGE if the proxy was stopped.
railhead_status_t railhead_proxy_start(railhead_proxy_t *proxy);

// Opens a group, maybe within another: what any thread appends from now on is held until the group is ended and the proxy started.
//
// Errors: as railhead_proxy_start.
railhead_status_t railhead_proxy_group_start(railhead_proxy_t *proxy);

// Ends the innermost group. Starts nothing.
//
// Errors: as railhead_proxy_start; RAILHEAD_USAGE if there is no group.
railhead_status_t railhead_proxy_group_end(railhead_proxy_t *proxy);

// Ends all groups and drops what was appended since the outermost was opened.
//
// Errors: as railhead_proxy_group_end.
railhead_status_t railhead_proxy_group_cancel(railhead_proxy_t *proxy);

// Refuses further operations, and waits until those that were started are done and the thread has ended. An operation that never ends makes this wait
// until another thread calls railhead_proxy_abort.
//
// What was appended and not started, or belongs to an open group, never runs. Started operations are completed whether they wait behind others or for
// the producer, the consumer or the peer, and even if the thread sleeps. Stopping or aborting a proxy that has ended does nothing. Several threads may
// wait here at once.
//
// Errors: that of the operation that failed, if one did, each time; RAILHEAD_INTERNAL on the proxy's own thread (in a plugin's function or a logger
// that it calls), which cannot wait for itself: the proxy stops all the same.
railhead_status_t railhead_proxy_stop(railhead_proxy_t *proxy);

// Ends the proxy's thread after its present step, even if operations are not done, and waits for that. If the step is a call of the table that does not
// return, this does not return either.
//
// Operations that are not done stay as they are and never run again, and rings keep their contents; their connectors may be closed. A stop that waits
// on another thread returns. Does nothing to a proxy that has ended or failed, which is no error here.
//
// Errors: RAILHEAD_INTERNAL on the proxy's own thread, as railhead_proxy_stop: the proxy ends after its present step all the same.
railhead_status_t railhead_proxy_abort(railhead_proxy_t *proxy);

// Aborts the proxy and closes it with all its connectors and listeners: all their handles end, and their rings' memory, unless the caller supplied it,
// is freed. A comm that the caller supplied stays open. NULL is fine. It need not have been stopped.
//
// A call that another thread is making on it, its connectors or its listeners ends as if it had come before, and what it made is closed, or after, and is
// refused. The table and its code must stay until such calls have returned too. So it must not be called from within such a call, by a logger or a function
// of the table: it may wait for the end of its own caller.
//
// Errors: the first error of closing them, after which all are closed all the same. RAILHEAD_INTERNAL on the proxy's own thread, as railhead_proxy_stop: nothing was
// done.
//
// # Safety
// No thread may use a ring of it any more.
railhead_status_t railhead_proxy_destroy(railhead_proxy_t *proxy);

// Tells what the proxy is doing, and what it has done.
//
// * `state` - out.
//
// # Safety
// `state` must be NULL or writable.
railhead_status_t railhead_proxy_state(railhead_proxy_t *proxy, railhead_proxy_state_t *state);

// Tells which operation failed and why.
//
// * `message` - out, at most `bytes` bytes, the last of them 0; untouched if no operation failed. May be NULL if `bytes` is 0.
//
// Returns RAILHEAD_OK if none failed, else the status that the operation failed with.
//
// # Safety
// `message` must be NULL or writable for `bytes` bytes.
railhead_status_t railhead_proxy_error(railhead_proxy_t *proxy,
                                       char *message,
                                       size_t bytes);

// Writes a text for people: one line per operation with its connector, its opCount, its progress, and what it waits for since when. Waits for the
// present step, at most a second: if that takes longer, the text says which operation the thread is stuck in.
//
// * `text` - out, at most `bytes` bytes, the last of them 0. May be NULL if `bytes` is 0.
// * `needed` - out, bytes of the whole text, its 0 included. May be NULL.
//
// # Safety
// `text` must be NULL or writable for `bytes` bytes, `needed` NULL or writable.
railhead_status_t railhead_proxy_dump(railhead_proxy_t *proxy,
                                      char *text,
                                      size_t bytes,
                                      size_t *needed);

// Finds the job's store, this process's rank and the number of ranks (-1 if nobody has said).
//
// `url`: tcp://host:port, env://, file:///path or one of railhead_rendezvous_register, with torch's rules; NULL is env://, which reads MASTER_ADDR,
// MASTER_PORT, RANK and WORLD_SIZE, the last two also under the names that Open MPI, MPICH and Slurm give them. `rank`, `world_size`: -1 if the URL or
// the environment says it. `timeout_ms`: less than 0 is torch's 30 minutes. With tcp:// and env:// rank 0 runs the server, as long as its store is
// open, unless torchrun's agent does.
railhead_status_t railhead_rendezvous(const char *url,
                                      int64_t rank,
                                      int64_t world_size,
                                      int64_t timeout_ms,
                                      railhead_store_t **store,
                                      int64_t *own_rank,
                                      int64_t *ranks);

// Adds a scheme for this process; forked children add it again.
railhead_status_t railhead_rendezvous_register(const char *scheme, railhead_rendezvous_callback_t callback, void *user);

// As torch's init_process_group: finds the others as railhead_rendezvous does, or takes `store`, which needs `rank` and `world_size` then, and gives the
// group of all ranks. `url` and `store` may be NULL, one of them must be unless the URL is to be env://.
railhead_status_t railhead_rendezvous_join(const char *url,
                                           railhead_store_t *store,
                                           int64_t rank,
                                           int64_t world_size,
                                           int64_t timeout_ms,
                                           railhead_group_t **group);

// As torch's new_group: a group of these ranks of the job. Every rank of the job calls it, members or not, in the same order; who is not a member gets
// NULL.
railhead_status_t railhead_rendezvous_new_group(railhead_group_t *job,
                                                const int64_t *ranks,
                                                size_t count,
                                                railhead_group_t **group);

// This process's rank in the group, and how many ranks it has. Either place may be NULL.
railhead_status_t railhead_rendezvous_ranks(railhead_group_t *group, int64_t *own_rank, int64_t *ranks);

// The group's store, whose keys no other group sees: a handle of its own, closed as any other, on the group's connection, if there is one.
railhead_status_t railhead_rendezvous_store(railhead_group_t *group,
                                            railhead_store_t **store);

// Waits until all ranks of the group have come, for at most `timeout_ms` (less than 0: 30 minutes). All ranks call it equally often.
railhead_status_t railhead_rendezvous_barrier(railhead_group_t *group,
                                              int64_t timeout_ms);

// Ends a group's handle. The job's server, if this process runs it, lives on while a store or a group of it is open.
railhead_status_t railhead_rendezvous_leave(railhead_group_t *group);

// Returns why the last function of this header that returned a status other than RAILHEAD_OK and RAILHEAD_IN_PROGRESS on this thread did so: the library's
// memory, valid until the next such call on this thread. Empty if none has failed. Never NULL.
//
// Threads: any, at any time; each has its own.
const char *railhead_last_error(void);

// Names a status in a few words: static memory that the caller must not free. Never NULL, whatever the number.
//
// Threads: any, at any time.
const char *railhead_status_string(int32_t status);

// Makes a store within this process.
railhead_status_t railhead_store_hash(railhead_store_t **store);

// Opens or creates a store in a file, in torch's format: a torch FileStore may use the same file at the same time.
//
// `world_size`: the last of so many stores removes the file when it is closed; 0 or less: nobody does. This call, operations without a timeout and
// railhead_store_close wait without limit for whoever holds the file's lock, as torch's do; operations with a timeout until that has passed.
railhead_status_t railhead_store_file(const char *path,
                                      int64_t world_size,
                                      railhead_store_t **store);

// Makes a name space: the key k is `prefix`/k in `inner`. It keeps `inner`'s store open for itself, and shares its connection; `inner` is closed as any
// other handle.
railhead_status_t railhead_store_prefix(const char *prefix,
                                        railhead_store_t *inner,
                                        railhead_store_t **store);

// Connects to the server of a TCPStore, torch's or Railhead's, trying until `timeout_ms` has passed (less than 0: for ever). RAILHEAD_STORE_SECRET is
// the secret of a server that has one; RAILHEAD_USAGE if it is invalid.
railhead_status_t railhead_store_connect(const char *host,
                                         uint16_t port,
                                         int64_t timeout_ms,
                                         railhead_store_t **store);

// Starts the server of a TCPStore in this process and connects to it. The server runs on a thread of its own until this handle and its clones and name
// spaces are closed; what had arrived by then was carried out.
//
// `address`: where to listen; NULL for what RAILHEAD_STORE_BIND says, else for all addresses, as torch does. `port`: 0 for any, see
// railhead_store_port. With RAILHEAD_STORE_SECRET set, clients that do not know it are refused, torch's among them. RAILHEAD_USAGE if either variable
// holds what is no address or can be no secret.
railhead_status_t railhead_store_serve(const char *address,
                                       uint16_t port,
                                       railhead_store_t **store);

// Makes another handle on the same store, with a connection of its own if the store is on a server: also of a name space, of a rendezvous' store and of a
// group's.
railhead_status_t railhead_store_clone(railhead_store_t *store,
                                       railhead_store_t **clone);

// Ends a handle. What other threads are doing with it goes on.
railhead_status_t railhead_store_close(railhead_store_t *store);

// The port of the store's server, whichever process runs it. RAILHEAD_UNSUPPORTED if it has none: a store within this process, or in a file.
railhead_status_t railhead_store_port(railhead_store_t *store,
                                      uint16_t *port);

// Stores a value, replacing any other. A server does not answer to this: only later calls on the same handle are sure to find it done.
railhead_status_t railhead_store_set(railhead_store_t *store,
                                     const char *key,
                                     const void *value,
                                     size_t size);

// Waits until the key exists, for at most `timeout_ms` (less than 0: for ever), and copies its value. The caller frees it with
// railhead_store_free; a 0 that is not counted follows it.
railhead_status_t railhead_store_get(railhead_store_t *store,
                                     const char *key,
                                     int64_t timeout_ms,
                                     void **value,
                                     size_t *size);

// Waits until all keys exist, for at most `timeout_ms`. On a server a key that has come meanwhile and was deleted again counts as there. A queue that holds something counts as a key, but a server lets only one who waits go on for each
// value that is pushed.
railhead_status_t railhead_store_wait(railhead_store_t *store,
                                      const char *const *keys,
                                      size_t count,
                                      int64_t timeout_ms);

// Whether all keys exist now: 1 or 0.
railhead_status_t railhead_store_check(railhead_store_t *store, const char *const *keys, size_t count, int *exist);

// Adds to a number, which is stored as decimal text and starts from 0, and gives the sum, which wraps around at 64 bits. A value that is no such number is
// RAILHEAD_USAGE, or, on a server, which then ends the connection, RAILHEAD_NETWORK.
railhead_status_t railhead_store_add(railhead_store_t *store,
                                     const char *key,
                                     int64_t delta,
                                     int64_t *sum);

// Stores `desired` if the value is `expected`, or if there is no value and `expected` is empty, and gives the value after that: freed with
// railhead_store_free. A missing key and an `expected` that is not empty give `expected` and store nothing: torch's rule.
railhead_status_t railhead_store_compare_set(railhead_store_t *store,
                                             const char *key,
                                             railhead_bytes_t expected,
                                             railhead_bytes_t desired,
                                             void **value,
                                             size_t *size);

// Appends to a value, which starts empty. A server does not answer to this.
railhead_status_t railhead_store_append(railhead_store_t *store, const char *key, const void *value, size_t size);

// Waits until all keys exist, for at most `timeout_ms`, and copies their values, in the order of the keys. One railhead_store_free frees the array and
// all values; a 0 that is not counted follows each.
railhead_status_t railhead_store_multi_get(railhead_store_t *store,
                                           const char *const *keys,
                                           size_t count,
                                           int64_t timeout_ms,
                                           railhead_bytes_t **values);

// Stores `count` values. A server does not answer to this.
railhead_status_t railhead_store_multi_set(railhead_store_t *store,
                                           const char *const *keys,
                                           const railhead_bytes_t *values,
                                           size_t count);

// Removes a key; `existed`, which may be NULL, tells whether it was there: 1 or 0, but always 1 of a store in a file, as torch's.
railhead_status_t railhead_store_delete_key(railhead_store_t *store,
                                            const char *key,
                                            int *existed);

// How many keys the store holds, its own bookkeeping included, queues not.
railhead_status_t railhead_store_num_keys(railhead_store_t *store, int64_t *count);

// The keys, in no order. One railhead_store_free frees the array and all keys; each ends with a 0 that is not counted.
railhead_status_t railhead_store_list_keys(railhead_store_t *store, railhead_bytes_t **keys, size_t *count);

// Appends to a queue; one who waits for it goes on. A server does not answer to this.
railhead_status_t railhead_store_queue_push(railhead_store_t *store, const char *key, const void *value, size_t size);

// Takes the oldest value from a queue, waiting for one for at most `timeout_ms`: RAILHEAD_QUEUE_EMPTY if that is 0 and there is none. The caller frees
// the value with railhead_store_free.
railhead_status_t railhead_store_queue_pop(railhead_store_t *store,
                                           const char *key,
                                           int64_t timeout_ms,
                                           void **value,
                                           size_t *size);

// How many values a queue holds.
railhead_status_t railhead_store_queue_len(railhead_store_t *store, const char *key, int64_t *len);

// Waits until `world_size` callers have come to the barrier of this key, for at most `timeout_ms`; not at all if `world_size` is less than 1. A key serves once.
railhead_status_t railhead_store_barrier(railhead_store_t *store,
                                         const char *key,
                                         int64_t world_size,
                                         int64_t timeout_ms);

// Frees what any function of the store has given: values, arrays of values, keys. NULL is fine.
//
// Threads: any.
void railhead_store_free(void *memory);

// Makes a worker's end, not connected yet. `device`: as for railhead_mesh_create.
//
// RAILHEAD_USAGE: names that cannot be, a device that there is not, a size, flags or a mode of another version.
railhead_status_t railhead_tensor_manager_create(const railhead_tensor_config_t *config,
                                                 const char *device,
                                                 railhead_tensor_manager_t **manager);

// Connects to all other workers, each of which calls it, through a store whose keys nobody else uses (railhead_store_prefix makes one of any).
// From then on a thread answers the others. After an error all workers may try again, with another prefix.
//
// RAILHEAD_TIMEOUT: a worker did not come in time; RAILHEAD_USAGE: it is connected already, workers were given other names or modes, or are on
// different fabrics; RAILHEAD_NETWORK: the store or a worker is lost, or of another release.
railhead_status_t railhead_tensor_manager_connect(railhead_tensor_manager_t *manager,
                                                  railhead_store_t *store);

// Runs the callbacks of receives that are over, on this thread; if there are none, it waits for the first, for at most `timeout_ms` (less than 0:
// for ever). `ran`: how many it has run, or NULL.
railhead_status_t railhead_tensor_manager_run(railhead_tensor_manager_t *manager,
                                              int64_t timeout_ms,
                                              size_t *ran);

// Ends a handle, and the connections to the other workers: what waits fails with RAILHEAD_USAGE, and callbacks that were not called are called
// now. Those that other threads are calling are over when this returns, unless it is called by one of them while another thread closes the manager,
// too. A worker that waits for this one gets RAILHEAD_NETWORK. It waits for a worker of this host that is in the middle of a write to this one's
// memory, be it stopped. Steps are released by railhead_tensor_release, before or after.
railhead_status_t railhead_tensor_manager_close(railhead_tensor_manager_t *manager);

// Finds a step, or makes it. What is received of it waits for railhead_tensor_initialize.
railhead_status_t railhead_tensor_step(railhead_tensor_manager_t *manager,
                                       uint64_t id,
                                       railhead_tensor_rendezvous_t **rendezvous);

// Lets what was asked for before begin.
//
// RAILHEAD_USAGE: the step was cleaned up.
railhead_status_t railhead_tensor_initialize(railhead_tensor_rendezvous_t *rendezvous);

// Registers memory, so that no tensor in it has to be, whoever sends it or receives into it: for memory that is used again and again. railhead_alloc
// gives some that is faster yet on one host.
//
// RAILHEAD_USAGE: no bytes, or some that are registered already; RAILHEAD_SYSTEM: memory that cannot be registered.
railhead_status_t railhead_tensor_register(railhead_tensor_manager_t *manager,
                                           void *data,
                                           size_t bytes,
                                           railhead_tensor_memory_t **memory);

// Ends that, before the memory is given away; before railhead_tensor_manager_close or after. Nobody reads or writes it afterwards.
//
// RAILHEAD_USAGE: there are tensors in it that were not released, or not received yet; it stays registered.
railhead_status_t railhead_tensor_deregister(railhead_tensor_memory_t *memory);

// Produces a tensor. Never waits. Its contents are copied, or, with a `release`, sent from where they are: straight out of memory that is registered, or
// that is so for this tensor (up to 16 KiB are copied instead).
//
// RAILHEAD_USAGE: no key, or one whose producer is another worker; "Duplicated send"; the step was cleaned up; the manager is closed. The status
// with which the step was aborted. After an error `release` is not called: the contents are the caller's.
railhead_status_t railhead_tensor_send(railhead_tensor_rendezvous_t *rendezvous,
                                       const char *key,
                                       const railhead_tensor_t *tensor);

// Receives a tensor, which may not be produced yet, and waits for it for at most `timeout_ms` (0 or less: for ever). railhead_tensor_free gives it
// back.
//
// RAILHEAD_TIMEOUT: "Timed out waiting for notification"; RAILHEAD_USAGE: no key, or one whose consumer is another worker, or whose producer there
// is not; the step was cleaned up, there too; the manager is closed. RAILHEAD_NETWORK: the producer's worker is lost. The status with which the
// step was aborted, here or there.
railhead_status_t railhead_tensor_recv(railhead_tensor_rendezvous_t *rendezvous,
                                       const char *key,
                                       int64_t timeout_ms,
                                       railhead_tensor_t *tensor);

// The same into `bytes` at `data`, which become the tensor's `data`; there is nothing to free, and `owner` is NULL. Nobody writes there any more when this
// returns: if its time is over, it waits until the producer's worker, which may be writing, has answered. In Direct mode the tensor is written there
// by the producer, and memory of more than 16 KiB that is not registered is so for this call.
//
// RAILHEAD_USAGE: the tensor has more bytes; and as for railhead_tensor_recv.
railhead_status_t railhead_tensor_recv_into(railhead_tensor_rendezvous_t *rendezvous,
                                            const char *key,
                                            void *data,
                                            size_t bytes,
                                            int64_t timeout_ms,
                                            railhead_tensor_t *tensor);

// Receives a tensor, for which `callback` is called with `user`, once. What goes wrong is said to the callback, as railhead_tensor_recv would.
//
// RAILHEAD_USAGE: the manager is closed; the callback is not called then.
railhead_status_t railhead_tensor_recv_async(railhead_tensor_rendezvous_t *rendezvous,
                                             const char *key,
                                             railhead_tensor_callback_t callback,
                                             void *user);

// Receives several tensors, for which `callback` is called with `user`, once, when the last of them has come or has failed. If any has failed, or its
// producer had nothing to send ("The tensor returned for KEY was not valid."), it gets the first error and no tensor. The keys are copied.
//
// RAILHEAD_USAGE: the manager is closed; the callback is not called then.
railhead_status_t railhead_tensor_recv_all_async(railhead_tensor_rendezvous_t *rendezvous,
                                                 const char *const *keys,
                                                 size_t count,
                                                 railhead_tensor_all_callback_t callback,
                                                 void *user);

// The same into `bytes` at `data`, as railhead_tensor_recv_into: the memory is the library's until `callback` is called, and the tensor's `data` then.
railhead_status_t railhead_tensor_recv_into_async(railhead_tensor_rendezvous_t *rendezvous,
                                                  const char *key,
                                                  void *data,
                                                  size_t bytes,
                                                  railhead_tensor_callback_t callback,
                                                  void *user);

// Gives a tensor back that railhead_tensor_recv has filled in: its `data` is not to be read any more.
railhead_status_t railhead_tensor_free(const railhead_tensor_t *tensor);

// Ends all receives of this step that wait, here and on workers that have asked this one, and all sends and receives that come later: they get
// `status`, RAILHEAD_INTERNAL, RAILHEAD_USAGE, RAILHEAD_NETWORK or RAILHEAD_TIMEOUT, and the first 256 bytes of `why`. The first call counts.
//
// RAILHEAD_USAGE: another status; the step was cleaned up.
railhead_status_t railhead_tensor_abort(railhead_tensor_rendezvous_t *rendezvous,
                                        int32_t status,
                                        const char *why);

// Ends a handle. The step goes on.
railhead_status_t railhead_tensor_release(railhead_tensor_rendezvous_t *rendezvous);

// Ends a step: what waits for it here or on other workers, and what comes later, fails with RAILHEAD_USAGE and "Cleanup ID"; its tensors are
// forgotten. Numbers of steps should rise, and not be used again: others may be late.
railhead_status_t railhead_tensor_cleanup(railhead_tensor_manager_t *manager,
                                          uint64_t id);

// Ends all steps that there are.
railhead_status_t railhead_tensor_cleanup_all(railhead_tensor_manager_t *manager);

// Writes the key of a tensor and a 0 behind it: "SRC_DEVICE;INCARNATION;DST_DEVICE;EDGE;FRAME:ITER", at most 512 bytes, in TensorFlow's form.
// `*len`: the bytes at `key`; becomes those of the key, with the 0.
//
// RAILHEAD_USAGE: a part that is empty or has a semicolon; a key that is too long; too few bytes, and `*len` is what it takes then.
railhead_status_t railhead_tensor_key_create(const char *src_device,
                                             uint64_t src_incarnation,
                                             const char *dst_device,
                                             const char *edge,
                                             uint64_t frame,
                                             int64_t iter,
                                             char *key,
                                             size_t *len);

// Reads a key. The parts point into it.
//
// RAILHEAD_USAGE: a text that is no key.
railhead_status_t railhead_tensor_key_parse(const char *key, railhead_tensor_key_t *parsed);

// Returns the library's version, "major.minor.patch": static memory that the caller must not free. Never NULL.
//
// Threads: any, at any time.
const char *railhead_version(void);

// Has `callback` called with `user` and each change of the key's value from now on, on a thread of its own, until railhead_store_unwatch.
// RAILHEAD_UNSUPPORTED by torch's servers. In a file a change is noticed within 10 ms.
railhead_status_t railhead_store_watch(railhead_store_t *store,
                                       const char *key,
                                       railhead_watch_callback_t callback,
                                       void *user,
                                       railhead_watch_t **watch);

// Ends a watch. When this returns, the callback has returned for the last time; called within the callback, it is the last call.
railhead_status_t railhead_store_unwatch(railhead_watch_t *watch);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RAILHEAD_H */
