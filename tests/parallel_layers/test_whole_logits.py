"""Whole logits in place of shards are refused: their loss is over tp times the vocabulary, and looks right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends import threads
from neuronx_dist.parallel_layers import (
    ColumnParallelLinear,
    gather_from_tensor_model_parallel_region,
    parallel_cross_entropy,
    scatter_to_tensor_model_parallel_region,
)
from tests.parallel_layers.layer_parity import draw, tp_mesh

K, ROWS, HIDDEN = 16, 3, 8
# What is done to logits between their layer and the loss.
BETWEEN = {
    "nothing": lambda z: z,
    "cast": lambda z: z.float().double(),
    "temperature": lambda z: z / 0.7,
    "softcap": lambda z: 30 * torch.tanh(z / 30),
    "flat": lambda z: z.unsqueeze(0).expand(2, -1, -1).reshape(-1, z.shape[-1])[: z.shape[0]].contiguous(),
    "shifted": lambda z: z.unsqueeze(0)[..., :-1, :].contiguous(),
    "masked": lambda z: z.masked_fill(torch.zeros(z.shape, dtype=torch.bool), -1e9),
    "time first": lambda z: z.unsqueeze(1).transpose(0, 1).squeeze(0),
    "bias": lambda z: z + torch.zeros(z.shape[-1], dtype=z.dtype),
}


def _layer(gather_output, bias=True):
    return ColumnParallelLinear(HIDDEN, K, bias=bias, gather_output=gather_output, dtype=torch.float64)


def _logits(how):
    """This rank's logits, right or whole, of a layer on `[3, 8]`."""
    x = draw(ROWS, HIDDEN, seed=3).requires_grad_()
    if how in ("layer", "layer without bias"):
        return _layer(True, bias=how == "layer")(x)
    local = _layer(False)(x)
    if how == "region":
        return gather_from_tensor_model_parallel_region(local)
    if how == "replicated":
        return spmd.all_gather(local, "tp", src=spmd.S(-1), dst=spmd.R)
    whole = gather_from_tensor_model_parallel_region(local)
    size, rank = comm.size("tp"), comm.rank("tp")
    return {
        "local": lambda: local,
        "scattered again": lambda: scatter_to_tensor_model_parallel_region(whole),
        "cut by hand": lambda: whole.chunk(size, -1)[rank],
        "of gathered features": lambda: F.linear(whole, draw(K // size, K, seed=rank)),
        "of as many gathered features": lambda: torch.addmm(
            draw(K // size, seed=1),
            gather_from_tensor_model_parallel_region(local[:, : K // size**2]),
            draw(K // size, K // size, seed=rank),
        ),
        "of a gathered sequence": lambda: spmd.all_gather(
            spmd.convert(local[:2].repeat(size, 1), "tp", src=spmd.I, dst=spmd.S(0)), "tp", src=spmd.S(0), dst=spmd.R
        )[:1].expand(ROWS, -1),
    }[how]()


def _loss(how, between):
    logits = BETWEEN[between](_logits(how))
    return parallel_cross_entropy(logits, torch.zeros(logits.shape[:-1], dtype=torch.long)).mean().item()


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("how", ["layer", "layer without bias", "region", "replicated"])
def test_whole_logits_are_refused(how, between):
    with pytest.raises(ValueError, match="these are whole: build their layer with gather_output=False"):
        threads.run(tp_mesh(2), _loss, how, between)


@pytest.mark.parametrize("how", ["layer", "layer without bias", "region", "replicated"])
def test_whole_logits_are_refused_without_gradients(how):
    def evaluate():
        with torch.no_grad():
            return _loss(how, "nothing")

    with pytest.raises(ValueError, match="these are whole: build their layer with gather_output=False"):
        threads.run(tp_mesh(2), evaluate)


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize(
    "how",
    ["local", "scattered again", "cut by hand", "of gathered features", "of as many gathered features",
     "of a gathered sequence"],
)  # fmt: skip
def test_shards_are_taken(how, between):
    assert len(set(threads.run(tp_mesh(2), _loss, how, between))) == 1


def test_whole_logits_are_right_in_one_process():
    assert threads.run(tp_mesh(1), _loss, "layer", "nothing")


def _evaluated(vocab_size):
    with torch.no_grad():
        logits = _layer(True)(draw(ROWS, HIDDEN))
        return parallel_cross_entropy(logits, torch.zeros(ROWS, dtype=torch.long), vocab_size=vocab_size)


def test_the_size_of_the_vocabulary_tells_without_gradients():
    with pytest.raises(ValueError, match=rf"a vocabulary of {K}; these are whole"):
        threads.run(tp_mesh(2), _evaluated, K)
    with pytest.raises(ValueError, match=f"got \\(3, {K}\\) of a vocabulary of 100"):
        threads.run(tp_mesh(2), _evaluated, 100)
    assert len(threads.run(tp_mesh(2), _evaluated, 2 * K)) == 2
