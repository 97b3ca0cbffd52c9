"""The parallel model of a configuration: the whole, or the submodules of some classes in an undivided model."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...torch_internals.tensors import pytree
from ..api import parallelize
from ..config import ComputeConfig
from ..train.optimizer import sync_grad_when
from ..train.parallel_module import ParallelModule, loss_of
from .arg_parser import load_type
from .component_args import ModuleParallelizeConfig
from .trainer_args import TrainerArgs

__all__ = ["MixedModule", "parallel_model"]


class MixedModule:
    """The steps of a `ParallelModule`, for a model with parallel submodules, which all ranks of a unit call."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def train_step(self, samples: list[Any], is_dummy_batch: list[bool]) -> list[Any]:
        """Adds the gradients of the samples to those of the parameters, and returns the results of forward."""
        real = [sample for sample, is_dummy in zip(samples, is_dummy_batch, strict=True) if not is_dummy]
        outputs = []
        for number, sample in enumerate(real, 1):
            with sync_grad_when(number == len(real)):
                output = self.model(sample)
                loss_of(output).backward()
            outputs.append(output)
        return outputs

    def infer_step(self, samples: list[Any]) -> list[Any]:
        """Returns the results of forward."""
        return [self.model(sample) for sample in samples]


def parallel_model(args: TrainerArgs, sample: Any, load_module: bool) -> nn.Module | None:
    """Makes the parallel model, or, without `load_module`, only its files.

    Raises:
        ValueError: the model has no submodule of a class that is to be parallelized.
    """
    if not args.model.parallel_modules:
        inputs = {[*inspect.signature(args.model_type.forward).parameters][1]: sample}
        options = {"module_fn": args.create_model}
        made = _parallelized(args, args, args.model_type, inputs, args.compute_config, load_module, **options)
        return made() if load_module else None
    model = args.create_model()
    wanted = {load_type(module.type): module for module in args.model.parallel_modules}
    for cls, module in wanted.items():
        found = [name for name, child in model.named_modules() if type(child) is cls]
        if not found:
            raise ValueError(f"parallel_modules: the model {args.model.type} has no submodule of type {module.type}")
    _replace(model, wanted, args, load_module, {})
    return model if load_module else None


def _replace(
    parent: nn.Module,
    wanted: dict[type[nn.Module], ModuleParallelizeConfig],
    args: TrainerArgs,
    load_module: bool,
    done: dict[int, nn.Module],
) -> None:
    """Replaces the outermost submodules of the wanted classes by parallel ones; one under two names stays one."""
    for name, child in [*parent._modules.items()]:
        if child is None:
            continue
        if type(child) not in wanted:
            _replace(child, wanted, args, load_module, done)
        elif id(child) in done:
            parent._modules[name] = done[id(child)]
        else:
            made = _submodule(child, wanted[type(child)], args, load_module)
            done[id(child)] = parent._modules[name] = made if made is not None else child


def _submodule(
    child: nn.Module, module: ModuleParallelizeConfig, args: TrainerArgs, load_module: bool
) -> ParallelModule | None:
    config = replace(args.compute_config, use_end2end=False, use_async_reducer=False)
    if module.compute_config is not None:
        config = module.compute_config.resolve(args.compute_config)
    if module.tracing_from_weights:
        child.load_state_dict(torch.load(module.tracing_from_weights, map_location="cpu", weights_only=True))
    arguments = load_type(module.forward_args_gen_fn)(args)  # of several classes, maybe
    taken = inspect.signature(child.forward).parameters
    inputs = {name: fixed(value, args.input_dtype, None) for name, value in arguments.items() if name in taken}
    return _parallelized(args, module, child, inputs, config, load_module)


def _parallelized(
    args: TrainerArgs,
    part: ModuleParallelizeConfig | TrainerArgs,
    module: Any,
    inputs: dict[str, Any],
    config: ComputeConfig,
    load_module: bool,
    **options: Any,
) -> Any:
    """Calls `parallelize` with the options of a submodule's configuration, or where it has none of `args`."""

    def option(name: str) -> Any:
        return getattr(args if getattr(part, name) is None else part, name)

    if load_module:  # without a process group files are sent to no rank
        options["broadcast_strategy"] = option("broadcast_strategy")
    policy = option("pas_policy")
    if policy in ("pp", "hybrid", "autodist") and "pipeline_nmicros" not in config.pas_config:
        config = replace(config, pas_config={"update_freq": args.update_freq, **config.pas_config})
    return parallelize(
        module,
        inputs,
        args.policy_of(policy),
        config,
        gen_savedir=option("gen_savedir"),
        reuse=option("gen_reuse"),
        instance_name=option("instance_name"),
        load_module=load_module,
        **options,
    )


def fixed(sample: Any, dtype: torch.dtype | None, device: torch.device | None) -> Any:
    """Returns a sample with its tensors on a device, floating-point ones in a dtype; None: as they are."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    return pytree.tree_map_only(torch.Tensor, moved, sample)
