"""`auto_partition="balanced"`: what is weighed, and that no other cuts are better."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline.cut.balance import Weight, balanced_cuts, weights_by_recording, weights_by_registration
from neuronx_dist.program.recorder import record
from tests.pipeline.test_parity import WeightOutside
from tests.support.pipeline_models import BATCH, HIDDEN, SEQ, VOCAB, Block, Model, batch, make, on_ranks

TOKENS = BATCH * SEQ
BLOCK_FLOPS = 2 * 2 * HIDDEN * 2 * HIDDEN * TOKENS
BLOCK_PARAMETERS = sum(param.numel() for param in Block().parameters())


def weights(flops: list[int], parameters: list[int] | None = None) -> list[Weight]:
    parameters = [0] * len(flops) if parameters is None else parameters
    return [Weight(str(index), *pair) for index, pair in enumerate(zip(flops, parameters))]


def of_pieces(layers: list[Weight], cuts: list[str], which: str) -> list[int]:
    ends = [[layer.name for layer in layers].index(cut) + 1 for cut in cuts]
    bounds = [0, *ends, len(layers)]
    return [sum(getattr(layer, which) for layer in layers[a:b]) for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("seed", range(40))
def test_no_other_cuts_are_better(seed: int) -> None:
    """The most FLOPs, then the most parameters, then how equal pieces are: against all cuts there are."""
    rng = random.Random(seed)
    n = rng.randint(1, 9)
    pieces, top = rng.randint(1, n), rng.choice([1, 3, 50])
    layers = weights([rng.randint(0, top) for _ in range(n)], [rng.randint(0, top) for _ in range(n)])

    def cost(cuts: list[str]) -> tuple[int, int, int]:
        flops, parameters = of_pieces(layers, cuts, "flops"), of_pieces(layers, cuts, "parameters")
        squares = flops if sum(flops) else parameters
        return max(flops), max(parameters), sum(x * x for x in squares)

    cuts = balanced_cuts(pieces, layers)
    names = [layer.name for layer in layers]
    assert len(cuts) == pieces - 1 and cuts == sorted(set(cuts), key=names.index)
    assert cost(cuts) == min(cost([*combination]) for combination in itertools.combinations(names[:-1], pieces - 1))


def test_equal_layers_are_divided_as_nxd_does() -> None:
    for pieces, layers in itertools.product(range(1, 7), range(6, 20)):
        sizes = of_pieces(weights([1] * layers), balanced_cuts(pieces, weights([1] * layers)), "flops")
        assert sizes == sorted(sizes) and max(sizes) - min(sizes) <= 1


def test_many_layers_take_no_time() -> None:
    layers = weights([100] * 600 + [3000], [7] * 601)
    assert max(of_pieces(layers, balanced_cuts(16, layers), "flops")) == 4000


def test_fewer_layers_than_pieces() -> None:
    with pytest.raises(ValueError, match=r"3 pieces of the model need at least 3 layers .* found 2: \['0', '1'\]"):
        balanced_cuts(3, weights([1, 1]))


def recorded(model: nn.Module) -> list[Weight]:
    with comm.as_rank(Mesh(1), 0):
        return weights_by_recording(model, record(model, batch(), [Block]))


def test_what_is_weighed() -> None:
    """A head counts with its FLOPs, an embedding with its parameters; a tied head has both."""
    head = 2 * HIDDEN * VOCAB * TOKENS
    expected = [
        Weight("embed", 0, VOCAB * HIDDEN),
        *(Weight(f"layers.{index}", BLOCK_FLOPS, BLOCK_PARAMETERS) for index in range(4)),
        Weight("norm", 0, 2 * HIDDEN),
        Weight("head", head, VOCAB * HIDDEN),
    ]
    assert recorded(make()) == recorded(make(tied=True)) == expected
    assert weights_by_registration(make(), [Block]) == [layer._replace(flops=0) for layer in expected]


class HeadOfEmbedding(WeightOutside):
    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return F.cross_entropy(F.linear(self.norm(x), self.embed.weight).flatten(0, 1), labels.flatten())


def test_what_no_layer_computes_counts_where_it_is_computed() -> None:
    """A learned position before the first layer, and after the last call three products with a weight."""
    layers = recorded(make(HeadOfEmbedding))
    assert [layer.name for layer in layers] == ["embed", *(f"layers.{index}" for index in range(4)), "norm"]
    assert layers[1].parameters == BLOCK_PARAMETERS + SEQ * HIDDEN
    assert layers[-1][1:] == (3 * 2 * HIDDEN * VOCAB * TOKENS, 2 * HIDDEN + VOCAB * HIDDEN)
    registered = weights_by_registration(make(HeadOfEmbedding), [Block])
    assert registered[0] == ("embed", 0, VOCAB * HIDDEN + SEQ * HIDDEN)


class Wide(Model):
    """A head that computes as much as two layers, and an embedding of the size of three."""

    def __init__(self) -> None:
        super().__init__(layers=6)
        self.embed = nn.Embedding(100, HIDDEN)
        self.head = nn.Linear(HIDDEN, 8 * HIDDEN, bias=False)

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    "option,traced,cuts",
    [
        ("layers", True, ["layers.2"]),
        (True, False, ["layers.2"]),
        ("balanced", True, ["layers.3"]),  # 4 layers; 2 layers and a head
        ("balanced", False, ["layers.2"]),  # by parameters alone
    ],
)
def test_the_option(option: Any, traced: bool, cuts: list[str]) -> None:
    def use(pipeline: Any) -> Any:
        if traced:
            pipeline.trace(kwargs=batch())
        return pipeline.pipeline_cuts, [name for name, _ in pipeline.local_named_parameters()]

    first, last = on_ranks(Mesh(2, pp=2), make(Wide), use, auto_partition=option)
    assert first[0] == last[0] == cuts
    assert f"{cuts[0]}.up.weight" in first[1] and "head.weight" in last[1]
    assert sorted(first[1] + last[1]) == sorted(name for name, _ in make(Wide).named_parameters())


def test_the_first_run_measures_if_nobody_asked_for_parameters_before() -> None:
    def use(pipeline: Any) -> Any:
        pipeline.run_eval(**batch())
        return pipeline.pipeline_cuts

    for cuts in on_ranks(Mesh(2, pp=2), make(Wide), use, auto_partition="balanced", output_loss_value_spec=True):
        assert cuts == ["layers.3"]


def test_options_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="auto_partition='even': True or \"layers\" cuts evenly"):
        on_ranks(Mesh(2, pp=2), make(), lambda pipeline: None, auto_partition="even")
