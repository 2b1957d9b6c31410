"""Plain calls on inputs that live on explicit axes of a mesh of 8 devices."""

import pytest

from . import devices, explicit_checks


@pytest.mark.parametrize("name", devices.checks(explicit_checks))
def test_on_explicit_axes(name):
    failure = devices.results(explicit_checks.__name__)[name]
    assert failure is None, failure
