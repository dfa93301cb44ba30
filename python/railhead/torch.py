"""The backend "railhead" of torch.distributed, for tensors of the CPU: collectives and messages over a mesh of the group's ranks.

`import railhead.torch` registers it; torch does so by itself where this package is installed. torch makes a group's end (`_create`), calls its
functions on the program's threads, and waits for the works that they return. What tensors are taken: `_tensors`; what runs: `_engine`; what is waited
for: `_works`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceCoalescedOptions, Backend, DebugLevel, get_debug_level

from railhead import _library
from railhead._engine import NAME, Engine
from railhead._library import CALLS
from railhead._tensors import (
    BYTES,
    SUM,
    Flat,
    Parts,
    Reduction,
    address,
    checked,
    fits,
    joined,
    one_each,
    overlap,
    own_parts,
    pairs,
    plain,
    reduction,
    same_type,
    single,
    splits,
    write,
)
from railhead._works import NO_LIMIT, All, Exchange, Message, Work

_Options = TypeVar("_Options")


def _long(kind: type[_Options], opts: Any, timeout: Any = None, **fields: Any) -> _Options:
    """What torch's long forms of calls take: itself, or made of what its short forms do, a root or a reduction and a time."""
    if isinstance(opts, kind):
        return opts
    made: Any = kind()
    if isinstance(opts, timedelta):
        opts, timeout = None, opts
    for name, value in fields.items():
        given, opts = (value, opts) if opts is None or value is not None else (opts, None)
        if given is not None:
            setattr(made, name, given)
    if timeout is not None:
        made.timeout = timeout
    return made  # type: ignore[no-any-return]


class _Calls:
    """What torch calls on a group's end, in its long and short forms; see torch.distributed's functions of these names."""

    _engine: Engine
    _coalesced: list[Work] | None = None

    def _run(self, what: Callable[[Engine], None], result: list[torch.Tensor], opts: Any) -> Work:
        engine = self._engine
        work = engine.run(lambda: what(engine), result, not opts.asyncOp)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _collective(self, opts: Any, how: Reduction | None = None, root: int = 0) -> Any:
        timeout = opts.timeout
        timeout_ms = self._engine.timeout_ms if timeout <= NO_LIMIT else max(1, round(timeout.total_seconds() * 1000))
        dtype, op, tag = (how.dtype, how.op, how.tag) if how else (BYTES, SUM, 0)
        return ctypes.byref(self._engine.mesh.collective(dtype, op, root, tag, timeout_ms))

    def _counts(self, counts: Sequence[int]) -> Any:
        return (ctypes.c_size_t * self._engine.size)(*counts)

    def _reduce_here(self, engine: Engine, opts: Any, tensor: torch.Tensor, how: Reduction, bitwise: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The reduction of all ranks' tensors, done by this one."""
        mine = plain(tensor)
        all_of_them = torch.empty((engine.size, *mine.shape), dtype=mine.dtype)
        sizes = self._counts([mine.nbytes] * engine.size)
        collective = self._collective(opts, how)
        collective._obj.dtype = BYTES
        CALLS.allgather(engine.mesh.handle, collective, address(mine), address(all_of_them), sizes)
        result = all_of_them[0].clone()
        for other in all_of_them[1:]:
            result = bitwise(result, other)
        return result

    def _allreduce(self, engine: Engine, opts: Any, tensor: torch.Tensor, how: Reduction) -> None:
        if how.bitwise:
            write(tensor, self._reduce_here(engine, opts, tensor, how, how.bitwise))
            return
        flat = Flat(tensor)
        CALLS.allreduce(engine.mesh.handle, self._collective(opts, how), flat.addr, flat.addr, flat.flat.numel() * how.per_element)
        how.finish(flat.flat, engine.size)
        flat.written()

    def allreduce(self, tensors: Any = None, opts: Any = None, timeout: Any = None, *, tensor: Any = None, op: Any = None) -> Work:
        tensor, opts = single(tensors if tensor is None else tensor, written=True), _long(dist.AllreduceOptions, opts, timeout, reduceOp=op)
        how = reduction(opts.reduceOp, tensor)
        return self._run(lambda engine: self._allreduce(engine, opts, tensor, how), [tensor], opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        checked(tensors, written=True)
        same_type(tensors)
        opts = _long(AllreduceCoalescedOptions, opts)
        hows = [reduction(opts.reduceOp, tensor) for tensor in tensors]

        def run(engine: Engine) -> None:
            if not tensors:
                return
            whole = joined(tensors)
            self._allreduce(engine, opts, whole, hows[0])
            parts = whole.split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
            for tensor, part in zip(tensors, parts, strict=True):
                write(tensor, part.view(tensor.shape))

        return self._run(run, tensors, opts)

    def allreduce_sparse(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        raise NotImplementedError("an allreduce of sparse tensors; expected dense ones")

    def reduce(self, tensors: Any = None, opts: Any = None, op: Any = None, timeout: Any = None, *, tensor: Any = None, root: Any = None) -> Work:
        opts = _long(dist.ReduceOptions, opts, timeout, rootRank=root, reduceOp=op)
        at = self._root(opts.rootRank)
        is_root = self._engine.rank == at
        tensor = single(tensors if tensor is None else tensor, written=is_root)
        how = reduction(opts.reduceOp, tensor)

        def run(engine: Engine) -> None:
            if how.bitwise:
                result = self._reduce_here(engine, opts, tensor, how, how.bitwise)
                if is_root:
                    write(tensor, result)
                return
            flat = Flat(tensor)
            count = flat.flat.numel() * how.per_element
            CALLS.reduce(engine.mesh.handle, self._collective(opts, how, at), flat.addr, flat.addr if is_root else None, count)
            if is_root:
                how.finish(flat.flat, engine.size)
                flat.written()

        return self._run(run, [tensor], opts)

    def broadcast(self, tensors: Any = None, opts: Any = None, timeout: Any = None, *, tensor: Any = None, root: Any = None) -> Work:
        opts = _long(dist.BroadcastOptions, opts, timeout, rootRank=root)
        at = self._root(opts.rootRank)
        is_root = self._engine.rank == at
        tensor = single(tensors if tensor is None else tensor, written=not is_root)

        def run(engine: Engine) -> None:
            flat = Flat(tensor, is_root)
            CALLS.broadcast(engine.mesh.handle, self._collective(opts, root=at), flat.addr, flat.flat.nbytes)
            if not is_root:
                flat.written()

        return self._run(run, [tensor], opts)

    def _gathered(self, engine: Engine, opts: Any, whole: Flat | Parts, given: torch.Tensor) -> None:
        mine = plain(given)
        CALLS.allgather(engine.mesh.handle, self._collective(opts), address(mine), whole.addr, self._counts([mine.nbytes] * engine.size))
        whole.written()

    def allgather(self, output_tensors: Any, input_tensors: Any = None, opts: Any = None, timeout: Any = None, *, input_tensor: Any = None) -> Work:
        given, opts = single(input_tensors if input_tensor is None else input_tensor), _long(AllgatherOptions, opts, timeout)
        into = one_each(output_tensors, given, self._engine.size, written=True)
        return self._run(lambda engine: self._gathered(engine, opts, Parts(into), given), into, opts)

    def allgather_coalesced(self, output_lists: list[list[torch.Tensor]], input_list: list[torch.Tensor], opts: Any = None) -> Work:
        """One list of outputs for each input."""
        checked(input_list)
        if len(output_lists) != len(input_list):
            raise ValueError(f"{len(output_lists)} lists of outputs; expected one for each of {len(input_list)} inputs")
        lists = [one_each([into], given, self._engine.size, written=True) for into, given in zip(output_lists, input_list, strict=True)]
        opts = _long(AllgatherOptions, opts)

        def run(engine: Engine) -> None:
            for into, given in zip(lists, input_list, strict=True):
                self._gathered(engine, opts, Parts(into), given)

        return self._run(run, [tensor for into in lists for tensor in into], opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, output_lists: list[torch.Tensor], input_list: list[torch.Tensor], opts: Any = None) -> Work:
        both, opts = pairs(output_lists, input_list), _long(AllgatherOptions, opts)
        for output, given in both:
            fits(output, given, self._engine.size)

        def run(engine: Engine) -> None:
            for output, given in both:
                self._gathered(engine, opts, Flat(output, False), given)

        return self._run(run, output_lists, opts)

    def gather(
        self, output_tensors: Any, input_tensors: Any = None, opts: Any = None, timeout: Any = None, *, input_tensor: Any = None, root: Any = None
    ) -> Work:
        given, opts = single(input_tensors if input_tensor is None else input_tensor), _long(dist.GatherOptions, opts, timeout, rootRank=root)
        at = self._root(opts.rootRank)
        into = one_each(output_tensors, given, self._engine.size, written=True) if self._engine.rank == at else []

        def run(engine: Engine) -> None:
            mine, whole = plain(given), Parts(into) if into else None
            sizes = self._counts([mine.nbytes] * engine.size)
            CALLS.gather(engine.mesh.handle, self._collective(opts, root=at), address(mine), whole and whole.addr, sizes)
            if whole:
                whole.written()

        return self._run(run, into, opts)

    def scatter(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        *,
        output_tensor: Any = None,
        root: Any = None,
    ) -> Work:
        output, opts = (
            single(output_tensors if output_tensor is None else output_tensor, written=True),
            _long(dist.ScatterOptions, opts, timeout, rootRank=root),
        )
        at = self._root(opts.rootRank)
        given = one_each(input_tensors, output, self._engine.size) if self._engine.rank == at else []

        def run(engine: Engine) -> None:
            mine, whole = Flat(output, False), joined(given) if given else None
            sizes = self._counts([mine.flat.nbytes] * engine.size)
            CALLS.scatter(engine.mesh.handle, self._collective(opts, root=at), None if whole is None else address(whole), mine.addr, sizes)
            mine.written()

        return self._run(run, [output], opts)

    def _reduced_part(self, engine: Engine, opts: Any, output: torch.Tensor, whole: torch.Tensor, how: Reduction) -> None:
        if how.bitwise:
            write(output, self._reduce_here(engine, opts, whole, how, how.bitwise).view(engine.size, *output.shape)[engine.rank])
            return
        mine = Flat(output, False)
        counts = self._counts([mine.flat.numel() * how.per_element] * engine.size)
        CALLS.reduce_scatter(engine.mesh.handle, self._collective(opts, how), address(whole), mine.addr, counts)
        how.finish(mine.flat, engine.size)
        mine.written()

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any = None, opts: Any = None, timeout: Any = None, *, input_tensor: Any = None, op: Any = None
    ) -> Work:
        output, opts = single(output_tensors, written=True), _long(dist.ReduceScatterOptions, opts, timeout, reduceOp=op)
        given = one_each(input_tensors if input_tensor is None else input_tensor, output, self._engine.size)
        how = reduction(opts.reduceOp, output)
        return self._run(lambda engine: self._reduced_part(engine, opts, output, joined(given), how), [output], opts)

    def reduce_scatter_single(self, outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([outputTensor], [inputTensor], opts)

    def reduce_scatter_single_coalesced(self, outputTensors: list[torch.Tensor], inputTensors: list[torch.Tensor], opts: Any = None) -> Work:
        both, opts = pairs(outputTensors, inputTensors), _long(dist.ReduceScatterOptions, opts)
        for output, given in both:
            fits(given, output, self._engine.size)
        hows = [reduction(opts.reduceOp, output) for output in outputTensors]

        def run(engine: Engine) -> None:
            for (output, given), how in zip(both, hows, strict=True):
                self._reduced_part(engine, opts, output, plain(given), how)

        return self._run(run, outputTensors, opts)

    def alltoall(self, output_tensor: list[torch.Tensor], input_tensor: list[torch.Tensor], opts: Any = None, timeout: Any = None) -> Work:
        """The parts of ranks may differ in size."""
        outputs, inputs, opts = output_tensor, input_tensor, _long(dist.AllToAllOptions, opts, timeout)
        size, rank = self._engine.size, self._engine.rank
        if len(outputs) != size or len(inputs) != size:
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs; expected {size} of each")
        checked(outputs, written=True)
        checked(inputs)
        same_type([*outputs, *inputs])
        own_parts(inputs[rank].nbytes, outputs[rank].nbytes, rank)

        def run(engine: Engine) -> None:
            whole, given = Parts(outputs), joined(inputs)
            sent = self._counts([tensor.nbytes for tensor in inputs])
            CALLS.alltoall(engine.mesh.handle, self._collective(opts), address(given), whole.addr, sent, self._counts(whole.sizes))
            whole.written()

        return self._run(run, outputs, opts)

    def all_to_all_single(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        output, given, opts = output_tensor, input_tensor, _long(dist.AllToAllOptions, opts, timeout)
        size, rank = self._engine.size, self._engine.rank
        checked([output], written=True)
        checked([given])
        same_type([given, output])
        sent, received = splits(given, input_split_sizes, size), splits(output, output_split_sizes, size)
        own_parts(sent[rank], received[rank], rank)

        def run(engine: Engine) -> None:
            whole, mine = Flat(output, False), plain(given)
            if overlap(whole.flat, mine):
                mine = mine.clone()
            CALLS.alltoall(engine.mesh.handle, self._collective(opts), address(mine), whole.addr, self._counts(sent), self._counts(received))
            whole.written()

        return self._run(run, [output], opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        opts = _long(dist.BarrierOptions, opts, timeout)
        return self._run(lambda engine: _void(CALLS.barrier(engine.mesh.handle, self._collective(opts))), [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that did not come, all of them in any case."""
        self._engine.monitored_barrier(getattr(timeout, "timeout", timeout))

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Work:
        return self._message(single(tensors), [self._other(dstRank)], tag, True)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Work:
        return self._message(single(tensors, written=True), [self._other(srcRank)], tag, False)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        others = [rank for rank in range(self._engine.size) if rank != self._engine.rank]
        if not others:
            raise ValueError("a message from any rank; expected a group of more than one")
        return self._message(single(tensors, written=True), others, tag, False)

    def _message(self, tensor: torch.Tensor, ranks: Sequence[int], tag: int, is_send: bool) -> Work:
        try:
            work = Message(Exchange(self._engine, tensor, ranks, tag, is_send), self._engine, tensor)
        except _library.Error as error:
            raise self._engine.told(error) from error
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _other(self, rank: int) -> int:
        if not 0 <= rank < self._engine.size or rank == self._engine.rank:
            raise ValueError(f"a message between rank {self._engine.rank} and {rank}; expected another one of {self._engine.size}")
        return rank

    def _root(self, rank: int) -> int:
        if not 0 <= rank < self._engine.size:
            raise ValueError(f"root {rank}; expected one of {self._engine.size} ranks")
        return rank

    # How torch has several calls be one. They run one after the other in any case.
    def start_coalescing(self, _device: Any = None) -> None:
        self._coalesced = []

    def end_coalescing(self, _device: Any = None) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return All(works)

    def getBackendName(self) -> str:
        return NAME

    def _set_sequence_number_for_group(self) -> None:
        """Nothing is counted."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def set_timeout(self, timeout: timedelta) -> None:
        self._engine.timeout_ms = max(1, round(timeout.total_seconds() * 1000))

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        self._engine.close()

    def abort(self) -> None:
        self._engine.abort()


def _void(_status: int) -> None:
    """What a barrier gives."""


# Ends that torch's checker of collectives calls, and does not keep.
_CHECKED: list[_Device] = []


class _Device(_Calls, Backend):
    """A group's end for one kind of device, beside other backends. torch wraps its works: those can be waited for, and have futures."""

    # What torch asks of a backend before it uses what few have; without these, its answer is an endless recursion.
    supports_coalescing = property(lambda self: False)
    supports_splitting = property(lambda self: False)
    supports_shrinking = property(lambda self: False)
    supports_reconfigure = property(lambda self: False)
    supports_window = property(lambda self: False)
    _supports_time_estimate = property(lambda self: False)

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.rank, engine.size)
        self._engine = engine

    @property
    def options(self) -> Backend.Options:
        return Backend.Options(NAME, timedelta(milliseconds=self._engine.timeout_ms))

    def shutdown(self) -> None:
        super().shutdown()
        if self in _CHECKED:
            _CHECKED.remove(self)

    def split(self, _store: Any, _ranks: Any, _opts: Any) -> Any:
        raise NotImplementedError("railhead does not split groups; new_group makes one")

    def merge(self, _store: Any, _opts: Any, _rank: int, _size: int) -> Any:
        raise NotImplementedError("railhead does not merge groups; new_group makes one")

    def shrink(self, _ranks_to_exclude: Any, _shrink_flags: int = 0, _opts_override: Any = None) -> Any:
        raise NotImplementedError("railhead does not shrink groups; new_group makes one")


class _Group(_Calls, dist.ProcessGroup):  # type: ignore[misc]
    """A whole group, which nothing else serves."""

    def __init__(self, engine: Engine, store: Any) -> None:
        super().__init__(store, engine.rank, engine.size)
        self._engine = engine
        self._device = _Device(engine)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, self._device)

    # torch's own would ask the device's end, whose functions are not called here.
    def _start_coalescing(self, _device: torch.device) -> None:
        self.start_coalescing()

    def _end_coalescing(self, _device: torch.device) -> Work:
        return self.end_coalescing()

    # Nor would torch call these.
    def register_pre_hook(self, _hook_id: int, _hook: Any) -> None:
        raise NotImplementedError("railhead calls no hooks before collectives")

    def register_post_hook(self, _hook_id: int, _hook: Any) -> None:
        raise NotImplementedError("railhead calls no hooks after collectives")


def _create(options: Any, _backend_options: Any) -> _Device | _Group:
    engine = Engine(options.store, options.group_rank, options.group_size, options.timeout)
    # Where another backend serves other devices, torch's own group is between it and this one.
    if options.process_group is None or options.process_group.name() == "custom":
        return _Group(engine, options.store)
    device = _Device(engine)
    if get_debug_level() == DebugLevel.DETAIL:
        _CHECKED.append(device)
    return device


def register() -> None:
    """Has torch.distributed know the backend. Called on import, and by torch where the package is installed."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


register()
