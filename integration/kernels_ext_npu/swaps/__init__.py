"""Each way by which a kernel gets into a model and out again, and why it cannot."""
