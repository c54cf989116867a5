"""What the pages tell a reader to type is there: verbs, options, plan keys, plans, make targets,
scripts, tests.
"""

import functools
import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path

import click
import pytest
from reference_pages.command_line import commands

from launcher.cli.names import Named
from launcher.plan.file import PlanError, load_plan
from launcher.plan.plan import Plan

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^( *)```.*?^\1```", re.M | re.S)
NOT_A_PLAN = "<!-- not a plan -->"
"""On the line before a block of TOML that is somebody else's."""
PLACE = re.compile(r"[<{\[]?[A-Z][A-Z0-9_./@:|=+,-]*[>}\]]?|.*\.\.\..*|.*[$*].*")
"""What stands for a value: FROZEN, STUDY/frozen/DIGEST, N."""
SECTIONS = {name: field.annotation for name, field in Plan.model_fields.items()}
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "AGENTS", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# made from the code: tests/test_docs.py
PAGES = [page for page in PAGES if page.parent.name != "reference"]


class Page:
    """A page's code: blocks by language (indented ones have none), and spans in its text."""

    def __init__(self, text):
        self.blocks, self.foreign = [], 0
        for block in FENCE.finditer(text):
            head, _, body = block[0].partition("\n")
            before = text[: block.start()].rstrip().rpartition("\n")[2].strip()
            if before == NOT_A_PLAN:
                self.foreign += 1
                continue
            body = "\n".join(line.removeprefix(block[1]) for line in body.splitlines()[:-1])
            self.blocks.append((head.strip().strip("`"), body))
        rest = FENCE.sub("", text)
        self.blocks += [
            ("", re.sub(r"^    ", "", block, flags=re.M))
            for block in re.findall(r"(?<=\n\n)((?:    .*(?:\n|$)|\n(?=    ))+)", rest)
        ]
        self.spans = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", rest)]

    def lines(self):
        """Lines of shell: those of blocks, whole again where they were broken, and whether they are
        whole commands.
        """
        for language, body in self.blocks:
            if language in ("", "sh", "bash", "shell", "console"):
                for line in re.sub(r"\\\n\s*", " ", body).splitlines():
                    yield line.strip().removeprefix("$ "), True
        for span in self.spans:
            yield span, False

    def called(self, program):
        """Words after each call of a program, up to a pipe or the like, and whether the command is
        whole.
        """
        for line, whole in self.lines():
            said = re.sub(r"(?<=\s)#.*", "", line)
            # [--mfu F | --price-usd U]
            said = re.sub(r"\[--[^\]]*\]", lambda choice: choice[0].replace("|", ""), said)
            for part in re.split(r"\s(?:\||&&|;|>>?|2>)\s|;\s|\$\(|`", said):
                found = re.match(rf"(?:[A-Z_]+=\S+ +)*(?:\S*/)?{program}(?: +(.*)|$)", part.strip())
                if found:
                    # else it is what a command printed
                    yield words_of(found[1] or ""), whole and "`" not in said


def words_of(text):
    # of $(...); of what may be left away
    text = re.sub(r"\[(--[^\]]*)\]", r"\1", re.sub(r"\)\"?\s*$", "", text))
    try:
        return shlex.split(text)
    except ValueError:  # a quote of the prose around it
        return text.split()


@functools.cache
def verbs():
    return commands()


def wrong_line(words, whole=True):
    """What click finds wrong in the words after `forerun`; nothing runs."""
    while words and words[0].startswith("-"):
        words = words[1:]
    if not words or PLACE.fullmatch(words[0]):
        return ""
    verb, *given = words
    if verb not in verbs():
        return f"no verb {verb!r}" if whole or given else ""
    context = click.Context(verbs()[verb], resilient_parsing=False)
    try:
        # an option named in a sentence, without its value
        if not whole and given and given[-1].startswith("-"):
            given = [*given, *["VALUE"] * needs_value(verbs()[verb], given[-1])]
        values, rest, _ = verbs()[verb].make_parser(context).parse_args([*given])
        if rest:
            return f"forerun {verb} takes no {rest[0]!r}"
        for param in verbs()[verb].params:
            for value in flat(values.get(param.name)):
                if (
                    isinstance(value, str)
                    and not PLACE.fullmatch(value)
                    and not isinstance(param.type, Named)
                ):
                    param.type.convert(value, param, context)
                    if param.name == "overrides" and (said := wrong_key(value.partition("=")[0])):
                        return said
            absent = param.name not in values or not isinstance(
                values[param.name], str | list | tuple
            )
            if whole and param.required and absent and verb != "completion":
                return f"forerun {verb} lacks {param.opts[0]}"
    except click.ClickException as error:
        return f"forerun {verb}: {error.format_message()}"
    return ""


def needs_value(command, name):
    return any(
        name in param.opts and not getattr(param, "is_flag", False) for param in command.params
    )


def flat(value):
    return (
        [inner for item in value for inner in flat(item)]
        if isinstance(value, list | tuple)
        else [value]
    )


def wrong_key(dotted):
    """Of `section.key`, or of less or more than that."""
    section, _, key = dotted.strip().partition(".")
    if section not in SECTIONS:
        return f"no section {section!r}"
    name = key.split(".")[0].split(" ")[0]
    known = SECTIONS[section].model_fields
    return (
        ""
        if not name or name in known or PLACE.fullmatch(name)
        else f"[{section}] has no key {name!r}"
    )


def wrong_plan(text, folder):
    """A block of TOML as a plan: what is wrong with it."""
    path = folder / "plan.toml"
    path.write_text(text, encoding="utf-8")
    try:
        load_plan(path)
    except PlanError as error:
        return "; ".join(error.problems)
    return ""


def wrong_span(span):
    """Plan keys that a sentence names: `proxy.num_slots`, `[proxy] num_slots = 4`, `[transfer]`."""
    if dotted := re.match(r"([a-z]+)\.([a-z_]+)(?:\.[a-z_]+)?(?: = .*)?$", span):
        known = dotted[1] in SECTIONS and dotted[2] not in ("json", "py", "md", "parquet", "toml")
        return wrong_key(f"{dotted[1]}.{dotted[2]}") if known else ""
    if head := re.match(r"\[([a-z]+)\](?: (.*))?$", span):
        text = head[2] or ""
        if re.match(r"\w+ = \S", text) and "..." not in text:
            try:
                keys = [*tomllib.loads(text)]
            except tomllib.TOMLDecodeError as error:
                return f"no TOML: {error}"
        else:
            keys = re.findall(r"[a-z_]+\b(?= =|,|$)", text)
        return next(filter(None, (wrong_key(f"{head[1]}.{key}") for key in keys or [""])), "")
    return ""


def wrong_script(words):
    """A call of Python: the script is there and knows its options."""
    if (
        not words
        or not words[0].endswith(".py")
        or "/" not in words[0]
        or PLACE.fullmatch(words[0])
    ):
        return ""
    path = ROOT / words[0]
    if not words[0].startswith(("benchmarks/", "examples/", "tests/", "docs/")):
        return ""  # a reader's own
    if not path.is_file():
        return f"no script {words[0]}"
    known = set(re.findall(r"[\"'](--?[a-z][\w-]*)[\"']", path.read_text(encoding="utf-8")))
    wrong = [
        word
        for word in words[1:]
        if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known
    ]
    return f"{words[0]} has no {', '.join(wrong)}" if wrong else ""


def wrong_test(words):
    """A call of pytest: its paths are there, a test has each word of -k, a mark each of -m."""
    paths = [word for word in words if re.match(r"tests\b", word) and not PLACE.fullmatch(word)]
    gone = [word for word in paths if not [*ROOT.glob(word.partition("::")[0])]]
    if gone:
        return f"no tests at {', '.join(gone)}"
    sources = [
        file for word in paths or ["tests"] for file in files_of(ROOT / word.partition("::")[0])
    ]
    text = "".join(file.read_text(encoding="utf-8") + file.name for file in sources)
    named = [name for word in paths for name in word.split("::")[1:]]
    options = dict(pairwise(words))
    named += re.findall(r"\b(?!and\b|or\b|not\b)\w+", options.get("-k", ""))
    marks = re.findall(r"\b(?!and\b|or\b|not\b)\w+", options.get("-m", ""))
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"][
        "ini_options"
    ]["markers"]
    known = {mark.partition(":")[0] for mark in declared}
    wrong = [name for name in named if name.partition("[")[0] not in text] + [
        mark for mark in marks if mark not in known
    ]
    return f"no test or mark {', '.join(wrong)}" if wrong else ""


def files_of(path):
    return [*path.rglob("*.py")] if path.is_dir() else [path]


@functools.cache
def targets():
    made = re.findall(
        r"^([\w %/.{}$()-]+?):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M
    )
    return {target for line in made for target in line.split()}


def wrong_make(words, whole):
    """A call of make, where the words are targets and variables: prose has `make` too."""
    plain = [
        word
        for word in words
        if "=" not in word and not PLACE.fullmatch(word) and not word.startswith("-")
    ]
    wrong = [word for word in plain if word not in targets() and re.fullmatch(r"[a-z-]+", word)]
    return f"no make target {', '.join(wrong)}" if wrong else ""


def wrong_path(span):
    """A file of ours that a sentence names."""
    path = re.fullmatch(
        r"((?:benchmarks|tests|docs|examples|trainers|proxies|sweeps|transfer|scaling_fits|launcher)/[\w./-]+)",
        span,
    )
    if path is None or path[1].startswith("benchmarks/data") or re.search(r"/[A-Z]+\.", path[1]):
        return ""
    return "" if (ROOT / path[1]).exists() else f"no file {span}"


def wrong(text, folder):
    """Everything that is wrong on a page."""
    page, found = Page(text), []
    found += [wrong_line(words, whole) for words, whole in page.called("forerun")]
    set_in_prose = {
        key for key in re.findall(r"--set[ =\n]+([a-z]+\.[a-z_]+)", text) if key != "section.key"
    }
    found += [wrong_key(key) for key in sorted(set_in_prose)] if not any(found) else []
    found += [wrong_plan(body, folder) for language, body in page.blocks if language == "toml"]
    found += [wrong_span(span) or wrong_path(span) for span in page.spans]
    found += [wrong_script(words) for words, _ in page.called("python3?")]
    found += [wrong_test(words) for words, _ in page.called("pytest")]
    found += [wrong_make(words, whole) for words, whole in page.called("make")]
    return [problem for problem in found if problem]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_tells_to_type_is_there(page, tmp_path):
    assert wrong(page.read_text(encoding="utf-8"), tmp_path) == []


PLANTED = [
    ("```\nforerun run plan.toml --no-such 4\n```", "--no-such"),
    ("```\nforerun rnu plan.toml\n```", "no verb 'rnu'"),
    ("text\n\n    $ forerun flops --layers many\n", "not a valid integer"),
    ("```\nforerun export study/frozen/DIGEST\n```", "lacks --to"),
    ("```\nforerun transfer --axis height\n```", "--axis"),
    ("```\nforerun validate plan.toml other.toml\n```", "takes no 'other.toml'"),
    (
        "```\nforerun run plan.toml \\\n    --set proxy.num_slot=4\n```",
        "[proxy] has no key 'num_slot'",
    ),
    ("`forerun status --runz FILE` is", "--runz"),
    ("```toml\n[proxy]\nbase_witdh = 64\n```", "base_witdh"),
    ("```toml\n[proxy]\nbase_width = 65\n```", "65"),
    ("so `[proxy] num_slot = 4` asks", "num_slot"),
    ("(`--set proxy.num_slot=4`)", "[proxy] has no key 'num_slot'"),
    ("so `ladder.seeds` asks", "[ladder] has no key 'seeds'"),
    ("```\nmake tset\n```", "no make target tset"),
    ("```\npython benchmarks/statistics/bend.py --qick\n```", "--qick"),
    ("```\npython benchmarks/bned.py\n```", "no script"),
    ("```\npytest tests/sweeps/test_gone.py\n```", "no tests at"),
    ("```\npytest tests/sweeps -k no_such_thing\n```", "no_such_thing"),
    ("```\npytest -m slwo\n```", "slwo"),
    ("in `launcher/gone.py`", "no file"),
]


@pytest.mark.parametrize(("text", "said"), PLANTED)
def test_a_planted_fault_is_found(tmp_path, text, said):
    (problem,) = wrong(f"# A page\n\n{text}\n", tmp_path)
    assert said in problem


def test_what_is_right_or_somebody_elses_is_let_through(tmp_path):
    text = f"""
```
A=1 forerun run plan.toml --set cluster.max_usd=50 | tee log   # a comment
forerun fit RUNS.csv --form chinchilla && forerun status
```
{NOT_A_PLAN}
```toml
[tool.other]
x = 1
```
`forerun export FROZEN --to torchtitan`, `make trainers TRAINERS=torchtitan`, `launch.json`, `[transfer]`
"""  # noqa: E501
    assert wrong(text, tmp_path) == []
    assert Page(text).foreign == 1
