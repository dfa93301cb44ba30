"""The package without torch: collectives and messages over memory, the store, and what either refuses.

Usage: plain.py [NAME]...
"""

import array
import gc
import math
import os

import numpy
import ranks
from ranks import raised

import railhead


def plain_python(rank, folder):
    with railhead.Store.file(f"{folder}/plain") as store, railhead.Mesh(rank, 2, timeout=20) as mesh:
        mesh.connect(store.prefix("mesh"))
        data, out = numpy.arange(6, dtype=numpy.float32) + rank, numpy.zeros(6, dtype=numpy.float32)
        mesh.allreduce(data, out)
        assert out.tolist() == [1, 3, 5, 7, 9, 11] and data[0] == rank
        mesh.allreduce(out, op="max")
        ints = array.array("q", [rank, 7])
        mesh.reduce(ints, root=1, op="product")
        assert rank == 0 or ints.tolist() == [0, 49]
        both = bytearray(6)
        mesh.allgather([b"one", b"two"][rank], both)
        assert both == b"onetwo"
        text = bytearray(b"from 0" if rank == 0 else 6)
        mesh.broadcast(text)
        assert text == b"from 0"
        part = numpy.zeros(3 - rank, dtype=numpy.int32)
        mesh.reduce_scatter(numpy.arange(5, dtype=numpy.int32), part, counts=[3, 2])
        assert part.tolist() == ([0, 2, 4] if rank == 0 else [6, 8])
        swapped = bytearray(2)
        mesh.alltoall(bytes([rank, rank + 10]), swapped)
        assert list(swapped) == [10 * rank, 10 * rank + 1]
        parts, part = numpy.zeros(5, dtype=numpy.int16), numpy.full(3 - rank, rank + 1, dtype=numpy.int16)
        mesh.gather(part, parts if rank == 1 else None, root=1, counts=[3, 2])
        assert parts.tolist() == ([1, 1, 1, 2, 2] if rank == 1 else [0] * 5)
        mesh.scatter(b"onetwo" if rank == 0 else None, text := bytearray(3))
        assert text == [b"one", b"two"][rank]
        # The root's own may be in its place.
        mesh.gather(parts[4:] if rank == 1 else part[:1], parts[3:] if rank == 1 else None, root=1)
        assert parts.tolist() == ([1, 1, 1, 1, 2] if rank == 1 else [0] * 5)
        mesh.barrier()
        into = bytearray(5)
        with_other = mesh.unbound(into if rank else b"hello")
        if rank == 0:
            with_other.send(1, tag=9)
            assert with_other.wait_send() == 1
            raised(lambda: with_other.recv(1), ValueError, "written")
        else:
            with_other.recv([0], tag=9)
            assert with_other.wait_recv() == 0 and into == b"hello"
        assert with_other.test_send() is None and with_other.test_recv() is None
        mesh.barrier()
        if rank == 0:
            with_other.send(1)
            ranks.until("it is sent", lambda: with_other.test_send() == 1)
        else:
            with_other.recv(0)
            ranks.until("it is here", lambda: with_other.test_recv() == 0)
        with_other.close()
        raised(lambda: mesh.allreduce(numpy.zeros((4, 4))[:, 1]), ValueError, "gaps")
        raised(lambda: mesh.allreduce(out, op="mean"), ValueError, "'mean'", "product")
        raised(lambda: mesh.allreduce(numpy.zeros(3, dtype=numpy.int16)), ValueError, "'h'", "f32")
        raised(lambda: mesh.allgather(b"one", bytearray(7)), ValueError, "7 elements for 2 ranks")
        raised(lambda: railhead.Mesh(3, 2), railhead.UsageError, "3")
        assert store.add("here", 1) in (1, 2) and store.compare_set("k", b"", b"v") == b"v"
        store.barrier("end", 2)
    raised(mesh.barrier, ValueError, "closed")


def memory_is_what_it_is(rank, folder):
    with railhead.Store.file(f"{folder}/memory") as store, railhead.Mesh(rank, 2, timeout=20) as mesh:
        mesh.connect(store)

        def reduced(data, **how):
            mesh.allreduce(data, **how)
            return list(data)

        # The same format is of other sizes elsewhere.
        for kind in ("<i4", "<u4", "<i8", "<u8", "longlong", "intp", "float16", "<f4", "f8"):
            assert reduced(numpy.full(3, 1 + rank, dtype=kind)) == [3] * 3, kind
        assert reduced(memoryview(numpy.ones(2, dtype=numpy.int32)).cast("B").cast("i")) == [2, 2]
        flags = numpy.array([True, False, rank == 0])
        mesh.allreduce(flags)
        assert flags.view(numpy.uint8).tolist() == [1, 0, 1]
        mesh.allreduce(flags, op="product")
        assert flags.tolist() == [True, False, True]
        # What is only moved may be of any type.
        for kind in ("int16", ">i4", "complex64", "S4", "?"):
            part, whole = numpy.full(2, 1, dtype=kind), numpy.zeros(4, dtype=kind)
            mesh.allgather(part, whole)
            swapped = numpy.zeros(2, dtype=kind)
            mesh.alltoall(part, swapped)
            mesh.broadcast(whole, root=1)
            assert (whole == part[0]).all() and (swapped == part).all(), kind
        mesh.allgather(array.array("b", [1]), bytearray(2))
        floats, ints, many = numpy.ones(4, dtype="f4"), numpy.ones(4, dtype="i4"), numpy.zeros(9, dtype="f4")
        fixed = numpy.ones(4, dtype="f4")
        fixed.flags.writeable = False
        for call, words in [
            (lambda: mesh.allreduce(fixed), ["written"]),
            (lambda: mesh.allreduce(floats, fixed), ["written"]),
            (lambda: mesh.broadcast(b"1234", root=1 - rank), ["written"]),
            (lambda: mesh.allgather(b"ab", b"abcd"), ["written"]),
            (lambda: mesh.unbound(fixed).recv(1 - rank), ["written"]),
            (lambda: mesh.allreduce(numpy.ones((4, 4), order="F")), ["gaps"]),
            (lambda: mesh.allreduce(numpy.zeros((4, 4))[:, 1]), ["gaps"]),
            (lambda: mesh.allreduce(numpy.zeros(3, dtype=">f4")), ["'>f'", "f32"]),
            (lambda: mesh.allreduce(numpy.zeros(3, dtype=numpy.int16)), ["'h'", "f32"]),
            (lambda: mesh.allreduce(floats, dtype="f99"), ["'f99'", "f32"]),
            (lambda: mesh.allreduce(floats, op="mean"), ["'mean'", "product"]),
            (lambda: mesh.allreduce(floats, many[:5]), ["5 elements", "4"]),
            (lambda: mesh.allreduce(floats, ints), ["another type"]),
            (lambda: mesh.reduce_scatter(floats, ints[:2]), ["another type"]),
            (lambda: mesh.allgather(floats, numpy.zeros(8, dtype="f8")), ["another type"]),
            (lambda: mesh.alltoall(floats, numpy.zeros(4, dtype="f8")), ["another type"]),
            (lambda: mesh.allreduce(many[:4], many[2:6]), ["shares memory"]),
            (lambda: mesh.alltoall(many[:4], many[2:6]), ["shares memory"]),
            (lambda: mesh.allgather(many[1:3], many[:4]), ["shares memory"]),
            (lambda: mesh.allgather(b"one", bytearray(7)), ["7 elements for 2 ranks"]),
            (lambda: mesh.allgather(floats, many[:4], counts=[8, -4]), ["[8, -4]", "4 in all"]),
            (lambda: mesh.gather(floats[:2], numpy.ones(4, dtype="i8"), root=rank), ["another type"]),
            (lambda: mesh.gather(floats[:2], many[:6], root=rank), ["2 elements of rank", "3"]),
            (lambda: mesh.gather(many[1:3], many[:4], root=rank), ["shares memory"]),
            (lambda: mesh.gather(floats[:2], root=2), ["root 2", "0 to 1"]),
            (lambda: mesh.gather(floats[:2], root=1 - rank, counts=[1, 1]), ["2 elements of rank", "1"]),
            (lambda: mesh.scatter(floats, floats[:2], root=rank, counts=[2, 3]), ["[2, 3]", "4 in all"]),
            (lambda: mesh.scatter(floats, fixed[:2], root=rank), ["written"]),
            (lambda: mesh.allreduce(floats, tag=-1), ["tag -1", "4294967295"]),
            (lambda: mesh.allreduce(floats, tag=1 << 32), ["tag 4294967296"]),
            (lambda: mesh.broadcast(floats, root=2), ["root 2", "0 to 1"]),
            (lambda: mesh.reduce(floats, root=-1), ["root -1"]),
            (lambda: mesh.barrier(timeout=-1), ["-1 s", "at least 0"]),
            (lambda: mesh.barrier(timeout=math.nan), ["nan s", "at least 0"]),
            (lambda: railhead.Mesh(3, 2), ["3"]),
            (lambda: railhead.Mesh(0, 1, device="a\0"), ["device", "zero byte"]),
        ]:
            raised(call, ValueError, *words)
        raised(lambda: mesh.allreduce([1, 2]), TypeError, "list")
        raised(lambda: mesh.gather(floats, root=rank), TypeError, "NoneType")
        mesh.barrier(timeout=math.inf)
    raised(mesh.barrier, ValueError, "closed")
    raised(lambda: mesh.unbound(bytearray(3)), ValueError, "closed")
    mesh.close()


def messages_are_of_memory_that_stays(rank, folder):
    with railhead.Store.file(f"{folder}/messages") as store, railhead.Mesh(rank, 2, timeout=20) as mesh:
        mesh.connect(store)
        other = 1 - rank
        with mesh.unbound(bytearray(8)) as buffer:
            for call, words in [
                (lambda: buffer.send(other, offset=-1), ["offset -1", "0 to 8"]),
                (lambda: buffer.send(other, offset=9), ["offset 9", "0 to 8"]),
                (lambda: buffer.send(other, size=-1), ["size -1", "0 to 8"]),
                (lambda: buffer.recv(other, offset=3, size=6), ["size 6", "0 to 5"]),
                (lambda: buffer.send(other, tag=1 << 64), ["tag 18446744073709551616"]),
                (lambda: buffer.recv(other, tag=-1), ["tag -1"]),
                (lambda: buffer.send(rank), [f"rank {rank}"]),
                (lambda: buffer.recv([]), ["no rank"]),
            ]:
                raised(call, ValueError, *words)
            child = os.fork()
            if child == 0:
                raised(lambda: buffer.send(other), ValueError, "another process's")
                raised(mesh.barrier, ValueError, "another process's")
                buffer.close()
                mesh.close()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        raised(lambda: buffer.send(other), ValueError, "closed")
        buffer.close()
        # Whoever forgets a buffer takes back what has not come, so that its memory is never written to.
        forgotten = bytearray(64)
        mesh.unbound(forgotten).recv(other, tag=5)
        gc.collect()
        mesh.barrier()
        taken = bytearray(b"x" * 64)
        with mesh.unbound(taken) as buffer:
            buffer.send(other, tag=5)
            mesh.barrier()
            with mesh.unbound(into := bytearray(64)) as again:
                again.recv([other], tag=5)
                assert again.wait_recv() == other and buffer.wait_send() == other
        assert forgotten == bytearray(64) and into == taken
        mesh.barrier()
        left = mesh.unbound(bytearray(3))
    raised(lambda: left.send(other), ValueError, "closed")
    left.close()


def what_is_dropped_leaves_nothing(rank, folder):
    def held():
        gc.collect()
        return [len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")]

    def once(server):
        client = railhead.Store.connect("127.0.0.1", server.port, 10)
        client.prefix("p").set("a", b"1")
        mesh = railhead.Mesh(0, 2)
        mesh.address(1)

    with railhead.Store.serve("127.0.0.1") as server:
        once(server)
        ranks.until("its threads are gone", lambda: held()[1] <= 4)
        before = held()
        for _ in range(10):
            once(server)
        ranks.until("as much as before", lambda: held() == before)


def keys_and_values_are_taken_whole(rank, folder):
    with railhead.Store.serve("127.0.0.1") as server, railhead.Store.connect("127.0.0.1", server.port, 10) as client:
        client.set("a", b"1")
        client.append("a", b"2")
        assert client.get("a") == b"12" and client.check(["a"]) and not client.check(["b"])
        assert client.delete_key("a") and not client.delete_key("a")
        raised(lambda: client.get("a", 0.01), railhead.TimedOut, "a")
        client.set(b"bytes", bytearray(b"a\0b"))
        client.append("bytes", memoryview(b"\0c"))
        assert client.get("bytes", math.inf) == b"a\0b\0c" and client.check([b"bytes"])
        client.set("\u00e9", b"")
        assert client.get("\u00e9".encode()) == b"" and client.prefix(b"p").compare_set("k", b"", b"v") == b"v"
        for call, kind, words in [
            (lambda: client.set("a\0b", b"1"), ValueError, ["zero byte"]),
            (lambda: client.get("a\0b", 1), ValueError, ["zero byte"]),
            (lambda: client.prefix("a\0b"), ValueError, ["zero byte"]),
            (lambda: client.check("ab"), TypeError, ["list of keys"]),
            (lambda: client.wait("ab", 0.01), TypeError, ["list of keys"]),
            (lambda: client.set("a", "text"), TypeError, ["'text'", "bytes"]),
            (lambda: client.compare_set("a", "", b"v"), TypeError, ["bytes"]),
            (lambda: client.add("n", 1 << 63), ValueError, ["delta 9223372036854775808"]),
            (lambda: client.get("b", -1), ValueError, ["-1 s"]),
            (lambda: client.get("b", math.nan), ValueError, ["nan s"]),
            (lambda: railhead.Store.connect("127.0.0.1", 65536 + server.port, 1), ValueError, ["port", "65535"]),
            (lambda: railhead.Store.serve("127.0.0.1", -1), ValueError, ["port -1"]),
            (lambda: railhead.Store.connect("a\0b", 1, 1), ValueError, ["host", "zero byte"]),
            (lambda: railhead.Store.file(f"{folder}/a\0b"), ValueError, ["path", "zero byte"]),
        ]:
            raised(call, kind, *words)
        assert client.num_keys() >= 2 and not client.check(["a"]) and not client.check(["n"])
        child = os.fork()
        if child == 0:
            raised(lambda: client.get("a", 1), railhead.Error, "fork")
            client.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        client.set("a", b"still here")
    client.close()
    raised(lambda: client.get("a"), ValueError, "closed")


SCENARIOS = {
    plain_python: (2, {}),
    memory_is_what_it_is: (2, {}),
    messages_are_of_memory_that_stays: (2, {}),
    what_is_dropped_leaves_nothing: (1, {}),
    keys_and_values_are_taken_whole: (1, {}),
}

if __name__ == "__main__":
    ranks.main(SCENARIOS)
