"""The whole model as each stage sees it: every question, with every argument; loading, moving, and filling."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline.cut.placement import Placement
from neuronx_dist.pipeline.stage_module import StageModule

FILE = Path(__file__).parent / "stage_module.txt"


class Inner(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, size)
        self.register_buffer("count", torch.full((size,), float(size)))


class Whole(nn.Module):
    """`first` and `last` share a weight, `alias` is another name of `second`; `own` and `scale` are of nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("none", None)
        self.first = nn.Linear(2, 2, bias=False)
        self.group = nn.Sequential(Inner(3), Inner(4))
        self.alias = self.group[1]
        self.empty = nn.Dropout()
        self.last = nn.Linear(2, 2)
        self.last.weight = self.first.weight
        self.last.bias.requires_grad_(False)


def _at(*stages: int) -> frozenset[int]:
    return frozenset(stages)


PLACEMENT = Placement(
    leaves={"first": _at(0), "group.0": _at(0), "group.1": _at(1), "alias": _at(1), "last": _at(1)},
    direct={"own": _at(0)},
)


def staged(stage: int, model: nn.Module | None = None) -> StageModule:
    module = StageModule(model or Whole(), stage=stage, num_stages=2, last_stage=1)
    module.place(PLACEMENT)
    return module


def on_stage(stage: int, use: Callable[[StageModule], Any], model: nn.Module | None = None) -> Any:
    with comm.as_rank(Mesh(2, pp=2), stage):
        return use(staged(stage, model))


def names(pairs: Any) -> list[str]:
    return [name for name, _ in pairs]


QUESTIONS: dict[str, Callable[[StageModule], Any]] = {
    "parameters": lambda m: m.local_named_parameters(),
    "parameters, of all names": lambda m: m.local_named_parameters(remove_duplicate=False),
    "parameters, p": lambda m: m.local_named_parameters("p"),
    "own parameters": lambda m: m.local_named_parameters(recurse=False),
    "buffers": lambda m: m.local_named_buffers(),
    "buffers, p, of all names": lambda m: m.local_named_buffers("p", remove_duplicate=False),
    "own buffers": lambda m: m.local_named_buffers(recurse=False),
    "modules": lambda m: m.local_named_modules(),
    "modules, p": lambda m: m.local_named_modules(prefix="p"),
    "modules, of all names": lambda m: m.local_named_modules(remove_duplicate=False),
    "modules but one": lambda m: m.local_named_modules(memo={m.original_module.group}),
    "children": lambda m: m.local_named_children(),
    "state": lambda m: m.local_state_dict().items(),
    "state, p": lambda m: m.state_dict(prefix="p.").items(),
    "whole parameters": lambda m: m.named_parameters(),
    "whole own parameters, p": lambda m: m.named_parameters("p", False),
    "whole parameters, of all names": lambda m: m.named_parameters(remove_duplicate=False),
    "whole buffers": lambda m: m.named_buffers(),
    "whole own buffers, p": lambda m: m.named_buffers("p", False),
    "whole buffers, of all names": lambda m: m.named_buffers(remove_duplicate=False),
}


def test_answers_are_as_reviewed() -> None:
    """`stage_module.txt` has them, by stage; NXD_UPDATE_STAGES=1 writes it anew."""
    now = []
    for stage, (question, ask) in itertools.product((0, 1), QUESTIONS.items()):
        module = on_stage(stage, lambda module: module)
        assert module.placement_is_open
        with comm.as_rank(Mesh(2, pp=2), stage):
            now.append(f"stage {stage}, {question}: {' '.join(name or '-' for name in names(ask(module)))}")
        assert not module.placement_is_open  # who asks may keep what it gets
    if os.environ.get("NXD_UPDATE_STAGES"):
        FILE.write_text("\n".join(now) + "\n")
    assert now == FILE.read_text().splitlines()


def test_what_is_local_without_names() -> None:
    def use(module: StageModule) -> None:
        for ask, named in (
            (module.local_parameters, module.local_named_parameters),
            (module.local_buffers, module.local_named_buffers),
            (module.local_modules, module.local_named_modules),
            (module.local_children, module.local_named_children),
        ):
            assert [*map(id, ask())] == [id(x) for _, x in named()]  # type: ignore[operator]
        assert len([*module.local_parameters(recurse=False)]) == len([*module.local_named_parameters(recurse=False)])
        assert len([*module.local_buffers(recurse=False)]) == 1

    on_stage(0, use)
    on_stage(1, use)


def test_what_other_stages_hold_is_on_meta_once_the_placement_is_closed() -> None:
    for stage in (0, 1):
        model = Whole()
        before = dict(model.named_parameters(remove_duplicate=False))
        frozen = {name for name, param in before.items() if not param.requires_grad}

        def use(module: StageModule, stage: int = stage, before: Any = before, frozen: Any = frozen) -> None:
            local = set(names(module.local_named_parameters(remove_duplicate=False)))
            for name, param in module.original_module.named_parameters(remove_duplicate=False):
                tied = name in ("first.weight", "last.weight")
                assert param.is_meta == (name not in local and not tied), name
                assert (param is before[name]) == (not param.is_meta) and param.shape == before[name].shape
                assert param.requires_grad == (name not in frozen)
            whole = module.original_module
            assert whole.alias is whole.group[1] and whole.first.weight is whole.last.weight
            assert module.device.type == "cpu" and module.is_last_stage() == (stage == 1)
            assert (module.pipeline_parallel_rank, module.pipeline_parallel_size) == (stage, 2)
            assert module.original_torch_module is whole and module.partitioned
            (tied_group,) = module.tied_groups()
            assert tied_group[0] is whole.first.weight and tied_group[1].ranks == (0, 1)
            assert getattr(whole.first.weight, "shared", False) == (stage == 1)  # the first one counts
            assert module.own is whole.own
            with pytest.raises(AttributeError, match="nothing"):
                _ = module.nothing

        on_stage(stage, use, model)


def test_another_placement_takes_the_place_of_an_open_one() -> None:
    model = Whole()
    before = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())

    def use(module: StageModule) -> None:
        module.tied_weights_synced = True
        everything = frozenset([0])
        module.place(Placement(dict.fromkeys(PLACEMENT.leaves, everything), {"own": everything}))
        assert module.placement_is_open and not module.tied_weights_synced
        assert module.tied_groups() == [] and not hasattr(model.first.weight, "shared")
        after = dict(module.original_module.named_parameters(remove_duplicate=False))
        assert all(param is before[name] for name, param in after.items())
        assert all(buffer is buffers[name] for name, buffer in module.original_module.named_buffers())

    with comm.as_rank(Mesh(2, pp=2), 0):
        use(staged(0, model))


# --- loading


def test_keys_that_do_not_fit() -> None:
    state = Whole().state_dict()

    def use(module: StageModule) -> None:
        assert module.load_state_dict(state) == ([], [])
        with pytest.raises(RuntimeError) as error:
            module.load_state_dict({**state, "z": torch.ones(1), "a": torch.ones(1)})
        assert str(error.value) == "load_state_dict of stage 0: missing none, unexpected ['a', 'z']"
        part = {key: value for key, value in state.items() if key not in ("own", "group.0.count", "last.bias")}
        with pytest.raises(RuntimeError) as error:
            module.load_state_dict(part)
        assert str(error.value) == "load_state_dict of stage 0: missing ['own', 'group.0.count'], unexpected none"
        result = module.load_state_dict({**part, "a": torch.ones(1)}, strict=False)
        assert result.missing_keys == ["own", "group.0.count"] and result.unexpected_keys == ["a"]

    on_stage(0, use)


@pytest.mark.parametrize("assign", [False, True])
def test_a_tied_weight_is_loaded_by_any_of_its_names_and_stays_one(assign: bool) -> None:
    state = {key: torch.full_like(value, 7.0) for key, value in Whole().state_dict().items()}
    del state["last.weight"]
    for key in ("alias.linear.weight", "alias.linear.bias"):
        del state[key]

    def use(module: StageModule) -> None:
        weight = module.original_module.last.weight
        module.load_state_dict(state, assign=assign)
        whole = module.original_module
        for name, tensor in module.local_state_dict().items():
            assert torch.equal(tensor, torch.full_like(tensor, 7.0)), name
        assert whole.first.weight is whole.last.weight and (whole.last.weight is weight) == (not assign)
        assert whole.alias.linear.weight is whole.group[1].linear.weight
        assert whole.group[0].linear.weight.is_meta and not whole.last.bias.is_meta

    on_stage(1, use)


# --- values and moves


def test_a_function_fills_what_is_on_meta_module_by_module() -> None:
    filled: list[str] = []

    def fill(module: nn.Module) -> None:
        filled.append(type(module).__name__)
        with torch.no_grad():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and not tensor.is_meta:
                    tensor.fill_(3.0)

    def use(module: StageModule) -> None:
        with pytest.raises(RuntimeError, match="^parameter own of stage 0 is on the meta device: give it"):
            module.refuse_meta()
        params = dict(module.original_module.named_parameters())
        module.initialize(fill)
        module.refuse_meta()
        assert filled == ["Whole", "Linear", "Inner", "Linear"] and module.placement_is_open
        for name, param in module.local_named_parameters():
            assert param is params[name] and torch.equal(param, torch.full_like(param, 3.0)), name
        assert all(torch.equal(buffer, torch.full_like(buffer, 3.0)) for buffer in module.local_buffers())
        assert params["group.1.linear.weight"].is_meta and params["last.bias"].is_meta
        filled.clear()
        module.initialize(fill)
        assert filled == []  # nothing is on meta any more

    with torch.device("meta"):
        model = Whole()
    with comm.as_rank(Mesh(2, pp=2), 0):
        use(staged(0, model))


def test_a_dtype_is_changed_everywhere_and_a_device_here_alone() -> None:
    def use(module: StageModule) -> None:
        whole = module.original_module
        whole.group[1].linear.weight.mark = "kept"
        params = dict(whole.named_parameters(remove_duplicate=False))
        assert module.double() is module and not module.placement_is_open
        assert {param.dtype for param in whole.parameters()} == {torch.float64}
        assert {buffer.dtype for buffer in whole.buffers()} == {torch.float64}
        assert whole.group[1].linear.weight.is_meta and not whole.own.is_meta
        assert whole.group[1].linear.weight.mark == "kept"
        assert dict(whole.named_parameters(remove_duplicate=False)).keys() == params.keys()
        module.to("meta")
        assert all(param.is_meta for param in whole.parameters()) and module.device.type == "meta"
        assert whole.first.weight is whole.last.weight and whole.alias is whole.group[1]

    on_stage(0, use)


def test_before_it_is_placed() -> None:
    module = StageModule(Whole(), stage=0, num_stages=2, last_stage=1)
    for ask in (lambda: [*module.local_parameters()], lambda: module.is_local("own")):
        with pytest.raises(RuntimeError, match="this model is not partitioned: its local parameters are known after"):
            ask()
    with pytest.raises(RuntimeError, match="register_shared_weights: call partition"):
        module.register_shared_weights()
    module.close_placement()
    assert module.placement_is_open and not module.partitioned
    assert module.half() is module and module.own.dtype == torch.float16 and module.placement_is_open
    assert len(names(module.named_parameters())) == 7


@pytest.mark.parametrize(
    "wrap, name", [(lambda m: m, ""), (lambda m: nn.Sequential(nn.ReLU(), m), "1"), (lambda m: nn.Sequential(m), "0")]
)
def test_compiled_modules_are_refused(wrap: Callable[[nn.Module], nn.Module], name: str) -> None:
    compiled = nn.Module()
    compiled.add_module("_orig_mod", nn.Linear(2, 2))
    with pytest.raises(ValueError) as error:
        StageModule(wrap(compiled), stage=0, num_stages=1, last_stage=0)
    assert str(error.value).startswith(f"{name or 'the model'} is the result of torch.compile(module)")
