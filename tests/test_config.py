"""Room 1: every field is a flag, the tables are the recipe's, a setting that cannot work is refused with a way out."""
import json
import os
import re
from dataclasses import FrozenInstanceError, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from common import ROOT, fabric, refused

import train_gpt as tg

ONE_STAGE = "128 1 3 1.0 1.0,0.5 1.0,0.0"

def preset_of(name: str) -> tg.Config:
    return tg.Config(preset=name, **tg.PRESETS[name])

def refuse(argv: list[str], *parts: str) -> str:
    with refused(tg.ConfigError, *parts) as caught:
        tg.parse_flags(argv)
    return str(caught.value)

LAYERS = (tg.Layer("paired", value=0), tg.Layer("plain", "long", value=1, key_shift=True, keep_as="skip"),
          tg.Layer("none", add="skip"), tg.Layer("plain", keep_as="backout"))
BAD_LAYERS = {                               # changes of these layers by depth -> what the message must hold
    "kept twice": ({0: dict(keep_as="skip")}, "['', 'skip', 'skip', 'backout']", "each stream once"),
    "nothing for the head": ({3: dict(keep_as="")}, "['', 'skip']", "'backout'"),
    "a value table twice": ({3: dict(value=1)}, "[0, 1, 1]", "0, 1, ... once each"),
    "no such attention": ({1: dict(attention="Plain")}, "layer 1", "'Plain'", "`plain`"),
    "no such window": ({1: dict(window="wide")}, "layer 1", "'wide'", "`short` or `long`"),
    "added by the layer that keeps it": ({1: dict(add="skip")}, "layer 1", "a layer above keeps, ['']"),
    "a value table without attention": ({2: dict(value=2)}, "layer 2", "a value table in one with attention"),
    "key offset of paired heads": ({0: dict(key_shift=True)}, "layer 0", "'paired'", "in a plain layer"),
}

@pytest.mark.parametrize("name", BAD_LAYERS)
def test_check_layers__a_table_that_cannot_work(name, monkeypatch):
    changes, *parts = BAD_LAYERS[name]
    layers = [replace(layer, **changes.get(depth, {})) for depth, layer in enumerate(LAYERS)]
    monkeypatch.setattr(tg, "LAYERS", tuple(layers))
    refuse(["--preset=tiny"], "LAYERS", *parts)

def test_check_layers__tables_that_work():
    """The trainer's own, and those that an ablation makes: a kept stream that nobody takes, no value tables."""
    for layers in (tg.LAYERS, LAYERS, [tg.Layer("plain", keep_as=tg.BACKOUT)]):
        tg.check_layers(layers)
        tg.check_layers([replace(layer, add="", value=None, key_shift=False) for layer in layers])

STAGES = (tg.Stage(128, 1, 3, 1.0, (1.0, 0.5), (1.0, 0.0)), tg.Stage(256, 3, 7, 1.5, (1.0,), (1.0,), untie=True),
          tg.Stage(256, 4, 8, 1.0, (1.0,), (1.0,)))
BAD_STAGES = {                               # columns of the first of these -> what the message must hold
    "a batch of no whole slots": (dict(batch_tokens=250), "250", "multiple of 128 tokens"),
    "more weights at the end": (dict(mtp_end=(1.0, 0.5, 0.25)), "as many token weights"),
    "another long window than short": (dict(short_window=3), "short_window=3", "short < long window"),
    "a rate that is no number": (dict(lr_mul=float("nan")), "lr_mul=nan", "from 0 to 1,000"),
    "a weight below 0": (dict(mtp_start=(-1.0, 0.5)), "mtp_start=(-1.0, 0.5)", "from 0 to 1,000"),
    "untied twice": (dict(untie=True), "`untie` in one row at most"),
}

@pytest.mark.parametrize("name", BAD_STAGES)
def test_check_config__a_stage_table_that_cannot_work(name):
    changes, *parts = BAD_STAGES[name]
    first, *others = STAGES
    stages = (first._replace(**changes), *others)
    refuse(["--preset=tiny", f"--stages={tg.flag_text(stages)}"], "--stages", *parts)

TABLE = tg.NgramTable("trigram_embed", 3, 100)
NO_ATTENTION = min(set(range(len(tg.LAYERS) + 1)) - set(tg.ATTENTION_LAYERS))
BAD_TABLES = {                               # columns of a table of n-grams -> what the message must hold
    "no such order": (dict(order=5), f"an order of {list(tg.NGRAM_FACTORS)}"),
    "a layer without attention": (dict(place=NO_ATTENTION), f"place={NO_ATTENTION}", "a layer with attention"),
    "an unknown home": (dict(home="disk"), "disk", "home `device` or `host`"),
    "an unknown rounding": (dict(rounding="down"), "down", "`nearest` or `stochastic`"),
    "an unknown cadence": (dict(cadence=8), "1, 2 or 4 steps"),
    "a cadence between Adam's steps": (dict(cadence=1), "1, 2 or 4 steps", "a multiple of adam_every=2"),
    "a single row": (dict(rows=1), "2 rows or more", "there is no n-gram"),
    "too many rows": (dict(rows=2**31), "below 2^31"),
    "a rate that is no number": (dict(lr_mul=float("nan")), "lr and wd from 0"),
    "a label that no file is named by": (dict(label="4-gram_embed"), "letters, digits and _"),
    "a label without its ending": (dict(label="small"), "ends with _embed"),
    "a label of the recipe": (dict(label="value_embed"), "neither the recipe has"),
    "a label twice": (dict(label="other_embed"), "nor another row"),
}

@pytest.mark.parametrize("name", BAD_TABLES)
def test_check_config__a_table_of_ngrams_that_cannot_work(name):
    changes, *parts = BAD_TABLES[name]
    tables = TABLE._replace(label="other_embed"), TABLE._replace(**changes)
    refuse(["--preset=tiny", f"--tables={tg.flag_text(tables)}"], "--tables", *parts)

def test_tables__rows_and_defaults():
    cfg = tg.parse_flags(["--preset=tiny", "--tables=a_embed 2 30; b_embed 4 50 7 1 host 4 stochastic 70 0 0.5"])
    assert cfg.tables == (tg.NgramTable("a_embed", 2, 30),
                          tg.NgramTable("b_embed", 4, 50, 7, 1, "host", 4, "stochastic", 70.0, 0.0, 0.5))
    assert tg.read_rows("tables", tg.flag_text(cfg.tables)) == cfg.tables
    assert replace(tg.parse_flags(["--preset=pocket_tables", "--tables="]), preset="pocket") == preset_of("pocket")
    for factors, sign_factors in tg.NGRAM_FACTORS.values():
        assert len(factors) == len(sign_factors)
        assert all(factor % 2 == 1 and 0 < factor < 2**31 for factor in factors + sign_factors), "none loses bits"

@pytest.mark.parametrize("name", list(tg.PRESETS))
def test_parse_flags__every_field_is_a_flag(name):
    """All values of a preset written as flags over another preset give that preset: nothing is lost on the way."""
    assert set(tg.PRESETS[name]) < {f.name for f in fields(tg.Config)}, "a preset overrides fields and nothing else"
    assert name in re.findall(r"\w+", tg.Config.__dataclass_fields__["preset"].metadata["about"]), "--help names it"
    want = preset_of(name)
    argv = [f"--{field}={tg.flag_text(value)}" for field, value in vars(want).items()
            if field not in ("preset", "resume", "sample")]          # empty names of these are refused
    assert tg.parse_flags(["--preset=tiny", *argv]) == replace(want, preset="tiny")
    assert tg.parse_flags([f"--preset={name}"]) == want

def test_PRESETS__race_is_pocket_with_other_settings_and_small_tables():
    pocket, race, tables = map(preset_of, ("pocket", "race", "race_tables"))
    assert race.stages == pocket.stages[1:] and race.num_heads * race.head_dim == race.model_dim == pocket.model_dim
    assert max(table.rows for table in race.tables) <= 10 * 2048, "class plain"
    assert replace(tables, preset="race", tables=race.tables) == race
    assert tables.tables == preset_of("pocket_tables").tables

def test_parse_flags__a_flag_beats_the_preset_and_the_config_is_frozen():
    cfg = tg.parse_flags(["--preset=tiny", "--seed", "7", "--adam_lr=1e-3", "--adam_every=1", "--compile", "-1",
                             f"--stages={ONE_STAGE};{ONE_STAGE}"])
    assert (cfg.seed, cfg.adam_lr, cfg.head_dim, cfg.adam_every, cfg.compile) == (7, 1e-3, 16, 1, -1)
    assert cfg.stages == (tg.Stage(128, 1, 3, 1.0, (1.0, 0.5), (1.0, 0.0)),) * 2
    assert tg.parse_flags([]) == preset_of("record")
    with pytest.raises(FrozenInstanceError):
        cfg.seed = 1

REFUSED = {                                  # flags over the tiny preset -> what the message must hold
    "--see=1": ("unknown flag", "--see", "--seed"),
    "seed=1": ("a word without a flag", "seed=1", "--field=value"),
    "--preset=poket": ("--preset", "poket", "record", "pocket", "tiny"),
    "--seed": ("--seed", "expected one argument"),
    "--seed=1.5": ("--seed", "'1.5'", "int", "--seed=0"),
    "--seed=-1": ("--seed", "-1", "0 to 2,147,483,647", "--seed=0"),
    "--adam_lr=nan": ("--adam_lr", "nan", "float", "--adam_lr=0.008"),
    "--dtype=bf16": ("--dtype", "bf16", "bfloat16", "float32", "float64"),
    "--adam_every=3": ("--adam_every", "'3'", "[1, 2]"),
    "--num_slots=0": ("--num_slots", "1 to "),
    "--stages=128 1 3": ("--stages", "128 1 3", f"--stages={tg.flag_text(tg.STAGES)}"),
    f"--stages={ONE_STAGE} tie": ("--stages", "tie", "[untie]"),
    f"--stages={ONE_STAGE}": ("--stages", "two rows or more"),
    "--tables=trigram_embed 3": ("--tables", "'trigram_embed 3'", "label order rows"),
    "--num_heads=3": ("--num_heads", "3", "even", "--num_heads=4"),
    "--head_dim=4": ("--head_dim", "8 to "),
    "--head_dim=18": ("--head_dim", "18", "multiple of 4", "--head_dim=16"),
    "--model_dim=40": ("--model_dim", "40", "2 x 16", "--model_dim=32"),
    "--num_slots=7": ("--stages", "128", "multiple of 112"),                     # 112 = 16 tokens x 7 slots
    "--val_batch_tokens=100": ("--val_batch_tokens", "100", "--val_batch_tokens=128"),
    "--val_tokens=700": ("--val_tokens", "700", "--val_tokens=1024"),
    "--resume=": ("--resume", "an empty name", "leave it out"),
    "--profile=3:3": ("--profile", "3:3", "0 < a < b"),
}

@pytest.mark.parametrize("flag", REFUSED, ids="{:.60}".format)
def test_parse_flags__a_bad_setting(flag):
    refuse(["--preset=tiny", flag], *REFUSED[flag])

def test_parse_flags__sample_takes_no_flag_of_the_model():
    """Not even --preset, which would say nothing about the saved weights."""
    cfg = tg.parse_flags(["--sample=w", "once upon", "--seed=3", "--device=cpu"])
    assert cfg == tg.Config(sample="w", prompt="once upon", seed=3, device="cpu")
    for flag in ("--model_dim=64", "--vocab_size=512", "--tables=a_embed 3 10", "--preset=tiny", "--resume=x"):
        refuse(["--sample=w", "x", flag], "--sample", flag, "what was trained", "leave the others out")
    refuse(["--sample=w", "once", "upon"], "'upon'", "one prompt in quotes")

@pytest.mark.parametrize("name", list(tg.PRESETS))
def test_parse_flags__help_names_every_field_with_the_values_of_the_preset(name, capsys):
    flags = [] if name == "record" else [f"--preset={name}"]
    with pytest.raises(SystemExit) as end:
        tg.parse_flags(["--help", *flags])
    text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and f"[{name}]" in text and "exit status" in text
    values = vars(preset_of(name))
    for f in fields(tg.Config):
        about = f"{f.metadata['about']} [{tg.flag_text(values[f.name])}]"
        assert f"--{f.name} {f.metadata['unit']} {about}" in text, f.name

@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_say__never_in_the_way_where_help_fails(monkeypatch, capsys):
    for rank in range(2):
        fabric(rank, 2).say(f"rank {rank}")
    assert capsys.readouterr().out == "rank 0\n"
    monkeypatch.setattr("sys.stdout", open("/dev/full", "w", buffering=1))
    fabric().say("lost")
    with pytest.raises(tg.RunError):
        tg.parse_flags(["--help"])

@pytest.mark.parametrize("torch_has", [("_set_pg_timeout",), ("_set_pg_timeout", "set_timeout")])
def test_set_timeout__by_its_public_name_where_torch_has_one(monkeypatch, torch_has):
    calls = Mock()
    monkeypatch.delattr(tg.dist, "set_timeout", raising=False)
    for owner, name in ((tg.dist.distributed_c10d, "_set_pg_timeout"), (tg.dist, "set_timeout")):
        if name in torch_has:
            monkeypatch.setattr(owner, name, partial(calls, name), raising=False)
    ranks = replace(fabric(0, 2), plan_group="plans")
    ranks.set_timeout(5.0)
    assert calls.mock_calls == [call(torch_has[-1], timedelta(seconds=5), group) for group in (None, "plans")]
    assert ranks.timeout == 5

def test_parse_flags__names_of_files_begin_at_home(monkeypatch, tmp_path):
    """--save=~/x: the shell expands it only at the start of a word."""
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = ("train_files", "val_files", "run_dir", "save")
    cfg = tg.parse_flags(["--preset=tiny", *(f"--{name}=~/x" for name in flags)])
    assert [getattr(cfg, name) for name in flags] == [str(tmp_path / "x")] * 4
    cfg = tg.parse_flags(["--sample=~/x", "--prompt=~/z"])
    assert (cfg.sample, cfg.prompt) == (str(tmp_path / "x"), "~/z")

def write_settings(folder: Path, **flags: str) -> None:
    (folder / tg.SETTINGS).write_text(json.dumps(dict(preset="tiny", **flags)))

@pytest.mark.parametrize("content", [
    b"", b"[]", b'{"preset": "tiny", "flags": {}}', b"\xff\xfe", None, os.mkfifo, b'{"sede": "3"}'], ids=range(7))
def test_read_settings__any_content_ends_in_words(tmp_path, content):
    """No file, too: a folder of an older trainer has a log alone."""
    path = tmp_path / tg.SETTINGS
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        content(path)
    with refused(tg.DataError, str(path), "name the folder of"):
        tg.read_settings(tmp_path)

def test_resume__flags_of_the_earlier_run_come_first(tmp_path):
    write_settings(tmp_path, seed="5", adam_lr="0.01", adam_every="2", save="w", run_dir="r", slots_per_micro_batch="2")
    resume = f"--resume={tmp_path}"
    cfg = tg.parse_flags([resume])
    assert (cfg.preset, cfg.seed, cfg.adam_lr, cfg.slots_per_micro_batch) == ("tiny", 5, 0.01, 2)
    assert (cfg.save, cfg.run_dir, cfg.resume) == ("", "", str(tmp_path)), "facts of one run are not inherited"
    cfg = tg.parse_flags([resume, "--preset=tiny", "--seed=5", "--adam_lr=1e-2", "--max_steps=7", "--save=v"])
    assert (cfg.seed, cfg.max_steps, cfg.save) == (5, 7, "v"), "what says the same, or may change"
    refuse([resume, "--preset=pocket"], "--preset with --resume", "tiny", "leave --preset out")
    refuse([resume, "--runs=2"], "--runs=1")
    for flag, before in (("--seed=4", "5"), ("--adam_lr=0.1", "0.01"), ("--tables=a_embed 3 10", "as in that run")):
        refuse([resume, flag], f"{flag.partition('=')[0]} with --resume", before, "these may change", "max_steps")
    write_settings(tmp_path, num_heads="2.0")
    refuse([resume], "num_heads", "'2.0'")                           # settings are checked like flags
    (tmp_path / tg.SETTINGS).write_text('{"preset": "no"}')
    refuse([resume], "--preset", "no", "tiny")

def test_resume__the_home_of_a_table_may_change_and_nothing_else_of_it(tmp_path):
    write_settings(tmp_path, tables="a_embed 3 10; b_embed 2 20")
    resume = f"--resume={tmp_path}"
    cfg = tg.parse_flags([resume, "--tables=a_embed 3 10 stream 0 host; b_embed 2 20"])
    assert [table.home for table in cfg.tables] == ["host", "device"]
    for tables in ("a_embed 3 10 stream 1 host; b_embed 2 20", "b_embed 2 20; a_embed 3 10"):
        refuse([resume, f"--tables={tables}"], "--tables with --resume", "the home of a table")

def test_config__every_setting_is_used():
    """No dead switch: each field is read somewhere besides its own line."""
    source = (ROOT / "train_gpt.py").read_text()
    for f in fields(tg.Config):
        assert re.search(rf"(cfg|self|end|flags)\.{f.name}\b|\"{f.name}\", (unset|0|-1)", source), f.name

def test_errors__status_and_long_values():
    assert (tg.ConfigError.status, tg.DataError.status, tg.RunError.status) == (2, 2, 1)
    assert len(str(tg.DataError("x", "y" * 10**6, "z", "w"))) < 1300
