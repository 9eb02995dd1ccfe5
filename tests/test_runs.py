"""--runs, --checkpoint_every, --resume, --time_budget, --profile: whole runs, compared bit by bit with plain ones."""
from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from common import ROOT, Run, fabric, losses, preset, refused, run, weights
from scipy import stats

import train_gpt as tg
from test_executor import bits, filled, random_batch, small

TIMES = {"ms", "plan_ms", "train_time_ms", "run_dir", "peak_memory_mib", "source"}


def timeless(x):
    """Without what a clock, the memory or the folder's name decides."""
    if isinstance(x, dict):
        return {key: timeless(value) for key, value in x.items() if key not in TIMES}
    return [timeless(value) for value in x] if isinstance(x, list) else x


def launch(ranks: int, folder: Path, *flags: str) -> None:
    """A run of its own processes, preset tiny. Its output is shown if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*(command if ranks > 1 else [sys.executable]), str(ROOT / "train_gpt.py"), "--preset=tiny"]
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
    launch(1, folder, "--seed=6", f"--save={folder}")
    return folder


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
    assert done.status == 1 and "File exists" in done.err and not (tmp_path / "seed_0").exists()


def test_every_run_has_a_whole_log(three):
    for seed in (4, 5, 6):
        log = Run(three.folder / f"seed_{seed}", 0, "", "")
        assert (log.of("header")[0]["seed"], log.of("header")[0]["changed"]["seed"]) == (seed, str(seed))
        assert [e["name"] for e in log.of("phase")] == (["set-up", "validation data", "warm-up", "first batch"] if
                                                        seed == 4 else ["reset", "first batch"])
        assert log.events[-1]["type"] == "result" and (log.folder / "train_gpt.py").exists()


def test_the_summary_is_the_last_line(three):
    last = json.loads(three.out.splitlines()[-1])
    values = [Run(three.folder / f"seed_{seed}", 0, "", "").of("result")[0]["val_loss"] for seed in (4, 5, 6)]
    assert (last["type"], last["n"], [one["val_loss"] for one in last["runs"]]) == ("summary", 3, values)
    t = (np.mean(values) - 6.1) / (np.std(values, ddof=1) / 3**0.5)
    assert last["mean"] == pytest.approx(np.mean(values)) and last["sd"] == pytest.approx(np.std(values, ddof=1))
    assert last["p"] == pytest.approx(0.5 + t / (2 * (2 + t * t)**0.5)), "Student, two degrees, by hand"
    text = three.out.splitlines()[-3:-1]
    assert text[0].startswith("3 runs: validation loss ") and f"below 6.1: {last['p']:.3g}" in text[1]


@pytest.mark.parametrize("target, scipy, says", [("0", True, "no --target_loss"), ("6.1", False, "pip install scipy")])
def test_the_summary_says_what_a_p_needs(tmp_path, monkeypatch, target, scipy, says):
    find = tg.importlib.util.find_spec
    monkeypatch.setattr(tg.importlib.util, "find_spec", lambda name: find(name) if scipy or name != "scipy" else None)
    done = run(tmp_path, "--runs=2", "--max_steps=2", "--sample_tokens=0", f"--target_loss={target}")
    assert done.status == 0 and says in done.out and json.loads(done.out.splitlines()[-1])["p"] is None


# What a run leaves behind (systems 1.5), and how a reset that forgets it would look.
def forget_tensors(pattern: str):
    def forget(ex, stale, monkeypatch):
        every = tg.Executor.state_tensors
        monkeypatch.setattr(tg.Executor, "state_tensors", lambda self: {
            name: x for name, x in every(self).items() if not re.fullmatch(pattern, name)})
    return forget


def forget_attribute(owner, name: str):
    def forget(ex, stale, monkeypatch):
        monkeypatch.setattr(tg.Executor, "drop_gradients", lambda self, real=tg.Executor.drop_gradients: (
            real(self), setattr(owner(self), name, stale[name])))
    return forget


def forget_call(name: str):
    return lambda ex, stale, monkeypatch: monkeypatch.setattr(*(
        (tg.TableRows, "reset", lambda self: None) if name == "tables" else
        (tg.Optimizer, "clear", lambda self, labels: None) if name == "gradients" else
        (torch, "set_rng_state", lambda state: None)))


FORGOTTEN = {name: forget_tensors(name.replace(".", r"\.").replace("*", ".*")) for name in (
    "attn", "mlp", "scalars", "x0_lambdas", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank", "bigram_embed",
    "value_embed", "lm_head", "embed", "rotary_*", "*.m", "*.v", "*.momentum", "*.second", "*.mantissa")}
FORGOTTEN |= dict(adam_steps=forget_attribute(lambda ex: ex.optimizer, "adam_steps"),
                  rotary=forget_attribute(lambda ex: ex, "rotary"))
FORGOTTEN |= {name: forget_call(name) for name in ("tables", "gradients", "random numbers")}


def everything(ex: tg.Executor) -> dict:
    """All that a run may leave behind, by walking the objects."""
    tables = {f"{label}.{name}": getattr(table, name).detach().numpy().tobytes()
              for label, table in ex.tables.items() for name in ("sums", "grad")}
    open_plans = {f"{label}.open": (len(table.open_plans), table.cached is None, dict(table.totals))
                  for label, table in ex.tables.items()}
    owned = {f"{label}.writes": (ex.optimizer.weights[label].writes.tolist(), passes)
             for label, passes in ex.optimizer.passes.items()}
    kept = {f"grad of {k}": p.grad is None for k, p in ex.model.named_parameters()}
    return bits(ex) | tables | open_plans | owned | kept


OFTEN_FORGOTTEN = {                      # one of each kind; the others with --all
    "attn", "bigram_embed", "rotary_*", "*.m", "*.mantissa", "adam_steps", "rotary", "tables", "gradients",
    "random numbers"}
FORGETTING = [pytest.param(x, marks=() if x in OFTEN_FORGOTTEN else pytest.mark.all) for x in FORGOTTEN]


@pytest.mark.parametrize("name", [None, *FORGETTING])
def test_a_reset_that_forgets_one_thing_is_seen(name, monkeypatch):
    cfg = small(split_stage=0, dtype="bfloat16" if name == "*.mantissa" else "float32", adam_lr=0.5)
    ex, _ = filled(cfg)
    schedule, pristine = tg.Schedule(cfg), ex.snapshot()
    before = everything(ex)
    for step in range(5):                    # the last step leaves half a cycle of gradients
        ex.forward_backward(random_batch(cfg, step, 8, 16), schedule.at(step))
        ex.optim_step(schedule.at(step))
    torch.rand(1)
    stale = dict(adam_steps=ex.optimizer.adam_steps, rotary=ex.rotary)
    if name:
        FORGOTTEN[name](ex, stale, monkeypatch)
    ex.restore(pristine)
    after = everything(ex)
    assert ({key for key in before if before[key] != after[key]} != set()) == (name is not None)


# ---- checkpoints ----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def cut(tmp_path_factory) -> Path:
    """A run of 9 steps of 12, with checkpoints at 2, 4, 6 and 8, of which the last two remain."""
    folder = tmp_path_factory.mktemp("cut") / "run"
    done = run(folder, "--seed=6", "--max_steps=9", "--checkpoint_every=2", "--sample_tokens=0")
    assert done.status == 0, done.err
    assert [path.name[:12] for path in sorted((folder / tg.CHECKPOINTS).iterdir())] == ["step-0000006", "step-0000008"]
    return folder


def resume(cut: Path, folder: Path, *flags: str) -> Run:
    return run(folder, f"--resume={cut}", "--max_steps=0", *flags)


def test_a_resumed_run_equals_an_uninterrupted_one(cut, plain, tmp_path):
    done = resume(cut, tmp_path / "run", f"--save={tmp_path}")
    assert done.status == 0, done.err
    assert losses(done.folder) == losses(plain) and weights(tmp_path) == weights(plain)
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


def test_a_run_that_is_at_its_last_shard_is_resumed(tmp_path):
    flags = ("--train_files=formula:512:511:80000:1", "--sample_tokens=0")
    whole = run(tmp_path / "whole", "--checkpoint_every=10", *flags)
    assert whole.status == 0 and losses(resume(whole.folder, tmp_path / "run").folder) == losses(whole.folder)


def test_a_run_with_a_time_budget_says_how_it_went_and_is_resumed_with_its_schedule(tmp_path, monkeypatch):
    made_up_time(monkeypatch, lambda step, stage: 50.0)
    whole = run(tmp_path / "whole", "--time_budget=0.7", "--epochs=0", "--checkpoint_every=4", "--sample_tokens=0")
    result = whole.of("result")[0]
    assert [e["steps"] for e in whole.of("budget")] == [13, 14, 14], "a step of 0.05 s was lost in rounding down"
    assert whole.status == 0 and len(whole.of("step")) == result["steps"] == 14 and result["budget_s"] == 0.7
    assert "time budget 0.7 s: used 100.00 %" in whole.lines
    assert whole.of("header")[0]["untimed_warmup_steps"] == 12 + tg.TRIAL_ROUNDS * tg.TRIAL_STEPS * 4
    again = resume(whole.folder, tmp_path / "run")
    assert again.status == 0, again.err
    assert losses(again.folder) == losses(whole.folder) and again.of("budget") == whole.of("budget")


def test_checkpoints_are_off_the_clock(tmp_path, monkeypatch):
    save, slow = tg.save_checkpoint, 0.7
    monkeypatch.setattr(tg, "save_checkpoint", lambda *rest: (time.sleep(slow), save(*rest)))
    done = run(tmp_path / "run", "--checkpoint_every=10", "--sample_tokens=0")
    phase, = [e for e in done.of("phase") if e["name"] == "checkpoint"]
    steps = {e["step"]: e["train_time_ms"] for e in done.of("step")}
    assert phase["ms"] > 1000 * slow and not phase["timed"] and steps[11] - steps[10] < 1000 * slow


@pytest.mark.parametrize("signal_of, status, cause", [(signal.SIGINT, 130, "interrupted"),
                                                      (signal.SIGTERM, 143, "SIGTERM")])
def test_a_signal_while_a_checkpoint_is_written_ends_as_a_signal_does(tmp_path, monkeypatch, signal_of, status, cause):
    """torch's writer turns whatever goes wrong below it into a RuntimeError of its own."""
    save = torch.save
    def interrupted(content, file):
        class Slow:
            writes = 0

            def write(self, data):
                self.writes += 1
                if self.writes == 2:                                          # the first, torch raises as it was
                    os.kill(os.getpid(), signal_of)
                    time.sleep(0.1)
                return file.write(data)
            flush = file.flush
        return save(content, Slow())
    monkeypatch.setattr(torch, "save", interrupted)
    old = signal.signal(signal.SIGINT, signal.default_int_handler)            # a shell may have started this deaf to it
    done = run(tmp_path / "run", "--checkpoint_every=4", "--sample_tokens=0")
    signal.signal(signal.SIGINT, old)
    assert done.status == status and cause in done.of("aborted")[0]["cause"]
    assert not list((tmp_path / "run" / tg.CHECKPOINTS).iterdir())


@pytest.mark.parametrize("damage", ["flipped", *(pytest.param(x, marks=pytest.mark.all) for x in ("cut", "empty"))])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(cut, plain, tmp_path, damage):
    folder = tmp_path / "copy"
    shutil.copytree(cut, folder)
    older, last = sorted((folder / tg.CHECKPOINTS).glob("step-*.pt"))
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1 if damage == "flipped" else 0
    last.write_bytes(content[:dict(cut=len(content) - 100, flipped=len(content), empty=0)[damage]])
    (folder / tg.CHECKPOINTS / "new.pt.part").write_bytes(b"cut while it was written")
    done = resume(folder, tmp_path / "run")
    assert done.status == 0 and losses(done.folder) == losses(plain) and [e["step"] for e in done.of("resumed")] == [6]
    assert f"{last} as a checkpoint\n  found:    damaged" in done.out
    assert not (folder / tg.CHECKPOINTS / "new.pt.part").exists(), "what a killed run left"
    older.write_bytes(b"")
    done = resume(folder, tmp_path / "no_run")
    assert done.status == 2 and f"no whole one in {folder / tg.CHECKPOINTS}" in done.err


def test_flags_of_the_run_are_kept_and_others_refused(cut, tmp_path):
    same = resume(cut, tmp_path / "same", "--num_scheduled_steps=9")
    assert same.status == 0 and same.of("resumed")[0]["preset"] == "tiny", "the preset is that of the log"
    source = f"with --resume={cut}"
    may_change = "these may change: attention, checkpoint_every, comm_timeout, compile, debug_rows, device, epochs"
    other_data = "formula:512:511:40001:2"
    for flags, parts in ((["--adam_lr=0.009"], (f"--adam_lr {source}", "0.009", "0.008, as in that run", may_change)),
                         (["--seed=7"], (f"--seed {source}", "7", "6, as in that run")),
                         (["--runs=2"], ("--runs", "one run")),
                         (["--preset=pocket"], (f"--preset {source}", "pocket", "tiny, the preset of that run")),
                         (["--max_steps=6"], (f"--max_steps {source}", "end at step 6", "8 or more", "--max_steps=0")),
                         (["--profile=10:11", "--checkpoint_every=0"], ("8 < a < b < 12", "--profile=9:10")),
                         (["--profile=9:10"], ("--profile with --checkpoint_every", "add --checkpoint_every=0")),
                         ([f"--train_files={other_data}"], (f"data to resume {cut} with", f"--train_files={other_data}",
                                                            "--train_files=formula:512:511:40000:2", "leave both"))):
        done = resume(cut, tmp_path / "refused", *flags)
        assert done.status == 2 and all(part in done.err for part in parts), done.err


def test_a_run_passes_on_all_flags_but_what_was_its_own(tmp_path):
    """Each field but those that name one run's folders, or that only a sample reads."""
    own = {"run_dir", "runs", "resume", "save", "sample", "prompt", "ranks"}
    changed = {name: tg.flag_text(value) for name, value in vars(tg.Config(**tg.PRESETS["tiny"])).items()}
    header = dict(type="header", preset="tiny", changed=changed)
    (tmp_path / "log.jsonl").write_text(json.dumps(header) + "\n")
    preset, earlier = tg.earlier_run(tmp_path)
    assert preset == "tiny" and earlier.keys() == changed.keys() - own


def test_a_resumed_run_takes_as_many_slots_at_once_as_the_machine_had_chosen(cut, tmp_path):
    """Also where another number would fit; a flag has the last word."""
    log = cut / "log.jsonl"
    header, *lines = log.read_text().splitlines()
    chosen = json.loads(header)
    assert chosen["slots_at_once"] == 8 and "slots_per_micro_batch" not in chosen["changed"]
    folder = tmp_path / "copy"
    shutil.copytree(cut, folder)
    (folder / "log.jsonl").write_text("\n".join((json.dumps(chosen | dict(slots_at_once=2)), *lines)) + "\n")
    for flags, want in (([], 2), (["--slots_per_micro_batch=4"], 4), (["--slots_per_micro_batch=0"], 8)):
        done = resume(folder, tmp_path / f"run_{want}", *flags)
        resumed, = done.of("resumed")
        assert (done.status, resumed["slots_at_once"], resumed["grad_accum_steps"]) == (0, want, 8 // want)


def test_what_is_no_run_is_no_run_to_resume(tmp_path):
    start = '{"type": "header", "preset": "tiny", "changed": '
    for text, says in (
            ("nonsense", "without a header"), ('{"type": "header"}', "KeyError"), (start + "3}", "AttributeError"),
            (start + "[" * 100_000, "RecursionError"), (start + '{"seed": "one"}}', "log.jsonl: seed"),
            (start + '{"sede": "1"}}', "'sede'"), (start + '{"seed": [1]}}', "list instead of a number"),
            (start.replace("tiny", "tyni") + "{}}", "'tyni'")):
        (tmp_path / "log.jsonl").write_text(text + "\n")
        done = run(tmp_path / "run", f"--resume={tmp_path}")
        assert done.status == 2 and says in done.err and "log.jsonl" in done.err and "Traceback" not in done.err
    done = run(tmp_path / "run", f"--resume={tmp_path / 'none'}")
    assert done.status == 2 and "log.jsonl" in done.err and "No such file" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.all
def test_another_number_of_ranks_resumes_to_rounding(cut, tmp_path):
    """From a checkpoint of one rank, in front of the split."""
    moved = tmp_path / "moved"
    shutil.copytree(cut, moved)
    sorted((moved / tg.CHECKPOINTS).iterdir())[-1].unlink()
    launch(2, tmp_path / "two", f"--resume={moved}", "--max_steps=0")
    both = [(x, y) for x, y in zip(losses(tmp_path / "two"), losses(cut)) if x[:2] == y[:2]]
    assert len(both) >= 11 and all(mine[3] == pytest.approx(theirs[3], abs=1e-3) for mine, theirs in both if mine[3])


@pytest.mark.all
def test_the_second_of_several_runs_of_two_ranks_equals_a_fresh_one(tmp_path):
    launch(2, tmp_path / "runs", "--seed=5", "--runs=2")
    launch(2, tmp_path / "alone", "--seed=6")
    assert losses(tmp_path / "runs" / "seed_6") == losses(tmp_path / "alone")


def kill_and_resume(folder: Path, rng: random.Random, plain: Path, most: int) -> int:
    """Kill a run up to `most` times at random moments and resume it until it ends. Returns how often it was killed."""
    command = [sys.executable, str(ROOT / "train_gpt.py"), "--checkpoint_every=2", "--sample_tokens=0"]
    kills, source, number = 0, ["--preset=tiny", "--seed=6"], 0
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
        if any((here / tg.CHECKPOINTS).glob("step-*.pt")):
            source = [f"--resume={here}"]


@pytest.mark.parametrize("seed, most", [(0, 1), *(pytest.param(seed, 8, marks=pytest.mark.all)
                                                  for seed in range(1, 7))])
def test_a_run_killed_at_random_moments_ends_with_the_same_losses(plain, tmp_path, seed, most):
    kills = kill_and_resume(tmp_path, random.Random(seed), plain, most)
    print(f" killed {kills} times")


# ---- time budget ----------------------------------------------------------------------------------------------------

def test_a_time_budget_scales_the_schedule(tmp_path):
    """Times are made up: a step of stage k takes k + 1 seconds, and nothing else takes any."""
    cfg, now, log = preset(time_budget=400.0), [0.0], []
    class Model:
        compiling, exchange, exchange_ahead = False, None, None
        snapshot = restore = evaluate = lambda self, *rest: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg.time, "perf_counter", lambda: now[0])
        patch.setattr(tg.Fabric, "of_all", lambda self, x: [x, [s / 2 for s in x]])           # another rank is faster
        patch.setattr(tg, "train_step", lambda ex, loader, values: now.__setitem__(0, now[0] + values.stage + 1))
        made = tg.Log(tmp_path / "run", fabric(), tg.Schedule(cfg))
        scaled, seconds = tg.fit_budget(cfg, fabric(), Model(), tg.find_shards(cfg.train_files), made)
    made.close()
    assert seconds == [1.0, 2.0, 3.0, 4.0]
    # 9 scheduled steps (1, 2, 3 s) and 3 of extension (4 s): 2 + 4 / 3 seconds for each scheduled step
    assert (scaled.num_scheduled_steps, scaled.num_extension_steps) == (120, 40)
    budget, = Run(tmp_path / "run", 0, "", "").of("budget")
    assert (budget["steps"], budget["seconds"], budget["seconds_per_step"]) == (160, 400.0, [1.0, 2.0, 3.0, 4.0])


def test_a_few_odd_cycles_do_not_count_in_a_time_budget(tmp_path):
    """10 cycles of a stage: 8 of 1 s, 1 of 0.2 s, 1 of 90 s, and the change of stages in front of them; twice."""
    ends = []
    for stage in range(4):
        now = 1000.0 * stage
        for seconds in (0.0, *[1.0] * 8, 0.2, 90.0):
            now += seconds
            ends.append((stage, now))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "try_steps", lambda *_: ends)
        made = tg.Log(tmp_path / "run", fabric(), tg.Schedule(preset()))
        found = tg.time_steps(preset(), fabric(), None, [], made)
    made.close()
    assert found == [0.5] * 4


def test_a_budget_without_room_for_a_step_of_each_stage_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tg, "time_steps", lambda *_: [0.1] * 4)
    monkeypatch.setattr(tg, "warm_up", lambda *_: None)
    done = run(tmp_path / "run", "--time_budget=0.39")
    assert done.status == 2 and "last, 0.400 s" in done.err and done.of("aborted")
    again = run(tmp_path / "again", "--sample_tokens=0", done.err.rpartition("do:")[2].strip())
    assert again.status == 0 and again.of("budget")[0]["steps"] == 4, "what the message says will do"


def test_a_budget_of_more_steps_than_a_run_may_have_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tg, "time_steps", lambda *_: [1e-4] * 4)
    log = tg.Log(tmp_path / "run", fabric(), tg.Schedule(preset()))

    def fit(seconds: float) -> tg.Config:
        return tg.fit_budget(preset(time_budget=seconds), fabric(), None, [], log)[0]
    message = refused(tg.ConfigError, lambda: fit(1e6), "--time_budget", "10000000 steps")
    fitted = fit(float(message.rpartition("--time_budget=")[2]))
    log.close()
    assert 0.98 * 10**7 < fitted.num_scheduled_steps + fitted.num_extension_steps <= 10**7


@pytest.mark.parametrize("flags, says", [
    ([], "too few training tokens"), (["--epochs=0", "--profile=9000:9001"], "--profile")])
def test_what_a_budget_asks_for_is_known_before_the_race(tmp_path, monkeypatch, flags, says):
    """80,000 tokens do not last for 750 steps; with data that cycle, a profile has to lie within those steps."""
    monkeypatch.setattr(tg, "time_steps", lambda *_: [0.01] * 4)
    monkeypatch.setattr(tg, "warm_up", lambda *_: None)
    monkeypatch.delattr(tg, "race")
    done = run(tmp_path / "run", "--time_budget=10", *flags)
    assert done.status == 2 and says in done.err and "Traceback" not in done.err


TRIAL = [1.0, 2.0, 3.0, 3.2]             # s of a step by stage, as a trial has found


def trained(steps: int, speed, trial: list[float] = TRIAL) -> tuple[float, tg.Schedule]:
    """Share of its time that a run of so many planned steps takes, and its schedule at the end.

    speed(share of the budget used, step): how many times as long a step takes as in the trial.
    """
    cfg = preset("tiny", num_scheduled_steps=steps - steps // 27, num_extension_steps=steps // 27)
    schedule = tg.Schedule(cfg)
    seconds = float(np.dot(schedule.steps_by_stage(0, steps), trial))
    schedule = tg.Schedule(preset("tiny", **vars(cfg) | dict(time_budget=seconds)))
    step, ms = 0, 0.0
    while step < schedule.end_step:
        if tg.fit_due(schedule, step):
            fit = tg.fit_rest(schedule, trial, step, ms, tg.MAX_STEPS)
            schedule = tg.Schedule(schedule.cfg, (*schedule.fits, fit))
        ms += 1000 * TRIAL[schedule.stage_at(step)] * speed(ms / 1000 / seconds, step)
        step += 1
    return ms / 1000 / seconds, schedule


def uneven(share: float, step: int) -> float:
    """Each step by itself, up to a fifth more or less than the mean."""
    return 0.8 + 0.4 * random.Random(step).random()


SPEEDS = {
    "slow": lambda share, step: 1.4, "fast": lambda share, step: 0.7, "twice as slow": lambda share, step: 1.9,
    "five times as fast": lambda share, step: 0.2, "slower": lambda share, step: 0.7 + 0.7 * share,
    "faster": lambda share, step: 1.4 - 0.7 * share, "waves": lambda share, step: 1 + 0.35 * np.sin(9 * share),
    "ripples": lambda share, step: 1 + 0.35 * np.sin(99 * share), "uneven": uneven,
    "uneven and slower": lambda share, step: uneven(share, step) * (0.7 + 0.7 * share)}
SPEEDS |= {f"{after} from {at}": lambda share, step, at=at, after=after: after if share > at else 1.0
           for at in (0.2, 0.45, 0.55, 0.8, 0.93) for after in (0.7, 1.4)}


@pytest.mark.parametrize("steps", [135, 540, 1547])
@pytest.mark.parametrize("name", SPEEDS)
def test_a_run_keeps_its_time_budget_while_the_machine_drifts(name, steps):
    share, schedule = trained(steps, SPEEDS[name])
    assert abs(share - 1) < 0.03, share
    assert 3 <= len(schedule.fits) <= 16
    stages = [schedule.stage_at(step) for step in range(schedule.total_steps)]
    assert sorted(set(stages)) == [0, 1, 2, 3], "to the end of the plan"


@pytest.mark.parametrize("steps", [36, 135, 540, 1547])
def test_on_a_quiet_machine_the_schedule_stays(steps):
    share, schedule = trained(steps, lambda share, step: 1.0)
    assert share == pytest.approx(1, abs=1e-9) and {fit.total_steps for fit in schedule.fits} == {steps}
    halves = [fit.step for fit in schedule.fits]
    assert halves[0] == steps // 2 - steps // 2 % 2
    for last, step in zip([0, *halves], halves):
        assert 0 <= (steps - last) / 2 - (step - last) < 2, "whole cycles"
    assert steps - halves[-1] in (3, 4, 5), "none where no step is left behind the next cycle"


def test_what_a_trial_got_wrong_about_one_stage_is_mended():
    for wrong in ([1.0, 2.0, 3.0, 1.6], [0.5, 2.0, 3.0, 3.2], [1.0, 2.0, 4.5, 3.2], [1.0, 3.0, 3.0, 3.2]):
        share, _ = trained(540, lambda share, step: 1.0, wrong)
        assert abs(share - 1) < 0.03, wrong


def test_a_fit_by_hand():
    """4 stages of 10 steps. 20 steps: 10 of 1 s and 10 of 2 s, foreseen 30 s, took 45 s: all goes 1.5 times as long."""
    cfg = preset("tiny", num_scheduled_steps=30, num_extension_steps=10, time_budget=100.0)
    schedule = tg.Schedule(cfg)
    # The next 2 steps take 2 x 3 x 1.5 = 9 s: 46 s are left; the 18 of 8 x 3 + 10 x 4 s would take 96 s.
    fit = tg.fit_rest(schedule, [1.0, 2.0, 3.0, 4.0], 20, 45_000.0, 1000)
    assert fit == (20, 45_000.0, 22 + round(18 * 46 / 96)) == (20, 45_000.0, 31)
    assert tg.fit_rest(schedule, [1.0, 2.0, 3.0, 4.0], 20, 45_000.0, 27).total_steps == 27, "of the data"
    assert tg.fit_rest(schedule, [1.0, 2.0, 3.0, 4.0], 20, 99_000.0, 1000).total_steps == 22, "what is prepared"
    assert tg.fit_rest(schedule, [1.0, 2.0, 3.0, 4.0], 20, 999_000.0, 1000).total_steps == 22, "also if it is too late"
    assert tg.fit_rest(schedule, [1.0, 2.0, 3.0, 4.0], 20, 1e-6, tg.MAX_STEPS).total_steps == tg.MAX_STEPS
    # Behind a fit only the stretch since then counts: 4 of the 9 steps left, at step 26, foreseen 12 s, took 6 s.
    again = tg.Schedule(cfg, [fit])
    seconds = np.dot(again.steps_by_stage(20, 26), [1.0, 2.0, 3.0, 4.0])
    ahead, rest = (np.dot(again.steps_by_stage(*part), [1.0, 2.0, 3.0, 4.0]) for part in ((26, 28), (28, 31)))
    want = 28 + round(3 * (100 - 51 - 6 / seconds * ahead) / (6 / seconds * rest))
    assert tg.fit_rest(again, [1.0, 2.0, 3.0, 4.0], 26, 51_000.0, 1000) == (26, 51_000.0, want)


def test_the_data_and_the_limit_of_steps_bound_a_fit():
    """From step 20 on 10 steps of stage 2 and 10 of stage 3 are left: as many tokens each as in their rows."""
    cfg = preset("tiny", num_scheduled_steps=30, num_extension_steps=10)
    schedule = tg.Schedule(cfg)
    rest = 10 * cfg.stages[2].batch_tokens + 10 * cfg.stages[3].batch_tokens
    assert tg.most_steps(schedule, 20, rest) == 40 and tg.most_steps(schedule, 20, rest - 1) == 39
    assert tg.most_steps(schedule, 20, 3 * rest) == 80 and tg.most_steps(schedule, 20, -5) == 20
    assert tg.most_steps(schedule, 20, float("inf")) == tg.MAX_STEPS


def test_ranks_fit_by_the_clock_of_rank_0(tmp_path):
    schedules, waited = [], []
    for rank, ms in ((0, 45_000.0), (1, 61_000.0)):
        cfg = preset("tiny", num_scheduled_steps=30, num_extension_steps=10, time_budget=100.0)
        ranks = fabric(rank, 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tg.Fabric, "of_all", lambda self, x: [45_000.0, 61_000.0])
            patch.setattr(tg.Fabric, "synchronize", lambda self: waited.append(self.rank))
            patch.setattr(tg.Clock, "ms", ms)
            log = tg.Log(tmp_path / "run", ranks, tg.Schedule(cfg), done=20)
            loader = type("Endless", (), dict(tokens_left=lambda self: float("inf")))()
            tg.keep_to_budget([1.0, 2.0, 3.0, 4.0], loader, tg.Clock(ranks), log)
        log.close()
        schedules.append(log.schedule)
    assert [schedule.fits for schedule in schedules] == [((20, 45_000.0, 31),)] * 2 and waited == [0, 1]
    found = Run(tmp_path / "run", 0, "", "")
    assert found.events == [dict(type="budget", seconds=100.0, steps=31, step=20, train_time_ms=45_000.0)]
    assert found.lines == ["time budget 100 s: 45.00 s after 20 steps, so 31 steps in all"]


def made_up_time(monkeypatch, ms_of_step, trial: float = 0.05) -> None:
    """Training time goes by ms_of_step(step, stage) only; the trial has found `trial` s for each step."""
    passed = [0.0]
    train_step = tg.train_step

    class MadeUpClock(tg.Clock):
        def __init__(self, fabric) -> None:
            super().__init__(fabric)
            passed[0] = 0.0

        @property
        def ms(self) -> float:
            return self.before + passed[0]

        def start(self) -> None:
            pass

        def stop(self) -> None:
            pass

    def timed(executor, loader, values):
        passed[0] += ms_of_step(values.step, values.stage)
        return train_step(executor, loader, values)
    monkeypatch.setattr(tg, "train_step", timed)
    monkeypatch.setattr(tg, "time_steps", lambda *_: [trial] * 4)
    monkeypatch.setattr(tg, "Clock", MadeUpClock)


FITTED = ("--time_budget=1.61", "--epochs=0", "--sample_tokens=0", "--val_every=9")


def slower_and_slower(step: int, stage: int) -> float:
    """32 steps are planned; 12 of them take as long as planned."""
    return 50.0 + 2 * max(0, step - 12)


@pytest.fixture
def slowing(monkeypatch) -> None:
    made_up_time(monkeypatch, slower_and_slower)


@pytest.fixture(scope="module")
def slowed(tmp_path_factory) -> Run:
    """A whole run of that kind."""
    with pytest.MonkeyPatch.context() as patch:
        made_up_time(patch, slower_and_slower)
        return run(tmp_path_factory.mktemp("slowed") / "run", "--seed=5", *FITTED)


def test_a_run_that_slows_down_ends_in_time_and_says_what_it_did(slowed):
    done = slowed
    assert done.status == 0, done.err
    result, (first, *later) = done.of("result")[0], done.of("budget")
    assert abs(result["train_time_ms"] / 1610 - 1) < 0.03 and first["steps"] == 32 > result["steps"]
    assert len(later) >= 2 and result["steps"] == later[-1]["steps"] == len(done.of("step"))
    for fit in later:
        assert fit["seconds"] == 1.61 and fit["step"] % 2 == 0
        assert fit["train_time_ms"] == done.of("step")[fit["step"] - 1]["train_time_ms"]
        said = f"time budget 1.61 s: {fit['train_time_ms'] / 1000:.2f} s after {fit['step']} steps, so {fit['steps']} "
        at, = [number for number, line in enumerate(done.lines) if line.startswith(said)]
        assert done.lines[at - 1].startswith(f"step:{fit['step']}/"), "behind the line of the step before"
        behind = [line for line in done.lines[at + 1:] if "val_loss" not in line]
        assert behind[0].startswith(f"step:{fit['step'] + 1}/{fit['steps']} ")
    assert [e["step"] for e in done.of("val")] == [*range(0, result["steps"], 9), result["steps"]]


def test_a_resumed_run_goes_on_fitting(tmp_path, slowed, slowing):
    whole = slowed
    fitted_at = [e["step"] for e in whole.of("budget")[1:]]
    for cut_at in fitted_at[:2]:
        cut = run(tmp_path / f"cut_{cut_at}", "--seed=5", f"--max_steps={cut_at + 1}", "--checkpoint_every=2", *FITTED)
        done = resume(cut.folder, tmp_path / f"run_{cut_at}", "--checkpoint_every=0")
        assert done.status == 0, done.err
        assert done.of("resumed")[0]["step"] == cut_at and losses(done.folder) == losses(whole.folder)
        assert done.of("budget") == whole.of("budget") and done.of("result")[0]["steps"] == len(whole.of("step"))


def test_a_run_that_is_longer_than_planned_is_resumed_behind_the_planned_end(tmp_path, monkeypatch):
    made_up_time(monkeypatch, lambda step, stage: 30.0)
    whole = run(tmp_path / "whole", *FITTED)
    assert whole.of("result")[0]["steps"] > 48 and abs(whole.of("result")[0]["train_time_ms"] / 1610 - 1) < 0.03
    cut = run(tmp_path / "cut", "--max_steps=43", "--checkpoint_every=2", *FITTED)
    done = resume(cut.folder, tmp_path / "run", "--checkpoint_every=0")
    assert done.status == 0 and done.of("resumed")[0]["step"] == 42, done.err
    assert losses(done.folder) == losses(whole.folder) and done.of("budget") == whole.of("budget")


def test_each_of_several_runs_starts_with_the_first_fit(tmp_path, slowed, slowing):
    two = run(tmp_path / "two", "--runs=2", "--seed=4", *FITTED)
    second = two.folder / "seed_5"
    assert losses(second) == losses(slowed.folder)
    assert Run(second, 0, "", "").of("budget") == slowed.of("budget")[1:]


def test_a_run_with_a_time_budget_may_be_cut_or_profiled(tmp_path, slowed, slowing):
    cut = run(tmp_path / "cut", "--seed=5", "--max_steps=19", *FITTED)
    assert cut.status == 0 and cut.of("result")[0]["steps"] == 19
    trained_on = [(e["step"], e["train_loss"]) for e in slowed.of("step")]
    assert [(e["step"], e["train_loss"]) for e in cut.of("step")] == trained_on[:19]
    profiled = run(tmp_path / "profiled", "--profile=29:31", *FITTED)
    assert profiled.status == 0 and len(profiled.of("budget")) == 1 and profiled.of("profile"), profiled.err
    assert profiled.of("result")[0]["steps"] == 32, "its time does not count, and its steps have to be there"


def test_a_longer_run_takes_no_more_than_the_data(tmp_path, monkeypatch):
    """Five times as fast as in the trial: time for some 150 steps, and tokens for fewer."""
    made_up_time(monkeypatch, lambda step, stage: 10.0)
    data = ("--epochs=1", "--train_files=formula:512:511:9000:3")
    done = run(tmp_path / "run", *FITTED, *data)
    assert done.status == 0, done.err
    found = [line for line in done.lines if line.endswith("the most that the data last or a run may have")]
    assert len(found) >= 3 and 32 < done.of("result")[0]["steps"] < 150
    cfg = preset("tiny", epochs=1, train_files="formula:512:511:9000:3")
    most = drain(cfg, tg.Schedule(cfg).at(8))[-1][0]
    assert 0.85 * most < done.of("result")[0]["tokens"] <= most


def drain(cfg: tg.Config, values: tg.Values) -> list[tuple[int, float]]:
    """(tokens taken, tokens left) after each cycle of such steps, up to the end of the data."""
    steps = [tg.replace(values, step=step) for step in range(2, 10_000)]
    loader = tg.Loader(cfg, fabric(), tg.find_shards(cfg.train_files), steps)
    loader.start()
    found = []
    with pytest.raises(tg.DataError, match="training data ended"):
        for values in steps:
            found.append((loader.tokens_taken, loader.tokens_left()))
            loader.next(values)
    loader.close()
    return found


def test_a_loader_knows_about_what_is_left():
    """Of two shards, read twice, in blocks of two sizes: what is said is right within a tenth."""
    cfg = preset("tiny", epochs=2)
    largest = max(stage.batch_tokens for stage in cfg.stages)
    for step in (0, 10):
        found = drain(cfg, tg.Schedule(cfg).at(step))
        whole, _ = found[-1]
        assert len(found) > 100
        for taken, left in found[20:]:
            assert left + largest == pytest.approx(whole - taken, rel=0.1, abs=2 * largest)
    endless = tg.Loader(tg.replace(cfg, epochs=0), fabric(), [], [])
    assert endless.tokens_left() == float("inf")
    endless.close()


def test_without_a_time_budget_a_checkpoint_holds_no_fits(cut):
    content = torch.load(sorted((cut / tg.CHECKPOINTS).iterdir())[-1])
    assert content.keys() == {"log", "train_time_ms", "data_sha256", "lengths", "state"}


@pytest.mark.all
def test_two_ranks_keep_a_time_budget_together(tmp_path):
    """By their real clocks: they end at the same step, or one would wait for the other."""
    launch(2, tmp_path / "run", "--time_budget=4", "--epochs=0", "--checkpoint_every=2")
    done = Run(tmp_path / "run", 0, "", "")
    assert len(done.of("budget")) > 3 and done.of("result")[0]["steps"] == done.of("budget")[-1]["steps"]
    launch(2, tmp_path / "again", f"--resume={tmp_path / 'run'}", "--checkpoint_every=0")
    assert losses(tmp_path / "again")[:-3] == losses(tmp_path / "run")[:-3]


# ---- profile --------------------------------------------------------------------------------------------------------

@pytest.mark.all
def test_profile_of_two_ranks(tmp_path):
    launch(2, tmp_path / "run", "--profile=6:9")
    log = Run(tmp_path / "run", 0, "", "")
    ranks = log.of("profile")[0]["ranks"]
    assert len(ranks) == 2 and log.of("result")[0]["void"] == "profiled" and "(void: profiled)" in log.lines[-2]
    for rank in ranks:
        names = {name for name in rank if name.startswith("exposed gloo:")}
        assert {"exposed gloo:all_reduce", "exposed gloo:all_gather", "exposed gloo:all_to_all"} <= names
        assert all(ms >= 0 for ms in rank.values()) and 0 < rank["computing"] < rank["wall"]
        assert rank["computing"] + rank["gaps"] + sum(rank[name] for name in names) >= rank["wall"] - 1e-6
    for rank in (0, 1):
        trace = json.loads(gzip.open(tmp_path / f"run/trace_rank{rank}.json.gz").read())
        names = {event.get("name", "") for event in trace["traceEvents"]}
        assert sorted(name for name in names if name.startswith("ProfilerStep")) == [
            "ProfilerStep#6", "ProfilerStep#7", "ProfilerStep#8"], "counted from the start of the run"


def test_spans_are_counted_once_where_they_overlap():
    assert tg.union([(5, 7), (0, 2), (1, 3), (1, 2), (7, 8)]) == 6 and tg.union([]) == 0


def test_where_the_time_went_in_a_trace_made_by_hand():
    from types import SimpleNamespace as Is
    def event(name, start, end, thread=1, device="CPU", is_user_annotation=False):
        return Is(name=name, thread=thread, device_type=Is(name=device), time_range=Is(start=start, end=end),
                  is_user_annotation=is_user_annotation)
    host = [event("ProfilerStep#4", 0, 1000), event("ProfilerStep#5", 1000, 2000), event("aten::mm", 100, 700),
            event("gloo:all_reduce", 600, 900, 2), event("gloo:all_reduce", 1000, 1100, 3),
            event("aten::mm", 0, 2000, 9)]
    ms = dict(wall=1.0, computing=0.3, gaps=0.6) | {"exposed gloo:all_reduce": 0.15}
    assert tg.profiled_ms(host, False) == pytest.approx(ms | dict(gaps=1 - 0.3 - 0.15))
    device = [event("gemm", 100, 700, 7, "CUDA"), event("gemm", 650, 800, 8, "CUDA"),
              event("ncclDevKernel_AllGather_RING_LL(x)", 700, 1000, 9, "CUDA"),
              event("ProfilerStep#4", 0, 9, 7, "CUDA", True), event("nccl:all_gather", 0, 1500, 7, "CUDA", True)]
    assert tg.profiled_ms(host + device, True) == pytest.approx(
        {"wall": 1.0, "computing": 0.35, "gaps": 1 - 0.45, "exposed ncclDevKernel_AllGather": 0.1})


@pytest.mark.parametrize("flag, says", [("4", "a:b"), ("4:x", "a:b"), ("8:8", "a < b"),
                                        ("0:4", "0 < a < b < 12"), ("9:12", "0 < a < b < 12"),
                                        ("4:6", "only training"), ("5:500", "for example --profile=1:5"),
                                        ("0:" + "9" * 5000, "(5004 characters)")])
def test_a_profile_of_steps_that_are_not_there_is_refused(tmp_path, monkeypatch, flag, says):
    """Before the warm-up, and before there is a run directory; the range that the message proposes is possible."""
    monkeypatch.setattr(tg, "warm_up", None)
    done = run(tmp_path / "run", f"--profile={flag}")
    assert done.status == 2 and "--profile" in done.err and says in done.err and len(done.err) < 500
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("first, changes", [(0, {}), (4, {}), (7, {}), (0, dict(val_every=2)), (0, dict(val_every=1)),
                                            (0, dict(max_steps=2)), (9, dict(val_every=0)), (10, {})])
def test_the_range_that_is_proposed_for_a_profile_is_possible(first, changes):
    schedule = tg.Schedule(preset("tiny", profile="99:100", **changes))
    with pytest.raises(tg.ConfigError) as caught:
        tg.check_profile(schedule, first)
    proposed = str(caught.value).partition("for example --profile=")[2]
    if proposed:
        tg.check_profile(tg.Schedule(preset("tiny", profile=proposed, **changes)), first)
    possible = {(a, b) for a in range(12) for b in range(a + 1, 12)
                if a > first and b < schedule.end_step and not any(schedule.at(k).validate for k in range(a, b))}
    assert bool(proposed) == bool(possible)

    accepted = set()
    for a, b in itertools.product(range(14), range(14)):
        if a < b:
            with contextlib.suppress(tg.ConfigError):
                tg.check_profile(tg.Schedule(preset("tiny", profile=f"{a}:{b}", **changes)), first)
                accepted.add((a, b))
    assert accepted == possible, "behind the first step, in front of the last, and only training"


# ---- facts of an entry ----------------------------------------------------------------------------------------------

def test_the_header_says_what_an_entry_is(plain):
    header, = Run(plain, 0, "", "").of("header")
    rows = dict(bigram_embed=2560, value_embed=2560, embed=512)
    parameters = sum(x.numel() for x in torch.load(plain / "weights.pt").values())
    assert header["table_rows"] == rows and header["table_bytes"] == 4 * 32 * sum(rows.values())
    assert header["params_total"] == parameters == 328_122
    assert header["params_per_token"] == parameters - 32 * (sum(rows.values()) - 1 - 5 - 1)
    assert header["untimed_warmup_steps"] == 12 and header["target_loss"] == 0
