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
    owned = {f"{label}.written": (ex.optimizer.weights[label].written.tolist(), passes)
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
    monkeypatch.setattr(tg, "time_steps", lambda *_: [0.05] * 4)     # how busy the machine is decides nothing here
    whole = run(tmp_path / "whole", "--time_budget=0.7", "--epochs=0", "--checkpoint_every=4", "--sample_tokens=0")
    steps, result = whole.of("budget")[0]["steps"], whole.of("result")[0]
    assert whole.status == 0 and len(whole.of("step")) == steps == result["steps"] and result["budget_s"] == 0.7
    assert f"time budget 0.7 s: used {result['train_time_ms'] / 7:.2f} %" in whole.lines
    assert whole.of("header")[0]["untimed_warmup_steps"] == 12 + tg.TRIAL_ROUNDS * tg.TRIAL_STEPS * 4
    again = resume(whole.folder, tmp_path / "run")
    assert again.status == 0, again.err
    assert losses(again.folder) == losses(whole.folder) and len(again.of("budget")) == 1


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
    may_change = "these may change: checkpoint_every, comm_timeout, compile, debug_rows, device, epochs"
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
        patch.setattr(tg.Fabric, "of_all", lambda self, x: [x + 30, x])       # another rank is faster
        patch.setattr(tg, "train_step", lambda ex, loader, values: now.__setitem__(0, now[0] + values.stage + 1))
        made = tg.Log(tmp_path / "run", fabric(), tg.Schedule(cfg))
        scaled = tg.fit_budget(cfg, fabric(), Model(), tg.find_shards(cfg.train_files), made)
    made.close()
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
    done = run(tmp_path / "run", "--time_budget=0.29")
    assert done.status == 2 and "a step of each stage, 0.300 s" in done.err and done.of("aborted")


def test_a_budget_of_more_steps_than_a_run_may_have_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tg, "time_steps", lambda *_: [1e-4] * 4)
    log = tg.Log(tmp_path / "run", fabric(), tg.Schedule(preset()))

    def fit(seconds: float) -> tg.Config:
        return tg.fit_budget(preset(time_budget=seconds), fabric(), None, [], log)
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
