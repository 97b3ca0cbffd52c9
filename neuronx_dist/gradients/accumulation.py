"""Accumulating gradients over several backwards, or several `run_train`, of one step.

with no_sync(model):                      # or model.no_sync() of a pipeline model
    for batch in batches[:-1]:
        train(batch)                      # backward and reduce_gradients(model), or model.run_train(...)
train(batches[-1])                        # reduces the sum, once
optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..weights.partial_model import partial_model
from .in_backward import paused
from .reduction_plan import ModelGradients
from .state import ReductionState, keeping_reductions

__all__ = ["adding_to_reduced", "is_accumulating", "no_sync", "scale_gradients"]

_CONTEXTS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # how many contexts each model is in


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Makes `reduce_gradients(model)` do nothing inside, so that `run_train` of a pipeline model reduces nothing.

    Nor does a backward start a reduction, of an optimizer or of `reduce_gradients` with `overlap=True`.

    Gradients add up on this rank until the first reduction afterwards, which reduces their sum: one reduction, whatever
    the number of backwards. As with torch's `DistributedDataParallel.no_sync` they are the gradients of the *sum* of
    the losses. Where that should be a mean, divide the losses: summed losses by `global_num_items` of the labels of the
    whole step. (Or give a pipeline model more microbatches: it holds no more of them at a time.)

    Args:
        model: a module, or a pipeline model. All ranks that share its gradients do the same.
    """
    key = partial_model(model).original_module
    _CONTEXTS[key] = _CONTEXTS.get(key, 0) + 1
    try:
        with paused(key.parameters()):
            yield
    finally:
        _CONTEXTS[key] -= 1


def is_accumulating(model: nn.Module) -> bool:
    """Returns whether this model is inside of `no_sync`."""
    return bool(_CONTEXTS and _CONTEXTS.get(partial_model(model).original_module))


@contextmanager
def adding_to_reduced(model: nn.Module) -> Iterator[None]:
    """Keeps the gradients of earlier `run_train` of this step aside, and adds them to those that are reduced inside.

    So each `run_train` reduces its gradients, and a reduction, which is linear, is right for the sum. Gradients that an
    `NxDOptimizer` has stepped on, and those of `no_sync`, stay where they are. After an error the earlier are back.
    """
    set_aside = []
    if not is_accumulating(model):
        for gradient in ModelGradients(model).gradients:
            grad = gradient.tensor
            if grad is not None and "tp" in ReductionState.of(grad).unasked:
                set_aside.append((gradient, grad))
                gradient.tensor = None
    try:
        yield
    except BaseException:
        for gradient, earlier in set_aside:
            gradient.tensor = earlier
        raise
    with torch.no_grad():
        for gradient, earlier in set_aside:
            grad = gradient.tensor
            if grad is None:
                gradient.tensor = earlier
            else:
                with keeping_reductions([grad]):
                    grad.add_(earlier)


@torch.no_grad()
def scale_gradients(model: nn.Module, factor: float) -> None:
    """Multiplies the gradients of this rank, whatever reductions they have been through: for a mean of batches."""
    grads = ModelGradients(model).held
    with keeping_reductions(grads):
        for grad in grads:
            grad.mul_(factor)
