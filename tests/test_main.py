"""Section 11: whole runs from flags to the last line, and every way a run can fail with its message."""
import base64
import functools
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from common import (PROCESS_TIMEOUT_S, ROOT, Forked, Run, check_error, expect_error, launch, losses, make_comm,
                    make_engine, noop, preset, random_stream, run, write_shard)

import train_gpt as tg

NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|nan|inf"
# Lines as parsers of the public records know them.
VAL = re.compile(rf"^step:(?P<step>\d+)/(?P<total>\d+) val_loss:(?P<val>{NUMBER})(?P<mid>(?: [a-z_]+:\S+)*)"
                 rf" train_time:(?P<time>{NUMBER})(?P<unit>ms|s) step_avg:(?P<avg>{NUMBER})ms"
                 r"(?P<rest>(?: [a-z_]+:\S+)*)\s*$")
TRN = re.compile(rf"^step:(?P<step>\d+)/(?P<total>\d+)(?: train_loss:(?P<loss>{NUMBER}))? train_time:(?P<time>{NUMBER})"
                 rf"(?P<unit>ms|s) step_avg:(?P<avg>{NUMBER})ms\s*$")
PEAK = re.compile(r"^peak memory (?:allocated|consumption): (?P<alloc>\d+) MiB(?: reserved: (?P<res>\d+) MiB)?\s*$")
VERS = re.compile(r"^Running PyTorch (?P<torch>\S+) compiled for CUDA (?P<cuda>\S+)"
                  r"(?: on (?P<gpu>.*?)\s+with world_size (?P<ws>\d+))?\s*$")
KEYS = {
    "header": "config started seed world_size grad_accum_steps git_commit source_sha256 "
              "data_sha256 python torch triton cuda nccl hardware attention preset changed head target_loss "
              "params_total params_per_token table_rows table_bytes untimed_warmup_steps",
    "phase": "name ms timed",
    "step": "step train_time_ms tokens train_loss",
    "val": "step val_loss train_time_ms",
    "compiled": "graphs",
    "result": "val_loss train_time_ms steps tokens peak_memory_mib run_dir comms",
}


# ---- a run that works -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Run:
    """The tiny preset as it is, shared by the tests that only look."""
    folder = tmp_path_factory.mktemp("first")
    return run(folder / "new" / "run", "--seed=3", f"--save={folder / 'save'}")

def test_train__events_have_exactly_their_keys_in_a_sensible_order(first):
    assert first.status == 0 and all(set(event) == {"type", *KEYS[event["type"]].split()} for event in first.events)
    kinds = [event["type"] for event in first.events if event["type"] not in ("step", "val", "phase")]
    assert kinds == ["header", "result"] and first.events[-1]["type"] == "result"
    schedule = tg.Schedule(preset())
    values = [schedule.at(step) for step in range(12)]
    phases = [(e["name"], e["timed"]) for e in first.of("phase") if "warm-up of stage" not in e["name"]]
    assert phases == [("set-up", False), ("validation data", False), ("warm-up of validation", False),
                      ("warm-up", False), ("first batch", True), ("evaluation", False)]
    assert [e["step"] for e in first.of("step")] == list(range(1, 13))
    assert [e["step"] for e in first.of("val")] == [v.step for v in values if v.validate] + [12]
    assert first.of("step")[-1]["tokens"] == sum(8 * v.seq_len for v in values)
    times = [e["train_time_ms"] for e in first.events if e["type"] in ("step", "val")]
    assert times == sorted(times)
    start, *_, end = (e["val_loss"] for e in first.of("val"))
    assert start == pytest.approx(np.log(512), abs=0.05) and end < start - 0.1, "first tokens of documents are learned"

@pytest.mark.parametrize("others, said", [(0.0, False), (1e6, True)])
def test_train__a_busy_machine_is_said_in_the_first_lines(tmp_path, monkeypatch, others, said):
    monkeypatch.setattr(tg, "warm_up", noop)
    monkeypatch.setattr(tg, "other_cpu_seconds", Mock(side_effect=[0.0, others]))
    done = run(tmp_path, "--max_steps=1", "--val_every=0", "--sample_tokens=0")
    assert any("warning: other processes use" in line for line in done.lines[:8]) == said

def test_train__a_slow_attention_kernel_is_said_in_the_first_lines_and_in_the_result(tmp_path, monkeypatch):
    monkeypatch.setattr(tg, "warm_up", noop)
    monkeypatch.setattr(tg, "slow_attention", "{0} is slow".format)
    done = run(tmp_path, "--max_steps=1", "--val_every=0", "--sample_tokens=0")
    assert done.lines[7] == done.of("result")[0]["slow_attention"] == "reference is slow"

def test_other_cpu_seconds__counts_another_process():
    before = tg.other_cpu_seconds(make_comm())
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", burn], check=True, timeout=60)
    assert tg.other_cpu_seconds(make_comm()) - before > 0.4, "nothing gives time back"

def test_finish_run__comms_of_each_table_of_which_one_rank_sends_nothing(first) -> None:
    nothing_moved = dict(bytes_sent=0, bytes_received=0, bytes_dense=0)
    assert first.of("result")[0]["comms"] == dict.fromkeys(("bigram_embed", "value_embed", "embed"), nothing_moved)

def test_write_header__what_ran_and_what_an_entry_is(first):
    header = first.of("header")[0]
    source = (ROOT / "train_gpt.py").read_bytes()
    assert (first.folder / "train_gpt.py").read_bytes() == source
    assert header["source_sha256"] == hashlib.sha256(source).hexdigest()
    assert header["config"].keys() == vars(preset()).keys() and header["config"]["bigram_rows"] == 5 * 512
    save = first.folder.parent.parent / "save"
    assert header["changed"] == dict(seed="3", device="cpu", save=str(save)), "and not where it is"
    assert (header["preset"], header["seed"], header["world_size"], header["grad_accum_steps"]) == ("tiny", 3, 1, 1)
    assert (header["attention"], header["head"]) == ("reference", "plain")
    assert re.fullmatch("[0-9a-f]{40}|None", str(header["git_commit"])) and header["hardware"]
    rows = dict(bigram_embed=2560, value_embed=512 * tg.NUM_VALUE_EMBEDS, embed=512)
    parameters = sum(x.numel() for x in torch.load(save / "weights.pt").values())
    assert header["table_rows"] == rows and header["table_bytes"] == 4 * 32 * sum(rows.values())
    read = parameters - 32 * (sum(rows.values()) - 1 - tg.NUM_VALUE_EMBEDS - 1)
    assert (header["params_total"], header["params_per_token"]) == (parameters, read)
    assert header["untimed_warmup_steps"] == len(tg.Schedule(preset()).warm_up_steps())

def test_Log__log_txt_is_read_by_existing_parsers(first):
    head = first.lines[:6]
    assert {head[0], head[5]} == {"=" * 100} and head[1].startswith("Running Python ")
    versions = VERS.match(head[2])
    assert versions["torch"] == torch.__version__ and versions["ws"] == "1" and versions["gpu"]
    validations = [VAL.match(line) for line in first.lines if "val_loss:" in line]
    steps = [TRN.match(line) for line in first.lines if line.startswith("step:") and "val_loss:" not in line]
    assert [int(m["step"]) for m in steps] == list(range(1, 13)) and steps[0]["total"] == "12"
    for m, event in zip(validations, first.of("val"), strict=True):
        assert (int(m["step"]), m["unit"]) == (event["step"], "ms")
        assert float(m["val"]) == pytest.approx(event["val_loss"], abs=6e-5)              # printed with 4 decimals
    for m in validations + steps:
        assert float(m["avg"]) == pytest.approx(float(m["time"]) / max(1, int(m["step"])), abs=0.51)        # whole ms
    assert sum(bool(PEAK.match(line)) for line in first.lines) == 1
    assert all(f"\n{line}" in f"\n{first.out}" for line in first.lines), "12 steps: the console shows all of them"

def test_report__the_last_line_on_stdout_is_the_result(first):
    result, = first.of("result")
    assert json.loads(first.out.splitlines()[-1]) == dict(
        type="result", val_loss=result["val_loss"], train_time_ms=result["train_time_ms"], run_dirs=[str(first.folder)])
    assert result["val_loss"] == first.of("val")[-1]["val_loss"] and result["steps"] == 12
    assert all(50 < mib < 1_000_000 for mib in result["peak_memory_mib"].values()), "MiB: torch alone needs over 50"
    assert "token ids" in first.out.split(" sample ")[1]

def test_train__several_runs_each_equal_a_fresh_one(first, tmp_path):
    done = run(tmp_path, "--runs=3", "--seed=1", "--sample_tokens=0", "--target_loss=6.1")
    folders = [tmp_path / f"seed_{seed}" for seed in (1, 2, 3)]
    logs = [Run(folder, 0, "", "") for folder in folders]
    assert losses(folders[2]) == losses(first.folder) != losses(folders[0]), "every bit"
    for seed, log in enumerate(logs, 1):
        assert (log.of("header")[0]["seed"], log.of("header")[0]["changed"]["seed"]) == (seed, str(seed))
        phases = [e["name"] for e in log.of("phase") if not e["name"].startswith("warm-up of")]
        before = ["set-up", "validation data", "warm-up"] if seed == 1 else ["reset"]
        assert phases == [*before, "first batch", "evaluation"]
        assert log.events[-1]["type"] == "result" and (log.folder / "train_gpt.py").exists()
    last = json.loads(done.out.splitlines()[-1])
    results = [log.of("result")[0] for log in logs]
    for name in ("val_loss", "train_time_ms"):
        assert last[name] == pytest.approx(np.mean([result[name] for result in results])), "the mean"
    assert last["type"] == "result" and last["run_dirs"] == list(map(str, folders))
    shutil.rmtree(folders[0])
    taken = run(tmp_path, "--runs=2", "--seed=1")
    assert taken.status == 1 and "already contains a log" in taken.err, "logs of later runs are looked for at the start"
    assert not folders[0].exists()

@pytest.mark.parametrize("flags, close", [
    (["--dtype=bfloat16"], 0.05),                                    # 8 bits through 11 layers
    (["--head=emulated"], 0.05),                                     # logits of 4 bits each in y and w
    (["--micro_batch_size=3", "--debug_rows=1", "--row_comms=dense"], 1e-5)])
def test_train__other_precisions_train_alike(first, tmp_path, monkeypatch, flags, close):
    """The same run up to --max_steps, too: same losses, same total in the lines."""
    monkeypatch.setattr(tg, "warm_up", noop)
    other = run(tmp_path / "run", "--seed=3", "--max_steps=5", "--sample_tokens=0", *flags)
    assert other.status == 0, other.err
    for (*what, train_loss, val_loss), (*wanted, loss, val) in zip(losses(other.folder), losses(first.folder)):
        assert what == wanted and (train_loss or val_loss) == pytest.approx(loss or val, rel=close, abs=0)
    assert [e["step"] for e in other.of("val")] == [0, 5] and other.of("result")[0]["steps"] == 5
    assert "step:5/12 " in other.lines[-3] and " sample -" not in other.out

@pytest.mark.parametrize("rows, again", [(tg.EVAL_CHUNK, None), (256, 1)])
def test_finish_run__a_graph_that_is_compiled_in_the_race_is_in_the_result(tmp_path, monkeypatch, rows, again):
    """The run goes on. Validation losses are compiled, in the place of all else; the warm-up had all rows in one."""
    race = tg.train_loop

    def compiled(call, *_):
        return torch.compile(call, backend="eager", dynamic=False) if call is tg.next_token_losses else call

    def race_with_chunks(*args):
        tg.EVAL_CHUNK = rows
        return race(*args)

    monkeypatch.setattr(tg, "compile_fn", compiled)
    monkeypatch.setattr(tg, "train_loop", race_with_chunks)
    done = run(tmp_path / "run", "--compile=1", "--max_steps=2", "--sample_tokens=0")
    assert done.status == 0 and done.of("compiled") == [dict(type="compiled", graphs=1)]
    assert done.of("result")[0].get("recompiles") == again

@pytest.mark.slow
def test_make_profiler__two_ranks(tmp_path):
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
    """Flags of a short run on text: 20 starts a document; few consoles know the letters of the others."""
    stream = random_stream(0, 9000, 21, 20)
    write_shard(tmp_path / "train_0.bin", stream[:7000], 21, 20)
    write_shard(tmp_path / "val_0.bin", stream[7000:], 21, 20)
    lines = [b"%s %d\n" % (base64.b64encode(("aéﬁ🙂"[k % 4] * (1 + k // 4)).encode()), k) for k in range(20)]
    (tmp_path / "vocab.txt").write_bytes(b"".join(lines))
    return [f"--train_files={tmp_path}/train_*.bin", f"--val_files={tmp_path}/val_*.bin", "--max_steps=2"]

def with_console(monkeypatch, folder: Path, text: list[str], before) -> Run:
    """Run on text, with the console that `before` makes in its process. The log ends with the result."""
    monkeypatch.setattr(tg, "warm_up", noop)
    process = Forked(["--preset=tiny", "--device=cpu", f"--run_dir={folder}", *text], before=before)
    done = Run(folder, process.wait(), *process.texts())
    assert done.events[-1]["type"] == "result" and len(done.lines) > 10
    return done

def test_main__any_console_shows_a_sample(text, tmp_path, monkeypatch):
    """Letters that the console does not know are escaped; the last line is the result, whose folder reads as it is.
    Of text, losses are told per byte, too."""
    folder = tmp_path / "läuft ﬁ"
    done = with_console(monkeypatch, folder, text, lambda: sys.stdout.reconfigure(encoding="ascii"))
    assert (done.status, done.err) == (0, "")
    assert re.fullmatch(r"(a|\\[xuU]\w+)+", done.out.split(" sample ")[1].splitlines()[1])
    assert str(folder).encode("ascii", "backslashreplace").decode() in done.out
    assert json.loads(done.out.splitlines()[-1])["run_dirs"] == [str(folder)]
    for event in (*done.of("val"), *done.of("result")):
        assert set(event) == {"type", *KEYS[event["type"]].split(), "val_bpb", "unigram_nats"}
    assert any(f"{event['val_bpb']:.4f} bits per byte" in line for line in done.lines)

@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_print_stdout__a_full_console(text, tmp_path, monkeypatch):
    """Training goes on; without its result the status is 1."""
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
def test_main__a_script_with_closed_or_full_streams_that_is_edited_while_it_starts(tmp_path, streams, status):
    """The log tells all. Its source is the text that runs. No file or socket has the number of a closed stream."""
    script = Path(shutil.copy(ROOT / "train_gpt.py", tmp_path))
    source = script.read_bytes()
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook/sitecustomize.py").write_text(HOOK)
    environment = os.environ | dict(EDITED=str(script), KINDS=str(tmp_path / "kinds"), PYTHONPATH=f"{tmp_path}/hook")
    words = "--preset=tiny --device=cpu --max_steps=1 --val_every=0 --sample_tokens=2 --run_dir=run"
    command = f"exec {sys.executable} train_gpt.py {words} {streams}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, timeout=PROCESS_TIMEOUT_S)
    log = Run(tmp_path / "run", done.returncode, "", "")
    assert done.returncode == status and b"Traceback" not in done.stdout + done.stderr
    assert log.events[-1]["type"] == "result" and log.lines[-1].startswith("peak memory")
    assert script.read_bytes() == source + b"# edited\n" and (tmp_path / "run/train_gpt.py").read_bytes() == source
    assert log.of("header")[0]["source_sha256"] == hashlib.sha256(source).hexdigest()
    assert (tmp_path / "kinds").read_text() == "[False, False, False]"

def test_train__without_a_folder_gets_one_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = Forked(["--preset=tiny", "--device=cpu", "--max_steps=1", "--val_every=0"])
    assert process.wait() == 0
    folder, = (tmp_path / "logs").iterdir()
    result = json.loads(process.texts()[0].splitlines()[-1])
    assert result["run_dirs"] == [f"logs/{folder.name}"] and (folder / "log.txt").exists()

def test_train__all_ranks_write_into_the_folder_of_rank_0(tmp_path, monkeypatch):
    """Also where their clocks differ: a checkpoint has files of all of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tg, "warm_up", noop)
    monkeypatch.setattr(tg.time, "strftime", functools.partial(os.environ.get, "RANK"))
    done = launch(tmp_path, 2, "--run_dir=", "--tables=trigram_embed 3 1000", "--checkpoint_every=2", "--max_steps=4",
                  "--val_every=0", "--sample_tokens=0")
    assert [rank.status for rank in done] == [0, 0], done[0].err
    names = {path.name.rpartition("-")[0] for path in tmp_path.glob("logs/0-*/checkpoints/step-0000002/rows-*")}
    assert names == {"rows-trigram_embed-0of2", "rows-trigram_embed-1of2"}


# ---- inputs that are refused ----------------------------------------------------------------------------------------
START = 511
PIECES = [bytes([i]) if i < 256 else bytes([i - 256, 97]) for i in range(START)]
FILES = ("--preset=tiny", "--train_files=train_0.bin", "--val_files=val_0.bin")

@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Shards of tiny's vocabulary, saved weights, and copies of both with what goes wrong."""
    path = tmp_path_factory.mktemp("inputs")
    for name in ("vocabulary", "old_run"):
        (path / name).mkdir()
    good = tg.synthetic_tokens(0, 40_000, 512, START)
    beyond = good.copy()
    beyond[39_990] = 600
    one_document = np.concatenate([[START], good[1:] % START])
    for name, tokens in {"train_0": good, "val_0": good[:4000], "vocabulary/val_0": good[:4000], "beyond": beyond,
                         "no_start": good % START, "one_document": one_document}.items():
        write_shard(path / f"{name}.bin", tokens, 512, START)
    lines = [b"%s %d" % (base64.b64encode(piece), token) for token, piece in enumerate(PIECES[:-1])]
    (path / "vocabulary/vocab.txt").write_bytes(b"\n".join(lines))
    (path / "a_file").write_text("text")
    (path / "old_run/log.txt").write_text("an old log\n")
    cfg = preset()
    pieces = [*PIECES, b""]
    pieces[ord("~")] = b"no tilde"
    for name, of_tokens in (("w", pieces), ("w_no_vocab", None)):
        tg.save_weights(path / name, "id", cfg, make_engine(cfg), tg.Schedule(cfg).at(0), of_tokens)
    shutil.copytree(path / "w", path / "w_vocab")
    (path / "w_vocab/vocab.txt").write_text("junk")
    return path

@pytest.fixture
def ask(folder, tmp_path, monkeypatch):
    """Run main() as from the command line: the status, one message that helps and holds all parts, no stack trace."""
    def ask(words: list[str], status: int, *parts: str) -> Run:
        process = Forked([f"--run_dir={tmp_path}/run", "--device=cpu", *words])
        done = Run(tmp_path / "run", process.wait(), *process.texts())
        assert done.status == status and "Traceback" not in done.err, done.err
        if status:
            message = re.search(r"^(RunError|ConfigError|DataError|OutOfData): (.*)", done.err, re.M | re.S)
            assert (message[1] == "RunError") == (status == 1)
            check_error(message[2].strip("\n"), *parts)
        assert not list(folder.rglob("*.part")), "no auxiliary file stays"
        return done
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tg, "warm_up", noop)
    monkeypatch.setattr(tg, "STORE_TIMEOUT_S", 0.1)
    return ask

BAD = [                                  # flags after FILES, status, what the message must hold
    (["--sede=1"], 2, "unknown flag", "--sede", "--seed"),
    (["--device=cuda"], 2, "--device=cuda", "no CUDA device", "--preset=pocket"),
    (["--head=fp8"], 2, "--head=fp8", "float32", "8.9", "--head=emulated"),
    (["--vocab_size=500"], 2, "--vocab_size", "500", "512", "omit --vocab_size"),
    (["--resume=old_run"], 2, "old_run/settings.json", "a run of an older version, use the train_gpt.py"),
    (["--bigram_rows=2000000000"], 1, "memory", "at most", "weights 238", "moments", "a smaller model"),
    (["--train_files=none/*.bin"], 2, "data shard none/*.bin", "no regular file", "data/pocket"),
    (["--train_files=formula:512:511:200:1"], 2, "too few training tokens", "200", "--epochs=0"),
    (["--val_files=formula:500:499:9000:1"], 2, "different vocabularies", "(500, 499)"),
    (["--train_files=one_document.bin"], 2, "training data ended", "at most 24 of each document", "larger shards"),
    (["--val_files=vocabulary/*.bin"], 2, "vocab.txt", "510 tokens", "each of the 512", "511"),
    (["--run_dir=a_file"], 1, "writing a_file", "File exists", "another directory"),
    (["--run_dir=/proc/run"], 1, "writing /proc/run", "No such file"),
    (["--run_dir=nul\0"], 1, "writing nul", "null byte"),
    (["--run_dir=old_run"], 1, "run directory old_run", "already contains a log", "another --run_dir"),
    (["--profile=2:4"], 2, "--profile", "0 < a < b < 4", "--profile=1:3"),
    (["--sample=nowhere"], 2, "nowhere/settings.json", "No such file", "a directory written by --save"),
    (["--sample=w_vocab"], 2, "w_vocab/vocab.txt", "sha256"),
    (["--sample=w", "a ~ b"], 2, "prompt", "b'~'", "use other words"),
    (["--sample=w_no_vocab", "words"], 2, "prompt", "b'w'", "vocab.txt"),
]

@pytest.mark.parametrize("flags, status, parts", [(flags, status, parts) for flags, status, *parts in BAD],
                         ids=[" ".join(flags)[:60] for flags, *_ in BAD])
def test_main__a_bad_input(ask, folder, flags, status, parts):
    files = () if flags[0].startswith("--sample=") else FILES
    ask(["--max_steps=4", "--sample_tokens=4", *files, *flags], status, *parts)
    assert (folder / "old_run/log.txt").read_text() == "an old log\n"

def test_main__the_same_inputs_undamaged(ask, tmp_path):
    """So that the table fails for its own reasons."""
    ask([*FILES, "--max_steps=2", "--sample_tokens=4", f"--save={tmp_path}/saved"], 0)
    assert "token ids" in ask([f"--sample={tmp_path}/saved", "--sample_tokens=4"], 0).out
    sampled = ask(["--sample=w", "a few words", "--sample_tokens=4", "--temperature=0.5"], 0).out.splitlines()
    assert [line.strip("-") for line in sampled[:3]] == [" prompt ", "a few words", " sample "]

@pytest.mark.parametrize("flags, status, parts", [
    (["--train_files=beyond.bin"], 2, ("beyond.bin", "ids up to 600")),
    (["--val_files=no_start.bin"], 2, ("no_start.bin", "0 BOS tokens")),
    (["--val_tokens=512000"], 2, ("too few validation tokens", "3584", "--val_tokens=3584")),
    (["--preset=pocket", "--seqs_per_step=1", "--max_steps=2", "--val_tokens=2048", "--val_batch_tokens=2048"], 1,
     ("memory", "GiB", "weights", "gradients", "moments", "working", "--seqs_per_step="))])
def test_train__bad_data_and_too_little_memory_are_known_before_anything_is_built(ask, monkeypatch, flags, status,
                                                                                  parts):
    machine = dict(SC_PAGE_SIZE=4096, SC_PHYS_PAGES=60_000_000 // 4096, SC_CLK_TCK=100)
    monkeypatch.setattr(os, "sysconf", machine.get)
    monkeypatch.setattr(tg, "Engine", None)
    assert not ask([*FILES, *flags], status, *parts).folder.exists()

MEETING = dict(RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")        # what a launcher sets besides

@pytest.mark.parametrize("env, parts", [
    (MEETING | dict(WORLD_SIZE="3"), ("world size", "3 ranks", "--seqs_per_step=8", "--nproc_per_node=2")),
    (MEETING | dict(WORLD_SIZE="16"), ("world size", "16 ranks", "--nproc_per_node=8")),
    (dict(WORLD_SIZE="2"), ("not set: ['RANK', 'MASTER_ADDR', 'MASTER_PORT']", "torchrun", "unset WORLD_SIZE")),
    (dict(RANK="one"), ("one", "RANK", "torchrun")), (dict(WORLD_SIZE="2", RANK="2"), ("0 <= RANK", "2")),
    (dict(SLURM_NTASKS="2"), ("2 Slurm tasks", "srun ... torchrun", "WORLD_SIZE=1")),
    (dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="port"), ("waiting for all", "MASTER_PORT")),
    *((MEETING | dict(WORLD_SIZE="4", LOCAL_WORLD_SIZE="4", RANK=rank, LOCAL_RANK=rank),
       ("more ranks than GPUs", "2 GPUs", "nproc_per_node=2")) for rank in "02")], ids=str)
def test_init_distributed__a_bad_launch(ask, monkeypatch, env, parts):
    """Every rank knows of more ranks than devices, not only those without a GPU, so that rank 0 can say it."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    flags = ["--preset=tiny"]
    if "LOCAL_RANK" in env:                                          # a machine with two GPUs, as far as anyone asks
        monkeypatch.setattr(torch.cuda, "is_available", functools.partial(bool, 1))
        monkeypatch.setattr(torch.cuda, "device_count", functools.partial(int, 2))
        flags.append("--device=auto")
    assert not ask(flags, 2, *parts).folder.exists()

def test_preflight__a_compiler_that_CC_names_is_one(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("CC", "/bin/true")
    monkeypatch.setenv("PATH", "")
    tg.preflight(preset("tiny", compile=1), "run", [], make_comm())

@pytest.mark.parametrize("named", [None, "no-such-compiler"])
def test_preflight__no_compiler_ends_the_run_before_data_are_read(ask, tmp_path, monkeypatch, named):
    """torch takes what CXX names, and nothing else then."""
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    if named:
        (tmp_path / "gcc").symlink_to("/bin/true")
        monkeypatch.setenv("CXX", named)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delattr(tg, "open_data")
    done = ask([*FILES, "--compile=1"], 2, "--compile", "no C++ compiler", "apt install g++", "--compile=0")
    assert not done.folder.exists()


@pytest.mark.parametrize("lacking, changes", [
    ("no C compiler", dict(PATH="")), ("no C compiler", dict(CC="no-such-compiler")), ("no Python.h", {})])
def test_preflight__what_Triton_compiles_with_is_there(monkeypatch, tmp_path, lacking, changes):
    """On a GPU, whatever --compile says; a CPU needs none of it. Headers may also lie where CPATH says."""
    cfg = preset("tiny", compile=0)
    gpu = tg.Communicator(torch.device("cuda", 0))
    for name in ("CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "gcc").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "Python.h").touch()
    folder = tmp_path if "compiler" in lacking else tmp_path / "none"
    monkeypatch.setattr(tg.sysconfig, "get_paths", Mock(return_value=dict(include=str(folder))))
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with expect_error(tg.ConfigError, "kernels for the GPU", lacking, "apt install"):
        tg.preflight(cfg, "run", [], gpu)
    tg.preflight(cfg, "run", [], make_comm())
    for name, value in dict(PATH=tmp_path, CC="/bin/true", CPATH=f"/nowhere:{tmp_path}").items():
        monkeypatch.setenv(name, str(value))
    tg.preflight(cfg, "run", [], gpu)


# ---- runs that fail on the way --------------------------------------------------------------------------------------
def test_train_loop__data_that_end_early_leave_what_was_trained(ask, tmp_path):
    """There are enough tokens by the count, but packing drops the rests of documents."""
    files = ["--preset=tiny", "--train_files=formula:512:511:4200:1", "--sample_tokens=0"]
    done = ask([*files, f"--save={tmp_path}/saved"], 2, "training data ended", "--max_steps", "--epochs=0")
    steps = int(re.search(r"enough for (\d+) steps", done.err)[1])
    result = done.events[-1]
    whole_cycles = steps - steps % tg.Schedule(preset()).cycle_steps
    assert result["steps"] == whole_cycles == done.of("val")[-1]["step"], "known when the next cycle is taken"
    assert result["void"] == "the data ended early" and result["val_loss"] == done.of("val")[-1]["val_loss"]
    assert (tmp_path / "saved/weights.pt").exists(), "what was trained counts"

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
def test_Log__a_full_disk_ends_the_run_with_one_message(ask, monkeypatch, name, room):
    def open_on_full_disk(path, *args, **kwargs):
        if getattr(path, "name", "") == name:
            return FullDisk(path, room)
        return open(path, *args, **kwargs)

    monkeypatch.setattr(tg, "open", open_on_full_disk, raising=False)
    done = ask([*FILES, "--max_steps=4"], 1, "writing", name, "No space left", "write permission", "free disk space")
    whole = (done.folder / name).read_text().split("\n")[:room]
    assert len(whole) == room and "aborted" not in "".join(whole), "what was written before"
    if name == "log.txt":
        assert done.events[-1]["type"] == "aborted"

def test_main__ends_though_a_thread_is_stuck_in_a_read(ask, monkeypatch):
    fromfile = np.fromfile

    def stuck(file, *args, **how):
        if "train" in str(file) and tg.threading.current_thread() is not tg.threading.main_thread():
            time.sleep(600)
        return fromfile(file, *args, **how)

    monkeypatch.setattr(np, "fromfile", stuck)
    done = ask([*FILES, "--comm_timeout=1", "--max_steps=2"], 1, "no result after 1.0 s", "--comm_timeout")
    message = " ".join(done.err.split())                             # in one line, so that it is the last one
    assert done.lines[-1] == f"aborted after step 0: {message}" and done.events[0]["type"] == "header"
    assert done.events[-1]["type"] == "aborted" and " ".join(done.events[-1]["cause"].split()) == message

@pytest.mark.parametrize("capability, native", [((8, 0), "plain"), ((8, 9), "fp8")])
def test_resolve_head_precision__by_device(monkeypatch, capability, native):
    cpu = tg.Communicator(torch.device("cpu"))
    cuda = tg.Communicator(torch.device("cuda", 0))
    cfg = tg.Config(**tg.PRESETS["record"])
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    monkeypatch.setattr(torch.cuda, "get_device_capability", {cuda.device: capability}.get)
    assert (tg.resolve_head_precision(cfg, cpu), tg.resolve_head_precision(cfg, cuda)) == ("plain", native)
    assert tg.resolve_head_precision(tg.Config(head="emulated"), cpu) == "emulated"
