"""What the several accounts of one run must agree in, so that an edit of one of them shows.

A run of this trainer is told twice: log.jsonl has every number to many digits, log.txt has them as people read them,
and its first lines name versions, hardware and seed. Losses stand there also as bits per byte, times also as the
average of a step, the end also as the last validation; the run directory has a date in its name; `bench` and `ablate`
note seconds and losses in their manifests. Two runs of different seeds have no loss in common, and no two runs have the
same clock readings. What all accounts tell alike after a careful forgery, no program finds in them; see history.py."""
from __future__ import annotations

import datetime
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools.layout import LOG, MANIFEST, TEXT_LOG, lines, text
from tools.logs import Run
from tools.rules import Problem, folder_name

LINE = re.compile(r"step:(\d+)/\d+ (?:val_loss:(\S+) )?train_time:(\d+)ms step_avg:(\S+)ms")
RUNNING = re.compile(r"Running PyTorch (\S+) compiled for CUDA (\S+) on (.*) with world_size (\d+)")
ABOUT = re.compile(r"preset (\S+), ([\d,]+) parameters .* seed (-?\d+)")
LAST = re.compile(r"training time ([\d.]+) s.*?, (\d+) steps, ([\d,]+) tokens; logs in (.*)")
BITS = re.compile(r"validation loss (\S+) nats per token = (\S+) bits per byte")
PEAK = re.compile(r"peak memory (\w.*)")
DATED = re.compile(r"(?:^|/)(20\d\d)(\d\d)(\d\d)-\d{6}-")          # a run directory that the trainer named
ROUNDING = 1e-9                    # relative, of numbers that are written with all their digits
CLOCK_MS = 6e-4                    # log.jsonl has times in thousandths of a millisecond
SHARED = 0.5                       # share of equal losses above which two seeds are one run
PNG = b"\x89PNG\r\n\x1a\n"
ALWAYS_LOGGED = "hardware", "world_size", "seed"    # of what the head of log.txt says; the rest came later
TO_FILL_IN = "0", "-1"              # flags by which the trainer decides
LENGTHS = "num_scheduled_steps", "num_extension_steps"             # a time budget decides these
FEW_TIMES = 3                      # clock readings that may agree by chance, or in made-up logs
A_DAY = datetime.timedelta(days=1)  # what dates of two time zones may differ by


class Told(NamedTuple):
    """A line of a step or of a validation in log.txt, as printed."""
    step: int
    loss: float | None
    ms: float
    average_ms: float
    decimals: int                  # of the loss


def contradictions(run: Run) -> Iterator[Problem]:
    """In what the accounts of a run differ: what, found, expected."""
    folder = run.path.parent
    name = folder_name(run)
    if not (folder / TEXT_LOG).is_file():
        yield f"{name}, {TEXT_LOG}", "nothing", f"the text beside {LOG}, as the trainer writes it"
        return

    events = events_of(run.path)
    printed = text(folder / TEXT_LOG)
    unlike_text = [*head(events, printed), *curve(events, printed), *end(events, printed)]
    for what, found, expected in [*within(events), *unlike_text]:
        yield f"{name}, {what}", found, expected


def events_of(log: Path) -> list[dict[str, Any]]:
    """Those of log.jsonl that tell of the run itself."""
    found = []
    for line in text(log).splitlines():
        if line.strip() and not line.startswith('{"type": "comms"'):
            found.append(json.loads(line))
    return found


def of_type(events: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] in kinds]


def close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=ROUNDING)


# ---- log.jsonl with itself
def within(events: list[dict[str, Any]]) -> Iterator[Problem]:
    """The seed, the order of times, the end, and the two units of a loss."""
    header = of_type(events, "header")[0]
    set_seed = header["config"].get("seed", header.get("seed"))
    if header.get("seed") != set_seed:
        yield f"seed of {LOG}", header.get("seed"), f"{set_seed}, as its config has it"

    timed = of_type(events, "step", "val", "resumed")
    for before, after in zip(timed, timed[1:]):
        if "resumed" in (before["type"], after["type"]):
            continue
        if after["train_time_ms"] < before["train_time_ms"]:
            yield f"time at step {after['step']}", after["train_time_ms"], f"no less than {before['train_time_ms']} ms"

    last = of_type(events, "val")[-1]
    result = of_type(events, "result")[-1]
    for key in ("val_loss", "train_time_ms"):
        if result[key] != last[key]:
            yield f"{key} of the result", result[key], f"{last[key]}, as the last validation has it"
    if result["steps"] != last["step"]:
        yield "steps of the result", result["steps"], f"{last['step']}, as the last validation has it"
    for step in of_type(events, "step")[-1:]:
        if step.get("tokens", result["tokens"]) != result["tokens"]:
            yield "tokens of the result", result["tokens"], f"{step['tokens']}, as the last step has it"
    yield from unlike_flags(header)
    yield from two_units(of_type(events, "val", "result"))


def unlike_flags(header: dict[str, Any]) -> Iterator[Problem]:
    """Settings of a header that are not what its flags made them, as far as flags are plain numbers and words."""
    for name, given in header.get("changed", {}).items():
        setting = header["config"].get(name)
        if given in TO_FILL_IN or (name in LENGTHS and header["config"].get("time_budget")):
            continue
        if isinstance(setting, (int, float)):
            same = as_number(given) in (setting, None)
        else:
            same = not isinstance(setting, str) or setting == given
        if not same:
            yield f"{name} of {LOG}", setting, f"{given}, as its flag says"


def as_number(given: str) -> float | None:
    try:
        return float(given)
    except ValueError:
        return None


def two_units(validations: list[dict[str, Any]]) -> Iterator[Problem]:
    """Bits per byte and nats per token have one ratio in a run."""
    known = [event for event in validations if event.get("val_bpb")]
    if not known:
        return
    ratio = known[0]["val_loss"] / known[0]["val_bpb"]
    for event in known:
        follows = event["val_bpb"] * ratio
        if not close(event["val_loss"], follows):
            yield f"loss at step {event.get('step', 'last')}", event["val_loss"], f"{follows:.6f}, by its bits per byte"


# ---- log.jsonl with log.txt
def head(events: list[dict[str, Any]], printed: str) -> Iterator[Problem]:
    """Versions, hardware, seed and settings."""
    header = of_type(events, "header")[0]
    console = read_head(printed)
    missing = [key for key in ALWAYS_LOGGED if key not in console]
    if missing:
        yield f"first lines of {TEXT_LOG}", f"no {', '.join(missing)}", "all that the trainer prints"
    for key, found in console.items():
        stated = header.get(key)
        if key == "changed":
            stated = settings_as_printed(header.get(key, {}))
        if key in header or key in ALWAYS_LOGGED:
            if str(stated) != found:
                yield f"{key} of {LOG}", stated, f"{found}, as the first lines of {TEXT_LOG} have it"


def settings_as_printed(changed: dict[str, str]) -> str:
    if not changed:
        return "nothing"
    return ", ".join(f"{name}={value}" for name, value in changed.items())


def read_head(printed: str) -> dict[str, str]:
    """What the first lines of log.txt say, by the key of the header; a later head is that of a resumed run."""
    found: dict[str, str] = {}
    for line in printed.splitlines():
        if line.startswith("step:"):
            break
        running = RUNNING.fullmatch(line)
        about = ABOUT.fullmatch(line)
        if line.startswith("Running Python "):
            found["python"] = line.removeprefix("Running Python ")
        elif running:
            found |= dict(zip(("torch", "cuda", "hardware", "world_size"), running.groups()))
        elif about:
            found |= {"preset": about[1], "params_total": about[2].replace(",", ""), "seed": about[3]}
        elif line.startswith("changed from the preset: "):
            found["changed"] = line.removeprefix("changed from the preset: ")
    return found


def told(printed: str) -> list[Told]:
    found = []
    for line in printed.splitlines():
        match = LINE.fullmatch(line)
        if match:
            step, loss, ms, average = match.groups()
            decimals = 0
            if loss is not None:
                decimals = len(loss.partition(".")[2])
                loss = float(loss)
            found.append(Told(int(step), loss, float(ms), float(average), decimals))
    return found


def curve(events: list[dict[str, Any]], printed: str) -> Iterator[Problem]:
    """Every step and every validation, in order."""
    noted = of_type(events, "step", "val")
    shown = told(printed)
    if len(noted) != len(shown):
        yield f"steps and validations of {TEXT_LOG}", len(shown), f"{len(noted)}, as {LOG} has them"
        return
    for event, line in zip(noted, shown):
        yield from unlike(event, line)


def unlike(event: dict[str, Any], line: Told) -> Iterator[Problem]:
    """Where a line of log.txt is not the event, rounded."""
    step = event["step"]
    ms = event["train_time_ms"]
    loss = event.get("val_loss")
    where = f"step {step}"
    if step != line.step or (loss is None) != (line.loss is None):
        yield where, line, f"{event}, as {LOG} has it"
        return
    if loss is not None and abs(line.loss - loss) > 0.5 * 10.0**-line.decimals + ROUNDING:
        yield f"{where}, loss", loss, f"{line.loss}, as {TEXT_LOG} has it"
    if abs(line.ms - ms) > 0.5 + CLOCK_MS:
        yield f"{where}, ms", ms, f"{line.ms:.0f}, as {TEXT_LOG} has it"
    if abs(line.average_ms - ms / max(step, 1)) > 0.005 + CLOCK_MS:
        yield f"{where}, ms", ms, f"{line.average_ms} a step, as {TEXT_LOG} has it (step_avg)"


def end(events: list[dict[str, Any]], printed: str) -> Iterator[Problem]:
    """The last lines: loss, bits, time, steps, tokens, memory."""
    result = of_type(events, "result")[-1]
    for match in BITS.finditer(printed):
        for key, found in zip(("val_loss", "val_bpb"), match.groups()):
            if f"{result.get(key, math.nan):.4f}" != found:
                yield f"{key} of the result", result.get(key), f"{found}, as {TEXT_LOG} has it"

    if not LAST.search(printed):
        yield f"last lines of {TEXT_LOG}", "no training time", "time, steps and tokens, as the trainer prints them"
    for match in LAST.finditer(printed):
        seconds, steps, tokens, folder = match.groups()
        expected = {"seconds": f"{result['train_time_ms'] / 1000:.2f}", "steps": str(result["steps"]),
                    "tokens": f"{result['tokens']:,}", "run_dir": result.get("run_dir", folder)}
        found = {"seconds": seconds, "steps": steps, "tokens": tokens, "run_dir": folder}
        for key in found:
            if found[key] != expected[key]:
                yield f"{key} of the result", expected[key], f"{found[key]}, as {TEXT_LOG} has it"

    memory = " ".join(f"{kind}: {mib} MiB" for kind, mib in result.get("peak_memory_mib", {}).items())
    for match in PEAK.finditer(printed):
        if match[1] != memory:
            yield "peak memory of the result", memory, f"{match[1]}, as {TEXT_LOG} has it"


# ---- Logs with a manifest
def unlike_manifest(folder: Path) -> Iterator[Problem]:
    """What a manifest of `bench` or `ablate` notes otherwise than the logs beside it, and those logs with themselves: a
    bench keeps no log.txt. folder: holds both."""
    ends = [end for end in lines(folder / MANIFEST, "end") if end["outcome"] == "done"]
    for noted in ends:
        place = folder / noted["folder"]
        logs_there = [place / log for log in noted.get("logs", ()) if (place / log).is_file()]
        if not logs_there:
            logs_there = sorted(place.rglob(LOG))
        if len(logs_there) != 1 or logs_there[0].name != LOG:
            continue                                            # another trainer's log, or several runs
        events = events_of(logs_there[0])
        for what, found, expected in within(events):
            yield f"{noted['folder']}, {what}", found, expected
        for what, found, expected in unlike_its_end(events, noted):
            yield f"{noted['folder']}, {what}", found, f"{expected}, as the manifest notes"
    yield from unlike_pairs(folder, ends)


def unlike_its_end(events: list[dict[str, Any]], noted: dict[str, Any]) -> Iterator[Problem]:
    header = of_type(events, "header")[0]
    result = of_type(events, "result")[-1]
    seconds = result["train_time_ms"] / 1000
    if noted.get("val_loss") is not None and not close(result["val_loss"], noted["val_loss"]):
        yield "loss", result["val_loss"], noted["val_loss"]
    if noted.get("train_s") is not None and not close(seconds, noted["train_s"]):
        yield "seconds", seconds, noted["train_s"]
    if noted.get("wall_s") is not None and seconds > noted["wall_s"]:
        yield "seconds", seconds, f"less than {noted['wall_s']}"
    for key in ("seed", "source_sha256"):
        if None not in (header.get(key), noted.get(key)) and header[key] != noted[key]:
            yield key, header[key], noted[key]


def unlike_pairs(folder: Path, ends: list[dict[str, Any]]) -> Iterator[Problem]:
    """Seconds of a pair that are not those of its runs."""
    seconds = {(end.get("pair"), end.get("side")): end.get("train_s") for end in ends}
    for pair in lines(folder / MANIFEST, "pair"):
        for side in "AB":
            noted = pair.get(f"{side.lower()}_s")
            ran = seconds.get((pair["pair"], side))
            if noted is not None and ran is not None and not close(noted, ran):
                yield f"pair {pair['pair']}, {side}", noted, f"{ran} s, as the end of its run notes"


# ---- Runs with each other
def copies(runs: list[Run]) -> Iterator[Problem]:
    """Runs that are one run, given out for two."""
    for at, run in enumerate(runs):
        for earlier in runs[:at]:
            why = same_run(earlier, run)
            if why:
                yield folder_name(run), f"{why} of {folder_name(earlier)}", "each run once"


def same_run(one: Run, other: Run) -> str:
    """What shows that two logs are of one run, or ""."""
    times = clock_readings(one)
    if len(times) > FEW_TIMES and times == clock_readings(other):
        return "the clock readings"
    if one.seed == other.seed:
        return ""                                               # a seed that is repeated may have its losses again
    losses, others = losses_by_step(one), losses_by_step(other)
    equal = [step for step, loss in losses.items() if others.get(step) == loss]
    if losses and len(equal) > SHARED * len(losses):
        return f"{len(equal)} of {len(losses)} losses, under another seed,"
    return ""


def clock_readings(run: Run) -> list[float]:
    return [seconds for _, seconds, _ in run.steps if seconds is not None]


def losses_by_step(run: Run) -> dict[tuple[int, str], float]:
    found = {(point.step, "validation"): point.loss for point in run.val}
    for step, _, loss in run.steps:
        if loss is not None:
            found[step, "training"] = loss
    return found


# ---- Pictures
def is_png(data: bytes) -> bool:
    """A whole PNG: its chunks are as long and sum up as they say, and the rows unpack to the size in its head.

    That the curves in it are those of the logs, no byte tells: versions of a library draw the same data otherwise.
    """
    if not data.startswith(PNG):
        return False
    chunks: dict[bytes, bytes] = {}
    at = len(PNG)
    while at < len(data):
        length = int.from_bytes(data[at:at + 4], "big")
        kind = data[at + 4:at + 8]
        body = data[at + 8:at + 8 + length]
        sum_of_it = data[at + 8 + length:at + 12 + length]
        if zlib.crc32(kind + body).to_bytes(4, "big") != sum_of_it:
            return False
        chunks[kind] = chunks.get(kind, b"") + body
        at += 12 + length
    if not {b"IHDR", b"IDAT", b"IEND"} <= set(chunks):
        return False
    try:
        rows = zlib.decompress(chunks[b"IDAT"])
    except zlib.error:
        return False
    height = int.from_bytes(chunks[b"IHDR"][4:8], "big")
    return height > 0 and len(rows) % height == 0


# ---- Dates
def misdated(stated_date: str, folder: Path, runs: Iterable[Run]) -> Iterator[Problem]:
    """A record has the date of its newest run, or a later one that has come."""
    date = datetime.date.fromisoformat(stated_date)
    today = datetime.date.today()
    if date > today + A_DAY:
        yield "date", stated_date, f"no day after today, {today}"
    for name, day in dates_of(folder, runs):
        if day > date + A_DAY:
            yield "date", stated_date, f"no day before that of {name}, {day}"


def dates_of(folder: Path, runs: Iterable[Run]) -> Iterator[tuple[str, datetime.date]]:
    """Days on which something of a record ran, by what its logs and manifests say."""
    for run in runs:
        named = DATED.search(run.result.get("run_dir", ""))
        if named:
            yield folder_name(run), datetime.date(*map(int, named.groups()))
    for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
        for start in lines(manifest, "start"):
            if "time" in start:
                yield f"{manifest.parent.name}/{start['folder']}", datetime.datetime.fromisoformat(start["time"]).date()
