"""Discovery, fault isolation, lookup: with plugins made on the spot, no entry points needed."""

import subprocess
import sys
import tomllib
import types
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_gym.errors import DuplicateIdError, PluginError, UnknownIdError, UsageError
from areal_gym.plugins import (
    KINDS,
    AgentSpec,
    Candidate,
    EnvSpec,
    HookSpecs,
    PluginManager,
    PolicyLossSpec,
    Registry,
    hookimpl,
    registry,
    set_registry,
)
from areal_gym.plugins.manager import BUILT_IN, discover
from areal_gym.plugins.registry import as_kind
from tests._support.paths import ROOT


def env_spec(id="dice", entry_point="collections:OrderedDict", **more):
    return EnvSpec(id=id, entry_point=entry_point, summary="guess the sum", **more)


def plugin(**hooks):
    """A plugin module with these hooks, each given as a function."""
    module = types.ModuleType("a_plugin")
    for name, function in hooks.items():
        setattr(module, name, hookimpl(function))
    return module


def with_env(*specs):
    return plugin(register_envs=lambda: specs)


def candidate(target, name="mine", distribution="my-dist", version="1.2"):
    return Candidate(name=name, target=target, distribution=distribution, version=version)


def registry_of(*targets):
    return Registry(
        PluginManager(candidate(target, name=f"p{i}") for i, target in enumerate(targets))
    )


def test_spec_is_registered_with_its_plugin():
    entry = registry_of(with_env(env_spec())).get("envs", "dice")
    assert entry.id == "dice"
    assert str(entry.plugin) == "p0 (my-dist 1.2)"
    assert entry.to_dict()["distribution"] == "my-dist"
    assert entry.plugin.status == "loaded"


def test_loading_imports_on_use():
    found = registry_of(with_env(env_spec(entry_point="collections:OrderedDict.fromkeys")))
    assert found.load("envs", "dice")("ab") == {"a": None, "b": None}


def test_hooks_may_yield_or_return():
    def register_envs():
        yield env_spec("one")
        yield env_spec("two")

    found = registry_of(plugin(register_envs=register_envs), with_env(env_spec("three")))
    assert [entry.id for entry in found.entries("envs")] == ["one", "three", "two"]


def test_duplicate_id_names_both_distributions_and_versions():
    manager = PluginManager(
        [
            candidate(with_env(env_spec(), env_spec("other")), "a", "first-dist", "1.0"),
            candidate(with_env(env_spec()), "b", "second-dist", "2.0"),
        ]
    )
    found = Registry(manager)
    with pytest.raises(DuplicateIdError) as caught:
        found.get("envs", "dice")
    assert "a (first-dist 1.0)" in str(caught.value)
    assert "b (second-dist 2.0)" in str(caught.value)
    assert caught.value.exit_code == 4
    assert "-p no:b" in caught.value.hints[0]
    with pytest.raises(DuplicateIdError):
        found.check_duplicates("envs")
    # The rest of both plugins serves.
    assert found.get("envs", "other").plugin.name == "a"


def test_same_id_in_two_kinds_is_allowed():
    found = registry_of(
        plugin(
            register_envs=lambda: [env_spec("x")],
            register_agents=lambda: [AgentSpec(id="x", entry_point="a:b", summary="s")],
        )
    )
    found.check_duplicates("envs")
    assert found.get("agents", "x").spec.kind == "agent"


def test_unknown_id_is_refused_with_suggestions():
    with pytest.raises(UnknownIdError) as caught:
        registry_of(with_env(env_spec())).get("envs", "dicee")
    assert str(caught.value) == "no environment 'dicee'"
    assert caught.value.hints == ("did you mean 'dice'?", "see all: areal-gym list envs")


def failing():
    raise RuntimeError("no luck\nsecond line")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
        (plugin(register_envs=failing), "register_envs: RuntimeError: no luck"),
        (plugin(register_envs=lambda: sys.exit(3)), "SystemExit"),
        (plugin(register_envs=lambda: None), "yield specs"),
        (plugin(register_envs=lambda: ["dice"]), "a str"),
        (
            plugin(register_envs=lambda: [PolicyLossSpec(id="x", entry_point="a:b", summary="")]),
            "a PolicyLossSpec",
        ),
        (with_env(env_spec("two words")), "'two words' is not a valid id"),
        (with_env(env_spec(entry_point="no_colon")), "is not an entry point"),
        (plugin(register_env=lambda: []), "did you mean 'register_envs'"),
        (plugin(register_envs=lambda unknown: []), "PluginValidationError"),
        (types.ModuleType("empty"), "@hookimpl"),
    ],
)
def test_broken_plugin_is_kept_with_its_error_and_others_load(target, reason):
    manager = PluginManager([candidate(target, "bad"), candidate(with_env(env_spec()), "good")])
    (bad,) = manager.failed
    assert bad.name == "bad"
    assert bad.status == "failed"
    assert reason in bad.problems[0]
    assert "\n" not in bad.problems[0]
    assert Registry(manager).get("envs", "dice").plugin.name == "good"
    with pytest.raises(UnknownIdError) as caught:
        Registry(manager).get("envs", "chess")
    assert any("bad (my-dist 1.2)" in hint and reason in hint for hint in caught.value.hints)


def test_plugin_with_syntax_error_is_kept_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "broken_syntax_plugin.py").write_text("def register_envs(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    manager = PluginManager([candidate("broken_syntax_plugin")])
    assert "SyntaxError" in manager.failed[0].problems[0]


def test_missing_hookimpl_is_reported():
    module = with_env(env_spec())
    module.register_agents = lambda: []
    manager = PluginManager([candidate(module)])
    assert manager.plugins[0].problems == ("register_agents is not marked with @hookimpl",)
    assert manager.plugins[0].status == "partly loaded"
    assert Registry(manager).get("envs", "dice")


def test_working_hooks_of_a_partly_broken_plugin_are_used():
    target = plugin(register_envs=lambda: [env_spec()], register_agents=failing)
    found = registry_of(target)
    assert found.get("envs", "dice").plugin.status == "partly loaded"


def test_plugins_can_be_blocked_and_restricted():
    pair = [candidate(with_env(env_spec("one")), "a"), candidate(with_env(env_spec("two")), "b")]
    blocked = Registry(PluginManager(pair, blocked=["a"]))
    assert [entry.id for entry in blocked.entries("envs")] == ["two"]
    assert blocked.manager.plugins[0].status == "blocked"
    with pytest.raises(UnknownIdError) as caught:
        blocked.get("envs", "one")
    assert any("a (my-dist 1.2) is blocked" in hint for hint in caught.value.hints)
    restricted = Registry(PluginManager(pair, only=["a"]))
    assert [entry.id for entry in restricted.entries("envs")] == ["one"]


def test_mistyped_plugin_name_is_refused():
    manager = PluginManager([candidate(with_env(env_spec()), "countdown")], blocked=["coutdown"])
    assert manager.notices == ["no plugin is named 'coutdown'; did you mean 'countdown'?"]


def test_blocked_plugin_is_not_imported():
    manager = PluginManager([candidate("no_such_module_anywhere", "a")], blocked=["a"])
    assert not manager.failed


def test_missing_requirement_is_listed_and_explained():
    entry = registry_of(with_env(env_spec(requires=("json", "nowhere_to_be_found")))).get(
        "envs", "dice"
    )
    assert entry.missing == ("nowhere_to_be_found",)
    with pytest.raises(UsageError, match="needs nowhere_to_be_found"):
        entry.load()


@pytest.mark.parametrize("entry_point", ["collections:Nothing", "no_such_module:Thing"])
def test_broken_entry_point_names_the_plugin(entry_point):
    found = registry_of(with_env(env_spec(entry_point=entry_point)))
    with pytest.raises(PluginError, match=r"p0 \(my-dist 1\.2\)") as caught:
        found.load("envs", "dice")
    assert caught.value.exit_code == 4


def test_make_merges_arguments_and_explains_wrong_ones():
    found = registry_of(
        with_env(env_spec(entry_point="fractions:Fraction", kwargs={"numerator": 1}))
    )
    assert found.make("envs", "dice", denominator=3) == Fraction(1, 3)
    assert found.make("envs", "dice", numerator=2, denominator=3) == Fraction(2, 3)
    strict = registry_of(with_env(env_spec(entry_point="fractions:Fraction")))
    with pytest.raises(UsageError, match="nominator") as caught:
        strict.make("envs", "dice", nominator=1)
    assert any("numerator" in hint for hint in caught.value.hints)


def test_every_kind_has_a_hook():
    hooks = {name for name in vars(HookSpecs) if name.startswith("register_")}
    assert {spec.hook for spec in KINDS.values()} == hooks
    with pytest.raises(UsageError) as caught:
        as_kind("env")
    assert caught.value.hints[0] == "did you mean 'envs'?"


NEW_KIND = """
import types
from collections.abc import Iterable
from areal_gym.cli.app import run
from areal_gym.plugins import Candidate, PluginManager, Registry, Spec, hookimpl, set_registry


class VerifierSpec(Spec, kind="verifier", plural="verifiers"):
    'A verifier: a function of a text.'


@hookimpl
def register_verifiers() -> Iterable[VerifierSpec]:
    yield VerifierSpec(id="upper", entry_point="builtins:str.isupper", summary="capital letters")


module = types.ModuleType("my_plugin")
module.register_verifiers = register_verifiers
found = Registry(PluginManager([Candidate(name="mine", target=module)]))
assert found.manager.failed == []
assert found.load("verifiers", "upper")("ABC")
set_registry(found)
assert run(["list", "verifiers"]) == 0
"""


def test_new_kind_is_one_class_statement():
    done = subprocess.run(
        [sys.executable, "-c", NEW_KIND], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "1 verifier from 1 plugin\n")
    assert done.stdout.split() == ["upper", "capital", "letters", "mine", "(not", "installed)"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_hook_documents_a_working_example(kind):
    example = getattr(HookSpecs, kind.hook).__doc__.partition("Example::")[2]
    scope = {"hookimpl": hookimpl, kind.__name__: kind, "Iterable": list}
    exec(__import__("textwrap").dedent(example), scope)
    module = types.ModuleType("example")
    setattr(module, kind.hook, scope[kind.hook])
    manager = PluginManager([candidate(module)])
    assert manager.plugins[0].status == "loaded"
    assert isinstance(manager.registrations[0].spec, kind)


def test_built_ins_use_the_public_entry_points():
    pyproject = ROOT / "pyproject.toml"
    declared = tomllib.loads(pyproject.read_text())["project"]["entry-points"]["areal_gym"]
    assert declared == dict(BUILT_IN)


def test_discovery_is_sorted_and_finds_the_built_ins():
    found = discover()
    assert found == sorted(found, key=lambda c: (c.distribution, c.name))
    assert set(BUILT_IN) <= {c.name for c in found if c.distribution == "areal-gym"}


def test_all_built_ins_load():
    assert [p for p in registry().manager.failed if p.distribution == "areal-gym"] == []
    for kind in KINDS:
        registry().check_duplicates(kind)


def test_environment_variable_restricts_plugins(monkeypatch):
    monkeypatch.setenv("AREAL_GYM_PLUGINS", "envs, agents")
    loaded = {p.name for p in PluginManager.installed().plugins if not p.is_blocked}
    assert loaded == {"envs", "agents"}
    monkeypatch.setenv("AREAL_GYM_PLUGINS", "")
    assert PluginManager.installed().registrations == []


def test_set_registry_replaces_the_default_until_reset():
    mine = registry_of(with_env(env_spec()))
    set_registry(mine)
    try:
        assert registry() is mine
    finally:
        set_registry(None)
    assert registry() is not mine


def test_listing_imports_no_implementation():
    code = (
        "import sys; from areal_gym.plugins import KINDS, registry; "
        "[registry().entries(kind) for kind in KINDS]; "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "gymnasium", "pydantic", "numpy"} & set(
        done.stdout.split()
    )


@given(st.lists(st.sampled_from("abcdef"), max_size=12))
def test_id_is_registered_if_exactly_one_plugin_claims_it(ids):
    found = registry_of(*(with_env(env_spec(id)) for id in ids))
    for id in "abcdef":
        match ids.count(id):
            case 0:
                with pytest.raises(UnknownIdError):
                    found.get("envs", id)
            case 1:
                assert found.get("envs", id).id == id
            case _:
                with pytest.raises(DuplicateIdError):
                    found.get("envs", id)
