"""Section 1: layers, stages, n-gram tables, presets; what section 13 refuses of them, in one sentence."""
import gzip
import json
import math
import re
from dataclasses import FrozenInstanceError, asdict, astuple, fields, replace

import pytest
from common import ROOT, expect_error, preset_of, refuse

import train_gpt as tg

LAYERS = (tg.Layer("paired", value_embed=0), tg.Layer("plain", "long", value_embed=1, key_offset=True, save_as="skip"),
          tg.Layer("none", add_saved="skip"), tg.Layer("plain", save_as="backout"))
BAD_LAYERS = {                               # changes of LAYERS by index, and a word of the message
    "a value embedding without attention": ({2: dict(value_embed=2)}, "LAYERS[2]: value_embed"),
    "key offset of paired heads": ({0: dict(key_offset=True)}, "key_offset"),
    "key offset without attention": ({2: dict(key_offset=True)}, "key_offset"),
    "saved twice": ({0: dict(save_as="skip")}, "different names"),
    "a value embedding twice": ({3: dict(value_embed=1)}, "not [0, 1, 1]"),
    "a value embedding left out": ({1: dict(value_embed=2)}, "not [0, 2]"),
}

@pytest.mark.parametrize("name", BAD_LAYERS)
def test_check_layers__refuses_layers_that_do_not_fit_together(name, monkeypatch) -> None:
    changes, word = BAD_LAYERS[name]
    monkeypatch.setattr(tg, "LAYERS", tuple(replace(layer, **changes.get(i, {})) for i, layer in enumerate(LAYERS)))
    refuse(["--preset=tiny"], word)

def test_check_layers__accepts_consistent_lists() -> None:
    """Also as in ablations: a saved output that no layer adds, and no value embeddings."""
    for layers in (tg.LAYERS, LAYERS, [tg.Layer("plain", save_as=tg.BACKOUT)]):
        tg.check_layers(layers)
        tg.check_layers([replace(layer, add_saved="", value_embed=None, key_offset=False) for layer in layers])
    with pytest.raises(FrozenInstanceError):
        LAYERS[0].window = "wide"

STAGES = (tg.Stage(128, 1, 3, 1.0, (1.0, 0.5), (1.0, 0.0)), tg.Stage(256, 3, 7, 1.5, (1.0,), (1.0,), untie=True),
          tg.Stage(256, 4, 8, 1.0, (1.0,), (1.0,)))
TABLE = tg.NgramTable("trigram_embed", 3, 100)
NO_RATES = (-1.0, 1e999, math.nan, 2.0**31, "1", None, (1.0,))               # 1e999 is inf
NO_COUNTS = (0, -1, 1e999, math.nan, 2.0, 2**31, "2", None, [2])
NO_WEIGHTS = ((-1.0, 0.5), (1.0, 1001.0), (1.0, math.nan), (1e999, 1.0), ("1", 1.0), (), 1.0, [1.0, 0.5], None)
BAD_FIELDS = {                               # of a stage and a table: (values that are refused, the field's name)
    **{(0, name): NO_COUNTS for name in ("batch_tokens", "short_window", "long_window")},
    **{(0, name): NO_WEIGHTS for name in ("mtp_start", "mtp_end")},
    (0, "lr_mul"): NO_RATES, (0, "untie"): (1, "True", None),
    (1, "label"): ("4-gram_embed", "small", "value_embed", "other_embed", "", 3, None),
    (1, "order"): (1, 5, 3.0, "3", None), (1, "rows"): (1, *NO_COUNTS), (1, "update_every"): (0, 1, 3, 8, 2.0, "2"),
    (1, "lr_mul"): NO_RATES, (1, "wd_mul"): NO_RATES, (1, "beta2"): (1.5, *NO_RATES),
}

@pytest.mark.parametrize("is_table, name", BAD_FIELDS)
def test_check_config__refuses_wrong_fields_of_stages_and_tables(is_table, name) -> None:
    """From the command line (which has no nan) or a Config."""
    for value in BAD_FIELDS[is_table, name]:
        if is_table:
            flag, rows = "tables", (replace(TABLE, label="other_embed"), replace(TABLE, **{name: value}))
        else:
            flag, rows = "stages", (replace(STAGES[0], **{name: value}), *STAGES[1:])
        with expect_error(tg.ConfigError, f"--{flag}", name):
            tg.make_config({"preset": "tiny", "adam_every": 2, flag: rows})
        text = tg.format_value(rows).replace("inf", "1e999")
        refuse(["--preset=tiny", "--adam_every=2", f"--{flag}={text}"], f"--{flag}")

@pytest.mark.parametrize("flag, word", [
    (f"--stages={tg.format_value(STAGES[:1])}", "two or more"), ("--stages=[]", "two or more"),
    (f"--stages={tg.format_value(2 * STAGES)}", "at most one with untie"), ("--stages=128 1 3", "128 1 3"),
    (f"--stages={tg.format_value((replace(STAGES[0], batch_tokens=250), *STAGES))}", "multiple of 16 * seqs_per_step"),
    (f"--stages={tg.format_value((replace(STAGES[0], short_window=3), *STAGES))}", "short_window < long_window"),
    (f"--stages={tg.format_value((replace(STAGES[0], mtp_end=(1.0,)), *STAGES))}", "mtp_end as long as mtp_start"),
    ("--tables=a_embed", "--tables"), ("--tables=('a_embed', 3, 100)", "--tables"),
    ("--tables=[('a_embed', 3)]", "rows"), ("--tables=[('a_embed', 3, 100, 2, 1.0, 1.0, 0.9, 0)]", "arguments")],
    ids="{:.40}".format)
def test_load_config__refuses_lists_that_do_not_fit(flag, word) -> None:
    refuse(["--preset=tiny", flag], flag.partition("=")[0], word)

def test_parse_value__fields_that_a_table_omits_have_their_defaults() -> None:
    tables = "[('a_embed', 2, 30), ('b_embed', 4, 50, 4, 70, 0, 0.5)]"
    cfg = tg.load_config(["--preset=tiny", f"--tables={tables}"])
    assert cfg.tables == (tg.NgramTable("a_embed", 2, 30, 2, 37.5, 5.0, 0.95),
                          tg.NgramTable("b_embed", 4, 50, 4, 70.0, 0.0, 0.5))
    assert tg.parse_value("tables", tg.format_value(cfg.tables)) == cfg.tables
    assert replace(tg.load_config(["--preset=pocket_tables", "--tables=[]"]), preset="pocket") == preset_of("pocket")

@pytest.mark.parametrize("name", tg.PRESETS)
def test_parse_value__is_the_inverse_of_format_value(name) -> None:
    expected = preset_of(name)
    for field, value in vars(expected).items():
        parsed = tg.parse_value(field, tg.format_value(value))
        assert (parsed, type(parsed)) == (value, type(value)), field
    argv = [f"--{field}={tg.format_value(value)}" for field, value in vars(expected).items()
            if field not in ("preset", "resume")]                            # --resume needs a run
    assert tg.load_config(["--preset=tiny", *argv]) == replace(expected, preset="tiny")
    assert tg.load_config([f"--preset={name}"]) == expected

@pytest.mark.recipe
def test_NGRAM_FACTORS__are_those_of_the_published_losses() -> None:
    """Written here again, because the reference reads them from the trainer."""
    assert tg.NGRAM_FACTORS == {2: (36313, 27191), 3: (17351, 60961, 45259), 4: (50411, 22787, 64951, 38327)}


# ---- fields of Config ------------------------------------------------------------------------------------------------
FREE_TEXT = {"train_files", "val_files", "run_dir", "save", "resume"}
CHOSEN = {"preset", "dtype", "head", "device", "attention", "row_comms"}     # texts, one of a few
NOT_ZERO = {"val_tokens", "val_batch_tokens", "max_doc_len", "seqs_per_step", "model_dim", "num_heads", "head_dim",
            "num_scheduled_steps", "window_block", "final_long_window", "adam_every", "micro_batch_size", "runs",
            "comm_timeout"}
FRACTIONS = {"cooldown_frac", "normuon_beta2", "momentum_min", "momentum_max", "momentum_warmup_frac",
             "momentum_cooldown_frac"}

@pytest.mark.parametrize("name", [f.name for f in fields(tg.Config) if f.name not in FREE_TEXT | {"stages", "tables"}])
def test_check_config__refuses_wrong_values_of_every_field(name) -> None:
    default = getattr(tg.Config, name)
    bad = ["", "x", "nan", "inf", "-2", "2147483649", "1 2"]
    if isinstance(default, int):
        bad += ["1.5", "1e3"]
    bad += ["0"] * (name in NOT_ZERO) + ["1.01"] * (name in FRACTIONS) + ["BFLOAT16", "1"] * (name in CHOSEN)
    for text in bad:
        refuse(["--preset=tiny", f"--{name}={text}"], f"--{name}")
    others = [str(default), None, (default,)] if not isinstance(default, str) else [0, None, (default,)]
    for value in [*others, math.nan] + [1.5] * isinstance(default, int):
        if name != "preset":
            with expect_error(tg.ConfigError, f"--{name}="):
                tg.make_config({"preset": "tiny", name: value})
    assert isinstance(default, str) == (name in CHOSEN), "a new text needs an entry in CHOSEN or FREE_TEXT"

def test_Config__every_field_is_used() -> None:
    source = (ROOT / "train_gpt.py").read_text()
    for f in fields(tg.Config):
        assert re.search(rf"cfg\.{f.name}\b|\(\"{f.name}\", ", source), f.name


# ---- presets ---------------------------------------------------------------------------------------------------------
@pytest.mark.recipe
def test_PRESETS__have_the_settings_of_the_published_losses() -> None:
    """Those in the logs of record 23, except what its data and its bench decide."""
    compared = set()
    row = "label", "order", "rows", "cadence", "lr_mul", "wd_mul", "beta2"             # of the fields of NgramTable
    others = {"seed", "sample_tokens", "comm_timeout", "run_dir", "vocab_size", "padded_vocab", "bigram_rows"}
    for path in (ROOT / "records/2026-11-25_23_Race/logs").rglob("log.jsonl.gz"):
        config = json.loads(gzip.open(path).readline())["config"]
        config["tables"] = [[table[name] for name in row] for table in config["tables"]]
        cfg = preset_of(config["preset"])
        expected = json.loads(json.dumps(asdict(cfg) | dict(tables=list(map(astuple, cfg.tables)))))
        for name in config.keys() & expected.keys() - others:
            assert config[name] == expected[name], (config["preset"], name)
        compared.add(config["preset"])
    assert compared == {"pocket", "race", "race_tables"}
