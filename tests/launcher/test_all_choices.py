"""Everything a plan can choose, at once and from the command line: frozen, launched and
verified.
"""

import dataclasses

import pytest
from tiny_study import SENTENCE, ask, plan_with

from launcher.frozen.launch_file import read_launch
from launcher.study.study_folder import recorded_study
from proxies.core.rules import named
from proxies.data.tokens import TokenStore
from proxies.parametrization.parametrization import forward_numbers, parameter_table

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
    folder = tmp_path_factory.mktemp("choices")
    words = SENTENCE.split()
    for name, order in (("prose", 1), ("code", -1)):
        (folder / name).mkdir()
        for number in range(40):
            text = " ".join(words[::order][number % 7 :] * 18) + f" {name} {number}"
            (folder / name / f"{number}.txt").write_text(text)
    sources = [f"{name}={folder / name}" for name in ("prose", "code")]
    code, body = ask(
        "tokenize", *sources, "--out", folder / "corpus", "--validation-fraction", "0.3"
    )
    assert code == 0, body
    plan = plan_with(folder, CHOICES)
    code, body = ask("run", plan, "--study", folder / "study")
    assert code == 0, body
    gates = [
        part
        for gate in body["gates"]
        if gate["outcome"] != "passed"
        for part in ("--accept", gate["name"])
    ]
    code, body = ask("freeze", folder / "study", *gates, *(["--reason", "a toy"] if gates else []))
    assert code == 0, body
    return folder / "study" / "frozen" / body["digest"]


def test_the_frozen_numbers_are_those_that_the_proxies_trained_with(frozen):
    decision, study = read_launch(frozen), recorded_study(frozen.parents[1])
    point = {"learning_rate": 0.01, "warmup_fraction": 0.1, "clip_norm": 1.0}
    proxy = study.run(shape=decision.shape, point=point, seed=0, num_steps=10)
    assert proxy.parametrization == decision.parametrization
    wanted = named(
        "completep", depth_alpha=0.5, weight_decay="independent", decayed="two_dimensional"
    )
    assert decision.parametrization == wanted
    # of the embedding, which nothing scales
    rate = max(group.learning_rate for group in decision.groups)
    alike = dataclasses.replace(
        proxy,
        hparams=dataclasses.replace(
            proxy.hparams, learning_rate=rate, clip_norm=decision.clip_norm
        ),
    )
    table = {p.name: p for p in parameter_table(alike)}
    assert {(g.kind, g.learning_rate, g.weight_decay, g.init_std) for g in decision.groups} == {
        (p.kind, p.learning_rate, p.weight_decay, p.init_std) for p in table.values()
    }
    assert forward_numbers(alike) == decision.forward
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


def test_it_is_launched_and_verified(frozen):
    code, body = ask("launch", frozen, "--steps", "3")
    assert code == 0, body
    assert body["step"] == 3
    assert ask("verify", frozen)[0] == 0
