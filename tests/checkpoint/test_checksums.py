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


def is_noticed(file):
    try:
        Blocks(memoryview(file), "name").verify()
    except CheckpointCorrupted:
        return True
    return False


def swapped(file, one, other, size):
    wrong = bytearray(file)
    wrong[one : one + size], wrong[other : other + size] = file[other : other + size], file[one : one + size]
    return wrong


@pytest.mark.parametrize("size", [512, 4096, 8192])  # sectors, pages, blocks
def test_moved_lost_and_zeroed_parts_are_noticed(size):
    file = content((65536,))
    for other in (size, 5 * size):  # in the same block, if it is large enough, and in another
        assert is_noticed(swapped(file, 0, other, size))
        assert is_noticed(file[:other] + bytes(size) + file[other + size :])
        assert is_noticed(file[:other] + file[:size] + file[other + size :])
        assert is_noticed(file[:other] + file[other + size :])
        assert is_noticed(file[:other] + bytes(size) + file[other:])
    with pytest.raises(CheckpointCorrupted, match="bytes 40960 to 49152 are not what was written"):
        Blocks(memoryview(file[:40960] + bytes(4096) + file[45056:]), "name").verify()


def test_what_is_not_noticed():
    """As the module says: words that change places in a sector, and bits that flip up and down in two of its words."""
    file = content((65536,))
    assert not is_noticed(swapped(file, 8, 16, 8)) and is_noticed(swapped(file, 8, 512, 8))
    assert is_noticed(swapped(file, 8, 15, 8))
    words = [int.from_bytes(file[start : start + 8], "little") for start in range(0, 512, 8)]
    up, down = (8 * next(index for index, word in enumerate(words) if word & 1 == bit) for bit in (0, 1))
    for second, noticed in ((down, False), (down + 1, True), (512 + down, True)):
        wrong = bytearray(file)
        wrong[up] ^= 1
        wrong[second] ^= 1
        assert is_noticed(wrong) is noticed


@pytest.mark.parametrize("length", [8192, 16384, 65536, 65536 + 8])
def test_a_file_that_ends_at_a_block_is_noticed(length):
    """With the footer behind it too."""
    file = content((65536,))
    assert is_noticed(file[:length])
    assert length > 65535 or is_noticed(file[:length] + file[65536:])


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
