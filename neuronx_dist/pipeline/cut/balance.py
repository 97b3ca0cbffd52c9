"""Cuts that balance what the pieces of a model compute and hold.

First the most floating-point operations of any piece are made few, which is what a step's time is about, then the most
parameters of any piece, which is memory; of such cuts those are chosen whose pieces are most equal. Pieces are
contiguous, so each bound is found exactly by bisection with a greedy test; the cuts within them by dynamic programming.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import nn

from ...program.recording import Recording, info_of
from .placement import attribute_of, registered

__all__ = ["Weight", "balanced_cuts", "weights_by_recording", "weights_by_registration"]


class Weight(NamedTuple):
    """The load that a layer adds to its piece of the model.

    Attributes:
        name: of the layer.
        flops: floating-point operations of one microbatch's forward, functions called before the layer included; a
            backward has about twice as many in every layer, so backwards need not be counted.
        parameters: number of elements, functions called before the layer included. A weight that is used in several
            places counts in each place, since each stage holds a copy.
    """

    name: str
    flops: int
    parameters: int


def balanced_cuts(pieces: int, layers: Sequence[Weight]) -> list[str]:
    """Names of the last layers of all pieces but the last.

    Args:
        layers: in the order in which they run.

    Raises:
        ValueError: there are fewer layers than pieces.
    """
    if len(layers) < pieces:
        raise ValueError(
            f'auto_partition="balanced": {pieces} pieces of the model need at least {pieces} layers to cut between, '
            f"found {len(layers)}: {[layer.name for layer in layers]}"
        )
    flops, parameters = [layer.flops for layer in layers], [layer.parameters for layer in layers]

    def fits(most_flops: int, most_parameters: int) -> bool:
        """Returns whether a greedy division makes at most `pieces` pieces within these bounds."""
        count, in_flops, in_parameters = 1, 0, 0
        for layer in layers:
            in_flops, in_parameters = in_flops + layer.flops, in_parameters + layer.parameters
            if in_flops > most_flops or in_parameters > most_parameters:
                count, in_flops, in_parameters = count + 1, layer.flops, layer.parameters
        return count <= pieces

    most_flops = _smallest(flops, lambda bound: fits(bound, sum(parameters)))
    most_parameters = _smallest(parameters, lambda bound: fits(most_flops, bound))
    ends = _most_equal(pieces, flops, parameters, most_flops, most_parameters)
    return [layers[end - 1].name for end in ends]


def _smallest(values: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The smallest bound on the sum of a piece that fits, between the largest value and the sum of all values."""
    bounds = range(max(values), sum(values) + 1)
    return bounds[bisect_left(bounds, True, key=fits)]


def _most_equal(
    pieces: int, flops: Sequence[int], parameters: Sequence[int], most_flops: int, most_parameters: int
) -> list[int]:
    """Ends of all pieces but the last, within the bounds: the smallest sum of squares; on a tie small first pieces.

    The costs are FLOPs; parameters where nothing computes.
    """
    until_flops, until_parameters = [0, *accumulate(flops)], [0, *accumulate(parameters)]
    until = until_flops if until_flops[-1] else until_parameters
    n = len(flops)
    best: list[tuple[int, list[int]] | None] = [None] * n + [(0, [])]  # from here on: sum of squares, ends
    for _ in range(1, pieces + 1):
        longer: list[tuple[int, list[int]] | None] = [None] * (n + 1)
        for start in range(n):
            for end in range(start + 1, n + 1):
                if (
                    until_flops[end] - until_flops[start] > most_flops
                    or until_parameters[end] - until_parameters[start] > most_parameters
                ):
                    break
                rest = best[end]
                if rest is not None:
                    cost = (until[end] - until[start]) ** 2 + rest[0]
                    now = longer[start]
                    if now is None or cost < now[0]:
                        longer[start] = (cost, [end, *rest[1]])
        best = longer
    chosen = best[0]
    assert chosen is not None  # `fits` found pieces, and those of several layers can be divided
    return chosen[1][:-1]


def weights_by_recording(module: nn.Module, recording: Recording) -> list[Weight]:
    """Weight of each leaf layer, ordered by its last call; functions after the last layer are attributed to it."""
    ends = {node: name for name, node in recording.last_calls().items()}
    if not ends:
        return []
    weights: list[Weight] = []
    flops, used = 0, {}  # type: int, dict[int, int]
    for node in recording.graph.nodes:
        if node.op == "output":
            continue
        flops += info_of(node).flops
        attribute = attribute_of(module, node)
        if attribute is not None:
            parameters = [attribute] if isinstance(attribute, nn.Parameter) else attribute.parameters()
            used.update((id(param), param.numel()) for param in parameters)
        if node in ends:
            weights.append(Weight(ends[node], flops, sum(used.values())))
            flops, used = 0, {}
    last = weights[-1]
    weights[-1] = Weight(last.name, last.flops + flops, last.parameters + sum(used.values()))
    return weights


def weights_by_registration(module: nn.Module, leaf_classes: Sequence[type]) -> list[Weight]:
    """Weight of each leaf layer with parameters, in the order of registration; without inputs FLOPs are unknown: 0."""
    weights: list[Weight] = []
    waiting = 0  # parameters of containers, until their first layer
    for path, child, leaf in registered(module, leaf_classes):
        waiting += sum(param.numel() for param in child.parameters(recurse=leaf))
        if leaf and next(child.parameters(), None) is not None:
            weights.append(Weight(path, 0, waiting))
            waiting = 0
    return weights
