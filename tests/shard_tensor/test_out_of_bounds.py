"""Positions out of bounds on one rank of real processes: it says which, and the others, which wait, say it too."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist.shard_tensor import DeviceMesh, Replicate, Shard, distribute_tensor
from tests.support.pool import WorkerFailure, processes

pytestmark = [pytest.mark.process, pytest.mark.slow]


def targets(mesh, wrong):
    logits = distribute_tensor(torch.randn(4, 5).requires_grad_(), mesh, [Shard(0)], src=None)
    classes = distribute_tensor(torch.tensor([0, 1, 2, 9 if wrong else 3]), mesh, [Shard(0)], src=None)
    F.cross_entropy(logits, classes)


def embedding(mesh, wrong):
    weight = distribute_tensor(torch.randn(7, 3).requires_grad_(), mesh, [Replicate()], src=None)
    tokens = distribute_tensor(torch.tensor([0, 1, 2, 9 if wrong else 3]), mesh, [Shard(0)], src=None)
    F.embedding(tokens, weight).sum().backward()


def index_select(mesh, wrong):
    x = distribute_tensor(torch.randn(5, 4), mesh, [Shard(0)], src=None)
    x.index_select(0, torch.tensor([0, 9 if wrong else 3])).full_tensor()


CASES = {
    "targets": (targets, "targets range from 2 to 9, but dim 1 has 5 elements"),
    "embedding": (embedding, "indices range from 2 to 9, but dim 0 has 7 elements"),
    "index_select": (index_select, "indices range from 0 to 9, but dim 0 has 5 elements"),
}


def on_a_rank(name):
    mesh = DeviceMesh("cpu", [0, 1])
    torch.manual_seed(0)
    try:
        CASES[name][0](mesh, mesh.get_rank() == 1)
    except IndexError as error:
        sys.excepthook(type(error), error, error.__traceback__)  # a program that catches nothing ends so
        os._exit(1)
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize("name", CASES)
def test_one_ranks_error_ends_all_ranks(name):
    with pytest.raises(WorkerFailure) as caught:
        processes(2).run(on_a_rank, name, mesh={})
    text, words = str(caught.value), CASES[name][1]
    assert f"RemoteRankError: rank 1 failed first: IndexError: {words} (met in" in text
