"""What is wrong with a plan is told with the line of the key it names; what `--set` says is on none."""

import pytest
from tiny_study import ask, forerun

from launcher.plan.file import PlanError, load_plan

PLAN = """# a plan
search.seed = -1
[proxy]
num_steps = 0
[ladder]  # sizes
widths = [
  32, 33,
]
[serach]
[target]
budget_flops = nan
"""
LINES = {"proxy.num_steps": 4, "ladder.widths": 6, "serach": 9, "target.budget_flops": 11}


def problems_of(path, *overrides):
    with pytest.raises(PlanError) as caught:
        load_plan(path, overrides)
    return caught.value.problems


@pytest.mark.parametrize(("begins", "ends"), [(b"", "\n"), (b"\xef\xbb\xbf", "\r\n")], ids=["unix", "windows"])
def test_every_problem_has_its_line(tmp_path, begins, ends):
    path = tmp_path / "plan.toml"
    path.write_bytes(begins + PLAN.replace("\n", ends).encode())
    found = problems_of(path)
    for key, line in LINES.items():
        (problem,) = [one for one in found if one.startswith(key)]
        assert problem.endswith(f" (line {line})")
    assert len(found) == len(LINES) + 1


def test_no_secret_is_shown_from_a_line_that_is_no_toml(tmp_path):
    secret = "wandb_v1_" + "a1B2" * 18
    (tmp_path / "plan.toml").write_text(f"[data]\npath = {secret}\n")
    code, out, err = forerun("validate", tmp_path / "plan.toml")
    assert code == 2
    assert "a1B2a1B2" not in out + err + str(problems_of(tmp_path / "plan.toml"))


def test_validate_says_what_is_missing_beside_what_is_wrong(tmp_path):
    (tmp_path / "plan.toml").write_text('[data]\npath = "nowhere"\n[proxy]\nnum_steps = 0\nbatch_tokens = 100\n')
    problems = ask("validate", tmp_path / "plan.toml")[1]["problems"]
    assert [said.split(" = ")[0] for said in problems] == ["proxy.num_steps", "proxy.batch_tokens", "data.path"]
    assert [said.rpartition("(line ")[2] for said in problems] == ["4)", "5)", "2)"]
