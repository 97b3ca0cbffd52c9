"""NeuronX Distributed's signatures as a table: calls written for its release, or for its API guide, work here.

    @accepts("ColumnParallelLinear")
    def __init__(self, input_size, ...):   # our signature

The guide and the release order some positional arguments differently; then the types of the values decide. Parameters
that have no counterpart here are ignored with a warning, or refused if they would change values or layouts.
"""

from __future__ import annotations

import functools
import inspect
import os.path
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, TypeVar

import torch

from ..lazy_names import lazy_names

__all__ = ["IGNORED", "REFUSED", "SIGNATURES", "Signature", "accepts", "ignore", "refuse"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_late = lazy_names(__name__, {"refuse_keyword": "parallel_layers.misfits"})


@dataclass(frozen=True)
class Signature:
    """Positional orders of one function: the order in NxD's release and, where it differs, the order in its API guide.

    A "?" after a name by which orders are distinguished says that None is one of the parameter's values. `renamed`:
    other names of parameters -> ours.
    """

    release: str
    guide: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)

    def ours(self, name: str) -> str:
        """Our name of a parameter."""
        name = name.rstrip("?")
        return self.renamed.get(name, name)


SIGNATURES = {
    "ParallelEmbedding": Signature(
        "num_embeddings embedding_dim padding_idx? max_norm? norm_type scale_grad_by_freq sparse init_method device "
        "dtype? shard_across_embedding pad sequence_parallel_enabled tensor_model_parallel_group use_spmd_rank "
        "sequence_dimension tile_cc rank_ordering collect_output",
        guide="num_embeddings embedding_dim init_method dtype? device",
    ),
    "ColumnParallelLinear": Signature(
        "input_size output_size bias gather_output dtype? device stride init_method? sequence_parallel_enabled "
        "sequence_dimension keep_master_weight skip_bias_add pad pad_alignment_size_per_rank keep_padded_output "
        "tensor_model_parallel_group reduce_dtype rank_ordering",
        guide="input_size output_size bias gather_output sequence_parallel_enabled dtype? device",
    ),
    "RowParallelLinear": Signature(
        "input_size output_size bias input_is_parallel dtype? device stride init_method? sequence_parallel_enabled "
        "sequence_dimension keep_master_weight skip_bias_add pad reduce_output tensor_model_parallel_group "
        "reduce_dtype tile_cc rank_ordering",
        guide="input_size output_size bias input_is_parallel sequence_parallel_enabled dtype? device",
    ),
    "linear_with_async_allreduce": Signature(
        "input weight bias async_grad_allreduce sequence_parallel_enabled sequence_dimension autograd_func_class "
        "save_for_backward process_group reduce_dtype"
    ),
    "parallel_cross_entropy": Signature(
        "vocab_parallel_logits target label_smoothing",
        renamed={"vocab_parallel_logits": "parallel_logits", "target": "labels"},
    ),
    "NxDPPModel": Signature(
        "module transformer_layer_cls num_microbatches virtual_pipeline_size output_loss_value_spec return_mb_loss "
        "broadcast_and_average_loss use_zero1_optimizer use_model_wrapper use_optimizer_wrapper pipeline_cuts? "
        "input_names leaf_module_cls autowrap_functions autowrap_modules autowrap_obj_methods tracer_cls "
        "param_init_fn trace_file_path return_loss_on_cpu deallocate_pipeline_outputs auto_partition "
        "fuse_microbatches manual_pp_partition manual_pp_stage_partition_fn manual_pp_loss_fn _delay_tracing "
        "_turn_off_odd_even_scheduler _all_reduce_send_recv _fused_send_recv _fused_fwd_bwd "
        "_mark_step_before_pp_runtime _mark_step_after_pp_runtime _deallocate_send_tensors "
        "_use_gloo_for_metadata_comm _debug_mode _debug_pp_size _debug_pp_rank",
        guide="module transformer_layer_cls num_microbatches virtual_pipeline_size output_loss_value_spec "
        "return_mb_loss broadcast_and_average_loss pipeline_cuts? input_names leaf_module_cls autowrap_functions "
        "autowrap_modules tracer_cls param_init_fn trace_file_path use_zero1_optimizer auto_partition "
        "deallocate_pipeline_outputs",
    ),
}

# Parameters that change values or layouts, and do not here: name -> (default, what to do instead).
REFUSED: dict[str, tuple[Any, str]] = {
    "rank_ordering": (None, "choose the order of ranks by initialize_model_parallel(topology=...)"),
    "autograd_func_class": (None, "call your autograd function instead of linear_with_async_allreduce"),
}
# Parameters that change neither: name -> default.
IGNORED: dict[str, Any] = {
    "tile_cc": False,
    "use_spmd_rank": False,
    "save_for_backward": True,
    "_delay_tracing": False,
    "_turn_off_odd_even_scheduler": False,
    "_all_reduce_send_recv": False,
    "_fused_send_recv": False,
    "_fused_fwd_bwd": False,
    "_mark_step_before_pp_runtime": True,
    "_mark_step_after_pp_runtime": True,
    "_deallocate_send_tensors": True,
    "_use_gloo_for_metadata_comm": False,
    "_debug_mode": False,
    "_debug_pp_size": 8,
    "_debug_pp_rank": 0,
}


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


# Parameter -> whether a value can be its argument, which tells positional arguments apart.
_FITS: dict[str, Callable[[Any], bool]] = {
    "dtype": lambda value: isinstance(value, torch.dtype),
    "init_method": callable,
    "max_norm": lambda value: isinstance(value, Real) and not isinstance(value, bool),
    "padding_idx": lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    "pipeline_cuts": lambda value: isinstance(value, (list, tuple)),
    "sequence_parallel_enabled": _is_bool,
    "use_zero1_optimizer": _is_bool,
}
_warned: set[str] = set()


def accepts(name: str) -> Callable[[_Function], _Function]:
    """Makes a function, or a method, accept calls by `SIGNATURES[name]` in addition to calls by its signature.

    The function's parameters have NxD's names, or the names in `renamed`; it has no parameters of `REFUSED` and
    `IGNORED`.

    Raises (in the returned function):
        TypeError: positional arguments whose types fit no order, or several.
        ValueError: a parameter in `REFUSED` with another value than its default.
    """
    signature = SIGNATURES[name]

    def decorate(function: _Function) -> _Function:
        parameters = [*inspect.signature(function).parameters]
        accepted = frozenset(parameters)
        bound = parameters[:1] if parameters[0] == "self" else []
        orders = {"NxD's release": [*bound, *signature.release.split()]}
        if signature.guide:
            orders["its API guide"] = [*bound, *signature.guide.split()]
        common = len(os.path.commonprefix([parameters, *([signature.ours(x) for x in o] for o in orders.values())]))

        @functools.wraps(function)
        def _call(*args: Any, **kwargs: Any) -> Any:
            if len(args) <= common and kwargs.keys() <= accepted and not _is_bool(kwargs.get("device")):
                return function(*args, **kwargs)
            order = parameters if len(args) <= common else _fitting(name, orders, args, common, len(bound))
            given: dict[str, Any] = {}
            for key, value in (*zip(order, args), *kwargs.items()):
                key = signature.ours(key)
                if key in given:
                    raise TypeError(f"{name}() got multiple values for argument {key!r}")
                if key in REFUSED:
                    refuse(name, key, value)
                elif key in IGNORED:
                    ignore(key, value)
                elif key in accepted:
                    given[key] = value
                else:
                    _late("refuse_keyword")(name, key, parameters[len(bound) :])
            if _is_bool(given.get("device")):
                _refuse_true(name, given["device"])
                given["device"] = None  # the guide's default, False: no device
            return function(**given)

        return _call  # type: ignore[return-value]

    return decorate


def _refuse_true(name: str, value: bool) -> None:
    """Raises ValueError if a device is True."""
    if value:
        raise ValueError(
            f'{name}: device=True is not a device: pass a torch.device or its name ("cpu", "cuda", "meta"), '
            "or leave it out for torch's default device, like device=False in the API guide"
        )


def _fitting(
    name: str, orders: Mapping[str, list[str]], args: Sequence[Any], common: int, num_bound: int
) -> Sequence[str]:
    """The order of positional arguments, by the types of the arguments after the `common` ones."""
    fitting = {
        tuple(order[: len(args)])
        for order in orders.values()
        if len(args) <= len(order) and all(map(_fits, order[common:], args[common:]))
    }
    if len(fitting) == 1:
        return fitting.pop()
    types = ", ".join("None" if value is None else type(value).__name__ for value in args[num_bound:])
    known = "".join(f"\n  {label}: {', '.join(order[num_bound:])}".replace("?", "") for label, order in orders.items())
    last = orders["NxD's release"][common - 1]
    raise TypeError(
        f"{name}: positional arguments of types ({types}) match {('several orders' if fitting else 'no order')} of "
        f"its parameters; pass those after {last} by keyword. The orders are{known}"
    )


def _fits(name: str, value: Any) -> bool:
    test = _FITS.get(name.rstrip("?"))
    if test is None:
        return True
    return name.endswith("?") if value is None else test(value)


def refuse(name: str, key: str, value: Any) -> None:
    """Refuses a parameter of `REFUSED`, unless it has its default.

    Raises:
        ValueError: it has another value.
    """
    default, advice = REFUSED[key]
    if value != default:
        raise ValueError(f"{name}: {key}={value!r} is not supported; use {default!r}, and {advice}")


def ignore(key: str, value: Any) -> None:
    """Warns, once for each parameter of `IGNORED` and process, that it has no effect, unless it has its default."""
    if value != IGNORED[key] and key not in _warned:
        _warned.add(key)
        warnings.warn(f"{key}={value!r} has no effect here and is ignored", stacklevel=3)
