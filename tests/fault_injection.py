"""Run ranks as real processes, and inject a fault into one of them.

    ended = Job(folder, world=2, faults={1: "kill in forward"}).wait()

A separate process replaces torchrun: it serves the store of the rendezvous, sets the environment of the ranks, and
records how each of them ended. A fault is an action and a point, such as "kill in forward": a function of the trainer
is replaced before main is called, and the trainer has no code for this. If torchrun runs this file as a script, it is a
rank of a real launch, with the fault in rank 1.
"""
from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # import it once here, which takes a second, instead of in every rank
import torch.distributed as dist
from common import Forked, environment_of, free_port

import train_gpt as tg

COMM_TIMEOUT_S = 10                      # --comm_timeout of the ranks
# A rank that has not ended after this time hangs. It is less than the timeouts that are in force while ranks compile or
# write files (SLOW_TIMEOUT_FACTOR).
HANG_S = 90
# Timeouts of the exit are multiplied by this, because the machine may be busy.
EXIT_TIMEOUT_SCALE = 3
FAULT_STEP = 3                           # training step of the fault
FLAGS = ("--preset=tiny", "--adam_every=2", f"--comm_timeout={COMM_TIMEOUT_S}", "--val_every=0", "--max_steps=8",
         "--sample_tokens=2")

class JobResult(NamedTuple):
    """How a job ended. Lists by rank."""
    status: list[int | str | None]       # -signal if killed, None if it did not end, "absent" if not started
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
              extra: dict[int, list[str]] = {}, absent: Sequence[int] = (), store: str = "launcher",
              ends: bool = False, folders: Sequence[Path] = (), nohup: bool = False) -> None:
    """Fork the ranks, wait until all have ended or HANG_S is over, and write how they ended to result.json.

    faults: by rank. extra: additional flags of a rank. absent: ranks that never start. store: in the "launcher", as
    under torchrun, or in "rank 0"; with "silent stranger" and "silent launcher", a process listens at its address and
    never answers. ends: send SIGTERM to all ranks after the first one fails, as torchrun does. folders: working
    directory by rank. nohup: ignore SIGHUP.
    """
    os.chdir(folder)
    os.setpgid(0, 0)  # the process group that a terminal interrupts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    port = free_port()
    deadline = time.monotonic() + HANG_S
    store_processes = []
    if "silent" in store:
        listener = socket.create_server(("127.0.0.1", port))  # noqa: F841 it listens until it is garbage collected
    elif store == "launcher" and world > 1:
        store_processes = [Forked([], call=partial(serve_store, port))]
        while not os.path.exists("launcher"):
            time.sleep(0.01)

    def set_up_rank(rank: int) -> None:
        """Set up one rank in its fork: working directory, signals, timeouts, fault."""
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        if folders:
            os.chdir(folders[rank])
        for timeout in ("STORE_TIMEOUT_S", "ALL_RANKS_TIMEOUT_S", "EXIT_TIMEOUT_S"):
            setattr(tg, timeout, EXIT_TIMEOUT_SCALE * getattr(tg, timeout))
        if faults and "warm-up" not in str(faults):
            tg.warm_up = lambda *_: None  # takes half of the time, and is not tested here
        if rank in faults:
            inject(faults[rank])

    elastic = {}
    if "launcher" in store and world > 1:
        elastic = dict(TORCHELASTIC_RUN_ID="test", TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    ranks = {}
    for rank in set(range(world)) - set(absent):
        environment = environment_of(rank, world, port) | elastic
        ranks[rank] = Forked([*argv, *extra.get(rank, [])], environment, partial(set_up_rank, rank))

    while None in [process.poll() for process in ranks.values()] and time.monotonic() < deadline:
        if ends and any(process.status for process in ranks.values()):
            for process in ranks.values():
                process.send(signal.SIGTERM)
            ends = False
        time.sleep(0.01)
    for process in (*ranks.values(), *store_processes):
        process.send(signal.SIGKILL)

    results = []
    for rank in range(world):
        process = ranks.get(rank)
        results.append((process.status, *process.texts()) if process else ("absent", "", ""))
    Path("result.json").write_text(json.dumps([*zip(*results)]))

def serve_store(port: int, _: list[str]) -> None:
    """Serve the store, as a launcher does, and write the process id to a file."""
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    Path("launcher.part").write_text(str(os.getpid()))
    os.rename("launcher.part", "launcher")
    time.sleep(3 * HANG_S)
    del store

# Name -> owner and name of a function of the trainer, and when the fault happens. "once": at the first call. Otherwise
# from step FAULT_STEP of the training loop on: "before" the call, "after" it, or before it on another "thread".
INJECTION_POINTS: dict[str, tuple[Any, str, str]] = {
    "the start": (tg, "load_config", "once"),
    "joining": (dist, "init_process_group", "once"),
    "the data check": (tg, "verify_shards", "once"),
    "set-up": (tg, "choose_micro_batch_size", "once"),
    "warm-up": (tg.GPT, "hidden_states", "once"),
    "forward": (tg.GPT, "hidden_states", "before"),
    "a reduction": (dist, "reduce_scatter_tensor", "after"),
    "a gather": (dist, "all_gather_into_tensor", "after"),
    "the gradients' return": (tg.ExchangedTable, "launch_reduce", "before"),
    "the fetch": (tg.ExchangedTable, "fetch", "before"),
    "the exchange": (tg, "exchange_row_requests", "thread"),
    "the loader": (tg, "pack_batch", "thread"),
    "the reader": (tg.np, "fromfile", "thread"),
    "validation": (tg, "next_token_losses", "before"),
    "the sample": (tg, "generate", "once"),
}

def inject(fault: str) -> None:
    """Make an action happen once, at a point of this process. fault: for example "kill in forward"."""
    action, point = fault.split(" in ")
    owner, name, when = INJECTION_POINTS[point]
    original = getattr(owner, name)
    log_step = tg.Log.step
    steps, done = [], []

    def count_steps(*args: Any) -> None:
        log_step(*args)
        steps.append(True)

    def act_once() -> None:
        if done or (when != "once" and len(steps) < FAULT_STEP):
            return
        in_thread = threading.current_thread() is not threading.main_thread()
        assert in_thread or when != "thread", f"{name} in the main thread"
        done.append(True)
        ACTIONS[action]()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when != "after":
            act_once()
        result = original(*args, **kwargs)
        if when == "after":
            act_once()
        return result

    tg.Log.step = count_steps
    setattr(owner, name, wrapped)

def fail(error: BaseException = ZeroDivisionError("a bug")) -> None:
    raise error

def kill(stopped_launcher: bool = False) -> None:
    if stopped_launcher:
        os.kill(int(Path("launcher").read_text()), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)

def wait_in_c(*_: object) -> None:
    """Block in C, where Python handles no signals, as in a collective or a compiler. Locks a mutex twice."""
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)

def signal_when_stuck(number: int) -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    wait_in_c()

def bug_and_stuck_exit() -> None:
    tg.Log.write_aborted = wait_in_c
    fail()

def bug_and_full_pipe() -> None:
    """Fail while stderr is a full pipe."""
    _, writing = os.pipe()
    os.write(writing, bytes(fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)))
    os.dup2(writing, 2)
    fail()

def bug_and_late_signal() -> None:
    """Send SIGTERM after the exit has begun."""
    describe_exit = tg.describe_exit

    def describe_late(error: BaseException) -> tuple[int, str]:
        if isinstance(error, ZeroDivisionError):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        return describe_exit(error)
    tg.describe_exit = describe_late
    fail()

def break_weights() -> None:
    hidden_states = tg.GPT.hidden_states
    tg.GPT.hidden_states = lambda *args: hidden_states(*args) * float("nan")

def change_plans(key: str, by: int, untied: bool = False) -> None:
    """Change the tag of this rank's row plans: another cycle, other tokens, or (untied) a head that is not tied."""
    plan_rows = tg.plan_rows

    def plan_changed_rows(table: tg.TableSpec, comm: tg.Communicator, tag: dict[str, Any], ids: list, tied: bool,
                          fetch_all: bool) -> Any:
        if untied and table.label == "embed":
            tied = not tied
        return plan_rows(table, comm, tag | {key: tag[key] + by}, ids, tied, fetch_all)
    tg.plan_rows = plan_changed_rows

def damage_shards(size: int | None) -> None:
    """Truncate or remove the shards that are not yet in memory. At FAULT_STEP the loader reads the third."""
    for path in sorted(Path("data").glob("train_*.bin"))[4:]:
        if size is None:
            path.unlink()
        else:
            os.truncate(path, size)

ACTIONS: dict[str, Callable[[], object]] = {
    "kill": kill,
    "kill with stopped launcher": partial(kill, stopped_launcher=True),
    "nap": partial(time.sleep, 1.5 * COMM_TIMEOUT_S),
    "sleep": partial(time.sleep, 10 * HANG_S),
    "Ctrl-C": partial(os.killpg, 0, signal.SIGINT),
    "SIGTERM": partial(signal.raise_signal, signal.SIGTERM),
    "SIGHUP": partial(signal.raise_signal, signal.SIGHUP),
    "SIGTERM when stuck": partial(signal_when_stuck, signal.SIGTERM),
    "Ctrl-C when stuck": partial(signal_when_stuck, signal.SIGINT),
    "SIGHUP when stuck": partial(signal_when_stuck, signal.SIGHUP),
    "bug": fail,
    "bug and stuck end": bug_and_stuck_exit,
    "bug and full pipe": bug_and_full_pipe,
    "bug and late SIGTERM": bug_and_late_signal,
    "bad data": partial(fail, tg.DataError("shard 7", "a bad token", "valid tokens", "replace it")),
    "disk error": partial(fail, OSError(errno.EIO, os.strerror(errno.EIO))),
    "out of memory": partial(fail, torch.OutOfMemoryError("Tried to allocate 2.00 GiB.\nMore lines.")),
    "out of host memory": partial(torch.empty, 10**15),
    "NaN": break_weights,
    "another cycle": partial(change_plans, "cycle", 1),
    "another untying": partial(change_plans, "cycle", 0, untied=True),
    "other tokens": partial(change_plans, "tokens", 8),
    "cut shards": partial(damage_shards, 1600),
    "removed shards": partial(damage_shards, None),
}


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        inject(sys.argv[1])
    tg.main(sys.argv[2:])
