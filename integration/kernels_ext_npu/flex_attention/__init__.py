"""torch's ``flex_attention`` by the kernel: masks and changes of scores that are functions of indices."""
