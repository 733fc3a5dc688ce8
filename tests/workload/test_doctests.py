"""The examples in the docstrings are right."""

import doctest
import importlib
import pkgutil

import pytest

import trainplan.workload

MODULES = [found.name for found in pkgutil.walk_packages(trainplan.workload.__path__, "trainplan.workload.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
