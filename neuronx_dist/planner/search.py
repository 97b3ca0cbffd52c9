"""Search for the fastest candidates that fit into the memory of a device: exact, with bounds that leave out the rest.

Candidates are grouped by degrees and microbatches. A group's bound is the time of its products, pointwise operations
and collectives without any waiting. Groups are visited in the order of their bounds, until the bound is above the last
of the candidates found. In a group each candidate has a sharper bound, from the order of the pipeline's stages, and is
simulated only where that is needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any, NamedTuple

from ..model_shape import padded_heads
from ..planning.layout import Layout
from .candidate import RECOMPUTED, Candidate, RankSizes, schedule_of
from .model_sizes import Workload
from .predictor import Predictor
from .seconds import StepSeconds
from .stage_memory import StageBytes

__all__ = ["MARGIN", "SCHEDULES", "Found", "Job", "candidates", "groups", "search", "smallest"]

#: Share of a device's memory that a plan leaves free.
MARGIN = 0.05
#: Schedules that are searched, with their number of chunks on a stage; the first alone without a pipeline.
SCHEDULES = (("1f1b", 1), ("zb_h1", 1), ("zb_v", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved", 8))
_MOST_TP = 64


@dataclass(frozen=True)
class Job:
    """The part of a job that all candidates share, and what is left to the search.

    Attributes:
        fixed: the values that a name of `Layout` or `Candidate`, or dp, may have; names that are missing are searched.
    """

    global_batch: int
    seq_len: int
    fixed: Mapping[str, Collection[Any]]

    def values(self, name: str, searched: Sequence[Any]) -> list[Any]:
        """Returns the values to search: those of `searched`, or the fixed ones."""
        return list(self.fixed.get(name, searched))

    def without(self, name: str) -> Job:
        """Returns the job without one of its constraints."""
        return Job(self.global_batch, self.seq_len, {key: x for key, x in self.fixed.items() if key != name})


class Found(NamedTuple):
    """A candidate with its seconds and its bytes, by stage."""

    candidate: Candidate
    seconds: StepSeconds
    stages: tuple[StageBytes, ...]

    @property
    def peak(self) -> float:
        return max(stage.peak for stage in self.stages)


class Group(NamedTuple):
    """Candidates of equal degrees and microbatches."""

    pp: int
    dp: int
    num_microbatches: int
    sizes: RankSizes
    pad_heads: bool
    pad_vocab: bool


def divisors(number: int, most: int | None = None) -> list[int]:
    return [n for n in range(1, min(number, most or number) + 1) if number % n == 0]


def groups(workload: Workload, world: int, job: Job) -> Iterator[Group]:
    """Yields the degrees and microbatches that `Layout.check` accepts."""
    batch, seq_len = job.global_batch, job.seq_len
    if workload.max_positions is not None and seq_len > workload.max_positions:
        return
    dtypes = job.values("dtype", ["bfloat16"])
    for tp in job.values("tp", divisors(world, _MOST_TP)):
        if not workload.divides(tp):
            continue
        heads = padded_heads(workload.heads, workload.kv_heads, tp)
        pads = heads.pads(workload.heads, workload.kv_heads), workload.vocab % tp != 0
        if world % tp or not _allows(job, pads):
            continue
        sequence = job.values("sequence_parallel", [False, True])
        if tp == 1 or not workload.allows_sequence_parallel:
            sequence = [sharded for sharded in sequence if not sharded]
        for pp in job.values("pp", divisors(world // tp, workload.layers)):
            if world // tp % pp or pp > workload.layers:
                continue
            rest = world // (tp * pp)
            experts = [n for n in divisors(workload.experts) if rest % n == 0] if workload.experts else [1]
            for cp in job.values("cp", divisors(rest)):
                dp = rest // cp
                if cp > 1 and not workload.allows_context_parallel:
                    continue
                if rest % cp or batch % dp or (cp > 1 and seq_len % (2 * cp)) or dp not in job.values("dp", [dp]):
                    continue
                for ep in job.values("ep", experts):
                    if ep > 1 and ep not in experts:
                        continue
                    for sharded in sequence:
                        if sharded and seq_len % (tp * cp):
                            continue
                        for microbatches in job.values("num_microbatches", divisors(batch // dp)):
                            if batch // dp % microbatches:
                                continue
                            micro = batch // (dp * microbatches)
                            if micro not in job.values("micro_batch", [micro]):
                                continue
                            for dtype in dtypes:
                                sizes = RankSizes(tp, cp, ep, sharded, micro, seq_len, dtype)
                                yield Group(pp, dp, microbatches, sizes, *pads)


def _allows(job: Job, pads: tuple[bool, bool]) -> bool:
    """Returns whether padding that is needed is allowed."""
    return all(True in job.values(name, [True]) for name, needed in zip(("pad_heads", "pad_vocab"), pads) if needed)


def candidates(workload: Workload, world: int, job: Job, group: Group) -> Iterator[list[Candidate]]:
    """Yields the candidates of a group: lists of those that differ in recomputation alone, less of it first."""
    sizes = group.sizes
    others = {("interleaved", n) for n in job.values("virtual_pipeline_size", []) if n > 1} - {*SCHEDULES}
    for schedule, chunks in (*SCHEDULES, *sorted(others)) if group.pp > 1 else SCHEDULES[:1]:
        if schedule not in job.values("schedule", [schedule]):
            continue
        if chunks not in job.values("virtual_pipeline_size", [chunks]):
            continue
        if schedule_of(group.pp, group.num_microbatches, schedule, chunks).num_virtual_stages > workload.layers:
            continue
        for zero1 in job.values("zero1", [True, False] if group.dp * sizes.cp > 1 else [False]):
            layout = Layout(
                world,
                tp=sizes.tp,
                pp=group.pp,
                cp=sizes.cp,
                ep=sizes.ep,
                sequence_parallel=sizes.sequence_parallel,
                zero1=zero1,
                pad_heads=group.pad_heads,
                pad_vocab=group.pad_vocab,
                num_microbatches=group.num_microbatches,
                global_batch=job.global_batch,
                seq_len=job.seq_len,
                dtype=sizes.dtype,
                schedule=schedule,
                virtual_pipeline_size=chunks,
            )
            recomputed = sorted(job.values("recompute", RECOMPUTED), key=RECOMPUTED.index)
            for fused_loss in job.values("fused_loss", [workload.fuses_loss]):
                for compiled in job.values("compiled", [False]):
                    for overlap in job.values("overlap", [False]):
                        if zero1 or not overlap:
                            yield [
                                Candidate(layout, recompute, fused_loss, compiled, overlap=overlap)
                                for recompute in recomputed
                            ]


def search(predictor: Predictor, job: Job, top_k: int, limit: float) -> list[Found]:
    """Returns the fastest candidates whose peak is at most `limit` bytes, fastest first.

    Of candidates that differ in recomputation alone, the one that recomputes least of those that fit.
    """
    workload, world = predictor.workload, predictor.cluster.devices
    bounded = []
    for group in groups(workload, world, job):
        if predictor.least_bytes(group.pp, group.dp, group.sizes) <= limit:
            bounded.append((predictor.least_seconds(group.pp, group.num_microbatches, group.sizes, job.fixed), group))
    bounded.sort(key=lambda pair: pair[0])
    best: list[tuple[float, int, Found]] = []  # a heap with the slowest first
    order = count()
    for bound, group in bounded:
        if len(best) == top_k and bound >= -best[0][0]:
            break
        inside = []
        for alternatives in candidates(workload, world, job, group):
            for candidate in alternatives:
                least = predictor.bound(candidate)
                if len(best) == top_k and least >= -best[0][0]:
                    break  # the others take longer
                if predictor.fits(candidate, limit):
                    inside.append((least, next(order), candidate))
                    break
        for least, number, candidate in sorted(inside, key=lambda entry: entry[:2]):
            if len(best) == top_k and least >= -best[0][0]:
                break
            seconds = predictor.seconds(candidate)
            stages = tuple(predictor.stage_bytes(candidate, stage) for stage in range(candidate.layout.pp))
            entry = (-seconds.total, -number, Found(candidate, seconds, stages))
            (heapq.heappush if len(best) < top_k else heapq.heappushpop)(best, entry)
    return [found for _, _, found in sorted(best, key=lambda entry: (-entry[0], -entry[1]))]


def smallest(predictor: Predictor, job: Job) -> Found | None:
    """Returns the candidate of the least peak; None: no candidate is possible."""
    workload, world = predictor.workload, predictor.cluster.devices
    best, least = None, inf
    for group in groups(workload, world, job):
        if predictor.least_bytes(group.pp, group.dp, group.sizes) < least:
            for alternatives in candidates(workload, world, job, group):
                for candidate in alternatives:
                    peak = predictor.peak(candidate)
                    if peak < least:
                        best, least = candidate, peak
    if best is None:
        return None
    stages = tuple(predictor.stage_bytes(best, stage) for stage in range(best.layout.pp))
    return Found(best, predictor.seconds(best), stages)
