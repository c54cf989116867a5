"""The top of a comparison: what differs between two studies in sentences, most telling first, and who they are."""

from __future__ import annotations

from typing import Any

from launcher.views import html as show
from launcher.views.html import Body
from launcher.views.transfer import hyperparameter_name, name_of, size_name
from scaling_fits.forecast.conclusive import first_and_rest


def sentences(body: Body) -> list[str]:
    """What differs, most telling first, as plain text."""
    if body["same_study"]:
        return ["both are one study at one moment: nothing differs"]
    said = []
    if body["comparable"]["losses"]["comparable"] == "no":
        said.append(f"losses cannot be compared: {'; '.join(body['comparable']['losses']['reasons'])}")
    said += _forecast_sentences(body)
    said += _optima_sentences(body)
    for test in body["tests"]:
        a, b = test["outcome"]["a"], test["outcome"]["b"]
        if a is not None and b is not None and a != b:
            said.append(f"{name_of(test)}: A {a.replace('_', ' ')}, B {b.replace('_', ' ')}")
    apart = [gate["name"] for gate in body["gates"] if _outcome(gate["a"]) != _outcome(gate["b"])]
    if apart:
        said.append(f"gates with another outcome: {', '.join(name.replace('_', ' ') for name in apart)}")
    keys = len(body["question"])
    said.append(f"{keys} {'key of the plans differs' if keys == 1 else 'keys of the plans differ'}" if keys else
                "the plans ask the same question")  # fmt: skip
    return said


def _outcome(side: Any) -> Any:
    return None if side is None else side["outcome"]


def forecast_doubts(found: Any) -> list[str]:
    """Of each side's forecast that is inconclusive, why: said before its number."""
    sides = {name: found[side] for name, side in (("A", "a"), ("B", "b")) if found[side] is not None}
    return [f"{name}: {doubt}" for name, side in sides.items() for doubt in first_and_rest(side["warnings"])[0]]


def _forecast_sentences(body: Body) -> list[str]:
    found = body["forecast"]
    if found is None or found["difference_nats"] is None or found["difference_nats"]["value"] is None:
        return []
    said = [
        *forecast_doubts(found),
        f"main run's expected loss, B less A: {_plain(found['difference_nats'], '+.4f', 'nats')}",
    ]
    if found["at_one_compute"] is not None and found["a"]["flops"] != found["b"]["flops"]:
        said.append(
            "the same on each one's frontier at the smaller budget: "
            f"{_plain(found['at_one_compute']['difference_nats'], '+.4f', 'nats')}"
        )
    return said


def _optima_sentences(body: Body) -> list[str]:
    """Of optima the differences that their intervals do not explain; of the others their number."""
    said, open_ones = [], 0
    for test in body["tests"]:
        for row in test["optima"]:
            found = row["difference_octaves"]
            if found is None or found["value"] is None:
                continue
            if not found["apart"]:
                open_ones += 1
                continue
            where = size_name(test["axis"], row["size"])
            over = ", though the two intervals overlap" if found["overlap"] else "; the two intervals do not overlap"
            what = hyperparameter_name(test["hyperparameter"])
            said.append(f"optimal {what} at {where}, B less A: {_plain(found, '+.2f', 'octaves')}{over}")
    if open_ones:
        said.append(f"optima that these runs do not tell apart: {open_ones}")
    return said


def _plain(found: Any, spec: str, unit: str) -> str:
    """A difference as text, with its interval and what that says."""
    value, *ends = (format(x, f"+z{spec[1:]}") for x in [found["value"], *(found["interval"] or ())])
    if not ends:
        return f"{value} {unit}, with no interval"
    return f"{value} {unit} [{', '.join(ends)}]{'' if found['apart'] else ', which may be nothing'}"


def top(body: Body) -> str:
    """Headline, both studies, the differences, and how to read them."""
    studies = body["studies"]
    names = [(f"{side.upper()}", f"<b>{show.text(of['name'])}</b>: {_named(of)}") for side, of in studies.items()]
    shared = body["num_shared_runs"]
    notes = "<p>Every difference is B less A. Its interval takes the two studies as independent of each other"
    notes += "; the same seeds and data in both make it wider than it need be. " if not body["same_study"] else ". "
    notes += "Where it holds nothing, these runs do not tell the two apart, which is not to say that they are equal. "
    notes += "Among many differences some lie apart by chance.</p>"
    if shared and not body["same_study"]:
        notes += f"<p>{show.count(shared)} runs of the transfer tests are in both, with one loss to the last digit.</p>"
    said = show.bullets([show.text(sentence) for sentence in body["summary"]])
    return (
        '<p class="over">forerun comparison</p><h1>What differs between two studies</h1>'
        f"{show.facts(names)}{said}{notes}"
    )


def _named(of: Any) -> str:
    budget = "" if of["budget_flops"] is None else f"; budget {show.flops(of['budget_flops'])} FLOPs"
    digest = f"; digest <code>{show.text(of['digest'])}</code>" if of["digest"] else "; not frozen"
    done = ", ".join(
        f"{show.words(stage)} {show.count(runs[0])} of {show.count(runs[1])} runs"
        for stage, runs in of["progress"].items()
    )
    rule = show.text(show.arm_name(str(of["parametrization"])))
    return (
        f"{rule} at base width {show.text(of['base_width'])}, tokenizer "
        f"{show.text(of['tokenizer'])}{budget}; {done}{digest}"
    )
