"""A job of one rank whose gloo threads still have collectives when the script ends (test_failure.py).

`ending_job.py WHAT...`: what the script destroys itself, "mesh" or "groups".
"""

import atexit
import os
import sys


def has_gloo_threads() -> bool:
    tasks = "/proc/self/task"
    return any("gloo" in open(f"{tasks}/{task}/comm").read() for task in os.listdir(tasks))


atexit.register(lambda: print("at the end", has_gloo_threads()))  # registered first, called last

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import neuronx_dist  # noqa: E402
from neuronx_dist.comm import context  # noqa: E402

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
neuronx_dist.initialize_model_parallel()
world = context.current().backend.wrap(dist.group.WORLD, 0)  # as a model or an optimizer keeps one
print("in the job", has_gloo_threads())
sys.setswitchinterval(1000)  # those threads do not run Python in between
for _ in range(2000):
    world.start_all_reduce(torch.ones(8), "sum")  # the thread has the last reference to the tensor
if "mesh" in sys.argv:
    neuronx_dist.destroy_model_parallel()
if "groups" in sys.argv:
    dist.destroy_process_group()
