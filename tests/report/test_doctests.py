"""The examples in the docstrings of solve, search and report are right."""

import doctest
import importlib
import pkgutil

import pytest

import trainplan.report
import trainplan.search
import trainplan.solve

ROOMS = (trainplan.solve, trainplan.search, trainplan.report)
MODULES = [found.name for room in ROOMS for found in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
