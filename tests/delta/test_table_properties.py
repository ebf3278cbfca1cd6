"""The sink treats Delta's table properties and table features as docs/table-properties.md says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sink.errors import TableError
from sink.targets.delta.table_properties import (
    COLUMN_METADATA,
    FEATURES,
    PROPERTIES,
    RULES,
    check_columns,
    check_protocol,
    check_required,
    required,
)

DOCUMENT = (Path(__file__).parents[2] / "docs" / "table-properties.md").read_text(encoding="utf-8")
TABLE = "lake.shop.orders"
PROTOCOL: dict[str, Any] = {"minReaderVersion": 3, "minWriterVersion": 7}


def documented(title: str) -> dict[str, tuple[str, str]]:
    """The rows of the page's table whose first column has this title."""
    table = DOCUMENT.split(f"| {title} | treatment | what the sink does |")[1].split("\n\n")[0]
    cells = [re.split(r"\s*\|\s*", line.strip("| ")) for line in table.splitlines() if line.startswith("| ")]
    return {name.strip("`"): (treatment, does) for name, treatment, does in cells}


def test_the_page_says_what_the_code_does() -> None:
    shown = {}
    for name, rule in RULES.items():
        values = " (fine with " + ", ".join(f"`{value}`" for value in rule.unless) + ")" if rule.unless else ""
        shown[name] = (rule.treatment, f"{rule.does}{values}")
    assert documented("property of Delta Lake") == shown
    assert documented("table feature") == {name: (found.treatment, found.does) for name, found in FEATURES.items()}


def test_the_page_names_all_features_that_no_property_asks_for() -> None:
    """Each feature that may be unused is used by a property or a column that is judged by itself."""
    for name, found in FEATURES.items():
        if found.treatment == "if unused":
            asks = re.search(r"see the propert\w+ (delta\.[\w.*]+)", found.does)
            rule = PROPERTIES.rule(asks[1]) if asks else None
            assert (rule is not None and rule.treatment == "refused") or found.does.startswith("a table with a"), name


@pytest.mark.parametrize(
    ("properties", "refused"),
    [
        ({"delta.enableDeletionVectors": "true", "delta.appendOnly": "false", "owner": "ada"}, None),
        ({"delta.ENABLECHANGEDATAFEED": "True"}, "delta.ENABLECHANGEDATAFEED"),
        ({"delta.constraints.positive": "amount > 0"}, "delta.constraints.positive"),
        ({"delta.enableIcebergCompatV2": "true"}, "delta.enableIcebergCompatV2"),
        ({"delta.universalFormat.enabledFormats": "iceberg"}, "delta.universalFormat.enabledFormats"),
        (
            {"delta.coordinatedCommits.commitCoordinator-preview": "x"},
            "delta.coordinatedCommits.commitCoordinator-preview",
        ),
    ],
)
def test_properties_of_a_table_that_exists(properties: dict[str, str], refused: str | None) -> None:
    if refused is None:
        PROPERTIES.check(TABLE, properties)
        return
    with pytest.raises(TableError, match=rf"{TABLE} has the property {refused}, which rowdelta does not follow: "):
        PROPERTIES.check(TABLE, properties)


def test_a_table_that_only_grows_may_have_more() -> None:
    """No row of it is deleted, so no row needs a vector, a pre-image or its old id."""
    properties = {
        "delta.appendOnly": "true",
        "delta.enableDeletionVectors": "false",
        "delta.enableChangeDataFeed": "true",
        "delta.enableRowTracking": "true",
    }
    PROPERTIES.check(TABLE, properties, appends=True)
    for name, value in properties.items():
        assert PROPERTIES.refusal({name: value}) is not None, name
    assert PROPERTIES.refusal({"delta.constraints.positive": "amount > 0"}, appends=True) is not None


def test_copy_on_write_needs_no_vectors() -> None:
    PROPERTIES.check(TABLE, {"delta.enableDeletionVectors": "false"}, copies=True)
    assert PROPERTIES.refusal({"delta.enableChangeDataFeed": "true"}, copies=True) is not None
    check_required(TABLE, PROTOCOL | {"writerFeatures": ["domainMetadata"]}, {}, copies=True)
    assert required(appends=False, copies=True) == required(appends=True)


def test_warnings() -> None:
    properties = {
        "delta.setTransactionRetentionDuration": "interval 1 day",
        "delta.randomizeFilePrefixes": "FALSE",
        "delta.autoOptimize.autoCompact": "auto",
        "delta.checkpointPolicy": "v2",
    }
    assert [sentence.split(":")[0] for sentence in PROPERTIES.ignored(properties)] == [
        "the property delta.setTransactionRetentionDuration (interval 1 day) is not followed",
        "the property delta.autoOptimize.autoCompact (auto) is not followed",
    ]


def test_protocols_that_the_sink_knows() -> None:
    check_protocol(TABLE, {"minReaderVersion": 1, "minWriterVersion": 2})
    known = [name for name, found in FEATURES.items() if found.treatment != "refused"]
    check_protocol(TABLE, PROTOCOL | {"writerFeatures": known, "readerFeatures": ["deletionVectors"]})


@pytest.mark.parametrize("feature", [name for name, found in FEATURES.items() if found.treatment == "refused"])
def test_a_feature_with_which_the_sink_does_not_write(feature: str) -> None:
    with pytest.raises(TableError, match=rf"{TABLE}: .* {feature}, with which .*DROP FEATURE `{feature}`"):
        check_protocol(TABLE, PROTOCOL | {"writerFeatures": ["appendOnly", feature]})


@pytest.mark.parametrize("side", ["writerFeatures", "readerFeatures"])
def test_a_feature_that_is_not_known(side: str) -> None:
    with pytest.raises(TableError, match=rf"{TABLE}: its protocol has the table feature tomorrow, which .* not know"):
        check_protocol(TABLE, PROTOCOL | {"writerFeatures": ["deletionVectors"], side: ["tomorrow"]})


@pytest.mark.parametrize("newer", [{"minReaderVersion": 4}, {"minWriterVersion": 8}])
def test_a_newer_protocol(newer: dict[str, int]) -> None:
    ((name, version),) = newer.items()
    with pytest.raises(
        TableError, match=rf"{TABLE}: its protocol has {name} {version}, and rowdelta knows versions up"
    ):
        check_protocol(TABLE, PROTOCOL | newer)


def test_what_a_table_needs() -> None:
    both = PROTOCOL | {"writerFeatures": ["domainMetadata", "deletionVectors"]}
    check_required(TABLE, both, required(appends=False))
    check_required(TABLE, PROTOCOL | {"writerFeatures": ["domainMetadata"]}, {}, appends=True)
    domain, vectors = "'delta.feature.domainMetadata' = 'supported'", "'delta.enableDeletionVectors' = 'true'"
    for protocol, properties, appends, missing in (
        ({"minReaderVersion": 1, "minWriterVersion": 2}, {}, False, f"({domain}, {vectors})"),
        (PROTOCOL | {"writerFeatures": ["deletionVectors"]}, required(appends=False), False, f"({domain})"),
        (both, {"delta.enableDeletionVectors": "false"}, False, f"({vectors})"),
        (PROTOCOL | {"writerFeatures": []}, {}, True, f"({domain})"),
    ):
        with pytest.raises(TableError, match=re.escape(f"SET TBLPROPERTIES {missing}. This raises")):
            check_required(TABLE, protocol, properties, appends=appends)


def schema(*fields: dict[str, Any]) -> str:
    return json.dumps({"type": "struct", "fields": [{"nullable": True, "metadata": {}} | field for field in fields]})


def test_columns_that_the_sink_knows() -> None:
    inner = {"type": "struct", "fields": [{"name": "street", "type": "string", "nullable": True, "metadata": {}}]}
    places = {"type": "array", "elementType": inner, "containsNull": True}
    physical = {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "col-1"}
    check_columns(
        TABLE, schema({"name": "id", "type": "long", "metadata": physical}, {"name": "places", "type": places})
    )


@pytest.mark.parametrize("key", COLUMN_METADATA)
def test_columns_that_delta_computes_or_checks(key: str) -> None:
    with pytest.raises(TableError, match=rf"{TABLE}: the column total (is|has) "):
        check_columns(
            TABLE, schema({"name": "id", "type": "long"}, {"name": "total", "type": "long", "metadata": {key: 1}})
        )


@pytest.mark.parametrize(
    ("dtype", "path"),
    [
        ("variant", "v"),
        ("geometry(OGC:CRS84)", "v"),
        ({"type": "array", "elementType": "variant", "containsNull": True}, r"v\.element"),
        ({"type": "struct", "fields": [{"name": "x", "type": "variant"}]}, r"v\.x"),
        (
            {
                "type": "map",
                "keyType": "string",
                "valueType": {"type": "struct", "fields": [{"name": "x", "type": "variant"}]},
            },
            r"v\.value\.x",
        ),
    ],
)
def test_types_that_the_writers_do_not_know(dtype: object, path: str) -> None:
    with pytest.raises(
        TableError, match=rf"{TABLE} has the column {path} of type .*, which rowdelta's writers don't know"
    ):
        check_columns(TABLE, schema({"name": "v", "type": dtype}))
