"""Criteria of the steps of day.py. Each function takes a `Day` and the step's figures, to which it adds results.

It returns remarks, which make the step yellow, or raises Verdict with another verdict and the reason.
"""
from __future__ import annotations

import gzip
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tests"))

from dry_run import price

if TYPE_CHECKING:
    from day import Day

Facts = dict[str, Any]
# Means and standard deviations of ten runs of the same mathematics, published with modded-nanogpt 2026-02-03_VeTuned.
PUBLISHED = {250: (4.546, 0.005), 1547: (3.278, 0.002)}
MAX_LOSS_DIFFERENCE = 0.05               # nats per token, in each step, between the fast path and float32
MAX_RELATIVE_DIFFERENCE = 2e-3           # between the losses of different world sizes
SLOW_STEP_RATIO = 1.15                   # measured / predicted
LOW_RATE_RATIO = 0.85                    # measured / assumed
SLOW_OPERATION_RATIO = 1.1               # trainer / plain PyTorch
MEMORY_RATIOS = 0.4, 1.1                 # measured / predicted peak, least and most
UNIFORM_LOSS = math.log(50_257)          # nats per token
ATTENTION_LIMIT = 60                     # s for one kernel, including compilation
RATE_BY_KERNEL = dict(varlen="FA2", FA3="FA3", FA4="FA3", reference="reference")  # kernel -> its rate in rates.json
INSTALL_HINT = "run pip install -r requirements-gpu.txt for faster attention, and repeat this step"
# Pattern of a kernel's name -> its group, and the part of the price that contains it. The first match counts.
GROUPS = {
    r"nccl": ("communication", "exposed communication"),
    r"(flash|fmha|attn|attention).*(bwd|backward)": ("attention backward", "attention"),
    r"flash|fmha|attn|attention": ("attention forward", "attention"), r"relu_sq_kernel": ("relu_sq", "products"),
    r"add_rows_kernel": ("add_rows", "memory-bound kernels"),
    r"memcpy|memset": ("copies", "memory-bound kernels"),
    r"gemm|nvjet|cutlass|cublas|xmma|splitk|gemv": ("matmuls", "products"),
    r"triton.*(exp2|log2)": ("loss", "memory-bound kernels"), r"triton.*sigmoid": ("gates", "memory-bound kernels"),
    r"": ("other", "memory-bound kernels")}

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
    """Does this machine have everything that a run needs, and is the GPU free, cool and healthy?"""
    found = day.probe("preflight")
    figures |= found["facts"]
    day.facts |= found["facts"]
    if found["problems"]:
        raise Verdict("red", "; ".join(found["problems"]))
    return found["remarks"]

def slow_attention(day: Day, kernel: str) -> list[str]:
    major, minor = day.facts["capability"]
    if major in (9, 10) and kernel.startswith("varlen"):
        return [f"attention is FlashAttention 2 ({kernel}) on a GPU of capability {major}.{minor}: {INSTALL_HINT}"]
    return []

def attention(day: Day, figures: Facts) -> list[str]:
    """Which kernels compute attention correctly, which one does the trainer choose, and which is the fastest?"""
    ms = {}
    remarks = []
    for name in day.facts["kernels"]:                         # in the order in which the trainer tries them
        try:
            found = day.probe("attention", f"--kernel={name}", name=f"attention-{name}", limit=ATTENTION_LIMIT)
        except Verdict as error:                              # continue with the other kernels
            verdict, reason = error.args
            if verdict == "skipped":
                raise
            found = dict(refused=reason)
            remarks.append(reason)
        figures[name] = found
        if found.get("wrong"):
            raise Verdict("red", f"{name} passes the trainer's check: {'; '.join(found['wrong'])}")
        if "refused" not in found:
            ms[name] = sum(stage["ms"] for stage in found["stages"])
    if not ms:
        refused = [f"{name}: {found['refused']}" for name, found in figures.items()]
        raise Verdict("red", f"no attention kernel works: {'; '.join(refused)}")
    chosen = next(iter(ms))
    fastest = min(ms, key=ms.__getitem__)
    if fastest != chosen:
        remarks.append(f"the trainer chooses {chosen} ({ms[chosen]:.2f} ms), but {fastest} takes {ms[fastest]:.2f} ms: "
                       f"--attention={fastest}")
    return remarks + slow_attention(day, figures[chosen]["kernel"])

def ceilings(day: Day, figures: Facts) -> list[str]:
    """Does this GPU reach the rates that predictions assume?"""
    figures |= day.probe("ceilings")
    rates = figures["rates"]
    for kernel, found in day.figures.get("attention", {}).items():
        if "stages" in found:
            kind = RATE_BY_KERNEL[kernel]
            rates[kind] = max(rates.get(kind, 0.0), found["stages"][-1]["flop_per_s"])
    cards = price.load(price.RATES)["cards"]
    card = next((name for name in cards if name in day.facts["card"]), "")
    remarks = []
    for kind, assumed in cards.get(card, dict(rates={}))["rates"].items():
        relative = rates.get(kind, math.inf) / (assumed["peak"] * assumed["share"])
        if relative < LOW_RATE_RATIO:
            remarks.append(f"{kind}: {relative:.2f} of the rate that predictions assume for {card}")
    return remarks

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
def kernel_groups(trace: Path, steps: int, category: str) -> dict[str, float]:
    """Compute the ms per step of each group of kernels in a profile, and of the gaps between kernels."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    events = [event for event in events if event.get("cat") in (category, "gpu_memcpy", "gpu_memset")]
    if category not in {event["cat"] for event in events}:
        raise Verdict("red", f"{trace} has no events of category {category}")
    events.sort(key=lambda event: event["ts"])
    us = Counter()
    end = events[0]["ts"]
    for event in events:
        name = event["name"].lower()
        group = next(group for pattern, (group, _) in GROUPS.items() if re.search(pattern, name))
        us[group] += event["dur"]
        us["gaps"] += max(0.0, event["ts"] - end)
        end = max(end, event["ts"] + event["dur"])
    return {group: found / 1000 / steps for group, found in us.most_common()}

def predicted_parts(day: Day, kernel: str) -> dict[str, dict[str, float]]:
    """Return the expected ms by stage and part for this world size, scaled to the rates measured here; {} if unknown.
    """
    costs = price.load(price.EXPECTED_COSTS)
    attention_kind = "FA3" if kernel.startswith(("FA3", "FA4")) else "FA2"
    prediction = price.stored_prediction(costs)["worlds"].get(str(day.world_size()))
    measured = day.figures.get("ceilings", {}).get("rates", {})
    if day.cpu or prediction is None or not (measured or costs["card"] in day.facts["card"]):
        return {}
    scale = dict.fromkeys(price.PARTS, 1.0)
    assumed = price.Card(price.load(price.RATES), costs["card"]).rates
    kinds = {"products": "bfloat16", "memory-bound kernels": "memory", "attention": attention_kind}
    for part, kind in kinds.items():
        scale[part] = assumed[kind] / measured.get(kind, assumed[kind])
    parts = {}
    for stage, found in prediction[attention_kind]["stages"].items():
        parts[stage] = {part: scale[part] * ms for part, ms in found["mean"]["parts"].items()}
    return parts

def predicted_peak_mib(day: Day) -> int | None:
    """Return the largest peak of the expected costs for this world size; None if unknown."""
    world = price.load(price.EXPECTED_COSTS)["worlds"].get(str(day.world_size()))
    if day.cpu or world is None:
        return None
    return max(phase["sums"]["peak_bytes"] for phase in world["phases"].values()) >> 20

def compare_stages(folder: Path, predicted: dict[str, dict[str, float]], figures: Facts) -> list[str]:
    """Compare the ms per step of each stage with the prediction. Name the part of the profile that exceeds it most."""
    remarks = []
    for stage, ms in price.measured_stages(folder).items():
        expected = sum(predicted.get(stage, {}).values())
        figures[stage] = dict(ms=ms, predicted_ms=expected or None)
        if stage != "stage 4" and ms and expected and ms > SLOW_STEP_RATIO * expected:         # stage 4 is profiled
            remarks.append(f"{stage}: {ms:.1f} ms a step, {ms / expected:.2f} of the predicted {expected:.1f}")
    if remarks and "kernels" in figures:
        excess = Counter()
        part_of_group = dict(GROUPS.values()) | dict(gaps="launches")
        for group, ms in figures["kernels"].items():
            excess[part_of_group[group]] += ms
        excess.subtract(predicted["stage 4"])
        part, ms = excess.most_common(1)[0]
        remarks.append(f"largest excess: {part}, {ms:+.1f} ms in a profiled step of the extension")
    return remarks

def stages(day: Day, figures: Facts) -> list[str]:
    """Does the trainer run all stages without a recompile, within the predicted memory and times?"""
    # The profile is of the extension, so that it does not slow down the stages whose times are compared.
    first = 14 if day.cpu else 64
    fast_path = ["--dtype=bfloat16", "--head=emulated"] if day.cpu else []
    folder = day.train("stages", *short_run_flags(day), *fast_path,
                       script=("tests/profile_steps.py", f"{first}:{first + 2}"))
    header, = price.events_of(folder, "header")
    result, = price.events_of(folder, "result")
    losses = [event["train_loss"] for event in price.events_of(folder, "step")]
    peak, predicted_peak = result["peak_memory_mib"].get("allocated", 0), predicted_peak_mib(day)
    figures |= dict(run_dir=str(folder), attention=header["attention"], head=header["head"], world=header["world_size"],
                    first_loss=losses[0], last_loss=losses[-1], val_loss=result["val_loss"], peak_mib=peak,
                    predicted_peak_mib=predicted_peak, recompiles=result.get("recompiles", 0))
    figures["phases_ms"] = {event["name"]: event["ms"] for event in price.events_of(folder, "phase")}
    figures["kernels"] = kernel_groups(folder / "trace_rank0.json.gz", 2, "cpu_op" if day.cpu else "kernel")
    predicted = predicted_parts(day, header["attention"])
    remarks = compare_stages(folder, predicted, figures) + slow_attention(day, header["attention"])
    if figures["recompiles"]:
        raise Verdict("red",
                      f"{figures['recompiles']} graphs were compiled after the warm-up; its output has the reasons")
    least, most = MEMORY_RATIOS
    if predicted_peak and not least < peak / predicted_peak < most:
        raise Verdict("red", f"peak memory {peak} MiB, predicted {predicted_peak} MiB")
    if not result["val_loss"] < UNIFORM_LOSS:
        raise Verdict("red", f"loss {result['val_loss']:.3f} after {len(losses)} steps, "
                             f"uniform guess {UNIFORM_LOSS:.3f}")
    if not predicted and not day.cpu:
        remarks.append(f"times are not judged: no prediction for {day.world_size()} x {day.facts['card']}")
    return remarks

def match(day: Day, figures: Facts) -> list[str]:
    """Does the fast path (bfloat16, fp8, compiled kernels) have the losses of plain float32 at every step?

    Compares the losses of the next token, because the multi-token loss is a sum and not in nats per token.
    """
    # All these steps are in the first stage, so smaller batches in later stages do not change them. With large batches,
    # float32 without compiled kernels needs more memory than a GPU has. The micro-batch size changes only rounding.
    steps = 4 if day.cpu else 12
    flags = [*short_run_flags(day), f"--max_steps={steps}", f"--stages={day.facts['stages_first_batch']}"]
    folders = [day.figures.get("stages", {}).get("run_dir") or day.train("match-fast", *flags)]
    folders.append(day.train("match-float32", *flags, "--dtype=float32", "--head=plain", "--attention=reference",
                             "--compile=0", "--micro_batch_size=1"))
    logs = [price.events_of(Path(folder), "step")[:steps] for folder in folders]
    fast, plain = ([event["train_loss_next"] for event in log] for log in logs)
    differences = [a - b for a, b in zip(fast, plain, strict=True)]
    figures |= dict(fast=fast, float32=plain, differences=differences)
    if not all(abs(difference) < MAX_LOSS_DIFFERENCE for difference in differences):  # False for NaN
        raise Verdict("red", f"losses of the fast path minus those of float32: {differences}, "
                             f"allowed +- {MAX_LOSS_DIFFERENCE}")
    return []

def ranks(day: Day, figures: Facts) -> list[str]:
    """Do several GPUs compute the losses of one, and do all ranks have the same weights?"""
    world_size = 2 if day.cpu else day.world_size()
    if world_size < 2:
        raise Verdict("not required", "one GPU: a comparison of ranks needs two")
    files = f"--files={day.out}/text_train.bin"
    one, several = (day.probe("ranks", files, name=f"ranks-{count}", ranks=count) for count in (1, world_size))
    differences = [abs(a / b - 1) for a, b in zip(several["losses"], one["losses"], strict=True)]
    figures |= dict(world=world_size, losses=one["losses"], relative_differences=differences)
    wrong = [difference for difference in differences if not difference < MAX_RELATIVE_DIFFERENCE]  # True for NaN
    if wrong:
        raise Verdict("red", f"losses of {world_size} ranks and of one differ by {wrong[0]:.1e}, "
                             f"allowed {MAX_RELATIVE_DIFFERENCE:.0e}")
    if len(set(several["hashes"])) != 1:
        raise Verdict("red", f"the ranks end with different weights: sha256 {several['hashes']}")
    return []

def check_loss(folder: Path, step: int, figures: Facts) -> None:
    """Compare the validation loss after this many steps with the published loss, if there is one."""
    losses = {event["step"]: event["val_loss"] for event in price.events_of(folder, "val")}
    figures |= dict(step=step, val_loss=losses[step])
    if step in PUBLISHED:
        mean, deviation = PUBLISHED[step]
        # Allow three standard deviations of the difference between one run and the mean of ten.
        allowed = 3 * deviation * math.sqrt(1.1)
        figures |= dict(published=mean, allowed=allowed)
        if not abs(losses[step] - mean) < allowed:
            raise Verdict("red", f"loss {losses[step]:.4f} at step {step}, published {mean}, allowed +- {allowed:.3f}")

def loss(day: Day, figures: Facts) -> list[str]:
    """Does the real run have the published loss at step 250?"""
    if not has_fineweb() and not day.cpu:
        raise Verdict("not required",
                      "no FineWeb shards: run python data/cached_fineweb10B.py 1, which needs a network")
    step = 5 if day.cpu else 250
    check_loss(day.train("loss", f"--max_steps={step + 1}", f"--val_every={step}"), step, figures)
    return []

def tests(day: Day, figures: Facts) -> list[str]:
    """Do the tests that need a GPU pass?"""
    if not day.facts["pytest"]:
        raise Verdict("skipped", "pytest is not installed: pip install pytest")
    chosen = ["tests/gpu", "-m", "gpu or gpus2"]
    if day.cpu:
        chosen = ["tests/gpu/test_gpu.py", "-k", "cpu and reset"]
    pytest = ("-m", "pytest", "-q", "-rfs", "--tb=short", "-p", "no:cacheprovider")
    figures["summary"] = day.call("tests", *pytest, *chosen)
    if not re.search(r"\b[1-9]\d* passed", figures["summary"]):
        raise Verdict("red", f"no test passed: {figures['summary']}")
    return []

def race(day: Day, figures: Facts) -> list[str]:
    """Does the whole run end with the published loss? Creates a record of it in DIR/records."""
    if not day.full:
        raise Verdict("not required", "--full is not given")
    if not has_fineweb() and not day.cpu:
        raise Verdict("skipped", "no FineWeb shards: run python data/cached_fineweb10B.py 9, which needs a network")
    folder = day.train("race", "--runs=3" if day.world_size() == 8 else "--runs=1")
    runs = sorted(folder.glob("seed_*")) or [folder]
    header, = price.events_of(runs[0], "header")
    for run in runs:
        figures[run.name] = run_figures = {}
        result, = price.events_of(run, "result")
        run_figures["train_time_ms"] = result["train_time_ms"]
        check_loss(run, result["steps"], run_figures)
    remarks = compare_stages(runs[0], predicted_parts(day, header["attention"]), figures)
    (day.out / "records").mkdir()
    new = ("records", "new", "Day", str(folder), "--kind=comparison", f"--records={day.out / 'records'}")
    try:
        day.call("race-record", *new)
    except Verdict as failure:                                # the run itself is correct
        remarks.append(failure.args[1])
    return remarks
