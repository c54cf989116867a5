"""Files for other tools agree with the source: URLs, llms.txt, AGENTS.md, Dockerfile, workflows;
the recording.
"""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import recording
import yaml

ROOT = Path(__file__).parents[1]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_every_url_of_the_project_begins_with_that_of_its_repository():
    urls = DECLARED["urls"]
    assert [name for name, url in urls.items() if not url.startswith(urls["Repository"])] == []
    assert (
        yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["repository-code"]
        == urls["Repository"]
    )
    assert "[project.urls]" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def wrong_llms(text, docs):
    """Pages below docs that llms.txt does not list, and links that lead nowhere."""
    rows = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)(: \S.*)?$", text, re.M)
    linked, there = (
        [path for path, _ in rows],
        {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")},
    )
    return sorted(there ^ {*linked}) + sorted(
        {path for path, what in rows if not what or linked.count(path) > 1}
    )


def test_llms_txt_lists_every_page_once():
    text = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    assert re.match(r"# .+\n\n> .+\n", text), "llmstxt.org: a title, then a summary as a quote"
    assert wrong_llms(text, ROOT / "docs") == []
    assert wrong_llms(text.replace("](tutorial.md)", "](gone.md)"), ROOT / "docs") == [
        "gone.md",
        "tutorial.md",
    ]


def test_agents_md_is_short():
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) <= 60


def test_the_image_has_the_tested_torch_and_is_sent_what_it_copies():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (torch,) = re.findall(r"torch==[\d.]+", text)
    assert f"\n{torch}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for name in line.split()}
    assert {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    } == copied


def test_the_page_on_installation_has_the_oldest_versions():
    text = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")
    oldest = re.findall(r"^(\w+)==(\S+)$", (ROOT / "constraints-min.txt").read_text(), re.M)
    assert [name for name, version in oldest if f"| {name} | {version} " not in text] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_make_targets_and_actions_by_their_major_version(path):
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    targets = re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    steps = [step for job in jobs.values() for step in job["steps"]]
    called = [step["run"].split() for step in steps if "run" in step]
    assert called and all(
        words == [".ci/run"] or (words[0] == "make" and words[1] in targets) for words in called
    )
    assert all(
        re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step
    )


def test_a_workflow_runs_what_ci_runs_and_that_is_the_readme_s_test_command():
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    assert "- run: .ci/run\n" in workflow
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_recording_shows_commands_their_output_and_exit_codes(tmp_path):
    events = recording.record(["forerun status nowhere"], tmp_path)
    head, *rows = map(json.loads, recording.cast(events).splitlines())
    assert (head["version"], head["width"]) == (2, recording.COLUMNS)
    assert [seconds for seconds, _, _ in rows] == sorted(seconds for seconds, _, _ in rows)
    shown = recording.plain(events).splitlines()
    assert (
        shown[0] == "$ forerun status nowhere"
        and "nowhere" in shown[1]
        and shown[-2:] == ["$ echo $?", "2"]
    )
    assert str(tmp_path) not in "".join(shown)


def test_a_terminal_keeps_what_was_written_last_in_a_line(tmp_path):
    events, code = recording.run(
        [sys.executable, "-c", "print('10 %', end='\\r'); print('\\x1b[1mdone\\x1b[0m')"], tmp_path
    )
    assert (recording.plain(events), code) == ("done\n", 0)
