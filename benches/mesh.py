"""Railhead's mesh beside Gloo and Open MPI, and beside what this machine's memory allows: `make bench-mesh`.

Builds benches/anchors/ with what is installed, and has everybody do the same rows in turn, round by round: as many processes each, on the same cores,
by the rules of `railhead mesh bench`, which is Railhead's own contestant. A library that cannot be built with, or does not run, is skipped, with the
reason. A figure is the median of what rank 0 measured, or the mean where ranks share cores.

Gloo and Open MPI can do a row in several ways: by algorithms, with settings. All are tried once; in the rounds the fastest two are measured, and the
better one of them counts. Ratios are taken round by round, so that a slow moment counts for both.

Where QEMU can be had, two ranks on two RDMA devices are measured in the virtual machine of tests/softroce, beside Gloo on the same two.

The limit, in seconds, for n ranks of S bytes on so many cores: (2(n-1)S/memcpy + (n-1)S/add) / min(n, cores), where `memcpy` and `add` are the bytes
per second that one core alone copies, and adds, from one array of S bytes to another.

Usage: mesh.py RAILHEAD FOLDER [--rounds N] [--seconds S] [--only TEXT] [--json], where the folder is for the programs that it builds.
"""

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from rounds import MIB, PATIENCE, Failed, build, digits, here, launch, processor, spread, tell

# Cores that more ranks than these share.
CROWDED = 2
# Ways of an anchor that are measured in every round, if they are no slower than the fastest by more than this factor when they are tried.
FINALISTS, SLOWER = 2, 1.5


@dataclass
class Row:
    """What is done by so many ranks with so many bytes, and how often before it is measured. Wanted, by wire: how many times as fast as
    others Railhead is to be, and the share of the limit that it is to reach. Less than 0.7 of a time is 1.43 times as fast."""

    what: str
    size: int
    ranks: int
    warmup: int
    wanted: dict

    def __str__(self):
        size = f" {self.size // MIB} MiB" if self.size >= MIB else f" {self.size} B" if self.size else ""
        return f"{self.what}{size}, n={self.ranks}"

    def cores(self):
        """Those that it is done on."""
        cores = sorted(os.sched_getaffinity(0))
        return cores[:CROWDED] if self.ranks > CROWDED else cores

    def crowded(self):
        """Whether ranks take turns. Then who polls without end keeps the others from working."""
        return self.ranks > len(self.cores())

    def figure(self, printed):
        """The median; of ranks that take turns the mean, as one of them may find that all others have come while they had theirs."""
        return printed["mean_us" if self.crowded() else "p50_us"]


ROWS = [
    Row("allreduce", 64 * MIB, 2, 3, {"shm": {"limit": 0.7, "Gloo": 3, "Open MPI": 1.1}, "tcp": {"Gloo": 1.3, "Open MPI": 1}}),
    Row("allreduce", MIB, 2, 20, {"shm": {"Gloo": 1.43}}),
    Row("allreduce", 8, 2, 100, {"shm": {"Gloo": 2.5, "Open MPI": 0.5}}),
    Row("barrier", 0, 2, 100, {"shm": {"Gloo": 1.43}}),
    Row("allreduce", MIB, 8, 10, {"shm": {"Gloo": 1.43}}),
    Row("barrier", 0, 8, 50, {"shm": {"Gloo": 1.43}}),
]
WIRES = ["shm", "tcp"]
ANCHORS = ["Gloo", "Open MPI"]


# Behind the name of an algorithm of Gloo's older kind: messages are read by the caller's thread, which polls, and not by Gloo's.
SYNC = "-sync"


def both(*names):
    return [f"{name}{sync}" for name in names for sync in ["", SYNC]]


GLOO = {
    "allreduce": ["auto", "ring", "bcube", *both("old-ring", "old-ring-chunked", "old-halving-doubling", "old-bcube")],
    "barrier": ["auto", *both("old-all-to-all", "old-all-to-one")],
}
MPIRUN = "mpirun --allow-run-as-root --oversubscribe --bind-to none --mca pml ob1"
OPEN_MPI = {
    "shm": {"vader": "--mca btl self,vader", "vader no-cma": "--mca btl self,vader --mca btl_vader_single_copy_mechanism none"},
    "tcp": {"tcp": "--mca btl self,tcp --mca btl_tcp_if_include lo"},
}


def anchors(folder):
    """The programs of the libraries beside Railhead, and for each that there is none of, the reason."""
    programs, skipped = {}, {}
    for name, arguments in {"Gloo": ("gloo.cc", "c++", "-lgloo", "-libverbs", "-pthread"), "Open MPI": ("open_mpi.c", "mpicc")}.items():
        try:
            programs[name] = build(folder, *arguments)
        except Failed as failed:
            skipped[name] = str(failed)
    return programs, skipped


def railhead(program, wire):
    def measure(row, seconds):
        command = [program, "mesh", "bench", "--json", "--timeout", str(PATIENCE), "--ranks", str(row.ranks), "--what", row.what]
        command += ["--elements", str(row.size // 4), "--warmup-iters", str(row.warmup), "--iteration-time", str(seconds)]
        return launch([command], {"RAILHEAD_FABRIC": "soft", "RAILHEAD_SOFT_WIRE": wire, "NCCL_SOCKET_IFNAME": "lo"})[0]

    return measure


def numbers(row, seconds):
    return [row.what, str(row.size // 4), str(row.warmup), str(seconds)]


def gloo(program, way):
    def measure(row, seconds):
        with tempfile.TemporaryDirectory() as folder:
            return launch([[program, *numbers(row, seconds), str(rank), str(row.ranks), folder, way] for rank in range(row.ranks)])

    return measure


def open_mpi(program, wire, idle):
    settings = f"{MPIRUN} {wire} --mca mpi_yield_when_idle {idle}".split()
    return lambda row, seconds: launch([[*settings, "-np", str(row.ranks), program, *numbers(row, seconds)]])


def limit(program, row, seconds):
    """What a core does in GB/s, alone and beside others that do the same, and the limit in microseconds."""
    command = [program, str(row.size), str(seconds / 4)]
    cores = min(row.ranks, len(row.cores()))
    alone, beside = launch([command]), launch([command] * cores)
    copied = (row.ranks - 1) * row.size
    return {"alone": alone, "beside": beside, "us": (2 * copied / alone["memcpy"] + copied / alone["add"]) / 1e3 / cores}


def ways(row, programs, own):
    """How everybody can do a row: by name and wire, and by way, what measures it so."""
    all_ways = {("Railhead", wire): {"": railhead(own, wire)} for wire in WIRES}
    if program := programs.get("Gloo"):
        gloos = [way for way in GLOO[row.what] if not (row.crowded() and way.endswith(SYNC))]
        all_ways["Gloo", "tcp"] = {way: gloo(program, way) for way in gloos}
    if program := programs.get("Open MPI"):
        for wire, settings in OPEN_MPI.items():
            idles = [1] if row.crowded() else [0, 1]
            both_ways = ((f"{way}{', yields' * idle}", how, idle) for way, how in settings.items() for idle in idles)
            all_ways["Open MPI", wire] = {way: open_mpi(program, how, idle) for way, how, idle in both_ways}
    return all_ways


class Contest:
    """What everybody has reached in one row."""

    def __init__(self, row, programs, skipped, options):
        self.row, self.options, self.limits = row, options, []
        # By name and wire: how it is done in the rounds, the figures so far of each way, and of those that were tried. Without figures, the reason.
        self.field, self.figures, self.tried, self.skipped = {}, {}, {}, {}
        for wire in WIRES:
            self.skipped |= {(name, wire): reason for name, reason in skipped.items()}
        for key, all_ways in ways(row, programs, options.railhead).items():
            self.field[key] = all_ways if key[0] == "Railhead" else self.finalists(key, all_ways)
            self.figures[key] = {way: [] for way in self.field[key]}

    def finalists(self, key, all_ways):
        tried, reasons = {}, []
        for way, measure in all_ways.items():
            try:
                tried[way] = self.measured(measure)
            except Failed as failed:
                reasons.append(str(failed))
        self.tried[key] = tried
        if not tried:
            self.skipped[key] = reasons[0]
        fastest = sorted(tried, key=tried.get)[:FINALISTS]
        return {way: all_ways[way] for way in fastest if tried[way] <= SLOWER * tried[fastest[0]]}

    def measured(self, measure):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.row.cores())
        try:
            return self.row.figure(measure(self.row, self.options.seconds))
        finally:
            os.sched_setaffinity(0, cores)

    def round(self, number, limits):
        """Everybody in turn, in every second round the last one first."""
        order = [(key, way, measure) for key, by_way in self.field.items() for way, measure in by_way.items()]
        for key, way, measure in order[:: -1 if number % 2 else 1]:
            try:
                self.figures[key][way].append(self.measured(measure))
            except Failed as failed:
                if key[0] == "Railhead":
                    raise
                # An anchor's way that fails is out.
                del self.field[key][way], self.figures[key][way]
                self.skipped[key] = str(failed)
        if self.row.size >= MIB:
            self.limits.append(limit(limits, self.row, self.options.seconds))

    def best(self, key):
        """The way that counts, and its figures."""
        by_way = self.figures.get(key, {})
        return min(by_way.items(), key=lambda one: statistics.median(one[1]), default=(None, []))

    def result(self, wire):
        """All about one wire, for JSON. Ratios are how many times as fast as another Railhead is."""
        _, own = self.best(("Railhead", wire))
        ratio = lambda others: [other / mine for other, mine in zip(others, own)]
        result = {"work": str(self.row), "wire": wire, "us": own, "wanted": self.row.wanted.get(wire, {}), "anchors": {}}
        reached = {}
        for name in ANCHORS:
            key = (name, "tcp" if name == "Gloo" else wire)
            way, figures = self.best(key)
            if not figures:
                result["anchors"][name] = {"skipped": self.skipped[key]}
                continue
            result["anchors"][name] = {"way": way, "us": figures, "ratio": ratio(figures), "tried_us": self.tried[key]}
            reached[name] = statistics.median(ratio(figures))
        if self.limits:
            result["limit"] = {"us": [one["us"] for one in self.limits], "share": ratio([one["us"] for one in self.limits]), "rounds": self.limits}
            reached["limit"] = statistics.median(result["limit"]["share"])
        result["missed"] = [what for what, least in result["wanted"].items() if reached.get(what, least) < least]
        result["not_measured"] = [what for what in result["wanted"] if what not in reached]
        return result


RDMA = Row("allreduce", MIB, 2, 3, {"verbs": {"Gloo": 1}})
RDMA_GLOO = both("old-ring", "old-ring-chunked", "old-halving-doubling", "old-bcube")
# Everybody in turn, round by round; a line of each: the round, whose it is and which way, and what rank 0 printed.
RDMA_SCRIPT = """
export RAILHEAD_FABRIC=verbs LD_LIBRARY_PATH=. FOLDER=/tmp/ranks
railhead() { ./railhead mesh bench --json --what $WHAT --elements $ELEMENTS --warmup-iters $WARMUP --iteration-time $SECONDS_EACH \
    --device $1 --url "file://$FOLDER/store?rank=$2&world_size=2" | tr -d '\\n'; }
gloo() { ./gloo $WHAT $ELEMENTS $WARMUP $SECONDS_EACH $2 2 $FOLDER $WAY $1; }
both() {
    rm -rf $FOLDER && mkdir $FOLDER
    timeout 60 bash -c "$1 rxe1 1" >/dev/null 2>&1 & other=$!
    said=$(timeout 60 bash -c "$1 rxe0 0" 2>&1) && wait $other && echo "$ROUND $1 $WAY $said" || echo "$ROUND failed $1 $WAY $said"
}
export -f railhead gloo
for ROUND in $(seq $ROUNDS); do
    for WAY in -; do both railhead; done
    for WAY in $WAYS; do export WAY; both gloo; done
done
"""


def rdma(programs, skipped, options):
    """The same kind of result, from the virtual machine; Gloo's best way counts. Or why there is none."""
    files = {options.railhead: "railhead"}
    if gloo := programs.get("Gloo"):
        files[gloo] = "gloo"
        needed = subprocess.run(["ldd", gloo], capture_output=True, text=True).stdout.split("\n")
        libraries = [line.split()[2] for line in needed if "=> /" in line]
        files |= {path: os.path.basename(path) for path in libraries if not os.path.basename(path).startswith(("libc.", "libm.", "libibverbs."))}
    setting = {"WHAT": RDMA.what, "ELEMENTS": RDMA.size // 4, "WARMUP": RDMA.warmup, "SECONDS_EACH": options.seconds}
    setting |= {"ROUNDS": options.rounds, "WAYS": f"'{' '.join(RDMA_GLOO) if gloo else ''}'"}
    script = f"export {' '.join(f'{name}={value}' for name, value in setting.items())}\n{RDMA_SCRIPT}"
    command = [here.parent / "tests/softroce/vm", "--timeout", "1800"]
    for path, name in files.items():
        command += ["--file", f"{path}={name}"]
    done = subprocess.run([*command, "--", script], capture_output=True, text=True)
    if done.returncode == 77:
        return done.stdout.strip()
    own, by_way, failed = [], {}, "Gloo did not run"
    for line in done.stdout.splitlines():
        match line.split(maxsplit=3):
            case [_, "railhead", _, printed]:
                own.append(json.loads(printed)[0]["p50_us"])
            case [_, "gloo", way, printed]:
                by_way.setdefault(way, []).append(json.loads(printed)["p50_us"])
            case [_, "failed", "railhead", said]:
                raise Failed(f"railhead, in the virtual machine: {said}")
            case [_, "failed", "gloo", said]:
                failed = said
    if len(own) != options.rounds:
        raise Failed(f"the virtual machine: {done.stderr.strip() or done.stdout.strip()[-300:]}")
    result = {"work": f"{RDMA}, Soft-RoCE", "wire": "verbs", "us": own, "wanted": RDMA.wanted["verbs"], "anchors": {}, "missed": [], "not_measured": []}
    by_way = {way: figures for way, figures in by_way.items() if len(figures) == options.rounds}
    if by_way:
        way, figures = min(by_way.items(), key=lambda one: statistics.median(one[1]))
        ratio = [other / mine for other, mine in zip(figures, own)]
        result["anchors"]["Gloo"] = {"way": f"{way} over ibverbs", "us": figures, "ratio": ratio, "tried_us": by_way}
        result["missed"] = [what for what, least in result["wanted"].items() if statistics.median(ratio) < least]
    else:
        result["anchors"]["Gloo"] = {"skipped": skipped.get("Gloo", failed)}
        result["not_measured"] = list(result["wanted"])
    result["anchors"]["Open MPI"] = {"skipped": "not in the virtual machine"}
    return result


def time(figures):
    return f"{spread(figures, 1000)} ms" if statistics.median(figures) >= 1000 else f"{spread(figures)} us"


def line(result):
    """Of the table."""
    cells = [result["work"], result["wire"], time(result["us"])]
    for anchor in result["anchors"].values():
        cells += [f"SKIP: {anchor['skipped']}", "-"] if "skipped" in anchor else [f"{time(anchor['us'])}, {anchor['way']}", spread(anchor["ratio"])]
    cells += [time(result["limit"]["us"]), spread(result["limit"]["share"])] if "limit" in result else ["-", "-"]
    cells.append(", ".join(f"{what} >= {least}" for what, least in result["wanted"].items()) or "-")
    verdicts = [f"MISSED: {', '.join(result['missed'])}"] * bool(result["missed"])
    verdicts += [f"not measured: {', '.join(result['not_measured'])}"] * bool(result["not_measured"])
    cells.append("; ".join(verdicts) or ("met" if result["wanted"] else ""))
    return f"| {' | '.join(cells)} |"


def machine(programs):
    """What it was measured on, and with."""
    said = lambda *command: subprocess.run(command, capture_output=True, text=True).stdout
    versions = {"Gloo": lambda: said("dpkg-query", "-W", "-f=${Version}", "libgloo-dev"), "Open MPI": lambda: said("mpirun", "--version").split()[3]}
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "versions": {name: versions[name]() for name in programs},
    }


def show(about, results, options):
    print("| work | wire | Railhead | Gloo | times as fast | Open MPI | times as fast | limit | share of it | wanted | |")
    print("|" + "---|" * 11)
    for result in results:
        print(line(result))
    for result in results:
        if "limit" in result and result["wire"] == "shm":
            rates = lambda what, which: spread([one[which][what] for one in result["limit"]["rounds"]])
            print(
                f"\n{result['work']}: a core alone copies {rates('memcpy', 'alone')} GB/s and adds {rates('add', 'alone')};"
                f" where {'both' if about['cores'] == 2 else 'all that it has'} do, each {rates('memcpy', 'beside')} and {rates('add', 'beside')}."
            )
    versions = "".join(f", {name} {of}" for name, of in about["versions"].items())
    print(f"\nMedians (min..max) of {options.rounds} round(s) on {about['cores']} core(s) of {about['processor']}{versions}.")


def main():
    parser = argparse.ArgumentParser(prog="mesh.py")
    parser.add_argument("railhead")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=7, help="how often each row is measured (7)")
    parser.add_argument("--seconds", type=float, default=0.3, help="that a measurement takes (0.3)")
    parser.add_argument("--only", default="", help="rows whose names have this in them, such as n=8")
    parser.add_argument("--json", action="store_true", help="all figures")
    options = parser.parse_args()
    if options.rounds < 1 or not 0.001 <= options.seconds <= 60:
        parser.error("--rounds takes 1 or more, --seconds 0.001 to 60")
    rows = [row for row in ROWS if options.only in str(row)]
    on_rdma = options.only in f"{RDMA}, Soft-RoCE"
    if not rows and not on_rdma:
        parser.error(f"--only: {options.only!r} is in none of: {'; '.join(map(str, ROWS))}; {RDMA}, Soft-RoCE")
    options.folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        limits = build(options.folder, "limit.c", "cc")
        programs, skipped = anchors(options.folder)
        contests = []
        for row in rows:
            tell(f"{row}: all ways are tried")
            contests.append(Contest(row, programs, skipped, options))
        for number in range(options.rounds):
            for contest in contests:
                tell(f"round {number + 1} of {options.rounds}: {contest.row}")
                contest.round(number, limits)
        tell(f"{RDMA}, in the virtual machine")
        machines = rdma(programs, skipped, options) if on_rdma else None
        tell("")
    except Failed as failed:
        sys.exit(f"mesh.py: {failed}")
    results = [contest.result(wire) for contest in contests for wire in WIRES]
    if isinstance(machines, dict):
        results.append(machines)
    elif machines:
        print(machines, file=sys.stderr)
    about = machine(programs)
    if options.json:
        print(json.dumps(about | {"rounds": options.rounds, "seconds": options.seconds, "rows": results}, indent=2))
    else:
        show(about, results, options)


main()
