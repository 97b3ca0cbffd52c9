"""The plan of a model's gradient reductions on one rank: groups that are reduced together, planned once.

    gradients = ModelGradients(model)      # cheap: the plan is that of the last step
    gradients.partial_over_tp              # a group: its gradients, and how they go into buckets
    gradients.by_data_axis()               # (axis, group)

A plan depends on the parameters and the mesh alone, never on which gradients happen to be there: every rank of a group
has the same one, and it is known before backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .. import comm
from ..comm import Communicator
from ..mesh import Mesh
from ..weights.partial_model import PartialModel, partial_model
from .buckets import BucketPlan
from .gradient import ParameterGradient, Parameters, parameters_of

__all__ = ["GradientGroup", "GradientPlan", "ModelGradients"]


class GradientGroup(NamedTuple):
    """Gradients that are reduced together, and their buckets."""

    gradients: list[ParameterGradient]
    buckets: BucketPlan


class ModelGradients:
    """The gradients of a model's trainable parameters, as they are reduced.

    Attributes:
        gradients: one for each trainable parameter of this rank, in the order of the model.
        plan: the model's plan. It is cached from step to step, and built again when it no longer fits.
    """

    def __init__(self, model: nn.Module | Parameters) -> None:
        self._part = partial_model(model)  # type: ignore[arg-type]  # of a list of parameters nothing is tied
        params = _trainable(_local_parameters(model, self._part))
        if isinstance(model, nn.Module):
            known = _PLANS.get(model)
            if known is None or not known.fits(params):
                params = _trainable(parameters_of(model))  # stamped again
                known = _PLANS[model] = GradientPlan(params)
            plan = known
        else:
            plan = GradientPlan(params)
        self.gradients = [ParameterGradient(param) for param in params]
        self.plan = plan

    @property
    def held(self) -> list[torch.Tensor]:
        """The gradients that this rank has."""
        return [grad for gradient in self.gradients if (grad := gradient.tensor) is not None]

    @property
    def partial_over_tp(self) -> GradientGroup:
        """Gradients of the parameters that see a shard of the sequence only."""
        return self._group(self.plan.partial_over_tp)

    def by_data_axis(self) -> Iterator[tuple[tuple[str, ...], GradientGroup]]:
        """`(axis, group)`: all gradients, by the axis along which their data is spread."""
        for axis, group in self.plan.by_data_axis.items():
            yield axis, self._group(group)

    def tied(self) -> Iterator[tuple[Communicator, GradientGroup]]:
        """`(the ranks that hold a copy, group)` of the weights that several parts of the model hold, frozen too."""
        copies: dict[Communicator, list[ParameterGradient]] = {}
        for copy, holders in self._part.tied_groups():
            copies.setdefault(holders, []).append(ParameterGradient(copy))
        for holders, gradients in copies.items():
            yield holders, GradientGroup(gradients, self.plan.tied_buckets(holders))

    def _group(self, group: _PlannedGroup) -> GradientGroup:
        return GradientGroup([self.gradients[index] for index in group.members], group.buckets)


class _PlannedGroup(NamedTuple):
    """Indices of parameters, and their buckets."""

    members: list[int]
    buckets: BucketPlan


class GradientPlan:
    """The groups of a model's gradients: the ranks of each reduction, and the buckets.

    It holds numbers of parameters, not parameters: a plan keeps no model alive.

    Attributes:
        partial_over_tp: summed over tp.
        by_data_axis: averaged over the data.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._mesh = comm.current().mesh
        self._parameters = list(map(id, params))
        self._traits = _traits(params)
        gradients = [ParameterGradient(param) for param in params]
        over_tp = [index for index, gradient in enumerate(gradients) if gradient.is_partial_over_tp]
        self.partial_over_tp = _PlannedGroup(over_tp, BucketPlan())
        self.by_data_axis: dict[tuple[str, ...], _PlannedGroup] = {}
        for index, gradient in enumerate(gradients):
            group = self.by_data_axis.setdefault(gradient.data_axis, _PlannedGroup([], BucketPlan()))
            group.members.append(index)
        self._tied: dict[Communicator, BucketPlan] = {}  # by communicator: its ranks are not looked at

    def fits(self, params: Sequence[torch.Tensor]) -> bool:
        """Returns whether the plan is for these parameters in their present layout on the current mesh.

        Their dtypes, devices and sizes are looked at by the bucket plans.
        """
        mesh: Mesh = comm.current().mesh
        return (
            (mesh is self._mesh or mesh == self._mesh)
            and list(map(id, params)) == self._parameters
            and _traits(params) == self._traits
        )

    def tied_buckets(self, holders: Communicator) -> BucketPlan:
        """The buckets of the tied weights that these ranks hold."""
        return self._tied.setdefault(holders, BucketPlan())


# By model, weakly. Not on the model: a file or a copy of a model should hold nothing of this.
_PLANS: WeakKeyDictionary[nn.Module, GradientPlan] = WeakKeyDictionary()


def _traits(params: Sequence[torch.Tensor]) -> list[Any]:
    """The properties of a parameter's layout that decide its groups.

    Sharding decides no group, but a change of it needs NxD's attributes written again (`restamp`), which building a
    plan does.
    """
    return [
        (
            getattr(param, "sequence_parallel_enabled", False),
            getattr(param, "expert_model_parallel", False),
            getattr(param, "tensor_model_parallel", False),
        )
        for param in params
    ]


def _local_parameters(model: nn.Module | Parameters, part: PartialModel) -> list[torch.Tensor]:
    """This rank's parameters, as `parameters_of` gives them, without writing their attributes again."""
    if isinstance(model, nn.Module):
        return [param for _, param in part.local_named_parameters()]
    return parameters_of(model)


def _trainable(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [param for param in params if param.requires_grad]
