"""`forerun init`: plans for real situations are valid, affordable, and say what they come to; editors know them."""

import json
import re
import shutil
import tomllib

import jsonschema
import pytest
from tiny_study import COMMAND, ask, forerun, plan_with, write_corpus, write_plan

from launcher.base import talk
from launcher.plan.file import checked_plan, load_plan
from launcher.plan.presets import PRESETS
from launcher.plan.writing import commented_plan, plan_schema

ON_GPUS = [name for name, preset in PRESETS.items() if preset.gpu]
COSTS_USD = {"gpu-24gb": None, "8xh100": (1200, 3000), "slurm": (12_000, 30_000)}
"""About what each preset's main run comes to, where a price is published."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def plans(corpora):
    """Every preset's plan beside one corpus, and what `init` answered."""
    found = {}
    for name in PRESETS:
        path = corpora / f"{name}.toml"
        code, body = ask("init", "--preset", name, "--out", path)
        assert code == 0
        found[name] = path, body
    return found


def test_no_preset_is_the_demos_plan(tmp_path, plans):
    """Its text, and so the digest of a demo, does not depend on there being presets."""
    code, body = ask("init", "--out", tmp_path / "plan.toml")
    assert (code, body["preset"]) == (0, "cpu")
    assert (tmp_path / "plan.toml").read_text() == plans["cpu"][0].read_text()
    plan = load_plan(tmp_path / "plan.toml")
    wanted = commented_plan(PRESETS["cpu"].values | {"data": {"path": "corpus"}, "target": {"budget_flops": 1e13}})
    assert (tmp_path / "plan.toml").read_text() == wanted
    assert (plan.proxy.base_width, plan.proxy.num_steps, plan.launch.precision) == (32, 200, "float32")


@pytest.mark.parametrize("name", ["cpu", "slurm"])
def test_a_preset_is_valid(plans, name):
    code, out, err = forerun("validate", plans[name][0])
    assert (code, err) == (0, "")
    warned = [line for line in out.splitlines() if line.startswith("warning")]
    assert warned == [f"warning: {said}" for said in plans[name][1]["warnings"]], "as `init` said"
    assert out.endswith(f"next: forerun estimate {plans[name][0]}\n")


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_gpu_preset_is_sensible_and_affordable(plans, name):
    path, told = plans[name]
    plan, preset = load_plan(path), PRESETS[name]
    assert plan.proxy.base_width >= 256 and plan.model.num_layers >= 4
    assert (plan.proxy.num_slots, plan.ladder.num_slots, plan.proxy.dtype) == ("auto", "auto", "bfloat16")
    assert plan.launch.data_parallel_shard * plan.launch.data_parallel_replicate == preset.num_gpus
    assert plan.cluster.num_workers * plan.cluster.worker_gpus == preset.num_gpus
    code, body = ask("estimate", path)
    assert code == 0
    main = body["main_run"]
    assert (main["machine"]["gpu"], main["machine"]["num_gpus"]) == (preset.gpu, preset.num_gpus)
    assert not any("layout" in said for said in main["warnings"]), "its own layout fits the card"
    assert body["num_workers"] == preset.num_gpus
    assert body["total"]["share_of_main_run"] < 0.15
    assert body["total"]["share_of_main_run"] == pytest.approx(sum(s["share_of_main_run"] for s in body["stages"]))
    assert not any(said.startswith("gate fit") for said in told["warnings"]), "its ladder reaches the main run"
    assert told["comes_to"]["share_of_main_run"] == pytest.approx(body["total"]["share_of_main_run"])
    assert 1 < main["days"]["value"] < 15
    assert 3 * plan.proxy.base_width < main["shape"]["width"] < 20 * plan.proxy.base_width
    assert max(plan.transfer.widths) <= main["shape"]["width"] / 2
    if COSTS_USD[name]:
        assert COSTS_USD[name][0] < main["usd"]["value"] < COSTS_USD[name][1]
    # On the main run's GPUs and a worker each, both columns of hours are one.
    for stage in body["stages"]:
        assert stage["hours"]["value"] * preset.num_gpus == pytest.approx(stage["gpu_hours"]["value"])


def test_editors_know_every_plan(plans):
    schema = plan_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path, _ in plans.values():
        assert json.loads(path.with_name("plan.schema.json").read_text()) == schema
        assert list(validator.iter_errors(tomllib.loads(path.read_text()))) == []
    bad = {
        "proxy": {"num_steps": 0, "schedule": "cosin", "num_slots": 0, "beta1": 1.0}, "zzz": {},
        "search": {"learning_rate": [1e-3], "num_trials": "24", "warmup_fraction": [0.1, 1.0]},
        "model": {"head_dim": 7},
    }  # fmt: skip
    paths = {".".join(str(part) for part in error.absolute_path) for error in validator.iter_errors(bad)}
    assert paths == {
        "", "proxy.num_steps", "proxy.schedule", "proxy.num_slots", "proxy.beta1", "search.learning_rate",
        "search.num_trials", "search.warmup_fraction.1", "model.head_dim",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("vocab_size", "octaves", "margin"),
    [(256, 0, 0.01), (1000, 1, 0.026), (2048, 2, 0.03), (4096, 2, 0.034), (16384, 2, 0.038)],
)
def test_a_plan_for_a_cpu_follows_the_vocabulary(corpora, tmp_path, vocab_size, octaves, margin):
    """The presets were made for bytes: another vocabulary moves the best rate, and makes every size larger."""
    shutil.copytree(corpora / "corpus", tmp_path / "corpus")
    manifest = tmp_path / "corpus" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"vocab_size": 256', f'"vocab_size": {vocab_size}'))
    code, body = ask("init", "--out", tmp_path / "plan.toml")
    assert code == 0 and not any("hardly anything to transfer" in warning for warning in body["warnings"])
    plan, preset = load_plan(tmp_path / "plan.toml"), load_plan(write_plan(tmp_path / "bytes", ""))
    assert body["comes_to"]["width"] >= 2 * plan.proxy.base_width
    assert plan.search.learning_rate == tuple(2**octaves * end for end in preset.search.learning_rate)
    assert (plan.target.budget_flops > 1e13) == (vocab_size >= 2048)
    assert plan.transfer.margin_nats == margin, "the same loss per byte of text"
    rates, own_margin = "search.learning_rate=[0.01, 0.1]", "transfer.margin_nats=0.02"
    given = ("--budget-flops", "2e13", "--set", rates, "--set", own_margin)
    assert ask("init", "--out", tmp_path / "given.toml", *given)[0] == 0
    plan = load_plan(tmp_path / "given.toml")
    assert (plan.target.budget_flops, plan.search.learning_rate) == (2e13, (0.01, 0.1)), "what is given stays"
    assert plan.transfer.margin_nats == 0.02
    assert ask("init", "--out", tmp_path / "muon.toml", "--optimizer", "muon")[0] == 0
    assert load_plan(tmp_path / "muon.toml").transfer.margin_nats == margin


def test_dollars_become_the_flops_that_estimate_counts(corpora, tmp_path):
    gpu = "h800"
    path = tmp_path / "plan.toml"
    asked = ("--budget-usd", 5000, "--gpu", gpu, "--gpus", 4, "--usd-per-gpu-hour", 2.5)
    code, out, _ = forerun("init", "--data", corpora / "corpus", "--out", path, *asked)
    assert code == 0
    share = r"[45]\d\.\d\s% \[\d+\.?\d*\s%, \d+\.?\d*\s%\] of the peak \(over all hours paid"
    assert re.search(rf"USD 5,000 pay for \S+ FLOPs on 4 {gpu.upper()}, at USD 2.5 an hour \(given\) and {share}", out)
    assert "(preset 8xh100)" in out
    code, body = ask("estimate", path)
    assert code == 0
    main = body["main_run"]
    assert main["usd"]["value"] == pytest.approx(5000, rel=0.1)
    assert (main["machine"]["gpu"], main["machine"]["num_gpus"]) == (gpu.upper(), 4)
    assert main["machine"]["price_usd"]["value"] == 2.5
    assert ask("estimate", path, "--price-usd", 5)[1]["main_run"]["machine"]["price_usd"]["value"] == 5
    assert ask("estimate", path, "--gpu", "H200")[1]["main_run"]["machine"]["gpu"] == "H200"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--budget-usd", 5, "--budget-flops", 5), "budget_flops and budget_usd: give one of them"),
        (("--budget-usd", 5000, "--gpu", "A100"), "gpu = A100: has no published price: give usd_per_gpu_hour"),
        (("--gpu", "H100", "--gpus", 12), "gpus = 12: must be at most 8, or whole nodes of 8"),
        (("--preset", "8xh100", "--gpus", 7), "launch: 7 ranks do not divide the 256 sequences of a batch"),
    ],
)
def test_what_is_refused_leaves_no_plan(tmp_path, asked, said):
    code, body = ask("init", "--out", tmp_path / "plan.toml", *asked)
    assert code == 2
    assert said in body["message"]
    assert not (tmp_path / "plan.toml").exists()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_text_in_the_place_of_a_corpus_is_never_written_over(tmp_path, kind):
    text = tmp_path / "text" if kind == "folder" else tmp_path / "text.jsonl"
    if kind == "folder":
        text.mkdir()
    (text / "a.txt" if kind == "folder" else text).write_text("some text")
    plan = tmp_path / "plan.toml"
    code, _, err = forerun("init", "--data", text.name, "--out", plan)
    assert code == 2 and f"forerun tokenize {text} --out {tmp_path / 'corpus'}" in err and not plan.exists()
    assert forerun("init", "--out", plan)[0] == 0
    for verb in ("validate", "estimate"):
        code, _, err = forerun(verb, plan, "--set", f'data.path="{text.name}"')
        assert code == 2 and f"--out {text}" not in err and f"forerun tokenize {text}" in err


def test_more_nodes_are_asked_of_slurm_and_shard_each(tmp_path):
    code, body = ask("init", "--gpu", "H100", "--gpus", 64, "--out", tmp_path / "plan.toml")
    assert (code, body["preset"]) == (0, "slurm")
    plan = load_plan(tmp_path / "plan.toml")
    degrees = plan.launch.data_parallel_shard, plan.launch.data_parallel_replicate
    assert (degrees, plan.cluster.num_workers) == ((8, 8), 64)
    assert plan.cluster.slurm_options[:2] == ("--nodes=8", "--gpus-per-node=8")
    assert "Budget or GPUs differ" in (tmp_path / "plan.toml").read_text()


def test_a_large_budget_gets_the_depth_sequences_and_layout_of_published_models(corpora):
    """It was 32 layers of width 8,192, sequences of 2,048, and full recomputation."""
    path = corpora / "large.toml"
    code, body = ask("init", "--gpu", "H100", "--gpus", 256, "--budget-flops", "1e23", "--out", path)
    plan, size = load_plan(path), body["comes_to"]
    assert (code, body["preset"], plan.model.seq_len) == (0, "slurm", 4096)
    assert 52 <= size["num_layers"] == plan.model.num_layers <= 64  # Llama 33B: 60 x 6656; OLMo 2 32B: 64 x 5120
    assert 5120 <= size["width"] <= 6656
    assert plan.launch.activation_checkpointing == "selective"
    assert plan.launch.data_parallel_shard * plan.launch.data_parallel_replicate == 256
    code, estimate = ask("estimate", path)
    assert code == 0 and not any("GB a rank" in warning for warning in estimate["main_run"]["warnings"])
    path.unlink()
    ask("init", "--gpu", "H100", "--gpus", 256, "--budget-flops", "1e23", "--set", "model.num_layers=40", "--out", path)
    assert load_plan(path).model.num_layers == 40


def test_a_shard_of_another_size_is_refused(tmp_path):
    plan = write_plan(tmp_path)
    (shard, *_) = sorted((tmp_path / "corpus").glob("*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    code, _, err = forerun("validate", plan)
    assert code == 2 and f"{shard.name}: it has " in err
    shard.unlink()
    code, _, err = forerun("validate", plan)
    assert code == 2 and f"{shard.name}: it is missing" in err


def test_a_vocabulary_smaller_than_its_tokens_is_refused(tmp_path):
    plan, manifest = write_plan(tmp_path), tmp_path / "corpus" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"vocab_size": 256', '"vocab_size": 25'))
    code, _, err = forerun("validate", plan)
    assert code == 2 and "vocab_size = 25: must be at least 256" in err


HOPELESS = {
    "gate fit: with 6 rungs the largest one": ["ladder.widths=[8, 16]"],
    "gate fit: target.budget_flops is ": ["target.budget_flops=1e12"],
    "gate ladder_tuned: ladder.check_offsets_octaves is empty": ["ladder.check_offsets_octaves=[]"],
    "gate ladder_tuned: ladder.check_share = 0.001 pays for no rung": ["ladder.check_share=0.001"],
    "gate coordinates: proxy.parametrization = 'sp'": ["proxy.parametrization='sp'"],
    "launch: pipeline = 3 does not divide num_layers = 1": ["launch.pipeline=3"],
}
"""What can only fail after the runs, as far as the plan tells: how its warning starts, by the keys that cause it."""


@pytest.mark.parametrize("start", HOPELESS)
def test_what_can_only_fail_later_is_said_before(tmp_path, start):
    plan = write_plan(tmp_path)
    code, body = ask("validate", plan)
    assert code == 0 and not any(said.startswith(tuple(HOPELESS)) for said in body["warnings"])
    code, body = ask("validate", plan, *(word for value in HOPELESS[start] for word in ("--set", value)))
    assert code == 0 and [said for said in body["warnings"] if said.startswith(tuple(HOPELESS))], body
    assert any(said.startswith(start) for said in body["warnings"])


def test_a_commands_gates_that_cannot_tell_are_said_before(tmp_path):
    (tmp_path / "trainer.py").touch()
    code, body = ask("validate", plan_with(tmp_path, COMMAND % "python3"))
    assert code == 0 and any(said.startswith("gates coordinates and data") for said in body["warnings"])


def test_a_ladder_too_small_for_its_law_is_refused(tmp_path):
    """The coupled law has a parameter more than Chinchilla's: six rungs are enough for the one, not for the other."""
    plan, small = write_plan(tmp_path), ("--set", "ladder.widths=[8, 16]")
    assert ask("validate", plan, *small)[0] == 0
    code, body = ask("validate", plan, *small, "--set", "ladder.form='coupled'")
    assert code == 2 and "has 6 parameters" in body["problems"][0] and "7 rungs" in body["problems"][0]


def test_a_corpus_that_takes_long_to_read_shows_progress(tmp_path, monkeypatch):
    plan = write_plan(tmp_path)
    steps = []
    monkeypatch.setattr(talk.Heartbeat, "step", lambda self, name, share: steps.append((name, share)))
    assert ask("validate", plan)[0] == 0 and not steps
    assert ask("validate", plan, "--full")[0] == 0
    names, shares = zip(*steps, strict=True)
    assert set(names) == {path.name for path in (tmp_path / "corpus").glob("*.bin")}
    assert shares[0] == 0 and list(shares) == sorted(shares) and shares[-1] < 1


@pytest.mark.parametrize(("key", "number"), [
    ("transfer.num_seeds", 1000), ("transfer.control_num_seeds", 1000), ("transfer.axis_num_seeds", 1000),
    ("transfer.check_num_seeds", 1000), ("ladder.num_seeds", 100),
])  # fmt: skip
def test_a_grid_too_large_to_run_is_refused_with_its_limit(tmp_path, key, number):
    """Many values and many seeds are each allowed, and not both."""
    widths = list(range(8, 8 + 8 * 40, 8))
    wide = [f"{name}={widths}" for name in ("transfer.widths", "transfer.control_widths", "transfer.check_widths")]
    wide += [f"ladder.widths={widths}", f"transfer.durations={[1.0 + n / 6 for n in range(40)]}"]
    plan, words = write_plan(tmp_path), [word for value in wide for word in ("--set", value)]
    assert checked_plan(plan, words[1::2])[1] == []
    code, body = ask("validate", plan, *words, "--set", f"{key}={number}")
    assert code == 2 and len(body["problems"]) == 1, body
    assert body["problems"][0].startswith(f"{key}: 40 ") or key == "ladder.num_seeds"
    assert "runs: must be at most 10,000" in body["problems"][0]
