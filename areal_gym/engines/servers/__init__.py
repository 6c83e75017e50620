"""The common part of engines over servers; a module of each engine has its servers' protocol.

server_engine    the engine: arguments, start, streams          a subclass for each kind of server
turn_sampler     one turn: retries, other servers, continuations
server_pool      which servers serve, affinity of sessions, restarts
publication      requests wait while weights change, or while servers sleep
server_client    HTTP, and what a kind of server must be able to do (`ServerClient`)
launch           servers as child processes, ended with this one (`process_guard`)
"""
