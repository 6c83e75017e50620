"""What runs inside the sandbox's processes.

These modules import the standard library only and are loaded by a clean interpreter that knows
nothing of areal-gym, on this machine or in a container. `zygote` (the fork server) uses `jail`,
`landlock`, `seccomp` and `kernel` to shut its children in, `memory` to bound what they use
together, `tasks` to count them, `holding` to stop them between the calls of a session, and
`cleaning` to remove what they wrote; `cell` executes the snippets.
"""
