"""What moves the bytes: one module per backend.

c10d.py          process groups of torch.distributed: gloo, NCCL
job.py           a rank of a torch.distributed job: the same, and the watch for failures
agreement.py     the same, and ranks that do different things stop with both call sites (NEURONX_DIST_DEBUG)
threads.py       ranks as threads of one process
shapes.py        no other rank at all: results have the right shape, and no values
observed.py      the same, and it records what one rank does in place of many
xla.py           torch_xla, one program for all ranks; xla_groups.py, xla_transfer.py

What not every program needs is loaded when it is asked for: `backends.job`, `backends.xla`, `backends.observed`.
"""

from __future__ import annotations

from ...lazy_names import lazy_names

__getattr__ = lazy_names(
    __name__,
    {name: f":comm.backends.{name}" for name in ("agreement", "c10d", "job", "observed", "xla")},
)
