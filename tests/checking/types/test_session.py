"""Knowledge of a mode while it is entered, and its memory of calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from neuronx_dist import comm, spmd
from neuronx_dist.checking.types import memo
from neuronx_dist.checking.types.memo import CachedJudgement, ExtraKey, extra_key_of, extra_values, store
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.mesh import Mesh
from neuronx_dist.rules import RULES
from neuronx_dist.spmd import I, P, R, S, SpmdTypeMode, V
from neuronx_dist.spmd.tensor_type import EQUAL, NAME, UNIFORM_TYPE, ZERO_TYPE, TensorType, note_of, type_of
from neuronx_dist.spmd.types import scaled

MESH = Mesh(8, tp=2, pp=2)


@pytest.fixture
def mode():
    with comm.as_rank(MESH, 0, CheckBackend()), SpmdTypeMode() as mode:
        yield mode


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(2))
        self.register_buffer("absent", None)
        self.table = torch.ones(3)
        self.words = ["no", "tensor"]


def test_a_model_that_is_watched():
    model = Block()
    model.top, model.typed = torch.ones(1), torch.ones(1)
    with comm.as_rank(MESH, 0, CheckBackend()), SpmdTypeMode() as mode:
        spmd.assert_type(model.typed, {"tp": V})
        mode.watch(nn.Sequential(model))
        assert [type_of(x) for x in (model.mask, model.table, model.top)] == [EQUAL] * 3
        assert type_of(model.typed).get("tp") is V, "what has a type keeps it"
        assert type_of(model.inner.weight) is None, "of parameters the layout says the type, when they are used"
        names = [x.__dict__.get(NAME) for x in (model.mask, model.table, model.inner.weight, model.typed)]
        assert names == ["0.mask", "0.table", "0.inner.weight", None]
        assert mode.modules[id(model.inner)] == "0.inner"
        assert note_of(model.mask).session == mode.session
        model.mask.add(1)
    module = Block()
    with SpmdTypeMode(MESH) as mode:
        mode.watch(module)
        assert module.mask.__dict__[NAME] == "mask"


def test_gradients_of_a_watched_model_are_adopted(mode):
    with spmd.no_typecheck():
        model = nn.Linear(2, 2)
    mode.watch(model)
    model.weight.grad = torch.ones(2, 2)
    assert type_of(model.weight.grad) is not None
    with spmd.no_typecheck():
        model.weight.grad, model.bias.grad = torch.ones(2, 2), None
    mode.adopt_gradients()
    with torch._C.DisableTorchFunction():
        assert type_of(model.weight.grad).get("tp") is I


def test_the_axes_of_a_mode(mode):
    assert mode.atoms(("pp", "dp", "cp", "tp")) == ("pp", "dp", "tp") and mode.atoms("tp") == ("tp",)
    assert mode.data_axes() == ("dp",)
    sharded = TensorType.of({"tp": S(0)}, R)
    assert mode.axes_of(sharded) == ["dp", "pp", "tp"]
    assert mode.named(sharded).types == {"pp": R, "dp": R, "tp": S(0)}
    assert mode.named(UNIFORM_TYPE).types == dict.fromkeys(("pp", "dp", "tp"), R)
    assert mode.named(ZERO_TYPE).types == dict.fromkeys(("pp", "dp", "tp"), ZERO_TYPE.rest)
    unnamed = TensorType.of({"tp": V})
    assert mode.named(unnamed) is unnamed
    alone = SpmdTypeMode()
    assert alone.atoms(("dp", "tp")) == () and alone.data_axes() == () and alone.axes_of(sharded) == ["tp"]
    assert SpmdTypeMode({"dp": 2, "tp": 4}).mesh.size("tp") == 4
    with pytest.raises(ValueError, match="level must be 'G' .* got 'X'"):
        SpmdTypeMode(level="X")


def test_the_type_of_a_gradient_has_the_scale_of_its_loss(mode):
    mode.gradient_scales = {"tp": 1, "dp": -1}
    types = mode.gradient_type(TensorType.of({"tp": I, "dp": V}, I))
    assert types.get("tp") is scaled(I, 1) and types.get("dp") is scaled(V, -1) and types.get("pp") is I


def test_trials_leave_no_trace(mode):
    mode.assume("before")
    mode.trust("before")
    x = torch.ones(2)
    counts, number = (mode.operators, mode.collectives), mode.num_assumptions
    with pytest.raises(RuntimeError), mode.trial():
        assert mode.probing == 1
        mode.assume("inside")
        mode.trust("inside")
        comm.all_reduce(x * 2, "tp")
        raise RuntimeError
    assert (mode.operators, mode.collectives) == counts and mode.probing == 0
    assert [text for text, _ in mode.assumed] == ["before"] and [text for text, _ in mode.trusted] == ["before"]
    assert mode.num_assumptions > number, "what was judged meanwhile is not cached"
    mode.assume("before")
    assert sum(mode.assumed.values()) == 2
    backend = comm.current().backend
    with mode.unwatched():
        assert backend.silent
    assert not backend.silent
    with mode.pause():
        assert mode.paused == 1
        assert note_of(x * 2) is None
    assert mode.paused == 0


# --- what decides about a call besides its key ---

W, E = TensorType.of({"tp": V}, R), TensorType.of({"tp": R}, R)
KEYS = {
    "relu of what is equal": (torch.relu, [E], [], None),
    "relu of what varies": (torch.relu, [W], [], None),
    "relu of a shard": (torch.relu, [TensorType.of({"tp": S(0)}, R)], [], "shapes dtypes"),
    "relu of ones": (torch.relu, [UNIFORM_TYPE], [], "shapes grads dtypes"),
    "relu of an I": (torch.relu, [TensorType.of({"tp": I}, R)], [], "grads"),
    "sum of a partial": (torch.sum, [TensorType.of({"tp": P}, R)], [], "dtypes"),
    "mul of a partial": (torch.mul, [TensorType.of({"tp": P}, R)], [0.3], None),
    "mul of a partial by a size": (torch.mul, [TensorType.of({"tp": P}, R)], [2], "mesh"),
    "mul of a partial by one over a size": (torch.mul, [TensorType.of({"tp": P}, R)], [0.5], "mesh"),
    "cat": (torch.cat, [E], [], "shapes grads dtypes"),
    "expand": (Tensor.expand, [E], [], "shapes dtypes"),
    "randn": (torch.randn, [], [], "random"),
    "dropout": (torch.nn.functional.dropout, [E], [], "random"),
    "select of a shard": (torch.select, [TensorType.of({"tp": S(0)}, R)], [], "shapes dtypes parameters"),
    "select of what is equal": (torch.select, [E], [], None),
}


@pytest.mark.parametrize("name", KEYS)
def test_extra_keys(mode, name):
    function, types, items, words = KEYS[name]
    extra_key = extra_key_of(RULES[function], types, items)
    assert (" ".join(field for field in ExtraKey._fields if getattr(extra_key, field)) if extra_key else None) == words


def test_values_of_extra_keys(mode):
    x, size = torch.ones(2, 3, requires_grad=True), comm.size("tp")
    assert extra_key_of(RULES[torch.mul], [E], [x, size]).mesh and extra_key_of(RULES[torch.mul], [E], [x, 2]) is None
    values = extra_values(ExtraKey(True, True, True, False, True, True), [x, 4, nn.Parameter(x.detach())], mode)
    assert values == (
        ExtraKey,
        True,
        *(torch.Size([2, 3]), True, torch.float32, False),
        *(torch.Size([2, 3]), True, torch.float32, True),
        mode.mesh,
    )
    with torch.no_grad():
        assert extra_values(ExtraKey(False, True, False, False, False, False), [x], mode) == (ExtraKey, False, True)
    (_, drawn) = extra_values(ExtraKey(False, False, False, True, False, False), [x], mode)
    assert drawn[1] == ("pp", "dp", "tp")


def test_entries_are_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(memo, "SIZE", 2)
    entries = {}
    for number in range(3):
        store(entries, (number,), CachedJudgement(E, "relu"))
        assert len(entries) == (1, 2, 1)[number] and (number,) in entries


def test_what_an_entry_does_besides_its_types():
    assert not CachedJudgement(E, "relu").has_effects
    for effect in (dict(born={"tp": "sum"}), dict(assumed=("it",)), dict(written=True)):
        assert CachedJudgement(E, "relu", **effect).has_effects, effect


def test_a_rule_that_is_registered_again_counts(mode):
    def twice(x: Tensor) -> Tensor:
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(twice, (x,), x)
        return x + x

    with spmd.no_typecheck():
        x = torch.ones(2)
    spmd.assert_type(x, {"tp": P, "dp": R, "pp": R})
    try:
        spmd.register_rule(twice, kind="pass")(None)
        assert type_of(twice(x)) is None
        spmd.register_rule(twice, linear=((0,),))(lambda x: RULES[torch.neg].spec(x))
        assert type_of(twice(x)).get("tp") is P
    finally:
        RULES.pop(twice, None)
