"""Test of a plan that differs from the defaults in many choices at once, such as family,
parametrization, batch warmup, and weights of data: its study is frozen, launched and verified on
the command line.
"""

import dataclasses

import pytest
from tiny_study import SENTENCE, run_json, write_plan_with

from forerun._launcher.main_run.frozen.launch_file import read_launch
from forerun._launcher.study.stages.study_folder import read_recorded_study
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.parametrization.parametrization import (
    compute_forward_numbers,
    compute_parameter_table,
)

CHOICES = """
[data]
weights = { prose = 0.25, code = 0.75 }
[model]
num_layers = 2
family = "gpt2"
tied = true
qk_norm = true
[proxy]
parametrization = "completep"
rules = { depth_alpha = 0.5, weight_decay = "independent", decayed = "two_dimensional" }
weight_decay = 0.001
batch_tokens = 64
batch_warmup_fraction = 0.5
batch_warmup_stages = 2
microbatch_tokens = 32
activation_checkpointing = true
[transfer]
check_depths = [2, 4]
[launch]
data_parallel_shard = 2
"""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """The folder of the study's frozen config."""
    folder = tmp_path_factory.mktemp("choices")
    words = SENTENCE.split()
    for name, order in (("prose", 1), ("code", -1)):
        (folder / name).mkdir()
        for number in range(40):
            text = " ".join(words[::order][number % 7 :] * 18) + f" {name} {number}"
            (folder / name / f"{number}.txt").write_text(text)
    sources = [f"{name}={folder / name}" for name in ("prose", "code")]
    code, body = run_json(
        "tokenize", *sources, "--out", folder / "corpus", "--validation-fraction", "0.3"
    )
    assert code == 0, body
    plan = write_plan_with(folder, CHOICES)
    code, body = run_json("run", plan, "--study", folder / "study")
    assert code == 0, body
    accept = []
    for gate in body["gates"]:
        if gate["outcome"] != "passed":
            accept += ["--accept", gate["name"]]
    reason = ["--reason", "a toy"] if accept else []
    code, body = run_json("freeze", folder / "study", *accept, *reason)
    assert code == 0, body
    return folder / "study" / "frozen" / body["digest"]


def test_frozen_numbers_follow_the_proxies_parametrization(frozen):
    decision, study = read_launch(frozen), read_recorded_study(frozen.parents[1])
    point = {"learning_rate": 0.01, "warmup_fraction": 0.1, "clip_norm": 1.0}
    proxy = study.build_run(shape=decision.shape, point=point, seed=0, num_steps=10)
    assert proxy.parametrization == decision.parametrization
    parametrization = get_parametrization(
        "completep", depth_alpha=0.5, weight_decay="independent", decayed="two_dimensional"
    )
    assert decision.parametrization == parametrization
    # The embedding's rate is the base rate, because no rule scales it.
    rate = max(group.learning_rate for group in decision.groups)
    proxy_at_decision = dataclasses.replace(
        proxy,
        hparams=dataclasses.replace(
            proxy.hparams, learning_rate=rate, clip_norm=decision.clip_norm
        ),
    )
    table = {p.name: p for p in compute_parameter_table(proxy_at_decision)}
    assert {(g.kind, g.learning_rate, g.weight_decay, g.init_std) for g in decision.groups} == {
        (p.kind, p.learning_rate, p.weight_decay, p.init_std) for p in table.values()
    }
    assert compute_forward_numbers(proxy_at_decision) == decision.forward
    assert (
        proxy.schedule.batch_warmup_stages
        == decision.learning_rate.schedule.batch_warmup_stages
        == 2
    )
    assert (
        decision.data.data_id
        == TokenStore(study.corpus, weights=dict(decision.data.weights)).manifest.data_id
    )
    assert decision.data.data_id != TokenStore(study.corpus).manifest.data_id
    assert decision.num_tokens < decision.learning_rate.schedule.num_steps * decision.batch_tokens


def test_config_is_launched_and_verified(frozen):
    code, body = run_json("launch", frozen, "--steps", "3")
    assert code == 0, body
    assert body["step"] == 3
    assert run_json("verify", frozen)[0] == 0
