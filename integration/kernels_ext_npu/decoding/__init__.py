"""Decode in graphs: one launch for the forward of a token, where otherwise each operator is one of its own."""

GRAPHS = "NPUGraph"  # the class of graphs in torch.npu; as the backend of a CompileConfig it asks for them
