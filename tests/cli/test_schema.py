import json

import jsonschema
import pytest

from dsr1build.cli.main import main
from dsr1build.cli.schema import FILES, OUTPUTS, schema_of
from dsr1build.config import json_schema


@pytest.mark.parametrize("what", [*FILES, *OUTPUTS])
def test_prints_a_valid_schema(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", what]) == 0
    printed = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(printed)
    assert printed == schema_of(what)


def test_files_are_those_of_the_configuration() -> None:
    assert tuple(json_schema.FILES) == FILES
