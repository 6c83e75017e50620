"""Serve a policy through the APIs of OpenAI and Anthropic; start reading at `gateway_server`.

    gateway_server    the HTTP server
    routes            the table of routes
    session_registry  secrets, sessions and calls
    session           the completions of one episode
    completions       requests and completions, independent of the API
    openai_*, anthropic_messages    the request and reply formats of each API

These modules are imported only when a gateway is opened.
"""
