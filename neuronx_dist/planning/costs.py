"""What a call and a collective take, in seconds: a simple model, each of whose terms is written here.

    seconds of a call = max(floating-point operations / flops, bytes read and written / bandwidth) + launch
    backward of a call: twice the operations, twice the bytes
    seconds of a collective = bytes that a rank sends / link_bandwidth + link_latency

Compute and communication do not overlap. What a rank sends in which collective: `parallelize/conversions.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CPU", "H100", "Costs"]


@dataclass(frozen=True)
class Costs:
    """What a device and its links can do.

    Attributes:
        flops: floating-point operations per second of matrix products, as reached: peak times efficiency.
        bandwidth: bytes per second of the device's memory.
        launch: seconds a call takes that does nothing.
        link_bandwidth: bytes per second that a rank sends to the others of its axis.
        link_latency: seconds of a collective of no bytes.
        optimizer_bytes: of the optimizer's state, for each element of a parameter (Adam: two float32).
    """

    flops: float
    bandwidth: float
    launch: float
    link_bandwidth: float
    link_latency: float
    optimizer_bytes: int = 8

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "link_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Costs.{name} must be more than 0, got {getattr(self, name)}")

    def compute(self, flops: float, moved: float, *, backward: bool) -> float:
        """Seconds of a call that reads and writes `moved` bytes on this rank; with its backward."""
        forward = max(flops / self.flops, moved / self.bandwidth)
        return 3 * forward + 2 * self.launch if backward else forward + self.launch

    def communicate(self, sent: float, collectives: int) -> float:
        """Seconds of collectives in which a rank sends so many bytes in all."""
        return sent / self.link_bandwidth + collectives * self.link_latency


H100 = Costs(flops=400e12, bandwidth=2.5e12, launch=2e-6, link_bandwidth=300e9, link_latency=15e-6)
"""A GPU like H100: 989e12 peak at 40 %, NVLink."""

CPU = Costs(flops=147e9, bandwidth=14.7e9, launch=3e-6, link_bandwidth=2e9, link_latency=500e-6)
"""Two ranks on one machine, gloo; measured."""
