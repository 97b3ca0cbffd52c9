"""Random numbers of emitted programs: of shards from a rank's own stream, of whole values from one of the unit.

A whole value is one value on the ranks of a unit (of one pipeline stage), and so are the numbers that it meets, whoever
seeded the ranks, and how: the first forward begins the stream, at the seed of the first of them. Other units, and other
stages, draw other numbers, be they seeded alike. `spmd.random.streams().reset()` ends a stream; the next forward begins
one anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .. import comm
from ..comm.rank_numbers import concrete
from ..spmd.random import TENSOR_PARALLEL, RNGStreams, streams
from ..spmd.watching import active

__all__ = ["WHOLE", "own_stream", "whole_values"]

WHOLE = "parallelize.whole-values"
_OWN_OFFSET, _WHOLE_OFFSET = 2718, 2**61


def own_stream() -> RNGStreams:
    """The streams of this rank, in which it has one of its own.

    Where nobody seeded that (`spmd.random.manual_seed`), it begins at the seed of torch's generator and this rank's
    number, so that units differ too.
    """
    own = streams()
    if TENSOR_PARALLEL not in own.get_states():
        own.add(TENSOR_PARALLEL, torch.initial_seed() % 2**61 + _OWN_OFFSET + concrete(comm.rank("world")))
    return own


@contextmanager
def whole_values(axis: str) -> Iterator[None]:
    """Random numbers drawn inside are the same on all ranks of `axis`, which enter together, and no others have them.

    A job of one rank draws from torch's generator, as one process does. So does a type check, which takes the ranks of
    an axis for seeded alike.
    """
    if not comm.is_initialized() or comm.size("world") == 1 or active() is not None:
        yield
        return
    all_streams = own_stream()
    if WHOLE not in all_streams.get_states():
        first = comm.communicator(axis).ranks[0]
        seed = comm.broadcast_object(torch.initial_seed(), axis)
        all_streams.add(WHOLE, seed % 2**61 + _WHOLE_OFFSET + first)
    with all_streams.fork(WHOLE):
        yield
