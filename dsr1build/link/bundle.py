"""Assemble a bundle: shared object, binding, weights, manifest, tokenizer and the C header, in one directory."""

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import ValidationError

from dsr1build.digest import sha256_hex
from dsr1build.errors import EnvironmentUnfit, InvalidInput
from dsr1build.graph.model import Model
from dsr1build.link.binding import WeightFile, write_binding
from dsr1build.link.manifest import (
    MANIFEST,
    CountsInfo,
    LibraryInfo,
    Manifest,
    TargetInfo,
    WeightFileInfo,
    WeightsInfo,
    kernel_infos,
    mode_info,
    state_bytes,
    state_infos,
)
from dsr1build.link.program import ABI, Program
from dsr1build.link.replace import put_directory, same_tree, work_directory
from dsr1build.link.shared_object import RUNTIME_DIRECTORY
from dsr1build.link.tables import program_digest
from dsr1build.link.weights import place_weights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
BINDING = "weights.bind"


def assemble_bundle(
    destination: Path,
    name: str,
    target: TargetInfo,
    program: Program,
    model: Model,
    context: int,
    library: Path,
    changed: Collection[str] = (),
) -> Path:
    """Make the bundle at ``destination`` (``dist/<name>/<target>``) and return it.

    ``library`` is the linked shared object. Of a bundle that stands there the generated weights are used again, but for the
    files in ``changed`` (``dsr1build.link.verify``). It is replaced as a whole, or not touched at all
    if it is the same; on any error it stays as it is. A symbolic link there is followed and stays. Raises InvalidInput where
    something else than a bundle stands there or a weight does not fit, and EnvironmentUnfit where the file system refuses.
    """
    try:
        if destination.is_symlink():
            destination = destination.resolve()
        destination.parent.mkdir(parents=True, exist_ok=True)
        if destination.exists() and not (destination / MANIFEST).is_file() and any(destination.iterdir()):
            raise InvalidInput(
                "the directory for the bundle holds other files", where=str(destination), hint="Move them, or change `output`."
            )
        with work_directory(destination) as work:
            usable = {path: file for path, file in _weight_files(destination).items() if path not in changed}
            _fill(work, destination, usable, name, target, program, model, context, library)
            if not same_tree(work, destination):
                put_directory(work, destination)
    except OSError as error:
        raise EnvironmentUnfit(
            f"the bundle cannot be written: {error.strerror or error}",
            where=str(error.filename or destination),
            hint="Check the free space and the permissions of the output directory.",
        ) from error
    return destination


def _fill(
    work: Path,
    earlier_bundle: Path,
    earlier: Mapping[str, WeightFileInfo],
    name: str,
    target: TargetInfo,
    program: Program,
    model: Model,
    context: int,
    library: Path,
) -> None:
    code = library.read_bytes()
    library_name = f"model-{sha256_hex(code)[:16]}.so"
    (work / library_name).write_bytes(code)
    (work / "include").mkdir()
    shutil.copyfile(RUNTIME_DIRECTORY / "dsr1.h", work / "include" / "dsr1.h")
    placed = place_weights(work, earlier, earlier_bundle, program, model, context)
    files = [WeightFile(file.path, file.bytes) for file in placed.files]
    binding = write_binding(program, context, library_name, files, placed.placements)
    (work / BINDING).write_bytes(binding)
    manifest = Manifest(
        abi=ABI,
        name=name,
        architecture=model.architecture,
        target=target,
        library=LibraryInfo(file=library_name, bytes=len(code), sha256=sha256_hex(code)),
        program=program_digest(program).hex(),
        context=context,
        chunk=program.chunk,
        vocabulary=program.vocabulary,
        hidden=model.hidden,
        bos_token_ids=model.bos_token_ids,
        eos_token_ids=model.eos_token_ids,
        model=CountsInfo(parameters=model.counts.parameters, tensors=model.counts.tensors, bytes=model.counts.bytes),
        modes={"prefill": mode_info(program.prefill), "decode": mode_info(program.decode)},
        arena_bytes=program.arena_bytes,
        state_bytes=state_bytes(program, context),
        states=state_infos(program, context),
        kernels=kernel_infos(program),
        weights=WeightsInfo(
            binding=BINDING,
            binding_sha256=sha256_hex(binding),
            layout="rows",
            tensors=len(program.weights),
            files=placed.files,
        ),
        tokenizer=_copy_tokenizer(work, model),
    )
    (work / MANIFEST).write_bytes(manifest.to_bytes())


def _weight_files(bundle: Path) -> Mapping[str, WeightFileInfo]:
    """The weight files of a bundle by path; none if there is no bundle, or one of another version."""
    try:
        manifest = Manifest.model_validate_json((bundle / MANIFEST).read_bytes())
    except (FileNotFoundError, ValidationError):
        return {}
    return {file.path: file for file in manifest.weights.files}


def _copy_tokenizer(work: Path, model: Model) -> tuple[str, ...]:
    """Copy the checkpoint's tokenizer files to tokenizer/. Random weights have no directory and so no tokenizer."""
    if not model.directory:
        return ()
    found = tuple(name for name in TOKENIZER_FILES if (Path(model.directory) / name).is_file())
    for name in found:
        (work / "tokenizer").mkdir(exist_ok=True)
        shutil.copyfile(Path(model.directory) / name, work / "tokenizer" / name)
    return found
