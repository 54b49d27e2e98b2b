"""Entries of a recipe's ``pipelines`` that are for a target that exists nowhere, most often a misspelt one.

A recipe serves many builds, so an entry for a target that this build leaves out is no mistake as long as there is such a
target: one that ships with the package, or one beside those that BUILD.yaml names.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from dsr1build.config.document import read_document
from dsr1build.config.schema import Recipe, Target
from dsr1build.config.validate import validate
from dsr1build.errors import InvalidInput


def refuse_unknown_targets(recipe: Recipe, file: Path, shown: str, known: Iterable[str], directories: Iterable[Path]) -> None:
    """Raises InvalidInput for the first entry of ``recipe.pipelines`` whose target is not ``known`` and in none of
    ``directories``. ``file`` is the recipe's, which messages call ``shown``.
    """
    names = set(known).union(*map(_targets_in, directories))
    for wrong in recipe.pipelines:
        if wrong not in names:
            raise InvalidInput(
                f"pipelines has an entry for the target `{wrong}`, and there is no such target",
                position=read_document(file, shown).find(("pipelines", wrong))[0],
                hint=_choices(wrong, sorted(names)),
            )


def _targets_in(directory: Path) -> set[str]:
    """The names of the targets whose files lie in a directory; what is no sound target is passed over."""
    names: set[str] = set()
    for file in (*directory.glob("*.yaml"), *directory.glob("*.yml")):
        try:
            names.add(validate(read_document(file, str(file)), Target).name)
        except InvalidInput:
            continue
    return names


def _choices(wrong: str, names: Sequence[str]) -> str:
    close = get_close_matches(wrong, names, n=1)
    lead = f"Did you mean {close[0]}? " if close else ""
    return f"{lead}There are {', '.join(names)}; a target of your own must be one that BUILD.yaml names, or lie beside it."
