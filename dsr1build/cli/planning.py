"""What the verbs `build` and `plan` share: from the path of a BUILD.yaml to the actions that build it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dsr1build.errors import InvalidInput

if TYPE_CHECKING:
    from dsr1build.cache.store import LocalStore
    from dsr1build.config.load import BuildConfig
    from dsr1build.graph.model import Model
    from dsr1build.link.program import Program
    from dsr1build.partition.model import PartitionedModel
    from dsr1build.plan.build_plan import BuildPlan, Compiled


@dataclass(frozen=True, slots=True)
class PlannedBuild:
    """A build up to its actions. ``programs``, by target name, is filled when the fields of a link are computed."""

    config: "BuildConfig"
    model: "Model"
    partitioned: "PartitionedModel"
    plan: "BuildPlan"
    programs: Mapping[str, "Program"]


def plan_build(config: "BuildConfig", store: "LocalStore") -> PlannedBuild:
    """Load the model, cut it and plan its actions. ``store`` serves the outputs that keys depend on.

    Raises InvalidInput where recipe and model do not fit together, and what the rooms raise.
    """
    from dsr1build.link.program import Program, build_program, variant_from_json
    from dsr1build.link.shared_object import EXPORTS, runtime_sources, runtime_target, table_sources
    from dsr1build.partition.cut import partition_model
    from dsr1build.partition.specializations import kernel_variants
    from dsr1build.plan.build_plan import LinkParts, build_plan, target_spec
    from dsr1build.toolchains.cpu import CPUINFO_FLAG, required_features

    model = load_fitting_model(config)
    partitioned = partition_model(model, config.recipe)
    specs = {target.name: target_spec(target) for target in config.targets}
    programs: dict[str, Program] = {}

    def tables(target: str, compiled: "Compiled") -> Mapping[str, bytes]:
        variants = {id: [variant_from_json(s, data) for s, data in made] for id, made in compiled.items()}
        features = [CPUINFO_FLAG[name] for name in required_features(specs[target].cpu, specs[target].features)]
        programs[target] = build_program(partitioned, variants, config.recipe.chunk, features)
        return table_sources(programs[target])

    plan = build_plan(
        partitioned,
        kernel_variants(partitioned, config.recipe),
        config.recipe,
        config.targets,
        LinkParts(tables, runtime_sources(), runtime_target, EXPORTS),
        store.read_blob,
        config.cache_directory / "tools.json",
    )
    return PlannedBuild(config, model, partitioned, plan, programs)


def load_fitting_model(config: "BuildConfig") -> "Model":
    """The model with the build's context. Raises InvalidInput for a model that the recipe is not for, or a context that
    the model does not have."""
    from dsr1build.config.load import CheckpointSource
    from dsr1build.frontends.load import load_model

    source = config.model
    if isinstance(source, CheckpointSource):
        model = load_model(checkpoint=source.directory, config=None, seed=None, context=None)
    else:
        model = load_model(checkpoint=None, config=source.config, seed=source.seed, context=None)
    recipe = config.recipe
    if model.architecture not in recipe.architectures:
        raise InvalidInput(
            f"the recipe `{recipe.name}` is for {_either(recipe.architectures)}, the model is of type {model.architecture}",
            where=str(config.file),
            hint=_recipe_hint(model.architecture),
        )
    longest = model.max_context
    if config.context is not None and config.context > longest:
        raise InvalidInput(
            f"the context of {config.context} tokens is longer than the model's own, {longest} (max_position_embeddings)",
            position=config.context_position,
            where="" if config.context_position else "--context",
            hint=f"Set it to {longest} or less.",
        )
    return replace(model, max_context=config.context or min(recipe.context, longest))


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _recipe_hint(architecture: str) -> str:
    from dsr1build.config.load import shipped_names

    if architecture in shipped_names("recipes"):
        return f"Write `recipe: {architecture}`, which ships with dsr1build."
    return f"Name a recipe with {architecture} among its `architectures`."
