"""torch's rendezvous: meets whoever comes by URL, and exchanges a value with each.

Usage: meet.py URL RANK WORLD_SIZE
"""

import datetime
import sys

import torch.distributed as dist

url, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
timeout = datetime.timedelta(seconds=120)
store, rank, world_size = next(dist.rendezvous(url, rank, world_size, timeout=timeout))
store.set(f"from/{rank}", str(rank))
for other in range(world_size):
    assert store.get(f"from/{other}") == str(other).encode()
# Rank 0 may run the server.
if store.add("gone", 1) == world_size:
    store.set("all gone", "")
if rank == 0:
    store.wait(["all gone"], timeout)
print("good")
