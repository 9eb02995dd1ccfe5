"""Whether two trainers take the same time for a step, told within a percent on a machine that is not quiet.

    python tests/bench_steps.py before.py after.py [--pairs=300] [--skip=20] [--a=FLAG] [--b=FLAG] [-- trainer flags]

Both run the same flags, and those of --a or --b, at once, each in a process of its own, but take turns step by step:
one trains while the other waits for its turn. A machine that slows down slows both, and what disturbs for seconds
counts in both alike. A step lasts from its forward_backward to the end of its optim_step. `python records bench`
compares whole runs, with losses and memory; it needs many of them for what these pairs of steps tell in minutes.

Printed are the median step of both, and by how much B is slower: the mean over blocks of neighbouring pairs of the log
of the ratio, with its 99 % interval by Student's t, since neighbouring pairs are not independent.
"""
import argparse
import importlib.util
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

BLOCKS = 20                              # of pairs, whose means the interval comes from
CONFIDENCE = 0.99
WAIT_S = 600.0                           # for a step, or for a warm-up with its compilation


def trainer(path: Path) -> Any:
    """The file as a module."""
    spec = importlib.util.spec_from_file_location("trainer", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["trainer"] = module
    spec.loader.exec_module(module)
    return module


def run_in_turns(path: Path, flags: list[str], turns: Connection) -> None:
    """Train; from its first forward_backward on, only while it is this side's turn."""
    t = trainer(path)
    forward_backward = t.Executor.forward_backward
    optim_step = t.Executor.optim_step
    began = None
    lasted = None

    def forward_backward_in_turn(executor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal began, lasted
        if began is None:                                     # the first of this step
            if lasted is not None:
                turns.send(lasted)                            # what stood between two steps was a part of the turn
            turns.recv()
            began = time.perf_counter()
        return forward_backward(executor, *args, **kwargs)

    def optim_step_in_turn(executor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal began, lasted
        result = optim_step(executor, *args, **kwargs)
        lasted = time.perf_counter() - began
        began = None
        return result

    t.Executor.forward_backward = forward_backward_in_turn
    t.Executor.optim_step = optim_step_in_turn
    with tempfile.TemporaryDirectory() as folder:
        status = t.main([*flags, f"--run_dir={folder}/run"])
    turns.send(("ended", status))


def received(side: str, turns: Connection) -> Any:
    """What a side says next. Raises SystemExit if it ends or says nothing."""
    if not turns.poll(WAIT_S):
        raise SystemExit(f"{side} said nothing for {WAIT_S:.0f} s")
    try:
        said = turns.recv()
    except (EOFError, ConnectionResetError):
        raise SystemExit(f"{side} ended: what is above says why") from None
    if isinstance(said, tuple):
        raise SystemExit(f"{side} ended with status {said[1]}: --pairs and --skip need as many steps in the schedule")
    return said


def step_times(sides: dict[str, Connection], count: int) -> np.ndarray:
    """(count, 2) seconds, the sides in turn. Of warm-up steps too: they are the first."""
    times = []
    for _ in range(count):
        pair = []
        for side, turns in sides.items():
            turns.send("go")
            pair.append(received(side, turns))
        times.append(pair)
    return np.array(times)


def slower(times: np.ndarray) -> tuple[float, float]:
    """Mean and half-width of the interval of log(B / A)."""
    ratios = np.log(times[:, 1] / times[:, 0])
    means = [block.mean() for block in np.array_split(ratios, BLOCKS)]
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, BLOCKS - 1)
    return statistics.fmean(means), quantile * statistics.stdev(means) / math.sqrt(BLOCKS)


def asked_for(argv: list[str]) -> argparse.Namespace:
    """Our own flags, and those behind -- as `flags`."""
    own, flags = argv, []
    if "--" in argv:
        own = argv[:argv.index("--")]
        flags = argv[len(own) + 1:]
    parser = argparse.ArgumentParser(prog="bench_steps", description=__doc__.partition("\n")[0])
    parser.add_argument("trainers", metavar="A.py", type=Path, nargs=2)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--skip", type=int, default=20, help="pairs of steps before the first that counts")
    parser.add_argument("--a", action="append", default=[], help="a flag of the first alone")
    parser.add_argument("--b", action="append", default=[], help="a flag of the second alone")
    asked = parser.parse_args(own)
    if asked.pairs < 2 * BLOCKS:
        parser.error(f"--pairs={asked.pairs}: at least {2 * BLOCKS} are needed")
    asked.flags = flags
    return asked


def main(argv: list[str]) -> None:
    asked = asked_for(argv)
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")           # as the trainer sets it where it is the program
    context = multiprocessing.get_context("spawn")
    sides = {}
    processes = []
    for letter, path, own in zip("AB", asked.trainers, (asked.a, asked.b)):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_in_turns, args=(path.resolve(), asked.flags + own, theirs), daemon=True)
        process.start()
        theirs.close()
        name = " ".join([str(path), *own])
        sides[f"{letter} ({name})"] = ours
        processes.append(process)
    try:
        times = step_times(sides, asked.skip + asked.pairs)[asked.skip:]
    finally:
        for process in processes:
            process.kill()

    for column, side in enumerate(sides):
        print(f"{side}: median step {1e3 * np.median(times[:, column]):.1f} ms")
    mean, half = slower(times)
    low, middle, high = (100 * math.expm1(x) for x in (mean - half, mean, mean + half))
    interval = f"[{low:+.2f} %, {high:+.2f} %], {CONFIDENCE:.0%} interval"
    print(f"B takes {middle:+.2f} % {interval}, {len(times)} pairs of steps")


if __name__ == "__main__":
    main(sys.argv[1:])
