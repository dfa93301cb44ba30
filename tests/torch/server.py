"""torch's server, until standard input ends; prints its port.

Usage: server.py libuv|legacy
"""

import datetime
import sys

import torch.distributed as dist

timeout = datetime.timedelta(seconds=120)
store = dist.TCPStore("localhost", 0, is_master=True, timeout=timeout, wait_for_workers=False, use_libuv=sys.argv[1] == "libuv")
assert store.libuvBackend == (sys.argv[1] == "libuv")
print(store.port, flush=True)
sys.stdin.read()
