"""Connect qtensor to libraries that users have; each module needs the library that it names."""
