"""Measure one thing on this machine. day.py runs each probe as a process with a time limit.

    python tests/gpu/day_probes.py PROBE --device=cuda|cpu --out=FILE.json [...]

A probe writes one JSON object to FILE.json. On a CPU the same code runs at tiny sizes.
"""
from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import bench_gpu  # noqa: I001  it sets torch's allocator
import gpu_cases
import torch
from torch import Tensor

import train_gpt as tg

Facts = dict[str, Any]
BF16 = torch.bfloat16
TILE = 128                               # queries, and keys, of an attention tile, as in the prices
ROUNDS = 20                              # timings per rate; the median counts
PACKAGES = ("torch", "triton", "numpy", "pytest", "flash-attn-4", "flash-attn-3")
QUERIED = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "power.limit", "mig.mode.current",
           "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.active")
SLOWDOWN_BITS = 0x8 | 0x20 | 0x40 | 0x80  # throttle reasons: hardware slowdown, heat (two kinds), power brake
SHARED_BYTES = 1 << 30                   # free in /dev/shm; NCCL uses it between the ranks of a machine
FREE_MEMORY = 0.95


# ---- Preflight
def run_program(*command: str) -> str | None:
    """Run a program and return its output; None if it is missing, fails, or does not end within 10 s."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]

def missing_compilers() -> list[str]:
    """List what torch.compile and Triton need but cannot find, with remedies."""
    missing = []
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing.append("no Python.h, which Triton needs: apt install python3-dev")
    if not any(map(shutil.which, os.environ.get("CC", "cc gcc clang").split())):
        missing.append("no C compiler, which Triton needs: apt install gcc")
    if not any(map(shutil.which, os.environ.get("CXX", "g++ gcc clang").split())):
        missing.append("no C++ compiler, which torch.compile needs: apt install g++")
    return missing

def describe_gpus(problems: list[str], remarks: list[str]) -> Facts:
    """Describe the GPUs. Add what prevents a run to `problems`, and what slows it down to `remarks`."""
    driver = run_program("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        problems.append(f"torch {torch.__version__} finds no GPU: {first_line(error)}; driver {driver}: "
                        "install a CUDA build of torch that this driver supports, or a newer driver (580 for CUDA 13); "
                        "for a dry run on a CPU: --device=cpu")
        return {}
    count = torch.cuda.device_count()
    first = torch.cuda.get_device_properties(0)
    if first.major < 8:
        problems.append(f"capability {first.major}.{first.minor} of {first.name}: bfloat16 needs 8.0")
    free, total = zip(*map(torch.cuda.mem_get_info, range(count)))
    if min(f / t for f, t in zip(free, total)) < FREE_MEMORY:
        others = run_program("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader")
        remarks.append(f"{min(free) >> 20} of {total[0] >> 20} MiB are free; other processes (pid, memory): {others}")
    shared = shutil.disk_usage("/dev/shm").free
    if count > 1 and shared < SHARED_BYTES:
        problems.append(f"/dev/shm has {shared >> 20} MiB free, NCCL needs 1 GiB: docker run --shm-size=8g")
    return dict(card=first.name, gpus=count, capability=[first.major, first.minor], free_bytes=min(free),
                nccl=".".join(map(str, torch.cuda.nccl.version())), shared_memory_bytes=shared,
                kernels=tg.ATTENTION_BY_CAPABILITY.get(first.major, ("varlen",)))

def preflight(args: argparse.Namespace) -> Facts:
    """Return facts about the machine, problems that prevent a run, and remarks."""
    problems = []
    remarks = []
    facts = {package: tg.package_version(package) for package in PACKAGES}
    facts |= dict(python=platform.python_version(), cuda=torch.version.cuda, missing=missing_compilers(),
                  cpu=tg.describe_hardware(tg.Communicator(torch.device("cpu"))),
                  source_sha256=hashlib.sha256(Path(tg.__file__).read_bytes()).hexdigest())
    stages = tg.Config(**tg.PRESETS["record" if args.device == "cuda" else "tiny"]).stages
    first_batch = stages[0].batch_tokens
    facts["stages_first_batch"] = tg.format_value(tuple(replace(stage, batch_tokens=first_batch) for stage in stages))
    if args.device == "cpu":
        facts |= dict(card="cpu", gpus=0, capability=[0, 0], kernels=["reference"])
        return dict(facts=facts, problems=[], remarks=[])
    problems += facts["missing"]
    facts |= describe_gpus(problems, remarks)
    answer = run_program("nvidia-smi", f"--query-gpu={','.join(QUERIED)}", "--format=csv,noheader,nounits")
    facts["nvidia_smi"] = answer and [dict(zip(QUERIED, line.split(", "))) for line in answer.splitlines()]
    facts["topology"] = run_program("nvidia-smi", "topo", "-m")
    if answer is None:
        remarks.append("nvidia-smi does not answer: clocks, ECC errors and throttling are unknown")
    for index, card in enumerate(facts["nvidia_smi"] or ()):
        throttle = card.get(QUERIED[-1], "")
        if throttle.startswith("0x") and int(throttle, 16) & SLOWDOWN_BITS:
            remarks.append(f"GPU {index} is throttled ({throttle})")
        if card.get(QUERIED[-2], "0").isdecimal() and int(card.get(QUERIED[-2], "0")):
            remarks.append(f"GPU {index} has uncorrected ECC errors")
    return dict(facts=facts, problems=problems, remarks=remarks)


# ---- Attention
def executed_tiles(bounds: list[int], window: int) -> int:
    """Count the tiles that an attention kernel with 128 x 128 blocks computes: causal, within documents and a window.
    """
    visited = 0
    for length in map(int.__sub__, bounds[1:], bounds):
        for first in range(0, length, TILE):
            last = min(first + TILE, length) - 1
            visited += last // TILE - max(first - window, 0) // TILE + 1
    return visited

def median_ms(call: Callable, inputs: list[Tensor], rounds: int = 5) -> float:
    """Return the median ms of several calls with a cold cache. A first call is not counted."""
    size = bench_gpu.L2_BYTES if inputs[0].is_cuda else 1
    cache_flush = torch.empty(size, dtype=torch.uint8, device=inputs[0].device)
    return statistics.median([bench_gpu.ms_of(call, inputs, cache_flush) for _ in range(rounds + 1)][1:])

def attention(args: argparse.Namespace) -> Facts:
    """Check one kernel against float64, and time all layers on one sequence of each of the three stages."""
    comm = comm_of(args)
    try:
        lab = gpu_cases.Lab(comm, kernel=args.kernel)
    except tg.TrainerError as error:
        return dict(refused=" ".join(str(error).split())[:400])
    wrong = []
    for name, build in gpu_cases.CASES.items():
        if name.startswith("attention"):
            wrong += gpu_cases.check(name, build(lab), lab)["wrong"]
    cfg = tg.Config(**tg.PRESETS["record" if comm.on_cuda else "tiny"])
    stages = []
    for stage in cfg.stages[:3]:
        lab.sizes = lab.sizes._replace(T=stage.batch_tokens // cfg.seqs_per_step)
        ms = flops = 0
        for (kind, window), layers in Counter((layer.attention, layer.window) for layer in tg.LAYERS).items():
            if kind == "none":
                continue
            fold = 2 if kind == "paired" else 1
            heads = lab.sizes.H // fold
            window_tokens = cfg.window_block * dict(short=stage.short_window, long=stage.long_window)[window]
            bounds = [fold * bound for bound in lab.document_bounds()]
            case = gpu_cases.attention_of(lab, bounds, window_tokens, heads)
            ms += layers * median_ms(case.ways[gpu_cases.TRAINER], case.inputs)
            flops += layers * executed_tiles(bounds, window_tokens) * TILE * TILE * lab.sizes.E * heads * (4 + 10)
        stages.append(dict(tokens=lab.sizes.T, ms=ms, flop_per_s=1000 * flops / ms))
    return dict(kernel=lab.attention_name, wrong=wrong, stages=stages)


# ---- Ceilings
def work_per_second(amount: float, call: Callable, *inputs: Tensor) -> float:
    return 1000 * amount / median_ms(call, list(inputs), ROUNDS)

def ceilings(args: argparse.Namespace) -> Facts:
    """Measure the rates that this device reaches, with their names in rates.json, and matmuls of the trainer's shapes.
    """
    comm = comm_of(args)
    device = comm.device
    T, D, H, V, cube = (64, 32, 64, 128, 64)
    if comm.on_cuda:
        T, D, H, V, cube = (49_152, 768, 3072, 50_304, 8192)
        if torch.cuda.get_device_properties(device).total_memory < gpu_cases.BIG_CARD:
            T = 16_384
    shapes = {}
    for m, n, k in ((cube, cube, cube), (T, H, D), (T, D, H), (H, D, T), (T, V, D), (D, V, T), (T, D, V)):
        a = torch.randn(m, k, device=device).to(BF16)
        b = torch.randn(k, n, device=device).to(BF16)
        shapes[f"bfloat16 ({m}, {n}, {k})"] = work_per_second(2 * m * n * k, torch.mm, a, b)
    rates = dict(bfloat16=shapes[f"bfloat16 ({cube}, {cube}, {cube})"])

    large = torch.randn(T, 16 * D, device=device).to(BF16)
    rates["memory"] = work_per_second(2 * large.nbytes, torch.clone, large)
    # As in the fp8 head, where a kernel of Inductor copies the gradient of the logits to column-major order.
    grad = torch.randint(100, (T, V), dtype=torch.uint8, device=device).view(torch.float8_e5m2)
    transpose_grad = torch.compile(transpose) if comm.on_cuda else transpose
    rates["transposing"] = work_per_second(2 * grad.nbytes, transpose_grad, grad)
    a, b = (torch.randn(cube // 2, cube // 2, device=device) for _ in range(2))
    rates["float32"] = work_per_second(2 * (cube // 2)**3, torch.mm, a, b)
    if gpu_cases.Lab(comm, gpu_cases.TINY, kernel="reference").has_fp8:
        for m, n, k in ((cube, cube, cube), (T, V, D)):
            a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
            b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
            for fast_accum in (True, False):
                flops_per_s = work_per_second(2 * m * n * k, partial(scaled_mm, fast_accum=fast_accum), a, b)
                shapes[f"float8 ({m}, {n}, {k}), fast accumulation: {fast_accum}"] = flops_per_s
        rates["float8"] = shapes[f"float8 ({cube}, {cube}, {cube}), fast accumulation: True"]
    if comm.on_cuda:
        host = comm.pinned(torch.zeros(1 << 28, dtype=torch.uint8))
        device_bytes = torch.empty(1 << 28, dtype=torch.uint8, device=device)
        upload = partial(Tensor.copy_, other=host, non_blocking=True)
        rates["host_link"] = work_per_second(host.nbytes, upload, device_bytes)
        if torch.cuda.device_count() > 1:
            other = torch.empty_like(large, device="cuda:1")
            rates["link"] = work_per_second(large.nbytes, partial(Tensor.copy_, other=other), large)
    return dict(rates=rates, shapes=shapes)

def transpose(x: Tensor) -> Tensor:
    return x.t().contiguous()

def scaled_mm(a: Tensor, b: Tensor, fast_accum: bool) -> Tensor:
    """Multiply fp8 matrices (m, k) and (n, k) as the head does."""
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=fast_accum)


# ---- Equality of ranks
def ranks(args: argparse.Namespace) -> Facts:
    """Train 20 steps on all ranks; return the losses of the whole batch, and each rank's hash of the weights."""
    files = dict(train_files=args.files, val_files=args.files) if args.files else {}
    comm = tg.init_distributed(tg.Config(device=args.device))
    run = gpu_cases.Run(comm, **files)
    losses = []
    for step_loss in run.steps(0, 20 // run.schedule.cycle_steps):
        losses.append(sum(comm.all_gather(float(step_loss.seq_sums.sum()))) / (step_loss.num_tokens * comm.world_size))
    digest = hashlib.sha256()
    table_labels = {spec.label for spec in tg.parameter_specs(run.cfg) if spec.table}
    for label, p in run.engine.model.named_parameters():
        if label not in table_labels:                         # a rank stores only its shard of a table
            digest.update(p.detach().cpu().contiguous().view(torch.uint8).numpy())
    return dict(rank=comm.rank, world=comm.world_size, losses=losses, hashes=comm.all_gather(digest.hexdigest()))


# ---- The command
def comm_of(args: argparse.Namespace) -> tg.Communicator:
    comm = tg.Communicator(torch.device(args.device, 0))
    comm.set_thread_device()
    return comm

PROBES: dict[str, Callable[[argparse.Namespace], Facts]] = dict(
    preflight=preflight, attention=attention, ceilings=ceilings, ranks=ranks)

def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("day_probes", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probe", choices=PROBES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernel", default="auto", help="attention kernel [%(default)s]")
    parser.add_argument("--files", default="", help="training shards [synthetic tokens]")
    args = parser.parse_args(argv)
    found = PROBES[args.probe](args)
    if found.get("rank", 0) == 0:
        args.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)                          # like the trainer, because destroying NCCL's groups may hang
