"""What the trainer decides from the device: attention that must prove itself, memory counted before it is used.

Everything here runs on a CPU; what needs a GPU is in test_gpu.py.
"""
import json
import sys
import types
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import rehearse
import torch
from common import executor, preset, refused
from common import fabric as make_fabric

import train_gpt as tg

UPDATED = tg.UPDATE_ORDER
CUDA = SimpleNamespace(on_cuda=True, device=torch.device("cpu"))


# ------ Attention -----------------------------------------------------------------------------------------------------

def choose(monkeypatch, kernel, dtype=torch.bfloat16, head_dim: int = 16) -> tuple[str, list[str]]:
    """(name of the chosen attention, what was said) on a device that calls itself CUDA, with this kernel as its own."""
    said: list[str] = []
    monkeypatch.setattr(tg, "attention_varlen", kernel)
    fabric = SimpleNamespace(**vars(CUDA), say=said.append)
    name, chosen = tg.choose_attention(fabric, dtype, head_dim)
    assert chosen is (tg.attention_reference if name == "reference" else kernel)
    return name, said


def faithful(q, k, v, cu_seqlens, max_len, window, scale):
    """A kernel as good as bf16 allows: exact inside, rounded at its end."""
    return tg.attention_reference(q.float(), k.float(), v.float(), cu_seqlens, max_len, window, scale).to(q.dtype)


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("no backward here")


def wrong(**changes):
    """The faithful kernel with one argument wrong, given as a function of the right one."""
    def kernel(q, k, v, cu_seqlens, max_len, window, scale):
        given = dict(cu_seqlens=cu_seqlens, max_len=max_len, window=window, scale=scale)
        return faithful(q, k, v, **{name: changes[name](x) if name in changes else x for name, x in given.items()})
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
    chosen, said = choose(monkeypatch, kernel)
    assert chosen == "reference"
    assert any("torch varlen does not run here" in line and word in line for line in said), said


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_a_faithful_kernel_is_taken(monkeypatch, head_dim):
    name, said = choose(monkeypatch, faithful, head_dim=head_dim)
    assert name == "torch varlen", said


def test_flash_attention_3_comes_first_and_is_put_back_when_it_lies(monkeypatch):
    """As torch activates it: by a package, then a name. After a failure torch's own kernel is there again."""
    active: list[str] = []
    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface"))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: (active or [None])[0])
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", active.clear)
    assert choose(monkeypatch, faithful)[0] == "FA3" and active == ["FA3"]
    active.clear()
    lie = wrong(window=lambda w: w + 1)
    name, said = choose(monkeypatch, lambda *args: (lie if active else faithful)(*args))
    assert name == "torch varlen" and not active
    assert any("FA3 does not run here" in line and "off by" in line for line in said), said


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_types_take_the_reference_at_once(monkeypatch, dtype):
    assert choose(monkeypatch, raising(AssertionError("not asked")), dtype) == ("reference", [])


def test_the_cpu_takes_the_reference_at_once(monkeypatch):
    monkeypatch.setattr(tg, "attention_varlen", raising(AssertionError("not asked")))
    assert tg.choose_attention(make_fabric(), torch.bfloat16, 16)[0] == "reference"


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


def test_free_memory_is_that_of_the_system():
    free = make_fabric().free_memory()
    assert 2**20 < free < 2**46 or free == float("inf")


# ------ The header ----------------------------------------------------------------------------------------------------

OTHER = dict(train_files="x", val_files="x", val_tokens=2048, dtype="float64", head="emulated", device="cpu", compile=1,
             row_comms="dense", stages=tg.STAGES, run_dir="x", save="x", sample="x", prompt="x", ranks="x",
             resume="x", profile="1:2")


@pytest.mark.parametrize("name", [f.name for f in fields(tg.Config)])
def test_changed_names_each_setting_that_differs_and_no_other(name):
    before = tg.Config(**tg.PRESETS["tiny"])
    value = OTHER.get(name, None)
    value = getattr(before, name) + 1 if value is None else value
    assert tg.changed_fields("tiny", replace(before, **{name: value})) == {name: tg.flag_text(value)}
    assert tg.changed_fields("tiny", before) == {}
