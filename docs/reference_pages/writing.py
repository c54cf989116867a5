"""All pages of docs/reference, and the writing of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reference_pages.alerts_and_drills import alerts_page, drills_page
from reference_pages.answers import json_page
from reference_pages.command_line import commands, commands_page, exit_codes_page
from reference_pages.environment import environment_page
from reference_pages.launch_schema import launch_schema
from reference_pages.plan_keys import plan_page
from reference_pages.records import records_page

FOLDER = Path(__file__).parents[1] / "reference"


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": commands_page,
    "plan.md": plan_page,
    "records.md": records_page,
    "json.md": lambda: json_page(tuple(commands())),
    "exit-codes.md": exit_codes_page,
    "environment.md": environment_page,
    "alerts.md": alerts_page,
    "drills.md": drills_page,
    "launch.schema.json": launch_schema,
}
"""File name to what makes its text."""


def write_pages() -> None:
    """Write them where they belong."""
    FOLDER.mkdir(exist_ok=True)
    for name, made in PAGES.items():
        (FOLDER / name).write_text(made(), encoding="utf-8")


if __name__ == "__main__":
    write_pages()
