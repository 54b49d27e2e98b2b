"""BUILD.yaml together with everything that it names: read, checked and resolved to absolute paths.

A relative path is relative to the file that names it. A recipe, target or profile named without a path (no ``/`` and no
``.yaml``) is one that ships with the package.
"""

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from pydantic import BaseModel

from dsr1build.config.document import missing_file_hint, read_document
from dsr1build.config.pipelines import refuse_unknown_targets
from dsr1build.config.scalars import shown_text
from dsr1build.config.schema import BuildFile, Profile, Recipe, Target
from dsr1build.config.validate import validate
from dsr1build.errors import EnvironmentUnfit, InvalidInput, Position

Section = TypeVar("Section", bound=BaseModel)
Shelf: TypeAlias = Literal["recipes", "targets", "cache"]
SHELVES: tuple[Shelf, ...] = ("recipes", "targets", "cache")

# What one file of a shelf is called in messages.
_WORDS: dict[Shelf, str] = {"recipes": "recipe", "targets": "target", "cache": "cache profile"}


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A Hugging Face checkpoint: an absolute directory that exists. ``position`` is where the build file names it."""

    directory: Path
    position: Position | None = None


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """A ``config.json`` alone (absolute path of a file that exists), with random weights of this seed."""

    config: Path
    seed: int
    position: Position | None = None


ModelSource: TypeAlias = CheckpointSource | ConfigSource


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """A build, ready to be planned. All paths are absolute; nothing is created.

    * ``context``: the longest context in tokens that the user asked for, or None. With None it is ``recipe.context``, or
      the model's own longest context where that is shorter; ``context_position`` is where the user asked, for messages.
    * ``output``: the directory that holds ``<name>/<target>/``.
    * ``cache_directory``: the directory of the local cache.
    * ``files``: every file that was read. ``profile_file``: the profile's file; ``profile_chosen``: whether the command line
      named it, not the build file.
    """

    file: Path
    build: BuildFile
    recipe: Recipe
    targets: tuple[Target, ...]
    profile: Profile
    model: ModelSource
    context: int | None
    context_position: Position | None
    output: Path
    cache_directory: Path
    profile_file: Path
    profile_chosen: bool
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """A cache profile for use without a build: its content, its file, and the directory of the local cache."""

    profile: Profile
    file: Path
    cache_directory: Path


@dataclass(frozen=True, slots=True)
class _Place:
    """Where another file is named: the directory it is relative to, that directory as messages show it, and the place."""

    directory: Path
    shown: str
    position: Position | None
    option: str = ""

    def fail(self, message: str, hint: str) -> InvalidInput:
        return InvalidInput(message, position=self.position, where=self.option, hint=hint)


def load_build(
    path: str | os.PathLike[str],
    *,
    context: int | None = None,
    output: str | None = None,
    cache: str | None = None,
    targets: Sequence[str] | None = None,
) -> BuildConfig:
    """Read BUILD.yaml and the recipe, targets and profile that it names.

    The keyword arguments replace what the file says (the options ``--context``, ``--output``, ``--cache`` and
    ``--target``); paths in them are relative to the current directory. Raises InvalidInput for every mistake in any of the
    files, at its place.
    """
    shown = os.fspath(path)
    file = _absolute(Path.cwd(), shown)
    document = read_document(file, shown)
    build = validate(document, BuildFile)
    here, here_shown = file.parent, str(Path(shown).parent)

    def place(*keys: str | int) -> _Place:
        return _Place(here, here_shown, document.position(*keys))

    recipe, recipe_file = _load_named(build.recipe, "recipes", Recipe, place("recipe"))
    if targets:
        named_targets = [(text, _option_place("--target")) for text in targets]
    else:
        named_targets = [(text, place("targets", index)) for index, text in enumerate(build.targets)]
    named_profile = (cache, _option_place("--cache")) if cache else (build.cache, place("cache"))
    profile, profile_file = _load_named(named_profile[0], "cache", Profile, named_profile[1])
    if context is not None and context < 1:
        raise InvalidInput(
            f"the context must be at least 1 token, but is {context}", where="--context", hint="Write a positive number."
        )
    loaded_targets, target_files = _load_targets(named_targets)
    built = {target.name for target in loaded_targets}
    if not built.issuperset(recipe.pipelines):
        own = [_absolute(here, text) for text in build.targets if _is_path(text)]
        directories = {shipped_directory("targets"), *(file.parent for file in (*own, *target_files))}
        refuse_unknown_targets(recipe, recipe_file, _shown(build.recipe, "recipes", place()), built, directories)
    place_of_output = _option_place("--output") if output else place("output") if "output" in build.model_fields_set else place()
    output_directory = _absolute(place_of_output.directory, output or build.output)
    for target in loaded_targets:
        _refuse_file(output_directory / build.name / target.name, place_of_output)
    return BuildConfig(
        file=file,
        build=build,
        recipe=recipe,
        targets=loaded_targets,
        profile=profile,
        model=_model_source(build, place),
        context=context or build.context,
        context_position=document.position("context") if build.context and context is None else None,
        output=output_directory,
        cache_directory=_cache_directory(profile, profile_file.parent),
        profile_file=profile_file,
        profile_chosen=bool(cache),
        files=(file, recipe_file, *target_files, profile_file),
    )


def load_profile(text: str, option: str = "--cache") -> ProfileConfig:
    """The profile that ``text`` names: a path, or the name of a shipped one. Raises InvalidInput, at its place."""
    profile, file = _load_named(text, "cache", Profile, _option_place(option))
    return ProfileConfig(profile, file, _cache_directory(profile, file.parent))


def _option_place(option: str) -> _Place:
    return _Place(Path.cwd(), ".", None, option)


def _load_targets(named: Sequence[tuple[str, _Place]]) -> tuple[tuple[Target, ...], tuple[Path, ...]]:
    loaded: list[Target] = []
    files: list[Path] = []
    for text, place in named:
        target, file = _load_named(text, "targets", Target, place)
        if any(target.name == earlier.name for earlier in loaded):
            raise place.fail(
                f"the target `{target.name}` is named twice", "Remove one; bundles of equal name would overwrite each other."
            )
        loaded.append(target)
        files.append(file)
    return tuple(loaded), tuple(files)


def _model_source(build: BuildFile, place_of: Callable[[str, str], _Place]) -> ModelSource:
    model = build.model
    key = "checkpoint" if model.checkpoint is not None else "config"
    text = model.checkpoint if model.checkpoint is not None else model.config
    # The schema has already made sure that one of the two is given, and weights with a configuration.
    assert text is not None
    place = place_of("model", key)
    path = _absolute(place.directory, text)
    kind = _kind_of(path, place)
    if kind is None:
        what = "checkpoint directory" if key == "checkpoint" else "configuration"
        raise place.fail(f"the {what} `{text}` does not exist", missing_file_hint(path))
    if key == "checkpoint":
        if kind != "directory":
            raise place.fail(f"the checkpoint `{text}` is not a directory", "Name the directory that holds config.json.")
        return CheckpointSource(path, place.position)
    if kind != "file":
        raise place.fail(f"the configuration `{text}` is not a file", "Name a config.json, or use `checkpoint`.")
    assert model.weights is not None
    return ConfigSource(path, model.weights.random.seed, place.position)


def _kind_of(path: Path, place: _Place) -> Literal["file", "directory", "other"] | None:
    """What a path leads to; None where there is nothing. A path that cannot be followed is an error at its place."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise place.fail(f"`{shown_text(str(path))}` cannot be read: {reason}", "Check the path and its permissions.") from None
    return "directory" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def _refuse_file(bundle: Path, place: _Place) -> None:
    """Refuse a directory for a bundle that cannot be made because it, or one that it would lie in, is a file."""
    for path in (bundle, *bundle.parents):
        kind = _kind_of(path, place)
        if kind == "directory":
            return
        if kind is not None:
            raise place.fail(f"no bundle can be written to {bundle}: {path} is a file", "Name another directory as `output`.")


def _load_named(text: str, shelf: Shelf, schema: type[Section], place: _Place) -> tuple[Section, Path]:
    """Read the file that ``text`` names: a path, or the name of a shipped file. Gives the content and the path."""
    if _is_path(text):
        path = _absolute(place.directory, text)
        if _kind_of(path, place) is None:
            raise place.fail(f"the {_WORDS[shelf]} `{text}` does not exist", missing_file_hint(path))
        return validate(read_document(path, _shown(text, shelf, place)), schema), path
    path = shipped_directory(shelf) / f"{text}.yaml"
    names = shipped_names(shelf)
    if text not in names:
        close = get_close_matches(text, names, n=1)
        lead = f"Did you mean {close[0]}? " if close else ""
        raise place.fail(
            f"no {_WORDS[shelf]} named `{text}` ships with dsr1build",
            f"{lead}There are {', '.join(names)}; for a file of your own write its path, for example ./{text}.yaml.",
        )
    return validate(read_document(path, _shown(text, shelf, place)), schema), path


def _is_path(text: str) -> bool:
    return "/" in text or text.endswith((".yaml", ".yml"))


def _shown(text: str, shelf: Shelf, place: _Place) -> str:
    """What messages call the file that ``text`` names."""
    if not _is_path(text):
        return f"{shelf}/{text}.yaml"
    return text if Path(text).is_absolute() else os.path.normpath(Path(place.shown) / text)


def shipped_directory(shelf: Shelf) -> Path:
    """The directory of the shipped recipes, targets or profiles: inside an installed package, or in a source checkout."""
    package = Path(__file__).resolve().parents[1]
    for directory in (package / "share" / shelf, package.parent / shelf):
        if directory.is_dir():
            return directory
    raise EnvironmentUnfit(f"the shipped {shelf} are missing from the installation", hint="Install dsr1build again.")


def shipped_names(shelf: Shelf) -> list[str]:
    """The names under which the files of a shelf can be used without a path, sorted."""
    return sorted(file.stem for file in shipped_directory(shelf).glob("*.yaml"))


def _cache_directory(profile: Profile, relative_to: Path) -> Path:
    """The local cache's directory, by the profile or by the XDG base directory specification."""
    named = profile.local.directory
    if named is not None and not named.startswith("~"):
        return _absolute(relative_to, named)
    try:
        if named is not None:
            return Path(named).expanduser()
        # The specification says that a relative path in the variable is to be ignored.
        base = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "dsr1build"
    except RuntimeError:
        raise EnvironmentUnfit(
            "there is no home directory for the cache",
            hint="Set HOME or XDG_CACHE_HOME, or name a `directory` in the cache profile.",
        ) from None


def _absolute(directory: Path, text: str) -> Path:
    """An absolute path without ``..``; symbolic links are left as they are."""
    return Path(os.path.normpath(directory / text))
