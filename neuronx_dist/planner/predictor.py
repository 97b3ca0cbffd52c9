"""`Predictor`: seconds and bytes of candidates for one model on one cluster; what candidates share is computed once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from ..pipeline.schedule import Schedule, ZeroBubbleV
from ..planning.layout import Layout
from .candidate import Candidate, RankSizes
from .cluster import Cluster
from .model_sizes import Workload
from .seconds import (
    PartSeconds,
    StepSeconds,
    ends_seconds,
    layer_seconds,
    message_seconds,
    optimizer_seconds,
    reduction_seconds,
)
from .simulation import Simulator
from .stage_memory import EndBytes, LayerBytes, StageBytes, ends_bytes, layer_bytes
from .traffic import Piece, merged, message_bytes, pieces_of, reduction_traffic, stage_weights

__all__ = ["Predictor"]


class Elements(NamedTuple):
    """Numbers of elements of a stage's weights on a rank.

    Attributes:
        dense, expert: of all but experts, and of experts.
        temporary: most of AdamW at one time: two of a weight's size, and one of the weight before it.
    """

    dense: int
    expert: int
    temporary: int


class OneMicrobatch(NamedTuple):
    """Bytes of a stage with one microbatch in flight.

    Attributes:
        stage: all of them; messages are those of one.
        end: of the activations those that the last norm saves; `kept`: that the loss holds until its backward.
        halved, between: as in `LayerBytes`, of all layers.
    """

    stage: StageBytes
    end: float
    kept: float
    halved: float
    between: float


class TimedPart(NamedTuple):
    """Seconds of a layer or an end of the model: by term, and of its tasks (a forward, the halves of a backward)."""

    part: PartSeconds
    tasks: tuple[float, float, float]


@dataclass
class Predictor:
    """Predicts seconds and bytes of candidates.

    Attributes:
        workload, cluster: the model, and where it is trained.
    """

    workload: Workload
    cluster: Cluster

    def __post_init__(self) -> None:
        self._cache: dict[Any, Any] = {}
        self._simulator = Simulator()

    # --- bounds

    def least_seconds(
        self, pp: int, num_microbatches: int, sizes: RankSizes, fixed: Mapping[str, Collection[Any]]
    ) -> float:
        """Returns a lower bound: all stages compute equally long, without waiting, and nothing is computed again."""
        whole = Piece(tuple(block.layers for block in self.workload.blocks), True, True)
        options = [
            ("", fused, compiled)
            for fused in fixed.get("fused_loss", [self.workload.fuses_loss])
            for compiled in fixed.get("compiled", [False])
        ]
        return num_microbatches / pp * min(sum(self._piece_tasks(whole, sizes, option)) for option in options)

    def least_bytes(self, pp: int, dp: int, sizes: RankSizes) -> float:
        """Returns a lower bound of the peak: weights, sharded state and one layer's backward, of the average stage."""
        key = "least", pp, dp, sizes
        if key not in self._cache:
            whole = Piece(tuple(block.layers for block in self.workload.blocks), True, True)
            dense, expert, _ = self.elements(whole, sizes)
            ranks = dp * sizes.cp
            sharded = dense / ranks + expert / (ranks // sizes.ep if sizes.ep > 1 else ranks)
            numel, state = (dense + expert) / pp, sharded / pp * self._state(sizes)
            temporary = 0.0
            if self.workload.bytes_of is None:  # a play takes longer than the bound saves
                layers = [self._layer_bytes(index, sizes, "") for index in range(len(self.workload.blocks))]
                temporary = min(layer.saved + layer.temporary for layer in layers)
            self._cache[key] = numel * sizes.item + state + max(numel * sizes.item, temporary)
        return self._cache[key]

    def bound(self, candidate: Candidate) -> float:
        """Returns a lower bound of the seconds of a step: a stage waits for the first activations, at least."""
        key = ("bound", *self._pipeline_key(candidate))
        if key not in self._cache:
            before = bound = 0.0
            whole_backwards = candidate.layout.schedule not in ("zb_h1", "zb_v")
            for tasks in self.tasks(candidate):
                busy = candidate.layout.num_microbatches * sum(map(sum, tasks))
                bound = max(bound, before + busy)
                before += sum(tasks[0]) if whole_backwards else tasks[0][0]
            self._cache[key] = bound
        return self._cache[key] + sum(self.after(candidate))

    # --- seconds

    def seconds(self, candidate: Candidate) -> StepSeconds:
        """Returns the seconds of a step; terms of microbatches are those of the stage that computes longest."""
        layout, sizes, schedule = candidate.layout, candidate.sizes, candidate.schedule
        pieces = self.pieces(schedule)
        costs = self.tasks(candidate)
        busy = [sum(map(sum, tasks)) for tasks in costs]
        slowest = max(range(len(busy)), key=busy.__getitem__)
        key = ("span", *self._pipeline_key(candidate))
        if key not in self._cache:
            self._cache[key] = self._simulator.step_time(schedule, costs, self.message_seconds(candidate))
        span = self._cache[key]
        options = candidate.recompute, candidate.fused_loss, candidate.compiled
        parts = [
            timed.part * number for piece in pieces[slowest] for timed, number in self._parts(piece, sizes, options)
        ]
        total = sum(parts, PartSeconds()) * layout.num_microbatches
        computed = total.forward + total.backward
        reduction, optimizer = self.after(candidate)
        return StepSeconds(
            computed.products,
            computed.attention,
            computed.pointwise,
            computed.tp,
            computed.cp,
            computed.ep,
            total.again.total,
            max(0.0, span - layout.num_microbatches * busy[slowest]),  # 0 up to rounding in ZB-V
            reduction,
            optimizer,
        )

    def after(self, candidate: Candidate) -> tuple[float, float]:
        """Returns the seconds after the last backward, of the stage where they are most: reduction, optimizer."""
        layout = candidate.layout
        of_stages = layout.pp, layout.schedule, layout.virtual_pipeline_size
        key = "after all", of_stages, self._reduction_key(candidate)
        if key not in self._cache:
            stages = {*self.stages(candidate)}
            self._cache[key] = max((self._stage_after(candidate, stage) for stage in stages), key=sum)
        return self._cache[key]

    def _stage_after(self, candidate: Candidate, stage: Piece) -> tuple[float, float]:
        layout, sizes = candidate.layout, candidate.sizes
        key = "after", stage, self._reduction_key(candidate)
        if key not in self._cache:
            elements = self.elements(stage, sizes)
            numel = elements.dense + elements.expert
            sent = reduction_traffic(self.workload, candidate, stage)
            dense, expert = self._degrees(layout)
            sharded = elements.dense / dense + elements.expert / expert
            beside = {}
            if candidate.overlap and layout.zero1:
                options = candidate.recompute, candidate.fused_loss, candidate.compiled
                beside = {"all_gather": self._piece_tasks(stage, sizes, options)[0]}
            reduction = reduction_seconds(sent, numel, layout, sizes, self.cluster, beside)
            self._cache[key] = reduction, optimizer_seconds(numel, sharded, layout, sizes, self.cluster)
        return self._cache[key]

    @staticmethod
    def _reduction_key(candidate: Candidate) -> tuple[Any, ...]:
        """Returns what the seconds after the last backward depend on: cp and dp count together, without overlap."""
        layout, sizes = candidate.layout, candidate.sizes
        if candidate.overlap and layout.zero1:  # a forward passes beside the gathers
            options = candidate.recompute, candidate.fused_loss, candidate.compiled
            return layout.world_size, layout.pp, sizes, options
        return layout.world_size, layout.pp, layout.zero1, sizes._replace(micro_batch=0, cp=0)

    def message_seconds(self, candidate: Candidate) -> float:
        """Returns the seconds of a message between stages."""
        return message_seconds(self.workload, candidate.layout, candidate.sizes, self.cluster)

    def tasks(self, candidate: Candidate) -> list[list[tuple[float, float, float]]]:
        """Returns the seconds of a forward and of the halves of a backward, by stage and chunk."""
        layout = candidate.layout
        options = candidate.recompute, candidate.fused_loss, candidate.compiled
        key = "tasks", candidate.sizes, options, layout.pp, layout.schedule, layout.virtual_pipeline_size
        if key not in self._cache:
            sizes = candidate.sizes
            pieces = self.pieces(candidate.schedule)
            distinct = {piece: self._piece_tasks(piece, sizes, options) for piece in {*chain(*pieces)}}
            self._cache[key] = [[distinct[piece] for piece in chunks] for chunks in pieces]
        return self._cache[key]

    @staticmethod
    def _pipeline_key(candidate: Candidate) -> tuple[Any, ...]:
        layout = candidate.layout
        options = candidate.recompute, candidate.fused_loss, candidate.compiled
        of_pipeline = layout.pp, layout.num_microbatches, layout.schedule, layout.virtual_pipeline_size
        return (candidate.sizes, options, of_pipeline)

    def _piece_tasks(
        self, piece: Piece, sizes: RankSizes, options: tuple[str, bool, bool]
    ) -> tuple[float, float, float]:
        """Returns the seconds of the tasks of a piece of the model, of one microbatch."""
        key = "piece", piece, sizes, options
        found = self._cache.get(key)
        if found is None:
            forward = inputs = weights = 0.0
            for timed, number in self._parts(piece, sizes, options):
                forward += number * timed.tasks[0]
                inputs += number * timed.tasks[1]
                weights += number * timed.tasks[2]
            found = self._cache[key] = forward, inputs, weights
        return found

    def _parts(self, piece: Piece, sizes: RankSizes, options: tuple[str, bool, bool]) -> list[tuple[TimedPart, int]]:
        """Returns the layers and ends of the model in a piece, and the number of each."""
        recompute, fused_loss, compiled = options
        parts = [
            (self._layer(index, sizes, recompute, compiled), layers)
            for index, layers in enumerate(piece.layers)
            if layers
        ]
        if piece.first or piece.last:
            key = "ends", sizes, fused_loss, compiled
            if key not in self._cache:
                ends = ends_seconds(self.workload, sizes, self.cluster, fused_loss, compiled)
                self._cache[key] = [(TimedPart(end, end.tasks), 1) for end in ends]
            first, last = self._cache[key]
            parts += [first] * piece.first + [last] * piece.last
        return parts

    def _layer(self, index: int, sizes: RankSizes, recompute: str, compiled: bool) -> TimedPart:
        key = "layer", index, sizes, recompute, compiled
        if key not in self._cache:
            block = self.workload.blocks[index]
            part = layer_seconds(self.workload, block, sizes, self.cluster, recompute, compiled)
            self._cache[key] = TimedPart(part, part.tasks)
        return self._cache[key]

    # --- bytes

    def stage_bytes(self, candidate: Candidate, stage: int) -> StageBytes:
        """Returns the bytes of a rank of a stage."""
        layout, schedule = candidate.layout, candidate.schedule
        once = self._bytes_of_one(candidate, self.stages(candidate)[stage])
        if layout.pp == 1:
            return once.stage._replace(first_gradients=float(layout.num_microbatches > 1))
        chunks, in_flight = schedule.num_chunks, schedule.peak_in_flight(stage)
        activations, loss, temporary = once.stage.activations, once.stage.loss, once.stage.temporary
        ends, waiting = 1, 0  # the last chunk's backward follows its forward
        sides = self._sides(schedule, stage) / chunks
        spare = 2 * sides
        if layout.schedule == "zb_v":
            spare, temporary = 3, temporary + once.halved / chunks
        if layout.schedule == "zb_h1":  # the halves of a backward are `stage` microbatches apart
            ends = in_flight
            waiting = min(in_flight - 1, stage)
            loss += once.kept * waiting
            temporary += once.halved + once.kept * (waiting + 1)
        return once.stage._replace(
            activations=(activations - once.end) * (in_flight - waiting) / chunks
            + once.end * (ends - waiting)
            + once.between * waiting,
            loss=loss,
            temporary=temporary,
            messages=once.stage.messages * (sides * in_flight + spare),
            first_gradients=self._first_gradients(candidate, stage),
        )

    def _first_gradients(self, candidate: Candidate, stage: int) -> float:
        """Returns the share of a stage's gradients that exist when most activations do."""
        schedule, sizes = candidate.schedule, candidate.sizes
        chunks, of_chunks = schedule.num_chunks, self._chunks_before_peak(schedule, stage)
        if of_chunks in (0, chunks):
            return of_chunks / chunks
        pieces = self.pieces(schedule)[stage]
        some, every = (sum(self.elements(merged(part), sizes)[:2]) for part in (pieces[chunks - of_chunks :], pieces))
        return some / every

    @staticmethod
    def _chunks_before_peak(schedule: Schedule, stage: int) -> int:
        """Returns of how many chunks, from the last on, a backward comes before most activations are there."""
        microbatches, chunks = schedule.num_microbatches, schedule.num_chunks
        if microbatches * chunks <= schedule.peak_in_flight(stage):
            return 0
        if isinstance(schedule, ZeroBubbleV) and microbatches < 2 * schedule.num_stages - stage:
            return 1
        return chunks

    def _sides(self, schedule: Schedule, stage: int) -> int:
        """Returns how many neighbours the chunks of a stage have; each sends and is sent to."""
        key = "sides", type(schedule), schedule.num_stages, schedule.num_chunks, stage
        if key not in self._cache:
            last = schedule.num_virtual_stages - 1
            places = [schedule.virtual_stage(stage, chunk) for chunk in range(schedule.num_chunks)]
            self._cache[key] = sum((place > 0) + (place < last) for place in places)
        return self._cache[key]

    def peak(self, candidate: Candidate) -> float:
        """Returns the bytes of the rank that needs most."""
        return max(self.stage_bytes(candidate, stage).peak for stage in self._fullest(candidate))

    def fits(self, candidate: Candidate, limit: float) -> bool:
        """Returns whether no rank needs more bytes than `limit`."""
        return all(self.stage_bytes(candidate, stage).peak <= limit for stage in self._fullest(candidate))

    def _fullest(self, candidate: Candidate) -> list[int]:
        """Returns the stages one of which needs most: of equal ones that with most forwards in flight."""
        layout, schedule = candidate.layout, candidate.schedule
        if layout.pp == 1 or layout.schedule == "zb_h1":
            return list(range(layout.pp))
        key = "fullest", type(schedule), schedule.num_stages, schedule.num_chunks, schedule.num_microbatches
        if key not in self._cache:
            fullest = dict[Any, tuple[int, int]]()
            for stage, piece in enumerate(self.stages(candidate)):
                in_flight = schedule.peak_in_flight(stage)
                kind = piece, self._sides(schedule, stage), self._chunks_before_peak(schedule, stage)
                fullest[kind] = max(fullest.get(kind, (-1, 0)), (in_flight, stage))
            self._cache[key] = [stage for _, stage in fullest.values()]
        return self._cache[key]

    def _bytes_of_one(self, candidate: Candidate, stage: Piece) -> OneMicrobatch:
        """Returns the bytes of a stage with one microbatch in flight."""
        layout, sizes = candidate.layout, candidate.sizes
        dense, expert = self._degrees(layout)
        key = "stage bytes", stage, sizes, candidate.recompute, candidate.fused_loss, dense, expert, candidate.overlap
        found: OneMicrobatch | None = self._cache.get(key)
        if found is None:
            elements = self.elements(stage, sizes)
            numel, item = elements.dense + elements.expert, sizes.item
            sharded = elements.dense / dense + elements.expert / expert
            saved = temporary = halved = between = 0.0
            for index, layers in enumerate(stage.layers):
                if layers:
                    of_layer = self._layer_bytes(index, sizes, candidate.recompute)
                    saved += layers * of_layer.saved
                    halved += layers * of_layer.halved
                    between += layers * of_layer.between
                    temporary = max(temporary, of_layer.temporary)
            end = EndBytes(0.0, 0.0, 0.0)
            if stage.last:
                end = ends_bytes(self.workload, sizes, candidate.fused_loss)
                between += 3 * sizes.shard_tokens * self.workload.hidden * item  # input, gradient, normalised input
            of_step = sharded * max(4, item) if item < 4 or dense > 1 else 0.0  # gradients of masters
            in_buckets = numel * item if candidate.overlap and dense > 1 else 0  # all of them are under way
            bytes_of_stage = StageBytes(
                weights=numel * item,
                gradients=numel * item,
                optimizer=sharded * self._state(sizes),
                activations=saved + end.saved,
                loss=end.loss,
                temporary=max(0.0, temporary - end.saved),  # which is freed before the last layer's backward
                messages=message_bytes(self.workload, sizes) if layout.pp > 1 else 0.0,
                step=of_step + in_buckets + elements.temporary / dense * max(4, item),
            )
            found = self._cache[key] = OneMicrobatch(bytes_of_stage, end.saved, end.kept, halved, between)
        return found

    def _layer_bytes(self, index: int, sizes: RankSizes, recompute: str) -> LayerBytes:
        key = "layer bytes", index, sizes, recompute
        if key not in self._cache:
            self._cache[key] = layer_bytes(self.workload, self.workload.blocks[index], sizes, recompute)
        return self._cache[key]

    @staticmethod
    def _state(sizes: RankSizes) -> int:
        """Bytes of AdamW's state for an element: two moments, and the master of a low precision."""
        return 2 * max(4, sizes.item) + (4 if sizes.item < 4 else 0)

    # --- the model on its ranks

    def pieces(self, schedule: Schedule) -> list[list[Piece]]:
        """Returns the pieces of the model on each stage."""
        key = "pieces", type(schedule), schedule.num_stages, schedule.num_chunks
        if key not in self._cache:
            self._cache[key] = pieces_of(self.workload, schedule)
        return self._cache[key]

    def stages(self, candidate: Candidate) -> list[Piece]:
        """Returns the part of the model on each stage, of all chunks together."""
        schedule = candidate.schedule
        key = "stages", type(schedule), schedule.num_stages, schedule.num_chunks
        if key not in self._cache:
            self._cache[key] = [merged(chunks) for chunks in self.pieces(schedule)]
        return self._cache[key]

    def elements(self, stage: Piece, sizes: RankSizes) -> Elements:
        """Returns the numbers of elements of a stage's weights."""
        key = "elements", stage, sizes.tp, sizes.ep
        if key not in self._cache:
            local = self.workload.local_sizes(sizes.tp, sizes.ep)
            dense = expert = temporary = before = 0
            for weight, count in stage_weights(self.workload, stage):
                numel = prod(weight.local(local))
                temporary = max(temporary, 2 * numel + (numel if count > 1 else before))
                before = numel
                if weight.is_expert:
                    expert += numel * count
                else:
                    dense += numel * count
            self._cache[key] = Elements(dense, expert, temporary)
        return self._cache[key]

    @staticmethod
    def _degrees(layout: Layout) -> tuple[int, int]:
        """Returns over how many ranks the optimizer's state is sharded: of all but experts, and of experts."""
        if not layout.zero1:
            return 1, 1
        return layout.dp * layout.cp, layout.world_size // (layout.tp * layout.pp * layout.ep)
