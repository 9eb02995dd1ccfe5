"""The GPU day on a CPU: verdicts of steps that fail in every way, and dry runs."""
import ast
import gzip
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
import day_probes
import day_steps
import pytest
import torch
from day import Day, Step
from day_steps import Facts, Verdict
from dry_run import price

import train_gpt as tg

Judge = Callable[[Day, Facts], list[str]]

def run_day(out: Path, *flags: str, limit: float = 60) -> tuple[int, list[str], dict]:
    """Run day.py as a process; return its exit status, its lines, and day.json."""
    command = [sys.executable, day.__file__, "--device=cpu", f"--out={out}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines(), json.loads((out / "day.json").read_text())

def test_main__one_step_on_a_cpu(tmp_path) -> None:
    status, lines, found = run_day(tmp_path / "day", "--parts=ceilings")
    assert status == 0 and len(lines) == 3 and lines[-1] == f"day: DRY RUN, 2 of 10 steps; {tmp_path}/day/day.json"
    assert [(step["name"], step["verdict"]) for step in found["steps"]] == [
        ("preflight", "dry run"), ("ceilings", "dry run")]
    assert found["steps"][1]["figures"]["rates"]["bfloat16"] > 0

@pytest.mark.slow
def test_main__all_steps_on_a_cpu(tmp_path) -> None:
    status, lines, found = run_day(tmp_path / "day", "--full", limit=900)
    assert status == 0, lines
    assert [(step["name"], step["verdict"]) for step in found["steps"]] == [(name, "dry run") for name in day.STEPS]
    assert found["verdict"] == "dry run" and all(step["figures"] for step in found["steps"])
    assert list((tmp_path / "day/records").glob("*_Day/result.json"))

@pytest.mark.slow
def test_main__sigterm_ends_the_step(tmp_path) -> None:
    out = tmp_path / "day"
    command = [sys.executable, day.__file__, "--device=cpu", f"--out={out}", "--parts=stages"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (out / "stages/log.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert json.loads((out / "day.json").read_text())["verdict"] == "unfinished"
    assert json.loads((out / "stages/log.jsonl").read_text().splitlines()[-1])["type"] == "aborted"


# ---- Verdicts
FORK = """import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.fork(), flush=True)
time.sleep(99)"""                        # a child that ignores SIGTERM, too

def python(code: str, ranks: int = 0) -> Judge:
    def judge(gpu_day: Day, figures: Facts) -> list[str]:
        gpu_day.call("it", "-c", code, ranks=ranks)
        return []
    return judge

def returning(answer: object) -> Callable[..., object]:
    def call(*_: object, **_flags: object) -> object:
        return answer
    return call

def giving(verdict: str, reason: str) -> Judge:
    def judge(gpu_day: Day, figures: Facts) -> list[str]:
        raise Verdict(verdict, reason)
    return judge

def ready(gpu_day: Day, figures: Facts) -> list[str]:
    gpu_day.facts |= dict(gpus=1, capability=[9, 0])
    return []

def reads_garbage(gpu_day: Day, figures: Facts) -> list[str]:
    return json.loads("{[")

def reads_nothing(gpu_day: Day, figures: Facts) -> list[str]:
    return json.loads((gpu_day.out / "nothing.json").read_text())

def sees_the_file(gpu_day: Day, figures: Facts) -> list[str]:
    figures["seen"] = json.loads((gpu_day.out / "day.json").read_text())
    return []

@pytest.fixture
def judge_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, Facts, Facts]]:
    """Return a function that runs preflight and two steps; it returns the exit status and both steps in day.json."""
    monkeypatch.setattr(day, "GRACE_S", 0.3)

    def judge(first: Step, last: Judge, *flags: str, device: str = "cuda", preflight: Judge = ready) -> tuple:
        steps = dict(preflight=Step(preflight, 0, 60), first=first, last=Step(last, 0, 60))
        monkeypatch.setattr(day, "STEPS", steps)
        out = tmp_path / device
        status = day.main([f"--device={device}", f"--out={out}", "--parts=first,last", *flags])
        return status, *json.loads((out / "day.json").read_text())["steps"][1:]
    return judge

SLOW = returning(["3 ms", "2 were expected"])
KILL = "import os; os.kill(os.getpid(), 9"

@pytest.mark.parametrize("judge, verdict, status, reason", [
    (python("print('no such kernel'); raise SystemExit(3)"), "red", 1, "it ended with status 3: no such kernel"),
    (python(f"{KILL})"), "red", 1, "it was killed by signal 9"),
    (python(f"{KILL} * int(os.environ['RANK']))", ranks=2), "red", 1, "it was killed by signal 9"),
    (reads_garbage, "red", 1, "cannot be read: JSONDecodeError"),
    (reads_nothing, "red", 1, "cannot be read: FileNotFoundError"), (SLOW, "yellow", 3, "3 ms; 2 were expected"),
    (giving("not required", "one GPU"), "not required", 0, "one GPU"),
    (giving("skipped", "no pytest"), "skipped", 1, "no pytest")])
def test_run_step__each_verdict(judge_steps, judge, verdict, status, reason) -> None:
    """The following step is still judged, and finds a complete day.json."""
    found, step, last = judge_steps(Step(judge, 0, 60), sees_the_file)
    assert (found, step["verdict"]) == (status, verdict) and reason in step["reason"]
    assert last["verdict"] == "green" and last["figures"]["seen"]["verdict"] == "unfinished"
    assert last["figures"]["seen"]["steps"][1] == step
    on_cpu, step, last = judge_steps(Step(judge, 0, 60), sees_the_file, device="cpu")
    assert (on_cpu, step["verdict"]) == ((0, "dry run") if judge is SLOW else (status, verdict))
    assert last["verdict"] == "dry run"

def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True

@pytest.mark.parametrize("max_seconds, flags, verdict", [(2, (), "red"), (60, ("--limit=2",), "skipped")])
def test_run_step__that_hangs(judge_steps, tmp_path, max_seconds, flags, verdict) -> None:
    """Its process group is killed. A step that --limit ends is skipped, not red."""
    status, step, last = judge_steps(Step(python(FORK), 0, max_seconds), sees_the_file, *flags)
    assert status == 1 and step["verdict"] == verdict and "did not end within" in step["reason"]
    assert last["verdict"] == ("green" if verdict == "red" else "skipped")
    child = max(map(int, (tmp_path / "cuda/it.txt").read_text().split()))     # the child itself prints 0
    deadline = time.monotonic() + 60
    while not is_gone(child):
        assert time.monotonic() < deadline, "a process of the step has outlived it"

@pytest.mark.parametrize("flags, preflight, reason", [
    (["--limit=30"], ready, "the step needs 40"), ([], giving("red", "no GPU"), "preflight is red")])
def test_run_step__without_time_or_preflight(judge_steps, flags, preflight, reason) -> None:
    status, step, _ = judge_steps(Step(SLOW, 40, 60), SLOW, *flags, preflight=preflight)
    assert status == 1 and step["verdict"] == "skipped" and reason in step["reason"]

def test_main__without_a_gpu_or_with_wrong_flags(tmp_path, capsys) -> None:
    for flag, message in (("--parts=atention", "atention; expected some of"), (f"--out={tmp_path}", "new directory")):
        with pytest.raises(SystemExit, match="2"):
            day.main([flag])
        assert message in capsys.readouterr().err
    if not torch.cuda.device_count():
        assert "finds no GPU" in day_probes.preflight(SimpleNamespace(device="cuda"))["problems"][-1]

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

def test_write_text__is_a_shard_of_gpt2(tmp_path) -> None:
    day.write_text(tmp_path / "text.bin", "val")
    patterns = f"{tmp_path}/text.bin", "data/pocket/pocket_val_*.bin"
    (header,), (source,) = map(tg.read_shard_headers, patterns)
    shard, pocket = tg.load_shard(header), tg.load_shard(source)
    assert (header.vocab_size, header.bos_id, header.num_tokens) == (tg.GPT2_VOCAB, tg.GPT2_BOS_ID, source.num_tokens)
    assert (shard.doc_starts == pocket.doc_starts).all()
    assert ((shard.tokens == pocket.tokens) | (pocket.tokens == source.bos_id)).all()


# ---- Steps
def fake_day(out: Path, **found: dict | Verdict) -> SimpleNamespace:
    """Build a day on an H100 whose probes return these results by name."""
    def probe(probe: str, *_: str, name: str = "", **__: float) -> dict:
        answer = found[(name or probe).replace("-", "_")]
        if isinstance(answer, Verdict):
            raise answer
        return answer
    facts = dict(gpus=8, capability=[9, 0], kernels=["FA4", "FA3", "varlen"], card="NVIDIA H100", pytest="9",
                 stages_first_batch="[(256, 1, 3, 1.0, (1.0,), (1.0,), False)] * 2")
    return SimpleNamespace(probe=probe, cpu=False, device="cuda", out=out, world_size=returning(8), figures={},
                           facts=facts)

def verdict_of(judge: Callable[..., list[str] | None], *args: object) -> tuple[str, str]:
    try:
        remarks = judge(*args)
    except Verdict as found:
        return found.args
    return ("yellow", "; ".join(remarks)) if remarks else ("green", "")

def attention(name: str, ms: float, *wrong: str) -> Facts:
    return dict(kernel=f"{name} (package 1)", wrong=wrong, stages=[dict(ms=ms)])

def attentions(fa4: Facts | Verdict, fa3: Facts, varlen: Facts) -> Facts:
    return dict(attention_FA4=fa4, attention_FA3=fa3, attention_varlen=varlen)

def ranks(*losses: float, hashes: str = "aa") -> Facts:
    return dict(ranks_1=dict(losses=[5.0, 4.0]), ranks_8=dict(losses=losses, hashes=list(hashes)))

def operation(*wrong: str, **ms: float) -> Facts:
    return dict(operations=dict(left_out=[], kernels=[dict(name="mlp", wrong=wrong, ms=ms)]))

NONE = dict(refused="no module")
HANGS = Verdict("red", "attention-FA4 did not end within 60 s")

@pytest.mark.parametrize("step, found, verdict, reason", [
    ("preflight", dict(preflight=dict(facts={}, problems=["no GPU"], remarks=["hot"])), "red", "no GPU"),
    ("preflight", dict(preflight=dict(facts={}, problems=[], remarks=["hot"])), "yellow", "hot"),
    ("attention", attentions(attention("FA4", 1), attention("FA3", 2), attention("varlen", 3)), "green", ""),
    ("attention", attentions(attention("FA4", 2), attention("FA3", 1), NONE), "yellow", "--attention=FA3"),
    ("attention", attentions(NONE, NONE, attention("varlen", 3)), "yellow", day_steps.INSTALL_HINT),
    ("attention", attentions(HANGS, attention("FA3", 1), NONE), "yellow", "did not end within 60 s"),
    ("attention", attentions(NONE, NONE, NONE), "red", "no attention kernel works: FA4: no module"),
    ("attention", attentions(attention("FA4", 1, "off by 3"), NONE, NONE), "red", "trainer's check: off by 3"),
    ("ranks", ranks(5.0, 4.001), "green", ""), ("ranks", ranks(5.0, 4.02), "red", "differ by 5.0e-03"),
    ("ranks", ranks(5.0, math.nan), "red", "differ by nan"),
    ("ranks", ranks(5.0, 4.0, hashes="ab"), "red", "different weights"),
    ("operations", operation(trainer=1.0, plain=1.0), "green", ""),
    ("operations", operation(trainer=1.2, plain=1.0), "yellow", "plain PyTorch takes 1.000"),
    ("operations", operation("mlp: output 0 is off"), "red", "output 0 is off")])
def test_step__each_verdict(tmp_path, step, found, verdict, reason) -> None:
    judged, text = verdict_of(getattr(day_steps, step), fake_day(tmp_path, **found), {})
    assert judged == verdict and reason in text, text

def test_slow_attention__by_card(tmp_path) -> None:
    a100 = fake_day(tmp_path)
    a100.facts["capability"] = [8, 0]
    assert day_steps.slow_attention(a100, "varlen (torch 2)") == []
    assert day_steps.slow_attention(fake_day(tmp_path), "varlen (torch 2)")

@pytest.mark.parametrize("step, loss, is_right", [
    (250, 4.546, True), (250, 4.560, True), (250, 4.563, False), (250, 4.529, False), (250, math.nan, False),
    (1547, 3.285, False), (5, 99.0, True)])
def test_check_loss__against_the_published(tmp_path, step, loss, is_right) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps(dict(type="val", step=step, val_loss=loss)) + "\n")
    verdict, text = verdict_of(day_steps.check_loss, tmp_path, step, {})
    assert verdict == "green" if is_right else f"at step {step}, published" in text

def test_ceilings__slow_rates_scale_the_predictions(tmp_path) -> None:
    assumed = price.Card(price.load(price.RATES), "H100").rates
    rates = dict(bfloat16=0.8 * assumed["bfloat16"], memory=0.9 * assumed["memory"])
    gpu_day = fake_day(tmp_path, ceilings=dict(rates=rates))
    gpu_day.figures = dict(attention=dict(FA3=dict(stages=[dict(flop_per_s=1e14)]), FA4=NONE), ceilings={})
    first, second = day_steps.ceilings(gpu_day, gpu_day.figures["ceilings"])
    assert first == "bfloat16: 0.80 of the rate that predictions assume for H100" and second.startswith("FA3: 0.22 of")
    parts = day_steps.predicted_parts(gpu_day, "FA3 (flash-attn-3 1)")
    prediction = price.stored_prediction(price.load(price.EXPECTED_COSTS))["worlds"]["8"]["FA3"]
    expected = prediction["stages"]["stage 1"]["mean"]["parts"]
    assert parts["stage 1"]["products"] == pytest.approx(expected["products"] / 0.8)
    assert parts["stage 1"]["attention"] == pytest.approx(expected["attention"] * assumed["FA3"] / 1e14)

def write_run(folder: Path, losses: list[float], events: list[Facts] = [], **result: object) -> Path:
    """Write the files that the steps read of a run: its log, and a trace of two steps."""
    folder.mkdir()
    config = dict(stages=[{}] * 4, num_scheduled_steps=60, num_extension_steps=10)
    lines = [dict(type="header", config=config, attention="FA3 (x 1)", head="fp8", world_size=8)]
    lines += [dict(type="step", step=step, train_time_ms=30.0 * step, train_loss=1.75 * loss, train_loss_next=loss)
              for step, loss in enumerate(losses, 1)]
    lines.append(dict(type="result", val_loss=7.0, peak_memory_mib=dict(allocated=PEAK_MIB)) | result)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with gzip.open(folder / "trace_rank0.json.gz", "wt") as file:
        json.dump(dict(traceEvents=events or [dict(cat="kernel", ts=0, dur=1, name="x")]), file)
    return folder

PEAK_MIB = day_steps.predicted_peak_mib(fake_day(Path()))

def test_compare_stages__names_the_part_that_exceeds_the_prediction(tmp_path) -> None:
    events = [dict(cat="kernel", ts=0, dur=6000, name="nvjet_hsh_128x256"), dict(cat="cpu_op", ts=0, dur=9e9, name="x"),
              dict(cat="kernel", ts=6000, dur=20_000, name="flash_bwd_dq_dk_dv_loop"),
              dict(cat="gpu_memcpy", ts=28_000, dur=2000, name="Memcpy HtoD")]
    folder = write_run(tmp_path / "run", 70 * [3.0], events)
    trace = folder / "trace_rank0.json.gz"
    kernels = day_steps.kernel_groups(trace, 2, "kernel")
    assert kernels == dict({"attention backward": 10.0}, matmuls=3.0, copies=1.0, gaps=1.0)
    fast, slow = {"products": 20.0, "attention": 8.0}, {"products": 15.0, "attention": 5.0}
    figures = dict(kernels=kernels)
    predicted = {"stage 1": fast, "stage 2": slow, "stage 3": fast, "stage 4": slow}
    assert day_steps.compare_stages(folder, predicted, figures) == [
        "stage 2: 30.0 ms a step, 1.50 of the predicted 20.0",
        "largest excess: attention, +5.0 ms in a profiled step of the extension"]
    assert figures["stage 1"] == dict(ms=pytest.approx(30.0), predicted_ms=28.0)
    assert "no events of category gpu" in verdict_of(day_steps.kernel_groups, trace, 2, "gpu")[1]

@pytest.mark.parametrize("result, reason", [
    ({}, ""), (dict(recompiles=2), "2 graphs were compiled after the warm-up"),
    (dict(peak_memory_mib=dict(allocated=PEAK_MIB * 5 // 4)), f"predicted {PEAK_MIB} MiB"),
    (dict(val_loss=10.9), "loss 10.900 after 1 steps"), (dict(val_loss=math.nan), "loss nan")])
def test_stages__right_or_red(tmp_path, result, reason) -> None:
    gpu_day = fake_day(tmp_path)
    gpu_day.train = returning(write_run(tmp_path / "run", [10.0], **result))
    verdict, text = verdict_of(day_steps.stages, gpu_day, {})
    assert verdict == ("red" if reason else "green") and reason in text, text

@pytest.mark.parametrize("change, verdict", [(0.03, "green"), (0.06, "red"), (math.nan, "red")])
def test_match__the_run_of_stages_against_float32(tmp_path, change, verdict) -> None:
    losses = [10.0 - step for step in range(12)]
    gpu_day = fake_day(tmp_path)
    gpu_day.figures["stages"] = dict(run_dir=str(write_run(tmp_path / "stages", losses + [-3.0])))
    gpu_day.train = returning(write_run(tmp_path / "plain", losses[:11] + [losses[11] + change]))
    assert verdict_of(day_steps.match, gpu_day, {})[0] == verdict

@pytest.mark.parametrize("summary, verdict", [("2 passed, 9 skipped in 3 s", "green"), ("11 skipped in 3 s", "red")])
def test_tests__red_if_all_are_skipped(tmp_path, summary, verdict) -> None:
    gpu_day = fake_day(tmp_path)
    gpu_day.call = returning(summary)
    assert verdict_of(day_steps.tests, gpu_day, {})[0] == verdict

@pytest.mark.parametrize("preset, steps", [("record", 1507), ("record", 61), ("tiny", 9), ("race", 191)])
def test_stage_spans__as_the_schedule_has_them(preset, steps) -> None:
    cfg = tg.Config(**tg.PRESETS[preset] | dict(num_scheduled_steps=steps))
    schedule = tg.Schedule(cfg)
    spans = price.stage_spans(vars(cfg), schedule.planned_steps)
    assert [(span.start, span.stop) for span in spans] == list(zip(schedule.stage_starts, schedule.stage_ends))
