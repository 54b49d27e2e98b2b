"""The model graph: a light mirror of an ONNX model whose main graph calls model-local functions.

``dsr1build.graph.onnx_form`` turns it into a real ``onnx.ModelProto`` (and is how the meaning of a graph is checked);
plain tuples are kept in memory because R1 has 15,000 calls and planning it must take a second.

Domains of a node's operator:

* ``""``        a standard ONNX operator,
* ``"dsr1"``    an operator of ``dsr1build.ops``; its meaning is its ONNX function body,
* ``"module"``  a function of this graph (``Graph.functions``): an attention block, an expert.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

DType: TypeAlias = Literal["f32", "bf16", "f16", "f8e4m3fn", "i64", "i32", "i8"]
Dim: TypeAlias = int | str
Attribute: TypeAlias = int | float | str | tuple[int, ...] | tuple[float, ...]
Mode: TypeAlias = Literal["prefill", "decode"]
Kind: TypeAlias = Literal["embedding", "norm", "attention", "ffn", "expert", "gating", "combine", "head", "other"]

ITEM_BYTES: Mapping[str, int] = {"f32": 4, "bf16": 2, "f16": 2, "f8e4m3fn": 1, "i64": 8, "i32": 4, "i8": 1}

# The names of run-time dimensions. `tokens` rows are processed by one call, `past` rows are in the KV cache before it
# (a scalar input of the graph, never a shape entry), `context` rows is the capacity of the cache and of RoPE tables.
RUNTIME_DIMS: tuple[str, ...] = ("tokens", "past", "context")


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and shape. A shape entry is a number or one of ``RUNTIME_DIMS``, the latter only outermost."""

    dtype: DType
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Node:
    """One operator call. An absent optional input is ``""``. Attributes are sorted by name."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[str, Attribute], ...] = ()
    domain: str = "dsr1"
    name: str = ""

    def attribute(self, name: str) -> Attribute:
        for key, value in self.attributes:
            if key == name:
                return value
        raise KeyError(f"{self.op} has no attribute {name!r}")


@dataclass(frozen=True, slots=True)
class Function:
    """A model-local function. Its inputs carry no types: they come from the call site."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """The main graph of one mode.

    ``inputs`` holds ``ids`` (i64 [tokens]) and ``past`` (i64 scalar). ``states`` are the KV caches (f32 [context, ..]);
    ``state_updates`` names, for each state, the value that holds it after the call. ``weights`` are all tensors that come
    from a file or a generator; their order is the order of the model's definition. ``outputs`` holds ``logits``.
    Nodes stand in a topological order; the name of a node is the path of the module that it implements
    (``model.layers.3.mlp.experts.17``).
    """

    mode: Mode
    inputs: Mapping[str, TensorType]
    states: Mapping[str, TensorType]
    weights: Mapping[str, TensorType]
    outputs: Mapping[str, TensorType]
    nodes: tuple[Node, ...]
    functions: Mapping[str, Function]
    state_updates: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RopeTable:
    """A generated weight, f32 [context, len(inverse_frequencies)]: ``scale * cos`` (or ``sin``) of position x frequency.

    Computed in float64 and rounded once; positions count from 0.
    """

    function: Literal["cos", "sin"]
    inverse_frequencies: tuple[float, ...]
    scale: float


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A weight that lies in a checkpoint under this name, in a safetensors file of the model's directory.

    ``offset`` is the byte address of the first element in the file, ``length`` the number of bytes.
    """

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A reproducible weight: a function of ``seed``, the tensor's name and its type alone, generated at link time."""

    seed: int
    mean: float
    deviation: float


WeightSource: TypeAlias = RopeTable | StoredTensor | RandomTensor


@dataclass(frozen=True, slots=True)
class Counts:
    """What a checkpoint of the main model holds: elements, tensors and bytes, generated tables and scales left out."""

    parameters: int
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model ready to be cut: its graphs by mode, where each weight comes from, and what generation needs.

    ``directory`` is the checkpoint's directory (absolute) or "" for random weights. ``skipped`` lists groups of tensors
    that were recognised and left out, as (what, number of tensors), for example the MTP layer.
    """

    architecture: str
    graphs: Mapping[Mode, Graph]
    sources: Mapping[str, WeightSource]
    counts: Counts
    vocabulary: int
    hidden: int
    max_context: int
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    directory: str = ""
    skipped: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = field(default=())
