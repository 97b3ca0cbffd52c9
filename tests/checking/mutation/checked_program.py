"""A program as `spmd.check` is given it, and whether its values are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from neuronx_dist import Mesh, comm, spmd
from neuronx_dist.checking.programs import numeric
from neuronx_dist.checking.programs.calls import Deadline
from neuronx_dist.checking.programs.explore import explore
from neuronx_dist.checking.programs.fakes import built_anew
from neuronx_dist.checking.programs.numeric import compare_values
from neuronx_dist.checking.programs.played import Subject
from neuronx_dist.optimizer import NeuronZero1Optimizer
from neuronx_dist.spmd.axes import mesh_of
from neuronx_dist.weights.partial_model import unwrapped
from neuronx_dist.weights.shard_spec import gather_full

__all__ = ["Program"]


@dataclass(frozen=True)
class Program:
    """Arguments of `spmd.check`. `values`: raises or returns something true if the values are wrong; None: they are
    those of the same program, on threads and in one process.
    """

    model_fn: Callable[..., Any]
    inputs: Any
    mesh: dict[str, int] = field(default_factory=lambda: {"dp": 2, "tp": 2})
    options: dict[str, Any] = field(default_factory=dict)
    step: Callable[..., Any] | None = None
    in_types: Any = None
    values: Callable[[], Any] | None = None

    def check(self, **options: Any) -> Any:
        given = dict(options=self.options, step=self.step, in_types=self.in_types)
        return spmd.check(self.model_fn, self.inputs, self.mesh, **given, **options)

    def play(self) -> None:
        """One rank of each kind."""
        subject = Subject(self.model_fn, self.inputs, self.options, self.step, None, self.in_types, "G")
        explore(subject, mesh_of(self.mesh), Deadline(None), twice=False)

    def values_are_right(self) -> bool:
        if self.values is not None:
            return not self.values()
        subject, mesh = Subject(self.model_fn, self.inputs, self.options), mesh_of(self.mesh)
        if self.step is None:
            return not compare_values(subject, mesh, Deadline(None), [])
        (expected,) = comm.threads.run(Mesh(1), self._parameters, mesh.size(("dp", "cp")))
        found = comm.threads.run(mesh, self._parameters, 1)
        return all(
            have[name].shape == want.shape and torch.allclose(have[name], want, rtol=1e-6, atol=1e-9)
            for have in found
            for name, want in expected.items()
        )

    def _parameters(self, parts: int) -> dict[str, torch.Tensor]:
        """All parameters after a step."""
        with torch.device("meta"):
            built = built_anew(lambda: self.model_fn(**self.options), with_values=True)
        model, optimizer = built if isinstance(built, tuple) else (built, None)
        inner = unwrapped(model)
        if isinstance(optimizer, NeuronZero1Optimizer):
            raise NotImplementedError("a ZeRO-1 optimizer of weights without values")
        numeric._fill(inner)
        assert self.step is not None
        self.step(
            model,
            optimizer or torch.optim.SGD(list(inner.parameters()), lr=0.1),
            numeric._inputs(self.inputs, inner, parts),
        )
        return {name: gather_full(x.detach(), spmd.spec_of(x)).clone() for name, x in inner.named_parameters()}
