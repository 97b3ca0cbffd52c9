"""Every place in the package that communicates, found in its source; and mutants of what happens there.

A call site is `function:verb#k`, the k-th call of that verb in that function, named with its class. A name does not say
the file, so that it stays when the file moves. Two functions of one name that both communicate are an error that says
where they are. `mutate(site, mutation)` makes that one call wrong while the program runs, and leaves all others alone:

    drop     it does not happen: a rank keeps what it has
    double   a sum is counted twice; the last rank's piece of a gather is there twice, in place of the first's
    scale    the result is multiplied by 1.5

The call gets a communicator that does the wrong thing. Autograd functions keep it: their backwards are wrong too.
A mutation may also be a function: it is called in the place of the call, with what was to be called and its arguments.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import neuronx_dist
import neuronx_dist.checking.api  # it looks verbs up by what they are: before any of them is another function
from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends.c10d import C10dCommunicator
from neuronx_dist.comm.backends.threads import ThreadsCommunicator
from neuronx_dist.comm.base import DONE, Communicator, Works
from neuronx_dist.spmd import collectives
from tests.support.sources import nodes_of, tree_of

__all__ = ["MUTATIONS", "Mutant", "Site", "find_sites", "hidden_imports", "mutate", "sites_of"]

MUTATIONS = ("drop", "double", "scale")
PACKAGE = Path(neuronx_dist.__file__).parent
_OPERATORS_OF_TYPES = Path(str(collectives.__file__))  # here the operators are called by their bare names
_DOORS = (Path(str(comm.__file__)), Path(str(spmd.__file__)))  # these import the verbs, for others to call

_VERBS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "permute",
    "broadcast",
    "send",
    "recv",
    "exchange",
)
_OBJECT_VERBS = ("gather_objects", "broadcast_object", "barrier")
_OPERATORS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "convert", "reinterpret", "redistribute")
_STARTS = tuple(f"start_{verb}" for verb in _VERBS)
_TORCH = ("all_reduce", "all_to_all_single", "broadcast", "batch_isend_irecv", "all_gather_object")
_GROUP = ("send", "recv", "allreduce", "alltoall_base")  # of a torch ProcessGroup
_NCCL = ("_all_gather_single", "_reduce_scatter_single")


class Site(NamedTuple):
    """A call: its name, and where it stands."""

    name: str
    verb: str
    file: str
    first_line: int
    last_line: int

    def is_in(self, *places: ModuleType) -> bool:
        """Returns whether a site stands in one of these modules; a package has all the files in its folder."""
        files = [str(place.__file__) for place in places]
        return any(self.file.startswith(file.removesuffix("__init__.py")) for file in files)


def find_sites(also: Sequence[str] = ()) -> dict[str, Site]:
    """All call sites of the package, by name; those of the functions `also`, called by their bare names, too."""
    return sites_of(sorted(PACKAGE.rglob("*.py")), also)


def sites_of(paths: Sequence[Path], also: Sequence[str] = ()) -> dict[str, Site]:
    """The call sites of these files.

    Raises:
        ValueError: functions of one name in two files communicate; a call site's name must mean one place.
    """
    sites: dict[str, Site] = {}
    owned = rf"\b(comm|spmd|dist|group)\.({'|'.join(sorted({*_VERBS, *_OBJECT_VERBS, *_OPERATORS, *_TORCH, *_GROUP}))})"
    called = re.compile(rf"({owned}|\b({'|'.join(sorted({*_STARTS, *_NCCL, *also}))}))\(")
    for path in paths:
        if path != _OPERATORS_OF_TYPES and not called.search(path.read_text()):  # parsing takes most of the time
            continue
        seen: Counter[str] = Counter()
        for function, call in _calls_of(path):
            verb = _verb(call.func, path)
            if isinstance(call.func, ast.Name) and call.func.id in also:
                verb = call.func.id
            if verb is not None:
                seen[f"{function}:{verb}"] += 1
                name = f"{function}:{verb}#{seen[f'{function}:{verb}']}"
                site = Site(name, verb, str(path), call.lineno, call.end_lineno or call.lineno)
                if name in sites:
                    places = " and ".join(f"{one.file}:{one.first_line}" for one in (sites[name], site))
                    raise ValueError(f"two call sites are {name!r}: {places}. Give one of the functions another name")
                sites[name] = site
    return sites


@cache
def _calls_of(path: Path) -> list[tuple[str, ast.Call]]:
    return list(_calls(tree_of(path)))


def _calls(tree: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield ".".join(inside), node
        named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        yield from _calls(node, (*inside, node.name) if named else inside)  # type: ignore[attr-defined]


def _verb(function: ast.expr, path: Path) -> str | None:
    if isinstance(function, ast.Name):
        is_operator = path == _OPERATORS_OF_TYPES and function.id in _OPERATORS
        return function.id if is_operator or function.id in _NCCL else None
    if not isinstance(function, ast.Attribute):
        return None
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    if function.attr in _STARTS or (owner == "comm" and function.attr in (*_VERBS, *_OBJECT_VERBS)):
        return f"{owner or '?'}.{function.attr}"
    if (owner == "spmd" and function.attr in _OPERATORS) or (owner == "dist" and function.attr in _TORCH):
        return f"{owner}.{function.attr}"
    of_group = isinstance(function.value, ast.Attribute) and function.value.attr == "group"
    return f"group.{function.attr}" if of_group and function.attr in _GROUP else None


def hidden_imports() -> list[str]:
    """Imports of a verb by its bare name, whose calls `find_sites` would not see."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] in (
                "comm",
                "verbs",
                "spmd",
                "collectives",
            ):
                names = {alias.name for alias in node.names} & {*_VERBS, *_OBJECT_VERBS, *_OPERATORS, "*"}
                if names and path not in _DOORS:
                    found.append(f"{path} imports {', '.join(sorted(names))}")
    return found


# --- mutants ----------------------------------------------------------------------------------------------------------


def _wrong(mutation: str, tensor: torch.Tensor, factor: int = 2, pieces: bool = False) -> None:
    """Changes a result in place. `pieces`: it is made of ranks' pieces along dim 0."""
    with torch.no_grad():
        if mutation == "double" and pieces:
            tensor[0].copy_(tensor[-1])
        elif mutation == "double":
            tensor.copy_(tensor * factor)
        elif tensor.is_floating_point():
            tensor.mul_(1.5)
        else:
            tensor.copy_(tensor * 3 // 2)


class Mutant(Communicator):
    """Communicates as `real` does, but for the mutation. The other ranks are served, so that nobody waits."""

    def __init__(self, real: Communicator, mutation: str, verb: str) -> None:
        super().__init__(real.axis, real.ranks, real.global_rank)
        self.real, self.mutation = real, mutation
        if mutation == "drop" and verb == "convert":
            self.rank = (
                0  # what it does without communication is to go wrong as well: everybody takes itself for the first
            )

    def _after(self, work: Any, result: torch.Tensor, factor: int = 2, pieces: bool = False) -> Any:
        return Works([work], lambda: _wrong(self.mutation, result, factor, pieces))

    def start_all_reduce(self, buffer: torch.Tensor, op: str) -> Any:
        if self.mutation == "drop":
            return DONE
        return self._after(self.real.start_all_reduce(buffer, op), buffer, self.size if op == "sum" else 2)

    def start_all_gather(self, gathered: torch.Tensor, x: torch.Tensor) -> Any:
        if self.mutation == "drop":
            gathered.copy_(x.unsqueeze(0).expand_as(gathered))
            return DONE
        return self._after(self.real.start_all_gather(gathered, x), gathered, pieces=True)

    def start_reduce_scatter(self, out: torch.Tensor, scattered: torch.Tensor, op: str) -> Any:
        if self.mutation == "drop":
            out.copy_(scattered[self.real.rank])
            return DONE
        return self._after(self.real.start_reduce_scatter(out, scattered, op), out)

    def start_all_to_all(self, gathered: torch.Tensor, scattered: torch.Tensor) -> Any:
        if self.mutation == "drop":
            gathered.copy_(scattered)
            return DONE
        return self._after(self.real.start_all_to_all(gathered, scattered), gathered, pieces=True)

    def start_permute(self, out: torch.Tensor, x: torch.Tensor, pairs: Any) -> Any:
        if self.mutation == "drop":
            out.copy_(x)
            return DONE
        return self._after(self.real.start_permute(out, x, pairs), out)

    def start_exchange(self, received: Any, sent: Any) -> Any:
        wrong = torch.Tensor.zero_ if self.mutation == "drop" else lambda x: _wrong(self.mutation, x)
        return Works([self.real.start_exchange(received, sent)], lambda: [wrong(x) for x in received])  # type: ignore

    def start_broadcast(self, buffer: torch.Tensor, src: int) -> Any:
        return DONE if self.mutation == "drop" else self._after(self.real.start_broadcast(buffer, src), buffer)

    def start_send(self, x: torch.Tensor, dst: int, tag: int) -> Any:
        x = x.clone()
        x.zero_() if self.mutation == "drop" else _wrong(self.mutation, x)
        return self.real.start_send(x, dst, tag)

    def start_recv(self, out: torch.Tensor, src: int, tag: int) -> Any:
        work = self.real.start_recv(out, src, tag)
        return Works([work], out.zero_) if self.mutation == "drop" else self._after(work, out)

    def gather_objects(self, obj: Any) -> list[Any]:
        found = self.real.gather_objects(obj)
        return [obj] * self.size if self.mutation == "drop" else found[::-1]


def _torch_mutant(name: str, original: Callable[..., Any], mutation: str, args: Any, options: Any) -> Any:
    """The same for a function of torch.distributed, as `C10dCommunicator` calls it."""
    drop = mutation == "drop"
    if name == "all_gather_object":
        found, obj = args
        original(*args, **options)
        found[:] = [obj] * len(found) if drop else found[::-1]
        return None
    if name == "batch_isend_irecv":
        received = [op.tensor for op in args[0] if op.op is dist.irecv]
        return [] if drop else [Works(original(*args), lambda: [_wrong(mutation, x) for x in received])]  # type: ignore[func-returns-value]
    out = args[0]
    if drop:
        return DONE
    return Works([original(*args, **options)], lambda: _wrong(mutation, out, dist.get_world_size(options["group"])))


def _group_mutant(name: str, original: Callable[..., Any], mutation: str, args: Any) -> Any:
    """The same for `send([x], dst, tag)`, `recv([x], src, tag)`, `allreduce([x], _)`, `alltoall_base(out, x, ..)`."""
    group, first, *rest = args
    drop = mutation == "drop"
    if name == "alltoall_base":
        if drop:
            first.copy_(rest[0])
            return DONE
        pieces = first.view(group.size(), -1)  # may be bytes
        return Works([original(*args)], lambda: _wrong("double", pieces, pieces=True))
    (x,) = first
    if name == "allreduce":
        return DONE if drop else Works([original(*args)], lambda: _wrong(mutation, x, group.size()))
    if name == "send":
        x = x.clone()
        x.zero_() if drop else _wrong(mutation, x)
        return original(group, [x], *rest)
    work = original(group, [x], *rest)
    return Works([work], x.zero_ if drop else lambda: _wrong(mutation, x))


def _at(site: Site) -> bool:
    """Whether the caller of the caller of this function is the site."""
    frame = sys._getframe(2)
    return frame.f_code.co_filename == site.file and site.first_line <= frame.f_lineno <= site.last_line


@contextmanager
def mutate(site: Site, mutation: str | Callable[..., Any]) -> Iterator[list[int]]:
    """Makes one call site wrong. Yields a list that grows each time the site is reached with more than one rank."""
    hits: list[int] = []
    owner, _, name = site.verb.rpartition(".")
    patched: list[tuple[Any, str, Any]] = []

    def patch(target: Any, attribute: str, make: Callable[[Any], Any]) -> None:
        original = getattr(target, attribute)
        patched.append((target, attribute, vars(target).get(attribute, original)))  # as it lies there, unbound
        setattr(target, attribute, make(original))

    def verb(original: Any) -> Any:
        def call(x: Any, axis: Any = "world", **options: Any) -> Any:
            if _at(site) and (real := comm.communicator(axis)).size > 1:
                hits.append(1)
                if not isinstance(mutation, str):
                    return mutation(original, x, axis, **options)
                result = original(x, Mutant(real, mutation, name), **options)
                letters = "".join(options[key].letter for key in ("src", "dst")) if name == "convert" else ""
                silent = letters in ("RP", "PR", "IP", "PI", "RI")
                return result * (2.0 if mutation == "double" else 1.5) if silent and mutation != "drop" else result
            return original(x, axis, **options)

        def exchange(sends: Any, recvs: Any, axis: Any, **options: Any) -> Any:
            if _at(site) and (real := comm.communicator(axis)).size > 1:
                hits.append(1)
                axis = Mutant(real, str(mutation), name)
            return original(sends, recvs, axis, **options)

        if name == "exchange":
            return exchange
        call.__name__ = name  # the operators look their rows up by it
        return call

    def start(original: Any) -> Any:
        def call(self: Communicator, *args: Any) -> Any:
            if _at(site):
                hits.append(1)
                return getattr(Mutant(self, mutation, name), name)(*args)
            return original(self, *args)

        return call

    def torch_function(original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if _at(site):
                hits.append(1)
                if owner == "group":
                    return _group_mutant(name, original, mutation, args)
                return _torch_mutant(name, original, mutation, args, options)
            return original(*args, **options)

        return call

    def function(original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if _at(site):
                hits.append(1)
                return mutation(original, *args, **options)  # type: ignore[operator]
            return original(*args, **options)

        return call

    in_comm = site.is_in(comm)
    if not owner and not in_comm and not site.is_in(collectives):
        place = ".".join(Path(site.file).relative_to(PACKAGE.parent).with_suffix("").parts)
        patch(sys.modules[place], name, function)
    elif owner == "group":
        patch(dist.ProcessGroup, name, torch_function)
    elif in_comm and owner != "dist":
        for kind in (ThreadsCommunicator, C10dCommunicator):
            patch(kind, name, start)
    elif owner == "dist":
        patch(dist, name, torch_function)
    elif owner == "comm":
        patch(comm, name, verb)
    else:
        patch(collectives if owner == "" else spmd, name, verb)
    try:
        yield hits
    finally:
        for target, attribute, original in reversed(patched):
            setattr(target, attribute, original)
