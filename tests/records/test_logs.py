"""Reading logs: one made-up file per family (golden/), every pitfall of public logs, and what cannot be read."""
import contextlib
import hashlib
import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "records"))
from tools import compare, logs, pool
from tools.logs import Point, ToolError

GOLDEN = ROOT / "tests" / "records" / "golden"
H100 = {"hardware": "NVIDIA H100 80GB HBM3 x 8", "world_size": 8, "python": "3.12.9"}


def read(*names: str) -> logs.Reading:
    return logs.read([GOLDEN / name for name in names])


def only(name: str) -> logs.Run:
    (run,) = read(name).runs
    return run


def facts(run: logs.Run) -> dict:
    """Facts without the hash of the source, which must be that of the text before the environment."""
    data = run.path.read_bytes()
    source = data[:data.index(b"\n" + b"=" * 100)].strip()
    assert run.facts["source_sha256"] == hashlib.sha256(source).hexdigest()
    return {key: value for key, value in run.facts.items() if key not in ("source_sha256", "buses")}


def test_a_has_no_time_and_no_plan():
    run = only("a_llmc.log")
    assert run.family == "A" and run.total is None and run.finished and run.notes == [] and run.seconds is None
    assert run.val == [Point(0, 10.99, None), Point(2, 7.25, None), Point(3, 6.5432, None)]
    assert run.steps == [(0, None, 10.9876), (1, None, 9.5), (2, None, 7.2)]


def test_b_restarts_its_timer_and_logs_training_losses():
    run = only("b_train_loss.txt")
    assert (run.family, run.total, run.finished, run.notes) == ("B", 14, True, ["timer restarts at step 11"])
    assert run.val == [Point(0, 16.0, None), Point(12, 5.5, 0.245), Point(14, 4.25, 0.487)]
    assert run.steps[:10] == [(step, None, float(f"{10 - step / 10:.4f}")) for step in range(1, 11)]
    assert run.steps[10:] == [(11, 0.12, 8.9), (12, 0.24, 8.8), (13, 0.365, 8.7), (14, 0.485, 8.6)]
    assert facts(run) == {**H100, "torch": "2.6.0.dev20241203+cu124", "cuda": "12.4", "driver": "550.127.05"}
    assert run.result == {"peak_memory_mib": {"consumption": 33000}}


def test_c_has_nan_averages():
    run = only("c_nan.txt")
    assert (run.family, run.total, run.notes) == ("C", 14, ["timer restarts at step 11"])
    assert run.val == [Point(0, 10.8258, None), Point(12, 5.0, 0.31), Point(14, 3.2788, 0.612)]
    assert run.steps[9:] == [(10, None, None), (11, 0.15, None), (12, 0.3, None), (13, 0.455, None), (14, 0.6, None)]


def test_d_reads_memory_and_node_and_no_decoy():
    run = only("d_timing.txt")
    assert (run.family, run.index, run.total, run.finished, run.notes, run.seed) == ("D", 0, 4, True, [], None)
    assert run.val == [Point(0, 10.826, 0.0), Point(2, 4.1, 0.121), Point(4, 3.2785, 0.331)]
    assert run.steps == [(1, 0.061, None), (2, 0.118, None), (3, 0.18, None), (4, 0.24, None)]
    assert (run.loss, run.seconds) == (3.2785, 0.331)                     # the validation's time is the official one
    assert facts(run) == {**H100, "torch": "2.10.0.dev20251210+cu126", "cuda": "12.6", "driver": "570.195.03"}
    assert run.result == {"peak_memory_mib": {"allocated": 30573, "reserved": 46658}}


def test_e1_is_in_seconds_and_an_early_stop_is_said():
    run = only("e1_seconds.txt")
    assert (run.family, run.total, run.finished, run.notes) == ("E1", 3000, False, ["stops at 2720 of 3000"])
    assert run.val == [Point(0, 10.82576, 0.0), Point(1500, 3.6, 255.125), Point(2720, 3.29, 462.5)]
    assert run.steps == [] and run.result == {} and run.final == Point(2720, 3.29, 462.5)
    assert run.facts["hardware"] == "NVIDIA H200 x 8"


def test_e2_has_timing_lines_in_seconds():
    run = only("e2_seconds_steps.txt")
    assert (run.family, run.total, run.finished) == ("E2", 4, True)
    assert run.val == [Point(2, 6.5, 0.34), Point(4, 3.27912, 0.69)]
    assert run.steps == [(1, 0.17, None), (2, 0.341, None), (3, 0.511, None), (4, 0.682, None)]
    assert facts(run)["world_size"] == 1 and facts(run)["hardware"] == "NVIDIA A100-SXM4-80GB x 1"


def test_f_ignores_extra_keys_and_lines_that_only_look_like_steps():
    run = only("f_extra_keys.txt")
    assert (run.family, run.val) == ("F", [Point(125, 4.5, 21.25), Point(3000, 3.278, 517.25)])


def test_g_splits_runs_and_finds_their_seeds():
    runs = read("g_trials.txt").runs
    assert [(run.family, run.index, run.seed, run.finished) for run in runs] == [("G", 0, 3, True), ("G", 1, 4, True)]
    assert [run.final for run in runs] == [Point(3000, 3.2791, 521.5), Point(3000, 3.2802, 522.5)]
    assert runs[1].val[0] == Point(0, 10.825, 0.0)


def test_g_drops_blocks_that_repeat_the_end_of_a_run():
    runs = read("g_repeated_stdout.txt").runs
    assert [run.loss for run in runs] == [3.276, 3.277, 3.278] and [len(run.val) for run in runs] == [4, 4, 4]
    assert {tuple(run.notes) for run in runs} == {("its last 3 points stand twice in the file",)}


def test_h_and_i():
    run = only("h_console.stdout")
    assert (run.family, run.facts, run.final, len(run.val)) == ("H", {}, Point(3000, 3.2785, 600.5), 3)
    run = only("i_one/final_val_loss.txt")
    assert (run.family, run.val, run.finished) == ("I", [Point(3000, 3.279, 700.0)], True)


def test_r_reads_lists_in_any_unit_and_keeps_pools_apart():
    runs = read("r_readme/README.md").runs
    pools = {k: [run for run in runs if run.facts["pool"] == k] for k in range(3)}
    assert [(run.loss, run.seconds) for run in pools[0]] == [(3.2781, 94.512), (3.2795, 94.633), (3.277, 94.48),
                                                             (3.2788, 94.571)]
    assert [run.seconds for run in pools[1]] == [95.201, 95.333] and all(math.isnan(run.loss) for run in pools[1])
    assert [(run.loss, run.seconds) for run in pools[2]] == [(3.2791, 95.102), (3.2801, 95.24), (3.2785, 95.008)]
    assert [run.facts["baseline"] for run in runs] == [False] * 4 + [True] * 2 + [False] * 3
    assert {run.family for run in runs} == {"R"} and all(run.finished and run.total is None for run in runs)


def test_lists_in_a_readme_do_not_count_beside_logs():
    reading = read("r_readme", "d_timing.txt")
    assert [run.family for run in reading.runs] == ["D"]
    assert reading.unread == [(GOLDEN / "r_readme" / "README.md", "lists of 9 runs in a README: logs count")]


def test_what_is_no_log_is_named_with_the_reason():
    reading = read("z_no_logs")
    assert reading.runs == [] and {path.name: why for path, why in reading.unread} == {
        "binary.log": "binary", "empty.txt": "empty", "manifest.jsonl": "no header line at the start",
        "metadata.txt": "no validation line", "only_source.txt": "no validation line after the last separator",
        "page.md": "a page without a list of losses or times", "pruning_data.json": "no validation line",
        "remote_manifest.txt": "no validation line", "stderr.txt": "no validation line",
        "trainer.py": "not a log by its name (.py)"}


def test_what_a_run_leaves_beside_its_log_is_no_log(tmp_path):
    text = (GOLDEN / "ours/done/log.jsonl").read_text()
    (tmp_path / "checkpoints/step-0000006").mkdir(parents=True)
    for name in ("log.jsonl", "log.txt", "settings.json", "checkpoints/step-0000006/manifest.json"):
        (tmp_path / name).write_text(text)
    reading = logs.read([tmp_path])
    assert [run.path.name for run in reading.runs] == ["log.jsonl"] and not reading.unread and not reading.duplicates


def test_every_golden_file_is_read_or_named():
    reading = logs.read([GOLDEN])
    seen = {run.path for run in reading.runs} | {path for path, _ in reading.unread + reading.duplicates}
    assert seen == {path for path in GOLDEN.rglob("*") if path.is_file() and path.parent.name != "done"} | {
        GOLDEN / "ours" / "done" / "log.jsonl"}                               # its log.txt is the same run


def test_ours():
    run = only("ours/done")
    assert (run.family, run.seed, run.total, run.finished, run.aborted, run.void) == ("ours", 5, 12, True, None, None)
    assert run.val == [Point(0, 7.5, 0.0205), Point(6, 4.5, 0.6205), Point(12, 3.2765432109, 1.2205)]
    assert run.steps == [(step, (20.25 + 100 * step) / 1000, 5 - step / 10) for step in range(1, 13)]
    assert (run.loss, run.seconds, run.notes) == (3.2765432109, 1.2205, [])
    assert run.phases == [{"name": "warm-up", "ms": 1500.5, "timed": False},
                          {"name": "first batch", "ms": 20.25, "timed": True}]
    assert run.facts["target_loss"] == 3.28 and run.facts["config"]["num_scheduled_steps"] == 10
    assert run.result["peak_memory_mib"] == {"allocated": 900, "reserved": 1000}


def test_ours_torn_aborted_void_and_resumed():
    torn, aborted, void, resumed = (only(f"ours/{name}") for name in ("torn", "aborted", "void", "resumed"))
    assert torn.notes == ["last line torn", "no result line and no cause"] and not torn.finished
    assert [step for step, _, _ in torn.steps] == [1, 2, 3, 4]
    assert aborted.aborted == "loss is nan at step 4" and not aborted.finished and aborted.notes == []
    assert void.void == "profiled" and void.finished and void.seconds is None and void.final.seconds == 1.2205
    assert resumed.finished and resumed.aborted is None and resumed.notes == ["resumed at step 6"]
    assert [step for step, _, _ in resumed.steps] == list(range(1, 13))
    assert [loss for _, _, loss in resumed.steps] == [5 - step / 10 for step in range(1, 7)] + [1.0] * 6


@pytest.mark.parametrize("lines", [(30,), (30, 26), (30, 26, 34, 31)])
def test_the_last_line_of_a_time_budget_says_how_long_a_run_is(tmp_path, lines):
    """The trainer writes one, when the time is over; older ones wrote fits before the race and during it."""
    config = dict(num_scheduled_steps=10, num_extension_steps=2, time_budget=60.0)
    events = [dict(type="header", config=config, seed=0)]
    for number, steps in enumerate(lines):
        step = 12 + 2 * number
        events.append(dict(type="budget", seconds=60.0, steps=steps))
        events.append(dict(type="step", step=step, train_time_ms=1000.0 * step, train_loss=4.0))
    total = lines[-1]
    events.append(dict(type="val", step=20, val_loss=3.5, train_time_ms=40_000.0))
    events.append(dict(type="val", step=total, val_loss=3.0, train_time_ms=60_000.0))
    events.append(dict(type="result", val_loss=3.0, steps=total, budget_s=60.0))
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    run, = logs.read([tmp_path]).runs
    assert run.total == total and run.final == Point(total, 3.0, 60.0) and run.finished and run.notes == []


def test_a_resumed_run_has_the_facts_of_both_parts(tmp_path):
    """--max_steps=4 first, then the whole schedule, with another source: nobody takes it for a run of the first."""
    facts = dict(source_sha256="a" * 64, torch="2.13.0", started="2026-11-23T10:00:00", seed=0)
    config = dict(num_scheduled_steps=10, num_extension_steps=2)
    events = [dict(type="header", config=config | dict(max_steps=4), **facts),
              dict(type="val", step=4, val_loss=4.0, train_time_ms=400.0),
              dict(type="resumed", step=4, source="logs/x", config=config | dict(max_steps=0),
                   **facts | dict(source_sha256="b" * 64, started="2026-11-24T10:00:00")),
              dict(type="val", step=12, val_loss=3.0, train_time_ms=1200.0),
              dict(type="result", val_loss=3.0, train_time_ms=1200.0, steps=12)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    run, = logs.read([tmp_path]).runs
    assert (run.total, run.loss, run.refused, run.finished) == (12, 3.0, None, True)
    assert run.facts["source_sha256"] == f"{'a' * 64}, then {'b' * 64}" and run.facts["torch"] == "2.13.0"
    assert run.facts["started"] == facts["started"] and run.facts["config"]["max_steps"] == 0
    assert run.notes == ["resumed at step 4", "resumed with another source_sha256"]


@pytest.mark.parametrize("broken, why", [
    ('{"type": "step"}\n', "no header line at the start"), ("not json\n", "line 1 is not one of a log.jsonl"),
    ('{"type": "header", "config": {}}\n{"type": "step"}\n', "line 2 is not one of a log.jsonl"),
    ('{"type": "head', "no header line")])
def test_ours_damaged(tmp_path, broken, why):
    (tmp_path / "log.jsonl").write_text(broken)
    assert logs.read([tmp_path]).unread == [(tmp_path / "log.jsonl", why)]


@pytest.mark.parametrize("old, new", [
    ('"run_dir": "runs/x"', '"run_dir": 5'), ('"changed": {', '"changed": [], "other": {'),
    ('"val_loss": 4.5', '"val_loss": "4.5"'), ('"seed": 5', '"seed": [5]'), ('"step": 6', '"step": "6"'),
    ('"train_time_ms": 1220.5, "steps"', '"train_time_ms": null, "steps"'), ('"timed": true', '"timed": 1')])
def test_a_value_of_another_type_is_no_log(tmp_path, old, new):
    text = (GOLDEN / "ours" / "done" / "log.jsonl").read_text()
    assert old in text
    (tmp_path / "log.jsonl").write_text(text.replace(old, new))
    (_, why), = logs.read([tmp_path]).unread
    assert "is not one of a log.jsonl" in why


def test_a_short_run_is_planned_short(tmp_path):
    text = (GOLDEN / "ours" / "done" / "log.jsonl").read_text()
    (tmp_path / "log.jsonl").write_text(text.replace('"max_steps": 0', '"max_steps": 12').replace(
        '"num_scheduled_steps": 10', '"num_scheduled_steps": 500'))
    assert logs.read([tmp_path]).runs[0].total == 12


def test_the_same_run_in_another_wrapper_counts_once(tmp_path):
    """A copy, a console copy without source, a copy of our log.txt, and a file of one line with the same end."""
    for name in ("d_timing.txt", "h_console.stdout"):
        shutil.copy(GOLDEN / name, tmp_path / name)
    shutil.copy(GOLDEN / "d_timing.txt", tmp_path / "copy.txt")
    body = (GOLDEN / "d_timing.txt").read_text().split("=" * 100)[-1]
    (tmp_path / "console.out").write_text(body)
    (tmp_path / "final_val_loss.txt").write_text(body.strip().splitlines()[-2] + "\n")
    shutil.copytree(GOLDEN / "ours" / "done", tmp_path / "run")
    (tmp_path / "console_of_ours.txt").write_text(
        "step:0/12 val_loss:7.5000 train_time:20ms step_avg:20.50ms\nstep:6/12 val_loss:4.5000 train_time:620ms "
        "step_avg:103.42ms\nstep:12/12 val_loss:3.2765 train_time:1220ms step_avg:101.71ms\n")
    reading = logs.read([tmp_path])
    assert sorted((run.path.name, run.family) for run in reading.runs) == [
        ("copy.txt", "D"), ("h_console.stdout", "H"), ("log.jsonl", "ours")]
    assert sorted(path.name for path, _ in reading.duplicates) == [
        "console.out", "console_of_ours.txt", "d_timing.txt", "final_val_loss.txt"]
    assert {kept.name for path, kept in reading.duplicates if path.name != "console_of_ours.txt"} == {"copy.txt"}


def test_equal_entries_of_a_readme_list_are_runs_of_their_own(tmp_path):
    (tmp_path / "README.md").write_text("losses = [3.279, 3.279, 3.279]\n")
    assert len(logs.read([tmp_path]).runs) == 3


def test_a_log_without_a_newline_at_the_end_and_with_crlf(tmp_path):
    text = (GOLDEN / "d_timing.txt").read_text().rsplit("peak", 1)[0].rstrip("\n")
    (tmp_path / "a.txt").write_bytes(text.replace("\n", "\r\n").encode())
    (run,) = logs.read([tmp_path]).runs
    assert run.family == "D" and run.final == Point(4, 3.2785, 0.331) and len(run.steps) == 4


def test_a_cut_run_is_flagged(tmp_path):
    text = (GOLDEN / "d_timing.txt").read_text()
    (tmp_path / "a.txt").write_text(text[:text.index("step:3/4")])
    (run,) = logs.read([tmp_path]).runs
    assert not run.finished and run.notes == ["stops at 2 of 4"] and run.final == Point(2, 4.1, 0.121)


def test_paths_that_do_not_exist_and_folders_without_logs(tmp_path):
    with pytest.raises(ToolError, match="nowhere"):
        logs.read([tmp_path / "nowhere"])
    assert logs.read([tmp_path]) == ([], [], [])


def test_a_named_file_is_read_whatever_its_suffix(tmp_path):
    shutil.copy(GOLDEN / "d_timing.txt", tmp_path / "log.backup")
    assert logs.read([tmp_path]).unread[0][1] == "not a log by its name (.backup)"
    assert logs.read([tmp_path / "log.backup"]).runs[0].loss == 3.2785


def test_records_of_this_project_read_whole():
    reading = logs.read(sorted((ROOT / "records").glob("20*")))
    assert len(reading.runs) >= 12 and all(run.finished and run.family == "ours" for run in reading.runs)
    for run in reading.runs:
        last = json.loads(run.path.read_text().splitlines()[-1])
        assert (run.loss, run.seconds) == (last["val_loss"], last["train_time_ms"] / 1000)


# ---- Logs that contradict themselves, or that something was added to ------------------------------------------------

def changed(tmp_path: Path, name: str, *changes: tuple[str, str]) -> list[logs.Run]:
    """The runs of a golden file in which each text is replaced by another; it must be there."""
    text = (GOLDEN / name).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / f"log{Path(name).suffix}"
    path.write_text(text)
    return logs.read([path]).runs


def test_no_golden_log_contradicts_itself():
    reading = logs.read([path for path in GOLDEN.iterdir() if path.name != "reports"])
    voids = {run.path.parent.name: run.void for run in reading.runs if run.void}
    assert voids == {"void": "profiled"} and not any(run.refused for run in reading.runs)


@pytest.mark.parametrize("name, old, new, why", [
    ("d_timing.txt", "train_time:331ms step_avg:82.75ms", "train_time:319ms step_avg:82.75ms", "step_avg of 82.75"),
    ("d_timing.txt", "train_time:331ms step_avg:82.75ms", "train_time:236ms step_avg:59.00ms", "back at step 4"),
    ("d_timing.txt", "train_time:331ms step_avg:82.75ms", "train_time:2000ms step_avg:500.00ms", "training line 4"),
    ("e1_seconds.txt", "462.500s", "452.500s", "step_avg of 170.04"),
    ("b_train_loss.txt", "487ms step_avg:121.75", "486ms step_avg:119.00", "step_avg of 119.00"),
    ("d_timing.txt", "step:3/4 train_time:180ms", "step:3/4 train_time:80ms", None),    # a clock may start anew here
    ("e1_seconds.txt", "462.500s step_avg:170.04", "162.500s step_avg:59.74", "back at step 2720"),
])
def test_a_time_that_contradicts_its_log_does_not_count(tmp_path, name, old, new, why):
    (run,) = changed(tmp_path, name, (old, new))
    assert run.finished == only(name).finished and run.loss == only(name).loss
    if why is None:
        assert run.void is None and run.notes == ["timer restarts at step 3"]
    else:
        assert why in run.void and run.seconds is None


def test_ours_that_contradicts_itself(tmp_path):
    run, = changed(tmp_path, "ours/done/log.jsonl", ('"val_loss": 3.2765432109, "train_time_ms": 1220.5, "steps"',
                                                     '"val_loss": 3.2665432109, "train_time_ms": 1220.5, "steps"'))
    assert run.finished and "the result says a loss of 3.2665432109" in run.refused
    run, = changed(tmp_path, "ours/done/log.jsonl", ("1220.5,", "1120.5,"), ("1220.5}", "1120.5}"))
    assert run.finished and "training line 12" in run.void and run.seconds is None
    run, = changed(tmp_path, "ours/done/log.jsonl", ('"train_time_ms": 620.5', '"train_time_ms": 1620.5'))
    assert run.void == "the times of its validations fall"


def test_a_final_that_was_added_is_no_run(tmp_path):
    text = (GOLDEN / "d_timing.txt").read_text()
    (tmp_path / "a.txt").write_text(text + "step:4/4 val_loss:3.2001 train_time:251ms step_avg:62.75ms\n")
    first, added = logs.read([tmp_path]).runs
    assert first.refused is None and "begins at step 4" in added.refused


@pytest.mark.parametrize("word", ["NaN", "nan", "NAN", "-nan", "inf"])
def test_a_final_loss_that_is_no_number_is_the_final_loss(tmp_path, word):
    (run,) = changed(tmp_path, "d_timing.txt", ("val_loss:3.2785", f"val_loss:{word}"))
    assert run.finished and run.final.step == 4 and not math.isfinite(run.loss)


@pytest.mark.parametrize("old, new", [("train_time:331ms step_avg:82.75", "train_time:NaNms step_avg:nan"),
                                      ("train_time:331ms step_avg:82.75", "train_time:1e300ms step_avg:2e299")])
def test_a_final_time_that_is_no_number_does_not_count(tmp_path, old, new):
    (run,) = changed(tmp_path, "d_timing.txt", (old, new))
    assert run.finished and run.void and run.seconds is None
    (run,) = changed(tmp_path, "e1_seconds.txt", ("time:462.500s step_avg:170.04", "time:nans step_avg:nan"))
    assert run.void and run.seconds is None


def test_numbers_that_are_out_of_all_bounds(tmp_path):
    """A loss is infinite, which names the run; what has too many digits for a step is no line of one."""
    (run,) = changed(tmp_path, "d_timing.txt", ("val_loss:3.2785", "val_loss:1e300"))
    assert run.final.loss == math.inf
    (run,) = changed(tmp_path, "d_timing.txt", ("step:4/4 val_loss", f"step:{'9' * 5000}/4 val_loss"))
    assert run.notes == ["stops at 2 of 4"]


def test_a_file_that_cannot_be_read_stops_no_other(tmp_path):
    """A pipe, which nobody may ever write to, and a driver whose name is no text."""
    shutil.copy(GOLDEN / "e1_seconds.txt", tmp_path / "good.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    text = (GOLDEN / "d_timing.txt").read_bytes()
    (tmp_path / "strange.txt").write_bytes(text.replace(b"Driver Version: ", b"Driver Version: \xff"))
    reading = logs.read([tmp_path])
    assert len(reading.runs) == 1
    assert reading.unread == [(tmp_path / "pipe.txt", "a pipe or a device"),
                              (tmp_path / "strange.txt", "its environment is no UTF-8")]


OTHER_VALUES = [None, "3.2", [1], {"a": 1}, True, -1, 1e300, 1e308, 10**400, math.nan, math.inf]


@pytest.mark.parametrize("kind", ["header", "phase", "step", "val", "result"])
def test_a_line_with_another_value_is_read_or_named(tmp_path, monkeypatch, kind):
    """Any verb on it ends in words: the file is no log, or what is wrong with it is said."""
    monkeypatch.chdir(tmp_path)
    good = (GOLDEN / "ours" / "done" / "log.jsonl").read_text().splitlines()
    (tmp_path / "good.txt").write_text((GOLDEN / "d_timing.txt").read_text())
    place = max(place for place, line in enumerate(good) if json.loads(line)["type"] == kind)
    for key in json.loads(good[place]).keys() - {"type"}:
        for value in OTHER_VALUES:
            event = json.loads(good[place]) | {key: value}
            lines = [*good[:place], json.dumps(event), *good[place + 1:]]
            (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
            for verb in (compare.main, pool.main_place):
                with contextlib.suppress(logs.ToolError):
                    verb(["log.jsonl", "good.txt"])


@pytest.mark.parametrize("behind", ["=" * 100 + "\n", "\n" + "=" * 60 + "\ndone\n" + "=" * 60 + "\n"])
@pytest.mark.parametrize("name", ["d_timing.txt", "e1_seconds.txt", "h_console.stdout", "g_trials.txt"])
def test_separators_behind_a_run(tmp_path, name, behind):
    before = read(name).runs
    (tmp_path / name).write_text((GOLDEN / name).read_text() + behind)
    after = logs.read([tmp_path]).runs
    assert [(run.val, run.facts, run.void, run.finished) for run in after] == [
        (run.val, run.facts, run.void, run.finished) for run in before]


def test_separators_within_a_run(tmp_path):
    (run,) = changed(tmp_path, "d_timing.txt", ("step:3/4", "=" * 100 + "\nstep:3/4"))
    assert run.val == only("d_timing.txt").val and run.family == "D"


@pytest.mark.parametrize("prefix", ["[rank0]: ", "[default0]:", "0: ", "2026-11-22 13:45:11,123 INFO ",
                                    "2026-11-22T13:45:11.123456Z ", "[2026-11-22 13:45:11] [rank0]: "])
def test_prefixes_of_launchers(tmp_path, prefix):
    lines = (GOLDEN / "h_console.stdout").read_text().splitlines()
    (tmp_path / "a.stdout").write_text("".join(f"{prefix}{line}\n" for line in lines))
    (run,) = logs.read([tmp_path]).runs
    assert (run.family, run.val) == ("H", only("h_console.stdout").val)


def test_other_lines_are_no_prefixed_steps(tmp_path):
    (tmp_path / "a.stdout").write_text("tailavg step:3000/3000 val_loss:3.1 train_time:500.000s step_avg:172.41ms\n")
    assert logs.read([tmp_path]).runs == []


def test_dates():
    """Of the environment of peers, of the name of the run directory of ours, or of a header that says it."""
    noon = 1795237200.0                                                   # 2026-11-21 05:00 in whatever zone
    assert only("d_timing.txt").started == noon and only("h_console.stdout").started is None
    first, second = read("g_trials.txt").runs
    assert (first.started, second.started) == (noon, noon + 521.5)
    assert only("ours/done").started is None
    for header, expected in (({"started": "2026-11-21T05:00:00"}, noon), ({"started": "yesterday"}, None),
                             ({"run_dir": "logs/20261121-050000-x-1"}, noon), ({"run_dir": "runs/2026"}, None),
                             ({"run_dir": "/a/20261121-050000-x-1/seed_3"}, noon)):
        run = logs.Run(Path("x"), "ours", facts={"config": header, **header})
        assert logs.date_of_ours(run) == expected


@pytest.fixture
def deaf():
    """A process that ends at no SIGTERM: its readers have to."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


def test_several_readers_read_what_one_reads(monkeypatch, deaf):
    """In the same order; what cannot be read is said by either."""
    one = logs.read([GOLDEN])
    monkeypatch.setattr(logs, "SEVERAL_READERS_BYTES", 0)
    monkeypatch.setattr(logs, "cores", lambda: 3)
    monkeypatch.setattr(logs, "PARTS_PER_READER", 2)                      # several files in each
    several = logs.read([GOLDEN])
    assert str(several) == str(one)                                       # nan is not equal to nan
    monkeypatch.setattr(logs, "READING_TIMEOUT_S", 1e-9)
    with pytest.raises(ToolError, match="nothing after"):
        logs.read([GOLDEN])
