"""The day with a GPU, without one: bench_gpu.py runs on the CPU at tiny sizes, and what it must catch is planted."""
import json
import subprocess
import sys

import bench_gpu
import gpu_cases
import gpu_steps
import pytest
import torch
from common import RECIPE_PARAMETERS, ROOT, preset
from gpu_cases import PLAIN, TINY, TRAINER

import train_gpt as tg

CPU = torch.device("cpu")
FABRIC = tg.Fabric(CPU)


@pytest.fixture
def lab() -> gpu_cases.Lab:
    return gpu_cases.Lab(FABRIC, TINY, 1, None)


def bench(folder, *flags: str) -> tuple[int, dict, str]:
    """Exit status, figures and text of a call."""
    status = bench_gpu.main(["--device=cpu", f"--out={folder}", *flags])
    return status, json.loads((folder / "bench.json").read_text()), (folder / "bench.txt").read_text()


# ------ The whole -----------------------------------------------------------------------------------------------------

def test_the_bench_on_a_cpu(tmp_path, capsys):
    status, figures, text = bench(tmp_path)
    assert (status, figures["wrong"], figures["left_out"]) == (0, [], []), text
    assert capsys.readouterr().out.strip() == text.strip(), "what is printed is what is kept"
    assert "no time below says anything of a GPU" in text

    names = [row["name"] for row in figures["kernels"]]
    assert len(names) == len(gpu_cases.CASES) == len(set(names))
    for row in figures["kernels"]:
        assert all(row["poisoned"].values()) and row["name"] in text
        assert all(time["n"] == bench_gpu.TINY_ROUNDS and time["ms"] > 0 for time in row["times"].values())
    stages = figures["steps"]["stages"]
    assert [stage["stage"] for stage in stages] == [0, 1, 2]
    for stage in stages:
        assert stage["tokens_per_s"] > 0 and stage["new_graphs"] == 0
    assert stages[0]["profile"]["rows"][0]["ms"] > 0 and "aten::mm" in text
    assert figures["steps"]["evaluation"]["s_per_block"] > 0
    assert figures["seed"] >= 0 and figures["source_sha256"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert bench_gpu.main([f"--out={tmp_path / 'out'}"]) == 2
    said = capsys.readouterr().err
    assert [line.split(":")[0].strip() for line in said.splitlines()] == ["bench_gpu", "found", "expected", "do"]
    assert "no CUDA device" in said and "--device=cpu" in said
    assert not (tmp_path / "out").exists()


def test_a_case_that_fails_leaves_the_others_alone(tmp_path, monkeypatch, capsys):
    def broken(lab: gpu_cases.Lab) -> gpu_cases.Case:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.\nMore.")

    monkeypatch.setattr(gpu_cases, "CASES", (broken, gpu_cases.row_sums))
    status, figures, text = bench(tmp_path, "--only=kernels")
    assert status == 1 and [row["name"] for row in figures["kernels"]] == ["sums of rows"]
    assert figures["wrong"] == ["broken: OutOfMemoryError: Tried to allocate 20.00 GiB. More."] and "WRONG" in text


def test_a_preset_that_does_not_fit_is_a_result(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise tg.RunError("memory", "1 GiB to use", "room for more", "a larger device")

    monkeypatch.setattr(tg, "fit_memory", refuse)
    status, figures, text = bench(tmp_path, "--only=steps")
    assert status == 0 and "1 GiB to use" in figures["steps"]["refused"] and "1 GiB to use" in text


def test_a_step_that_goes_wrong_is_no_preset_that_does_not_fit(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise tg.RunError("optim_step", "no gradient of ['attn']", "one of each", "forward_backward first")

    monkeypatch.setattr(tg.Optimizer, "step", broken)
    with pytest.raises(tg.RunError, match="no gradient"):
        bench(tmp_path, "--only=steps")


# ------ On a card that is not there -----------------------------------------------------------------------------------

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
def test_the_bench_walks_on_fake_tensors(tmp_path, flags):
    """Everything but numbers and the profiler: its first minute on a card is not spent on typing errors."""
    command = pytest.importorskip("rehearsal.command")
    if command.why_not():
        pytest.skip(command.why_not())
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/gpu")]
    command = [sys.executable, "-c", WALK, *paths, f"--out={tmp_path}", "--limit=100000", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert done.returncode == 0 and not figures["wrong"] and not figures["left_out"], done.stdout + done.stderr
    assert figures["card"] == "NVIDIA H100 80GB HBM3"
    if "--only=kernels" in flags:
        assert len(figures["kernels"]) == len(gpu_cases.CASES)
    else:
        assert [stage["stage"] for stage in figures["steps"]["stages"]] == [0]


# ------ What a check must catch ---------------------------------------------------------------------------------------

def with_way(case: gpu_cases.Case, call) -> gpu_cases.Case:
    return case._replace(ways={TRAINER: call}, kernel="planted")


def planted(lab: gpu_cases.Lab) -> dict[str, tuple[gpu_cases.Case, str]]:
    """Mistakes on purpose, and what is said of each."""
    def half_written(n, up, down, seed):
        outputs = mlp.ways[PLAIN](n, up, down, seed)
        result = torch.empty_like(outputs[0])
        result[:-1] = outputs[0][:-1]                                         # the last row is never stored
        return [result, *outputs[1:]]

    def wrong_gradient(n, up, down, seed):
        out, grad_n, grad_up, grad_down = mlp.ways[PLAIN](n, up, down, seed)
        return [out, grad_n, 1.03 * grad_up, grad_down]

    def reads_behind(sums, index, grad):
        behind = torch.as_strided(grad, (len(grad) + 1, grad.shape[1]), grad.stride(), grad.storage_offset())
        tg.add_rows(sums, index, grad)
        sums[0] += 0 * behind[-1]                                             # finite but for what lies behind
        return [sums]

    def writes_behind(sums, index, grad):
        tg.add_rows(sums, index, grad)
        behind = torch.as_strided(sums, (len(sums) + 1, sums.shape[1]), sums.stride(), sums.storage_offset())
        behind[-1] = 0.0
        return [sums]

    def one_line_short(sums, index, grad):
        tg.add_rows(sums, index[:-1], grad[:-1])
        return [sums]

    def wider_window(q, k, v, bounds, seed):
        return gpu_cases.attention(lab, "", TINY.short + 1).ways[PLAIN](q, k, v, bounds, seed)

    mlp = gpu_cases.mlp(lab)
    rows = gpu_cases.row_sums(lab)
    return {
        "half written": (with_way(mlp, half_written), "output 0 is off by nan"),
        "wrong gradient": (with_way(mlp, wrong_gradient), "output 2 is off"),
        "reads behind": (with_way(rows, reads_behind), "output 0 is off by nan"),
        "writes behind": (with_way(rows, writes_behind), "writes in front of an input or behind it"),
        "one line short": (with_way(rows, one_line_short), "output 0 is off"),
        "wider window": (with_way(gpu_cases.short_attention(lab), wider_window), "output 0 is off"),
    }


@pytest.mark.parametrize("mistake", ["half written", "wrong gradient", "reads behind", "writes behind",
                                     "one line short", "wider window"])
def test_a_planted_mistake_is_caught_and_named(lab, mistake):
    case, said = planted(lab)[mistake]
    wrong = gpu_cases.check(case, CPU)["wrong"]
    assert len(wrong) >= 1 and f"{case.name}, trainer: {said}" in wrong[0]


@pytest.mark.all
@pytest.mark.parametrize("make", gpu_cases.CASES, ids=lambda make: make.__name__)
def test_every_compiled_way(make):
    lab = gpu_cases.Lab(FABRIC, TINY, 2, "aot_eager")
    case = make(lab)
    found = gpu_cases.check(case, CPU)
    assert not found["wrong"]
    assert gpu_cases.time_ways(case, CPU, 1).keys() == case.ways.keys() == found["errors"].keys()
    assert TRAINER in case.ways


# ------ Figures -------------------------------------------------------------------------------------------------------

def test_the_model_s_work():
    """Products: 6 flops a token and weight of every matrix; attention: by pairs, layer by layer."""
    cfg = preset("record", vocab_size=tg.GPT2_VOCAB, document_start=50_256)
    matrices = [torch.Size(shape).numel() for label, shape, *_ in RECIPE_PARAMETERS
                if label in ("attn", "mlp", "lm_head")]
    assert gpu_steps.product_flops(cfg) == 6 * sum(matrices)

    values = tg.Schedule(cfg).at(0)
    document = torch.tensor([[0, 100]], dtype=torch.int32)                    # shorter than every window
    alone = 100 * 101 // 2
    paired = 200 * 201 // 2
    kinds = [layer.attention for layer in tg.LAYERS]
    of_paired = kinds.count("paired") * 3 * (paired - (200 - 129) * (200 - 128) // 2)       # 129 keys at most
    pairs = kinds.count("plain") * 6 * alone + of_paired
    expected = values.slot_tokens * 6 * sum(matrices) + 14 * 128 * pairs
    assert gpu_steps.model_flops(cfg, values, document) == pytest.approx(expected, rel=1e-12)
