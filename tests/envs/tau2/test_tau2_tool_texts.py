"""Tool descriptions: the built-in ones, or those of a given file."""

import copy
import json

import pytest

import areal_gym
from areal_gym.cli.app import run
from areal_gym.envs.tau2.domain_state import load_tools
from areal_gym.envs.tau2.sources import read_tools, without_descriptions
from areal_gym.envs.tau2.verdict_replay import replay
from areal_gym.errors import DataError, UsageError
from tests._support.tau2_data import DATA, FIXTURES, needs_data, needs_fixtures

DOMAINS = ("retail", "airline", "telecom")


def arguments_of(schema):
    """Yield every argument's schema, including those of nested objects."""
    for node in (schema, *schema.get("$defs", {}).values()):
        yield from node.get("properties", {}).values()


def texts_in(node):
    if isinstance(node, dict):
        if isinstance(node.get("description"), str):
            yield node["description"]
        node = list(node.values())
    if isinstance(node, list):
        for value in node:
            yield from texts_in(value)


def rows_of(domain):
    """Return the built-in tools as rows of a file, with each text in capitals."""
    rows = {
        side: {name: {"openai_schema": copy.deepcopy(info.schema)} for name, info in tools.items()}
        for side, tools in load_tools(domain).items()
    }
    for tools in rows.values():
        for row in tools.values():
            function = row["openai_schema"]["function"]
            function["description"] = function["description"].upper()
    return {domain: rows}


def write_rows(tmp_path, rows):
    file = tmp_path / "texts.json"
    file.write_text(json.dumps(rows))
    return file


@pytest.mark.parametrize("domain", [*DOMAINS, "mock"])
def test_every_tool_and_argument_has_a_description(domain):
    for tools in load_tools(domain).values():
        for name, info in tools.items():
            assert len(info.tool.description) > 10, name
            for argument in arguments_of(info.tool.parameters):
                assert len(argument.get("description", "")) > 5, (name, argument)


@needs_fixtures
def test_own_descriptions_differ_from_tau2_bench():
    theirs = json.loads((FIXTURES / "tool_schemas.json").read_bytes())
    known = {text for domain in DOMAINS for text in texts_in(theirs[domain])}
    ours = {
        text
        for domain in DOMAINS
        for tools in load_tools(domain).values()
        for info in tools.values()
        for text in texts_in(info.schema)
    }
    assert len(known) > 100
    assert not known & ours


@needs_fixtures
@pytest.mark.parametrize("domain", DOMAINS)
def test_given_tool_texts_make_the_exact_tau2_bench_schemas(domain):
    file = FIXTURES / "tool_schemas.json"
    theirs = json.loads(file.read_bytes())[domain]
    env = areal_gym.make(
        f"tau2/{domain}", data_dir=str(DATA), tool_texts=str(file), solo=domain == "telecom"
    )
    expected = [row["openai_schema"] for row in theirs["assistant"].values()]
    if domain == "telecom":
        expected += [row["openai_schema"] for row in theirs["user"].values()]
    got = [tool.schema() for tool in env.unwrapped.tools][: len(expected)]
    assert json.dumps(got) == json.dumps(expected)
    assert env.unwrapped.metadata["tau2_tool_texts"] == "given"


@needs_data
def test_tool_texts_in_the_data_directory_are_used(tmp_path):
    (tmp_path / "tau2").mkdir()
    for name in ("domains", "user_simulator"):
        (tmp_path / "tau2" / name).symlink_to(DATA / "tau2" / name)
    own = areal_gym.make("tau2/retail", data_dir=str(tmp_path)).unwrapped
    assert own.metadata["tau2_tool_texts"] == "own"
    (tmp_path / "tau2" / "tool_schemas.json").write_text(json.dumps(rows_of("retail")))
    given = areal_gym.make("tau2/retail", data_dir=str(tmp_path)).unwrapped
    assert given.metadata["tau2_tool_texts"] == "given"
    assert [tool.description for tool in given.tools] == [
        tool.description.upper() for tool in own.tools
    ]


def test_tool_texts_file_covers_agent_and_user(tmp_path):
    ours = load_tools("telecom")
    given = read_tools(write_rows(tmp_path, rows_of("telecom")), "telecom")
    for side, tools in given.items():
        for name, info in tools.items():
            old = ours[side][name]
            assert info.schema["function"]["description"] == old.tool.description.upper()
            assert (info.kind, info.mutates) == (old.kind, old.mutates)
    assert len(given["user"]) == 30


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("{", "line 1"),
        ("[]", "lacks something of tau2/retail"),
        ("{}", "lacks something of tau2/retail: 'retail'"),
        ('{"retail": {"assistant": {}}}', "'calculate'"),
    ],
)
def test_wrong_tool_texts_file_is_refused(tmp_path, content, message):
    file = tmp_path / "texts.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=message):
        read_tools(file, "retail")


def test_tool_texts_cannot_change_parameters(tmp_path):
    rows = rows_of("retail")
    function = rows["retail"]["assistant"]["calculate"]["openai_schema"]["function"]
    function["parameters"]["required"] = []
    with pytest.raises(DataError, match="'calculate' takes other arguments"):
        read_tools(write_rows(tmp_path, rows), "retail")


def test_mock_domain_refuses_tool_texts(tmp_path):
    with pytest.raises(UsageError, match="takes no tool_texts"):
        areal_gym.make("tau2", tool_texts=str(tmp_path))


@needs_fixtures
def test_check_compares_schemas_without_descriptions(tmp_path, capsys, monkeypatch):
    theirs = json.loads((FIXTURES / "tool_schemas.json").read_bytes())
    function = theirs["airline"]["assistant"]["calculate"]["openai_schema"]["function"]
    function["description"] = "Another text."
    (tmp_path / "tool_schemas.json").write_text(json.dumps(theirs))
    (agreement,) = replay(tmp_path, domains=("airline",), data_dir=DATA)
    assert agreement.is_complete
    assert agreement.counts["tool schemas (without descriptions)"] == 14
    monkeypatch.setenv("TAU2_DATA_DIR", str(DATA))
    assert run(["check", "tau2/airline", "--fixtures", str(tmp_path), "--json"]) == 0
    assert "tool schemas (without descriptions)" in capsys.readouterr().out
    function["parameters"] = dict(reversed(function["parameters"].items()))
    (tmp_path / "tool_schemas.json").write_text(json.dumps(theirs))
    (agreement,) = replay(tmp_path, domains=("airline",), data_dir=DATA)
    assert agreement.num_differences == 1


def test_argument_named_description_is_kept():
    schema = {"properties": {"description": {"type": "string", "description": "What it is."}}}
    assert without_descriptions(schema) == {"properties": {"description": {"type": "string"}}}
