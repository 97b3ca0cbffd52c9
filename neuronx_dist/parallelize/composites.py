"""Functions that emitted programs call by name where a rank has a shard.

Functions that need an entire dim are those of `sharded_functions`, which take the axis over which the dim is sharded.
Dropout and attention draw their masks from this rank's local random stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import comm
from ..comm.context import AxisLike
from ..comm.ranks.rank_numbers import concrete
from ..parallel_layers.autograd_linear import ColumnLinear, call
from ..sharded_functions.cross_entropy import cross_entropy_of_shard
from ..sharded_functions.norms import batch_norm, batch_norm_of_channels, group_norm, layer_norm, rms_norm
from ..sharded_functions.softmax import log_softmax, softmax
from ..sharded_functions.vocabulary import check_ids, embedding
from ..spmd.random import TENSOR_PARALLEL, streams

__all__ = [
    "batch_norm",
    "batch_norm_of_channels",
    "cross_entropy",
    "dropout",
    "embedding",
    "group_norm",
    "layer_norm",
    "linears",
    "log_softmax",
    "rms_norm",
    "scaled_dot_product_attention",
    "softmax",
]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    axis: AxisLike,
    classes: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` of S(1) logits `[N, classes/n, ..]` (or `[classes/n]`) and R targets `[N, ..]`: I.

    Raises:
        IndexError: a target is no class (checked on CPU, where it costs no synchronisation).
    """
    if type(target) is Tensor and target.device.type == "cpu":
        check_ids(target, classes, ignore_index, "cross_entropy: target")
    logits = input.movedim(1, -1) if input.dim() > 1 else input
    smoothing = label_smoothing * (classes - 1) / classes  # NeMo's definition leaves the target out of the mean
    losses = cross_entropy_of_shard(logits, target, axis, smoothing, ignore_index)
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / (target != ignore_index).sum()
    return losses.to(input.dtype)


def linears(
    input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), *, axis: AxisLike
) -> tuple[Tensor, ...]:
    """`F.linear` of an I input with several weights, and their biases: shards of the outputs.

    The input's gradient is one tensor, whose sum over the axis goes on while the weights' gradients are computed.
    """
    outputs: tuple[Tensor, ...] = call(
        ColumnLinear, input, comm.communicator(axis), None, None, len(weights), *weights, *biases
    )
    return outputs


def _with_local_numbers(shared_axis: str | None, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Calls a function that draws from this rank's local stream; torch's generator, for whole values, is not advanced.

    If the stream is not seeded (`spmd.random.manual_seed`), it begins at the seed of torch's generator and this rank's
    number, so that units differ too.

    Args:
        shared_axis: part of tp ("tp/2") along which the ranks draw the same numbers, from a stream of that part.
    """
    random_streams, name = streams(), f"{TENSOR_PARALLEL} {shared_axis}" if shared_axis else TENSOR_PARALLEL
    if name not in random_streams.get_states():
        first = concrete(comm.communicator(shared_axis).ranks[0] if shared_axis else comm.rank("world"))
        # Streams of different numbers begin at different seeds.
        number = 1 if shared_axis is None else 2 if "/" in shared_axis else 3
        random_streams.add(name, torch.initial_seed() % 2**62 + 2718 * number + first)
    with random_streams.fork(name):
        return function(*args, **kwargs)


def dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, shared_axis: str | None = None
) -> Tensor:
    """Dropout of a shard, whose mask differs between ranks, except along `shared_axis`."""
    return _with_local_numbers(shared_axis, F.dropout, input, p, training, inplace)


def scaled_dot_product_attention(*args: Any, shared_axis: str | None = None, **kwargs: Any) -> Tensor:
    """Attention with dropout of a shard of the batch, the heads or the queries; masks as those of `dropout`."""
    return _with_local_numbers(shared_axis, F.scaled_dot_product_attention, *args, **kwargs)
