"""The configuration of NxD's trainer: a dict of options, which are checked and completed here.

Keys and defaults are those of NxD Core 0.18's `neuronx_distributed_config`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from .. import comm
from ..nearest import nearest
from ..parallel_layers import parallel_state

__all__ = ["initialize_mesh", "neuronx_distributed_config"]

# Section -> its options and their defaults. Those of mixed precision depend on ZeRO-1.
_OPTIMIZER = {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0}
_MIXED_PRECISION = ("use_master_weights", "use_fp32_grad_acc", "use_master_weights_in_ckpt")
_MODEL_INIT = ("sequential_move_factor", "meta_device_init", "param_init_fn")


def neuronx_distributed_config(
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    context_parallel_size: int = 1,
    pipeline_config: dict[str, Any] | None = None,
    optimizer_config: dict[str, Any] | None = None,
    activation_checkpoint_config: Any = None,
    pad_model: bool = False,
    sequence_parallel: bool = False,
    model_init_config: dict[str, Any] | None = None,
    lora_config: Any = None,
    mixed_precision_config: dict[str, Any] | None = None,
    sequential_move_factor: int = 11,
    lnc_size: int = 1,
) -> dict[str, Any]:
    """Returns the options of a training run as a dict, complete; and makes the mesh, if torch.distributed is running.

    Args:
        tensor_parallel_size, pipeline_parallel_size, expert_parallel_size, context_parallel_size: degrees.
        pipeline_config: arguments of `NxDPPModel`, which is made if `pipeline_parallel_size` is more than 1.
        optimizer_config: `zero_one_enabled` (False), `grad_clipping` (True), `max_grad_norm` (1.0), also under ZeRO-1.
        activation_checkpoint_config: None: nothing is recomputed. "full": the transformer layers. A class of modules,
            its name, or several of them.
        pad_model: zero heads are added to a Hugging Face model whose heads tp does not divide (`pad_model`).
        sequence_parallel: whether layers were built with sequence parallelism. (Their gradients are summed over tp in
            any case, since parameters are marked.)
        model_init_config: `meta_device_init` (False): the model is built on meta, and filled by `param_init_fn(module,
            device)`; `sequential_move_factor`: number of ranks of a host that move their model at a time.
        lora_config: options of adapters, which are put into the model.
        mixed_precision_config: `use_master_weights`, `use_fp32_grad_acc` (both: as `zero_one_enabled`),
            `use_master_weights_in_ckpt` (False). All need ZeRO-1.
        sequential_move_factor: default of the option in `model_init_config`.
        lnc_size: accepted for compatibility.

    Raises:
        ValueError: an unknown option in a section; the message names the nearest. `meta_device_init` without
            `param_init_fn`. Sizes that do not divide the world.
        TypeError: a section is no dict.
        RuntimeError: model parallel is initialized already, with another layout.
    """
    optimizer = _section("optimizer_config", optimizer_config, _OPTIMIZER)
    zero1 = bool(optimizer["zero_one_enabled"])
    mixed_precision = _section(
        "mixed_precision_config", mixed_precision_config, dict(zip(_MIXED_PRECISION, (zero1, zero1, False)))
    )
    model_init = _section(
        "model_init_config", model_init_config, dict(zip(_MODEL_INIT, (sequential_move_factor, False, None)))
    )
    if model_init["meta_device_init"] and model_init["param_init_fn"] is None:
        raise ValueError(
            "model_init_config: meta_device_init=True needs a param_init_fn(module, device), which gives the "
            "parameters of a module their values"
        )
    config = {
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "expert_parallel_size": expert_parallel_size,
        "context_parallel_size": context_parallel_size,
        "pipeline_config": pipeline_config,
        "optimizer_config": optimizer,
        "activation_checkpoint_config": activation_checkpoint_config,
        "pad_model": pad_model,
        "sequence_parallel": sequence_parallel,
        "model_init_config": model_init,
        "lora_config": lora_config,
        "mixed_precision_config": mixed_precision,
        "lnc_size": lnc_size,
    }
    if torch.distributed.is_initialized():
        initialize_mesh(config)
        if comm.rank("world") == 0:
            _warn_of_downcasts()
    return config


def initialize_mesh(config: Mapping[str, Any]) -> None:
    """Makes the mesh of a configuration; a second call changes nothing."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config["tensor_parallel_size"],
        pipeline_model_parallel_size=config["pipeline_parallel_size"],
        context_parallel_size=config["context_parallel_size"],
        expert_model_parallel_size=config["expert_parallel_size"],
        lnc_size=config["lnc_size"],
    )


def _section(name: str, options: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a section with its defaults filled in; the caller's dict is not changed."""
    if options is None:
        return dict(defaults)
    if not isinstance(options, Mapping):
        raise TypeError(f"{name} is a dict of {', '.join(defaults)}, got {options!r}")
    for option in options:
        if option not in defaults:
            raise ValueError(f"{name} has no option {option!r}; nearest: {nearest(str(option), defaults)}")
    return {**defaults, **options}


def _warn_of_downcasts() -> None:
    """Warns of environment variables by which torch_xla computes in bf16, where torch_xla is not in use."""
    for variable in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        if os.environ.get(variable) == "1" and comm.current().backend.device.type != "xla":
            warnings.warn(
                f"{variable}=1 is a setting of torch_xla and has no effect on this device: weights stay in the dtype "
                "that they were created with. For bf16, build the model in torch.bfloat16, with ZeRO-1 for masters",
                stacklevel=3,
            )
