"""What one request may ask. `/version` shows these."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes unless the name says otherwise."""

    max_pages: int = 32_768
    max_object_bytes: int = 256 << 20
    max_read_bytes: int = 4 << 30
    max_write_bytes: int = 4 << 30
    max_write_objects: int = 32_768
    max_json_bytes: int = 16 << 20

    def within(self, memory: int) -> Limits:
        """These limits where bodies have ``memory`` bytes: no single one may take more than a quarter of it."""
        most = memory // 4
        return dataclasses.replace(
            self,
            max_object_bytes=min(self.max_object_bytes, most),
            max_json_bytes=min(self.max_json_bytes, most),
        )

    def public(self) -> dict[str, int]:
        """The limits that a client has to know."""
        return {
            "max_pages": self.max_pages,
            "max_object_bytes": self.max_object_bytes,
            "max_read_bytes": self.max_read_bytes,
            "max_write_bytes": self.max_write_bytes,
            "max_write_objects": self.max_write_objects,
            "max_json_bytes": self.max_json_bytes,
        }
