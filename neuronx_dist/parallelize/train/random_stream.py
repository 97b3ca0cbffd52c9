"""The stream of random numbers for whole values of an emitted program: the ranks of a unit share it.

A whole value is equal on the ranks of a unit (of one pipeline stage), so the random numbers drawn for it must be equal
too, however the ranks were seeded: the first forward begins the stream, at the seed of the first of these ranks. Other
units, and other stages, draw other numbers, even from equal seeds. Numbers for shards (`composites`) begin at the seed
of this stream, too. `spmd.random.streams().reset()` ends it; the next forward begins a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import torch

from ... import comm
from ...spmd.random import streams
from ...spmd.watching import active

__all__ = ["WHOLE", "whole_values"]

WHOLE = "parallelize.whole-values"


@contextmanager
def whole_values(axis: str) -> Iterator[None]:
    """Draws equal random numbers on all ranks of `axis`, which enter together, and others on all other ranks.

    A job of one rank draws from torch's generator, as one process does. So does a type check, which assumes equal seeds
    on an axis.
    """
    if not comm.is_initialized() or comm.size("world") == 1 or active() is not None:
        yield
        return
    all_streams = streams()
    if WHOLE not in all_streams.get_states():
        seed = comm.broadcast_object(torch.initial_seed(), axis)
        # Far from other seeds, as shards are seeded by the next ones; torch reads 32 bits of it on CPU.
        digest = sha256(f"{WHOLE} {seed} {comm.communicator(axis).ranks[0]}".encode()).digest()
        all_streams.add(WHOLE, int.from_bytes(digest[:7], "little"))
    with all_streams.fork(WHOLE):
        yield
