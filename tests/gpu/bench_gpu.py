"""Check every operation of the trainer on this device against float64, and time it.

    python tests/gpu/bench_gpu.py [--out=FOLDER] [--rounds=N] [--seed=N]
    python tests/gpu/bench_gpu.py --device=cpu          the same code at tiny sizes; its times do not predict a GPU's

Inputs are new random numbers, in memory filled with NaN. Times are listed next to those of plain PyTorch and
torch.compile. FOLDER/bench.json is complete after each printed line. Exit status: 0; 1 if a check failed; 2 without a
GPU. Times are not judged.
"""
from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import gpu_cases  # noqa: I001  it sets torch's allocator
import torch

import train_gpt as tg

L2_BYTES = 256 << 20                     # larger than the L2 cache of any GPU
FLUSHES = 32                             # flushes before a call, during which the host runs ahead: 3 ms on an H100

class Report:
    """Prints lines for people and writes figures for programs after each result, so that a later failure loses nothing.
    """
    def __init__(self, folder: Path) -> None:
        self.path = folder / "bench.json"
        self.figures: dict[str, Any] = dict(kernels=[], left_out=[], wrong=[])
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, found: dict[str, Any], wrong: Sequence[str] = ()) -> None:
        """Append to the list of this name in the figures, or set the figure of this name."""
        if isinstance(self.figures.get(name), list):
            self.figures[name].append(found)
        else:
            self.figures[name] = found
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found.items()), flush=True)
        for line in wrong:
            print(f"  WRONG: {line}", flush=True)
        self.figures["wrong"] += wrong
        self.path.write_text(json.dumps(self.figures, indent=1) + "\n")


# ---- Operations
def ms_of(call: Callable, inputs: list[torch.Tensor], flushed: torch.Tensor) -> float:
    """Time one call with a cold cache, between CUDA events, or with the clock on a CPU."""
    copies = [x.clone() for x in inputs]
    if not flushed.is_cuda:
        began = time.perf_counter()
        call(*copies)
        return 1000 * (time.perf_counter() - began)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(FLUSHES):
        flushed.zero_()
    before.record()
    call(*copies)
    after.record()
    after.synchronize()
    return before.elapsed_time(after)

def time_ways(case: gpu_cases.Case, device: torch.device, rounds: int) -> dict[str, str]:
    """Return median, minimum and maximum ms of every way. The ways alternate, so that a warmer GPU affects all of them.
    """
    flushed = torch.empty(L2_BYTES if device.type == "cuda" else 1, dtype=torch.uint8, device=device)
    times = {way: [] for way in case.ways}
    for _ in range(rounds + 1):
        for way, call in case.ways.items():
            times[way].append(ms_of(call, case.inputs, flushed))
    spreads = {}
    for way, (_, *ms) in times.items():                       # the first round does not count
        spreads[way] = f"{statistics.median(ms):.3f} ({min(ms):.3f} to {max(ms):.3f}) ms"
    return spreads

def large_head(lab: gpu_cases.Lab) -> gpu_cases.Lab | str:
    """Return a lab whose micro-batch has more than 2^32 logits, or the reason why this device cannot have it."""
    tokens, most = max(gpu_cases.LARGE_HEADS.items())
    if not lab.comm.on_cuda:
        return gpu_cases.Lab(lab.comm, lab.sizes._replace(T=2 * lab.sizes.T), backend=lab.backend)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < most:
        return f"the head at {tokens:,} tokens needs {most / 1e9:.0f} GB; {free / 1e9:.0f} GB are free"
    return gpu_cases.Lab(lab.comm, gpu_cases.RECORD._replace(T=tokens))

def bench_kernels(lab: gpu_cases.Lab, rounds: int, report: Report) -> None:
    report.add("sizes", lab.sizes._asdict())
    cases = [(name, name, lab) for name in lab.cases()]
    large = large_head(lab)
    if isinstance(large, str):
        report.add("left_out", dict(reason=large))
    else:
        name = "head, fp8" if lab.has_fp8 else "head, plain"
        cases.append((f"{name}, {large.sizes.T} tokens", name, large))
    for title, name, sized in cases:
        gc.collect()                                          # free the gigabytes of the previous case
        try:
            case = gpu_cases.CASES[name](sized)
            # Only the memory of the trainer's way is known to fit.
            if sized is not lab:
                first, *_ = case.ways
                case = case._replace(ways={first: case.ways[first]})
            found = gpu_cases.check(title, case, sized)
            found["times"] = time_ways(case, sized.device, rounds)
        except Exception as error:                            # the other cases still run
            words = " ".join(str(error).split())
            found = dict(name=title, wrong=[f"{title}: {type(error).__name__}: {words[:300]}"])
        report.add("kernels", found, found["wrong"])


# ---- The command
def parse(argv: Sequence[str]) -> argparse.Namespace:
    out = ROOT / f"logs/bench-gpu-{time.strftime('%Y%m%d-%H%M%S')}"
    parser = argparse.ArgumentParser("bench_gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="[%(default)s]")
    parser.add_argument("--out", type=Path, default=out, help="directory for bench.json [logs/bench-gpu-TIME]")
    parser.add_argument("--rounds", type=int, default=15, help="timings per operation [%(default)s]")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"),
                        help="seed of the inputs [random]")
    parser.add_argument("--backend", default="", help="backend of torch.compile [inductor; on a CPU: none, eager]")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    return args

def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.device_count():
        print(f"--device=cuda\n  found:    no CUDA device (torch {torch.__version__})\n"
              "  expected: an NVIDIA GPU and a CUDA build of torch\n"
              "  hint:     --device=cpu runs the same code at tiny sizes; its times mean nothing", file=sys.stderr)
        return 2
    comm = tg.Communicator(torch.device(args.device, 0))
    comm.set_thread_device()
    report = Report(args.out)
    report.add("machine", dict(hardware=tg.describe_hardware(comm), torch=torch.__version__, cuda=torch.version.cuda,
                               triton=tg.package_version("triton"), seed=args.seed,
                               source_sha256=hashlib.sha256(Path(tg.__file__).read_bytes()).hexdigest()))
    bench_kernels(gpu_cases.Lab(comm, seed=args.seed, backend=args.backend), args.rounds, report)
    print(f"written to {report.path}")
    return 1 if report.figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
