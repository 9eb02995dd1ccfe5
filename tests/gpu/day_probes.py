"""Measure one thing on this machine. day.py runs each probe as a process with a time limit.

    python tests/gpu/day_probes.py PROBE --device=cuda|cpu --out=FILE.json [...]
"""
from __future__ import annotations

import argparse
import gc
import hashlib
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

import gpu_cases  # noqa: I001  it sets torch's allocator
import torch
from torch import Tensor

import train_gpt as tg
from dry_run.price import TILE, executed_tiles

Facts = dict[str, Any]
BF16 = torch.bfloat16
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
    for variable, programs in (("CC", "cc gcc clang"), ("CXX", "g++ clang++")):
        if not any(map(shutil.which, os.environ.get(variable, programs).split())):
            missing.append(f"none of {programs}, which Triton and torch.compile need: apt install g++")
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
def median_ms(call: Callable, inputs: list[Tensor], rounds: int = 5) -> float:
    return statistics.median(gpu_cases.ms_of(call, inputs, rounds))

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


# ---- Operations
def operations(args: argparse.Namespace) -> Facts:
    """Check every operation against float64, and time it; also heads with more than 2^31 and 2^32 logits."""
    comm = comm_of(args)
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
            kernels.append(dict(name=title, ms={}, wrong=[f"{title}: {type(error).__name__}: {first_line(error)}"]))
        print(kernels[-1], flush=True)
    return dict(kernels=kernels, left_out=left_out)

def check_and_time(title: str, case: gpu_cases.Case, lab: gpu_cases.Lab, is_large: bool) -> Facts:
    """is_large: only the memory of the trainer's way is known to fit."""
    if is_large:
        first, *_ = case.ways
        case = case._replace(ways={first: case.ways[first]})
    found = gpu_cases.check(title, case, lab)
    times = {way: [] for way in case.ways}
    for _ in range(5 if lab.comm.on_cuda else 1):             # alternate, so that a warmer GPU affects all ways
        for way, call in case.ways.items():
            times[way] += gpu_cases.ms_of(call, case.inputs, 1)
    return found | dict(ms={way: statistics.median(ms) for way, ms in times.items()})


# ---- Ceilings
def work_per_second(amount: float, call: Callable, *inputs: Tensor) -> float:
    return 1000 * amount / median_ms(call, list(inputs), ROUNDS)

def ceilings(args: argparse.Namespace) -> Facts:
    """Measure the rates of this device, with their names in rates.json."""
    comm = comm_of(args)
    device = comm.device
    T, D, V, cube = (64, 32, 128, 64)
    if comm.on_cuda:
        T, D, V, cube = (16_384, 768, 50_304, 8192)
    a, b = (torch.randn(cube, cube, device=device) for _ in range(2))
    rates = dict(bfloat16=work_per_second(2 * cube**3, torch.mm, a.to(BF16), b.to(BF16)),
                 float32=work_per_second(2 * cube**3, torch.mm, a, b))
    large = torch.randn(T, 64 * D, device=device).to(BF16)
    rates["memory"] = work_per_second(2 * large.nbytes, torch.clone, large)
    # As in the fp8 head, where a kernel of Inductor copies the gradient of the logits to column-major order.
    grad = torch.randint(100, (T, V), dtype=torch.uint8, device=device).view(torch.float8_e5m2)
    transposed = torch.compile(transpose) if comm.on_cuda else transpose
    rates["transposing"] = work_per_second(2 * grad.nbytes, transposed, grad)
    if gpu_cases.Lab(comm, gpu_cases.TINY, kernel="reference").has_fp8:
        a, b = (x.to(torch.float8_e4m3fn) for x in (a, b))
        rates["float8"] = work_per_second(2 * cube**3, scaled_mm, a, b)
    if comm.on_cuda:
        host = comm.pinned(torch.zeros(1 << 28, dtype=torch.uint8))
        device_bytes = torch.empty(1 << 28, dtype=torch.uint8, device=device)
        upload = partial(Tensor.copy_, other=host, non_blocking=True)
        rates["host_link"] = work_per_second(host.nbytes, upload, device_bytes)
    if torch.cuda.device_count() > 1:
        other = torch.empty_like(large, device="cuda:1")
        rates["link"] = work_per_second(large.nbytes, partial(Tensor.copy_, other=other), large)
    return dict(rates=rates)

def transpose(x: Tensor) -> Tensor:
    return x.t().contiguous()

def scaled_mm(a: Tensor, b: Tensor) -> Tensor:
    """Multiply fp8 matrices (m, k) and (n, k) as the head does, with fast accumulation."""
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=True)


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
    preflight=preflight, attention=attention, operations=operations, ceilings=ceilings, ranks=ranks)

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
