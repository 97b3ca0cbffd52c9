"""A table of what was computed once, such as plans by layout, of which only so many entries are kept."""

from __future__ import annotations

from itertools import islice
from typing import Any

__all__ = ["Bounded"]


class Bounded(dict[Any, Any]):
    """A dict that forgets the quarter that it learned first, when it has `most` entries.

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
