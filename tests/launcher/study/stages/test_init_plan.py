"""Tests of `forerun init`: its plans are valid and affordable, state their size and cost, and match
their JSON Schema.
"""

import json
import re
import shutil
import tomllib

import jsonschema
import optuna
import pytest
from tiny_study import COMMAND, run_forerun, run_json, write_corpus, write_plan, write_plan_with

from forerun._launcher.main_run import progress_output
from forerun._launcher.study.plan.file import check_plan, load_plan
from forerun._launcher.study.plan.presets import PRESETS
from forerun._launcher.study.plan.writing import build_plan_schema, format_plan

ON_GPUS = [name for name, preset in PRESETS.items() if preset.gpu]
COSTS_USD = {"gpu-24gb": None, "8xh100": (1200, 3000), "slurm": (12_000, 30_000)}
"""Range in which the cost of each GPU preset's main run must lie, in dollars; None if no price is
published. An edit of a preset must not make it a surprise to pay for.
"""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A folder with a corpus."""
    folder = tmp_path_factory.mktemp("corpora")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def plans(corpora):
    """Every preset's plan next to one corpus, with the answer of `init`."""
    plans = {}
    for name in PRESETS:
        path = corpora / f"{name}.toml"
        code, body = run_json("init", "--preset", name, "--out", path)
        assert code == 0
        plans[name] = path, body
    return plans


def test_default_plan_is_the_cpu_preset(tmp_path, plans):
    """`init` without options writes the same text as `init --preset cpu`, which is that of the
    preset's values.
    """
    code, body = run_json("init", "--out", tmp_path / "plan.toml")
    assert (code, body["preset"]) == (0, "cpu")
    assert (tmp_path / "plan.toml").read_text() == plans["cpu"][0].read_text()
    plan = load_plan(tmp_path / "plan.toml")
    expected = format_plan(
        PRESETS["cpu"].values | {"data": {"path": "corpus"}, "target": {"budget_flops": 1e13}}
    )
    assert (tmp_path / "plan.toml").read_text() == expected
    assert (plan.proxy.base_width, plan.proxy.num_steps, plan.launch.precision) == (
        32,
        200,
        "float32",
    )


@pytest.mark.parametrize("name", ["cpu", "slurm"])
def test_preset_is_valid_with_the_warnings_of_init(plans, name):
    code, out, err = run_forerun("validate", plans[name][0])
    assert (code, err) == (0, "")
    warnings = [line for line in out.splitlines() if line.startswith("warning")]
    assert warnings == [f"warning: {warning}" for warning in plans[name][1]["warnings"]]
    assert out.endswith(f"next: forerun estimate {plans[name][0]}\n")


@pytest.mark.parametrize("name", ON_GPUS)
def test_gpu_preset_is_sensible_and_affordable(plans, name):
    path, init_body = plans[name]
    plan, preset = load_plan(path), PRESETS[name]
    assert plan.proxy.base_width >= 256 and plan.model.num_layers >= 4
    assert (plan.proxy.num_slots, plan.ladder.num_slots, plan.proxy.dtype) == (
        "auto",
        "auto",
        "bfloat16",
    )
    assert plan.launch.data_parallel_shard * plan.launch.data_parallel_replicate == preset.num_gpus
    assert plan.cluster.num_workers * plan.cluster.worker_gpus == preset.num_gpus
    code, body = run_json("estimate", path)
    assert code == 0
    main = body["main_run"]
    assert (main["machine"]["gpu"], main["machine"]["num_gpus"]) == (preset.gpu, preset.num_gpus)
    assert not any("layout" in warning for warning in main["warnings"]), "it fits the GPU"
    assert body["num_workers"] == preset.num_gpus
    assert body["total"]["share_of_main_run"] < 0.15
    share = body["total"]["share_of_main_run"]
    assert share == pytest.approx(sum(stage["share_of_main_run"] for stage in body["stages"]))
    assert init_body["comes_to"]["share_of_main_run"] == pytest.approx(share)
    # The ladder reaches far enough for the main run.
    assert not any(warning.startswith("gate fit") for warning in init_body["warnings"])
    assert 1 < main["days"]["value"] < 15
    assert 3 * plan.proxy.base_width < main["shape"]["width"] < 20 * plan.proxy.base_width
    assert max(plan.transfer.widths) <= main["shape"]["width"] / 2
    if COSTS_USD[name]:
        assert COSTS_USD[name][0] < main["usd"]["value"] < COSTS_USD[name][1]
    # With one worker per GPU of the main run, both kinds of hours agree.
    for stage in body["stages"]:
        assert stage["hours"]["value"] * preset.num_gpus == pytest.approx(
            stage["gpu_hours"]["value"]
        )


def test_every_plan_matches_the_schema_and_mistakes_do_not(plans):
    schema = build_plan_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path, _ in plans.values():
        assert json.loads(path.with_name("plan.schema.json").read_text()) == schema
        assert list(validator.iter_errors(tomllib.loads(path.read_text()))) == []
    plan_with_mistakes = {
        "proxy": {"num_steps": 0, "schedule": "cosin", "num_slots": 0, "beta1": 1.0},
        "zzz": {},
        "search": {"learning_rate": [1e-3], "num_trials": "24", "warmup_fraction": [0.1, 1.0]},
        "model": {"head_dim": 7},
    }
    paths = {
        ".".join(str(part) for part in error.absolute_path)
        for error in validator.iter_errors(plan_with_mistakes)
    }
    assert paths == {
        "",
        "proxy.num_steps",
        "proxy.schedule",
        "proxy.num_slots",
        "proxy.beta1",
        "search.learning_rate",
        "search.num_trials",
        "search.warmup_fraction.1",
        "model.head_dim",
    }


@pytest.mark.parametrize(
    ("vocab_size", "octaves", "margin"),
    [(256, 0, 0.01), (1000, 1, 0.026), (2048, 2, 0.03), (4096, 2, 0.034), (16384, 2, 0.038)],
)
def test_cpu_plan_follows_the_vocabulary(corpora, tmp_path, vocab_size, octaves, margin):
    """The presets for CPUs were made for a vocabulary of bytes. With a larger vocabulary, the best
    learning rate is higher, the main run is larger, and a token has more bytes.
    """
    shutil.copytree(corpora / "corpus", tmp_path / "corpus")
    manifest = tmp_path / "corpus" / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace('"vocab_size": 256', f'"vocab_size": {vocab_size}')
    )
    code, body = run_json("init", "--out", tmp_path / "plan.toml")
    assert code == 0 and not any(
        "hardly anything to transfer" in warning for warning in body["warnings"]
    )
    plan, preset = load_plan(tmp_path / "plan.toml"), load_plan(write_plan(tmp_path / "bytes", ""))
    assert body["comes_to"]["width"] >= 2 * plan.proxy.base_width
    assert plan.search.learning_rate == tuple(
        2**octaves * end for end in preset.search.learning_rate
    )
    assert (plan.target.budget_flops > 1e13) == (vocab_size >= 2048)
    assert plan.transfer.margin_nats == margin, "the same loss per byte of text"
    # Values that the user gives are kept.
    rates, user_margin = "search.learning_rate=[0.01, 0.1]", "transfer.margin_nats=0.02"
    options = ("--budget-flops", "2e13", "--set", rates, "--set", user_margin)
    assert run_json("init", "--out", tmp_path / "given.toml", *options)[0] == 0
    plan = load_plan(tmp_path / "given.toml")
    assert (plan.target.budget_flops, plan.search.learning_rate) == (2e13, (0.01, 0.1))
    assert plan.transfer.margin_nats == 0.02
    assert run_json("init", "--out", tmp_path / "muon.toml", "--optimizer", "muon")[0] == 0
    assert load_plan(tmp_path / "muon.toml").transfer.margin_nats == margin


def test_budget_in_dollars_is_what_estimate_charges(corpora, tmp_path):
    gpu = "h800"
    path = tmp_path / "plan.toml"
    options = ("--budget-usd", 5000, "--gpu", gpu, "--gpus", 4, "--usd-per-gpu-hour", 2.5)
    code, out, _ = run_forerun("init", "--data", corpora / "corpus", "--out", path, *options)
    assert code == 0
    share = r"[45]\d\.\d\s% \[\d+\.?\d*\s%, \d+\.?\d*\s%\] of the peak \(over all hours paid"
    assert re.search(
        rf"USD 5,000 pay for \S+ FLOPs on 4 {gpu.upper()}, at USD 2.5 an hour \(given\) and {share}",  # noqa: E501
        out,
    )
    assert "(preset 8xh100)" in out
    code, body = run_json("estimate", path)
    assert code == 0
    main = body["main_run"]
    assert main["usd"]["value"] == pytest.approx(5000, rel=0.1)
    assert (main["machine"]["gpu"], main["machine"]["num_gpus"]) == (gpu.upper(), 4)
    assert main["machine"]["price_usd"]["value"] == 2.5
    assert (
        run_json("estimate", path, "--price-usd", 5)[1]["main_run"]["machine"]["price_usd"]["value"]
        == 5
    )
    assert run_json("estimate", path, "--gpu", "H200")[1]["main_run"]["machine"]["gpu"] == "H200"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--budget-usd", 5, "--budget-flops", 5), "budget_flops and budget_usd: give one of them"),
        (
            ("--budget-usd", 5000, "--gpu", "A100"),
            "gpu = A100: has no published price: give usd_per_gpu_hour",
        ),
        (("--gpu", "H100", "--gpus", 12), "gpus = 12: must be at most 8, or whole nodes of 8"),
        (
            ("--preset", "8xh100", "--gpus", 7),
            "launch: 7 ranks do not divide the 256 sequences of a batch",
        ),
    ],
)
def test_refused_options_leave_no_plan(tmp_path, options, message):
    code, body = run_json("init", "--out", tmp_path / "plan.toml", *options)
    assert code == 2
    assert message in body["message"]
    assert not (tmp_path / "plan.toml").exists()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_text_in_place_of_a_corpus_is_never_overwritten(tmp_path, kind):
    text = tmp_path / "text" if kind == "folder" else tmp_path / "text.jsonl"
    if kind == "folder":
        text.mkdir()
    (text / "a.txt" if kind == "folder" else text).write_text("some text")
    plan = tmp_path / "plan.toml"
    code, _, err = run_forerun("init", "--data", text.name, "--out", plan)
    assert (
        code == 2
        and f"forerun tokenize {text} --out {tmp_path / 'corpus'}" in err
        and not plan.exists()
    )
    assert run_forerun("init", "--out", plan)[0] == 0
    for verb in ("validate", "estimate"):
        code, _, err = run_forerun(verb, plan, "--set", f'data.path="{text.name}"')
        assert code == 2 and f"--out {text}" not in err and f"forerun tokenize {text}" in err


def test_several_nodes_use_slurm_and_shard_within_a_node(tmp_path):
    code, body = run_json("init", "--gpu", "H100", "--gpus", 64, "--out", tmp_path / "plan.toml")
    assert (code, body["preset"]) == (0, "slurm")
    plan = load_plan(tmp_path / "plan.toml")
    degrees = plan.launch.data_parallel_shard, plan.launch.data_parallel_replicate
    assert (degrees, plan.cluster.num_workers) == ((8, 8), 64)
    assert plan.cluster.slurm_options[:2] == ("--nodes=8", "--gpus-per-node=8")
    assert "Budget or GPUs differ" in (tmp_path / "plan.toml").read_text()


def test_large_budget_gets_the_shape_and_layout_of_published_models(corpora):
    """An earlier version wrote 32 layers of width 8,192, sequences of 2,048, and full activation
    checkpointing.
    """
    path = corpora / "large.toml"
    code, body = run_json(
        "init", "--gpu", "H100", "--gpus", 256, "--budget-flops", "1e23", "--out", path
    )
    plan, size = load_plan(path), body["comes_to"]
    assert (code, body["preset"], plan.model.seq_len) == (0, "slurm", 4096)
    # For comparison: Llama 33B has 60 layers of width 6656, OLMo 2 32B has 64 of width 5120.
    assert 52 <= size["num_layers"] == plan.model.num_layers <= 64
    assert 5120 <= size["width"] <= 6656
    assert plan.launch.activation_checkpointing == "selective"
    assert plan.launch.data_parallel_shard * plan.launch.data_parallel_replicate == 256
    code, estimate = run_json("estimate", path)
    assert code == 0 and not any(
        "GB a rank" in warning for warning in estimate["main_run"]["warnings"]
    )
    path.unlink()
    run_json(
        "init",
        "--gpu",
        "H100",
        "--gpus",
        256,
        "--budget-flops",
        "1e23",
        "--set",
        "model.num_layers=40",
        "--out",
        path,
    )
    assert load_plan(path).model.num_layers == 40


def test_warm_start_sets_the_first_points_and_names_their_origin(tmp_path):
    old_study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'old.db'}", study_name="old")
    distributions = {"lr": optuna.distributions.FloatDistribution(1e-4, 1.0)}
    old_study.add_trial(
        optuna.trial.create_trial(params={"lr": 0.02}, distributions=distributions, values=[1.0])
    )
    plan = tmp_path / "plan.toml"
    code, out, err = run_forerun("init", "--warm-start", tmp_path / "old.db", "--out", plan)
    assert code == 0, err
    assert load_plan(plan).search.warm_start == ({"learning_rate": 0.02},)
    for text in (out, plan.read_text()):
        assert "search.warm_start: the best of 1 finished trial of Optuna's study 'old'" in text


def test_shard_of_the_wrong_size_is_refused(tmp_path):
    plan = write_plan(tmp_path)
    (shard, *_) = sorted((tmp_path / "corpus").glob("*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    code, _, err = run_forerun("validate", plan)
    assert code == 2 and f"{shard.name} has 101,776 bytes, the manifest says 101,778" in err
    shard.unlink()
    code, _, err = run_forerun("validate", plan)
    assert code == 2 and f"{shard.name} is missing" in err


def test_vocabulary_smaller_than_its_tokens_is_refused(tmp_path):
    plan, manifest = write_plan(tmp_path), tmp_path / "corpus" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"vocab_size": 256', '"vocab_size": 25'))
    code, _, err = run_forerun("validate", plan)
    assert code == 2 and "vocab_size = 25: must be at least 256" in err


UNPASSABLE_GATES = {
    "gate fit: with 6 rungs the largest one": ["ladder.widths=[8, 16]"],
    "gate fit: target.budget_flops is ": ["target.budget_flops=1e12"],
    "gate ladder_tuned: ladder.check_offsets_octaves is empty": ["ladder.check_offsets_octaves=[]"],
    "gate ladder_tuned: ladder.check_share = 0.001 pays for no rung": ["ladder.check_share=0.001"],
    "gate coordinates: proxy.parametrization = 'sp'": ["proxy.parametrization='sp'"],
    "launch: pipeline = 3 does not divide num_layers = 1": ["launch.pipeline=3"],
}
"""Values of `--set` with which a gate cannot pass, by the start of the warning."""


@pytest.mark.parametrize("start", UNPASSABLE_GATES)
def test_gate_that_cannot_pass_is_warned_of_before_the_runs(tmp_path, start):
    plan = write_plan(tmp_path)
    code, body = run_json("validate", plan)
    assert code == 0
    assert not any(warning.startswith(tuple(UNPASSABLE_GATES)) for warning in body["warnings"])
    sets = [word for value in UNPASSABLE_GATES[start] for word in ("--set", value)]
    code, body = run_json("validate", plan, *sets)
    assert code == 0
    assert any(warning.startswith(start) for warning in body["warnings"]), body


def test_gates_that_cannot_judge_a_users_command_are_warned_of(tmp_path):
    (tmp_path / "trainer.py").touch()
    code, body = run_json("validate", write_plan_with(tmp_path, COMMAND % "python3"))
    assert code == 0
    assert any(warning.startswith("gates coordinates and data") for warning in body["warnings"])


def test_ladder_too_small_for_its_law_is_refused(tmp_path):
    """A rung is a run of the ladder. Six rungs are enough for Chinchilla's law, which has five
    parameters. The coupled law has six, and needs seven rungs.
    """
    plan, small = write_plan(tmp_path), ("--set", "ladder.widths=[8, 16]")
    assert run_json("validate", plan, *small)[0] == 0
    code, body = run_json("validate", plan, *small, "--set", "ladder.form='coupled'")
    assert (
        code == 2 and "has 6 parameters" in body["problems"][0] and "7 rungs" in body["problems"][0]
    )


def test_full_validation_shows_progress(tmp_path, monkeypatch):
    plan = write_plan(tmp_path)
    steps = []

    def record_step(self, name, share):
        steps.append((name, share))

    monkeypatch.setattr(progress_output.StepProgress, "step", record_step)
    assert run_json("validate", plan)[0] == 0 and not steps
    assert run_json("validate", plan, "--full")[0] == 0
    names, shares = zip(*steps, strict=True)
    assert set(names) == {path.name for path in (tmp_path / "corpus").glob("*.bin")}
    assert shares[0] == 0 and list(shares) == sorted(shares) and shares[-1] < 1


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("transfer.num_seeds", 1000),
        ("transfer.control_num_seeds", 1000),
        ("transfer.axis_num_seeds", 1000),
        ("transfer.check_num_seeds", 1000),
        ("ladder.num_seeds", 100),
    ],
)
def test_too_large_grid_is_refused_with_its_limit(tmp_path, key, number):
    """Many values are allowed, and so are many seeds, but not both in one grid."""
    widths = list(range(8, 8 + 8 * 40, 8))
    keys = ("transfer.widths", "transfer.control_widths", "transfer.check_widths", "ladder.widths")
    overrides = [f"{name}={widths}" for name in keys]
    overrides.append(f"transfer.durations={[1.0 + n / 6 for n in range(40)]}")
    plan = write_plan(tmp_path)
    words = [word for override in overrides for word in ("--set", override)]
    assert check_plan(plan, overrides)[1] == []
    code, body = run_json("validate", plan, *words, "--set", f"{key}={number}")
    assert code == 2 and len(body["problems"]) == 1, body
    assert body["problems"][0].startswith(f"{key}: 40 ") or key == "ladder.num_seeds"
    assert "runs: must be at most 10,000" in body["problems"][0]
