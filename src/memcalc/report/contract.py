"""What every part of the JSON contract is: a frozen pydantic model that knows all its keys."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Bytes = Annotated[int, Field(ge=0)]


class Contract(BaseModel):
    """A frozen part of the report; a key that is not declared is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", defer_build=True, json_schema_serialization_defaults_required=True
    )
