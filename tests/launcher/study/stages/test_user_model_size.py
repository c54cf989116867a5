"""Tests of the parameter counts of a user's model, which fits and budgets use: the user's code is
asked once, the counts are recorded, and wrong counts are refused.
"""

from __future__ import annotations

import sys

import pytest
from tiny_study import COMMAND, run_json, write_corpus, write_plan_with

from forerun._launcher.study.stages.study_folder import open_ledger, open_recorded_study, read_study
from forerun._launcher.study.stages.user_model import DescribeError, record_user_params
from forerun._proxies.core.checks import SpecError
from forerun._scaling_fits.allocation.shapes import ShapeRequest, WidthCount, choose_shape

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
# A model that stores more parameters (8 width^2) than a token uses (2 width^2)


def make_study(folder, text=""):
    return read_study(write_plan_with(folder, text), folder / "study")


def make_plan_part(folder, code, proxy_keys=""):
    """Write a trainer and a program that describes its size; return the part of a plan that uses
    them.
    """
    (folder / "trainer.py").write_text("")
    (folder / "describe.py").write_text(code)
    plan = COMMAND % sys.executable
    describe = f"describe = '{sys.executable} describe.py {{width}}'"
    return plan.replace("[proxy]", f"[proxy]\n{describe}\n{proxy_keys}", 1)


def test_model_factory_is_counted_once_and_recorded(tmp_path):
    write_corpus(tmp_path)
    (tmp_path / "counted.py").write_text(MODEL)
    study = make_study(tmp_path, '[proxy]\nfactory = "counted:Model"\n')
    with open_ledger(study) as ledger:
        counted = record_user_params(study, ledger)
        shape = study.build_shape(40)
        assert counted.count_params(shape) == 2 * 40 * shape.vocab_size + 40 * 40
        assert counted.count_params(shape) != study.count_params(shape), (
            "the built-in family has more"
        )
        assert record_user_params(study, ledger).counts == counted.counts
        assert len(ledger.read_records("counted")) == 1
    # The record is read without the code.
    (tmp_path / "counted.py").unlink()
    assert open_recorded_study(tmp_path / "study")[0].counts == counted.counts
    sys.modules.pop("counted", None)


def test_command_describes_its_size_and_the_budget_follows(tmp_path):
    plan = write_plan_with(tmp_path, make_plan_part(tmp_path, DESCRIBE))
    study = read_study(plan, tmp_path / "study")
    with open_ledger(study) as ledger:
        counted = record_user_params(study, ledger)
    # The parameters are a sixth of the FLOPs per token, not the number that is stored.
    assert counted.count_params(study.build_shape(24)) == 2 * 24**2 + 512 * 24
    request = ShapeRequest(params=2 * 64**2 + 512 * 64, template=counted.shape_template)
    option = choose_shape(request).option
    assert (option.shape.width, option.params_ratio, option.flops_ratio) == (64, 1.0, 1.0)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('no such size')", "ended with exit code 1: no such size"),
        (
            "print('hello')",
            "printed 'hello': its last line must be JSON such as {\"params\": 124439808}, with",
        ),
        ("print('{\"params\": 0}')", "its last line must be JSON"),
        ("print('{\"params\": 1000}')", "the number of parameters must grow with the width"),
        ("print('{\"params\": NaN}')", "its last line must be JSON"),
        ("import time; time.sleep(60)", "no answer within proxy.timeout_seconds = 1"),
    ],
)
def test_wrong_description_is_refused_before_any_run(tmp_path, code, message):
    part = make_plan_part(tmp_path, code, "timeout_seconds = 1.0")
    study = read_study(write_plan_with(tmp_path, part), tmp_path / "study")
    with open_ledger(study) as ledger:
        with pytest.raises(DescribeError, match=r"at widths? ") as problem:
            record_user_params(study, ledger)
        assert message in str(problem.value)
        assert not ledger.read_records("counted")


def test_placeholders_of_a_description_are_checked(tmp_path):
    wrong = make_plan_part(tmp_path, DESCRIBE).replace("{width}'", "{run_dir} {nothing}'")
    code, body = run_json("validate", write_plan_with(tmp_path, wrong))
    problems = " ".join(body["problems"])
    assert code == 2
    assert "{nothing} is unknown" in problems and "{run_dir}" in problems
    assert "lacks {width}" in problems


def test_polynomial_of_the_width_is_recovered_and_inverted():
    planted = WidthCount(constant=1000.0, linear=300.0, square=12.0)
    fitted = WidthCount.fit({width: float(planted.count_params(width)) for width in (32, 64, 128)})
    assert fitted.count_params(4096) == pytest.approx(planted.count_params(4096), rel=1e-12)
    assert fitted.find_width(float(planted.count_params(4096))) == pytest.approx(4096)
    assert WidthCount.fit({1: 10.0, 2: 20.0, 4: 40.0}).find_width(70.0) == pytest.approx(7)
    with pytest.raises(SpecError):
        WidthCount.fit({1: 40.0, 2: 20.0, 4: 10.0})
