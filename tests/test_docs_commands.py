"""Tests of the code in the documentation: the commands and names on its pages exist.

They check the verbs of `forerun` (its subcommands) and their options, plans and their keys, make
targets, scripts, tests, and file names.
"""

import functools
import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path

import click
import pytest
from reference_pages.commands_and_exit_codes import load_commands

from forerun._launcher.cli.names import NameParameter
from forerun._launcher.study.plan.file import PlanError, load_plan
from forerun._launcher.study.plan.plan import Plan

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^( *)```.*?^\1```", re.M | re.S)
NOT_A_PLAN = "<!-- not a plan -->"
"""Mark on the line before a TOML block that is not a plan."""
PLACEHOLDER = re.compile(r"[<{\[]?[A-Z][A-Z0-9_./@:|=+,-]*[>}\]]?|.*\.\.\..*|.*[$*].*")
"""Word that stands for a value, such as FROZEN, STUDY/frozen/DIGEST, or N."""
SECTIONS = {name: field.annotation for name, field in Plan.model_fields.items()}
"""Class of each section of a plan, by its name."""
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "AGENTS", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# The pages of the reference are generated from the code; tests/test_docs.py checks them.
PAGES = [page for page in PAGES if page.parent.name != "reference"]


class Page:
    """The code of a page: blocks with their language, and code spans in the prose.

    An indented block has no language. `num_foreign` counts the blocks marked as no plan.
    """

    def __init__(self, text):
        self.blocks, self.num_foreign = [], 0
        for block in FENCE.finditer(text):
            head, _, body = block[0].partition("\n")
            line_before = text[: block.start()].rstrip().rpartition("\n")[2].strip()
            if line_before == NOT_A_PLAN:
                self.num_foreign += 1
                continue
            body = "\n".join(line.removeprefix(block[1]) for line in body.splitlines()[:-1])
            self.blocks.append((head.strip().strip("`"), body))
        prose = FENCE.sub("", text)
        for block in re.findall(r"(?<=\n\n)((?:    .*(?:\n|$)|\n(?=    ))+)", prose):
            self.blocks.append(("", re.sub(r"^    ", "", block, flags=re.M)))
        self.spans = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]

    def list_shell_lines(self):
        """Yield the lines of shell code, and whether each must be a complete command."""
        for language, body in self.blocks:
            if language in ("", "sh", "bash", "shell", "console"):
                for line in re.sub(r"\\\n\s*", " ", body).splitlines():
                    yield line.strip().removeprefix("$ "), True
        for span in self.spans:
            yield span, False

    def find_calls(self, program):
        """Yield the words after each call of a program, and whether the command is complete."""
        for line, is_block in self.list_shell_lines():
            text = re.sub(r"(?<=\s)#.*", "", line)
            # The bar in a choice of options is not a pipe: [--mfu F | --price-usd U]
            text = re.sub(r"\[--[^\]]*\]", lambda choice: choice[0].replace("|", ""), text)
            for part in re.split(r"\s(?:\||&&|;|>>?|2>)\s|;\s|\$\(|`", text):
                call = re.match(rf"(?:[A-Z_]+=\S+ +)*(?:\S*/)?{program}(?: +(.*)|$)", part.strip())
                if call:
                    # A line with backquotes is a printed message, whose command may be shortened.
                    yield split_words(call[1] or ""), is_block and "`" not in text


def split_words(text):
    """Split a command into words, without the brackets of $(...) and of optional options."""
    text = re.sub(r"\[(--[^\]]*)\]", r"\1", re.sub(r"\)\"?\s*$", "", text))
    try:
        return shlex.split(text)
    except ValueError:  # a quotation mark of the surrounding prose
        return text.split()


@functools.cache
def load_verbs():
    """Return the click command of each verb."""
    return load_commands()


def check_forerun_call(words, is_complete=True):
    """Return what click finds wrong in the words after `forerun`, or "" if they are right."""
    while words and words[0].startswith("-"):
        words = words[1:]
    if not words or PLACEHOLDER.fullmatch(words[0]):
        return ""
    verb, *arguments = words
    if verb not in load_verbs():
        return f"no verb {verb!r}" if is_complete or arguments else ""
    command = load_verbs()[verb]
    # Prose may name an option without its value.
    if not is_complete and arguments and needs_value(command, arguments[-1]):
        arguments = [*arguments, "VALUE"]
    try:
        return check_arguments(verb, command, arguments, is_complete)
    except click.ClickException as error:
        return f"forerun {verb}: {error.format_message()}"


def check_arguments(verb, command, arguments, is_complete):
    """Return what is wrong in a verb's arguments, or ""; click's errors are raised."""
    context = click.Context(command, resilient_parsing=False)
    values, extra_words, _ = command.make_parser(context).parse_args([*arguments])
    if extra_words:
        return f"forerun {verb} takes no {extra_words[0]!r}"
    for param in command.params:
        for value in flatten(values.get(param.name)):
            is_checked = isinstance(value, str) and not isinstance(param.type, NameParameter)
            if is_checked and not PLACEHOLDER.fullmatch(value):
                param.type.convert(value, param, context)
                if param.name == "overrides":
                    problem = check_key(value.partition("=")[0])
                    if problem:
                        return problem
        is_absent = not isinstance(values.get(param.name), str | list | tuple)
        if is_complete and param.required and is_absent and verb != "completion":
            return f"forerun {verb} lacks {param.opts[0]}"
    return ""


def needs_value(command, name):
    """Return whether a word is an option of the command that takes a value."""
    return name.startswith("-") and any(
        name in param.opts and not getattr(param, "is_flag", False) for param in command.params
    )


def flatten(value):
    """Return the values in nested lists and tuples."""
    if not isinstance(value, list | tuple):
        return [value]
    return [inner for item in value for inner in flatten(item)]


def check_key(dotted):
    """Return what is wrong in a plan key `section.key`, or in a section or a nested key."""
    section, _, key = dotted.strip().partition(".")
    if section not in SECTIONS:
        return f"no section {section!r}"
    name = key.split(".")[0].split(" ")[0]
    if not name or name in SECTIONS[section].model_fields or PLACEHOLDER.fullmatch(name):
        return ""
    return f"[{section}] has no key {name!r}"


def check_plan(text, folder):
    """Return the problems of a TOML block as a plan, or "" if there are none."""
    path = folder / "plan.toml"
    path.write_text(text, encoding="utf-8")
    try:
        load_plan(path)
    except PlanError as error:
        return "; ".join(error.problems)
    return ""


def check_span(span):
    """Return what is wrong in the plan keys of a code span, or "".

    A span may be `proxy.num_slots`, `[proxy] num_slots = 4`, or `[transfer]`.
    """
    dotted = re.match(r"([a-z]+)\.([a-z_]+)(?:\.[a-z_]+)?(?: = .*)?$", span)
    if dotted:
        is_file = dotted[2] in ("json", "py", "md", "parquet", "toml")
        is_key = dotted[1] in SECTIONS and not is_file
        return check_key(f"{dotted[1]}.{dotted[2]}") if is_key else ""
    head = re.match(r"\[([a-z]+)\](?: (.*))?$", span)
    if not head:
        return ""
    text = head[2] or ""
    if re.match(r"\w+ = \S", text) and "..." not in text:
        try:
            keys = list(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            return f"no TOML: {error}"
    else:
        keys = re.findall(r"[a-z_]+\b(?= =|,|$)", text)
    problems = [check_key(f"{head[1]}.{key}") for key in keys or [""]]
    return next(filter(None, problems), "")


def check_script_call(words):
    """Return what is wrong in a call of Python, or "": a missing script or an unknown option."""
    if not words or not words[0].endswith(".py") or PLACEHOLDER.fullmatch(words[0]):
        return ""
    script, *arguments = words
    if not script.startswith(("benchmarks/", "examples/", "tests/", "docs/")):
        return ""  # the reader's own script
    path = ROOT / script
    if not path.is_file():
        return f"no script {script}"
    text = path.read_text(encoding="utf-8")
    options = set(re.findall(r"[\"'](--?[a-z][\w-]*)[\"']", text))
    if "make_parser(" in text:  # benchmarks/result_files.py adds these options
        options |= {"--json", "--quick"} if "quick=" in text else {"--json"}
    unknown = [
        word
        for word in arguments
        if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in options
    ]
    return f"{script} has no {', '.join(unknown)}" if unknown else ""


def check_pytest_call(words):
    """Return what is wrong in a call of pytest, or "": a missing path, test, or mark."""
    paths = [
        word for word in words if re.match(r"tests\b", word) and not PLACEHOLDER.fullmatch(word)
    ]
    missing = [word for word in paths if not [*ROOT.glob(word.partition("::")[0])]]
    if missing:
        return f"no tests at {', '.join(missing)}"
    text = ""
    for word in paths or ["tests"]:
        for file in list_python_files(ROOT / word.partition("::")[0]):
            text += file.read_text(encoding="utf-8") + file.name

    # Names after :: and in -k, and marks in -m.
    names = [name for word in paths for name in word.split("::")[1:]]
    options = dict(pairwise(words))
    names += re.findall(r"\b(?!and\b|or\b|not\b)\w+", options.get("-k", ""))
    marks = re.findall(r"\b(?!and\b|or\b|not\b)\w+", options.get("-m", ""))
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = pyproject["tool"]["pytest"]["ini_options"]["markers"]
    known_marks = {mark.partition(":")[0] for mark in declared}
    unknown = [name for name in names if name.partition("[")[0] not in text]
    unknown += [mark for mark in marks if mark not in known_marks]
    return f"no test or mark {', '.join(unknown)}" if unknown else ""


def list_python_files(path):
    """Return a file, or the Python files below a folder."""
    return [*path.rglob("*.py")] if path.is_dir() else [path]


@functools.cache
def read_make_targets():
    """Return the targets of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lines = re.findall(r"^([\w %/.{}$()-]+?):(?!=)", makefile, re.M)
    return {target for line in lines for target in line.split()}


def check_make_call(words):
    """Return the unknown targets in a call of make, or ""."""
    targets = [
        word
        for word in words
        if "=" not in word and not PLACEHOLDER.fullmatch(word) and not word.startswith("-")
    ]
    unknown = [
        target
        for target in targets
        if target not in read_make_targets() and re.fullmatch(r"[a-z-]+", target)
    ]
    return f"no make target {', '.join(unknown)}" if unknown else ""


def check_path(span):
    """Return the problem of a code span that names a missing file of the repository, or ""."""
    path = re.fullmatch(
        r"((?:benchmarks|tests|docs|examples|trainers|proxies|sweeps|transfer|scaling_fits|launcher)/[\w./-]+)",
        span,
    )
    if path is None or path[1].startswith("benchmarks/data") or re.search(r"/[A-Z]+\.", path[1]):
        return ""
    return "" if (ROOT / path[1]).exists() else f"no file {span}"


def find_problems(text, folder):
    """Return every problem of a page's code; the folder is for the plans on the page."""
    page = Page(text)
    problems = [
        check_forerun_call(words, is_complete) for words, is_complete in page.find_calls("forerun")
    ]
    # Check the keys after --set. A wrong key in a complete call has been reported already.
    if not any(problems):
        keys = set(re.findall(r"--set[ =\n]+([a-z]+\.[a-z_]+)", text)) - {"section.key"}
        problems += [check_key(key) for key in sorted(keys)]
    problems += [check_plan(body, folder) for language, body in page.blocks if language == "toml"]
    problems += [check_span(span) or check_path(span) for span in page.spans]
    problems += [check_script_call(words) for words, _ in page.find_calls("python3?")]
    problems += [check_pytest_call(words) for words, _ in page.find_calls("pytest")]
    problems += [check_make_call(words) for words, _ in page.find_calls("make")]
    return [problem for problem in problems if problem]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_on_a_page_is_right(page, tmp_path):
    assert find_problems(page.read_text(encoding="utf-8"), tmp_path) == []


PLANTED_FAULTS = [
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
"""Code of a page with a fault, and a part of the problem that must be reported."""


@pytest.mark.parametrize(("text", "phrase"), PLANTED_FAULTS)
def test_planted_fault_is_found(tmp_path, text, phrase):
    (problem,) = find_problems(f"# A page\n\n{text}\n", tmp_path)
    assert phrase in problem


def test_correct_and_foreign_code_has_no_problem(tmp_path):
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
    assert find_problems(text, tmp_path) == []
    assert Page(text).num_foreign == 1
