"""The image runs as nobody special, from a pinned base, and has nothing of the checkout but what it needs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8")).splitlines()
STEPS = [line.split(maxsplit=1) for line in LINES if line and not line.startswith("#")]
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()


def arguments(instruction: str) -> list[str]:
    return [rest for name, rest in STEPS if name == instruction]


def test_each_stage_begins_with_the_same_pinned_version() -> None:
    bases = [stage.split()[0] for stage in arguments("FROM")]
    assert len(bases) == 2
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", bases[0])


def test_its_spark_is_the_one_that_the_whole_suite_runs_on() -> None:
    (tested,) = re.findall(r"^SPARK \?= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    (install,) = (rest for name, rest in STEPS if name == "RUN" and "pip install" in rest)
    assert f"pyspark=={tested}" in install.split()


def test_it_does_not_run_as_root() -> None:
    (user,) = arguments("USER")
    assert re.fullmatch("[1-9][0-9]{3,}", user)
    names = [name for name, _ in STEPS]
    after = names[names.index("USER") :]
    assert "ENTRYPOINT" in after
    assert not any("sudo" in rest for _, rest in STEPS)


def test_the_last_stage_installs_no_tools_to_build_with() -> None:
    last = STEPS[[i for i, (name, _) in enumerate(STEPS) if name == "FROM"][-1] :]
    commands = " ".join(rest for name, rest in last if name == "RUN")
    assert "pip " not in commands
    assert not re.search(r"\b(gcc|build-essential|git|curl|wget)\b", commands)
    (installed,) = re.findall(r"apt-get install (.*?)&&", commands)
    assert installed.split() == ["--yes", "--no-install-recommends", "openjdk-17-jre-headless", "procps"]


def test_only_named_files_get_into_it() -> None:
    assert arguments("ADD") == []
    assert "ARG" not in {name for name, _ in STEPS}, "a build argument stays in the image's history"
    assert IGNORED[0] == "*", "all is left out but what is named"
    named = {line.removeprefix("!") for line in IGNORED if line.startswith("!")}
    copied = {part for rest in arguments("COPY") if "--from" not in rest for part in rest.split()[:-1]}
    assert {path for path in copied if path not in named and not any(path.startswith(f"{n}/") for n in named)} == set()
    assert not any(re.search(r"secret|password|\.env|\.pem|\.key", rest) for _, rest in STEPS)
