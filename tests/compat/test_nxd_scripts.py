"""Scripts in the style of NxD's examples run as they are: their losses are those of one process, on every layout."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked

pytestmark = pytest.mark.process

SCRIPTS = Path(__file__).with_name("nxd_scripts")
OPTIONS = "--{}_parallel_size"


@cache
def _run(script: str, ranks: int, options: tuple[str, ...]) -> list[tuple[float, float]]:
    """Returns losses and norms of the steps."""
    command = ["-m", "neuronx_dist", "compat", str(SCRIPTS / script), *options]
    result = forked.run(command, ranks=ranks, OMP_NUM_THREADS="1")
    assert result.codes == [0] * ranks, "\n".join(error[-1500:] for error in result.errors)
    outputs = [
        [line.split()[1:3] for line in output.splitlines() if line.startswith("LOG")] for output in result.outputs
    ]
    steps = zip(*(lines for lines in outputs if lines))  # of the data-parallel ranks that print
    return [(sum(float(loss) for loss, _ in ranks) / len(ranks), float(ranks[0][1])) for ranks in steps]


def _options(**options: Any) -> tuple[str, ...]:
    return tuple(word for name, value in options.items() for word in (f"--{name}", str(value)))


def _zero1(**options: Any) -> tuple[str, tuple[str, ...]]:
    return "train_zero1.py", _options(**options)


def _pipeline(**options: Any) -> tuple[str, tuple[str, ...]]:
    return "train_pipeline.py", _options(**options)


def _lightning(**options: Any) -> tuple[str, tuple[str, ...]]:
    return "train_lightning.py", _options(**options)


# Name -> ranks, script and options; the same script with the options of the layout left out runs in one process.
LAYOUTS = {
    "tp 2, SP, selective checkpoints": (
        2,
        _zero1(tensor_parallel_size=2, sequence_parallel_enabled=1, selective_checkpoint_enabled=1),
    ),
    "tp 2, dp 2, ZeRO-1, SP, selective checkpoints": (
        4,
        _zero1(tensor_parallel_size=2, use_zero_1=1, sequence_parallel_enabled=1, selective_checkpoint_enabled=1),
    ),
    "tp 4, replicated qkv, meta": (
        4,
        _zero1(tensor_parallel_size=4, qkv_linear=1, fuse_qkv=1, kv_replicator=2, use_meta_device_init=1),
    ),
    "cp 2, dp 2, ZeRO-1, flash": (4, _zero1(context_parallel_size=2, use_zero_1=1, use_flash_attention=1)),
    "tp 2, pp 2, ZeRO-1, SP, qkv, flash": (
        4,
        _pipeline(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            use_zero_1=1,
            sequence_parallel_enabled=1,
            qkv_linear=1,
            use_flash_attention=1,
        ),
    ),
    "Lightning, tp 2, dp 2, ZeRO-1, SP": (
        4,
        _lightning(tensor_parallel_size=2, use_zero_1=1, sequence_parallel_enabled=1),
    ),
    "Lightning, tp 2, pp 2": (4, _lightning(tensor_parallel_size=2, pipeline_parallel_size=2)),
    "Mixtral by Lightning, ep 2, tp 2, ZeRO-1, SP": (
        4,
        _lightning(
            model="mixtral", expert_parallel_size=2, tensor_parallel_size=2, use_zero_1=1, sequence_parallel_enabled=1
        ),
    ),
    "Mixtral by Lightning, pp 2, ep 2": (
        4,
        _lightning(model="mixtral", expert_parallel_size=2, pipeline_parallel_size=2, num_microbatches=1),
    ),
    "DBRX by Lightning, ep 2": (2, _lightning(model="dbrx", expert_parallel_size=2)),
    "Lightning, pp 2": (2, _lightning(pipeline_parallel_size=2)),
    "by hand, dp 2, ZeRO-1": (2, ("train_by_hand.py", _options(use_zero_1=1))),
    "by hand, tp 2, dp 2": (4, ("train_by_hand.py", _options(tensor_parallel_size=2))),
    "by hand, tp 2, dp 2, ZeRO-1, SP": (
        4,
        ("train_by_hand.py", _options(tensor_parallel_size=2, use_zero_1=1, sequence_parallel_enabled=1)),
    ),
    "a list of layers, tp 2, pp 2": (
        4,
        ("train_manual_pipeline.py", _options(tensor_parallel_size=2, pipeline_parallel_size=2)),
    ),
    "pp 2, dp 2, two chunks": (
        4,
        _pipeline(pipeline_parallel_size=2, virtual_pipeline_size=2, selective_checkpoint_enabled=1),
    ),
}
ALONE = ("qkv_linear", "fuse_qkv", "use_meta_device_init", "model")  # options by which the initial weights differ


# Four of them cover the scripts and the options; the others run with NXD_FULL=1.
_SHORT = [
    "tp 2, SP, selective checkpoints",
    "tp 2, pp 2, ZeRO-1, SP, qkv, flash",
    "Lightning, pp 2",
    "by hand, dp 2, ZeRO-1",
    "Mixtral by Lightning, ep 2, tp 2, ZeRO-1, SP",
]


@pytest.mark.parametrize("name", LAYOUTS if os.environ.get("NXD_FULL") == "1" else _SHORT)
def test_losses_are_those_of_one_process(name: str) -> None:
    ranks, (script, options) = LAYOUTS[name]
    pairs = dict(zip(options[::2], options[1::2]))
    alone = tuple(word for key in ALONE if f"--{key}" in pairs for word in (f"--{key}", pairs[f"--{key}"]))
    losses = _run(script, ranks, options)
    other = script not in ("train_pipeline.py", "train_lightning.py")  # with the weights of train_zero1.py
    expected = _run("train_zero1.py" if other else script, 1, alone)
    assert len(losses) == len(expected) == 3
    assert expected[2][0] < expected[0][0] - 0.1
    for step, (found, wanted) in enumerate(zip(losses, expected)):
        assert found == pytest.approx(wanted, rel=3e-5), (step, losses, expected)
