"""Amounts in words for people: counts with the right plural, sizes with a unit."""

from collections.abc import Mapping

_UNITS = ("kB", "MB", "GB", "TB")


def amount(count: int, noun: str) -> str:
    """`1 data file`, `2,100 data files`, `3 entries`.

    :param noun: in the singular; its last word gets the plural.
    """
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def amounts(counts: Mapping[str, int], none: str = "nothing") -> str:
    """`2 data files, 1 delete file`: only those of which there are any.

    :param counts: noun in the singular -> how many.
    :param none: the text if there are none of all.
    """
    return ", ".join(amount(count, noun) for noun, count in counts.items() if count) or none


def sized(number: float) -> str:
    """Bytes with a decimal unit: `812 bytes`, `3.2 kB`, `41.5 MB`."""
    if number < 999.5:
        return amount(round(number), "byte")
    for unit in _UNITS:
        number /= 1000
        if number < 999.95 or unit == _UNITS[-1]:
            break
    return f"{number:,.1f} {unit}"
