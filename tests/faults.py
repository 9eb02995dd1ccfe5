"""Ranks as real processes, with a fault in one of them: the launcher behind test_faults.py.

    launcher = Launcher()                       starts a server that imports train_gpt once and forks ranks from it
    ended = launcher.start(folder, world=2, faults={1: "kill in forward"}).wait()

The server plays torchrun: it holds the store in which the ranks meet and sets their environment. A rank runs the last
lines of train_gpt.py as the script does. A fault is an act at a place: the rank's functions are replaced before it
starts; the trainer itself knows nothing of it. Run as a script, this file is the server.
"""
from __future__ import annotations

import ast, ctypes, dataclasses, errno, json, os, resource, signal, socket, subprocess, sys, threading, time
from pathlib import Path
from typing import Callable, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 5                              # s, --comm_timeout of the ranks
BOUND = 60                               # s after which a rank counts as hanging, on a machine however busy
FAULT_STEP = 3                           # step of the race in which a fault comes
FLAGS = ("--preset=tiny", f"--comm_timeout={TIMEOUT}", "--val_every=0", "--max_steps=8", "--sample_tokens=2")


class Ended(NamedTuple):
    """How a job ended; lists by rank."""
    status: list[int | None]             # minus the signal for a killed rank, None for one that never ended
    seconds: list[float]                 # from the fault (without one, from the start) to the rank's end
    err: list[str]
    out: list[str]
    folder: Path

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def log(self) -> list[dict]:
        """Objects of log.jsonl, every line of which must be whole."""
        return [json.loads(line) for line in (self.run_dir / "log.jsonl").read_text().splitlines()]


class Job:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def wait(self) -> Ended:
        result, limit = self.folder / "result.json", time.monotonic() + 2 * BOUND
        while not result.exists():
            assert time.monotonic() < limit, f"no answer from the launcher of {self.folder}"
            time.sleep(0.02)
        told = json.loads(result.read_text())
        texts = ([(self.folder / f"{name}.{rank}").read_text() for rank in range(len(told["status"]))]
                 for name in ("err", "out"))
        return Ended(told["status"], told["seconds"], *texts, self.folder)


class Launcher:
    def __init__(self) -> None:
        environment = os.environ | dict(OMP_NUM_THREADS="1")
        self.server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True, env=environment,
                                       start_new_session=True)

    def start(self, folder: Path, *flags: str, world: int = 1, faults: dict[int, str] | None = None,
              extra: dict[int, list[str]] | None = None, absent: tuple = (), store: str = "launcher",
              ends: bool = False, folders: list[Path] | None = None, nohup: bool = False) -> Job:
        """Start a run of the tiny preset in `folder`; its logs go to folder/run.

        faults: by rank. extra: more flags of one rank. absent: ranks that never start. store: held by the "launcher",
        as under torchrun, by a "launcher apart", which can be stopped, or by "rank 0"; where it should be, the
        "silent stranger" and the "silent launcher" listen and answer nothing. ends: SIGTERM to all ranks after the
        first that fails, as torchrun does. folders: by rank, where it runs. nohup: SIGHUP is ignored.
        """
        folder.mkdir(parents=True, exist_ok=True)
        argv = [*FLAGS, f"--run_dir={folder / 'run'}", *flags]
        job = dict(folder=str(folder), argv=argv, world=world, faults=faults or {}, extra=extra or {}, absent=absent,
                   store=store, ends=ends, folders=list(map(str, folders or [])), nohup=nohup)
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        return Job(folder)

    def close(self) -> None:
        self.server.stdin.close()
        self.server.wait(BOUND)


# ------ The server ----------------------------------------------------------------------------------------------------

def serve() -> None:
    """One supervisor process for each line of stdin."""
    sys.path.insert(0, str(ROOT))
    import torch
    import torch._dynamo                                                      # a second once, not once for each rank
    import train_gpt
    torch.set_num_threads(1)
    script = last_lines(Path(train_gpt.__file__).read_text())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)                             # nobody waits for the supervisors
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)                                                  # what a terminal interrupts
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            supervise(json.loads(line), train_gpt, script)
            os._exit(0)


def last_lines(source: str):
    """Code of `if __name__ == "__main__"`: what the script does and an import does not."""
    script = ast.parse(source).body[-1]
    assert isinstance(script, ast.If) and "__main__" in ast.unparse(script.test), "train_gpt.py ends with its script"
    return compile(ast.Module(script.body, []), "train_gpt.py", "exec")


def supervise(job: dict, tg, script) -> None:
    """Fork the ranks, tell them where to meet, wait until all have ended or BOUND is over."""
    import torch.distributed as dist
    folder, world, began, pids, pipes = Path(job["folder"]), job["world"], time.time(), {}, []
    for name, rank in ((name, rank) for name in ("err", "out") for rank in range(world)):
        (folder / f"{name}.{rank}").touch()
    for rank in sorted(set(range(world)) - set(job["absent"])):
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            os.close(writing)
            with open(reading) as pipe:
                play_rank(job, rank, pipe.readline(), tg, script)
        pids[rank], pipes = pid, [*pipes, writing]
    apart = None
    if job["store"] == "launcher":
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)         # behind the forks: threads
        port = store.port
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        if "silent" not in job["store"]:
            listener.close()                                                  # its port is free again
        if job["store"] == "launcher apart":
            apart = hold_store(port)
            (folder / "launcher").write_text(str(apart))
    for pipe in pipes:
        os.write(pipe, f"{port}\n".encode())
        os.close(pipe)
    status, ended, limit = [None] * world, [BOUND + began] * world, time.monotonic() + BOUND
    while pids and time.monotonic() < limit:
        for rank, pid in list(pids.items()):
            done, code = os.waitpid(pid, os.WNOHANG)
            if done:
                del pids[rank]
                status[rank], ended[rank] = os.waitstatus_to_exitcode(code), time.time()
                if job["ends"] and status[rank]:
                    send(pids, signal.SIGTERM)
        time.sleep(0.01)
    send(pids | ({-1: apart} if apart else {}), signal.SIGKILL)
    at_fault = folder / "fault"
    since = at_fault.stat().st_mtime if at_fault.exists() else began
    (folder / "result.part").write_text(json.dumps(dict(status=status, seconds=[end - since for end in ended])))
    (folder / "result.part").replace(folder / "result.json")


def hold_store(port: int) -> int:
    """A process that holds the store as a launcher does. Returns its id once the store is there."""
    import torch.distributed as dist
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        os.write(writing, b"!")
        time.sleep(3 * BOUND)
        os._exit(store is None)
    os.read(reading, 1)
    return pid


def send(pids: dict[int, int], number: int) -> None:
    for pid in pids.values():
        os.kill(pid, number)


def play_rank(job: dict, rank: int, port: str, tg, script) -> None:
    """Be one rank: environment, output files, fault, then the last lines of train_gpt.py. Does not return."""
    folder = Path(job["folder"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["world"]), MASTER_ADDR="127.0.0.1",
                      LOCAL_WORLD_SIZE=str(job["world"]), MASTER_PORT=port.strip())
    if "launcher" in job["store"] and job["world"] > 1:
        os.environ.update(TORCHELASTIC_RUN_ID="test", TORCHELASTIC_USE_AGENT_STORE="True",
                          TORCHELASTIC_RESTART_COUNT="0")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}.{rank}", os.O_WRONLY), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if job["nohup"] else signal.SIG_DFL)
    if job["folders"]:
        os.chdir(job["folders"][rank])
    sys.argv = ["train_gpt.py", *job["argv"], *job["extra"].get(str(rank), [])]
    if job["faults"] and not any("warm-up" in fault for fault in job["faults"].values()):
        tg.warm_up = lambda *_: None                                          # half of the time, and nothing to see
    if fault := job["faults"].get(str(rank)):
        act, place = fault.split(" in ")
        PLACES[place](tg, once(folder, lambda: ACTS[act](tg, folder)))
    try:
        exec(script, vars(tg))                                                # ends the process
    except BaseException:
        sys.excepthook(*sys.exc_info())                                       # as the interpreter does
        os._exit(1)


# ------ Places and acts -----------------------------------------------------------------------------------------------

def once(folder: Path, act: Callable) -> Callable:
    """The act, at the first call only; the ends of the ranks are measured from the file that it leaves."""
    def acting() -> None:
        if not done:
            done.append(True)
            (folder / "fault").touch()
            act()
    done = []
    return acting


def in_step(tg, act: Callable, owner, name: str, after: bool = False) -> None:
    """Call act() before (or after) owner.name from FAULT_STEP of the race on."""
    step, race, train_step, inner = [-1], tg.race, tg.train_step, getattr(owner, name)

    def racing(*args):
        tg.train_step = counting
        return race(*args)

    def counting(executor, loader, values):
        step[0] = values.step
        return train_step(executor, loader, values)

    def wrapped(*args, **kwargs):
        if step[0] >= FAULT_STEP and not after:
            act()
        result = inner(*args, **kwargs)
        if step[0] >= FAULT_STEP and after:
            act()
        return result
    tg.race = racing
    setattr(owner, name, wrapped)


def at_call(tg, act: Callable, owner, name: str) -> None:
    inner = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: (act(), inner(*args, **kwargs))[1])


def in_thread(act: Callable) -> Callable:
    def acting() -> None:
        assert threading.current_thread() is not threading.main_thread()
        act()
    return acting


PLACES: dict[str, Callable] = {
    "the start": lambda tg, act: at_call(tg, act, tg, "parse_flags"),
    "joining": lambda tg, act: at_call(tg, act, tg.dist, "init_process_group"),
    "the data check": lambda tg, act: at_call(tg, act, tg, "scan_shards"),
    "set-up": lambda tg, act: at_call(tg, act, tg, "fit_memory"),
    "warm-up": lambda tg, act: at_call(tg, act, tg, "relu_sq_mlp"),
    "forward": lambda tg, act: in_step(tg, act, tg, "relu_sq_mlp"),
    "a reduction": lambda tg, act: in_step(tg, act, tg.dist, "reduce_scatter_tensor", after=True),
    "a gather": lambda tg, act: in_step(tg, act, tg.dist, "all_gather_into_tensor", after=True),
    "the gradients' return": lambda tg, act: in_step(tg, act, tg.RowTable, "return_gradients"),
    "the fetch": lambda tg, act: in_step(tg, act, tg.RowTable, "fetch"),
    "the exchange": lambda tg, act: in_step(tg, in_thread(act), tg, "exchange_plans"),
    "the loader": lambda tg, act: in_step(tg, in_thread(act), tg, "make_slot"),
    "the reader": lambda tg, act: in_step(tg, in_thread(act), tg.np, "fromfile"),
    "validation": lambda tg, act: in_step(tg, act, tg, "next_token_losses"),
    "the sample": lambda tg, act: at_call(tg, act, tg, "generate"),
}


def fail(error: BaseException) -> None:
    raise error


def kill(tg, folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(BOUND)


def kill_and_stop_launcher(tg, folder: Path) -> None:
    os.kill(int((folder / "launcher").read_text()), signal.SIGSTOP)
    kill(tg, folder)


def wait_in_c() -> None:
    """Wait as a collective or a compiler may: in C, where no signal is heard. A mutex is locked twice."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)


def signal_when_stuck(number: int) -> Callable:
    def act(tg, folder: Path) -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        wait_in_c()
    return act


def bug_and_stuck_end(tg, folder: Path) -> None:
    tg.Log.aborted = lambda *_: wait_in_c()
    fail(ZeroDivisionError("a bug"))


def bug_and_full_pipe(tg, folder: Path) -> None:
    """stderr is a pipe that nobody reads."""
    _, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, bytes(1 << 12))
    except BlockingIOError:
        os.set_blocking(writing, True)
    os.dup2(writing, 2)
    fail(ZeroDivisionError("a bug"))


def break_weights(tg, folder: Path) -> None:
    inner = tg.relu_sq_mlp
    tg.relu_sq_mlp = lambda *args: inner(*args) * float("nan")


def change_plans(tg, key: str, by: int, untied: bool = False) -> None:
    """From here on this rank's row plans say another cycle, or other tokens, or that the head is tied no more."""
    def plan(self, table, purpose, steps, *rest):
        if untied and table.label == "embed":
            steps = [dataclasses.replace(values, tied=not values.tied) for values in steps]
        found = inner(self, table, purpose, steps, *rest)
        found.tag[key] += by
        return found
    inner, tg.Planner.plan = tg.Planner.plan, plan


def fill_disk(tg, folder: Path) -> None:
    """log.jsonl may grow by half a line more; log.txt, which is shorter, by some."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    room = (folder / "run" / "log.jsonl").stat().st_size + 50
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))


def bug_and_late_signal(tg, folder: Path) -> None:
    """SIGTERM comes when the end has begun."""
    def describe(error):
        if isinstance(error, ZeroDivisionError):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        return inner(error)
    inner, tg.describe = tg.describe, describe
    fail(ZeroDivisionError("a bug"))


def cut_shards(tg, folder: Path) -> None:
    """Those that are not in memory yet."""
    for path in later_shards(folder):
        os.truncate(path, path.stat().st_size // 2)


def remove_shards(tg, folder: Path) -> None:
    for path in later_shards(folder):
        path.unlink()


def later_shards(folder: Path) -> list[Path]:
    return sorted((folder / "data").glob("train_*.bin"))[4:]                  # the loader is at the third by FAULT_STEP


ACTS: dict[str, Callable] = {
    "kill": kill,
    "nap": lambda tg, folder: time.sleep(1.5 * TIMEOUT),
    "sleep": lambda tg, folder: time.sleep(10 * BOUND),
    "Ctrl-C": lambda tg, folder: os.killpg(os.getpgrp(), signal.SIGINT),
    "SIGTERM": lambda tg, folder: os.kill(os.getpid(), signal.SIGTERM),
    "SIGHUP": lambda tg, folder: os.kill(os.getpid(), signal.SIGHUP),
    "SIGTERM when stuck": signal_when_stuck(signal.SIGTERM),
    "Ctrl-C when stuck": signal_when_stuck(signal.SIGINT),
    "SIGHUP when stuck": signal_when_stuck(signal.SIGHUP),
    "bug and stuck end": bug_and_stuck_end,
    "bug and full pipe": bug_and_full_pipe,
    "bug and late SIGTERM": bug_and_late_signal,
    "kill with stopped launcher": kill_and_stop_launcher,
    "bad data": lambda tg, folder: fail(tg.DataError("shard 7", "a hole", "no hole", "mend it")),
    "disk error": lambda tg, folder: fail(OSError(errno.EIO, os.strerror(errno.EIO))),
    "bug": lambda tg, folder: fail(ZeroDivisionError("a bug")),
    "out of memory": lambda tg, folder: fail(tg.torch.OutOfMemoryError("Tried to allocate 2.00 GiB.\nMore lines.")),
    "out of host memory": lambda tg, folder: tg.torch.empty(10**15),
    "NaN": break_weights,
    "another cycle": lambda tg, folder: change_plans(tg, "cycle", 1),
    "another untying": lambda tg, folder: change_plans(tg, "cycle", 0, untied=True),
    "other tokens": lambda tg, folder: change_plans(tg, "tokens", 8),
    "full disk": fill_disk,
    "cut shards": cut_shards,
    "removed shards": remove_shards,
}


if __name__ == "__main__":
    serve()
