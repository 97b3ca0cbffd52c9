"""Published step times of other programs, as data, and the planner's prediction of each.

The tables are measurements; a row has the layout, the unit of its source, and the source. Other programs do some things
that this package does not, or not so: `Program` says which, and `seconds` adds or leaves out their time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from neuronx_dist.planner.calibration import fit_factors, rank_correlation, scaled
from neuronx_dist.planner.candidate import Candidate
from neuronx_dist.planner.cluster import Cluster
from neuronx_dist.planner.predictor import Predictor
from neuronx_dist.planner.workload import Block, Weight, Workload, workload_of
from neuronx_dist.planning.layout import Layout

__all__ = [
    "TABLES",
    "Errors",
    "Point",
    "Program",
    "Row",
    "errors",
    "fitted",
    "predicted",
    "published_points",
    "seconds",
]


class Program(NamedTuple):
    """Differences of a published program from this package's.

    Attributes:
        gradient_bytes: bytes of an element of gradients that are reduced over data-parallel ranks.
        tp_bytes: bytes of the collectives of a layer over tp, for an element of its input. Here they are 4 gathers in
            bfloat16 and 4 sums in float32, 24 bytes; with sums in bfloat16 16; and 18 with one more gather in backward.
        overlaps: gradients are reduced during backward: the first microbatches' computation hides it.
        overlaps_tp: collectives over tp pass in pieces beside the products that need or make them.
        sharded_weights: FSDP: weights are gathered in each microbatch's forward and backward.
        compiled: pointwise operations are fused.
        attention: as `Cluster.attention`, in place of the cluster's; None: the cluster's.
        recomputed: part of the products of a layer's forward that backward computes again.
    """

    gradient_bytes: int = 4
    tp_bytes: int = 18
    overlaps: bool = False
    overlaps_tp: bool = False
    sharded_weights: bool = False
    compiled: bool = True
    attention: float | None = None
    recomputed: float = 0.0


MEGATRON = Program()
# Megatron-LM's README, "Training Speed and Scalability": data, tensor and pipeline communication overlap.
BRIDGE = Program(overlaps=True, overlaps_tp=True)
# FlashAttention-2 of torch reaches 0.35 of an H100's peak (arXiv:2407.08608), half of what its products reach.
TITAN = Program(tp_bytes=16, overlaps=True, sharded_weights=True, attention=0.5)
NXD = Program(tp_bytes=24)


class Row(NamedTuple):
    """A published measurement.

    Attributes:
        workload: the model, maybe with fewer layers.
        seconds: of a step, derived from the published unit.
        cluster: the devices that the source names.
        products: dtype of products.
        memory: published GiB of a device; 0: none.
    """

    workload: Workload
    layout: Layout
    seconds: float
    program: Program
    cluster: Cluster
    recompute: str = ""
    products: str = "bfloat16"
    memory: float = 0.0

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / (self.layout.global_batch * self.layout.seq_len)


def seconds(row: Row, cluster: Cluster) -> float:
    """Returns the predicted seconds of a step of the row's program."""
    layout, program = row.layout, row.program
    if row.products != layout.dtype:  # products of weights in a lower precision; attention and the rest as they are
        faster = {layout.dtype: cluster.flops[row.products]}
        attention = cluster.attention * cluster.flops[layout.dtype] / cluster.flops[row.products]
        peak = {layout.dtype: cluster.peak[row.products]}
        cluster = replace(
            cluster, flops={**cluster.flops, **faster}, peak={**cluster.peak, **peak}, attention=attention
        )
    if program.attention is not None:
        cluster = replace(cluster, attention=cluster.attention * program.attention / row.cluster.attention)
    candidate = Candidate(layout, row.recompute, fused_loss=False, compiled=program.compiled)
    predictor = Predictor(row.workload, cluster)
    step = predictor.seconds(candidate)
    total = step.total
    data, microbatches = layout.dp * layout.cp, layout.num_microbatches
    tp = step.tp * program.tp_bytes / 24
    total += (max(0.0, tp - step.products) if program.overlaps_tp else tp) - step.tp
    total += program.recomputed * step.products / 3
    if data > 1:
        weights = sum(predictor.elements(predictor.stages(candidate)[0], candidate.sizes)[:2])
        scatter = cluster.collective("reduce_scatter", weights * program.gradient_bytes, data, layout.tp)
        gather = cluster.collective("all_gather", weights * 2, data, layout.tp)
        computing = step.total - step.reduction - step.optimizer - step.bubble
        if program.sharded_weights:
            reduction = scatter + 2 * gather * (microbatches if layout.pp > 1 else 1)
        else:
            reduction = scatter + gather
        hidden = min(reduction, computing / microbatches) if program.overlaps else 0.0
        total += reduction - hidden - step.reduction
    return total


# --- tables


def _b200() -> Iterator[Row]:
    """8 B200, bf16, Megatron with ZeRO-1 and sequence parallelism, sequences of 4096, micro batch 1; SimuMax 1.2, docs.

    Milliseconds of a step with 4, 8 and 32 microbatches; GiB allocated.
    """
    shapes = ("tp1 pp2", "tp2", "tp4", "tp8")
    published = {
        ("llama-70b", 12): (
            ((843.0, 1476.8, 5436.5), 66.55),
            ((725.5, 1387.0, 5376.5), 60.68),
            ((409.8, 765.6, 2964.6), 39.07),
            ((280.9, 556.7, 2073.7), 28.29),
        ),
        ("llama-405b", 4): (
            ((1074.6, 1935.4, 7046.4), 87.08),
            ((907.3, 1716.8, 6604.1), 81.59),
            ((476.0, 899.6, 3455.4), 52.89),
            ((258.8, 488.1, 1901.8), 38.57),
        ),
    }
    cluster = Cluster.preset("b200", devices=8)
    for (model, layers), cells in published.items():
        for shape, (times, memory) in zip(shapes, cells):
            for microbatches, milliseconds in zip((4, 8, 32), times):
                layout = _layout(8, shape, microbatches, 4096, zero1=True)
                yield Row(_sized(model, layers), layout, milliseconds / 1e3, MEGATRON, cluster, memory=memory)


def _b200_long() -> Iterator[Row]:
    """The same, long sequences over cp, 4 microbatches."""
    cluster = Cluster.preset("b200", devices=8)
    for model, layers, shape, seq_len, milliseconds in (
        ("llama-70b", 12, "tp2 cp4", 32768, 1758.0),
        ("llama-70b", 12, "cp8", 32768, 1768.1),
        ("llama-70b", 12, "tp2 cp4", 131072, 11315.7),
        ("llama-70b", 12, "cp8", 131072, 11301.9),
        ("llama-405b", 4, "tp2 cp4", 32768, 1984.7),
        ("llama-405b", 4, "cp8", 32768, 2003.6),
    ):
        yield Row(
            _sized(model, layers), _layout(8, shape, 4, seq_len, zero1=True), milliseconds / 1e3, MEGATRON, cluster
        )


def _torchtitan() -> Iterator[Row]:
    """H100 of 96 GB at 2.4 TB/s, 500 W; torchtitan's performance pages of 2024-12 and 2025-06.

    Tokens per second and device; sequences of 8192 where the tables do not say (assumed).
    """
    preset = Cluster.preset("h100", devices=512)
    slow = replace(preset, memory=96e9, bandwidth=preset.bandwidth * 2.4 / 3.35)
    selective = TITAN._replace(
        recomputed=0.5
    )  # every second product of a layer, of "op" in torchtitan's settings of 8B
    eager = selective._replace(compiled=False)
    for model, devices, shape, microbatches, local, seq_len, rate, program, recompute, products, memory in (
        ("llama-8b", 8, "", 1, 2, 8192, 5762, eager, "", "bfloat16", 82.4),
        ("llama-8b", 8, "", 1, 2, 8192, 6667, selective, "", "bfloat16", 77.0),
        ("llama-8b", 128, "", 1, 2, 8192, 5605, eager, "", "bfloat16", 67.0),
        ("llama-8b", 128, "", 1, 2, 8192, 6514, selective, "", "bfloat16", 62.0),
        ("llama-8b", 64, "tp8", 1, 12, 8192, 4378, TITAN, "", "bfloat16", 0),
        ("llama-70b", 256, "tp8", 1, 16, 8192, 597, TITAN, "full", "bfloat16", 0),
        ("llama-70b", 256, "tp8", 1, 16, 8192, 810, TITAN, "full", "float8", 0),
        ("llama-405b", 512, "tp8 pp8", 32, 32, 8192, 100, TITAN, "full", "float8", 82.5),
        ("llama-405b", 512, "tp8 pp8 vp2", 32, 32, 8192, 128, TITAN, "full", "float8", 72.7),
        ("llama-8b", 8, "", 1, 1, 32768, 3890, TITAN, "full", "float8", 0),
        ("llama-8b", 8, "cp2", 1, 1, 65536, 2540, TITAN, "full", "float8", 0),
        ("llama-8b", 8, "cp4", 1, 1, 131072, 1071, TITAN, "full", "float8", 0),
        ("llama-8b", 8, "cp8", 1, 1, 262144, 548, TITAN, "full", "float8", 0),
        ("llama-405b", 512, "tp8 pp8", 8, 8, 32768, 76, TITAN, "full", "float8", 0),
        ("llama-405b", 512, "tp8 pp8 cp2", 8, 8, 65536, 47, TITAN, "full", "float8", 0),
        ("llama-405b", 512, "tp8 pp8 cp4", 8, 8, 131072, 31, TITAN, "full", "float8", 0),
        ("llama-405b", 512, "tp8 pp8 cp8", 8, 8, 262144, 16, TITAN, "full", "float8", 0),
    ):
        layout = _layout(devices, shape, microbatches, seq_len, micro_batch=local // microbatches, zero1=True)
        yield _by_rate(model, layout, rate, program, slow.of(devices), recompute, products, memory)


def _bridge() -> Iterator[Row]:
    """H100, fp8, sequences of 8192: Megatron-Bridge 25.11 and 26.04.01, performance summaries; tokens/s and device."""
    for model, devices, shape, batch, rate, program in (
        ("llama-8b", 8, "", 128, 14451, BRIDGE._replace(sharded_weights=True)),
        ("llama-70b", 64, "tp4 pp8 vp5", 128, 1602, BRIDGE),
        ("llama-70b", 64, "tp4 pp8 vp5", 256, 1664, BRIDGE),
        ("llama-405b", 1024, "tp8 pp8 cp2 vp8", 512, 292, BRIDGE),
        ("llama-405b", 1024, "tp8 pp8 cp2 vp8", 1536, 328, BRIDGE),
    ):
        one = _layout(devices, shape, 8, 8192)  # for its dp
        layout = _layout(devices, shape, batch // one.dp, 8192, zero1=True)
        yield _by_rate(model, layout, rate, program, Cluster.preset("h100", devices=devices), "", "float8")


def _nxd() -> Iterator[Row]:
    """32 trn1.32xlarge: NxD, Neuron 2.24; tokens per second and *chip* of two ranks; a batch of 1024 is assumed."""
    cluster = Cluster.preset("trn1", devices=1024)
    for model, shape, rate in (("llama-8b", "tp32", 767), ("llama-70b", "tp32 pp8", 127)):
        one = _layout(1024, shape, 8, 8192)
        layout = _layout(1024, shape, 1024 // one.dp, 8192, zero1=True)
        yield _by_rate(model, layout, rate / 2, NXD, cluster)


def _megatron() -> Iterator[Row]:
    """H100, bf16, sequences of 4096, vocabulary 131072: Megatron-LM's README, TFLOP/s of a device.

    Its operations are those of its paper (arXiv:2104.04473, without recomputation): 72 b s L h^2 (1 + s/6h + V/12hL).
    The table has no shapes and no batch: shapes of GPT with the published number of parameters, 8 microbatches for each
    stage, and 96 devices up to 32B are assumed.
    """
    for layers, hidden, devices, shape, rate in (
        (24, 2304, 96, "", 409),
        (32, 4096, 96, "tp2", 466),
        (32, 6144, 96, "tp4", 489),
        (36, 8192, 96, "tp8", 460),
        (84, 8192, 768, "tp8 pp2", 420),
        (96, 12288, 2304, "tp8 pp6", 433),
    ):
        one = _layout(devices, shape, 8, 4096)
        layout = _layout(devices, shape, 8 * one.pp, 4096, zero1=True)
        tokens = layout.global_batch * layout.seq_len
        flops = 72 * tokens * layers * hidden**2 * (1 + 4096 / (6 * hidden) + 131072 / (12 * hidden * layers))
        cluster = Cluster.preset("h100", devices=devices)
        yield Row(_gpt(layers, hidden), layout, flops / (rate * 1e12 * devices), BRIDGE, cluster)


def _layout(
    devices: int, shape: str, microbatches: int, seq_len: int, *, micro_batch: int = 1, **options: Any
) -> Layout:
    """Returns the layout of a shape such as "tp8 pp8 vp5"; dp is the rest, and tp has sequence parallelism."""
    sizes = {word[:2]: int(word[2:]) for word in shape.split()}
    tp, pp, cp, chunks = (sizes.get(name, 1) for name in ("tp", "pp", "cp", "vp"))
    return Layout(
        devices,
        tp=tp,
        pp=pp,
        cp=cp,
        sequence_parallel=tp > 1,
        num_microbatches=microbatches,
        global_batch=microbatches * micro_batch * (devices // (tp * pp * cp)),
        seq_len=seq_len,
        dtype="bfloat16",
        schedule="interleaved" if chunks > 1 else "1f1b",
        virtual_pipeline_size=chunks,
        **options,
    )


def _by_rate(
    model: str,
    layout: Layout,
    rate: float,
    program: Program,
    cluster: Cluster,
    recompute: str = "",
    products: str = "bfloat16",
    memory: float = 0.0,
) -> Row:
    """Returns a row whose measurement is tokens per second and device."""
    step = layout.global_batch * layout.seq_len / (rate * layout.world_size)
    return Row(workload_of(model), layout, step, program, cluster, recompute, products, memory)


def _gpt(layers: int, hidden: int) -> Workload:
    """Returns a GPT: heads of 128, a feed-forward layer of 4 hidden without gate."""
    weights = (
        Weight((hidden, hidden), "query"),
        Weight((hidden, hidden), "key_value", number=2),
        Weight((hidden, hidden), "heads"),
        Weight((4 * hidden, hidden), "rows"),
        Weight((hidden, 4 * hidden), "columns"),
        Weight((hidden,), number=4, products=0),
    )
    heads = hidden // 128
    block = Block(layers, weights, 4 * hidden)
    return Workload(f"gpt {hidden}", (block,), hidden, heads, heads, 128, 128, 4 * hidden, 131072, True)


def _sized(model: str, layers: int) -> Workload:
    """Returns a model of the planner with another number of layers."""
    workload = workload_of(model)
    return replace(workload, blocks=(replace(workload.blocks[0], layers=layers),))


#: Rows by source.
TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "SimuMax, B200": _b200,
    "SimuMax, B200, long sequences": _b200_long,
    "torchtitan, H100": _torchtitan,
    "Megatron-Bridge, H100 fp8": _bridge,
    "NxD, trn1": _nxd,
    "Megatron-LM, H100": _megatron,
}


# --- errors


def fitted(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the factors of the speeds of each row's cluster with which predictions fit the rows."""
    return fit_factors(predicted, [(row, row.seconds) for row in rows], links=2)


def predicted(factors: Mapping[str, float], row: Row) -> float:
    """Returns the predicted seconds of a step on the row's cluster, its speeds multiplied by factors."""
    return seconds(row, scaled(row.cluster, factors))


class Errors(NamedTuple):
    """Errors of predictions: mean and largest relative error, rank correlation of the time of a token."""

    mape: float
    largest: float
    rank: float

    def __str__(self) -> str:
        return f"{self.mape:.1%} ({self.largest:.0%}) | {self.rank:.2f}"


def errors(rows: Sequence[Row], factors: Mapping[str, float]) -> Errors:
    """Returns the errors of predictions with factors of speeds."""
    pairs = [(predicted(factors, row), row) for row in rows]
    relative = [abs(one / row.seconds - 1) for one, row in pairs]
    ours = [one / row.seconds * row.seconds_per_token * row.layout.world_size for one, row in pairs]
    theirs = [row.seconds_per_token * row.layout.world_size for row in rows]
    return Errors(sum(relative) / len(relative), max(relative), rank_correlation(ours, theirs))


#: Hosts and ranks of a host of the groups of `_NCCL`.
_GROUPS = [(1, 2), (1, 4), (1, 8), *((hosts, ranks) for hosts in (2, 4, 8, 16, 32) for ranks in (1, 2, 4, 8))]
#: By verb and group: microseconds of the shortest messages, and GB/s beyond them with 1 GiB and with 64 MiB. H100,
#: NVSwitch, RoCE of 400 Gb/s a GPU: AutoParallel's cost model (meta-pytorch/autoparallel 331b7d9e,
#: h100_nvswitch_roce_400g.py: its bandwidth times its efficiency at the size), fitted to calls of torch.distributed.
_NCCL: dict[str, tuple[tuple[int, float, float], ...]] = {
    "all_gather": (
        (174, 544, 532), (157, 433, 391), (163, 386, 339), (177, 60.8, 60.8), (189, 116, 107), (195, 210, 176),
        (210, 323, 136), (174, 53.7, 50.5), (189, 102, 95), (219, 199, 193), (273, 328, 265), (188, 48.3, 48.3),
        (211, 97.9, 95.1), (265, 194, 204), (362, 305, 196), (205, 46.5, 43.4), (262, 94.8, 95.3), (348, 194, 167),
        (526, 243, 112), (214, 45.8, 41.8), (409, 95.2, 101.8), (532, 183, 109), (871, 151, 54),
    ),
    "reduce_scatter": (
        (152, 535, 416), (167, 438, 404), (168, 392, 392), (177, 80.3, 65.0), (181, 121, 105), (179, 209, 167),
        (219, 377, 147), (165, 57.3, 50.3), (175, 100, 92), (219, 197, 196), (259, 369, 279), (175, 50.4, 47.8),
        (199, 98.2, 93.2), (259, 195, 193), (345, 358, 187), (202, 47.2, 40.5), (266, 95.5, 96.3), (363, 193, 170),
        (524, 258, 111), (221, 45.7, 42.5), (404, 94.2, 99.8), (541, 176, 110), (876, 158, 52),
    ),
    "all_reduce": (
        (161, 348, 289), (152, 244, 219), (160, 212, 189), (176, 41.9, 35.4), (205, 87.3, 58.1), (189, 165, 99),
        (181, 193, 143), (174, 29.5, 26.3), (173, 54.0, 46.1), (180, 99.6, 93.9), (185, 188, 110), (164, 25.9, 25.7),
        (174, 50.6, 45.4), (190, 97.5, 83.9), (192, 171, 63), (180, 24.5, 20.5), (181, 49.1, 44.6), (186, 94.7, 58.0),
        (191, 122, 65), (181, 23.8, 21.2), (192, 48.4, 39.4), (194, 89.6, 64.2), (207, 130, 63),
    ),
    "all_to_all": (
        (34, 630, 535), (35, 447, 390), (41, 374, 339), (53, 75.7, 74.8), (72, 94.2, 90.1), (82, 93.7, 87.2),
        (108, 82.5, 77.8), (57, 61.1, 59.1), (83, 60.2, 54.7), (94, 57.7, 53.1), (131, 55.8, 47.4), (65, 46.0, 42.0),
        (94, 50.0, 46.6), (117, 49.2, 38.2), (174, 46.8, 39.2), (112, 47.3, 42.4), (158, 49.8, 41.1),
        (174, 45.9, 37.0), (324, 43.4, 37.7), (188, 46.8, 42.4), (292, 48.5, 42.0), (332, 44.5, 39.4),
        (636, 43.0, 42.1),
    ),
}  # fmt: skip


class Point(NamedTuple):
    """A published collective: its predicted and its published seconds."""

    verb: str
    hosts: int
    ranks: int
    predicted: float
    published: float


def published_points(nbytes: int) -> list[Point]:
    """Returns the points of NCCL of 1 GiB or 64 MiB.

    The source times a call from an idle device, so that its shortest message is the host's launch: 152 to 157 us, 34 of
    an all_to_all. A step's host launches ahead: the least time of a verb is left out.
    """
    cluster, points = Cluster.preset("h100", devices=256), []
    for verb, cells in _NCCL.items():
        launch = min(microseconds for microseconds, *_ in cells)
        for (hosts, ranks), (microseconds, *rates) in zip(_GROUPS, cells, strict=True):
            rate = rates[0 if nbytes == 1 << 30 else 1]
            ours = cluster.collective(verb, nbytes, hosts * ranks, 8 // ranks)
            points.append(Point(verb, hosts, ranks, ours, (microseconds - launch) * 1e-6 + nbytes / (rate * 1e9)))
    return points
