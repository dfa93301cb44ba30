"""The backend beside torch's gloo: random cases of every operation, the same tensors for both, among the same processes, in groups of 1 to 4 of them.

Tensors are of all types that gloo has for an operation, contiguous or not, empty or not, and operations are waited for at once or later. Sums and
products are exact, so that the order of reduction cannot matter.

Usage: oracle.py CASES [SEED]
"""

import contextlib
import random
import sys
import time
from collections import Counter

import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives

import railhead.torch  # noqa: F401

RANKS = 4
REDUCED = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool]
MOVED = [*REDUCED, torch.int16, torch.complex64]
REDUCTIONS = [
    dist.ReduceOp.SUM,
    dist.ReduceOp.PRODUCT,
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
    dist.ReduceOp.AVG,
    dist.ReduceOp.BAND,
    dist.ReduceOp.BOR,
    dist.ReduceOp.BXOR,
]


class Case:
    """What all ranks draw alike."""

    def __init__(self, chance, what, members):
        self.what, self.members = what, members
        self.size = len(members)
        self.dtype = chance.choice(REDUCED if what in REDUCING else MOVED)
        is_integer = not (self.dtype.is_floating_point or self.dtype.is_complex)
        self.op = chance.choice(REDUCTIONS[:4] + REDUCTIONS[5:] if is_integer else REDUCTIONS[:5])
        self.shape = tuple(chance.choice([0, 1, 2, 3, 5, 17, 300]) for _ in range(chance.randint(1, 3)))
        self.is_strided, self.is_async = chance.random() < 0.4, chance.random() < 0.5
        self.root = chance.randrange(self.size)
        self.seed = chance.getrandbits(40)
        self.splits = [[chance.randint(0, 4) for _ in members] for _ in members]
        self.tag = chance.randint(0, 5)

    def __str__(self):
        how = f"root {self.root}, strided {self.is_strided}, async {self.is_async}"
        return f"{self.what} of {self.dtype} {self.shape}, {self.op}, ranks {self.members}, {how}"

    def tensor(self, rank, number=0, shape=None, filled=True):
        """What a rank of the group has."""
        shape = self.shape if shape is None else shape
        numbers = torch.Generator().manual_seed(self.seed * 1000 + rank * 20 + number)
        values = (
            torch.randint(0, 2, shape, generator=numbers)
            if self.dtype in (torch.bool, torch.complex64)
            else torch.randint(-2, 3, shape, generator=numbers)
        )
        values = (values if filled else torch.full(shape, 1)).to(self.dtype)
        if self.is_strided and values.dim() > 1:
            values = values.transpose(0, -1).contiguous().transpose(0, -1)
        return values


def all_reduce(case, group, me):
    tensor = case.tensor(me)
    return dist.all_reduce(tensor, case.op, group=group, async_op=case.is_async), [tensor]


def reduce(case, group, me):
    tensor = case.tensor(me)
    work = dist.reduce(tensor, op=case.op, group=group, group_dst=case.root, async_op=case.is_async)
    return work, [tensor] if me == case.root else []


def broadcast(case, group, me):
    tensor = case.tensor(me)
    return dist.broadcast(tensor, group=group, group_src=case.root, async_op=case.is_async), [tensor]


def all_gather(case, group, me):
    into = [case.tensor(me, filled=False) for _ in case.members]
    return dist.all_gather(into, case.tensor(me), group=group, async_op=case.is_async), into


def all_gather_into_tensor(case, group, me):
    into = case.tensor(me, shape=(case.size * case.shape[0], *case.shape[1:]), filled=False).contiguous()
    return dist.all_gather_into_tensor(into, case.tensor(me).contiguous(), group=group, async_op=case.is_async), [into]


def gather(case, group, me):
    into = [case.tensor(me, filled=False) for _ in case.members] if me == case.root else None
    return dist.gather(case.tensor(me), into, group=group, group_dst=case.root, async_op=case.is_async), into or []


def scatter(case, group, me):
    into = case.tensor(me, filled=False)
    given = [case.tensor(me, number) for number in range(case.size)] if me == case.root else None
    return dist.scatter(into, given, group=group, group_src=case.root, async_op=case.is_async), [into]


def reduce_scatter(case, group, me):
    into = case.tensor(me, filled=False)
    given = [case.tensor(me, number) for number in range(case.size)]
    return dist.reduce_scatter(into, given, case.op, group=group, async_op=case.is_async), [into]


def reduce_scatter_tensor(case, group, me):
    into = case.tensor(me, filled=False).contiguous()
    given = case.tensor(me, shape=(case.size * case.shape[0], *case.shape[1:])).contiguous()
    return dist.reduce_scatter_tensor(into, given, case.op, group=group, async_op=case.is_async), [into]


def all_to_all(case, group, me):
    given = [case.tensor(me, number) for number in range(case.size)]
    into = [case.tensor(me, filled=False) for _ in case.members]
    return dist.all_to_all(into, given, group=group, async_op=case.is_async), into


def all_to_all_single(case, group, me):
    rest = case.shape[1:]
    sent, taken = case.splits[me], [splits[me] for splits in case.splits]
    given = case.tensor(me, shape=(sum(sent), *rest)).contiguous()
    into = case.tensor(me, shape=(sum(taken), *rest), filled=False).contiguous()
    return dist.all_to_all_single(into, given, taken, sent, group=group, async_op=case.is_async), [into]


def ring(case, group, me):
    """Everyone sends to the next rank, and receives from the one before."""
    if case.size == 1:
        return None, []
    into = case.tensor(me, filled=False)
    after, before = (me + 1) % case.size, (me - 1) % case.size
    works = [
        dist.isend(case.tensor(me), group=group, group_dst=after, tag=case.tag),
        dist.irecv(into, group=group, group_src=before, tag=case.tag),
    ]
    for work in works:
        work.wait()
    return None, [into]


def from_any(case, group, me):
    """The root receives from all others, in whichever order they come."""
    if me != case.root:
        dist.send(case.tensor(me), group=group, group_dst=case.root, tag=case.tag)
        return None, []
    come = {}
    for _ in range(case.size - 1):
        into = case.tensor(me, filled=False)
        # A rank of the job, and not of the group.
        come[dist.recv(into, group=group, tag=case.tag)] = into
    return None, [come[rank] for rank in sorted(come)]


def batched(case, group, me):
    into = [case.tensor(me, filled=False) for rank in range(case.size) if rank != me]
    others = [rank for rank in range(case.size) if rank != me]
    if not others:
        return None, []
    operations = [dist.P2POp(dist.isend, case.tensor(me, rank), group=group, group_peer=rank, tag=case.tag) for rank in others]
    operations += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=rank, tag=case.tag) for rank, tensor in zip(others, into, strict=True)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return None, into


def all_reduce_coalesced(case, group, me):
    tensors = [case.tensor(me, number) for number in range(3)]
    with dist._coalescing_manager(group, async_ops=case.is_async) as works:
        for tensor in tensors:
            dist.all_reduce(tensor, case.op, group=group)
    return works if case.is_async else None, tensors


def coalesced_by_device(case, group, me):
    """What backends without a function of their own are given."""
    tensors = [case.tensor(me, number) for number in range(3)]
    into = [case.tensor(me, filled=False) for _ in case.members]
    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as works:
        for tensor in tensors:
            dist.broadcast(tensor, group=group, group_src=case.root, async_op=True)
        dist.all_gather(into, case.tensor(me), group=group, async_op=True)
    works.wait()
    return None, [*tensors, *into]


def functional(case, group, me):
    """As compiled programs call them: through torch's own group."""
    tensor = functional_collectives.all_reduce(case.tensor(me), str(case.op).split(".")[-1].lower(), group)
    whole = functional_collectives.all_gather_single(case.tensor(me).contiguous(), 0, group)
    return None, [functional_collectives.wait_tensor(tensor), functional_collectives.wait_tensor(whole)]


def objects(case, group, me):
    into = [None] * case.size
    dist.all_gather_object(into, {"rank": me, "text": "x" * (case.seed % 1000 + me)}, group=group)
    lists = [case.what, me] if me == case.root else [None, None]
    dist.broadcast_object_list(lists, group=group, group_src=case.root)
    return None, [into, lists]


def told(case, me):
    """What comes of messages: what is sent. Gloo has not all types of them, and who sends waits then for ever."""
    if case.what == "ring":
        return [case.tensor((me - 1) % case.size)] if case.size > 1 else []
    others = [rank for rank in range(case.size) if rank != me]
    if case.what == "batched":
        return [case.tensor(rank, me) for rank in others]
    return [case.tensor(rank) for rank in others] if me == case.root else []


def reduced_part(case, group, me):
    """This rank's part of what gloo's all_reduce gives: it has few types of the operation itself."""
    if case.what == "reduce_scatter":
        whole = torch.stack([case.tensor(me, number) for number in range(case.size)])
    else:
        whole = case.tensor(me, shape=(case.size * case.shape[0], *case.shape[1:]))
    whole = whole.contiguous()
    dist.all_reduce(whole, case.op, group=group)
    return [whole.view(case.size, -1)[me].view(case.shape)]


def truth(tensor):
    """Gloo adds booleans as bytes."""
    return tensor.view(torch.uint8).ne(0) if tensor.dtype is torch.bool and tensor.dim() else tensor


MESSAGES = {"ring", "from_any", "batched"}
REDUCING = {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced", "functional"}
OPERATIONS = {
    operation.__name__: operation
    for operation in [
        all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, gather, scatter, reduce_scatter, reduce_scatter_tensor, all_to_all,
        all_to_all_single, ring, from_any, batched, all_reduce_coalesced, coalesced_by_device, functional, objects,
    ]
}  # fmt: skip


def result(case, group, me):
    work, tensors = OPERATIONS[case.what](case, group, me)
    if work is not None:
        work.wait()
        if isinstance(work, dist.Work):
            assert work.get_future().wait() is not None
    return tensors


def gloos(case, group, me):
    """What gloo gives."""
    if case.what in MESSAGES:
        return told(case, me)
    if case.what == "coalesced_by_device":
        # Which gloo does not do.
        shared = [case.tensor(case.root, number) for number in range(3)]
        return shared + [case.tensor(rank) for rank in range(case.size)]
    if case.what.startswith("reduce_scatter"):
        return reduced_part(case, group, me)
    return result(case, group, me)


def main(rank, folder, cases, seed):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    groups = [[0], [1, 3], [0, 1, 2], [2, 3], [0, 1, 2, 3], [3, 1, 0]]
    pairs = [[dist.new_group(members, backend=backend, timeout=ranks.TIMEOUT) for backend in ("gloo", "railhead")] for members in groups]
    chance, left_out, done = random.Random(seed), Counter(), 0
    start = time.monotonic()
    while done < cases:
        index = chance.randrange(len(groups))
        case = Case(chance, list(OPERATIONS)[done % len(OPERATIONS)], sorted(groups[index]))
        theirs, ours = pairs[index]
        me = case.members.index(rank) if rank in case.members else None
        expected = None
        if me is not None:
            with contextlib.suppress(RuntimeError, ValueError, NotImplementedError, TypeError):
                expected = gloos(case, theirs, me)
        # Gloo may refuse some ranks alone.
        known = torch.tensor(int(me is None or expected is not None))
        dist.all_reduce(known, dist.ReduceOp.MIN)
        if not known:
            left_out[f"{case.what} {case.dtype} {case.op if case.what in REDUCING else ''}"] += 1
            assert sum(left_out.values()) < 3 * cases, f"gloo has too little: {left_out}"
            continue
        if expected is not None:
            try:
                got = result(case, ours, me)
            except BaseException as error:
                raise AssertionError(f"seed {seed}, case {done}: {case}: {error}") from error
            for mine, other in zip(got, expected, strict=True):
                same = torch.equal(mine, truth(other)) if isinstance(mine, torch.Tensor) else mine == other
                assert same, f"seed {seed}, case {done}: {case}: {mine} and gloo's {other}"
        done += 1
    if rank == 0:
        print(f"{done} cases, {time.monotonic() - start:.1f} s; gloo has none of: {dict(left_out)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.getrandbits(32)
    print(f"seed {seed}", flush=True)
    ranks.run(RANKS, lambda rank, folder: main(rank, folder, int(sys.argv[1]), seed))
    print("good")
