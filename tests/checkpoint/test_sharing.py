"""Each block of a file is verified by one rank, and by one that reads it if there is one."""

import random

import pytest

from neuronx_dist.checkpoint.dcp import checksums
from neuronx_dist.checkpoint.dcp.checksums import Blocks, merged, readers_of, share_blocks, with_checksums

BLOCK, COUNT = 64, 40


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK", BLOCK)


def blocks():
    file = memoryview(b"".join(with_checksums([bytes(BLOCK * COUNT)])))
    return Blocks(lambda start, stop: file[start:stop], len(file), "name")


def shares(needs):
    """For each rank the numbers of the blocks that it is to verify."""
    readers = readers_of("file", 1, [{"file": merged(need)} if need else {} for need in needs])
    found = {}
    for rank in readers:
        local = blocks()
        share_blocks(local, readers, rank)
        found[rank] = {index for index, wanted in enumerate(local.wanted) if wanted}
    return found


def test_ranges_that_touch_are_one():
    assert merged([(5, 7), (0, 2), (2, 4), (1, 3), (6, 6)]) == [(0, 4), (5, 7)]


def test_a_block_that_several_read_goes_to_them_by_turns():
    whole = [(0, BLOCK * COUNT)]
    assert shares([whole, whole]) == {0: set(range(0, COUNT, 2)), 1: set(range(1, COUNT, 2))}
    assert shares([whole, [], whole])[2] == set(range(1, COUNT, 2))


def test_each_reads_its_own_half():
    half = BLOCK * COUNT // 2
    assert shares([[(0, half)], [(half, 2 * half)]]) == {0: set(range(20)), 1: set(range(20, 40))}


def test_a_file_that_nobody_reads_is_one_ranks():
    assert shares([[], [], []]) == {1: set(range(COUNT))}


@pytest.mark.parametrize("seed", range(20))
def test_every_block_is_verified_once_by_a_rank_that_reads_it(seed):
    generator = random.Random(seed)

    def ranges():
        starts = [generator.randrange(BLOCK * COUNT) for _ in range(generator.randrange(5))]
        return [(start, min(start + generator.randrange(1, 9 * BLOCK), BLOCK * COUNT)) for start in starts]

    needs = [ranges() for _ in range(generator.randrange(1, 6))]
    found = shares(needs)
    assert sorted(index for pieces in found.values() for index in pieces) == list(range(COUNT))
    for rank, pieces in found.items():
        for index in pieces:
            readers = {
                other
                for other, need in enumerate(needs)
                if any(start < (index + 1) * BLOCK and stop > index * BLOCK for start, stop in need)
            }
            assert rank in readers or not readers
