"""The tests that every version of torch must pass: `make test-versions`, on the list of versions in `torch_internals`.

They are all fast tests, and some of the slow ones, which train on a few layouts: of each place as many as `PLACES`
says, evenly spaced. The mark `versions` is given to all of them, `versions_short` to the fast ones, but for those in
`WITHOUT_TORCH`, and to fewer others.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

__all__ = ["PLACES", "WITHOUT_TORCH", "mark"]

# Fast tests of text and of pure Python, which no version of torch changes.
WITHOUT_TORCH = (
    "tests/mutate",
    "tests/pipeline/schedule",
    "tests/pipeline/timeline",
    "tests/planning/test_layout.py",
    "tests/planning/test_plan.py",
    "tests/test_docstrings.py",
    "tests/test_mesh.py",
    "tests/test_structure.py",
    "tests/test_topology.py",
)

# Folder or file -> numbers of its slow tests in the short selection, and in the other. 1000 is more than there are.
PLACES = {
    "tests/checking/user_programs": (100, 1000),
    "tests/checking/programs/test_schedules.py": (2, 10),
    "tests/checking/programs/test_optimizers.py": (3, 12),
    "tests/checking/programs/test_hf_clean.py": (2, 8),
    "tests/checking/types/soundness": (6, 40),
    "tests/spmd": (1, 14),
    "tests/program": (1, 19),
    "tests/parallel_layers": (5, 40),
    "tests/strangers": (4, 40),
    "tests/pipeline/test_parity.py": (3, 12),
    "tests/pipeline/test_checkpointing.py": (3, 12),
    "tests/pipeline/test_effects.py": (2, 6),
    "tests/pipeline/test_architectures.py": (2, 10),
    "tests/pipeline/run/test_halves.py": (6, 30),
    "tests/pipeline/run/test_processes.py": (1, 4),
    "tests/optimizer/test_zero1.py": (4, 24),
    "tests/optimizer/test_overlap.py": (2, 8),
    "tests/checkpoint/test_layout_matrix.py": (1, 4),
    "tests/checkpoint/test_api.py": (1, 6),
    "tests/checkpoint/test_nxd_reading.py": (1, 6),
    "tests/shard_tensor/test_ops.py": (8, 60),
    "tests/shard_tensor/test_composition.py": (1, 5),
    "tests/shard_tensor/test_processes.py": (1, 2),
    "tests/shard_tensor/test_compiling.py": (0, 1),
    "tests/hf/test_swap.py": (1, 8),
    "tests/parallelize/test_matrix.py": (3, 12),
    "tests/parallelize/test_processes.py": (1, 2),
    "tests/parallelize/test_checkpoints.py": (1, 4),
    "tests/parallelize/train/test_pipeline.py": (1, 4),
    "tests/parallelize/prove/test_verify.py": (1, 6),
}


def mark(items: list[pytest.Item]) -> None:
    """Marks the tests of both selections; called when `fast` has been given."""
    slow = [item for item in items if not item.get_closest_marker("fast") and not item.get_closest_marker("full")]
    for item in items:
        if item.get_closest_marker("fast"):
            item.add_marker("versions")
            if not item.nodeid.startswith(_inside(WITHOUT_TORCH)):
                item.add_marker("versions_short")
    for place, counts in PLACES.items():
        at_place = [item for item in slow if item.nodeid.startswith(_inside([place]))]
        for name, count in zip(("versions_short", "versions"), counts, strict=True):
            for item in evenly_spaced(at_place, count):
                item.add_marker(name)


def _inside(places: Iterable[str]) -> tuple[str, ...]:
    """Returns how the ids of tests in these files and folders begin."""
    return tuple(place + end for place in places for end in ("/", "::"))


def evenly_spaced(items: list[pytest.Item], count: int) -> list[pytest.Item]:
    if count >= len(items):
        return items
    return [items[number * len(items) // count] for number in range(count)]
