"""Works and groups: what is waited for, by whom and how, callbacks, what nobody waits for, and what is left when a group goes.

Usage: works.py [NAME]...
"""

import contextlib
import datetime
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from unittest import mock

import ranks
import torch
import torch.distributed as dist
from ranks import TIMEOUT, group, raised

import railhead.torch
from railhead._works import Work


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


def futures_are_done_with_their_works(rank, folder):
    group(rank, 2, folder)
    tell = Work.tell

    def late(work):
        time.sleep(0.02)
        tell(work)

    with mock.patch.object(Work, "tell", late):
        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        work.wait()
        assert future.done() and future.value()[0] is tensor
        received, sent = dist.irecv(torch.zeros(3), 1 - rank), dist.isend(tensor, 1 - rank)
        future = received.get_future()
        ranks.until("it is here", received.is_completed)
        assert future.done()
        sent.wait()
    dist.barrier()
    dist.destroy_process_group()


def threads_sleep_while_nothing_is_queued(rank, folder):
    group(rank, 2, folder)
    tensor = torch.zeros(3)
    dist.all_reduce(tensor, async_op=True).wait()
    (thread,) = [thread.native_id for thread in threading.enumerate() if thread.name == "railhead-group"]

    def slept():
        with open(f"/proc/self/task/{thread}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))

    dist.barrier()
    before = slept()
    for _ in range(200):
        dist.all_reduce(tensor)
    assert slept() - before < 20, "who has nothing to do was woken"
    dist.barrier()
    dist.destroy_process_group()


def callbacks_ask_for_collectives(rank, folder):
    group(rank, 2, folder)

    def in_turn(own):
        """The sum of the ranks, by a collective that a callback waits for."""
        tensor = torch.ones(1)
        if own == 0:
            dist.all_reduce(tensor)
        elif own == 1:
            dist.all_reduce(tensor, async_op=True).wait()
        else:
            tensor = dist.all_reduce(tensor, async_op=True).get_future().wait()[0]
        return tensor.item()

    for own in range(3):
        works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(4)]
        then = works[0].get_future().then(lambda _, own=own: in_turn(own))
        # Those behind it are done meanwhile, on all ranks before what the callback asks for.
        works[-1].wait()
        assert then.wait() == 2, own
    # One callback behind the other.
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    for _ in range(5):
        future = future.then(lambda _: in_turn(2))
    assert future.wait() == 2
    into = torch.zeros(3)
    received, sent = dist.irecv(into, 1 - rank), dist.isend(torch.ones(3), 1 - rank)
    assert received.get_future().then(lambda _: in_turn(1)).wait() == 2
    sent.wait()
    raised(lambda: dist.all_reduce(into, async_op=True).get_future().then(lambda _: 1 / 0).wait(), RuntimeError, "ZeroDivisionError")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))

    def hook(_, bucket):
        def then(done):
            dist.all_reduce(bucket.buffer(), async_op=True).wait()
            return done.value()[0]

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(then)

    model.register_comm_hook(None, hook)
    model(torch.full((3, 4), float(rank))).sum().backward()
    assert model.module.weight.grad.eq(6).all(), model.module.weight.grad
    dist.barrier()
    dist.destroy_process_group()


def messages_that_nobody_waits_for(rank, folder):
    short = datetime.timedelta(milliseconds=500)
    group(rank, 2, folder)
    own = dist.new_group([0, 1])
    dist.set_timeout(short, own)
    into, strided = torch.zeros(300_000), torch.zeros(300, 100).t()
    if rank == 0:
        dist.irecv(into, 1, tag=1)
        dist.irecv(strided, 1, tag=2)
        # Nobody sends this; nor does somebody say so who has not asked for long.
        dist.irecv(torch.zeros(3), 1, group=own, tag=3)
        late = dist.irecv(torch.zeros(3), 1, group=own, tag=4)
        assert not late.is_completed()
        gc.collect()
        before = threading.active_count()
        sent = []
        for number in range(100):
            tensor = torch.full((3000,), float(number))
            sent.append(weakref.ref(tensor))
            dist.isend(tensor, 1, tag=number)
        del tensor
        assert threading.active_count() <= before + 1, "a thread for each"
        raised(lambda: late.wait(2 * short), dist.DistBackendError, "1.0 s", "goes on")
        # What nobody sends is not in the way of what is done.
        assert len(sent) == 100
        ranks.until("the memory of what is sent is given back", lambda: all(tensor() is None for tensor in sent))
        dist.set_timeout(TIMEOUT, own)
        open(f"{folder}/late", "w").close()
        assert late.wait() and late.source_rank() == 1
        dist.barrier()
        ranks.until("both are here", lambda: into.eq(3).all() and strided.eq(4).all())
    else:
        for number in reversed(range(100)):
            into = torch.zeros(3000)
            dist.recv(into, 0, tag=number)
            assert into.eq(number).all()
        ranks.until("rank 0 has waited in vain", lambda: os.path.exists(f"{folder}/late"))
        dist.send(torch.ones(3), 0, group=own, tag=4)
        dist.send(torch.full((300_000,), 3.0), 0, tag=1)
        dist.send(torch.full((100, 300), 4.0), 0, tag=2)
        dist.barrier()
    tensor = torch.ones(1)
    dist.all_reduce(tensor, async_op=True)
    gc.collect()
    dist.barrier()
    assert tensor.item() == 2, "of a work that nobody has kept"
    if rank == 0:
        # Who waits, waits no longer than the group, whoever else does.
        dist.set_timeout(short, own)
        asked = dist.irecv(torch.zeros(3), 1, group=own, tag=5)
        assert not asked.is_completed()
        raised(asked.wait, dist.DistBackendError, "0.5 s", "rank 1")
    dist.barrier()
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


def what_was_asked_for_is_done_before_a_group_goes(rank, folder):
    group(rank, 2, folder)
    tensors = [torch.ones(100_000) for _ in range(5)]
    futures = [dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0][0].item()) for tensor in tensors]
    dist.destroy_process_group()
    assert all(tensor.eq(2).all() for tensor in tensors)
    assert [future.wait() for future in futures] == [2] * 5


def groups_end_with_what_is_outstanding(rank, folder):
    group(rank, 2, folder)
    aborted, left = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank == 0:
        works = [dist.all_reduce(torch.ones(3), group=aborted, async_op=True) for _ in range(3)]
        message = dist.irecv(torch.ones(3), 1, group=aborted)
        aborted.abort()
        for work in [*works, message]:
            raised(work.wait, RuntimeError, "")
            assert work.is_completed() and not work.is_success() and work.exception()
        # A collective that is about to begin when its group is aborted finds this.
        raised(lambda: aborted._engine.mesh.handle, RuntimeError, "closed")
        message = dist.irecv(torch.ones(3), 1, group=left)
        assert not message.is_completed()
        dist.destroy_process_group(left)
        raised(message.wait, RuntimeError, "closed")
        raised(lambda: left.allreduce([torch.ones(1)]), dist.DistBackendError, "destroyed")
        raised(lambda: left.send([torch.ones(1)], 1, 0), (RuntimeError, ValueError), "closed")
        left.shutdown()
        left.abort()
    else:
        raised(lambda: dist.all_reduce(torch.ones(3), group=left), dist.DistNetworkError, "rank 0")
        dist.destroy_process_group(left)
    dist.barrier()
    dist.destroy_process_group()


def a_message_is_dropped_while_its_group_goes(rank, folder):
    group(rank, 2, folder)
    own = dist.new_group([0, 1])
    dropped = f"{folder}/dropped"
    if rank == 0:
        work, message = dist.all_reduce(torch.ones(3), group=own, async_op=True), dist.irecv(torch.ones(3), 1, group=own)
        goes = threading.Thread(target=dist.destroy_process_group, args=(own,))
        goes.start()
        ranks.until("it takes nothing more", lambda: own._engine._is_closed)
        del message
        gc.collect()
        open(dropped, "w").close()
        goes.join()
        assert work.is_success() and work.result()[0].eq(2).all()
    else:
        # So that the group cannot go before.
        ranks.until("the other one has dropped it", lambda: os.path.exists(dropped))
        dist.all_reduce(torch.ones(3), group=own)
        dist.destroy_process_group(own)
    dist.destroy_process_group()


def groups_leave_nothing(rank, folder):
    group(rank, 2, folder)

    def once(_):
        own = dist.new_group([0, 1])
        tensor = torch.ones(100)
        dist.all_reduce(tensor, group=own, async_op=True).get_future().then(lambda _: dist.barrier(own)).wait()
        sent = dist.isend(tensor, 1 - rank, group=own)
        dist.recv(tensor, 1 - rank, group=own)
        dist.irecv(tensor, 1 - rank, group=own, tag=1)
        sent.wait()
        dist.barrier(own)
        dist.destroy_process_group(own)

    def held():
        gc.collect()
        return [len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")]

    once(0)
    ranks.until("its threads are gone", lambda: threading.active_count() == 1)
    before = held()
    for number in range(20):
        once(number)
    ranks.until("as much as before", lambda: held() == before)
    dist.barrier()
    dist.destroy_process_group()


def no_thread_can_be_had(rank, folder):
    group(rank, 2, folder)
    tensor, into = torch.ones(3), torch.zeros(3)
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        raised(lambda: dist.all_reduce(tensor, async_op=True), dist.DistBackendError, "no thread", "not begun")
        received = dist.irecv(into, 1 - rank)
        dist.isend(tensor, 1 - rank)
        raised(received.get_future, RuntimeError, "can't start new thread")
        received.wait()
        dist.all_reduce(tensor)
    assert tensor.eq(2).all() and into.eq(1).all()
    # As soon as there are some.
    dist.all_reduce(tensor, async_op=True).wait()
    assert tensor.eq(4).all()
    dist.destroy_process_group()


ENDS = """
import faulthandler, sys
faulthandler.dump_traceback_later(50)
import torch, torch.distributed as dist, railhead.torch
dist.init_process_group("railhead", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
dist.barrier()
if sys.argv[2] == "0":
    work = dist.all_reduce(torch.ones(1), async_op=True)
    message, kept = dist.irecv(torch.ones(1), 1), dist.irecv(torch.ones(1), 1, tag=1)
    kept.is_completed()
    dist.isend(torch.ones(100_000), 1)
else:
    sys.stdin.read()
"""


def programs_end_whatever_is_outstanding(rank, folder):
    command = [sys.executable, "-c", ENDS, f"{folder}/ends"]
    with subprocess.Popen([*command, "1"], stdin=subprocess.PIPE) as other:
        try:
            done = subprocess.run([*command, "0"], capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"rank 0 has not ended; where it is: {late.stderr}") from late
        other.stdin.close()
        assert other.wait() == 0 and done.returncode == 0 and "Exception ignored" not in done.stderr, done.stderr


CALLS_BACK = """
import sys, threading, time, torch, torch.distributed as dist, railhead.torch
dist.init_process_group("railhead", init_method="file://" + sys.argv[1], rank=0, world_size=1)
began = threading.Event()
def call(_):
    began.set()
    threading.main_thread().join()
    time.sleep(0.1)
    print("called back", flush=True)
# On the group's thread, which cannot begin before.
with dist.group.WORLD._engine._lock:
    dist.all_reduce(torch.ones(1), async_op=True).get_future().then(call)
began.wait()
if sys.argv[2] == "destroys":
    dist.destroy_process_group()
"""


def callbacks_run_to_their_end(rank, folder):
    for how in ("destroys", "leaves"):
        done = subprocess.run([sys.executable, "-c", CALLS_BACK, f"{folder}/{how}", how], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "called back\n"), (how, done)


def groups_are_beside_others(rank, folder):
    group(rank, 2, folder, "gloo")
    groups = [dist.new_group([0, 1], backend=backend) for backend in ("gloo", "railhead", "cpu:railhead,cuda:gloo")]
    works = [dist.all_reduce(torch.ones(3), group=own, async_op=True) for own in groups]
    for own, work in zip(groups, works, strict=True):
        assert work.wait() and work.get_future().wait()[0].eq(2).all()
        objects = [None, None]
        dist.all_gather_object(objects, {"rank": rank}, group=own)
        assert objects == [{"rank": 0}, {"rank": 1}]
        listed = [rank]
        dist.broadcast_object_list(listed, 1, group=own)
        dist.scatter_object_list(objects, ["a", "b"] if rank == 0 else None, 0, group=own)
        assert listed == [1] and objects[0] == "ab"[rank]
        assert dist.distributed_c10d._get_object_coll_device(own) == "cpu"
        dist.destroy_process_group(own)
    dist.destroy_process_group()


def torchs_checker_of_collectives(rank, folder):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group(rank, 2, folder, "cpu:railhead,cuda:gloo")
    gc.collect()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    assert tensor.eq(4).all()
    raised(lambda: dist.all_reduce(torch.ones(2 + rank)), RuntimeError, "mismatch")
    dist.destroy_process_group()
    assert not railhead.torch._CHECKED


def what_a_signals_handler_raises_is_its_callers(rank, folder):
    class Told(Exception):
        pass

    def handler(*_):
        raise Told

    def interrupted(what):
        """Whether a signal has come while that was done."""
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0003, 0.001))
            what()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Told:
            return True
        return False

    group(rank, 2, folder)
    signal.signal(signal.SIGALRM, handler)
    into = torch.zeros(7, 3).t()
    if rank == 0:
        message = dist.irecv(into, 1)
        assert all(interrupted(lambda: ranks.until("nothing is sent", message.is_completed)) for _ in range(50))
        assert not message.is_completed() and message.exception() is None
        open(f"{folder}/was interrupted", "w").close()
        assert message.wait() and torch.equal(into, torch.arange(21.0).view(3, 7))
    else:
        ranks.until("rank 0 was interrupted", lambda: os.path.exists(f"{folder}/was interrupted"))
        dist.send(torch.arange(21.0).view(3, 7), 0)
    # Whatever is interrupted of a collective, the next one runs.
    own = [dist.new_group([member]) for member in range(2)][rank]
    tensor = torch.ones(10)
    assert any([interrupted(lambda: [dist.all_reduce(tensor, group=own) for _ in range(200)]) for _ in range(300)])
    dist.all_reduce(tensor, group=own)
    assert dist.all_reduce(tensor, group=own, async_op=True).wait(TIMEOUT)
    dist.destroy_process_group(own)
    dist.destroy_process_group()


def what_has_failed_leaves_nothing(rank, folder):
    group(rank, 2, folder)
    own = dist.new_group([0, 1])
    engine = weakref.ref(own._engine)
    message = dist.irecv(torch.zeros(3), 1 - rank, group=own)
    future = message.get_future()
    # So that neither is told that the group is gone before it has asked.
    dist.barrier()
    own.abort()
    raised(message.wait, RuntimeError, "closed")
    raised(future.wait, RuntimeError, "closed")
    dist.destroy_process_group(own)
    del own, message, future
    ranks.until("it is gone", lambda: gc.collect() >= 0 and engine() is None)
    dist.destroy_process_group()


def a_forked_process_is_told_that_the_group_is_not_its_own(rank, folder):
    group(rank, 2, folder)
    tensor = torch.ones(1)
    work = dist.all_reduce(tensor, async_op=True)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            raised(lambda: dist.all_reduce(torch.ones(1)), dist.DistBackendError, "another process's")
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert work.wait() and tensor.item() == 2
    dist.destroy_process_group()


SCENARIOS = {
    works_are_waited_for: (2, {}),
    futures_are_done_with_their_works: (2, {}),
    threads_sleep_while_nothing_is_queued: (2, {}),
    callbacks_ask_for_collectives: (2, {}),
    messages_that_nobody_waits_for: (2, {}),
    groups_come_and_go: (2, {}),
    what_was_asked_for_is_done_before_a_group_goes: (2, {}),
    groups_end_with_what_is_outstanding: (2, {}),
    a_message_is_dropped_while_its_group_goes: (2, {}),
    groups_leave_nothing: (2, {}),
    no_thread_can_be_had: (2, {}),
    programs_end_whatever_is_outstanding: (1, {}),
    callbacks_run_to_their_end: (1, {}),
    groups_are_beside_others: (2, {}),
    torchs_checker_of_collectives: (2, {}),
    what_a_signals_handler_raises_is_its_callers: (2, {}),
    what_has_failed_leaves_nothing: (2, {}),
    a_forked_process_is_told_that_the_group_is_not_its_own: (2, {}),
}

if __name__ == "__main__":
    ranks.main(SCENARIOS)
