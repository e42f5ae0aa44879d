"""What the layout refuses. Every error is a ``ValueError`` whose text says what, where and what to do."""

from __future__ import annotations


class LayoutError(ValueError):
    """Something that has no place in the unified layout."""


class InvalidNamespaceError(LayoutError):
    """A namespace field, geometry or extension that cannot be right; ``field`` names it."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}")
        self.field = field


class InvalidKeyError(LayoutError):
    """Text that is not a key, a coordinate, a digest or a page hash."""


class OutOfModelError(LayoutError):
    """Layers, heads or a head group that the model does not have."""


class OffGridError(LayoutError):
    """Heads that split a head group where whole groups are needed."""


class SplitGroupError(OffGridError):
    """A writer holds a part of a head group, so it cannot write that grid; ``fits`` is the ``head_group`` it could."""

    def __init__(self, detail: str, *, fits: int) -> None:
        super().__init__(detail)
        self.fits = fits


class UnsupportedTopologyError(LayoutError, NotImplementedError):
    """A cut of the model that the layout has no arithmetic for."""
