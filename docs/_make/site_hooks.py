"""Hooks of mkdocs.yml: a page of the site has the path that it has in the repository.

So the relative links that GitHub follows lead to the same places here. A source file that a page
links to becomes a page, too; a folder shows its `__init__.py`, or the names in it.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
INDEX = "docs/README.md"  # its tables are the navigation
BENCHMARKS, EXTRAS = "benchmarks/*.md", "extras/**/*.md"
PROJECT = ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
MEDIA = ("docs/pictures/*.png", "docs/_make/*.css")
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".yaml": "yaml"}
KEY = re.compile(r"(?<=<code>)[\w.:]{33,}")
LINK = re.compile(r"\[([^]]+)\]\(([^)\s#]+)[^)]*\)")


class SourcePage(File):
    """A file that is shown as code."""

    def is_documentation_page(self) -> bool:
        return True


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Each section of the index is a section of the navigation."""
    config.nav = [{"Home": [{"titanlite": "README.md"}, {"All documentation": INDEX}]}]
    for section in (ROOT / INDEX).read_text("utf-8").split("\n## ")[1:]:
        title = re.split(":|\n", section)[0]
        links = [link for link in LINK.findall(section) if not link[1].startswith("../")]
        links.sort(key=lambda link: "/add-" in link[1])  # the second column of its table
        config.nav.append({title: [{text: f"docs/{path}"} for text, path in links]})
    benchmarks = [{Path(path).stem.replace("_", " "): path} for path in _paths(BENCHMARKS)]
    config.nav += [{"Benchmarks": benchmarks}, {"Beside the trainer": _paths(EXTRAS)}]
    config.nav.append({"Project": PROJECT})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages, their pictures, and the sources that they link to."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    pages = ["README.md", *PROJECT, *_paths("docs/**/*.md", BENCHMARKS, EXTRAS)]
    for path in [*pages, *_paths(*MEDIA)]:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for path in sorted({target for page in pages for target in _targets(page)}):
        if path not in files.src_uris:
            files.append(_source_page(path, config))
    return files


def on_page_content(html: str, **_: object) -> str:
    """Long keys in tables may break after a dot, a colon or an underscore."""
    return re.sub(r"<t[dh][^>]*>.*?</t[dh]>", lambda cell: KEY.sub(_breakable, cell[0]), html)


def _breakable(key: re.Match[str]) -> str:
    return re.sub(r"([.:_])", r"\1<wbr>", key[0])


def _paths(*patterns: str) -> list[str]:
    found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def _targets(page: str) -> list[str]:
    """Files of the repository that a page links to."""
    folder, text = (ROOT / page).parent, (ROOT / page).read_text("utf-8")
    targets = [(folder / path).resolve() for _, path in LINK.findall(text)]
    return [path.relative_to(ROOT).as_posix() for path in targets if path.exists()]


def _source_page(path: str, config: MkDocsConfig) -> File:
    shown = ROOT / path
    if (shown / "__init__.py").exists():
        shown /= "__init__.py"
    if shown.is_dir():
        text = "\n".join(sorted(file.name for file in shown.glob("[!_.]*")))
    else:
        text = shown.read_text("utf-8").rstrip()
    name = shown.relative_to(ROOT).as_posix()
    code = f"# {name}\n\n``````{LANGUAGES.get(shown.suffix, 'text')}\n{text}\n``````\n"
    page = SourcePage.generated(
        config,
        path,
        content=f"---\nsearch: {{exclude: true}}\n---\n{code}",
        inclusion=InclusionLevel.NOT_IN_NAV,
    )
    page.dest_uri = f"{name}/index.html"
    return page
