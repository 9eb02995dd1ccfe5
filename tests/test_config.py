"""Room 1: every field is a flag, the tables are the recipe's, a setting that cannot work is refused with a way out."""
import json
import re
from dataclasses import FrozenInstanceError, asdict, fields, replace

import pytest
from common import ROOT, fabric, preset, refused, run

import train_gpt as tg

ONE_STAGE = "128 1 3 1.0 1.0,0.5 1.0,0.0"


def test_layer_table_is_that_of_recipe_2_2():
    table = """0 paired short - no | 1 plain short 0 no | 2 paired short 1 no | 3 plain long - yes | 4 plain short - no
        | 5 paired short - no | 6 none - - no | 7 plain short - no | 8 plain short 2 no | 9 paired short 3 no
        | 10 plain long 4 yes"""
    rows = [row.split() for row in table.split("|")]
    assert len(tg.LAYERS) == len(rows) == 11
    for layer, (depth, attention, window, value, key_shift) in zip(tg.LAYERS, rows):
        assert layer.attention == attention, depth
        assert layer.window == window or attention == "none", depth
        assert (layer.value, layer.key_shift) == (None if value == "-" else int(value), key_shift == "yes"), depth
    assert [(k, layer.keep_as) for k, layer in enumerate(tg.LAYERS) if layer.keep_as] == [(3, "skip"), (7, "backout")]
    assert [(k, layer.add) for k, layer in enumerate(tg.LAYERS) if layer.add] == [(6, "skip")]
    assert tg.ATTENTION_LAYERS == (0, 1, 2, 3, 4, 5, 7, 8, 9, 10) and tg.NUM_VALUE_TABLES == 5


BAD_LAYERS = {                               # changes of layers by depth -> what the message must hold
    "no backout": ({7: dict(keep_as="")}, "streams kept: ['skip']", "keep_as='backout'"),
    "added before it is kept": ({2: dict(add="skip")}, "layer 2", "add='skip'", "layer above keeps: []"),
    "added by the layer that keeps it": ({3: dict(add="skip")}, "layer 3", "add='skip'", "above keeps: []"),
    "a stream that nobody keeps": ({6: dict(add="skipp")}, "layer 6", "add='skipp'", "above keeps: ['skip']"),
    "kept twice": ({8: dict(keep_as="skip")}, "layer 8", "keep_as='skip'", "another name"),
    "unknown attention": ({4: dict(attention="pared")}, "layer 4", "'pared'", "nearest: paired"),
    "unknown window": ({10: dict(window="wide")}, "layer 10", "window 'wide'", "'short', 'long'"),
    "a value table too high": ({10: dict(value=5)}, "[0, 1, 2, 3, 5]", "0 to 4", "missing: [4]"),
    "a value table twice": ({10: dict(value=3)}, "[0, 1, 2, 3, 3]", "missing: [4]"),
    "a value table that is no number": ({10: dict(value="4")}, "'4'", "missing: [4]"),
    "a value table without attention": ({6: dict(value=5)}, "layer 6", "value=5 without attention"),
    "key offset without attention": ({6: dict(key_shift=True)}, "layer 6", "plain layers only"),
    "key offset of paired heads": ({9: dict(key_shift=True)}, "layer 9", "'paired'", "plain layers only"),
    "no attention at all": ({depth: dict(attention="none", value=None, key_shift=False) for depth in range(11)},
                            "no layer with attention", "one or more"),
}


@pytest.mark.parametrize("name", BAD_LAYERS)
def test_a_layer_table_that_cannot_work_ends_before_anything_is_made(name, monkeypatch, tmp_path):
    changes, *parts = BAD_LAYERS[name]
    layers = [replace(layer, **changes.get(depth, {})) for depth, layer in enumerate(tg.LAYERS)]
    refused(tg.ConfigError, lambda: tg.check_layers(layers), "LAYERS", *parts)

    monkeypatch.setattr(tg, "LAYERS", tuple(layers))
    ended = run(tmp_path / "run")
    assert ended.status == tg.EXIT_BAD_INPUT
    assert all(part in ended.err for part in parts)
    assert not ended.folder.exists()


def test_an_empty_layer_table_is_refused():
    refused(tg.ConfigError, lambda: tg.check_layers(()), "LAYERS", "keep_as='backout'")


def test_layer_tables_that_work():
    """The trainer's own, and those that an ablation makes: a kept stream that nobody takes, no value tables."""
    tg.check_layers(tg.LAYERS)
    tg.check_layers([replace(layer, add="", value=None, key_shift=False) for layer in tg.LAYERS])
    tg.check_layers([tg.Layer("plain", keep_as=tg.BACKOUT)])


BAD_TABLES = {                               # columns of the table of trigrams -> what the message must hold
    "an even factor": (dict(hash=(17351, 60962, 45259)), "factors (17351, 60962, 45259)", "odd numbers"),
    "an even factor of signs": (dict(sign_hash=(58699, 39778, 26801)), "39778", "an even factor loses bits"),
    "a negative factor": (dict(hash=(17351, -3, 45259)), "-3", "odd numbers below 2^31"),
    "a factor beyond 32 bits": (dict(hash=(17351, 2**31 + 1, 45259)), "odd numbers below 2^31"),
    "no factors": (dict(hash=()), "factors ()", "odd numbers"),
    "signs without a hash": (dict(signs=1, sign_hash=()), "signs with 0 factors", "3 tokens", "signs=0"),
    "signs of pairs": (dict(signs=1, sign_hash=(48271, 30011)), "signs with 2 factors", "sign_hash=(...) with 3"),
    "a layer without attention": (dict(enters=6), "enters=6", "a layer with attention", "None for the residual"),
    "no layer": (dict(enters=11), "enters=11", "(0, 1, 2, 3, 4, 5, 7, 8, 9, 10)"),
    "an unknown home": (dict(home="disk"), "home='disk'", "('device', 'host')", "--table_home"),
    "an unknown rule": (dict(rule="sgd"), "rule='sgd'", "('rowwise', 'adam')"),
    "an unknown cadence": (dict(cadence=8), "cadence=8", "(2, 4)"),
    "an unknown rounding": (dict(rounding="down"), "rounding='down'", "('nearest', 'stochastic')"),
    "rows of no setting": (dict(rows="fivegram_rows"), "rows='fivegram_rows'", "a field of Config"),
    "a single row": (dict(rows=1), "rows of trigram_embed", "rows=2 in NGRAM_TABLES"),
    "too many rows": (dict(rows=2**31), "rows of trigram_embed", "below 2^31"),
    "a label that no file is named by": (dict(label="4-gram"), "label '4-gram'", "letters, digits and _"),
    "a label without its ending": (dict(label="small"), "label 'small'", "_embed at the end", "attribute of the model"),
    "a label twice": (dict(label="more_bigram_embed"), "more_bigram_embed", "two lines"),
    "Adam at the host": (dict(rule="adam", home="host"), "rule of trigram_embed", "with home host", "--table_rule"),
    "Adam at every fourth step": (dict(rule="adam", cadence=4), "rule of trigram_embed", "cadence 4", "cadence 2"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_table_of_ngrams_that_cannot_work_ends_in_words(name, monkeypatch):
    changes, *parts = BAD_TABLES[name]
    bigrams, trigrams, *_ = tg.NGRAM_TABLES
    monkeypatch.setattr(tg, "NGRAM_TABLES", (bigrams, replace(trigrams, **changes)))
    refused(tg.ConfigError, lambda: tg.parse_flags(["--preset=tiny", "--trigram_rows=100"]), *parts)


@pytest.mark.parametrize("label", ["bigram_embed", "value_embed"])
def test_a_table_of_ngrams_takes_no_name_of_the_recipe(label, monkeypatch):
    _, trigrams, *_ = tg.NGRAM_TABLES
    monkeypatch.setattr(tg, "NGRAM_TABLES", (replace(trigrams, label=label),))
    cfg = preset(trigram_rows=100)
    refused(tg.ConfigError, lambda: tg.parameter_table(cfg), f"NGRAM_TABLES, {label}", "a label that the recipe has")


@pytest.mark.parametrize("flag", ["--table_home=host", "--table_cadence=4"])
def test_adam_moves_every_row_at_home_and_at_every_update(flag):
    refused(tg.ConfigError, lambda: tg.parse_flags(["--preset=pocket_tables", "--table_rule=adam", flag]),
            "rule of trigram_embed", "adam with home", "moves every row", "--table_rule=rowwise")
    tg.parse_flags(["--preset=pocket", "--table_rule=adam", flag])             # without such a table nothing is wrong


def test_pocket_is_the_record_topology_at_small_size():
    cfg = tg.Config(**tg.PRESETS["pocket"])
    assert (cfg.model_dim, cfg.num_heads, cfg.head_dim, cfg.attn_scale) == (96, 6, 16, 12.8 / 16)
    assert [stage.batch_tokens // cfg.num_slots for stage in cfg.stages[:3]] == [64, 128, 192]
    assert (cfg.dtype, cfg.head, cfg.max_doc_len) == ("float32", "plain", 256)
    assert 500 <= cfg.num_scheduled_steps + cfg.num_extension_steps <= 580
    assert [replace(stage, batch_tokens=0) for stage in cfg.stages] == [replace(s, batch_tokens=0) for s in tg.STAGES]


@pytest.mark.parametrize("name", ["record", "pocket", "tiny"])
def test_every_field_is_a_flag(name):
    """All values of a preset written as flags over another preset give that preset: nothing is lost on the way."""
    assert set(tg.PRESETS[name]) <= {f.name for f in fields(tg.Config)}, "a preset overrides fields and nothing else"
    want = tg.Config(**tg.PRESETS[name])
    argv = [f"--{field}={tg.flag_text(getattr(want, field))}" for field in asdict(want)
            if field not in ("resume", "sample")]                    # empty names of these are refused
    assert tg.parse_flags(["--preset=tiny", *argv]) == ("tiny", want)
    assert tg.parse_flags([f"--preset={name}"]) == (name, want)


def test_a_flag_beats_the_preset_and_the_config_is_frozen():
    _, cfg = tg.parse_flags(["--preset=tiny", "--seed", "7", "--adam_lr=1e-3", "--split_stage=1",
                              f"--stages={ONE_STAGE};{ONE_STAGE}"])
    assert (cfg.seed, cfg.adam_lr, cfg.head_dim) == (7, 1e-3, 16)
    assert cfg.stages == (tg.Stage(128, 1, 3, 1.0, (1.0, 0.5), (1.0, 0.0)),) * 2
    assert tg.parse_flags([])[0] == "record"
    with pytest.raises(FrozenInstanceError):
        cfg.seed = 1


def test_help_names_every_field_in_groups_with_units(capsys):
    with pytest.raises(SystemExit) as end:
        tg.parse_flags(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    for f in fields(tg.Config):
        group = re.search(rf"^{f.metadata['group']}:\n(.*?)(\n\S|\Z)", text, re.M | re.S).group(1)
        assert re.search(rf"^  --{f.name} {re.escape(f.metadata['unit'])}(\s|$)", group, re.M), f.name
        assert " ".join(f.metadata["about"].split()) in " ".join(group.split()), f.name
    assert all(name in text for name in (*tg.PRESETS, "--preset", "exit status"))


REFUSED = {                                  # flags over the tiny preset -> what the message must hold
    "--see=1": ("unknown flag", "--see", "--seed"),
    "--num-slots=8": ("unknown flag", "--num_slots"),
    "seed=1": ("a word without a flag", "seed=1"),
    "--preset=poket": ("unknown preset", "poket", "record", "pocket", "tiny", "nearest: pocket"),
    "--preset": ("flags", "--preset"),
    "--seed=abc": ("--seed", "'abc'", "int", "--seed=0"),
    "--seed=1.5": ("--seed", "'1.5'", "int"),
    "--adam_lr=fast": ("--adam_lr", "'fast'", "float", "--adam_lr=0.008"),
    "--adam_lr=nan": ("--adam_lr", "nan", "--adam_lr=0.008"),
    "--lr_floor=inf": ("--lr_floor", "inf"),
    "--dtype=bf16": ("--dtype", "bf16", "bfloat16", "float32", "float64"),
    "--head=fp16": ("--head", "fp16", "auto", "emulated", "plain", "nearest: fp8"),
    "--compile=2": ("--compile", "[-1, 0, 1]"),
    "--row_comms=full": ("--row_comms", "full", "dense", "sparse_scatter", "sparse"),
    "--debug_rows=yes": ("--debug_rows", "yes", "int"),
    "--stages=128 1 3": ("--stages", "128 1 3", "--stages=131072 1 3 1.0 1.0,0.5,0.25 1.0,0.5,0.0;"),
    "--num_heads=3": ("--num_heads", "3", "even", "--num_heads=2", "--num_heads=4"),
    "--num_heads=0": ("--num_heads", "even", "--num_heads=2"),
    "--head_dim=18": ("--head_dim", "18", "multiple of 4", "--head_dim=16", "--head_dim=20"),
    "--head_dim=4": ("--head_dim", "4", "at least 8", "--head_dim=8"),
    "--model_dim=40": ("--model_dim", "40", "2 x 16", "--model_dim=32"),
    "--num_slots=0": ("--num_slots", "0", "1 or more", "--num_slots=1"),
    "--num_slots=7": ("--stages", "128", "112"),                                 # 112 = 16 tokens x 7 slots
    "--val_batch_tokens=100": ("--val_batch_tokens", "100", "128"),
    "--val_tokens=700": ("--val_tokens", "700", "512", "1024"),
    "--max_doc_len=1": ("--max_doc_len", "1", "2 or more", "--max_doc_len=2"),
    "--epochs=-1": ("--epochs", "-1", "0 or more", "--epochs=0"),
    "--num_scheduled_steps=2": ("--num_scheduled_steps", "2", "3 stages", "--num_scheduled_steps=3"),
    "--split_stage=4": ("--split_stage", "4", "0 to 3"),
    "--cooldown_frac=1.5": ("--cooldown_frac", "1.5", "0 to 1"),
    "--trigram_rows=1": ("rows of trigram_embed", "1", "2 and more", "there is no n-gram", "--trigram_rows=2"),
    "--more_bigram_rows=1": ("rows of more_bigram_embed", "1", "--more_bigram_rows=2"),
    "--trigram_rows=-1": ("--trigram_rows", "-1", "0 or more"),
    "--trigram_rows=2147483648": ("--trigram_rows", "2147483648", "below 2^31"),
    "--table_cadence=3": ("--table_cadence", "3", "[2, 4]"),
    "--table_home=disk": ("--table_home", "disk", "device", "host"),
    "--table_rule=sparse": ("--table_rule", "sparse", "rowwise", "adam"),
    "--table_rounding=up": ("--table_rounding", "up", "nearest", "stochastic"),
    "--table_beta2=1.5": ("--table_beta2", "1.5", "0 to 1", "--table_beta2=1"),
    "--comm_timeout=0": ("--comm_timeout", "0", "1 or more", "--comm_timeout=1"),
    f"--stages={ONE_STAGE}": ("--stages", "1 row", "at least two"),
    f"--stages={ONE_STAGE};128 3 3 1 1 1": ("--stages", "3 3", "short < long window"),
    f"--stages={ONE_STAGE};128 0 3 1 1 1": ("--stages", "0 3", "1 <= short"),
    f"--stages={ONE_STAGE};128 1 3 1 1,1 1": ("--stages", "1.0,1.0 1.0", "equally many token weights"),
    f"--stages={ONE_STAGE};128 1 3 1 1 -1": ("--stages", "-1", ">= 0"),
    f"--stages={ONE_STAGE};120 1 3 1 1 1": ("--stages", "120", "128"),
    f"--stages={ONE_STAGE};{ONE_STAGE}": ("--split_stage", "2", "0 to 1", "--split_stage=1"),   # the preset's stays 2
}


@pytest.mark.parametrize("flag", REFUSED)
def test_a_bad_setting_is_refused(flag):
    refused(tg.ConfigError, lambda: tg.parse_flags(["--preset=tiny", flag]), *REFUSED[flag])


@pytest.mark.parametrize("flag", [flag for flag in REFUSED if "stages" not in flag])
def test_the_way_out_works(flag):
    """Each --flag=value that the last line of a message about a value proposes is not refused for that flag again."""
    name = flag.partition("=")[0]
    message = refused(tg.ConfigError, lambda: tg.parse_flags(["--preset=tiny", flag]))
    for way in re.findall(rf"{name}=\S+", message.rpartition("do:")[2]):
        try:
            tg.parse_flags(["--preset=tiny", way.rstrip(",")])
        except tg.ConfigError as error:
            assert not str(error).startswith(name + "\n"), f"{way} is refused too: {error}"


def test_a_prompt_without_quotes_is_known_for_one():
    words = ["once", "upon", "a"]
    refused(tg.ConfigError, lambda: tg.parse_flags(["--sample=w", *words]), "two prompts", str(words), "quotes")


@pytest.mark.parametrize("name", list(tg.PRESETS))
def test_help_shows_the_values_of_the_preset(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")                             # nothing is wrapped
    flags = [] if name == "record" else [f"--preset={name}"]
    for argv in (["--help", *flags], [*flags, "-h"]):
        with pytest.raises(SystemExit) as end:
            tg.parse_flags(argv)
        text = capsys.readouterr().out
        assert end.value.code == 0 and f"{', '.join(tg.PRESETS)} [{name}]\n" in text
        values = vars(tg.Config(**tg.PRESETS[name]))
        for f in fields(tg.Config):
            assert f"{f.metadata['about']} [{tg.flag_text(values[f.name])}]\n" in text, f.name
    refused(tg.ConfigError, lambda: tg.parse_flags(["--preset=poket", "--help"]), "unknown preset")


def test_names_of_files_begin_at_home(monkeypatch, tmp_path):
    """--save=~/x: the shell expands it only in front of a word."""
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = ("train_files", "val_files", "run_dir", "save")
    _, cfg = tg.parse_flags(["--preset=tiny", *(f"--{name}=~/x" for name in flags)])
    assert [getattr(cfg, name) for name in flags] == [str(tmp_path / "x")] * 4
    _, cfg = tg.parse_flags(["--sample=~/x", "--ranks=~/y", "--prompt=~/z"])
    assert (cfg.sample, cfg.ranks, cfg.prompt) == (str(tmp_path / "x"), str(tmp_path / "y"), "~/z")


def test_small_presets_do_not_compile_unless_asked():
    for name in ("pocket", "tiny"):
        assert tg.parse_flags([f"--preset={name}"])[1].compile == 0
        assert tg.parse_flags([f"--preset={name}", "--compile=-1"])[1].compile == -1
    assert tg.parse_flags([])[1].compile == -1


# ---- settings from a file -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", list(tg.PRESETS))
def test_a_config_comes_back_from_json(name):
    """As `asdict` and JSON wrote it, and as texts of flags; what an older file does not say is the default."""
    want = tg.Config(**tg.PRESETS[name])
    typed = json.loads(json.dumps(asdict(want)))
    texts = {field: tg.flag_text(value) for field, value in vars(want).items()}
    assert tg.config_from_json(typed, "c") == tg.config_from_json(texts, "c") == want
    assert tg.config_from_json({}, "c") == tg.Config()


STAGE_ROW = json.loads(json.dumps(asdict(tg.STAGES[0])))
nested = [[]]
for _ in range(500):
    nested = [nested]
UNTRUSTED = [                                # what a file says, and what the message must hold
    (None, ("NoneType",)), ([1], ("list", "an object")), ("text", ("str",)),
    (dict(sede=1), ("'sede'", "a setting")), ({"x" * 1000: 1}, ("(1002 characters)",)),
    (dict(dtype=3), ("c: dtype", "int instead of str")), (dict(dtype=None), ("c: dtype", "NoneType")),
    (dict(dtype="float16"), ("c: dtype", "bfloat16")), (dict(attn_scale="wide"), ("c: attn_scale", "'wide'")),
    (dict(attn_scale=float("nan")), ("c: attn_scale", "nan")), (dict(attn_scale=1e400), ("c: attn_scale", "inf")),
    (dict(num_heads=2.0), ("c: num_heads", "2.0")), (dict(num_heads=True), ("c: num_heads", "bool instead of")),
    (dict(num_heads=3), ("c: --num_heads", "even")), (dict(seed=10**400), ("c: --seed", "2^31")),
    (dict(vocab_size=10**9), ("c: --vocab_size", "65535")), (dict(compile=2), ("c: compile", "[-1, 0, 1]")),
    (dict(stages="wide"), ("c: stages", "'wide'")), (dict(stages=[]), ("c: stages",)),
    (dict(stages={}), ("c: stages",)),
    (dict(stages=[1]), ("c: stages", "a stage that is not batch_tokens")), (dict(stages=nested), ("c: stages",)),
    (dict(stages=[STAGE_ROW | dict(more=1)] * 2), ("c: stages", "mtp_end")),
    (dict(stages=[STAGE_ROW | dict(mtp_end=nested)] * 2), ("c: stages", "list instead of a number")),
    (dict(stages=[STAGE_ROW | dict(lr_mul=1e308)] * 2), ("c: --stages", "1000")), (dict(seed=nested), ("c: seed",)),
    (dict(num_scheduled_steps=10**9), ("c: --num_scheduled_steps",)), (dict(profile="1:1"), ("c: --profile", "a < b")),
]


@pytest.mark.parametrize("settings, parts", UNTRUSTED, ids=[", ".join(parts)[:50] for _, parts in UNTRUSTED])
def test_settings_of_a_file_are_not_trusted(settings, parts):
    message = refused(tg.DataError, lambda: tg.config_from_json(settings, "c"), *parts)
    assert len(message) < 1000


def test_every_setting_is_used():
    """No dead switch: each field is read somewhere besides its own line."""
    source = (ROOT / "train_gpt.py").read_text()
    of_tables = {f"table_{f.name}" for f in fields(tg.Ngrams)} | {line.rows for line in tg.NGRAM_TABLES}
    for f in fields(tg.Config):
        uses = rf"(cfg|self|end|flags)\.{f.name}\b|\"{f.name}\", (unset|0|-1)"
        assert re.search(uses, source) or f.name in of_tables, f.name


def test_say_speaks_on_rank_0_only(capsys):
    for rank in range(2):
        fabric(rank, 2).say(f"rank {rank}")
    assert capsys.readouterr().out == "rank 0\n"
