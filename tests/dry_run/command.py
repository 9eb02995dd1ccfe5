"""Run the trainer on fake CUDA tensors, and compare its launches, traffic, memory and waits with the expected costs.

README.md explains the flags, what makes the dry run fail, and how to accept growth. Exit status: 0 success; 1 if a
check or a walk failed; 2 if the request cannot be met. The environment variable DRY_RUN_CACHE names a folder in which
compiled kernels are stored for the next call.
"""
from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import price
from .expected_costs import add_prices, compact, find_failures, format_json, growth_beyond_limit, summarize

TESTS = Path(__file__).resolve().parent.parent
TRAINER = TESTS.parent / "train_gpt.py"
TORCH_VERSION, TRITON_VERSION = "2.13.0", "3.7.1"  # fake_cuda.py depends on their internals
LOG_TAIL_LINES = 30                      # printed when a walk fails

def unsupported_reason() -> str:
    """Return why the dry run cannot run here; "" if it can."""
    for package, supported in (("torch", f"{TORCH_VERSION}+cpu"), ("triton", TRITON_VERSION)):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        if found != supported:
            return f"{package} is {found}; fake_cuda.py replaces internals of {supported}, the wheel to install"
    if not shutil.which(os.environ.get("CXX", "g++")) and not shutil.which("c++"):
        return "no C++ compiler: install g++, or set CXX"
    return ""


# ---- Walks
def run_walks(walk_args: dict[str, list[str]], flags: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run walk.py once with each of these arguments, in parallel processes; return the results by name."""
    with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(TESTS))
        environment.setdefault("DRY_RUN_CACHE", folder)
        processes = {}
        for name, arguments in walk_args.items():
            command = [sys.executable, "-m", "dry_run.walk", f"--out={folder}/{name}.json", *arguments, "--", *flags]
            with open(f"{folder}/{name}.log", "w") as log:
                processes[name] = subprocess.Popen(command, env=environment, stderr=log)
        return {name: read_result(process, Path(folder, name)) for name, process in processes.items()}

def read_result(process: subprocess.Popen, path: Path) -> dict[str, Any]:
    """Wait for a walk. Returns its result, or an entry `error` with the end of its log."""
    status = process.wait()
    last_lines = "\n".join(path.with_suffix(".log").read_text().splitlines()[-LOG_TAIL_LINES:])
    if status != 0:
        return dict(error=f"the walk failed with exit status {status}:\n{last_lines}")
    walk = json.loads(path.with_suffix(".json").read_text())
    if "ended_by" in walk:
        print(f"The walk did not finish:\n{last_lines}")
    return walk

def merge_walks(walks: dict[str, dict[str, Any]], card: str, flags: Sequence[str]) -> dict[str, Any]:
    kernels: dict[str, dict] = {}
    by_world_size = {}
    launched = set()
    for world_size, walk in walks.items():
        steps = walk.pop("steps")                             # those of the whole run, equal in all walks
        # Inductor may count different bytes for a kernel in another walk. Keep the first count.
        kernels = walk.pop("kernels") | kernels
        by_world_size[world_size] = walk
        for phase in walk["phases"].values():
            launched |= {item[1] for item in phase["timeline"] if item[0] == "run"}
    kernels = {key: kernel for key, kernel in kernels.items() if key in launched}
    return dict(torch=TORCH_VERSION, triton=TRITON_VERSION, card=card, flags=list(flags), kernels=kernels,
                worlds=by_world_size, steps=steps, source_sha256=hashlib.sha256(TRAINER.read_bytes()).hexdigest())


# ---- Output
def summary_lines(costs: dict[str, Any]) -> Iterator[str]:
    for world_size, world in costs["worlds"].items():
        yield f"W = {world_size}: {len(world['graphs'])} graphs"
        for name, phase in world["phases"].items():
            sums = phase["sums"]
            if not sums.get("launches"):
                continue
            flops = [f"{sums[measure] / 1e12:.2f} {measure.removeprefix('flops ')}" for measure in sorted(sums)
                     if measure.startswith("flops ")]
            yield (f"  {name:24}{sums['launches']:6} launches {sums['bytes'] / 1e9:8.1f} GB  "
                   f"TFLOP {' + '.join(flops) or 0}; peak {sums['peak_bytes'] / 2**20:,.0f} MiB, "
                   f"{sums['collectives']} collectives of {sums['collective_bytes'] / 1e6:,.0f} MB")
    compiled = costs["kernels_compiled"]
    yield "{number} kernels compiled, {spilling} spill, at most {most_registers} registers".format(**compiled)


# ---- The command
def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    numbers = functools.partial(str.split, sep=",")
    parser = argparse.ArgumentParser("dry_run.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", default="8,1", type=numbers, help="world sizes [%(default)s]")
    parser.add_argument("--card", default="H100", choices=sorted(price.load(price.RATES)["cards"]),
                        help="GPU to compile for [%(default)s]")
    parser.add_argument("--stages", default=[], type=numbers,
                        help="lower only the graphs of these stages, for example 1,2 [all]")
    parser.add_argument("--update", action="store_true", help="write the expected costs and print the differences")
    parser.add_argument("flags", nargs="*", help="flags of train_gpt.py, after --")
    return parser.parse_args(argv)

def run_all(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the timelines of all walks. If a walk fails, print why and return None."""
    walk_args = {}
    for world_size in args.gpus:
        walk_args[world_size] = [f"--world={world_size}", f"--card={args.card}", f"--stages={','.join(args.stages)}"]
    walks = run_walks(walk_args, args.flags)
    errors = {name: found["error"] for name, found in walks.items() if "error" in found}
    for name, error in errors.items():
        print(f"{name} on {args.card}:\n{error}")
    return None if errors else merge_walks(walks, args.card, args.flags)

def main(argv: Sequence[str]) -> int:
    reason = unsupported_reason()
    if reason:
        print(f"the dry run cannot run here: {reason}")
        return 2
    args = parse_args(argv)
    before = price.load(price.EXPECTED_COSTS)
    is_other = (args.card, args.flags, args.stages) != (before["card"], before["flags"], [])
    if args.update and (is_other or not set(before["worlds"]) <= set(args.gpus)):
        print(f"--update needs all walks of {price.EXPECTED_COSTS.name}: W = {' and '.join(before['worlds'])} of "
              f"{before['card']}, all stages, flags {before['flags']}")
        return 2
    timelines = run_all(args)
    if timelines is None:
        return 1
    if before["card"] != args.card:
        print(f"nothing to compare with: {price.EXPECTED_COSTS.name} has no costs of {args.card}")
        before["worlds"] = {}
    costs = summarize(timelines)
    add_prices(costs, timelines, price.load(price.RATES))
    prediction = price.predict(costs)
    print("\n".join(summary_lines(costs)))
    failures = find_failures(costs)
    growth = growth_beyond_limit(before, costs) if before["worlds"] else []
    print(price.format_prediction(prediction) + "\n" + price.format_difference(price.predict(before), prediction))
    if args.update and not failures:
        print("\n".join(growth))
        price.EXPECTED_COSTS.write_text(format_json(compact(costs)) + "\n", "utf-8")
        return 0
    print("\n".join(f"FAILED  {failure}" for failure in failures + growth))
    return 1 if failures + growth else 0
