"""Private names of torch: only `neuronx_dist.torch_internals` uses them, and each of them exists in this torch."""

from __future__ import annotations

import ast
import inspect
import operator
import pydoc
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed import _state_dict_utils
from torch.distributed.algorithms.model_averaging import utils as averaging
from torch.distributed.checkpoint import filesystem, state_dict
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

import neuronx_dist
from neuronx_dist.torch_internals import (
    autograd,
    data_parallel,
    distributed,
    dual_numbers,
    fake_tensors,
    modules,
    operators,
    tensors,
    transforms,
    weight_norms,
)
from tests.support.sources import nodes_of, tree_of

PACKAGE = Path(neuronx_dist.__file__).parent
ROOM = Path(tensors.__file__).parent
MODULES = [autograd, data_parallel, distributed, dual_numbers, fake_tensors, modules, operators, tensors, transforms]
MODULES += [weight_norms]
EXTENDED = {name for names in modules.EXTENDED.values() for name in names}
# Private names of transformers' models, and of Python's named tuples, that `getattr` looks for.
OF_OTHERS = {"_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_tp_plan", "_no_split_modules"}
OF_OTHERS |= {"_init_weights", "_fields", "_hf_hook", "_is_stateful"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def wrapped_names() -> set[str]:
    """Private names that the room uses, as attributes and in strings."""
    names = set()
    for path in ROOM.glob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                names.add(node.value)
    return {name for name in names if is_private(name)} - EXTENDED


def owned_names() -> set[str]:
    """Private attributes of tensors, storages, nodes, operators and groups: those that torch's classes have."""
    x = torch.zeros(2, requires_grad=True)
    holders = [x, x.untyped_storage(), x.exp().grad_fn, nn.Linear(1, 1), torch.ops.aten.add, torch.ops.aten.add.Tensor]
    holders += [torch.optim.SGD([x]), dist.ProcessGroup]
    return {name for holder in holders for name in dir(holder) if is_private(name)} - EXTENDED


def defined_names() -> set[str]:
    """Private names that a file of the package assigns or defines."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        if ROOM in path.parents:
            continue
        for node in nodes_of(path):
            if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
                names.add(ast.unparse(node.args[1]).strip("'"))
    return names


def private_uses(tree: ast.AST, attributes: set[str], ours: set[str] | None = None) -> Iterator[tuple[int, str]]:
    """Private names of torch in a file, with their lines: by import, below torch's modules, or by an attribute's name.

    Attributes of `self` and `cls` are the file's own, and so are those that it sets there and reads elsewhere. With
    `ours` a string of `getattr` and its like is one of these names, or torch's.
    """
    roots, local = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    roots.add((alias.asname or alias.name).split(".")[0])
                    if any(map(is_private, alias.name.split("."))):
                        yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            for alias in node.names:
                roots.add(alias.asname or alias.name)
                if any(map(is_private, [*(node.module or "").split("."), alias.name])):
                    yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            local.add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.AnnAssign)):
            local.add(node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node.target))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            of_torch = ours is not None and name not in ours
        elif isinstance(node, ast.Attribute):
            base: ast.expr = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            name, of_torch = node.attr, isinstance(base, ast.Name) and base.id in roots
        elif isinstance(node, ast.keyword) and node.arg:
            name, of_torch = node.arg, False  # `Replacement(module, _name=...)`
        else:
            continue
        if is_private(name) and (of_torch or (name in attributes and name not in local)):
            yield node.lineno, ast.unparse(node)


def test_only_this_room_names_what_is_private_to_torch():
    attributes = wrapped_names() | owned_names()
    assert {"_version", "_base", "_backward_hooks", "_call_impl", "_schema", "_input_metadata"} < attributes
    ours = defined_names() | OF_OTHERS
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if ROOM not in path.parents
        for line, name in private_uses(tree_of(path), attributes, ours)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch.utils._pytree as pytree",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from torch.autograd.function import _HookMixin",
        "import torch\ntorch._C.DisableTorchFunction()",
        "import torch.distributed as dist\ndist.distributed_c10d._world.pg_map",
        "def f(x):\n    return x._version",
        "def f(x):\n    return getattr(x, '_backward_hooks', None)",
        "def f(x):\n    return getattr(x, '_a_name_that_the_room_does_not_wrap', None)",
        "Replacement(checkpoint, _checkpoint_hook=None)",
    ],
)
def test_a_private_name_elsewhere_is_seen(line):
    assert len([*private_uses(ast.parse(line), wrapped_names(), OF_OTHERS)]) >= 1


@pytest.mark.parametrize("owner", modules.EXTENDED)
def test_what_our_classes_extend_exists(owner):
    cls: Any = pydoc.locate(owner)
    members = {*dir(cls), *(vars(cls()) if cls is nn.Module else ())}
    assert set(modules.EXTENDED[owner]) <= members


class Double(torch.autograd.Function):
    splits_backward = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def tensors_case() -> None:
    x, hooked = torch.zeros(4), leaf()
    assert tensors.state_dict_metadata(nn.BatchNorm1d(2).state_dict())[""]["version"] == 2
    assert tensors.state_dict_metadata({}) == {}
    assert tensors.version_of(x) + 1 == tensors.version_of(x.add_(1))
    assert tensors.is_view(x[1:]) and not tensors.is_view(x) and tensors.base_of_view(x[1:]) is x
    alone = tensors.without_base(x[1:])
    assert not tensors.is_view(alone) and alone.data_ptr() == x[1:].data_ptr()
    assert not tensors.backward_hooks(hooked) and not tensors.post_accumulate_hooks(hooked)
    hooked.register_hook(lambda grad: grad)
    hooked.register_post_accumulate_grad_hook(lambda param: None)
    assert len(tensors.backward_hooks(hooked) or ()) == len(tensors.post_accumulate_hooks(hooked) or ()) == 1
    assert tensors.storage_key(x.untyped_storage()) == tensors.storage_key(x[1:].untyped_storage())
    assert tensors.has_storage(x) and tensors.is_alias_of(x, x[1:]) and not tensors.is_alias_of(x, x.clone())
    assert tensors.dispatch_keys(x) == tensors.dispatch_keys(x.clone())


def modules_case() -> None:
    layer = nn.BatchNorm1d(2)
    layer.register_buffer("passing", torch.zeros(1), persistent=False)
    assert modules.non_persistent_buffers(layer) == {"passing"}
    assert not modules.has_forward_hooks(layer)
    layer.register_forward_pre_hook(lambda *args: None).remove()
    assert not modules.has_forward_hooks(layer)
    handle = layer.register_forward_hook(lambda *args: None)
    assert modules.has_forward_hooks(layer)
    handle.remove()
    assert modules.call_with_hooks(nn.Identity())(3) == 3
    called: list[Any] = []
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    registers = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
    handles = [getattr(old, f"register_{register}")(lambda *args: called.append(args[0])) for register in registers]
    modules.move_hooks(old, new)
    for _ in range(2):
        new(torch.ones(1, 2, requires_grad=True)).sum().backward()
        for handle in handles:
            handle.remove()
    assert called == [new] * 4
    schedulers, optimizer = torch.optim.lr_scheduler, torch.optim.SGD([leaf()], lr=1.0)
    parts = [schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.5)]
    for outer in (schedulers.ChainedScheduler(parts), schedulers.SequentialLR(optimizer, parts, [1])):
        assert [*modules.inner_schedulers(outer)] == parts and not modules.inner_schedulers(parts[0])
    checked: list[Any] = []
    before, clip = nn.utils.clip_grad.__dict__.copy(), nn.utils.clip_grad_norm_
    modules.before_clipping(checked.append)
    try:
        x = leaf()
        x.grad = torch.ones_like(x)
        nn.utils.clip_grad_norm_([x], 0.5)
        assert checked == [[x]] and x.grad.norm() < 0.6
    finally:
        vars(nn.utils.clip_grad).update(before)
        nn.utils.clip_grad_norm_ = clip
    unscale, shared = torch.amp.GradScaler._unscale_grads_, list[tuple[Any, ...]]()
    modules.after_unscaling(lambda *found: shared.append(found))
    try:
        optimizer = torch.optim.SGD([x])
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(x.sum()).backward()
        scaler.unscale_(optimizer)
        assert shared == [(optimizer, torch.tensor(0.0))]
    finally:
        torch.amp.GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign]
    assert not modules.has_backward_hooks(layer)
    layer.register_full_backward_pre_hook(lambda module, grad: None)
    assert modules.has_backward_hooks(layer)


def weight_norms_case() -> None:
    """Functions of weights that are put on modules, by the functions of torch.nn.utils that put them there."""
    utils, prune = nn.utils, nn.utils.prune
    seen: list[Any] = []

    @contextmanager
    def watch(module: nn.Module, name: str, method: Any) -> Iterator[None]:
        seen.append(weight_norms.OF_WHOLE_WEIGHTS.get(method if isinstance(method, type) else type(method), method))
        yield

    olds = [(utils.parametrize, "register_parametrization"), (prune, "global_unstructured")]
    olds += [(cls, "apply") for cls in (weight_norms.WeightNorm, weight_norms.SpectralNorm, prune.BasePruningMethod)]
    before = [(holder, name, vars(holder)[name]) for holder, name in olds]
    weight_norms.around_parametrizing(watch)
    try:
        norms = ("parametrizations.weight_norm", "parametrizations.spectral_norm", "parametrizations.orthogonal")
        calls: dict[str, Any] = dict.fromkeys((*norms, "weight_norm", "spectral_norm"), ())
        calls |= {f"prune.{name}_unstructured": ("weight", 0.5) for name in ("random", "l1")}
        calls |= {"prune.random_structured": ("weight", 0.5, 0), "prune.ln_structured": ("weight", 0.5, 2, 0)}
        for name, arguments in calls.items():
            with warnings.catch_warnings(action="ignore"):
                operator.attrgetter(name)(utils)(nn.Linear(2, 2), *arguments)
        assert seen == [*calls] and {*calls} == {*weight_norms.OF_WHOLE_WEIGHTS.values()}
        prune.global_unstructured([(nn.Linear(2, 2), "weight")], prune.L1Unstructured, amount=1)
        assert seen[-2:] == [before[1][2], prune.CustomFromMask]
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


def autograd_case() -> None:
    x = leaf()
    y = Double.apply(x)
    node: Any = y.grad_fn
    assert isinstance(node, autograd.FunctionNode) and not isinstance(x.exp().grad_fn, autograd.FunctionNode)
    assert autograd.function_class(node) is Double and autograd.function_class(x.exp().grad_fn) is None
    assert issubclass(autograd.backward_class(Double), autograd.FunctionNode)
    assert autograd.FunctionBase is torch.autograd.Function.__mro__[1] and "apply" not in vars(autograd.FunctionBase)
    assert autograd.saved_tensors_of(node)[0] is x
    autograd.set_needs_input_grad(node, (False,))
    assert node.needs_input_grad == (False,)
    assert [*autograd.input_metadata(node)[0].shape] == [2]
    product: Any = (x * y).grad_fn
    assert set(autograd.raw_saved_names(type(product))) == {"_raw_saved_self", "_raw_saved_other"}
    assert autograd.saved_value(product, "self") is x and autograd.saved_value(product, "mat1") is None
    assert isinstance(product.next_functions[0][0], autograd.AccumulateGrad)
    assert autograd.apply_without_transforms(Double)(x).grad_fn is not None
    seen = []
    x.register_hook(lambda grad: seen.append((autograd.in_backward(), autograd.current_node() is not None)))
    (2 * x).sum().backward()
    assert seen == [(True, True)] and not autograd.in_backward()
    assert callable(getattr(autograd.HookMixin, autograd.REGISTER_HOOK))
    assert callable(getattr(torch.utils.checkpoint, autograd.CHECKPOINT_HOOK))
    assert callable(getattr(torch.utils.checkpoint, autograd.RECOMPUTATION_HOOK))


def checkpoint_case() -> None:
    """The hook of a checkpoint, seen from inside; and the stack, unwound and put back."""

    def inside(x: torch.Tensor) -> torch.Tensor:
        pack, unpack = autograd.top_saved_tensors_hooks(False)
        assert autograd.is_checkpoint_hook(pack) and not autograd.is_checkpoint_hook(leaf)
        assert autograd.in_checkpoint() and not autograd.is_checkpoint_hook(partial(leaf))
        contexts.append(autograd.checkpoint_context(pack))
        autograd.pop_saved_tensors_hooks()
        assert autograd.top_saved_tensors_hooks(False) is None
        autograd.push_saved_tensors_hooks(pack, unpack)
        return x.exp()

    def again(x: torch.Tensor) -> torch.Tensor:
        inside_of.append(autograd.in_checkpoint())
        return x.exp()

    contexts: list[Any] = []
    torch.utils.checkpoint.checkpoint(inside, leaf(), use_reentrant=False)
    assert len(contexts) == 1 and hasattr(contexts[0], "__enter__")
    inside_of: list[bool] = []
    torch.utils.checkpoint.checkpoint(again, leaf(), use_reentrant=False).sum().backward()
    assert inside_of == [True, True] and not autograd.in_checkpoint()


def operators_case() -> None:
    add = torch.ops.aten.add
    assert isinstance(add.Tensor, operators.OpOverload) and isinstance(add, operators.OpOverloadPacket)
    assert [argument.name for argument in operators.schema_of(add.Tensor).arguments] == ["self", "other", "alpha"]
    assert operators.name_of(add) == "aten::add"
    with operators.disable_current_modes():
        pass

    def compiled(x: int) -> int:
        return x

    operators.skip_in_compiler(compiled)
    assert compiled(3) == 3
    # `neuronx_dist.comm` orders an operator of its own when it is imported.
    assert operators.keep_order is not None and len(torch.ops.neuronx_dist.all_reduce.overloads()) == 1
    scripted: Any = torch.jit.script(nn.Linear(2, 2))
    assert len([*operators.wrap_script_module(scripted._c).parameters()]) == 2

    def replacement(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("TorchScript does not call it")

    def fill(x: torch.Tensor) -> torch.Tensor:
        return x + replacement(2.0)

    operators.script_as(replacement, torch.tensor)
    filling = torch.jit.script(fill)
    assert filling(torch.ones(1)).item() == 3
    assert operators.python_function(filling) is fill and operators.python_function(scripted) is None


def fake_tensors_case() -> None:
    mode = fake_tensors.FakeTensorMode()
    with mode:
        x = torch.zeros(3)
        with fake_tensors.unset_fake_temporarily():
            assert not isinstance(torch.zeros(1), fake_tensors.FakeTensor)
    fake_tensors.guard_data_pointer(x, mode)
    with mode, pytest.raises(fake_tensors.DataDependentOutputException):
        x.sum().item()


def dual_numbers_case() -> None:
    x = torch.ones(2)
    with torch.autograd.forward_ad.dual_level():
        _, tangent = dual_numbers.unpack_dual(dual_numbers.make_dual(x, x * 3, level=0), level=0)
    assert tangent.tolist() == [3.0, 3.0]


def transforms_case() -> None:
    seen = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        wrapped, level = transforms.is_functorch_wrapped_tensor(x), transforms.level_of(x)
        seen.append((wrapped, level, transforms.is_batchedtensor(x), transforms.jvp_levels()))
        assert transforms.transforms_active() and transforms.get_unwrapped(x) is not x
        return x.exp()

    torch.vmap(inside)(torch.ones(2))
    torch.func.jvp(inside, (torch.ones(2),), (torch.ones(2),))
    assert seen == [(True, 1, True, set()), (True, 1, False, {1})] and not transforms.transforms_active()
    assert transforms.forward_mode_level() == -1 and transforms.is_forward_mode_enabled()
    assert callable(getattr(transforms.vmap_module, transforms.ADD_BATCH_DIM))
    assert callable(getattr(transforms.vmap_module, transforms.REMOVE_BATCH_DIM))
    assert callable(getattr(transforms.eager_transforms, transforms.WRAP_FOR_GRAD))
    assert callable(getattr(transforms.eager_transforms, transforms.UNWRAP_FOR_GRAD))


class Summing(dist.ProcessGroup):
    """A group in Python that sums, and does nothing else."""

    def allreduce(self, *arguments: Any) -> None:
        pass


class Refused(torch.Tensor):
    def refuse(self) -> bool:
        raise NotImplementedError("no parameter is of this class")


class OneWeight(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def distributed_case() -> None:
    """All that needs a job is used on one of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = distributed.default_group()
        assert distributed.is_registered(world) and torch.device("cpu") in distributed.device_types(world)
        assert distributed.default_store() is not None
        checked: list[Any] = []
        before = saver._stateful_to_state_dict
        distributed.before_saving(checked.append)
        with tempfile.TemporaryDirectory() as folder:
            saver.save({"x": torch.ones(2)}, checkpoint_id=folder)
        assert len(checked) == 1 and checked[0]["x"].equal(torch.ones(2))
        saver._stateful_to_state_dict = before
        flat = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True)
        assert [*map(distributed.is_flattened, flat.parameters())] == [True] * 2
        assert not distributed.is_flattened(leaf())
        distributed.before_flattening(Refused, Refused.refuse)
        with pytest.raises(NotImplementedError, match="no parameter is of this class"):
            FullyShardedDataParallel(OneWeight(torch.ones(2).as_subclass(Refused)), device_id=torch.device("cpu"))
        average = averaging.average_parameters
        distributed.before_averaging(lambda *arguments: checked.append(arguments))
        params = [nn.Parameter(torch.ones(2))]
        params[0].grad = torch.ones(2)
        averaging.average_parameters_or_parameter_groups(iter(params), world)
        averaging.average_parameters = average
        assert checked[1] == (params, world)
        assert distributed.backend_timeout(world) is not None
        group = distributed.make_group([0], "one", None, timeout=distributed.backend_timeout(world), group_desc="one")
        distributed.set_ranks(group, {0: 0})
        assert dist.get_process_group_ranks(group) == [0]
        assert distributed.python_class(world) is None and distributed.python_class(Summing(0, 1)) is Summing
        assert distributed.overrides(Summing, "allreduce") and not distributed.overrides(Summing, "send")
    finally:
        dist.destroy_process_group()
    assert operator.attrgetter("relative_path", "offset", "length")(
        distributed.storage_info(filesystem, "file", 0, 8)
    ) == ("file", 0, 8)


def data_parallel_case() -> None:
    """All that needs a job is used on one of one process."""
    replaced = ("__init__", "init_unsharded_param", "_get_grad_inner_tensor")
    before = {name: vars(FSDPParam)[name] for name in replaced}
    gather = state_dict._gather_state_dict
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        seen: list[Any] = []

        def convert(param: Any, mesh: Any) -> tuple[torch.Tensor, Any]:
            return param, lambda gathered: seen.append(gathered) or gathered

        data_parallel.before_sharding(convert)
        data_parallel.before_gathering(lambda state: seen.append(state) or state)
        module: Any = fully_shard(nn.Linear(2, 2, bias=False), mesh=DeviceMesh("cpu", [0]))
        module(torch.ones(1, 2)).sum()
        state_dict.get_model_state_dict(module, options=state_dict.StateDictOptions(full_state_dict=True))
        kinds = [type(x) for x in seen]  # the values have been freed
        assert kinds[0] is nn.Parameter and issubclass(kinds[-1], dict)
        leaf = torch.ones(2, 2, requires_grad=True)
        handle = register_module_module_registration_hook(
            lambda wrapper, name, module: data_parallel.reduce_leaves(wrapper, module, {"weight": leaf})
        )
        wrapper: Any = DistributedDataParallel(nn.Linear(2, 2, bias=False))
        handle.remove()
        assert wrapper.parameters_to_ignore == {"weight"} and wrapper._build_params_for_reducer() == ([leaf], [False])
    finally:
        dist.destroy_process_group()
        for name, member in before.items():
            setattr(FSDPParam, name, member)
        state_dict._gather_state_dict = _state_dict_utils._gather_state_dict = gather


CASES = {
    tensors: [tensors_case],
    data_parallel: [data_parallel_case],
    modules: [modules_case],
    autograd: [autograd_case, checkpoint_case],
    operators: [operators_case],
    fake_tensors: [fake_tensors_case],
    transforms: [transforms_case],
    dual_numbers: [dual_numbers_case],
    distributed: [distributed_case],
    weight_norms: [weight_norms_case],
}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_name_is_there_and_does_what_its_comment_says(module: ModuleType) -> None:
    """Importing the module resolves its constants; the cases call its functions, all of them."""
    for case in CASES[module]:
        case()
    functions = {name for name, value in vars(module).items() if inspect.isfunction(value)}
    defined = {name for name in functions if vars(module)[name].__module__ == module.__name__ and name[0] != "_"}
    used = {name for case in CASES[module] for name in case.__code__.co_names} | {
        name for case in CASES[module] for code in case.__code__.co_consts for name in getattr(code, "co_names", ())
    }
    assert defined <= used
