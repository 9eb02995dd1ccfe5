"""Measure one thing on this machine, in a process that day.py starts and ends.

    python tests/gpu/day_probes.py PROBE cuda|cpu FILE.json
"""
from __future__ import annotations

import gc
import json
import platform
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

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

def preflight(device: str) -> Facts:
    facts = {package: tg.package_version(package) for package in PACKAGES}
    facts |= dict(python=platform.python_version(), cuda=torch.version.cuda,
                  cpu=tg.describe_hardware(tg.Communicator(torch.device("cpu"))))
    stages = tg.Config(**tg.PRESETS["record" if device == "cuda" else "tiny"]).stages
    first_batch = stages[0].batch_tokens
    facts["stages_first_batch"] = tg.format_value(tuple(replace(stage, batch_tokens=first_batch) for stage in stages))
    if device == "cpu":
        return facts | dict(card="cpu", gpus=0, capability=[0, 0], free_fraction=1.0)
    first = torch.cuda.get_device_properties(0)
    count = torch.cuda.device_count()
    free, total = zip(*map(torch.cuda.mem_get_info, range(count)))
    return facts | dict(card=first.name, gpus=count, capability=[first.major, first.minor],
                        free_fraction=min(free) / max(total), nccl=".".join(map(str, torch.cuda.nccl.version())),
                        nvidia_smi=nvidia_smi(f"--query-gpu={QUERIED}", "--format=csv"),
                        topology=nvidia_smi("topo", "-m"))

def operations(device: str) -> Facts:
    """Check every operation against float64, and time it."""
    comm = tg.Communicator(torch.device(device, 0))
    comm.set_thread_device()
    lab = gpu_cases.Lab(comm, seed=1)
    found = {}
    for name in lab.cases():
        gc.collect()                                          # free the gigabytes of the previous case
        try:
            found[name] = check_and_time(name, lab)
        except Exception as error:                            # the other cases still run
            found[name] = dict(ms={}, wrong=[f"{name}: {type(error).__name__}: {str(error)[:200]}"])
        print(name, found[name], flush=True)
    return found

def check_and_time(name: str, lab: gpu_cases.Lab) -> Facts:
    case = gpu_cases.CASES[name](lab)
    found = gpu_cases.check(name, case, lab)
    times = {way: [] for way in case.ways}
    for _ in range(ROUNDS if lab.comm.on_cuda else 1):        # alternate, so that a warmer GPU affects all ways
        for way, call in case.ways.items():
            times[way].append(gpu_cases.ms_of(call, case.inputs))
    return found | dict(ms={way: statistics.median(ms) for way, ms in times.items()})

PROBES = dict(preflight=preflight, operations=operations)


if __name__ == "__main__":
    probe, device, path = sys.argv[1:]
    Path(path).write_text(json.dumps(PROBES[probe](device), indent=1) + "\n", "utf-8")
