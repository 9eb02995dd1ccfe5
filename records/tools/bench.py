"""Verbs `bench` and `try`: run trainers in turn on this machine until it is decided which takes less time or loss.

    python records bench A.py B.py [-- flags of both]            two trainers; one file twice, with --a and --b
    python records bench train_gpt.py --arm=smear --arm='no_decay=--normuon_weight_decay=0' [-- flags]
    python records try idea.patch [-- flags]                     the trainer here, with and without a patch, on `pocket`
An arm is NAME (of records/ablations/NAME.patch), or NAME=PATCH, NAME=TRAINER.py, NAME=FLAGS; the base is A. Pairs run as
A B, B A, ..., in fresh processes with one seed a pair, so that a drift hits both sides alike. A bench looks after 4, 6,
10, 16, ... pairs and at --pairs, and stops at a look that decides; the level of all looks together is 1 %
(statistics.py). Several arms are compared after all rounds, without words. The same command goes on where it stopped.
OUT/manifest.jsonl has a line when a run starts and one when it ends, whatever became of it; `new` takes OUT.

Exit status: that of `compare`; several arms 0; 1 a run failed twice; 2 bad input; 130 interrupted."""
from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from tools import plot, report, statistics
from tools.read import Run, ToolError, read_runs
from tools.report import MANIFEST, Side, aligned, side_of, test_in_words

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "records/ablations"
TRAINER = "train_gpt.py"               # the name that patches know
MARK = "RECORDS_RUN_FOLDER"            # environment variable that tells which run a process belongs to
GRACE_S = 20.0                         # a trainer that is told to end writes its last log lines first
FIRST_LIMIT_S = 7200.0                 # of a first run; later ones have three times the longest and a minute
SHOWN_LINES = 12                       # of the stderr of a failed run
CONSOLE, ERRORS, DATA = "console.txt", "stderr.txt", "data"         # in the folder of a run
IMPORT = re.compile(r"^\s*(?:from|import)\s+(\w+)", re.M)
# A field that becomes a flag (its default is made by a call, as in train_gpt.py), or a flag by argparse, click, ...
SEED_FLAG = re.compile(r"^\s+seed\s*:\s*int\s*=\s*\w+\(|[\"']--seed[\"']", re.M)


class Trainer(NamedTuple):
    """One side: a script, and its flags, in which {seed} is replaced by the pair's number."""
    script: Path
    flags: list[str]

    def sources(self) -> dict[str, str]:
        """sha256 of the script and of the files beside it that it imports, by name."""
        names = IMPORT.findall(self.script.read_text("utf-8", errors="replace"))
        beside = [self.script.with_name(f"{name}.py") for name in sorted(set(names))]
        paths = [self.script, *(path for path in beside if path.is_file())]
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def trainer(script: Path, flags: list[str]) -> Trainer:
    """A side, with a seed where the script takes one and no flag names it."""
    if not script.is_file():
        raise ToolError("trainer", script, "a Python file", "check the spelling")
    if not any("--seed" in flag or "{seed}" in flag for flag in flags):
        if SEED_FLAG.search(script.read_text("utf-8", errors="replace")):
            flags = [*flags, "--seed={seed}"]
    return Trainer(script, flags)


# ---- One run --------------------------------------------------------------------------------------------------------

def processes_of(folder: Path) -> list[int]:
    """Processes of runs in a folder or below, by their environment (Linux; elsewhere none are found)."""
    mark = f"{MARK}={folder.resolve()}/".encode()
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):                               # ended meanwhile, or another user's
            if mark in environment.read_bytes():
                found.append(int(environment.parent.name))
    return found


def end(child: subprocess.Popen, folder: Path) -> None:
    """Ask a run to end, wait, then kill what is left of it: workers of torchrun lead sessions of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):            # the second Ctrl-C: at once
        child.wait(GRACE_S)
    for pid in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def run_once(command: list[str], folder: Path, ranks: int, limit_s: float) -> dict[str, Any]:
    """Run a command to its end in `folder`; no process of it is left. Returns cause ("" for success) and wall_s."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "5000"} | os.environ
    environment[MARK] = f"{folder.resolve()}/"
    began = time.monotonic()
    cause = ""
    with open(folder / CONSOLE, "xb") as out, open(folder / ERRORS, "xb") as err:
        child = subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                                 stdout=out, stderr=err, start_new_session=True)
        try:
            if child.wait(limit_s) != 0:
                cause = f"exit status {child.returncode}"
        except subprocess.TimeoutExpired:
            cause = f"still running after the limit of {limit_s:g} s"
        finally:
            wall_s = round(time.monotonic() - began, 3)
            end(child, folder)
    return {"cause": cause, "wall_s": wall_s}


def finished(folder: Path) -> list[Run]:
    """Of the logs that a trainer wrote, else of its console, which repeats a log."""
    ours = (DATA, CONSOLE, ERRORS)
    written = [path for path in sorted(folder.iterdir()) if path.name not in ours]
    for paths in (written, [folder / CONSOLE]):
        runs = [run for run in read_runs(paths).runs if run.finished or (run.kind != "ours" and run.final)]
        if runs:
            return runs
    return []


# ---- The bench ------------------------------------------------------------------------------------------------------

class Bench:
    """Rounds of runs in OUT, after what earlier calls did. Raises ToolError if OUT is another bench's, or in use."""

    def __init__(self, args: argparse.Namespace, sides: dict[str, Trainer]) -> None:
        self.args = args
        self.sides = sides
        self.manifest = args.out / MANIFEST
        args.out.mkdir(parents=True, exist_ok=True)
        busy = processes_of(args.out)
        if busy:
            raise ToolError(f"folder {args.out}", f"processes {busy} of its runs", "none", "wait for them or end them")
        plan = {"sides": {name: {"flags": side.flags, "sources": side.sources()} for name, side in sides.items()},
                "ranks": args.ranks, "pairs": args.pairs}
        if not self.lines("bench"):
            self.add("bench", **plan)
        first = self.lines("bench")[0]
        changed = [key for key in ("sides", "ranks") if first[key] != plan[key]]
        if changed:
            raise ToolError(f"bench in {args.out}", f"other {' and '.join(changed)} than it began with", "the same",
                            "restore them to go on, or give another --out")
        self.plan = first
        ended = {line["run"] for line in self.lines("end")}
        for line in self.lines("start"):
            if line["run"] not in ended:
                self.add("end", **{**line, "outcome": "lost", "cause": "the tool was killed"})

    def lines(self, kind: str) -> list[dict[str, Any]]:
        return report.manifest_lines(self.manifest, kind)

    def add(self, kind: str, **facts: Any) -> dict[str, Any]:
        """Append a line and have it on the disk before anything else happens; a torn line is cut off."""
        line = {**facts, "type": kind}
        with open(self.manifest, "ab+") as file:
            file.seek(0)
            whole = file.read()
            file.truncate(whole.rfind(b"\n") + 1)
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return line

    def limit_s(self) -> float:
        took = [line["wall_s"] for line in self.lines("end") if line["outcome"] == "done"]
        return self.args.limit or (3 * max(took) + 60 if took else FIRST_LIMIT_S)

    def run(self, name: str, pair: int) -> dict[str, Any]:
        """One run, with its two lines in the manifest. Raises ToolError if its source was edited since the start."""
        side = self.sides[name]
        if side.sources() != self.plan["sides"][name]["sources"]:
            raise ToolError(f"source of {name}, {side.script}", "edited meanwhile", "as the bench began with",
                            "restore it to go on, or start anew with another --out")
        number = 1 + len(self.lines("start"))
        folder = self.args.out / f"runs/{number:03}_{name}"
        folder.mkdir(parents=True)
        if self.args.data.is_dir():
            (folder / DATA).symlink_to(os.path.relpath(self.args.data.resolve(), folder.resolve()))
        command = [os.path.relpath(side.script.resolve(), folder.resolve())]
        command += [flag.replace("{seed}", str(pair)) for flag in side.flags]
        if self.args.ranks > 1:
            command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.args.ranks}", *command]
        facts = {"run": number, "folder": f"runs/{folder.name}", "side": name, "pair": pair,
                 "source_sha256": side.sources()[side.script.name], "command": shlex.join(["python", *command])}
        self.add("start", **facts, time=time.strftime("%Y-%m-%dT%H:%M:%S"))
        try:
            return self.add("end", **facts, **self.outcome(command, folder))
        except BaseException as error:
            self.add("end", **facts, outcome="interrupted", cause=repr(error))
            raise

    def outcome(self, command: list[str], folder: Path) -> dict[str, Any]:
        """What the manifest says of the end of a run, printed."""
        ended = run_once(command, folder, self.args.ranks, self.limit_s())
        runs = [] if ended["cause"] else finished(folder)
        if not runs:
            cause = ended["cause"] or "no log of a final validation"
            errors = (folder / ERRORS).read_text(errors="replace").splitlines()[-SHOWN_LINES:]
            print(f"{folder.name}: FAILED, {cause}; its stderr.txt ends with", *errors, sep="\n    ", flush=True)
            return ended | {"outcome": "failed", "cause": cause}
        run = runs[0]
        seconds = "no time" if run.seconds is None else f"{run.seconds:.3f} s"
        print(f"{folder.name}: loss {run.loss:.4f}, {seconds}, {ended['wall_s']:.1f} s in all", flush=True)
        return ended | {"outcome": "done", "logs": [os.path.relpath(run.path, folder) for run in runs],
                        "val_loss": run.loss, "train_s": run.seconds, "void": run.void}

    def complete(self) -> list[int]:
        """Pairs of which every side is done."""
        done: dict[int, set[str]] = {}
        for line in self.lines("end"):
            if line["outcome"] == "done":
                done.setdefault(line["pair"], set()).add(line["side"])
        return sorted(pair for pair, names in done.items() if names >= set(self.sides))

    def pair(self) -> str:
        """One run of each side with the same seed; a broken pair's number is not used again. Returns the side that
        failed, or ""."""
        number = 1 + max((line["pair"] for line in self.lines("start")), default=0)
        order = list(self.sides)
        if len(self.complete()) % 2:
            order.reverse()
        for name in order:
            if self.run(name, number)["outcome"] != "done":
                return name
        return ""

    def side(self, name: str) -> Side:
        """The runs of complete pairs."""
        pairs = self.complete()
        paths = []
        for line in self.lines("end"):
            if line["outcome"] == "done" and line["side"] == name and line["pair"] in pairs:
                paths += [self.args.out / line["folder"] / log for log in line["logs"]]
        return side_of(name, paths)

    def compared(self) -> dict[str, Any]:
        """`compare` of two sides, of complete pairs."""
        a, b = (self.side(name) for name in self.sides)
        return report.compare(a, b, self.args.target)

    def race(self) -> int:
        """Rounds until it is decided. Returns the exit status."""
        failures: list[str] = []
        load = os.getloadavg()[0]
        self.add("machine", load_1min=round(load, 2), cores=os.cpu_count(), python=sys.version.split()[0])
        if load > 0.5:
            print(f"note: this machine is busy (load {load:.1f}); times will spread", flush=True)
        word = self.so_far() if self.complete() else "undecided"
        while len(self.complete()) < self.args.pairs and report.STATUS[word] == report.STATUS["undecided"]:
            failed = self.pair()
            if failed:
                failures.append(failed)
                if failures.count(failed) > 1:
                    print(f"stopped: {failed} failed again; {MANIFEST} in {self.args.out} lists all runs")
                    return 1
                continue
            word = self.so_far()
        return self.summed_up()

    def so_far(self) -> str:
        """Print the differences after a pair. Returns the verdict; several arms have none before the end."""
        done = len(self.complete())
        if len(self.sides) != 2:
            print(f"round {done} of {self.args.pairs}", flush=True)
            return "undecided"
        found = self.compared()
        share = found["share"] and found["share"]._replace(mean=100 * found["share"].mean, low=100 * found["share"].low,
                                                           high=100 * found["share"].high)
        print(f"pair {done} of {self.args.pairs}: B - A: loss {test_in_words(found['loss'], '+.4f', 'nats')}; time "
              f"{test_in_words(share or found['time'], '+.2f', '%' if share else 's')}", flush=True)
        return found["verdict"]

    def summed_up(self) -> int:
        """Print the result and draw it. Returns the exit status."""
        if not self.complete():
            print("verdict: undecided: no pair is complete")
            return report.STATUS["undecided"]
        sides = {name: self.side(name) for name in self.sides}
        status = 0
        if len(sides) == 2:
            found = self.compared()
            (self.args.out / "summary.json").write_text(json.dumps(report.jsonable(found), indent=1) + "\n")
            print(report.compare_in_words(found))
            status = report.STATUS[found["verdict"]]
        else:
            print("\n".join(aligned(table_of_arms(sides))))
        if self.args.plot:
            plot.curves({name: side.runs for name, side in sides.items()}, self.args.plot, self.args.target)
        return status


def measures(sides: dict[str, Side]) -> dict[str, dict[str, statistics.Difference]]:
    """By measure (loss in nats, time in shares, memory in MiB) and arm: its difference to the first side, by seed."""
    base = next(iter(sides))
    cells: dict[str, dict[tuple[str, int], float]] = {"loss": {}, "time": {}, "memory": {}}
    for name, side in sides.items():
        for place, same in enumerate(side.seeds()):
            seed = place if same[0].seed is None else same[0].seed
            cells["loss"][name, seed] = statistics.summary([run.loss for run in same]).mean
            logs = [math.log(run.seconds / run.final.step) for run in same if run.seconds]
            if logs:
                cells["time"][name, seed] = statistics.summary(logs).mean
            peaks = [max(run.result["peak_memory_mib"].values()) for run in same if run.result.get("peak_memory_mib")]
            if peaks:
                cells["memory"][name, seed] = statistics.summary(peaks).mean
    found = {}
    for key, values in cells.items():
        found[key] = statistics.arms(values, base) if any(name == base for name, _ in values) else {}
    for arm, test in found["time"].items():
        found["time"][arm] = statistics.Difference(*(None if x is None else math.expm1(x) for x in test[:3]), test.p)
    return found


def table_of_arms(sides: dict[str, Side]) -> list[list[str]]:
    found = measures(sides)
    rows = [["arm", "seeds", "loss, nats", "ms a step, share", "MiB"]]
    for name, side in list(sides.items())[1:]:
        tests = [test_in_words(found[key].get(name), form, "") for key, form in (("loss", "+.4f"), ("time", "+.2%"))]
        memory = found["memory"].get(name)
        rows.append([name, str(len(side.seeds())), *tests, f"{memory.mean:+.0f}" if memory else "-"])
    return rows


# ---- Patches --------------------------------------------------------------------------------------------------------

def git_apply(patch: Path, folder: Path, *options: str) -> str:
    """Apply a patch to the trainer in a folder that is in no repository. Returns what was wrong, or ""."""
    alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    command = ["git", "apply", f"--include={TRAINER}", *options, str(patch.resolve())]
    done = subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True)
    return done.stderr.strip() or "git apply failed" if done.returncode else ""


def patched(script: Path, patch: Path, folder: Path) -> Path:
    """A copy of a trainer in `folder`, patched without fuzz (lines may have moved). Raises ToolError."""
    if not patch.is_file():
        known = ", ".join(sorted(path.stem for path in PATCHES.glob("*.patch")))
        raise ToolError("patch", patch, f"a file, or one of {known}", "check the spelling")
    folder.mkdir(parents=True, exist_ok=True)
    copy = Path(shutil.copyfile(script, folder / TRAINER))
    wrong = git_apply(patch, folder)
    if not wrong and copy.read_bytes() == script.read_bytes():
        wrong = f"it does not touch {TRAINER}"
    if wrong:
        raise ToolError(f"patch {patch.name}", wrong, f"a change of {script.name} as it is here",
                        f"make it anew: git diff {TRAINER} > {patch.name}")
    return copy


def arm(text: str, args: argparse.Namespace) -> tuple[str, Trainer]:
    """A side from NAME, NAME=PATCH, NAME=TRAINER.py or NAME=FLAGS."""
    name, _, what = text.partition("=")
    base = args.scripts[0]
    if what.startswith("-"):
        return name, trainer(base, [*args.both, *shlex.split(what)])
    if what.endswith(".py"):
        return name, trainer(Path(what), args.both)
    patch = Path(what) if what else PATCHES / f"{name}.patch"
    return name, trainer(patched(base, patch, args.out / "sources" / name), args.both)


def sides_to_try(args: argparse.Namespace) -> dict[str, Trainer]:
    """The trainer here without and with a patch. One that is in it already is taken out for the base."""
    sources = args.out / "sources"
    base = ROOT / TRAINER
    for name in "AB":
        (sources / name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base, sources / name / TRAINER)
    if args.patch.suffix == ".py" and args.patch.is_file():
        shutil.copyfile(args.patch, sources / "B" / TRAINER)
    elif args.patch.is_file() and not git_apply(args.patch, sources / "A", "-R"):
        print(f"{TRAINER} has {args.patch.name} already: A is without it")
    else:
        patched(base, args.patch, sources / "B")
    flags = ["--preset=pocket", "--sample_tokens=0", *args.both]
    return {name: trainer(sources / name / TRAINER, flags) for name in "AB"}


# ---- The commands ---------------------------------------------------------------------------------------------------

def parsed(argv: list[str]) -> argparse.Namespace:
    verb = argv[0]
    parser = argparse.ArgumentParser(f"python records {verb}", allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    if verb == "try":
        parser.add_argument("patch", type=Path, help="a patch of train_gpt.py (git diff), or a whole trainer")
    else:
        parser.add_argument("scripts", nargs="+", type=Path, metavar="TRAINER", help="A, and B unless there are arms")
        parser.add_argument("--arm", action="append", default=[], help="NAME, NAME=PATCH, NAME=TRAINER.py, NAME=FLAGS")
        parser.add_argument("--a", default="", help="flags of side A; {seed} is the pair's number")
        parser.add_argument("--b", default="", help="flags of side B")
    parser.add_argument("--pairs", type=int, default=6 if verb == "try" else 10, help="at most [%(default)s]")
    parser.add_argument("--ranks", type=int, default=1, help="processes of a run [1]")
    parser.add_argument("--target", type=float, help="loss to prove [target_loss of the logs]")
    parser.add_argument("--limit", type=float, help="seconds after which a run has failed")
    parser.add_argument("--out", type=Path, help="folder of the manifest and the runs")
    parser.add_argument("--data", type=Path, help="folder that the runs see as `data` [beside A]")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curves")
    at = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[1:at])
    args.both = argv[at + 1:]
    if min(args.pairs, args.ranks) < 1:
        raise ToolError("settings", f"--pairs={args.pairs} --ranks={args.ranks}", "at least 1", "give larger ones")
    return args


def main(argv: list[str]) -> int:
    """argv: the verb and its arguments."""
    args = parsed(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)               # ends the run and leaves a line, as Ctrl-C
    if argv[0] == "try":
        args.out = args.out or Path(f"logs/try-{args.patch.stem}")
        args.data = args.data or ROOT / DATA
        args.plot = args.plot or args.out / "curves.png"
        sides = sides_to_try(args)
    else:
        args.out = args.out or Path(f"logs/bench-{time.strftime('%Y%m%d-%H%M%S')}")
        args.data = args.data or args.scripts[0].resolve().parent / DATA
        sides = {"A": trainer(args.scripts[0], [*args.both, *shlex.split(args.a)])}
        for script in args.scripts[1:2]:
            sides["B"] = trainer(script, [*args.both, *shlex.split(args.b)])
        sides |= dict(arm(text, args) for text in args.arm)
    if len(sides) < 2:
        raise ToolError("sides", "one", "two trainers, or --arm", "python records bench --help")
    try:
        status = Bench(args, sides).race()
    except KeyboardInterrupt:
        print(f"interrupted; the same command with --out={args.out} continues")
        return 130
    if argv[0] == "try" and status != 1:
        name = re.sub(r"\W", "_", args.patch.stem).title().replace("_", "")
        print(f"picture: {args.plot}\na record of it: python records new {name} {args.out} --kind=comparison")
    return status
