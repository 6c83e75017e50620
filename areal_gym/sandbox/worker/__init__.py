"""The code that runs inside the sandbox's processes.

A clean interpreter without areal-gym loads these modules, on this machine or in a container; they
import the standard library only. `zygote` is the fork server. It isolates its children (`jail`,
`private_root`, `landlock`, `seccomp`, `limits`, `kernel`), watches what they use (`usage`,
`groups`), stops them between the calls of a session (`holding`), and removes their files
(`cleaning`). `cell` executes the snippets.
"""
