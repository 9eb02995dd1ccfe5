"""What machine is this, in what state, and how fast: fingerprint, state around a run, and a short calibration.

    python calibrate.py SECONDS        one process, or several under torchrun; the last line is JSON
The trainer is not involved: two calibrations that differ mean that the machine changed, not the code."""
from __future__ import annotations

import contextlib, importlib.metadata, json, math, os, platform, re, statistics, subprocess, sys, time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GPU_FIELDS = ("name,driver_version,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,"
              "clocks_throttle_reasons.active")                # the last by its old name, which new drivers know too
QUERY_S = 10                            # nvidia-smi answers in well under a second, and never on a lost device
CPU = Path("/sys/devices/system/cpu")
STOLEN = 7                              # field of the first line of /proc/stat: time that other guests of the host had
SAMPLE_S = 0.02                         # one batch of calls: far above the clock's resolution
WARM_UP_CALLS, MIN_BATCHES = 3, 5
SIZES = {"cuda": (8192, 1 << 30, 1 << 26), "cpu": (1024, 1 << 28, 1 << 24)}      # matrix; bytes copied; bytes reduced

def text_of(path: str | Path) -> str:
    """A file of the kernel's, "" where it cannot be read: virtual machines and other systems lack many."""
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""

def gpus() -> list[dict[str, str]]:
    """Name, driver, clocks, power and reasons for throttling of every NVIDIA device; empty without nvidia-smi."""
    query = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        out = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout
        return [dict(zip(GPU_FIELDS.split(","), map(str.strip, line.split(",")))) for line in out.splitlines()]
    return []

def state() -> dict[str, Any]:
    """What may change between two runs: clocks, power, throttling, load."""
    mhz = [float(x) for x in re.findall(r"cpu MHz\s*: ([\d.]+)", text_of("/proc/cpuinfo"))]
    throttled = [int(text_of(path) or 0) for path in CPU.glob("cpu*/thermal_throttle/core_throttle_count")]
    jiffies = text_of("/proc/stat").partition("\n")[0].split()[1:]
    return {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "gpus": gpus(), "load_1min": round(os.getloadavg()[0], 2),
            "cpu_mhz": [min(mhz), max(mhz)] if mhz else None, "throttle_events": sum(throttled) if throttled else None,
            "governors": sorted({text_of(path).strip() for path in CPU.glob("cpu*/cpufreq/scaling_governor")}) or None,
            "stolen_s": int(jiffies[STOLEN]) / os.sysconf("SC_CLK_TCK") if len(jiffies) > STOLEN else None}

def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

def installed(*names: str) -> str | None:
    """Version of the first of these packages that is installed, without importing it."""
    return next((d.version for name in names for d in importlib.metadata.distributions(name=name)), None)

def fingerprint() -> dict[str, Any]:
    """What should not change during a bench."""
    model = re.search(r"model name\s*: (.*)", text_of("/proc/cpuinfo"))
    return {"cpu": model[1] if model else platform.machine(), "cores": cores(), "system": platform.release(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "python": platform.python_version(), "torch": installed("torch"), "triton": installed("triton"),
            "nccl": installed("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")}

def calibrate(seconds: float) -> dict[str, list[float]]:
    """[median, spread] by name and unit, measured in about `seconds`; of several ranks the slowest. Imports torch.
    spread: (90th - 10th percentile) / median over batches of calls."""
    import torch
    import torch.distributed as dist
    ranks, kind = int(os.environ.get("WORLD_SIZE", 1)), "cuda" if torch.cuda.is_available() else "cpu"
    device, wait = torch.device(kind), torch.cuda.synchronize if kind == "cuda" else lambda: None
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    side, copied, reduced = SIZES[kind]
    matrix, product = torch.ones(2, side, side, dtype=torch.bfloat16 if kind == "cuda" else None, device=device)
    source, target = torch.ones(2, copied // 4, device=device)                                # 4 bytes: float32
    scalar, message = torch.ones(1, device=device), torch.zeros(reduced // 4, device=device)
    work = {"matrix product TFLOP/s": (lambda: torch.mm(matrix, matrix, out=product), lambda s: 2 * side**3 / s / 1e12),
            "copy GB/s": (lambda: target.copy_(source), lambda s: 2 * copied / s / 1e9),          # read and written
            "host launch operations/s": (lambda: scalar.add_(1), lambda s: 1 / s)}
    if ranks > 1:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        work |= {"all_reduce GB/s": (lambda: dist.all_reduce(message), lambda s: reduced / s / 1e9),
                 "all_reduce latency us": (lambda: dist.all_reduce(scalar), lambda s: s * 1e6)}

    def timed(call: Callable[[], Any], calls: int) -> float:
        """Seconds per call of the slowest rank."""
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        taken = torch.tensor((time.perf_counter() - began) / calls, dtype=torch.float64, device=device)
        if ranks > 1:
            dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    rates = {}
    for name, (call, value) in work.items():
        timed(call, WARM_UP_CALLS)
        once = timed(call, WARM_UP_CALLS)                        # the same in all ranks, as the number of calls must be
        calls = math.ceil(SAMPLE_S / once)
        times = [timed(call, calls) for _ in range(max(MIN_BATCHES, int(seconds / len(work) / (calls * once))))]
        low, *_, high = statistics.quantiles(times, n=10)
        median = statistics.median(times)
        rates[name] = [value(median), (high - low) / median]
    if ranks > 1:
        dist.destroy_process_group()
    return rates

if __name__ == "__main__":
    measured = calibrate(float(sys.argv[1]))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(measured))
