"""Base classes of the errors that end a command, and the exit codes of commands."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command, each with its meaning in words."""

    meaning: str

    DONE = 0, "done"
    BUG = 1, "a bug in forerun"
    INPUT = 2, "bad input"
    GATE = 3, "a gate failed"
    CANNOT_TELL = 4, "cannot tell"
    CORRUPT = 5, "corrupt or tampered"
    HELD = 75, "another driver holds the study"
    INTERRUPTED = 130, "interrupted (resumable)"

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        """Return the member of one exit code."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member


class ForerunError(Exception):
    """An error of forerun. If nothing handles it, the command ends with its exit code."""

    exit_code: int = ExitCode.INPUT


class InputError(ForerunError, ValueError):
    """An error that a person can correct: a value, a file, a request, or the state of a study."""


class ProblemsError(InputError):
    """An error with several reasons. `problems` lists all of them."""

    label = ""
    """Text after the subject in the message."""

    def __init__(self, subject: object, problems: list[str]) -> None:
        self.problems = problems
        super().__init__(f"{subject}{self.label}: {'; '.join(problems)}")
