"""Breaks the code on purpose, once per mutant, and has the simulator find it: `make mutants`.

What the simulator cannot find it does not prove. Each mutant is one rule, left out, of how a link goes on without a rail (docs/simulation.md) or of
when a tensor's memory is free; the table says after how many schedules that broke a promise. A mutant that is not found, or whose text is gone, is
an error.

Usage: mutants.py [--schedules N] [NAME]..., with cargo as CARGO.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "target" / "mutants"
CARGO = os.environ.get("CARGO", "cargo").split()

# By name: the file, what stands there, what stands there instead, and the scenario.
MUTANTS = {
    "no wait for the peer's Down": (
        "src/link/link/rails.rs",
        "            Phase::Down => {\n                if heard >= Word::down(it.generation) {",
        "            Phase::Down => {\n                if heard >= Word::up(it.generation) {",
        "comms",
    ),
    "no drain": ("src/link/link/rails.rs", "if self.qps.rail_drained(rail) {", "if self.qps.rail_drained(rail) || true {", "comms"),
    "packet numbers are used again": ("src/fabric/sim/queue_pair.rs", "generation.wrapping_mul(0x9e_3779)", "generation.wrapping_mul(0)", "comms"),
    "clear-to-sends are not written again": (
        "src/net/receiver.rs",
        "Some(self.tail.saturating_sub(SLOTS as u64))",
        "Some(self.tail.saturating_sub(1))",
        "comms",
    ),
    "stripes are counted by the rails that are live": (
        "src/link/sends.rs",
        "stripes: plan.stripes as u32, epoch",
        "stripes: plan.stripes.min(qps.live_rails().count()) as u32, epoch",
        "comms",
    ),
    "the next generation begins before the peer has settled": (
        "src/link/link/rails.rs",
        "heard >= Word::settled(it.generation) && now >= it.retry_at",
        "now >= it.retry_at",
        "comms",
    ),
    "what has landed is sent again": (
        "src/link/link/rails.rs",
        "let landed = received.wrapping_sub(it.done) as usize;",
        "let landed = received.wrapping_sub(it.done).min(0) as usize;",
        "comms",
    ),
    "what is said while no rail works counts nothing": (
        "src/link/link/rails.rs",
        "self.liveness.say_cell(rail, &cell)",
        "self.liveness.say_cell(rail, &encode_cell(it.word, &[0; MAX_QPS_PER_RAIL]))",
        "comms",
    ),
    "what is lost in order is sent again in another one": (
        "src/link/failover.rs",
        "self.lost_in_order.push_front(what)",
        "self.lost_in_order.push_back(what)",
        "both_ways",
    ),
    "a receive of a tensor ends while the producer may write": (
        "src/tensor/calls.rs",
        "Some(call) if call.is_exposed =>",
        "Some(call) if call.is_exposed && false =>",
        "tensors",
    ),
    "a tensor's memory is released once its write is posted": (
        "src/tensor/io.rs",
        "*place = Some(Sent::Tensor { _memory: memory });",
        "drop(memory);\n                *place = Some(Sent::Tensor { _memory: Tensor::dead() });",
        "tensors",
    ),
    "what comes for a receive that gave up is not kept": (
        "src/tensor/core/events.rs",
        "if let Some(table) = self.steps.table(what.step) {",
        "if let Some(table) = self.steps.table(what.step).filter(|_| false) {",
        "tensors",
    ),
    "a buffer is idle before its tensor was copied out": (
        "src/tensor/core/events.rs",
        "        let is_shared = ids.len() > 1;",
        "        self.consumed(from, &tensor);\n        let is_shared = ids.len() > 1;",
        "tensors",
    ),
}


def copied() -> pathlib.Path:
    """A copy of what git knows, in which what is already there keeps its times if it is the same: cargo builds less."""
    source = FOLDER / "source"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            write(source / name, (ROOT / name).read_bytes())
            # Some are programs.
            (source / name).chmod((ROOT / name).stat().st_mode)
    return source


def write(path: pathlib.Path, data: bytes) -> None:
    if not path.is_file() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def built(source: pathlib.Path) -> str:
    """The simulator's program."""
    command = [*CARGO, "test", "--quiet", "--workspace", "--profile", "sim", "--features", "stages,sim", "--target-dir", str(FOLDER / "build")]
    command += ["--bin", "railhead", "--test", "sim", "--no-run", "--message-format=json"]
    environment = {**os.environ, "RUSTFLAGS": "-Aunused -Aclippy::all"}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    found = re.findall(r'"executable":"([^"]*/sim-[^"]*)"', done.stdout)
    if done.returncode != 0 or not found:
        sys.exit(f"it does not compile:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found[0]


def main(words: list[str]) -> None:
    schedules = words[words.index("--schedules") + 1] if "--schedules" in words else "100000"
    names = [word for word in words if word in MUTANTS] or list(MUTANTS)
    source = copied()
    failed = False
    print("| mutant | found within schedules |\n|---|---|", flush=True)
    for name in names:
        file, good, bad, scenario = MUTANTS[name]
        path = source / file
        whole = path.read_text()
        if whole.count(good) != 1:
            sys.exit(f"{name}: {file} has this {whole.count(good)} times; expected once: {good}")
        path.write_text(whole.replace(good, bad))
        try:
            program = shutil.copy(built(source), FOLDER / "program")
        finally:
            path.write_text(whole)
        done = subprocess.run([program, "--first", "--schedules", schedules, scenario], capture_output=True, text=True)
        count = re.search(r"^(\d+) schedules, (\d+) violations$", done.stdout, re.M)
        if not count:
            sys.exit(f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        is_found = count[2] != "0"
        failed |= not is_found
        print(f"| {name} | {count[1] if is_found else f'not in {count[1]}'} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
