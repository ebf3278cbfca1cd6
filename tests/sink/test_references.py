"""Values of the configuration may stand in the environment or in files, as secrets do."""

import os
import signal
from pathlib import Path

import pytest

from sink.commands.initialize import from_kafka, hidden
from sink.errors import ConfigError
from tests.sink.test_config import KAFKA, load_text, refusal

CATALOG = "{type: hadoop, warehouse: ./warehouse}"


def token(folder: Path, reference: str) -> str:
    text = KAFKA.replace(CATALOG, f'{{type: rest, uri: "http://c", token: "{reference}"}}')
    return load_text(folder, text).catalogs["lake"]["token"]


@pytest.mark.parametrize("content", ["hunter2", "hunter2\n", "hunter2\r\n"])
def test_a_file_with_a_secret(tmp_path: Path, content: str) -> None:
    (tmp_path / "a secret").write_bytes(content.encode())
    assert token(tmp_path, f"Bearer ${{file:{tmp_path}/a secret}}!") == "Bearer hunter2!"
    assert token(tmp_path, "${file:a secret}") == "hunter2", "relative to the configuration"


def test_a_file_of_several_lines_is_one_text(tmp_path: Path) -> None:
    """Such as a certificate. What is in it is no reference."""
    (tmp_path / "client.pem").write_text("-----BEGIN\nä ${HOME}: #x\n\n", encoding="utf-8")
    assert token(tmp_path, "${file:client.pem}") == "-----BEGIN\nä ${HOME}: #x"


def test_a_variable_named_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("file", raising=False)
    assert token(tmp_path, "${file:-hunter2}") == "hunter2"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "can't be read (No such file or directory). Create it, or correct the path."),
        (b"hunter2\xff", "is not UTF-8 text. Give the path of a text file."),
        (b"hunter2" * 200_000, "has more than 1 MB. Name a file that has only this value."),
    ],
)
def test_a_file_that_can_not_be_taken(tmp_path: Path, content: bytes | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "s").write_bytes(content)
    message = refusal(tmp_path, KAFKA.replace(CATALOG, '{type: rest, token: "${file:s}"}'))
    assert message == f"{tmp_path}/sink.yaml:11: catalogs.lake.token uses ${{file:s}}, and {tmp_path}/s {problem}"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        (
            "~nobody-here/x",
            "~nobody-here/x begins with the home folder of a user who isn't known here. Write the whole path.",
        ),
        ("a\\0b", r"'{folder}/a\x00b' can't be the name of a file. Correct the path."),
        ("pipe", "{folder}/pipe is not a regular file. Give the path of a text file."),
        (".", "{folder} is not a regular file. Give the path of a text file."),
        ("/dev/null", "/dev/null is not a regular file. Give the path of a text file."),
    ],
)
def test_what_is_no_file_is_refused_with_key_and_path(tmp_path: Path, path: str, problem: str) -> None:
    os.mkfifo(tmp_path / "pipe")

    def give_up(*_: object) -> None:
        raise TimeoutError(0, "waited for ever")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(30)
    try:
        message = refusal(tmp_path, KAFKA.replace(CATALOG, f'{{type: rest, token: "${{file:{path}}}"}}'))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    shown = path.replace("\\0", "\0")
    assert message == (
        f"{tmp_path}/sink.yaml:11: catalogs.lake.token uses ${{file:{shown}}}, and {problem.format(folder=tmp_path)}"
    )


def test_init_takes_and_keeps_files(tmp_path: Path) -> None:
    option = "kafka.sasl.password=${file:nowhere}"
    with pytest.raises(ConfigError, match=r"--option kafka\.sasl\.password uses \$\{file:nowhere\}.*can't be read"):
        from_kafka("127.0.0.1:9", tmp_path / "sink.yaml", options=[option])
    assert hidden("kafka.sasl.password", "${file:/run/secrets/kafka}", "V") == "${file:/run/secrets/kafka}"
