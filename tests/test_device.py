"""What the trainer decides from the device: attention that must prove itself, memory counted before it is used.

Everything here runs on a CPU; what needs a GPU is in gpu/test_gpu.py.
"""
import functools
import json
import platform
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import PROCESS_TIMEOUT_S, ROOT, SimulatedTime, expect_error, make_comm, make_engine, preset

import train_gpt as tg

WIDE = dict(dtype="bfloat16", head_dim=128, model_dim=256)


# ------ Attention -----------------------------------------------------------------------------------------------------
class Cards:
    """A rank with a card that calls itself CUDA; of other ranks, what they would say in the place of what it says."""
    on_cuda = True
    device = torch.device("cpu")
    rank = 0
    returns = True                                   # a kernel that was launched

    def __init__(self, others: tuple[dict, ...] = ()) -> None:
        self.said: list[str] = []
        self.others = others
        self.world_size = 1 + len(others)

    def print0(self, text: str) -> None:
        self.said.append(text)

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(query=functools.partial(bool, self.returns))

    def all_gather(self, fact) -> list:
        return [fact, *(answers.get(fact, fact) for answers in self.others)]

class Registry:
    """torch's own of flash attentions, and packages that are there: what is called, by name."""
    def __init__(self, monkeypatch, capability: int = 9, **kernels) -> None:
        self.kernels = kernels                       # by name; "varlen" is torch's own
        self.active: list[str] = []
        monkeypatch.setattr(tg, "attention_varlen", self.call)
        monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", self.activate)
        monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", self.current)
        monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", self.active.clear)
        monkeypatch.setattr(torch.cuda, "get_device_name", str)
        monkeypatch.setattr(torch.cuda, "get_device_capability", {torch.device("cpu"): (capability, 0)}.get)

    def current(self) -> str | None:
        return self.active[0] if self.active else None

    def activate(self, name: str) -> None:
        self.active.clear()
        if name not in self.kernels:
            raise ModuleNotFoundError(f"No module of {name}")
        self.active.append(name)

    def call(self, *args):
        return self.kernels[self.current() or "varlen"](*args)

def chosen(monkeypatch, kernel, **changes) -> tuple[str, list[str]]:
    """Return the kernel chosen on a card with this one as torch's own and no packages, and what was said."""
    registry = Registry(monkeypatch, varlen=kernel)
    cards = Cards()
    _, title = tg.choose_attention(preset(**WIDE | changes), cards)
    assert not registry.active
    return title.partition(" ")[0], cards.said

def faithful(q, k, v, cu_seqlens, span):
    """A kernel as good as bf16 allows: exact inside, rounded at its end."""
    return tg.attention_reference(q.float(), k.float(), v.float(), cu_seqlens, span).to(q.dtype)

def changed(at: int | None = None, by: float = 1.1):
    """The faithful kernel with its output, or the gradient of an input alone, times this."""
    def kernel(*args):
        if at is None:
            return by * faithful(*args)
        inputs = list(args)
        inputs[at] = inputs[at].clone()
        inputs[at].register_hook(lambda grad: by * grad)
        return faithful(*inputs)
    return kernel

def no_backward(*args):
    out = faithful(*args)
    out.register_hook(raising(NotImplementedError("no backward here")))
    return out

def windows(add: int = 0, at: int = 0, least: int = 0, most: int = 10**6, heads: int = 0):
    """The faithful kernel with other windows: all, in the place of `at`, or of the layers with so many heads."""
    def kernel(q, k, v, cu_seqlens, span):
        window = span.window
        if at in (0, window) and heads in (0, q.shape[1]):
            window = min(max(window + add, least), most)
        return faithful(q, k, v, cu_seqlens, replace(span, window=window))
    return kernel

def one_document(q, k, v, cu_seqlens, span):
    return faithful(q, k, v, cu_seqlens[[0, -1]], span)

def own_scale(q, k, v, cu_seqlens, span):
    return faithful(q, k, v, cu_seqlens, replace(span, scale=2 * span.scale))

def future(q, k, v, *_):
    qkv = [x.transpose(0, 1)[None] for x in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*qkv, scale=0.1)[0].transpose(0, 1)

def packed(q, k, v, cu_seqlens, span):
    """Values are read as if they were no part of a larger tensor."""
    return faithful(q, k, v.as_strided(v.shape, q.stride()), cu_seqlens, span)

def raising(error: Exception):
    def kernel(*_):
        raise error
    return kernel

WINDOW_MORE = windows(add=1)
LIES = "off by more than"
BAD_KERNELS = {                          # kernel -> what is said of it
    "refuses": (raising(RuntimeError("no kernel image\nfor this device")), "no kernel image"),
    "is not there": (raising(ImportError("no module")), "no module"),
    "fails without a word": (raising(NotImplementedError()), "NotImplementedError"),
    "fails backward": (no_backward, "no backward here"),
    "gives NaN": (changed(by=float("nan")), LIES),
    "is 10 % off": (changed(), LIES),
    "sees one key more": (WINDOW_MORE, LIES),
    "sees one key less": (windows(add=-1), LIES),
    "sees other documents": (one_document, LIES),
    "has its own scale": (own_scale, LIES),
    "sees the future": (future, LIES),
    "one key more, in a wide window": (windows(add=1, at=300), LIES),
    "a window that ends with its tile": (windows(least=127), LIES),
    "a span beyond documents is cut": (windows(most=256), LIES),
    "wrong in paired layers": (windows(add=1, heads=1), LIES),              # half the heads
    "takes values for contiguous": (packed, LIES),
    "wrong in plain layers": (windows(add=1, heads=2), LIES),
    **{f"gradient of {name}": (changed(at), LIES) for at, name in enumerate("qkv")},
}

@pytest.mark.parametrize("name", BAD_KERNELS)
def test_check_attention__a_kernel_that_fails_or_lies(monkeypatch, name):
    kernel, word = BAD_KERNELS[name]
    found, said = chosen(monkeypatch, kernel)
    assert found == "reference"
    assert any("varlen does not work" in line and word in line for line in said), said

def tiled(q, k, v, cu_seqlens, span):
    """Rounded where flash attention rounds: weights before values, logits' gradients before queries and keys."""
    at = torch.arange(len(q))
    document = torch.searchsorted(cu_seqlens.long(), at, right=True)
    back = at[:, None] - at
    seen = (back >= 0) & (back <= span.window) & (document[:, None] == document)
    logits = torch.einsum("qhe,khe->hqk", q.float(), k.float()) * span.scale
    logits.register_hook(lambda grad: grad.bfloat16().float())
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1).bfloat16().float()
    return torch.einsum("hqk,khe->qhe", weights, v.float()).bfloat16()

@pytest.mark.parametrize("kernel", [faithful, tiled])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_check_attention__a_faithful_kernel(monkeypatch, head_dim, kernel):
    found, said = chosen(monkeypatch, kernel, head_dim=head_dim, model_dim=2 * head_dim)
    assert found == "varlen"
    assert [line.partition(":")[2][:12] for line in said] == [" FA3 does no", " FA4 does no"]

ALL = dict(FA4=faithful, FA3=faithful, varlen=faithful)
CHOICES = [                              # kernels, capability, --attention -> the kernel that is taken, what is said
    (ALL, 9, "auto", "FA3", []),
    (ALL, 10, "auto", "FA4", []),
    (dict(FA4=faithful, FA3=WINDOW_MORE, varlen=faithful), 9, "auto", "FA4", [LIES]),
    (dict(FA4=WINDOW_MORE, FA3=WINDOW_MORE, varlen=faithful), 9, "auto", "varlen", [LIES, LIES]),
    (dict(varlen=faithful), 10, "auto", "varlen", ["FA4 does not work"]),
    (dict(varlen=raising(RuntimeError("no kernel image"))), 8, "auto", "reference", ["no kernel", "no fast attention"]),
    *((ALL, 9, name, name, []) for name in ("FA4", "reference")),
]

@pytest.mark.parametrize("kernels, capability, asked, taken, words", CHOICES)
def test_choose_attention__packages_come_first_and_what_lies_is_put_back(monkeypatch, kernels, capability, asked, taken,
                                                                         words):
    registry = Registry(monkeypatch, capability, **kernels)
    cards = Cards()
    kernel, title = tg.choose_attention(preset(attention=asked, **WIDE), cards)
    assert title.partition(" ")[0] == taken and len(cards.said) == len(words)
    assert all(word in line for word, line in zip(words, cards.said)), cards.said
    active = registry.current() or "varlen"
    assert (kernel, active) in ((tg.attention_varlen, taken), (tg.attention_reference, "varlen"))
    assert taken != "varlen" or title == f"varlen (torch {tg.package_version('torch')})"

def test_choose_attention__right_on_every_rank(monkeypatch):
    cards = Cards(others=({}, {"": "RuntimeError no kernel image"}))
    Registry(monkeypatch, **ALL)
    assert tg.choose_attention(preset(**WIDE), cards) == (tg.attention_reference, "reference")
    assert sum("no kernel image (rank 2)" in line for line in cards.said) == 3, cards.said

@pytest.mark.parametrize("kernels, other", [(ALL, "varlen"), (dict(varlen=faithful), "reference")])
def test_choose_attention__a_kernel_that_never_returns_ends_the_run(monkeypatch, kernels, other):
    """No other one can be tried on that device. By a simulated clock."""
    Registry(monkeypatch, **kernels)
    cards = Cards()
    cards.returns = False
    clock = SimulatedTime(monkeypatch)
    tg.time.monotonic = clock.perf_counter
    tg.time.sleep = clock.work
    name = "FA3" if other == "varlen" else "varlen"
    with expect_error(tg.RunError, f"attention kernel {name}, window 2", "after 60.0 s", f"--attention={other}"):
        tg.choose_attention(preset(**WIDE), cards)

@pytest.mark.parametrize("capability, title, said", [
    (9, "varlen (torch 2.13.0)", "varlen is slower than FA3 or FA4, which GPUs of compute capability 9.0 can run"),
    (10, "varlen (torch 2.13.0)", "varlen is slower than FA4"), (9, "reference", "reference is slower than FA3 or FA4"),
    (9, "FA4 (flash-attn-4 4.0.0)", ""), (9, "FA3 (flash-attn-3 3.0.0)", ""), (8, "varlen (torch 2.13.0)", "")])
def test_slow_attention__where_a_faster_kernel_runs(monkeypatch, capability, title, said):
    Registry(monkeypatch, capability)
    found = tg.slow_attention(title, Cards())
    assert said in found and bool(found) == bool(said)
    assert tg.slow_attention(title, make_comm()) == ""

@pytest.mark.parametrize("name, asked, why", [("tiny", "FA3", "No module of FA3"), ("record", "auto", LIES)])
def test_choose_attention__what_is_wanted_and_does_not_run_ends_with_why(monkeypatch, name, asked, why):
    Registry(monkeypatch, varlen=WINDOW_MORE)
    with expect_error(tg.ConfigError, f"--attention={asked}", why, "--attention=reference", "requirements-gpu.txt"):
        tg.choose_attention(replace(preset(attention=asked, **WIDE), preset=name), Cards())


# ------ Memory --------------------------------------------------------------------------------------------------------
def bytes_of(tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)

@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("world, rank", [(1, 0), (2, 1), (8, 0)])
@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_estimate_memory__weights_gradients_and_moments(dtype, world, rank, mode):
    """Against the tensors of a real engine, but for what a shard is rounded up or down by and for scalars in f32."""
    cfg = preset("tiny", dtype=dtype, row_comms=mode)
    runner = make_engine(cfg, world, rank)
    parts = tg.estimate_memory(cfg, runner.comm, tg.attention_reference, cfg.seqs_per_step // world)
    exact = tg.accum_dtype(getattr(torch, dtype))
    weights = [p.data for p in runner.model.parameters()]
    small = runner.optimizer.groups[tg.REPLICATED]
    gradients = [torch.empty_like(p) for p in small.weights]                  # autograd's, and all that travel at once
    gradients.append(torch.empty(sum(p.numel() for p in small.weights), dtype=exact))
    for entry in runner.optimizer.groups.values():
        if isinstance(entry, tg.ShardedGroup):
            units = len(tg.bank_matrices(entry.spec, entry.weight))
            buffers = {id(x): x for x in (entry.main_grad, entry.comm_buffer)}
            gradients += [x[:units] for x in buffers.values()]
    unused = 0                                                                # rows of caches that no list can fill
    for table in runner.tables.values():
        if world == 1:
            gradients.append(table.grad)
        else:
            gradients.append(torch.empty_like(table.shard, dtype=exact))      # which its update makes
            gradients.append(table.row_grads)
            weights.append(table.cache)
            unused += max(0, world * len(table.shard) - len(table.cache)) * cfg.model_dim
    spare = unused * exact.itemsize if mode == "sparse" else 0
    for part, tensors in (("weights", weights), ("gradients", gradients)):
        counted = bytes_of(tensors)
        assert -0.01 * counted <= parts[part] - counted <= spare + 0.01 * counted, part
    moments = [x for state in runner.optimizer.state.values() for x in state.values()]
    mlp = runner.optimizer.groups["mlp"]                                     # 22 matrices: 3 each, 1 for the last
    matrix = tg.bank_matrices(mlp.spec, mlp.weight.data)[:1]
    uneven = 2 * bytes_of(tg.init_optimizer_state(mlp.spec, matrix).values()) + 1000
    assert abs(parts["moments"] - bytes_of(moments)) <= uneven * (world == 8)

@pytest.mark.parametrize("home", ["device", "host"])
@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("rows, cadence", [(101, 2), (5000, 4)])
def test_estimate_memory__large_tables(home, world, rows, cadence):
    """Against the tensors of a real engine, as on a GPU: a shard, caches for a cycle, active rows; not the 8 bytes of
    state of a row."""
    cfg = with_table("tiny", f"{rows} stream 0 {home} {cadence}")
    table = make_engine(cfg, world, 0).tables["trigram_embed"]
    found, without = (tg.estimate_memory(c, on_gpu(world), tg.attention_reference, 1)
                      for c in (cfg, replace(cfg, tables=())))
    found = {part: size - without.get(part, 0) for part, size in found.items()}
    most = max(stage.batch_tokens for stage in cfg.stages)
    active = min(-(-rows // world), cadence * most)                             # all ranks may ask one
    assert len(table.cache) == len(table.row_grads) == min(world * -(-rows // world), cadence * most // world)
    rounded = functools.partial(pytest.approx, rel=0.05)                      # shards of 101 rows, scalars of the mix
    assert found["gradients"] == rounded(table.row_grads.nbytes)
    on_device = table.cache.nbytes + active * 4 * cfg.model_dim
    if home == "host":
        assert found[tg.HOST_TABLES] == rounded(table.store.shard.rows.nbytes)
        assert found["weights"] == rounded(on_device + active * 4 * cfg.model_dim)
    else:
        assert found["weights"] == rounded(on_device + table.store.shard.rows.nbytes)
    assert found["working"] == 0 and found["moments"] < 1000, "of the scalars of the mix"

def let_room_be(monkeypatch, room: float) -> None:
    total = (room + 0.5) / tg.USABLE_MEMORY

    def gather(self: tg.Communicator, fact: object) -> list:
        return [fact] * self.world_size

    monkeypatch.setattr(tg.os, "sysconf", dict(SC_PAGE_SIZE=1, SC_PHYS_PAGES=total).get)
    monkeypatch.setattr(torch.cuda, "mem_get_info", {torch.device("cuda", 0): (0, total)}.get)
    monkeypatch.setattr(tg.Communicator, "all_gather", gather)

def on_gpu(world: int = 1) -> tg.Communicator:
    return tg.Communicator(torch.device("cuda", 0), 0, world)

def with_table(name: str, columns: str) -> tg.Config:
    return preset(name, tables=tg.parse_value("tables", f"trigram_embed 3 {columns}"))

def record(*flags: str) -> tg.Config:
    given = tg.load_config(["--preset=record", *flags])
    shards = [tg.ShardHeader("shard", 1, tg.GPT2_VOCAB, tg.GPT2_BOS_ID)]
    return tg.resolve_sizes(given, shards, shards)

@pytest.mark.parametrize("comm, kernel", [(make_comm(), tg.attention_reference),
                                          (on_gpu(), tg.attention_varlen)])
def test_choose_micro_batch_size__less_room_means_smaller_micro_batches(monkeypatch, comm, kernel):
    """The largest that fits, at the very byte where it begins to fit; one that is asked for is taken or refused."""
    cfg = preset("pocket", val_batch_tokens=1024, val_tokens=1024)            # so that no two sizes cost the same
    total = {m: tg.estimate_memory(cfg, comm, kernel, m).total() for m in (1, 2, 4, 8)}
    for m, size in total.items():
        let_room_be(monkeypatch, size)
        slots, parts = tg.choose_micro_batch_size(cfg, comm, kernel)
        assert slots == m and parts.total() == size
        assert tg.choose_micro_batch_size(replace(cfg, micro_batch_size=1), comm, kernel)[0] == 1
    let_room_be(monkeypatch, total[4] - 1)
    assert tg.choose_micro_batch_size(cfg, comm, kernel)[0] == 2
    with expect_error(tg.RunError, "memory", "at most", "GiB"):
        tg.choose_micro_batch_size(replace(cfg, micro_batch_size=4), comm, kernel)
    let_room_be(monkeypatch, total[1] - 1)
    with expect_error(tg.RunError, "memory", "weights", "gradients", "moments", "working", "--micro_batch_size=1"):
        tg.choose_micro_batch_size(cfg, comm, kernel)

@pytest.mark.recipe
@pytest.mark.parametrize("card, world, want", [(80, 1, 2), (80, 8, 1), (141, 1, 4), (180, 8, 1)])
def test_choose_micro_batch_size__slots_at_once_of_the_record_preset(monkeypatch, card, world, want):
    """On H100 and A100, H200, B200, by their GiB: one slot takes 28 to 32, each further one 25."""
    let_room_be(monkeypatch, card * 2**30 * tg.USABLE_MEMORY)
    assert tg.choose_micro_batch_size(record(), on_gpu(world), tg.attention_varlen)[0] == want

def test_choose_micro_batch_size__tables_on_the_host_are_told_and_not_refused(monkeypatch):
    """They take memory page by page, as rows are updated: 10^8 of 384 bytes are 38 GB. On a device they are refused."""
    host, device = (with_table("pocket", f"100000000 stream 0 {home}") for home in ("host", "device"))
    let_room_be(monkeypatch, 8e9)
    for cfg, comm in ((host, on_gpu()), (device, make_comm())):
        _, estimate = tg.choose_micro_batch_size(cfg, comm, tg.attention_varlen)
        assert estimate[tg.HOST_TABLES] == 10**8 * 4 * cfg.model_dim
    with expect_error(tg.RunError, "memory", "at most 7.5 GiB", "weights 35.8", "location host"):
        tg.choose_micro_batch_size(device, on_gpu(), tg.attention_varlen)

@pytest.mark.style
def test_estimate_memory__within_5_percent_of_the_peaks_that_the_rehearsal_walked():
    ledger = json.loads((Path(__file__).parent / "dry_run/expected_costs.json").read_text())
    for world, walked in ledger["worlds"].items():
        cfg = record(*ledger["flags"])
        phases = walked["phases"]
        micro_batch_size = cfg.seqs_per_step // int(world) // phases["stage 1 even step"]["sums"]["micro_batches"]
        estimate = tg.estimate_memory(cfg, on_gpu(int(world)), tg.attention_varlen, micro_batch_size)
        peak = max(phase["sums"]["peak_bytes"] for phase in phases.values())
        assert estimate.total() == pytest.approx(peak, rel=0.05), (world, micro_batch_size)

KEPT = """
import resource, torch
import train_gpt as tg

tg.init_distributed(tg.Config(device="cpu"))
passes = []
for number in range(5):                  # each a little larger: glibc alone would keep what is no larger than before
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones((1 << 20) + (number << 14)) for _ in range(20)]
    del tensors
    passes.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(passes))                       # given back, memory costs each of them all its pages
"""

@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="without glibc's malloc")
def test_init_distributed__what_is_freed_on_a_cpu_is_kept():
    out = subprocess.run([sys.executable, "-c", KEPT], cwd=ROOT, capture_output=True, text=True, check=True,
                          timeout=PROCESS_TIMEOUT_S).stdout
    assert int(out) < 2 * (4 << 20) // resource.getpagesize(), "a tenth of the pages of 20 tensors"
