"""Real processes in which something goes wrong: all end, the first cause is named once, and the log can be read.

Faults come from tests/faults.py; nothing in the trainer knows of them. The time to the end is enforced only as a bound
far beyond what is promised, for a busy machine; the loops of `--all` print the largest one seen.
"""
import json
import re
import shutil
import subprocess
import sys

import pytest
from common import refused
from faults import BOUND, FLAGS, ROOT, TIMEOUT, Ended

import train_gpt as tg

SLACK = 25                               # s: 5 that are promised, and 20 for a busy machine
LIMIT = 2 * TIMEOUT + 30                 # s from the fault to the end of the last rank; 30 s for a busy machine
NAMED = re.compile(r"(?m)^(?:(?:ConfigError|DataError|DataEnded|RunError): |interrupted$|ended from outside)")
KILLED = -9


def some(names, always):
    """Parameters of a test: these always, the others with --all."""
    return [pytest.param(name, marks=() if name in always else pytest.mark.all) for name in names]


def write_shards(folder, count: int = 12, tokens: int = 1100) -> str:
    """Small shards, so that a run of 12 steps reads many; returns their pattern."""
    folder.mkdir(parents=True)
    for seed in range(count):
        words = [tg.SHARD_MAGIC, tg.SHARD_VERSION, tokens, 512, 511] + [0] * 251
        data = tg.formula_tokens(seed, tokens, 512, 511)
        (folder / f"train_{seed:02}.bin").write_bytes(tg.np.array(words, "<i4").tobytes() + data.tobytes())
    return f"{folder}/train_*.bin"


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


def check_log(ended: Ended, step: int, *parts: str) -> None:
    """log.jsonl and log.txt of rank 0 are whole and end with `aborted` at this step or later, and with these parts."""
    last, last_line = ended.log()[-1], (ended.run_dir / "log.txt").read_text().splitlines()[-1]
    assert last["type"] == "aborted" and last["step"] >= step, last
    assert last_line.startswith(f"aborted after step {last['step']}: "), last_line
    for part in parts:
        assert part in last["cause"] and part in last_line, f"{part} not in {last} or {last_line}"


# ------ Two ranks -----------------------------------------------------------------------------------------------------

LOST = ("RunError: lost another rank", "dmesg")
ONE_RANK = {                             # fault in rank 1 -> status of both ranks, parts of the message
    "kill in the data check": (1, KILLED, LOST),
    "kill in warm-up": (1, KILLED, LOST),
    "kill in forward": (1, KILLED, LOST),
    "kill in a reduction": (1, KILLED, LOST),
    "kill in a gather": (1, KILLED, LOST),
    "kill in the gradients' return": (1, KILLED, LOST),
    "kill in the fetch": (1, KILLED, LOST),
    "kill in the exchange": (1, KILLED, LOST),
    "kill in the loader": (1, KILLED, LOST),
    "kill in validation": (1, KILLED, LOST),
    "another cycle in the loader": (1, 1, ("RunError: row plans of ranks", "'cycle': ", "same flags")),
    "another untying in the loader": (1, 1, ("RunError: row plans of ranks", "'tied': ", "same flags")),
    "other tokens in the loader": (1, 1, ("RunError: row plans of ranks", "'tokens': ", "same flags")),
    "bad data in the loader": (1, 2, ("DataError: shard 7", "a hole", "no hole", "mend it")),
    "disk error in the reader": (1, 2, ("DataError: ", "Input/output error")),
    "out of memory in forward": (1, 1, ("RunError: out of memory", "2.00 GiB", "--slots_per_micro_batch")),
    "NaN in forward": (1, 1, ("RunError: training loss of step 3", "nan")),
    "Ctrl-C in forward": (130, 130, ("interrupted",)),
    "Ctrl-C in a reduction": (130, 130, ("interrupted",)),
    "Ctrl-C in the loader": (130, 130, ("interrupted",)),
}


def with_files(fault: str, tmp_path) -> list[str]:
    needs = "reader" in fault or "shard" in fault
    return ["--train_files=" + write_shards(tmp_path / "data"), "--max_steps=12"] if needs else []


def check_one_rank(fault: str, ended: Ended) -> None:
    *status, parts = ONE_RANK[fault]
    assert ended.status == status, (ended.status, ended.err)
    check_end(ended, *parts)
    if "data check" not in fault:                                             # there is a log by then
        early = "warm-up" in fault                                            # rank 0 may be a step behind
        check_log(ended, 0 if early else 2, "interrupted" if "Ctrl-C" in fault else parts[0])


@pytest.mark.parametrize("fault", some(ONE_RANK, always=(
    "kill in forward", "kill in a reduction", "kill in the loader", "bad data in the loader", "NaN in forward",
    "disk error in the reader", "Ctrl-C in forward", "kill in the exchange", "kill in the gradients' return",
    "kill in the fetch", "another cycle in the loader")))
def test_a_fault_in_one_rank_of_two(launcher, tmp_path, fault):
    check_one_rank(fault, launcher.start(tmp_path / "job", *with_files(fault, tmp_path / "job"), world=2,
                                         faults={1: fault}).wait())


@pytest.mark.parametrize("store", ["launcher", "rank 0"])
def test_rank_0_killed(launcher, tmp_path, store):
    """Rank 1 says it; without torchrun the store has gone with rank 0."""
    ended = launcher.start(tmp_path / "job", world=2, faults={0: "kill in forward"}, store=store).wait()
    assert ended.status == [KILLED, 1]
    check_end(ended, *LOST)
    assert [line["type"] for line in ended.log()][-1] == "step", "what rank 0 wrote before is readable"


@pytest.mark.parametrize("place", ["a reduction", "the exchange", pytest.param("the fetch", marks=pytest.mark.all)])
def test_one_survivor_of_three_says_that_a_rank_is_lost(launcher, tmp_path, place):
    ended = launcher.start(tmp_path / "job", world=4, faults={2: f"kill in {place}"}).wait()
    assert ended.status == [1, 1, KILLED, 1]
    check_end(ended, *LOST)
    check_log(ended, 3, *LOST)


def test_a_bug_in_one_rank_shows_one_trace(launcher, tmp_path):
    """For a bug the trace is what helps: of the rank that met it, and nothing from the others."""
    ended = launcher.start(tmp_path / "job", world=2, faults={1: "bug in forward"}).wait()
    text = "".join(ended.err)
    assert ended.status == [1, 1] and max(ended.seconds) < LIMIT
    assert text.count("ZeroDivisionError: a bug") == text.count("Traceback") == 1, text
    assert not NAMED.search(text), text
    check_log(ended, 3, "ZeroDivisionError: a bug")


def test_a_bug_in_all_ranks_shows_one_trace(launcher, tmp_path):
    ended = launcher.start(tmp_path / "job", world=2, faults={0: "bug in forward", 1: "bug in forward"}).wait()
    text = "".join(ended.err)
    assert ended.status == [1, 1] and text.count("ZeroDivisionError: a bug") == text.count("Traceback") == 1, text
    check_log(ended, 3, "ZeroDivisionError: a bug")


def test_ranks_with_different_flags(launcher, tmp_path):
    ended = launcher.start(tmp_path / "job", world=2, extra={1: ["--adam_lr=0.1"]}).wait()
    assert ended.status == [2, 2]
    check_end(ended, "ConfigError", "--adam_lr", "0.008 on rank 0", "0.1 on rank 1", "same flags")
    assert not ended.run_dir.exists(), "nothing was begun"


def test_ranks_with_different_data(launcher, tmp_path):
    """Same names, same sizes, one byte of difference."""
    patterns = [write_shards(tmp_path / f"of_{rank}" / "data") for rank in range(2)]
    odd = tmp_path / "of_1" / "data" / "train_09.bin"
    content = bytearray(odd.read_bytes())
    content[-2] ^= 1
    odd.write_bytes(content)
    folders = [tmp_path / f"of_{rank}" for rank in range(2)]
    same = "data/train_*.bin"                                                 # relative: the flags must not differ
    ended = launcher.start(tmp_path / "job", f"--train_files={same}", world=2, folders=folders).wait()
    assert ended.status == [2, 2] and all(pattern.endswith(same) for pattern in patterns)
    check_end(ended, "ConfigError", "data_sha256", "rank 1")


def test_ranks_that_miss_the_data(launcher, tmp_path):
    """A node without the shards: rank 1 says so, rank 0 ends."""
    write_shards(tmp_path / "of_0" / "data")
    (tmp_path / "of_1").mkdir()
    ended = launcher.start(tmp_path / "job", "--train_files=data/train_*.bin", world=2,
                           folders=[tmp_path / "of_0", tmp_path / "of_1"]).wait()
    assert ended.status == [1, 2]
    check_end(ended, "DataError", "no such file", "of_1")


def test_data_that_end_lose_no_line(launcher, tmp_path):
    """All ranks know it a cycle ahead; the steps whose data are there are done and logged. Documents are cut to
    max_doc_len, so 4,400 tokens are too few for the 1,984 that 8 steps ask for at least.
    """
    files = write_shards(tmp_path / "data", count=4)
    ended = launcher.start(tmp_path / "job", f"--train_files={files}", world=2).wait()
    check_end(ended, "DataEnded: training data ended", "enough for 6 steps", "--max_steps=6")
    assert ended.status == [2, 2], ended.status
    result = ended.log()[-1]
    assert (result["type"], result["steps"], result["void"]) == ("result", 6, "the data ended early")
    done = [event["step"] for event in ended.log() if "train_loss" in event]
    lines = (ended.run_dir / "log.txt").read_text()
    assert done == [int(step) for step in re.findall(r"(?m)^step:(\d+)/12 train_time", lines)] == [1, 2, 3, 4, 5, 6]


def test_a_bad_flag_in_one_rank_is_named(waiting):
    """Known before the ranks have met: rank 1 has nobody to tell but the launcher's store."""
    ended = waiting["bad flag"].wait()
    assert ended.status[1] == 2 and ended.status[0]
    check_end(ended, "ConfigError: --adam_lr", "'fast'")


def test_a_bad_flag_in_all_ranks_is_named_also_when_rank_0_is_late(launcher, tmp_path):
    """torchrun ends all ranks 0.1 s after the first has failed: rank 0 may not be there yet to speak."""
    late = {0: "nap in the start"}
    ended = launcher.start(tmp_path / "job", "--adam_lr=fast", world=2, faults=late, ends=True).wait()
    assert ended.status == [143, 2] or ended.status == [-15, 2], ended.status
    check_end(ended, "ConfigError: --adam_lr", "'fast'")


# ------ Two ranks, waiting for the timeout: started together ----------------------------------------------------------

WAITING = {                              # name -> arguments of the launcher
    "nap": dict(faults={1: "nap in forward"}),
    "nap in the exchange": dict(faults={1: "nap in the exchange"}),
    "nap in the gradients' return": dict(faults={1: "nap in the gradients' return"}),
    "nap in the fetch": dict(faults={1: "nap in the fetch"}),
    "sleep": dict(faults={1: "sleep in forward"}, ends=True),
    "sleep in the exchange": dict(faults={1: "sleep in the exchange"}, ends=True),
    "sleep in the loader": dict(faults={1: "sleep in the loader"}, ends=True),
    "no rank 1": dict(absent=(1,)),
    "no rank 1, store in rank 0": dict(absent=(1,), store="rank 0"),
    "no rank 0": dict(absent=(0,)),
    "no rank 0, store in rank 0": dict(absent=(0,), store="rank 0"),
    "bad flag": dict(extra={1: ["--adam_lr=fast"]}, ends=True),
    "silent stranger, rank 0": dict(absent=(1,), store="silent stranger"),
    "silent stranger, rank 1": dict(absent=(0,), store="silent stranger"),
    "silent launcher": dict(absent=(0,), store="silent launcher", extra={1: ["--seed=abc"]}),
    "stopped launcher": dict(faults={1: "kill with stopped launcher in forward"}, store="launcher apart"),
    "killed, then SIGTERM": dict(faults={0: "sleep in forward", 1: "kill in forward"}, ends=True),
    "SIGHUP while ranks meet": dict(absent=(1,), faults={0: "SIGHUP in joining"}),
    "nohup": dict(world=1, faults={0: "SIGHUP in forward"}, nohup=True),
}
STUCK = {                                # fault -> status, message, whether the log ends with it
    "SIGTERM when stuck in forward": (143, "ended from outside (SIGTERM)", True),
    "SIGHUP when stuck in the start": (129, "ended from outside (SIGHUP)", False),
    "Ctrl-C when stuck in warm-up": (130, "interrupted", True),
    "bug and stuck end in forward": (1, "ZeroDivisionError: a bug", False),
    "bug and full pipe in forward": (1, "", True),
}
WAITING |= {fault: dict(world=1, faults={0: fault}) for fault in STUCK}


@pytest.fixture(scope="module", autouse=True)
def waiting(launcher, tmp_path_factory):
    """All the jobs of WAITING, running from the first test on: they wait while other tests work."""
    folder = tmp_path_factory.mktemp("waiting")
    return {name: launcher.start(folder / name.replace(" ", "_"), **dict(world=2) | how)
            for name, how in WAITING.items()}


def test_a_rank_that_sleeps_past_the_timeout(waiting):
    """It wakes after 1.5 timeouts, finds the others gone and says nothing more."""
    ended = waiting["nap"].wait()
    assert ended.status == [1, 1]
    check_end(ended, *LOST)
    assert ended.err[1] == ""
    check_log(ended, 3, *LOST)


@pytest.mark.parametrize("name", [name for name in WAITING if name.startswith("nap in")])
def test_a_rank_that_lags_while_rows_or_plans_travel(waiting, name):
    """In its loader thread the rank itself may be the first to miss the plans."""
    ended = waiting[name].wait()
    assert ended.status == [1, 1]
    check_end(ended)
    text = "".join(ended.err)
    assert LOST[0] in text or "exchange" in name and "RunError: waiting for the loader thread" in text, text
    check_log(ended, 2, "RunError")


@pytest.mark.parametrize("name", ["sleep", "sleep in the exchange",
                                  pytest.param("sleep in the loader", marks=pytest.mark.all)])
def test_a_rank_that_sleeps_for_ever_is_ended_by_the_launcher(waiting, name):
    ended = waiting[name].wait()
    check_end(ended)
    check_log(ended, 3)
    assert set(ended.status) <= {1, 143}


@pytest.mark.parametrize("name", [name for name in WAITING if name.startswith("no rank")])
def test_a_rank_that_never_arrives(waiting, name):
    ended = waiting[name].wait()
    absent, present = (1, 0) if name.startswith("no rank 1") else (0, 1)
    ended.status.pop(absent), ended.seconds.pop(absent)
    check_end(ended, "ConfigError: waiting for all ranks", f"2 ranks in {TIMEOUT}")
    assert ended.status == [2] and ended.err[absent] == "" and present in (0, 1)


@pytest.mark.parametrize("name, rank, cause", [
    ("silent stranger, rank 0", 0, ("ConfigError: waiting for all ranks", "at 127.0.0.1:", "in use", "MASTER_PORT")),
    ("silent stranger, rank 1", 1, ("ConfigError: waiting for all ranks", "at 127.0.0.1:", "nothing that answers")),
    ("silent launcher", 1, ("ConfigError: --seed", "'abc'")),
])
def test_what_listens_and_says_nothing_holds_no_end_up(waiting, name, rank, cause):
    """Where the store should be: a stranger's program, or a launcher that is stopped."""
    ended = waiting[name].wait()
    assert ended.status[rank] == 2 and ended.seconds[rank] < TIMEOUT + SLACK, ended
    assert all(part in ended.err[rank] for part in cause) and len(NAMED.findall(ended.err[rank])) == 1, ended.err


def test_a_killed_rank_under_a_stopped_launcher(waiting):
    ended = waiting["stopped launcher"].wait()
    assert ended.status == [1, KILLED] and max(ended.seconds) < TIMEOUT + SLACK, ended
    check_end(ended, *LOST)
    check_log(ended, 3, LOST[0])


def test_a_killed_rank_is_the_cause_also_when_the_launcher_ends_the_others(waiting):
    """The other rank sleeps and does not notice by itself; or it does, if it was not yet asleep."""
    ended = waiting["killed, then SIGTERM"].wait()
    assert ended.status in ([143, KILLED], [1, KILLED]), ended
    check_end(ended, *LOST)
    check_log(ended, 2, LOST[0])


def test_a_dropped_connection_ends_a_run_at_once_unless_it_is_ignored(waiting):
    ended = waiting["SIGHUP while ranks meet"].wait()
    assert ended.status[0] == 129 and ended.seconds[0] < SLACK and not ended.run_dir.exists(), ended
    assert "ended from outside (SIGHUP)" in ended.err[0] and ended.err[0].startswith(LOST[0]), "rank 1 did not hear it"
    ended = waiting["nohup"].wait()
    assert ended.status == [0] and ended.err == [""] and ended.log()[-1]["type"] == "result", ended


@pytest.mark.parametrize("fault", STUCK)
def test_a_main_thread_that_hears_nothing_does_not_hold_the_end_up(waiting, fault):
    """In C no handler of Python's is called, a library may lose the exception, and the end may meet a dead disk."""
    status, message, logged = STUCK[fault]
    ended = waiting[fault].wait()
    assert ended.status == [status] and ended.seconds[0] < 6 + SLACK, ended
    if message:
        assert ended.err[0].rstrip().splitlines()[-1] == message and ended.err[0].count(message) == 1
    if logged:
        check_log(ended, 0 if "warm-up" in fault else 2, message or "a bug")


@pytest.mark.parametrize("changes, parts", [
    (dict(WORLD_SIZE="2"), ("['RANK', 'MASTER_ADDR', 'MASTER_PORT']", "torchrun --standalone --nproc_per_node=2")),
    (dict(WORLD_SIZE="two"), ("'two'", "unset WORLD_SIZE")), (dict(RANK="2", WORLD_SIZE="2"), ("0 <= RANK",)),
    (dict(SLURM_NTASKS="2"), ("2 tasks of Slurm", "srun ... torchrun", "WORLD_SIZE=1"))])
def test_half_a_launch_is_explained(monkeypatch, changes, parts):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, text in changes.items():
        monkeypatch.setenv(name, text)
    refused(tg.ConfigError, lambda: tg.make_fabric(tg.Config(device="cpu")), "launch", *parts)


# ------ One process ---------------------------------------------------------------------------------------------------

ALONE = {                                # fault -> status, steps that the log must hold, message, cause in the log
    "Ctrl-C in set-up": (130, 0, ("interrupted",), "interrupted"),
    "Ctrl-C in warm-up": (130, 0, ("interrupted",), "interrupted"),
    "Ctrl-C in forward": (130, 3, ("interrupted",), "interrupted"),
    "Ctrl-C in the loader": (130, 3, ("interrupted",), "interrupted"),
    "Ctrl-C in validation": (130, 8, ("interrupted",), "interrupted"),
    "SIGTERM in forward": (143, 3, ("SIGTERM",), "SIGTERM"),
    "out of memory in forward": (1, 3, ("RunError: out of memory", "2.00 GiB", "--slots_per_micro_batch=1",
                                        "--num_slots"), "out of memory"),
    "out of host memory in forward": (1, 3, ("RunError: out of memory", "--slots_per_micro_batch=1"), "out of memory"),
    "NaN in forward": (1, 3, ("RunError: training loss of step 3", "nan", "finite", "last good validation"), "nan"),
    "cut shards in forward": (2, 3, ("DataError: ", "train_", "1100"), "train_"),
    "removed shards in forward": (2, 3, ("DataError: ", "train_", "No such file"), "train_"),
    "bad data in the loader": (2, 3, ("DataError: shard 7",), "shard 7"),
}


@pytest.mark.parametrize("fault", some(ALONE, always=[name for name in ALONE if name not in (
    "Ctrl-C in set-up", "Ctrl-C in the loader", "Ctrl-C in validation", "bad data in the loader")]))
def test_a_fault_in_one_process(launcher, tmp_path, fault):
    status, steps, parts, cause = ALONE[fault]
    ended = launcher.start(tmp_path / "job", *with_files(fault, tmp_path / "job"), faults={0: fault}).wait()
    assert ended.status == [status], ended.err
    check_end(ended, *parts)
    if "set-up" in fault:
        assert not ended.run_dir.exists(), "nothing was begun"
    else:
        check_log(ended, steps, cause)


def test_a_full_disk(launcher, tmp_path):
    """The last line has no room in log.jsonl; what is there stays readable, but for a cut line; log.txt has it."""
    ended = launcher.start(tmp_path / "job", faults={0: "full disk in forward"}).wait()
    assert ended.status == [1]
    check_end(ended, "RunError: writing ", "log.jsonl", "room")
    *whole, cut = (ended.run_dir / "log.jsonl").read_text().split("\n")
    assert cut and [json.loads(line)["type"] for line in whole][-1] in ("phase", "step", "comms")
    assert (ended.run_dir / "log.txt").read_text().splitlines()[-1].startswith("aborted after step ")


def test_a_signal_that_comes_when_the_end_has_begun_hides_nothing(launcher, tmp_path):
    ended = launcher.start(tmp_path / "job", faults={0: "bug and late SIGTERM in forward"}).wait()
    assert ended.status == [1] and "ended from outside" not in ended.err[0], ended
    assert ended.err[0].count("ZeroDivisionError: a bug") == 1
    check_log(ended, 3, "ZeroDivisionError: a bug")


def test_an_interrupted_sample_leaves_the_result(launcher, tmp_path):
    ended = launcher.start(tmp_path / "job", faults={0: "Ctrl-C in the sample"}).wait()
    assert ended.status == [130] and ended.log()[-1]["type"] == "result"
    check_end(ended, "interrupted")


def test_nothing_goes_wrong_without_a_fault(launcher, tmp_path):
    """The launcher itself is no fault; and warnings of libraries do not reach the console."""
    ended = launcher.start(tmp_path / "job", world=2).wait()
    assert ended.status == [0, 0] and ended.err == ["", ""], ended.err
    assert ended.log()[-1]["type"] == "result" and ended.out[1] == "" and '"result"' in ended.out[0].splitlines()[-1]


# ------ The real launcher, and loops ----------------------------------------------------------------------------------

RANK = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
import faults, train_gpt as tg
folder, rank, fault = Path(sys.argv[3]), sys.argv[4], sys.argv[5]
if os.environ["RANK"] == rank:
    act, place = fault.split(" in ")
    faults.PLACES[place](tg, faults.once(folder, lambda: faults.ACTS[act](tg, folder)))
sys.argv[1:] = sys.argv[6:]
exec(faults.last_lines(Path(tg.__file__).read_text()), vars(tg))
"""


def torchrun(folder, fault: str) -> tuple[int, str]:
    (folder / "rank.py").write_text(RANK)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
            str(folder / "rank.py"), str(ROOT / "tests"), str(ROOT), str(folder), "1", fault, *FLAGS,
            f"--run_dir={folder / 'run'}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=4 * BOUND)
    return done.returncode, done.stderr


TORCHRUN = {
    "kill in forward": LOST, "kill in warm-up": LOST, "sleep in forward": LOST,
    "bad data in the loader": ("DataError: shard 7",),
}


@pytest.mark.parametrize("fault", some(TORCHRUN, always=("kill in forward",)))
def test_under_torchrun(tmp_path, fault):
    """torchrun adds a trace and a summary of its own; the ranks still name the cause once.

    It looks every 0.1 s: if it sees a killed rank before the others do, they are ended from outside; the cause is the
    killed rank all the same.
    """
    status, err = torchrun(tmp_path, fault)
    assert status and len(NAMED.findall(err)) == 1, err
    assert all(part in err for part in TORCHRUN[fault]), err
    assert err.count("Traceback") == err.count("raise ChildFailedError(") == 1, "of torchrun itself"
    check_log(Ended([], [], [], [], tmp_path), 0 if "warm-up" in fault else 3)


TIMES = 9                                # of each fault
TOGETHER = 3


@pytest.mark.all
@pytest.mark.parametrize("fault", [*ONE_RANK, "nap in forward"])
def test_again_and_again(launcher, tmp_path, fault, capsys):
    """Some at a time, so that they meet in different orders on a busy machine."""
    slowest, done = 0.0, 0
    files = with_files(fault, tmp_path)
    for first in range(0, TIMES, TOGETHER):
        folders = [tmp_path / f"job_{number}" for number in range(first, first + TOGETHER)]
        for job in [launcher.start(folder, *files, world=2, faults={1: fault}) for folder in folders]:
            ended = job.wait()
            if fault in ONE_RANK:
                check_one_rank(fault, ended)
            else:
                check_end(ended, *LOST)
            slowest, done = max(slowest, *ended.seconds), done + 1
            shutil.rmtree(ended.folder)
    with capsys.disabled():
        print(f" {fault}: {done} times, the last rank ended {slowest:.2f} s after the fault")
