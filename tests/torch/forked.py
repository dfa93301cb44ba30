"""Runs scripts in processes that have imported torch before they began, as they are forked from one that has: the import takes seconds.

Usage: forked.py serve NAME                          says "ready", and serves until its standard input ends
       forked.py run NAME SCRIPT [ARGUMENT]...       with this process's streams, environment and exit status; who kills it kills the script

NAME is that of an abstract socket.
"""

import json
import os
import select
import signal
import socket
import sys


def run(name, script, *arguments):
    with socket.socket(socket.AF_UNIX) as server:
        server.connect("\0" + name)
        what = json.dumps([script, arguments, dict(os.environ)]).encode()
        socket.send_fds(server, [len(what).to_bytes(4, "little")], [0, 1, 2])
        server.sendall(what)
        status = server.recv(1)
        sys.exit(status[0] if status else "the process that runs it has ended")


def serve(name):
    import torch.distributed  # noqa: F401

    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + name)
    listener.listen(64)
    # Nobody waits for those that wait for the scripts.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while 0 not in select.select([listener, 0], [], [])[0]:
        peer, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            keep(peer)
        peer.close()


def keep(peer):
    """Runs what `peer` asks for, and says how it ended."""
    size, streams, _, _ = socket.recv_fds(peer, 4, 3)
    with peer.makefile("rb") as reader:
        script, arguments, environment = json.loads(reader.read(int.from_bytes(size, "little")))
    child = os.fork()
    if child == 0:
        peer.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        execute(script, arguments, environment)
    for stream in streams:
        os.close(stream)
    if peer in select.select([peer, os.pidfd_open(child)], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        peer.sendall(bytes([code if code >= 0 else 128 - code]))
    except BrokenPipeError:
        pass  # it was killed
    os._exit(0)


def execute(script, arguments, environment):
    import runpy

    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    # What it raises, this process ends by.
    runpy.run_path(script, run_name="__main__")
    sys.exit(0)


{"run": run, "serve": serve}[sys.argv[1]](*sys.argv[2:])
