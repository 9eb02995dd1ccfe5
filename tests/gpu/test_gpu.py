"""What only a GPU can show, in one call that prints its figures:  python -m pytest -m gpu -s tests

bf16 against f32 and f64 on the device (forward, backward, one update), every operation against f64 in poisoned memory,
ragged documents, the largest head, sums of rows in one order, and the record preset at full size: memory by estimate
and as measured, ms a step in the three stages, graphs. With --all the whole warm-up of a run, too: minutes. Without a
GPU the same functions are rehearsed on the CPU, small. `bench_gpu.py` times what is checked here.
"""
import json
from dataclasses import replace
from typing import NamedTuple

import gpu_cases
import gpu_steps
import pytest
import torch
from common import grad_of, preset, random_batch, set_grad
from gpu_cases import BF16, F32, F64, relative
from torch import Tensor

import train_gpt as tg

CPU = torch.device("cpu")


def on_gpu(test):
    """Marked `gpu`, and skipped where there is none."""
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing of this is known here")
    return pytest.mark.gpu(skip(test))


@pytest.fixture
def gpu() -> tg.Fabric:
    fabric = tg.Fabric(torch.device("cuda", 0))
    fabric.enter_thread()
    return fabric


@pytest.fixture
def show(capsys):
    def show(**figures) -> None:
        with capsys.disabled():
            print("\n" + json.dumps(figures), flush=True)
    return show


def needs_memory(size: float) -> None:
    """Skip where fewer bytes of the device are free."""
    if torch.cuda.mem_get_info()[0] < size:
        pytest.skip("too little memory")


# ------ bf16 against f32 and f64 --------------------------------------------------------------------------------------

SUMS = ("scalars", "x0_lambdas", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank")     # over all positions
BOUNDS = {                               # dtype -> relative errors against f64, about three times what a CPU shows:
    F32: (1e-5, 1e-4, 1e-4, 1e-3, 1e-4), # losses, gradients of matrices, gradients of SUMS, updates of banks, weights
    BF16: (2e-3, 0.1, 0.5, 0.2, 0.03),   # sums cancel; Newton-Schulz in bf16 leaves 2 to 7 per cent
}
SPREAD = dict(mlp=0.01, scalars=0.05, x0_lambdas=0.05, smear_gate=0.1, skip_gate=0.1, attn_gate_bank=0.1,
              ve_gate_bank=0.1, bigram_embed=0.05, value_embed=0.05, lm_head=0.02)


@torch.no_grad()
def stir(model: tg.GPT) -> None:
    """Initial values, and noise on top that leaves no term of the forward pass at zero; the same in every dtype."""
    model.set_initial_values(0, lambda label, x: x)
    generator = torch.Generator().manual_seed(1)
    for row in model.table.values():
        p = model.get_parameter(row.label)
        mixed = p.cpu().float() + torch.randn(row.shape, generator=generator) * SPREAD.get(row.label, 0.0)
        p.copy_(mixed if row.full_precision else mixed.bfloat16())
    model.embed.copy_(model.lm_head.t())


class Pass(NamedTuple):
    executor: tg.Executor
    losses: Tensor
    grads: dict[str, Tensor]


def forward_backward(cfg: tg.Config, fabric: tg.Fabric, dtype: torch.dtype, kernel, compiled: int, tokens: int) -> Pass:
    """One step of two slots of random documents with the same weights in any dtype."""
    cfg = replace(cfg, dtype=str(dtype).removeprefix("torch."), compile=compiled, head="plain")
    executor = tg.Executor(cfg, fabric, kernel, "plain", 2)
    stir(executor.model)
    batch = random_batch(cfg, 3, 2, tokens, step=1).map(lambda x: x.to(fabric.device))
    losses = executor.forward_backward(batch, tg.Schedule(cfg).at(1)).slot_sums
    grads = {label: grad_of(executor.optimizer, label) for label, _ in executor.model.named_parameters()}
    return Pass(executor, losses, {label: grad.to(F64, copy=True) for label, grad in grads.items()})


def exact_bank(executor: tg.Executor, label: str) -> Tensor:
    bank = executor.optimizer.entries[label]
    mantissa = executor.optimizer.state[label].get("mantissa")
    return (bank.shard if mantissa is None else tg.with_mantissa(bank.shard, mantissa)).double()


def compare_dtypes(cfg: tg.Config, fabric: tg.Fabric, kernel, compiled: int, tokens: int) -> dict[str, dict]:
    """Relative errors of f32 and bf16 against f64: of losses, of gradients and of one update by label.

    The update is given the same gradients in every dtype: Adam's first step is their sign, which rounding may turn.
    """
    exact = forward_backward(cfg, fabric, F64, tg.attention_reference, 0, tokens)
    before = {label: exact_bank(exact.executor, label).clone() for label in ("attn", "mlp")}
    passes = {F32: forward_backward(cfg, fabric, F32, tg.attention_reference, 0, tokens),
              BF16: forward_backward(cfg, fabric, BF16, kernel, compiled, tokens)}
    values = tg.Schedule(cfg).at(1)
    for done in (exact, *passes.values()):
        for label, p in done.executor.model.named_parameters():
            if label in done.executor.tables:                             # in the rows of the plan, which is the same
                done.executor.tables[label].row_grads.copy_(exact.grads[label])
            else:
                set_grad(done.executor.optimizer, label, exact.grads[label])
        done.executor.optim_step(values)
    found = {}
    for dtype, done in passes.items():
        moved = {label: relative(exact_bank(done.executor, label) - start, exact_bank(exact.executor, label) - start)
                 for label, start in before.items()}
        weights = {label: relative(p, exact.executor.model.get_parameter(label))
                   for label, p in done.executor.model.named_parameters()}
        grads = {label: relative(done.grads[label], exact.grads[label]) for label in exact.grads}
        found[dtype] = dict(losses=relative(done.losses, exact.losses), grads=grads, moved=moved, weights=weights)
    return found


def check_dtypes(found: dict, show) -> None:
    for dtype, errors in found.items():
        worst = {what: max(errors[what].items(), key=lambda item: item[1]) for what in ("grads", "moved", "weights")}
        show(dtype=str(dtype), losses=errors["losses"], **worst)
    for dtype, errors in found.items():
        losses, matrices, sums, moved, weights = BOUNDS[dtype]
        assert errors["losses"] < losses, dtype
        bad = {label: x for label, x in errors["grads"].items() if not x < (sums if label in SUMS else matrices)}
        assert not bad, (dtype, bad)
        assert max(errors["moved"].values()) < moved and max(errors["weights"].values()) < weights, (dtype, errors)


def small_record(vocab: int, rows: int, **changes) -> tg.Config:
    return preset("record", vocab_size=vocab, document_start=vocab - 1, bigram_rows=rows, max_doc_len=256, **changes)


@on_gpu
def test_bf16_against_f32_and_f64(gpu, show):
    cfg = small_record(4096, 8192)                                             # full width, small tables
    name, kernel = gpu_cases.chosen_attention(gpu, cfg.head_dim)
    show(attention=name, device=tg.hardware(gpu), torch=torch.__version__)
    check_dtypes(compare_dtypes(cfg, gpu, kernel, compiled=1, tokens=2048), show)


def test_bf16_against_f32_and_f64_rehearsed(show):
    cfg = small_record(256, 512, model_dim=64, num_heads=4, head_dim=16, attn_scale=0.8)
    check_dtypes(compare_dtypes(cfg, tg.Fabric(CPU), tg.attention_reference, compiled=0, tokens=128), lambda **_: None)


# ------ Every operation -----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def lab() -> gpu_cases.Lab:
    fabric = tg.Fabric(torch.device("cuda", 0))
    fabric.enter_thread()
    seed = torch.seed() % 2**31                                               # fresh inputs, and printed
    print(f"inputs of seed {seed}")
    sizes = gpu_cases.sizes_of(torch.cuda.get_device_properties(fabric.device).total_memory)
    return gpu_cases.Lab(fabric, sizes, seed, "inductor")


@on_gpu
@pytest.mark.parametrize("make", gpu_cases.CASES, ids=lambda make: make.__name__)
def test_an_operation_against_f64(lab, show, make):
    if make not in gpu_cases.makers(lab):
        pytest.skip(f"no fp8 at capability {torch.cuda.get_device_capability(0)}")
    found = gpu_cases.check(make(lab), lab.device)
    show(**found)
    assert all(found["poisoned"].values()) and not found["wrong"]


@pytest.mark.parametrize("make", gpu_cases.CASES, ids=lambda make: make.__name__)
def test_an_operation_rehearsed(make):
    lab = gpu_cases.Lab(tg.Fabric(CPU), gpu_cases.TINY, 0, None)
    found = gpu_cases.check(make(lab), CPU)
    assert all(found["poisoned"].values()) and not found["wrong"]


# ------ Attention -----------------------------------------------------------------------------------------------------

ENDS = {                                 # documents in one flattened batch: ragged, one alone, empty ones, none cut
    "ragged": [1, 2, 130, 131, 500, 1500, 1501, 3000, 4096], "one": [4096], "tokens": list(range(1, 129)),
    "empty": [7, 7, 7, 900, 900, 1024, 1024, 1024], "blocks": list(range(128, 2049, 128)), "long": [9, 6000],
}


def attention_errors(kernel, fabric: tg.Fabric, ends: list[int], window: int, heads: int, width: int) -> list[float]:
    """Largest error of output and gradients of q, k, v against the f32 reference, relative to the largest value."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, ends[-1], heads, width, generator=generator).to(fabric.device)
    inputs[:2] = tg.rms_norm(inputs[:2])                                      # as queries and keys are in the model
    seed = torch.randn(ends[-1], heads, width, generator=generator).to(fabric.device)
    bounds = torch.tensor([0, *ends], dtype=torch.int32, device=fabric.device)
    longest = max(end - start for start, end in zip([0, *ends], ends))
    span = tg.AttentionSpan(longest, window, 12.8 / width)
    results = []
    for attend, dtype in ((kernel, BF16), (tg.attention_reference, F32)):
        x = inputs.bfloat16().to(dtype).requires_grad_()
        out = attend(*x.unbind(), bounds, span)
        out.backward(seed.bfloat16().to(dtype))
        results.append([out.detach().float(), *x.grad.float()])
    least = 0.01 * max(float(x.abs().max()) for x in results[1])             # documents of one token: no gradient of q
    return [float((a - b).abs().max() / b.abs().max().clamp_min(least)) for a, b in zip(*results)]


@on_gpu
@pytest.mark.parametrize("name", ENDS)
def test_the_chosen_attention_against_the_reference(gpu, show, name):
    """Plain layers have 6 heads, paired ones 3; windows of the three stages, one key, and all."""
    backend, kernel = gpu_cases.chosen_attention(gpu, 128)
    worst = {}
    for heads, window in ((6, 128), (3, 128), (6, 384), (6, 2560), (6, 1), (6, 10**6)):
        worst[f"{heads} heads, window {window}"] = attention_errors(kernel, gpu, ENDS[name], window, heads, 128)
    show(attention=backend, documents=name, worst=max(map(max, worst.values())))
    assert max(map(max, worst.values())) < 8 * 2**-8, worst                  # a few roundings of 8 bits


def test_the_chosen_attention_rehearsed():
    for name in ("ragged", "empty", "tokens"):
        for window in (1, 128, 10**6):
            ends = [end for end in ENDS[name] if end <= 1501]
            assert max(attention_errors(tg.attention_reference, tg.Fabric(CPU), ends, window, 2, 16)) < 8 * 2**-8


# ------ The head ------------------------------------------------------------------------------------------------------

def head_results(fabric: tg.Fabric, precision: str, rows: int, width: int, columns: int, weight: float) -> list[Tensor]:
    """Losses and both gradients of the head at sizes of the record preset's kind."""
    generator = torch.Generator().manual_seed(0)
    y = tg.rms_norm(torch.randn(rows, width, generator=generator)).bfloat16().to(fabric.device).requires_grad_()
    w = (torch.randn(width, columns, generator=generator) * 0.05).bfloat16().to(fabric.device).requires_grad_()
    targets = torch.randint(0, columns, (2, rows // 2), generator=generator).to(fabric.device)
    weights, seed = torch.tensor([1.0, 0.5, 0.25]), torch.tensor(weight)
    losses = tg.HeadLoss.apply(y, w, targets, weights.to(fabric.device), seed.to(fabric.device), precision, BF16,
                               tg.as_part(w))
    losses.sum().backward(seed.to(fabric.device))
    return [losses.detach(), y.grad, w.grad]


def compare_heads(fabric: tg.Fabric, rows: int, width: int, columns: int, show) -> None:
    native, emulated, plain = (head_results(fabric, precision, rows, width, columns, 1.0)
                               for precision in ("fp8", "emulated", "plain"))
    names = ("losses", "grad_y", "grad_w")
    errors = {name: relative(a, b) for name, a, b in zip(names, native, emulated)}
    to_bf16 = {name: relative(a, b) for name, a, b in zip(names, native, plain)}
    show(fp8_against_emulation=errors, fp8_against_bf16=to_bf16,
         mean_loss=[float(x[0].mean()) for x in (native, emulated, plain)])
    # The products are the same but for the device's sums (fast ones keep about 14 bits) and the roundings of logits to
    # bf16 and of their gradient to 2 bits that then turn out otherwise here and there.
    assert errors["losses"] < 4e-3 and max(errors["grad_y"], errors["grad_w"]) < 0.06
    assert float(native[0].mean()) == pytest.approx(float(emulated[0].mean()), rel=1e-3), "no bias"
    halved = head_results(fabric, "fp8", rows, width, columns, 0.5)
    assert all(torch.equal(2 * a, b) for a, b in zip(halved[1:], native[1:])), "the weight moves the scale only"


@on_gpu
def test_the_fp8_head_against_its_emulation(gpu, show):
    if torch.cuda.get_device_capability(0) < (8, 9):
        pytest.skip(f"no fp8 at capability {torch.cuda.get_device_capability(0)}: the head is bf16 here")
    compare_heads(gpu, 4096, 768, 50_304, show)


def largest_head(fabric: tg.Fabric, precision: str, rows: int, width: int, columns: int, compiled: bool) -> list[float]:
    """Errors of the last rows where their logits lie beyond 2^31 elements: losses, gradients of y; then of all of w."""
    generator = torch.Generator(fabric.device).manual_seed(0)
    y = torch.randn(rows, width, generator=generator, device=fabric.device)
    w = 0.05 * torch.randn(width, columns, generator=generator, device=fabric.device)
    y = tg.rms_norm(y).bfloat16().requires_grad_()
    w = w.bfloat16().requires_grad_()
    targets = torch.randint(columns, (1, rows), generator=generator, device=fabric.device)
    one = torch.ones(1, device=fabric.device)

    def loss(y: Tensor, w: Tensor) -> Tensor:
        return tg.HeadLoss.apply(y, w, targets, one, one[0], precision, BF16, tg.as_part(w))

    if compiled:
        loss = torch.compile(loss, dynamic=False, fullgraph=True)
    losses = loss(y, w)
    losses.sum().backward()
    exact = gpu_cases.exact_head(precision == "fp8")
    last = slice(rows - 64, rows)
    exact_y = y.detach().double()
    exact_w = w.detach().double()
    seeds = one.double().expand(rows)
    _, _, grad_w = exact(exact_y, exact_w, targets, one.double(), seeds)
    of_last, grad_y, _ = exact(exact_y[last], exact_w, targets[:, last], one.double(), seeds[last])
    return [relative(losses[last], of_last), relative(y.grad[last], grad_y), relative(w.grad, grad_w)]


@on_gpu
def test_the_head_beyond_two_to_the_31_logits(gpu, show):
    """Those of the third stage."""
    rows = 49_152
    needs_memory(30e9)
    precision = tg.head_precision(preset("record"), gpu)
    errors = largest_head(gpu, precision, rows, 768, 50_304, compiled=True)
    show(head=precision, rows=rows, errors=errors)
    assert errors[0] < 4e-3 and max(errors[1:]) < 0.06
    torch.cuda.empty_cache()


def test_the_largest_head_rehearsed():
    for precision in ("fp8", "plain"):
        errors = largest_head(tg.Fabric(CPU), precision, 128, 32, 256, compiled=False)
        assert errors[0] < 4e-3 and max(errors[1:]) < 0.06


def test_the_fp8_head_rehearsed():
    """F.scaled_mm runs on a CPU too."""
    compare_heads(tg.Fabric(CPU), 128, 64, 512, lambda **_: None)


# ------ Sums of rows --------------------------------------------------------------------------------------------------

def sums_of_rows(fabric: tg.Fabric, rows: int, width: int, lines: int, dtype: torch.dtype) -> tuple[float, list]:
    """(largest error against f64 in units of the largest sum, sums of two runs): a few rows get most of the lines."""
    generator = torch.Generator().manual_seed(0)
    index = (rows * torch.rand(lines, generator=generator, dtype=F64)**8).int()
    index[lines // 2:lines // 2 + lines // 8] = rows - 1
    grad = torch.randn(lines, width, generator=generator).to(dtype)
    start = torch.randn(rows, width, generator=generator)
    exact = start.double().index_add_(0, index.long(), grad.double())
    results = []
    for _ in range(2):
        sums = start.to(fabric.device, copy=True)
        tg.add_rows(sums, index.to(fabric.device), grad.to(fabric.device))
        results.append(sums.cpu())
    unread = torch.ones(rows, dtype=torch.bool)
    unread[index.long()] = False
    assert results[0][unread].equal(start[unread]), "rows of no line are as they were"
    return float((results[0].double() - exact).abs().max() / exact.abs().max()), results


@on_gpu
@pytest.mark.parametrize("width", [1, 5, 96, 768])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_sums_of_rows_against_f64_and_again(gpu, show, width, dtype):
    for rows, lines in ((40_000, 98_304), (7, 1000), (300, 1), (5, 33)):
        error, results = sums_of_rows(gpu, rows, width, lines, dtype)
        show(rows=rows, width=width, lines=lines, dtype=str(dtype), error=error)
        assert error < 1e-5 and results[0].equal(results[1]), "thousands of sums in f32, in one order"


@on_gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_relu_sq_kernel_against_f64(gpu, show, dtype):
    """Forward here and backward in autograd's thread, ragged at every edge; then a line beyond 2^31 elements."""
    for count, columns, depth in ((1, 8, 8), (130, 264, 72), (1000, 3072, 768), (2**31 // 3072 + 200, 3072, 16)):
        needs_memory(8 * count * columns)
        generator = torch.Generator(gpu.device).manual_seed(count)
        n, seed = (torch.randn(count, depth, device=gpu.device, generator=generator).to(dtype) for _ in range(2))
        up, down = (torch.randn(columns, depth, device=gpu.device, generator=generator).to(dtype) for _ in range(2))
        assert tg.fits_relu_sq(n, up)
        n.requires_grad_()
        tg.relu_sq_mlp(n, tg.as_part(up), tg.as_part(down)).backward(seed)
        for rows in (slice(0, 100), slice(max(0, count - 100), count)):
            product = n[rows].double() @ up.double().t()
            squares = product.clamp(min=0).square()
            found = tg.relu_sq(n.detach(), up, None)[rows]
            grad_pre = 2 * (seed[rows].double() @ down.double().t()) * squares.sqrt()
            errors = relative(found, squares), relative(n.grad[rows], grad_pre @ up.double())
            show(count=count, columns=columns, depth=depth, dtype=str(dtype), errors=errors)
            assert max(errors) < 1e-2


@on_gpu
def test_sums_of_rows_beyond_two_to_the_31_elements(gpu):
    """Of a table of 8.6 GB only the last rows are looked at."""
    rows, width = 2**31 // 768 + 1000, 768
    needs_memory(5 * rows * width)
    sums = torch.empty(rows, width, device=gpu.device)
    last = torch.arange(rows - 4, rows)
    sums[last.to(gpu.device)] = 1.0
    grad = torch.randn(8, width, generator=torch.Generator().manual_seed(0))
    tg.add_rows(sums, last.repeat(2).int().to(gpu.device), grad.to(gpu.device))
    assert relative(sums[rows - 4:].cpu(), 1 + grad[:4].double() + grad[4:].double()) < 1e-6
    del sums
    torch.cuda.empty_cache()


def test_sums_of_rows_rehearsed():
    for rows, lines in ((400, 3000), (7, 1000), (300, 1), (5, 33)):
        error, results = sums_of_rows(tg.Fabric(CPU), rows, 5, lines, BF16)
        assert error < 1e-5 and results[0].equal(results[1])


# ------ Tables of n-grams ---------------------------------------------------------------------------------------------

def touched_by_steps(fabric: tg.Fabric, home: str, rounding: str) -> list[Tensor]:
    """Rows with their state that six steps have touched, on the host. On a GPU they travel by a stream of their own."""
    tables = (tg.NgramTable("trigram_embed", 3, 3001, home=home, rounding=rounding),)
    cfg = preset("tiny", dtype="bfloat16", tables=tables, compile=0)
    executor = tg.Executor(cfg, fabric, tg.attention_reference, "plain")
    cycles = [[tg.Schedule(cfg).at(step) for step in (first, first + 1)] for first in (0, 2, 4)]
    loader = tg.Loader(cfg, fabric, tg.find_shards(cfg.train_files), cycles, executor.exchange_ahead)
    loader.start()
    for cycle in cycles:
        for values in cycle:
            tg.train_step(executor, loader, values)
    loader.close()
    (places, rows), = executor.tables["trigram_embed"].home.touched()
    return [places, *rows]


def check_homes(fabric: tg.Fabric, rounding: str) -> None:
    device, again, host = (touched_by_steps(fabric, home, rounding) for home in ("device", "device", "host"))
    assert len(device[0]) > 300
    assert all(x.equal(y) for x, y in zip(device, again)), "no two runs are alike: homes cannot be compared"
    assert all(x.equal(y) for x, y in zip(device, host))


@on_gpu
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_both_homes_of_a_table(gpu, rounding):
    check_homes(gpu, rounding)


def test_both_homes_rehearsed():
    check_homes(tg.Fabric(CPU), "stochastic")


# ------ The record preset at full size --------------------------------------------------------------------------------

def check_stage(found: dict) -> None:
    assert found["new_graphs"] == 0, "compiled after the first two cycles"
    assert 0 < found["last_loss"] < 1.2 * found["first_loss"], "a training step makes it worse"


def untying_stage(run: gpu_steps.Started) -> int:
    return [row.untie for row in run.cfg.stages].index(True)


@pytest.fixture(scope="module")
def record() -> gpu_steps.Started:
    fabric = tg.Fabric(torch.device("cuda", 0))
    fabric.enter_thread()
    try:
        return gpu_steps.open_run("record", fabric, 8_000_000, tg.GPT2_VOCAB)
    except tg.RunError as error:
        pytest.skip(f"the record preset does not fit: {error}")


@on_gpu
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_of_the_record_preset(record, show, stage):
    """In the order of the run, the untying included. The peak must stay within the room that the estimate takes."""
    found = gpu_steps.measure_stage(record, stage, cycles=4)
    found["profile"]["rows"] = found["profile"]["rows"][:10]
    show(**record.figures, **found)
    check_stage(found)
    assert gpu_steps.parted(record) == (stage >= untying_stage(record))
    assert 0.4 * found["estimate_mib"] < found["peak_mib"] < found["estimate_mib"] / tg.MEMORY_SHARE


@on_gpu
def test_the_evaluation_of_the_record_preset(record, show):
    found = gpu_steps.measure_evaluation(record)
    show(**found)
    assert found["new_graphs"] == 0 and found["peak_mib"] < found["estimate_mib"] / tg.MEMORY_SHARE


@on_gpu
def test_the_record_preset_ends_as_it_began(record):
    """Restored to a snapshot, the same steps give the same losses: nothing that runs on the device is left out."""
    restore = record.executor.snapshot()
    last = record.schedule.starts[2]
    steps = [record.schedule.at(last + last % 2 + number) for number in range(2)]
    firsts = []
    for _ in range(2):
        loader = tg.Loader(record.cfg, record.fabric, record.headers, [steps])
        loader.start()
        losses = record.executor.forward_backward(loader.next(steps[0]), steps[0])
        firsts.append(losses.slot_sums.cpu())
        record.executor.optim_step(steps[0])
        loader.close()
        restore()
    assert relative(*firsts) < 1e-3, "to rounding: sums on a GPU have no order"


@on_gpu
@pytest.mark.all
def test_the_whole_warm_up_of_the_record_preset(record, show):
    """Minutes of compiling; after it no stage compiles anything."""
    show(**gpu_steps.warm_up(record))
    for stage in range(3):
        assert gpu_steps.measure_stage(record, stage, cycles=1, profiled=False)["graphs"] == 0


def test_the_stages_rehearsed():
    run = gpu_steps.open_run("tiny", tg.Fabric(CPU), 60_000, 512)
    assert gpu_steps.warm_up(run)["graphs"] == 0 and not gpu_steps.parted(run)
    for stage in range(3):
        found = gpu_steps.measure_stage(run, stage, cycles=1, profiled=False)
        check_stage(found)
        assert gpu_steps.parted(run) == (stage >= untying_stage(run)) and found["ms_per_step"] > 0
    assert gpu_steps.measure_evaluation(run)["new_graphs"] == 0
    json.dumps([run.figures, found])
