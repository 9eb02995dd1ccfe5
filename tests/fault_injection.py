"""Run ranks as real processes, and inject a fault into one of them.

    ended = Job(folder, world=2, faults={1: "kill in forward"}).wait()

A fault is an action and a point, such as "kill in forward": a function of the trainer is replaced before main is
called, and the trainer has no code for this.
"""
from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import Forked, environment_of, free_port, noop

import train_gpt as tg

COMM_TIMEOUT_S = 5                       # --comm_timeout of ranks that wait for one that does not answer
HANG_S = 90                              # a rank that has not ended after this time hangs
FAULT_STEP = 3                           # training step of the fault
FLAGS = ("--preset=tiny", "--adam_every=2", "--device=cpu", f"--comm_timeout={HANG_S}", "--val_every=0",
         "--max_steps=8", "--checkpoint_every=2", "--sample_tokens=2")

class JobResult(NamedTuple):
    """How a job ended. Lists by rank."""
    status: list[int | str | None]       # -signal if killed, None if it hangs, "absent" if not started
    out: list[str]
    err: list[str]
    run_dir: Path

class Job:
    """A run of preset tiny with logs in folder/run. options: the arguments of `supervise`."""
    def __init__(self, folder: Path, *flags: str, **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        argv = [*FLAGS, f"--run_dir={folder / 'run'}", *flags]
        self.launcher = Forked(argv, call=partial(supervise, folder, **options))

    def wait(self) -> JobResult:
        assert self.launcher.wait(2 * HANG_S) == 0, self.launcher.texts()
        return JobResult(*json.loads((self.folder / "result.json").read_text()), self.folder / "run")

def supervise(folder: Path, argv: list[str], world: int = 1, faults: dict[int, str] = {},
              extra: dict[int, list[str]] = {}, absent: Sequence[int] = (), folders: Sequence[Path] = (),
              nohup: bool = False) -> None:
    """Fork the ranks, wait until all have ended or HANG_S is over, and write how they ended to result.json.

    After one rank fails, the others get SIGTERM, as from torchrun, but only after COMM_TIMEOUT_S and some time to end
    by themselves. faults: by rank. extra: additional flags of a rank. absent: ranks that never start. folders: working
    directory by rank, each of which is its own node. nohup: ignore SIGHUP.
    """
    os.chdir(folder)
    os.setpgid(0, 0)  # the process group that a terminal interrupts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    port = free_port()

    def set_up_rank(rank: int) -> None:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        if folders:
            os.chdir(folders[rank])
            os.environ["LOCAL_RANK"] = "0"
        tg.warm_up = noop
        if rank in faults:
            inject(faults[rank])

    ranks = {rank: Forked([*argv, *extra.get(rank, [])], environment_of(rank, world, port), partial(set_up_rank, rank))
             for rank in range(world) if rank not in absent}
    deadline = time.monotonic() + HANG_S
    end_others = None
    while None in [process.poll() for process in ranks.values()] and time.monotonic() < deadline:
        if end_others is None and any(process.status for process in ranks.values()):
            end_others = time.monotonic() + 2 * COMM_TIMEOUT_S
        if end_others and time.monotonic() > end_others:
            for process in ranks.values():
                process.send(signal.SIGTERM)
        time.sleep(0.01)
    for process in ranks.values():
        process.send(signal.SIGKILL)

    results = []
    for rank in range(world):
        process = ranks.get(rank)
        results.append((process.status, *process.texts()) if process else ("absent", "", ""))
    Path("result.json").write_text(json.dumps([*zip(*results)]))

# Name -> owner and name of a function of the trainer, and whether it runs in another thread. The fault happens in its
# first call from step FAULT_STEP on.
INJECTION_POINTS: dict[str, tuple[Any, str, bool]] = {
    "forward": (tg.GPT, "hidden_states", False),
    "a reduction": (dist, "reduce_scatter_tensor", False),
    "the exchange": (tg, "exchange_row_requests", True),
    "the loader": (tg, "pack_batch", True),
}

def inject(fault: str) -> None:
    """Make an action happen once, at a point of this process. fault: for example "kill in forward"."""
    action, point = fault.split(" in ")
    owner, name, in_thread = INJECTION_POINTS[point]
    original = getattr(owner, name)
    log_step = tg.Log.step
    steps, done = [], []

    def count_steps(*args: Any) -> None:
        log_step(*args)
        steps.append(True)

    def act_and_call(*args: Any, **kwargs: Any) -> Any:
        if not done and len(steps) >= FAULT_STEP:
            assert in_thread == (threading.current_thread() is not threading.main_thread()), name
            done.append(True)
            ACTIONS[action]()
        return original(*args, **kwargs)

    tg.Log.step = count_steps
    setattr(owner, name, act_and_call)

def fail(error: BaseException = ZeroDivisionError("a bug")) -> None:
    raise error

def break_weights() -> None:
    hidden_states = tg.GPT.hidden_states
    tg.GPT.hidden_states = lambda *args: hidden_states(*args) * float("nan")

def damage_shards(size: int | None) -> None:
    """Truncate or remove the shards that are not yet in memory. At FAULT_STEP the loader reads the third."""
    for path in sorted(Path("data").glob("train_*.bin"))[4:]:
        if size is None:
            path.unlink()
        else:
            os.truncate(path, size)

ACTIONS: dict[str, Callable[[], object]] = {
    "kill": partial(signal.raise_signal, signal.SIGKILL),
    "sleep": partial(time.sleep, 10 * HANG_S),
    "Ctrl-C": partial(os.killpg, 0, signal.SIGINT),
    "SIGTERM": partial(signal.raise_signal, signal.SIGTERM),
    "SIGHUP": partial(signal.raise_signal, signal.SIGHUP),
    "bug": fail,
    "out of memory": partial(fail, torch.OutOfMemoryError("Tried to allocate 2.00 GiB.\nMore lines.")),
    "NaN": break_weights,
    "cut shards": partial(damage_shards, 1600),
    "removed shards": partial(damage_shards, None),
}
