"""The GPU day on a CPU: verdicts of steps that fail in every way, and dry runs."""
import ast
import gzip
import hashlib
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import day
import day_steps
import pytest
import torch
from day import Day, Step
from day_steps import Verdict
from dry_run import price

import train_gpt as tg

SCRIPT = Path(day.__file__)

def run_day(out: Path, *flags: str, limit: float = 60) -> tuple[int, list[str], dict]:
    """Run day.py as a process; return its exit status, its lines, and day.json."""
    command = [sys.executable, str(SCRIPT), "--device=cpu", f"--out={out}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines(), json.loads((out / "day.json").read_text())

def test_main__one_step_on_a_cpu(tmp_path) -> None:
    """The directory contains an earlier step and a file of the user. Neither is changed."""
    out = tmp_path / "day"
    (out / "ceilings").mkdir(parents=True)
    (out / "ceilings.txt").write_text("mine")
    source = hashlib.sha256(Path(tg.__file__).read_bytes()).hexdigest()
    earlier = dict(name="operations", verdict="red", seconds=1, figures={}, reason="planted")
    (out / "day.json").write_text(json.dumps(dict(device="cpu", source_sha256=source, steps=[earlier])))
    status, lines, found = run_day(out, "--parts=ceilings")
    assert status == 1 and [step["name"] for step in found["steps"]] == ["preflight", "ceilings", "operations"]
    assert [step["verdict"] for step in found["steps"]] == ["dry run", "dry run", "red"]
    assert lines[-1] == f"day: RED, 3 of 10 steps: operations red; {out}/day.json" and len(lines) == 3
    assert (out / "ceilings.txt").read_text() == "mine"
    rates = price.load(out / "rates_measured.json")
    assert price.Card(rates, "cpu").rates["bfloat16"] == found["steps"][1]["figures"]["rates"]["bfloat16"] > 0

@pytest.mark.slow
def test_main__all_steps_on_a_cpu(tmp_path) -> None:
    status, lines, found = run_day(tmp_path, "--full", limit=900)
    assert status == 0, lines
    assert [(step["name"], step["verdict"]) for step in found["steps"]] == [(name, "dry run") for name in day.STEPS]
    assert found["verdict"] == "dry run" and all(step["figures"] for step in found["steps"])
    assert list((tmp_path / "records").glob("*_Day/result.json"))

@pytest.mark.slow
def test_main__sigterm_ends_the_step(tmp_path) -> None:
    command = [sys.executable, str(SCRIPT), "--device=cpu", f"--out={tmp_path}", "--parts=stages"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "stages/log.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert json.loads((tmp_path / "day.json").read_text())["verdict"] == "unfinished"
    assert json.loads((tmp_path / "stages/log.jsonl").read_text().splitlines()[-1])["type"] == "aborted"


# ---- Verdicts
FORK = """import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.fork(), flush=True)
time.sleep(99)"""
WRITE = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"

def ready(gpu_day: Day, figures: dict) -> list[str]:
    gpu_day.facts |= dict(gpus=1, capability=[9, 0])
    return []

def fails(gpu_day: Day, figures: dict) -> list[str]:
    gpu_day.call("fails", "-c", "print('no such kernel'); raise SystemExit(3)")
    return []

def hangs(gpu_day: Day, figures: dict) -> list[str]:
    """A child of the step ignores SIGTERM, too."""
    gpu_day.call("hangs", "-c", FORK)
    return []

def dies(gpu_day: Day, figures: dict) -> list[str]:
    gpu_day.call("dies", "-c", "import os; os.kill(os.getpid(), 9)")
    return []

def one_rank_dies(gpu_day: Day, figures: dict) -> list[str]:
    gpu_day.call("ranks", "-c", "import os; os.kill(os.getpid(), 9 * int(os.environ['RANK']))", ranks=2)
    return []

def writes_garbage(gpu_day: Day, figures: dict) -> list[str]:
    gpu_day.call("garbage", "-c", WRITE, str(gpu_day.out / "garbage.json"), "{[")
    figures |= json.loads((gpu_day.out / "garbage.json").read_text())
    return []

def writes_nothing(gpu_day: Day, figures: dict) -> list[str]:
    figures |= json.loads((gpu_day.out / "nothing.json").read_text())
    return []

def is_slow(gpu_day: Day, figures: dict) -> list[str]:
    figures["ms"] = 3
    return ["3 ms", "2 were expected"]

def is_impossible(gpu_day: Day, figures: dict) -> list[str]:
    raise Verdict("not required", "one GPU")

def lacks_pytest(gpu_day: Day, figures: dict) -> list[str]:
    raise Verdict("skipped", "no pytest")

@pytest.fixture
def judge_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[dict]]]:
    """Return a function that runs preflight and these steps, and returns the exit status and the steps in day.json."""
    def judge(*steps: Step, device: str = "cuda", flags: tuple[str, ...] = (),
              preflight: Callable[..., object] = ready) -> tuple[int, list[dict]]:
        named = {step.judge.__name__: step for step in (Step(preflight, 0, 60), *steps)}
        monkeypatch.setattr(day, "STEPS", {name.replace("ready", "preflight"): step for name, step in named.items()})
        status = day.main([f"--device={device}", f"--out={tmp_path}", f"--parts={','.join(day.STEPS)}", *flags])
        return status, json.loads((tmp_path / "day.json").read_text())["steps"][1:]
    monkeypatch.setattr(day, "GRACE_S", 0.3)
    return judge

@pytest.mark.parametrize("judge, verdict, status, reason", [
    (fails, "red", 1, "fails ended with status 3: no such kernel"), (dies, "red", 1, "dies was killed by signal 9"),
    (one_rank_dies, "red", 1, "ranks was killed by signal 9"),
    (writes_garbage, "red", 1, "cannot be read: JSONDecodeError"),
    (writes_nothing, "red", 1, "cannot be read: FileNotFoundError"), (is_slow, "yellow", 3, "3 ms; 2 were expected"),
    (is_impossible, "not required", 0, "one GPU"), (lacks_pytest, "skipped", 1, "no pytest")])
def test_run_step__each_verdict(judge_steps, judge, verdict, status, reason) -> None:
    """The following step is still judged, and finds a complete day.json."""
    def after(gpu_day: Day, figures: dict) -> list[str]:
        figures["seen"] = json.loads((gpu_day.out / "day.json").read_text())
        return []

    found, (step, last) = judge_steps(Step(judge, 0, 60), Step(after, 0, 60))
    assert (found, step["verdict"]) == (status, verdict) and reason in step["reason"]
    assert last["verdict"] == "green" and last["figures"]["seen"]["verdict"] == "unfinished"
    assert last["figures"]["seen"]["steps"][1] == step
    on_cpu, (step, last) = judge_steps(Step(judge, 0, 60), Step(after, 0, 60), device="cpu")
    assert (on_cpu, step["verdict"]) == ((0, "dry run") if judge is is_slow else (status, verdict))
    assert last["verdict"] == "dry run"

def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True

@pytest.mark.parametrize("max_seconds, flags, verdict", [(3.0, (), "red"), (60, ("--limit=3",), "skipped")])
def test_run_step__that_hangs(judge_steps, tmp_path, max_seconds, flags, verdict) -> None:
    """Its process group is killed. A step that --limit ends is skipped, not red.

    3 s are enough for the process to start and print on a busy machine.
    """
    status, (step, last) = judge_steps(Step(hangs, 0, max_seconds), Step(is_impossible, 0, 60), flags=flags)
    assert status == 1 and step["verdict"] == verdict and "did not end within" in step["reason"]
    assert last["verdict"] == ("not required" if verdict == "red" else "skipped")
    child = max(map(int, (tmp_path / "hangs.txt").read_text().split()))       # the child itself prints 0
    deadline = time.monotonic() + 60
    while not is_gone(child):
        assert time.monotonic() < deadline, "a process of the step has outlived it"

def test_run_step__without_time_or_preflight(judge_steps) -> None:
    status, (step,) = judge_steps(Step(is_slow, 40, 60), flags=("--limit=30",))
    assert status == 1 and step["verdict"] == "skipped" and "the step needs 40" in step["reason"]

    def preflight(gpu_day: Day, figures: dict) -> list[str]:
        gpu_day.facts |= dict(gpus=1)
        raise Verdict("red", "no GPU")

    status, (step,) = judge_steps(Step(is_slow, 0, 60), preflight=preflight)
    assert (status, step["verdict"], step["reason"]) == (1, "skipped", "preflight is red")

def test_earlier_steps__of_another_trainer_or_unreadable(tmp_path) -> None:
    path = tmp_path / "day.json"
    step = dict(name="loss", verdict="green")
    path.write_text(json.dumps(dict(device="cuda", steps=[step, dict(step, verdict="fine")])))
    assert day.earlier_steps(path, dict(device="cpu")) == {} == day.earlier_steps(path, dict(source="x"))
    path.write_text(json.dumps(dict(device="cuda", steps=[step])))
    assert day.earlier_steps(path, dict(device="cuda")) == dict(loss=step)
    for text in ("", "[]", '{"device": "cuda"}', '{"device": "cuda", "steps": [3]}'):
        path.write_text(text)
        assert day.earlier_steps(path, dict(device="cuda")) == {}

def test_main__without_a_gpu_or_with_an_unknown_part(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        day.main(["--parts=atention"])
    assert "atention; expected some of preflight, attention," in capsys.readouterr().err
    if not torch.cuda.device_count():
        assert day.main([f"--out={tmp_path}", "--parts=loss"]) == 1
        assert "finds no GPU" in capsys.readouterr().out

def test_code_here__uses_only_names_that_exist(comm) -> None:
    """Also in branches that only a GPU runs: every `tg.name`, and every `comm.name` of a communicator."""
    missing = []
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = dict(tg=tg, comm=comm).get(ast.unparse(node.value).rpartition(".")[2])
                if owner is not None and not hasattr(owner, node.attr):
                    missing.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert missing == []

def test_write_text__is_a_shard_of_gpt2(tmp_path) -> None:
    day.write_text(tmp_path / "text.bin", "val")
    patterns = f"{tmp_path}/text.bin", "data/pocket/pocket_val_*.bin"
    (header,), (source,) = map(tg.read_shard_headers, patterns)
    shard, pocket = tg.load_shard(header), tg.load_shard(source)
    assert (header.vocab_size, header.bos_id) == (tg.GPT2_VOCAB, tg.GPT2_BOS_ID) and header.num_tokens == source.num_tokens
    assert (shard.doc_starts == pocket.doc_starts).all()
    assert ((shard.tokens == pocket.tokens) | (pocket.tokens == source.bos_id)).all()


# ---- Steps
def red_reason(judge: Callable[..., object], *args: object) -> str:
    """Return the reason of a red verdict, or "" for a step without remarks."""
    try:
        remarks = judge(*args)
    except Verdict as found:
        assert found.args[0] == "red"
        return found.args[1]
    assert not remarks
    return ""

def returning(answer: object) -> Callable[..., object]:
    def call(*_: object, **_flags: object) -> object:
        return answer
    return call

def fake_day(**found: dict | Verdict) -> SimpleNamespace:
    """Build a day on an H100 whose probes return these results by name."""
    def probe(probe: str, *_: str, name: str = "", **__: float) -> dict:
        answer = found[(name or probe).removeprefix("attention-")]
        if isinstance(answer, Verdict):
            raise answer
        return answer
    return SimpleNamespace(probe=probe, cpu=False, device="cuda", out=Path("out"), world_size=returning(8), figures={},
                           facts=dict(gpus=8, capability=[9, 0], kernels=["FA4", "FA3", "varlen"], card="NVIDIA H100"))

def attention_result(name: str, ms: float, **more: list) -> dict:
    return dict(kernel=f"{name} (package 1)", wrong=[], stages=[dict(ms=ms)]) | more

UNAVAILABLE = dict(refused="no module")
HANGS = Verdict("red", "attention-FA4 did not end within 60 s")
@pytest.mark.parametrize("kernels, remark", [
    (dict(FA4=attention_result("FA4", 1), FA3=attention_result("FA3", 2), varlen=attention_result("varlen", 3)), ""),
    (dict(FA4=attention_result("FA4", 2), FA3=attention_result("FA3", 1), varlen=UNAVAILABLE), "--attention=FA3"),
    (dict(FA4=UNAVAILABLE, FA3=UNAVAILABLE, varlen=attention_result("varlen", 3)), day_steps.INSTALL_HINT),
    (dict(FA4=HANGS, FA3=attention_result("FA3", 1), varlen=UNAVAILABLE), "did not end within 60 s")])
def test_attention__green_or_yellow(kernels, remark) -> None:
    remarks = day_steps.attention(fake_day(**kernels), {})
    assert len(remarks) == bool(remark) and remark in "".join(remarks)

@pytest.mark.parametrize("kernels, reason", [
    (dict(FA4=UNAVAILABLE, FA3=UNAVAILABLE, varlen=UNAVAILABLE), "no attention kernel works: FA4: no module"),
    (dict(FA4=attention_result("FA4", 1, wrong=["off by 3"]), FA3=UNAVAILABLE, varlen=UNAVAILABLE),
     "FA4 passes the trainer's check: off by 3")])
def test_attention__red(kernels, reason) -> None:
    with pytest.raises(Verdict, match=reason):
        day_steps.attention(fake_day(**kernels), {})

def test_slow_attention__by_card() -> None:
    a100 = fake_day()
    a100.facts["capability"] = [8, 0]
    assert day_steps.slow_attention(a100, "varlen (torch 2)") == []
    assert day_steps.slow_attention(fake_day(), "varlen (torch 2)")
    assert not day_steps.slow_attention(fake_day(), "FA3 (x 1)")

def ranks_result(*losses: float, hashes: str = "aa") -> dict:
    return dict(losses=losses, hashes=list(hashes))

@pytest.mark.parametrize("several, reason", [
    (ranks_result(5.0, 4.001), ""), (ranks_result(5.0, 4.02), "differ by 5.0e-03"),
    (ranks_result(5.0, math.nan), "differ by nan"), (ranks_result(5.0, 4.0, hashes="ab"), "different weights")])
def test_ranks__equal_or_red(several, reason) -> None:
    gpu_day = fake_day(**{"ranks-1": ranks_result(5.0, 4.0), "ranks-8": several})
    found = red_reason(day_steps.ranks, gpu_day, {})
    assert reason in found and bool(reason) == bool(found)

@pytest.mark.parametrize("step, loss, is_right", [
    (250, 4.546, True), (250, 4.560, True), (250, 4.563, False), (250, 4.529, False), (250, math.nan, False),
    (1547, 3.285, False), (5, 99.0, True)])
def test_check_loss__against_the_published(tmp_path, step, loss, is_right) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps(dict(type="val", step=step, val_loss=loss)) + "\n")
    found = red_reason(day_steps.check_loss, tmp_path, step, {})
    assert found == "" if is_right else f"at step {step}, published" in found

def test_ceilings__reports_slow_rates(tmp_path) -> None:
    """Rates that were not measured are copied from the table, and a Card can be built from all of them."""
    assumed = price.Card(price.load(price.RATES), "H100").rates
    gpu_day = fake_day(ceilings=dict(rates=dict(bfloat16=0.8 * assumed["bfloat16"], memory=0.9 * assumed["memory"])))
    gpu_day.out = tmp_path
    gpu_day.figures["attention"] = dict(FA3=dict(stages=[dict(flop_per_s=1e14)]), FA4=UNAVAILABLE)
    first, second = day_steps.ceilings(gpu_day, {})
    assert first == "bfloat16: 0.80 of the rate that predictions assume for H100" and second.startswith("FA3: 0.22 of")
    measured = price.Card(price.load(tmp_path / "rates_measured.json"), "H100").rates
    assert measured["FA3"] == 1e14 and measured["link"] == assumed["link"]
    parts = day_steps.predicted_parts(gpu_day, "FA3 (flash-attn-3 1)")
    prediction = price.stored_prediction(price.load(price.EXPECTED_COSTS))["worlds"]["8"]["FA3"]
    expected = prediction["stages"]["stage 1"]["mean"]["parts"]
    assert parts["stage 1"]["products"] == pytest.approx(expected["products"] / 0.8)

def test_compare_stages__names_the_part_that_exceeds_the_prediction(tmp_path) -> None:
    config = dict(stages=[{}] * 4, num_scheduled_steps=60, num_extension_steps=10)
    lines = [dict(type="header", config=config)]
    lines += [dict(type="step", step=step, train_time_ms=30.0 * step) for step in range(1, 71)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [dict(cat="kernel", ts=0, dur=6000, name="nvjet_hsh_128x256"), dict(cat="cpu_op", ts=0, dur=9e9, name="x"),
              dict(cat="kernel", ts=6000, dur=20_000, name="flash_bwd_dq_dk_dv_loop"),
              dict(cat="gpu_memcpy", ts=28_000, dur=2000, name="Memcpy HtoD")]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump(dict(traceEvents=events), file)
    kernels = day_steps.kernel_groups(tmp_path / "trace.json.gz", 2, "kernel")
    assert kernels == dict({"attention backward": 10.0}, matmuls=3.0, copies=1.0, gaps=1.0)
    fast, slow = {"products": 20.0, "attention": 8.0}, {"products": 15.0, "attention": 5.0}
    predicted = {"stage 1": fast, "stage 2": slow, "stage 3": fast, "stage 4": slow}
    remarks = day_steps.compare_stages(tmp_path, predicted, figures := dict(kernels=kernels))
    assert remarks == ["stage 2: 30.0 ms a step, 1.50 of the predicted 20.0",
                       "largest excess: attention, +5.0 ms in a profiled step of the extension"]
    assert figures["stage 1"] == dict(ms=pytest.approx(30.0), predicted_ms=28.0)
    with pytest.raises(Verdict, match="no events of category gpu"):
        day_steps.kernel_groups(tmp_path / "trace.json.gz", 2, "gpu")

PEAK_MIB = day_steps.predicted_peak_mib(fake_day())

def write_run(folder: Path, losses: list[float], **result: object) -> Path:
    """Write the files that `stages` and `match` read of a run."""
    folder.mkdir()
    lines = [dict(type="header", config={}, attention="FA3 (x 1)", head="fp8", world_size=8)]
    lines += [dict(type="step", step=step, train_time_ms=30.0, train_loss=1.75 * loss, train_loss_next=loss)
              for step, loss in enumerate(losses, 1)]
    lines.append(dict(type="result", val_loss=7.0, peak_memory_mib=dict(allocated=PEAK_MIB)) | result)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with gzip.open(folder / "trace_rank0.json.gz", "wt") as file:
        json.dump(dict(traceEvents=[dict(cat="kernel", ts=0, dur=1, name="x")]), file)
    return folder

@pytest.mark.parametrize("result, reason", [
    ({}, ""), (dict(recompiles=2), "2 graphs were compiled after the warm-up"),
    (dict(peak_memory_mib=dict(allocated=PEAK_MIB * 5 // 4)), f"predicted {PEAK_MIB} MiB"),
    (dict(val_loss=10.9), "loss 10.900 after 1 steps"), (dict(val_loss=math.nan), "loss nan")])
def test_stages__right_or_red(tmp_path, result, reason) -> None:
    gpu_day = fake_day()
    gpu_day.out = tmp_path
    gpu_day.train = returning(write_run(tmp_path / "run", [10.0], **result))
    found = red_reason(day_steps.stages, gpu_day, {})
    assert reason in found and bool(reason) == bool(found)

@pytest.mark.parametrize("change, is_right", [(0.03, True), (0.06, False), (math.nan, False)])
def test_match__the_run_of_stages_against_float32(tmp_path, change, is_right) -> None:
    losses = [10.0 - step for step in range(12)]
    gpu_day = fake_day()
    gpu_day.out = tmp_path
    gpu_day.facts["stages_first_batch"] = "[(256, 1, 3, 1.0, (1.0,), (1.0,), False)] * 2"
    gpu_day.figures["stages"] = dict(run_dir=str(write_run(tmp_path / "stages", losses + [-3.0])))
    gpu_day.train = returning(write_run(tmp_path / "plain", losses[:11] + [losses[11] + change]))
    found = red_reason(day_steps.match, gpu_day, {})
    assert found == "" if is_right else "those of float32" in found

@pytest.mark.parametrize("summary, is_right", [("2 passed, 9 skipped in 3 s", True), ("11 skipped in 3 s", False)])
def test_tests__red_if_all_are_skipped(summary, is_right) -> None:
    gpu_day = fake_day()
    gpu_day.facts["pytest"] = "9"
    gpu_day.call = returning(summary)
    found = red_reason(day_steps.tests, gpu_day, {})
    assert found == "" if is_right else "no test passed" in found

@pytest.mark.parametrize("preset, steps", [("record", 1507), ("record", 61), ("tiny", 9), ("race", 191)])
def test_stage_spans__as_the_schedule_has_them(preset, steps) -> None:
    cfg = tg.Config(**tg.PRESETS[preset] | dict(num_scheduled_steps=steps))
    schedule = tg.Schedule(cfg)
    spans = price.stage_spans(vars(cfg), schedule.planned_steps)
    assert [(span.start, span.stop) for span in spans] == list(zip(schedule.stage_starts, schedule.stage_ends))
