"""Wrong lines planted in a copy of the core, one at a time: the fast tests named beside each must
see it.

Each is a mistake that would cost a user's main run or the trust in a study, and that no exception
would tell.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COPIED = ("proxies", "sweeps", "transfer", "scaling_fits", "launcher", "tests")
MUTANTS = {
    "hidden matrices learn as m_N^-1/2": (
        "proxies/core/rules.py",
        "rate_width = -1.0 if as_hidden",
        "rate_width = -0.5 if as_hidden",
        "tests/proxies/test_rules.py",
    ),
    "a warmup's first update is none": (
        "proxies/core/schedule.py",
        "return (step + 1) / schedule.warmup_steps",
        "return step / schedule.warmup_steps",
        "tests/proxies/test_schedule.py",
    ),
    "attention's FLOPs count twice": (
        "proxies/core/flops.py",
        "6 * (params.hidden + table) + square // 2",
        "6 * (params.hidden + table) + square",
        "tests/proxies/test_flops.py",
    ),
    "weight decay ignores the schedule": (
        "proxies/model/bank_adamw.py",
        "1 - peak_lr_KS * share_K1.to(dtype) * decay_KS",
        "1 - peak_lr_KS * decay_KS",
        "tests/proxies/test_bank_alone.py",
    ),
    "a verdict goes by its estimate, not by its bound": (
        "transfer/verdict/verdict.py",
        "if regret.high < margin_nats:",
        "if regret.value < margin_nats:",
        "tests/transfer/test_verdict.py",
    ),
    "runs far from the frontier weigh most": (
        "scaling_fits/forecast/posterior.py",
        "variance = (1.0 + (excess(table)[order] / population.near) ** 2)",
        "variance = 1.0 / (1.0 + (excess(table)[order] / population.near) ** 2)",
        "tests/scaling_fits/test_weights.py",
    ),
    "tokens are chosen for twice the budget": (
        "scaling_fits/allocation/allocate.py",
        "6 * self.params * self.tokens",
        "3 * self.params * self.tokens",
        "tests/scaling_fits/allocation",
    ),
    "a record's hash leaves the one before out": (
        "sweeps/store/chain.py",
        "canon.content_id([seq, kind, key, text, prev_hash])",
        "canon.content_id([seq, kind, key, text])",
        "tests/sweeps/test_chain.py",
    ),
    "a run has two outcomes": (
        "sweeps/store/ledger.py",
        "kind in OUTCOMES and key in self._results",
        "False",
        "tests/sweeps/test_ledger.py",
    ),
    "a suggestion sees a trial that may not have ended": (
        "sweeps/search/past_trials.py",
        "index - self.parallelism + 1",
        "index - self.parallelism + 2",
        "tests/sweeps/test_suggest.py",
    ),
    "an edited launch config keeps its digest": (
        "launcher/frozen/launch_file.py",
        "if actual != digest:",
        "if not digest:",
        "tests/launcher/test_frozen.py",
    ),
    "one axis that drifts does not fail the gate": (
        "launcher/study/gates.py",
        'order: tuple[CheckOutcome, ...] = ("failed", "cannot_tell")',
        'order: tuple[CheckOutcome, ...] = ("cannot_tell",)',
        "tests/launcher/test_gates.py",
    ),
}
"""By what goes wrong: the file, its line's part, what stands there then, and the tests that
see it."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The packages and their tests; what the tests read beside them is linked."""
    root = tmp_path_factory.mktemp("mutants")
    for entry in ROOT.iterdir():
        if entry.name in COPIED:
            shutil.copytree(entry, root / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not entry.name.startswith("."):
            (root / entry.name).symlink_to(entry)
    return root


def do_fail(copy, *tests):
    """Whether some of them do; anything but that or all passing is an error of the run itself."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode in (0, 1), run.stdout[-2000:] + run.stderr[-2000:]
    return run.returncode == 1


@pytest.mark.slow
def test_the_copy_is_sound(copy):
    assert not do_fail(copy, *sorted({tests for *_, tests in MUTANTS.values()}))


@pytest.mark.slow
@pytest.mark.parametrize("what", MUTANTS)
def test_a_wrong_line_is_seen(copy, what):
    file, right, wrong, tests = MUTANTS[what]
    path = copy / file
    text = path.read_text()
    assert text.count(right) == 1, f"{file} has no such line any more, or several: name it anew"
    path.write_text(text.replace(right, wrong))
    try:
        assert do_fail(copy, tests)
    finally:
        path.write_text(text)
