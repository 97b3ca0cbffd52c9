"""The configurations of the trainer's components: classes by name, and their arguments. Names are nnScaler's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ... import comm
from ...accelerator.machine import has_double
from ...nearest import nearest
from ..config import ComputeConfig
from ..train.parallel_module import loss_of
from .arg_parser import deserialize_dataclass
from .train_hook import EVENTS, TrainHook

Arguments = dict[str, Any]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "none": None}


def precisions(value: Any) -> dict[str, str]:
    """Returns the precisions of parameters, buffers and inputs; ValueError: one, or what has it, is unknown."""
    parts = ("param", "buffer", "input")
    given = value if isinstance(value, dict) else dict.fromkeys(parts, value or "none")
    for name, dtype in given.items():
        one_of(f"precision of {name!r}", dtype, DTYPES)
        one_of("precision: part", name, parts)
    return {**dict.fromkeys(parts, "none"), **given}


def one_of(what: str, value: Any, values: Any) -> None:
    """Raises ValueError if a value is none of some values."""
    if value not in values:
        raise ValueError(f"{what} {value!r} is none of {', '.join(map(repr, values))}")


def at_least_one(config: Any, *names: str) -> None:
    """Raises ValueError if a number of these names is neither None nor at least 1."""
    for name in names:
        if getattr(config, name) is not None and getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")


def check_type(config: Any) -> None:
    """Raises ValueError if a component has no class."""
    if not config.type:
        raise ValueError(f"{type(config).__name__}.type is required: the path of a class or function, or itself")


@dataclass
class Component:
    """A component: a class or function, or its path, and its arguments."""

    type: Any = None
    args: Arguments = field(default_factory=dict)


@dataclass
class AggregatedOutputs:
    """The outputs of all microbatches of all units; `aggregate_outputs_fn` returns one."""

    loss_sum: float | None = None  # of their losses
    num_batches: int | None = None
    num_tokens: int | None = None
    aggregated_outputs: Any = None  # anything else, for hooks

    @classmethod
    def aggregate(
        cls,
        loss_outputs: Sequence[Any],
        sync_group: Any = None,
        loss_fn: Callable[[Any], torch.Tensor] = loss_of,
        ntokens_fn: Callable[[Any], Any] | None = None,
    ) -> AggregatedOutputs:
        """Sums losses and tokens over the results of forward of this unit, and over the units of the current mesh.

        Args:
            sync_group: accepted for compatibility.
            loss_fn, ntokens_fn: return the loss (default: the first tensor) and the number of tokens of a result.
        """
        losses = torch.stack([loss_fn(output).detach() for output in loss_outputs])
        dtype = torch.float64 if has_double(losses.device.type) else torch.float32
        tokens = sum(int(ntokens_fn(output)) for output in loss_outputs) if ntokens_fn is not None else 0
        counts = torch.tensor([len(losses), tokens], dtype=dtype, device=losses.device)
        sums = torch.cat([losses.to(dtype).sum()[None], counts])
        loss, batches, tokens = (comm.all_reduce(sums, "dp") if comm.is_initialized() else sums).tolist()
        return cls(loss, int(batches), int(tokens) if ntokens_fn is not None else None)


@dataclass(frozen=True)
class OptionalComputeConfig:
    """Fields of a `ComputeConfig` that differ for one submodule; None: as in `TrainerArgs.compute_config`."""

    constant_folding: bool | None = None
    trace_strategy: str | None = None
    use_zero: bool | None = None
    zero_ngroups: int | None = None
    zero_use_reduce_scatter: bool | None = None
    use_async_reducer: bool | None = None
    reducer_bucket_cap_mb: float | None = None
    pas_config: dict[str, Any] | None = None
    user_config: dict[str, Any] | None = None

    def resolve(self, compute_config: ComputeConfig) -> ComputeConfig:
        """Returns the configuration of the submodule, which is not end2end."""
        changes = {name: value for name, value in asdict(self).items() if value is not None}
        changes.setdefault("use_async_reducer", False)  # which needs end2end
        return replace(compute_config, **{**changes, "use_end2end": False})


@dataclass
class ModuleParallelizeConfig:
    """A class of submodules that is parallelized, in place of the whole model; None: as in `TrainerArgs`."""

    type: Any = None
    args: Arguments | None = None  # accepted: the submodules of the model are parallelized as they are
    forward_args_gen_fn: Any = None  # (TrainerArgs) -> arguments of forward, by name
    tracing_from_weights: str | None = None  # a file of the submodule's initial weights
    tracing_from_weights_prefix: str | None = None  # or their prefix in that of the model
    compute_config: OptionalComputeConfig | None = None
    gen_savedir: str | None = None
    gen_reuse: str | None = None
    pas_policy: Any = None
    broadcast_strategy: str | None = None
    instance_name: str | None = None
    precision: Any = None  # refused

    def __post_init__(self) -> None:
        check_type(self)
        if not self.forward_args_gen_fn:
            raise ValueError(
                f"parallel_modules: {self.type} needs forward_args_gen_fn, which returns forward's arguments"
            )
        if self.tracing_from_weights and self.tracing_from_weights_prefix:
            raise ValueError("pass tracing_from_weights or tracing_from_weights_prefix, not both")
        if self.precision is not None:
            raise ValueError("parallel_modules: precision is that of TrainerArgs: submodules cannot have another one")


@dataclass
class ModelConfig(Component):
    """The model: a subclass of `nn.Module`, its arguments, and the submodules to be parallelized (empty: the whole)."""

    parallel_modules: list[ModuleParallelizeConfig] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len({module.type for module in self.parallel_modules}) < len(self.parallel_modules):
            raise ValueError("parallel_modules has a type twice: all submodules of a type are parallelized in one way")


@dataclass
class OptimizerConfig(Component):
    """The optimizer, a class or function whose first argument is the parameters, and what it does with gradients."""

    clip_gnorm: float = 0.0  # the largest norm of all gradients; 0: no clipping
    loss_reduction: str = "mean"  # the loss that is reported
    grad_reduction: str = "mean"
    aggregate_outputs_fn: Any = None  # (outputs of the microbatches, group of the units) -> AggregatedOutputs

    def __post_init__(self) -> None:
        for name in ("loss_reduction", "grad_reduction"):
            one_of(name, getattr(self, name), ("mean", "sum", "per-token-mean"))
            if getattr(self, name) == "per-token-mean" and not self.aggregate_outputs_fn:
                raise ValueError(f"{name}='per-token-mean' needs aggregate_outputs_fn, which counts the tokens")


@dataclass
class DatasetConfig:
    """The data sets: a class or function, and its arguments; without arguments only that of training is made."""

    type: Any = None
    train_args: Arguments = field(default_factory=dict)
    val_args: Arguments = field(default_factory=dict)
    test_args: Arguments = field(default_factory=dict)


@dataclass
class DataloaderConfig(DatasetConfig):
    """The loaders; `batch_size` is `micro_batch_size`, and arguments that are missing are those of training."""

    type: Any = "torch.utils.data.DataLoader"


@dataclass
class DatasetSamplerConfig(DatasetConfig):
    """The samplers; they receive the data set, the number of units and the number of this unit."""

    type: Any = "torch.utils.data.DistributedSampler"


@dataclass
class LRSchedulerConfig(Component):
    """The scheduler of learning rates, which steps after each "epoch" or "step"."""

    interval: str = "epoch"

    def __post_init__(self) -> None:
        one_of("interval", self.interval, ("epoch", "step"))


@dataclass
class ResumeOptions:
    """The checkpoint that training goes on from."""

    checkpoint: str = "last"  # or "best" (without such a checkpoint training begins anew), a folder or a file
    convert_fn: Any = None  # (content of a file) -> content
    with_merged: bool | None = None  # merge the files of all ranks; None: where another layout saved them


@dataclass
class CheckpointConfig:
    """The checkpoints: a folder each, of a file for each rank; the last step is saved in any case."""

    save_dir: str = "./checkpoints"
    no_save: bool = False
    save_type: str = "sharded"  # a rank saves all that it holds; "deduped": each value is saved by one rank
    save_last: bool = True
    save_best: bool = True  # of the lowest loss in validation (without a data set for it, in training)
    symlink_best_and_last: bool = True  # False: copies
    every_n_train_steps: int | None = None
    every_n_epochs: int | None = None  # or this; neither: every epoch
    keep_last_n_checkpoints: int | None = None
    resume_from: Any = None  # ResumeOptions, or its `checkpoint`

    def __post_init__(self) -> None:
        if isinstance(self.resume_from, (str, int, Path)):  # an int: a folder's name from a command line
            self.resume_from = ResumeOptions(str(self.resume_from))
        elif isinstance(self.resume_from, dict):
            self.resume_from = deserialize_dataclass(self.resume_from, ResumeOptions)
        path = self.get_resume_checkpoint()
        if path is None and self.resume_from and self.resume_from.checkpoint:
            warnings.warn(
                f"{self.save_dir} has no checkpoint {self.resume_from.checkpoint!r}: training begins anew", stacklevel=4
            )
        elif path is not None and not path.exists():
            raise ValueError(f"resume_from: {path} does not exist")
        if self.save_type == "merged":
            raise ValueError(
                "save_type 'merged' is what Trainer.merge_checkpoint writes: train with 'sharded' or 'deduped'"
            )
        one_of("save_type", self.save_type, ("sharded", "deduped"))
        if None not in (self.every_n_train_steps, self.every_n_epochs):
            raise ValueError("every_n_train_steps and every_n_epochs are both set: checkpoints follow one of them")
        if self.every_n_train_steps is None and self.every_n_epochs is None:
            self.every_n_epochs = 1
        at_least_one(self, "every_n_train_steps", "every_n_epochs", "keep_last_n_checkpoints")

    def get_resume_checkpoint(self) -> Path | None:
        """Returns the folder or file to go on from; None: training begins anew."""
        name = self.resume_from and self.resume_from.checkpoint
        path = Path(self.save_dir) / name if name in ("last", "best") else Path(name or "")
        return path if name and (path.exists() or name not in ("last", "best")) else None


@dataclass
class LogConfig(Component):
    """A logger: a class with the methods of `loggers.LoggerBase`, or the name of one of `loggers`."""

    def __post_init__(self) -> None:
        check_type(self)
        if isinstance(self.type, str) and "." not in self.type:
            self.type = f"{__package__}.loggers.{self.type}"


@dataclass
class DebugConfig:
    """Options for debugging, accepted for compatibility: sums over units are proven when files are made."""

    check_gradient_sync_cross_devices: bool = True


@dataclass
class HookConfig(Component):
    """A hook: a `TrainHook` class, and its arguments, which it receives as one dict."""


HookMapConfig = make_dataclass("HookMapConfig", [(event, Any, None) for event in EVENTS])
HookMapConfig.__doc__ = "A function for each event of `train_hook.EVENTS`, or its name."
HookMapConfig.__module__ = __name__


def hook_config(value: Any) -> Any:
    if value is None or isinstance(value, (HookConfig, HookMapConfig, TrainHook)):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"hook: {value!r} is neither a TrainHook object nor a dict with type, or with events")
    if "type" in value:
        return deserialize_dataclass(value, HookConfig)
    for event in value.keys() - EVENTS.keys():
        raise ValueError(f"hook: there is no event {event!r}; nearest: {nearest(event, EVENTS)}")
    return HookMapConfig(**value)
