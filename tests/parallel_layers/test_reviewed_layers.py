"""Layers by their arguments: attributes, layouts, shapes and initial values, as a file.

`layers.txt` has what was reviewed; NXD_UPDATE_LAYERS=1 writes it anew. That layers compute what they should, parity
shows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    fuse_columns,
    layer_norm,
    signatures,
)
from neuronx_dist.parallel_layers.fused_columns import check_fusable
from neuronx_dist.spmd import ShardSpec, set_spec, spec_of

FILE = Path(__file__).parent / "layers.txt"
BF16, F64 = torch.bfloat16, torch.float64
SHARD: dict[str, Any] = dict(gather_output=False)
LAYERS: list[tuple[Any, dict[str, Any]]] = [
    (ColumnParallelLinear, {}),
    (ColumnParallelLinear, dict(bias=False, dtype=BF16, **SHARD)),
    (ColumnParallelLinear, dict(stride=2, keep_master_weight=True, skip_bias_add=True, **SHARD)),
    (ColumnParallelLinear, dict(replicas=2, reduce_dtype=None, input_is_replicated=True, **SHARD)),
    (ColumnParallelLinear, dict(sequence_parallel_enabled=True, sequence_dimension=1, **SHARD)),
    (ColumnParallelLinear, dict(tensor_model_parallel_group="dp", init_method=nn.init.ones_)),
    (RowParallelLinear, {}),
    (RowParallelLinear, dict(bias=False, input_is_parallel=True, dtype=F64)),
    (RowParallelLinear, dict(stride=3, keep_master_weight=True, skip_bias_add=True, reduce_output=False)),
    (RowParallelLinear, dict(sequence_parallel_enabled=True, sequence_dimension=-2, input_is_parallel=True)),
    (RowParallelLinear, dict(tensor_model_parallel_group="cp", reduce_dtype=None, init_method=nn.init.zeros_)),
    (ParallelEmbedding, {}),
    (ParallelEmbedding, dict(padding_idx=-1, max_norm=2.0, norm_type=1.0, sparse=True, dtype=BF16)),
    (ParallelEmbedding, dict(shard_across_embedding=True, scale_grad_by_freq=True, collect_output=False)),
    (ParallelEmbedding, dict(sequence_parallel_enabled=True, sequence_dimension=1, reduce_dtype=None)),
    (ParallelEmbedding, dict(tensor_model_parallel_group="dp", padding_idx=0, init_method=nn.init.ones_)),
    (layer_norm.LayerNorm, dict(normalized_shape=12)),
    (layer_norm.LayerNorm, dict(normalized_shape=(2, 3), eps=0.5, bias=False, sequence_parallel_enabled=True)),
    (layer_norm.LayerNorm, dict(normalized_shape=[4], elementwise_affine=False, dtype=F64)),
    (layer_norm.RMSNorm, dict(normalized_shape=12, eps=0.25, sequence_parallel_enabled=True, dtype=BF16)),
    (layer_norm.RMSNorm, dict(normalized_shape=(2, 3))),
]
NXDS = (
    "add_bias arg_init_method bias_shape device dtype keep_master_weight pad rank_ordering weight_partition_dim "
    "weight_shape tensor_model_parallel_size embedding_dim_per_partition num_embeddings_per_partition start_index "
    "in_features out_features end_index stride first_id tensor_parallel_group tensor_model_parallel_group"
).split()
MARKS = "tensor_model_parallel partition_dim partition_stride num_partitions sequence_parallel_enabled shared".split()


def _text(value: Any) -> str:
    if isinstance(value, comm.Communicator):
        return f"{value.axis} {list(value.ranks)}"
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {value.dtype}, sum {float(value.detach().double().sum()):.5f}"
    return getattr(value, "__name__", None) or str(value)


def _lines() -> Iterator[str]:
    for layer_class, options in LAYERS:
        torch.manual_seed(0)
        sizes = () if "normalized_shape" in options else (24, 48)
        layer = layer_class(*sizes, **options)
        given = ", ".join(f"{name}={_text(value)}" for name, value in options.items())
        yield f"== {layer_class.__name__}({given}): {layer.extra_repr()}"
        plain = {name: value for name, value in vars(layer).items() if name[0] != "_" and name != "training"}
        yield "  " + ", ".join(f"{name} {_text(value)}" for name, value in sorted(plain.items()))
        asked = {name: getattr(layer, name) for name in NXDS if hasattr(layer, name)}
        yield "  " + ", ".join(f"{name} {_text(value)}" for name, value in asked.items())
        for name, param in layer.named_parameters():
            marks = {mark: getattr(param, mark) for mark in MARKS if hasattr(param, mark)}
            yield f"  {name} {_text(param)}, {spec_of(param)}, {marks}"
        for whole in [layer.full_module(), layer.full_module("cpu")] if hasattr(layer, "full_module") else []:
            kinds = [f"{name} {list(p.shape)} {p.dtype} {p.device}" for name, p in whole.named_parameters()]
            yield f"  whole {whole.extra_repr()}: {', '.join(kinds)}"


def test_layers_are_as_reviewed() -> None:
    with comm.as_rank(Mesh(8, tp=4, cp=2), 5):
        now = [*_lines()]
    if os.environ.get("NXD_UPDATE_LAYERS"):
        FILE.write_text("\n".join(now) + "\n")
    assert now == FILE.read_text().splitlines()


# --- what is refused, at its bounds


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: ColumnParallelLinear(4, 4, replicas=2), "gather_output=True is not possible with replicas=2; pass"),
        (lambda: ColumnParallelLinear(4, 8, replicas=3, **SHARD), "3 replicas of each shard over tp of size 4: the"),
        (lambda: ColumnParallelLinear(4, 8, replicas=0, **SHARD), "0 replicas of each shard over tp of size 4"),
        (lambda: ColumnParallelLinear(4, 8, replicas=-2, **SHARD), "-2 replicas of each shard over tp of size 4"),
        (lambda: ColumnParallelLinear(4, 8, replicas=2, tensor_model_parallel_group="dp", **SHARD), "over dp of size"),
        (
            lambda: ColumnParallelLinear(4, 7, replicas=2, **SHARD),
            "output_size 7 is not divisible by the tensor parallel size 4 / 2 replicas; pad it",
        ),
        (
            lambda: ColumnParallelLinear(4, 12, stride=2),
            "output_size 12 is not divisible by the tensor parallel size 4 times 2 fused blocks; pad it",
        ),
        (lambda: RowParallelLinear(6, 4), "input_size 6 is not divisible by the tensor parallel size 4; pad it (see"),
        (
            lambda: ColumnParallelLinear(4, 4, sequence_parallel_enabled=True),
            "gather_output=True is not possible with sequence_parallel_enabled=True; pass gather_output=False",
        ),
        (
            lambda: RowParallelLinear(4, 4, sequence_parallel_enabled=True),
            "sequence_parallel_enabled=True needs input_is_parallel=True",
        ),
        (lambda: ParallelEmbedding(8, 4, padding_idx=-9), "padding_idx -9 is out of range for 8 embeddings"),
        (lambda: ParallelEmbedding(8, 4, padding_idx=8), "padding_idx 8 is out of range for 8 embeddings"),
        (
            lambda: ParallelEmbedding(9, 4),
            "num_embeddings 9 is not divisible by the tensor parallel size 4; the next size that is: 12",
        ),
        (
            lambda: ParallelEmbedding(8, 5, shard_across_embedding=True),
            "embedding_dim 5 is not divisible by the tensor parallel size 4; the next size that is: 8",
        ),
        (
            lambda: ParallelEmbedding(8, 4, sequence_parallel_enabled=True, sequence_dimension=-1),
            "sequence_dimension must be 0 or 1, got -1",
        ),
    ],
)  # fmt: skip
def test_impossible_layers(build: Any, message: str) -> None:
    with comm.as_rank(Mesh(8, tp=4), 5), pytest.raises(ValueError) as error:
        build()
    assert message in str(error.value)
    assert str(error.value).split(": ", 1)[0] in ("ColumnParallelLinear", "RowParallelLinear", "ParallelEmbedding")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_that_are_possible_at_the_bounds() -> None:
    with comm.as_rank(Mesh(8, tp=4), 5):
        assert ParallelEmbedding(8, 4, padding_idx=-8).padding_idx == 0
        assert ParallelEmbedding(8, 4, padding_idx=7).padding_idx == 7
        assert ColumnParallelLinear(0, 4, bias=True).bias.abs().sum() == 0  # no input, no bound
        assert ColumnParallelLinear(4, 4, replicas=4, **SHARD).weight.shape == (4, 4)
        assert ParallelEmbedding(8, 4, sequence_dimension=5).sequence_dimension == 5  # without a sequence
    with comm.as_rank(Mesh(8), 5):  # on one rank all goes
        ParallelEmbedding(7, 3, max_norm=1.0, shard_across_embedding=True)
        ParallelEmbedding(7, 3, scale_grad_by_freq=True)


DIFFERENT: list[dict[str, Any]] = [
    dict(input_size=8),
    dict(sequence_parallel_enabled=True),
    dict(sequence_dimension=1),
    dict(reduce_dtype=None),
    dict(bias=False),
    dict(input_is_replicated=True),
    dict(tensor_model_parallel_group="dp"),
    dict(gather_output=True),
]


@pytest.mark.parametrize("difference", DIFFERENT, ids=str)
def test_layers_that_differ_are_not_fused(difference: dict[str, Any]) -> None:
    with comm.as_rank(Mesh(4, tp=2), 0):
        like, other = ({"input_size": 4, "output_size": 8, **SHARD, **more} for more in ({}, difference))
        first, second, third = (ColumnParallelLinear(**options) for options in (like, like, other))
        check_fusable([first, second])
        for layers in ([first, third], [third, first], [first, second, third], [first], []):
            with pytest.raises(ValueError, match="fuse_columns needs at least two layers with equal input size, group"):
                fuse_columns(layers)
        assert vars(first)["_siblings"] is None
        skipping = ColumnParallelLinear(**like, skip_bias_add=True)
        with pytest.raises(ValueError, match="fuse_columns"):
            check_fusable([first, skipping])  # its bias is not added
        wide = ColumnParallelLinear(**{**like, "output_size": 10})
        check_fusable([first, wide])
        gathering = [ColumnParallelLinear(4, 8) for _ in range(2)]
        with pytest.raises(ValueError, match="fuse_columns"):
            check_fusable(gathering)


# --- orders of positional arguments


@pytest.mark.parametrize(
    "name, fitting, others",
    [
        ("dtype", [torch.float32], [None, True, 1, "float32", torch.ones(1)]),
        ("dtype?", [torch.float32, None], [True, 1]),
        ("init_method", [nn.init.ones_, lambda weight: None], [None, 3, True]),
        ("init_method?", [nn.init.ones_, None], [3]),
        ("max_norm?", [1, 2.5, None], [True, "2"]),
        ("padding_idx?", [0, -1, None], [False, 1.0, "2"]),
        ("pipeline_cuts?", [[], ("a",), None], ["a", 2]),
        ("sequence_parallel_enabled", [True, False], [None, 0, torch.float32]),
        ("use_zero1_optimizer", [True], [1, None]),
        ("device", [None, "cpu", 3, True], []),  # does not tell orders apart
    ],
)
def test_what_tells_orders_apart(name: str, fitting: list[Any], others: list[Any]) -> None:
    fits = vars(signatures)["_fits"]
    assert all(fits(name, value) for value in fitting)
    assert not any(fits(name, value) for value in others)


def test_defaults_of_what_is_refused_or_ignored() -> None:
    """Defaults are NxD's; else a call without these arguments would get an error or a warning."""
    refused = {name: default for name, (default, _) in signatures.REFUSED.items()}
    assert refused == {"rank_ordering": None, "autograd_func_class": None}
    switched_on = {name for name, default in signatures.IGNORED.items() if default is True}
    assert switched_on == {
        "save_for_backward", "_mark_step_before_pp_runtime", "_mark_step_after_pp_runtime", "_deallocate_send_tensors",
    }  # fmt: skip
    numbers = {name: default for name, default in signatures.IGNORED.items() if not isinstance(default, bool)}
    assert numbers == {"_debug_pp_size": 8, "_debug_pp_rank": 0}
    assert len(signatures.IGNORED) == 15


def test_a_decorated_function_is_still_itself() -> None:
    for function in (ColumnParallelLinear.__init__, RowParallelLinear.__init__, ParallelEmbedding.__init__):
        assert function.__name__ == "__init__" and function.__wrapped__.__code__.co_argcount > 5  # type: ignore[attr-defined]


def test_layouts_that_a_norm_has() -> None:
    norm = layer_norm.LayerNorm((2, 3), sequence_parallel_enabled=True)
    assert spec_of(norm.weight) == ShardSpec(full_shape=(2, 3), sequence_parallel=True) == spec_of(norm.bias)
    with torch.no_grad():
        norm.weight.fill_(3.0)
        norm.bias.fill_(3.0)
    norm.reset_parameters()
    assert norm.weight.eq(1).all() and norm.bias.eq(0).all()
    set_spec(norm, "weight", ShardSpec(full_shape=(2, 3)))
    assert not spec_of(layer_norm.RMSNorm(3).weight).sequence_parallel
