"""Experts of transformers' models over ep: whole experts on each rank, and tokens sent to them.

Hooks of the module of experts send tokens before its forward and take the results back after it, so that transformers'
own forward (any implementation: loops, grouped products) runs on the rows of this rank's experts, with their numbers
here and weights of 1. The weights of a token's experts are applied where the token lives.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import comm, spmd
from ..gradients.gradient import DATA_AXES
from ..modules.moe.dispatch import experts_here, has_values, route_of
from ..modules.moe.loss_function import load_balancing_loss_func
from ..spmd import S
from ..spmd.local_code import local_map, stamp_rows
from ..spmd.watching import active
from ..weights.shard_spec import ShardedModule, ShardSpec, set_spec
from .model_plan import UnsupportedModelError

__all__ = ["count_all_tokens", "declare_rows", "distribute_experts", "generate_together"]

_ROUTE = "_expert_route"
_ROWS = "_expert_rows"


def distribute_experts(model: nn.Module) -> None:
    """Keeps the experts of this ep rank in every module of experts, and adds the hooks.

    Raises:
        UnsupportedModelError: the model has no module of experts that can be distributed.
        ValueError: ep does not divide the number of experts.
    """
    modules: list[Any] = [module for module in model.modules() if _is_of_experts(module) or _is_of_all_rows(module)]
    if not modules:
        raise UnsupportedModelError(
            f"swap: {type(model).__name__} has no module with num_experts matrices in bare parameters and a forward of "
            f"tokens, experts and weights, or of all rows for all experts, to distribute over ep={comm.size('ep')}: "
            "pass ep=1, which leaves all experts on every rank"
        )
    for module in modules:
        send, receive = (_send_tokens, _return_tokens) if _is_of_experts(module) else (_send_rows, _return_rows)
        total = int(module.num_experts)
        count = experts_here(total)
        for name, param in [*module._parameters.items()]:
            assert param is not None
            local = param.detach().narrow(0, comm.rank("ep") * count, count).clone()
            setattr(module, name, nn.Parameter(local, requires_grad=param.requires_grad))
            set_spec(module, name, ShardSpec(full_shape=tuple(local.shape), experts=True))
        module.num_experts = count
        _as_sharded_module(module)  # copies and loaded weights stay those of this ep rank's experts
        module.register_forward_pre_hook(partial(send, total), with_kwargs=True)
        module.register_forward_hook(receive)


def _as_sharded_module(module: nn.Module) -> None:
    """Makes a module that is none a `ShardedModule`: one of a subclass of its class, which has its name."""
    if not isinstance(module, ShardedModule):
        module.__class__ = _sharded_class(type(module))  # type: ignore[arg-type]


@cache
def _sharded_class(base: type[nn.Module]) -> type[nn.Module]:
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (_Sharded, base), {**names, "original_class": base})


class _Sharded(ShardedModule):
    """A `ShardedModule` by `_as_sharded_module`: copied and pickled by its original class."""

    original_class: type[nn.Module]

    def __reduce__(self) -> Any:
        return _new_sharded, (self.original_class,), self.__dict__.copy()


def _new_sharded(base: type[nn.Module]) -> nn.Module:
    sharded_class = _sharded_class(base)  # type: ignore[arg-type]
    return sharded_class.__new__(sharded_class)


def _is_of_experts(module: Any) -> bool:
    """Returns whether a module has all experts in bare parameters, and takes tokens, experts and weights."""
    return _holds_experts(module) and len(inspect.signature(module.forward).parameters) == 3


def _is_of_all_rows(module: Any) -> bool:
    """Returns whether a module is as Llama 4's: it takes `[experts * tokens, h]`, 0 where a token has not the expert.

    Only experts that give 0 for a row of zeros are: a gated product without a bias.
    """
    names = {name for name, _ in module.named_parameters(recurse=False)}
    return (
        names == {"gate_up_proj", "down_proj"}
        and _holds_experts(module)
        and len(inspect.signature(module.forward).parameters) == 1
    )


def _holds_experts(module: Any) -> bool:
    count = getattr(module, "num_experts", None)
    params = [*module._parameters.values()]
    return bool(params) and all(param is not None and param.ndim > 1 and len(param) == count for param in params)


def _send_tokens(total: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replaces tokens `[tokens, h]`, experts and weights `[tokens, k]` by the rows of this rank's experts."""
    tokens, index, weights = inspect.signature(module.forward).bind(*args, **kwargs).arguments.values()
    shape = tokens.shape
    tokens, index, weights = (x.reshape(-1, x.shape[-1]) for x in (tokens, index, weights))
    route = route_of(index, total, tokens)
    rows = route.to_experts(tokens)
    module.__dict__[_ROUTE] = route, shape, weights
    numbers = route.numbers()
    # Without rows a row of zeros: forward and backward of all ranks go through the exchanges.
    missing = 0 if len(rows) else 1
    rows, numbers = F.pad(rows, (0, 0, 0, missing)), F.pad(numbers, (0, missing)).unsqueeze(1)
    return (spmd.forget(rows, DATA_AXES), numbers, torch.ones_like(numbers, dtype=weights.dtype)), {}


def _return_tokens(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    route, shape, weights = module.__dict__.pop(_ROUTE)
    rows = output.flatten(0, -2)[: sum(route.sizes)]
    tokens: torch.Tensor = route.to_tokens(rows, weights).view(shape)
    return tokens


def _send_rows(total: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replaces rows `[experts * tokens, h]` by those of this rank's experts that are not zero, equally many of each.

    Where sizes cannot depend on values all rows are sent.
    """
    (rows,) = inspect.signature(module.forward).bind(*args, **kwargs).arguments.values()
    count, picked, places = len(rows) // total, None, None
    if has_values(rows):
        picked = rows.detach().any(1).nonzero().flatten()
        route = route_of((picked // count).unsqueeze(1), total, rows)
        arrived, numbers = route.to_experts(rows.index_select(0, picked)), route.numbers()
        sizes = torch.tensor(route.sizes, device=rows.device)
        width = max(1, *route.sizes)
        places = torch.arange(len(numbers), device=rows.device) + (numbers * width)
        places -= (sizes.cumsum(0) - sizes).index_select(0, numbers)
        slots = arrived.new_zeros(len(sizes) * width, rows.shape[1]).index_copy(0, places, arrived)
    else:
        numbers = torch.arange(total, device=rows.device).repeat_interleave(count)
        route = route_of(numbers.unsqueeze(1), total, rows, count)
        slots = route.to_experts(rows)
    module.__dict__[_ROUTE] = route, picked, places, (total, count, rows.shape[1])
    return (spmd.forget(slots, DATA_AXES),), {}


def _return_rows(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    route, picked, places, shape = module.__dict__.pop(_ROUTE)
    if picked is not None:
        output = output.index_select(0, places)
    rows = route.to_tokens(output, output.new_ones(shape[0] * shape[1] if picked is None else len(picked), 1))
    if picked is not None:
        rows = rows.new_zeros(shape[0] * shape[1], shape[2]).index_copy(0, picked, rows)
    return _rows_by_expert(rows, shape).flatten(0, 1)


@local_map(out_types={DATA_AXES: S(1)})
def _rows_by_expert(rows: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return rows.view(shape)


def generate_together(model: Any) -> None:
    """Makes `generate` of a model whose experts are distributed go on until the sequences of all ep ranks have ended.

    A rank without unfinished sequences calls the model until then, for the rows that others send to its experts, and
    ignores the result, as transformers does by `synced_gpus=True` over all processes.
    """
    if hasattr(model, "generate") and hasattr(model, "_has_unfinished_sequences"):
        model.generate = partial(model.generate, synced_gpus=True)
        model._has_unfinished_sequences = _any_rank_is_unfinished


def _any_rank_is_unfinished(this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
    """Stands in the place of the model's method, which asks all processes of torch.distributed."""
    unfinished = torch.tensor(0 if this_peer_finished else 1, device=device)
    return bool(comm.all_reduce(unfinished, "ep", op="max").item())


def declare_rows(model: nn.Module) -> None:
    """Tells the checker that transformers' code of experts, which picks tokens by number, means those of this rank."""
    for module in model.modules():
        if _is_of_experts(module) and comm.size(DATA_AXES) > 1:
            module.register_forward_pre_hook(_forget_rows, with_kwargs=True)
            module.register_forward_hook(_of_this_rank)


def _forget_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if active() is not None:
        module.__dict__[_ROWS] = next(iter((*args, *kwargs.values())))
    forgotten = {name: spmd.forget(x, DATA_AXES) for name, x in kwargs.items()}
    return tuple(spmd.forget(x, DATA_AXES) for x in args), forgotten


def _of_this_rank(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = _shard_of_rows(output)
    if _ROWS in module.__dict__:
        stamp_rows(rows, module.__dict__.pop(_ROWS), DATA_AXES)
    return rows


@local_map(out_types={DATA_AXES: S(0)})
def _shard_of_rows(output: torch.Tensor) -> torch.Tensor:
    return output


def count_all_tokens(model: nn.Module) -> None:
    """Makes the auxiliary loss of transformers' routers one over the tokens of all data ranks."""
    modules = [sys.modules.get(one.__module__) for one in type(model).__mro__]  # a user's subclass stands elsewhere
    function = next((f for module in modules if (f := getattr(module, "load_balancing_loss_func", None))), None)
    known = ["gate_logits", "num_experts", "top_k", "attention_mask"]
    if function is not None and comm.size(DATA_AXES) > 1 and [*inspect.signature(function).parameters] == known:
        model.register_forward_hook(_over_all_tokens, with_kwargs=True)


def _over_all_tokens(model: Any, args: Any, kwargs: Any, output: Any) -> None:
    if isinstance(output, tuple):
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        asked = given.get("output_router_logits", getattr(model.config, "output_router_logits", None))
        if asked:
            raise ValueError(
                f"{type(model).__name__} with router logits and return_dict=False: its auxiliary loss would count the "
                "tokens of one data rank; leave return_dict at True"
            )
        return
    local = getattr(output, "aux_loss", None)
    if not isinstance(local, torch.Tensor):
        return
    mask = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments.get("attention_mask")
    sizes = model if hasattr(model, "num_experts") else model.config.get_text_config()
    logits = output.router_logits
    if mask is not None and mask.ndim == 2:  # beside a cache it has columns of earlier tokens
        mask = mask[:, -(logits[0].shape[:-1].numel() // len(mask)) :]
    output.aux_loss = load_balancing_loss_func(logits, sizes.num_experts, sizes.num_experts_per_tok, mask)
    if output.loss is not None:
        sizes = model if hasattr(model, "router_aux_loss_coef") else model.config.get_text_config()
        output.loss = output.loss + sizes.router_aux_loss_coef * (output.aux_loss - local)
