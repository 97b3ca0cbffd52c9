"""Devices by their data sheets, which `Cluster.preset` makes clusters of, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, log2
from typing import NamedTuple

__all__ = ["PRESETS", "Device", "Link", "hops"]

GIB = 1 << 30


@dataclass(frozen=True)
class Link:
    """A level of the network.

    Attributes:
        span: number of adjacent ranks that the link joins.
        bandwidth: bytes per second that a rank sends.
        latency: seconds of a hop of no bytes.
        in_step: additional seconds of a collective that stands between products, as all do in a training step: ranks
            wait for one another, and caches are cold.
        between: measured seconds of a collective of no bytes between products, by verb, in place of
            `latency + in_step`; that of messages from rank to rank is "send".
    """

    span: int
    bandwidth: float
    latency: float
    in_step: float = 0.0
    between: Mapping[str, float] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.span, self.bandwidth, self.latency, self.in_step, frozenset(self.between.items())))


def hops(kind: str, size: int, inside: int, joined: int) -> int:
    """Returns how many latencies of a link pass in a collective, one after another.

    Args:
        kind: a verb; `size`: number of ranks of the group.
        inside: ranks of the group in one of the parts that the link joins; `joined`: ranks of the group that it joins.
    """
    if kind == "all_reduce":
        return ceil(log2(joined / inside))
    return ceil(size / inside) - ceil(size / joined)


class Device(NamedTuple):
    """A row of `PRESETS`: a device by its data sheet.

    Attributes:
        per_host: number of ranks of a host.
        memory: bytes.
        peak: floating-point operations per second of dense products, by dtype.
        efficiency: achieved part of the peak of products in a training step.
        bandwidth: achieved bytes per second of the memory.
        launch: seconds.
        links: levels of the network; the span of the last one is ignored.
        attention: as in `Cluster`.
    """

    per_host: int
    memory: float
    peak: dict[str, float]
    efficiency: float
    bandwidth: float
    launch: float
    links: tuple[Link, ...]
    attention: float = 0.8  # FlashAttention-3, both passes: 550 TFLOP/s on H100, where products reach 690 (2407.08608)


# Achieved parts of the data sheets.
_PRODUCTS = 0.7  # AutoParallel's roofline of products (meta-pytorch/autoparallel, compute_estimation.py)
_MEMORY = 0.75  # of pointwise kernels, which read and write
_NVLINK = 0.75  # all_gather on 8 H100: 338 of 450 GB/s (AutoParallel's table of nccl-tests, h100_nvswitch_roce_400g.py)
_NIC = 0.9  # ring over one 400 Gb/s NIC a host: 42 to 46 of 50 GB/s (same table)
_LAUNCH = 7e-6  # seconds of a call of the least size (AutoParallel's floor of an operator)


def _half(peak: float, **others: float) -> dict[str, float]:
    """Returns the peaks by dtype of a device whose bfloat16 and float16 are equally fast."""
    return {"bfloat16": peak, "float16": peak, **others}


def _blackwell(per_host: int, memory: float, peak: dict[str, float], *, span: int) -> Device:
    """Returns a device of B200s, whose single operations SimuMax 1.2 has timed.

    Parts of the data sheet in its configs/system/b200_bf16_ceperm.json (MooreThreads/SimuMax): products 0.488, the
    median of 514 in the shapes of Llama and DeepSeek; memory 0.666; an all_gather of 8 0.674; attention 0.35.
    """
    links = Link(span, 900e9 * 0.674, 3e-6), Link(0, 50e9 * _NIC, 10e-6)
    return Device(per_host, memory, peak, 0.488, 8e12 * 0.666, _LAUNCH, links, attention=0.35 / 0.488)


_HOPPER = _half(989.4e12, float32=66.9e12, float64=66.9e12, float8=1978.9e12)

#: Devices by name. NVIDIA: data sheets of A100 80GB SXM, H100 SXM, H200 SXM, DGX B200, GB200 NVL72: dense peaks (half
#: of those with sparsity), NVLink per direction (half of the total), 200 Gb/s (A100) or 400 Gb/s of network a GPU.
#: trn1, trn2: AWS Neuron documentation, "Trainium Architecture", "Trainium2 Architecture", "Best practices for training
#: on AWS Neuron", per rank: a NeuronCore-v2 (half a chip, 190 TFLOP/s, 820 GB/s, 384 GB/s of NeuronLink), a logical
#: NeuronCore of LNC2 (a quarter of a chip: 667 TFLOP/s, 96 GiB, 2.9 TB/s, 1.28 TB/s of NeuronLink); EFA of 800 and
#: 3200 Gb/s an instance. v5p: Google Cloud documentation, "TPU v5p" (1200 GB/s of ICI, both directions).
#: cpu: two ranks of one thread, gloo; measured on an AMD EPYC of 2 cores (`Cluster.measure`).
#: Latencies of NVLink and RoCE: nccl-tests of small messages (19 us for an all_reduce of 8). Others: assumed equal.
PRESETS: dict[str, Device] = {
    "a100": Device(
        8, 80 * GIB, _half(312e12, float32=19.5e12, float64=19.5e12), _PRODUCTS, 2.039e12 * _MEMORY, _LAUNCH,
        (Link(8, 300e9 * _NVLINK, 3e-6), Link(0, 25e9 * _NIC, 10e-6)),
    ),
    "h100": Device(
        8, 80 * GIB, _HOPPER, _PRODUCTS, 3.35e12 * _MEMORY, _LAUNCH,
        (Link(8, 450e9 * _NVLINK, 3e-6), Link(0, 50e9 * _NIC, 10e-6)),
    ),
    "h200": Device(
        8, 141e9, _HOPPER, _PRODUCTS, 4.8e12 * _MEMORY, _LAUNCH,
        (Link(8, 450e9 * _NVLINK, 3e-6), Link(0, 50e9 * _NIC, 10e-6)),
    ),
    "b200": _blackwell(8, 180e9, _half(2250e12, float32=75e12, float64=37e12, float8=4500e12), span=8),
    # NVLink joins the 18 hosts of a rack.
    "gb200": _blackwell(4, 186e9, _half(2500e12, float32=80e12, float64=40e12, float8=5000e12), span=72),
    "trn1": Device(
        32, 16 * GIB, _half(95e12, float32=23.75e12), _PRODUCTS, 410e9 * _MEMORY, _LAUNCH,
        (Link(32, 96e9 * _NVLINK, 3e-6), Link(0, 3.125e9 * _NIC, 15e-6)),
    ),
    "trn2": Device(
        64, 24 * GIB, _half(166.75e12, float32=45.25e12, float8=324.75e12), _PRODUCTS, 725e9 * _MEMORY, _LAUNCH,
        (
            Link(4, 725e9 / 4, 3e-6),  # in a chip: no published figure; a byte is read, sent, received and written
            Link(64, 160e9 / 2 * _NVLINK, 5e-6),  # 4 x 4 torus: a ring in one direction has half of a chip's links
            Link(0, 6.25e9 * _NIC, 15e-6),
        ),
    ),
    "v5p": Device(
        4, 95 * GIB, _half(459e12), _PRODUCTS, 2.765e12 * _MEMORY, _LAUNCH,
        (
            Link(8960, 600e9 / 3 * _NVLINK, 3e-6),  # 3D torus: a ring in one direction has a third of a chip's links
            Link(0, 6.25e9 * _NIC, 25e-6),
        ),
    ),
    "cpu": Device(
        2, 8 * GIB, {"float32": 160e9, "float64": 80e9}, 0.92, 14.7e9, 3e-6,
        (Link(0, 1.8e9, 150e-6, in_step=500e-6),), attention=0.5,
    ),
}  # fmt: skip
