"""Faults in real processes: all ranks end, stderr names the first cause once, and the log is complete.

fault_injection.py injects the faults; the trainer has no code for them. No time is measured, because the machine may be
busy: a rank that has not ended after HANG_S seconds has no exit status.
"""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from common import ROOT, Run, write_shard
from fault_injection import COMM_TIMEOUT_S, EXIT_TIMEOUT_SCALE, FLAGS, HANG_S, Job, JobResult

import train_gpt as tg

CAUSE = re.compile(r"(?m)^(?:(?:ConfigError|DataError|OutOfData|RunError): |interrupted$|terminated by SIG|Traceback)")
KILLED = -9
TERMINATED = (1, 143)                    # ended itself, or ended by the launcher
LOST = ("RunError: lost another rank", "dmesg")
MEMORY = ("RunError: out of memory", "--micro_batch_size=1")
DIFFER = ("RunError: row plans of ranks", "same flags")
NAN_LOSS = ("RunError: training loss of step 4", "nan", "finite")
NO_MEETING = ("ConfigError: waiting for all ranks", f"2 ranks within {COMM_TIMEOUT_S}")
SPEED = ("ConfigError: --adam_lr", "'fast'")
BUG = "ZeroDivisionError: a bug"         # end of the traceback

class Case(NamedTuple):
    job_options: dict[str, Any]
    status: tuple                        # by rank; a tuple lists alternatives
    cause: tuple[str, ...]  # regular expressions for all stderr together; the first one matches at the start of a line
    log: int | str = 2  # log ends with `aborted` at this step or later; or type of its last line; "": no run directory

def two_ranks(fault: str, status: tuple, *cause: str, log: int | str = 2, **job_options: Any) -> Case:
    """Build a case with a fault in rank 1. Rank 0 may be one step behind."""
    return Case(dict(world=2, faults={1: fault}) | job_options, status, cause, log)

def one_process(status: int, *cause: str, log: int | str = 3) -> tuple:
    return (status,), cause, log

TWO_RANK_FAULTS = {                      # exit status of both ranks, texts of the message
    **{f"kill in {place}": ((1, KILLED), *LOST) for place in (
        "the data check", "warm-up", "forward", "a reduction", "a gather", "the gradients' return", "the fetch",
        "the exchange", "the loader", "validation")},
    "another cycle in the loader": ((1, 1), *DIFFER, "'cycle': "),
    "another untying in the loader": ((1, 1), *DIFFER, "'tied': "),
    "other tokens in the loader": ((1, 1), *DIFFER, "'tokens': "),
    "bad data in the loader": ((2, 2), "DataError: shard 7, on rank 1", "a bad token", "valid tokens", "replace it"),
    "disk error in the reader": ((2, 2), "OutOfData: ", "Input/output error"),
    "out of memory in forward": ((1, 1), *MEMORY, "2.00 GiB"),
    "NaN in forward": ((1, 1), *NAN_LOSS),
    **{f"Ctrl-C in {place}": ((130, 130), "interrupted") for place in ("forward", "a reduction", "the loader")},
}
LOG_ENDS = {"kill in the data check": "", "kill in warm-up": 0, "disk error in the reader": "result"}
TWO_RANK_CASES = {f"{fault}, of two": two_ranks(fault, *ending, log=LOG_ENDS.get(fault, 2))
                  for fault, ending in TWO_RANK_FAULTS.items()}
ONE_PROCESS_FAULTS = {
    "Ctrl-C when stuck in set-up": one_process(130, "interrupted", log=""),  # before the log begins
    "Ctrl-C in warm-up": one_process(130, "interrupted", log=0),
    "Ctrl-C in forward": one_process(130, "interrupted"),
    "Ctrl-C in the loader": one_process(130, "interrupted"),
    "Ctrl-C in validation": one_process(130, "interrupted", log=8),
    "Ctrl-C in the sample": one_process(130, "interrupted", log="result"),
    "SIGTERM in forward": one_process(143, "terminated by SIGTERM"),
    "out of memory in forward": one_process(1, *MEMORY, "2.00 GiB", "--seqs_per_step"),
    "out of host memory in forward": one_process(1, *MEMORY),
    "NaN in forward": one_process(1, *NAN_LOSS, "last finite validation loss"),
    "cut shards in forward": one_process(2, "OutOfData: ", "train_", "1,100", log="result"),
    "removed shards in forward": one_process(2, "OutOfData: ", "train_", "No such file", log="result"),
    "bad data in the loader": one_process(2, "DataError: shard 7"),
    "bug and late SIGTERM in forward": one_process(1, BUG),
    # In C, Python's signal handlers do not run. A library may lose the exception, and the disk may fail during the
    # exit.
    "SIGTERM when stuck in forward": one_process(143, "terminated by SIGTERM", log=2),
    "SIGHUP when stuck in the start": one_process(129, "terminated by SIGHUP", log=""),
    "Ctrl-C when stuck in warm-up": one_process(130, "interrupted", log=0),
    "bug and stuck end in forward": one_process(1, BUG, log="step"),
}
QUICK = TWO_RANK_CASES | {
    "kill in forward, rank 0": Case(dict(world=2, faults={0: "kill in forward"}), (KILLED, 1), LOST, "step"),
    "kill in forward, rank 0 with the store": Case(
        dict(world=2, faults={0: "kill in forward"}, store="rank 0"), (KILLED, 1), LOST, "step"),
    **{f"kill in {place}, of four": Case(dict(world=4, faults={2: f"kill in {place}"}), (1, 1, KILLED, 1), LOST, 3)
       for place in ("a reduction", "the exchange", "the fetch")},
    "bug in forward, of two": two_ranks("bug in forward", (1, 1), BUG, log=3),
    "bug in forward, both": two_ranks("", (1, 1), BUG, log=3, faults=dict.fromkeys((0, 1), "bug in forward")),
    "flags differ": Case(dict(world=2, extra={1: ["--adam_lr=0.1"]}), (2, 2), (
        "ConfigError", "--adam_lr", "0.008 on rank 0", "0.1 on rank 1", "same flags"), ""),
    **{fault: Case(dict(faults={0: fault}), *ending)
       for fault, ending in ONE_PROCESS_FAULTS.items() if "stuck" not in fault},
}
# These cases wait for a timeout, or for a signal that is not handled. All of them are started together.
WAITING = {
    # The rank wakes after 1.5 timeouts, when the others have ended. It may be the first one to miss the plans.
    **{f"nap in {place}": two_ranks(f"nap in {place}", (1, 1), "RunError: lost another rank")
       for place in ("forward", "the gradients' return", "the fetch")},
    "nap in the exchange": two_ranks("nap in the exchange", (1, 1),
                                  "RunError: (lost another rank|waiting for the loader thread)"),
    **{f"sleep in {place}": two_ranks(f"sleep in {place}", (TERMINATED, TERMINATED), "(Run|Data)Error: ", log=3,
                                      ends=True)
       for place in ("forward", "the exchange", "the loader")},
    **{f"no rank {rank}, store in {store}": Case(
        dict(world=2, absent=[rank], store=store), ("absent", 2) if rank == 0 else (2, "absent"), NO_MEETING, "")
       for rank in (0, 1) for store in ("launcher", "rank 0")},
    # Rank 1 can only report to the launcher's store. torchrun ends all ranks 0.1 s after the first one fails, so rank 0
    # may not have printed yet.
    "bad flag": Case(dict(world=2, extra={1: ["--adam_lr=fast"]}, ends=True), ((1, 143, -15), 2), SPEED, ""),
    "bad flags, rank 0 late": Case(dict(world=2, extra=dict.fromkeys((0, 1), ["--adam_lr=fast"]), ends=True,
                                        faults={0: "nap in the start"}), ((143, -15), 2), SPEED, ""),
    "silent stranger, rank 0": Case(dict(world=2, absent=[1], store="silent stranger"), (2, "absent"), (
        *NO_MEETING, "at 127.0.0.1:", "in use", "MASTER_PORT"), ""),
    "silent stranger, rank 1": Case(dict(world=2, absent=[0], store="silent stranger"), ("absent", 2), (
        *NO_MEETING, "at 127.0.0.1:", "no response"), ""),
    "silent launcher": Case(dict(world=2, absent=[0], store="silent launcher", extra={1: ["--seed=abc"]}),
                            ("absent", 2), ("ConfigError: --seed", "'abc'"), ""),
    "stopped launcher": two_ranks("kill with stopped launcher in forward", (1, KILLED), *LOST, log=3),
    # Rank 0 sleeps and does not notice the kill, unless it was not yet asleep.
    "killed, then SIGTERM": two_ranks("", (TERMINATED, KILLED), *LOST, ends=True,
                                   faults={0: "sleep in forward", 1: "kill in forward"}),
    "SIGHUP while ranks meet": Case(dict(world=2, absent=[1], faults={0: "SIGHUP in joining"}), (129, "absent"), (
        LOST[0], "terminated by SIGHUP"), ""),
    **{fault: Case(dict(faults={0: fault}), *ending)
       for fault, ending in ONE_PROCESS_FAULTS.items() if "stuck" in fault},
}
CASES = QUICK | WAITING
SLOW_CASES = {                           # run with --all only
    *(f"{fault}, of two" for fault in (
        "kill in the data check", "kill in warm-up", "kill in a gather", "kill in validation",
        "another untying in the loader", "other tokens in the loader", "out of memory in forward",
        "Ctrl-C in a reduction", "Ctrl-C in the loader")),
    "kill in the fetch, of four", "sleep in the loader", "Ctrl-C in the loader", "Ctrl-C in validation",
    "bad data in the loader"}

def write_shards(folder: Path, count: int = 12, tokens: int = 1100) -> str:
    """Write small shards, so that a run of 12 steps reads many of them; return the flag with their pattern."""
    folder.mkdir(parents=True)
    for seed in range(count):
        write_shard(folder / f"train_{seed:02}.bin", tg.synthetic_tokens(seed, tokens, 512, 511), 512, 511)
    return f"--train_files={folder}/train_*.bin"

def start_job(name: str, folder: Path) -> Job:
    flags = []
    if "reader" in name or "shards" in name:
        flags = [write_shards(folder / "data"), "--max_steps=12"]
    return Job(folder, *flags, **CASES[name].job_options)

def check_result(result: JobResult, case: Case) -> None:
    """Check that every rank ended with its status, and that all stderr together names one cause, which the log has too.
    """
    text = "".join(result.err)
    for found, expected in zip(result.status, case.status, strict=True):
        assert found == expected or (isinstance(expected, tuple) and found in expected), (result.status, text)
    assert len(CAUSE.findall(text)) == 1, f"not exactly one cause: {text or 'no output'}"
    missing = [part for part in ("(?m)^" + case.cause[0], *case.cause[1:]) if not re.search(part, text)]
    assert not missing, f"{missing} not in {text}"
    check_log(result.run_dir, case.log, case.cause[0])

def check_log(run_dir: Path, log: int | str, cause: str) -> None:
    """Check that log.jsonl and log.txt are complete and end with the same `aborted`, if the run could write it."""
    assert run_dir.exists() == (log != ""), "existence of the run directory"
    if log == "":
        return
    run = Run(run_dir, 1, "", "")
    last, last_line = run.events[-1], run.lines[-1]
    if isinstance(log, str):
        assert last["type"] == log, last
        return
    assert last["type"] == "aborted" and last["step"] >= log and re.search(cause, last["cause"]), last
    assert last_line.startswith(f"aborted after step {last['step']}: ") and re.search(cause, last_line), last_line

@pytest.fixture(scope="module", autouse=True)
def waiting_jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Start the requested cases of WAITING before the first test, so that they wait while other tests run."""
    folder = tmp_path_factory.mktemp("waiting")
    requested = [item for item in request.session.items if item.originalname == test_end__all_ranks_in_time.__name__]
    names = [item.callspec.params["name"] for item in requested if not item.get_closest_marker("skip")]
    return {name: start_job(name, folder / name.replace(" ", "_")) for name in names if name in WAITING}

@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_CASES)) for name in CASES])
def test_end__all_ranks_in_time(waiting_jobs, tmp_path, name) -> None:
    job = waiting_jobs.get(name) or start_job(name, tmp_path)
    check_result(job.wait(), CASES[name])

def test_end__within_5_s_after_the_timeout_in_force() -> None:
    """The timeouts of an exit add up to less than 5 s, and HANG_S is between --comm_timeout and the longer timeout."""
    assert tg.STORE_TIMEOUT_S + 2 * tg.ALL_RANKS_TIMEOUT_S < tg.EXIT_TIMEOUT_S == 5
    longest_end = 2 * COMM_TIMEOUT_S + EXIT_TIMEOUT_SCALE * tg.EXIT_TIMEOUT_S
    assert longest_end < HANG_S < tg.SLOW_TIMEOUT_FACTOR * COMM_TIMEOUT_S

@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_RANK_CASES)
def test_end__again_and_again(tmp_path, name) -> None:
    """Three jobs at a time, so that the order of events varies on a busy machine."""
    for round_num in range(3):
        folders = [tmp_path / f"job_{round_num}_{i}" for i in range(3)]
        for folder, job in [(folder, start_job(name, folder)) for folder in folders]:
            check_result(job.wait(), CASES[name])
            shutil.rmtree(folder)

def test_end__a_full_stderr_pipe(tmp_path) -> None:
    result = Job(tmp_path, faults={0: "bug and full pipe in forward"}).wait()
    assert result.status == [1] and result.err == [""]
    check_log(result.run_dir, 3, "a bug")

@pytest.mark.parametrize("job_options", [dict(world=2), dict(faults={0: "SIGHUP in forward"}, nohup=True)], ids=str)
def test_main__nothing_goes_wrong_without_a_fault(tmp_path, job_options) -> None:
    """Neither the launcher nor SIGHUP under nohup ends a run. Libraries print no warnings."""
    result = Job(tmp_path, **job_options).wait()
    assert set(result.status) == {0} and set(result.err) == {""}, result.err
    check_log(result.run_dir, "result", "")
    assert '"result"' in result.out[0].splitlines()[-1] and not any(result.out[1:])

@pytest.mark.parametrize("damage, status, cause", [
    ("a byte", (2, 2), ("ConfigError", "data_sha256", "rank 1")),
    ("no shards", (1, 2), ("DataError", "no regular file", "of_1"))])
def test_open_data__ranks_with_different_data(tmp_path, damage, status, cause) -> None:
    """The shards of one node differ in one byte, with equal names and sizes, or are missing."""
    folders = [tmp_path / f"of_{rank}" for rank in range(2)]
    for folder in folders:
        write_shards(folder / "data")
    changed_data = folders[1] / "data"
    if damage == "a byte":
        content = bytearray((changed_data / "train_09.bin").read_bytes())
        content[-2] ^= 1
        (changed_data / "train_09.bin").write_bytes(content)
    else:
        shutil.rmtree(changed_data)
    same = "--train_files=data/train_*.bin"  # a relative path, because flags must not differ
    check_result(Job(tmp_path, same, world=2, folders=folders).wait(), Case({}, status, cause, ""))

def test_train_loop__end_of_data_loses_no_line(tmp_path) -> None:
    """All ranks notice the end of the data one cycle ahead. The steps that have data are trained and logged.

    With a time budget, the number of steps is not known at the start.
    """
    ended = Job(tmp_path, write_shards(tmp_path / "data", count=3), "--time_budget=600", world=2).wait()
    cause = ("OutOfData: training data ended", "ends before step 6,", "--max_steps")
    check_result(ended, Case({}, (2, 2), cause, "result"))
    log = Run(ended.run_dir, 2, "", "")
    result, = log.of("result")
    assert (result["steps"], result["void"]) == (6, "the data ended early or changed")
    printed = re.findall(r"(?m)^step:(\d+)/\d+ train_time", "\n".join(log.lines))
    assert [event["step"] for event in log.of("step")] == list(map(int, printed)) == [1, 2, 3, 4, 5, 6]

@pytest.mark.parametrize("fault", ["kill in forward", *(
    pytest.param(fault, marks=pytest.mark.slow)
    for fault in ("kill in warm-up", "sleep in forward", "bad data in the loader"))])
def test_end__under_torchrun(tmp_path, fault) -> None:
    """torchrun adds a traceback and a summary. The ranks still name the cause once.

    torchrun polls every 0.1 s. If it notices a killed rank before the other ranks do, it ends them. The killed rank is
    still the cause.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               ROOT / "tests/fault_injection.py", fault, *FLAGS, f"--run_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * HANG_S, cwd=tmp_path,
                          env=os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"))
    cause = "DataError: shard 7" if "data" in fault else LOST[0]
    assert done.returncode and CAUSE.findall(done.stderr) == [f"{cause.split(':')[0]}: ", "Traceback"], done.stderr
    assert cause in done.stderr and done.stderr.count("raise ChildFailedError(") == 1, "of torchrun, not of the ranks"
    check_log(tmp_path / "run", 0 if "warm-up" in fault else 3, cause)
