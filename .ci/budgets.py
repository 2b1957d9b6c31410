"""A pytest plugin: how long each group of tests may take, and how long it took.

A group is a folder below `tests`. Seconds are those of its tests on two cores, added up over the
two processes that `./vc test` starts, so all of them together are within 2 x 33 minutes. A session
in which a group takes longer fails.
"""

import collections

import pytest

BUDGETS = {
    "cli": 500,
    "core": 680,
    "flax": 80,
    "kernels": 520,
    "models": 200,
    "packaging": 190,
    "ported_models": 860,
    "promises": 380,
}
OTHER = 490
"""For all other folders together."""

assert sum(BUDGETS.values()) + OTHER <= 2 * 33 * 60

_seconds: collections.Counter[str] = collections.Counter()


def _group(report: pytest.TestReport) -> str:
    folder = report.nodeid.split("/")[1:2]
    return folder[0] if folder and folder[0] in BUDGETS else "other"


def _over() -> list[str]:
    return [group for group, seconds in _seconds.items() if seconds > BUDGETS.get(group, OTHER)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds the time of a test's setup, call or teardown."""
    _seconds[_group(report)] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints a line a group."""
    terminalreporter.section("time of each group of tests, seconds")
    for group in sorted(_seconds):
        mark = "  OVER BUDGET" if group in _over() else ""
        budget = BUDGETS.get(group, OTHER)
        terminalreporter.line(f"{group:<16} {_seconds[group]:7.1f} of {budget}{mark}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a session that is over budget; only in the process that started the others."""
    if not hasattr(session.config, "workerinput") and session.exitstatus == 0 and _over():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
