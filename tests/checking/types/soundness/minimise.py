"""Makes a program that is wrong as short as it stays wrong."""

from __future__ import annotations

from neuronx_dist.comm.errors import CommError
from tests.checking.types.soundness.denotation import Wrong
from tests.checking.types.soundness.execution import verify
from tests.checking.types.soundness.generator import Generator, Unsound
from tests.checking.types.soundness.program import Program


def wrong(program: Program) -> tuple[Program, str]:
    """The program as the checker takes it now, and what is wrong with it ("": nothing, or it is not accepted)."""
    generator = Generator(program.seed, program.grid, program.level, program)
    try:
        candidate = generator.make(0)
    except Unsound as error:
        return generator.program, str(error)
    except (KeyError, NameError, RuntimeError, IndexError):
        return program, ""
    if len(candidate.steps) < len(program.steps):
        return candidate, ""
    try:
        found = verify([candidate])
    except (CommError, Wrong, RuntimeError) as error:
        return candidate, f"{type(error).__name__}: {error}"
    return candidate, found[0][1] if found else ""


def minimise(program: Program) -> tuple[Program, str]:
    """The shortest program that leaving out steps, losses and inputs leads to, and what is wrong with it."""
    best, why = wrong(program)
    if not why:
        return program, "(it is right when run alone)"
    smaller = True
    while smaller:
        smaller = False
        for steps in _shorter(best):
            left = {name for step in steps for name in step.targets}
            losses = [name for name in best.losses if name in left]
            candidate, found = wrong(Program(best.grid, best.level, best.seed, best.inputs, steps, losses=losses))
            if found and len(candidate.steps) < len(best.steps):
                best, why, smaller = candidate, found, True
                break
    used = {name for step in best.steps for name in step.names}
    inputs = [x for x in best.inputs if x.name in used]
    candidate, found = wrong(Program(best.grid, best.level, best.seed, inputs, best.steps, losses=best.losses))
    return (candidate, found) if found else (best, why)


def _shorter(program: Program) -> list[list]:
    """Programs without one of the steps, and what needs it."""
    found = []
    for number in reversed(range(len(program.steps))):
        gone: set[str] = set(program.steps[number].targets)
        steps = program.steps[:number]
        for step in program.steps[number + 1 :]:
            if step.names & gone:
                gone |= set(step.targets)
            else:
                steps.append(step)
        found.append(steps)
    return sorted(found, key=len)
