#define _GNU_SOURCE
#include "railhead_stats.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The page, version 4 (src/base/stats/page.rs), in host order. A rail's counters begin with the bytes sent by each path, then received. */
enum {
    HEADER_VERSION = 8,
    HEADER_PID = 12,
    HEADER_COMMS = 32,
    HEADER_RAILS = 36,
    HEADER_SIZE = 4096,
    COMM_SIZE = 384,
    RAIL_SIZE = 384,
    RAIL_OWNER = 8,
    RAIL_COUNTERS = 64,
    COUNTERS = 24,
    VERSION = 4,
    PATHS = 6,
};

struct traffic {
    uint64_t sent[PATHS], received[PATHS]; /* bytes, by path */
};

static const char MAGIC[8] = "RHSTATS";
static const char *const PATH_NAMES[PATHS] = {"inline", "mapped", "cross-memory", "bounce", "tcp", "nic"};

/* Where a rail record counts each path, sent and received. */
static const int COUNTER_OF[PATHS][2] = {{0, 5}, {1, 6}, {2, 7}, {3, 8}, {4, 9}, {17, 18}};

static int read_at(int fd, void *into, size_t size, off_t offset)
{
    return pread(fd, into, size, offset) == (ssize_t)size ? 0 : -1;
}

static void add_rail(const unsigned char *rail, struct traffic *traffic)
{
    uint64_t owner, counters[COUNTERS];
    memcpy(&owner, rail + RAIL_OWNER, sizeof owner);
    memcpy(counters, rail + RAIL_COUNTERS, sizeof counters);
    if (owner == 0)
        return;
    for (int path = 0; path < PATHS; path++) {
        traffic->sent[path] += counters[COUNTER_OF[path][0]];
        traffic->received[path] += counters[COUNTER_OF[path][1]];
    }
}

/* `fd` is somebody's memfd; a page that this process inherited through fork is not its own. */
static int read_page(int fd, struct traffic *traffic)
{
    unsigned char header[HEADER_SIZE];
    uint32_t version, comms, rails;
    int32_t pid;
    if (read_at(fd, header, sizeof header, 0) != 0 || memcmp(header, MAGIC, sizeof MAGIC) != 0)
        return -1;
    memcpy(&version, header + HEADER_VERSION, sizeof version);
    memcpy(&pid, header + HEADER_PID, sizeof pid);
    memcpy(&comms, header + HEADER_COMMS, sizeof comms);
    memcpy(&rails, header + HEADER_RAILS, sizeof rails);
    if (version != VERSION || pid != (int32_t)getpid())
        return -1;
    memset(traffic, 0, sizeof *traffic);
    for (uint32_t i = 0; i < rails; i++) {
        unsigned char rail[RAIL_SIZE];
        if (read_at(fd, rail, sizeof rail, HEADER_SIZE + (off_t)comms * COMM_SIZE + (off_t)i * RAIL_SIZE) != 0)
            return -1;
        add_rail(rail, traffic);
    }
    return 0;
}

static int is_page(int directory, const char *name)
{
    char target[64];
    ssize_t length = readlinkat(directory, name, target, sizeof target - 1);
    if (length < 0)
        return 0;
    target[length] = '\0';
    return strncmp(target, "/memfd:railhead-stats", strlen("/memfd:railhead-stats")) == 0;
}

static void print_paths(const char *what, const uint64_t *bytes)
{
    int printed = printf("%s: ", what);
    int before = printed;
    for (int path = 0; path < PATHS; path++)
        if (bytes[path] != 0)
            printed += printf("%s%s %" PRIu64, printed == before ? "" : ", ", PATH_NAMES[path], bytes[path]);
    if (printed == before)
        printf("nothing");
}

void railhead_print_paths(int rank)
{
    struct traffic traffic;
    struct dirent *entry;
    DIR *directory = opendir("/proc/self/fd");
    while (directory != NULL && (entry = readdir(directory)) != NULL) {
        if (!is_page(dirfd(directory), entry->d_name) || read_page(atoi(entry->d_name), &traffic) != 0)
            continue;
        printf("# rank %d: bytes ", rank);
        print_paths("sent", traffic.sent);
        print_paths("; received", traffic.received);
        printf("\n");
        break;
    }
    if (directory != NULL)
        (void)closedir(directory);
}
