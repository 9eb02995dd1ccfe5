"""The GPU day on a CPU: verdicts of steps that fail in every way, and dry runs."""
import ast
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import day
import pytest
import torch
from common import processes_with, wait_until
from day import Day, Facts, Verdict

import train_gpt as tg

Judge = Callable[[Day, Facts], list[str]]

RUN = [sys.executable, day.__file__, "--device=cpu"]

@pytest.mark.parametrize("flags, names", [
    (["--parts=tests"], ["preflight", "tests"]), pytest.param([], list(day.STEPS), marks=pytest.mark.slow)])
def test_main__on_a_cpu(tmp_path, flags, names) -> None:
    done = subprocess.run([*RUN, f"--out={tmp_path}/day", *flags], capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    found = json.loads((tmp_path / "day/day.json").read_text())
    assert [(step["name"], step["verdict"]) for step in found["steps"]] == [(name, "dry run") for name in names]
    assert found["verdict"] == "dry run" and all(step["figures"] for step in found["steps"])


# ---- Verdicts
def python(code: str, ranks: int = 0) -> Judge:
    def judge(gpu_day: Day, figures: Facts) -> list[str]:
        gpu_day.call("it", "-c", code, ranks=ranks)
        return []
    return judge

def returning(answer: object) -> Callable[..., object]:
    def call(*_: object, **_flags: object) -> object:
        return answer
    return call

def ready(gpu_day: Day, figures: Facts) -> list[str]:
    figures |= dict(gpus=1, capability=[9, 0])
    return []

def reads_nothing(gpu_day: Day, figures: Facts) -> list[str]:
    return json.loads((gpu_day.out / "nothing.json").read_text())

def sees_the_file(gpu_day: Day, figures: Facts) -> list[str]:
    figures["seen"] = json.loads((gpu_day.out / "day.json").read_text())
    return []

@pytest.fixture
def judge_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, Facts, Facts]]:
    """Return a function that runs preflight and two steps; it returns the exit status and both steps in day.json."""
    def judge(first: tuple[Judge, float], *flags: str, preflight: Judge = ready) -> tuple:
        steps = dict(preflight=(preflight, 60), first=first, last=(sees_the_file, 60))
        monkeypatch.setattr(day, "STEPS", steps)
        status = day.main([f"--out={tmp_path}/day", "--parts=first,last", *flags])
        return status, *json.loads((tmp_path / "day/day.json").read_text())["steps"][1:]
    return judge

SLOW = returning(["3 ms", "2 were expected"])
KILL = "import os; os.kill(os.getpid(), 9 * int(os.environ['RANK']))"

@pytest.mark.parametrize("judge, verdict, status, reason", [
    (python("print('no such kernel'); raise SystemExit(3)"), "red", 1, "it ended with status 3: no such kernel"),
    (python(KILL, ranks=2), "red", 1, "it was killed by signal 9"),
    (reads_nothing, "red", 1, "cannot be read: FileNotFoundError"), (SLOW, "yellow", 3, "3 ms; 2 were expected")])
def test_run_step__each_verdict(judge_steps, judge, verdict, status, reason) -> None:
    """The following step is still judged, and finds a complete day.json."""
    found, step, last = judge_steps((judge, 60))
    assert (found, step["verdict"]) == (status, verdict) and reason in step["reason"]
    assert last["verdict"] == "green" and last["figures"]["seen"]["verdict"] == "unfinished"
    assert last["figures"]["seen"]["steps"][1] == step

@pytest.mark.parametrize("max_seconds, flags, verdict", [(2, (), "red"), (60, ("--limit=2",), "skipped")])
def test_run_step__that_hangs(judge_steps, tmp_path, monkeypatch, max_seconds, flags, verdict) -> None:
    """Its process group is killed. A step that --limit ends is skipped, not red."""
    monkeypatch.setenv("TEST_OUT", str(tmp_path))
    hang = "import os, time; os.fork(); time.sleep(999)"
    status, step, last = judge_steps((python(hang), max_seconds), *flags)
    assert status == 1 and step["verdict"] == verdict and "did not end within" in step["reason"]
    assert last["verdict"] == ("green" if verdict == "red" else "skipped")
    wait_until(lambda: not processes_with(f"TEST_OUT={tmp_path}"))

def test_code_here__uses_only_names_that_exist() -> None:
    """Also in branches that only a GPU runs: every `tg.name`, and every `comm.name` of a communicator."""
    owners = dict(tg=tg, comm=tg.Communicator(torch.device("cpu")))
    missing = []
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = owners.get(ast.unparse(node.value).rpartition(".")[2])
                if owner is not None and not hasattr(owner, node.attr):
                    missing.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert missing == []


# ---- Steps
def fake_day(out: Path, **found: dict) -> SimpleNamespace:
    """Build a day on an H100 whose probes return these results by name."""
    facts = dict(gpus=8, capability=[9, 0], card="NVIDIA H100", memory_gib=79,
                 stages_first_batch="[(256, 1, 3, 1.0, (1.0,), (1.0,), False)] * 2")
    return SimpleNamespace(probe=found.get, cpu=False, out=out, world_size=returning(8), figures=dict(preflight=facts))

def verdict_of(judge: Judge, gpu_day: SimpleNamespace) -> tuple[str, str]:
    try:
        remarks = judge(gpu_day, {})
    except Verdict as found:
        return found.args
    return ("yellow", "; ".join(remarks)) if remarks else ("green", "")

def write_log(folder: Path, losses: list[float], ms: float = 1.0, attention: str = "FA3 (x 1)",
              **result: object) -> Path:
    """Write the log of a run on eight GPUs whose first 20 steps, before the second stage, take `ms` each."""
    folder.mkdir()
    config = dict(stages=[{}] * 4, num_scheduled_steps=60, num_extension_steps=10)
    lines = [dict(type="header", config=config, attention=attention, head="fp8", world_size=8)]
    times = itertools.accumulate([ms] * 20 + [1.0] * 50)
    lines += [dict(type="step", step=step, train_time_ms=time_ms, train_loss=1.75 * loss, train_loss_next=loss)
              for step, (loss, time_ms) in enumerate(zip(losses, times), 1)]
    lines.append(dict(type="result", val_loss=7.0, peak_memory_mib=dict(allocated=PEAK_MIB)) | result)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder

PREDICTED, PEAK_MIB = day.predicted(fake_day(Path()), "FA3 (x 1)")

@pytest.mark.parametrize("found, verdict, reason", [
    ({}, "green", ""), (dict(ms=1.2 * PREDICTED["stage 1"]), "yellow", "stage 1: "),
    (dict(attention="varlen (torch 2)"), "yellow", "FlashAttention 2"),
    (dict(recompiles=2), "red", "2 graphs were compiled after the warm-up"),
    (dict(peak_memory_mib=dict(allocated=PEAK_MIB * 5 // 4)), "red", f"predicted {PEAK_MIB} MiB"),
    (dict(val_loss=10.9), "red", "loss 10.900 after 70 steps"), (dict(val_loss=math.nan), "red", "loss nan")])
def test_stages__right_slow_or_wrong(tmp_path, found, verdict, reason) -> None:
    gpu_day = fake_day(tmp_path)
    gpu_day.train = returning(write_log(tmp_path / "run", 70 * [10.0], **found))
    judged, text = verdict_of(day.stages, gpu_day)
    assert judged == verdict and reason in text, text

@pytest.mark.parametrize("change, verdict", [(0.03, "green"), (0.06, "red"), (math.nan, "red")])
def test_match__the_run_of_stages_against_float32(tmp_path, change, verdict) -> None:
    losses = [10.0 - step for step in range(12)]
    gpu_day = fake_day(tmp_path)
    gpu_day.figures["stages"] = dict(run_dir=str(write_log(tmp_path / "stages", losses + [-3.0])))
    gpu_day.train = returning(write_log(tmp_path / "plain", losses[:11] + [losses[11] + change]))
    assert verdict_of(day.match, gpu_day)[0] == verdict
