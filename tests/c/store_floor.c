// What `make bench-store` measures both servers against: a server on one thread that does as good as nothing beyond the kernel's work. It takes each
// request without looking at it, receives once and sends once, and stores nothing: what SIZE bytes were to be read back is always the same. No
// server that polls, receives and sends does better. Only for the client of `railhead store bench`. Prints its port.
//
// Usage: store_floor SIZE

#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST = 65536, GREETING = 10, BARRIER = 18 };

static char greeted[MOST], request[MOST];
static int waiting[MOST];

static int die(const char* what) {
    fprintf(stderr, "store_floor: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void watch(int epoll, int fd, uint32_t events) {
    struct epoll_event event = {.events = events | EPOLLET, .data.fd = fd};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) die("epoll_ctl");
}

int main(int argc, char** argv) {
    size_t size = argc > 1 ? strtoul(argv[1], NULL, 10) : 64;
    uint64_t length = size;
    char* value = calloc(1, sizeof length + size);
    if (!value) die("calloc");
    memcpy(value, &length, sizeof length);

    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t bytes = sizeof address;
    if (listener < 0 || setsockopt(listener, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) die("socket");
    if (bind(listener, (struct sockaddr*)&address, sizeof address) != 0 || listen(listener, MOST) != 0) die("listen");
    if (getsockname(listener, (struct sockaddr*)&address, &bytes) != 0) die("getsockname");
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);

    int epoll = epoll_create1(EPOLL_CLOEXEC);
    if (epoll < 0) die("epoll_create1");
    watch(epoll, listener, EPOLLIN);
    struct epoll_event events[1024];
    for (int64_t came = 0;;) {
        int count = epoll_wait(epoll, events, 1024, -1);
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) {
                for (int client; (client = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
                    if (client >= MOST) die("too many clients");
                    greeted[client] = 0;
                    watch(epoll, client, EPOLLIN | EPOLLOUT);
                }
                continue;
            }
            ssize_t got = recv(fd, request, sizeof request, 0);
            if (got == 0) close(fd);
            if (got < GREETING) continue;
            if (!greeted[fd]) {
                // VALIDATE with its word, PING and its word, which is the answer.
                greeted[fd] = 1;
                send(fd, request + GREETING - 4, 4, MSG_NOSIGNAL);
            } else if (request[0] == BARRIER) {
                // A key, its length before it, and how many are to come.
                uint64_t key;
                int64_t wanted = 0;
                memcpy(&key, request + 1, sizeof key);
                if (key < sizeof request - 32) memcpy(&wanted, request + 9 + key, sizeof wanted);
                waiting[came++ % MOST] = fd;
                if (came >= wanted) {
                    while (came > 0) send(waiting[--came], "", 1, MSG_NOSIGNAL);
                }
            } else {
                send(fd, value, sizeof length + size, MSG_NOSIGNAL);
            }
        }
    }
}
