"""The norm of the whole model's gradients, and of each parameter group's: the same in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import LossScaler, MasterWeightsOptimizer, NeuronZero1Optimizer
from neuronx_dist.parallel_layers import grads
from tests.optimizer.test_sharding import parts
from tests.optimizer.zero1_training import OPTIMIZERS, train, train_whole, weights_of
from tests.support.synthetic import LAYOUTS, MESHES, Model, assemble, mean_gradient, relative_error

pytestmark = pytest.mark.slow

# How a norm is taken: by ZeRO-1 over all data ranks, single ones or pairs of them; by masters; without an optimizer.
WAYS: dict[str, Callable[[Mesh], Any]] = {
    "zero1": lambda mesh: None,
    "singles": parts(1),
    "pairs": parts(2),
    "masters": lambda mesh: None,
    "plain": lambda mesh: None,
}


def is_sharded_over_tp(name: str) -> bool:
    return LAYOUTS[name].dim is not None


@pytest.mark.parametrize(
    "mesh, way",
    [(mesh, way) for mesh in MESHES for way in WAYS if way != "pairs" or mesh.dp * mesh.cp % 2 == 0],
    ids=str,
)
def test_the_norm_is_the_same_in_every_layout(mesh: Mesh, way: str) -> None:
    """In fp32, of tied, sequence-parallel, sharded and replicated parameters, some smaller than dp: to 2e-7.

    And the norms of two parameter groups, of which a stage may have nothing.
    """

    def rank_main() -> tuple[torch.Tensor, torch.Tensor]:
        model = Model(torch.float32)
        model.set_gradients(0)
        names = dict(model.named_parameters())
        groups = [[p for n, p in names.items() if is_sharded_over_tp(n) == sharded] for sharded in (True, False)]
        grads.reduce_gradients(model, average_over_data=way in ("masters", "plain"))
        if way == "plain":
            return grads.get_grad_norm(model.parameters()), torch.stack([*map(grads.get_grad_norm, groups)])
        options: dict[str, Any] = dict(lr=0.1, norms_by_group=True)
        if way == "masters":
            optimizer = MasterWeightsOptimizer([{"params": group} for group in groups], torch.optim.SGD, **options)
        else:
            options["sharding_groups"] = WAYS[way](mesh)
            optimizer = NeuronZero1Optimizer([{"params": group} for group in groups], torch.optim.SGD, **options)
        optimizer.step()
        return optimizer.grad_norm, optimizer.grad_norms

    means = {name: mean_gradient(name, 0, mesh, torch.float32).double() for name in LAYOUTS}
    of_group = [
        torch.stack([mean.norm() for name, mean in means.items() if is_sharded_over_tp(name) == sharded]).norm()
        for sharded in (True, False)
    ]
    for norm, norms in comm.threads.run(mesh, rank_main):
        assert norm.ndim == 0 and relative_error(norm, torch.stack(of_group).norm()) < 2e-7
        assert norms.shape == (2,) and max(map(relative_error, norms, of_group)) < 2e-7


@pytest.mark.parametrize("mesh", [Mesh(4, ep=2), Mesh(4, ep=4), Mesh(8, ep=2, tp=2), Mesh(4, ep=2, cp=2)], ids=str)
@pytest.mark.parametrize("way", ["zero1", "masters", "plain"])
def test_the_norm_with_experts(mesh: Mesh, way: str) -> None:
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))  # the dense gradient, then 4 experts

    def rank_main() -> torch.Tensor:
        mine = [1 + expert for expert in range(4) if expert * mesh.ep // 4 == comm.rank("ep")]
        params = [nn.Parameter(torch.zeros(7)) for _ in (0, *mine)]
        for param, number in zip(params, (0, *mine)):
            param.expert_model_parallel = number > 0
            # As reduced over the data already; ZeRO-1 sums those of an expert over edp and divides by dp x cp.
            param.grad = values[number] * (mesh.ep if number and way == "zero1" else 1)
        if way == "plain":
            return grads.get_grad_norm(params)
        wrapper = NeuronZero1Optimizer if way == "zero1" else MasterWeightsOptimizer
        optimizer = wrapper(params, torch.optim.SGD, lr=0.1)
        optimizer.step()
        return optimizer.grad_norm

    for norm in comm.threads.run(mesh, rank_main):
        assert relative_error(norm, values.double().norm()) < 2e-7


def test_norms_of_groups_take_no_collective_of_their_own() -> None:
    """Each of the others is there; a norm that is scaled is divided; without being asked for there are none."""

    def rank_main() -> None:
        params = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
        frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        groups = [{"params": [params[0], frozen]}, {"params": []}, {"params": [params[1]]}]
        scaler = LossScaler(4.0)
        optimizer = NeuronZero1Optimizer(groups, torch.optim.SGD, lr=0.1, norms_by_group=True, loss_scaler=scaler)
        optimizer.add_param_group({"params": [params[2]]})
        assert optimizer.grad_norms is None
        for number, param in enumerate(params):
            param.grad = torch.full((3,), 4.0 * (number + 1))
        with comm.record() as calls:
            optimizer.step()
        assert [call.bytes for call in calls if call.axis == "world"] == [8 * 4]
        assert optimizer.grad_norms.tolist() == pytest.approx([3**0.5 * factor for factor in (1, 0, 2, 3)])
        assert optimizer.grad_norm.item() == pytest.approx((3 * 14) ** 0.5)
        silent = NeuronZero1Optimizer(params, torch.optim.SGD, lr=0.1)
        silent.step()
        assert silent.grad_norms is None and silent.grad_norm is not None

    comm.threads.run(Mesh(2), rank_main)


def test_ranks_with_other_numbers_of_groups_are_an_error() -> None:
    def rank_main() -> None:
        groups = [{"params": [nn.Parameter(torch.zeros(2))]} for _ in range(1 + comm.rank("pp"))]
        NeuronZero1Optimizer(groups, torch.optim.SGD, lr=0.1, norms_by_group=True).step()

    with pytest.raises(Exception, match=r"all_reduce over world .* the ranks disagree: .*\('sum', \([12],\)"):
        comm.threads.run(Mesh(2, pp=2), rank_main)


NORM_GROUPS: dict[str, Any] = {
    "tp": lambda mesh: mesh.groups("tp"),
    "tp, as lists": lambda mesh: [list(ranks) for ranks in mesh.groups("tp")][::-1],
    "tp, as a communicator": lambda mesh: comm.communicator("tp"),
    "pp and tp": lambda mesh: mesh.groups(("pp", "tp")),
}


@pytest.mark.parametrize("groups", NORM_GROUPS)
@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(4, pp=2, tp=2), Mesh(8, pp=2, tp=2)], ids=str)
def test_the_norm_is_the_whole_models_whatever_groups_are_given(mesh: Mesh, groups: str) -> None:
    """NxD's trainer passes its tp groups always: each stage used to be clipped by its own norm, in silence."""
    cls, options = OPTIMIZERS["SGD"]

    def rank_main() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        model = Model()
        given = NORM_GROUPS[groups](mesh)
        optimizer = NeuronZero1Optimizer(model.parameters(), cls, max_norm=0.5, grad_norm_groups=given, **options)
        return train(model, optimizer), weights_of(model)

    expected_norms, expected = train_whole(mesh, "SGD", 0.5, torch.float64)
    results = comm.threads.run(mesh, rank_main)
    for norms, _ in results:
        assert relative_error(torch.stack(norms), torch.stack(expected_norms)) < 1e-12
    for (name, value), param in zip(assemble(mesh, [result[1] for result in results]), expected):
        assert relative_error(value, param.detach()) < 1e-10, name


@pytest.mark.parametrize("axis", ["dp", "pp", "world"])
@pytest.mark.parametrize("as_lists", [True, False], ids=["lists", "communicator"])
def test_groups_of_no_model_are_refused_for_the_norm(axis: str, as_lists: bool) -> None:
    mesh = Mesh(8, pp=2, tp=2)

    def rank_main() -> None:
        groups = mesh.groups(axis) if as_lists else comm.communicator(axis)
        with pytest.raises(ValueError, match=r"grad_norm_groups \[.*norm of the whole model; leave grad_norm"):
            NeuronZero1Optimizer([nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=1.0, grad_norm_groups=groups)

    comm.threads.run(mesh, rank_main)
