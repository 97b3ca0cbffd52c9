"""Dropout in swapped models: of shards it differs over the tensor-parallel ranks, of replicated values it is equal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import comm
from ..spmd import random
from .model_plan import LOCAL_OUTPUT, ModelPlan, UnsupportedModelError, parent_of

__all__ = ["add_missing_stream", "check_dropout", "draw_apart"]


def add_missing_stream() -> None:
    """Adds the tensor-parallel random stream, if there is none, as `model_parallel_manual_seed` of torch's seed does.

    So `seed_everything` of Lightning and `set_seed` of accelerate are enough for dropout of shards.
    """
    if random.TENSOR_PARALLEL not in random.streams().get_states():
        random.streams().add(random.TENSOR_PARALLEL, torch.initial_seed() % 2**62 + 2718 + comm.rank("tp"))


def check_dropout(model: Any, plan: ModelPlan, tp: int, sequence_parallel: bool) -> None:
    """Refuses dropout that would draw from the wrong stream.

    Attention weights are sharded, so their dropout is to differ over tp; a residual's is to agree, unless the sequence
    is sharded. Where one attention module has both, its row layer tells which is which, if that is in it too.
    """
    if plan.derived is not None:
        if sequence_parallel and (plan.derived.random or plan.derived.draws_for_whole):
            raise UnsupportedModelError(
                f'swap: {type(model).__name__} has dropout, which plan="derived" does not combine with '
                "sequence_parallel=True: set it to 0"
            )
        return
    configs = [model.config, *(nested for nested in vars(model.config).values() if hasattr(nested, "get_text_config"))]
    rates = {
        name: rate
        for config in configs
        for name, rate in vars(config).items()
        if name.endswith(("dropout", "pdrop", "dropout_prob", "dropout_rate"))
        and isinstance(rate, float) and rate > 0 and not name.startswith(_OF_TASKS)
    }  # fmt: skip
    attention = sum(rates.pop(name, 0.0) for name in _ATTENTION_DROPOUT)
    regions = [model.get_submodule(name) for name in plan.attentions if name not in _rows(plan)]
    is_mixed = any(_attention_dropout(region) and len(_dropouts(region)) > 1 for region in regions)
    if tp > 1 and rates and (is_mixed or sequence_parallel):
        listed = ", ".join(f"{name}={rate}" for name, rate in rates.items())
        raise UnsupportedModelError(
            f"swap: {type(model).__name__} with {listed}: such dropout works neither with sequence_parallel=True nor "
            f"with attention_dropout ({attention}) in one module; set it to 0 in the config"
        )


def _dropouts(module: nn.Module) -> list[str]:
    """The names of a module's dropouts, layers or rates, that drop something."""
    rates = {name: getattr(value, "p", value) for name, value in (*vars(module).items(), *module.named_children())}
    return [name for name, rate in rates.items() if "drop" in name and isinstance(rate, float) and rate > 0]


_OF_TASKS = ("classifier", "summary", "seq_classif", "qa")  # of heads of tasks, after the layers
_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def _attention_dropout(region: Any) -> float:
    """The rate by which a module drops weights of its heads."""
    for name in ("attention_dropout", "attn_dropout", "dropout"):
        rate = getattr(region, name, 0.0)
        rate = getattr(rate, "p", rate)
        if isinstance(rate, float) and rate:
            return rate
    return 0.0


def _with_local_random_numbers(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Makes attention dropout of local heads draw from this rank's stream, not from the one of all tp ranks."""
    if not forward.__self__.training:  # type: ignore[attr-defined]
        return forward(*args, **kwargs)
    with random.streams().fork():
        return forward(*args, **kwargs)


def draw_apart(model: nn.Module, plan: ModelPlan) -> None:
    """Makes dropout between columns and the row layer of one module draw from this rank's stream: all of it is local.

    After the row layer, where a residual's dropout may be, all ranks draw the same numbers. An attention whose row
    layer is in another module (BERT's) draws from this rank's stream throughout. A derived plan says which modules do
    the one, and which the other.
    """
    if plan.derived is not None:
        for region in map(model.get_submodule, plan.derived.random):
            region.forward = partial(_with_local_random_numbers, region.forward)
        for name in plan.derived.random_between:
            _draw_between(model, plan, name)
        return
    rows = _rows(plan)
    for region in map(model.get_submodule, [name for name in plan.attentions if name not in rows]):
        if _attention_dropout(region):
            region.forward = partial(_with_local_random_numbers, region.forward)
    for parent in rows:
        module: Any = model.get_submodule(parent)
        drops = any(isinstance(child, nn.Dropout) and child.p > 0 for child in module.children())
        of_heads = parent in plan.attentions and _attention_dropout(module)
        if not (of_heads or drops or vars(module).get("activation_dropout")):
            continue
        if of_heads and len(_dropouts(module)) == 1:  # no other one is in it
            module.forward = partial(_with_local_random_numbers, module.forward)
            continue
        _draw_between(model, plan, parent)


def _draw_between(model: nn.Module, plan: ModelPlan, parent: str) -> None:
    """Makes what is between the columns and the row layers of a module draw from this rank's stream."""
    module = model.get_submodule(parent)
    for name, style in plan.styles.items():
        if parent_of(name) == parent and style in LOCAL_OUTPUT:
            model.get_submodule(name).register_forward_hook(partial(_enter_local_stream, module))
        elif parent_of(name) == parent and style in ("row", "packed_row"):
            model.get_submodule(name).register_forward_pre_hook(_leave_local_stream)
    module.register_forward_hook(_leave_local_stream, always_call=True)  # after an error too


def _rows(plan: ModelPlan) -> dict[str, str]:
    """Returns the names of row layers, by the names of their modules."""
    return {parent_of(name): name for name, style in plan.styles.items() if style == "row"}


def _enter_local_stream(parent: nn.Module, module: nn.Module, args: Any, output: Any) -> None:
    if parent.training:
        random.streams().enter()


def _leave_local_stream(module: nn.Module, args: Any, output: Any = None) -> None:
    random.streams().leave()
