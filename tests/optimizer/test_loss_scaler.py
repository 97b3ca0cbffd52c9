"""Steps with gradients that are not finite, and the scale of an fp16 loss."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import LossScaler, MasterWeightsOptimizer, NeuronZero1Optimizer, zero1

MESHES = [Mesh(1), Mesh(4), Mesh(4, tp=2), Mesh(4, pp=2), Mesh(2, cp=2)]


def make(wrapper: Any, dtype: torch.dtype, **options: Any) -> tuple[nn.ParameterDict, NeuronZero1Optimizer]:
    model = nn.ParameterDict({"a": torch.ones(8, dtype=dtype), "b": torch.ones(3, dtype=dtype)})
    return model, wrapper(model.parameters(), torch.optim.AdamW, lr=0.1, **options)


@pytest.mark.each_pair
@pytest.mark.parametrize("wrapper", [NeuronZero1Optimizer, MasterWeightsOptimizer])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_step_is_left_out_on_all_ranks_if_one_gradient_is_not_finite(mesh: Mesh, bad: float, wrapper: Any) -> None:
    if wrapper is MasterWeightsOptimizer and mesh.dp * mesh.cp > 1:
        mesh = Mesh(mesh.world_size, tp=mesh.world_size)  # whose gradients nobody has averaged

    def rank_main() -> list[str]:
        """Parameters are whole on all tp ranks, of which the last one's gradient alone is bad, and does not count."""
        model, optimizer = make(wrapper, torch.float32, skip_nonfinite=True)
        for param in model.values():
            param.grad = torch.ones_like(param)
        optimizer.step()
        before = {name: param.detach().clone() for name, param in model.items()}
        moments = [state["exp_avg"].clone() for state in optimizer.base_optimizer.state.values()]
        for param in model.values():
            param.grad = torch.ones_like(param)
        if comm.rank("world") == mesh.world_size - 1:
            model["b"].grad[2] = bad
        with comm.record() as calls:
            optimizer.step()
        assert optimizer.skipped_steps == 1 and not optimizer.grad_norm.isfinite()
        assert all(torch.equal(param, before[name]) for name, param in model.items())
        states = optimizer.base_optimizer.state.values()
        assert all(torch.equal(state["exp_avg"], moment) for state, moment in zip(states, moments))
        assert all(state["step"] == 1 for state in states)
        for param in model.values():
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert optimizer.skipped_steps == 1 and not any(torch.equal(p, before[name]) for name, p in model.items())
        return [call.verb for call in calls]

    sharded = wrapper is NeuronZero1Optimizer and mesh.dp * mesh.cp > 1
    norm = ["all_reduce"] if mesh.world_size > 1 else []
    assert comm.threads.run(mesh, rank_main) == [[*["reduce_scatter"] * sharded, *norm]] * mesh.world_size


def test_the_scale_is_no_part_of_what_is_learned() -> None:
    """Gradients that are no fp16 numbers without a scale; the norm, clipping and weights are those of fp32."""

    def train(dtype: torch.dtype, **options: Any) -> tuple[list[float], torch.Tensor]:
        model, optimizer = make(NeuronZero1Optimizer, dtype, max_norm=1e-9, **options)
        norms, scaler = [], options.get("loss_scaler")
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model["a"].float() * 2.0**-27 * (1 + comm.rank("dp"))).sum()
            (loss if scaler is None else scaler.scaled(loss)).backward()
            optimizer.step()
            norms.append(optimizer.grad_norm.item())
        return norms, optimizer.shards[0].master.detach()

    def rank_main() -> None:
        norms, weights = train(torch.float16, loss_scaler=LossScaler(2.0**16))
        expected_norms, expected = train(torch.float32)
        assert norms == pytest.approx(expected_norms, rel=1e-6) and norms[0] > 0
        assert torch.allclose(weights, expected, rtol=1e-6)
        assert train(torch.float16)[0] == [0.0] * 3

    comm.threads.run(Mesh(2), rank_main)


def test_the_scale_falls_after_an_overflow_and_grows_again() -> None:
    def rank_main() -> list[float]:
        scaler = LossScaler(2.0**16, interval=2)
        model, optimizer = make(NeuronZero1Optimizer, torch.float16, loss_scaler=scaler, grad_clipping=False)
        scales = []
        for _ in range(6):
            optimizer.zero_grad()
            factor = 1.5 if comm.rank("dp") == 0 else 0.25  # 1.5 * 2**16 is no fp16 number
            scaler.scaled((model["a"].float() * factor).sum()).backward()
            optimizer.step()
            scales.append(scaler.scale)
        assert optimizer.skipped_steps == 2
        other_scaler = LossScaler()
        other = make(NeuronZero1Optimizer, torch.float16, loss_scaler=other_scaler)[1]
        other.load_state_dict(optimizer.state_dict())
        assert other_scaler.state_dict() == scaler.state_dict()
        return scales

    half = 2.0**15
    assert comm.threads.run(Mesh(2), rank_main) == [[half, half, 2 * half, half, half, 2 * half]] * 2


@pytest.mark.parametrize("wrong", [dict(scale=0.0), dict(growth=0.5), dict(backoff=1.0), dict(interval=0)], ids=str)
def test_a_scaler_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"got .*{next(iter(wrong))}={next(iter(wrong.values()))}"):
        LossScaler(**wrong)


def test_gradients_that_are_finite_at_no_scale_end_the_run_on_all_ranks() -> None:
    """Else each step would be left out, until the scale is 0 and a division fails."""

    def rank_main() -> str:
        model, optimizer = make(NeuronZero1Optimizer, torch.float16, loss_scaler=LossScaler(8.0))
        for param in model.values():
            param.grad = torch.full_like(param, math.nan)
        with pytest.raises(
            RuntimeError, match=r"in every step, even with the loss scale at 2\.98023e-08, so the scale is not the"
        ):
            for _ in range(100):
                optimizer.step()
        return f"{optimizer.skipped_steps} {optimizer.loss_scaler.scale}"

    assert comm.threads.run(Mesh(2), rank_main) == [f"28 {2.0**-25}"] * 2


@pytest.mark.parametrize("options", [{"skip_nonfinite": True}, {"loss_scaler": LossScaler()}, {}], ids=", ".join)
def test_two_programs_of_an_xla_step_are_warned_of_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero1, "in_one_program", lambda x: True)
    param = nn.Parameter(torch.ones(2))
    with comm.as_rank(Mesh(1), 0), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        optimizer = NeuronZero1Optimizer([param], torch.optim.SGD, lr=0.1, **options)
        for _ in range(2):
            param.grad = torch.ones(2)
            optimizer.step()
    said = [
        str(warning.message) for warning in caught if "splits an XLA step into two programs" in str(warning.message)
    ]
    assert len(said) == bool(options)
