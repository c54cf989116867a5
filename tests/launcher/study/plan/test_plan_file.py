"""Tests of plan files: all mistakes are reported at once with value, limit and line, and a written
plan is read as the same plan.
"""

import tomllib

import pytest
from tiny_study import run_forerun, run_json

from forerun._launcher.study.plan.file import MAX_BYTES, PlanError, load_plan
from forerun._launcher.study.plan.plan import Plan
from forerun._launcher.study.plan.writing import format_plan


def list_problems(tmp_path, text, *overrides):
    """Return the problems of a plan without their line numbers. Assert that the message of the
    error has all of them.
    """
    path = tmp_path / "plan.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        load_plan(path, overrides)
    problems = caught.value.problems
    head = f"{path}: {len(problems)} problem{'s' if len(problems) > 1 else ''}"
    assert str(caught.value) == head + "".join(f"\n  {problem}" for problem in problems)
    return [problem.partition(" (line ")[0] for problem in problems]


BAD_LINES = {
    "search.num_trails = 24": "search.num_trails is unknown: did you mean num_trials?",
    "serach.num_trials = 24": "serach is unknown: did you mean search?",
    "search.learning_rate = [0.1, 0.001]": "the lower end first",
    "target.budget_flops = nan": "must be a finite number",
    "model.seq_len = 100": "proxy.batch_tokens = 1024: must be a multiple of model.seq_len = 100",
    'proxy.parametrization = "mu-p"': "'mup_no_wd_scaling', 'completep', 'completedp' or 'umup'",
    "proxy.num_slots = 0": "must be 'auto' or a whole number from 1 to 4096",
    'proxy.compiled = "yes"': "must be 'auto', true or false",
    "transfer.widths = [48, 64]": "must contain proxy.base_width = 32",
    "proxy.weight_decay = 8.0": "a step would take 1 of a hidden weight",
    "transfer.widths = [32, 32]": "must not repeat a value",
    "transfer.durations = [2.0, 4.0]": "must contain 1,",
    "transfer.durations = [0.001, 1.0]": "transfer: a run of 0.2 steps is too short",
    "transfer.batches = [1.0, 1.03]": (
        "1.03 times proxy.batch_tokens = 1054.72: must be a multiple of 64"
    ),
    'transfer.hyperparameters = { weight_decay = ["width"] }': "proxy.weight_decay must not be 0",
    'transfer.hyperparameters = { clipnorm = ["width"] }': (
        "no such hyperparameter: did you mean clip_norm?"
    ),
    "target.batch_tokens = 100": "must be a multiple of 64 tokens",
    "launch.data_parallel_shard = 3": "launch: 3 ranks do not divide the 16 sequences of a batch",
    "ladder.batch_tokens = 100": "ladder.batch_tokens = 100: must be a multiple of 64 tokens",
    "ladder.widths = [32]": "ladder: 1 width",
    "ladder.check_offsets_octaves = [1.0, 2.0]": "rates below and above the rung's own",
    "ladder.check_offsets_octaves = [-5.0, 1.0]": "at most 4 octaves",
    'cluster.address = "ray://head:10001"': "must be host:port of the head, or auto",
    'cluster.address = "head"': "must be host:port of the head, or auto",
    "cluster.worker_cpus = 0.0": "cluster.worker_cpus = 0.0: must be greater than 0",
    "cluster.worker_gpus = 1.5": "or a whole number",
    "cluster.worker_gpus = 1e-9": "a share of one GPU of at least 0.01",
    "cluster.max_usd = 5.0": "needs cluster.usd_per_device_hour",
    'search.sampler = "zzz"': "must be 'tpe', 'gp' or 'random'",
    'search.can_be_off = ["warmup_fraction"]': "must be 'clip_norm' or 'weight_decay'",
    "search.choices = { eps = [1e-9, 1e-8] }\nsearch.axes = { eps = [1e-9, 1e-8] }": (
        "give one of them"
    ),
}
"""Words of the problem, by the wrong lines of a plan."""


@pytest.mark.parametrize("line", BAD_LINES)
def test_one_mistake_is_one_problem(tmp_path, line):
    [problem] = list_problems(tmp_path, line)
    assert BAD_LINES[line] in problem


def test_all_mistakes_are_reported_at_once(tmp_path):
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
    assert list_problems(tmp_path, text, "ladder.form=best", "nodot=1", "ladder.bootstrap=1") == [
        "--set nodot=1: must be section.key=value",
        "proxy.num_steps = 0: must be at least 1",
        "proxy.beta1 = 'x': must be a number",
        "ladder.form = 'best': must be 'auto', 'compute', 'chinchilla', 'coupled' or 'power'",
        "ladder.bootstrap = 1: must be at least 50",
        "serach is unknown: did you mean search?",
        "transfer.widths: width = 33 must be a multiple of head_dim = 16",
        "proxy.batch_tokens = 1024: must be a multiple of model.seq_len = 100",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[search",
            "is not TOML: Expected ']' at the end of a table declaration (at end of document)",
        ),
        ("[proxy]\nschedule = cosine\n", "is not TOML: Invalid value (at line 2, column 12)"),
        ("a = " + "9" * 5000, "is not TOML"),
        ("#" * (MAX_BYTES + 1), f"is longer than {MAX_BYTES} bytes"),
        ("search = 3", "search = 3: must be a section"),
    ],
)
def test_file_that_is_no_plan_is_refused(tmp_path, text, message):
    (problem,) = list_problems(tmp_path, text)
    assert problem.startswith(message)


def test_key_of_another_section_is_suggested_before_a_similar_name(tmp_path):
    (tmp_path / "plan.toml").write_text(
        "[proxy]\nlearning_rate = 0.01\nbase_widht = 32\nnum_seeds = 2\n"
    )
    with pytest.raises(PlanError) as caught:
        load_plan(tmp_path / "plan.toml")
    hints = dict(problem.split(" is unknown: ") for problem in caught.value.problems)
    assert "search.learning_rate?" in hints["proxy.learning_rate"]
    assert "base_width?" in hints["proxy.base_widht"]
    assert "transfer.num_seeds or ladder.num_seeds?" in hints["proxy.num_seeds"]


def test_unreadable_file_is_refused(tmp_path):
    with pytest.raises(
        PlanError, match=r"nowhere\.toml: 1 problem\n  cannot be read: No such file or directory"
    ):
        load_plan(tmp_path / "nowhere.toml")
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        load_plan(tmp_path)
    (tmp_path / "plan.toml").write_bytes(b"\xff")
    with pytest.raises(PlanError, match="is not UTF-8: save it as UTF-8"):
        load_plan(tmp_path / "plan.toml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("search.seed", "--set search.seed: must be section.key=value"),
        ("search.seed=", "--set search.seed=: '' is not a TOML value (strings need quotes)"),
        (
            "proxy.schedule=w s d",
            "--set proxy.schedule=w s d: 'w s d' is not a TOML value (strings need quotes)",
        ),
        ("search.seed=x", "search.seed = 'x': must be a whole number"),
        ("search.a.b=1", "search.a.b is unknown: known: num_trials, "),
    ],
)
def test_wrong_overrides_are_refused(tmp_path, override, message):
    (problem,) = list_problems(tmp_path, "", override)
    assert problem.startswith(message)


def test_overrides_win_and_the_last_one_wins(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("[search]\nseed = 1\n[proxy]\neps = 1\n")
    plan = load_plan(
        path,
        ("search.seed=2", "search.seed = 3", 'proxy.schedule="wsd"', "transfer.widths=[32, 64]"),
    )
    assert (plan.search.seed, plan.proxy.schedule, plan.transfer.widths) == (3, "wsd", (32, 64))
    assert plan.proxy.eps == 1.0
    assert type(plan.proxy.eps) is float, "an integer becomes a float"


def test_written_plan_is_read_as_the_same_plan(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(format_plan({}))
    assert load_plan(path) == Plan()
    values = {
        "target": {"budget_flops": 1.23456789e13},
        "data": {"path": 'a "b" \\ \n \x7f \x01 \u00f6 \U0001f600'},
        "search": {"learning_rate": (1e-7, 12345678.9), "warmup_fraction": (0.0, 0.1 + 0.2)},
    }
    path.write_text(format_plan(values), encoding="utf-8")
    plan = load_plan(path)
    assert plan.target.budget_flops == 1.23456789e13
    assert plan.data.path == values["data"]["path"]
    assert plan.search.learning_rate == (1e-7, 12345678.9)
    assert plan.search.warmup_fraction == (0.0, 0.1 + 0.2)


def test_written_plan_describes_every_key():
    text = format_plan({}, every=True)
    for section, field in Plan.model_fields.items():
        assert f"[{section}]  # " in text
        for key, inner in field.annotation.model_fields.items():
            assert "# " + " ".join(inner.description.split()) in text
            assert f"\n{key} = " in text
    assert 'One of: cosine, linear, wsd, constant.\nschedule = "cosine"' in text
    assert "budget_flops = 1e13\n" in text
    assert tomllib.loads(text)["search"]["num_trials"] == 24


PLAN_WITH_PROBLEMS = """# a plan
search.seed = -1
[proxy]
num_steps = 0
[ladder]  # sizes
widths = [
  32, 33,
]
[serach]
[target]
budget_flops = nan
"""
LINE_NUMBERS = {"proxy.num_steps": 4, "ladder.widths": 6, "serach": 9, "target.budget_flops": 11}
"""Lines of the problems in `PLAN_WITH_PROBLEMS`, counted from 1."""


@pytest.mark.parametrize(
    ("start", "newline"), [(b"", "\n"), (b"\xef\xbb\xbf", "\r\n")], ids=["unix", "windows"]
)
def test_every_problem_names_its_line(tmp_path, start, newline):
    path = tmp_path / "plan.toml"
    path.write_bytes(start + PLAN_WITH_PROBLEMS.replace("\n", newline).encode())
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    problems = caught.value.problems
    for key, line in LINE_NUMBERS.items():
        (problem,) = [problem for problem in problems if problem.startswith(key)]
        assert problem.endswith(f" (line {line})")
    # The dotted key `search.seed` is a problem too, but its line is not known.
    assert len(problems) == len(LINE_NUMBERS) + 1


def test_invalid_toml_shows_no_secret(tmp_path):
    secret = "wandb_v1_" + "a1B2" * 18  # in the form of a W&B API key
    problems = list_problems(tmp_path, f"[data]\npath = {secret}\n")
    code, out, err = run_forerun("validate", tmp_path / "plan.toml")
    assert code == 2 and "a1B2a1B2" not in out + err + str(problems)


def test_validate_reports_a_missing_corpus_together_with_wrong_keys(tmp_path):
    (tmp_path / "plan.toml").write_text(
        '[data]\npath = "nowhere"\n[proxy]\nnum_steps = 0\nbatch_tokens = 100\n'
    )
    problems = run_json("validate", tmp_path / "plan.toml")[1]["problems"]
    assert [problem.split(" = ")[0] for problem in problems] == [
        "proxy.num_steps",
        "proxy.batch_tokens",
        "data.path",
    ]
    assert [problem.rpartition("(line ")[2] for problem in problems] == ["4)", "5)", "2)"]


def test_validate_does_not_look_for_the_default_corpus_if_the_path_is_wrong(tmp_path):
    (tmp_path / "plan.toml").write_text("[data]\npath = 3\n[ladder]\nwidths = []\n")
    assert run_json("validate", tmp_path / "plan.toml")[1]["problems"] == [
        "data.path = 3: must be text (line 2)",
        "ladder.widths = []: must have at least 1 value (line 4)",
    ]


def test_unknown_gpu_and_too_many_trials_are_problems(tmp_path):
    problems = list_problems(
        tmp_path,
        "[launch]\ngpu = 'H9000'\n[search]\nnum_trials = 1000000000\nextension_trials = 1000001\n",
    )
    assert problems[:2] == [
        "search.num_trials = 1000000000: must be at most 1000000",
        "search.extension_trials = 1000001: must be at most 10000",
    ]
    assert len(problems) == 3 and problems[2].startswith(
        "launch.gpu: GPU 'H9000' is not in the table (did you mean H"
    )


def test_known_gpu_is_accepted_in_lower_case(tmp_path):
    (tmp_path / "plan.toml").write_text("[launch]\ngpu = 'h100'\n")
    assert load_plan(tmp_path / "plan.toml").launch.gpu == "h100"


@pytest.mark.parametrize(
    ("extra", "overrides"),
    [
        (f"[{'.'.join('a' * 3000)}]", ()),
        (f"[{'.'.join('a' * 12)}]", ()),
        (f"[deep]\nvalue = {'[' * 5000}{']' * 5000}", ()),
        ("", (f"search.axes={'[' * 5000}{']' * 5000}",)),
        ("", (f"search.axes={'{a=' * 20}1{'}' * 20}",)),
    ],
)
def test_nesting_is_limited(tmp_path, extra, overrides):
    (tmp_path / "plan.toml").write_text(f"[model]\nnum_layers = 2\n{extra}\n")
    with pytest.raises(PlanError, match="nested more than 10 levels deep"):
        load_plan(tmp_path / "plan.toml", overrides)


def test_lists_of_sizes_are_limited(tmp_path):
    widths = ", ".join(str(32 * width) for width in range(1, 2001))
    (tmp_path / "plan.toml").write_text(
        f"[transfer]\nwidths = [{widths}]\n[ladder]\nwidths = [{widths}]\n"
    )
    with pytest.raises(PlanError) as caught:
        load_plan(tmp_path / "plan.toml")
    assert [problem.partition(" (")[0] for problem in caught.value.problems] == [
        f"{section}.widths has 2,000 values: must be at most 100"
        for section in ("transfer", "ladder")
    ]
