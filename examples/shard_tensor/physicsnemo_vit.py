"""Trains a small vision transformer by PhysicsNeMo's names: an image's rows on several ranks, several batches.

The imports from `physicsnemo` are those of a script written for it, and so is what follows. The line above them makes
them names of this package. The model is plain torch.

    torchrun --nproc-per-node 4 examples/shard_tensor/physicsnemo_vit.py --domain 2 [--verify]

`--verify` trains the same model on the whole batch in each process too, and compares losses, gradients and weights.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from tutorial import expect_equal, positive, say

import neuronx_dist.shard_tensor.physicsnemo  # noqa: F401

# isort: split
from physicsnemo.distributed import DistributedManager, reduce_loss
from physicsnemo.domain_parallel import scatter_tensor, sync_module_over_mesh


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches, positions, blocks, the mean over tokens, a head: `[batch, 3, rows, columns] -> [batch, classes]`."""

    def __init__(self, rows: int, columns: int, patch: int = 4, width: int = 8, classes: int = 5):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(0.1 * torch.randn(1, (rows // patch) * (columns // patch), width))
        self.blocks = nn.Sequential(Block(width, 2), Block(width, 2))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(tokens + self.positions).mean(dim=1))


def batch(step: int, images: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(images, 3, rows, columns, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 5, (images,), generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--domain", type=positive, default=2, help="ranks that share an image, default: 2")
    parser.add_argument("--steps", type=positive, default=5, help="default: 5")
    parser.add_argument("--rows", type=positive, default=24, help="of an image, a multiple of 4; default: 24")
    parser.add_argument("--verify", action="store_true", help="compare with one process")
    options = parser.parse_args()

    DistributedManager.initialize()
    dm = DistributedManager()
    mesh = dm.initialize_mesh(mesh_shape=(-1, options.domain), mesh_dim_names=("ddp", "domain"))
    ddp_mesh, domain_mesh = mesh["ddp"], mesh["domain"]
    ddp_size = ddp_mesh.size()
    source = torch.distributed.get_global_rank(domain_mesh.get_group(), 0)

    torch.manual_seed(dm.rank)  # other weights on each rank, until they are synchronised
    model: nn.Module = ViT(options.rows, 8).double().to(dm.device)
    sync_module_over_mesh(model, domain_mesh)
    if ddp_size > 1:
        model = DistributedDataParallel(
            model,
            process_group=ddp_mesh.get_group(),
            broadcast_buffers=dm.broadcast_buffers,
            find_unused_parameters=dm.find_unused_parameters,
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    alone = ViT(options.rows, 8).double().to(dm.device)  # rank 0's
    optimizer_alone = torch.optim.AdamW(alone.parameters(), lr=1e-2)

    for step in range(options.steps):
        images, classes = batch(step, 2 * ddp_size, options.rows, 8)
        part = [x.chunk(ddp_size)[ddp_mesh.get_local_rank()].contiguous().to(dm.device) for x in (images, classes)]
        x = scatter_tensor(part[0], source, domain_mesh, (Shard(2),), global_shape=part[0].shape, dtype=part[0].dtype)
        y = scatter_tensor(part[1], source, domain_mesh, (Replicate(),))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        mean = reduce_loss(loss.item(), dst_rank=0)
        if mean is not None:
            say(f"step {step}: loss {mean:.6f}")
        if options.verify:
            expected = F.cross_entropy(alone(images.to(dm.device)), classes.to(dm.device))
            expected.backward()
            if mean is not None:
                expect_equal("loss", torch.tensor(mean), expected.detach().float(), 1e-6)
            compare("gradient", [p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])
            optimizer_alone.step()
            optimizer_alone.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    if options.verify:
        compare("weight", list(model.parameters()), list(alone.parameters()))
    DistributedManager.cleanup()


def compare(what: str, tensors: list[Any], expected: list[Any]) -> None:
    """Compares all of them at once, in float64."""
    flat, other = (torch.cat([x.detach().flatten() for x in both]) for both in (tensors, expected))
    expect_equal(f"every {what}", flat, other, 1e-10)


if __name__ == "__main__":
    main()
