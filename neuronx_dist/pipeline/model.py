"""`NxDPPModel`: a model whose layers are spread over pipeline stages, with the API of NeuronX Distributed.

    model = NxDPPModel(module, transformer_layer_cls=Block, num_microbatches=8, output_loss_value_spec=(True, False),
                       input_names=["input_ids", "labels"], auto_partition=True)
    optimizer = AdamW(model.local_parameters())
    loss = model.run_train(input_ids=..., labels=...)      # the mean loss where the model ends, None elsewhere

A rank holds the parameters of its own stage; those of other stages are turned to the meta device, where they take no
memory, and keep their names. At one stage the same path runs, with no messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from .. import comm
from ..gradients.accumulation import no_sync
from ..gradients.in_backward import paused
from ..gradients.reduce import reduce_gradients, refuse_accumulation
from ..parallel_layers import PARALLEL_MODULES
from ..parallel_layers.signatures import accepts
from ..program.recorder import record
from ..program.recording import Recording
from ..spmd.watching import active
from .cut_module import CutModule
from .manual_pipe_stage import LayerList, PartitionFunction
from .options import (
    check_counts,
    check_manual,
    checked_auto_partition,
    checked_input_names,
    inputs_by_name,
    module_classes,
    names,
    warn_of_tracing,
    warn_of_unused,
)
from .run.comparison import PipelineComparison
from .run.microbatches import Batch, evaluating
from .run.run_batch import check_pieces, check_runs, run_batch
from .run.stage_program import Programs, StageProgram, build_program, program_key
from .run.step_loss import report_loss, without_backward
from .run.trace import Trace
from .run.trace_file import checked_path
from .run.transport import Channels
from .schedule import Inference, Schedule, training_schedule

__all__ = ["NxDPPModel"]


class NxDPPModel(CutModule):
    """A module distributed over pipeline stages.

    Args:
        module: the whole model, equal on all ranks; on meta, or real.
        transformer_layer_cls: class (or several) of the transformer layers.
        num_microbatches: a batch is cut into as many equal pieces along dim 0.
        virtual_pipeline_size: pieces of the model on each stage (chunks). Above 1 the schedule is interleaved 1F1B, and
            the model is cut into `stages * virtual_pipeline_size` pieces, which go around the stages.
        output_loss_value_spec: which leaf of the forward's result is the loss: True, or a tuple or dict in the shape of
            the result, such as `(True, False)` or `{"loss": True, "logits": False}`; see `find_loss`.
        return_mb_loss: return the list of the microbatches' losses.
        broadcast_and_average_loss: return the loss on all ranks, averaged over data-parallel ranks.
        pipeline_cuts: names of the last layers of all pieces but the last: `stages * chunks - 1` of them.
        input_names: the keyword arguments that `run_train` and `run_eval` are called with; None: any. With names, a
            model that registers a norm or a head before its transformer layers is placed by the order of its calls, if
            it runs on ids `[1, 8]`; see `trace` for others.
        leaf_module_cls: more classes, or parts of names of classes, whose modules are recorded as one call. A module
            without parameters runs on each stage that needs its result, unless it changes a buffer, draws random
            numbers, communicates or depends on activations: then on the stage where it is called.
        autowrap_functions, autowrap_modules, autowrap_obj_methods, tracer_cls ("hf", "torch" or a class): checked, and
            without effect, with a warning: the calls of forward are recorded while it runs, not traced from symbols.
        param_init_fn: `param_init_fn(module)` initialises the direct parameters of a module that was on meta; called
            for each module of this stage that has any, on the CPU. `param_init_fn(module, device)`, as in NxD's
            release, is called for modules that contain such modules too, before these. What it does not set is NaN.
        trace_file_path: a file in which each pass is recorded, as a trace of Chrome and Perfetto (ui.perfetto.dev):
            tasks, waits, messages and collectives of all ranks of a host; see `Trace`. None: no trace. The attribute
            may be set between steps.
        use_zero1_optimizer: the optimizer averages gradients over data-parallel ranks, so that `run_train` does not.
        auto_partition: True or "layers": cut evenly between transformer layers, as NxD; see `create_partitions`.
            "balanced": by FLOPs, which `trace(kwargs={...})` after this makes known, and parameters, the embedding's
            and the head's included; between any layers. Without `trace` by parameters alone.
        deallocate_pipeline_outputs: keep sent tensors of the last two microbatches only, and what backward needs;
            False: of all microbatches in flight.
        use_model_wrapper, fuse_microbatches: without effect, with a warning.
        use_optimizer_wrapper: leave the mean over data-parallel ranks to the caller: `bucket_allreduce_gradients`.
        return_loss_on_cpu: move the loss to the CPU.
        manual_pp_partition: `module` is a list of layers, each of which takes and returns a tensor or a list of them;
            `run_train(inputs=..., labels=...)` gives `inputs` to the first one. See `pipeline.manual_pipe_stage`.
        manual_pp_stage_partition_fn: `fn(layers, n)` returns `{layer: stage}`, with the layers themselves as keys, and
            stages of all n = `stages * chunks` pieces; None: an even division, as of `auto_partition`.
        manual_pp_loss_fn: `fn(output, labels)` is the loss, of the last layer's output; of a list or tuple, output or
            labels, the function gets the first entry.
        schedule: what `run_train` runs: "1f1b", "interleaved" (at least two chunks), "gpipe", "zb_h1", "zb_v" (two
            chunks, placed as a V, so that stage 0 has the loss), a `Schedule`, or a function that makes one,
            `(num_stages, num_microbatches) -> Schedule`. None: 1F1B, and interleaved 1F1B if there are several chunks.
        check_finite: refuse a loss that is NaN or infinite, with its microbatch, on the stage that computes it; the
            host waits for each loss. False: no check.

    Positional arguments are in this order, the API guide's, or in that of NxD's release (`parallel_layers.signatures`);
    the release's underscored arguments are ignored with a warning.

    Attributes:
        schedule: the argument; `training_schedule` is the schedule that it stands for.
        virtual_pipeline_size: pieces of the model on each stage; the schedule may decide it.
        recorder: records a forward, as `record` does; the checker sets one that shares recordings between ranks.

    Raises:
        ValueError: an argument with a wrong value; the message says which values are right.
    """

    @accepts("NxDPPModel")
    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        transformer_layer_cls: Any = None,
        num_microbatches: int = 1,
        virtual_pipeline_size: int = 1,
        output_loss_value_spec: Any = None,
        return_mb_loss: bool = False,
        broadcast_and_average_loss: bool = False,
        pipeline_cuts: Sequence[str] | None = None,
        input_names: Sequence[str] | None = None,
        leaf_module_cls: Sequence[Any] | None = None,
        autowrap_functions: Any = None,
        autowrap_modules: Any = None,
        tracer_cls: Any = None,
        param_init_fn: Callable[..., Any] | None = None,
        trace_file_path: str | None = None,
        use_zero1_optimizer: bool = False,
        auto_partition: bool | str | None = False,
        deallocate_pipeline_outputs: bool = False,
        *,
        use_model_wrapper: bool = False,
        use_optimizer_wrapper: bool = False,
        autowrap_obj_methods: Any = None,
        return_loss_on_cpu: bool = True,
        fuse_microbatches: bool = False,
        manual_pp_partition: bool = False,
        manual_pp_stage_partition_fn: PartitionFunction | None = None,
        manual_pp_loss_fn: Callable[[Any, Any], Any] | None = None,
        schedule: str | Schedule | Callable[[int, int], Schedule] | None = None,
        check_finite: bool = False,
    ) -> None:
        check_counts(num_microbatches=num_microbatches, virtual_pipeline_size=virtual_pipeline_size)
        if not isinstance(check_finite, bool):
            raise ValueError(f"check_finite is True or False, got {check_finite!r}")
        check_manual(
            module,
            manual_pp_partition,
            cuts={"auto_partition": auto_partition, "pipeline_cuts": pipeline_cuts},
            functions={
                "manual_pp_stage_partition_fn": manual_pp_stage_partition_fn,
                "manual_pp_loss_fn": manual_pp_loss_fn,
            },
        )
        warn_of_tracing(tracer_cls, autowrap_functions, autowrap_modules, autowrap_obj_methods)
        warn_of_unused(
            use_model_wrapper=(use_model_wrapper, "the pipeline trains the model itself"),
            fuse_microbatches=(fuse_microbatches, "each task of a stage is a separate program"),
        )
        if return_mb_loss and broadcast_and_average_loss:
            raise ValueError("broadcast_and_average_loss=True returns one loss: use return_mb_loss=False")
        if auto_partition and pipeline_cuts:
            raise ValueError(f"auto_partition=True chooses the cuts: leave out pipeline_cuts={list(pipeline_cuts)}")
        num_stages = comm.size("pp")
        chosen = training_schedule(
            num_stages,
            num_microbatches,
            schedule=schedule,
            num_chunks=virtual_pipeline_size,
            deallocate=deallocate_pipeline_outputs,
        )
        check_runs(chosen)
        layer_classes: list[type] = []
        if manual_pp_partition or not isinstance(module, nn.Module):
            module = LayerList(module, manual_pp_loss_fn)
            layer_classes = module.layer_classes
            pipeline_cuts = module.cuts(chosen.num_virtual_stages, manual_pp_stage_partition_fn)
            transformer_layer_cls = transformer_layer_cls or layer_classes
            output_loss_value_spec = module.loss_spec if output_loss_value_spec is None else output_loss_value_spec
        super().__init__(module, stage=comm.rank("pp"), num_stages=num_stages, last_stage=chosen.holders[-1])
        self.schedule = schedule
        self.check_finite = check_finite
        self.transformer_layer_cls = transformer_layer_cls
        self.num_microbatches = num_microbatches
        self.virtual_pipeline_size = chosen.num_chunks
        self.output_loss_value_spec = output_loss_value_spec
        self.return_mb_loss = return_mb_loss
        self.broadcast_and_average_loss = broadcast_and_average_loss
        self.pipeline_cuts = names(pipeline_cuts, "pipeline_cuts")
        self.input_names = checked_input_names(module, input_names)
        self.auto_partition = checked_auto_partition(auto_partition)
        self.param_init_fn = param_init_fn
        self.trace_file_path = checked_path(trace_file_path)
        self.use_zero1_optimizer = use_zero1_optimizer
        self.use_model_wrapper = use_model_wrapper
        self.use_optimizer_wrapper = use_optimizer_wrapper
        self.return_loss_on_cpu = return_loss_on_cpu
        self.deallocate_pipeline_outputs = deallocate_pipeline_outputs
        self._layer_classes = module_classes(module, transformer_layer_cls, "transformer_layer_cls")
        leaves = module_classes(module, leaf_module_cls, "leaf_module_cls", parts_of_names=True)
        self._leaf_classes = [*self._layer_classes, *PARALLEL_MODULES, *leaves, *layer_classes]
        self.recorder: Callable[..., Recording] = record
        self._channels = Channels(None, None)
        self.comparison = PipelineComparison()
        self._example: Recording | None = None
        self._programs = Programs(128)
        self._trace: Trace | None = None
        self._schedules: dict[Any, Schedule] = {self._key_of_training(): chosen}  # of training and evaluation
        self._cut_for = chosen
        self._checked = WeakSet([chosen])
        if self.pipeline_cuts or self.auto_partition or chosen.num_virtual_stages == 1:
            self.partition()

    # --- running

    @inputs_by_name
    def run_train(self, **kwargs: Any) -> torch.Tensor | list[torch.Tensor] | None:
        """Forward and backward of a batch in all microbatches, and the reduction of gradients.

        Each module is in the mode, training or evaluation, that it is set to. Gradients are those of the mean over the
        microbatches; `zero_grad` is the caller's.

        Args:
            kwargs: the inputs, named as `input_names`. Tensors, on any device, are cut along dim 0, in which all have
                one size; those of one row, 0-dim tensors and all else go whole to every microbatch.

        Returns:
            The mean loss on the stage where the model ends (the last; with ZB-V the first), None on others: a list of
            the microbatches' with `return_mb_loss`; with `broadcast_and_average_loss` the mean over data-parallel ranks
            too, everywhere.

        Raises:
            ValueError: inputs other than `input_names`, without rows, of different numbers of rows, or not divisible
                into microbatches.
            CommError: the ranks of the pipeline disagree about the model, or about what runs.
            RuntimeError: not partitioned, still on meta, no `output_loss_value_spec`, or reduced gradients of the step
                before that cannot be added to (sequence-parallel parameters', tied weights', experts').
        """
        self._check_loss_is_known("run_train")
        if not self.placement_is_open:  # else it never ran
            refuse_accumulation(self)
        program, losses = self._execute(self.training_schedule, kwargs)
        average_over_data = not (self.use_zero1_optimizer or self.use_optimizer_wrapper)
        reduce_gradients(self, average_over_data=average_over_data)
        return without_backward(self._report(program, losses))

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, `run_train` adds to the gradients and does not reduce them; see `neuronx_dist.no_sync`.

        with model.no_sync():
            model.run_train(**first)
        model.run_train(**second)       # reduces the sum of both
        """
        return no_sync(self)

    @inputs_by_name
    def run_eval(self, *, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Forward only, in evaluation mode and without gradients; modes are set back afterwards.

        Args:
            return_outputs: return `(loss, outputs)`.
            kwargs: as of `run_train`.

        Returns:
            What `run_train` returns. With `return_outputs` a pair of that and of the outputs: a list of the forward's
            results, one for each microbatch, on the stage where the model ends, None on others. Without an
            `output_loss_value_spec` the outputs alone.
        """
        with evaluating(self.original_module):
            program, results = self._execute(self.evaluation_schedule, kwargs, return_outputs)
        outputs = results if self.is_last_stage() else None
        if program.loss is None:
            return (None, outputs) if return_outputs else outputs
        if not return_outputs:
            return self._report(program, results)
        losses = [loss for loss, _ in results] if self.is_last_stage() else []
        return self._report(program, losses), outputs and [output for _, output in outputs]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a pipeline model cannot be called: use run_train(**inputs) or run_eval(**inputs)")

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles each transformer layer in place, as `nn.Module.compile` does; all else stays eager.

        Raises:
            ValueError: no transformer layers are known.
        """
        layers = [m for m in self.original_module.modules() if isinstance(m, tuple(self._layer_classes))]
        if not layers:
            raise ValueError("compile: the transformer layers are unknown; pass transformer_layer_cls to NxDPPModel")
        for layer in layers:
            layer.compile(*args, **kwargs)

    @property
    def evaluation_schedule(self) -> Schedule:
        """The schedule that `run_eval` runs: the forwards of training."""
        training = self.training_schedule
        if training not in self._schedules:
            self._schedules[training] = Inference(self.num_stages, self.num_microbatches, training)
        return self._schedules[training]

    def run(self, schedule: Schedule, inputs: Mapping[str, Any]) -> list[Any]:
        """Runs a schedule over a batch; `run_train` and `run_eval` do it with theirs. All ranks call it with the same.

        Gradients are added to those that parameters have, as the mean over the microbatches; they are not reduced over
        other ranks (`reduce_gradients(model)`). Modules stay in the mode, training or evaluation, that they are in.

        Args:
            schedule: for this model's number of stages. If it has backwards, gradients are enabled, else disabled.
            inputs: named as `input_names`. Tensors `[schedule.num_microbatches * rows, ...]` are cut along dim 0; those
                of one row, 0-dim tensors and all else go whole to every microbatch.

        Returns:
            By microbatch, on the stage that holds the end of the model (`is_last_stage()`): its loss (0-dim, detached,
            on the device), or the forward's result where there is no `output_loss_value_spec`. Elsewhere None for each.

        Raises:
            ValueError: a schedule for another number of stages or chunks; inputs other than `input_names`, or not
                divisible into microbatches.
            RuntimeError: not partitioned, still on meta, or backwards without an `output_loss_value_spec`; a schedule
                that deadlocks, or leaves something out.
            whatever a task raises, with the task and the stage before the message.
        """
        if schedule.trains:
            self._check_loss_is_known("a schedule with backwards")
        _, results = self._execute(schedule, inputs)
        return results

    def program(self, inputs: Mapping[str, Any]) -> StageProgram:
        """The program that this stage runs for each microbatch of such inputs; recorded when they are first seen.

        Args:
            inputs: a batch as `run_train` takes it: tensors `[num_microbatches * rows, ...]`, of which shapes, strides,
                dtypes and `requires_grad` count; all else by value.

        Raises:
            ValueError: inputs other than `input_names`, not divisible into microbatches, or no loss where
                `output_loss_value_spec` says; layers that do not run in the order in which they were placed.
            RuntimeError: not partitioned, or parameters on meta.
            TracingError: the forward cannot be recorded, or not be cut here.
        """
        self._check_partitioned()
        return self._program(Batch(inputs, self.input_names, self.num_microbatches))

    def _execute(
        self, schedule: Schedule, inputs: Mapping[str, Any], return_outputs: bool = False
    ) -> tuple[StageProgram, list[Any]]:
        """Runs a schedule; returns the program that ran, and the results as `run` does."""
        self._check_partitioned()
        if schedule not in self._checked:
            check_pieces(schedule, self._cut_for)
            check_runs(schedule)
            self._checked.add(schedule)
        with torch.set_grad_enabled(schedule.trains):
            batch = Batch(inputs, self.input_names, schedule.num_microbatches)
            if self.device.type == "meta":
                self.refuse_meta()
            if comm.size("cp") > 1:  # a swapped model sees recorded microbatches only, without values
                for module in self.original_module.modules():
                    if (check_batch := module.__dict__.get("check_batch")) is not None:
                        check_batch(module, inputs)
            program = self._program(batch, return_outputs)
            if self.comparison.is_possible():
                if not self.comparison.has_been_at("first batch"):
                    assert self.placement is not None
                    self._compare("first batch", self.placement)
                self.comparison.begin_pass(program, schedule)
            if not self.tied_weights_synced:
                self.sync_tied_weights()
            parameters = list(self.local_parameters())
            with paused(parameters):  # until the last microbatch, and what `reduce_gradients` sums
                results, self.peak_in_flight = run_batch(
                    program,
                    schedule,
                    batch,
                    module=self.original_module,
                    stage=self.stage,
                    channels=self._channels,
                    parameters=parameters,
                    device=self.device,
                    check_finite=self.check_finite,
                    trace=self._opened_trace(),
                )
        return program, results

    def _opened_trace(self) -> Trace | None:
        """The trace, opened by the first pass; None without `trace_file_path`, and in a check, which plays ranks."""
        if self.trace_file_path is None and self._trace is not None:
            self._trace.end()
            self._trace = None
        if self._trace is None and self.trace_file_path is not None and active() is None:
            self._trace = Trace(self.trace_file_path, self.device).closed_with(self)
        return self._trace

    def _program(self, batch: Batch, return_outputs: bool = False) -> StageProgram:
        key = program_key(batch, self.module_tree, self.device, return_outputs)
        program = self._programs.get(key)
        if program is None:
            self.refuse_meta()
            recording = self._record(batch.example(), self.device)
            if self.placement_is_open:
                self._example = recording
                self._partition("first batch")
                self.close_placement()
            assert self.placement is not None
            program = build_program(
                self.original_module,
                recording,
                loss_spec=self.output_loss_value_spec,
                return_outputs=return_outputs,
                cuts=self.pipeline_cuts,
                placement=self.placement,
                schedule=self.training_schedule,
                stage=self.stage,
                constants=batch.constants(),
            )
            self._programs.add(key, program)
        return program

    @property
    def recordings_kept(self) -> int:
        """Number of recordings in memory, of the shapes that were used last; 128 by default."""
        return self._programs.most

    @recordings_kept.setter
    def recordings_kept(self, most: int) -> None:
        check_counts(recordings_kept=most)
        self._programs.most = most

    def _check_loss_is_known(self, what: str) -> None:
        if self.output_loss_value_spec is None and isinstance(self.original_module, LayerList):
            raise RuntimeError(f"{what} of a list of layers needs its loss: pass manual_pp_loss_fn=fn(output, labels)")
        if self.output_loss_value_spec is None:
            raise RuntimeError(
                f"{what} needs to know which output is the loss: pass output_loss_value_spec, e.g. True, (True, "
                f'False) or {{"loss": True, "logits": False}}'
            )

    def _report(self, program: StageProgram, losses: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor] | None:
        assert program.loss is not None
        return report_loss(
            losses,
            program.loss,
            stage=self.stage,
            last_stage=self.last_stage,
            return_mb_loss=self.return_mb_loss,
            broadcast_and_average_loss=self.broadcast_and_average_loss,
            computed_on=self.device,
            report_on=torch.device("cpu") if self.return_loss_on_cpu else self.device,
        )
