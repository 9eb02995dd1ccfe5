"""What machine is this, in what state, and how fast: fingerprint, state around a run, and a short calibration.

    python calibrate.py SECONDS        one process, or several under torchrun; the last line is JSON
The trainer is not involved: two calibrations that differ mean that the machine changed, not the code."""
from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

GPU_FIELDS = ("name,driver_version,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,"
              "clocks_throttle_reasons.active")                # the last by its old name, which new drivers know too
QUERY_S = 10                            # nvidia-smi answers in well under a second, and never on a lost device
CPU = Path("/sys/devices/system/cpu")
STOLEN = 7                              # field of the first line of /proc/stat: time that other guests of the host had
WAITING = 3, 4                          # fields of it: idle, and waiting for input
SAMPLE_S = 0.02                         # one batch of calls: far above the clock's resolution
WARM_UP_CALLS, MIN_BATCHES = 3, 5
NCCL = "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"


class Sizes(NamedTuple):
    """Of what a calibration works on."""
    side: int                           # of the square matrices
    copied: int                         # bytes
    reduced: int                        # bytes


SIZES = {"cuda": Sizes(8192, 1 << 30, 1 << 26), "cpu": Sizes(1024, 1 << 28, 1 << 24)}


# ---- Fingerprint and state
def text_of(path: str | Path) -> str:
    """A file of the kernel's, "" where it cannot be read: virtual machines and other systems lack many."""
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


def gpus() -> list[dict[str, str]]:
    """Name, driver, clocks, power and reasons for throttling of every NVIDIA device; empty without nvidia-smi."""
    query = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in done.stdout.splitlines():
        values = [value.strip() for value in line.split(",")]
        found.append(dict(zip(GPU_FIELDS.split(","), values)))
    return found


def state() -> dict[str, Any]:
    """What may change between two runs: clocks, power, throttling, load."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "gpus": gpus(),
        "load_1min": round(os.getloadavg()[0], 2),
        "cpu_mhz": cpu_mhz(),
        "throttle_events": throttle_events(),
        "governors": governors(),
        "stolen_s": stolen_s(),
    }


def cpu_mhz() -> list[float] | None:
    """Of the slowest and of the fastest core."""
    mhz = [float(x) for x in re.findall(r"cpu MHz\s*: ([\d.]+)", text_of("/proc/cpuinfo"))]
    if not mhz:
        return None
    return [min(mhz), max(mhz)]


def throttle_events() -> int | None:
    counts = []
    for path in CPU.glob("cpu*/thermal_throttle/core_throttle_count"):
        counts.append(int(text_of(path) or 0))
    return sum(counts) if counts else None


def governors() -> list[str] | None:
    found = {text_of(path).strip() for path in CPU.glob("cpu*/cpufreq/scaling_governor")}
    return sorted(found) if found else None


def stolen_s() -> float | None:
    """Since the machine started."""
    ticks = processor_ticks()
    if len(ticks) <= STOLEN:
        return None
    return ticks[STOLEN] / os.sysconf("SC_CLK_TCK")


def busy_cores(seconds: float = 1.0) -> float | None:
    """Cores at work within so many seconds, those that other guests of the host have taken included; called while
    nothing of ours runs, they work for others. None where the system does not tell."""
    before = processor_ticks()
    time.sleep(seconds)
    after = processor_ticks()
    spent = [late - early for early, late in zip(before, after)]
    if len(spent) <= STOLEN or not sum(spent):
        return None
    waiting = sum(spent[field] for field in WAITING)
    return (os.cpu_count() or 1) * (1 - waiting / sum(spent))


def processor_ticks() -> list[int]:
    """Of all cores since the start: user, nice, system, idle, waiting for input, ..."""
    _, *ticks = text_of("/proc/stat").partition("\n")[0].split() or [""]
    return [int(tick) for tick in ticks[:STOLEN + 1]]


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def installed(*names: str) -> str | None:
    """Version of the first of these packages that is installed, without importing it."""
    for name in names:
        for distribution in importlib.metadata.distributions(name=name):
            return distribution.version
    return None


def fingerprint() -> dict[str, Any]:
    """What should not change during a bench."""
    model = re.search(r"model name\s*: (.*)", text_of("/proc/cpuinfo"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": cores(),
        "system": platform.release(),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "torch": installed("torch"),
        "triton": installed("triton"),
        "nccl": installed(*NCCL),
    }


# ---- Calibration
class Work(NamedTuple):
    """Something to be timed."""
    call: Callable[[], Any]
    amount: float | None = None         # of the unit, done by a call; None: what counts is how long it takes

    def rate(self, seconds: float) -> float:
        """Of a call that takes `seconds`: units a second, else microseconds."""
        if self.amount is None:
            return seconds * 1e6
        return self.amount / seconds


class Calibration:
    """Calls on tensors of this rank's device. Imports torch; with several ranks it makes their process group."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist
        self.torch = torch
        self.dist = dist
        self.ranks = int(os.environ.get("WORLD_SIZE", 1))
        self.on_gpu = torch.cuda.is_available()
        kind, backend = ("cuda", "nccl") if self.on_gpu else ("cpu", "gloo")
        self.device = torch.device(kind)
        self.sizes = SIZES[kind]
        if self.on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if self.ranks > 1:
            dist.init_process_group(backend)

    def works(self) -> dict[str, Work]:
        """By name and unit of the rate."""
        torch = self.torch
        side, copied, reduced = self.sizes
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        matrix, product = torch.ones(2, side, side, dtype=dtype, device=self.device)
        source, target = torch.ones(2, copied // 4, device=self.device)                   # 4 bytes: float32
        scalar = torch.ones(1, device=self.device)
        message = torch.zeros(reduced // 4, device=self.device)

        def multiply() -> None:
            torch.mm(matrix, matrix, out=product)

        def copy() -> None:
            target.copy_(source)

        def launch() -> None:
            scalar.add_(1)

        def reduce() -> None:
            self.dist.all_reduce(message)

        def reduce_one() -> None:
            self.dist.all_reduce(scalar)

        found = {
            "matrix product TFLOP/s": Work(multiply, 2 * side**3 / 1e12),
            "copy GB/s": Work(copy, 2 * copied / 1e9),                                     # read and written
            "host launch operations/s": Work(launch, 1),
        }
        if self.ranks > 1:
            found["all_reduce GB/s"] = Work(reduce, reduced / 1e9)
            found["all_reduce latency us"] = Work(reduce_one)
        return found

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def timed(self, call: Callable[[], Any], calls: int) -> float:
        """Seconds per call of the slowest rank."""
        self.wait()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        self.wait()
        mean = (time.perf_counter() - began) / calls

        slowest = self.torch.tensor(mean, dtype=self.torch.float64, device=self.device)
        if self.ranks > 1:
            self.dist.all_reduce(slowest, self.dist.ReduceOp.MAX)
        return slowest.item()

    def sample(self, call: Callable[[], Any], seconds: float) -> list[float]:
        """Seconds per call, batch by batch, for about `seconds`."""
        self.timed(call, WARM_UP_CALLS)
        once = self.timed(call, WARM_UP_CALLS)                   # the same in all ranks, as the number of calls must be
        calls = math.ceil(SAMPLE_S / once)
        batches = int(seconds / (calls * once))
        return [self.timed(call, calls) for _ in range(max(MIN_BATCHES, batches))]


def calibrate(seconds: float) -> dict[str, list[float]]:
    """[median, spread] by name and unit, measured in about `seconds`; of several ranks the slowest.

    spread: (90th - 10th percentile) / median over batches of calls.
    """
    calibration = Calibration()
    works = calibration.works()
    rates = {}
    for name, work in works.items():
        times = calibration.sample(work.call, seconds / len(works))
        low, *_, high = statistics.quantiles(times, n=10)
        median = statistics.median(times)
        rates[name] = [work.rate(median), (high - low) / median]
    if calibration.ranks > 1:
        calibration.dist.destroy_process_group()
    return rates


if __name__ == "__main__":
    measured = calibrate(float(sys.argv[1]))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(measured))
