"""Section 13: the command line, settings files, the check of attention kernels. Tests on a GPU: gpu/test_gpu.py."""
import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from common import PROCESS_TIMEOUT_S, ROOT, expect_error, preset, preset_of, refuse
from torch import Tensor

import train_gpt as tg

WIDE = dict(dtype="bfloat16", head_dim=128, model_dim=256)
Kernel = Callable[..., Tensor]           # attention


# ------ Command line --------------------------------------------------------------------------------------------------
REFUSED = {                                  # flags after --preset=tiny -> what the message must contain
    "--see=1": ("unrecognized", "--see=1", "--help"), "seed=1": ("unrecognized", "seed=1"),
    "--preset=poket": ("--preset", "poket", "record", "pocket", "tiny"), "--seed": ("--seed", "expected one argument"),
    "--adam_every=3": ("--adam_every", "one of 1, 2"), "--num_heads=3": ("--model_dim", "num_heads even"),
    "--head_dim=18 --model_dim=36": ("head_dim a multiple of 4",), "--model_dim=40": ("--model_dim=40", "2 * 16"),
    "--seqs_per_step=7": ("--stages", "batch_tokens", "112"),                # 16 * seqs_per_step
    "--val_batch_tokens=100": ("--val_batch_tokens=100", "128"), "--val_tokens=700": ("--val_tokens=700", "multiple"),
    "--resume=": ("settings.json", "directory of a run"), "--runs=2 --save=x": ("--save", "--runs=1"),
}

@pytest.mark.parametrize("flags", REFUSED)
def test_load_config__refuses_a_bad_setting(flags) -> None:
    refuse(["--preset=tiny", *flags.split()], *REFUSED[flags])

def test_load_config__a_flag_overrides_the_preset_and_the_config_is_frozen() -> None:
    """No flag means preset `record`."""
    cfg = tg.load_config(["--preset=tiny", "--seed", "7", "--adam_lr=1e-3", "--adam_every=1", "--compile", "-1"])
    assert (cfg.seed, cfg.adam_lr, cfg.head_dim, cfg.adam_every, cfg.compile) == (7, 1e-3, 16, 1, -1)
    assert tg.load_config([]) == preset_of("record")
    with pytest.raises(FrozenInstanceError):
        cfg.seed = 1

@pytest.mark.parametrize("name", ["record", "race"])
def test_load_config__help_has_the_comment_and_the_default_of_every_field(name, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit, match="^0$"):
        tg.main(["--help", *([] if name == "record" else [f"--preset={name}"])])
    text = " ".join(capsys.readouterr().out.split())
    lines = (ROOT / "train_gpt.py").read_text().partition("\nclass Config:")[2].partition("\n\n\n")[0].splitlines()
    comments = {line.partition(":")[0].strip(): line.partition("  # ")[2] for line in lines}
    for field, default in vars(replace(preset_of(name), preset="record")).items():
        assert comments[field] and f"--{field} {tg.Config.__annotations__[field]} {comments[field]} [" in text, field
        assert f"{comments[field]} [{tg.format_value(default)}]" in text, field
    assert set(re.findall(r"\w+", comments["preset"])) > set(tg.PRESETS), "--help names every preset"

def test_load_config__expands_the_home_directory(monkeypatch, tmp_path) -> None:
    """The trainer expands ~ in --save=~/x, because the shell expands only the start of a word."""
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ("train_files", "val_files", "run_dir", "save")
    cfg = tg.load_config(["--preset=tiny", *(f"--{name}=~/x" for name in names)])
    assert [getattr(cfg, name) for name in names] == [str(tmp_path / "x")] * 4

@pytest.mark.parametrize("content", [
    b"", b"[]", b'{"sede": "3"}', b'{"num_heads": "2.0"}', b"\xff\xfe", None, os.mkfifo], ids=range(7))
def test_load_settings__refuses_a_damaged_file_and_one_of_another_version(tmp_path, content) -> None:
    path = tmp_path / tg.SETTINGS_FILE
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        content(path)
    refuse([f"--resume={tmp_path}"], str(path), "director")

def test_load_config__resume_starts_from_the_settings_of_the_earlier_run(tmp_path) -> None:
    """Except those of a single run; given flags replace the inherited ones."""
    earlier = tg.load_config(["--preset=tiny", "--seed=5", "--tables=[('a_embed', 3, 10)]", "--save=w", "--run_dir=r"])
    (tmp_path / tg.SETTINGS_FILE).write_text(tg.settings_json(earlier))
    resume = f"--resume={tmp_path}"
    assert tg.load_config([resume]) == replace(earlier, save="", run_dir="", resume=str(tmp_path))
    cfg = tg.load_config([resume, "--max_steps=7", "--save=v"])
    assert cfg == replace(earlier, save="v", run_dir="", resume=str(tmp_path), max_steps=7)
    refuse([resume, "--runs=2"], "--runs")
    (tmp_path / tg.SETTINGS_FILE).write_text(json.dumps(dict(preset="no")))
    refuse([resume], "--preset", "no", "tiny")


# ------ Attention -----------------------------------------------------------------------------------------------------
class FakeCudaComm:
    """A communicator of rank 0 that claims to be on CUDA, and records what is printed.

    other_answers: for each other rank, what it gathers where rank 0 gathers the key; by default the same.
    """
    on_cuda = True
    device = torch.device("cpu")
    rank = 0

    def __init__(self, other_answers: tuple[dict, ...] = ()) -> None:
        self.printed: list[str] = []
        self.print0 = self.printed.append
        self.other_answers = other_answers
        self.world_size = 1 + len(other_answers)

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

def faithful(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, layer_kind: str) -> Tensor:
    """A kernel that is as accurate as bf16 allows: it computes in f32 and rounds the result."""
    return tg.attention_reference(q.float(), k.float(), v.float(), cu_seqlens, layer_kind).to(q.dtype)

def with_args(window: int = 0, scale: float = 1.0, bounds: Any = slice(None)) -> Kernel:
    """Build the faithful kernel with these changes of the arguments."""
    def kernel(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, layer_kind: str) -> Tensor:
        args = tg.ATTENTION_ARGS[layer_kind]
        tg.ATTENTION_ARGS["changed"] = args._replace(window=args.window + window, scale=args.scale * scale)
        return faithful(q, k, v, cu_seqlens[bounds], "changed")
    return kernel

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

def no_causal_mask(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    qkv = [x.transpose(0, 1)[None] for x in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*qkv, scale=0.1)[0].transpose(0, 1)

def nan_if_a_document_has(num_positions: int) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, layer_kind: str) -> Tensor:
        fails = num_positions in cu_seqlens.diff().tolist()
        return (torch.nan if fails else 1.0) * faithful(q, k, v, cu_seqlens, layer_kind)
    return kernel

def make_raiser(error: Exception) -> Kernel:
    def kernel(*_: object) -> Tensor:
        raise error
    return kernel

ONE_KEY_MORE = with_args(window=1)
INACCURATE = "relative error"
BAD_KERNELS = {                          # case -> (kernel, words in the message)
    "refuses": (make_raiser(RuntimeError("no kernel image\nfor this device")), "no kernel image"),
    "is missing": (make_raiser(ImportError("no module")), "no module"),
    "fails without a message": (make_raiser(NotImplementedError()), "NotImplementedError"),
    "fails backward": (no_backward, "no backward here"),
    "gives NaN": (scaled(by=float("nan")), INACCURATE),
    "is 10 % off": (scaled(), INACCURATE),
    "sees one key more": (ONE_KEY_MORE, INACCURATE),
    "sees one key less": (with_args(window=-1), INACCURATE),
    "sees other documents": (with_args(bounds=[0, -1]), INACCURATE),
    "fails in an empty document": (nan_if_a_document_has(0), INACCURATE),
    "fails in a document of one token": (nan_if_a_document_has(1), INACCURATE),
    "has another scale": (with_args(scale=2.0), INACCURATE),
    "sees the future": (no_causal_mask, INACCURATE),
    **{f"gradient of {name}": (scaled(at), INACCURATE) for at, name in enumerate("qkv")},
}

@pytest.mark.parametrize("name", BAD_KERNELS)
def test_choose_attention__refuses_a_kernel_that_fails_or_is_wrong(monkeypatch, name) -> None:
    kernel, message = BAD_KERNELS[name]
    FakeKernels(monkeypatch, varlen=kernel)
    fake_comm = FakeCudaComm()
    with expect_error(tg.ConfigError, "no attention kernel", "--attention=reference", "requirements-gpu.txt"):
        tg.choose_attention(preset(**WIDE), fake_comm)
    *others, line = fake_comm.printed
    assert [text.partition(":")[2][:12] for text in others] == [" FA3 does no", " FA4 does no"]
    assert "varlen does not work" in line and message in line

ALL = dict(FA4=faithful, FA3=faithful, varlen=faithful)
CHOICES = [                              # kernels, capability, --attention, chosen kernel, words in each printed line
    (ALL, 9, "auto", "FA3", []),
    (ALL, 10, "auto", "FA4", []),
    (dict(FA4=faithful, FA3=ONE_KEY_MORE, varlen=faithful), 9, "auto", "FA4", [INACCURATE]),
    (dict(FA4=ONE_KEY_MORE, FA3=ONE_KEY_MORE, varlen=faithful), 9, "auto", "varlen", [INACCURATE, INACCURATE]),
    (dict(varlen=faithful), 10, "auto", "varlen", ["FA4 does not work"]),
    (dict(varlen=faithful), 8, "auto", "varlen", []), (ALL, 9, "FA4", "FA4", []),
    (ALL, 9, "reference", "reference", []),
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
    with expect_error(tg.ConfigError, "no attention kernel"):
        tg.choose_attention(preset(**WIDE), fake_comm)
    assert sum("no kernel image" in line for line in fake_comm.printed) == 3, fake_comm.printed

def test_choose_attention__a_requested_kernel_that_does_not_work(monkeypatch) -> None:
    """No other kernel is tried."""
    FakeKernels(monkeypatch, varlen=faithful)
    fake_comm = FakeCudaComm()
    with expect_error(tg.ConfigError, "FA3", "--attention=reference", "requirements-gpu.txt"):
        tg.choose_attention(preset(attention="FA3", **WIDE), fake_comm)
    line, = fake_comm.printed
    assert "No module of FA3" in line

@pytest.mark.parametrize("capability, expected", [((8, 0), "plain"), ((8, 9), "fp8")])
def test_resolve_head_precision__depends_on_the_device(monkeypatch, capability, expected) -> None:
    """fp8 on a GPU of capability 8.9, plain on one of 8.0 and on a CPU. Other values than auto do not change."""
    cpu = tg.Communicator(torch.device("cpu"))
    cuda = tg.Communicator(torch.device("cuda", 0))
    cfg = preset("record")
    monkeypatch.setattr(torch.cuda, "get_device_capability", {cuda.device: capability}.get)
    assert (tg.resolve_head_precision(cfg, cpu), tg.resolve_head_precision(cfg, cuda)) == ("plain", expected)
    assert tg.resolve_head_precision(replace(cfg, head="emulated"), cpu) == "emulated"
    for unfit in (replace(cfg, head="fp8", dtype="float32"), replace(cfg, head="fp8", padded_vocab=50_257)):
        with expect_error(tg.ConfigError, "--head=fp8", "8.9", "--head=emulated"):
            tg.resolve_head_precision(unfit, cuda)


# ------ Memory --------------------------------------------------------------------------------------------------------
MEMORY_PROGRAM = """
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
print(min(page_faults), *tg.peak_memory(tg.Communicator(torch.device("cpu"))).values())
"""

@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="without glibc's malloc")
def test_init_distributed__reuses_freed_memory_and_peak_memory_is_that_of_this_process() -> None:
    """The kernel hands the ru_maxrss of a process to the programs that it starts, but not VmHWM."""
    ballast = torch.ones(1 << 28)        # 1 GiB
    out = subprocess.run([sys.executable, "-c", MEMORY_PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True,
                         timeout=PROCESS_TIMEOUT_S).stdout
    page_faults, peak = map(int, out.split())
    assert page_faults < 2 * (4 << 20) // resource.getpagesize(), "a tenth of the pages of 20 tensors"
    assert 50 < peak < ballast.nbytes >> 20, "importing torch takes over 50 MiB"
