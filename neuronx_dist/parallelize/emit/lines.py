"""Lines of an emitted method as data, and their text: recomputed spans, `with` statements, deletions, comments.

In a line's text the names of values, and paths of stored tensors and containers, are marked, so that a line can be
compared with another one, and moved into a method where values have other names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count, groupby
from typing import NamedTuple

import torch

from .source_text import attribute

__all__ = ["INDENT", "LAYER", "Line", "names_in", "path_mark", "paths_in", "replaced", "value_mark", "written"]

INDENT = "    "
LAYER = "layer"  # the argument of a method that runs one of several equal layers
_WIDTH = 120
_Context = tuple[bool, tuple[str, torch.dtype, bool] | None]  # gradients are on, autocast
_PLAIN: _Context = (True, None)

_MARKED = re.compile("\0([^\0]*)\0|\1([^\1]*)\1")  # a name, or a path


def value_mark(name: str) -> str:
    """Returns the name of a value as marked text."""
    return f"\0{name}\0"


def path_mark(path: str) -> str:
    """Returns the path of a stored tensor or of a container as marked text."""
    return f"\1{path}\1"


@lru_cache(maxsize=1 << 14)
def names_in(text: str) -> tuple[str, ...]:
    """Returns the names of values in marked text, in order."""
    return tuple(name for name, _ in _MARKED.findall(text) if name)


def paths_in(text: str) -> list[str]:
    """Returns the paths in marked text, in order."""
    return [path for _, path in _MARKED.findall(text) if path]


def replaced(text: str, name: Callable[[str], str], path: Callable[[str], str] = path_mark) -> str:
    """Returns marked text with other texts in the place of names and paths."""
    return _MARKED.sub(lambda match: name(match[1]) if match[1] else path(match[2]), text)


def plain(text: str, root: str = "") -> str:
    """Returns marked text as source, in which the container of path `root` is called `layer`; "": it has no name."""
    return replaced(text, str, lambda path: _read(path, root))


def _read(path: str, root: str) -> str:
    if root and f"{path}.".startswith(f"{root}."):
        return attribute(path[len(root) + 1 :], LAYER) if path != root else LAYER
    return attribute(path) if path else "self"


class Line(NamedTuple):
    """A statement of a method.

    Attributes:
        value: the expression, as marked text.
        targets: the assigned names, as marked text; "": nothing is assigned.
        comment: shapes and types of the results.
        module, where: the module whose forward makes the call, and the author's line.
        spans: numbers of the recomputed spans that it is in, the outermost first.
        converts: it converts the types of values, for this call and all later ones.
        loop: the head of the loop that repeats it.
        inner: the lines of the function that it calls, as source.
    """

    value: str
    targets: str = ""
    comment: str = ""
    module: str = ""
    where: str = ""
    context: _Context = _PLAIN
    spans: tuple[int, ...] = ()
    converts: bool = False
    loop: str = ""
    inner: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The statement as marked text."""
        return f"{self.targets} = {self.value}" if self.targets else self.value

    @property
    def defines(self) -> tuple[str, ...]:
        return names_in(self.targets)

    @property
    def uses(self) -> frozenset[str]:
        return frozenset(names_in(self.value))


def written(lines: Sequence[Line], returned: str, arguments: Iterable[str], root: str = "") -> list[str]:
    """Returns the source of a method's lines, and of its `return`.

    Args:
        returned: the returned expression, as marked text.
        arguments: names that are defined before all lines.
        root: the path of the method's argument `layer`; "": it has none.
    """
    read_after = names_in(returned)
    lines = _with_functions(lines, read_after, arguments, root)
    return [*_written(_with_deletions(lines, read_after), root), f"{INDENT * 2}return {plain(returned, root)}"]


def _with_functions(
    lines: Sequence[Line],
    read_after: Iterable[str],
    local: Iterable[str],
    root: str,
    depth: int = 0,
    numbers: Iterator[int] | None = None,
) -> list[Line]:
    """Returns the lines, those of each recomputed span as one: a function, and its call under `checkpoint`.

    Args:
        read_after: names that are read after all lines.
        local: names that are defined before all lines.
        depth: the number of spans that all lines are in; `numbers`: for names of functions.
    """
    numbers = numbers or count()
    known = {*local, *(name for line in lines for name in line.defines)}
    together = [list(group) for _, group in groupby(lines, lambda line: line.spans[depth : depth + 1])]
    later = [set(read_after)]  # names that are read after each group, from the last one back
    for group in reversed(together):
        later.append(later[-1].union(*(line.uses for line in group)))
    result: list[Line] = []
    for group, after in zip(together, [*reversed(later)][1:], strict=True):
        defined = dict.fromkeys(name for line in group for name in line.defines)
        results = [name for name in defined if name in after]
        if len(group[0].spans) <= depth or not results:
            result += group
            continue
        read = sorted({name for line in group for name in line.uses if name in known and name not in defined})
        name = f"recomputed_{next(numbers)}"
        inner = [f"{INDENT * 2}def {name}({', '.join(read)}):"]
        within = _with_functions(group, results, read, root, depth + 1, numbers)
        inner += [INDENT + text for text in _written(_with_deletions(within, results), root)]
        inner += [f"{INDENT * 3}return {', '.join(results)}", ""]
        call = f"checkpoint({', '.join([name, *map(value_mark, read)])})"
        result.append(Line(call, ", ".join(map(value_mark, results)), inner=("", *inner)))
    return result


def _with_deletions(lines: Sequence[Line], read_after: Iterable[str]) -> Iterator[Line]:
    """Yields the lines, and behind those of each source line one that deletes values after their last use."""
    last: dict[str, int] = {}
    for number, line in enumerate(lines):
        for name in (*line.defines, *line.uses):
            last[name] = number
    temporary = {name for line in lines for name in line.defines} - set(read_after)
    for _, group in groupby(enumerate(lines), lambda pair: (pair[1].module, pair[1].where, pair[1].context)):
        ended: list[str] = []
        for number, line in group:
            yield line
            names = (*line.defines, *sorted(line.uses))
            ended += [name for name in names if name in temporary and last[name] == number]
        if ended and number + 1 < len(lines):
            yield Line(f"del {', '.join(dict.fromkeys(ended))}", where=line.where, context=line.context)


def _written(lines: Iterable[Line], root: str) -> Iterator[str]:
    context, where, indent = _PLAIN, "", INDENT * 2
    shown: set[str] = set()
    for line in lines:
        if line.context != context:
            context, indent = line.context, INDENT * 2
            for text in _contexts(context):
                yield indent + text
                indent += INDENT
        yield from line.inner
        if line.where and line.where != where:
            where = line.where
            module = line.module.removeprefix(root).lstrip(".") if root else line.module
            source = where.partition(": ")[0] if where in shown else where
            shown.add(where)
            comment = f"{indent}# {'  '.join(filter(None, [module, source]))}"
            yield comment if len(comment) <= _WIDTH else comment[: _WIDTH - 4].rstrip() + " ..."
        text = plain(line.text, root) + (f"  # {line.comment}" if line.comment else "")
        if line.loop:
            yield indent + line.loop
            text = INDENT + text
        yield indent + text


def _contexts(context: _Context) -> Iterator[str]:
    grad, autocast = context
    if not grad:
        yield "with torch.no_grad():"
    if autocast is not None:
        _, dtype, enabled = autocast  # the device of the recording is replaced by the device that it runs on
        yield f"with torch.autocast(self.device.type, {dtype}, enabled={enabled}):"
