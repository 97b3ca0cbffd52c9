"""Translation of a recording's graph into a program: calls on values, of which only buffers are written in place.

`in_place.py` finds the equivalent function that writes nothing, `aliasing.py` the new values of views after a write.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from ..rules import RULES
from ..torch_internals.tensors import pytree
from .aliasing import AliasedTensor, SharedMemory
from .builder import Builder, ResultSpec, another_call, without_dead_calls
from .in_place import writes_first, written_value
from .program import Call, Program, Value, argument_name, dotted, operands_of, values_in
from .recording import Recording, TracingError, info_of, pack

__all__ = ["translate"]

# These change a tensor's shape or strides and not its memory: afterwards the tensor is another view.
_OTHER_VIEWS = {"transpose_", "swapaxes_", "swapdims_", "t_", "squeeze_", "unsqueeze_", "detach_"}


def translate(
    recording: Recording, arguments: dict[str, Any], names: Iterable[str], order: list[str], training: bool
) -> Program:
    """Returns the program of a recording.

    Args:
        arguments: the arguments of the recorded call; `names`: the names of all arguments of forward.
        order: names of parameters and buffers, in the module's order.
    """
    containers = [name for name in names if not isinstance(arguments.get(name), torch.Tensor)]
    return _Translator(recording, containers).program(arguments, order, training)


class _Translator:
    def __init__(self, recording: Recording, argument_names: Iterable[str]) -> None:
        """`argument_names`: names of arguments that are no tensors, which are variables of the emitted forward too."""
        self.recording = recording
        self.builder = Builder(reserved=map(argument_name, argument_names))
        self.leaves: dict[str, dict[str, Value]] = {"parameter": {}, "buffer": {}, "constant": {}}
        self.inputs: dict[int, Value] = {}  # by index among the leaves of the arguments
        self.tensors: dict[fx.Node, AliasedTensor] = {}
        self.memories: dict[int, SharedMemory] = {}  # by storage
        self.roots: dict[int, AliasedTensor] = {}  # of parameters, buffers and constants

    def program(self, arguments: Any, order: list[str], training: bool) -> Program:
        flat, structure = pytree.tree_flatten_with_path(arguments)
        paths = [dotted(path) for path, _ in flat]
        for node in self.recording.graph.nodes:
            if node.op == "placeholder":
                self._add_input(node, paths[node.meta["leaf"]])
            elif node.op == "get_attr":
                self._add_leaf(node)
            elif node.op == "call_function" and info_of(node).kind == "function":
                self._add_call(node)
        outputs = [
            self.tensors[leaf].read(self.builder, "the result of forward") if isinstance(leaf, fx.Node) else leaf
            for leaf in self.recording.outputs
        ]
        for buffer, node in self.recording.rebound:
            memory, like = self.tensors[buffer].memory, Call(torch.Tensor.copy_, (), {}, where=info_of(node).where)
            memory.version += 1
            self._write_buffer(memory, self.tensors[node].read(self.builder, like.where), like)
        calls = without_dead_calls(self.builder.calls, outputs)
        read = set(values_in([outputs, *((call.args, call.kwargs) for call in calls)]))
        parameters, buffers = (self.leaves[kind] for kind in ("parameter", "buffer"))
        return Program(
            inputs=list(self.inputs.values()),
            structure=structure,
            arguments=[self.inputs.get(index, leaf) for index, (_, leaf) in enumerate(flat)],
            parameters=[parameters[name] for name in order if name in parameters and parameters[name] in read],
            buffers=[buffers[name] for name in order if name in buffers and buffers[name] in read],
            constants=[value for value in self.leaves["constant"].values() if value in read],
            calls=calls,
            outputs=outputs,
            output_structure=self.recording.structure,
            training=training,
        )

    # --- values that no call makes ---

    def _add_input(self, node: fx.Node, path: str) -> None:
        value = self._value(node, "input", path)
        self.inputs[node.meta["leaf"]] = value

    def _add_leaf(self, node: fx.Node) -> None:
        info, name = info_of(node), str(node.target)
        assert info.storage is not None
        if name in self.leaves[info.kind]:  # another object for the same tensor
            self.tensors[node] = self.roots[info.storage]
            return
        value = self._value(node, info.kind, name)
        value.constant, value.varies = info.constant, info.kind != "constant"
        self.leaves[info.kind][name] = value
        self.roots[info.storage] = self.tensors[node]

    def _value(self, node: fx.Node, kind: str, path: str) -> Value:
        spec = info_of(node).spec
        assert spec is not None
        value = Value(self.builder.name(path), kind, spec.shape, spec.dtype, spec.requires_grad, path=path)
        self._bind(node, value, None)
        self.tensors[node].memory.leaf = value
        return value

    # --- calls ---

    def _add_call(self, node: fx.Node) -> None:
        info = info_of(node)
        where = info.where
        if node.target is setattr and node.args[1:] == ("requires_grad", True):
            tensor = self.tensors.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None
            is_view = tensor is not None and tensor.call is not None and not tensor.memory.version
            if tensor is not None and (tensor.memory.leaf is None or is_view):
                return  # nobody reads the gradient of an intermediate value
        if node.target is setattr:
            raise TracingError(
                f"{where}: forward sets .{node.args[1]} of a tensor, which cannot be recorded. Compute a new tensor."
            )
        if info.function is torch.Tensor.retain_grad:
            return
        if info.function is torch.Tensor.register_hook:
            raise TracingError(f"{where}: forward registers a hook on a tensor, which the program would not run.")
        args = node.args[:1] if node.target is getattr else node.args
        args, kwargs = self._resolve(args, where), self._resolve(node.kwargs, where)
        assert info.function is not None
        call = Call(info.function, args, kwargs, source=_source(where), **info.facts())
        call.random = call.random and _draws(info.function, args, kwargs)
        if info.writes and call.name in _OTHER_VIEWS:
            call.function = getattr(torch.Tensor, call.name.removesuffix("_"))
        elif info.writes:
            self._add_write(node, call)
            return
        self._add_reading(node, call)

    def _add_reading(self, node: fx.Node, call: Call) -> None:
        """Adds a call that writes nothing, or only buffers."""
        info = info_of(node)
        if info.spec is not None:
            nodes = [node]
        else:
            nodes = sorted((user for user in node.users if info_of(user).kind == "part"), key=_number)
            complete = [_number(n) for n in nodes] == [*range(info.items)]
            if not complete or any(info_of(n).spec is None for n in nodes):
                raise TracingError(
                    f"{info.where}: {call.name} returns tensors in nested containers, or mixed with other objects. "
                    f"Return a tensor, or a tuple of tensors."
                )
        # Forward may have set requires_grad of a result: of one without such an operand it reaches no parameter.
        differentiable = any(value.requires_grad for value in values_in((call.args, call.kwargs)))
        results = [
            ResultSpec(spec.shape, spec.dtype, differentiable and spec.requires_grad and not info_of(n).grad_by_write)
            for n in nodes
            if (spec := info_of(n).spec) is not None
        ]
        values = self.builder.add(call, results, several=info.spec is None)
        for index, (result_node, value) in enumerate(zip(nodes, values)):
            self._bind(result_node, value, call, index, [*node.all_input_nodes])

    def _bind(
        self, node: fx.Node, value: Value, call: Call | None, index: int = 0, operands: list[fx.Node] | None = None
    ) -> None:
        """Makes `node` a new tensor: with new memory, or a view of an operand."""
        info = info_of(node)
        assert info.storage is not None and info.spec is not None
        memory = self.memories.setdefault(info.storage, SharedMemory(info.storage))
        bases = [self.tensors[n] for n in operands or () if n in self.tensors and self.tensors[n].memory is memory]
        tensor = AliasedTensor(value, memory, memory.version, bases[0] if bases else None, call, index)
        tensor.layout = (info.spec.shape, info.spec.stride)
        self.tensors[node] = tensor

    def _resolve(self, x: Any, where: str) -> Any:
        """Returns arguments of a node with values in the place of nodes, in plain containers."""
        if isinstance(x, fx.Node):
            if x.target is pack:
                leaves, structure = x.args
                return pack(self._resolve(leaves, where), structure)
            if x not in self.tensors:
                raise TracingError(
                    f"{where}: a container of tensors is passed to a call as one object, which cannot be recorded: "
                    "pass its tensors."
                )
            return self.tensors[x].read(self.builder, where)
        if isinstance(x, slice):
            return slice(*(self._resolve(bound, where) for bound in (x.start, x.stop, x.step)))
        if isinstance(x, torch.Size):
            return tuple(x)
        if isinstance(x, tuple):
            return tuple(self._resolve(item, where) for item in x)
        if isinstance(x, list):
            return [self._resolve(item, where) for item in x]
        if isinstance(x, dict):
            return {key: self._resolve(item, where) for key, item in x.items()}
        return x

    # --- writes ---

    def _add_write(self, node: fx.Node, call: Call) -> None:
        info = info_of(node)
        target = node.kwargs["out"] if "out" in node.kwargs else node.args[0] if node.args else node.kwargs.get("input")
        tensor = self.tensors.get(target) if isinstance(target, fx.Node) else None
        value = None
        if tensor is not None and tensor.memory.storage in info.writes and writes_first(call):
            self._refuse_write(tensor.memory, call)
            if tensor.value.requires_grad and not call.grad:
                raise TracingError(
                    f"{call.where}: {call.name} writes a tensor that requires a gradient inside no_grad, so the "
                    f"gradient would ignore the write. Write to a detached copy, or outside no_grad."
                )
            value = written_value(self.builder, call, tensor.value, functools.partial(self._is_fresh, tensor))
        if tensor is None or value is None:
            self._add_buffer_write(node, call)
            return
        new_value = tensor.write(value, self.builder, call)
        if tensor.memory.leaf is not None:
            self._write_buffer(tensor.memory, new_value, call)
        if info.spec is not None:
            self.tensors[node] = tensor

    def _is_fresh(self, tensor: AliasedTensor) -> bool:
        """Returns whether the tensor was never read and has and is no view, so that an in-place write creates it."""
        used = any(tensor.value in values_in((call.args, call.kwargs)) for call in self.builder.calls)
        return not used and tensor.base is None and tensor.memory.leaf is None

    def _add_buffer_write(self, node: fx.Node, call: Call) -> None:
        """Adds a function that writes operands beside its result, such as batch norm, which writes its statistics."""
        info = info_of(node)
        tensors = [self.tensors[n] for n in node.all_input_nodes if n in self.tensors]
        written = [tensor for tensor in tensors if tensor.memory.storage in info.writes]
        for tensor in written:
            self._refuse_write(tensor.memory, call)
            if tensor.value is not tensor.memory.leaf:
                raise TracingError(
                    f"{call.where}: {call.name} writes a tensor in place, and no equal out-of-place function is known. "
                    f"Use an out-of-place function."
                )
        values = [tensor.value for tensor in written]
        call.writes = tuple(index for index, value in enumerate(operands_of(call)) if value in values)
        self._add_reading(node, call)
        for tensor in written:
            tensor.memory.version += 1

    def _refuse_write(self, memory: SharedMemory, call: Call) -> None:
        leaf = memory.leaf
        if leaf is None or leaf.kind == "buffer":
            return
        what = {
            "input": f"argument {leaf.path} of forward in place. Write to a copy: {leaf.path}.clone()",
            "parameter": f"parameter {leaf.path} in place. Change parameters in the optimizer, not in forward",
            "constant": "in place to a tensor that is no buffer. Register the tensor: module.register_buffer",
        }
        raise TracingError(f"{call.where}: {call.name} writes {what[leaf.kind]}.")

    def _write_buffer(self, memory: SharedMemory, value: Value, call: Call) -> None:
        """Adds a copy of the new value into a buffer whose memory was written."""
        buffer = memory.leaf
        assert buffer is not None
        if memory.lost:
            raise TracingError(f"{call.where}: {call.name} writes a view of buffer {buffer.path}. {memory.lost}")
        if (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
            raise TracingError(
                f"{call.where}: buffer {buffer.path}, {buffer!r}, is replaced by a tensor of another shape or dtype, "
                f"{value!r}."
            )
        if value.requires_grad:
            raise TracingError(
                f"{call.where}: {call.name} writes a value that requires a gradient to buffer {buffer.path}, which "
                f"would keep the autograd graph of this step alive. Write x.detach()."
            )
        copy = another_call(call, torch.Tensor.copy_, buffer, value)
        copy.writes = (0,)
        self.builder.add(copy, [])


def _number(node: fx.Node) -> Any:
    return node.args[1]


def _source(where: str) -> str:
    file, _, line = where.rpartition(":")
    return linecache.getline(file, int(line)).strip() if line.isdigit() else ""


def _draws(function: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether a random function draws numbers with these arguments: attention without dropout does not."""
    rule = RULES.get(function)
    return rule is None or not callable(rule.random) or bool(rule.random(*args, **kwargs))
