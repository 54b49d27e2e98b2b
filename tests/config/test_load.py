"""BUILD.yaml with the files that it names, on real directories."""

import os
from pathlib import Path

import pytest

from dsr1build.config.load import CheckpointSource, ConfigSource, load_build, shipped_names
from dsr1build.errors import InvalidInput

ROOT = Path(__file__).parents[2]
BUILD = """version: 1
name: r1
model: {config: model/config.json, weights: {random: {seed: 7}}}
recipe: deepseek_v3
targets: [x86-64-v3]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "BUILD.yaml").write_text(BUILD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    return tmp_path


def write(project: Path, old: str, new: str) -> None:
    text = (project / "BUILD.yaml").read_text()
    assert old in text
    (project / "BUILD.yaml").write_text(text.replace(old, new))


def message(path: str = "BUILD.yaml", **overrides: object) -> str:
    with pytest.raises(InvalidInput) as caught:
        load_build(path, **overrides)  # type: ignore[arg-type]
    return caught.value.render()


def test_shipped_files_by_name(project: Path) -> None:
    config = load_build("BUILD.yaml")
    assert config.file == project / "BUILD.yaml"
    assert config.recipe.name == "deepseek_v3"
    assert [target.name for target in config.targets] == ["x86-64-v3"]
    assert config.profile.name == "local"
    assert config.output == project / "dist"
    assert config.context is None and config.context_position is None
    assert isinstance(config.model, ConfigSource)
    assert (config.model.config, config.model.seed) == (project / "model" / "config.json", 7)
    assert str(config.model.position) == "BUILD.yaml:3:17"
    assert config.cache_directory == Path("/xdg/dsr1build")


def test_paths_are_relative_to_the_file_that_names_them(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "setup" / "caches").mkdir(parents=True)
    (project / "BUILD.yaml").rename(project / "setup" / "BUILD.yaml")
    (project / "setup" / "caches" / "near.yaml").write_text("version: 1\nname: near\nlocal: {directory: ../store}\n")
    text = (project / "setup" / "BUILD.yaml").read_text().replace("model/config.json", "../model/config.json")
    (project / "setup" / "BUILD.yaml").write_text(text + "cache: caches/near.yaml\noutput: ../out\ncontext: 99\n")
    monkeypatch.chdir("/")
    config = load_build(project / "setup" / "BUILD.yaml")
    assert config.cache_directory == project / "setup" / "store"
    assert config.output == project / "out"
    assert isinstance(config.model, ConfigSource) and config.model.config == project / "model" / "config.json"
    assert config.context == 99 and str(config.context_position).endswith("BUILD.yaml:8:10")


def test_checkpoint(project: Path) -> None:
    write(project, "{config: model/config.json, weights: {random: {seed: 7}}}", "{checkpoint: model}")
    model = load_build("BUILD.yaml").model
    assert isinstance(model, CheckpointSource) and model.directory == project / "model"


def test_overrides_are_relative_to_the_current_directory(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "here").mkdir()
    (project / "here" / "mine.yaml").write_text("version: 1\nname: mine\ntriple: aarch64-unknown-linux-gnu\ncpu: generic\n")
    (project / "here" / "cache.yaml").write_text("version: 1\nname: c\nlocal: {directory: store}\n")
    monkeypatch.chdir(project / "here")
    config = load_build("../BUILD.yaml", context=5, output="out", cache="cache.yaml", targets=["mine.yaml", "native"])
    assert config.output == project / "here" / "out"
    assert config.context == 5 and config.context_position is None
    assert [target.name for target in config.targets] == ["mine", "native"]
    assert config.cache_directory == project / "here" / "store"


@pytest.mark.parametrize(
    ("xdg", "expected"),
    [("/x/cache", "/x/cache/dsr1build"), ("", "/home/u/.cache/dsr1build"), ("rel", "/home/u/.cache/dsr1build")],
)
def test_default_cache_directory(project: Path, monkeypatch: pytest.MonkeyPatch, xdg: str, expected: str) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert load_build("BUILD.yaml").cache_directory == Path(expected)


def test_home_in_a_profile(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    (project / "c.yaml").write_text("version: 1\nname: c\nlocal: {directory: ~/store}\n")
    assert load_build("BUILD.yaml", cache="c.yaml").cache_directory == Path("/home/u/store")


def test_unknown_shipped_recipe(project: Path) -> None:
    write(project, "recipe: deepseek_v3", "recipe: deepseek_v4")
    assert message() == (
        "BUILD.yaml:4:9: error: no recipe named `deepseek_v4` ships with dsr1build\n"
        "    recipe: deepseek_v4\n"
        "            ^\n"
        "help: Did you mean deepseek_v3? There are deepseek_v3, llama, qwen2; for a file of your own write its path, for"
        " example ./deepseek_v4.yaml."
    )


def test_unknown_shipped_target(project: Path) -> None:
    write(project, "[x86-64-v3]", "[x86-64-v3, riscv]")
    assert message() == (
        "BUILD.yaml:5:22: error: no target named `riscv` ships with dsr1build\n"
        "    targets: [x86-64-v3, riscv]\n"
        "                         ^\n"
        "help: There are native, x86-64-v3; for a file of your own write its path, for example ./riscv.yaml."
    )


def write_recipe(project: Path, pipelines: str) -> None:
    shipped = (ROOT / "recipes" / "deepseek_v3.yaml").read_text()
    (project / "recipe.yaml").write_text(f"{shipped}pipelines:\n{pipelines}")
    write(project, "recipe: deepseek_v3", "recipe: ./recipe.yaml")


def test_pipelines_for_a_target_that_exists_nowhere(project: Path) -> None:
    write_recipe(project, "  native: {all: {passes: {optimize: -O2}}}\n  x86-64-v8: {all: {passes: {optimize: -O2}}}\n")
    line = len((project / "recipe.yaml").read_text().splitlines())
    assert message() == (
        f"recipe.yaml:{line}:3: error: pipelines has an entry for the target `x86-64-v8`, and there is no such target\n"
        "      x86-64-v8: {all: {passes: {optimize: -O2}}}\n"
        "      ^\n"
        "help: Did you mean x86-64-v3? There are native, x86-64-v3; a target of your own must be one that BUILD.yaml names,"
        " or lie beside it."
    )


@pytest.mark.parametrize("named", [True, False])
def test_pipelines_for_a_target_that_this_build_leaves_out(project: Path, named: bool) -> None:
    """It exists: BUILD.yaml names it and the command line another, or it lies beside one that BUILD.yaml names."""
    write_recipe(project, "  server: {all: {passes: {optimize: -O2}}}\n  desk: {all: {passes: {optimize: -O2}}}\n")
    target = (ROOT / "targets" / "x86-64-v3.yaml").read_text()
    (project / "targets").mkdir()
    for file, name in (("a.yaml", "server"), ("b.yaml", "laptop"), ("c.txt", "desk")):
        (project / "targets" / file).write_text(target.replace("name: x86-64-v3", f"name: {name}"))
    (project / "targets" / "notes.yaml").write_text("name: nothing\n")
    write(project, "[x86-64-v3]", f"[targets/{'a' if named else 'b'}.yaml]")
    config = load_build("BUILD.yaml", targets=["targets/c.txt"])
    assert [found.name for found in config.targets] == ["desk"] and list(config.recipe.pipelines) == ["server", "desk"]


def test_missing_recipe_file(project: Path) -> None:
    (project / "recipes").mkdir()
    (project / "recipes" / "mine.yaml").write_text("")
    write(project, "recipe: deepseek_v3", "recipe: recipes/nine.yaml")
    assert message() == (
        "BUILD.yaml:4:9: error: the recipe `recipes/nine.yaml` does not exist\n"
        "    recipe: recipes/nine.yaml\n"
        "            ^\n"
        "help: Did you mean mine.yaml?"
    )


def test_mistake_in_a_named_file_is_shown_there(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "recipes").mkdir()
    (project / "recipes" / "mine.yaml").write_text("version: 1\nname: no\n")
    write(project, "recipe: deepseek_v3", "recipe: recipes/mine.yaml")
    monkeypatch.chdir(project / "model")
    assert message("../BUILD.yaml") == (
        "../recipes/mine.yaml:2:7: error: `no` is the boolean false to some YAML readers and text to others\n"
        "    name: no\n"
        "          ^\n"
        'help: Write false for the boolean, or "no" in quotes for the text.'
    )


def test_recipe_that_is_a_directory(project: Path) -> None:
    write(project, "recipe: deepseek_v3", "recipe: ./model")
    assert message() == "model: error: this is a directory, not a file\nhelp: Name a YAML file inside it."


def test_missing_config(project: Path) -> None:
    write(project, "config.json", "confg.json")
    assert message() == (
        "BUILD.yaml:3:17: error: the configuration `model/confg.json` does not exist\n"
        "    model: {config: model/confg.json, weights: {random: {seed: 7}}}\n"
        "                    ^\n"
        "help: Did you mean config.json?"
    )


def test_config_that_is_a_directory(project: Path) -> None:
    write(project, "model/config.json", "model")
    assert message() == (
        "BUILD.yaml:3:17: error: the configuration `model` is not a file\n"
        "    model: {config: model, weights: {random: {seed: 7}}}\n"
        "                    ^\n"
        "help: Name a config.json, or use `checkpoint`."
    )


def test_missing_checkpoint(project: Path) -> None:
    write(project, "{config: model/config.json, weights: {random: {seed: 7}}}", "{checkpoint: nowhere/deeper}")
    assert message() == (
        "BUILD.yaml:3:21: error: the checkpoint directory `nowhere/deeper` does not exist\n"
        "    model: {checkpoint: nowhere/deeper}\n"
        "                        ^\n"
        "help: There is no directory nowhere that could be read either; check the path."
    )


def test_checkpoint_that_is_a_file(project: Path) -> None:
    write(project, "{config: model/config.json, weights: {random: {seed: 7}}}", "{checkpoint: model/config.json}")
    assert message() == (
        "BUILD.yaml:3:21: error: the checkpoint `model/config.json` is not a directory\n"
        "    model: {checkpoint: model/config.json}\n"
        "                        ^\n"
        "help: Name the directory that holds config.json."
    )


def test_path_that_is_too_long(project: Path) -> None:
    write(project, "recipe: deepseek_v3", f"recipe: ./{'x' * 300}")
    text = message()
    assert text.startswith("BUILD.yaml:4:9: error: `")
    assert "cannot be read: File name too long" in text


def test_equal_target_names(project: Path) -> None:
    write(project, "[x86-64-v3]", "[x86-64-v3, x86-64-v3]")
    assert message() == (
        "BUILD.yaml:5:22: error: the target `x86-64-v3` is named twice\n"
        "    targets: [x86-64-v3, x86-64-v3]\n"
        "                         ^\n"
        "help: Remove one; bundles of equal name would overwrite each other."
    )


def test_mistakes_in_options(project: Path) -> None:
    assert message(context=0) == (
        "--context: error: the context must be at least 1 token, but is 0\nhelp: Write a positive number."
    )
    assert message(targets=["x86-64-v4"]) == (
        "--target: error: no target named `x86-64-v4` ships with dsr1build\n"
        "help: Did you mean x86-64-v3? There are native, x86-64-v3; for a file of your own write its path, for example"
        " ./x86-64-v4.yaml."
    )
    assert message(cache="a/b.yaml") == (
        "--cache: error: the cache profile `a/b.yaml` does not exist\n"
        "help: There is no directory a that could be read either; check the path."
    )


@pytest.mark.parametrize("file", ["dist", "dist/sample", "dist/sample/x86-64-v3"])
def test_a_file_where_the_bundle_goes(project: Path, file: str) -> None:
    name = load_build("BUILD.yaml").build.name
    path = project / file.replace("sample", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    said = f"no bundle can be written to {project}/dist/{name}/x86-64-v3: {path} is a file\n"
    hint = "help: Name another directory as `output`."
    assert message(output="dist") == f"--output: error: {said}{hint}"
    assert message().startswith("BUILD.yaml:") and message().endswith(hint) and said in message()
    assert load_build("BUILD.yaml", output="elsewhere").output == project / "elsewhere"


def test_nothing_is_written(project: Path) -> None:
    before = sorted(project.rglob("*"))
    load_build("BUILD.yaml")
    write(project, "recipe: deepseek_v3", "recipe: nothing")
    message()
    assert sorted(project.rglob("*")) == before


def test_blanks_and_umlauts_in_paths(project: Path) -> None:
    place = project / "ein Mödell"
    os.renames(project / "model", place)
    write(project, "model/config.json", "ein Mödell/config.json")
    model = load_build("BUILD.yaml").model
    assert isinstance(model, ConfigSource) and model.config == place / "config.json"


def test_the_sample_of_the_repository() -> None:
    config = load_build(ROOT / "BUILD.yaml")
    assert (config.build.name, config.recipe.name, config.context) == ("r1-mini", "deepseek_v3", 512)
    assert config.output == ROOT / "dist"


@pytest.mark.parametrize("name", ["deepseek_v3", "llama", "qwen2"])
def test_shipped_recipes(project: Path, name: str) -> None:
    write(project, "recipe: deepseek_v3", f"recipe: {name}")
    recipe = load_build("BUILD.yaml").recipe
    assert recipe.name == name and recipe.architectures == (name,)
    kinds = [rule.kind for rule in recipe.partitions]
    assert kinds[:3] == ["embedding", "attention", "ffn"] and kinds[-1] == "head"


def test_shipped_names_are_what_their_files_say(project: Path) -> None:
    assert shipped_names("recipes") == ["deepseek_v3", "llama", "qwen2"]
    assert shipped_names("cache") == ["local"]
    targets = load_build("BUILD.yaml", targets=shipped_names("targets")).targets
    assert [target.name for target in targets] == shipped_names("targets")


def test_limits_and_time_outs_hold_where_nothing_is_said(project: Path) -> None:
    (project / "c.yaml").write_text("version: 1\nname: c\nremotes: [{url: https://cache.example.org/x}]\n")
    for profile in (load_build("BUILD.yaml").profile, load_build("BUILD.yaml", cache="c.yaml").profile):
        assert (profile.local.max_bytes, profile.local.max_files) == (20_000_000_000, 1_000_000)
    assert (profile.remotes[0].timeouts.connect, profile.remotes[0].timeouts.request) == (2.0, 10.0)
    assert profile.remotes[0].mode == "read"
