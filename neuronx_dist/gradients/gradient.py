"""One parameter's gradient: the attribute that holds it, its dtype, the ranks over which it is reduced."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .. import comm, spmd
from ..weights.partial_model import partial_model
from ..weights.shard_spec import restamp, spec_of

__all__ = ["DATA_AXES", "ParameterGradient", "Parameters", "gradient_of", "parameters_of"]

Parameters = torch.Tensor | Iterable[torch.Tensor]

DATA_AXES = ("dp", "cp")


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


class ParameterGradient:
    """The gradient of one parameter.

    An object is a view: it holds the parameter and nothing that could go stale, so that any code may construct one. The
    reductions of this step are recorded on the gradient's tensor (`state.ReductionState`).

    The gradient is `param.main_grad` if the parameter has this attribute and it is not None, else `param.grad`.
    `main_grad` is a wider accumulator of microbatches; `accumulate_in_main_grad` makes it, or a script does.
    """

    def __init__(self, param: torch.Tensor) -> None:
        self.param = param

    @property
    def tensor(self) -> torch.Tensor | None:
        """The gradient; None if this rank has none. Setting it writes to `attribute`."""
        main_grad: torch.Tensor | None = getattr(self.param, "main_grad", None)
        return self.param.grad if main_grad is None else spmd.gradient(main_grad, self.param)

    @tensor.setter
    def tensor(self, grad: torch.Tensor | None) -> None:
        setattr(self.param, self.attribute, grad)

    def clear(self) -> None:
        """Removes the gradient, of this step and of earlier microbatches."""
        self.param.grad = None
        self.tensor = None

    @property
    def attribute(self) -> str:
        """The attribute of the parameter that accumulates its gradient: "main_grad" or "grad"."""
        return "main_grad" if hasattr(self.param, "main_grad") else "grad"

    @property
    def dtype(self) -> torch.dtype:
        """The gradient's dtype: the parameter's, at least fp32 in a `main_grad`."""
        param = self.param
        return torch.promote_types(torch.float32, param.dtype) if hasattr(param, "main_grad") else param.dtype

    def zeros(self) -> torch.Tensor:
        """Zeros in place of a gradient that this rank lacks, in the dtype of the other ranks' gradients."""
        return torch.zeros_like(self.param, dtype=self.dtype, requires_grad=False)

    @property
    def is_partial_over_tp(self) -> bool:
        """Returns whether the parameter sees a shard of the sequence only: its gradients must be summed over tp."""
        return spec_of(self.param).sequence_parallel

    @property
    def is_expert(self) -> bool:
        """Returns whether different ep ranks hold different experts in the parameter."""
        return bool(getattr(self.param, "expert_model_parallel", False))

    @property
    def data_axis(self) -> tuple[str, ...]:
        """The axis over which the parameter's gradient is summed; the mean always divides the sum by dp * cp."""
        return ("edp",) if self.is_expert and comm.size("ep") > 1 else DATA_AXES

    def accumulate_in_main_grad(self) -> None:
        """Makes each following backward add its `param.grad` to `param.main_grad`, which is at least fp32."""
        self.param.main_grad = None  # type: ignore[attr-defined]
        self.param.register_post_accumulate_grad_hook(_move_to_main_grad)


def _move_to_main_grad(param: torch.Tensor) -> None:
    """Adds `param.grad` to `main_grad`, each time backward has computed it."""
    grad, total = param.grad, param.main_grad  # type: ignore[attr-defined]
    assert grad is not None
    if total is None:
        param.main_grad = grad.to(ParameterGradient(param).dtype)  # type: ignore[attr-defined]
    else:
        with torch.no_grad():
            total.add_(grad)
    param.grad = None


def gradient_of(param: torch.Tensor) -> torch.Tensor | None:
    """Short for `ParameterGradient(param).tensor`."""
    return ParameterGradient(param).tensor
