"""Tests of the documentation: links and anchors resolve, and the navigation has every page."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from reference_pages.writing import PAGES
from site_hook import LINK, PAGES_ABOVE_DOCS, PICTURE, make_anchor

ROOT = Path(__file__).parents[1]
ROOT_PAGES = (
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
)
FENCE = re.compile(r"^( *)```.*?^\1```", re.M | re.S)


def list_pages(root):
    """Return the documentation's pages."""
    return [
        *(root / name for name in ROOT_PAGES if (root / name).exists()),
        *sorted((root / "docs").rglob("*.md")),
    ]


def list_anchors(page):
    """Return a page's anchors as GitHub creates them: a repeated heading gets a number."""
    anchors = []
    for title in re.findall(r"^#+ (.+?)#*$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M):
        anchor = make_anchor(LINK.sub(r"\1", title))
        anchors.append(f"{anchor}-{anchors.count(anchor)}" if anchor in anchors else anchor)
    return set(anchors)


def find_dead_links(root):
    """Return the relative links without a file, and the anchors without a heading."""
    problems = []
    for page in list_pages(root):
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        pictures = [(words, path, "") for words, path in PICTURE.findall(text)]
        for _, path, anchor in LINK.findall(text) + pictures:
            if re.match(r"[a-z]+:", path):
                continue
            target = page.parent / path if path else page
            name = f"{page.relative_to(root)}: {path}{anchor}"
            if path.startswith("/") or not target.exists():
                problems.append(f"{name}: there is no such file")
            elif anchor and anchor[1:] not in list_anchors(target):
                problems.append(f"{name}: no such heading")
    return problems


def list_nav_pages(entry):
    """Return the pages in a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [page for child in children for page in list_nav_pages(child)]


def find_nav_problems(root):
    """Return the pages that are not in the navigation, and its missing and repeated pages."""
    nav = list_nav_pages(yaml.safe_load((root / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    docs = root / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    pages.update(PAGES_ABOVE_DOCS.values())
    problems = [f"{page} is not in mkdocs.yml's nav" for page in sorted(pages - set(nav))]
    for page in sorted(set(nav)):
        if page not in pages:
            problems.append(f"mkdocs.yml's nav has {page}: there is no such page")
        elif nav.count(page) > 1:
            problems.append(f"mkdocs.yml's nav has {page} twice")
    return problems


def test_every_link_and_anchor_resolves():
    assert find_dead_links(ROOT) == []
    # The search finds links at all.
    assert sum(len(LINK.findall(page.read_text())) for page in list_pages(ROOT)) > 100


def test_every_page_is_in_the_navigation():
    assert find_nav_problems(ROOT) == []


@pytest.mark.parametrize("name", PAGES)
def test_reference_page_is_generated_from_the_code(name):
    path = ROOT / "docs" / "reference" / name
    assert path.exists() and path.read_text(encoding="utf-8") == PAGES[name](), (
        "run `make reference`"
    )


PAGE = "# A page\n\n## One more `--thing`\n\n"
"""Text of each page in a small tree of documentation."""
PLANTED_FAULTS = [
    ("[x](gone.md)", find_dead_links, "docs/a.md: gone.md: there is no such file"),
    ("[x](#no-such)", find_dead_links, "docs/a.md: #no-such: no such heading"),
    ("[x](b.md#a-pages)", find_dead_links, "docs/a.md: b.md#a-pages: no such heading"),
    ("[x](../README.md#gone)", find_dead_links, "docs/a.md: ../README.md#gone: no such heading"),
    ("", find_nav_problems, "c.md is not in mkdocs.yml's nav"),
]
"""Faulty link, function that must find the fault, and the problem that it must report.

Without a link, the fault is a page that the navigation lacks.
"""


@pytest.mark.parametrize(("text", "rule", "problem"), PLANTED_FAULTS)
def test_planted_fault_is_found(tmp_path, text, rule, problem):
    # Without the fault, no problem is found.
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/a.md", "docs/b.md", "docs/c.md"):
        link = "[x](b.md#one-more---thing)\n" if name == "docs/a.md" else ""
        (tmp_path / name).write_text(PAGE + link)
    nav = "nav: [{x: a.md}, {y: [b.md, {z: c.md}]}, " + ", ".join(PAGES_ABOVE_DOCS.values()) + "]\n"
    (tmp_path / "mkdocs.yml").write_text(nav)
    assert find_dead_links(tmp_path) == [] and find_nav_problems(tmp_path) == []

    # Plant the fault, in the page or in the navigation.
    (tmp_path / "docs" / "a.md").write_text(PAGE + text)
    if rule is find_nav_problems:
        (tmp_path / "mkdocs.yml").write_text(nav.replace(", {z: c.md}", ""))
    assert rule(tmp_path) == [problem]


@pytest.mark.skipif(
    importlib.util.find_spec("material") is None,
    reason="mkdocs-material: pip install 'forerun[docs]'",
)
def test_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    """Build the site as `make docs` does; scripts, images, and styles must be part of it."""
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    pages = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert tmp_path / "index.html" in pages and tmp_path / "reference" / "cli.html" in pages
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\"(?:https?:)?//|<link[^>]+href=\"(?:https?:)?//[^>]*stylesheet"
    )
    assert [path.name for path, text in pages.items() if loads.search(text)] == []
    # The Mermaid library would be loaded from a content delivery network.
    assert not any('class="mermaid"' in text for text in pages.values())
    outside = re.compile(r"@import|url\([\"']?(?:https?:)?//")
    assert [path.name for path in tmp_path.rglob("*.css") if outside.search(path.read_text())] == []


def test_changelog_is_short_and_has_one_section_until_the_first_release():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert headings == ["0.1.0 (unreleased)"]
    assert len(text.split()) <= 700
