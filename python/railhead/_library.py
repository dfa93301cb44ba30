"""The C library: found, checked, and its functions with their types. Used by the other modules of this package, on any thread."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What this package calls is the interface of these releases.
MAJOR, MINOR = 0, 1

# railhead_status_t.
OK, USAGE, NETWORK, TIMEOUT = 0, 5, 6, 8


class Error(RuntimeError):
    """What the library has said, and its status, a number of `railhead_status_t`."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class UsageError(Error, ValueError):
    """An argument, a setting, or a state of things that the caller can mend."""


class NetworkError(Error, ConnectionError):
    """A rank or the store's server is lost, or cannot be reached."""


class TimedOut(Error, TimeoutError):
    """What was waited for did not happen in time."""


ERRORS: dict[int, type[Error]] = {USAGE: UsageError, NETWORK: NetworkError, TIMEOUT: TimedOut}


class Bytes(ctypes.Structure):
    """railhead_bytes_t"""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class MeshConfig(ctypes.Structure):
    """railhead_mesh_config_t"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("rank", ctypes.c_int64),
        ("ranks", ctypes.c_int64),
        ("timeout_ms", ctypes.c_int64),
        ("flags", ctypes.c_uint64),
    )


class Collective(ctypes.Structure):
    """railhead_collective_t"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("tag", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
        ("op", ctypes.c_uint32),
        ("algorithm", ctypes.c_uint32),
        ("root", ctypes.c_int64),
        ("timeout_ms", ctypes.c_int64),
        ("custom", ctypes.c_void_p),
        ("user", ctypes.c_void_p),
    )


_POINTER, _TEXT, _SIZE, _I64 = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int64
_HANDLE = ctypes.POINTER(ctypes.c_void_p)
_COLLECTIVE, _COUNTS, _TEXTS = ctypes.POINTER(Collective), ctypes.POINTER(_SIZE), ctypes.POINTER(_TEXT)

# The functions that are called here, and what they take. All return a status.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "mesh_create": (ctypes.POINTER(MeshConfig), _TEXT, _HANDLE),
    "mesh_connect": (_POINTER, _POINTER),
    "mesh_fork": (_POINTER, _HANDLE),
    "mesh_address": (_POINTER, _I64, _POINTER, ctypes.POINTER(_SIZE)),
    "mesh_connect_pair": (_POINTER, _I64, _TEXT, _SIZE),
    "mesh_set_sync": (_POINTER, ctypes.c_int32),
    "mesh_close": (_POINTER,),
    "allreduce": (_POINTER, _COLLECTIVE, _POINTER, _POINTER, _SIZE),
    "reduce": (_POINTER, _COLLECTIVE, _POINTER, _POINTER, _SIZE),
    "reduce_scatter": (_POINTER, _COLLECTIVE, _POINTER, _POINTER, _COUNTS),
    "broadcast": (_POINTER, _COLLECTIVE, _POINTER, _SIZE),
    "allgather": (_POINTER, _COLLECTIVE, _POINTER, _POINTER, _COUNTS),
    "alltoall": (_POINTER, _COLLECTIVE, _POINTER, _POINTER, _COUNTS, _COUNTS),
    "gather": (_POINTER, _COLLECTIVE, _POINTER, _POINTER, _COUNTS),
    "scatter": (_POINTER, _COLLECTIVE, _POINTER, _POINTER, _COUNTS),
    "barrier": (_POINTER, _COLLECTIVE),
    "unbound_create": (_POINTER, _POINTER, _SIZE, _HANDLE),
    "unbound_send": (_POINTER, _I64, ctypes.c_uint64, _SIZE, _SIZE),
    "unbound_recv": (_POINTER, ctypes.POINTER(_I64), _SIZE, ctypes.c_uint64, _SIZE, _SIZE),
    "unbound_wait_send": (_POINTER, ctypes.POINTER(_I64), _I64),
    "unbound_wait_recv": (_POINTER, ctypes.POINTER(_I64), _I64),
    "unbound_test_send": (_POINTER, ctypes.POINTER(_I64), ctypes.POINTER(ctypes.c_int)),
    "unbound_test_recv": (_POINTER, ctypes.POINTER(_I64), ctypes.POINTER(ctypes.c_int)),
    "unbound_close": (_POINTER,),
    "store_hash": (_HANDLE,),
    "store_file": (_TEXT, _I64, _HANDLE),
    "store_prefix": (_TEXT, _POINTER, _HANDLE),
    "store_connect": (_TEXT, ctypes.c_uint16, _I64, _HANDLE),
    "store_serve": (_TEXT, ctypes.c_uint16, _HANDLE),
    "store_clone": (_POINTER, _HANDLE),
    "store_close": (_POINTER,),
    "store_port": (_POINTER, ctypes.POINTER(ctypes.c_uint16)),
    "store_set": (_POINTER, _TEXT, _TEXT, _SIZE),
    "store_get": (_POINTER, _TEXT, _I64, _HANDLE, ctypes.POINTER(_SIZE)),
    "store_wait": (_POINTER, _TEXTS, _SIZE, _I64),
    "store_check": (_POINTER, _TEXTS, _SIZE, ctypes.POINTER(ctypes.c_int)),
    "store_add": (_POINTER, _TEXT, _I64, ctypes.POINTER(_I64)),
    "store_compare_set": (_POINTER, _TEXT, Bytes, Bytes, _HANDLE, ctypes.POINTER(_SIZE)),
    "store_append": (_POINTER, _TEXT, _TEXT, _SIZE),
    "store_delete_key": (_POINTER, _TEXT, ctypes.POINTER(ctypes.c_int)),
    "store_num_keys": (_POINTER, ctypes.POINTER(_I64)),
    "store_barrier": (_POINTER, _TEXT, _I64, _I64),
}


def _find() -> str:
    """RAILHEAD_LIBRARY, or the library in this package, or whatever the loader finds."""
    named = os.environ.get("RAILHEAD_LIBRARY")
    carried = Path(__file__).with_name("librailhead.so")
    return named or (str(carried) if carried.exists() else "librailhead.so")


def _load(path: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"Railhead's library does not load: {error}; RAILHEAD_LIBRARY names another one") from error
    try:
        library.railhead_version.restype = ctypes.c_char_p
        version = library.railhead_version().decode()
    except AttributeError as error:
        raise ImportError(f"{path} is no library of Railhead's: {error}") from error
    if version.split(".")[:2] != [str(MAJOR), str(MINOR)]:
        raise ImportError(f"{path} is Railhead {version}; this package takes {MAJOR}.{MINOR}.x")
    return library


LIBRARY = _load(_find())
LIBRARY.railhead_last_error.restype = ctypes.c_char_p
LIBRARY.railhead_store_free.argtypes = (ctypes.c_void_p,)
LIBRARY.railhead_store_free.restype = None


def library_version() -> str:
    """The loaded library's: "major.minor.patch"."""
    version: bytes = LIBRARY.railhead_version()
    return version.decode()


def _check(status: int, _function: Any, _arguments: Any) -> int:
    if status != OK:
        text: bytes = LIBRARY.railhead_last_error()
        raise ERRORS.get(status, Error)(text.decode(errors="replace"), status)
    return status


def _function(name: str) -> Callable[..., int]:
    function = getattr(LIBRARY, f"railhead_{name}")
    function.argtypes = _FUNCTIONS[name]
    function.restype = ctypes.c_int32
    function.errcheck = _check
    return function  # type: ignore[no-any-return]


class _Calls:
    """The functions of the library by their names, without `railhead_`. Each raises what it has to say."""

    def __init__(self) -> None:
        for name in _FUNCTIONS:
            setattr(self, name, _function(name))

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(name)


CALLS = _Calls()


# The library's largest time, of some hundred million years.
_LONGEST_MS = 2**63 - 1


def milliseconds(timeout: float | None, default: int) -> int:
    """Seconds as the library takes them. None: `default`. At least one, as 0 is no time of one's own."""
    if timeout is None:
        return default
    if not timeout >= 0:
        raise ValueError(f"a time of {timeout} s; expected at least 0")
    return _LONGEST_MS if timeout * 1000 >= _LONGEST_MS else max(1, round(timeout * 1000))


def stays(what: object) -> None:
    """Keeps an object until the process ends, as the library may use its memory until then."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def within(what: str, number: int, low: int, high: int) -> int:
    """A number that is not cut to what the library takes."""
    if not low <= number <= high:
        raise ValueError(f"{what} {number}; expected {low} to {high}")
    return number


def text(what: str, given: str | bytes) -> bytes:
    """Text as the library takes it, which ends with a zero."""
    encoded = given.encode() if isinstance(given, str) else bytes(given)
    if b"\0" in encoded:
        raise ValueError(f"{what} {given!r}; expected one without a zero byte")
    return encoded
