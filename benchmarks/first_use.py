"""Costs that occur once in a process: the import, the first layer, the first collective, the first `run_train`.

Two processes on gloo, a pipeline of two stages. Each row is done twice; its CPU seconds are those of rank 0, all
threads, and what is reported is the median over new pairs of processes, with the modules that the first time imports.
`import torch._dynamo` stands for itself: torch imports it for the first optimizer and for its first fake tensors,
whichever comes first, so that every training script has it; `run_train` records the model on fake tensors.

    python benchmarks/first_use.py [--quick] [--repeats 7]

The last line is JSON: `{"first layer": [seconds, seconds of the second time, modules], ...}`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = tuple[float, float, int]  # seconds of the first time and of the second, modules that the first imports
LIMIT = 0.3  # seconds


def rows_of(rank: int, store: str) -> dict[str, Row]:
    """Does everything twice; in a process that has imported nothing yet."""
    rows: dict[str, Row] = {}

    def twice(name: str, do: Callable[[], Any]) -> None:
        modules, begin = len(sys.modules), time.process_time()
        do()
        middle, imported = time.process_time(), len(sys.modules) - modules
        do()
        rows[name] = (middle - begin, time.process_time() - middle, imported)

    def imports(module: str) -> None:
        twice(f"import {module}", lambda: __import__(module))

    imports("torch")
    imports("neuronx_dist")
    import torch
    import torch.distributed as dist
    from torch import nn

    import neuronx_dist as nxd
    from neuronx_dist import comm
    from neuronx_dist.comm.backends import threads

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nxd.ColumnParallelLinear(8, 16, gather_output=False)
            self.down = nxd.RowParallelLinear(16, 8, input_is_parallel=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.tanh(self.up(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    def linear(x: torch.Tensor) -> None:
        nxd.ColumnParallelLinear(8, 8, gather_output=False)(x).sum().backward()

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    nxd.initialize_model_parallel(tensor_model_parallel_size=2)
    ones, labels = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)
    twice("first collective", lambda: comm.all_reduce(ones, "tp"))
    twice("first collective, threads", lambda: threads.run(nxd.Mesh(2, tp=2), lambda: comm.all_reduce(ones, "tp")))
    twice("first layer, forward and backward", lambda: linear(torch.ones(4, 8, requires_grad=True)))
    twice("first cross entropy", lambda: nxd.parallel_cross_entropy(ones, labels))
    nxd.destroy_model_parallel()
    nxd.initialize_model_parallel(pipeline_model_parallel_size=2)

    models: list[Any] = []
    options: dict[str, Any] = dict(transformer_layer_cls=Block, num_microbatches=2, output_loss_value_spec=True)
    twice("first NxDPPModel", lambda: models.append(nxd.NxDPPModel(Model(), auto_partition=True, **options)))
    imports("torch._dynamo")
    x, others = torch.ones(4, 8), iter(models)
    twice("first run_train", lambda: next(others).run_train(x=x))
    twice("its second step", lambda: models[0].run_train(x=x))
    optimizers: list[Any] = []

    def zero() -> None:
        parameters = list(models[len(optimizers)].local_parameters())
        optimizers.append(nxd.NeuronZero1Optimizer(parameters, torch.optim.AdamW, lr=1e-3))
        optimizers[-1].step()

    twice("first ZeRO-1 optimizer and step", zero)
    dist.destroy_process_group()
    return rows


def measure() -> dict[str, Row]:
    """One new pair of processes; the rows of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        command = [sys.executable, __file__, "--store", store, "--rank"]
        other = subprocess.Popen([*command, "1"], stdout=subprocess.DEVNULL)
        text = subprocess.run([*command, "0"], check=True, capture_output=True, text=True).stdout
        other.wait()
    rows: dict[str, Row] = json.loads(text)
    return rows


def main() -> None:
    from common import heading, parser  # not at the top: it imports torch

    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=7, help="pairs of processes")
    options.add_argument("--rank", type=int, help="be one of the two")
    options.add_argument("--store", help="the file at which they meet")
    args = options.parse_args()
    heading("What happens once in a process, seconds of CPU")
    repeats = [measure() for _ in range(2 if args.quick else args.repeats)]
    print(f"{'':<36}{'first':>8}{'second':>8}{'modules':>9}")
    report: dict[str, list[float]] = {}
    for name in repeats[0]:
        first, second, modules = (statistics.median(rows[name][part] for rows in repeats) for part in range(3))
        report[name] = [round(first, 4), round(second, 4), int(modules)]
        ours = not name.startswith("import torch")
        print(f"{name:<36}{first:>8.3f}{second:>8.3f}{int(modules):>9}{'  ABOVE' * (ours and first > LIMIT)}")
    print(json.dumps(report))


if __name__ == "__main__":
    if "--rank" in sys.argv:
        flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
        print(json.dumps(rows_of(int(flags["--rank"]), flags["--store"])))
    else:
        main()
