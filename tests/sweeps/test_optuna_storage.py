"""A search begins where a study of Optuna's own ended: its storages are real, and stay as they
were.
"""

import os
import sqlite3

import optuna
import pytest

from launcher.study.warm_start import warm_start
from sweeps.search.optuna_storage import OptunaStorageError, best_trials
from sweeps.search.space import search_space

SPACE = search_space(ranges={"learning_rate": (0.01, 0.1), "clip_norm": (0.5, 2.0)})
RATES = (0.001, 0.02, 0.05, 0.3)


def storage_of(kind, file):
    if kind == "sqlite":
        return f"sqlite:///{file}"
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(file)))


def fill(kind, file, name, sign=1, directions=None):
    """Four trials of which 0.05 is best, 0.02 next, and one that failed."""
    study = optuna.create_study(
        storage=storage_of(kind, file),
        study_name=name,
        directions=directions or ["minimize" if sign > 0 else "maximize"],
    )
    kinds = {
        "lr": optuna.distributions.FloatDistribution(1e-4, 1.0),
        "optimizer": optuna.distributions.CategoricalDistribution(["adamw", "sgd"]),
    }
    for rate in RATES:
        values = [sign * abs(rate - 0.05)] * len(study.directions)
        params = {"lr": rate, "optimizer": "adamw"}
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=kinds, values=values)
        )
    study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL))


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_best_trials_come_first(tmp_path, kind, sign):
    file = tmp_path / "a#b %20?.db"  # what an address would decode
    plain = tmp_path / "plain.db"
    fill(kind, plain, "mine", sign)
    plain.rename(file)
    before = file.read_bytes()
    found = best_trials(file, most=2)
    assert (found.study, found.num_finished) == ("mine", 4)
    assert [trial["lr"] for trial in found.params] == [0.05, 0.02]
    assert file.read_bytes() == before and {path.name for path in tmp_path.iterdir()} == {file.name}


def test_points_are_in_the_ranges_and_say_what_is_not_used(tmp_path):
    fill("sqlite", tmp_path / "two.db", "a")
    fill("sqlite", tmp_path / "two.db", "b")
    found = warm_start(f"{tmp_path / 'two.db'}:b", SPACE)
    assert found.points == (
        {"learning_rate": 0.05},
        {"learning_rate": 0.02},
        {"learning_rate": 0.01},
    )
    assert "lr = 0.001 to 0.01" in found.sentence and "not used: optimizer" in found.sentence
    with pytest.raises(OptunaStorageError, match="it has a, b"):
        warm_start(str(tmp_path / "two.db"), SPACE)
    with pytest.raises(OptunaStorageError, match="none of them is searched"):
        warm_start(f"{tmp_path / 'two.db'}:a", search_space(ranges={"clip_norm": (0.5, 2.0)}))


def test_what_is_no_storage_is_refused_and_left_alone(tmp_path):
    other, text, many = tmp_path / "other.db", tmp_path / "notes.txt", tmp_path / "many.db"
    with sqlite3.connect(other) as connection:
        connection.execute("create table mine (a)")
    connection.close()
    text.write_text("notes")
    fill("sqlite", many, "many", directions=["minimize", "minimize"])
    before = other.read_bytes()
    for file in (other, text, many, tmp_path / "none.db", tmp_path):
        with pytest.raises(OptunaStorageError, match=file.name):
            best_trials(file, most=3)
    assert other.read_bytes() == before and not (tmp_path / "none.db").exists()


def test_files_and_studies_may_have_colons_in_their_names(tmp_path):
    for file, study in (("runs.db", "lr:wd:1"), ("a:b.db", "c"), ("a:b.db", "d:e")):
        fill("sqlite", tmp_path / file, study)
        assert warm_start(f"{tmp_path / file}:{study}", SPACE).points[0] == {"learning_rate": 0.05}
    with pytest.raises(OptunaStorageError, match=r"runs.db has no study 'x:y'"):
        warm_start(f"{tmp_path / 'runs.db'}:x:y", SPACE)
    with pytest.raises(OptunaStorageError, match="cannot be read: No such file"):
        warm_start(f"{tmp_path / 'none.db'}:x", SPACE)


def test_parameters_may_be_named_with_their_section(tmp_path):
    study = optuna.create_study(storage=storage_of("sqlite", tmp_path / "one.db"), study_name="one")
    kinds = {"optimizer.lr": optuna.distributions.FloatDistribution(1e-4, 1.0)}
    trial = optuna.trial.create_trial(
        params={"optimizer.lr": 0.05}, distributions=kinds, values=[1.0]
    )
    study.add_trial(trial)
    assert warm_start(str(tmp_path / "one.db"), SPACE).points == ({"learning_rate": 0.05},)


def test_a_named_pipe_is_no_storage(tmp_path):
    os.mkfifo(tmp_path / "pipe.db")
    with pytest.raises(OptunaStorageError, match="it is a pipe"):
        best_trials(tmp_path / "pipe.db", most=1)
