"""A group's mesh and its threads: collectives one after the other, as all ranks call them in the same order, and messages beside them. Used by
railhead.torch.

A collective runs at once, on the thread that calls, if that waits for it and nothing is before it, and otherwise on a thread of the group's. While
callbacks of a work run, which may ask for collectives and wait for them, another thread goes on with what is queued.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from railhead import _library
from railhead._library import CALLS, stays
from railhead._works import Exchange, GroupThread, Work
from railhead.mesh import Mesh

NAME = "railhead"
# So long are the others told after the first rank of a monitored barrier has given up.
_GRACE_S = 5
# So many threads wait for what is queued, where more have returned from callbacks.
_THREADS = 2
# So long is the first pause before messages are looked at again that nobody waits for, and the longest.
_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.25


class Engine:
    """The group's mesh, and what runs on it."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        # Of no process, until there is something to close.
        self._pid = -1
        self.timeout_ms = max(1, round(timeout.total_seconds() * 1000))
        self.mesh = Mesh(rank, size, timeout=timeout.total_seconds())
        # Taken by itself: a signal's handler that raises in a condition's Python code would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[tuple[Callable[[], None], Work]] = deque()
        # Only one runs at a time.
        self._running: Work | None = None
        # Nothing is taken any more; and all that was asked for is over, and the mesh closed.
        self._is_closed = self._is_gone = False
        # Threads of the group that are not in callbacks.
        self._free = 0
        # Messages that nobody waits for.
        self._kept: list[Exchange] = []
        self._has_keeper = False
        self._monitored = 0
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
        self._store, self._keys = store, f"{NAME}/{turn}"
        deadline = time.monotonic() + timeout.total_seconds()
        addresses = {peer: self.mesh.address(peer) for peer in others}
        store.set(f"{self._keys}/{self.rank}", _packed([addresses.get(peer, b"") for peer in range(self.size)]))
        self._meet([f"{self._keys}/{peer}" for peer in others], deadline)
        for peer in others:
            self.mesh.connect_pair(peer, _unpacked(store.get(f"{self._keys}/{peer}"))[self.rank])
        store.set(f"{self._keys}/{self.rank}/connected", b"1")
        self._meet([f"{self._keys}/{peer}/connected" for peer in others], deadline)
        # What cannot be reached is said here rather than by the first collective.
        given, taken = ctypes.create_string_buffer(self.size), ctypes.create_string_buffer(self.size)
        each = (ctypes.c_size_t * self.size)(*[1] * self.size)
        try:
            CALLS.alltoall(self.mesh.handle, ctypes.byref(self.mesh.collective()), given, taken, each, each)
        except _library.Error as error:
            raise self.told(error) from error

    def _meet(self, keys: list[str], deadline: float) -> None:
        if not keys:
            return
        try:
            self._store.wait(keys, timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            missing = [key.split("/")[2] for key in keys if not self._store.check([key])]
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

    def run(self, what: Callable[[], None], result: list[torch.Tensor], at_once: bool) -> Work:
        """Runs it after all that came before."""
        if self._pid != os.getpid():
            raise dist.DistBackendError("the group is another process's, which has forked this one")
        work = Work(result)
        try:
            with self._lock:
                if self._is_closed:
                    raise dist.DistBackendError("the group was destroyed")
                if not at_once or self._running is not None or self._queue:
                    try:
                        self._have_a_thread()
                    except RuntimeError as error:
                        raise dist.DistBackendError(f"no thread for what the group is asked for, which was not begun: {error}") from error
                    self._queue.append((what, work))
                    self._changed.notify_all()
                    return work
                self._running = work
            self._do(what, work)
        except BaseException:
            self._release(work)
            raise
        return work

    def _release(self, work: Work) -> None:
        """Lets the next one run. It may be called again: a signal's handler may raise anywhere on the main thread."""
        if self._running is work:
            self._running = None
        with self._lock:
            # A thread that is woken in vain takes the interpreter's lock from whoever asks for the next one.
            if self._queue or self._is_closed:
                self._changed.notify_all()

    def _have_a_thread(self) -> None:
        if self._free == 0:
            # It does not keep the group.
            GroupThread("group", _serve, weakref.ref(self), self._changed).start()
            self._free += 1

    def _do(self, what: Callable[[], None], work: Work) -> bool:
        """Whether callbacks are to be told."""
        error: BaseException | None = None
        try:
            what()
        except BaseException as failure:
            error = self.told(failure)
        self._release(work)
        return work.end(error)

    def _call_back(self, work: Work) -> bool:
        """Whether the thread is to go on."""
        with self._lock:
            self._free -= 1
            if self._queue:
                # Without one, what is queued waits for the callbacks.
                with suppress(RuntimeError):
                    self._have_a_thread()
        work.tell()
        with self._lock:
            is_needed = self._free < _THREADS
            self._free += is_needed
            return is_needed

    def keep(self, exchange: Exchange) -> None:
        """Keeps the memory of a message that nobody waits for until it is over."""
        if self._pid != os.getpid():
            return
        if sys.is_finalizing():
            stays(exchange)
            return
        with self._lock:
            is_gone = self._is_gone
            if not is_gone:
                self._kept.append(exchange)
                if not self._has_keeper:
                    # Without one it stays until there is one, or until the group ends.
                    with suppress(RuntimeError):
                        GroupThread("kept", _finish_kept, weakref.ref(self), self._changed).start()
                        self._has_keeper = True
        if is_gone:
            exchange.finish()

    def _close_mesh(self) -> None:
        """And ends all that is kept, of which nothing is waited for then."""
        self.mesh.close()
        with self._lock:
            self._is_gone = True
            kept, self._kept = self._kept, []
        for exchange in kept:
            exchange.finish()

    def monitored_barrier(self, timeout: timedelta | None) -> None:
        """A barrier through the store: it harms nothing if ranks do not come, and all are told which."""
        seconds = self.timeout_ms / 1000 if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
        keys, self._monitored = f"{self._keys}/monitored/{self._monitored}", self._monitored + 1
        ranks = [f"{keys}/{peer}" for peer in range(self.size)]
        self._store.set(ranks[self.rank], b"1")
        if self.rank == 0:
            with suppress(RuntimeError):
                self._store.wait(ranks, timedelta(seconds=seconds))
            missing = [str(peer) for peer in range(self.size) if not self._store.check([ranks[peer]])]
            self._store.set(f"{keys}/missing", ", ".join(missing).encode())
        else:
            # Which waits as long for the others.
            try:
                self._store.wait([f"{keys}/missing"], timedelta(seconds=seconds + _GRACE_S))
            except RuntimeError as error:
                raise dist.DistBackendError(f"monitored barrier: rank {self.rank} waited for rank 0 for {seconds} s") from error
        missing_ranks = self._store.get(f"{keys}/missing").decode()
        if missing_ranks:
            raise dist.DistBackendError(f"monitored barrier: rank {missing_ranks} of {self.size} did not come within {seconds} s")
        if self.rank == 0:
            # All have read what the one before has left.
            before = f"{self._keys}/monitored/{self._monitored - 2}"
            for key in [*range(self.size), "missing"]:
                self._store.delete_key(f"{before}/{key}")

    def close(self) -> None:
        """Ends it once what was asked for is over. In a forked child nothing happens."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        while self._do_next():
            pass
        self._close_mesh()

    def _do_next(self) -> bool:
        """Does the next of what is queued, or waits for another thread to do so: whether there was any."""
        work = None
        try:
            with self._lock:
                if self._running is not None:
                    self._changed.wait()
                    return True
                if not self._queue:
                    return False
                what, work = self._queue.popleft()
                self._running = work
            tells = self._do(what, work)
        except BaseException as failure:
            if work is not None:
                self._release(work)
                work.end(failure)
            raise
        if tells:
            work.tell()
        return True

    def abort(self) -> None:
        """Ends it at once: what runs fails, and so does what has not begun."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._is_closed = True
            left, self._queue = list(self._queue), deque()
        self.mesh.close()
        for _, work in left:
            if work.end(dist.DistBackendError("the group was destroyed")):
                work.tell()
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()
        elif self._pid == os.getpid():
            # The threads are gone, so that nothing can be waited for; the others are told.
            self.mesh.close()


def _serve(thread: GroupThread, engine_of: weakref.ref[Engine], changed: threading.Condition) -> None:
    """A thread of a group: runs what is queued, until the group is closed or gone."""
    while True:
        with changed:
            engine = engine_of()
            if engine is None or (engine._is_closed and not engine._queue):
                return
            if engine._running is not None or not engine._queue:
                # Nothing of the group is kept meanwhile; its end is told.
                del engine
                # This may have been the last that had it, and has told so then.
                if engine_of() is not None:
                    thread.waits(changed.wait)
                continue
            what, work = engine._queue.popleft()
            engine._running = work
        if engine._do(partial(thread.waits, what), work) and not engine._call_back(work):
            return
        del engine, what, work


def _finish_kept(thread: GroupThread, engine_of: weakref.ref[Engine], changed: threading.Condition) -> None:
    """A thread of a group: looks at the messages that nobody waits for, until all are over."""
    pause = _PAUSE_S
    while True:
        with changed:
            engine = engine_of()
            if engine is None or not engine._kept:
                if engine is not None:
                    engine._has_keeper = False
                return
            kept = list(engine._kept)
        pause = _PAUSE_S if any([exchange.test() for exchange in kept]) else min(2 * pause, _LONGEST_PAUSE_S)
        with changed:
            engine._kept = [exchange for exchange in engine._kept if not exchange.is_over]
        # Nothing of the group is kept meanwhile.
        del engine, kept
        thread.waits(partial(time.sleep, pause))


def _packed(parts: Sequence[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def _unpacked(whole: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(whole):
        end = at + 4 + int.from_bytes(whole[at : at + 4], "little")
        parts.append(whole[at + 4 : end])
        at = end
    return parts
