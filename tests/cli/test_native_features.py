"""What `native` means on this machine is asked of the machines that build for it."""

import argparse
from pathlib import Path

from dsr1build.cli.executing import add_execution_arguments, execution_options, native_features
from dsr1build.config.schema import Target
from dsr1build.execute import dask_executor
from dsr1build.toolchains.cpu import LEVELS, host_features


def target(cpu, *features):
    return Target(version=1, name=f"a-{cpu}", triple="x86_64-unknown-linux-gnu", cpu=cpu, features=features)


def test_only_native_asks_for_a_cpu():
    assert native_features([target("x86-64-v3")]) == []
    found = native_features([target("x86-64-v4"), target("native", "-sse3")])
    assert set(LEVELS["x86-64"]) <= set(found) <= host_features() and "sse3" not in found


def test_the_dask_executor_is_told_when_it_is_opened(monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(dask_executor, "open_dask", lambda where, **options: told.append((where, options["features"])))
    parser = argparse.ArgumentParser()
    add_execution_arguments(parser)
    asked = []

    def features():
        asked.append(True)
        return ["avx2"]

    options = execution_options(parser.parse_args(["--executor", "dask://host:8786"]), Path("BUILD.yaml"), features)
    assert not asked and options.executor is not None
    options.executor(tmp_path, print)
    assert told == [("dask://host:8786", ["avx2"])]
