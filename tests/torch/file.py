"""torch's FileStore: adds and sets, beside others that do the same.

Usage: file.py PATH NAME ROUNDS USERS
"""

import sys

import torch.distributed as dist

path, name, rounds, users = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
store = dist.FileStore(path, users)
for turn in range(rounds):
    store.add("sum", 1)
    store.set(f"{name}/{turn}", f"{name} {turn}")
store.add("done", 1)
while store.add("done", 0) < users:
    pass
assert store.get("sum") == str(rounds * users).encode(), store.get("sum")
for turn in range(rounds):
    for other in range(users):
        assert store.get(f"{other}/{turn}") == f"{other} {turn}".encode()
print("good")
