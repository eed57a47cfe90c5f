"""``qtensor demo``: real weights through every format, a real forward pass, and a compile boundary.

``weights`` loads matrices, ``model`` runs sentences, ``sweep`` quantizes, ``compile_check`` crosses
``torch.compile``, ``report`` holds the results as data, ``render`` shows them, ``run`` puts them in order.
"""
