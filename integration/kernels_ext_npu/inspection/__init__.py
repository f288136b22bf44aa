"""What the kernels do for a model, found without its weights and without an NPU: ``kernels-ext-npu inspect``.

``subject.py`` finds a configuration and builds its model, ``inspecting.py`` counts it with and without kernels
(``counting/``), on a rank of a mesh if need be (``mesh.py``); ``printing.py`` and ``picture.py`` show what was found.
"""
