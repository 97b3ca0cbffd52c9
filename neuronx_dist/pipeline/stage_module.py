"""The whole model as one rank sees it: real on its stage, on meta elsewhere, with the names of the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import comm
from ..parallel_layers.utils import move_model_to_device
from ..torch_internals.modules import IncompatibleKeys
from ..weights.materialize import initialize_modules
from ..weights.module_tree import ModuleTree, ParameterSlot
from ..weights.partial_model import join
from ..weights.wrappers import refuse_wrapper, wrapper_of
from .cut.placement import Placement

__all__ = ["StageModule"]


class _TiedWeight(NamedTuple):
    """A parameter that several stages hold."""

    name: str  # on this stage
    first: int  # the stage whose copy the others take
    holders: comm.Communicator


class StageModule(nn.Module):
    """Holds the original module, and knows which of its tensors belong to this stage.

    `parameters()`, `named_parameters()`, `buffers()` and attributes are of the whole model, `local_*` of this stage.

    A placement is *open*, and may be replaced, until a caller gets parameters, buffers or state from here, or moves
    them: an optimizer may hold them from then on. While it is open, tensors of other stages keep their memory.

    Attributes:
        stage, num_stages: the pipeline stage of this rank, and the number of stages.
        last_stage: the stage that holds the end of the model.
        placement_is_open: see above.
    """

    instead_of_wrappers = (
        "run_train calls the layers of a stage, and not the wrapper's forward, and averages gradients over the "
        "data-parallel ranks (with use_zero1_optimizer=True NeuronZero1Optimizer does)"
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_wrapper(wrapper_of(cls), StageModule)  # `fully_shard` makes a subclass

    def __init__(self, module: nn.Module, *, stage: int, num_stages: int, last_stage: int) -> None:
        super().__init__()
        if isinstance(module, StageModule):
            raise ValueError(f"module is a {type(module).__name__} already: pass the original model")
        _refuse_wrapped_layers(module)
        self.original_module = module
        self.stage = stage
        self.num_stages = num_stages
        self.last_stage = last_stage
        self.placement: Placement | None = None
        self.peak_in_flight = 0
        self._tied: list[_TiedWeight] = []
        self._aliases: dict[str, list[str]] = {}  # all names of a parameter that has several
        self.tied_weights_synced = False
        self.placement_is_open = True
        self._put_away: list[tuple[dict[str, Any], str, torch.Tensor]] = []  # while it is open: table, name, tensor
        self._tree = ModuleTree(module)
        self._stage_slots: list[ParameterSlot] | None = None

    @property
    def partitioned(self) -> bool:
        return self.placement is not None

    @property
    def original_torch_module(self) -> nn.Module:
        """NxD's name for the original module."""
        return self.original_module

    @property
    def pipeline_parallel_rank(self) -> int:
        """NxD's name for the stage."""
        return self.stage

    @property
    def pipeline_parallel_size(self) -> int:
        """NxD's name for the number of stages."""
        return self.num_stages

    @property
    def device(self) -> torch.device:
        """Device of this stage's parameters, read from the first one, since all are on one device."""
        first: torch.Tensor | None = None
        if self._stage_slots:
            _, module, key = self._stage_slots[0]
            first = module._parameters.get(key)
        if first is None:
            first = next((param for _, param in self._stage_parameters()), None)
        return torch.device("cpu") if first is None else first.device

    def move_model_to_device(self) -> None:
        """NxD's name: moves this stage to the rank's device."""
        move_model_to_device(self, comm.current().backend.device)

    @property
    def module_tree(self) -> ModuleTree:
        """The current modules and parameters of the whole model."""
        if self._tree.modules[0] is not self.original_module or not self._tree.is_current():
            _refuse_wrapped_layers(self.original_module)
            self._tree, self._stage_slots = ModuleTree(self.original_module), None
        return self._tree

    def is_last_stage(self) -> bool:
        """Returns whether this rank's stage computes the loss."""
        return self.stage == self.last_stage

    # --- what is local

    def is_local(self, name: str) -> bool:
        """Returns whether the parameter, buffer or module of this name in the whole model belongs to this stage."""
        if self.placement is None:
            raise RuntimeError("this model is not partitioned: its local parameters are known after partition()")
        stages = self.placement.stages(name)
        return stages is None or self.stage in stages

    def local_named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """`(name in the whole model, parameter)` of this stage; a tied weight by its name on this stage."""
        self.close_placement()
        return self._stage_parameters(prefix, recurse, remove_duplicate)

    def _stage_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        tree = self.module_tree
        if self._stage_slots is None:
            self._stage_slots = [slot for slot in tree.slots if self.is_local(slot.name)]
        seen: set[int] = set()
        for name, module, key in self._stage_slots:
            param = module._parameters[key]
            if (recurse or module is self.original_module) and not (remove_duplicate and id(param) in seen):
                assert param is not None
                seen.add(id(param))
                yield join(prefix, name), param

    def local_parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (param for _, param in self.local_named_parameters(recurse=recurse))

    def local_named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self.close_placement()
        return self._stage_buffers(prefix, recurse, remove_duplicate)

    def _stage_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for name, buffer in self.original_module.named_buffers("", recurse, remove_duplicate=False):
            if self.is_local(name) and not (remove_duplicate and id(buffer) in seen):
                seen.add(id(buffer))
                yield join(prefix, name), buffer

    def local_buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        return (buffer for _, buffer in self.local_named_buffers(recurse=recurse))

    def local_named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Modules of this stage, and the containers around them; of several names the first local one."""
        self.close_placement()
        return self._stage_modules(memo, prefix, remove_duplicate)

    def _stage_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        seen = set() if memo is None else memo
        for name, module in self.original_module.named_modules(remove_duplicate=False):
            if self._concerns(name, module) and not (remove_duplicate and module in seen):
                seen.add(module)
                yield join(prefix, name) if name else prefix, module

    def local_modules(self) -> Iterator[nn.Module]:
        for _, module in self.local_named_modules():
            yield module

    def local_named_children(self) -> Iterator[tuple[str, nn.Module]]:
        self.close_placement()
        for name, child in self.original_module.named_children():
            if self._concerns(name, child):
                yield name, child

    def local_children(self) -> Iterator[nn.Module]:
        for _, child in self.local_named_children():
            yield child

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """This stage's part of the whole model's state dict."""
        self.close_placement()
        state = self.original_module.state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        return {key: value for key, value in state.items() if self.is_local(key[len(prefix) :])}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.local_state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads this stage's part of a state dict of the whole model, or of this stage.

        Raises:
            RuntimeError: with `strict`, a key of this stage is missing, or a key is not of the model.
        """
        expected = list(self.local_state_dict())
        loaded = {}
        for key in expected:
            source = next((name for name in (key, *self._aliases.get(key, ())) if name in state_dict), None)
            if source is not None:
                loaded[key] = state_dict[source]
        missing = [key for key in expected if key not in loaded]
        unexpected = sorted(set(state_dict) - set(self.original_module.state_dict()))
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"load_state_dict of stage {self.stage}: missing {missing or 'none'}, unexpected {unexpected or 'none'}"
            )
        self.original_module.load_state_dict(loaded, strict=False, assign=assign)
        if assign:  # which makes a parameter of each name
            self._tie_again()
        return IncompatibleKeys(missing, unexpected)

    def _tie_again(self) -> None:
        """Makes all names of a tied weight one parameter again: the parameter of the first name on this stage."""
        for group in self._aliases.values():
            local = next((name for name in group if self.is_local(name)), None)
            if local is not None:
                param = self.original_module.get_parameter(local)
                for name in group:
                    owner, _, key = name.rpartition(".")
                    self.original_module.get_submodule(owner)._parameters[key] = param

    def _concerns(self, name: str, module: nn.Module) -> bool:
        """Returns whether a module, or a tensor in it, belongs to this stage; a module without tensors always does."""
        if not name:
            return True
        if self.placement is not None and self.placement.stages(name) is not None:
            return self.is_local(name)
        tensors = [key for key, _ in module.named_parameters(remove_duplicate=False)]
        tensors += [key for key, _ in module.named_buffers(remove_duplicate=False)]
        return not tensors or any(self.is_local(f"{name}.{key}") for key in tensors)

    # --- becoming local

    def place(self, placement: Placement) -> None:
        """Adopts a placement: finds tied weights, and turns tensors of other stages to meta. All ranks call it.

        A placement that is open is replaced: tensors that it had turned to meta come back first.
        """
        for table, name, tensor in self._put_away:
            table[name] = tensor
        self._put_away.clear()
        for tied in self._tied:
            self.original_module.get_parameter(tied.name).__dict__.pop("shared", None)
        self._tied.clear()
        self.tied_weights_synced = False
        self.placement, self._stage_slots = placement, None
        holders: dict[int, set[int]] = {}
        names: dict[int, list[str]] = {}
        for name, param in self.original_module.named_parameters(remove_duplicate=False):
            holders.setdefault(id(param), set()).update(placement.stages(name) or range(self.num_stages))
            names.setdefault(id(param), []).append(name)
        self._aliases = {name: group for group in names.values() for name in group if len(group) > 1}
        groups: dict[tuple[int, ...], comm.Communicator | None] = {}
        for key, stages in holders.items():
            if len(stages) > 1:
                ordered = tuple(sorted(stages))
                if ordered not in groups:
                    ranks = [[pipeline[stage] for stage in ordered] for pipeline in comm.current().mesh.groups("pp")]
                    groups[ordered] = comm.new_group(ranks, f"pp_tied_{'_'.join(map(str, ordered))}")
                group = groups[ordered]
                if group is not None:
                    local = next(name for name in names[key] if self.is_local(name))
                    self._tied.append(_TiedWeight(local, ordered[0], group))
        self._drop_others()
        self._mark_tied()

    def close_placement(self) -> None:
        """Fixes the placement, and frees the memory of tensors that other stages hold."""
        if self.placement is not None:
            self.placement_is_open = False
            self._put_away.clear()

    def _drop_others(self) -> None:
        kept_ids = {id(x) for _, x in (*self._stage_parameters(), *self._stage_buffers())}
        turned: dict[int, torch.Tensor] = {}
        for prefix, module in self.original_module.named_modules(remove_duplicate=False):
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None or id(tensor) in kept_ids or tensor.is_meta or self.is_local(join(prefix, name)):
                        continue
                    if id(tensor) not in turned:
                        meta: torch.Tensor = torch.empty_like(tensor, device="meta")
                        if isinstance(tensor, nn.Parameter):
                            meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
                        meta.__dict__.update(tensor.__dict__)
                        turned[id(tensor)] = meta
                        kept_ids.add(id(meta))
                    self._put_away.append((table, name, tensor))
                    table[name] = turned[id(tensor)]

    def initialize(self, init_fn: Callable[..., Any]) -> None:
        """Allocates this stage's meta tensors on the CPU, and fills them by `init_fn`, as `NxDPPModel` describes."""
        initialize_modules(self._stage_modules(), init_fn, self.is_local)

    def refuse_meta(self) -> None:
        """Raises RuntimeError if a parameter of this stage has no value yet."""
        for name, param in self._stage_parameters():
            if param.is_meta:
                raise RuntimeError(
                    f"parameter {name} of stage {self.stage} is on the meta device: give it a value first, by "
                    "neuronx_dist.materialize(model, seed), by loading weights, or by param_init_fn"
                )

    # --- tied weights

    def tied_groups(self) -> list[tuple[nn.Parameter, comm.Communicator]]:
        """`(this stage's copy, ranks with a copy)` of each weight on several stages, whose gradients are summed."""
        self._mark_tied()
        return [(self.original_module.get_parameter(tied.name), tied.holders) for tied in self._tied]

    def sync_tied_weights(self) -> None:
        """Makes tied weights equal to the copy of the first stage that holds them. All ranks with a copy call it."""
        for tied in self._tied:
            value = self.original_module.get_parameter(tied.name).detach()
            comm.broadcast(value, tied.holders, src=0, out=value)
        self.tied_weights_synced = True

    def register_shared_weights(self) -> None:
        """NxD's name for finding tied weights, which `partition()` has done already."""
        if not self.partitioned:
            raise RuntimeError("register_shared_weights: call partition() instead, which finds tied weights")

    def _mark_tied(self) -> None:
        for tied in self._tied:
            if tied.first != self.stage:
                param = self.original_module.get_parameter(tied.name)
                param.shared = True  # type: ignore[attr-defined]  # norms count the first copy only

    # --- a module like the original

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> StageModule:
        """Implements `.to()` and the like: this stage's tensors move; tensors on meta only change their dtype."""
        if self.placement is None:
            return super()._apply(fn, recurse)
        self.close_placement()
        local = {id(x) for x in self.local_parameters()} | {id(x) for x in self.local_buffers()}
        before = [
            (module, name, param)
            for module in self.original_module.modules()
            for name, param in module._parameters.items()
            if param is not None
        ]

        def apply(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in local or not tensor.is_meta:
                return fn(tensor)
            return tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype)

        super()._apply(apply, recurse)
        replaced: dict[int, nn.Parameter] = {}
        for module, name, param in before:  # from meta to a device torch makes new parameters
            now = module._parameters[name]
            assert now is not None
            if now is not param:
                now = module._parameters[name] = replaced.setdefault(id(param), now)
                for key, value in param.__dict__.items():
                    now.__dict__.setdefault(key, value)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        self.close_placement()
        return self.original_module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self.close_placement()
        return self.original_module.named_buffers(prefix, recurse, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "original_module":
                raise
            if name == "generate":
                raise AttributeError(
                    "a pipeline model does not generate: run_eval(return_outputs=True, ...) returns the logits of a "
                    "batch. Save the weights, and generate with the model of one process, or with hf.swap over tp alone"
                ) from None
            return getattr(self.original_module, name)


def _refuse_wrapped_layers(model: nn.Module) -> None:
    """Refuses wrappers around layers: data-parallel ones, and results of `torch.compile(layer)`, with other names."""
    for name, module in model.named_modules():
        wrapper = wrapper_of(type(module))
        if wrapper is not None:
            raise ValueError(
                f"{name or 'the model'} is wrapped in {wrapper}, whose communication would be recorded as a part of "
                f"the forward: {StageModule.instead_of_wrappers}. Leave the wrapper out"
            )
        if "_orig_mod" in module._modules:
            raise ValueError(
                f"{name or 'the model'} is the result of torch.compile(module), a wrapper around the module that a "
                "pipeline cuts, records and names: call module.compile() on each transformer layer, which compiles "
                "in place, or compile() of the pipeline model"
            )
