"""bitsandbytes' operators for NPUs, registered by bitsandbytes itself when it is imported.

Four bits are looked up two at a time: a byte names a row of a table of 256 pairs of float32, which times the scale of
its block is rounded once. That is bitsandbytes' own formula, and so are its values, bit for bit. The weights of
bitsandbytes' layers are made by the same lines where a kernel multiplies with them.
"""
