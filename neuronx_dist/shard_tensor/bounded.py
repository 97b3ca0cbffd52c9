"""A table of computed values, such as plans by layout, with a limited number of entries."""

from __future__ import annotations

from itertools import islice
from typing import Any

__all__ = ["Bounded"]


class Bounded(dict[Any, Any]):
    """A dict that drops its oldest quarter when it has `most` entries.

    Reading it costs what reading a dict does, since the order of use is not kept: an entry in use is computed again
    once in `most` new ones.
    """

    def __init__(self, most: int = 1024) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= self.most:
            for old in list(islice(self, -(-self.most // 4))):
                self.pop(old, None)
        super().__setitem__(key, value)
