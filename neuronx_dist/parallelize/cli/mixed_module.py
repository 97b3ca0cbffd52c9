"""The parallel model of a configuration: the whole, or the submodules of some classes in an undivided model."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...torch_internals.tensors import pytree
from ..api import parallelize
from ..train.optimizer import sync_grad_when
from ..train.parallel_module import loss_of
from .arg_parser import load_type
from .component_args import ModuleParallelizeConfig, OptionalComputeConfig
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
        make = _parallelized(args, args, args.model_type, inputs, load_module, module_fn=args.create_model)
        return make() if load_module else None
    model = args.create_model()
    wanted = {load_type(module.type): module for module in args.model.parallel_modules}
    for cls in wanted.keys() - set(map(type, model.modules())):
        raise ValueError(f"parallel_modules: the model {args.model.type} has no submodule of type {wanted[cls].type}")
    done: dict[nn.Module, nn.Module] = {}  # a submodule under two names stays one

    def replace_in(parent: nn.Module) -> None:
        for name, child in parent._modules.items():
            if child is not None and type(child) not in wanted:
                replace_in(child)
            elif child is not None:
                if child not in done:
                    done[child] = _submodule(child, wanted[type(child)], args, load_module) or child
                parent._modules[name] = done[child]

    replace_in(model)
    return model if load_module else None


def _submodule(child: nn.Module, module: ModuleParallelizeConfig, args: TrainerArgs, load_module: bool) -> Any:
    if module.tracing_from_weights:
        child.load_state_dict(torch.load(module.tracing_from_weights, map_location="cpu", weights_only=True))
    taken = inspect.signature(child.forward).parameters
    arguments = load_type(module.forward_args_gen_fn)(args)  # of several classes, maybe
    inputs = {name: fixed(value, args.input_dtype, None) for name, value in arguments.items() if name in taken}
    return _parallelized(args, module, child, inputs, load_module)


def _parallelized(
    args: TrainerArgs,
    part: ModuleParallelizeConfig | TrainerArgs,
    module: Any,
    inputs: dict[str, Any],
    load_module: bool,
    **options: Any,
) -> Any:
    """Calls `parallelize` with the options of a submodule's configuration, or where it has none of `args`."""
    names = ("gen_savedir", "gen_reuse", "instance_name", "pas_policy", "broadcast_strategy")
    chosen = {name: getattr(args if getattr(part, name) is None else part, name) for name in names}
    if load_module:  # without a process group files are sent to no rank
        options["broadcast_strategy"] = chosen["broadcast_strategy"]
    config = args.compute_config
    if part is not args:
        config = (part.compute_config or OptionalComputeConfig()).resolve(config)  # type: ignore[union-attr]
    policy = chosen["pas_policy"]
    if policy in ("pp", "hybrid", "autodist") and "pipeline_nmicros" not in config.pas_config:
        config = replace(config, pas_config={"update_freq": args.update_freq, **config.pas_config})
    options |= {"gen_savedir": chosen["gen_savedir"], "reuse": chosen["gen_reuse"]}
    options |= {"instance_name": chosen["instance_name"], "load_module": load_module}
    return parallelize(module, inputs, args.policy_of(policy), config, **options)


def fixed(sample: Any, dtype: torch.dtype | None, device: torch.device | None) -> Any:
    """Returns a sample with its tensors on a device, floating-point ones in a dtype; None: as they are."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    return pytree.tree_map_only(torch.Tensor, moved, sample)
