"""A model cut into partitions, and the kernels behind them."""

from collections.abc import Mapping
from dataclasses import dataclass

from dsr1build.graph.model import Kind, Mode, Model, Node
from dsr1build.graph.signature import Signature


@dataclass(frozen=True, slots=True)
class Kernel:
    """The distinct code behind equal partitions.

    ``nodes`` are operators of domain ``dsr1`` in a topological order with all module calls inlined and all names erased:
    arguments are ``a0``, ``a1``, .. in signature order, values ``v0``, ``v1``, .., and the scalar ``past`` keeps its name.
    ``results`` names the value of each state argument, then of each output argument, in signature order. ``id`` is the
    first 16 hexadecimal digits of ``digest``, the SHA-256 of ``form``, which is the encoded canonical form itself.
    """

    id: str
    kind: Kind
    nodes: tuple[Node, ...]
    signature: Signature
    results: tuple[str, ...]
    row_independent: bool
    digest: str
    form: bytes


@dataclass(frozen=True, slots=True)
class Partition:
    """One convex piece of the graph of ``mode``. ``kernel`` is a kernel's id.

    ``arguments`` are graph value names, one for each argument of the kernel's signature: inputs, weights, states (by the
    state's name), outputs. ``modules`` are the names of the graph's nodes that it consists of, in graph order.
    """

    name: str
    kind: Kind
    mode: Mode
    kernel: str
    arguments: tuple[str, ...]
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExpertDispatch:
    """One layer's routed experts as one step that runs only the chosen ones.

    ``input`` (f32 [tokens, hidden]) is the value that every expert reads; ``weights`` (f32 [tokens, experts]) and ``mask``
    (i32 [tokens, experts]) are outputs of the gating partition. ``experts`` are partition names in expert order, of one
    kernel. The partition ``combine`` reads ``slots`` (f32 [tokens, top_k, hidden]) and ``slot_weights``
    (f32 [tokens, top_k]), which the runtime fills: slot k of a row is its k-th chosen expert in expert order.
    """

    name: str
    input: str
    weights: str
    mask: str
    experts: tuple[str, ...]
    combine: str
    slots: str
    slot_weights: str
    top_k: int


@dataclass(frozen=True, slots=True)
class PartitionedModel:
    """``partitions`` of each mode in a topological order, ``kernels`` by id in the order of first use.

    ``dispatches`` of each mode in the order of their layers. ``notes`` are sentences for the
    user, such as rules that matched nothing.
    """

    model: Model
    partitions: Mapping[Mode, tuple[Partition, ...]]
    kernels: Mapping[str, Kernel]
    dispatches: Mapping[Mode, tuple[ExpertDispatch, ...]]
    notes: tuple[str, ...] = ()
