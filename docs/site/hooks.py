"""MkDocs hooks: files outside `docs/` become pages, links between files of the repository become links of the site.

Pages are written so that their links work in the repository. Here README, CONTRIBUTING, CHANGELOG, the benchmarks' own
page and the examples join the site under the addresses of `PAGES`, and every relative link is looked up as a path of
the repository. A link to a file that is not on the site stays as it is, and the strict build refuses it. After the
build, every public name must have an entry with an example.
"""

import base64
import json
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "docs/index.md": "howto/index-of-a-data-set.md",  # the site's own index is the README
    "CONTRIBUTING.md": "develop/contributing.md",
    "CODE_OF_CONDUCT.md": "develop/conduct.md",
    "SECURITY.md": "develop/security.md",
    "CHANGELOG.md": "develop/changelog.md",
    "benchmarks/README.md": "evidence/benchmarks.md",
}
MODULES = (  # whose public names the reference shows
    "likewise",
    "likewise.losses",
    "likewise.figures",
    "likewise.losses.directions",
    "likewise.integrations.sklearn",
    "likewise.integrations.samplers",
)
SOURCES = "examples/**/*.py"
NOTEBOOKS = "notebooks/*.ipynb"
IMAGES = ("experiments/results/**/*.png", "experiments/results/**/*.jpg")
FOLDERS = ("examples", "examples/analyze", "docs/decisions")
UNLISTED = "How-to"  # the section of pages of docs/ that the navigation does not name
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the decisions, and pages that the navigation does not name."""
    named = set(_addresses(config.nav))
    sections = {title: entries for section in config.nav for title, entries in section.items()}
    sections["Develop"].append({"Decisions": _pages("decisions/*.md")})
    sections[UNLISTED] += [page for page in [*_pages("*.md"), *_pages("howto/*.md")] if page not in named]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of `docs/`, and pages that list the examples and the decisions."""
    for path, address in PAGES.items():
        if (ROOT / path).is_file():
            _replace(files, File.generated(config, address, content=(ROOT / path).read_text()), path)
    for path in ROOT.glob(SOURCES):
        name = path.relative_to(ROOT).as_posix()
        content = f"# {name}\n\n```python\n{path.read_text()}```\n"
        files.append(File.generated(config, _address(name), content=content))
    for path in sorted(ROOT.glob(NOTEBOOKS)):
        for name, content in notebook_files(path).items():
            files.append(File.generated(config, name, content=content))
    for pattern in IMAGES:
        for path in ROOT.glob(pattern):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for folder in FOLDERS:
        files.append(File.generated(config, _address(folder), content=_listing(ROOT / folder)))
    return files


def notebook_files(path: Path) -> dict[str, str | bytes]:
    """The page of a notebook with its stored outputs, its pictures, and the notebook itself, by address."""
    text, found = [], dict[str, str | bytes]()
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text.append(source)
            continue
        text.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data: dict[str, Any] = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{len(found)}.png"
                found[f"tutorials/{name}"] = base64.b64decode("".join(data["image/png"]))
                text.append(f"![the picture that this cell draws]({name})")
            else:
                shown = "".join(output.get("text") or data["text/plain"]).rstrip()
                text.append(f"```text\n{shown}\n```")
    text.append(f'<a href="{path.name}" download>Download this notebook</a>')
    found[_address(path.relative_to(ROOT).as_posix())] = "\n\n".join(text) + "\n"
    found[f"tutorials/{path.name}"] = path.read_text()
    return found


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links of the site."""
    here = page.file.src_uri
    origins = {address: path for path, address in PAGES.items()}
    folder = posixpath.dirname(origins.get(here, _origin(here)))

    def link(match: re.Match[str]) -> str:
        target = _address(posixpath.normpath(posixpath.join(folder, match[1])))
        if files.get_file_from_path(target) is None:
            return match[0]
        return posixpath.relpath(target, posixpath.dirname(here) or ".") + (match[2] or "")

    return LINK.sub(link, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site on which a public name has no entry, or one without an example."""
    missing = missing_entries(Path(config.site_dir))
    if missing:
        raise PluginError(
            f"{len(missing)} public names lack an entry with an example: {', '.join(missing)}. Add `::: NAME` to "
            "a page of docs/reference/, and a section `Example:` to the docstring."
        )


def missing_entries(site: Path) -> list[str]:
    """Public names that no page of the reference shows with an example."""
    pages = [page.read_text() for page in sorted((site / "reference").glob("*.html"))]
    return [name for name in public_names() if not any(_shows(page, name) for page in pages)]


def public_names() -> list[str]:
    """Names in `__all__` of the modules below, modules left out."""
    package = griffe.load("likewise", search_paths=[str(ROOT / "src")])
    names = []
    for module in MODULES:
        members = package if module == "likewise" else package[module.removeprefix("likewise.")]
        listed = members.exports or [name for name, member in members.functions.items() if name[0] != "_"]
        names += [path for path in (_path(members[name], f"{module}.{name}") for name in listed) if path]
    return names


def _path(member: griffe.Object | griffe.Alias, path: str) -> str | None:
    """The name under which the reference has a member: a function in a module of its name is found there alone."""
    if not member.is_module:
        return path
    name = path.rpartition(".")[2]
    return f"{member.canonical_path}.{name}" if name in member.members else None


def _shows(page: str, name: str) -> bool:
    """Whether a page has an entry of this name with an example, which ends where the next entry starts."""
    start = page.find(f'id="{name}"')
    end = page.find('<div class="doc doc-object doc-', page.find("doc-contents", start))
    return start >= 0 and "&gt;&gt;&gt;" in page[start : end if end > 0 else None]


def _pages(pattern: str) -> list[str]:
    paths = sorted((ROOT / "docs").glob(pattern))
    return [_address(path.relative_to(ROOT).as_posix()) for path in paths]


def _address(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path in PAGES:
        return PAGES[path]
    if path in FOLDERS:
        return path.removeprefix("docs/") + "/index.md"
    if path.startswith("notebooks/") and path.endswith(".ipynb"):
        return f"tutorials/{Path(path).stem}.md"
    return path + ".md" if path.endswith(".py") else path.removeprefix("docs/")


def _origin(address: str) -> str:
    """Which file of the repository a page of the site is."""
    if address.startswith("tutorials/"):
        return f"notebooks/{Path(address).stem}.ipynb"
    outside = address.startswith(("examples/", "experiments/"))
    return address if outside else f"docs/{address}"


def _addresses(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    inside = entry.values() if isinstance(entry, dict) else entry
    return [address for part in inside for address in _addresses(part)]


def _listing(folder: Path) -> str:
    names = [path.name for path in sorted(folder.iterdir()) if path.suffix in {".md", ".py"}]
    names += [path.name for path in sorted(folder.iterdir()) if path.relative_to(ROOT).as_posix() in FOLDERS]
    title = folder.name.capitalize()
    return f"# {title}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)


def _replace(files: Files, file: File, path: str) -> None:
    """Put a file on the site, in the place of the one that `docs/` has of it."""
    old = files.get_file_from_path(path.removeprefix("docs/")) if path.startswith("docs/") else None
    if old is not None:
        files.remove(old)
    files.append(file)
