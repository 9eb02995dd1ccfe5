"""Two trainers in turn, step by step: made-up ones with clocks of their own."""
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).with_name("bench_steps.py")
TRAINER = '''
import os
import time
from pathlib import Path
now = 0.0
time.perf_counter = lambda: now
MARKS = Path(__file__).with_name("marks")


def mark(what):
    with MARKS.open("a") as file:
        file.write(what)


class Loader:
    def wait(self):
        global now
        now += {lasts} / 2


def train_step(executor, loader, values):
    global now
    mark("{name}")
    now += {lasts} / 2


def main(flags):
    told, *own, run_dir = flags
    assert told == "--told=1" and own == {own} and run_dir.startswith("--run_dir=")
    for step in range({steps}):
        train_step("executor", Loader(), step)
        mark("{name}".upper())                                # what stands between two steps is of the turn
    os._exit(3)
'''


def bench(folder: Path, steps: int) -> subprocess.CompletedProcess:
    for name, lasts, own in (("a", 1.0, []), ("b", 1.03, ["--own=2"])):
        (folder / f"{name}.py").write_text(TRAINER.format(name=name, lasts=lasts, steps=steps, own=own))
    counts = ["--rounds=3", "--pairs=20", "--skip=2"]
    command = [sys.executable, str(BENCH), "a.py", "b.py", *counts, "--b=--own=2", "--", "--told=1"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_steps_in_turn_tell_three_percent(tmp_path):
    done = bench(tmp_path, 50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "A (a.py): median step 1000.0 ms", "B (b.py --own=2): median step 1030.0 ms",
        "by round: +3.00 %, +3.00 %, +3.00 %",
        "B takes +3.00 % [+3.00 %, +3.00 %], 99% interval, 3 rounds of 20 pairs of steps"]
    marks = (tmp_path / "marks").read_text()
    rounds = "aAbB" * 22 + "bBaA" * 22 + "aAbB" * 22
    assert marks == rounds, "one side alone at any time, and each first in its turn"


@pytest.mark.parametrize("steps", [22, 0])
def test_a_schedule_that_ends_too_early_is_told(tmp_path, steps):
    done = bench(tmp_path, steps)
    assert done.returncode == 1
    assert "A (a.py) ended: if nothing above says why, its schedule is too short" in done.stderr
