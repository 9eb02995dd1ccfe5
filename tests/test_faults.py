"""Real processes in which something goes wrong: all end, the first cause is named once, and the log can be read.

Faults come from faults.py; nothing in the trainer knows of them. The time to the end is enforced only as a bound far
beyond what is promised, for a busy machine; the loops of `--all` print the largest one seen.
"""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from common import ROOT, write_shard
from faults import BOUND, FLAGS, TIMEOUT, Ended

import train_gpt as tg

SLACK = 25                               # s: 5 that are promised, and 20 for a busy machine
LIMIT = 2 * TIMEOUT + 30                 # s from the fault to the end of the last rank; 30 s for a busy machine
NAMED = re.compile(r"(?m)^(?:(?:ConfigError|DataError|DataEnded|RunError): |interrupted$|ended from outside)")
KILLED = -9
LOST = ("RunError: lost another rank", "dmesg")
MEMORY = ("RunError: out of memory", "--slots_per_micro_batch=1")
LONG = pytest.mark.all


def some(cases, long):
    """Return the names as parameters of a test, these only with --all."""
    return [pytest.param(name, marks=LONG if name in long else ()) for name in cases]


def write_shards(folder: Path, count: int = 12, tokens: int = 1100) -> str:
    """Write small shards, so that a run of 12 steps reads many; return their pattern."""
    folder.mkdir(parents=True)
    for seed in range(count):
        write_shard(folder / f"train_{seed:02}.bin", tg.formula_tokens(seed, tokens, 512, 511), 512, 511)
    return f"--train_files={folder}/train_*.bin"


def files_for(fault: str, folder: Path) -> list[str]:
    if "reader" in fault or "shard" in fault:
        return [write_shards(folder / "data"), "--max_steps=12"]
    return []


def check_end(ended: Ended, *parts: str) -> None:
    """Every rank has ended in time and badly, and over all stderr the cause is named once, with these parts."""
    text = "".join(ended.err)
    assert None not in ended.status, f"ranks that hang: {ended.status}\n{text}"
    assert all(ended.status), f"a rank ended as if nothing had been: {ended.status}\n{text}"
    assert max(ended.seconds) < LIMIT, ended.seconds
    assert "Traceback" not in text, text
    assert len(NAMED.findall(text)) == 1, f"not exactly one cause: {text or 'nothing'}"
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} not in {text}"


def check_log(run_dir: Path, step: int, cause: str = "") -> None:
    """log.jsonl and log.txt are whole and end with `aborted` at this step or later, and with this cause."""
    last = json.loads((run_dir / "log.jsonl").read_text().splitlines()[-1])
    last_line = (run_dir / "log.txt").read_text().splitlines()[-1]
    assert last["type"] == "aborted" and last["step"] >= step, last
    assert last_line.startswith(f"aborted after step {last['step']}: "), last_line
    assert cause in last["cause"] and cause in last_line, f"{cause} not in {last} or {last_line}"


# ------ Two ranks -----------------------------------------------------------------------------------------------------

ONE_OF_TWO = {                           # fault in rank 1 -> status of both ranks, parts of the message
    **{f"kill in {place}": (1, KILLED, *LOST) for place in (
        "the data check", "warm-up", "forward", "a reduction", "a gather", "the gradients' return", "the fetch",
        "the exchange", "the loader", "validation")},
    "another cycle in the loader": (1, 1, "RunError: row plans of ranks", "'cycle': ", "same flags"),
    "another untying in the loader": (1, 1, "RunError: row plans of ranks", "'tied': ", "same flags"),
    "other tokens in the loader": (1, 1, "RunError: row plans of ranks", "'tokens': ", "same flags"),
    "bad data in the loader": (1, 2, "DataError: shard 7", "a hole", "no hole", "mend it"),
    "disk error in the reader": (1, 2, "DataError: ", "Input/output error"),
    "out of memory in forward": (1, 1, *MEMORY, "2.00 GiB"),
    "NaN in forward": (1, 1, "RunError: training loss of step 3", "nan"),
    "Ctrl-C in forward": (130, 130, "interrupted"),
    "Ctrl-C in a reduction": (130, 130, "interrupted"),
    "Ctrl-C in the loader": (130, 130, "interrupted"),
}
LONG_OF_TWO = ("kill in the data check", "kill in warm-up", "kill in a gather", "kill in validation",
               "another untying in the loader", "other tokens in the loader", "out of memory in forward",
               "Ctrl-C in a reduction", "Ctrl-C in the loader")


def check_two(fault: str, ended: Ended) -> None:
    first, second, *parts = ONE_OF_TWO[fault]
    assert ended.status == [first, second], (ended.status, ended.err)
    check_end(ended, *parts)
    if "data check" not in fault:                                             # there is a log by then
        check_log(ended.run_dir, 0 if "warm-up" in fault else 2, parts[0])    # rank 0 may be a step behind


@pytest.mark.parametrize("fault", some(ONE_OF_TWO, LONG_OF_TWO))
def test_end__a_fault_in_one_rank_of_two(launcher, tmp_path, fault):
    check_two(fault, launcher.start(tmp_path, *files_for(fault, tmp_path), world=2, faults={1: fault}).wait())


@pytest.mark.parametrize("store", ["launcher", "rank 0"])
def test_end__rank_0_killed(launcher, tmp_path, store):
    """Rank 1 says it; without torchrun the store has gone with rank 0."""
    ended = launcher.start(tmp_path, world=2, faults={0: "kill in forward"}, store=store).wait()
    assert ended.status == [KILLED, 1]
    check_end(ended, *LOST)
    assert ended.log()[-1]["type"] == "step", "what rank 0 wrote before is readable"


@pytest.mark.parametrize("place", some(["a reduction", "the exchange", "the fetch"], ["the fetch"]))
def test_end__one_survivor_of_three_says_that_a_rank_is_lost(launcher, tmp_path, place):
    ended = launcher.start(tmp_path, world=4, faults={2: f"kill in {place}"}).wait()
    assert ended.status == [1, 1, KILLED, 1]
    check_end(ended, *LOST)
    check_log(ended.run_dir, 3, LOST[0])


@pytest.mark.parametrize("ranks", [[1], [0, 1]], ids=["one rank", "all ranks"])
def test_describe__a_bug_shows_one_trace(launcher, tmp_path, ranks):
    """For a bug the trace is what helps: of a rank that met it, and nothing from the others."""
    ended = launcher.start(tmp_path, world=2, faults=dict.fromkeys(ranks, "bug in forward")).wait()
    text = "".join(ended.err)
    assert ended.status == [1, 1] and max(ended.seconds) < LIMIT
    assert text.count("ZeroDivisionError: a bug") == text.count("Traceback") == 1, text
    assert not NAMED.search(text), text
    check_log(ended.run_dir, 3, "ZeroDivisionError: a bug")


def test_check_agreement__ranks_with_different_flags(launcher, tmp_path):
    ended = launcher.start(tmp_path, world=2, extra={1: ["--adam_lr=0.1"]}).wait()
    assert ended.status == [2, 2]
    check_end(ended, "ConfigError", "--adam_lr", "0.008 on rank 0", "0.1 on rank 1", "same flags")
    assert not ended.run_dir.exists(), "nothing was begun"


@pytest.mark.parametrize("damage, status, parts", [
    ("a byte", [2, 2], ("ConfigError", "data_sha256", "rank 1")),
    ("no shards", [1, 2], ("DataError", "no such file", "of_1"))])
def test_open_data__ranks_with_different_data(launcher, tmp_path, damage, status, parts):
    """A node with the same names and sizes and one byte of difference, or without the shards."""
    folders = [tmp_path / f"of_{rank}" for rank in range(2)]
    for folder in folders:
        write_shards(folder / "data")
    odd = folders[1] / "data"
    if damage == "a byte":
        content = bytearray((odd / "train_09.bin").read_bytes())
        content[-2] ^= 1
        (odd / "train_09.bin").write_bytes(content)
    else:
        shutil.rmtree(odd)
    same = "--train_files=data/train_*.bin"                                   # relative: the flags must not differ
    ended = launcher.start(tmp_path, same, world=2, folders=folders).wait()
    assert ended.status == status
    check_end(ended, *parts)


def test_race__data_that_end_lose_no_line(launcher, tmp_path):
    """All ranks know it a cycle ahead; the steps whose data are there are done and logged. Documents are cut to
    max_doc_len, so 4,400 tokens are too few for the 1,984 that 8 steps ask for at least.
    """
    ended = launcher.start(tmp_path, write_shards(tmp_path / "data", count=4), world=2).wait()
    assert ended.status == [2, 2]
    check_end(ended, "DataEnded: training data ended", "enough for 6 steps", "--max_steps")
    result = ended.log()[-1]
    assert (result["type"], result["steps"], result["void"]) == ("result", 6, "the data ended early")
    done = [event["step"] for event in ended.log() if "train_loss" in event]
    lines = (ended.run_dir / "log.txt").read_text()
    assert done == [int(step) for step in re.findall(r"(?m)^step:(\d+)/12 train_time", lines)] == [1, 2, 3, 4, 5, 6]


# ------ Waiting for the timeout, or for a signal that is not heard: started together ----------------------------------

WAITING = {                              # name -> how it is started
    "nap in forward": dict(faults={1: "nap in forward"}),
    "nap in the exchange": dict(faults={1: "nap in the exchange"}),
    "nap in the gradients' return": dict(faults={1: "nap in the gradients' return"}),
    "nap in the fetch": dict(faults={1: "nap in the fetch"}),
    "sleep in forward": dict(faults={1: "sleep in forward"}, ends=True),
    "sleep in the exchange": dict(faults={1: "sleep in the exchange"}, ends=True),
    "sleep in the loader": dict(faults={1: "sleep in the loader"}, ends=True),
    "no rank 1": dict(absent=[1]),
    "no rank 1, store in rank 0": dict(absent=[1], store="rank 0"),
    "no rank 0": dict(absent=[0]),
    "no rank 0, store in rank 0": dict(absent=[0], store="rank 0"),
    "bad flag": dict(extra={1: ["--adam_lr=fast"]}, ends=True),
    "bad flags, rank 0 late": dict(extra={0: ["--adam_lr=fast"], 1: ["--adam_lr=fast"]},
                                   faults={0: "nap in the start"}, ends=True),
    "silent stranger, rank 0": dict(absent=[1], store="silent stranger"),
    "silent stranger, rank 1": dict(absent=[0], store="silent stranger"),
    "silent launcher": dict(absent=[0], store="silent launcher", extra={1: ["--seed=abc"]}),
    "stopped launcher": dict(faults={1: "kill with stopped launcher in forward"}),
    "killed, then SIGTERM": dict(faults={0: "sleep in forward", 1: "kill in forward"}, ends=True),
    "SIGHUP while ranks meet": dict(absent=[1], faults={0: "SIGHUP in joining"}),
    "nohup": dict(world=1, faults={0: "SIGHUP in forward"}, nohup=True),
}
STUCK = {                                # fault -> status, message, cause in the log
    "SIGTERM when stuck in forward": (143, "ended from outside (SIGTERM)", "ended from outside (SIGTERM)"),
    "SIGHUP when stuck in the start": (129, "ended from outside (SIGHUP)", ""),
    "Ctrl-C when stuck in warm-up": (130, "interrupted", "interrupted"),
    "bug and stuck end in forward": (1, "ZeroDivisionError: a bug", ""),
    "bug and full pipe in forward": (1, "", "a bug"),
}
WAITING |= {fault: dict(world=1, faults={0: fault}) for fault in STUCK}


@pytest.fixture(scope="module", autouse=True)
def waiting(launcher, tmp_path_factory):
    """All the jobs of WAITING, running from the first test on: they wait while other tests work."""
    folder = tmp_path_factory.mktemp("waiting")
    return {name: launcher.start(folder / name.replace(" ", "_"), **dict(world=2) | how)
            for name, how in WAITING.items()}


@pytest.mark.parametrize("name", [name for name in WAITING if name.startswith("nap")])
def test_end__a_rank_that_sleeps_past_the_timeout(waiting, name):
    """It wakes after 1.5 timeouts, finds the others gone and says nothing more. In its loader thread it may itself be
    the first to miss the plans."""
    ended = waiting[name].wait()
    assert ended.status == [1, 1]
    check_end(ended)
    causes = LOST[:1]
    if "exchange" in name:
        causes += ("RunError: waiting for the loader thread",)
    text = "".join(ended.err)
    assert any(cause in text for cause in causes), text
    assert ended.err[1] == "" or "forward" not in name
    check_log(ended.run_dir, 2, "RunError")


@pytest.mark.parametrize("name", some(["sleep in forward", "sleep in the exchange", "sleep in the loader"],
                                      ["sleep in the loader"]))
def test_end__a_rank_that_sleeps_for_ever_is_ended_by_the_launcher(waiting, name):
    ended = waiting[name].wait()
    check_end(ended)
    check_log(ended.run_dir, 3)
    assert set(ended.status) <= {1, 143}


@pytest.mark.parametrize("name", [name for name in WAITING if name.startswith("no rank")])
def test_make_fabric__a_rank_that_never_arrives(waiting, name):
    ended = waiting[name].wait()
    absent = int(name[len("no rank ")])
    assert ended.status[1 - absent] == 2 and ended.seconds[1 - absent] < LIMIT
    text = ended.err[1 - absent]
    assert len(NAMED.findall(text)) == 1 and "Traceback" not in text
    assert "ConfigError: waiting for all ranks" in text and f"2 ranks in {TIMEOUT}" in text


@pytest.mark.parametrize("name, status", [("bad flag", (1, 143, -15)), ("bad flags, rank 0 late", (143, -15))])
def test_first_cause__a_bad_flag_is_named_before_the_ranks_have_met(waiting, name, status):
    """Rank 1 has nobody to tell but the launcher's store; torchrun ends all ranks 0.1 s after the first has failed, so
    that rank 0 may not be there yet to speak."""
    ended = waiting[name].wait()
    assert ended.status[0] in status and ended.status[1] == 2, ended
    check_end(ended, "ConfigError: --adam_lr", "'fast'")


@pytest.mark.parametrize("name, rank, cause", [
    ("silent stranger, rank 0", 0, ("ConfigError: waiting for all ranks", "at 127.0.0.1:", "in use", "MASTER_PORT")),
    ("silent stranger, rank 1", 1, ("ConfigError: waiting for all ranks", "at 127.0.0.1:", "nothing that answers")),
    ("silent launcher", 1, ("ConfigError: --seed", "'abc'"))])
def test_first_cause__what_listens_and_says_nothing_holds_no_end_up(waiting, name, rank, cause):
    """Where the store should be: a stranger's program, or a launcher that is stopped."""
    ended = waiting[name].wait()
    assert ended.status[rank] == 2 and ended.seconds[rank] < TIMEOUT + SLACK, ended
    assert all(part in ended.err[rank] for part in cause) and len(NAMED.findall(ended.err[rank])) == 1, ended.err


def test_first_cause__a_killed_rank_under_a_stopped_launcher(waiting):
    ended = waiting["stopped launcher"].wait()
    assert ended.status == [1, KILLED] and max(ended.seconds) < TIMEOUT + SLACK, ended
    check_end(ended, *LOST)
    check_log(ended.run_dir, 3, LOST[0])


def test_end__a_killed_rank_is_the_cause_also_when_the_launcher_ends_the_others(waiting):
    """The other rank sleeps and does not notice by itself; or it does, if it was not yet asleep."""
    ended = waiting["killed, then SIGTERM"].wait()
    assert ended.status in ([143, KILLED], [1, KILLED]), ended
    check_end(ended, *LOST)
    check_log(ended.run_dir, 2, LOST[0])


def test_end__a_dropped_connection_ends_a_run_at_once_unless_it_is_ignored(waiting):
    ended = waiting["SIGHUP while ranks meet"].wait()
    assert ended.status[0] == 129 and ended.seconds[0] < SLACK and not ended.run_dir.exists(), ended
    assert "ended from outside (SIGHUP)" in ended.err[0] and ended.err[0].startswith(LOST[0]), "rank 1 did not hear it"
    ended = waiting["nohup"].wait()
    assert ended.status == [0] and ended.err == [""] and ended.log()[-1]["type"] == "result", ended


@pytest.mark.parametrize("fault", STUCK)
def test_end__a_main_thread_that_hears_nothing_does_not_hold_it_up(waiting, fault):
    """In C no handler of Python's is called, a library may lose the exception, and the end may meet a dead disk."""
    status, message, logged = STUCK[fault]
    ended = waiting[fault].wait()
    assert ended.status == [status] and ended.seconds[0] < 6 + SLACK, ended
    if message:
        assert ended.err[0].rstrip().splitlines()[-1] == message and ended.err[0].count(message) == 1
    if logged:
        check_log(ended.run_dir, 0 if "warm-up" in fault else 2, logged)


# ------ One process ---------------------------------------------------------------------------------------------------

ALONE = {                                # fault -> status, steps that the log must hold, cause in the log, more of it
    "Ctrl-C in warm-up": (130, 0, "interrupted"),
    "Ctrl-C in forward": (130, 3, "interrupted"),
    "Ctrl-C in the loader": (130, 3, "interrupted"),
    "Ctrl-C in validation": (130, 8, "interrupted"),
    "SIGTERM in forward": (143, 3, "SIGTERM"),
    "out of memory in forward": (1, 3, *MEMORY, "2.00 GiB", "--num_slots"),
    "out of host memory in forward": (1, 3, *MEMORY),
    "NaN in forward": (1, 3, "RunError: training loss of step 3", "nan", "finite", "last good validation"),
    "cut shards in forward": (2, 3, "DataError: ", "train_", "1100"),
    "removed shards in forward": (2, 3, "DataError: ", "train_", "No such file"),
    "bad data in the loader": (2, 3, "DataError: shard 7"),
}


@pytest.mark.parametrize("fault", some(ALONE, ["Ctrl-C in the loader", "Ctrl-C in validation",
                                               "bad data in the loader"]))
def test_end__a_fault_in_one_process(launcher, tmp_path, fault):
    status, steps, cause, *parts = ALONE[fault]
    ended = launcher.start(tmp_path, *files_for(fault, tmp_path), faults={0: fault}).wait()
    assert ended.status == [status], ended.err
    check_end(ended, cause, *parts)
    check_log(ended.run_dir, steps, cause)


def test_end__interrupted_in_set_up(launcher, tmp_path):
    ended = launcher.start(tmp_path, faults={0: "Ctrl-C in set-up"}).wait()
    check_end(ended, "interrupted")
    assert ended.status == [130] and not ended.run_dir.exists(), "nothing was begun"


def test_end__a_signal_that_comes_when_it_has_begun_hides_nothing(launcher, tmp_path):
    ended = launcher.start(tmp_path, faults={0: "bug and late SIGTERM in forward"}).wait()
    assert ended.status == [1] and "ended from outside" not in ended.err[0], ended
    assert ended.err[0].count("ZeroDivisionError: a bug") == 1
    check_log(ended.run_dir, 3, "ZeroDivisionError: a bug")


def test_generate__an_interrupt_leaves_the_result(launcher, tmp_path):
    ended = launcher.start(tmp_path, faults={0: "Ctrl-C in the sample"}).wait()
    assert ended.status == [130] and ended.log()[-1]["type"] == "result"
    check_end(ended, "interrupted")


def test_main__nothing_goes_wrong_without_a_fault(launcher, tmp_path):
    """The launcher itself is no fault; and warnings of libraries do not reach the console."""
    ended = launcher.start(tmp_path, world=2).wait()
    assert ended.status == [0, 0] and ended.err == ["", ""], ended.err
    assert ended.log()[-1]["type"] == "result" and ended.out[1] == "" and '"result"' in ended.out[0].splitlines()[-1]


# ------ The real launcher, and loops ----------------------------------------------------------------------------------

RANK = """
import os, sys
sys.path[:0] = sys.argv[1:3]
import faults
os.chdir(sys.argv[3])
if os.environ["RANK"] == "1":
    faults.plant(sys.argv[4])
faults.tg.main(sys.argv[5:])
"""
TORCHRUN = {"kill in forward": LOST, "kill in warm-up": LOST, "sleep in forward": LOST,
            "bad data in the loader": ("DataError: shard 7",)}


@pytest.mark.parametrize("fault", some(TORCHRUN, ["kill in warm-up", "sleep in forward", "bad data in the loader"]))
def test_end__under_torchrun(tmp_path, fault):
    """torchrun adds a trace and a summary of its own; the ranks still name the cause once.

    It looks every 0.1 s: if it sees a killed rank before the others do, they are ended from outside; the cause is the
    killed rank all the same.
    """
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               tmp_path / "rank.py", ROOT / "tests", ROOT, tmp_path, fault, *FLAGS, f"--run_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * BOUND)
    assert done.returncode and len(NAMED.findall(done.stderr)) == 1, done.stderr
    assert all(part in done.stderr for part in TORCHRUN[fault]), done.stderr
    assert done.stderr.count("Traceback") == done.stderr.count("raise ChildFailedError(") == 1, "of torchrun itself"
    check_log(tmp_path / "run", 0 if "warm-up" in fault else 3)


@pytest.mark.all
@pytest.mark.parametrize("fault", ONE_OF_TWO)
def test_end__again_and_again(launcher, tmp_path, fault, capsys):
    """Three at a time, so that they meet in different orders on a busy machine."""
    slowest = 0.0
    for number in range(3):
        jobs = []
        for folder in (tmp_path / f"job_{number}_{at}" for at in range(3)):
            jobs.append(launcher.start(folder, *files_for(fault, folder), world=2, faults={1: fault}))
        for job in jobs:
            ended = job.wait()
            check_two(fault, ended)
            slowest = max(slowest, *ended.seconds)
            shutil.rmtree(ended.folder)
    with capsys.disabled():
        print(f" {fault}: 9 times, the last rank ended {slowest:.2f} s after the fault")
