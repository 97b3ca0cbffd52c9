"""The base class of emitted classes: parameters as this rank holds them, training and inference steps.

    class Divided(ParallelModule):              # written by `emit`
        AXIS, SIZE = "tp", 2
        STORED = {"layers.0.weight": Stored("parameter", (16, 16), torch.float32, S(0)), ...}
        def forward(self, x): ...

Parameters and buffers stand in containers under their original names, so that state dicts have the original's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from itertools import combinations
from pickle import PicklingError
from typing import Any, ClassVar

import torch
from torch import nn

from ... import comm
from ...gradients.guards import watch_module
from ...gradients.in_backward import paused
from ...gradients.norm import clip_grad_norm
from ...mesh import rest_of
from ...torch_internals.modules import non_persistent_buffers
from ...torch_internals.tensors import pytree, state_dict_metadata
from ...weights.shard_spec import ShardedModule, set_spec
from ...weights.wrappers import refuse_wrapper
from ..config import ComputeConfig
from .layouts import LAYOUT, layout_data
from .module_tensors import buffers_kept, device_of
from .pipelined import Pipelined, StageTable
from .random_stream import whole_values
from .recorded_arguments import at_path, check_arguments
from .stored import Stored

__all__ = ["Container", "ParallelModule", "check_loss_is_first", "loss_of", "pipelined"]


def pipelined(module: ParallelModule) -> Pipelined | None:
    """The executor of a module's pipeline stages, or None for a module without a pipeline."""
    return module._pipeline


def _if_called(register: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of `nn.Module` that registers hooks, refused where nothing calls the module."""

    @wraps(register)
    def checked(module: Container, *args: Any, **kwargs: Any) -> Any:
        reason = module._not_called()
        if reason:
            raise RuntimeError(
                f"{register.__name__}: {reason}, so that the hook would never run. Register it on the original module, "
                "before parallelize, which records what it computes"
            )
        return register(module, *args, **kwargs)

    return checked


class Container(ShardedModule):
    """One level of the original's names: `self.layers[0].weight`."""

    register_forward_hook = _if_called(nn.Module.register_forward_hook)
    register_forward_pre_hook = _if_called(nn.Module.register_forward_pre_hook)
    register_full_backward_hook = _if_called(nn.Module.register_full_backward_hook)
    register_full_backward_pre_hook = _if_called(nn.Module.register_full_backward_pre_hook)

    def _not_called(self) -> str:
        """Returns why the module's forward is not called; "": it is."""
        return "the emitted forward uses the weights of a layer, and does not call the layer"

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter) and hasattr(value, "device_mesh"):
            refuse_wrapper("fully_shard", ParallelModule)  # which makes parameters DTensors
        super().__setattr__(name, value)

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_uninitialised"] = {}  # name of a buffer without a value -> its qualified name

    def __getitem__(self, key: int | str) -> Any:
        """Returns the original's tensor or submodule of a name, also if `Container` has an attribute of that name."""
        name = str(key)
        for table in (self._modules, self._parameters, self._buffers):
            if name in table and name not in self.__dict__["_uninitialised"]:
                return table[name]
        return self.__getattr__(name)

    def __getattr__(self, name: str) -> Any:
        uninitialised = self.__dict__.get("_uninitialised")
        if uninitialised and name in uninitialised:
            raise RuntimeError(
                f"buffer {uninitialised[name]!r} has no value: the module was made with init_params=False"
                + (
                    ", and it is in no state dict: make it with init_params=True, or call broadcast_weights"
                    if name in non_persistent_buffers(self)
                    else ": load a state dict, or call broadcast_weights"
                )
            )
        return super().__getattr__(name)

    def initialised(self, name: str) -> None:
        """Notes that buffer `name` has a value from now on."""
        self.__dict__["_uninitialised"].pop(name, None)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name in [name for name in self.__dict__["_uninitialised"] if prefix + name in state_dict]:
            self.initialised(name)


class _NewObject:
    """Makes an object without `__init__`, for copies; it cannot be pickled."""

    def __init__(self, cls: type[ParallelModule]) -> None:
        self.cls = cls

    def __call__(self) -> Any:
        return object.__new__(self.cls)

    def __reduce__(self) -> Any:
        raise PicklingError(
            f"{self.cls.__name__} is a parallel module, whose class is in generated files that pickle cannot import: "
            "save its state_dict(), and make the module by parallelize where it is loaded"
        )


class ParallelModule(Container):
    """A module divided over the ranks of a unit. Its subclasses are emitted.

    Args:
        init_params: parameters and buffers get the values of the original at the time of recording; False: they are
            empty, and reading a buffer before it has a value is an error.

    Attributes:
        compute_config: the configuration that it was compiled for.
    """

    AXIS: ClassVar[str] = "tp"
    SIZE: ClassVar[int] = 1
    PARTS: ClassVar[tuple[str, ...]] = ()  # parts of the axis, if the program is divided over several
    STORED: ClassVar[dict[str, Stored]] = {}
    INPUTS: ClassVar[dict[str, tuple[list[int], torch.dtype]]] = {}
    SOURCE: ClassVar[str] = ""  # the text of the file
    PROOF: ClassVar[str] = ""  # the report of its proof, with what was not compared
    PLAN: ClassVar[str] = ""  # the text of its plan's file
    FIXED: ClassVar[dict[str, Any]] = {}
    DRAWS: ClassVar[bool] = False  # forward draws random numbers
    IN_EVALUATION: ClassVar[bool] = False  # objects begin in evaluation mode, as the original of the class
    WEIGHTS: ClassVar[Callable[[], Mapping[str, torch.Tensor]]]  # whole initial parameters and buffers, by name
    CONSTANTS: ClassVar[Mapping[str, torch.Tensor]]
    RANKS: ClassVar[int] = 1  # groups of ranks of a unit that pipeline stages lie on
    MICROBATCHES: ClassVar[int] = 1
    SCHEDULE: ClassVar[str] = ""
    STAGES: ClassVar[StageTable] = {}
    EVAL_STAGES: ClassVar[StageTable] = {}  # those of evaluation mode, if they differ
    instead_of_wrappers = (
        "gradients are summed over the units by the optimizer that neuronx_dist.parallelize.build_optimizer returns"
    )
    compute_config: ClassVar[ComputeConfig]
    run: ClassVar[Callable[..., Any]]  # the emitted forward; `forward` refuses on an end2end module

    def __init__(self, init_params: bool = True) -> None:
        super().__init__()
        self._index = self._shard_index()
        has_weights = any(stored.kind in ("parameter", "buffer") for stored in self.STORED.values())
        weights = type(self).WEIGHTS() if init_params and has_weights else None
        tensors: dict[str, torch.Tensor] = {}
        for name, stored in self._local_stored().items():  # in the order of the original's state dict
            first = stored.same_as or name
            if first not in tensors:
                of_first = self.STORED[first]
                tensors[first] = self._part(first, of_first, self.CONSTANTS if of_first.kind == "constant" else weights)
            self._register(name, self.STORED[first], tensors[first], weights is None)
        self._pipeline = self._make_pipeline() if self.RANKS > 1 else None
        self.train(not self.IN_EVALUATION)
        self._watch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._watch()

    def _watch(self) -> None:
        """Makes torch's clipping, and optimizers that `build_optimizer` did not make, refuse gradients of one unit."""
        if self.num_units > 1 or self.num_stages > 1:
            watch_module(self)

    @property
    def num_units(self) -> int:
        """Number of units over which its gradients are summed."""
        return self.compute_config.units

    @property
    def num_stages(self) -> int:
        """Number of groups of ranks that hold its pipeline stages."""
        return self.RANKS

    def _not_called(self) -> str:
        return "train_step and infer_step do not call forward" if self.compute_config.use_end2end else ""

    def _shard_index(self) -> int:
        """Returns the index of the shard that this rank holds."""
        if self.SIZE == 1:
            return 0
        if not comm.is_initialized():
            raise RuntimeError(
                f"{type(self).__name__} is divided over {self.SIZE} ranks, but there is no mesh: load it under "
                "torchrun, or inside `neuronx_dist.comm.threads.run`; pass load_module=False to compile only"
            )
        size = comm.size(self.AXIS)
        if size != self.SIZE:
            raise RuntimeError(
                f"{type(self).__name__} is divided over {self.SIZE} ranks of axis {self.AXIS!r}, but the mesh has "
                f"{size}: {comm.current().mesh}"
            )
        for number in range(1, len(self.PARTS)):  # while all ranks are here: a stage of a pipeline uses them alone
            for parts in combinations(self.PARTS, number):
                comm.communicator(rest_of(*parts))
        return comm.rank(self.AXIS)

    def _local_stored(self) -> dict[str, Stored]:
        """Returns the stored tensors of this rank's pipeline stages."""
        if self.RANKS == 1:
            return self.STORED
        ranks = comm.size("pp") if comm.is_initialized() else 1
        if ranks != self.RANKS:
            raise RuntimeError(
                f"{type(self).__name__} has pipeline stages on {self.RANKS} groups of ranks, but the mesh has {ranks} "
                f"along pp: initialize the mesh as compute_config.mesh({self.RANKS})"
            )
        group = comm.rank("pp")
        return {
            name: stored
            for name, stored in self.STORED.items()
            if not stored.stages or group in _holders(stored, ranks)
        }

    def _make_pipeline(self) -> Pipelined:
        used_by = {name: stored.stages for name, stored in self.STORED.items() if stored.kind == "parameter"}
        return Pipelined(self, self.RANKS, len(self.STAGES), self.MICROBATCHES, self.SCHEDULE, used_by)

    def _part(self, name: str, stored: Stored, source: Mapping[str, torch.Tensor] | None) -> torch.Tensor:
        """Returns this rank's part of a stored tensor; without a source it is empty."""
        spec = stored.spec(self.AXIS, self.SIZE)
        if source is None:
            tensor = torch.empty(spec.local_shape, dtype=stored.dtype)
        else:
            whole = source[name].detach()
            if tuple(whole.shape) != stored.shape:
                raise ValueError(
                    f"{type(self).__name__}: the initial {name} has shape {list(whole.shape)}, but the program was "
                    f"emitted for {list(stored.shape)}: pass the weights of the same model"
                )
            tensor = (
                spec.local_slice(whole, spec.index_of(self._index))
                .to(torch.get_default_device(), copy=True)
                .contiguous()
            )
        return nn.Parameter(tensor, requires_grad=stored.trained) if stored.kind == "parameter" else tensor

    def _register(self, name: str, stored: Stored, tensor: torch.Tensor, is_empty: bool) -> None:
        """Registers a tensor in the tables of its container: `register_parameter` refuses names such as `run`."""
        owner, attribute = self._owner(name)
        if isinstance(tensor, nn.Parameter):
            owner._parameters[attribute] = tensor
            set_spec(owner, attribute, stored.spec(self.AXIS, self.SIZE))
            return
        owner._buffers[attribute] = tensor
        if stored.kind != "buffer" or not stored.persistent:
            non_persistent_buffers(owner).add(attribute)
        if is_empty and stored.kind == "buffer" and not tensor.is_meta:
            owner.__dict__["_uninitialised"][attribute] = name

    def _owner(self, name: str) -> tuple[Container, str]:
        """Returns the container of a parameter or buffer, made if there is none, and the name in it."""
        *path, attribute = name.split(".")
        owner: Container = self
        for part in path:
            if part not in owner._modules:
                owner._modules[part] = Container()
            owner = owner._modules[part]  # type: ignore[assignment]
        return owner, attribute

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Saves the layout for `merge_state_dicts` in the state dict's metadata: all keys are the original's."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata: Any = state_dict_metadata(destination).get(prefix[:-1])
        if metadata is not None:
            held = self._local_stored()
            elsewhere = [name for name in self.STORED if name not in held]
            metadata[LAYOUT] = layout_data(self, self._index, self.compute_config, elsewhere)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies are made as of any module; pickling is refused, since no other process can import the class."""
        reduced: Any = super().__reduce_ex__(protocol)
        return _NewObject(type(self)), (), *reduced[2:]

    @property
    def device(self) -> torch.device:
        """The device of its tensors; on a rank that holds none, the device of its mesh's backend."""
        return device_of(self)

    # --- steps -------------------------------------------------------------------------------------------------------

    def check_arguments(self, /, **given: Any) -> None:
        """Raises ValueError if arguments differ from the recorded ones in structure, shape, dtype or plain values."""
        check_arguments(type(self).__name__, self.INPUTS, self.FIXED, given)

    def train_step(
        self,
        samples: Sequence[Any],
        is_dummy_batch: Sequence[bool] | None = None,
        scale_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> list[Any]:
        """Replaces the gradients by the sums over all samples, and returns the results of forward.

        Args:
            samples: values of forward's first argument; a single sample is a list of one. A pipeline takes a
                list of `pipeline_nmicros` samples.
            is_dummy_batch: marks samples that add nothing, neither to gradients nor to statistics in buffers.
            scale_fn: scales the loss before backward; the returned loss is not scaled.

        Raises:
            RuntimeError: the module is not end2end, or was compiled for inference only.
            ValueError: `is_dummy_batch` has another length, or a pipeline got another number of samples.
            TypeError: a pipeline got a single sample.
        """
        self._need_end2end("train_step")
        if self.compute_config.inference_only:
            raise RuntimeError("train_step: the module was compiled with inference_only=True, which has no backward")
        samples = self._samples(samples)
        if not samples:
            raise ValueError(
                "train_step got no samples: on a unit without data, pass one sample and is_dummy_batch=[True]"
            )
        dummies = [False] * len(samples) if is_dummy_batch is None else list(is_dummy_batch)
        if len(dummies) != len(samples):
            raise ValueError(f"train_step: got {len(samples)} samples, but is_dummy_batch has {len(dummies)} entries")
        self.zero_grad()
        if self._pipeline is not None:
            numbers = {number for number, dummy in enumerate(dummies) if dummy}
            with self._random_numbers():
                results = self._pipeline.train(self, self._stages(), samples, numbers, scale_fn)
            self._fill_gradients(all(dummies))
            return results
        results = []
        last = max((number for number, dummy in enumerate(dummies) if not dummy), default=None)
        for number, sample in enumerate(samples):
            with buffers_kept(self) if dummies[number] else nullcontext():
                result = self.run(sample)
            if not dummies[number]:
                loss = loss_of(result)
                # Reductions that start in backward start in the last one.
                with nullcontext() if number == last else paused(self.parameters()):
                    (loss if scale_fn is None else scale_fn(loss)).backward()
            results.append(_detached(result))
        self._fill_gradients(all(dummies))
        return results

    def _fill_gradients(self, is_dummy: bool) -> None:
        """Fills gradients with zeros after a step of dummies only: other units sum their gradients with these."""
        for parameter in self.parameters() if is_dummy else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    def _random_numbers(self) -> AbstractContextManager[None]:
        """Returns a context in which whole values get equal random numbers on all ranks of a stage."""
        return whole_values(self.AXIS) if self.DRAWS else nullcontext()

    def _stages(self) -> StageTable:
        return self.EVAL_STAGES or self.STAGES if not self.training else self.STAGES

    def infer_step(self, samples: Sequence[Any]) -> list[Any]:
        """Returns the results of forward for each sample, without gradients; a single sample is a list of one.

        Raises:
            RuntimeError: the module is not end2end.
        """
        self._need_end2end("infer_step")
        if self._pipeline is not None:
            samples = self._samples(samples)
            with self._random_numbers():
                return self._pipeline.infer(self, self._stages(), samples)
        with torch.no_grad():
            return [self.run(sample) for sample in self._samples(samples)]

    def _need_end2end(self, what: str) -> None:
        if not self.compute_config.use_end2end:
            raise RuntimeError(
                f"{what} needs an end2end module: compile with ComputeConfig(use_end2end=True), or call the module"
            )

    def _samples(self, samples: Any) -> Sequence[Any]:
        """Returns a list of samples; a single sample is recognised by the paths of its inputs.

        Raises:
            TypeError: a pipeline got no list, or a single sample.
        """
        if self._pipeline is not None and (not isinstance(samples, (list, tuple)) or self._is_sample(samples)):
            raise TypeError(
                f"{type(self).__name__} is a pipeline of {self.MICROBATCHES} microbatches: pass a list of "
                f"{self.MICROBATCHES} samples, not {type(samples).__name__}"
            )
        if self._pipeline is not None:  # a stage that fails alone would leave the others waiting
            argument = next(iter(self.INPUTS), "").partition(".")[0]
            for sample in samples:
                self.check_arguments(**{**self.FIXED, argument: sample})
        if isinstance(samples, (list, tuple)) and not self._is_sample(samples):
            return samples
        return [samples]

    def _is_sample(self, x: Any) -> bool:
        within = [path.partition(".")[2] for path in self.INPUTS]
        return bool(within) and all(isinstance(at_path(x, path), torch.Tensor) for path in within)

    # --- its parameters -----------------------------------------------------------------------------------------------

    def parameters_for_optimizer(self) -> list[nn.Parameter]:
        """Returns the parameters for an optimizer, as this rank holds them. (ZeRO shards them by itself.)"""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def parameter_names(self) -> list[str]:
        """Returns the names of all parameters of the whole module, other stages included, in the original's order."""
        names: dict[str, str] = {}
        for name, stored in self.STORED.items():
            first = stored.same_as or name
            if self.STORED[first].kind == "parameter":
                names.setdefault(first, name)
        return list(names.values())

    def stages_of_weights(self) -> dict[str, comm.Communicator]:
        """Returns the groups of ranks that share weights over pipeline stages, by all names of this rank's weights."""
        groups = {} if self._pipeline is None else self._pipeline.tied
        names = {name: stored.same_as or name for name, stored in self._local_stored().items()}
        return {name: groups[first] for name, first in names.items() if first in groups}

    def gather_params(self) -> None:
        """Does nothing: the step of ZeRO has already gathered the parameters that other ranks updated."""

    def clip_gnorm(self, max_norm: float | None = None) -> torch.Tensor:
        """Returns the norm of all gradients, each element of the whole model counted once; clips them to `max_norm`.

        Raises:
            RuntimeError: with several units or ZeRO, because the optimizer has the gradients summed over units.
        """
        config = self.compute_config
        if config.units > 1 or config.use_zero:
            has = "use_zero=True" if config.use_zero else f"{config.units} units"
            raise RuntimeError(
                f"{type(self).__name__}.clip_gnorm: with {has} the module has the gradients of one unit, but the "
                "optimizer uses their sum over the units: call clip_gnorm() of the optimizer that build_optimizer "
                "returned"
            )
        return clip_grad_norm(self.parameters(), float("inf") if max_norm is None else max_norm)


def _holders(stored: Stored, ranks: int) -> list[int]:
    """Returns the groups of ranks that hold a tensor of these stages."""
    return sorted({stage % ranks for stage in stored.stages})


def loss_of(result: Any) -> torch.Tensor:
    """Returns the first result of forward, the loss.

    Raises:
        ValueError: it is no tensor of one element, or another result is called the loss.
    """
    check_loss_is_first(result)
    first: Any = next(iter(pytree.tree_leaves(result)), None)
    if not isinstance(first, torch.Tensor) or first.numel() != 1:
        has = f"a tensor of shape {list(first.shape)}" if isinstance(first, torch.Tensor) else repr(first)
        raise ValueError(f"the first result of an end2end module must be its loss, a scalar tensor, not {has}")
    return first


def check_loss_is_first(result: Any) -> None:
    """Raises ValueError if a result is a dict whose "loss" is not its first entry, which is trained on."""
    names = [*result] if isinstance(result, Mapping) else []
    if "loss" in names[1:]:
        raise ValueError(
            f"forward returns a dict with {names[0]!r} before 'loss', but its first entry is trained on: put 'loss' "
            "first"
        )


def _detached(result: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
