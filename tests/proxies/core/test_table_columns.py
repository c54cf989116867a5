"""Tests of the choice of a table's columns: each role is recognized by its usual names.

A role is what a column holds, such as `params`, `tokens` or `loss`. Users may name columns too.
"""

import pytest

from forerun._proxies.core.tables.columns import choose_columns, find_hyperparameter


def test_columns_of_planned_counts_are_used_only_without_actual_ones():
    names = ["params_target", "params_real", "tokens_target", "tokens_seen"]
    assert choose_columns(names, ("params", "tokens"), {}).columns == {
        "params": "params_real",
        "tokens": "tokens_seen",
    }
    choice = choose_columns(["params_target"], ("params",), {})
    assert choice.columns == {"params": "params_target"} and "planned" in choice.notes[0]
    optuna_names = [
        "number",
        "value",
        "datetime_start",
        "params_num_params",
        "user_attrs_tokens",
        "state",
    ]
    assert choose_columns(optuna_names, ("params", "tokens", "loss"), {}).columns == {
        "params": "params_num_params",
        "tokens": "user_attrs_tokens",
        "loss": "value",
    }


def choose_all_columns(names, user_columns=None):
    """Choose the columns of every role among these names."""
    roles = ("params", "tokens", "loss", "flops", "width", "learning_rate", "seed", "state")
    return choose_columns(names, roles, user_columns or {})


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("num_params", "params"),
        ("parameter_count", "params"),
        ("total_tokens", "tokens"),
        ("Val Loss", "loss"),
        ("val/loss", "loss"),
        ("summary.eval/loss", "loss"),
        ("config/lr", "learning_rate"),
        ("params_lr", "learning_rate"),
        ("optimizer.lr", "learning_rate"),
        ("model.n_embd", "width"),
        ("params_seed", "seed"),
        ("State", "state"),
        ("achieved_flops", "flops"),
        ("params_planned", "params"),
    ],
)
def test_columns_are_recognized_by_usual_names(name, role):
    assert choose_all_columns([name]).columns == {role: name}


@pytest.mark.parametrize(
    "name",
    [
        "train/loss",
        "train_loss",
        "model.loss",
        "run - val/loss",
        "Duration",
        "head.width",
        "total_gflops",
        "n",
        "target_loss",
        "params_wte",
    ],
)
def test_similar_names_are_not_recognized(name):
    assert choose_all_columns([name]).columns == {}


def test_actual_counts_are_preferred_and_the_choice_is_noted():
    choice = choose_all_columns(
        ["params_planned", "parameter_count", "tokens_actual", "tokens", "loss"]
    )
    assert choice.columns == {
        "params": "parameter_count",
        "tokens": "tokens_actual",
        "loss": "loss",
    }
    assert (
        "'parameter_count', not 'params_planned'" in choice.notes[0]
        and "'tokens_actual'" in choice.notes[1]
    )
    ambiguous = choose_all_columns(["config/lr", "optimizer.lr"])
    assert ambiguous.columns == {}
    assert "'config/lr' or 'optimizer.lr'" in ambiguous.problems[0]


def test_user_may_name_columns():
    assert choose_all_columns(["a", "lr", "loss"], {"lr": "a", "params": "loss"}).columns == {
        "learning_rate": "a",
        "params": "loss",
        "loss": "loss",
    }
    problems = choose_all_columns(
        ["a", "a"], {"params": "b", "nonsense": "a", "tokens": "a"}
    ).problems
    assert "b" in problems[0]
    assert "nonsense" in problems[1]
    assert "twice" in problems[2]


def test_find_hyperparameter_accepts_usual_names_and_the_users_own():
    names = ["learning_rate", "user_axis"]
    assert find_hyperparameter("optimizer.lr", names) == "learning_rate"
    assert find_hyperparameter("user_axis", names) == "user_axis"
