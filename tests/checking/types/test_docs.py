"""The examples of docs/type-system.md and docs/checked-code.md do what they say."""

import doctest

import pytest

from tests.support.paths import DOCS


@pytest.mark.parametrize(("name", "at_least"), [("type-system.md", 11), ("checked-code.md", 52)])
def test_examples(name, at_least):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    result = doctest.testfile(str(DOCS / name), module_relative=False, optionflags=flags)
    assert result.attempted >= at_least
    assert result.failed == 0
