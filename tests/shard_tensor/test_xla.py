"""Partition specs of XLA: from placements and back."""

from __future__ import annotations

import itertools

import pytest

from neuronx_dist.shard_tensor import Partial, Replicate, Shard
from neuronx_dist.shard_tensor.spec import make_spec
from neuronx_dist.shard_tensor.xla import partition_spec, placements_of
from tests.shard_tensor.support.cases import on_ranks


def test_there_and_back():
    def convert(mesh):
        choices = [Replicate(), Shard(0), Shard(1), Shard(2)]
        count = 0
        for placements in itertools.product(choices, repeat=2):
            if len({p.dim for p in placements if isinstance(p, Shard)}) < sum(isinstance(p, Shard) for p in placements):
                continue
            partition = partition_spec(make_spec(mesh, placements, (4, 6, 2)))
            for dim, m in enumerate(partition):
                assert m is None or placements[m] == Shard(dim)
            assert placements_of(partition, 2) == placements
            count += 1
        assert count == 13
        assert partition_spec(make_spec(mesh, [Shard(2), Replicate()], (4, 6, 2))) == (None, None, 0)

    on_ranks(4, convert, (2, 2))


def test_what_xla_does_not_have_is_refused():
    def refuse(mesh):
        with pytest.raises(
            ValueError, match=r"dim 0 has shards of sizes \[4, 3\], but XLA needs equal shards: pad .* multiple of 2"
        ):
            partition_spec(make_spec(mesh, [Shard(0)], (7, 3)))
        with pytest.raises(ValueError, match="mesh dim 0 has no partition spec: redistribute"):
            partition_spec(make_spec(mesh, [Partial()], (7, 3)))
        for partition in [(1, None), (0, 0), (-1,)]:
            with pytest.raises(ValueError, match="must be one of 1 mesh dims"):
                placements_of(partition, 1)

    on_ranks(2, refuse)
