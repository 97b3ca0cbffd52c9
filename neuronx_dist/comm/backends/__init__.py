"""Backends, which move the bytes: one module each.

c10d.py            process groups of torch.distributed: gloo, NCCL; message_lists.py: lists of tensors on gloo
capabilities.py    what a process group's backend can do; substitutes.py: what is missing, done by what is there
torch_job.py       a rank of a torch.distributed job: the same, and the watch for failures
call_agreement.py  the same; ranks that start different collectives stop, with both call sites (NEURONX_DIST_DEBUG)
threads.py         ranks as threads of one process; process_generators.py: their random states
shapes.py          no other rank at all: results have the right shape, and no values
local_device.py    the device of this process, for `init_distributed`
observed.py        the same, and it records what one rank does in place of many
xla.py             torch_xla, one program for all ranks; xla_groups.py, xla_transfer.py

Modules that not every program needs are imported by name: `backends.torch_job`, `backends.xla`, `backends.observed`.
"""

from __future__ import annotations

from ...lazy_names import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        name: f":comm.backends.{name}"
        for name in ("c10d", "call_agreement", "local_device", "torch_job", "observed", "shapes", "xla")
    },
)
