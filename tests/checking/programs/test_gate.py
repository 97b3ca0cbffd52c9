"""Tensors that an optimizer may use: gradients and buffers that are no parts of a sum; messages about all others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import Mesh, comm, spmd
from neuronx_dist.checking.programs import gate
from neuronx_dist.spmd import I, P, R, S, V
from neuronx_dist.spmd.tensor_type import NAME, Origin, TensorType, write
from neuronx_dist.spmd.types import scaled
from tests.support.reviewed import assert_reviewed

HERE = Path(__file__)


def gradient(name: str | None, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    param, grad = torch.ones(2, 3), torch.ones(2, 3)
    if name is not None:
        param.__dict__[NAME] = name
    param.__dict__.update(more)
    write(grad, TensorType.of({}), {"tp": Origin("a sum", "a.py:1")})
    return param, grad


def test_what_an_optimizer_is_refused() -> None:
    mode: Any = SimpleNamespace(mesh=Mesh(16, tp=2, pp=2, cp=2))
    sgd = torch.optim.SGD([torch.ones(1)], lr=0.1)
    with comm.as_rank(Mesh(1), 0):
        zero1 = nxd.NeuronZero1Optimizer([nn.Parameter(torch.ones(1))], torch.optim.SGD, lr=0.1)
    with comm.as_rank(Mesh(4), 0):
        pairs = nxd.NeuronZero1Optimizer(
            [nn.Parameter(torch.ones(2, 3))], torch.optim.SGD, lr=0.1, sharding_groups=[[0, 1], [2, 3]]
        )
    sequence = nn.Parameter(torch.ones(2, 3))
    sequence.sequence_parallel_enabled = True  # type: ignore[attr-defined]
    texts = {}
    for axis, optimizer, kind, (param, grad) in (
        ("dp", sgd, P, gradient("layers.0.weight")),
        ("cp", sgd, V, gradient(None)),
        ("dp", zero1, P, gradient("w")),
        ("dp", pairs, P, (pairs.shards[0].param, gradient("w")[1])),
        ("pp", sgd, P("avg"), gradient("w")),
        ("tp", sgd, P, gradient("w")),
        ("tp", zero1, V, gradient("w")),
        ("tp", sgd, P, (sequence, gradient("w")[1])),
    ):
        error = gate._refused(mode, optimizer, param, grad, axis, kind)
        name = f"{kind} on {axis}, {type(optimizer).__name__}, {param.__dict__.get(NAME)}"
        texts[f"{name}{' of a sequence' * (param is sequence)}"] = str(error)
        assert (error.axis, error.rule) == (axis, "gate")
        assert error.details == {"parameter": param.__dict__.get(NAME, "a parameter")}
    for kind, expected in ((scaled(R, 1), 0), (scaled(R, -1), 0), (R, 1), (scaled(V, 2), 1)):
        param, grad = gradient("w" if expected else None)
        error = gate._scale_refused(mode, sgd, param, grad, "tp" if expected else "dp", kind, expected)
        texts[f"{kind}, expected {expected}"] = str(error)
        assert (error.axis, error.rule) == ("tp" if expected else "dp", "gate_scale")
        assert error.details == {"parameter": param.__dict__.get(NAME, "a parameter")}
    assert_reviewed(HERE.with_name("expected_gate.txt"), texts)


def refused(
    *parameters: tuple[dict[str, Any] | None, Any], own_types: Any = R, **options: Any
) -> spmd.SpmdTypeError | None:
    """Returns SGD's refusal of parameters with gradients: (types of the gradient or None, a gradient or not)."""
    params = []
    with comm.as_rank(Mesh(4, tp=2), 0), spmd.SpmdTypeMode() as mode:
        for index, (types, has_gradient) in enumerate(parameters):
            param = nn.Parameter(torch.ones(2, 3))
            param.__dict__[NAME] = f"p{index}"
            spmd.assert_type(param, own_types)
            if has_gradient:
                param.grad = torch.ones(2, 3)
                if types is not None:
                    write(param.grad, TensorType.of(types), None, mode.session)
            params.append(param)
        try:
            gate._check(mode, torch.optim.SGD(params, lr=0.1))
        except spmd.SpmdTypeError as error:
            return error
    return None


FINE, PARTIAL = ({"tp": R, "dp": R}, True), ({"tp": R, "dp": P}, True)
GATED = {
    "equal": ([FINE], None),
    "no gradient": ([(None, False), FINE], None),
    "a part of a sum": ([PARTIAL], "p0 dp gate"),
    "behind one without a gradient": ([(None, False), PARTIAL], "p1 dp gate"),
    "behind one without a type": ([(None, True), PARTIAL], "p1 dp gate"),
    "behind one that is right": ([FINE, PARTIAL], "p1 dp gate"),
    "behind an axis without a type": ([({"tp": P}, True)], "p0 tp gate"),
    "what varies": ([({"tp": V, "dp": R}, True)], "p0 tp gate"),
    "a shard": ([({"tp": S(0), "dp": R}, True)], "p0 tp gate"),
    "invariant": ([({"tp": I, "dp": I}, True)], None),
    "too large": ([({"tp": R, "dp": scaled(R, 1)}, True)], "p0 dp gate_scale"),
    "too small": ([({"tp": scaled(R, -1), "dp": R}, True)], "p0 tp gate_scale"),
}


@pytest.mark.parametrize("name", GATED)
def test_which_gradients_an_optimizer_may_use(name: str) -> None:
    parameters, words = GATED[name]
    error = refused(*parameters)
    assert (error and f"{error.details['parameter']} {error.axis} {error.rule}") == words
    varying = refused(({"tp": V, "dp": V}, True), own_types=V)
    assert varying is None  # of a parameter that varies the gradient varies


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_a_learning_rate_may_grow_with_the_ranks(optimizer_class: type[torch.optim.Optimizer]) -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        return optimizer_class(params, lr=comm.size("dp") * 0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    report = spmd.check(lambda: nn.Linear(4, 4), torch.zeros(2, 4), {"dp": 2}, step=step, optimizer=optimizer)
    assert report.ok, str(report)


def test_buffers_after_a_step() -> None:
    def refusal_of(types: dict[str, Any], origins: Any = None) -> tuple[str, list[str]]:
        model = nn.BatchNorm1d(2)
        with comm.as_rank(Mesh(8, tp=2, pp=2), 0), spmd.SpmdTypeMode() as mode:
            write(model.running_mean, TensorType.of(types), origins, mode.session)
            try:
                gate.check_buffers(mode, model)
            except spmd.SpmdTypeError as error:
                assert (error.rule, error.axis) == ("buffer", "tp")
                return str(error), []
            return "", [text for text, _ in mode.assumed]

    texts = {}
    for kind in (P, P("avg"), P("max"), scaled(R, 1), scaled(I, -1), R, V, S(0), scaled(V, 1)):
        text, assumed = refusal_of({"tp": kind})
        texts[str(kind)] = text + "\n".join(assumed)
    texts["with where it began"] = refusal_of({"tp": P}, {"tp": Origin("a sum", "a.py:1")})[0]
    texts["of another stage"] = "".join(refusal_of({"pp": V})[1])
    assert_reviewed(HERE.with_name("expected_buffers.txt"), texts)
