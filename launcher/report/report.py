"""The report: `report.json`, and one page that shows it. Static, self-contained; the same body gives the same bytes."""

from __future__ import annotations

from pathlib import Path

from launcher.logbook.logbook import LOGBOOK_FILE
from launcher.report import fits, sections
from launcher.report.decision import decision, groups
from launcher.report.main_run import main_run_section
from launcher.report.page import whole_page, words
from launcher.report.sections import coordinates
from launcher.report.transfer import transfer
from launcher.views import html as show
from launcher.views.calibration import calibration_section
from launcher.views.html import Body
from proxies.core import canon


def write_report(study_dir: Path, body: dict[str, canon.Json]) -> None:
    """Write `report.json` and `report.html`, each wholly or not at all.

    Args:
        study_dir: the study's folder.
        body: what `launcher.report.body.report_body` gives; parts that have not run are null, and the page says so.
    """
    written = canon.pretty(body)
    canon.write_atomic(study_dir / "report.json", written)
    read = canon.parse(written)  # the page is drawn from the file, so that anyone can draw it again
    assert isinstance(read, dict)
    canon.write_atomic(study_dir / "report.html", page(read).encode())


def page(body: Body) -> str:
    """The whole page. No number on it that does not come from `body`."""
    parts = [
        decision(body),
        transfer(body),
        coordinates(body),
        sections.search(body),
        fits.scaling(body),
        sections.choice(body),
        fits.next_runs(body),
        groups(body),
        main_run_section(body),
        _spend(body),
        calibration_section(body),
        _provenance(body),
        words(),
    ]
    return whole_page("forerun report", parts)


def _spend(body: Body) -> str:
    """What the proxies cost."""
    spend = body["spend"]
    by_status = ", ".join(f"{show.count(number)} {show.words(status)}" for status, number in spend["by_status"].items())
    return show.section(
        "spend",
        "What it cost",
        show.facts(
            [
                ("Runs", f"{show.count(spend['num_runs'])}{f' ({by_status})' if by_status else ''}"),
                ("Compute", f"{show.flops(spend['flops_causal'])} FLOPs (causal convention)"),
                ("Beside the target", f"{show.percent(spend['share_of_target'])} of the main run's budget"),
                ("Worker time", show.seconds(spend["worker_seconds"])),
            ]
        ),
    )


def _provenance(body: Body) -> str:
    """What identifies this study, and its plan."""
    corpus = body["corpus"]
    names = [
        ("Digest", f"<code>{show.text(body['digest'])}</code>" if body["digest"] else "not frozen: no decision yet"),
        ("Ledger head", f"<code>{show.text(body['ledger_head'])}</code>"),
        ("Data", f"<code>{show.text(corpus['data_id'])}</code>"),
        (
            "Corpus",
            (
                f"{show.count(corpus['num_documents'])} documents, {show.count(corpus['num_train_tokens'])} training "
                f"and {show.count(corpus['num_validation_tokens'])} validation tokens, tokenizer "
                f"{show.text(corpus['tokenizer'])}"
            ),
        ),
    ]
    rows = [(f"<code>{key}</code>", value) for key, value in show.leaves(body["question"])]
    return show.section(
        "provenance",
        "Where this comes from",
        show.facts(names),
        "<h3>The plan's question</h3>",
        show.table(("key", "value"), rows, left=(0, 1)),
        "<p>Every number here is in <code>report.json</code>, beside this page"
        + (f'; <a href="{LOGBOOK_FILE}">{LOGBOOK_FILE}</a> tells it day by day' if body.get("has_logbook") else "")
        + ".</p>",
    )
