"""Over which ranks ZeRO-1 divides and sums: all data ranks, or parts of them (hybrid sharding), and experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import MasterWeightsOptimizer, NeuronEPZero1Optimizer, NeuronZero1Optimizer
from tests.optimizer.zero1_training import OPTIMIZERS, STEPS, train, train_whole, weights_of
from tests.support.pool import processes
from tests.support.synthetic import Model, assemble, draw, relative_error

DATA = ("dp", "cp")


def parts(size: int, stride: int = 1) -> Callable[[Mesh], list[list[int]]]:
    """Groups of `size` data ranks, which are `stride` apart in the order of the mesh."""

    def of(mesh: Mesh) -> list[list[int]]:
        block = size * stride
        return [
            ranks[begin + offset : begin + block : stride]
            for ranks in mesh.groups(DATA)
            for begin in range(0, len(ranks), block)
            for offset in range(stride)
        ]

    return of


GROUPS: dict[str, tuple[Mesh, Callable[[Mesh], Any]]] = {
    "neighbours": (Mesh(4), parts(2)),
    "every other": (Mesh(4), parts(2, stride=2)),
    "single ranks": (Mesh(4), parts(1)),
    "all": (Mesh(4), parts(4)),
    "tp": (Mesh(8, tp=2), parts(2)),
    "pp": (Mesh(8, pp=2), parts(2)),
    "along dp": (Mesh(8, cp=2), lambda mesh: mesh.groups("dp")),
    "along cp": (Mesh(8, cp=2), lambda mesh: comm.communicator("cp")),
    "across dp and cp": (Mesh(8, cp=2), parts(4)),
    "diagonal": (Mesh(4, cp=2), lambda mesh: [[0, 3], [2, 1]]),
}


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.each_pair
@pytest.mark.parametrize("averaged", [False, True], ids=["", "averaged before"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("groups", GROUPS)
def test_weights_and_norms_are_those_of_one_process(groups: str, optimizer: str, averaged: bool) -> None:
    """The optimizer reduces over the other groups itself; gradients that are averaged before stay what they are."""
    mesh, of = GROUPS[groups]
    cls, options = OPTIMIZERS[optimizer]

    def rank_main() -> tuple[list[torch.Tensor], dict[str, torch.Tensor], int]:
        model = Model()
        zero1 = NeuronZero1Optimizer(model.parameters(), cls, max_norm=2.5, sharding_groups=of(mesh), **options)
        norms = train(model, zero1, average=averaged)
        return norms, weights_of(model), zero1.shards[0].degree * zero1.shards[0].replicas.size

    expected_norms, expected = train_whole(mesh, optimizer, 2.5, torch.float64)
    results = comm.threads.run(mesh, rank_main)
    for norms, _, count in results:
        assert relative_error(torch.stack(norms), torch.stack(expected_norms)) < 1e-12
        assert count == mesh.dp * mesh.cp
    for (name, value), param in zip(assemble(mesh, [result[1] for result in results]), expected):
        assert relative_error(value, param.detach()) < 1e-10, name


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_only_a_shard_of_the_gradients_leaves_the_group(size: int) -> None:
    """One reduce-scatter and one all-gather in the group, one all-reduce of the shard over the others, one norm."""
    rows, columns = 16, 3

    def rank_main() -> None:
        params = [nn.Parameter(torch.ones(rows, columns)) for _ in range(2)]
        optimizer = NeuronZero1Optimizer(params, torch.optim.SGD, lr=1.0, sharding_groups=parts(size)(mesh))
        for param in params:
            param.grad = torch.ones_like(param)
        with comm.record() as calls:
            optimizer.step()
        whole, flags = 2 * rows * columns * 4, 2 * 4  # which parameters have a gradient
        shard = whole // size + flags
        expected = [("reduce_scatter", size, whole + size * flags)] if size > 1 else []
        expected += [("all_reduce", 8 // size, shard)] if size < 8 else []
        expected += [("all_reduce", 8, 8)]
        expected += [("all_gather", size, whole)] if size > 1 else []
        assert [(call.verb, call.group_size, call.bytes) for call in calls] == expected

    mesh = Mesh(8)
    comm.threads.run(mesh, rank_main)


def large_and_small(groups: list[list[int]]) -> list[float]:
    """The elements of a large parameter (which gloo sends alone), of a small one and of an expert, after a step."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((512, 256), (3,), (5,))]
    params[2].expert_model_parallel = True
    for param in params:
        param.grad = torch.full_like(param, 10.0 ** comm.rank("dp"))
    optimizer = NeuronZero1Optimizer(params, torch.optim.SGD, lr=1.0, max_norm=math.inf, sharding_groups=groups)
    optimizer.step()
    assert all((param == param.flatten()[0]).all() for param in params)
    return [param.flatten()[0].item() for param in params]


@pytest.mark.process
def test_processes_do_the_same() -> None:
    """Groups, and the replicas across them, are made by their members alone; the two experts alternate over ranks."""
    for groups in ([[0, 1], [2, 3]], [[0, 3], [1, 2]], [[0], [1], [2], [3]]):
        results = processes(4).run(large_and_small, groups, mesh=dict(ep=2))
        assert results == [pytest.approx([-1111 / 4] * 2 + [-(101, 1010)[rank % 2] / 4]) for rank in range(4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_over_the_replicas(dtype: torch.dtype) -> None:
    """A sum of fp16 over all ranks would overflow; the mean does not."""

    def rank_main() -> list[float]:
        param = nn.Parameter(torch.zeros(6, dtype=dtype))
        options: dict[str, Any] = dict(lr=1e-4, max_norm=math.inf, sharding_groups=[[0, 1], [2, 3]])
        optimizer = NeuronZero1Optimizer([param], torch.optim.SGD, **options)
        param.grad = torch.full_like(param, 4e4)
        optimizer.step()
        return param.tolist()

    assert comm.threads.run(Mesh(4), rank_main) == [[pytest.approx(-4.0, rel=1e-2)] * 6] * 4


def test_a_gradient_that_one_group_has_alone() -> None:
    """The others count as zero; what no rank has is not touched, and no gradient of the user's is written."""

    def rank_main(groups: list[list[int]]) -> None:
        model = nn.ParameterDict({name: torch.ones(3) for name in ("all", "one", "none")})
        options: dict[str, Any] = dict(lr=1.0, weight_decay=0.5, max_norm=math.inf, sharding_groups=groups)
        optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, **options)
        value = [1.0, 0.0, 3.0, 0.0][comm.rank("dp")]
        model["all"].grad = torch.full((3,), value)
        if comm.rank("dp") == 2:
            model["one"].grad = torch.full((3,), 2.0)
        optimizer.step()
        assert model["all"].tolist() == [-0.5] * 3
        assert model["one"].tolist() == [0.0] * 3  # 1 - (2 / 4 + 0.5)
        assert model["none"].tolist() == [1.0] * 3
        assert optimizer.grad_norm.item() == pytest.approx(math.sqrt(3 + 3 / 4))
        assert model["all"].grad.tolist() == [value] * 3

    for groups in ([[0, 1], [2, 3]], [[0], [1], [2], [3]]):
        comm.threads.run(Mesh(4), rank_main, groups)


def test_masters_of_one_rank_communicate_nothing() -> None:
    def rank_main() -> None:
        param = nn.Parameter(torch.ones(3))
        optimizer = MasterWeightsOptimizer([param], torch.optim.SGD, lr=1.0, max_norm=math.inf)
        param.grad = torch.ones(3)
        with comm.record() as calls:
            optimizer.step()
        assert calls == [] and param.tolist() == [0.0] * 3
        assert optimizer.base_optimizer.param_groups[0]["params"][0] is param  # no copy where nothing differs

    comm.threads.run(Mesh(2), rank_main)


@pytest.mark.parametrize(
    "mesh, groups, message",
    [
        (Mesh(2), [[0]], r"\[\[0\]\] do not hold rank 1: each rank of the world, 0..1, must be in exactly one of them"),
        (Mesh(2), [[0, 1], [1]], "hold a rank twice, or one that does not exist"),
        (Mesh(2), [[0, 1], [2]], "hold a rank twice, or one that does not exist"),
        (Mesh(4, tp=2), [[0, 1], [2, 3]], r"group \[0, 1\] has .* rank 1 differs .* Split .* \[\[0, 2\], \[1, 3\]\]"),
        (Mesh(4, pp=2), [[0, 2], [1, 3]], r"group \[0, 2\] has ranks with different parts of the model: rank 2"),
        (Mesh(3), [[0, 1], [2]], r"\[0, 1, 2\] along dp,cp into \[\[0, 1\], \[2\]\]: the parts must have equal sizes"),
        (Mesh(8, ep=2), [[0, 2, 4, 1], [3, 5, 6, 7]], r"\[0, 2, 4, 6\] along edp into \[\[0, 2, 4\], \[6\]\]"),
    ],
    ids=str,
)
def test_groups_that_do_not_fit_are_refused(mesh: Mesh, groups: list[list[int]], message: str) -> None:
    def rank_main() -> None:
        with pytest.raises(ValueError, match=message):
            NeuronZero1Optimizer([nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=1.0, sharding_groups=groups)

    comm.threads.run(mesh, rank_main)


def test_a_communicator_of_no_axis_is_refused() -> None:
    def rank_main() -> None:
        group = comm.new_group([[0, 3], [1, 2]], "mine")
        with pytest.raises(ValueError, match=r"over the ranks \[.*\], which are not an axis of .*: pass lists"):
            NeuronZero1Optimizer([nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=1.0, sharding_groups=group)

    comm.threads.run(Mesh(4), rank_main)


# --- experts ---------------------------------------------------------------------------------------------------------

EXPERTS, DENSE, EXPERT = 4, (6, 3), (5, 2)  # 5 rows, which no degree divides


def expert_gradient(expert: int, step: int, data_rank: int) -> torch.Tensor:
    return draw(expert, step, data_rank, 3, shape=EXPERT, dtype=torch.float64)


def dense_gradient(step: int, data_rank: int) -> torch.Tensor:
    return draw(step, data_rank, 1, shape=DENSE, dtype=torch.float64)


def train_experts_whole(mesh: Mesh, optimizer: str) -> tuple[list[torch.Tensor], list[nn.Parameter]]:
    """Norms and weights of one process: the dense parameter, then the experts."""
    data = mesh.dp * mesh.cp
    params = [nn.Parameter(draw(number, 77, shape=shape, dtype=torch.float64)) for number, shape in _shapes()]
    cls, options = OPTIMIZERS[optimizer]
    reference, norms = cls(params, **options), []
    for step in range(STEPS):
        params[0].grad = sum(dense_gradient(step, rank) for rank in range(data)) / data
        for expert, param in enumerate(params[1:]):
            param.grad = sum(expert_gradient(expert, step, rank) for rank in range(data)) / data
        norms.append(torch.nn.utils.clip_grad_norm_(params, 2.5))
        reference.step()
    return norms, params


def _shapes() -> list[tuple[int, tuple[int, ...]]]:
    return [(0, DENSE), *((expert + 1, EXPERT) for expert in range(EXPERTS))]


def test_nxds_name_for_experts_is_the_same_optimizer() -> None:
    """NxD has two optimizers in one of this name; here each parameter goes over its own ranks in any case."""
    assert issubclass(NeuronEPZero1Optimizer, NeuronZero1Optimizer)


EXPERT_GROUPS: dict[str, tuple[Mesh, Any]] = {
    "ep 2 x edp 1": (Mesh(2, ep=2), None),
    "ep 2 x edp 2": (Mesh(4, ep=2), None),
    "ep 4 x edp 1": (Mesh(4, ep=4), None),
    "ep 2 x edp 2 x tp 2": (Mesh(8, ep=2, tp=2), None),
    "ep 2 x cp 2": (Mesh(4, ep=2, cp=2), None),
    "ep 2, in pairs": (Mesh(4, ep=2), [[0, 1], [2, 3]]),  # an expert on one rank of each
    "ep 2, pairs of equal experts": (Mesh(4, ep=2), [[0, 2], [1, 3]]),
    "ep 2, halves": (Mesh(8, ep=2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "ep 2 x cp 2, halves": (Mesh(8, ep=2, cp=2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", EXPERT_GROUPS)
def test_experts_are_divided_over_the_ranks_that_have_them(layout: str, optimizer: str) -> None:
    """A rank has the gradients of all tokens of its ep ranks; the mean is over all data, as in one process."""
    mesh, groups = EXPERT_GROUPS[layout]
    cls, options = OPTIMIZERS[optimizer]

    def rank_main() -> tuple[list[torch.Tensor], dict[int, torch.Tensor], list[tuple[int, int]]]:
        mine = [expert for expert in range(EXPERTS) if expert * mesh.ep // EXPERTS == comm.rank("ep")]
        numbers = [0, *(expert + 1 for expert in mine)]
        params = {
            n: nn.Parameter(draw(n, 77, shape=shape, dtype=torch.float64)) for n, shape in _shapes() if n in numbers
        }
        for expert in mine:
            params[expert + 1].expert_model_parallel = True
        here = comm.current().rank
        tokens_of = [comm.current().mesh.coordinate(DATA, rank) for rank in comm.communicator("ep").ranks]
        zero1 = NeuronEPZero1Optimizer(params.values(), cls, max_norm=2.5, sharding_groups=groups, **options)
        norms = []
        for step in range(STEPS):
            params[0].grad = dense_gradient(step, mesh.coordinate(DATA, here))
            for expert in mine:
                params[expert + 1].grad = sum(expert_gradient(expert, step, rank) for rank in tokens_of)
            zero1.step()
            norms.append(zero1.grad_norm)
        degrees = [(shard.degree, shard.replicas.size) for shard in zero1.shards[:2]]
        return norms, {n: param.detach() for n, param in params.items()}, degrees

    expected_norms, expected = train_experts_whole(mesh, optimizer)
    for norms, values, ((degree, replicas), (expert_degree, expert_replicas)) in comm.threads.run(mesh, rank_main):
        assert relative_error(torch.stack(norms), torch.stack(expected_norms)) < 1e-12
        for number, value in values.items():
            assert relative_error(value, expected[number].detach()) < 1e-10, number
        assert degree * replicas == mesh.dp * mesh.cp and expert_degree * expert_replicas == mesh.edp


def test_experts_reduce_over_their_own_ranks_alone() -> None:
    def rank_main() -> None:
        model = nn.ParameterDict({"dense": torch.zeros(4), "expert": torch.zeros(8)})
        model["expert"].expert_model_parallel = True
        for param in model.values():
            param.grad = torch.ones_like(param)
        optimizer = NeuronEPZero1Optimizer(model.parameters(), torch.optim.SGD, lr=1.0)
        with comm.record() as calls:
            optimizer.step()
        shards = [("reduce_scatter", "dp,cp", 4 * (4 + 4)), ("reduce_scatter", "edp", 4 * (8 + 2))]  # and flags
        gathers = [("all_gather", "dp,cp", 4 * 4), ("all_gather", "edp", 4 * 8)]
        assert [(call.verb, call.axis, call.bytes) for call in calls] == [*shards, ("all_reduce", "world", 8), *gathers]

    comm.threads.run(Mesh(4, ep=2), rank_main)
