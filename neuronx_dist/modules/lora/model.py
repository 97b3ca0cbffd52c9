"""A model with adapters: which layers get them, which parameters are trained, merging."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ... import comm
from ...gradients.gradient import parameters_of
from ...nearest import nearest
from ...parallel_layers.linear import ColumnParallelLinear, RowParallelLinear
from ...parallel_layers.transposed_linear import ParallelConv1D
from ...torch_internals.modules import move_hooks
from ...weights.materialize import seed_of
from ...weights.partial_model import partial_model, unwrapped
from ..qkv_linear import GQAQKVColumnParallelLinear
from .config import LoraConfig
from .files import load_adapters, save_adapters, saved_config
from .layer import LoraConv2d, LoraEmbedding, LoraLayer, LoraLinear
from .tp_layer import LoraGQAQKVParallelLinear, LoraParallelConv1D, LoraParallelLinear

__all__ = ["AdapterMethods", "LoraModel", "add_adapters", "adapters_by_themselves", "adapters_of", "get_lora_model"]

# Class of layers -> class of the adapter. Subclasses count too.
_ADAPTERS: list[tuple[type[nn.Module], Any]] = [
    (ColumnParallelLinear, LoraParallelLinear),
    (RowParallelLinear, LoraParallelLinear),
    (GQAQKVColumnParallelLinear, LoraGQAQKVParallelLinear),
    (ParallelConv1D, LoraParallelConv1D),
    (nn.Linear, LoraLinear),
    (nn.Embedding, LoraEmbedding),
    (nn.Conv2d, LoraConv2d),
]
# `model_type` of a Hugging Face config -> the layers that get adapters, as PEFT chooses them.
_QUERY_VALUE = ["q_proj", "v_proj"]
_TARGETS = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "olmo", "opt"), _QUERY_VALUE),
    **dict.fromkeys(("gptj", "gpt_neo", "stablelm", "cohere", "bart", "blip-2"), _QUERY_VALUE),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "layoutlm", "vit"), ["query", "value"]),
    **dict.fromkeys(("bloom", "gpt_neox", "falcon", "chatglm"), ["query_key_value"]),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ["c_attn"]),
    **dict.fromkeys(("t5", "mt5"), ["q", "v"]),
    "codegen": ["qkv_proj"],
    "phi": ["q_proj", "v_proj", "fc1", "fc2"],
    "phi3": ["qkv_proj"],
}


def get_lora_model(model: nn.Module, lora_config: Any) -> nn.Module:
    """Puts adapters into a model; returns a `LoraModel`, or an `NxDModel` as it is, and without a config the model.

    Args:
        model: a module, before its optimizer and, if it is to be a pipeline, before `NxDPPModel` is made.
        lora_config: a `LoraConfig`, or PEFT's.

    Raises:
        ValueError: `LoraModel`.
    """
    if lora_config is None or not LoraConfig.of(lora_config).enable_lora:
        return model
    inner = unwrapped(model)
    if inner is not model:
        add_adapters(inner, lora_config)
        return model
    return LoraModel(model, lora_config)


def adapters_of(model: nn.Module) -> dict[str, LoraLayer]:
    """Returns the layers with adapters that this rank holds, by their names in the model."""
    return {name: layer for name, layer in partial_model(model).local_named_modules() if isinstance(layer, LoraLayer)}


def add_adapters(model: nn.Module, config: LoraConfig) -> LoraConfig:
    """Replaces the layers that a config targets by layers with adapters, and freezes all else, in place.

    Hooks of these layers become hooks of their adapters, and see the outputs of both.
    Returns the config with its targets.

    Raises:
        ValueError: nothing in the model matches the targets, a target is of a class without adapters, or there are
            adapters already.
    """
    config = LoraConfig.of(config)
    if existing := next(iter(adapters_of(model)), ""):
        raise ValueError(
            f"adapters: this {type(model).__name__} has adapters, such as that of {existing}: load others into them by "
            "load_lora(folder), or call merge_lora() and hf.save_pretrained(model, folder) and put new ones into the "
            "model of that folder; one config names all layers that get adapters"
        )
    if partial_model(model).original_module is not model:
        raise ValueError(
            f"adapters are put into the model before {type(model).__name__} is made: get_lora_model(module, config), "
            "or lora_config of neuronx_distributed_config"
        )
    targets = config.target_modules
    if targets is None and config.load_lora_from_ckpt:
        targets = saved_config(config.lora_save_dir, config.lora_load_tag).target_modules
    if targets is None:
        targets = _default_targets(model)
    named = dict(model.named_modules(remove_duplicate=False))
    found = {name: layer for name, layer in named.items() if name and _is_target(name, targets)}
    if not found:
        names = {
            name.rpartition(".")[2]
            for name, layer in model.named_modules()
            if next(layer.parameters(False), None) is not None
        }
        word = targets if isinstance(targets, str) else next(iter(targets), "")
        raise ValueError(
            f"adapters: no layer of {type(model).__name__} matches target_modules={targets!r}; nearest: "
            f"{nearest(word, sorted(names))}"
        )
    unmatched = [target for target in targets if not any(_is_target(name, [target]) for name in found)]
    if unmatched and not isinstance(targets, str):
        warnings.warn(f"adapters: no layer of {type(model).__name__} matches {', '.join(unmatched)}", stacklevel=3)
    count = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    adapters: dict[int, LoraLayer] = {}
    for name, layer in found.items():
        if id(layer) not in adapters:  # a layer of two names stays one
            adapted = adapters[id(layer)] = _with_adapter(name, layer, config)
            adapted.name, adapted.is_tied = name, any(count[id(param)] > 1 for param in layer.parameters())
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, adapters[id(layer)])
    _freeze(model, config)
    _watch_optimizers()
    return LoraConfig(**{**config.__dict__, "target_modules": targets})


_LAYERS: WeakSet[LoraLayer] = WeakSet()  # all layers with adapters of this process


@cache
def _watch_optimizers() -> None:
    """Makes optimizers refuse, from now on, to step if they have frozen parameters and not their adapters."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for layer in _LAYERS:
        frozen = [id(param) for param in layer.base_layer.parameters() if not param.requires_grad]
        if not params.isdisjoint(frozen) and params.isdisjoint(map(id, _adapter_parameters(layer))):
            raise RuntimeError(
                f"{type(optimizer).__name__} has the frozen weight of {layer.name}, and not its adapter. If it was "
                "made before the adapters, make it after get_lora_model, of the parameters of its result; if another "
                "optimizer has the adapters, leave out parameters that do not require gradients"
            )


def _adapter_parameters(layer: LoraLayer) -> list[nn.Parameter]:
    return [param for part in (layer.lora_A, layer.lora_B) for param in part.parameters()]


def _default_targets(model: nn.Module) -> list[str]:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in _TARGETS:
        raise ValueError(
            f"adapters: {type(model).__name__} has no known config.model_type (got {model_type!r}): pass "
            'target_modules, the names of layers such as ["q_proj", "v_proj"]'
        )
    return _TARGETS[model_type]


def _is_target(name: str, targets: list[str] | str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _with_adapter(name: str, layer: nn.Module, config: LoraConfig) -> LoraLayer:
    for cls, adapter in _ADAPTERS:
        if isinstance(layer, cls):
            if type(layer).forward is not cls.forward or "forward" in vars(layer):
                raise ValueError(
                    f"adapters: {name} is a {type(layer).__name__} with another forward than {cls.__name__}'s, which "
                    "its adapter would leave out: add adapters before checkpointing, or leave the layer out of "
                    "target_modules"
                )
            if isinstance(layer, ColumnParallelLinear):
                layer.separate()
                layer.deferring = None
            adapted: LoraLayer = adapter(layer, config)
            move_hooks(layer, adapted)
            return adapted
    if type(layer).__name__ == "Conv1D":  # transformers'
        return LoraLinear(layer, config, is_conv_1d_layer=True)
    raise ValueError(
        f"adapters: {name} is a {type(layer).__name__}; possible are {', '.join(cls.__name__ for cls, _ in _ADAPTERS)}"
    )


def _freeze(model: nn.Module, config: LoraConfig) -> None:
    """Leaves the adapters trainable, and what the config names besides."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    adapters = {id(param) for layer in layers for param in _adapter_parameters(layer)}
    _LAYERS.update(layers)
    others = {id(param) for layer in layers for key, param in layer.base_layer.named_parameters() if "bias" in key}
    saved = config.modules_to_save or []
    for name, param in model.named_parameters():
        has_bias = "bias" in name.rpartition(".")[2]
        param.requires_grad_(
            id(param) in adapters
            or any(part in name for part in saved)
            or (config.bias == "all" and has_bias)
            or (config.bias == "lora_only" and id(param) in others)
        )


def adapters_by_themselves(init_fn: Any) -> Any:
    """Returns NxD's `param_init_fn` for a model with adapters, which are drawn by themselves."""

    seed = torch.initial_seed()

    def initialise(module: nn.Module, device: torch.device) -> None:
        if isinstance(module, LoraLayer):
            with torch.random.fork_rng(devices=[]):  # by its name, since a rank has a part of the layers
                torch.manual_seed(seed_of(seed, module.name))
                module.reset_adapter_on(device)
        elif init_fn is not None:
            init_fn(module, device)

    return initialise


class AdapterMethods(nn.Module):
    """Methods of a wrapper around a model with adapters.

    Attributes:
        module: the model, or the pipeline model around it.
        lora_config: its config; None: it has no adapters.
    """

    module: Any
    lora_config: LoraConfig | None = None

    def merge_lora(self) -> None:
        """Adds the adapters to the weights of their layers, which then compute without them."""
        for layer in adapters_of(self.module).values():
            layer.merge()

    def unmerge_lora(self) -> None:
        """Subtracts the adapters from the weights of their layers again."""
        for layer in adapters_of(self.module).values():
            layer.unmerge()

    @property
    def is_lora_merged(self) -> bool:
        """Whether all adapters of this rank are merged."""
        layers = adapters_of(self.module).values()
        return bool(layers) and all(layer.merged for layer in layers)

    def save_lora(self, save_dir: str | None = None, adapter_tag: str | None = None) -> None:
        """Saves the adapters, and what else is trained, whole, in PEFT's format; all ranks call it.

        Args:
            save_dir: a folder; None: the config's `lora_save_dir`.
            adapter_tag: a folder in it.

        Raises:
            ValueError: the model has no adapters, or they are merged.
        """
        config = self._adapter_config()
        save_adapters(self.module, config, save_dir or config.lora_save_dir, adapter_tag)

    def load_lora(self, save_dir: str | None = None, adapter_tag: str | None = None) -> None:
        """Loads adapters from a folder of `save_lora` or of PEFT, in any layout; merged ones are unmerged first.

        Raises:
            ValueError: the folder's config or its tensors are not those of the model; the message says which.
        """
        config = self._adapter_config()
        self.unmerge_lora()
        load_adapters(self.module, config, save_dir or config.lora_save_dir, adapter_tag)

    def load_when_asked(self) -> None:
        """Loads the adapters of `lora_save_dir`, and prints the number of trained parameters, as the config says."""
        config = self._adapter_config()
        if config.load_lora_from_ckpt:
            self.load_lora(None, config.lora_load_tag)
        if config.lora_verbose:
            self.print_trainable_parameters()

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Returns the numbers of trained and of all parameters' elements, of this rank."""
        params = parameters_of(self.module)
        return sum(p.numel() for p in params if p.requires_grad), sum(p.numel() for p in params)

    def print_trainable_parameters(self) -> None:
        """Prints these numbers, on rank 0."""
        trained, total = self.get_nb_trainable_parameters()
        if comm.rank("world") == 0:
            print(f"trainable parameters of this rank: {trained:,} of {total:,} ({trained / max(total, 1):.2%})")

    def _adapter_config(self) -> LoraConfig:
        if self.lora_config is None:
            raise ValueError(
                "this model has no adapters: pass lora_config to neuronx_distributed_config, or call get_lora_model"
            )
        return self.lora_config


class LoraModel(AdapterMethods):
    """A model with adapters; names of parameters and attributes are those of the model inside.

    Args:
        module: the model.
        config: a `LoraConfig`, or PEFT's.

    Raises:
        ValueError: no layer matches the targets, or one is of a class without adapters.
    """

    wrapped_attribute = "module"

    def __init__(self, module: nn.Module, config: Any) -> None:
        super().__init__()
        self.module = module
        self.lora_config = add_adapters(module, config)
        self.load_when_asked()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def get_base_model(self) -> nn.Module:
        """Returns the model inside."""
        return self.module
