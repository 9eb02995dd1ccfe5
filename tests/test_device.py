"""What the trainer decides from the device: attention that must prove itself, memory counted before it is used.

Everything here runs on a CPU; what needs a GPU is in test_gpu.py.
"""
import functools
import json
import math
import platform
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from common import ROOT, executor, preset, refused
from common import fabric as make_fabric

import train_gpt as tg

WIDE = dict(dtype="bfloat16", head_dim=128, model_dim=256)


# ------ Attention -----------------------------------------------------------------------------------------------------

class Cards:
    """A rank with a card that calls itself CUDA; of other ranks, what they would say to what it says."""

    on_cuda = True
    device = torch.device("cpu")
    rank = 0

    def __init__(self, monkeypatch, capability: int = 9, others: list[dict] = ()) -> None:
        """others: of each other rank, its answer in the place of this one's."""
        self.said: list[str] = []
        self.others = others
        self.world = 1 + len(others)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))

    def say(self, text: str) -> None:
        self.said.append(text)

    def gather(self, fact) -> list:
        return [fact, *(answers.get(fact, fact) for answers in self.others)]


class Registry:
    """torch's own of flash attentions, and packages that are there: what it calls, by name."""

    def __init__(self, monkeypatch, **kernels) -> None:
        self.kernels = kernels                       # by name; "varlen" is torch's own
        self.active: list[str] = []
        monkeypatch.setattr(tg, "attention_varlen", self.call)
        monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", self.activate)
        monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: (self.active or [None])[0])
        monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", self.active.clear)

    @property
    def in_place(self) -> str:
        return self.active[0] if self.active else "varlen"

    def activate(self, name: str) -> None:
        self.active.clear()
        if name not in self.kernels:
            raise ModuleNotFoundError(f"No module of {name}")
        self.active.append(name)

    def call(self, *args):
        return self.kernels[self.in_place](*args)


def config(**changes) -> tg.Config:
    return preset(**WIDE | changes)


def chosen(monkeypatch, kernel, name: str = "tiny", **changes) -> tuple[str, list[str]]:
    """(the kernel chosen, what was said) in this preset on a card with the kernel as torch's own, no packages."""
    cards = Cards(monkeypatch)
    registry = Registry(monkeypatch, varlen=kernel)
    _, title = tg.choose_attention(name, config(**changes), cards)
    assert not registry.active
    return title.partition(" ")[0], cards.said


def faithful(q, k, v, cu_seqlens, span):
    """A kernel as good as bf16 allows: exact inside, rounded at its end."""
    return tg.attention_reference(q.float(), k.float(), v.float(), cu_seqlens, span).to(q.dtype)


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("no backward here")


def wrong(**changes):
    """The faithful kernel with the bounds or a number of the span wrong, given as a function of the right one."""
    def kernel(q, k, v, cu_seqlens, span):
        given = dict(vars(span), cu_seqlens=cu_seqlens)
        made = {name: change(given[name]) for name, change in changes.items()}
        bounds = made.pop("cu_seqlens", cu_seqlens)
        return faithful(q, k, v, bounds, replace(span, **made))
    return kernel


def raising(error: Exception):
    def kernel(*_):
        raise error
    return kernel


BAD_KERNELS = {                          # kernel -> what is said of it
    "refuses": (raising(RuntimeError("no kernel image\nfor this device")), "no kernel image"),
    "is not there": (raising(ImportError("no module")), "no module"),
    "is not written": (raising(NotImplementedError("CPU")), "CPU"),
    "asserts": (raising(AssertionError("head size")), "head size"),
    "takes other arguments": (raising(TypeError("unexpected keyword")), "unexpected keyword"),
    "fails without a word": (raising(RuntimeError()), "RuntimeError"),
    "fails backward": (lambda *args: NoBackward.apply(faithful(*args)), "no backward here"),
    "gives NaN": (lambda *args: faithful(*args) * float("nan"), "off by"),
    "gives nothing": (lambda *args: faithful(*args) * 0, "off by"),
    "is 10 % off": (lambda *args: faithful(*args) * 1.1, "off by"),
    "sees one key more": (wrong(window=lambda w: w + 1), "off by"),
    "sees one key less": (wrong(window=lambda w: w - 1), "off by"),
    "sees other documents": (wrong(cu_seqlens=lambda c: c[[0, -1]]), "off by"),
    "has its own scale": (wrong(scale=lambda s: 2 * s), "off by"),
    "sees the future": (lambda q, k, v, *_: torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), scale=0.1)[0].transpose(0, 1), "off by"),
}


@pytest.mark.parametrize("name", BAD_KERNELS)
def test_a_kernel_that_fails_or_lies_is_not_taken(monkeypatch, name):
    kernel, word = BAD_KERNELS[name]
    found, said = chosen(monkeypatch, kernel)
    assert found == "reference"
    assert any("varlen does not run here" in line and word in line for line in said), said


WRONG_AT = {                             # what is wrong where little else is: at one window, in one kind of layer
    "one key more, in a wide window": lambda window: window + (window == 300),
    "one key less, in a wide window": lambda window: window - (window == 300),
    "a tile less": lambda window: window - 128 * (window == 300),
    "a window that ends with its tile": lambda window: max(window, 127),
    "a span beyond documents is cut": lambda window: min(window, 256)}


@pytest.mark.parametrize("name", WRONG_AT)
def test_each_window_is_looked_at(monkeypatch, name):
    found, said = chosen(monkeypatch, wrong(window=WRONG_AT[name]))
    assert found == "reference" and any("off by" in line for line in said), said


@pytest.mark.parametrize("heads", [1, 2])
def test_plain_and_paired_layers_are_looked_at(monkeypatch, heads):
    """Paired ones have half the heads."""
    lie = wrong(window=lambda window: window + 1)

    def kernel(q, *rest):
        return (lie if q.shape[1] == heads else faithful)(q, *rest)

    assert chosen(monkeypatch, kernel)[0] == "reference"


class LateWrong(torch.autograd.Function):
    """The output is right; one gradient is not."""
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.1 * grad


@pytest.mark.parametrize("at, name", list(enumerate("qkv")))
def test_each_gradient_is_looked_at(monkeypatch, at, name):
    def kernel(*args):
        inputs = list(args)
        inputs[at] = LateWrong.apply(inputs[at])
        return faithful(*inputs)

    _, said = chosen(monkeypatch, kernel)
    assert any(f"gradient of {name} is off by" in line for line in said), said


def tiled_in_bf16(q, k, v, cu_seqlens, span):
    """Rounded where flash attention rounds: the weights before the values, their gradients before queries and keys."""
    return Tiled.apply(q, k, v, cu_seqlens, span.window, span.scale)


class Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, window, scale):
        at = torch.arange(len(q))
        document = torch.searchsorted(cu_seqlens.long(), at, right=True)
        back = at[:, None] - at
        seen = (back >= 0) & (back <= window) & (document[:, None] == document)
        logits = torch.einsum("qhe,khe->hqk", q.float(), k.float()) * scale
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khe->qhe", weights.bfloat16().float(), v.float()).bfloat16()
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, weights, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, weights, out = (x.float() for x in ctx.saved_tensors)
        grad = grad.float()
        of_v = torch.einsum("hqk,qhe->khe", weights.bfloat16().float(), grad)
        of_weights = torch.einsum("qhe,khe->hqk", grad, v)
        of_logits = weights * (of_weights - (grad * out).sum(-1).t()[..., None]) * ctx.scale
        of_logits = of_logits.bfloat16().float()
        of_q = torch.einsum("hqk,khe->qhe", of_logits, k)
        of_k = torch.einsum("hqk,qhe->khe", of_logits, q)
        return of_q.bfloat16(), of_k.bfloat16(), of_v.bfloat16(), None, None, None


@pytest.mark.parametrize("kernel", [faithful, tiled_in_bf16])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_a_faithful_kernel_is_taken(monkeypatch, head_dim, kernel):
    found, said = chosen(monkeypatch, kernel, head_dim=head_dim, model_dim=2 * head_dim)
    assert found == "varlen"
    assert [line.partition(":")[2][:12] for line in said] == [" FA4 does no", " FA3 does no"]


def test_packages_come_first_and_what_lies_is_put_back(monkeypatch):
    lie = wrong(window=lambda w: w + 1)
    for kernels, found in ((dict(FA4=faithful, FA3=faithful, varlen=faithful), "FA4"),
                           (dict(FA4=lie, FA3=faithful, varlen=faithful), "FA3"),
                           (dict(FA4=lie, FA3=lie, varlen=faithful), "varlen")):
        cards = Cards(monkeypatch)
        registry = Registry(monkeypatch, **kernels)
        kernel, title = tg.choose_attention("record", config(), cards)
        assert registry.in_place == found == title.partition(" ")[0] and kernel is tg.attention_varlen
        assert sum("off by" in line for line in cards.said) == list(kernels.values()).count(lie)
    assert title == f"varlen (torch {tg.version_of('torch')})"


def test_a_kernel_is_taken_if_it_is_right_on_every_rank(monkeypatch):
    cards = Cards(monkeypatch, others=[{}, {"": "RuntimeError no kernel image"}])
    Registry(monkeypatch, FA4=faithful, FA3=faithful, varlen=faithful)
    assert tg.choose_attention("tiny", config(), cards) == (tg.attention_reference, "reference")
    assert sum("no kernel image (rank 2)" in line for line in cards.said) == 3, cards.said


@pytest.mark.parametrize("asked", ["FA4", "FA3", "varlen"])
def test_a_kernel_that_is_asked_for_is_taken_alone(monkeypatch, asked):
    cards = Cards(monkeypatch)
    registry = Registry(monkeypatch, FA4=faithful, FA3=faithful, varlen=faithful)
    _, title = tg.choose_attention("record", config(attention=asked), cards)
    assert title.partition(" ")[0] == registry.in_place == asked and not cards.said


@pytest.mark.parametrize("asked, kernels, why", [
    ("FA4", dict(FA3=faithful, varlen=faithful), "No module of FA4"),
    ("FA3", dict(FA3=wrong(scale=lambda s: 2 * s), varlen=faithful), "off by")])
def test_a_kernel_that_is_asked_for_and_does_not_run_ends_with_why(monkeypatch, asked, kernels, why):
    Registry(monkeypatch, **kernels)
    refused(tg.ConfigError, lambda: tg.choose_attention("tiny", config(attention=asked), Cards(monkeypatch)),
            f"--attention={asked}", why, "--attention=reference", "requirements-gpu.txt")


@pytest.mark.parametrize("capability, kernels, word", [
    (9, dict(varlen=faithful), "FA4 does not run"), (10, dict(varlen=faithful), "FA4 does not run"),
    (8, dict(varlen=faithful), ""), (10, dict(FA4=faithful), ""), (8, {}, "NO FAST KERNEL")])
def test_what_is_lost_is_said_and_record_does_not_run_on_the_reference(monkeypatch, capability, kernels, word):
    Registry(monkeypatch, **dict(varlen=raising(RuntimeError("no kernel image"))) | kernels)
    cards = Cards(monkeypatch, capability)
    tg.choose_attention("tiny", config(), cards)
    assert word in " ".join(cards.said) and bool(word) == bool(cards.said), cards.said
    if not kernels:
        refused(tg.ConfigError, lambda: tg.choose_attention("record", config(), cards), "no kernel image",
                "--attention=reference")


def test_the_reference_is_taken_on_a_cpu_and_where_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(tg, "attention_varlen", raising(AssertionError("not asked")))
    for where, changes in ((make_fabric(), {}), (Cards(monkeypatch), dict(attention="reference"))):
        assert tg.choose_attention("record", config(**changes), where) == (tg.attention_reference, "reference")
    assert capsys.readouterr().out == ""


# ------ Memory --------------------------------------------------------------------------------------------------------

def bytes_of(tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("world, rank", [(1, 0), (2, 0), (2, 1), (8, 0), (8, 7)])
@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_weights_gradients_and_moments_are_counted(dtype, world, rank, mode):
    """Against the tensors of a real executor, but for what a shard is rounded up or down by and for scalars in f32."""
    cfg = preset("tiny", dtype=dtype, row_comms=mode)
    runner = executor(cfg, world, rank)
    parts = tg.memory_estimate(cfg, runner.fabric, tg.attention_reference, cfg.num_slots // world)
    weights = [p.data for p in runner.model.parameters()]
    small = runner.optimizer.entries[tg.SMALL]
    gradients = [torch.empty_like(p) for p in small.weights]                  # autograd's, and all that travel at once
    gradients.append(torch.empty(sum(p.numel() for p in small.weights), dtype=tg.accum_dtype(getattr(torch, dtype))))
    for entry in runner.optimizer.entries.values():
        if not isinstance(entry, tg.Sharded):
            continue
        units = len(tg.bank_matrices(entry.row, entry.weight))
        gradients.append(entry.main_grad[:units])
        if entry.comm_buffer is not entry.main_grad:
            gradients.append(entry.comm_buffer[:units])
    unused = 0                                                                # rows of caches that no list can fill
    for table in runner.tables.values():
        gradients += [table.grad] if world == 1 else [table.grad, table.row_grads]
        weights += [] if world == 1 else [table.cache]
        if world > 1 and mode == "sparse":
            unused += max(0, world * len(table.shard) - len(table.cache)) * cfg.model_dim
    stored = getattr(torch, dtype).itemsize
    exact = tg.accum_dtype(getattr(torch, dtype)).itemsize
    for part, tensors, bytes_each in (("weights", weights, stored), ("gradients", gradients, exact)):
        counted = bytes_of(tensors)
        assert -0.01 * counted <= parts[part] - counted <= unused * bytes_each + 0.01 * counted
    moments = [x for state in runner.optimizer.state.values() for x in state.values()]
    mlp = runner.optimizer.entries["mlp"]
    matrix = tg.bank_matrices(mlp.row, mlp.weight.data)[:1]
    of_a_matrix = bytes_of(tg.initial_state(mlp.row, matrix).values())
    uneven = 0 if world <= 2 else 2 * of_a_matrix + 1000                      # 22 matrices: 3 each, 1 for the last
    assert abs(parts["moments"] - bytes_of(moments)) <= uneven


def test_working_memory_grows_with_what_is_side_by_side():
    cfg, fabric = preset("pocket"), make_fabric()
    working = [tg.memory_estimate(cfg, fabric, tg.attention_reference, m)["working"] for m in (1, 2, 4, 8)]
    assert working == sorted(working) and working[0] < working[-1]
    longer = replace(cfg, stages=tuple(replace_batch(stage, 8) for stage in cfg.stages))
    assert tg.memory_estimate(longer, fabric, tg.attention_reference, 8)["working"] > working[-1]
    assert tg.memory_estimate(cfg, fabric, tg.attention_varlen, 8)["working"] < working[-1], "kept by a fused kernel"


def replace_batch(stage: tg.Stage, factor: int) -> tg.Stage:
    return stage._replace(batch_tokens=factor * stage.batch_tokens)


def with_room(monkeypatch, room: float, fabric: tg.Fabric | None = None) -> tg.Fabric:
    """A rank on a device of which `room` bytes may be used."""
    monkeypatch.setattr(tg.Fabric, "total_memory", lambda self: (room + 0.5) / tg.MEMORY_SHARE)
    monkeypatch.setattr(tg.Fabric, "gather", lambda self, fact: [fact] * self.world)
    return fabric or make_fabric()


def on_gpu(world: int = 1) -> tg.Fabric:
    return tg.Fabric(torch.device("cuda", 0), 0, world)


@pytest.mark.parametrize("fabric, kernel", [(make_fabric(), tg.attention_reference), (on_gpu(), tg.attention_varlen)],
                         ids=["CPU", "GPU"])
def test_less_room_means_smaller_micro_batches(monkeypatch, fabric, kernel):
    """The largest that fits, at the very byte where it begins to fit; one that is asked for is taken or refused."""
    cfg = preset("pocket", val_batch_tokens=1024, val_tokens=1024)            # so that no two sizes cost the same
    total = {m: sum(tg.memory_estimate(cfg, fabric, kernel, m).values()) for m in (1, 2, 4, 8)}
    assert len(set(total.values())) == 4
    for m, size in total.items():
        slots, parts = tg.fit_memory(cfg, with_room(monkeypatch, size, fabric), kernel)
        assert slots == m and sum(parts.values()) == size
        assert tg.fit_memory(replace(cfg, slots_per_micro_batch=1), fabric, kernel)[0] == 1
        if m < 8:
            asked = replace(cfg, slots_per_micro_batch=2 * m)
            refused(tg.RunError, lambda: tg.fit_memory(asked, fabric, kernel), "memory", "GiB to use")
    assert tg.fit_memory(cfg, with_room(monkeypatch, total[4] - 1, fabric), kernel)[0] == 2
    assert tg.fit_memory(cfg, with_room(monkeypatch, math.inf, fabric), kernel)[0] == 8
    cramped = with_room(monkeypatch, total[1] - 1, fabric)
    refused(tg.RunError, lambda: tg.fit_memory(cfg, cramped, kernel), "memory", "GiB to use", "weights",
            "gradients", "moments", "working", "--num_slots=32", "--slots_per_micro_batch=1")


@pytest.mark.parametrize("card, world, want", [
    (80, 1, 2), (80, 8, 1), (80, 4, 2), (141, 1, 4), (141, 2, 4), (180, 1, 4), (180, 8, 1)])
def test_slots_at_once_of_the_record_preset(monkeypatch, card, world, want):
    """On H100 and A100, H200, B200, by their GiB: one slot takes 28 to 32, each further one 25."""
    fabric = with_room(monkeypatch, card * 2**30 * tg.MEMORY_SHARE, on_gpu(world))
    assert tg.fit_memory(record(), fabric, tg.attention_varlen)[0] == want


def test_24_gb_cards_are_sent_to_more_slots_which_fit(monkeypatch):
    fabric = with_room(monkeypatch, 24e9 * tg.MEMORY_SHARE, on_gpu())
    message = refused(tg.RunError, lambda: tg.fit_memory(record(), fabric, tg.attention_varlen), "--num_slots=32")
    flag = tg.re.search(r"--num_slots=\d+", message)[0]
    assert tg.fit_memory(record(flag), fabric, tg.attention_varlen)[0] >= 1


# ------ Memory of large tables ----------------------------------------------------------------------------------------

def one_table(name: str, columns: str, **changes) -> tg.Config:
    return preset(name, tables=tg.parse_value("tables", f"trigram_embed 3 {columns}"), **changes)


def table_parts(cfg: tg.Config, where: tg.Fabric) -> dict[str, int]:
    """What the tables of n-grams add to the estimate."""
    with_tables = tg.memory_estimate(cfg, where, tg.attention_reference, 1)
    # The mix of its rows needs scalars for each layer, in f32, with a gradient and moments.
    without = tg.memory_estimate(replace(cfg, tables=()), where, tg.attention_reference, 1)
    scalars = 4 * len(tg.LAYERS)
    row, = [row for row in tg.parameter_table(cfg) if row.label == "scalars"]
    of_scalars = dict(weights=scalars, gradients=scalars,
                      moments=scalars * len(tg.initial_state(row, torch.zeros(row.shape))))
    return {part: size - without.get(part, 0) - of_scalars.get(part, 0) for part, size in with_tables.items()}


@pytest.mark.parametrize("home", ["device", "host"])
@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("rows, cadence", [(101, 2), (5000, 2), (5000, 4)])
def test_large_tables_are_counted(home, world, rows, cadence):
    """Against the tensors of a real executor, as on a GPU: a shard, caches for a cycle, live sets; not the 8 bytes of
    state of a row."""
    cfg = one_table("tiny", f"{rows} stream 0 {home} {cadence}")
    table = executor(cfg, world, 0).tables["trigram_embed"]
    found = table_parts(cfg, on_gpu(world))
    read = min(world * -(-rows // world), cadence * 384 // world)
    live = min(-(-rows // world), cadence * 384)                              # all ranks may ask one
    assert len(table.cache) == len(table.row_grads) == read
    rounded = functools.partial(pytest.approx, rel=0.05)                      # shards of 101 rows
    assert found["gradients"] == rounded(table.row_grads.nbytes)
    on_device = table.cache.nbytes + live * 4 * cfg.model_dim
    if home == "host":
        assert found[tg.ON_HOST] == rounded(table.home.stored.rows.nbytes)
        assert found["weights"] == rounded(on_device + live * 4 * cfg.model_dim)
    else:
        assert found["weights"] == rounded(on_device + table.home.stored.rows.nbytes)
    assert found["working"] == found["moments"] == 0


def test_tables_on_the_host_are_told_and_not_refused(monkeypatch):
    """They take memory page by page, as rows are updated: 10^8 of 384 bytes are 38 GB. On a device they are refused."""
    host, device = (one_table("pocket", f"100000000 stream 0 {home}") for home in ("host", "device"))
    for cfg, fabric in ((host, on_gpu()), (host, make_fabric()), (device, make_fabric())):
        _, estimate = tg.fit_memory(cfg, with_room(monkeypatch, 8e9, fabric), tg.attention_varlen)
        assert estimate[tg.ON_HOST] == 10**8 * 4 * cfg.model_dim
    cramped = with_room(monkeypatch, 8e9, on_gpu())
    refused(tg.RunError, lambda: tg.fit_memory(device, cramped, tg.attention_varlen), "memory",
            "7.5 GiB to use", "weights 35.8", "home host")


def record(*flags: str) -> tg.Config:
    """The record preset on GPT-2 shards."""
    _, given = tg.parse_flags([*([] if any("preset" in flag for flag in flags) else ["--preset=record"]), *flags])
    shards = [tg.ShardHeader("shard", 1, tg.GPT2_VOCAB, tg.GPT2_DOCUMENT_START)]
    return tg.resolve(given, shards, shards)


LEDGER = Path(__file__).parent / "rehearsal/ledger.json"


@pytest.mark.skipif(not LEDGER.exists(), reason=f"no {LEDGER.name}: tests/rehearse.py --update writes it")
def test_the_estimate_is_within_5_percent_of_the_peaks_that_the_rehearsal_walked():
    ledger = json.loads(LEDGER.read_text())
    for world, walked in ledger["worlds"].items():
        cfg = record(*ledger["flags"])
        phases = walked["phases"]
        micro_batches = phases["stage 1 even step"]["sums"]["micro_batches"]
        slots_at_once = cfg.num_slots // int(world) // micro_batches
        estimate = tg.memory_estimate(cfg, on_gpu(int(world)), tg.attention_varlen, slots_at_once)
        peak = max(phase["sums"]["peak_bytes"] for phase in phases.values())
        assert sum(estimate.values()) == pytest.approx(peak, rel=0.05), (world, slots_at_once)


KEPT = """
import resource
import torch
import train_gpt as tg

tg.make_fabric(tg.Config(device="cpu"))
passes = []
for number in range(5):                  # each a little larger: glibc alone would keep what is no larger than before
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones((1 << 20) + (number << 14)) for _ in range(20)]
    del tensors
    passes.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(passes))                       # given back, memory costs each of them all its pages
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="without glibc's malloc")
def test_what_is_freed_on_a_cpu_is_kept():
    out = subprocess.run([sys.executable, "-c", KEPT], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pages = 20 * (4 << 20) // resource.getpagesize()
    assert int(out) < pages // 10


def test_total_memory_without_a_gpu_is_what_the_host_has():
    total = make_fabric().total_memory()
    assert 2**20 < total < 2**46 or total == math.inf
