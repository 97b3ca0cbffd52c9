"""The nearest layout that works, for one that does not: by degrees and batch, without a prediction of its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import log2
from typing import Any, TypeVar

from ..model_shape import ModelShape, padded_heads

__all__ = ["nearest_layout", "words_of_changes"]

L = TypeVar("L", bound=Any)  # a Layout, which imports this file

# Fields that may change, with the flags of `neuronx-dist train`.
_FLAGS = {
    "world_size": "--nproc",
    **{name: f"--{name.replace('_', '-')}" for name in ("tp", "pp", "cp", "ep", "sequence_parallel")},
    "num_microbatches": "--microbatches",
    **{name: f"--{name.replace('_', '-')}" for name in ("pad_heads", "pad_vocab", "schedule", "virtual_pipeline_size")},
    **{name: f"--{name.replace('_', '-')}" for name in ("global_batch", "seq_len", "dtype")},
}


def nearest_layout(layout: L, model: ModelShape, works: Callable[[L], bool]) -> L | None:
    """Returns the layout that works with the least changes; None: there is none.

    Degrees, padding and microbatches change first, by the sum of |log2| of their ratios; then the schedule, the batch
    and the length of sequences, each only where nothing works without it. The number of ranks stays.

    Args:
        works: says whether a layout has no problem.
    """
    for base in _bases(layout, model):
        for candidate in _by_distance(base, model):
            if works(candidate):
                return candidate
    return None


def words_of_changes(layout: L, other: L) -> str:
    """Returns the fields in which another layout differs, as flags: `--tp 2 --microbatches 8`."""
    words = []
    for name, flag in _FLAGS.items():
        value = getattr(other, name)
        if value != getattr(layout, name):
            words.append(f"without {flag}" if value in (None, False) else flag if value is True else f"{flag} {value}")
    return " ".join(sorted(words, key=lambda word: word.startswith("without")))


def _bases(layout: L, model: ModelShape) -> Iterator[L]:
    """Yields the layout with valid numbers, and with fewer and fewer of its choices."""
    names = (
        "world_size",
        "tp",
        "pp",
        "cp",
        "ep",
        "virtual_pipeline_size",
        "num_microbatches",
        "global_batch",
        "seq_len",
    )
    invalid = [name for name in names if not isinstance(getattr(layout, name), int) or getattr(layout, name) < 1]
    layout = replace(layout, **dict.fromkeys(invalid, 1))
    if layout.schedule is None or isinstance(layout.schedule, str):
        yield layout
    layout = replace(layout, schedule=None, virtual_pipeline_size=1)
    yield layout
    rows = layout.global_batch
    layout = replace(layout, global_batch=-(-rows // layout.world_size) * layout.world_size)
    yield layout
    longest = min(layout.seq_len, model.max_positions or layout.seq_len)
    step = 2 * layout.tp * layout.cp
    yield replace(layout, seq_len=max(longest // step * step, step))


def _by_distance(layout: L, model: ModelShape) -> list[L]:
    """Returns the layouts of other degrees and microbatches, with the padding that they need, nearest first."""
    world = layout.world_size
    found: list[tuple[float, int, L]] = []
    for tp, cp, ep in product(_divisors(world), _divisors(layout.cp), _divisors(layout.ep)):
        if world % (tp * cp) or world % (tp * ep) or tp > max(layout.tp, model.heads or tp):
            continue
        heads, kv_heads = model.heads or model.kv_heads or 0, model.kv_heads or 0
        pads = {
            "pad_heads": layout.pad_heads or padded_heads(heads, kv_heads, tp).pads(heads, kv_heads),
            "pad_vocab": layout.pad_vocab or (model.vocab or 0) % tp != 0,
        }
        for pp in (n for n in _divisors(world // tp) if n <= (model.layers or n)):
            dp = world // (tp * pp * cp)
            if world % (tp * pp * cp) or layout.global_batch % dp:
                continue
            for microbatches in _divisors(layout.global_batch // dp):
                for sequence in {layout.sequence_parallel, False}:
                    changes = dict(tp=tp, pp=pp, cp=cp, ep=ep, num_microbatches=microbatches, **pads)
                    other = replace(layout, sequence_parallel=sequence, **changes)
                    found.append((_distance(layout, other), len(found), other))
    return [other for _, _, other in sorted(found, key=lambda entry: entry[:2])]


def _distance(layout: Any, other: Any) -> float:
    degrees = ("tp", "pp", "cp", "ep")
    ratios = [abs(log2(getattr(other, name) / getattr(layout, name))) for name in degrees]
    microbatches = abs(log2(other.num_microbatches / layout.num_microbatches))
    flags = sum(
        getattr(other, name) != getattr(layout, name) for name in ("sequence_parallel", "pad_heads", "pad_vocab")
    )
    return sum(ratios) + 0.5 * microbatches + 0.9 * flags


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
