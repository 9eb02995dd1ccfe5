"""Section 13: whole runs through main(), from flags to the last line, and the message of every failure."""
import base64
import functools
import gzip
import hashlib
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, IO
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from common import (PROCESS_TIMEOUT_S, ROOT, Forked, Run, check_error, expect_error, launch, losses, make_comm,
                    make_engine, noop, preset, random_stream, run, write_shard)

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
    "header": "config started seed world_size grad_accum_steps git_commit source_sha256 "
              "data_sha256 python torch triton cuda nccl hardware attention preset changed head target_loss "
              "params_total params_per_token table_rows table_bytes untimed_warmup_steps",
    "phase": "name ms timed",
    "step": "step train_time_ms tokens train_loss train_loss_next",
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
    """Each event has exactly the keys of KEYS. Steps and tokens agree with the schedule, and the loss decreases."""
    assert tiny_run.status == 0
    assert all(set(event) == {"type", *KEYS[event["type"]].split()} for event in tiny_run.events)
    kinds = [event["type"] for event in tiny_run.events if event["type"] not in ("step", "val", "phase")]
    assert kinds == ["header", "result"] and tiny_run.events[-1]["type"] == "result"
    schedule = tg.Schedule(preset())
    step_cfgs = [schedule.at(step) for step in range(12)]
    phases = [(e["name"], e["timed"]) for e in tiny_run.of("phase") if "warm-up of stage" not in e["name"]]
    assert phases == [("set-up", False), ("validation data", False), ("warm-up of validation", False),
                      ("warm-up", False), ("first batch", True), ("evaluation", False)]
    assert [e["step"] for e in tiny_run.of("step")] == list(range(1, 13))
    assert [e["step"] for e in tiny_run.of("val")] == [
        step_cfg.step for step_cfg in step_cfgs if step_cfg.validate] + [12]
    assert tiny_run.of("step")[-1]["tokens"] == sum(8 * step_cfg.seq_len for step_cfg in step_cfgs)
    times = [e["train_time_ms"] for e in tiny_run.events if e["type"] in ("step", "val")]
    assert times == sorted(times)
    first_loss, *_, last_loss = (e["val_loss"] for e in tiny_run.of("val"))
    assert first_loss == pytest.approx(np.log(512), abs=0.05)
    assert last_loss < first_loss - 0.1, "the first tokens of documents are learned"

@pytest.mark.parametrize("other_seconds, warned", [(0.0, False), (1e6, True)])
def test_train__warns_of_a_busy_machine_in_the_first_lines(tmp_path, monkeypatch, other_seconds, warned) -> None:
    """The warning appears only if other processes have used CPU time."""
    monkeypatch.setattr(tg, "warm_up", noop)
    monkeypatch.setattr(tg, "other_cpu_seconds", Mock(side_effect=[0.0, other_seconds]))
    done = run(tmp_path, "--max_steps=1", "--val_every=0", "--sample_tokens=0")
    assert any("warning: other processes use" in line for line in done.lines[:8]) == warned

def test_train__warns_of_slow_attention_in_the_first_lines_and_in_the_result(tmp_path, monkeypatch) -> None:
    """Line 8 of the log has the warning."""
    monkeypatch.setattr(tg, "warm_up", noop)
    monkeypatch.setattr(tg, "slow_attention_warning", "{0} is slow".format)
    done = run(tmp_path, "--max_steps=1", "--val_every=0", "--sample_tokens=0")
    assert done.lines[7] == done.of("result")[0]["slow_attention"] == "reference is slow"

def test_other_cpu_seconds__counts_another_process() -> None:
    """A process that runs for 0.5 s of CPU time and has ended is counted."""
    before = tg.other_cpu_seconds(make_comm())
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", burn], check=True, timeout=60)
    assert tg.other_cpu_seconds(make_comm()) - before > 0.4, "the CPU time of the other process must not be subtracted"

def test_finish_run__one_rank_sends_no_bytes_for_any_table(tiny_run) -> None:
    nothing_moved = dict(bytes_sent=0, bytes_received=0, bytes_dense=0)
    assert tiny_run.of("result")[0]["comms"] == dict.fromkeys(("bigram_embed", "value_embed", "embed"), nothing_moved)

def test_write_header__source_settings_and_sizes(tiny_run) -> None:
    """The header identifies the source, contains config and changed settings, and counts parameters and table bytes."""
    header = tiny_run.of("header")[0]
    source = (ROOT / "train_gpt.py").read_bytes()
    assert (tiny_run.folder / "train_gpt.py").read_bytes() == source
    assert header["source_sha256"] == hashlib.sha256(source).hexdigest()
    assert header["config"].keys() == vars(preset()).keys() and header["config"]["bigram_rows"] == 5 * 512
    save = tiny_run.folder.parent.parent / "save"
    assert header["changed"] == dict(seed="3", device="cpu", save=str(save)), "run_dir does not count as changed"
    assert (header["preset"], header["seed"], header["world_size"], header["grad_accum_steps"]) == ("tiny", 3, 1, 1)
    assert (header["attention"], header["head"]) == ("reference", "plain")
    assert re.fullmatch("[0-9a-f]{40}|None", str(header["git_commit"])) and header["hardware"]
    table_rows = dict(bigram_embed=2560, value_embed=512 * tg.NUM_VALUE_EMBEDS, embed=512)
    num_params = sum(x.numel() for x in torch.load(save / "weights.pt").values())
    assert header["table_rows"] == table_rows and header["table_bytes"] == 4 * 32 * sum(table_rows.values())
    num_read = num_params - 32 * (sum(table_rows.values()) - 1 - tg.NUM_VALUE_EMBEDS - 1)
    assert (header["params_total"], header["params_per_token"]) == (num_params, num_read)
    assert header["untimed_warmup_steps"] == len(tg.Schedule(preset()).warm_up_steps())

def test_Log__existing_parsers_read_log_txt(tiny_run) -> None:
    """Every line matches a pattern of these parsers, and its numbers agree with log.jsonl."""
    first_lines = tiny_run.lines[:6]
    assert {first_lines[0], first_lines[5]} == {"=" * 100} and first_lines[1].startswith("Running Python ")
    versions = VERSION_LINE.match(first_lines[2])
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

def test_report_results__the_last_line_on_stdout_is_the_result(tiny_run) -> None:
    """It is JSON and agrees with log.jsonl. The sample precedes it."""
    result, = tiny_run.of("result")
    assert json.loads(tiny_run.out.splitlines()[-1]) == dict(
        type="result", val_loss=result["val_loss"], train_time_ms=result["train_time_ms"],
        run_dirs=[str(tiny_run.folder)])
    assert result["val_loss"] == tiny_run.of("val")[-1]["val_loss"] and result["steps"] == 12
    assert all(50 < mib < 1_000_000 for mib in result["peak_memory_mib"].values()), "importing torch takes over 50 MiB"
    assert "token ids" in tiny_run.out.split(" sample ")[1]

def test_train__several_runs_each_equal_a_fresh_one(tiny_run, tmp_path) -> None:
    """With --runs, a run after a reset has the losses of a separate run, bit by bit. The last line has the means."""
    done = run(tmp_path, "--runs=3", "--seed=1", "--sample_tokens=0", "--target_loss=6.1")
    folders = [tmp_path / f"seed_{seed}" for seed in (1, 2, 3)]
    logs = [Run(folder, 0, "", "") for folder in folders]
    assert losses(folders[2]) == losses(tiny_run.folder) != losses(folders[0]), "equal to the last bit"
    for seed, log in enumerate(logs, 1):
        assert (log.of("header")[0]["seed"], log.of("header")[0]["changed"]["seed"]) == (seed, str(seed))
        phases = [e["name"] for e in log.of("phase") if not e["name"].startswith("warm-up of")]
        untimed = ["set-up", "validation data", "warm-up"] if seed == 1 else ["reset"]
        assert phases == [*untimed, "first batch", "evaluation"]
        assert log.events[-1]["type"] == "result" and (log.folder / "train_gpt.py").exists()
    summary = json.loads(done.out.splitlines()[-1])
    results = [log.of("result")[0] for log in logs]
    for name in ("val_loss", "train_time_ms"):
        assert summary[name] == pytest.approx(np.mean([result[name] for result in results])), "the mean"
    assert summary["type"] == "result" and summary["run_dirs"] == list(map(str, folders))
    shutil.rmtree(folders[0])
    refused = run(tmp_path, "--runs=2", "--seed=1")
    assert refused.status == 1 and "already contains a log" in refused.err, "all directories are checked before any run"
    assert not folders[0].exists()

@pytest.mark.parametrize("flags, rtol", [
    (["--dtype=bfloat16"], 0.05),                                    # mantissas of 8 bits, 11 layers
    (["--head=emulated"], 0.05),                                     # mantissas of 4 bits in y and w
    (["--micro_batch_size=3", "--debug_rows=1", "--row_comms=dense"], 1e-5)])
def test_train__other_precisions_have_similar_losses(tiny_run, tmp_path, monkeypatch, flags, rtol) -> None:
    """The losses agree with those of preset `tiny` within a tolerance.

    --max_steps ends the runs early, but the log lines show the total steps of the schedule.
    """
    monkeypatch.setattr(tg, "warm_up", noop)
    other = run(tmp_path / "run", "--seed=3", "--max_steps=5", "--sample_tokens=0", *flags)
    assert other.status == 0, other.err
    for (*event, train_loss, val_loss), (*expected_event, loss, val) in zip(
            losses(other.folder), losses(tiny_run.folder)):
        assert event == expected_event and (train_loss or val_loss) == pytest.approx(loss or val, rel=rtol, abs=0)
    assert [e["step"] for e in other.of("val")] == [0, 5] and other.of("result")[0]["steps"] == 5
    assert "step:5/12 " in other.lines[-3] and " sample -" not in other.out

def test_Log__training_losses_are_means_over_all_ranks(tmp_path, monkeypatch) -> None:
    """Every number of ranks logs the same losses, to rounding.

    If a stage predicts one token, its multi-token loss is the next-token loss.
    """
    monkeypatch.setattr(tg, "warm_up", noop)
    steps_by_world_size = []
    for world_size in (1, 2):
        done = launch(tmp_path / str(world_size), world_size,
                      "--dtype=float64", "--sample_tokens=0", "--val_every=0")[0]
        assert done.status == 0, done.err
        steps_by_world_size.append(done.of("step"))
    schedule = tg.Schedule(preset())
    for one, two in zip(*steps_by_world_size, strict=True):
        for name in ("train_loss", "train_loss_next"):
            assert one[name] == pytest.approx(two[name], rel=1e-9)
        num_weights = len(schedule.at(one["step"] - 1).mtp_weights)
        assert (one["train_loss"] == pytest.approx(one["train_loss_next"], rel=1e-12)) == (num_weights == 1)

@pytest.mark.parametrize("eval_chunk, recompiles", [(tg.EVAL_CHUNK, None), (256, 1)])
def test_finish_run__recompilations_during_the_training_loop_are_in_the_result(tmp_path, monkeypatch, eval_chunk,
                                                                                    recompiles) -> None:
    """A recompilation does not end the run. Here only the validation loss is compiled.

    The warm-up evaluates in one chunk. If the training loop uses smaller chunks, it recompiles once.
    """
    train_loop = tg.train_loop

    def compile_losses(fn: Callable, *_: object, **_options: object) -> Callable:
        return torch.compile(fn, backend="eager", dynamic=False) if fn is tg.next_token_losses else fn

    def train_loop_with_eval_chunk(*args: Any) -> tuple[float, Any]:
        tg.EVAL_CHUNK = eval_chunk
        return train_loop(*args)

    monkeypatch.setattr(tg, "compile_fn", compile_losses)
    monkeypatch.setattr(tg, "train_loop", train_loop_with_eval_chunk)
    done = run(tmp_path / "run", "--compile=1", "--max_steps=2", "--sample_tokens=0")
    assert done.status == 0 and done.of("compiled") == [dict(type="compiled", graphs=1)]
    assert done.of("result")[0].get("recompiles") == recompiles

def test_make_profiler__message_of_a_run_without_a_known_end() -> None:
    """With a time budget, the message gives no last step."""
    cfg = tg.make_config(dict(preset="pocket", profile="5:7", time_budget=1.0))
    with expect_error(tg.ConfigError, "a run of steps 5 <= step", "5 < a < b:", "--profile=6:8") as caught:
        tg.make_profiler(cfg, 5, math.inf)
    assert "inf" not in str(caught.value)

@pytest.mark.slow
def test_make_profiler__two_ranks(tmp_path) -> None:
    """Each rank writes a trace of 3 steps. The log has a table of times, and marks the training time as not valid."""
    log = launch(tmp_path / "run", 2, "--profile=6:9", "--sample_tokens=0")[0]
    assert log.of("result")[0]["void"] == "profiled"
    assert "warning: the training time is not valid: profiled" in log.lines
    assert any("Self CPU time total" in line for line in log.lines), "the table"
    for rank in (0, 1):
        trace = json.loads(gzip.open(tmp_path / f"run/trace_rank{rank}.json.gz").read())
        names = {event.get("name", "") for event in trace["traceEvents"]}
        assert len([name for name in names if name.startswith("ProfilerStep")]) == 3
        assert {"gloo:all_reduce", "aten::mm"} <= names


# ---- text, and the console ------------------------------------------------------------------------------------------
@pytest.fixture
def text(tmp_path) -> list[str]:
    """Return the flags of a short run on text.

    Token 20 is BOS. The other tokens consist of letters that few encodings have.
    """
    stream = random_stream(0, 9000, 21, 20)
    write_shard(tmp_path / "train_0.bin", stream[:7000], 21, 20)
    write_shard(tmp_path / "val_0.bin", stream[7000:], 21, 20)
    lines = [b"%s %d\n" % (base64.b64encode(("aéﬁ🙂"[k % 4] * (1 + k // 4)).encode()), k) for k in range(20)]
    (tmp_path / "vocab.txt").write_bytes(b"".join(lines))
    return [f"--train_files={tmp_path}/train_*.bin", f"--val_files={tmp_path}/val_*.bin", "--max_steps=2"]

def with_console(monkeypatch: pytest.MonkeyPatch, run_dir: Path, text: list[str],
                 before: Callable[[], object]) -> Run:
    """Run on text in a process whose console `before` has changed; check that the log ends with the result."""
    monkeypatch.setattr(tg, "warm_up", noop)
    process = Forked(["--preset=tiny", "--device=cpu", f"--run_dir={run_dir}", *text], before=before)
    done = Run(run_dir, process.wait(), *process.texts())
    assert done.events[-1]["type"] == "result" and len(done.lines) > 10
    return done

def test_main__a_console_of_any_encoding_shows_a_sample(text, tmp_path, monkeypatch) -> None:
    """Letters that the console cannot encode are escaped. The last line is JSON with the exact run directory.

    With text, the log has the validation loss in bits per byte too.
    """
    run_dir = tmp_path / "läuft ﬁ"
    done = with_console(monkeypatch, run_dir, text, lambda: sys.stdout.reconfigure(encoding="ascii"))
    assert (done.status, done.err) == (0, "")
    assert re.fullmatch(r"(a|\\[xuU]\w+)+", done.out.split(" sample ")[1].splitlines()[1])
    assert str(run_dir).encode("ascii", "backslashreplace").decode() in done.out
    assert json.loads(done.out.splitlines()[-1])["run_dirs"] == [str(run_dir)]
    for event in (*done.of("val"), *done.of("result")):
        assert set(event) == {"type", *KEYS[event["type"]].split(), "val_bpb", "unigram_nats"}
    assert any(f"{event['val_bpb']:.4f} bits per byte" in line for line in done.lines)

@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_print_stdout__raises_on_a_full_console(text, tmp_path, monkeypatch) -> None:
    """Training continues, but the exit status is 1, because the result could not be printed."""
    def before() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    done = with_console(monkeypatch, tmp_path / "run", text, before)
    assert done.status == 1 and done.err.startswith("RunError: standard output") and "Traceback" not in done.err
    check_error(done.err.partition(": ")[2].strip("\n"), "No space left on device", "redirect it")

HOOK = r"""
import builtins
import os
import stat
import_module, open_file = builtins.__import__, builtins.open

def importing(name, *args):
    if name == "numpy" and not hasattr(builtins, "edited"):
        builtins.edited = True
        open_file(os.environ["EDITED"], "a").write("# edited\n")
    return import_module(name, *args)

def opening(path, *args, **kwargs):
    file = open_file(path, *args, **kwargs)
    if str(path).endswith("log.jsonl"):
        kinds = [stat.S_IFMT(os.fstat(number).st_mode) for number in range(3)]
        open_file(os.environ["KINDS"], "w").write(repr([kind in (stat.S_IFSOCK, stat.S_IFREG) for kind in kinds]))
    return file

builtins.__import__, builtins.open = importing, opening
"""

@pytest.mark.parametrize("streams, status", [
    (">&-", 0), ("2>&-", 0), ("<&- >&- 2>&-", 0), ("2>/dev/full", 0), (">/dev/full 2>/dev/full", 1)])
def test_main__streams_are_closed_or_full_and_the_script_is_edited_while_it_starts(tmp_path, streams, status) -> None:
    """The log is complete, and the source in it is the text that runs, not the edited one.

    No file or socket gets the file descriptor of a closed standard stream.
    """
    script = Path(shutil.copy(ROOT / "train_gpt.py", tmp_path))
    source = script.read_bytes()
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook/sitecustomize.py").write_text(HOOK)
    env = os.environ | dict(EDITED=str(script), KINDS=str(tmp_path / "kinds"), PYTHONPATH=f"{tmp_path}/hook")
    flags = "--preset=tiny --device=cpu --max_steps=1 --val_every=0 --sample_tokens=2 --run_dir=run"
    command = f"exec {sys.executable} train_gpt.py {flags} {streams}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL,
                          capture_output=True, timeout=PROCESS_TIMEOUT_S)
    log = Run(tmp_path / "run", done.returncode, "", "")
    assert done.returncode == status and b"Traceback" not in done.stdout + done.stderr
    assert log.events[-1]["type"] == "result" and log.lines[-1].startswith("peak memory")
    assert script.read_bytes() == source + b"# edited\n" and (tmp_path / "run/train_gpt.py").read_bytes() == source
    assert log.of("header")[0]["source_sha256"] == hashlib.sha256(source).hexdigest()
    assert (tmp_path / "kinds").read_text() == "[False, False, False]"

def test_train__creates_a_run_directory_by_default(tmp_path, monkeypatch) -> None:
    """Without --run_dir it is a new directory in logs."""
    monkeypatch.chdir(tmp_path)
    process = Forked(["--preset=tiny", "--device=cpu", "--max_steps=1", "--val_every=0"])
    assert process.wait() == 0
    run_dir, = (tmp_path / "logs").iterdir()
    result = json.loads(process.texts()[0].splitlines()[-1])
    assert result["run_dirs"] == [f"logs/{run_dir.name}"] and (run_dir / "log.txt").exists()

def test_train__all_ranks_write_into_the_run_directory_of_rank_0(tmp_path, monkeypatch) -> None:
    """The default name is a time, and the clocks of ranks may differ. A checkpoint still has the files of all ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tg, "warm_up", noop)
    monkeypatch.setattr(tg.time, "strftime", functools.partial(os.environ.get, "RANK"))
    done = launch(tmp_path, 2, "--run_dir=", "--tables=trigram_embed 3 1000", "--checkpoint_every=2", "--max_steps=4",
                  "--val_every=0", "--sample_tokens=0")
    assert [rank.status for rank in done] == [0, 0], done[0].err
    names = {path.name.rpartition("-")[0] for path in tmp_path.glob("logs/0-*/checkpoints/step-0000002/rows-*")}
    assert names == {"rows-trigram_embed-0of2", "rows-trigram_embed-1of2"}


# ---- inputs that are refused ----------------------------------------------------------------------------------------
BOS_ID = 511
TOKEN_BYTES = [bytes([i]) if i < 256 else bytes([i - 256, 97]) for i in range(BOS_ID)]
FILES = ("--preset=tiny", "--train_files=train_0.bin", "--val_files=val_0.bin")

@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Write shards with the vocabulary of `tiny`, saved weights, and damaged copies of both."""
    path = tmp_path_factory.mktemp("inputs")
    for name in ("vocabulary", "old_run"):
        (path / name).mkdir()
    tokens_ok = tg.synthetic_tokens(0, 40_000, 512, BOS_ID)
    too_large = tokens_ok.copy()
    too_large[39_990] = 600
    one_document = np.concatenate([[BOS_ID], tokens_ok[1:] % BOS_ID])
    for name, tokens in {"train_0": tokens_ok, "val_0": tokens_ok[:4000], "vocabulary/val_0": tokens_ok[:4000],
                         "beyond": too_large, "no_start": tokens_ok % BOS_ID, "one_document": one_document}.items():
        write_shard(path / f"{name}.bin", tokens, 512, BOS_ID)
    lines = [b"%s %d" % (base64.b64encode(token_text), token) for token, token_text in enumerate(TOKEN_BYTES[:-1])]
    (path / "vocabulary/vocab.txt").write_bytes(b"\n".join(lines))
    (path / "a_file").write_text("text")
    (path / "old_run/log.txt").write_text("an old log\n")
    cfg = preset()
    other_bytes = [*TOKEN_BYTES, b""]
    other_bytes[ord("~")] = b"no tilde"
    for name, token_bytes in (("w", other_bytes), ("w_no_vocab", None)):
        tg.save_weights(path / name, "id", cfg, make_engine(cfg), tg.Schedule(cfg).at(0), token_bytes)
    shutil.copytree(path / "w", path / "w_vocab")
    (path / "w_vocab/vocab.txt").write_text("junk")
    return path

@pytest.fixture
def run_main(inputs, tmp_path, monkeypatch) -> Callable[..., Run]:
    """Return a function that runs main() and checks the exit status and the only message, without a stack trace.

    The message has a hint and contains all texts. No partial file remains.
    """
    def run_flags(flags: list[str], status: int, *texts: str) -> Run:
        process = Forked([f"--run_dir={tmp_path}/run", "--device=cpu", *flags])
        done = Run(tmp_path / "run", process.wait(), *process.texts())
        assert done.status == status and "Traceback" not in done.err, done.err
        if status:
            message = re.search(r"^(RunError|ConfigError|DataError|OutOfData): (.*)", done.err, re.M | re.S)
            assert (message[1] == "RunError") == (status == 1)
            check_error(message[2].strip("\n"), *texts)
        assert not list(inputs.rglob("*.part")), "no partial file remains"
        return done
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(tg, "warm_up", noop)
    monkeypatch.setattr(tg, "STORE_TIMEOUT_S", 0.1)
    return run_flags

BAD = [                                  # flags after FILES, status, what the message must contain
    (["--sede=1"], 2, "unknown flag", "--sede", "--seed"),
    (["--device=cuda"], 2, "--device=cuda", "no CUDA device", "--preset=pocket"),
    (["--head=fp8"], 2, "--head=fp8", "float32", "8.9", "--head=emulated"),
    (["--vocab_size=500"], 2, "--vocab_size", "500", "512", "omit --vocab_size"),
    (["--resume=old_run"], 2, "old_run/settings.json", "no regular file",
     "a run of an older version, use the train_gpt.py"),
    (["--bigram_rows=2000000000"], 1, "memory", "at most", "weights 238", "moments", "a smaller model"),
    (["--train_files=none/*.bin"], 2, "data shard none/*.bin", "no regular file", "data/pocket"),
    (["--train_files=\x1b[2J.bin"], 2, "data shard \\x1b[2J.bin", "no regular file"),
    (["--train_files=formula:512:511:200:1"], 2, "training shards are too small", "200", "larger shards"),
    (["--train_files=formula:1:0:9000:1", "--val_files=formula:1:0:9000:1"], 2, "formula:1:0:9000:1#0: vocabulary",
     "vocabulary size 1", "from 2 to 65,536"),
    (["--val_files=formula:500:499:9000:1"], 2, "different vocabularies", "(500, 499)"),
    (["--train_files=one_document.bin"], 2, "training data ended", "at most 24 of each document", "--epochs=0"),
    (["--val_files=vocabulary/*.bin"], 2, "vocab.txt", "510 tokens", "each of the 512", "511"),
    (["--run_dir=a_file"], 1, "writing a_file", "File exists", "a path that does not exist", "another path"),
    (["--run_dir=/proc/run"], 1, "writing /proc/run", "No such file", "an existing path"),
    (["--run_dir=nul\0"], 1, "writing nul", "null byte"),
    (["--run_dir=old_run"], 1, "run directory old_run", "already contains a log", "another --run_dir"),
    (["--profile=2:4"], 2, "--profile", "0 <= step < 4", "0 < a < b < 4:", "--profile=1:3"),
    (["--sample=nowhere"], 2, "nowhere/settings.json", "no directory of this name", "a directory written by --save"),
    (["--resume=nowhere"], 2, "nowhere/settings.json", "no directory of this name"),
    (["--sample=The baker"], 2, "The baker/settings.json", "--sample=DIR 'a prompt'"),
    (["--sample=w_vocab"], 2, "w_vocab/vocab.txt", "sha256"),
    (["--sample=w", "a ~ b"], 2, "prompt", "b'~'", "use other words"),
    (["--sample=w_no_vocab", "words"], 2, "prompt", "b'w'", "vocab.txt"),
]

@pytest.mark.parametrize("flags, status, texts", [(flags, status, texts) for flags, status, *texts in BAD],
                         ids=[" ".join(flags)[:60] for flags, *_ in BAD])
def test_main__refuses_a_bad_input(run_main, inputs, flags, status, texts) -> None:
    """Each input is refused with its own message, and an earlier log in the run directory is not changed."""
    files = () if flags[0].startswith("--sample=") else FILES
    run_main(["--max_steps=4", "--sample_tokens=4", *files, *flags], status, *texts)
    assert (inputs / "old_run/log.txt").read_text() == "an old log\n"

def test_main__accepts_the_same_inputs_without_the_damage(run_main, tmp_path) -> None:
    """So the cases of BAD fail only because of what is wrong with their inputs."""
    run_main([*FILES, "--max_steps=2", "--sample_tokens=4", f"--save={tmp_path}/saved"], 0)
    assert "token ids" in run_main([f"--sample={tmp_path}/saved", "--sample_tokens=4"], 0).out
    sampled = run_main(["--sample=w", "a few words", "--sample_tokens=4", "--temperature=0.5"], 0).out.splitlines()
    assert [line.strip("-") for line in sampled[:3]] == [" prompt ", "a few words", " sample "]

@pytest.mark.parametrize("prompt", ["naïve ﬁ", pytest.param("é" * 20, marks=pytest.mark.slow)])
def test_main__accepts_a_prompt_in_an_ascii_locale(inputs, prompt) -> None:
    """The prompt is encoded as its UTF-8 bytes, and printed with escapes; the sample is that of a UTF-8 locale."""
    command = [sys.executable, ROOT / "train_gpt.py", "--sample=w", prompt, "--sample_tokens=8", "--device=cpu"]
    samples = []
    for variables in (dict(LC_ALL="C.UTF-8", PYTHONIOENCODING="utf-8"),
                      dict(LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0", PYTHONIOENCODING="ascii")):
        done = subprocess.run(command, cwd=inputs, env=os.environ | variables, capture_output=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, b"")
        samples.append(done.stdout.split(b" sample ")[1].decode().strip("-\n"))
    assert done.stdout.isascii() and samples[1] == samples[0].encode("ascii", "backslashreplace").decode()

@pytest.mark.parametrize("flags, status, texts", [
    (["--train_files=beyond.bin"], 2, ("beyond.bin", "ids up to 600")),
    (["--val_files=no_start.bin"], 2, ("no_start.bin", "BOS tokens: 0")),
    (["--val_tokens=512000"], 2, ("too few validation tokens", "3584", "--val_tokens=3584")),
    (["--preset=pocket", "--seqs_per_step=1", "--max_steps=2", "--val_tokens=2048", "--val_batch_tokens=2048"], 1,
     ("memory", "GiB", "weights", "gradients", "moments", "working", "--seqs_per_step="))])
def test_train__refuses_bad_data_and_too_little_memory_before_building_the_engine(run_main, monkeypatch, flags, status,
                                                                                  texts) -> None:
    """The simulated machine has 60 MB of memory. Engine is None, so building it would raise another error."""
    machine = dict(SC_PAGE_SIZE=4096, SC_PHYS_PAGES=60_000_000 // 4096, SC_CLK_TCK=100)
    monkeypatch.setattr(os, "sysconf", machine.get)
    monkeypatch.setattr(tg, "Engine", None)
    assert not run_main([*FILES, *flags], status, *texts).folder.exists()

LAUNCHER_ENV = dict(RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")  # without the sizes

@pytest.mark.parametrize("env, texts", [
    (LAUNCHER_ENV | dict(WORLD_SIZE="3"), ("world size", "3 ranks", "--seqs_per_step=8", "--nproc_per_node=2")),
    (LAUNCHER_ENV | dict(WORLD_SIZE="16"), ("world size", "16 ranks", "--nproc_per_node=8")),
    (dict(WORLD_SIZE="2"), ("not set: ['RANK', 'MASTER_ADDR', 'MASTER_PORT']", "torchrun", "unset WORLD_SIZE")),
    (dict(RANK="one"), ("one", "RANK", "torchrun")), (dict(WORLD_SIZE="2", RANK="2"), ("0 <= RANK", "2")),
    (dict(SLURM_NTASKS="2"), ("2 Slurm tasks", "srun ... torchrun", "WORLD_SIZE=1")),
    (dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="port"), ("waiting for all", "MASTER_PORT")),
    *((LAUNCHER_ENV | dict(WORLD_SIZE="4", LOCAL_WORLD_SIZE="4", RANK=rank, LOCAL_RANK=rank),
       ("more ranks than GPUs", "GPUs: 2", "nproc_per_node=2")) for rank in "02")], ids=str)
def test_init_distributed__refuses_a_bad_launch(run_main, monkeypatch, env, texts) -> None:
    """If there are more ranks than GPUs, every rank raises, so that rank 0 can print the error."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    flags = ["--preset=tiny"]
    if "LOCAL_RANK" in env:                                          # pretend that the machine has two GPUs
        monkeypatch.setattr(torch.cuda, "is_available", functools.partial(bool, 1))
        monkeypatch.setattr(torch.cuda, "device_count", functools.partial(int, 2))
        flags.append("--device=auto")
    assert not run_main(flags, 2, *texts).folder.exists()

def test_preflight__accepts_the_compiler_in_CC(monkeypatch) -> None:
    """With an empty PATH the compiler is found only through CC."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("CC", "/bin/true")
    monkeypatch.setenv("PATH", "")
    tg.preflight(preset("tiny", compile=1), "run", [], make_comm())

@pytest.mark.parametrize("cxx", [None, "no-such-compiler"])
def test_preflight__refuses_a_missing_compiler_before_reading_data(run_main, tmp_path, monkeypatch, cxx) -> None:
    """If CXX is set, torch uses no other compiler. In the second case gcc exists, but CXX names another one."""
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    if cxx:
        (tmp_path / "gcc").symlink_to("/bin/true")
        monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delattr(tg, "open_data")
    done = run_main([*FILES, "--compile=1"], 2, "--compile", "no C++ compiler", "apt install g++", "--compile=0")
    assert not done.folder.exists()


@pytest.mark.parametrize("compiling", [0, 1])
def test_preflight__refuses_a_compiler_cache_that_cannot_be_written(tmp_path, monkeypatch, compiling) -> None:
    """Eager code needs the cache too, because torch creates it on import."""
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("CXX", "/bin/true")
    for cache, found in (("/proc/x", "No such file"), (f"{tmp_path}/a_file", "Not a directory")):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
        with expect_error(tg.ConfigError, f"TORCHINDUCTOR_CACHE_DIR: writing {cache}", found):
            tg.preflight(preset("tiny", compile=compiling), "run", [], make_comm())

def test_preflight__creates_the_compiler_cache_and_leaves_it_empty(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "/bin/true")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new/cache"))
    for _ in range(2):
        tg.preflight(preset("tiny", compile=1), "run", [], make_comm())
    assert not list((tmp_path / "new/cache").iterdir())

@pytest.mark.parametrize("missing, env", [
    ("no C compiler", dict(PATH="")), ("no C compiler", dict(CC="no-such-compiler")), ("no Python.h", {})])
def test_preflight__refuses_a_GPU_without_a_C_compiler_or_Python_headers(monkeypatch, tmp_path, missing, env) -> None:
    """Triton needs both on a GPU, also with --compile=0; a CPU needs neither. The headers may be in CPATH."""
    cfg = preset("tiny", compile=0)
    gpu = tg.Communicator(torch.device("cuda", 0))
    for name in ("CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "gcc").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "Python.h").touch()
    include_dir = tmp_path if "compiler" in missing else tmp_path / "none"
    monkeypatch.setattr(tg.sysconfig, "get_paths", Mock(return_value=dict(include=str(include_dir))))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with expect_error(tg.ConfigError, "kernels for the GPU", missing, "apt install"):
        tg.preflight(cfg, "run", [], gpu)
    tg.preflight(cfg, "run", [], make_comm())
    for name, value in dict(PATH=tmp_path, CC="/bin/true", CPATH=f"/nowhere:{tmp_path}").items():
        monkeypatch.setenv(name, str(value))
    tg.preflight(cfg, "run", [], gpu)


# ---- runs that fail on the way --------------------------------------------------------------------------------------
@pytest.mark.parametrize("cause", ["time budget", "truncated shard"])
def test_train_loop__out_of_data_saves_the_trained_weights(run_main, tmp_path, monkeypatch, cause) -> None:
    """The data end before the time budget does, or another program truncates a shard during the run."""
    flags = ["--preset=tiny", "--sample_tokens=0", f"--save={tmp_path}/saved"]
    if cause == "time budget":
        flags += ["--train_files=formula:512:511:4200:1", "--time_budget=600"]
        done = run_main(flags, 2, "training data ended", "--max_steps", "--epochs=0")
        steps = int(re.search(r"ends before step (\d+)", done.err)[1])
    else:
        count = tg.count_packed_tokens
        for name in "ab":
            write_shard(tmp_path / f"{name}.bin", random_stream(0, 3000, 512, 511), 512, 511)

        def count_then_truncate(*args: Any) -> tuple[int, int]:
            counts = count(*args)
            os.truncate(tmp_path / "b.bin", 2000)
            return counts

        monkeypatch.setattr(tg, "count_packed_tokens", count_then_truncate)
        done = run_main([*flags, f"--train_files={tmp_path}/[ab].bin"], 2, "b.bin: content", "488 tokens")
        steps = len(done.of("step"))
        assert steps > 0
    result = done.events[-1]
    whole_cycles = steps - steps % tg.Schedule(preset()).cycle_steps
    assert result["steps"] == whole_cycles == done.of("val")[-1]["step"], "the error is raised at the start of a cycle"
    assert result["void"] == "the data ended early or changed" and result["val_loss"] == done.of("val")[-1]["val_loss"]
    assert (tmp_path / "saved/weights.pt").exists(), "the trained weights are saved"

class FullDisk(io.FileIO):
    """A file on a disk that is full after num_lines lines: half of the next write is still stored."""
    def __init__(self, path: Path, num_lines: int) -> None:
        super().__init__(path, "xb")
        self.lines_left = num_lines

    def write(self, data: bytes) -> int:
        self.lines_left -= data.count(b"\n")
        if self.lines_left < 0:
            super().write(data[:len(data) // 2])
            raise OSError(28, "No space left on device")
        return super().write(data)

@pytest.mark.parametrize("name, num_lines", [("log.txt", 9), ("log.jsonl", 7), ("log.jsonl", 0)])
def test_Log__a_full_disk_ends_the_run_with_one_message(run_main, monkeypatch, name, num_lines) -> None:
    """The file has the lines that were complete before. If only log.txt is on a full disk, log.jsonl has `aborted`."""
    def open_on_full_disk(path: Any, *args: Any, **kwargs: Any) -> IO:
        if getattr(path, "name", "") == name:
            return FullDisk(path, num_lines)
        return open(path, *args, **kwargs)

    monkeypatch.setattr(tg, "open", open_on_full_disk, raising=False)
    done = run_main([*FILES, "--max_steps=4"], 1, "writing", name, "No space left", "expected: free disk space")
    written = (done.folder / name).read_text().split("\n")[:num_lines]
    assert len(written) == num_lines and "aborted" not in "".join(written), "complete lines are written before"
    if name == "log.txt":
        assert done.events[-1]["type"] == "aborted"

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("flags, progress", [
    (["--checkpoint_every=2"], "after step 7 of 12; last checkpoint: step-0000006; to continue: ./run.sh --resume="),
    ([], "after step 7 of 12, without a checkpoint to continue from; --checkpoint_every=100 writes one"),
    (["--checkpoint_every=11"], "after step 7 of 12, without a checkpoint to continue from; --checkpoint_every=11 "
                                "writes one every 11 steps")])
def test_end__a_signal_names_the_step_and_how_to_continue(tmp_path, monkeypatch, number, flags, progress) -> None:
    """The printed directory is relative to that of run.sh. The log has the cause and the step, but no command.

    A resumed run without a checkpoint of its own names the earlier run. After the result, the message has no command,
    because the run is complete.
    """
    monkeypatch.setattr(tg, "warm_up", noop)
    train_step, last_step = tg.train_step, 7

    def step_then_signal(engine: Any, loader: Any, step_cfg: tg.StepConfig) -> tg.StepLoss:
        if step_cfg.step == last_step:
            signal.raise_signal(number)
            time.sleep(100)
        return train_step(engine, loader, step_cfg)

    def sample_then_signal(*_: Any) -> str:
        signal.raise_signal(number)
        time.sleep(100)

    cause = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated by SIGTERM"}[number]
    with monkeypatch.context() as patch:
        patch.setattr(tg, "train_step", step_then_signal)
        done = run(tmp_path / "my run", *flags)
        assert done.status == 128 + number
        first, second = done.err.splitlines()
        assert first == cause == done.of("aborted")[0]["cause"] and second.startswith(progress)
        if "--resume=" in progress:
            directory, = shlex.split(second.partition("--resume=")[2])
            assert (ROOT / directory).resolve() == tmp_path / "my run"
            last_step = 6
            resumed = run(tmp_path / "resumed", f"--resume={tmp_path / 'my run'}")
            assert resumed.err.splitlines()[1] == second.replace("after step 7", "after step 6")
    monkeypatch.setattr(tg, "generate", sample_then_signal)
    assert run(tmp_path / "whole", "--max_steps=1").err.splitlines() == [cause]

def test_describe_progress__escapes_control_characters(tmp_path) -> None:
    """The name of a run directory may come from somebody else, and a terminal would execute its control characters."""
    run_dir = tmp_path / "a\x1b[2J"
    (run_dir / tg.CHECKPOINT_DIR / "step-0000002").mkdir(parents=True)
    log = SimpleNamespace(run_dir=run_dir, steps_done=2, total_steps=3, schedule=SimpleNamespace(cfg=preset()))
    message = tg.describe_progress(log)
    assert "a\\x1b[2J" in message and "\x1b" not in message

def test_describe_exit__the_remedy_depends_on_the_cause() -> None:
    """The message names the file. It asks for free disk space only if the disk is full."""
    cases = {FileExistsError(17, "File exists", "f"): "a path that does not exist",
             OSError(28, "No space left on device", "f"): "free disk space",
             PermissionError(13, "Permission denied", "f"): "permission",
             OSError(5, "Input/output error", "f"): "a disk that works",
             OSError(24, "Too many open files", "f"): "readable and writable"}
    for error, expected in cases.items():
        status, message = tg.describe_exit(error)
        assert status == 2 and message.startswith("DataError: f\n")
        check_error(message, error.strerror, expected)
        with expect_error(tg.RunError, "writing run", error.strerror), tg.write_errors(Path("run")):
            raise error
        assert ("free disk space" in message) == (error.errno == 28)
        with pytest.raises(tg.DataError) as caught, tg.read_errors(Path("run")):
            raise error
        assert ("the trainer that wrote it" in str(caught.value)) == (error.errno == 24)

def test_main__exits_while_a_thread_is_stuck_in_a_read(run_main, monkeypatch) -> None:
    """The loader thread is stuck, so the main thread raises after --comm_timeout. Both logs end with the message."""
    fromfile = np.fromfile

    def stuck(file: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        if "train" in str(file) and tg.threading.current_thread() is not tg.threading.main_thread():
            time.sleep(600)
        return fromfile(file, *args, **kwargs)

    monkeypatch.setattr(np, "fromfile", stuck)
    done = run_main([*FILES, "--comm_timeout=1", "--max_steps=2"], 1, "no result after 1.0 s", "--comm_timeout")
    message = " ".join(done.err.split())                             # on one line, as in log.txt
    assert done.lines[-1] == f"aborted after step 0: {message}" and done.events[0]["type"] == "header"
    assert done.events[-1]["type"] == "aborted" and " ".join(done.events[-1]["cause"].split()) == message

@pytest.mark.parametrize("capability, expected", [((8, 0), "plain"), ((8, 9), "fp8")])
def test_resolve_head_precision__depends_on_the_device(monkeypatch, capability, expected) -> None:
    """--head=auto is fp8 on a GPU of capability 8.9, plain on one of 8.0 and on a CPU. Other values do not change."""
    cpu = tg.Communicator(torch.device("cpu"))
    cuda = tg.Communicator(torch.device("cuda", 0))
    cfg = tg.Config(**tg.PRESETS["record"])
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    monkeypatch.setattr(torch.cuda, "get_device_capability", {cuda.device: capability}.get)
    assert (tg.resolve_head_precision(cfg, cpu), tg.resolve_head_precision(cfg, cuda)) == ("plain", expected)
    assert tg.resolve_head_precision(tg.Config(head="emulated"), cpu) == "emulated"
