"""What a GPU computes, keeps and compiles:  python -m pytest -m gpu -s tests/gpu

The same tests run small on a CPU. --all adds the whole warm-up, minutes on a card; -s shows the figures.
"""
import contextlib
import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace

import gpu_cases
import gpu_steps
import pytest
import torch
from common import fill_randomly, grad_of, preset, random_batch, run
from gpu_cases import BF16, CASES, F32, F64, TRAINER, relative
from torch import Tensor

import train_gpt as tg


@functools.cache
def lab_of(fabric: tg.Fabric) -> gpu_cases.Lab:
    seed = 0
    if fabric.on_cuda:
        seed = torch.seed() % 2**31                           # fresh inputs, and printed
        print(f"inputs of seed {seed}")
    return gpu_cases.Lab(fabric, seed=seed)


def needs_memory(size: float) -> None:
    """Skip where fewer bytes of the device are free."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < size:
        pytest.skip("too little memory on this CUDA device")


# ---- Operations
@pytest.mark.parametrize("name", CASES)
def test_operation__against_f64_in_poisoned_memory(fabric, name):
    lab = lab_of(fabric)
    if name not in lab.cases():
        pytest.skip("this CUDA device has no fp8")
    found = gpu_cases.check(name, CASES[name](lab), lab)
    print(found)
    assert found["wrong"] == []


RAGGED = [("mlp", dict(T=1, F=8, D=8)), ("mlp", dict(T=130, F=264, D=72)), ("mlp", dict(T=1000, F=3072, D=768)),
          ("sums of rows", dict(R=40_000, T=98_304, D=96)), ("sums of rows", dict(R=7, T=1000, D=768)),
          ("sums of rows", dict(R=300, T=1, D=1)), ("sums of rows", dict(R=5, T=33, D=5))]


@pytest.mark.parametrize("name, sizes", RAGGED)
def test_operation__ragged_and_the_same_bits_again(fabric, name, sizes):
    """Tiles that end at no edge; thousands of lines of one row, added in one order."""
    lab = gpu_cases.Lab(fabric, gpu_cases.TINY._replace(**sizes))
    case = CASES[name](lab)
    assert gpu_cases.check(name, case, lab)["wrong"] == []
    way = next(iter(case.ways.values()))
    first, again = (way(*(x.clone() for x in case.inputs)) for _ in range(2))
    assert all(x.equal(y) for x, y in zip(first, again))


def test_add_rows__beyond_2_to_31_elements(gpu):
    """Of a table of 8.6 GB only the last rows are looked at."""
    width = 768
    rows = 2**31 // width + 1000
    needs_memory(5 * rows * width)
    sums = torch.empty(rows, width, device=gpu.device)
    last = torch.arange(rows - 4, rows, device=gpu.device)
    sums[last] = 1.0
    grad = torch.randn(8, width, device=gpu.device)
    tg.add_rows(sums, last.repeat(2).int(), grad)
    assert relative(sums[last], 1 + grad[:4].double() + grad[4:].double()) < 1e-6


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_relu_sq__beyond_2_to_31_elements(gpu, dtype):
    """Forward and backward; only the last rows are looked at."""
    columns, depth = 3072, 16
    count = 2**31 // columns + 200
    needs_memory(8 * count * columns)
    lab = gpu_cases.Lab(gpu, gpu_cases.TINY)
    x = lab.normal(count, depth, dtype=dtype)
    w = lab.normal(columns, depth, dtype=dtype)
    assert tg.fits_relu_sq(x, w)
    squares = tg.relu_sq(x, w, None)
    last = slice(count - 100, count)
    product = x[last].double() @ w.double().t()
    assert relative(squares[last], product.clamp(min=0).square()) < 1e-2
    assert relative(tg.relu_sq(x, w, squares)[last], 2 * product * squares[last].double().sqrt()) < 1e-2


# ---- Attention
DOCUMENTS = {                            # their ends in one flattened batch: ragged, one alone, empty ones, none cut
    "ragged": [1, 2, 130, 131, 500, 1500, 1501, 3000, 4096], "one": [4096], "tokens": list(range(1, 129)),
    "empty": [7, 7, 7, 900, 900, 1024, 1024, 1024], "blocks": list(range(128, 2049, 128)), "long": [9, 6000],
}
WINDOWS = (1, 128, 384, 2560, 10**6)     # one key, those of the three stages, all
HEADS = (6, 3)                           # of plain layers, of paired ones


def attention_error(lab: gpu_cases.Lab, ends: list[int], window: int, heads: int) -> float:
    """Largest error of output and gradients of q, k, v against the f32 reference, relative to the largest value."""
    q, k, v, seed = lab.normal(4, ends[-1], heads, lab.sizes.E).unbind()
    bounds = torch.tensor([0, *ends], dtype=torch.int32, device=lab.device)
    span = tg.AttentionSpan(int(bounds.diff().max()), window, 12.8 / lab.sizes.E)
    results = []
    for attend, dtype in ((lab.attention, BF16), (tg.attention_reference, F32)):
        inputs = [x.to(dtype).requires_grad_() for x in (tg.rms_norm(q), tg.rms_norm(k), v)]
        out = attend(*inputs, bounds, span)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, seed.to(dtype))])
    least = 0.01 * max(float(x.abs().max()) for x in results[1])              # documents of one token: no gradient of q
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(least)) for a, b in zip(*results))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_choose_attention__against_the_reference(fabric, name):
    lab = lab_of(fabric)
    ends = DOCUMENTS[name]
    if not fabric.on_cuda:                                    # smaller: the reference is compared with itself
        ends = [end // 8 for end in ends]
    for heads, window in itertools.product(HEADS, WINDOWS):
        error = attention_error(lab, ends, window, heads)
        print(f"{lab.attention_name}, {heads} heads, window {window}: {error:.1e}")
        assert error < 8 * 2**-8, "a few roundings of 8 bits"


# ---- The head
def test_HeadLoss__beyond_2_to_31_logits(gpu):
    """Those of the third stage, compiled."""
    needs_memory(30e9)
    lab = gpu_cases.Lab(gpu, gpu_cases.RECORD._replace(T=49_152))
    name = "head, fp8" if lab.has_fp8 else "head, plain"
    case = CASES[name](lab)
    assert gpu_cases.check(name, case._replace(ways={TRAINER: case.ways[TRAINER]}), lab)["wrong"] == []


# ---- The model
SUMS = ("scalars", "x0_lambdas", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank")     # over all positions
BOUNDS = {                               # relative errors of losses, gradients of matrices and of SUMS, which cancel:
    F32: (1e-6, 1e-5, 1e-5),             # about five times what a CPU shows
    BF16: (1e-3, 0.1, 0.15)}
SPREAD = 0.25                            # of weights: larger ones make more of a rounding


@torch.no_grad()
def fill_alike(model: tg.GPT) -> None:
    """Random weights that bf16 can hold, so that they are the same in every dtype."""
    fill_randomly(model)
    for p in model.parameters():
        p.copy_(SPREAD * p.bfloat16())


def gradients_of_step(cfg: tg.Config, fabric: tg.Fabric, dtype: torch.dtype, tokens: int) -> dict[str, Tensor]:
    """Losses and gradients of two slots of random documents."""
    kernel = tg.attention_reference
    if dtype == BF16:
        kernel, _ = gpu_cases.chosen_attention(fabric, cfg.head_dim)
    cfg = replace(cfg, dtype=str(dtype).removeprefix("torch."), compile=int(fabric.on_cuda and dtype == BF16))
    executor = tg.Executor(cfg, fabric, kernel, "plain", 2)
    fill_alike(executor.model)
    batch = random_batch(cfg, 3, 2, tokens, step=1).to(fabric.device)
    losses = executor.forward_backward(batch, tg.Schedule(cfg).at(1)).slot_sums
    grads = {label: grad_of(executor.optimizer, label) for label, _ in executor.model.named_parameters()}
    return dict(grads, losses=losses)


def test_forward_backward__bf16_and_f32_against_f64(fabric):
    """The full width with small tables; on a CPU all is small."""
    cfg = preset("record", 4096, 4095, bigram_rows=8192, max_doc_len=256)
    tokens = 2048
    if not fabric.on_cuda:
        cfg = replace(cfg, bigram_rows=512, model_dim=64, num_heads=4, head_dim=16, attn_scale=0.8)
        tokens = 128
    exact = gradients_of_step(cfg, fabric, F64, tokens)
    for dtype, (of_losses, of_matrices, of_sums) in BOUNDS.items():
        found = gradients_of_step(cfg, fabric, dtype, tokens)
        errors = {label: relative(x, exact[label]) for label, x in found.items()}
        print(dtype, errors)
        assert errors.pop("losses") < of_losses
        wrong = {label: x for label, x in errors.items() if not x < (of_sums if label in SUMS else of_matrices)}
        assert not wrong, dtype


# ---- Tables of n-grams
def touched_by_steps(fabric: tg.Fabric, home: str, rounding: str) -> list[Tensor]:
    """Rows with their state that six steps have touched, on the host. On a GPU they travel by a stream of their own."""
    tables = (tg.NgramTable("trigram_embed", 3, 3001, home=home, rounding=rounding),)
    cfg = preset("tiny", dtype="bfloat16", tables=tables, compile=0)
    executor = tg.Executor(cfg, fabric, tg.attention_reference, "plain")
    schedule = tg.Schedule(cfg)
    cycles = [list(map(schedule.at, range(first, first + 2))) for first in (0, 2, 4)]
    loader = tg.Loader(cfg, fabric, tg.find_shards(cfg.train_files), cycles, executor.exchange_ahead)
    loader.start()
    for values in sum(cycles, []):
        tg.train_step(executor, loader, values)
    loader.close()
    (places, rows), = executor.tables["trigram_embed"].home.touched()
    return [places, *rows]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_HostHome__has_the_bits_of_the_device_home(fabric, rounding):
    device, again, host = (touched_by_steps(fabric, home, rounding) for home in ("device", "device", "host"))
    assert len(device[0]) > 300
    assert all(x.equal(y) for x, y in zip(device, again)), "no two runs are alike: homes cannot be compared"
    assert all(x.equal(y) for x, y in zip(device, host))


# ---- Runs
def test_main__a_short_run_as_on_a_cpu(fabric, tmp_path):
    """Warm-up, training through all stages, validation, checkpoints, sample."""
    flags = ["--compile=0", "--checkpoint_every=4", "--val_every=4"]
    losses = []
    for number, device in enumerate(("cpu", fabric.device.type)):
        done = run(tmp_path / f"{number}", f"--device={device}", *flags)
        assert done.status == 0, done.err
        losses.append([event["val_loss"] for event in done.of("val")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@functools.cache
def started(fabric: tg.Fabric) -> gpu_steps.Started:
    """The record preset at full size, on a CPU tiny."""
    try:
        return gpu_steps.open_run(fabric)
    except tg.RunError as error:
        pytest.skip(f"the record preset does not fit this CUDA device: {error}")


def test_train_step__memory_graphs_and_losses_of_each_stage(fabric):
    """In the order of the run, the untying included; then evaluation. The peak must stay within the room that the
    estimate takes."""
    run = started(fabric)
    for stage in range(3):
        found = gpu_steps.measure_stage(run, stage, cycles=2)
        print(run.figures, found)
        assert found["new_graphs"] == 0, "compiled after the first two cycles"
        assert 0 < found["last_loss"] < 1.2 * found["first_loss"], "a training step makes it worse"
        if fabric.on_cuda:
            assert 0.4 * found["estimate_mib"] < found["peak_mib"] < found["estimate_mib"] / tg.MEMORY_SHARE
    found = gpu_steps.measure_evaluation(run)
    print(found)
    assert found["new_graphs"] == 0 and found["peak_mib"] < run.figures["estimate_mib"] / tg.MEMORY_SHARE


def test_snapshot__restored_the_same_steps_give_the_same_losses(fabric):
    """Nothing that runs on the device is left out."""
    run = started(fabric)
    restore = run.executor.snapshot()
    losses = []
    for _ in range(2):
        steps = gpu_steps.Steps(run, 2, 1)
        steps.seconds(run.schedule.cycle)
        steps.loader.close()
        losses.append(torch.cat([x.slot_sums for x in steps.losses]))
        restore()
    assert relative(*losses) < 1e-3, "to rounding: sums on a GPU have no order"


@pytest.mark.all
def test_warm_up__no_stage_compiles_after_it(fabric):
    """The race's own, whole, evaluations too."""
    run = started(fabric)
    tg.warm_up(run.cfg, fabric, run.executor, SimpleNamespace(phase=contextlib.nullcontext))
    for stage in range(3):
        assert gpu_steps.measure_stage(run, stage, cycles=1)["graphs"] == 0
