"""Trains a small network on synthetic data with DistributedDataParallel, and prints the loss of each epoch and the time of a step.

torchrun --nproc-per-node 2 ddp.py railhead
torchrun --nproc-per-node 2 ddp.py gloo
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import railhead.torch  # noqa: F401

EPOCHS, SAMPLES, INPUTS, BATCH = 4, 512, 64, 32


def main(backend: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    torch.manual_seed(1)
    teacher = torch.randn(INPUTS, 1)
    inputs = torch.randn(SAMPLES, INPUTS)
    data = TensorDataset(inputs, inputs @ teacher + 0.1 * torch.randn(SAMPLES, 1))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, seed=2)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(INPUTS, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    steps, began = 0, time.perf_counter()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for batch, targets in DataLoader(data, batch_size=BATCH, sampler=sampler):
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += torch.tensor([loss.item() * len(batch), len(batch)])
            steps += 1
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.6f}", flush=True)
    if dist.get_rank() == 0:
        print(f"{backend}: {(time.perf_counter() - began) / steps * 1e3:.2f} ms a step", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "railhead")
