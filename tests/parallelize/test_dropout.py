"""Masks of dropout on real processes: of shards each rank's own, of whole values those of the unit, however seeded."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist.parallelize import ComputeConfig, IRGraph, parallelize
from neuronx_dist.parallelize.policy.operations import IRFwOperation
from neuronx_dist.spmd.random import streams
from tests.support.pool import processes

ROWS, WIDTH = 16, 32


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.dropout(self.up(x), training=True), F.dropout(whole, training=True)


def up_by_rows_and_the_other_whole(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    graph.shard("up", weight=0)
    *_, sharded, whole = (node for node in graph.nodes() if isinstance(node, IRFwOperation))
    pieces = graph.partition(sharded, sharded.algorithm("dim"), idx=0, dim=1, num=2)
    for nodes in (pieces, graph.replicate(whole, 2)):
        for device, node in enumerate(nodes):
            graph.assign(node, device)
    return graph


def masks(folder: str, seeded: str) -> list[torch.Tensor]:
    """Two forwards after seeding, and the first of them again after loading: masks of both dropouts."""
    module, rank = Dropped(), torch.distributed.get_rank()
    seed = {"alike": 5, "by unit": 5 + rank // 2, "by rank": 5 + rank}[seeded]
    nn.init.ones_(module.up.weight)
    arguments = {"x": torch.ones(ROWS, 4), "whole": torch.ones(ROWS, WIDTH)}
    found: list[torch.Tensor] = []
    for forwards in (2, 1):
        torch.manual_seed(seed)
        streams().reset()  # as in a new process
        parallel: Any = parallelize(
            module, arguments, up_by_rows_and_the_other_whole, ComputeConfig(2, 4), gen_savedir=folder
        )
        for text in ("composites.dropout(", "F.dropout(whole"):
            assert text in parallel.SOURCE, parallel.SOURCE
        torch.manual_seed(seed)
        for _ in range(forwards):
            found += [x.detach() != 0 for x in parallel(**arguments)]
    return found


@pytest.mark.process
@pytest.mark.parametrize("seeded", ["alike", "by unit", "by rank"])
def test_masks_of_shards_and_of_whole_values(seeded: str, tmp_path: Path) -> None:
    ranks = processes(4).run(masks, str(tmp_path), seeded, mesh={"tp": 2})
    for unit in (ranks[:2], ranks[2:]):
        for mine, other in zip(*unit):
            assert torch.equal(mine, other)  # results are whole, and one value on the ranks of a unit
    first, second = ranks[0], ranks[2]
    pieces = [piece for unit in (first, second) for mask in (unit[0], unit[2]) for piece in mask.chunk(2, dim=1)]
    wholes = [unit[number] for unit in (first, second) for number in (1, 3)]
    for equal_masks in (pieces, wholes):  # of ranks, units and forwards
        for a, b in combinations(equal_masks, 2):
            assert not torch.equal(a, b)
            assert abs((a == b).float().mean() - 0.5) < 0.15  # independent
        for mask in equal_masks:
            assert abs(mask.float().mean() - 0.5) < 0.15
    for unit in (first, second):  # after loading, with the same seed
        assert torch.equal(unit[4], unit[0]) and torch.equal(unit[5], unit[1])


class InStages(nn.Module):
    """Dropout of a whole value in each of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])

    def forward(self, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x, seen = data["x"], []
        for layer in self.layers:
            x = layer(x)
            seen.append(F.dropout(torch.ones_like(x) + 0 * x, training=self.training))
            x = x * seen[-1]
        return x.sum(), *seen


def masks_in_stages(folder: str) -> list[torch.Tensor]:
    """Returns the masks of two microbatches, of both stages, and then those of inference."""
    torch.manual_seed(torch.distributed.get_rank())
    streams().reset()
    sample = {"x": torch.ones(ROWS, WIDTH)}
    options = {"pipeline_nmicros": 2, "pipeline_nstages": 2}
    config = ComputeConfig(4, 4, use_end2end=True, pas_config=options)
    parallel: Any = parallelize(InStages(), {"data": sample}, "hybrid", config, gen_savedir=folder)
    assert "DRAWS = True" in parallel.SOURCE and "= F.dropout(" in parallel.SOURCE
    trained = [x for _, *seen in parallel.train_step([sample, sample]) for x in seen]
    parallel.eval()
    return trained + [x for _, *seen in parallel.infer_step([sample, sample]) for x in seen]


@pytest.mark.process
def test_masks_of_stages(tmp_path: Path) -> None:
    ranks = processes(4).run(masks_in_stages, str(tmp_path), mesh={"tp": 2, "pp": 2})
    assert all(torch.equal(mine, other) for rank in ranks[1:] for mine, other in zip(rank, ranks[0]))
    trained, inferred = ranks[0][:4], ranks[0][4:]
    for a, b in combinations(trained, 2):
        assert abs(((a != 0) == (b != 0)).float().mean() - 0.5) < 0.15
    assert all(torch.equal(x, torch.ones_like(x)) for x in inferred)
