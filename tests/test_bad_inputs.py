"""Bad inputs, each through main() as from the command line: exit status, one message that helps, no stack trace.

The room tests ask the functions; here it is the whole way, so that nothing on it turns a message into something else.
"""
import base64
import os
import re
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from common import call

import train_gpt as tg

VOCAB, START = 512, 511
FILES = ("--train_files=train_*.bin", "--val_files=val_*.bin")
STAGE = "128 1 3 1.0 1.0,0.5 1.0,0.0"


def shard(path: str, tokens=None, vocab=VOCAB, start=START, magic=tg.SHARD_MAGIC, version=1, count=None,
          extra=b"") -> None:
    tokens = tg.formula_tokens(0, 40_000, VOCAB, START) if tokens is None else tokens
    words = np.zeros(256, "<i4")
    words[:5] = magic, version, len(tokens) if count is None else count, vocab, start
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_bytes(words.tobytes() + np.asarray(tokens, "<u2").tobytes() + extra)


def vocabulary(folder: str, lines: list[bytes]) -> None:
    shard(f"{folder}/train_0.bin")
    Path(folder, "vocab.txt").write_bytes(b"\n".join(lines))


PIECES = [b"%s %d" % (base64.b64encode(bytes([i]) if i < 256 else bytes([i - 256, 97])), i) for i in range(VOCAB - 1)]


def write_data() -> None:
    """Every file of the table below, in the current folder."""
    good, doc_starts = tg.formula_tokens(0, 40_000, VOCAB, START), np.full(500, START)
    shard("train_0.bin")
    shard("val_0.bin", good[:4000])
    shard("magic.bin", magic=20240521), shard("version.bin", version=2)
    shard("longer.bin", extra=b"x"), shard("count_0.bin", count=0), shard("start_512.bin", start=512)
    shard("cut.bin", count=50_000), shard("negative.bin", vocab=-1), shard("other_vocab.bin", vocab=600)
    shard("beyond.bin", np.where(np.arange(40_000) == 39_990, 600, good))
    shard("no_start.bin", good % START), shard("gpt2.bin", good % START, vocab=0, start=0)
    shard("mixed_0.bin"), shard("mixed_1.bin", vocab=600)
    shard("short.bin", good[:200]), shard("one_document.bin", np.concatenate([[START], good[1:] % START]))
    shard("starts_only.bin", np.concatenate([doc_starts, good[:10]]))
    Path("empty.bin").touch(), Path("folder.bin").mkdir(), Path("header_only.bin").write_bytes(b"\0" * 1000)
    Path("dangling.bin").symlink_to("nowhere"), os.mkfifo("fifo.bin")
    Path("loop.bin").symlink_to("loop.bin"), Path("a_file").write_text("text")
    vocabulary("v_short", PIECES[:-1]), vocabulary("v_base64", [b"%%% 0", *PIECES[1:]])
    vocabulary("v_more", [*PIECES, b"QQ== 511"]), vocabulary("v_bytes", [b"\xff\xfe 0", *PIECES[1:]])
    vocabulary("v_empty", []), vocabulary("v_words", [b"QQ== 0 1", *PIECES[1:]])
    vocabulary("v_minus", [*PIECES, b"QQ== -1"])
    Path("old_run").mkdir(), Path("old_run/log.txt").write_text("an old log\n")
    Path("old_run/log.jsonl").touch()


def write_weights() -> None:
    """Saved weights of the tiny model, and damaged copies of them; test_files.py has more."""
    header = [tg.ShardHeader("shard", 1, VOCAB, START)]
    cfg = tg.resolve(tg.Config(**tg.PRESETS["tiny"]), header, header)
    pieces = [bytes([i]) if i < 256 else bytes([i - 256, 97]) for i in range(VOCAB - 1)] + [b""]
    pieces[ord("~")] = b"no tilde"
    save(cfg, "w", pieces)
    gpt2 = tg.replace(cfg, vocab_size=tg.GPT2_VOCAB, document_start=tg.GPT2_DOCUMENT_START, padded_vocab=50_304)
    save(gpt2, "w_gpt2", None)
    save(cfg, "w_no_vocab", None)
    for name in ("w_none", "w_cut", "w_vocab", "w_type"):
        shutil.copytree("w", name)
    Path("w_none/weights.pt").unlink()
    os.truncate("w_cut/weights.pt", 5000)
    Path("w_vocab/vocab.txt").write_text("junk")
    settings = Path("w_type/settings.json")
    settings.write_text(settings.read_text().replace('"model_dim": "32"', '"model_dim": "wide"'))
    Path("w_empty").mkdir()


def save(cfg: tg.Config, name: str, pieces: list[bytes] | None) -> None:
    saved = tg.Executor(cfg, tg.Fabric(torch.device("cpu")), tg.attention_reference, "plain")
    tg.save(Path(name), "id", "tiny", cfg, saved, tg.Schedule(cfg).at(0), pieces)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, before = tmp_path_factory.mktemp("inputs"), os.getcwd()
    os.chdir(path)
    write_data(), write_weights()
    os.chdir(before)
    return path


@pytest.fixture
def ask(folder, monkeypatch):
    """Runs main(); checks status and message: one error, found / expected / do all filled, the parts in it."""
    def ask(argv, status: int, *parts: str) -> str:
        done = call(argv)
        assert done.status == status and "Traceback" not in done.err, done.err
        kinds = "RunError" if status == 1 else "ConfigError|DataError|DataEnded"
        message = re.search(f"^({kinds}): .*", done.err, re.MULTILINE | re.DOTALL)       # torch may say something first
        assert message, done.err
        first, *lines = message[0].rstrip("\n").split("\n")
        assert [line.split(":")[0] for line in lines] == ["  found", "  expected", "  do"], done.err
        assert all(line.partition(":")[2].strip() not in ("", "None") for line in (first, *lines)), done.err
        missing = [part for part in parts if part not in done.err]
        assert not missing, f"{missing} not in {done.err}"
        return done.err
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tg, "warm_up", lambda *_: None)                       # no matter to any of these
    monkeypatch.setattr(tg, "STORE_PATIENCE", 0.1)
    return ask


BAD = [                                  # flags after --preset=tiny, status, what the message must hold
    # flags: each kind of check once, for test_config.py asks the function
    (["--sede=1"], 2, ("unknown flag", "--sede", "--seed")),
    (["--no_such_thing_at_all"], 2, ("unknown flag", "--no_such_thing_at_all", "nearest: --")),
    (["-x"], 2, ("unknown flag", "-x")),
    (["seed=1"], 2, ("a word without a flag", "seed=1", "--field=value")),
    (["--seed"], 2, ("--seed", "expected one argument")),
    (["--seed="], 2, ("--seed", "''", "int")),
    (["--seed=-1"], 2, ("--seed", "-1", "0 to 2,147,483,647", "--seed=0")),
    (["--adam_lr=nan"], 2, ("--adam_lr", "'nan'")),
    (["--dtype=float16"], 2, ("--dtype", "'float16'", "bfloat16")),
    (["--device=cuda"], 2, ("--device=cuda", "no CUDA device", "--preset=pocket")),
    (["--head=fp8"], 2, ("--head=fp8", "float32", "8.9", "--head=emulated")),
    (["--preset="], 2, ("--preset", "record", "pocket", "tiny")),
    (["--resume="], 2, ("--resume", "an empty name", "leave it out")),
    (["--resume=nowhere"], 2, ("nowhere/settings.json", "No such file")),
    (["--resume=old_run"], 2, ("old_run/settings.json", "No such file", "one of an older trainer needs that trainer")),
    (["--resume=nul\0"], 2, ("settings.json", "embedded null byte")),
    (["--profile=1:2", "--checkpoint_every=2"], 2, ("--checkpoint_every", "0 with --profile")),
    (["--num_slots=7"], 2, ("--stages", "128", "112")),
    ([f"--stages={STAGE};128 3 1 1 1 1"], 2, ("--stages", "short < long window")),
    (["--tables=trigram_embed 3 1"], 2, ("--tables", "2 rows or more")),
    (["--padded_vocab=100"], 2, ("--padded_vocab", "100", "512")),
    (["--vocab_size=600"], 2, ("--vocab_size", "600", "512", "header")),
    (["--document_start=5"], 2, ("--document_start", "5", "511", "header")),
    # memory
    (["--bigram_rows=2000000000"], 1, ("memory", "GiB to use", "weights 238", "moments", "a smaller model")),
    # shards
    (["--train_files=nothing_*.bin"], 2, ("nothing_*.bin as a shard", "no such file", "data/cached_fineweb10B.py")),
    (["--train_files="], 2, ("as a shard", "no such file")),
    (["--train_files=folder.bin"], 2, ("folder.bin as a shard", "no regular one")),
    (["--train_files=dangling.bin"], 2, ("dangling.bin as a shard", "no such file")),
    (["--train_files=d*.bin"], 2, ("dangling.bin as a shard", "no such file")),
    (["--train_files=loop.bin"], 2, ("loop.bin as a shard", "no such file")),
    (["--train_files=fifo.bin"], 2, ("fifo.bin as a shard", "no regular one")),
    (["--val_files=nothing"], 2, ("nothing as a shard", "no such file")),
    (["--train_files=empty.bin"], 2, ("empty.bin", "0 bytes", "1024", "20240520")),
    (["--train_files=header_only.bin"], 2, ("header_only.bin", "1000 bytes")),
    (["--train_files=magic.bin"], 2, ("magic.bin", "20240521", "20240520")),
    (["--train_files=version.bin"], 2, ("version.bin", "20240520, 2,")),
    (["--train_files=longer.bin"], 2, ("longer.bin", "81025", "20240520, 1, 40000")),
    (["--train_files=cut.bin"], 2, ("cut.bin", "81024", "20240520, 1, 50000", "fetch or write it again")),
    (["--train_files=count_0.bin"], 2, ("count_0.bin", "81024 bytes")),
    (["--train_files=negative.bin"], 2, ("negative.bin", "-1")),
    (["--train_files=start_512.bin"], 2, ("start_512.bin", "0 of them document starts")),
    (["--train_files=mixed_*.bin"], 2, ("different vocabularies", "600", "mixed_1.bin", "mixed_0.bin")),
    (["--train_files=other_vocab.bin"], 2, ("different vocabularies", "val_0.bin", "other_vocab.bin")),
    (["--train_files=beyond.bin"], 2, ("beyond.bin", "tokens up to 600", "below the vocabulary size 512")),
    (["--train_files=no_start.bin"], 2, ("no_start.bin", "0 of them document starts", "511")),
    (["--train_files=gpt2.bin", "--val_files=gpt2.bin"], 2, ("gpt2.bin", "0 of them document starts", "50256")),
    (["--train_files=short.bin"], 2, ("too few training tokens", "200", "672", "--epochs=0")),
    (["--train_files=short.bin", "--epochs=0"], 2, ("too small", "264 for", "--stages")),
    (["--train_files=one_document.bin"], 2, ("training data ended", "at most 24 of each document", "larger shards")),
    (["--val_files=short.bin"], 2, ("too few validation tokens", "1024", "--val_batch_tokens")),
    (["--val_tokens=512000"], 2, ("too few validation tokens", "3584", "512000", "--val_tokens=3584")),
    (["--num_scheduled_steps=9000000", "--max_steps=0"], 2, ("40000 in 1 shards", "for 9000003 steps")),
    # vocabularies
    (["--val_files=v_base64/*.bin"], 2, ("vocab.txt", "0 tokens before a line that is none", "base64")),
    (["--val_files=v_words/*.bin"], 2, ("vocab.txt", "0 tokens before a line that is none")),
    (["--val_files=v_bytes/*.bin"], 2, ("vocab.txt", "0 tokens before a line that is none")),
    (["--val_files=v_short/*.bin"], 2, ("vocab.txt", "510 tokens", "all of 512", "511")),
    (["--val_files=v_more/*.bin"], 2, ("vocab.txt", "512 tokens", "all of 512")),
    (["--val_files=v_minus/*.bin"], 2, ("vocab.txt", "512 tokens")),
    (["--val_files=v_empty/*.bin"], 2, ("vocab.txt", "0 tokens")),
    # folders
    (["--run_dir=a_file"], 1, ("writing a_file", "File exists", "another folder")),
    (["--run_dir=a_file/run"], 1, ("writing a_file/run", "Not a directory")),
    (["--run_dir=/proc/run"], 1, ("writing /proc/run", "No such file")),
    (["--run_dir=" + "x" * 300], 1, ("File name too long",)),
    (["--run_dir=nul\0"], 1, ("writing nul", "null byte")),
    (["--run_dir=old_run"], 1, ("run directory old_run", "the log of a run", "without one")),
    (["--save=a_file"], 2, ("--save=a_file", "a free name", "nothing is overwritten")),
    (["--save=w"], 2, ("--save=w", "a name that is taken")),
    (["--save=/proc/weights"], 2, ("/proc/weights", "No such file")),
    (["--save=nul\0"], 2, ("nul", "null byte")),
    # samples
    (["--sample=nowhere"], 2, ("nowhere/settings.json", "No such file", "the folder of a run or of a save")),
    (["--sample=w_empty"], 2, ("w_empty/settings.json", "No such file")),
    (["--sample=a_file"], 2, ("a_file/settings.json", "Not a directory")),
    (["--sample=w_type"], 2, ("--model_dim", "'wide'", "int, features")),
    (["--sample=w", "x", "--model_dim=64"], 2, ("--sample", "64", "what was trained", "leave")),
    (["--sample=w", "x", "--preset=tiny"], 2, ("--sample", "leave the others out")),
    (["--sample=w_none"], 2, ("w_none/weights.pt", "no such file")),
    (["--sample=w_cut"], 2, ("w_cut/weights.pt", "another content")),
    (["--sample=w_vocab"], 2, ("w_vocab/vocab.txt", "sha256")),
    (["--sample=w", "a ~ b"], 2, ("prompt", "b'~'", "use other words")),
    (["--sample=w_no_vocab", "words"], 2, ("prompt", "b'w'", "vocab.txt")),
    (["--sample=w", "two", "words"], 2, ("words",)),
]


@pytest.mark.parametrize("flags, status, parts", BAD, ids=[" ".join(flags)[:60] for flags, *_ in BAD])
def test_a_bad_input(ask, folder, tmp_path, flags, status, parts):
    files = FILES if not any("sample" in flag or flag in ("--vocab_size", "--padded") for flag in flags) else ()
    start = ["--preset=tiny"] if not any(flag.startswith("--sample=") for flag in flags) else []
    own = [] if any(flag.startswith("--run_dir") for flag in flags) else [f"--run_dir={tmp_path / 'run'}"]
    ask([*start, "--max_steps=4", "--sample_tokens=4", *files, *own, *flags], status, *parts)
    assert (folder / "old_run/log.txt").read_text() == "an old log\n"
    assert not list(tmp_path.rglob(".reserve")), "no auxiliary file stays"


def test_the_same_inputs_undamaged_are_accepted(ask, folder, tmp_path):
    """So that the table fails for its own reasons; and a finished run is not a run directory for the next."""
    words = ["--preset=tiny", "--max_steps=4", "--sample_tokens=4", *FILES, f"--run_dir={tmp_path / 'run'}",
             f"--save={tmp_path / 'saved'}"]
    assert call(words).status == 0
    sample = call([f"--sample={tmp_path / 'saved'}", "--sample_tokens=4"])
    assert sample.status == 0 and "token ids" in sample.out, sample.err
    sample = call(["--sample=w", "a few words", "--sample_tokens=4"])
    assert sample.status == 0 and sample.out.startswith("a few words"), sample.err
    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    ask(words[:-1], 1, "run directory", "the log of a run", "another --run_dir")
    ask([*words, f"--run_dir={tmp_path / 'other'}"], 2, "--save=", "a name that is taken")
    assert not (tmp_path / "other").exists()
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == log


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="nothing is forbidden to root")
@pytest.mark.parametrize("flag, status", [("--train_files", 2), ("--run_dir", 1), ("--save", 2)])
def test_what_may_not_be_read_or_written(ask, tmp_path, flag, status):
    locked = tmp_path / "locked"
    locked.mkdir()
    shard(str(locked / "train_0.bin"))
    (locked / "train_0.bin").chmod(0)
    locked.chmod(0o500)
    value = locked / ("train_0.bin" if flag == "--train_files" else "new")
    flags = {"--run_dir": tmp_path / "run", flag: value}
    ask(["--preset=tiny", *FILES, *(f"{name}={value}" for name, value in flags.items())], status, "Permission denied")
    locked.chmod(0o700)


MEETING = dict(RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")        # what a launcher sets besides


@pytest.mark.parametrize("env, parts", [
    (MEETING | dict(WORLD_SIZE="3"), ("number of ranks", "3", "num_slots=8", "--nproc_per_node=2")),
    (MEETING | dict(WORLD_SIZE="16"), ("number of ranks", "16", "--nproc_per_node=8")),
    (dict(WORLD_SIZE="2"), ("launch", "without ['RANK', 'MASTER_ADDR', 'MASTER_PORT']", "unset WORLD_SIZE")),
    (dict(RANK="one"), ("one", "RANK", "torchrun")),
    (dict(WORLD_SIZE="0"), ("WORLD_SIZE", "torchrun")),
    (dict(WORLD_SIZE="2", RANK="2"), ("RANK", "2", "torchrun")),
    (dict(RANK="-1"), ("RANK", "-1")),
    (dict(RANK="0", WORLD_SIZE="2"), ("launch", "without ['MASTER_ADDR', 'MASTER_PORT']", "torchrun")),
    (dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="port"), ("waiting for all", "MASTER_PORT")),
], ids=str)
def test_a_bad_launch(ask, tmp_path, monkeypatch, env, parts):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    ask(["--preset=tiny", f"--run_dir={tmp_path / 'run'}"], 2, *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("local_rank", [0, 1, 2])
def test_more_ranks_than_devices(ask, tmp_path, monkeypatch, local_rank):
    """Every rank of the node knows it, not only those without a GPU, so that rank 0 can say it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ranks = dict(RANK=local_rank, LOCAL_RANK=local_rank, WORLD_SIZE=4, LOCAL_WORLD_SIZE=4)
    for name, value in (MEETING | ranks).items():
        monkeypatch.setenv(name, str(value))
    ask(["--preset=tiny", f"--run_dir={tmp_path / 'run'}"], 2, "more ranks than devices", "2 GPUs", "nproc_per_node=2")


def test_too_little_memory(ask, tmp_path, monkeypatch):
    """Before anything is built: the estimate by part, and flags that would fit (test_device.py sees that they do)."""
    monkeypatch.setattr(tg.Fabric, "total_memory", lambda self: 60e6)
    monkeypatch.setattr(tg, "Executor", None)
    flags = ["--preset=pocket", *FILES, "--num_slots=1", "--max_steps=2", "--val_tokens=2048",
             "--val_batch_tokens=2048", f"--run_dir={tmp_path / 'run'}"]
    ask(flags, 1, "memory", "GiB", "weights",
        "gradients", "moments", "working", "--num_slots=", "--slots_per_micro_batch=1")


@pytest.mark.parametrize("package, parts", [
    (None, ("ModuleNotFoundError", "install tiktoken")), ("offline", ("OSError", "no network", "TIKTOKEN_CACHE_DIR"))])
def test_gpt2_tokens_without_package_or_network(ask, monkeypatch, package, parts):
    """GPT-2 ids without vocab.txt need tiktoken, and tiktoken a network or what it has fetched before."""
    fake = types.ModuleType("tiktoken")

    def get_encoding(name: str):
        raise OSError("no network")
    fake.get_encoding = get_encoding
    monkeypatch.setitem(sys.modules, "tiktoken", fake if package else None)
    monkeypatch.setattr(tg, "Executor", None)
    ask(["--sample=w_gpt2", "hello"], 2, *parts)


@pytest.mark.parametrize("flags, parts", [
    (["--train_files=beyond.bin"], ("beyond.bin", "tokens up to 600")),
    (["--train_files=no_start.bin"], ("no_start.bin", "0 of them document starts")),
    (["--val_files=no_start.bin"], ("no_start.bin", "0 of them document starts")),
    (["--val_tokens=512000"], ("too few validation tokens", "3584")),
    (["--epochs=0", "--train_files=short.bin"], ("too small", "392 for")),
], ids=" ".join)
def test_bad_data_are_known_before_anything_is_built(ask, tmp_path, monkeypatch, flags, parts):
    monkeypatch.setattr(tg, "fit_memory", None)
    monkeypatch.setattr(tg, "Executor", None)
    ask(["--preset=tiny", *FILES, f"--run_dir={tmp_path / 'run'}", *flags], 2, *parts)
    assert not (tmp_path / "run").exists()


def test_a_shard_for_training_and_validation_is_said_aloud(ask, tmp_path):
    done = call(["--preset=tiny", "--max_steps=2", "--sample_tokens=0", "--train_files=train_0.bin",
                 "--val_files=train_0.bin", f"--run_dir={tmp_path / 'run'}"])
    assert done.status == 0 and "trained on and validated with: train_0.bin, 1 such shards" in done.out
