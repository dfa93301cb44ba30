"""What `make bench-mesh`, `make bench-tensor` and `make bench-torch` share: programs that are built, run and read, and how figures are shown."""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

here = pathlib.Path(__file__).resolve().parent

MIB = 1 << 20
# Seconds that a measurement may take, with all that belongs to it.
PATIENCE = 60


class Failed(Exception):
    """What a program said first."""


def launch(commands, environment=None):
    """Runs programs at once, and returns what the first one prints, which is JSON."""
    name, processes = pathlib.Path(commands[0][0]).name, []
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as printed:
        try:
            for command in commands:
                out = subprocess.DEVNULL if processes else printed
                processes.append(subprocess.Popen(command, stdout=out, stderr=said, env=os.environ | (environment or {})))
            codes = [process.wait(PATIENCE) for process in processes]
        except subprocess.TimeoutExpired:
            raise Failed(f"{name}: not done after {PATIENCE} s") from None
        except OSError as error:
            raise Failed(str(error)) from None
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        said.seek(0)
        printed.seek(0)
        if any(codes):
            lines = [line.strip() for line in said if line.strip(" \n-")]
            raise Failed(lines[0] if lines else f"{name}: exit status {max(codes, key=abs)}")
        return json.load(printed)


def build(folder, source, compiler, *libraries):
    """A program, from its source."""
    program, source = folder / pathlib.Path(source).stem, here / "anchors" / source
    try:
        done = subprocess.run([compiler, "-O3", "-Wall", "-Wextra", "-o", program, source, *libraries], capture_output=True, text=True)
    except FileNotFoundError:
        raise Failed(f"{compiler} is missing") from None
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or ["it does not compile"]
        raise Failed(errors[0].replace(f"{source.parent}/", ""))
    return str(program)


def digits(number):
    return f"{number:.{max(0, 2 - len(str(int(number))) + 1)}f}"


def spread(figures, unit=1):
    median, least, most = (digits(f(figures) / unit) for f in (statistics.median, min, max))
    return f"{median} ({least}..{most})"


def tell(text):
    """How far it is, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr)


def processor():
    """What it is measured on."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "an unknown processor")
