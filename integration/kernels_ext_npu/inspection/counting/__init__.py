"""What a computation on fake tensors costs: launches, bytes, waits of the host, messages and memory.

``dispatch.py`` sees every operator and adds up ``counts.py``; ``phases.py`` says what runs meanwhile, such as a step of
training; ``repetition.py`` lets few of the layers that are alike run. The others say what fake tensors do not: their
values, where the host waits, which loops stand for an operator, what is a message, and when memory ends.
"""
