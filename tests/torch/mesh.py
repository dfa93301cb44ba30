"""Our collectives beside torch's gloo: random cases, the same numbers for both, among the same processes.

The results are equal bit for bit where the order of reduction cannot matter: integers, the least and the greatest, and what is exact in floats. Other
sums and products are of positive numbers, within one unit in the last place for each rank, and have the same bits on all ranks. Every fifth case is
another collective than an allreduce.

Usage: mesh.py LIBRARY CASES [SEED]
"""

import ctypes
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

RANKS = 8
TIMEOUT_MS = 60_000
TYPES = [torch.int8, torch.uint8, torch.int32, None, torch.int64, None, torch.float16, torch.bfloat16, torch.float32, torch.float64]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
SUM, PRODUCT = 0, 1
ALGORITHMS = ["auto", "ring", "doubling", "halving", "direct"]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
OTHERS = ["reduce", "reduce_scatter", "broadcast", "allgather", "alltoall", "gather", "scatter"]


class Config(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ["size", "rank", "ranks", "timeout_ms", "flags"]]


class Collective(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        *[(name, ctypes.c_uint32) for name in ["tag", "dtype", "op", "algorithm"]],
        *[(name, ctypes.c_int64) for name in ["root", "timeout_ms"]],
        *[(name, ctypes.c_void_p) for name in ["custom", "user"]],
    ]


@dataclass
class Case:
    number: int
    seed: int
    what: str
    wire: str
    ranks: int
    type: int
    op: int
    algorithm: int
    count: int
    root: int
    exact: bool
    in_place: bool
    # Of an alltoall: from each rank to each.
    parts: list


def draw(chance, number, types):
    ranks = chance.randint(1, RANKS)
    counts = [0, chance.randint(1, 40), int(10 ** chance.uniform(0, 6)), chance.randint(0, 10**6)]
    count = chance.choices(counts, [1, 3, 5, 3])[0]
    what = OTHERS[number // 5 % len(OTHERS)] if number % 5 == 4 else "allreduce"
    if what in ("reduce_scatter", "allgather", "gather", "scatter"):
        count //= ranks
    return Case(
        number=number,
        seed=chance.getrandbits(48),
        what=what,
        wire=chance.choice(["shm", "tcp"]),
        ranks=ranks,
        type=chance.choice(types),
        op=chance.randrange(len(OPS)),
        algorithm=chance.randrange(len(ALGORITHMS)),
        count=count,
        root=chance.randrange(ranks),
        exact=chance.random() < 0.5,
        in_place=chance.random() < 0.5,
        parts=[[chance.randint(0, count // ranks) for _ in range(ranks)] for _ in range(ranks)],
    )


def numbers(case, rank, count):
    """What a rank gives."""
    kind = TYPES[case.type]
    chance = torch.Generator().manual_seed(case.seed * RANKS + rank)
    if not kind.is_floating_point:
        # Any: they wrap around.
        return torch.randint(0, 256, [count * kind.itemsize], dtype=torch.uint8, generator=chance).view(kind)
    if case.op not in (SUM, PRODUCT):
        return torch.randn([count], generator=chance).to(kind)
    if not case.exact:
        return (torch.rand([count], generator=chance, dtype=torch.float64) * 1.5 + 0.5).to(kind)
    if case.op == SUM:
        return torch.randint(-8, 9, [count], generator=chance).to(kind)
    sign = torch.randint(0, 2, [count], generator=chance) * 2 - 1
    return (sign * 2.0 ** torch.randint(-1, 2, [count], generator=chance)).to(kind)


def pieces(tensor, ranks):
    length = tensor.numel() // ranks
    return [tensor[rank * length :][:length] for rank in range(ranks)]


def bits(tensor):
    return tensor.view(BITS[tensor.element_size()])


class Torch:
    """What gloo gives: a tensor, or None where a rank gets nothing."""

    def __init__(self, rank):
        self.rank = rank
        self.groups = {ranks: dist.new_group(list(range(ranks))) for ranks in range(1, RANKS + 1)}

    def run(self, case, mine):
        group, rank, ranks = self.groups[case.ranks], self.rank, case.ranks
        if case.what == "allreduce":
            out = mine.clone()
            dist.all_reduce(out, OPS[case.op], group=group)
            return out
        if case.what == "reduce":
            out = mine.clone()
            dist.reduce(out, case.root, OPS[case.op], group=group)
            return out if rank == case.root else None
        if case.what == "reduce_scatter":
            out = mine.new_empty(case.count)
            dist.reduce_scatter_tensor(out, mine, OPS[case.op], group=group)
            return out
        if case.what == "broadcast":
            out = mine.clone()
            dist.broadcast(out, case.root, group=group)
            return out
        if case.what == "allgather":
            out = mine.new_empty(case.count * ranks)
            dist.all_gather_into_tensor(out, mine, group=group)
            return out
        if case.what == "alltoall":
            taken = [parts[rank] for parts in case.parts]
            out = mine.new_empty(sum(taken))
            dist.all_to_all_single(out, mine, taken, case.parts[rank], group=group)
            return out
        if case.what == "gather":
            out = mine.new_empty(case.count * ranks) if rank == case.root else None
            dist.gather(mine, pieces(out, ranks) if rank == case.root else None, case.root, group=group)
            return out
        out = mine.new_empty(case.count)
        dist.scatter(out, pieces(mine, ranks) if rank == case.root else None, case.root, group=group)
        return out

    def supports(self, what, kind, op):
        """Whether gloo has a collective of this type and operation: all ranks ask."""
        case = Case(0, 0, what, "", RANKS, TYPES.index(kind), op, 0, 1, 0, True, False, [[1] * RANKS] * RANKS)
        try:
            self.run(case, torch.ones([given(case, self.rank)], dtype=kind))
        except (RuntimeError, ValueError, NotImplementedError):
            return False
        return True


class Railhead:
    def __init__(self, rank, path, folder):
        self.rank, self.library = rank, ctypes.CDLL(path)
        self.library.railhead_last_error.restype = ctypes.c_char_p
        self.meshes = {}
        store = ctypes.c_void_p()
        self.check(self.library.railhead_store_file(f"{folder}/railhead".encode(), ctypes.c_int64(-1), ctypes.byref(store)))
        for wire in ("shm", "tcp"):
            os.environ["RAILHEAD_SOFT_WIRE"] = wire
            for ranks in range(max(rank + 1, 1), RANKS + 1):
                self.meshes[wire, ranks] = self.connect(store, f"{wire}{ranks}", ranks)

    def connect(self, store, prefix, ranks):
        keys, mesh = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.library.railhead_store_prefix(prefix.encode(), store, ctypes.byref(keys)))
        config = Config(ctypes.sizeof(Config), self.rank, ranks, TIMEOUT_MS, 0)
        self.check(self.library.railhead_mesh_create(ctypes.byref(config), None, ctypes.byref(mesh)))
        self.check(self.library.railhead_mesh_connect(mesh, keys))
        self.check(self.library.railhead_store_close(keys))
        return mesh

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.library.railhead_last_error().decode())

    def run(self, case, mine):
        """The same; what is given is not changed unless the case says in place."""
        rank, ranks, what = self.rank, case.ranks, case.what
        asked = Collective(ctypes.sizeof(Collective), 0, case.type, case.op, case.algorithm, case.root, -1, None, None)
        taken = [parts[rank] for parts in case.parts]
        length = {"allgather": case.count * ranks, "gather": case.count * ranks, "alltoall": sum(taken)}.get(what, case.count)
        gets = rank == case.root or what not in ("reduce", "gather")
        data = mine.clone()
        out = data if what == "broadcast" or case.in_place and what in ("allreduce", "reduce") else mine.new_full([length], 77)
        own = data
        if case.in_place and what == "allgather":
            own = out[case.count * rank :][: case.count]
            own.copy_(mine)
        place = lambda tensor: ctypes.c_void_p(tensor.data_ptr())
        sizes = lambda values: (ctypes.c_size_t * ranks)(*values)
        even, arguments = sizes([case.count] * ranks), {}
        arguments["broadcast"] = [place(out), ctypes.c_size_t(case.count)]
        arguments["alltoall"] = [place(data), place(out), sizes(case.parts[rank]), sizes(taken)]
        for name in ("allreduce", "reduce"):
            arguments[name] = [place(data), place(out) if gets else None, ctypes.c_size_t(case.count)]
        for name in ("reduce_scatter", "allgather", "gather", "scatter"):
            arguments[name] = [place(own), place(out) if gets else None, even]
        self.check(self.library[f"railhead_{what}"](self.meshes[case.wire, ranks], ctypes.byref(asked), *arguments[what]))
        assert out is data or torch.equal(bits(data), bits(mine)), "what is given has changed"
        return out if gets else None


def given(case, rank):
    """How many elements a rank has."""
    if case.what == "alltoall":
        return sum(case.parts[rank])
    if case.what == "reduce_scatter" or case.what == "scatter" and rank == case.root:
        return case.count * case.ranks
    return 0 if case.what == "scatter" else case.count


def compare(case, ours, theirs, group):
    assert (ours is None) == (theirs is None)
    if ours is None:
        return
    assert ours.shape == theirs.shape, f"{ours.shape} and {theirs.shape}"
    reduces = case.what in ("allreduce", "reduce", "reduce_scatter")
    if not reduces or case.exact or case.op not in (SUM, PRODUCT) or not ours.dtype.is_floating_point:
        wrong = bits(ours) != bits(theirs)
        most = 0
    else:
        # Positive floats are in the order of their bits.
        wrong = (bits(ours).long() - bits(theirs).long()).abs() > case.ranks
        most = case.ranks
        if case.what == "allreduce":
            first = ours.clone()
            dist.broadcast(first, 0, group=group)
            assert torch.equal(bits(first), bits(ours)), "not the bits that rank 0 has"
    if wrong.any():
        at = wrong.nonzero()[0].item()
        raise AssertionError(f"{wrong.sum()} of {ours.numel()} differ by more than {most} units: at {at} {ours[at]} and torch's {theirs[at]}")


def rank_main(rank, library, cases, seed, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/torch", rank=rank, world_size=RANKS)
    gloo, railhead = Torch(rank), Railhead(rank, library, folder)
    kinds = [kind for kind in TYPES if kind]
    reducing = ("allreduce", "reduce", "reduce_scatter")
    has = {
        (what, kind, op)
        for what in ["allreduce", *OTHERS]
        for kind in kinds
        for op in (range(len(OPS)) if what in reducing else [SUM])
        if gloo.supports(what, kind, op)
    }
    chance, number, left_out, start = random.Random(seed), 0, 0, time.monotonic()
    assert {kind for what, kind, _ in has if what == "allreduce"} >= {torch.int32, torch.float32}, "this torch's gloo reduces nothing"
    types = [i for i, kind in enumerate(TYPES) if kind]
    while number < cases:
        case = draw(chance, number, types)
        if (case.what, TYPES[case.type], case.op if case.what in reducing else SUM) not in has:
            left_out += 1
            # Another one, or none if gloo has nothing of the kind.
            number += not any(what == case.what for what, *_ in has)
            continue
        if rank < case.ranks:
            try:
                mine = numbers(case, rank, given(case, rank))
                theirs = gloo.run(case, mine)
                compare(case, railhead.run(case, mine), theirs, gloo.groups[case.ranks])
            except BaseException as error:
                raise AssertionError(f"rank {rank}: {error}\nseed {seed}: {case}") from error
        number += 1
        if rank == 0 and number % 50 == 0:
            print(f"{number} cases, {time.monotonic() - start:.1f} s", flush=True)
    if rank == 0:
        lacks = sorted({f"{what} {kind}".replace("torch.", "") for what in ["allreduce", *OTHERS] for kind in kinds} - {f"{w} {k}".replace("torch.", "") for w, k, _ in has})
        print(f"gloo has no {', '.join(lacks) or 'gap'}; {left_out} cases drawn anew", flush=True)
    # Nobody leaves before all are done.
    dist.barrier()


def main():
    library, cases = sys.argv[1], int(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else random.getrandbits(32)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for rank in range(RANKS):
            # torch is loaded once for all.
            child = os.fork()
            if child == 0:
                try:
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                    rank_main(rank, library, cases, seed, folder)
                    # Not by Python's own end: see gloo.py.
                    os._exit(0)
                except BaseException as error:
                    print(error, file=sys.stderr, flush=True)
                finally:
                    os._exit(1)
            children[child] = rank
        failed = []
        while children:
            child, status = os.wait()
            rank = children.pop(child)
            if status != 0:
                failed.append(f"rank {rank}: exit status {status}")
                for other in children:
                    os.kill(other, signal.SIGKILL)
        if failed:
            sys.exit(failed[0])
    print("good")


main()
