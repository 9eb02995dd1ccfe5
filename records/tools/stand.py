"""Verb `stand`: compare the loss of a run with a record, with the unigram entropy, and with a trigram model.

It needs only numpy, so `./run.sh` can call it after every run.

Exit status: 0 success; 2 invalid input.
"""
from __future__ import annotations

import argparse
import glob
import json
import math
import os
import subprocess
import sys
from pathlib import Path

from tools import page, plot, record, report, statistics
from tools.files import inside, one_line, say
from tools.read import Facts, Run, ToolError

ROOT = Path(__file__).resolve().parents[2]
SAME_RUN = "data_sha256", "val_tokens", "preset", "tokens_trained"
MOST_COUNTED = 5_000_000               # training tokens that a trigram model may count; takes 170 MiB (measured)
LIMIT_S = 40                           # a slower trigram model is left out; `./run.sh` ends the verb after 60 s
SAME_TEXT = 1e-4                       # largest relative difference between two unigram entropies of the same tokens

def counting_models(run: Run) -> list[str]:
    """Format the unigram entropy of the validation tokens of a run, and the loss of a trigram model on them.

    The trigram model counts as many training tokens as the run was trained on, up to MOST_COUNTED. It is left out if
    the data files of the run are missing or have changed.
    """
    entropy = record.value(run, "unigram_nats")
    counted = trigram_model(run)
    if entropy is None:
        entropy = counted.get("unigram_nats")
    elif counted and not math.isclose(counted["unigram_nats"], entropy, rel_tol=SAME_TEXT):
        counted = {}
    words = []
    if entropy:
        words.append(f"unigram entropy {entropy:.3f}")
    if counted:
        words.append(f"trigram model of {counted['train_tokens']:,} training tokens {counted['trigram_nats']:.3f}")
    return words

def trigram_model(run: Run) -> Facts:
    """Return the results of data/ngram.py for the data files of a run; {} if they are missing, or if it fails."""
    patterns = []
    for key in ("train_files", "val_files"):
        pattern = str(record.value(run, key))
        # Patterns are relative to the directory in which the run was started, usually the root of the repository.
        if not shard_paths(pattern):
            pattern = str(ROOT / pattern)
        if not shard_paths(pattern):
            return {}
        patterns.append(pattern)
    trained = record.value(run, "tokens_trained") or MOST_COUNTED
    # A shard has a header of 512 tokens (format: data/README.md).
    shard_tokens = sum(path.stat().st_size // 2 - 512 for path in shard_paths(patterns[0]))
    tokens = min(trained, MOST_COUNTED, shard_tokens)
    command = [sys.executable, ROOT / "data/ngram.py", f"--train={patterns[0]}", f"--val={patterns[1]}",
               f"--train_tokens={tokens}", f"--val_tokens={record.value(run, 'val_tokens')}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        return json.loads(result.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, LookupError, ValueError):
        return {}

def shard_paths(pattern: str) -> list[Path]:
    """Return the paths that match a pattern. As in the trainer, brackets in the name of a directory are literal."""
    folder, name = os.path.split(pattern)
    if Path(folder).is_dir():
        pattern = os.path.join(glob.escape(folder), name)
    return [Path(path) for path in glob.glob(pattern)]

def comparable_entry(run: Run, root: Path) -> Facts | None:
    """Return the result.json of the latest entry with the preset, data and number of tokens of a run; None if none has.

    Entries with a single loss do not count, because the band needs several.
    """
    found = None
    for result in record.entries_of(root):
        facts = result["machine"] | result["entry"]
        same = all(facts[key] == record.value(run, key) for key in SAME_RUN)
        if same and record.main_pool(result)["loss"]["n"] > 1:
            found = result
    return found

def pool_of(entry: Facts, root: Path) -> report.Side | None:
    """Read the runs of an entry; None, with a note on stderr, if a log is missing or damaged."""
    stated = entry["stated"]
    try:
        return record.read_group(inside(root, record.folder_name(entry)), stated, stated["main"])
    except ToolError as error:
        say(f"note: record {stated['number']} is left out: {error}", sys.stderr)
    return None

def stand(folder: Path, root: Path) -> int:
    """Print the mean loss of finished runs next to the losses to compare it with. Plot the runs, and print the path.

    Raises ToolError if the runs are of several programs, or if none has a finite loss.
    """
    side = report.side_of("run", [folder])
    mixed = report.mixtures(side)
    if mixed:
        raise ToolError(f"runs in {folder}", found=mixed[0], expected="runs of one program", hint="name one of them")
    n, mean, _ = statistics.summary(side.losses())
    if not n:
        raise ToolError(f"runs in {folder}", found="no finite loss", expected="a run that has not diverged",
                        hint="lower the learning rate, and look at the training losses in its log")
    words = counting_models(side.runs[0])
    groups: dict[str, list[Run]] = {}
    record.say_left_out(root)
    entry = comparable_entry(side.runs[0], root)
    pool = None
    if entry:
        stated = entry["stated"]
        pool = pool_of(entry, root)
    if pool:
        low, high = statistics.band(pool.losses(), runs=n)
        name = f"record {stated['number']}"
        where = ("outside", "inside")[low <= mean <= high]
        words.append(f"{name} {(low + high) / 2:.3f}, {where} its 99 % band {low:.2f} to {high:.2f}")
        groups[name] = pool.runs
    several = f", mean of {n} runs" * (n > 1)
    beside = ", ".join(words) or "no record has this preset, these data and as many tokens"
    say(one_line(f"{mean:.3f} nats per token{several}; for comparison: {beside}"))
    picture = (folder if folder.is_dir() else folder.parent) / page.PLOT
    plot.curves(groups | {"this run": side.runs}, picture)
    say(one_line(f"picture: {picture}"))
    return 0

def main(argv: list[str]) -> int:
    """Run `stand`; return the exit status. argv: the verb and its arguments."""
    parser = argparse.ArgumentParser("python records stand", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=record.RECORDS, help="directory of all records")
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run directory, a directory of several, or a log")
    args = parser.parse_args(argv[1:])
    return stand(args.folder, args.records.resolve())
