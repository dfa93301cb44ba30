"""Works: what torch's programs wait for. Collectives' end when the group's thread says so; messages' when somebody has waited for them, or
looked. Used by railhead.torch, on any thread.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# That of its Python classes.
from torch._C._distributed_c10d import Work as TorchWork

from railhead import _library
from railhead._library import CALLS
from railhead._tensors import Flat

if TYPE_CHECKING:
    from railhead._engine import Engine

# What torch means by no time of its own, and by a wait without limit.
UNSET = timedelta(milliseconds=-1)
NO_LIMIT = timedelta(0)
# So long is the first pause of who looks at a message again and again, and the longest.
_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
# So long does the program's end wait for callbacks.
_END_S = 5


class GroupThread(threading.Thread):
    """A thread of a group's, which its target is given first. The interpreter's end is fatal to a thread that is in torch's code and asks for the
    interpreter's lock, as it does at the end of callbacks and of works: so the program's end waits for those that are busy.
    """

    def __init__(self, name: str, target: Callable[..., None], *args: Any) -> None:
        super().__init__(name=f"railhead-{name}", target=target, args=(self, *args), daemon=True)
        self._is_busy = True

    def waits(self, call: Callable[[], object]) -> None:
        """Calls what may take for ever, for which the program's end does not wait."""
        self._is_busy = False
        try:
            call()
        finally:
            self._is_busy = True

    def ends(self, until: float) -> None:
        """Waits while it is busy."""
        while self._is_busy and self.is_alive() and time.monotonic() < until:
            time.sleep(_LONGEST_PAUSE_S)


@atexit.register
def _end() -> None:
    until = time.monotonic() + _END_S
    for thread in threading.enumerate():
        # A forked child's only one may have been a group's.
        if isinstance(thread, GroupThread) and thread is not threading.current_thread():
            thread.ends(until)


def _late(timeout: timedelta) -> BaseException:
    return dist.DistBackendError(f"not done within {timeout.total_seconds()} s, for which it was waited; it goes on")


def _alike(error: BaseException) -> Exception:
    """Another one that says the same, without its traceback: that has the work, and the collector does not see what a future of torch's has."""
    if not isinstance(error, Exception):
        return dist.DistBackendError(f"{type(error).__name__}: {error}")
    alike = type(error).__new__(type(error), *error.args)
    alike.__dict__.update(error.__dict__)
    return alike


class Work(TorchWork):
    """Something that is asked for. It is over once `end` was called."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._lock = threading.Lock()

    def end(self, error: BaseException | None) -> bool:
        """Whether somebody has to be told by `tell`, which runs callbacks."""
        with self._lock:
            self._error = error
            self._over.set()
            return self._future is not None

    def tell(self) -> None:
        future = self._future
        if future is None:
            return
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(_alike(self._error))  # type: ignore[arg-type]

    def is_completed(self) -> bool:
        # Its future has the result by then, if somebody has asked for it.
        return self._over.is_set() and (self._future is None or self._future.done())

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        if not self._over.wait(None if timeout in (NO_LIMIT, UNSET) else min(timeout.total_seconds(), threading.TIMEOUT_MAX)):
            raise _late(timeout)
        while self._future is not None and not self._future.done():
            # Another thread is about to tell it, and calls back afterwards. Its own wait would raise what it has, with a traceback.
            time.sleep(_PAUSE_S)
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
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
            if not self._over.is_set():
                return future
        self.tell()
        return future


class Exchange:
    """A message that is sent or received, its buffer, and its memory. The mesh does it whether or not somebody waits."""

    def __init__(self, engine: Engine, tensor: torch.Tensor, ranks: Sequence[int], tag: int, is_send: bool) -> None:
        self._engine, self.is_send = engine, is_send
        self._flat = Flat(tensor, is_send)
        # Whose turn it is to wait or to look.
        self._turn = threading.Lock()
        self.is_over = False
        self.error: BaseException | None = None
        # Of the peer, once it is done, whatever has happened to the call that was told.
        self._rank = ctypes.c_int64(-1)
        size, any_tag = self._flat.flat.nbytes, tag & (1 << 64) - 1
        self._buffer = ctypes.c_void_p()
        self._wait = CALLS.unbound_wait_send if is_send else CALLS.unbound_wait_recv
        self._test = CALLS.unbound_test_send if is_send else CALLS.unbound_test_recv
        CALLS.unbound_create(engine.mesh.handle, self._flat.addr, size, ctypes.byref(self._buffer))
        try:
            if is_send:
                CALLS.unbound_send(self._buffer, ranks[0], any_tag, 0, size)
            else:
                CALLS.unbound_recv(self._buffer, (ctypes.c_int64 * len(ranks))(*ranks), len(ranks), any_tag, 0, size)
        except BaseException:
            CALLS.unbound_close(self._buffer)
            raise

    def finish(self) -> None:
        """Waits for it as long as the group does."""
        with self._turn:
            if not self.is_over:
                self._look(self._wait, self._engine.timeout_ms, ctypes.c_int(1))

    def test(self) -> bool:
        """Whether it is over. Returns at once."""
        # If another has the turn, that one finds out.
        if not self.is_over and self._turn.acquire(blocking=False):
            try:
                if not self.is_over:
                    done = ctypes.c_int()
                    self._look(self._test, ctypes.byref(done), done)
            finally:
                self._turn.release()
        return self.is_over

    def _look(self, call: Callable[..., int], last: Any, done: ctypes.c_int) -> None:
        """It is over if the call fails, or else if it leaves `done`. What a signal's handler raises is the caller's, and no end of it."""
        error = None
        if self._rank.value < 0:
            try:
                call(self._buffer, ctypes.byref(self._rank), last)
            except _library.Error as failure:
                error = failure
        if error is not None or done.value or self._rank.value >= 0:
            self._over(error)

    @property
    def rank(self) -> int:
        """The peer's, once it is over; -1 if it has failed."""
        return self._rank.value

    def _over(self, error: BaseException | None) -> None:
        self.is_over = True
        try:
            CALLS.unbound_close(self._buffer)
            if error is None and not self.is_send:
                self._flat.written()
        except BaseException as failure:
            error = error or failure
        self.error = None if error is None else self._engine.told(error)


class Message(Work):
    """The work of a message."""

    def __init__(self, exchange: Exchange, engine: Engine, tensor: torch.Tensor) -> None:
        super().__init__([tensor])
        self._exchange, self._engine = exchange, engine
        self._has_thread = self._is_told = False

    def _finish(self) -> None:
        self._exchange.finish()
        self._ended()

    def _serve(self, thread: GroupThread) -> None:
        thread.waits(self._exchange.finish)
        self._ended()

    def _look(self) -> bool:
        is_over = self._exchange.test()
        if is_over:
            self._ended()
        return is_over

    def _ended(self) -> None:
        with self._lock:
            is_first, self._is_told = not self._is_told, True
        if is_first and self.end(self._exchange.error):
            self.tell()

    def is_completed(self) -> bool:
        self._look()
        return super().is_completed()

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        if timeout in (NO_LIMIT, UNSET):
            self._finish()
        else:
            # The mesh fails when a wait of its own takes too long.
            end, pause = time.monotonic() + timeout.total_seconds(), _PAUSE_S
            while not self._look():
                if time.monotonic() >= end:
                    raise _late(timeout)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        # Another may be about to end it.
        return super().wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        with self._lock:
            if not self._over.is_set() and not self._has_thread:
                GroupThread("message", self._serve).start()
                self._has_thread = True
        return super().get_future()

    def source_rank(self) -> int:
        """The rank that has sent it, once it is here."""
        if self._exchange.is_send:
            raise RuntimeError("the source of a message that is sent; expected a receive")
        self.wait()
        return self._exchange.rank

    _source_rank = source_rank

    def __del__(self) -> None:
        if not self._over.is_set() and not self._has_thread:
            self._engine.keep(self._exchange)


class All(Work):
    """Several works."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__([tensor for work in works for tensor in work._result])
        self._works = works

    def is_completed(self) -> bool:
        return all([work.is_completed() for work in self._works])

    def is_success(self) -> bool:
        return all([work.is_success() for work in self._works])

    def exception(self) -> BaseException | None:
        return next((work.exception() for work in self._works if work.exception()), None)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        return all([work.wait(timeout) for work in self._works])

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(lambda _: self._result)
