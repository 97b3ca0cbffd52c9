"""Pipeline stages: brute force agrees."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest

from neuronx_dist.parallelize.choose.cuts import balanced


def slowest(times, crossing, starts):
    bounds = [*starts, len(times)]
    return max(sum(times[a:b]) + (crossing[a] if a else 0.0) for a, b in zip(bounds, bounds[1:]))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_equals_brute_force(seed, count):
    random = Random(seed)
    times = [random.randint(0, 9) for _ in range(9)]
    crossing = [random.choice([0, 1, 30]) for _ in times]
    found = balanced(times, crossing, count)
    assert len(found) == count and found[0] == 0 and sorted(set(found)) == found
    every = [slowest(times, crossing, (0, *cuts)) for cuts in combinations(range(1, 9), count - 1)]
    assert slowest(times, crossing, found) == min(every)


def test_more_stages_than_calls_are_refused():
    with pytest.raises(ValueError, match="2 calls cannot be cut into 3 stages"):
        balanced([1.0, 1.0], [0.0, 0.0], 3)
