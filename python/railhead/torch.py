"""The backend "railhead" of torch.distributed, for tensors of the CPU: collectives and messages over a mesh of the group's ranks.

`import railhead.torch` registers it; torch does so by itself where this package is installed. torch makes a group's end (`_create`), calls its
functions on the program's threads, and waits for the works that they return. Collectives of a group run one after the other, as all its ranks call
them in the same order: at once, on the thread that calls, if that waits for them and nothing is before them, and otherwise on a thread of the
group's.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Work

from railhead import _library
from railhead._library import CALLS
from railhead.mesh import DTYPES, OPS, Mesh

NAME = "railhead"

_BYTES = DTYPES["u8"][0]
# Those whose elements are reduced.
_REDUCED = {
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.uint32: "u32",
    torch.int64: "i64",
    torch.uint64: "u64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
}
_SUM = OPS["sum"]
_REDUCTIONS = {
    dist.ReduceOp.SUM: _SUM,
    dist.ReduceOp.AVG: _SUM,
    dist.ReduceOp.PRODUCT: OPS["product"],
    dist.ReduceOp.MIN: OPS["min"],
    dist.ReduceOp.MAX: OPS["max"],
}
# Those that no function of the library does: each rank does them to what all have given.
_BITWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
# What torch means by no time of its own, and by a wait without limit.
_UNSET = timedelta(milliseconds=-1)
_NO_LIMIT = timedelta(0)


class _Work(Work):
    """Something that is asked for. It is over once `_end` was called."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._lock = threading.Lock()

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = error
            self._over.set()
            future = self._future
        if future is not None:
            self._tell(future)

    def _tell(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self._error)  # type: ignore[arg-type]

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        limit = None if timeout in (_NO_LIMIT, _UNSET) else timeout.total_seconds()
        if not self._over.wait(limit):
            raise dist.DistBackendError(f"not done within {limit} s, for which it was waited; it goes on")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if not self._over.is_set():
                    return self._future
            elif not self._over.is_set() or self._future.done():
                return self._future
        self._tell(self._future)
        return self._future


class _Exchange:
    """A message that is sent or received, its buffer, and its memory. The mesh does it whether or not somebody waits."""

    def __init__(self, engine: _Engine, tensor: torch.Tensor, ranks: Sequence[int], tag: int, is_send: bool) -> None:
        self._engine, self._is_send, self._tensor = engine, is_send, tensor
        self._flat = _Flat(tensor, is_send)
        self._turn = threading.Lock()
        self._is_over = False
        self._error: BaseException | None = None
        self.rank = -1
        size, any_tag = self._flat.flat.nbytes, tag & (1 << 64) - 1
        self._buffer = ctypes.c_void_p()
        CALLS.unbound_create(engine.mesh.handle, self._flat.addr, size, ctypes.byref(self._buffer))
        try:
            if is_send:
                CALLS.unbound_send(self._buffer, ranks[0], any_tag, 0, size)
            else:
                CALLS.unbound_recv(self._buffer, (ctypes.c_int64 * len(ranks))(*ranks), len(ranks), any_tag, 0, size)
        except BaseException:
            CALLS.unbound_close(self._buffer)
            raise

    def finish(self) -> BaseException | None:
        """Waits for it: how it has ended."""
        with self._turn:
            if not self._is_over:
                self._is_over = True
                rank = ctypes.c_int64(-1)
                wait = CALLS.unbound_wait_send if self._is_send else CALLS.unbound_wait_recv
                try:
                    try:
                        wait(self._buffer, ctypes.byref(rank), self._engine.timeout_ms)
                    finally:
                        CALLS.unbound_close(self._buffer)
                    self.rank = rank.value
                    if not self._is_send:
                        self._flat.written()
                except BaseException as failure:
                    self._error = self._engine.told(failure)
            return self._error

    def left(self) -> None:
        """Nobody will wait for it: a thread does, as its memory has to stay until then."""
        if not self._is_over and self._engine.is_here():
            threading.Thread(target=self.finish, name="railhead-message", daemon=True).start()


class _Message(_Work):
    """The work of a message."""

    def __init__(self, exchange: _Exchange, tensor: torch.Tensor) -> None:
        super().__init__([tensor])
        self._exchange = exchange
        self._waiting: threading.Thread | None = None
        self._is_told = False

    def _finish(self) -> None:
        error = self._exchange.finish()
        with self._lock:
            is_first, self._is_told = not self._is_told, True
        if is_first:
            self._end(error)

    def _begin_to_wait(self) -> None:
        """Has a thread wait, as somebody asks how it is going, or for a limited time."""
        with self._lock:
            if self._waiting is None and not self._over.is_set():
                self._waiting = threading.Thread(target=self._finish, name="railhead-message", daemon=True)
                self._waiting.start()

    def is_completed(self) -> bool:
        self._begin_to_wait()
        return super().is_completed()

    def is_success(self) -> bool:
        self._begin_to_wait()
        return super().is_success()

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        if timeout in (_NO_LIMIT, _UNSET):
            self._finish()
        else:
            self._begin_to_wait()
        return super().wait(timeout)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self._begin_to_wait()
        return super().get_future()

    def source_rank(self) -> int:
        """The rank that has sent it, once it is here."""
        self.wait()
        return self._exchange.rank

    _source_rank = source_rank

    def __del__(self) -> None:
        if not self._over.is_set() and self._waiting is None:
            self._exchange.left()


class _All(_Work):
    """Several works."""

    def __init__(self, works: list[_Work]) -> None:
        super().__init__([tensor for work in works for tensor in work._result])
        self._works = works

    def is_completed(self) -> bool:
        return all([work.is_completed() for work in self._works])

    def is_success(self) -> bool:
        return all([work.is_success() for work in self._works])

    def exception(self) -> BaseException | None:
        return next((work.exception() for work in self._works if work.exception()), None)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        return all([work.wait(timeout) for work in self._works])

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(lambda _: self._result)


class _Engine:
    """The group's mesh, and what runs on it."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        # Of no process, until there is something to close.
        self._pid = -1
        self.timeout_ms = max(1, round(timeout.total_seconds() * 1000))
        self.mesh = Mesh(rank, size, timeout=timeout.total_seconds())
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[], None], _Work]] = deque()
        self._is_busy = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        try:
            self._connect(store, timeout)
        except BaseException:
            self.mesh.close()
            raise

    def _connect(self, store: Any, timeout: timedelta) -> None:
        """Gives the other ranks their addresses, and takes theirs, through the group's own store, whichever kind that is."""
        others = [peer for peer in range(self.size) if peer != self.rank]
        # A group of the same name may have been there before.
        turn = store.add(f"{NAME}/turn/{self.rank}", 1)
        deadline = time.monotonic() + timeout.total_seconds()
        addresses = {peer: self.mesh.address(peer) for peer in others}
        store.set(f"{NAME}/{turn}/{self.rank}", _packed([addresses.get(peer, b"") for peer in range(self.size)]))
        self._meet(store, [f"{NAME}/{turn}/{peer}" for peer in others], deadline)
        for peer in others:
            self.mesh.connect_pair(peer, _unpacked(store.get(f"{NAME}/{turn}/{peer}"))[self.rank])
        store.set(f"{NAME}/{turn}/{self.rank}/connected", b"1")
        self._meet(store, [f"{NAME}/{turn}/{peer}/connected" for peer in others], deadline)
        # What cannot be reached is said here rather than by the first collective.
        given, taken = ctypes.create_string_buffer(self.size), ctypes.create_string_buffer(self.size)
        each = (ctypes.c_size_t * self.size)(*[1] * self.size)
        try:
            CALLS.alltoall(self.mesh.handle, ctypes.byref(self.mesh.collective()), given, taken, each, each)
        except _library.Error as error:
            raise self.told(error) from error

    def _meet(self, store: Any, keys: list[str], deadline: float) -> None:
        if not keys:
            return
        try:
            store.wait(keys, timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            missing = [key.split("/")[2] for key in keys if not store.check([key])]
            raise dist.DistStoreError(
                f"rank {self.rank} of {self.size} waited for rank {', '.join(missing) or '?'} to connect, which has not come: {error}"
            ) from error

    def told(self, error: BaseException) -> BaseException:
        """An error as torch's programs expect it."""
        if isinstance(error, _library.NetworkError):
            return dist.DistNetworkError(str(error))
        if isinstance(error, _library.Error) and not isinstance(error, _library.UsageError):
            return dist.DistBackendError(str(error))
        return error

    def run(self, what: Callable[[], None], result: list[torch.Tensor], at_once: bool) -> _Work:
        """Runs it after all that came before."""
        work = _Work(result)
        with self._changed:
            if self._is_closed:
                raise dist.DistBackendError("the group was destroyed")
            if not at_once or self._is_busy or self._queue:
                self._queue.append((what, work))
                if self._thread is None:
                    # It does not keep the group.
                    self._thread = threading.Thread(target=_serve, args=(weakref.ref(self), self._changed), name="railhead-group", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
                return work
            self._is_busy = True
        self._do(what, work)
        return work

    def _do(self, what: Callable[[], None], work: _Work) -> None:
        error: BaseException | None = None
        try:
            what()
        except BaseException as failure:
            error = self.told(failure)
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
        # What is called when it is over may call this again.
        work._end(error)

    def is_here(self) -> bool:
        """Whether this process has made it, and has not closed it."""
        return self._pid == os.getpid() and not self._is_closed

    def close(self) -> None:
        """Ends it once what runs is over; what has not begun fails. In a forked child nothing happens."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._is_closed = True
            left, self._queue = list(self._queue), deque()
            self._changed.notify_all()
            while self._is_busy:
                self._changed.wait()
        for _, work in left:
            work._end(dist.DistBackendError("the group was destroyed"))
        self.mesh.close()

    def abort(self) -> None:
        """The same at once: what runs fails."""
        if self._pid == os.getpid():
            self.mesh.close()
            self.close()

    def __del__(self) -> None:
        self.close()


def _serve(engine_of: weakref.ref[_Engine], changed: threading.Condition) -> None:
    """The thread of a group: runs what is queued, until the group is closed or gone."""
    while True:
        with changed:
            engine = engine_of()
            if engine is None or engine._is_closed:
                return
            if engine._is_busy or not engine._queue:
                # Nothing of the group is kept meanwhile; its end is told.
                del engine
                changed.wait()
                continue
            what, work = engine._queue.popleft()
            engine._is_busy = True
        engine._do(what, work)
        del engine, what, work


def _packed(parts: list[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def _unpacked(whole: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(whole):
        end = at + 4 + int.from_bytes(whole[at : at + 4], "little")
        parts.append(whole[at + 4 : end])
        at = end
    return parts


def _checked(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise NotImplementedError(f"a tensor on {tensor.device}; this backend takes those of the CPU")
        if tensor.layout != torch.strided:
            raise NotImplementedError(f"a tensor of layout {tensor.layout}; this backend takes {torch.strided}")


def _single(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(tensors) != 1:
        raise ValueError(f"{len(tensors)} tensors; expected 1")
    _checked(tensors)
    return tensors[0]


class _Flat:
    """A tensor's elements one behind the other: the tensor itself, where they lie so."""

    def __init__(self, tensor: torch.Tensor, is_read: bool = True) -> None:
        self._tensor = tensor
        if tensor.is_contiguous():
            self.flat = tensor
        elif is_read:
            self.flat = tensor.contiguous()
        else:
            self.flat = torch.empty_like(tensor, memory_format=torch.contiguous_format)

    @property
    def addr(self) -> int | None:
        return self.flat.data_ptr() if self.flat.nbytes else None

    def written(self) -> None:
        if self.flat is not self._tensor:
            self._tensor.copy_(self.flat)


class _Reduction:
    """How the elements of tensors are reduced."""

    def __init__(self, op: Any, tensor: torch.Tensor) -> None:
        op = getattr(op, "op", op)
        # Of complex numbers both parts are added.
        self._is_complex = tensor.is_complex()
        name = _REDUCED.get(tensor.dtype.to_real() if self._is_complex else tensor.dtype)
        self.bitwise = _BITWISE.get(op)
        if name is None and self.bitwise is None:
            raise NotImplementedError(f"a reduction of {tensor.dtype}; expected one of {', '.join(map(str, _REDUCED))}")
        if op not in _REDUCTIONS and self.bitwise is None:
            raise NotImplementedError(f"{op}; expected one of {', '.join(map(str, [*_REDUCTIONS, *_BITWISE]))}")
        if self._is_complex and op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(f"{op} of {tensor.dtype}; expected a sum")
        self._is_mean = op == dist.ReduceOp.AVG
        if self._is_mean and not (tensor.is_floating_point() or self._is_complex):
            raise NotImplementedError(f"the average of {tensor.dtype}; expected floating point")
        self.dtype = DTYPES[name or "u8"][0]
        self.op = _REDUCTIONS.get(op, _SUM)
        self.per_element = 2 if self._is_complex else 1

    def finish(self, tensor: torch.Tensor, ranks: int) -> None:
        if self._is_mean:
            tensor.div_(ranks)


class _Calls:
    """What torch calls on a group's end; see torch.distributed's functions of these names."""

    _engine: _Engine
    _coalesced: list[_Work] | None = None

    def _run(self, what: Callable[[_Engine], None], result: list[torch.Tensor], opts: Any) -> _Work:
        engine = self._engine
        work = engine.run(lambda: what(engine), result, opts is not None and not getattr(opts, "asyncOp", True))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _collective(self, opts: Any, dtype: int = _BYTES, op: int = _SUM, root: int = 0) -> Any:
        timeout = getattr(opts, "timeout", _UNSET)
        timeout_ms = self._engine.timeout_ms if timeout <= _NO_LIMIT else max(1, round(timeout.total_seconds() * 1000))
        return ctypes.byref(self._engine.mesh.collective(dtype, op, root, 0, timeout_ms))

    def _counts(self, counts: Sequence[int]) -> Any:
        return (ctypes.c_size_t * self._engine.size)(*counts)

    def _reduce_here(self, engine: _Engine, opts: Any, tensor: torch.Tensor, bitwise: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The reduction of all ranks' tensors, done by this one."""
        mine = tensor.contiguous()
        all_of_them = torch.empty((engine.size, *mine.shape), dtype=mine.dtype)
        sizes = self._counts([mine.nbytes] * engine.size)
        CALLS.allgather(engine.mesh.handle, self._collective(opts), mine.data_ptr(), all_of_them.data_ptr(), sizes)
        result = all_of_them[0].clone()
        for other in all_of_them[1:]:
            result = bitwise(result, other)
        return result

    def _allreduce(self, engine: _Engine, opts: Any, tensor: torch.Tensor, how: _Reduction) -> None:
        if how.bitwise:
            tensor.copy_(self._reduce_here(engine, opts, tensor, how.bitwise))
            return
        flat = _Flat(tensor)
        collective = self._collective(opts, how.dtype, how.op)
        CALLS.allreduce(engine.mesh.handle, collective, flat.addr, flat.addr, flat.flat.numel() * how.per_element)
        how.finish(flat.flat, engine.size)
        flat.written()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        tensor = _single(tensors)
        how = _Reduction(opts.reduceOp, tensor)
        return self._run(lambda engine: self._allreduce(engine, opts, tensor, how), tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        _checked(tensors)
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise ValueError(f"tensors of {sorted({str(tensor.dtype) for tensor in tensors})}; expected one type")
        hows = [_Reduction(opts.reduceOp, tensor) for tensor in tensors]

        def run(engine: _Engine) -> None:
            if not tensors:
                return
            whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
            self._allreduce(engine, opts, whole, hows[0])
            parts = whole.split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

        return self._run(run, tensors, opts)

    def allreduce_sparse(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        raise NotImplementedError("an allreduce of sparse tensors; expected dense ones")

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> _Work:
        tensor, root = _single(tensors), self._root(opts.rootRank)
        how = _Reduction(opts.reduceOp, tensor)

        def run(engine: _Engine) -> None:
            is_root = engine.rank == root
            if how.bitwise:
                result = self._reduce_here(engine, opts, tensor, how.bitwise)
                if is_root:
                    tensor.copy_(result)
                return
            flat = _Flat(tensor)
            collective = self._collective(opts, how.dtype, how.op, root)
            count = flat.flat.numel() * how.per_element
            CALLS.reduce(engine.mesh.handle, collective, flat.addr, flat.addr if is_root else None, count)
            if is_root:
                how.finish(flat.flat, engine.size)
                flat.written()

        return self._run(run, tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> _Work:
        tensor, root = _single(tensors), self._root(opts.rootRank)

        def run(engine: _Engine) -> None:
            flat = _Flat(tensor, engine.rank == root)
            CALLS.broadcast(engine.mesh.handle, self._collective(opts, root=root), flat.addr, flat.flat.nbytes)
            if engine.rank != root:
                flat.written()

        return self._run(run, tensors, opts)

    def _gathered(self, engine: _Engine, opts: Any, outputs: list[torch.Tensor], given: torch.Tensor) -> None:
        if outputs[engine.rank].nbytes != given.nbytes:
            raise ValueError(f"{given.nbytes} bytes of rank {engine.rank}, into {outputs[engine.rank].nbytes}; expected as many")
        mine, whole = given.contiguous(), _Parts(outputs)
        sizes = self._counts(whole.sizes)
        CALLS.allgather(engine.mesh.handle, self._collective(opts), mine.data_ptr() if mine.nbytes else None, whole.addr, sizes)
        whole.written()

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> _Work:
        given = _single(inputs)
        into = self._lists(outputs, given)
        return self._run(lambda engine: self._gathered(engine, opts, into, given), into, opts)

    def allgather_coalesced(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> _Work:
        """One list of outputs for each input."""
        _checked(inputs)
        if len(outputs) != len(inputs):
            raise ValueError(f"{len(outputs)} lists of outputs; expected one for each of {len(inputs)} inputs")
        lists = [self._lists([into], given) for into, given in zip(outputs, inputs, strict=True)]

        def run(engine: _Engine) -> None:
            for into, given in zip(lists, inputs, strict=True):
                self._gathered(engine, opts, into, given)

        return self._run(run, [tensor for into in lists for tensor in into], opts)

    def _gathered_whole(self, engine: _Engine, opts: Any, output: torch.Tensor, given: torch.Tensor) -> None:
        mine, whole = given.contiguous(), _Flat(output, False)
        sizes = self._counts([mine.nbytes] * engine.size)
        CALLS.allgather(engine.mesh.handle, self._collective(opts), mine.data_ptr() if mine.nbytes else None, whole.addr, sizes)
        whole.written()

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> _Work:
        self._fits(output, given)
        return self._run(lambda engine: self._gathered_whole(engine, opts, output, given), [output], opts)

    def all_gather_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> _Work:
        pairs = list(zip(outputs, inputs, strict=True))
        for output, given in pairs:
            self._fits(output, given)

        def run(engine: _Engine) -> None:
            for output, given in pairs:
                self._gathered_whole(engine, opts, output, given)

        return self._run(run, outputs, opts)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> _Work:
        given, root = _single(inputs), self._root(opts.rootRank)
        into = self._lists(outputs, given) if self._engine.rank == root else []

        def run(engine: _Engine) -> None:
            mine = given.contiguous()
            whole = _Parts(into) if into else None
            sizes = self._counts(whole.sizes if whole else [mine.nbytes] * engine.size)
            addr = mine.data_ptr() if mine.nbytes else None
            CALLS.gather(engine.mesh.handle, self._collective(opts, root=root), addr, whole and whole.addr, sizes)
            if whole:
                whole.written()

        return self._run(run, into, opts)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> _Work:
        output, root = _single(outputs), self._root(opts.rootRank)
        given = self._lists(inputs, output) if self._engine.rank == root else []

        def run(engine: _Engine) -> None:
            mine, whole = _Flat(output, False), _joined(given) if given else None
            sizes = self._counts([mine.flat.nbytes] * engine.size)
            addr = whole.data_ptr() if whole is not None and whole.nbytes else None
            CALLS.scatter(engine.mesh.handle, self._collective(opts, root=root), addr, mine.addr, sizes)
            mine.written()

        return self._run(run, outputs, opts)

    def _reduced_part(self, engine: _Engine, opts: Any, output: torch.Tensor, whole: torch.Tensor, how: _Reduction) -> None:
        if how.bitwise:
            output.copy_(self._reduce_here(engine, opts, whole, how.bitwise).view(engine.size, -1)[engine.rank].view(output.shape))
            return
        mine = _Flat(output, False)
        counts = self._counts([mine.flat.numel() * how.per_element] * engine.size)
        addr = whole.data_ptr() if whole.nbytes else None
        CALLS.reduce_scatter(engine.mesh.handle, self._collective(opts, how.dtype, how.op), addr, mine.addr, counts)
        how.finish(mine.flat, engine.size)
        mine.written()

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> _Work:
        output = _single(outputs)
        given, how = self._lists(inputs, output), _Reduction(opts.reduceOp, output)
        return self._run(lambda engine: self._reduced_part(engine, opts, output, _joined(given), how), outputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> _Work:
        self._fits(given, output)
        how = _Reduction(opts.reduceOp, output)
        return self._run(lambda engine: self._reduced_part(engine, opts, output, given.contiguous(), how), [output], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> _Work:
        pairs = list(zip(outputs, inputs, strict=True))
        for output, given in pairs:
            self._fits(given, output)
        hows = [_Reduction(opts.reduceOp, output) for output in outputs]

        def run(engine: _Engine) -> None:
            for (output, given), how in zip(pairs, hows, strict=True):
                self._reduced_part(engine, opts, output, given.contiguous(), how)

        return self._run(run, outputs, opts)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> _Work:
        _checked([*outputs, *inputs])
        if len(outputs) != self._engine.size or len(inputs) != self._engine.size:
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs; expected {self._engine.size} of each")

        def run(engine: _Engine) -> None:
            whole, given = _Parts(outputs), _joined(inputs)
            sent = self._counts([tensor.nbytes for tensor in inputs])
            addr = given.data_ptr() if given.nbytes else None
            CALLS.alltoall(engine.mesh.handle, self._collective(opts), addr, whole.addr, sent, self._counts(whole.sizes))
            whole.written()

        return self._run(run, outputs, opts)

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> _Work:
        _checked([output, given])
        sent, received = self._splits(given, input_splits), self._splits(output, output_splits)

        def run(engine: _Engine) -> None:
            whole, mine = _Flat(output, False), given.contiguous()
            addr = mine.data_ptr() if mine.nbytes else None
            CALLS.alltoall(engine.mesh.handle, self._collective(opts), addr, whole.addr, self._counts(sent), self._counts(received))
            whole.written()

        return self._run(run, [output], opts)

    def barrier(self, opts: Any = None) -> _Work:
        return self._run(lambda engine: _void(CALLS.barrier(engine.mesh.handle, self._collective(opts))), [], opts)

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that did not come, all of them in any case."""
        self.barrier(opts).wait()

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> _Work:
        return self._message(_single(tensors), [self._other(dst)], tag, True)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> _Work:
        return self._message(_single(tensors), [self._other(src)], tag, False)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> _Work:
        others = [rank for rank in range(self._engine.size) if rank != self._engine.rank]
        if not others:
            raise ValueError("a message from any rank; expected a group of more than one")
        return self._message(_single(tensors), others, tag, False)

    def _message(self, tensor: torch.Tensor, ranks: Sequence[int], tag: int, is_send: bool) -> _Work:
        try:
            work = _Message(_Exchange(self._engine, tensor, ranks, tag, is_send), tensor)
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

    def _lists(self, lists: list[list[torch.Tensor]], like: torch.Tensor) -> list[torch.Tensor]:
        if len(lists) != 1 or len(lists[0]) != self._engine.size:
            raise ValueError(f"lists of {[len(part) for part in lists]} tensors; expected one of {self._engine.size}")
        _checked(lists[0])
        for tensor in lists[0]:
            if tensor.dtype != like.dtype:
                raise ValueError(f"a tensor of {tensor.dtype} beside one of {like.dtype}; expected one type")
        return lists[0]

    def _fits(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        _checked([whole, part])
        if whole.numel() != part.numel() * self._engine.size or whole.dtype != part.dtype:
            raise ValueError(
                f"{whole.numel()} elements of {whole.dtype} for {self._engine.size} parts of {part.numel()} of {part.dtype}; "
                f"expected {part.numel() * self._engine.size} of that type"
            )

    def _splits(self, tensor: torch.Tensor, splits: list[int]) -> list[int]:
        """In bytes."""
        size, rows = self._engine.size, tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % size:
                raise ValueError(f"{rows} rows for {size} ranks; expected a multiple, or the sizes of their parts")
            splits = [rows // size] * size
        if len(splits) != size or sum(splits) != rows or min(splits) < 0:
            raise ValueError(f"parts of {splits} rows; expected one for each of {size} ranks, {rows} in all")
        row = tensor.nbytes // rows if rows else 0
        return [part * row for part in splits]

    # How torch has several calls be one. They run one after the other in any case.
    def start_coalescing(self) -> None:
        self._coalesced = []

    def end_coalescing(self) -> _Work:
        works, self._coalesced = self._coalesced or [], None
        return _All(works)

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


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of tensors, one behind the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


class _Parts:
    """Tensors that are written one behind the other: in place, where they lie so."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.sizes = [tensor.nbytes for tensor in tensors]
        ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
        self._in_place = all(tensor.is_contiguous() for tensor in tensors) and all(
            end == after.data_ptr() for end, after in zip(ends, tensors[1:], strict=False)
        )
        self._whole = torch.empty(0 if self._in_place else sum(self.sizes), dtype=torch.uint8)
        self.addr = (tensors[0] if self._in_place else self._whole).data_ptr() if sum(self.sizes) else None

    def written(self) -> None:
        if not self._in_place:
            parts = self._whole.split(self.sizes)  # type: ignore[no-untyped-call]
            for tensor, part in zip(self._tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape) if tensor.nbytes else tensor)


class _Device(_Calls, Backend):
    """A group's end for one kind of device, beside other backends. torch wraps its works: those can be waited for, and have futures."""

    def __init__(self, engine: _Engine) -> None:
        super().__init__(engine.rank, engine.size)
        self._engine = engine

    @property
    def supports_coalescing(self) -> bool:
        return False


class _Group(_Calls, dist.ProcessGroup):  # type: ignore[misc]
    """A whole group, which nothing else serves."""

    def __init__(self, engine: _Engine, store: Any) -> None:
        super().__init__(store, engine.rank, engine.size)
        self._engine = engine
        self._device = _Device(engine)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, self._device)

    # torch's own would ask the device's end, whose functions are not called here.
    def _start_coalescing(self, _device: torch.device) -> None:
        self.start_coalescing()

    def _end_coalescing(self, _device: torch.device) -> _Work:
        return self.end_coalescing()


def _create(options: Any, _backend_options: Any) -> _Device | _Group:
    engine = _Engine(options.store, options.group_rank, options.group_size, options.timeout)
    # Where another backend serves other devices, torch's own group is between it and this one.
    alone = options.process_group is None or options.process_group.name() == "custom"
    return _Group(engine, options.store) if alone else _Device(engine)


def register() -> None:
    """Has torch.distributed know the backend. Called on import, and by torch where the package is installed."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


register()
