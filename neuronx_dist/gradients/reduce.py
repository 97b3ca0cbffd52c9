"""Gradients after backward: reducing them over the mesh, and the number of items that a loss is divided by.

The one rule (docs/architecture.md): the engine divides each microbatch's loss by the number of microbatches, gradients
are averaged over dp x cp, and a loss is divided by `global_num_items`: the result is the mean over the global batch.

    local gradients
      -> sum over tp            parameters that see a shard of the sequence only (`sequence_parallel`)
      -> sum over their stages  tied weights (pipeline models)
      -> mean over dp x cp      all of them
         or sum over edp / (dp * cp): experts (`expert_model_parallel`), which got the tokens of their ep group already
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .. import comm, spmd
from ..spmd.types import scaled
from ..torch_internals.tensors import foreach_mul_
from .accumulation import is_accumulating
from .buckets import BucketPlan, cap_in_bytes, is_anywhere
from .buckets import overlap as in_turn
from .data_mean import MeanInBackward, start_sum
from .gradient import DATA_AXES, ParameterGradient, Parameters, gradient_of, parameters_of
from .guards import watch_optimizers
from .in_backward import start_complete
from .reduction_plan import GradientGroup, ModelGradients
from .state import ReductionState, keeping_reductions, left_to_reduce, mark_reduced, mark_step, refuse_reduced

__all__ = [
    "allreduce_context_parallel_gradients",
    "allreduce_sequence_parallel_gradients",
    "bucket_allreduce_gradients",
    "complete_reduction",
    "global_num_items",
    "number_of_valid",
    "reduce_gradients",
    "refuse_accumulation",
]

_BUCKET_CAP_MB = 100.0  # two are in flight: large enough for full bandwidth, small beside the gradients


@torch.no_grad()
def reduce_gradients(
    model: nn.Module,
    average_over_data: bool = True,
    *,
    bucket_cap_mb: float | None = None,
    reduce_dtype: torch.dtype | None = None,
    overlap: bool = False,
) -> None:
    """Reduces every gradient to the gradient of one process, in place: once per step, after the last backward.

    Inside of `no_sync(model)` it does nothing.

    A gradient that is missing on this rank counts as zero, and stays None if no other rank of the group has it.
    Gradients accumulate before the reduction, not on top of a reduced one: call `zero_grad` first. NxD's functions
    below may be called after it, as scripts for NxD do after `run_train`: they do what was left out.

    Args:
        model: a module, or a `PartialModel` such as a pipeline model, whose tied weights are summed over their holders.
        average_over_data: False leaves out the mean over dp x cp, which ZeRO-1 does itself.
        bucket_cap_mb: MB of a flat buffer, of which two are held at a time; None: `ALLREDUCE_BUCKET_CAP_MB`, else 100.
        reduce_dtype: sum in this dtype if it is wider than the gradient's.
        overlap: from the next step on, start the mean over dp x cp of a bucket in backward, when its last gradient is
            there; this call awaits them. All backwards of a step but the last, with this call after them, are inside of
            `no_sync(model)`. Without effect on XLA, whose compiler orders a program's collectives, while types are
            checked, and without `average_over_data`.

    Raises:
        RuntimeError: they have been reduced already since the last backward or `zero_grad`; with `overlap` also if
            they changed after their reduction had started.
    """
    if is_accumulating(model):
        return
    gradients = ModelGradients(model)
    refuse_reduced(gradients.held)

    cap = cap_in_bytes(bucket_cap_mb, "ALLREDUCE_BUCKET_CAP_MB", _BUCKET_CAP_MB)
    options: dict[str, Any] = {"cap": cap, "reduce_dtype": reduce_dtype}
    _reduce_params(gradients.partial_over_tp, "tp", **options)
    for holders, copies in gradients.tied():
        _reduce_params(copies, holders, **options)
    in_backward = MeanInBackward.of(model)
    if average_over_data and in_backward is not None:
        in_backward.finish()
    elif average_over_data:
        for axis, members in gradients.by_data_axis():
            _reduce_params(members, axis, scale=1 / comm.size(DATA_AXES), **options)
    mark_step(gradients.held, frozenset({"tp", "cp", "data", "ep"} if average_over_data else {"tp"}))
    if not average_over_data:
        watch_optimizers()
    MeanInBackward.set_up(model, gradients, overlap and average_over_data, cap, reduce_dtype)
    if not average_over_data:
        start_complete(gradient.param for gradient in gradients.gradients)


@torch.no_grad()
def complete_reduction(parameters: Iterable[torch.Tensor], average_over_data: bool = True) -> None:
    """Reduces the gradients of an optimizer's parameters over tp and the data, as far as that is not done yet.

    After `run_train` of a pipeline, which has summed over tp and over tied weights, the mean over the data is left, or
    nothing. A gradient that is missing on this rank counts as zero.

    Raises:
        RuntimeError: the mean over the data was computed already, by another call than `run_train`'s.
    """
    gradients = ModelGradients(list(parameters))
    options: dict[str, Any] = {"cap": cap_in_bytes(None, "ALLREDUCE_BUCKET_CAP_MB", _BUCKET_CAP_MB)}
    for stage in ("tp", "data") if average_over_data else ("tp",):
        held = list(gradients.held)
        left = left_to_reduce(held, stage)
        if len(left) < len(held):
            refuse_reduced(left and held)  # some are, and others are not
            mark_reduced(held, stage)
            continue
        with keeping_reductions(held):
            if stage == "tp":
                _reduce_params(gradients.partial_over_tp, "tp", **options)
            else:
                for axis, members in gradients.by_data_axis():
                    _reduce_params(members, axis, scale=1 / comm.size(DATA_AXES), **options)
        mark_reduced(gradients.held, stage)


def refuse_accumulation(model: nn.Module) -> None:
    """Refuses, before a backward, gradients that another reduction after the backward would scale.

    A mean over the data is the same after a second one. A sum is not: over tp, over the holders of tied weights, over
    the ranks that share an expert's tokens.

    Raises:
        RuntimeError: such a gradient was reduced, and not cleared since; the message says what to do.
    """
    gradients = ModelGradients(model)
    summed = [(comm.communicator("tp"), gradients.partial_over_tp), *gradients.tied()]
    summed += [(comm.communicator("ep"), group) for axis, group in gradients.by_data_axis() if axis != DATA_AXES]
    held = [gradient.tensor for ranks, group in summed if ranks.size > 1 for gradient in group.gradients]
    if any(grad is not None and ReductionState.of(grad).stages for grad in held):
        raise RuntimeError(
            "gradients of the previous step are still present, and reduced: accumulating and reducing again would "
            "scale them. Call zero_grad before the next step. To accumulate more data in a step, use more "
            "microbatches, or make all calls but the last inside of `with no_sync(model):`"
        )


@torch.no_grad()
def bucket_allreduce_gradients(grads_list: Iterable[torch.Tensor], reduce_over_ep_group: bool = False) -> None:
    """NxD's name for the mean over the data, in place, of a list of gradients.

    With expert parallelism the sum is over edp only, and a second call with `reduce_over_ep_group=True`, for all but
    the experts, sums over ep, which completes their mean. Gradients of which `allreduce_context_parallel_gradients`
    took the mean over cp are averaged over dp.

    Raises:
        RuntimeError: this is the second such call since the last backward.
    """
    if reduce_over_ep_group:
        _reduce_list(list(grads_list), "ep", "ep", 1.0)
        return
    over_experts = comm.size("ep") > 1
    averaged: list[torch.Tensor] = []  # over cp
    others: list[torch.Tensor] = []
    for grad in grads_list:
        (averaged if "cp" in ReductionState.of(grad).stages and not over_experts else others).append(grad)
    _reduce_list(others, "edp" if over_experts else DATA_AXES, "data", 1 / comm.size(DATA_AXES))
    _reduce_list(averaged, "dp", "data", 1 / comm.size("dp"))


@torch.no_grad()
def allreduce_sequence_parallel_gradients(optimizer: torch.optim.Optimizer | nn.Module | Parameters) -> None:
    """NxD's name for the sum over tp, in place, of the gradients of `sequence_parallel` parameters.

    After `run_train` or `reduce_gradients`, which do it, it has nothing left to do.

    Raises:
        RuntimeError: this is the second such call since the last backward.
    """
    gradients = [ParameterGradient(param) for param in parameters_of(optimizer)]
    partial = [gradient.tensor for gradient in gradients if gradient.is_partial_over_tp]
    _reduce_list([grad for grad in partial if grad is not None], "tp", "tp", 1.0)


@torch.no_grad()
def allreduce_context_parallel_gradients(optimizer: torch.optim.Optimizer | nn.Module | Parameters) -> None:
    """NxD's name for the mean over cp, in place; `bucket_allreduce_gradients` after it averages over dp.

    ZeRO-1 averages over dp x cp: a call of this function before it changes nothing.

    Raises:
        RuntimeError: this is the second such call since the last backward.
    """
    grads = [grad for grad in map(gradient_of, parameters_of(optimizer)) if grad is not None]
    _reduce_list(grads, "cp", "cp", 1 / comm.size("cp"))


@torch.no_grad()
def global_num_items(
    labels: torch.Tensor,
    num_microbatches: int = 1,
    ignore_index: int = -100,
    shift: bool | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Divisor of each microbatch's summed loss that makes the engine's means the mean over the global batch.

        num_items = N / (num_microbatches * dp * cp)      N: valid labels in the global batch, at least 1

    With `loss = sum(nll) / num_items` (Hugging Face's `num_items_in_batch`), the mean over microbatches, dp and cp is
    the sum over the global batch / N, however unevenly ignored labels are spread; without any valid label it is 0,
    and a warning says so where reading the count does not make the host wait (labels on the CPU).

    Args:
        labels: this rank's labels of the whole step, `[batch, seq]`.
        shift: the loss predicts the next token, so that the first label of a row is not used. False for labels which
            are shifted already. None: True, and False at cp > 1, where they are shifted before the split
            (`get_batch_on_this_context_parallel_rank`).
        dtype: of the result; fp32 is exact up to 2**24 labels if num_microbatches * dp * cp is a power of two.

    Returns:
        0-dim tensor on the device of the labels, the same on all ranks. One integer all-reduce over dp x cp.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}")
    shift = comm.size("cp") == 1 if shift is None else shift
    used = labels[..., 1:] if shift else labels
    count = comm.all_reduce((used != ignore_index).sum(), DATA_AXES)
    if type(count) is torch.Tensor and count.device.type == "cpu" and not count:  # elsewhere the host would wait
        warnings.warn(
            f"global_num_items: all labels of the global batch are {ignore_index} (ignore_index): its loss and its "
            "gradients are 0, and a step of the optimizer decays weights all the same",
            stacklevel=2,
        )
    return count.clamp(min=1).to(dtype) / (num_microbatches * comm.size(DATA_AXES))


def number_of_valid(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Returns the number of this rank's labels that count; the checker assumes that all data-parallel ranks have it."""
    count = (labels != ignore_index).sum()
    return spmd.trust(count, DATA_AXES, scaled(spmd.R, -1), "that every rank has as many valid labels")


def _reduce_list(grads: Sequence[torch.Tensor], axis: Any, stage: str, scale: float) -> None:
    """Reduces gradients whose parameters are unknown, without a plan; each once in a step."""
    left = left_to_reduce(grads, stage)
    cap = cap_in_bytes(None, "ALLREDUCE_BUCKET_CAP_MB", _BUCKET_CAP_MB)
    with keeping_reductions(left):
        _all_reduce(left, [True] * len(left), comm.communicator(axis), BucketPlan(), scale=scale, cap=cap)
    mark_reduced(grads, stage)


def _reduce_params(group: GradientGroup, axis: Any, **options: Any) -> None:
    """Reduces the gradients of a group; creates a gradient that this rank lacks if another rank has it."""
    ranks, gradients = comm.communicator(axis), group.gradients
    if ranks.size == 1:  # nobody else can have what is missing here
        gradients = [gradient for gradient in gradients if gradient.tensor is not None]
    local_grads = [gradient.tensor for gradient in gradients]
    grads = [gradient.zeros() if grad is None else grad for gradient, grad in zip(gradients, local_grads)]
    somewhere = _all_reduce(grads, [grad is not None for grad in local_grads], ranks, group.buckets, **options)
    for gradient, local_grad, grad, is_somewhere in zip(gradients, local_grads, grads, somewhere):
        if local_grad is None and is_somewhere:
            gradient.tensor = grad


def _all_reduce(
    grads: Sequence[torch.Tensor],
    present: Sequence[bool],
    group: comm.Communicator,
    plan: BucketPlan,
    *,
    cap: int,
    scale: float = 1.0,
    reduce_dtype: torch.dtype | None = None,
) -> list[bool]:
    """Sums `scale *` gradients over a group, in place and in the buckets of a plan.

    `present` marks the gradients that this rank has; the others are zeros. Returns which gradients any rank has.
    """
    somewhere = list(present)
    if group.size == 1:
        if scale != 1.0 and grads:
            foreach_mul_(list(grads), scale)
        return somewhere

    def start(bucket: list[int]) -> Any:
        bucket_grads, flags = [grads[i] for i in bucket], [present[i] for i in bucket]
        return start_sum(bucket_grads, flags, group, scale=scale, reduce_dtype=reduce_dtype)

    def finish(bucket: list[int], handle: Any) -> None:
        for i, flag in zip(bucket, handle.wait()[-1]):
            # Waits for the device where a gradient is missing, and only there.
            somewhere[i] = present[i] or is_anywhere(flag)

    kinds: list[Hashable] = [(grad.dtype, grad.device) for grad in grads]
    nbytes = [grad.numel() * grad.element_size() for grad in grads]
    in_turn(plan.buckets(kinds, nbytes, cap), start, finish)
    return somewhere
