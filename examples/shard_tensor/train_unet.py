"""Trains a small U-Net on images whose rows are on several ranks (domain), in several batches (data).

The model is plain torch: nothing in it knows of ranks. DistributedDataParallel averages gradients over `data`; what
`domain` needs, ShardTensor does. The rows need not divide: here they do not.

    torchrun --nproc-per-node 4 examples/shard_tensor/train_unet.py --domain 2 [--verify]

`--verify` trains the same model on the whole batch in each process too, and compares losses, gradients and weights.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tutorial import expect_equal, positive, say

from neuronx_dist import comm
from neuronx_dist.shard_tensor import DeviceMesh, DistributedManager, Shard, ShardTensor, distribute_tensor, report


class UNet(nn.Module):
    """Two levels down and up again: `[batch, 1, rows, columns] -> [batch, 1, rows, columns]`."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.bottom = nn.Conv2d(2 * width, 2 * width, 5, padding=2)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join = nn.Conv2d(2 * width, width, 3, padding=1)
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        above = F.gelu(self.first(x))
        below = F.gelu(self.down(F.max_pool2d(above, 2)))
        below = F.gelu(self.bottom(below))
        joined = torch.cat([above, self.up(below)], dim=1)
        return self.last(F.gelu(self.join(joined)))


def batch(number: int, images: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy waves, and the waves."""
    generator = torch.Generator().manual_seed(number)
    phase = torch.rand(images, 1, 1, 1, generator=generator, dtype=torch.float64) * 6
    wave = torch.sin(phase + torch.linspace(0, 6, rows, dtype=torch.float64)[:, None]).expand(images, 1, rows, columns)
    return wave + 0.1 * torch.randn(wave.shape, generator=generator, dtype=torch.float64), wave.contiguous()


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def own_rows(x: torch.Tensor, mesh: DeviceMesh, sizes: list[int]) -> ShardTensor:
    """This rank's images, of which it has some rows."""
    rows = x.chunk(mesh.shape[0])[mesh.get_local_rank("data")]
    return distribute_tensor(rows.contiguous(), mesh["domain"], [Shard(2)], sizes=[sizes], src=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--domain", type=positive, default=2, help="ranks that share an image, default: 2; the others have other images"
    )
    parser.add_argument("--steps", type=positive, default=5, help="default: 5")
    parser.add_argument("--rows", type=positive, default=22, help="of an image, an even number; default: 22")
    parser.add_argument("--verify", action="store_true", help="compare with one process")
    options = parser.parse_args()
    if options.rows % 2 or options.rows < 2 * options.domain:
        parser.error(f"--rows {options.rows}: an even number is needed, at least {2 * options.domain} for --domain")

    DistributedManager.initialize("cpu")
    ranks = DistributedManager().world_size
    if ranks % options.domain:
        raise SystemExit(
            f"--domain {options.domain} does not divide the number of ranks, which is {ranks}: start the script by "
            f"torchrun --nproc-per-node {options.domain}, or choose another --domain"
        )
    mesh = DistributedManager().initialize_mesh((-1, options.domain), ("data", "domain"))
    data, domain = mesh.shape
    first = max(1, options.rows // domain - 3)  # the first rank has fewer rows than the last one
    sizes = [first] * (domain - 1) + [options.rows - first * (domain - 1)]

    torch.manual_seed(0)
    alone = UNet().double()
    module = UNet().double()
    module.load_state_dict(alone.state_dict())
    model = DistributedDataParallel(module, process_group=mesh.get_group("data")) if data > 1 else module
    optimizer, optimizer_alone = (torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (module, alone))

    for step in range(options.steps):
        x, y = batch(step, 2 * data, options.rows, 8)
        with report() as r:
            loss: Any = loss_of(model, own_rows(x, mesh, sizes), own_rows(y, mesh, sizes))
            loss.backward()
        mean = comm.all_reduce(loss.to_local().detach().clone(), mesh.communicator("data")) / data
        say(f"step {step}: loss {mean.item():.6f}; {r.collectives} collectives, {r.bytes:,} bytes")
        if r.gathers:
            raise SystemExit(f"gathered:\n{r}")
        if options.verify:
            expected = loss_of(alone, x, y)
            expected.backward()
            expect_equal("loss", mean, expected.detach(), 1e-10)
            compare("gradient", [p.grad for p in module.parameters()], [p.grad for p in alone.parameters()])
            optimizer_alone.step()
            optimizer_alone.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    say(r)
    if options.verify:
        compare("weight", list(module.parameters()), list(alone.parameters()))


def compare(what: str, tensors: list[Any], expected: list[Any]) -> None:
    """All of them at once, in float64."""
    flat, other = (torch.cat([net.detach().flatten() for net in both]) for both in (tensors, expected))
    expect_equal(f"every {what}", flat, other, 1e-10)


if __name__ == "__main__":
    main()
