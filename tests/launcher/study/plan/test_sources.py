"""Test of the sources of parametrizations: every choice and every answer to it has a source."""

from forerun._launcher.study.plan import sources
from forerun._proxies.core.rules import CHOICES, NAMES, get_parametrization


def test_every_choice_and_answer_has_its_source():
    assert tuple(sources.PRESETS) == NAMES
    rules = get_parametrization("mup")
    fields = [name for name in type(rules).__dataclass_fields__ if name != "name"]
    assert list(sources.CHOICES) == fields
    for choice, words in CHOICES.items():
        if choice != "name":
            assert tuple(sources.CHOICES[choice]) == words
    for name in NAMES:
        for choice in fields:
            value = getattr(get_parametrization(name), choice)
            assert sources.describe_answer(choice, value) != "own choice", "presets are published"
    assert sources.describe_answer("rate_duration_power", -0.4) == "own choice"
