"""Plans as files: every mistake is named with value and limit, all of them at once; what is written reads back."""

import json
import re
import tomllib

import pytest
from pydantic import BaseModel

from launcher.plan.file import PlanError, load_plan
from launcher.plan.plan import Plan
from launcher.plan.writing import commented_plan, plan_schema

FORMS_WANTED = "'auto', 'chinchilla', 'coupled', 'power', 'kaplan' or 'overtraining' is wanted"


def problems_of(tmp_path, text, *overrides):
    path = tmp_path / "plan.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        load_plan(path, overrides)
    num = len(caught.value.problems)
    head = f"{path}: {num} problem{'s' if num > 1 else ''}"
    assert str(caught.value) == head + "".join(f"\n  {problem}" for problem in caught.value.problems)
    return [re.sub(r" \(line \d+\)$", "", problem) for problem in caught.value.problems]


BAD = [
    ("search.num_trials = 0", "greater than or equal to 1 is wanted"),
    ("search.num_trials = 2.5", "a valid integer is wanted"),
    ("search.num_trials = true", "search.num_trials = True: a valid integer is wanted"),
    ('search.num_trials = "24"', "search.num_trials = '24': a valid integer is wanted, without quotes"),
    ("search.num_trails = 24", "search.num_trails is unknown: did you mean num_trials?"),
    ("serach.num_trials = 24", "serach is unknown: did you mean search?"),
    ("target.usd = 5", "target.usd is unknown: known: budget_flops, width_multiple, num_layers, batch_tokens"),
    ("zzz.a = 1", "zzz is unknown: known: data, model, proxy, search, transfer, ladder, target, cluster, launch"),
    ("search.seed = 2147483648", "less than 2147483648 is wanted"),
    ("search.learning_rate = [0.001]", "one more value is wanted"),
    ("search.learning_rate = [0.1, 0.2, 0.3]", "a list of 2 is wanted"),
    ("search.learning_rate = 0.001", "a list is wanted"),
    ("search.learning_rate = [0.1, 0.001]", "the lower end first"),
    ("search.learning_rate = [0.0, 0.1]", "search.learning_rate.0 = 0.0: greater than 0 is wanted"),
    ("search.warmup_fraction = [0.1, 1.0]", "search.warmup_fraction.1 = 1.0: less than 1 is wanted"),
    ("target.budget_flops = nan", "a finite number is wanted"),
    ("target.budget_flops = 1e+31", "less than or equal to 1e+30 is wanted"),
    ('target.budget_flops = "1e13"', "target.budget_flops = '1e13': a valid number is wanted, without quotes"),
    ("model.head_dim = 15", "a multiple of 2 is wanted"),
    ("model.seq_len = 100", "proxy.batch_tokens = 1024: no multiple of model.seq_len = 100"),
    ('proxy.parametrization = "mu-p"',
     "proxy.parametrization = 'mu-p': 'sp', 'mup', 'mup_no_wd_scaling', 'completep', 'completedp' or 'umup' is wanted"),
    ("proxy.num_slots = 0", "proxy.num_slots = 0: 'auto' or a whole number from 1 to 4096 is wanted"),
    ('ladder.num_slots = "all"', "ladder.num_slots = 'all': 'auto' or a whole number from 1 to 4096 is wanted"),
    ('proxy.compiled = "yes"', "proxy.compiled = 'yes': 'auto', true or false is wanted"),
    ('proxy.matmul_precision = "low"',
     "proxy.matmul_precision = 'low': 'highest', 'high', 'medium' or 'auto' is wanted"),
    ("transfer.widths = [48, 64]", "must hold proxy.base_width = 32, whose optimum is the one transferred"),
    ("proxy.weight_decay = 8.0",
     "proxy.weight_decay = 8.0 at learning rate 0.125: a step would take 1 of a hidden weight"),
    ("transfer.widths = [32]", "a list of at least 2 is wanted"),
    ("transfer.widths = [32, 32]", "each value once"),
    ("transfer.widths = [32, 72]", "transfer.widths: width = 72 is no multiple of head_dim = 16"),
    ("transfer.offsets_octaves = [-1.0, 0.0, 1.0]", "a list of at least 4 is wanted"),
    ("transfer.durations = [2.0, 4.0]", "must hold 1, the proxies' own, and at least one more"),
    ("transfer.durations = [0.001, 1.0]", "transfer: a run of 0.2 steps is too short"),
    ("transfer.depths = [3, 4]", "must hold 2, the proxies' own, and at least one more"),
    ("transfer.batches = [1.0, 1.03]",
     "transfer.batches: 1.03 times proxy.batch_tokens = 1054.72 tokens, no multiple of 64"),
    ("transfer.hyperparameter_widths = [64, 128]",
     "must hold proxy.base_width = 32, whose optimum is the one transferred"),
    ("transfer.narrow_offsets_octaves = [-30.0, 0.0, 1.0, 2.0]",
     "transfer.narrow_offsets_octaves.0 = -30.0: greater than or equal to -20 is wanted"),
    ('transfer.measured_rules = ["width"]', "transfer.measured_rules.0 = 'width': 'duration' or 'batch' is wanted"),
    ('transfer.hyperparameters = { weight_decay = ["width"] }',
     "transfer.hyperparameters.weight_decay: tested by factors of 2, and proxy.weight_decay is 0"),
    ('transfer.hyperparameters = { clip_norm = ["width", "width"] }',
     "transfer.hyperparameters.clip_norm = ['width', 'width']: each value once"),
    ('transfer.hyperparameters = { clipnorm = ["width"] }',
     ("transfer.hyperparameters.clipnorm is unknown: 'warmup_fraction', 'clip_norm', 'weight_decay', 'beta1', 'beta2', "
      "'embedding_multiplier' or 'output_multiplier' is wanted")),
    ("target.batch_tokens = 100", "no multiple of 64 tokens"),
    ("transfer.level = 1.0", "less than 1 is wanted"),
    ("ladder.num_steps = [0]", "ladder.num_steps.0 = 0: greater than or equal to 1 is wanted"),
    ('ladder.form = "cubic"', f"ladder.form = 'cubic': {FORMS_WANTED}"),
    ("launch.data_parallel_shard = 3", "launch: 3 ranks do not divide the 16 sequences of a batch"),
    ("data.path = 3", "a valid string is wanted"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), BAD)
def test_one_mistake_is_one_sentence(tmp_path, line, said):
    """Messages that do not name key and value themselves follow `key = value: `."""
    said = said if re.match(r"[\w.]+( =| is|:) ", said) else f"{line}: {said}"
    assert problems_of(tmp_path, line) == [said]
    assert problems_of(tmp_path, "", line) == [said], "the same by --set"


def test_many_mistakes_are_said_at_once(tmp_path):
    text = """
        serach.seed = 1
        [proxy]
        num_steps = 0
        beta1 = "x"
        [transfer]
        widths = [32, 33]
        [model]
        seq_len = 100
    """
    assert problems_of(tmp_path, text, "ladder.form=best", "nodot=1", "ladder.bootstrap=1") == [
        "--set nodot=1: section.key=value is wanted",
        "proxy.num_steps = 0: greater than or equal to 1 is wanted",
        "proxy.beta1 = 'x': a valid number is wanted, without quotes",
        f"ladder.form = 'best': {FORMS_WANTED}",
        "ladder.bootstrap = 1: greater than or equal to 50 is wanted",
        "serach is unknown: did you mean search?",
        "transfer.widths: width = 33 is no multiple of head_dim = 16",
        "proxy.batch_tokens = 1024: no multiple of model.seq_len = 100",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[search", "is not TOML: Expected ']' at the end of a table declaration (at end of document)"),
        ("a = 1\na = 2", "is not TOML: Cannot overwrite a value"),
        ("search = 3", "search = 3: a section is wanted"),
        ("[[search]]\nseed = 3", "search = [{'seed': 3}]: a section is wanted"),
    ],
)
def test_what_is_no_plan_at_all(tmp_path, text, said):
    (problem,) = problems_of(tmp_path, text)
    assert problem.startswith(said)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(PlanError, match=r"nowhere\.toml: 1 problem\n  cannot be read: No such file or directory"):
        load_plan(tmp_path / "nowhere.toml")
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        load_plan(tmp_path)
    (tmp_path / "plan.toml").write_bytes(b"\xff")
    with pytest.raises(PlanError, match=r"is not UTF-8: byte 0xff \(line 1\); save it as UTF-8"):
        load_plan(tmp_path / "plan.toml")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("search.seed", "--set search.seed: section.key=value is wanted"),
        ("=1", "--set =1: section.key=value is wanted"),
        (".seed=1", "--set .seed=1: section.key=value is wanted"),
        ("search.seed=", "--set search.seed=: '' is no TOML value (strings need quotes)"),
        ("proxy.schedule=w s d", "--set proxy.schedule=w s d: 'w s d' is no TOML value (strings need quotes)"),
        ("search.seed=x", "search.seed = 'x': a valid integer is wanted"),
        ("search.a.b=1", "search.a.b is unknown: known: num_trials, "),
    ],
)
def test_bad_overrides(tmp_path, override, said):
    (problem,) = problems_of(tmp_path, "", override)
    assert problem.startswith(said)


def test_good_overrides_win_and_the_last_wins(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("[search]\nseed = 1\n[proxy]\neps = 1\n")
    plan = load_plan(path, ("search.seed=2", "search.seed = 3", 'proxy.schedule="wsd"', "transfer.widths=[32, 64]"))
    assert (plan.search.seed, plan.proxy.schedule, plan.transfer.widths) == (3, "wsd", (32, 64))
    assert plan.proxy.eps == 1.0
    assert type(plan.proxy.eps) is float, "a whole number where a float is wanted"


def test_a_commented_plan_reads_back(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(commented_plan({}))
    assert load_plan(path) == Plan()
    values = {
        "target": {"budget_flops": 1.23456789e13},
        "data": {"path": 'a "b" \\ \n \x7f \x01 \u00f6 \U0001f600'},
        "search": {"learning_rate": (1e-7, 12345678.9), "warmup_fraction": (0.0, 0.1 + 0.2)},
    }
    path.write_text(commented_plan(values), encoding="utf-8")
    plan = load_plan(path)
    assert plan.target.budget_flops == 1.23456789e13
    assert plan.data.path == values["data"]["path"]
    assert plan.search.learning_rate == (1e-7, 12345678.9)
    assert plan.search.warmup_fraction == (0.0, 0.1 + 0.2)


def test_a_commented_plan_says_everything():
    text = commented_plan({})
    for section, field in Plan.model_fields.items():
        assert f"[{section}]  # " in text
        for key, inner in field.annotation.model_fields.items():
            assert f"# {inner.description}" in text
            assert f"\n{key} = " in text
    assert 'One of: cosine, linear, wsd, constant.\nschedule = "cosine"' in text
    assert "budget_flops = 1e13\n" in text
    assert tomllib.loads(text)["search"]["num_trials"] == 24


def test_the_schema_knows_every_key_and_holds_the_defaults():
    schema = plan_schema()
    for section, field in Plan.model_fields.items():
        described = schema["$defs"][field.annotation.__name__]
        assert described["additionalProperties"] is False
        assert set(described["properties"]) == set(field.annotation.model_fields)
        for key, told in described["properties"].items():
            assert told["description"], (section, key)
            default = getattr(getattr(Plan(), section), key)
            default = default.model_dump() if isinstance(default, BaseModel) else default
            assert told["default"] == json.loads(json.dumps(default))
            if "minimum" in told:
                assert told["minimum"] <= default
    assert schema["additionalProperties"] is False


def test_a_word_needs_no_quotes(tmp_path):
    (tmp_path / "plan.toml").write_text("")
    plan = load_plan(tmp_path / "plan.toml", ("proxy.schedule=wsd", "proxy.factory=mine.models:build"))
    assert (plan.proxy.schedule, plan.proxy.factory) == ("wsd", "mine.models:build")
