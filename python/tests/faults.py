"""What goes wrong, and what programs do besides: ranks that die or stop, shapes that differ, what is not supported, groups that come and go,
threads, forks.

Usage: faults.py [NAME]...
"""

import datetime
import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import ranks
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import railhead.torch  # noqa: F401

TIMEOUT = datetime.timedelta(seconds=30)


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


def a_rank_that_is_killed_is_named(rank, folder):
    group(rank, 3, folder)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    raised(lambda: dist.all_reduce(tensor), dist.DistNetworkError, "rank 1")
    assert time.monotonic() - began < 3, "named late"
    raised(lambda: dist.all_reduce(tensor), RuntimeError, "rank 1")


def a_rank_that_stops_is_named_when_the_time_is_over(rank, folder):
    group(rank, 3, folder)
    dist.barrier()
    dist.set_timeout(datetime.timedelta(seconds=2))
    files = [f"{folder}/{other}" for other in (0, 2)]
    if rank == 1:
        ranks.until("the others are through", lambda: all(os.path.exists(file) for file in files))
        assert any("rank 1" in pathlib.Path(file).read_text() for file in files), "nobody has named it"
        return
    # So large that each rank has parts of all others. Whose time is over first gives up, which may be what the other one is told.
    text = raised(lambda: dist.all_reduce(torch.ones(100_000)), (dist.DistBackendError, dist.DistNetworkError), "rank")
    assert "rank 1" in text or "it has closed its mesh" in text, text
    with open(f"{folder}/new{rank}", "w") as file:
        file.write(text)
    os.rename(f"{folder}/new{rank}", f"{folder}/{rank}")


def ranks_that_do_not_come_are_named(rank, folder):
    if rank != 2:
        connect = lambda: group(rank, 3, folder, timeout=datetime.timedelta(seconds=1))  # noqa: E731
        raised(connect, RuntimeError, "rank")


def shapes_that_differ_are_an_error(rank, folder):
    group(rank, 2, folder, timeout=datetime.timedelta(seconds=10))
    raised(lambda: dist.all_reduce(torch.ones(1000 + 24 * rank)), (ValueError, RuntimeError), "")


def what_is_not_supported_is_said(rank, folder):
    group(rank, 1, folder)
    floats = torch.ones(4)
    raised(lambda: dist.all_reduce(torch.ones(3, device="meta")), NotImplementedError, "meta", "CPU")
    raised(lambda: dist.all_reduce(floats.to_sparse()), NotImplementedError, "sparse")
    raised(lambda: dist.all_reduce(floats.to(torch.int16)), NotImplementedError, "torch.int16", "torch.float32")
    raised(lambda: dist.all_reduce(floats.to(torch.int32), dist.ReduceOp.AVG), NotImplementedError, "average", "int32")
    raised(lambda: dist.all_gather([torch.ones(3)], torch.ones(4)), ValueError, "16 bytes", "12")
    raised(lambda: dist.reduce_scatter_tensor(torch.ones(3), floats), ValueError, "4 elements", "3")
    raised(lambda: dist.all_to_all_single(floats, torch.ones(4), [3], [4]), ValueError, "[3]", "4 in all")
    dist.all_reduce(floats)
    assert torch.equal(floats, torch.ones(4)), "the group goes on"
    dist.destroy_process_group()


def groups_come_and_go(rank, folder):
    store = dist.FileStore(f"{folder}/kept", 2)
    for number in range(3):
        # What the one before has left in the store is not taken for this one's, be it that the other rank comes later.
        begun = f"{folder}/{number}"
        if rank == 0:
            threading.Timer(0.1, lambda begun=begun: open(begun, "w").close()).start()
        else:
            ranks.until("rank 0 has begun", lambda begun=begun: os.path.exists(begun))
        dist.init_process_group("railhead", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
        tensor = torch.full((5,), float(rank + number))
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0 + 2 * number] * 5
        dist.barrier()
        kept = dist.group.WORLD
        dist.destroy_process_group()
    raised(lambda: kept.allreduce([torch.ones(1)], dist.AllreduceOptions()), (RuntimeError, ValueError), "")


def works_are_waited_for(rank, folder):
    group(rank, 2, folder)
    tensor = torch.ones(100)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed() and not work.is_success() and work.exception() is None
        raised(lambda: work.wait(datetime.timedelta(milliseconds=20)), dist.DistBackendError, "0.02 s")
        future = work.get_future()
        then = future.then(lambda done: done.value()[0].sum().item())
        open(f"{folder}/waits", "w").close()
        assert work.wait() and work.is_completed() and work.is_success()
        assert future.done() and then.wait() == 200 and work.result()[0] is tensor
        into = torch.zeros(7, 3).t()
        message = dist.irecv(into, 1)
        assert not message.is_completed()
        open(f"{folder}/receives", "w").close()
        ranks.until("it is here", message.is_completed)
        assert message.wait() and message.source_rank() == 1 and torch.equal(into, torch.arange(21.0).view(3, 7))
        large = torch.zeros(1_000_000)
        dist.recv(large, 1, tag=9)
        assert large.eq(3).all(), "of a tensor that its sender has forgotten"
        several = [dist.irecv(torch.zeros(1), 1, tag=tag) for tag in (1, 2)]
        for tag in (2, 1):
            several[tag - 1].wait()
    else:
        ranks.until("rank 0 waits", lambda: os.path.exists(f"{folder}/waits"))
        dist.all_reduce(tensor)
        ranks.until("rank 0 receives", lambda: os.path.exists(f"{folder}/receives"))
        dist.send(torch.arange(21.0).view(3, 7), 0)
        dist.isend(torch.full((1_000_000,), 3.0), 0, tag=9)
        gc.collect()
        torch.full((1_000_000,), 4.0)
        for tag in (2, 1):
            dist.send(torch.ones(1), 0, tag=tag)
    assert tensor.tolist() == [2.0] * 100
    # Many at once, in order.
    tensors = [torch.full((number,), float(rank)) for number in range(200)]
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    assert all(tensor.eq(1).all() for tensor in tensors)
    dist.barrier()
    dist.destroy_process_group()


def groups_are_used_from_threads(rank, folder):
    group(rank, 2, folder)
    groups = [dist.new_group([0, 1]) for _ in range(4)]
    failed = []

    def use(number):
        try:
            for turn in range(50):
                tensor = torch.full((number * 1000 + 1,), float(turn))
                dist.all_reduce(tensor, group=groups[number], async_op=turn % 2 == 1) and dist.barrier(groups[number])
                if turn % 2 == 0:
                    assert tensor.eq(2 * turn).all()
                # Messages of all threads go through one group.
                into = torch.zeros(3)
                work = dist.irecv(into, 1 - rank, tag=number)
                dist.send(torch.full((3,), float(turn)), 1 - rank, tag=number)
                work.wait()
                assert into.tolist() == [turn] * 3
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    dist.barrier()
    dist.destroy_process_group()


def a_forked_data_loader_leaves_the_group_alone(rank, folder):
    group(rank, 2, folder)
    for turn in range(2):
        total = torch.zeros(1)
        for batch in DataLoader(torch.arange(40.0), batch_size=10, num_workers=2, multiprocessing_context="fork"):
            dist.all_reduce(batch)
            total += batch.sum()
        assert total.item() == 2 * sum(range(40)), turn
    child = os.fork()
    if child == 0:
        dist.destroy_process_group()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(total)
    assert total.item() == 4 * sum(range(40))
    dist.destroy_process_group()


def beside_another_backend(rank, folder):
    group(rank, 2, folder, "cpu:railhead,cuda:gloo")
    assert {device.type for device in dist.group.WORLD._device_types} == {"cpu", "cuda"}
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.eq(1).all()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.get_future().done() and tensor.eq(2).all()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.full((3, 4), float(rank))).sum().backward()
    assert model.module.weight.grad.eq(1.5).all()
    if rank == 0:
        dist.send(tensor, 1)
    else:
        into = torch.zeros(1000)
        dist.recv(into, 0)
        assert into.eq(2).all()
    dist.barrier()
    dist.destroy_process_group()


def another_library_is_refused(rank, folder):
    for library, words in [("libc.so.6", "is no library of Railhead's"), ("/nowhere.so", "does not load")]:
        command = [sys.executable, "-c", "import railhead"]
        done = subprocess.run(command, env={**os.environ, "RAILHEAD_LIBRARY": library}, capture_output=True, text=True)
        assert done.returncode == 1 and words in done.stderr, done.stderr
    source = f"{folder}/other.c"
    with open(source, "w") as out:
        out.write('const char *railhead_version(void) { return "0.2.7"; }\n')
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", f"{folder}/other.so", source], check=True)
    done = subprocess.run(command, env={**os.environ, "RAILHEAD_LIBRARY": f"{folder}/other.so"}, capture_output=True, text=True)
    assert "is Railhead 0.2.7; this package takes 0.1.x" in done.stderr, done.stderr


SCENARIOS = {
    a_rank_that_is_killed_is_named: (3, {1: signal.SIGKILL}),
    a_rank_that_stops_is_named_when_the_time_is_over: (3, {}),
    ranks_that_do_not_come_are_named: (3, {}),
    shapes_that_differ_are_an_error: (2, {}),
    what_is_not_supported_is_said: (1, {}),
    groups_come_and_go: (2, {}),
    works_are_waited_for: (2, {}),
    groups_are_used_from_threads: (2, {}),
    a_forked_data_loader_leaves_the_group_alone: (2, {}),
    beside_another_backend: (2, {}),
    another_library_is_refused: (1, {}),
}

if __name__ == "__main__":
    for scenario, (count, expected) in SCENARIOS.items():
        if len(sys.argv) < 2 or scenario.__name__ in sys.argv[1:]:
            began = time.monotonic()
            ranks.run(count, scenario, expected)
            print(f"{scenario.__name__}: {time.monotonic() - began:.1f} s", flush=True)
    print("good")
