"""Names the shipped JSON Schemas and reads them. Imports neither pydantic nor the models that they are made from."""

from __future__ import annotations

DIALECT = "http://json-schema.org/draft-07/schema#"
RUN = "duet.schema.json"
PARTIAL = "duet.partial.schema.json"
PRESET = "duet.preset.schema.json"
MODEL = "duet.model.schema.json"
