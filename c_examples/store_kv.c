/*
 * A key-value store that processes share, from C: one process serves, others connect, all use it.
 *
 *   store_kv                      a demonstration in one process: server, two clients, a watch
 *   store_kv serve PORT           serves until its standard input ends, and prints the port
 *   store_kv HOST:PORT get KEY | set KEY VALUE | add KEY NUMBER | wait KEY
 *
 * The server may also be torch's, and the clients torch programs: the protocol is PyTorch's TCPStore.
 */
#include "../include/railhead.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TIMEOUT_MS = 60000 };

/* Ends the program with the library's words if a call failed. */
static void check(const char *what, railhead_status_t status)
{
    if (status == RAILHEAD_OK)
        return;
    (void)fprintf(stderr, "store_kv: %s: %s (%d)\n", what, railhead_last_error(), (int)status);
    exit(1);
}

/* ---- the commands ---- */

static railhead_store_t *connect_to(char *place)
{
    char *colon = strrchr(place, ':');
    if (colon == NULL) {
        (void)fprintf(stderr, "store_kv: %s: expected HOST:PORT\n", place);
        exit(2);
    }
    *colon = '\0';
    railhead_store_t *store;
    check("connect", railhead_store_connect(place, (uint16_t)atoi(colon + 1), TIMEOUT_MS, &store));
    return store;
}

static void get(railhead_store_t *store, const char *key)
{
    void *value;
    size_t size;
    check("get", railhead_store_get(store, key, TIMEOUT_MS, &value, &size));
    (void)fwrite(value, 1, size, stdout);
    (void)putchar('\n');
    railhead_store_free(value);
}

static void add(railhead_store_t *store, const char *key, const char *number)
{
    int64_t sum;
    check("add", railhead_store_add(store, key, strtoll(number, NULL, 10), &sum));
    printf("%" PRId64 "\n", sum);
}

static int client(int argc, char **argv)
{
    railhead_store_t *store = connect_to(argv[1]);
    const char *command = argv[2];
    const char *key = argv[3];
    if (strcmp(command, "get") == 0) {
        get(store, key);
    } else if (strcmp(command, "wait") == 0) {
        check("wait", railhead_store_wait(store, &key, 1, TIMEOUT_MS));
    } else if (strcmp(command, "add") == 0 && argc > 4) {
        add(store, key, argv[4]);
    } else if (strcmp(command, "set") == 0 && argc > 4) {
        check("set", railhead_store_set(store, key, argv[4], strlen(argv[4])));
        /* A set is not answered; what is answered after it comes after it. */
        int there;
        check("check", railhead_store_check(store, &key, 1, &there));
    } else {
        (void)fprintf(stderr, "store_kv: unknown command %s\n", command);
        return 2;
    }
    check("close", railhead_store_close(store));
    return 0;
}

static int serve(const char *port)
{
    railhead_store_t *store;
    uint16_t bound;
    check("serve", railhead_store_serve(NULL, (uint16_t)atoi(port), &store));
    check("port", railhead_store_port(store, &bound));
    printf("%u\n", (unsigned)bound);
    (void)fflush(stdout);
    while (getchar() != EOF)
        continue;
    check("close", railhead_store_close(store));
    return 0;
}

/* ---- the demonstration ---- */

/* What the watch has seen, told from its thread. */
struct seen {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int changes;
    char last[64];
};

static void on_change(void *user, railhead_change_t change, railhead_bytes_t old_value, railhead_bytes_t new_value)
{
    static const char *const names[] = {"updated", "created", "deleted", "lost"};
    struct seen *seen = user;
    (void)pthread_mutex_lock(&seen->mutex);
    (void)snprintf(seen->last, sizeof seen->last, "%s: %.*s -> %.*s", names[change], (int)old_value.size,
                   old_value.size != 0 ? (const char *)old_value.data : "", (int)new_value.size,
                   new_value.size != 0 ? (const char *)new_value.data : "");
    seen->changes++;
    (void)pthread_cond_signal(&seen->changed);
    (void)pthread_mutex_unlock(&seen->mutex);
}

static void expect(int good, const char *what)
{
    if (good)
        return;
    (void)fprintf(stderr, "store_kv: %s\n", what);
    exit(1);
}

/* Every operation once, through a store that knows them all. */
static void operations(railhead_store_t *store, railhead_store_t *peer)
{
    const char *const keys[] = {"a", "b"};
    const railhead_bytes_t values[] = {{"one", 3}, {"", 0}};
    railhead_bytes_t *all;
    void *value;
    size_t size;
    int64_t number;
    int yes;

    check("multi_set", railhead_store_multi_set(store, keys, values, 2));
    check("wait", railhead_store_wait(peer, keys, 2, TIMEOUT_MS));
    check("append", railhead_store_append(peer, "a", "!", 1));
    check("multi_get", railhead_store_multi_get(peer, keys, 2, TIMEOUT_MS, &all));
    expect(all[0].size == 4 && memcmp(all[0].data, "one!", 5) == 0 && all[1].size == 0, "multi_get gave something else");
    railhead_store_free(all);

    check("compare_set", railhead_store_compare_set(store, "a", (railhead_bytes_t){"one!", 4}, (railhead_bytes_t){"two", 3}, &value, &size));
    expect(size == 3 && memcmp(value, "two", 4) == 0, "compare_set gave something else");
    railhead_store_free(value);

    check("add", railhead_store_add(store, "n", 40, &number));
    check("add", railhead_store_add(peer, "n", 2, &number));
    expect(number == 42, "the sum is not 42");

    check("delete_key", railhead_store_delete_key(store, "b", &yes));
    expect(yes == 1, "b did not exist");
    check("check", railhead_store_check(store, keys, 2, &yes));
    expect(yes == 0, "b exists still");
    expect(railhead_store_get(store, "b", 20, &value, &size) == RAILHEAD_TIMEOUT, "b was waited for in vain, and came");
    printf("as it should, get says: %s\n", railhead_last_error());

    check("queue_push", railhead_store_queue_push(store, "q", "job", 3));
    check("queue_len", railhead_store_queue_len(store, "q", &number));
    check("queue_pop", railhead_store_queue_pop(peer, "q", TIMEOUT_MS, &value, &size));
    expect(number == 1 && size == 3 && memcmp(value, "job", 3) == 0, "the queue gave something else");
    railhead_store_free(value);
    expect(railhead_store_queue_pop(peer, "q", 0, &value, &size) == RAILHEAD_QUEUE_EMPTY, "the queue is not empty");

    check("list_keys", railhead_store_list_keys(store, &all, &size));
    check("num_keys", railhead_store_num_keys(store, &number));
    expect(size == 2 && number == 2, "there are other keys than a and n");
    railhead_store_free(all);
    check("barrier", railhead_store_barrier(store, "alone", 1, TIMEOUT_MS));
}

static void watch(railhead_store_t *store, railhead_store_t *peer)
{
    struct seen seen = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, ""};
    railhead_watch_t *watch;
    check("watch", railhead_store_watch(store, "colour", on_change, &seen, &watch));
    check("set", railhead_store_set(peer, "colour", "red", 3));
    check("set", railhead_store_set(peer, "colour", "green", 5));
    (void)pthread_mutex_lock(&seen.mutex);
    while (seen.changes < 2)
        (void)pthread_cond_wait(&seen.changed, &seen.mutex);
    printf("watched %d changes, the last: %s\n", seen.changes, seen.last);
    expect(strcmp(seen.last, "updated: red -> green") == 0, "the watch saw something else");
    (void)pthread_mutex_unlock(&seen.mutex);
    check("unwatch", railhead_store_unwatch(watch));
    expect(railhead_store_unwatch(watch) == RAILHEAD_INTERNAL, "a watch was ended twice");
}

static int demonstrate(void)
{
    railhead_store_t *server, *client, *space;
    uint16_t port;
    check("serve", railhead_store_serve("127.0.0.1", 0, &server));
    check("port", railhead_store_port(server, &port));
    check("connect", railhead_store_connect("127.0.0.1", port, TIMEOUT_MS, &client));
    operations(server, client);
    watch(server, client);

    check("prefix", railhead_store_prefix("space", client, &space));
    check("set", railhead_store_set(space, "k", "v", 1));
    const char *key = "space/k";
    check("wait", railhead_store_wait(server, &key, 1, TIMEOUT_MS));

    check("close", railhead_store_close(space));
    check("close", railhead_store_close(client));
    check("close", railhead_store_close(server));
    expect(railhead_store_close(server) == RAILHEAD_INTERNAL, "a store was closed twice");
    printf("as it should, close says: %s\n", railhead_last_error());
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 1)
        return demonstrate();
    if (argc == 3 && strcmp(argv[1], "serve") == 0)
        return serve(argv[2]);
    if (argc >= 4)
        return client(argc, argv);
    (void)fprintf(stderr, "usage: %s [serve PORT | HOST:PORT get KEY | set KEY VALUE | add KEY NUMBER | wait KEY]\n", argv[0]);
    return 2;
}
