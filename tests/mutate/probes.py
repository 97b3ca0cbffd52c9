"""Parts of the package that a test executes: a probe at the start of every block, which an import hook adds.

A block is the statements between two branches: the body of a function, of an `if`, of a loop, and what follows one. The
probe is `_mutate_hits[number] = 1`, on a map of memory that all processes of a test share. It costs 0.05 µs, where a
trace function would double the time of the tests. Lines keep their numbers, since only the syntax tree is changed.

This file imports nothing of the package: it runs before it.
"""

from __future__ import annotations

import ast
import builtins
import json
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

__all__ = ["Block", "blocks", "hits", "install", "numbering", "share"]

PACKAGE = "neuronx_dist"
HITS = "_mutate_hits"
_FOLDER = "MUTATE_PROBES"  # the folder with numbering.json; in the environment, so that every process of a test has it
_FILE = "MUTATE_HITS"  # the file whose memory they share


class Block(NamedTuple):
    """Statements that are executed together, from (line, column) to (line, column)."""

    start: tuple[int, int]
    end: tuple[int, int]


def _statement_lists(tree: ast.Module) -> Iterator[tuple[list[ast.stmt], bool]]:
    """Every list of statements inside of a function, and whether it is a function's body."""

    def below(node: ast.AST, inside: bool) -> Iterator[tuple[list[ast.stmt], bool]]:
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for name, value in ast.iter_fields(node):
            statements = isinstance(value, list) and value and isinstance(value[0], ast.stmt)
            is_body = function and name == "body"
            if statements and (is_body or (inside and not isinstance(node, ast.ClassDef))):
                yield value, function
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from below(child, inside or function)

    yield from below(tree, False)


_COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)


def _starts(tree: ast.Module) -> list[tuple[list[ast.stmt], int]]:
    """Yields the places of probes: (list of statements, index), in the order of the file."""
    places = []
    for body, of_function in _statement_lists(tree):
        first = body[0]
        docstring = of_function and isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        if docstring and len(body) == 1:
            continue
        begin = 1 if docstring else 0
        places.append((body, begin))
        places += [(body, i + 1) for i in range(begin, len(body) - 1) if isinstance(body[i], _COMPOUND)]
    return sorted(places, key=lambda place: (place[0][place[1]].lineno, place[0][place[1]].col_offset))


def blocks(source: str) -> list[Block]:
    """The blocks of a file, by number. One that begins later lies inside of, or after, one that begins before."""
    found = []
    for body, index in _starts(ast.parse(source)):
        first, last = body[index], body[-1]
        found.append(Block((first.lineno, first.col_offset), (last.end_lineno or 0, last.end_col_offset or 0)))
    return found


def instrument(source: str, base: int) -> ast.Module:
    tree = ast.parse(source)
    places = list(enumerate(_starts(tree), base))
    for number, (body, index) in sorted(places, key=lambda place: -place[1][1]):  # from the end: indices stay right
        probe = ast.parse(f"{HITS}[{number}] = 1").body[0]
        for node in ast.walk(probe):
            ast.copy_location(node, body[index])
        body.insert(index, probe)
    return tree


def numbering(root: Path) -> dict[str, int]:
    """File, relative to `root` -> number of its first block; `""` -> number of blocks."""
    bases, count = {}, 0
    for path in sorted((root / PACKAGE).rglob("*.py")):
        bases[path.relative_to(root).as_posix()] = count
        count += len(_starts(ast.parse(path.read_text())))
    return {**bases, "": count}


class _Loader(SourceFileLoader):
    bases: dict[str, int]
    root: Path

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.path)
        base = self.bases[path.relative_to(self.root).as_posix()]
        return compile(instrument(path.read_text(), base), self.path, "exec", dont_inherit=True)  # type: ignore[no-any-return,call-overload]


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """In every Python process of a recording (`site/sitecustomize.py`): the package is imported with probes."""
    folder = os.environ.get(_FOLDER)
    if not folder:
        return
    _Loader.bases = json.loads((Path(folder) / "numbering.json").read_text())
    _Loader.root = Path(folder).parent
    sys.meta_path.insert(0, _Finder())
    file = os.environ.get(_FILE)
    setattr(builtins, HITS, _mapped(Path(file)) if file else bytearray(_Loader.bases[""]))


def _mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def share(name: str) -> None:
    """This process and those that it starts write into one map from now on."""
    path = Path(os.environ[_FOLDER]) / f"hits-{name}"
    path.write_bytes(bytes(_Loader.bases[""]))
    os.environ[_FILE] = str(path)
    setattr(builtins, HITS, _mapped(path))


def hits() -> Any:
    """The map: one byte for each block."""
    return getattr(builtins, HITS)
