"""ZeRO-1: an elementwise torch optimizer or Muon, its state and fp32 masters sharded over the data-parallel ranks.

    gradients --reduce-scatter (mean)--> shards --clip--> base optimizer on shards --all-gather--> parameters

Collectives go in buckets, which are planned once. They are started ahead and awaited in order, so that packing one
overlaps with the transfer of another.

This is stage 1 of "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (Rajbhandari et al., 2020).
Names and state-dict keys are those of NeuronX Distributed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import comm
from ..comm.rank_selection import in_one_program
from ..gradients.buckets import BucketPlan, cap_in_bytes, overlap
from ..gradients.gradient import DATA_AXES, ParameterGradient, parameters_of
from ..gradients.in_backward import BackwardReduction, Bucket, release
from ..gradients.norm import check_norm_groups, clip_grads_with_norm, norm_of, scale_grads
from ..gradients.state import refuse_averaged
from ..parallel_layers.utils import (
    copy_tensor_model_parallel_attributes,
    load_optimizer_state_dict,
    move_all_tensor_to_cpu,
)
from ..spmd.watching import active
from ..weights.torch_files import read_plain
from ..weights.wrappers import note_saved_state
from .base_optimizer import OptimizerFactory, check_factory, make_base_optimizer
from .gathers import Gathers
from .loss_scaler import LossScaler
from .matrix_owners import MatrixOwners
from .muon import MuonAdamW, refuse_other_optimizer, refuse_vectors
from .rank_state import check_loadable, rank_of_shards, state_path, turns
from .shard_buckets import (
    cut_buckets,
    finish_all_gather,
    finish_reduce_scatter,
    gradient_bucket,
    nbytes_of,
    start_all_gather,
    start_reduce_scatter,
)
from .sharding import DataSharding, Unsharded
from .shards import ParameterShard

__all__ = ["MasterWeightsOptimizer", "NeuronZero1Optimizer"]

_BUCKET_CAP_ENV = "ALL_GATHER_REDUCE_SCATTER_BUCKET_CAP_MB"
_BUCKET_CAP_MB = 130.0


class NeuronZero1Optimizer(torch.optim.Optimizer):
    """Wraps an optimizer class, and shards its state and master weights over the data-parallel ranks.

    It is used like any torch optimizer: with learning-rate schedulers, parameter groups, closures.

    Each parameter is split along dim 0 over the sharding group, zero-padded to a multiple of its size: a rank holds
    1/degree of the optimizer's state and of the master weights. Before `step`, gradients must be summed over tp under
    sequence parallelism and over pp for tied weights, which `reduce_gradients(model, average_over_data=False)` does
    (`run_train` calls it); `step` averages over the data, which changes nothing where gradients are averaged already
    (those of experts over ep raise a RuntimeError then).

    A parameter that is frozen at construction is left alone. One without a gradient on this rank counts as zero if
    another rank of the group has one, and is skipped, as torch does, if none has.

    Args:
        params: parameters or parameter groups of this rank (`local_parameters()` of a pipeline model).
        optimizer_class: a torch optimizer whose update is elementwise: SGD, Adam, AdamW, ...; `torch.optim.Muon` or
            `MuonAdamW`; or a factory that returns one for parameter groups: a `functools.partial` of a class, a
            function.
        optimizer_dtype: dtype of master weights and state. None: fp32, or the parameter's if that is wider.
        grad_clipping: False leaves gradients as they are, and `grad_norm` None.
        max_norm: norm to clip at; None means 1.0, `inf` only measures.
        pin_layout: an XLA setting, without effect.
        sharding_groups: lists of ranks which together are the world, or the Communicator of an axis. None: (dp, cp),
            and edp for experts. If they are parts of these (hybrid sharding), a rank's shard of the gradients is summed
            over the other parts too: the mean is over all of dp x cp in any case.
        grad_norm_groups: the tp groups, as NxD's trainer passes them; the norm is the whole model's in any case.
        lazy_init: make the shards at the first `init_zero()`, `step()` or `load_state_dict()` instead of now.
        bucket_cap_mb_all_gather, bucket_cap_mb_reduce_scatter: MB of the buffers that are held at a time: two of half
            the size, or one with a larger parameter. 0: the environment's `ALL_GATHER_REDUCE_SCATTER_BUCKET_CAP_MB`,
            else 130.
        use_grad_acc_hook: move each gradient to `param.main_grad`, fp32, as backward makes it: microbatches then
            accumulate in fp32. Clear it by this optimizer's `zero_grad`.
        save_master_weights: put `sharded_master_weights` into the state dict. Without them a resumed run starts from
            masters made of the parameters, which is exact only if these have the dtype of the masters.
        higher_cc_precision: send gradients in `optimizer_dtype` instead of their own.
        skip_nonfinite: leave out a step in which a gradient of any rank is NaN or infinite: parameters and state stay
            as they are. The host waits for the norm, in which all ranks see it: on XLA a step is two programs then,
            and a warning says so.
        loss_scaler: scales an fp16 loss: gradients and the norm are divided by its scale, and steps are left out as
            with `skip_nonfinite`. None: the loss is not scaled.
        norms_by_group: measure `grad_norms` too, in the same all-reduce. All ranks need the same number of parameter
            groups; a group is empty on a stage without any of its parameters.
        overlap: start the reduce-scatter of a bucket in backward, when its last gradient is there, and await the
            all-gather of updated parameters bucket by bucket in the next forward. All backwards of a step but the last
            are inside of `no_sync(model)`; a pipeline model needs no context, and starts the buckets after the last
            backward if it has several stages. Without effect on XLA, whose compiler orders a program's collectives, and
            while types are checked.
        average: False sums gradients over the data in place of their mean.
        defaults: arguments of `optimizer_class`.

    Attributes:
        base_optimizer: the optimizer of the shards; None as long as `lazy_init` postpones it.
        skipped_steps: how many steps were left out because a gradient was not finite.
        shards: this rank's shard of each trainable parameter, in order; empty as long as `lazy_init` postpones it.

    Raises:
        RuntimeError: there is no mesh; the message says what to call.
        ValueError: `max_norm` is not above 0.
        TypeError: an optimizer is given instead of its class, a module in place of parameters, or an option that
            neither class has.
        ValueError: the optimizer's update is not elementwise, and not Muon's; or the groups do not fit; or a parameter
            of Muon is no matrix.
    """

    averages_over_data = True  # `step` takes the mean that `reduce_gradients(average_over_data=False)` leaves out

    def __init__(
        self,
        params: Any,
        optimizer_class: OptimizerFactory,
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: Any = None,
        grad_norm_groups: Any = None,
        lazy_init: bool = False,
        bucket_cap_mb_all_gather: float = 0,
        bucket_cap_mb_reduce_scatter: float = 0,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = False,
        higher_cc_precision: bool = False,
        *,
        skip_nonfinite: bool = False,
        loss_scaler: LossScaler | None = None,
        norms_by_group: bool = False,
        overlap: bool = False,
        average: bool = True,
        **defaults: Any,
    ) -> None:
        check_factory(type(self), params, optimizer_class, defaults)
        comm.current()
        self.optimizer_class = optimizer_class
        self.optimizer_dtype = optimizer_dtype
        self.grad_clipping = grad_clipping
        self.max_norm = 1.0 if max_norm is None else max_norm
        if grad_clipping and not self.max_norm > 0:
            raise ValueError(
                f"max_norm={max_norm} would make all gradients 0: pass grad_clipping=False, which does not clip, or "
                "math.inf, which measures the norm alone"
            )
        self.save_master_weights = save_master_weights
        self.skip_nonfinite = skip_nonfinite or loss_scaler is not None
        self.loss_scaler = loss_scaler
        self.skipped_steps = 0
        self._options = defaults
        self._higher_cc_precision = higher_cc_precision
        self._use_grad_acc_hook = use_grad_acc_hook
        self._sharding = (
            sharding_groups if isinstance(sharding_groups, Unsharded) else DataSharding(sharding_groups, average)
        )
        if grad_norm_groups is not None:
            check_norm_groups(grad_norm_groups)
        self._gather_cap = cap_in_bytes(bucket_cap_mb_all_gather, _BUCKET_CAP_ENV, _BUCKET_CAP_MB)
        self._scatter_cap = cap_in_bytes(bucket_cap_mb_reduce_scatter, _BUCKET_CAP_ENV, _BUCKET_CAP_MB)
        self._norms_by_group = norms_by_group
        self._configured = (*vars(self), "_configured")  # attributes that a copy shares
        self._start(params, overlap, lazy_init)

    def _start(self, params: Any, overlap: bool, lazy_init: bool) -> None:
        """Sets up shards, buckets, hooks and norms of these parameters."""
        self._grad_norm: torch.Tensor | None = None
        self._grad_norms: torch.Tensor | None = None
        self._group_sizes: list[int] = []  # trainable parameters of each parameter group
        self.shards: list[ParameterShard] = []
        self._frozen: list[torch.Tensor] = []  # parameters without a shard
        self._scatter_plan, self._gather_plan = BucketPlan(), BucketPlan()
        self._in_backward: BackwardReduction | None = None
        self._gathers = Gathers()
        self._is_reduced = False
        self.base_optimizer: torch.optim.Optimizer | None = None
        super().__init__(params, self._options)
        if overlap and not any(map(in_one_program, parameters_of(self))):
            self._in_backward = BackwardReduction(self._scatter_buckets)
        if not lazy_init:
            self.init_zero()

    def __deepcopy__(self, memo: dict[int, Any]) -> NeuronZero1Optimizer:
        """Returns an optimizer of copied parameters, those of a model in the same `deepcopy`, with equal state.

        Gradients and hooks are not copied, as by torch's optimizers. No rank waits for another.
        """
        self.wait()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update({name: vars(self)[name] for name in self._configured})
        copied.loss_scaler = deepcopy(self.loss_scaler, memo)
        groups = deepcopy(self.param_groups, memo)
        for param, copied_param in zip(parameters_of(self), (p for group in groups for p in group["params"])):
            copy_tensor_model_parallel_attributes(copied_param, param)
        copied._start(groups, self._in_backward is not None, lazy_init=self.base_optimizer is None)
        if self.base_optimizer is not None:
            masters = {index: shard.master.detach() for index, shard in enumerate(self.shards)}
            copied.load_state_dict({**deepcopy(self.state_dict()), "sharded_master_weights": masters})
        return copied

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of the whole model's gradients in the last step, before clipping (0-dim); None if not computed."""
        return self._grad_norm

    @property
    def grad_norms(self) -> torch.Tensor | None:
        """The same norm of each parameter group, `[groups]`; None without `norms_by_group`."""
        return self._grad_norms

    def init_zero(self) -> None:
        """Makes the shards, or sets the masters to the parameters' values: call it after loading weights."""
        self.wait()
        if self.base_optimizer is None:
            self._make_base()
        else:
            for shard in self.shards:
                shard.pull()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with separate options, as torch does."""
        super().add_param_group(param_group)
        if self.base_optimizer is not None:
            self.base_optimizer.add_param_group(self._shard_group(self.param_groups[-1]))
            self._find_matrices(self.param_groups[-1:], self.base_optimizer)
            _copy_options(self.base_optimizer.param_groups[-1:], self.param_groups[-1:])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step; all ranks call it together.

        Args:
            closure: computes the loss and the gradients again.

        Returns:
            What `closure` returned.

        Raises:
            RuntimeError: a parameter was unfrozen after the optimizer was made.
        """
        loss = None
        if closure is not None:
            self._is_reduced = False
            with torch.enable_grad():
                loss = closure()
        base = self._make_base()
        self._refuse_unfrozen()
        self.reduce_scatter()
        self._is_reduced = False
        if self.shards and all(shard.master.grad is None for shard in self.shards):
            warnings.warn(
                f"{type(self).__name__}.step: none of the {len(self.shards)} trainable parameters of rank "
                f"{comm.rank('world')} has a gradient on any data-parallel rank, so none of them changes: call "
                "backward() before step(), zero_grad() after it, and pass the parameters that the loss depends on",
                stacklevel=2,
            )
        finite = self._clip_grad_norm(self.max_norm) if self.grad_clipping or self.skip_nonfinite else True
        if finite:
            _copy_options(self.param_groups, base.param_groups)
            base.step()
            _copy_options(base.param_groups, self.param_groups)  # some optimizers keep values there
        for shard in self.shards:
            if not shard.is_param:
                shard.master.grad = None
        if finite:
            self._all_gather()
        return loss

    def _refuse_unfrozen(self) -> None:
        unfrozen = [param for param in self._frozen if param.requires_grad]
        if unfrozen:
            raise RuntimeError(
                f"{type(self).__name__}.step: {len(unfrozen)} parameters, the first of shape "
                f"{tuple(unfrozen[0].shape)}, were frozen (requires_grad=False) when the optimizer was made, so that "
                "it has no shards for them and they would not change: pass add_param_group those that are unfrozen "
                "later, and leave them out of the groups before, or unfreeze them before the optimizer is made"
            )

    @torch.no_grad()
    def reduce_scatter(self) -> None:
        """Sets the gradient of each master now, so that a script can read or scale it before `step`.

        A second call before `step` or `zero_grad` changes nothing.
        """
        if self._is_reduced:
            return
        self._make_base()
        self.wait()
        for shard in self.shards:
            shard.follow()
        if isinstance(self._sharding, DataSharding):
            experts = [shard.gradient for shard in self.shards if shard.gradient.data_axis != DATA_AXES]
            refuse_averaged(gradient.tensor for gradient in experts if gradient.tensor is not None)
        self._reduce_scatter()
        self._is_reduced = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters, `main_grad` included."""
        self._is_reduced = False
        if self._in_backward is not None:
            self._in_backward.drop()
        super().zero_grad(set_to_none)
        for shard in self.shards:
            if shard.gradient.attribute == "main_grad":
                shard.gradient.tensor = None
            if not shard.is_param:
                shard.master.grad = None

    # --- the parts of a step -----------------------------------------------------------------------------------------

    def _reduce_scatter(self) -> None:
        """Sets each master's gradient to the mean over the group, in the master's dtype; None if no rank has one."""
        for shard in self.shards:
            if shard.is_alone:
                shard.take_own_grad()
        if self._in_backward is not None:
            self._in_backward.finish()
        else:
            cap = self._scatter_cap
            overlap(self._cut_gradients(), start_reduce_scatter, finish_reduce_scatter, cap, nbytes_of)

    def _scatter_buckets(self) -> list[Bucket]:
        """The buckets of gradients in the order in which backward makes them, the last parameters' first."""
        return list(map(gradient_bucket, reversed(self._cut_gradients())))

    def _cut_gradients(self) -> list[list[ParameterShard]]:
        shards = [shard for shard in self.shards if not shard.is_alone]
        return cut_buckets(shards, self._scatter_plan, self._scatter_cap, in_backward=self._in_backward is not None)

    def _clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> bool:
        """Takes the norm, and clips by it; returns whether the step is to be made."""
        masters: list[torch.Tensor] = [shard.master for shard in self.shards]
        self._grad_norm, by_group = norm_of(
            [shard.param for shard in self.shards],
            [master.grad for master in masters],
            norm_type,
            self._sharding.norm_groups,
            replicas=[shard.replicas for shard in self.shards],
            parts=self._group_sizes if self._norms_by_group else None,
            watch_copies=self.skip_nonfinite,
        )
        scaler, finite = self.loss_scaler, True
        if scaler is not None:
            unscale = 1 / scaler.scale
            self._grad_norm, by_group = self._grad_norm * unscale, by_group * unscale
            scale_grads(masters, unscale)
        if self._norms_by_group:
            self._grad_norms = by_group
        if self.skip_nonfinite:
            finite = bool(self._grad_norm.isfinite())  # waits for the device
            self.skipped_steps += not finite
        if scaler is not None:
            scaler.update(finite)
        if finite and self.grad_clipping:
            clip_grads_with_norm(masters, self._grad_norm, max_norm)
        return finite

    def _all_gather(self) -> None:
        """Sets the parameters, in their dtype, from the masters of all ranks; with `overlap`, at their first use."""
        for shard in self.shards:
            if shard.degree == 1 and not shard.is_param:
                shard.push(shard.master.detach().view(1, -1))
        shards = [shard for shard in self.shards if shard.degree > 1]
        buckets = cut_buckets(shards, self._gather_plan, self._gather_cap)
        if self._in_backward is None or active() is not None:
            overlap(buckets, start_all_gather, finish_all_gather, self._gather_cap, nbytes_of)
        else:
            for bucket, handle in [(bucket, start_all_gather(bucket)) for bucket in buckets]:
                params = [shard.param for shard in bucket]
                self._gathers.append(params, partial(finish_all_gather, bucket, handle))

    def wait(self) -> None:
        """With `overlap`, waits until all parameters have the values of the last step; without, they always have.

        A use of a parameter waits by itself. A use of another tensor in its memory does not, and `torch.func` does not.
        """
        self._gathers.wait()

    # --- making the shards -------------------------------------------------------------------------------------------

    def _make_base(self) -> torch.optim.Optimizer:
        """Returns the base optimizer; builds it and the shards at the first call."""
        if self.base_optimizer is None:
            factory: Any = getattr(self.optimizer_class, "func", self.optimizer_class)  # of a partial
            if isinstance(factory, type) and issubclass(factory, torch.optim.Muon):
                for group in self.param_groups:
                    refuse_vectors(group)
            groups = [self._shard_group(group) for group in self.param_groups]
            self.base_optimizer = make_base_optimizer(self.optimizer_class, groups, self._options)
            self._find_matrices(self.param_groups, self.base_optimizer)
            # The class's own defaults: schedulers want to find them in our groups, and some in `defaults`.
            self.defaults = {**self.base_optimizer.defaults, **self.defaults}
            _copy_options(self.base_optimizer.param_groups, self.param_groups)
            if self.skip_nonfinite and any(in_one_program(shard.param) for shard in self.shards):
                warnings.warn(
                    f"{type(self).__name__}: skip_nonfinite (and loss_scaler) reads on the host in each step "
                    "whether the norm is finite, which splits an XLA step into two programs; bf16 parameters need "
                    "neither",
                    stacklevel=2,
                )
        return self.base_optimizer

    def _shard_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Makes the shards of a parameter group; returns the base optimizer's group of them, with the same options."""
        shards = [self._shard(self._local_part(param)) for param in group["params"] if param.requires_grad]
        self.shards += shards
        self._frozen += [param for param in group["params"] if not param.requires_grad]
        self._group_sizes.append(len(shards))
        options = {name: value for name, value in group.items() if name != "param_names"}
        return {**options, "params": [shard.master for shard in shards]}

    def _find_matrices(self, groups: Sequence[dict[str, Any]], base: torch.optim.Optimizer) -> None:
        """Passes Muon the parameters whose rows its shards are."""
        if not isinstance(base, MuonAdamW):
            return
        base.owners = base.owners or MatrixOwners(self._sharding.place)
        shards = {id(shard.master): shard for shard in self.shards}
        for group, base_group in zip(groups, base.param_groups[-len(groups) :]):
            names = group.get("param_names", ["a parameter"] * len(group["params"]))
            trained = [(param, name) for param, name in zip(group["params"], names) if param.requires_grad]
            for (param, name), master in zip(trained, base_group["params"]):
                if base_group["optimizer"] == "muon":
                    base.owners.add(param, shards[id(master)], name)

    def _local_part(self, param: Any) -> Any:
        """This rank's part of a ShardTensor: a plain leaf that shares its memory and its gradient."""
        if not hasattr(param, "placements"):
            return param
        if not param.to_local().is_leaf:
            raise TypeError(
                f"{type(self).__name__}: a parameter is a DTensor, which needs a torch optimizer; or convert it by "
                "ShardTensor.from_dtensor(x)"
            )
        sharding = self._sharding.of(ParameterGradient(param.to_local()))
        data = {*sharding.group.ranks, *sharding.replicas.ranks}
        for m, placement in enumerate(param.placements):
            ranks = param.device_mesh.communicator(m).ranks
            if not placement.is_replicate() and (self.grad_clipping or len(data & set(ranks)) > 1):
                raise ValueError(
                    f"{type(self).__name__}: a parameter of shape {tuple(param.shape)} is {placement} over ranks "
                    f"{ranks}: pass grad_clipping=False, and use a mesh that shards it over none of the "
                    f"data-parallel ranks {sorted(data)}, such as DeviceMesh.from_axes('tp')"
                )
        return param.to_local()

    def _shard(self, param: nn.Parameter) -> ParameterShard:
        gradient = ParameterGradient(param)
        if self._use_grad_acc_hook:
            gradient.accumulate_in_main_grad()
        dtype = self.optimizer_dtype or torch.promote_types(torch.float32, param.dtype)
        grad_dtype = dtype if self._higher_cc_precision else gradient.dtype
        shard = ParameterShard(gradient, self._sharding.of(gradient), dtype, grad_dtype)
        release(param)  # by an optimizer that this one replaces
        if self._in_backward is not None and not shard.is_alone:
            self._in_backward.watch(param)
        return shard

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, under torch's keys and NxD's, which go by index of the trainable parameter.

        base_state              state of the base optimizer on the shards
        shape_info              whole shapes of the parameters
        rank_of_shards          the places of this rank: another rank's shards are refused
        sharded_master_weights  the master shards; with `save_master_weights`
        loss_scaler             its state; with `loss_scaler`
        """
        state = super().state_dict()
        state["base_state"] = self._make_base().state_dict()["state"]
        state["shape_info"] = {index: tuple(shard.param.shape) for index, shard in enumerate(self.shards)}
        state["rank_of_shards"] = rank_of_shards(self.shards)
        if self.loss_scaler is not None:
            state["loss_scaler"] = self.loss_scaler.state_dict()
        if self.save_master_weights:
            # In memory of their own: a file of views would hold all that they are views of.
            state["sharded_master_weights"] = {
                index: shard.master.detach().clone() if shard.is_view else shard.master.detach()
                for index, shard in enumerate(self.shards)
            }
        note_saved_state(type(self).__name__, state["base_state"])
        note_saved_state(type(self).__name__, {"sharded_master_weights": state.get("sharded_master_weights", {})})
        return state

    def __getstate__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled, or copied without its parameters: call copy.deepcopy((model, "
            "optimizer)), or make an optimizer of the other model's parameters and call its "
            "load_state_dict(optimizer.state_dict())"
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state that `state_dict()` returned on this rank of the same layout; training goes on bit-equal.

        Load the model's weights first: without `sharded_master_weights` the masters are made of them.

        Raises:
            ValueError: it is of other parameters, of another sharding degree, of another rank, or of an optimizer with
                Muon where this has none, or the other way.
        """
        base = self._make_base()
        self.wait()
        check_loadable(type(self).__name__, state_dict, self.shards)
        refuse_other_optimizer(state_dict["param_groups"], self.param_groups)
        groups = {name: state_dict[name] for name in ("state", "param_groups")}
        load_optimizer_state_dict(self, groups, super().load_state_dict)
        load_optimizer_state_dict(base, {**base.state_dict(), "state": state_dict["base_state"]})
        if self.loss_scaler is not None and "loss_scaler" in state_dict:
            self.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        masters = state_dict.get("sharded_master_weights", {})
        for index, shard in enumerate(self.shards):
            if index not in masters:
                shard.pull()
            else:
                shard.set_master(masters[index])

    def save_sharded_state_dict(self, output_dir: str | os.PathLike[str], num_workers_per_step: int = 8) -> None:
        """Writes each rank's state to a separate file in `output_dir`, `num_workers_per_step` ranks at a time."""
        os.makedirs(output_dir, exist_ok=True)
        path = state_path(output_dir)
        state = move_all_tensor_to_cpu(self.state_dict(), convert=False)  # what is still to be computed, all ranks do
        for is_my_turn in turns(num_workers_per_step):
            if is_my_turn:
                torch.save(move_all_tensor_to_cpu(state), path + ".tmp")
                os.replace(path + ".tmp", path)  # a job that dies here leaves no half-written file under the name
            comm.barrier()

    def load_sharded_state_dict(self, output_dir: str | os.PathLike[str], num_workers_per_step: int = 8) -> None:
        """Reads what `save_sharded_state_dict` wrote in the same layout.

        Raises:
            FileNotFoundError: there is no file for this rank's coordinates: another layout, or another folder.
        """
        path = state_path(output_dir)
        for is_my_turn in turns(num_workers_per_step):
            if is_my_turn:
                self.load_state_dict(read_plain(path))
            comm.barrier()


class MasterWeightsOptimizer(NeuronZero1Optimizer):
    """Stores unsharded fp32 master weights and state for this rank's low-precision parameters.

    Gradients must have been averaged over the data before, by `reduce_gradients(model)`.
    Arguments are those of NeuronZero1Optimizer.
    """

    def __init__(self, params: Any, optimizer_class: OptimizerFactory, **options: Any) -> None:
        super().__init__(params, optimizer_class, sharding_groups=Unsharded(), **options)


def _copy_options(src_groups: Sequence[dict[str, Any]], dst_groups: Sequence[dict[str, Any]]) -> None:
    """Copies learning rates and the like from some parameter groups to others.

    Schedulers set them in the groups of NeuronZero1Optimizer, and the base optimizer reads them in its own.
    """
    for src_group, dst_group in zip(src_groups, dst_groups):
        dst_group.update({name: value for name, value in src_group.items() if name not in ("params", "param_names")})
