"""Every change of a file is noticed, and only what is read is compared."""

import random

import pytest

from neuronx_dist.checkpoint import checksums
from neuronx_dist.checkpoint.checksums import Blocks, with_checksums
from neuronx_dist.checkpoint.errors import CheckpointCorrupted

SIZES = (5, 4096, 20000, 0, 8192, 4097)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK", 8192)


def content(sizes=SIZES):
    generator = random.Random(0)
    chunks = [bytearray(generator.randbytes(size)) for size in sizes]
    return bytearray(b"".join(with_checksums(map(memoryview, chunks))))


def test_what_was_written_is_whole():
    file = content()
    generator = random.Random(0)
    assert file[: sum(SIZES)] == b"".join(generator.randbytes(size) for size in SIZES)
    Blocks(memoryview(file), "name").verify()
    Blocks(memoryview(bytes(file)), "name").verify(3, 9)
    Blocks(memoryview(content(())), "name").verify()


def test_each_flipped_bit_is_noticed():
    file, generator = content(), random.Random(1)
    for bit in [*generator.sample(range(len(file) * 8), 200), 0, len(file) * 8 - 1]:
        file[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointCorrupted, match="name is"):
            Blocks(memoryview(file), "name").verify()
        file[bit // 8] ^= 1 << bit % 8
    Blocks(memoryview(file), "name").verify()


def test_moved_lost_and_zeroed_pages_are_noticed():
    file = content((65536,))
    first, second, third = (slice(start, start + 4096) for start in (0, 4096, 40960))
    for one, other in ((first, second), (first, third)):
        wrong = bytearray(file)
        wrong[one], wrong[other] = file[other], file[one]
        with pytest.raises(CheckpointCorrupted):
            Blocks(memoryview(wrong), "name").verify()
    wrong = bytearray(file)
    wrong[third] = bytes(4096)
    with pytest.raises(CheckpointCorrupted, match="bytes 40960 to 49152 are not what was written"):
        Blocks(memoryview(wrong), "name").verify()


@pytest.mark.parametrize("length", [0, 3, 30, 5000])
def test_truncated_files_are_noticed(length):
    for wrong in (content()[:length], content()[:-1], content() + b"\0"):
        with pytest.raises(CheckpointCorrupted, match="truncated"):
            Blocks(memoryview(wrong), "name")


def test_only_what_is_read_is_compared():
    file = content()
    file[4096 + 5 + 9000] ^= 1  # in the second block of the third chunk
    blocks = Blocks(memoryview(file), "name")
    blocks.verify(0, 4101 + 8192)
    blocks.verify(4101 + 2 * 8192, sum(SIZES))
    with pytest.raises(CheckpointCorrupted):
        blocks.verify(4101 + 8191, 4101 + 8193)
