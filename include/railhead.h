/* Railhead's C interface. Generated from src/abi by `make header`; do not edit. */

#ifndef RAILHEAD_H
#define RAILHEAD_H

#include <stddef.h>
#include <stdint.h>

/* Version of this header; railhead_version() tells that of the loaded library. */
#define RAILHEAD_VERSION_MAJOR 0
#define RAILHEAD_VERSION_MINOR 1
#define RAILHEAD_VERSION_PATCH 0

// How a call ended.
typedef enum {
    // It did what it was asked to do. Only now are outputs written.
    RAILHEAD_OK = 0,
    // What was waited for did not happen in time.
    RAILHEAD_TIMEOUT = 1,
    // There is nothing to pop.
    RAILHEAD_QUEUE_EMPTY = 2,
    // This kind of store has no such operation.
    RAILHEAD_UNSUPPORTED = 3,
    // An argument or a setting that the caller can mend: NULL, a handle that is closed or none, a bad URL, a missing variable.
    RAILHEAD_USAGE = 4,
    // The server is gone, cannot be reached, refuses this client, or is none.
    RAILHEAD_NETWORK = 5,
    // The operating system refused something else.
    RAILHEAD_SYSTEM = 6,
    // A fault of the library.
    RAILHEAD_INTERNAL = 7,
} railhead_status;

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
} railhead_change;

// Ranks that share a name space of a store: an opaque handle, ended by railhead_rendezvous_leave. Threads: as for a railhead_store.
typedef struct railhead_group railhead_group;

// A key-value store that ranks share: an opaque handle. Made by railhead_store_hash, _file, _prefix, _connect and _serve and by railhead_rendezvous,
// ended by railhead_store_close.
//
// Threads: any, several at a time, a handle may be closed while another thread uses it: that call goes on. Not from a signal handler. In a forked child
// the parent's handles are refused. A blocked operation on a connection to a server keeps other operations on the same handle waiting: a
// thread that is to wait for long takes a handle of its own (railhead_store_clone).
typedef struct railhead_store railhead_store;

// A watch on a key: an opaque handle, ended by railhead_store_unwatch.
typedef struct railhead_watch railhead_watch;

// Carries out the rendezvous of a scheme of the program's own: writes a store's handle, which the library closes, the rank and the number of ranks, and
// returns 0. Anything else is an error. `url` ends with 0 and is the library's until the callback returns. Called on the thread that asked for the rendezvous; must not throw.
typedef int (*railhead_rendezvous_callback)(void *user,
                                            const char *url,
                                            int64_t timeout_ms,
                                            railhead_store **store,
                                            int64_t *rank,
                                            int64_t *world_size);

// Bytes, not necessarily text.
typedef struct {
    // Where; anything if the size is 0.
    const void *data;
    // How many.
    size_t size;
} railhead_bytes;

// Called with each change of a watched key, in order, on a thread of the watch, which has all signals blocked. The values are the library's, until the
// callback returns. May call any function of this header; must not throw.
typedef void (*railhead_watch_callback)(void *user,
                                        railhead_change change,
                                        railhead_bytes old_value,
                                        railhead_bytes new_value);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

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

// Finds the job's store, this process's rank and the number of ranks (-1 if nobody has said).
//
// `url`: tcp://host:port, env://, file:///path or one of railhead_rendezvous_register, with torch's rules; NULL is env://, which reads MASTER_ADDR,
// MASTER_PORT, RANK and WORLD_SIZE, the last two also under the names that Open MPI, MPICH and Slurm give them. `rank`, `world_size`: -1 if the URL or
// the environment says it. `timeout_ms`: less than 0 is torch's 30 minutes. With tcp:// and env:// rank 0 runs the server, as long as its store is
// open, unless torchrun's agent does.
railhead_status railhead_rendezvous(const char *url,
                                    int64_t rank,
                                    int64_t world_size,
                                    int64_t timeout_ms,
                                    railhead_store **store,
                                    int64_t *own_rank,
                                    int64_t *ranks);

// Adds a scheme for this process; forked children add it again.
railhead_status railhead_rendezvous_register(const char *scheme, railhead_rendezvous_callback callback, void *user);

// As torch's init_process_group: finds the others as railhead_rendezvous does, or takes `store`, which needs `rank` and `world_size` then, and gives the
// group of all ranks. `url` and `store` may be NULL, one of them must be unless the URL is to be env://.
railhead_status railhead_rendezvous_join(const char *url,
                                         railhead_store *store,
                                         int64_t rank,
                                         int64_t world_size,
                                         int64_t timeout_ms,
                                         railhead_group **group);

// As torch's new_group: a group of these ranks of the job. Every rank of the job calls it, members or not, in the same order; who is not a member gets
// NULL.
railhead_status railhead_rendezvous_new_group(railhead_group *job,
                                              const int64_t *ranks,
                                              size_t count,
                                              railhead_group **group);

// This process's rank in the group, and how many ranks it has. Either place may be NULL.
railhead_status railhead_rendezvous_ranks(railhead_group *group, int64_t *own_rank, int64_t *ranks);

// The group's store, whose keys no other group sees: a handle of its own, closed as any other.
railhead_status railhead_rendezvous_store(railhead_group *group, railhead_store **store);

// Waits until all ranks of the group have come, for at most `timeout_ms` (less than 0: 30 minutes). All ranks call it equally often.
railhead_status railhead_rendezvous_barrier(railhead_group *group,
                                            int64_t timeout_ms);

// Ends a group's handle. The job's server, if this process runs it, lives on while a store or a group of it is open.
railhead_status railhead_rendezvous_leave(railhead_group *group);

// Returns why the last railhead_store_* or railhead_rendezvous_* call that failed on this thread did so: the library's memory, valid until the next such
// call on this thread. Empty if none has failed. Never NULL.
//
// Threads: any, at any time; each has its own.
const char *railhead_last_error(void);

// Makes a store within this process.
railhead_status railhead_store_hash(railhead_store **store);

// Opens or creates a store in a file, in torch's format: a torch FileStore may use the same file at the same time.
//
// `world_size`: the last of so many stores removes the file when it is closed; 0 or less: nobody does.
railhead_status railhead_store_file(const char *path, int64_t world_size, railhead_store **store);

// Makes a name space: the key k is `prefix`/k in `inner`. It keeps `inner`'s store open for itself; `inner` is closed as any other handle.
railhead_status railhead_store_prefix(const char *prefix,
                                      railhead_store *inner,
                                      railhead_store **store);

// Connects to the server of a TCPStore, torch's or Railhead's, trying until `timeout_ms` has passed (less than 0: for ever). RAILHEAD_STORE_SECRET is
// what a server with a secret wants to hear.
railhead_status railhead_store_connect(const char *host,
                                       uint16_t port,
                                       int64_t timeout_ms,
                                       railhead_store **store);

// Starts the server of a TCPStore in this process and connects to it. The server runs on a thread of its own until this handle and its clones and name
// spaces are closed; what had arrived by then was carried out.
//
// `address`: where to listen; NULL for what RAILHEAD_STORE_BIND says, else for all addresses, as torch does. `port`: 0 for any, see
// railhead_store_port. With RAILHEAD_STORE_SECRET set, clients that do not know it are refused, torch's among them.
railhead_status railhead_store_serve(const char *address,
                                     uint16_t port,
                                     railhead_store **store);

// Makes another handle on the same store, with a connection of its own if the store is a server's.
railhead_status railhead_store_clone(railhead_store *store, railhead_store **clone);

// Ends a handle. What other threads are doing with it goes on.
railhead_status railhead_store_close(railhead_store *store);

// The port of the store's server. RAILHEAD_UNSUPPORTED if it has none.
railhead_status railhead_store_port(railhead_store *store, uint16_t *port);

// Stores a value, replacing any other. A server does not answer to this: only later calls on the same handle are sure to find it done.
railhead_status railhead_store_set(railhead_store *store,
                                   const char *key,
                                   const void *value,
                                   size_t size);

// Waits until the key exists, for at most `timeout_ms` (less than 0: for ever), and copies its value. The caller frees it with
// railhead_store_free; behind it stands a 0 that is not counted.
railhead_status railhead_store_get(railhead_store *store,
                                   const char *key,
                                   int64_t timeout_ms,
                                   void **value,
                                   size_t *size);

// Waits until all keys exist, for at most `timeout_ms`.
railhead_status railhead_store_wait(railhead_store *store, const char *const *keys, size_t count, int64_t timeout_ms);

// Whether all keys exist now: 1 or 0.
railhead_status railhead_store_check(railhead_store *store, const char *const *keys, size_t count, int *exist);

// Adds to a number, which is stored as decimal text and starts from 0, and gives the sum.
railhead_status railhead_store_add(railhead_store *store, const char *key, int64_t delta, int64_t *sum);

// Stores `desired` if the value is `expected`, or if there is no value and `expected` is empty, and gives the value after that: freed with
// railhead_store_free. A missing key and an `expected` that is not empty give `expected` and store nothing: torch's rule.
railhead_status railhead_store_compare_set(railhead_store *store,
                                           const char *key,
                                           railhead_bytes expected,
                                           railhead_bytes desired,
                                           void **value,
                                           size_t *size);

// Appends to a value, which starts empty. A server does not answer to this.
railhead_status railhead_store_append(railhead_store *store, const char *key, const void *value, size_t size);

// Waits until all keys exist, for at most `timeout_ms`, and copies their values, in the order of the keys. One railhead_store_free frees the array and
// all values; behind each stands a 0 that is not counted.
railhead_status railhead_store_multi_get(railhead_store *store,
                                         const char *const *keys,
                                         size_t count,
                                         int64_t timeout_ms,
                                         railhead_bytes **values);

// Stores `count` values. A server does not answer to this.
railhead_status railhead_store_multi_set(railhead_store *store,
                                         const char *const *keys,
                                         const railhead_bytes *values,
                                         size_t count);

// Removes a key; `existed`, which may be NULL, tells whether it was there: 1 or 0.
railhead_status railhead_store_delete_key(railhead_store *store, const char *key, int *existed);

// How many keys the store holds, its own bookkeeping included, queues not.
railhead_status railhead_store_num_keys(railhead_store *store, int64_t *count);

// The keys, in no order. One railhead_store_free frees the array and all keys; each ends with a 0 that is not counted.
railhead_status railhead_store_list_keys(railhead_store *store, railhead_bytes **keys, size_t *count);

// Appends to a queue; one who waits for it goes on. A server does not answer to this.
railhead_status railhead_store_queue_push(railhead_store *store, const char *key, const void *value, size_t size);

// Takes the oldest value from a queue, waiting for one for at most `timeout_ms`: RAILHEAD_QUEUE_EMPTY if that is 0 and there is none. The caller frees
// the value with railhead_store_free.
railhead_status railhead_store_queue_pop(railhead_store *store,
                                         const char *key,
                                         int64_t timeout_ms,
                                         void **value,
                                         size_t *size);

// How many values a queue holds.
railhead_status railhead_store_queue_len(railhead_store *store, const char *key, int64_t *len);

// Waits until `world_size` callers have come to the barrier of this key, for at most `timeout_ms`. A key serves once.
railhead_status railhead_store_barrier(railhead_store *store, const char *key, int64_t world_size, int64_t timeout_ms);

// Has `callback` called with `user` and each change of the key's value from now on, on a thread of its own, until railhead_store_unwatch.
// RAILHEAD_UNSUPPORTED by a file, and by torch's servers.
railhead_status railhead_store_watch(railhead_store *store,
                                     const char *key,
                                     railhead_watch_callback callback,
                                     void *user,
                                     railhead_watch **watch);

// Ends a watch. When this returns, the callback has returned for the last time; called within the callback, it is the last call.
railhead_status railhead_store_unwatch(railhead_watch *watch);

// Frees what any function of the store has given: values, arrays of values, keys. NULL is fine.
//
// Threads: any.
void railhead_store_free(void *memory);

// Returns the library's version, "major.minor.patch": static memory that the caller must not free. Never NULL.
//
// Threads: any, at any time.
const char *railhead_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RAILHEAD_H */
