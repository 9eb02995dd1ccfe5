"""Section 1: flags, presets, stages, layers and n-gram tables; invalid settings are refused with a hint."""
import json
import os
import re
from dataclasses import FrozenInstanceError, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from common import ROOT, expect_error, make_comm

import train_gpt as tg

ONE_STAGE = "128 1 3 1.0 1.0,0.5 1.0,0.0"

def preset_of(name: str) -> tg.Config:
    """Return the settings of a preset, before the sizes are known."""
    return tg.Config(preset=name, **tg.PRESETS[name])

def refuse(argv: list[str], *texts: str) -> str:
    """Check that these flags raise a ConfigError that contains these texts; return the message."""
    with expect_error(tg.ConfigError, *texts) as caught:
        tg.load_config(argv)
    return str(caught.value)

LAYERS = (tg.Layer("paired", value_embed=0), tg.Layer("plain", "long", value_embed=1, key_offset=True, save_as="skip"),
          tg.Layer("none", add_saved="skip"), tg.Layer("plain", save_as="backout"))
BAD_LAYERS = {                               # arguments of a layer -> what the message must contain
    "no such attention": (dict(attention="Plain"), "'Plain'", "`plain`"),
    "no such window": (dict(attention="plain", window="wide"), "'wide'", "`short` or `long`"),
    "a value table without attention": (dict(attention="none", value_embed=2), "value_embed=2",
                                        "value_embed only with attention"),
    "key offset of paired heads": (dict(attention="paired", key_offset=True), "'paired'", "only with plain attention"),
    "key offset without attention": (dict(attention="none", key_offset=True), "'none'", "only with plain attention"),
}

@pytest.mark.parametrize("name", BAD_LAYERS)
def test_Layer__refuses_features_that_exclude_each_other(name) -> None:
    """An invalid layer raises when it is constructed, so LAYERS cannot contain one. A layer is frozen."""
    arguments, *texts = BAD_LAYERS[name]
    with expect_error(tg.ConfigError, "LAYERS", *texts):
        tg.Layer(**arguments)
    with pytest.raises(FrozenInstanceError):
        LAYERS[0].window = "wide"

BAD_LAYER_TABLES = {                         # changes of LAYERS by index -> what the message must contain
    "kept twice": ({0: dict(save_as="skip")}, "['skip', 'skip', 'backout']", "different names"),
    "nothing for the head": ({3: dict(save_as="")}, "['skip']", "'backout'"),
    "a value table twice": ({3: dict(value_embed=1)}, "[0, 1, 1]", "0, 1, ... once each"),
    "a value table left out": ({1: dict(value_embed=2)}, "[0, 2]", "0, 1, ... once each"),
    "added by the layer that keeps it": ({1: dict(add_saved="skip")}, "layer 1", "an earlier layer saves, []"),
    "added above the layer that keeps it": ({1: dict(add_saved="backout")}, "layer 1", "an earlier layer saves, []"),
}

@pytest.mark.parametrize("name", BAD_LAYER_TABLES)
def test_check_layers__refuses_an_inconsistent_list(name, monkeypatch) -> None:
    """Each layer is valid by itself, but the saved outputs or value embeddings of the list do not match."""
    changes, *texts = BAD_LAYER_TABLES[name]
    layers = [replace(layer, **changes.get(i, {})) for i, layer in enumerate(LAYERS)]
    monkeypatch.setattr(tg, "LAYERS", tuple(layers))
    refuse(["--preset=tiny"], "LAYERS", *texts)

def test_check_layers__accepts_consistent_lists() -> None:
    """Lists as in ablations are valid too: a saved output that no layer adds, and no value embeddings."""
    for layers in (tg.LAYERS, LAYERS, [tg.Layer("plain", save_as=tg.BACKOUT)]):
        tg.check_layers(layers)
        tg.check_layers([replace(layer, add_saved="", value_embed=None, key_offset=False) for layer in layers])

def text_with(spec: tg.Stage | tg.NgramTable, **changes: object) -> str:
    """Return the flag text of a stage or table with other columns, including values that the class refuses."""
    return tg.format_spec(SimpleNamespace(**vars(spec) | changes))

STAGES = (tg.Stage(128, 1, 3, 1.0, (1.0, 0.5), (1.0, 0.0)), tg.Stage(256, 3, 7, 1.5, (1.0,), (1.0,), untie=True),
          tg.Stage(256, 4, 8, 1.0, (1.0,), (1.0,)))
BAD_STAGES = {                               # columns of the first stage -> what the message must contain
    "more weights at the end": (dict(mtp_end=(1.0, 0.5, 0.25)), "mtp_end=(1.0, 0.5, 0.25)", "as many MTP weights"),
    "as long a window for short as for long": (dict(short_window=3), "short_window=3", "short < long window"),
    "no window": (dict(short_window=0), "short_window=0", "1 <= short"),
    "a rate that is no number": (dict(lr_mul=float("nan")), "lr_mul=nan", "from 0 to 1,000"),
    "a weight below 0": (dict(mtp_start=(-1.0, 0.5)), "mtp_start=(-1.0, 0.5)", "from 0 to 1,000"),
    "a weight that is too large": (dict(mtp_end=(1.0, 1001.0)), "mtp_end=(1.0, 1001.0)", "from 0 to 1,000"),
}

def refuse_stages(changes: dict[str, object], texts: list[str]) -> None:
    """Check that --stages with these columns in the first stage is refused."""
    first, *others = STAGES
    text = ";".join([text_with(first, **changes), *map(tg.format_spec, others)])
    refuse(["--preset=tiny", f"--stages={text}"], "--stages", *texts)

@pytest.mark.parametrize("name", BAD_STAGES)
def test_Stage__refuses_invalid_columns(name) -> None:
    """The constructor raises, and a flag with the same stage raises an error with the same texts."""
    changes, *texts = BAD_STAGES[name]
    with expect_error(tg.ConfigError, "--stages", "correct the stage", *texts):
        replace(STAGES[0], **changes)
    refuse_stages(changes, texts)

@pytest.mark.parametrize("changes, texts", [
    (dict(batch_tokens=250), ["250", "batch_tokens: a multiple of 128"]),
    (dict(batch_tokens=0), ["batch_tokens: a multiple of 128"]), (dict(untie=True), ["`untie` in at most one"])],
    ids=str)
def test_check_config__refuses_stages_that_do_not_fit_the_settings(changes, texts) -> None:
    """The batch is not a multiple of 16 tokens per sequence, or two stages untie."""
    refuse_stages(changes, texts)

TABLE = tg.NgramTable("trigram_embed", 3, 100)
NO_ATTENTION = min(set(range(len(tg.LAYERS) + 1)) - set(tg.ATTENTION_LAYERS))
BAD_TABLES = {                               # columns of an n-gram table -> what the message must contain
    "no such order": (dict(order=5), f"order: one of {list(tg.NGRAM_FACTORS)}"),
    "a layer without attention": (dict(layer=NO_ATTENTION), f"layer={NO_ATTENTION}", "a layer with attention"),
    "an unknown location": (dict(location="disk"), "disk", "location: one of ('device', 'host')"),
    "signs that are no switch": (dict(signs=2), "signs=2", "signs: 0 or 1"),
    "an unknown update_every": (dict(update_every=8), "update_every=8", "1, 2 or 4 steps"),
    "a single row": (dict(rows=1), "rows=1", "at least 2", "no n-gram"),
    "too many rows": (dict(rows=2**31), "below 2^31"),
    "a rate that is no number": (dict(lr_mul=float("nan")), "lr_mul=nan", "lr and wd from 0"),
    "a weight decay below 0": (dict(wd_mul=-1.0), "wd_mul=-1.0", "lr and wd from 0"),
    "a second moment that grows": (dict(beta2=1.5), "beta2=1.5", "beta2 from 0 to 1"),
    "a label that no file is named by": (dict(label="4-gram_embed"), "letters, digits and _"),
    "a label without its ending": (dict(label="small"), "ends with _embed"),
    "a label of the recipe": (dict(label="value_embed"), "a label other than the built-in ones"),
}

def refuse_tables(changes: dict[str, object], texts: list[str]) -> None:
    """Check that --tables with these columns in the second table is refused."""
    text = f"{tg.format_spec(replace(TABLE, label='other_embed'))};{text_with(TABLE, **changes)}"
    refuse(["--preset=tiny", "--adam_every=2", f"--tables={text}"], "--tables", *texts)

@pytest.mark.parametrize("name", BAD_TABLES)
def test_NgramTable__refuses_invalid_columns(name) -> None:
    """The constructor raises, and a flag with the same table raises an error with the same texts."""
    changes, *texts = BAD_TABLES[name]
    with expect_error(tg.ConfigError, "--tables", "correct the table", *texts):
        replace(TABLE, **changes)
    refuse_tables(changes, texts)

@pytest.mark.parametrize("changes, texts", [
    (dict(update_every=1), ["a multiple of adam_every=2"]),
    (dict(label="other_embed"), ["a label that no other table has"])], ids=str)
def test_check_config__refuses_tables_that_do_not_fit_the_settings(changes, texts) -> None:
    """A table is updated between two Adam updates, or two tables have the same label."""
    refuse_tables(changes, texts)

def test_parse_specs__columns_and_defaults() -> None:
    """Columns that are omitted have the defaults of NgramTable. The text of a value parses to the value."""
    layer = tg.ATTENTION_LAYERS[-1]
    cfg = tg.load_config(["--preset=tiny", f"--tables=a_embed 2 30; b_embed 4 50 {layer} 1 host 4 70 0 0.5"])
    assert cfg.tables == (tg.NgramTable("a_embed", 2, 30, None, 0, "device", 2, 37.5, 5.0, 0.95),
                          tg.NgramTable("b_embed", 4, 50, layer, 1, "host", 4, 70.0, 0.0, 0.5))
    assert tg.parse_specs("tables", tg.format_value(cfg.tables)) == cfg.tables
    assert replace(tg.load_config(["--preset=pocket_tables", "--tables="]), preset="pocket") == preset_of("pocket")

@pytest.mark.parametrize("rest", ["", " 70", " 70 0 0.5"])
@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_parse_specs__refuses_a_rounding_mode_in_the_8th_column(mode, rest) -> None:
    """Earlier trainers had the rounding mode there, before lr, wd and beta2. The error for other words is different."""
    columns = "b_embed 4 50 7 1 host 4"
    refuse(["--preset=tiny", f"--tables=a_embed 2 30; {columns} {mode}{rest}"], "--tables: invalid 8th field",
           f"found:    {mode}", "a number", "always rounded to nearest", f"omit `{mode}`")
    refuse(["--preset=tiny", f"--tables={columns} down{rest}"], "--tables", "'b_embed 4 50 7 1 host 4 down",
           "update_every lr wd beta2")
    refuse(["--preset=tiny", f"--tables={columns} 70 0 0.5 1"], "--tables", "70 0 0.5 1", "update_every lr wd beta2")

@pytest.mark.recipe
def test_NGRAM_FACTORS__are_those_of_the_published_losses() -> None:
    """The multipliers are written here again, because the reference reads them from the trainer.

    Each one is odd and below 2^31, so that a product with it loses no bit.
    """
    assert tg.NGRAM_FACTORS == {
        2: ((36313, 27191), (48271, 30011)),
        3: ((17351, 60961, 45259), (58699, 39779, 26801)),
        4: ((50411, 22787, 64951, 38327), (43399, 56783, 20297, 61403))}
    for factors, sign_factors in tg.NGRAM_FACTORS.values():
        assert len(factors) == len(sign_factors)
        assert all(factor % 2 == 1 and 0 < factor < 2**31 for factor in factors + sign_factors)


# ---- presets and flags ----------------------------------------------------------------------------------------------
# Settings of the CPU presets that affect published losses.
POCKET = dict(val_tokens=65_536, val_batch_tokens=8192, max_doc_len=256, seqs_per_step=8, padded_vocab=0, bigram_rows=0,
              model_dim=96, num_heads=6, head_dim=16, attn_scale=0.8, tables=(), dtype="float32", head="plain",
              stages=tg.parse_specs("stages", "512 1 3 1 1,.5,.25 1,.5,0; 1024 3 7 1.52 1,.5 1,0; "
                                              "1536 5 11 1.73 1 1 untie; 1536 6 13 1 1 1"),
              num_scheduled_steps=520, num_extension_steps=20, window_block=8, final_long_window=20, cooldown_frac=0.55,
              lr_floor=0.1, normuon_lr=0.023, adam_every=2, adam_lr=0.008, seed=0, compile=0, val_every=180)
RACE = POCKET | dict(num_heads=2, head_dim=48, attn_scale=0.26666666666666666, num_scheduled_steps=190, adam_every=1,
                     stages=POCKET["stages"][1:],
                     tables=tg.parse_specs("tables", "trigram_embed 3 20480; fourgram_embed 4 20480"))
TINY = POCKET | dict(val_tokens=1024, val_batch_tokens=512, max_doc_len=24, model_dim=32, num_heads=2, window_block=4,
                     stages=tg.parse_specs("stages", "128 1 3 1 1,.5,.25 1,.5,0; 256 3 7 1.52 1,.5 1,0; "
                                                     "384 5 11 1.73 1 1 untie; 384 6 13 1 1 1"),
                     num_scheduled_steps=9, num_extension_steps=3, val_every=5)

@pytest.mark.recipe
@pytest.mark.parametrize("name, settings", [("pocket", POCKET), ("race", RACE), ("tiny", TINY)])
def test_PRESETS__have_the_settings_of_the_published_losses(name, settings) -> None:
    cfg = preset_of(name)
    assert {field: getattr(cfg, field) for field in settings} == settings

@pytest.mark.parametrize("name", list(tg.PRESETS))
def test_load_config__every_field_is_a_flag(name) -> None:
    """Writing all values of a preset as flags over another preset gives the same config."""
    assert set(tg.PRESETS[name]) < {f.name for f in fields(tg.Config)}, "a preset overrides only fields"
    assert name in re.findall(r"\w+", tg.Config.__dataclass_fields__["preset"].metadata["help"]), "--help names it"
    expected = preset_of(name)
    argv = [f"--{field}={tg.format_value(value)}" for field, value in vars(expected).items()
            if field not in ("preset", "resume", "sample")]          # these must not be empty
    assert tg.load_config(["--preset=tiny", *argv]) == replace(expected, preset="tiny")
    assert tg.load_config([f"--preset={name}"]) == expected

def test_PRESETS__race_is_pocket_with_other_settings_and_small_tables() -> None:
    """`race` shares its width and stages with `pocket`; its tables are small enough for class plain."""
    pocket, race, tables = map(preset_of, ("pocket", "race", "race_tables"))
    assert race.stages == pocket.stages[1:] and race.num_heads * race.head_dim == race.model_dim == pocket.model_dim
    assert max(table.rows for table in race.tables) <= 10 * 2048, "class plain"
    assert replace(tables, preset="race", tables=race.tables) == race
    assert tables.tables == preset_of("pocket_tables").tables

def test_load_config__a_flag_overrides_the_preset_and_the_config_is_frozen() -> None:
    """A flag may be written with = or with a space. No flag means preset `record`."""
    cfg = tg.load_config(["--preset=tiny", "--seed", "7", "--adam_lr=1e-3", "--adam_every=1", "--compile", "-1",
                          f"--stages={ONE_STAGE};{ONE_STAGE}"])
    assert (cfg.seed, cfg.adam_lr, cfg.head_dim, cfg.adam_every, cfg.compile) == (7, 1e-3, 16, 1, -1)
    assert cfg.stages == (tg.Stage(128, 1, 3, 1.0, (1.0, 0.5), (1.0, 0.0)),) * 2
    assert tg.load_config([]) == preset_of("record")
    with pytest.raises(FrozenInstanceError):
        cfg.seed = 1

REFUSED = {                                  # a flag after --preset=tiny -> what the message must contain
    "--see=1": ("unknown flag", "--see", "--seed"),
    "seed=1": ("argument without a flag", "seed=1", "--field=value"),
    "--preset=poket": ("--preset", "poket", "record", "pocket", "tiny"),
    "--seed": ("--seed", "expected one argument"),
    "--seed=1.5": ("--seed", "'1.5'", "an integer from", "--seed=0"),
    "--seed=-1": ("--seed", "-1", "0 to 2,147,483,647", "--seed=0"),
    "--adam_lr=nan": ("--adam_lr", "nan", "a number from", "--adam_lr=0.008"),
    "--dtype=bf16": ("--dtype", "bf16", "bfloat16", "float32", "float64"),
    "--adam_every=3": ("--adam_every", "'3'", "one of 1, 2"),
    "--seqs_per_step=0": ("--seqs_per_step", "1 to ", "(sequences)"),
    "--cooldown_frac=1.01": ("--cooldown_frac", "'1.01'", "0 to 1", "--cooldown_frac=0.55"),
    "--stages=128 1 3": ("--stages", "128 1 3", f"--stages='{tg.format_value(tg.TINY['stages'])}'"),
    "--stages=": ("--stages", "nothing", f"--stages='{tg.format_value(tg.TINY['stages'])}'"),
    "--target_loss=x": ("--target_loss", "--target_loss=0.0"),
    f"--stages={ONE_STAGE} tie": ("--stages", "tie", "[untie]"),
    f"--stages={ONE_STAGE}": ("--stages", "at least two stages"),
    "--tables=trigram_embed 3": ("--tables", "'trigram_embed 3'", "label order rows", "trigram_embed 3 20480"),
    "--num_heads=3": ("--num_heads", "3", "even", "--num_heads=4"),
    "--head_dim=4": ("--head_dim", "8 to "),
    "--head_dim=18": ("--head_dim", "18", "multiple of 4", "--head_dim=16"),
    "--model_dim=40": ("--model_dim", "40", "2 * 16", "--model_dim=32"),
    "--seqs_per_step=7": ("--stages", "128", "multiple of 112"),                     # 112 = 16 * seqs_per_step
    "--val_batch_tokens=100": ("--val_batch_tokens", "100", "--val_batch_tokens=128"),
    "--val_tokens=700": ("--val_tokens", "700", "--val_tokens=1024"),
    "--resume=": ("--resume", "an empty value", "omit --resume"),
    "--profile=3:3": ("--profile", "3:3", "0 < a < b"),
}

@pytest.mark.parametrize("flag", REFUSED, ids="{:.60}".format)
def test_load_config__refuses_a_bad_setting(flag) -> None:
    refuse(["--preset=tiny", flag], *REFUSED[flag])

def test_load_config__refuses_settings_of_the_model_with_sample() -> None:
    """--preset is refused too, because the save has the settings of the model."""
    cfg = tg.load_config(["--sample=w", "once upon", "--seed=3", "--device=cpu"])
    assert cfg == tg.Config(sample="w", prompt="once upon", seed=3, device="cpu")
    for flag in ("--model_dim=64", "--vocab_size=512", "--tables=a_embed 3 10", "--preset=tiny", "--resume=x"):
        refuse(["--sample=w", "x", flag], "--sample", flag, "settings of the model", "omit the others")
    refuse(["--sample=w", "once", "upon"], "'upon'", "one prompt in quotes")

@pytest.mark.parametrize("name, suggestions", [
    ("time_buget", "--time_budget"), ("time-budget", "--time_budget"), ("epoch", "--epochs"), ("sede", "--seed"),
    ("lr", None), ("x", None), ("verbose", None)])
def test_unknown_flag_error__suggests_only_similar_flags(name, suggestions) -> None:
    """Earlier, it also suggested flags that share only a few letters with the text."""
    hint = refuse(["--preset=tiny", f"--{name}=1"], f"unknown flag --{name}").splitlines()[-1]
    expected = f"did you mean {suggestions}?" if suggestions else "--help lists all flags"
    assert hint.split("hint:")[1].strip() == expected

@pytest.mark.parametrize("argv", [["--preset=race"], ["--preset", "race"]])
def test_parse_value__the_example_is_a_value_of_the_preset(argv) -> None:
    """The order of the flags does not matter."""
    for name, example in (("stages", tg.RACE["stages"]), ("tables", tg.RACE["tables"]), ("num_heads", 2)):
        for flags in ([*argv, f"--{name}=a b"], [f"--{name}=a b", *argv]):
            message = refuse(flags, f"--{name}: invalid value", "'a b'")
            assert f"--{name}={tg.shlex.quote(tg.format_value(example))}" in message
    refuse([f"--stages={ONE_STAGE}", *argv], "--stages", tg.format_value(tg.RACE["stages"]))

@pytest.mark.parametrize("old, new", [
    ("num_slots", "seqs_per_step"), ("slots_per_micro_batch", "micro_batch_size"), ("document_start", "bos_id")])
def test_unknown_flag_error__a_renamed_flag_has_its_new_name_in_the_hint(old, new) -> None:
    """The old spelling is refused, with = and with a space. The new one is a flag."""
    for argv in ([f"--{old}=1"], [f"--{old}", "1"]):
        refuse(["--preset=tiny", *argv], f"unknown flag --{old}", f"it was renamed to --{new}")
    assert new in tg.Config.__dataclass_fields__ and old not in tg.Config.__dataclass_fields__

def test_flag_names__each_flag_has_one_role() -> None:
    """In the groups `common` and `run`, only --preset and --seed affect results.

    The locations of tables do not affect results either.
    """
    groups = {f.name: f.metadata["group"] for f in fields(tg.Config)}
    numeric, inherited, single_run = map(tg.flag_names, (tg.NUMERIC, tg.INHERITED, tg.SINGLE_RUN))
    assert single_run == {"runs", "save", "sample", "resume", "run_dir", "profile"}
    affect_results = {name for name, group in groups.items() if group not in ("common", "run")} | {"preset", "seed"}
    assert numeric == affect_results and inherited == groups.keys() - affect_results - single_run
    assert tg.flag_names(tg.NUMERIC, tg.INHERITED, tg.SINGLE_RUN) == groups.keys()
    cfg = preset_of("pocket_tables")
    on_host = replace(cfg, tables=tuple(replace(table, location="host") for table in cfg.tables))
    assert tg.numeric_settings(cfg).keys() == numeric and tg.numeric_settings(cfg) == tg.numeric_settings(on_host)
    assert tg.numeric_settings(replace(cfg, seed=1))["seed"] == "1"

@pytest.mark.parametrize("name", list(tg.PRESETS))
def test_load_config__help_lists_every_field_with_its_default(name, capsys) -> None:
    """--help lists each flag with its unit, its help text and the value in the preset."""
    argv = [] if name == "record" else [f"--preset={name}"]
    with pytest.raises(SystemExit) as exit_info:
        tg.load_config(["--help", *argv])
    text = " ".join(capsys.readouterr().out.split())
    assert exit_info.value.code == 0 and f"[{name}]" in text and "exit status" in text
    defaults = vars(preset_of(name))
    for f in fields(tg.Config):
        description = f"{f.metadata['help']} [{tg.format_value(defaults[f.name])}]"
        assert f"--{f.name} {f.metadata['unit']} {description}" in text, f.name

def test_print0__escapes_control_characters(capsys) -> None:
    """A sample or a file name may come from somebody else, and a terminal would execute its control characters."""
    make_comm().print0("a\x1b[2J\tb\r\nc")
    assert capsys.readouterr().out == "a\\x1b[2J\tb\\x0d\nc\n"

@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_print0__ignores_a_full_console_but_help_fails(monkeypatch, capsys) -> None:
    """Rank 0 prints, and continues if the console is full. --help cannot be printed then, and raises a RunError."""
    for rank in range(2):
        make_comm(rank, 2).print0(f"rank {rank}")
    assert capsys.readouterr().out == "rank 0\n"
    monkeypatch.setattr("sys.stdout", open("/dev/full", "w", buffering=1))
    make_comm().print0("lost")
    with pytest.raises(tg.RunError):
        tg.load_config(["--help"])

@pytest.mark.parametrize("available", [("_set_pg_timeout",), ("_set_pg_timeout", "set_timeout")])
def test_set_timeout__prefers_the_public_function_of_torch(monkeypatch, available) -> None:
    """Both process groups get the timeout, through the private function only if torch has no public one."""
    calls = Mock()
    monkeypatch.delattr(tg.dist, "set_timeout", raising=False)
    for owner, name in ((tg.dist.distributed_c10d, "_set_pg_timeout"), (tg.dist, "set_timeout")):
        if name in available:
            monkeypatch.setattr(owner, name, partial(calls, name), raising=False)
    comm = replace(make_comm(0, 2), loader_group="plans")
    comm.set_timeout(5.0)
    assert calls.mock_calls == [call(available[-1], timedelta(seconds=5), group) for group in (None, "plans")]
    assert comm.timeout == 5

def test_load_config__expands_the_home_directory(monkeypatch, tmp_path) -> None:
    """The trainer expands ~ in --save=~/x, because the shell expands only the start of a word.

    A prompt is not expanded.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = ("train_files", "val_files", "run_dir", "save")
    cfg = tg.load_config(["--preset=tiny", *(f"--{name}=~/x" for name in flags)])
    assert [getattr(cfg, name) for name in flags] == [str(tmp_path / "x")] * 4
    cfg = tg.load_config(["--sample=~/x", "--prompt=~/z"])
    assert (cfg.sample, cfg.prompt) == (str(tmp_path / "x"), "~/z")

def write_settings(folder: Path, **flags: str) -> None:
    """Write the settings of an earlier run with preset tiny and these flags."""
    (folder / tg.SETTINGS_FILE).write_text(json.dumps(dict(preset="tiny", **flags)))

@pytest.mark.parametrize("content", [
    b"", b"[]", b'{"preset": "tiny", "flags": {}}', b"\xff\xfe", None, os.mkfifo, b'{"sede": "3"}'], ids=range(7))
def test_read_settings__refuses_any_damaged_file(tmp_path, content) -> None:
    """A missing file is refused too: the run directory of an older trainer has no settings.json."""
    path = tmp_path / tg.SETTINGS_FILE
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        content(path)
    with expect_error(tg.DataError, str(path), "give a run directory"):
        tg.read_settings(tmp_path)

def test_read_settings__names_a_setting_of_an_older_version(tmp_path) -> None:
    write_settings(tmp_path, num_slots="8")
    with expect_error(tg.DataError, str(tmp_path / tg.SETTINGS_FILE), "unknown setting: 'num_slots'",
                      "settings of this version", "a run of an older version, use the train_gpt.py in its run"):
        tg.read_settings(tmp_path)

def test_load_config__resume_starts_from_the_flags_of_the_earlier_run(tmp_path) -> None:
    """Settings of a single run are not inherited. Only some flags may differ from those of the earlier run."""
    write_settings(tmp_path, seed="5", adam_lr="0.01", adam_every="2", save="w", run_dir="r", micro_batch_size="2")
    resume = f"--resume={tmp_path}"
    cfg = tg.load_config([resume])
    assert (cfg.preset, cfg.seed, cfg.adam_lr, cfg.micro_batch_size) == ("tiny", 5, 0.01, 2)
    assert (cfg.save, cfg.run_dir, cfg.resume) == ("", "", str(tmp_path)), "--save and --run_dir are not inherited"
    cfg = tg.load_config([resume, "--preset=tiny", "--seed=5", "--adam_lr=1e-2", "--max_steps=7", "--save=v"])
    assert (cfg.seed, cfg.max_steps, cfg.save) == (5, 7, "v"), "flags may be repeated, and some may change"
    refuse([resume, "--preset=pocket"], "--preset with --resume", "tiny", "omit --preset")
    refuse([resume, "--runs=2"], "--runs=1")
    for flag, earlier in (("--seed=4", "'5'"), ("--adam_lr=0.1", "'0.01'"),
                         ("--tables=a_embed 3 10", "as in the resumed run")):
        refuse([resume, flag], f"{flag.partition('=')[0]} with --resume", earlier, "only these flags may change",
               "max_steps")
    write_settings(tmp_path, num_heads="2.0")
    refuse([resume], "num_heads", "'2.0'")                           # settings are checked as flags are
    (tmp_path / tg.SETTINGS_FILE).write_text('{"preset": "no"}')
    refuse([resume], "--preset", "no", "tiny")

def test_load_config__resume_may_change_only_the_location_of_a_table(tmp_path) -> None:
    """A change of another column, or of the order of the tables, is refused."""
    write_settings(tmp_path, tables="a_embed 3 10; b_embed 2 20")
    resume = f"--resume={tmp_path}"
    cfg = tg.load_config([resume, "--tables=a_embed 3 10 stream 0 host; b_embed 2 20"])
    assert [table.location for table in cfg.tables] == ["host", "device"]
    for tables in ("a_embed 3 10 stream 1 host; b_embed 2 20", "b_embed 2 20; a_embed 3 10"):
        refuse([resume, f"--tables={tables}"], "--tables with --resume", "the location of tables")

def test_Config__every_field_is_used() -> None:
    """The source reads each field somewhere after its declaration."""
    source = (ROOT / "train_gpt.py").read_text()
    for f in fields(tg.Config):
        assert re.search(rf"(cfg|self|end|flags)\.{f.name}\b|\"{f.name}\", (unset|0|-1)", source), f.name

def test_TrainerError__exit_status_and_long_values() -> None:
    """The exit status is 2 for invalid input and 1 for a failed run. Long values are truncated in the message."""
    assert (tg.ConfigError.exit_status, tg.DataError.exit_status, tg.RunError.exit_status) == (2, 2, 1)
    assert len(str(tg.DataError("x", "y" * 10**6, "z", "w"))) < 1300
