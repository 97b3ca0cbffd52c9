"""The stream of random numbers that an emitted program's whole values meet: that of the ranks of a unit.

A whole value is one value on the ranks of a unit (of one pipeline stage), and so are the numbers that it meets, whoever
seeded the ranks, and how: the first forward begins the stream, at the seed of the first of them. Other units, and other
stages, draw other numbers, be they seeded alike. What is drawn for shards (`composites`) begins at the seed of this
stream, too. `spmd.random.streams().reset()` ends it; the next forward begins one anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import torch

from .. import comm
from ..spmd.random import streams
from ..spmd.watching import active

__all__ = ["WHOLE", "whole_values"]

WHOLE = "parallelize.whole-values"


@contextmanager
def whole_values(axis: str) -> Iterator[None]:
    """Random numbers drawn inside are the same on all ranks of `axis`, which enter together, and no others have them.

    A job of one rank draws from torch's generator, as one process does. So does a type check, which takes the ranks of
    an axis for seeded alike, and so do ranks as threads: they have one generator in common, and what one of them put
    back in the middle of another's forward would be lost to it.
    """
    is_one = not comm.is_initialized() or comm.size("world") == 1
    if is_one or active() is not None or comm.current().backend.ranks_are_threads:
        yield
        return
    all_streams = streams()
    if WHOLE not in all_streams.get_states():
        seed = comm.broadcast_object(torch.initial_seed(), axis)
        # Far from others, of which shards are seeded by the next ones; torch reads 32 bits of it on CPU.
        digest = sha256(f"{WHOLE} {seed} {comm.communicator(axis).ranks[0]}".encode()).digest()
        all_streams.add(WHOLE, int.from_bytes(digest[:7], "little"))
    with all_streams.fork(WHOLE):
        yield
