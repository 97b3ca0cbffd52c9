"""`replay`: lower on every rank, compare, execute, give every rank's outputs. `replay_loop`: the same for training."""

from __future__ import annotations

import atexit
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..mesh import Mesh
from . import execution, lowering
from .alignment import Joint, align
from .lowering import Request
from .programs import Program, table
from .traces import Array, Step, Trace, Value, from_array
from .worker import Worker

__all__ = ["Replayed", "ReplayedLoop", "Run", "close", "lower", "ran_together", "replay", "replay_loop", "traces_of"]

_DEVICES = 8  # virtual devices of the executing process, unless a world is larger
_workers: dict[str, Worker] = {}
_devices = 0


class Run(NamedTuple):
    """A program, by its place in `programs`, and the ranks that ran it together."""

    program: int
    ranks: tuple[int, ...]


@dataclass
class Replayed:
    """What came of a replay.

    Attributes:
        outputs: of each rank.
        programs: those that were run; one, unless the function called `torch_xla.sync()` or ran a pipeline.
        runs: of them, in order.
    """

    outputs: list[Any]
    programs: list[Program]
    runs: list[Run]

    @property
    def program(self) -> Program:
        """The only program.

        Raises:
            RuntimeError: there are several.
        """
        return _only(self.programs)

    def table(self) -> str:
        """The programs' collectives, a line each."""
        return "\n\n".join(table(program) for program in self.programs)


@dataclass
class ReplayedLoop:
    """What came of a replayed loop.

    Attributes:
        outputs: of each rank, for each step, what the step returned.
        states: of each rank, the state after the last step, by name (`"['model']['weight']"`).
        programs: all different ones that the steps ran, as they came up.
        runs: for each step, what was run, in order.
        host_reads: for each step, how often rank 0 waited for the device to read a value.
        uploads: for each step, how many tensors rank 0 brought to the device.
    """

    outputs: list[list[Any]]
    states: list[dict[str, torch.Tensor]]
    programs: list[Program]
    runs: list[list[Run]]
    host_reads: list[int]
    uploads: list[int]

    @property
    def compiled(self) -> list[int]:
        """For each step, how many programs no step before it had run: 0, once nothing is set up any more."""
        seen: set[int] = set()
        new = []
        for runs in self.runs:
            programs = {run.program for run in runs}
            new.append(len(programs - seen))
            seen |= programs
        return new


def lower(function: Callable[..., Any], mesh: Mesh, arguments: Sequence[Sequence[Any]]) -> Program:
    """The one program of all ranks, not executed. Arguments and errors as of `replay`."""
    traces = _lower(Request(mesh, function, arguments))
    return _only(_numbered(_aligned(traces, mesh)[1])[0])


def traces_of(function: Callable[..., Any], mesh: Mesh, arguments: Sequence[Sequence[Any]]) -> list[Trace]:
    """What each rank would run, not compared and not executed."""
    return _lower(Request(mesh, function, arguments))


def ran_together(traces: Sequence[Trace], mesh: Mesh) -> tuple[list[Program], list[Run]]:
    """The different programs of all ranks, and the order in which ranks run them together.

    Raises:
        ProgramsDiffer, ReplicaGroupsWrong: as `replay`.
    """
    programs, runs = _numbered(_aligned(traces, mesh)[1])
    return programs, runs[0]


def replay(function: Callable[..., Any], mesh: Mesh, arguments: Sequence[Sequence[Any]]) -> Replayed:
    """Runs `function(*arguments[rank])` on every rank of `mesh`, as XLA programs on as many virtual CPU devices.

    What the function computes is one program, unless it cuts it (`torch_xla.sync()`; pipelines do, between stages).

    Args:
        function: of an importable module; it finds its rank in the current context, as always. What it returns, in any
            nesting, are the last program's results: a gradient that is not returned is not computed.
        arguments: of each rank; CPU tensors, which come on the device, and other values. `[()] * world_size` for none.

    Raises:
        ProgramsDiffer: the ranks' programs are not the same.
        ReplicaGroupsWrong: a collective's groups do not fit the mesh.
        WorkerError: lowering or executing failed.
    """
    traces = _lower(Request(mesh, function, arguments))
    joints = _aligned(traces, mesh)[1]
    played = _Execution(traces)
    played.run(joints[0])
    outputs = [played.output(rank, trace.steps[0]) for rank, trace in enumerate(traces)]
    programs, runs = _numbered(joints)
    return Replayed(outputs, programs, runs[0])


def replay_loop(
    setup: Callable[..., Any],
    mesh: Mesh,
    arguments: Sequence[Sequence[Any]],
    batches: Sequence[Sequence[Sequence[Any]]],
) -> ReplayedLoop:
    """Runs a training loop: `step, state = setup(*arguments[rank])`, then `step(*batches[rank][k])` for each k.

    `state()` gives the tensors whose last values are wanted (parameters, optimizer state; see `training_state`), in any
    nesting. All that is alive after a step is there for the next one. Steps are lowered one by one, so that a program
    that changes from step to step, which would be compiled again each time, shows in `programs`.

    Raises:
        as `replay`.
    """
    traces = _lower(Request(mesh, setup, arguments, batches))
    before, joints = _aligned(traces, mesh)
    played = _Execution(traces)
    played.run(before)
    outputs: list[list[Any]] = [[] for _ in traces]
    for number, step in enumerate(joints):
        played.run(step)
        for rank, trace in enumerate(traces):
            outputs[rank].append(played.output(rank, trace.steps[number]))
    states = [played.state(rank, trace.last) for rank, trace in enumerate(traces)]
    programs, runs = _numbered(joints)
    first = traces[0].steps
    reads, uploads = [step.host_reads for step in first], [step.uploads for step in first]
    return ReplayedLoop(outputs, states, programs, runs, reads, uploads)


class _Execution:
    """The values of all ranks, as programs give them; each is dropped after its last use."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._values: list[dict[int, Array]] = [dict(trace.known) for trace in traces]
        self._uses = [_uses(trace) for trace in traces]

    def run(self, joints: Sequence[Joint]) -> None:
        for joint in joints:
            ours = list(zip(joint.ranks, joint.launches))
            done = all(set(x.gives) <= self._values[rank].keys() for rank, x in ours)  # lowering could execute it
            given = [[self._use(rank, number) for number in x.takes] for rank, x in ours]
            if done:
                continue
            results = _workers["execution"].ask(
                execution.Request(joint.program.fingerprint, joint.program.proto, joint.ranks, given)
            )
            for (rank, x), found in zip(ours, results):
                self._values[rank].update((n, value) for n, value in zip(x.gives, found) if self._uses[rank][n])

    def output(self, rank: int, step: Step) -> Any:
        def fill(leaf: Any) -> Any:
            return from_array(self._use(rank, leaf.number)) if isinstance(leaf, Value) else leaf

        return pytree.tree_map(fill, step.output, is_leaf=_is_value)

    def state(self, rank: int, step: Step) -> dict[str, torch.Tensor]:
        return {name: from_array(self._use(rank, number)) for name, number in step.state.items()}

    def _use(self, rank: int, number: int) -> Array:
        self._uses[rank][number] -= 1
        values = self._values[rank]
        return values[number] if self._uses[rank][number] else values.pop(number)


def _uses(trace: Trace) -> Counter[int]:
    """How often each value is an input, part of what a step gives, or of the last state."""
    uses: Counter[int] = Counter(trace.last.state.values())
    for step in (trace.setup, *trace.steps):
        uses.update(number for launch in step.launches for number in launch.takes)
        leaves = pytree.tree_leaves(step.output, is_leaf=_is_value)
        uses.update(leaf.number for leaf in leaves if isinstance(leaf, Value))
    return uses


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Value)


def _aligned(traces: Sequence[Trace], mesh: Mesh) -> tuple[list[Joint], list[list[Joint]]]:
    """What the ranks run together, in the set-up and in each step."""

    def together(steps: Sequence[Step], place: str) -> list[Joint]:
        return align([step.launches for step in steps], mesh, place)

    setup = together([trace.setup for trace in traces], "the set-up")
    steps = zip(*(trace.steps for trace in traces))
    return setup, [together(step, f"step {number}") for number, step in enumerate(steps)]


def _numbered(steps: Sequence[Sequence[Joint]]) -> tuple[list[Program], list[list[Run]]]:
    """The different programs, and each step's runs of them."""
    programs: list[Program] = []
    places: dict[str, int] = {}
    runs = []
    for joints in steps:
        of_step = []
        for joint in joints:
            key = joint.program.fingerprint
            if key not in places:
                places[key] = len(programs)
                programs.append(joint.program)
            of_step.append(Run(places[key], joint.ranks))
        runs.append(of_step)
    return programs, runs


def _only(programs: Sequence[Program]) -> Program:
    if len(programs) != 1:
        raise RuntimeError(f"there are {len(programs)} programs, not one: look at the `programs` of `replay(...)`")
    return programs[0]


def close() -> None:
    """Ends the two processes, which otherwise are kept for the next replay."""
    for worker in _workers.values():
        worker.close()
    _workers.clear()


atexit.register(close)


def _lower(request: Request) -> list[Trace]:
    world_size = request.mesh.world_size
    if len(request.arguments) != world_size:
        raise ValueError(f"{len(request.arguments)} lists of arguments for {world_size} ranks; give one for each")
    _check_batches(request)
    if request.function.__module__ == "__main__":
        raise ValueError(
            f"{request.function.__qualname__} lives in the script that is running, where the lowering process cannot "
            "import it: put it into a module"
        )
    _start(world_size)
    traces: list[Trace] = _workers["lowering"].ask(request)
    return traces


def _check_batches(request: Request) -> None:
    for rank, arguments in enumerate(request.arguments):
        if not isinstance(arguments, (tuple, list)):
            raise TypeError(
                f"arguments of rank {rank}: a tuple is needed, with what the function takes; got {arguments!r}"
            )
    if request.batches is None:
        return
    steps = [len(batches) for batches in request.batches]
    if len(steps) != request.mesh.world_size or len(set(steps)) > 1:
        raise ValueError(
            f"batches for {len(steps)} ranks, of {steps} steps: give one list for each of the "
            f"{request.mesh.world_size} ranks, all with as many steps"
        )
    for rank, batches in enumerate(request.batches):
        for number, batch in enumerate(batches):
            if not isinstance(batch, (tuple, list)):
                raise TypeError(
                    f"batch {number} of rank {rank}: a tuple is needed, with what the step takes; got {batch!r}"
                )


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
