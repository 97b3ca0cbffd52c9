"""The cuts of a division into the stages of a job, by the seconds of a simulated step.

With few microbatches a step is not fastest where the slowest stage is: with two of them a first stage of 60 % of all
seconds is better than one of 50 %, and the messages of the first microbatch count as much as its computation.

    first cuts   by dynamic programming, of the slowest stage; of the fewest bytes above a limit of memory; of the least
                 bound of 1F1B: with m microbatches and stage s of forward f and backward b, after stages of p seconds,
                 of S seconds in all, p + m (f + b) and S + (m - 1) b + (m - stages + s) f, both with the stage's
                 messages; or the same without messages, among the places of the smallest ones
    moved        from each of these, one stage's start at a time, as long as the simulated step becomes faster
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

import torch

from ...program.program import Division, Value, operands_of
from .cuts import between_experts, sent_before, stage_starts
from .exact import StrategyChoice
from .job_costs import SIMULATOR, DividedUnit, Job, Links
from .stages import schedule_of

__all__ = ["StepCuts"]

BEST = 3  # cuts that are returned
PLACES = 512  # of the dynamic programming
NEAR = 64  # places on each side of a start that moves
SMALLEST = 4  # sizes of messages
TASKS = 2_000_000  # of all simulated steps; the moves of each start, once begun, are all tried


class _StageTables(NamedTuple):
    """Costs of a stage, by its end and its start.

    Attributes:
        passed, turned: the two bounds of a step, with recomputation; infinite: the stage does not fit the memory.
        messages: seconds of its messages; `missing`: bytes above the memory with all blocks recomputed.
    """

    passed: torch.Tensor
    turned: torch.Tensor
    messages: torch.Tensor
    missing: torch.Tensor


class StepCuts:
    """The cuts of a division into the stages of a job.

    The estimate of a step leaves out conversions and calls that two stages repeat; recomputed are the blocks that free
    most in their time.

    Args:
        schedule: name of a schedule of `pipeline.schedule`.
        allowed: the calls at which a stage may begin; None: all.
        memory: bytes that a rank may hold; None: any number.
        spans: calls that are recomputed in any case.

    Raises:
        ValueError: the schedule does not go with the job.
    """

    def __init__(
        self,
        choice: StrategyChoice,
        division: Division,
        job: Job,
        links: Links,
        schedule: str,
        allowed: Collection[int] | None,
        memory: float | None,
        spans: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._choice, self._division, self._job, self._memory = choice, division, job, memory
        self._allowed, self._order = allowed, schedule_of(job.pp, job.pp, job.microbatches, schedule)
        self._in_flight = [self._order.peak_in_flight(stage) for stage in range(job.pp)]
        self._tasks, self._tasks_of_step = TASKS, SIMULATOR.tasks(self._order)
        program, tables = division.program, choice.tables
        self._end = len(program.calls)
        never = between_experts(division)
        places = (place for place in range(1, self._end) if allowed is None or place in allowed)
        self._places = [place for place in places if place not in never]
        self._sent = [*map(round, sent_before(choice, division))]
        self._message = [links.pp.communicate(nbytes, 1) for nbytes in self._sent]
        total = tables.times(division.strategies, division.type_of)
        forward = tables.forward.times(division.strategies, division.type_of) if program.training else total
        saved = tables.saved_by(division.strategies, division.types)
        again = {number for span in spans for number in range(*span)}
        rows: list[tuple[float, ...]] = [(0.0,) * 5]
        read: set[Value] = set()
        for number, call in enumerate(program.calls):
            first = {x: division.types[x] for x in operands_of(call) if x.kind == "parameter" and x not in read}
            read.update(first)
            update = sum(tables.local(job.update_seconds(x, links), type_) for x, type_ in first.items())
            state = sum(job.state_bytes(x, type_, tables) for x, type_ in first.items())
            kept = 0.0 if number in again else saved.get(call, 0.0)
            rows.append((forward[number], total[number] - forward[number], update, state, kept))
        # Sums before each call: seconds of forward, backward and update; bytes of parameters with state, and saved.
        self._before = torch.tensor(rows, dtype=torch.float64).cumsum(0).tolist()
        unit = DividedUnit(choice, division, spans)
        blocks = {} if memory is None else unit.recomputable(program.calls, spans)
        self._block_ends = {end for block in blocks for end in block}
        self._blocks = sorted(blocks.items(), key=lambda item: item[1].seconds / item[1].freed)

    def best(self) -> list[list[int]]:
        """Returns some cuts, the fastest first; for a limit of memory also that of the fewest bytes above it.

        Raises:
            PlanError: there are fewer calls than stages, or fewer allowed ones.
        """
        first = [stage_starts(self._choice, self._division, self._job.pp, self._allowed), *self._of_least_bound()]
        fewest = [] if self._memory is None else [*self._minimum(self._places, lambda stage: stage.missing)]
        moved = sorted(map(self._moved, [*first, *fewest]))
        fastest = dict.fromkeys(cut for _, cut in moved)
        return [*map(list, dict.fromkeys([*[*fastest][:BEST], *map(tuple, fewest)]))]

    def _of_least_bound(self) -> Iterator[list[int]]:
        """Yields the cuts of the least bound: with messages of any size, and without them at places of the smallest."""
        yield from self._minimum(self._places, lambda stage: torch.maximum(stage.passed, stage.turned) + stage.messages)
        sizes = sorted({self._sent[place] for place in self._places})
        places = [[place for place in self._places if self._sent[place] <= size] for size in sizes]
        for some in [some for some in places if len(some) >= self._job.pp - 1][:SMALLEST]:
            yield from self._minimum(some, lambda stage: torch.maximum(stage.passed, stage.turned))

    def _minimum(self, places: Sequence[int], of_stage: Callable[[_StageTables], torch.Tensor]) -> Iterator[list[int]]:
        """Yields the cut whose largest stage is least, at every few of many places; none if they are too few."""
        most = PLACES if self._memory is None else PLACES // 8
        every = {*places[:: -(-len(places) // most) or 1]}
        every.update(place for place in places if place in self._block_ends)
        nodes = [0, *sorted(every), self._end]
        if len(nodes) <= self._job.pp:
            return
        is_empty = torch.ones(len(nodes), len(nodes)).triu().bool()
        least = torch.full((len(nodes),), inf, dtype=torch.float64)  # by number of places: of the stages so far
        least[0] = 0.0
        chosen = []
        for stage in range(self._job.pp):
            worst = torch.maximum(of_stage(self._tables(nodes, stage)), least).masked_fill(is_empty, inf)
            least, start = worst.min(1)
            chosen.append(start.tolist())
        if least[-1] == inf:
            return
        cut, node = [], len(nodes) - 1
        for starts in reversed(chosen):
            node = starts[node]
            cut.append(nodes[node])
        yield cut[::-1]

    def _tables(self, nodes: Sequence[int], stage: int) -> _StageTables:
        """Returns the costs of a stage, by its end and its start."""
        count, in_flight = self._job.microbatches, self._in_flight[stage]
        before = torch.tensor([self._before[node] for node in nodes], dtype=torch.float64)
        forward, backward, _, state, saved = (before[:, None] - before[None]).unbind(-1)
        backward, missing = backward.clone(), torch.zeros_like(state)
        if self._memory is not None:
            excess = state + in_flight * saved - self._memory
            for end, start in ((excess > 0).tril(-1)).nonzero().tolist():
                lacking, again = self._recomputed(nodes[start], nodes[end], float(excess[end, start]), in_flight)
                missing[end, start] = lacking
                backward[end, start] += inf if lacking else again
        since = before[:, 0] + before[:, 1]
        passed = since + count * (forward + backward)
        turned = since[-1] + (count - 1) * backward + max(0, count - self._job.pp + stage) * forward
        message = torch.tensor([0.0, *(self._message[node] for node in nodes[1:-1]), 0.0], dtype=torch.float64)
        return _StageTables(passed, turned, count * message, missing)

    def _moved(self, starts: Sequence[int]) -> tuple[tuple[float, float], tuple[int, ...]]:
        """Returns the estimate and the cut after all moves of one start that make it faster."""
        cut = tuple(starts)
        best, moves = self._estimate(cut), True
        while moves and self._tasks > 0:
            moves = False
            for stage in range(1, len(cut)):
                here, (low, high) = (
                    bisect_left(self._places, cut[stage]),
                    (cut[stage - 1], (*cut, self._end)[stage + 1]),
                )
                near = self._places[max(0, here - NEAR) : here + NEAR]
                tried = [(*cut[:stage], place, *cut[stage + 1 :]) for place in near if low < place < high]
                found, nearby = min(((self._estimate(one), one) for one in tried), default=(best, cut))
                if found < best:
                    best, cut, moves = found, nearby, True
        return best, cut

    def _estimate(self, starts: Sequence[int]) -> tuple[float, float]:
        """Returns the bytes that are missing on a rank, and the seconds of a step."""
        stages, missing, last = [], 0.0, 0.0
        for number, (first, end) in enumerate(pairwise((*starts, self._end))):
            sums = (after - before for before, after in zip(self._before[first], self._before[end], strict=True))
            forward, backward, update, state, saved = sums
            excess = 0.0 if self._memory is None else state + self._in_flight[number] * saved - self._memory
            if excess > 0:
                lacking, again = self._recomputed(first, end, excess, self._in_flight[number])
                missing, backward = missing + lacking, backward + again
            stages.append([(forward, backward, 0.0)])
            last = max(last, update)
        self._tasks -= self._tasks_of_step
        message = max(self._message[start] for start in starts[1:])
        return missing, SIMULATOR.step_time(self._order, stages, message) + last

    def _recomputed(self, first: int, end: int, excess: float, in_flight: int) -> tuple[float, float]:
        """Returns the bytes that are missing with the blocks of a stage recomputed, and the seconds of these blocks."""
        best = excess, 0.0
        blocks = [row for (start, stop), row in self._blocks if first <= start and stop <= end]
        for limit in {row.inside for row in blocks}:
            missing, seconds = excess + limit, 0.0
            for row in blocks:
                if missing > 0 and row.inside <= limit:
                    missing, seconds = missing - in_flight * row.freed, seconds + row.seconds
            best = min(best, (max(0.0, missing), seconds))
        return best
