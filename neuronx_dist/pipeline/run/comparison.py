"""Comparison of the ranks of a pipeline: do they cut the same model in the same way, and run the same passes?

A model is compared when it is cut, and again when the first batch has shown the order of its calls. A pass is compared,
before its first message, if this rank has not run an equal one before, or if the last pass had another schedule; other
passes cost nothing. A rank need not know whether another rank compares: a rank that goes on as before answers from its
board what it runs (`comm.board`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from ... import comm
from ...mesh import Mesh
from ..cut.placement import Placement
from ..schedule import Schedule
from .stage_program import StageProgram

__all__ = ["SAME_ARGUMENTS", "PipelineComparison", "CutStatement", "difference"]

SAME_ARGUMENTS = "Give NxDPPModel the same model and the same arguments on all ranks."

_TENSORS, _PLACES = "parameters and buffers", "the stages that hold parameters and buffers"
_SIZE, _HOLDERS, _CUTS = "virtual_pipeline_size", "the stages that hold the pieces of the model", "pipeline_cuts"
_REMEMBERED = 32  # changes of what this rank runs


class CutStatement(NamedTuple):
    """Facts about a cut model that must be equal on all ranks of a pipeline.

    Attributes:
        statement: values that JSON can hold, by name, the most informative first.
        tables: by the same names, tables (tensor name -> value) of which the statement has only a digest.
    """

    statement: dict[str, Any]
    tables: dict[str, dict[str, Any]]

    def in_full(self) -> dict[str, Any]:
        """The statement with tables in place of digests."""
        return {**self.statement, **self.tables}

    @classmethod
    def cut(cls, cuts: Sequence[str], schedule: Schedule) -> CutStatement:
        """The statement of the cuts alone: a stage may have changed its layers since (adapters, dtypes)."""
        return cls({_SIZE: schedule.num_chunks, _HOLDERS: schedule.holders, _CUTS: [*cuts]}, {})

    @classmethod
    def of(
        cls,
        module: nn.Module,
        cuts: Sequence[str],
        placement: Placement,
        schedule: Schedule,
        options: Mapping[str, Any] | None = None,
    ) -> CutStatement:
        """The full statement, of a model that is not changed yet. `options`: arguments that must be equal too."""
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        tensors = {name: f"{[*map(int, x.shape)]} {_name(x.dtype)}" for name, x in named}
        places = {name: sorted(placement.stages(name) or range(schedule.num_stages)) for name in tensors}
        statement = {
            _TENSORS: _digest(tensors),
            **cls.cut(cuts, schedule).statement,
            _PLACES: _digest(places),
            **(options or {}),
        }
        return cls(statement, {_TENSORS: tensors, _PLACES: places})


class PipelineComparison:
    """Compares this rank's model, and its passes, with the other ranks of the pipeline.

    Attributes:
        pieces: the statement of the cut model, saved for a check, which plays ranks in turn and compares them itself.
    """

    def __init__(self) -> None:
        self.pieces: CutStatement | None = None
        self._model: int | None = None
        self._moments: dict[str, int] = {}
        self._passes = _Passes()
        self._latest: tuple[Schedule, StageProgram] | None = None
        self._orders: WeakKeyDictionary[Schedule, str] = WeakKeyDictionary()
        self._equal: set[str] = set()  # digests of passes that were compared

    def __deepcopy__(self, memo: Any) -> PipelineComparison:
        return PipelineComparison()  # a copy of a model is another model

    @staticmethod
    def is_possible() -> bool:
        """Returns whether other ranks can be compared: not in a check or a replay, which play ranks in turn."""
        context = comm.current()
        return context.backend.board is not None and context.mesh.pp > 1

    def has_been_at(self, moment: str) -> bool:
        """Returns whether pieces have been compared at this moment."""
        return moment in self._moments

    def compare_pieces(self, moment: str, pieces: CutStatement) -> None:
        """Compares the cuts of the model with the pipeline, and with copies of this rank's stage.

        Args:
            moment: the time of the comparison, in words; all ranks come to the same moments.

        Raises:
            CommError: ranks differ; the message has the ranks and their values.
        """
        board, pipeline = comm.current().backend.board, _pipeline()
        count = self._moments[moment] = self._moments.get(moment, -1) + 1
        # A new topic each time: this rank does not wait for its readers, and must not forget a topic too early.
        topic = f"model {self._number()}, {moment}, time {count}"
        copies = [comm.current().mesh.group_of(axis, comm.current().rank)[0] for axis in ("tp", ("dp", "cp"))]
        what = f"comparing how the ranks of a pipeline cut their models ({moment})"
        statements = board.exchange_values(topic, pieces.statement, [*pipeline, *copies], what)
        of_pipeline = {rank: statements[rank] for rank in pipeline}
        name = _first_difference(of_pipeline)
        if name in pieces.tables:
            tables = board.exchange_values(f"{topic}, {name}", pieces.tables[name], pipeline, what)
            of_pipeline = {rank: {name: table} for rank, table in tables.items()}
        common = (_SIZE, _HOLDERS, _CUTS)
        of_all = {rank: {key: statement[key] for key in common} for rank, statement in statements.items()}
        mesh = comm.current().mesh
        wrong = difference(of_pipeline, mesh) or difference(of_all, mesh)
        if wrong is not None:
            raise comm.CommError(f"{wrong}\n{SAME_ARGUMENTS}")

    def begin_pass(self, program: StageProgram, schedule: Schedule) -> None:
        """Compares a pass with the other ranks' passes of the same number; to be called before each pass.

        Raises:
            CommError: ranks differ; the message has the ranks and their passes.
        """
        latest = self._latest
        if latest is not None and latest[0] is schedule and latest[1] is program:
            self._passes.number += 1
            return
        board, pipeline = comm.current().backend.board, _pipeline()
        text = json.dumps(self._statement(program, schedule))
        number = self._passes.begin(text)
        digest = _digest(text)
        if latest is None or latest[0] is not schedule or digest not in self._equal:
            topic = f"model {self._number()}, passes of the pipeline of rank {pipeline[0]}"
            board.answers[topic] = self._passes.text_of
            texts = board.exchange(topic, number, text, pipeline, "comparing what the ranks of a pipeline run")
            wrong = difference({rank: json.loads(text) for rank, text in texts.items()}, comm.current().mesh)
            if wrong is not None:
                raise comm.CommError(
                    f"{wrong}\nIt is pass {number} of this model: call run_train and run_eval in the same order on "
                    "all ranks, with batches of one shape, and equal num_microbatches and schedule."
                )
            self._equal.add(digest)
        self._latest = schedule, program

    def _statement(self, program: StageProgram, schedule: Schedule) -> dict[str, Any]:
        if schedule not in self._orders:
            tasks = [[*map(str, schedule.computations(stage))] for stage in range(schedule.num_stages)]
            self._orders[schedule] = _digest(tasks)
        return {
            "what runs": "training" if schedule.trains else "evaluation",
            "num_microbatches": schedule.num_microbatches,
            "schedule": f"{schedule}, tasks {self._orders[schedule][:8]}",
            "the tensors of a microbatch between the pieces of the model": program.boundaries,
        }

    def _number(self) -> int:
        """Index of this model among the models this rank has cut; all ranks cut their models in the same order."""
        if self._model is None:
            extras = comm.current().extras
            self._model = extras["compared_models"] = extras.get("compared_models", -1) + 1
        return self._model


class _Passes:
    """The latest changes of what this rank runs; other threads read them."""

    def __init__(self) -> None:
        self.number = 0
        self._changes: tuple[tuple[int, str], ...] = ()  # replaced, never changed

    def begin(self, text: str) -> int:
        """Begins a pass that differs from the one before."""
        self._changes = *self._changes[-_REMEMBERED:], (self.number + 1, text)
        self.number += 1
        return self.number

    def text_of(self, number: int) -> str | None:
        """Statement of pass `number`; None: the pass has not begun, or is forgotten."""
        if self.number < number:
            return None
        return next((text for begin, text in reversed(self._changes) if begin <= number), None)


def difference(statements: Mapping[int, Mapping[str, Any]], mesh: Mesh) -> str | None:
    """The first difference between ranks, with the values by rank, in words; None: they agree."""
    name = _first_difference(statements)
    if name is None:
        return None
    values, what = {rank: statement[name] for rank, statement in statements.items()}, name
    if all(isinstance(value, dict) for value in values.values()):
        keys = dict.fromkeys(key for value in values.values() for key in value)
        key = next(key for key in keys if len({json.dumps(value.get(key)) for value in values.values()}) > 1)
        values, what = {rank: value.get(key, "none") for rank, value in values.items()}, f"{name}: {key}"
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(str(value), []).append(rank)
    lines = [f"\n  {_who(ranks_of_value, mesh)}: {value}" for value, ranks_of_value in ranks.items()]
    return f"the ranks of a pipeline disagree about {what}{''.join(lines)}"


def _first_difference(statements: Mapping[int, Mapping[str, Any]]) -> str | None:
    names = dict.fromkeys(name for statement in statements.values() for name in statement)
    for name in names:
        if len({json.dumps(statement.get(name)) for statement in statements.values()}) > 1:
            return name
    return None


def _who(ranks: Sequence[int], mesh: Mesh) -> str:
    stages = sorted({mesh.coordinate("pp", rank) for rank in ranks})
    return f"rank{'s' * (len(ranks) > 1)} {_listed(ranks)} (stage{'s' * (len(stages) > 1)} {_listed(stages)})"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _pipeline() -> tuple[int, ...]:
    context = comm.current()
    return context.mesh.group_of("pp", context.rank)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
