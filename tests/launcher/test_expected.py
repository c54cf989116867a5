"""What `transfer --dry-run` says before anything is run."""

import pytest
from tiny_study import ask, forerun, plan_with, write_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected")
    write_corpus(folder)
    return folder


def test_a_dry_run_runs_nothing_and_says_what_it_would(folder):
    plan = plan_with(
        folder,
        '[transfer]\ndurations = [1.0, 2.0]\nhyperparameters = { clip_norm = ["width"] }\n'
        "[target]\nbudget_flops = 1e12",
    )
    code, body = ask("transfer", plan, "--study", folder / "study", "--dry-run")
    assert code == 0 and not (folder / "study").exists()
    width, duration, clip = body["tests"]
    assert [(t["hyperparameter"], t["axis"]) for t in body["tests"]] == [
        ("learning_rate", "width"), ("learning_rate", "duration"), ("clip_norm", "width"),
    ]  # fmt: skip
    assert (width["num_runs"], duration["num_runs"], clip["num_runs"]) == (16, 16, 12)
    assert width["expectations"][0]["margins_lost"] is not None, "over width a rule is given, and may be wrong"
    assert duration["expectations"][0]["margins_lost"] is None, "over duration it is measured"
    assert clip["expectations"] == []
    assert width["share_of_target"] > 0


def test_more_seeds_are_dearer_and_sharper(folder):
    shares, widths = [], []
    for num_seeds in (2, 6):
        plan = plan_with(folder, f"[transfer]\nnum_seeds = {num_seeds}\ndurations = []\nhyperparameters = {{}}")
        test = ask("transfer", plan, "--dry-run")[1]["tests"][0]
        shares.append(test["share_of_target"])
        widths.append(test["expectations"][1]["drift_width_octaves"])
    assert shares[1] == pytest.approx(3 * shares[0])
    assert widths[1] < widths[0]


def test_the_text_holds_every_test(folder):
    plan = plan_with(folder, "[transfer]\ndurations = [1.0, 2.0]")
    code, out, _ = forerun("transfer", plan, "--dry-run")
    assert code == 0
    assert "learning rate over width" in out and "learning rate over duration" in out and "rightly decided" in out


def test_what_it_does_not_go_with(folder):
    plan = plan_with(folder, "[transfer]\ndurations = []")
    for options, said in (
        (("--spend", "--dry-run"), "--spend or --dry-run, not both"),
        (("--level", "0.8"), "--level: only with --runs"),
    ):
        code, body = ask("transfer", plan, *options)
        assert code == 2 and said in body["message"]
