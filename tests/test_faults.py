"""Real processes in which something goes wrong: all end, the first cause is named once, and the log can be read.

Faults come from tests/faults.py; nothing in the trainer knows of them. The time to the end is enforced only as a bound
far beyond the issue's "twice the timeout", for a busy machine; the 50-fold loops (`--all`) print the largest one seen.
"""
import re
import shutil
import subprocess
import sys
import time

import pytest
from faults import BOUND, FLAGS, ROOT, TIMEOUT, Ended, Launcher

import train_gpt as tg

LIMIT = 2 * TIMEOUT + 30                 # s from the fault to the end of the last rank; 30 s for a busy machine
NAMED = re.compile(r"(?m)^(?:(?:ConfigError|DataError|FabricError|RunError): |interrupted$|ended from outside)")
KILLED = -9


@pytest.fixture(scope="module")
def launcher():
    server = Launcher()
    yield server
    server.close()


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

LOST = ("RunError: lost another rank",)
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
    "another cycle in the loader": (2, 2, ("FabricError: row plans of ranks", "'cycle': ", "same flags")),
    "another split in the loader": (2, 2, ("FabricError: row plans of ranks", "'cycle': ", "same flags")),
    "other tokens in the loader": (2, 2, ("FabricError: row plans of ranks", "'tokens': ", "same flags")),
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
def test_one_of_four_ranks_killed_is_named_by_one_survivor(launcher, tmp_path, place):
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
    check_end(ended, "FabricError", "--adam_lr", "0.008 on rank 0", "0.1 on rank 1", "same flags")
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
    check_end(ended, "FabricError", "data_sha256", "rank 1")


def test_ranks_that_miss_the_data(launcher, tmp_path):
    """A node without the shards: rank 1 says so, rank 0 ends."""
    write_shards(tmp_path / "of_0" / "data")
    (tmp_path / "of_1").mkdir()
    ended = launcher.start(tmp_path / "job", "--train_files=data/train_*.bin", world=2,
                           folders=[tmp_path / "of_0", tmp_path / "of_1"]).wait()
    assert ended.status == [1, 2]
    check_end(ended, "DataError", "no file matches", "of_1")


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
}


@pytest.fixture(scope="module", autouse=True)
def waiting(launcher, tmp_path_factory):
    """All the jobs of WAITING, running from the first test on: they wait while other tests work."""
    folder = tmp_path_factory.mktemp("waiting")
    return {name: launcher.start(folder / name.replace(" ", "_"), world=2, **how) for name, how in WAITING.items()}


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
    check_end(ended, "FabricError: waiting for all ranks", f"2 ranks in {TIMEOUT}")
    assert ended.status == [2] and ended.err[absent] == "" and present in (0, 1)


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
    "full disk in forward": (1, 3, ("RunError: writing ", "log.jsonl", "room"), "log.jsonl"),
    "cut shards in forward": (2, 3, ("DataError: ", "train_", "cut while in use", "1100"), "cut while in use"),
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
    check_log(ended, steps, cause)


def test_a_disk_that_stays_full(launcher, tmp_path):
    """No line fits any more, not even the last: what is there stays readable, and log.txt, which is shorter, has it."""
    ended = launcher.start(tmp_path / "job", faults={0: "full quota in forward"}).wait()
    assert ended.status == [1] and ended.log()[-1]["type"] in ("phase", "step")
    check_end(ended, "RunError: writing ", "log.jsonl", "room")
    assert (ended.run_dir / "log.txt").read_text().splitlines()[-1].startswith("aborted after step ")


def test_a_removed_run_directory(launcher, tmp_path):
    ended = launcher.start(tmp_path / "job", faults={0: "removed run_dir in forward"}).wait()
    assert ended.status == [1]
    check_end(ended, "RunError: writing ", "deleted")
    assert "whole" not in ended.err[0], "the log is gone, and the message must not say otherwise"


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


TORCHRUN = {"kill in forward": LOST, "bad data in the loader": ("DataError: shard 7",), "sleep in forward": LOST}


@pytest.mark.parametrize("fault", some(TORCHRUN, always=("kill in forward",)))
def test_under_torchrun(tmp_path, fault):
    """torchrun adds a trace and a summary of its own; the ranks still name the cause once.

    It looks every 0.1 s: if it sees a killed rank before the others do, they are ended from outside, and it names it.
    """
    status, err = torchrun(tmp_path, fault)
    assert status and len(NAMED.findall(err)) == 1, err
    assert all(part in err for part in TORCHRUN[fault]) or "ended from outside" in err and "SIGKILL" in err, err
    assert err.count("Traceback") == err.count("raise ChildFailedError(") == 1, "of torchrun itself"
    check_log(Ended([], [], [], [], tmp_path), 3)


@pytest.mark.all
@pytest.mark.parametrize("fault", [*ONE_RANK, "nap in forward"])
def test_fifty_times(launcher, tmp_path, fault, capsys):
    """Three at a time, so that they meet in different orders on a busy machine."""
    slowest, done = 0.0, 0
    files = with_files(fault, tmp_path)
    for first in range(0, 50, 3):
        folders = [tmp_path / f"job_{number}" for number in range(first, min(50, first + 3))]
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
