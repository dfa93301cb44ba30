"""Ranks that compute together, for plain Python: collectives and messages over whatever has the buffer protocol, numpy's arrays among them,
without a copy. Any thread; see docs/mesh.md for the rules.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from railhead._library import CALLS, Collective, MeshConfig, milliseconds
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
# RAILHEAD_MESH_ADDRESS.
_ADDRESS = 16384
# The dtypes of the buffer protocol's formats, whose longs have 8 bytes on Linux.
_FORMATS = {
    "b": "i8", "B": "u8", "c": "u8", "?": "u8", "i": "i32", "I": "u32", "l": "i64", "q": "i64", "L": "u64", "Q": "u64", "e": "f16",
    "f": "f32", "d": "f64",
}  # fmt: skip


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
    """The bytes of an object, which nobody moves or frees while this is there."""

    def __init__(self, what: Any, dtype: str | None, writable: bool) -> None:
        view = memoryview(what)
        if not view.c_contiguous:
            raise ValueError("memory with gaps; expected contiguous bytes")
        if writable and view.readonly:
            raise ValueError("memory that cannot be written to")
        named = dtype or _FORMATS.get(view.format.lstrip("@=<"))
        if named not in DTYPES:
            raise ValueError(f"elements of format {view.format!r} or type {dtype!r}; expected one of {', '.join(DTYPES)}")
        self.dtype, size = DTYPES[named]
        if view.nbytes % size:
            raise ValueError(f"{view.nbytes} bytes of {named}; expected a multiple of {size}")
        self.bytes = view.nbytes
        self.count = view.nbytes // size
        # It holds the object's buffer.
        self._view = view
        self.writable = not view.readonly
        self.addr = _address(view) if view.nbytes else 0


def _counts(counts: Sequence[int]) -> ctypes.Array[ctypes.c_size_t]:
    return (ctypes.c_size_t * len(counts))(*counts)


class Mesh:
    """One rank's end. `timeout`, in seconds, is what operations have that are given none. `device`: as `railhead info` lists them; "": the first."""

    def __init__(self, rank: int, ranks: int, device: str = "", timeout: float = 30.0) -> None:
        config = MeshConfig(ctypes.sizeof(MeshConfig), rank, ranks, milliseconds(timeout, 0), 0)
        handle = ctypes.c_void_p()
        CALLS.mesh_create(ctypes.byref(config), device.encode(), ctypes.byref(handle))
        self.rank, self.ranks = rank, ranks
        self._handle: ctypes.c_void_p | None = handle
        self._pid = os.getpid()

    @property
    def handle(self) -> ctypes.c_void_p:
        """For the C interface."""
        if self._handle is None:
            raise ValueError("the mesh is closed")
        if self._pid != os.getpid():
            raise ValueError("the mesh is another process's, from which this one was forked")
        return self._handle

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
        return ctypes.byref(self.collective(memory.dtype, OPS[op], root, tag, milliseconds(timeout, 0)))

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
        parts = self._parts(counts, given.count, result.count)
        CALLS.reduce_scatter(self.handle, self._of(given, op, 0, tag, timeout), given.addr, result.addr, _counts(parts))

    def broadcast(self, data: Any, root: int = 0, tag: int = 0, timeout: float | None = None) -> None:
        """`data` becomes that of the root, as many bytes."""
        memory = _Memory(data, None, self.rank != root)
        collective = self.collective(root=root, tag=tag, timeout_ms=milliseconds(timeout, 0))
        CALLS.broadcast(self.handle, ctypes.byref(collective), memory.addr, memory.bytes)

    def allgather(
        self, data: Any, out: Any, counts: Sequence[int] | None = None, dtype: str | None = None, tag: int = 0, timeout: float | None = None
    ) -> None:
        """`out` becomes all ranks' `data` in order, each of `counts` elements, or equal ones."""
        given, result = _Memory(data, dtype, False), _Memory(out, dtype, True)
        parts = self._parts(counts, result.count, given.count)
        CALLS.allgather(self.handle, self._of(given, "sum", 0, tag, timeout), given.addr, result.addr, _counts(parts))

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
        given, result = _Memory(data, dtype, False), _Memory(out, dtype, True)
        sent, received = self._parts(send_counts, given.count, None), self._parts(recv_counts, result.count, None)
        collective = self._of(given, "sum", 0, tag, timeout)
        CALLS.alltoall(self.handle, collective, given.addr, result.addr, _counts(sent), _counts(received))

    def barrier(self, tag: int = 0, timeout: float | None = None) -> None:
        """Returns once all ranks have called it."""
        CALLS.barrier(self.handle, ctypes.byref(self.collective(tag=tag, timeout_ms=milliseconds(timeout, 0))))

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

    def unbound(self, data: Any) -> Unbound:
        """A buffer from which messages are sent, or into which they are received."""
        return Unbound(self, data)

    def close(self) -> None:
        """Ends the connections. A rank that waits for this one gets an error. In a forked child, and a second time, nothing happens."""
        handle, self._handle = self._handle, None
        if handle is not None and self._pid == os.getpid():
            CALLS.mesh_close(handle)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _same(given: _Memory, result: _Memory) -> None:
    if (given.dtype, given.count) != (result.dtype, result.count):
        raise ValueError(f"{result.count} elements for the result of {given.count}; expected as many, of the same type")


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
        return self._handle

    def send(self, rank: int, tag: int = 0, offset: int = 0, size: int | None = None) -> None:
        """Sends bytes, all by default, to a rank that receives as many with this tag. :meth:`wait_send` tells when they may change."""
        CALLS.unbound_send(self.handle, rank, tag, offset, self._memory.bytes - offset if size is None else size)

    def recv(self, ranks: int | Sequence[int], tag: int = 0, offset: int = 0, size: int | None = None) -> None:
        """Receives as many from whichever of the ranks has a message with this tag first. :meth:`wait_recv` tells when it is here."""
        if not self._memory.writable:
            raise ValueError("memory that cannot be written to")
        among = [ranks] if isinstance(ranks, int) else list(ranks)
        length = self._memory.bytes - offset if size is None else size
        CALLS.unbound_recv(self.handle, (ctypes.c_int64 * len(among))(*among), len(among), tag, offset, length)

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

    def close(self) -> None:
        """Ends it: nobody reads or writes the memory afterwards."""
        handle, self._handle = self._handle, None
        if handle is not None:
            CALLS.unbound_close(handle)
