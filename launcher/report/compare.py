"""`compare.json`: two reports side by side: what they asked, what came out, how far apart, and what cannot be compared.

The first study is `a`, the second `b`; every difference is b less a.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from launcher.report import differences as differ
from launcher.views.numbers import Body, words
from launcher.views.transfer import hyperparameter_name, name_of, size_name
from proxies.core import canon
from proxies.core.canon import Json
from scaling_fits.forecast.conclusive import first_and_rest

REPORT_FILE = "report.json"
_OBJECTS = ("question", "corpus", "progress", "transfer", "ladder", "fit", "choice", "decision", "spend", "accepted")
_NEVER_NULL = ("question", "corpus", "spend")
SIDES = ("a", "b")
_PER_TOKEN = "so are their losses per token"


class NotAReportError(ValueError):
    """What was given is no study and no report; `problems` names each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


def read_two(first: Path, second: Path) -> tuple[Body, Body]:
    """The bodies of two studies as they are now, or of files as `report` writes them.

    Raises:
        NotAReportError: one is neither, or both; every problem is named.
        SweepError, PlanError, DataError: a study's records are damaged, or its data is gone.
    """
    files = [path / REPORT_FILE if _only_a_report(path) else path for path in (first, second)]
    read: dict[Path, Body] = {}
    problems = []
    for path in dict.fromkeys(files):
        if _is_study(path):
            continue
        try:
            read[path] = _report(path)
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {error}; wanted: a study's folder, or the {REPORT_FILE} of one")
    if problems:
        raise NotAReportError(problems)
    from launcher.report.body import recorded_body

    for path in dict.fromkeys(files):
        if path not in read:
            read[path] = recorded_body(path)
    return read[files[0]], read[files[1]]


def _is_study(path: Path) -> bool:
    from sweeps.store.ledger import LEDGER_NAME

    return (path / LEDGER_NAME).is_file()


def _only_a_report(path: Path) -> bool:
    return path.is_dir() and not _is_study(path) and (path / REPORT_FILE).is_file()


def _report(path: Path) -> Body:
    if path.is_dir() or not path.exists():
        raise ValueError("no study is there" if path.is_dir() else "there is no such file or folder")
    body = canon.parse(path.read_bytes())
    if not isinstance(body, dict):
        raise ValueError("not a JSON object")
    wrong = [key for key in _OBJECTS if not isinstance(body.get(key), dict) and (body.get(key) or key in _NEVER_NULL)]
    wrong += [key for key in ("gates",) if not isinstance(body.get(key), list)]
    if body.get("schema_version") != 1 or wrong:
        raise ValueError(f"not a report: {', '.join(wrong) or 'schema_version'} is not as in one")
    return body


def labels(first: Path, second: Path) -> tuple[str, str]:
    """Names for two studies by their folders, the folders around these too where the names are one."""
    folders = [(path.parent if path.is_file() else path).resolve() for path in (first, second)]
    if folders[0].name != folders[1].name:
        return folders[0].name, folders[1].name
    return "/".join(folders[0].parts[-2:]), "/".join(folders[1].parts[-2:])


def compare_body(a: Body, b: Body, names: tuple[str, str]) -> dict[str, Json]:
    """Everything the page says of both, differences first; parts that only one has, or neither, are null on a side."""
    limits = comparability(a, b)
    same = is_same(a, b)
    values = limits["values"]["comparable"] != "no"
    losses = limits["losses"]["comparable"] != "no"
    found: dict[str, Json] = {
        "schema_version": 1,
        "studies": {side: _study(body, name) for side, body, name in zip(SIDES, (a, b), names, strict=True)},
        "same_study": same,
        "num_shared_runs": num_shared_runs(a, b),
        "comparable": cast(Json, limits),
        "question": differ.question(a, b),
        "tests": differ.tests(a, b, same=same, values=values, losses=losses),
        "values": differ.values(a, b),
        "gates": differ.gates(a, b),
        "fit": differ.fits(a, b, same=same, losses=losses),
        "choice": differ.choices(a, b),
        "forecast": differ.forecasts(a, b, same=same, losses=losses),
        "spend": differ.spends(a, b),
        "ladder": {side: _ladder(body) for side, body in zip(SIDES, (a, b), strict=True)} if losses else None,
    }
    return {**found, "summary": [f"{said[0].upper()}{said[1:]}." for said in sentences(found)]}


def is_same(a: Body, b: Body) -> bool:
    """Whether both are one study at one moment: the ledger's chain of hashes has one head."""
    return a["question"] == b["question"] and bool(a.get("ledger_head")) and a["ledger_head"] == b.get("ledger_head")


def _study(body: Body, name: str) -> dict[str, Json]:
    corpus, proxy = body["corpus"], body["question"].get("proxy", {})
    return {
        "name": name,
        "digest": body.get("digest"),
        "ledger_head": body.get("ledger_head"),
        "data_id": corpus.get("data_id"),
        "tokenizer": corpus.get("tokenizer"),
        "vocab_size": _vocab_size(body),
        "parametrization": proxy.get("parametrization"),
        "base_width": proxy.get("base_width"),
        "budget_flops": differ.budget(body),
        "progress": canon.to_json(body.get("progress") or {}),
    }


def _vocab_size(body: Body) -> Any:
    """Older reports have it only with a decision, in its shape."""
    return body["corpus"].get("vocab_size") or ((body.get("decision") or {}).get("shape") or {}).get("vocab_size")


def num_shared_runs(a: Body, b: Body) -> int:
    """Runs of the transfer tests that are in both with one loss to the last digit: imported, or computed alike."""
    return len(_runs(a) & _runs(b))


def _runs(body: Body) -> set[tuple[Any, ...]]:
    tests = (body.get("transfer") or {"tests": []})["tests"]
    return {
        (test["axis"], test["hyperparameter"], run["arm"], run["size"], run["log2_value"], run["seed"],
         run["loss_nats"])
        for test in tests for run in test["runs"] if run["loss_nats"] is not None
    }  # fmt: skip


def comparability(a: Body, b: Body) -> dict[str, dict[str, Any]]:
    """Of losses, values and forecasts: `yes`, `with_care` or `no`, each with reasons."""
    losses = _of_losses(a, b)
    values = _of_values(a, b)
    budgets = [differ.budget(body) for body in (a, b)]
    forecasts = dict(losses)
    if losses["comparable"] != "no" and budgets[0] != budgets[1]:
        said = "the budgets differ, so the forecasts are of main runs of other compute"
        forecasts = {"comparable": "with_care", "reasons": [*losses["reasons"], said]}
    return {"losses": losses, "values": values, "forecasts": forecasts}


def _of_losses(a: Body, b: Body) -> dict[str, Any]:
    first, second = a["corpus"], b["corpus"]
    if first.get("data_id") != second.get("data_id"):
        sizes = [_vocab_size(body) for body in (a, b)]
        if first.get("tokenizer") != second.get("tokenizer"):
            why = f"the tokenizers are others, {_PER_TOKEN}"
        elif None not in sizes and sizes[0] != sizes[1]:
            why = f"the vocabularies are others, {_PER_TOKEN}"
        else:
            why = "the data is other data, and so are the texts that the losses were measured on"
        return {"comparable": "no", "reasons": [why]}
    lengths = [body["question"].get("model", {}).get("seq_len") for body in (a, b)]
    if lengths[0] != lengths[1]:
        said = "the sequences are of other lengths: a model that sees more before a token loses less at it"
        return {"comparable": "with_care", "reasons": [said]}
    return {"comparable": "yes", "reasons": []}


def _of_values(a: Body, b: Body) -> dict[str, Any]:
    """Learning rates are set at the base, under one parametrization: elsewhere the same number is another step."""
    first, second = (body["question"].get("proxy", {}) for body in (a, b))
    reasons = [
        f"{what} differs, and a value as set at the base means another one in the model"
        for key, what in (("parametrization", "the parametrization"), ("base_width", "the base width"))
        if first.get(key) != second.get(key)
    ]
    if reasons:
        return {"comparable": "no", "reasons": reasons}
    with_it = [
        f"{what} at the base differs, and optima move with it"
        for key, what in (("batch_tokens", "the batch"), ("num_steps", "the number of steps"))
        if first.get(key) != second.get(key)
    ]
    if a["corpus"].get("data_id") != b["corpus"].get("data_id"):
        with_it.append("the data differs, and optima may move with it")
    return {"comparable": "with_care" if with_it else "yes", "reasons": with_it}


def _ladder(body: Body) -> Json:
    """What the figure of the ladder needs of one study."""
    if body.get("ladder") is None:
        return None
    keys = ("width", "params", "tokens", "flops", "loss_nats")
    rungs: list[Mapping[str, Any]] = body["ladder"]["rungs"]
    return cast(
        Json,
        {
            "rungs": [{key: rung.get(key) for key in keys} for rung in rungs],
            "frontier": body.get("frontier"),
            "prediction": (body.get("choice") or {}).get("prediction"),
        },
    )


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
            said.append(f"{name_of(test)}: A {words(a)}, B {words(b)}")
    apart = [gate["name"] for gate in body["gates"] if _outcome(gate["a"]) != _outcome(gate["b"])]
    if apart:
        said.append(f"gates with another outcome: {', '.join(map(words, apart))}")
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
