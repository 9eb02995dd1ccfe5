"""The bench without a card, and mistakes on purpose that its checks must catch."""
import json
import subprocess
import sys

import bench_gpu
import gpu_cases
import pytest
import torch
from common import ROOT
from gpu_cases import CASES, PLAIN, TINY, TRAINER

import train_gpt as tg


def test_main__walks_on_a_cpu(tmp_path, monkeypatch, capsys):
    """All operations and one that fails, which leaves the others alone; the stages; a run that does not fit."""
    def broken(_: gpu_cases.Lab) -> gpu_cases.Case:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.\nMore.")

    flags = ["--device=cpu", f"--out={tmp_path}", "--rounds=1", "--cycles=1"]
    monkeypatch.setitem(CASES, "broken", broken)
    assert bench_gpu.main(flags) == 1
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["wrong"] == ["broken: OutOfMemoryError: Tried to allocate 20.00 GiB. More."]
    assert [row["name"] for row in found["kernels"]] == list(CASES)
    assert [stage["new_graphs"] for stage in found["stages"]] == [0, 0, 0] and found["evaluation"]["s_per_block"] > 0
    assert bench_gpu.predictions("FA3")["stage 1"] < bench_gpu.predictions("FA2 of torch")["stage 1"]

    def refuse(*_) -> None:
        raise tg.RunError("memory", "1 GiB to use", "room for more", "a larger device")

    monkeypatch.setattr(tg, "fit_memory", refuse)
    assert bench_gpu.main([*flags, "--only=steps"]) == 0 and "1 GiB to use" in capsys.readouterr().out
    if not torch.cuda.device_count():
        assert bench_gpu.main(flags[1:]) == 2 and "sees no CUDA device" in capsys.readouterr().err

    monkeypatch.undo()                                        # a step that goes wrong is no run that does not fit
    monkeypatch.setattr(tg.Optimizer, "step", refuse)
    with pytest.raises(tg.RunError):
        bench_gpu.main([*flags, "--only=steps"])


WALK = """
import sys
sys.path[:0] = sys.argv[1:4]
from rehearsal import walk
with walk.install("H100", walk.phantom.Recorder(), 1):
    import bench_gpu
    sys.exit(bench_gpu.main(sys.argv[4:]))
"""


@pytest.mark.all
@pytest.mark.parametrize("flags", [["--only=kernels", "--backend=eager"], ["--only=steps", "--stages=1", "--cycles=1"]])
def test_main__walks_on_fake_tensors(tmp_path, flags):
    """Everything but numbers: the bench's first minute on a card is not spent on typing errors."""
    command = pytest.importorskip("rehearsal.command")
    if command.why_not():
        pytest.skip(command.why_not())
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/gpu")]
    words = [sys.executable, "-c", WALK, *paths, f"--out={tmp_path}", *flags]
    done = subprocess.run(words, capture_output=True, text=True)
    found = json.loads((tmp_path / "bench.json").read_text())
    assert done.returncode == 0 and found["wrong"] == [], done.stdout + done.stderr
    assert "H100" in found["machine"]["hardware"]


# ---- What a check must catch
LAB = gpu_cases.Lab(tg.Fabric(torch.device("cpu")))


def half_written(n, up, down, seed):
    outputs = CASES["mlp"](LAB).ways[PLAIN](n, up, down, seed)
    result = torch.empty_like(outputs[0])
    result[:-1] = outputs[0][:-1]                             # the last row is never stored
    return [result, *outputs[1:]]


def wrong_gradient(n, up, down, seed):
    out, grad_n, grad_up, grad_down = CASES["mlp"](LAB).ways[PLAIN](n, up, down, seed)
    return [out, grad_n, 1.03 * grad_up, grad_down]


def longer(x):
    """With the row after the last, which is not its own."""
    return torch.as_strided(x, (len(x) + 1, x.shape[1]), x.stride(), x.storage_offset())


def reads_after(sums, index, grad):
    tg.add_rows(sums, index, grad)
    sums[0] += 0 * longer(grad)[-1]                           # finite but for what lies there
    return [sums]


def writes_after(sums, index, grad):
    tg.add_rows(sums, index, grad)
    longer(sums)[-1] = 0.0
    return [sums]


def one_line_short(sums, index, grad):
    tg.add_rows(sums, index[:-1], grad[:-1])
    return [sums]


def wider_window(q, k, v, bounds, seed):
    lab = gpu_cases.Lab(LAB.fabric, TINY._replace(short=TINY.short + 1))
    return CASES["attention, short window"](lab).ways[PLAIN](q, k, v, bounds, seed)


@pytest.mark.parametrize("name, mistake, said", [
    ("mlp", half_written, "output 0 is off by nan"), ("mlp", wrong_gradient, "output 2 is off"),
    ("sums of rows", reads_after, "output 0 is off by nan"),
    ("sums of rows", writes_after, "writes before an input or after it"),
    ("sums of rows", one_line_short, "output 0 is off"), ("attention, short window", wider_window, "output 0 is off")])
def test_check__a_planted_mistake(name, mistake, said):
    case = CASES[name](LAB)._replace(ways={TRAINER: mistake})
    wrong = gpu_cases.check(name, case, LAB)["wrong"]
    assert wrong and f"{name}, trainer: {said}" in wrong[0]
