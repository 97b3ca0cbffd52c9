"""Python source of a divided program: one class, the same text on every rank.

    x_1 = F.linear(x_R, self.layers[0].weight)  # [4, 8] S(1)

Each line is a call as the module's author made it, on this rank's shards, with the shape and the type of its result.
Where a call wants another type than a value has, an operator of `spmd` stands before the first such call, once for all
of them. A value is deleted after its last use, as the nested functions of the original let go of theirs.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch.utils._pytree as pytree

from ..planning.plan import PlanError
from .body import INDENT, body, dotted
from .program import Division, Program, Value
from .source_text import Imports, literal
from .stored import Stored, constants_of, stored_of

__all__ = ["emit"]


def emit(
    division: Division,
    evaluation: Division | None = None,
    *,
    name: str = "Divided",
    stored: Mapping[str, Stored] | None = None,
    signature: inspect.Signature | None = None,
) -> str:
    """The source of a `ParallelModule` that runs a division.

    Args:
        evaluation: the division of the program recorded in evaluation mode; None, or one of the same text: there is one
            forward for both modes.
        name: of the class.
        stored: what the module keeps, of `stored_of`; None: what the programs read.
        signature: of the original forward; None: the arguments of the program.

    Raises:
        ValueError: a conversion that no operator does, a function or container that a file cannot name.
    """
    divisions = [division] if evaluation is None else [division, evaluation]
    if len(division.stages) > 1:
        raise PlanError(
            f"a pipeline of {len(division.stages)} stages cannot be emitted yet: use a policy without stages "
            "(tp, data, autodist), or NxDPPModel"
        )
    stored = stored if stored is not None else stored_of(None, *divisions)
    imports = Imports(name for each in divisions for name in _names(each.program))
    arguments = _arguments(division.program, signature)
    constants = constants_of(*divisions)
    bodies = [body(each, imports, constants) for each in divisions]
    lines = [f"class {name}(ParallelModule):", f'{INDENT}"""{_summary(division)}"""', ""]
    lines += [f'{INDENT}AXIS, SIZE = "{division.axis}", {division.size}', f"{INDENT}STORED = {{"]
    for path, each in stored.items():
        lines.append(f"{INDENT * 2}{json.dumps(path)}: {_stored_text(each)},")
    lines += [f"{INDENT}}}", f"{INDENT}INPUTS = {{"]
    lines += [f"{INDENT * 2}{json.dumps(v.path)}: ({list(v.shape)}, {v.dtype})," for v in division.program.inputs]
    lines += [f"{INDENT}}}", *_fixed(division.program, arguments), ""]
    head = f"{INDENT}def forward({', '.join(['self', *_parameters(arguments, imports)])}):"
    given = ", ".join(f"{argument}={argument}" for argument in arguments)
    lines += [head, f"{INDENT * 2}self.check_arguments({given})"]
    if bodies[-1] == bodies[0]:
        lines += bodies[0]
    else:
        call = ", ".join(arguments)
        lines += [f"{INDENT * 2}if self.training:", f"{INDENT * 3}return self.train_forward({call})"]
        lines += [f"{INDENT * 2}return self.eval_forward({call})"]
        for mode, own in zip(("train", "eval"), bodies):
            lines += ["", f"{INDENT}def {mode}_forward({', '.join(['self', *arguments])}):", *own]
    text = "\n".join(lines)
    return "\n".join(_header(text, imports)) + "\n\n\n" + text + "\n"


def _names(program: Program) -> Iterator[str]:
    yield from (value.name for value in program.leaves)
    yield from (value.name for call in program.calls for value in call.results)


def _header(text: str, imports: Imports) -> list[str]:
    lines = [
        '"""Written by neuronx_dist.parallelize: the same file on every rank. Do not edit it, it is checked."""',
        "",
    ]
    lines += ["import torch", "import torch.nn.functional as F", ""]
    own = sorted(imports.lines.values())
    if own:
        lines += [*own, ""]
    lines += ["from neuronx_dist import spmd"]
    if "composites." in text:
        lines += ["from neuronx_dist.parallelize import composites"]
    lines += ["from neuronx_dist.parallelize.module import ParallelModule"]
    lines += ["from neuronx_dist.parallelize.stored import Stored"]
    return [*lines, "from neuronx_dist.spmd import I, P, R, S"]


def _summary(division: Division) -> str:
    return f"A forward of {len(division.program.calls)} calls over {division.size} ranks of axis {division.axis}."


def _stored_text(stored: Stored) -> str:
    if stored.kind == "tied":
        return f'Stored("tied", same_as={json.dumps(stored.same_as)})'
    parts = [json.dumps(stored.kind), str(tuple(stored.shape)), str(stored.dtype), str(stored.type)]
    parts += [] if stored.trained else ["trained=False"]
    return f"Stored({', '.join(parts)}{'' if stored.persistent else ', persistent=False'})"


def _arguments(program: Program, signature: inspect.Signature | None) -> dict[str, Any]:
    """The names of forward's arguments in order, and their defaults (`inspect.Parameter.empty`: none)."""
    recorded = pytree.tree_unflatten(program.arguments, program.structure)
    arguments: dict[str, Any] = {}
    if signature is not None:
        for parameter in signature.parameters.values():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                arguments[parameter.name] = parameter.default
    for name in recorded:
        arguments.setdefault(name, _NONE)
    return arguments


def _fixed(program: Program, arguments: Mapping[str, Any]) -> list[str]:
    """The lines of the table of arguments that are no tensors: the program holds for these values alone."""
    tree = pytree.tree_unflatten(program.arguments, program.structure)
    fixed = {name: default for name, default in arguments.items() if name not in tree and default is not _NONE}
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        if not isinstance(leaf, Value):
            fixed[dotted(path)] = leaf
    lines = []
    for name, value in fixed.items():
        with suppress(ValueError):  # what no file can name is not compared
            lines.append(f"{INDENT * 2}{json.dumps(name)}: {literal(value, Imports())},")
    return [f"{INDENT}FIXED = {{", *lines, f"{INDENT}}}"] if lines else []


_NONE = inspect.Parameter.empty


def _parameters(arguments: Mapping[str, Any], imports: Imports) -> Iterator[str]:
    optional = False
    for name, default in arguments.items():
        if default is _NONE and not optional:
            yield name
            continue
        optional = True
        try:
            yield f"{name}={literal(None if default is _NONE else default, imports)}"
        except ValueError:  # a default that no file can name: it is taken as not given
            yield f"{name}=None"
