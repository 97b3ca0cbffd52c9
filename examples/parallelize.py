"""An unmodified model becomes a parallel program: Hugging Face's GPT-2, or a convolutional net.

torchrun --nproc-per-node 2 examples/parallelize.py --model conv --policy tp --verify

--explain prints the program that is run, and for each call that reads parameters what every way to divide it would cost
in the fastest plan; --verify trains the original in one process too, and compares the weights. Without torchrun there
is one rank, and nothing is divided.
"""

import argparse
import copy
import os
import sys
import tempfile
from typing import Any

import torch
from torch import nn

from neuronx_dist.comm.launchers import export_place
from neuronx_dist.parallelize import ComputeConfig, IRGraph, ParallelModule, build_optimizer, parallelize
from neuronx_dist.parallelize import explain as costs_of
from neuronx_dist.parallelize.policy.operations import IRFwOperation
from neuronx_dist.parallelize.policy.policies import POLICIES
from neuronx_dist.program.decompose import decomposed
from neuronx_dist.program.program import operands_of
from neuronx_dist.program.record import record_program
from neuronx_dist.weights.shard_spec import gather_full, spec_of

MICROBATCHES = 2  # samples that a unit trains on in a step


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        pooled = self.body(data["x"]).mean((2, 3))
        return nn.functional.cross_entropy(self.head(pooled), data["labels"])


class Gpt2(nn.Module):
    """Hugging Face's GPT-2 with its loss, as an end2end module returns it."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        sizes: dict[str, int] = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.gpt2(input_ids=data["x"], labels=data["x"], use_cache=False).loss
        return loss


def sample_of(model: str, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    if model == "conv":
        labels = torch.randint(0, 10, (8,), generator=generator)
        return {"x": torch.randn(8, 3, 16, 16, generator=generator), "labels": labels}
    return {"x": torch.randint(0, 256, (4, 32), generator=generator)}


def samples_of(model: str, batch: int) -> list[dict[str, torch.Tensor]]:
    return [sample_of(model, batch * MICROBATCHES + number) for number in range(MICROBATCHES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gpt2", "conv"], default="gpt2")
    parser.add_argument(
        "--policy", default="autodist", help=f"{', '.join(POLICIES)}, or the path of a plan; default: autodist"
    )
    parser.add_argument(
        "--plan-ngpus", type=positive, help="ranks of a unit; default: autodist chooses them, else all of them"
    )
    parser.add_argument("--steps", type=positive, default=5, help="default: 5")
    parser.add_argument("--explain", action="store_true", help="print the program, and why it is that one")
    parser.add_argument("--verify", action="store_true", help="compare with one process")
    options = parser.parse_args()

    export_place()  # of srun and mpirun
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    torch.manual_seed(0)
    original = Gpt2() if options.model == "gpt2" else ConvNet()
    alone: Any = copy.deepcopy(original)
    sample = {"data": sample_of(options.model, 0)}
    try:
        is_open = options.policy == "autodist" and options.plan_ngpus is None  # autodist chooses the ranks of a unit
        pipeline = {"pipeline_nmicros": MICROBATCHES} if is_open or options.policy in ("pp", "hybrid") else {}
        unit: dict[str, Any] = {} if is_open else {"plan_ngpus": options.plan_ngpus or world}
        config = ComputeConfig(**unit, runtime_ngpus=world, use_end2end=True, pas_config=pipeline)
        with tempfile.TemporaryDirectory() as folder:  # each rank has its own, so that rank 0 sends the files
            strategy = "all" if world > 1 else "none"
            model: Any = parallelize(
                original, sample, options.policy, config, gen_savedir=folder, broadcast_strategy=strategy
            )
    except (ValueError, RuntimeError) as error:  # on rank 0 what is wrong with the options; the others hear of it
        sys.exit(f"parallelize.py: {error}" if rank == 0 else 2)
    config = model.compute_config
    if options.explain and rank == 0:
        print(costs_of(model).table(0), model.SOURCE, sep="\n\n")
        explain(alone, sample, config)
    losses = train(model, build_optimizer(model, torch.optim.SGD, lr=0.1), options, config, rank)
    if rank == 0:
        print(f"{options.model}, policy {options.policy}, ranks: {world}, losses: {[round(x, 4) for x in losses]}")
    if options.verify:
        compare(model, alone, options, config.units)
        if rank == 0:
            print("training in one process gives the same weights")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def explain(module: nn.Module, sample: dict[str, Any], config: ComputeConfig) -> None:
    graph = IRGraph(decomposed(record_program(module, sample, training=True)), config)
    for node in graph.nodes():
        if isinstance(node, IRFwOperation) and any(value.kind == "parameter" for value in operands_of(node.call)):
            print(graph.explain(node))


def train(model: ParallelModule, optimizer: Any, options: Any, config: ComputeConfig, rank: int) -> list[float]:
    losses = []
    for step in range(options.steps):
        unit = rank // config.plan_ngpus
        parts = model.train_step(samples_of(options.model, step * config.units + unit))
        optimizer.step()
        losses.append(sum(loss.item() for loss in parts))
    return losses


def compare(model: ParallelModule, alone: nn.Module, options: Any, units: int) -> None:
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(options.steps):
        optimizer.zero_grad()
        for unit in range(units):
            for sample in samples_of(options.model, step * units + unit):
                alone(sample).backward()
        optimizer.step()
    expected = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gather_full(parameter, spec_of(parameter)), expected[name], rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
