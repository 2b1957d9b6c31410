"""Puts the implementation of a test into the register, or skips the test where it cannot run."""

import pytest

from vc_jax._implementations import IMPLEMENTATIONS

from .implementations import UnderTest


@pytest.fixture(autouse=True)
def _registered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    given = getattr(request.node, "callspec", None)
    case = given and given.params.get("case")
    if case is None:
        return
    under_test: UnderTest = case.under_test
    reason = under_test.why_not_here()
    if reason is not None:
        pytest.skip(reason)
    if under_test.entry is not None:
        monkeypatch.setitem(IMPLEMENTATIONS, under_test.name, under_test.entry)
