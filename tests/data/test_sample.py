"""data/sample.py: greedy text is the argmax of the reference on the saved weights; errors are one sentence."""
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from common import launch, randn
from data_common import TEXT
from reference import Reference, bigram_rows
from safetensors.torch import load_file, save_file

import train_gpt as tg

import encoders                                               # noqa: E402
import sample                                                 # noqa: E402
import tokenize_text                                          # noqa: E402

TABLES = "[('trigram_embed', 3, 500), ('pair_embed', 2, 300)]"
PROMPTS = ["line 7", "", "short ö text\n line"]               # also bytes that are no words

@pytest.fixture(scope="module")
def make_save(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Train on a text, and return the directory of --save."""
    root = tmp_path_factory.mktemp("saves")
    (root / "in.txt").write_text("".join(np.random.default_rng(0).permutation(20 * TEXT.splitlines(True))))
    tokenize_text.main([str(root / "in.txt"), f"--out={root / 'set'}", "--vocab_size=300", "--val_share=0.1",
                        "--tokenizer=bpe"])

    def make(dtype: str = "float64", world_size: int = 1) -> Path:
        folder = root / f"{dtype}_{world_size}"
        flags = [f"--{split}_files={root}/set/set_{split}_*.bin" for split in ("train", "val")]
        if folder.exists():
            return folder
        runs = launch(root / f"{folder.name}_run", world_size, *flags, f"--tables={TABLES}", f"--dtype={dtype}",
                      "--epochs=0", "--val_every=0", "--sample_tokens=0", f"--save={folder}")
        assert [run.status for run in runs] == [0] * world_size, runs[0].err
        # Otherwise one token is the likeliest after every text.
        weights = load_file(folder / "weights.safetensors")
        weights["lm_head"] *= randn(*weights["lm_head"].shape).to(weights["lm_head"].dtype)
        for label in ("trigram_embed.rows", "pair_embed.rows"):
            weights[label] *= 1000
        save_file(weights, folder / "weights.safetensors")
        return folder

    return make

def text_of(capsys: pytest.CaptureFixture[str], folder: Path, prompt: str, *flags: str) -> str:
    capsys.readouterr()
    sample.main([str(folder), prompt, "--device=cpu", "--tokens=12", *flags])
    return capsys.readouterr().out.removesuffix("\n")

def greedy(folder: Path, prompt: str, without: str = "") -> str:
    """Continue a prompt by the likeliest token of the reference, up to BOS, at most 12 times.

    without: a table whose rows count as 0.
    """
    cfg = tg.make_config(tg.load_settings(folder))
    weights = load_file(folder / "weights.safetensors")
    rows = {table.label: [weights.pop(f"{table.label}.{part}") for part in ("ids", "rows")] for table in cfg.tables}
    naive = Reference(cfg, weights)
    for label, (ids, values) in rows.items():
        assert len(ids) > 100
        naive.ngrams[label].p[ids] = values.double() * (label != without)
    pieces = tg.read_token_bytes(folder, cfg)
    file = folder.parent / "set/tokenizer.json"
    encoder = encoders.read_tokenizer(file)
    tokens = [cfg.bos_id, *encoder.encode_text(prompt)]
    first = len(tokens)
    schedule = tg.Schedule(cfg)
    for _ in range(12):
        seq = torch.tensor([tokens])
        bigrams = torch.from_numpy(bigram_rows(np.array(tokens), cfg.bigram_rows))
        batch = tg.Batch({}, seq, seq, torch.tensor([[0, len(tokens)]]), dict(bigram_embed=bigrams[None]))
        activations = {}
        with torch.no_grad():
            naive.losses(naive.leaves(), batch, 0, schedule.at(schedule.end_step), (1.0,), activations)
        tokens.append(int(activations["logits"][-1, :cfg.vocab_size].argmax()))
        if tokens[-1] == cfg.bos_id:
            break
    text = prompt + b"".join(pieces[token] for token in tokens[first:]).decode(errors="replace")
    # A terminal executes control characters.
    return re.sub("(?![\n\t])[\0-\x1f\x7f-\x9f]", lambda sign: f"\\x{ord(sign[0]):02x}", text)

@pytest.mark.parametrize("dtype", ["float64", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_main__greedy_text_is_the_argmax_of_the_reference(make_save, capsys, dtype) -> None:
    """On a CPU, bf16 weights are used in f32."""
    texts = [text_of(capsys, make_save(dtype), prompt, "--temperature=0") for prompt in PROMPTS]
    assert texts == [greedy(make_save(dtype), prompt) for prompt in PROMPTS]
    assert len(set(texts)) == 3 and all(text != prompt for text, prompt in zip(texts, PROMPTS))
    for label in ("trigram_embed", "pair_embed"):
        assert texts != [greedy(make_save(dtype), prompt, without=label) for prompt in PROMPTS], "it has an effect"

def test_main__a_save_of_two_ranks_continues_alike(make_save, capsys) -> None:
    one, two = ([text_of(capsys, make_save("float64", ranks), prompt, "--temperature=0") for prompt in PROMPTS]
                for ranks in (1, 2))
    assert one == two

def test_main__the_seed_and_top_k_decide_the_draw(make_save, capsys) -> None:
    texts = [text_of(capsys, make_save(), "line", "--temperature=5", *flags) for flags in (
        ["--seed=1"], ["--seed=1"], ["--seed=2"], ["--seed=2", "--top_k=1"], ["--temperature=0"])]
    assert texts[0] == texts[1] != texts[2] != texts[3] == texts[4]

def change_settings(folder: Path, **changes: str) -> None:
    path = folder / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

def make_pipe(save: Path, name: str) -> None:
    (save / name).unlink()
    os.mkfifo(save / name)

@pytest.mark.parametrize("damage, words", [
    (shutil.rmtree, "no weights"), (partial(make_pipe, name="weights.safetensors"), "no weights"),
    (partial(make_pipe, name="settings.json"), "no settings"),
    (lambda save: os.truncate(save / "weights.safetensors", 9999), "damaged or of another model"),
    (partial(change_settings, model_dim="64", head_dim="32"), "another model"),
    (partial(change_settings, tables="[]"), "another model"),
    (partial(change_settings, tables=TABLES.replace("500", "100")), "another model"),
    (partial(change_settings, num_slots="8"), "not of this version"),
    (partial(make_pipe, name="vocab.txt"), "vocab.txt of the data"),
    (lambda save: (save / "vocab.txt").write_text("no base64\n"), "vocab.txt")])
def test_main__what_cannot_be_sampled(make_save, tmp_path, capsys, damage, words) -> None:
    """A named pipe would block if it were opened."""
    save = shutil.copytree(make_save(), tmp_path / "save")
    damage(save)
    with pytest.raises(SystemExit) as caught:
        text_of(capsys, save, "line")
    said = capsys.readouterr()
    assert caught.value.code == 2 and said.out == "" and said.err.count("\n") == 1 and words in said.err, said.err

def test_main__without_a_vocabulary_the_text_is_token_ids(make_save, tmp_path, capsys) -> None:
    save = shutil.copytree(make_save(), tmp_path / "save")
    (save / "vocab.txt").unlink()
    ids = re.compile(r"( \d+)+")
    assert ids.fullmatch(text_of(capsys, save, "")) and not ids.fullmatch(text_of(capsys, make_save(), ""))

def test_make_tokenizer__finds_the_tokenizer_of_the_weights(make_save, tmp_path, capsys) -> None:
    """It may stand beside the weights. One of another vocabulary is not used, which is said."""
    save = shutil.copytree(make_save(), tmp_path / "save")
    cfg = tg.make_config(tg.load_settings(save))
    prompt = b"line 7 of a short text"
    pieces, encode = sample.make_tokenizer(save, cfg)
    tokens = list(encode(prompt))
    assert b"".join(pieces[token] for token in tokens) == prompt and len(tokens) < 12
    change_settings(save, train_files="gone/*.bin")
    cfg = tg.make_config(tg.load_settings(save))
    shutil.copy(make_save().parent / "set/tokenizer.json", save)
    assert list(sample.make_tokenizer(save, cfg)[1](prompt)) == tokens and not capsys.readouterr().err
    other = encoders.learn_bpe(["another text " * 9], 300)
    other.write_files(tmp_path)
    shutil.copy(tmp_path / "tokenizer.json", save)
    tokens = list(sample.make_tokenizer(save, cfg)[1](prompt))
    assert b"".join(pieces[token] for token in tokens) == prompt
    assert "no tokenizer.json of these weights" in capsys.readouterr().err

def test_main__gpt2_ranks_without_network(make_save, tmp_path, monkeypatch, capsys) -> None:
    save = shutil.copytree(make_save(), tmp_path / "save")
    (save / "vocab.txt").unlink()
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: os.stat(f"no {name}"))
    change_settings(save, vocab_size="50257", bos_id="50256", padded_vocab="50304")
    with pytest.raises(SystemExit, match="2"):
        text_of(capsys, save, "line")
    assert "tiktoken cannot read GPT-2's ranks" in capsys.readouterr().err
