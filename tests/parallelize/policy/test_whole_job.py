"""Whole jobs of `autodist`: equal to brute force, trained as in one process, moved by memory and bandwidth, refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, product
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, build_optimizer, explain, parallelize
from neuronx_dist.parallelize.choose import step_cuts
from neuronx_dist.parallelize.choose.job_costs import DividedUnit, Job, blocks_of, staged
from neuronx_dist.parallelize.choose.step_cuts import StepCuts
from neuronx_dist.parallelize.policy.graph import IRGraph
from neuronx_dist.parallelize.policy.plans import plan_of
from neuronx_dist.parallelize.policy.policies import divide, whole_job
from neuronx_dist.parallelize.policy.whole_job import JobChoice
from neuronx_dist.planner import Cluster
from neuronx_dist.planner.simulation import Simulator
from neuronx_dist.planning.costs import Costs
from neuronx_dist.planning.plan import Plan, PlanError
from neuronx_dist.program.program import Division, Program
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.parallelize.support.lines import Lines
from tests.parallelize.support.mutants import EAGER
from tests.parallelize.support.pipelines import first, module, samples

# Products, links and calls all count at these sizes.
COSTS = Costs(flops=2e5, bandwidth=1e5, launch=1e-4, link_bandwidth=4e4, link_latency=2e-3)


def layers(count: int, width: int = 16, batch: int = 8) -> Program:
    """Linear layers in a list, and the sum of their outputs after a single one."""
    lines = Lines(torch.float64)
    x = lines.input("x", batch, width)
    for layer in range(count):
        lines.module = f"layers.{layer}"
        x = lines(F.linear, x, lines.parameter(f"layers.{layer}.weight", width, width))
    lines.module = ""
    return lines.program(lines(torch.sum, x) if count == 1 else x)


def blocks(widths: Sequence[int], batch: int = 512) -> Program:
    """Two linear layers in each block, with an activation of its width between them."""
    lines = Lines(torch.float64)
    x = lines.input("x", batch, 8)
    for number, width in enumerate(widths):
        lines.module = f"blocks.{number}"
        x = lines(F.gelu, lines(F.linear, x, lines.parameter(f"blocks.{number}.up", width, 8)))
        x = lines(F.linear, x, lines.parameter(f"blocks.{number}.down", 8, width))
    lines.module = ""
    return lines.program(lines(torch.sum, x))


def choice(program: Program, ranks: int, memory: float | None = None, costs: Any = COSTS, **options: Any) -> JobChoice:
    options |= {"costs": costs, "mem_constraint": (memory or 1e12) / 1e9}
    return whole_job(program, ComputeConfig(runtime_ngpus=ranks, use_end2end=True, pas_config=options))


def chosen(of: JobChoice) -> dict[str, Any]:
    """Returns what the costs say of the chosen job."""
    costs = of.division().costs
    assert costs is not None
    job: dict[str, Any] = costs()["job"]
    return job


# --- the choice, by brute force


def every_division(graph: IRGraph) -> Iterator[Division]:
    """Yields all strategies of all calls with all types of all parameters; one for a single rank."""
    problem = graph.problem()
    if graph.size == 1:
        yield problem.solve(0.0).division
        return
    calls, types = list(problem.options), list(problem.types)
    for strategies in product(*problem.options.values()):
        for leaves in product(*problem.types.values()):
            pairs = dict(zip(calls, strategies, strict=True)), dict(zip(types, leaves, strict=True))
            yield Division(graph.program, graph.axis, graph.size, *pairs)


def spans_of(program: Program) -> list[tuple[tuple[int, int], ...]]:
    blocks = blocks_of(program)
    return list(chain.from_iterable(combinations(blocks, count) for count in range(len(blocks) + 1)))


def fastest(of: JobChoice) -> dict[Job, float]:
    """Returns by job the least seconds per sample of all divisions, all cuts and all recomputed blocks that fit."""
    best = {row.job: inf for row in of.rows()}
    for job in best:
        graph, problem, _ = of.divided_over(job)
        for division in every_division(graph):
            if job.microbatches * sum(problem.tables.times(division.strategies, division.type_of)) / job.pp > (
                best[job] * job.samples
            ):
                continue
            for starts in combinations(range(1, len(of.program.calls)), job.pp - 1):
                for spans in spans_of(of.program) if of.memory < 1e12 else [()]:
                    unit = DividedUnit(problem, staged(division, (0, *starts), job, "1f1b"), spans)
                    costs = unit.costs(job, of.links(job), "1f1b", None)
                    if max(costs.peaks) <= of.memory:
                        best[job] = min(best[job], costs.seconds / job.samples)
    return best


@pytest.mark.parametrize(("program", "ranks", "memory", "costs"), [
    (layers(2), 2, 1e12, COSTS),
    (layers(1), 4, 1e12, replace(COSTS, link_bandwidth=4e5)),  # the batch is cut in a unit
    (layers(1), 4, 1e12, replace(COSTS, flops=1e8, bandwidth=1e4, link_bandwidth=1e6)),  # weights count most
    (layers(1, batch=64), 4, 1e12, replace(COSTS, link_bandwidth=4e5, optimizer_bytes=2000)),  # so does their state
    (layers(2), 2, 9e3, COSTS),
    (layers(1), 4, 4e3, COSTS),
])  # fmt: skip
def test_the_choice_is_the_fastest_of_all_jobs(program: Program, ranks: int, memory: float, costs: Costs) -> None:
    """Each job without stages has the fastest division, if there is memory for it, and no job is below its bound."""
    of = choice(program, ranks, step_samples=4, costs=costs, memory=memory)
    every, rows = fastest(of), of.rows()
    assert chosen(of)["seconds_per_sample"] == pytest.approx(min(every.values()), rel=1e-9)
    for row in rows if memory == 1e12 else ():
        if row.job.pp == 1:
            of.compare(row, inf)
            assert row.found and row.found.per_sample == pytest.approx(every[row.job], rel=1e-9), row.job
        assert every[row.job] >= row.bound * (1 - 1e-9), row.job


@pytest.mark.parametrize("part", [0.7, 0.5, 0.35])
def test_the_gap_leaves_out_jobs_that_cannot_fit(part: float) -> None:
    """Brute force agrees that they do not fit, and that the fastest of the others is in the gap."""
    program, costs = layers(1, batch=64), replace(COSTS, link_bandwidth=4e5)
    free = chosen(choice(program, 4, step_samples=4, costs=costs, explore_pipeline=False))
    of = choice(program, 4, memory=free["peak_bytes"] * part, step_samples=4, costs=costs, explore_pipeline=False)
    every, job = fastest(of), chosen(of)
    refused = [row["job"] for row in job["compared"] if "parameters need at least" in row["why"]]
    assert refused and all(every[row.job] == inf for row in of.rows() if str(row.job) in refused)
    bound = job["seconds_per_sample"] * (1 - job["gap"])
    others = [row["at_least"] for row in job["compared"] if "need" not in row["why"]]
    assert bound == pytest.approx(min(others)) and bound <= min(every.values()) == pytest.approx(
        job["seconds_per_sample"]
    )


@pytest.mark.parametrize("changes", [{}, {"link_bandwidth": 4e5}, {"flops": 1e8, "bandwidth": 1e4, "launch": 1e-2}])
def test_no_division_over_two_axes_is_below_its_bound(changes: dict[str, float]) -> None:
    """Brute force over the first axis, the search over the second; the job found is the fastest of all compared."""
    options = {"step_samples": 4, "explore_axes": True, "explore_pipeline": False}
    of = choice(layers(1, 6, 6), 4, costs=replace(COSTS, **changes), **options)
    best, rows = chosen(of)["seconds_per_sample"], of.rows()
    for row in rows:
        of.compare(row, inf)
        assert row.found and row.found.per_sample >= max(best, row.bound) * (1 - 1e-9), row.job
    axes = [row.job for row in rows if row.job.axes]
    assert [(job.axes, job.batch) for job in axes] == [((2, 2), False), ((2, 2), True)]
    for job in axes:
        graph, least = of.divided_over(job)[0], inf
        for division in every_division(graph):
            try:
                inner, _ = graph._of_a_rank(division)
            except ValueError:  # no operator converts between its types
                continue
            with suppress(PlanError):
                least = min(least, inner.problem().solve(0.0).cost)
        assert of._least(job) <= least < inf


def test_the_blocks_of_least_time_are_recomputed() -> None:
    """Blocks of widths 16, 8, 64 and 24, of three calls: not always the first, nor the largest."""
    program, options = blocks([16, 8, 64, 24]), {"max_partition_degree": 1, "explore_pipeline": False}
    free, recomputed = chosen(choice(program, 2, **options)), []
    for part in (0.95, 0.7):
        of = choice(program, 2, memory=free["peak_bytes"] * part, **options)
        recomputed.append([span[0] // 3 for span in of.division().recompute])
        assert chosen(of)["seconds_per_sample"] == pytest.approx(min(fastest(of).values()), rel=1e-9)
    assert recomputed == [[0, 1], [0, 2, 3]]


# --- what moves the choice


def test_memory_moves_the_choice() -> None:
    """From data parallel ranks with ZeRO to divided units, and recomputation; a tighter limit is never faster."""
    program, jobs, seconds = blocks([64, 64, 64], batch=64), [], []
    for memory in (None, 150e3, 80e3, 50e3):
        job = chosen(choice(program, 4, memory=memory, costs=replace(COSTS, link_bandwidth=2e4)))
        jobs.append(job["chosen"] + (" recomputing" if job["recomputing_seconds"] else ""))
        seconds.append(job["seconds_per_sample"])
        assert memory is None or job["peak_bytes"] <= memory
    assert seconds == sorted(seconds)
    assert jobs == ["4 x one rank ZeRO", "2 x tp=2 ZeRO", "1 x tp=4", "1 x tp=4 recomputing"]


def test_stages_are_cut_by_bytes_where_those_of_equal_time_do_not_fit() -> None:
    program = blocks([256, 64, 64, 64], batch=16)
    options: dict[str, Any] = {"max_partition_degree": 1, "pipeline_nstages": 2, "pipeline_nmicros": 4}
    costs = replace(COSTS, bandwidth=1e9, launch=1.0)  # all calls take equally long
    free = choice(program, 2, costs=costs, **options).division()
    assert free.costs is not None and free.stages == [0, 6]
    tight = choice(program, 2, costs=costs, memory=free.costs()["job"]["peak_bytes"] - 1, **options).division()
    assert tight.stages[1] < 6


@pytest.mark.parametrize(("widths", "stages", "microbatches", "changes"), [
    ([8, 128, 16], 2, 2, {}),
    ([16, 64], 3, 1, {"link_bandwidth": 4e6}),
    ([32, 32, 32, 32], 2, 2, {"link_bandwidth": 4e6, "link_latency": 0.0}),  # a first stage of 60 %
    ([64, 32, 8], 3, 4, {"bandwidth": 1e6}),
    ([128, 64, 8], 4, 4, {}),
    ([32, 32, 64], 3, 8, {"launch": 1e-2}),
])  # fmt: skip
def test_the_cut_is_the_fastest_of_all(
    widths: list[int], stages: int, microbatches: int, changes: dict[str, float]
) -> None:
    """Brute force over all cuts, each with the least recomputation that fits; a tighter limit is never faster."""
    program, costs, previous = blocks(widths), replace(COSTS, **changes), 0.0
    options = {"max_partition_degree": 1, "pipeline_nstages": stages, "pipeline_nmicros": microbatches}
    free = chosen(choice(program, stages, costs=costs, **options))
    for part in (1.0, 0.9, 0.7):
        of = choice(program, stages, costs=costs, memory=free["peak_bytes"] * part, **options)
        division, (row,) = of.division(), of.rows()
        assert division.costs is not None
        problem, best = of.divided_over(row.job)[1], inf
        for starts in combinations(range(1, len(program.calls)), stages - 1):
            unit = DividedUnit(problem, staged(division, (0, *starts), row.job, "1f1b"))
            found = unit.costs(row.job, of.links(row.job), "1f1b", of.memory)
            best = min(best, found.seconds if max(found.peaks) <= (of.memory or inf) else inf)
        seconds = division.costs()["job"]["seconds"]
        assert seconds == pytest.approx(best, rel=1e-9) and best >= row.bound * row.job.samples
        assert seconds >= previous
        previous = seconds


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (2, 1000), (3, 1000)])
def test_all_cuts_of_many_microbatches_are_compared(
    stages: int, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of the search counts the tasks that are simulated: of a thousand microbatches those of some thirty."""
    simulated, compared = [], {}

    def counting(self: Simulator, schedule: Any, *costs: Any) -> float:
        simulated.append(2 * schedule.num_stages * schedule.num_microbatches)
        return original(self, schedule, *costs)

    def noting(self: StepCuts, starts: Sequence[int]) -> tuple[float, float]:
        compared[tuple(starts)] = estimate(self, starts)
        return compared[tuple(starts)]

    program = blocks([32, 16, 64])
    of = choice(program, stages, max_partition_degree=1, pipeline_nstages=stages, pipeline_nmicros=microbatches)
    (row,) = of.rows()
    solved, links = of._solve(row.job, 0.0), of.links(row.job)
    every = [(0, *cut) for cut in combinations(range(1, len(program.calls)), stages - 1)]
    cuts = StepCuts(solved.choice, solved.division, row.job, links, "1f1b", None, None)
    seconds = {cut: cuts._estimate(cut) for cut in every}
    original, estimate = Simulator.simulated, StepCuts._estimate
    monkeypatch.setattr(Simulator, "simulated", counting)
    monkeypatch.setattr(StepCuts, "_estimate", noting)
    monkeypatch.setattr(step_cuts, "TASKS", 30_000)
    cuts = StepCuts(solved.choice, solved.division, row.job, links, "1f1b", None, None)
    assert seconds[tuple(cuts.best()[0])] == min(seconds.values())
    assert step_cuts.TASKS - cuts._tasks == sum(simulated) > 0
    assert stages > 2 or set(compared) == set(every)


def test_a_faster_device_or_link_is_never_slower() -> None:
    program = blocks([64, 64], batch=64)
    for name in ("link_bandwidth", "bandwidth", "flops"):
        seconds = []
        for factor in (1, 16):
            costs = replace(COSTS, **{name: getattr(COSTS, name) * factor})
            seconds.append(chosen(choice(program, 4, costs=costs, memory=150e3))["seconds_per_sample"])
        assert seconds[0] >= seconds[1], name


def test_divided_units_lie_inside_of_hosts() -> None:
    """At 1 GB a rank, one host of 8 and two: the network between hosts is for units alone."""
    program, jobs = blocks([4096] * 4, batch=4096), []
    for ranks in (8, 16):
        jobs.append(chosen(choice(program, ranks, costs=Cluster.preset("h100", ranks), memory=1e9)))
    assert [job["chosen"] for job in jobs] == ["4 x tp=2", "8 x tp=2"]
    assert jobs[1]["update_seconds"] > 2 * jobs[0]["update_seconds"]


# --- what is refused


def test_what_fits_nowhere_is_refused_with_what_would_fit() -> None:
    program = blocks([64, 64], batch=64)
    with pytest.raises(PlanError) as refused:
        choice(program, 2, memory=60e3).division()
    found = re.search(
        r"no job of 2 ranks fits 60.0 KB on a rank: the smallest, 1 x tp=2, needs (\S+) KB with its blocks recomputed, "
        r"(\S+) KB too many: use 4 ranks, or pas_config mem_constraint=(\S+)",
        str(refused.value),
    )
    assert found and float(found[1]) - float(found[2]) == pytest.approx(60)
    assert choice(program, 2, memory=float(found[3]) * 1.001e9).division().size == 2
    assert choice(program, 4, memory=60e3).division().size == 4


def test_other_refusals() -> None:
    program = layers(2)
    for options, text in (
        ({"pipeline_nstages": 3}, "no job of 4 ranks goes with pipeline_nstages=3: units times stages times tp"),
        (
            {"step_samples": 3, "max_partition_degree": 1, "explore_pipeline": False},
            "goes with step_samples=3: .* must",
        ),
        ({"pipeline_nstages": 4}, "1 x pp=4: pipeline: 2 calls cannot be cut into 4 stages"),
    ):
        with pytest.raises(PlanError, match=text):
            choice(program, 4, **options).division()
    config = ComputeConfig(runtime_ngpus=4)
    for policy in ("tp", lambda graph, config: graph):
        with pytest.raises(PlanError, match="needs plan_ngpus, the ranks of a unit: pass ComputeConfig"):
            divide(program, policy, config)
    with pytest.raises(ValueError, match="plan_ngpus is not chosen yet: pass it, or read the compute_config"):
        config.units  # noqa: B018
    with pytest.raises(ValueError, match="zero_ngroups counts groups of units: pass plan_ngpus"):
        ComputeConfig(runtime_ngpus=4, use_zero=True, zero_ngroups=2)
    mesh = ComputeConfig(2, 4).mesh()
    with pytest.raises(ValueError, match="the configuration is for 8 ranks, but the job's mesh is"):
        ComputeConfig(runtime_ngpus=8).check_mesh(mesh)


# --- training


JOBS: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "tp": ("skip", 2, {"mem_constraint": 2.3e-5, "pipeline_nstages": 1, "update_freq": 2}, "1 x tp=2"),
    "pipelines": (
        "mlp",
        4,
        {"mem_constraint": 1.9e-5, "step_samples": 4, "pipeline_nstages": 2, "max_partition_degree": 1},
        "2 x pp=2 ZeRO",
    ),
    "axes": (
        "even",
        4,
        {"step_samples": 1, "pipeline_nstages": 1, "explore_axes": True, "costs": EAGER},
        "1 x tp=4 (2 x 2)",
    ),
    "axes in stages": (
        "mlp",
        8,
        {
            "step_samples": 4,
            "pipeline_nstages": 2,
            "explore_axes": [2, 2],
            "recompute_modules": "layers.1",
            "costs": EAGER,
        },
        "1 x pp=2 tp=4 (2 x 2)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_the_chosen_job_trains_as_one_process(name: str, tmp_path: Path) -> None:
    """Three steps of SGD: all gradients and weights; the files are generated before there is a mesh."""
    model, ranks, options, expected = JOBS[name]
    zero1 = True if "ZeRO" in expected else None  # None: chosen
    config = ComputeConfig(runtime_ngpus=ranks, use_end2end=True, use_zero=zero1, pas_config=options)
    make = partial(parallelize, module(model), {"data": samples(model, 1)[0]}, "autodist", config, gen_savedir=tmp_path)
    make(load_module=False)
    (file,) = tmp_path.rglob("plan.json")
    plan, job = Plan.load(file), json.loads(file.read_text())["costs"]["job"]
    assert job["chosen"] == expected and (plan.dp, plan.zero1) == (job["units"], job["zero1"])
    mesh = ComputeConfig(plan.tp * plan.pp, ranks).mesh(plan.pp)

    def rank() -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        parallel: Any = make()
        assert parallel.compute_config == replace(config, plan_ngpus=plan.tp * plan.pp, use_zero=plan.zero1)
        assert explain(parallel)["job"] == job and f"{expected}, " in str(explain(parallel))
        optimizer, gradients = build_optimizer(parallel, torch.optim.SGD, lr=0.1), []
        for step in range(3):
            parallel.train_step(samples(model, job["microbatches"], step, comm.rank("dp")))
            has = {n: p for n, p in parallel.named_parameters() if p.grad is not None}
            gradients.append({n: gather_full(comm.all_reduce(p.grad, "dp"), spec_of(p)) for n, p in has.items()})
            optimizer.step()
        return gradients, {n: gather_full(p, spec_of(p)).clone() for n, p in parallel.named_parameters()}

    results = threads.run(mesh, rank)
    alone = module(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for unit in range(plan.dp):
            for sample in samples(model, job["microbatches"], step, unit):
                first(alone(sample)).backward()
        expected_gradients = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
        found = {n: grad for gradients, _ in results for n, grad in gradients[step].items()}
        torch.testing.assert_close(found, expected_gradients, rtol=1e-10, atol=1e-12)
        optimizer.step()
    for _, weights in results:
        wanted = {n: p.detach() for n, p in alone.named_parameters() if n in weights}
        torch.testing.assert_close(weights, wanted, rtol=1e-10, atol=1e-12)


def test_a_plan_has_the_size_of_its_unit() -> None:
    """A plan of a whole job has the size of a unit and ZeRO."""
    program = blocks([64, 64, 64], batch=64)
    division = choice(program, 4, memory=150e3, costs=replace(COSTS, link_bandwidth=2e4)).division()
    plan = plan_of(division, units=2, zero1=division.zero1)
    again = divide(program, plan, ComputeConfig(runtime_ngpus=4, use_end2end=True))
    assert (again.size, again.zero1, again.types) == (2, True, division.types)
