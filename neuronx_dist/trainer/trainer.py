"""NxD's trainer: a configuration, and the model and the optimizer that are made by it.

Keys and defaults of the configuration are those of NxD Core 0.18's `neuronx_distributed_config`.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from .. import comm
from ..comm.rank_selection import XLA
from ..modules.lora import LoraConfig
from ..modules.lora.model import adapters_by_themselves, add_adapters
from ..nearest import nearest
from ..optimizer import NeuronZero1Optimizer
from ..parallel_layers import parallel_state
from ..parallel_layers.activation_checkpoint import checkpoint_layers
from ..parallel_layers.pad import pad_model, padding_heads
from ..parallel_layers.utils import get_local_world_size, move_model_to_device
from ..pipeline.model import NxDPPModel
from ..unknown_keywords import names_the_nearest
from ..weights.init_device import init_on_device
from ..weights.materialize import initialize_modules
from ..weights.partial_model import parameter_slots
from .model import NxDModel
from .optimizer import NxDOptimizer

__all__ = [
    "initialize_optimizer_from_class",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "neuronx_distributed_config",
]

# Section -> its options and their defaults. Those of mixed precision depend on ZeRO-1.
_OPTIMIZER = {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0}
_MIXED_PRECISION = ("use_master_weights", "use_fp32_grad_acc", "use_master_weights_in_ckpt")
_MODEL_INIT = ("sequential_move_factor", "meta_device_init", "param_init_fn")


@names_the_nearest
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
        activation_checkpoint_config: None: nothing is recomputed. "full": the transformer layers, as
            `pipeline_config` or a Hugging Face model names them. "attention", "norms", a class of modules, its name, a
            predicate, or several of them: as `neuronx_dist.recompute` takes them.
        pad_model: zero heads are added to a Hugging Face model whose heads tp does not divide (`pad_model`).
        sequence_parallel: whether layers were built with sequence parallelism. (Their gradients are summed over tp in
            any case, since parameters are marked.)
        model_init_config: `meta_device_init` (False): the model is built on meta, and filled by `param_init_fn(module,
            device)`; `sequential_move_factor`: number of ranks of a host that move their model at a time.
        lora_config: options of adapters, which are put into the model.
        mixed_precision_config: `use_master_weights`, `use_fp32_grad_acc` (both: as `zero_one_enabled`),
            `use_master_weights_in_ckpt` (False). All need ZeRO-1, whose masters are float32 in any case.
        sequential_move_factor: default of the option in `model_init_config`.
        lnc_size: accepted for compatibility.

    Raises:
        ValueError: an unknown option in a section; the message names the nearest. `meta_device_init` without
            `param_init_fn`. Sizes that do not divide the world.
        TypeError: an unknown argument; the message names the nearest. A section is no dict.
        RuntimeError: model parallel is initialized already, with another layout.
    """
    if pipeline_config is not None:
        known = dict.fromkeys([*inspect.signature(NxDPPModel.__init__).parameters][2:])  # without self and module
        public = {name: value for name, value in pipeline_config.items() if not name.startswith("_")}
        _section("pipeline_config", public, known)
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
        _initialize_mesh(config)
        if comm.rank("world") == 0:
            _warn_of_downcasts()
    return config


def initialize_parallel_model(
    nxd_config: Mapping[str, Any],
    model_fn: Callable[..., nn.Module],
    include_buffers: bool = False,
    *model_args: Any,
    **model_kwargs: Any,
) -> NxDModel:
    """Builds `model_fn(*model_args, **model_kwargs)` as a configuration says, and moves it to this rank's device.

    In this order: meta device, adapters, pipeline, initial values and device, padding, activation checkpointing.

    Args:
        nxd_config: of `neuronx_distributed_config`.
        model_fn: returns a model with parallel layers.
        include_buffers: with `meta_device_init`, build buffers on meta too.

    Raises:
        ValueError: a pipeline without `pipeline_config`; `pad_model` in a pipeline, or for a model without a config of
            its heads; layers for activation checkpointing, or for adapters, that the model does not have.
    """
    if not parallel_state.model_parallel_is_initialized():
        _initialize_mesh(nxd_config)
    in_pipeline = nxd_config["pipeline_parallel_size"] > 1
    if nxd_config["pad_model"] and in_pipeline:
        raise ValueError("pad_model=True in a pipeline: pad in model_fn, by neuronx_dist.pad_model(model, tp, heads)")
    options = nxd_config["model_init_config"]
    on_meta, init_fn = options["meta_device_init"], options["param_init_fn"]
    with (
        padding_heads() if nxd_config["pad_model"] else nullcontext(),
        init_on_device("meta", include_buffers=include_buffers) if on_meta else nullcontext(),
    ):
        model = model_fn(*model_args, **model_kwargs)
    lora = nxd_config.get("lora_config")
    if lora is not None and not LoraConfig.of(lora).enable_lora:
        lora = None
    if lora is not None:
        lora = add_adapters(model, lora)
        init_fn = adapters_by_themselves(init_fn)
    stays_on_meta = torch.get_default_device().type == "meta"  # as in `spmd.check`, which needs no values
    if in_pipeline:
        model = _pipeline(nxd_config, model, init_fn if on_meta and not stays_on_meta else None)
    elif on_meta and not stays_on_meta:
        initialize_modules(model.named_modules(), init_fn)
    if on_meta and not stays_on_meta:
        _warn_of_no_values(model)
    if not stays_on_meta:
        _move_in_turns(model, comm.current().backend.device, options["sequential_move_factor"])
    if nxd_config["pad_model"]:
        pad_model(model, comm.size("tp"), _heads(model))
    layers = nxd_config["activation_checkpoint_config"]
    if isinstance(layers, str) and layers == "full":
        layers = (nxd_config["pipeline_config"] or {}).get("transformer_layer_cls")
        if layers is None and not in_pipeline and not hasattr(model, "_no_split_modules"):
            raise ValueError(
                f'activation_checkpoint_config="full": the transformer layers of {type(model).__name__} are unknown; '
                "pass their class as activation_checkpoint_config"
            )
        checkpoint_layers(model, layers)
    elif layers is not None:
        checkpoint_layers(model, layers)
    nxd_model = NxDModel(model, nxd_config)
    if lora is not None:
        nxd_model.lora_config = lora
        if not stays_on_meta:
            nxd_model.load_when_asked()
    return nxd_model


def _warn_of_no_values(model: nn.Module) -> None:
    """Warns of parameters that `param_init_fn` left as NaN, which is right only if they are loaded next."""
    names = [
        slot.name
        for slot in parameter_slots(model)
        if slot.tensor.is_floating_point() and slot.tensor.numel() and bool(slot.tensor.isnan().all())
    ]
    if names:
        warnings.warn(
            f"param_init_fn gave {len(names)} parameters no value, such as {names[0]}: they are NaN until loaded. "
            "It must set the parameters of every class of modules",
            stacklevel=3,
        )


def _pipeline(nxd_config: Mapping[str, Any], model: nn.Module, init_fn: Callable[..., Any] | None) -> NxDPPModel:
    options = nxd_config["pipeline_config"]
    if options is None:
        raise ValueError(
            f"pipeline_parallel_size={nxd_config['pipeline_parallel_size']} needs a pipeline_config: a dict with "
            "arguments of NxDPPModel, such as transformer_layer_cls, num_microbatches and output_loss_value_spec"
        )
    # `NxDOptimizer.step` takes the mean over the data.
    zero1 = nxd_config["optimizer_config"]["zero_one_enabled"]
    public = {name: value for name, value in options.items() if not name.startswith("_")}
    public.pop("use_model_wrapper", None)
    public |= {"use_zero1_optimizer": zero1, "use_optimizer_wrapper": not zero1}
    public["param_init_fn"] = init_fn or public.get("param_init_fn")
    return NxDPPModel(model, **public)


def _move_in_turns(model: nn.Module, device: torch.device, ranks_at_a_time: int) -> None:
    """Moves the model to the device, some ranks of each host at a time: a host holds fewer copies in between."""
    if ranks_at_a_time < 1:
        raise ValueError(f"sequential_move_factor must be at least 1, got {ranks_at_a_time}")
    ranks = get_local_world_size()
    local_rank = comm.rank("world") % ranks
    for turn in range(-(-ranks // ranks_at_a_time)):
        if turn:
            comm.barrier()
        if local_rank // ranks_at_a_time == turn:
            move_model_to_device(model, device)


def _heads(model: nn.Module) -> int:
    """Returns the query heads of a model, by its config."""
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
    if not heads:
        raise ValueError(
            f"pad_model=True: {type(model).__name__} has no config.num_attention_heads; pad in model_fn, by "
            "neuronx_dist.pad_model(model, tp_degree, n_heads)"
        )
    return int(heads)


def initialize_parallel_optimizer(
    nxd_config: Mapping[str, Any],
    optimizer_class: Callable[..., torch.optim.Optimizer],
    parameters: Any,
    **defaults: Any,
) -> NxDOptimizer:
    """Makes `optimizer_class(parameters, **defaults)` as a configuration says; its `step` does all that a step needs.

    Args:
        nxd_config: of `neuronx_distributed_config`.
        optimizer_class: a torch optimizer; with ZeRO-1 one whose update is elementwise, or Muon.
        parameters: parameters or groups of them, of this rank: `model.parameters()` of an `NxDModel`.

    Raises:
        RuntimeError: an option of `mixed_precision_config` is set that needs ZeRO-1, which is off.
    """
    return NxDOptimizer(
        initialize_optimizer_from_class(nxd_config, optimizer_class, parameters, **defaults), nxd_config
    )


def initialize_optimizer_from_class(
    nxd_config: Mapping[str, Any],
    optimizer_class: Callable[..., torch.optim.Optimizer],
    parameters: Any,
    model: Any = None,
    **defaults: Any,
) -> torch.optim.Optimizer:
    """Makes the optimizer that `NxDOptimizer` wraps: `NeuronZero1Optimizer`, or one of `optimizer_class`."""
    options, precision = nxd_config["optimizer_config"], nxd_config["mixed_precision_config"]
    if not options["zero_one_enabled"]:
        if wrong := [name for name, value in precision.items() if value]:
            raise RuntimeError(
                f"mixed_precision_config: {', '.join(wrong)} need ZeRO-1: set optimizer_config "
                '{"zero_one_enabled": True}, or leave them out'
            )
        return optimizer_class(parameters, **defaults)
    return NeuronZero1Optimizer(
        parameters,
        optimizer_class,
        grad_clipping=options["grad_clipping"],
        max_norm=options["max_grad_norm"],
        use_grad_acc_hook=precision["use_fp32_grad_acc"],
        higher_cc_precision=precision["use_fp32_grad_acc"],
        save_master_weights=precision["use_master_weights_in_ckpt"],
        **defaults,
    )


def _initialize_mesh(config: Mapping[str, Any]) -> None:
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
        if isinstance(defaults[option], bool) and options[option] not in (True, False):
            raise TypeError(f"{name}: {option} is True or False, got {options[option]!r}")
    return {**defaults, **options}


def _warn_of_downcasts() -> None:
    """Warns of environment variables by which torch_xla computes in bf16, where torch_xla is not in use."""
    for variable in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        if os.environ.get(variable) == "1" and comm.current().backend.device.type != XLA:
            warnings.warn(
                f"{variable}=1 is a setting of torch_xla and has no effect on this device: weights stay in the dtype "
                "that they were created with. For bf16, build the model in torch.bfloat16, with ZeRO-1 for masters",
                stacklevel=3,
            )
