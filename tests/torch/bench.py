"""Our server beside torch's libuv server: starts both and runs `railhead store bench`.

Usage: bench.py RAILHEAD [ARGUMENT...]
"""

import pathlib
import subprocess
import sys

here = pathlib.Path(__file__).resolve().parent
setup = subprocess.run([sys.executable, here / "setup.py", here.parent.parent / "target/torch"], stdout=subprocess.PIPE, text=True)
if setup.returncode != 0:
    sys.exit(setup.stdout or "setup.py failed")

commands = {
    "Railhead": [sys.argv[1], "store", "serve", "--port", "0"],
    "torch": [setup.stdout.strip(), here / "server.py", "libuv"],
}
servers = {}
try:
    named = []
    for name, command in commands.items():
        servers[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        named += ["--server", f"{name}=localhost:{servers[name].stdout.readline().strip()}"]
    sys.exit(subprocess.run([sys.argv[1], "store", "bench", *named, *sys.argv[2:]]).returncode)
finally:
    for server in servers.values():
        server.terminate()
        server.wait()
