"""Helpers of several test files: small configs, data shards, batches, random weights, forked runs, simulated faults."""
import contextlib
import dataclasses
import errno
import gc
import importlib.util
import inspect
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import train_gpt as tg

PROCESS_TIMEOUT_S = 300                  # seconds for a process that runs main() on a busy machine
ROOT = Path(__file__).resolve().parent.parent
F32 = torch.float32
F64 = torch.float64
BF16 = torch.bfloat16
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                  reason="no triton package: kernels cannot be compiled")
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler: torch.compile needs one on a CPU")
needs_scaled_mm = pytest.mark.skipif(not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU"),
                                     reason=f"torch {torch.__version__}: no _scaled_mm on a CPU")
def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    """Draw normal values from a seed. The dtype affects only the rounding of the values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)

def run_interpreted(program: str) -> None:
    """Run Python lines in a new process, because Triton uses its interpreter for all kernels of a process or for none.
    """
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    env = os.environ | dict(PYTHONPATH=paths, TRITON_INTERPRET="1")
    command = [sys.executable, "-W", "ignore", "-c", program]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr

def compile_for_gpu(capability: int, kernel: Callable, arg_types: dict[str, str], constants: dict[str, Any],
                    attrs: dict[tuple[int, ...], list] = {}, **options: int) -> Any:
    """Compile a kernel without a GPU or a cache; it must not spill. attrs: divisibility of arguments, by index.

    Arguments that are not named, which a fork may have, get their defaults.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    defaults = {name: arg.default for name, arg in inspect.signature(kernel).parameters.items()
                if arg.default is not arg.empty}
    constants = defaults | constants
    signature = arg_types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(tg.triton_jit(kernel), signature, constants, attrs)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", folder)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"\b(?:STACK|LOCAL):(\d+)", text)) == {"0"}, text
    return compiled

def noop(*_: object) -> None:
    """Replaces what a test does not need, such as the warm-up, which leaves no trace in the state."""

def global_rows_of(batch: tg.Batch, label: str) -> Tensor:
    """Return the global rows of a table that a batch looks up."""
    lookup_rows = batch.lookup_rows[label].long()
    if label not in batch.plans:             # of `random_batch`: the index is the global row
        return lookup_rows
    plan = batch.plans[label]
    lookup_rows, world_size = plan.rows_to_fetch[lookup_rows], len(plan.fetch_counts)
    shard_rows = plan.table.shard_rows(world_size)
    return lookup_rows % shard_rows * world_size + lookup_rows // shard_rows

def make_comm(rank: int = 0, world_size: int = 1) -> tg.Communicator:
    """Build a communicator without a process group, for code that does not communicate."""
    return tg.Communicator(torch.device("cpu"), rank, world_size)

def preset(name: str = "tiny", vocab_size: int = 512, bos_id: int = 511, **changes: Any) -> tg.Config:
    """Build a checked config of a preset, for shards with this vocabulary."""
    cfg = tg.Config(preset=name, **tg.PRESETS[name] | changes)
    tg.check_config(cfg)
    header = [tg.ShardHeader("shard", 1, vocab_size, bos_id)]
    return tg.resolve_sizes(cfg, header, header)

def untied_at(stage: int | None, stages: tuple[tg.Stage, ...] = tg.TINY["stages"]) -> tuple[tg.Stage, ...]:
    """Return stages that untie at the one of this index, or never."""
    return tuple(dataclasses.replace(spec, untie=i == stage) for i, spec in enumerate(stages))

def small(**changes: Any) -> tg.Config:
    """Build a small float64 config: 4 heads of 8 features, 64 tokens, sequences of at least 16 tokens."""
    defaults = dict(num_heads=4, head_dim=8, model_dim=32, dtype="float64", window_block=3, max_doc_len=12)
    return preset(vocab_size=60, bos_id=59, **defaults | changes)

def exact_array(x: Tensor) -> np.ndarray:
    """Convert without rounding: NumPy has no bf16, and f32 represents every bf16 value exactly."""
    widened = x.float() if x.dtype == BF16 else x
    return widened.detach().clone().numpy()

@contextlib.contextmanager
def few_layers() -> Iterator[None]:
    """Shrink the model to three layers: 8 attention matrices, 6 MLP matrices, 2 value embeddings."""
    layers = (tg.Layer("paired", value_embed=0, save_as=tg.SKIP), tg.Layer("none", add_saved=tg.SKIP),
              tg.Layer("plain", "long", value_embed=1, key_offset=True, save_as=tg.BACKOUT))
    counts = dict(residual=3, attention=6, bigram_embed=3, smear=1, backout=1, skip=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "LAYERS", layers)
        patch.setattr(tg, "ATTENTION_LAYERS", (0, 2))
        patch.setattr(tg, "NUM_VALUE_EMBEDS", 2)
        patch.setattr(tg, "SCALARS", {name: tg.SCALARS[name][:count] for name, count in counts.items()})
        yield

def write_shard(path: Path, tokens: Sequence[int] | np.ndarray, vocab_size: int = 0, bos_id: int = 0,
                magic: int = 20240520, version: int = 1, count: int | None = None) -> Path:
    """Write a data shard. Readers take a vocabulary size and BOS id of 0 as GPT-2's."""
    header = np.zeros(256, "<i4")
    header[:5] = magic, version, len(tokens) if count is None else count, vocab_size, bos_id
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())
    return path

def random_stream(seed: int, count: int, vocab_size: int, bos_id: int, mean: int = 6) -> np.ndarray:
    """Draw tokens in random documents, the first of which starts at 0; some documents are a single token."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab_size, count)
    tokens[tokens == bos_id] = (bos_id + 1) % vocab_size
    tokens[(rng.random(count) < 1 / mean) | (np.arange(count) == 0)] = bos_id
    return tokens

def random_batch(cfg: tg.Config, seed: int, num_seqs: int, seq_len: int) -> tg.Batch:
    """Draw a batch of one rank: random tokens in documents of at most max_doc_len tokens, and random bigram rows.

    It has no plans, so its lookup_rows has global rows.
    """
    rng = np.random.default_rng(seed)
    seq_bounds = []
    for _ in range(num_seqs):
        ends = [0]
        while ends[-1] < seq_len:
            doc_len = int(rng.integers(1, cfg.max_doc_len + 1))
            ends.append(min(seq_len, ends[-1] + doc_len))
        seq_bounds.append(ends)
    num_bounds = max(map(len, seq_bounds))
    tokens = torch.from_numpy(rng.integers(0, cfg.vocab_size, (num_seqs, seq_len + 1)))
    bigrams = torch.from_numpy(rng.integers(0, cfg.bigram_rows, (num_seqs, seq_len)))
    padded = torch.tensor([ends + [seq_len] * (num_bounds - len(ends)) for ends in seq_bounds])
    batch = tg.Batch({}, tokens[:, :-1].int(), tokens[:, 1:].contiguous(), padded.int(),
                     dict(bigram_embed=bigrams.int()))
    return with_tokens(cfg, batch, batch.tokens)

def with_tokens(cfg: tg.Config, batch: tg.Batch, tokens: Tensor) -> tg.Batch:
    """Replace the tokens of a batch, and the rows that follow from them; keep the bigram rows and the plans."""
    first_rows = cfg.padded_vocab * torch.arange(tg.NUM_VALUE_EMBEDS, dtype=tokens.dtype)[:, None]
    value_rows = tokens[:, None] + first_rows
    return batch._replace(tokens=tokens, lookup_rows=batch.lookup_rows | dict(value_embed=value_rows, embed=tokens))

def plan_of(table: tg.TableSpec, comm: tg.Communicator, ids_by_step: Sequence[np.ndarray], tied: bool = False,
            fetch_all: bool = False) -> tuple[tg.RowPlan, list[np.ndarray]]:
    """Plan these global rows of each step, (b, n) or (b, lookups, n); also return the index of each lookup in its rows.

    With one rank, the plan also lists the rows that its update changes.
    """
    plan, lookup_rows = tg.plan_rows(table, comm, ids_by_step, tied, fetch_all)
    if comm.world_size == 1:
        tg.exchange_row_requests(comm, None, {table.label: plan})
    return plan, lookup_rows

def planned(cfg: tg.Config, batch: tg.Batch, tied: bool = True) -> tg.Batch:
    plans, lookup_rows = {}, {}
    for table in tg.table_specs(cfg):
        ids = batch.lookup_rows[table.label].numpy()
        plans[table.label], (indices,) = plan_of(table, make_comm(), [ids], tied and table.label == "embed")
        lookup_rows[table.label] = torch.from_numpy(indices)
    return batch._replace(plans=plans, lookup_rows=lookup_rows)

@contextlib.contextmanager
def started_loader(cfg: tg.Config, comm: tg.Communicator,
                   steps: int) -> Iterator[tuple[tg.Loader, list[tg.StepConfig]]]:
    """Start a loader that is ready for `next` of the first of these steps; yield it, and the step configs."""
    schedule = tg.Schedule(cfg)
    step_cfgs = [schedule.at(step) for step in range(steps)]
    cycles = [step_cfgs[first:first + schedule.steps_per_cycle] for first in range(0, steps, schedule.steps_per_cycle)]
    with contextlib.closing(tg.Loader(cfg, comm, tg.read_shard_headers(cfg.train_files), cycles)) as loader:
        loader.start()
        yield loader, step_cfgs

def owned_rows(x: Tensor, comm: tg.Communicator) -> Tensor:
    """Return the shard of a table that a rank owns: every W-th row, padded with zeros to the largest shard."""
    rows = x[comm.rank::comm.world_size]
    shard = torch.zeros(-(-len(x) // comm.world_size), *x.shape[1:], dtype=x.dtype)
    shard[:len(rows)] = rows
    return shard

@torch.no_grad()
def fill_randomly(model: tg.GPT, seed: int = 0, comm: tg.Communicator | None = None) -> dict[str, Tensor]:
    """Draw the same weights on every rank, which give all terms an effect; return the full parameters, in f64."""
    generator = torch.Generator().manual_seed(seed)
    full = {}
    for spec in model.specs.values():
        noise = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
        std_by_label = dict(attn=0.3, mlp=0.15, scalars=0.3, bigram_embed=0.3, value_embed=0.5, lm_head=0.5)
        full[spec.label] = noise * std_by_label.get(spec.label, 0.7) + (0.6 if spec.label == "scalars" else 0.0)
        local = owned_rows(full[spec.label], comm) if spec.table and comm else full[spec.label]
        model.get_parameter(spec.label).copy_(local)
    return full

def angles_by_channel(angles: Tensor) -> Tensor:
    """Expand rotary angles (..., E/4) -> (..., E): pairs have the angle and its negative, half of the channels 0."""
    rotated = torch.stack((angles, -angles), dim=-1).flatten(-2)
    return torch.nn.functional.pad(rotated, (0, rotated.shape[-1]))

def own_rows(model: tg.GPT) -> dict[str, tuple[Tensor, Tensor]]:
    """Build row buffers that read the model's tables: label -> (rows, their gradients, initially zeros)."""
    tables = {label: model.get_parameter(label) for label, spec in model.specs.items() if spec.table}
    return {label: (p, torch.zeros_like(p, dtype=tg.accum_dtype(p.dtype))) for label, p in tables.items()}

def grad_of(optimizer: tg.Optimizer, label: str) -> Tensor | None:
    """Return the gradient of a parameter on this rank, in its logical shape, or None if there is none."""
    group = optimizer.groups.get(label)
    if not isinstance(group, tg.Table):
        weight = optimizer.model.get_parameter(label)
        if isinstance(group, tg.ShardedGroup):
            return weight.main_grad if weight.write_counts.all() else None
        return weight.grad
    plan = group.grads_plan
    if plan is None:
        return None
    world_size, (C, D) = group.comm.world_size, group.shard.shape
    by_owner = group.row_grads.new_zeros(world_size * C, D)
    by_owner[plan.rows_to_fetch] = group.row_grads[:len(plan.rows_to_fetch)]
    return torch.cat([by_owner[local_row::C] for local_row in range(C)])[:group.specs[0].table.num_rows]

@torch.no_grad()
def set_grad(optimizer: tg.Optimizer, label: str, grad: Tensor) -> None:
    """Set the gradient of a parameter other than a table, as one backward pass leaves it."""
    weight = optimizer.model.get_parameter(label)
    if not isinstance(optimizer.groups.get(label), tg.ShardedGroup):
        weight.grad = grad.to(weight.dtype, copy=True)
        return
    weight.main_grad.copy_(grad)
    weight.write_counts.fill_(1)

@torch.no_grad()
def add_grad(optimizer: tg.Optimizer, label: str, grad: Tensor, tied: bool = True) -> None:
    """Add to the gradient of a parameter as a backward pass does, on a single rank; for a table, to every row."""
    group = optimizer.groups.get(label)
    if not isinstance(group, tg.Table):
        so_far = grad_of(optimizer, label)
        set_grad(optimizer, label, grad if so_far is None else so_far + grad)
        return
    plan = group.grads_plan
    if plan is None:
        rows = np.arange(len(group.shard), dtype=np.int32)
        plan, _ = plan_of(group.specs[0].table, group.comm, [rows], tied and label == "embed")
    _, row_grads = group.rows_for_forward(plan)
    row_grads[:len(grad)] += grad.to(row_grads.dtype)

def tensors_of(engine: tg.Engine) -> dict[str, Tensor]:
    """Return every tensor that a run may change, but for rotary tables, independently of `Engine.tensors`."""
    tensors = dict(engine.model.named_parameters())
    for label, state in engine.optimizer.state.items():
        tensors |= {f"{label}.{name}": x for name, x in state.items()}
    for label, table in engine.tables.items():
        tensors[f"{label}.row_grads"] = table.row_grads
    return tensors | rows_of_ngrams(engine)

def rows_of_ngrams(engine: tg.Engine) -> dict[str, Tensor]:
    """Return this rank's rows of n-gram tables, and their state."""
    return {f"{label}.{name}": x for label, table in engine.tables.items() if isinstance(table, tg.RowwiseTable)
            for name, x in table.state._asdict().items()}

def make_engine(cfg: tg.Config, world_size: int = 1, rank: int = 0, head_precision: str = "plain") -> tg.Engine:
    return tg.Engine(cfg, make_comm(rank, world_size), tg.attention_reference, head_precision)

def make_optimizer(cfg: tg.Config, rank: int = 0, world_size: int = 1) -> tg.Optimizer:
    """Build the optimizer of an engine with random weights, whose embedding equals the head."""
    engine = make_engine(cfg, world_size, rank)
    full = fill_randomly(engine.model, comm=engine.comm)
    with torch.no_grad():
        engine.model.embed.copy_(owned_rows(full["lm_head"].t(), engine.comm))
    return engine.optimizer

@contextlib.contextmanager
def expect_error(error_type: type[tg.TrainerError], *texts: str) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error of exactly this type whose message is one line with these texts."""
    with pytest.raises(error_type) as caught:
        yield caught
    assert type(caught.value) is error_type
    message = str(caught.value)
    assert "\n" not in message, message
    assert not [phrase for phrase in texts if phrase not in message], f"expected {texts}: {message}"

def preset_of(name: str) -> tg.Config:
    """Return the settings of a preset, before the sizes are known."""
    return tg.Config(preset=name, **tg.PRESETS[name])

def refuse(argv: list[str], *texts: str) -> str:
    """Check that these flags raise a ConfigError that contains these texts; return the message."""
    with expect_error(tg.ConfigError, *texts) as caught:
        tg.load_config(argv)
    return str(caught.value)

@dataclass
class Run:
    folder: Path
    status: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]

    @property
    def lines(self) -> list[str]:
        return (self.folder / "log.txt").read_text().splitlines()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

def losses(folder: Path) -> list[tuple]:
    """Return every loss of a run, to the last bit, with its step."""
    events = Run(folder, 0, "", "").events
    return [(e["type"], e["step"], e.get("train_loss"), e.get("val_loss"))
            for e in events if e["type"] in ("step", "val")]

def unequal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the labels whose tensors are not bitwise equal to the expected ones."""
    return [label for label, x in found.items() if not x.equal(expected[label])]

def weights(folder: Path) -> dict[str, bytes]:
    tensors = load_file(folder / "weights.safetensors")
    return {label: x.view(torch.uint8).numpy().tobytes() for label, x in tensors.items()}

def make_log(tmp_path: Path, **changes: Any) -> tuple[tg.Log, Run]:
    """Build the log of a run with preset `tiny`; its cycles have two steps by default."""
    schedule = tg.Schedule(preset(**dict(adam_every=2) | changes))
    log = tg.Log(tmp_path / "run", make_comm(), schedule, {"train_gpt.py": b"source"}, dict(torch="2"))
    return log, Run(tmp_path / "run", 0, "", "")

class Forked:
    """A forked process that calls `before`, then main(argv) or `call`. The patches of the test apply in it too."""
    def __init__(self, argv: Sequence[str], env: Mapping[str, str] = {},
                 before: Callable[[], object] | None = None,
                 call: Callable[[Sequence[str]], int | None] = tg.main) -> None:
        self.files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        self.status: int | None = None
        gc.freeze()                                           # the child's garbage collector ignores what exists
        self.pid = os.fork()
        if self.pid > 0:
            gc.unfreeze()
            return
        status = 1
        try:
            for fd, file in enumerate(self.files, 1):
                os.dup2(file.fileno(), fd)
            sys.stdout, sys.stderr = (open(fd, "w", 1, closefd=False) for fd in (1, 2))
            os.environ |= env
            torch.set_num_threads(1)                          # a fork lacks the threads of its parent's pool
            torch._dynamo.utils.counters.clear()              # drop counts of graphs from other tests
            if before is not None:
                before()
            status = call(argv) or 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)

    def poll(self) -> int | None:
        """Return the exit status (-N if signal N killed the process), or None while it runs."""
        if self.status is None:
            pid, ended = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(ended)
        return self.status

    def send(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def wait(self, timeout_s: float = PROCESS_TIMEOUT_S) -> int:
        """Wait for the process, and kill it after timeout_s; return the exit status, -9 if it was killed."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
            time.sleep(0.005)
        return self.status

    def texts(self) -> tuple[str, str]:
        for file in self.files:
            file.seek(0)
        return tuple(file.read() for file in self.files)

def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PROCESS_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "this takes too long"
        time.sleep(0.02)

def processes_with(variable: str) -> list[int]:
    """Return the ids of the running processes that were started with this environment variable, "NAME=value"."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):                    # it has ended, or is another user's
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found

def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as trial:
        return trial.getsockname()[1]

def environment_of(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment variables that a launcher sets for a rank."""
    return dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

def launch(folder: Path, world_size: int, *flags: str) -> list[Run]:
    """Run main() on a number of ranks, with preset `tiny` if no other is given; return the run as each rank saw it."""
    argv = ["--device=cpu", f"--run_dir={folder}"]
    if not any(flag.startswith(("--preset=", "--resume=")) for flag in flags):
        argv.append("--preset=tiny")
    argv += flags                                             # the last of repeated flags counts
    port = free_port()
    ranks = [Forked(argv, environment_of(rank, world_size, port)) for rank in range(world_size)]
    return [Run(folder, rank.wait(), *rank.texts()) for rank in ranks]

def run(folder: Path, *flags: str) -> Run:
    result, = launch(folder, 1, *flags)
    return result

@contextlib.contextmanager
def no_large_files(limit: int) -> Iterator[None]:
    """Limit the size of files, so that writing beyond `limit` bytes fails as on a full disk."""
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, previous[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)

class SimulatedTime:
    """Replaces the trainer's `time` module: perf_counter advances by `work`, and by `tick` seconds per call."""
    def __init__(self, monkeypatch: pytest.MonkeyPatch, tick: float = 0.0) -> None:
        self.now = 100.0
        self.tick = tick
        monkeypatch.setattr(tg, "time", SimpleNamespace(**vars(time) | dict(perf_counter=self.perf_counter)))

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now

    def work(self, seconds: float, *_: object) -> None:
        self.now += seconds

def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
