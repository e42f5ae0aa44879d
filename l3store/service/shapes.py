"""The JSON of the wire, as OpenAPI and JSON Schema show it. What a namespace may hold is checked by the layout."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StrictBool, StrictInt, StrictStr, StringConstraints

from l3store.index import Near, Order, Registration, Usage
from l3store.layout import Namespace

PageHash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$", strict=True)]
HalfOpen = Annotated[tuple[StrictInt, StrictInt], Field(description="[first, end), end not included")]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NamespaceFields(_Request):
    """The nine fields that SGLang's unified key scheme hashes. MLA: total_kv_heads and head_group are 0."""

    schema_version: StrictInt = Field(1, ge=1, le=1)
    model_id: StrictStr = Field(min_length=1, max_length=512)
    dtype: StrictStr = Field(description="logical, such as bfloat16 or float8_e4m3fn")
    page_size: StrictInt = Field(ge=1, description="tokens")
    rank_replicated: StrictBool = Field(description="every tensor-parallel rank holds the same rows (MLA)")
    total_kv_heads: StrictInt = Field(ge=0, description="of the model, not of a rank")
    layer_partition: StrictInt = Field(ge=0, description="layers of an object; 0: each writer's own run")
    head_group: StrictInt = Field(ge=0, description="KV heads of an object")
    object_layout: Literal["page-unified-v1"] = "page-unified-v1"


class GeometryFields(_Request):
    """Sizes that turn coordinates into bytes."""

    num_layers: StrictInt = Field(ge=1)
    head_dim: StrictInt = Field(ge=1, description="the width of the latent row for MLA")
    itemsize: StrictInt = Field(ge=1, description="bytes")


class ExtensionFields(_Request):
    """What the nine fields leave out; part of the digest where set."""

    model_revision: StrictStr | None = None
    pool: StrictStr | None = None
    tenant: StrictStr | None = None
    v_head_dim: StrictInt | None = None
    row_bytes: StrictInt | None = None


Labels = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], StrictStr | StrictBool | StrictInt | FiniteFloat],
    Field(max_length=32, description="not part of the digest; `hash` says how pages are hashed: plain or bigram"),
]


class NamespaceBody(_Request):
    """A registration."""

    namespace: NamespaceFields
    geometry: GeometryFields
    extension: ExtensionFields | None = None
    labels: Labels | None = None

    def to_namespace(self) -> Namespace:
        """Raises a layout error that names the field."""
        wire: dict[str, Any] = {"namespace": self.namespace.model_dump(), "geometry": self.geometry.model_dump()}
        if self.extension is not None:
            wire["extension"] = self.extension.model_dump(exclude_none=True)
        return Namespace.from_wire(wire)


class Difference(BaseModel):
    yours: Any
    stored: Any


class NearNamespace(BaseModel):
    """A stored namespace that almost matches, and the fields that keep the two apart."""

    digest: str
    model_id: str
    objects: int
    bytes: int
    differs: dict[str, Difference]


class NamespaceInfo(BaseModel):
    digest: str
    namespace: NamespaceFields
    geometry: GeometryFields
    extension: ExtensionFields | None = None
    labels: list[dict[str, Any]] = Field(description="the distinct labels that deployments gave")
    objects: int
    bytes: int

    @classmethod
    def of(cls, registration: Registration, usage: Usage) -> NamespaceInfo:
        namespace = registration.namespace
        extension = namespace.extension.to_dict()
        return cls(
            digest=namespace.digest,
            namespace=NamespaceFields(**namespace.fields.to_dict()),
            geometry=GeometryFields(**namespace.geometry.to_dict()),
            extension=ExtensionFields(**extension) if extension else None,  # type: ignore[arg-type]
            labels=registration.labels,
            objects=usage.objects,
            bytes=usage.bytes,
        )


class Registered(NamespaceInfo):
    near: list[NearNamespace]


class NamespaceList(BaseModel):
    namespaces: list[NamespaceInfo]


class Dropped(BaseModel):
    digest: str
    objects: int


class PagesBody(_Request):
    """Pages, in the order of their prefix, and the part of each that is needed."""

    namespace: StrictStr = Field(description="digest")
    page_hashes: list[PageHash]
    layers: HalfOpen | None = Field(None, description="default all")
    heads: HalfOpen | None = Field(None, description="on the grid of head_group; default all")


class ReadBody(PagesBody):
    order: Order = Order.PAGE
    sums: StrictBool = Field(False, description="append 8 bytes for each cell, in the order of the cells")


class Matched(BaseModel):
    pages: int = Field(description="leading pages whose page set is present")


class Missing(BaseModel):
    missing: list[tuple[int, str]] = Field(description="page's position and coordinate, such as [0, 'L0-30_H0']")


class ObjectStatus(BaseModel):
    key: str
    status: Literal["created", "exists"]


class WriteResult(BaseModel):
    key: str
    status: Literal["created", "exists", "error"]
    detail: str | None = None


class WriteResults(BaseModel):
    results: list[WriteResult]


class Suspected(BaseModel):
    key: str
    corrupt: bool = Field(description="true: our copy was bad and is quarantined; false: it is sound")


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Version(BaseModel):
    name: Literal["l3store"] = "l3store"
    version: str
    api: Literal["v1"] = "v1"
    object_layout: Literal["page-unified-v1"] = "page-unified-v1"
    limits: dict[str, int]


class Problem(BaseModel):
    """RFC 9457."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str


def near_shapes(near: list[Near], info: dict[str, tuple[Registration, Usage]]) -> list[NearNamespace]:
    """Neighbours with what they store."""
    return [
        NearNamespace(
            digest=n.digest,
            model_id=info[n.digest][0].namespace.fields.model_id,
            objects=info[n.digest][1].objects,
            bytes=info[n.digest][1].bytes,
            differs={name: Difference(yours=asked, stored=stored) for name, (asked, stored) in n.differs.items()},
        )
        for n in near
    ]
