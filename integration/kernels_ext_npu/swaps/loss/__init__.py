"""The loss of language models without their logits."""
