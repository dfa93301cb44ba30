"""Railhead's tensors beside its own plugin, gRPC, and what this machine's memory allows: `make bench-tensor`.

Has everybody do the same rows in turn, round by round. What is missing is skipped, with the reason. Ratios are taken round by round, so that a slow
moment counts for both.

Usage: tensor.py RAILHEAD PLUGIN FOLDER [--rounds N] [--seconds S] [--only TEXT] [--json] -- BENCH..., where the folder is for what it installs,
and BENCH is the command of benches/tensor.rs.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rounds import MIB, Failed, here, launch, processor, spread, tell

# Requests that are under way at any time, of tensors and of the plugin, where it is not one.
AHEAD = 8
WIRES = ["shm", "tcp"]


@dataclass
class Row:
    """Tensors of so many bytes. By what they are compared with, and wire: the ratio of figures that is wanted."""

    mode: str
    size: int
    keys: int
    workers: int
    figure: str
    wanted: dict

    def __str__(self):
        size = f"{self.size // MIB} MiB" if self.size >= MIB else f"{self.size} B"
        keys = "a key" if self.keys == 1 else f"{self.keys} keys"
        return f"{self.mode}, {size}, {keys}, {self.workers} workers"


PLUGIN, GRPC, MEMCPY, ONE_KEY = "the plugin", "gRPC", "memcpy", "a key of each"
ROWS = [
    Row("direct", MIB, AHEAD, 2, "gb_s", {PLUGIN: 0.8, GRPC: 5}),
    Row("direct", 64 * MIB, AHEAD, 2, "gb_s", {PLUGIN: 0.8, GRPC: 5}),
    Row("direct", 8, 1, 2, "p50_us", {PLUGIN: 3}),
    Row("buffered", MIB, AHEAD, 2, "gb_s", {MEMCPY: 0.35}),
    Row("direct", MIB, 1000, 8, "gb_s", {ONE_KEY: 0.8}),
]


def environment(wire):
    return {"RAILHEAD_FABRIC": "soft", "RAILHEAD_SOFT_WIRE": wire, "NCCL_SOCKET_IFNAME": "lo"}


class Measures:
    """What everybody does: each gives the figure of a row."""

    def __init__(self, options):
        self.options = options
        self.skipped = {}
        self.python = self.installed()

    def installed(self):
        """A Python that has grpcio, if it can be had."""
        folder = self.options.folder / "grpc"
        python = folder / "bin/python"
        if not python.exists() or subprocess.run([python, "-c", "import grpc"], capture_output=True).returncode:
            for command in [[sys.executable, "-m", "venv", folder], [folder / "bin/pip", "install", "--quiet", "grpcio"]]:
                if subprocess.run(command, capture_output=True).returncode:
                    self.skipped[GRPC] = "grpcio cannot be installed"
                    return None
        return python

    def tensors(self, row, wire, keys=None, workers=None):
        numbers = [row.size, keys or row.keys, workers or row.workers, self.options.seconds]
        return launch([[*self.options.bench, "--", row.mode, *map(str, numbers)]], environment(wire))[row.figure]

    def plugin(self, row, wire, limit="none"):
        """The plugin's figure, or that of the limit beside it."""
        command = [self.options.railhead, "perf", "--plugin", self.options.plugin, "--json", "--limits", limit, "--rounds", "1"]
        command += ["--sizes", str(row.size), "--round-ms", str(int(self.options.seconds * 1000))]
        command += ["--what", "latency"] if row.figure == "p50_us" else ["--what", "bandwidth", "--outstanding", str(AHEAD)]
        measured = launch([command], environment(wire))["rows"][0]
        return (measured["plugins"] if limit == "none" else measured["limits"])[0]["figure"]["median"]

    def other(self, what, row, wire):
        """The same by others, or None."""
        if what == PLUGIN:
            return self.plugin(row, wire)
        if what == ONE_KEY:
            # As many workers do as much, with one key each.
            return self.tensors(row, wire, row.workers - 1, row.workers)
        if what == MEMCPY:
            return self.plugin(row, wire, "memcpy")
        if self.python is None:
            return None
        return launch([[self.python, here / "anchors/grpc_stream.py", str(row.size), str(self.options.seconds)]])["gb_s"]


def result(row, wire, own, others, skipped):
    """All about one row and wire, for JSON."""
    compared, missed = {}, []
    for what, wanted in row.wanted.items():
        figures = [other[what] for other in others if other[what] is not None]
        if not figures:
            compared[what] = {"skipped": skipped.get(what, "")}
            continue
        ratio = [mine / other for mine, other in zip(own, figures)]
        median = statistics.median(ratio)
        met = median <= wanted if row.figure == "p50_us" else median >= wanted
        compared[what] = {"figures": figures, "ratio": ratio, "wanted": wanted}
        if not met and wire == "shm":
            missed.append(what)
    return {"work": str(row), "wire": wire, "unit": {"gb_s": "GB/s", "p50_us": "us"}[row.figure], "figures": own, "beside": compared, "missed": missed}


def line(one):
    """Of the table."""
    beside, wanted = [], []
    for what, other in one["beside"].items():
        if "skipped" in other:
            beside.append(f"{what}: SKIP: {other['skipped']}")
            continue
        beside.append(f"{what} {spread(other['figures'])}: {spread(other['ratio'])}")
        if one["wire"] == "shm":
            wanted.append(f"{'<=' if one['unit'] == 'us' else '>='} {other['wanted']} of {what}")
    verdict = f"MISSED: {', '.join(one['missed'])}" if one["missed"] else "met" if wanted else ""
    cells = [one["work"], one["wire"], f"{spread(one['figures'])} {one['unit']}", "; ".join(beside), ", ".join(wanted) or "-", verdict]
    return f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(prog="tensor.py")
    parser.add_argument("railhead")
    parser.add_argument("plugin")
    parser.add_argument("folder", type=Path)
    parser.add_argument("bench", nargs="+")
    parser.add_argument("--rounds", type=int, default=5, help="how often each row is measured (5)")
    parser.add_argument("--seconds", type=float, default=0.5, help="that a measurement takes (0.5)")
    parser.add_argument("--only", default="", help="rows whose names have this in them, such as direct")
    parser.add_argument("--json", action="store_true", help="all figures")
    options = parser.parse_args()
    if options.rounds < 1 or not 0.01 <= options.seconds <= 10:
        parser.error("--rounds takes 1 or more, --seconds 0.01 to 10")
    rows = [row for row in ROWS if options.only in str(row)]
    if not rows:
        parser.error(f"--only: {options.only!r} is in none of: {'; '.join(map(str, ROWS))}")
    options.folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    figures = {(str(row), wire): ([], []) for row in rows for wire in WIRES}
    try:
        measures = Measures(options)
        for number in range(options.rounds):
            for row in rows:
                for wire in WIRES:
                    tell(f"round {number + 1} of {options.rounds}: {row}, {wire}")
                    own, others = figures[str(row), wire]
                    own.append(measures.tensors(row, wire))
                    others.append({what: measures.other(what, row, wire) for what in row.wanted})
        tell("")
    except Failed as failed:
        sys.exit(f"tensor.py: {failed}")
    results = [result(row, wire, *figures[str(row), wire], measures.skipped) for row in rows for wire in WIRES]
    about = {"cores": len(os.sched_getaffinity(0)), "processor": processor(), "rounds": options.rounds, "seconds": options.seconds}
    if options.json:
        print(json.dumps(about | {"rows": results}, indent=2))
        return
    print("| work | wire | tensors | beside: figure, and the ratio to it | wanted | |")
    print("|" + "---|" * 6)
    for one in results:
        print(line(one))
    print(f"\nMedians (min..max) of {options.rounds} round(s) on {about['cores']} core(s) of {about['processor']}.")


main()
