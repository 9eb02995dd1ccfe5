"""Run ranks as real processes, and inject a fault into one of them.

    ended = Job(folder, world=2, faults={1: "kill in forward"}).wait()

A fault is an action and a point: a function of the trainer is replaced before main is called, and the trainer has no
code for this.
"""
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

COMM_TIMEOUT_S = 4                       # --comm_timeout of ranks that wait for one that does not answer
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
    """A run of preset tiny with logs in folder/run."""
    def __init__(self, folder: Path, *flags: str, world: int = 1, faults: dict[int, str] = {},
                 extra: dict[int, list[str]] = {}, absent: Sequence[int] = (), folders: Sequence[Path] = (),
                 nohup: bool = False, grace_s: float = 2 * COMM_TIMEOUT_S) -> None:
        """Fork the ranks.

        faults: by rank. extra: additional flags of a rank. absent: ranks that never start. folders: working directory
        by rank, each of which is its own node. nohup: ignore SIGHUP. grace_s: from the first failure to SIGTERM.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.run_dir, self.grace_s = folder / "run", grace_s
        port = free_port()

        def set_up(rank: int) -> None:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
            os.chdir(folders[rank] if folders else folder)
            if folders:
                os.environ["LOCAL_RANK"] = "0"
            tg.warm_up = noop
            if rank in faults:
                inject(faults[rank])

        self.ranks: list[Forked | None] = []
        for rank in range(world):
            argv = [*FLAGS, f"--run_dir={self.run_dir}", *flags, *extra.get(rank, [])]
            process = None
            if rank not in absent:
                process = Forked(argv, environment_of(rank, world, port), partial(set_up, rank))
            self.ranks.append(process)

    def wait(self) -> JobResult:
        """Wait until all ranks have ended. After one has failed, the others get SIGTERM, as from torchrun."""
        started = [process for process in self.ranks if process]
        deadline = time.monotonic() + HANG_S
        end_others = None
        while None in [process.poll() for process in started] and time.monotonic() < deadline:
            if end_others is None and any(process.status for process in started):
                end_others = time.monotonic() + self.grace_s
            if end_others and time.monotonic() > end_others:
                for process in started:
                    process.send(signal.SIGTERM)
            time.sleep(0.01)
        found = []
        for process in self.ranks:
            found.append((process.status, *process.texts()) if process else ("absent", "", ""))
        for process in started:
            process.wait(0)                                   # kills it
        return JobResult(*map(list, zip(*found)), self.run_dir)

# Name -> owner and name of a function of the trainer, and whether it runs in another thread. The fault happens in its
# first call from step FAULT_STEP on.
INJECTION_POINTS: dict[str, tuple[Any, str, bool]] = {
    "forward": (tg.GPT, "hidden_states", False),
    "a reduction": (dist, "reduce_scatter_tensor", False),
    "the exchange": (tg, "exchange_row_requests", True),
    "the loader": (tg, "pack_truncated", True),
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

def fail(error: BaseException) -> None:
    raise error

def break_weights() -> None:
    hidden_states = tg.GPT.hidden_states
    tg.GPT.hidden_states = lambda *args: hidden_states(*args) * float("nan")

def remove_shards() -> None:
    """Remove the shards that are not yet in memory. At FAULT_STEP the loader reads the third."""
    for path in sorted(Path("data").glob("train_*.bin"))[4:]:
        path.unlink()

ACTIONS: dict[str, Callable[[], object]] = {
    "kill": partial(signal.raise_signal, signal.SIGKILL),
    "sleep": partial(time.sleep, 10 * HANG_S),
    "Ctrl-C": partial(signal.raise_signal, signal.SIGINT),
    "SIGHUP": partial(signal.raise_signal, signal.SIGHUP),
    "bug": partial(fail, ZeroDivisionError("a bug")),
    "out of memory": partial(fail, torch.OutOfMemoryError("Tried to allocate 2.00 GiB.\nMore lines.")),
    "NaN": break_weights,
    "removed shards": remove_shards,
}
