"""Our server beside torch's libuv server, and beside one that does nothing but receive and send (tests/c/store_floor.c, where there is a C compiler): starts
them and runs benches/store.rs.

The servers look up names in files alone, where that can be had (`unshare`): torch's asks for the name of each client as it accepts it, and a name
server's patience is no server's speed.

Usage: bench.py RAILHEAD COMMAND [ARGUMENT...], where the command is to be given the servers.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

here = pathlib.Path(__file__).resolve().parent
setup = subprocess.run([sys.executable, here / "setup.py", here.parent.parent / "target/torch"], stdout=subprocess.PIPE, text=True)
if setup.returncode != 0:
    sys.exit(setup.stdout or "setup.py failed")

commands = {
    "Railhead": [sys.argv[1], "store", "serve", "--port", "0"],
    "torch": [setup.stdout.strip(), here / "server.py", "libuv"],
}


def floor(folder):
    """The command of the server that does nothing, for values of SIZE bytes as in benches/store.rs."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if not compiler:
        return {}
    program = pathlib.Path(folder) / "store_floor"
    subprocess.run([compiler, "-O2", "-o", program, here.parent / "c/store_floor.c"], check=True)
    return {"floor": [program, "64"]}


def without_name_server(folder):
    """What to put before a command."""
    switch = pathlib.Path(folder) / "nsswitch.conf"
    switch.write_text("hosts: files\n")
    script = 'mount --bind "$0" /etc/nsswitch.conf && exec "$@"'
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, switch]
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        print("The name server is asked for each client of torch's server: its time is in the times of connecting.", file=sys.stderr)
        return []
    return prefix


signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
servers = {}
with tempfile.TemporaryDirectory() as folder:
    prefix = without_name_server(folder)
    try:
        named = []
        for name, command in (commands | floor(folder)).items():
            servers[name] = subprocess.Popen([*prefix, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            # The prefix becomes the command, so the process is the server.
            named += [f"{name}={servers[name].stdout.readline().strip().rpartition(':')[2]}={servers[name].pid}"]
        sys.exit(subprocess.run([*sys.argv[2:], *named]).returncode)
    finally:
        for server in servers.values():
            server.terminate()
            server.wait()
