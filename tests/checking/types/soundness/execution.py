"""Runs programs on ranks as threads, and compares what they hold with what the types say.

Four things are compared, for values and gradients (whose types are the duals):

    on every rank the checker decides alike, and gives the types that it gave on rank 0
    the ranks' tensors together are the tensor of the unsharded program, where that is known
    whatever else the ranks hold, R and I are equal, and nothing depends on how partial sums are split
    the gradients are the derivative of the loss, by finite differences, where no unsharded program is
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from neuronx_dist import spmd
from neuronx_dist.comm.backends import threads
from neuronx_dist.spmd import SpmdTypeError, dual
from neuronx_dist.spmd.types import scaled
from tests.checking.types.soundness.denotation import (
    Claim,
    Wrong,
    assemble,
    claim_of,
    difference,
    narrowed,
    put_together,
)
from tests.checking.types.soundness.program import Program, local_inputs, run_line

Names = dict[str, Tensor]
_CUT = ("detach", "no_grad", "item()", "float(", "bool(", "int(", "> 0", "comm.")  # where derivatives end


@dataclass
class Held:
    """Results of one rank's run: values, gradients of inputs, types, and the error that ended it."""

    values: Names = field(default_factory=dict)
    grads: Names = field(default_factory=dict)
    claims: dict[str, Claim] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)
    error: str = ""


def run_rank(program: Program, inputs: Names, mode: Any, backward: bool = True) -> Held:
    """One rank's run; with a mode, under its eyes."""
    held = Held()
    names: Names = {}
    for x in program.inputs:
        names[x.name] = inputs[x.name].clone().requires_grad_(x.grad and backward)
    given = dict(names)
    if mode is None:
        _run(program, names, held, backward)
    else:
        with mode:
            for x in program.inputs:
                spmd.assert_type(names[x.name], dict(x.claim.types))
            _run(program, names, held, backward)
            if not held.error:
                with torch._C.DisableTorchFunction():
                    for name in program.claims:
                        try:
                            note = mode.note(names[name], name)
                        except SpmdTypeError as error:
                            held.error = f"{name}: {error}"
                            break
                        held.claims[name] = claim_of(note.type, program.grid, names[name].dim())
    held.values = {name: x.detach() for name, x in names.items() if isinstance(x, Tensor)}
    held.grads = {name: x.grad.detach() if x.grad is not None else torch.zeros_like(x) for name, x in given.items()
                  if x.requires_grad}  # fmt: skip
    held.loss = {name: names[name].item() for name in program.losses if name in names}
    return held


def _run(program: Program, names: Names, held: Held, backward: bool) -> None:
    step: Any = None
    try:
        for step in program.steps:
            run_line(step.text, names)
        step = "backward"
        if program.losses and backward:
            torch.autograd.backward([names[name] for name in program.losses])
    except SpmdTypeError as error:
        held.error = f"{step}: {error}"


def run_all(
    programs: Sequence[Program], checked: bool, inputs: Sequence[Any], backward: bool = True
) -> list[list[Held]]:
    """All programs on all ranks; `inputs`: by program, by rank. Results: by program, by rank."""
    mesh = programs[0].mesh

    def main() -> list[Held]:
        rank = int(threading.current_thread().name.removeprefix("rank"))
        mode = spmd.SpmdTypeMode(level=programs[0].level) if checked else None
        grad = torch.enable_grad() if backward else torch.no_grad()
        with grad:
            return [run_rank(p, mine[rank], mode, backward) for p, mine in zip(programs, inputs)]

    by_rank = threads.run(mesh, main, timeout=20.0)
    return [list(held) for held in zip(*by_rank)]


def whole_run(program: Program, seed: int) -> tuple[dict[str, Tensor | None], Names]:
    """Values and gradients of the unsharded program; None where it has no meaning."""
    names: dict[str, Any] = {}
    for x in program.inputs:
        names[x.name] = None if "V" in x.claim.letters else x.whole(seed).requires_grad_(x.grad)
    given = dict(names)
    known = program.known
    for step in program.steps:
        if step.whole is not None:
            run_line(step.whole, names)
    values = {name: names[name] if name in known else None for name in program.claims}
    grads: Names = {}
    if program.losses and all(name in known for name in program.losses):
        torch.autograd.backward([names[name] for name in program.losses])
        grads = {name: x.grad if x.grad is not None else torch.zeros_like(x) for name, x in given.items()
                 if x is not None and x.requires_grad}  # fmt: skip
    return values, grads


def verify(programs: Sequence[Program], seed_of_values: int | None = None) -> list[tuple[Program, str]]:
    """The programs whose ranks do not hold what their types say, and how."""
    seeds = [p.seed if seed_of_values is None else seed_of_values for p in programs]
    wholes = [{x.name: x.whole(seed) for x in p.inputs} for p, seed in zip(programs, seeds)]
    first = [local_inputs(p, seed, 1, whole) for p, seed, whole in zip(programs, seeds, wholes)]
    runs = run_all(programs, True, first)
    found: dict[int, str] = {}
    partial, differences = [], []
    for number, (program, held) in enumerate(zip(programs, runs)):
        try:
            complete = _compare(program, held, seeds[number])
        except Wrong as wrong:
            found[number] = str(wrong)
            continue
        if any("P" in x.claim.letters for x in program.inputs):
            partial.append(number)
        if program.losses and not complete and not any(word in str(program) for word in _CUT):
            differences.append(number)
    found.update(_resplit(programs, runs, seeds, wholes, partial, first))
    found.update(_differentiate(programs, runs, seeds, differences, first))
    return [(programs[number], found[number]) for number in sorted(found)]


def _compare(program: Program, held: Sequence[Held], seed: int) -> bool:
    """Types and values of one run; whether the gradients were compared too.

    Raises:
        Wrong: they are not what they are to be.
    """
    errors = [f"rank {rank}: {h.error}" for rank, h in enumerate(held) if h.error]
    if errors:
        raise Wrong("accepted on rank 0 alone, but " + errors[0])
    for rank, h in enumerate(held):
        for name, claim in program.claims.items():
            if h.claims[name] != claim:
                raise Wrong(f"{name} is {claim.types} on rank 0 alone, {h.claims[name].types} on rank {rank}")
    values, grads = whole_run(program, seed)
    for name, claim in program.claims.items():
        pieces = [h.values[name] for h in held]
        try:
            found = assemble(pieces, claim, program.grid)
        except Wrong as wrong:
            raise Wrong(f"{name}, {claim.types}: {wrong}") from None
        expected = values[name]
        if expected is None or found is None:
            continue
        expected = expected.detach()
        found, expected = narrowed(found, claim), narrowed(expected, claim)
        why = difference(found, expected.to(found.dtype), scale=_scale(pieces))
        if why:
            raise Wrong(f"{name} is {claim.types}, and of the whole: {why}")
    for x in program.inputs:
        if not x.grad:
            continue
        claim = _gradient_claim(program, x.claim)
        pieces = [h.grads[x.name] for h in held]
        try:
            found = assemble(pieces, claim, program.grid, 1e-7 * max(1.0, _scale(pieces)))
        except Wrong as wrong:
            raise Wrong(f"gradient of {x.name}, {claim.types}: {wrong}") from None
        if x.name in grads and found is not None:
            why = difference(found, grads[x.name], 1e-7, _scale(pieces))
            if why:
                raise Wrong(f"gradient of {x.name} is {claim.types}, and of the whole: {why}")
    return bool(grads) and all(x.name in grads for x in program.inputs if x.grad)


def _gradient_claim(program: Program, claim: Claim) -> Claim:
    """The types of the gradient of an input: the duals, at the scale of the losses."""
    losses = [dict(program.claims[name].types) for name in program.losses]
    scales = {axis: kind.scale for types in losses for axis, kind in types.items()}
    return Claim(tuple((axis, scaled(dual(kind), scales.get(axis, 0))) for axis, kind in claim.types))


def _scale(pieces: Sequence[Tensor]) -> float:
    return max((float(x.double().abs().max()) for x in pieces if x.numel()), default=0.0)


def _resplit(
    programs: Sequence[Program], runs: Any, seeds: Sequence[int], wholes: Any, which: Sequence[int], first: Any
) -> dict[int, str]:
    """Runs again with partial sums split in another way: what is no partial sum must not change."""
    found: dict[int, str] = {}
    chosen = [programs[number] for number in which]
    if not chosen:
        return found
    inputs = []
    for number in which:
        program = programs[number]
        again = local_inputs(program, seeds[number], 2, wholes[number])
        for x in program.inputs:
            if "V" in x.claim.letters:  # stays as it was: on the other axes it is split as before
                for rank, names in enumerate(again):
                    names[x.name] = first[number][rank][x.name]
        inputs.append(again)
    for number, program, held in zip(which, chosen, run_all(chosen, False, inputs)):
        try:
            for name, claim in program.claims.items():
                _alike(name, claim, [h.values[name] for h in runs[number]], [h.values[name] for h in held], program)
            for x in program.inputs:
                if x.grad:
                    claim = _gradient_claim(program, x.claim)
                    before, after = ([h.grads[x.name] for h in both] for both in (runs[number], held))
                    _alike(f"gradient of {x.name}", claim, before, after, program)
        except Wrong as wrong:
            found[number] = str(wrong)
    return found


def _alike(name: str, claim: Claim, before: list[Tensor], after: list[Tensor], program: Program) -> None:
    """Two readings of the same thing."""
    summed = Claim(tuple((axis, kind if kind.letter == "P" else spmd.V) for axis, kind in claim.types))
    one, two = (_stack(x, summed, program) for x in (before, after))
    why = difference(two, one, 1e-7, max(_scale(before), _scale(after)))
    if why:
        raise Wrong(f"{name}, {claim.types}, depends on how partial sums are split: {why}")


def _stack(pieces: list[Tensor], claim: Claim, program: Program) -> Tensor:
    """Partial sums added up, the rest side by side."""
    shape = tuple(program.grid.values())
    stacked = torch.stack([x.double() for x in pieces]).reshape(*shape, *pieces[0].shape)
    for at, (_, kind) in enumerate(claim.types):
        if kind.letter == "P":
            stacked = put_together(stacked, kind, at, keepdim=True)
    return stacked


def _differentiate(
    programs: Sequence[Program], runs: Any, seeds: Sequence[int], which: Sequence[int], first: Any
) -> dict[int, str]:
    """The derivative of the loss in a random direction, by differences and by the gradients."""
    found: dict[int, str] = {}
    left = list(which)
    for attempt, width in enumerate((1e-5, 1e-6, 1e-5, 1e-7)):  # a kink in between is seen once, an error every time
        if not left:
            break
        moves = []
        for number in left:
            program = programs[number]
            directions = local_inputs(program, seeds[number] + 7919 + attempt, 3 + attempt)
            moves.append([{x.name: names[x.name] if x.grad else torch.zeros(()) for x in program.inputs}
                          for names in directions])  # fmt: skip
        sides = []
        for sign in (1.0, -1.0):
            inputs = [[{name: x + sign * width * move[name] if move[name].dim() == x.dim() and x.is_floating_point()
                        else x for name, x in names.items()} for names, move in zip(first[number], moved)]
                      for number, moved in zip(left, moves)]  # fmt: skip
            sides.append(run_all([programs[number] for number in left], False, inputs, backward=False))
        failed = []
        for number, moved, up, down in zip(left, moves, *sides):
            program = programs[number]
            slope = (_loss(program, up) - _loss(program, down)) / (2 * width)
            wanted, size = _pairing(program, runs[number], moved)
            tolerance = 1e-4 * max(1.0, size, abs(_loss(program, up)))
            if abs(slope - wanted) > tolerance and abs(slope) < 1e12:  # neither of which holds of NaN
                failed.append(number)
                found[number] = f"the gradients say that the loss changes by {wanted:g}, it does by {slope:g}"
        left = failed
    return {number: found[number] for number in left}


def _loss(program: Program, held: Sequence[Held]) -> float:
    total = 0.0
    for name in program.losses:
        pieces = torch.tensor([h.loss[name] for h in held], dtype=torch.float64).reshape(*program.grid.values())
        for at, (_, kind) in enumerate(program.claims[name].types):
            pieces = pieces.sum(at, True) if kind.letter == "P" else pieces.narrow(at, 0, 1)
        total += pieces.item()
    return total


def _pairing(program: Program, held: Sequence[Held], moves: Sequence[Names]) -> tuple[float, float]:
    """`<gradient, direction>` by the types of the inputs: I counts once, the rest is summed over the ranks."""
    total, size = 0.0, 0.0
    for x in program.inputs:
        if not x.grad:
            continue
        per_rank = torch.stack([(h.grads[x.name] * move[x.name]).sum() for h, move in zip(held, moves)])
        size = max(size, float(per_rank.abs().max()))
        per_rank = per_rank.reshape(*program.grid.values())
        for at, (_, kind) in enumerate(x.claim.types):
            per_rank = per_rank.narrow(at, 0, 1) if kind.letter == "I" else per_rank.sum(at, True)
        total += per_rank.item()
    return total, size
