"""Works: what torch's programs wait for. Collectives' end when the group's thread says so; messages' when somebody has waited for them. Used by
railhead.torch, on any thread.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

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
# Longer than any program.
_FOR_EVER_MS = 1 << 40


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
            future.set_exception(self._error)  # type: ignore[arg-type]

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        limit = None if timeout in (NO_LIMIT, UNSET) else timeout.total_seconds()
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
        # Whose turn it is to wait, and what is below.
        self._turn, self._lock = threading.Lock(), threading.Lock()
        # How many wait as long as the group does; whether one waits that has all the time there is.
        self._hurried, self._is_patient = 0, False
        self.is_over = False
        self.error: BaseException | None = None
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

    def finish(self) -> None:
        """Waits for it as long as the group does."""
        with self._lock:
            self._hurried += 1
            if self._is_patient:
                (CALLS.unbound_abort_send if self.is_send else CALLS.unbound_abort_recv)(self._buffer)
        while not self.is_over:
            self._wait(self._engine.timeout_ms)

    def finish_at_leisure(self) -> None:
        """Waits for it without end, or until somebody does who is in a hurry."""
        self._wait(None)

    def _wait(self, timeout_ms: int | None) -> None:
        with self._turn:
            with self._lock:
                if self.is_over or (timeout_ms is None and self._hurried):
                    return
                self._is_patient = timeout_ms is None
            rank, wait = ctypes.c_int64(-1), CALLS.unbound_wait_send if self.is_send else CALLS.unbound_wait_recv
            error: BaseException | None = None
            try:
                wait(self._buffer, ctypes.byref(rank), _FOR_EVER_MS if timeout_ms is None else timeout_ms)
            except BaseException as failure:
                error = failure
            with self._lock:
                self._is_patient = False
                if isinstance(error, _library.Error) and error.status == _library.ABORTED:
                    return
                self._over(rank.value, error)

    def _over(self, rank: int, error: BaseException | None) -> None:
        self.rank, self.is_over = rank, True
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
        self._has_thread = {False: False, True: False}
        self._is_told = False

    def _finish(self) -> None:
        self._exchange.finish()
        self._ended()

    def _finish_at_leisure(self) -> None:
        self._exchange.finish_at_leisure()
        if self._exchange.is_over:
            self._ended()

    def _ended(self) -> None:
        with self._lock:
            is_first, self._is_told = not self._is_told, True
        if is_first and self.end(self._exchange.error):
            self.tell()

    def _have_a_thread(self, at_leisure: bool) -> None:
        """Has a thread wait, as somebody asks how it is going, or for a limited time."""
        with self._lock:
            if not self._over.is_set() and not self._has_thread[at_leisure]:
                what = self._finish_at_leisure if at_leisure else self._finish
                threading.Thread(target=what, name="railhead-message", daemon=True).start()
                self._has_thread[at_leisure] = True

    def is_completed(self) -> bool:
        self._have_a_thread(True)
        return super().is_completed()

    def is_success(self) -> bool:
        self._have_a_thread(True)
        return super().is_success()

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        if timeout in (NO_LIMIT, UNSET):
            self._finish()
        else:
            self._have_a_thread(True)
        return super().wait(timeout)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self._have_a_thread(False)
        return super().get_future()

    def source_rank(self) -> int:
        """The rank that has sent it, once it is here."""
        if self._exchange.is_send:
            raise RuntimeError("the source of a message that is sent; expected a receive")
        self.wait()
        return self._exchange.rank

    _source_rank = source_rank

    def __del__(self) -> None:
        if not self._over.is_set() and not any(self._has_thread.values()):
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
