"""Measure how much slower the steps of one trainer are than those of another, to within 1 % on a busy machine.

    python tests/bench_steps.py before.py after.py [--rounds=10] [--pairs=60] [--skip=20] [--a=FLAG] [--b=FLAG]
                                [-- trainer flags]

The trainers run in two processes with the same flags, plus those of --a or --b, and alternate step by step, so that a
machine that slows down affects both. A step lasts until optim_step has ended and the next batches are built. A process
may be one or two percent faster than another one for as long as it runs: each round starts new processes, in reverse
order, and counts as one measurement. The output is by how much B is slower: the mean of the log of the ratio over the
rounds, with its 99 % interval by Student's t.
"""
import argparse
import concurrent.futures
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

CONFIDENCE = 0.99
WAIT_S = 600.0                           # for a step, or for a warm-up with compilation

def run_in_turns(path: Path, flags: list[str], turns: Connection) -> None:
    """Train; after the warm-up, whose length depends on the version, only when it is this side's turn."""
    spec = importlib.util.spec_from_file_location("trainer", path)
    trainer = sys.modules["trainer"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trainer)
    train_step, train_loop = trainer.train_step, trainer.train_loop
    step_seconds = None

    def step_in_turn(engine: Any, loader: Any, step_cfg: Any) -> Any:
        nonlocal step_seconds
        if step_seconds is not None:
            turns.send(step_seconds)                          # work between two steps belongs to the turn
        turns.recv()
        start = time.perf_counter()
        result = train_step(engine, loader, step_cfg)
        concurrent.futures.wait([x for x in vars(loader).values() if isinstance(x, concurrent.futures.Future)], WAIT_S)
        step_seconds = time.perf_counter() - start
        return result

    def loop_in_turns(*args: Any) -> Any:
        trainer.train_step = step_in_turn
        return train_loop(*args)

    trainer.train_loop = loop_in_turns
    trainer.main(flags)

def timed_step(side: str, turns: Connection) -> float:
    """Let a side run one step; return its seconds."""
    try:
        turns.send("go")
        if not turns.poll(WAIT_S):
            raise SystemExit(f"{side} did not answer for {WAIT_S:.0f} s")
        return turns.recv()
    except (EOFError, ConnectionError):
        raise SystemExit(f"{side} ended: failed, or its schedule has fewer steps than --skip + --pairs + 1") from None

def step_times(sides: dict[str, tuple[Path, list[str]]], count: int) -> dict[str, list[float]]:
    """Start both sides and return the seconds of `count` alternating steps of each, beginning with the warm-up."""
    context = multiprocessing.get_context("spawn")
    turns = {}
    processes = []
    times = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, (name, (path, flags)) in enumerate(sides.items()):
                turns[name], child_end = context.Pipe()
                process_args = path, [*flags, f"--run_dir={folder}/{number}"], child_end
                processes.append(context.Process(target=run_in_turns, args=process_args, daemon=True))
                processes[-1].start()
                child_end.close()
            for _ in range(count):
                for name in sides:
                    times[name].append(timed_step(name, turns[name]))
        finally:
            for process in processes:
                process.kill()
                process.join()                                # it may write into the folder until then
    return times

def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench_steps", description=__doc__.partition("\n")[0])
    parser.add_argument("trainers", metavar="A.py B.py", type=Path, nargs=2)
    parser.add_argument("--rounds", type=int, default=10, help="starts of both trainers, at least 3 [%(default)s]")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of steps in a round [%(default)s]")
    parser.add_argument("--skip", type=int, default=20, help="pairs before them, which do not count [%(default)s]")
    parser.add_argument("--a", action="append", default=[], metavar="FLAG", help="flag of A.py only")
    parser.add_argument("--b", action="append", default=[], metavar="FLAG", help="flag of B.py only")
    args, flags = parser.parse_known_args(argv)               # arguments after -- are not parsed
    if flags[:1] not in ([], ["--"]) or args.rounds < 3 or args.pairs < 1 or args.skip < 0:
        parser.error("expected --rounds >= 3, --pairs >= 1, --skip >= 0, and flags of the trainer after --")

    os.environ.setdefault("GOMP_SPINCOUNT", "5000")           # as in the trainer's main program
    sides = {}
    for letter, path, side_flags in zip("AB", args.trainers, (args.a, args.b)):
        sides[" ".join([letter, str(path), *side_flags])] = path.resolve(), flags[1:] + side_flags
    order = list(sides)
    rounds = []
    for _ in range(args.rounds):
        times = step_times({name: sides[name] for name in order}, args.skip + args.pairs)
        rounds.append([times[name][args.skip:] for name in sides])
        order.reverse()

    seconds = np.array(rounds)                                # (rounds, sides, pairs)
    for name, median in zip(sides, np.median(seconds, axis=(0, 2))):
        print(f"{name}: median step {1e3 * median:.1f} ms")
    by_round = np.log(seconds[:, 1] / seconds[:, 0]).mean(axis=1)
    interval = stats.ttest_1samp(by_round, 0).confidence_interval(CONFIDENCE)
    low, middle, high = 100 * np.expm1([interval.low, by_round.mean(), interval.high])
    print(f"by round: {', '.join(f'{100 * x:+.2f} %' for x in np.expm1(by_round))}")
    print(f"B takes {middle:+.2f} % [{low:+.2f} %, {high:+.2f} %], {CONFIDENCE:.0%} interval, {args.rounds} rounds of "
          f"{args.pairs} pairs of steps")


if __name__ == "__main__":
    main(sys.argv[1:])
