"""The backend of torch.distributed beside torch's gloo: `make bench-torch`.

Groups of both are of the same processes, which do each row with the one and with the other in turn, round by round: a slow moment counts for both. A
figure is the median time of rank 0 in a round, and the ratio that of a round. Of DDP it is what a step takes more than one that communicates nothing:
one whose hook sends nothing, and, where DDP's own copies are counted, one without synchronisation.

Usage: python.py [--rounds N] [--only TEXT]
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "python" / "tests"))

import ranks  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rounds import processor, spread  # noqa: E402

import railhead.torch  # noqa: E402, F401

MIB = 1 << 20
# What else is measured, in place of bytes.
BARRIER, COMMUNICATION, WITH_COPIES = 0, -1, -2
# A step of which the gradients are those of ResNet-18: 11.7 million numbers.
GRADIENTS = [64 * 147, *[64 * 576] * 4, *[128 * 1152] * 4, *[256 * 2304] * 4, *[512 * 4608] * 3, 512 * 1000, 1_400_000]


@dataclass
class Row:
    """`wanted`: gloo's time over ours, at least; `repeats` in a round."""

    name: str
    size: int
    ranks: int
    wire: str
    wanted: float
    repeats: int

    def __str__(self):
        return f"{self.name}, {self.ranks} ranks, {self.wire}"


ROWS = [
    Row("all_reduce of 64 MiB", 64 * MIB, 2, "shm", 3, 5),
    Row("all_reduce of 1 MiB", MIB, 2, "shm", 2, 40),
    Row("all_reduce of 1 MiB", MIB, 4, "shm", 2, 20),
    Row("all_reduce of 8 B", 8, 2, "shm", 1 / 0.6, 400),
    Row("all_reduce of 8 B", 8, 4, "shm", 1 / 0.6, 100),
    Row("barrier", BARRIER, 2, "shm", 1 / 0.6, 400),
    Row("barrier", BARRIER, 4, "shm", 1 / 0.6, 100),
    Row("DDP's communication, 45 MB", COMMUNICATION, 2, "shm", 1 / 0.7, 15),
    Row("DDP's communication and copies, 45 MB", WITH_COPIES, 2, "shm", 1 / 0.7, 15),
    Row("all_reduce of 64 MiB", 64 * MIB, 2, "tcp", 1.2, 5),
]


class Model(torch.nn.Module):
    """Hardly anything but its gradients."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(size) for size in GRADIENTS)

    def forward(self, factor):
        return sum((part * factor).sum() for part in self.parts)


class Models:
    """One whose gradients a group averages, and one that does all else that DDP does."""

    def __init__(self, group):
        self.averaged, self.quiet = [torch.nn.parallel.DistributedDataParallel(Model(), process_group=group) for _ in range(2)]
        self.quiet.register_comm_hook(None, self._nothing)

    @staticmethod
    def _nothing(_, bucket):
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def once(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def timed(call, repeats):
    call()
    return statistics.median(once(call) for _ in range(repeats))


def measured(row, group, models):
    """Seconds of one."""
    if row.size == BARRIER:
        return timed(lambda: dist.barrier(group), row.repeats)
    if row.size > 0:
        tensor = torch.zeros(row.size // 4)
        return timed(lambda: dist.all_reduce(tensor, group=group), row.repeats)

    def without():
        if row.size == COMMUNICATION:
            models.quiet(1.0).backward()
            return
        with models.averaged.no_sync():
            models.averaged(1.0).backward()

    def step(call):
        dist.barrier(group)
        return once(call)

    # In turn, as a slow moment then counts for both.
    return statistics.median(step(lambda: models.averaged(1.0).backward()) - step(without) for _ in range(row.repeats))


def main(rank, folder, count, rows, rounds, said):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    groups = {"gloo": dist.group.WORLD}
    for wire in sorted({row.wire for row in rows}):
        os.environ["RAILHEAD_SOFT_WIRE"] = wire
        groups[wire] = dist.new_group(backend="railhead")
    models = {}
    if any(row.size < 0 for row in rows):
        models = {name: Models(groups[name]) for name in ("gloo", "shm")}
    for row in rows:
        times = {"gloo": [], row.wire: []}
        for _ in range(rounds):
            for name, all_of_them in times.items():
                dist.barrier(groups[name])
                all_of_them.append(measured(row, groups[name], models.get(name)))
        if rank == 0:
            print(line(row, times[row.wire], times["gloo"]), file=said, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def line(row, ours, gloos):
    ratios = [theirs / mine for mine, theirs in zip(ours, gloos, strict=True)]
    met = "met" if statistics.median(ratios) >= row.wanted else "MISSED"
    return f"| {row} | {spread(ours, 1e-6)} | {spread(gloos, 1e-6)} | {spread(ratios)} | >= {row.wanted:.3g} | {met} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    ranks.LIMIT_S = 600
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("RAILHEAD_SOCKET_IFNAME", "lo")
    print("| work | railhead, us | gloo, us | gloo over railhead | wanted | |\n|---|---|---|---|---|---|", flush=True)
    for count in (2, 4):
        rows = [row for row in ROWS if row.ranks == count and asked.only in str(row)]
        if rows:
            ranks.run(count, lambda rank, folder, count=count, rows=rows: main(rank, folder, count, rows, asked.rounds, sys.stdout))
    print(f"\nMedians (least..greatest) of {asked.rounds} rounds on {os.cpu_count()} cores of {processor()}; torch {torch.__version__}.")
