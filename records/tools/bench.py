"""Verbs `bench` and `try`: run two trainers in turn on this machine until a difference in time or loss is decided.

    python records bench A.py B.py [-- flags of both]            quote a side with flags: 'B.py --seed=1'
    python records try idea.patch [-- flags]                     this trainer without (A) and with a patch, on `pocket`

The runs of a pair are fresh processes with one seed, and each writes one log. A bench tests after 4, 6, 10, 16, ...
pairs and after --pairs, and stops at the first test that decides; all tests together have a level of 1 %
(statistics.py). Repeat the command to continue. `new` takes the output directory, whose manifest.jsonl has one line
when a run starts and one when it ends, however it ended.
"""
import argparse
import contextlib
import fcntl
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

from tools import files, plot, report
from tools.files import counted, inside, say
from tools.read import Facts, ToolError, read_runs
from tools.report import MANIFEST, PAIRED, Side, manifest_lines, side_of
from tools.statistics import ALPHA, critical_t, pair_order

ROOT = Path(__file__).resolve().parents[2]
TRAINER = "train_gpt.py"               # file name in patches
GRACE_S = 40.0                         # torchrun gives its workers 30 s before it kills them
# Verdicts that more pairs may change; those of the same program measure the noise.
OPEN = {"undecided", "not proven", "not measured in turn", "same program"}
STDERR_LINES = 12                      # lines of stderr that are printed when a run failed
CONSOLE, ERRORS, DATA = "console.txt", "stderr.txt", "data"         # names in the directory of a run

class Trainer(NamedTuple):
    """One side of a bench: a script and its flags. `{seed}` in a flag is replaced by the number of the pair."""
    script: Path
    flags: list[str]

def make_trainer(script: Path, flags: list[str]) -> Trainer:
    source = files.read_bytes(script)
    takes_seed = b" seed: int" in source or b"--seed" in source                # a field or an argument
    if takes_seed and not any("--seed" in flag or "{seed}" in flag for flag in flags):
        flags = [*flags, "--seed={seed}"]
    return Trainer(script, flags)

def run_once(command: list[str], folder: Path, ranks: int, limit_s: float, lock: int) -> Facts:
    """Run a command in `folder`, then end all its processes; it holds `lock` even if this tool is killed.

    Returns cause ("": success) and wall_s.
    """
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "5000"} | os.environ
    began = time.monotonic()
    cause = ""
    with open(folder / CONSOLE, "xb") as out, open(folder / ERRORS, "xb") as err:
        child = subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                                 stdout=out, stderr=err, start_new_session=True, pass_fds=[lock])
        try:
            if child.wait(limit_s) != 0:
                cause = f"exit status {child.returncode}"
        except subprocess.TimeoutExpired:
            cause = f"still running after the limit of {limit_s:g} s"
        finally:
            wall_s = round(time.monotonic() - began, 3)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):    # a second Ctrl-C kills at once
                child.wait(GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return {"cause": cause, "wall_s": wall_s}

class Bench:
    """A bench in an output directory; it continues what earlier calls have done there."""

    def __init__(self, args: argparse.Namespace, sides: dict[str, Trainer], lock: int) -> None:
        self.args = args
        self.sides = sides
        self.lock = lock
        places = sides["A"].script.resolve().parent / DATA, ROOT / DATA
        self.data = [place for place in places if place.is_dir()]
        self.manifest = args.out / MANIFEST
        if not self.lines("bench"):
            self.add("bench", **self.plan(), pairs=args.pairs, losses=PAIRED)
        self.check_plan()
        ended = {line["run"] for line in self.lines("end")}
        for line in self.lines("start"):
            if line["run"] not in ended:
                self.add("end", **line | {"outcome": "lost", "cause": "the tool was killed"})

    def plan(self) -> Facts:
        """Return what a bench keeps from its first to its last run."""
        sides = {name: {"flags": side.flags, "source_sha256": files.sha256(side.script)}
                 for name, side in self.sides.items()}
        return {"sides": sides, "ranks": self.args.ranks}

    def check_plan(self) -> None:
        if not self.plan().items() <= self.lines("bench")[0].items():
            raise ToolError(f"sources, flags or ranks differ from those in {self.manifest}: restore them to continue, "
                            "or choose another --out")

    def lines(self, kind: str) -> list[Facts]:
        return manifest_lines(self.manifest, kind)

    def add(self, kind: str, **facts: Any) -> None:
        before = self.manifest.read_bytes() if self.manifest.is_file() else b""
        files.write_bytes(self.manifest, before + json.dumps({**facts, "type": kind}).encode() + b"\n")

    def run(self, name: str, pair: int) -> bool:
        """Run one side once, with a line in the manifest before and after it; return whether it succeeded."""
        self.check_plan()
        side = self.sides[name]
        number = 1 + len(self.lines("start"))
        folder = inside(self.args.out, f"runs/{number:03}_{name}")
        command = [os.path.relpath(side.script.resolve(), folder.resolve())]
        command += [flag.replace("{seed}", str(pair)) for flag in side.flags]
        if self.args.ranks > 1:
            command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.args.ranks}", *command]
        facts = {"run": number, "folder": f"runs/{folder.name}", "side": name, "pair": pair,
                 "source_sha256": files.sha256(side.script), "command": shlex.join(["python", *command])}
        self.add("start", **facts, time=time.strftime("%Y-%m-%dT%H:%M:%S"))
        ended = {"outcome": "interrupted", "cause": "interrupted"}
        try:
            folder.mkdir(parents=True)
            if self.data:
                (folder / DATA).symlink_to(os.path.relpath(self.data[0].resolve(), folder.resolve()))
            ended = self.outcome(command, folder)
        finally:
            self.add("end", **facts, **ended)
        return ended["outcome"] == "done"

    def outcome(self, command: list[str], folder: Path) -> Facts:
        """Run a command; print and return how it ended, as the manifest states it."""
        ended = run_once(command, folder, self.args.ranks, self.args.limit, self.lock)
        runs = [run for run in read_runs([folder]).runs if run.finished or (run.kind != "ours" and run.final)]
        runs = [run for run in runs if run.path.name != CONSOLE] or runs       # which may round the time otherwise
        if ended["cause"] or len(runs) != 1:
            cause = ended["cause"] or f"{len(runs)} logs of a final validation; a run of a bench writes one"
            errors = (folder / ERRORS).read_text(errors="replace").splitlines()[-STDERR_LINES:]
            head = f"{folder.name}: FAILED, {cause}; the last lines of its {ERRORS}:"
            say("\n    ".join([head, *errors]))
            return ended | {"outcome": "failed", "cause": cause}
        run, = runs
        seconds = "no time that counts" if run.seconds is None else f"{run.seconds:.3f} s"
        say(f"{folder.name}: loss {run.loss:.4f}, {seconds}, {ended['wall_s']:.1f} s wall time")
        logs = [os.path.relpath(run.path, folder)]
        return ended | {"outcome": "done", "logs": logs, "val_loss": run.loss, "train_s": run.seconds}

    def done(self, name: str) -> list[Facts]:
        return [line for line in self.lines("end") if (line["side"], line["outcome"]) == (name, "done")]

    def complete(self) -> set[int]:
        return set.intersection(*({line["pair"] for line in self.done(name)} for name in self.sides))

    def side(self, name: str) -> Side:
        return side_of(name, [inside(self.args.out, f"{line['folder']}/{log}")
                              for line in self.done(name) for log in line["logs"]])

    def race(self) -> int:
        """Run pairs, each with its number as the seed, until the comparison is decided; return the exit status."""
        found = self.compared()
        while not found or (len(self.complete()) < self.args.pairs and found["verdict"] in OPEN):
            pair = 1 + max((line["pair"] for line in self.lines("start")), default=0)
            failed = next((name for name in pair_order(self.sides, pair) if not self.run(name, pair)), None)
            if failed:
                say(f"stopped: a run of {failed} failed; {self.manifest} lists all runs")
                return 1
            found = self.compared()
            change = "; ".join(report.changes_in_words(found, "+.4f"))
            say(f"pair {len(self.complete())} of {self.args.pairs}\n    B - A: {change}")
        say(report.compare_in_words(found))
        if found["verdict"] == "same program":
            say(noise_floor(found))
        return report.STATUS[found["verdict"]]

    def compared(self) -> Facts:
        if not self.complete():
            return {}
        return report.compare(self.side("A"), self.side("B"), self.args.target)

def noise_floor(found: Facts) -> str:
    """Say which differences half of the benches like this one, of runs of the same program, would find."""
    n, _, sd = astuple(found["a"]["loss"])
    share = found["share"]
    nats = math.nan if n < 2 else critical_t(found["loss_level"] or ALPHA, n - 1) * sd * math.sqrt(2 / n)
    time = math.nan if share is None or share.high is None else (share.high - share.low) / 2
    return (f"noise floor, {counted(found['pairs'], 'pair')}: half of such benches find a change of {time:.1%} of the "
            f"time, or of {nats:.3f} nats; smaller ones are rarely found")

def git_apply(patch: Path, copy: Path, *flags: str) -> str:
    """Apply a patch to a copy of the trainer, as if it were in no repository; return why that failed, or ""."""
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(copy.resolve().parents[1])}
    applied = subprocess.run(["git", "apply", *flags], cwd=copy.parent, env=environment, capture_output=True,
                             input=files.read_bytes(patch))
    return applied.stderr.decode(errors="replace").strip() if applied.returncode else ""

def sides_to_try(args: argparse.Namespace) -> dict[str, Trainer]:
    """Copy this trainer without (A) and with (B) a patch; if it contains the patch, that is reversed for A."""
    scripts = {name: inside(args.out, f"sources/{name}/{TRAINER}") for name in "AB"}
    for script in scripts.values():
        files.write_bytes(script, files.read_bytes(ROOT / TRAINER))
    if not files.read_bytes(args.patch).strip():
        say("the patch is empty: both sides are this trainer, which measures the noise")
    elif not git_apply(args.patch, scripts["A"], "-R"):
        say(f"{TRAINER} already contains {args.patch.name}: A runs without it")
    else:
        error = git_apply(args.patch, scripts["B"])
        if error:
            raise ToolError(f"{args.patch.name} does not apply to {TRAINER} ({error}): create it with git diff "
                            f"{TRAINER}")
    flags = ["--preset=pocket", "--sample_tokens=0", *args.both]
    return {name: make_trainer(script, flags) for name, script in scripts.items()}

def sides_to_bench(args: argparse.Namespace) -> dict[str, Trainer]:
    sides = {}
    for name, text in zip("AB", (args.a, args.b)):
        script, *flags = [text] if Path(text).is_file() else shlex.split(text) or [text]
        sides[name] = make_trainer(Path(script), [*args.both, *flags])
    return sides

def main(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    is_try = argv[0] == "try"
    if is_try:
        parser.add_argument("patch", type=Path, help="patch of train_gpt.py (git diff), as in records/ablations")
    else:
        parser.add_argument("a", metavar="A", help="a trainer; quote it with its flags: 'A.py --flag=1'")
        parser.add_argument("b", metavar="B", help="the other one")
    parser.add_argument("--pairs", type=int, default=6 if is_try else 10, help="largest number of pairs [%(default)s]")
    parser.add_argument("--ranks", type=int, default=1, help="processes per run [1]")
    parser.add_argument("--target", type=float, help="mean loss to prove [target_loss of the logs]")
    parser.add_argument("--limit", type=float, default=7200, help="s; a run that takes longer is killed [%(default)s]")
    parser.add_argument("--out", type=Path, help="output directory; repeat a command with the same one to continue")
    at = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[1:at])
    args.both = argv[at + 1:]
    if min(args.pairs, args.ranks) < 1:
        raise ToolError(f"--pairs={args.pairs} --ranks={args.ranks}: both are at least 1")
    args.out = args.out or Path(f"logs/try-{args.patch.stem}" if is_try else time.strftime("logs/bench-%Y%m%d-%H%M%S"))
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:                       # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)                # end the run and log it, as Ctrl-C does
    args.out.mkdir(parents=True, exist_ok=True)
    lock = os.open(args.out, os.O_RDONLY)                                    # runs inherit it
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        sides = (sides_to_try if is_try else sides_to_bench)(args)
        bench = Bench(args, sides, lock)
        say(f"up to {args.pairs * len(sides)} runs; the first one shows how long they take")
        status = bench.race()
        if status != 1:
            picture = args.out / "curves.svg"
            plot.save(plot.curves_svg({name: bench.side(name).runs for name in sides}, args.target), picture)
            say(f"picture: {picture}; to publish it: python records new NAME {args.out} --kind=comparison")
        return status
    except BlockingIOError:
        raise ToolError(f"another process is using {args.out}, or a run that it started: wait until it has "
                        "ended") from None
    except KeyboardInterrupt:
        say(f"interrupted; repeat the command with --out={args.out} to continue")
        return 130
    finally:
        os.close(lock)
