"""Fake tensors, with shapes and without values, in the place of the tensors of a model and of its optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from ...spmd.tensor_type import TensorType, type_of
from ...torch_internals.fake_tensors import LOGGER, FakeTensor, FakeTensorMode
from ...torch_internals.tensors import backward_hooks, has_storage, post_accumulate_hooks, pytree, storage_key
from ...weights.partial_model import is_partial, join, partial_model, unwrapped

__all__ = ["MadeLike", "built_anew", "fake_inputs", "make_fake", "no_messages", "optimizers_of"]

_LIBRARIES = {"torch", "builtins", "transformers", "neuronx_dist"}
_OF_MODULES = {*nn.Module().__dict__}  # that every module has


@contextmanager
def no_messages() -> Iterator[None]:
    """Keeps torch from logging calls whose shapes do not fit: they are reported, and tried again to explain them."""
    logger = logging.getLogger(LOGGER)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def built_anew(build: Callable[[], Any], *, with_values: bool = False) -> Any:
    """Returns the result of `build`, a module or `(module, optimizer)`; a copy if the module existed before the call.

    A check plays each rank with a model of its own, and leaves existing modules as they are.

    Args:
        with_values: copy the values of parameters and buffers too; else the copy has the same tensors.

    Raises:
        TypeError: the module existed before, and cannot be copied.
    """
    new: set[int] = set()
    hook = register_module_parameter_registration_hook(lambda module, name, param: new.add(id(param)))
    try:
        built = build()
    finally:
        hook.remove()
    model = unwrapped(built[0] if isinstance(built, tuple) and built else built)
    if not isinstance(model, nn.Module) or all(id(param) in new for param in model.parameters()):
        return built
    tensors = {} if with_values else {id(x): x for x in (*model.parameters(), *model.buffers())}
    try:
        return deepcopy(built, tensors)
    except Exception as error:
        raise TypeError(
            f"model_fn returned a {type(model).__name__} that existed before, and cannot be copied ({error}): build "
            "the module in model_fn, which is called for each rank"
        ) from error


def make_fake(
    model: nn.Module, optimizer: Any, mode: FakeTensorMode, device: torch.device
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Puts fake tensors on `device` in the place of parameters, buffers and other tensors of the modules.

    In a pipeline model only this stage gets fakes; modules of other stages stay on meta. Ties, attributes and hooks
    stay. An optimizer that exists already gets the new parameters, and fakes in the place of its own tensors.

    Returns:
        `(old, new)` by id of the old tensor.
    """
    fakes = _Fakes(mode, device)
    part = partial_model(model)
    full_model, has_others = part.original_module, is_partial(model)
    for prefix, module in full_model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and part.is_local(join(prefix, name)):
                    table[name] = fakes.of(tensor)
    # A tied weight has several names, and a plain attribute may be a buffer under another one.
    for module in full_model.modules():
        for table in (module._parameters, module._buffers, module.__dict__):
            for name, value in table.items():
                if isinstance(value, torch.Tensor) and id(value) in fakes.made:
                    table[name] = fakes.of(value)
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and _is_alone(value, has_others):
                module.__dict__[name] = fakes.of(value)
            elif name not in _OF_MODULES:
                module.__dict__[name] = fakes.inside(value)
    for _, param in [*fakes.made.values()]:
        param.__dict__.update((name, fakes.inside(value)) for name, value in param.__dict__.items())
    held = [value for module in full_model.modules() for value in vars(module).values()]
    for wrapped in optimizers_of(optimizer, *(value for value in held if isinstance(value, torch.optim.Optimizer))):
        for group in wrapped.param_groups:
            group["params"] = [fakes.of(param) for param in group["params"]]
        _replace(wrapped.__dict__, fakes)
        wrapped.state = type(wrapped.state)(
            wrapped.state.default_factory, {fakes.known(key): value for key, value in wrapped.state.items()}
        )
        for state in wrapped.state.values():
            _replace(state, fakes)
    return fakes.made


def _is_alone(value: torch.Tensor, has_others: bool) -> bool:
    """Returns whether an attribute is to get a fake; a large meta tensor of a partial model is left as it is."""
    return not has_others or not value.is_meta or value.numel() < 2**16


def optimizers_of(*optimizers: Any) -> Iterator[Any]:
    """Yields optimizers and the optimizers that they wrap, whatever the name of the attribute."""
    seen: set[int] = set()
    pending = [optimizer for optimizer in optimizers if optimizer is not None]
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        pending += [value for value in vars(current).values() if isinstance(value, torch.optim.Optimizer)]


def fake_inputs(inputs: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    """Fakes of the tensors in `inputs`, in the same containers; all else stays."""
    fakes = _Fakes(mode, device)
    return pytree.tree_map_only(torch.Tensor, fakes.of, inputs)


class _Fakes:
    """Makes one fake for each tensor; a part of a contiguous tensor that has a fake becomes that part of the fake."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode = mode
        self.device = device
        self.made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._new: set[int] = set()
        self._seen: dict[int, tuple[Any, Any]] = {}  # containers, and what `inside` returned
        self._by_storage: dict[int, torch.Tensor] = {}  # the first tensor of each

    def known(self, x: Any) -> Any:
        """The fake of a tensor that has one, else the argument itself."""
        return self.made[id(x)][1] if id(x) in self.made else x

    def of(self, x: torch.Tensor) -> Any:
        if id(x) in self._new or (isinstance(x, FakeTensor) and x.fake_mode is self.mode):
            return x
        if id(x) not in self.made:
            with self.mode, torch.no_grad():
                fake = self._part(x)
                if fake is None:
                    fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device)
            if isinstance(x, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=x.requires_grad)
            else:
                fake.requires_grad_(x.requires_grad)
            fake.__dict__.update({key: value for key, value in x.__dict__.items() if key not in fake.__dict__})
            for hook in (post_accumulate_hooks(x) or {}).values():
                fake.register_post_accumulate_grad_hook(hook)
            for hook in (backward_hooks(x) or {}).values():
                fake.register_hook(hook)
            self.made[id(x)] = (x, fake)
            self._new.add(id(fake))
        return self.made[id(x)][1]

    def inside(self, value: Any, depth: int = 4, shared: bool = False) -> Any:
        """The value, with fakes in its containers: lists, tuples, dicts, their keys too, objects, closures.

        A closure may be shared with a model that existed before the check: only tensors on meta get fakes there.
        """
        if isinstance(value, torch.Tensor):
            known = id(value) in self.made and not shared
            return self.of(value) if not isinstance(value, FakeTensor) and (value.is_meta or known) else value
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        if depth == 0 or isinstance(value, (str, type, nn.Module, torch.optim.Optimizer)):
            return value
        self._seen[id(value)] = value, value
        if type(value) is tuple:
            result = tuple(self.inside(item, depth - 1, shared) for item in value)
            if any(a is not b for a, b in zip(result, value)):
                self._seen[id(value)] = value, result
                return result
        elif isinstance(value, list):
            value[:] = [self.inside(item, depth - 1, shared) for item in value]
        elif isinstance(value, dict):
            keys, items = ([self.inside(x, depth - 1, shared) for x in part] for part in (value, value.values()))
            if any(a is not b for a, b in zip([*keys, *items], [*value, *value.values()])):
                value.clear()
                value.update(zip(keys, items))
        elif isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # it is empty
                    cell.cell_contents = self.inside(cell.cell_contents, depth - 1, True)
        elif hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in _LIBRARIES:
            self.inside(value.__dict__, depth, shared)
        return value

    def _part(self, x: torch.Tensor) -> torch.Tensor | None:
        """A fake view for `x`, where `x` is a row range of another tensor's storage: a master of its parameter, say."""
        if not has_storage(x) or not x.numel():
            return None
        whole = self._by_storage.setdefault(storage_key(x.untyped_storage()), x)
        begin = x.storage_offset() - whole.storage_offset()
        fits = whole.is_contiguous() and x.is_contiguous() and 0 <= begin <= whole.numel() - x.numel()
        if whole is x or x.dtype != whole.dtype or not fits:
            return None
        fake: torch.Tensor = self.made[id(whole)][1]
        return fake.detach().view(-1)[begin : begin + x.numel()].view(x.shape)


class MadeLike(TorchFunctionMode):
    """Records which tensors a program makes from another one of equal shape: `zeros_like(p)`, `p.detach().clone()`."""

    _FUNCTIONS = {
        torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, torch.clone, torch.detach,
        *(getattr(torch.Tensor, name) for name in "clone detach float double half bfloat16 contiguous".split()),
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[int, tuple[torch.Tensor, Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._FUNCTIONS and id(result) not in self._calls and result is not args[0]:
            self._calls[id(result)] = (result, func, args, kwargs or {})
        return result

    def types(self, fakes: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, TensorType]]:
        """Returns the fakes of those that begin with a parameter, with the types that the calls give them."""
        found = []
        for old, fake in fakes.values():
            if id(old) in self._calls and not isinstance(old, nn.Parameter):
                again = self._repeated(old, fakes)
                type_ = None if again is None else type_of(again)
                if type_ is not None:
                    found.append((fake, type_))
        return found

    def _repeated(self, x: Any, fakes: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """The result of the calls that made `x`, on the fake of their first tensor; None: it is no parameter."""
        if isinstance(x, nn.Parameter):
            return fakes[id(x)][1] if id(x) in fakes else None
        if id(x) not in self._calls:
            return None
        _, func, args, kwargs = self._calls[id(x)]
        source = self._repeated(args[0], fakes)
        return None if source is None else func(source, *args[1:], **kwargs)


def _replace(table: Any, fakes: _Fakes, depth: int = 4) -> None:
    """Puts fakes into an optimizer's own attributes: lists, dicts, and objects of our and of users' classes."""
    if depth == 0:
        return
    items = table.items() if isinstance(table, dict) else enumerate(table)
    for key, value in list(items):
        if isinstance(value, torch.Tensor):
            table[key] = fakes.of(value)
        elif isinstance(value, (dict, list)):
            _replace(value, fakes, depth - 1)
        elif isinstance(value, (torch.optim.Optimizer, type, str)) or callable(value):
            continue
        elif hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in ("torch", "builtins"):
            _replace(value.__dict__, fakes, depth - 1)
