"""A model made by a configuration: on meta or not, in a pipeline or not, padded, recomputed; on this rank's device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from .. import comm
from ..parallel_layers import parallel_state
from ..parallel_layers.activation_checkpoint import checkpoint_layers
from ..parallel_layers.pad import pad_model
from ..parallel_layers.utils import move_model_to_device
from ..pipeline.model import NxDPPModel
from ..weights.init_device import init_on_device
from ..weights.materialize import initialize_modules
from .config import initialize_mesh

__all__ = ["NxDModel", "initialize_parallel_model"]


def initialize_parallel_model(
    nxd_config: Mapping[str, Any],
    model_fn: Callable[..., nn.Module],
    include_buffers: bool = False,
    *model_args: Any,
    **model_kwargs: Any,
) -> NxDModel:
    """Builds `model_fn(*model_args, **model_kwargs)` as a configuration says, and moves it to this rank's device.

    The order is: meta device, pipeline, initial values and device, padding of heads, activation checkpointing.

    Args:
        nxd_config: of `neuronx_distributed_config`.
        model_fn: returns a model with parallel layers.
        include_buffers: with `meta_device_init`, build buffers on meta too.

    Raises:
        ValueError: a pipeline without `pipeline_config`; `pad_model` in a pipeline, or for a model without a config of
            its heads; layers for activation checkpointing that the model does not have.
        NotImplementedError: `lora_config`.
    """
    if not parallel_state.model_parallel_is_initialized():
        initialize_mesh(nxd_config)
    in_pipeline = nxd_config["pipeline_parallel_size"] > 1
    if nxd_config["pad_model"] and in_pipeline:
        raise ValueError("pad_model=True in a pipeline: pad in model_fn, by neuronx_dist.pad_model(model, tp, heads)")
    if nxd_config["lora_config"] is not None:
        raise NotImplementedError(
            "lora_config: this version has no adapters; leave lora_config out, or freeze parameters and add your "
            "adapters in model_fn"
        )
    options = nxd_config["model_init_config"]
    on_meta, init_fn = options["meta_device_init"], options["param_init_fn"]
    with init_on_device("meta", include_buffers=include_buffers) if on_meta else nullcontext():
        model = model_fn(*model_args, **model_kwargs)
    stays_on_meta = torch.get_default_device().type == "meta"  # as in `spmd.check`, which needs no values
    if in_pipeline:
        model = _pipeline(nxd_config, model, init_fn if on_meta and not stays_on_meta else None)
    elif on_meta and not stays_on_meta:
        initialize_modules(model.named_modules(), init_fn)
    if not stays_on_meta:
        _move_in_turns(model, comm.current().backend.device, options["sequential_move_factor"])
    if nxd_config["pad_model"]:
        pad_model(model, comm.size("tp"), _heads(model))
    layers = nxd_config["activation_checkpoint_config"]
    if layers is not None:
        checkpoint_layers(model, None if layers == "full" else layers)
    return NxDModel(model, nxd_config)


def _pipeline(nxd_config: Mapping[str, Any], model: nn.Module, init_fn: Callable[..., Any] | None) -> NxDPPModel:
    options = nxd_config["pipeline_config"]
    if options is None:
        raise ValueError(
            f"pipeline_parallel_size={nxd_config['pipeline_parallel_size']} needs a pipeline_config: a dict with "
            "arguments of NxDPPModel, such as transformer_layer_cls, num_microbatches and output_loss_value_spec"
        )
    # The optimizer's step takes the mean over the data, so that a script may call it after several `run_train`.
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
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", comm.size("world")))
    local_rank = comm.rank("world") % ranks
    for turn in range(-(-ranks // ranks_at_a_time)):
        if turn:
            comm.barrier()
        if local_rank // ranks_at_a_time == turn:
            move_model_to_device(model, device)


def _heads(model: nn.Module) -> int:
    """Returns the heads that `pad_model` counts: the key/value heads, of which each has its group of query heads."""
    config = getattr(model, "config", None)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if not heads:
        raise ValueError(
            f"pad_model=True: {type(model).__name__} has no config.num_attention_heads; pad in model_fn, by "
            "neuronx_dist.pad_model(model, tp_degree, n_heads)"
        )
    return int(heads)


class NxDModel(nn.Module):
    """A model made by `initialize_parallel_model`: names of parameters are those of the model inside.

    Attributes that it does not have are the model's. `save_checkpoint`, `reduce_gradients` and the other functions of
    this package take it as the model inside.

    Attributes:
        module: the model, or the pipeline model around it.
        nxd_config: the configuration.
        pp_enabled: whether `module` is a pipeline model.
    """

    wrapped_attribute = "module"

    def __init__(self, module: nn.Module, nxd_config: Mapping[str, Any]) -> None:
        super().__init__()
        self.module: Any = module
        self.nxd_config = nxd_config
        self.pp_enabled = isinstance(module, NxDPPModel)
        if not self.pp_enabled:
            self.train()

    def __repr__(self) -> str:
        return f"NxDModel({self.module!r})"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def run_train(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of a batch; gradients are added to those that parameters have.

        `NxDOptimizer.step` reduces them over ranks. In a pipeline inputs are passed by name.

        Returns:
            The loss: of a pipeline on its last stage, None on other stages; of another model its result, or the `loss`
            of its result, or the result's first element.

        Raises:
            TypeError: the result contains no loss.
        """
        if self.pp_enabled:
            return self.module.run_train(*args, **kwargs)
        loss = _loss(self.module(*args, **kwargs))
        loss.backward()
        return loss

    def run_eval(self, *args: Any, **kwargs: Any) -> Any:
        """Forward without gradients, in evaluation mode; the mode is set back afterwards.

        Returns:
            Of a pipeline the loss, as `NxDPPModel.run_eval`; of another model the result of its forward.
        """
        if self.pp_enabled:
            return self.module.run_eval(*args, **kwargs)
        modes = [(module, module.training) for module in self.module.modules()]
        try:
            with torch.no_grad():
                return self.module.eval()(*args, **kwargs)
        finally:
            for module, training in modes:
                module.training = training

    def local_modules(self) -> list[nn.Module]:
        """Returns the modules of this rank: the children of this stage, or the model."""
        return list(self.module.local_children()) if self.pp_enabled else [self.module]

    def original_module(self) -> nn.Module:
        """Returns the model that `model_fn` built."""
        return self.module.original_module if self.pp_enabled else self.module

    @property
    def dtype(self) -> torch.dtype:
        return getattr(self.original_module(), "dtype", None) or next(self.parameters()).dtype

    @property
    def config(self) -> Any:
        return self.original_module().config

    @property
    def name_or_path(self) -> str:
        return str(self.original_module().name_or_path)

    # In a pipeline these are of this stage.

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._part("named_parameters")(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self._part("named_buffers")(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self._part("named_children")()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return self._part("named_modules")(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _part(self, name: str) -> Any:
        return getattr(self.module, f"local_{name}" if self.pp_enabled else name)


def _loss(result: Any) -> torch.Tensor:
    found = result
    if not isinstance(found, torch.Tensor):
        found = getattr(found, "loss", None)
    if found is None and isinstance(result, Mapping):
        found = result.get("loss")
    if found is None and isinstance(result, (tuple, list)) and result:
        found = result[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise TypeError(
            f"run_train: the forward must return the loss, a result with `loss`, or a tuple that begins with it; got a "
            f"{type(result).__name__}"
        )
    return found
