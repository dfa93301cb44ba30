/* Railhead's C interface. Generated from src/abi by `make header`; do not edit. */

#ifndef RAILHEAD_H
#define RAILHEAD_H

#include <stddef.h>
#include <stdint.h>

/* Version of this header; railhead_version() tells that of the loaded library. */
#define RAILHEAD_VERSION_MAJOR 0
#define RAILHEAD_VERSION_MINOR 1
#define RAILHEAD_VERSION_PATCH 0

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

// Returns the library's version, "major.minor.patch": static memory that the caller must not free. Never NULL.
//
// Threads: any, at any time.
const char *railhead_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RAILHEAD_H */
