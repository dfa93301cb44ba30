"""Ranks that are forked from one process, which has imported torch before, and what their scenarios share. Used by the other files of this folder."""

import ctypes
import datetime
import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=30)
# So that ranks which wait for what will not come end before the test's own time is over.
LIMIT_S = 300


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


def group(rank, size, folder, backend="railhead", timeout=TIMEOUT, name="store"):
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/{name}", rank=rank, world_size=size, timeout=timeout)


def raised(call, kind, *words):
    """The text of what a call raises, which has these words."""
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), f"{error}: expected {words}"
        return str(error)
    raise AssertionError(f"nothing was raised; expected {kind}")


def main(scenarios):
    """Runs scenarios, or those that are named: functions of a rank and a folder, with the number of ranks and how they end."""
    for scenario, (count, expected) in scenarios.items():
        if len(sys.argv) < 2 or scenario.__name__ in sys.argv[1:]:
            began = time.monotonic()
            run(count, scenario, expected)
            print(f"{scenario.__name__}: {time.monotonic() - began:.1f} s", flush=True)
    print("good")
