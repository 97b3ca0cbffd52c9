"""Edits that change nothing that a caller can see, with the reason: they are left out of the rate.

A key is `Edit.changed`: the lines that go and those that come, so that an entry holds wherever its lines move.
"""

from __future__ import annotations

__all__ = ["EQUIVALENT"]

EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "return SpmdTypeError(call.rule.name, violation.why, axis=violation.axis, rule=violation.rule)",
        "pass",
    ): "a shorter message for trials, of which nobody reads the text: it saves time",
    ("constant: bool = False", "constant: bool = True"): "of values that are no tensors, which have no sums to compare",
}
