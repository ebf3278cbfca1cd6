"""What a sample tells doesn't depend on one message that a decoder fails on."""

import logging
from collections.abc import Iterator

import pyarrow as pa
import pytest

from changelog import formats
from changelog.changes import Changes, Format, Wire
from sink.config import Config, SinkSection, SourceSection
from sink.sources.kafka_client import Message
from sink.table.inference import infer_fields, raw_records


class _Fragile(Format):
    DELETES_CARRY_ROW = True

    def changes(self, records: pa.RecordBatch) -> Iterator[Changes]:
        if b"poison" in records.column("value").to_pylist():
            raise ValueError("the decoder has a fault")
        count = records.num_rows
        known = {name.decode(): Wire(pa.nulls(count)).type for name in records.column("value").to_pylist()}
        yield Changes(pa.array(range(count)), pa.repeat(pa.scalar(1, pa.int8()), count), {}, unknown=known)


def test_one_message_that_the_decoder_fails_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(formats, "find", lambda name: _Fragile)
    config = Config.model_construct(
        sink=SinkSection.model_construct(), source=SourceSection(type="kafka", format="row-kind", options={})
    )

    def records(*values: bytes) -> pa.Table:
        return raw_records("t", [Message("t", 0, n, None, value) for n, value in enumerate(values)])

    with caplog.at_level(logging.WARNING):
        assert list(infer_fields(config, records(b"a", b"poison", b"b"))) == ["a", "b"]
    assert "1, ValueError: the decoder has a fault" in caplog.text
    with pytest.raises(ValueError, match="has a fault"):
        infer_fields(config, records(b"poison", b"poison"))
