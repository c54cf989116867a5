"""What looks like a key, a token or a password, and texts without it. Standard library only.

Told by what it is called, by the prefixes that services give their keys, by its place in an address, and as the value
of an environment variable whose name says so. A secret that looks like any other word is not seen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

INSTEAD = "***"
_NAMES = r"(?:api[_-]?key|secret|passw(?:or)?d|authorization|credential|token(?!s|iz|_id))"
_KEYS = re.compile(
    r"\b(?:sk-(?=[\w-]*\d)[\w-]{16,}|hf_[A-Za-z0-9]{16,}|(?:gh[opsu]_|github_pat_|glpat-|xox[abp]-|AKIA|wandb_v1_)[\w-]{12,})"
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_NAMED = re.compile(rf"(?i)((?<!/){_NAMES}\w*[\"']?\s*[=:]\s*)(?!\*{{3}})\S.*")
_OPTION = re.compile(rf"(?i)--?[\w-]*{_NAMES}(?![\w-])[=\s]+(?!-|\{{)\S")
_BEARER = re.compile(r"(?i)(\b(?:bearer|basic)\s+)\S{8,}")
_HEX = re.compile(r"\b[0-9a-f]{40}\b")  # keys of W&B before 2025; also a commit of git, which a log can do without
_VARIABLE = re.compile(r"(?i)(?:^|_)(?:api_?key|key|token|secret|passw(?:or)?d|pass|credentials?)(?:_|$)")
_LEAST_CHARS = 8
"""Of a variable's value: shorter ones are switches and numbers."""


def redacted(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """`text` without what looks like a secret, or is the value of a variable of `environment` that is called one."""
    for value in _values(environment):
        text = text.replace(value, INSTEAD)
    text = _KEYS.sub(INSTEAD, _IN_ADDRESS.sub(INSTEAD, text))
    return _HEX.sub(INSTEAD, _BEARER.sub(rf"\1{INSTEAD}", _NAMED.sub(rf"\1{INSTEAD}", text)))


def secret_in(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """What of a text that will be kept looks like a secret, in words and without it; empty where nothing does.

    Stricter than `redacted`, for it refuses: 40 hex digits may be a commit, and `token = 5` a number.
    """
    if any(value in text for value in _values(environment)):
        return "the value of an environment variable that is called a secret"
    if _KEYS.search(text):
        return "a service's key"
    if _IN_ADDRESS.search(text):
        return "a user or a password in an address"
    return "a key or a password on a command line" if _OPTION.search(text) else ""


def _values(environment: Mapping[str, str]) -> list[str]:
    """The longest first: one may be part of another. A path is no secret, though its file may hold one."""
    found = {value for name, value in environment.items() if _VARIABLE.search(name) and len(value) >= _LEAST_CHARS}
    return sorted((value for value in found if not value.startswith(("/", "~"))), key=len, reverse=True)
