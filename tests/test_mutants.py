"""Mutation tests: wrong lines are planted in a copy of the source, and the fast tests must fail.

Each wrong line is a mistake that could spoil a user's main run without raising an exception. m_N is
the ratio of a model's width to the base's.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COPIED = ("forerun", "proxies", "sweeps", "transfer", "scaling_fits", "launcher", "tests")
"""Folders that are copied, so that a mistake can be planted."""
MUTANTS = {
    "the hidden matrices' rate scales as m_N^-1/2, not m_N^-1": (
        "proxies/core/rules.py",
        "rate_width = -1.0 if as_hidden",
        "rate_width = -0.5 if as_hidden",
        "tests/proxies/core/test_rules.py",
    ),
    "the first step of a warmup has a rate of 0": (
        "proxies/core/schedule.py",
        "return (step + 1) / schedule.warmup_steps",
        "return step / schedule.warmup_steps",
        "tests/proxies/core/test_schedule.py",
    ),
    "attention's FLOPs count twice": (
        "proxies/core/flops.py",
        "6 * (params.hidden + table) + square // 2",
        "6 * (params.hidden + table) + square",
        "tests/proxies/core/test_flops.py",
    ),
    "weight decay ignores the schedule": (
        "proxies/model/bank_adamw.py",
        "1 - peak_lr_KS * lr_multiplier_K1.to(dtype) * decay_KS",
        "1 - peak_lr_KS * decay_KS",
        "tests/proxies/training/test_bank_matches_single_trial.py",
    ),
    "a verdict uses the estimate of the regret, not its upper bound": (
        "transfer/verdict/verdict.py",
        "if regret.high < margin_nats:",
        "if regret.estimate < margin_nats:",
        "tests/transfer/verdict/test_verdict.py",
    ),
    "runs far from the frontier weigh most": (
        "scaling_fits/forecast/posterior.py",
        "(1.0 + (compute_excess(table)[order] / population.near) ** 2) *",
        "1.0 / (1.0 + (compute_excess(table)[order] / population.near) ** 2) *",
        "tests/scaling_fits/laws/test_weights.py",
    ),
    "tokens are chosen for twice the budget": (
        "scaling_fits/allocation/allocate.py",
        "6 * self.params * self.tokens",
        "3 * self.params * self.tokens",
        "tests/scaling_fits/allocation",
    ),
    "a record's hash does not cover the previous record's hash": (
        "sweeps/store/chain.py",
        "canon.compute_content_id([seq, kind, key, text, prev_hash])",
        "canon.compute_content_id([seq, kind, key, text])",
        "tests/sweeps/store/test_chain.py",
    ),
    "a run may get a second outcome": (
        "sweeps/store/ledger.py",
        "kind in OUTCOMES and key in self._results",
        "False",
        "tests/sweeps/store/test_ledger.py",
    ),
    "a suggestion uses a trial that may still be running": (
        "sweeps/search/past_trials.py",
        "index - self.parallelism + 1",
        "index - self.parallelism + 2",
        "tests/sweeps/search/test_suggest.py",
    ),
    "an edited launch config keeps its digest": (
        "launcher/main_run/frozen/launch_file.py",
        'if actual != value["digest"]:',
        'if not value["digest"]:',
        "tests/launcher/main_run/frozen/test_launch_file.py",
    ),
    "one axis that drifts does not fail the gate": (
        "launcher/study/stages/gates.py",
        'if any(word != "cannot_tell" for word in words):',
        "if False:",
        "tests/launcher/study/stages/test_gates.py",
    ),
}
"""File, a part of its line, the wrong replacement, and the tests that must fail, by mistake."""


@pytest.fixture(scope="module")
def source_copy(tmp_path_factory):
    """Copy of the packages and their tests; other files that the tests read are linked."""
    root = tmp_path_factory.mktemp("mutants")
    for entry in ROOT.iterdir():
        if entry.name in COPIED:
            shutil.copytree(
                entry,
                root / entry.name,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        elif not entry.name.startswith("."):
            (root / entry.name).symlink_to(entry)
    return root


def do_tests_fail(source_copy, *tests):
    """Return whether a test fails in the copy. Other exit codes of pytest raise an error."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=source_copy,
        env=os.environ | {"PYTHONPATH": str(source_copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode in (0, 1), run.stdout[-2000:] + run.stderr[-2000:]
    return run.returncode == 1


@pytest.mark.slow
def test_tests_pass_in_the_unchanged_copy(source_copy):
    assert not do_tests_fail(source_copy, *sorted({tests for *_, tests in MUTANTS.values()}))


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MUTANTS)
def test_planted_mistake_fails_its_tests(source_copy, mistake):
    file, right, wrong, tests = MUTANTS[mistake]
    path = source_copy / file
    text = path.read_text()
    assert text.count(right) == 1, f"{file} must have {right!r} once: update MUTANTS"
    path.write_text(text.replace(right, wrong))
    try:
        assert do_tests_fail(source_copy, tests)
    finally:
        path.write_text(text)
