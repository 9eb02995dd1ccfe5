"""Verb `bench`: is B faster than A on this machine? Interleaved runs of two trainers, stopped as soon as it is decided.

Pairs run as A B, B A, A B, ...: what drifts slowly hits both sides alike. After 4, 6, 10, 16, ... pairs there is a look
(sequential.py): four decide a difference of five times the spread between pairs, ten one of twice the spread. What its
times leave undecided says how many pairs it needs; the same command with more --pairs continues. Any trainer that
prints or writes the usual `step:.../... val_loss:... train_time:...` lines can be a side. OUT/manifest.jsonl has a line
when a run starts and one when it ends, whatever became of it.

Exit status: 0 faster, 3 slower, 4 same, 5 same program, 6 no record, 7 undecided, 8 not comparable; 1 a side failed
twice; 2 bad input, or a busy machine that --refuse-busy refuses; 130 interrupted."""
from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tools import calibrate, compare, launch, sequential, verdict
from tools.launch import Manifest, source_hashes
from tools.layout import MANIFEST, short_hashes
from tools.logs import ToolError

SHOWN_LINES = 12               # of the stderr of a failed run
MAX_FAILURES = 2               # of one side; then it will not get better by itself
CALIBRATION_LIMIT = 20.0       # times the seconds that a calibration is to take; it compiles nothing
STARTING_S = 60.0              # of Python and torch
BUSY_CORES, BUSY_SHARE = 0.5, 0.05     # cores at work for others, and share of all, that make a machine busy
BUSY_SPREAD = 0.1              # of a calibration's batches
LAUNCHER = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic", re.M)   # begins what torchrun adds to an error
# a field that becomes a flag (its default is made by a call, as in train_gpt.py), or a flag by argparse, click, ...
SEED_FLAG = re.compile(r"^\s+seed\s*:\s*int\s*=\s*\w+\(|[\"']--seed[\"']", re.M)
NAMES_A_SEED = re.compile(r"--seed(=|$)|.*\{seed\}")


def say(*lines: str) -> None:
    """Print above the progress line, at once: a bench is often watched through a pipe."""
    from tqdm import tqdm
    tqdm.write("\n".join(lines))
    sys.stdout.flush()


# ---- Settings
def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python records bench", allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="%(prog)s A.py B.py [settings] [-- flags of both sides]")
    parser.add_argument("scripts", nargs=2, type=Path, metavar="TRAINER", help="A and B; may be one file")

    def setting(name: str, kind: type, default: Any, about: str) -> None:
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{about} [%(default)s]")

    setting("a", str, "", "flags of side A; {seed} is replaced by the pair's number")
    setting("b", str, "", "of side B")
    setting("ranks", int, 1, "processes of a run")
    setting("pairs", int, 10, "at most; fewer when it is decided earlier, at 4, 6, 10, 16, ... pairs")
    setting("out", Path, f"logs/bench-{time.strftime('%Y%m%d-%H%M%S')}", "folder of the manifest and the runs")
    setting("data", Path, None, "folder that the runs see as `data`; None: `data` beside A")
    setting("limit", float, None, launch.LIMIT_HELP)
    setting("calibrate", float, 20.0, "seconds of calibration, before and after; 0: none")
    parser.add_argument("--refuse-busy", action="store_true", help="do not begin on a machine that works for others")

    at = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:at])
    args.both = argv[at + 1:]
    args.data = args.data or args.scripts[0].resolve().parent / launch.DATA
    refuse_wrong(args)
    return args


def refuse_wrong(args: argparse.Namespace) -> None:
    wrong = [f"no file {path}" for path in args.scripts if not path.is_file()]
    for name in ("ranks", "pairs"):
        if getattr(args, name) < 1:
            wrong.append(f"--{name} below 1")
    if args.limit is not None and not args.limit > 0:
        wrong.append("--limit without a second")
    if not 0 <= args.calibrate < math.inf:
        wrong.append(f"--calibrate of {args.calibrate:g} seconds")
    if wrong:
        raise ToolError("settings", " and ".join(wrong), "two Python files, a rank, a pair", "check them")


def flags_of(script: Path, own: str, both: list[str]) -> list[str]:
    """Of a side: both sides', its own, and a seed where the trainer takes one and none is named."""
    flags = [*both, *shlex.split(own)]
    if any(NAMES_A_SEED.match(flag) for flag in flags):
        return flags
    if SEED_FLAG.search(script.read_text(encoding="utf-8", errors="replace")):
        flags.append("--seed={seed}")
    return flags


# ---- The bench
class Bench:
    """Pairs of runs in OUT, after what earlier calls did. Raises ToolError if OUT is another bench's, or in use."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.scripts = dict(zip("AB", args.scripts))
        self.sides: dict[str, dict[str, Any]] = {}
        for side, own in (("A", args.a), ("B", args.b)):
            script = self.scripts[side]
            flags = flags_of(script, own, args.both)
            self.sides[side] = {"flags": flags, "sources": source_hashes(script)}
            remark = "" if "seed" in str(flags) else " (seeds are not set)"
            say(f"{side}: {script} {' '.join(flags)}{remark}")

        running = launch.processes_of(args.out)
        if running:
            pids = " ".join(map(str, running))
            raise ToolError(f"folder {args.out}", f"processes {running} of its runs", "none: they disturb the times",
                            f"wait for them, or end them: kill {pids}")
        self.manifest = Manifest(args.out / MANIFEST)
        self.refuse_other_plan()

    def refuse_other_plan(self) -> None:
        """A bench goes on as it began."""
        data = os.path.relpath(self.args.data, self.args.out)
        plan = {"sides": self.sides, "ranks": self.args.ranks, "data": data}
        if not self.manifest.of("bench"):
            self.manifest.add("bench", **plan)
        old = self.manifest.of("bench")[0]
        changed = [key for key in plan if old[key] != plan[key]]
        if changed:
            now = {key: plan[key] for key in changed}
            then = {key: old[key] for key in changed}
            raise ToolError(f"bench in {self.args.out}", short_hashes(now), short_hashes(then),
                            "restore these to continue it, or give another --out")

    @property
    def pairs(self) -> list[dict[str, Any]]:
        return self.manifest.of("pair")

    @property
    def differences(self) -> list[float]:
        """B's time over A's - 1, by pair."""
        return [line["difference"] for line in self.pairs]

    def settled(self) -> str:
        """What the times of the pairs say for sure, or ""."""
        test = sequential.paired(self.differences)
        margin = verdict.SAME_MARGIN
        if test.p < verdict.SHARE:
            return f"the times differ, p {test.p:.2g} is below {verdict.SHARE:g}"
        if -margin <= test.low and test.high <= margin:
            return f"the times are the same within {margin:.2%}"
        return ""

    def stop(self) -> str:
        """Why no more pairs are run, or ""."""
        why = self.settled()
        if not why and len(self.pairs) >= self.args.pairs:
            why = "all are done"
        return why

    def needed(self) -> str:
        """How many pairs would settle the times, if they go on as they are; "" where they are settled, and where
        nothing is known of their spread."""
        done, mean, sd = verdict.summary(self.differences)
        if done < 2 or self.settled():
            return ""
        found = f"a mean of {mean:+.3%} with a spread of {sd:.3%} between pairs"
        pairs = sequential.pairs_needed(mean, sd, verdict.SAME_MARGIN)
        if pairs is None:
            return f"{found} is not settled by {sequential.MOST_PAIRS} pairs; take longer runs, or a quieter machine"
        if pairs <= done:                                               # bad luck so far
            pairs = sequential.next_look(done).pairs
        return (f"about {pairs} pairs settle {found}; the same command with --out={self.args.out} --pairs={pairs} "
                "continues")

    # -- The machine
    def look(self, when: str) -> None:
        """Note and print the machine, its state and its calibration, and what changed since the last look."""
        before = self.manifest.of("machine")
        cores = calibrate.busy_cores()
        calibration = self.calibration(1 + len(before))
        now = self.manifest.add("machine", when=when, machine=calibrate.fingerprint(), state=calibrate.state(),
                                calibration=calibration, busy=busy(cores, calibration["rates"]))
        for kind in ("machine", "state"):
            known = [f"{key} {value}" for key, value in now[kind].items() if value]
            say(f"{when}: {kind}: {', '.join(known)}")

        last = before[-1] if before else {"machine": {}, "calibration": {"rates": {}}}
        for key, was in last["machine"].items():
            if was != now["machine"][key]:
                say(f"{when}: NOT AS BEFORE: {key} was {was}")
        if not calibration["rates"]:
            say(f"{when}: calibration not run: {calibration.get('cause', '--calibrate=0')}")
        for name, (rate, spread) in calibration["rates"].items():
            since = ""
            if name in last["calibration"]["rates"]:
                was, _ = last["calibration"]["rates"][name]
                since = f", {rate / was - 1:+.1%} since the last look"
            say(f"{when}: calibration: {name} {rate:.4g}, spread {spread:.1%}{since}")
        for reason in now["busy"]:
            say(f"{when}: BUSY: {reason}")
        if when == "before" and now["busy"] and self.args.refuse_busy:
            raise ToolError("machine", "; ".join(now["busy"]), "one that is left alone, by --refuse-busy",
                            "end what else runs, or go on without --refuse-busy")

    def calibration(self, number: int) -> dict[str, Any]:
        """How it ended, and the rates that it measured; none of them if it was not run, or failed."""
        found: dict[str, Any] = {"rates": {}}
        if not self.args.calibrate:
            return found
        folder = self.args.out / f"calibrations/{number:03}"
        folder.mkdir(parents=True)
        flags = [f"{self.args.calibrate:g}"]
        limit_s = STARTING_S + CALIBRATION_LIMIT * self.args.calibrate
        found |= launch.attend(Path(calibrate.__file__), folder, flags, self.args.ranks, limit_s)
        for printed in re.findall(r"^\{.*", (folder / launch.CONSOLE).read_text(), re.M):
            found["rates"] = json.loads(printed)
        return found

    # -- Runs
    def run(self, side: str, pair: int) -> dict[str, Any]:
        """One run of a side, printed. Raises ToolError if its source was edited since the bench began."""
        script = self.scripts[side]
        began_with = self.sides[side]["sources"]
        now = source_hashes(script)
        if now != began_with:
            found = f"edited meanwhile: {short_hashes(now)}"
            raise ToolError(f"source of side {side}, {script}", found, short_hashes(began_with),
                            "restore it to continue, or start anew with another --out")

        flags = [flag.replace("{seed}", str(pair)) for flag in self.sides[side]["flags"]]
        seeded = flags != self.sides[side]["flags"]
        name = f"{1 + len(self.manifest.of('start')):03}_{side}"
        folder = self.args.out / "runs" / name
        limit_s = self.manifest.limit_s(self.args.limit)
        line = self.manifest.run(script, folder, flags, self.args.ranks, limit_s, self.args.data,
                                 side=side, pair=pair, seed=pair if seeded else None)
        if line["outcome"] == "failed":
            say(f"{name}: FAILED, {line['cause']}; stderr.txt ends with:", *last_errors(folder))
        elif line["train_s"] is None:
            raise ToolError(f"times of {name}", line["void"] or "none", "times that count", "change the flags")
        else:
            said = f"{name}: pair {pair}, loss {line['val_loss']:.4f}, {line['train_s']:.3f} of {line['wall_s']:.1f} s"
            if line["run"] == 1:
                most = 2 * self.args.pairs
                said += f", at most {most} such runs: {most * line['wall_s'] / 60:.1f} minutes"
            say(said)
        return line

    def pair(self, bar: Any) -> str:
        """One run of each side, with the same seed, and the pair's line. Returns the side that failed, or ""."""
        used = [line["pair"] for line in self.manifest.of("start")]
        number = 1 + max(used, default=0)                              # a broken pair's number is not used again
        order = "AB" if len(self.pairs) % 2 == 0 else "BA"
        seconds = {}
        for side in order:
            line = self.run(side, number)
            if line["outcome"] == "failed":
                return side
            seconds[side] = line["train_s"]
            bar.update()

        difference = seconds["B"] / seconds["A"] - 1
        self.manifest.add("pair", pair=number, a_s=seconds["A"], b_s=seconds["B"], difference=difference)
        say(f"pair {number}: B takes {difference:+.2%}; {self.so_far()}")
        return ""

    def so_far(self) -> str:
        """The mean of the pairs, and what a look at them tells, or when there will be one."""
        count, mean, _ = verdict.summary(self.differences)
        look = sequential.last_look(count)
        if look and look.pairs == count:
            test = sequential.paired(self.differences)
            seen = f"surely {test.low:+.2%} to {test.high:+.2%}, p {test.p:.2g}"
        else:
            seen = f"the next look is at {sequential.next_look(count).pairs}"
        return f"mean of {count} {mean:+.2%}, {seen}"

    def race(self) -> int:
        """Pairs until it is decided, then the comparison. Returns the exit status."""
        from tqdm import tqdm
        failures: Counter[str] = Counter()
        why = self.stop()
        if not why:
            self.look("before")
            with tqdm(total=2 * self.args.pairs, initial=2 * len(self.pairs), unit="run", disable=None) as bar:
                while not why:
                    failed = self.pair(bar)
                    failures[failed] += bool(failed)
                    why = self.stop()
                    if failures[failed] >= MAX_FAILURES:
                        why = f"side {failed} failed again"
            self.look("after")
        word = self.summarize(why)
        if max(failures.values(), default=0) >= MAX_FAILURES:
            return 1
        return verdict.STATUS[word]

    def summarize(self, why: str) -> str:
        """Print and write what was found. Returns the verdict."""
        outcomes = Counter(line["outcome"] for line in self.manifest.of("end"))
        say(f"stopped after {len(self.pairs)} pairs: {why}; runs: {dict(outcomes)}")
        report = self.compared() if self.pairs else None
        word = report["verdict"] if report else "undecided"
        needs = self.needed() if word == "undecided" else ""
        busy_looks = [look for look in self.manifest.of("machine") if look.get("busy")]
        disturbed = [f"busy {look['when']} the runs: {'; '.join(look['busy'])}" for look in busy_looks]
        summary = {"stopped": why, "outcomes": outcomes, "pairs": self.pairs, "needs": needs, "disturbed": disturbed,
                   "compare": compare.jsonable(report)}
        (self.args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")

        for remark in disturbed:
            say(f"note: the machine was {remark}")
        if needs:
            say(f"note: {needs}")
        say(compare.text(report) if report else "verdict: undecided: no pair is complete")
        return word

    def compared(self) -> dict[str, Any]:
        """B against A, of the runs of complete pairs."""
        numbers = {line["pair"] for line in self.pairs}
        found: dict[str, list[Path]] = {"A": [], "B": []}
        for line in self.manifest.of("end"):
            if line["pair"] in numbers:
                found[line["side"]] += [self.args.out / line["folder"] / log for log in line["logs"]]
        a, b = (compare.side_of(side, paths) for side, paths in found.items())
        return compare.compare(a, b)


def busy(cores: float | None, rates: dict[str, list[float]]) -> list[str]:
    """What disturbs times here. cores: at work for others; rates: of a calibration."""
    found = []
    if cores is not None and cores > max(BUSY_CORES, BUSY_SHARE * calibrate.cores()):
        found.append(f"{cores:.1f} of {calibrate.cores()} cores work for others")
    for name, (_, spread) in rates.items():
        if spread > BUSY_SPREAD:
            found.append(f"{name} spreads by {spread:.0%}")
    return found


def last_errors(folder: Path) -> list[str]:
    """The end of a failed run's stderr, without what torchrun adds to it."""
    errors, *_ = LAUNCHER.split((folder / launch.ERRORS).read_text(errors="replace"))
    return [f"    {line}" for line in errors.splitlines()[-SHOWN_LINES:]]


def main(argv: list[str]) -> int:
    args = parsed(argv)
    try:
        return Bench(args).race()
    except KeyboardInterrupt:
        say(f"interrupted; the same command with --out={args.out} continues")
        return 130
