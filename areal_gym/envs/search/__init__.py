"""`search`: multi-hop questions with a search engine at hand.

generated_world   the built-in passages and their questions
corpus            passages of files, and a small index in memory, for the built-in ones
tantivy_index     an index on disk, memory-mapped, for corpora of any size
retrievers        what answers queries: an index here, a server, a plugin
search_env        the environment, and its scores: exact match, F1, citations
"""
