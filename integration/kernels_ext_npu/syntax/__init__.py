"""What the syntax trees of forwards say, where a module has to be rewritten or its calls counted."""
