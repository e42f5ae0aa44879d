"""Objects in a dictionary behind plain FastAPI routes: what the service would be without a byte path of its own.

Run by ``uvicorn l3client.bench.plain_app:app``.
"""

from __future__ import annotations

from fastapi import FastAPI, HTTPException, Request, Response

app = FastAPI()
_objects: dict[str, bytes] = {}


@app.get("/{key}")
async def get_object(key: str) -> Response:
    if key not in _objects:
        raise HTTPException(404)
    return Response(_objects[key], media_type="application/octet-stream")


@app.put("/{key}")
async def put_object(key: str, request: Request) -> Response:
    _objects[key] = await request.body()
    return Response(status_code=201)


@app.delete("/{key}")
async def delete_object(key: str) -> Response:
    _objects.pop(key, None)
    return Response(status_code=204)
