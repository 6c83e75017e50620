"""The common part of engines over servers; each engine adds its servers' protocol.

server_engine    the engine: arguments, start, streams; a subclass for each kind of server
turn_sampler     samples one turn: retries, other servers, continuations
server_pool      tracks which servers serve: affinity of sessions, restarts
publication      lets requests wait while weights change, or while servers sleep
server_client    HTTP, and what a kind of server must be able to do (`ServerClient`)
launch           servers as child processes, ended with this one (`process_guard`)
"""
