"""records/tools/bench.py on trainers of a few lines that print planted times: order, manifest, failures, verdicts."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

RECORDS = Path(__file__).resolve().parents[2] / "records"
sys.path.insert(0, str(RECORDS))

from tools import bench, calibrate, launch, logs, verdict    # noqa: E402

# Each prints or writes two validations: as the peers do (a log of its own in logs/, with its source), on the console
# only, or as log.jsonl. `time` is that of the run in ms; {body} runs before and may change it.
PEER = """import os, random, sys, uuid
time = 1e5 * (1 + 0.001 * random.random()); {body}
os.makedirs("logs", exist_ok=True)
with open("logs/" + str(uuid.uuid4()) + ".txt", "w") as log:
    for text in (open(sys.argv[0]).read(), "=" * 100, "step:0/9 val_loss:10.8 train_time:0ms step_avg:0.01ms",
                 "step:9/9 val_loss:%.4f train_time:%.3fms step_avg:0.1ms" % (3.27 + random.random() / 100, time)):
        print(text, file=log)
        if text.startswith("step"): print(text)
"""
CONSOLE = """import os, random, sys
time = 1e5 * (1 + 0.001 * random.random()); {body}
for step, loss, ms in ((0, 10.8, 0), (9, 3.27 + random.random() / 100, time)):
    print("step:%d/9 val_loss:%.4f train_time:%.3fms step_avg:%.2fms" % (step, loss, ms, ms / 9), flush=True)
"""
OURS = """import hashlib, json, os, random, sys
class Config:
    seed: int = _run(0, "integer", "initial values") if 0 else 0
flags = dict(flag[2:].split("=", 1) for flag in sys.argv[1:])
seed, time = int(flags.get("seed", 0)), 1e5 * (1 + 0.001 * random.random()); {body}
os.makedirs("logs/a")
config = dict(num_scheduled_steps=8, num_extension_steps=1, seed=seed)
source = hashlib.sha256(open(sys.argv[0], "rb").read()).hexdigest()
header = dict(type="header", config=config, changed=flags, preset="tiny", seed=seed, world_size=1, torch="2.13.0",
              hardware="planted", source_sha256=source, data_sha256="0" * 64, tokens_per_step=[512], bigram_rows=64)
loss = 3.27 + random.Random(seed).random() / 100
lines = [header, dict(type="val", step=0, val_loss=10.8, train_time_ms=0), dict(type="val", step=9, val_loss=loss,
         train_time_ms=time), dict(type="result", val_loss=loss, train_time_ms=time, steps=9, tokens=4608)]
with open("logs/a/log.jsonl", "w") as log:
    for line in lines: print(json.dumps(line), file=log)
print("step:9/9 val_loss:%.4f train_time:%.0fms step_avg:%.2fms" % (loss, time, time / 9))
"""
SECONDS = 100.0                    # planted cases: what a run takes
NOISE = 0.0008                     # relative sd of a run's time on one machine, as measured on public runs


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch) -> None:
    """No test waits for the machine to be looked at."""
    monkeypatch.setattr(calibrate, "busy_cores", lambda: 0.1)


def trainer(folder: Path, text: str, name: str = "trainer.py", body: str = "") -> str:
    (folder / name).write_text(text.replace("{body}", body))
    return str(folder / name)


def run(*argv: str, pairs: int = 3, calibrate: int = 0) -> int:
    return bench.main([*argv[:2], f"--pairs={pairs}", f"--calibrate={calibrate}", *argv[2:]])


def ran(*argv: str, pairs: int = 3, calibrate: int = 0) -> str:
    """The verdict of a bench that came to its end, which the exit status says, too."""
    status = run(*argv, pairs=pairs, calibrate=calibrate)
    out = next(flag.removeprefix("--out=") for flag in argv if flag.startswith("--out="))
    word = json.loads((Path(out) / "summary.json").read_text())["compare"]["verdict"]
    assert status == verdict.STATUS[word]
    return word


def lines(out: Path, kind: str) -> list[dict]:
    return [line for line in map(json.loads, (out / "manifest.jsonl").read_text().splitlines()) if line["type"] == kind]


def alone(*argv: str, **settings) -> subprocess.Popen:
    """A bench in a process of its own, to be stopped by signals."""
    return subprocess.Popen([sys.executable, str(RECORDS), "bench", *argv, "--calibrate=0"], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings)


def wait_for(path: Path) -> None:
    for _ in range(400):
        if path.exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"{path} was never there")


def test_order_manifest_and_seeds(tmp_path, capsys):
    out = tmp_path / "out"
    a = trainer(tmp_path, OURS)
    (tmp_path / "data").mkdir()
    assert ran(a, a, f"--out={out}", "--b=--lr=2", "--", "--val_every=5", pairs=4)
    ends = lines(out, "end")
    assert [end["side"] for end in ends][:6] == list("ABBAAB")
    assert [end["folder"] for end in ends[:3]] == ["runs/001_A", "runs/002_B", "runs/003_B"]
    assert [end["pair"] for end in ends] == [end["seed"] for end in ends] == [1, 1, 2, 2, 3, 3, 4, 4][:len(ends)]
    assert ends[0]["command"] == "python ../../../trainer.py --val_every=5 --seed=1"
    assert ends[1]["command"] == "python ../../../trainer.py --val_every=5 --lr=2 --seed=1"
    assert [line["run"] for line in lines(out, "start")] == [end["run"] for end in ends] == [*range(1, len(ends) + 1)]
    log = json.loads((out / "runs/002_B/logs/a/log.jsonl").read_text().splitlines()[0])
    assert log["source_sha256"] == ends[1]["source_sha256"] and log["changed"]["lr"] == "2"
    assert (out / "runs/001_A/data").resolve() == (tmp_path / "data").resolve()
    for end in ends:
        assert (end["outcome"], end["status"], end["cause"]) == ("done", 0, "") and end["wall_s"] > 0
        assert {"load_1min", "cpu_mhz", "gpus"} <= end["state_before"].keys() & end["state_after"].keys()
        assert end["train_s"] == pytest.approx(SECONDS, rel=2e-3) and 3.27 < end["val_loss"] < 3.28
    first, *rest = lines(out, "pair")
    assert first["difference"] == pytest.approx(ends[1]["train_s"] / ends[0]["train_s"] - 1)
    assert rest[0]["a_s"] == ends[3]["train_s"]                              # the second pair ran B first
    assert [line["when"] for line in lines(out, "machine")] == ["before", "after"]
    assert json.loads((out / "summary.json").read_text())["outcomes"] == {"done": len(ends)}
    text = capsys.readouterr().out
    assert "before: calibration not run: --calibrate=0" in text and "at most 8 such runs" in text


def test_seeds_named_by_flags_and_seeds_not_set(tmp_path, capsys):
    ours, peer = trainer(tmp_path, OURS), trainer(tmp_path, PEER, "peer.py")
    named = trainer(tmp_path, "import argparse\nparser.add_argument('--seed')\n" + PEER, "argparse.py")

    def flags(*argv: str) -> list[list[str]]:
        args = bench.parsed([*argv, f"--out={tmp_path / str(len(list(tmp_path.iterdir())))}"])
        return [side["flags"] for side in bench.Bench(args).sides.values()]

    assert flags(ours, peer, "--a=--seed=5", "--b=--rng={seed}") == [["--seed=5"], ["--rng={seed}"]]
    assert flags(named, peer) == [["--seed={seed}"], []]
    assert re.search(r"^B: \S+  ?\(seeds are not set\)$", capsys.readouterr().out, re.M)
    assert ran(ours, ours, f"--out={tmp_path / 'out'}", "--", "--seed=5")
    assert {end["seed"] for end in lines(tmp_path / "out", "end")} == {None}
    report = json.loads((tmp_path / "out/summary.json").read_text())["compare"]
    assert (report["a"]["seeds"], report["b"]["seeds"], report["a"]["time"]["n"]) == (1, 1, 3)     # a repeat is no n


@pytest.mark.parametrize("peer", [PEER, CONSOLE])
def test_a_peer_against_ours(tmp_path, capsys, peer):
    out = tmp_path / "out"
    a, b = trainer(tmp_path, OURS), trainer(tmp_path, peer, "peer.py", "time *= 1.05")
    assert ran(a, b, f"--out={out}", pairs=8)
    pairs, summary = lines(out, "pair"), json.loads((out / "summary.json").read_text())
    assert len(pairs) < 8 and all(pair["difference"] == pytest.approx(0.05, abs=3e-3) for pair in pairs)
    assert summary["stopped"].startswith("the times differ") and summary["compare"]["verdict"] == "slower"
    assert summary["compare"]["method"] == f"{len(pairs)} interleaved pairs"
    assert capsys.readouterr().out.splitlines()[-1].startswith("verdict: slower")
    assert [end["logs"] for end in lines(out, "end")][1] == (["console.txt"] if peer is CONSOLE else [str(
        next((out / "runs/002_B/logs").iterdir()).relative_to(out / "runs/002_B"))])


@pytest.mark.parametrize("flags, word", [
    (("--b=--lr=2",), "faster"), ((), "same program"), (("--a=--seed=1", "--b=--seed=2"), "same program")])
def test_flags_that_only_the_manifest_knows_make_another_program(tmp_path, flags, word):
    """Of a peer, whose text log has its source and no flags. A seed makes none."""
    golden = (RECORDS.parent / "tests/records/golden/d_timing.txt").read_text()
    environment = golden[golden.index("Running Python"):golden.index("step:0/4 val_loss:10.8260")]
    (tmp_path / "environment").write_text(environment)
    said = f'"=" * 100, open({str(tmp_path / "environment")!r}).read()'
    text = PEER.replace('"=" * 100', said).replace("{body}", "time *= 0.95 if '--lr=2' in sys.argv else 1")
    a = trainer(tmp_path, text)
    assert ran(a, a, f"--out={tmp_path / 'out'}", *flags, pairs=4) == word


def test_a_failed_run_is_shown_and_the_next_pair_goes_on(tmp_path, capsys):
    out, mark = tmp_path / "out", tmp_path / "mark"
    once = f"mark = {str(mark)!r}; first = not os.path.exists(mark); open(mark, 'w').close(); 1 / (not first)"
    assert ran(trainer(tmp_path, OURS), trainer(tmp_path, PEER, "b.py", once), f"--out={out}")
    ends = lines(out, "end")
    assert (ends[1]["outcome"], ends[1]["status"], ends[1]["cause"]) == ("failed", 1, "exit status 1")
    assert [(end["side"], end["pair"]) for end in ends[:4]] == [("A", 1), ("B", 1), ("A", 2), ("B", 2)]
    assert [line["pair"] for line in lines(out, "pair")] == [2, 3, 4]
    assert "002_B: FAILED, exit status 1" in (text := capsys.readouterr().out) and "    ZeroDivisionError" in text
    assert json.loads((out / "summary.json").read_text())["outcomes"] == {"done": 7, "failed": 1}


@pytest.mark.parametrize("body, cause", [
    ("raise SystemExit(3)", "exit status 3"), ("raise SystemExit(0)", "ended without a log of a final validation"),
    ("import time as t; t.sleep(60)", "still running after the limit of 0.3 s")])
def test_two_failures_of_a_side_stop_the_bench(tmp_path, capsys, body, cause):
    out = tmp_path / "out"
    assert run(trainer(tmp_path, OURS, body=body), trainer(tmp_path, PEER, "b.py"), f"--out={out}", "--limit=0.3") == 1
    assert [(end["side"], end["outcome"], end["pair"], end["cause"]) for end in lines(out, "end")] == [
        ("A", "failed", 1, cause), ("A", "failed", 2, cause)]
    assert capsys.readouterr().out.splitlines()[-1] == "verdict: undecided: no pair is complete"


def test_an_edited_source_ends_the_bench(tmp_path):
    out, helper = tmp_path / "out", tmp_path / "helper.py"
    helper.write_text("")
    edit = f"\nimport helper\nopen({str(helper)!r}, 'w').write('# another')"
    a, b = trainer(tmp_path, OURS), trainer(tmp_path, PEER, "b.py", edit)
    with pytest.raises(logs.ToolError, match="(?s)source of side B.*edited meanwhile"):
        run(a, b, f"--out={out}")
    assert len(lines(out, "end")) == 2                                      # B's second run was not started
    with pytest.raises(logs.ToolError, match="(?s)bench in.*restore these to continue"):
        run(a, b, f"--out={out}")
    with pytest.raises(logs.ToolError, match="no file .*c.py"):
        run(a, str(tmp_path / "c.py"))
    with pytest.raises(logs.ToolError, match="--pairs below 1"):
        run(a, b, pairs=0)


def test_what_is_undecided_says_how_many_pairs_it_needs(tmp_path, capsys):
    """And the same command with as many goes on to a verdict."""
    out = tmp_path / "out"
    a = trainer(tmp_path, OURS, body="time = 1e5 + 100 * seed")
    b = trainer(tmp_path, OURS, "b.py", "time = 1e5 + 100 * seed + 1000 + 100 * (seed % 3)")
    assert ran(a, b, f"--out={out}") == "undecided"
    text = capsys.readouterr().out
    assert re.search(r"pair 1: B takes \+1\.10%; mean of 1 \+1\.10%, the next look is at 4$", text, re.M)
    needs = re.search(r"note: about (\d+) pairs settle a mean of \+1\.\d+% .* --pairs=\1 continues$", text, re.M)
    assert needs and json.loads((out / "summary.json").read_text())["needs"] in text
    assert ran(a, b, f"--out={out}", pairs=int(needs[1])) == "slower"
    assert "surely +" in capsys.readouterr().out


def test_a_run_that_hangs_is_ended_by_default(tmp_path, monkeypatch):
    """Of a first run little is known; a later one is measured by those before."""
    limits = []
    attend = launch.attend

    def noted(script, folder, flags, ranks, limit_s) -> dict:
        limits.append(limit_s)
        return attend(script, folder, flags, ranks, limit_s) | {"wall_s": 10.0 * len(limits)}
    monkeypatch.setattr(launch, "attend", noted)
    a = trainer(tmp_path, OURS)
    run(a, a, f"--out={tmp_path / 'out'}", pairs=1)
    assert limits == [launch.FIRST_LIMIT_S, 3 * 10.0 + 60.0]
    run(a, a, f"--out={tmp_path / 'out'}", pairs=2)
    assert limits[2:] == [3 * 20.0 + 60.0, 3 * 30.0 + 60.0]
    run(a, a, f"--out={tmp_path / 'other'}", "--limit=7", pairs=1)
    assert limits[4:] == [7.0, 7.0]
    with pytest.raises(logs.ToolError, match="--limit without a second"):
        run(a, a, "--limit=0")
    for seconds in ("nan", "-1", "inf"):
        with pytest.raises(logs.ToolError, match="--calibrate of"):
            run(a, a, f"--calibrate={seconds}")


def test_a_busy_machine_is_said_and_can_be_refused(tmp_path, capsys, monkeypatch):
    a = trainer(tmp_path, OURS)
    monkeypatch.setattr(calibrate, "busy_cores", lambda: 1.5)
    run(a, a, f"--out={tmp_path / 'out'}", pairs=1)
    text = capsys.readouterr().out
    for words in ("before: BUSY: 1.5 of", "after: BUSY: 1.5 of", "note: the machine was busy after the runs: 1.5 of"):
        assert words in text
    assert len(json.loads((tmp_path / "out/summary.json").read_text())["disturbed"]) == 2
    with pytest.raises(logs.ToolError, match="(?s)machine.*1.5 of .* cores work for others.*without --refuse-busy"):
        run(a, a, f"--out={tmp_path / 'refused'}", "--refuse-busy")
    assert not (tmp_path / "refused/runs").exists()
    assert bench.busy(0.2, {"copy GB/s": [9.0, 0.3], "other": [1.0, 0.05]}) == ["copy GB/s spreads by 30%"]
    assert bench.busy(None, {}) == []


def test_busy_cores_are_counted(monkeypatch):
    """Of ten seconds of four cores, half were idle; without counts nothing is known."""
    ticks = iter(["cpu 100 0 0 1000 0 0 0 0 0", "cpu 2100 0 0 2500 500 0 0 0 0"])
    monkeypatch.undo()
    monkeypatch.setattr(calibrate, "text_of", lambda path: next(ticks, ""))
    monkeypatch.setattr(calibrate.os, "cpu_count", lambda: 4)
    assert calibrate.busy_cores(0.0) == 2.0 and calibrate.busy_cores(0.0) is None


def test_void_times_are_no_times(tmp_path):
    a = trainer(tmp_path, OURS.replace("steps=9, tokens", "void='profiled', steps=9, tokens"))
    with pytest.raises(logs.ToolError, match="(?s)times of 001_A.*profiled"):
        run(a, a, f"--out={tmp_path / 'out'}")


def test_an_interrupted_bench_continues(tmp_path, capsys):
    """Ctrl-C, then SIGKILL, then to the end: nothing is left running, every run stays in the manifest."""
    out, pids = tmp_path / "out", tmp_path / "pids"
    a = trainer(tmp_path, OURS)
    slow = f"""import subprocess as s, time as t
if not os.path.exists({str(tmp_path / 'quick')!r}):
    child = s.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True)
    open({str(pids)!r}, "a").write("%d %d " % (os.getpid(), child.pid)); open("ready", "w").close(); t.sleep(99)
"""
    b = trainer(tmp_path, PEER.replace("; {body}", "\n{body}"), "b.py", slow)

    first = alone(a, b, f"--out={out}", "--pairs=3")
    wait_for(out / "runs/002_B/ready")
    with pytest.raises(logs.ToolError, match="(?s)of its runs.*kill"):              # a second bench in the same folder
        run(a, b, f"--out={out}")
    first.send_signal(signal.SIGINT)
    text = first.communicate(timeout=30)[0]
    assert first.returncode == 130 and text.splitlines()[-1].startswith("interrupted; the same command with --out=")
    assert [end["outcome"] for end in lines(out, "end")] == ["done", "interrupted"]
    assert not any(map(calibrate.text_of, (f"/proc/{pid}/cmdline" for pid in pids.read_text().split())))   # "": zombie

    second = alone(a, b, f"--out={out}", "--pairs=3")
    wait_for(out / "runs/004_B/ready")
    second.kill()
    second.communicate()
    while left := launch.processes_of(out):
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    with open(out / "manifest.jsonl", "a") as file:
        file.write('{"type": "torn')
    (tmp_path / "quick").touch()
    assert ran(a, b, f"--out={out}")
    assert [end["outcome"] for end in lines(out, "end")] == ["done", "interrupted", "done", "lost"] + ["done"] * 6
    assert [line["pair"] for line in lines(out, "pair")] == [3, 4, 5]
    assert json.loads((out / "summary.json").read_text())["compare"]["a"]["runs"] == 3       # broken pairs do not count
    capsys.readouterr()
    assert ran(a, b, f"--out={out}") and "stopped after 3 pairs: all are done" in capsys.readouterr().out
    with pytest.raises(logs.ToolError, match="bench in"):
        run(a, b, f"--out={out}", "--a=--lr=2")


def test_terminated_like_interrupted(tmp_path):
    a = trainer(tmp_path, OURS, body="open('ready', 'w').close(); import time as t; t.sleep(99)")
    process = alone(a, a, f"--out={tmp_path / 'out'}")
    wait_for(tmp_path / "out/runs/001_A/ready")
    process.terminate()
    assert process.wait(30) == 130
    assert [end["outcome"] for end in lines(tmp_path / "out", "end")] == ["interrupted"]


def test_environment_of_a_run(tmp_path, monkeypatch):
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    a = trainer(tmp_path, CONSOLE, body="print(os.environ['OMP_NUM_THREADS'], os.environ['GOMP_SPINCOUNT'])")
    monkeypatch.setattr(calibrate, "cores", lambda: 6)
    assert launch.launch(Path(a), tmp_path / "one", [])["outcome"] == "done"
    assert (tmp_path / "one/console.txt").read_text().startswith("6 5000\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    launch.launch(Path(a), tmp_path / "two", [])
    assert (tmp_path / "two/console.txt").read_text().startswith("2 5000\n")
    line = launch.command_line(Path(a), tmp_path / "three", ["--seed=1"], 4)
    assert " ".join(line) == "python -m torch.distributed.run --standalone --nproc_per_node=4 ../trainer.py --seed=1"
    assert bench.LAUNCHER.split("Error: x\nE1121 06:35 9 torch/distributed/elastic/api.py failed\n")[0] == "Error: x\n"


def test_gpus_are_read_from_nvidia_smi(tmp_path, monkeypatch):
    """A stand-in for an older driver's tool: it does not know the newer name of the throttle reasons."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("""#!/bin/sh
case $1 in *clocks_event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field'; exit 2;; esac
echo "NVIDIA H100 80GB HBM3, 550.54, 1980 MHz, 2619 MHz, 68.5 W, 700.00 W, 31, 0x0000000000000001"
""")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert calibrate.gpus() == [{
        "name": "NVIDIA H100 80GB HBM3", "driver_version": "550.54", "clocks.sm": "1980 MHz", "clocks.mem": "2619 MHz",
        "power.draw": "68.5 W", "power.limit": "700.00 W", "temperature.gpu": "31",
        "clocks_throttle_reasons.active": "0x0000000000000001"}]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert calibrate.gpus() == []


@pytest.mark.all
def test_calibration(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    a = trainer(tmp_path, OURS)
    assert ran(a, a, f"--out={tmp_path / 'out'}", "--calibrate=0.2")
    before, after = lines(tmp_path / "out", "machine")
    assert before["machine"] == after["machine"] and before["machine"]["cores"] == calibrate.cores()
    for look in before, after:
        rates = look["calibration"]["rates"]
        assert list(rates) == ["matrix product TFLOP/s", "copy GB/s", "host launch operations/s"]
        assert all(value > 0 and spread >= 0 for value, spread in rates.values())
    text = capsys.readouterr().out
    assert re.search(r"after: calibration: copy GB/s \S+, spread \S+, [-+]\S+% since the last look", text)


def planted(folder: Path, seed: int, true: float, kind: str, monkeypatch) -> tuple[str, int]:
    """A whole bench, but that its runs are drawn instead of trained: the verdict on B and the number of pairs."""
    rng = np.random.default_rng(seed)

    def attend(script, at, flags, ranks, limit_s) -> dict:
        number, side = at.name.split("_")
        seconds = SECONDS * (1 + true * (side == "B") + (NOISE * rng.standard_normal() if kind != "identical" else 0))
        if kind == "drifting":
            seconds *= 1 + 0.02 * (int(number) - 1) / 19                   # 2 % over the 20 runs of 10 pairs
        if kind == "bimodal":
            seconds *= 1 + 0.01 * rng.integers(2)
        loss = 0.00125 * rng.standard_normal()
        (at / "console.txt").write_text("".join(
            f"step:{step}/9 val_loss:{mean + loss + 0.001 * rng.standard_normal():.4f} "
            f"train_time:{1000 * seconds * step / 9:.3f}ms step_avg:{1000 * seconds / 9:.2f}ms\n"
            for step, mean in ((0, 10.82), (7, 3.4), (8, 3.3), (9, 3.278))))
        return {"status": 0, "wall_s": seconds, "cause": ""}

    monkeypatch.setattr(launch, "attend", attend)
    monkeypatch.setattr(launch.os, "fsync", lambda file: None)
    a = trainer(folder, CONSOLE)
    assert ran(a, a, f"--out={folder / 'out'}", pairs=10)
    summary = json.loads((folder / "out/summary.json").read_text())
    assert (summary["compare"]["verdict"] in ("faster", "slower")) <= (len(summary["pairs"]) in (4, 6, 10))
    if summary["compare"]["verdict"] == "undecided":                          # by its times, or by a loss that differs
        assert summary["needs"] or "loss" in summary["compare"]["reason"]
    else:
        assert not summary["needs"]
    return summary["compare"]["verdict"], len(summary["pairs"])


@pytest.mark.parametrize("draws", [15, pytest.param(100, marks=pytest.mark.all)])
@pytest.mark.parametrize("true, kind, right, least", [
    (0.0, "steady", {"same", "undecided"}, 0), (0.002, "steady", {"slower", "undecided"}, 0.5),
    (0.01, "steady", {"slower", "undecided"}, 0.9), (-0.01, "drifting", {"faster", "undecided"}, 0.9),
    (0.0, "drifting", {"same", "undecided"}, 0), (0.0, "bimodal", {"same", "undecided"}, 0),
    (0.0, "identical", {"same", "undecided"}, 0)])
def test_wrong_verdicts_are_rare(tmp_path, monkeypatch, capsys, draws, true, kind, right, least):
    """At most 1 in 100 although the bench stops when it likes the result; and enough verdicts where a difference is."""
    found = [planted(folder, seed, true, kind, monkeypatch) for seed in range(draws)
             if (folder := tmp_path / str(seed)).mkdir() is None]
    words = [word for word, _ in found]
    assert sum(word not in right for word in words) <= draws * verdict.ALPHA, words
    assert sum(word in right - {"undecided"} for word in words) >= least * draws, words
    if abs(true) == 0.01:
        assert np.mean([pairs for _, pairs in found]) < 8                  # decided early
