"""Refusal of optimizers whose update of a part of a parameter needs the rest of it."""

from __future__ import annotations

__all__ = ["refuse_not_elementwise"]

_NOT_ELEMENTWISE = {
    "LBFGS": "it takes inner products over all parameters",
    "Muon": "it orthogonalises whole matrices",
    "MuonAdamW": "it orthogonalises whole matrices",
    "Adafactor": "it factors the second moment of whole matrices into rows and columns",
    "Shampoo": "it preconditions whole matrices",
    "SOAP": "it preconditions whole matrices",
    "LAMB": "it scales an update by the norm of the whole parameter",
    "Lamb": "it scales an update by the norm of the whole parameter",
    "LARS": "it scales an update by the norm of the whole parameter",
    "SparseAdam": "it takes sparse gradients, and shards are dense",
}
_ACROSS_PARAMETERS = {"LBFGS"}


def refuse_not_elementwise(optimizer_class: type, *, parts: bool = True, advice: str = "") -> None:
    """Refuses an optimizer whose update of a part of the model needs the rest.

    Args:
        parts: True: the optimizer gets parts of parameters; False: whole parameters, but not all of the model.
        advice: what else to do, for the message.

    Raises:
        ValueError: the update is not elementwise (where parameters are whole: it takes all parameters together).
    """
    for ancestor in optimizer_class.__mro__:
        reason = _NOT_ELEMENTWISE.get(ancestor.__name__)
        if reason is not None and (parts or ancestor.__name__ in _ACROSS_PARAMETERS):
            what = "shards of" if parts else "some of the"
            if "Muon" in ancestor.__name__:
                advice += "; or Muon in NeuronZero1Optimizer or MasterWeightsOptimizer, which gather a matrix's rows"
            raise ValueError(
                f"{optimizer_class.__name__} cannot work on {what} parameters: {reason}. "
                f"Use an optimizer whose update is elementwise (SGD, Adam, AdamW, ...){advice}"
            )
