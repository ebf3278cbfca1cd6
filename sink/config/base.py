"""What all sections of the configuration have in common."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


def as_text(value: Any) -> Any:
    """Turn numbers and booleans into text, so that people can write Spark options and properties without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


Text = Annotated[str, BeforeValidator(as_text)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True, hide_input_in_errors=True)
