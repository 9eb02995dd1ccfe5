"""What `compare`, `show` and `place` print, word by word: golden/reports. A change there is a change of a report.

    python tests/test_reports.py        writes them anew; read the difference before committing it"""
from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from planted import A_LOSSES, A_TIMES, B_LOSSES, B_TIMES, LOSS, NOON, RUN_S, peer, peers, pool, write

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "tests" / "records" / "golden" / "reports"
sys.path.insert(0, str(ROOT / "records"))
from tools import compare, pool as pools

Verb = Callable[[list[str]], int]
HERE = Path(".")


def faster() -> None:
    warm_up = [{"name": "warm-up", "ms": 9000.0, "timed": False}, {"name": "tables", "ms": 400.0, "timed": True}]
    pool(HERE, "a", A_LOSSES, A_TIMES, phases=warm_up, target_loss=3.28, config={"row_comms": "dense"})
    pool(HERE, "b", B_LOSSES, B_TIMES, phases=warm_up[:1], target_loss=3.28, config={"row_comms": "sparse"})


def no_record() -> None:
    peers(HERE)
    for k in range(5):
        peer(HERE / "b" / f"{k}.txt", B_TIMES[k], B_LOSSES[k] + 0.002, 2 * k + 1, "# B\n")


def other_day() -> None:
    peers(HERE, day=22)
    peer(HERE / "b" / "cut.txt", 70.0, 3.3, 12, "# B\n", day=22, end=1300)
    (HERE / "b" / "README.md").write_text("times = [79.0, 79.1]\n")


def same_program() -> None:
    pool(HERE, "a", A_LOSSES, A_TIMES, first=NOON, source_sha256="5" * 64)
    pool(HERE, "b", B_LOSSES, B_TIMES, first=NOON + 86_400, source_sha256="5" * 64)


def unknown() -> None:
    (HERE / "a.md").write_text(f"losses = {A_LOSSES}\ntimes = {[seconds * 7 for seconds in A_TIMES]}\n")
    (HERE / "b.md").write_text(f"losses = {B_LOSSES}\ntimes = {B_TIMES}\n")


def mixed() -> None:
    faster()
    write(HERE / "b" / "old", 9, 85.0, LOSS, NOON, source_sha256="7" * 64, config={"row_comms": "sparse"})


def undecided() -> None:
    pool(HERE, "a", A_LOSSES, A_TIMES, first=NOON, apart=RUN_S)
    pool(HERE, "b", B_LOSSES, [seconds - 0.05 for seconds in A_TIMES], first=NOON + 6 * RUN_S, apart=RUN_S)


def one_more_run() -> None:
    faster()
    write(HERE / "mine" / "a", 77, 80.9, LOSS + 0.02, NOON, torch="2.14.0", config={"row_comms": "dense"})


CASES: dict[str, tuple[Callable[[], None], Verb, str]] = {
    "compare_faster": (faster, compare.main, "a b"),
    "compare_json": (faster, compare.main, "a b --json"),
    "compare_no_record": (no_record, compare.main, "a b --target=3.28"),
    "compare_other_day": (other_day, compare.main, "a b --target=3.28"),
    "compare_same_program": (same_program, compare.main, "a b"),
    "compare_unknown": (unknown, compare.main, "a.md b.md"),
    "compare_mixed": (mixed, compare.main, "a b"),
    "compare_chosen": (mixed, compare.main, "a/run_0 a/run_1 a/run_2 a/run_3 --against b --source=5,6"),
    "compare_undecided": (undecided, compare.main, "a b"),
    "show": (faster, pools.main_show, "a"),
    "show_mixed": (mixed, pools.main_show, "b"),
    "show_json": (faster, pools.main_show, "a --json"),
    "place_outside": (one_more_run, pools.main_place, "mine a"),
    "place_inside": (one_more_run, pools.main_place, "a/run_0 a"),
}


def printed(name: str) -> str:
    """Of a case, made in the current folder, with the exit status."""
    make, verb, arguments = CASES[name]
    make()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = verb(arguments.split())
    return f"{out.getvalue()}status {status}\n"


@pytest.mark.parametrize("name", CASES)
def test_report(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    found = printed(name)
    assert found == (REPORTS / f"{name}.txt").read_text()
    assert str(tmp_path) not in found, "paths are shown from here"


def test_every_report_has_its_case():
    assert {path.stem for path in REPORTS.iterdir()} == set(CASES)


if __name__ == "__main__":
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            (REPORTS / f"{case}.txt").write_text(printed(case))
