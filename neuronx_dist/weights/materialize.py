"""Initial weights that do not depend on the layout, for a model that was built on the meta device.

    with torch.device("meta"):
        model = MyModel()            # parallel layers inside, nothing drawn, nothing allocated
    materialize(model, seed=0)       # the same weights at any TP x PP x DP

Each parameter is drawn whole, by the initialiser that its module would have had unsharded, from a generator seeded by
(seed, qualified name); this rank keeps its slice. A parameter with several names (tied embeddings) is drawn once,
under the first of them in the *whole* model, so that two pipeline stages that hold one weight agree about it.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from .partial_model import buffer_slots, install_parameter, join, parameter_names, parameter_slots, partial_model
from .shard_spec import spec_of

__all__ = ["fill", "initialize_modules", "materialize", "materialize_buffers", "seed_of"]

Initialiser = Callable[[nn.Module], Any]

# torch's initialisers draw from the one global CPU generator, which ranks that are threads of one process share.
_GENERATOR = threading.Lock()


def materialize(
    model: nn.Module,
    seed: int,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    init_fn: Initialiser | None = None,
) -> nn.Module:
    """Gives every parameter and buffer that is still on the meta device its initial value, in place.

    Values are drawn on the CPU in float32, whatever `device` and `dtype`, so that they agree over devices and, up to
    rounding, over dtypes; no more than one whole parameter is held at a time. Parameters that have values already are
    left as they are. The caller's random state is untouched.

    Args:
        model: built on meta; a module, a Hugging Face model, or a pipeline model (its local stage is filled).
        seed: of the whole model; every rank gives the same.
        device: where the local shards go.
        dtype: of floating-point parameters; None keeps the dtype that they were built with. Buffers keep theirs.
        init_fn: `init_fn(module)` initialises the direct parameters of one module, which is given unsharded
            (`nn.Linear` for a parallel linear layer). It is asked first, for every module; what it leaves alone is
            initialised by the `init_method` that a layer was built with, else by the `_init_weights` of the model
            (the convention of Hugging Face and of many others), else by the module's `reset_parameters()`.

    Raises:
        ValueError: no initialiser sets a parameter or buffer; the message names it.
    """
    return fill(model, seed, device, dtype, init_fn)


def fill(
    model: nn.Module,
    seed: int,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    init_fn: Initialiser | None = None,
    otherwise: Initialiser | None = None,
) -> nn.Module:
    """Does what `materialize` does; `otherwise` initialises what nothing else does, in place of the error."""
    names = parameter_names(model)
    whole = partial_model(model).original_module
    for slot in parameter_slots(model):
        param = slot.tensor
        if not param.is_meta:
            continue
        spec = spec_of(param)
        # A tied weight is initialised as its first owner would, even if that one lives in another pipeline stage.
        qualified = names[id(param)][0]
        prefix, _, name = qualified.rpartition(".")
        owner = _stand_in(whole.get_submodule(prefix))
        value = torch.empty(spec.whole_shape, dtype=torch.float32)
        full = _draw(owner, name, value, qualified, seed, _initialisers(whole, prefix, init_fn, otherwise))
        local = spec.local_part(full).to(device=device, dtype=dtype or param.dtype, copy=True)
        install_parameter(param, local.contiguous())
        del full, value, owner  # before the next one is drawn
    return materialize_buffers(model, seed, device, init_fn, otherwise)


def materialize_buffers(
    model: nn.Module,
    seed: int = 0,
    device: str | torch.device = "cpu",
    init_fn: Initialiser | None = None,
    otherwise: Initialiser | None = None,
) -> nn.Module:
    """The buffers' part of `materialize`: those on meta (rotary frequencies, ...) get real values from initialisers."""
    whole = partial_model(model).original_module
    for name, module, key, buffer in buffer_slots(model):
        if buffer.is_meta:
            value = torch.empty(buffer.shape, dtype=buffer.dtype)
            initialisers = _initialisers(whole, name.rpartition(".")[0], init_fn, otherwise)
            module._buffers[key] = _draw(_stand_in(module), key, value, name, seed, initialisers).to(device)
    return model


@torch.no_grad()
def initialize_modules(
    named_modules: Iterable[tuple[str, nn.Module]],
    init_fn: Callable[..., Any],
    is_local: Callable[[str], bool] = lambda name: True,
) -> None:
    """Allocates the meta tensors of modules on the CPU, as NaN, and fills them by NxD's `param_init_fn`.

    Args:
        named_modules: with their names in the model; `is_local` says which of their tensors are this rank's.
        init_fn: `init_fn(module)`, called for each module with tensors on meta; or `init_fn(module, device)`, as in
            NxD's release, called for each module that contains one at any depth.
    """
    device = torch.device("cpu")
    arguments = (device,) if _takes_device(init_fn) else ()
    for name, module in named_modules:  # lazily: `init_fn` may replace submodules
        tensors = [
            *module.named_parameters(name, recurse=bool(arguments), remove_duplicate=False),
            *module.named_buffers(name, recurse=bool(arguments), remove_duplicate=False),
        ]
        if any(tensor.is_meta and is_local(key) for key, tensor in tensors):
            for key, param in module._parameters.items():
                if param is not None and param.is_meta and is_local(join(name, key)):
                    install_parameter(param, _memory(param, device))
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta and is_local(join(name, key)):
                    module._buffers[key] = _memory(buffer, device)
            init_fn(module, *arguments)


def _takes_device(init_fn: Callable[..., Any]) -> bool:
    """Returns whether a `param_init_fn` takes `(module, device)`, as in NxD's release; its guide passes `(module)`."""
    try:
        parameters = [*inspect.signature(init_fn).parameters.values()]
    except ValueError:  # of builtins
        return False
    second = next((p for p in parameters[1:2] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)), None)
    return second is not None and (second.default is second.empty or second.name == "device")


def _memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns memory for a tensor of meta: NaN, so that a value which no initialiser sets is seen."""
    memory = torch.empty_like(tensor, device=device)
    return memory.fill_(float("nan")) if memory.is_floating_point() else memory


def _stand_in(module: nn.Module) -> nn.Module:
    """The module as its initialiser would see it in one process: unsharded, all on meta, and not the module itself."""
    full_module = getattr(module, "full_module", None)
    whole: nn.Module = full_module() if full_module is not None else copy.copy(module)
    # Shapes are those of the unpadded original: fan-in and fan-out must not change with the layout.
    parameters = {n: _on_meta(p, spec_of(p).whole_shape) for n, p in module._parameters.items() if p is not None}
    whole.__dict__["_parameters"] = {name: parameters.get(name) for name in module._parameters}
    whole.__dict__["_buffers"] = {n: _on_meta(b, tuple(b.shape)) for n, b in module._buffers.items() if b is not None}
    whole.__dict__["_modules"] = {name: child and _stand_in(child) for name, child in module._modules.items()}
    return whole


def _on_meta(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    meta = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(meta, requires_grad=False) if isinstance(tensor, nn.Parameter) else meta


def _initialisers(
    whole: nn.Module, prefix: str, init_fn: Initialiser | None, otherwise: Initialiser | None
) -> list[Initialiser]:
    """Returns the initialisers to try on module `prefix`, in order; see `materialize`."""
    initialisers: list[Initialiser] = [init_fn] if init_fn is not None else []
    ancestors: list[nn.Module] = [whole]
    for name in prefix.split(".") if prefix else ():
        ancestors.append(ancestors[-1].get_submodule(name))
    init_method = getattr(ancestors[-1], "init_method", None)
    if init_method is not None and init_method is not _default_init_method(ancestors[-1]):
        initialisers.append(lambda stand_in: init_method(stand_in.weight))
    for ancestor in reversed(ancestors):
        convention = getattr(ancestor, "_init_weights", None)
        if callable(convention):
            if ancestor is not ancestors[-1]:  # a convention may set the weights of a module's children, as T5's does
                parent, child = ancestors[-2], prefix.rpartition(".")[2]
                initialisers.append(partial(_by_parent, convention, parent, child))
            initialisers.append(convention)
            break
    initialisers.append(_reset_parameters)
    return initialisers if otherwise is None else [*initialisers, otherwise]


def _by_parent(convention: Initialiser, parent: nn.Module, child: str, stand_in: nn.Module) -> None:
    """Initialises the parent of a module, which is represented by its stand-in."""
    whole = _stand_in(parent)
    whole._modules[child] = stand_in
    convention(whole)


def _default_init_method(layer: nn.Module) -> Any:
    parameter = inspect.signature(type(layer).__init__).parameters.get("init_method")
    return parameter.default if parameter is not None else None


def _reset_parameters(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def _draw(
    module: nn.Module, name: str, value: torch.Tensor, qualified: str, seed: int, initialisers: list[Initialiser]
) -> torch.Tensor:
    """The value that the first initialiser to set `name` of `module` gives it, in the memory of `value`.

    Everything else of the module stays on meta, where initialisers do nothing.
    """
    is_parameter = name in module._parameters
    table = module.__dict__["_parameters" if is_parameter else "_buffers"]
    with _GENERATOR, torch.random.fork_rng(devices=[]), torch.no_grad():
        for initialiser in initialisers:
            drawn = []
            for unset in _unset(value.dtype):
                value.fill_(unset)
                table[name] = nn.Parameter(value, requires_grad=False) if is_parameter else value
                torch.default_generator.manual_seed(seed_of(seed, qualified))
                initialiser(module)
                current = getattr(module, name).detach()
                drawn.append(current.clone() if value.dtype == torch.bool else current)
            result: torch.Tensor = drawn[0]
            if len(drawn) > 1:
                is_set = torch.equal(*drawn)
            else:
                is_set = not (result.isnan() if unset != unset else result == unset).any()
            if is_set:
                return result
    tried = ", ".join(getattr(f, "__qualname__", repr(f)).lstrip("_") for f in initialisers)
    raise ValueError(
        f"materialize: {('parameter' if is_parameter else 'buffer')} {qualified!r} {list(value.shape)} of "
        f"{type(module).__name__} was not initialised (tried: {tried}). Pass an init_fn(module) that sets it, or "
        "give it a value before materialize."
    )


def _unset(dtype: torch.dtype) -> tuple[Any, ...]:
    """A value that no initialiser gives: a tensor that still has it was not initialised. Of booleans both values."""
    if dtype.is_floating_point or dtype.is_complex:
        return (float("nan"),)
    return (True, False) if dtype == torch.bool else (torch.iinfo(dtype).min,)


def seed_of(seed: int, name: str) -> int:
    """63 bits from the seed and the name; a cryptographic hash, since Python's own differs between processes."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
