"""--runs, --checkpoint_every, --resume, --time_budget, --profile: whole runs, compared bit by bit with plain ones."""
from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from common import ROOT, Run, losses, run, run_apart, weights

import train_gpt as tg

sys.path.insert(0, str(ROOT / "records"))
from tools import read

TIMES = {"ms", "plan_ms", "train_time_ms", "run_dir", "peak_memory_mib", "source"}
TINY = ("--preset=tiny", "--adam_every=2")                    # of a process that has not read conftest.py


def timeless(x):
    """Without what a clock, the memory or the folder's name decides."""
    if isinstance(x, dict):
        return {key: timeless(value) for key, value in x.items() if key not in TIMES}
    return [timeless(value) for value in x] if isinstance(x, list) else x


def launch(ranks: int, folder: Path, *flags: str) -> None:
    """A run of its own processes, preset tiny. Its output is shown if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*(command if ranks > 1 else [sys.executable]), str(ROOT / "train_gpt.py"), *TINY]
    done = subprocess.run([*command, f"--run_dir={folder}", "--sample_tokens=0", *flags], text=True, timeout=120,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- several runs ---------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Run:
    return run(tmp_path_factory.mktemp("three"), "--runs=3", "--seed=4", "--sample_tokens=0", "--target_loss=6.1")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """The last of the three runs, in a process of its own."""
    folder = tmp_path_factory.mktemp("plain")
    launch(1, folder / "run", "--seed=6", f"--save={folder / 'save'}")
    return folder / "run"


def test_each_of_several_runs_equals_a_run_in_a_fresh_process(three, plain):
    one, alone = three.folder / "seed_6", Run(plain, 0, "", "")
    assert losses(one) == losses(plain)
    kinds = ("step", "val", "comms", "result")
    assert timeless([e for e in Run(one, 0, "", "").events if e["type"] in kinds]) == timeless(
        [e for e in alone.events if e["type"] in kinds])
    assert losses(three.folder / "seed_4") != losses(three.folder / "seed_5")


def test_logs_of_later_runs_are_looked_for_at_the_start(tmp_path):
    (tmp_path / "seed_1").mkdir()
    (tmp_path / "seed_1/log.txt").write_text("old\n")
    done = run(tmp_path, "--runs=2")
    assert done.status == 1 and "the log of a run" in done.err and not (tmp_path / "seed_0").exists()


def test_every_run_has_a_whole_log(three):
    for seed in (4, 5, 6):
        log = Run(three.folder / f"seed_{seed}", 0, "", "")
        assert (log.of("header")[0]["seed"], log.of("header")[0]["changed"]["seed"]) == (seed, str(seed))
        phases = [e["name"] for e in log.of("phase") if not e["name"].startswith("warm-up of")]
        before = ["set-up", "validation data", "warm-up"] if seed == 4 else ["reset"]
        assert phases == [*before, "first batch"]
        assert log.events[-1]["type"] == "result" and (log.folder / "train_gpt.py").exists()


def test_the_summary_is_the_last_line(three):
    last = json.loads(three.out.splitlines()[-1])
    values = [Run(three.folder / f"seed_{seed}", 0, "", "").of("result")[0]["val_loss"] for seed in (4, 5, 6)]
    assert (last["type"], last["n"], [one["val_loss"] for one in last["runs"]]) == ("summary", 3, values)
    assert last["mean"] == pytest.approx(np.mean(values)) and last["sd"] == pytest.approx(np.std(values, ddof=1))
    assert last["target_loss"] == 6.1 and three.out.splitlines()[-2].startswith("3 runs: validation loss ")


# ---- checkpoints ----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def cut(tmp_path_factory) -> Path:
    """A run of 9 steps of 12, with checkpoints at 2, 4, 6 and 8, of which the last two remain."""
    folder = tmp_path_factory.mktemp("cut") / "run"
    done = run(folder, "--seed=6", "--max_steps=9", "--checkpoint_every=2", "--sample_tokens=0")
    assert done.status == 0, done.err
    assert [path.name for path in sorted((folder / tg.CHECKPOINTS).iterdir())] == ["step-0000006", "step-0000008"]
    return folder


def resume(cut: Path, folder: Path, *flags: str) -> Run:
    return run(folder, f"--resume={cut}", "--max_steps=0", *flags)


def test_a_resumed_run_equals_an_uninterrupted_one(cut, plain, tmp_path):
    done = resume(cut, tmp_path / "run", f"--save={tmp_path / 'save'}")
    assert done.status == 0, done.err
    assert losses(done.folder) == losses(plain) and weights(tmp_path / "save") == weights(plain.parent / "save")
    assert timeless(done.of("result")[0]) == timeless(Run(plain, 0, "", "").of("result")[0]) | dict(
        comms=done.of("result")[0]["comms"])
    assert [(e["step"], e["source"], e["seed"]) for e in done.of("resumed")] == [(8, str(cut), 6)]
    assert done.events[0] == Run(cut, 0, "", "").events[0] and done.lines[0] == "=" * 100


def test_the_clock_goes_on(cut, tmp_path):
    before = [e for e in Run(cut, 0, "", "").of("step") if e["step"] <= 8]
    times = [e["train_time_ms"] for e in resume(cut, tmp_path / "run").of("step")]
    assert times[:8] == [e["train_time_ms"] for e in before] and times == sorted(times)


def test_a_resumed_run_may_be_cut_and_resumed_again(cut, plain, tmp_path):
    assert run(tmp_path / "a", f"--resume={cut}", "--max_steps=11", "--checkpoint_every=3").status == 0
    again = resume(tmp_path / "a", tmp_path / "b")
    assert again.status == 0 and losses(again.folder) == losses(plain)
    assert [e["step"] for e in again.of("resumed")] == [8, 10], "each with the lines up to its checkpoint"
    assert again.of("resumed")[1]["changed"]["checkpoint_every"] == "3", "flags are those of the run before"


def test_checkpoints_are_off_the_clock(tmp_path, monkeypatch):
    save, slow = tg.write_checkpoint, 0.7
    monkeypatch.setattr(tg, "write_checkpoint", lambda *rest: (time.sleep(slow), save(*rest)))
    done = run(tmp_path / "run", "--checkpoint_every=10", "--sample_tokens=0")
    phase, = [e for e in done.of("phase") if e["name"] == "checkpoint"]
    steps = {e["step"]: e["train_time_ms"] for e in done.of("step")}
    assert phase["ms"] > 1000 * slow and not phase["timed"] and steps[11] - steps[10] < 1000 * slow


@pytest.mark.parametrize("signal_of, status, cause", [(signal.SIGINT, 130, "interrupted"),
                                                      (signal.SIGTERM, 143, "SIGTERM")])
def test_a_signal_while_a_checkpoint_is_written_ends_as_a_signal_does(tmp_path, monkeypatch, signal_of, status, cause):
    """The main thread is in the middle of torch.save; what it has written has no name yet."""
    save = torch.save

    def interrupted(content, file):
        os.kill(os.getpid(), signal_of)
        time.sleep(20)
        save(content, file)

    monkeypatch.setattr(torch, "save", interrupted)
    old = signal.signal(signal.SIGINT, signal.default_int_handler)            # a shell may have started this deaf to it
    done = run_apart(tmp_path / "run", "--checkpoint_every=4", "--sample_tokens=0")
    signal.signal(signal.SIGINT, old)
    assert done.status == status and cause in done.of("aborted")[0]["cause"]
    assert not list((tmp_path / "run" / tg.CHECKPOINTS).glob("step-???????"))


@pytest.mark.all
def test_the_second_of_several_runs_of_two_ranks_equals_a_fresh_one(tmp_path):
    launch(2, tmp_path / "runs", "--seed=5", "--runs=2")
    launch(2, tmp_path / "alone", "--seed=6")
    assert losses(tmp_path / "runs" / "seed_6") == losses(tmp_path / "alone")


def kill_and_resume(folder: Path, rng: random.Random, plain: Path, most: int) -> int:
    """Kill a run up to `most` times at random moments and resume it until it ends. Returns how often it was killed."""
    command = [sys.executable, str(ROOT / "train_gpt.py"), "--checkpoint_every=2", "--sample_tokens=0"]
    kills, source, number = 0, [*TINY, "--seed=6"], 0
    while True:
        number += 1
        here = folder / f"{number}"
        child = subprocess.Popen([*command, *source, f"--run_dir={here}"], stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + (rng.uniform(1.8, 3.2) if number <= most else 120)
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
            kills += 1
        if child.wait() == 0:
            assert losses(here) == losses(plain)
            return kills
        if any((here / tg.CHECKPOINTS).glob("step-???????")):
            source = [f"--resume={here}"]


@pytest.mark.parametrize("seed, most", [(0, 1), *(pytest.param(seed, 8, marks=pytest.mark.all)
                                                  for seed in range(1, 7))])
def test_a_run_killed_at_random_moments_ends_with_the_same_losses(plain, tmp_path, seed, most):
    kills = kill_and_resume(tmp_path, random.Random(seed), plain, most)
    print(f" killed {kills} times")


# ---- time budget ----------------------------------------------------------------------------------------------------

BUDGET = ("--time_budget=4", "--num_scheduled_steps=90", "--epochs=0", "--checkpoint_every=8", "--sample_tokens=0")


def check_budget(folder: Path, ranks: int) -> Run:
    """The run has kept its budget of 4 s but for a cycle, has gone through its whole plan, and says all of it."""
    log = Run(folder, 0, "", "")
    result, steps = log.of("result")[0], log.of("step")
    times = [0.0, *(e["train_time_ms"] for e in steps)]
    longest = max(later - before for before, later in zip(times, times[4:]))  # two cycles, of a busy machine
    assert abs(result["train_time_ms"] - 4000) <= longest + 1 and result["budget_s"] == 4
    assert log.of("header")[0]["world_size"] == ranks and len(steps) == result["steps"]
    assert log.of("budget") == [dict(type="budget", seconds=4.0, steps=result["steps"])]

    places = [e["place"] for e in steps]
    assert places == sorted(places) and places[0] < 10 and places[-1] <= 93 == 90 + 3
    assert {e["tokens"] - before["tokens"] for before, e in zip(steps, steps[1:])} == {128, 256, 384}, "every stage"
    assert log.lines[-4].startswith(f"step:{result['steps']}/{result['steps']} val_loss:")
    assert f"time budget 4 s: used {result['train_time_ms'] / 40:.2f} %" in log.lines
    told, = read.read_runs([folder / "log.jsonl"]).runs
    assert told.finished and told.total == result["steps"] and told.loss == result["val_loss"] and not told.notes
    return log


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.all)])
def test_a_run_keeps_its_time_budget_and_is_resumed_at_its_place(tmp_path, ranks):
    """By real clocks. Up to its last checkpoint the resumed run has the same steps; then it goes on from the place."""
    launch(ranks, tmp_path / "whole", *BUDGET)
    whole = check_budget(tmp_path / "whole", ranks)
    last = sorted((tmp_path / "whole" / tg.CHECKPOINTS).iterdir())[-1]
    launch(ranks, tmp_path / "again", f"--resume={tmp_path / 'whole'}")
    log = Run(tmp_path / "again", 0, "", "")
    first = int(last.name.removeprefix("step-"))
    assert [e["step"] for e in log.of("resumed")] == [first] and first > 8
    assert log.of("step")[:first] == whole.of("step")[:first]
    places = [e["place"] for e in log.of("step")]
    assert places == sorted(places) and places[first] == [e["place"] for e in whole.of("step")][first]
    assert log.of("result")[0]["steps"] == log.of("budget")[-1]["steps"] == len(places)


# ---- profile --------------------------------------------------------------------------------------------------------

@pytest.mark.all
def test_profile_of_two_ranks(tmp_path):
    launch(2, tmp_path / "run", "--profile=6:9")
    log = Run(tmp_path / "run", 0, "", "")
    assert log.of("result")[0]["void"] == "profiled" and "(void: profiled)" in log.lines[-2]
    assert any("Self CPU time total" in line for line in log.lines), "the table"
    for rank in (0, 1):
        trace = json.loads(gzip.open(tmp_path / f"run/trace_rank{rank}.json.gz").read())
        names = {event.get("name", "") for event in trace["traceEvents"]}
        assert len([name for name in names if name.startswith("ProfilerStep")]) == 3
        assert {"gloo:all_reduce", "aten::mm"} <= names


@pytest.mark.parametrize("flag, says", [("4", "a:b"), ("4:x", "a:b"), ("8:8", "a < b"),
                                        ("0:4", "0 < a < b"), ("9:12", "0 < a < b < 12"), ("5:500", "--profile=1:3")])
def test_a_profile_of_steps_that_are_not_there_is_refused(tmp_path, monkeypatch, flag, says):
    """Before the warm-up, and before there is a run directory; the range that the message proposes is possible."""
    monkeypatch.setattr(tg, "warm_up", None)
    done = run(tmp_path / "run", f"--profile={flag}")
    assert done.status == 2 and "--profile" in done.err and says in done.err and len(done.err) < 600
    assert not (tmp_path / "run").exists()


# ---- facts of an entry ----------------------------------------------------------------------------------------------

def test_the_header_says_what_an_entry_is(plain):
    header, = Run(plain, 0, "", "").of("header")
    rows = dict(bigram_embed=2560, value_embed=2560, embed=512)
    parameters = sum(x.numel() for x in torch.load(plain.parent / "save" / "weights.pt").values())
    assert header["table_rows"] == rows and header["table_bytes"] == 4 * 32 * sum(rows.values())
    assert header["params_total"] == parameters == 328_122
    assert header["params_per_token"] == parameters - 32 * (sum(rows.values()) - 1 - 5 - 1)
    assert header["untimed_warmup_steps"] == 12 and header["target_loss"] == 0
