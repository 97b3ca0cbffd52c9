"""Prediction of the memory of each rank of a layout, before anything is allocated.

    print(estimate_memory(layout, config))     # a table with a column for each pipeline stage

The prediction uses no formula. One rank of every stage is played on fake tensors, which have shapes and no values: the
same model, pipeline, gradient reduction and optimizer as in training, without a process group, under the meter that
measures real runs (`meter.py`). So all tensors of the code count: microbatches in flight, messages, flat buckets,
temporaries of the optimizer. Memory inside one operator, of the allocator (fragments) and of the communication library
does not count.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import accelerator
from ..gradients.reduce import reduce_gradients
from ..hf.model_plan import transformer_layer_class
from ..hf.swap import swap
from ..optimizer import MasterWeightsOptimizer, MuonAdamW, NeuronZero1Optimizer, muon_groups
from ..pipeline.model import NxDPPModel
from .fake_rank import MESSAGES, PARAMETERS, WireBackend, on_fakes, playing, run_step
from .layout import Layout, format_bytes, format_count
from .meter import MemoryMeter, MemoryPhase, measure_peak
from .recompute import recompute

__all__ = ["MemoryEstimate", "StageMemory", "estimate_memory", "measure_peak", "optimizer_bytes", "pipelined"]

GRADIENTS, OPTIMIZER = "gradients", "optimizer"
ACTIVATIONS, LOGITS, BUFFERS = "activations", "logits", "buffers"


@dataclass(frozen=True)
class StageMemory:
    """Bytes that a rank of one pipeline stage needs.

    Attributes:
        num_parameters: number of parameters on the rank.
        in_flight: most forwards whose backward is not over: microbatches, times chunks (`Schedule.peak_in_flight`).
        compute, reduction, step: forward and backward, the gradient reduction, and the optimizer's step.
    """

    num_parameters: int
    in_flight: int
    compute: MemoryPhase
    reduction: MemoryPhase
    step: MemoryPhase

    @property
    def peak(self) -> int:
        return max(phase.peak for phase in (self.compute, self.reduction, self.step))


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of all ranks of a layout; `str()` of the estimate is a table.

    Attributes:
        num_parameters: number of parameters of the full model; a tied weight counts once.
        stages: the memory of a rank, by pipeline stage; all ranks of a stage need the same.
    """

    num_parameters: int
    stages: tuple[StageMemory, ...]

    @property
    def peak(self) -> int:
        """Bytes that the rank with the largest peak needs."""
        return max(stage.peak for stage in self.stages)

    def __str__(self) -> str:
        shown = list(range(len(self.stages)))
        if len(shown) > 8:
            shown = [*shown[:6], -1, shown[-1]]  # -1 stands for the stages between

        def row(label: str, cell: Callable[[StageMemory], str]) -> list[str]:
            return [label, *("…" if stage < 0 else cell(self.stages[stage]) for stage in shown)]

        def most(label: str, kind: str, phase: Callable[[StageMemory], MemoryPhase]) -> list[str]:
            return row(label, lambda stage: format_bytes(phase(stage).most.get(kind, 0)))

        rows = [
            ["memory of a rank, predicted", *("…" if stage < 0 else f"stage {stage}" for stage in shown)],
            row("number of parameters", lambda stage: format_count(stage.num_parameters)),
            most("parameters", PARAMETERS, lambda stage: stage.step),
            most("gradients", GRADIENTS, lambda stage: stage.step),
            most("optimizer state, master weights", OPTIMIZER, lambda stage: stage.step),
            row("forwards in flight", lambda stage: str(stage.in_flight)),
            most("  their activations", ACTIVATIONS, lambda stage: stage.compute),
            most("  logits and loss", LOGITS, lambda stage: stage.compute),
            most("  messages between stages", MESSAGES, lambda stage: stage.compute),
            most("buckets of the gradient reduction", BUFFERS, lambda stage: stage.reduction),
            most("buffers of the optimizer", BUFFERS, lambda stage: stage.step),
            row("peak of forward and backward", lambda stage: format_bytes(stage.compute.peak)),
            row("peak of the gradient reduction", lambda stage: format_bytes(stage.reduction.peak)),
            row("peak of the optimizer step", lambda stage: format_bytes(stage.step.peak)),
            row("peak", lambda stage: format_bytes(stage.peak)),
        ]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
            for row in rows
        ]
        return "\n".join([*lines, f"the whole model has {format_count(self.num_parameters)} parameters"])


def estimate_memory(
    layout: Layout,
    config: Any,
    *,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    optimizer_options: dict[str, Any] | None = None,
    device: str | torch.device = "cpu",
    fused_loss: bool = False,
    recomputation: Mapping[str, Any] | None = None,
) -> MemoryEstimate:
    """Predicts each rank's memory in a training step after the first, by playing it on fake tensors.

    Args:
        layout: has the batch and the dtype; `zero1` chooses between the two optimizers of `neuronx_dist.optimizer`.
        config: config of a Hugging Face causal LM.
        optimizer_class, optimizer_options: the optimizer that `NeuronZero1Optimizer` or `MasterWeightsOptimizer` wraps;
            `MuonAdamW` gets the groups of `muon_groups`.
        device: the device of the job. Kernels, and so the tensors that they save for backward, differ between devices.
        fused_loss: that of `hf.swap`: no rank holds the logits of all tokens.
        recomputation: arguments of `neuronx_dist.recompute`, such as {"what": "attention"} or {"memory": "24 GB"};
            None: nothing is recomputed.

    Raises:
        LayoutError: the layout does not fit the model.
        UnsupportedModelError: the model cannot be swapped.
        ValueError: the device is CUDA, and torch was built without CUDA, so that it has no CUDA kernels to play.
    """
    layout.check(config)
    device = torch.device(device)
    if device.type == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        raise ValueError(f"this torch ({torch.__version__}) has no CUDA: estimate the memory for device='cpu'")
    options = dict(optimizer_options or {})
    if accelerator.updates_lists(device.type) and options.get("fused") is None:
        options.setdefault("foreach", True)  # torch's default on accelerators, but not for fake tensors
    stages, num_parameters = [], 0
    for stage in range(layout.pp):
        rank = layout.mesh().groups("pp")[0][stage]
        stage_memory, num_parameters = _play(
            layout,
            copy.deepcopy(config),
            stage,
            rank,
            device,
            optimizer_class,
            options,
            recomputation,
            fused_loss,
        )
        stages.append(stage_memory)
    return MemoryEstimate(num_parameters, tuple(stages))


def pipelined(module: nn.Module, layout: Layout, *, fused_loss: bool) -> NxDPPModel:
    """Returns a Hugging Face causal LM on the meta device, swapped in place and cut into the stages of a layout."""
    swap(
        module,
        sequence_parallel=layout.sequence_parallel,
        pad_heads=layout.pad_heads,
        pad_vocab=layout.pad_vocab,
        inplace_logits=True,
        fused_loss=fused_loss,
    )
    return NxDPPModel(
        module,
        transformer_layer_cls=transformer_layer_class(module),
        num_microbatches=layout.num_microbatches,
        virtual_pipeline_size=layout.virtual_pipeline_size,
        schedule=layout.schedule,
        output_loss_value_spec={"loss": True, "logits": False},
        auto_partition=True,
        use_zero1_optimizer=layout.zero1,
    )


def _play(
    layout: Layout,
    config: Any,
    stage: int,
    rank: int,
    device: torch.device,
    optimizer_class: type[torch.optim.Optimizer],
    options: dict[str, Any],
    recomputation: Mapping[str, Any] | None,
    fused_loss: bool,
) -> tuple[StageMemory, int]:
    """Plays a step of one rank; returns its memory, and the number of parameters of the full model."""
    from transformers import AutoModelForCausalLM

    meter = MemoryMeter(device.type)
    with ExitStack() as stack:
        stack.enter_context(playing(layout.mesh(), rank, WireBackend(meter, device)))
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, layout.dtype))
        num_parameters = sum(param.numel() for param in module.parameters())
        model = pipelined(module, layout, fused_loss=fused_loss)
        inputs = _batch(layout)
        if recomputation is not None:
            state = optimizer_bytes(layout, optimizer_class, options)
            recompute(model, **{"inputs": inputs, "optimizer_bytes": state, **recomputation})
        model, inputs = stack.enter_context(on_fakes(model, inputs, meter, device))
        params = [param for param in model.local_parameters() if param.requires_grad]
        meter.kind = OPTIMIZER
        wrapper = NeuronZero1Optimizer if layout.zero1 else MasterWeightsOptimizer
        optimizer = wrapper(muon_groups(model) if optimizer_class is MuonAdamW else params, optimizer_class, **options)
        for param in params:  # a first step, in which the optimizer makes its state
            param.grad = torch.empty_like(param)
        optimizer.step()
        optimizer.zero_grad()
        for param in params:
            param.register_post_accumulate_grad_hook(lambda param: meter.label([param.grad], GRADIENTS))
        _label_logits(model.original_module, meter)

        meter.kind = ACTIVATIONS
        meter.reset("compute")
        run_step(model, inputs)
        meter.kind = BUFFERS
        meter.phase("reduction")
        reduce_gradients(model, average_over_data=not layout.zero1)
        meter.phase("step")
        optimizer.step()
    num_local = sum(param.numel() for param in model.local_parameters())
    return StageMemory(num_local, model.peak_in_flight, **meter.phases), num_parameters


def _batch(layout: Layout) -> dict[str, torch.Tensor]:
    """Returns a rank's batch of token ids, on meta."""
    names = ["input_ids", "labels", *["position_ids"] * (layout.cp > 1)]
    rows, columns = layout.micro_batch * layout.num_microbatches, layout.seq_len // layout.cp
    inputs = {name: torch.zeros(rows, columns, dtype=torch.long, device="meta") for name in names}
    return {**inputs, "num_items_in_batch": torch.ones((), device="meta")}


def optimizer_bytes(
    layout: Layout,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    options: Mapping[str, Any] | None = None,
) -> float:
    """Bytes of optimizer state, masters included, per trainable element on a rank; the most of `MuonAdamW`'s."""
    param = nn.Parameter(torch.zeros(1024))
    param.grad = torch.zeros_like(param)
    kind = {"optimizer": "adamw"} if optimizer_class is MuonAdamW else {}
    optimizer = optimizer_class([{"params": [param], **kind}], **(options or {}))
    optimizer.step()
    states = [x for x in optimizer.state[param].values() if isinstance(x, torch.Tensor) and x.ndim]
    per_element = sum(x.nbytes for x in states) / param.numel() + 4 * (layout.dtype != "float32")
    return per_element / (layout.dp * layout.cp if layout.zero1 else 1)


def _label_logits(module: Any, meter: MemoryMeter) -> None:
    """Counts memory as logits from the head's forward until its input has a gradient."""

    def calculates(head: nn.Module, args: Sequence[Any]) -> None:
        def done(grad: torch.Tensor) -> None:
            meter.kind = ACTIVATIONS

        meter.kind = LOGITS
        args[0].register_hook(done)

    module.get_output_embeddings().register_forward_pre_hook(calculates)
