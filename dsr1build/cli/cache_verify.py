"""``dsr1build cache verify``: read everything in the cache, and make a sample of it again."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import quoteattr

from dsr1build.cli.caches import add_cache_arguments, chosen_profile, open_store
from dsr1build.errors import EnvironmentUnfit, InvalidInput

if TYPE_CHECKING:
    from dsr1build.cache.checks import Fault
    from dsr1build.execute.recompute import Recomputed

SUMMARY = "read every file of the cache and, on demand, compile a sample again"
EPILOG = """Damaged files are set aside; the next build makes them again. Exit code 4 where something was wrong.

examples:
  dsr1build cache verify
  dsr1build cache verify --repair
  dsr1build cache verify --recompute 20 --seed 7 --junit verify.xml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repair", action="store_true", help="then make the index again from the files; exit code 0 if it can be"
    )
    parser.add_argument("--recompute", type=int, default=0, metavar="N", help="make N results again and compare them bit by bit")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="choose the sample by this number (default: 0)")
    parser.add_argument("-j", "--jobs", type=int, metavar="N", help="run N actions at once (default: the CPUs that may be used)")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the outcome as JUnit XML")
    add_cache_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from dsr1build.cache.checks import verify_store
    from dsr1build.execute.options import Options
    from dsr1build.execute.recompute import recompute_sample

    for option, value in (("--recompute", arguments.recompute), ("-j", 0 if arguments.jobs is None else arguments.jobs - 1)):
        if value < 0:
            raise InvalidInput(f"{option} takes a positive number", where="dsr1build cache verify", hint="Write a number from 1.")
    config = chosen_profile(arguments)
    with open_store(config.cache_directory, config.profile) as store:
        results, faults = verify_store(store)
        indexed = store.rebuild_index() if arguments.repair and results else None
        made = []
        if arguments.recompute:
            made = recompute_sample(store, arguments.recompute, arguments.seed, Options(jobs=arguments.jobs or 0))
    different = [one for one in made if one.differs]
    if arguments.junit is not None:
        write_junit(arguments.junit, results, faults, made)
    if arguments.json:
        print(
            json.dumps(
                {
                    "results": results,
                    "faults": [{"key": f.key, "what": f.name, "reason": f.reason} for f in faults],
                    "indexed": indexed,
                    "recomputed": [{"key": m.key, "kind": m.kind, "label": m.label, "differs": m.differs} for m in made],
                }
            )
        )
    else:
        for fault in faults:
            print(f"{fault.reason}: {fault.name}, {fault.key}")
        print(f"{results} results read, {len(faults)} files wrong")
        if indexed is not None:
            print(f"the index was made again: {indexed} results")
        for one in different:
            print(f"{one.kind} {one.label}: {one.differs}, {one.key}")
        if arguments.recompute:
            print(f"{len(made)} results made again, {len(different)} differ")
    return 4 if different or (faults and not arguments.repair) else 0


def write_junit(file: Path, results: int, faults: "Sequence[Fault]", made: "Sequence[Recomputed]") -> None:
    """One test case for the files as a whole, one for each fault, one for each result that was made again.

    Raises EnvironmentUnfit where the file cannot be written.
    """
    cases = [("files", f"{results} results read", "")]
    cases += [("files", f"{fault.name} {fault.key}", fault.reason) for fault in faults]
    cases += [("recompute", f"{one.kind} {one.label} {one.key[:16]}", one.differs) for one in made]
    lines = ['<?xml version="1.0" encoding="UTF-8"?>']
    failures = sum(bool(failure) for _, _, failure in cases)
    lines.append(f'<testsuite name="dsr1build cache verify" tests="{len(cases)}" failures="{failures}">')
    for group, name, failure in cases:
        head = f"  <testcase classname={quoteattr(f'dsr1build.cache.{group}')} name={quoteattr(name)}"
        lines.append(f"{head}><failure message={quoteattr(failure)}/></testcase>" if failure else f"{head}/>")
    try:
        file.write_text("\n".join([*lines, "</testsuite>", ""]), encoding="utf-8")
    except OSError as error:
        raise EnvironmentUnfit(
            f"the report cannot be written: {error.strerror}",
            where=str(file),
            hint="Name a file in a directory that you may write.",
        ) from None
