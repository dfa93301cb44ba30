"""What torch's programs give to a group: lists of wrong sizes, tensors that are not what their memory is, short forms, what is not supported, and
ranks that do not agree. Gloo is the measure of what is taken.

Usage: arguments.py [NAME]...
"""

import datetime

import ranks
import torch
import torch.distributed as dist
from ranks import group, raised
from torch._subclasses.fake_tensor import FakeTensorMode

import railhead.torch  # noqa: F401


def zeros(*sizes):
    return [torch.zeros(size) for size in sizes]


def lists_have_a_tensor_of_one_size_for_each_rank(rank, folder):
    group(rank, 2, folder)
    world, two, double = dist.group.WORLD, torch.ones(2), torch.ones(2, dtype=torch.float64)
    written = []

    def into(*sizes):
        written.extend(zeros(*sizes))
        return written[-len(sizes) :]

    for call, words in [
        (lambda: dist.all_gather(into(2, 2, 2), two), ["3 tensors", "one list of 2"]),
        (lambda: dist.all_gather(into(2, 3), two), ["3 elements for rank 1", "expected 2"]),
        (lambda: dist.all_gather(into(2, 1) if rank == 0 else into(1, 2), two), ["1 elements", "expected 2"]),
        (lambda: world.allgather([[*into(2), double]], [two]), ["torch.float64", "torch.float32"]),
        (lambda: dist.all_gather_coalesced([into(2, 2), into(2, 1)], [two, two]), ["1 elements for rank 1", "expected 2"]),
        (lambda: world.allgather_into_tensor_coalesced(into(4), [two, two]), ["1 outputs", "2 inputs"]),
        (lambda: dist.all_gather_into_tensor(*into(5), two), ["5 elements", "expected 4"]),
        (lambda: dist.reduce_scatter(*into(4), [two, two]), ["2 elements for rank 0", "expected 4"]),
        (lambda: dist.reduce_scatter(*into(2), [two, torch.ones(3)]), ["3 elements for rank 1", "expected 2"]),
        (lambda: world.reduce_scatter(*into(2), [two, double]), ["torch.float64", "torch.float32"]),
        (lambda: world.reduce_scatter_tensor_coalesced(into(1, 1), [two, torch.ones(3)]), ["3 elements", "expected 2"]),
        (lambda: dist.all_to_all(into(2), [two]), ["1 inputs", "expected 2"]),
        (lambda: world.alltoall(into(2, 2), [two, double]), ["torch.float64", "torch.float32"]),
        (lambda: world.alltoall([double, double.clone()], [two, two]), ["torch.float64", "torch.float32"]),
        (lambda: dist.all_to_all([torch.zeros(3 if rank == me else 2) for me in range(2)], [two, two]), ["8 bytes", "as many"]),
        (lambda: dist.all_to_all_single(*into(4), torch.ones(4), [5, -1], [2, 2]), ["[5, -1]", "4 in all"]),
        (lambda: dist.all_to_all_single(*into(4), torch.ones(4), [2, 2], [1, 1, 2]), ["[1, 1, 2]", "each of 2 ranks"]),
        (lambda: dist.all_to_all_single(*into(4), torch.ones(4), [1, 1], [2, 2]), ["[1, 1]", "4 in all"]),
        (lambda: dist.all_to_all_single(*into(3), torch.ones(3)), ["3 rows for 2 ranks"]),
        (lambda: dist.all_to_all_single(torch.tensor(0.0), torch.tensor(1.0), [1, 0], [1, 0]), ["without dimensions"]),
        (lambda: world.all_to_all_single(*into(4), torch.ones(4, dtype=torch.int32), [], []), ["torch.float32", "torch.int32"]),
        (lambda: dist.all_to_all_single(torch.zeros(4, 3), torch.ones(4, 2)), ["16 bytes", "24"]),
        (lambda: world.allreduce([two, two]), ["2 tensors", "expected 1"]),
        (lambda: dist.broadcast(two, group_src=2), ["root 2", "2 ranks"]),
    ]:
        raised(call, ValueError, *words)
    assert all(tensor.eq(0).all() for tensor in written), "written to"
    # What the root alone has wrong is not begun, and the others wait for what it gives instead.
    result = torch.zeros(4)
    if rank == 0:
        raised(lambda: dist.scatter(result, [two, two], src=0), ValueError, "2 elements for rank 0", "expected 4")
        raised(lambda: dist.scatter(result, [result], src=0), ValueError, "1 tensors", "one list of 2")
    dist.scatter(result, [torch.full((4,), part) for part in (5.0, 6.0)] if rank == 0 else None, src=0)
    assert result.eq(5 + rank).all()
    all_of_them = zeros(4, 4) if rank == 0 else None
    if rank == 0:
        raised(lambda: dist.gather(result, zeros(2, 4), dst=0), ValueError, "2 elements for rank 0", "expected 4")
        raised(lambda: dist.gather(result, zeros(8, 8), dst=0), ValueError, "8 elements for rank 0", "expected 4")
    dist.gather(result, all_of_them, dst=0)
    assert rank == 1 or [tensor[3].item() for tensor in all_of_them] == [5, 6]
    dist.barrier()
    dist.destroy_process_group()


def tensors_are_sent_as_what_they_are(rank, folder):
    group(rank, 2, folder)
    world, complex_numbers = dist.group.WORLD, torch.tensor([1 + 2j, 3 - 1j])
    # Views of memory that has the other sign.
    negative = torch._neg_view(torch.tensor([1.0, 2.0]))
    assert negative.is_contiguous() and negative.is_neg() and negative.tolist() == [-1, -2]
    parts = zeros(2, 2)
    dist.all_gather(parts, negative)
    assert all(part.tolist() == [-1, -2] for part in parts)
    largest = torch._neg_view(torch.tensor([1.0 + rank, 2.0]))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    assert largest.tolist() == [-1, -2]
    sent = negative if rank == 0 else torch._neg_view(torch.zeros(2))
    dist.broadcast(sent, 0)
    assert sent.tolist() == [-1, -2]
    whole = torch._neg_view(torch.zeros(4))
    dist.all_gather_into_tensor(whole, negative)
    assert whole.tolist() == [-1, -2] * 2
    part = torch._neg_view(torch.zeros(1))
    dist.reduce_scatter_tensor(part, negative)
    assert part.item() == [-2, -4][rank]
    if rank == 0:
        dist.send(negative, 1)
    else:
        message = torch._neg_view(torch.zeros(2))
        dist.recv(message, 0)
        assert message.tolist() == [-1, -2]
    conjugate = torch.zeros(2, dtype=torch.complex64).conj() if rank else complex_numbers.conj()
    world.broadcast([conjugate]).wait()
    assert conjugate.tolist() == complex_numbers.conj().tolist()
    # One element in the place of many, and rows of another tensor.
    dist.all_gather(parts, torch.full((1,), 7.0).expand(2))
    assert parts[0].tolist() == [7, 7]
    rows = torch.arange(8.0).view(4, 2)
    dist.all_reduce(rows[1::2])
    assert rows.flatten().tolist() == [0, 1, 4, 6, 4, 5, 12, 14]
    # The same memory for what is given and what is taken.
    mine = torch.arange(200_000.0) + 1_000_000 * rank
    dist.all_to_all_single(mine, mine)
    assert torch.equal(mine, torch.cat([torch.arange(100_000.0) + 100_000 * rank + 1_000_000 * other for other in range(2)]))
    overlapping = torch.arange(4.0) + 10 * rank
    dist.all_gather_into_tensor(overlapping, overlapping[1:3])
    assert overlapping.tolist() == [1, 2, 11, 12]
    # Neither gradients nor the mode in which it was made are in the way of what is written.
    for tensor in (torch.nn.Parameter(torch.ones(3, 4).t()), torch.ones(4, requires_grad=True)):
        for op, value in ((dist.ReduceOp.SUM, 2), (dist.ReduceOp.AVG, 2), (dist.ReduceOp.MAX, 2)):
            dist.all_reduce(tensor, op, async_op=True).wait()
            assert tensor.eq(value).all() and tensor.is_leaf and tensor.requires_grad
    with torch.inference_mode():
        inferred = torch.ones(3, 4).t()
    dist.all_reduce(inferred)
    dist.all_reduce(inferred, dist.ReduceOp.AVG, async_op=True).wait()
    assert inferred.eq(2).all()
    into = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    dist.all_gather(into, torch.ones(2))
    assert into[1].tolist() == [1, 1]
    dist.barrier()
    dist.destroy_process_group()


class Wrapper(torch.Tensor):
    """Of what only its own functions know."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (3,))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def what_is_not_supported_is_said(rank, folder):
    group(rank, 2, folder)
    world, floats, integers = dist.group.WORLD, torch.ones(4), torch.ones(4, dtype=torch.int32)
    with FakeTensorMode():
        fake = torch.ones(3)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    backend = world._get_backend(torch.device("cpu"))
    for tensor, words in [
        (torch.ones(3, device="meta"), ["meta", "CPU"]),
        (floats.to_sparse(), ["sparse_coo", "strided"]),
        (torch.eye(2).to_sparse_csr(), ["sparse_csr", "strided"]),
        (torch.ones(4, 4).to_mkldnn(), ["_mkldnn", "strided"]),
        (nested, ["nested", "strided"]),
        (quantized, ["quint8", "quantized"]),
        (fake, ["FakeTensor", "memory"]),
        (Wrapper(), ["Wrapper", "memory"]),
    ]:
        raised(lambda tensor=tensor: dist.all_reduce(tensor), NotImplementedError, *words)
        raised(lambda tensor=tensor: dist.broadcast(tensor, 0), NotImplementedError, *words)
        raised(lambda tensor=tensor: world.send([tensor], 1 - rank, 0), NotImplementedError, *words)
    for call, words in [
        (lambda: dist.all_reduce(floats.to(torch.int16)), ["torch.int16", "torch.float32"]),
        (lambda: dist.all_reduce(integers, dist.ReduceOp.AVG), ["average", "int32"]),
        (lambda: dist.all_reduce(integers.bool(), dist.ReduceOp.AVG), ["average", "bool"]),
        (lambda: dist.all_reduce(floats, dist.ReduceOp.BAND), ["BAND", "torch.float32", "integers"]),
        (lambda: dist.all_reduce(floats, dist._make_nccl_premul_sum(2.0)), ["PREMUL_SUM", "RedOpType.SUM"]),
        (lambda: world._get_backend(torch.device("cpu")).allreduce_sparse([floats]), ["sparse"]),
        (lambda: world.split_group([0, 1]), ["does not split", "new_group"]),
        (lambda: world.merge_remote_group(dist.HashStore(), 2, datetime.timedelta(seconds=1)), ["does not merge", "new_group"]),
        (lambda: backend.shrink([1]), ["does not shrink", "new_group"]),
        (lambda: world.register_pre_hook(1, print), ["hooks"]),
        (lambda: dist.distributed_c10d._time_estimator(world).__enter__(), ["estimator"]),
    ]:
        raised(call, NotImplementedError, *words)
    raised(lambda: dist.split_group(split_ranks=[[0, 1]]), RuntimeError, "does not support splitting")
    raised(lambda: dist.distributed_c10d.shrink_group([1]), TypeError, "does not support shrinking")
    raised(lambda: world.new_window(), RuntimeError, "railhead does not support")
    assert not any([backend.supports_splitting, backend.supports_shrinking, backend.supports_reconfigure, backend.supports_window])
    for shared in (torch.ones(1).expand(4), torch.ones(1, 2).expand(3, 2)):
        for call in (
            lambda shared=shared: dist.all_reduce(shared),
            lambda shared=shared: dist.all_gather([shared, shared], torch.ones(shared.shape)),
            lambda shared=shared: dist.broadcast(shared, 1 - rank),
            lambda shared=shared: dist.recv(shared, 1 - rank),
        ):
            raised(call, ValueError, "strides", "share memory")
    dist.all_reduce(floats)
    assert floats.eq(2).all(), "the group goes on"
    dist.destroy_process_group()


def short_forms_are_as_torchs(rank, folder):
    group(rank, 2, folder)
    world, limit = dist.group.WORLD, datetime.timedelta(seconds=20)
    own = dist.new_group([0, 1], backend="cpu:railhead,cuda:gloo")
    maximum, mine = dist.ReduceOp.MAX, torch.full((2,), 1.0 + rank)
    for group_or_end in (world, own, world._get_backend(torch.device("cpu")), own._get_backend(torch.device("cpu"))):
        is_end = isinstance(group_or_end, dist.distributed_c10d.C10DBackend)

        def of(make, call, expected, ends=group_or_end):
            tensors = make()
            call(ends, *tensors).wait()
            assert [tensor.tolist() for tensor in tensors[:1]] == [expected], (tensors, expected)

        one = lambda: [mine.clone()]  # noqa: E731
        of(one, lambda end, x: end.allreduce([x]), [3, 3])
        of(one, lambda end, x: end.allreduce(x), [3, 3])
        of(one, lambda end, x: end.allreduce([x], maximum), [2, 2])
        of(one, lambda end, x: end.allreduce(x, op=maximum, timeout=limit), [2, 2])
        of(one, lambda end, x: end.broadcast([x]), [1, 1])
        of(one, lambda end, x: end.broadcast(x, 1), [2, 2])
        of(one, lambda end, x: end.broadcast(x, root=1, timeout=limit), [2, 2])
        of(one, lambda end, x: end.reduce(x, 1, maximum), [1, 1] if rank == 0 else [2, 2])
        of(one, lambda end, x: end.reduce(x, root=1, op=maximum), [1, 1] if rank == 0 else [2, 2])
        of(lambda: [torch.zeros(2), mine], lambda end, x, y: end.scatter(x, [y, y + 5] if rank == 0 else [], 0), [1, 1] if rank == 0 else [6, 6])
        of(lambda: [torch.zeros(2), mine], lambda end, x, y: end.reduce_scatter(x, [y, y], maximum), [2, 2])
        of(lambda: [torch.zeros(2), mine], lambda end, x, y: end.reduce_scatter([x], [[y, y]]), [3, 3])
        of(lambda: [torch.zeros(2), *zeros(2)], lambda end, x, y: end.allgather([y, x], mine), [2, 2])
        of(lambda: [torch.zeros(2), *zeros(2)], lambda end, x, y: end.gather([y, x] if rank == 0 else [], mine, 0), [2, 2] if rank == 0 else [0, 0])
        of(lambda: [torch.zeros(2), *zeros(2)], lambda end, x, y: end.alltoall([y, x], [mine, mine]), [2, 2])
        if not is_end:
            of(lambda: [torch.zeros(4)], lambda end, x: end._allgather_base(x, mine), [1, 1, 2, 2])
            of(lambda: [torch.zeros(1)], lambda end, x: end._reduce_scatter_base(x, mine), [3])
            of(lambda: [torch.zeros(2)], lambda end, x: end.alltoall_base(x, mine, [], []), [1, 2])
        end = group_or_end
        end.allreduce_coalesced([mine.clone()]).wait()
        end.barrier().wait()
        if not is_end:
            end.barrier(timeout=limit).wait()
    assert world.name() == "railhead" and (world.rank(), world.size()) == (rank, 2)
    assert world._get_backend(torch.device("cpu")).options._timeout == ranks.TIMEOUT
    if rank == 0:
        raised(world.send([mine], dstRank=1, tag=0).source_rank, RuntimeError, "a message that is sent")
    else:
        assert world.recv([mine.clone()], srcRank=0, tag=0).source_rank() == 0
    dist.barrier()
    dist.destroy_process_group()


def calls_may_have_a_time_of_their_own(rank, folder):
    group(rank, 2, folder)
    short, alone = datetime.timedelta(milliseconds=200), [dist.new_group([0, 1]) for _ in range(3)]
    if rank == 0:
        raised(lambda: alone[0].allreduce([torch.ones(1)], timeout=short).wait(), dist.DistBackendError, "0.2 s", "rank 1")
        raised(lambda: dist.barrier(alone[1], timeout=short), dist.DistBackendError, "0.2 s", "rank 1")
        dist.set_timeout(short, alone[2])
        raised(lambda: dist.all_reduce(torch.ones(1), group=alone[2]), dist.DistBackendError, "0.2 s", "rank 1")
    dist.barrier()
    dist.destroy_process_group()


def a_monitored_barrier_names_all_that_do_not_come(rank, folder):
    group(rank, 4, folder)
    own = dist.new_group(range(4), backend="cpu:railhead,cuda:gloo")
    for _ in range(3):
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))
        dist.monitored_barrier(own)
    if rank in (0, 2):
        for members in (None, own):
            call = lambda members=members: dist.monitored_barrier(members, datetime.timedelta(milliseconds=500), True)  # noqa: E731
            raised(call, RuntimeError, "rank 1, ", "3 of 4 did not come")
    # Nothing has failed for that.
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=own)
    assert tensor.eq(16).all()
    dist.destroy_process_group()


def ranks_that_do_not_agree_are_told(rank, folder):
    """Nobody takes another type or reduction for its own: the time is over, and nothing is written."""
    group(rank, 2, folder)
    integers, floats = torch.ones(40, dtype=torch.int32), torch.ones(40)
    for call in [
        lambda own: dist.all_reduce(floats if rank else integers, group=own),
        lambda own: dist.all_reduce(floats, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, group=own),
        lambda own: dist.all_reduce(floats, dist.ReduceOp.AVG if rank else dist.ReduceOp.SUM, group=own),
        lambda own: dist.all_reduce(integers, dist.ReduceOp.BXOR if rank else dist.ReduceOp.BAND, group=own),
        lambda own: dist.reduce_scatter_tensor(torch.zeros(20), floats, dist.ReduceOp.MIN if rank else dist.ReduceOp.SUM, group=own),
        lambda own: dist.all_reduce(floats, group=own) if rank else dist.broadcast(floats, 1, group=own),
    ]:
        own = dist.new_group([0, 1])
        dist.set_timeout(datetime.timedelta(milliseconds=300), own)
        raised(lambda call=call, own=own: call(own), RuntimeError, "rank")
        dist.destroy_process_group(own)
    assert floats.eq(1).all() and integers.eq(1).all()
    dist.barrier()
    dist.destroy_process_group()


SCENARIOS = {
    lists_have_a_tensor_of_one_size_for_each_rank: (2, {}),
    tensors_are_sent_as_what_they_are: (2, {}),
    what_is_not_supported_is_said: (2, {}),
    short_forms_are_as_torchs: (2, {}),
    calls_may_have_a_time_of_their_own: (2, {}),
    a_monitored_barrier_names_all_that_do_not_come: (4, {}),
    ranks_that_do_not_agree_are_told: (2, {}),
}

if __name__ == "__main__":
    ranks.main(SCENARIOS)
