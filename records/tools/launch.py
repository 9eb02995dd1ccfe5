"""Runs trainers one by one, each in a folder of its own, and writes a manifest of what was started and how it ended.

Any trainer that prints or writes the usual `step:.../... val_loss:... train_time:...` lines can be run."""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools import calibrate, logs
from tools.logs import Run, ToolError

SPIN_COUNT = "5000"            # OpenMP threads that wait give the core away soon: ranks share cores (as in run.sh)
RUN_FOLDER = "RECORDS_RUN_FOLDER"      # environment variable that tells which run a process belongs to
GRACE_S = 20.0                 # a trainer that is told to end writes its last log lines first
FIRST_LIMIT_S = 7200.0         # of a first run, of which nothing is known
LIMIT_RUNS, LIMIT_MORE_S = 3.0, 60.0   # a later run that takes as many times the longest one, and so much more, hangs
LIMIT_HELP = (f"seconds after which a run has failed; None: {FIRST_LIMIT_S:g}, then {LIMIT_RUNS:g} times the longest "
              f"run and {LIMIT_MORE_S:g} more")
DATA, CONSOLE, ERRORS = "data", "console.txt", "stderr.txt"        # what `launch` adds to a run's folder
IMPORT = re.compile(r"^\s*(?:from|import)\s+(\w+)", re.M)


# ---- Processes
def source_hashes(script: Path) -> dict[str, str]:
    """sha256 of a trainer and of the files beside it that it imports, by name."""
    paths = {script}
    for name in IMPORT.findall(script.read_text(encoding="utf-8", errors="replace")):
        beside = script.with_name(f"{name}.py")
        if beside.is_file():
            paths.add(beside)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}


def processes_of(folder: Path) -> list[int]:
    """Processes of runs in `folder` or below, by their environment (Linux; elsewhere none are found)."""
    mark = f"{RUN_FOLDER}={folder.resolve()}/".encode()
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):                               # ended meanwhile, or another user's
            if mark in environment.read_bytes():
                found.append(int(environment.parent.name))
    return found


def end(child: subprocess.Popen, folder: Path) -> None:
    """Ask a run to end, wait GRACE_S seconds at most, then kill its process group and what else is of this run:
    workers of torchrun lead sessions of their own, so that a signal to the launcher's group misses them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):            # the second Ctrl-C: at once
        child.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for pid in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    child.wait()


def command_line(script: Path, folder: Path, flags: list[str], ranks: int) -> list[str]:
    """The command that runs `script` from within `folder`: relative, so that a manifest names no one's home."""
    command = ["python"]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*command, os.path.relpath(script.resolve(), folder.resolve()), *flags]


def environment_of(folder: Path, ranks: int) -> dict[str, str]:
    """The user's settings, else threads that share the cores; and the mark of the run."""
    threads = max(1, calibrate.cores() // ranks)
    settings = {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": SPIN_COUNT} | os.environ
    settings[RUN_FOLDER] = f"{folder.resolve()}/"
    return settings


def attend(script: Path, folder: Path, flags: list[str], ranks: int, limit_s: float) -> dict[str, Any]:
    """Run `script` to its end in `folder`, its output in console.txt and stderr.txt there; leaves no process behind.
    Returns {"status", "wall_s", "cause"}, cause "" after exit status 0. KeyboardInterrupt ends the run and goes on."""
    command = [sys.executable, *command_line(script, folder, flags, ranks)[1:]]
    signal.signal(signal.SIGTERM, signal.default_int_handler)               # ends the run and leaves a line, as Ctrl-C
    began = time.monotonic()
    cause = ""
    with open(folder / CONSOLE, "xb") as out, open(folder / ERRORS, "xb") as err:
        child = subprocess.Popen(command, cwd=folder, env=environment_of(folder, ranks), stdin=subprocess.DEVNULL,
                                 stdout=out, stderr=err, start_new_session=True)
        try:
            if child.wait(limit_s) != 0:
                cause = f"exit status {child.returncode}"
        except subprocess.TimeoutExpired:
            cause = f"still running after the limit of {limit_s:g} s"
        finally:
            wall_s = round(time.monotonic() - began, 3)
            end(child, folder)
    return {"status": child.returncode, "wall_s": wall_s, "cause": cause}


# ---- One run
def launch(script: Path, folder: Path, flags: list[str], ranks: int = 1, limit_s: float | None = None,
           data: Path | None = None) -> dict[str, Any]:
    """Run one training in `folder` (made here, new), with a link there to `data` (default: `data` beside the script).
    Returns what the manifest says of its end: outcome "done" (exit status 0, and a log with a final validation) or
    "failed", cause, status, wall_s, states; if done: logs (from `folder`), void, val_loss, train_s (None if void).
    Raises KeyboardInterrupt, after all processes of the run have ended."""
    folder.mkdir(parents=True)
    data = data or script.resolve().parent / DATA
    if data.is_dir():
        (folder / DATA).symlink_to(os.path.relpath(data.resolve(), folder.resolve()), target_is_directory=True)

    facts = {"state_before": calibrate.state()}
    facts |= attend(script, folder, flags, ranks, limit_s)
    facts["state_after"] = calibrate.state()
    runs = [] if facts["cause"] else finished_runs(folder)
    if not runs:
        facts["outcome"] = "failed"
        if not facts["cause"]:
            facts["cause"] = "ended without a log of a final validation"
        return facts

    voids = [run.void for run in runs if run.void]
    times = [run.seconds for run in runs if run.seconds is not None]
    train_s = None
    if times and not voids:
        train_s = statistics.fmean(times)
    return facts | {
        "outcome": "done",
        "logs": [os.path.relpath(run.path, folder) for run in runs],
        "void": voids[0] if voids else None,
        "val_loss": statistics.fmean(run.loss for run in runs),
        "train_s": train_s,
    }


def finished_runs(folder: Path) -> list[Run]:
    """Of the logs that a trainer wrote, else of its console, which repeats a log."""
    added = (DATA, CONSOLE, ERRORS)
    written = [path for path in sorted(folder.iterdir()) if path.name not in added]
    for paths in (written, [folder / CONSOLE]):
        found = [run for run in logs.read(paths).runs if run.finished or may_stop_early(run)]
        if found:
            return found
    return []


def may_stop_early(run: Run) -> bool:
    """Peers may stop at a step of their choice."""
    return run.family != "ours" and run.final is not None


# ---- The manifest
class Manifest:
    """A file of one JSON object per line, only ever appended to: {"type": "start"} and {"type": "end"} of every run.
    A start without an end was left by a killed tool: opening the manifest again adds the end, outcome "lost"."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self.lines = self.restored()
        ended = {line["run"] for line in self.of("end")}
        for line in self.of("start"):
            if line["run"] not in ended:
                facts = line | {"type": "end", "outcome": "lost", "cause": "the tool was killed"}
                self.add(**facts)

    def restored(self) -> list[dict[str, Any]]:
        """The lines of the file. The last one may be torn by a crash: it is cut off."""
        whole = self.path.read_bytes()
        good = whole[:whole.rfind(b"\n") + 1]
        self.path.write_bytes(good)
        try:
            return [json.loads(line) for line in good.splitlines()]
        except ValueError as error:
            raise ToolError(str(self.path), error, "JSON objects", "restore it, or use another folder") from None

    def add(self, type: str, **facts: Any) -> dict[str, Any]:
        """Append a line and have it on the disk before anything else happens."""
        line = {"type": type} | facts
        self.lines.append(line)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return line

    def limit_s(self, given: float | None) -> float:
        """When a run that goes on is taken for one that hangs. given: by the user; None: by the runs so far."""
        if given is not None:
            return given
        took = [line["wall_s"] for line in self.of("end") if line["outcome"] == "done"]
        if not took:
            return FIRST_LIMIT_S
        return LIMIT_RUNS * max(took) + LIMIT_MORE_S

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["type"] == kind]

    def run(self, script: Path, folder: Path, flags: list[str], ranks: int = 1, limit_s: float | None = None,
            data: Path | None = None, **facts: Any) -> dict[str, Any]:
        """`launch` between its lines; `facts` (side, pair, seed, ...) stand in both. Returns the line of the end."""
        imports = source_hashes(script)
        source = imports.pop(script.name)
        facts = {
            "run": 1 + len(self.of("start")),
            "folder": os.path.relpath(folder, self.path.parent),
            **facts,
            "source_sha256": source,
            "imports_sha256": imports,
            "command": shlex.join(command_line(script, folder, flags, ranks)),
        }
        self.add("start", **facts, time=time.strftime("%Y-%m-%dT%H:%M:%S"))
        try:
            ended = launch(script, folder, flags, ranks, limit_s, data)
            return self.add("end", **facts, **ended)
        except BaseException as error:
            self.add("end", **facts, outcome="interrupted", cause=repr(error))
            raise
