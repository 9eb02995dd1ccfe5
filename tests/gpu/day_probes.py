"""Measure one thing on this machine. day.py runs each probe as a process with a time limit.

    python tests/gpu/day_probes.py PROBE --device=cuda|cpu --out=FILE.json
"""
from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import gpu_cases  # noqa: I001  it sets torch's allocator
import torch

import train_gpt as tg

Facts = dict[str, Any]
PACKAGES = ("torch", "triton", "numpy", "pytest", "flash-attn-4", "flash-attn-3")
QUERIED = ("name,driver_version,clocks.sm,clocks.max.sm,power.limit,mig.mode.current,"
           "ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.active")
ROUNDS = 5                               # timed calls; the median counts

def nvidia_smi(*flags: str) -> str:
    """Return the output of nvidia-smi, or why there is none."""
    try:
        return subprocess.run(["nvidia-smi", *flags], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)

def preflight(args: argparse.Namespace) -> Facts:
    facts = {package: tg.package_version(package) for package in PACKAGES}
    facts |= dict(python=platform.python_version(), cuda=torch.version.cuda,
                  cpu=tg.describe_hardware(tg.Communicator(torch.device("cpu"))))
    stages = tg.Config(**tg.PRESETS["record" if args.device == "cuda" else "tiny"]).stages
    first_batch = stages[0].batch_tokens
    facts["stages_first_batch"] = tg.format_value(tuple(replace(stage, batch_tokens=first_batch) for stage in stages))
    if args.device == "cpu":
        return facts | dict(card="cpu", gpus=0, capability=[0, 0], free_fraction=1.0)
    first = torch.cuda.get_device_properties(0)
    count = torch.cuda.device_count()
    free, total = zip(*map(torch.cuda.mem_get_info, range(count)))
    return facts | dict(card=first.name, gpus=count, capability=[first.major, first.minor],
                        free_fraction=min(free) / max(total), nccl=".".join(map(str, torch.cuda.nccl.version())),
                        nvidia_smi=nvidia_smi(f"--query-gpu={QUERIED}", "--format=csv"),
                        topology=nvidia_smi("topo", "-m"))

def operations(args: argparse.Namespace) -> Facts:
    """Check every operation against float64, and time it; also heads with more than 2^31 and 2^32 logits."""
    comm = tg.Communicator(torch.device(args.device, 0))
    comm.set_thread_device()
    lab = gpu_cases.Lab(comm, seed=1)
    cases = [(name, name, lab) for name in lab.cases()]
    left_out = []
    name = "head, fp8" if lab.has_fp8 else "head, plain"
    for tokens, needed in gpu_cases.LARGE_HEADS.items() if comm.on_cuda else ():
        if torch.cuda.mem_get_info()[0] < needed:
            left_out.append(f"the head at {tokens:,} tokens needs {needed / 1e9:.0f} GB of free memory")
            continue
        cases.append((f"{name}, {tokens} tokens", name, gpu_cases.Lab(comm, gpu_cases.RECORD._replace(T=tokens))))
    kernels = []
    for title, name, sized in cases:
        gc.collect()                                          # free the gigabytes of the previous case
        try:
            kernels.append(check_and_time(title, gpu_cases.CASES[name](sized), sized, is_large=sized is not lab))
        except Exception as error:                            # the other cases still run
            kernels.append(dict(name=title, ms={}, wrong=[f"{title}: {type(error).__name__}: {str(error)[:200]}"]))
        print(kernels[-1], flush=True)
    return dict(kernels=kernels, left_out=left_out)

def check_and_time(title: str, case: gpu_cases.Case, lab: gpu_cases.Lab, is_large: bool) -> Facts:
    """is_large: only the memory of the trainer's way is known to fit."""
    if is_large:
        first, *_ = case.ways
        case = case._replace(ways={first: case.ways[first]})
    found = gpu_cases.check(title, case, lab)
    times = {way: [] for way in case.ways}
    for _ in range(ROUNDS if lab.comm.on_cuda else 1):        # alternate, so that a warmer GPU affects all ways
        for way, call in case.ways.items():
            times[way].append(gpu_cases.ms_of(call, case.inputs))
    return found | dict(ms={way: statistics.median(ms) for way, ms in times.items()})

PROBES: dict[str, Callable[[argparse.Namespace], Facts]] = dict(preflight=preflight, operations=operations)

def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("day_probes", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probe", choices=PROBES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    args.out.write_text(json.dumps(PROBES[args.probe](args), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
