"""Check and measure this machine's GPUs with one command: is the trainer correct here, and as fast as predicted?

    python tests/gpu/day.py [--out=DIR] [--parts=NAME,...] [--limit=SECONDS]
    python tests/gpu/day.py --device=cpu          dry run: the same code at tiny sizes, on a machine without a GPU

It needs torch, numpy and the repository, but no network. Every step is a process with a time limit, and its whole
process group is killed at the end. DIR/day.json has a list `steps` (name, verdict, seconds, figures, reason) and is
replaced atomically after each step. Verdicts and exit status (EXIT_STATUS): records/guide/FIRST_GPU_RUN.md.
"""
from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import day_steps
import numpy as np
from day_steps import HERE, ROOT, Facts, Verdict

EXIT_STATUS = {"red": 1, "skipped": 1, "yellow": 3, "green": 0, "dry run": 0, "not required": 0}  # from worst to best
CPU_LIMIT_S = 300                        # for any step, because a dry run may share its cores
REAP_S = 5                               # for a killed process to end
GPT2_SIZES = 50_257, 50_256              # vocabulary size, BOS id

class Step(NamedTuple):
    judge: Callable[[Day, Facts], list[str]]
    max_seconds: float                   # until it is killed

STEPS = {                                # most valuable first
    "preflight": Step(day_steps.preflight, 60), "operations": Step(day_steps.operations, 240),
    "stages": Step(day_steps.stages, 600), "match": Step(day_steps.match, 260), "loss": Step(day_steps.loss, 300),
    "tests": Step(day_steps.tests, 900)}


# ---- Processes
def has_ended(child: subprocess.Popen) -> bool:
    """Return whether a child has ended, without reaping it: no other process can reuse the group id of a zombie."""
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

def run_ranks(command: list[str], ranks: list[dict[str, str]], output: Path, seconds: float) -> list[int] | None:
    """Run the command once per rank, with these environment variables. At the end, kill all processes of all groups.

    Returns the exit statuses; None if a rank has not ended after these seconds.
    """
    deadline = time.monotonic() + seconds
    children = []
    try:
        with open(output, "wb") as file:
            for variables in ranks:
                children.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, start_new_session=True,
                                                 stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT))
        while not all(map(has_ended, children)) and time.monotonic() < deadline:
            time.sleep(0.02)
        in_time = all(map(has_ended, children))
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):              # blocked in the driver
                child.wait(REAP_S)
    return [child.returncode for child in children] if in_time else None

def rank_variables(world_size: int) -> list[dict[str, str]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = dict(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1",
                  MASTER_PORT=str(port))
    return [common | dict(RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(world_size)]


# ---- The day
class Day:
    """Directory, device, facts from preflight and results of earlier steps. Starts the processes of a step."""
    def __init__(self, args: argparse.Namespace) -> None:
        self.out: Path = args.out
        self.device: str = args.device
        self.cpu = args.device == "cpu"
        self.end = time.monotonic() + (args.limit or math.inf)
        self.deadline = math.inf                              # when the current step is killed
        self.facts: Facts = {}
        self.figures: dict[str, Facts] = {}                   # step -> figures
        for kind in ("train", "val"):
            write_text(self.out / f"text_{kind}.bin", kind)
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        os.environ.setdefault("TORCH_LOGS", "recompiles")
        os.environ["PYTHONUNBUFFERED"] = "1"

    def call(self, name: str, *arguments: str, ranks: int = 0) -> str:
        """Run Python on `ranks` ranks (0: without a launcher's variables) until the step's deadline; return its end."""
        threads = 1 if self.cpu else max(1, os.cpu_count() // max(1, ranks))
        variables = [dict(OMP_NUM_THREADS=str(threads)) | rank_vars for rank_vars in rank_variables(ranks) or [{}]]
        seconds = self.deadline - time.monotonic()
        output = self.out / f"{name}.txt"
        statuses = run_ranks([sys.executable, *arguments], variables, output, seconds)
        lines = [line.strip() for line in output.read_bytes()[-4096:].decode("utf-8", "replace").splitlines()]
        tail = " | ".join([line for line in lines if line][-6:])[-500:]
        if statuses is None:
            verdict = "skipped" if time.monotonic() > self.end else "red"
            raise Verdict(verdict, f"{name} did not end within {seconds:.0f} s: {tail}")
        status = max(statuses, key=abs)
        if status:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            raise Verdict("red", f"{name} {how}: {tail}")
        return tail

    def probe(self, probe: str) -> Facts:
        path = self.out / f"{probe}.json"
        self.call(probe, str(HERE / "day_probes.py"), probe, f"--device={self.device}", f"--out={path}")
        return json.loads(path.read_text("utf-8"))

    def train(self, name: str, *flags: str, ranks: int = 0, script: Sequence[str] = ("train_gpt.py",)) -> Path:
        """Run the trainer with preset `record`, or `tiny` on a CPU. Return the run directory. ranks: 0 is all GPUs."""
        folder = self.out / name
        preset = "tiny" if self.cpu else "record"
        common = (f"--preset={preset}", f"--device={self.device}", "--sample_tokens=0")
        self.call(name, *script, *common, f"--run_dir={folder}", *flags, ranks=ranks or self.world_size())
        return folder

    def world_size(self) -> int:
        """Return the number of ranks: at most one per GPU, and a divisor of the 8 sequences of a step."""
        return max(world_size for world_size in (1, 2, 4, 8) if world_size <= max(1, self.facts["gpus"]))

def write_text(path: Path, kind: str) -> None:
    """Write the text of `pocket` as a shard with GPT-2's vocabulary; only the id of BOS differs."""
    # A header has 256 words of 4 bytes; words 3 and 4 are the vocabulary size and the BOS id.
    shard = np.fromfile(ROOT / f"data/pocket/pocket_{kind}_000000.bin", "<u2")
    header, tokens = shard[:512], shard[512:]
    tokens[tokens == header[8]] = GPT2_SIZES[1]
    header[6], header[8] = GPT2_SIZES
    shard.tofile(path)

def run_step(day: Day, name: str) -> Facts:
    step = STEPS[name]
    start = time.monotonic()
    max_seconds = CPU_LIMIT_S if day.cpu else step.max_seconds
    day.deadline = min(start + max_seconds, day.end)
    day.figures[name] = figures = {}
    verdict = "skipped"
    if name != "preflight" and not day.facts:
        reason = "preflight is red"
    elif day.end < start:
        reason = "no time is left: raise --limit"
    else:
        try:
            reason = "; ".join(step.judge(day, figures))
            verdict = "yellow" if reason else "green"
            if day.cpu:
                verdict = "dry run"
        except Verdict as error:
            verdict, reason = error.args
        except Exception as error:                            # unreadable results, a full disk: the day continues
            verdict, reason = "red", f"results cannot be read: {type(error).__name__}: {str(error)[:300]}"
    return dict(name=name, verdict=verdict, seconds=round(time.monotonic() - start, 1), figures=figures, reason=reason)


# ---- The command
def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("day", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu: a dry run at tiny sizes [%(default)s]")
    parser.add_argument("--out", type=Path, default=ROOT / f"logs/day-{time.strftime('%Y%m%d-%H%M%S')}",
                        help="new directory for all results [logs/day-TIME]")
    parser.add_argument("--parts", default=",".join(STEPS), help="steps to run [%(default)s]")
    parser.add_argument("--limit", type=float, default=0.0,
                        help="seconds for all steps together; 0: no limit [%(default)s]")
    args = parser.parse_args(argv)
    args.out = args.out.expanduser().resolve()
    args.parts = ["preflight", *args.parts.split(",")]
    unknown = [name for name in args.parts if name not in STEPS]
    if unknown:
        parser.error(f"--parts: {', '.join(unknown)}; expected some of {', '.join(STEPS)}")
    try:
        args.out.mkdir(parents=True)
    except OSError as error:
        parser.error(f"--out must be a new directory: {error}")
    return args

def main(argv: list[str]) -> int:
    args = parse_args(argv)
    start = time.monotonic()
    day = Day(args)
    path = day.out / "day.json"
    source_sha256 = hashlib.sha256((ROOT / "train_gpt.py").read_bytes()).hexdigest()
    requested = [name for name in STEPS if name in args.parts]
    steps = []
    for name in requested:
        step = run_step(day, name)
        steps.append(step)
        worst = min((step["verdict"] for step in steps), key=list(EXIT_STATUS).index)
        verdict = worst if name == requested[-1] else "unfinished"
        content = dict(device=args.device, source_sha256=source_sha256, verdict=verdict, steps=steps)
        partial_path = path.with_suffix(".part")
        partial_path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        os.replace(partial_path, path)
        print(f"{time.monotonic() - start:5.0f} s  {name}: {step['verdict']}  {step['reason']}".rstrip(), flush=True)
    failed = [f"{step['name']} {step['verdict']}" for step in steps if EXIT_STATUS[step["verdict"]]]
    causes = f": {', '.join(failed)}" if failed else ""
    print(f"day: {worst.upper()}, {len(steps)} of {len(STEPS)} steps{causes}; {path}")
    return EXIT_STATUS[worst]

def exit_on_signal(signum: int, _: object) -> None:
    raise SystemExit(128 + signum)       # `run_ranks` then ends the processes of the step


if __name__ == "__main__":
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:        # nohup ignores SIGHUP
            signal.signal(signum, exit_on_signal)
    sys.exit(main(sys.argv[1:]))
