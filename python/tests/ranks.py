"""Ranks that are forked from one process, which has imported torch before. Used by the other files of this folder."""

import ctypes
import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback

# So that ranks which wait for what will not come end before the test's own time is over.
LIMIT_S = 100


def run(count, body, expected=None):
    """Has `body(rank, folder)` done by so many ranks; ends all when one fails. `expected`: by rank, how it is to end instead of well."""
    expected = expected or {}
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for rank in range(count):
            child = os.fork()
            if child == 0:
                try:
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
                    body(rank, folder)
                    sys.stdout.flush()
                    # Not by Python's own end: torch's threads may be at work.
                    os._exit(0)
                except BaseException:
                    print(f"rank {rank}: {traceback.format_exc()}", file=sys.stderr, flush=True)
                finally:
                    os._exit(1)
            children[child] = rank
        failed = []
        while children:
            child, status = os.wait()
            rank = children.pop(child)
            if status != expected.get(rank, 0):
                failed.append(f"rank {rank}: status {status}")
                for other in children:
                    os.kill(other, signal.SIGKILL)
        if failed:
            sys.exit(", ".join(failed))


def until(what, condition, seconds=60):
    """Waits until something holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.002)
