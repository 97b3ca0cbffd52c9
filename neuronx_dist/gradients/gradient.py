"""One parameter's gradient: where it is, what stands in for a missing one, what has been done to it in this step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .. import comm, spmd
from ..weights.partial_model import partial_model
from ..weights.shard_spec import restamp

__all__ = [
    "DATA_AXES",
    "Parameters",
    "data_axis",
    "gradient_dtype",
    "gradient_of",
    "is_expert",
    "keeping_stages",
    "mark",
    "missing_gradient",
    "parameters_of",
    "reduced_twice",
    "set_gradient",
    "stages_of",
]

Parameters = torch.Tensor | Iterable[torch.Tensor]

DATA_AXES = ("dp", "cp")
_TAG = "_nxd_reduced"


def parameters_of(source: torch.optim.Optimizer | nn.Module | Parameters) -> list[torch.Tensor]:
    """The parameters of an optimizer, of a module (of its stage, if it is a pipeline model), or of any iterable."""
    if isinstance(source, torch.Tensor):
        return [source]
    groups = getattr(source, "param_groups", None)  # of an optimizer, or a wrapper of one
    if groups is not None:
        return [param for group in groups for param in group["params"]]
    if isinstance(source, nn.Module):
        restamp(source)  # a copied or re-wrapped parameter has lost what says how it is laid out
        return [param for _, param in partial_model(source).local_named_parameters()]
    return list(dict.fromkeys(source))  # type: ignore[arg-type]


def gradient_of(param: torch.Tensor) -> torch.Tensor | None:
    """A parameter's gradient: its accumulator `main_grad` if it has one (see NeuronZero1Optimizer), else `grad`."""
    main_grad: torch.Tensor | None = getattr(param, "main_grad", None)
    return param.grad if main_grad is None else spmd.gradient(main_grad, param)


def set_gradient(param: torch.Tensor, grad: torch.Tensor) -> None:
    setattr(param, "main_grad" if hasattr(param, "main_grad") else "grad", grad)


def gradient_dtype(param: torch.Tensor) -> torch.dtype:
    """Dtype of the gradient: the parameter's, at least fp32 in a `main_grad`."""
    return torch.promote_types(torch.float32, param.dtype) if hasattr(param, "main_grad") else param.dtype


def missing_gradient(param: torch.Tensor) -> torch.Tensor:
    """Zeros in the place of a gradient that this rank does not have, in the dtype that other ranks have it in."""
    return torch.zeros_like(param, dtype=gradient_dtype(param), requires_grad=False)


def is_expert(param: torch.Tensor) -> bool:
    """Whether different ep ranks hold different experts in it."""
    return bool(getattr(param, "expert_model_parallel", False))


def data_axis(param: torch.Tensor) -> tuple[str, ...]:
    """The axis along which the data of one value of this parameter is spread; the mean always divides by dp * cp."""
    return ("edp",) if is_expert(param) and comm.size("ep") > 1 else DATA_AXES


# A reduced gradient carries the stages it has been through, and its version counter. Backward and zero_grad make a new
# tensor or a new version, and the tag no longer holds; clipping, and the next stage, write the gradient but keep it.


def stages_of(grad: torch.Tensor) -> frozenset[str]:
    """The stages of reduction that a gradient has been through since the last backward."""
    version, stages = getattr(grad, _TAG, (None, frozenset()))
    return stages if version == grad._version else frozenset()


def mark(grads: Iterable[torch.Tensor], stage: str) -> None:
    """Notes that gradients have been through `stage`."""
    for grad in grads:
        setattr(grad, _TAG, (grad._version, stages_of(grad) | {stage}))


@contextmanager
def keeping_stages(grads: Iterable[torch.Tensor]) -> Iterator[None]:
    """Writing the gradients in place in here does not count as a new backward."""
    marked = [(grad, stages) for grad, stages in ((grad, stages_of(grad)) for grad in grads) if stages]
    yield
    for grad, stages in marked:
        setattr(grad, _TAG, (grad._version, stages))


def reduced_twice(stages: Iterable[str]) -> RuntimeError:
    return RuntimeError(
        f"gradients were reduced already in this step (done: {', '.join(sorted(stages))}); reducing them again would "
        "scale them. Call reduce_gradients once after the last backward, and not after NxDPPModel.run_train, which "
        "calls it; call zero_grad before the next step"
    )
