"""Verb `compare`, and what `show`, `bench` and records share: which runs count, and their statistics in words.

    python records compare A B                   or A ... --against B ...: files or directories

Times get a verdict only in a bench, whose manifest states the order of the runs. If a bench has runs of both sides, its
runs alone count, up to its last test, at the level of this test. With a target, B must prove its mean loss (p < 0.01
over seeds) before its time counts. A verdict in favor of B needs all runs that both sides started.
"""
import argparse
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from tools import files, plot
from tools.files import counted, one_line, say
from tools.read import Facts, Reading, Run, ToolError, read_runs
from tools.statistics import (ALPHA, FEWEST_PAIRS, Difference, below, difference, in_turn, look_level,
                              paired_difference, skewness, summary, time_level, time_word)

STATUS = {"faster": 0, "lower loss": 0, "proven": 0, "no target": 0, "inside": 0, "slower": 3, "higher loss": 3,
          "same": 4, "same program": 5, "no record": 6, "undecided": 7, "not proven": 7, "partly proven": 7,
          "not measured in turn": 7, "not comparable": 8, "outside": 9}
MACHINE = "hardware", "world_size"
SOFTWARE = "torch", "cuda", "triton", "nccl", "python"
FACTS = "attention", "head", "grad_accum_steps", "params_total", "untimed_warmup_steps"
NO_MATTER = {"seed", "run_dir", "save", "sample", "prompt", "ranks", "sample_tokens", "comm_timeout", "resume", "runs",
             "checkpoint_every", "target_loss", "profile", "max_steps"}    # settings that do not affect results
UNTIMED_WORK = "checkpoint_every", "save", "resume"      # of NO_MATTER; equal in a bench, because they slow the machine
MANIFEST, MANIFEST_DEPTH = "manifest.jsonl", 6     # file of a bench, searched so far above a run
SHOWN, SHOWN_CHARACTERS = 6, 60        # items of a list, and characters of an item; --json has all differences
HASH = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{56}\b")
PAIRED = "paired"                      # the test of losses that a bench states
FOR_B, PARTLY = ("faster", "lower loss"), "partly proven"    # verdicts that need all started runs, and without them

@dataclass
class Side:
    """The runs of one side: those that count, and why the others do not."""
    name: str
    runs: list[Run]
    left: list[str]                    # paths of runs that do not count, and reasons
    reading: Reading
    started: int                       # number of runs of these programs, failed ones included

    def losses(self) -> list[float]:
        """Return one finite final loss per program and seed, the mean of its runs; an unknown seed is a seed."""
        known = [str(id(run) if run.seed is None else (run.seed, *program(run))) for run in self.runs]
        return [loss for loss in self.means(known).values() if math.isfinite(loss)]

    def means(self, keys: Iterable[Any]) -> dict[Any, float]:
        """Return the mean loss of the runs of each key; `keys` has one per run."""
        losses: dict[Any, list[float]] = {}
        for key, run in zip(keys, self.runs):
            losses.setdefault(key, []).append(run.loss)
        return {key: mean(same) for key, same in losses.items()}

    def diverged(self) -> str:
        count = sum(not math.isfinite(run.loss) for run in self.runs)
        return f"{count} of {counted(len(self.runs), 'run')} of {self.name} have no finite loss" * bool(count)

    def times(self) -> list[float]:
        return [run.seconds for run in self.runs if run.seconds is not None]

    def values(self, key: str) -> list[str]:
        return sorted({as_text(fact(run, key)) for run in self.runs if fact(run, key) is not None})

def relevant(settings: Facts) -> Facts:
    return {key: value for key, value in settings.items() if key not in NO_MATTER}

def program(run: Run) -> tuple[str | None, Facts]:
    return run.facts.get("source_sha256"), relevant(run.settings)

def fact(run: Run, key: str) -> Any:
    """Return a setting, a fact of the header or of the line `result`; None if the log does not state it."""
    return run.settings.get(key, run.facts.get(key, run.result.get(key)))

def settings_of(*sides: Side) -> list[str]:
    return sorted({key for side in sides for run in side.runs for key in relevant(run.settings)})

def as_text(value: Any) -> str:
    """Format a value as one line; hashes are cut to eight digits."""
    text = one_line(value) if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return HASH.sub(r"\1", text)


# ---- Runs that count ------------------------------------------------------------------------------------------------
def side_of(name: str, paths: Sequence[Path | str]) -> Side:
    """Read and choose the runs of one side. Raises ToolError with the reasons if none counts."""
    side = sorted_out(name, read_runs(paths))
    if not side.runs:
        why = side.left + [f"{path}: {reason}" for path, reason in side.reading.unread]
        raise ToolError(f"side {name} has no finished run in {listed(map(str, paths))} ({listed(why) or 'no file'}): "
                        "give run directories, text logs, or directories of them")
    return side

def sorted_out(name: str, reading: Reading) -> Side:
    """Choose the runs that count; if all logs of a public pool stop early, that is taken as their end."""
    some_ended = any(run.finished for run in reading.runs)
    runs = []
    left = []
    for run in reading.runs:
        outcome = manifest_of(run)[1].get("outcome", "done")
        reason = run.refused or f"its bench states: {outcome}" * (outcome != "done")
        if not run.finished and (some_ended or run.kind == "ours" or run.final is None):
            reason = reason or (run.notes or ["no validation"])[-1]
        if reason:
            left.append(one_line(f"{run.path}: {reason}"))
        else:
            runs.append(run)
    sources = {run.facts.get("source_sha256") for run in runs}
    started = sum(run.facts.get("source_sha256") in sources for run in reading.runs)
    read = {folder for run in reading.runs for folder in run.path.resolve().parents}
    # Runs of these sides may have a line in a manifest, and no log.
    for manifest, of_side in {(manifest, line.get("side")) for manifest, line in map(manifest_of, runs) if manifest}:
        for line in manifest_lines(manifest, "start"):
            started += line.get("side") == of_side and manifest.parent / line["folder"] not in read
    return Side(name, runs, left, reading, started)

def manifest_lines(manifest: Path, kind: str) -> list[Facts]:
    lines = files.read_bytes(manifest).splitlines() if manifest.is_file() else []
    return [event for event in map(json.loads, lines) if event.get("type") == kind]

@functools.cache
def manifest_of(run: Run) -> tuple[Path | None, Facts]:
    """Return the manifest above a run, and its line on the end of the run; (None, {}) without one."""
    above = list(run.path.resolve().parents)[:MANIFEST_DEPTH]
    for folder in above:
        for line in manifest_lines(folder / MANIFEST, "end"):
            if folder / line["folder"] in above:
                return folder / MANIFEST, line
    return None, {}

class Look(NamedTuple):
    """The last test of the bench of two sides so far."""
    is_of_bench: bool = False
    level: float = ALPHA               # 0: the bench has not tested yet
    has_paired_losses: bool = False    # its manifest states a paired test, and the runs of each pair share a seed
    refused: str = ""                  # why the sides do not compare

def runs_by_pair(side: Side) -> dict[Path, dict[int, Run]]:
    benches: dict[Path, dict[int, Run]] = {}
    for run in side.runs:
        manifest, line = manifest_of(run)
        if "pair" in line:
            benches.setdefault(manifest, {})[line["pair"]] = run
    return benches

def last_look(a: Side, b: Side) -> tuple[Side, Side, Look]:
    """Select the complete pairs up to the last test of the bench of both sides (before its first test: all pairs).

    Returns the sides as they are if no bench, or several, have complete pairs.
    """
    benches = [runs_by_pair(side) for side in (a, b)]
    shared = [path for path, of_a in benches[0].items() if of_a.keys() & benches[1].get(path, {}).keys()]
    if not shared:
        return a, b, Look()
    if len(shared) > 1:
        names = listed(map(str, shared), 2)
        return a, b, Look(refused=f"runs of {len(shared)} benches, {names}; compare one bench at a time")
    of_a, of_b = by_pair = [of_side[shared[0]] for of_side in benches]
    complete = sorted(of_a.keys() & of_b.keys())
    plan = next(iter(manifest_lines(shared[0], "bench")), {})
    tests = [count for count in range(len(complete) + 1) if look_level(count, plan.get("pairs"))]
    chosen = complete[:max(tests, default=len(complete))]
    sides = []
    for side, pairs in zip((a, b), by_pair):
        left = [f"{run.path}: not in the bench {shared[0].parent}" for run in side.runs if run not in pairs.values()]
        started = side.started - (len(complete) - len(chosen)) - len(left)
        sides.append(replace(side, runs=[pairs[pair] for pair in chosen], left=[*side.left, *left], started=started))
    seeds = [of_a[pair].seed for pair in chosen]
    is_paired = (plan.get("losses"), seeds) == (PAIRED, [of_b[pair].seed for pair in chosen]) and None not in seeds
    return *sides, Look(True, look_level(len(chosen), plan.get("pairs")), is_paired)


# ---- The comparison -------------------------------------------------------------------------------------------------
def why_no_times(a: Side, b: Side, look: Look) -> str:
    reasons = [look.refused or "no bench has runs of both" * (not look.is_of_bench)]
    for side in (a, b):
        if not side.times():
            reasons.insert(0, f"{side.name} has no times that count")
        elif len(side.times()) < len(side.runs):
            reasons.append(f"only {len(side.times())} of {len(side.runs)} runs of {side.name} have times that count")
        if len({run.final.step for run in side.runs}) > 1:
            reasons.append(f"the runs of {side.name} end at different steps")
        if any(note.startswith("resumed") for run in side.runs for note in run.notes):
            reasons.append(f"{side.name} has a run that was resumed")
    return next(filter(None, reasons), "")

def loss_difference(a: Side, b: Side, look: Look) -> Difference | None:
    """Test B's losses minus A's: within seeds if the bench has paired losses, or else as two samples."""
    before = a.means(run.seed for run in a.runs)
    after = b.means(run.seed for run in b.runs)
    if None not in before and before == after:
        return Difference(0.0, 0.0, 0.0, 1.0)                                # exactly equal, seed by seed
    is_constant = min(len(set(a.losses())), len(set(b.losses()))) == 1       # then seeds have no effect: no test
    if is_constant or not look.has_paired_losses:
        return difference(a.losses(), b.losses())
    changes = [after[seed] - loss for seed, loss in before.items()]
    return paired_difference([change for change in changes if math.isfinite(change)])

def compare(a: Side, b: Side, target: float | None = None) -> Facts:
    """Return what `compare --json` prints: losses in nats, times in s, `share`: of B relative to A's."""
    target = target or target_of(a, b)
    a, b, look = last_look(a, b)
    why_not = why_no_times(a, b, look)
    turns = []
    if not why_not:
        turns = sorted((manifest_of(run)[1]["run"], run.seconds, side is b) for side in (a, b) for run in side.runs)
    seconds = [seconds for _, seconds, _ in turns]
    is_b = [is_b for *_, is_b in turns]
    pairs = len(turns) // 2
    level = time_level(pairs, look.level)
    word = time_word(in_turn(seconds, is_b, level), level)
    if word in FOR_B and missing(a, b):
        word = PARTLY
    report: Facts = {"a": facts_of(a, target), "b": facts_of(b, target), "target": target}
    report |= {"loss": loss_difference(a, b, look), "share": in_turn(seconds, is_b), "pairs": pairs, "level": level}
    report |= {"time_word": word, "why_not_in_turn": why_not, "loss_level": look.level, "differs": differing(a, b)}
    reasons = refusals(a, b, look)
    if reasons:
        outcome = "not comparable", reasons[0]
    elif same_program(a, b):
        outcome = "same program", "source, settings and software are equal; a difference is chance, or the machine's"
    else:
        outcome = verdict(a, b, report)
    notes = [*notes_of(a, "A: "), *notes_of(b, "B: "), *reasons[1:]]
    return {"verdict": outcome[0], "reason": outcome[1], **report, "notes": notes}

def verdict(a: Side, b: Side, report: Facts) -> tuple[str, str]:
    """Return the verdict and its reason, by the rule at the top of this file."""
    loss = report["loss"]
    p = loss and loss.p
    reason = "no test of the losses: that takes two seeds a side with different losses"
    if p is not None:
        reason = f"the losses do not decide (p {p:.2g}, and less than {report['loss_level']:.2g} is needed)"
    if loss == Difference(0.0, 0.0, 0.0, 1.0):
        reason = "all losses are equal"
    if a.diverged() or b.diverged():
        return "undecided", a.diverged() or b.diverged()
    if report["target"]:
        word, reason = proof(b, report["target"], report["loss_level"])
        if word != "proven":
            return word, f"B: {reason}"
    if not report["target"] and p is not None and p < report["loss_level"]:
        word = "lower loss" if loss.mean < 0 else "higher loss"
        reason = f"by {abs(loss.mean):.4f} (p {p:.2g}); time: {time_in_words(report)}"
    elif report["why_not_in_turn"]:
        return ("not measured in turn",
                f"{reason}; {report['why_not_in_turn']}; run both in turn: python records bench A.py B.py")
    else:
        word = report["time_word"]
        reason = f"{reason}; {time_in_words(report)}"
    if word in (*FOR_B, PARTLY) and missing(a, b):
        return PARTLY, f"{reason}; {missing(a, b)}"
    return word, reason

def missing(*sides: Side) -> str:
    return ", ".join(f"{len(side.runs)} of {side.started} started runs of {side.name} count"
                     for side in sides if side.started > len(side.runs))

def time_in_words(report: Facts) -> str:
    share = report["share"]
    pairs = f"{counted(report['pairs'], 'pair')} in turn"
    if report["why_not_in_turn"]:
        return report["why_not_in_turn"]
    if share is None or not report["level"]:
        return f"{pairs}: too few for a verdict"
    less = "less" if share.mean < 0 else "more"
    undecided = "undecided, " * (report["time_word"] == "undecided")
    time = f"B takes {abs(share.mean):.2%} {less} time"
    return f"{time}, {undecided}{pairs} (p {share.p:.2g}, level {report['level']:.2g})"

def proof(side: Side, target: float, level: float = ALPHA) -> tuple[str, str]:
    """Test the target; return proven, not proven or no record, and the reason. level: of the test; 0: no test yet."""
    losses = side.losses()
    if side.diverged():
        return "not proven", side.diverged()
    if any(run.kind == "ours" and not isinstance(run.seed, int) for run in side.runs):
        return "not proven", "a log does not state its seed, so it may repeat another one"
    p = below(losses, target)
    word = said = "not proven"
    if p < level:
        word = said = "proven"
    elif level and p > 1 - level:
        word, said = "no record", "not below it,"
    known = f"n = {len(losses)}"
    if not math.isnan(p):
        known += f", p {p:.2g}, level {level:.3g}" if level else f", p {p:.2g}, no test yet"
    mean = summary(losses).mean
    return word, (f"mean loss {mean:.5f} against {target:g}: {said} by {len(side.runs)} of {side.started} started "
                  f"({known})")

def target_of(*sides: Side) -> float | None:
    stated = {run.facts.get("target_loss") for side in sides for run in side.runs}
    return stated.pop() or None if len(stated) == 1 else None               # 0: the preset has no target

def refusals(a: Side, b: Side, look: Look) -> list[str]:
    """Return why the sides cannot be compared, most important reason first."""
    reasons = [look.refused] * bool(look.refused)
    twice = {run.ends()[0] for run in a.runs} & {run.ends()[0] for run in b.runs}
    if twice:
        reasons.append(f"both sides have {counted(len(twice), 'run')} in common")
    for key in ("world_size", "hardware", "data_sha256"):
        before, after = a.values(key), b.values(key)
        if before and after and not set(before) & set(after):
            reasons.append(f"different {key}: {clipped(before)} -> {clipped(after)}")
    for key in UNTIMED_WORK:
        values = sorted({as_text(run.settings.get(key) or 0) for run in (*a.runs, *b.runs)})
        if len(values) > 1 and look.is_of_bench:
            reasons.append(f"different {key} in one bench: {clipped(values)}")
    for side, other in ((a, b), (b, a)):
        reasons += mixtures(side)
        if not any(run.finished for run in side.runs) and any(run.finished for run in other.runs):
            step = side.runs[0].final.step
            reasons.append(f"{side.name}'s runs stopped early, at step {step}; compare complete runs")
    return list(dict.fromkeys(reasons))

def mixtures(side: Side) -> list[str]:
    """Return which facts differ within one side but must not."""
    # A run that a time budget ended, as older trainers had, has its own last step.
    unbudgeted = [run for run in side.runs if not run.result.get("budget_s")]
    mixed = {"last steps": {f"{run.final.step} of {run.total}" for run in unbudgeted}}
    for key in ("source_sha256", *MACHINE, "data_sha256", *settings_of(side)):
        mixed[key] = {as_text(fact(run, key)) for run in side.runs}
    return [f"{side.name} mixes {key}: {clipped(sorted(values))}; select runs by path"
            for key, values in mixed.items() if len(values) > 1]

def same_program(a: Side, b: Side) -> bool:
    """Whether source, settings, last step and software are known and equal; text logs do not state settings."""
    first, *others = a.runs + b.runs
    if not all(program(first)) or any(a.values(key) != b.values(key) for key in SOFTWARE):
        return False
    return all((program(run), run.final.step) == (program(first), first.final.step) for run in others)

def differing(a: Side, b: Side) -> list[str]:
    """Return "NAME A's -> B's" of the last step, and of each setting and fact that both sides state differently."""
    facts = {"last step": [sorted({str(run.reached) for run in side.runs}) for side in (a, b)]}
    for key in ("source_sha256", *MACHINE, *SOFTWARE, *FACTS, *settings_of(a, b)):
        facts[key] = [a.values(key), b.values(key)]
    return [f"{key} {clipped(before)} -> {clipped(after)}" for key, (before, after) in facts.items()
            if before != after and (before and after or "[" in key)]          # a list of rows may be longer

def facts_of(side: Side, target: float | None) -> Facts:
    losses = side.losses()
    peaks = [run.result.get("peak_memory_mib") for run in side.runs]
    memory = summary([max(peak.values()) for peak in peaks if peak])
    return {"name": side.name, "runs": len(side.runs), "started": side.started, "losses": losses,
            "times": side.times(), "loss": summary(losses), "time": summary(side.times()), "memory": memory,
            "p": target and below(losses, target)}


# ---- Words ----------------------------------------------------------------------------------------------------------
def notes_of(side: Side, name: str = "") -> list[str]:
    notes = []
    if side.left:
        notes.append(f"not counted: {counted(len(side.left), 'run')}: {listed(side.left, 2)}")
    voids = [f"{run.path}: {run.void}" for run in side.runs if run.void]
    if voids:
        notes.append(f"times of {counted(len(voids), 'run')} do not count: {listed(voids, 1)}")
    notes.append(listed(sorted({note for run in side.runs for note in run.notes if note.startswith("resumed")})))
    return [f"{name}{note}" for note in (*notes, side.reading.unread_in_words()) if note]

def listed(items: Iterable[str], most: int = SHOWN) -> str:
    items = list(items)
    more = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more

def clipped(values: Sequence[str]) -> str:
    return " and ".join(values)[:SHOWN_CHARACTERS] or "unknown"

def markdown(head: str, rows: Sequence[Sequence[Any]]) -> str:
    """Format a Markdown table with five significant digits; "" without rows. head: titles, separated by " | "."""
    if not rows:
        return ""
    cells = [head.split(" | ")]
    for row in rows:
        shorter = [f"{item:.5g}" if isinstance(item, float) else one_line(str(item)) for item in row]
        cells.append(["n/a" if item in ("None", "nan") else item.replace("|", "\\|") for item in shorter])
    widths = [max(map(len, column)) for column in zip(*cells)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in cells)

def test_in_words(test: Difference | None, form: str, unit: str = "", pairs: int = 0) -> str:
    """Format a difference with its interval and p, or with "(no test)": an interval of fewer pairs is too wide."""
    if test is None:
        return "unknown"
    text = f"{test.mean:{form}} {unit}".strip()
    if test.p is None or 0 < pairs < FEWEST_PAIRS:
        return f"{text} (no test)"
    return f"{text} [{test.low:{form}}, {test.high:{form}}], p {test.p:.2g}"

def in_words(report: Facts, sides: Sequence[Facts] = (), more: Iterable[str] = ()) -> str:
    target = report.get("target") or "none"
    head = f"side | runs | seeds | loss | sd | p (target {target}) | skew | time s | sd | peak MiB"
    rows = [[side["name"], f"{side['runs']} of {side['started']}", *astuple(side["loss"]), side["p"],
             side["p"] and skewness(side["losses"]), *astuple(side["time"])[1:], side["memory"].mean] for side in sides]
    words = [f"differs: {line}" for line in report.get("differs", [])]
    words += [f"note: {note}" for note in report["notes"][:SHOWN]]
    words.append(f"verdict: {report['verdict']}: {report['reason']}")
    return "\n".join([*filter(None, [markdown(head, rows)]), *more, *map(one_line, words)])

def changes_in_words(report: Facts, nats: str = "+.5f") -> list[str]:
    """Return B - A in loss and time as two phrases; times are relative to A's."""
    pairs = report["pairs"]
    share = report["share"]
    before, after = report["a"]["time"].mean, report["b"]["time"].mean
    if share is None and before and math.isfinite(after / before):
        share = Difference(after / before - 1)
    in_turn_words = f", {counted(pairs, 'pair')} in turn" * bool(pairs)
    return [f"loss {test_in_words(report['loss'], nats, 'nats', pairs)}",
            f"time {test_in_words(share, '+.2%', pairs=pairs)}{in_turn_words}"]

def compare_in_words(report: Facts) -> str:
    lines = ["B - A [99 % interval]", *(f"  {change}" for change in changes_in_words(report))]
    return in_words(report, (report["a"], report["b"]), lines)

def jsonable(value: Any, parse_float: Callable[[str], float] = float) -> Any:
    """Convert a value for JSON: infinite numbers and nan become null, dataclasses become objects."""
    data = json.dumps(value, default=asdict)
    return json.loads(data, parse_float=parse_float, parse_constant=lambda _: None)

def finish(report: Facts, text: str, groups: dict[str, list[Run]], args: argparse.Namespace) -> int:
    """Print a report as text or JSON, plot the groups if asked, and return the exit status of its verdict."""
    say(json.dumps(jsonable(report), indent=1) if args.json else text)
    if args.plot:
        present = {name: runs for name, runs in groups.items() if runs}
        plot.save(plot.curves_svg(present, report.get("target")), args.plot)
        say(f"picture: {args.plot}", sys.stderr)
    return STATUS[report["verdict"]]

def add_arguments(parser: argparse.ArgumentParser, usage: str) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help=usage)
    parser.add_argument("--target", type=float, help="mean loss to prove [target_loss of the logs]")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="file for a plot of the losses")
    parser.add_argument("--json", action="store_true", help="print a JSON object")

def main(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    add_arguments(parser, "A and B, or A and --against B")
    parser.add_argument("--against", nargs="+", default=[], metavar="B", help="B, if a side has several paths")
    args = parser.parse_args(argv[1:])
    paths = [args.paths, args.against] if args.against else [args.paths[:1], args.paths[1:]]
    if not paths[1]:
        raise ToolError("compare takes two sides: A B, or A ... --against B ...")
    sides = [side_of(name, where) for name, where in zip("AB", paths)]
    found = compare(*sides, args.target)
    return finish(found, compare_in_words(found), {side.name: side.runs for side in sides}, args)
