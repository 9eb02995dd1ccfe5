"""Criteria of the steps of day.py. Each function takes a `Day` and the step's figures, to which it adds results.

It returns remarks, which make the step yellow, or raises Verdict with another verdict and the reason.
"""
from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tests"))

from dry_run import price

if TYPE_CHECKING:
    from day import Day

Facts = dict[str, Any]
# Mean and standard deviation of ten runs of the same mathematics, published with modded-nanogpt 2026-02-03_VeTuned.
PUBLISHED_STEP, PUBLISHED_LOSS, PUBLISHED_DEVIATION = 250, 4.546, 0.005
MAX_LOSS_DIFFERENCE = 0.05               # nats per token, in each step, between the fast path and float32
SLOW_STEP_RATIO = 1.15                   # measured / predicted
SLOW_OPERATION_RATIO = 1.1               # trainer / plain PyTorch
MEMORY_RATIOS = 0.4, 1.1                 # measured / predicted peak, least and most
UNIFORM_LOSS = math.log(50_257)          # nats per token
FREE_FRACTION = 0.95                     # of the GPUs' memory before a run
INSTALL_HINT = "run pip install -r requirements-gpu.txt for faster attention, and repeat this step"

class Verdict(Exception):
    """The verdict of a step, and the reason."""

def short_run_flags(day: Day) -> list[str]:
    """Return flags for a run through all stages in a few steps, on FineWeb or otherwise on the text of `pocket`."""
    steps = (12, 6) if day.cpu else (60, 10)
    flags = [f"--num_scheduled_steps={steps[0]}", f"--num_extension_steps={steps[1]}", "--epochs=0", "--val_every=0"]
    if has_fineweb() and not day.cpu:
        return [*flags, "--val_tokens=2097152"]
    val = 512 if day.cpu else 262_144
    return [*flags, f"--train_files={day.out}/text_train.bin", f"--val_files={day.out}/text_val.bin",
            f"--val_tokens={val}", f"--val_batch_tokens={val}"]

def has_fineweb() -> bool:
    folder = ROOT / "data/fineweb10B"
    return any(folder.glob("fineweb_train_*.bin")) and any(folder.glob("fineweb_val_*.bin"))


# ---- Before the trainer runs
def preflight(day: Day, figures: Facts) -> list[str]:
    """Does torch find a GPU, and is its memory free?"""
    figures |= day.probe("preflight")
    day.facts |= figures
    if figures["free_fraction"] < FREE_FRACTION:
        return [f"{figures['free_fraction']:.0%} of the memory is free: another process uses the GPU"]
    return []

def slow_attention(day: Day, kernel: str) -> list[str]:
    major, minor = day.facts["capability"]
    if major in (9, 10) and kernel.startswith("varlen"):
        return [f"attention is FlashAttention 2 ({kernel}) on a GPU of capability {major}.{minor}: {INSTALL_HINT}"]
    return []

def operations(day: Day, figures: Facts) -> list[str]:
    """Does every operation match float64, and is it faster than plain PyTorch?"""
    found = day.probe("operations")
    wrong = []
    remarks = found["left_out"]
    for case in found["kernels"]:
        figures[case["name"]] = ms = case["ms"]
        wrong += case["wrong"]
        if ms.get("trainer", 0.0) > SLOW_OPERATION_RATIO * ms.get("plain", math.inf):
            remarks.append(f"{case['name']}: {ms['trainer']:.3f} ms, plain PyTorch takes {ms['plain']:.3f}")
    if wrong:
        raise Verdict("red", "; ".join(wrong))
    return remarks


# ---- Runs
def events_of(folder: Path, kind: str) -> list[Facts]:
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    return [event for event in events if event["type"] == kind]

def measured_stages(folder: Path) -> dict[str, float]:
    """Return the mean ms per step of each stage before the extension."""
    header, = events_of(folder, "header")
    ms_after = {event["step"]: event["train_time_ms"] for event in events_of(folder, "step")}
    num_stages = len(header["config"]["stages"]) - 1
    steps = header["config"]["num_scheduled_steps"] // num_stages
    found = {}
    for stage in range(num_stages):
        first = stage * steps + steps // 4                    # the host runs ahead at both ends of a stage
        last = (stage + 1) * steps - steps // 8
        found[f"stage {stage + 1}"] = (ms_after[last] - ms_after[first]) / (last - first)
    return found

def predicted(day: Day, kernel: str) -> tuple[dict[str, float], int]:
    """Return the predicted ms per step of each stage, and the peak in MiB, for this world size; {} and 0 if unknown."""
    costs = price.load(price.EXPECTED_COSTS)
    world_size = str(day.world_size())
    if day.cpu or world_size not in costs["worlds"]:
        return {}, 0
    peaks = [phase["sums"]["peak_bytes"] for phase in costs["worlds"][world_size]["phases"].values()]
    ms = {}
    if costs["card"] in day.facts["card"]:
        attention_kind = "FA3" if kernel.startswith(("FA3", "FA4")) else "FA2"
        for stage, found in price.predict(costs)["worlds"][world_size][attention_kind].items():
            ms[stage] = sum(found["parts"].values())
    return ms, max(peaks) >> 20

def stages(day: Day, figures: Facts) -> list[str]:
    """Does the trainer run all stages without a recompile, within the predicted memory and times?

    Profiles two steps: RUN_DIR has the trace, and the step's output a table of the longest operations.
    """
    # The profile is of the extension, so that it does not slow down the stages whose times are compared.
    first = 14 if day.cpu else 64
    fast_path = ["--dtype=bfloat16", "--head=emulated"] if day.cpu else []
    folder = day.train("stages", *short_run_flags(day), *fast_path,
                       script=("tests/profile_steps.py", f"{first}:{first + 2}"))
    header, = events_of(folder, "header")
    result, = events_of(folder, "result")
    losses = [event["train_loss"] for event in events_of(folder, "step")]
    peak = result["peak_memory_mib"].get("allocated", 0)
    predicted_ms, predicted_peak = predicted(day, header["attention"])
    figures |= dict(run_dir=str(folder), attention=header["attention"], head=header["head"], world=header["world_size"],
                    first_loss=losses[0], last_loss=losses[-1], val_loss=result["val_loss"], peak_mib=peak,
                    predicted_peak_mib=predicted_peak, recompiles=result.get("recompiles", 0))
    figures["phases_ms"] = {event["name"]: event["ms"] for event in events_of(folder, "phase")}
    remarks = slow_attention(day, header["attention"])
    for stage, ms in measured_stages(folder).items():
        expected = predicted_ms.get(stage, math.inf)
        figures[stage] = dict(ms=ms, predicted_ms=predicted_ms.get(stage))
        if ms > SLOW_STEP_RATIO * expected:
            remarks.append(f"{stage}: {ms:.1f} ms a step, {ms / expected:.2f} of the predicted {expected:.1f}")
    if figures["recompiles"]:
        raise Verdict("red",
                      f"{figures['recompiles']} graphs were compiled after the warm-up; its output has the reasons")
    least, most = MEMORY_RATIOS
    if predicted_peak and not least < peak / predicted_peak < most:
        raise Verdict("red", f"peak memory {peak} MiB, predicted {predicted_peak} MiB")
    if not result["val_loss"] < UNIFORM_LOSS:
        raise Verdict("red", f"loss {result['val_loss']:.3f} after {len(losses)} steps, "
                             f"uniform guess {UNIFORM_LOSS:.3f}")
    if not predicted_ms and not day.cpu:
        remarks.append(f"times are not judged: no prediction for {day.world_size()} x {day.facts['card']}")
    return remarks

def match(day: Day, figures: Facts) -> list[str]:
    """Does the fast path (bfloat16, fp8, compiled kernels, all GPUs) have the losses of plain float32 on one GPU?

    Compares the losses of the next token, because the multi-token loss is a sum and not in nats per token.
    """
    # All these steps are in the first stage, so smaller batches in later stages do not change them. With large batches,
    # float32 without compiled kernels needs more memory than a GPU has. The micro-batch size changes only rounding.
    steps = 4 if day.cpu else 12
    flags = [*short_run_flags(day), f"--max_steps={steps}", f"--stages={day.facts['stages_first_batch']}"]
    folders = [day.figures.get("stages", {}).get("run_dir") or day.train("match-fast", *flags)]
    folders.append(day.train("match-float32", *flags, "--dtype=float32", "--head=plain", "--attention=reference",
                             "--compile=0", "--micro_batch_size=1", ranks=1))
    logs = [events_of(Path(folder), "step")[:steps] for folder in folders]
    fast, plain = ([event["train_loss_next"] for event in log] for log in logs)
    differences = [a - b for a, b in zip(fast, plain, strict=True)]
    figures |= dict(fast=fast, float32=plain, differences=differences)
    if not all(abs(difference) < MAX_LOSS_DIFFERENCE for difference in differences):  # False for NaN
        raise Verdict("red", f"losses of the fast path minus those of float32: {differences}, "
                             f"allowed +- {MAX_LOSS_DIFFERENCE}")
    return []

def loss(day: Day, figures: Facts) -> list[str]:
    """Does the real run have the published loss at step 250?"""
    if not has_fineweb() and not day.cpu:
        raise Verdict("not required",
                      "no FineWeb shards: run python data/cached_fineweb10B.py 1, which needs a network")
    step = 5 if day.cpu else PUBLISHED_STEP
    folder = day.train("loss", f"--max_steps={step + 1}", f"--val_every={step}")
    found = {event["step"]: event["val_loss"] for event in events_of(folder, "val")}[step]
    # Allow three standard deviations of the difference between one run and the mean of ten.
    allowed = 3 * PUBLISHED_DEVIATION * math.sqrt(1.1)
    figures |= dict(step=step, val_loss=found, published=PUBLISHED_LOSS, allowed=allowed)
    if not day.cpu and not abs(found - PUBLISHED_LOSS) < allowed:
        raise Verdict("red", f"loss {found:.4f} at step {step}, published {PUBLISHED_LOSS}, allowed +- {allowed:.3f}")
    return []

def tests(day: Day, figures: Facts) -> list[str]:
    """Do the tests that need a GPU pass?"""
    if not day.facts["pytest"]:
        raise Verdict("skipped", "pytest is not installed: pip install pytest")
    chosen = ["tests/gpu", "-m", "gpu or gpus2"]
    if day.cpu:
        chosen = ["tests/gpu/test_gpu.py", "-k", "cpu-mlp"]
    pytest = ("-m", "pytest", "-q", "-rfs", "--tb=short", "-p", "no:cacheprovider")
    figures["summary"] = day.call("tests", *pytest, *chosen)
    return []
