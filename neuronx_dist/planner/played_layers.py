"""Bytes that a layer of any model saves for backward: a few layers are played on fake tensors, as `estimate_memory`.

`stage_memory.py` has them in closed form for Llama's layers. Others differ by their norms, activations and joined
projections; a play on one tp rank counts what they save, which is proportional to the tokens where these are many.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch

from ..parallel_layers.activation_checkpoint import transformer_layers
from ..planning.fake_rank import WireBackend, on_fakes, playing, run_step
from ..planning.layout import Layout
from ..planning.memory import pipelined
from ..planning.meter import MemoryMeter
from ..planning.recompute import recompute
from .candidate import RankSizes

__all__ = ["Played", "PlayedLayers"]

_LAYERS, _MEASURED = 4, 2  # the third one: during the second one inputs of the first one are freed
_TOKENS = 4096  # of a play, at most: with fewer, gradients of weights count beside those of activations


class Played(NamedTuple):
    """Bytes of one microbatch on a rank.

    Attributes:
        saved, temporary: that a layer saves for backward; most in its backward, beside what all layers save.
        end: saved outside of the layers, by the last norm above all.
        loss: most of logits and their gradients, if the loss is not fused.
    """

    saved: float
    temporary: float
    end: float
    loss: float


class PlayedLayers:
    """Plays layers of a Hugging Face model; what was played once is not played again.

    Args:
        config: config of a causal LM whose layers save equally much.
    """

    def __init__(self, config: Any) -> None:
        self._config = copy.deepcopy(config)
        text = self._config.get_text_config()
        text.num_hidden_layers = _LAYERS
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:_LAYERS]
        self._played: dict[Any, Played] = {}

    def bytes(self, sizes: RankSizes, recomputed: str) -> Played:
        """Returns the bytes of a microbatch; `recomputed`: "" or "norms"."""
        rows = min(sizes.micro_batch, max(2, _TOKENS // sizes.seq_len))
        key = sizes.tp, sizes.sequence_parallel, rows, sizes.seq_len, sizes.dtype, recomputed
        if key not in self._played:
            layout = Layout(
                sizes.tp,
                tp=sizes.tp,
                sequence_parallel=sizes.sequence_parallel,
                pad_heads=True,
                pad_vocab=True,
                global_batch=rows,
                seq_len=sizes.seq_len,
                dtype=sizes.dtype,
            )
            self._played[key] = _play(self._config, layout, recomputed)
        of_tokens = sizes.tokens / (rows * sizes.seq_len)
        return Played(*(of_tokens * nbytes for nbytes in self._played[key]))


def _play(config: Any, layout: Layout, recomputed: str) -> Played:
    """Plays a step of a microbatch that is not the first one: gradients exist."""
    from transformers import AutoModelForCausalLM

    device = torch.device("cpu")
    meter = MemoryMeter(device.type)
    with ExitStack() as stack:
        stack.enter_context(playing(layout.mesh(), 0, WireBackend(meter, device)))
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=getattr(torch, layout.dtype))
        model = pipelined(module, layout, fused_loss=False)
        if recomputed:
            recompute(model, recomputed)
        ids = torch.zeros(layout.global_batch, layout.seq_len, dtype=torch.long, device="meta")
        inputs = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.ones((), device="meta")}
        played, batch = stack.enter_context(on_fakes(model, inputs, meter, device))
        for param in played.local_parameters():
            param.grad = torch.empty_like(param)
        watch = _Watch(meter)
        whole = played.original_module
        for number, name in enumerate(transformer_layers(played)):
            whole.get_submodule(name).register_forward_pre_hook(partial(watch.begins, number), with_kwargs=True)
        whole.get_output_embeddings().register_forward_pre_hook(partial(watch.begins, _LAYERS), with_kwargs=True)
        before_all = meter.current
        run_step(played, batch)
    before, peaks = watch.before, watch.peaks
    saved = before[_MEASURED + 1] - before[_MEASURED]
    return Played(saved, peaks[_MEASURED], before[_LAYERS] - before_all - _LAYERS * saved, peaks[_LAYERS])


class _Watch:
    """Reads a meter where each of the layers and the head begins, and in their backwards."""

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self.before: dict[int, int] = {}  # bytes where the layer begins
        self.peaks: dict[int, int] = {}  # of a layer's backward, beside the bytes where it begins
        self._start = 0

    def begins(self, number: int, module: Any, args: Any, kwargs: Any) -> None:
        if number in self.before:  # computed again
            return
        x = args[0] if args else next(iter(kwargs.values()))
        x.register_hook(partial(self._is_over, number))
        self.before[number] = self._meter.current
        if number == _LAYERS:
            self._phase(number)

    def _is_over(self, number: int, grad: torch.Tensor) -> None:
        """Ends the backward of a layer, and begins that of the one before it."""
        self.peaks[number] = self._meter.phases[str(number)].peak - self._start
        self._phase(number - 1)

    def _phase(self, number: int) -> None:
        self._start = self._meter.current
        self._meter.phase(str(number))
