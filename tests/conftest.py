"""Fixtures every test may use."""

import os
import signal
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
# A script's run in the background ignores Ctrl-C, and so would what tests start and stop by it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real inputs beside the checkout. They are others' data: read, never copied."""
    folder = Path(os.environ.get("MOE_APPLIANCE_SHARED", REPOSITORY.parent / "shared"))
    if folder.is_dir():
        return folder
    if os.environ.get("CI"):
        pytest.fail(f"{folder} is missing: CI must have the real inputs")
    pytest.skip(f"{folder} is absent: these tests need the folder of real inputs")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skip is a failure: what cannot run there must not look tested."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    if os.environ.get("CI") and skipped:
        for report in skipped:
            reporter.write_line(f"skipped in CI: {report.nodeid}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
