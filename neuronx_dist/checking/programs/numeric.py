"""The step with real values, on ranks as threads and in one process: values show what types do not."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from torch import nn

from ... import comm
from ...gradients.gradient import DATA_AXES, gradient_of, parameters_of
from ...gradients.reduce import reduce_gradients
from ...mesh import Mesh
from ...optimizer import NeuronZero1Optimizer
from ...pipeline.model import NxDPPModel
from ...torch_internals.tensors import pytree
from ...weights.materialize import fill
from ...weights.partial_model import parameter_names, partial_model, unwrapped
from ...weights.shard_spec import gather_full, spec_of
from ..report import Problem
from .calls import Deadline
from .fakes import built_anew
from .played import Subject, call_model, default_optimizer, find_loss

__all__ = ["compare_values"]

SEED = 0
IGNORED = -100  # the usual `ignore_index`
TOLERANCE = 1e-4  # relative to the largest element, in float64
Values = tuple[float | None, dict[str, torch.Tensor]]


def compare_values(subject: Subject, mesh: Mesh, deadline: Deadline, notes: list[str]) -> list[Problem] | None:
    """Compares loss and gradients of the layout with those of one process on the full batch; None: not compared.

    Those of one process must be finite: NaN equals nothing.

    If the subject has a `step`, the gradients are those with which the optimizer steps.

    Weights are those of `materialize(model, 0)`, equal in every layout, in float64. Example inputs belong to one
    data-parallel rank; the other ranks get them rolled along dim 0 or, with one row, along dim 1. A function that
    makes the inputs is called on each rank, to make that rank's part of one batch; the generator is seeded equally.

    Data-parallel ranks have equally many rows. Equal values are compared once more with one row fewer on the last of
    them; a difference there is no problem, but is noted.
    """
    single = Mesh(1)
    expected = comm.threads.run(single, _step, subject, mesh.size(DATA_AXES))[0]
    deadline.check()
    values_by_rank = comm.threads.run(mesh, _step, subject, 1)
    deadline.check()
    if expected is None or None in values_by_rank:
        notes.append(
            "values not compared: the optimizer was made before the weights have values (pass optimizer=), reduces "
            "gradients itself, or does not step; or the step sends between stages that one process does not have"
        )
        return None
    if what := _not_finite(expected):
        notes.append(f"values not compared: {what} in one process: pass inputs with which it is a number")
        return None
    problems = _compare(expected, [values for values in values_by_rank if values is not None], mesh)
    if not problems:
        what = "loss and " if expected[0] is not None else ""
        notes.append(f"{what}{len(expected[1])} gradients equal those of one process")
        if mesh.size(DATA_AXES) == mesh.size("dp") > 1 == mesh.size("pp") and _has_rows(subject.inputs):
            notes += _with_fewer_rows(subject, mesh)
            deadline.check()
    return problems


def _has_rows(inputs: Any) -> bool:
    """Returns whether all inputs are tensors of equally many rows, at least two."""
    leaves = [] if callable(inputs) else pytree.tree_leaves(inputs)
    rows = {len(x) if isinstance(x, torch.Tensor) and x.ndim else 0 for x in leaves}
    return len(rows) == 1 and min(rows) > 1


def _with_fewer_rows(subject: Subject, mesh: Mesh) -> list[str]:
    """A note if loss or gradients differ from those of one process where the last rank has one row fewer."""
    last = f"one row fewer on dp rank {mesh.size('dp') - 1}"
    try:
        expected = comm.threads.run(Mesh(1), _step, subject, mesh.size("dp"), 1)[0]
        found = comm.threads.run(mesh, _step, subject, 1, 1)
    except Exception as error:  # noqa: B902 - shapes that fit equal batches alone, in any function
        return [f"not compared with {last}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"]
    if expected is None or None in found or _not_finite(expected):
        return []
    problems = _compare(expected, [values for values in found if values is not None], mesh)
    if not problems:
        return []
    return [f"with {last} they do not: {problems[0].message}. All ranks need equally many rows, as by drop_last=True"]


def _step(subject: Subject, parts: int, missing: int = 0) -> Values | None:
    """Runs forward, backward and reduction on this rank, on a batch of the inputs of `parts` data-parallel ranks.

    `missing`: number of rows that the last data-parallel rank has fewer.
    """
    with torch.device("meta"):
        built = built_anew(lambda: subject.model_fn(**subject.options), with_values=True)
    user_model, user_optimizer = built if isinstance(built, tuple) else (built, None)
    model = unwrapped(user_model)
    if comm.size("pp") > 1 and not isinstance(model, NxDPPModel):
        return None
    _fill(model)
    inputs = _inputs(subject.inputs, model, parts, missing)
    names = _names(model)
    if subject.step is not None:
        return _user_step(subject, user_model, user_optimizer, inputs, names)
    if isinstance(model, NxDPPModel):
        model.use_zero1_optimizer = model.use_optimizer_wrapper = False  # the mean is taken by the reduction
        model.broadcast_and_average_loss, model.return_mb_loss = True, False
        loss = model.run_train(**inputs)
        assert isinstance(loss, torch.Tensor)
        value = float(loss)
    else:
        result = find_loss(call_model(model, inputs))
        result.backward()
        reduce_gradients(model)
        mean = comm.all_reduce(result.detach(), DATA_AXES) / comm.size(DATA_AXES)
        value = float(mean)
    return value, _gradients(names)


def _user_step(
    subject: Subject, model: nn.Module, optimizer: Any, inputs: Any, names: dict[str, nn.Parameter]
) -> Values | None:
    """The gradients at the optimizer's step in the subject's own `step`; None if that cannot be found."""
    assert subject.step is not None
    if optimizer is None:
        params: list[torch.Tensor] = [param for param in names.values() if param.requires_grad]
        optimizer = subject.optimizer(params) if subject.optimizer else default_optimizer(model, params)
    known = {id(param) for param in names.values()}
    stale = any(id(param) not in known or param.is_meta for param in parameters_of(optimizer))
    if stale or isinstance(unwrapped(optimizer), NeuronZero1Optimizer):
        return None
    grads: list[dict[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(lambda *_: grads.append(_gradients(names)))
    subject.step(model, optimizer, inputs)
    return (None, grads[0]) if grads else None


def _gradients(names: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """The global gradients of parameters; zeros where there is none."""
    grads = {}
    for name, param in names.items():
        grad = gradient_of(param)
        if param.requires_grad:
            grads[name] = gather_full(torch.zeros_like(param) if grad is None else grad, spec_of(param)).clone()
    return grads


def _fill(model: nn.Module) -> None:
    """Fills all tensors on meta with values in float64, so that rounding is no difference."""
    fill(model, SEED, otherwise=_draw)
    model.double()
    for _, module in partial_model(model).local_named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.double()


def _draw(module: nn.Module) -> None:
    """Draws the tensors of a module that has no initialiser: any numbers do, if they are equal in every layout."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.zero_()


def _names(model: nn.Module) -> dict[str, nn.Parameter]:
    """This rank's parameters by their first names in the full model."""
    names, local = parameter_names(model), partial_model(model).local_named_parameters()
    return {names[id(param)][0] if id(param) in names else name: param for name, param in local}


def _inputs(example: Any, model: nn.Module, parts: int, missing: int = 0) -> Any:
    if callable(example):
        torch.manual_seed(SEED)
        return pytree.tree_map_only(torch.Tensor, _real, example())
    ranks = range(parts) if parts > 1 else [int(comm.rank(DATA_AXES))]
    last = max(parts, comm.size(DATA_AXES)) - 1
    leaves, structure = pytree.tree_flatten(example)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            variants = [_variant(_real(leaf), rank) for rank in ranks]
            leaves[index] = torch.cat([x[: len(x) - missing * (rank == last)] for x, rank in zip(variants, ranks)])
        elif isinstance(leaf, torch.Tensor):
            leaves[index] = _real(leaf)
    inputs = pytree.tree_unflatten(leaves, structure)
    if isinstance(model, NxDPPModel) and not isinstance(inputs, Mapping):
        values = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        inputs = dict(zip(model.input_names or (), values))
    return inputs


def _real(x: torch.Tensor) -> torch.Tensor:
    """Values for inputs that have none: small numbers, all different where the dtype allows."""
    if not x.is_meta:
        return x.double() if x.is_floating_point() else x
    count = torch.arange(x.numel(), dtype=torch.float64).view(x.shape)
    if x.is_floating_point():
        return (count * 0.7).sin()
    return (count % 2).to(x.dtype)


def _variant(x: torch.Tensor, rank: int) -> torch.Tensor:
    """The input of data-parallel rank `rank`: other numbers of the same kind.

    Of integers the last positions are 0, on each rank more of them, so that masks count differently; labels of which
    some are ignored are ignored there.
    """
    if x.is_floating_point():
        return x * (1 - 0.3 * rank) + 0.1 * rank
    x = x.roll(rank, dims=0 if x.shape[0] > 1 or x.ndim == 1 else 1)
    if rank and x.ndim and x.shape[-1] > 1:
        x = x.clone()
        x[..., -max(1, min(rank, 3) * x.shape[-1] // 4) :] = IGNORED if bool((x == IGNORED).any()) else 0
    return x


def _not_finite(values: Values) -> str:
    """Returns which of loss and gradients is NaN or infinite, in words; "": none."""
    loss, grads = values
    if loss is not None and not isfinite(loss):
        return f"the loss is {loss}"
    return next((f"the gradient of {name} is not finite" for name, x in grads.items() if not x.isfinite().all()), "")


def _compare(expected: Values, values_by_rank: list[Values], mesh: Mesh) -> list[Problem]:
    problems = []
    loss, grads = expected
    for rank, (value, _) in enumerate(values_by_rank):
        if value is not None and loss is not None and not abs(value - loss) <= TOLERANCE * max(abs(loss), 1e-6):
            what = f"the loss is {value:.6g} on rank {rank} and {loss:.6g} in one process{_ratio(value, loss)}"
            problems.append(Problem("values", what, (rank,)))
            break
    for name, target in grads.items():
        for rank, (_, mine) in enumerate(values_by_rank):
            if name not in mine:
                continue
            grad = mine[name]
            if grad.shape != target.shape:
                what = (
                    f"the gradient of {name} has shape {list(grad.shape)} on rank {rank}, {list(target.shape)} in one"
                )
                problems.append(Problem("values", f"{what} process", (rank,)))
                break
            scale = float(target.abs().max())
            if not float((grad - target).abs().max()) <= TOLERANCE * max(scale, 1e-12):
                problems.append(Problem("values", _describe(name, rank, grad, target, mesh), (rank,)))
                break
    wrong = [p for p in problems if p.message.startswith("the gradient")]
    if len(wrong) > 1:  # the first one is reported, and the number of the others
        rest = Problem("values", f"{wrong[0].message}; and {len(wrong) - 1} more of {len(grads)}", wrong[0].ranks)
        problems = [p for p in problems if p not in wrong] + [rest]
    return problems


def _describe(name: str, rank: int, grad: torch.Tensor, expected: torch.Tensor, mesh: Mesh) -> str:
    what = f"the gradient of {name} is wrong on rank {rank}"
    if not grad.isfinite().all():
        return f"{what}: it has elements that are not finite"
    norm = float(expected.norm())
    if norm == 0:
        return f"{what}: it is zero in one process, and {float(grad.norm()):.4g} in norm here"
    factor = float((grad * expected).sum()) / norm**2
    if float((grad - factor * expected).norm()) < 1e-3 * float(grad.norm()):
        sizes = [f"the {axis} size" for axis in ("dp", "cp", "tp", "pp") if 1 < mesh.size(axis) == round(factor)]
        inverse = round(1 / factor)
        sizes += [f"one over the {axis} size" for axis in ("dp", "cp", "tp") if 1 < mesh.size(axis) == inverse]
        hint = f" ({' or '.join(sizes)})" if sizes and abs(factor - 1) > 0.05 else ""
        return f"{what}: {factor:.4g} times that of one process{hint}"
    return f"{what}: it differs from that of one process by {float((grad - expected).norm()) / norm:.2g} of its norm"


def _ratio(value: float, expected: float) -> str:
    return f", {value / expected:.4g} times that" if expected and isfinite(value) else ""
