"""Which ranks to play: two ranks run the same program unless it asked about its rank and would have got two answers.

A rank of each stage is played first. Ranks that would have been told the same all the way run the same program; one of
those left over is played next, from the first phase on in which it would have been told otherwise. Python code can read
an int without asking it (`items[rank]`), so the last rank of each kind is played too, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ...comm.backends.observed import Event
from ...mesh import DENSE_AXES, Mesh
from ...pipeline.schedule import Schedule
from .calls import Deadline, Op, OutOfTime
from .played import PHASES, Phase, Played, Subject
from .seeds import differing_seeds
from .wire import Wire

__all__ = ["Explored", "PhaseFailure", "RankProgram", "explore"]

CONFIRMED_OPS = 3_000  # operators to spend on ranks that should do the same


@dataclass(frozen=True)
class PhaseFailure:
    """A phase that raised."""

    phase: str
    rank: int
    error: BaseException


@dataclass
class RankProgram:
    """What some ranks do in a step.

    Attributes:
        rank: the one that was played.
        phases: by name, as far as they were played.
        failure: what ended it early.
    """

    rank: int
    phases: dict[str, Phase]
    failure: PhaseFailure | None = None

    def __post_init__(self) -> None:
        self.events: list[Event] = [event for phase in self.phases.values() for event in phase.events]
        self.ops: list[Op] = [op for phase in self.phases.values() for op in phase.ops]

    def signature(self) -> Any:
        """Equal for programs that do the same, whatever their ranks."""
        events = tuple((e.verb, e.axis, e.op, e.shape, e.dtype, peer_index(e), e.tag, e.pairs) for e in self.events)
        return events, tuple((op.name, op.scalars, op.draw and op.draw.seed) for op in self.ops)


def peer_index(event: Event) -> int | None:
    """The other end of a message, or the source of a broadcast, as an index in the group."""
    return None if event.peer is None else event.ranks.index(event.peer)


@dataclass
class Explored:
    """The programs of all ranks.

    Attributes:
        programs: by rank; ranks may share one. A rank that time did not suffice for is missing.
        schedule: of the pipeline model; of the longest, if ranks made different ones; None without a pipeline.
        plays: how many ranks were played, in whole or in part.
        finished: whether time sufficed.
        wire: types that stages sent one another.
        trusted, assumed: declarations that were believed and what was taken for granted, in words, by line.
    """

    mesh: Mesh
    programs: dict[int, RankProgram] = field(default_factory=dict)
    schedule: Schedule | None = None
    plays: int = 0
    finished: bool = True
    wire: Wire = field(default_factory=Wire)
    trusted: dict[str, str] = field(default_factory=dict)
    assumed: dict[str, str] = field(default_factory=dict)

    @property
    def distinct(self) -> list[RankProgram]:
        """Each program once, in the order of its first rank."""
        return list({id(self.programs[rank]): self.programs[rank] for rank in sorted(self.programs)}.values())

    def representatives(self) -> list[int]:
        """Ranks that show all there is to compare: one coordinate of each axis along which all programs are shared."""
        mesh, programs = self.mesh, self.programs
        kept = sorted(programs)
        coordinates = {rank: mesh.coordinates(rank) for rank in kept}
        for axis in DENSE_AXES:
            first: dict[Any, RankProgram] = {}
            shared = all(
                first.setdefault(tuple(c for a, c in coordinates[rank].items() if a in DENSE_AXES and a != axis), p)
                is p
                for rank, p in programs.items()
            )
            if shared:
                kept = [rank for rank in kept if coordinates[rank][axis] == 0]
        return kept


def explore(subject: Subject, mesh: Mesh, deadline: Deadline, twice: bool = True) -> Explored:
    """Plays a step of as many ranks as there can be different programs.

    Once more, where random numbers that were taken for equal turn out to be drawn from different seeds.

    Args:
        twice: play a second rank of each kind too.
    """
    while True:
        explored = _explore(subject, mesh, deadline, twice)
        seeds = differing_seeds(mesh, ((program.rank, program.ops) for program in explored.distinct))
        if not explored.finished or not seeds:
            return explored
        subject.seeds.update({key: axes | subject.seeds.get(key, frozenset()) for key, axes in seeds.items()})


def _explore(subject: Subject, mesh: Mesh, deadline: Deadline, twice: bool) -> Explored:
    explored = Explored(mesh)
    try:
        for ranks in _stages(mesh):
            _explore_stage(subject, ranks, deadline, explored)
            if any(explored.programs[rank].failure is not None for rank in ranks):
                break  # the next stages are given what this one sends
        if twice:
            _confirm(subject, deadline, explored)
    except OutOfTime:
        explored.finished = False
    return explored


def _stages(mesh: Mesh) -> list[list[int]]:
    stages: list[list[int]] = [[] for _ in range(mesh.pp)]
    for rank in range(mesh.world_size):
        stages[mesh.coordinate("pp", rank)].append(rank)
    return stages


def _explore_stage(subject: Subject, ranks: list[int], deadline: Deadline, explored: Explored) -> None:
    left = list(ranks)
    models: list[Played] = []  # that were built so far
    while left:
        rank = left[0]
        played, program = _play(subject, rank, deadline, explored, models)
        same = [other for other in left if other == rank or played.same_program(other)]
        explored.programs.update(dict.fromkeys(same, program))
        left = [other for other in left if other not in set(same)]
        schedules = [each for each in (explored.schedule, played.schedule) if each is not None]
        explored.schedule = max(schedules, key=lambda each: each.num_microbatches, default=None)


def _play(
    subject: Subject, rank: int, deadline: Deadline, explored: Explored, models: list[Played]
) -> tuple[Played, RankProgram]:
    """Plays `rank`, from a model that it would have built too, if there is one."""
    explored.plays += 1
    for played in models:
        if not played.same_program(rank, ("build",)):
            continue
        phases: tuple[str, ...] = PHASES[1:]
        if "train" in played.phases and played.same_program(rank, ("train",)):
            phases = PHASES[2:]
        program = _run(played, rank, phases)
        # While it ran, more may have been asked of what the model took up when another rank built it.
        if all(played.same_program(rank, (name,)) for name in PHASES if name not in phases):
            return played, program
    played = Played(subject, explored.mesh, rank, deadline, explored.wire)
    program = _run(played, rank, PHASES)
    if played.types is not None:
        explored.trusted.update((where, text) for text, where in played.types.trusted)
        explored.assumed.update((where, text) for text, where in played.types.assumed)
    if program.failure is None:
        models.append(played)
    return played, program


def _run(played: Played, rank: int, phases: Iterable[str]) -> RankProgram:
    failure = None
    play: dict[str, Callable[[], Any]] = {
        "build": played.build,
        "train": lambda: played.train(rank),
        "step": lambda: played.step(rank),
    }
    for name in phases:
        try:
            play[name]()
        except OutOfTime:
            raise
        except Exception as error:  # noqa: B902 - a finding, whatever it is
            failure = PhaseFailure(name, rank, error)
            break
    return RankProgram(rank, dict(played.phases), failure)


def _confirm(subject: Subject, deadline: Deadline, explored: Explored) -> None:
    """Plays the last rank of each kind, and of small programs all; where one does something else, all of that kind."""
    left = CONFIRMED_OPS
    models: dict[int, list[Played]] = {}  # by stage: what two kinds have in common is played once more, not twice
    kinds = [
        (program, [r for r, other in explored.programs.items() if other is program]) for program in explored.distinct
    ]
    for program, same in sorted(kinds, key=lambda kind: -kind[1][-1]):
        if len(same) == 1 or program.failure is not None:
            continue
        signature = program.signature()
        is_same = True
        for position, rank in enumerate(reversed(same[1:])):
            if position and is_same and left < len(program.ops):
                break
            left -= len(program.ops)
            known = [] if position else models.setdefault(explored.mesh.coordinate("pp", rank), [])
            _, second = _play(subject, rank, deadline, explored, known)
            if second.failure is not None or second.signature() != signature:
                is_same = False
                explored.programs[rank] = second
