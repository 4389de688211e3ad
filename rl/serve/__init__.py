"""`rl serve`: the HTTP API over a generator.

An `EngineThread` owns the generator. The event loop of the server reads bodies of requests
(`protocol`), hands token ids to the thread as a `Job`, and turns the tokens that come back into
text and JSON.
"""
