"""Experts on different ranks: functions beside a loop over them, whole modules beside one process, the choice."""

from __future__ import annotations

import tempfile
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from neuronx_dist import Mesh, comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, build_optimizer, composites, explain, parallelize
from neuronx_dist.parallelize.choose.cuts import between_experts, stage_starts
from neuronx_dist.parallelize.choose.exact import choose
from neuronx_dist.parallelize.choose.job_costs import Job, Links
from neuronx_dist.parallelize.choose.step_cuts import StepCuts
from neuronx_dist.parallelize.policy.graph import IRGraph
from neuronx_dist.parallelize.policy.policies import divide
from neuronx_dist.planning.costs import H100, Costs
from neuronx_dist.planning.plan import PlanError
from neuronx_dist.program.decompose import decomposed
from neuronx_dist.program.experts import expert_product, to_experts, to_tokens
from neuronx_dist.program.record import record_program
from neuronx_dist.program.recording import TracingError
from neuronx_dist.weights.shard_spec import gather_full, spec_of

EXPERTS, TOKENS, TOP_K, WIDTH, INNER = 4, 16, 2, 8, 6
ROUTES = {
    "balanced": torch.stack((torch.arange(TOKENS) % 4, (torch.arange(TOKENS) + 1) % 4), 1),
    "one rank": torch.tensor([[2, 3]]).repeat(TOKENS, 1),  # the first rank of two has no rows
    "uneven": torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0)).topk(TOP_K).indices.clamp(max=2),
}


def loop(x: Tensor, index: Tensor, weights: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    """Computes the experts one by one, for all tokens."""
    shares = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter_add(1, index, weights)
    rows = (F.silu(x @ up[expert] + bias[expert]) @ down[expert] for expert in range(EXPERTS))
    return sum(shares[:, expert : expert + 1] * row for expert, row in enumerate(rows))  # type: ignore[return-value]


def grouped(x: Tensor, index: Tensor, weights: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    rows, offsets = to_experts(x, index, EXPERTS)
    rows = expert_product(F.silu(expert_product(rows, up, offsets, bias)), down, offsets)
    return to_tokens(rows, weights, index, EXPERTS)


def operands(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Tokens, weights of the choices, and the experts' matrices."""
    shapes = ((TOKENS, WIDTH), (TOKENS, TOP_K), (EXPERTS, WIDTH, INNER), (EXPERTS, INNER), (EXPERTS, INNER, WIDTH))
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def results_of(run: Any, index: Tensor, given: list[Tensor]) -> list[Tensor]:
    """A result, and the gradients of all operands."""
    x, weights, *matrices = given
    result = run(x, index, weights, *matrices)
    (result * torch.arange(result.numel()).view(result.shape).to(result)).sum().backward()
    return [result.detach(), *(operand.grad for operand in given)]  # type: ignore[misc]


@pytest.mark.parametrize("route", ROUTES)
def test_functions_compute_what_a_loop_does(route: str) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        wanted = results_of(loop, ROUTES[route], operands(dtype))
        for a, b in zip(results_of(grouped, ROUTES[route], operands(dtype)), wanted, strict=True):
            assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("inner", [INNER, 8])  # without torch's kernel, and with it
def test_autocast_leaves_the_dtype_of_the_matrices(inner: int) -> None:
    """The dtype is that of a recording too, of which bytes are predicted."""
    rows, matrices, offsets = torch.randn(4, 8), torch.randn(2, 8, inner), torch.tensor([1, 4], dtype=torch.int32)
    wanted = expert_product(rows, matrices, offsets)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(expert_product(rows, matrices, offsets), wanted)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = [mode.from_tensor(x) for x in (rows, matrices, offsets)]
            assert expert_product(*fake).dtype == wanted.dtype == torch.float32


@pytest.mark.each_value
@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("route", ROUTES)
def test_a_rank_has_some_of_the_experts(route: str, size: int, exchanged: bool) -> None:
    """Results and gradients that the ranks have parts of, added up or put together: float64 at 1e-10."""
    wanted = results_of(loop, ROUTES[route], operands())

    def rank() -> list[Tensor]:
        x, weights, *matrices = operands()
        index, number, options = ROUTES[route], int(comm.rank("tp")), {"axis": "tp", "exchanged": exchanged}
        here = [part.detach().chunk(size)[number].requires_grad_() for part in matrices]
        if exchanged:
            x, weights = (part.detach().chunk(size)[number].requires_grad_() for part in (x, weights))
            index = index.chunk(size)[number]
        with comm.record() as calls:
            rows, offsets = composites.to_experts(x, index, EXPERTS, **options)
            rows = composites.expert_product(rows, here[0], offsets, here[1], axis="tp")
            rows = composites.expert_product(F.silu(rows), here[2], offsets, axis="tp")
            result = composites.to_tokens(rows, weights, index, EXPERTS, **options)
        # of the counts, once, and of rows, there and back
        assert [call.verb for call in calls] == (["all_to_all", "exchange", "exchange"] if exchanged else [])
        scale = torch.arange(TOKENS * WIDTH).view(TOKENS, WIDTH).to(result)
        (result * (scale.chunk(size)[number] if exchanged else scale)).sum().backward()
        return [result.detach(), *(operand.grad for operand in (x, weights, *here))]  # type: ignore[misc]

    parts = zip(*threads.run(Mesh(size, tp=size), rank), strict=True)
    for number, (computed, whole) in enumerate(zip(parts, wanted, strict=True)):
        together = sum(computed) if number < 3 and not exchanged else torch.cat(computed)
        torch.testing.assert_close(together, whole, rtol=1e-10, atol=1e-10)


class Moe(nn.Module):
    """A router, experts, a shared expert, a balancing loss; the choice of the experts is an argument."""

    def __init__(self, run: Any = grouped) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False, dtype=torch.float64)
        self.shared = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.up, self.bias, self.down = (nn.Parameter(x.detach()) for x in operands()[2:])

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        out = self.run(x, index, shares.gather(1, index), self.up, self.bias, self.down) + self.shared(x)
        return (out - x).pow(2).sum() + 0.1 * EXPERTS * shares.mean(0).pow(2).sum()


def over_experts(exchanged: bool, graph: IRGraph, config: ComputeConfig) -> IRGraph:
    """Policy that divides the experts, with all tokens on each rank or exchanged ones."""
    for node in graph.select(name="to_tokens"):
        graph.constraints.strategies[node.call] = [lambda strategy: ("exchanged" in strategy.name) == exchanged]
    for node in graph.select(name="expert_product"):
        parts = graph.partition(node, node.algorithm("dim"), idx=1, dim=0, num=config.plan_ngpus)
        for device, part in enumerate(parts):
            graph.assign(part, device)
    return graph


def recomputed(exchanged: bool, graph: IRGraph, config: ComputeConfig) -> IRGraph:
    """Policy that divides the experts, and computes rows again in backward."""
    nodes = over_experts(exchanged, graph, config).nodes()
    first, last = (nodes.index(*graph.select(name=name)) for name in ("to_experts", "to_tokens"))
    graph.recompute(nodes[first : last + 1])
    return graph


@pytest.mark.slow
@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize(("size", "policy"), [
    (2, over_experts), (2, recomputed), pytest.param(4, over_experts, marks=pytest.mark.full)
])  # fmt: skip
def test_a_module_learns_as_in_one_process(size: int, policy: Any, exchanged: bool, tmp_path: Path) -> None:
    """Three steps of SGD, each with another route; bytes are those recorded of a balanced route."""
    arguments = {"x": operands()[0], "index": ROUTES["balanced"]}
    config = ComputeConfig(size, size)
    cls: Any = parallelize(Moe, arguments, partial(policy, exchanged), config, gen_savedir=tmp_path)

    def rank() -> tuple[list[float], list[Tensor], list[Any]]:
        parallel = cls()
        optimizer = build_optimizer(parallel, torch.optim.SGD, lr=1e-3)
        losses, events = [], []
        for route in ROUTES.values():
            with comm.record() as calls:
                loss = parallel(arguments["x"], route)
                loss.backward()
            events.append([*calls])
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert parallel.up.shape == (EXPERTS // size, WIDTH, INNER)
        return losses, [gather_full(p.detach(), spec_of(p)) for p in parallel.parameters()], events[0]

    whole, losses = Moe(loop), []
    optimizer = torch.optim.SGD(whole.parameters(), lr=1e-3)
    for route in ROUTES.values():
        loss = whole(arguments["x"], route)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, weights, events in threads.run(config.mesh(), rank):
        assert found == pytest.approx(losses, rel=1e-10)
        for a, b in zip(weights, whole.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-10, atol=1e-10)
        sent = sum(bytes_of(event, size) for event in events)
    predicted = sum(entry["forward_bytes"] + entry["backward_bytes"] for entry in explain(cls)["collectives"])
    assert predicted == sent > 0 or policy is recomputed  # which exchanges rows once more


@pytest.mark.parametrize("exchanged", [False, True])
def test_an_index_that_is_written_in_inference_mode(exchanged: bool) -> None:
    """Reads the index anew in each call: such a tensor counts no writes."""

    def rank() -> None:
        number = int(comm.rank("tp"))
        options: dict[str, Any] = {"axis": "tp", "exchanged": exchanged}
        with torch.inference_mode():
            x, weights, up, bias, down = (part.detach().clone() for part in operands())
            here = [part.chunk(2)[number] for part in (up, bias, down)]
            index = torch.empty_like(ROUTES["balanced"])
            tokens = [part.chunk(2)[number] if exchanged else part for part in (x, index, weights)]
            for route in ROUTES.values():
                index.copy_(route)
                wanted = grouped(x, index, weights, up, bias, down)
                rows, offsets = composites.to_experts(tokens[0], tokens[1], EXPERTS, **options)
                rows = F.silu(composites.expert_product(rows, here[0], offsets, here[1], axis="tp"))
                rows = composites.expert_product(rows, here[2], offsets, axis="tp")
                result = composites.to_tokens(rows, tokens[2], tokens[1], EXPERTS, **options)
                result = comm.all_gather(result, "tp", dim=0) if exchanged else comm.all_reduce(result, "tp")
                torch.testing.assert_close(result, wanted, rtol=1e-10, atol=1e-10)

    threads.run(Mesh(2, tp=2), rank)


def in_stages(first: str, graph: IRGraph, config: ComputeConfig) -> IRGraph:
    """Policy of two stages of two ranks, which have two experts each; "": stages are cut by their seconds."""
    config.apply_pipeline_scheduler(graph, 2, 2, "1f1b")
    for node in graph.select(name="expert_product"):
        graph.constraints.strategies[node.call] = [lambda strategy: "all tokens" in strategy.name]
    if first:
        graph.staging([graph.operations[0], graph.select(name=first)[0]])
    return graph


def test_no_stage_begins_between_divided_experts() -> None:
    """Refuses a message of rows, whose number the routing decides."""
    module, arguments = Moe(), {"x": operands()[0].detach(), "index": ROUTES["balanced"]}
    config = ComputeConfig(4, 4, use_end2end=True)
    costs = Costs(flops=1e8, bandwidth=1e9, launch=1e-4, link_bandwidth=1e12, link_latency=1e-9)  # messages are free
    program = decomposed(record_program(module, arguments, training=True))
    names = [call.name for call in program.calls]
    never = {*range(names.index("to_experts") + 1, names.index("to_tokens") + 1)}

    def graph() -> IRGraph:
        return IRGraph(program, config, costs=costs)

    by_seconds = in_stages("", graph(), config)
    division, problem = by_seconds.divide(), by_seconds.problem()
    assert between_experts(division).keys() == never and division.stages[1] not in never
    last = len(names) - 1
    some = {*never, last}  # the only one at which a stage may begin is the last call
    assert stage_starts(problem, division, 2, some) == [0, last]
    job, links = Job(1, 2, 2, False, 2), Links(costs, costs, costs)
    assert StepCuts(problem, division, job, links, "1f1b", some, None).best() == [[0, last]]
    assert in_stages("to_experts", graph(), config).divide().stages[1] == names.index("to_experts")
    for name in ("expert_product", "to_tokens"):
        with pytest.raises(PlanError, match=rf"a stage begins at {name}.*Begin the stage at to_experts, or behind"):
            in_stages(name, graph(), config).divide()


def test_experts_are_divided_over_one_axis() -> None:
    def policy(graph: IRGraph, config: ComputeConfig) -> IRGraph:
        for node in graph.select(name="expert_product"):
            for i, half in enumerate(graph.partition(node, node.algorithm("dim"), idx=1, dim=0, num=2)):
                for j, part in enumerate(graph.partition(half, half.algorithm("dim"), idx=1, dim=0, num=2)):
                    graph.assign(part, 2 * i + j)
        return graph

    program = record_program(Moe(), {"x": operands()[0], "index": ROUTES["balanced"]}, training=True)
    with pytest.raises(PlanError, match=r"experts are divided over tp/2, and over one axis only: cut their columns"):
        divide(decomposed(program), policy, ComputeConfig(4, 4))


def test_experts_behind_a_router_that_each_rank_computes() -> None:
    """Generates a module whose choice of experts is one value on all ranks (I)."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = Moe()

        def forward(self, x: Tensor) -> Tensor:
            return self.moe(x, self.moe.router(x).topk(TOP_K).indices)

    def policy(graph: IRGraph, config: ComputeConfig) -> IRGraph:
        for name in ("linear", "topk", "softmax"):
            for node in graph.select(name=name):
                graph.constraints.strategies[node.call] = [lambda strategy: strategy.name == "I"]
        return over_experts(False, graph, config)

    with tempfile.TemporaryDirectory() as folder:
        parallelize(Routed(), {"x": operands()[0]}, policy, ComputeConfig(2, 2), gen_savedir=folder, load_module=False)


def bytes_of(event: Any, size: int) -> int:
    """Bytes that a rank sends for a collective."""
    here = event.dtype.itemsize * prod(event.shape)  # of an exchange what is for other ranks
    others = {"all_reduce": 2 / size, "all_gather": 1, "exchange": 1 / (size - 1)}.get(event.verb, 1 / size)
    return int(here * others * (size - 1))


def chosen(top_k: int, experts: int, size: int) -> set[str]:
    """Returns how `choose` divides experts with bfloat16 weights by the costs of an H100."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(1024, experts)
            self.up, self.down = (nn.Parameter(torch.empty(experts, *s)) for s in ((1024, 2048), (2048, 1024)))

        def forward(self, x: Tensor) -> Tensor:
            weights, index = self.router(x).softmax(-1).topk(top_k)
            rows, offsets = to_experts(x, index, experts)
            rows = expert_product(F.silu(expert_product(rows, self.up, offsets)), self.down, offsets)
            return x + to_tokens(rows, weights, index, experts)

    with torch.device("meta"):
        module, x = Layer().bfloat16(), torch.empty(8192, 1024, dtype=torch.bfloat16)
    program = record_program(module, {"x": x.requires_grad_()}, training=True)
    strategies = choose(program, "tp", size, costs=H100).strategies
    return {strategies[call].name for call in program.calls if call.name == "to_tokens"}


def test_tokens_are_exchanged_where_that_sends_less() -> None:
    """A row goes to each of its k experts; otherwise each rank needs all tokens."""
    assert chosen(1, 8, 8) == {"experts, tokens exchanged"}
    assert chosen(8, 64, 2) == {"experts, all tokens on each rank"}
    assert not any("experts" in name for name in chosen(2, 6, 4))  # 6 experts are not divided by 4


def test_a_loop_over_experts_is_refused_with_the_way_out() -> None:
    """Mistral's reference code asks which tokens an expert has."""

    def asking(x: Tensor, index: Tensor, weights: Tensor, *matrices: Tensor) -> Tensor:
        token, choice = torch.where(index == 0)
        return torch.zeros_like(x).index_add(0, token, weights[token, choice, None] * x[token])

    arguments = {"x": operands()[0], "index": ROUTES["balanced"]}
    with pytest.raises(TracingError, match=r"where needs the values .* expert_product and to_tokens of neuronx_dist"):
        record_program(Moe(asking), arguments, training=True)
