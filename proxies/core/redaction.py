"""What looks like a key, a token or a password, and texts without it. Standard library only.

A secret is known by the name before it, by the prefix that its service gives it, by its place in a
URL, and as the value of an environment variable whose name says so. One that looks like any other
word is not recognised.

Output of a command is long and mostly innocent. So `LineRedactor` first searches a whole block for
the few literals that every secret has (`_CLUES`). Only lines with one are cleaned by the slow
patterns. All patterns are linear: what could be scanned again from each of many places is bounded.
"""

from __future__ import annotations

import functools
import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

INSTEAD = "***"
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""`MYSQL_rootPassword` is MYSQL, root, Password."""
_SECRET_WORDS = frozenset(
    (
        "PASS",
        "PASSWD",
        "PASSWORD",
        "PASSPHRASE",
        "TOKEN",
        "SECRET",
        "KEY",
        "APIKEY",
        "PAT",
        "AUTH",
        "AUTHORIZATION",
        "CREDENTIAL",
        "CREDENTIALS",
    )
)
# in prose and JSON they are also ordinary words
_WEAK_WORDS = frozenset(("PASS", "KEY", "PAT", "AUTH"))
_SECRET_ENDS = ("PASS", "PWD", "PASSWORD", "PASSWD", "TOKEN")
_ORDINARY_NAMES = re.compile(
    r"(?i)(?:PATH|PWD|OLDPWD|TOKENIZERS[_-].*|.*[_-](?:MODE|FILE|PATH)|\w*(?:Error|Exception|Warning))$"
)
"""Also what Python says: `KeyError: 'rope'`."""
_TOKENIZERS_OWN = re.compile(
    r"(?i).*(?:bos|eos|bot|eot|pad|unk|sep|cls|mask|end|start|stop|special|image|per|last|next)[_-]token$"
)
"""Names of a tokenizer's special tokens, as logs have them; of variables no exception is made."""
_ORDINARY_VALUES = re.compile(
    r"(?i)(?:true|false|yes|no|on|off|none|null|-?(?:\d{1,6}|(?=[\d.]{3,7}$)\d+\.\d+)"
    r"|(?-i:\$\{?[A-Z_][A-Z0-9_]*\}?))$"  # the last: a reference to the environment
)
_LEAST_CHARS, _WHOLE_WORD_CHARS = 3, 8
"""Of a variable's value: shorter ones are not looked for; those below the second only between word
boundaries."""
_KEYS = re.compile(
    r"\b(?:sk[-_](?=[A-Za-z_-]{0,64}+\d)[\w-]{16,}|[sr]k_(?:live|test)_\w{8,}|hf_[A-Za-z0-9]{16,}|AIza[\w-]{20,}|npm_[A-Za-z0-9]{16,}"
    r"|(?:gh[oprsu]_|github_pat_|glpat-|xox[a-z]-|xapp-|A[KS]IA|wandb_v1_|pypi-AgE|dckr_pat_)[\w-]{12,}"
    r"|eyJ[\w-]{8,2048}+\.[\w-]{8,}+\.[\w-]*)"  # the last: a JSON web token
)
_PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.S,
)
_PEM_BEGIN, _PEM_END = (
    re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY"),
    re.compile(r"-----END [A-Z0-9 ]*PRIVATE KEY"),
)
_IN_URL = re.compile(r"(?<=://)(?:[^/\s@:]{0,256}+:(?:[^\s@]{0,512}+@){1,64}+|[^/\s@]{1,256}+@)")
"""A user, or a user with a password of any characters: up to the last `@` before a space."""
_STRONG = (
    r"(?:api[_-]?key|secret|passw(?:or)?d|passphrase|authorization|credential|token(?!s|iz|_id))"
)
_NAMED = re.compile(
    rf"(?i)(?P<is>(?<![\w/-])(?P<name>[\w-]{{0,64}}{_STRONG}\w{{0,64}})\s*[=:]\s*)(?P<value>(?![\"']|\*{{3}})\S+).*"
)
"""In prose: to the end of the line, for a password may have spaces."""
_VALUE = r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s\"',;{}-][^\s\"',;}]*)"
_ASSIGNED = re.compile(
    rf"(?<![\w/.-])(?P<is>(?P<name>[A-Za-z][\w-]{{0,255}})[\"']?\s?[=:]\s?){_VALUE}"
)
_OPTION = re.compile(rf"(?<![\w-])(?P<is>--?(?P<name>[A-Za-z][\w-]{{0,255}})(?:=|\s+)){_VALUE}")
_BEARER = re.compile(r"((?i:\bbearer\s+|\bbasic\s+(?=\S*(?:[\d=]|(?-i:[a-z][A-Z])))))\S{8,}")
"""Not `a basic understanding`: what follows `basic` is base64."""
_PROSE = re.compile(r"(?i)token:\s+[a-z]{1,7}(?:\s|$)")  # `a token: the smallest piece`
# keys of W&B before 2025; also a commit of git, which a log can do without
_HEX = re.compile(r"\b[0-9a-f]{40}\b")
_COMMIT = re.compile(r"(?i)((?:commit|rev|revision|sha1?|hash|git|checkout)\W{1,3})[0-9a-f]{40}\b")
_KEY_NEAR = re.compile(
    r"(?i)(?=.*(?<![a-z])(?:wandb|w&b|api|key|login|token|secret|passw(?:or)?d)(?![a-z])).*\b(?-i:[0-9a-f]{40})\b"
)
"""A line that speaks of a key; 40 digits alone may be a commit."""


def redacted(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """`text` without what looks like a secret, or is the value of a variable of `environment` that
    is called one.
    """
    return _named_hidden(_marked_hidden(text, _values(environment)))


def redact_message(
    text: str, foreign: Iterable[str], environment: Mapping[str, str] = os.environ
) -> str:
    """Return a message of forerun without secrets.

    In forerun's own sentences a word before a value is not its name: "--text-key names another key"
    contains no key. So names count only in the parts that come from elsewhere.

    Args:
        text: The message.
        foreign: Texts from elsewhere that may be part of the message, such as those of its causes.
        environment: Variables whose values are secrets if their names say so.
    """
    for line in {line.strip() for part in foreign for line in part.splitlines()} - {""}:
        text = text.replace(line, redacted(line, environment))
    return _marked_hidden(text, _values(environment))


def _marked_hidden(text: str, values: re.Pattern[str] | None) -> str:
    """Hide secrets that are recognized by their own form."""
    if values:
        text = values.sub(INSTEAD, text)
    text = _KEYS.sub(INSTEAD, _IN_URL.sub(f"{INSTEAD}@", _PEM.sub(INSTEAD, text)))
    return _HEX.sub(INSTEAD, _BEARER.sub(rf"\1{INSTEAD}", text))


def _named_hidden(text: str) -> str:
    """Hide secrets that are recognized by the name before them."""
    return _ASSIGNED.sub(_assignment, _OPTION.sub(_option, _NAMED.sub(_line_end, text)))


_NAME = rb"[\w\x80-\xff-]{0,256}+"
_THEN_VALUE = _NAME + rb"(?:[\"']?[\s\x80-\xff]*+[=:]|[\s\x80-\xff])"
_NAME_CLUES = tuple(
    re.compile(word + _THEN_VALUE)
    for word in (
        b"pass",
        b"pwd",
        rb"token(?!s(?![a-z])|iz)",
        b"secret",
        b"key",
        b"auth",
        b"credential",
        b"pat",
    )
)
"""Patterns of names of secrets with a value after them: after `=`, `:`, or the white space behind
an option."""
_CLUES = tuple(
    re.compile(clue)
    for clue in (
        rb"://[^\s@]{0,770}+@",
        rb"bearer\s+\S",
        rb"basic\s+\S{8}",
        rb"sk[-_](?<![a-z0-9]sk.)[\w-]{8}",
        b"rk_(?:live|test)_",
        b"hf_[a-z0-9]{16}",
        rb"aiza[\w-]{20}",
        b"npm_[a-z0-9]{16}",
        rb"gh[oprsu]_[\w-]{12}",
        rb"pat[-_][\w-]{12}",
        rb"xox[a-z]-[\w-]{12}",
        rb"xapp-[\w-]{12}",
        rb"akia[\w-]{12}",
        rb"asia[\w-]{12}",
        b"wandb_v1_",
        b"pypi-age",
        rb"eyj[\w-]{8}",
    )
)
"""Patterns of other secrets, in lower case; each begins with a literal, which `re` finds at
gigabytes a second."""
_PEM_CLUE = b"-----begin "
_HEX_CLASS = bytes(ord("f") if chr(byte) in "0123456789abcdef" else ord(" ") for byte in range(256))
_HEX_CLUE = re.compile(b"f" * 40)
_NAME_BYTES = bytes(byte for byte in range(256) if re.match(rb"[\w\x80-\xff-]", bytes([byte])))
_MAX_PIECE_CHARS = 2**16
MAX_CLEANED_BYTES = 2**22
"""Maximum number of bytes of a block that `redacted` reads, which takes seconds; later lines with a
clue are hidden."""


class LineRedactor:
    """Redacts lines as they come; a PEM block may span many of them.

    The environment is read once.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._in_pem = False
        parts = _value_parts(_secret_values(environment))
        self._values = _values(environment)
        self._value_clues = tuple(re.compile(re.escape(_encode(part))) for part in parts)

    def __call__(self, text: str) -> str:
        """Return the next lines, one or many, without their secrets."""
        raw = _encode(text)
        if self._in_pem or _PEM_CLUE in raw.lower():
            return "\n".join(map(self._next_line, text.split("\n")))
        pieces, done, num_cleaned = list[bytes](), 0, 0
        for start, end in self._lines_with_clues(raw):
            num_cleaned += end - start
            clean = (
                INSTEAD.encode() if num_cleaned > MAX_CLEANED_BYTES else self._clean(raw[start:end])
            )
            pieces += [raw[done:start], clean]
            done = end
        return _decode(b"".join([*pieces, raw[done:]])) if pieces else text

    def _next_line(self, line: str) -> str:
        if self._in_pem:
            self._in_pem = _PEM_END.search(line) is None
            return INSTEAD
        begin = list(_PEM_BEGIN.finditer(line))
        self._in_pem = bool(begin) and _PEM_END.search(line, begin[-1].end()) is None
        return _named_hidden(_marked_hidden(line, self._values))

    def _clean(self, line: bytes) -> bytes:
        """Redact a line, in pieces if it is long, because a search blocks all other threads."""
        text = _decode(line)
        pieces = [text[at : at + _MAX_PIECE_CHARS] for at in range(0, len(text), _MAX_PIECE_CHARS)]
        return _encode(
            "".join(_named_hidden(_marked_hidden(piece, self._values)) for piece in pieces)
        )

    def _lines_with_clues(self, raw: bytes) -> list[tuple[int, int]]:
        """Return start and end of each line that may hold a secret."""
        lines: dict[int, int] = {}
        lower = raw.lower()
        for clue in _NAME_CLUES:
            lines.update(_lines_of(clue, lower, only_options=True))
        for clue in _CLUES:
            lines.update(_lines_of(clue, lower))
        for clue in self._value_clues:
            lines.update(_lines_of(clue, raw))
        lines.update(_lines_of(_HEX_CLUE, raw.translate(_HEX_CLASS), raw))
        return sorted(lines.items())


def _lines_of(
    clue: re.Pattern[bytes], text: bytes, lines: bytes | None = None, *, only_options: bool = False
) -> Iterator[tuple[int, int]]:
    """Yield start and end of each line in which a clue is found.

    Args:
        clue: Pattern to search.
        text: Text to search in.
        lines: Text of the same length that has the line ends; None if `text` has them.
        only_options: Whether a name before white space counts only if it begins with a dash.
    """
    lines, position = lines or text, 0
    while match := clue.search(text, position):
        position = match.end()
        if only_options and text[position - 1] not in b"=:" and not _is_option(text, match.start()):
            continue
        start = lines.rfind(b"\n", 0, match.start()) + 1
        end = lines.find(b"\n", match.start())
        position = len(text) if end < 0 else end
        yield start, position


def _is_option(text: bytes, place: int) -> bool:
    """Return whether the word around a place begins with a dash."""
    before = text[max(0, place - 256) : place]
    return before[len(before.rstrip(_NAME_BYTES)) :].startswith(b"-")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")


def _decode(text: bytes) -> str:
    return text.decode("utf-8", errors="surrogatepass")


def secret_in(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """What of a text that will be kept looks like a secret, in words and without it; empty where
    nothing does.

    All that `redacted` hides, but 40 hex digits only in a line that speaks of a key and does not
    call them a commit.
    """
    if (values := _values(environment)) and values.search(text):
        return "the value of an environment variable that is called a secret"
    text = _COMMIT.sub(r"\1commit", text)
    if any(_KEY_NEAR.match(line) for line in text.splitlines()):
        return "a key of 40 hex digits (write a commit of git as `commit` and its digits)"
    text = _HEX.sub("commit", text)
    return (
        "" if redacted(text, {}) == text else "a key, a password or a token, or an address with one"
    )


@functools.lru_cache(maxsize=4096)
def _called_secret(name: str) -> bool:
    """Whether a variable or an option of this name holds a secret."""
    if _ORDINARY_NAMES.match(name):
        return False
    return bool(_SECRET_WORDS & _words_of(name)) or name.upper().endswith(_SECRET_ENDS)


def _words_of(name: str) -> set[str]:
    return {word.upper() for word in _WORDS.findall(name)}


def _ordinary(value: str) -> bool:
    """Whether a value is a switch, a small number or a path: a path is no secret, though its file
    may hold one.
    """
    if _ORDINARY_VALUES.match(value):
        return True
    try:
        return ("/" in value or value.startswith("~")) and Path(value).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long for a name, a null byte, no such user
        return False


def _line_end(found: re.Match[str]) -> str:
    own = (
        _ORDINARY_NAMES.match(found["name"])
        or _TOKENIZERS_OWN.match(found["name"])
        or _PROSE.match(found[0])
    )
    return found[0] if own else _hidden(found)


def _option(found: re.Match[str]) -> str:
    own = _TOKENIZERS_OWN.match(found["name"])
    return found[0] if own or not _called_secret(found["name"]) else _hidden(found)


def _assignment(found: re.Match[str]) -> str:
    """`NAME=value`, `"name": "value"`. Names of one ordinary word count where they are a
    variable's: in capitals.
    """
    name = found["name"]
    words = _words_of(name)
    prose = (
        (len(words) == 1 and words <= _WEAK_WORDS and not name.isupper())
        or _TOKENIZERS_OWN.match(name)
        or _PROSE.match(found[0])
    )
    return found[0] if prose or not _called_secret(name) else _hidden(found)


def _hidden(found: re.Match[str]) -> str:
    """With another value, in the same quotes."""
    value, quote = found["value"], found["value"][0] if found["value"][0] in "\"'" else ""
    return (
        found[0]
        if _ordinary(value.strip(quote or None))
        else f"{found['is']}{quote}{INSTEAD}{quote}"
    )


def _values(environment: Mapping[str, str]) -> re.Pattern[str] | None:
    """What finds the values of the variables that are called secrets; None where there are none."""
    return _pattern(_secret_values(environment))


def _secret_values(environment: Mapping[str, str]) -> frozenset[str]:
    return frozenset(value for name, value in environment.items() if _called_secret(name))


@functools.lru_cache(maxsize=8)
def _value_parts(values: frozenset[str]) -> tuple[str, ...]:
    """The longest first: one may be part of another. Also as URLs, JSON and Python write them, and
    line by line.
    """
    found: set[str] = set()
    for value in values:
        if not _ordinary(value):
            quoted = {
                urllib.parse.quote(value, safe=""),
                json.dumps(value)[1:-1],
                repr(value)[1:-1],
            }
            found |= {value, *quoted} | {
                line for line in value.splitlines() if len(line) >= _WHOLE_WORD_CHARS
            }
    return tuple(
        value for value in sorted(found, key=len, reverse=True) if len(value) >= _LEAST_CHARS
    )


@functools.lru_cache(maxsize=8)
def _pattern(values: frozenset[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds one of these values; None without values."""
    parts = [
        re.escape(value) if len(value) >= _WHOLE_WORD_CHARS else rf"(?<!\w){re.escape(value)}(?!\w)"
        for value in _value_parts(values)
    ]
    return re.compile("|".join(parts)) if parts else None
