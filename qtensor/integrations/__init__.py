"""Connect qtensor to libraries that users have; a module needs the library that it names.

The package ``gguf`` writes and reads files of llama.cpp, and needs no library.
"""
