"""`IRGraph`, the recorded program that a policy works on: its verbs add constraints, the solver chooses the rest.

    def policy(graph, config):
        for node in graph.select(name="linear"):
            for index, part in enumerate(graph.partition(node, node.algorithm("dim"), idx=1, dim=0, num=4)):
                graph.assign(part, index)
        return graph

One program runs on all ranks of a stage: part i of an operation is on rank i of its stage, and there are as many parts
as ranks. Anything else raises a `PlanError`. Names are nnScaler's, except `shard`, `strategies` and `explain`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from math import prod
from typing import Any

from ...mesh import name_of_part
from ...nearest import nearest
from ...planning.costs import H100, Costs
from ...planning.plan import PlanError
from ...program.program import Call, Division, Program, Strategy, Value, operands_of
from ...spmd.types import I, S, SpmdType
from ..choose.conversions import WholeOnRank
from ..choose.cost_tables import Constraints
from ..choose.cuts import between_experts, stage_starts
from ..choose.exact import StrategyChoice, is_whole
from ..choose.local_program import LocalProgram, local_program
from ..choose.plan_costs import plan_costs
from ..choose.strategies import candidates, refusals, routed_calls, strides_of
from ..choose.whole_tables import Places, places_of
from ..config import ComputeConfig, Pipeline, divisors_near
from .later_axes import Decision, LaterAxes
from .operations import Algorithm, IRDataOperation, IRFwOperation, IRSegment, Node, SubNode, cuts_operand

__all__ = ["IRDataOperation", "IRFwOperation", "IRGraph", "IRSegment"]

NodeType = type[Node] | tuple[type[Node], ...]


class IRGraph:
    """A program, and the decisions of a policy about it.

    Attributes:
        program: the recorded program; `operations`: its calls, as nodes.
        constraints: constraints on strategies and types.
        pipeline: the pipeline set by `config.apply_pipeline_scheduler`; None: no pipeline.
        pipeline_ranks: number of groups of ranks that the stages are distributed over; None: one group per stage, as
            far as there are ranks.
        pivots: operations at which a stage may begin, without `staging`; None: all.
        later: decisions about the axes after the first one: calls are divided over the first axis, and the local calls
            of a rank of that axis over the next.
        costs, memory: the cost model of the choice, and the bytes that a rank may hold (None: any number).
        stage_seconds: seconds of each stage, forward and backward, once the program is divided.
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
        """`part_of`: the graph of the program of which `program` is the local program of a rank of its axis."""
        self.program, self.config, self._outer = program, config, part_of
        self.costs, self.memory = costs, memory
        self.constraints = Constraints()
        self.pipeline: Pipeline | None = None
        self.pipeline_ranks: int | None = None
        self.pivots: list[IRFwOperation] | None = None
        self.later = LaterAxes()
        self.is_cut_later = False  # into stages, after the choice
        self._sharded: dict[Value, tuple[SpmdType, ...]] = {}
        self.stage_seconds: list[float] = []
        self._candidates: dict[tuple[Call, str, int, bool], list[Strategy]] = {}
        self._places_over: dict[int, dict[Call, Places]] = {}
        self._data = IRDataOperation("data", "", values=program.inputs)
        self._strides, self._routed = strides_of(program), routed_calls(program)
        self.operations = [
            IRFwOperation(
                call.name, call.module, call=call, strategies=self._strategies, recompute=bool(call.checkpoints)
            )
            for call in program.calls
        ]
        self._number = {node: number for number, node in enumerate(self.operations)}
        self._segments: list[IRSegment] = []
        self._recompute_calls = 0

    # Queries.

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.pipeline.nstages if self.pipeline else max(len(self._segments), 1)

    @property
    def groups(self) -> int:
        """Number of groups of ranks that the stages are distributed over."""
        return self.pipeline_ranks or min(self.stages, self.config.plan_ngpus)

    @property
    def ranks(self) -> int:
        """Number of ranks of a stage."""
        return self.config.plan_ngpus // self.groups

    @property
    def size(self) -> int:
        """Number of ranks along the graph's axis: all ranks of a stage, unless they form several axes."""
        return self._outer.later.sizes[0] if self._outer else self.ranks // prod(self.later.sizes)

    @property
    def axis(self) -> str:
        """Name of the axis over which the operations are divided."""
        return name_of_part("tp", prod(self.later.sizes), self.size if self._outer else None)

    def nodes(self, flatten: bool = True) -> list[Node]:
        """Returns the inputs and the operations, in order; `flatten=False`: segments instead of their operations."""
        inside: Sequence[Node] = self._segments if self._segments and not flatten else self.operations
        return [self._data, *inside]

    def select(
        self, name: str | None = None, ntype: NodeType | None = None, module: str | None = None, flatten: bool = True
    ) -> list[Any]:
        """Returns the nodes that match all given arguments.

        Args:
            name: name of the function.
            ntype: IRFwOperation, IRDataOperation, IRSegment, or a tuple of these.
            module: qualified name of a module, with `*` for anything; matches calls in submodules too.
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
        """Returns the strategies of an operation over the ranks of a stage that the typing rules allow."""
        return self._strategies(node.call)

    def _strategies(self, call: Call, size: int | None = None) -> list[Strategy]:
        size = size or self.size
        is_single = self.stages == 1 and not (self.is_cut_later or self._outer or self.later.sizes)
        places = self._places(size) if is_single else {}
        key = call, self.axis, size, is_single
        if key not in self._candidates:
            self._candidates[key] = candidates(
                call, self.axis, size, strides=self._strides, routed=self._routed, places=places
            )
        return self._candidates[key]

    def _places(self, size: int) -> dict[Call, Places]:
        if size not in self._places_over:
            self._places_over[size] = places_of(self.program, size)
        return self._places_over[size]

    # Verbs.

    def partition(self, node: Node | SubNode, algo: Algorithm, *, idx: int, dim: int, num: int) -> list[SubNode]:
        """Cuts an operation, or a part of one, along dim `dim` of its tensor operand `idx` into `num` parts.

        If n parts are cut into m parts each, the stage has axes of n and m ranks, for all operations; if these are cut
        into k parts each, a third one of k ranks.

        Raises:
            PlanError: the operation cannot be cut so; the message lists the possible cuts.
        """
        operation = node.node if isinstance(node, SubNode) else node
        if not isinstance(operation, IRFwOperation):
            raise PlanError(
                f"{node!r} cannot be partitioned: every rank of a unit gets the whole inputs; partition or replicate "
                "the operations that read them"
            )
        if not algo.satisfy(idx=idx, dim=dim, num=num):
            names = [f"(idx={i}, dim={d})" for i, d in operation.transform_space()]
            raise PlanError(
                f"{node!r} cannot be cut along dim {dim} of operand {idx} over {num} ranks; over {self.size} ranks it "
                f"can be cut along: {', '.join(names) or 'no dim'}"
                + ("" if names else "; a function without a rule gets one by register_op")
            )
        return self._divided(node, num, cuts_operand(idx, dim))

    def replicate(self, node: Node | SubNode, times: int) -> list[SubNode]:
        """Runs an operation, or a part of one, on `times` ranks that all compute the same."""
        return self._divided(node, times, is_whole)

    def _divided(self, node: Node | SubNode, count: int, allowed: Callable[[Strategy], bool]) -> list[SubNode]:
        if node.parts:
            raise PlanError(f"{node!r} was divided already, into {len(node.parts)} parts: a policy divides a node once")
        operation, axis = (node.node, node.axis + 1) if isinstance(node, SubNode) else (node, 0)
        if isinstance(operation, IRFwOperation):
            table = self.later.strategies[axis - 1] if axis else self.constraints.strategies
            table.setdefault(operation.call, []).append(allowed)
        node.parts = [SubNode(operation, index, count, axis) for index in range(count)]
        return list(node.parts)

    def assign(self, node: Node | SubNode, device: int) -> None:
        """Assigns a part of an operation, or an operation or segment of one part, to a rank of the unit.

        Raises:
            PlanError: there is no such rank, or the part is assigned already.
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
                raise PlanError(f"{node!r} is divided into {len(node.ends)} parts: assign the parts")
            part = node.ends[0] if node.parts else self.replicate(node, 1)[0]
        else:
            part = node
        if part.parts:
            raise PlanError(f"{part!r} is divided into {len(part.parts)} parts: assign the parts")
        if part.device is not None:
            raise PlanError(f"{part.node!r} is assigned twice: to device {part.device}, and to {device}")
        part.device = device

    def recompute(self, nodes: Iterable[IRFwOperation]) -> None:
        """Computes these operations again in backward, instead of saving their results.

        Adjacent operations of one call are recomputed together, those of two calls one after the other.
        """
        self._recompute_calls += 1
        for node in nodes:
            node.recompute, node.span = True, -self._recompute_calls

    def staging(self, nodes: Sequence[IRFwOperation]) -> None:
        """Cuts the program into pipeline stages, each of which begins with one of these operations.

        Operations before the first of `nodes` belong to the first stage.

        Raises:
            PlanError: the operations are not in program order, or too many for the unit.
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
        """Does nothing: consumers of a tensor may always want it in different forms. nnScaler needs the call."""

    def shard(self, module: str, **dims: int | None) -> None:
        """Shards the stored parameters: `graph.shard("layers.*.mlp.up_proj", weight=0)`; None: not sharded.

        If there are several axes, they are sharded over the last one.

        Raises:
            PlanError: there is no such parameter.
        """
        for name, dim in dims.items():
            for value in self._named(f"{module}.{name}" if module else name):
                self._sharded[value] = self._stored(value, dim)

    def whole_tables(self, module: str) -> None:
        """Places each embedding table of these modules whole on a rank: `graph.whole_tables("emb_l.*")`.

        The rows of two or more must be joined by one `cat` or `stack`; sizes decide which rank has which table.

        Raises:
            PlanError: there is no such parameter, or it is no such table.
        """
        tables = self._named(f"{module}.weight")
        places = self._places(self.ranks)
        allowed = {value for call in places for value in operands_of(call)}
        for value in tables:
            if value not in allowed:
                raise PlanError(
                    f"{value.path} {list(value.shape)} cannot be whole on one of {self.ranks} ranks: its one reader "
                    "must be an embedding or embedding_bag without per_sample_weights, whose rows nothing reads but "
                    "one cat or stack that joins those of tables along another dim than the first, which the ranks "
                    "divide"
                )
            self._sharded[value] = tuple(WholeOnRank(0, rank=rank) for rank in range(self.ranks))

    def _named(self, pattern: str) -> list[Value]:
        parameters = [value for value in self.program.parameters if fnmatchcase(value.path, pattern)]
        if not parameters:
            known = [value.path for value in self.program.parameters]
            raise PlanError(f"no parameter is called {pattern}; nearest: {nearest(pattern, known)}")
        return parameters

    def _stored(self, value: Value, dim: int | None) -> tuple[SpmdType, ...]:
        if dim is None:
            return (I,)
        rank = len(value.shape)
        if not -rank <= dim < rank:
            raise PlanError(f"{value.path} {list(value.shape)} has no dim {dim}")
        return tuple(S(dim % rank, stride=stride) for stride in (1, *self._strides))

    def over_axes_of(self, division: Division, decide: Callable[[Division, IRGraph], Any]) -> None:
        """Divides over the axes of a division, and calls `decide` for each, with its division and its graph."""
        first, *others = division.levels

        def deciding(level: Division) -> Decision:
            return lambda inner, _: decide(level, inner)

        self.later.decide_each([level.size for level in others], list(map(deciding, others)))
        decide(first, self)

    # The division.

    def divide(self) -> Division:
        """Divides the program at the least cost under all constraints.

        Raises:
            PlanError: the constraints contradict one another.
        """
        self._check_pipeline()

        def fitting(graph: IRGraph, problem: StrategyChoice) -> Division:
            # Later axes may shard everything.
            memory = None if graph.memory is None else graph.memory * prod(graph.later.sizes)
            return problem.fitting(memory, stages=self.groups)

        division, problem, starts = self.over_all_axes(self.problem(), fitting)
        if self.pipeline:
            division.schedule, division.microbatches = self.pipeline.schedule, self.pipeline.nmicros
            division.pipeline_ranks = self.groups
            division.stages = [starts[self._number[segment.operations[0]]] for segment in self._segments]
            never = between_experts(division)
            for segment, start in zip(self._segments, division.stages, strict=True):
                if start in never:
                    raise PlanError(
                        f"graph.staging: a stage begins at {segment.operations[0]}, and would receive "
                        f"{never[start]!r}, rows of experts that are divided over the ranks: the routing decides how "
                        "many rows a rank has, and a message has a fixed shape. Begin the stage at to_experts, or "
                        "behind to_tokens"
                    )
            if not division.stages:
                allowed = None if self.pivots is None else {starts[number] for number in self.starts_allowed or ()}
                division.stages = _before(starts, stage_starts(problem, division, self.pipeline.nstages, allowed))
        division.recompute = [(starts[first], starts[last]) for first, last in self.recomputed]
        times = problem.tables.times(division.strategies, division.type_of)
        bounds = [*division.stages, len(times)]
        self.stage_seconds = [sum(times[first:last]) for first, last in zip(bounds, bounds[1:], strict=False)]
        division.costs = partial(plan_costs, problem, division)
        return division

    def over_all_axes(
        self,
        problem: StrategyChoice,
        divided: Callable[[IRGraph, StrategyChoice], Division],
        outer: Division | None = None,
    ) -> tuple[Division, StrategyChoice, list[int]]:
        """Returns the division over the last axis, its choice, and the first of its calls that each call here needs.

        Args:
            problem: the choice over this axis.
            divided: returns the division over one axis, from its graph and its choice.
            outer: the division over the axis before.
        """
        division = divided(self, problem)
        division.outer = outer
        if not self.later.sizes:
            return division, problem, list(range(len(self.operations) + 1))
        inner, local = self._of_a_rank(division)
        last, problem, starts = inner.over_all_axes(inner.problem(), divided, division)
        return last, problem, [starts[start] for start in local.starts]

    def _of_a_rank(self, division: Division) -> tuple[IRGraph, LocalProgram]:
        """Returns the graph of the local program of a rank of the axis, with all decisions about the axes after it."""
        local = local_program(division)
        inner = IRGraph(local.program, self.config, costs=self.costs, memory=self.memory, part_of=self)
        inner.constraints, inner.later = self.later.after(local)
        inner._sharded = {local.values[value]: types for value, types in self._sharded.items()}
        for decide in self.later.decide:
            decide(inner, local)
        return inner, local

    def _check_pipeline(self) -> None:
        cut = len(self._segments)
        if cut > 1 and self.pipeline is None:
            raise PlanError(
                f"graph.staging made {cut} stages, but they have no schedule: call "
                f'config.apply_pipeline_scheduler(graph, {cut}, nmicros, "1f1b")'
            )
        if cut and self.pipeline and self.pipeline.nstages != cut:
            raise PlanError(
                f"graph.staging made {cut} stages, but apply_pipeline_scheduler got {self.pipeline.nstages}"
            )

    def problem(self) -> StrategyChoice:
        """Returns the choice that the constraints leave open.

        Raises:
            PlanError: an operation has parts without a device, or on devices that one program cannot serve.
        """
        if self._outer is None:
            self.later.settle([self._data, *self.operations], self.constraints, self.ranks)
        if not self.later.sizes:
            self.constraints.types.update(self._sharded)
        for node in (self._data, *self.operations):
            if node.parts:
                self._check_devices(node)
        return StrategyChoice(self.program, self.axis, self.size, self.costs, self.constraints, self._strategies)

    def _check_devices(self, node: Node) -> None:
        devices = [part.device for part in node.ends]
        missing = [number for number, part in enumerate(node.ends) if part.device is None]
        if missing:
            raise PlanError(
                f"{node!r}: parts {missing} of {len(devices)} have no device: call graph.assign(part, device)"
            )
        if isinstance(node, IRDataOperation):
            return
        first = self._stage_of(node) % self.groups * self.ranks
        expected = list(range(first, first + self.ranks))
        if devices != expected:
            raise PlanError(
                f"{node!r} is on devices {devices}, but its stage has devices {expected}: one program runs on all "
                f"ranks of a stage, so it needs {self.ranks} part(s), part i on device {first} + i"
                + (f"; replicate(node, times={self.ranks}) computes it on each" if len(devices) != self.ranks else "")
                + ("; graph.staging makes pipeline stages" if not self._segments and len(devices) == 1 else "")
            )

    def _stage_of(self, node: Node) -> int:
        return next((n for n, segment in enumerate(self._segments) if node in segment.operations), 0)

    @property
    def starts_allowed(self) -> set[int] | None:
        """Numbers of the calls at which a stage may begin; None: all."""
        return None if self.pivots is None else {self._number[node] for node in self.pivots}

    @property
    def recomputed(self) -> list[tuple[int, int]]:
        """(first, end) of each span of calls that is computed again in backward."""
        around = [(node.call.checkpoints or (node.span,)) if node.recompute else () for node in self.operations]
        spans: set[tuple[int, int]] = set()
        for depth in range(max(map(len, around), default=0)):
            inside = [path[: depth + 1] if len(path) > depth else None for path in around]
            for path, group in groupby(enumerate(inside), lambda numbered: numbered[1]):
                numbers = [number for number, _ in group]
                if path is not None:
                    spans.add((numbers[0], numbers[-1] + 1))
        return sorted(spans, key=lambda span: (span[0], -span[1]))

    def explain(self, node: IRFwOperation) -> str:
        """Lists an operation's strategies with the program's time under each, and rejected candidates with the reason.

        If there are several axes, the strategies on the first axis come first, then those on the next ones.
        """
        problem = self.problem()
        chosen, _, least = problem.solve(0.0)
        where = f" of {self.axis}" if self._outer or self.later.sizes else ""
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
        if self.later.sizes:
            inner, local = self._of_a_rank(chosen)
            (local_node,) = (candidate for candidate in inner.operations if candidate.call is local.calls[node.call])
            lines.append(inner.explain(local_node))
        return "\n".join(lines)


def _before(starts: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Returns the first call of each stage, moved before the conversions that the stage's first call needs.

    Raises:
        PlanError: two stages begin at one call.
    """
    moved = [starts[bisect_right(starts, start) - 1] for start in chosen]
    if len(set(moved)) < len(moved):
        raise PlanError(f"two of {len(moved)} stages begin at the same of {len(starts) - 1} calls: use fewer stages")
    return moved
