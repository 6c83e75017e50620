"""Recipes of harnesses: how a program that others wrote is installed, started and pointed here.

A recipe is a shell script. It finds the policy at OPENAI_BASE_URL and ANTHROPIC_BASE_URL, the keys
in OPENAI_API_KEY and ANTHROPIC_API_KEY, and the task in AREAL_GYM_PROMPT; settings that a program
reads from files only are written by the script, into a folder of the episode. docs/harnesses.md
says which recipes were run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from areal_gym.errors import UnknownIdError, choices

_HOME = "AREAL_GYM_HOME=$(mktemp -d) && trap 'rm -rf \"$AREAL_GYM_HOME\"' EXIT\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Harness:
    """One program."""

    id: str
    program: str
    """The command that must be on the path."""
    script: str
    """The shell script that plays an episode."""
    install: str
    """Lines of a Dockerfile that install it: a layer of the task's image."""
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def argv(self) -> list[str]:
        """The command line: it says what is missing where the program is not installed."""
        missing = f"echo '{self.program} is not installed' >&2; exit 127"
        check = f"command -v {self.program} >/dev/null || {{ {missing}; }}\n"
        return ["/bin/sh", "-c", check + self.script]


_CODEX = """\
export CODEX_HOME=$AREAL_GYM_HOME
cat > "$CODEX_HOME/config.toml" <<END
model = "policy"
model_provider = "gateway"
web_search = "disabled"
[model_providers.gateway]
name = "gateway"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
[features]
apps = false
plugins = false
multi_agent = false
END
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox \\
  "$AREAL_GYM_PROMPT" </dev/null
"""

_OPENCODE = """\
export HOME=$AREAL_GYM_HOME OPENCODE_CONFIG=$AREAL_GYM_HOME/opencode.json
cat > "$OPENCODE_CONFIG" <<END
{"model": "gateway/policy", "small_model": "gateway/policy",
 "autoupdate": false, "share": "disabled", "agent": {"title": {"disable": true}},
 "provider": {"gateway": {"npm": "@ai-sdk/openai-compatible", "name": "gateway",
  "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
  "models": {"policy": {}}}}}
END
opencode run --model gateway/policy "$AREAL_GYM_PROMPT" </dev/null
"""

_OPENCLAW = """\
export HOME=$AREAL_GYM_HOME OPENCLAW_STATE_DIR=$AREAL_GYM_HOME
export OPENCLAW_CONFIG_PATH=$AREAL_GYM_HOME/openclaw.json
cat > "$OPENCLAW_CONFIG_PATH" <<END
{"agents": {"defaults": {"workspace": "$PWD", "skipBootstrap": true, "heartbeat": {"every": "0m"},
  "sandbox": {"mode": "off"}, "model": {"primary": "gateway/policy"}, "utilityModel": ""}},
 "tools": {"profile": "coding", "exec": {"host": "gateway", "mode": "full"}},
 "models": {"providers": {"gateway": {"baseUrl": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY",
  "api": "openai-completions", "request": {"allowPrivateNetwork": true},
  "models": [{"id": "policy", "name": "policy"}]}}}}
END
openclaw agent --local --agent main --message "$AREAL_GYM_PROMPT" </dev/null
"""

_HERMES = """\
export HERMES_HOME=$AREAL_GYM_HOME
cat > "$HERMES_HOME/config.yaml" <<END
model:
  {default: policy, provider: custom, base_url: "$OPENAI_BASE_URL", api_key: "$OPENAI_API_KEY"}
END
hermes chat --quiet --yolo --query "$AREAL_GYM_PROMPT" </dev/null
"""

_MINI = """\
export MSWEA_GLOBAL_CONFIG_DIR=$AREAL_GYM_HOME
mini --model policy --model-class litellm --task "$AREAL_GYM_PROMPT" --exit-immediately --yolo \\
  -c mini -c agent.cost_limit=0 -c model.cost_tracking=ignore_errors \\
  -c model.model_kwargs.custom_llm_provider=openai \\
  -c "model.model_kwargs.api_base=$OPENAI_BASE_URL" \\
  -c "model.model_kwargs.api_key=$OPENAI_API_KEY" </dev/null
"""

HARNESSES = {
    harness.id: harness
    for harness in (
        Harness(
            id="mini-swe-agent",
            program="mini",
            script=_HOME + _MINI,
            # litellm hangs in retries without mcp.
            install="RUN pip install --no-cache-dir mini-swe-agent==2.4.6 mcp",
            env={
                "MSWEA_CONFIGURED": "true",
                "MSWEA_SILENT_STARTUP": "true",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
        ),
        Harness(
            id="claude-code",
            program="claude",
            script=_HOME
            + "export CLAUDE_CONFIG_DIR=$AREAL_GYM_HOME\n"
            + 'claude --print --dangerously-skip-permissions "$AREAL_GYM_PROMPT" </dev/null\n',
            install="RUN npm install --global @anthropic-ai/claude-code",
            env={
                "ANTHROPIC_MODEL": "policy",
                "ANTHROPIC_SMALL_FAST_MODEL": "policy",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
                "IS_SANDBOX": "1",
            },
        ),
        Harness(
            id="codex",
            program="codex",
            script=_HOME + _CODEX,
            install="RUN npm install --global @openai/codex",
        ),
        Harness(
            id="opencode",
            program="opencode",
            script=_HOME + _OPENCODE,
            install="RUN npm install --global opencode-ai",
        ),
        Harness(
            id="openclaw",
            program="openclaw",
            script=_HOME + _OPENCLAW,
            install="RUN npm install --global openclaw",  # Node 24.16 or later
        ),
        Harness(
            id="hermes",
            program="hermes",
            script=_HOME + _HERMES,
            install="RUN pip install --no-cache-dir hermes-agent",
        ),
    )
}
"""The recipes by id."""


def harness_of(id: str) -> Harness:
    """Return the recipe with this id, or raise UnknownIdError."""
    if id not in HARNESSES:
        raise UnknownIdError(f"no harness {id!r}", hints=choices(id, HARNESSES))
    return HARNESSES[id]
