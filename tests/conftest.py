"""What every test needs: train_gpt.py can be imported, tiny tensors pay for no threads, slow tests are asked for."""
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from faults import Launcher

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the long loops: faults again and again, more seeds")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)                  # a shell's job behind & ignores it
    config.addinivalue_line("markers", "all: long loops, run with --all only")
    config.addinivalue_line("markers", "gpu: needs a CUDA device; `pytest -m gpu` runs them all")
    config.addinivalue_line("markers", "gpus2: needs two CUDA devices; `pytest -m gpus2` runs them all")


@pytest.fixture(scope="session", autouse=True)
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher | None]:
    """What starts the runs of test_faults.py. It imports for ten seconds: beside the tests in front of those."""
    if not any(item.fspath.basename == "test_faults.py" for item in request.session.items):
        yield None
        return
    server = Launcher()
    yield server
    server.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        for item in items:
            if item.get_closest_marker("all"):
                item.add_marker(pytest.mark.skip(reason="a long loop: run with --all"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say aloud what a machine without GPUs has not shown."""
    counts = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        path, line, reason = report.longrepr
        if "CUDA device" in reason:
            counts[reason.removeprefix("Skipped: ")] += 1
    for reason, count in counts.items():
        terminalreporter.write_line(f"{count} tests did not run: {reason}")
