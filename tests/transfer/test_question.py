"""Tests of the question that a transfer verdict answers, and of values in octaves."""

import itertools
import math

import pytest

from forerun._proxies.core.hyperparameters import WITH_OPTIMUM
from forerun._transfer.question import (
    Point,
    Question,
    TransferError,
    from_log2,
    to_log2,
)


def test_octaves_convert_back_to_the_value():
    for hyperparameter, value in itertools.product(WITH_OPTIMUM, (1e-5, 0.95)):
        log2_value = to_log2(hyperparameter, value)
        assert from_log2(hyperparameter, log2_value) == pytest.approx(value, rel=1e-9)


def test_octaves_of_a_beta_measure_its_memory():
    assert to_log2("beta2", 0.95) == pytest.approx(math.log2(0.05))
    # The memory is 1 / (1 - beta) steps: twice the memory is one octave less
    assert to_log2("beta2", 0.975) == pytest.approx(to_log2("beta2", 0.95) - 1)
    assert from_log2("beta1", -1) == 0.5


@pytest.mark.parametrize(
    ("hyperparameter", "value"),
    [
        ("weight_decay", 0.0),
        ("learning_rate", math.nan),
        ("beta2", 1.0),
    ],
)
def test_a_value_without_a_logarithm_is_named(hyperparameter, value):
    with pytest.raises(TransferError) as caught:
        to_log2(hyperparameter, value)
    assert str(caught.value) == f"{hyperparameter} = {value}: this value has no finite logarithm"


def test_all_invalid_fields_of_a_question_are_reported_at_once():
    with pytest.raises(TransferError) as caught:
        Question(
            target_size=0,
            base_size=1.5,
            axis="time",
            hyperparameter="eps",
            power=math.inf,
            transferred_log2=math.nan,
            built_in=math.nan,
            margin_nats=0.0,
            level=1.0,
        )
    assert len(caught.value.problems) == 9


def test_all_invalid_fields_of_a_point_are_reported_at_once():
    with pytest.raises(TransferError) as caught:
        Point(size=0, log2_value=math.nan, loss_nats=math.inf, seed=-1)
    assert len(caught.value.problems) == 4
