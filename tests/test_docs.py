"""What the documents promise: every configuration key, exit code, command and target is in them, and their examples
load.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from pydantic import BaseModel

from changelog import formats
from sink import cli, config, errors
from sink.commands import demo
from sink.config import SinkSection, SourceSection, TableSection, VerifySection
from sink.config.job_sections import IndexSection, LoadSection
from sink.config.maintenance import MaintenanceSection
from sink.targets.capabilities import CAPABILITIES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
COMMANDS_PAGE = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
EXAMPLES = sorted((ROOT / "docs").rglob("*.yaml"))
COMMANDS = (
    "init", "load", "run", "check", "status", "history", "show", "reset",
    "verify", "reconcile", "maintain", "dead-letters", "warm", "package",
    "packages", "demo",
)  # fmt: skip

_SECTIONS: dict[str, type[BaseModel]] = {
    "sink": SinkSection,
    "source": SourceSection,
    "tables[]": TableSection,
    "load": LoadSection,
    "index": IndexSection,
    "verify": VerifySection,
    "maintenance": MaintenanceSection,
}


def _configuration_keys() -> dict[str, Any]:
    """Every key of the configuration models, dotted, with its pydantic field."""
    keys: dict[str, Any] = {}
    for name, field in config.Config.model_fields.items():
        section = next((key for key in _SECTIONS if key.removesuffix("[]") == name), None)
        if section != name:
            keys[name] = field
        if section is not None:
            inside = _SECTIONS[section].model_fields.items()
            keys |= {f"{section}.{info.alias or inner}": info for inner, info in inside}
    return keys


def _reference_table() -> dict[str, tuple[str, str]]:
    """Key -> (type, default) in the table of the configuration's page."""
    table = CONFIGURATION.split("| key | type | default | meaning |")[1].split("\n\n")[0]
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in table.splitlines() if line.startswith("| `")]
    return {key.strip("`"): (kind, default) for key, kind, default, _ in rows}


def test_the_table_has_every_configuration_key_and_no_other() -> None:
    assert list(_reference_table()) == list(_configuration_keys())


@pytest.mark.parametrize("key", _configuration_keys())
def test_the_table_gives_each_keys_default(key: str) -> None:
    field = _configuration_keys()[key]
    section = config.Config.model_fields[key.split(".")[0].removesuffix("[]")]
    _, shown = _reference_table()[key]
    if field.is_required() and section.is_required():
        assert shown == "required"
    else:
        assert shown != "required"
        if isinstance(field.default, str):
            assert shown == f"`{field.default}`"


@pytest.mark.parametrize(
    "key",
    [
        "source.type",
        "sink.on_bad_record",
        "sink.on_table_error",
        "tables[].mode",
        "tables[].deletes",
        "tables[].schema_changes",
    ],
)
def test_the_table_gives_each_choice(key: str) -> None:
    kind, _ = _reference_table()[key]
    assert kind == ", ".join(f"`{value}`" for value in _configuration_keys()[key].annotation.__args__)


def test_the_table_gives_each_format() -> None:
    kind, _ = _reference_table()["source.format"]
    assert kind == ", ".join(f"`{name}`" for name in formats.names())


def _blocks(document: Path, language: str) -> list[str]:
    """Fenced blocks of a language, unindented by their fence's indentation."""
    pattern = re.compile(rf"^( *)```{language}\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    found = pattern.findall(document.read_text(encoding="utf-8"))
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def _yaml_examples() -> list[Any]:
    examples = []
    for document in DOCUMENTS:
        for number, block in enumerate(_blocks(document, "yaml"), 1):
            examples.append(pytest.param(block, id=f"{document.name}-{number}"))
    examples += [pytest.param(file.read_text(encoding="utf-8"), id=str(file.relative_to(ROOT))) for file in EXAMPLES]
    return [*examples, *(pytest.param(demo.config_text(name), id=f"demo-{name}") for name in CAPABILITIES)]


@pytest.mark.parametrize("text", _yaml_examples())
def test_examples_are_valid_configurations(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"\$\{(\w+)\}", text):
        monkeypatch.setenv(name, f"value-of-{name}")
    (tmp_path / "secret").write_text("text-of-a-secret")
    file = tmp_path / "sink.yaml"
    file.write_text(re.sub(r"\$\{file:[^}]+\}", "${file:secret}", text), encoding="utf-8")
    assert config.load(file).tables


def test_there_are_examples() -> None:
    assert EXAMPLES
    assert len(_blocks(ROOT / "README.md", "yaml")) == 1
    assert len(_blocks(ROOT / "docs" / "configuration.md", "yaml")) >= 1


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_and_the_help_text_name_each_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(rf"^\| `rowdelta {command}\b", COMMANDS_PAGE, re.MULTILINE)
    assert re.search(rf"^ +{command}\s", _help(capsys), re.MULTILINE)


def test_documents_use_only_commands_and_options_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for document in DOCUMENTS:
        text = "\n".join([*_blocks(document, "bash"), *re.findall(r"`(rowdelta [^`]+)`", document.read_text("utf-8"))])
        for command, rest in re.findall(r"^(?:.*\()?rowdelta (\w[\w-]*)([^\n#)]*)", text, re.MULTILINE):
            assert command in COMMANDS, f"{document.name}: rowdelta {command}"
            known = _help(capsys, command)
            for option in re.findall(r"--[\w-]+", rest):
                assert option in known, f"{document.name}: rowdelta {command} {option}"


def test_the_help_text_lists_each_exit_code_and_so_does_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    classes = [errors.ConfigError, errors.DataError, errors.TableError, errors.TemporaryError, errors.RowdeltaError]
    known = _help(capsys)
    for code in [0, *(error.exit_code for error in classes), 130, 143]:
        assert re.search(rf"^  {code} ", known, re.MULTILINE)
        assert re.search(rf"^\| {code} \|", COMMANDS_PAGE, re.MULTILINE)


def test_documents_name_only_make_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
        assert named <= targets, document.name
    assert {
        "setup",
        "demo",
        "test",
        "test-all",
        "test-nightly",
        "versions",
        "bench",
        "docs",
        "lint",
        "audit",
        "licenses",
        "clean",
        "help",
    } <= targets


def test_lines_fit_into_120_columns() -> None:
    """Rows of tables, lines with a URL, and messages (fences of `json`, one message a line) may be longer."""
    texts = {page: page.read_text(encoding="utf-8") for page in [*DOCUMENTS, ROOT / "CHANGELOG.md"]}
    texts = {page: re.sub(r"^ *```json\n.*?^ *```$", "", text, flags=re.M | re.S) for page, text in texts.items()}
    texts |= {file: file.read_text(encoding="utf-8") for file in [*ROOT.glob("*.yml"), *EXAMPLES]}
    lines = [(page.name, line) for page, text in texts.items() for line in text.splitlines()]
    assert [(name, line) for name, line in lines if len(line) > 120 and line[0] != "|" and "://" not in line] == []


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)]+)\)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                path, _, anchor = target.partition("#")
                file = document.parent / path if path else document
                assert file.exists(), f"{document.name}: {target}"
                assert not anchor or anchor in _anchors(file), f"{document.name}: {target}"


def _anchors(document: Path) -> set[str]:
    """Those that a code host gives a document's headings."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.long
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    """A dead link, a dead anchor and a page outside the navigation are warnings, and mkdocs.yml makes them errors:
    those that are logged, so not with --quiet.
    """
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", "mkdocs.yml", "--site-dir"]
    built = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = [page.with_suffix("").name for page in sorted((ROOT / "docs").glob("*.md"))]
    assert [page for page in pages if not (tmp_path / f"{page}.html").is_file()] == []


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    assert len(README.splitlines()) <= 250
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)", README))
    assert linked == {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} - {"docs/index.md"}


@pytest.mark.parametrize("page", ["architecture", "rules", "internals"])
def test_pages_about_the_code_name_only_files_that_exist(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for path in re.findall(r"`((?:changelog|deltawriters|sink)/[\w/]*(?:\.py)?)`", text):
        assert (ROOT / path).exists(), path


def test_the_rules_name_what_is_in_the_files() -> None:
    """`path`, `name`, `name`; the next path."""
    text = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    places = [part for line in text.splitlines() if line[:1] == "|" for part in line.split(" | ")[-1].split(";")]
    named = [re.findall(r"`([\w/.]+)`", part) for part in places]
    there = [(path, name) for path, *names in filter(None, named) for name in names if not name.endswith(".py")]
    assert len(there) > 50
    missing = [(path, name) for path, name in there if name.split(".")[-1] not in (ROOT / path).read_text("utf-8")]
    assert missing == []


COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
STACK = ROOT / "docs" / "examples" / "stack"


def _mounts() -> dict[str, str]:
    """What the compose file mounts, a named volume or a path of the repository -> where, of all services."""
    all_mounts = [mount for service in COMPOSE["services"].values() for mount in service.get("volumes", [])]
    return {mount.split(":")[0]: mount.split(":")[1] for mount in all_mounts}


def test_the_compose_file_mounts_what_exists() -> None:
    paths = {source for source in _mounts() if source.startswith(".")}
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert set(_mounts()) - paths == set(COMPOSE["volumes"])
    assert {f"./{file.relative_to(ROOT)}" for file in STACK.iterdir()} <= paths, "each example is in use"


def test_the_compose_file_pins_its_images_and_asks_each_service_how_it_is() -> None:
    once = {
        needed
        for service in COMPOSE["services"].values()
        for needed, how in service.get("depends_on", {}).items()
        if how["condition"] == "service_completed_successfully"
    }
    for name, service in COMPOSE["services"].items():
        assert re.search(r":v?\d+\.\d+(\.\d+)?(\.Final)?$", service["image"]) or "build" in service, name
        assert "healthcheck" in service or name in once, name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        unhealthy = {
            needed
            for needed, how in service.get("depends_on", {}).items()
            if how["condition"] == "service_healthy" and "healthcheck" not in COMPOSE["services"][needed]
        }
        assert not unhealthy, name


def test_dockers_own_parser_takes_the_compose_file() -> None:
    """Where it is installed."""
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("docker compose isn't here")
    command = ["docker", "compose", "--file", str(ROOT / "docker-compose.yml"), "config", "--quiet"]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_architecture_is_a_map() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert len(re.findall(r"^\| .* \| .* \|$", text.partition("## Glossary")[2], re.MULTILINE)) - 1 <= 25


def test_the_parts_of_the_stack_fit_together() -> None:
    example = config.load(STACK / "sink.yaml")
    services, source = COMPOSE["services"], example.source
    assert f":{STACK.relative_to(ROOT)}/sink.yaml:/etc" in f":{services['sink']['volumes'][0].removeprefix('./')}"
    assert services["sink"]["command"][-1] in _mounts().values()
    assert source.options["kafka.bootstrap.servers"].partition(":")[0] in services
    for address in [
        source.format_options["schema.registry.url"],
        *(properties["uri"] for properties in example.catalogs.values() if "uri" in properties),
        example.spark["spark.hadoop.fs.s3a.endpoint"],
    ]:
        assert urlsplit(str(address)).hostname in services
    workers = [services[name]["command"] for name in services if name.startswith("spark-worker")]
    cores = sum(int(command[command.index("--cores") + 1]) for command in workers)
    assert 2 * int(example.spark["spark.cores.max"]) <= cores, "`rowdelta show` would wait for the sink to end"
    prefixes = set()
    for name in ("postgres", "mysql"):
        connector = json.loads((STACK / f"connector-{name}.json").read_text(encoding="utf-8"))
        assert connector["database.hostname"] in services
        prefixes.add(connector["topic.prefix"])
    assert {table.source.replace("\\", "").partition(".")[0] for table in example.tables} == prefixes
    assert {example.format_of(table.target.partition(".")[0]) for table in example.tables} == {"iceberg", "delta"}


def _help(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out
