"""The examples in the docstrings of the reports are right."""

import doctest
import importlib
import pkgutil

import pytest

import trainplan.report

MODULES = [found.name for found in pkgutil.walk_packages(trainplan.report.__path__, "trainplan.report.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
