"""The store in which ranks meet: a TCPStore's server and clients, torch's or Railhead's, a file, or one within this process. Any thread; whoever
waits in a handle keeps others that use the same one waiting, so a thread takes a `clone()` of its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from types import TracebackType

from railhead._library import CALLS, LIBRARY, Bytes, milliseconds, text, within

Value = bytes | bytearray | memoryview
# Without limit.
_FOR_EVER = -1


def _key(key: str | bytes) -> bytes:
    return text("key", key)


def _keys(keys: Sequence[str | bytes]) -> ctypes.Array[ctypes.c_char_p]:
    if isinstance(keys, str | bytes):
        raise TypeError(f"key {keys!r}; expected a list of keys")
    return (ctypes.c_char_p * len(keys))(*map(_key, keys))


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        raise TypeError(f"value {value!r}; expected bytes")
    return bytes(memoryview(value))


def _taken(value: ctypes.c_void_p, size: ctypes.c_size_t) -> bytes:
    try:
        return ctypes.string_at(value, size.value) if size.value else b""
    finally:
        LIBRARY.railhead_store_free(value)


class Store:
    """A handle on a store; see docs/store.md. Timeouts are in seconds; None: for ever. Errors are :class:`railhead.Error`."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        """Takes a handle; :meth:`hash`, :meth:`file`, :meth:`connect` and :meth:`serve` make them."""
        self._handle: ctypes.c_void_p | None = handle
        self._pid = os.getpid()

    @classmethod
    def hash(cls) -> Store:
        """One within this process."""
        handle = ctypes.c_void_p()
        CALLS.store_hash(ctypes.byref(handle))
        return cls(handle)

    @classmethod
    def file(cls, path: str | os.PathLike[str], world_size: int = 0) -> Store:
        """In a file, in torch's format. The last of `world_size` stores removes it when it is closed; 0: nobody does."""
        handle = ctypes.c_void_p()
        CALLS.store_file(text("path", os.fspath(path)), world_size, ctypes.byref(handle))
        return cls(handle)

    @classmethod
    def connect(cls, host: str, port: int, timeout: float | None = None) -> Store:
        """On the server of a TCPStore, which is tried until the time is over."""
        handle = ctypes.c_void_p()
        CALLS.store_connect(text("host", host), within("port", port, 0, 65535), milliseconds(timeout, _FOR_EVER), ctypes.byref(handle))
        return cls(handle)

    @classmethod
    def serve(cls, address: str | None = None, port: int = 0) -> Store:
        """Starts such a server in this process. `address` None: all. `port` 0: any; see :attr:`port`."""
        handle = ctypes.c_void_p()
        CALLS.store_serve(text("address", address) if address else None, within("port", port, 0, 65535), ctypes.byref(handle))
        return cls(handle)

    @property
    def handle(self) -> ctypes.c_void_p:
        """For the C interface."""
        if self._handle is None:
            raise ValueError("the store is closed")
        return self._handle

    @property
    def port(self) -> int:
        """The server's."""
        port = ctypes.c_uint16()
        CALLS.store_port(self.handle, ctypes.byref(port))
        return port.value

    def prefix(self, prefix: str | bytes) -> Store:
        """A name space: its key k is `prefix`/k here."""
        handle = ctypes.c_void_p()
        CALLS.store_prefix(text("prefix", prefix), self.handle, ctypes.byref(handle))
        return Store(handle)

    def clone(self) -> Store:
        """Another handle, with a connection of its own."""
        handle = ctypes.c_void_p()
        CALLS.store_clone(self.handle, ctypes.byref(handle))
        return Store(handle)

    def set(self, key: str | bytes, value: Value) -> None:
        """Stores a value, in place of any other."""
        given = _value(value)
        CALLS.store_set(self.handle, _key(key), given, len(given))

    def get(self, key: str | bytes, timeout: float | None = None) -> bytes:
        """Waits until there is a value."""
        value, size = ctypes.c_void_p(), ctypes.c_size_t()
        wait = milliseconds(timeout, _FOR_EVER)
        CALLS.store_get(self.handle, _key(key), wait, ctypes.byref(value), ctypes.byref(size))
        return _taken(value, size)

    def wait(self, keys: Sequence[str | bytes], timeout: float | None = None) -> None:
        """Waits until all of them are there."""
        CALLS.store_wait(self.handle, _keys(keys), len(keys), milliseconds(timeout, _FOR_EVER))

    def check(self, keys: Sequence[str | bytes]) -> bool:
        """Whether all of them are there."""
        exist = ctypes.c_int()
        CALLS.store_check(self.handle, _keys(keys), len(keys), ctypes.byref(exist))
        return bool(exist.value)

    def add(self, key: str | bytes, delta: int) -> int:
        """Adds to a number, which begins at 0: the sum."""
        total = ctypes.c_int64()
        CALLS.store_add(self.handle, _key(key), within("delta", delta, -(2**63), 2**63 - 1), ctypes.byref(total))
        return total.value

    def compare_set(self, key: str | bytes, expected: Value, desired: Value) -> bytes:
        """Stores `desired` if the value is `expected`, or if there is none and that is empty: the value afterwards."""
        value, size = ctypes.c_void_p(), ctypes.c_size_t()
        # They are kept until the call is over.
        parts = [ctypes.create_string_buffer(part, len(part)) for part in map(_value, (expected, desired))]
        words = [Bytes(ctypes.addressof(part), ctypes.sizeof(part)) for part in parts]
        CALLS.store_compare_set(self.handle, _key(key), *words, ctypes.byref(value), ctypes.byref(size))
        return _taken(value, size)

    def append(self, key: str | bytes, value: Value) -> None:
        """Appends to a value, which begins empty."""
        given = _value(value)
        CALLS.store_append(self.handle, _key(key), given, len(given))

    def delete_key(self, key: str | bytes) -> bool:
        """Removes a key: whether it was there."""
        existed = ctypes.c_int()
        CALLS.store_delete_key(self.handle, _key(key), ctypes.byref(existed))
        return bool(existed.value)

    def num_keys(self) -> int:
        """How many there are, the store's own among them."""
        count = ctypes.c_int64()
        CALLS.store_num_keys(self.handle, ctypes.byref(count))
        return count.value

    def barrier(self, key: str | bytes, world_size: int, timeout: float | None = None) -> None:
        """Waits until so many have come. A key serves once."""
        CALLS.store_barrier(self.handle, _key(key), world_size, milliseconds(timeout, _FOR_EVER))

    def close(self) -> None:
        """Ends the handle. In a forked child, and a second time, nothing happens."""
        handle, self._handle = self._handle, None
        if handle is not None and self._pid == os.getpid():
            CALLS.store_close(handle)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        # What is not made has none.
        if getattr(self, "_handle", None) is not None and not sys.is_finalizing():
            self.close()
