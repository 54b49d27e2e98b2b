"""From a partitioned model to the actions that build it.

For each kernel and specialization one ``lower`` action, for each of those and each target one ``compile`` action; for each
target one ``runtime`` action (the C runtime) and two ``link`` actions: the program's tables as an object, and the shared
object. Only what an action declares in its fields can reach it: no path, no name of the build, no context length.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dsr1build.config.schema import Pipeline, Recipe, Target
from dsr1build.digest import BlobRef, Fields, sha256_hex
from dsr1build.errors import InvalidInput
from dsr1build.graph.model import Kind
from dsr1build.graph.signature import Specialization
from dsr1build.lower import action as lower
from dsr1build.partition.model import Kernel, PartitionedModel
from dsr1build.plan.action import Action, Results
from dsr1build.toolchains import cpu
from dsr1build.toolchains.target import (
    Overrides,
    TargetSpec,
    c_fields,
    compile_fields,
    link_fields,
    resolve_pipeline,
    resolve_schedules,
)

LIBRARY = "model.so"

# The compiled variants of each kernel by kernel id: specialization and content of ``kernel.json``.
Compiled: TypeAlias = Mapping[str, Sequence[tuple[Specialization, Mapping[str, Any]]]]


@dataclass(frozen=True, slots=True)
class LinkParts:
    """What the link room brings to the shared object beside the kernels; sources map file names to contents.

    ``tables(target name, compiled)`` gives the program's tables as C sources, ``runtime`` is the C runtime, and
    ``runtime_target`` says what both are compiled for. ``exports`` are the symbols that stay visible.
    """

    tables: Callable[[str, Compiled], Mapping[str, bytes]]
    runtime: Mapping[str, bytes]
    runtime_target: Callable[[TargetSpec], TargetSpec]
    exports: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel x one specialization x one target, with the actions that make it."""

    id: str
    kernel: str
    specialization: Specialization
    target: str
    lower: str
    compile: str


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """``actions`` by id, inputs before those that use them. ``variants`` in the order of kernels, specializations, targets.

    ``targets`` are the resolved targets and ``links`` the ids of the actions that make the shared objects, by target name.
    ``contents`` holds the blobs that no action makes (C sources), by digest; computing the fields of a link adds to it.
    """

    actions: Mapping[str, Action]
    variants: tuple[Variant, ...]
    targets: Mapping[str, TargetSpec]
    links: Mapping[str, str]
    contents: dict[str, bytes] = field(default_factory=dict)


def build_plan(
    partitioned: PartitionedModel,
    variants: Mapping[str, Sequence[Specialization]],
    recipe: Recipe,
    targets: Sequence[Target],
    link: LinkParts,
    read_blob: Callable[[BlobRef], bytes],
    remembered: Path | None = None,
) -> BuildPlan:
    """The actions of a build. ``variants`` has the specializations of each kernel, by kernel id.

    ``read_blob`` gives the content of an action's output; fields are computed with it when their inputs are there.
    ``remembered`` is the file that remembers digests of tools. Raises InvalidInput for an unknown CPU, pass group or
    schedule option in a target or recipe.
    """
    actions: dict[str, Action] = {}
    planned: list[Variant] = []
    contents: dict[str, bytes] = {}
    specs = {target.name: target_spec(target) for target in targets}
    for target in targets:
        check_pipelines(recipe, target)
    for kernel in partitioned.kernels.values():
        for specialization in variants[kernel.id]:
            name = f"{kernel.id}:{specialization}"
            lowering = _lower(name, kernel, specialization)
            actions[lowering.id] = lowering
            for target_name, spec in specs.items():
                overrides = pipeline_overrides(recipe, target_name, kernel.kind)
                compiling = _compile(name, kernel, specialization, target_name, spec, overrides, lowering, read_blob, remembered)
                actions[compiling.id] = compiling
                variant = Variant(f"{target_name}:{name}", kernel.id, specialization, target_name, lowering.id, compiling.id)
                planned.append(variant)
    links: dict[str, str] = {}
    for target_name, spec in specs.items():
        own = [v for v in planned if v.target == target_name]
        for made in _link_actions(own, target_name, spec, link, read_blob, contents, remembered):
            actions[made.id] = made
        links[target_name] = f"link:{target_name}"
    return BuildPlan(actions, tuple(planned), specs, links, contents)


def target_spec(target: Target) -> TargetSpec:
    """The target with ``native`` resolved. Raises InvalidInput for an unknown triple, CPU or feature."""
    if target.triple not in cpu.TRIPLES:
        raise InvalidInput(
            f"the triple {target.triple!r} is not supported",
            where=f"target {target.name}",
            hint=f"Supported: {', '.join(cpu.TRIPLES)}.",
        )
    try:
        name, features = cpu.resolve(target.cpu, target.features)
    except InvalidInput as error:
        raise InvalidInput(error.message, where=f"target {target.name}", hint=error.hint) from None
    return TargetSpec(target.triple, name, features, _passes(target), _schedules(target))


def pipeline_overrides(recipe: Recipe, target: str, kind: Kind) -> Overrides:
    """What the recipe says for kernels of ``kind`` on ``target``: its entry for the kind over its entry for ``all``."""
    entries = recipe.pipelines.get(target, {})
    passes: dict[str, str] = {}
    schedules: dict[str, dict[str, int]] = {}
    for pipeline in (entries.get("all"), entries.get(kind)):
        if pipeline is not None:
            passes.update(_passes(pipeline))
            for name, options in _schedules(pipeline).items():
                schedules.setdefault(name, {}).update(options)
    return Overrides(passes, schedules)


def check_pipelines(recipe: Recipe, target: Target) -> None:
    """Raises InvalidInput for a pass group, schedule or option that the toolchain does not have, by its place."""
    places: list[tuple[str, Target | Pipeline]] = [(f"target {target.name}", target)]
    for kind, pipeline in recipe.pipelines.get(target.name, {}).items():
        places.append((f"recipe {recipe.name}, pipelines.{target.name}.{kind}", pipeline))
    for where, given in places:
        try:
            resolve_pipeline(_passes(given))
            resolve_schedules((), _schedules(given))
        except InvalidInput as error:
            raise InvalidInput(error.message, where=where, hint=error.hint) from None


def _passes(given: Target | Pipeline) -> dict[str, str]:
    return {str(group): text for group, text in given.passes.items()}


def _schedules(given: Target | Pipeline) -> dict[str, dict[str, int]]:
    return {str(name): {str(o): value for o, value in options.items()} for name, options in given.schedules.items()}


def _lower(name: str, kernel: Kernel, specialization: Specialization) -> Action:
    def fields(results: Results) -> Fields:
        return lower.lower_fields(kernel.nodes, kernel.signature, kernel.results, specialization)

    label = f"{kernel.kind} {kernel.id} {specialization}"
    preload = ("dsr1build.lower.kernel_source",)
    return Action(f"lower:{name}", "lower", label, lower.WORKER, (), fields, lower.OUTPUTS, preload)


def _compile(
    name: str,
    kernel: Kernel,
    specialization: Specialization,
    target_name: str,
    target: TargetSpec,
    overrides: Overrides,
    lowering: Action,
    read_blob: Callable[[BlobRef], bytes],
    remembered: Path | None,
) -> Action:
    def fields(results: Results) -> Fields:
        outputs = results[lowering.id].outputs
        text, signature = outputs["kernel.mlir"], outputs["signature.json"]
        return compile_fields(text, read_blob(text).decode("utf-8"), signature, target, overrides, remembered)

    return Action(
        f"compile:{target_name}:{name}",
        "compile",
        f"{kernel.kind} {kernel.id} {specialization} for {target_name}",
        "dsr1build.toolchains.compile:compile_kernel",
        (lowering.id,),
        fields,
        ("kernel.o", "kernel.json"),
        ("dsr1build.toolchains.compile",),
    )


def _link_actions(
    variants: Sequence[Variant],
    name: str,
    target: TargetSpec,
    link: LinkParts,
    read_blob: Callable[[BlobRef], bytes],
    contents: dict[str, bytes],
    remembered: Path | None,
) -> tuple[Action, Action, Action]:
    def c_sources(sources: Mapping[str, bytes]) -> Fields:
        refs = {file: BlobRef(sha256_hex(data)) for file, data in sources.items()}
        contents.update({refs[file].sha256: data for file, data in sources.items()})
        return c_fields(refs, link.runtime_target(target), remembered=remembered)

    compiles = tuple(variant.compile for variant in variants)
    objects = tuple(file.removesuffix(".c") + ".o" for file in sorted(link.runtime) if file.endswith(".c"))

    def runtime_fields(results: Results) -> Fields:
        return c_sources(link.runtime)

    def tables_fields(results: Results) -> Fields:
        compiled: dict[str, list[tuple[Specialization, Mapping[str, Any]]]] = {}
        for variant in variants:
            described = json.loads(read_blob(results[variant.compile].outputs["kernel.json"]))
            compiled.setdefault(variant.kernel, []).append((variant.specialization, described))
        return c_sources(link.tables(name, compiled))

    runtime = Action(
        f"runtime:{name}", "runtime", f"sources for {name}", "dsr1build.toolchains.c_code:compile_c", (), runtime_fields, objects
    )
    tables = Action(
        f"tables:{name}",
        "link",
        f"tables for {name}",
        "dsr1build.toolchains.c_code:compile_c",
        compiles,
        tables_fields,
        ("tables.o",),
    )

    def library_fields(results: Results) -> Fields:
        # Variants of equal text are equal objects, and an object is linked once.
        kernels = dict.fromkeys(results[id].outputs["kernel.o"] for id in compiles)
        parts = [results[tables.id].outputs["tables.o"], *(results[runtime.id].outputs[o] for o in objects), *kernels]
        return link_fields(parts, link.exports, LIBRARY, remembered=remembered)

    library = Action(
        f"link:{name}",
        "link",
        f"library for {name}",
        "dsr1build.toolchains.c_code:link_shared",
        (*compiles, runtime.id, tables.id),
        library_fields,
        (LIBRARY,),
    )
    return runtime, tables, library
