"""Compiled Llamas, on real processes: training steps are those of eager code, whole, by layers, and in a pipeline."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import hf
from neuronx_dist.parallel_layers.grads import reduce_gradients
from tests.support.llama import tiny_llama
from tests.support.pool import processes

CONFIG = tiny_llama(vocab_size=60, intermediate_size=64, bos_token_id=None, eos_token_id=0)
COMPILE = dict(backend="aot_eager", fullgraph=True)


def llama(sequence_parallel=False, vocabulary=60):
    config = copy.deepcopy(CONFIG)
    config.vocab_size = vocabulary
    with torch.device("meta"):
        model = LlamaForCausalLM(config).double()
    return hf.swap(model, sequence_parallel=sequence_parallel, pad_vocab=True)


def pipeline(wrap=lambda layer: layer):
    module = llama()
    module.model.layers = torch.nn.ModuleList(wrap(layer) for layer in module.model.layers)
    return nxd.NxDPPModel(
        module,
        transformer_layer_cls=hf.transformer_layer_class(module),
        num_microbatches=2,
        input_names=["input_ids", "labels", "num_items_in_batch"],
        output_loss_value_spec={"loss": True, "logits": False},
        auto_partition=True,
        broadcast_and_average_loss=True,
    )


def steps(params, step, count=3):
    """Losses and all gradients of some steps of SGD; `step` does forward, backward and the reduction of gradients."""
    ids = torch.randint(0, 59, (4, 8), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(params, lr=0.1)
    values = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = step(dict(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(28.0)))
        optimizer.step()
        values += [loss.detach(), *(param.grad.clone() for param in params)]
    return values


def whole(sequence_parallel, vocabulary, compiled):
    torch.compiler.reset()
    model = hf.materialize(llama(sequence_parallel, vocabulary), 0)
    if compiled:
        model.compile(**COMPILE)

    def step(batch):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        reduce_gradients(model)
        return loss

    return steps(list(model.parameters()), step)


def in_a_pipeline(compiled):
    torch.compiler.reset()
    model = pipeline()
    hf.materialize(model, 0)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    if compiled:
        model.compile(backend=backend, fullgraph=True)
    values = steps(list(model.local_parameters()), lambda batch: model.run_train(**batch))
    assert len(graphs) == compiled, "layers are alike: one graph"
    return values


def check_equal(function, *args, mesh):
    eager, compiled = (processes(2).run(function, *args, flag, mesh=mesh) for flag in (False, True))
    for of_rank, of_eager in zip(compiled, eager, strict=True):
        for a, b in zip(of_rank, of_eager, strict=True):
            assert (a - b).norm() <= 1e-12 * b.norm()


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel,vocabulary", [pytest.param(True, 60, marks=pytest.mark.full), (False, 59)])
def test_a_whole_model(sequence_parallel, vocabulary):
    check_equal(whole, sequence_parallel, vocabulary, mesh=dict(tp=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [pytest.param(dict(tp=2), id="tp 2", marks=pytest.mark.full), pytest.param(dict(pp=2), id="pp 2")]
)
def test_layers_of_a_pipeline(mesh):
    check_equal(in_a_pipeline, mesh=mesh)


def test_what_a_pipeline_cannot_compile():
    with nxd.comm.as_rank(nxd.Mesh(1), 0):
        with pytest.raises(ValueError, match=r"model.layers.0 is the result of torch.compile\(module\).*compile\(\)"):
            pipeline(lambda layer: torch.compile(layer, backend="eager"))
        model = nxd.NxDPPModel(torch.nn.Linear(2, 2), output_loss_value_spec=True)
        with pytest.raises(ValueError, match="pass transformer_layer_cls"):
            model.compile()
