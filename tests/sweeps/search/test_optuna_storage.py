"""Tests of a search that starts from a user's Optuna study. The storages are real, and must not be
changed.
"""

import os
import sqlite3

import optuna
import pytest

from forerun._launcher.study.stages.warm_start import read_warm_start
from forerun._sweeps.search.optuna_storage import OptunaStorageError, read_best_trials
from forerun._sweeps.search.space import build_search_space

SPACE = build_search_space(ranges={"learning_rate": (0.01, 0.1), "clip_norm": (0.5, 2.0)})
RATES = (0.001, 0.02, 0.05, 0.3)


def open_storage(kind, file):
    if kind == "sqlite":
        return f"sqlite:///{file}"
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(file)))


def write_study(kind, file, name, sign=1, directions=None):
    """Write a study with four finished trials, of which rate 0.05 is best and 0.02 second, and a
    failed one.
    """
    study = optuna.create_study(
        storage=open_storage(kind, file),
        study_name=name,
        directions=directions or ["minimize" if sign > 0 else "maximize"],
    )
    distributions = {
        "lr": optuna.distributions.FloatDistribution(1e-4, 1.0),
        "optimizer": optuna.distributions.CategoricalDistribution(["adamw", "sgd"]),
    }
    for rate in RATES:
        values = [sign * abs(rate - 0.05)] * len(study.directions)
        params = {"lr": rate, "optimizer": "adamw"}
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=distributions, values=values)
        )
    study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL))


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
@pytest.mark.parametrize("sign", [1, -1])
def test_best_trials_come_first_and_the_file_is_unchanged(tmp_path, kind, sign):
    # A name that a database URL would decode to another one
    file = tmp_path / "a#b %20?.db"
    # Written under a simple name, because Optuna itself would decode the other one
    simple_file = tmp_path / "simple.db"
    write_study(kind, simple_file, "mine", sign)
    simple_file.rename(file)
    content_before = file.read_bytes()
    best_trials = read_best_trials(file, max_trials=2)
    assert (best_trials.study, best_trials.num_finished) == ("mine", 4)
    assert [trial["lr"] for trial in best_trials.params] == [0.05, 0.02]
    assert file.read_bytes() == content_before
    assert {path.name for path in tmp_path.iterdir()} == {file.name}


def test_points_are_clipped_to_the_ranges_and_unused_parameters_are_reported(tmp_path):
    write_study("sqlite", tmp_path / "two.db", "a")
    write_study("sqlite", tmp_path / "two.db", "b")
    warm_start = read_warm_start(f"{tmp_path / 'two.db'}:b", SPACE)
    assert warm_start.points == (
        {"learning_rate": 0.05},
        {"learning_rate": 0.02},
        {"learning_rate": 0.01},
    )
    assert (
        "lr = 0.001 to 0.01" in warm_start.sentence and "not used: optimizer" in warm_start.sentence
    )
    with pytest.raises(OptunaStorageError, match="it has a, b"):
        read_warm_start(str(tmp_path / "two.db"), SPACE)
    with pytest.raises(OptunaStorageError, match="none of them is searched"):
        read_warm_start(
            f"{tmp_path / 'two.db'}:a", build_search_space(ranges={"clip_norm": (0.5, 2.0)})
        )


def test_other_files_are_refused_and_unchanged(tmp_path):
    other_database = tmp_path / "other.db"
    text = tmp_path / "notes.txt"
    two_objectives = tmp_path / "many.db"
    with sqlite3.connect(other_database) as connection:
        connection.execute("create table mine (a)")
    connection.close()
    text.write_text("notes")
    write_study("sqlite", two_objectives, "many", directions=["minimize", "minimize"])
    content_before = other_database.read_bytes()
    for file in (other_database, text, two_objectives, tmp_path / "none.db", tmp_path):
        with pytest.raises(OptunaStorageError, match=file.name):
            read_best_trials(file, max_trials=3)
    assert other_database.read_bytes() == content_before and not (tmp_path / "none.db").exists()


def test_files_and_studies_may_have_colons_in_their_names(tmp_path):
    for file, study in (("runs.db", "lr:wd:1"), ("a:b.db", "c"), ("a:b.db", "d:e")):
        write_study("sqlite", tmp_path / file, study)
        assert read_warm_start(f"{tmp_path / file}:{study}", SPACE).points[0] == {
            "learning_rate": 0.05
        }
    with pytest.raises(OptunaStorageError, match=r"runs.db has no study 'x:y'"):
        read_warm_start(f"{tmp_path / 'runs.db'}:x:y", SPACE)
    with pytest.raises(OptunaStorageError, match="cannot be read: No such file"):
        read_warm_start(f"{tmp_path / 'none.db'}:x", SPACE)


def test_parameter_names_may_have_a_section(tmp_path):
    study = optuna.create_study(
        storage=open_storage("sqlite", tmp_path / "one.db"), study_name="one"
    )
    distributions = {"optimizer.lr": optuna.distributions.FloatDistribution(1e-4, 1.0)}
    trial = optuna.trial.create_trial(
        params={"optimizer.lr": 0.05}, distributions=distributions, values=[1.0]
    )
    study.add_trial(trial)
    assert read_warm_start(str(tmp_path / "one.db"), SPACE).points == ({"learning_rate": 0.05},)


def test_named_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.db")
    with pytest.raises(OptunaStorageError, match="it is a pipe"):
        read_best_trials(tmp_path / "pipe.db", max_trials=1)
