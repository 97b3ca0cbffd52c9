"""Sequence parallelism for a swapped model: activations between attention and MLP are sharded along the sequence.

transformers' code reads sequence lengths off its tensors: masks and position ids off the embedding's output, attention
off its input. So the tensors are full exactly where it looks:

    tokens -> embedding        [b, s, h]     partial sums over tp, full length
           -> first layer      reduce-scatter on entry                            -> [b, s/tp, h]
    layer:    norm             [b, s/tp, h]
              attention, MLP   all-gather on entry -> [b, s, h] ... row layer reduce-scatters -> [b, s/tp, h]
           -> final norm       [b, s/tp, h]
           -> head             all-gathers its input                              -> [b, s, vocab/tp]

The entry gather's backward is the reduce-scatter that sums the input gradients over tp, so the column layers inside do
not reduce theirs (`input_is_replicated`). Replicated parameters see a part of the sequence, or a part of the heads:
their gradients are partial, which their layout says (`sequence_parallel`), and `reduce_gradients` sums them.

All is done by hooks on the modules, so it holds as well when a pipeline runs the modules one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import comm, spmd
from ..parallel_layers.replace import mark_partial_gradients
from ..weights.shard_spec import spec_of
from .model_plan import ModelPlan, UnsupportedModelError

__all__ = ["apply_sequence_parallel", "check_sequence_parallel"]

_HIDDEN = ("hidden_states", "x")  # what attention, MLP and decoder layers call their input when it is passed by name


def check_sequence_parallel(model: nn.Module, plan: ModelPlan) -> None:
    """Refuses weights before the first layer, which would see partial sums, and unknown ones after the last.

    Before it dropout and scaling are fine: the same for all ranks, and the same for a sum as for its parts.
    """
    base, _, embedding = plan.embedding.rpartition(".")
    layers = _decoder_layers(model, plan)
    strange, before = [], True
    for name, child in model.get_submodule(base).named_children():
        if child is layers:
            before = False
        elif name != embedding and any(True for _ in child.parameters()) and (before or "norm" not in name.lower()):
            strange.append(name)
    if strange:
        raise UnsupportedModelError(
            f"sequence_parallel=True needs a model of an embedding, decoder layers and a final norm; "
            f"{type(model).__name__} also has {', '.join(strange)}"
        )


def apply_sequence_parallel(model: nn.Module, plan: ModelPlan) -> None:
    """Adds the hooks, and marks the replicated parameters. The layers were built for it by `swap`."""
    _decoder_layers(model, plan)[0].register_forward_pre_hook(_scatter_embedding, with_kwargs=True)
    for region in plan.regions:
        model.get_submodule(region).register_forward_pre_hook(_gather_sequence, with_kwargs=True)
    for module in model.modules():
        if not any(spec_of(param).is_sharded for param in module.parameters(recurse=False)):
            mark_partial_gradients(module)
    model.register_forward_pre_hook(_refuse_part_of_the_logits, with_kwargs=True)


def _decoder_layers(model: nn.Module, plan: ModelPlan) -> Any:
    """The `nn.ModuleList` that the attentions live in."""
    path = plan.regions[0].split(".")
    depth = next(i for i, part in enumerate(path) if part.isdigit())
    return model.get_submodule(".".join(path[:depth]))


def _scatter_embedding(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    def scatter(x: torch.Tensor) -> torch.Tensor:
        tp = comm.size("tp")
        if x.shape[1] % tp:
            raise ValueError(
                f"sequence parallelism: a sequence of {x.shape[1]} tokens is not divisible by tp={tp}; "
                f"pad it to {-(-x.shape[1] // tp) * tp}"
            )
        return spmd.reduce_scatter(x, "tp", src=spmd.P, dst=spmd.S(1), reduce_dtype=torch.float32)

    return _on_hidden_states(scatter, args, kwargs)


def _gather_sequence(module: nn.Module, args: Any, kwargs: Any) -> Any:
    def gather(x: torch.Tensor) -> torch.Tensor:  # the dtype is that of the sum in backward
        return spmd.all_gather(x, "tp", src=spmd.S(1), dst=spmd.R, reduce_dtype=torch.float32)

    return _on_hidden_states(gather, args, kwargs)


def _on_hidden_states(change: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = next(name for name in _HIDDEN if name in kwargs)
    return args, {**kwargs, name: change(kwargs[name])}


def _refuse_part_of_the_logits(model: nn.Module, args: Any, kwargs: Any) -> None:
    keep = kwargs.get("logits_to_keep", 0)
    if not isinstance(keep, int) or keep != 0:
        raise ValueError(
            "sequence parallelism: logits_to_keep would select positions of this rank's shard; leave it at 0, or swap "
            "without sequence_parallel for generation"
        )
