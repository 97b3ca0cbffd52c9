"""Optimizers of parallel modules: any optimizer of torch, whose gradients are summed over the units before its step.

    optimizer = build_optimizer(model, torch.optim.AdamW, lr=1e-3)
    loss.backward()
    optimizer.clip_gnorm(1.0)          # sums the gradients over the units first
    optimizer.step()                   # sums them, if that was not done yet
    optimizer.zero_grad()

With `use_zero` its state is sharded over the units (`NeuronZero1Optimizer`). Then the shards have the summed gradients,
which are None before the sum; the parameters keep the gradients of their unit. Without it a parameter's `.grad` is the
gradient of its unit before the sum, and the sum after it. A `MixedPrecisionAdam` has shards in both cases: fp32 copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import nn

from ... import comm
from ...gradients.elementwise import refuse_not_elementwise
from ...gradients.gradient import parameters_of
from ...gradients.in_backward import paused
from ...mesh import Mesh
from ...optimizer.muon import is_muon_class
from ...optimizer.zero1 import NeuronZero1Optimizer
from ..config import ComputeConfig
from .gradient_sync import GradientSync, ShardedSync
from .layouts import LAYOUT
from .module_tensors import device_of
from .optimizer_layout import Rows, optimizer_layout
from .parallel_module import ParallelModule
from .reducer import Hook, Reducer

__all__ = [
    "MixedPrecisionAdam",
    "MixedPrecisionAdamW",
    "MixedPrecisionF16OptimizerMixin",
    "ParallelOptimizer",
    "build_optimizer",
    "parallel_modules",
    "sync_grad_when",
]

_EXTRA = "parallelize.optimizers"


class MixedPrecisionF16OptimizerMixin(torch.optim.Optimizer):
    """Marks an optimizer of bf16 or fp16 parameters, whose update and state are those of fp32 copies.

    `build_optimizer` makes the copies, with `use_zero` a shard of each, and casts them to the parameters after a step.
    """

    f16_params: list[nn.Parameter]
    fp32_params: list[nn.Parameter]

    @classmethod
    def build_fp32_params(cls, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Returns the parameters themselves, for constructors of nnScaler's scripts."""
        return list(params)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        low = next((param for param in parameters_of(self) if param.dtype.itemsize < 4), None)
        if low is not None:
            raise RuntimeError(
                f"{type(self).__name__}.step: a parameter is {low.dtype} and has no fp32 copy, without which small "
                f"updates are lost: pass the class to build_optimizer(model, {type(self).__name__}, ...)"
            )
        return super().step(closure)


class MixedPrecisionAdam(MixedPrecisionF16OptimizerMixin, torch.optim.Adam):
    """`torch.optim.Adam` of fp32 copies; the name is nnScaler's."""


class MixedPrecisionAdamW(MixedPrecisionF16OptimizerMixin, torch.optim.AdamW):
    """`torch.optim.AdamW` of fp32 copies; the name is nnScaler's."""


@runtime_checkable
class ParallelOptimizer(Protocol):
    """Protocol of the methods that `build_optimizer` adds to a torch optimizer."""

    _non_parallel_module_reducer: Reducer | None

    def sync_shard_grad(self) -> None:
        """Sums the gradients over the units. A second call before the next backward changes nothing."""

    def scale_grads(self, scale: float | torch.Tensor) -> None:
        """Multiplies the summed gradients.

        Raises:
            RuntimeError: the gradients are not summed yet.
        """

    def clip_gnorm(self, max_norm: float | None = None) -> torch.Tensor:
        """Returns the norm of all summed gradients, each element counted once; clips them to `max_norm`."""

    def register_reducer_pre_hook(self, fn: Hook) -> None:
        """Calls `fn(reducer, flat)` with the gradients of each bucket, `[elements]`, before they are summed."""

    def register_reducer_post_hook(self, fn: Hook) -> None:
        """Calls `fn(reducer, flat)` with the summed gradients of each bucket; under ZeRO with those of the shards."""


def build_optimizer(
    module: nn.Module,
    optimizer_fn: Callable[..., torch.optim.Optimizer],
    compute_config: ComputeConfig | None = None,
    **kwargs: Any,
) -> Any:
    """Builds an optimizer of a parallel module, or of a module with parallel submodules.

    Args:
        module: a `ParallelModule`, or a module with parallel submodules. Its other parameters are equal on all ranks of
            a unit, and their gradients are summed over the units too (`_non_parallel_module_reducer`).
        optimizer_fn: a torch optimizer class, or a function that makes an optimizer from a list of parameters, which it
            may divide into groups. Under ZeRO, and where parameters are cut, its update must be elementwise; or Muon's,
            under ZeRO.
        compute_config: decides how the state is sharded and gradients are reduced; None: the configuration of the
            parallel modules.
        kwargs: arguments of `optimizer_fn`.

    Returns:
        The optimizer, with the methods of `ParallelOptimizer`; under ZeRO a `NeuronZero1Optimizer`.

    Raises:
        ValueError: parallel modules have different sizes, or are sharded differently; one is inside another; an end2end
            module is not the whole; the mesh has other sizes; an update needs more of the model than a rank has.
        RuntimeError: the module was compiled for inference only, or fp32 copies need a job and a configuration.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"build_optimizer takes the module, not its parameters: got {type(module).__name__}")
    if isinstance(optimizer_fn, torch.optim.Optimizer) or not callable(optimizer_fn):
        raise TypeError(
            "optimizer_fn must be an optimizer class, such as torch.optim.AdamW, or a function that makes an optimizer "
            f"of parameters; got a {type(optimizer_fn).__name__}"
        )
    if not isinstance(compute_config, (ComputeConfig, type(None))):
        raise TypeError(f"compute_config must be a ComputeConfig or None, got {compute_config!r}")
    modules = parallel_modules(module)
    config = _config(module, modules, compute_config)
    _check_mesh(config)
    params = list(module.parameters())  # a pipeline stage may have none
    params = params or [nn.Parameter(torch.zeros(0, device=device_of(module)))]
    optimizer = optimizer_fn(params, **kwargs)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer_fn {optimizer_fn!r} made a {type(optimizer).__name__}, not a torch optimizer")
    is_mixed = isinstance(optimizer, MixedPrecisionF16OptimizerMixin)
    if config is not None and (config.use_zero or is_mixed) and comm.is_initialized():
        optimizer = _sharded(optimizer, config, is_mixed)
    elif is_mixed:
        _check_dtypes(optimizer, config)
    for parallel_module in modules.values():
        _check_update(type(optimizer), parallel_module)
    reducers, other = _reducers(module, modules, config, isinstance(optimizer, NeuronZero1Optimizer))
    sync = ShardedSync(optimizer, reducers) if isinstance(optimizer, NeuronZero1Optimizer) else GradientSync(reducers)
    # A subclass, not attributes of the object: schedulers and isinstance see an optimizer of its class.
    cls = type(optimizer)
    optimizer.__class__ = type(f"Parallel{cls.__name__}", (_Synchronized, cls), {"__module__": __name__})
    optimizer.__dict__["_gradient_sync"] = sync
    optimizer.__dict__["_non_parallel_module_reducer"] = other
    optimizer.__dict__["_module"] = module
    optimizer.__dict__["_config"] = config
    if comm.is_initialized():
        comm.current().extras.setdefault(_EXTRA, WeakSet()).add(optimizer)
    return optimizer


def parallel_modules(module: nn.Module) -> dict[str, ParallelModule]:
    """Returns the parallel modules of a module, by name; "": the module itself.

    Raises:
        ValueError: a parallel module is inside of another, or an end2end module is not the whole.
    """
    found = {name: child for name, child in module.named_modules() if isinstance(child, ParallelModule)}
    for name, child in found.items():
        inner = next((other for other in found if other != name and other.startswith(f"{name}." if name else "")), None)
        if inner is not None:
            raise ValueError(
                f"parallel module {inner!r} is inside parallel module {name or '(the whole)'!r}: parallelize either "
                "the outer module, whose recording includes the inner one, or the inner module"
            )
        if name and child.compute_config.use_end2end:
            raise ValueError(
                f"{name!r} is an end2end module inside another module, but its train_step makes whole training steps: "
                "parallelize it with use_end2end=False, or pass it alone"
            )
    return found


@contextmanager
def sync_grad_when(condition: bool) -> Iterator[None]:
    """Sums gradients over the units inside only if `condition` holds: for accumulation outside of `train_step`.

    With False `sync_shard_grad` does nothing and no reduction starts in backward; call `step` outside of the context.
    """
    with ExitStack() as stack:
        if not condition:
            optimizers = list(comm.current().extras.get(_EXTRA, ())) if comm.is_initialized() else []
            for optimizer in optimizers:
                stack.enter_context(optimizer._gradient_sync.suspended())
                params = [param for group in optimizer.param_groups for param in group["params"]]
                stack.enter_context(paused(params))
        yield


class _Synchronized(torch.optim.Optimizer):
    """The base class that stands before the optimizer's class in the class of a parallel optimizer."""

    _gradient_sync: GradientSync
    _non_parallel_module_reducer: Reducer | None
    _module: nn.Module
    _config: ComputeConfig | None
    averages_over_data = True  # `step` sums over the units

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            self.sync_shard_grad()
            result = super().step()
        else:
            result = super().step(self._synchronising(closure))
        self._gradient_sync.step_is_done()
        return result

    def _synchronising(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def synchronised() -> Any:
            loss = closure()
            self.sync_shard_grad()
            return loss

        return synchronised

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._gradient_sync.begin()
        super().zero_grad(set_to_none)
        self._module.zero_grad(set_to_none)

    def __getstate__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: call build_optimizer of the other module, and its "
            "load_state_dict(optimizer.state_dict())"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__getstate__()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state and its layout, which `merge_state_dicts` reads."""
        return {**super().state_dict(), LAYOUT: optimizer_layout(self, self._module, self._config)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict that this rank saved in the same layout.

        Raises:
            ValueError: the state was saved in another layout.
        """
        current = optimizer_layout(self, self._module, self._config)
        layout = state_dict.get(LAYOUT, current)
        for what in ("specs", "shapes", "rows", "index"):
            if layout[what] != current[what]:
                raise ValueError(
                    f"the optimizer's state was saved in another layout ({what}: saved with {layout[what]}, now "
                    f"{current[what]}): merge the states of all ranks by merge_state_dicts, and load the result by "
                    "load_merged_state_dict"
                )
        super().load_state_dict({key: value for key, value in state_dict.items() if key != LAYOUT})

    def sync_shard_grad(self) -> None:
        self._gradient_sync.synchronise()

    def scale_grads(self, scale: float | torch.Tensor) -> None:
        self._gradient_sync.scale(scale)

    def clip_gnorm(self, max_norm: float | None = None) -> torch.Tensor:
        return self._gradient_sync.clip(max_norm)

    def register_reducer_pre_hook(self, fn: Hook) -> None:
        self._gradient_sync.add_pre_hook(fn)

    def register_reducer_post_hook(self, fn: Hook) -> None:
        self._gradient_sync.add_post_hook(fn)


def _check_dtypes(optimizer: torch.optim.Optimizer, config: ComputeConfig | None) -> None:
    """Raises RuntimeError if parameters need fp32 copies, which ranks of a job with a configuration make."""
    low = next((param.dtype for param in parameters_of(optimizer) if param.dtype.itemsize < 4), None)
    if low is not None:
        wanted = (
            "no module is parallelized: pass compute_config=ComputeConfig(1, number of ranks)"
            if config is None
            else "there is no job: call neuronx_dist.init_distributed() before, which is nnscaler.init()"
        )
        raise RuntimeError(f"build_optimizer: {type(optimizer).__name__} makes fp32 copies of {low}, but {wanted}")


def _sharded(optimizer: torch.optim.Optimizer, config: ComputeConfig, in_fp32: bool) -> NeuronZero1Optimizer:
    """Wraps an optimizer of whole parameters in ZeRO-1: shards replace the parameters in its groups.

    Args:
        in_fp32: shards of low-precision parameters are fp32; without `use_zero` each is the whole parameter's.
    """
    if not config.use_zero:
        config = replace(config, use_zero=True, zero_ngroups=config.units)
    size = config.units // config.zero_ngroups
    rows = Rows(size, comm.rank("dp") % size)

    def of_shards(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        for group, sharded in zip(optimizer.param_groups, groups):
            trained = [param for param in group["params"] if param.requires_grad]
            for param, shard in zip(trained, sharded["params"]):
                for key, value in optimizer.state.pop(param, {}).items():  # some optimizers have a state from the start
                    is_elementwise = isinstance(value, torch.Tensor) and value.shape == param.shape
                    optimizer.state[shard][key] = rows.cut(value) if is_elementwise else value
            group["params"] = sharded["params"]
        return optimizer

    dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
    return NeuronZero1Optimizer(
        [dict(group) for group in optimizer.param_groups],
        of_shards,
        optimizer_dtype=next(iter(dtypes)) if len(dtypes) == 1 and not in_fp32 else None,
        grad_clipping=False,
        sharding_groups=config.zero_groups(comm.current().mesh),
        bucket_cap_mb_reduce_scatter=config.reducer_bucket_cap_mb or 0,
        save_master_weights=len(dtypes) > 1 or in_fp32,
        overlap=config.use_async_reducer,
        average=False,
    )


def _reducers(
    module: nn.Module, modules: dict[str, ParallelModule], config: ComputeConfig | None, is_sharded: bool
) -> tuple[list[Reducer], Reducer | None]:
    """Returns all reducers, those of parallel modules first, and the reducer of the other parameters."""
    cap = None if config is None else config.reducer_bucket_cap_mb
    in_backward = config is not None and config.use_async_reducer and not is_sharded
    reducers, seen = [], set[int]()
    for parallel_module in modules.values():
        params = [param for param in parallel_module.parameters() if id(param) not in seen]
        seen.update(map(id, params))
        reducers.append(Reducer(params, cap_mb=cap, in_backward=in_backward))
    others = [param for param in module.parameters() if id(param) not in seen]
    other = Reducer(others, cap_mb=cap, in_backward=in_backward) if others else None
    return [*reducers, *([] if other is None else [other])], other


def _config(module: nn.Module, modules: dict[str, ParallelModule], given: ComputeConfig | None) -> ComputeConfig | None:
    """Returns the configuration of the optimizer.

    Raises:
        ValueError: the configurations of the parallel modules contradict one another, or the one that was passed.
        RuntimeError: a module has no backward.
    """
    configs = {name or type(module).__name__: parallel.compute_config for name, parallel in modules.items()}
    for name, config in configs.items():
        if config.inference_only:
            raise RuntimeError(f"{name!r} was compiled with inference_only=True: it has no backward to train by")
    if given is not None:
        configs["compute_config"] = given
    if not configs:
        return None
    first, reference = next(iter(configs.items()))
    for name, config in configs.items():
        if (config.plan_ngpus, config.runtime_ngpus) != (reference.plan_ngpus, reference.runtime_ngpus):
            raise ValueError(
                f"{first!r} is compiled for plan_ngpus={reference.plan_ngpus}, "
                f"runtime_ngpus={reference.runtime_ngpus}, {name!r} for {config.plan_ngpus}, {config.runtime_ngpus}: "
                "modules of one optimizer need equal numbers of units"
            )
        if given is None and (config.use_zero, config.zero_ngroups) != (reference.use_zero, reference.zero_ngroups):
            raise ValueError(
                f"{first!r} has use_zero={reference.use_zero}, zero_ngroups={reference.zero_ngroups}, {name!r} "
                f"{config.use_zero} and {config.zero_ngroups}: pass compute_config, whose values apply to all modules"
            )
    return reference if given is None else given


def _check_update(optimizer_class: type, module: ParallelModule) -> None:
    """Raises ValueError, on every rank, if an update needs more of the model than a rank holds."""
    parameters = [stored for stored in module.STORED.values() if stored.kind == "parameter"]
    is_cut = any(stored.spec(module.AXIS, module.SIZE).is_sharded for stored in parameters)
    if is_cut or module.RANKS > 1:
        advice = (
            ", or ComputeConfig(use_zero=True), where Muon gets whole matrices"
            if is_muon_class(optimizer_class)
            else ""
        )
        refuse_not_elementwise(optimizer_class, parts=is_cut, advice=advice)


def _check_mesh(config: ComputeConfig | None) -> None:
    if config is not None:
        config.check_mesh(comm.current().mesh if comm.is_initialized() else Mesh(1))
