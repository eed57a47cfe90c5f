"""``qtensor demo``: quantize real weights in every format, run the model, compile it.

``weights`` loads matrices, ``sweep`` quantizes them, ``model`` embeds the ``sentences``, and
``compile_check`` compiles. ``run`` calls these in order, ``render`` lays out the texts, and
``report`` holds all results.
"""
