"""The trainer's configuration, `TrainerArgs`: classes of components by name, and their arguments.

A class is named by its path (`torch.optim.Adam`) or passed. In arguments of components a dict with `__type` becomes an
object of that class, `{"__value_type": "str", "value": "1"}` a value of that type, `$!(self)` the `TrainerArgs` and
`$!(vars.x)` the object that is `vars.x`.
"""

from __future__ import annotations

import os
import random
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from ... import comm
from ...nearest import nearest
from ..config import BroadcastGenFilesStrategy, ComputeConfig, ReuseType
from ..policy.policies import POLICIES
from ..train.optimizer import build_optimizer
from .arg_parser import TYPE, VALUE, VALUE_TYPE, deserialize_dataclass, load_type, made, merge_args, resolve_args
from .component_args import *  # noqa: F403
from .train_hook import TrainHook, hook_of


@dataclass
class TrainerArgs:
    """The configuration of a `Trainer`; the comments beside its members say what the names do not."""

    init_module: str | None = None  # imported first
    vars: Arguments = field(default_factory=dict)  # values that others refer to, by $(vars.name)
    compute_config: ComputeConfig = None  # type: ignore[assignment]  # required, with use_end2end
    gen_savedir: str = "./.nnscaler"
    gen_reuse: str = "auto"  # "moo" to compile, "match" to run
    pas_policy: Any = "autodist"  # the name of a policy, or a function
    broadcast_strategy: str = "all"
    instance_name: str | None = None
    run_mode: str = "run"  # or "compile": only write the files of `parallelize`
    dummy_sample_gen_fn: Any = None  # (TrainerArgs) -> sample, which is recorded; None: the first of the data set
    tracing_from_weights: str | None = None  # a file with the initial weights of the model
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    dataset_sampler: DatasetSamplerConfig | None = None
    lr_scheduler: LRSchedulerConfig | None = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: list[LogConfig] = field(default_factory=list)
    hook: Any = None  # HookConfig, HookMapConfig or a TrainHook
    debug: DebugConfig = field(default_factory=DebugConfig)
    precision: Any = None  # a name of `DTYPES` ("none": as they are), of all, or by "param", "buffer" and "input"
    micro_batch_size: int = 1  # of a unit
    global_batch_size: int | None = None  # micro_batch_size * units * grad_accumulation_steps
    grad_accumulation_steps: int | None = None
    max_epochs: int | None = None
    max_train_steps: int | None = None  # the first of both that is reached ends training
    max_val_steps: int | None = None
    val_every_n_train_steps: int | None = None
    val_every_n_epochs: int | None = 1
    enable_progress_bar: bool = True  # with tqdm; without it, or if False, figures are logged
    log_progress_every_n_train_steps: int | None = 100
    seed: int | None = None  # of torch, random and numpy, on every rank
    init_env_fn: Any = None  # (trainer), called after it

    def __post_init__(self) -> None:
        if self.compute_config is None or not self.compute_config.use_end2end:
            raise ValueError("compute_config is required, with use_end2end=True: the trainer calls train_step")
        for name in ("model", "optimizer", "dataset", "dataloader", "dataset_sampler", "lr_scheduler"):
            if getattr(self, name) is not None:
                check_type(getattr(self, name))
        at_least_one(self, "max_epochs", "max_train_steps", "micro_batch_size", "grad_accumulation_steps")
        if self.max_epochs is None and self.max_train_steps is None:
            raise ValueError("max_epochs or max_train_steps is required")
        of_step = self.micro_batch_size * self.scaling_factor
        steps = self.grad_accumulation_steps or max((self.global_batch_size or 0) // of_step, 1)
        size = self.global_batch_size or of_step * steps
        if size != of_step * steps:
            raise ValueError(
                f"global_batch_size={size} is not micro_batch_size={self.micro_batch_size} times {self.scaling_factor} "
                f"units times grad_accumulation_steps={steps}, which is {of_step * steps}"
            )
        self.global_batch_size, self.grad_accumulation_steps = size, steps
        one_of("run_mode", self.run_mode, ("run", "compile"))
        if self.gen_reuse == "auto":
            self.gen_reuse = "moo" if self.compile_mode else "match"
        ReuseType.of(self.gen_reuse)
        BroadcastGenFilesStrategy.of(self.broadcast_strategy)
        self.precision = precisions(self.precision)
        self.hook = hook_config(self.hook)
        for module in self.model.parallel_modules:
            if module.compute_config is not None:
                module.compute_config.resolve(self.compute_config)
            if load_type(module.type) is self.model_type:
                raise ValueError(
                    f"parallel_modules has the model's type {module.type}: leave it out, and the whole is divided"
                )
            if module.tracing_from_weights_prefix and not self.tracing_from_weights:
                raise ValueError(
                    "tracing_from_weights_prefix is a prefix in the file of tracing_from_weights, which is None"
                )
        if self.seed is None and self.init_env_fn is None:
            warnings.warn(
                "seed and init_env_fn are None: other initial weights in each run, and on each rank", stacklevel=3
            )
        self._vars = self.create_kwarg(self.vars)

    # --- from text, and to it

    @classmethod
    def from_cli(cls, argv: Sequence[Any]) -> TrainerArgs:
        """Reads `-f config.yaml --name value ...`; a value of the command line replaces that of the file.

        Raises:
            ValueError: the file is no YAML of members by name, or a value is wrong; the message begins with the file.
        """
        content: Any = {}
        argv, file = list(argv), ""
        if argv == ["-f"]:
            raise ValueError("-f has no file after it: write -f config.yaml")
        try:
            if argv[:1] == ["-f"]:
                file = f"{argv[1]}: "
                content, argv = _read(Path(argv[1])), argv[2:]
            merge_args(content, argv)
            resolve_args(content)
            return cls.from_dict(content)
        except ValueError as error:
            raise ValueError(f"{file}{error}") from error

    @classmethod
    def from_yaml(cls, path: str) -> TrainerArgs:
        """Reads a configuration file."""
        return cls.from_cli(["-f", path])

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> TrainerArgs:
        """Makes the configuration from nested dicts."""
        if content.get("init_module"):
            load_type(content["init_module"])
        return deserialize_dataclass(content, cls)

    def to_dict(self) -> dict[str, Any]:
        """Returns the configuration as plain data; classes and functions are their names, other objects text."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    # --- values

    def create_kwarg(self, value: Any) -> Any:
        """Returns an argument with `__type`, `__value_type` and `$!(..)` replaced by objects."""
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.create_kwarg, value))
        if isinstance(value, str) and value[:3] in ("$!(", "$!{") and value[-1] in ")}":
            first, _, path = value[3:-1].partition(".")
            if first not in ("self", "vars"):
                raise ValueError(f"{value}: a reference is $!(self), or begins with vars: $!(vars.name)")
            return self if first == "self" else self.get_resolved_var(path)
        if not isinstance(value, dict):
            return value
        items = {key: self.create_kwarg(item) for key, item in value.items()}
        if TYPE in items or VALUE_TYPE not in items:
            return made(items)
        if VALUE not in items:
            raise ValueError(f"{value} has {VALUE_TYPE!r} and no {VALUE!r}")
        kind = items[VALUE_TYPE]
        return load_type(items[VALUE]) if kind == "function" else load_type(kind)(items[VALUE])

    def get_resolved_var(self, fqn: str) -> Any:
        """Returns the object that is `vars.fqn`."""
        value = self._vars
        for part in fqn.split("."):
            if part not in value:
                raise ValueError(f"$!(vars.{fqn}): vars has no {part!r}; nearest: {nearest(part, value)}")
            value = value[part]
        return value

    @property
    def scaling_factor(self) -> int:
        """Number of units."""
        return self.compute_config.units

    @property
    def update_freq(self) -> int:
        """Microbatches of a step."""
        assert self.grad_accumulation_steps is not None
        return self.grad_accumulation_steps

    @property
    def compile_mode(self) -> bool:
        """Returns whether only files are written."""
        return self.run_mode == "compile"

    @property
    def model_type(self) -> type[nn.Module]:
        """The model's class."""
        model = load_type(self.model.type)
        if not isinstance(model, type) or not issubclass(model, nn.Module):
            raise ValueError(f"model type {self.model.type} is no subclass of nn.Module")
        return model

    @property
    def resolved_aggregate_outputs_fn(self) -> Any:
        """The function of `optimizer.aggregate_outputs_fn`, or None."""
        return load_type(self.optimizer.aggregate_outputs_fn or None)

    @property
    def resolved_pas_policy(self) -> Any:
        """The policy: a name, or a function."""
        return self.policy_of(self.pas_policy)

    def policy_of(self, policy: Any) -> Any:
        """Returns a policy's name, or the function of this name."""
        if isinstance(policy, str) and "." not in policy:
            one_of("pas_policy", policy, POLICIES)
            return policy
        return load_type(policy)

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype of floating-point inputs; None: as they are."""
        return DTYPES[self.precision["input"]]

    def to_precision(self, module: nn.Module) -> nn.Module:
        """Converts a module's floating-point parameters and buffers, in place."""
        for part, tensors in (("param", [*module.parameters()]), ("buffer", [*module.buffers()])):
            for tensor in filter(torch.is_floating_point, tensors):
                tensor.data = tensor.data.to(dtype=DTYPES[self.precision[part]])
        return module

    # --- components

    def init_env(self, trainer: Any) -> None:
        """Seeds the random generators, and calls `init_env_fn`."""
        if self.seed is not None:
            torch.manual_seed(self.seed)
            random.seed(self.seed)
            with suppress(RuntimeError):  # numpy is not installed
                load_type("numpy.random.seed")(self.seed)
        if self.init_env_fn is not None:
            load_type(self.init_env_fn)(trainer)

    def create_model(self) -> nn.Module:
        """Makes the model, in its precision, with the weights of `tracing_from_weights`."""
        model = self.to_precision(self.model_type(**self.create_kwarg(self.model.args)))
        if self.tracing_from_weights:
            model.load_state_dict(torch.load(self.tracing_from_weights, map_location="cpu", weights_only=True))
        return model

    def create_parallel_optimizer(self, parallel_model: nn.Module) -> Any:
        """Makes the optimizer of the parallel model."""
        arguments = self.create_kwarg(self.optimizer.args)
        return build_optimizer(parallel_model, load_type(self.optimizer.type), self.compute_config, **arguments)

    def create_dataset(self, stage: str = "train") -> Any:
        """Makes a data set of "train", "val" or "test"; None: the latter two without arguments."""
        arguments = self._arguments(self.dataset, stage)
        return load_type(self.dataset.type)(**arguments) if arguments or stage == "train" else None

    def create_sampler(self, dataset: Any, stage: str = "train") -> Any:
        """Makes the sampler of this unit's rows."""
        config = self.dataset_sampler or DatasetSamplerConfig()
        arguments = self._arguments(config, stage) or self._arguments(config, "train")
        rank = comm.current().rank if comm.is_initialized() else int(os.environ.get("RANK", 0))
        place = {"num_replicas": self.scaling_factor, "rank": rank // self.compute_config.plan_ngpus}
        return load_type(config.type)(**{**arguments, "dataset": dataset, **place})

    def create_dataloader(self, stage: str = "train", dataset: Any = None, **options: Any) -> Any:
        """Makes the loader of this unit's microbatches, which are full; None: there is no such data set.

        Args:
            options: arguments that replace the configured ones.
        """
        arguments = self._arguments(self.dataloader, stage) or self._arguments(self.dataloader, "train")
        if "batch_size" in arguments:
            raise ValueError("dataloader: batch_size is micro_batch_size; leave it out of the arguments")
        dataset = self.create_dataset(stage) if dataset is None else dataset
        if dataset is None:
            return None
        if "collate_fn" in arguments:
            arguments["collate_fn"] = load_type(arguments["collate_fn"])
        if not isinstance(dataset, IterableDataset):
            arguments["sampler"] = self.create_sampler(dataset, stage)
        elif self.dataset_sampler:
            raise ValueError("dataset_sampler: an IterableDataset has none, and gives the rows of a unit itself")
        arguments |= {"dataset": dataset, "batch_size": self.micro_batch_size, **options}
        loader = load_type(self.dataloader.type)(**arguments)
        sampler: Any = getattr(loader, "sampler", None)
        rows = len(sampler) % self.micro_batch_size if hasattr(sampler, "__len__") else 0
        if rows and not getattr(loader, "drop_last", True):
            warnings.warn(
                f"the last batch of the {stage} data set has {rows} rows of each unit, not micro_batch_size="
                f"{self.micro_batch_size}, for which the model is recorded: it is left out, as with drop_last=True in "
                f"dataloader.{stage}_args",
                stacklevel=2,
            )
            loader = load_type(self.dataloader.type)(**{**arguments, "drop_last": True})
        return loader

    def create_lr_scheduler(self, optimizer: Any) -> Any:
        """Makes the scheduler of learning rates, or None."""
        config = self.lr_scheduler
        return config and load_type(config.type)(optimizer, **self.create_kwarg(config.args))

    def create_loggers(self) -> list[Any]:
        """Makes the loggers."""
        return [load_type(config.type)(**self.create_kwarg(config.args)) for config in self.log]

    def create_hook(self) -> Any:
        """Makes the hook of `hook`; without one, a hook that does nothing."""
        if isinstance(self.hook, HookConfig):
            return load_type(self.hook.type)(self.create_kwarg(self.hook.args))
        if isinstance(self.hook, TrainHook):
            return self.hook
        return hook_of({event: load_type(function) for event, function in vars(self.hook or HookMapConfig()).items()})

    def _arguments(self, config: DatasetConfig, stage: str) -> Arguments:
        return dict(self.create_kwarg(getattr(config, f"{stage}_args")))


def _read(path: Path) -> dict[str, Any]:
    """Returns the content of a YAML file.

    Raises:
        ValueError: it is no YAML, or no dict.
    """
    text = path.read_text()
    try:
        content = load_type("yaml.safe_load")(text) or {}
    except load_type("yaml.YAMLError") as error:
        raise ValueError(f"it is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"it is the {type(content).__name__} {content!r:.60}: write members by name, as max_epochs: 4")
    return content


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key if isinstance(key, (str, int)) else str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x\w+", "", str(value))  # an address differs by process
