"""SGLang: a client of its servers, their launcher, and a stand-in for tests."""
