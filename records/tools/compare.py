"""Verb `compare`: is B faster than A, at the same loss? From logs of this trainer or of its relatives.

    python records compare A B                            files, or directories, which are read to the bottom
A manifest.jsonl of `bench` above the runs tells which were measured in pairs. The rule of the verdict is in verdict.py.
Exit status: 0 compared, whatever the verdict; 2 bad input."""
from __future__ import annotations

import argparse, json, math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import logs, verdict
from tools.logs import Run, ToolError
from tools.verdict import Difference, mean, summary

ENVIRONMENT = ("hardware", "world_size", "torch", "cuda", "triton", "python", "nccl", "driver", "clock")
FACTS = ("source_sha256", "attention", "head", "grad_accum_steps", "params_total", "table_bytes",
         "untimed_warmup_steps")
NO_MATTER = ("seed", "run_dir", "save", "sample", "prompt", "ranks", "sample_tokens", "comm_timeout", "resume", "runs",
             "checkpoint_every", "target_loss", "profile")                    # fields of a config that change no result
ACROSS = ("--across: the same source differs by 0.1 to 1.8 % between machines of one kind (once 8 %), by 7.8 % between "
          "versions of torch; a smaller difference may be the machine's, not B's")
SAME_KIND = "not in pairs: B's doing only if all ran on one machine (those of one kind differ by 0.1 to 1.8 %)"
DRIFTS = "times drift by {:+.3%} a run; measure in pairs (python records bench)"
END_SPAN = 0.05                    # share of the steps over which the slope at the end is taken, at least
SLOPE_DOUBT = 2.0                  # a shorter schedule costs this much less loss per step than the slope (public runs)
MODES_APART = 0.015                # of the time: what two modes of a public machine are apart (0.012), and noise
MANIFEST_DEPTH = 6                 # folders above a run in which its manifest may lie
SHOWN, SHOWN_CHARACTERS = 6, 60    # items of a list, and of an item; the JSON has all
PLOT_TAIL = 0.3                    # share of the run that the right side of a plot shows

@dataclass
class Side:
    """What was read for one side, and what of it counts: runs, those with a time, their times in s."""
    name: str
    paths: list[Path]
    reading: logs.Reading
    runs: list[Run] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        ended = any(run.finished for run in self.reading.runs)
        for run in self.reading.runs:
            why = f"aborted: {run.aborted}" if run.aborted is not None else "; ".join(run.notes) or "no validation"
            if run.final and (run.finished or not (ended or run.family == "ours")):     # peers may stop all on purpose
                self.runs.append(run)
            else:
                self.left.append(f"{run.path}: {why}")
        self.timed = [run for run in self.runs if run.seconds is not None]
        self.times = [run.seconds for run in self.timed]

    def seeds(self) -> list[list[Run]]:
        """Runs by what fixes their losses; runs without a known seed that have the same curve are one seed too."""
        found: dict[Any, list[Run]] = {}
        for run in self.runs:
            curve = tuple(point[:2] for point in run.val)
            known = (run.seed, *(run.facts.get(key) for key in ("source_sha256", "data_sha256")), text_of(config(run)))
            found.setdefault(known if run.seed is not None else curve if len(curve) > 2 else id(run), []).append(run)
        return list(found.values())

    def losses(self) -> list[float]:
        """One final loss per seed, the mean of its runs; without those that are not finite."""
        return [loss for same in self.seeds() if math.isfinite(loss := mean(run.loss for run in same))]

    def values(self, key: str) -> list[str]:
        """All values of a setting or fact on this side, as text."""
        timers = [note for run in self.runs for note in run.notes if note.startswith("timer")] or ["never restarts"]
        found = (config(run).get(key, run.facts.get(key, timers[0] if key == "clock" else None)) for run in self.runs)
        return sorted({text_of(value) for value in found if value is not None})

    def memory(self) -> list[float]:
        """Peak memory by run, MiB: allocated on a GPU, of the process on a CPU."""
        return [mib for run in self.runs for mib in list(run.result.get("peak_memory_mib", {}).values())[:1]]

def side_of(name: str, paths: list[Path]) -> Side:
    """Raises ToolError with the reasons if nothing there is a run that counts."""
    side = Side(name, paths, logs.read(paths))
    if not side.runs:
        why = side.left + [f"{path}: {reason}" for path, reason in side.reading.unread]
        raise ToolError(f"side {name}: {short(map(str, paths))}", short(why) or "no file", "at least one finished run",
                        "give a log.jsonl, a run directory, a text log, or a directory of them")
    return side

def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)

def config(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.facts.get("config", {}).items() if key not in NO_MATTER}

def manifest_of(a: Side, b: Side) -> tuple[dict[int, int], dict[int, int], list[str]]:
    """By id of a run its pair and its place in time, from a manifest above both sides; and what it says of its runs."""
    above = [{folder / "manifest.jsonl" for run in side.runs for folder in list(run.path.resolve().parents)
              [:MANIFEST_DEPTH] if (folder / "manifest.jsonl").is_file()} for side in (a, b)]
    pairs, places, notes = {}, {}, []
    for path in sorted(above[0] & above[1]):
        try:
            ends = [line for text in path.read_text(encoding="utf-8").splitlines() if text.endswith("}")
                    and (line := json.loads(text))["type"] == "end"]
        except (ValueError, KeyError):
            raise ToolError(f"manifest {path}", "a damaged line", "an object with a type", "restore it") from None
        folders = {(path.parent / line["folder"]).resolve(): line for line in ends if "folder" in line}
        for run in a.timed + b.timed:
            if line := next((folders[folder] for folder in run.path.resolve().parents if folder in folders), {}):
                places[id(run)], pairs[id(run)] = line["run"], line.get("pair")
        outcomes = Counter(line.get("outcome") for line in ends)
        notes.append(", ".join(["manifest: " + ", ".join(f"{n} runs {word}" for word, n in outcomes.items()),
                                f"{len(places)} of them compared"]))
    return pairs, places, notes

def timing(a: Side, b: Side) -> tuple[list[Difference], float, str, list[str], list[str]]:
    """Tests of B's time minus A's, in s, that must agree; the sd they rest on; their method; doubts; notes."""
    pairs, places, notes = manifest_of(a, b)
    base, sd = mean(a.times), math.hypot(*(summary(side.times).sd for side in (a, b))) / math.sqrt(2)
    groups = {side.name: found for side in (a, b) if (found := verdict.modes(side.times))}
    notes += [f"{name}'s times fall in two groups: " + ", ".join(f"{len(xs)} near {mean(xs):.5g} s" for xs in found)
              for name, found in groups.items()]
    both = [[mean(run.seconds for run in side.timed if pairs.get(id(run)) == pair) for side in (a, b)]
            for pair in sorted(set(pairs.values()) - {None})]
    shares = [other / one - 1 for one, other in both if not math.isnan(one + other)]
    if len(shares) > 1:
        test = Difference(*(value * base for value in verdict.paired(shares)[:3]), verdict.paired(shares).p)
        return [test], summary(shares).sd * base, f"{len(shares)} interleaved pairs", [], notes
    tests, method = [verdict.welch(a.times, b.times)], "Welch"
    places = places if len(places) == len(a.times + b.times) else {}
    order = [places[id(run)] for run in a.timed + b.timed] if places else [*range(len(a.times)), *range(len(b.times))]
    test, drift = verdict.without_drift(a.times, b.times, order)
    if places and math.isfinite(test.mean):
        tests, method = [*tests, test], "Welch, and beside a drift over the order of runs"
    doubts = [DRIFTS.format(drift.mean / base)] * (drift.p < verdict.ALPHA)
    doubts += ["a side's times fall in two groups further apart than the sides"] * any(
        mean(high) - mean(low) > abs(tests[0].mean) for low, high in groups.values())
    if 2.0 ** (1 - len(a.times + b.times)) > verdict.ALPHA and abs(tests[0].mean) < MODES_APART * base:
        doubts.append("the sides may have met two modes of the machine: a difference so small takes four runs a side")
    return tests, sd, method, doubts, notes + doubts[1:] + [
        "order of the runs in time unknown: taken from their names"] * (not places)

def parting(a: Side, b: Side) -> tuple[int | None, str]:
    """First step at which the mean curves differ beyond the seeds' spread (Welch at ALPHA over the number of points).
    Validation points if two steps are shared, else training losses; one run per seed."""
    for kind in ("validation", "training"):
        tables = [[dict(point[:2] for point in same[0].val) if kind == "validation" else
                   {step: loss for step, _, loss in same[0].steps if loss is not None}
                   for same in side.seeds()] for side in (a, b)]
        if len(steps := sorted(set.intersection(*(set(table) for side in tables for table in side)))) > 1:
            break
    if len(steps) < 2 or min(map(len, tables)) < 2:
        return None, "where the curves part is not judged: that takes two seeds a side and two shared steps"
    apart = [verdict.welch(*([table[step] for table in side] for side in tables)).p for step in steps]
    first = next((step for step, p in zip(steps, apart) if p < verdict.ALPHA / len(steps)), None)
    where = "do not part" if first is None else f"part at step {first}"
    return first, f"mean {kind} curves {where} beyond the seeds' spread ({len(steps)} shared steps up to {steps[-1]})"

def bitwise(a: Side, b: Side) -> tuple[bool, str]:
    """Whether all seeds are shared and give equal losses to the last bit; else where the first of them parts."""
    sides = [{same[0].seed: {**{(step, "training"): loss for step, _, loss in same[0].steps if loss is not None},
                             **{(step, "validation"): loss for step, loss, _ in same[0].val}} for same in side.seeds()}
             for side in (a, b)]
    shared = sorted((set(sides[0]) & set(sides[1])) - {None})
    parted = [point for one, other in ([side[seed] for side in sides] for seed in shared)
              for point in set(one) | set(other) if one.get(point) != other.get(point)]
    if not shared or parted:
        return False, f"equal seeds have equal losses until step {min(parted)[0]} ({min(parted)[1]})" if parted else ""
    return set(sides[0]) == set(sides[1]) == set(shared), (
        f"seeds {', '.join(map(str, shared))}: losses and curves are equal to the last bit on both sides")

def price(side: Side) -> tuple[float, float] | None:
    """Nats per step and s per nat at the end of the mean validation curve; None if it does not fall there."""
    shared = set.intersection(*({point.step for point in run.val if point.seconds is not None} for run in side.runs))
    end = max(shared, default=0)
    start = max((step for step in shared if step <= end * (1 - END_SPAN)), default=end)
    if start == end:
        return None
    tables = [{point.step: point for point in run.val} for run in side.runs]
    drop = mean(table[start].loss - table[end].loss for table in tables)
    lasted = mean(table[end].seconds - table[start].seconds for table in tables)
    return (drop / (end - start), lasted / drop) if drop > 0 and lasted > 0 else None

def refusals(a: Side, b: Side) -> tuple[list[str], list[str]]:
    """Why the sides, and why only their times, cannot be compared."""
    whole = []
    for side in (a, b):
        kinds = Counter(f"{run.final.step} of {run.total} steps" for run in side.runs)
        whole += [f"{side.name} mixes " + ", ".join(f"{n} runs of {k}" for k, n in kinds.items())] * (len(kinds) > 1)
        whole += [f"{side.name} mixes {key}: {cut(side.values(key))}; give one kind of runs"
                  for key in sorted({key for run in side.runs for key in config(run)}) if len(side.values(key)) > 1]
        whole += [f"{side.name} has several lists of one kind, and which is the base is not said"] * (
            len({run.facts.get("pool") for run in side.runs}) > 1)
    twice = {logs.content(run) for run in a.runs} & {logs.content(run) for run in b.runs} - {()}
    data = {*a.values("data_sha256"), *b.values("data_sha256")}
    whole += [f"{len(twice)} runs are on both sides"] * bool(twice)
    whole += [f"other data: data_sha256 {', '.join(value[:8] for value in sorted(data))}"] * (len(data) > 1)
    return whole, [f"{key} differs: {cut(a.values(key))} -> {cut(b.values(key))}" for key in ENVIRONMENT
                   if a.values(key) and b.values(key) and len({*a.values(key), *b.values(key)}) > 1]

def compare(a: Side, b: Side, target: float | None = None, across: bool = False,
            margin: float = verdict.SAME_MARGIN) -> dict[str, Any]:
    """All that `--json` prints: times in s, losses in nats per token, memory in MiB, differences B minus A."""
    named = {run.facts.get("target_loss") for run in a.runs + b.runs}
    target = target or (named.pop() if len(named) == 1 else None) or None
    (whole, unlike), (same_bits, said), (parts_at, curves) = refusals(a, b), bitwise(a, b), parting(a, b)
    losses, base, worth = [side.losses() for side in (a, b)], mean(a.times), price(a)
    loss = verdict.welch(*losses) if min(len(set(side)) for side in losses) > 1 else None
    loss = Difference(0.0, 0.0, 0.0, 1.0) if same_bits else loss
    timed = a.times and b.times and (across or not unlike)
    tests, sd, method, doubts, notes = timing(a, b) if timed else ([], math.nan, "no test", [], [])
    by_seed = [[(mean(run.seconds for run in same), mean(run.loss for run in same)) for same in side.seeds()
                if all(run.seconds is not None for run in same)] for side in (a, b)]
    equal = [verdict.welch(*([seconds + nats * worth[1] * doubt for seconds, nats in side] for side in by_seed))
             for doubt in (1.0, SLOPE_DOUBT)] if worth and tests and min(map(len, by_seed)) > 1 else []
    diverged = [f"{side.name}: {n} of {len(side.runs)} runs have no finite loss" for side in (a, b)
                if (n := sum(not math.isfinite(run.loss) for run in side.runs)) and side.runs[0].family != "R"]
    same_steps = {run.final.step for run in a.runs} == {run.final.step for run in b.runs}
    word = verdict.decide(loss, tests, equal, margin * base, diverged + doubts, same_steps)
    if word.word in ("faster", "slower"):
        worst = max(-loss.low, loss.high) * worth[1] if worth and loss.p >= verdict.SHARE else 0.0
        word = word._replace(reason="; ".join([word.reason] + [f"losses may differ by what {worst:.3g} s are worth"] * (
            worst > abs(tests[0].mean)) + [SAME_KIND] * ("pairs" not in method)))
    if whole or (unlike and not across):
        word = verdict.Verdict("not comparable", whole[0] if whole else f"{unlike[0]} (--across compares nevertheless)")
    settle = word.word == "undecided" and tests and loss and loss.p >= verdict.SHARE and not doubts + diverged
    settle = verdict.runs_to_settle(tests[-1], sd, margin * base) if settle else None
    notes = whole + unlike + [said] * bool(said) + diverged + notes + [ACROSS] * bool(across and unlike)
    notes += [f"hardware of {side.name} is not recorded" for side in (a, b) if not side.values("hardware")]
    memory = [side.memory() for side in (a, b)]
    settings = sorted({key for run in a.runs + b.runs for key in config(run)})
    return {"verdict": word.word, "reason": word.reason, "target": target, "a": facts(a, target), "b": facts(b, target),
            "loss": loss, "time": tests[0] if tests else None, "time_tests": tests, "method": method,
            "memory": verdict.welch(*memory) if all(memory) else None, "at_equal_loss": equal,
            "nats_per_step": worth and worth[0], "s_per_nat": worth and worth[1],
            "equivalent_steps": loss and worth and loss.mean / worth[0], "parts_at": parts_at, "curves": curves,
            "runs_to_settle": settle, "phases": phases(a, b), "environment": unequal(a, b, ENVIRONMENT),
            "config": unequal(a, b, [*FACTS, *settings]), "notes": notes}

def facts(side: Side, target: float | None) -> dict[str, Any]:
    """One side: what was read and what was not, and its numbers."""
    losses = summary(side.losses())
    below = target and target - losses.mean
    return {"paths": list(map(str, side.paths)), "runs": len(side.runs), "seeds": len(side.seeds()),
            "families": Counter(run.family for run in side.runs), "loss": losses, "time": summary(side.times),
            "memory": summary(side.memory()), "p_target": verdict.one_sample(side.losses(), target) if target else None,
            "runs_for_target": verdict.runs_needed(below, losses.sd, 1, verdict.ALPHA) if below and below > 0 else None,
            "each": [(str(run.path), run.index, run.seed, run.loss, run.seconds) for run in side.runs],
            "not counted": side.left,
            "times do not count": [f"{run.path}: {run.void}" for run in side.runs if run.void],
            "notes": [f"{note} ({n} runs)" for note, n in Counter(x for run in side.runs for x in run.notes).items()],
            "the same run twice": [f"{path} is {kept}" for path, kept in side.reading.duplicates],
            "not read": [f"{path}: {why}" for path, why in side.reading.unread]}

def phases(a: Side, b: Side) -> list[dict[str, Any]]:
    """Mean seconds of each phase on both sides, and whether it is on the clock: work moved out of the clock shows."""
    found: dict[tuple[str, bool], dict[str, Any]] = {}
    for key, side in (("a_s", a), ("b_s", b)):
        for phase in (phase for run in side.runs for phase in run.phases):
            name, timed = phase["name"], phase["timed"]
            line = found.setdefault((name, timed), {"name": name, "timed": timed, "a_s": 0.0, "b_s": 0.0})
            line[key] += phase["ms"] / 1000 / len(side.runs)
    return list(found.values())

def unequal(a: Side, b: Side, keys: Iterable[str]) -> dict[str, tuple[list[str], list[str]]]:
    return {key: (a.values(key), b.values(key)) for key in keys if a.values(key) != b.values(key)}

def text(report: dict[str, Any]) -> str:
    """The report for people, about 40 lines at most."""
    sides, target, lines = {"A": report["a"], "B": report["b"]}, report["target"], []
    rows = [["", "seeds", "loss", "sd", f"p (< {target})" if target else "", "n", "time s", "sd", "peak MiB"]]
    for name, side in sides.items():
        kinds = ", ".join(f"{n} of family {kind}" for kind, n in side["families"].items())
        lines.append(f"{name}  {short(side['paths'])}: {side['runs']} runs of {side['seeds']} seeds ({kinds})")
        lines += [f"   {what} ({len(side[what])}): {short(side[what])}" for what in (
            "not counted", "times do not count", "notes", "the same run twice", "not read") if side[what]]
        loss, time, p = side["loss"], side["time"], f"{side['p_target']:.3g}" if target else ""
        rows.append([name, f"{loss.n}", f"{loss.mean:.5f}", f"{loss.sd:.5f}", p, f"{time.n}", f"{time.mean:.3f}",
                     f"{time.sd:.3f}", f"{side['memory'].mean:.0f}"])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines += ["  ".join(cell.replace("nan", "-").rjust(width) for cell, width in zip(row, widths)) for row in rows]
    lines += ["runs that reach p < 0.01 four times of five at these means: " + ", ".join(
        f"{name} {side['runs_for_target'] or '-'}" for name, side in sides.items())] * bool(target)
    base, mib = report["a"]["time"].mean, report["a"]["memory"].mean
    lines.append(f"B - A [{1 - verdict.ALPHA:.0%} interval]; test of times: {report['method']}")
    lines += ["  loss    " + spread(report["loss"], "+.5f", "nats")]
    lines += ["  time    " + spread(test, "+.3f", "s", base) for test in report["time_tests"] or [None]]
    lines += ["  memory  " + spread(report["memory"], "+.1f", "MiB", mib)]
    lines += [f"  time at equal loss, {slope} {spread(test, '+.3f', 's', base)}" for slope, test in zip(
        ("by the slope at the end:", "by half of that slope:  "), report["at_equal_loss"])]
    if (steps := report["equivalent_steps"]) is not None:
        lines.append(f"equivalent steps: B's loss difference is worth {steps:+.1f} steps of A by its slope at the end "
                     f"({100 * report['nats_per_step']:.4f} nats per 100 steps)")
    lines.append(report["curves"])
    for timed, name in ((False, "off"), (True, "on")):
        some = [phase for phase in report["phases"] if phase["timed"] == timed]
        sums = [sum(phase[key] for phase in some) for key in ("a_s", "b_s")]
        lines += [f"phases {name} the clock: A {sums[0]:.2f} s, B {sums[1]:.2f} s; " + short(
            f"{phase['name']} {phase['a_s']:.2f}, {phase['b_s']:.2f}" for phase in some)] * bool(some)
    lines += [f"{key}: " + (short(f"{name} {cut(one)} -> {cut(other)}" for name, (one, other) in report[key].items())
                            or "no difference known") for key in ("environment", "config")]
    lines += [f"note: {note}" for note in report["notes"]]
    n, have = report["runs_to_settle"] or 0, min(side["time"].n for side in sides.values())
    lines += [f"settled by about {n} runs a side ({max(0, n - have)} more), if the difference is as measured"] * bool(n)
    return "\n".join([*lines, f"verdict: {report['verdict']}: {report['reason']}"])

def short(items: Iterable[str]) -> str:
    items = list(items)
    return "; ".join(items[:SHOWN]) + f"; and {len(items) - SHOWN} more" * (len(items) > SHOWN)

def cut(values: list[str]) -> str:
    return (" and ".join(values) or "not said")[:SHOWN_CHARACTERS]

def spread(test: Difference | None, form: str, unit: str, base: float | None = None) -> str:
    if test is None:
        return "not compared"
    share = f" = {test.mean / base:+.2%} [{test.low / base:+.2%}, {test.high / base:+.2%}]" if base else ""
    return f"{test.mean:{form}} {unit} [{test.low:{form}}, {test.high:{form}}]{share}, p {test.p:.2g}"

def plot(groups: dict[str, list[Run]], path: Path) -> None:
    """Loss over steps and over time, whole and near the end: means, with bands from the lowest to the highest run."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, grid = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    for k, (name, runs) in enumerate(groups.items()):
        steps = sorted(set.intersection(*({point.step for point in run.val} for run in runs)))
        columns = [[point for run in runs for point in run.val if point.step == step] for step in steps]
        losses = [[point.loss for point in column] for column in columns]
        times = [mean(point.seconds for point in column if point.seconds is not None) for column in columns]
        for row, xs, unit in zip(grid, (steps, times), ("step", "training time (s)")):
            tail = max(0, min(sum(not x >= (1 - PLOT_TAIL) * xs[-1] for x in xs), len(xs) - 2))
            for axes, first, title in zip(row, (0, tail), ("whole run", "near the end")):
                x, y = xs[first:], losses[first:]
                axes.plot(x, [*map(mean, y)], ("o-", "s--", "^-.", "v:")[k % 4], color=f"C{k}", markersize=3,
                          label=f"{name}: {len(runs)} runs")             # dashes: equal curves hide each other
                axes.fill_between(x, [*map(min, y)], [*map(max, y)], color=f"C{k}", alpha=0.25, linewidth=0)
                axes.set(xlabel=unit, ylabel="validation loss (nats per token)", title=title)
    for axes in grid.flat:
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)

def jsonable(value: Any) -> Any:
    """Named tuples as objects, and null for what JSON has no number for."""
    value = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(jsonable, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value

def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python records compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs=2, type=Path, metavar="SIDE", help="A and B: files or directories of logs")
    parser.add_argument("--target", type=float, help="loss to reach, nats per token; default: target_loss of the logs")
    parser.add_argument("--across", action="store_true", help="compare times of different machines or environments too")
    parser.add_argument("--margin", type=float, default=verdict.SAME_MARGIN, help="of `same`: share of A's time")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw loss over steps and over time")
    args = parser.parse_args(argv)
    a, b = (side_of(name, [path]) for name, path in zip("AB", args.sides))
    report = compare(a, b, args.target, args.across, args.margin)
    print(json.dumps(jsonable(report), indent=1) if args.json else text(report))
    if args.plot:
        plot({"A": a.runs, "B": b.runs}, args.plot)
    return 0
