"""Two ranks of NCCL on one GPU, through the plugin: each collective that torch has, every byte checked, over each wire; then times beside NCCL's own
Socket, and how soon a rank notices that the other was killed.

    python3 tests/gpu/nccl.py LIBRARY [--log FOLDER]

NCCL takes two ranks with different NCCL_HOSTID for two hosts, so all goes through the network plugin (NCCL 2.30: src/init.cc, src/transport/net.cc).
Needs torch with CUDA. Times and the kill need NVIDIA's MPS too, which this starts: without it the two processes' kernels take turns on the GPU, and torch
does not end a rank whose peer is gone, over any network. What is missing is a SKIP.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SIZES = [8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 128 << 20]
# Name, the network that NCCL's log must name, and the environment.
WAYS = [
    ("railhead shm", "Railhead", {"NCCL_NET": "Railhead", "RAILHEAD_SOFT_WIRE": "shm"}),
    ("railhead tcp", "Railhead", {"NCCL_NET": "Railhead", "RAILHEAD_SOFT_WIRE": "tcp"}),
    ("Socket", "Socket", {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"}),
]


def start(way, library, log, what, folder):
    """Both ranks of one job."""
    ranks = []
    for rank in range(2):
        env = {
            **os.environ,
            "NCCL_NET_PLUGIN": os.path.abspath(library),
            "NCCL_HOSTID": "ab"[rank],
            "NCCL_MNNVL_ENABLE": "0",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET",
            "NCCL_DEBUG_FILE": f"{log}/{way[0].replace(' ', '-')}.{what}.{rank}",
            **way[2],
        }
        command = [sys.executable, os.path.abspath(__file__), "--rank", str(rank), "--store", f"{folder}/store", "--what", what]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    return ranks


def finish(ranks, seconds):
    """What the ranks printed; their statuses must be 0."""
    try:
        printed = [rank.communicate(timeout=seconds)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, printed):
        if rank.returncode != 0:
            raise SystemExit(f"a rank ended with {rank.returncode}:\n{text[-4000:]}")
    return printed


def run(way, args, log, what, seconds=120):
    """What rank 0 printed last."""
    with tempfile.TemporaryDirectory() as folder:
        printed = finish(start(way, args.library, log, what, folder), seconds)
    for rank in range(2):
        with open(f"{log}/{way[0].replace(' ', '-')}.{what}.{rank}") as file:
            text = file.read()
        if not re.search(rf"Using network {way[1]}\b", text):
            raise SystemExit(f"NCCL did not use {way[1]}:\n{text[-4000:]}")
    return printed[0].strip().splitlines()[-1]


def killed(way, args, log):
    """Rank 1 is killed in the middle of the work; the seconds until rank 0 ended, and why it did."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = start(way, args.library, log, "killed", folder)
        try:
            for line in ranks[0].stdout:
                if line.startswith("running"):
                    break
            else:
                raise SystemExit("rank 0 ended before rank 1 was killed")
            ranks[1].send_signal(signal.SIGKILL)
            since = time.monotonic()
            text = ranks[0].communicate(timeout=60)[0]
            seconds = time.monotonic() - since
            why = re.search(r"NCCL error: [^,\n]*", text)
            if ranks[0].returncode == 0 or not why:
                raise SystemExit(f"rank 0 ended with {ranks[0].returncode} and no error of NCCL's:\n{text[-4000:]}")
            return seconds, why[0]
        finally:
            for rank in ranks:
                rank.kill()


def rank_main(args):
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{args.store}", rank=args.rank, world_size=2, device_id=torch.device("cuda", 0))
    {"verify": verify, "time": measure, "killed": work}[args.what](torch, dist, args.rank)
    dist.destroy_process_group()


def verify(torch, dist, rank):
    def made(owner, numel, salt):
        return (torch.arange(numel, device="cuda", dtype=torch.int64) * 7 + owner * 3 + salt) % 251

    checks = 0

    def same(what, got, wanted):
        nonlocal checks
        checks += 1
        if not torch.equal(got, wanted.to(got.dtype)):
            raise SystemExit(f"rank {rank}: {what}: wrong data")

    for salt, numel in enumerate([1, 3, 1000, 65536 + 1, 1 << 20, (1 << 24) + 5]):
        for dtype in [torch.float32, torch.bfloat16, torch.int32, torch.uint8]:
            a, b = made(0, numel, salt).to(dtype), made(1, numel, salt).to(dtype)
            mine, other = (a, b) if rank == 0 else (b, a)
            name = f"{numel} of {dtype}"
            got = mine.clone()
            dist.all_reduce(got)
            same(f"all_reduce, {name}", got, a + b)
            got = mine.clone()
            dist.broadcast(got, 1)
            same(f"broadcast, {name}", got, b)
            got = torch.empty(2 * numel, device="cuda", dtype=dtype)
            dist.all_gather_into_tensor(got, mine)
            same(f"all_gather, {name}", got, torch.cat([a, b]))
            got = torch.empty(numel, device="cuda", dtype=dtype)
            dist.reduce_scatter_tensor(got, torch.cat([mine, mine]))
            same(f"reduce_scatter, {name}", got, a + b)
            got = torch.empty(2 * numel, device="cuda", dtype=dtype)
            dist.all_to_all_single(got, torch.cat([a, b] if rank == 0 else [b, a]))
            same(f"all_to_all, {name}", got, torch.cat([a, b] if rank == 0 else [b, a]))
            got = torch.empty(numel, device="cuda", dtype=dtype)
            for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]):
                request.wait()
            same(f"send and recv, {name}", got, other)
    torch.cuda.synchronize()
    if rank == 0:
        print(f"{checks} results checked, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {torch.cuda.get_device_name(0)}")


def measure(torch, dist, rank):
    times = []
    for size in SIZES:
        data = torch.ones(size // 4, device="cuda")
        taken = []
        for _ in range(25):
            dist.barrier()
            torch.cuda.synchronize()
            since = time.perf_counter()
            dist.all_reduce(data)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - since)
        times.append(sorted(taken[5:])[10])
    if rank == 0:
        print(" ".join(f"{seconds * 1e6:.1f}" for seconds in times))


def work(torch, dist, rank):
    data = torch.ones(1 << 20, device="cuda")
    for step in range(1 << 40):
        dist.all_reduce(data)
        torch.cuda.synchronize()
        if step == 20 and rank == 0:
            print("running", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library", nargs="?")
    parser.add_argument("--log")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    parser.add_argument("--what", choices=["verify", "time", "killed"])
    args = parser.parse_args()
    if args.rank is not None:
        return rank_main(args)
    try:
        import torch
    except ImportError:
        return print("SKIP: no torch")
    if not torch.cuda.is_available():
        return print("SKIP: no GPU that torch can use")
    log = args.log or tempfile.mkdtemp()
    os.makedirs(log, exist_ok=True)
    for way in WAYS:
        print(f"{way[0]}: {run(way, args, log, 'verify')}", flush=True)
    if not shutil.which("nvidia-cuda-mps-control"):
        return print("SKIP: times and the kill: no nvidia-cuda-mps-control")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            side_by_side(args, log)
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit -t 1\n", text=True)


def side_by_side(args, log):
    for way in WAYS:
        seconds, why = killed(way, args, log)
        print(f"{way[0]}: rank 1 killed, rank 0 ended {seconds:.2f} s later: {why}", flush=True)
    print("all_reduce of", *SIZES, "bytes: us, medians of 20, rounds in turn", flush=True)
    for _ in range(args.rounds):
        for way in WAYS:
            print(f"  {way[0]:12} {run(way, args, log, 'time')}", flush=True)


if __name__ == "__main__":
    main()
