"""`Candidate`: one way to train a model, a layout and the options that change its time or its memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from ..pipeline.schedule import Schedule, training_schedule
from ..planning.layout import Layout

__all__ = ["ITEM_BYTES", "RECOMPUTED", "Candidate", "RankSizes", "schedule_of"]

#: Bytes of an element, by dtype.
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
#: Values of `Candidate.recompute`: arguments of `nxd.recompute`; "": nothing is recomputed.
RECOMPUTED = ("", "norms", "full")


class RankSizes(NamedTuple):
    """Sizes of a microbatch on a rank, and the degrees that divide it and the weights."""

    tp: int
    cp: int
    ep: int
    sequence_parallel: bool
    micro_batch: int
    seq_len: int
    dtype: str
    reduce_dtype: str = "float32"

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def summed_item(self) -> int:
        """Bytes of an element in a sum over tp, which is of `promote_types(dtype, reduce_dtype)`."""
        return max(self.item, ITEM_BYTES[self.reduce_dtype])

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch inside of a layer."""
        return self.micro_batch * self.seq_len // self.cp

    @property
    def shard_tokens(self) -> int:
        """Tokens of a microbatch between layers: a shard under sequence parallelism."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens


@dataclass(frozen=True)
class Candidate:
    """A layout with the options of its step.

    Attributes:
        recompute: argument of `nxd.recompute`, one of `RECOMPUTED`.
        fused_loss: that of `hf.swap`.
        compiled: pointwise operations are fused, as by torch.compile; False: each reads and writes memory.
        reduce_dtype: sums over tp are in this dtype, if it is wider: `reduce_dtype` of the parallel layers.
        overlap: that of `NeuronZero1Optimizer`: weights are gathered during the next forward.
    """

    layout: Layout
    recompute: str = ""
    fused_loss: bool = True
    compiled: bool = False
    reduce_dtype: str = "float32"
    overlap: bool = False

    @cached_property
    def sizes(self) -> RankSizes:
        layout = self.layout
        sequence = layout.sequence_parallel and layout.tp > 1
        sizes = layout.tp, layout.cp, layout.ep, sequence, layout.micro_batch, layout.seq_len, layout.dtype
        return RankSizes(*sizes, self.reduce_dtype)

    @cached_property
    def schedule(self) -> Schedule:
        layout = self.layout
        name = layout.schedule if isinstance(layout.schedule, str) else None
        return schedule_of(layout.pp, layout.num_microbatches, name, layout.virtual_pipeline_size)


@lru_cache(maxsize=4096)
def schedule_of(pp: int, num_microbatches: int, name: str | None, chunks: int) -> Schedule:
    """Returns the schedule of training of this name; the same object for the same sizes."""
    return training_schedule(pp, num_microbatches, schedule=name, num_chunks=chunks)
