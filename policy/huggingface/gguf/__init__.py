"""GGUF files: weights, configuration and tokenizer in one file, as llama.cpp reads them.

O outputs and I inputs of a product.
"""
