"""The choice of the ranks to play: two ranks run one program unless it reads a number that differs between them.

A rank of each stage is played first. Ranks that would read the same answers throughout run the same program; one of the
others is played next, from the first phase on in which it would read another answer. Python code can use an int without
a read that is seen (`items[rank]`), so the last rank of each kind is played too, and compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ...comm.backends.observed import Event
from ...comm.ranks.rank_tables import RankTable
from ...mesh import DENSE_AXES, Mesh
from ...pipeline.run.comparison import CutStatement
from ...pipeline.schedule import Kind, Schedule, Task
from ...program.isolation import without_memos
from ...spmd.axes import mesh_atoms
from ..types.handlers.one_rank import Claim
from .calls import Deadline, Draw, Op, OutOfTime
from .cells import Cells
from .message_types import MessageTypes
from .played import PHASES, Phase, Played, Subject

__all__ = ["Explored", "PhaseFailure", "ProgramsByRank", "RankProgram", "axes_between", "differing_seeds", "explore"]

CONFIRMED_OPS = 3_000  # operators to spend on ranks whose programs should be equal


@dataclass(frozen=True)
class PhaseFailure:
    """A phase that raised."""

    phase: str
    rank: int
    error: BaseException


@dataclass
class RankProgram:
    """The program of some ranks in a step.

    Attributes:
        rank: the rank that was played.
        phases: by name, as far as they were played.
        failure: the failure that ended it early.
        schedule: of all microbatches of its pipeline model; None: there is none.
        pieces: the pieces of that model; None: it is not cut.
    """

    rank: int
    phases: dict[str, Phase]
    failure: PhaseFailure | None = None
    schedule: Schedule | None = None
    pieces: CutStatement | None = None

    def __post_init__(self) -> None:
        self.events: list[Event] = [event for phase in self.phases.values() for event in phase.events]
        self.ops: list[Op] = [op for phase in self.phases.values() for op in phase.ops]
        self.claims: list[Claim] = [claim for phase in self.phases.values() for claim in phase.claims]

    def signature(self) -> Any:
        """A key that is equal for equal programs, whatever their ranks."""
        events = tuple((e.verb, e.axis, e.op, e.shape, e.dtype, peer_index(e), e.tag, e.pairs) for e in self.events)
        return events, tuple((op.name, op.scalars, op.draw and op.draw.seed) for op in self.ops)

    def lines(self) -> Any:
        """A key that is equal for programs with equal calls at equal lines, also on other stages, with other peers."""
        events = tuple((e.verb, e.axis, e.op, e.shape, e.dtype, e.where, e.inside) for e in self.events)
        return events, tuple((op.name, op.scalars, op.site) for op in self.ops)


def peer_index(event: Event) -> int | None:
    """The other end of a message, or the source of a broadcast, as an index in the group."""
    return None if event.peer is None else event.ranks.index(event.peer)


class ProgramsByRank(Mapping[int, RankProgram]):
    """The program of each rank, stored by cell; a rank that was not reached in time has none.

    Attributes:
        cells: the cells of ranks, cut by what programs read.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.cells = Cells(mesh)
        self._shared: list[tuple[RankProgram, dict[RankTable, Any]]] = []  # with the answers that it reads
        self._alone: dict[int, RankProgram] = {}
        self._known: dict[int, RankProgram | None] = {}  # of representatives

    def add(self, program: RankProgram, reads: Iterable[RankTable]) -> None:
        """Assigns this program to every rank of its stage that would read the same answers and has none yet."""
        coordinates = self.cells.mesh.coordinates(program.rank)
        answers = {table: table.at(coordinates) for table in reads}
        for table in answers:
            self.cells.cut(table)
        self._shared.append((program, answers))
        self._known.clear()

    def add_alone(self, program: RankProgram) -> None:
        """Assigns this program to its own rank alone."""
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
        """The ranks that run a program, from the last on."""
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
        message_types: types of the messages between stages.
        trusted, assumed: declarations that were not proven, and assumptions: `(line, words)`, each once.
    """

    mesh: Mesh
    plays: int = 0
    finished: bool = True
    message_types: MessageTypes = field(default_factory=MessageTypes)
    trusted: dict[tuple[str, str], None] = field(default_factory=dict)
    assumed: dict[tuple[str, str], None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.programs = ProgramsByRank(self.mesh)

    @property
    def distinct(self) -> list[RankProgram]:
        """Each program once, in the order of its first rank."""
        return self.programs.distinct()


@without_memos()
def explore(subject: Subject, mesh: Mesh, deadline: Deadline, twice: bool = True) -> Explored:
    """Plays a step of one rank for each program that can differ.

    It is played again where random numbers that were assumed to be equal turn out to have different seeds.

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
    models: list[list[Played]] = [[] for _ in range(mesh.pp)]  # the models that were built so far, by stage
    try:
        order = _order(subject, deadline, explored, models[0])
        if order and models[0] and models[0][0].schedule is None:
            _explore_in_turns(subject, deadline, explored, models)
            order = []
        for stage, chunk in order:
            if chunk is None:
                _explore_stage(subject, stage, deadline, explored, models[stage])
            else:
                _play_ahead(subject, stage, chunk, deadline, explored, models[stage])
            if any(program.failure is not None for program in explored.distinct):
                break  # the next stages receive the messages of this one
        if twice:
            _confirm(subject, deadline, explored)
    except OutOfTime:
        explored.finished = False
    return explored


def _order(
    subject: Subject, deadline: Deadline, explored: Explored, models: list[Played]
) -> list[tuple[int, int | None]]:
    """The stages in the order in which to play them, each with the chunk that ends the play (None: the last one).

    Types travel with messages: before a stage is played to its end, all that it receives has to have been sent.
    """
    rank = explored.programs.missing(0)
    assert rank is not None
    first = Played(subject, explored.mesh, rank, deadline, explored.message_types)
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
    """Plays a rank of a stage until this chunk has sent its results; a failure becomes the program of that rank."""
    rank = explored.programs.missing(stage)
    assert rank is not None
    played = models[0] if models else Played(subject, explored.mesh, rank, deadline, explored.message_types)
    program = _run(played, rank, PHASES[1:2] if models else PHASES[:2], halt_after=chunk)
    models[:] = [played]
    if program.failure is not None:
        explored.plays += 1
        explored.programs.add(program, played.answers())


def _explore_stage(subject: Subject, stage: int, deadline: Deadline, explored: Explored, models: list[Played]) -> bool:
    """Plays the ranks of a stage; returns whether to the end, which a message that was not sent yet prevents."""
    while (rank := explored.programs.missing(stage)) is not None:
        played, program = _play(subject, rank, deadline, explored, models)
        if stage in explored.message_types.waiting and program.failure is None:
            explored.plays -= 1
            return False
        explored.programs.add(program, played.answers())
    return True


def _explore_in_turns(subject: Subject, deadline: Deadline, explored: Explored, models: list[list[Played]]) -> None:
    """Plays stages that send and receive by themselves, until each has received all that it waits for."""
    messages = explored.message_types
    left = [*range(explored.mesh.pp)]
    while left:
        before = len(left), len(messages.by_hand)
        for stage in [*left]:
            if _explore_stage(subject, stage, deadline, explored, models[stage]):
                left.remove(stage)
            if any(program.failure is not None for program in explored.distinct):
                return
        messages.all_wait = before == (len(left), len(messages.by_hand))


def _play(
    subject: Subject, rank: int, deadline: Deadline, explored: Explored, models: list[Played]
) -> tuple[Played, RankProgram]:
    """Plays `rank`, starting from an earlier model that this rank would build too, if there is one."""
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
        # This play may have read more of the numbers that the model stored when another rank built it.
        if all(played.same_program(rank, (name,)) for name in PHASES if name not in phases):
            return played, program
    played = Played(subject, explored.mesh, rank, deadline, explored.message_types)
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
        "train": lambda: played.train_until_halted(rank, halt_after),
        "step": lambda: played.step(rank),
    }
    for name in phases:
        try:
            if play[name]() is False:
                break
        except OutOfTime:
            raise
        except Exception as error:  # noqa: B902 - a finding, whatever it is
            failure = PhaseFailure(name, rank, error)
            break
    pieces = played.model.comparison.pieces if played.schedule is not None else None
    return RankProgram(rank, dict(played.phases), failure, played.schedule, pieces)


def _confirm(subject: Subject, deadline: Deadline, explored: Explored) -> None:
    """Plays other ranks that share a program again, last rank first, and separates those that run differently.

    Stages with equal programs, line by line, are one kind: one middle stage of a large pipeline is played again.
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


# --- random numbers that ranks of a stage draw from different seeds, though their types say that they are equal ---


def axes_between(mesh: Mesh, one: int, other: int) -> list[str]:
    """Atoms of the axes in whose coordinates two ranks of a stage differ."""
    table, here, there = mesh_atoms(mesh), mesh.coordinates(one), mesh.coordinates(other)
    return [atom for axis in DENSE_AXES if axis != "pp" and here[axis] != there[axis] for atom in table[axis]]


def differing_seeds(mesh: Mesh, programs: Iterable[tuple[int, Sequence[Op]]]) -> dict[tuple[str, int], frozenset[str]]:
    """Plain seeds, by the line of the draw, that differ along axes along which the numbers were assumed equal.

    Args:
        programs: the rank and the operators of each program.
    """
    first: dict[int, tuple[int, Mapping[str, list[Draw]]]] = {}
    pairs = []
    for rank, ops in programs:
        drawn = rank, _draws(ops)
        one = first.setdefault(mesh.coordinate("pp", rank), drawn)
        pairs.append((axes_between(mesh, one[0], rank), one[1], drawn[1]))
    differing: dict[tuple[str, int], frozenset[str]] = {}
    for axes, one_draws, other_draws in sorted(pairs, key=lambda pair: len(pair[0])):
        for where, draws in one_draws.items():
            for a, b in zip(draws, other_draws.get(where, ())):
                known = differing.get((where, a.seed), frozenset())
                if a.seed == b.seed or known.intersection(axes) or any(map(a.stream.differs, axes)):
                    continue
                for draw in (a, b):
                    key = where, draw.seed
                    differing[key] = differing.get(key, frozenset()).union(axes)
    return differing


def _draws(ops: Sequence[Op]) -> Mapping[str, list[Draw]]:
    draws = defaultdict(list)
    for op in ops:
        if op.draw is not None and isinstance(op.draw.seed, int):
            draws[op.draw.where].append(op.draw)
    return draws
