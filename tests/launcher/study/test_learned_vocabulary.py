"""Test of all stages of a study with a vocabulary from `tokenize --train-bpe`; the other tests of
studies use bytes.
"""

import json
import random

from tiny_study import run_json, write_plan_with

from forerun._launcher.report.views.report_model import to_report

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
"""Gates that need not pass in so small a study. The coordinate check must pass."""


def write_source(folder):
    """Write forty texts of made-up words, of which some are frequent, so that a BPE learns them."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshr", k=rng.randint(2, 9))) for _ in range(500)]
    folder.mkdir()
    for number in range(40):
        text = " ".join(rng.choices(words, weights=[1 / (rank + 5) for rank in range(500)], k=300))
        (folder / f"{number:02}.txt").write_text(text)
    return folder


def test_study_with_a_learned_vocabulary_is_frozen(tmp_path):
    given = ("--train-bpe", VOCAB_SIZE, "--out", tmp_path / "corpus", "--validation-fraction", 0.3)
    code, corpus = run_json("tokenize", write_source(tmp_path / "source"), *given)
    assert (code, corpus["vocab_size"]) == (0, VOCAB_SIZE), corpus
    plan, study = write_plan_with(tmp_path, PART), tmp_path / "study"
    for verb in ("check", "sweep", "transfer", "ladder"):
        code, body = run_json(verb, plan, "--study", study)
        assert code in (0, 3, 4), (verb, body)  # any verdict is fine
    code, _ = run_json("report", study)
    assert code == 0
    report = to_report(json.loads((study / "report.json").read_text()))
    accepted = [gate.name for gate in report.open_gates]
    assert set(accepted) <= ACCEPTED
    accept = [word for name in accepted for word in ("--accept", name)]
    reason = ("--reason", "tiny widths") if accepted else ()
    code, body = run_json("freeze", study, *accept, *reason)
    assert code == 0, body
    [frozen] = (study / "frozen").glob("*/launch.json")
    decision = json.loads(frozen.read_text())["decision"]
    assert decision["shape"]["vocab_size"] == VOCAB_SIZE
    assert decision["data"]["tokenizer"] == corpus["tokenizer"]
