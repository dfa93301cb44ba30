"""Makes a virtual environment with PyTorch, once, and prints its interpreter.

Usage: setup.py FOLDER

The wheel of the package index is built for CUDA and loads NVIDIA's libraries, which weigh two gigabytes and of which a CPU calls nothing. Where they are
missing, empty libraries with the names that torch looks for take their place, within this environment alone. Exit status 3, with a reason, if
torch cannot be had.
"""

import collections
import ctypes
import fcntl
import glob
import os
import subprocess
import sys
import venv

# Those that `import torch` and torch.distributed need.
REQUIREMENTS = ["filelock", "typing-extensions>=4.13", "sympy>=1.13.3", "networkx", "jinja2", "fsspec", "numpy"]
USABLE = "import torch.distributed as d; assert d.is_available() and d.is_gloo_available()"
# What the missing libraries' functions return: cudaErrorNoDevice, cuda.h.
STUB = "long {}(void) {{ return 100; }}\n"


def give_up(reason):
    print(reason)
    sys.exit(3)


def usable(python):
    return subprocess.run([python, "-c", USABLE], capture_output=True, text=True)


def pip(python, *arguments):
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        give_up("pip install torch: " + (done.stderr.strip().splitlines() or ["failed"])[-1])


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loads(name):
    try:
        ctypes.CDLL(name)
        return True
    except OSError:
        return False


def stub_missing_libraries(folder):
    """Writes a library for each one that torch's libraries need and nobody has, with the symbols that they look for."""
    files = sorted(glob.glob(folder + "/*.so*"))
    needed, wanted, defined = [], set(), set()
    for file in files:
        lines = [line for line in output("readelf", "-dW", file).splitlines() if "(NEEDED)" in line]
        needed += [line.split("[")[1].split("]")[0] for line in lines]
        wanted |= {line.split()[-1] for line in output("nm", "-D", "--undefined-only", file).splitlines() if line.split()[0] == "U"}
        defined |= {line.split()[-1].split("@")[0] for line in output("nm", "-D", "--defined-only", file).splitlines()}
    here = {os.path.basename(file) for file in files}
    missing = [name for name in dict.fromkeys(needed) if name not in here and not loads(name)]
    # A symbol's version is its library's name, with this exception.
    home = {"NVSHMEM": next((name for name in missing if name.startswith("libnvshmem")), None)}
    symbols = {name: collections.defaultdict(set) for name in missing}
    for symbol in wanted:
        name, _, version = symbol.partition("@")
        library = home.get(version, version)
        if library in symbols:
            symbols[library][version].add(name)
        elif not version and name not in defined and name.startswith(("nccl", "cu", "nv")) and missing:
            symbols[missing[0]][""].add(name)
    for library, versions in symbols.items():
        source, script = os.path.join(folder, "stub.c"), os.path.join(folder, "stub.map")
        with open(source, "w") as out:
            out.writelines(STUB.format(name) for name in sorted(set().union(*versions.values())))
        with open(script, "w") as out:
            out.writelines(f"{version} {{ global: {'; '.join(sorted(names))}; }};\n" for version, names in versions.items() if version)
        command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-w", "-o", os.path.join(folder, library), source, "-Wl,-soname," + library]
        if any(versions):
            command.append("-Wl,--version-script=" + script)
        subprocess.run(command, check=True, capture_output=True)
        os.remove(source)
        os.remove(script)


def install(folder, python):
    if not os.path.exists(python):
        venv.create(folder, with_pip=True)
    pip(python, *REQUIREMENTS)
    # Not with its dependencies: those are NVIDIA's.
    pip(python, "--no-deps", "torch>=2.15")
    first = usable(python)
    if first.returncode == 0:
        return
    libraries = glob.glob(folder + "/lib*/python3*/site-packages/torch/lib")
    try:
        stub_missing_libraries(libraries[0])
    except (IndexError, OSError, subprocess.CalledProcessError) as error:
        give_up(f"torch wants libraries that are not here, and they cannot be stood in for: {error}")
    again = usable(python)
    if again.returncode != 0:
        give_up("torch does not load: " + (again.stderr.strip().splitlines() or ["failed"])[-1])


def main():
    folder = os.path.abspath(sys.argv[1])
    os.makedirs(folder, exist_ok=True)
    python, ready = os.path.join(folder, "bin", "python"), os.path.join(folder, "ready")
    # Tests run side by side.
    with open(os.path.join(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(ready):
            try:
                install(folder, python)
            except (OSError, subprocess.CalledProcessError) as error:
                give_up(f"no virtual environment: {error}")
            open(ready, "w").close()
    print(python)


main()
