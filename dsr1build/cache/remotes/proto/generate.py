"""Writes ``descriptors.binpb`` from the .proto files: ``python -m dsr1build.cache.remotes.proto.generate``.

Needs grpcio-tools, a dependency of the tests alone. The result depends on the .proto files only; a test holds it to them.
"""

import tempfile
from pathlib import Path

DIRECTORY = Path(__file__).parent
DESCRIPTORS = DIRECTORY / "descriptors.binpb"


def descriptor_set() -> bytes:
    """The serialized FileDescriptorSet of all .proto files and what they import. Raises RuntimeError when protoc refuses."""
    from grpc_tools import protoc

    well_known = Path(protoc.__file__).parent / "_proto"
    sources = sorted(str(path.relative_to(DIRECTORY)) for path in DIRECTORY.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / DESCRIPTORS.name
        arguments = ["protoc", f"-I{DIRECTORY}", f"-I{well_known}", "--include_imports", f"--descriptor_set_out={out}", *sources]
        if protoc.main(arguments) != 0:
            raise RuntimeError(f"protoc refused one of {', '.join(sources)}")
        return out.read_bytes()


if __name__ == "__main__":
    DESCRIPTORS.write_bytes(descriptor_set())
