"""Configuration of all tests: import train_gpt.py, use one thread, and skip slow tests without --all."""
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")       # before torch is imported, as in run.sh

import pytest
import torch
from common import few_layers
from forked_ranks import Ranks

import train_gpt as tg

LONGEST_FILES = ["test_dry_run.py", "test_ranks.py", "test_rows.py", "test_tables.py", "test_record.py",
                 "test_faults.py", "test_main.py", "test_files.py", "test_step.py", "test_loop.py", "test_oracle.py",
                 "test_run_sh.py", "test_style.py"]

def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true",
                     help="also run slow tests: repeated faults, more seeds, all stages of the dry run")

def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    tg.PRESETS["tiny"].setdefault("adam_every", 2)  # the tests assume cycles of two steps, independent of the default
    signal.signal(signal.SIGINT, signal.default_int_handler)                  # a shell ignores it in background jobs
    for mark in ("slow: runs with --all only",
                 "recipe: must fail when the mathematics changes; a fork may omit it",
                 "style: judges this repository's main, its size and its records, not a fork",
                 "gpu: needs a CUDA device; `pytest -m gpu` runs them all",
                 "gpus2: needs two CUDA devices; `pytest -m gpus2` runs them all"):
        config.addinivalue_line("markers", mark)

@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("ranks"))

@pytest.fixture
def three_layers() -> Iterator[None]:
    with few_layers():
        yield

@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a walk of the dry run stores what it compiled, for the next walk."""
    return Path(os.environ.get("DRY_RUN_CACHE") or tmp_path_factory.mktemp("cache"))

def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--dist", "no") != "no":              # several processes take files in this order
        items.sort(key=file_order)
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--all"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --all"))

def file_order(item: pytest.Item) -> int:
    """The longest files are first, so that no process ends late with one of them."""
    return (*LONGEST_FILES, item.path.name).index(item.path.name)

def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests did not run because there is no GPU."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ")
                      for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.items():
        if "CUDA device" in reason:
            terminalreporter.write_line(f"{count} tests did not run: {reason}")
