"""Every change of a file is noticed, and only what is read is compared."""

import random

import pytest

from neuronx_dist.checkpoint.dcp import checksums
from neuronx_dist.checkpoint.dcp.checksums import Blocks, with_checksums
from neuronx_dist.checkpoint.errors import CheckpointCorrupted, CheckpointError

SIZES = (5, 4096, 20000, 0, 8192, 4097)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK", 8192)


def content(sizes=SIZES):
    generator = random.Random(0)
    chunks = [bytearray(generator.randbytes(size)) for size in sizes]
    return bytearray(b"".join(with_checksums(map(memoryview, chunks))))


def verify(file, start=0, stop=None):
    """Compares blocks of a file, each of those that bytes `start` to `stop` lie in."""
    data = memoryview(file)
    blocks = Blocks(lambda first, last: data[first:last], len(data), "name")
    blocks.verify(data, start, blocks.starts[-1] if stop is None else stop)
    return blocks


def test_what_was_written_is_whole():
    file = content()
    generator = random.Random(0)
    assert file[: sum(SIZES)] == b"".join(generator.randbytes(size) for size in SIZES)
    assert not any(verify(file).wanted) and not any(verify(content(())).wanted)
    assert verify(bytes(file), 3, 9).wanted == bytes([0, 0]) + bytes([1] * 5)


def test_each_flipped_bit_is_noticed():
    file, generator = content(), random.Random(1)
    for bit in [*generator.sample(range(len(file) * 8), 200), 0, len(file) * 8 - 1]:
        file[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointCorrupted, match="name is"):
            verify(file)
        file[bit // 8] ^= 1 << bit % 8
    verify(file)


def is_noticed(file):
    try:
        verify(file)
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
    with pytest.raises(CheckpointCorrupted, match="bytes 40960 to 49152 have a wrong checksum"):
        verify(file[:40960] + bytes(4096) + file[45056:])


def test_words_that_change_places_are_noticed():
    file = content((65536,))
    assert is_noticed(swapped(file, 8, 16, 8)) and is_noticed(swapped(file, 8, 512, 8))


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
            verify(wrong)


def test_only_what_is_read_is_compared():
    file = content()
    file[4096 + 5 + 9000] ^= 1  # in the second block of the third chunk
    verify(file, 0, 4101 + 8192)
    verify(file, 4101 + 2 * 8192, sum(SIZES))
    with pytest.raises(CheckpointCorrupted):
        verify(file, 4101 + 8191, 4101 + 8193)


@pytest.mark.parametrize("start, stop", [(0, 36390), (3, 4), (5, 4101), (4102, 24000), (0, 0), (36389, 36390)])
def test_what_is_copied_is_compared(start, stop):
    """And copied also where another rank compares it."""
    file = content()
    data = memoryview(file)
    blocks = verify(file, 0, 0)
    target = bytearray(stop - start)
    blocks.copy(data, start, stop, memoryview(target))
    touched = {index for index in range(7) if blocks.starts[index] < stop and blocks.starts[index + 1] > start}
    assert target == file[start:stop]
    assert [index for index, wanted in enumerate(blocks.wanted) if not wanted] == sorted(touched if stop else ())
    for index in touched if stop else ():
        file[blocks.starts[index]] ^= 1
        again = verify(file, 0, 0)
        with pytest.raises(CheckpointCorrupted):
            again.copy(data, start, stop, memoryview(target))
        again.wanted[index] = 0
        again.copy(data, start, stop, memoryview(target))
        file[blocks.starts[index]] ^= 1


def test_checksums_of_an_earlier_version_are_refused():
    """By their magic, at the end of a file."""
    with pytest.raises(CheckpointError, match="name has checksums of an earlier version of neuronx_dist") as error:
        verify(content()[:-8] + b"nxdblks1")
    assert not isinstance(error.value, CheckpointCorrupted)
