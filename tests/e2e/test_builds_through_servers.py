"""The sample built once and uploaded, signed, to real servers; other machines take all of it from either of them."""

import base64
import contextlib
import json
import sys
from pathlib import Path

import pytest
from test_incremental_builds import copy_workspace, generate, run_build, summary
from test_shared_builds import dsr1build, files_of

from dsr1build.cache.store import LocalStore

sys.path.insert(0, str(Path(__file__).parents[1] / "cache" / "remotes"))
import servers_http
import servers_reapi

pytestmark = pytest.mark.slow

PASSWORD = base64.b64encode(f"{servers_http.NGINX_USER}:{servers_http.NGINX_PASSWORD}".encode()).decode()
AUTHORIZATION = {"CACHE_AUTHORIZATION": f"Basic {PASSWORD}"}


def write_profile(workspace, remotes, mode, public, key=None):
    profile = {"version": 1, "name": "shared", "remotes": [], "trust": {"keys": [public]}}
    for kind, url in remotes.items():
        remote = {"url": url, "mode": mode}
        # A server that has to write first may take longer on a machine that compiles beside it.
        remote["timeouts"] = {"connect": 10, "request": 60}
        if kind == "nginx" and mode == "read-write":
            remote["headers_from_env"] = {"authorization": "CACHE_AUTHORIZATION"}
        profile["remotes"].append(remote)
    if key is not None:
        profile["trust"]["signing_key"] = str(key)
    # JSON is YAML.
    (workspace / "cache" / "local.yaml").write_text(json.dumps(profile, indent=1))


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory):
    """The root directory of the first machine, its build's summary, the running servers' URLs and how to stop each."""
    root = tmp_path_factory.mktemp("machine-a")
    with contextlib.ExitStack() as both:
        urls, stop = {}, {}
        for kind, run in (("casd", servers_reapi.run_casd), ("nginx", servers_http.run_nginx)):
            (root / kind).mkdir()
            own = both.enter_context(contextlib.ExitStack())
            server = own.enter_context(run(root / kind))
            urls[kind] = server.url() if kind == "casd" else server.url
            stop[kind] = own.close
        made = dsr1build("cache", "key", "new", "--output", str(root / "key.pem"))
        assert made.returncode == 0, made.stderr
        (root / "public").write_text(made.stdout.strip())
        workspace = copy_workspace(root / "workspace")
        write_profile(workspace, urls, "read-write", made.stdout.strip(), root / "key.pem")
        out = run_build(workspace, root / "xdg", "--json", **AUTHORIZATION)
        assert warnings(out) == []
        yield root, summary(out), urls, stop


def warnings(out):
    events = [json.loads(line) for line in out.splitlines()]
    return [event for event in events if event["event"] == "warning"]


@pytest.mark.parametrize("kind", ["casd", "nginx"])
def test_a_second_machine_compiles_nothing_and_a_dead_server_costs_one_warning(uploaded, tmp_path, kind):
    root, built, urls, stop = uploaded
    assert built["compiled"] > 0
    workspace = copy_workspace(tmp_path / "workspace")
    write_profile(workspace, {kind: urls[kind]}, "read", (root / "public").read_text())
    out = run_build(workspace, tmp_path / "xdg", "--json")
    done = summary(out)
    assert (done["executed"], done["hits"]) == (0, {"local": 0, "remote": built["executed"]})
    assert warnings(out) == []
    bundle, original = workspace / "dist/r1-mini/x86-64-v3", root / "workspace/dist/r1-mini/x86-64-v3"
    assert files_of(bundle) == files_of(original)
    assert generate(bundle) == generate(original)

    stop[kind]()
    with LocalStore(tmp_path / "xdg" / "dsr1build", pytest.fail) as store:
        links = [key for key, entry in store.entries().items() if entry.kind == "link"]
        assert links
        for key in links:
            manifest = store.entries()[key].manifest
            store.files.manifests.path(manifest).unlink()
    out = run_build(workspace, tmp_path / "xdg", "--json")
    done = summary(out)
    assert (done["compiled"], done["executed"], done["hits"]["remote"]) == (0, len(links), 0)
    assert len(warnings(out)) == 1
    assert urls[kind].partition("://")[2].partition("/")[0] in warnings(out)[0]["message"]
    assert files_of(bundle) == files_of(original)
