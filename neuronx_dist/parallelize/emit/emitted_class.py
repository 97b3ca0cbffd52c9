"""Emits the Python source of a divided program: one class, the same text on every rank.

    x_1 = F.linear(x_R, self.layers[0].weight)  # [4, 8 of 16] S(1)

Each line is a call as the module's author made it, on this rank's shards, with the shape and the type of its result.
Equal layers are one method, which is called in a loop.
Where a call wants another type than a value has, an operator of `spmd` stands before the first such call, once for all
calls that want this type. A value is deleted after its last use, as nested functions of the original free their locals.

A pipeline has one method for each stage, which takes the arguments of forward and the results of the stage before;
forward calls these methods one after the other, and `train_step` by the schedule. A recomputed span is a function that
`checkpoint` calls.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from ...mesh import part_of
from ...program.program import Division, Program, Value, argument_name, dotted, local_shape, values_in
from ...torch_internals.tensors import pytree
from ..choose.stages import StageCalls, schedule_of, stages_of
from ..example import Example, synchronised_norms
from ..train.stored import Stored, constants_of, stored_of
from .body import Body, shape_text
from .equal_blocks import Statements, folded
from .lines import INDENT, written
from .source_text import Imports, literal

__all__ = ["EmittedProgram", "emit", "emitted_program"]


_HEAD = '''\
"""Written by neuronx_dist.parallelize: the same file on every rank. Do not edit it, it is checked.

Comments have the shape that a rank holds, `[4, 8 of 16]` of a whole `[4, 16]`, and the type of the tensor: S(1), cut
along dim 1; R, equal on all ranks; I, equal, and so is its gradient; P, a summand of the whole.
"""'''


class EmittedProgram(NamedTuple):
    """The source of a divided module, and what it was made of.

    Attributes:
        divisions: of the program in training, and of that in evaluation if it is another one; or of the latter alone.
        stored: the parameters, buffers and constants that it keeps, by name.
        names: the attributes by which it keeps constants.
    """

    example: Example
    divisions: list[Division]
    source: str
    stored: dict[str, Stored]
    names: dict[Value, str]

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """The values of constants, by the names of their attributes."""
        return {name: value.constant for value, name in self.names.items() if value.constant is not None}


def emitted_program(example: Example, divisions: Sequence[Division]) -> EmittedProgram:
    """Emits a module's divided programs, training first.

    Raises:
        ValueError: as `emit`.
    """
    stored = stored_of(example.module, *divisions)
    signature = inspect.signature(example.module.forward)
    synchronised = synchronised_norms(example.module)
    source = emit(*divisions, name=example.name, stored=stored, signature=signature, synchronised=synchronised)
    return EmittedProgram(example, list(divisions), source, stored, constants_of(*divisions))


def emit(
    division: Division,
    evaluation: Division | None = None,
    *,
    name: str = "Divided",
    stored: Mapping[str, Stored] | None = None,
    signature: inspect.Signature | None = None,
    synchronised: Collection[str] = (),
) -> str:
    """Returns the source of a `ParallelModule` that runs a division.

    Args:
        evaluation: the division of the program recorded in evaluation mode; None, or one with the same text: both
            modes have one forward.
        name: of the class.
        stored: the tensors that the module keeps, by `stored_of`; None: those that the programs read.
        signature: of the original forward; None: the arguments of the program.
        synchronised: paths of the modules whose batch norm has statistics over all units.

    Raises:
        ValueError: no operator does a conversion; a file cannot name a function or container; the schedule does not fit
            the numbers of stages, ranks and microbatches; a pipeline has no loss.
        PlanError: stages cannot be cut there.
    """
    divisions = [division] if evaluation is None else [division, evaluation]
    stored = stored if stored is not None else stored_of(None, *divisions)
    arguments = _arguments(division.program, signature)
    argument_names = list(map(argument_name, arguments))
    name = argument_name(name)  # of a class, too, that the file does not import
    imports = Imports([name, *argument_names, *(value for division in divisions for value in _names(division.program))])
    constants = constants_of(*divisions)
    modes = ("train_", "eval_") if evaluation is not None else ("",)
    stages = [stages_of(division) for division in divisions]
    stage_bodies = [
        Body(division, imports, constants, stage, is_last=stage is of_division[-1], synchronised=synchronised)
        for division, of_division in zip(divisions, stages)
        for stage in of_division
    ]
    attributes = {path.partition(".")[0] for path in (*stored, *constants.values())}
    statements = [Statements(body.lines, body.returned) for body in stage_bodies]
    folded_lines, equal_layers = folded(statements, imports, attributes)
    texts = iter(
        [written(lines, body.returned, body.arguments) for lines, body in zip(folded_lines, stage_bodies, strict=True)]
    )
    methods = [
        _Methods.of(division, mode, argument_names, of_division, texts)
        for division, mode, of_division in zip(divisions, modes, stages)
    ]
    bodies = [method.forward for method in methods]
    lines = [f"class {name}(ParallelModule):", f'{INDENT}"""{_summary(division)}"""', ""]
    axis = part_of(division.axis).axis
    lines += [f'{INDENT}AXIS, SIZE = "{axis}", {division.ranks}']
    lines += [f"{INDENT}PARTS = {literal(tuple(division.axes), imports)}"] if division.outer else []
    lines += [f"{INDENT}STORED = {{"]
    lines += _stored_lines(stored, division)
    lines += [f"{INDENT}}}", f"{INDENT}INPUTS = {{"]
    lines += [f"{INDENT * 2}{json.dumps(v.path)}: ({list(v.shape)}, {v.dtype})," for v in division.program.inputs]
    lines += [f"{INDENT}}}", *_fixed(division.program, arguments, imports), *_pipeline(division, methods)]
    draws = any(call.random for division in divisions for call in division.whole.calls)
    lines += [*([f"{INDENT}DRAWS = True"] if draws else []), ""]
    head = f"{INDENT}def forward({', '.join(['self', *_parameters(arguments, imports)])}):"
    given = ", ".join(f"{argument}={argument_name(argument)}" for argument in arguments)
    lines += [head, f"{INDENT * 2}self.check_arguments({given})"]
    if bodies[-1] == bodies[0]:
        lines += bodies[0]
    else:
        call = ", ".join(argument_names)
        lines += [f"{INDENT * 2}if self.training:", f"{INDENT * 3}return self.train_forward({call})"]
        lines += [f"{INDENT * 2}return self.eval_forward({call})"]
        for mode, lines_of in zip(("train", "eval"), bodies):
            lines += ["", f"{INDENT}def {mode}_forward({', '.join(['self', *argument_names])}):", *lines_of]
    lines += [*(line for method in methods for line in method.stages), *equal_layers]
    text = "\n".join(lines)
    return "\n".join(_header(text, imports)) + "\n\n\n" + text + "\n"


class _Methods(NamedTuple):
    """The methods that run one program.

    Attributes:
        forward: the lines of the forward of the whole, without its head.
        table: for each stage of a pipeline the lines that describe the received values.
        stages: the lines of the stages' methods.
    """

    forward: list[str]
    table: list[str]
    stages: list[str]

    @classmethod
    def of(
        cls,
        division: Division,
        mode: str,
        arguments: Sequence[str],
        stages: Sequence[StageCalls],
        bodies: Iterator[list[str]],
    ) -> _Methods:
        """`bodies`: yields the lines of the method of each stage."""
        if len(stages) == 1:
            return cls(next(bodies), [], [])
        arguments = [name for number, name in enumerate(arguments) if not number or name in _with_tensors(division)]
        forward, table, lines = [], [], []
        for number, stage in enumerate(stages):
            is_last = number == len(stages) - 1
            name, received = f"{mode}stage_{number}", [value.name for value in stage.received]
            sent = "".join(f"{value.name}, " for value in stage.sent)
            call = f"self.{name}({', '.join([*arguments, *received])})"
            forward.append(f"{INDENT * 2}{'return ' if is_last else f'{sent[:-1]} = ' if sent else ''}{call}")
            lines += ["", f"{INDENT}def {name}({', '.join(['self', *arguments, *received])}):"]
            lines += next(bodies)
            table += [f'{INDENT * 2}"{name}": {{', *_received(stage, division), f"{INDENT * 2}}},"]
        return cls(forward, table, lines)


def _with_tensors(division: Division) -> set[str]:
    """Returns the names of the arguments that contain tensors; stages read no others."""
    program = division.program
    tree = pytree.tree_unflatten(program.arguments, program.structure)
    return {argument_name(name) for name, given in tree.items() if any(values_in(pytree.tree_leaves(given)))}


def _received(stage: StageCalls, division: Division) -> Iterator[str]:
    for value in stage.received:
        shape = list(local_shape(value.shape, division.type_of(value), division.size))
        yield f'{INDENT * 3}"{value.name}": ({shape}, {value.dtype}, {value.requires_grad}),'


def _pipeline(division: Division, methods: Sequence[_Methods]) -> list[str]:
    """Returns the lines of the attributes by which `train_step` runs a pipeline."""
    stages, ranks = len(division.stages), division.pipeline_ranks
    if stages == 1:
        return []
    schedule_of(ranks, stages, division.microbatches, division.schedule)
    lines = [f'{INDENT}RANKS, MICROBATCHES, SCHEDULE = {ranks}, {division.microbatches}, "{division.schedule}"']
    for name, method in zip(("STAGES", "EVAL_STAGES"), methods):
        lines += [f"{INDENT}{name} = {{", *method.table, f"{INDENT}}}"]
    return lines


def _names(program: Program) -> Iterator[str]:
    yield from (value.name for value in program.leaves)
    yield from (value.name for call in program.calls for value in call.results)


def _header(text: str, imports: Imports) -> list[str]:
    lines = [*_HEAD.splitlines(), "", "import torch", "import torch.nn.functional as F", ""]
    import_lines = sorted(imports.lines.values())
    if import_lines:
        lines += [*import_lines, ""]
    lines += ["from neuronx_dist import spmd"]
    if "composites." in text:
        lines += ["from neuronx_dist.parallelize import composites"]
    checkpoint = ["from neuronx_dist.spmd.random import checkpoint"] if "= checkpoint(" in text else []
    lines += ["from neuronx_dist.parallelize.train.parallel_module import ParallelModule"]
    lines += [
        f"from neuronx_dist.parallelize.train.stored import Stored{', numbered' if '**numbered(' in text else ''}"
    ]
    return [*lines, "from neuronx_dist.spmd import I, P, R, S", *checkpoint]


def _summary(division: Division) -> str:
    stages = len(division.stages)
    pipeline = f" of each of {stages} pipeline stages" if stages > 1 else ""
    calls = len(division.whole.calls)
    over = f"{division.size} ranks of axis {division.axis}"
    if division.outer is not None:
        over = " x ".join(map(str, division.axes.values())) + f" ranks of axes {', '.join(division.axes)}"
    types = "" if division.outer is None else " Types are those on each of these axes."
    return f"A forward of {calls} calls over {over}{pipeline}.{types}"


def _stored_lines(stored: Mapping[str, Stored], division: Division) -> Iterator[str]:
    """Yields the lines of the table of stored tensors; those of equal layers one after the other stand there once."""
    layers = []  # (path of the layers, number, lines); number -1: a tensor that is in no numbered module
    for (path, number), names in groupby(stored, _layer):
        texts = []
        for name in names:
            rest = name if number < 0 else name.removeprefix(f"{path}.{number}.")
            texts.append(f"{json.dumps(rest)}: {_stored_text(stored[name])},{_held_text(stored[name], division)}")
        layers.append((path, number, texts))
    position = 0
    while position < len(layers):
        path, number, texts = layers[position]
        end = position + 1
        while end < len(layers) and layers[end] == (path, number + end - position, texts) and number >= 0:
            end += 1
        count, position = end - position, end
        if count == 1:
            for text in texts:
                yield INDENT * 2 + (text if number < 0 else f"{json.dumps(f'{path}.{number}.')[:-1]}{text[1:]}")
            continue
        numbers = f"range({f'{number}, ' if number else ''}{number + count})"
        yield f"{INDENT * 2}**numbered({json.dumps(path)}, {numbers}, {{"
        yield from (INDENT * 3 + text for text in texts)
        yield f"{INDENT * 2}}}),"


def _layer(name: str) -> tuple[str, int]:
    """Returns the path of the module whose numbered child holds a tensor, and the number; ("", -1): there is none."""
    parts = name.split(".")
    position = next((position for position, part in enumerate(parts[:-1]) if position and part.isdigit()), None)
    return ("", -1) if position is None else (".".join(parts[:position]), int(parts[position]))


def _held_text(stored: Stored, division: Division) -> str:
    """Returns a comment with the shape that a rank holds, if it is not the whole shape."""
    spec = stored.spec(division.axis, division.ranks)
    if stored.kind == "tied" or stored.rank is not None or tuple(spec.local_shape) == stored.shape:
        return ""
    return f"  # {shape_text(stored.shape, (stored.type, spec.num_partitions))}"


def _stored_text(stored: Stored) -> str:
    if stored.kind == "tied":
        stages = f", stages={stored.stages}" if stored.stages else ""
        return f'Stored("tied", same_as={json.dumps(stored.same_as)}{stages})'
    parts = [json.dumps(stored.kind), str(tuple(stored.shape)), str(stored.dtype), str(stored.type)]
    parts += [] if stored.trained else ["trained=False"]
    parts += [] if stored.persistent else ["persistent=False"]
    parts += [f"stages={stored.stages}"] if stored.stages else []
    parts += [f'axis="{stored.axis}"'] if stored.axis else []
    parts += [f"rank={stored.rank}"] if stored.rank is not None else []
    return f"Stored({', '.join(parts)})"


def _arguments(program: Program, signature: inspect.Signature | None) -> dict[str, Any]:
    """Returns the names of forward's arguments in order, with their defaults (`inspect.Parameter.empty`: none)."""
    recorded = pytree.tree_unflatten(program.arguments, program.structure)
    arguments: dict[str, Any] = {}
    if signature is not None:
        for parameter in signature.parameters.values():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                arguments[parameter.name] = parameter.default
    for name in recorded:
        arguments.setdefault(name, _NONE)
    return arguments


def _fixed(program: Program, arguments: Mapping[str, Any], imports: Imports) -> list[str]:
    """Returns the lines of the table of arguments that are no tensors: the program is valid for these values only."""
    tree = pytree.tree_unflatten(program.arguments, program.structure)
    fixed = {name: default for name, default in arguments.items() if name not in tree and default is not _NONE}
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        if not isinstance(leaf, Value):
            fixed[dotted(path)] = leaf
    lines = []
    for name, value in fixed.items():
        if isinstance(value, torch.device):  # replaced by the device that the module is on
            continue
        try:
            lines.append(f"{INDENT * 2}{json.dumps(name)}: {literal(value, imports, _device)},")
        except ValueError as error:
            raise ValueError(
                f"forward's argument {name} is {value!r}, which cannot be written into the emitted file ({error}): "
                "pass a tensor, number, string or Enum member, or make it an attribute of the module"
            ) from error
    return [f"{INDENT}FIXED = {{", *lines, f"{INDENT}}}"] if lines else []


_NONE = inspect.Parameter.empty


def _device(x: Any) -> str | None:
    """Returns the source of a device outside of the forward, where there is no module."""
    return f'torch.device("{x}")' if isinstance(x, torch.device) else None


def _parameters(arguments: Mapping[str, Any], imports: Imports) -> Iterator[str]:
    optional = False
    for name, default in arguments.items():
        if default is _NONE and not optional:
            yield argument_name(name)
            continue
        optional = True
        try:
            yield f"{argument_name(name)}={literal(None if default is _NONE else default, imports, _device)}"
        except ValueError:  # a default that no file can name: a tensor or another value was recorded in its place
            yield f"{argument_name(name)}=None"
