"""Messages and methods of the Remote Execution API, as far as a cache needs them.

They are made from ``descriptors.binpb`` in a descriptor pool of their own: protobuf's default pool holds each name once in a
process, so generated modules would clash with those of any other package that speaks the same API.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_REAPI = "build.bazel.remote.execution.v2"


@dataclass(frozen=True, slots=True)
class Method:
    """One remote procedure: its path on the wire, its kind in gRPC's words, and how its messages become bytes at both ends."""

    path: str
    kind: str
    serialize: Callable[[Any], bytes]
    parse: Callable[[bytes], Any]
    parse_request: Callable[[bytes], Any]
    serialize_response: Callable[[Any], bytes]


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    content = (Path(__file__).parent / "descriptors.binpb").read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(content).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


@cache
def message(name: str) -> Any:
    """The class of a message, by its name within the API (``Digest``) or in full (``google.rpc.Status``)."""
    full = name if name.startswith("google.") else f"{_REAPI}.{name}"
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(full))


@cache
def method(service: str, name: str) -> Method:
    """A method of a service of the API (``ActionCache``), or of a service by its full name (``google.bytestream.ByteStream``)."""
    full = service if service.startswith("google.") else f"{_REAPI}.{service}"
    found = _pool().FindServiceByName(full).methods_by_name[name]
    kind = f"{'stream' if found.client_streaming else 'unary'}_{'stream' if found.server_streaming else 'unary'}"
    request, response = (message_factory.GetMessageClass(side) for side in (found.input_type, found.output_type))
    path = f"/{full}/{name}"
    return Method(path, kind, request.SerializeToString, response.FromString, request.FromString, response.SerializeToString)
