"""Records of kind `prediction`: ledgers and a table of rates instead of runs, and the price that follows from them.

    python tests/rehearse.py --out=logs/now.json           # all timelines: a ledger whose sums can be added up again
    python records new Rehearsal logs/now.json tests/rehearsal/rates.json --kind=prediction
    python records new Idea base=before.json idea=logs/now.json tests/rehearsal/rates.json --kind=prediction --parent=04
Nothing has run on a GPU, so such a record claims no place. The arithmetic is that of tests/rehearsal/price.py; `check`
does it again, and adds up the timelines of the ledgers again."""
from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.ablate import aligned
from tools.logs import ToolError

PRICE = Path(__file__).resolve().parents[2] / "tests" / "rehearsal" / "price.py"
LEDGERS, RATES, SOURCE = "ledgers", "rates.json", "train_gpt.py"
STEP = re.compile(r"(stage \d+) (even|odd) step")
SUMS = "launches", "bytes", "collectives", "collective_bytes", "host_waits"   # of a timeline; a ledger states them
FACTS = "source_sha256", "card", "flags", "torch", "triton"


@cache
def price_tool() -> ModuleType:
    """tests/rehearsal/price.py, which needs nothing but Python."""
    if not PRICE.exists():
        raise ToolError("tests/rehearsal/price.py", "not there", "the arithmetic of predictions",
                        "use a whole checkout")
    spec = importlib.util.spec_from_file_location("price_of_ledgers", PRICE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module                                           # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ToolError(f"{path}", error, "a ledger or a table of rates",
                        "python tests/rehearse.py --out=FILE") from None
    if not isinstance(found, dict):
        raise ToolError(f"{path}", type(found).__name__, "a JSON object",
                        "give a ledger or a table of rates")
    return found


# ---- Making one
def gather(asked: Iterable[tuple[str | None, str]], staged: Path, stated: dict[str, Any]) -> dict[str, Path]:
    """Copy ledgers and rates, and note the groups: (name, path) of each is asked for.

    Returns the trainer of each group. The first ledger is what others are set against.
    """
    (staged / LEDGERS).mkdir(parents=True)
    sources = {}
    for name, given in asked:
        path = Path(given)
        found = read(path)
        if "cards" in found:
            if (staged / RATES).exists():
                raise ToolError("tables of rates", path, "one, for all ledgers", "leave one out")
            shutil.copyfile(path, staged / RATES)
            continue
        if "kernels" not in found:
            raise ToolError(f"{path}", f"keys {sorted(found)[:9]}",
                            "kernels of a ledger with all timelines, or cards of a table of rates",
                            "python tests/rehearse.py --out=FILE writes one; runs make the other kinds")
        group = name or path.stem
        if group in sources:
            raise ToolError("two ledgers of one name", path, f"another name than {group}",
                            "NAME=PATH")
        shutil.copyfile(path, staged / LEDGERS / f"{group}.json")
        stated["groups"][group] = [f"{group}.json"]
        sources[group] = source_of(path)
    if not sources or not (staged / RATES).exists():
        raise ToolError("prediction", f"ledgers {[*sources]}", "at least one, and a table of rates",
                        "python records new NAME FILE tests/rehearsal/rates.json "
                        "--kind=prediction")
    return sources


def source_of(ledger: Path) -> Path:
    """The trainer that a ledger is of: the nearest one above it."""
    for folder in ledger.resolve().parents:
        if (folder / SOURCE).exists():
            return folder / SOURCE
    raise ToolError(f"source of {ledger}", "no trainer above it", SOURCE,
                    "leave the ledger in its checkout")


def problems(folder: Path, stated: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(what, found, expected): why these files cannot stand as a prediction."""
    for key in ("track", "entry", "bench"):
        if stated[key]:
            yield key, stated[key], "none: a prediction claims no place"
    kept = {path.stem for path in (folder / LEDGERS).glob("*.json")}
    if kept != set(stated["groups"]):
        yield "ledgers", sorted(kept), f"{sorted(stated['groups'])}"
    rates = read(folder / RATES)
    for group in stated["groups"]:
        ledger = read(folder / LEDGERS / f"{group}.json")
        if ledger.get("format") != price_tool().FORMAT:
            yield f"format of {group}", ledger.get("format"), f"{price_tool().FORMAT}"
        if ledger["card"] not in rates["cards"]:
            yield f"card of {group}", ledger["card"], f"one with rates: {', '.join(rates['cards'])}"
        yield from wrong_sums(group, ledger)


def wrong_sums(group: str, ledger: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Totals of a ledger that its own timelines do not add up to."""
    for world, walked in ledger["worlds"].items():
        for name, phase in walked["phases"].items():
            sums = added_up(ledger, world, phase["timeline"])
            for total in SUMS:
                if phase[total] != sums[total]:
                    what = f"{total} of {group}, world {world}, {name}"
                    yield what, phase[total], f"{sums[total]}, the sum of its lines"


# ---- What follows from the files
def build(folder: Path, stated: dict[str, Any]) -> dict[str, Any]:
    """All numbers of such a record but those that every record has."""
    rates = read(folder / RATES)
    groups, prices, sums = {}, {}, {}
    for group in stated["groups"]:
        path = folder / LEDGERS / f"{group}.json"
        ledger = read(path)
        groups[group] = {key: ledger.get(key) for key in FACTS}
        groups[group]["ledger_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        prices[group] = price_tool().price(ledger, rates)
        sums[group] = sums_of(ledger)
    return dict(groups=groups, prediction=prices, sums=sums, rates=rates)


def sums_of(ledger: dict[str, Any]) -> dict[str, Any]:
    """By world and step: what its timeline adds up to, and its peak memory."""
    found = {}
    for world, walked in ledger["worlds"].items():
        found[world] = {}
        for name, phase in walked["phases"].items():
            if STEP.fullmatch(name):
                sums = added_up(ledger, world, phase["timeline"])
                found[world][name] = dict(sums, peak_bytes=phase["peak_bytes"])
    return found


def added_up(ledger: dict[str, Any], world: str, timeline: list[list]) -> Counter:
    """The sums of a timeline, and its flops by kind of arithmetic."""
    sums = Counter(dict.fromkeys(SUMS, 0))
    for kind, *item in price_tool().items_of(ledger["worlds"][world], timeline):
        if kind == "run":
            label, count = item
            kernel = ledger["kernels"][label]
            sums["launches"] += count
            sums["bytes"] += count * kernel["bytes"]
            if kernel["kind"] == "product":
                sums[f"flops, {kernel['dtype']}"] += count * kernel["flops"]
            elif kernel["kind"] == "attention":
                sums["flops, attention"] += count * kernel["flops"]
        elif kind == "collective":
            label, name, size, *_ = item
            sums["collectives"] += 1
            sums["collective_bytes"] += size
        elif kind == "host_wait":
            sums["host_waits"] += 1
    return sums


# ---- The page
def page(result: dict[str, Any]) -> str:
    stated = result["stated"]
    parent = stated["parent"]
    head = (f"## Numbers\n\nPrediction, {stated['date']}: [source]({SOURCE}), [ledgers]({LEDGERS}), "
            f"[rates]({RATES}), [all numbers](result.json). It claims no place: nothing here has run on a GPU.")
    if parent:
        head += (f" Parent: [{parent}](../{parent}/README.md), "
                 "[difference of the source](source.diff).")
    parts = [head]
    if stated["base"]:
        parts.append(difference(result))
    for group, prediction in result["prediction"].items():
        title = f"### {group}" if len(result["prediction"]) > 1 else "### Price"
        parts.append(f"{title}\n\n{price_tool().text(prediction)}".rstrip())
        parts.append(sums_table(result["sums"][group]))
    parts.append("### Rates\n\n" + rates_table(result))
    parts.append(aligned("ledger | card | flags | torch | triton | sha256", ledger_rows(result)))
    return "\n\n".join(parts) + "\n"


def difference(result: dict[str, Any]) -> str:
    """What each other ledger costs against the first one."""
    base = result["stated"]["base"]
    rows = []
    for group, prediction in result["prediction"].items():
        if group == base:
            continue
        for world, by_attention in prediction["worlds"].items():
            before_by_attention = result["prediction"][base]["worlds"].get(world, {})
            for attention, after in by_attention.items():
                before = before_by_attention.get(attention)
                if before is None:
                    continue
                more = []
                for stage in before["stages"].keys() & after["stages"].keys():
                    ms = after["stages"][stage]["mean"]["ms"] - before["stages"][stage]["mean"]["ms"]
                    more.append(f"{stage}: {ms:+.2f}")
                seconds = after["run_s"] - before["run_s"]
                rows.append([group, world, attention, ", ".join(sorted(more)), f"{seconds:+.2f}"])
    head = "ledger | world | attention | ms per mean step | s per run"
    return f"### Against {base}\n\n{aligned(head, rows)}"


def sums_table(sums: dict[str, Any]) -> str:
    rows = []
    for world, phases in sums.items():
        for name, found in phases.items():
            peak = round(found["peak_bytes"] / 2**20)
            moved = round(found["bytes"] / 1e9, 1)
            sent = round(found["collective_bytes"] / 1e6, 1)
            rows.append([world, name, found["launches"], moved, arithmetic_of(found),
                         found["collectives"], sent, peak, found["host_waits"]])
    head = "world | step | launches | GB | TFLOP | collectives | their MB | peak MiB | host waits"
    return aligned(head, rows)


def arithmetic_of(sums: dict[str, Any]) -> str:
    """TFLOP by kind."""
    shown = []
    for name, count in sorted(sums.items()):
        kind = name.removeprefix("flops, ")
        if kind != name:
            shown.append(f"{kind} {count / 1e12:.2f}")
    return ", ".join(shown)


def rates_table(result: dict[str, Any]) -> str:
    """Those of the cards that were priced, and what holds for all."""
    rows = []
    for card in sorted({prediction["card"] for prediction in result["prediction"].values()}):
        for kind, rate in result["rates"]["cards"][card]["rates"].items():
            achieved = f"{rate['peak'] * rate['share']:.4g}"
            share = f"{rate['share']:.1%}"
            rows.append([card, kind, achieved, rate["unit"], share, rate["source"]])
    for kind, fact in result["rates"]["fixed"].items():
        rows.append(["all", kind, f"{fact['value']:g}", fact["unit"], "", fact["source"]])
    return aligned("card | rate | achieved | unit | of the peak | source", rows)


def ledger_rows(result: dict[str, Any]) -> Iterator[list[Any]]:
    for group, facts in result["groups"].items():
        link = f"[{group}]({LEDGERS}/{group}.json)"
        flags = " ".join(facts["flags"])
        yield [link, facts["card"], flags, facts["torch"], facts["triton"], facts["ledger_sha256"][:12]]
