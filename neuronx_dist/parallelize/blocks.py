"""Into how many blocks a program cuts tensors: a weight of queries, keys and values is sharded within each of three."""

from __future__ import annotations

from math import gcd

from .program import Call, Program, operands_of

__all__ = ["strides_of"]

CUTS = ("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split")
FEW = 8  # positions that are taken one by one and are blocks; more are steps of a recurrence


def strides_of(program: Program) -> tuple[int, ...]:
    """Numbers of equal blocks that chunks, splits (of 8 and 4: blocks of 4) and single positions leave whole."""
    return tuple(sorted({_blocks(call) for call in program.calls} - {0, 1}))


def _blocks(call: Call) -> int:
    if not call.results or not (operands := operands_of(call)):
        return 1
    whole, pieces = operands[0].shape, [result.shape for result in call.results]
    if call.name in CUTS:
        lengths = [each for each in zip(whole, *pieces) if len(set(each)) > 1]
        return lengths[0][0] // gcd(*lengths[0][1:]) if lengths else 1
    count = 1
    if call.name == "unbind":
        count = len(pieces)
    elif call.name == "select":
        count = whole[int(call.args[1])] if len(call.args) > 1 else 1
    elif call.name == "__getitem__" and isinstance(call.args[1], int):
        count = whole[0]
    return count if count <= FEW else 1
