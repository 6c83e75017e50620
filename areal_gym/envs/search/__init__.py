"""`search`: multi-hop questions with a search engine at hand.

world       the built-in corpus and its questions, generated
corpus      passages of files
bm25        a small index in memory, for the built-in corpus
tantivy     an index on disk, memory-mapped, for corpora of any size
retrievers  who answers queries: an index here, a server, a plugin
scoring     exact match, F1, citations
"""
