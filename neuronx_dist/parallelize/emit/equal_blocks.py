"""Equal layers as one method: `x = self._layers(self.model.layers[0], x, cos, sin)`, in a loop where that is possible.

A block is the lines of one numbered module (`model.layers.3`), with those of other modules between its lines, and if
all layers have some, with those before the next layer (`x = x + layer(x)`). Two blocks are equal if they differ in the
names of values and in the number of the module alone: constants, shapes, types, authors' lines, modes and the positions
of what they read and return are the same. A weight of another module is an argument, as a value is. Blocks are compared
within all methods of a file, so that pipeline stages share a method.

A conversion of a value from outside that the first of several layers needs, and no later one, since these read the
converted value too or receive another type, moves in front of the block.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from ...program.builder import Builder
from ...program.program import fresh
from ..train.parallel_module import ParallelModule
from .lines import INDENT, LAYER, Line, names_in, path_mark, paths_in, plain, replaced, value_mark, written
from .source_text import Imports

__all__ = ["Statements", "folded"]

SAVED = 8  # lines that a method must save
_NUMBER = re.compile(r"_?(\d+)$")


class Statements(NamedTuple):
    """The lines of a method, and the expression that it returns, as marked text."""

    lines: list[Line]
    returned: str


class _Block(NamedTuple):
    """Adjacent lines of a numbered module.

    Attributes:
        before: conversions that move in front of it; `after`: lines behind it that are not in it.
        lines: the others, in the recomputed spans that are inside of the block; `spans`: those around it.
        inputs: values and weights of other modules that it reads, as marked text, in order.
        results: names of its values that are read afterwards.
        key: equal for equal blocks.
    """

    prefix: str
    before: list[Line]
    lines: list[Line]
    after: list[Line]
    spans: tuple[int, ...]
    inputs: list[str]
    results: list[str]
    key: tuple[Any, ...]


class _Method(NamedTuple):
    """A method that runs equal blocks; `prefix`: the module that its lines are those of.

    Attributes:
        described: lines with the shapes and types of arguments.
    """

    name: str
    prefix: str
    modules: list[str]
    arguments: list[str]
    described: list[str]
    reads_layer: bool


class _Part(NamedTuple):
    """Adjacent lines of a method; if a block is among them, its forms."""

    lines: list[Line]
    forms: list[_Block]


class _Call(NamedTuple):
    """A block, and the method that runs it."""

    block: _Block
    method: _Method


def folded(
    bodies: Sequence[Statements], imports: Imports, attributes: Iterable[str] = ()
) -> tuple[list[list[Line]], list[str]]:
    """Returns the lines of each method with calls in the place of equal blocks, and the source of the called methods.

    Args:
        bodies: the methods of a file.
        imports: names that no value of a new method may have.
        attributes: names that no new method may have.
    """
    folder = _Folder(imports, attributes)
    lines = folder.fold(list(bodies), 0)
    return lines, [text for method, body in folder.methods for text in _source(method, body)]


class _Folder:
    def __init__(self, imports: Imports, attributes: Iterable[str]) -> None:
        self.imports = imports
        self.method_names = {*dir(ParallelModule), *(name for name in attributes if name[0] == "_")}
        self.methods: list[tuple[_Method, Statements]] = []
        self.described: dict[str, str] = {}  # value -> its shape and type

    def fold(self, bodies: Sequence[Statements], depth: int) -> list[list[Line]]:
        """Folds the blocks of modules at the `depth`-th number of a path, then those of modules inside of these."""
        self.described.clear()
        for line in (line for body in bodies for line in body.lines if line.comment):
            if self.described.setdefault(line.targets, line.comment) != line.comment:
                self.described[line.targets] = ""  # another value of this name in another method
        parts = [_parts(body, depth) for body in bodies]
        if not any(part.forms for of_body in parts for part in of_body):
            return [body.lines for body in bodies]
        chosen = _chosen([part for of_body in parts for part in of_body if part.forms])
        classes: dict[tuple[Any, ...], list[_Block]] = {}
        for block in chosen.values():
            classes.setdefault(block.key, []).append(block)
        new = {key: self._method(blocks) for key, blocks in classes.items()}
        rest = []
        for of_body, body in zip(parts, bodies, strict=True):
            entries: list[Line | _Call] = []
            for part in of_body:
                equal = chosen.get(id(part))
                if equal is None:
                    entries += part.lines
                else:
                    entries += [*equal.before, _Call(equal, new[equal.key][0]), *equal.after]
            rest.append(Statements(list(_with_loops(entries, body.returned)), body.returned))
        inside = [statements for _, statements in new.values()]
        lines = self.fold([*rest, *inside], depth + 1)
        for (method, statements), folded_lines in zip(new.values(), lines[len(rest) :], strict=True):
            self.methods.append((method, Statements(folded_lines, statements.returned)))
        return lines[: len(rest)]

    def _method(self, blocks: Sequence[_Block]) -> tuple[_Method, Statements]:
        """Returns a method that runs equal blocks, with the names of values of the last one, without their numbers."""
        block = blocks[-1]
        names = Builder(reserved=[*self.imports.lines, LAYER])
        new: dict[str, str] = {}
        for versions in zip(*(block.inputs for block in blocks), strict=True):
            same = len({*versions}) == 1
            wish = versions[-1].strip("\0\1")
            new[versions[-1]] = value_mark(names.name(wish if same else _without_numbers(wish, block.prefix)))
        for line in block.lines:
            for name in line.defines:
                if value_mark(name) not in new:
                    new[value_mark(name)] = value_mark(names.name(_without_numbers(name, block.prefix)))

        def renamed(text: str) -> str:
            return replaced(
                text, lambda name: new[value_mark(name)], lambda path: new.get(path_mark(path), path_mark(path))
            )

        lines = [line._replace(value=renamed(line.value), targets=renamed(line.targets)) for line in block.lines]
        arguments = [name for text in block.inputs for name in names_in(new[text])]
        modules = list(dict.fromkeys(block.prefix for block in blocks))
        parts = [_NUMBER.sub("", part) for part in block.prefix.split(".")]
        wish = re.sub(r"\W", "_", next((part for part in reversed(parts) if part), LAYER))
        name = Builder(reserved=self.method_names).name(wish)
        while f"_{name}" in self.method_names:
            name += "_"
        self.method_names |= {name, f"_{name}"}
        described = [f"{new[text]}: {self.described[text]}" for text in block.inputs if self.described.get(text)]
        method = _Method(f"_{name}", block.prefix, modules, arguments, list(map(plain, described)), _reads(block))
        return method, Statements(lines, ", ".join(renamed(value_mark(name)) for name in block.results))


def _parts(body: Statements, depth: int) -> list[_Part]:
    """Returns the lines of a method in parts: those of each module at a number, and those between."""
    runs = _runs(body.lines, depth)
    after = [set(names_in(body.returned))]  # names that are read after each run, from the last one back
    for _, lines, gap in reversed(runs):
        after.append(after[-1].union(*(line.uses for line in (*lines, *gap))))
    size = Counter(number for line in body.lines for number in line.spans)
    parts = []
    for (prefix, lines, gap), read_after in zip(runs, [*reversed(after)][1:], strict=True):
        forms: list[_Block] = []
        for inside in (len(gap), 0)[: 1 + bool(gap)] if prefix else ():
            block_lines, rest = [*lines, *gap[:inside]], gap[inside:]
            here = Counter(number for line in block_lines for number in line.spans)
            spans = {tuple(number for number in line.spans if here[number] < size[number]) for line in block_lines}
            if len(spans) == 1:  # no recomputed span begins or ends inside
                read = read_after.union(*(line.uses for line in rest))
                forms += _forms(prefix, block_lines, rest, spans.pop(), read)
        parts.append(_Part([*lines, *gap], forms))
    return parts


def _runs(lines: Sequence[Line], depth: int) -> list[tuple[str, list[Line], list[Line]]]:
    """Returns the adjacent lines of each numbered module, with its path and the lines before the next such module.

    The lines behind the last one of several layers are as many as those behind the layer before. Other lines have the
    path "".
    """
    runs: list[tuple[str, list[Line], list[Line]]] = []
    for prefix, group in groupby(lines, lambda line: _prefix(line.module, depth)):
        if prefix and runs and runs[-1][0] == prefix:  # lines of other modules stand between its lines
            runs[-1] = (prefix, [*runs[-1][1], *runs[-1][2], *group], [])
        elif not prefix and runs:
            runs[-1] = (*runs[-1][:2], list(group))
        else:
            runs.append((prefix, list(group), []))
    result: list[tuple[str, list[Line], list[Line]]] = []
    for (prefix, own, gap), following in zip(runs, [*(run[0] for run in runs[1:]), ""]):
        count = len(gap)
        if not _follows(prefix, following):
            before, _, gap_before = result[-1] if result else ("", [], [])
            count = len(gap_before) if _follows(before, prefix) and len(gap_before) <= len(gap) else 0
        result.append((prefix, own, gap[:count]))
        if gap[count:]:
            result.append(("", gap[count:], []))
    return result


def _follows(prefix: str, following: str) -> bool:
    """Returns whether two paths differ in their last number, by one."""
    numbers = [_NUMBER.search(path) for path in (prefix, following)]
    if numbers[0] is None or numbers[1] is None or prefix[: numbers[0].start()] != following[: numbers[1].start()]:
        return False
    return int(numbers[1][1]) == int(numbers[0][1]) + 1


def _prefix(module: str, depth: int) -> str:
    """Returns a module's path up to its number `depth`; "": it has less of them."""
    names = module.split(".")
    numbered = [position for position, name in enumerate(names) if _NUMBER.search(name)]
    return ".".join(names[: numbered[depth] + 1]) if depth < len(numbered) else ""


def _forms(
    prefix: str, lines: Sequence[Line], after: list[Line], spans: tuple[int, ...], read_after: set[str]
) -> Iterator[_Block]:
    """Yields the block of these lines, and the block without the conversions that may move in front of it."""
    inner = [line._replace(spans=line.spans[len(spans) :]) for line in lines]
    yield _block(prefix, [], inner, after, spans, read_after)
    defined = {name for line in lines for name in line.defines}
    before: list[Line] = []
    others: list[Line] = []
    for line in inner:
        reads_inside = not defined.isdisjoint(line.uses) or any(_inside(path, prefix) for path in paths_in(line.value))
        (before if line.converts and not reads_inside else others).append(line)
    if before and others:
        before = [line._replace(module="", where="", spans=spans) for line in before]
        yield _block(prefix, before, others, after, spans, read_after)


def _block(
    prefix: str,
    before: list[Line],
    lines: list[Line],
    after: list[Line],
    spans: tuple[int, ...],
    read_after: set[str],
) -> _Block:
    numbers: dict[str, int] = {}
    span_numbers: dict[int, int] = {}

    def number(text: str) -> str:
        return value_mark(str(numbers.setdefault(text, len(numbers))))

    def name(name: str) -> str:
        return number(value_mark(name))

    def path(path: str) -> str:
        return path_mark(path[len(prefix) :]) if _inside(path, prefix) else number(path_mark(path))

    forms = [
        line._replace(
            value=replaced(line.value, name, path),
            targets=replaced(line.targets, name, path),
            module=line.module.removeprefix(prefix),
            spans=tuple(span_numbers.setdefault(span, len(span_numbers)) for span in line.spans),
        )
        for line in lines
    ]
    defined = dict.fromkeys(name for line in lines for name in line.defines)
    results = [name for name in defined if name in read_after]
    inputs = [text for text in numbers if text[1:-1] not in defined or text[0] == "\1"]
    return _Block(
        prefix, before, lines, after, spans, inputs, results, (*forms, *(numbers[value_mark(r)] for r in results))
    )


def _chosen(parts: Sequence[_Part]) -> dict[int, _Block]:
    """Returns the form of each part, by its id, that saves most lines; parts without equals are left out."""
    count = Counter(key for part in parts for key in {form.key for form in part.forms})

    def saved(form: _Block) -> int:
        return (count[form.key] - 1) * len(form.lines) - count[form.key] * len(form.before)

    best = {id(part): max(part.forms, key=saved) for part in parts}
    count = Counter(form.key for form in best.values())
    return {part: form for part, form in best.items() if saved(form) >= SAVED}


def _with_loops(entries: Sequence[Line | _Call], returned: str) -> Iterator[Line]:
    """Yields lines, and calls as lines: a loop in the place of calls of which each takes the results of the last."""
    readers = Counter(names_in(returned))
    for entry in entries:
        readers.update(entry.uses if isinstance(entry, Line) else names_in("".join(entry.block.inputs)))
    position = 0
    while position < len(entries):
        entry = entries[position]
        if isinstance(entry, Line):
            yield entry
            position += 1
            continue
        run, carried = [entry], None
        for following in entries[position + 1 :]:
            pattern = _carried(run[-1], following, readers) if isinstance(following, _Call) else None
            if pattern is None or carried not in (None, pattern):
                break
            carried = pattern
            run.append(following)  # type: ignore[arg-type]
        position += len(run)
        if carried is None:
            yield _line(entry.method, entry.block, path_mark(entry.block.prefix), entry.block.inputs)
        else:
            yield from _loop(run, carried, readers)


def _carried(call: _Call, following: _Call, readers: Mapping[str, int]) -> dict[int, int] | None:
    """Returns the arguments that are results of the call before, by position; None: the two are not steps of a loop."""
    a, b = call.block, following.block
    if call.method is not following.method or a.spans != b.spans:
        return None
    if not _follows(a.prefix, b.prefix) or not a.prefix.rpartition(".")[2].isdigit():
        return None
    results = [value_mark(name) for name in a.results]
    carried = {}
    for position, (before, text) in enumerate(zip(a.inputs, b.inputs, strict=True)):
        if text in results:
            carried[position] = results.index(text)
        elif text != before:
            return None
    counts = Counter(carried.values())  # each result is read by the next call, once, and by nothing else
    if any(counts[number] != 1 or readers[name] != 1 for number, name in enumerate(a.results)):
        return None
    return carried


def _loop(run: Sequence[_Call], carried: Mapping[int, int], read: Iterable[str]) -> Iterator[Line]:
    """Yields the lines of a loop: the carried values have the names of the last results.

    Args:
        read: names that the method reads, none of which the loop's index may have.
    """
    first, last = run[0].block, run[-1].block
    stem, _, number = first.prefix.rpartition(".")
    inputs = list(first.inputs)
    for position, result in carried.items():
        name = value_mark(last.results[result])
        yield Line(inputs[position], name, module=first.prefix, spans=first.spans)
        inputs[position] = name
    index = fresh("i", {*read, *last.results})
    bounds = f"{number}, " if int(number) else ""
    head = f"for {index} in range({bounds}{int(number) + len(run)}):"
    yield _line(run[0].method, last, f"{path_mark(stem)}[{index}]", inputs)._replace(loop=head)


def _line(method: _Method, block: _Block, layer: str, inputs: Sequence[str]) -> Line:
    arguments = [layer] * method.reads_layer + list(inputs)
    described = {name: line.comment for line in block.lines for name in line.defines}
    comment = "; ".join(dict.fromkeys(described[name] for name in block.results))
    targets = ", ".join(map(value_mark, block.results))
    call = f"self.{method.name}({', '.join(arguments)})"
    return Line(call, targets, comment, module=block.prefix, spans=block.spans)


def _source(method: _Method, body: Statements) -> Iterator[str]:
    layer = [LAYER] if method.reads_layer else []
    yield ""
    yield f"{INDENT}def {method.name}({', '.join(['self', *layer, *method.arguments])}):"
    first, last = method.modules[0], method.modules[-1].rpartition(".")[2]
    summary = f'{INDENT * 2}"""{first} to {last}, {len(method.modules)} equal modules.'
    described = [f"{INDENT * 2}{text}" for text in method.described]
    yield from [summary, "", *described, f'{INDENT * 2}"""'] if described else [f'{summary}"""']
    yield from written(body.lines, body.returned, method.arguments, method.prefix)


def _reads(block: _Block) -> bool:
    return any(_inside(path, block.prefix) for line in block.lines for path in paths_in(line.value))


def _inside(path: str, prefix: str) -> bool:
    return path.startswith(f"{prefix}.")


def _without_numbers(name: str, prefix: str) -> str:
    """Returns the name of a value without its number, and without the path of its module."""
    name = name.removeprefix(re.sub(r"\W", "_", prefix) + "_")
    return re.sub(r"_\d+(?=$|_[RIPS]\d*$)", "", name)
