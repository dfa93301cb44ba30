"""Ranks that compute together, for plain Python: collectives and messages over whatever has the buffer protocol, numpy's arrays among them,
without a copy. Any thread; see docs/mesh.md for the rules.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from railhead._library import CALLS, USAGE, Collective, Error, MeshConfig, UsageError, milliseconds, stays, text, within
from railhead.store import Store

# railhead_dtype_t, and the bytes of an element.
DTYPES = {
    "i8": (0, 1),
    "u8": (1, 1),
    "i32": (2, 4),
    "u32": (3, 4),
    "i64": (4, 8),
    "u64": (5, 8),
    "f16": (6, 2),
    "bf16": (7, 2),
    "f32": (8, 4),
    "f64": (9, 8),
}
# railhead_op_t.
OPS = {"sum": 0, "product": 1, "min": 2, "max": 3}
_BYTES = DTYPES["u8"][0]
# RAILHEAD_MESH_ADDRESS.
_ADDRESS = 16384
# What the buffer protocol's formats are, beside their bytes: these differ between machines and between prefixes.
_KINDS = dict.fromkeys("bhilqn", "i") | dict.fromkeys("BHILQN?c", "u") | dict.fromkeys("efdg", "f")
# Of booleans, which are bytes of 0 and 1.
_OF_BOOLEANS = {"sum": "max", "product": "min"}


class _Buffer(ctypes.Structure):
    """Py_buffer of CPython (Include/pybuffer.h), whose first field is where the bytes are."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        *((name, ctypes.c_void_p) for name in ("shape", "strides", "suboffsets", "internal")),
    )


def _address(view: memoryview) -> int:
    """Where the bytes of a contiguous view are, also of one that cannot be written to."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


class _Memory:
    """The bytes of an object, which nobody moves or frees while this is there. Those that are only `moved` may be elements of any type."""

    def __init__(self, what: Any, dtype: str | None, writable: bool, moved: bool = False) -> None:
        view = memoryview(what)
        if not view.c_contiguous:
            raise ValueError("memory with gaps; expected contiguous bytes")
        if writable and view.readonly:
            raise ValueError("memory that cannot be written to")
        code = view.format.lstrip("@=<")
        self.is_boolean = dtype is None and code == "?"
        named = dtype or f"{_KINDS.get(code)}{view.itemsize * 8}"
        if named in DTYPES:
            self.dtype, self.size = DTYPES[named]
        elif moved and dtype is None:
            self.size = view.itemsize
        else:
            raise ValueError(f"elements of format {view.format!r} or type {dtype!r}; expected one of {', '.join(DTYPES)}")
        if moved:
            self.dtype, self.is_boolean = _BYTES, False
        if view.nbytes % self.size:
            raise ValueError(f"{view.nbytes} bytes of {named}; expected a multiple of {self.size}")
        self.bytes = view.nbytes
        self.count = view.nbytes // self.size
        # It holds the object's buffer.
        self._view = view
        self.writable = not view.readonly
        self.addr = _address(view) if view.nbytes else 0

    def overlaps(self, other: _Memory) -> bool:
        return self.addr < other.addr + other.bytes and other.addr < self.addr + self.bytes


def _counts(counts: Sequence[int], size: int = 1) -> ctypes.Array[ctypes.c_size_t]:
    return (ctypes.c_size_t * len(counts))(*(count * size for count in counts))


def _tag(tag: int) -> int:
    return within("tag", tag, 0, 2**32 - 1)


class Mesh:
    """One rank's end. `timeout`, in seconds, is what operations have that are given none. `device`: as `railhead info` lists them; "": the first."""

    def __init__(self, rank: int, ranks: int, device: str = "", timeout: float = 30.0) -> None:
        self._handle: ctypes.c_void_p | None = None
        config = MeshConfig(ctypes.sizeof(MeshConfig), rank, ranks, milliseconds(timeout, 0), 0)
        handle = ctypes.c_void_p()
        CALLS.mesh_create(ctypes.byref(config), text("device", device), ctypes.byref(handle))
        self.rank, self.ranks = rank, ranks
        self._handle = handle
        self._pid = os.getpid()

    @property
    def handle(self) -> ctypes.c_void_p:
        """For the C interface."""
        if self._handle is None:
            raise UsageError("the mesh is closed", USAGE)
        if not self.is_here:
            raise ValueError("the mesh is another process's, from which this one was forked")
        return self._handle

    @property
    def is_here(self) -> bool:
        """Whether this process has made it."""
        return self._pid == os.getpid()

    def connect(self, store: Store) -> None:
        """Connects to all other ranks, each of which calls it, through a store whose keys nobody else uses."""
        CALLS.mesh_connect(self.handle, store.handle)

    def address(self, peer: int) -> bytes:
        """What `peer` needs for :meth:`connect_pair`, where ranks tell each other by means of their own. A secret."""
        address, size = ctypes.create_string_buffer(_ADDRESS), ctypes.c_size_t(_ADDRESS)
        CALLS.mesh_address(self.handle, peer, address, ctypes.byref(size))
        return address.raw[: size.value]

    def connect_pair(self, peer: int, address: bytes) -> None:
        """Connects to a rank whose address towards this one is given. Both have done so before either sends or receives."""
        CALLS.mesh_connect_pair(self.handle, peer, address, len(address))

    def set_sync(self, busy: bool) -> None:
        """Whether who waits polls without end: less delay, and a core that does nothing else."""
        CALLS.mesh_set_sync(self.handle, int(busy))

    def collective(self, dtype: int = 1, op: int = 0, root: int = 0, tag: int = 0, timeout_ms: int = 0) -> Collective:
        """What the C interface's collectives take."""
        return Collective(ctypes.sizeof(Collective), tag, dtype, op, 0, root, timeout_ms, None, None)

    def _of(self, memory: _Memory, op: str, root: int, tag: int, timeout: float | None) -> Any:
        if op not in OPS:
            raise ValueError(f"reduction {op!r}; expected one of {', '.join(OPS)}")
        number = OPS[_OF_BOOLEANS.get(op, op) if memory.is_boolean else op]
        return ctypes.byref(self.collective(memory.dtype, number, self._root(root), _tag(tag), milliseconds(timeout, 0)))

    def _moved(self, root: int, tag: int, timeout: float | None) -> Any:
        return ctypes.byref(self.collective(_BYTES, 0, self._root(root), _tag(tag), milliseconds(timeout, 0)))

    def _root(self, root: int) -> int:
        return within("root", root, 0, self.ranks - 1)

    def allreduce(self, data: Any, out: Any = None, op: str = "sum", dtype: str | None = None, tag: int = 0, timeout: float | None = None) -> None:
        """`out`, or else `data`, becomes the reduction of all ranks' `data`, with the same bits on each."""
        given, result = _Memory(data, dtype, out is None), _Memory(data if out is None else out, dtype, True)
        _same(given, result)
        CALLS.allreduce(self.handle, self._of(given, op, 0, tag, timeout), given.addr, result.addr, given.count)

    def reduce(
        self,
        data: Any,
        out: Any = None,
        root: int = 0,
        op: str = "sum",
        dtype: str | None = None,
        tag: int = 0,
        timeout: float | None = None,
    ) -> None:
        """`out` of the root, or else its `data`, becomes the reduction of all ranks' `data`."""
        is_root = self.rank == root
        given = _Memory(data, dtype, is_root and out is None)
        result = _Memory(data if out is None else out, dtype, True) if is_root else None
        if result:
            _same(given, result)
        CALLS.reduce(self.handle, self._of(given, op, root, tag, timeout), given.addr, result and result.addr, given.count)

    def reduce_scatter(
        self,
        data: Any,
        out: Any,
        counts: Sequence[int] | None = None,
        op: str = "sum",
        dtype: str | None = None,
        tag: int = 0,
        timeout: float | None = None,
    ) -> None:
        """`out` becomes this rank's part of the reduction of all ranks' `data`, whose parts of `counts` elements, or equal ones, lie in order."""
        given, result = _Memory(data, dtype, False), _Memory(out, dtype, True)
        _same_type(given, result)
        parts = self._parts(counts, given.count, result.count)
        CALLS.reduce_scatter(self.handle, self._of(given, op, 0, tag, timeout), given.addr, result.addr, _counts(parts))

    def broadcast(self, data: Any, root: int = 0, tag: int = 0, timeout: float | None = None) -> None:
        """`data` becomes that of the root, as many bytes."""
        memory = _Memory(data, None, self.rank != root, moved=True)
        CALLS.broadcast(self.handle, self._moved(root, tag, timeout), memory.addr, memory.bytes)

    def allgather(
        self, data: Any, out: Any, counts: Sequence[int] | None = None, dtype: str | None = None, tag: int = 0, timeout: float | None = None
    ) -> None:
        """`out` becomes all ranks' `data` in order, each of `counts` elements, or equal ones."""
        given, result = _Memory(data, dtype, False, moved=True), _Memory(out, dtype, True, moved=True)
        _same_type(given, result)
        parts = self._parts_of(result, given, counts)
        CALLS.allgather(self.handle, self._moved(0, tag, timeout), given.addr, result.addr, _counts(parts, given.size))

    def gather(
        self,
        data: Any,
        out: Any = None,
        root: int = 0,
        counts: Sequence[int] | None = None,
        dtype: str | None = None,
        tag: int = 0,
        timeout: float | None = None,
    ) -> None:
        """`out` of the root, of the others nothing, becomes all ranks' `data` in order, each of `counts` elements, or equal ones."""
        given, result = _Memory(data, dtype, False, moved=True), self._roots(out, root, dtype, True)
        self._exchange(CALLS.gather, given, result, given, result, root, counts, tag, timeout)

    def scatter(
        self,
        data: Any,
        out: Any,
        root: int = 0,
        counts: Sequence[int] | None = None,
        dtype: str | None = None,
        tag: int = 0,
        timeout: float | None = None,
    ) -> None:
        """`out` becomes this rank's part of `data`, which the root has, and nobody else, in parts of `counts` elements, or equal ones."""
        whole, part = self._roots(data, root, dtype, False), _Memory(out, dtype, True, moved=True)
        self._exchange(CALLS.scatter, part, whole, whole, part, root, counts, tag, timeout)

    def _roots(self, memory: Any, root: int, dtype: str | None, writable: bool) -> _Memory | None:
        return _Memory(memory, dtype, writable, moved=True) if self.rank == self._root(root) else None

    def _exchange(
        self,
        call: Callable[..., int],
        part: _Memory,
        whole: _Memory | None,
        given: _Memory | None,
        result: _Memory | None,
        root: int,
        counts: Sequence[int] | None,
        tag: int,
        timeout: float | None,
    ) -> None:
        """Between the root's whole and each rank's part of it, from what is given to the result."""
        if whole:
            _same_type(part, whole)
            parts = self._parts_of(whole, part, counts)
        else:
            parts = self._parts(counts, part.count * self.ranks if counts is None else sum(counts), part.count)
        call(self.handle, self._moved(root, tag, timeout), given and given.addr, result and result.addr, _counts(parts, part.size))

    def alltoall(
        self,
        data: Any,
        out: Any,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        dtype: str | None = None,
        tag: int = 0,
        timeout: float | None = None,
    ) -> None:
        """The parts of `data` go to the ranks, in order; `out` becomes what each has for this one."""
        given, result = _Memory(data, dtype, False, moved=True), _Memory(out, dtype, True, moved=True)
        _same_type(given, result)
        _apart(given, result)
        sent, received = self._parts(send_counts, given.count, None), self._parts(recv_counts, result.count, None)
        collective = self._moved(0, tag, timeout)
        CALLS.alltoall(self.handle, collective, given.addr, result.addr, _counts(sent, given.size), _counts(received, given.size))

    def barrier(self, tag: int = 0, timeout: float | None = None) -> None:
        """Returns once all ranks have called it."""
        CALLS.barrier(self.handle, self._moved(0, tag, timeout))

    def _parts(self, counts: Sequence[int] | None, whole: int, own: int | None) -> list[int]:
        """The parts of so many elements in all, of which this rank's has `own`."""
        if counts is None:
            if whole % self.ranks:
                raise ValueError(f"{whole} elements for {self.ranks} ranks; expected a multiple, or counts")
            counts = [whole // self.ranks] * self.ranks
        if len(counts) != self.ranks or sum(counts) != whole or min(counts) < 0:
            raise ValueError(f"counts {list(counts)}; expected one for each of {self.ranks} ranks, {whole} in all")
        if own is not None and counts[self.rank] != own:
            raise ValueError(f"{own} elements of rank {self.rank}; expected {counts[self.rank]}")
        return list(counts)

    def _parts_of(self, whole: _Memory, own: _Memory, counts: Sequence[int] | None) -> list[int]:
        """The same, where this rank's own part is in its place, or elsewhere."""
        parts = self._parts(counts, whole.count, own.count)
        if own.addr != whole.addr + sum(parts[: self.rank]) * own.size:
            _apart(own, whole)
        return parts

    def unbound(self, data: Any) -> Unbound:
        """A buffer from which messages are sent, or into which they are received."""
        return Unbound(self, data)

    def close(self) -> None:
        """Ends the connections. A rank that waits for this one gets an error. In a forked child, and a second time, nothing happens."""
        handle, self._handle = self._handle, None
        if handle is not None and self.is_here:
            CALLS.mesh_close(handle)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        # What is not made has none.
        if getattr(self, "_handle", None) is not None and not sys.is_finalizing():
            with suppress(Error):
                self.close()


def _same(given: _Memory, result: _Memory) -> None:
    _same_type(given, result)
    if given.count != result.count:
        raise ValueError(f"{result.count} elements for the result of {given.count}; expected as many")
    if given.addr != result.addr:
        _apart(given, result)


def _same_type(given: _Memory, result: _Memory) -> None:
    if (given.dtype, given.size, given.is_boolean) != (result.dtype, result.size, result.is_boolean):
        raise ValueError("a result of another type; expected that of the data")


def _apart(given: _Memory, result: _Memory) -> None:
    if given.overlaps(result):
        raise ValueError("a result that shares memory with the data; expected other memory, or the same place")


class Unbound:
    """A buffer for messages between ranks. Its memory stays as it is until :meth:`close`."""

    def __init__(self, mesh: Mesh, data: Any) -> None:
        self._memory = _Memory(data, "u8", False)
        self._mesh = mesh
        handle = ctypes.c_void_p()
        CALLS.unbound_create(mesh.handle, self._memory.addr, self._memory.bytes, ctypes.byref(handle))
        self._handle: ctypes.c_void_p | None = handle

    @property
    def handle(self) -> ctypes.c_void_p:
        """For the C interface."""
        if self._handle is None:
            raise ValueError("the buffer is closed")
        if not self._mesh.is_here:
            raise ValueError("the buffer is another process's, from which this one was forked")
        return self._handle

    def _length(self, offset: int, size: int | None) -> int:
        rest = self._memory.bytes - within("offset", offset, 0, self._memory.bytes)
        return rest if size is None else within("size", size, 0, rest)

    def send(self, rank: int, tag: int = 0, offset: int = 0, size: int | None = None) -> None:
        """Sends bytes, all by default, to a rank that receives as many with this tag. :meth:`wait_send` tells when they may change."""
        length = self._length(offset, size)
        CALLS.unbound_send(self.handle, rank, within("tag", tag, 0, 2**64 - 1), offset, length)

    def recv(self, ranks: int | Sequence[int], tag: int = 0, offset: int = 0, size: int | None = None) -> None:
        """Receives as many from whichever of the ranks has a message with this tag first. :meth:`wait_recv` tells when it is here."""
        if not self._memory.writable:
            raise ValueError("memory that cannot be written to")
        among = list(ranks) if isinstance(ranks, Sequence) else [ranks]
        length = self._length(offset, size)
        each = (ctypes.c_int64 * len(among))(*among)
        CALLS.unbound_recv(self.handle, each, len(among), within("tag", tag, 0, 2**64 - 1), offset, length)

    def wait_send(self, timeout: float | None = None) -> int:
        """Waits for one of the sends: the rank that it went to."""
        rank = ctypes.c_int64()
        CALLS.unbound_wait_send(self.handle, ctypes.byref(rank), milliseconds(timeout, 0))
        return rank.value

    def wait_recv(self, timeout: float | None = None) -> int:
        """Waits for one of the receives: the rank that has sent it."""
        rank = ctypes.c_int64()
        CALLS.unbound_wait_recv(self.handle, ctypes.byref(rank), milliseconds(timeout, 0))
        return rank.value

    def test_send(self) -> int | None:
        """The rank that one of the sends went to, if it is done and nobody was told of it. Returns at once."""
        return self._test(CALLS.unbound_test_send)

    def test_recv(self) -> int | None:
        """The rank that has sent one of the receives, if it is here and nobody was told of it. Returns at once."""
        return self._test(CALLS.unbound_test_recv)

    def _test(self, test: Callable[..., int]) -> int | None:
        rank, done = ctypes.c_int64(), ctypes.c_int()
        test(self.handle, ctypes.byref(rank), ctypes.byref(done))
        return rank.value if done.value else None

    def close(self) -> None:
        """Ends it: nobody reads or writes the memory afterwards."""
        handle, self._handle = self._handle, None
        if handle is not None and self._mesh.is_here:
            CALLS.unbound_close(handle)

    def __enter__(self) -> Unbound:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        # What is not made has none. The memory goes with this, unless its mesh may go on for longer.
        if getattr(self, "_handle", None) is None:
            return
        if sys.is_finalizing():
            stays(self._memory)
            return
        with suppress(Error):
            self.close()
