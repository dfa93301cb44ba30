"""What goes wrong, and what programs do besides: ranks that die or stop, shapes that differ, threads, forks, another library.

Usage: faults.py [NAME]...
"""

import datetime
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
from ranks import group, raised
from torch.utils.data import DataLoader

import railhead
import railhead.torch  # noqa: F401


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
    groups_are_used_from_threads: (2, {}),
    a_forked_data_loader_leaves_the_group_alone: (2, {}),
    beside_another_backend: (2, {}),
    another_library_is_refused: (1, {}),
}

if __name__ == "__main__":
    ranks.main(SCENARIOS)
