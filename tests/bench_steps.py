"""Whether two trainers take the same time for a step, told within a percent on a machine that is not quiet.

    python tests/bench_steps.py before.py after.py [--rounds=10] [--pairs=60] [--skip=20] [--a=FLAG] [--b=FLAG]
                                [-- trainer flags]

Both run the same flags, and those of --a or --b, at once, each in a process of its own, but take turns step by step:
one trains while the other waits for its turn. A machine that slows down slows both, and what disturbs for seconds
counts in both alike. A step lasts from the taking of its batch until optim_step and the loader's thread, which makes
the next ones meanwhile, are through. `python records bench` compares whole runs, with losses and memory; it needs many
of them for what these pairs of steps tell in minutes.

A process keeps an advantage of a percent or two for as long as it lives, say by where its memory lies. So each round
starts both anew, in the other order, and counts once: printed are the median step of both, and by how much B is slower,
the mean over the rounds of the log of the ratio, with its 99 % interval by Student's t.
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
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

LEAST_ROUNDS = 3                         # for an interval
CONFIDENCE = 0.99
WAIT_S = 600.0                           # for a step, or for a warm-up with its compilation


class Side(NamedTuple):
    """One of the two that are compared."""

    path: Path
    flags: list[str]                     # of its own


def trainer(path: Path) -> Any:
    """The file as a module."""
    spec = importlib.util.spec_from_file_location("trainer", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["trainer"] = module
    spec.loader.exec_module(module)
    return module


def run_in_turns(path: Path, flags: list[str], run_dir: str, turns: Connection) -> None:
    """Train; from its first batch on, only while it is this side's turn."""
    t = trainer(path)
    train_step = t.train_step
    lasted = None

    def step_in_turn(executor: Any, loader: Any, values: Any) -> Any:
        nonlocal lasted
        if lasted is not None:
            turns.send(lasted)                                # what stood between two steps was a part of the turn
        turns.recv()
        began = time.perf_counter()
        result = train_step(executor, loader, values)
        loader.wait()                                         # else its thread works in the other's turn
        lasted = time.perf_counter() - began
        return result

    t.train_step = step_in_turn
    t.main([*flags, f"--run_dir={run_dir}"])                  # does not return


def timed_step(side: str, turns: Connection) -> float:
    """Seconds of the step that a side takes now. Raises SystemExit if it ends or says nothing."""
    try:
        turns.send("go")
        if not turns.poll(WAIT_S):
            raise SystemExit(f"{side} said nothing for {WAIT_S:.0f} s")
        return turns.recv()
    except (EOFError, ConnectionError):
        raise SystemExit(f"{side} ended: if nothing above says why, its schedule is too short for --skip, --pairs and "
                         "a step more") from None


def step_times(sides: dict[str, Side], flags: list[str], count: int) -> dict[str, list[float]]:
    """Seconds of `count` steps of each side, started anew and in turn. Of warm-up steps too: they are the first."""
    with tempfile.TemporaryDirectory() as folder:
        return timed_in(folder, sides, flags, count)


def timed_in(folder: str, sides: dict[str, Side], flags: list[str], count: int) -> dict[str, list[float]]:
    context = multiprocessing.get_context("spawn")
    turns = {}
    processes = []
    for number, (name, side) in enumerate(sides.items()):
        turns[name], theirs = context.Pipe()
        given = (side.path, flags + side.flags, f"{folder}/{number}", theirs)
        process = context.Process(target=run_in_turns, args=given, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
    times = {name: [] for name in sides}
    try:
        for _ in range(count):
            for name in sides:
                seconds = timed_step(name, turns[name])
                times[name].append(seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()                                    # it may write into the folder until then
    return times


def slower(means: list[float]) -> tuple[float, float]:
    """Mean and half-width of the interval of log(B / A), from its means in each round."""
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(means) - 1)
    return statistics.fmean(means), quantile * statistics.stdev(means) / math.sqrt(len(means))


def asked_for(argv: list[str]) -> argparse.Namespace:
    """Our own flags, and those after -- as `flags`."""
    own, flags = argv, []
    if "--" in argv:
        own = argv[:argv.index("--")]
        flags = argv[len(own) + 1:]
    parser = argparse.ArgumentParser(prog="bench_steps", description=__doc__.partition("\n")[0])
    parser.add_argument("trainers", metavar="A.py", type=Path, nargs=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of steps that count in a round")
    parser.add_argument("--skip", type=int, default=20, help="pairs of steps before them")
    parser.add_argument("--a", action="append", default=[], help="a flag of the first alone")
    parser.add_argument("--b", action="append", default=[], help="a flag of the second alone")
    asked = parser.parse_args(own)
    for name, least in (("rounds", LEAST_ROUNDS), ("pairs", 1), ("skip", 0)):
        if getattr(asked, name) < least:
            parser.error(f"--{name}={getattr(asked, name)}: at least {least}")
    asked.flags = flags
    return asked


def main(argv: list[str]) -> None:
    asked = asked_for(argv)
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")           # as the trainer sets it where it is the program
    sides = {}
    for letter, path, own in zip("AB", asked.trainers, (asked.a, asked.b)):
        name = " ".join([str(path), *own])
        sides[f"{letter} ({name})"] = Side(path.resolve(), own)

    order = list(sides)
    rounds = []
    for _ in range(asked.rounds):
        in_order = {name: sides[name] for name in order}
        times = step_times(in_order, asked.flags, asked.skip + asked.pairs)
        counted = [times[name][asked.skip:] for name in sides]
        rounds.append(counted)
        order.reverse()

    seconds = np.array(rounds)                                # (rounds, sides, pairs)
    for column, name in enumerate(sides):
        print(f"{name}: median step {1e3 * np.median(seconds[:, column]):.1f} ms")
    ratios = np.log(seconds[:, 1] / seconds[:, 0])
    mean, half = slower(ratios.mean(axis=1).tolist())
    low, middle, high = (100 * math.expm1(x) for x in (mean - half, mean, mean + half))
    interval = f"[{low:+.2f} %, {high:+.2f} %], {CONFIDENCE:.0%} interval"
    print(f"by round: {', '.join(f'{100 * math.expm1(x):+.2f} %' for x in ratios.mean(axis=1))}")
    print(f"B takes {middle:+.2f} % {interval}, {asked.rounds} rounds of {asked.pairs} pairs of steps")


if __name__ == "__main__":
    main(sys.argv[1:])
