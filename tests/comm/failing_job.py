"""A job in which one rank fails: `failing_job.py HOW` on every rank, in torchrun's environment (test_failure.py)."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import neuronx_dist
from neuronx_dist import comm


def main(how: str) -> None:
    neuronx_dist.init_distributed("cpu", timeout=30)
    limits = {"silent": 1.5, "different": 2.5}
    neuronx_dist.initialize_model_parallel(tensor_model_parallel_size=2, timeout=limits.get(how))
    rank = comm.rank("tp")
    x = torch.ones(4)
    comm.all_reduce(x, "tp")
    comm.barrier()
    print(f"started at {time.time()}", flush=True)
    if how == "all":
        print(f"failing at {time.time()}", flush=True)
        raise ValueError("the parrot is dead")
    if how == "labels":
        layer = neuronx_dist.parallel_layers.ColumnParallelLinear(4, 8, gather_output=False)
        print(f"failing at {time.time()}", flush=True)
        torch.nn.functional.cross_entropy(layer(torch.ones(2, 4)), torch.tensor([1, 7]))
    if how == "different":  # each waits for a verb that the other does not call
        comm.all_reduce(x, "tp") if rank == 0 else comm.all_gather(torch.ones(2, 3, dtype=torch.int32), "tp")
    if how == "shapes":
        comm.all_reduce(x if rank == 0 else torch.ones(6), "tp")
        comm.barrier()
    if how == "silent":
        if rank == 1:
            time.sleep(4)
            return
        comm.all_gather(x, "tp")  # the line that the message names
    elif rank == 1:
        time.sleep(0.3)
        print(f"failing at {time.time()}", flush=True)
        if how == "killed":
            os._exit(9)
        if how == "exits":
            sys.exit(3)
        if how == "returns":
            return
        if how == "interrupted":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
            time.sleep(10 if os.kill(os.getpid(), signal.SIGINT) is None else 0)  # another thread may get the signal
        raise ValueError("the parrot is dead")
    elif how == "computing":
        time.sleep(60)
    elif how in ("collective", "killed", "exits", "returns", "interrupted"):
        for _ in range(1000):
            comm.all_reduce(x, "tp")
            time.sleep(0.01)
    elif how == "gather":  # made of messages: starting one on a broken connection raises at once
        while True:
            comm.all_gather(x, "tp")
    elif how == "backward":
        weight = torch.ones(4, requires_grad=True)
        while True:
            neuronx_dist.spmd.convert(weight, "tp", src=neuronx_dist.spmd.I, dst=neuronx_dist.spmd.R).sum().backward()


if __name__ == "__main__":
    main(sys.argv[1])
