"""The bodies of requests and answers: OpenAI's and Anthropic's APIs, and the tokenizer's."""
