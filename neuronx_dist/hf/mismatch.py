"""Differences between a complete model and a checkpoint: an error, a warning, or nothing.

Nothing is read but names and shapes, and every rank comes to the same result.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from .. import comm
from .sources import WeightSource

__all__ = ["check_fit"]

_SHOWN = 20


def check_fit(
    model: Any,
    expected: Sequence[tuple[Sequence[str], tuple[int, ...]]],
    weights: WeightSource,
    *,
    strict: bool = False,
) -> None:
    """Compares a model's tensors with a checkpoint's.

    A head that the checkpoint has not, and a pooler, are initialised; of these, and of tensors that the model has no
    use for, world rank 0 warns, but for those of which the model's class says that they do not matter.

    Args:
        model: whole.
        expected: `(names, whole shape)` of each parameter and persistent buffer; several names where weights are tied.
        weights: of the checkpoint, by the model's names.
        strict: what would be warned of is an error.

    Raises:
        ValueError: anything else is missing, or has another shape; with the names that are most like those.
    """
    present = set(weights.names())
    missing = [(names, shape) for names, shape in expected if not present.intersection(names)]
    misshaped = [
        f"{name} {list(weights.shape(name))}, needs {list(shape)}"
        for names, shape in expected
        for name in names
        if name in present and weights.shape(name) != shape
    ]
    left_over = sorted(present.difference(*(names for names, _ in expected)) if expected else present)
    unused = _not_matching(left_over, _unexpected_patterns(model))
    needed = [f"{' or '.join(names)} {list(shape)}" for names, shape in missing if not _may_be_new(model, names)]
    if needed or misshaped:
        needed[:_SHOWN] = [name + _nearest(name.split()[0], unused) for name in needed[:_SHOWN]]
        problems = (("missing", needed), ("of another shape", misshaped), ("unexpected", unused))
        listed = "; ".join(f"{what} ({len(names)}): {_listed(names)}" for what, names in problems if names)
        raise ValueError(f"load_pretrained: {weights.description} does not fit {type(model).__name__}: {listed}")
    new = _not_matching(
        [names[0] for names, _ in missing], getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    )
    if (new or unused) and (strict or not comm.is_initialized() or comm.rank("world") == 0):
        parts = [f"missing there, so newly initialised: {_listed(new)}"] if new else []
        parts += [f"not used: {_listed(unused)}"] if unused else []
        what = f"load_pretrained: {weights.description} into {type(model).__name__}"
        if strict:
            raise ValueError(f"{what}, strict=True: {'; '.join(parts)}")
        warnings.warn(f"{what}: {'; '.join(parts)}", stacklevel=3)


def _may_be_new(model: Any, names: Sequence[str]) -> bool:
    """Returns whether a task adds the missing tensor: a head on the base model, or a pooler.

    What the model's class says may be missing is of this sort too.
    """
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    if not _not_matching(names, ignored):
        return True
    prefix = getattr(model, "base_model_prefix", "")
    has_base = bool(prefix) and hasattr(model, prefix)
    return all("pooler" in name.split(".") or (has_base and not name.startswith(f"{prefix}.")) for name in names)


def _unexpected_patterns(model: Any) -> Iterable[str]:
    """Patterns of the tensors in old checkpoints that are not weights any more."""
    model_patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return (*model_patterns, r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


def _not_matching(names: Sequence[str], patterns: Iterable[str]) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _nearest(name: str, others: Sequence[str]) -> str:
    """` (there is ...)`, if one of `others` is like `name`: it has a prefix more or less, or few other letters."""
    same_end = [other for other in others if f".{other}".endswith(f".{name}") or f".{name}".endswith(f".{other}")]
    nearest = same_end or get_close_matches(name, others, n=1)
    return f" (there is {nearest[0]})" if nearest else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
