"""Section 12: the clock, the logs, checkpoints and resumed runs, saved weights, samples."""
import functools
import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from common import (Run, SimulatedTime, expect_error, few_layers, full_disk, launch, losses, make_comm, make_engine,
                    make_log, no_large_files, noop, preset, run, unequal, weights)
from safetensors.torch import load_file

import train_gpt as tg

TABLES = "--tables=[('trigram_embed', 3, 500), ('more_bigram_embed', 2, 300)]"
SHORT = ("--max_steps=1", "--val_every=0", "--sample_tokens=0")

@pytest.fixture(scope="module", autouse=True)
def few_layers_without_warm_up() -> Iterable[None]:
    """Make runs short. `Engine.reset` undoes the warm-up: see test_ranks.py."""
    with few_layers(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "warm_up", noop)
        yield

def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())

def run_ok(folder: Path, world_size: int, *flags: str) -> Run:
    """Run on a number of ranks, check that all succeed, and return the run as seen by rank 0."""
    by_rank = launch(folder, world_size, *flags)
    assert [rank.status for rank in by_rank] == [0] * world_size, by_rank[0].err
    return by_rank[0]

@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train 4 steps with checkpoints at steps 2 and 4 and a save; return the directory of both."""
    root = tmp_path_factory.mktemp("intact")
    run_ok(root / "run", 1, TABLES, "--max_steps=4", "--checkpoint_every=2", "--sample_tokens=0",
           f"--save={root / 'save'}")
    return root

@pytest.fixture
def earlier(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact / "run", tmp_path / "earlier"))

def rank_file(run_dir: Path, step: int, rank: int = 0) -> Path:
    return run_dir / tg.CHECKPOINT_DIR / f"step-{step:07d}" / f"rank{rank}.pt"

def step_loss(*seq_sums: float) -> tg.StepLoss:
    """Return a step loss whose next-token loss is half of the multi-token loss."""
    return tg.StepLoss(torch.tensor(seq_sums), torch.tensor(sum(seq_sums) / 2))

def step_tokens(log: tg.Log, step: int) -> int:
    return log.schedule.at(step).seq_len * log.schedule.cfg.seqs_per_step

def metrics(**extra: float) -> SimpleNamespace:
    """Replace a validation set for the log."""
    return SimpleNamespace(text_metrics=lambda loss: extra)


# ---- Clock and log ---------------------------------------------------------------------------------------------------
def test_Clock__adds_up_the_time_between_start_and_stop(monkeypatch) -> None:
    """Start and stop wait 4 s each for the remaining work of the device. Only the wait of stop is training time."""
    time = SimulatedTime(monkeypatch)
    clock = tg.Clock(SimpleNamespace(synchronize=functools.partial(time.work, 4)), 1000.0)
    for total in (8000, 15_000):
        clock.start()
        time.work(3)
        assert clock.ms == pytest.approx(total - 4000)
        clock.stop()
        time.work(50)
        assert clock.ms == pytest.approx(total)

def test_Log__writes_steps_one_cycle_late_and_all_before_a_validation(tmp_path) -> None:
    """A loss is read one cycle, two steps, after its step, so that logging does not synchronize."""
    log, written = make_log(tmp_path)
    tokens = [step_tokens(log, step) for step in range(5)]
    for k in range(1, 6):
        log.step(step_loss(tokens[k - 1] * k, 2.0 * tokens[k - 1]), 100.0 * k)
        assert [e["step"] for e in written.events] == list(range(1, k - 1))
    log.validation(4.25, 512.3456, metrics(val_bpb=1.5, unigram_nats=6.0))
    assert written.events == [
        *(dict(type="step", step=k, train_time_ms=100.0 * k, tokens=sum(tokens[:k]), train_loss=k + 2.0,
               train_loss_next=k / 2 + 1, normuon_lr=log.schedule.at(k - 1).normuon_lr,
               adam_lr=log.schedule.at(k - 1).adam_lr) for k in range(1, 6)),
        dict(type="val", step=5, val_loss=4.25, train_time_ms=512.346, val_bpb=1.5, unigram_nats=6.0)]
    assert written.lines == [f"step:{k}/12 train_time:{100 * k}ms step_avg:100.00ms" for k in range(1, 6)] + [
        "step:5/12 val_loss:4.2500 train_time:512ms step_avg:102.47ms"]
    with pytest.raises(FileExistsError, match="log.txt"):    # of another run
        make_log(tmp_path)

@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_Log__a_nonfinite_loss_raises(tmp_path, monkeypatch, bad) -> None:
    """The logs end with the last loss that was read. A nonfinite validation loss raises too, and is not logged."""
    log, written = make_log(tmp_path)
    log.validation(5.125, 0.0, metrics())
    for loss in (10.0, 10.0, bad, 10.0):
        log.step(step_loss(loss), 0.0)
    with expect_error(tg.TrainerError, "training loss of step 2", str(bad), "--adam_lr"):
        log.step(step_loss(10.0), 0.0)
    log.aborted("a cause of\n two lines")
    assert [e.get("step") for e in written.events] == [0, 1, 2, 5], "the log has all losses that were read"
    assert written.events[-1] == dict(type="aborted", step=5, cause="a cause of\n two lines")
    assert written.lines[-1] == "aborted after step 5: a cause of two lines"
    monkeypatch.setattr(log, "write", full_disk)
    log.aborted("on a full disk")            # the cause is raised, not this
    log, written = make_log(tmp_path / "other")
    with expect_error(tg.TrainerError, "validation loss at step 0", str(bad)):
        log.validation(bad, 0.0, metrics())
    log.close()
    log.aborted("too late")
    assert written.events == []

def test_Log__the_console_has_one_step_line_in_20(tmp_path, capsys) -> None:
    log, written = make_log(tmp_path, num_scheduled_steps=95, num_extension_steps=5)
    for step in range(1, 101):
        log.step(step_loss(2.5 * step_tokens(log, step - 1)), 50.0 * step)
    log.flush()
    log.info("a line of text")
    first, *shown, last = capsys.readouterr().out.splitlines()
    assert first == "step:5/100 train_time:250ms step_avg:50.00ms 5 s left, train_loss:1.250"
    assert [line.split("/")[0] for line in shown] == [f"step:{step}" for step in range(10, 101, 5)]
    assert last == "a line of text" and len(written.lines) == 101, "the log has every step"


# ---- Checkpoints and resumed runs ------------------------------------------------------------------------------------
@pytest.mark.parametrize("world_size, dtype, stops", [(1, "bfloat16", [(3, 2), (8, 8)]), (2, "float32", [(7, 6)])])
def test_load_checkpoint__a_resumed_run_equals_an_uninterrupted_one(tmp_path, world_size, dtype, stops) -> None:
    """Losses, weights and state are equal bit for bit, and the log has the lines up to the checkpoint.

    stops: --max_steps, and the step of the checkpoint, where the last whole cycle ends.
    """
    every_run = "--sample_tokens=0", "--checkpoint_every=100"
    flags = TABLES, "--seed=6", f"--dtype={dtype}", *every_run
    whole = run_ok(tmp_path / "whole", world_size, *flags, f"--save={tmp_path / 'whole_save'}")
    for max_steps, step in stops:
        stopped = run_ok(tmp_path / f"to_{max_steps}", world_size, *flags, f"--max_steps={max_steps}")
        flags = f"--resume={stopped.folder}", *every_run
        assert names(stopped.folder / tg.CHECKPOINT_DIR) == [f"step-{step:07d}"]
        assert f"checkpoint at step {step}" in [e["name"] for e in stopped.of("phase")]
    done = run_ok(tmp_path / "done", world_size, *flags, "--max_steps=0", f"--save={tmp_path / 'save'}")

    assert losses(done.folder) == losses(whole.folder)
    assert weights(tmp_path / "save") == weights(tmp_path / "whole_save")
    for rank in range(world_size):
        found, expected = (torch.load(rank_file(folder, 12, rank)) for folder in (done.folder, whole.folder))
        assert found["state"].keys() == expected["state"].keys() and not unequal(found["state"], expected["state"])
        for label in ("trigram_embed", "more_bigram_embed"):
            assert len(found["rows"][label]["v"]) and not unequal(found["rows"][label], expected["rows"][label])
        if dtype == "bfloat16":
            assert expected["state"]["mlp.mantissa"].count_nonzero() > 1000
    assert done.events[0] == stopped.events[0]
    times = [e["train_time_ms"] for e in done.of("step")]
    assert times[:step] == [e["train_time_ms"] for e in stopped.of("step")][:step] and times == sorted(times)
    resumed = done.of("resumed")
    assert [e["step"] for e in resumed] == [step for _, step in stops]
    assert resumed[-1]["source"] == str(stopped.folder) and resumed[-1]["changed"]["seed"] == "6"
    assert any(line.startswith(f"resuming {stopped.folder} after step {step}") for line in done.lines)

def test_write_checkpoint__the_last_two_are_kept(tmp_path) -> None:
    """The folder of a checkpoint that was not completed is none of them."""
    log, _ = make_log(tmp_path)
    engine = make_engine(log.schedule.cfg)
    for log.steps_done in (2, 4, 6):
        tg.write_checkpoint(engine, tg.Clock(make_comm()), log)
    (tmp_path / "run/checkpoints/step-0000008.part").mkdir()
    assert [path.name for path in tg.checkpoint_paths(tmp_path / "run")] == ["step-0000004", "step-0000006"]
    assert names(tmp_path / "run/checkpoints") == ["step-0000004", "step-0000006", "step-0000008.part"]

def test_write_checkpoint__a_full_disk_ends_the_run(tmp_path) -> None:
    with no_large_files(400_000):            # the copy of the source fits, the checkpoint does not
        done = run(tmp_path, "--checkpoint_every=2", "--sample_tokens=0")
    assert done.status == 1 and done.events[-1]["type"] == "aborted"
    assert "without a checkpoint to continue from" in done.err and not tg.checkpoint_paths(tmp_path)

class CallsMkdir:
    """An object whose pickle calls os.mkdir when it is loaded."""
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("evil_was_here",)

def damage_file(path: Path, damage: str) -> None:
    content = torch.load(path)
    path.unlink()                            # its tensors may still be mapped
    if damage == "no log":
        del content["log"]
    if damage == "code":
        content["facts"] = CallsMkdir()
    torch.save(content, path)
    if damage == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    if damage == "bare code":
        path.write_bytes(pickle.dumps(CallsMkdir()))

@pytest.mark.parametrize("damage", ["no log", "code", "truncated", "bare code"])
def test_read_checkpoint__a_damaged_file_is_refused_and_runs_no_code(earlier, tmp_path, monkeypatch, damage) -> None:
    """The message says which checkpoint to remove, and does not suggest weights_only=False."""
    monkeypatch.chdir(tmp_path)
    damage_file(rank_file(earlier, 4), damage)
    done = run(tmp_path / "again", f"--resume={earlier}")
    folder = rank_file(earlier, 4).parent
    assert done.status == 2 and done.err.startswith(f"ConfigError: {folder / 'rank0.pt'} is damaged"), done.err
    assert f"remove {folder} " in done.err and done.err.count("\n") == 1 and "weights_only" not in done.err
    assert names(tmp_path) == ["earlier"]

REFUSED = {                                  # flags beside --resume -> in the message
    ("--train_files=formula:512:511:50000:2",): "data_sha256 must be as in the earlier run",
    (TABLES.replace("500", "400"),): "tables must be as in the earlier run",
    ("--adam_lr=0.5", "--dtype=float64"): "dtype, adam_lr must be as in the earlier run",
    ("--max_steps=3",): "has trained 4 steps, and this run ends at step 3"}

@pytest.mark.parametrize("flags", REFUSED, ids=[flags[0] for flags in REFUSED])
def test_read_checkpoint__a_run_that_cannot_continue_is_refused_in_one_sentence(intact, tmp_path, flags) -> None:
    done = run(tmp_path / "again", f"--resume={intact / 'run'}", *flags)
    assert done.status == 2 and done.err.startswith("ConfigError: ") and done.err.count("\n") == 1, done.err
    assert REFUSED[flags] in done.err and names(tmp_path) == []

def test_read_checkpoint__another_number_of_ranks_or_no_checkpoint(earlier, tmp_path) -> None:
    for done in launch(tmp_path / "again", 2, f"--resume={earlier}"):
        assert done.status == 2 and "needs 1 ranks, not 2" in done.err and done.err.count("\n") == 1, done.err
    shutil.rmtree(earlier / tg.CHECKPOINT_DIR)
    done = run(tmp_path / "again", f"--resume={earlier}")
    assert done.status == 2 and "has no checkpoint yet" in done.err and done.err.count("\n") == 1, done.err
    assert names(tmp_path) == ["earlier"]

def test_train__resumes_with_other_versions(earlier, tmp_path) -> None:
    """After the last checkpoint was removed, from the one before. --micro_batch_size may differ silently."""
    shutil.rmtree(rank_file(earlier, 4).parent)
    path = rank_file(earlier, 2)
    content = torch.load(path)
    content["facts"] |= dict(source_sha256="0" * 64, torch="1.0")
    torch.save(content, path)
    done = run_ok(tmp_path / "again", 1, f"--resume={earlier}", "--micro_batch_size=3")
    resumed, = done.of("resumed")
    assert (resumed["step"], resumed["torch"]) == (2, torch.__version__), "and source_sha256, as in a header"


# ---- Saves -----------------------------------------------------------------------------------------------------------
def test_save_weights__the_names_of_parameter_specs_and_the_rows_of_tables(intact) -> None:
    """The weights of the checkpoint at the same step; several ranks: test_ranks.py."""
    found = load_file(intact / "save/weights.safetensors")
    cfg = preset(tables=tg.parse_value("tables", TABLES.removeprefix("--tables=")))
    content = torch.load(rank_file(intact / "run", 4))
    shapes, expected = {}, {}
    for spec in tg.parameter_specs(cfg):
        if spec.optimizer == "rowwise":
            stored = content["rows"][spec.label]
            expected |= {f"{spec.label}.ids": stored["local_rows"], f"{spec.label}.rows": stored["rows"]}
            assert len(stored["rows"]) == int((stored["last_update"] > 0).sum()) > 100
        else:
            shapes[spec.label] = spec.shape
            expected[spec.label] = content["state"][spec.label]
    expected["embed"] = expected["lm_head"].t()
    assert found.keys() == expected.keys() and not unequal(found, expected)
    assert {label: tuple(found[label].shape) for label in shapes} == shapes
    assert names(intact / "save") == ["settings.json", "weights.safetensors"] and names(intact) == ["run", "save"]
    sizes = {name: getattr(cfg, name) for name in ("vocab_size", "padded_vocab", "bos_id", "bigram_rows")}
    assert tg.load_settings(intact / "save") == tg.load_settings(intact / "run") | sizes

def test_save_weights__the_vocabulary(tmp_path) -> None:
    log, _ = make_log(tmp_path, vocab_size=5, bos_id=3, save=str(tmp_path / "save"))
    token_bytes = [b"a", b" \n", b"\xff", b"", b"xyz"]
    assert tg.save_weights(log, make_engine(log.schedule.cfg), token_bytes) == str(tmp_path / "save")
    assert tg.read_token_bytes(tmp_path / "save", log.schedule.cfg) == token_bytes

def test_save_weights__a_directory_that_appears_meanwhile_is_not_changed(tmp_path, monkeypatch) -> None:
    full_weights = tg.full_weights

    def create_directory(*args: Any) -> dict[str, torch.Tensor]:
        (tmp_path / "save/theirs").mkdir(parents=True)
        return full_weights(*args)

    monkeypatch.setattr(tg, "full_weights", create_directory)
    done = run_ok(tmp_path / "run", 1, *SHORT, f"--save={tmp_path / 'save'}")
    partial, = tmp_path.glob("save.*.part")
    assert f"weights saved in {partial}" in done.lines and names(tmp_path / "save") == ["theirs"]
    assert load_file(partial / "weights.safetensors")
    refused = run(tmp_path / "again", *SHORT, f"--save={tmp_path / 'save'}")
    assert refused.status == 2 and "exists: choose a new directory" in refused.err and not refused.folder.exists()


# ---- Samples ---------------------------------------------------------------------------------------------------------
def sampled(logits_of: Callable[[list[int]], torch.Tensor], num_tokens: int = 5, *, temperature: float = 0.8,
            prompt: Iterable[int] = (), top_k: int = 0, token_bytes: list[bytes] | None = None,
            all_gather: Callable[[Any], list] | None = None, vocab_size: int = 10) -> str:
    """Generate a sample from an engine that returns logits_of(context), and large ones for the padding."""
    cfg = preset(vocab_size=vocab_size, bos_id=vocab_size - 1)

    def next_logits(tokens: list[int], step_cfg: tg.StepConfig | None) -> torch.Tensor:
        logits = torch.full((cfg.padded_vocab,), 1e4)
        logits[:vocab_size] = logits_of(tokens)
        return logits
    comm = SimpleNamespace(all_gather=all_gather or make_comm().all_gather)
    engine = SimpleNamespace(cfg=cfg, next_logits=next_logits, comm=comm)
    return tg.generate(engine, None, token_bytes, num_tokens, temperature, prompt, top_k)

def count_up(tokens: list[int]) -> torch.Tensor:
    """Return logits for which the next id follows each token with certainty, and BOS follows token 4."""
    next_token = {9: 0, 4: 9}.get(tokens[-1], tokens[-1] + 1)
    return torch.where(torch.arange(10) == next_token, 0.0, -1e4)

def test_generate__text_if_there_is_a_vocabulary_else_token_ids() -> None:
    """It ends after num_tokens or at a BOS token, without the prompt."""
    token_bytes = [b"a", b"bc", b"\xc3", b"\xa4", b"\xff", b"x", b"", b"", b"", b""]
    assert sampled(count_up, token_bytes=token_bytes) == "abc\u00e4\ufffd", "five tokens, bytes joined before decoding"
    assert sampled(count_up, 3) == " 0 1 2"
    assert sampled(count_up, 9) == " 0 1 2 3 4", "ends at a BOS token"
    assert sampled(count_up, prompt=[7, 1]) == " 2 3 4"
    two_ranks = {0: [4, 1], 2: [3, 3]}.get
    assert sampled(count_up, 2, all_gather=two_ranks) == " 1 3", "the lowest token of all ranks"

@pytest.mark.parametrize("temperature, top_k, logits", [
    (0.8, 0, [1.0, 0.0, 0.5]), (0.8, 2, [1.0, -math.inf, 0.5]), (0.0, 9, [1.0, -math.inf, -math.inf])])
def test_generate__samples_from_the_softmax_of_the_likeliest_tokens(temperature, top_k, logits) -> None:
    """Samples of one seed are equal, and frequencies match the softmax of these logits. 0 is the likeliest token."""
    def next_logits(_: list[int]) -> torch.Tensor:
        return torch.tensor([1.0, 0.0, 0.5, -1e4])

    count = 1500
    texts = [sampled(next_logits, num_tokens, temperature=temperature, top_k=top_k, vocab_size=4,
                     token_bytes=[b"a", b"b", b"c", b""]) for num_tokens in (count, 100)]
    assert len(texts[0]) == count and texts[0].startswith(texts[1]), "the same seed gives the same sample"
    odds = [math.exp(logit / (temperature or 1)) for logit in logits]
    for letter, odd in zip("abc", odds):
        p = odd / sum(odds)
        assert texts[0].count(letter) == pytest.approx(count * p, abs=4 * math.sqrt(count * p * (1 - p)))
