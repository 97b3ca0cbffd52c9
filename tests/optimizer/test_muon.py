"""Muon and AdamW under ZeRO-1, against those of torch in one process, at every kind of layout, and what they cost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.gradients.guards import watch_optimizers
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import MasterWeightsOptimizer, MuonAdamW, NeuronZero1Optimizer, matrix_owners, muon_groups
from neuronx_dist.optimizer.matrix_owners import balanced
from neuronx_dist.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_dist.weights.shard_spec import ShardSpec, set_spec
from tests.optimizer.zero1_training import STEPS, train, weights_of
from tests.support.pool import processes
from tests.support.synthetic import LAYOUTS, MESHES, Model, assemble, draw, mean_gradient, relative_error, weight

MATRICES = [name for name, layout in LAYOUTS.items() if len(layout.shape) == 2]
ADAMW: dict[str, Any] = dict(lr=0.03, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-6)
MUON: dict[str, dict[str, Any]] = {
    "defaults": dict(lr=0.1, adjust_lr_fn=None),
    "match": dict(lr=0.1, adjust_lr_fn="match_rms_adamw", nesterov=False, weight_decay=0.3),
    "iterations": dict(lr=0.1, ns_steps=3, momentum=0.5, ns_coefficients=(2.0, -1.5, 0.5), adjust_lr_fn="original"),
}
WRAPPERS: dict[str, Callable[..., NeuronZero1Optimizer]] = {
    "zero1": NeuronZero1Optimizer,
    "overlap": lambda *args, **options: NeuronZero1Optimizer(*args, overlap=True, **options),
    "hybrid": lambda *args, **options: NeuronZero1Optimizer(*args, sharding_groups=every_other(), **options),
    "masters": MasterWeightsOptimizer,
}


def every_other() -> list[list[int]]:
    """Two sharding groups of the data ranks, where there are two of each."""
    step = 2 if comm.size(("dp", "cp")) % 2 == 0 else 1
    return [ranks[first::step] for ranks in comm.current().mesh.groups(("dp", "cp")) for first in range(step)]


def groups_of(named: dict[str, nn.Parameter], options: dict[str, Any]) -> list[dict[str, Any]]:
    matrices = [param for name, param in named.items() if name in MATRICES]
    others = [param for name, param in named.items() if name not in MATRICES]
    return [{"params": matrices, "optimizer": "muon", **options}, {"params": others, "optimizer": "adamw", **ADAMW}]


def train_whole(
    mesh: Mesh, options: dict[str, Any], max_norm: float, dtype: torch.dtype, steps: int = STEPS
) -> tuple[list[torch.Tensor], list[nn.Parameter]]:
    """Norms and weights of one process, by torch's two optimizers."""
    params = {name: nn.Parameter(weight(name, dtype)) for name in LAYOUTS}
    (muon, adamw) = groups_of(params, options)
    optimizers = [torch.optim.Muon(muon["params"], **options), torch.optim.AdamW(adamw["params"], **ADAMW)]
    norms = []
    for step in range(steps):
        for name, param in params.items():
            param.grad = mean_gradient(name, step, mesh, dtype)
        norms.append(torch.nn.utils.clip_grad_norm_(params.values(), max_norm))
        for optimizer in optimizers:
            optimizer.step()
    return norms, [*params.values()]


def compare(mesh: Mesh, options: str, kind: str) -> None:
    """Compares weights and norms of all ranks with those of one process."""

    def rank_main() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        model = Model()
        groups = groups_of(dict(model.named_parameters()), MUON[options])
        norms = train(model, WRAPPERS[kind](groups, MuonAdamW, max_norm=2.5), average=kind == "masters")
        return norms, weights_of(model)

    expected_norms, expected = train_whole(mesh, MUON[options], 2.5, torch.float64)
    results = comm.threads.run(mesh, rank_main, timeout=20.0)
    for norms, _ in results:
        assert relative_error(torch.stack(norms), torch.stack(expected_norms)) < 1e-12
    for (name, value), param in zip(assemble(mesh, [result[1] for result in results]), expected):
        assert relative_error(value, param.detach()) < 1e-10, name


@pytest.mark.slow
@pytest.mark.each_pair
@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("options", MUON)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_weights_and_norms_are_those_of_one_process(mesh: Mesh, options: str, kind: str) -> None:
    compare(mesh, options, kind)


SPECS = {
    "columns": ShardSpec("tp", 0, 1, 4, (8, 6)),
    "rows": ShardSpec("tp", 1, 1, 4, (5, 8)),
    "fused": ShardSpec("tp", 0, 2, 4, (16, 3)),
    "fused rows": ShardSpec("tp", 1, 2, 4, (3, 16)),
    "padded": ShardSpec("tp", 0, 1, 4, (12, 7), unpadded=9),
    "padded heads": ShardSpec("tp", 0, 1, 4, (16, 5), unpadded=9, group=(3, 4)),
    "adjacent replicas": ShardSpec("tp/2", 0, 1, 2, (6, 9)),
    "replicas at a distance": ShardSpec("tp%2", 0, 1, 2, (6, 9)),
    "replicated": ShardSpec(full_shape=(6, 6)),
    "one row": ShardSpec(full_shape=(1, 6)),
}


def test_the_matrix_is_the_unpadded_one_of_one_process() -> None:
    """Fused, padded and replicated weights; dp 3 divides no number of rows, and has ranks without any."""
    wholes = {name: torch.randn(spec.unpadded_shape, dtype=torch.float64) for name, spec in SPECS.items()}
    grads = [{name: torch.randn_like(whole) for name, whole in wholes.items()} for _ in range(3)]

    def rank_main() -> dict[str, torch.Tensor]:
        def local(name: str, whole: torch.Tensor) -> torch.Tensor:
            return SPECS[name].local_slice(whole, SPECS[name].index_of(comm.rank("tp"))).clone()

        model = nn.Module()
        for name, spec in SPECS.items():
            key = name.replace(" ", "_")
            model.register_parameter(key, nn.Parameter(local(name, wholes[name])))
            set_spec(model, key, spec)
        optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.Muon, lr=0.1, grad_clipping=False)
        for step in grads:
            for name, param in zip(SPECS, model.parameters()):
                param.grad = local(name, step[name]) * (comm.rank("dp") + 1) / 2  # of which the mean is 1
            optimizer.step()
        return dict(zip(SPECS, (param.detach() for param in model.parameters())))

    params = {name: nn.Parameter(whole.clone()) for name, whole in wholes.items()}
    whole_optimizer = torch.optim.Muon(params.values(), lr=0.1)
    for step in grads:
        for name, param in params.items():
            param.grad = step[name]
        whole_optimizer.step()
    mesh = Mesh(12, tp=4, tp_replicas=2)
    for rank, result in enumerate(comm.threads.run(mesh, rank_main)):
        for name, value in result.items():
            index = SPECS[name].index_of(mesh.coordinate("tp", rank))
            expected = SPECS[name].local_slice(params[name].detach(), index)
            assert relative_error(value, expected) < 1e-10, (rank, name)


@pytest.mark.parametrize("wrapper", [NeuronZero1Optimizer, MasterWeightsOptimizer])
def test_bf16_weights_have_fp32_masters(wrapper: Any) -> None:
    """Bit-equal to fp32 masters written out by hand."""

    def rank_main() -> torch.Tensor:
        param = nn.Parameter(weight("column", torch.bfloat16))
        optimizer = wrapper([param], torch.optim.Muon, lr=1e-3, grad_clipping=False)
        for step in range(STEPS):
            param.grad = draw(step, shape=(8, 5), dtype=torch.bfloat16)
            optimizer.step()
        return param.detach()

    master = nn.Parameter(weight("column", torch.bfloat16).float())
    reference = torch.optim.Muon([master], lr=1e-3)
    for step in range(STEPS):
        master.grad = draw(step, shape=(8, 5), dtype=torch.bfloat16).float()
        reference.step()
    for value in comm.threads.run(Mesh(2), rank_main):
        assert torch.equal(value, master.detach().bfloat16())


@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(4, ep=2), Mesh(4, tp=2)], ids=str)
@pytest.mark.parametrize("lazy", [False, True])
def test_groups_that_come_later_frozen_and_unused_parameters(mesh: Mesh, lazy: bool) -> None:
    values = [torch.randn(5, 3, dtype=torch.float64) for _ in range(4)]
    grads = [torch.randn(5, 3, dtype=torch.float64) for _ in range(2)]

    def steps(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            if step == 1:
                optimizer.add_param_group({"params": [params[3]], "lr": 0.5})
            for param, grad in zip(params[2:], grads):
                param.grad = grad.clone()
            optimizer.step()

    def build() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        params = [nn.Parameter(value.clone()) for value in values]
        params[0].requires_grad_(False)
        return params, params[:3]  # the first one is frozen, the second never has a gradient

    def rank_main() -> list[torch.Tensor]:
        params, first = build()
        options = dict(lr=0.1, grad_clipping=False, lazy_init=lazy)
        steps(params, NeuronZero1Optimizer(first, torch.optim.Muon, **options))
        return [param.detach() for param in params]

    expected, first = build()
    steps(expected, torch.optim.Muon(first, lr=0.1))
    for result in comm.threads.run(mesh, rank_main):
        for value, param in zip(result, expected):
            assert torch.equal(value, param)


def test_what_travels_and_what_stays() -> None:
    """Beside ZeRO-1's collectives two exchanges, each of a rank's part of the matrices, in bfloat16; state is 1/dp."""

    def rank_main() -> int:
        params = [nn.Parameter(torch.ones(8, 4)) for _ in range(8)]
        optimizer = NeuronZero1Optimizer(params, torch.optim.Muon, lr=0.1, grad_clipping=False)
        for param in params:
            param.grad = torch.ones_like(param)
        with comm.record() as calls:
            optimizer.step()
        elements, size = 8 * 8 * 4, 4
        sent = elements // size * (size - 1) // size * 2  # what this rank owns does not leave it
        assert [(call.verb, call.axis, call.bytes) for call in calls] == [
            ("reduce_scatter", "dp,cp", 4 * (elements + size * len(params))),
            ("exchange", "dp,cp,tp", sent),
            ("exchange", "dp,cp,tp", sent),
            ("all_gather", "dp,cp", 4 * elements),
        ]
        state = optimizer.state_dict()["base_state"].values()
        assert all({*entries} == {"momentum_buffer"} for entries in state)
        return sum(x.numel() for entries in state for x in entries.values())

    assert comm.threads.run(Mesh(4), rank_main) == [64] * 4


def test_owners_have_equal_loads() -> None:
    costs = [3, 7, 7, 3, 1, 1, 6]
    owners = balanced(costs, 3)
    loads = [sum(cost for cost, owner in zip(costs, owners) if owner == rank) for rank in range(3)]
    assert max(loads) - min(loads) <= 1 and len(loads) == 3
    assert balanced([5], 2) == [0]


def test_a_resumed_run_is_bit_equal() -> None:
    def rank_main() -> None:
        model = Model(torch.float32)
        optimizer = NeuronZero1Optimizer(groups_of(dict(model.named_parameters()), MUON["match"]), MuonAdamW)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        train(model, optimizer, 0, 2)
        scheduler.step()
        other, other_optimizer = copy.deepcopy((model, optimizer))
        resumed = Model(torch.float32)
        resumed.load_state_dict(model.state_dict())
        resumed_optimizer = NeuronZero1Optimizer(groups_of(dict(resumed.named_parameters()), {}), MuonAdamW)
        resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for trained, by in ((model, optimizer), (resumed, resumed_optimizer), (other, other_optimizer)):
            train(trained, by, 2, 4)
            for name, value in weights_of(trained).items():
                assert torch.equal(value, weights_of(model)[name]), name

    comm.threads.run(Mesh(4, tp=2), rank_main)


def test_one_process_needs_no_wrapper() -> None:
    _, expected = train_whole(Mesh(1), MUON["match"], float("inf"), torch.float32)
    params = {name: nn.Parameter(weight(name, torch.float32)) for name in LAYOUTS}
    optimizer = MuonAdamW(groups_of(params, MUON["match"]))
    for step in range(STEPS):
        for name, param in params.items():
            param.grad = mean_gradient(name, step, Mesh(1), torch.float32)
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = MuonAdamW(groups_of(params, MUON["defaults"]))
            optimizer.load_state_dict(saved)
        optimizer.step()
    for param, other in zip(params.values(), expected):
        assert torch.equal(param, other)


def test_states_of_other_optimizers() -> None:
    """States of torch's Muon and AdamW load where the groups are theirs; all others are refused by name."""
    matrix, vector = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    muon_group, adamw_group = {"params": [matrix], "optimizer": "muon"}, {"params": [vector], "optimizer": "adamw"}
    for group, theirs in ((muon_group, torch.optim.Muon([matrix])), (adamw_group, torch.optim.AdamW([vector]))):
        mine = MuonAdamW([group])
        for param in (matrix, vector):
            param.grad = torch.arange(1.0, 1.0 + param.numel()).view_as(param)
        theirs.step()
        mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
        before = [matrix.detach().clone(), vector.detach().clone()]
        theirs.step()
        expected = [matrix.detach().clone(), vector.detach().clone()]
        for param, value in zip((matrix, vector), before):
            param.data.copy_(value)
        mine.step()
        assert torch.equal(matrix, expected[0]) and torch.equal(vector, expected[1])
        assert mine.state_dict()["param_groups"][0]["optimizer"] == group["optimizer"]
    with pytest.raises(
        ValueError, match="state is of AdamW, with parameter groups of adamw, .* is MuonAdamW, with .* muon"
    ):
        MuonAdamW([muon_group]).load_state_dict(torch.optim.AdamW([matrix]).state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        MuonAdamW([adamw_group]).load_state_dict(
            MuonAdamW([adamw_group, {**muon_group, "optimizer": "adamw"}]).state_dict()
        )
    with comm.as_rank(Mesh(1), 0):
        plain = NeuronZero1Optimizer([matrix, vector], torch.optim.AdamW)
        groups = NeuronZero1Optimizer([muon_group, adamw_group], MuonAdamW)
        with pytest.raises(ValueError, match="state is of AdamW, .* is MuonAdamW, with groups of muon, adamw: load"):
            groups.load_state_dict(plain.state_dict())
        with pytest.raises(ValueError, match="state is of MuonAdamW, with parameter groups of muon, .* is AdamW"):
            plain.load_state_dict(groups.state_dict())


def test_a_gradient_that_one_tp_rank_lacks_counts_as_zeros() -> None:
    """So do rows of it in one process; a matrix without any gradient stays."""
    counts = [[1.0, 0.0] * 2, [0.0] * 2]  # of ranks that have a gradient, as each rank without one reads them

    def is_anywhere(count: torch.Tensor) -> bool:
        expected = counts[comm.rank("tp")].pop(0)
        assert float(count) == expected
        return expected > 0

    def rank_main() -> list[torch.Tensor]:
        params = []
        for name in ("part", "unused", "all"):
            model = nn.Module()
            model.register_parameter(name, nn.Parameter(torch.ones(2, 3, dtype=torch.float64)))
            set_spec(model, name, ShardSpec("tp", 0, 1, 2, (4, 3)))
            params.append(getattr(model, name))
        optimizer = NeuronZero1Optimizer(params, torch.optim.Muon, lr=0.1, grad_clipping=False)
        for _ in range(2):
            optimizer.zero_grad()
            params[0].grad = torch.eye(2, 3, dtype=torch.float64) if comm.rank("tp") else None
            params[2].grad = torch.full_like(params[2], comm.rank("tp"))
            with comm.record() as calls:
                optimizer.step()
        assert [(call.verb, call.axis, call.bytes) for call in calls][:1] == [("all_reduce", "tp", 24)]
        return [param.detach() for param in params]

    wholes = [nn.Parameter(torch.ones(4, 3, dtype=torch.float64)) for _ in range(3)]
    reference = torch.optim.Muon(wholes, lr=0.1)
    for _ in range(2):
        wholes[0].grad = torch.cat([torch.zeros(2, 3), torch.eye(2, 3)]).double()
        wholes[2].grad = torch.tensor([[0.0], [0.0], [1.0], [1.0]]).double().expand(4, 3)
        reference.step()
    with mock.patch.object(matrix_owners, "is_anywhere", is_anywhere):
        results = comm.threads.run(Mesh(2, tp=2), rank_main, timeout=20.0)
    assert counts == [[], []]
    for rank, result in enumerate(results):
        for value, whole in zip(result, wholes):
            assert relative_error(value, whole.detach()[2 * rank : 2 * rank + 2]) < 1e-10


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = ParallelEmbedding(10, 4)
        self.up = ColumnParallelLinear(4, 8, bias=True, gather_output=False)
        self.norm = nn.LayerNorm(8)
        self.down = RowParallelLinear(8, 4, bias=False, input_is_parallel=True)
        self.lm_head = ColumnParallelLinear(4, 10, bias=False, gather_output=False)


def test_groups_of_a_model() -> None:
    def rank_main() -> list[tuple[str, list[str], Any]]:
        groups = muon_groups(Net(), muon=dict(lr=2e-2), adamw=dict(lr=3e-4, betas=(0.9, 0.99)))
        with pytest.raises(TypeError, match="muon_groups: muon has no option 'momentun'; nearest: momentum"):
            muon_groups(Net(), muon=dict(momentun=0.9))
        of_names = muon_groups(Net(), is_muon=lambda name: name.startswith("embed"))
        assert [name for name, _ in of_names[0]["params"]] == ["embed.weight"]
        optimizer = NeuronZero1Optimizer(groups, MuonAdamW, weight_decay=0.2, momentum=0.9)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.2]
        return [(group["optimizer"], group["param_names"], group["lr"]) for group in optimizer.param_groups]

    class Bert(nn.Module):  # as many positions as hidden units
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.output = nn.Embedding(8, 8), nn.ModuleDict({"dense": nn.Linear(8, 8, bias=False)})
            self.cls_head = nn.Linear(8, 8, bias=False)

    assert [name for name, _ in muon_groups(Bert())[0]["params"]] == ["output.dense.weight"]
    for head in ("score", "classifier"):  # with fewer rows than an embedding has
        body = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4, bias=False))
        model = nn.ModuleDict({"body": body, head: nn.Sequential(nn.Linear(4, 2, bias=False))})
        assert [name for name, _ in muon_groups(model)[0]["params"]] == ["body.1.weight"]
    for only in (nn.Linear(4, 4, bias=False), nn.LayerNorm(4)):  # a group is empty
        optimizer = MuonAdamW(muon_groups(only))
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len([*only.parameters()])
    with pytest.raises(TypeError, match="muon_groups takes a model, .* got generator"):
        muon_groups(Bert().parameters())  # type: ignore[arg-type]
    muon = ("muon", ["up.weight", "down.weight"], 2e-2)
    adamw = ("adamw", ["embed.weight", "up.bias", "norm.weight", "norm.bias", "lm_head.weight"], 3e-4)
    assert comm.threads.run(Mesh(2, tp=2), rank_main) == [[muon, adamw]] * 2


def test_what_is_no_matrix_is_refused_by_name() -> None:
    def rank_main() -> None:
        vector, matrix = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 4))
        with pytest.raises(ValueError, match=r"Muon got norm of shape \(4,\), which is no matrix"):
            NeuronZero1Optimizer([("up", matrix), ("norm", vector)], torch.optim.Muon, lr=0.1)
        with pytest.raises(ValueError, match=r"Muon got parameter 0 of the group of shape \(\d,\), which is no matrix"):
            NeuronZero1Optimizer([{"params": [vector], "optimizer": "muon"}], MuonAdamW, lr=0.1)
        with pytest.raises(ValueError, match="optimizer=None: pass groups"):
            NeuronZero1Optimizer([matrix], MuonAdamW, lr=0.1)
        with pytest.raises(ValueError, match="adjust_lr_fn is 'none'; pass one of"):
            NeuronZero1Optimizer([{"params": [matrix], "optimizer": "muon", "adjust_lr_fn": "none"}], MuonAdamW)
        for option, (value, message) in {
            "ns_steps": (0, "ns_steps=0: pass a number of iterations"),
            "momentum": (-0.5, r"momentum=-0.5: pass a number in \[0, 1\)"),
            "maximize": (True, "maximize=True, which Muon has not: negate the loss"),
        }.items():
            with pytest.raises(ValueError, match=f"a Muon group has {message}"):
                NeuronZero1Optimizer([{"params": [matrix], "optimizer": "muon", option: value}], MuonAdamW)
        with pytest.raises(TypeError, match="unknown option momentun=0.9; nearest: momentum"):
            NeuronZero1Optimizer([{"params": [matrix], "optimizer": "muon", "momentun": 0.9}], MuonAdamW)
        experts = nn.Parameter(torch.ones(4, 4))
        experts.expert_model_parallel = True
        with pytest.raises(ValueError, match=r"Muon got w of shape \(4, 4\), whose rows are experts"):
            NeuronZero1Optimizer([("w", experts)], torch.optim.Muon)
        with pytest.raises(ValueError, match="AdamW would train the matrices of muon_groups too: pass MuonAdamW"):
            NeuronZero1Optimizer([{"params": [matrix], "optimizer": "muon"}], torch.optim.AdamW)
        with pytest.raises(ValueError, match="max_norm=0 would make all gradients 0: pass grad_clipping=False"):
            NeuronZero1Optimizer([matrix], torch.optim.AdamW, max_norm=0)
        other = type("Muon", (torch.optim.SGD,), {})
        with pytest.raises(ValueError, match="Muon cannot work on shards of parameters"):
            NeuronZero1Optimizer([matrix], other, lr=0.1)

    comm.threads.run(Mesh(2), rank_main)


def test_a_program_of_all_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_owners, "in_one_program", lambda param: True)
    with comm.as_rank(Mesh(1), 0), pytest.raises(NotImplementedError, match="w of shape .* on XLA, where all ranks"):
        NeuronZero1Optimizer([("w", nn.Parameter(torch.ones(4, 4)))], torch.optim.Muon)


@pytest.mark.parametrize("optimizer_class", [torch.optim.Muon, MuonAdamW])
def test_without_a_wrapper_shards_are_refused(optimizer_class: Any) -> None:
    def rank_main() -> None:
        watch_optimizers()  # as initialize_model_parallel does
        layer = ColumnParallelLinear(4, 8, bias=False)
        optimizer = optimizer_class([{"params": [layer.weight], "optimizer": "muon"}])
        layer.weight.grad = torch.ones_like(layer.weight)
        with pytest.raises(
            ValueError, match=r"cannot work on shards .* NeuronZero1Optimizer or MasterWeightsOptimizer"
        ):
            optimizer.step()

    comm.threads.run(Mesh(2, tp=2), rank_main)


def trained_weights(options: str) -> dict[str, torch.Tensor]:
    model = Model(torch.float32)
    optimizer = NeuronZero1Optimizer(groups_of(dict(model.named_parameters()), MUON[options]), MuonAdamW)
    train(model, optimizer)
    return weights_of(model)


@pytest.mark.process
def test_processes_do_the_same_as_threads() -> None:
    """Over gloo the exchange is one of messages, of which some ranks have none to send."""
    expected = comm.threads.run(Mesh(2, tp=2), trained_weights, "defaults")
    for weights, of_threads in zip(processes(2).run(trained_weights, "defaults", mesh=dict(tp=2)), expected):
        assert all(torch.equal(weights[name], of_threads[name]) for name in of_threads)
