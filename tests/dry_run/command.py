"""Rehearse a run on GPUs that are not there: what it launches, moves, keeps and waits for, and what a change adds.

README.md says what the flags do, what fails and how to accept growth. Status: 0; 1 for a failure; 2 for a request that
cannot be met. DRY_RUN_CACHE names a folder that keeps what was compiled for the next call.
"""
from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import price
from .expected_costs import add_prices, forbidden, kept, ledger_in, report, sums_of, summary_of, written

TESTS = Path(__file__).resolve().parent.parent
TRAINER = TESTS.parent / "train_gpt.py"
TORCH, TRITON = "2.13.0", "3.7.1"        # whose internals fake_cuda.py knows
BAD_REQUEST = 2                          # status: nothing was walked
LINES_OF_LOG = 30                        # shown where a walk fails

def why_not() -> str:
    """What keeps the rehearsal from running here; empty: nothing."""
    if sys.platform != "linux":
        return f"made for Linux, not {sys.platform}"
    if not shutil.which(os.environ.get("CXX", "g++")) and not shutil.which("c++"):
        return "no C++ compiler: install g++, or name one in CXX"
    for package, known in (("torch", TORCH), ("triton", TRITON)):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"no {package}: pip install {package}=={known}"
        if found.partition("+")[0] != known:
            return f"{package} {found}: its internals are known of {known} only"
        if package == "torch" and not found.endswith("+cpu"):
            return "torch is built for a GPU, and holds the places that the rehearsal fills: install its CPU wheel"
    return ""


# ---- Walks
def walk_all(jobs: dict[str, list[str]], flags: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What walk.py finds with each of these arguments, in processes side by side."""
    with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(TESTS))
        environment.setdefault("DRY_RUN_CACHE", folder)
        processes = {}
        for name, arguments in jobs.items():
            command = [sys.executable, "-m", "dry_run.walk", f"--out={folder}/{name}.json", *arguments, "--", *flags]
            with open(f"{folder}/{name}.log", "w") as log:
                processes[name] = subprocess.Popen(command, env=environment, stderr=log)
        return {name: found_by(process, Path(folder, name)) for name, process in processes.items()}

def found_by(process: subprocess.Popen, path: Path) -> dict[str, Any]:
    status = process.wait()
    last_lines = "\n".join(path.with_suffix(".log").read_text().splitlines()[-LINES_OF_LOG:])
    if status != 0:
        return dict(error=f"the walk ended with status {status}:\n{last_lines}")
    found = json.loads(path.with_suffix(".json").read_text())
    if "ended_by" in found:
        print(f"The walk ended before its end:\n{last_lines}")
    return found

def timelines_of(walked: dict[str, dict[str, Any]], card: str, flags: Sequence[str]) -> dict[str, Any]:
    """What the walks of all worlds found, as one object: what a price is made of and --out writes."""
    kernels: dict[str, dict] = {}
    worlds = {}
    for world, found in walked.items():
        steps = found.pop("steps")                            # of the run: the same in all walks
        kernels = found.pop("kernels") | kernels              # Inductor may count one in two ways
        worlds[world] = dict(found, segments={})
    launched = set()
    for found in worlds.values():
        for phase in found["phases"].values():
            phase.update(sums_of(phase["timeline"], kernels))
            launched |= {item[1] for item in phase["timeline"] if item[0] == "run"}
    kernels = {key: kernel for key, kernel in kernels.items() if key in launched}
    return dict(format=price.FORMAT, torch=TORCH, triton=TRITON, card=card, flags=list(flags), kernels=kernels,
                worlds=worlds, steps=steps, source_sha256=hashlib.sha256(TRAINER.read_bytes()).hexdigest())


# ---- Pages
def summary(ledger: dict[str, Any]) -> Iterator[str]:
    for number, world in ledger["worlds"].items():
        yield f"W = {number}: {len(world['graphs'])} graphs"
        for name, phase in world["phases"].items():
            sums = phase["sums"]
            if not sums.get("launches"):
                continue
            flops = [f"{sums[measure] / 1e12:.2f} {measure.removeprefix('flops ')}" for measure in sorted(sums)
                     if measure.startswith("flops ")]
            yield (f"  {name:24}{sums['launches']:6} launches {sums['bytes'] / 1e9:8.1f} GB  "
                   f"TFLOP {' + '.join(flops) or 0}; peak {sums['peak_bytes'] / 2**20:,.0f} MiB, "
                   f"{sums['collectives']} collectives of {sums['collective_bytes'] / 1e6:,.0f} MB")
    compiled = ledger["kernels_compiled"]
    yield "{number} kernels compiled, {spilling} spill, at most {most_registers} registers".format(**compiled)

def prices(old: dict[str, Any] | None, new: dict[str, Any], timelines: dict[str, Any]) -> str:
    """Add its prices to a ledger. Returns them as a page, and how they differ from those of the one before."""
    try:
        rates = price.load(price.RATES)
        now = price.price(timelines, rates)
    except price.PriceError as error:                         # a card without a rate for what it is asked
        return f"no price: {error}"
    add_prices(new, timelines, rates)
    return price.text(now) + ("\n" + price.difference(price.kept_prediction(old), now) if old else "")


# ---- The command
def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("dry_run.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", default="8,1", type=numbers, help="numbers of GPUs [%(default)s]")
    parser.add_argument("--card", default="H100", choices=sorted(price.load(price.RATES)["cards"]))
    parser.add_argument("--stages", default=[], type=numbers, help="lower the graphs of these only, such as 1,2 [all]")
    parser.add_argument("--quick", action="store_true", help="the first stage on eight GPUs, compared with nothing")
    parser.add_argument("--update", action="store_true", help="write the ledger anew and print the difference")
    parser.add_argument("--ledger", default=str(price.LEDGER), help="to compare with, and to update")
    parser.add_argument("--out", default="", help="file for all timelines, of which price.py and records make prices")
    parser.add_argument("flags", nargs="*", help="of train_gpt.py, after --")
    wanted = parser.parse_args(argv)
    if wanted.quick and (wanted.update or wanted.stages):
        parser.error("--quick walks the first stage and no more")
    return wanted

def numbers(text: str) -> list[str]:
    found = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d*", number) for number in found):
        raise argparse.ArgumentTypeError(f"{text!r}: numbers, such as 8,1")
    return found

def rehearse(wanted: argparse.Namespace) -> dict[str, Any] | None:
    """Timelines of the walks; none if one of them could not be made, which is said."""
    if wanted.quick:
        jobs = {"8": ["--world=8", f"--card={wanted.card}", "--stages=1", "--first-stage"]}
    else:
        stages = ",".join(wanted.stages)
        jobs = {world: [f"--world={world}", f"--card={wanted.card}", f"--stages={stages}"] for world in wanted.gpus}
    walked = walk_all(jobs, wanted.flags)
    errors = {name: found["error"] for name, found in walked.items() if "error" in found}
    for name, error in errors.items():
        print(f"{name} on {wanted.card}:\n{error}")
    return None if errors else timelines_of(walked, wanted.card, wanted.flags)

def main(argv: Sequence[str]) -> int:
    reason = why_not()
    if reason:
        print(f"the rehearsal is not run: {reason}")
        return 2
    wanted = parse(argv)
    path = Path(wanted.ledger)
    try:
        old = None if wanted.quick else ledger_in(path)
    except price.PriceError as error:
        print(error)
        return BAD_REQUEST
    if wanted.update and old is not None:
        other = (wanted.card, wanted.flags, wanted.stages) != (old["card"], old["flags"], [])
        if other or not set(old["worlds"]) <= set(wanted.gpus):
            held = f"{old['card']}, W = {' and '.join(old['worlds'])}, all stages, flags {old['flags']}"
            print(f"--update would lose what the ledger has: it is of {held}; another --ledger=FILE holds others")
            return BAD_REQUEST
    if old is not None and old["card"] != wanted.card:
        old = None
    timelines = rehearse(wanted)
    if timelines is None:
        return 1
    new = summary_of(timelines)
    page = prices(old, new, timelines)
    print("\n".join(summary(new)))
    if wanted.out:
        price.compressed.write_bytes(Path(wanted.out), json.dumps(timelines, sort_keys=True).encode() + b"\n")
    failures = forbidden(new)
    grown = report(old, new) if old else []
    if not wanted.quick:
        print(page if old else f"compared with nothing: {path.name} has no {wanted.card}\n{page}")
    if wanted.update and not failures:
        print("\n".join(grown))
        price.compressed.write_bytes(path, written(kept(new)).encode() + b"\n")
        return 0
    print("\n".join(f"FAILED  {failure}" for failure in failures + grown))
    return 1 if failures + grown else 0
