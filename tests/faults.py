"""Ranks as real processes, with a fault in one of them: the launcher of test_faults.py.

    launcher = Launcher()                       starts a server that has imported train_gpt and forks ranks from it
    ended = launcher.start(folder, world=2, faults={1: "kill in forward"}).wait()

The server plays torchrun: it has the store in which the ranks meet and sets their environment. A fault is an act at a
place, "kill in forward": a function of the trainer is replaced before main; the trainer itself knows nothing of it. Run
as a script, this file is the server.
"""
from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo                                                          # a second once, not once for each rank
import torch.distributed as dist
from common import ROOT, Forked

import train_gpt as tg

TIMEOUT = 5                              # s, --comm_timeout of the ranks
BOUND = 60                               # s after which a rank counts as hanging, on a machine however busy
FAULT_STEP = 3                           # step of the race in which a fault comes
FLAGS = ("--preset=tiny", "--adam_every=2", f"--comm_timeout={TIMEOUT}", "--val_every=0", "--max_steps=8",
         "--sample_tokens=2")


class Ended(NamedTuple):
    """How a job ended; lists by rank."""
    status: list[int | None]             # minus the signal for a killed rank, None for one that never ended
    seconds: list[float]                 # from the fault (without one, from the start) to the rank's end
    out: list[str]
    err: list[str]
    folder: Path

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def log(self) -> list[dict]:
        """Objects of log.jsonl, every line of which must be whole."""
        return [json.loads(line) for line in (self.run_dir / "log.jsonl").read_text().splitlines()]


class Job(NamedTuple):
    folder: Path

    def wait(self) -> Ended:
        result = self.folder / "result.json"
        limit = time.monotonic() + 2 * BOUND
        while not result.exists():
            assert time.monotonic() < limit, f"no answer from the launcher of {self.folder}"
            time.sleep(0.02)
        return Ended(*json.loads(result.read_text()), self.folder)


class Launcher:
    def __init__(self) -> None:
        environment = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
        self.server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True, env=environment,
                                       start_new_session=True)

    def start(self, folder: Path, *flags: str, **how: Any) -> Job:
        """Start a run of the tiny preset, whose logs go to folder/run. how: what `supervise` takes."""
        folder.mkdir(parents=True, exist_ok=True)
        argv = [*FLAGS, f"--run_dir={folder / 'run'}", *flags]
        self.server.stdin.write(json.dumps(dict(folder=str(folder), argv=argv, **how), default=str) + "\n")
        self.server.stdin.flush()
        return Job(folder)

    def close(self) -> None:
        self.server.stdin.close()
        self.server.wait(BOUND)


# ------ The server ----------------------------------------------------------------------------------------------------

def serve() -> None:
    """Fork a supervisor process for each line of stdin."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)                             # nobody waits for the supervisors
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)                                                  # what a terminal interrupts
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            supervise(**json.loads(line))
            os._exit(0)


def supervise(folder: str, argv: list[str], world: int = 1, faults: dict[str, str] = {},
              extra: dict[str, list[str]] = {}, absent: list[int] = [], store: str = "launcher", ends: bool = False,
              folders: list[str] = [], nohup: bool = False) -> None:
    """Fork the ranks, wait until all have ended or BOUND is over, and write how they did.

    faults: by rank. extra: more flags of one rank. absent: ranks that never start. store: in the "launcher", as under
    torchrun, or in "rank 0"; where it should be, the "silent stranger" and the "silent launcher" listen and answer
    nothing. ends: SIGTERM to all ranks after the first that fails, as torchrun does. folders: by rank, where it runs.
    nohup: SIGHUP is ignored.
    """
    os.chdir(folder)
    began = time.time()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    if "silent" not in store:
        listener.close()                                                      # its port is free again
    holder = 0
    if store == "launcher" and world > 1:
        holder = hold_store(port)
        Path("launcher").write_text(str(holder))

    def before(rank: int) -> None:
        """Be one rank: its place, its signals, its fault."""
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        if folders:
            os.chdir(folders[rank])
        if faults and not any("warm-up" in fault for fault in faults.values()):
            tg.warm_up = no_warm_up                                           # half of the time, and nothing to see
        if str(rank) in faults:
            plant(faults[str(rank)])

    environment = dict(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=str(port))
    if "launcher" in store and world > 1:
        environment |= dict(TORCHELASTIC_RUN_ID="test", TORCHELASTIC_USE_AGENT_STORE="True",
                            TORCHELASTIC_RESTART_COUNT="0")
    ranks = {}
    for rank in set(range(world)) - set(absent):
        own = dict(RANK=str(rank), LOCAL_RANK=str(rank))
        ranks[rank] = Forked([*argv, *extra.get(str(rank), [])], environment | own, lambda rank=rank: before(rank))

    ended = {}                                                                # rank -> when
    limit = time.monotonic() + BOUND
    while len(ended) < len(ranks) and time.monotonic() < limit:
        for rank, process in ranks.items():
            if rank not in ended and process.poll() is not None:
                ended[rank] = time.time()
                if ends and process.status:
                    send(ranks, signal.SIGTERM)
        time.sleep(0.01)
    send(ranks, signal.SIGKILL)
    if holder:
        os.kill(holder, signal.SIGKILL)

    since = os.path.getmtime("fault") if os.path.exists("fault") else began
    status = [ranks[rank].status if rank in ranks else None for rank in range(world)]
    texts = [ranks[rank].texts() if rank in ranks else ("", "") for rank in range(world)]
    seconds = [ended.get(rank, BOUND + since) - since for rank in range(world)]
    Path("result.part").write_text(json.dumps([status, seconds, *zip(*texts)]))
    os.replace("result.part", "result.json")


def hold_store(port: int) -> int:
    """Start a process that has the store, as a launcher has. Return its id once the store is there."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        os.write(writing, b"!")
        time.sleep(3 * BOUND)
        os._exit(store is None)
    os.read(reading, 1)
    return pid


def send(ranks: dict[int, Forked], number: int) -> None:
    for process in ranks.values():
        if process.poll() is None:
            os.kill(process.child, number)


def no_warm_up(*_: object) -> None:
    """It leaves no trace."""


# ------ Places and acts -----------------------------------------------------------------------------------------------

# Name -> a function of the trainer; and "once": at its first call, or in the race from FAULT_STEP on: "before" its
# call, "after" it, or before it and in a "thread" of its own.
PLACES: dict[str, tuple[Any, str, str]] = {
    "the start": (tg, "parse_flags", "once"),
    "joining": (dist, "init_process_group", "once"),
    "the data check": (tg, "scan_shards", "once"),
    "set-up": (tg, "fit_memory", "once"),
    "warm-up": (tg, "relu_sq_mlp", "once"),
    "forward": (tg, "relu_sq_mlp", "before"),
    "a reduction": (dist, "reduce_scatter_tensor", "after"),
    "a gather": (dist, "all_gather_into_tensor", "after"),
    "the gradients' return": (tg.RowTable, "return_gradients", "before"),
    "the fetch": (tg.RowTable, "fetch", "before"),
    "the exchange": (tg, "exchange_plans", "thread"),
    "the loader": (tg, "pack_block", "thread"),
    "the reader": (tg.np, "fromfile", "thread"),
    "validation": (tg, "next_token_losses", "before"),
    "the sample": (tg, "generate", "once"),
}


def plant(fault: str) -> None:
    """Let an act, "kill in forward", happen once at its place in this process; a file `fault` tells when it did."""
    act, place = fault.split(" in ")
    owner, name, when = PLACES[place]
    inner = getattr(owner, name)
    log_step = tg.Log.step
    steps, done = [], []

    def count(*args: Any) -> None:
        log_step(*args)
        steps.append(True)

    def acting() -> None:
        if done or (when != "once" and len(steps) < FAULT_STEP):
            return
        in_thread = threading.current_thread() is not threading.main_thread()
        assert in_thread or when != "thread", f"{name} in the main thread"
        done.append(True)
        Path("fault").touch()
        ACTS[act]()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when != "after":
            acting()
        result = inner(*args, **kwargs)
        if when == "after":
            acting()
        return result

    tg.Log.step = count
    setattr(owner, name, wrapped)


def fail(error: BaseException = ZeroDivisionError("a bug")) -> None:
    raise error


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(BOUND)


def kill_and_stop_launcher() -> None:
    os.kill(int(Path("launcher").read_text()), signal.SIGSTOP)
    kill()


def wait_in_c(*_: object) -> None:
    """Wait as a collective or a compiler may: in C, where no signal is heard. A mutex is locked twice."""
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)


def signal_when_stuck(number: int) -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    wait_in_c()


def bug_and_stuck_end() -> None:
    tg.Log.aborted = wait_in_c
    fail()


def bug_and_full_pipe() -> None:
    """stderr is a pipe that nobody reads."""
    _, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(1 << 12))
    os.set_blocking(writing, True)
    os.dup2(writing, 2)
    fail()


def bug_and_late_signal() -> None:
    """SIGTERM comes when the end has begun."""
    describe = tg.describe

    def late(error: BaseException) -> tuple[int, str]:
        if isinstance(error, ZeroDivisionError):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        return describe(error)
    tg.describe = late
    fail()


def break_weights() -> None:
    mlp = tg.relu_sq_mlp

    def broken(*args: Any) -> torch.Tensor:
        return mlp(*args) * float("nan")
    tg.relu_sq_mlp = broken


def change_plans(key: str, by: int, untied: bool = False) -> None:
    """From here on this rank's row plans say another cycle, or other tokens, or that the head is tied no more."""
    plan = tg.Planner.plan

    def changed(self: tg.Planner, table: tg.Table, purpose: str, values: tg.Values, *rest: Any) -> tg.TablePlan:
        if untied and table.label == "embed":
            values = dataclasses.replace(values, tied=not values.tied)
        found = plan(self, table, purpose, values, *rest)
        found.tag[key] += by
        return found
    tg.Planner.plan = changed


def spoil_shards(spoil: Callable[[Path], object]) -> None:
    """Spoil those that are not in memory yet: by FAULT_STEP the loader is at the third."""
    for path in sorted(Path("data").glob("train_*.bin"))[4:]:
        spoil(path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


ACTS: dict[str, Callable[[], object]] = {
    "kill": kill,
    "kill with stopped launcher": kill_and_stop_launcher,
    "nap": partial(time.sleep, 1.5 * TIMEOUT),
    "sleep": partial(time.sleep, 10 * BOUND),
    "Ctrl-C": partial(os.killpg, 0, signal.SIGINT),
    "SIGTERM": partial(signal.raise_signal, signal.SIGTERM),
    "SIGHUP": partial(signal.raise_signal, signal.SIGHUP),
    "SIGTERM when stuck": partial(signal_when_stuck, signal.SIGTERM),
    "Ctrl-C when stuck": partial(signal_when_stuck, signal.SIGINT),
    "SIGHUP when stuck": partial(signal_when_stuck, signal.SIGHUP),
    "bug": fail,
    "bug and stuck end": bug_and_stuck_end,
    "bug and full pipe": bug_and_full_pipe,
    "bug and late SIGTERM": bug_and_late_signal,
    "bad data": partial(fail, tg.DataError("shard 7", "a hole", "no hole", "mend it")),
    "disk error": partial(fail, OSError(errno.EIO, os.strerror(errno.EIO))),
    "out of memory": partial(fail, torch.OutOfMemoryError("Tried to allocate 2.00 GiB.\nMore lines.")),
    "out of host memory": partial(torch.empty, 10**15),
    "NaN": break_weights,
    "another cycle": partial(change_plans, "cycle", 1),
    "another untying": partial(change_plans, "cycle", 0, untied=True),
    "other tokens": partial(change_plans, "tokens", 8),
    "cut shards": partial(spoil_shards, cut),
    "removed shards": partial(spoil_shards, Path.unlink),
}


if __name__ == "__main__":
    serve()
