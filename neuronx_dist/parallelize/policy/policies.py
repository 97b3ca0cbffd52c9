"""The named policies, and the division of a program by any policy.

    dp          a unit is one rank: nothing is cut
    tp          cuts every weight that can be cut, and other calls where that is faster
    data        cuts the batch (dim 0 of the first input) inside a unit
    pp          as many pipeline stages as ranks
    hybrid      pipeline stages, with weights cut over the ranks of each stage
    autodist    the fastest division that fits the memory; without `plan_ngpus` the fastest job (whole_job.py)

A policy may also be a `planning.Plan`, the path of one, or a function `(IRGraph, ComputeConfig) -> IRGraph`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

from ...nearest import nearest
from ...planner.cluster import Cluster
from ...planning.costs import CPU, H100, Costs
from ...planning.plan import Plan, PlanError
from ...program.program import Division, Program, Strategy, Value
from ...spmd.types import I, R, S, Shard, SpmdType
from ..choose.stages import same_calls, starts_like
from ..config import ComputeConfig, divisors_near
from .graph import IRGraph
from .later_axes import axes_wanted
from .operations import IRFwOperation
from .plans import apply_plan
from .whole_job import JobChoice, link_of, memory_of

__all__ = ["POLICIES", "Policy", "costs_of", "divide", "divide_like", "whole_job"]

Policy = str | Plan | PathLike[str] | Callable[[IRGraph, ComputeConfig], IRGraph]
COSTS = {"h100": H100, "cpu": CPU}
GB = 10**9


def divide(program: Program, policy: Policy, config: ComputeConfig) -> Division:
    """Divides a program over the ranks of a unit, by a policy.

    Raises:
        PlanError: the policy or an option is unknown, or the policy does not fit the configuration or the program.
        ValueError: the policy makes a pipeline of a module that is not end2end.
    """
    plan = _plan_in(policy, config)
    if plan is None and not callable(policy) and policy not in POLICIES:
        raise PlanError(
            f"unknown policy {policy!r}, and no file has this name; nearest: "
            f"{nearest(str(policy), POLICIES)}. A policy is one of {', '.join(POLICIES)}, a Plan, the path of a plan's "
            "file, or a function of (IRGraph, ComputeConfig)"
        )
    if isinstance(policy, str) and policy in POLICIES:
        _check_options(policy, config, POLICIES[policy][1])
    if config.is_open and plan is None:
        if policy == "autodist":
            return whole_job(program, config).division()
        raise PlanError(
            f"the policy {getattr(policy, '__name__', policy)!r} needs plan_ngpus, the ranks of a unit: pass "
            "ComputeConfig(plan_ngpus=...); 'autodist' chooses it, and a plan has it"
        )
    if plan is not None:
        config = config.with_unit(plan.tp * plan.pp, plan.zero1)
    graph = IRGraph(program, config, costs=costs_of(config))
    if plan is not None:
        division = apply_plan(plan, graph).divide()
        division.zero1 = plan.zero1
        return division
    if policy == "autodist":
        return _autodist(graph, config)
    function = POLICIES[policy][0] if isinstance(policy, str) else policy
    assert callable(function)
    decided = function(graph, config)
    if not isinstance(decided, IRGraph):
        raise PlanError(f"the policy {getattr(policy, '__name__', policy)} must return the graph, got {decided!r}")
    return decided.divide()


def divide_like(division: Division, program: Program, config: ComputeConfig) -> Division:
    """Divides the same module's program in another mode (evaluation), with parameters stored as in `division`.

    Over axes before the last one, calls take their operands as in `division` too: a later axis can cut a parameter in
    the same way only if the local calls that read it are the same.
    """
    graph = IRGraph(program, config, costs=costs_of(config))
    graph.pipeline_ranks = division.pipeline_ranks
    graph.over_axes_of(division, _store_as)
    divided = graph.divide()
    divided.stages = starts_like(division, program)
    for name in ("schedule", "microbatches", "pipeline_ranks"):
        setattr(divided, name, getattr(division, name))
    return divided


def _store_as(division: Division, graph: IRGraph) -> None:
    """Constrains the parameters of a graph to the types that they have in a division over the same axis.

    If there is a later axis, calls take their operands as the same calls of the division do, if they can.
    """
    types = {value.path: division.types[value] for value in division.program.parameters}
    graph.constraints.types |= {
        value: (types[value.path],) for value in graph.program.parameters if value.path in types
    }
    calls, nodes = division.program.calls, graph.operations
    for number, other in same_calls(calls, [node.call for node in nodes]).items() if graph.later.sizes else ():
        wanted, node = division.strategies[calls[number]], nodes[other]
        if any(map(takes := _takes(wanted.operands), graph.strategies(node))):
            graph.constraints.strategies[node.call] = [takes]


def _plan_in(policy: Policy, config: ComputeConfig) -> Plan | None:
    """Returns the plan that a policy is, or that `autodist` loads."""
    if policy == "autodist" and config.pas_config.get("load_plan_path"):
        return Plan.load(config.pas_config["load_plan_path"])
    if isinstance(policy, PathLike) or isinstance(policy, str) and policy not in POLICIES and Path(policy).is_file():
        return Plan.load(policy)
    return policy if isinstance(policy, Plan) else None


def costs_of(config: ComputeConfig) -> Costs:
    """Returns the speeds of the ranks of a unit, by the option `costs`."""
    costs = config.pas_config.get("costs", "h100")
    if isinstance(costs, Cluster):
        return costs.costs(config.plan_ngpus)
    if isinstance(costs, Costs):
        return costs
    if costs not in COSTS:
        raise PlanError(
            f"pas_config['costs']={costs!r} is unknown; there are {', '.join(COSTS)}, a planning Costs, or a Cluster"
        )
    return COSTS[costs]


def _check_options(policy: str, config: ComputeConfig, options: set[str]) -> None:
    """Warns of options of nnScaler, or of another policy, that this policy does not read.

    Raises:
        PlanError: a name is unknown.
    """
    unread = sorted(config.pas_config.keys() - options)
    known = _OF_NNSCALER.union(*(names for _, names in POLICIES.values()))
    unread = [name for name in unread if not name.startswith("_")]  # a user's, as in nnScaler
    for name in unread:
        if name not in known:
            raise PlanError(
                f"pas_config[{name!r}] is no option of the policy {policy!r}; nearest: {nearest(name, sorted(options))}"
            )
    if unread:
        read = ", ".join(sorted(options))
        warnings.warn(
            f"pas_config: the policy {policy!r} does not read {', '.join(unread)}; it reads {read}", stacklevel=2
        )


# The policies.


def _dp(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    if config.plan_ngpus != 1:
        raise PlanError(
            f"policy 'dp' needs plan_ngpus=1, got {config.plan_ngpus}: it makes every rank a data-parallel unit; use "
            "policy 'data' to cut the batch inside a unit"
        )
    return graph


def _tp(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    """Cuts the weights over all ranks of a stage; with `tp_size`, over so many, and the batch over the others."""
    return _over_axes(graph, config) or _weights_cut(graph)


def _over_axes(graph: IRGraph, config: ComputeConfig) -> IRGraph | None:
    """Cuts the batch over a first axis, and weights over `tp_size` ranks, an axis for each number of a list.

    None: there is no `tp_size`.
    """
    option = config.pas_config.get("tp_size")
    if option is None:
        return None
    sizes = [size for size in (option if isinstance(option, (list, tuple)) else [option]) if size > 1]
    if graph.ranks % prod(sizes):
        raise PlanError(
            f"pas_config['tp_size']={option} does not divide the {graph.ranks} ranks of a stage; the nearest that work "
            f"are {divisors_near(graph.ranks, prod(sizes))}"
        )
    first, later = (_batch_cut, sizes) if prod(sizes) < graph.ranks else (_weights_cut, sizes[1:])
    graph.later.decide_each(later, [lambda inner, local: _weights_cut(inner)] * len(later))
    return first(graph)


def _weights_cut(graph: IRGraph) -> IRGraph:
    """Stores weights of two and more dims in shards, if any of their consumers accepts a shard."""
    if graph.size == 1:
        return graph
    for value, types in graph.problem().types.items():
        shards = tuple(type_ for type_ in types if isinstance(type_, Shard))
        if value.kind == "parameter" and len(value.shape) > 1 and shards:
            graph.constraints.types[value] = shards
    return graph


def _pp(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    stages = config.pas_config.get("pipeline_nstages", "auto")
    return _pipelined(graph, config, config.plan_ngpus if stages in ("auto", None) else stages, config.plan_ngpus)


def _hybrid(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    options = config.pas_config
    ranks = options.get("pp_size")
    stages = options.get("pipeline_nstages", "auto")
    stages = (ranks or config.plan_ngpus) if stages in ("auto", None) else stages
    return _tp(_pipelined(graph, config, stages, ranks or min(stages, config.plan_ngpus)), config)


def _pipelined(graph: IRGraph, config: ComputeConfig, stages: int, ranks: int) -> IRGraph:
    if stages == 1:
        return graph
    microbatches = config.pas_config.get("pipeline_nmicros", _update_freq(config))
    if microbatches is None:
        raise PlanError("a pipeline needs pas_config['pipeline_nmicros'], the number of samples of a train_step")
    if config.plan_ngpus % ranks:
        raise PlanError(f"pp_size={ranks} does not divide plan_ngpus={config.plan_ngpus}")
    if stages % ranks:
        raise PlanError(
            f"pipeline_nstages={stages} is not a multiple of pp_size={ranks}: all ranks must have equally many stages"
        )
    schedule = config.pas_config.get("pipeline_scheduler", "1f1b")
    config.apply_pipeline_scheduler(graph, stages, microbatches, schedule)
    graph.pipeline_ranks = ranks
    return _with_pivots(graph, config)


def _with_pivots(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    pivots = _names(config.pas_config.get("pipeline_pivots"))
    if pivots:
        graph.pivots = list(dict.fromkeys(_inside(graph, module, "pipeline_pivots")[0] for module in pivots))
    return graph


def _data(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    """Cuts the batch over all ranks of a stage; with `tp_size`, the weights over so many, the batch over the others."""
    return _over_axes(graph, config) or _batch_cut(graph)


def _batch_cut(graph: IRGraph) -> IRGraph:
    """Runs every call on a shard of the batch, if its strategies allow that; weights are not sharded."""
    if graph.size == 1:
        return graph
    if not graph.program.inputs:
        raise PlanError("policy 'data' cuts the batch, but forward has no tensor argument: use 'tp' or 'dp'")
    batch: dict[Value, SpmdType] = {value: S(0) for value in graph.program.inputs[:1]}
    for value in graph.program.inputs[1:]:  # inputs with equally many samples, such as targets
        if value.shape[:1] == graph.program.inputs[0].shape[:1]:
            batch[value] = S(0)
    for value in graph.program.parameters:
        graph.constraints.types[value] = (I,)
    for node in graph.operations:
        wanted = [batch.get(value, R) for value in node.inputs()]
        options = [strategy for strategy in graph.strategies(node) if list(strategy.operands) == wanted]
        if options and any(isinstance(type_, Shard) for type_ in wanted):
            graph.constraints.strategies.setdefault(node.call, []).append(_takes(tuple(wanted)))
            for result, type_ in zip(node.outputs(), options[0].results, strict=True):
                if isinstance(type_, Shard):
                    batch[result] = type_
    if not graph.constraints.strategies:
        first = graph.program.inputs[0]
        raise PlanError(
            f"policy 'data' cannot cut the batch: dim 0 of {first.path} {list(first.shape)} over {graph.size} ranks"
        )
    return graph


def _takes(types: tuple[SpmdType, ...]) -> Callable[[Strategy], bool]:
    return lambda strategy: strategy.operands == types


def _autodist(graph: IRGraph, config: ComputeConfig) -> Division:
    """Returns the fastest division that fits the memory, among all numbers of stages."""
    best: tuple[float, Division] | None = None
    refused: list[str] = []
    for attempt, what in _attempts(graph, config):
        try:
            division = _with_options(attempt, config).divide()
        except PlanError as error:
            refused.append(f"{what}: {error}")
            continue
        seconds = _step_time(attempt, division)
        if best is None or seconds < best[0]:
            best = (seconds, division)
    if best is None:
        wanted = config.pas_config.get("explore_axes")
        if not refused and isinstance(wanted, (list, tuple)):
            refused = [
                f"pas_config['explore_axes']={wanted!r} are {prod(wanted)} ranks, and no stage has so many: "
                f"plan_ngpus={config.plan_ngpus}"
            ]
        raise PlanError("\n  - ".join(["autodist found no plan:", *refused]))
    return best[1]


def _with_options(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    """Returns a graph with the limit of memory and the recomputed modules of `autodist`."""
    options = config.pas_config
    if options.get("mem_constraint"):
        graph.memory = options["mem_constraint"] * GB
    for module in _names(options.get("recompute_modules")):
        graph.recompute(_inside(graph, module, "recompute_modules"))
    return graph


def whole_job(program: Program, config: ComputeConfig) -> JobChoice:
    """Returns the choice of a job of all ranks: units, pipeline, ZeRO, recomputation and division together."""
    costs = config.pas_config.get("costs", "h100")
    speeds = costs.of(config.world_size) if isinstance(costs, Cluster) else costs_of(config)

    def graph_of(axes: tuple[int, ...], batch: bool) -> IRGraph:
        ranks = prod(axes)
        unit = replace(config, plan_ngpus=ranks, runtime_ngpus=ranks, use_zero=False)
        graph = IRGraph(program, unit, costs=link_of(speeds, program, ranks))
        graph.later.sizes = axes[1:]
        graph = _with_pivots(_with_options(graph, unit), unit)
        return _batch_cut(graph) if batch else graph

    return JobChoice(program, config, speeds, graph_of, memory_of(config))


def _attempts(graph: IRGraph, config: ComputeConfig) -> Iterator[tuple[IRGraph, str]]:
    """Yields the graphs that autodist compares: numbers of stages and, with `explore_axes`, stages over several axes.

    With several axes, calls get the best strategies over the first one, or the batch is cut over it.
    """
    options, units = config.pas_config, config.plan_ngpus
    explore = options.get("explore_pipeline", "pipeline_nmicros" in options or "pipeline_pivots" in options)
    wanted, degree = options.get("pipeline_nstages", "auto"), options.get("max_partition_degree") or units
    numbers = [d for d in range(1, units + 1) if units % d == 0] if explore else [1]
    numbers = numbers if wanted in ("auto", None) else [wanted]
    for ranks in [ranks for ranks in numbers if units // ranks <= degree or units % ranks]:
        every = axes_wanted(options.get("explore_axes"), units // ranks)
        for axes, batch in ((sizes, batch) for sizes in every for batch in (False, True)[: len(sizes)]):
            attempt = _pipelined(IRGraph(graph.program, config, costs=graph.costs), config, ranks, ranks)
            attempt.later.sizes = axes[1:]
            what = f"{ranks} stages" + (f" of {' x '.join(map(str, axes))} ranks" if len(axes) > 1 else "")
            try:
                yield (_batch_cut(attempt) if batch else attempt), what
            except PlanError:  # the batch cannot be cut into so many parts
                continue


def _update_freq(config: ComputeConfig) -> int | None:
    """Returns the number of microbatches of a step, under nnScaler's name for autodist; of a list, the first."""
    number = config.pas_config.get("update_freq")
    return number[0] if isinstance(number, (list, tuple)) else number


def _names(option: Any) -> list[str]:
    return [name.strip() for name in str(option or "").split(",") if name.strip()]


def _inside(graph: IRGraph, module: str, option: str) -> list[IRFwOperation]:
    """Returns the operations of a module that an option names.

    Raises:
        PlanError: there are none.
    """
    operations = graph.select(ntype=IRFwOperation, module=None if module == "ROOT" else module)
    if not operations:
        names = dict.fromkeys(node.module for node in graph.operations)
        raise PlanError(f"{option}: module {module!r} has no operation; nearest: {nearest(module, names)}")
    return operations


def _step_time(graph: IRGraph, division: Division) -> float:
    """Seconds of a step per microbatch: all stages once, and the slowest stage for each further microbatch."""
    stages = graph.stage_seconds
    return (sum(stages) + (division.microbatches - 1) * max(stages)) / division.microbatches


# Options of nnScaler's autodist without a counterpart here, where costs are computed and not profiled.
_OF_NNSCALER = frozenset(
    "use_fp16 use_memory_efficient_fp16 use_bf16 use_memory_efficient_bf16 re_profile verbose parallel_profile solver "
    "partition_constraints_path use_apex_fused_adam_v2 transient_mem_coef max_pipeline_bubble_ratio profile_dir "
    "max_pipeline_unbalance_ratio recompute_ratio".split()
)
_COMMON = {"costs"}
_PIPELINE = {"pipeline_nmicros", "pipeline_pivots", "pipeline_scheduler", "update_freq"}
_AUTODIST = {
    "mem_constraint",
    "task_name",  # of the run: nothing depends on it
    "pipeline_nstages",
    "max_partition_degree",
    "recompute_modules",
    "load_plan_path",
    "save_plan_path",
    "explore_pipeline",
    "explore_axes",
    "step_samples",
}
POLICIES: dict[str, tuple[Callable[[IRGraph, ComputeConfig], Any], set[str]]] = {
    "dp": (_dp, _COMMON),
    "tp": (_tp, _COMMON | {"seed", "tp_size"}),
    "pp": (_pp, _COMMON | _PIPELINE | {"pipeline_nstages"}),
    "data": (_data, _COMMON | {"tp_size"}),
    "hybrid": (_hybrid, _COMMON | _PIPELINE | {"pipeline_nstages", "pp_size", "tp_size"}),
    "autodist": (_autodist, _COMMON | _PIPELINE | _AUTODIST),
}
"""Each policy's function, and the options in `pas_config` that it reads (`seed`, unused: nnScaler's tp is random)."""
