"""Exchange of tensors between ranks of XLA devices: by a collective-permute, or by all-gathers.

Neuron has neither messages nor a collective-permute. NeuronX Distributed moves activations between stages by
all-gathers over groups of two ranks: the pairs that begin at an even rank, then those that begin at an odd one. With
`NEURONX_DIST_XLA_TRANSFER=all_gather`, which is the default on NEURON, this package does the same where the number of
ranks of an axis is even and only neighbours exchange (the last and the first are neighbours). Otherwise there is one
all-gather, over the whole axis.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["TRANSFER_VARIABLE", "how_to_transfer", "rows_of"]

TRANSFER_VARIABLE = "NEURONX_DIST_XLA_TRANSFER"
_TRANSFERS = ("permute", "all_gather")


def rows_of(pairs: Sequence[tuple[int, int]], size: int) -> list[list[list[int]]]:
    """Returns all-gathers that join all pairs: each one a list of groups of group indices, which cover all ranks.

    >>> rows_of([(0, 1), (1, 2)], 4)
    [[[0, 1], [2, 3]], [[1, 2], [3, 0]]]
    """
    neighbours = pairs and all((dst - src) % size in (1, size - 1) for src, dst in pairs)
    if size == 2 or size % 2 or not neighbours:
        return [[list(range(size))]]
    parities = {(src if (dst - src) % size == 1 else dst) % 2 for src, dst in pairs}
    return [[[first, (first + 1) % size] for first in range(parity, size, 2)] for parity in sorted(parities)]


def how_to_transfer() -> str:
    """Returns the method of exchange that the environment or the device selects.

    Raises:
        ValueError: the environment variable has another value.
    """
    asked = os.environ.get(TRANSFER_VARIABLE)
    if asked is None:
        import torch_xla.runtime as xr

        return "all_gather" if xr.device_type() == "NEURON" else "permute"
    if asked not in _TRANSFERS:
        raise ValueError(f"{TRANSFER_VARIABLE}={asked!r}: use {' or '.join(_TRANSFERS)}, or leave it unset")
    return asked
