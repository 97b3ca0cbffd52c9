"""Cost model: the seconds of a call and of a collective.

    seconds of a call = max(floating-point operations / flops, bytes read and written / bandwidth) + launch
    backward of a call: twice the operations, twice the bytes
    seconds of a collective = bytes that a rank sends / link_bandwidth + link_latency

Compute and communication do not overlap. The bytes that a rank sends are in `parallelize/choose/conversions.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CPU", "H100", "Costs"]


@dataclass(frozen=True)
class Costs:
    """Speeds of a device and its links.

    Attributes:
        flops: achieved floating-point operations per second of matrix products: peak times efficiency.
        bandwidth: bytes per second of the device's memory.
        launch: seconds of an empty call.
        link_bandwidth: bytes per second that a rank sends to the other ranks of its axis.
        link_latency: seconds of a collective of no bytes.
        optimizer_bytes: bytes of optimizer state per element of a parameter (Adam: two float32).
        device_type: "cpu" or "cuda", whose kernels differ in what dropout saves for backward.
    """

    flops: float
    bandwidth: float
    launch: float
    link_bandwidth: float
    link_latency: float
    optimizer_bytes: int = 8
    device_type: str = "cuda"

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "link_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Costs.{name} must be more than 0, got {getattr(self, name)}")

    def compute(self, flops: float, moved: float, *, backward: bool) -> float:
        """Seconds of a call that reads and writes `moved` bytes on this rank; `backward`: and of its backward."""
        forward = max(flops / self.flops, moved / self.bandwidth)
        return 3 * forward + 2 * self.launch if backward else forward + self.launch

    def communicate(self, sent: float, collectives: int) -> float:
        """Seconds of `collectives` collectives in which a rank sends `sent` bytes in total."""
        return sent / self.link_bandwidth + collectives * self.link_latency

    def copy(self, nbytes: float) -> float:
        """Seconds of copying `nbytes`, which are read and written."""
        return 2 * nbytes / self.bandwidth

    @property
    def joined_bytes(self) -> float:
        """Bytes of the largest tensor that is copied in half of the time of a collective of no bytes."""
        return self.link_latency / 2 / self.copy(1)


H100 = Costs(flops=400e12, bandwidth=2.5e12, launch=2e-6, link_bandwidth=300e9, link_latency=15e-6)
"""A GPU such as H100: 40 % of its peak of 989e12, NVLink."""

CPU = Costs(flops=147e9, bandwidth=14.7e9, launch=3e-6, link_bandwidth=2e9, link_latency=500e-6, device_type="cpu")
"""Two ranks on one machine, gloo; measured."""
