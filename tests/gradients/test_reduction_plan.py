"""Plans of a model's gradients: made once, made again when something else counts, and no trace of them."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.gradients import buckets, reduction_plan
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import grads
from neuronx_dist.weights.shard_spec import ShardSpec, set_spec, spec_of
from tests.support.synthetic import Model

SIZES = {"a": 2, "b": 3, "c": 5, "d": 7}


def small_model() -> nn.ParameterDict:
    return nn.ParameterDict({name: torch.zeros(size) for name, size in SIZES.items()})


def fill(model: nn.Module) -> None:
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.full_like(param, comm.rank("world") + 1.0)


def reductions(model: nn.Module, **options: Any) -> list[tuple[str, int, torch.dtype]]:
    """Communication of a step's reduction: `(axis, elements, dtype)`."""
    model.zero_grad()
    fill(model)
    with comm.record() as calls:
        grads.reduce_gradients(model, **options)
    return [(call.axis, sum(call.shape), call.dtype) for call in calls]


def elements(*names: str) -> int:
    """Elements of the bucket of these parameters; each brings a flag."""
    return sum(SIZES[name] + 1 for name in names)


class Counter:
    """Stands for a function and counts each rank's calls of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.by_rank: dict[int, int] = {}

    @property
    def calls(self) -> int:
        """This rank's."""
        return self.by_rank.get(comm.rank("world"), 0)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.by_rank[comm.rank("world")] = self.calls + 1
        return self.function(*args, **options)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Counts the plans that are made."""
    counter = Counter(reduction_plan.GradientPlan)
    monkeypatch.setattr(reduction_plan, "GradientPlan", counter)
    return counter


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Counts how often buckets are cut."""
    counter = Counter(buckets.cut)
    monkeypatch.setattr(buckets, "cut", counter)
    return counter


def test_a_model_is_planned_once(plans: Counter, cuts: Counter) -> None:
    def rank_main() -> None:
        model = small_model()
        for _ in range(3):
            assert reductions(model) == [("dp,cp", elements("a", "b", "c", "d"), torch.float32)]
        assert (plans.calls, cuts.calls) == (1, 1)
        model["b"].requires_grad_(False)
        for _ in range(3):
            assert reductions(model) == [("dp,cp", elements("a", "c", "d"), torch.float32)]
        assert (plans.calls, cuts.calls) == (2, 2)
        model["b"].requires_grad_(True)
        for _ in range(3):
            assert reductions(model) == [("dp,cp", elements("a", "b", "c", "d"), torch.float32)]
        assert (plans.calls, cuts.calls) == (3, 3)
        model.double()
        for _ in range(3):
            assert reductions(model) == [("dp,cp", elements("a", "b", "c", "d"), torch.float64)]
        assert cuts.calls == 4
        for _ in range(3):
            assert len(reductions(model, bucket_cap_mb=1e-5)) == 4
        assert cuts.calls == 5

    comm.threads.run(Mesh(2), rank_main)


def test_every_group_of_a_model_is_cut_once(plans: Counter, cuts: Counter) -> None:
    def rank_main() -> None:
        model = Model()
        for _ in range(3):
            model.zero_grad()
            model.set_gradients(step=0)
            grads.reduce_gradients(model)
        # Over tp, over the holders of the tied weight, over the data.
        assert (plans.calls, cuts.calls) == (1, 3)

    comm.threads.run(Mesh(8, tp=2, pp=2), rank_main)


def test_missing_gradients_do_not_change_the_buckets(cuts: Counter) -> None:
    def rank_main() -> None:
        model = small_model()
        for missing in ("a", "d", None):
            fill(model)
            if missing is not None and comm.rank("dp") == 0:
                model[missing].grad = None
            with comm.record() as calls:
                grads.reduce_gradients(model)
            assert [sum(call.shape) for call in calls] == [elements("a", "b", "c", "d")]
        assert cuts.calls == 1

    comm.threads.run(Mesh(2), rank_main)


def test_one_dtype_among_others_makes_a_bucket_of_its_own() -> None:
    def rank_main() -> None:
        model = small_model()
        reductions(model)
        model["c"].data = model["c"].data.double()
        rest = elements("a", "b", "d")
        assert reductions(model) == [("dp,cp", rest, torch.float32), ("dp,cp", elements("c"), torch.float64)]
        model["c"].data = torch.zeros(11)
        assert reductions(model) == [("dp,cp", rest + 12, torch.float32)]

    comm.threads.run(Mesh(2), rank_main)


def test_sizes_decide_about_buckets() -> None:
    def rank_main() -> None:
        model = small_model()
        cap = 17 * 4 / 2**20
        assert len(reductions(model, bucket_cap_mb=cap)) == 1
        model["d"].data = torch.zeros(8)
        assert len(reductions(model, bucket_cap_mb=cap)) == 2
        model["d"].data = torch.zeros(7)
        assert len(reductions(model, bucket_cap_mb=cap)) == 1

    comm.threads.run(Mesh(2), rank_main)


def test_main_grad_makes_a_bucket_of_its_own() -> None:
    def rank_main() -> None:
        model = small_model().bfloat16()
        reductions(model)
        model["c"].main_grad = None
        model.zero_grad()
        fill(model)
        model["c"].main_grad, model["c"].grad = torch.full((5,), comm.rank("dp") + 1.0), None
        with comm.record() as calls:
            grads.reduce_gradients(model)
        found = [(sum(call.shape), call.dtype) for call in calls]
        assert found == [(elements("a", "b", "d"), torch.bfloat16), (elements("c"), torch.float32)]
        assert model["c"].main_grad.tolist() == [1.5] * 5 and model["c"].grad is None

    comm.threads.run(Mesh(2), rank_main)


def test_parameters_come_and_go() -> None:
    def rank_main() -> None:
        model = small_model()
        reductions(model)
        model["e"] = nn.Parameter(torch.zeros(100))
        assert reductions(model) == [("dp,cp", elements("a", "b", "c", "d") + 101, torch.float32)]
        del model["e"], model["a"]
        assert reductions(model) == [("dp,cp", elements("b", "c", "d"), torch.float32)]
        model["b"] = nn.Parameter(torch.zeros(3))  # another one of the same size
        reductions(model)
        assert model["b"].grad.tolist() == [1.5] * 3

    comm.threads.run(Mesh(2), rank_main)


def test_marks_are_seen_when_they_are_made() -> None:
    def rank_main() -> None:
        model = small_model()
        everything = elements("a", "b", "c", "d")
        assert reductions(model) == [("dp,cp", everything, torch.float32)]
        model["a"].sequence_parallel_enabled = True
        assert reductions(model) == [("tp", elements("a"), torch.float32), ("dp,cp", everything, torch.float32)]
        model["a"].sequence_parallel_enabled = False
        model["b"].expert_model_parallel = True
        dense = elements("a", "c", "d")
        assert reductions(model) == [("dp,cp", dense, torch.float32), ("edp", elements("b"), torch.float32)]
        model["b"].expert_model_parallel = False
        assert reductions(model) == [("dp,cp", everything, torch.float32)]
        set_spec(model, "c", ShardSpec(full_shape=(5,), sequence_parallel=True))
        assert reductions(model) == [("tp", elements("c"), torch.float32), ("dp,cp", everything, torch.float32)]

    comm.threads.run(Mesh(8, tp=2, ep=2), rank_main)


def test_lost_marks_are_made_again() -> None:
    """A parameter that is wrapped anew has no attributes; what its module has recorded counts."""

    def rank_main() -> None:
        model = Model()
        for lose in (
            lambda param: nn.Parameter(param.detach().clone()),
            lambda param: param.__dict__.clear() or param,
        ):
            model.set_gradients(step=0)
            grads.reduce_gradients(model)
            for name, param in list(model.named_parameters()):
                model._parameters[name] = lose(param)
            assert not any(spec_of(param).is_sharded for param in model.parameters())
            model.zero_grad()
            model.set_gradients(step=0)
            with comm.record() as calls:
                grads.reduce_gradients(model)
            assert {call.axis for call in calls} == {"tp"}
            assert spec_of(model.embedding).is_sharded and spec_of(model.norm).sequence_parallel

    comm.threads.run(Mesh(2, tp=2), rank_main)


def test_marks_of_a_module_that_comes_later() -> None:
    """A copy of a module has its marks, but its parameters, which nobody has marked again, look like the old ones."""

    def rank_main() -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(3))
        assert [axis for axis, *_ in reductions(model)] == ["dp,cp"]
        marked = nn.LayerNorm(3)
        set_spec(marked, "weight", ShardSpec(full_shape=(3,), sequence_parallel=True))
        model[1] = copy.deepcopy(marked)
        assert not spec_of(model[1].weight).sequence_parallel
        assert reductions(model)[0] == ("tp", 3 + 1, torch.float32)

    comm.threads.run(Mesh(4, tp=2), rank_main)


def test_another_mesh() -> None:
    """One process may play several ranks, of several meshes, with one model."""
    meshes = [Mesh(4), Mesh(4, ep=2), Mesh(4, tp=2), Mesh(4, ep=2)]
    models = [small_model() for _ in range(4)]
    for model in models:
        model["b"].expert_model_parallel = True
        model["a"].sequence_parallel_enabled = True

    def rank_main() -> list[tuple[str, int, torch.dtype]]:
        return reductions(models[comm.rank("world")])

    found = [comm.threads.run(mesh, rank_main)[0] for mesh in meshes]
    everything = ("dp,cp", elements("a", "b", "c", "d"), torch.float32)
    with_experts = [("dp,cp", elements("a", "c", "d"), torch.float32), ("edp", elements("b"), torch.float32)]
    assert found[0] == [everything]
    assert found[1] == found[3] == with_experts
    assert found[2] == [("tp", elements("a"), torch.float32), everything]


# --- what a plan leaves behind ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("hooked", [False, True])
def test_a_deleted_model_is_collected(hooked: bool) -> None:
    """Even if a hook of a parameter knows the model: a plan holds no parameter."""

    def rank_main() -> None:
        model = small_model()
        if hooked:
            model["a"].register_hook(lambda grad, model=model: grad * len(model))
        fill(model)
        grads.reduce_gradients(model)
        gone = [weakref.ref(x) for x in (model, model["a"], reduction_plan.ModelGradients(model).plan)]
        del model
        gc.collect()
        assert [ref() for ref in gone] == [None, None, None]

    comm.threads.run(Mesh(1), rank_main)


def test_a_plan_leaves_no_trace_in_the_model() -> None:
    def rank_main() -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        names, keys = set(vars(model)), set(vars(model[0].weight))
        x = torch.ones(1, 2)
        model(x).sum().backward()
        grads.reduce_gradients(model)
        assert set(vars(model)) == names and set(vars(model[0].weight)) == keys
        twin = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
        twin[0].weight.requires_grad_(False)
        with comm.record() as calls:
            for net, size in ((twin, 2 + 1), (model, 4 + 2 + 2)):
                net.zero_grad()
                net(x).sum().backward()
                grads.reduce_gradients(net)
                assert sum(calls[-1].shape) == size
        # torch refuses to swap a tensor that somebody refers to weakly.
        torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(2, 2)))

    comm.threads.run(Mesh(2), rank_main)
