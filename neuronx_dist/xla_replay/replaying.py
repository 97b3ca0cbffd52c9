"""`replay`: lowers a function on every rank, compares the programs, executes them. `replay_loop`: a training loop."""

from __future__ import annotations

import atexit
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..mesh import Mesh
from ..torch_internals.tensors import pytree
from . import execution, lowering
from .alignment import Joint, align
from .lowering import LoweringRequest
from .programs import Program, table
from .traces import Array, DeviceValue, LoweredStep, RankTrace, from_array
from .worker import Worker

__all__ = [
    "ProgramRun",
    "Replayed",
    "ReplayedLoop",
    "close",
    "lower",
    "ran_together",
    "replay",
    "replay_loop",
    "traces_of",
    "training_state",
]

_DEVICES = 8  # virtual devices of the executing process, unless a world is larger
_workers: dict[str, Worker] = {}
_devices = 0


class ProgramRun(NamedTuple):
    """A program, by its index in `programs`, and the ranks that ran it together."""

    program: int
    ranks: tuple[int, ...]


@dataclass
class Replayed:
    """The result of a replay.

    Attributes:
        outputs: the function's result on each rank.
        programs: the programs that ran; one, unless the function called `torch_xla.sync()` or ran a pipeline.
        runs: the runs of the programs, in order.
    """

    outputs: list[Any]
    programs: list[Program]
    runs: list[ProgramRun]

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
    """The result of a replayed loop.

    Attributes:
        outputs: the steps' results, by rank and step.
        states: the state after the last step, by rank and name (`"['model']['weight']"`).
        programs: all different programs of the steps, in order of first use.
        runs: the runs of programs, by step, in order.
        host_reads: by step, how often rank 0 waited for the device to read a value.
        uploads: by step, the number of tensors that rank 0 copied to the device.
    """

    outputs: list[list[Any]]
    states: list[dict[str, torch.Tensor]]
    programs: list[Program]
    runs: list[list[ProgramRun]]
    host_reads: list[int]
    uploads: list[int]

    @property
    def compiled(self) -> list[int]:
        """By step, the number of programs that no earlier step ran: 0 once the loop is in its steady state."""
        seen: set[int] = set()
        new = []
        for runs in self.runs:
            programs = {run.program for run in runs}
            new.append(len(programs - seen))
            seen |= programs
        return new


def lower(function: Callable[..., Any], mesh: Mesh, arguments: Sequence[Sequence[Any]]) -> Program:
    """Returns the program that all ranks share, without executing it. Arguments and errors are those of `replay`."""
    traces = _lower(LoweringRequest(mesh, function, arguments))
    return _only(_numbered(_aligned(traces, mesh)[1])[0])


def traces_of(function: Callable[..., Any], mesh: Mesh, arguments: Sequence[Sequence[Any]]) -> list[RankTrace]:
    """Returns the programs of each rank, neither compared nor executed."""
    return _lower(LoweringRequest(mesh, function, arguments))


def ran_together(traces: Sequence[RankTrace], mesh: Mesh) -> tuple[list[Program], list[ProgramRun]]:
    """Returns the different programs of all ranks, and the order in which ranks run them together.

    Raises:
        ProgramsDiffer, ReplicaGroupsWrong: as in `replay`.
    """
    programs, runs = _numbered(_aligned(traces, mesh)[1])
    return programs, runs[0]


def replay(function: Callable[..., Any], mesh: Mesh, arguments: Sequence[Sequence[Any]]) -> Replayed:
    """Runs `function(*arguments[rank])` on every rank of `mesh`, as XLA programs on as many virtual CPU devices.

    The function is one program, unless it calls `torch_xla.sync()`, as pipelines do between stages.

    Args:
        function: a function of an importable module; its rank is in the current context, as always. The tensors that it
            returns, in any nesting, are the last program's results: a gradient that is not returned is not computed.
        arguments: the arguments of each rank: CPU tensors, which are copied to the device, and other values. Pass
            `[()] * world_size` for none.

    Raises:
        ProgramsDiffer: the ranks' programs are not the same.
        ReplicaGroupsWrong: a collective's groups do not fit the mesh.
        WorkerError: lowering or executing failed.
    """
    traces = _lower(LoweringRequest(mesh, function, arguments))
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

    `state()` returns the tensors whose final values are wanted (parameters, optimizer state; see `training_state`), in
    any nesting. All tensors that are alive after a step exist in the next one. Steps are lowered one by one, so that a
    program that changes from step to step, and would be compiled anew each time, shows in `programs`.

    Raises:
        as in `replay`.
    """
    traces = _lower(LoweringRequest(mesh, setup, arguments, batches))
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
    """The values of all ranks, as programs compute them; each is dropped after its last use."""

    def __init__(self, traces: Sequence[RankTrace]) -> None:
        self._values: list[dict[int, Array]] = [dict(trace.known) for trace in traces]
        self._uses = [_uses(trace) for trace in traces]

    def run(self, joints: Sequence[Joint]) -> None:
        for joint in joints:
            ours = list(zip(joint.ranks, joint.launches))
            done = all(set(x.gives) <= self._values[rank].keys() for rank, x in ours)  # lowering executed it already
            arguments = [[self._use(rank, number) for number in x.takes] for rank, x in ours]
            if done:
                continue
            results = _workers["execution"].ask(
                execution.ExecutionRequest(joint.program.fingerprint, joint.program.proto, joint.ranks, arguments)
            )
            for (rank, x), outputs in zip(ours, results):
                self._values[rank].update((n, value) for n, value in zip(x.gives, outputs) if self._uses[rank][n])

    def output(self, rank: int, step: LoweredStep) -> Any:
        def fill(leaf: Any) -> Any:
            return from_array(self._use(rank, leaf.number)) if isinstance(leaf, DeviceValue) else leaf

        return pytree.tree_map(fill, step.output, is_leaf=_is_value)

    def state(self, rank: int, step: LoweredStep) -> dict[str, torch.Tensor]:
        return {name: from_array(self._use(rank, number)) for name, number in step.state.items()}

    def _use(self, rank: int, number: int) -> Array:
        self._uses[rank][number] -= 1
        values = self._values[rank]
        return values[number] if self._uses[rank][number] else values.pop(number)


def _uses(trace: RankTrace) -> Counter[int]:
    """Counts the uses of each value: as an input, in a step's result, or in the last state."""
    uses: Counter[int] = Counter(trace.last.state.values())
    for step in (trace.setup, *trace.steps):
        uses.update(number for launch in step.launches for number in launch.takes)
        leaves = pytree.tree_leaves(step.output, is_leaf=_is_value)
        uses.update(leaf.number for leaf in leaves if isinstance(leaf, DeviceValue))
    return uses


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, DeviceValue)


def _aligned(traces: Sequence[RankTrace], mesh: Mesh) -> tuple[list[Joint], list[list[Joint]]]:
    """Returns the programs that ranks run together, in the set-up and in each step."""

    def together(steps: Sequence[LoweredStep], place: str) -> list[Joint]:
        return align([step.launches for step in steps], mesh, place)

    setup = together([trace.setup for trace in traces], "the set-up")
    steps = zip(*(trace.steps for trace in traces))
    return setup, [together(step, f"step {number}") for number, step in enumerate(steps)]


def _numbered(steps: Sequence[Sequence[Joint]]) -> tuple[list[Program], list[list[ProgramRun]]]:
    """Returns the different programs, and each step's runs of them."""
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
            of_step.append(ProgramRun(places[key], joint.ranks))
        runs.append(of_step)
    return programs, runs


def _only(programs: Sequence[Program]) -> Program:
    if len(programs) != 1:
        raise RuntimeError(f"there are {len(programs)} programs, not one: read `replay(...).programs`")
    return programs[0]


def close() -> None:
    """Ends the two processes, which otherwise stay for the next replay."""
    for worker in _workers.values():
        worker.close()
    _workers.clear()


atexit.register(close)


def _lower(request: LoweringRequest) -> list[RankTrace]:
    world_size = request.mesh.world_size
    if len(request.arguments) != world_size:
        raise ValueError(
            f"{len(request.arguments)} lists of arguments for {world_size} ranks; pass one list for each rank"
        )
    _check_batches(request)
    if request.function.__module__ == "__main__":
        raise ValueError(
            f"{request.function.__qualname__} is defined in the running script, which the lowering process cannot "
            "import: move it to a module"
        )
    _start(world_size)
    traces: list[RankTrace] = _workers["lowering"].ask(request)
    return traces


def _check_batches(request: LoweringRequest) -> None:
    for rank, arguments in enumerate(request.arguments):
        if not isinstance(arguments, (tuple, list)):
            raise TypeError(f"arguments of rank {rank}: must be a tuple of the function's arguments; got {arguments!r}")
    if request.batches is None:
        return
    steps = [len(batches) for batches in request.batches]
    if len(steps) != request.mesh.world_size or len(set(steps)) > 1:
        raise ValueError(
            f"batches: got lists for {len(steps)} ranks, of {steps} steps; pass one list for each of the "
            f"{request.mesh.world_size} ranks, all of equal length"
        )
    for rank, batches in enumerate(request.batches):
        for number, batch in enumerate(batches):
            if not isinstance(batch, (tuple, list)):
                raise TypeError(
                    f"batch {number} of rank {rank}: must be a tuple of the step's arguments; got {batch!r}"
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


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Returns all tensors that a training step starts from.

    These are the parameters and buffers of the model, and the master weights, state and tensor options (a learning rate
    on the device) of the optimizer, and of the optimizer that it wraps.
    """
    state: dict[str, Any] = {"model": {**dict(model.named_parameters()), **dict(model.named_buffers())}}
    optimizers = {"optimizer": optimizer, "base": getattr(optimizer, "base_optimizer", None)}
    for name, stepped in optimizers.items():
        if stepped is None:
            continue
        params = [param for group in stepped.param_groups for param in group["params"]]
        state[name] = {
            "params": params,
            "state": [dict(stepped.state[param]) if param in stepped.state else {} for param in params],
            "options": [{key: group[key] for key in group if key != "params"} for group in stepped.param_groups],
        }
    return state
