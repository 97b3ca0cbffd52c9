"""The line, module path, names and source text of a call, for messages only.

The expression that is being evaluated is found in the source by the position of the running instruction; the source
texts of its arguments are the names in messages.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....call_site import MACHINERY, TRANSPORT, USER, call_site, owner_of
from ....spmd.tensor_type import NAME
from ....torch_internals.autograd import saved_value
from .syntax import ancestors, syntax_tree, text_of

__all__ = ["Named", "Site", "editable", "leaf_of", "module_path", "name_of", "name_operands", "site",
           "value_of"]  # fmt: skip


def module_path(names: Mapping[int, str]) -> str:
    """The path of the module whose forward is running; `names`: paths by the module's id."""
    if not names:
        return ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name != "_call_impl" and "self" in frame.f_code.co_varnames:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                path = names.get(id(owner))
                if path is not None:
                    return path
        frame = frame.f_back
    return ""


class Site(NamedTuple):
    """The expression in the user's code that is being evaluated.

    Attributes:
        frame, file, source: the place of the expression.
        node: the expression; None: not found.
        called: tensors among the arguments of the module or function that the expression calls, if the judged call is
            inside of it; None: the expression is the judged call.
    """

    frame: FrameType
    file: str
    source: str
    node: ast.AST | None
    called: tuple[Tensor, ...] | None = None

    @property
    def editable(self) -> bool:
        """Returns whether the expression is in the user's code, not in an installed package or in this one."""
        return editable(self.file)

    def statement(self) -> ast.stmt | None:
        """The statement around the expression; None: not found."""
        around = (self.node, *ancestors(self.source, self.node))
        return next((node for node in around if isinstance(node, ast.stmt)), None)

    def enclosing_call(self) -> ast.Call | None:
        """The call whose first argument is the expression; None: there is none."""
        outer = next(ancestors(self.source, self.node), None)
        return outer if isinstance(outer, ast.Call) and outer.args and outer.args[0] is self.node else None

    def enclosing_division(self) -> ast.BinOp | None:
        """The quotient whose dividend is the expression; None: there is none."""
        outer = next(ancestors(self.source, self.node), None)
        is_quotient = isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Div) and outer.left is self.node
        return outer if is_quotient else None

    def calls_of(self, function: str) -> int:
        """Returns the number of calls of a function, by its name, in the file."""
        calls = (node for node in _expressions(self.source) if isinstance(node, ast.Call))
        return sum(getattr(call.func, "id", getattr(call.func, "attr", "")) == function for call in calls)

    def text(self, node: ast.AST | None) -> str:
        """The source text of a part of the expression."""
        return "" if node is None else " ".join(text_of(self.source, node).split())


class Named(NamedTuple):
    """The name of an operand in the user's code.

    Attributes:
        label: name in messages: "layers.3.mlp.down_proj.weight".
        code: name in repairs: "self.weight", or the expression that computed it; "<mlp.weight>" or "<operand 1>" where
            the user's frame has no name.
        node: this expression in the line under evaluation; None: the line does not have it.
    """

    label: str
    code: str
    node: ast.expr | None


def site() -> Site | None:
    """The expression in the user's code that is being evaluated; None if it is not found."""
    file, _, line = call_site().rpartition(":")
    if owner_of(file) != USER:
        return None
    frame, inner = sys._getframe(1), None
    while not (frame.f_code.co_filename == file and str(frame.f_lineno) == line):
        if frame.f_back is None:
            return None
        frame, inner = frame.f_back, frame
    source = "".join(linecache.getlines(file, frame.f_globals))
    direct = inner is None or owner_of(inner.f_code.co_filename) in (MACHINERY, TRANSPORT)
    return Site(frame, file, source, _node(source, frame), None if direct or inner is None else _given_to(inner))


def editable(file: str) -> bool:
    """Returns whether a file is the user's: not part of torch, this package or an installed one."""
    return owner_of(file) == USER and not any(folder in file for folder in _INSTALLED)


_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))


def _given_to(frame: FrameType) -> tuple[Tensor, ...]:
    """The tensors among the arguments of a call."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    tensors: list[Tensor] = []
    for name in code.co_varnames[:count]:
        value = frame.f_locals.get(name)
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else (value,)
        tensors += [item for item in values if isinstance(item, Tensor)]
    return tuple(tensors)


_EVALUATED = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.Attribute, ast.AugAssign)


@lru_cache(maxsize=64)
def _expressions(source: str) -> list[Any]:
    tree = syntax_tree(source)
    return [node for node in ast.walk(tree) if isinstance(node, _EVALUATED)] if tree is not None else []


def _node(source: str, frame: FrameType) -> ast.AST | None:
    expressions = _expressions(source)
    positions = getattr(frame.f_code, "co_positions", None)  # Python 3.11
    if positions is None or frame.f_lasti < 0:
        calls = [node for node in expressions if isinstance(node, ast.Call) and node.lineno == frame.f_lineno]
        return calls[0] if len(calls) == 1 else None
    line, end_line, column, end_column = list(positions())[frame.f_lasti // 2]
    ending = [node for node in expressions if (node.end_lineno, node.end_col_offset) == (end_line, end_column)]
    exact = [node for node in ending if (node.lineno, node.col_offset) == (line, column)]
    # The instruction of a method in a chain over several lines begins at the method's name.
    return next(iter(exact or [node for node in ending if isinstance(node, ast.Call)]), None)


def arguments(here: Site) -> list[ast.expr]:
    """The parts of the expression that may be its operands, in the order in which torch gets them."""
    node = here.node
    parts: list[ast.expr] = []
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and not isinstance(
            value_of(node.func.value, here.frame), (ModuleType, nn.Module, type)
        ):
            parts.append(node.func.value)
        parts += [*node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
    elif isinstance(node, ast.UnaryOp):
        parts = [node.operand]
    elif isinstance(node, ast.AugAssign):
        parts = [node.target, node.value]
    elif isinstance(node, ast.Attribute):
        parts = [node.value]
    elif isinstance(node, ast.Subscript):
        parts = [node.value, *_items(node.slice)]
        if isinstance(node.ctx, ast.Store):
            outer = next(ancestors(here.source, node), None)
            parts += [outer.value] if isinstance(outer, ast.Assign) else []
    return [
        part for argument in parts for part in (_items(argument) if isinstance(argument, ast.List) else (argument,))
    ]


def _items(node: ast.expr) -> Sequence[ast.expr]:
    return node.elts if isinstance(node, (ast.Tuple, ast.List)) else (node,)


_UNKNOWN: Any = object()


def value_of(node: ast.AST, frame: FrameType) -> Any:
    """The value of a name, attribute or item, read without running any code; `_UNKNOWN` for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id, _UNKNOWN))
    if isinstance(node, ast.Attribute):
        owner = value_of(node.value, frame)
        if isinstance(owner, nn.Module):
            tables = (owner._parameters, owner._buffers, owner._modules, owner.__dict__)
            return next((table[node.attr] for table in tables if node.attr in table), _UNKNOWN)
        return getattr(owner, "__dict__", {}).get(node.attr, _UNKNOWN) if not isinstance(owner, Tensor) else _UNKNOWN
    if isinstance(node, ast.Subscript):
        owner, key = value_of(node.value, frame), value_of(node.slice, frame)
        try:
            return owner[key] if type(owner) in (dict, list, tuple) and key is not _UNKNOWN else _UNKNOWN
        except (LookupError, TypeError):
            return _UNKNOWN
    if isinstance(node, (ast.Tuple, ast.List, ast.Slice)) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
    ):
        return None  # no tensor
    return _UNKNOWN


def name_operands(tensors: Sequence[Tensor], here: Site | None = None) -> list[Named]:
    """The names of the operands of the call under evaluation."""
    here = here or site()
    if here is None:
        return [Named(_given(x), _placeholder(_given(x), index), None) for index, x in enumerate(tensors)]
    parts = [(part, value_of(part, here.frame)) for part in arguments(here)]
    matched: set[int] = set()
    nodes: list[ast.expr | None] = []
    for x in tensors:
        match = next((i for i, (_, value) in enumerate(parts) if value is x and i not in matched), None)
        match = next((i for i, (_, value) in enumerate(parts) if value is x), None) if match is None else match
        matched.update(() if match is None else (match,))
        nodes.append(None if match is None else parts[match][0])
    names = [_given(x) or _variable(x, here.frame) for x in tensors]
    unknown = [part for part, value in parts if value is _UNKNOWN and not isinstance(part, _COMPREHENSIONS)]
    for index, (x, node) in enumerate(zip(tensors, nodes)):
        is_argument = here.called is None or any(x is tensor for tensor in here.called)
        if node is None and not names[index] and unknown and is_argument:
            nodes[index] = unknown.pop(0)
    result = []
    for index, (x, name, node) in enumerate(zip(tensors, names, nodes)):
        code = here.text(node) or _variable(x, here.frame)
        label = name or _short(code)
        result.append(Named(label, code or _placeholder(label, index), node))
    return result


_COMPREHENSIONS = (ast.GeneratorExp, ast.ListComp, ast.DictComp, ast.SetComp)


def name_of(x: Tensor) -> str:
    """The name of a tensor: a registered one, else a variable or an expression in the user's code."""
    return name_operands([x])[0].label


def _placeholder(label: str, index: int) -> str:
    return f"<{label or f'operand {index}'}>"


def _short(code: str) -> str:
    return code if len(code) <= 60 else code[:57] + "..."


def _given(x: Tensor) -> str:
    return str(x.__dict__.get(NAME) or "")


def _variable(x: Tensor, frame: FrameType) -> str:
    """The variable, attribute or item in a frame that is `x`."""
    tables = (frame.f_locals,) if frame.f_code.co_name == "<module>" else (frame.f_locals, frame.f_globals)
    for table in tables:
        match = next((name for name, value in _inside(table) if value is x), "")
        if match:
            return match
    return ""


def _inside(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in list(table.items()):
        yield name, value
    for name, value in list(table.items()):
        if isinstance(value, nn.Module):
            yield from ((name + _access(inner), param) for inner, param in value.named_parameters())
        elif type(value) is dict:
            yield from ((f"{name}[{key!r}]", item) for key, item in value.items() if isinstance(item, Tensor))
        elif type(value) in (list, tuple):
            yield from ((f"{name}[{key}]", item) for key, item in enumerate(value) if isinstance(item, Tensor))


def _access(path: str) -> str:
    """`.layers[0].weight` of the path `layers.0.weight`."""
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split("."))


# --- through the autograd graph ---

_CONTRACTIONS = ("MmBackward0", "AddmmBackward0", "BmmBackward0", "LinearBackward0", "BaddbmmBackward0", "DotBackward0")
_MOVES = ("View", "UnsafeView", "Transpose", "TBackward", "Permute", "Add", "Clone", "ToCopy", "Reshape", "Alias",
          "Unsqueeze", "Squeeze", "Expand")  # fmt: skip


def _node_of(x: Tensor) -> Any:
    try:
        return x.grad_fn
    except RuntimeError:  # a view made under no_grad, of what was written since
        return None


def leaf_of(x: Tensor, matches: Callable[[Tensor], bool]) -> Tensor | None:
    """The nearest leaf or saved operand in the graph of `x` for which `matches` is true; None if there is none.

    The search ends at collectives, and finds nothing for a tensor without a gradient.
    """
    return next((leaf for leaf in _leaves(_node_of(x), matches) if leaf is not x), None)


def _leaves(start: Any, matches: Callable[[Tensor], bool], limit: int = 300) -> Iterator[Tensor]:
    queue: list[Any] = [start]
    seen: set[Any] = set()
    while queue and len(seen) < limit:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        yield from (x for x in (getattr(node, "variable", None), *_saved(node)) if isinstance(x, Tensor) and matches(x))
        if not node.name().startswith("_Typed"):
            queue += [following for following, _ in node.next_functions]


def contracts(x: Tensor, varies: Callable[[Tensor], bool]) -> bool:
    """Returns whether `x` comes, apart from views and sums, from a product of two operands that both vary.

    `varies` must be true for the operand, or for a tensor in its graph.
    """
    queue: list[Any] = [_node_of(x)]
    seen: set[Any] = set()
    while queue and len(seen) < 50:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name in _CONTRACTIONS:
            sides = [following for following, _ in node.next_functions][-2:]
            saved = _saved(node)
            if len(sides) == 2 and all(_leads(side, saved[k : k + 1], varies) for k, side in enumerate(sides)):
                return True
        elif any(part in name for part in _MOVES):
            queue += [following for following, _ in node.next_functions]
    return False


def _leads(node: Any, saved: Sequence[Tensor], varies: Any) -> bool:
    return any(varies(x) for x in saved) or next(_leaves(node, varies), None) is not None


def _saved(node: Any) -> list[Tensor]:
    operands = []
    if node.name() in _CONTRACTIONS:
        for name in ("self", "input", "mat1", "batch1", "mat2", "batch2", "weight"):
            try:
                value = saved_value(node, name)
            except RuntimeError:  # freed
                value = None
            if isinstance(value, torch.Tensor):
                operands.append(value)
    return operands
