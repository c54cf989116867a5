"""All stages of a study on a vocabulary from `tokenize --train-bpe`; the other tests of studies use
bytes.
"""

import json
import random

from tiny_study import ask, plan_with

from launcher.study.gates import open_gates

VOCAB_SIZE = 1024
PART = """
[transfer]
durations = []
hyperparameters = {}
max_extensions = 0
control_widths = []
check_num_seeds = 5
[ladder]
num_steps = [6, 12, 24]
check_offsets_octaves = []
[target]
budget_flops = 2e11
"""
ACCEPTED = {"transfer", "fit", "data", "ladder_tuned"}
"""Gates that may be open in so small a study; the coordinate check must pass."""


def write_source(folder):
    """Write forty texts of five hundred made-up words, of which some are frequent."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshr", k=rng.randint(2, 9))) for _ in range(500)]
    folder.mkdir()
    for number in range(40):
        text = " ".join(rng.choices(words, weights=[1 / (rank + 5) for rank in range(500)], k=300))
        (folder / f"{number:02}.txt").write_text(text)
    return folder


def test_the_chain_runs_on_a_learned_vocabulary(tmp_path):
    given = ("--train-bpe", VOCAB_SIZE, "--out", tmp_path / "corpus", "--validation-fraction", 0.3)
    code, corpus = ask("tokenize", write_source(tmp_path / "source"), *given)
    assert (code, corpus["vocab_size"]) == (0, VOCAB_SIZE), corpus
    plan, study = plan_with(tmp_path, PART), tmp_path / "study"
    for verb in ("check", "sweep", "transfer", "ladder"):
        code, body = ask(verb, plan, "--study", study)
        assert code in (0, 3, 4), (verb, body)  # a verdict was reached, whichever
    code, _ = ask("report", study)
    assert code == 0
    report = json.loads((study / "report.json").read_text())
    accepted = [gate["name"] for gate in open_gates(report)]
    assert set(accepted) <= ACCEPTED
    reason = ("--reason", "tiny widths") if accepted else ()
    code, body = ask(
        "freeze", study, *(part for name in accepted for part in ("--accept", name)), *reason
    )
    assert code == 0, body
    [frozen] = (study / "frozen").glob("*/launch.json")
    decision = json.loads(frozen.read_text())["decision"]
    assert decision["shape"]["vocab_size"] == VOCAB_SIZE
    assert decision["data"]["tokenizer"] == corpus["tokenizer"]
