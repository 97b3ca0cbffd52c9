"""One line of the report of `neuronx-dist doctor`."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Finding", "text_of"]


class Finding(NamedTuple):
    """A subject of the report, and its status.

    Attributes:
        status: "ok"; "missing": training works without it, but something else or its speed does not; "failed".
        subject: what was looked at: "torch", "gloo on two processes: all_reduce".
        detail: version, count or error.
        remedy: what to do; empty if the status is "ok".
    """

    status: Literal["ok", "missing", "failed"]
    subject: str
    detail: str
    remedy: str = ""


def text_of(finding: Finding) -> str:
    """Returns the line of a finding: status, subject, detail, remedy."""
    line = f"{finding.status:<8} {finding.subject}: {finding.detail}"
    return f"{line}; {finding.remedy}" if finding.remedy else line
