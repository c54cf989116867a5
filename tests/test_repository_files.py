"""Tests of the repository's files that other programs and services read.

These are the project's URLs and citation, docs/llms.txt, AGENTS.md, the Dockerfile, and the
workflows of CI. The tests hold them, and the pages of the root, in step with the files, versions
and commands that they name.
"""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from source_tree import PACKAGES

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_every_url_of_the_project_is_in_its_repository():
    urls = PROJECT["urls"]
    assert [name for name, url in urls.items() if not url.startswith(urls["Repository"])] == []
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["repository-code"] == urls["Repository"]
    # SECURITY.md names no URL of its own; it points to those of pyproject.toml.
    assert "[project.urls]" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def find_llms_problems(text, docs):
    """Return the problems of llms.txt as paths of pages.

    A path is a problem if the page is not listed, is listed twice or without a description, or if
    there is no such page.
    """
    rows = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)(: \S.*)?$", text, re.M)
    linked = [path for path, _ in rows]
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    badly_listed = {path for path, description in rows if not description or linked.count(path) > 1}
    return sorted(pages ^ set(linked)) + sorted(badly_listed)


def test_llms_txt_lists_every_page_once():
    text = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    assert re.match(r"# .+\n\n> .+\n", text), "llmstxt.org: a title, then a summary as a quote"
    assert find_llms_problems(text, ROOT / "docs") == []
    # A link to a page that is gone, in place of a link to a page that exists
    planted = text.replace("](tutorial.md)", "](gone.md)")
    assert find_llms_problems(planted, ROOT / "docs") == ["gone.md", "tutorial.md"]


def test_agents_md_is_short():
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) <= 60


def test_docker_image_has_the_tested_torch_and_gets_the_files_it_copies():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (torch,) = re.findall(r"torch==[\d.]+", text)
    assert f"\n{torch}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for name in line.split()}
    # .dockerignore leaves out all files but those after an exclamation mark.
    ignore_lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in ignore_lines if line.startswith("!")} == copied


def test_installation_page_has_the_oldest_versions():
    text = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")
    oldest = re.findall(r"^(\w+)==(\S+)$", (ROOT / "constraints-min.txt").read_text(), re.M)
    assert oldest
    assert [name for name, version in oldest if f"| {name} | {version} " not in text] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_calls_make_targets_and_pins_actions_by_major_version(path):
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    targets = re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    steps = [step for job in jobs.values() for step in job["steps"]]
    commands = [step["run"].split() for step in steps if "run" in step]
    assert commands
    for words in commands:
        assert words == [".ci/run"] or (words[0] == "make" and words[1] in targets), words
    for step in steps:
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]), step


def test_workflow_ci_and_readme_run_the_same_test_command():
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    assert "- run: .ci/run\n" in workflow
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_citation_matches_the_version_and_the_papers_in_the_source():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert citation["message"] and citation["title"] and citation["authors"] == PROJECT["authors"]
    text = "".join(
        path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    )
    for paper in citation["references"]:
        assert paper["title"] and paper["authors"]
        assert f"arXiv {paper['url'].rpartition('/')[2]}" in text, paper["title"]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_files_and_make_targets_that_a_page_names_exist(page):
    text = (ROOT / page).read_text()
    paths = re.findall(r"`([\w.-]+(?:/[\w.-]+)*/?)`", text) + re.findall(r"\]\(([\w./-]+)\)", text)
    paths = [
        path for path in paths if "/" in path or path.endswith((".py", ".md", ".toml", ".txt"))
    ]
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []
    target_lines = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for line in target_lines for target in line.split()}
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
