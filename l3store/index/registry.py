"""Registered namespaces, and which of them come closest to one that has no objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from l3store.layout import Namespace

Labels = Mapping[str, str | int | float | bool]

_MAX_LABEL_SETS = 16
_MAX_NEAR = 8
# Labels that make deployments of one namespace miss each other: their page hashes are made differently.
_TELLING_LABELS = ("hash",)


@dataclass(slots=True)
class Registration:
    """A namespace and the distinct labels that its deployments gave, newest last."""

    namespace: Namespace
    labels: list[dict[str, Any]] = field(default_factory=list)

    def note(self, labels: Labels | None) -> bool:
        """Remember a deployment's labels; False where they are known."""
        if not labels or dict(labels) in self.labels:
            return False
        self.labels.append(dict(labels))
        del self.labels[:-_MAX_LABEL_SETS]
        return True

    def to_dict(self) -> dict[str, Any]:
        return {**self.namespace.to_wire(), "labels": self.labels}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Registration:
        return cls(Namespace.from_wire(stored), list(stored.get("labels", [])))


@dataclass(frozen=True, slots=True)
class Near:
    """A stored namespace that almost matches. ``differs`` maps a field to (asked, stored)."""

    digest: str
    differs: dict[str, tuple[Any, Any]]


def geometry_conflict(known: Namespace, asked: Namespace) -> dict[str, tuple[Any, Any]]:
    """The geometry fields in which two namespaces of one digest differ: field to (asked, stored)."""
    return _differing(asked.geometry.to_dict(), known.geometry.to_dict())


def nearest(asked: Namespace, labels: Labels | None, stored: Iterable[Registration]) -> list[Near]:
    """The stored namespaces that come closest: those of the same model, then the fewest differing fields.

    A namespace that shares neither the model nor all but two of the fields is no neighbour. The asked namespace itself
    is one where its deployments hash pages differently.
    """
    found = []
    for other in stored:
        differs = _differing(_flat(asked), _flat(other.namespace)) | _differing_labels(labels, other.labels)
        same_model = other.namespace.fields.model_id == asked.fields.model_id
        if differs and (same_model or len(differs) <= 2):
            itself = other.namespace.digest == asked.digest
            rank = (not same_model, len(differs), not itself, other.namespace.digest)
            found.append((rank, Near(other.namespace.digest, differs)))
    found.sort(key=lambda ranked: ranked[0])
    return [near for _, near in found[:_MAX_NEAR]]


def _flat(namespace: Namespace) -> dict[str, Any]:
    return {**namespace.fields.to_dict(), **namespace.geometry.to_dict(), **namespace.extension.to_dict()}


def _differing(asked: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*asked, *(name for name in stored if name not in asked)]
    return {name: (asked.get(name), stored.get(name)) for name in names if asked.get(name) != stored.get(name)}


def _differing_labels(asked: Labels | None, stored: Sequence[Labels]) -> dict[str, tuple[Any, Any]]:
    differs = {}
    for name in _TELLING_LABELS:
        known = {labels[name] for labels in stored if name in labels}
        if asked and name in asked and known and asked[name] not in known:
            differs[f"labels.{name}"] = (asked[name], ", ".join(sorted(map(str, known))))
    return differs
