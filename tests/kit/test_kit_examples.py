"""The examples in the kit's docstrings run and print what they say."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

from ptxtrain.engine import kit

FUNCTIONS = [name for name in kit.__all__ if name not in ("ContractError", "on")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example(name: str) -> None:
    function = getattr(kit, name)
    found = doctest.DocTestFinder(recurse=False).find(function, name, globs={"np": np, "kit": kit})
    assert found and found[0].examples, f"{name} shows no example"
    failed = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(found[0]).failed
    assert not failed


def test_every_function_says_what_it_takes_and_raises() -> None:
    for name in FUNCTIONS:
        text = getattr(kit, name).__doc__ or ""
        assert all(part in text for part in ("Args:", "Returns:", "Raises:", "f16")), name
