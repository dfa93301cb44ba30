/* Railhead's C interface. Generated from src/abi by `make header`; do not edit. */

#ifndef RAILHEAD_H
#define RAILHEAD_H

#include <stddef.h>
#include <stdint.h>

/* Version of this header; railhead_version() tells that of the loaded library. */
#define RAILHEAD_VERSION_MAJOR 0
#define RAILHEAD_VERSION_MINOR 1
#define RAILHEAD_VERSION_PATCH 0

// How a call ended. The log says why. Numbers and meaning as ncclResult_t's.
typedef enum {
    // Done.
    RAILHEAD_SUCCESS = 0,
    // The operating system or the NIC refused.
    RAILHEAD_SYSTEM_ERROR = 2,
    // A bad call: NULL, a handle that is closed or never was one; or a fault of the library.
    RAILHEAD_INTERNAL_ERROR = 3,
    // A size, an argument, a setting or the state of things that the caller can mend.
    RAILHEAD_INVALID_USAGE = 5,
    // The peer is gone.
    RAILHEAD_REMOTE_ERROR = 6,
    // Not yet: call again.
    RAILHEAD_IN_PROGRESS = 7,
} railhead_status_t;

// Where a ring lies.
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

// One direction of a connection of a proxy: a comm and a ring. Not a pointer.
typedef struct railhead_connector_t railhead_connector_t;

// A listener of a proxy. Not a pointer.
typedef struct railhead_listener_t railhead_listener_t;

// A proxy: a thread that sends and receives for programs that cannot call a network. Made by railhead_proxy_create; not a pointer.
typedef struct railhead_proxy_t railhead_proxy_t;

// How a connector is made. Set `size`, and everything else to zero or to what you want.
typedef struct {
    // sizeof(railhead_connector_config_t).
    size_t size;
    // A railhead_ring_home_t.
    uint32_t home;
    // Who can reach supplied data: NCCL_PTR_HOST (1, or 0) or NCCL_PTR_CUDA (2). What is received into the latter is flushed before it is announced.
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
    // The step that the ring starts from.
    uint64_t first_step;
    // Tag of all messages.
    int32_t tag;
    // 1: flush what was received into host memory too.
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
    // Descriptor of the mapping, which stays the connector's; -1 if the ring is not shared.
    int fd;
    // Zero.
    uint32_t reserved;
    // Path of the mapping; empty if it has none.
    char path[64];
} railhead_ring_place_t;

// What an operation is to move. Set `size`.
typedef struct {
    // sizeof(railhead_operation_t).
    size_t size;
    // How many steps: a multiple of slice_steps.
    uint64_t steps;
    // Steps that make one message: 1, 2, 4 or 8. 0: 1.
    uint32_t slice_steps;
    // The operation starts at the next multiple of this: 1, 2, 4 or 8, at least slice_steps. 0: slice_steps.
    uint32_t chunk_steps;
    // How the producer says that a slot is filled: 0 LL, 1 LL128, 2 SIMPLE (RAILHEAD_RING_* of railhead_ring.h).
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
    // Times that the network took a message only later.
    uint64_t retries;
    // Flushes posted.
    uint64_t flushes;
} railhead_connector_state_t;

// NCCL's logger (ncclDebugLogger_t).
typedef void (*railhead_logger_t)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

// How a proxy is made. Set `size`, and everything else to zero or to what you want.
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
    // Microseconds that the thread sleeps at a time once its operations have not moved for long. 0: it polls as long as there are operations, as
    // NCCL's does. Without operations it sleeps in any case.
    uint32_t nap_us;
    // Zero.
    uint32_t reserved;
} railhead_proxy_config_t;

// What a proxy is doing, and what it has done. Counts wrap at 2^64.
typedef struct {
    // 1 while the thread sleeps because there is nothing to do.
    uint32_t asleep;
    // 1 once it was stopped or aborted, or an operation failed: nothing moves any more.
    uint32_t ended;
    // 1 once an operation failed; railhead_proxy_error says which.
    uint32_t failed;
    // Zero.
    uint32_t reserved;
    // The opCount that the next operation will have.
    uint64_t next_op_count;
    // Operations complete.
    uint64_t done;
    // Turns that operations had.
    uint64_t steps;
    // Times that every connector with operations had its turn.
    uint64_t laps;
    // Those in which nothing moved.
    uint64_t idle_laps;
    // Times that the thread let others run.
    uint64_t yields;
    // Times that the thread slept.
    uint64_t sleeps;
} railhead_proxy_state_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

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

// Takes a peer in, and makes the connector that receives from it.
//
// * `config` - in, may be NULL for all defaults.
// * `connector` - out; closed with railhead_connector_close.
//
// Returns RAILHEAD_IN_PROGRESS while there is no peer: call again.
//
// Errors: the table's; RAILHEAD_INVALID_USAGE for a configuration that makes no sense.
//
// # Safety
// `config` must be NULL or readable for its size; what it supplies must stay until the connector is closed; `connector` must be NULL or writable.
railhead_status_t railhead_listener_accept(railhead_listener_t *listener,
                                           const railhead_connector_config_t *config,
                                           railhead_connector_t **connector);

// Closes a listener; its handle is spent. What was accepted stays.
//
// Errors: the table's; it is gone all the same.
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

// Makes a connector that sends over an open send comm of the proxy's table. The comm stays the caller's to close, after the connector; until then the
// proxy alone drives it.
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

// Closes a connector; its handle is spent, and its ring's memory, unless the caller supplied it, is gone.
//
// Errors: RAILHEAD_INVALID_USAGE if it has operations that are not done, and the proxy has not ended: it stays open. The table's: it is gone all the same.
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

// Appends an operation to those of the connector, which are done one after the other. It moves once railhead_proxy_start is called.
//
// * `operation` - in.
// * `op_count` - out: one more than that of the proxy's operation before it. May be NULL.
//
// Errors: RAILHEAD_INVALID_USAGE for steps that make no sense or that the ring has no slots for, for too many operations, for a proxy that was stopped; the
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

// Makes a proxy over the table `net`, an ncclNet_v12_t; NULL is Railhead's own. Its thread sleeps until something is started.
//
// * `config` - in, may be NULL for all defaults.
// * `proxy` - out; the caller destroys it with railhead_proxy_destroy.
//
// The table and its code must stay until then.
//
// Errors: RAILHEAD_INVALID_USAGE for a table that lacks a function, a `size` or a list of processors that makes no sense; RAILHEAD_SYSTEM_ERROR if there
// is no thread to be had.
//
// # Safety
// `net` must be NULL or such a table, and `config->context` NULL or a live context of it.
railhead_status_t railhead_proxy_create(const void *net,
                                        const railhead_proxy_config_t *config,
                                        railhead_proxy_t **proxy);

// Lets what was appended go, unless to a group that is still open, and wakes the thread for it.
//
// Errors: that of the operation that failed, if one did; RAILHEAD_INVALID_USAGE if the proxy was stopped.
railhead_status_t railhead_proxy_start(railhead_proxy_t *proxy);

// Opens a group, maybe within another: what anybody appends from now on is held until the group is ended and the proxy started.
//
// Errors: as railhead_proxy_start.
railhead_status_t railhead_proxy_group_start(railhead_proxy_t *proxy);

// Ends the innermost group. Starts nothing.
//
// Errors: as railhead_proxy_start; RAILHEAD_INVALID_USAGE if there is no group.
railhead_status_t railhead_proxy_group_end(railhead_proxy_t *proxy);

// Ends all groups and drops what was appended since the outermost was opened.
//
// Errors: as railhead_proxy_group_end.
railhead_status_t railhead_proxy_group_cancel(railhead_proxy_t *proxy);

// Takes no more operations in, and waits until those that were started are done and the thread has ended. An operation that never ends makes this wait
// until another thread calls railhead_proxy_abort.
//
// Errors: that of the operation that failed, if one did.
railhead_status_t railhead_proxy_stop(railhead_proxy_t *proxy);

// Ends the proxy's thread after its present step, whatever is not done, and waits for that.
railhead_status_t railhead_proxy_abort(railhead_proxy_t *proxy);

// Aborts the proxy and closes it with all its connectors and listeners: all their handles are spent, and their rings' memory, unless the caller
// supplied it, is gone. A comm that the caller supplied stays open. NULL is fine.
//
// Errors: the first that closing them met; they are gone all the same.
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
// Returns RAILHEAD_SUCCESS if none failed, else the status that the operation failed with.
//
// # Safety
// `message` must be NULL or writable for `bytes` bytes.
railhead_status_t railhead_proxy_error(railhead_proxy_t *proxy,
                                       char *message,
                                       size_t bytes);

// Shows what the proxy has to do, for people: one line per operation with its connector, its opCount, how far it is, and what it waits for since when.
// Waits for the step that is being made, at most a second: if that takes longer, it is what is shown.
//
// * `text` - out, at most `bytes` bytes, the last of them 0. May be NULL if `bytes` is 0.
// * `needed` - out, bytes that the whole takes, its 0 included. May be NULL.
//
// # Safety
// `text` must be NULL or writable for `bytes` bytes, `needed` NULL or writable.
railhead_status_t railhead_proxy_dump(railhead_proxy_t *proxy,
                                      char *text,
                                      size_t bytes,
                                      size_t *needed);

// Names a status in a few words: static memory that the caller must not free. Never NULL, whatever the number.
//
// Threads: any, at any time.
const char *railhead_status_string(int32_t status);

// Returns the library's version, "major.minor.patch": static memory that the caller must not free. Never NULL.
//
// Threads: any, at any time.
const char *railhead_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RAILHEAD_H */
