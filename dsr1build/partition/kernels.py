"""Kernels by canonical form."""

from collections.abc import Callable
from dataclasses import dataclass, field

from dsr1build.graph.canonical import CanonicalForm, structural_digest
from dsr1build.graph.model import Kind
from dsr1build.ops.registry import OPERATORS
from dsr1build.partition.model import Kernel


@dataclass(slots=True)
class KernelTable:
    """The kernels found so far, by id in the order of first use."""

    digest: Callable[[bytes], str] = structural_digest
    kernels: dict[str, Kernel] = field(default_factory=dict)
    candidates: dict[str, list[Kernel]] = field(default_factory=dict)


def kernel_of(table: KernelTable, form: CanonicalForm, kind: Kind) -> Kernel:
    """The kernel of this canonical form: an earlier one whose form is the same bytes, or a new one of kind ``kind``.

    A kernel whose digest another kernel has already (which would be a SHA-256 collision) gets an id of its own.
    """
    digest = table.digest(form.encoding)
    same_digest = table.candidates.setdefault(digest, [])
    for kernel in same_digest:
        if kernel.form == form.encoding:
            return kernel
    id_ = digest[:16]
    serial = 1
    while id_ in table.kernels:
        serial += 1
        id_ = f"{digest[:16]}_{serial}"
    stateless = all(argument.role != "state" for argument in form.signature.arguments)
    independent = stateless and all(OPERATORS[node.op].row_independent for node in form.nodes)
    kernel = Kernel(id_, kind, form.nodes, form.signature, form.results, independent, digest, form.encoding)
    same_digest.append(kernel)
    table.kernels[id_] = kernel
    return kernel
