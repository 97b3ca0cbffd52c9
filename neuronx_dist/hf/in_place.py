"""Modules that stay, and compute on shards: experts, attention sinks, latent projections, biases by head.

Their bare parameters are sharded in place, and hooks convert what goes in and out, so that transformers' code of their
forward runs as it is.

    experts      tokens, routing weights I -> R   |   each expert's matrices [i/tp]   |   partial sums P -> I

The router before them stays whole: its gradient is complete on every rank, since the weights that it gives are summed
over tp in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .. import comm, spmd
from ..weights.shard_spec import ShardSpec, set_spec, spec_of

__all__ = ["IN_PLACE", "multiply_output", "shard_parameter", "sharded_dim"]


def shard_parameter(module: nn.Module, name: str, style: str) -> None:
    """Shards a bare parameter, in place, as transformers does: `[.., out, in]`, or a vector.

    Args:
        style: of columns the dim `out` (of a vector the only one), of rows the dim `in`; "replicated_bias" leaves it
            whole, and adds it to partial sums once.

    Raises:
        ValueError: tp does not divide the dim.
    """
    full = module._parameters[name]
    assert full is not None
    if style == "whole":
        return
    if style == "replicated_bias":
        _add_once(module, name)
        return
    dim, stride = sharded_dim(style, full.ndim)
    tp = comm.size("tp")
    spec = ShardSpec("tp", dim, stride, tp, tuple(full.shape), experts=spec_of(full).experts)
    if full.is_meta:
        local = nn.Parameter(full.new_empty(spec.local_shape), requires_grad=full.requires_grad)
    else:
        piece = spec.local_slice(full.detach(), comm.rank("tp")).clone(memory_format=torch.contiguous_format)
        local = nn.Parameter(piece, requires_grad=full.requires_grad)
    module._parameters[name] = local
    set_spec(module, name, spec)


def sharded_dim(style: str, ndim: int) -> tuple[int, int]:
    """The dim of a bare parameter that is sharded, and the number of blocks in it."""
    return ndim - 1 if style.endswith("row") else max(ndim - 2, 0), 2 if style.startswith("packed") and ndim > 1 else 1


def _add_once(module: nn.Module, name: str) -> None:
    """Makes a bias partial while forward runs: that of rank 0, zeros on the others. So is its gradient."""
    set_spec(module, name, replace(spec_of(getattr(module, name)), sequence_parallel=True))
    if comm.size("tp") == 1:
        return

    def hide(module: nn.Module, args: Any) -> None:
        param: Any = module._parameters.pop(name)
        module.__dict__[name] = spmd.convert(param, "tp", src=spmd.R, dst=spmd.P)
        module.__dict__[f"_{name}"] = param

    def show(module: nn.Module, args: Any, output: Any) -> None:
        del module.__dict__[name]
        module._parameters[name] = module.__dict__.pop(f"_{name}")

    module.register_forward_pre_hook(hide)
    module.register_forward_hook(show, always_call=True)


def _for_each_float(change: Callable[[torch.Tensor], torch.Tensor], args: Any, kwargs: Any) -> Any:
    def changed(x: Any) -> Any:
        return change(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return tuple(map(changed, args)), {name: changed(x) for name, x in kwargs.items()}


def _with_summed_gradient(x: torch.Tensor) -> torch.Tensor:
    """The same values, of which each rank uses its part: their gradients are summed over tp."""
    return spmd.reinterpret(x, "tp", src=spmd.I, dst=spmd.R, reduce_dtype=torch.float32)


def _sum_of_parts(x: torch.Tensor) -> torch.Tensor:
    partial_sum = spmd.trust(x, "tp", spmd.P, "that the parts of each expert add up to its output")
    return spmd.all_reduce(partial_sum, "tp", src=spmd.P, dst=spmd.I, reduce_dtype=torch.float32)


def _replicate_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _for_each_float(_with_summed_gradient, args, kwargs)


def _sum_output(module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (_sum_of_parts(output[0]), *output[1:])
    return None if output is None else _sum_of_parts(output)


def _experts(module: nn.Module, config: Any) -> None:
    # Before tokens go to the ranks of their experts, when there are fewer of them, and after they come back.
    module.register_forward_pre_hook(_replicate_inputs, with_kwargs=True, prepend=True)
    module.register_forward_hook(_sum_output)


def _all_reduced(module: nn.Module, config: Any) -> None:
    if any(spec_of(param).is_sharded for param in module.parameters(recurse=False)):  # layers do it themselves
        module.register_forward_pre_hook(_replicate_inputs, with_kwargs=True, prepend=True)
    module.register_forward_hook(_sum_output)


def _identity_expert(module: nn.Module, config: Any) -> None:
    """An expert that returns its input: on rank 0 alone, since the outputs of all ranks are summed."""

    def once(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _for_each_float(lambda x: spmd.convert(x, "tp", src=spmd.R, dst=spmd.P), args, kwargs)

    module.register_forward_pre_hook(once, with_kwargs=True)


def _latent(module: nn.Module, config: Any) -> None:
    """The projection to keys' and values' latent: all heads use its rotary part, whose gradient is summed over tp."""
    rotary: int = config.qk_rope_head_dim

    def split(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        latent, rope = output.split([output.shape[-1] - rotary, rotary], -1)
        return torch.cat([latent, _with_summed_gradient(rope)], -1)

    module.register_forward_hook(split)


def _local_heads(module: nn.Module, config: Any) -> None:
    """Attention whose biases (ALiBi, `[batch * heads, ..]`) and masks `[batch, heads, ..]` are for all heads."""
    heads = int(config.num_attention_heads)

    def local(batch: int, name: str, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or name not in ("alibi", "attention_mask"):
            return x
        local_heads = heads // comm.size("tp")
        first = comm.rank("tp") * local_heads
        if x.ndim == 4 and x.shape[1] == heads:
            return x.narrow(1, first, local_heads)
        if x.shape[0] == batch * heads and name == "alibi":
            return x.unflatten(0, (batch, heads)).narrow(1, first, local_heads).flatten(0, 1)
        return x

    def take(module: nn.Module, args: Any, kwargs: Any) -> Any:
        batch = (args[0] if args else kwargs["hidden_states"]).shape[0]
        return args, {name: local(batch, name, x) for name, x in kwargs.items()}

    module.register_forward_pre_hook(take, with_kwargs=True)


def multiply_output(scale: float, rounded: bool, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Forward hook of an embedding that transformers scales: by a number, or by one that has the weight's dtype."""
    return output * (torch.full((), scale, dtype=output.dtype, device=output.device) if rounded else scale)


# By style: what is done to a module, with the model's text config.
IN_PLACE: dict[str, Callable[[nn.Module, Any], None]] = {
    "experts": _experts,
    "identity_expert": _identity_expert,
    "latent": _latent,
    "summed": _all_reduced,
    "local_heads": _local_heads,
    "whole": lambda module, config: None,
}
