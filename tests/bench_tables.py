"""What large tables of n-grams cost, and what they move. Prints tables; asserts nothing.

    python tests/bench_tables.py scale    10^8 rows against 10^6 in host memory: time per row, first touches, memory
    python tests/bench_tables.py bytes    rows and bytes at 8 ranks and full width, beside figures of an earlier count
    python tests/bench_tables.py resume   train with 10^8 rows in host memory, kill it, go on: the same losses or not

`scale` and `resume` take the tokens of the pocket preset, or of the shards that DATA names; `bytes` those of
tests/bench_rows.py.
"""
from __future__ import annotations

import glob
import json
import mmap
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import bench_rows
import numpy as np
import torch

import train_gpt as tg
from common import plan_of

LABEL = "trigram_embed"
LARGE = 10**8                                                        # rows
SMALL = 10**6
WIDTH = 96                                                           # that of the pocket preset, in f32
CYCLE_TOKENS = (3_072, 98_304)                                       # of a rank: pocket's last stage, that of record
MOST_TOKENS = 1 << 20                                                # each trigram takes a page of the large table
ROUNDS = 3                                                           # over all tokens, after the first touches
PARTS = ("plan", "gather", "read", "update", "write")
STATE_BYTES = 8                                                      # v and last
PRESET, STEPS, CHECKPOINT_EVERY = "pocket_tables", 44, 20            # of the runs of `resume`
WAIT_S = 1200.0                                                      # for one of them


def shards() -> str:
    """Their pattern."""
    pattern = os.environ.get("DATA", str(ROOT / "data/pocket/pocket_train_*.bin"))
    if not glob.glob(pattern) and not pattern.startswith(tg.FORMULA):
        pattern = "formula:2048:2047:2000000:1"
    print(pattern)
    return pattern


def pocket_tokens() -> np.ndarray:
    """(n,) i32: the first tokens of the shards."""
    shard = tg.load_shard(tg.find_shards(shards())[0])
    return np.asarray(shard.tokens[:MOST_TOKENS], np.int32)


class Cycle(NamedTuple):
    """What one cycle took."""

    seconds: np.ndarray                                              # of each part, which nothing overlaps
    cpu_seconds: float                                               # of all parts, on both threads
    rows: int                                                        # asked for


class Side:
    """One table in host memory at one rank, taken through its cycles as training takes it, but part by part."""

    def __init__(self, rows: int, cycle_tokens: int) -> None:
        cfg = tg.Config(**tg.PRESETS["pocket"])
        line = tg.NgramTable(LABEL, 3, rows, home="host")
        self.cfg = replace(cfg, tables=(line,), model_dim=WIDTH, padded_vocab=128, bigram_rows=2)
        fabric = tg.Fabric(torch.device("cpu"))
        self.planner = tg.Planner(self.cfg, fabric)
        self.spec = self.planner.tables[-1]
        self.table = tg.RowTable(self.spec, self.cfg, fabric, None, cycle_tokens, tg.no_wait)
        self.number = 0
        generator = torch.Generator().manual_seed(0)
        self.gradients = torch.randn(cycle_tokens, WIDTH, generator=generator)

    def plan(self, tokens: np.ndarray) -> tg.TablePlan:
        plan, _ = plan_of(self.planner, self.spec, [self.spec.ids(tokens[None])])
        return plan

    def settle(self) -> None:
        """Until the mover has done all that it was asked for."""
        self.table.home.mover.submit(int).result()

    def cycle(self, tokens: np.ndarray) -> Cycle:
        table = self.table
        cpu_began = time.process_time()
        times = [time.perf_counter()]
        plan = self.plan(tokens)
        table.prepare(plan)
        times.append(time.perf_counter())
        self.settle()                                                # rows have come up
        times.append(time.perf_counter())
        table.rows_for_forward(plan, None)
        times.append(time.perf_counter())

        count = len(plan.my_rows)
        table.row_grads[:count] = self.gradients[:count]
        self.number += 1
        number = torch.tensor(self.number, dtype=torch.int32)
        step_size, decay = torch.tensor(1e-3), torch.tensor(0.0)
        began = time.perf_counter()                                  # the gradients above are no cost of a table
        grad, merge = table.return_gradients()
        merge()
        tg.rowwise_update(*table.live, grad, 1 / 8, number, 0.95, 1e-10, step_size, decay, None)
        updated = time.perf_counter()
        table.updated()
        self.settle()                                                # rows have gone down
        written = time.perf_counter()
        cpu_seconds = time.process_time() - cpu_began
        table.clear()
        seconds = [*np.diff(times), updated - began, written - updated]
        return Cycle(np.array(seconds), cpu_seconds, count)


def memory(name: str) -> int:
    """Bytes of this process, by their name in /proc/self/status."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s*(\d+)", status)[1])


@dataclass
class FirstTouches:
    cpu_seconds: float
    touched: int
    resident: int                                                    # bytes that were added
    page_tables: int


def touch_all(side: Side, cycles: list[np.ndarray]) -> FirstTouches:
    resident = -memory("VmRSS")
    page_tables = -memory("VmPTE")
    cpu_seconds = sum(side.cycle(tokens).cpu_seconds for tokens in cycles)
    resident += memory("VmRSS")
    page_tables += memory("VmPTE")
    touched = sum(len(places) for places, _ in side.table.home.touched())
    return FirstTouches(cpu_seconds, touched, resident, page_tables)


def compare(cycle_tokens: int, tokens: np.ndarray) -> None:
    """Both tables in turn on the same tokens."""
    cycles = np.split(tokens, range(cycle_tokens, len(tokens), cycle_tokens))
    cycles = [x for x in cycles if len(x) == cycle_tokens]
    touch_all(Side(SMALL, cycle_tokens), cycles[:2])                 # what torch does once is no first touch
    sides = {rows: Side(rows, cycle_tokens) for rows in (SMALL, LARGE)}
    first = {rows: touch_all(side, cycles) for rows, side in sides.items()}

    found: dict[int, list[Cycle]] = {rows: [] for rows in sides}
    for round_ in range(ROUNDS):
        for number, of_cycle in enumerate(cycles):
            order = sorted(sides, reverse=(round_ + number) % 2 == 1)
            for rows in order:
                found[rows].append(sides[rows].cycle(of_cycle))
    print_times(cycle_tokens, found)
    print_first_touches(first, found)


def print_times(cycle_tokens: int, found: dict[int, list[Cycle]]) -> None:
    per_row = {}
    for rows, cycles in found.items():
        parts = np.array([1e9 * cycle.seconds / cycle.rows for cycle in cycles])
        per_row[rows] = [*np.median(parts, axis=0), np.median(parts.sum(1))]
    asked = np.mean([cycle.rows for cycle in found[LARGE]])
    print(f"\n{cycle_tokens:,} tokens per cycle; {asked:,.0f} rows asked for; ns per row that was touched before, "
          f"medians of {len(found[LARGE])} interleaved cycles\n")
    print("| | " + " | ".join(PARTS) + " | all |\n|" + "---|" * (len(PARTS) + 2))
    for rows, figures in per_row.items():
        print(f"| {rows:,} rows | " + " | ".join(f"{x:,.0f}" for x in figures) + " |")
    ratios = np.divide(per_row[LARGE], per_row[SMALL])
    print("| ratio (goal for all: at most 1.5) | " + " | ".join(f"{x:.2f}" for x in ratios) + " |")


def print_first_touches(first: dict[int, FirstTouches], found: dict[int, list[Cycle]]) -> None:
    """Their time is what the first round took longer than a later one."""
    head = ("rows touched", "us per first touch", "resident, MB", "a page per touched row, v and last, MB",
            "page tables, MB")
    print("\n| | " + " | ".join(head) + " |\n|" + "---|" * (len(head) + 1))
    for rows, touches in first.items():
        later = sum(cycle.cpu_seconds for cycle in found[rows]) / ROUNDS
        microseconds = 1e6 * (touches.cpu_seconds - later) / touches.touched
        bound = touches.touched * mmap.PAGESIZE + rows * STATE_BYTES
        print(f"| {rows:,} rows | {touches.touched:,} | {microseconds:.2f} | {touches.resident / 1e6:,.0f} "
              f"| {bound / 1e6:,.0f} | {touches.page_tables / 1e6:,.1f} |")


def scale() -> None:
    tokens = pocket_tokens()
    for cycle_tokens in CYCLE_TOKENS:
        compare(cycle_tokens, tokens)


CHANNELS = ("more_bigram_embed", "trigram_embed")
CHANNEL_ROWS = 42_300_000                                            # of 84.6 million
CHANNEL_TABLES = tuple(tg.NgramTable(label, order, CHANNEL_ROWS) for label, order in zip(CHANNELS, (2, 3)))
CYCLES = 10                                                          # of each stage
# An earlier count by stage, both channels: distinct rows of a rank, of all 8 ranks.
EARLIER = ((52_463, 364_659), (101_179, 679_780), (147_928, 972_023))
EARLIER_TOUCHED = (4.09, 12.06)                                      # million rows of each channel, by all tokens


def plans_by_rank(stage: int) -> Iterator[list[dict[str, tg.TablePlan]]]:
    """The plans of each rank in turn."""
    for rank in range(bench_rows.RANKS):
        batches = bench_rows.cycles(stage, rank, most=CYCLES, tables=CHANNEL_TABLES)
        yield [first.plans for first, _ in batches]


def unions(rows: list[list[np.ndarray]]) -> list[np.ndarray]:
    """By cycle: the rows that any rank asks for, once."""
    return [np.unique(np.concatenate(of_ranks)) for of_ranks in zip(*rows)]


def in_the_next(unions_of_cycles: list[np.ndarray]) -> float:
    """Share of the rows of a cycle that the next one asks for, too."""
    shares = []
    for rows, next_rows in zip(unions_of_cycles, unions_of_cycles[1:]):
        shares.append(np.isin(rows, next_rows, assume_unique=True).mean())
    return float(np.mean(shares))


@dataclass
class Channel:
    rank_rows: float                                                 # means over cycles
    all_rows: float
    kept: float                                                      # share
    megabytes: float                                                 # ids, rows and gradients that a rank sends
    plan_ms: float


def channel(plans: list[list[dict[str, tg.TablePlan]]], label: str) -> Channel:
    rows = []                                                        # (rank, cycle), of lists
    counts = []
    plan_ms = []
    for of_rank in plans:
        mine = [by_label[label] for by_label in of_rank]
        rows.append([plan.my_rows.numpy() for plan in mine])
        counts.append([plan.send_counts for plan in mine])
        plan_ms += [plan.plan_ms for plan in mine]
    by_cycle = np.array(counts).swapaxes(0, 1)                       # (cycle, reader, owner)
    of_all = unions(rows)
    moved = bench_rows.shares(by_cycle, CHANNEL_ROWS)
    return Channel(moved["rows"], np.mean([len(x) for x in of_all]), in_the_next(of_all), moved["MB"],
                   statistics.median(plan_ms))


def bytes_table() -> None:
    ranks = bench_rows.RANKS
    width = bench_rows.WIDTH
    row_bytes = width * bench_rows.WIRE_BYTES
    print(f"{bench_rows.tokens()}\n{ranks} ranks, a bigram and a trigram channel with {CHANNEL_ROWS:,} rows of {width} "
          f"bf16 each; means of {CYCLES} cycles of two steps\n")
    head = ("stage", "channel", "rows of a rank", "counted before", "rows of all", "counted before",
            "asked again by others", "also in the next cycle", "MB sent per rank", "MB by the whole table",
            "MB up / down of an owner", "plan ms")
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    whole = 2 * (ranks - 1) * CHANNEL_ROWS / ranks * row_bytes / 1e6
    for stage in bench_rows.STAGES:
        plans = list(plans_by_rank(stage))
        channels = [channel(plans, label) for label in CHANNELS]
        all_rows = sum(each.all_rows for each in channels)
        kept = sum(each.kept * each.all_rows for each in channels) / all_rows
        both = Channel(sum(each.rank_rows for each in channels), all_rows, kept,
                       sum(each.megabytes for each in channels), sum(each.plan_ms for each in channels))
        for name, each in zip((*CHANNELS, "both"), (*channels, both)):
            before = ("", "")
            if name == "both":
                before = [f"{count:,}" for count in EARLIER[stage]]
            tables = 2 if name == "both" else 1
            down = each.all_rows / ranks * (row_bytes + STATE_BYTES) / 1e6
            several = 1 - each.all_rows / (ranks * each.rank_rows)
            print(f"| {stage + 1} | {name} | {each.rank_rows:,.0f} | {before[0]} | {each.all_rows:,.0f} | {before[1]} "
                  f"| {100 * several:.1f} % | {100 * each.kept:.1f} % | {each.megabytes:.1f} | {tables * whole:,.0f} "
                  f"| {down * (1 - each.kept):.1f} / {down:.1f} | {each.plan_ms:.2f} |")
    touched_by_all()


def touched_by_all() -> None:
    """Rows that all tokens touch, each shard as if it were one slot."""
    tables = tg.row_tables(tg.Config(tables=CHANNEL_TABLES))[-len(CHANNELS):]
    shards = [tg.load_shard(header) for header in tg.find_shards(bench_rows.tokens())]
    count = sum(len(shard.tokens) for shard in shards)
    print()
    for table, before in zip(tables, EARLIER_TOUCHED):
        rows = [table.ids(np.asarray(shard.tokens, np.int32)[None])[0] for shard in shards]
        touched = len(np.unique(np.concatenate(rows)))
        print(f"{table.label}: {count / 1e6:.1f} million tokens touch {touched / 1e6:.2f} million rows "
              f"({before} counted before)")


def started(folder: Path, *flags: str) -> subprocess.Popen:
    """A run in a process of its own, whose output nobody reads."""
    command = [sys.executable, str(ROOT / "train_gpt.py"), f"--run_dir={folder}", *flags]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=dict(os.environ, OMP_NUM_THREADS="1"))


def ended(process: subprocess.Popen, folder: Path) -> tuple[list[tuple[int, float]], dict]:
    """Losses by step of a run, and its result. Raises SystemExit if it fails."""
    if process.wait(WAIT_S) != 0:
        raise SystemExit("a run failed: what is above says why")
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    losses = [(line["step"], line.get("train_loss", line.get("val_loss"))) for line in log
              if line["type"] in ("step", "val")]
    return losses, log[-1]


def killed_after(process: subprocess.Popen, folder: Path) -> int:
    """SIGKILL as soon as there is a checkpoint; the step of the newest. Raises SystemExit if there is none."""
    deadline = time.monotonic() + WAIT_S
    while not list(folder.glob("step-???????")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no checkpoint in {folder}: what is above says why")
        time.sleep(0.01)
    process.kill()
    process.wait()
    newest = max(path.name for path in folder.glob("step-???????"))
    return int(newest.split("-")[1])


def resume() -> None:
    """One run that nobody disturbs, one that is killed after its first checkpoint, and what goes on from there."""
    pattern = shards()
    flags = [f"--preset={PRESET}", f"--tables={LABEL} 3 {LARGE} stream 0 host", f"--max_steps={STEPS}",
             f"--checkpoint_every={CHECKPOINT_EVERY}", f"--train_files={pattern}", f"--val_files={pattern}",
             "--sample_tokens=0"]
    with tempfile.TemporaryDirectory() as place:
        whole, killed, rest = (Path(place) / name for name in ("whole", "killed", "rest"))
        losses, result = ended(started(whole, *flags), whole)
        first = started(killed, *flags)
        try:
            step = killed_after(first, killed / tg.CHECKPOINTS)
        finally:
            first.kill()
        losses_of_both, _ = ended(started(rest, f"--resume={killed}"), rest)
    same = "the same to the last bit" if losses == losses_of_both else "DIFFERENT"
    touched = result["touched_rows"][LABEL]
    peak = result["peak_memory_mib"]["consumption"]
    print(f"{LARGE:,} rows, {STEPS} steps, {touched:,} rows touched: peak {peak} MiB")
    how = "killed with SIGKILL" if first.returncode == -signal.SIGKILL else "at its end before it was killed"
    print(f"{how}, and resumed after step {step}: {len(losses)} losses, {same}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or ("scale", "bytes"):
        dict(scale=scale, bytes=bytes_table, resume=resume)[name]()
        print()
