"""records/tools/bench.py, with small fake trainers that log given times: order, failures, verdicts, patches."""
import difflib
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from common import processes_with, wait_until
from scipy import stats

from record_common import ROOT, call, events_of

from tools import bench, report                              # noqa: E402
# OURS writes and PEER prints two validations. `ms` is the time of the run; {body} is executed before and may change it.
OURS = """import hashlib, json, os, random, sys
class Config:
    seed: int = 0                    # initial values
flags = dict(flag[2:].split("=", 1) for flag in sys.argv[1:])
seed, ms = int(flags.get("seed", 0)), 1e5 * (1 + 0.001 * random.random())
{body}
os.makedirs("logs/a")
config = dict(num_scheduled_steps=8, num_extension_steps=1, seed=seed, lr=flags.get("lr"))
header = dict(type="header", config=config, seed=seed, world_size=1, torch="2.13.0", hardware="planted",
              source_sha256=hashlib.sha256(open(sys.argv[0], "rb").read()).hexdigest(), data_sha256="0" * 64)
loss = 3.27 + random.Random(seed).random() / 100
lines = [header, dict(type="val", step=0, val_loss=10.8, train_time_ms=0),
         dict(type="val", step=9, val_loss=loss, train_time_ms=ms),
         dict(type="result", val_loss=loss, train_time_ms=ms, steps=9, tokens=4608)]
with open("logs/a/log.jsonl", "w") as log:
    for line in lines:
        print(json.dumps(line), file=log)
"""
PEER = """import random
ms = 1e5 * (1 + 0.001 * random.random())
{body}
for step, loss, ms in ((0, 10.8, 0), (9, 3.27 + random.random() / 100, ms)):
    print("step:%d/9 val_loss:%.4f train_time:%.3fms step_avg:%.2fms" % (step, loss, ms, ms / 9), flush=True)
"""

def trainer(folder: Path, text: str = OURS, name: str = "trainer.py", body: str = "") -> Path:
    """Write a planted trainer; `body` may change `ms`."""
    (folder / name).write_text(text.replace("{body}", body))
    return folder / name

def lines(out: Path, kind: str) -> list[dict]:
    return [line for line in events_of(out / "manifest.jsonl") if line["type"] == kind]

def patch_of(old: str, new: str) -> str:
    return "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), "a/train_gpt.py", "b/train_gpt.py"))

@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"

@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A planted trainer, which `try` takes for that of the repository."""
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(bench, "ROOT", tmp_path / "here")
    return trainer(tmp_path / "here", name="train_gpt.py")

def test_race__order_manifest_and_seeds(tmp_path, out) -> None:
    # The flags determine the times, because with random times 1 % of the verdicts are false.
    a = trainer(tmp_path, body="ms = 1e5 * (1 + 0.001 * random.Random(repr(sys.argv)).random())")
    (tmp_path / "data").mkdir()
    status, said, _ = call("bench", a, f"{a} --lr=2", f"--out={out}", "--pairs=4", "--", "--val_every=5")
    ends = lines(out, "end")
    assert [end["side"] for end in ends] == list("ABABBABA"), "the order of pair_order"
    assert [end["pair"] for end in ends] == [1, 1, 2, 2, 3, 3, 4, 4] and {end["outcome"] for end in ends} == {"done"}
    assert [line["run"] for line in lines(out, "start")] == [end["run"] for end in ends] == [*range(1, 9)]
    assert ends[3]["folder"] == "runs/004_B" and lines(out, "bench")[0]["losses"] == "paired"
    assert ends[3]["command"] == "python ../../../trainer.py --val_every=5 --lr=2 --seed=2"
    assert (out / "runs/001_A/data").resolve() == (tmp_path / "data").resolve()
    assert "pair 4 of 4\n    B - A: loss +0.0000 nats" in said, "a pair has one seed"
    verdict, = re.findall("^verdict: (undecided|same): ", said, re.M)         # flags are part of a program
    assert status == report.STATUS[verdict]

@pytest.mark.parametrize("text", [OURS, PEER])
@pytest.mark.parametrize("factor, word", [(1.05, "slower"), (0.95, "faster")])
def test_race__stops_at_the_first_look_that_decides(tmp_path, out, text, factor, word) -> None:
    a, b = trainer(tmp_path, text), trainer(tmp_path, text, "b.py", f"ms *= {factor}")
    status, said, _ = call("bench", a, b, f"--out={out}", "--pairs=10")
    assert f"verdict: {word}" in said and status == report.STATUS[word] and len(lines(out, "end")) == 8
    assert lines(out, "bench")[0]["pairs"] == 10

def test_race__stops_at_a_failed_run_and_continues_with_the_next_pair(tmp_path, out) -> None:
    once = "if not os.path.exists('../../failed'): open('../../failed', 'w'); sys.exit('no memory left')"
    a, b = trainer(tmp_path), trainer(tmp_path, name="b.py", body=once)
    status, said, _ = call("bench", a, b, f"--out={out}", "--pairs=3")
    assert "002_B: FAILED, exit status 1; the last lines of its stderr.txt:\n    no memory left" in said
    assert status == 1 and "stopped: a run of B failed" in said
    call("bench", a, b, f"--out={out}", "--pairs=3")
    assert [(end["pair"], end["outcome"]) for end in lines(out, "end")][:3] == [(1, "done"), (1, "failed"), (2, "done")]
    assert {end["pair"] for end in lines(out, "end")} == {1, 2, 3, 4}

def test_outcome__a_run_writes_one_log(tmp_path, out) -> None:
    again = trainer(tmp_path).read_text().split("os.makedirs")[1].replace("logs/a", "logs/b")
    twice = trainer(tmp_path, OURS + "ms, seed = ms + 1, seed + 1000\nos.makedirs" + again, "twice.py")
    status, said, _ = call("bench", trainer(tmp_path), twice, f"--out={out}", "--pairs=4")
    assert status == 1 and "FAILED, 2 logs of a final validation; a run of a bench writes one" in said, said
    assert {end["outcome"] for end in lines(out, "end") if end["side"] == "B"} == {"failed"}

@pytest.mark.parametrize("body, limit, cause", [
    ("import time; time.sleep(300)", 0.5, "still running after the limit of 0.5 s"),
    ("sys.exit(0)", 60, "0 logs of a final"), ("os.kill(os.getpid(), 9)", 60, "exit status -9")])
def test_run_once__every_run_ends(tmp_path, out, body, limit, cause) -> None:
    a = trainer(tmp_path, body=body)
    status, said, _ = call("bench", a, f"{a} --lr=2", f"--out={out}", f"--limit={limit}")
    assert status == 1 and cause in said and [end["outcome"] for end in lines(out, "end")] == ["failed"]

def test_bench__continues_the_same_bench_and_refuses_another(tmp_path, out) -> None:
    a = trainer(tmp_path)
    flags = ["bench", a, f"{a} --lr=2", f"--out={out}"]
    call(*flags, "--pairs=1")
    call(*flags, "--pairs=3")
    assert [end["pair"] for end in lines(out, "end")] == [1, 1, 2, 2, 3, 3]
    status, _, error = call("bench", a, f"{a} --lr=3", f"--out={out}")
    assert status == 2 and "sources, flags or ranks differ" in error
    trainer(tmp_path, body="ms += 1")
    assert "sources, flags or ranks differ" in call(*flags, "--pairs=4")[2]

def test_check_plan__a_source_that_is_edited_during_a_bench(tmp_path, out) -> None:
    edits = "if seed == 1: open('../../../b.py', 'a').write('# more')"
    a, b = trainer(tmp_path, body=edits), trainer(tmp_path, name="b.py")
    flags = ["bench", a, b, f"--out={out}", "--pairs=2"]
    assert "sources, flags or ranks differ" in call(*flags)[2]
    trainer(tmp_path, name="b.py")
    call(*flags)
    assert [(end["pair"], end["side"]) for end in lines(out, "end")] == [
        (1, "A"), (2, "A"), (2, "B"), (3, "B"), (3, "A")], "a pair is run as a whole"

def start_bench(out: Path, *argv: object) -> subprocess.Popen:
    """Start a bench in a process of its own, and wait until a run of it has written its process id to `pid`."""
    command = [sys.executable, ROOT / "records", "bench", *argv, f"--out={out}"]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, start_new_session=True,
                               env=os.environ | dict(TEST_OUT=str(out)))
    wait_until(lambda: list(out.glob("pid")) and (out / "pid").read_text())
    return process

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_main__a_signal_ends_the_run_and_leaves_a_line(tmp_path, out, number) -> None:
    wait = "import time\nif seed == 2: print(os.getpid(), file=open('../../pid', 'w'), flush=True); time.sleep(999)"
    a = trainer(tmp_path, body=wait)
    process = start_bench(out, a, f"{a} --lr=2", "--pairs=3")
    process.send_signal(number)
    said = process.communicate(timeout=30)[0]
    assert process.returncode == 130 and f"repeat the command with --out={out} to continue" in said
    wait_until(lambda: not processes_with(f"TEST_OUT={out}"))               # the trainer ends with the tool
    call("bench", a, f"{a} --lr=2", f"--out={out}", "--pairs=1")
    assert [end["outcome"] for end in lines(out, "end")] == ["done", "done", "interrupted"]

def test_main__does_not_continue_while_an_orphan_runs(tmp_path, out) -> None:
    """A run that ignores SIGTERM holds the lock after its tool was killed; then it counts as started, and lost."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif not os.path.exists('../../pid'):\n" \
           "    print(os.getpid(), file=open('../../pid', 'w'), flush=True); time.sleep(60)"
    a = trainer(tmp_path, body=deaf)
    process = start_bench(out, a, f"{a} --lr=2", "--pairs=1")
    process.kill()
    process.communicate(timeout=30)
    child = int((out / "pid").read_text())
    status, _, error = call("bench", a, f"{a} --lr=2", f"--out={out}", "--pairs=1")
    assert status == 2 and "or a run that it started" in error and not lines(out, "end")
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not processes_with(f"TEST_OUT={out}"))
    call("bench", a, f"{a} --lr=2", f"--out={out}", "--pairs=1")
    assert [end["outcome"] for end in lines(out, "end")] == ["lost", "done", "done"]

def test_sides_to_try__names_the_fault_of_a_patch(tmp_path, out, plain) -> None:
    status, _, error = call("try", tmp_path / "smeer.patch", f"--out={out}")
    assert status == 2 and "No such file" in error and "smeer.patch" in error
    (tmp_path / "old.patch").write_text(patch_of("a\nb\nc\n", "a\nd\nc\n"))
    assert "patch does not apply" in call("try", tmp_path / "old.patch", f"--out={out}2")[2]

@pytest.mark.style                                            # a fork may have changed what an ablation removes
@pytest.mark.parametrize("patch", sorted(path.name for path in ROOT.glob("records/ablations/*.patch")))
def test_git_apply__patches_of_the_repository_apply_to_its_trainer(tmp_path, patch) -> None:
    copy = tmp_path / "copy/train_gpt.py"
    copy.parent.mkdir()
    copy.write_bytes((ROOT / "train_gpt.py").read_bytes())
    assert not bench.git_apply(ROOT / "records/ablations" / patch, copy)
    compile(copy.read_text(), patch, "exec")

@pytest.mark.parametrize("case", ["patch", "applied already"])
def test_sides_to_try(tmp_path, out, plain, case) -> None:
    changed = plain.read_text().replace("1e5", "0.9e5")
    patch = tmp_path / "idea_one.patch"
    patch.write_text(patch_of(plain.read_text(), changed))
    if case == "applied already":
        plain.write_text(changed)
    status, said, _ = call("try", patch, f"--out={out}", "--", "--lr=3")
    assert status == 0 and "verdict: faster" in said and "-10." in said
    assert re.search("^up to 12 runs; the first one shows .*\n001_A", said, re.M), said
    assert ("already contains idea_one.patch" in said) == (case == "applied already")
    assert all("--preset=pocket --sample_tokens=0 --lr=3" in end["command"] for end in lines(out, "end"))
    assert "1e5 *" in (out / "sources/A/train_gpt.py").read_text() and "0.9e5" in (
        out / "sources/B/train_gpt.py").read_text()
    assert (out / "curves.svg").is_file() and f"records new NAME {out} --kind=comparison" in said

def test_noise_floor__of_an_empty_patch(tmp_path, out, plain) -> None:
    """Two sides of one program run all pairs; half of such benches find the floor."""
    (tmp_path / "empty.patch").write_text("\n")
    status, said, _ = call("try", tmp_path / "empty.patch", f"--out={out}", "--pairs=4")
    assert status == report.STATUS["same program"] and len(lines(out, "end")) == 8
    floors = re.search(r"^noise floor, 4 pairs: .* change of (\S+)% of the time, or of (\S+) nats", said, re.M)
    losses = [3.27 + random.Random(seed).random() / 100 for seed in range(1, 5)]
    rng = np.random.default_rng(0)
    noise = rng.normal(0, np.std(losses, ddof=1), (2, 4000, 4))                  # of A and B; seeds mean nothing to B
    found = stats.ttest_1samp(noise[1] - noise[0] - float(floors[2]), 0, axis=1).pvalue < 0.0095
    assert found.mean() == pytest.approx(0.5, abs=0.1)
    low, high = re.findall(r"time \S+ \[(\S+)%, (\S+)%\]", said)[-1]
    assert float(floors[1]) == pytest.approx((float(high) - float(low)) / 2, abs=0.06)

def test_git_apply__a_patch_of_other_files_is_refused(tmp_path, out, plain) -> None:
    text = plain.read_text()
    of_other = patch_of("x\n", "y\n").replace("train_gpt.py", "other.py")
    (tmp_path / "both.patch").write_text(patch_of(text, text.replace("1e5", "2e5")) + of_other)
    status, said, error = call("try", tmp_path / "both.patch", f"--out={out}", "--pairs=1")
    assert status == 2 and "other.py: No such file or directory" in error, error
    assert "already contains" not in said and not (out / "manifest.jsonl").exists()

def test_make_trainer__takes_a_seed_where_it_can(tmp_path) -> None:
    for text, flags, expected in ((OURS, [], ["--seed={seed}"]), (OURS, ["--seed=5"], ["--seed=5"]), (PEER, [], []),
                                  (OURS, ["--rng={seed}"], ["--rng={seed}"]),
                                  ("parser.add_argument('--seed')\n", [], ["--seed={seed}"])):
        assert bench.make_trainer(trainer(tmp_path, text), flags).flags == expected
    assert bench.make_trainer(ROOT / "train_gpt.py", []).flags == ["--seed={seed}"]
    with pytest.raises(FileNotFoundError):
        bench.make_trainer(tmp_path / "none.py", [])
