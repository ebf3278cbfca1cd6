"""The licenses of what is installed with rowdelta, from the packages' own metadata. `make licenses` writes the page."""

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

PAGE = Path(__file__).parents[1] / "docs" / "licenses.md"
_INTRODUCTION = """\
# Licenses

rowdelta itself is under the Apache License 2.0. `make licenses` makes this list from the metadata of the Python
packages that `pip install` brings with it. A test checks that each license is one of those that let you use, change and
pass on the package, in a product too. The Java packages that Spark downloads aren't in the list: `rowdelta packages`
names them.

| package | license |
|---|---|
"""
_SPELLINGS = {
    r"apache[ -]?(software )?(license)?,?( version)?[ -]?2(\.0)?|apache( software license)?": "Apache-2.0",
    r"https?://www\.apache\.org/licenses/license-2\.0": "Apache-2.0",
    r"(the )?mit( license)?( \(mit\))?": "MIT",
    r"(new |modified |3-clause )?bsd([ -]3-clause)?( license)?|bsd-3-clause( and .*)?": "BSD-3-Clause",
    r"(simplified )?bsd[ -]2-clause( license)?": "BSD-2-Clause",
    r"isc( license)?( \(iscl\))?": "ISC",
    r"mpl[ -]2\.0|mozilla public license 2\.0 \(mpl 2\.0\)": "MPL-2.0",
    r"(python software foundation license|psf(-2\.0)?)": "PSF-2.0",
}
ALLOWED = {
    "Apache-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MPL-2.0", "PSF-2.0", "Unlicense", "0BSD", "Zlib",
    "CC0-1.0", "MIT-0", "CNRI-Python", "Apache-2.0 WITH LLVM-exception", "Python-2.0", "HPND",
}  # fmt: skip


def installed(name: str = "rowdelta") -> dict[str, Distribution]:
    """A package's dependencies and theirs, by name, as far as they are installed and this machine needs them."""
    found: dict[str, Distribution] = {}
    todo = [(name, frozenset[str]())]
    seen = set(todo)
    while todo:
        package, extras = todo.pop()
        try:
            one = distribution(package)
        except PackageNotFoundError:
            continue
        if package != name:
            found[re.sub(r"[-_.]+", "-", one.name).lower()] = one
        for text in one.requires or ():
            needed = Requirement(text)
            wanted = any(needed.marker.evaluate({"extra": e}) for e in extras or {""}) if needed.marker else True
            following = (needed.name, frozenset(needed.extras))
            if wanted and following not in seen:
                seen.add(following)
                todo.append(following)
    return dict(sorted(found.items()))


def license_of(package: Distribution) -> str:
    """An SPDX expression, or what the package says."""
    stated = package.metadata.get_all("License-Expression")
    if stated:
        return str(stated[0])
    classifiers = [
        c.split(" :: ")[-1] for c in package.metadata.get_all("Classifier", []) if c.startswith("License :: OSI")
    ]
    text = " ".join(" ".join(package.metadata.get_all("License", [])).split())
    candidates = [*([text] if 0 < len(text) < 60 else []), *classifiers]
    for candidate in candidates:
        for pattern, name in _SPELLINGS.items():
            if re.fullmatch(pattern, candidate, re.IGNORECASE):
                return name
    return ", ".join(candidates) or "unknown"


def page() -> str:
    rows = (f"| {name} | {license_of(package)} |\n" for name, package in installed().items())
    return _INTRODUCTION + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
