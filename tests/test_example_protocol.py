"""Tests of examples/published_protocol: its plan, its script, its README, and a small study (slow).

The script runs with a stand-in for `forerun` that records the calls and returns planned exit codes.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_study import run_json

from forerun._launcher.study.experiments.sizes import list_tests
from forerun._launcher.study.plan.file import PlanError, load_plan
from forerun._launcher.study.stages.study_folder import read_study
from forerun._proxies.core import canon
from forerun._proxies.core.flops import compute_flops_per_token, count_params

FOLDER = Path(__file__).parents[1] / "examples" / "published_protocol"
PLAN = FOLDER / "plan.toml"
GPT2_VOCABULARY = 50257
"""Size of GPT-2's vocabulary. Its last id ends a document."""
H100_FLOPS, ASSUMED_SHARE = 989e12, 0.25
"""Peak FLOPs per second of an H100 in bfloat16, and the share of it that the README assumes."""
STAND_IN = """#!/usr/bin/env bash
{ printf '%s\\n' "$@"; echo --; } >> "$CALLS"
case $1 in check) exit "${CHECK:-0}" ;; transfer) exit "${TRANSFER:-0}" ;; esac
"""
"""A stand-in for forerun, which appends its arguments to the file CALLS, one a line, and `--`.

`check` and `transfer` exit with the codes in the variables CHECK and TRANSFER.
"""


@pytest.fixture
def corpus(tmp_path):
    """Corpus from token ids in the format that nanoGPT's prepare.py writes."""
    ids = np.random.default_rng(0).integers(0, GPT2_VOCABULARY - 1, 40_000, dtype="<u2")
    ids[::500] = GPT2_VOCABULARY - 1
    ids.tofile(tmp_path / "train.bin")
    options = ("--vocab-size", GPT2_VOCABULARY, "--validation-fraction", "0.2")
    code, body = run_json(
        "tokenize", tmp_path / "train.bin", "--out", tmp_path / "corpus", *options
    )
    assert code == 0, body
    return tmp_path / "corpus"


@pytest.fixture
def study(corpus, tmp_path):
    """The example's study on the test's corpus, before it has begun."""
    return read_study(PLAN, tmp_path / "study", (f'data.path="{corpus}"',))


def test_plan_has_the_published_settings(study):
    plan, transfer = study.plan, study.plan.transfer
    assert transfer.widths == (256, 512, 1024, 2048)
    assert list_tests(study) == (("learning_rate", "width"),)
    assert transfer.num_seeds == transfer.control_num_seeds == 3
    # The published warmup of 2,000 steps is longer than the run of 1,000: at step t the learning
    # rate is t / 2,000 of the published one. The plan warms up over 1,000 steps to half of it.
    run = study.build_trial(study.space.make_point((1.0, 0.5, 0.5)))
    assert (run.schedule.num_steps, run.schedule.warmup_steps) == (1000, 1000)
    assert run.schedule.kind == "constant"
    assert run.hparams.learning_rate == 2.0**-3 / 2 and plan.search.learning_rate[0] == 2.0**-14 / 2
    assert (run.hparams.clip_norm, run.hparams.weight_decay) == (1.0, 0.1)
    assert run.batch_tokens == 32 * 1024
    assert (run.shape.num_layers, run.shape.head_dim, run.shape.ffn_width) == (2, 64, 4 * 256)
    assert run.numerics.num_slots == 1
    assert study.target_shape_guess.width == 4096


def count_runs_by_width(plan):
    """Return the number of runs at each width: those of the search and of both arms.

    An arm is a sweep of the learning rate over widths. One arm is trained with muP. The control arm
    is trained without scaling (SP). It has no runs at the base width, where it equals the muP arm.
    """
    transfer = plan.transfer
    assert transfer.offsets_octaves == transfer.narrow_offsets_octaves
    assert transfer.max_extensions == 0
    runs = dict.fromkeys(transfer.widths, len(transfer.offsets_octaves) * transfer.num_seeds)
    runs[plan.proxy.base_width] += plan.search.num_trials
    for width in transfer.control_widths:
        runs[width] += len(transfer.control_offsets_octaves) * transfer.control_num_seeds
    return runs


def format_flops(flops):
    """Return FLOPs as the README writes them."""
    return f"{flops:.3e}".replace("e+", "e")


def read_cost_table(text):
    """Return the cells of the rows of the README's table of costs."""
    lines = text.partition("\n## Cost\n")[2].splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_readme_has_the_costs_that_forerun_computes():
    plan, text = load_plan(PLAN), (FOLDER / "README.md").read_text(encoding="utf-8")
    num_tokens = plan.proxy.batch_tokens * plan.proxy.num_steps
    expected_rows, total_flops, published_flops = [], 0, 0
    for width, num_runs in count_runs_by_width(plan).items():
        shape = plan.build_shape(width, GPT2_VOCABULARY)
        flops = compute_flops_per_token(shape) * num_tokens
        total_flops += num_runs * flops
        published_flops += 2 * 12 * 3 * flops  # 2 arms of 12 rates with 3 seeds
        expected_rows.append(
            [
                str(width),
                f"{count_params(shape).total:,}",
                format_flops(flops),
                str(num_runs),
                format_flops(num_runs * flops),
            ]
        )
    num_runs = sum(count_runs_by_width(plan).values())
    expected_rows.append(["all", "", "", str(num_runs), format_flops(total_flops)])
    assert read_cost_table(text)[1:] == expected_rows
    assert f"comes to {format_flops(published_flops)} FLOPs" in " ".join(text.split())
    assert f"that is {total_flops / ASSUMED_SHARE / H100_FLOPS / 3600:.1f} hours" in text


def run_script(environment, *arguments):
    """Run the example's script to its end."""
    command = ["bash", str(FOLDER / "run.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def run_with_stand_in(tmp_path, *arguments, **environment):
    """Run the script with a stand-in for forerun; return its process and the stand-in's calls."""
    bin_dir, calls = tmp_path / "bin", tmp_path / "calls"
    bin_dir.mkdir(exist_ok=True)
    (bin_dir / "forerun").write_text(STAND_IN)
    (bin_dir / "forerun").chmod(0o755)
    calls.unlink(missing_ok=True)
    path = os.pathsep.join([str(bin_dir), str(Path(sys.executable).parent), os.environ["PATH"]])
    out = str(tmp_path / "out")
    variables = {**os.environ, "PATH": path, "CALLS": str(calls), "OUT": out, **environment}
    done = run_script(variables, *arguments)
    lines = calls.read_text().split("--\n")[:-1] if calls.exists() else []
    return done, [call.splitlines() for call in lines]


def test_script_calls_the_verbs_in_order(tmp_path):
    change = ("--set", "proxy.microbatch_tokens=8192")
    done, calls = run_with_stand_in(tmp_path, "train.bin", *change)
    assert done.returncode == 0, done.stderr
    assert [call[0] for call in calls] == ["tokenize", "check", "sweep", "transfer", "report"]
    assert calls[0][1] == "train.bin" and calls[0][-2:] == ["--vocab-size", str(GPT2_VOCABULARY)]
    for call in calls[1:4]:
        assert call[1] == str(PLAN) and call[-2:] == ["--set", "proxy.microbatch_tokens=8192"]


@pytest.mark.parametrize(
    ("codes", "exit_code", "last_verb"),
    [
        ({"TRANSFER": "3"}, 3, "report"),
        ({"TRANSFER": "4"}, 4, "report"),
        ({"TRANSFER": "2"}, 2, "transfer"),
        ({"CHECK": "4"}, 0, "report"),
        ({"CHECK": "3"}, 3, "check"),
    ],
)
def test_script_exits_with_the_code_of_the_verdict(tmp_path, codes, exit_code, last_verb):
    done, calls = run_with_stand_in(tmp_path, "train.bin", **codes)
    assert (done.returncode, calls[-1][0]) == (exit_code, last_verb), done.stderr


def test_options_of_the_small_study_make_a_valid_plan(corpus, tmp_path):
    _, calls = run_with_stand_in(tmp_path, "--small")
    *_, words, _ = calls  # the last two calls are transfer and report; take the options of transfer
    overrides = tuple(value for option, value in itertools.pairwise(words) if option == "--set")
    assert overrides[0] == f'data.path="{tmp_path / "out" / "corpus"}"'
    plan = read_study(PLAN, tmp_path / "study", (*overrides, f'data.path="{corpus}"')).plan
    assert plan.transfer.widths == (32, 64, 128) and not plan.trains_alone
    # Smaller widths alone do not make a valid plan.
    without_base_width = [
        override for override in overrides if not override.startswith("proxy.base_width")
    ]
    with pytest.raises(PlanError, match="base_width"):
        load_plan(PLAN, tuple(without_base_width))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_small_study_runs_to_its_verdict_and_is_not_repeated(tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": path, "OUT": str(tmp_path / "out")}
    for _ in range(2):
        done = run_script(variables, "--small")
        assert done.returncode in (0, 3, 4), done.stderr[-3000:]
    assert "starting Ray" not in done.stderr, "the second time every run is recorded"
    body = canon.parse((tmp_path / "out" / "study" / "report.json").read_bytes())
    assert isinstance(body, dict)
    test = body["transfer"]["tests"][0]
    assert (test["axis"], test["hyperparameter"]) == ("width", "learning_rate")
    assert {run["size"] for run in test["runs"]} == {32, 64, 128}
    assert {run["arm"] for run in test["runs"]} == {"mup", "sp"}
