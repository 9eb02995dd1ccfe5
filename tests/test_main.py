"""Room 10: whole runs in this process from flags to the last line, and every way a run can fail with its message."""
import base64
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import types
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from common import ROOT, Run, call, check_error, fabric, main_here, preset, random_stream, refused, run, write_shard

import train_gpt as tg

NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|nan|inf"
# Lines as parsers of the public records know them.
VAL = re.compile(rf"^step:(?P<step>\d+)/(?P<total>\d+) val_loss:(?P<val>{NUMBER})(?P<mid>(?: [a-z_]+:\S+)*)"
                 rf" train_time:(?P<time>{NUMBER})(?P<unit>ms|s) step_avg:(?P<avg>{NUMBER})ms"
                 r"(?P<rest>(?: [a-z_]+:\S+)*)\s*$")
TRN = re.compile(rf"^step:(?P<step>\d+)/(?P<total>\d+)(?: train_loss:(?P<loss>{NUMBER}))? train_time:(?P<time>{NUMBER})"
                 rf"(?P<unit>ms|s) step_avg:(?P<avg>{NUMBER})ms\s*$")
PEAK = re.compile(r"^peak memory (?:allocated|consumption): (?P<alloc>\d+) MiB(?: reserved: (?P<res>\d+) MiB)?\s*$")
SEP = re.compile(r"^={20,}$")
VERS = re.compile(r"^Running PyTorch (?P<torch>\S+) compiled for CUDA (?P<cuda>\S+)"
                  r"(?: on (?P<gpu>.*?)\s+with world_size (?P<ws>\d+))?\s*$")


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Run:
    """The tiny preset as it is, shared by the tests that only look."""
    return run(tmp_path_factory.mktemp("first") / "new" / "run", "--seed=3")


# ---- a run that works -----------------------------------------------------------------------------------------------

KEYS = {
    "header": "config started seed world_size grad_accum_steps git_commit source_sha256 "
              "data_sha256 python torch triton cuda nccl hardware attention preset changed head target_loss "
              "params_total params_per_token table_rows table_bytes untimed_warmup_steps",
    "phase": "name ms timed",
    "step": "step train_time_ms tokens train_loss",
    "val": "step val_loss train_time_ms",
    "comms": "purpose cycle tokens table mode rows reads bytes_sent bytes_received bytes_dense plan_ms",
    "compiled": "graphs",
    "result": "val_loss train_time_ms steps tokens peak_memory_mib run_dir comms",
}


def test_events_have_exactly_their_keys_in_a_sensible_order(first):
    assert (first.status, first.err) == (0, "")
    assert all(set(event) == {"type", *KEYS[event["type"]].split()} for event in first.events)
    kinds = [event["type"] for event in first.events if event["type"] not in ("step", "val", "comms", "phase")]
    assert kinds == ["header", "result"] and first.events[-1]["type"] == "result"
    schedule = tg.Schedule(preset())
    values, cycles = [schedule.at(step) for step in range(12)], len(schedule.warm_up_steps()) // schedule.cycle
    phases = [(e["name"], e["timed"]) for e in first.of("phase")]
    assert phases[:2] == [("set-up", False), ("validation data", False)]
    assert [name.rpartition(" ")[0] for name, _ in phases[2:-3]] == ["warm-up of stage"] * cycles
    assert phases[-3:] == [("warm-up of validation", False), ("warm-up", False), ("first batch", True)]
    assert [e["step"] for e in first.of("step")] == list(range(1, 13))
    assert [e["step"] for e in first.of("val")] == [v.step for v in values if v.validate] + [12]
    assert [e["tokens"] for e in first.of("step")][-1] == sum(8 * v.slot_tokens for v in values)
    times = [e["train_time_ms"] for e in first.events if e["type"] in ("step", "val")]
    assert times == sorted(times)


def test_comms_lines_name_each_cycle_and_table_and_one_rank_moves_nothing(first):
    """Training lines of every cycle, the embedding's once it is untied; rows as in the tokens."""
    cfg, labels = preset(), ["bigram_embed", "value_embed", "embed"]
    schedule = tg.Schedule(cfg)
    every, values = schedule.cycle, [schedule.at(step) for step in range(13)]
    cycles = [values[first:first + every] for first in range(0, 12, every)]
    loader = tg.Loader(cfg, fabric(), tg.find_shards(cfg.train_files), cycles)
    loader.start()
    want = []
    for number, cycle in enumerate(cycles):
        tokens = [loader.next(v).tokens.numpy() for v in cycle]
        words = len(set(np.concatenate([x.ravel() for x in tokens]).tolist()))
        hashes = [tg.bigram_hash(x, cfg.bigram_rows).ravel() for x in tokens]
        rows = [len(set(np.concatenate(hashes).tolist())), tg.NUM_VALUE_TABLES * words, words]
        length = sum(x.shape[1] for x in tokens)
        want += [(number, length, *found) for found in list(zip(labels, rows))[:2 if cycle[0].tied else 3]]
    loader.close()
    lines = first.of("comms")
    found = [(e["cycle"], e["tokens"], e["table"], e["rows"]) for e in lines if e["purpose"] == "train"]
    assert sorted(found) == sorted(want), "tables of a cycle in the order of their updates"
    assert [cycle for cycle, *_ in found] == [cycle for cycle, *_ in want]
    read = [(e["cycle"], e["tokens"], e["table"]) for e in lines if e["purpose"] == "validation"]
    assert sorted(read) == sorted((v.step // every, 64, label) for v in values if v.validate or v.step == 12
                                  for _ in range(2)                  # blocks of 8 x 64 tokens
                                  for label in labels[:2 if v.tied else 3])
    assert {e["purpose"] for e in lines} == {"train", "validation"} and {e["mode"] for e in lines} == {"sparse"}
    assert all(e[key] == 0 for e in lines for key in ("bytes_sent", "bytes_received", "bytes_dense"))
    result = first.of("result")[0]["comms"]
    tables = dict(bigram_embed=2560, value_embed=512 * tg.NUM_VALUE_TABLES, embed=512)
    moments = {row.label: len(tg.initial_state(row, torch.zeros(1, 1))) for row in tg.parameter_table(cfg)}
    kept = {label: (2 + moments[label]) * 4 * 32 * rows for label, rows in tables.items()}
    assert result == {label: dict(bytes_sent=0, bytes_received=0, bytes_dense=0, memory_bytes=size)
                      for label, size in kept.items()}, "weights, gradient and moments in f32"


def test_readme_names_the_same_keys():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "records/README.md").read_text(), re.M))
    for kind, keys in KEYS.items():
        named = re.sub(r"\([^)]*\)", "", rows[kind])
        missing = [key for key in keys.split() if not re.search(rf"\b{key}\b", named)]
        assert not missing, f"{kind}: {missing}"
    assert "cause" in rows["aborted"]


@pytest.fixture
def compiled_evaluation(monkeypatch) -> None:
    """Validation losses are compiled, in the place of all else."""
    def compiled(_, call):
        return torch.compile(call, backend="eager", dynamic=False) if call is tg.next_token_losses else call

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(tg.Executor, "compiled", compiled)


COMPILED = ["--compile=1", "--max_steps=2", "--sample_tokens=0"]


@pytest.mark.parametrize("rows, again", [(tg.EVAL_ROWS, None), (256, 1)])
def test_a_graph_that_is_compiled_in_the_race_is_in_the_result(compiled_evaluation, tmp_path, monkeypatch, rows, again):
    """That voids such a run for a test; a user's run goes on. The warm-up had all 512 rows of a batch in one."""
    race = tg.race

    def race_with_chunks(*args):
        monkeypatch.setattr(tg, "EVAL_ROWS", rows)
        return race(*args)

    monkeypatch.setattr(tg, "race", race_with_chunks)
    done = run(tmp_path / "run", *COMPILED)
    assert (done.status, done.err) == (0, "")
    assert done.of("compiled") == [dict(type="compiled", graphs=1)]
    assert done.of("result")[0].get("recompiles") == json.loads(done.out.splitlines()[-1]).get("recompiles") == again
    assert any("compiled in the race" in line for line in done.lines) == bool(again)


def test_header_says_what_ran(first):
    header = first.of("header")[0]
    source = (ROOT / "train_gpt.py").read_bytes()
    assert (first.folder / "train_gpt.py").read_bytes() == source
    assert header["source_sha256"] == hashlib.sha256(source).hexdigest()
    assert set(header["config"]) == {f.name for f in fields(tg.Config)}
    assert (header["config"]["vocab_size"], header["config"]["bigram_rows"]) == (512, 5 * 512), "sizes filled in"
    assert header["changed"] == dict(seed="3", device="cpu", run_dir=str(first.folder))
    assert (header["preset"], header["seed"], header["world_size"], header["grad_accum_steps"]) == ("tiny", 3, 1, 1)
    assert header["grad_accum_steps"] == 1, "chosen: all slots fit at once"
    assert (header["torch"], header["attention"], header["head"]) == (torch.__version__, "reference", "plain")
    assert re.fullmatch("[0-9a-f]{40}|None", str(header["git_commit"]))
    assert header["hardware"]
    time.strptime(header["started"], "%Y-%m-%dT%H:%M:%S")


def test_log_txt_is_read_by_existing_parsers(first):
    head = first.lines[:6]
    assert SEP.match(head[0]) and SEP.match(head[5]) and head[1].startswith("Running Python ")
    versions = VERS.match(head[2])
    assert versions["torch"] == torch.__version__ and versions["ws"] == "1" and versions["gpu"]
    validations = [VAL.match(line) for line in first.lines if "val_loss:" in line]
    steps = [TRN.match(line) for line in first.lines if line.startswith("step:") and "val_loss:" not in line]
    assert [(int(m["step"]), m["total"], m["unit"]) for m in validations] == [(k, "12", "ms") for k in (0, 5, 10, 12)]
    assert [int(m["step"]) for m in steps] == list(range(1, 13))
    for m, event in zip(validations, first.of("val"), strict=True):
        assert float(m["val"]) == pytest.approx(event["val_loss"], abs=6e-5)              # printed with 4 decimals
    for m in validations + steps:
        average = float(m["time"]) / max(1, int(m["step"]))
        assert float(m["avg"]) == pytest.approx(average, abs=0.51)   # the time is printed in whole ms
    assert sum(bool(PEAK.match(line)) for line in first.lines) == 1
    assert all(line in first.out.splitlines() for line in first.lines), "12 steps: the console shows all of them"


def test_last_line_on_stdout_is_the_result(first):
    result = json.loads(first.out.splitlines()[-1])
    assert [result] == first.of("result")
    assert result["val_loss"] == first.of("val")[-1]["val_loss"] and result["steps"] == 12
    assert result["run_dir"] == str(first.folder)
    assert all(50 < mib < 1_000_000 for mib in result["peak_memory_mib"].values()), "MiB: torch alone needs over 50"
    sample = first.out.split(" sample ")[1]
    assert "token ids" in sample and "-" * 100 in sample


def test_the_model_learns(first):
    """Formula tokens are noise but for documents of 32: from ln 512 towards the entropy of their first tokens."""
    losses = [e["val_loss"] for e in first.of("val")]
    assert losses[0] == pytest.approx(np.log(512), abs=0.05) and losses[-1] < losses[0] - 0.1


def without_times(x):
    """Events or lines with everything replaced that a clock, the memory or the folder's name decides."""
    if isinstance(x, str):
        return re.sub(r"\d+(\.\d+)?(?= ?(ms|s|MiB)\b)|[^ =]*/run\d?", "*", x)
    if isinstance(x, dict):
        times = ("started", "ms", "train_time_ms", "plan_ms", "run_dir", "peak_memory_mib")
        return {key: without_times(value) for key, value in x.items() if key not in times}
    return [without_times(y) for y in x] if isinstance(x, list) else x


def test_the_same_flags_give_the_same_run(first, tmp_path):
    again, other = run(tmp_path / "run2", "--seed=3"), run(tmp_path / "run3", "--seed=4", "--max_steps=2")
    assert without_times(again.events) == without_times(first.events)
    assert [without_times(line) for line in again.lines] == [without_times(line) for line in first.lines]
    assert again.of("val")[-1]["val_loss"] == first.of("val")[-1]["val_loss"], "every bit"
    assert other.of("val")[0]["val_loss"] != first.of("val")[0]["val_loss"], "another seed"


def test_max_steps_stops_early_and_validates(first, tmp_path):
    """The same run up to there: same losses, same total in the lines; --sample_tokens=0 leaves the sample out."""
    short = run(tmp_path / "run", "--seed=3", "--max_steps=5", "--sample_tokens=0")
    assert short.status == 0 and [e["step"] for e in short.of("val")] == [0, 5]
    assert [e["train_loss"] for e in short.of("step")] == [e["train_loss"] for e in first.of("step")][:5]
    assert short.of("val")[-1]["val_loss"] == first.of("val")[1]["val_loss"], "no wider window before the true end"
    assert short.of("result")[0]["steps"] == 5 and "step:5/12 " in short.lines[-3] and " sample -" not in short.out


@pytest.mark.parametrize("flags, close", [
    (["--dtype=float64"], 1e-5),                                     # f32 has 24 bits
    (["--dtype=bfloat16"], 0.05),                                    # 8 bits through 11 layers
    (["--head=emulated"], 0.05),                                     # logits of 4 bits each in y and w
    (["--slots_per_micro_batch=3"], 1e-5), (["--debug_rows=1"], 0),
    (["--row_comms=dense"], 0)])                                     # on a single rank no row travels
def test_other_precisions_train_alike(first, tmp_path, flags, close):
    other = run(tmp_path / "run", "--seed=3", "--max_steps=3", *flags)
    assert other.status == 0, other.err
    losses = [[event["train_loss"] for event in done.of("step")][:3] for done in (first, other)]
    assert losses[0] == (pytest.approx(losses[1], rel=close) if close else losses[1])
    assert {flag.partition("=")[0][2:] for flag in flags} <= set(other.of("header")[0]["changed"])
    assert other.of("val")[0]["val_loss"] == pytest.approx(first.of("val")[0]["val_loss"], rel=close)


def text_shards(folder: Path) -> None:
    """Vocabulary of 21: the document start is 20, the others are one letter or two."""
    stream = random_stream(0, 9000, 21, 20)
    write_shard(folder / "train_0.bin", stream[:7000], 21, 20)
    write_shard(folder / "val_0.bin", stream[7000:], 21, 20)
    pieces = [bytes([97 + k]) * (1 + k % 2) for k in range(20)]
    (folder / "vocab.txt").write_text("".join(f"{base64.b64encode(p).decode()} {k}\n" for k, p in enumerate(pieces)))


def test_text_has_bits_per_byte_an_entropy_and_a_sample(tmp_path):
    text_shards(tmp_path)
    files = f"--train_files={tmp_path}/train_*.bin", f"--val_files={tmp_path}/val_*.bin"
    done = run(tmp_path / "run", *files, "--max_steps=2")
    assert done.status == 0, done.err
    targets = random_stream(0, 9000, 21, 20)[7001:8025]              # 1,024 validation tokens, shifted by one
    text_bytes = sum(1 + token % 2 for token in targets if token != 20)
    shares = np.bincount(targets, minlength=21) / 1024
    entropy = -sum(p * np.log(p) for p in shares if p)
    for event in (*done.of("val"), *done.of("result")):
        extra = {"val_bpb", "unigram_nats"}
        assert set(event) == {"type", *KEYS[event["type"]].split()} | extra
        assert event["val_bpb"] == pytest.approx(event["val_loss"] / np.log(2) * 1024 / text_bytes, rel=1e-9)
        assert event["unigram_nats"] == pytest.approx(entropy, rel=1e-9)
    result = done.of("result")[0]
    assert any(f"{result['val_bpb']:.4f} bits per byte" in line and f"{entropy:.4f}" in line for line in done.lines)
    sample = done.out.split(" sample ")[1].splitlines()[1]
    assert re.fullmatch("[a-t]+", sample)
    assert (done.of("header")[0]["config"]["vocab_size"], done.of("header")[0]["config"]["padded_vocab"]) == (21, 128)


def test_a_run_without_a_folder_gets_one_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main_here(["--preset=tiny", "--device=cpu", "--max_steps=1", "--val_every=0"]) == 0
    folder, = (tmp_path / "logs").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["log.jsonl", "log.txt", "settings.json", "train_gpt.py"]
    assert json.loads(out.getvalue().splitlines()[-1])["run_dir"] == f"logs/{folder.name}"


# ---- runs that fail -------------------------------------------------------------------------------------------------

def check_message(done: Run, *parts: str) -> None:
    check_error(done.err.partition(": ")[2].strip("\n"), *parts)


def failed(done: Run, status: int, kind: str, *parts: str) -> None:
    """Exit status, one message on stderr, no stack trace; where the run had begun, logs that end with `aborted`."""
    assert done.status == status, done.err
    assert done.err.partition(": ")[0] == kind and "Traceback" not in done.err
    check_message(done, *parts)
    if (done.folder / "log.jsonl").exists():
        assert done.events[-1]["type"] == "aborted" and done.events[0]["type"] == "header"
        message = " ".join(done.err.split())                         # in one line, so that it is the last one
        assert done.lines[-1] == f"aborted after step {done.events[-1]['step']}: {message}"
        assert " ".join(done.events[-1]["cause"].split()) == message


START = 511
PIECES = [b"%s %d" % (base64.b64encode(bytes([i]) if i < 256 else bytes([i - 256, 97])), i) for i in range(START)]
FILES = ("--train_files=train_0.bin", "--val_files=val_0.bin")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Shards of tiny's vocabulary, saved weights, and copies of both with what goes wrong."""
    path = tmp_path_factory.mktemp("inputs")
    good = tg.formula_tokens(0, 40_000, 512, START)
    bad = dict(train_0=good, val_0=good[:4000], beyond=np.where(np.arange(40_000) == 39_990, 600, good),
               no_start=good % START, short=good[:200],
               one_document=np.concatenate([[START], good[1:] % START]))
    for name, tokens in bad.items():
        write_shard(path / f"{name}.bin", tokens, 512, START)
    (path / "vocabulary").mkdir()
    write_shard(path / "vocabulary/val_0.bin", good[:4000], 512, START)
    (path / "vocabulary/vocab.txt").write_bytes(b"\n".join(PIECES[:-1]))
    (path / "a_file").write_text("text")
    (path / "old_run").mkdir()
    (path / "old_run/log.txt").write_text("an old log\n")
    (path / "old_run/log.jsonl").touch()
    (path / "w_empty").mkdir()

    cfg, pieces = preset(), [base64.b64decode(line.split()[0]) for line in PIECES] + [b""]
    pieces[ord("~")] = b"no tilde"
    gpt2 = replace(cfg, vocab_size=tg.GPT2_VOCAB, document_start=tg.GPT2_DOCUMENT_START, padded_vocab=50_304)
    for name, settings, of_tokens in (("w", cfg, pieces), ("w_gpt2", gpt2, None), ("w_no_vocab", cfg, None)):
        saved = tg.Executor(settings, fabric(), tg.attention_reference, "plain")
        tg.save(path / name, "id", "tiny", settings, saved, tg.Schedule(settings).at(0), of_tokens)
    shutil.copytree(path / "w", path / "w_vocab")
    (path / "w_vocab/vocab.txt").write_text("junk")
    return path


@pytest.fixture
def ask(folder, monkeypatch):
    """Runs main() as from the command line: the status, one message that helps and holds all parts, no stack trace."""
    def ask(words: list[str], status: int, *parts: str) -> None:
        done = call(words)
        assert done.status == status and "Traceback" not in done.err, done.err
        message = re.search(r"^(RunError|ConfigError|DataError|DataEnded): (.*)", done.err, re.MULTILINE | re.DOTALL)
        assert (message[1] == "RunError") == (status == 1)
        check_error(message[2].strip("\n"), *parts)
        assert not list(folder.rglob("*.part")) and not list(folder.rglob(".reserve")), "no auxiliary file stays"
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tg, "warm_up", lambda *_: None)                       # no matter to any of these
    monkeypatch.setattr(tg, "STORE_PATIENCE", 0.1)
    return ask


BAD = [                                  # flags after --preset=tiny, status, what the message must hold
    (["--sede=1"], 2, "unknown flag", "--sede", "--seed"),
    (["--device=cuda"], 2, "--device=cuda", "no CUDA device", "--preset=pocket"),
    (["--head=fp8"], 2, "--head=fp8", "float32", "8.9", "--head=emulated"),
    (["--vocab_size=500"], 2, "--vocab_size", "500", "512", "leave the flag out"),
    (["--resume=nowhere"], 2, "nowhere/settings.json", "No such file"),
    (["--resume=old_run"], 2, "old_run/settings.json", "one of an older trainer needs that trainer"),
    (["--bigram_rows=2000000000"], 1, "memory", "GiB to use", "weights 238", "moments", "a smaller model"),
    (["--train_files=none/*.bin"], 2, "none/*.bin as a shard", "no such file", "pocket.py"),
    (["--train_files=formula:512:511:200:1"], 2, "too few training tokens", "200", "--epochs=0"),
    (["--val_files=formula:500:499:9000:1"], 2, "different vocabularies", "(500, 499)"),
    (["--train_files=one_document.bin"], 2, "training data ended", "at most 24 of each document", "larger shards"),
    (["--val_files=vocabulary/*.bin"], 2, "vocab.txt", "510 tokens", "all of 512", "511"),
    (["--run_dir=a_file"], 1, "writing a_file", "File exists", "another folder"),
    (["--run_dir=a_file/run"], 1, "writing a_file/run", "Not a directory"),
    (["--run_dir=/proc/run"], 1, "writing /proc/run", "No such file"),
    (["--run_dir=" + "x" * 300], 1, "File name too long"),
    (["--run_dir=nul\0"], 1, "writing nul", "null byte"),
    (["--run_dir=old_run"], 1, "run directory old_run", "the log of a run", "without one"),
    (["--save=w"], 2, "--save=w", "a name that is taken", "nothing is overwritten"),
    (["--save=/proc/weights"], 2, "/proc/weights", "No such file"),
    (["--save=nul\0"], 2, "nul", "null byte"),
    (["--sample=nowhere"], 2, "nowhere/settings.json", "No such file", "the folder of a run or of a save"),
    (["--sample=w_empty"], 2, "w_empty/settings.json", "No such file"),
    (["--sample=w", "x", "--model_dim=64"], 2, "--sample", "64", "what was trained", "leave"),
    (["--sample=w_vocab"], 2, "w_vocab/vocab.txt", "sha256"),
    (["--sample=w", "a ~ b"], 2, "prompt", "b'~'", "use other words"),
    (["--sample=w_no_vocab", "words"], 2, "prompt", "b'w'", "vocab.txt"),
    (["--sample=w", "two", "words"], 2, "words"),
]


@pytest.mark.parametrize("flags, status, parts", [(flags, status, parts) for flags, status, *parts in BAD],
                         ids=[" ".join(flags)[:60] for flags, *_ in BAD])
def test_main__a_bad_input(ask, folder, tmp_path, flags, status, parts):
    words = [f"--run_dir={tmp_path}/run", "--max_steps=4", "--sample_tokens=4"]
    if not flags[0].startswith("--sample="):
        words += ["--preset=tiny", *FILES]
    ask([*words, *flags], status, *parts)
    assert (folder / "old_run/log.txt").read_text() == "an old log\n"


def test_main__the_same_inputs_undamaged(ask, folder, tmp_path):
    """So that the table fails for its own reasons; and a finished run is not a run directory for the next."""
    words = ["--preset=tiny", "--max_steps=2", "--sample_tokens=4", *FILES, f"--run_dir={tmp_path}/run",
             f"--save={tmp_path}/saved"]
    assert call(words).status == 0
    for flags, said in (([f"--sample={tmp_path}/saved"], "token ids"), (["--sample=w", "a few words"], "a few words")):
        sample = call([*flags, "--sample_tokens=4"])
        assert sample.status == 0 and said in sample.out, sample.err
    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    ask(words[:-1], 1, "run directory", "the log of a run", "another --run_dir")
    ask([*words, f"--run_dir={tmp_path}/other"], 2, "--save=", "a name that is taken")
    assert not (tmp_path / "other").exists()
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == log


@pytest.mark.parametrize("flags, parts", [
    (["--train_files=beyond.bin"], ("beyond.bin", "tokens up to 600")),
    (["--train_files=no_start.bin"], ("no_start.bin", "0 of them document starts")),
    (["--val_files=no_start.bin"], ("no_start.bin", "0 of them document starts")),
    (["--val_tokens=512000"], ("too few validation tokens", "3584", "--val_tokens=3584")),
    (["--epochs=0", "--train_files=short.bin"], ("too small", " for", "--stages"))], ids=" ".join)
def test_train__bad_data_are_known_before_anything_is_built(ask, tmp_path, monkeypatch, flags, parts):
    monkeypatch.setattr(tg, "fit_memory", None)
    monkeypatch.setattr(tg, "Executor", None)
    ask(["--preset=tiny", *FILES, f"--run_dir={tmp_path}/run", *flags], 2, *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="nothing is forbidden to root")
@pytest.mark.parametrize("flag, status", [("--train_files", 2), ("--run_dir", 1), ("--save", 2)])
def test_main__what_may_not_be_read_or_written(ask, tmp_path, flag, status):
    locked = tmp_path / "locked"
    locked.mkdir()
    write_shard(locked / "train_0.bin", [START, 1], 512, START).chmod(0)
    locked.chmod(0o500)
    value = locked / ("train_0.bin" if flag == "--train_files" else "new")
    flags = {"--run_dir": tmp_path / "run", flag: value}
    ask(["--preset=tiny", *FILES, *(f"{name}={value}" for name, value in flags.items())], status, "Permission denied")
    locked.chmod(0o700)


@pytest.mark.parametrize("package, parts", [
    (None, ("ModuleNotFoundError", "install tiktoken")), ("offline", ("OSError", "no network", "TIKTOKEN_CACHE_DIR"))])
def test_sample__gpt2_tokens_without_package_or_network(ask, monkeypatch, package, parts):
    """GPT-2 ids without vocab.txt need tiktoken, and tiktoken a network or what it has fetched before."""
    fake = types.ModuleType("tiktoken")

    def get_encoding(name: str):
        raise OSError("no network")
    fake.get_encoding = get_encoding
    monkeypatch.setitem(sys.modules, "tiktoken", fake if package else None)
    monkeypatch.setattr(tg, "Executor", None)
    ask(["--sample=w_gpt2", "hello"], 2, *parts)


def test_train__too_little_memory(ask, tmp_path, monkeypatch):
    """Before anything is built: the estimate by part, and flags that would fit (test_device.py sees that they do)."""
    monkeypatch.setattr(tg.Fabric, "total_memory", lambda self: 60e6)
    monkeypatch.setattr(tg, "Executor", None)
    flags = ["--preset=pocket", *FILES, "--num_slots=1", "--max_steps=2", "--val_tokens=2048",
             "--val_batch_tokens=2048", f"--run_dir={tmp_path}/run"]
    ask(flags, 1, "memory", "GiB", "weights", "gradients", "moments", "working", "--num_slots=",
        "--slots_per_micro_batch=1")


MEETING = dict(RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")        # what a launcher sets besides
TWO_GPUS = dict(WORLD_SIZE="4", LOCAL_WORLD_SIZE="4")


@pytest.mark.parametrize("env, parts", [
    (MEETING | dict(WORLD_SIZE="3"), ("number of ranks", "3", "num_slots=8", "--nproc_per_node=2")),
    (MEETING | dict(WORLD_SIZE="16"), ("number of ranks", "16", "--nproc_per_node=8")),
    (dict(WORLD_SIZE="2"), ("launch", "without ['RANK', 'MASTER_ADDR', 'MASTER_PORT']", "unset WORLD_SIZE")),
    (dict(RANK="one"), ("one", "RANK", "torchrun")), (dict(WORLD_SIZE="0"), ("WORLD_SIZE", "torchrun")),
    (dict(WORLD_SIZE="2", RANK="2"), ("RANK", "2", "torchrun")), (dict(RANK="-1"), ("RANK", "-1")),
    (dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="port"), ("waiting for all", "MASTER_PORT")),
    *((MEETING | TWO_GPUS | dict(RANK=rank, LOCAL_RANK=rank),
       ("more ranks than devices", "2 GPUs", "nproc_per_node=2")) for rank in "02")], ids=str)
def test_make_fabric__a_bad_launch(ask, tmp_path, monkeypatch, env, parts):
    """Of more ranks than devices every rank knows, not only those without a GPU, so that rank 0 can say it."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if "LOCAL_RANK" in env:                                          # a machine with two GPUs, as far as anyone asks
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ask(["--preset=tiny", f"--run_dir={tmp_path}/run"], 2, *parts)
    assert not (tmp_path / "run").exists()


def test_train__no_compiler_ends_the_run_before_data_are_read(tmp_path, monkeypatch):
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delattr(tg, "open_data")
    done = run(tmp_path / "run", "--compile=1")
    failed(done, 2, "ConfigError", "--compile", "no C++ compiler", "apt install g++", "--compile=0")
    assert not done.folder.exists()


def test_data_that_end_in_the_race_end_the_run(tmp_path):
    """Enough tokens by the count, but packing drops the rests of documents."""
    done = run(tmp_path / "run", "--train_files=formula:512:511:4200:1", f"--save={tmp_path}/run/saved")
    assert done.status == 2 and done.err.startswith("DataEnded: training data ended")
    check_message(done, "--max_steps", "--epochs=0")
    steps = int(re.search(r"--max_steps=(\d+)", done.err)[1])
    assert run(tmp_path / "run2", "--train_files=formula:512:511:4200:1", f"--max_steps={steps}").status == 0
    result = done.events[-1]
    whole_cycles = steps - steps % tg.Schedule(preset()).cycle
    assert result["steps"] == whole_cycles == done.of("val")[-1]["step"], "known when the next cycle is taken"
    assert result["void"] == "the data ended early" and result["val_loss"] == done.of("val")[-1]["val_loss"]
    assert (done.folder / "saved" / "weights.pt").exists(), "what was trained counts"


class FullDisk(io.FileIO):
    """A file whose disk is full after some lines: half of the next one still goes in."""

    def __init__(self, path: Path, room: int) -> None:
        super().__init__(path, "xb")
        self.room = room

    def write(self, data: bytes) -> int:
        self.room -= data.count(b"\n")
        if self.room < 0:
            super().write(data[:len(data) // 2])
            raise OSError(28, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("name, room", [("log.txt", 9), ("log.jsonl", 7), ("log.jsonl", 0)])
def test_a_full_disk_ends_the_run_with_one_message(tmp_path, monkeypatch, name, room):
    monkeypatch.setattr(tg, "open", lambda path, *args, **kwargs: (
        FullDisk(path, room) if path.name == name else open(path, *args, **kwargs)), raising=False)
    done = run(tmp_path / "run")
    assert done.status == 1
    check_message(done, "writing", name, "No space left", "room", "free some")
    whole = (done.folder / name).read_text().split("\n")[:room]
    assert len(whole) == room and "aborted" not in "".join(whole), "what was written before"
    if name == "log.txt":
        assert done.events[-1]["type"] == "aborted"


def poison(monkeypatch, at_step: int) -> None:
    """From this step of the race on, one weight is NaN; the warm-up is left alone."""
    real, restored = tg.Executor.forward_backward, []
    snapshot = tg.Executor.snapshot

    def noting_snapshot(self):
        restore = snapshot(self)
        return lambda: restore() or restored.append(True)

    def forward_backward(self, batch, values, loss_weight=1.0):
        if restored and values.step == at_step:
            with torch.no_grad():
                self.model.x0_lambdas[0] = float("nan")
        return real(self, batch, values, loss_weight)

    monkeypatch.setattr(tg.Executor, "forward_backward", forward_backward)
    monkeypatch.setattr(tg.Executor, "snapshot", noting_snapshot)


def test_nan_ends_the_run_with_the_last_good_validation(tmp_path, monkeypatch):
    poison(monkeypatch, 6)
    done = run(tmp_path / "run")
    good = done.of("val")[-1]
    failed(done, 1, "RunError", "training loss of step 6", "nan", f"{good['val_loss']:.4f} at step 5", "--adam_lr")
    assert good["step"] == 5 and "NaN" not in (done.folder / "log.jsonl").read_text()
    assert "training loss of step 6" in done.events[-1]["cause"]


STUCK = """
import runpy, sys, threading, time
import numpy as np
real = np.fromfile
def stuck(file, *args, **how):
    if "train" in str(file) and threading.current_thread() is not threading.main_thread():
        time.sleep(600)
    return real(file, *args, **how)
np.fromfile = stuck
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_process_ends_though_a_thread_is_stuck_in_a_read(tmp_path):
    text_shards(tmp_path)
    flags = [f"--train_files={tmp_path}/train_*.bin", f"--val_files={tmp_path}/val_*.bin", f"--run_dir={tmp_path}/run",
             "--preset=tiny", "--device=cpu", "--comm_timeout=1", "--max_steps=2"]
    command = [sys.executable, "-c", STUCK, str(ROOT / "train_gpt.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)      # only so that a failure ends
    failed(Run(tmp_path / "run", done.returncode, done.stdout, done.stderr), 1, "RunError", "nothing after 1.0 s",
           "--comm_timeout")


def test_out_of_memory_names_smaller_choices(tmp_path, monkeypatch):
    def forward_backward(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nlong text")

    monkeypatch.setattr(tg.Executor, "forward_backward", forward_backward)
    done = run(tmp_path / "run")
    assert done.status == 1 and "long text" not in done.err
    check_message(done, "out of memory", "1 GiB", "--slots_per_micro_batch=1", "--num_slots")
    assert done.events[-1]["cause"].startswith("RunError: out of memory")


def test_a_bug_is_not_hidden_but_logged(tmp_path, monkeypatch):
    monkeypatch.setattr(tg.Executor, "optim_step", lambda *_: 1 / 0)
    done = run(tmp_path / "run")
    assert done.status == 1 and "Traceback" in done.err and "ZeroDivisionError" in done.err
    assert "ZeroDivisionError" in json.loads((tmp_path / "run/log.jsonl").read_text().splitlines()[-1])["cause"]


def test_head_precision__by_device(monkeypatch):
    cpu, cfg = tg.Fabric(torch.device("cpu")), tg.Config(**tg.PRESETS["record"])
    cuda = tg.Fabric(torch.device("cuda", 0))
    assert tg.head_precision(cfg, cpu) == "plain"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    for capability, want in (((8, 0), "plain"), ((8, 9), "fp8"), ((9, 0), "fp8")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        assert tg.head_precision(cfg, cuda) == want
    assert tg.head_precision(tg.Config(head="emulated"), cpu) == "emulated"
    refused(tg.ConfigError, lambda: tg.head_precision(tg.Config(head="fp8"), cpu), "--head=fp8", "bfloat16", "8.9")
