"""Values as messages spell them, to a table's types: exactly, or not at all. `docs/types.md` has the rule for each
type.

    conversion   `convert`: which rule applies, by target type and logical type
    schemas      `json_candidates`, `spark_type`: which types to read with, and to make columns of
    logical      names of logical types, and what they mean
    times        dates, times and timestamps
    decimals     decimals in every encoding
    numerals     integers, floats and booleans
    encoded      base64, UUIDs, geometries
    nested       lists, maps and structs of the above, also out of JSON text
    arrays       Arrow arrays from and to buffers

Below `convert`, a conversion is a function from an array to one as long, which has nulls where the input has, and where
a value doesn't fit. So "misfit" and "null although the input isn't" are one thing by construction.
"""

from changelog.values.conversion import convert
from changelog.values.schemas import json_candidates, spark_type

__all__ = ["convert", "json_candidates", "spark_type"]
