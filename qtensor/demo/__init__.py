"""``qtensor demo``: quantize real weights in every format, run the model, compile it.

``weights`` loads matrices, ``model`` embeds sentences, ``sweep`` quantizes, ``compile_check``
compiles, ``report`` holds the results as data, ``render`` prints them, and ``run`` calls all of
these in order.
"""
