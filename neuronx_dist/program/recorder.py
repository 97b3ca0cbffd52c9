"""The recorder: runs a model's forward once and writes its calls, in order, into an `fx.Graph`.

The real `forward` runs once on fake tensors, which have shapes and no values, under a mode that sees every torch
function. Transformer layers, parallel layers and single layers such as `nn.Linear` are *leaves*: one call each, whose
inside is not recorded. So Python control flow, masks, rotary embeddings and output classes work, and the layers receive
the arguments that the model passes.

Values that do not depend on the inputs (`torch.arange` of a sequence length) are computed, so that a model may branch
on them. A branch on the *values* of an input cannot be recorded: the error names the line.

Each node's `meta["info"]` is an `Info`: the source line of the call, its result's shape and dtype, and the calls that
must run before it, because they change its arguments in place.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from .. import comm
from ..call_site import call_site
from ..comm.ranks.rank_numbers import RankNumber
from ..spmd.intercept import intercept
from ..spmd.watching import no_typecheck
from ..torch_internals.fake_tensors import FakeTensor
from ..torch_internals.modules import call_with_hooks
from ..torch_internals.tensors import pytree
from ..torch_internals.versions import warn_if_untested
from .checkpointed_spans import Checkpoints
from .effects import has_tensors, storage_of, tensors_in
from .evaluation import Evaluation, name_of
from .graph_nodes import Nodes, refuse_hidden
from .isolation import ShapesOfStage, restored, without_cache, without_memos
from .python_state import RandomState
from .recording import Info, Recording, TracingError, is_leaf, register_dataclasses

__all__ = ["is_recording", "record"]


def record(
    module: nn.Module,
    inputs: dict[str, Any],
    leaf_classes: Sequence[type] = (),
    device: torch.device | None = None,
    *,
    leaves: bool = True,
    bodies: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
    grad: bool = True,
) -> Recording:
    """Records `module(**inputs)`. The module stays unchanged, no random number is drawn, nothing is communicated.

    Args:
        module: may be on meta, in whole or in part.
        inputs: tensors (real or meta; only shapes, strides and dtypes count) in any containers; other objects are
            recorded as constants.
        leaf_classes: module classes to record as one call.
        device: the device that the model will run on; inputs and meta parameters are assumed to be there. None: the
            device of the first input that is not on meta.
        leaves: record layers as one call each; False: record calls of functions only.
        bodies: the Python body to run and record in the place of a function, by function.
        grad: gradients are enabled.

    Raises:
        TracingError: the forward branches on values, passes tensors in a way that cannot be followed, or switches
            autocast of another device type than `device`.
        CommError: the forward communicates between pipeline stages.
    """
    warn_if_untested("the recorder of forwards")
    if device is None:
        tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
        device = tensors[0].device if tensors else torch.device("cpu")
    recorder = _Recorder(module, leaf_classes, device, leaves, bodies or {})
    here = comm.current()
    with ExitStack() as stack:
        stack.enter_context(no_typecheck())
        stack.enter_context(intercept(_see_function))
        stack.enter_context(without_memos())
        stack.enter_context(without_cache(module))  # before `restored`: several ranks may share one config
        state = stack.enter_context(restored(module))
        backend = None if isinstance(here.rank, RankNumber) else ShapesOfStage(here.mesh)
        shapes_only = stack.enter_context(comm.as_rank(here.mesh, here.rank, backend))
        shapes_only.extras.update(here.extras)  # random streams
        stack.enter_context(torch.set_grad_enabled(grad))
        recording = recorder.run(inputs)
        recording.left, recording.reads_requires_grad = state.changes(), recorder.reads_requires_grad
        return recording


def is_recording(*, layers: bool = False) -> bool:
    """Returns whether this thread records a forward; `layers`: one that records a layer as one call, for a pipeline."""
    recorder: _Recorder | None = getattr(_local, "recorder", None)
    return recorder is not None and (recorder.leaves or not layers)


# --- the recorder -----------------------------------------------------------------------------------------------------

_local = threading.local()  # .recorder: the active recorder of this thread
# The function by which checks read values: those of transformers (image tokens and features), of distributions. A check
# decides nothing but an error, and is assumed to pass.
_CHECK = "_is_all_true"
# Functions that return no new tensor, and are recorded for their effect.
_EFFECTS = {torch.Tensor.register_hook, torch.Tensor.retain_grad}

_AUTOCAST_DEVICES = tuple("cpu cuda xpu mps hpu xla mtia privateuseone".split())

# The remedy for a tensor that comes from a call that the recorder did not see.
_ADVICE = "If a module of yours makes the tensor, list its class in leaf_module_cls."
_ADVICE_ON_FUNCTIONS = "If a function of yours makes the tensor, register the function: register_op."


class _Recorder(TorchFunctionMode):
    def __init__(
        self,
        module: nn.Module,
        leaf_classes: Sequence[type],
        device: torch.device,
        leaves: bool,
        bodies: Mapping[Callable[..., Any], Callable[..., Any]],
    ) -> None:
        super().__init__()
        self.module = module
        self.leaf_classes = leaf_classes
        self.leaves = leaves
        self.bodies = bodies
        self.running = [""]  # paths of the modules whose forward is running, innermost last; only if not `leaves`
        self.device = device
        self.nodes = Nodes(_ADVICE if leaves else _ADVICE_ON_FUNCTIONS)
        self.evaluation = Evaluation(device, leaves)
        self.paused = False
        self.reads_requires_grad = ""  # the first line that does
        self.random_state = RandomState()
        self.stand_ins: dict[int, list[torch.Tensor | None]] = {}  # by id of a module, the fakes of its buffers
        self.writers: dict[int, list[fx.Node]] = {}  # storage -> calls that changed it so far
        self.buffers: dict[int, frozenset[int]] = {}  # storages of a leaf's buffers, by id of the leaf
        self.stale: set[int] = set()  # storages whose real values differ from those that the model would have
        self.ambient = self._autocast()
        self.ambient_elsewhere = self._autocast_elsewhere()
        self.checkpoints = Checkpoints(strict=not leaves)

    def run(self, inputs: dict[str, Any]) -> Recording:
        self._replace_attributes()
        if not self.leaves:
            register_dataclasses(inputs)
        leaves, structure = pytree.tree_flatten(inputs)
        paths = [pytree.keystr(path).strip("[]'\"") for path, _ in pytree.tree_flatten_with_path(inputs)[0]]
        for index, (path, leaf) in enumerate(zip(paths, leaves)):
            if isinstance(leaf, torch.Tensor):
                name = path if path.isidentifier() else f"input_{index}"
                node = self.nodes.graph.create_node("placeholder", path, name=name)
                leaves[index] = self.evaluation.fake(leaf, leaf.requires_grad, self.device)
                self.nodes.bind(node, leaves[index], Info("input", where="the inputs"))
                node.meta["leaf"] = index
        _local.recorder = self
        try:
            with self:
                keywords = pytree.tree_unflatten(leaves, structure)
                by_position = [keywords.pop(name) for name in _positional_only(self.module, keywords)]
                result = self.module(*by_position, **keywords)
        finally:
            _local.recorder = None
        if not self.leaves:
            register_dataclasses(result)
        flat, result_structure = pytree.tree_flatten(result)
        outputs = [self.nodes.argument(leaf, "the result of the model") for leaf in flat]
        rebound = self._rebound_buffers() if not self.leaves else []
        self.nodes.graph.output(tuple(outputs))
        for node in self.nodes.graph.find_nodes(op="get_attr"):
            if not node.users and node not in {*itertools.chain(*rebound)}:  # only its shape or dtype was read
                self.nodes.graph.erase_node(node)
        return Recording(self.nodes.graph, result, outputs, result_structure, rebound)

    def _rebound_buffers(self) -> list[tuple[fx.Node, fx.Node]]:
        """Returns (buffer, new tensor) for each buffer that the forward replaced by another tensor."""
        where, rebound = "the end of forward", []
        for module in self.module.modules():
            for buffer, now in zip(self.stand_ins.get(id(module), ()), module._buffers.values()):
                if now is not buffer and now is not None:
                    rebound.append((self.nodes.argument(buffer, where), self.nodes.argument(now, where)))
        return rebound

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.paused:
            return func(*args, **(kwargs or {}))
        if func in self.bodies:
            with self:
                return self.bodies[func](*args, **(kwargs or {}))
        return self.call_function(func, args, kwargs or {})

    def call_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.Tensor.__iter__:  # the tensors inside of an iterator could not be followed
            return iter(self.call_function(torch.Tensor.unbind, (args[0], 0), {}))
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (args[0], self._with_known_bounds(args[1]), *args[2:])
        target, target_args = func, args
        name, owner = getattr(func, "__name__", ""), getattr(getattr(func, "__self__", None), "__name__", "")
        if name == _CHECK and self._is_unknown(args[0]):
            return torch.tensor(True)
        if name == "__get__":  # an attribute such as x.T: the getter has no printable name
            target, target_args = getattr, (args[0], owner)
            if owner == "requires_grad" and not self.reads_requires_grad and self._is_unknown(args[0]):
                self.reads_requires_grad = call_site()
        elif name == "__set__":
            target, target_args = setattr, (args[0], owner, args[1])
        return self._record("call_function", target, func, args, kwargs, target_args)

    def call_module(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._record("call_module", name, call_with_hooks(module), args, kwargs, args, module)

    def _record(
        self,
        op: str,
        target: Any,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target_args: tuple[Any, ...],
        module: nn.Module | None = None,
    ) -> Any:
        where = call_site()
        checkpoints = self.checkpoints.running(where)
        with self._paused():
            tensors = list(tensors_in((args, kwargs)))
            known = op == "call_function" and not any(self._is_unknown(x) for x in tensors)
            grad, autocast = torch.is_grad_enabled(), self._autocast()
            self._refuse_autocast_elsewhere(where)
            # Arguments are resolved before the call: afterwards a tensor changed in place stands for the result.
            node_args, node_kwargs = (
                self.nodes.argument(tuple(target_args), where),
                self.nodes.argument(dict(kwargs), where),
            )
            buffers = self._buffers_of(module)
            read = {self.nodes.memory_of(x) for x in tensors}
            # A real argument takes part as a fake tensor with new memory, which the mode drops if nobody refers to it.
            stand_ins = [
                (self.evaluation.fake_mode.from_tensor(x), x) for x in tensors if not isinstance(x, FakeTensor)
            ]
            real = {storage_of(fake): storage_of(x) for fake, x in stand_ins}

            before = [*module.buffers()] if module is not None else []
            alone = module is not None and next(module.parameters(), None) is None
            watched: AbstractContextManager[list[Any]] = comm.record() if alone else nullcontext([])
            with watched as collectives:
                if module is not None:
                    result, effects = self.evaluation.layer(module, target, args, kwargs, where)
                else:
                    result, effects = self.evaluation.function(func, args, kwargs, known, where, target)
            for x in tensors_in(result):
                if storage_of(x) in real:
                    self.nodes.add_view(storage_of(x), real[storage_of(x)])
            memory = {storage_of(x): self.nodes.memory_of(x) for x in tensors} | real
            written = {memory.get(storage, storage) for storage in effects.writes} & self.nodes.storages
            if module is not None and [*map(id, before)] != [*map(id, module.buffers())]:
                written |= buffers  # the layer replaced its buffers by other tensors
            if not known:
                self.stale |= written & {*memory.values()}
            if not (written or target is setattr or func in _EFFECTS or has_tensors(result)):
                refuse_hidden(result, f"the result of {name_of(target)}", where)
                return result  # such as a shape, a dtype or a number, which is a constant of this recording

            node = self.nodes.graph.create_node(op, target, node_args, node_kwargs)
            if effects.random and not self.leaves and "torch" in self.random_state.changed():
                raise TracingError(
                    f"{where}: {name_of(target)} draws random numbers that forward has seeded, as torch.manual_seed "
                    "does, and the program would not seed them: draw them before forward, and pass them as an argument"
                )
            info = Info(
                "module" if op == "call_module" else "function",
                where=where,
                after={writer for storage in read for writer in self.writers.get(storage, ())},
                writes=written,
                buffers=buffers,
                repeatable=alone and not collectives,
                random=effects.random,
                flops=effects.flops,
                grad=grad,
                autocast=None if autocast == self.ambient else autocast,
                checkpoints=checkpoints,
                function=func if module is None else None,
                module=self.running[-1] if module is None else str(target),
            )
            for storage in written:
                self.writers.setdefault(storage, []).append(node)
            self.nodes.bind(node, result, info)
            return result

    def _with_known_bounds(self, index: Any) -> Any:
        """Returns an index in whose slices tensors with known values are replaced by numbers."""
        if type(index) is tuple:
            return tuple([self._with_known_bounds(item) for item in index])
        if not isinstance(index, slice):
            return index
        bounds = (index.start, index.stop, index.step)
        return slice(*(int(x) if isinstance(x, torch.Tensor) and not self._is_unknown(x) else x for x in bounds))

    def _buffers_of(self, module: nn.Module | None) -> frozenset[int]:
        """Storages of a leaf's buffers at its first call, which identify the buffers in the whole recording."""
        if module is None:
            return frozenset()
        return self.buffers.setdefault(id(module), frozenset(storage_of(x) for x in module.buffers()))

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Switches recording off: the calls inside are the recorder's."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def _is_unknown(self, x: torch.Tensor) -> bool:
        return isinstance(x, FakeTensor) or id(x) in self.nodes.attributes or storage_of(x) in self.stale

    def _replace_attributes(self) -> None:
        """Puts fake tensors in the place of parameters and buffers, and makes the leaves report to this recorder."""
        fakes: dict[int, torch.Tensor] = {}
        for prefix, module in self.module.named_modules():
            for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    fake = fakes.get(id(tensor))
                    if fake is None:
                        fake = self.evaluation.fake(tensor, False, self.device if tensor.is_meta else tensor.device)
                        if kind == "parameter":
                            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                        fake.__dict__.update(tensor.__dict__)
                        fakes[id(tensor)] = fake
                        qualified = f"{prefix}.{name}" if prefix else name
                        self.nodes.add_attribute(kind, qualified, tensor, fake)
                        self.evaluation.originals[id(fake)] = tensor
                    table[name] = fake
            self.stand_ins[id(module)] = [*module._buffers.values()]
        self._report_calls(self.module, "")

    def _report_calls(self, module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            # `Module.__call__` runs this attribute if it is set, as `Module.compile` does. It is set per object, so
            # that other models of the process, and other ranks that are threads, are not affected.
            if not self.leaves:
                child.__dict__["_compiled_call_impl"] = functools.partial(_module_called, self, child, path)
                self._report_calls(child, path)
            elif is_leaf(child, self.leaf_classes):
                child.__dict__["_compiled_call_impl"] = functools.partial(_leaf_called, self, child, path)
            else:
                self._report_calls(child, path)

    def _autocast(self) -> tuple[str, torch.dtype, bool]:
        device = self.device.type
        return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    def _autocast_elsewhere(self) -> list[tuple[str, torch.dtype]]:
        """Returns (device type, dtype) of autocast for all other device types where it is on."""
        others = [name for name in _AUTOCAST_DEVICES if torch.device(name).type != self.device.type]
        return [(device, torch.get_autocast_dtype(device)) for device in others if torch.is_autocast_enabled(device)]

    def _refuse_autocast_elsewhere(self, where: str) -> None:
        now = self._autocast_elsewhere()
        if now != self.ambient_elsewhere:
            device = min(device for device, _ in {*now} ^ {*self.ambient_elsewhere})
            target = self.device.type
            raise TracingError(
                f'{where}: torch.autocast("{device}") has no effect where the forward is recorded, on '
                f"{target}, so the program would lose it. Write torch.autocast(x.device.type, ...) of a tensor x, or "
                f"record on {device}"
            )


def _leaf_called(recorder: _Recorder, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    if getattr(_local, "recorder", None) is not recorder or recorder.paused:
        return call_with_hooks(module)(*args, **kwargs)
    return recorder.call_module(module, name, args, kwargs)


def _module_called(recorder: _Recorder, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    recorder.running.append(name)
    try:
        return call_with_hooks(module)(*args, **kwargs)
    finally:
        recorder.running.pop()


def _positional_only(module: nn.Module, passed: dict[str, Any]) -> list[str]:
    """Returns the names of the given arguments that forward takes by position only."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY and p.name in passed]


# --- surroundings -----------------------------------------------------------------------------------------------------


def _see_function(original: Any, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reports `Function.apply` to this thread's recorder as one call: gradients are off inside of it."""
    recorder: _Recorder | None = getattr(_local, "recorder", None)
    if recorder is None or recorder.paused:
        return original(*args, **kwargs)
    if cls is CheckpointFunction:
        return recorder.checkpoints.run_reentrant(call_site(), *args)
    return recorder.call_function(original, args, kwargs)
