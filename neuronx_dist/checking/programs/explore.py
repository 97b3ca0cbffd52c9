"""Which ranks to play: two ranks run the same program unless it asked about its rank and would have got two answers.

A rank of each stage is played first. Ranks that would have been told the same all the way run the same program; one of
those left over is played next, from the first phase on in which it would have been told otherwise. Python code can read
an int without asking it (`items[rank]`), so the last rank of each kind is played too, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ...comm.backends.observed import Event
from ...comm.rank_tables import RankTable
from ...mesh import Mesh
from ...pipeline.run.comparison import Pieces
from ...pipeline.schedule import Kind, Schedule, Task
from .calls import Deadline, Op, OutOfTime
from .cells import Cells
from .played import PHASES, Phase, Played, Subject
from .seeds import differing_seeds
from .wire import Wire

__all__ = ["Explored", "PhaseFailure", "Programs", "RankProgram", "explore"]

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
        schedule: of all microbatches of its pipeline model; None: there is none.
        pieces: how that is cut; None: it is not.
    """

    rank: int
    phases: dict[str, Phase]
    failure: PhaseFailure | None = None
    schedule: Schedule | None = None
    pieces: Pieces | None = None

    def __post_init__(self) -> None:
        self.events: list[Event] = [event for phase in self.phases.values() for event in phase.events]
        self.ops: list[Op] = [op for phase in self.phases.values() for op in phase.ops]

    def signature(self) -> Any:
        """Equal for programs that do the same, whatever their ranks."""
        events = tuple((e.verb, e.axis, e.op, e.shape, e.dtype, peer_index(e), e.tag, e.pairs) for e in self.events)
        return events, tuple((op.name, op.scalars, op.draw and op.draw.seed) for op in self.ops)

    def lines(self) -> Any:
        """Equal for programs that do the same at the same lines, be it on other stages, with other neighbours."""
        events = tuple((e.verb, e.axis, e.op, e.shape, e.dtype, e.where, e.inside) for e in self.events)
        return events, tuple((op.name, op.scalars, op.site) for op in self.ops)


def peer_index(event: Event) -> int | None:
    """The other end of a message, or the source of a broadcast, as an index in the group."""
    return None if event.peer is None else event.ranks.index(event.peer)


class Programs(Mapping[int, RankProgram]):
    """The program of each rank, kept for whole cells of ranks; a rank that time did not suffice for has none.

    Attributes:
        cells: the ranks, those apart that a program told apart.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.cells = Cells(mesh)
        self._shared: list[tuple[RankProgram, dict[RankTable, Any]]] = []  # with what a rank is told that runs it
        self._alone: dict[int, RankProgram] = {}
        self._known: dict[int, RankProgram | None] = {}  # of representatives

    def add(self, program: RankProgram, reads: Iterable[RankTable]) -> None:
        """What all ranks of the program's stage do that are told the same, if they have no program yet."""
        coordinates = self.cells.mesh.coordinates(program.rank)
        answers = {table: table.at(coordinates) for table in reads}
        for table in answers:
            self.cells.cut(table)
        self._shared.append((program, answers))
        self._known.clear()

    def add_alone(self, program: RankProgram) -> None:
        """What one rank does, and no other."""
        self.cells.isolate(program.rank)
        self._alone[program.rank] = program
        self._known.clear()

    def missing(self, stage: int) -> int | None:
        """The first rank of a stage that has no program yet."""
        return next((rank for rank in self.cells.representatives(stage) if self._of(rank) is None), None)

    def distinct(self) -> list[RankProgram]:
        """Each program once, in the order of its first rank."""
        programs = map(self._of, self.cells.representatives())
        return list({id(program): program for program in programs if program is not None}.values())

    def backwards(self, program: RankProgram) -> Iterator[int]:
        """The ranks that run it, from the last on."""
        return self.cells.backwards(rank for rank in self.cells.representatives() if self._of(rank) is program)

    def _of(self, representative: int) -> RankProgram | None:
        if representative not in self._known:
            at = self.cells.mesh.coordinates(representative)
            shared = (
                program
                for program, answers in self._shared
                if self.cells.mesh.coordinate("pp", program.rank) == at["pp"]
                and all(table.at(at) == answer for table, answer in answers.items())
            )
            self._known[representative] = self._alone.get(representative) or next(shared, None)
        return self._known[representative]

    def __getitem__(self, rank: int) -> RankProgram:
        program = self._of(self.cells.representative(rank))
        if program is None:
            raise KeyError(rank)
        return program

    def __iter__(self) -> Iterator[int]:
        return (rank for rank in range(self.cells.mesh.world_size) if rank in self)

    def __len__(self) -> int:
        return sum(self.cells.count(rank) for rank in self.cells.representatives() if self._of(rank) is not None)


@dataclass
class Explored:
    """The programs of all ranks.

    Attributes:
        programs: by rank.
        plays: how many ranks were played, in whole or in part.
        finished: whether time sufficed.
        wire: types that stages sent one another.
        trusted, assumed: declarations that were believed and what was taken for granted: `(line, words)`, each once.
    """

    mesh: Mesh
    plays: int = 0
    finished: bool = True
    wire: Wire = field(default_factory=Wire)
    trusted: dict[tuple[str, str], None] = field(default_factory=dict)
    assumed: dict[tuple[str, str], None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.programs = Programs(self.mesh)

    @property
    def distinct(self) -> list[RankProgram]:
        """Each program once, in the order of its first rank."""
        return self.programs.distinct()


def explore(subject: Subject, mesh: Mesh, deadline: Deadline, twice: bool = True) -> Explored:
    """Plays a step of as many ranks as there can be different programs.

    Once more, where random numbers that were taken for equal turn out to be drawn from different seeds.

    Args:
        twice: play a second rank of each kind too.
    """
    while True:
        explored = _explore(subject, mesh, deadline, twice)
        if subject.level is None:  # no types, which seeds could contradict
            return explored
        seeds = differing_seeds(mesh, ((program.rank, program.ops) for program in explored.distinct))
        if not explored.finished or not seeds:
            return explored
        subject.seeds.update({key: axes | subject.seeds.get(key, frozenset()) for key, axes in seeds.items()})


def _explore(subject: Subject, mesh: Mesh, deadline: Deadline, twice: bool) -> Explored:
    explored = Explored(mesh)
    models: list[list[Played]] = [[] for _ in range(mesh.pp)]  # that were built so far, by stage
    try:
        for stage, chunk in _order(subject, deadline, explored, models[0]):
            if chunk is None:
                _explore_stage(subject, stage, deadline, explored, models[stage])
            else:
                _play_ahead(subject, stage, chunk, deadline, explored, models[stage])
            if any(program.failure is not None for program in explored.distinct):
                break  # the next stages are given what this one sends
        if twice:
            _confirm(subject, deadline, explored)
    except OutOfTime:
        explored.finished = False
    return explored


def _order(
    subject: Subject, deadline: Deadline, explored: Explored, models: list[Played]
) -> list[tuple[int, int | None]]:
    """The stages in the order in which to play them: with the chunk that ends the play, or to the end of it (None).

    Types travel with messages: before a stage is played to its end, all that it receives has to have been sent.
    """
    rank = explored.programs.missing(0)
    assert rank is not None
    first = Played(subject, explored.mesh, rank, deadline, explored.wire)
    built = _run(first, rank, PHASES[:1])
    if built.failure is not None:
        explored.plays += 1
        explored.programs.add(built, first.answers())
        return []
    models.append(first)
    schedule = first.schedule
    if schedule is None or schedule.num_stages == 1:
        return [(stage, None) for stage in range(explored.mesh.pp)]
    order: list[tuple[int, int | None]] = []
    for stage, chunk in map(schedule.holder, range(schedule.num_virtual_stages)):
        if chunk == schedule.num_chunks - 1:
            order.append((stage, None))
        elif subject.level is not None and schedule.is_message(stage, Task(Kind.SEND_FORWARD, chunk, 0)):
            order.append((stage, chunk))
    return order


def _play_ahead(
    subject: Subject, stage: int, chunk: int, deadline: Deadline, explored: Explored, models: list[Played]
) -> None:
    """Plays a rank of a stage until this chunk has sent what it makes; a failure is the program of that rank."""
    rank = explored.programs.missing(stage)
    assert rank is not None
    played = models[0] if models else Played(subject, explored.mesh, rank, deadline, explored.wire)
    program = _run(played, rank, PHASES[1:2] if models else PHASES[:2], halt_after=chunk)
    models[:] = [played]
    if program.failure is not None:
        explored.plays += 1
        explored.programs.add(program, played.answers())


def _explore_stage(subject: Subject, stage: int, deadline: Deadline, explored: Explored, models: list[Played]) -> None:
    while (rank := explored.programs.missing(stage)) is not None:
        played, program = _play(subject, rank, deadline, explored, models)
        explored.programs.add(program, played.answers())


def _play(
    subject: Subject, rank: int, deadline: Deadline, explored: Explored, models: list[Played]
) -> tuple[Played, RankProgram]:
    """Plays `rank`, from a model that it would have built too, if there is one."""
    explored.plays += 1
    for played in [*models]:
        if not played.same_program(rank, ("build",)):
            continue
        phases: tuple[str, ...] = PHASES[1:]
        if "train" in played.phases and played.same_program(rank, ("train",)):
            phases = PHASES[2:]
        program = _run(played, rank, phases)
        _note_declarations(played, explored)
        if program.failure is not None:
            models.remove(played)
        # While it ran, more may have been asked of what the model took up when another rank built it.
        if all(played.same_program(rank, (name,)) for name in PHASES if name not in phases):
            return played, program
    played = Played(subject, explored.mesh, rank, deadline, explored.wire)
    program = _run(played, rank, PHASES)
    _note_declarations(played, explored)
    if program.failure is None:
        models.append(played)
    return played, program


def _note_declarations(played: Played, explored: Explored) -> None:
    if played.types is not None:
        explored.trusted.update(dict.fromkeys((where, text) for text, where in played.types.trusted))
        explored.assumed.update(dict.fromkeys((where, text) for text, where in played.types.assumed))


def _run(played: Played, rank: int, phases: Iterable[str], halt_after: int | None = None) -> RankProgram:
    failure = None
    play: dict[str, Callable[[], Any]] = {
        "build": played.build,
        "train": lambda: played.train(rank) if halt_after is None else played.train_until_sent(rank, halt_after),
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
    pieces = played.model.comparison.pieces if played.schedule is not None else None
    return RankProgram(rank, dict(played.phases), failure, played.schedule, pieces)


def _confirm(subject: Subject, deadline: Deadline, explored: Explored) -> None:
    """Plays the last rank of each kind, and of small programs all; where one does something else, all of that kind.

    Stages that do the same, line by line, are one kind: of the middle stages of a large pipeline one is played again.
    """
    left = CONFIRMED_OPS
    confirmed: set[Any] = set()
    models: dict[int, list[Played]] = {}  # by stage: what two kinds have in common is played once more, not twice
    programs = explored.programs
    kinds = []
    for program in explored.distinct:
        others = (rank for rank in programs.backwards(program) if rank != program.rank)
        last = next(others, None)
        if last is not None and program.failure is None:
            kinds.append((last, others, program))
    for last, others, program in sorted(kinds, key=lambda kind: -kind[0]):
        signature = program.signature()
        is_same, is_known = True, program.lines() in confirmed
        for position, rank in enumerate(chain([last], others)):
            if (position or is_known) and is_same and left < len(program.ops):
                break
            left -= len(program.ops)
            known = [] if position else models.setdefault(explored.mesh.coordinate("pp", rank), [])
            _, second = _play(subject, rank, deadline, explored, known)
            if second.failure is not None or second.signature() != signature:
                is_same = False
                programs.add_alone(second)
        if is_same:
            confirmed.add(program.lines())
