"""Texts of others can't steer the terminal, nor look like lines of ours, nor show a secret."""

import io
import json
import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from sink import cli, redaction
from sink.console.command import as_table
from sink.printing import PrintedRecords, one_line, printable, printable_row

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b2J"
HIDDEN = "a\u202etxt.exe\u2066\u200f"


def test_a_line_can_not_steer_a_terminal() -> None:
    assert printable(f"{ESCAPE}\r\x00\x7f\ud800") == (
        "\\u001b]0;owned\\u0007\\u001b[2J\\u009b2J\\u000d\\u0000\\u007f\\ud800"
    )
    assert printable(HIDDEN) == "a\\u202etxt.exe\\u2066\\u200f"
    assert printable("größe 数 ١\tx") == "größe 数 ١\tx"


def test_json_keeps_its_meaning() -> None:
    row = {"v": f"{ESCAPE}{HIDDEN}\n\\", "\x9b": 1}
    assert json.loads(printable(json.dumps(row, ensure_ascii=False))) == row


def test_cells_stay_in_their_row() -> None:
    assert list(as_table(["id", "v"], [["1\n2", f"x\n2  forged{ESCAPE[:1]}"], ["3", "y"]])) == [
        "id    v",
        "1\\n2  x\\n2  forged\\u001b",
        "3     y",
    ]
    assert one_line("a\tb") == "a\\tb"


def test_a_name_can_not_forge_a_line_of_the_log() -> None:
    logger, stream = logging.Logger("rowdelta"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    handler.addFilter(PrintedRecords())
    logger.addHandler(handler)
    logger.error("topic %s: %d", f"a\nINFO all is well\r\nINFO{ESCAPE[:1]}", 7)
    try:
        raise ValueError("b\nINFO all is well://u:hunter2@h")
    except ValueError:
        logger.exception("failed")
    lines = stream.getvalue().splitlines()
    assert lines[:4] == ["ERROR topic a", "  INFO all is well\\u000d", "  INFO\\u001b: 7", "ERROR failed"]
    assert all(line.startswith("  ") or line == "Traceback (most recent call last):" for line in lines[4:])
    assert "hunter2" not in stream.getvalue()


def test_a_defect_shows_no_secret(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no answer from https://ada:hunter2@catalog")

    monkeypatch.setattr("sink.console.package._packages", fail)
    from sink.cli import main

    assert main(["packages", "sink.yaml"]) == 1
    told = capsys.readouterr().err
    assert "RuntimeError: no answer from https://****@catalog" in told
    assert "hunter2" not in told


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", redaction._Known())
    redaction.remember({"database.password": 'n"hunter2', "kafka.sasl.password": "123456"})


def test_rows_as_json_are_data(known: None) -> None:
    row = {
        "site": "http://example.com",
        "mail": "me@x.org",
        "id": 123456,
        "url": "?token=a",
        "v": "\x9bPRIVATE KEY-----",
    }
    for line in (json.dumps(row), json.dumps(row, ensure_ascii=False, separators=(",", ":"))):
        assert json.loads(printable_row(line)) == row
    secret = {"id": 123456, "v": 'a\\n"hunter2, 123456, \ud800'}
    assert json.loads(printable_row(json.dumps(secret))) == {"id": 123456, "v": "a\\****, ****, \ud800"}


def test_rows_as_json_are_printed_as_such(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    row = '{"site":"http://example.com","mail":"me@x.org","url":"?token=a"}'
    monkeypatch.setattr("sink.console.command.load", lambda _: None)
    monkeypatch.setattr("sink.spark.session.start", lambda *_, **__: None)
    monkeypatch.setattr("sink.spark.session.stopping", lambda _: nullcontext())
    monkeypatch.setattr("sink.commands.time_travel.target", lambda *_: None)
    monkeypatch.setattr(
        "sink.commands.time_travel.show", lambda *_: SimpleNamespace(heading="", rows=[row], cells=[], columns=[])
    )
    assert cli.main(["show", "sink.yaml", "t", "--json"]) == 0
    assert capsys.readouterr().out == f"{row}\n"
    monkeypatch.setattr("sink.deadletters.table.find", lambda *_: None)
    monkeypatch.setattr("sink.deadletters.table.newest", lambda *_: [SimpleNamespace(**json.loads(row))])
    assert cli.main(["dead-letters", "list", "sink.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(row)


def test_no_match_goes_from_one_value_to_another() -> None:
    row = '{"site":"http://example.com","mail":"me@x.org","id":1}'
    assert printable(row) == row
