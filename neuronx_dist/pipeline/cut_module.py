"""A module that is cut into pieces for pipeline stages, by names of layers or automatically, then by its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import nn

from .. import comm
from ..comm.rank_selection import in_one_program
from ..parallel_layers import ParallelEmbedding
from ..program.recording import Recording
from .cut.partitioning import partition
from .cut.placement import Placement, leaf_names
from .options import (
    check_counts,
    checked_input_names,
    module_classes,
    warn_of_stages_without_parameters,
    warn_of_tracing,
)
from .run.comparison import CutStatement, PipelineComparison
from .run.stage_program import recorded
from .run.transport import Channels
from .schedule import Schedule, training_schedule
from .stage_module import StageModule

__all__ = ["CutModule"]

_EMBEDDINGS = (nn.Embedding, ParallelEmbedding)


class CutModule(StageModule):
    """A `StageModule` whose pieces `partition` places. The subclass, `NxDPPModel`, sets its attributes.

    Attributes:
        schedule, num_microbatches, virtual_pipeline_size, deallocate_pipeline_outputs: of training.
        pipeline_cuts, auto_partition: the places of the cuts, or the way to find them.
        input_names, param_init_fn: arguments of the subclass.
        recorder: records a forward, as `record` does; the checker sets one that shares recordings between ranks.
        comparison: of this model with that of the other ranks.
    """

    schedule: Any
    num_microbatches: int
    virtual_pipeline_size: int
    deallocate_pipeline_outputs: bool
    pipeline_cuts: list[str]
    auto_partition: Literal["layers", "balanced"] | None
    input_names: list[str] | None
    param_init_fn: Callable[..., Any] | None
    recorder: Callable[..., Recording]
    _layer_classes: list[type]
    _leaf_classes: list[type]
    _channels: Channels
    comparison: PipelineComparison
    _example: Recording | None
    _schedules: dict[Any, Schedule]

    def trace(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        input_names: Sequence[str] | None = None,
        leaf_modules: Sequence[Any] | None = None,
        autowrap_functions: Any = None,
        autowrap_modules: Any = None,
        autowrap_obj_methods: Any = None,
        tracer_cls: Any = None,
    ) -> None:
        """Records a forward with example inputs: right after the constructor, before anything asks for parameters.

        A model that was partitioned by the order in which it registers its layers is partitioned anew by the order in
        which they run. Another one waits for `cut_pipeline_stage` and `partition`. All ranks call it.

        Args:
            args, kwargs: example inputs, of any batch size, needed if layers do not run in the order in which the model
                registers them, and for the FLOPs of `auto_partition="balanced"`.
            input_names, leaf_modules: as the constructor's `input_names` and `leaf_module_cls`.
            autowrap_functions, autowrap_modules, autowrap_obj_methods, tracer_cls: as the constructor's.

        Raises:
            ValueError: a name that the model does not have, or `args` without names.
            RuntimeError: parameters of the model's stage have been asked for, or it has run.
        """
        if not self.placement_is_open and self.training_schedule.num_virtual_stages > 1:
            raise RuntimeError(
                f"trace: the model has been partitioned, at cuts {self.pipeline_cuts}, because it has run or moved, "
                "or its parameters were requested (by an optimizer, for example): call trace right after "
                "NxDPPModel()"
            )
        warn_of_tracing(tracer_cls, autowrap_functions, autowrap_modules, autowrap_obj_methods)
        if input_names is not None:
            self.input_names = checked_input_names(self.original_module, input_names)
        self._leaf_classes += module_classes(self.original_module, leaf_modules, "leaf_modules", parts_of_names=True)
        if args or kwargs:
            inputs = dict(zip(self.input_names or (), args or ()), **(kwargs or {}))
            if args and len(args) > len(self.input_names or ()):
                raise ValueError(f"trace: {len(args)} args for input_names {self.input_names}: pass kwargs instead")
            self._example = self._record(inputs, None)
        if self.partitioned and self.placement_is_open:
            self._partition("trace")

    def cut_pipeline_stage(self, name: str) -> None:
        """Ends a piece of the model after layer `name`. To be called in order, for each piece but the last."""
        self._check_not_partitioned("cut_pipeline_stage")
        self.pipeline_cuts.append(name)

    def partition(self) -> None:
        """Gives each stage its layers: parameters of other stages go to meta, and tied ones are made equal.

        Raises:
            ValueError: cuts that do not fit the model or the number of stages.
            CommError: ranks have other cuts, layers, shapes or schedules.
        """
        self._check_not_partitioned("partition")
        if not self.auto_partition:
            self._check_number_of_cuts()
        if self._example is None and self.input_names and self.num_stages > 1 and self._is_order_doubtful():
            # NxD, whose models have ids, traces without inputs. Other models are placed by registration.
            ids = {name: torch.zeros(1, 8, dtype=torch.long) for name in self.input_names}
            with suppress(Exception):
                self._example = self._record(ids, None)
        self._partition("partition")

    def _is_order_doubtful(self) -> bool:
        """Returns whether a layer that is no embedding is registered before the transformer layers."""
        names = leaf_names(self.original_module, self._leaf_classes) if self._layer_classes else []
        leaves = map(self.original_module.get_submodule, names)
        before = takewhile(lambda leaf: not isinstance(leaf, tuple(self._layer_classes)), leaves)
        return any(next(leaf.parameters(), None) is not None and not isinstance(leaf, _EMBEDDINGS) for leaf in before)

    def open_channels(self) -> None:
        """Makes the communicators of the messages between stages, of the current rank and backend."""
        if self.num_stages > 1:
            pipelines = comm.current().mesh.groups("pp")
            ways = ["pp_forward", "pp_backward"]
            if self.virtual_pipeline_size > 1:
                ways += ["pp_forward_up", "pp_backward_down"]
            self._channels = Channels(*(comm.new_group(pipelines, way) for way in ways))

    def _partition(self, moment: str) -> None:
        """Partitions by the calls of the example, or without one by registration; replaces an earlier partition."""
        holders = self.training_schedule.holders
        pieces = partition(
            self.original_module,
            len(holders),
            cuts=self.auto_partition or self.pipeline_cuts,
            layer_classes=self._layer_classes,
            leaf_classes=self._leaf_classes,
            recording=self._example,
            chunks=self.virtual_pipeline_size,
        )
        self._example = None
        placement = pieces.placement.on_stages(holders)
        self.pipeline_cuts = pieces.cuts
        self._compare(moment, placement)
        warn_of_stages_without_parameters(placement.without_parameters(self.num_stages), pieces.cuts)
        if not self.partitioned:
            self.open_channels()
        if placement == self.placement:
            return
        self.place(placement)
        if self.param_init_fn is not None:
            self.initialize(self.param_init_fn)
        # A model that goes to XLA is often still on the CPU here: then the first step makes tied weights equal.
        messages = comm.current().backend.has_messages
        parameters = (param for _, param in self._stage_parameters())
        if not any(param.is_meta or not (messages or in_one_program(param)) for param in parameters):
            self.sync_tied_weights()

    def _compare(self, moment: str, placement: Placement) -> None:
        """Raises CommError on ranks that cut another model, or this model in another way."""
        if self.num_stages == 1:
            return
        schedule = self.training_schedule
        pieces = CutStatement.cut(self.pipeline_cuts, schedule)
        if moment == "partition":
            options = {"num_microbatches": self.num_microbatches, "schedule": str(schedule)}
            pieces = CutStatement.of(self.original_module, self.pipeline_cuts, placement, schedule, options)
        if self.comparison.is_possible():
            self.comparison.compare_pieces(moment, pieces)
        elif moment == "partition":
            self.comparison.pieces = pieces

    def _check_number_of_cuts(self) -> None:
        stages, chunks, cuts = self.num_stages, self.virtual_pipeline_size, self.pipeline_cuts
        if len(cuts) != stages * chunks - 1:
            pieces = f"{stages} pipeline stages" + (f" with {chunks} chunks each" if chunks > 1 else "")
            raise ValueError(
                f"{pieces} need {stages * chunks - 1} cuts, got {len(cuts)}: {cuts}. A cut is the name of the last "
                f"layer of a {'chunk' if chunks > 1 else 'stage'}; the last one needs none."
            )

    def _check_not_partitioned(self, what: str) -> None:
        if self.partitioned and self.training_schedule.num_virtual_stages > 1:  # with one piece there is nothing to cut
            raise RuntimeError(
                f"{what}: this model is partitioned already, at {self.pipeline_cuts}: to cut it manually, leave out "
                "pipeline_cuts and auto_partition in the constructor"
            )

    @property
    def training_schedule(self) -> Schedule:
        """The schedule that `run_train` runs, for the present `num_microbatches`."""
        check_counts(num_microbatches=self.num_microbatches, virtual_pipeline_size=self.virtual_pipeline_size)
        key = self._key_of_training()
        if key not in self._schedules:
            self._schedules[key] = training_schedule(
                self.num_stages,
                self.num_microbatches,
                schedule=self.schedule,
                num_chunks=self.virtual_pipeline_size,
                deallocate=self.deallocate_pipeline_outputs,
            )
        return self._schedules[key]

    def _key_of_training(self) -> tuple[Any, ...]:
        return self.schedule, self.num_microbatches, self.deallocate_pipeline_outputs

    @property
    def stage_channels(self) -> Channels:
        """Communicators of the messages between stages; all None before `partition()`."""
        return self._channels

    def _record(self, inputs: dict[str, Any], device: torch.device | None) -> Recording:
        return recorded(self.recorder, self.original_module, inputs, self._leaf_classes, device)

    def _check_partitioned(self) -> None:
        if not self.partitioned:
            raise RuntimeError(
                f"this model is not partitioned: pass pipeline_cuts or auto_partition=True, or call cut_pipeline_stage "
                f"{self.num_stages * self.virtual_pipeline_size - 1} times and then partition()"
            )
