"""The norm of all gradients of a model that is spread over a mesh, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from .. import accelerator, comm, spmd
from ..comm.rank_selection import in_one_program, only_on_first
from ..spmd import P, V
from ..torch_internals.tensors import foreach_mul_, foreach_norm
from ..weights.shard_spec import spec_of
from ..weights.wrappers import refuse_flattened
from .gradient import DATA_AXES, ParameterGradient, Parameters, gradient_of, parameters_of
from .state import keeping_reductions

__all__ = [
    "check_norm_groups",
    "clip_grad_norm",
    "clip_grads_with_norm",
    "get_grad_norm",
    "group_of_ranks",
    "norm_groups",
    "norm_of",
    "scale_grads",
]


def get_grad_norm(
    parameters: Parameters,
    norm_type: float = 2,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Any = None,
    force_spmd: bool = True,
) -> torch.Tensor:
    """The norm of all gradients of the whole model as one vector, the same on every rank.

    Every rank calls it.

    Shards over tp and stages are added; parameters replicated over tp count once, and parameters marked `shared` (later
    copies of a tied weight) do not count. This is one scalar all-reduce over the merged (pp, tp). Sums are taken in
    fp32, or in the dtype of the gradients if that is wider.

    Args:
        parameters: any iterable of parameters, generators too, or one; those without a gradient are skipped.
        norm_type: p > 0; `inf` for the largest absolute value.
        zero1_optimizer: the gradients are shards over dp x cp: one scalar all-reduce over the world.
        zero1_optimizer_groups: they are shards over these groups instead: lists of ranks, or a Communicator, which
            saves making the groups at each call.
        force_spmd: accepted for compatibility; every rank always runs the same program.

    Returns:
        0-dim tensor; 0 if there are no gradients anywhere.
    """
    params = parameters_of(parameters)
    refuse_flattened("clip_grad_norm", params)
    groups = norm_groups(zero1_optimizer, zero1_optimizer_groups)
    return norm_of(params, [gradient_of(param) for param in params], norm_type, groups)[0]


def clip_grad_norm(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Any = None,
    force_spmd: bool = True,
) -> torch.Tensor:
    """Scales all gradients in place so that their norm over the whole model is at most `max_norm`.

    Returns the norm before that. `max_norm=inf` only measures. For the other arguments see `get_grad_norm`.
    """
    params = parameters_of(parameters)
    total_norm = get_grad_norm(params, norm_type, zero1_optimizer, zero1_optimizer_groups)
    return clip_grads_with_norm(params, total_norm, max_norm)


def clip_grads_with_norm(parameters: Parameters, total_norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Multiplies all gradients in place by `min(1, max_norm / (total_norm + 1e-6))`; returns `total_norm`.

    The host does not wait for the device. Where the norm is infinite or NaN, gradients become zero or NaN on all ranks.
    """
    if not math.isinf(max_norm):
        scale_grads(parameters, (max_norm / (total_norm + 1.0e-6)).clamp(max=1.0))
    return total_norm


@torch.no_grad()
def scale_grads(parameters: Parameters, factor: torch.Tensor | float) -> None:
    """Multiplies all gradients in place."""
    every = enumerate(map(gradient_of, parameters_of(parameters)))
    grads = {index: grad for index, grad in every if grad is not None}
    with keeping_reductions(grads.values()):
        for same in _multi_tensor_lists(grads):
            device = grads[same[0]].device
            number = factor.to(device) if isinstance(factor, torch.Tensor) else factor
            foreach_mul_([grads[index] for index in same], number)


def norm_groups(zero1_optimizer: bool, zero1_optimizer_groups: Any) -> list[Any]:
    """The groups over which the powers of the local norms are summed, one after the other."""
    if zero1_optimizer_groups is not None and not zero1_optimizer:
        raise ValueError("zero1_optimizer_groups needs zero1_optimizer=True: pass both, or neither")
    if zero1_optimizer and zero1_optimizer_groups is None:
        return ["world"]
    model = ("pp", "ep", "tp") if comm.size("ep") > 1 else ("pp", "tp")
    if zero1_optimizer_groups is None:
        return [model]
    group = group_of_ranks(zero1_optimizer_groups)
    if group.ranks == comm.communicator(DATA_AXES).ranks:
        return ["world"]
    if group.size > 1 and comm.size("ep") > 1:
        raise ValueError(
            f"groups over a part of dp x cp, {list(group.ranks)}, cannot be combined with ep > 1: leave them out"
        )
    return [group, model]


def check_norm_groups(groups: Any) -> None:
    """Refuses groups other than those over which the mesh spreads a model.

    NxD's trainer passes its tp groups here, and expects the norm of the whole model, which is computed in any case.
    Accepted are the tp groups, and the tp groups merged with pp (and ep).

    Args:
        groups: lists of ranks which together are the world, a Communicator, or a ProcessGroup.

    Raises:
        ValueError: they are other groups.
    """
    mesh = comm.current().mesh
    axes = [("tp",), ("pp", "tp"), ("pp", "ep", "tp")]
    if isinstance(groups, Sequence):
        given: list[Any] = sorted(list(ranks) for ranks in groups)
        fits = any(given == sorted(list(ranks) for ranks in mesh.groups(axis)) for axis in axes)
    else:
        given = list(comm.communicator(groups).ranks)
        fits = any(given == list(comm.communicator(axis).ranks) for axis in axes)
    if not fits:
        raise ValueError(
            f"grad_norm_groups {given} are not the tp groups of {mesh}, nor those merged with pp: grad_norm is always "
            f"the norm of the whole model; leave grad_norm_groups out, or pass the tp groups as NxD does"
        )


def group_of_ranks(groups: Any) -> comm.Communicator:
    """The communicator over lists of ranks which together are the world.

    Where the mesh has a communicator for these lists, it is returned.

    Raises:
        ValueError: the lists do not hold this rank.
    """
    if isinstance(groups, comm.Communicator):
        return groups
    lists = [list(ranks) for ranks in groups]
    for axis in (DATA_AXES, ("dp",), ("cp",), ("edp",), ()):
        if sorted(comm.current().mesh.groups(axis)) == sorted(lists):
            return comm.communicator(axis)
    group: comm.Communicator | None = comm.new_group(lists, "sharding")
    if group is None:
        rank = comm.current().rank
        raise ValueError(f"groups {lists} do not contain rank {rank}; together they must cover the whole world")
    return group


@torch.no_grad()
def norm_of(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    norm_type: float,
    groups: Sequence[Any],
    *,
    replicas: Sequence[comm.Communicator] | None = None,
    parts: Sequence[int] | None = None,
    watch_copies: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of `grads`, summed over `groups`; and the norms of parts of them, `[parts]`.

    Args:
        params: parameters, which have the layouts of the gradients.
        grads: of the parameters, or shards of them.
        groups: over which the powers of the ranks' norms are summed, one after the other.
        replicas: for each gradient, the ranks with an equal copy, in addition to those that the layout of `params`
            names.
        parts: number of gradients of each part, in order; all ranks pass the same number of parts. None: one part.
        watch_copies: make the norm NaN where a copy of a gradient that does not count is not finite.

    Raises:
        ValueError: `norm_type` is not positive.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive (2, 1, 0.5, inf, ...), got {norm_type}")
    over_ep = "world" not in groups and comm.size("ep") > 1
    device = params[0].device if params else comm.current().backend.device
    # One dtype on all ranks, whatever the dtypes of their parameters: a stage may have none.
    wide = torch.float64 if accelerator.has_double(device.type) else torch.float32
    counted: dict[int, torch.Tensor] = {}
    copies: dict[int, torch.Tensor] = {}
    masks: dict[int, list[comm.Communicator]] = {}
    for index, (param, grad) in enumerate(zip(params, grads)):
        if grad is not None:
            holders = [*_holders(param, over_ep), *([] if replicas is None else [replicas[index]])]
            (counted if _counts_here(param, holders) else copies)[index] = spmd.local(grad)
            # In one program for all ranks (XLA) a copy is not left out, it is made 0.
            masks[index] = holders if in_one_program(param) else []
    norms = {
        index: only_on_first(norm, masks[index]).to(device, wide) for index, norm in _norms(counted, norm_type).items()
    }
    ends = [*accumulate(parts or [len(params)])]
    sums = [
        _summed([norms[index] for index in range(begin, end) if index in norms], norm_type, device, wide)
        for begin, end in zip([0, *ends], ends)
    ]
    total = sums[0] if parts is None else torch.stack(sums)
    if hasattr(total, "full_tensor"):  # of the DTensors of fully_shard: the sum over its mesh
        total = total.full_tensor()
    if watch_copies:
        for norm in _norms(copies, norm_type).values():
            total = total + 0.0 * norm.to(device, wide)
    is_max = math.isinf(norm_type)
    for group in groups:
        total = comm.all_reduce(spmd.trust(total, group, V if is_max else P), group, op="max" if is_max else "sum")
    dtype = torch.float32
    for param in params:
        dtype = torch.promote_types(dtype, param.dtype)
    root = 1.0 if is_max else 1.0 / norm_type
    if parts is None:
        whole = total.pow(root).to(dtype)
        return whole, whole.reshape(1)
    return (total.amax() if is_max else total.sum()).pow(root).to(dtype), total.pow(root).to(dtype)


def _summed(norms: Sequence[torch.Tensor], norm_type: float, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The sum of the powers of norms, or the largest of them: 0-dim."""
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    stacked = torch.stack([*norms])
    return stacked.amax() if math.isinf(norm_type) else stacked.pow(norm_type).sum()


def _norms(grads: Mapping[int, torch.Tensor], norm_type: float) -> dict[int, torch.Tensor]:
    """The norm of each gradient, by its number; at least in fp32."""
    norms: dict[int, torch.Tensor] = {}
    for same in _multi_tensor_lists(grads):
        wide = torch.promote_types(torch.float32, grads[same[0]].dtype)
        norms.update(zip(same, foreach_norm([grads[index] for index in same], norm_type, dtype=wide)))
    return norms


def _multi_tensor_lists(grads: Mapping[int, torch.Tensor]) -> list[list[int]]:
    """Groups the indices of gradients into lists that one multi-tensor operation takes."""
    lists: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, grad in grads.items():
        lists.setdefault((grad.dtype, grad.device), []).append(index)
    return [*lists.values()]


def _counts_here(param: torch.Tensor, holders: Sequence[comm.Communicator]) -> bool:
    """Returns whether this rank's gradient enters the sum: exactly one of several copies of a gradient does."""
    if getattr(param, "shared", False):
        return False
    return in_one_program(param) or all(group.rank == 0 for group in holders)


def _holders(param: torch.Tensor, over_ep: bool) -> list[comm.Communicator]:
    """The groups of ranks that hold copies of this gradient; the first rank counts.

    `over_ep`: whether the sum is over ep ranks too, which have equal gradients, except for experts. (In a sum over the
    world gradients are shards, and the ep ranks, which are data ranks, have different ones.)
    """
    spec = spec_of(param)
    copied = [spec.replicated_over] if spec.replicated_over else []
    if over_ep and not ParameterGradient(param).is_expert:
        copied.append("ep")
    return [comm.communicator(axis) for axis in copied]
