"""Section 13: whole runs through main(), from flags to the last line, and refused inputs."""
import base64
import functools
import gzip
import hashlib
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, IO

import numpy as np
import pytest
import torch
from common import (PROCESS_TIMEOUT_S, ROOT, Forked, Run, environment_of, launch, losses, noop, preset, random_stream,
                    run, write_shard)
from safetensors.torch import load_file

import train_gpt as tg

NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|nan|inf"
# Patterns of log lines in parsers of the public records.
VAL_LINE = re.compile(rf"^step:(?P<step>\d+)/(?P<total>\d+) val_loss:(?P<val>{NUMBER})(?P<mid>(?: [a-z_]+:\S+)*)"
                      rf" train_time:(?P<time>{NUMBER})(?P<unit>ms|s) step_avg:(?P<avg>{NUMBER})ms"
                      r"(?P<rest>(?: [a-z_]+:\S+)*)\s*$")
STEP_LINE = re.compile(rf"^step:(?P<step>\d+)/(?P<total>\d+)(?: train_loss:(?P<loss>{NUMBER}))?"
                       rf" train_time:(?P<time>{NUMBER})(?P<unit>ms|s) step_avg:(?P<avg>{NUMBER})ms\s*$")
PEAK_LINE = re.compile(r"^peak memory (?:allocated|consumption): (?P<alloc>\d+) MiB"
                       r"(?: reserved: (?P<res>\d+) MiB)?\s*$")
VERSION_LINE = re.compile(r"^Running PyTorch (?P<torch>\S+) compiled for CUDA (?P<cuda>\S+)"
                          r"(?: on (?P<gpu>.*?)\s+with world_size (?P<ws>\d+))?\s*$")
KEYS = {
    "header": "config started seed world_size grad_accum_steps source_sha256 "
              "data_sha256 python torch triton cuda nccl hardware attention preset changed head target_loss "
              "params_total untimed_warmup_steps",
    "phase": "name ms timed",
    "step": "step train_time_ms tokens normuon_lr adam_lr train_loss train_loss_next",
    "val": "step val_loss train_time_ms",
    "compiled": "graphs",
    "result": "val_loss train_time_ms steps tokens peak_memory_mib run_dir comms",
}


# ---- a run that works -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory) -> Run:
    """Run preset `tiny` with seed 3 and a save; shared by the tests that only read its output."""
    folder = tmp_path_factory.mktemp("first")
    return run(folder / "new" / "run", "--seed=3", f"--save={folder / 'save'}")

def test_train__events_have_the_documented_keys_and_order(tiny_run) -> None:
    """Steps and tokens agree with the schedule, and the loss decreases."""
    assert tiny_run.status == 0
    assert all(set(event) == {"type", *KEYS[event["type"]].split()} for event in tiny_run.events)
    kinds = [event["type"] for event in tiny_run.events if event["type"] not in ("step", "val", "phase")]
    assert kinds == ["header", "result"] and tiny_run.events[-1]["type"] == "result"
    schedule = tg.Schedule(preset())
    step_cfgs = [schedule.at(step) for step in range(12)]
    phases = [(e["name"], e["timed"]) for e in tiny_run.of("phase") if "warm-up of stage" not in e["name"]]
    assert phases == [("validation data", False), ("warm-up of validation", False),
                      ("warm-up", False), ("reset", False), ("first batch", True), ("evaluation", False)]
    assert [e["step"] for e in tiny_run.of("step")] == list(range(1, 13))
    assert [e["step"] for e in tiny_run.of("val")] == [
        step_cfg.step for step_cfg in step_cfgs if step_cfg.validate] + [12]
    assert tiny_run.of("step")[-1]["tokens"] == sum(8 * step_cfg.seq_len for step_cfg in step_cfgs)
    times = [e["train_time_ms"] for e in tiny_run.events if e["type"] in ("step", "val")]
    assert times == sorted(times)
    first_loss, *_, last_loss = (e["val_loss"] for e in tiny_run.of("val"))
    assert first_loss == pytest.approx(np.log(512), abs=0.05)
    assert last_loss < first_loss - 0.1, "the first tokens of documents are learned"

def test_write_header__source_settings_and_sizes(tiny_run) -> None:
    header = tiny_run.of("header")[0]
    source = (ROOT / "train_gpt.py").read_bytes()
    assert (tiny_run.folder / "train_gpt.py").read_bytes() == source
    assert header["source_sha256"] == hashlib.sha256(source).hexdigest()
    assert header["config"].keys() == vars(preset()).keys() and header["config"]["bigram_rows"] == 5 * 512
    save = tiny_run.folder.parent.parent / "save"
    assert header["changed"] == dict(seed="3", device="cpu", save=str(save)), "run_dir does not count as changed"
    assert (header["preset"], header["seed"], header["world_size"], header["grad_accum_steps"]) == ("tiny", 3, 1, 1)
    assert (header["attention"], header["head"]) == ("reference", "plain")
    assert header["hardware"]
    assert header["params_total"] == sum(x.numel() for x in load_file(save / "weights.safetensors").values())
    assert header["untimed_warmup_steps"] == 2, "a cycle"

def test_Log__existing_parsers_read_log_txt(tiny_run) -> None:
    """Every line matches a pattern of these parsers, and its numbers agree with log.jsonl."""
    first_lines = tiny_run.lines[:5]
    assert {first_lines[0], first_lines[4]} == {"=" * 100}
    versions = VERSION_LINE.match(first_lines[1])
    assert versions["torch"] == torch.__version__ and versions["ws"] == "1" and versions["gpu"]
    validations = [VAL_LINE.match(line) for line in tiny_run.lines if "val_loss:" in line]
    steps = [STEP_LINE.match(line) for line in tiny_run.lines if line.startswith("step:") and "val_loss:" not in line]
    assert [int(m["step"]) for m in steps] == list(range(1, 13)) and steps[0]["total"] == "12"
    for m, event in zip(validations, tiny_run.of("val"), strict=True):
        assert (int(m["step"]), m["unit"]) == (event["step"], "ms")
        assert float(m["val"]) == pytest.approx(event["val_loss"], abs=6e-5)  # 4 decimals
    for m in validations + steps:
        assert float(m["avg"]) == pytest.approx(float(m["time"]) / max(1, int(m["step"])), abs=0.51)  # whole ms
    assert sum(bool(PEAK_LINE.match(line)) for line in tiny_run.lines) == 1
    assert all(f"\n{line}" in f"\n{tiny_run.out}" for line in tiny_run.lines), "12 steps: the console shows all of them"

def test_main__the_last_line_on_stdout_is_the_result(tiny_run) -> None:
    result, = tiny_run.of("result")
    assert json.loads(tiny_run.out.splitlines()[-1]) == dict(
        {name: result[name] for name in ("type", "val_loss", "train_time_ms")}, run_dirs=[str(tiny_run.folder)])
    assert result["val_loss"] == tiny_run.of("val")[-1]["val_loss"] and result["steps"] == 12
    assert all(50 < mib < 1_000_000 for mib in result["peak_memory_mib"].values()), "importing torch takes over 50 MiB"
    assert re.fullmatch(r"( \d+)+", tiny_run.out.split(" sample ")[1].splitlines()[1]), "no vocabulary: token ids"

def test_train__several_runs_each_equal_a_fresh_one(tiny_run, tmp_path) -> None:
    done = run(tmp_path, "--runs=2", "--seed=2", "--sample_tokens=0")
    folders = [tmp_path / f"seed_{seed}" for seed in (2, 3)]
    logs = [Run(folder, 0, "", "") for folder in folders]
    assert losses(folders[1]) == losses(tiny_run.folder) != losses(folders[0]), "equal to the last bit"
    for seed, log in enumerate(logs, 2):
        assert (log.of("header")[0]["seed"], log.of("header")[0]["changed"]["seed"]) == (seed, str(seed))
        phases = [e["name"] for e in log.of("phase") if not e["name"].startswith("warm-up of")]
        untimed = ["validation data", "warm-up"] if seed == 2 else []
        assert phases == [*untimed, "reset", "first batch", "evaluation"]
        assert log.events[-1]["type"] == "result" and (log.folder / "train_gpt.py").exists()
    summary = json.loads(done.out.splitlines()[-1])
    results = [log.of("result")[0] for log in logs]
    for name in ("val_loss", "train_time_ms"):
        assert summary[name] == pytest.approx(np.mean([result[name] for result in results])), "the mean"
    assert summary["type"] == "result" and summary["run_dirs"] == list(map(str, folders))

def test_run_seed__recompilations_during_the_training_loop_are_in_the_result(tmp_path, monkeypatch) -> None:
    """Here only the validation loss is compiled. The training loop has smaller chunks than the warm-up."""
    train_loop = tg.train_loop

    def compile_losses(fn: Callable, *_: object, **_options: object) -> Callable:
        return torch.compile(fn, backend="eager", dynamic=False) if fn is tg.next_token_losses else fn

    def train_loop_with_small_chunks(*args: Any) -> tuple[float, Any]:
        tg.EVAL_CHUNK["cpu"] = 128
        return train_loop(*args)

    monkeypatch.setattr(tg, "compile_fn", compile_losses)
    monkeypatch.setattr(tg, "train_loop", train_loop_with_small_chunks)
    done = run(tmp_path / "run", "--compile=1", "--max_steps=2", "--sample_tokens=0")
    assert done.status == 0 and done.of("compiled") == [dict(type="compiled", graphs=1)]
    assert done.of("result")[0]["recompiles"] == 1

@pytest.mark.slow
def test_profile_steps__two_ranks(tmp_path) -> None:
    """Each rank writes a trace of 3 steps; the result says that the time does not count."""
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                    str(ROOT / "tests/profile_steps.py"), "6:9", "--preset=tiny", "--sample_tokens=0",
                    f"--run_dir={tmp_path}/run"], check=True, timeout=PROCESS_TIMEOUT_S, cwd=ROOT)
    assert Run(tmp_path / "run", 0, "", "").of("result")[0]["void"] == "profiled"
    for rank in (0, 1):
        trace = json.loads(gzip.open(tmp_path / f"run/trace_rank{rank}.json.gz").read())
        names = {event.get("name", "") for event in trace["traceEvents"]}
        assert len([name for name in names if name.startswith("ProfilerStep")]) == 3


# ---- forks and notebooks ---------------------------------------------------------------------------------------------
SIX_LAYERS = 'LAYERS = tuple(Layer("plain", "long" if i in (0, 5) else "short") for i in range(6))\nATTENTION_LAYERS'
EDITS = {                                # a pattern in the source, its replacement, parameters that are gone
    "no skip": (r", add_saved=\w+", "", {"skip_gate"}),
    "no value embeddings": (r", value_embed=\d+", "", {"value_embed", "ve_gate_bank"}),
    "six layers": (r"(?s)LAYERS = \(\n.*?ATTENTION_LAYERS", SIX_LAYERS, {"skip_gate", "value_embed", "ve_gate_bank"}),
}

@pytest.mark.parametrize("name", EDITS)
def test_train__edited_layers(tiny_run, tmp_path, name) -> None:
    """A trainer with other LAYERS trains and saves. What no layer uses does not exist, not even as a scalar."""
    pattern, new, gone = EDITS[name]
    path = tmp_path / "train_gpt.py"
    path.write_text(re.sub(pattern, new, (ROOT / "train_gpt.py").read_text()))

    def main(argv: list[str]) -> int:
        spec = importlib.util.spec_from_file_location("edited", path)
        sys.modules["edited"] = edited = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(edited)
        edited.warm_up = noop
        return edited.main(argv)

    process = Forked(["--preset=tiny", "--device=cpu", "--max_steps=5", "--sample_tokens=2",
                      f"--run_dir={tmp_path}/run", f"--save={tmp_path}/save"], call=main)
    assert process.wait() == 0, process.texts()
    folders = tiny_run.folder.parents[1], tmp_path
    before, after = (load_file(folder / "save/weights.safetensors") for folder in folders)
    assert before.keys() - after.keys() == gone and not after.keys() - before.keys()
    header, = Run(tmp_path / "run", 0, "", "").of("header")
    assert header["params_total"] == sum(x.numel() for x in after.values())

def test_train__in_a_notebook(tmp_path) -> None:
    """Importing the file and calling `train` is enough, and works again. Pasting the file only defines names."""
    def train(_: object) -> int:
        results = []
        for name in "ab":
            flags = dict(preset="tiny", device="cpu", max_steps=2, sample_tokens=0, run_dir=f"{tmp_path}/{name}")
            results.append(tg.train(tg.make_config(flags)))
        a, b = results
        assert a["val_loss"] == b["val_loss"] and a["type"] == "result" and a["run_dirs"] == [f"{tmp_path}/a"]
        return 0

    def paste(_: object) -> int:
        sys.argv = ["notebook", "--sede=1"]
        pasted = {"__name__": "__main__"}
        exec((ROOT / "train_gpt.py").read_text(), pasted)
        return 0 if pasted["GPT"] is not tg.GPT else 1

    process = Forked([], call=train)
    assert process.wait() == 0, process.texts()
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    pasting = Forked([], call=paste)
    assert (pasting.wait(), *pasting.texts()) == (0, "", "")


# ---- text, and the console ------------------------------------------------------------------------------------------
def test_main__a_console_of_any_encoding_shows_a_sample(tmp_path, monkeypatch) -> None:
    """Letters that the console cannot encode are escaped. The last line is JSON with the exact run directory.

    With text, log.jsonl has the validation loss in bits per byte too. Token 20 is BOS.
    """
    monkeypatch.setattr(tg, "warm_up", noop)
    stream = random_stream(0, 9000, 21, 20)
    write_shard(tmp_path / "train_0.bin", stream[:7000], 21, 20)
    write_shard(tmp_path / "val_0.bin", stream[7000:], 21, 20)
    lines = [b"%s %d\n" % (base64.b64encode(("aéﬁ🙂"[k % 4] * (1 + k // 4)).encode()), k) for k in range(20)]
    (tmp_path / "vocab.txt").write_bytes(b"".join(lines))
    run_dir = tmp_path / "läuft ﬁ"
    process = Forked(["--preset=tiny", "--device=cpu", f"--run_dir={run_dir}", f"--train_files={tmp_path}/train_*.bin",
                      f"--val_files={tmp_path}/val_*.bin", "--max_steps=2"],
                     before=lambda: sys.stdout.reconfigure(encoding="ascii"))
    done = Run(run_dir, process.wait(), *process.texts())
    assert (done.status, done.err) == (0, "")
    assert re.fullmatch(r"(a|\\[xuU]\w+)+", done.out.split(" sample ")[1].splitlines()[1])
    assert str(run_dir).encode("ascii", "backslashreplace").decode() in done.out
    assert json.loads(done.out.splitlines()[-1])["run_dirs"] == [str(run_dir)]
    for event in (*done.of("val"), *done.of("result")):
        assert set(event) == {"type", *KEYS[event["type"]].split(), "val_bpb", "unigram_nats"}

def test_main__logs_the_source_that_runs(tmp_path, monkeypatch) -> None:
    """The script may be edited while it runs. Without --run_dir, the run directory is a new one in logs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tg, "warm_up", noop)
    process = Forked(["--preset=tiny", "--device=cpu", "--max_steps=1", "--val_every=0", "--sample_tokens=0"],
                     call=functools.partial(tg.main, source=b"# the source"))
    assert process.wait() == 0, process.texts()
    run_dir, = Path("logs").iterdir()
    assert json.loads(process.texts()[0].splitlines()[-1])["run_dirs"] == [str(run_dir)]
    header, = Run(run_dir, 0, "", "").of("header")
    assert (run_dir / "train_gpt.py").read_bytes() == b"# the source"
    assert header["source_sha256"] == hashlib.sha256(b"# the source").hexdigest()

def test_train__all_ranks_write_into_the_run_directory_of_rank_0(tmp_path, monkeypatch) -> None:
    """The default name is a time, and the clocks of ranks may differ. A checkpoint still has the files of all ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tg, "warm_up", noop)
    monkeypatch.setattr(tg.time, "strftime", functools.partial(os.environ.get, "RANK"))
    done = launch(tmp_path, 2, "--run_dir=", "--checkpoint_every=2", "--max_steps=4", "--val_every=0",
                  "--sample_tokens=0")
    assert [rank.status for rank in done] == [0, 0], done[0].err
    assert {path.name for path in tmp_path.glob("logs/0-*/checkpoints/step-0000002/*")} == {"rank0.pt", "rank1.pt"}


# ---- inputs that are refused ----------------------------------------------------------------------------------------
BOS_ID = 511
FILES = ("--preset=tiny", "--train_files=train_0.bin", "--val_files=val_0.bin")

@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("inputs")
    (path / "old_run").mkdir()
    tokens_ok = tg.synthetic_tokens(0, 40_000, 512, BOS_ID)
    one_document = np.concatenate([[BOS_ID], tokens_ok[1:] % BOS_ID])
    for name, tokens in dict(train_0=tokens_ok, val_0=tokens_ok[20_000:24_000], no_start=tokens_ok % BOS_ID,
                             one_document=one_document).items():
        write_shard(path / f"{name}.bin", tokens, 512, BOS_ID)
    (path / "a_file").write_text("text")
    (path / "old_run/log.txt").write_text("an old log\n")
    return path

@pytest.fixture
def run_main(inputs, tmp_path, monkeypatch) -> Callable[..., Run]:
    """Return a function that runs main() and checks the exit status and the only message, one line with all texts."""
    def run_flags(flags: list[str], status: int, *texts: str) -> Run:
        process = Forked([f"--run_dir={tmp_path}/run", "--device=cpu", *flags])
        done = Run(tmp_path / "run", process.wait(), *process.texts())
        assert done.status == status, done.err
        if status:
            message, *progress = done.err.splitlines()
            assert all(line.startswith("after step") for line in progress), done.err
            assert not [text for text in texts if text not in message], message
        return done
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(tg, "warm_up", noop)
    return run_flags

BAD = [                                  # flags after FILES, status, what the message must contain
    (["--device=cuda"], 2, "--device=cuda", "no CUDA device", "--preset=pocket"),
    (["--resume=old_run"], 2, "old_run/settings.json", "directory of a run"),
    (["--val_files=no_start.bin"], 2, "no_start.bin", "BOS"),
    (["--train_files=one_document.bin"], 2, "one_document.bin ended before step 0", "has beyond 24 tokens",
     "--epochs=0"),
    (["--run_dir=a_file"], 1, "File exists", "a_file"), (["--run_dir=/proc/run"], 1, "/proc/run"),
    (["--run_dir=old_run"], 1, "File exists", "old_run/log.txt"),
    (["--save=old_run"], 2, "--save=old_run exists"),
]

@pytest.mark.parametrize("flags, status, texts", [(flags, status, texts) for flags, status, *texts in BAD],
                         ids=[" ".join(flags)[:60] for flags, *_ in BAD])
def test_main__refuses_a_bad_input(run_main, inputs, flags, status, texts) -> None:
    run_main(["--max_steps=4", "--sample_tokens=4", *FILES, *flags], status, *texts)
    assert (inputs / "old_run/log.txt").read_text() == "an old log\n"

@pytest.mark.parametrize("env, texts", [
    (dict(WORLD_SIZE="3"), ("3 ranks", "--seqs_per_step=8", "--nproc_per_node=2")),
    (dict(WORLD_SIZE="16"), ("16 ranks", "--nproc_per_node=8")),
    (dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"), ("meeting the other ranks",))], ids=str)
def test_init_distributed__refuses_a_bad_launch(run_main, monkeypatch, env, texts) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert not run_main(["--preset=tiny", "--comm_timeout=1"], 1 if "MASTER_PORT" in env else 2, *texts).folder.exists()

def test_main__under_torchrun_a_wrong_flag_is_printed_by_rank_0() -> None:
    """torchrun ends all ranks after the first one that ends, so the others wait until rank 0 has printed."""
    env = dict(TORCHELASTIC_RUN_ID="none")
    ranks = [Forked(["--sede=1"], environment_of(rank, 2, 1) | env,
                    before=functools.partial(setattr, tg.time, "sleep", lambda _: print("waits"))) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [2, 2]
    (out, err), others = (rank.texts() for rank in ranks)
    assert out == "" and re.match("rank 0: ConfigError: .*--sede=1", err) and others == ("waits\n", "")


# ---- runs that fail on the way --------------------------------------------------------------------------------------
@pytest.mark.parametrize("cause", ["truncated documents", "truncated shard"])
def test_train_loop__out_of_data_saves_the_trained_weights(run_main, tmp_path, monkeypatch, cause) -> None:
    """max_doc_len drops so much that the data end early, or another program truncates a shard during the run."""
    flags = ["--preset=tiny", "--sample_tokens=0", f"--save={tmp_path}/saved"]
    if cause == "truncated documents":
        done = run_main([*flags, "--train_files=formula:512:511:5000:1"], 2, "ended before step", "24 tokens",
                        "--max_steps", "--epochs=0")
        steps = int(re.search(r"--max_steps=(\d+)", done.err)[1])
    else:
        for name in "ab":
            write_shard(tmp_path / f"{name}.bin", random_stream(0, 3000, 512, BOS_ID), 512, BOS_ID)

        def truncate(*_: object) -> None:
            os.truncate(tmp_path / "b.bin", 2000)

        monkeypatch.setattr(tg, "warm_up", truncate)
        done = run_main([*flags, f"--train_files={tmp_path}/[ab].bin"], 2, "b.bin has 488 tokens", "3,000")
        steps = len(done.of("step"))
    result = done.events[-1]
    whole_cycles = steps - steps % tg.Schedule(preset()).steps_per_cycle
    assert 0 < result["steps"] == whole_cycles == done.of("val")[-1]["step"], "the error is raised where a cycle begins"
    assert result["void"] == "the data ended early or changed" and result["val_loss"] == done.of("val")[-1]["val_loss"]
    assert (tmp_path / "saved/weights.safetensors").exists(), "the trained weights are saved"

class FullDisk(io.FileIO):
    """A file on a disk that is full after num_lines lines."""
    def __init__(self, path: Path, num_lines: int) -> None:
        super().__init__(path, "xb")
        self.lines_left = num_lines

    def write(self, data: memoryview) -> int:
        self.lines_left -= bytes(data).count(b"\n")
        if self.lines_left < 0:
            raise OSError(28, "No space left on device")
        return super().write(data)

@pytest.mark.parametrize("name, num_lines", [("log.txt", 9), ("log.jsonl", 7), ("log.jsonl", 0)])
def test_Log__a_full_disk_ends_the_run_with_one_message(run_main, monkeypatch, name, num_lines) -> None:
    """The file has the lines that were complete before. If only log.txt is on a full disk, log.jsonl has `aborted`."""
    def open_on_full_disk(path: Any, *args: Any, **kwargs: Any) -> IO:
        if getattr(path, "name", "") == name:
            return io.TextIOWrapper(io.BufferedWriter(FullDisk(path, num_lines)), "utf-8", line_buffering=True)
        return open(path, *args, **kwargs)

    monkeypatch.setattr(tg, "open", open_on_full_disk, raising=False)
    done = run_main([*FILES, "--max_steps=4"], 1, "No space left")
    written = (done.folder / name).read_text().split("\n")[:num_lines]
    assert len(written) == num_lines and "aborted" not in "".join(written), "complete lines are written before"
    if name == "log.txt":
        assert done.events[-1]["type"] == "aborted"

LAST_CHECKPOINT = "after step 7 of 12; last checkpoint: step-0000006; to continue: ./run.sh --resume="
NO_CHECKPOINT = "after step 7 of 12, without a checkpoint to continue from: --checkpoint_every=100 writes one"

@pytest.mark.parametrize("number, cause, flags, progress", [
    (signal.SIGINT, "ended by SIGINT", ["--checkpoint_every=2"], LAST_CHECKPOINT),
    (signal.SIGTERM, "ended by SIGTERM", ["--checkpoint_every=2"], LAST_CHECKPOINT),
    (signal.SIGHUP, "ended by SIGHUP", [], NO_CHECKPOINT)])
def test_main__a_signal_names_the_step_and_how_to_continue(tmp_path, monkeypatch, number, cause, flags,
                                                           progress) -> None:
    """The printed directory is absolute, because run.sh may be called from another one.

    A resumed run without a checkpoint of its own names the earlier run.
    """
    monkeypatch.setattr(tg, "warm_up", noop)
    train_step, last_step = tg.train_step, 7

    def step_then_signal(engine: Any, loader: Any, step_cfg: tg.StepConfig) -> tg.StepLoss:
        if step_cfg.step == last_step:
            signal.raise_signal(number)
            time.sleep(100)
        return train_step(engine, loader, step_cfg)

    monkeypatch.setattr(tg, "train_step", step_then_signal)
    done = run(tmp_path / "my run", *flags)
    assert done.status == 128 + number
    first, second = done.err.splitlines()
    assert first == cause == done.of("aborted")[0]["cause"] and second.startswith(progress)
    assert done.lines[-1] == f"aborted after step 7: {cause}"
    if flags and number == signal.SIGTERM:
        directory, = shlex.split(second.partition("--resume=")[2])
        assert Path(directory) == tmp_path / "my run"
        last_step = 6
        resumed = run(tmp_path / "resumed", f"--resume={tmp_path / 'my run'}")
        assert resumed.err.splitlines()[1] == second.replace("after step 7", "after step 6")
