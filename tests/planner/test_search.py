"""The search against all layouts, its bounds, and what must not make a plan slower; the closed forms against play."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import transformers
from transformers import GraniteConfig, LlamaConfig

from neuronx_dist.pipeline.schedule import Costs, simulate, training_schedule
from neuronx_dist.planner.candidate import RECOMPUTED, Candidate
from neuronx_dist.planner.cluster import Cluster, Link
from neuronx_dist.planner.plans import plan
from neuronx_dist.planner.predictor import Predictor
from neuronx_dist.planner.search import MARGIN, SCHEDULES, Job, candidates, groups, search
from neuronx_dist.planner.simulation import Simulator
from neuronx_dist.planner.traffic import reduction_traffic
from neuronx_dist.planner.workload import MODELS, Workload, workload_of
from neuronx_dist.planning.layout import Layout
from neuronx_dist.planning.memory import estimate_memory
from tests.planner.training import ROWS, SEQ

GIB = 2**30


def cluster(devices: int, memory: float = 80 * GIB, **changes: Any) -> Cluster:
    """Hosts of two devices, so that small worlds have two levels of links."""
    links = (Link(2, 300e9, 5e-6), Link(devices, 20e9, 20e-6)) if devices > 2 else (Link(2, 300e9, 5e-6),)
    sizes: dict[str, Any] = dict(flops={"bfloat16": 4e14}, peak={"bfloat16": 1e15}, bandwidth=2e12, launch=2e-6)
    return Cluster("test", devices, min(2, devices), memory, **{**sizes, "links": links, **changes})


def small(**changes: Any) -> Workload:
    sizes = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_key_value_heads=4, head_dim=128)
    config = LlamaConfig(
        **{**sizes, "num_hidden_layers": 6, "vocab_size": 32000, "max_position_embeddings": 8192, **changes}
    )
    return workload_of(config)


def test_overlap_hides_all_gathers_but_one_beside_the_next_forward() -> None:
    """A slow network is hidden as long as a microbatch's forward takes, a fast one but for one bucket."""
    layout = Layout(4, zero1=True, num_microbatches=2, global_batch=8, seq_len=1024, dtype="bfloat16")
    plain, workload = Candidate(layout), small()
    for bandwidth in (1e8, 3e11):
        there = cluster(4, links=(Link(4, bandwidth, 0.0),))
        predictor = Predictor(workload, there)
        without, with_overlap = predictor.seconds(plain), predictor.seconds(replace(plain, overlap=True))
        sent = reduction_traffic(workload, plain, predictor.stages(plain)[0])
        gathers = [there.collective(one.verb, one.bytes, 4) for one in sent if one.verb == "all_gather"]
        forward = predictor.tasks(plain)[0][0][0]
        assert len(gathers) > 2 and (sum(gathers) > forward) == (bandwidth == 1e8)
        hidden = min(forward, sum(gathers) * (1 - 1 / len(gathers)))
        assert without.reduction - with_overlap.reduction == pytest.approx(hidden)
        assert without.total - with_overlap.total == pytest.approx(hidden)
        assert predictor.stage_bytes(replace(plain, overlap=True), 0).step > predictor.stage_bytes(plain, 0).step
    fixed = {"overlap": [True], "zero1": [True, False]}
    found = plan("llama-1b", global_batch=8, seq_len=1024, cluster=cluster(4), constraints=fixed, check=False)
    assert all(one.candidate.overlap and one.layout.zero1 for one in found)


# --- the search


def every_layout(workload: Workload, world: int, batch: int, seq_len: int) -> Iterator[Layout]:
    """All layouts that `Layout.problems` accepts, by trying all values."""
    sizes = range(1, world + 1)
    for tp, pp, cp in product(sizes, sizes, sizes):
        if world % (tp * pp * cp):
            continue
        for sharded, zero1, microbatches, (schedule, chunks) in product(
            (False, True), (False, True), range(1, batch + 1), SCHEDULES if pp > 1 else SCHEDULES[:1]
        ):
            if (sharded and tp == 1) or (zero1 and world == tp * pp):
                continue
            layout = Layout(
                world,
                tp=tp,
                pp=pp,
                cp=cp,
                sequence_parallel=sharded,
                zero1=zero1,
                num_microbatches=microbatches,
                global_batch=batch,
                seq_len=seq_len,
                dtype="bfloat16",
                schedule=schedule,
                virtual_pipeline_size=chunks,
            )
            if batch % (layout.dp * microbatches) == 0 and not layout.problems(workload.shape):
                yield layout


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, memory", [(4, 80 * GIB), (8, 2.2 * GIB), pytest.param(8, 80 * GIB, marks=pytest.mark.full)]
)
def test_the_search_agrees_with_all_layouts(world: int, memory: float) -> None:
    workload, batch, seq_len = small(), 8, 1024
    predictor, job = Predictor(workload, cluster(world, memory)), Job(batch, seq_len, {})
    limit = memory * (1 - MARGIN)
    layouts = list(every_layout(workload, world, batch, seq_len))
    searched = [
        alternatives[0].layout
        for group in groups(workload, world, job)
        for alternatives in candidates(workload, world, job, group)
    ]
    assert len(searched) == len(layouts) and set(searched) == set(layouts)
    totals = []
    for layout in layouts:
        for recompute in RECOMPUTED:
            candidate = Candidate(layout, recompute)
            seconds, peak = predictor.seconds(candidate).total, predictor.peak(candidate)
            assert predictor.bound(candidate) <= seconds * (1 + 1e-12)
            least = predictor.least_seconds(layout.pp, layout.num_microbatches, candidate.sizes, {})
            assert least <= predictor.bound(candidate) * (1 + 1e-12)
            assert predictor.least_bytes(layout.pp, layout.dp, candidate.sizes) <= peak * (1 + 1e-12)
            if peak <= limit:
                totals.append(seconds)
                break
    found = search(predictor, job, 10, limit)
    assert [one.seconds.total for one in found] == sorted(totals)[:10]
    assert all(one.peak <= limit for one in found) and (memory > 4 * GIB or len(totals) < len(layouts))


def test_faster_devices_and_links_and_more_memory_are_never_slower() -> None:
    workload, job = small(), Job(16, 2048, {})

    def best(where: Cluster) -> float:
        return search(Predictor(workload, where), job, 1, where.memory * (1 - MARGIN))[0].seconds.total

    base = cluster(8, 4 * GIB)
    before = best(base)
    for faster in (
        replace(base, flops={"bfloat16": 6e14}),
        replace(base, bandwidth=4e12),
        replace(base, memory=8 * GIB),
        replace(base, launch=0.0),
        replace(base, links=(replace(base.links[0], bandwidth=900e9), base.links[1])),
        replace(base, links=(base.links[0], replace(base.links[1], bandwidth=80e9, latency=0.0))),
    ):
        assert best(faster) <= before
    assert best(replace(base, flops={"bfloat16": 6e14})) < before


# --- the pipeline


def costs_of(costs: Any) -> Costs:
    def part(index: int) -> Any:
        return lambda stage, chunk: costs[stage][chunk][index]

    return Costs(forward=part(0), backward_input=part(1), backward_weight=part(2), message=0.1)


def test_the_simulator_agrees_with_the_schedules_simulation() -> None:
    simulator, draw = Simulator(), random.Random(0)
    for name, chunks in (("1f1b", 1), ("zb_h1", 1), ("zb_v", 2), ("interleaved", 2), ("interleaved", 3)):
        for pp, microbatches in ((2, 1), (3, 5), (4, 9), (4, 41), (2, 64)):
            schedule = training_schedule(
                pp, microbatches, schedule=name, num_chunks=chunks * (name == "interleaved") or 1
            )
            costs = [[tuple(draw.uniform(0.8, 1.2) for _ in range(3)) for _ in range(chunks)] for _ in range(pp)]
            expected = simulate(schedule, costs_of(costs)).step_time
            assert simulator.simulated(schedule, costs, 0.1) == pytest.approx(expected, rel=1e-12)
            assert simulator.step_time(schedule, costs, 0.1) == pytest.approx(expected, rel=2e-3)


# --- terms


def test_terms_are_their_closed_forms() -> None:
    """A device that reads memory in no time has operations alone; then links alone."""
    workload, h, f, layers, vocab, s = small(), 1024, 4096, 6, 32000, 2048
    where = cluster(8, bandwidth=1e30, launch=0.0, attention=0.5)
    predictor = Predictor(workload, where)
    one = Layout(8, num_microbatches=4, global_batch=32, seq_len=s, dtype="bfloat16")
    seconds = predictor.seconds(Candidate(one))
    weights = layers * (h * h * 2 + 2 * h * 512 + 3 * h * f) + vocab * h
    assert seconds.products == pytest.approx(4 * 6 * s * weights / 4e14, rel=1e-9)
    assert seconds.attention == pytest.approx(4 * 3.5 * layers * 2 * s * s * h / (0.5 * 4e14), rel=1e-9)
    assert seconds.bubble == seconds.tp == seconds.cp == seconds.recomputation == 0
    again = predictor.seconds(Candidate(one, "full")).recomputation
    assert again == pytest.approx(
        (seconds.products - 4 * 6 * s * vocab * h / 4e14) / 3 + seconds.attention / 3.5, rel=1e-9
    )
    # Gradients in buckets of 100 MB, of bytes and one flag for each parameter.
    nbytes = 2 * (workload.num_parameters + 9 * layers + 3)
    whole = where.collective("all_reduce", nbytes, 8, 1)
    assert whole < seconds.reduction < whole + 10 * where.collective("all_reduce", 8, 8, 1)

    tp2 = Layout(2, tp=2, sequence_parallel=True, num_microbatches=4, global_batch=4, seq_len=s, dtype="bfloat16")
    pair = cluster(2, bandwidth=1e30, launch=0.0)
    gather, scatter = (pair.collective(*verb, 2) for verb in (("all_gather", s * h * 2), ("reduce_scatter", s * h * 4)))
    of_loss = pair.collective("all_reduce", s * 2, 2) + pair.collective("all_reduce", 2 * s * 4, 2)
    expected = 4 * (layers * 4 * (gather + scatter) + 2 * (gather + scatter))
    assert expected < Predictor(workload, pair).seconds(Candidate(tp2)).tp < expected + 4 * 8 * of_loss

    even = replace(workload, vocab=8)  # stages of equal work
    pp4 = Layout(8, pp=2, num_microbatches=8, global_batch=32, seq_len=s, dtype="bfloat16")
    free = replace(where, links=(Link(8, 1e29, 0.0),))
    seconds = Predictor(even, free).seconds(Candidate(pp4))
    assert seconds.bubble == pytest.approx((seconds.products + seconds.attention) / 8, rel=1e-3)
    assert Predictor(even, where).seconds(Candidate(pp4)).bubble > seconds.bubble  # messages are waited for


def test_messages_take_the_slowest_link_between_neighbouring_stages() -> None:
    """Hosts of two: stages of one rank, of which 0 and 1 share a host, and 1 and 2 do not."""
    links, nbytes = cluster(4).links, 2048 * 1024 * 2
    seconds = {}
    for pp in (2, 4):
        layout = Layout(pp, pp=pp, num_microbatches=4, global_batch=4, seq_len=2048, dtype="bfloat16")
        seconds[pp] = Predictor(small(), cluster(4)).message_seconds(Candidate(layout))
    assert seconds[2] == pytest.approx(nbytes / links[0].bandwidth + links[0].latency, rel=1e-12)
    assert seconds[4] == pytest.approx(nbytes / links[1].bandwidth + links[1].latency, rel=1e-12)
    slow = replace(cluster(4), links=(replace(links[0], bandwidth=1e9), links[1]))  # inside of hosts: it counts too
    assert Predictor(small(), slow).message_seconds(Candidate(layout)) == pytest.approx(nbytes / 1e9 + 5e-6, rel=1e-12)


def test_tp_divides_all_weights() -> None:
    """tp 4 divides the 64 of the dense layers, and not the 6 of an expert."""
    sizes = dict(num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2, vocab_size=64)
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=6, num_experts=4, num_experts_per_tok=2, **sizes
    )
    found = {group.sizes.tp for group in groups(workload_of(config), 4, Job(8, 32, {}))}
    assert found == {1, 2}


# --- sizes and bytes


def test_parameters_are_the_published_ones() -> None:
    published = {
        "llama-1b": 1_235_814_400,
        "llama-8b": 8_030_261_248,
        "llama-70b": 70_553_706_496,
        "llama-405b": 405_853_388_800,
        "qwen3-0.6b": 596_049_920,
        "qwen3-8b": 8_190_735_360,
        "qwen3-30b-a3b": 30_532_122_624,
        "qwen3-235b-a22b": 235_093_634_560,
        "mixtral-8x7b": 46_702_792_704,
        "deepseek-v3": 671_026_419_200 - 58 * 256,  # without the correction of the router, which is no parameter
    }
    assert {name: workload_of(name).num_parameters for name in published} == published
    assert published.keys() <= MODELS.keys()


G = dict(global_batch=8, seq_len=512, num_microbatches=4, dtype="bfloat16")
PLAYED = {
    "one device": (Layout(1, **G), ""),
    "one microbatch": (Layout(1, **{**G, "num_microbatches": 1}), "norms"),
    "tp 2, float32": (Layout(2, tp=2, **{**G, "dtype": "float32"}), "full"),
    "tp 2, pp 2, SP": (Layout(4, tp=2, pp=2, sequence_parallel=True, **G), ""),
    "interleaved, ZeRO-1": (
        Layout(4, pp=2, zero1=True, schedule="interleaved", virtual_pipeline_size=2, **G),
        "",
    ),
    "cp 2, ZeRO-1": (Layout(2, cp=2, zero1=True, **G), ""),
    "Qwen 3, tp 2, SP": (Layout(2, tp=2, sequence_parallel=True, **G), ""),
    "Qwen 3": (Layout(1, **G), "norms"),
    "float32, ZeRO-1": (Layout(2, zero1=True, **{**G, "dtype": "float32"}), ""),
    "pp 4": (Layout(4, pp=4, **G), ""),
    "ZB-H1": (Layout(4, pp=4, schedule="zb_h1", **G), ""),
    "ZB-V": (Layout(4, pp=4, schedule="zb_v", **G), ""),
    "GPT2, tp 2, pp 2, SP": (Layout(4, tp=2, pp=2, sequence_parallel=True, **G), ""),
    "Phi, norms": (Layout(2, tp=2, **{**G, "num_microbatches": 1}), "norms"),
    "GPTNeoX": (Layout(2, tp=2, **{**G, "num_microbatches": 1}), ""),
    "Starcoder2": (Layout(4, tp=2, pp=2, sequence_parallel=True, **G), ""),
    "Gemma2": (Layout(4, tp=2, pp=2, sequence_parallel=True, **G), ""),
    "Gemma3Text, float32": (Layout(2, zero1=True, **{**G, "dtype": "float32"}), ""),
}
_FULL = (
    *("one device", "float32, ZeRO-1", "pp 4", "Phi, norms"),
    *("GPTNeoX", "Starcoder2", "Gemma3Text, float32"),
)
_WITHOUT_DROPOUT = (*("resid_pdrop", "embd_pdrop", "attn_pdrop"), *("residual_dropout", "embedding_dropout"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in _FULL)) for name in PLAYED])
def test_peaks_are_those_that_are_played(name: str) -> None:
    """At most 1.2 % off on each stage, 1 % on the one that needs most."""
    layout, recompute = PLAYED[name]
    family = name.split(",")[0].replace(" ", "")
    config = getattr(transformers, f"{family}Config", LlamaConfig)(
        head_dim=128,  # norms of heads save as much as those of layers
        hidden_size=1024,
        intermediate_size=3584,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=4 * layout.virtual_pipeline_size if layout.pp == 2 else 8 if name == "ZB-V" else 6,
        vocab_size=16384,
        max_position_embeddings=512,
        **(dict.fromkeys(_WITHOUT_DROPOUT, 0.0) if family != "Phi" else {}),
    )
    workload = workload_of(config)
    what = {"what": recompute} if recompute else None
    played = estimate_memory(layout, config, fused_loss=workload.fuses_loss, recomputation=what)
    predictor = Predictor(workload, cluster(max(2, layout.world_size)))
    candidate = Candidate(layout, recompute, workload.fuses_loss)
    for stage, memory in enumerate(played.stages):
        assert abs(predictor.stage_bytes(candidate, stage).peak / memory.peak - 1) <= 0.012
        assert predictor.stage_bytes(candidate, stage).weights == memory.num_parameters * candidate.sizes.item
    assert abs(predictor.peak(candidate) / played.peak - 1) <= 0.01


# --- plans train


TINY: dict[str, Any] = dict(num_hidden_layers=4, hidden_size=32, num_attention_heads=4, intermediate_size=64)


def toy_plan(config: Any, constraints: dict[str, Any]) -> Candidate:
    where = cluster(4, flops={"float64": 1e12}, peak={"float64": 2e12})
    constraints = {**constraints, "dtype": "float64"}
    return plan(config, global_batch=ROWS, seq_len=SEQ, cluster=where, constraints=constraints, check=False)[
        0
    ].candidate


@pytest.mark.slow
def test_a_model_that_scales_its_logits_is_planned_without_the_fused_loss() -> None:
    assert toy_plan(LlamaConfig(**TINY), {}).fused_loss
    assert not toy_plan(GraniteConfig(**TINY), {}).fused_loss
