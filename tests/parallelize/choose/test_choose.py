"""The choice of strategies: Megatron's layout is found, brute force agrees, memory and constraints are kept."""

from __future__ import annotations

import itertools
import time
from math import inf
from random import Random

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist.parallelize.choose import exact
from neuronx_dist.parallelize.choose.conversions import conversion
from neuronx_dist.parallelize.choose.cost_tables import saves
from neuronx_dist.parallelize.choose.exact import Constraints, StrategyChoice, choose
from neuronx_dist.parallelize.choose.strategies import candidates, strides_of
from neuronx_dist.planning.costs import CPU, H100, Costs
from neuronx_dist.planning.plan import PlanError
from neuronx_dist.program.program import Division, operands_of
from neuronx_dist.spmd.types import I, P, R, S
from tests.parallelize.support.lines import Lines, llama, mlp

pytestmark = pytest.mark.slow


def strategies(call, size):
    return candidates(call, "tp", size)


def conversions_of(division):
    """Every conversion: (value, from, to), those that several consumers share once."""
    found = []
    for call in division.program.calls:
        wants = division.strategies[call].operands
        for value, want in zip(operands_of(call), wants, strict=True):
            have = division.type_of(value)
            if have != want and (value, have, want) not in found:
                found.append((value, have, want))
    return found


@pytest.mark.parametrize("layers", [1, 3])
def test_llama_8b_gets_megatrons_columns_and_rows_with_sequence_parallelism(layers):
    division = choose(llama(layers), "tp", 8, costs=H100)
    rows = {"o_proj", "down_proj"}
    for parameter in division.program.parameters:
        name = parameter.path.split(".")[-2]
        expected = I if "norm" in name else S(1) if name in rows else S(0)
        assert division.types[parameter] == expected, parameter
    collectives = []
    for value, have, want in conversions_of(division):
        operator = conversion(value, have, want, 8).operator
        if operator != "convert":
            collectives.append(operator)
    assert collectives == ["all_gather", "reduce_scatter"] * 2 * layers
    norms = [call for call in division.program.calls if "norm" in call.module]
    assert all(division.strategies[call].results == (S(1),) for call in norms)  # the sequence is cut


def test_32_layers_cost_little_more_than_4():
    def seconds(layers):
        program = llama(layers)
        start = time.process_time()
        choose(program, "tp", 8, costs=H100)
        return time.process_time() - start

    seconds(1)
    assert seconds(4) < 1.0
    assert seconds(32) < 1.5


def cost_of(problem, division):
    """The cost of a division by its definition: each call, each (value, wanted type) once, outputs whole."""
    program, size, costs = problem.program, problem.size, problem.costs

    def converted(value, have, want):
        if have == want:
            return 0.0
        found = conversion(value, have, want, size)
        if found is None:
            return inf
        forward = found.forward / costs.link_bandwidth + found.collectives[0] * costs.link_latency
        backward = found.backward / costs.link_bandwidth + found.collectives[1] * costs.link_latency
        return forward + backward

    total = 0.0
    for call in program.calls:
        strategy = division.strategies[call]
        local = [
            torch.Size(value.shape).numel() * value.dtype.itemsize / (size if isinstance(t, S) else 1)
            for value, t in zip((*operands_of(call), *call.results), (*strategy.operands, *strategy.results))
        ]
        work = max(call.flops * strategy.share / costs.flops, sum(local) / costs.bandwidth)
        total += 3 * work + 2 * costs.launch if call.results[0].requires_grad else work + costs.launch
    for value, have, want in conversions_of(division):
        total += converted(value, have, want)
    for value in program.outputs:
        ends = (I,) if value.requires_grad else (R, I)
        total += min(converted(value, division.type_of(value), end) for end in ends)
    return total


def shared_input():
    """One value that three calls want: a form of it that several want is paid once."""
    lines = Lines(torch.float64)
    x = lines.input("x", 4, 8)
    h = lines(F.linear, x, lines.parameter("a", 8, 8))
    columns = [lines(F.linear, h, lines.parameter(name, 8, 8)) for name in "bc"]
    return lines.program(lines(torch.sum, lines(torch.add, lines(torch.add, *columns), h)))


SLOW_LINK = Costs(flops=1e9, bandwidth=1e9, launch=1e-7, link_bandwidth=1e8, link_latency=1e-7)
FAST_LINK = Costs(flops=1e7, bandwidth=1e9, launch=1e-7, link_bandwidth=1e9, link_latency=1e-8)


@pytest.mark.each_value
@pytest.mark.parametrize("costs", [SLOW_LINK, FAST_LINK, CPU], ids=["slow link", "fast link", "cpu"])
@pytest.mark.parametrize("program", [lambda: mlp(1, 4, 4), shared_input], ids=["mlp", "shared input"])
def test_equals_brute_force(program, costs):
    """Against the cost's definition, written a second time above, over all combinations."""
    full = StrategyChoice(program(), "tp", 2, costs, Constraints(), strategies)
    random = Random(costs.link_bandwidth)  # some strategies of each call, so that there are not too many combinations
    few = {
        call: options[:2] + random.sample(options[2:], min(2, len(options) - 2))
        for call, options in full.options.items()
    }
    problem = StrategyChoice(full.program, "tp", 2, costs, Constraints(), lambda call, size: few[call])
    division = problem.solve(0.0).division
    best = inf
    for chosen in combinations(problem):
        best = min(best, cost_of(problem, chosen))
    assert cost_of(problem, division) == pytest.approx(best, rel=1e-9, abs=1e-10)
    assert problem.solve(0.0).cost == pytest.approx(best, rel=1e-9, abs=1e-10)


def combinations(problem):
    """Every division whose conversions all exist, built call by call."""
    parameters = problem.program.parameters
    for types in itertools.product(*(problem.types[value] for value in parameters)):
        leaves = {value: options[0] for value, options in problem.types.items()} | dict(zip(parameters, types))

        def extended(division, calls):
            if not calls:
                yield division
                return
            call, *rest = calls
            for strategy in problem.options[call]:
                wants = zip(operands_of(call), strategy.operands)
                if all(
                    division.type_of(v) == t or conversion(v, division.type_of(v), t, problem.size) for v, t in wants
                ):
                    division.strategies[call] = strategy
                    yield from extended(division, rest)

        yield from extended(Division(problem.program, "tp", problem.size, {}, leaves), problem.program.calls)


def test_memory_raises_the_price_until_it_fits():
    program = mlp(4, 64, batch=512)  # much data, small weights: cut the batch, keep the weights
    free = StrategyChoice(program, "tp", 4, SLOW_LINK, Constraints(), strategies)
    division, held, _ = free.solve(0.0)
    assert all(division.types[value] == I for value in program.parameters)
    tight = held.total() * 0.8
    fitting = choose(program, "tp", 4, costs=SLOW_LINK, memory=tight)
    assert free.tables.held(fitting.strategies, fitting.types).total() <= tight
    assert any(isinstance(fitting.types[value], S) for value in program.parameters)
    with pytest.raises(PlanError, match=r"every division over 4 ranks needs at least .* the limit is 10"):
        choose(program, "tp", 4, costs=SLOW_LINK, memory=10)


def test_constraints_are_kept_and_the_rest_is_chosen():
    program = mlp(2, 16)
    first, second = program.parameters
    division = choose(program, "tp", 2, costs=H100, constraints=Constraints(types={first: (S(0),), second: (S(1),)}))
    assert (division.types[first], division.types[second]) == (S(0), S(1))
    linear = [call for call in program.calls if call.name == "linear"]
    keep = Constraints(strategies={linear[0]: [lambda strategy: strategy.operands[1] == S(1)]})
    division = choose(program, "tp", 2, costs=H100, constraints=keep)
    assert division.strategies[linear[0]].operands == (S(1), S(1))
    assert division.strategies[linear[0]].results == (P,)


def test_a_constraint_that_nothing_satisfies_is_refused_with_what_there_is():
    program = mlp(1, 15, batch=8)
    with pytest.raises(PlanError, match=r"layers.0.weight \[15, 15\] cannot be S\(0\) over 2 ranks; it can be I"):
        choose(program, "tp", 2, costs=H100, constraints=Constraints(types={program.parameters[0]: (S(0),)}))
    never = Constraints(strategies={program.calls[0]: [lambda strategy: False]})
    with pytest.raises(
        PlanError, match=r"linear\(x, layers_0_weight\).* the plan allows none of its strategies over \d+ ranks: R, I"
    ):
        choose(program, "tp", 2, costs=H100, constraints=never)


def test_inputs_are_whole_and_a_loss_is_invariant():
    program = mlp(2, 16)
    division = choose(program, "tp", 2, costs=FAST_LINK)
    assert division.types[program.inputs[0]] is R
    loss = program.outputs[0]
    assert division.type_of(loss) is I or conversion(loss, division.type_of(loss), I, 2) is not None


def test_one_rank_converts_nothing():
    division = choose(mlp(2, 16), "tp", 1, costs=H100)
    assert all(isinstance(t, S) or t in (R, I) for t in division.types.values())


def test_strides_are_those_of_blocks():
    lines = Lines()
    x = lines.input("x", 4, 12)
    lines(torch.chunk, x, 3, -1)
    lines(torch.split, x, 6, -1)
    assert strides_of(lines.program()) == (2, 3)
    lines(torch.split, x, [6, 3, 3], -1)  # more queries than keys
    assert strides_of(lines.program()) == (2, 3, 4)
    lines(torch.chunk, x, 1, -1)
    qkv = lines(torch.Tensor.view, lines.input("y", 2, 10), 2, 5, 2)
    lines(torch.unbind, qkv, 1)
    lines(torch.unbind, lines.input("z", 2, 16), 1)  # steps
    assert strides_of(lines.program()) == (2, 3, 4, 5)
    lines(torch.Tensor.__getitem__, lines.input("u", 6, 2), 1)
    lines(torch.Tensor.__getitem__, x, (slice(None), 1))
    assert strides_of(lines.program()) == (2, 3, 4, 5, 6)


def test_a_fused_weight_is_cut_in_blocks():
    lines = Lines(torch.float32)
    x = lines.input("x", 1, 64, 128)
    qkv = lines(F.linear, x, lines.parameter("qkv", 3 * 128, 128))
    q, k, v = lines(torch.chunk, qkv, 3, -1)
    heads = [lines(torch.Tensor.transpose, lines(torch.Tensor.view, z, (1, 64, 4, 32)), 1, 2) for z in (q, k, v)]
    z = lines(torch.Tensor.transpose, lines(F.scaled_dot_product_attention, *heads), 1, 2)
    z = lines(F.linear, lines(torch.Tensor.reshape, z, (1, 64, 128)), lines.parameter("out", 128, 128))
    program = lines.program(lines(torch.sum, z))
    fused, out = program.parameters
    division = choose(program, "tp", 4, costs=H100, constraints=Constraints(types={out: (S(1),)}))
    assert division.types[fused] == S(0, stride=3)


def scan(steps):
    """A recurrence over steps, each of which reads a slice of the same three tensors, as state-space models do."""
    lines = Lines(torch.float32)
    x = lines.input("x", 2, 16, steps, 8)
    tables = [lines(torch.Tensor.mul, x, lines.parameter(name, 16, 1, 8)) for name in "abc"]
    state = lines(torch.Tensor.__getitem__, tables[0], (slice(None), slice(None), 0, slice(None)))
    for step in range(1, steps):
        a, b, c = (lines(torch.Tensor.__getitem__, t, (slice(None), slice(None), step, slice(None))) for t in tables)
        state = lines(torch.Tensor.mul, lines(torch.Tensor.add, lines(torch.Tensor.mul, state, a), b), c)
    return lines.program(lines(torch.sum, state))


def test_tables_are_exchanged_by_one_collective():
    """Rows of 10 tables that are cut by width, side by side: one collective after `cat`, not one for each table."""
    lines = Lines(torch.float32)
    ids = [lines.input(f"ids{number}", 4096, dtype=torch.int64) for number in range(10)]
    rows = [lines(F.embedding, x, lines.parameter(f"table{n}", 50000, 64)) for n, x in enumerate(ids)]
    x = lines(torch.relu, lines(F.linear, lines(torch.cat, rows, 1), lines.parameter("weight", 1024, 640)))
    program = lines.program(lines(torch.sum, lines(F.linear, x, lines.parameter("last", 1, 1024))))
    by_width = Constraints(types=dict.fromkeys(program.parameters[:10], (S(1),)))
    division = choose(program, "tp", 8, costs=H100, constraints=by_width)
    moved = [conversion(*pair, 8) for pair in conversions_of(division)]
    assert len([how for how in moved if how and how.forward]) == 1


def test_values_that_many_calls_read_are_chosen_in_time():
    """Sixteen consumers of three tensors each: every exact table is too large, the division is still legal."""
    start = time.process_time()
    division = choose(scan(16), "tp", 2, costs=SLOW_LINK)
    assert time.process_time() - start < 10
    for value, have, want in conversions_of(division):
        assert conversion(value, have, want, 2) is not None


def shared_layers():
    """Three residual blocks with the same weights; types in which both weights are sharded."""
    lines = Lines(torch.float32)
    up, down = lines.parameter("up", 4096, 1024), lines.parameter("down", 1024, 4096)
    x = lines.input("x", 512, 1024)
    for _ in range(3):
        h = lines(torch.relu, lines(F.linear, x, up))
        x = lines(torch.add, x, lines(F.linear, h, down))
    types = {up: (S(0), S(1)), down: (S(0), S(1))}
    return lines.program(lines(torch.sum, x)), types


def test_layers_that_share_their_weights_are_divided_as_if_the_search_were_exact(monkeypatch):
    program, types = shared_layers()
    constraints = Constraints(types=types)
    exact_choice = choose(program, "tp", 2, costs=H100, constraints=constraints)
    monkeypatch.setattr(exact, "LARGEST", 500)
    problem = StrategyChoice(program, "tp", 2, H100, constraints, lambda call, size: candidates(call, "tp", size))
    division = problem.fitting(None)
    assert any(problem.tables.copies.values()) and not problem.alternatives_are_exact
    assert division.types == exact_choice.types
    up, down = types
    assert (division.types[up], division.types[down]) == (S(0), S(1))
    # Alternatives are of these types, too: the strategy of the division is the best one, and no other one gains.
    for call, options in problem.alternatives().items():
        assert min(more for _, more in options) == 0.0
        assert [more for option, more in options if option is division.strategies[call]] == [0.0]


def test_a_search_that_is_too_large_leaves_the_calls_of_its_largest_table_whole(monkeypatch):
    program, types = shared_layers()
    monkeypatch.setattr(exact, "LARGEST", 150)
    problem = StrategyChoice(program, "tp", 2, H100, Constraints(), lambda call, size: candidates(call, "tp", size))
    division = problem.fitting(None)
    assert problem.left_whole and problem.least() is None
    assert all(exact.is_whole(division.strategies[call]) for call in problem.left_whole)
    every = Constraints({call: [lambda strategy: True] for call in program.calls})
    with pytest.raises(PlanError, match=r"search .* too large, at .*linear\(.*: use the policy 'dp', "):
        choose(program, "tp", 2, costs=H100, constraints=every)


def test_a_recurrence_whose_types_alone_are_too_many_is_left_whole(monkeypatch):
    """In the largest table all calls are whole: the others of their module follow."""
    monkeypatch.setattr(exact, "LARGEST", 300)
    program = scan(6)
    problem = StrategyChoice(program, "tp", 2, H100, Constraints(), lambda call, size: candidates(call, "tp", size))
    division = problem.fitting(None)
    assert problem.left_whole == set(program.calls)
    assert all(exact.is_whole(strategy) for strategy in division.strategies.values())


def test_what_is_kept_for_backward():
    lines = Lines()
    x = lines.input("x", 4, 4)
    y = lines(F.linear, x, lines.parameter("weight", 4, 4))
    for function, arguments in ((torch.add, (y,)), (torch.mul, (y,)), (torch.Tensor.view, ((16,),))):
        lines(function, y, *arguments)
    lines(torch.mul, x, x)
    assert [saves(call) for call in lines.calls] == [True, False, True, False, False]
