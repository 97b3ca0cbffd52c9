"""Small edits of source text: what a slip of the hand could make of it, and Python still takes.

`edits_of(path, source)` gives all of a file, each as a stretch of text and what stands there instead, so that the rest
of the file stays as it is; `edit.compiles` says whether Python takes it. Left alone is what changes no behaviour:
docstrings, annotations, `__all__`, imports, texts of messages, `assert` (there for the type checker), prints.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property

from tests.support.source_edits import SourceEdit

__all__ = ["edits_of"]


_COMPARE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_COMPARE |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
_BINARY = {"+": "-", "-": "+", "*": "//", "//": "*", "/": "*", "%": "*", "**": "*", "&": "|", "|": "&"}
_TWINS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
_NEUTRAL = set("clone detach contiguous copy float double long abs flatten reversed update wait".split())
_MESSAGES = re.compile(r"(Error|Exception|Warning|Exit|warn|print|fail|refuse|refused|debug|info|message)$")
_GENERIC = (
    "Callable",
    "Counter",
    "Iterable",
    "Literal",
    "Mapping",
    "Optional",
    "Sequence",
    "Union",
    "dict",
    "list",
    "tuple",
)
_TEXTS = ("description", "epilog", "help", "metavar")  # of a command line
_WORD = re.compile(r"[\w.,:*-]+$")


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_generic(node: ast.expr) -> bool:
    """`Callable[..., Any]` and the like: another name for a type."""
    return isinstance(node, ast.Subscript) and _name(node.value) in _GENERIC


class _File:
    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = path, source
        self.lines = source.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """`column` counts bytes of UTF-8, as the syntax tree does."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def start(self, node: ast.AST) -> int:
        return self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> str:
        return self.source[self.start(node) : self.end(node)]

    def edit(self, operator: str, node: ast.AST, new: str) -> SourceEdit:
        return self.between(operator, node, self.start(node), self.end(node), new)

    def between(self, operator: str, node: ast.AST, start: int, end: int, new: str) -> SourceEdit:
        position = node.lineno, node.col_offset  # type: ignore[attr-defined]
        return SourceEdit(self.path, operator, self.source, start, end, new, position)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)


def edits_of(path: str, source: str) -> list[SourceEdit]:
    """All edits of a file, in its order."""
    file = _File(path, source)
    edits = {(edit.start, edit.end, edit.new): edit for edit in _Walk(file).edits_below(file.tree)}
    return sorted(edits.values(), key=lambda edit: (edit.start, edit.end, edit.new))


class _Walk:
    """Edits node by node; a method `on_X` gives those of nodes of class X."""

    def __init__(self, file: _File) -> None:
        self.file = file
        self.skipped: set[int] = set()  # nodes
        self.defaults: list[dict[str, str]] = []  # of the functions around: parameter -> text of its default

    def edits_below(self, node: ast.AST) -> Iterator[SourceEdit]:
        method = getattr(self, f"on_{type(node).__name__}", None)
        if method is not None:
            yield from method(node)
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if function:
            self.defaults.append(self.defaults_of(node.args))  # type: ignore[attr-defined]
        for child in self.children(node):
            yield from self.edits_below(child)
        if function:
            self.defaults.pop()

    def children(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields the nodes below a node that can be edited."""
        skipped: set[str] = set()
        if isinstance(node, (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)):
            return
        if isinstance(node, ast.Raise) and not isinstance(node.exc, ast.Name):
            return  # texts of messages
        if isinstance(node, ast.Call) and _MESSAGES.search(_name(node.func)):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.name in ("__repr__", "__str__") or any(_name(one) == "overload" for one in node.decorator_list):
                return
            skipped = {"returns"}
            used = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            for argument, default in self._with_defaults(node.args):
                if argument.arg not in used:  # it stands there for its name
                    self.skipped.add(id(default))
        if isinstance(node, ast.arg):
            return
        if isinstance(node, ast.ClassDef):
            skipped = {"decorator_list"}  # frozen=True, slots=True: against a slip, not for what is right
        if isinstance(node, ast.AnnAssign):
            skipped = {"annotation"}
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Assign) and (_name(node.targets[0]) == "__all__" or _is_generic(node.value)):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # docstrings, `...`
        if isinstance(node, ast.Call) and _name(node.func) in ("cast", "TypeVar", "NewType", "getLogger"):
            return
        for name, value in ast.iter_fields(node):
            if name not in skipped:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST) and id(child) not in self.skipped:
                        yield child

    def defaults_of(self, arguments: ast.arguments) -> dict[str, str]:
        pairs = self._with_defaults(arguments)
        return {one.arg: self.file.text(default) for one, default in pairs if isinstance(default, ast.Constant)}

    def _with_defaults(self, arguments: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr]]:
        positional = [*arguments.posonlyargs, *arguments.args]
        yield from zip(reversed(positional), reversed(arguments.defaults))
        yield from ((a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults) if d is not None)

    # --- expressions ---

    def on_Compare(self, node: ast.Compare) -> Iterator[SourceEdit]:
        for left, right in zip([node.left, *node.comparators], node.comparators):
            yield from self._operator("comparison", node, left, right, _COMPARE)

    def on_BinOp(self, node: ast.BinOp) -> Iterator[SourceEdit]:
        if isinstance(node.op, ast.Mod) and isinstance(node.left, (ast.Constant, ast.JoinedStr)):
            return
        yield from self._operator("arithmetic", node, node.left, node.right, _BINARY)

    def _operator(
        self, operator: str, node: ast.AST, left: ast.AST, right: ast.AST, others: dict[str, str]
    ) -> Iterator[SourceEdit]:
        begin = self.file.end(left)
        gap = self.file.source[begin : self.file.start(right)]
        match = re.search("|".join(sorted(map(re.escape, others), key=len, reverse=True)), gap)
        if match is not None:
            start = begin + match.start()
            yield self.file.between(operator, node, start, begin + match.end(), others[match[0]])

    def on_BoolOp(self, node: ast.BoolOp) -> Iterator[SourceEdit]:
        words = {"and": "or", "or": "and"}
        yield from self._operator("and/or", node, node.values[0], node.values[1], words)
        for index, value in enumerate(node.values):
            if index:  # with the word before it
                start, end = self.file.end(node.values[index - 1]), self.file.end(value)
            else:
                start, end = self.file.start(value), self.file.start(node.values[1])
            yield self.file.between("dropped condition", value, start, end, "")

    def on_UnaryOp(self, node: ast.UnaryOp) -> Iterator[SourceEdit]:
        if isinstance(node.op, (ast.Not, ast.USub)):
            yield self.file.edit("dropped sign or not", node, f"({self.file.text(node.operand)})")

    def _negated(self, test: ast.expr) -> Iterator[SourceEdit]:
        if not isinstance(test, (ast.UnaryOp, ast.NamedExpr)):
            yield self.file.edit("negated condition", test, f"not ({self.file.text(test)})")

    def on_IfExp(self, node: ast.IfExp) -> Iterator[SourceEdit]:
        yield from self._negated(node.test)
        yield self.file.edit("one branch", node, f"({self.file.text(node.body)})")
        yield self.file.edit("one branch", node, f"({self.file.text(node.orelse)})")

    def on_comprehension(self, node: ast.comprehension) -> Iterator[SourceEdit]:
        for test in node.ifs:
            yield from self._negated(test)
            yield self.file.edit("dropped condition", test, "True")

    def on_Constant(self, node: ast.Constant) -> Iterator[SourceEdit]:
        value = node.value
        if isinstance(value, bool):
            yield self.file.edit("constant", node, str(not value))
        elif isinstance(value, int):
            yield self.file.edit("constant", node, str(value + 1))
            if value:
                yield self.file.edit("constant", node, str(value - 1))
        elif isinstance(value, float):
            yield self.file.edit("constant", node, repr(value * 2 if value else 1.0))

    def _word(self, operator: str, node: ast.AST | None) -> Iterator[SourceEdit]:
        """Edits a string that is a name: a key, an option, an axis."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _WORD.match(node.value):
            quote = self.file.text(node)[-1]
            yield self.file.between(operator, node, self.file.end(node) - 1, self.file.end(node), f"_{quote}")

    def on_Subscript(self, node: ast.Subscript) -> Iterator[SourceEdit]:
        yield from self._word("key", node.slice)

    def on_Slice(self, node: ast.Slice) -> Iterator[SourceEdit]:
        for bound in (node.lower, node.upper, node.step):
            if bound is not None:
                yield self.file.edit("dropped bound", bound, "")

    def on_Dict(self, node: ast.Dict) -> Iterator[SourceEdit]:
        for key, value in zip(node.keys, node.values):
            yield from self._word("key", key)
            if key is not None:
                yield self._without("dropped entry", key, self.file.start(key), self.file.end(value))

    def _elements(self, node: ast.List | ast.Tuple | ast.Set) -> Iterator[SourceEdit]:
        shortest = 1 if isinstance(node, ast.List) else 2
        if isinstance(getattr(node, "ctx", None), ast.Store) or len(node.elts) < shortest:
            return
        for element in node.elts:
            yield from self._word("constant", element)
            if len(node.elts) > 2 or isinstance(node, ast.List):
                yield self._without("dropped element", element, self.file.start(element), self.file.end(element))

    on_List = on_Tuple = on_Set = _elements

    def _without(self, operator: str, node: ast.AST, start: int, end: int) -> SourceEdit:
        """Without an item of a list, and the comma after it."""
        comma = re.match(r"\s*,[ ]?", self.file.source[end:])
        return self.file.between(operator, node, start, end + (comma.end() if comma else 0), "")

    def on_Call(self, node: ast.Call) -> Iterator[SourceEdit]:
        if _MESSAGES.search(_name(node.func)):
            return
        arguments = [one for one in node.args if not isinstance(one, ast.Starred)]
        if _name(node.func) in ("cast", "TypeVar", "NewType", "getLogger"):
            return
        if isinstance(node.func, ast.Name) and node.func.id in _TWINS:
            yield self.file.edit("twin function", node.func, _TWINS[node.func.id])
        if isinstance(node.func, ast.Attribute) and node.func.attr in _NEUTRAL and not node.args:
            yield self.file.edit("dropped call", node, self.file.text(node.func.value))
        attribute = _name(node.func) in ("getattr", "setattr", "hasattr", "isinstance", "issubclass")
        symmetric = _name(node.func) in ("min", "max")
        if len(arguments) >= 2 and len(arguments) == len(node.args) and not (attribute or symmetric):
            first, second = self.file.text(arguments[0]), self.file.text(arguments[1])
            between = self.file.source[self.file.end(arguments[0]) : self.file.start(arguments[1])]
            start, end = self.file.start(arguments[0]), self.file.end(arguments[1])
            yield self.file.between("swapped arguments", arguments[0], start, end, second + between + first)
        for keyword in node.keywords:
            if keyword.arg in _TEXTS:
                continue
            yield from self._word("constant", keyword.value)
            if keyword.arg is not None:
                yield self._without("dropped argument", keyword, self.file.start(keyword), self.file.end(keyword))
        for argument in node.args:
            value = argument.value if isinstance(argument, ast.Constant) else None
            if isinstance(value, str) and _name(node.func) in ("set", "frozenset"):
                yield self.file.edit("dropped element", argument, repr(value[1:]))  # of letters
            else:
                yield from self._word("constant", argument)

    def on_Name(self, node: ast.Name) -> Iterator[SourceEdit]:
        default = self.defaults[-1].get(node.id) if self.defaults else None
        if default is not None and isinstance(node.ctx, ast.Load):
            yield self.file.edit("ignored argument", node, default)

    # --- statements ---

    def _pass(self, operator: str, node: ast.stmt) -> Iterator[SourceEdit]:
        yield self.file.edit(operator, node, "pass")

    def on_If(self, node: ast.If) -> Iterator[SourceEdit]:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            yield from self._negated(node.test)
            yield self.file.edit("dropped condition", node.test, "False")
            yield self.file.edit("dropped condition", node.test, "True")

    def on_While(self, node: ast.While) -> Iterator[SourceEdit]:
        yield from self._negated(node.test)

    def on_With(self, node: ast.With) -> Iterator[SourceEdit]:
        if all(item.optional_vars is None for item in node.items):
            start, end = self.file.start(node), self.file.end(node.items[-1].context_expr)
            yield self.file.between("dropped context", node, start, end, "if True")

    def on_Expr(self, node: ast.Expr) -> Iterator[SourceEdit]:
        call = node.value
        if isinstance(call, ast.Call) and not re.search(r"^(print|debug|info)$", _name(call.func)):
            yield from self._pass("dropped statement", node)

    def on_AugAssign(self, node: ast.AugAssign) -> Iterator[SourceEdit]:
        yield from self._pass("dropped statement", node)

    def on_Delete(self, node: ast.Delete) -> Iterator[SourceEdit]:
        yield from self._pass("dropped statement", node)

    def on_Assign(self, node: ast.Assign) -> Iterator[SourceEdit]:
        if isinstance(node.targets[0], (ast.Subscript, ast.Attribute)):
            yield from self._pass("dropped statement", node)

    def on_Raise(self, node: ast.Raise) -> Iterator[SourceEdit]:
        if node.exc is None or "NotImplementedError" not in ast.unparse(node.exc):
            yield from self._pass("dropped raise", node)

    def on_Continue(self, node: ast.Continue) -> Iterator[SourceEdit]:
        yield self.file.edit("continue/break", node, "break")

    def on_Break(self, node: ast.Break) -> Iterator[SourceEdit]:
        yield self.file.edit("continue/break", node, "continue")

    def on_FunctionDef(self, node: ast.FunctionDef) -> Iterator[SourceEdit]:
        for decorator in node.decorator_list:
            if _name(decorator) not in ("overload", "property", "staticmethod", "classmethod", "abstractmethod"):
                yield self.file.between(
                    "dropped decorator", decorator, self.file.start(decorator) - 1, self.file.end(decorator), ""
                )
        for statement in ast.walk(node):
            if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return):
                yield from self._pass("dropped return", statement.body[-1])
