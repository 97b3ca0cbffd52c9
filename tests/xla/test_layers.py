"""Parallel layers as one XLA program for all ranks: the values and gradients of ranks as threads, the collectives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from neuronx_dist.mesh import Mesh
from tests.xla.compare import draw, same_as_threads
from tests.xla.programs import layers as programs

AR, AG, RS, A2A = "all-reduce", "all-gather", "reduce-scatter", "all-to-all"


def mesh(tp: int) -> Mesh:
    return Mesh(4, tp=tp)


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return draw(*shape, seed=seed).requires_grad_()


COLUMN = {  # options -> collectives over tp, forward and backward
    "plain": (dict(gather_output=False), {AR: 1}),
    "gathered": (dict(gather_output=True), {AR: 1, AG: 1}),
    "sequence": (dict(gather_output=False, sequence_parallel_enabled=True), {AG: 2, RS: 1}),
    "sequence dim 1": (
        dict(gather_output=False, sequence_parallel_enabled=True, sequence_dimension=1),
        {AG: 2, RS: 1},
    ),
    "stride": (dict(gather_output=True, stride=2), {AR: 1, AG: 1}),
    "bias apart": (dict(gather_output=False, skip_bias_add=True), {AR: 1}),
    "replicated input": (dict(gather_output=False, input_is_replicated=True), {}),
}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", COLUMN)
def test_column(name, tp):
    options, collectives = COLUMN[name]
    whole = {0: 8, 1: 4}
    x, g = [8, 4, 16], [8, 4, 16 if options["gather_output"] else 16 // tp]
    if options.get("sequence_parallel_enabled"):
        dim = options.get("sequence_dimension", 0)
        x[dim] = whole[dim] // tp
    arguments = [("column", options, leaf(*x, seed=r), draw(*g, seed=10 + r)) for r in range(4)]
    replayed = same_as_threads(programs.linear, mesh(tp), arguments)
    assert replayed.program.counts() == Counter({(kind, "tp"): n for kind, n in collectives.items()})


ROW = {
    "plain": (dict(input_is_parallel=True), {AR: 1}),
    "whole input": (dict(input_is_parallel=False), {AR: 1, AG: 1}),
    "sequence": (dict(input_is_parallel=True, sequence_parallel_enabled=True), {RS: 1, AG: 1}),
    "stride": (dict(input_is_parallel=False, stride=2), {AR: 1, AG: 1}),
    "bias apart": (dict(input_is_parallel=True, skip_bias_add=True), {AR: 1}),
    "partial": (dict(input_is_parallel=True, reduce_output=False), {}),
}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ROW)
def test_row(name, tp):
    options, collectives = ROW[name]
    x = (8, 4, 16 // tp if options["input_is_parallel"] else 16)
    g = (8 // tp if options.get("sequence_parallel_enabled") else 8, 4, 16)
    arguments = [("row", options, leaf(*x, seed=r), draw(*g, seed=10 + r)) for r in range(4)]
    replayed = same_as_threads(programs.linear, mesh(tp), arguments)
    assert replayed.program.counts() == Counter({(kind, "tp"): n for kind, n in collectives.items()})


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_and_row_with_data_parallelism(tp, sequence_parallel):
    options = dict(sequence_parallel_enabled=True) if sequence_parallel else {}
    arguments = [(options, leaf(8 // tp if sequence_parallel else 8, 4, 16, seed=r // tp)) for r in range(4)]
    replayed = same_as_threads(programs.pair, mesh(tp), arguments)
    expected = Counter({(AG, "tp"): 3, (RS, "tp"): 2, (AR, "tp"): 1} if sequence_parallel else {(AR, "tp"): 2})
    if tp == 2:
        expected[AR, "dp,cp"] = 1
    assert replayed.program.counts() == expected
    groups = {c.axis: c.groups for c in replayed.program.collectives}
    if tp == 2:
        assert groups == {"tp": ((0, 1), (2, 3)), "dp,cp": ((0, 2), (1, 3))}


def test_fused_columns_share_one_collective():
    replayed = same_as_threads(programs.fused, mesh(2), [(leaf(6, 16),)] * 4)
    assert replayed.program.counts() == {(AR, "tp"): 1}


EMBEDDING = {
    "vocabulary": ({}, {AR: 1}),
    "padding": (dict(padding_idx=17), {AR: 1}),
    "sequence": (dict(sequence_parallel_enabled=True), {RS: 1, AG: 1}),
    "sequence dim 1": (dict(sequence_parallel_enabled=True, sequence_dimension=1), {RS: 1, AG: 1}),
    "hidden": (dict(shard_across_embedding=True), {AG: 1}),
    "hidden, sequence": (dict(shard_across_embedding=True, sequence_parallel_enabled=True), {A2A: 2}),
    "partial": (dict(collect_output=False), {}),
}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", EMBEDDING)
def test_embedding(name, tp):
    options, collectives = EMBEDDING[name]
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(3))
    ids[0, :3] = torch.tensor([17, 0, 31])
    replayed = same_as_threads(programs.embedding, mesh(tp), [(options, ids)] * 4)
    assert replayed.program.counts() == Counter({(kind, "tp"): n for kind, n in collectives.items()})


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.1), dict(ignore_index=7)], ids=str)
def test_cross_entropy(options, tp):
    labels = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(3))
    labels[0, :4] = torch.tensor([0, 31, 7, options.get("ignore_index", -100)])
    arguments = [(options, leaf(2, 8, 32 // tp, seed=r % tp), labels) for r in range(4)]
    replayed = same_as_threads(programs.cross_entropy, mesh(tp), arguments)
    assert [(c.kind, c.op) for c in replayed.program.collectives] == [(AR, "maximum"), (AR, "add")]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms(sequence_parallel):
    same_as_threads(programs.norms, mesh(2), [(sequence_parallel, leaf(4, 16, seed=r)) for r in range(4)])


def test_every_region_function():
    same_as_threads(programs.regions, Mesh(4, tp=2, ep=2), [(draw(4, 8, 4, seed=r),) for r in range(4)])


def test_gradient_norm_and_clipping():
    replayed = same_as_threads(programs.norm_and_clip, mesh(2), [(leaf(6, 16, seed=r // 2),) for r in range(4)])
    assert replayed.program.counts()[AR, "pp,tp"] == 1


def test_number_of_labels():
    labels = [torch.randint(0, 9, (2, 8), generator=torch.Generator().manual_seed(r // 2)) for r in range(4)]
    labels[2][0] = labels[3][0] = -100
    same_as_threads(programs.number_of_items, mesh(2), [(rows,) for rows in labels])


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_the_own_piece_along_any_dim(dim):
    same_as_threads(programs.pieces, Mesh(4, tp=2), [(draw(4, 6, seed=rank), dim) for rank in range(4)], tolerance=0)


@pytest.mark.parametrize("ep, tp", [(2, 1), (2, 2), (4, 1)])
def test_experts(ep, tp):
    """Every expert has a slot for each token: no size depends on values."""
    x = [leaf(3, 2, 16, seed=data) for data in range(4 // tp) for _ in range(tp)]
    replayed = same_as_threads(programs.experts, Mesh(4, tp=tp, ep=ep), [(rank,) for rank in x])
    assert replayed.program.counts()[A2A, "ep"] == 4
