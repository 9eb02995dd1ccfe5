"""Verb `bench`: is B faster than A on this machine? Interleaved runs of two trainers, stopped as soon as it is decided.

Pairs run as A B, B A, A B, ...: what drifts slowly hits both sides alike. Any trainer that prints or writes the usual
`step:.../... val_loss:... train_time:...` lines can be a side. OUT/manifest.jsonl has a line when a run starts and one
when it ends, whatever became of it; the same command with the same OUT continues where it stopped."""
from __future__ import annotations

import argparse, contextlib, hashlib, json, math, os, re, shlex, signal, statistics, subprocess, sys, time
from collections import Counter
from pathlib import Path
from typing import Any

from tools import calibrate, compare, logs, verdict
from tools.logs import ToolError

SPIN_COUNT = "5000"            # OpenMP threads that wait give the core away soon: ranks share cores (as in run.sh)
RUN_FOLDER = "RECORDS_RUN_FOLDER"      # environment variable that tells which run a process belongs to
GRACE_S = 20.0                 # a trainer that is told to end writes its last log lines first
SHOWN_LINES = 12               # of the stderr of a failed run
MIN_PAIRS = 3                  # fewer say nothing about the spread
MAX_FAILURES = 2               # of one side; then it will not get better by itself
LAUNCHER = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic", re.M)   # begins what torchrun adds to an error
# a field that becomes a flag (its default is made by a call, as in train_gpt.py), or a flag by argparse, click, ...
SEED_FLAG = re.compile(r"^\s+seed\s*:\s*int\s*=\s*\w+\(|[\"']--seed[\"']", re.M)

def source_hashes(script: Path) -> dict[str, str]:
    """sha256 of a trainer and of the files beside it that it imports, by name."""
    names = re.findall(r"^\s*(?:from|import)\s+(\w+)", script.read_text(encoding="utf-8", errors="replace"), re.M)
    beside = sorted({path for name in names if (path := script.with_name(f"{name}.py")).is_file()})
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in [script, *beside]}

def processes_of(folder: Path) -> list[int]:
    """Processes of runs in `folder` or below, by their environment (Linux; elsewhere none are found)."""
    found, mark = [], f"{RUN_FOLDER}={folder.resolve()}/".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):                               # ended meanwhile, or another user's
            found += [int(environment.parent.name)] * (mark in environment.read_bytes())
    return found

def end(child: subprocess.Popen, folder: Path) -> None:
    """Ask a run to end, wait GRACE_S seconds at most, then kill its process group and what else is of this run:
    workers of torchrun lead sessions of their own, so that a signal to the launcher's group misses them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):            # the second Ctrl-C: at once
        child.wait(GRACE_S)
    for kill, pid in [(os.killpg, child.pid), *((os.kill, pid) for pid in processes_of(folder))]:
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    child.wait()

def command_line(script: Path, folder: Path, flags: list[str], ranks: int) -> list[str]:
    """The command that runs `script` from within `folder`: relative, so that a manifest names no one's home."""
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    return ["python", *several, os.path.relpath(script.resolve(), folder.resolve()), *flags]

def attend(script: Path, folder: Path, flags: list[str], ranks: int, limit_s: float | None) -> dict[str, Any]:
    """Run `script` to its end in `folder`, its output in console.txt and stderr.txt there; leaves no process behind.
    Returns {"status", "wall_s", "cause"}, cause "" after exit status 0. KeyboardInterrupt ends the run and goes on."""
    threads = str(max(1, calibrate.cores() // ranks))
    environment = {"OMP_NUM_THREADS": threads, "GOMP_SPINCOUNT": SPIN_COUNT} | os.environ
    environment[RUN_FOLDER] = f"{folder.resolve()}/"
    signal.signal(signal.SIGTERM, signal.default_int_handler)               # ends the run and leaves a line, as Ctrl-C
    command, began, cause = [sys.executable, *command_line(script, folder, flags, ranks)[1:]], time.monotonic(), ""
    with open(folder / "console.txt", "xb") as out, open(folder / "stderr.txt", "xb") as err:
        child = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                 start_new_session=True)
        try:
            cause = f"exit status {child.returncode}" if child.wait(limit_s) else ""
        except subprocess.TimeoutExpired:
            cause = f"still running after the limit of {limit_s:g} s"
        finally:
            wall_s = round(time.monotonic() - began, 3)
            end(child, folder)
    return {"status": child.returncode, "wall_s": wall_s, "cause": cause}

def launch(script: Path, folder: Path, flags: list[str], ranks: int = 1, limit_s: float | None = None,
           data: Path | None = None) -> dict[str, Any]:
    """Run one training in `folder` (made here, new), with a link there to `data` (default: `data` beside the script).
    Returns what the manifest says of its end: outcome "done" (exit status 0, and a log with a final validation) or
    "failed", cause, status, wall_s, states; if done: logs (from `folder`), void, val_loss, train_s (None if void).
    Raises KeyboardInterrupt, after all processes of the run have ended."""
    folder.mkdir(parents=True)
    data = data or script.resolve().parent / "data"
    if data.is_dir():
        (folder / "data").symlink_to(os.path.relpath(data.resolve(), folder.resolve()), target_is_directory=True)
    entry = {"state_before": calibrate.state()} | attend(script, folder, flags, ranks, limit_s)
    entry["state_after"] = calibrate.state()
    written = [path for path in sorted(folder.iterdir()) if path.name not in ("data", "console.txt", "stderr.txt")]
    runs = []
    for paths in () if entry["cause"] else (written, [folder / "console.txt"]):       # the console repeats a log
        runs = runs or [run for run in logs.read(paths).runs if run.finished or run.family != "ours" and run.final]
    if not runs:
        return entry | {"outcome": "failed", "cause": entry["cause"] or "ended without a log of a final validation"}
    void = next((run.void for run in runs if run.void), None)
    times = [run.seconds for run in runs if run.seconds is not None and not void]
    return entry | {"outcome": "done", "logs": [os.path.relpath(run.path, folder) for run in runs], "void": void,
                    "val_loss": statistics.fmean(run.loss for run in runs),
                    "train_s": statistics.fmean(times) if times else None}

class Manifest:
    """A file of one JSON object per line, only ever appended to: {"type": "start"} and {"type": "end"} of every run.
    A start without an end was left by a killed tool: opening the manifest again adds the end, outcome "lost"."""
    def __init__(self, path: Path) -> None:
        self.path, self.lines = path, []
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            whole = path.read_bytes()                        # the last line may be torn by a crash: it is cut off
            path.write_bytes(good := whole[:whole.rfind(b"\n") + 1])
            try:
                self.lines = [json.loads(line) for line in good.splitlines()]
            except ValueError as error:
                raise ToolError(str(path), error, "JSON objects", "restore it, or use another folder") from None
        ended = {line["run"] for line in self.of("end")}
        for line in [line for line in self.of("start") if line["run"] not in ended]:
            self.add(**line | {"type": "end", "outcome": "lost", "cause": "the tool was killed"})

    def add(self, type: str, **facts: Any) -> dict[str, Any]:
        """Append a line and have it on the disk before anything else happens."""
        self.lines.append({"type": type} | facts)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(self.lines[-1]) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return self.lines[-1]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["type"] == kind]

    def run(self, script: Path, folder: Path, flags: list[str], ranks: int = 1, limit_s: float | None = None,
            data: Path | None = None, **facts: Any) -> dict[str, Any]:
        """`launch` between its lines; `facts` (side, pair, seed, ...) stand in both. Returns the line of the end."""
        hashes = source_hashes(script)
        facts = {"run": 1 + len(self.of("start")), "folder": os.path.relpath(folder, self.path.parent), **facts,
                 "source_sha256": hashes.pop(script.name), "imports_sha256": hashes,
                 "command": shlex.join(command_line(script, folder, flags, ranks))}
        self.add("start", **facts, time=time.strftime("%Y-%m-%dT%H:%M:%S"))
        try:
            return self.add("end", **facts, **launch(script, folder, flags, ranks, limit_s, data))
        except BaseException as error:
            self.add("end", **facts, outcome="interrupted", cause=repr(error))
            raise

def say(*lines: str) -> None:
    """Print above the progress line, at once: a bench is often watched through a pipe."""
    from tqdm import tqdm
    tqdm.write("\n".join(lines))
    sys.stdout.flush()

def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python records bench", allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="%(prog)s A.py B.py [settings] [-- flags of both sides]")
    parser.add_argument("scripts", nargs=2, type=Path, metavar="TRAINER", help="A and B; may be one file")
    for name, kind, default, about in (
            ("a", str, "", "flags of side A; {seed} is replaced by the pair's number"), ("b", str, "", "of side B"),
            ("ranks", int, 1, "processes of a run"), ("pairs", int, 10, "at most; fewer when it is decided earlier"),
            ("out", Path, f"logs/bench-{time.strftime('%Y%m%d-%H%M%S')}", "folder of the manifest and the runs"),
            ("data", Path, None, "folder that the runs see as `data`; None: `data` beside A"),
            ("limit", float, None, "seconds after which a run has failed"),
            ("calibrate", float, 20.0, "seconds of calibration, before and after; 0: none")):
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{about} [%(default)s]")
    at = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:at])
    args.both, args.data = argv[at + 1:], args.data or args.scripts[0].resolve().parent / "data"
    if missing := [f"no file {path}" for path in args.scripts if not path.is_file()] + [
            f"--{name} below 1" for name in ("ranks", "pairs") if vars(args)[name] < 1]:
        raise ToolError("settings", " and ".join(missing), "two Python files, a rank, a pair", "check them")
    return args

class Bench:
    """Pairs of runs in OUT, after what earlier calls did. Raises ToolError if OUT is another bench's, or in use."""
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.scripts, self.sides = args, dict(zip("AB", args.scripts)), {}
        for side, script in self.scripts.items():
            flags = [*args.both, *shlex.split(vars(args)[side.lower()])]
            named = any(re.match(r"--seed(=|$)|.*\{seed\}", flag) for flag in flags)
            if not named and SEED_FLAG.search(script.read_text(encoding="utf-8", errors="replace")):
                flags.append("--seed={seed}")
            self.sides[side] = {"flags": flags, "sources": source_hashes(script)}
            say(f"{side}: {script} {' '.join(flags)}" + " (seeds are not set)" * ("seed" not in str(flags)))
        if running := processes_of(args.out):
            raise ToolError(f"folder {args.out}", f"processes {running} of its runs", "none: they disturb the times",
                            f"wait for them, or end them: kill {' '.join(map(str, running))}")
        self.manifest = Manifest(args.out / "manifest.jsonl")
        plan = {"sides": self.sides, "ranks": args.ranks, "data": os.path.relpath(args.data, args.out)}
        old = (self.manifest.of("bench") or [self.manifest.add("bench", **plan)])[0]
        if changed := [key for key in plan if old[key] != plan[key]]:
            raise ToolError(f"bench in {args.out}", *({key: it[key] for key in changed} for it in (plan, old)),
                            "restore these to continue it, or give another --out")

    @property
    def pairs(self) -> list[dict[str, Any]]:
        return self.manifest.of("pair")

    def test(self) -> verdict.Difference:
        """B's time over A's - 1; holds at any stopping time, so that looking after every pair costs no certainty."""
        return verdict.paired([line["difference"] for line in self.pairs])

    def stop(self) -> str:
        """Why no more pairs are needed, or ""."""
        test, enough, margin = self.test(), len(self.pairs) >= MIN_PAIRS, verdict.SAME_MARGIN
        if enough and test.p < verdict.SHARE:
            return f"the times differ, p {test.p:.2g} is below {verdict.SHARE:g}"
        if enough and -margin <= test.low and test.high <= margin:
            return f"the times are the same within {margin:.2%}"
        return "all are done" if len(self.pairs) >= self.args.pairs else ""

    def look(self, when: str) -> None:
        """Note and print the machine, its state and its calibration, and what changed since the last look."""
        folder, found = self.args.out / f"calibrations/{1 + len(self.manifest.of('machine')):03}", {"rates": {}}
        last = (self.manifest.of("machine") or [{"machine": {}, "calibration": {"rates": {}}}])[-1]
        if self.args.calibrate:
            folder.mkdir(parents=True)
            found |= attend(Path(calibrate.__file__), folder, [f"{self.args.calibrate:g}"], self.args.ranks, None)
            for printed in re.findall(r"^\{.*", (folder / "console.txt").read_text(), re.M):
                found["rates"] = json.loads(printed)
        now = self.manifest.add("machine", when=when, machine=calibrate.fingerprint(), state=calibrate.state(),
                                calibration=found)
        for kind in "machine", "state":
            say(f"{when}: {kind}: " + ", ".join(f"{key} {value}" for key, value in now[kind].items() if value))
        for key in (key for key, value in last["machine"].items() if value != now["machine"][key]):
            say(f"{when}: NOT AS BEFORE: {key} was {last['machine'][key]}")
        for name, (value, spread) in found["rates"].items():
            was = last["calibration"]["rates"].get(name)
            say(f"{when}: calibration: {name} {value:.4g}, spread {spread:.1%}"
                + (f", {value / was[0] - 1:+.1%} since the last look" if was else ""))
        if not found["rates"]:
            say(f"{when}: calibration not run: {found.get('cause', '--calibrate=0')}")

    def run(self, side: str, pair: int) -> dict[str, Any]:
        """One run of a side, printed. Raises ToolError if its source was edited since the bench began."""
        script, facts, out = self.scripts[side], self.sides[side], self.args.out
        if (now := source_hashes(script)) != facts["sources"]:
            raise ToolError(f"source of side {side}, {script}", f"edited meanwhile: {now}", facts["sources"],
                            "restore it to continue, or start anew with another --out")
        flags = [flag.replace("{seed}", str(pair)) for flag in facts["flags"]]
        name, most = f"{1 + len(self.manifest.of('start')):03}_{side}", 2 * self.args.pairs
        line = self.manifest.run(script, out / "runs" / name, flags, self.args.ranks, self.args.limit, self.args.data,
                                 side=side, pair=pair, seed=pair if flags != facts["flags"] else None)
        if line["outcome"] == "failed":
            errors = LAUNCHER.split((out / "runs" / name / "stderr.txt").read_text(errors="replace"))[0].splitlines()
            say(f"{name}: FAILED, {line['cause']}; stderr.txt ends with:", *(f"    {x}" for x in errors[-SHOWN_LINES:]))
        elif line["train_s"] is None:
            raise ToolError(f"times of {name}", line["void"] or "none", "times that count", "change the flags")
        else:
            say(f"{name}: pair {pair}, loss {line['val_loss']:.4f}, {line['train_s']:.3f} of {line['wall_s']:.1f} s"
                + f", at most {most} such runs: {most * line['wall_s'] / 60:.1f} minutes" * (line["run"] == 1))
        return line

    def pair(self, bar: Any) -> str:
        """One run of each side, with the same seed, and the pair's line. Returns the side that failed, or ""."""
        number, seconds = 1 + max((line["pair"] for line in self.manifest.of("start")), default=0), {}
        for side in "AB" if len(self.pairs) % 2 == 0 else "BA":        # a broken pair's number is not used again
            line = self.run(side, number)
            if line["outcome"] == "failed":
                return side
            seconds[side] = line["train_s"]
            bar.update()
        difference = seconds["B"] / seconds["A"] - 1
        self.manifest.add("pair", pair=number, a_s=seconds["A"], b_s=seconds["B"], difference=difference)
        test = self.test()
        surely = f", surely {test.low:+.2%} to {test.high:+.2%}, p {test.p:.2g}" if math.isfinite(test.low) else ""
        say(f"pair {number}: B takes {difference:+.2%}; mean of {len(self.pairs)} {test.mean:+.2%}{surely}")
        return ""

    def race(self) -> int:
        """Pairs until it is decided, then the comparison. Exit status 1 if a side fails MAX_FAILURES times."""
        from tqdm import tqdm
        failures, why = Counter(), self.stop()
        if not why:
            self.look("before")
            with tqdm(total=2 * self.args.pairs, initial=2 * len(self.pairs), unit="run", disable=None) as bar:
                while not why:
                    failed = self.pair(bar)
                    failures[failed] += bool(failed)
                    why = f"side {failed} failed again" if failures[failed] >= MAX_FAILURES else self.stop()
            self.look("after")
        outcomes = Counter(line["outcome"] for line in self.manifest.of("end"))
        say(f"stopped after {len(self.pairs)} pairs: {why}; runs: {dict(outcomes)}")
        numbers, report = {line["pair"] for line in self.pairs}, None
        if numbers:
            report = compare.compare(*(compare.side_of(side, [
                self.args.out / line["folder"] / log for line in self.manifest.of("end")
                if line["side"] == side and line["pair"] in numbers for log in line["logs"]]) for side in "AB"))
        summary = {"stopped": why, "outcomes": outcomes, "pairs": self.pairs, "compare": compare.jsonable(report)}
        (self.args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        say(compare.text(report) if report else "verdict: undecided: no pair is complete")
        return int(max(failures.values(), default=0) >= MAX_FAILURES)

def main(argv: list[str]) -> int:
    args = parsed(argv)
    try:
        return Bench(args).race()
    except KeyboardInterrupt:
        say(f"interrupted; the same command with --out={args.out} continues")
        return 130
