"""What every test needs: train_gpt.py can be imported, tiny tensors pay for no threads, slow tests are asked for."""
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")       # before torch, as run.sh does

import pytest
import torch
from common import nothing
from forked_ranks import Ranks

import train_gpt as tg

LONGEST_FILES = ["test_dry_run.py", "test_ranks.py", "test_rows.py", "test_tables.py",
                 "test_faults.py", "test_main.py", "test_files.py"]

def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the long loops: faults again and again, more seeds")

def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    tg.PRESETS["tiny"].setdefault("adam_every", 2)            # runs of tests are cycles of two, whatever the default is
    signal.signal(signal.SIGINT, signal.default_int_handler)                  # a shell's job behind & ignores it
    for mark in ("slow: long loops, run with --all only",
                 "recipe: must fail when the mathematics changes; forks leave it out",
                 "style: judges this repository's main, its size and its records, not a fork",
                 "gpu: needs a CUDA device; `pytest -m gpu` runs them all",
                 "gpus2: needs two CUDA devices; `pytest -m gpus2` runs them all"):
        config.addinivalue_line("markers", mark)

@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Starts W ranks, and returns what each found: forked_ranks.py."""
    return Ranks(tmp_path_factory.mktemp("ranks"))

@pytest.fixture(scope="module")
def small_pieces() -> Iterator[None]:
    """Several files of each table and rank; and no warm-up, which leaves no trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "CHUNK_ROWS", 64)
        patch.setattr(tg, "warm_up", nothing)
        yield

@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the rehearsal: what one walk has compiled, the next one finds."""
    return Path(os.environ.get("DRY_RUN_CACHE") or tmp_path_factory.mktemp("cache"))

def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--dist", "no") != "no":              # several processes take files in this order
        items.sort(key=file_order)
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--all"):
            item.add_marker(pytest.mark.skip(reason="a long loop: run with --all"))

def file_order(item: pytest.Item) -> int:
    """Return where its file stands among the longest, which come first, so that no process ends alone with one."""
    return (*LONGEST_FILES, item.path.name).index(item.path.name)

def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say aloud what a machine without GPUs has not shown."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ")
                      for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.items():
        if "CUDA device" in reason:
            terminalreporter.write_line(f"{count} tests did not run: {reason}")
