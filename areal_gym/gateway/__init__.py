"""Serves a policy through the APIs of OpenAI and Anthropic; start reading at `gateway_server`.

    gateway_server    the HTTP server
    routes            the table of routes
    session_registry  secrets, sessions and calls
    session           the completions of one episode
    completions       what requests and replies of all APIs have in common
    openai_*, anthropic_messages    request and reply formats of each API

Nothing here is imported before a gateway is opened.
"""
