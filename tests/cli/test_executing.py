"""The options of `build` that say how actions run: what they mean, and what is refused."""

import argparse
from pathlib import Path

import pytest

from dsr1build.cli.executing import add_execution_arguments, execution_options
from dsr1build.errors import Dsr1Error, InvalidInput
from dsr1build.execute.resources import usable_memory


def options(*words):
    parser = argparse.ArgumentParser()
    add_execution_arguments(parser)
    return execution_options(parser.parse_args(list(words)), Path("place/BUILD.yaml"))


def test_what_stands_where_nothing_is_said():
    plain = options()
    assert (plain.jobs, plain.keep_going, plain.memory, plain.executor, plain.fallback) == (0, False, 0, None, False)
    assert plain.limits.seconds == 1800 and plain.limits.memory == 4 << 30
    assert plain.failures == Path("place/.dsr1build/failures") and not plain.retry_failed


def test_each_option_says_what_it_says():
    told = options("-j", "3", "-k", "--timeout", "90.5", "--memory", "8GiB", "--retry-failed", "--save-temps", "temps")
    assert (told.jobs, told.keep_going, told.limits.seconds, told.memory) == (3, True, 90.5, 8 << 30)
    assert told.retry_failed and told.save_temps == Path("temps")
    assert options("--memory", "50%").memory == usable_memory() // 2
    assert options("--executor", "local").executor is None
    assert options("--executor", "dask://host:8786", "--remote-fallback").fallback
    assert options("--executor", "dask://host:8786").executor is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-j", "0"], "dsr1build build: error: -j 0 runs nothing\nhelp: Write a number from 1."),
        (["--timeout", "0"], "--timeout: error: 0 is no number of seconds\nhelp: Write seconds from 1 to 604800."),
        (["--timeout", "nan"], "--timeout: error: nan is no number of seconds\nhelp: Write seconds from 1 to 604800."),
        (["--timeout", "1h"], "--timeout: error: 1h is no number of seconds\nhelp: Write seconds from 1 to 604800."),
        (["--memory", "0%"], "--memory: error: 0% is no part of the memory\nhelp: Write 1% to 100%, or a size as 8GiB."),
        (["--memory", "1000"], "--memory: error: 1000 is too little for any action\nhelp: Write at least 1MiB."),
        (
            ["--executor", "ftp://x"],
            "--executor: error: ftp://x names no executor\nhelp: Write local, dask://HOST:PORT or dask+tls://HOST:PORT.",
        ),
        (
            ["--remote-fallback"],
            "dsr1build build: error: --remote-fallback is for an executor elsewhere\nhelp: Name one with --executor.",
        ),
        (
            ["--executor-ca", "ca.pem"],
            "dsr1build build: error: --executor-ca is for an executor elsewhere\nhelp: Name one with --executor.",
        ),
    ],
)
def test_what_is_refused(words, message):
    with pytest.raises(InvalidInput) as refused:
        options(*words)
    assert refused.value.render() == message


def test_a_wrong_address_of_a_cluster_is_refused_before_anything_runs(tmp_path):
    opener = options("--executor", "dask://nowhere").executor
    assert opener is not None
    with pytest.raises(Dsr1Error):
        opener(tmp_path, print)
