/* A libibverbs.so.1 without devices: what is posted is performed at once, in the memory of this process, between queue pairs that name each
 * other's numbers. For tests of src/fabric/verbs that need no machine, and for counting the instructions in front of a device.
 *
 * It keeps a NIC's rules where breaking them would be the library's error: states, depths, keys, bounds, entries of a completion queue,
 * acknowledgements of events. Calls other than the hot ones are logged, one line each (fake_log). What it is to do wrong, or to be like, are
 * numbers by name (fake_set), also from FAKE_IBV="name=number,...". FAKE_ABI leaves newer functions out.
 *
 * Its hot functions call nobody, not even libc, so that a profiler attributes all of their cost to this object. */

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <infiniband/verbs.h>

#undef ibv_reg_mr
#undef ibv_reg_mr_iova
#undef ibv_query_port

#ifndef FAKE_ABI
#define FAKE_ABI 16
#endif

enum { DEVICES = 8, KEYS = 1 << 14, QPS = 1 << 12, DEPTH = 1 << 13, INLINE = 256, LOG = 1 << 20 };

/* ---- numbers by name ---- */

#define NUMBERS(X) \
    X(devices, 2) X(ports, 1) X(link_layer, IBV_LINK_LAYER_ETHERNET) X(active_speed, 32) X(active_width, 2) X(mtu, IBV_MTU_4096) \
    X(mtu_1, 0)             /* of the second device, if not 0 */ \
    X(port_speed, 0)        /* of ibv_query_port_speed, 100 Mbit/s; 0: EOPNOTSUPP */ \
    X(flid, 0) X(subnets, 0) X(port_flags, 0) /* on InfiniBand: of the routable GID; whether each device is in one of its own */ \
    X(gid_gone, 0)          /* no device has its addresses any more */ \
    X(port_state, IBV_PORT_ACTIVE) X(max_cqe, 1 << 20) X(max_inline, 256) \
    X(inline_refused, 0)    /* queue pairs with inline data cannot be made */ \
    X(ece, 0)               /* options that devices offer; 0: none */ \
    X(ece_mask_1, -1)       /* those that the second device can do */ \
    X(ece_set_errno, 0) \
    X(modify_errno, 0) X(modify_fails, 0) X(modify_state, -1) /* how often, to which state (-1: any) */ \
    X(fork_errno, 0)        /* of ibv_fork_init */ \
    X(reg_errno, 0)         /* of ibv_reg_mr */ \
    X(relaxed_errno, 0)     /* of registrations with relaxed ordering */ \
    X(dma_buf_errno, 0)     /* 0: the driver looks at the descriptor */ \
    X(post_errno, 0) X(post_taken, 0) /* the next chain: so many requests are taken, and then the error */ \
    X(status, 0) X(vendor_err, 0) X(opcode, -1) /* of the next completion */ \
    X(poll_result, 0)       /* of every poll, if below 0 */ \
    X(deaf, 0)              /* nothing that is posted is ever performed */ \
    X(log_requests, 0)      /* send requests are logged too */ \
    /* What happened. */ \
    X(posts, 0) X(requests, 0) X(signaled, 0) X(inlined, 0) X(receives, 0) X(polls, 0) X(entries, 0) X(arms, 0) \
    X(cq_events, 0) X(cq_acks, 0) X(async_events, 0) X(async_acks, 0) X(mrs, 0) X(qps, 0) X(cqs, 0) X(pds, 0) X(contexts, 0) \
    X(channels, 0) X(violations, 0)

#define FIELD(name, value) static _Atomic long n_##name = (value);
NUMBERS(FIELD)

static _Atomic long *number(const char *name, size_t len) {
#define FIND(field, value) \
    if (strlen(#field) == len && !strncmp(name, #field, len)) return &n_##field;
    NUMBERS(FIND)
    return NULL;
}

long fake_get(const char *name) {
    _Atomic long *at = number(name, strlen(name));
    return at ? *at : -1;
}

int fake_set(const char *name, long value) {
    _Atomic long *at = number(name, strlen(name));
    if (at) *at = value;
    return at ? 0 : EINVAL;
}

static void from_environment(void) {
    static bool done;
    const char *text = getenv("FAKE_IBV");
    if (done || !text) return;
    done = true;
    while (*text) {
        size_t name = strcspn(text, "="), all = strcspn(text, ",");
        _Atomic long *at = number(text, name);
        if (!at || name > all) abort();
        *at = strtol(text + name + 1, NULL, 0);
        text += all + (text[all] == ',');
    }
}

/* ---- log and lock ---- */

static atomic_flag busy = ATOMIC_FLAG_INIT;
static char log_text[LOG];
static size_t log_len;

static inline void lock(void) {
    for (unsigned spins = 1; atomic_flag_test_and_set_explicit(&busy, memory_order_acquire); spins++) {
        if (spins % 64 == 0) sched_yield();
    }
}

static inline void unlock(void) { atomic_flag_clear_explicit(&busy, memory_order_release); }

static __attribute__((format(printf, 1, 2))) void say(const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(log_text + log_len, LOG - log_len, format, args);
    va_end(args);
    if (n > 0 && log_len + n < LOG - 1) log_len += n;
}

static __attribute__((format(printf, 1, 2))) void violation(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("fake_ibverbs: VIOLATION: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    n_violations++;
}

/* What was called so far; as much of it as fits. */
size_t fake_log(char *out, size_t room) {
    lock();
    size_t n = log_len < room ? log_len : room;
    memcpy(out, log_text, n);
    unlock();
    return n;
}

/* ---- objects ---- */

struct context {
    struct ibv_context ibv; /* first */
    int events[2];
    int index;
    int pds;
    struct context *next;
};

struct channel {
    struct ibv_comp_channel ibv; /* first */
    int out;
};

struct entry {
    struct ibv_wc wc;
    struct qp *qp;
    uint64_t number; /* of a send request, plus 1 */
};

struct cq {
    struct ibv_cq ibv; /* first */
    struct entry *ring;
    uint64_t head, tail;
    bool armed;
    unsigned unacked;
};

struct request {
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    bool inlined;
    uint8_t bytes[INLINE];
};

struct receive {
    uint64_t wr_id;
    struct ibv_sge sge;
};

struct qp {
    struct ibv_qp ibv; /* first */
    struct ibv_qp_attr attr;
    struct ibv_qp_cap cap;
    struct ibv_ece ece;
    struct request *sq;
    struct receive *rq;
    /* Of requests: posted, performed, and known to the caller to be done. */
    uint64_t posted, performed, known;
    uint64_t rposted, rtaken, rknown;
};

struct mr {
    struct ibv_mr ibv; /* first */
    uint64_t iova;
    int access;
};

static struct ibv_device devices[DEVICES];
static struct context *contexts;
static struct qp *qps[QPS];
static struct mr *mrs[KEYS];
static uint32_t next_key = 1, next_qp = 1;

/* ---- moving bytes ---- */

static inline void copy(uint8_t *to, const uint8_t *from, uint32_t len) {
    uint32_t i = 0;
    if (!(((uintptr_t)to | (uintptr_t)from) & 7)) {
        for (; i + 8 <= len; i += 8) {
            uint64_t word = __atomic_load_n((const uint64_t *)(from + i), __ATOMIC_RELAXED);
            __atomic_store_n((uint64_t *)(to + i), word, __ATOMIC_RELEASE);
        }
    }
    for (; i < len; i++) __atomic_store_n(to + i, __atomic_load_n(from + i, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
}

/* Where a key leads; NULL if it does not. */
static inline uint8_t *reach(const struct ibv_pd *pd, uint32_t key, uint64_t addr, uint32_t len, int access) {
    struct mr *mr = mrs[key % KEYS];
    if (!mr || mr->ibv.lkey != key || mr->ibv.pd != pd || (mr->access & access) != access) return NULL;
    if (addr < mr->iova || addr - mr->iova > mr->ibv.length || len > mr->ibv.length - (addr - mr->iova)) return NULL;
    return (uint8_t *)mr->ibv.addr + (addr - mr->iova);
}

static void notify(struct cq *cq) {
    struct channel *channel = (struct channel *)cq->ibv.channel;
    cq->armed = false;
    cq->unacked++;
    if (write(channel->out, &cq, sizeof cq) != sizeof cq) violation("the channel is full");
}

static inline void complete(struct qp *qp, struct cq *cq, struct ibv_wc wc, uint64_t number) {
    if (cq->tail - cq->head >= (uint64_t)cq->ibv.cqe) {
        violation("a completion queue of %d overflows", cq->ibv.cqe);
        return;
    }
    if (n_status | n_vendor_err | (n_opcode + 1)) {
        wc.status = (enum ibv_wc_status)n_status;
        wc.vendor_err = (uint32_t)n_vendor_err;
        if (n_opcode >= 0) wc.opcode = (enum ibv_wc_opcode)n_opcode;
        n_status = n_vendor_err = 0;
        n_opcode = -1;
    }
    wc.qp_num = qp->ibv.qp_num;
    cq->ring[cq->tail++ % cq->ibv.cqe] = (struct entry){ .wc = wc, .qp = qp, .number = number };
    n_entries++;
    if (cq->armed) notify(cq);
}

static void break_qp(struct qp *qp);

static void end_send(struct qp *qp, enum ibv_wc_status status) {
    struct request *it = &qp->sq[qp->performed % qp->cap.max_send_wr];
    qp->performed++;
    if (status == IBV_WC_SUCCESS && !(it->wr.send_flags & IBV_SEND_SIGNALED)) return;
    static const enum ibv_wc_opcode OPCODES[] = {
        [IBV_WR_RDMA_WRITE] = IBV_WC_RDMA_WRITE, [IBV_WR_RDMA_WRITE_WITH_IMM] = IBV_WC_RDMA_WRITE, [IBV_WR_SEND] = IBV_WC_SEND,
        [IBV_WR_SEND_WITH_IMM] = IBV_WC_SEND, [IBV_WR_RDMA_READ] = IBV_WC_RDMA_READ,
    };
    struct ibv_wc wc = { .wr_id = it->wr.wr_id, .status = status, .opcode = OPCODES[it->wr.opcode] };
    complete(qp, (struct cq *)qp->ibv.send_cq, wc, qp->performed);
    if (status != IBV_WC_SUCCESS && status != IBV_WC_WR_FLUSH_ERR) break_qp(qp);
}

static void end_receive(struct qp *qp, struct ibv_wc wc) {
    wc.wr_id = qp->rq[qp->rtaken++ % qp->cap.max_recv_wr].wr_id;
    complete(qp, (struct cq *)qp->ibv.recv_cq, wc, 0);
    if (wc.status != IBV_WC_SUCCESS && wc.status != IBV_WC_WR_FLUSH_ERR) break_qp(qp);
}

/* To ERROR; everything outstanding is flushed. */
static void break_qp(struct qp *qp) {
    qp->ibv.state = IBV_QPS_ERR;
    while (qp->performed < qp->posted) end_send(qp, IBV_WC_WR_FLUSH_ERR);
    while (qp->rtaken < qp->rposted) end_receive(qp, (struct ibv_wc){ .status = IBV_WC_WR_FLUSH_ERR });
}

static inline struct qp *peer(const struct qp *qp) { return qps[qp->attr.dest_qp_num % QPS]; }

/* Performs what a queue pair was asked for, as far as its peer lets it. */
static void perform(struct qp *qp) {
    while (qp->ibv.state == IBV_QPS_RTS && qp->performed < qp->posted && !n_deaf) {
        struct request *it = &qp->sq[qp->performed % qp->cap.max_send_wr];
        struct qp *to = peer(qp);
        /* Its packets' numbers are none that are expected. */
        bool stranger = to && to->ibv.state != IBV_QPS_INIT && (to->attr.dest_qp_num != qp->ibv.qp_num || to->attr.rq_psn != qp->attr.sq_psn);
        if (!to || stranger || to->ibv.state == IBV_QPS_ERR || to->ibv.state == IBV_QPS_RESET) {
            end_send(qp, IBV_WC_RETRY_EXC_ERR);
            return;
        }
        /* Not connected yet: the device would try again. */
        if (to->ibv.state == IBV_QPS_INIT) return;
        uint32_t len = it->wr.num_sge ? it->sge.length : 0;
        enum ibv_wr_opcode op = it->wr.opcode;
        uint8_t *local = it->inlined ? it->bytes : NULL;
        if (len && !local && !(local = reach(qp->ibv.pd, it->sge.lkey, it->sge.addr, len, op == IBV_WR_RDMA_READ ? IBV_ACCESS_LOCAL_WRITE : 0))) {
            end_send(qp, IBV_WC_LOC_PROT_ERR);
            return;
        }
        bool sends = op == IBV_WR_SEND || op == IBV_WR_SEND_WITH_IMM, imm = op == IBV_WR_SEND_WITH_IMM || op == IBV_WR_RDMA_WRITE_WITH_IMM;
        if ((sends || imm) && to->rtaken == to->rposted) {
            /* Seven times are for ever, and so, here, are pauses of 10 ms and more (code 20); shorter ones are over at once. */
            if (qp->attr.rnr_retry == 7 || to->attr.min_rnr_timer >= 20 || !to->attr.min_rnr_timer) return;
            end_send(qp, IBV_WC_RNR_RETRY_EXC_ERR);
            return;
        }
        uint8_t *remote = NULL;
        if (len && !sends) {
            int access = op == IBV_WR_RDMA_READ ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
            remote = reach(to->ibv.pd, it->wr.wr.rdma.rkey, it->wr.wr.rdma.remote_addr, len, access);
            if (!remote) {
                end_send(qp, IBV_WC_REM_ACCESS_ERR);
                break_qp(to);
                return;
            }
        } else if (len) {
            struct receive *into = &to->rq[to->rtaken % to->cap.max_recv_wr];
            if (into->sge.length < len) {
                end_send(qp, IBV_WC_REM_INV_REQ_ERR);
                end_receive(to, (struct ibv_wc){ .status = IBV_WC_LOC_LEN_ERR });
                return;
            }
            remote = reach(to->ibv.pd, into->sge.lkey, into->sge.addr, into->sge.length, IBV_ACCESS_LOCAL_WRITE);
            if (!remote) {
                end_send(qp, IBV_WC_REM_OP_ERR);
                end_receive(to, (struct ibv_wc){ .status = IBV_WC_LOC_PROT_ERR });
                return;
            }
        }
        if (op == IBV_WR_RDMA_READ) copy(local, remote, len);
        else if (len) copy(remote, local, len);
        if (sends || imm) {
            end_receive(to, (struct ibv_wc){
                .status = IBV_WC_SUCCESS, .opcode = sends ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM, .byte_len = len,
                .imm_data = it->wr.imm_data, .wc_flags = imm ? IBV_WC_WITH_IMM : 0,
            });
        }
        end_send(qp, IBV_WC_SUCCESS);
    }
}

/* Whoever waits for a queue pair that is in ERROR or gone learns. */
static void tell_those_who_wait_for(uint32_t number) {
    for (int i = 0; i < QPS; i++) {
        if (qps[i] && qps[i]->ibv.state == IBV_QPS_RTS && qps[i]->attr.dest_qp_num == number) perform(qps[i]);
    }
}

/* ---- the table of inline operations ---- */

static int post_send(struct ibv_qp *raw, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    struct qp *qp = (struct qp *)raw;
    int error = 0;
    lock();
    n_posts++;
    for (; wr; wr = wr->next) {
        if (n_post_errno && n_post_taken-- <= 0) {
            error = (int)n_post_errno;
            n_post_errno = 0;
            break;
        }
        if (qp->ibv.state != IBV_QPS_RTS && qp->ibv.state != IBV_QPS_ERR) error = EINVAL;
        if (qp->posted - qp->known >= qp->cap.max_send_wr) error = ENOMEM;
        if (wr->num_sge > (int)qp->cap.max_send_sge) error = EINVAL;
        if (error) break;
        struct request *it = &qp->sq[qp->posted % qp->cap.max_send_wr];
        it->wr = *wr;
        it->inlined = wr->send_flags & IBV_SEND_INLINE;
        if (wr->num_sge) it->sge = *wr->sg_list;
        if (it->inlined && wr->num_sge) {
            if (it->sge.length > qp->cap.max_inline_data) {
                error = EINVAL;
                break;
            }
            copy(it->bytes, (const uint8_t *)(uintptr_t)it->sge.addr, it->sge.length);
        }
        qp->posted++;
        n_requests++;
        n_signaled += !!(wr->send_flags & IBV_SEND_SIGNALED);
        n_inlined += it->inlined;
        if (n_log_requests) {
            say("request qp=%u opcode=%d flags=%d len=%u to=%#lx rkey=%#x\n", raw->qp_num, wr->opcode, wr->send_flags,
                wr->num_sge ? wr->sg_list->length : 0, (unsigned long)wr->wr.rdma.remote_addr, wr->wr.rdma.rkey);
        }
    }
    *bad = wr;
    if (qp->ibv.state == IBV_QPS_ERR) break_qp(qp);
    else perform(qp);
    unlock();
    return error;
}

static int post_recv(struct ibv_qp *raw, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    struct qp *qp = (struct qp *)raw;
    int error = 0;
    lock();
    for (; wr; wr = wr->next) {
        if (qp->ibv.state == IBV_QPS_RESET) error = EINVAL;
        if (qp->rposted - qp->rknown >= qp->cap.max_recv_wr) error = ENOMEM;
        if (error) break;
        struct receive *it = &qp->rq[qp->rposted++ % qp->cap.max_recv_wr];
        it->wr_id = wr->wr_id;
        it->sge = wr->num_sge ? *wr->sg_list : (struct ibv_sge){ 0 };
        n_receives++;
    }
    *bad = wr;
    struct qp *from = qp->ibv.state == IBV_QPS_RTR || qp->ibv.state == IBV_QPS_RTS ? peer(qp) : NULL;
    if (qp->ibv.state == IBV_QPS_ERR) break_qp(qp);
    else if (from && from->attr.dest_qp_num == raw->qp_num) perform(from);
    unlock();
    return error;
}

static int poll_cq(struct ibv_cq *raw, int most, struct ibv_wc *out) {
    struct cq *cq = (struct cq *)raw;
    int n = 0;
    if (n_poll_result < 0) return (int)n_poll_result;
    lock();
    n_polls++;
    for (; n < most && cq->head < cq->tail; n++, cq->head++) {
        struct entry *it = &cq->ring[cq->head % cq->ibv.cqe];
        out[n] = it->wc;
        if (!it->qp) continue;
        if (it->number) it->qp->known = it->number;
        else it->qp->rknown++;
    }
    unlock();
    return n;
}

static int req_notify_cq(struct ibv_cq *raw, int solicited) {
    (void)solicited;
    lock();
    n_arms++;
    ((struct cq *)raw)->armed = true;
    unlock();
    return 0;
}

/* ---- devices ---- */

int ibv_fork_init(void) {
    from_environment();
    lock();
    say("fork_init\n");
    unlock();
    return (int)n_fork_errno;
}

struct ibv_device **ibv_get_device_list(int *count) {
    from_environment();
    lock();
    say("get_device_list\n");
    unlock();
    int n = n_devices < DEVICES ? (int)n_devices : DEVICES;
    const char *sysfs = getenv("FAKE_IBV_SYSFS");
    struct ibv_device **list = calloc(n + 1, sizeof *list);
    for (int i = 0; i < n; i++) {
        snprintf(devices[i].name, sizeof devices[i].name, "fake%d", i);
        snprintf(devices[i].dev_name, sizeof devices[i].dev_name, "uverbs%d", i);
        snprintf(devices[i].ibdev_path, sizeof devices[i].ibdev_path, "%s/fake%d", sysfs ? sysfs : "/nowhere", i);
        list[i] = &devices[i];
    }
    if (count) *count = n;
    return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }

const char *ibv_get_device_name(struct ibv_device *device) { return device->name; }

struct ibv_context *ibv_open_device(struct ibv_device *device) {
    struct context *context = calloc(1, sizeof *context);
    if (pipe2(context->events, O_CLOEXEC)) abort();
    context->index = (int)(device - devices);
    context->ibv.device = device;
    context->ibv.async_fd = context->events[0];
    context->ibv.ops.post_send = post_send;
    context->ibv.ops.post_recv = post_recv;
    context->ibv.ops.poll_cq = poll_cq;
    context->ibv.ops.req_notify_cq = req_notify_cq;
    lock();
    context->next = contexts;
    contexts = context;
    n_contexts++;
    unlock();
    return &context->ibv;
}

int ibv_close_device(struct ibv_context *raw) {
    struct context *context = (struct context *)raw;
    lock();
    if (context->pds) violation("a device is closed with %d protection domains on it", context->pds);
    for (struct context **at = &contexts; *at; at = &(*at)->next) {
        if (*at == context) {
            *at = context->next;
            break;
        }
    }
    n_contexts--;
    unlock();
    close(context->events[0]);
    close(context->events[1]);
    free(context);
    return 0;
}

int ibv_query_device(struct ibv_context *raw, struct ibv_device_attr *attr) {
    memset(attr, 0, sizeof *attr);
    attr->phys_port_cnt = (uint8_t)n_ports;
    attr->max_qp = QPS;
    attr->max_qp_wr = DEPTH;
    attr->max_cqe = (int)n_max_cqe;
    attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = 16;
    attr->node_guid = attr->sys_image_guid = htobe64(0xfa00 + ((struct context *)raw)->index);
    return 0;
}

/* The structure that this version of the function knows ends with the flags. */
int ibv_query_port(struct ibv_context *raw, uint8_t port, struct _compat_ibv_port_attr *out) {
    (void)port;
    struct ibv_port_attr attr = {
        .state = (enum ibv_port_state)n_port_state, .max_mtu = IBV_MTU_4096, .active_mtu = (enum ibv_mtu)n_mtu, .gid_tbl_len = 4, .max_msg_sz = 1u << 31,
        .pkey_tbl_len = 128, .lid = 0, .active_width = (uint8_t)n_active_width, .active_speed = (uint8_t)n_active_speed,
        .link_layer = (uint8_t)n_link_layer, .flags = (uint8_t)n_port_flags,
    };
    int index = ((struct context *)raw)->index;
    if (index == 1 && n_mtu_1) attr.active_mtu = (enum ibv_mtu)n_mtu_1;
    if (n_link_layer == IBV_LINK_LAYER_INFINIBAND) attr.lid = (uint16_t)(0x100 + index);
    memcpy(out, &attr, offsetof(struct ibv_port_attr, flags) + 1);
    return 0;
}

int ibv_query_gid(struct ibv_context *raw, uint8_t port, int index, union ibv_gid *gid) {
    (void)port;
    static const uint8_t STARTS[3][12] = {
        { 0xfe, 0x80 }, { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff }, { 0xfd, 0x77 },
    };
    memset(gid, 0, sizeof *gid);
    if (index < 0 || index > 3) return EINVAL;
    if (n_gid_gone) return 0;
    if (n_link_layer == IBV_LINK_LAYER_INFINIBAND) {
        /* The second one is for routers, where there are any. */
        int device = ((struct context *)raw)->index;
        if (index > 1 || (index == 1 && !n_flid)) return 0;
        gid->raw[0] = 0xfe, gid->raw[1] = index ? 0xc0 : 0x80, gid->raw[15] = (uint8_t)(1 + device);
        if (index == 1) gid->raw[4] = (uint8_t)(n_flid >> 8), gid->raw[5] = (uint8_t)(n_flid + device);
        gid->raw[7] = (uint8_t)(n_subnets ? 1 + device : 0);
        return 0;
    }
    if (index == 3) return 0;
    memcpy(gid->raw, STARTS[index], sizeof STARTS[index]);
    gid->raw[15] = (uint8_t)(1 + ((struct context *)raw)->index);
    if (index == 1) gid->raw[12] = 10, gid->raw[13] = 77;
    return 0;
}

#if FAKE_ABI >= 16
int ibv_query_port_speed(struct ibv_context *raw, uint32_t port, uint64_t *speed) {
    (void)raw, (void)port;
    if (!n_port_speed) return EOPNOTSUPP;
    *speed = (uint64_t)n_port_speed;
    return 0;
}
#endif

/* ---- asynchronous events ---- */

/* `which`: the number of a queue pair, for it or for its completion queue; else of a device, whose port 1 it is. */
int fake_raise(int type, uint32_t which) {
    struct ibv_async_event event = { .event_type = (enum ibv_event_type)type };
    struct context *context = NULL;
    lock();
    struct qp *qp = qps[which % QPS];
    switch (type) {
    case IBV_EVENT_QP_FATAL: case IBV_EVENT_QP_REQ_ERR: case IBV_EVENT_QP_ACCESS_ERR:
        if (qp) context = (struct context *)qp->ibv.context, event.element.qp = &qp->ibv;
        break;
    case IBV_EVENT_CQ_ERR:
        if (qp) context = (struct context *)qp->ibv.context, event.element.cq = qp->ibv.send_cq;
        break;
    default:
        for (context = contexts; context && context->index != (int)which; context = context->next) {}
        event.element.port_num = 1;
    }
    if (context) n_async_events++;
    unlock();
    if (!context) return ENOENT;
    return write(context->events[1], &event, sizeof event) == sizeof event ? 0 : EIO;
}

int ibv_get_async_event(struct ibv_context *raw, struct ibv_async_event *event) {
    return read(raw->async_fd, event, sizeof *event) == sizeof *event ? 0 : -1;
}

void ibv_ack_async_event(struct ibv_async_event *event) {
    (void)event;
    n_async_acks++;
}

const char *ibv_event_type_str(enum ibv_event_type type) {
    static char names[64][16];
    snprintf(names[type % 64], sizeof names[0], "event %d", (int)type);
    return names[type % 64];
}

/* ---- memory ---- */

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
    struct ibv_pd *pd = calloc(1, sizeof *pd);
    pd->context = context;
    lock();
    ((struct context *)context)->pds++;
    n_pds++;
    unlock();
    return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd) {
    lock();
    ((struct context *)pd->context)->pds--;
    n_pds--;
    unlock();
    free(pd);
    return 0;
}

static struct ibv_mr *new_mr(struct ibv_pd *pd, void *addr, size_t len, uint64_t iova, int access, const char *by) {
    lock();
    uint32_t key = 0;
    for (int tries = 0; tries < KEYS && !key; tries++, next_key++) {
        if (next_key % KEYS && !mrs[next_key % KEYS]) key = next_key;
    }
    if (!key) {
        unlock();
        errno = ENOMEM;
        return NULL;
    }
    struct mr *mr = calloc(1, sizeof *mr);
    mr->ibv = (struct ibv_mr){ .context = pd->context, .pd = pd, .addr = addr, .length = len, .lkey = key, .rkey = key };
    mr->iova = iova;
    mr->access = access;
    mrs[key % KEYS] = mr;
    n_mrs++;
    say("%s dev=%d len=%zu addr=%p access=%#x key=%#x\n", by, ((struct context *)pd->context)->index, len, addr, (unsigned)access, key);
    unlock();
    return &mr->ibv;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t len, int access) {
    if (n_reg_errno || access & IBV_ACCESS_OPTIONAL_RANGE) {
        errno = n_reg_errno ? (int)n_reg_errno : EINVAL;
        return NULL;
    }
    return new_mr(pd, addr, len, (uint64_t)(uintptr_t)addr, access, "reg_mr");
}

#if FAKE_ABI >= 8
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t len, uint64_t iova, unsigned access) {
    if (n_relaxed_errno && access & IBV_ACCESS_RELAXED_ORDERING) {
        errno = (int)n_relaxed_errno;
        return NULL;
    }
    if (n_reg_errno) {
        errno = (int)n_reg_errno;
        return NULL;
    }
    return new_mr(pd, addr, len, iova, (int)access, "reg_mr_iova2");
}
#endif

#if FAKE_ABI >= 12
/* The descriptor is mapped: a memfd stands for a device's memory. */
struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t len, uint64_t iova, int fd, int access) {
    errno = n_dma_buf_errno ? (int)n_dma_buf_errno : EBADF;
    if (n_dma_buf_errno || fcntl(fd, F_GETFD) < 0) return NULL;
    if (n_relaxed_errno && access & IBV_ACCESS_RELAXED_ORDERING) {
        errno = (int)n_relaxed_errno;
        return NULL;
    }
    say("reg_dmabuf_mr offset=%lu\n", (unsigned long)offset);
    return new_mr(pd, (void *)(uintptr_t)iova, len, iova, access, "reg_dmabuf_mr");
}
#endif

int ibv_dereg_mr(struct ibv_mr *raw) {
    lock();
    say("dereg_mr key=%#x\n", raw->lkey);
    mrs[raw->lkey % KEYS] = NULL;
    n_mrs--;
    unlock();
    free(raw);
    return 0;
}

/* ---- completion queues ---- */

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context) {
    struct channel *channel = calloc(1, sizeof *channel);
    int fds[2];
    if (pipe2(fds, O_CLOEXEC)) abort();
    channel->ibv.context = context;
    channel->ibv.fd = fds[0];
    channel->out = fds[1];
    n_channels++;
    return &channel->ibv;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *raw) {
    if (raw->refcnt) violation("a channel is destroyed with %d queues on it", raw->refcnt);
    close(raw->fd);
    close(((struct channel *)raw)->out);
    n_channels--;
    free(raw);
    return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *own, struct ibv_comp_channel *channel, int vector) {
    (void)vector;
    if (entries < 1 || entries > n_max_cqe) {
        errno = EINVAL;
        return NULL;
    }
    struct cq *cq = calloc(1, sizeof *cq);
    cq->ibv = (struct ibv_cq){ .context = context, .channel = channel, .cq_context = own, .cqe = entries };
    cq->ring = calloc(entries, sizeof *cq->ring);
    if (channel) channel->refcnt++;
    lock();
    n_cqs++;
    say("create_cq dev=%d entries=%d channel=%d\n", ((struct context *)context)->index, entries, !!channel);
    unlock();
    return &cq->ibv;
}

int ibv_resize_cq(struct ibv_cq *raw, int entries) {
    struct cq *cq = (struct cq *)raw;
    if (entries > n_max_cqe) return EINVAL;
    struct entry *ring = calloc(entries, sizeof *ring);
    lock();
    uint64_t n = 0;
    for (; cq->head < cq->tail; cq->head++) ring[n++] = cq->ring[cq->head % cq->ibv.cqe];
    free(cq->ring);
    cq->ring = ring;
    cq->head = 0;
    cq->tail = n;
    cq->ibv.cqe = entries;
    say("resize_cq entries=%d\n", entries);
    unlock();
    return 0;
}

int ibv_destroy_cq(struct ibv_cq *raw) {
    struct cq *cq = (struct cq *)raw;
    lock();
    if (cq->unacked) violation("a completion queue is destroyed with %u events that nobody acknowledged: libibverbs would wait", cq->unacked);
    for (int i = 0; i < QPS; i++) {
        if (qps[i] && qps[i]->ibv.send_cq == raw) violation("a completion queue is destroyed before its queue pairs");
    }
    n_cqs--;
    unlock();
    if (raw->channel) raw->channel->refcnt--;
    free(cq->ring);
    free(cq);
    return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **own) {
    if (read(channel->fd, cq, sizeof *cq) != sizeof *cq) return -1;
    *own = (*cq)->cq_context;
    n_cq_events++;
    return 0;
}

void ibv_ack_cq_events(struct ibv_cq *raw, unsigned count) {
    lock();
    struct cq *cq = (struct cq *)raw;
    if (count > cq->unacked) violation("%u events acknowledged of %u", count, cq->unacked);
    cq->unacked -= count;
    n_cq_acks += count;
    unlock();
}

/* ---- queue pairs ---- */

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init) {
    if (init->cap.max_send_wr > DEPTH || init->cap.max_recv_wr > DEPTH || (n_inline_refused && init->cap.max_inline_data)) {
        errno = EINVAL;
        return NULL;
    }
    if (init->cap.max_inline_data) init->cap.max_inline_data = (uint32_t)n_max_inline;
    struct qp *qp = calloc(1, sizeof *qp);
    qp->sq = calloc(init->cap.max_send_wr, sizeof *qp->sq);
    qp->rq = calloc(init->cap.max_recv_wr, sizeof *qp->rq);
    qp->cap = init->cap;
    lock();
    while (!(next_qp % QPS) || qps[next_qp % QPS]) next_qp++;
    qp->ibv = (struct ibv_qp){
        .context = pd->context, .pd = pd, .send_cq = init->send_cq, .recv_cq = init->recv_cq, .qp_num = next_qp % QPS,
        .state = IBV_QPS_RESET, .qp_type = init->qp_type,
    };
    qps[next_qp++ % QPS] = qp;
    n_qps++;
    qp->ece = (struct ibv_ece){ .vendor_id = n_ece ? 0x15b3 : 0, .options = (uint32_t)n_ece };
    if (((struct context *)pd->context)->index == 1) qp->ece.options &= (uint32_t)n_ece_mask_1;
    say("create_qp qp=%u send=%u recv=%u inline=%u\n", qp->ibv.qp_num, init->cap.max_send_wr, init->cap.max_recv_wr, init->cap.max_inline_data);
    unlock();
    return &qp->ibv;
}

int ibv_modify_qp(struct ibv_qp *raw, struct ibv_qp_attr *attr, int mask) {
    struct qp *qp = (struct qp *)raw;
    if (n_modify_fails > 0 && (n_modify_state < 0 || n_modify_state == (long)attr->qp_state)) {
        n_modify_fails--;
        lock();
        say("modify_qp qp=%u state=%d refused\n", raw->qp_num, attr->qp_state);
        unlock();
        return (int)n_modify_errno;
    }
    lock();
    bool next = attr->qp_state == IBV_QPS_ERR || attr->qp_state == IBV_QPS_RESET || (raw->state < IBV_QPS_RTS && attr->qp_state == raw->state + 1);
    if (!next) {
        violation("a queue pair goes from state %d to %d", raw->state, attr->qp_state);
        unlock();
        return EINVAL;
    }
    say("modify_qp qp=%u state=%d mask=%#x", raw->qp_num, attr->qp_state, (unsigned)mask);
    if (attr->qp_state == IBV_QPS_INIT) {
        say(" pkey_index=%d port=%d access=%#x", attr->pkey_index, attr->port_num, attr->qp_access_flags);
    } else if (attr->qp_state == IBV_QPS_RTR) {
        qp->attr.dest_qp_num = attr->dest_qp_num;
        qp->attr.rq_psn = attr->rq_psn;
        qp->attr.min_rnr_timer = attr->min_rnr_timer;
        say(" mtu=%d dest=%u rq_psn=%u rnr_timer=%d reads=%d sl=%d tc=%d dlid=%d sgid=%d global=%d hops=%d dgid=%d", attr->path_mtu, attr->dest_qp_num,
            attr->rq_psn, attr->min_rnr_timer, attr->max_dest_rd_atomic, attr->ah_attr.sl, attr->ah_attr.grh.traffic_class,
            attr->ah_attr.dlid, attr->ah_attr.grh.sgid_index, attr->ah_attr.is_global, attr->ah_attr.grh.hop_limit, attr->ah_attr.grh.dgid.raw[15]);
    } else if (attr->qp_state == IBV_QPS_RTS) {
        qp->attr.rnr_retry = attr->rnr_retry;
        qp->attr.sq_psn = attr->sq_psn;
        say(" timeout=%d retry=%d rnr_retry=%d sq_psn=%u reads=%d", attr->timeout, attr->retry_cnt, attr->rnr_retry, attr->sq_psn, attr->max_rd_atomic);
    }
    say("\n");
    if (attr->qp_state == IBV_QPS_ERR) {
        break_qp(qp);
        tell_those_who_wait_for(raw->qp_num);
    } else if (attr->qp_state == IBV_QPS_RESET) {
        raw->state = IBV_QPS_RESET;
        qp->posted = qp->performed = qp->known = qp->rposted = qp->rtaken = qp->rknown = 0;
        struct cq *cq = (struct cq *)raw->send_cq;
        for (uint64_t i = cq->head; i < cq->tail; i++) {
            if (cq->ring[i % cq->ibv.cqe].qp == qp) violation("a queue pair is reset before its completions were taken");
        }
    } else {
        raw->state = attr->qp_state;
        struct qp *from = raw->state == IBV_QPS_RTR ? peer(qp) : NULL;
        if (from && from->attr.dest_qp_num == raw->qp_num) perform(from);
    }
    unlock();
    return 0;
}

#if FAKE_ABI >= 1
int ibv_query_qp(struct ibv_qp *raw, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init) {
    (void)mask;
    memset(init, 0, sizeof *init);
    memset(attr, 0, sizeof *attr);
    lock();
    attr->qp_state = raw->state;
    unlock();
    return 0;
}

#endif

int ibv_destroy_qp(struct ibv_qp *raw) {
    struct qp *qp = (struct qp *)raw;
    lock();
    qps[raw->qp_num % QPS] = NULL;
    n_qps--;
    struct cq *cq = (struct cq *)raw->send_cq;
    /* As on some devices, its completions stay. */
    for (uint64_t i = cq->head; i < cq->tail; i++) {
        if (cq->ring[i % cq->ibv.cqe].qp == qp) cq->ring[i % cq->ibv.cqe].qp = NULL;
    }
    tell_those_who_wait_for(raw->qp_num);
    unlock();
    free(qp->sq);
    free(qp->rq);
    free(qp);
    return 0;
}

#if FAKE_ABI >= 10
int ibv_query_ece(struct ibv_qp *raw, struct ibv_ece *ece) {
    lock();
    *ece = ((struct qp *)raw)->ece;
    say("query_ece qp=%u state=%d options=%#x\n", raw->qp_num, raw->state, ece->options);
    unlock();
    return n_ece ? 0 : EOPNOTSUPP;
}

int ibv_set_ece(struct ibv_qp *raw, struct ibv_ece *ece) {
    struct qp *qp = (struct qp *)raw;
    lock();
    if (n_ece_set_errno) {
        unlock();
        return (int)n_ece_set_errno;
    }
    uint32_t mine = qp->ece.options;
    qp->ece = *ece;
    qp->ece.options &= mine;
    say("set_ece qp=%u state=%d vendor=%#x options=%#x\n", raw->qp_num, raw->state, ece->vendor_id, ece->options);
    unlock();
    return n_ece ? 0 : EOPNOTSUPP;
}
#endif
