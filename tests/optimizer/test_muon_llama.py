"""A Llama that Muon and AdamW train, save and load in any layout: weights are those of torch's two in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from neuronx_dist import comm, hf
from neuronx_dist.optimizer import MasterWeightsOptimizer, MuonAdamW, NeuronZero1Optimizer, muon_groups
from tests.checkpoint.llama_layouts import Layout, load, make, save, steps
from tests.support import llama_training
from tests.support.synthetic import relative_error

pytestmark = pytest.mark.slow

MUON: dict[str, Any] = dict(lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
ADAMW: dict[str, Any] = dict(lr=1e-3, weight_decay=0.0)
FIRST, LAST = 2, 4  # steps before the checkpoint, and all


def one_process(layout: Layout) -> dict[str, torch.Tensor]:
    options = layout.options
    model = LlamaForCausalLM(llama_training.config(options)).to(options.dtype)
    model.load_state_dict(
        llama_training.initial_state(options.heads, options.tied, options.layers, options.dtype), strict=False
    )
    llama_training.without_float32_inside(model, options.dtype)
    matrices = [param for name, param in model.named_parameters() if name.endswith("proj.weight")]
    others = [param for name, param in model.named_parameters() if not name.endswith("proj.weight")]
    optimizers = [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, betas=(0.9, 0.95), **ADAMW)]
    for step in range(LAST):
        ids, labels = llama_training.batch(options.labels, step)
        llama_training.mean_loss(model(input_ids=ids).logits, labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def optimizer_of(layout: Layout, model: Any) -> NeuronZero1Optimizer:
    groups = muon_groups(model, muon=MUON, adamw=ADAMW)
    if layout.optimizer == "zero1":
        return NeuronZero1Optimizer(groups, MuonAdamW, max_norm=0.5, overlap=layout.tp > 1)
    return MasterWeightsOptimizer(groups, MuonAdamW, max_norm=0.5)


LAYOUTS = {
    "heads on several ranks, padded": (Layout(tp=4, dp=2), Layout(pp=2, dp=2, sequence_parallel=True)),
    "masters, stages": (Layout(tp=2, pp=2, dp=2, optimizer="master"), Layout(dp=4)),
    "one rank": (Layout(), Layout(tp=2, pp=2, dp=2, sequence_parallel=True, microbatches=2, calls=2)),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.each_value
@pytest.mark.parametrize("case", LAYOUTS)
def test_weights_after_a_checkpoint_in_between_are_those_of_one_process(case: str, tied: bool, tmp_path: Path) -> None:
    first, second = (replace(layout, tied=tied) for layout in LAYOUTS[case])

    def train_and_save() -> None:
        model, _ = make(first)
        optimizer = optimizer_of(first, model)
        steps(first, model, optimizer, 0, FIRST)
        save(model, optimizer, tmp_path)

    def load_and_train() -> dict[str, torch.Tensor]:
        model, _ = make(second, zeros=True)
        optimizer = optimizer_of(second, model)
        load(model, optimizer, tmp_path)
        steps(second, model, optimizer, FIRST, LAST - FIRST)
        return hf.full_state_dict(model)

    comm.threads.run(first.mesh, train_and_save)
    expected = one_process(first)
    for weights in comm.threads.run(second.mesh, load_and_train):
        for name, value in expected.items():
            assert relative_error(weights[name], value) < 1e-10, name
