"""NxD's names of what exists for Neuron devices alone: each is there, and says at its first use what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["ADVICE"]

_INFERENCE = "is for inference that Neuron's compiler traces ahead of time; this package trains: load the checkpoint "
_INFERENCE += "into NxD Inference, or save it for transformers by hf.save_pretrained"
_STEPS = "is a step of upstream's autograd functions; the linear layers here are ColumnLinear and RowLinear of "
_STEPS += "parallel_layers.autograd_linear: write an autograd function over neuronx_dist.comm, or operators of spmd"

ADVICE: dict[str, str] = {
    **dict.fromkeys(
        (
            "SPMDRank",
            "get_speculative_draft_group",
            "get_speculative_draft_replica_groups",
            "initialize_speculative_draft_group",
            "round_robin_scatter_to_process_group_spmd",
            "scatter_to_process_group_spmd",
        ),
        _INFERENCE,
    ),
    **dict.fromkeys(
        (
            "_linear_autograd_base_setup_bwd",
            "_linear_autograd_base_setup_fwd",
            "_linear_autograd_bwd_grad_reduce",
            "_linear_autograd_bwd_input_grad",
            "_linear_autograd_bwd_no_weight_grad",
            "_qkvlinear_autograd_base_setup_bwd",
            "_qkvlinear_autograd_base_setup_fwd",
            "_qkvlinear_autograd_bwd_grad_reduce",
            "_qkvlinear_autograd_bwd_input_grad",
            "_qkvlinear_autograd_bwd_no_weight_grad",
        ),
        _STEPS,
    ),
}


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name not in ADVICE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} {ADVICE[name]}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Refuses every call: {name} {ADVICE[name]}."
    return refuse
