"""Faults in real processes: all ranks end, and messages and log name the cause and the last checkpoint.

fault_injection.py injects the faults; the trainer has no code for them. No time is measured, because the machine may be
busy: a rank that has not ended after HANG_S seconds is killed.
"""
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from common import ROOT, Run, processes_with, wait_until, write_shard
from fault_injection import COMM_TIMEOUT_S, FLAGS, HANG_S, Job, JobResult

import train_gpt as tg

KILLED = -9
LOST = "lost another rank "
BUG = "Traceback"
STUCK = f"({LOST}|TrainerError: loader thread: no result after {COMM_TIMEOUT_S} s)"           # what is noticed first
NO_MEETING = f"TrainerError: meeting the other ranks: no result|{LOST}"       # the latter if torch is first

class Case(NamedTuple):
    options: dict[str, Any]              # of the job
    status: tuple                        # by rank
    cause: str                           # the start of the message of the first rank that was not killed
    log: str | None = "aborted"          # pattern of the type of its last line; None: there is no run directory

def one(fault: str, *ending: Any) -> Case:
    return Case(dict(faults={0: fault}), *ending)

def two(faults: dict[int, str], *ending: Any, timeout_s: int = HANG_S, **options: Any) -> Case:
    flags = dict.fromkeys((0, 1), [f"--comm_timeout={timeout_s}"])
    return Case(dict(world=2, faults=faults, extra=flags) | options, *ending)

CASES = {
    "bug": one("bug in forward", (1,), BUG),
    "out of memory": one("out of memory in forward", (1,), "out of memory .*--micro_batch_size"),
    "removed shards": one("removed shards in forward", (2,), "OutOfData: .*No such file.*train_", "result"),
    "killed in forward": two({1: "kill in forward"}, (1, KILLED), LOST),
    "killed in the exchange": two({1: "kill in the exchange"}, (1, KILLED), LOST),
    "killed rank 0": two({0: "kill in forward"}, (KILLED, 1), LOST, "step|phase"),
    "Ctrl-C on both": two(dict.fromkeys((0, 1), "Ctrl-C in forward"), (130, 130), "ended by SIGINT$"),
    "NaN on one": two({1: "NaN in forward"}, (1, 1), "TrainerError: training loss of step [34] is nan"),
    "stuck rank": two({1: "sleep in forward"}, (1, 143), STUCK, timeout_s=COMM_TIMEOUT_S, grace_s=0.1),
    "stuck loader": two({1: "sleep in the loader"}, (1, 1), STUCK, timeout_s=COMM_TIMEOUT_S),
    "no rank 1": two({}, (1, "absent"), NO_MEETING, None, timeout_s=1, absent=[1]),
    "no rank 0": two({}, ("absent", 1), NO_MEETING, None, timeout_s=1, absent=[0]),
    "other flags": two({}, (2, 2), "ConfigError: .*different adam_lr:", None, extra={1: ["--adam_lr=0.1"]}),
    "bad flags": two({}, (2, 2), "ConfigError: --adam_lr", None,
                     extra=dict.fromkeys((0, 1), ["--adam_lr=fast"])),
}

def write_shards(folder: Path, count: int = 12) -> str:
    """Write small shards, so that a run of 12 steps reads many of them; return the flag with their pattern."""
    folder.mkdir(parents=True)
    for seed in range(count):
        write_shard(folder / f"train_{seed:02}.bin", tg.synthetic_tokens(seed, 1100, 512, 511), 512, 511)
    return f"--train_files={folder}/train_*.bin"

def check_result(result: JobResult, case: Case) -> None:
    """Check the status of every rank, the message, and that both logs are complete and end with the same cause."""
    assert tuple(result.status) == case.status, result
    rank = 1 if case.status[0] in (KILLED, "absent") else 0
    prefix = f"rank {rank}: " if len(case.status) > 1 else ""
    # torch's C++ code prints lines of its own.
    lines = [line for line in result.err[rank].splitlines() if not re.match(r"\[[EW]\d+ ", line)]
    start = next((i for i, line in enumerate(lines) if line.startswith(prefix)), 0)
    message, *more = lines[start:]
    assert message.startswith(prefix) and re.match(case.cause, message.removeprefix(prefix)), result.err
    assert result.run_dir.exists() == (case.log is not None), "existence of the run directory"
    continues = case.log is not None
    if continues:
        progress = r"after step [2-6] of (8|12); last checkpoint: step-000000[246]; to continue: ./run.sh --resume="
        assert re.match(progress, more[-1]), more
        assert os.path.samefile(ROOT / more[-1].partition("--resume=")[2], result.run_dir)
    if case.cause != BUG:
        assert len(more) == continues, more
    if case.log is None:
        return
    run = Run(result.run_dir, 1, "", "")
    last = run.events[-1]
    assert re.fullmatch(case.log, last["type"]), last
    if case.log == "aborted":
        assert last["step"] >= 2 and re.match(case.cause, last["cause"].partition("\n")[0]), last
        assert run.lines[-1] == f"aborted after step {last['step']}: {' '.join(last['cause'].split())}"

@pytest.mark.parametrize("name", CASES)
def test_main__a_fault_ends_all_ranks(tmp_path, name) -> None:
    case = CASES[name]
    flags = [write_shards(tmp_path / "data"), "--max_steps=12"] if "shards" in name else []
    result = Job(tmp_path, *flags, **case.options).wait()
    check_result(result, case)
    if name == "bad flags":
        assert result.err[1] == "", "one rank prints what is wrong on the command line"
    if name == "bug":
        assert result.err[0].count("ZeroDivisionError: a bug") == result.err[0].count("last checkpoint") == 1

def test_main__hangup_under_nohup_does_not_end_a_run(tmp_path) -> None:
    """Libraries print no warnings, and only rank 0 prints."""
    result = Job(tmp_path, world=2, faults={1: "SIGHUP in forward"}, nohup=True).wait()
    assert result.status == [0, 0] and set(result.err) == {""}, result.err
    assert Run(result.run_dir, 0, "", "").events[-1]["type"] == "result"
    assert '"result"' in result.out[0].splitlines()[-1] and result.out[1] == ""

@pytest.mark.parametrize("damage, status, cause", [
    ("a byte", (2, 2), "ConfigError: ranks have different data_sha256:"), ("no shards", (1, 2), LOST)])
def test_open_data__nodes_with_different_data(tmp_path, damage, status, cause) -> None:
    """The shards of one node differ in one byte, with equal names and sizes, or are missing."""
    folders = [tmp_path / f"of_{rank}" for rank in range(2)]
    for folder in folders:
        write_shards(folder / "data")
    if damage == "a byte":
        changed = folders[1] / "data/train_09.bin"
        content = bytearray(changed.read_bytes())
        content[-2] ^= 1
        changed.write_bytes(content)
    else:
        shutil.rmtree(folders[1] / "data")
    same = "--train_files=data/train_*.bin"  # a relative path, because flags must not differ
    result = Job(tmp_path, same, world=2, folders=folders).wait()
    check_result(result, Case({}, status, cause, None))
    assert damage == "a byte" or "data/train_*.bin" in result.err[1]

def test_train_loop__end_of_data_loses_no_line(tmp_path) -> None:
    """All ranks notice the end of the data one cycle ahead. The steps that have data are trained and logged."""
    ended = Job(tmp_path, write_shards(tmp_path / "data", count=2), world=2).wait()
    check_result(ended, Case({}, (2, 2), "OutOfData: .* ended before step 4 .*--max_steps=4 ", "result"))
    log = Run(ended.run_dir, 2, "", "")
    result, = log.of("result")
    assert (result["steps"], result["void"]) == (4, "the data ended early or changed")
    printed = re.findall(r"(?m)^step:(\d+)/\d+ train_time", "\n".join(log.lines))
    assert [event["step"] for event in log.of("step")] == list(map(int, printed)) == [1, 2, 3, 4]


# ---- torchrun --------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc, and ends the ranks of a dead launcher")
def test_main__under_torchrun_the_ranks_end_with_a_killed_launcher(tmp_path) -> None:
    log, mark, errors = tmp_path / "run/log.jsonl", f"FAULT_TEST={tmp_path}", tmp_path / "errors"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               ROOT / "train_gpt.py", *FLAGS, "--max_steps=0", "--num_scheduled_steps=20000", "--epochs=0",
               f"--run_dir={tmp_path / 'run'}"]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors.open("w"), cwd=tmp_path,
                                env=os.environ | dict(OMP_NUM_THREADS="1", FAULT_TEST=str(tmp_path)))
    try:
        wait_until(lambda: log.exists() and '"checkpoint at' in log.read_text())
        assert len(processes_with(mark)) == 3, "the launcher and its ranks"
        assert "Warning" not in errors.read_text()
        launcher.kill()
        wait_until(lambda: not processes_with(mark))
    finally:
        launcher.kill()
        launcher.wait()
        for pid in processes_with(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
