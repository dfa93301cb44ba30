"""torch's client on a server: every operation, and what it says when it has waited in vain.

Usage: client.py HOST PORT
"""

import datetime
import sys
import threading

import torch.distributed as dist

host, port = sys.argv[1], int(sys.argv[2])
LONG = datetime.timedelta(seconds=120)
SHORT = datetime.timedelta(milliseconds=300)


def connect():
    return dist.TCPStore(host, port, is_master=False, timeout=LONG, wait_for_workers=False)


def fails(kind, words, operation):
    try:
        operation()
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"no error: {words}")


store, other = connect(), connect()
store.set("k", "v")
assert store.get("k") == b"v"
store.set("big", bytes(range(256)) * (1 << 15))
assert store.get("big") == bytes(range(256)) * (1 << 15)
assert store.add("n", 5) == 5 and other.add("n", -7) == -2 and store.get("n") == b"-2"
assert store.compare_set("c", "", "v1") == b"v1"
assert store.compare_set("c", "v1", "v2") == b"v2"
assert store.compare_set("c", "no", "v3") == b"v2"
assert store.compare_set("missing", "x", "y") == b"x" and not store.check(["missing"])
assert store.check(["k", "n"]) and not store.check(["k", "nope"]) and store.check([])
store.append("a", "1")
store.append("a", "2")
assert store.get("a") == b"12"
store.multi_set(["m1", "m2"], ["x", "yy"])
assert store.multi_get(["m1", "m2"]) == [b"x", b"yy"]
assert store.delete_key("m1") and not store.delete_key("m1")
assert store.num_keys() == 6, store.num_keys()
assert sorted(store.list_keys()) == ["a", "big", "c", "k", "m2", "n"], store.list_keys()
store.queue_push("q", "one")
store.queue_push("q", "two")
assert store.queue_len("q") == 2 and store.check(["q"])
assert other.queue_pop("q") == b"one" and store.queue_pop("q") == b"two"
fails(dist.QueueEmptyError, "queue is empty", lambda: store.queue_pop("q", block=False))
store.barrier("b1", 1)

fails(dist.DistStoreError, "wait timeout after 300ms, keys: /nope", lambda: store.wait(["nope"], SHORT))
fails(dist.DistStoreError, "barrier timeout after 300ms, key: b2", lambda: store.barrier("b2", 2, SHORT))
assert store.get("k") == b"v", "usable after both"

# One waits, another provides.
late = threading.Timer(0.1, lambda: other.set("late", "now"))
late.start()
assert store.get("late") == b"now"
late = threading.Timer(0.1, lambda: other.queue_push("lateq", "now"))
late.start()
assert store.queue_pop("lateq") == b"now"
late = threading.Timer(0.1, lambda: other.compare_set("latec", "", "now"))
late.start()
store.wait(["latec"], LONG)

# A key that has come counts, though it is deleted again.
waiter = threading.Thread(target=lambda: connect().wait(["gone", "stays"], LONG))
waiter.start()
while True:
    other.set("gone", "1")
    other.delete_key("gone")
    # The waiter may have begun just now.
    waiter.join(0.05)
    other.set("stays", "1")
    waiter.join(0.05)
    if not waiter.is_alive():
        break
    other.delete_key("stays")

store.barrier("nobody", 0, SHORT)
store.set("most", str(2**63 - 1))
assert store.add("most", 1) == -(2**63)
store.set("empty", "")
fails(dist.DistNetworkError, "Connection was likely closed", lambda: connect().add("empty", 1))
fails(dist.DistNetworkError, "Connection was likely closed", lambda: connect().barrier("empty", 1))

prefix = dist.PrefixStore("grp", store)
prefix.set("k", "w")
assert store.get("grp/k") == b"w" and prefix.get("k") == b"w"

clone = store.clone()
clone.set("cloned", "1")
assert store.get("cloned") == b"1"
print("good")
