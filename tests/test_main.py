"""Room 10: whole runs in this process from flags to the last line, and every way a run can fail with its message."""
import base64
import contextlib
import hashlib
import io
import json
import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from common import ROOT, Run, check_error, fabric, main_here, preset, random_stream, refused, run, write_shard

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
    warm_up = [*(f"warm-up of stage {stage}" for stage in (3, 4, 4, 2, 2, 1)), "warm-up of validation", "warm-up"]
    phases = [(name, False) for name in ("set-up", "validation data", *warm_up)] + [("first batch", True)]
    assert [(e["name"], e["timed"]) for e in first.of("phase")] == phases
    assert [e["step"] for e in first.of("step")] == list(range(1, 13))
    assert [e["step"] for e in first.of("val")] == [0, 5, 10, 12]
    assert [e["tokens"] for e in first.of("step")][-1] == 3 * 128 + 3 * 256 + 6 * 384
    times = [e["train_time_ms"] for e in first.events if e["type"] in ("step", "val")]
    assert times == sorted(times)


def test_comms_lines_name_each_cycle_and_table_and_one_rank_moves_nothing(first):
    """Training lines of every cycle, the embedding's once it is untied, from step 8 on; rows as in the tokens."""
    cfg = preset()
    cycles = [[tg.Schedule(cfg).at(step) for step in (first, first + 1)] for first in range(0, 12, 2)]
    loader = tg.Loader(cfg, fabric(), tg.find_shards(cfg.train_files), cycles)
    loader.start()
    tokens = [loader.next(values).tokens.numpy() for cycle in cycles for values in cycle]
    loader.close()
    want = []
    for cycle in range(6):
        pair = tokens[2 * cycle:2 * cycle + 2]
        words = len(set(np.concatenate([x.ravel() for x in pair]).tolist()))
        bigrams = len(set(np.concatenate([tg.bigram_hash(x, cfg.bigram_rows).ravel() for x in pair]).tolist()))
        rows = dict(bigram_embed=bigrams, value_embed=5 * words, embed=words)
        for label in rows if cycle > 3 else list(rows)[:2]:
            want.append((cycle, sum(x.shape[1] for x in pair), label, rows[label]))
    lines = first.of("comms")
    found = [(e["cycle"], e["tokens"], e["table"], e["rows"]) for e in lines if e["purpose"] == "train"]
    assert sorted(found) == sorted(want), "tables of a cycle in the order of their updates"
    assert [cycle for cycle, *_ in found] == [cycle for cycle, *_ in want]
    read = [(e["cycle"], e["tokens"], e["table"]) for e in lines if e["purpose"] == "validation"]
    labels = ["bigram_embed", "value_embed", "embed"]                # two blocks of 8 x 64 tokens at 0, 5, 10 and 12
    assert sorted(read) == sorted((step // 2, 64, label) for step in (0, 5, 10, 12) for _ in range(2)
                                  for label in labels[:2 if step < 8 else 3])
    assert {e["purpose"] for e in lines} == {"train", "validation"} and {e["mode"] for e in lines} == {"sparse"}
    assert all(e[key] == 0 for e in lines for key in ("bytes_sent", "bytes_received", "bytes_dense"))
    assert all(0 < e["plan_ms"] < 10_000 for e in lines)
    result = first.of("result")[0]["comms"]
    tables = dict(bigram_embed=2560, value_embed=2560, embed=512)
    moments = {row.label: len(tg.initial_state(row, torch.zeros(1, 1))) for row in tg.parameter_table(cfg)}
    for label, rows in tables.items():                               # weights, gradient and moments in f32
        assert result.pop(label) == dict(bytes_sent=0, bytes_received=0, bytes_dense=0,
                                         memory_bytes=(2 + moments[label]) * 4 * 32 * rows)
    assert not result


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


def test_data_hash_depends_on_every_byte(tmp_path):
    write_shard(tmp_path / "a.bin", [3, 1, 2], 5, 3)
    write_shard(tmp_path / "b.bin", [3, 1, 2], 5, 3)
    headers = tg.find_shards(f"{tmp_path}/*.bin")
    whole = tg.scan_shards(headers)
    assert whole == tg.scan_shards(headers) != tg.scan_shards(headers[:1]) != tg.scan_shards(headers[1:])
    write_shard(tmp_path / "b.bin", [3, 1, 1], 5, 3)
    assert tg.scan_shards(tg.find_shards(f"{tmp_path}/*.bin")) != whole


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


@pytest.mark.parametrize("flags, kind, parts", [
    (["--sed=1"], "ConfigError", ["unknown flag", "--sed", "--seed"]),
    (["--preset=poket"], "ConfigError", ["--preset", "choose from"]),
    (["--seed=x"], "ConfigError", ["--seed", "'x'"]),
    (["--num_heads=5"], "ConfigError", ["--num_heads", "even"]),
    (["--vocab_size=500"], "ConfigError", ["--vocab_size", "500", "512", "leave the flag out"]),
    (["--document_start=1"], "ConfigError", ["--document_start", "511"]),
    (["--train_files=none/*.bin"], "DataError", ["none/*.bin as a shard", "no such file", "pocket.py"]),
    (["--train_files=formula:512:511:2000:1"], "DataError", ["too few training tokens", "2000", "--epochs=0"]),
    (["--val_files=formula:500:499:9000:1"], "DataError", ["different vocabularies", "(500, 499)"]),
    (["--train_files=formula:512"], "DataError", ["formula:512"]),
    (["--head=fp8"], "ConfigError", ["--head=fp8", "float32", "8.9", "--head=emulated"]),
])
def test_bad_input_is_refused_before_a_folder_is_made(tmp_path, flags, kind, parts):
    done = run(tmp_path / "run", *flags)
    failed(done, 2, kind, *parts)
    assert not done.folder.exists()


def test_no_compiler_ends_the_run_before_data_are_read(tmp_path, monkeypatch):
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delattr(tg, "open_data")
    done = run(tmp_path / "run", "--compile=1")
    failed(done, 2, "ConfigError", "--compile", "no C++ compiler", "apt install g++", "--compile=0")
    assert not done.folder.exists()


def test_too_few_validation_tokens_end_the_run(tmp_path):
    done = run(tmp_path / "run", "--val_files=formula:512:511:1000:1")
    failed(done, 2, "DataError", "too few validation tokens", "512", "1024", "--val_tokens=512")


def test_data_that_end_in_the_race_end_the_run(tmp_path):
    """Enough tokens by the count, but packing drops the rests of documents."""
    done = run(tmp_path / "run", "--train_files=formula:512:511:4200:1", f"--save={tmp_path}/run/saved")
    assert done.status == 2 and done.err.startswith("DataEnded: training data ended")
    check_message(done, "--max_steps", "--epochs=0")
    steps = int(re.search(r"--max_steps=(\d+)", done.err)[1])
    assert run(tmp_path / "run2", "--train_files=formula:512:511:4200:1", f"--max_steps={steps}").status == 0
    result = done.events[-1]
    assert result["steps"] == steps - steps % 2 == done.of("val")[-1]["step"], "known when the next cycle is taken"
    assert result["void"] == "the data ended early" and result["val_loss"] == done.of("val")[-1]["val_loss"]
    assert (done.folder / "saved" / "weights.pt").exists(), "what was trained counts"


@pytest.mark.parametrize("environment, flags, kind, parts", [
    (dict(WORLD_SIZE="3"), [], "ConfigError", ["3", "a divisor of num_slots=8", "--nproc_per_node=2"]),
    (dict(WORLD_SIZE="16"), [], "ConfigError", ["16", "a divisor of num_slots=8", "--nproc_per_node=8"]),
    (dict(LOCAL_RANK="2", WORLD_SIZE="4"), ["--device=auto"], "ConfigError",
     ["2 GPUs", "--nproc_per_node=2"]),
])
def test_ranks_that_do_not_fit(tmp_path, monkeypatch, environment, flags, kind, parts):
    launcher = dict(RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1")   # nobody gets so far as to connect
    for name, value in (launcher | environment).items():
        monkeypatch.setenv(name, value)
    if flags:                                                        # a machine with two GPUs, as far as anyone asks
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    failed(run(tmp_path / "run", *flags), 2, kind, *parts)
    assert not torch.distributed.is_initialized()


def test_the_record_preset_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    failed(run(tmp_path / "run", "--preset=record", "--device=cuda"), 2, "ConfigError", "CUDA", "--preset=pocket")


def test_a_damaged_shard_ends_the_run(tmp_path):
    text_shards(tmp_path)
    write_shard(tmp_path / "train_0.bin", [20, 1, 2, 21] * 2000, 21, 20)
    done = run(tmp_path / "run", f"--train_files={tmp_path}/train_*.bin", f"--val_files={tmp_path}/val_*.bin")
    failed(done, 2, "DataError", "train_0.bin", "tokens up to 21", "vocabulary size 21")


def test_a_folder_with_a_log_is_refused(first):
    before = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    done = run(first.folder)
    assert done.status == 1 and "the log of a run" in done.err and "--run_dir" in done.err
    assert {path.name: path.read_bytes() for path in first.folder.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    done = run(tmp_path / "file" / "run")
    assert done.status == 1
    check_message(done, "writing", "Not a directory", "another folder")


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


def test_head_precision_by_device(monkeypatch):
    cpu, cfg = tg.Fabric(torch.device("cpu")), tg.Config(**tg.PRESETS["record"])
    cuda = tg.Fabric(torch.device("cuda", 0))
    assert tg.head_precision(cfg, cpu) == "plain"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    for capability, want in (((8, 0), "plain"), ((8, 9), "fp8"), ((9, 0), "fp8")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        assert tg.head_precision(cfg, cuda) == want
    assert tg.head_precision(tg.Config(head="emulated"), cpu) == "emulated"
    refused(tg.ConfigError, lambda: tg.head_precision(tg.Config(head="fp8"), cpu), "--head=fp8", "bfloat16", "8.9")


def test_what_is_no_mathematics_are_flags():
    assert tg.NOT_MATHEMATICS <= {f.name for f in fields(tg.Config)}
