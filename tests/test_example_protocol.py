"""The published protocol: its plan, its script with a stand-in for forerun, its figures, and (slow)
the small study.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_study import ask

from launcher.experiments.sweep_grids import wanted_tests
from launcher.plan.file import PlanError, load_plan
from launcher.study.study_folder import plan_study
from proxies.core import canon
from proxies.core.flops import count_params, flops_per_token

FOLDER = Path(__file__).parents[1] / "examples" / "published_protocol"
PLAN = FOLDER / "plan.toml"
GPT2_VOCABULARY = 50257
H100_FLOPS, ASSUMED_SHARE = 989e12, 0.25
STAND_IN = """#!/usr/bin/env bash
{ printf '%s\\n' "$@"; echo --; } >> "$CALLS"
case $1 in check) exit "${CHECK:-0}" ;; transfer) exit "${TRANSFER:-0}" ;; esac
"""


@pytest.fixture
def corpus(tmp_path):
    """Ids as nanoGPT's prepare.py writes them."""
    ids = np.random.default_rng(0).integers(0, GPT2_VOCABULARY - 1, 40_000, dtype="<u2")
    ids[::500] = GPT2_VOCABULARY - 1
    ids.tofile(tmp_path / "train.bin")
    code, body = ask(
        "tokenize",
        tmp_path / "train.bin",
        "--vocab-size",
        GPT2_VOCABULARY,
        "--out",
        tmp_path / "corpus",
        "--validation-fraction",
        "0.2",
    )
    assert code == 0, body
    return tmp_path / "corpus"


@pytest.fixture
def study(corpus, tmp_path):
    return plan_study(PLAN, tmp_path / "study", (f'data.path="{corpus}"',))


def test_it_asks_for_what_was_published(study):
    plan, transfer = study.plan, study.plan.transfer
    assert transfer.widths == (256, 512, 1024, 2048)
    assert wanted_tests(study) == (("learning_rate", "width"),)
    assert transfer.num_seeds == transfer.control_num_seeds == 3
    # The published warmup is 2,000 steps of 1,000: at step t the rate is the stated one times t /
    # 2,000.
    run = study.trial(study.space.at((1.0, 0.5, 0.5)))
    assert (run.schedule.num_steps, run.schedule.warmup_steps, run.schedule.kind) == (
        1000,
        1000,
        "constant",
    )
    assert run.hparams.learning_rate == 2.0**-3 / 2 and plan.search.learning_rate[0] == 2.0**-14 / 2
    assert (run.hparams.clip_norm, run.hparams.weight_decay, run.batch_tokens) == (
        1.0,
        0.1,
        32 * 1024,
    )
    assert (run.shape.num_layers, run.shape.head_dim, run.shape.ffn_width) == (2, 64, 4 * 256)
    assert run.numerics.num_slots == 1
    assert study.target_shape_guess.width == 4096


def runs_by_width(plan):
    """Those of the search, of the arm and of the control arm, whose base is the arm's own."""
    transfer = plan.transfer
    assert (
        transfer.offsets_octaves == transfer.narrow_offsets_octaves and transfer.max_extensions == 0
    )
    runs = dict.fromkeys(transfer.widths, len(transfer.offsets_octaves) * transfer.num_seeds)
    runs[plan.proxy.base_width] += plan.search.num_trials
    for width in transfer.control_widths:
        runs[width] += len(transfer.control_offsets_octaves) * transfer.control_num_seeds
    return runs


def figure(number):
    return f"{number:.3e}".replace("e+", "e")


def _cost(text):
    """The lines below the heading of the table that is checked."""
    return text.partition("\n## Cost\n")[2].splitlines()


def test_the_readme_has_the_figures_that_forerun_computes():
    plan, text = load_plan(PLAN), (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in _cost(text)
        if line[:2] == "| "
    ]
    num_tokens = plan.proxy.batch_tokens * plan.proxy.num_steps
    wanted, total, published = [], 0, 0
    for width, num_runs in runs_by_width(plan).items():
        shape = plan.shape(width, GPT2_VOCABULARY)
        flops = flops_per_token(shape) * num_tokens
        total += num_runs * flops
        published += 2 * 12 * 3 * flops
        wanted.append(
            [
                str(width),
                f"{count_params(shape).total:,}",
                figure(flops),
                str(num_runs),
                figure(num_runs * flops),
            ]
        )
    wanted.append(["all", "", "", str(sum(runs_by_width(plan).values())), figure(total)])
    assert rows[1:] == wanted
    assert f"comes to {figure(published)} FLOPs" in " ".join(text.split())
    assert f"that is {total / ASSUMED_SHARE / H100_FLOPS / 3600:.1f} hours" in text


def script(environment, *arguments):
    command = ["bash", str(FOLDER / "run.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def run_script(tmp_path, *arguments, **environment):
    """The script with a stand-in for forerun: exit code, and the stand-in's calls."""
    bin_dir, calls = tmp_path / "bin", tmp_path / "calls"
    bin_dir.mkdir(exist_ok=True)
    (bin_dir / "forerun").write_text(STAND_IN)
    (bin_dir / "forerun").chmod(0o755)
    calls.unlink(missing_ok=True)
    path = os.pathsep.join([str(bin_dir), str(Path(sys.executable).parent), os.environ["PATH"]])
    told = {
        **os.environ,
        "PATH": path,
        "CALLS": str(calls),
        "OUT": str(tmp_path / "out"),
        **environment,
    }
    ended = script(told, *arguments)
    lines = calls.read_text().split("--\n")[:-1] if calls.exists() else []
    return ended, [call.splitlines() for call in lines]


def test_the_script_tokenizes_checks_searches_judges_and_reports(tmp_path):
    ended, calls = run_script(tmp_path, "train.bin", "--set", "proxy.microbatch_tokens=8192")
    assert ended.returncode == 0, ended.stderr
    assert [call[0] for call in calls] == ["tokenize", "check", "sweep", "transfer", "report"]
    assert calls[0][1] == "train.bin" and calls[0][-2:] == ["--vocab-size", "50257"]
    for call in calls[1:4]:
        assert call[1] == str(PLAN) and call[-2:] == ["--set", "proxy.microbatch_tokens=8192"]


@pytest.mark.parametrize(
    ("codes", "exit_code", "last"),
    [
        ({"TRANSFER": "3"}, 3, "report"),
        ({"TRANSFER": "4"}, 4, "report"),
        ({"TRANSFER": "2"}, 2, "transfer"),
        ({"CHECK": "4"}, 0, "report"),
        ({"CHECK": "3"}, 3, "check"),
    ],
)
def test_the_script_ends_as_the_verdict_does(tmp_path, codes, exit_code, last):
    ended, calls = run_script(tmp_path, "train.bin", **codes)
    assert (ended.returncode, calls[-1][0]) == (exit_code, last), ended.stderr


def test_the_small_study_is_one(corpus, tmp_path):
    _, calls = run_script(tmp_path, "--small")
    given = calls[-2]
    overrides = tuple(value for flag, value in itertools.pairwise(given) if flag == "--set")
    assert overrides[0] == f'data.path="{tmp_path / "out" / "corpus"}"'
    plan = plan_study(PLAN, tmp_path / "study", (*overrides, f'data.path="{corpus}"')).plan
    assert plan.transfer.widths == (32, 64, 128) and not plan.alone
    with pytest.raises(PlanError, match="base_width"):  # what is shrunken is shrunken as a whole
        load_plan(PLAN, tuple(o for o in overrides if not o.startswith("proxy.base_width")))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_small_study_runs_to_its_verdict_and_again_at_once(tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    told = {**os.environ, "PATH": path, "OUT": str(tmp_path / "out")}
    for _ in range(2):
        ended = script(told, "--small")
        assert ended.returncode in (0, 3, 4), ended.stderr[-3000:]
    assert "starting Ray" not in ended.stderr, "the second time everything is there"
    body = canon.parse((tmp_path / "out" / "study" / "report.json").read_bytes())
    assert isinstance(body, dict)
    width = body["transfer"]["tests"][0]
    assert (width["axis"], width["hyperparameter"]) == ("width", "learning_rate")
    assert {run["size"] for run in width["runs"]} == {32, 64, 128}
    assert {run["arm"] for run in width["runs"]} == {"mup", "sp"}
