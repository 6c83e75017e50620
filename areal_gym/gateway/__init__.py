"""The policy behind the APIs of OpenAI and Anthropic; `server` is the place to begin reading.

Nothing here is imported before somebody opens a gateway.
"""
