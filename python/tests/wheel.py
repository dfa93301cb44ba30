"""Builds the wheel, installs it into a fresh virtual environment, and has a rank use it there, without anything else being named.

Usage: wheel.py LIBRARY

What builds it is fetched into this interpreter's environment, once. Exit status 3, with a reason, if that cannot be had.
"""

import glob
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

USED = """
import railhead
with railhead.Mesh(0, 1) as mesh:
    data = bytearray(b"abc")
    mesh.allreduce(data, dtype="u8")
    mesh.barrier()
print(railhead.__version__, railhead.library_version(), data.decode())
"""
# By the environment's own torch, that the backend is found without an import.
FOUND = """
import tempfile, torch, torch.distributed as dist
dist.init_process_group("railhead", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
print(dist.get_backend())
"""

fetched = subprocess.run(
    [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "setuptools>=70.1"], capture_output=True, text=True
)
if fetched.returncode != 0:
    print("pip install setuptools: " + (fetched.stderr.strip().splitlines() or ["failed"])[-1])
    sys.exit(3)
build = Path(__file__).resolve().parent.parent / "build.py"
environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAILHEAD_LIBRARY")}
with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.executable, str(build), sys.argv[1], folder, "--no-build-isolation"], check=True)
    (wheel,) = glob.glob(f"{folder}/railhead-*.whl")
    venv.create(f"{folder}/fresh", with_pip=True)
    python = f"{folder}/fresh/bin/python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", wheel]
    subprocess.run(pip, check=True, env=environment)
    done = subprocess.run([python, "-c", USED], check=True, env=environment, capture_output=True, text=True, cwd=folder)
    assert done.stdout == "0.1.0 0.1.0 abc\n", done.stdout
    # As if it were installed beside torch.
    packages = glob.glob(f"{folder}/fresh/lib/python3*/site-packages")[0]
    done = subprocess.run([sys.executable, "-c", FOUND], env={**environment, "PYTHONPATH": packages}, capture_output=True, text=True, cwd=folder)
    assert done.stdout == "railhead\n", done.stdout + done.stderr
print("good")
