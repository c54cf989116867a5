"""What is wrong with a plan is told with the line of the key it names, or none; what is no plan, with its place."""

import pytest
from tiny_study import ask, forerun

from launcher.plan.file import PlanError, load_plan

PLAN = """# a plan
search.num_trials = 24
proxy = { num_steps = 0 }

["data"]
"path" = 3
[ladder]  # sizes
widths = [
  32, 33,
]
[transfer]
level = 1.5 # level = 2
[target]
budget_flops = nan
[launch]
"""
WANTED = {
    "data.path": 6, "proxy.num_steps": 3, "ladder.widths": 8, "transfer.level": 12, "target.budget_flops": 14,
}  # fmt: skip


def problems_of(path, *overrides):
    with pytest.raises(PlanError) as caught:
        load_plan(path, overrides)
    return caught.value.problems


@pytest.mark.parametrize("begins", [b"", b"\xef\xbb\xbf"], ids=["", "mark"])
@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["unix", "windows"])
def test_every_problem_has_its_line(tmp_path, begins, ends):
    path = tmp_path / "plan.toml"
    path.write_bytes(begins + PLAN.replace("\n", ends).encode())
    found = problems_of(path)
    assert len(found) == len(WANTED)
    for key, line in WANTED.items():
        (problem,) = [one for one in found if one.startswith(key)]
        assert problem.endswith(f" (line {line})")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[proxy]\nnum_steps = 3\n[model]\nseq_len = 100\n",
         "proxy.batch_tokens = 1024: no multiple of model.seq_len = 100 (line 4)"),
        ("[proxy]\nbase_width = 48\n",
         "must hold proxy.base_width = 48, whose optimum is the one transferred (line 2)"),
        ("\n[serach]\nseed = 1\n", "serach is unknown: did you mean search? (line 2)"),
        ("\n[ladder]\nwidths = [32]\n", "at least 2 of each and 6 rungs are wanted (line 2)"),
        ("[search]\nseed = 1\nseed = 2\n", "Cannot overwrite a value (at line 3, column 9): each key once: seed = 2"),
        ("[proxy]\nschedule = cosine\n", "is not TOML: Invalid value (at line 2, column 12): schedule = cosine"),
        ("[proxy]\nnum_steps = 3 \x07\n", "(at line 2, column 15): num_steps = 3 ?"),
        ("[proxy]\nnum_steps = " + "9" * 5000, "is not TOML: a whole number of more than 4,000 digits"),
        ("search = " + "[" * 5000 + "]" * 5000, "is not TOML: brackets too deep in one another"),
        ("[proxy]\nnum_steps = " + "9" * 400, "9...: less than or equal to 1e+09 is wanted (line 2)"),
        ("#" * (2**20 + 1), "is longer than 1048576 bytes: this is no plan"),
        ("[model]\nhead_dim = 24\n", "transfer.widths: width = 32 is no multiple of head_dim = 24, and so of 64, 128"),
    ],
)  # fmt: skip
def test_odd_files(tmp_path, text, said):
    path = tmp_path / "plan.toml"
    path.write_text(text, newline="")
    assert [one for one in problems_of(path) if one.endswith(said)], problems_of(path)


@pytest.mark.parametrize("content", ["[search]\nseed = 1".encode("utf-16"), b"# \n\n# caf\xe9\n"])
def test_another_encoding_is_named_with_its_place(tmp_path, content):
    (tmp_path / "plan.toml").write_bytes(content)
    (problem,) = problems_of(tmp_path / "plan.toml")
    assert problem in ("is not UTF-8: byte 0xff (line 1); save it as UTF-8",
                       "is not UTF-8: byte 0xe9 (line 3); save it as UTF-8")  # fmt: skip


def test_what_is_set_on_the_command_line_is_on_no_line(tmp_path):
    (tmp_path / "plan.toml").write_text("[proxy]\nnum_steps = 10\nbeta1 = 2.0\n")
    steps, beta = problems_of(tmp_path / "plan.toml", "proxy.num_steps=0")
    assert steps == "proxy.num_steps = 0: greater than or equal to 1 is wanted"
    assert beta == "proxy.beta1 = 2.0: less than 1 is wanted (line 3)"


def test_no_secret_is_shown_from_a_line_that_is_no_toml(tmp_path):
    secret = "wandb_v1_" + "a1B2" * 18
    (tmp_path / "plan.toml").write_text(f"[data]\npath = {secret}\n")
    code, out, err = forerun("validate", tmp_path / "plan.toml")
    assert code == 2
    assert "a1B2a1B2" not in out + err
    assert "a1B2a1B2" not in str(problems_of(tmp_path / "plan.toml")), "nor by the loader alone"


def test_validate_says_where_what_it_looked_for_is_named(tmp_path):
    (tmp_path / "plan.toml").write_text('\n[data]\npath = "nowhere"\n')
    code, _, err = forerun("validate", tmp_path / "plan.toml")
    assert code == 2
    assert "data.path = 'nowhere': no corpus there" in err and err.rstrip().endswith("makes it (line 3)")


def test_validate_says_what_is_missing_beside_what_is_wrong(tmp_path):
    (tmp_path / "plan.toml").write_text('[data]\npath = "nowhere"\n[proxy]\nnum_steps = 0\nbatch_tokens = 100\n')
    with pytest.raises(PlanError) as caught:
        load_plan(tmp_path / "plan.toml")
    assert len(caught.value.problems) == 2
    body = ask("validate", tmp_path / "plan.toml")[1]
    assert [said.split(" = ")[0] for said in body["problems"]] == ["proxy.num_steps", "proxy.batch_tokens", "data.path"]
