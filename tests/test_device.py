"""What the trainer decides from the device: attention that must prove itself, memory counted before it is used.

Everything here runs on a CPU; what needs a GPU is in test_gpu.py.
"""
import json
import math
import platform
import resource
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import rehearse
import torch
from common import ROOT, executor, preset, refused
from common import fabric as make_fabric

import train_gpt as tg

UPDATED = tg.UPDATE_ORDER
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

    def of_all(self, fact) -> list:
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


def usable(monkeypatch, kernel, name: str = "tiny", **changes) -> tuple[list[str], list[str]]:
    """(kernels to choose from, what was said) in this preset on a card with the kernel as torch's own, no packages."""
    cards = Cards(monkeypatch)
    registry = Registry(monkeypatch, varlen=kernel)
    found = tg.usable_attention(name, config(**changes), cards)
    assert not registry.active
    return found, cards.said


def faithful(q, k, v, cu_seqlens, reach):
    """A kernel as good as bf16 allows: exact inside, rounded at its end."""
    return tg.attention_reference(q.float(), k.float(), v.float(), cu_seqlens, reach).to(q.dtype)


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("no backward here")


def wrong(**changes):
    """The faithful kernel with the bounds or a number of the reach wrong, given as a function of the right one."""
    def kernel(q, k, v, cu_seqlens, reach):
        given = dict(vars(reach), cu_seqlens=cu_seqlens)
        made = {name: change(given[name]) for name, change in changes.items()}
        bounds = made.pop("cu_seqlens", cu_seqlens)
        return faithful(q, k, v, bounds, replace(reach, **made))
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
    "fails without a word": (raising(RuntimeError()), "does not run here"),
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
    found, said = usable(monkeypatch, kernel)
    assert found == ["reference"]
    assert any("varlen does not run here" in line and word in line for line in said), said


WRONG_AT = {                             # what is wrong where little else is: at one window, in one kind of layer
    "one key more, in a wide window": lambda window: window + (window == 300),
    "one key less, in a wide window": lambda window: window - (window == 300),
    "a tile less": lambda window: window - 128 * (window == 300),
    "a window that ends with its tile": lambda window: max(window, 127),
    "a reach beyond documents is cut": lambda window: min(window, 256)}


@pytest.mark.parametrize("name", WRONG_AT)
def test_each_window_is_looked_at(monkeypatch, name):
    found, said = usable(monkeypatch, wrong(window=WRONG_AT[name]))
    assert found == ["reference"] and any("off by" in line for line in said), said


@pytest.mark.parametrize("heads", [1, 2])
def test_plain_and_paired_layers_are_looked_at(monkeypatch, heads):
    """Paired ones have half the heads."""
    lie = wrong(window=lambda window: window + 1)

    def kernel(q, *rest):
        return (lie if q.shape[1] == heads else faithful)(q, *rest)

    assert usable(monkeypatch, kernel)[0] == ["reference"]


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

    _, said = usable(monkeypatch, kernel)
    assert any(f"gradient of {name} is off by" in line for line in said), said


def tiled_in_bf16(q, k, v, cu_seqlens, reach):
    """Rounded where flash attention rounds: the weights before the values, their gradients before queries and keys."""
    return Tiled.apply(q, k, v, cu_seqlens, reach.window, reach.scale)


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
    found, said = usable(monkeypatch, kernel, head_dim=head_dim, model_dim=2 * head_dim)
    assert (found, said) == (["varlen"], [line for line in said if "FA4 does not" in line or "FA3 does not" in line])


def test_packages_come_first_and_what_lies_is_put_back(monkeypatch):
    cards = Cards(monkeypatch)
    registry = Registry(monkeypatch, FA4=faithful, FA3=wrong(window=lambda w: w + 1), varlen=faithful)
    assert tg.usable_attention("tiny", config(), cards) == ["FA4", "varlen"]
    assert registry.in_place == "varlen"
    assert any("FA3 does not run here" in line and "off by" in line for line in cards.said), cards.said


def test_a_kernel_is_taken_if_it_is_right_on_every_rank(monkeypatch):
    cards = Cards(monkeypatch, others=[{}, {"": "RuntimeError no kernel image"}])
    Registry(monkeypatch, FA4=faithful, varlen=faithful)
    assert tg.usable_attention("tiny", config(), cards) == ["reference"]
    assert sum("no kernel image (rank 2)" in line for line in cards.said) == 2, cards.said


class DeviceTime:
    """Stands still but for attention: so many ms a call."""

    def __init__(self, monkeypatch, registry: Registry, ms: dict[str, float]) -> None:
        self.now = 0.0
        self.calls: list[tuple] = []

        def call(q, k, v, cu_seqlens, reach):
            self.now += ms[registry.in_place] * (1 + 9 * (len(self.calls) % 13 == 12))       # the last is an outlier
            seen = reach.window, reach.max_len, int(cu_seqlens[-1])
            self.calls.append((registry.in_place, tuple(q.shape), *seen))
            return q * 1.0 + 0.0 * (k + v)

        class Event:
            def __init__(event, enable_timing: bool) -> None:
                assert enable_timing

            def record(event) -> None:
                event.at = self.now

            def synchronize(event) -> None:
                pass

            def elapsed_time(event, end) -> float:
                return end.at - event.at

        monkeypatch.setattr(tg, "attention_varlen", call)
        monkeypatch.setattr(torch.cuda, "Event", Event)


@pytest.mark.parametrize("ms, others, chosen", [
    (dict(FA4=3, FA3=2, varlen=5), [], "FA3"),
    (dict(FA4=1, FA3=2, varlen=5), [], "FA4"),
    (dict(FA4=2, FA3=2, varlen=1), [], "varlen"),
    (dict(FA4=0, FA3=0, varlen=0), [], "FA4"),                       # as where no time can be taken
    (dict(FA4=3, FA3=2, varlen=5), [{20.0: 44.0}], "FA4"),           # FA3 is slow on another rank
])
def test_the_fastest_is_put_in_place_by_the_slowest_rank(monkeypatch, ms, others, chosen):
    cards = Cards(monkeypatch, others=others)
    registry = Registry(monkeypatch, **dict.fromkeys(ms))
    device = DeviceTime(monkeypatch, registry, ms)
    versions = {"flash-attn-4": "4.0", "flash-attn-3": "3.0", "torch": "2.13"}
    monkeypatch.setattr(tg.importlib.metadata, "version", versions.get)
    title = tg.fastest_attention(config(), cards, list(ms), 2)
    package = tg.FLASH_PACKAGES[chosen]
    assert title == f"{chosen} ({package} {versions[package]})"
    assert registry.in_place == chosen
    layers = len(tg.ATTENTION_LAYERS)
    if not others:
        assert all(f"{name} {layers * ms[name]:.2f} ms" in cards.said[-1] for name in ms), cards.said


def test_kernels_are_timed_at_the_largest_stage_of_what_fits(monkeypatch):
    cfg = config(max_doc_len=24)
    registry = Registry(monkeypatch, FA3=None, varlen=None)
    device = DeviceTime(monkeypatch, registry, dict(FA3=1, varlen=1))
    tg.fastest_attention(cfg, Cards(monkeypatch), ["FA3", "varlen"], 2)
    slot = 384 // 8                                                  # of tiny's last two stages; windows of the last
    last = cfg.stages[-1]
    windows = dict(short=cfg.window_block * last.short_window, long=cfg.window_block * last.long_window)
    want = set()
    for layer in tg.LAYERS:
        if layer.attention == "plain":
            want.add(((2 * slot, 2, 128), windows[layer.window], 24, 2 * slot))
        elif layer.attention == "paired":                            # two positions a token, half the heads
            want.add(((4 * slot, 1, 128), windows[layer.window], 48, 4 * slot))
    assert {call[1:] for call in device.calls} == want
    each = tg.UNTIMED_PASSES + tg.TIMED_PASSES
    assert len(device.calls) == 2 * each * len(want)


def test_a_kernel_that_fails_at_full_size_is_not_put_in_place(monkeypatch):
    cards = Cards(monkeypatch)
    registry = Registry(monkeypatch, FA4=raising(torch.OutOfMemoryError("too much")), varlen=faithful)
    monkeypatch.setattr(tg, "median_ms", lambda call: [call(), 1.0][1])
    assert tg.fastest_attention(config(), cards, ["FA4", "varlen"], 1).startswith("varlen (torch 2.")
    assert registry.in_place == "varlen" and "FA4 fails at full size: OutOfMemoryError too much" in cards.said[0]


def test_a_single_kernel_is_not_timed(monkeypatch):
    cards = Cards(monkeypatch)
    registry = Registry(monkeypatch, FA3=raising(AssertionError("not asked")))
    monkeypatch.setattr(tg.importlib.metadata, "version", raising(tg.importlib.metadata.PackageNotFoundError()))
    assert tg.fastest_attention(config(), cards, ["FA3"], 1) == "FA3 (flash-attn-3 of unknown version)"
    assert registry.in_place == "FA3" and not cards.said
    assert tg.fastest_attention(config(), cards, ["reference"], 1) == "reference"
    assert registry.in_place == "varlen"


# ------ Attention that is asked for, and what is lost without --------------------------------------------------------

@pytest.mark.parametrize("asked", ["FA4", "FA3", "varlen"])
def test_a_kernel_that_is_asked_for_is_taken_alone(monkeypatch, asked):
    Registry(monkeypatch, FA4=faithful, FA3=faithful, varlen=faithful)
    assert tg.usable_attention("record", config(attention=asked), Cards(monkeypatch)) == [asked]


@pytest.mark.parametrize("asked, kernels, why", [
    ("FA4", dict(FA3=faithful, varlen=faithful), "No module of FA4"),
    ("FA3", dict(FA3=wrong(scale=lambda s: 2 * s), varlen=faithful), "off by")])
def test_a_kernel_that_is_asked_for_and_does_not_run_ends_with_why(monkeypatch, asked, kernels, why):
    Registry(monkeypatch, **kernels)
    refused(tg.ConfigError, lambda: tg.usable_attention("tiny", config(attention=asked), Cards(monkeypatch)),
            f"--attention={asked}", why, "--attention=auto", "requirements-gpu.txt")


def test_the_reference_can_be_asked_for(monkeypatch):
    found = usable(monkeypatch, raising(AssertionError("not asked")), "record", attention="reference", dtype="float32")
    assert found == (["reference"], [])


UNFIT = [dict(dtype="float32"), dict(dtype="float64"), dict(head_dim=20, model_dim=40),
         dict(head_dim=264, model_dim=528)]


@pytest.mark.parametrize("changes", UNFIT, ids=str)
def test_a_type_or_width_that_no_fast_kernel_takes(monkeypatch, changes):
    """An error for record, which needs one; other presets say so and go on."""
    kernel = raising(AssertionError("not asked"))
    found, said = usable(monkeypatch, kernel, "pocket", **changes)
    assert found == ["reference"] and "time and memory grow" in said[0] and len(said) == 1
    for asked in ("auto", "varlen"):
        name = "record" if asked == "auto" else "pocket"
        refused(tg.ConfigError, lambda: usable(monkeypatch, kernel, name, attention=asked, **changes),
                f"--attention={asked}", *map(str, list(changes.values())[:1]), "--attention=reference")


@pytest.mark.parametrize("capability, kernels, word", [
    (9, dict(varlen=faithful), "WITHOUT FA4 AND FA3"), (10, dict(varlen=faithful), "WITHOUT FA4:"),
    (8, dict(varlen=faithful), ""), (9, dict(FA3=faithful, varlen=faithful), ""), (10, dict(FA4=faithful), ""),
    (8, {}, "NO FAST KERNEL")])
def test_record_says_what_it_lost(monkeypatch, capability, kernels, word):
    Registry(monkeypatch, **dict(varlen=raising(RuntimeError("no kernel image"))) | kernels)
    for name in ("record", "tiny"):
        cards = Cards(monkeypatch, capability)
        tg.usable_attention(name, config(), cards)
        loud = [line for line in cards.said if "WITHOUT" in line or "NO FAST" in line]
        assert len(loud) == (name == "record" and word != "") and all(word in line for line in loud), cards.said


def test_the_cpu_takes_the_reference_at_once(monkeypatch, capsys):
    monkeypatch.setattr(tg, "attention_varlen", raising(AssertionError("not asked")))
    for name in ("record", "pocket"):
        assert tg.usable_attention(name, config(), make_fabric()) == ["reference"]
    assert capsys.readouterr().out == ""
    refused(tg.ConfigError, lambda: tg.usable_attention("pocket", config(attention="FA3"), make_fabric()),
            "--attention=FA3", "on a GPU", "--attention=reference")


# ------ Memory --------------------------------------------------------------------------------------------------------

def bytes_of(tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("world, rank", [(1, 0), (2, 0), (2, 1), (8, 0), (8, 7)])
@pytest.mark.parametrize("mode", ["dense", "sparse_scatter", "sparse"])
def test_weights_gradients_and_moments_are_counted(dtype, world, rank, mode):
    """Against the tensors of a real executor, to the byte but for what a slice is rounded up or down by.

    Of a table a rank has its slice and, among others, a cache: no larger than the table, in mode sparse than its list.
    """
    cfg = preset("tiny", dtype=dtype, row_comms=mode)
    runner = executor(cfg, world, rank)
    parts = tg.memory_estimate(cfg, runner.fabric, tg.attention_reference, cfg.num_slots // world)
    weights = [p.data for p in runner.model.parameters()]
    optimizer = runner.optimizer
    gradients = [p for label, p in optimizer.weights.items() if label in optimizer.small] + [optimizer.small_grad]
    for label, buffer in optimizer.gradients.items():
        units = len(optimizer.units(label, optimizer.weights[label]))
        gradients.append(buffer[:units])
        if optimizer.wire[label] is not buffer:
            gradients.append(optimizer.wire[label][:units])
    unused = 0                                                                # rows of caches that no list can fill
    for label, table in runner.tables.items():
        gradients += [table.grad] if world == 1 else [table.grad, table.sums]
        weights += [] if world == 1 else [table.cache]
        whole = table.cache[:1].numel() * table.table.rows
        read = 2 * 384 // world * (5 if label == "value_embed" else 1) * cfg.model_dim
        unused += max(0, whole - read) if mode == "sparse" and world > 1 else 0
    exact = torch.promote_types(getattr(torch, dtype), torch.float32).itemsize
    for part, tensors, bytes_each in (("weights", weights, getattr(torch, dtype).itemsize),
                                      ("gradients", gradients, exact)):
        assert 0 <= parts[part] - bytes_of(tensors) <= unused * bytes_each, "never more than was counted"
        assert unused or parts[part] == bytes_of(tensors)
    small = [state.pop("second") for state in runner.optimizer.state.values() if "second" in state]
    moments = [x for state in runner.optimizer.state.values() for x in state.values()]
    one_matrix = 4 * cfg.model_dim**2 * (torch.promote_types(getattr(torch, dtype), torch.float32).itemsize + 2)
    uneven = 0 if world <= 2 else 2 * one_matrix                              # 22 matrices: 3 each, 1 for the last
    assert abs(parts["moments"] - bytes_of(moments)) <= uneven
    assert bytes_of(small) < parts["moments"] / 50, "second moments of NorMuon: one number per row, not counted"


def test_moments_shrink_with_the_ranks_and_tables_have_a_slice_and_a_cache():
    cfg, mode = preset("pocket"), tg.Config().row_comms
    one, two, eight = (tg.memory_estimate(cfg, make_fabric(0, world), tg.attention_reference, 1) for world in (1, 2, 8))
    shared = sum(2 * 4 * tg.math.prod(row.shape) for row in tg.parameter_table(cfg) if not row.sharded)
    tables = sum(4 * tg.math.prod(row.shape) for row in tg.parameter_table(cfg) if row.rows)
    for parts, world in ((two, 2), (eight, 8)):
        for part in ("weights", "gradients"):
            assert 0 <= one[part] + tables // world - parts[part] <= tables * (mode == "sparse"), part
        assert parts["working"] == one["working"]
        assert parts["moments"] - shared == pytest.approx((one["moments"] - shared) / world, abs=len(UPDATED))


def test_working_memory_grows_with_what_is_side_by_side():
    cfg, fabric = preset("pocket"), make_fabric()
    working = [tg.memory_estimate(cfg, fabric, tg.attention_reference, m)["working"] for m in (1, 2, 4, 8)]
    assert working == sorted(working) and working[0] < working[-1]
    longer = replace(cfg, stages=tuple(replace(s, batch_tokens=8 * s.batch_tokens) for s in cfg.stages))
    assert tg.memory_estimate(longer, fabric, tg.attention_reference, 8)["working"] > working[-1]
    assert tg.memory_estimate(cfg, fabric, tg.attention_varlen, 8)["working"] < working[-1], "kept by a fused kernel"


def with_room(monkeypatch, room: float) -> tg.Fabric:
    """A rank for which `room` bytes may be used."""
    monkeypatch.setattr(tg.Fabric, "free_memory", lambda self: (room + 0.5) / tg.MEMORY_SHARE)
    return make_fabric()


def totals(cfg: tg.Config) -> dict[int, int]:
    return {m: sum(tg.memory_estimate(cfg, make_fabric(), tg.attention_reference, m).values()) for m in (1, 2, 4, 8)}


def test_less_room_means_smaller_micro_batches(monkeypatch):
    """The largest that fits, at the very byte where it begins to fit."""
    cfg = preset("pocket", val_batch_tokens=1024, val_tokens=1024)             # so that no two sizes cost the same
    total = totals(cfg)
    assert len(set(total.values())) == 4
    for m, need in total.items():
        chosen, parts = tg.fit_memory(cfg, with_room(monkeypatch, need), tg.attention_reference)
        assert chosen == m and sum(parts.values()) == need
    assert tg.fit_memory(cfg, with_room(monkeypatch, total[4] - 1), tg.attention_reference)[0] == 2
    assert tg.fit_memory(cfg, with_room(monkeypatch, float("inf")), tg.attention_reference)[0] == 8


def test_a_micro_batch_that_is_asked_for_is_taken_or_refused(monkeypatch):
    cfg = preset("pocket", slots_per_micro_batch=4)
    assert tg.fit_memory(cfg, with_room(monkeypatch, float("inf")), tg.attention_reference)[0] == 4
    refused(tg.RunError, lambda: tg.fit_memory(cfg, with_room(monkeypatch, totals(cfg)[4] - 1), tg.attention_reference),
            "memory", "--slots_per_micro_batch=1")


def gpu_with(monkeypatch, total: float, free: float) -> tg.Fabric:
    """A rank whose GPU has so many bytes to use, of which so many are free."""
    monkeypatch.setattr(tg.Fabric, "total_memory", lambda self: (total + 0.5) / tg.MEMORY_SHARE)
    monkeypatch.setattr(tg.Fabric, "free_memory", lambda self: (free + 0.5) / tg.FREE_SHARE)
    return tg.Fabric(torch.device("cuda", 0))


def test_a_gpu_takes_what_its_total_memory_fits(monkeypatch):
    cfg = preset("pocket", val_batch_tokens=1024, val_tokens=1024)
    need = {m: sum(tg.memory_estimate(cfg, make_fabric(), tg.attention_varlen, m).values()) for m in (1, 2, 4, 8)}
    for m, size in need.items():
        gpu = gpu_with(monkeypatch, size, size)
        chosen, parts = tg.fit_memory(cfg, gpu, tg.attention_varlen)
        assert chosen == m and sum(parts.values()) == size
        chosen, _ = tg.fit_memory(replace(cfg, slots_per_micro_batch=1), gpu, tg.attention_varlen)
        assert chosen == 1
        asked = replace(cfg, slots_per_micro_batch=2 * m)
        if m < 8:
            refused(tg.RunError, lambda: tg.fit_memory(asked, gpu, tg.attention_varlen), "memory", "to use")
    small = gpu_with(monkeypatch, need[1] - 1, need[8])
    refused(tg.RunError, lambda: tg.fit_memory(cfg, small, tg.attention_varlen), "memory", "to use", "--num_slots=16")


def test_what_others_hold_of_a_gpu_ends_a_run_and_does_not_change_it(monkeypatch):
    cfg = preset("pocket", val_batch_tokens=1024, val_tokens=1024)
    need = {m: sum(tg.memory_estimate(cfg, make_fabric(), tg.attention_varlen, m).values()) for m in (1, 4)}
    for free, advice in ((need[4] - 1, "--num_slots=8"), (need[1] - 1, "--num_slots=16")):
        gpu = gpu_with(monkeypatch, need[4], free)
        refused(tg.RunError, lambda: tg.fit_memory(cfg, gpu, tg.attention_varlen), "memory", "of the GPU's free",
                "weights", "working", "end what else uses the GPU", f"{advice} --slots_per_micro_batch=1")


@pytest.mark.parametrize("card, world, want", [
    (80, 1, 2), (80, 8, 1), (80, 4, 2), (141, 1, 4), (141, 2, 4), (180, 1, 4), (180, 8, 1)])
def test_slots_at_once_of_the_record_preset(monkeypatch, card, world, want):
    """On H100 and A100, H200, B200, by their GiB: one slot takes 28 to 32, each further one 25."""
    gpu = gpu_with(monkeypatch, card * 2**30 * tg.MEMORY_SHARE, (card - 1) * 2**30 * tg.FREE_SHARE)
    monkeypatch.setattr(tg.Fabric, "of_all", lambda self, fact: [fact] * world)
    slots, _ = tg.fit_memory(record(), replace(gpu, world=world), tg.attention_varlen)
    assert slots == want


# ------ Memory of large tables ----------------------------------------------------------------------------------------

STATE_BYTES = 4 + 4                                                           # v and last of a row


def table_parts(cfg: tg.Config, where: tg.Fabric) -> dict[str, int]:
    """What the tables of rule rowwise add to the estimate."""
    with_tables = tg.memory_estimate(cfg, where, tg.attention_reference, 1)
    # The mix of its rows needs scalars for each layer, in f32, with a gradient, another that travels and two moments.
    without = tg.memory_estimate(replace(cfg, trigram_rows=0), where, tg.attention_reference, 1)
    scalars = 4 * len(tg.LAYERS)
    of_scalars = dict(weights=scalars, gradients=2 * scalars, moments=2 * scalars)
    return {part: size - without.get(part, 0) - of_scalars.get(part, 0) for part, size in with_tables.items()}


def on_gpu(world: int) -> tg.Fabric:
    return tg.Fabric(torch.device("cuda", 0), 0, world)


@pytest.mark.parametrize("home", ["device", "host"])
@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("rows, cadence", [(101, 2), (5000, 2), (5000, 4)])
def test_large_tables_are_counted(home, world, rows, cadence):
    """Against the tensors of a real executor, as they would be on a GPU: a slice, caches for a cycle, live sets."""
    cfg = preset("tiny", trigram_rows=rows, table_home=home, table_cadence=cadence)
    table = executor(cfg, world, 0).tables["trigram_embed"]
    found = table_parts(cfg, on_gpu(world))
    asked = min(world * -(-rows // world), cadence * 384 // world)
    live = min(-(-rows // world), asked)
    assert len(table.cache) == len(table.sums) == asked
    assert found["gradients"] == table.sums.nbytes
    stored = table.home.stored
    sets = 2 if home == "host" else 1
    weights, moments = stored.rows.nbytes, stored.v.nbytes + stored.last.nbytes
    if home == "host":
        staging = 4 * live * (4 * cfg.model_dim + STATE_BYTES)
        assert 0 < found[tg.ON_HOST] - staging <= weights + moments, "never more than the mapping"
        weights = moments = 0
    assert found["weights"] == weights + table.cache.nbytes + sets * live * 4 * cfg.model_dim
    assert found["moments"] == moments + sets * live * STATE_BYTES
    assert found["working"] == 0


def test_gradients_of_rows_on_their_way_are_counted_where_activations_take_less():
    """What is sent and arrives, its sums in f32, rows of the next event; activations are gone by then."""
    cfg = preset("record_tables", dtype="bfloat16")
    most_tokens = max(stage.batch_tokens for stage in cfg.stages)
    for num_slots, world, by_events in ((64, 1, True), (8, 8, False)):
        choice = replace(cfg, num_slots=num_slots)
        found = tg.memory_estimate(choice, on_gpu(world), tg.attention_varlen, slots_at_once=1)
        asked = 2 * most_tokens // world
        on_their_way = 2 * asked * cfg.model_dim * (2 + 2 + 4 + 2 + 2)        # of two tables
        without = tg.working_bytes(choice, True, slots_at_once=1)
        assert (on_their_way > without) == by_events
        assert found["working"] == max(without, on_their_way)


@pytest.mark.parametrize("home", ["device", "host"])
def test_on_a_cpu_both_homes_take_what_the_run_can_touch(home):
    """A page for each row, never the mapping: 10^8 rows of 384 bytes are 38 GB."""
    cfg = preset("pocket", trigram_rows=10**8, table_home=home, max_steps=40)
    tokens = tg.tokens_of_run(cfg)
    least = sum(tg.Schedule(cfg).at(step).slot_tokens * cfg.num_slots for step in range(40))
    assert least < tokens < 2 * least, "and the warm-up's"
    one, two = (table_parts(cfg, make_fabric(0, world))[tg.ON_HOST] for world in (1, 2))
    assert tokens * (4096 + STATE_BYTES) < one < tokens * 4.1 * 4096, "v and last have pages, too"
    assert two == pytest.approx(one / 2, rel=1e-3)
    longer = replace(cfg, max_steps=80)
    assert table_parts(longer, make_fabric())[tg.ON_HOST] > 1.5 * one
    small = replace(cfg, trigram_rows=1000)
    assert table_parts(small, make_fabric())[tg.ON_HOST] == 1000 * (4 * cfg.model_dim + STATE_BYTES)


def test_pages_of_rows():
    """Rows may lie across the border of two pages: counted for all places that they can have."""
    for item_bytes in (4, 8, 96, 384, 512, 1536, 4096, 6144):
        count = 4096                                                          # whole pages, and every place in one
        starts = item_bytes * torch.arange(count)
        pages = (starts + item_bytes - 1) // 4096 - starts // 4096 + 1
        page_table = count                                                    # a page of it for each, so far apart
        assert tg.touched_bytes(1 << 36, item_bytes, count) == 4096 * (int(pages.sum()) + page_table)
        assert tg.touched_bytes(count, item_bytes, count) == count * item_bytes + 4096 * (count * item_bytes >> 21)
        assert tg.touched_bytes(count, item_bytes, 0) == 0


def test_a_table_too_large_for_the_device_is_refused_with_the_most_rows(monkeypatch):
    """The numbers of the message fit to the row, and one more does not."""
    cfg = preset("pocket", trigram_rows=10**8)
    gpu = gpu_with(monkeypatch, 8e9, 8e9)
    monkeypatch.setattr(tg.Fabric, "free_host_memory", lambda self: 20e9)
    message = refused(tg.RunError, lambda: tg.fit_memory(cfg, gpu, tg.attention_varlen), "memory", "7.5 GiB to use",
                      "weights 35.8 GiB", "--table_home=host", "--trigram_rows=")
    rows = int(message.rpartition("--trigram_rows=")[2].split(",")[0])
    assert 19_000_000 < rows < 8e9 / (384 + STATE_BYTES)
    tg.fit_memory(replace(cfg, trigram_rows=rows), gpu, tg.attention_varlen)
    refused(tg.RunError, lambda: tg.fit_memory(replace(cfg, trigram_rows=rows + 1), gpu, tg.attention_varlen), "memory")
    _, estimate = tg.fit_memory(replace(cfg, table_home="host"), gpu, tg.attention_varlen)
    assert estimate[tg.ON_HOST] > 2e9 > sum(estimate.values()) - estimate[tg.ON_HOST]


def test_a_table_too_large_for_the_host_is_refused_with_the_most_rows(monkeypatch):
    cfg = preset("pocket", trigram_rows=10**8, table_home="host")
    gpu = gpu_with(monkeypatch, 8e9, 8e9)
    for world, free in ((1, 1.2e9), (2, 1.5e9)):
        processes = tuple(("here", 100 + rank) for rank in range(world))
        ranks = replace(gpu, world=world, processes=processes)
        monkeypatch.setattr(tg.Fabric, "of_all", lambda self, fact: [fact] * self.world)
        monkeypatch.setattr(tg.Fabric, "free_host_memory", lambda self, free=free: free)
        message = refused(tg.RunError, lambda: tg.fit_memory(cfg, ranks, tg.attention_varlen), "tables on the host",
                          f"{0.9 * free / world / 2**30:.1f} GiB for each rank", "pages", "tokens", "fewer steps",
                          "--trigram_rows=")
        rows = int(message.rpartition("--trigram_rows=")[2].split(",")[0])
        tg.fit_memory(replace(cfg, trigram_rows=rows), ranks, tg.attention_varlen)
        over = replace(cfg, trigram_rows=rows + 100)
        refused(tg.RunError, lambda: tg.fit_memory(over, ranks, tg.attention_varlen), "tables on the host")
        tg.fit_memory(replace(cfg, max_steps=100), ranks, tg.attention_varlen)


def test_two_tables_too_large_together_are_told_how_many_rows_each_may_have(monkeypatch):
    cfg = preset("pocket", trigram_rows=10**9, fourgram_rows=2 * 10**9, table_home="device")
    gpu = gpu_with(monkeypatch, 8e9, 8e9)
    monkeypatch.setattr(tg.Fabric, "free_host_memory", lambda self: 1e9)
    message = refused(tg.RunError, lambda: tg.fit_memory(cfg, gpu, tg.attention_varlen), "memory", "--trigram_rows=")
    rows = int(message.rpartition("--fourgram_rows=")[2].split(",")[0])
    assert f"--trigram_rows={rows} --fourgram_rows={rows}" in message
    tg.fit_memory(replace(cfg, trigram_rows=rows, fourgram_rows=rows), gpu, tg.attention_varlen)
    over = replace(cfg, trigram_rows=rows + 1, fourgram_rows=rows + 1)
    refused(tg.RunError, lambda: tg.fit_memory(over, gpu, tg.attention_varlen), "memory")


def test_on_a_cpu_rows_that_the_run_touches_have_to_fit(monkeypatch):
    cfg = preset("pocket", trigram_rows=2**31 - 1, num_scheduled_steps=52_000, epochs=0)
    message = refused(tg.RunError, lambda: tg.fit_memory(cfg, with_room(monkeypatch, 5e9), tg.attention_reference),
                      "memory", "tables on the host", "--trigram_rows=")
    assert "--table_home" not in message, "it would not help"
    rows = int(message.rpartition("--trigram_rows=")[2].split(",")[0])
    tg.fit_memory(replace(cfg, trigram_rows=rows), with_room(monkeypatch, 5e9), tg.attention_reference)


def control_group(group, limit, used=0, droppable=0):
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\nactive_file 7\ninactive_file {droppable}\nslab 9\n")


def test_a_container_leaves_less_than_its_machine(tmp_path, monkeypatch):
    """The narrowest of all control groups above the process counts; no limit, version 1 and no groups at all do not."""
    process, root = tmp_path / "cgroup", tmp_path / "groups"

    def left(own):
        process.write_text(own)
        return tg.left_in_control_groups(process, root)

    assert tg.left_in_control_groups(process, root) == math.inf, "another system"
    root.mkdir()
    assert left("0::/\n") == math.inf, "the root of a machine has no limit"
    control_group(root / "job", 10_000, used=4_000, droppable=1_000)
    control_group(root / "job/step", "max", used=3_000)
    assert left("0::/job/step\n") == left("0::/job\n") == 7_000
    assert left("0::/gone/from/here\n") == math.inf
    control_group(root / "job/step", 2_000, used=3_000)
    assert left("0::/job/step\n") == 0
    assert left("4:memory:/job/step\n") == math.inf, "version 1"
    control_group(root, 5_000, used=100)
    assert left("4:memory:/job\n0::/\n") == left("0::/not/seen/from/inside\n") == 4_900, "a container's own root"
    monkeypatch.setattr(tg, "left_in_control_groups", lambda: 4_900)
    assert make_fabric().free_host_memory() == 4_900


def test_steps_that_a_time_budget_adds_are_looked_at_too(monkeypatch):
    cfg = preset("pocket", trigram_rows=10**8, table_home="host", time_budget=3600.0)
    monkeypatch.setattr(tg.Fabric, "free_host_memory", lambda self: 5e9)
    tg.check_host_memory(cfg, make_fabric())
    monkeypatch.setattr(tg, "time_steps", lambda *_: [1e-3] * 4)
    refused(tg.RunError, lambda: tg.fit_budget(cfg, make_fabric(), None, [], None), "tables on the host", "fewer steps")


@pytest.mark.parametrize("flags, world, ok", [
    (["--trigram_rows=1893000"], 1, True), (["--trigram_rows=1894000"], 1, False),
    (["--trigram_rows=15148000"], 8, True), (["--trigram_rows=15155000"], 8, False),
    (["--bigram_rows=1894000"], 1, False),
])
def test_dense_updates_have_an_end_at_32_GB(monkeypatch, flags, world, ok):
    """22 bytes x 768 x an owner's rows: 1,893,939 of them."""
    cfg = record("--table_rule=adam", *flags)
    gpu = gpu_with(monkeypatch, 190e9, 190e9)
    monkeypatch.setattr(tg.Fabric, "of_all", lambda self, fact: [fact] * world)
    gpu = replace(gpu, world=world)
    if ok:
        tg.fit_memory(cfg, gpu, tg.attention_varlen)
        return
    setting = flags[0].partition("=")[0]
    message = refused(tg.ConfigError, lambda: tg.fit_memory(cfg, gpu, tg.attention_varlen), "rule adam of",
                      "32.0 GB, 22 bytes for each element", "more ranks", f"{setting}={1_893_939 * world}")
    assert ("--table_rule=rowwise" in message) == (setting == "--trigram_rows")


def test_dense_updates_of_more_than_the_device_are_refused(monkeypatch):
    cfg = preset("tiny", trigram_rows=20_000_000, table_rule="adam", dtype="bfloat16")
    need = tg.needed_bytes(cfg, make_fabric(), tg.attention_reference, 1)
    moved = 22 * cfg.model_dim * cfg.trigram_rows
    assert need / tg.MEMORY_SHARE < moved, "it fits, and an update would move more"
    fabric = with_room(monkeypatch, need)
    refused(tg.ConfigError, lambda: tg.fit_memory(cfg, fabric, tg.attention_reference), "rule adam of trigram_embed",
            "14.1 GB", f"at most {need / tg.MEMORY_SHARE / 1e9:.1f} GB", "--table_rule=rowwise", "--trigram_rows=")


def record(*flags: str) -> tg.Config:
    """The record preset on GPT-2 shards."""
    _, given = tg.parse_flags(["--preset=record", *flags])
    shards = [tg.ShardHeader("shard", 1, tg.GPT2_VOCAB, tg.GPT2_DOCUMENT_START)]
    return tg.resolve(given, shards, shards)


LEDGER = Path(__file__).with_name("rehearsal.json")


@pytest.mark.skipif(not LEDGER.exists(), reason=f"no {LEDGER.name}: tests/rehearse.py --update writes it")
def test_the_estimate_is_within_5_percent_of_the_peaks_that_the_rehearsal_walked():
    ledger = json.loads(LEDGER.read_text())
    for world, walked in ledger["worlds"].items():
        cfg = record(*ledger["flags"])
        phases = walked["phases"]
        timeline = list(rehearse.expand(walked, phases["stage 1 even step"]["timeline"]))
        micro_batches = timeline.count(["mark", "forward"])
        slots_at_once = cfg.num_slots // int(world) // micro_batches
        estimate = tg.memory_estimate(cfg, SimpleNamespace(world=int(world)), tg.attention_varlen, slots_at_once)
        peak = max(phase["peak_bytes"] for phase in phases.values())
        assert sum(estimate.values()) == pytest.approx(peak, rel=0.05), (world, slots_at_once)


@pytest.mark.parametrize("share", [0.999, 0.9, 0.8])
def test_the_way_out_of_too_little_memory_fits(monkeypatch, share):
    """The flags of the message pass the checks and fit into the room that was there."""
    cfg = preset("pocket", val_batch_tokens=65_536, val_tokens=65_536, vocab_size=512, document_start=511)
    fabric = with_room(monkeypatch, share * totals(cfg)[1])
    message = refused(tg.RunError, lambda: tg.fit_memory(cfg, fabric, tg.attention_reference), "memory", "GiB",
                      "weights", "gradients", "moments", "working", "--num_slots=", "--slots_per_micro_batch=1")
    flags = message.rpartition("do:")[2].split()
    _, asked = tg.parse_flags(["--preset=pocket", "--val_batch_tokens=65536", "--val_tokens=65536", *flags])
    filled_in = tg.resolve(asked, *[[tg.ShardHeader("shard", 1, 512, 511)]] * 2)
    assert tg.fit_memory(filled_in, fabric, tg.attention_reference)[0] == 1


def test_no_way_out_is_said_too(monkeypatch):
    message = refused(tg.RunError, lambda: tg.fit_memory(preset("tiny"), with_room(monkeypatch, 1e3),
                                                         tg.attention_reference), "memory", "a larger device")
    assert "--num_slots" not in message


def test_24_gb_cards_are_sent_to_more_slots():
    """The record preset on 24 GB takes slots of 12k to 16k tokens; W = 1, fused attention."""
    cfg = record()
    fabric = make_fabric()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg.Fabric, "free_memory", lambda self: 23.5e9)
        try:
            slots, _ = tg.fit_memory(cfg, fabric, tg.attention_varlen)
            flags = ""
        except tg.RunError as error:
            flags = str(error).rpartition("do:")[2]
    longest = max(stage.batch_tokens for stage in cfg.stages)
    tokens = longest // (int(tg.re.search(r"--num_slots=(\d+)", flags)[1]) if flags else cfg.num_slots // slots)
    assert 8_000 <= tokens <= 50_000, "tokens that are in the model together"


KEPT = """
import resource
import torch
import train_gpt as tg

tg.keep_freed_memory()
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


def test_free_memory_is_that_of_the_system():
    free = make_fabric().free_memory()
    assert 2**20 < free < 2**46 or free == float("inf")


# ------ The header ----------------------------------------------------------------------------------------------------

OTHER = dict(train_files="x", val_files="x", val_tokens=2048, dtype="float64", head="emulated", device="cpu",
             compile=1, attention="varlen", row_comms="dense", stages=tg.STAGES, run_dir="x", save="x",
             sample="x", prompt="x", ranks="x", resume="x", profile="1:2", table_rule="adam", table_home="host",
             table_rounding="stochastic")


@pytest.mark.parametrize("name", [f.name for f in fields(tg.Config)])
def test_changed_names_each_setting_that_differs_and_no_other(name):
    before = tg.Config(**tg.PRESETS["tiny"])
    value = OTHER.get(name, None)
    value = getattr(before, name) + 1 if value is None else value
    assert tg.changed_fields("tiny", replace(before, **{name: value})) == {name: tg.flag_text(value)}
    assert tg.changed_fields("tiny", before) == {}
