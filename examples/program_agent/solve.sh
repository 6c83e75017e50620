#!/bin/sh
# An agent that is a shell program; it needs curl and jq.
#
#   areal-gym train --env math --agent program "agent.kwargs.command=sh examples/program_agent/solve.sh"
#
# It finds the policy where it would find OpenAI, reads the question on its standard input, asks,
# asks whether the policy is sure, and prints the second answer.
set -eu

ask() {
    curl --silent --show-error --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
        -H "Authorization: Bearer $OPENAI_API_KEY" -d "{\"model\": \"gpt-4o\", \"messages\": $1}" |
        jq .choices[0].message
}

messages=$(jq -c .messages)
first=$(ask "$messages")
again='{"role": "user", "content": "Are you sure? Say it again, with the result in a box."}'
messages=$(printf '%s' "$messages" | jq -c ". + [$first, $again]")
ask "$messages" | jq -r .content
