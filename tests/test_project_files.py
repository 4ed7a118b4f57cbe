"""Files about the project say the same version, and are well formed."""

import re
import tomllib
from pathlib import Path

import likewise

ROOT = Path(__file__).parent.parent


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert project["version"] == cited[1] == likewise.__version__


def test_changelog_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for part in text.split("\n## ")[1:]:
        entries = re.findall(r"^- .*$", part, re.MULTILINE)
        assert len(entries) == len(set(entries)), "an entry is there twice"
