"""What torchrun starts: the second rank fails in the first attempt, after it has been in a collective; in the second all go through."""

import os
import sys

import torch
import torch.distributed as dist

import railhead.torch  # noqa: F401

dist.init_process_group("railhead")
rank, size = dist.get_rank(), dist.get_world_size()
tensor = torch.full((1000,), float(rank))
dist.all_reduce(tensor)
assert tensor.eq(sum(range(size))).all()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if rank == 1:
        sys.exit(3)
    # Ended by the agent, if not by this.
    dist.barrier()
    sys.exit("a barrier without rank 1")
dist.barrier()
if rank == 0:
    print(f"{size} ranks, attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
dist.destroy_process_group()
