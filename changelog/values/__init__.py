"""Converts values of messages to a table's types: exactly, or not at all. `docs/types.md` has the rule for each type.

    conversion   `convert`: which rule applies, by target type and logical type
    defaults     what earlier rows have in a new column
    schemas      `json_candidates`, `spark_type`: which types to read values as, and which types columns get
    logical      names of logical types, and what they mean
    times        dates, times and timestamps
    decimals     decimals in every encoding
    numerals     integers, floats and booleans
    encoded      base64, UUIDs, geometries
    nested       lists, maps and structs of the above, also out of JSON text
    arrays       Arrow arrays from and to buffers

Each conversion below `convert` is a function from an array to an array of the same length. The result is null where the
input is null, and where a value doesn't fit. So a value that doesn't fit is always one that is null in the result and
not null in the input.
"""

from changelog.values.conversion import convert
from changelog.values.schemas import json_candidates, spark_type

__all__ = ["convert", "json_candidates", "spark_type"]
