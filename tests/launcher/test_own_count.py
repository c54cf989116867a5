"""What the user's own code counts is what fits and budgets follow: counted once, recorded, or
refused.
"""

from __future__ import annotations

import sys

import pytest
from tiny_study import COMMAND, ask, plan_with, write_corpus

from launcher.study.own_count import DescribeError, count
from launcher.study.study_folder import open_ledger, plan_study, recorded
from proxies.core.checks import SpecError
from scaling_fits.allocation.shapes import ShapeRequest, WidthCount, choose_shape

MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.embed = nn.Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleList(nn.Linear(shape.width, shape.width, bias=False) for _ in range(shape.num_layers))
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)
"""  # noqa: E501
DESCRIBE = """
import json, sys
width = int(sys.argv[1])
print("loading")
print(json.dumps({"params": 8 * width**2 + 512 * width, "flops_per_token": 6 * (2 * width**2 + 512 * width)}))
"""  # noqa: E501


def study_of(folder, text=""):
    return plan_study(plan_with(folder, text), folder / "study")


def described(folder, code, more=""):
    (folder / "trainer.py").write_text("")
    (folder / "describe.py").write_text(code)
    plan = COMMAND % sys.executable
    return plan.replace(
        "[proxy]", f"[proxy]\ndescribe = '{sys.executable} describe.py {{width}}'\n{more}", 1
    )


def test_a_factory_is_counted_itself_and_its_record_stands(tmp_path):
    write_corpus(tmp_path)
    (tmp_path / "counted.py").write_text(MODEL)
    study = study_of(tmp_path, '[proxy]\nfactory = "counted:Model"\n')
    with open_ledger(study) as ledger:
        found = count(study, ledger)
        shape = study.shape(40)
        assert found.num_params(shape) == 2 * 40 * shape.vocab_size + 40 * 40
        assert found.num_params(shape) != study.num_params(shape), "the family counts more"
        assert count(study, ledger).counts == found.counts and len(ledger.records("counted")) == 1
    (tmp_path / "counted.py").unlink()
    assert recorded(tmp_path / "study")[0].counts == found.counts, "read without the code"
    sys.modules.pop("counted", None)


def test_a_command_says_how_large_it_is_and_the_budget_follows(tmp_path):
    plan = plan_with(tmp_path, described(tmp_path, DESCRIBE))
    study = plan_study(plan, tmp_path / "study")
    with open_ledger(study) as ledger:
        found = count(study, ledger)
    assert found.num_params(study.shape(24)) == 2 * 24**2 + 512 * 24, (
        "a sixth of the FLOPs, not what is stored"
    )
    chosen = choose_shape(
        ShapeRequest(params=2 * 64**2 + 512 * 64, template=found.shape_template)
    ).option
    assert (chosen.shape.width, chosen.params_ratio, chosen.flops_ratio) == (64, 1.0, 1.0)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('no such size')", "ended with exit code 1: no such size"),
        ("print('hello')", "printed 'hello': its last line must be JSON"),
        ("print('{\"params\": 0}')", "its last line must be JSON"),
        ("print('{\"params\": 1000}')", "the number of parameters must grow with the width"),
        ("print('{\"params\": NaN}')", "its last line must be JSON"),
        ("import time; time.sleep(60)", "no answer within proxy.timeout_seconds = 1"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused_before_any_run(tmp_path, code, said):
    study = plan_study(
        plan_with(tmp_path, described(tmp_path, code, "timeout_seconds = 1.0")), tmp_path / "study"
    )
    with open_ledger(study) as ledger:
        with pytest.raises(DescribeError, match=r"at widths? ") as problem:
            count(study, ledger)
        assert said in str(problem.value)
        assert not ledger.records("counted")


def test_a_plan_s_description_is_checked(tmp_path):
    wrong = described(tmp_path, DESCRIBE).replace("{width}'", "{run_dir} {nothing}'")
    code, body = ask("validate", plan_with(tmp_path, wrong))
    said = " ".join(body["problems"])
    assert (
        code == 2
        and "{nothing} is unknown" in said
        and "{run_dir}" in said
        and "lacks {width}" in said
    )


def test_a_polynomial_of_the_width_is_found_and_inverted():
    plain = WidthCount(constant=1000.0, linear=300.0, square=12.0)
    found = WidthCount.through({width: float(plain.params(width)) for width in (32, 64, 128)})
    assert found.params(4096) == pytest.approx(plain.params(4096), rel=1e-12)
    assert found.width(float(plain.params(4096))) == pytest.approx(4096)
    assert WidthCount.through({1: 10.0, 2: 20.0, 4: 40.0}).width(70.0) == pytest.approx(7)
    with pytest.raises(SpecError):
        WidthCount.through({1: 40.0, 2: 20.0, 4: 10.0})
