"""A rank of a gloo job: finds the others by INIT_METHOD, reduces, and makes a sub-group.

Usage: gloo.py INIT_METHOD [RANK WORLD_SIZE]
"""

import datetime
import os
import sys

import torch
import torch.distributed as dist

rank, world_size = (int(sys.argv[2]), int(sys.argv[3])) if len(sys.argv) > 2 else (-1, -1)
timeout = datetime.timedelta(seconds=120)
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=world_size, timeout=timeout)
rank, world_size = dist.get_rank(), dist.get_world_size()
for size in [1, 1000, 100_000]:
    tensor = torch.arange(size, dtype=torch.float64) + rank
    dist.all_reduce(tensor)
    expected = torch.arange(size, dtype=torch.float64) * world_size + world_size * (world_size - 1) / 2
    assert torch.equal(tensor, expected), (rank, size)
group = dist.new_group([0, world_size - 1])
if rank in (0, world_size - 1):
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    assert one.item() == min(world_size, 2)
    dist.distributed_c10d._world.pg_map[group][1].set(f"from/{rank}", "sub")
dist.distributed_c10d._get_default_store().set(f"from/{rank}", "all")
dist.barrier()
print(f"rank {rank} of {world_size}: good", flush=True)
# Neither destroy_process_group, as the last rank would find the server gone, nor an exit with the group alive, which aborts now and then
# (pytorch/pytorch#190489).
os._exit(0)
