"""Checkpoints of parallel modules: merged, deduped, loaded into any layout; training goes on bit-equal."""

from __future__ import annotations

import io
import math
from collections import OrderedDict
from functools import cache, partial

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallelize.config import ComputeConfig
from neuronx_dist.parallelize.train.optimizer import build_optimizer
from neuronx_dist.parallelize.train.state_dicts import (
    deduped_state_dict,
    deduped_state_dicts,
    load_deduped_state_dict,
    load_merged_state_dict,
    load_merged_state_dicts,
    merge_state_dicts,
)
from tests.parallelize.support.training import (
    ADAMW,
    SGD,
    clone,
    close,
    one_process,
    one_rank,
    original,
    parallel,
    whole,
)

pytestmark = pytest.mark.slow

HALF, REST = range(4), range(4, 8)
LAYOUTS = {  # plan, units, groups of ZeRO (0: none); ranks along the axes after the first one
    "alone": (1, 1, 0),
    "dp": (1, 2, 0),
    "tp": (2, 1, 0),
    "tp4": (4, 1, 0),
    "tp x dp": (2, 2, 0),
    "zero": (1, 2, 1),
    "zero of 4": (1, 4, 1),
    "zero of 3": (1, 3, 1),  # which divides no dim: shards are padded
    "zero x 2": (1, 4, 2),
    "tp x zero": (2, 2, 1),
    "two axes": (4, 1, 0, 2),
    "two axes x zero": (4, 2, 1, 2),
    "three axes": (8, 1, 0, [2, 2]),
}


def config_of(layout):
    plan, units, groups, *second = LAYOUTS[layout]
    options = {"tp_size": second[0]} if second else {}
    return ComputeConfig(plan, plan * units, use_zero=groups > 0, zero_ngroups=max(groups, 1), pas_config=options)


def through_a_file(x):
    """Returns a value after `torch.save` and `torch.load`."""
    stream = io.BytesIO()
    torch.save(x, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def in_two_dtypes(module):
    """A parent whose own layer is bfloat16."""
    module.before.bfloat16()
    module.before.register_forward_pre_hook(lambda module, args: args[0].bfloat16())
    module.before.register_forward_hook(lambda module, args, result: result.double())
    return module


def states_of(
    config,
    parent,
    factory,
    steps,
    load=None,
    states=lambda m, o: (m.state_dict(), o.state_dict()),
    change=lambda module: module,
):
    """Returns each rank's states after some steps, the results of the steps, and the whole weights."""
    with parallel(config, parent) as make:

        def program():
            module = change(make())
            optimizer = build_optimizer(module, factory)
            if load is not None:
                load(module, optimizer)
            results = one_rank(module, optimizer, steps)
            return through_a_file(states(module, optimizer)), results, whole(module)

        return comm.threads.run(config.mesh(), program)


def merged_after(config, parent, factory, steps, **options):
    results = states_of(config, parent, factory, steps, **options)
    return merge_state_dicts([states[0] for states, *_ in results], [states[1] for states, *_ in results])


def equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


ELEMENTWISE = {"SGD": SGD, "AdamW": ADAMW, "Adagrad": torch.optim.Adagrad, "AMSGrad": partial(ADAMW, amsgrad=True)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "layout, name, parent",
    [
        *((layout, "AdamW", "parent") for layout in LAYOUTS),
        *(("tp x zero", name, "") for name in ELEMENTWISE),
        *((layout, name, "parent") for layout in ("tp x dp", "zero of 4") for name in ("SGD", "Adagrad", "AMSGrad")),
    ],
)
def test_merged_states_are_the_originals(layout, name, parent):
    config, factory = config_of(layout), ELEMENTWISE[name]
    module = original(parent)
    optimizer = factory(module.parameters())
    one_process(module, optimizer, HALF, config.units)
    merged, merged_optimizer = merged_after(config, parent, factory, HALF)
    assert list(merged) == list(module.state_dict())
    close(dict(merged), dict(module.state_dict()))
    expected = optimizer.state_dict()
    assert merged_optimizer.keys() == expected.keys() and merged_optimizer["state"].keys() == expected["state"].keys()
    close(merged_optimizer["state"], expected["state"])
    assert merged_optimizer["param_groups"] == expected["param_groups"]
    # The original goes on from them, bit for bit as one process would from these numbers.
    resumed = original(parent)
    resumed.load_state_dict(merged)
    again = factory(resumed.parameters())
    again.load_state_dict(merged_optimizer)
    close(one_process(resumed, again, REST, 2), one_process(module, optimizer, REST, 2))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "source, target",
    [
        *(("tp x zero", target) for target in LAYOUTS),
        *((source, target) for source in ("alone", "tp x dp", "zero of 4") for target in ("tp4", "zero x 2")),
        *(("two axes", target) for target in ("tp4", "two axes x zero")),
        ("three axes", "tp4"),
    ],
)
def test_saved_under_one_plan_and_loaded_under_any_other(source, target):
    merged, merged_optimizer = merged_after(config_of(source), "parent", ADAMW, HALF)
    config = config_of(target)

    def load(module, optimizer):
        load_merged_state_dict(module, clone(merged), optimizer, clone(merged_optimizer), device="cpu")

    resumed = states_of(config, "parent", ADAMW, REST, load)
    module = original("parent")
    module.load_state_dict(merged)
    optimizer = ADAMW(module.parameters())
    optimizer.load_state_dict(merged_optimizer)
    expected = one_process(module, optimizer, REST, config.units)
    for _, results, weights in resumed:
        close(results, expected)
        close(weights, {name: param.detach() for name, param in module.named_parameters()})


@pytest.mark.parametrize("make_optimizer", [lambda m: ADAMW(m.parameters()), lambda m: build_optimizer(m, ADAMW)])
def test_a_merged_state_is_loaded_into_the_original(make_optimizer):
    merged, merged_optimizer = merged_after(config_of("tp x zero"), "parent", ADAMW, HALF)
    module, expected = original("parent"), original("parent")
    optimizer, plain = make_optimizer(module), ADAMW(expected.parameters())
    load_merged_state_dict(module, clone(merged), optimizer, clone(merged_optimizer))
    expected.load_state_dict(merged)
    plain.load_state_dict(clone(merged_optimizer))
    equal(one_process(module, optimizer, REST, 2), one_process(expected, plain, REST, 2))
    equal(dict(module.state_dict()), dict(expected.state_dict()))


@cache
def uninterrupted(layout, change):
    options = {"change": change} if change else {}
    return states_of(config_of(layout), "parent", ADAMW, range(8), **options)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "layout, change",
    [
        *((layout, None) for layout in LAYOUTS),
        *((layout, in_two_dtypes) for layout in ("tp", "zero", "zero of 3", "tp x zero", "zero x 2")),
    ],
)
@pytest.mark.parametrize("form", ["own", "merged", "deduped"])
def test_training_goes_on_bit_equal_in_the_same_layout(layout, change, form):
    config, options = config_of(layout), {"change": change} if change else {}
    take = deduped_state_dict if form == "deduped" else lambda m, o: (m.state_dict(), o.state_dict())
    half = states_of(config, "parent", ADAMW, HALF, states=take, **options)
    states = [state for state, *_ in half]

    def load(module, optimizer):
        state = states[comm.current().rank]
        if form == "merged":
            load_merged_state_dicts(module, merged[0], optimizer, clone(merged[1]))
        elif form == "deduped":
            load_deduped_state_dict(module, state[0], optimizer, state[1], device="cpu")
        else:
            module.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])

    merged = merge_state_dicts([state[0] for state in states], [state[1] for state in states])
    resumed = states_of(config, "parent", ADAMW, REST, load, **options)
    for (_, results, weights), (_, expected, expected_weights) in zip(
        resumed, uninterrupted(layout, change), strict=True
    ):
        equal(results, tuple(values[4:] for values in expected))
        equal(weights, expected_weights)


def tensors_in(x):
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, dict):
        for value in x.values():
            yield from tensors_in(value)


def padded(tensor, degree):
    rows, *rest = tensor.shape or (1,)
    return -(-rows // degree) * degree * math.prod(rest) if tensor.dim() else 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_deduped_states_of_all_ranks_are_one_model_and_one_state(layout):
    config = config_of(layout)
    ranks = states_of(config, "parent", ADAMW, HALF, states=deduped_state_dicts)
    module = original("parent")
    optimizer = ADAMW(module.parameters())
    one_process(module, optimizer, HALF, config.units)
    for index, expected in enumerate((module.state_dict(), optimizer.state_dict()["state"])):
        states_of_units = [
            states[index] if index == 0 else states[1].get("base_state", states[1]["state"]) for states, *_ in ranks
        ]
        numbers = sum(tensor.numel() for state in states_of_units for tensor in tensors_in(state))
        whole_numbers = sum(tensor.numel() for tensor in tensors_in(expected))
        if index == 1 and layout == "zero of 3":
            whole_numbers = sum(padded(tensor, 3) for tensor in tensors_in(expected))
        assert numbers == whole_numbers, (index, numbers, whole_numbers)
    first = config.optimizer_dedup_group_size
    for states, *_ in ranks[first:]:
        assert not [*tensors_in(states)]
    merged, merged_optimizer = merge_state_dicts(
        [states[0] for states, *_ in ranks], [states[1] for states, *_ in ranks]
    )
    close(dict(merged), dict(module.state_dict()))
    close(merged_optimizer["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("form", ["merged", "deduped"])
@pytest.mark.parametrize("device", ["cpu", "meta"])  # which stands for a GPU
def test_a_module_is_loaded_on_the_device_of_the_mesh(monkeypatch, device, form):
    config = config_of("alone")

    def program(make):
        module = make()
        state = module.state_dict()
        monkeypatch.setattr(type(comm.current().backend), "device", property(lambda _: torch.device(device)))
        (load_merged_state_dict if form == "merged" else load_deduped_state_dict)(module, state)
        return {param.device.type for param in module.parameters()}

    with parallel(config, "parent") as make:
        assert comm.threads.run(config.mesh(), program, make) == [{device}]


def test_one_unit_is_enough_to_merge():
    ranks = states_of(config_of("tp x dp"), "parent", ADAMW, HALF)
    both = [merge_state_dicts([s[0] for s, *_ in part], [s[1] for s, *_ in part]) for part in (ranks, ranks[2:])]
    equal(dict(both[0][0]), dict(both[1][0]))
    equal(both[0][1], both[1][1])
    assert merge_state_dicts([states[0] for states, *_ in ranks])[1] is None


def test_parts_that_are_missing_are_named():
    ranks = states_of(config_of("tp x zero"), "parent", ADAMW, HALF)
    models, optimizers = [states[0] for states, *_ in ranks], [states[1] for states, *_ in ranks]
    with pytest.raises(ValueError, match="shard 1 of 2 of 'inner.layers.0.weight' is in none"):
        merge_state_dicts([models[0], models[2]])
    with pytest.raises(ValueError, match="part 1 of 2 of .*, which ZeRO divides, is in none"):
        merge_state_dicts(models, optimizers[:2])
    with pytest.raises(ValueError, match="not a copy of its items"):
        merge_state_dicts([OrderedDict(models[0])])
    with pytest.raises(ValueError, match="build_optimizer did not make its optimizer"):
        merge_state_dicts(models, [torch.optim.SGD([torch.zeros(2)]).state_dict()])


def test_states_of_another_model_or_layout_are_refused():
    merged, merged_optimizer = merged_after(config_of("alone"), "", ADAMW, HALF)
    saved = states_of(config_of("zero"), "", ADAMW, HALF, states=deduped_state_dict)
    ranks = states_of(config_of("zero"), "", ADAMW, HALF)

    def load(module, optimizer):
        with pytest.raises(
            ValueError, match="'layers.0.weight' has shape \\[3, 8\\] .* but \\[16, 8\\] in this module"
        ):
            load_merged_state_dict(module, {**merged, "layers.0.weight": torch.zeros(3, 8)})
        few = {"state": {}, "param_groups": [{**merged_optimizer["param_groups"][0], "params": [0, 1]}]}
        with pytest.raises(ValueError, match="has 2 parameters in 1 groups, but this optimizer has 5 in 1"):
            load_merged_state_dict(module, merged, optimizer, few)
        with pytest.raises(ValueError, match="it has plan_ngpus 1, here plan_ngpus is 2.*merge_state_dicts"):
            load_deduped_state_dict(module, saved[0][0][0])
        with pytest.raises(ValueError, match="by rank 0 with Rows\\(degree=2.*merge the state dicts of all ranks"):
            load_deduped_state_dict(module, module.state_dict(), optimizer, saved[0][0][1])
        with pytest.raises(ValueError, match="saved in another layout .*merge_state_dicts"):
            optimizer.load_state_dict(ranks[0][0][1])

    states_of(config_of("tp"), "", ADAMW, range(0), load)


def test_a_world_of_one_without_a_mesh():
    config = config_of("alone")
    merged, merged_optimizer = merged_after(config, "", ADAMW, HALF)
    with parallel(config) as make:
        module = make()
        optimizer = build_optimizer(module, ADAMW)
        load_merged_state_dict(module, merged, optimizer, merged_optimizer)
        states = deduped_state_dict(module, optimizer)
        load_deduped_state_dict(module, states[0], optimizer, states[1])
        close(dict(module.state_dict()), dict(merged))
        close(optimizer.state_dict()["state"], merged_optimizer["state"])
    assert not comm.is_initialized() and Mesh(1).world_size == 1
