"""`replay`: lower on every rank, compare, execute, give every rank's outputs. `replay_loop`: the same for training."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..mesh import Mesh
from . import execution, lowering
from .execution import Array
from .lowering import Before, Lowered, Request, Slot, from_array
from .programs import Program, check_groups, check_one_program, table
from .worker import Worker

__all__ = ["Replayed", "ReplayedLoop", "close", "lower", "programs_of", "replay", "replay_loop"]

_DEVICES = 8  # virtual devices of the executing process, unless a world is larger
_workers: dict[str, Worker] = {}
_devices = 0


@dataclass
class Replayed:
    """What came of a replay: every rank's output, and the program that all of them ran."""

    outputs: list[Any]
    program: Program

    def table(self) -> str:
        """The program's collectives, a line each."""
        return table(self.program)


@dataclass
class ReplayedLoop:
    """What came of a replayed loop.

    Attributes:
        outputs: of each rank, for each step, what the step returned.
        states: of each rank, the state after the last step, by name (`"['model']['weight']"`).
        programs: those that differ from the step before, in order: one, once nothing is set up any more.
        program_of_step: index into `programs`.
        host_reads: for each step, how often rank 0 waited for the device to read a value.
    """

    outputs: list[list[Any]]
    states: list[dict[str, torch.Tensor]]
    programs: list[Program]
    program_of_step: list[int]
    host_reads: list[int]


def lower(function: Callable[..., Any], mesh: Mesh, arguments: Sequence[Sequence[Any]]) -> Program:
    """The program of all ranks, not executed. Arguments and errors as of `replay`."""
    return _lower(Request(mesh, function, arguments))[0][0].program


def programs_of(function: Callable[..., Any], mesh: Mesh, arguments: Sequence[Sequence[Any]]) -> list[Program]:
    """Every rank's program, not compared and not executed."""
    return [steps[0].program for steps in _lower(Request(mesh, function, arguments), check=False)]


def replay(function: Callable[..., Any], mesh: Mesh, arguments: Sequence[Sequence[Any]]) -> Replayed:
    """Runs `function(*arguments[rank])` on every rank of `mesh`, as one XLA program on as many virtual CPU devices.

    Args:
        function: of an importable module; it finds its rank in the current context, as always. What it returns, in any
            nesting, are the program's results: a gradient that is not returned is not computed.
        arguments: of each rank; CPU tensors, which come on the device, and other values. `[()] * world_size` for none.

    Raises:
        ProgramsDiffer: the ranks' programs are not the same.
        ReplicaGroupsWrong: a collective's groups do not fit the mesh.
        WorkerError: lowering or executing failed.
    """
    steps = _lower(Request(mesh, function, arguments))
    (first,) = steps[0]
    given = [[value for value in rank[0].parameters if not isinstance(value, str)] for rank in steps]
    results = _execute(first.program, given)
    return Replayed([_filled(rank[0].output, values, {}) for rank, values in zip(steps, results)], first.program)


def replay_loop(
    setup: Callable[..., Any],
    mesh: Mesh,
    arguments: Sequence[Sequence[Any]],
    batches: Sequence[Sequence[Sequence[Any]]],
) -> ReplayedLoop:
    """Runs a training loop: `step, state = setup(*arguments[rank])`, then `step(*batches[rank][k])` for each k.

    `state()` gives all tensors that a step leaves to the next (parameters, optimizer state; see `training_state`), in
    any nesting: what a step makes of them are the next one's inputs. Steps are lowered one by one, so that a program
    that changes from step to step, which would be compiled again each time, shows in `programs`.

    Raises:
        as `replay`.
    """
    ranks = _lower(Request(mesh, setup, arguments, batches))
    states: list[dict[str, Array]] = [{} for _ in ranks]
    outputs: list[list[Any]] = [[] for _ in ranks]
    programs: list[Program] = []
    program_of_step = []
    for steps in zip(*ranks):
        program = steps[0].program
        same = next((i for i, known in enumerate(programs) if known.lines == program.lines), None)
        if same is None:
            programs.append(program)
        program_of_step.append(len(programs) - 1 if same is None else same)
        for state, lowered in zip(states, steps):
            state.update(lowered.initial)
        given = [
            [state[value] if isinstance(value, str) else value for value in lowered.parameters]
            for state, lowered in zip(states, steps)
        ]
        results = _execute(programs[program_of_step[-1]], given)
        for state, shown, lowered, values in zip(states, outputs, steps, results):
            shown.append(_filled(lowered.output, values, state))
            state.update(zip(lowered.results, values))
    final = [{name: from_array(value) for name, value in state.items()} for state in states]
    return ReplayedLoop(outputs, final, programs, program_of_step, [step.host_reads for step in ranks[0]])


def close() -> None:
    """Ends the two processes, which otherwise are kept for the next replay."""
    for worker in _workers.values():
        worker.close()
    _workers.clear()


atexit.register(close)


def _lower(request: Request, check: bool = True) -> list[list[Lowered]]:
    world_size = request.mesh.world_size
    if len(request.arguments) != world_size:
        raise ValueError(f"{len(request.arguments)} lists of arguments for {world_size} ranks; give one for each")
    if request.function.__module__ == "__main__":
        raise ValueError(
            f"{request.function.__qualname__} lives in the script that is running, where the lowering process cannot "
            "import it: put it into a module"
        )
    _start(world_size)
    ranks: list[list[Lowered]] = _workers["lowering"].ask(request)
    if check:
        for steps in zip(*ranks):
            check_one_program([lowered.before for lowered in steps if lowered.before is not None])
            check_one_program([lowered.program for lowered in steps])
            check_groups(steps[0].program, request.mesh)
    return ranks


def _execute(program: Program, given: list[list[Array]]) -> list[list[Array]]:
    results: list[list[Array]] = _workers["execution"].ask((program.proto, given))
    return results


def _start(world_size: int) -> None:
    global _devices
    for name in [name for name, worker in _workers.items() if not worker.alive]:
        _workers.pop(name).close()
    if world_size > _devices and "execution" in _workers:
        _workers.pop("execution").close()
    if "lowering" not in _workers:
        _workers["lowering"] = Worker("neuronx_dist.xla_replay.lowering", lowering.environment())
    if "execution" not in _workers:
        _devices = max(_DEVICES, world_size)
        _workers["execution"] = Worker("neuronx_dist.xla_replay.execution", execution.environment(_devices))


def _filled(output: Any, values: Sequence[Array], before: dict[str, Array]) -> Any:
    def fill(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return from_array(values[leaf.index])
        return from_array(before[leaf.name]) if isinstance(leaf, Before) else leaf

    return pytree.tree_map(fill, output)
