"""Tests of verdicts on published grids, read from a table on disk as a user's runs are."""

import published_grids as grids
import pytest
from published_grids import HUGE, LARGE, MIDDLE, SMALL

from forerun._transfer.question import Question
from forerun._transfer.verdict.optima_verdict import judge_optima
from forerun._transfer.verdict.verdict import judge


@pytest.fixture
def judge_text(read_table):
    """A function that judges a table for a target of twice the largest size, unless a target is
    given.
    """

    def judge_text(text, *, target=None, axis=None, **question):
        table = read_table(text, axis=axis)
        sizes = [p.size for p in table.points] or [size for size, _ in table.optima]
        full_question = Question(
            target_size=target or 2 * max(sizes),
            base_size=min(sizes),
            axis=table.axis,
            **question,
        )
        if table.points:
            return judge(table.points, full_question)
        return judge_optima(table.optima, full_question)

    return judge_text


LOSSES_BY_SEED = (1337, 1338, 1339)
"""Seeds of the published runs."""


@pytest.mark.parametrize(
    ("seeds", "axis"),
    [((), "params"), (LOSSES_BY_SEED, "width"), ((1337,), "params")],
)
def test_published_false_alarm_is_not_judged_a_drift(judge_text, seeds, axis):
    """Seed 1337 alone puts the best rate of the model with 250M parameters at 2^-7, an octave above
    the other sizes, because of a gradient spike at 2^-8.
    """
    target = {"params": HUGE[0], "width": HUGE[1]}[axis]
    assert judge_text(grids.format_speedrun(seeds), axis=axis, target=target).outcome != "drifts"


def test_lowest_losses_alone_show_the_false_alarm(judge_text, read_table):
    """The test above has a false alarm to avoid: by the lowest loss of seed 1337, the best rate of
    250M moves up, and those of 60M and 125M do not.
    """
    points = read_table(grids.format_speedrun((1337,)), axis="params").points
    best = {
        size[0]: min((p for p in points if p.size == size[0]), key=lambda p: p.loss_nats).log2_value
        for size in (SMALL, MIDDLE, LARGE)
    }
    assert list(best.values()) == [-8, -8, -7]
    optima_table = grids.format_optima(
        [size[0] for size in (SMALL, MIDDLE, LARGE)], [2.0**octave for octave in best.values()]
    )
    assert judge_text(optima_table, target=HUGE[0]).outcome == "cannot_tell"


def test_batch_sizes_do_not_drift(judge_text):
    """The best rate is 2^-8 for every batch size but one, on top of the trainer's built-in
    sqrt(batch).
    """
    verdict = judge_text(grids.format_batches(), built_in=0.5)
    assert verdict.outcome != "drifts"
    assert verdict.drift is None or verdict.drift.low <= 0 <= verdict.drift.high


def test_longer_run_does_not_drift(judge_text):
    """The published best rate stays the same for four times the tokens. With three rates per size
    the verdict may ask for more runs.
    """
    verdict = judge_text(grids.format_durations(), target=20 * MIDDLE[0])
    assert verdict.outcome != "drifts"
    if verdict.regret_nats is None:
        assert {o.status for o in verdict.optima} & {"flat", "too_few", "edge"}
        assert verdict.what_to_run


def test_broken_setup_does_not_hold(judge_text):
    """The runs are those of nanoGPT in mup issue 66. Two of four widths have their best rate at an
    end of the grid, or have only three rates.
    """
    verdict = judge_text(grids.format_by_width(grids.BROKEN_MUP))
    assert verdict.outcome != "holds"
    assert verdict.drift is not None and verdict.drift.high < 0
    assert verdict.outcome == "drifts" or verdict.what_to_run
