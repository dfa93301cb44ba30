"""Many torch clients at once: each adds, all pass a barrier, each sees everything.

Usage: clients.py HOST PORT COUNT
"""

import datetime
import sys
import threading

import torch.distributed as dist

host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
LONG = datetime.timedelta(seconds=120)
failures = []


def run(index):
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=LONG, wait_for_workers=False)
        for turn in range(20):
            store.set(f"{index}/{turn}", str(index * turn))
            store.add("sum", 1)
        store.barrier("all", count, LONG)
        assert store.get("sum") == str(20 * count).encode()
        neighbour = (index + 1) % count
        keys = [f"{neighbour}/{turn}" for turn in range(20)]
        assert store.multi_get(keys) == [str(neighbour * turn).encode() for turn in range(20)]
    except BaseException as error:
        failures.append(f"client {index}: {error}")


threads = [threading.Thread(target=run, args=[index]) for index in range(count)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, failures
print("good")
