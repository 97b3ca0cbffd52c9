"""`IRGraph`: a recorded program in the hands of a policy. Its verbs are constraints; what they leave open is chosen.

    def policy(graph, config):
        for node in graph.select(name="linear"):
            for index, part in enumerate(graph.partition(node, node.algorithm("dim"), idx=1, dim=0, num=4)):
                graph.assign(part, index)
        return graph

One program runs on all ranks of a stage: part i of an operation is on rank i of its stage, and there are as many parts
as ranks. The rest is refused by `PlanError`. Names are nnScaler's, but for `shard`, `strategies` and `explain`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from ..nearest import nearest
from ..planning.costs import H100, Costs
from ..planning.plan import PlanError
from ..spmd.types import I, S, SpmdType
from .blocks import strides_of
from .choose import Problem, is_whole, stage_starts
from .config import ComputeConfig, Pipeline, divisors_near
from .local_program import LocalProgram, local_program
from .nodes import Algorithm, IRDataOperation, IRFwOperation, IRSegment, Node, SubNode, cuts_operand
from .program import Call, Division, Program, Strategy, Value
from .strategies import candidates, refusals
from .tables import Constraints
from .two_axes import SecondAxis

__all__ = ["IRDataOperation", "IRFwOperation", "IRGraph", "IRSegment"]

NodeType = type[Node] | tuple[type[Node], ...]
_BY_POLICY = -1  # in the place of a checkpoint's number


class IRGraph:
    """A program, and what a policy has decided about it.

    Attributes:
        program: as it was recorded; `operations`: its calls, as nodes.
        constraints: on strategies and types.
        pipeline: what `config.apply_pipeline_scheduler` set; None: no pipeline.
        pipeline_ranks: on how many groups of ranks the stages lie; None: each on its own, as far as there are ranks.
        second: the second of two axes: each call is divided over the first one, and what a rank of that runs over the
            second.
        costs, memory: what the choice counts with.
        stage_seconds: of each stage, forward and backward, once the program is divided.
    """

    def __init__(
        self,
        program: Program,
        config: ComputeConfig,
        *,
        costs: Costs = H100,
        memory: float | None = None,
        part_of: IRGraph | None = None,
    ) -> None:
        """`part_of`: the graph of whose first axis a rank runs this program."""
        self.program, self.config, self._outer = program, config, part_of
        self.costs, self.memory = costs, memory
        self.constraints = Constraints()
        self.pipeline: Pipeline | None = None
        self.pipeline_ranks: int | None = None
        self.second = SecondAxis()
        self._sharded: dict[Value, tuple[SpmdType, ...]] = {}
        self.stage_seconds: list[float] = []
        self._candidates: dict[tuple[Call, str, int], list[Strategy]] = {}
        self._data = IRDataOperation("data", "", values=program.inputs)
        self._strides = strides_of(program)
        self.operations = [
            IRFwOperation(
                call.name, call.module, call=call, strategies=self._strategies, recompute=bool(call.checkpoints)
            )
            for call in program.calls
        ]
        self._number = {node: number for number, node in enumerate(self.operations)}
        self._segments: list[IRSegment] = []

    # What there is.

    @property
    def stages(self) -> int:
        """How many pipeline stages there are."""
        return self.pipeline.nstages if self.pipeline else max(len(self._segments), 1)

    @property
    def groups(self) -> int:
        """On how many groups of ranks the stages lie."""
        return self.pipeline_ranks or min(self.stages, self.config.plan_ngpus)

    @property
    def ranks(self) -> int:
        """How many ranks a stage has."""
        return self.config.plan_ngpus // self.groups

    @property
    def size(self) -> int:
        """How many ranks its axis has: those of a stage, unless they are two axes."""
        return self._outer.second.size if self._outer else self.ranks // self.second.size

    @property
    def axis(self) -> str:
        """The axis over which its operations are divided."""
        if self._outer:
            return f"tp%{self._outer.second.size}"
        return f"tp/{self.second.size}" if self.second.size > 1 else "tp"

    def nodes(self, flatten: bool = True) -> list[Node]:
        """The inputs and the operations, in order; `flatten=False`: segments in the place of their operations."""
        inside: Sequence[Node] = self._segments if self._segments and not flatten else self.operations
        return [self._data, *inside]

    def select(
        self, name: str | None = None, ntype: NodeType | None = None, module: str | None = None, flatten: bool = True
    ) -> list[Any]:
        """The nodes that fit all that is given.

        Args:
            name: of the function.
            ntype: IRFwOperation, IRDataOperation, IRSegment, or a tuple of these.
            module: qualified name of a module, with `*` for anything: its own calls and those of modules in it.
        """
        wanted = ntype if isinstance(ntype, tuple) else (ntype,)
        every = [*self.nodes(), *self._segments] if flatten and IRSegment in wanted else self.nodes(flatten)
        return [
            node
            for node in every
            if (name is None or node.name == name)
            and (ntype is None or isinstance(node, ntype))
            and (module is None or fnmatchcase(node.module, module) or fnmatchcase(node.module, f"{module}.*"))
        ]

    def strategies(self, node: IRFwOperation) -> list[Strategy]:
        """The ways to run an operation that the typing rules allow over the ranks of a stage."""
        return self._strategies(node.call)

    def _strategies(self, call: Call, size: int | None = None) -> list[Strategy]:
        key = call, self.axis, size or self.size
        if key not in self._candidates:
            self._candidates[key] = candidates(*key, strides=self._strides)
        return self._candidates[key]

    # Verbs.

    def partition(self, node: Node | SubNode, algo: Algorithm, *, idx: int, dim: int, num: int) -> list[SubNode]:
        """Cuts an operation along dim `dim` of its tensor operand `idx` into `num` parts; a part again, too.

        An operation in n parts, each of which is in m parts, is over two axes of n and m ranks; then all are.

        Raises:
            PlanError: it cannot be cut so; the message has what can.
        """
        whole = node.node if isinstance(node, SubNode) else node
        if not isinstance(whole, IRFwOperation):
            raise PlanError(
                f"{node!r} cannot be partitioned: inputs are whole on every rank of a unit; partition the operations "
                "that read them, or replicate"
            )
        if not algo.satisfy(idx=idx, dim=dim, num=num):
            names = [f"(idx={i}, dim={d})" for i, d in whole.transform_space()]
            raise PlanError(
                f"{node!r} cannot be cut along dim {dim} of operand {idx} over {num} ranks; along these it can over "
                f"{self.size}: {', '.join(names) or 'none'}"
                + ("" if names else "; a function without a rule gets one by register_op")
            )
        return self._divided(node, num, cuts_operand(idx, dim))

    def replicate(self, node: Node | SubNode, times: int) -> list[SubNode]:
        """Runs the whole operation, or part of one, on `times` ranks."""
        return self._divided(node, times, is_whole)

    def _divided(self, node: Node | SubNode, count: int, allowed: Callable[[Strategy], bool]) -> list[SubNode]:
        if node.parts:
            raise PlanError(f"{node!r} was divided already, into {len(node.parts)} parts: a policy divides a node once")
        whole, is_part = (node.node, True) if isinstance(node, SubNode) else (node, False)
        if is_part and node not in whole.parts:
            raise PlanError(f"{node!r} is a part of a part: a unit has two axes at most")
        if isinstance(whole, IRFwOperation):
            table = self.second.strategies if is_part else self.constraints.strategies
            table.setdefault(whole.call, []).append(allowed)
        node.parts = [SubNode(whole, index, count) for index in range(count)]
        return list(node.parts)

    def assign(self, node: Node | SubNode, device: int) -> None:
        """Puts a part of an operation, or an operation or segment of one part, on a rank of the unit.

        Raises:
            PlanError: there is no such rank, or the part is on one already.
        """
        if not 0 <= device < self.config.plan_ngpus:
            last = self.config.plan_ngpus - 1
            raise PlanError(f"{node!r} cannot be on device {device}: plan_ngpus={last + 1}, so there are 0 to {last}")
        if isinstance(node, IRSegment):
            for operation in node.operations:
                self.assign(operation, device)
            return
        if isinstance(node, Node):
            if node.parts and node.ends[0].device is None:
                raise PlanError(f"{node!r} is in {len(node.ends)} parts: assign these")
            part = node.ends[0] if node.parts else self.replicate(node, 1)[0]
        else:
            part = node
        if part.parts:
            raise PlanError(f"{part!r} is in {len(part.parts)} parts: assign these")
        if part.device is not None:
            raise PlanError(f"{part.node!r} is assigned twice: to device {part.device}, and to {device}")
        part.device = device

    def recompute(self, nodes: Iterable[IRFwOperation]) -> None:
        """Computes these operations again in backward, in place of keeping what they give."""
        for node in nodes:
            node.recompute = True

    def staging(self, nodes: Sequence[IRFwOperation]) -> None:
        """Cuts the program into pipeline stages, each of which begins with one of these operations.

        What is before the first of them is of the first stage.

        Raises:
            PlanError: they are not in the order of the program, or are too many for the unit.
        """
        starts = [self._number[node] for node in nodes]
        if not starts or sorted(set(starts)) != starts:
            raise PlanError(f"staging needs the first operation of each stage, in their order; got numbers {starts}")
        if self.pipeline is None and self.config.plan_ngpus % len(starts):
            raise PlanError(
                f"{len(starts)} stages do not divide plan_ngpus={self.config.plan_ngpus}: all stages have equally many "
                f"ranks; {divisors_near(self.config.plan_ngpus, len(starts))} do"
            )
        bounds = [0, *starts[1:], len(self.operations)]
        self._segments = [
            IRSegment(f"stage {number}", "", operations=self.operations[first:last])
            for number, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False))
        ]

    def multiref(self, tensor: Value) -> None:
        """Lets consumers of a tensor want it in different forms: here they always may."""

    def shard(self, module: str, **dims: int | None) -> None:
        """Decides how parameters are stored: `graph.shard("layers.*.mlp.up_proj", weight=0)`; None: whole.

        Of two axes on the second one.

        Raises:
            PlanError: there is no such parameter.
        """
        for name, dim in dims.items():
            pattern = f"{module}.{name}" if module else name
            found = [value for value in self.program.parameters if fnmatchcase(value.path, pattern)]
            if not found:
                known = [value.path for value in self.program.parameters]
                raise PlanError(f"no parameter is called {pattern}; nearest: {nearest(pattern, known)}")
            for value in found:
                self._sharded[value] = self._stored(value, dim)

    def _stored(self, value: Value, dim: int | None) -> tuple[SpmdType, ...]:
        if dim is None:
            return (I,)
        rank = len(value.shape)
        if not -rank <= dim < rank:
            raise PlanError(f"{value.path} {list(value.shape)} has no dim {dim}")
        return tuple(S(dim % rank, stride=stride) for stride in (1, *self._strides))

    # What becomes of it.

    def divide(self) -> Division:
        """The program divided: the least cost under all that was decided.

        Raises:
            PlanError: what was decided cannot be carried out.
        """
        self._check_pipeline()
        problem = self.problem()
        second = self.second
        memory = None if self.memory is None else self.memory * second.size  # the second axis may divide all of it
        division = problem.fitting(memory, stages=self.groups)
        starts = list(range(len(self.operations) + 1))
        if second.size > 1:
            inner, local = self._of_a_rank(division)
            problem, outer, starts = inner.problem(), division, local.starts
            division = problem.fitting(self.memory, stages=self.groups)
            division.outer = outer
        if self.pipeline:
            division.schedule, division.microbatches = self.pipeline.schedule, self.pipeline.nmicros
            division.pipeline_ranks = self.groups
            division.stages = [starts[self._number[segment.operations[0]]] for segment in self._segments]
            division.stages = division.stages or _before(starts, stage_starts(problem, division, self.pipeline.nstages))
        division.recompute = [(starts[first], starts[last]) for first, last in self._recomputed()]
        times = problem.tables.times(division.strategies, division.type_of)
        bounds = [*division.stages, len(times)]
        self.stage_seconds = [sum(times[first:last]) for first, last in zip(bounds, bounds[1:], strict=False)]
        return division

    def _of_a_rank(self, division: Division) -> tuple[IRGraph, LocalProgram]:
        """The graph of what a rank of the first axis runs, with all that was decided for the second."""
        local = local_program(division)
        inner = IRGraph(local.program, self.config, costs=self.costs, part_of=self)
        inner.constraints = self.second.constrain(local, self.constraints, self.operations, self.ranks)
        for decide in self.second.decide:
            decide(inner, local)
        return inner, local

    def _check_pipeline(self) -> None:
        cut = len(self._segments)
        if cut > 1 and self.pipeline is None:
            raise PlanError(
                f"graph.staging made {cut} stages, and nothing says how they take turns: call "
                f'config.apply_pipeline_scheduler(graph, {cut}, nmicros, "1f1b")'
            )
        if cut and self.pipeline and self.pipeline.nstages != cut:
            raise PlanError(
                f"graph.staging made {cut} stages, and apply_pipeline_scheduler was told {self.pipeline.nstages}"
            )

    def problem(self) -> Problem:
        """What is left to choose.

        Raises:
            PlanError: an operation has parts without a device, or on devices that one program cannot serve.
        """
        if self._outer is None:
            self.second.settle([self._data, *self.operations], self.ranks)
            table = self.second.types if self.second.size > 1 else self.constraints.types
            table.update(self._sharded)
        for node in (self._data, *self.operations):
            if node.parts:
                self._check_devices(node)
        return Problem(self.program, self.axis, self.size, self.costs, self.constraints, self._strategies)

    def _check_devices(self, node: Node) -> None:
        devices = [part.device for part in node.ends]
        missing = [number for number, part in enumerate(node.ends) if part.device is None]
        if missing:
            raise PlanError(f"{node!r} has no device for parts {missing} of {len(devices)}: graph.assign(part, device)")
        if isinstance(node, IRDataOperation):
            return
        first = self._stage_of(node) % self.groups * self.ranks
        expected = list(range(first, first + self.ranks))
        if devices != expected:
            raise PlanError(
                f"{node!r} is on devices {devices}, and its stage consists of {expected}: one program runs on all "
                f"ranks of a stage, so it needs {self.ranks} part(s), part i on device {first} + i"
                + (f"; replicate(node, times={self.ranks}) computes it on each" if len(devices) != self.ranks else "")
                + ("; graph.staging makes pipeline stages" if not self._segments and len(devices) == 1 else "")
            )

    def _stage_of(self, node: Node) -> int:
        return next((n for n, segment in enumerate(self._segments) if node in segment.operations), 0)

    def _recomputed(self) -> list[tuple[int, int]]:
        """The spans of calls, from and to, that are computed again in backward."""
        around = [(node.call.checkpoints or (_BY_POLICY,)) if node.recompute else () for node in self.operations]
        spans: set[tuple[int, int]] = set()
        for depth in range(max(map(len, around), default=0)):
            inside = [path[: depth + 1] if len(path) > depth else None for path in around]
            for path, group in groupby(enumerate(inside), lambda numbered: numbered[1]):
                numbers = [number for number, _ in group]
                if path is not None:
                    spans.add((numbers[0], numbers[-1] + 1))
        return sorted(spans, key=lambda span: (span[0], -span[1]))

    def explain(self, node: IRFwOperation) -> str:
        """Each strategy of an operation and what the whole program takes under it; what is no strategy, and why.

        Over two axes those on the first, and behind them those that it then has on the second.
        """
        problem = self.problem()
        chosen, _, least = problem.solve(0.0)
        where = f" of {self.axis}" if self._outer or self.second.size > 1 else ""
        lines = [f"{node!r}, over {self.size} ranks{where}:"]
        for strategy in problem.options[node.call]:
            mark = "->" if strategy is chosen.strategies[node.call] else "  "
            types = ", ".join(map(str, strategy.operands)), ", ".join(map(str, strategy.results))
            try:
                seconds = problem.solve(0.0, {node.call: strategy})[2]
            except PlanError:
                lines.append(
                    f"{mark} {strategy.name}: {types[0]} -> {types[1]}, not together with the rest of the plan"
                )
                continue
            extra = f"the program takes {seconds * 1e3:.3f} ms, {(seconds - least) * 1e3:+.3f}"
            lines.append(f"{mark} {strategy.name}: {types[0]} -> {types[1]}; {extra}")
        refused = refusals(node.call, self.axis, self.size, strides=self._strides)
        lines += [f" x {refusal.name}: {refusal.why}" for refusal in refused]
        if self.second.size > 1:
            inner, local = self._of_a_rank(chosen)
            (own,) = (each for each in inner.operations if each.call is local.calls[node.call])
            lines.append(inner.explain(own))
        return "\n".join(lines)


def _before(starts: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Where stages begin: before the conversions that the first call of each needs.

    Raises:
        PlanError: two begin at one call.
    """
    found = [starts[bisect_right(starts, start) - 1] for start in chosen]
    if len(set(found)) < len(found):
        raise PlanError(f"{len(found)} stages of a program of {len(starts) - 1} calls begin at the same: use fewer")
    return found
