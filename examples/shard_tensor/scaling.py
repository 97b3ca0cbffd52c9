"""Communication of a rank in a training step on 4, 64 and 1,024 ranks: from the plans, in one process.

python examples/shard_tensor/scaling.py [--ranks 4 64 1024] [--field 4096 1024 64]

A field of three dims is sharded along its first one. A U-Net exchanges halos: planes of the other two dims, on any
number of ranks. A Fourier layer transposes the field: each rank sends its part of it, which is a share of 1/N.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist.shard_tensor import DeviceMesh, Shard, ShardTensor, distribute_module, report
from neuronx_dist.shard_tensor.report import Report

CHANNELS = 8
MODES = (8, 8, 8)


class UNet(nn.Module):
    """A U-Net of two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1)
        self.down = nn.Conv3d(CHANNELS, 2 * CHANNELS, 2, stride=2)
        self.middle = nn.Conv3d(2 * CHANNELS, 2 * CHANNELS, 3, padding=1)
        self.up = nn.ConvTranspose3d(2 * CHANNELS, CHANNELS, 2, stride=2)
        self.last = nn.Conv3d(2 * CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = F.gelu(self.first(x))
        coarse = F.gelu(self.middle(F.gelu(self.down(fine))))
        y: torch.Tensor = self.last(torch.cat([fine, self.up(coarse)], 1))
        return y


class FourierLayer(nn.Module):
    """A layer of a Fourier neural operator (arXiv:2010.08895): weights for the lowest modes, and a local path."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CHANNELS, CHANNELS, *MODES, dtype=torch.cfloat) / CHANNELS)
        self.local = nn.Conv3d(CHANNELS, CHANNELS, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.fft.rfftn(x, dim=(2, 3, 4))
        a, b, c = MODES
        low = torch.einsum("bixyz,ioxyz->boxyz", modes[:, :, :a, :b, :c], self.weight)
        low = F.pad(low, (0, modes.shape[4] - c, 0, modes.shape[3] - b, 0, modes.shape[2] - a))
        return F.gelu(torch.fft.irfftn(low, s=x.shape[2:], dim=(2, 3, 4)) + self.local(x))


def step(make: Callable[[], nn.Module], ranks: int, field: list[int]) -> Report:
    """Returns the report of a step of the middle rank."""
    with report(mesh=ranks) as r:
        mesh = DeviceMesh("cpu", range(ranks))
        model = distribute_module(make(), mesh)
        first = len(r.calls)  # the weights are sent once, before training
        shard = torch.empty(1, CHANNELS, field[0] // ranks, *field[1:])
        model(ShardTensor.from_local(shard, mesh, [Shard(2)])).square().mean().backward()
    del r.calls[:first]
    return r


def table(ranks: list[int], field: list[int]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    lines = ["| ranks | U-Net: halos | messages | Fourier layer: transposes | messages |", "| --- " * 5 + "|"]
    for number in ranks:
        cells = [f"{number:,}"]
        for make in (UNet, FourierLayer):
            moved = [r for r in step(make, number, field).by_op().values() if r.messages]
            cells += [f"{sum(r.bytes for r in moved):,} bytes", f"{sum(r.messages for r in moved):,}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 64, 1024], help="numbers of ranks")
    parser.add_argument("--field", type=int, nargs=3, default=[4096, 1024, 64], help="the size of the field")
    options = parser.parse_args()
    for number in options.ranks:
        if number < 1 or options.field[0] % (2 * number):
            parser.error(f"--ranks {number}: twice the number must divide the field's first size, {options.field[0]}")
    print("\n".join(table(options.ranks, options.field)))


if __name__ == "__main__":
    main()
