"""Write all pages of docs/reference.

    PYTHONPATH=docs python -m reference_pages.writing

`make reference` does the same, in a few seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reference_pages.alerts_and_drills import format_alerts_page, format_drills_page
from reference_pages.answers import format_json_page
from reference_pages.commands_and_exit_codes import (
    format_commands_page,
    format_exit_codes_page,
    load_commands,
)
from reference_pages.environment import format_environment_page
from reference_pages.launch_schema import build_launch_schema
from reference_pages.plan_keys import format_plan_page
from reference_pages.records import format_records_page

FOLDER = Path(__file__).parents[1] / "reference"


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": format_commands_page,
    "plan.md": format_plan_page,
    "records.md": format_records_page,
    "json.md": lambda: format_json_page(tuple(load_commands())),
    "exit-codes.md": format_exit_codes_page,
    "environment.md": format_environment_page,
    "alerts.md": format_alerts_page,
    "drills.md": format_drills_page,
    "launch.schema.json": build_launch_schema,
}
"""Function that returns the text of each page, by file name."""


def write_pages() -> None:
    """Write all pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, format_page in PAGES.items():
        (FOLDER / name).write_text(format_page(), encoding="utf-8")


if __name__ == "__main__":
    write_pages()
