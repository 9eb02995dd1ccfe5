"""Section 13: the command line; the attention kernel is checked before it is used, and memory is estimated.

These tests run on a CPU. Tests that need a GPU are in gpu/test_gpu.py.
"""
import functools
import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from common import (PROCESS_TIMEOUT_S, ROOT, SimulatedTime, expect_error, make_comm, make_engine, preset,
                    preset_of, refuse)
from torch import Tensor

import train_gpt as tg

ONE_STAGE = "128 1 3 1.0 1.0,0.5 1.0,0.0"
WIDE = dict(dtype="bfloat16", head_dim=128, model_dim=256)
Kernel = Callable[..., Tensor]           # attention


# ------ Command line --------------------------------------------------------------------------------------------------
REFUSED = {                                  # a flag after --preset=tiny -> what the message must contain
    "--see=1": ("unknown flag", "--see", "--seed"),
    "seed=1": ("argument without a flag", "seed=1", "--field=value"),
    "--preset=poket": ("--preset", "poket", "record", "pocket", "tiny"),
    "--seed": ("--seed", "expected one argument"),
    "--seed=1.5": ("--seed", "'1.5'", "an integer from", "--seed=0"),
    "--seed=-1": ("--seed", "-1", "0 to 2,147,483,647", "--seed=0"),
    "--adam_lr=nan": ("--adam_lr", "nan", "a number from", "--adam_lr=0.008"),
    "--dtype=bf16": ("--dtype", "bf16", "bfloat16", "float32", "float64"),
    "--adam_every=3": ("--adam_every", "'3'", "one of 1, 2"),
    "--seqs_per_step=0": ("--seqs_per_step", "1 to ", "(sequences)"),
    "--cooldown_frac=1.01": ("--cooldown_frac", "'1.01'", "0 to 1", "--cooldown_frac=0.55"),
    "--stages=128 1 3": ("--stages", "128 1 3", f"--stages='{tg.format_value(tg.TINY['stages'])}'"),
    "--stages=": ("--stages", "nothing", f"--stages='{tg.format_value(tg.TINY['stages'])}'"),
    "--target_loss=x": ("--target_loss", "--target_loss=0.0"),
    f"--stages={ONE_STAGE} tie": ("--stages", "tie", "[untie]"),
    f"--stages={ONE_STAGE}": ("--stages", "at least two stages"),
    "--tables=trigram_embed 3": ("--tables", "'trigram_embed 3'", "label order rows", "trigram_embed 3 20480"),
    "--num_heads=3": ("--num_heads", "3", "even", "--num_heads=4"),
    "--head_dim=4": ("--head_dim", "8 to "),
    "--head_dim=18": ("--head_dim", "18", "multiple of 4", "--head_dim=16"),
    "--model_dim=40": ("--model_dim", "40", "2 * 16", "--model_dim=32"),
    "--seqs_per_step=7": ("--stages", "128", "multiple of 112"),                     # 112 = 16 * seqs_per_step
    "--val_batch_tokens=100": ("--val_batch_tokens", "100", "--val_batch_tokens=128"),
    "--val_tokens=700": ("--val_tokens", "700", "--val_tokens=1024"),
    "--resume=": ("--resume", "an empty value", "omit --resume"),
    "--profile=3:3": ("--profile", "3:3", "0 < a < b"),
}

@pytest.mark.parametrize("name", list(tg.PRESETS))
def test_load_config__every_field_is_a_flag(name) -> None:
    """Writing all values of a preset as flags over another preset gives the same config."""
    assert set(tg.PRESETS[name]) < {f.name for f in fields(tg.Config)}, "a preset overrides only fields"
    assert name in re.findall(r"\w+", tg.Config.__dataclass_fields__["preset"].metadata["help"]), "--help names it"
    expected = preset_of(name)
    argv = [f"--{field}={tg.format_value(value)}" for field, value in vars(expected).items()
            if field not in ("preset", "resume", "sample")]          # these must not be empty
    assert tg.load_config(["--preset=tiny", *argv]) == replace(expected, preset="tiny")
    assert tg.load_config([f"--preset={name}"]) == expected

def test_load_config__a_flag_overrides_the_preset_and_the_config_is_frozen() -> None:
    """A flag may be written with = or with a space. No flag means preset `record`."""
    cfg = tg.load_config(["--preset=tiny", "--seed", "7", "--adam_lr=1e-3", "--adam_every=1", "--compile", "-1",
                          f"--stages={ONE_STAGE};{ONE_STAGE}"])
    assert (cfg.seed, cfg.adam_lr, cfg.head_dim, cfg.adam_every, cfg.compile) == (7, 1e-3, 16, 1, -1)
    assert cfg.stages == (tg.Stage(128, 1, 3, 1.0, (1.0, 0.5), (1.0, 0.0)),) * 2
    assert tg.load_config([]) == preset_of("record")
    with pytest.raises(FrozenInstanceError):
        cfg.seed = 1

@pytest.mark.parametrize("flag", REFUSED, ids="{:.60}".format)
def test_load_config__refuses_a_bad_setting(flag) -> None:
    refuse(["--preset=tiny", flag], *REFUSED[flag])

def test_load_config__refuses_settings_of_the_model_with_sample() -> None:
    """--preset is refused too, because the save has the settings of the model."""
    cfg = tg.load_config(["--sample=w", "once upon", "--seed=3", "--device=cpu"])
    assert cfg == tg.Config(sample="w", prompt="once upon", seed=3, device="cpu")
    for flag in ("--model_dim=64", "--vocab_size=512", "--tables=a_embed 3 10", "--preset=tiny", "--resume=x"):
        refuse(["--sample=w", "x", flag], "--sample", flag, "settings of the model", "omit the others")
    refuse(["--sample=w", "once", "upon"], "'upon'", "one prompt in quotes")

@pytest.mark.parametrize("name, suggestions", [
    ("time_buget", "--time_budget"), ("time-budget", "--time_budget"), ("epoch", "--epochs"), ("sede", "--seed"),
    ("lr", None), ("x", None), ("verbose", None)])
def test_unknown_flag_error__suggests_only_similar_flags(name, suggestions) -> None:
    """Earlier, it also suggested flags that share only a few letters with the text."""
    hint = refuse(["--preset=tiny", f"--{name}=1"], f"unknown flag --{name}").splitlines()[-1]
    expected = f"did you mean {suggestions}?" if suggestions else "--help lists all flags"
    assert hint.split("hint:")[1].strip() == expected

@pytest.mark.parametrize("argv", [["--preset=race"], ["--preset", "race"]])
def test_parse_value__the_example_is_a_value_of_the_preset(argv) -> None:
    """The order of the flags does not matter."""
    for name, example in (("stages", tg.RACE["stages"]), ("tables", tg.RACE["tables"]), ("num_heads", 2)):
        for flags in ([*argv, f"--{name}=a b"], [f"--{name}=a b", *argv]):
            message = refuse(flags, f"--{name}: invalid value", "'a b'")
            assert f"--{name}={tg.shlex.quote(tg.format_value(example))}" in message
    refuse([f"--stages={ONE_STAGE}", *argv], "--stages", tg.format_value(tg.RACE["stages"]))

@pytest.mark.parametrize("old, new", [
    ("num_slots", "seqs_per_step"), ("slots_per_micro_batch", "micro_batch_size"), ("document_start", "bos_id")])
def test_unknown_flag_error__a_renamed_flag_has_its_new_name_in_the_hint(old, new) -> None:
    """The old spelling is refused, with = and with a space. The new one is a flag."""
    for argv in ([f"--{old}=1"], [f"--{old}", "1"]):
        refuse(["--preset=tiny", *argv], f"unknown flag --{old}", f"it was renamed to --{new}")
    assert new in tg.Config.__dataclass_fields__ and old not in tg.Config.__dataclass_fields__

def test_flag_names__each_flag_has_one_role() -> None:
    """In the groups `common` and `run`, only --preset and --seed affect results.

    The locations of tables do not affect results either.
    """
    groups = {f.name: f.metadata["group"] for f in fields(tg.Config)}
    numeric, inherited, single_run = map(tg.flag_names, (tg.NUMERIC, tg.INHERITED, tg.SINGLE_RUN))
    assert single_run == {"runs", "save", "sample", "resume", "run_dir", "profile"}
    affect_results = {name for name, group in groups.items() if group not in ("common", "run")} | {"preset", "seed"}
    assert numeric == affect_results and inherited == groups.keys() - affect_results - single_run
    assert tg.flag_names(tg.NUMERIC, tg.INHERITED, tg.SINGLE_RUN) == groups.keys()
    cfg = preset_of("pocket_tables")
    on_host = replace(cfg, tables=tuple(replace(table, location="host") for table in cfg.tables))
    assert tg.numeric_settings(cfg).keys() == numeric and tg.numeric_settings(cfg) == tg.numeric_settings(on_host)
    assert tg.numeric_settings(replace(cfg, seed=1))["seed"] == "1"

@pytest.mark.parametrize("name", list(tg.PRESETS))
def test_load_config__help_lists_every_field_with_its_default(name, capsys) -> None:
    """--help lists each flag with its unit, its help text and the value in the preset."""
    argv = [] if name == "record" else [f"--preset={name}"]
    with pytest.raises(SystemExit) as exit_info:
        tg.load_config(["--help", *argv])
    text = " ".join(capsys.readouterr().out.split())
    assert exit_info.value.code == 0 and f"[{name}]" in text and "exit status" in text
    defaults = vars(preset_of(name))
    for f in fields(tg.Config):
        description = f"{f.metadata['help']} [{tg.format_value(defaults[f.name])}]"
        assert f"--{f.name} {f.metadata['unit']} {description}" in text, f.name

def test_load_config__expands_the_home_directory(monkeypatch, tmp_path) -> None:
    """The trainer expands ~ in --save=~/x, because the shell expands only the start of a word.

    A prompt is not expanded.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = ("train_files", "val_files", "run_dir", "save")
    cfg = tg.load_config(["--preset=tiny", *(f"--{name}=~/x" for name in flags)])
    assert [getattr(cfg, name) for name in flags] == [str(tmp_path / "x")] * 4
    cfg = tg.load_config(["--sample=~/x", "--prompt=~/z"])
    assert (cfg.sample, cfg.prompt) == (str(tmp_path / "x"), "~/z")

def write_settings(folder: Path, **flags: str) -> None:
    """Write the settings of an earlier run with preset tiny and these flags."""
    (folder / tg.SETTINGS_FILE).write_text(json.dumps(dict(preset="tiny", **flags)))

@pytest.mark.parametrize("content", [
    b"", b"[]", b'{"preset": "tiny", "flags": {}}', b"\xff\xfe", None, os.mkfifo, b'{"sede": "3"}'], ids=range(7))
def test_read_settings__refuses_any_damaged_file(tmp_path, content) -> None:
    """A missing file is refused too: the run directory of an older trainer has no settings.json."""
    path = tmp_path / tg.SETTINGS_FILE
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        content(path)
    with expect_error(tg.DataError, str(path), "give a run directory"):
        tg.read_settings(tmp_path)

def test_read_settings__names_a_setting_of_an_older_version(tmp_path) -> None:
    write_settings(tmp_path, num_slots="8")
    with expect_error(tg.DataError, str(tmp_path / tg.SETTINGS_FILE), "unknown setting: 'num_slots'",
                      "settings of this version", "a run of an older version, use the train_gpt.py in its run"):
        tg.read_settings(tmp_path)

def test_load_config__resume_starts_from_the_flags_of_the_earlier_run(tmp_path) -> None:
    """Settings of a single run are not inherited. Only some flags may differ from those of the earlier run."""
    write_settings(tmp_path, seed="5", adam_lr="0.01", adam_every="2", save="w", run_dir="r", micro_batch_size="2")
    resume = f"--resume={tmp_path}"
    cfg = tg.load_config([resume])
    assert (cfg.preset, cfg.seed, cfg.adam_lr, cfg.micro_batch_size) == ("tiny", 5, 0.01, 2)
    assert (cfg.save, cfg.run_dir, cfg.resume) == ("", "", str(tmp_path)), "--save and --run_dir are not inherited"
    cfg = tg.load_config([resume, "--preset=tiny", "--seed=5", "--adam_lr=1e-2", "--max_steps=7", "--save=v"])
    assert (cfg.seed, cfg.max_steps, cfg.save) == (5, 7, "v"), "flags may be repeated, and some may change"
    refuse([resume, "--preset=pocket"], "--preset with --resume", "tiny", "omit --preset")
    refuse([resume, "--runs=2"], "--runs=1")
    for flag, earlier in (("--seed=4", "'5'"), ("--adam_lr=0.1", "'0.01'"),
                         ("--tables=a_embed 3 10", "as in the resumed run")):
        refuse([resume, flag], f"{flag.partition('=')[0]} with --resume", earlier, "only these flags may change",
               "max_steps")
    write_settings(tmp_path, num_heads="2.0")
    refuse([resume], "num_heads", "'2.0'")                           # settings are checked as flags are
    (tmp_path / tg.SETTINGS_FILE).write_text('{"preset": "no"}')
    refuse([resume], "--preset", "no", "tiny")

def test_load_config__resume_may_change_only_the_location_of_a_table(tmp_path) -> None:
    """A change of another column, or of the order of the tables, is refused."""
    write_settings(tmp_path, tables="a_embed 3 10; b_embed 2 20")
    resume = f"--resume={tmp_path}"
    cfg = tg.load_config([resume, "--tables=a_embed 3 10 stream 0 host; b_embed 2 20"])
    assert [table.location for table in cfg.tables] == ["host", "device"]
    for tables in ("a_embed 3 10 stream 1 host; b_embed 2 20", "b_embed 2 20; a_embed 3 10"):
        refuse([resume, f"--tables={tables}"], "--tables with --resume", "the location of tables")


# ------ Attention -----------------------------------------------------------------------------------------------------
class FakeCudaComm:
    """A communicator of rank 0 that claims to be on CUDA, and records what is printed.

    other_answers: for each other rank, the fact that it contributes to all_gather, by the fact of rank 0. For a fact
    that is not listed, the other rank has the same one.
    """
    on_cuda = True
    device = torch.device("cpu")
    rank = 0
    kernel_finishes = True

    def __init__(self, other_answers: tuple[dict, ...] = ()) -> None:
        self.printed: list[str] = []
        self.other_answers = other_answers
        self.world_size = 1 + len(other_answers)

    def print0(self, text: str) -> None:
        self.printed.append(text)

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(query=functools.partial(bool, self.kernel_finishes))

    def all_gather(self, fact: object) -> list:
        return [fact, *(answers.get(fact, fact) for answers in self.other_answers)]

class FakeKernels:
    """Replaces torch's registry of flash attentions by these kernels, of packages that seem to be installed."""
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: int = 9, **kernels: Kernel) -> None:
        self.kernels = kernels                       # by name; torch itself includes "varlen"
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

    def call(self, *args: Any) -> Tensor:
        return self.kernels[self.current() or "varlen"](*args)

def choose_kernel(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, **changes: Any) -> tuple[str, list[str]]:
    """Choose a kernel with `kernel` as torch's varlen and no packages; return its name, and the printed lines."""
    fake_kernels = FakeKernels(monkeypatch, varlen=kernel)
    fake_comm = FakeCudaComm()
    _, title = tg.choose_attention(preset(**WIDE | changes), fake_comm)
    assert not fake_kernels.active
    return title.partition(" ")[0], fake_comm.printed

def faithful(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, attn_args: tg.AttentionArgs) -> Tensor:
    """A kernel that is as accurate as bf16 allows: it computes in f32 and rounds the result."""
    return tg.attention_reference(q.float(), k.float(), v.float(), cu_seqlens, attn_args).to(q.dtype)

def scaled(input_idx: int | None = None, by: float = 1.1) -> Kernel:
    """Build the faithful kernel with its output multiplied by `by`, or only the gradient of one input."""
    def kernel(*args: Any) -> Tensor:
        if input_idx is None:
            return by * faithful(*args)
        inputs = list(args)
        inputs[input_idx] = inputs[input_idx].clone()
        inputs[input_idx].register_hook(lambda grad: by * grad)
        return faithful(*inputs)
    return kernel

def no_backward(*args: Any) -> Tensor:
    out = faithful(*args)
    out.register_hook(make_raiser(NotImplementedError("no backward here")))
    return out

def wrong_window(add: int = 0, only_window: int = 0, lo: int = 0, hi: int = 10**6, only_heads: int = 0) -> Kernel:
    """Build the faithful kernel with wrong windows: all, only this window, or only in layers with so many heads."""
    def kernel(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, attn_args: tg.AttentionArgs) -> Tensor:
        window = attn_args.window
        if only_window in (0, window) and only_heads in (0, q.shape[1]):
            window = min(max(window + add, lo), hi)
        return faithful(q, k, v, cu_seqlens, replace(attn_args, window=window))
    return kernel

def one_document(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, attn_args: tg.AttentionArgs) -> Tensor:
    return faithful(q, k, v, cu_seqlens[[0, -1]], attn_args)

def wrong_scale(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, attn_args: tg.AttentionArgs) -> Tensor:
    return faithful(q, k, v, cu_seqlens, replace(attn_args, scale=2 * attn_args.scale))

def no_causal_mask(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    qkv = [x.transpose(0, 1)[None] for x in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*qkv, scale=0.1)[0].transpose(0, 1)

def contiguous_values(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, attn_args: tg.AttentionArgs) -> Tensor:
    """The faithful kernel, but it assumes that the values are contiguous."""
    return faithful(q, k, v.as_strided(v.shape, q.stride()), cu_seqlens, attn_args)

def nan_if_a_document_has(num_positions: int) -> Kernel:
    """Build the faithful kernel, but NaN if a document has this number of positions."""
    def kernel(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, attn_args: tg.AttentionArgs) -> Tensor:
        fails = num_positions in cu_seqlens.diff().tolist()
        return (torch.nan if fails else 1.0) * faithful(q, k, v, cu_seqlens, attn_args)
    return kernel

def make_raiser(error: Exception) -> Kernel:
    def kernel(*_: object) -> Tensor:
        raise error
    return kernel

ONE_KEY_MORE = wrong_window(add=1)
INACCURATE = "off by more than"
BAD_KERNELS = {                          # case -> (kernel, words in the message)
    "refuses": (make_raiser(RuntimeError("no kernel image\nfor this device")), "no kernel image"),
    "is missing": (make_raiser(ImportError("no module")), "no module"),
    "fails without a message": (make_raiser(NotImplementedError()), "NotImplementedError"),
    "fails backward": (no_backward, "no backward here"),
    "gives NaN": (scaled(by=float("nan")), INACCURATE),
    "is 10 % off": (scaled(), INACCURATE),
    "sees one key more": (ONE_KEY_MORE, INACCURATE),
    "sees one key less": (wrong_window(add=-1), INACCURATE),
    "sees other documents": (one_document, INACCURATE),
    "fails in an empty document": (nan_if_a_document_has(0), INACCURATE),
    "fails in a document of one token": (nan_if_a_document_has(1), INACCURATE),
    "has another scale": (wrong_scale, INACCURATE),
    "sees the future": (no_causal_mask, INACCURATE),
    "one key more, in a wide window": (wrong_window(add=1, only_window=300), INACCURATE),
    "a window that ends with its tile": (wrong_window(lo=127), INACCURATE),
    "a window beyond documents is cut": (wrong_window(hi=256), INACCURATE),
    "wrong in paired layers": (wrong_window(add=1, only_heads=1), INACCURATE),              # they have half the heads
    "assumes contiguous values": (contiguous_values, INACCURATE),
    "wrong in plain layers": (wrong_window(add=1, only_heads=2), INACCURATE),
    **{f"gradient of {name}": (scaled(at), INACCURATE) for at, name in enumerate("qkv")},
}

@pytest.mark.parametrize("name", BAD_KERNELS)
def test_check_attention__a_kernel_that_fails_or_is_wrong(monkeypatch, name) -> None:
    kernel, message = BAD_KERNELS[name]
    found, printed = choose_kernel(monkeypatch, kernel)
    assert found == "reference"
    assert any("varlen does not work" in line and message in line for line in printed), printed

def tiled(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, attn_args: tg.AttentionArgs) -> Tensor:
    """A kernel that rounds where flash attention does: the weights, and the gradients of the logits, before matmuls."""
    positions = torch.arange(len(q))
    document = torch.searchsorted(cu_seqlens.long(), positions, right=True)
    distance = positions[:, None] - positions
    visible = (distance >= 0) & (distance <= attn_args.window) & (document[:, None] == document)
    logits = torch.einsum("qhe,khe->hqk", q.float(), k.float()) * attn_args.scale
    logits.register_hook(lambda grad: grad.bfloat16().float())
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1).bfloat16().float()
    return torch.einsum("hqk,khe->qhe", weights, v.float()).bfloat16()

@pytest.mark.parametrize("kernel", [faithful, tiled])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_check_attention__a_faithful_kernel(monkeypatch, head_dim, kernel) -> None:
    found, printed = choose_kernel(monkeypatch, kernel, head_dim=head_dim, model_dim=2 * head_dim)
    assert found == "varlen"
    assert [line.partition(":")[2][:12] for line in printed] == [" FA3 does no", " FA4 does no"]

ALL = dict(FA4=faithful, FA3=faithful, varlen=faithful)
CHOICES = [                              # kernels, capability, --attention, chosen kernel, words in each printed line
    (ALL, 9, "auto", "FA3", []),
    (ALL, 10, "auto", "FA4", []),
    (dict(FA4=faithful, FA3=ONE_KEY_MORE, varlen=faithful), 9, "auto", "FA4", [INACCURATE]),
    (dict(FA4=ONE_KEY_MORE, FA3=ONE_KEY_MORE, varlen=faithful), 9, "auto", "varlen", [INACCURATE, INACCURATE]),
    (dict(varlen=faithful), 10, "auto", "varlen", ["FA4 does not work"]),
    (dict(varlen=make_raiser(RuntimeError("no kernel image"))), 8, "auto", "reference",
     ["no kernel", "no fast attention"]),
    *((ALL, 9, name, name, []) for name in ("FA4", "reference")),
]

@pytest.mark.parametrize("kernels, capability, requested, expected, words", CHOICES)
def test_choose_attention__packages_first_and_wrong_kernels_deactivated(monkeypatch, kernels, capability, requested,
                                                                        expected, words) -> None:
    fake_kernels = FakeKernels(monkeypatch, capability, **kernels)
    fake_comm = FakeCudaComm()
    kernel, title = tg.choose_attention(preset(attention=requested, **WIDE), fake_comm)
    assert title.partition(" ")[0] == expected and len(fake_comm.printed) == len(words)
    assert all(word in line for word, line in zip(words, fake_comm.printed)), fake_comm.printed
    active = fake_kernels.current() or "varlen"
    assert (kernel, active) in ((tg.attention_varlen, expected), (tg.attention_reference, "varlen"))
    assert expected != "varlen" or title == f"varlen (torch {tg.package_version('torch')})"

def test_choose_attention__must_work_on_every_rank(monkeypatch) -> None:
    fake_comm = FakeCudaComm(other_answers=({}, {"": "RuntimeError no kernel image"}))
    FakeKernels(monkeypatch, **ALL)
    assert tg.choose_attention(preset(**WIDE), fake_comm) == (tg.attention_reference, "reference")
    assert sum("no kernel image (rank 2)" in line for line in fake_comm.printed) == 3, fake_comm.printed

@pytest.mark.parametrize("kernels, other", [(ALL, "varlen"), (dict(varlen=faithful), "reference")])
def test_choose_attention__a_kernel_that_never_returns_ends_the_run(monkeypatch, kernels, other) -> None:
    """No other kernel can be tried on that device, so the run ends. The clock is simulated."""
    FakeKernels(monkeypatch, **kernels)
    fake_comm = FakeCudaComm()
    fake_comm.kernel_finishes = False
    clock = SimulatedTime(monkeypatch)
    tg.time.monotonic = clock.perf_counter
    tg.time.sleep = clock.work
    name = "FA3" if other == "varlen" else "varlen"
    with expect_error(tg.RunError, f"attention kernel {name}, window 2", "after 60.0 s", f"--attention={other}"):
        tg.choose_attention(preset(**WIDE), fake_comm)

@pytest.mark.parametrize("capability, title, printed", [
    (9, "varlen (torch 2.13.0)", "varlen is slower than FA3 or FA4, which GPUs of compute capability 9.0 can run"),
    (10, "varlen (torch 2.13.0)", "varlen is slower than FA4"), (9, "reference", ""),
    (9, "FA4 (flash-attn-4 4.0.0)", ""), (9, "FA3 (flash-attn-3 3.0.0)", ""), (8, "varlen (torch 2.13.0)", "")])
def test_slow_attention_warning__where_a_faster_kernel_runs(monkeypatch, capability, title, printed) -> None:
    FakeKernels(monkeypatch, capability)
    found = tg.slow_attention_warning(title, FakeCudaComm())
    assert printed in found and bool(found) == bool(printed)

@pytest.mark.parametrize("name, requested, why", [("tiny", "FA3", "No module of FA3"), ("record", "auto", INACCURATE)])
def test_choose_attention__a_requested_kernel_that_does_not_work(monkeypatch, name, requested, why) -> None:
    FakeKernels(monkeypatch, varlen=ONE_KEY_MORE)
    with expect_error(tg.ConfigError, f"--attention={requested}", why, "--attention=reference", "requirements-gpu.txt"):
        tg.choose_attention(replace(preset(attention=requested, **WIDE), preset=name), FakeCudaComm())


# ------ Memory --------------------------------------------------------------------------------------------------------
def count_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)

@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("world_size, rank", [(1, 0), (2, 1), (8, 0)])
@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_estimate_memory__weights_gradients_and_moments(dtype, world_size, rank, mode) -> None:
    """Compared with the tensors of a real engine, except for the rounding of shard sizes and for scalars in f32."""
    cfg = preset("tiny", dtype=dtype, row_comms=mode)
    engine = make_engine(cfg, world_size, rank)
    parts = tg.estimate_memory(cfg, engine.comm, tg.attention_reference, cfg.seqs_per_step // world_size)
    exact = tg.accum_dtype(getattr(torch, dtype))
    weights = [p.data for p in engine.model.parameters()]
    replicated = engine.optimizer.groups[tg.REPLICATED]
    # Gradients of autograd, and the buffer in which they are reduced together.
    gradients = [torch.empty_like(p) for p in replicated.weights]
    gradients.append(torch.empty(sum(p.numel() for p in replicated.weights), dtype=exact))
    for group in engine.optimizer.groups.values():
        if isinstance(group, tg.ShardedGroup):
            num_matrices = len(tg.bank_matrices(group.spec, group.weight))
            buffers = {id(x): x for x in (group.main_grad, group.comm_buffer)}
            gradients += [x[:num_matrices] for x in buffers.values()]
    unused = 0                                                                # elements for rows that no plan can use
    for table in engine.tables.values():
        if world_size == 1:
            gradients.append(table.grad)
        else:
            # The update allocates a gradient of the shard.
            gradients.append(torch.empty_like(table.shard, dtype=exact))
            gradients.append(table.row_grads)
            weights.append(table.cache)
            unused += max(0, world_size * len(table.shard) - len(table.cache)) * cfg.model_dim
    slack = unused * exact.itemsize if mode == "sparse" else 0
    for part, tensors in (("weights", weights), ("gradients", gradients)):
        counted = count_bytes(tensors)
        assert -0.01 * counted <= parts[part] - counted <= slack + 0.01 * counted, part
    moments = [x for state in engine.optimizer.state.values() for x in state.values()]
    # The estimate splits every bank evenly. For example, of 22 MLP matrices on 8 ranks, the last rank has 1 and the
    # others 3.
    uneven = 0.0
    for group in engine.optimizer.sharded_groups.values():
        rows = tg.bank_matrices(group.spec, group.weight.data)
        row_state = count_bytes(tg.init_optimizer_state(group.spec, rows[:1]).values())
        uneven += (len(group.shard) - len(rows) / world_size) * row_state
    assert abs(parts["moments"] + uneven - count_bytes(moments)) <= 1000 * (world_size == 8)

@pytest.mark.parametrize("location", ["device", "host"])
@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("rows, update_every", [(101, 2), (5000, 4)])
def test_estimate_memory__large_tables(location, world_size, rows, update_every) -> None:
    """Compared with the tensors of a real engine, as on a GPU: a shard, caches for a cycle, active rows.

    The 8 bytes of state per row are not compared.
    """
    cfg = with_table("tiny", f"{rows} stream 0 {location} {update_every}")
    table = make_engine(cfg, world_size, 0).tables["trigram_embed"]
    found, without = (tg.estimate_memory(c, on_gpu(world_size), tg.attention_reference, 1)
                      for c in (cfg, replace(cfg, tables=())))
    found = {part: size - without.get(part, 0) for part, size in found.items()}
    max_batch_tokens = max(stage.batch_tokens for stage in cfg.stages)
    shard_rows = -(-rows // world_size)
    cycle_tokens = update_every * max_batch_tokens
    # All ranks may request all of their rows from one owner.
    active = min(shard_rows, cycle_tokens)
    assert len(table.cache) == len(table.row_grads) == min(world_size * shard_rows, cycle_tokens // world_size)
    # The tolerance is for the rounding of shards of 101 rows, and for the scalars that mix the table in.
    rounded = functools.partial(pytest.approx, rel=0.05)
    assert found["gradients"] == rounded(table.row_grads.nbytes)
    on_device = table.cache.nbytes + active * 4 * cfg.model_dim
    if location == "host":
        assert found[tg.HOST_TABLES] == rounded(table.store.shard.rows.nbytes)
        assert found["weights"] == rounded(on_device + active * 4 * cfg.model_dim)
    else:
        assert found["weights"] == rounded(on_device + table.store.shard.rows.nbytes)
    assert found["working"] == 0 and found["moments"] < 1000, "of the scalars of the mix"

def set_available_memory(monkeypatch: pytest.MonkeyPatch, available: float) -> None:
    total = (available + 0.5) / tg.USABLE_MEMORY

    def gather(self: tg.Communicator, fact: object) -> list:
        return [fact] * self.world_size

    monkeypatch.setattr(tg.os, "sysconf", dict(SC_PAGE_SIZE=1, SC_PHYS_PAGES=total).get)
    monkeypatch.setattr(torch.cuda, "mem_get_info", {torch.device("cuda", 0): (0, total)}.get)
    monkeypatch.setattr(tg.Communicator, "all_gather", gather)

def on_gpu(world_size: int = 1) -> tg.Communicator:
    return tg.Communicator(torch.device("cuda", 0), 0, world_size)

def with_table(name: str, columns: str) -> tg.Config:
    return preset(name, tables=tg.parse_value("tables", f"trigram_embed 3 {columns}"))

def record_config(*flags: str) -> tg.Config:
    given = tg.load_config(["--preset=record", *flags])
    shards = [tg.ShardHeader("shard", 1, tg.GPT2_VOCAB, tg.GPT2_BOS_ID)]
    return tg.resolve_sizes(given, shards, shards)

@pytest.mark.parametrize("comm, kernel", [(make_comm(), tg.attention_reference),
                                          (on_gpu(), tg.attention_varlen)])
def test_choose_micro_batch_size__less_memory_means_smaller_micro_batches(monkeypatch, comm, kernel) -> None:
    """The largest size that fits is chosen, to the byte. A requested size is used, or refused if it does not fit."""
    # With small validation batches, no two sizes need the same memory.
    cfg = preset("pocket", val_batch_tokens=1024, val_tokens=1024)
    total = {size: tg.estimate_memory(cfg, comm, kernel, size).total() for size in (1, 2, 4, 8)}
    for size, num_bytes in total.items():
        set_available_memory(monkeypatch, num_bytes)
        micro_batch_size, estimate = tg.choose_micro_batch_size(cfg, comm, kernel)
        assert micro_batch_size == size and estimate.total() == num_bytes
        assert tg.choose_micro_batch_size(replace(cfg, micro_batch_size=1), comm, kernel)[0] == 1
    set_available_memory(monkeypatch, total[4] - 1)
    assert tg.choose_micro_batch_size(cfg, comm, kernel)[0] == 2
    with expect_error(tg.RunError, "memory", "at most", "GiB"):
        tg.choose_micro_batch_size(replace(cfg, micro_batch_size=4), comm, kernel)
    set_available_memory(monkeypatch, total[1] - 1)
    with expect_error(tg.RunError, "memory", "weights", "gradients", "moments", "working", "--micro_batch_size=1"):
        tg.choose_micro_batch_size(cfg, comm, kernel)

@pytest.mark.recipe
@pytest.mark.parametrize("card, world_size, want", [(80, 1, 2), (80, 8, 1), (141, 1, 4), (180, 8, 1)])
def test_choose_micro_batch_size__of_the_record_preset(monkeypatch, card, world_size, want) -> None:
    """card: its GiB; H100 and A100 80, H200 141, B200 180. One sequence needs 28 to 32 GiB, each further one 25."""
    set_available_memory(monkeypatch, card * 2**30 * tg.USABLE_MEMORY)
    assert tg.choose_micro_batch_size(record_config(), on_gpu(world_size), tg.attention_varlen)[0] == want

def test_choose_micro_batch_size__host_tables_are_reported_but_not_refused(monkeypatch) -> None:
    """Their memory is allocated page by page, as rows are updated: 10^8 rows of 384 bytes have 38 GB.

    On a device, tables of this size are refused.
    """
    host, device = (with_table("pocket", f"100000000 stream 0 {location}") for location in ("host", "device"))
    set_available_memory(monkeypatch, 8e9)
    for cfg, comm in ((host, on_gpu()), (device, make_comm())):
        _, estimate = tg.choose_micro_batch_size(cfg, comm, tg.attention_varlen)
        assert estimate[tg.HOST_TABLES] == 10**8 * 4 * cfg.model_dim
    with expect_error(tg.RunError, "memory", "at most 7.5 GiB", "weights 35.8", "location host"):
        tg.choose_micro_batch_size(device, on_gpu(), tg.attention_varlen)

@pytest.mark.style
def test_estimate_memory__within_5_percent_of_the_peaks_of_the_dry_run() -> None:
    expected_costs = json.loads((Path(__file__).parent / "dry_run/expected_costs.json").read_text())
    for world_size, costs in expected_costs["worlds"].items():
        cfg = record_config(*expected_costs["flags"])
        phases = costs["phases"]
        micro_batch_size = cfg.seqs_per_step // int(world_size) // phases["stage 1 even step"]["sums"]["micro_batches"]
        estimate = tg.estimate_memory(cfg, on_gpu(int(world_size)), tg.attention_varlen, micro_batch_size)
        peak = max(phase["sums"]["peak_bytes"] for phase in phases.values())
        assert estimate.total() == pytest.approx(peak, rel=0.05), (world_size, micro_batch_size)

REUSE_PROGRAM = """
import resource, torch
import train_gpt as tg

tg.init_distributed(tg.Config(device="cpu"))
page_faults = []
# Tensors grow from pass to pass, because glibc without this setting reuses memory for tensors that are not larger.
for i in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones((1 << 20) + (i << 14)) for _ in range(20)]
    del tensors
    page_faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
# If freed memory is returned to the system, every pass faults in all of its pages.
print(min(page_faults))
"""

@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="without glibc's malloc")
def test_init_distributed__freed_cpu_memory_is_reused() -> None:
    out = subprocess.run([sys.executable, "-c", REUSE_PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True,
                          timeout=PROCESS_TIMEOUT_S).stdout
    assert int(out) < 2 * (4 << 20) // resource.getpagesize(), "a tenth of the pages of 20 tensors"
