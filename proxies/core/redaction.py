"""Removal of secrets from texts: keys, tokens, and passwords.

A secret is recognized by the name before it, by the prefix that its service gives it, by its place
in a URL, and as the value of an environment variable whose name says so. A secret that looks like
an ordinary word, without such a sign, is not recognized. All patterns take linear time: every
repetition that a search could start again from many places has a maximum length.

`redact` searches a text with all patterns. `LineRedactor` first looks for clues, which are cheap to
find and which every secret has. A new pattern needs a clue: a test compares the two.
"""

from __future__ import annotations

import functools
import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from pathlib import Path

REPLACEMENT = "***"

# ---- Names of secrets, and values that are not secrets ----

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""A word of a name: `MYSQL_rootPassword` has MYSQL, root, and Password."""
_AMBIGUOUS_WORDS = frozenset(("PASS", "KEY", "PAT", "AUTH"))
"""Words in names of secrets that are also ordinary words in prose and JSON."""
_SECRET_WORDS = {
    *_AMBIGUOUS_WORDS,
    "PASSWD",
    "PASSWORD",
    "PASSPHRASE",
    "TOKEN",
    "SECRET",
    "APIKEY",
    "AUTHORIZATION",
    "CREDENTIAL",
    "CREDENTIALS",
}
"""Words that make a name the name of a secret. Each contains one of `_NAME_PARTS`."""
_SECRET_ENDS = ("PASS", "PWD", "PASSWORD", "PASSWD", "TOKEN")
"""Ends of names of secrets that may follow letters, as in `PGPASSWORD`. Each contains one of
`_NAME_PARTS`."""
_ORDINARY_NAMES = re.compile(
    r"(?i)(?:PATH|PWD|OLDPWD|TOKENIZERS[_-].*|.*[_-](?:MODE|FILE|PATH)|\w*(?:Error|Exception|Warning))$"
)
"""Names whose values are not secrets, such as those of Python's exceptions: `KeyError: 'rope'`."""
_SPECIAL_TOKENS = re.compile(
    r"(?i).*(?:bos|eos|bot|eot|pad|unk|sep|cls|mask|end|start|stop|special|image|per|last|next)[_-]token$"
)
"""Names of a tokenizer's special tokens in logs. Environment variables have no such exception."""
_ORDINARY_VALUES = re.compile(
    r"(?i)(?:true|false|yes|no|on|off|none|null|-?(?:\d{1,6}|(?=[\d.]{3,7}$)\d+\.\d+)"
    r"|(?-i:\$\{?[A-Z_][A-Z0-9_]*\}?))$"  # the last: a reference to a variable
)
_MIN_VALUE_CHARS, _MIN_PART_CHARS = 3, 8
"""Minimum lengths of a variable's value: to be searched at all, and to be found inside a word."""

# ---- Secrets of a known form ----

_KEY_FORMS = {
    "sk- sk_": r"(?=[A-Za-z_-]{0,64}+\d)[\w-]{16,}",
    "sk_live_ sk_test_ rk_live_ rk_test_": r"\w{8,}",
    "hf_ npm_": r"[A-Za-z0-9]{16,}",
    "AIza": r"[\w-]{20,}",
    "xox": r"[a-z]-[\w-]{12,}",
    "gho_ ghp_ ghr_ ghs_ ghu_ github_pat_ glpat-": r"[\w-]{12,}",
    "xapp- AKIA ASIA wandb_v1_ pypi-AgE dckr_pat_": r"[\w-]{12,}",
    "eyJ": r"[\w-]{8,2048}+\.[\w-]{8,}+\.[\w-]*",  # a JSON web token
}
"""Pattern of what follows a key's prefix, by the prefixes that services give to their keys."""
_KEYS = re.compile(
    "|".join(rf"\b(?:{prefixes.replace(' ', '|')}){end}" for prefixes, end in _KEY_FORMS.items())
)
_PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.S,
)
_PEM_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY")
_PEM_END = re.compile(r"-----END [A-Z0-9 ]*PRIVATE KEY")
_URL_CREDENTIALS = re.compile(
    r"(?<=://)(?:[^/\s@:]{0,256}+:(?:[^\s@]{0,512}+@){1,64}+|[^/\s@]{1,256}+@)"
)
"""A user, or a user with a password of any characters up to the last `@` before a space."""
_BEARER = re.compile(r"((?i:\bbearer\s+|\bbasic\s+(?=\S*(?:[\d=]|(?-i:[a-z][A-Z])))))\S{8,}")
"""Credentials of an HTTP header. The text after `basic` must look like base64, so that nothing is
hidden in `a basic understanding`."""
_HEX = re.compile(r"\b[0-9a-f]{40}\b")
"""A key of W&B from before 2025. A commit of git looks the same and is hidden as well: a log does
not need it."""
_COMMIT = re.compile(r"(?i)((?:commit|rev|revision|sha1?|hash|git|checkout)\W{1,3})[0-9a-f]{40}\b")
_KEY_NEAR_HEX = re.compile(
    r"(?i)(?=.*(?<![a-z])(?:wandb|w&b|api|key|login|token|secret|passw(?:or)?d)(?![a-z])).*\b(?-i:[0-9a-f]{40})\b"
)
"""A line that mentions a key and has 40 hex digits, which alone may be a commit."""

# ---- Secrets after a name ----

_UNAMBIGUOUS_NAME = (
    r"(?:api[_-]?key|secret|passw(?:or)?d|passphrase|authorization|credential|token(?!s|iz|_id))"
)
_NAMED = re.compile(
    rf"(?i)(?P<is>(?<![\w/-])(?P<name>[\w-]{{0,64}}{_UNAMBIGUOUS_NAME}\w{{0,64}})\s*[=:]\s*)"
    r"(?P<value>(?![\"']|\*{3})\S+).*"
)
"""A value after a name in prose, to the end of the line: a password may contain spaces."""
_VALUE = r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s\"',;{}-][^\s\"',;}]*)"
_ASSIGNED = re.compile(
    rf"(?<![\w/.-])(?P<is>(?P<name>[A-Za-z][\w-]{{0,255}})[\"']?\s?[=:]\s?){_VALUE}"
)
_OPTION = re.compile(rf"(?<![\w-])(?P<is>--?(?P<name>[A-Za-z][\w-]{{0,255}})(?:=|\s+)){_VALUE}")
_PROSE = re.compile(r"(?i)token:\s+[a-z]{1,7}(?:\s|$)")
"""A sentence about tokens, such as `a token: the smallest piece`. A secret token has more than 7
characters, or not only letters."""

# ---- Clues ----

_CLUES = ("bearer", "basic", "://", *" ".join(_KEY_FORMS).lower().split())
"""Substrings, in lower case. Every secret of a known form has one of them, except for private keys
and 40 hex digits."""
_NAME_PARTS = ("pass", "pwd", "token", "secret", "key", "auth", "credential", "pat")
"""Substrings, in lower case. The name of every secret has one of them."""
_NAME = rf"(?:{'|'.join(_NAME_PARTS)})(?<!token(?=s(?![a-z])|iz))[\w-]{{0,256}}+"
"""The end of a name, in lower case, that may be the name of a secret. The words `tokens` and
`tokenizer` do not count."""
_NAME_CLUE = re.compile(rf"{_NAME}[\"']?\s*+[=:]")
_OPTION_CLUE = re.compile(rf"(?<![\w-])--?[\w-]{{0,255}}?{_NAME}\s")

MAX_CLEANED_CHARS = 2**22
"""Maximum number of characters, in the lines of a block that have clues, that are searched. The
search takes seconds. Lines with clues beyond this number are hidden as a whole."""
_MAX_PIECE_CHARS = 2**16
"""Maximum length of a text that is searched at once, because a search blocks all other threads."""


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return a text without secrets.

    Args:
        text: The text.
        environment: Variables whose values are secrets if their names say so.
    """
    return _hide_named(_hide_marked(text, _find_values(environment)))


def redact_message(
    text: str, foreign: Iterable[str], environment: Mapping[str, str] = os.environ
) -> str:
    """Return a message of forerun without secrets.

    In forerun's own sentences, the word before a value is not the name of a secret:
    "--text-key names another key" contains no key. So names count only in the parts of the message
    that come from elsewhere.

    Args:
        text: The message.
        foreign: Texts from elsewhere that may be part of the message, such as those of its causes.
        environment: Variables whose values are secrets if their names say so.
    """
    lines = {line.strip() for part in foreign for line in part.splitlines()} - {""}
    # The longest first: a replaced part of a longer line would hide the longer line from the search
    for line in sorted(lines, key=len, reverse=True):
        text = text.replace(line, redact(line, environment))
    return _hide_marked(text, _find_values(environment))


def find_secret(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the kind of secret that a text contains; empty if it contains none.

    forerun refuses to store such a text. The rules are those of `redact`, except that 40 hex digits
    count only in a line that mentions a key and does not call the digits a commit.
    """
    if (value_pattern := _find_values(environment)) and value_pattern.search(text):
        return "the value of an environment variable that is called a secret"
    text = _COMMIT.sub(r"\1commit", text)
    if any(_KEY_NEAR_HEX.match(line) for line in text.splitlines()):
        return "a key of 40 hex digits (write a commit of git as `commit` and its digits)"
    text = _HEX.sub("commit", text)
    if redact(text, {}) == text:
        return ""
    return "a key, a password or a token, or an address with one"


class LineRedactor:
    """A function that redacts the lines of a log as they arrive.

    It remembers whether the last line is inside a private key (PEM), because a key may span many
    lines and calls. It reads the environment once, when it is made.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._in_pem = False
        self._value_clues = _list_values(environment)
        self._values = _make_pattern(self._value_clues)

    def __call__(self, text: str) -> str:
        """Return the next lines, one or many, without their secrets.

        Lines without a clue of a secret are not searched.
        """
        if not self._in_pem and not self._has_clue(text):
            return text
        lines, num_cleaned = text.split("\n"), 0
        for number, line in enumerate(lines):
            if self._in_pem:
                self._in_pem = _PEM_END.search(line) is None
                lines[number] = REPLACEMENT
            elif self._has_clue(line):
                self._in_pem = _starts_key(line)
                num_cleaned += len(line)
                lines[number] = (
                    REPLACEMENT if num_cleaned > MAX_CLEANED_CHARS else self._clean(line)
                )
        return "\n".join(lines)

    def _has_clue(self, text: str) -> bool:
        """Return whether a text may contain a secret. Most texts have no clue, which is quick to
        see.
        """
        lower = text.lower()
        if any(clue in lower for clue in _CLUES) or "-----BEGIN" in text or _HEX.search(text):
            return True
        if any(part in lower for part in _NAME_PARTS) and (
            _NAME_CLUE.search(lower) or _OPTION_CLUE.search(lower)
        ):
            return True
        return any(value in text for value in self._value_clues)

    def _clean(self, line: str) -> str:
        pieces = [line[at : at + _MAX_PIECE_CHARS] for at in range(0, len(line), _MAX_PIECE_CHARS)]
        return "".join(_hide_named(_hide_marked(piece, self._values)) for piece in pieces)


def _starts_key(line: str) -> bool:
    """Return whether a private key (PEM) begins in a line and does not end there."""
    begins = list(_PEM_BEGIN.finditer(line))
    return bool(begins) and _PEM_END.search(line, begins[-1].end()) is None


# ---- Replacement of secrets of a known form ----


def _hide_marked(text: str, value_pattern: re.Pattern[str] | None) -> str:
    """Hide secrets that are recognized by their own form, and the values of variables."""
    if value_pattern:
        text = value_pattern.sub(REPLACEMENT, text)
    text = _PEM.sub(REPLACEMENT, text)
    text = _URL_CREDENTIALS.sub(f"{REPLACEMENT}@", text)
    text = _KEYS.sub(REPLACEMENT, text)
    text = _BEARER.sub(rf"\1{REPLACEMENT}", text)
    return _HEX.sub(REPLACEMENT, text)


# ---- Replacement of secrets after a name ----


def _hide_named(text: str) -> str:
    """Hide secrets that are recognized by the name before them."""
    text = _NAMED.sub(_redact_rest_of_line, text)
    text = _OPTION.sub(_redact_option, text)
    return _ASSIGNED.sub(_redact_assignment, text)


def _redact_rest_of_line(match: re.Match[str]) -> str:
    """Redact `my password: a b c`."""
    if _ORDINARY_NAMES.match(match["name"]) or _is_prose(match):
        return match[0]
    return _replace_value(match)


def _redact_option(match: re.Match[str]) -> str:
    """Redact `--api-key VALUE`."""
    if _SPECIAL_TOKENS.match(match["name"]) or not _is_secret_name(match["name"]):
        return match[0]
    return _replace_value(match)


def _redact_assignment(match: re.Match[str]) -> str:
    """Redact `NAME=value` and `"name": "value"`.

    A name that is one ambiguous word counts only in capitals, as the name of a variable.
    """
    name = match["name"]
    words = _split_name(name)
    is_ordinary_word = len(words) == 1 and words <= _AMBIGUOUS_WORDS and not name.isupper()
    if is_ordinary_word or _is_prose(match) or not _is_secret_name(name):
        return match[0]
    return _replace_value(match)


def _is_prose(match: re.Match[str]) -> bool:
    """Return whether an assignment names a special token, or explains what a token is."""
    return bool(_SPECIAL_TOKENS.match(match["name"]) or _PROSE.match(match[0]))


def _replace_value(match: re.Match[str]) -> str:
    """Return an assignment with its value hidden, in the same quotes."""
    value = match["value"]
    quote = value[0] if value[0] in "\"'" else ""
    if _is_ordinary_value(value.strip(quote or None)):
        return match[0]
    return f"{match['is']}{quote}{REPLACEMENT}{quote}"


@functools.lru_cache(maxsize=4096)
def _is_secret_name(name: str) -> bool:
    """Return whether a variable or an option of this name has a secret value."""
    if _ORDINARY_NAMES.match(name):
        return False
    return bool(_SECRET_WORDS & _split_name(name)) or name.upper().endswith(_SECRET_ENDS)


def _split_name(name: str) -> set[str]:
    """Return the words of a name, each in capitals."""
    return {word.upper() for word in _WORDS.findall(name)}


def _is_ordinary_value(value: str) -> bool:
    """Return whether a value is a switch, a small number, or the path of an existing file."""
    if _ORDINARY_VALUES.match(value):
        return True
    try:
        return ("/" in value or value.startswith("~")) and Path(value).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # name too long, null byte, unknown user of `~`
        return False


# ---- Values of environment variables ----


def _find_values(environment: Mapping[str, str]) -> re.Pattern[str] | None:
    """Return a pattern of the values of secret variables; None if there are none."""
    return _make_pattern(_list_values(environment))


def _list_values(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of secret variables in all their forms."""
    return _list_forms(
        frozenset(value for name, value in environment.items() if _is_secret_name(name))
    )


@functools.lru_cache(maxsize=8)
def _list_forms(values: frozenset[str]) -> tuple[str, ...]:
    """Return the values, the values as URLs, JSON, and Python write them, and their long lines.

    The longest come first, because a form may be part of a longer form.
    """
    forms: set[str] = set()
    for value in values:
        if not _is_ordinary_value(value):
            forms |= {value, urllib.parse.quote(value, safe="")}
            forms |= {json.dumps(value)[1:-1], repr(value)[1:-1]}
            forms |= {line for line in value.splitlines() if len(line) >= _MIN_PART_CHARS}
    longest_first = sorted(forms, key=len, reverse=True)
    return tuple(form for form in longest_first if len(form) >= _MIN_VALUE_CHARS)


@functools.lru_cache(maxsize=8)
def _make_pattern(values: tuple[str, ...]) -> re.Pattern[str] | None:
    """Return a pattern that matches one of some values; None if there are none."""
    patterns = [
        re.escape(value) if len(value) >= _MIN_PART_CHARS else rf"(?<!\w){re.escape(value)}(?!\w)"
        for value in values
    ]
    return re.compile("|".join(patterns)) if patterns else None
