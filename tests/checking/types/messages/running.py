"""Runs the programs of `message_programs`: under the checker, with a repair applied, and on ranks against one rank."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import Shard, ShardSpec
from neuronx_dist.spmd.types import scaled

AXES = ("dp", "tp")
PROGRAMS: dict[str, Program] = {}  # their messages are in `expected/`
BUGGY: dict[str, Program] = {}  # more of them, for the repairs alone


class Input(NamedTuple):
    types: dict[str, Any]
    shape: tuple[int, ...]
    below: int = 0  # 0: float64 that gets a gradient; else ids below this
    is_parameter: bool = False


def t(kind: Any, *shape: int) -> Input:
    return Input(kind if isinstance(kind, dict) else {"tp": kind}, shape)


def p(kind: Any, *shape: int) -> Input:
    return t(kind, *shape)._replace(is_parameter=True)


def ids(kind: Any, below: int, *shape: int) -> Input:
    return t(kind, *shape)._replace(below=below)


class Program(NamedTuple):
    name: str
    body: Any  # a function of the inputs, or a module class
    inputs: dict[str, Input]
    mesh: dict[str, int]
    level: str
    numeric: bool  # the first repair changes what is computed, and is applied and run
    repaired: Any  # the program, or the inputs, after a repair that the message describes in words
    same: bool  # the bug is only one for the checker: the values are right
    whole: Any  # what it computes on one rank: itself, if it runs there
    rounds: int = 1  # how many first repairs, one after another, make it right


def program(
    parameters: dict[str, Input] | None = None,
    *,
    mesh: dict[str, int] | None = None,
    level: str = "G",
    numeric: bool = True,
    repaired: Any = None,
    same: bool = False,
    whole: Any = None,
    rounds: int = 1,
    programs: dict[str, Program] = PROGRAMS,
    **inputs: Input,
) -> Callable[[Any], Any]:
    def register(body: Any) -> Any:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", body.__name__).lower()
        given, layout = {**(parameters or {}), **inputs}, mesh or {"tp": 2}
        programs[name] = Program(name, body, given, layout, level, numeric, repaired, same, whole or body, rounds)
        return body

    return register


def mesh_of(sizes: dict[str, int]) -> Mesh:
    return Mesh(sizes.get("dp", 1) * sizes.get("tp", 1), tp=sizes.get("tp", 1))


# --- inputs ---


def values(program: Program) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(given.below, given.shape, generator=generator)
        if given.below
        else torch.randn(given.shape, generator=generator, dtype=torch.float64)
        for name, given in program.inputs.items()
    }


def _spec(axis: str, kind: Any, shape: tuple[int, ...]) -> ShardSpec:
    return ShardSpec("tp", kind.dim % len(shape), kind.stride, comm.size(axis), shape)


def local(given: Input, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole input. What varies without a dim is sharded along dim 0."""
    for axis, kind in given.types.items():
        kind = Shard(0) if kind is spmd.V else kind
        if isinstance(kind, Shard) and comm.size(axis) > 1:
            value = _spec(axis, kind, tuple(value.shape)).local_slice(value, comm.rank(axis)).clone()
    value = value.clone().requires_grad_(not given.below)
    return _marked(nn.Parameter(value.detach()), given) if given.is_parameter else value


def _marked(param: nn.Parameter, given: Input) -> nn.Parameter:
    """With NxD's marks, as layers and scripts put them on their parameters."""
    kind = given.types.get("tp")
    if isinstance(kind, Shard):
        param.tensor_model_parallel = True  # type: ignore[attr-defined]
        param.partition_dim, param.partition_stride = kind.dim % param.dim(), kind.stride  # type: ignore[attr-defined]
        param.num_partitions = comm.size("tp")  # type: ignore[attr-defined]
    return param


def _call(body: Any, given: dict[str, torch.Tensor], mode: Any = None) -> torch.Tensor:
    if not inspect.isclass(body):
        return body(**given)
    model = body()
    for name in [name for name, _ in model.named_parameters()]:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, given[name])
    if mode is not None:
        mode.watch(model)
    return model(**{name: x for name, x in given.items() if "." not in name})


def backwards(program: Program) -> bool:
    """Returns whether the program calls backward itself."""
    return "backward(" in inspect.getsource(program.body)


# --- under the checker ---


def check(program: Program, body: Any = None, inputs: dict[str, Input] | None = None) -> dict[str, Any]:
    """Forward and backward on rank 0 under the checker; the type of the loss.

    Raises:
        SpmdTypeError: what it finds.
    """
    mesh = mesh_of(program.mesh)
    inputs = inputs or program.inputs
    with comm.as_rank(mesh, 0):
        given = {name: local(inputs[name], value) for name, value in values(program).items()}
        with spmd.SpmdTypeMode(mesh, level=program.level) as mode:
            for name, x in given.items():
                spmd.assert_type(x, inputs[name].types)
            loss = _call(body or program.body, given, mode)
            found = spmd.get_local_type(loss)
            if not backwards(program):
                loss.backward()
    return found


def message(program: Program, error: Exception) -> str:
    """The text of an error with the lines of the program counted from its `def`, and no folders."""
    lines, start = inspect.getsourcelines(program.body)
    first = start + next(i for i, line in enumerate(lines) if line.startswith(("def ", "class ")))

    def place(match: re.Match[str]) -> str:
        number = int(match[2])
        return f"program.py:{number - first}" if start <= number < start + len(lines) else f"{match[1]}:-"

    return re.sub(r"/\S*/(\w+\.py):(\d+)", place, str(error)) + "\n"


def apply(program: Program, edits: Any, path: str = "", to: Path | None = None) -> Any:
    """The program with changes of its source.

    `path`: the file that has the program now; "": its own. `to`: a file to write the changed source to, so that it can
    be changed again; None: nowhere.
    """
    path = path or inspect.getsourcefile(program.body) or ""
    source = Path(path).read_bytes().splitlines(keepends=True)
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        assert edit.file == path
        (line, column), (end_line, end_column) = edit.start, edit.end
        new = source[line - 1][:column] + edit.text.encode() + source[end_line - 1][end_column:]
        source[line - 1 : end_line] = [new]
    text = b"".join(source)
    if to is not None:
        to.write_bytes(text)
    tree = ast.parse(text)
    names = vars(sys.modules[program.body.__module__])
    # Constants of the program anew: what it declares of them is not to be known the next time.
    globals_ = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in names.items()}
    wanted = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for node in wanted:
        node.decorator_list = []
    exec(compile(ast.Module(wanted, []), str(to or f"{program.name}, repaired"), "exec"), globals_)
    return globals_[program.body.__name__]


class Convergence(NamedTuple):
    """The end of a program whose first repair with edits was applied until nothing was wrong."""

    body: Any
    loss_type: dict[str, Any] | None  # None: not clean
    errors: list[spmd.SpmdTypeError]
    applied: list[Any]  # repairs


def converge(program: Program, folder: Path, rounds: int = 4) -> Convergence:
    body, path, errors, applied = program.body, "", [], []
    for number in range(rounds + 1):
        try:
            return Convergence(body, check(program, body), errors, applied)
        except spmd.SpmdTypeError as error:
            errors.append(error)
            repair = next((r for r in error.repairs if getattr(r, "edits", ())), None)
            if repair is None or number == rounds:
                break
            to = folder / f"{program.name}_{number}.py"
            body, path = apply(program, repair.edits, path, to), str(to)
            applied.append(repair)
    return Convergence(body, None, errors, applied)


# --- numbers ---


def parity(program: Program, body: Any, loss_type: dict[str, Any], inputs: dict[str, Input] | None = None) -> float:
    """Returns the relative distance of loss and gradients on ranks from those of one rank; inf if the ranks
    fail, or differ where they should be equal.
    """
    inputs = inputs or program.inputs
    whole = values(program)
    by_itself = backwards(program)  # read here: CPython 3.11 cannot parse source on two threads at once

    def step(shown: Any) -> dict[str, torch.Tensor]:
        given = {name: local(inputs[name], value) for name, value in whole.items()}
        loss = _call(shown, given)
        if not by_itself:
            loss.backward()
        return {"loss": loss.detach(), **{n: x.grad for n, x in given.items() if x.grad is not None}}

    with comm.as_rank(Mesh(1), 0):
        expected = step(program.whole)
    mesh = mesh_of(program.mesh)
    try:
        ranks = threads.run(mesh, step, body, timeout=20.0)
    except Exception as error:
        if isinstance(error, (NameError, SyntaxError, AttributeError)):
            raise
        return float("inf")
    worst = 0.0
    for name, want in expected.items():
        kinds = loss_type
        if name != "loss":
            scales = {axis: kind.scale for axis, kind in loss_type.items()}
            kinds = {a: scaled(spmd.dual(k), scales.get(a, 0)) for a, k in inputs[name].types.items()}
        found = _join(mesh, [rank.get(name, torch.zeros(())) for rank in ranks], kinds)
        if found is None or found.shape != want.shape:
            return float("inf")
        worst = max(worst, float((found - want).norm() / want.norm().clamp_min(1e-30)))
    return worst


def _join(mesh: Mesh, ranks: list[torch.Tensor], kinds: dict[str, Any]) -> torch.Tensor | None:
    """The whole value of what the ranks hold; None if it is not equal where it should be."""
    held = {(mesh.coordinate("dp", rank), mesh.coordinate("tp", rank)): x for rank, x in enumerate(ranks)}
    for at, axis in reversed(list(enumerate(AXES))):
        factor = float(mesh.size(axis)) ** kinds.get(axis, spmd.R).scale
        kind = kinds.get(axis, spmd.R).base
        groups: dict[Any, list[torch.Tensor]] = {}
        for place in sorted(held):
            groups.setdefault(place[:at] + (0,) + place[at + 1 :], []).append(held[place])
        joined = {}
        for place, pieces in groups.items():
            kind = Shard(0) if kind is spmd.V and pieces[0].dim() else kind
            pieces = [piece / factor if factor != 1 else piece for piece in pieces]
            if kind is spmd.P or (kind is spmd.V and not pieces[0].dim()):
                joined[place] = torch.stack(pieces).sum(0)
            elif isinstance(kind, Shard) and len(pieces) > 1:
                shape = list(pieces[0].shape)
                shape[kind.dim] *= len(pieces)
                joined[place] = ShardSpec("tp", kind.dim, kind.stride, len(pieces), tuple(shape)).assemble(pieces)
            else:
                if any(p.shape != pieces[0].shape or not torch.allclose(p, pieces[0], 1e-9) for p in pieces):
                    return None
                joined[place] = pieces[0]
        held = joined
    return next(iter(held.values()))
