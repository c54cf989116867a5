"""The report's own words, explained at its end: a page may reach somebody who has not run the study."""

from __future__ import annotations

from launcher import report_html as show

_WORDS = (
    ("nats", ("the unit of loss: the mean of minus the natural logarithm of each next token's probability. Less is "
             "better. Losses of other tokenizers are not on one scale.")),
    ("proxy, base", "a small model trained in place of the main one; the base is the one that was searched."),
    ("muP, SP", ("rules of how initial values and learning rates scale with width. Under muP the best learning rate "
                "should stay put as the model grows; SP, the standard, is the control.")),
    ("gate", ("a condition for a launch. It passes, fails, or cannot tell for lack of evidence; somebody may accept "
             "one as it is, with a reason that is kept.")),
    ("coordinates", ("how much a layer's output changes in the first steps. If that grows or shrinks with width, the "
                    "rules are not kept somewhere.")),
    ("valley", "loss against one hyperparameter at one size; its lowest point is the optimum there."),
    ("octave", "a factor of two."),
    ("drift", "how far the optimum moves when the size doubles, in octaves."),
    ("margin", "how many nats a carried value may cost at the target; a test holds if all of its interval lies under."),
    ("rung, ladder", ("models of several sizes, each trained with the values that were carried to it; laws of loss are "
                     "fitted to them.")),
    ("frontier", "the best loss that a law gives for each amount of compute, over all sizes of the model."),
    ("back-test", "the largest rungs, foretold from the smaller ones alone."),
    ("ND", "parameters times training tokens: six FLOPs each, the usual count of a training run's compute."),
    ("interval, level", "where the true value, or one new run, should lie as often as the level says."),
    ("digest", "a hash of every number of the launch: the same launch, the same digest."),
)  # fmt: skip


def words() -> str:
    """A section that explains the terms of the page."""
    return show.section("words", "Words on this page", show.facts([(show.text(w), show.text(m)) for w, m in _WORDS]))
